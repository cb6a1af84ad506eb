#!/usr/bin/env bash
# shuttle: random schedules of the whole engine.
set -euo pipefail
cd "$(dirname "$0")/.."
# Optimized across crates they run no faster, and take twice as long to build.
export CARGO_PROFILE_RELEASE_LTO=off
RUSTFLAGS="--cfg shuttle -D warnings" CARGO_TARGET_DIR=target/shuttle cargo test -p slat --release --test 'shuttle_*'
