#!/usr/bin/env bash
# Records what the engine does under shuttle, step by step, and replays it in the proofs: each must
# be a step that the proof allows (`models/proofs/replay.py`). What fails by itself is replayed, too.
# The schedules are the same in each run: `SHUTTLE_FIRST_SEED=N ci/replay.sh` tries others.
set -euo pipefail
cd "$(dirname "$0")/.."
# As in ci/shuttle.sh, whose build it is.
export CARGO_PROFILE_RELEASE_LTO=off
steps=$PWD/target/replay
rm -f "$steps".*
mkdir -p target
failed=0
RUSTFLAGS="${REPLAY_RUSTFLAGS:---cfg shuttle -D warnings}" CARGO_TARGET_DIR=${REPLAY_TARGET_DIR:-target/shuttle} \
    SHUTTLE_FIRST_SEED=${SHUTTLE_FIRST_SEED:-1} REPLAY_TO=$steps cargo test -p slat --release --test shuttle_replay -- --test-threads 1 || failed=1
cd models/proofs
PYTHONDONTWRITEBYTECODE=1 "${REPLAY_PYTHON:-../../target/proofs/bin/python}" replay.py "$steps"
[ "$failed" = 0 ]
