#!/usr/bin/env bash
# Measures the stack of the engine's calls in optimized builds: a table, and a failure if it is too
# much.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo test -p slat --release --test stack -- --nocapture
