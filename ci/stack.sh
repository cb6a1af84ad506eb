#!/usr/bin/env bash
# How much stack the engine's calls take, as the compiler optimizes them: a table, and a failure if it is too much.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo test -p slat --release --test stack -- --nocapture
