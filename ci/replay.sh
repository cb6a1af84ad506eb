#!/usr/bin/env bash
# Records what the engine does under shuttle, step by step, and replays it in the proofs: each must
# be a step that the proof allows (`models/proofs/replay.py`).
set -euo pipefail
cd "$(dirname "$0")/.."
steps=$PWD/target/replay.txt
rm -f "$steps".*
mkdir -p target
RUSTFLAGS="--cfg shuttle -D warnings" CARGO_TARGET_DIR=${REPLAY_TARGET_DIR:-target/shuttle} REPLAY_TO=$steps \
    cargo test -p slat --release --test shuttle_replay -- --test-threads 1
cd models/proofs
PYTHONDONTWRITEBYTECODE=1 "${REPLAY_PYTHON:-../../target/proofs-venv/bin/python}" replay.py "$steps"
