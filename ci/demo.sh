#!/usr/bin/env bash
# Runs the README's first command: the demonstration must run, and verify its results.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo run --release -- demo
