#!/usr/bin/env bash
# The README's other command: the demonstration must run, and verify what it ran.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo run --release
