#!/usr/bin/env bash
# shuttle: random schedules of the whole engine.
set -euo pipefail
cd "$(dirname "$0")/.."
RUSTFLAGS="--cfg shuttle -D warnings" CARGO_TARGET_DIR=target/shuttle cargo test -p slat --release --test 'shuttle_*'
