#!/usr/bin/env bash
# Runs the README's test command, which also runs the examples of the engine.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo test --workspace
