#!/usr/bin/env bash
# What the checks need beyond Rust itself: its formatter and linter, and Python for the protocol's models.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo fmt --version >/dev/null 2>&1 || rustup component add rustfmt
cargo clippy --version >/dev/null 2>&1 || rustup component add clippy
if ! command -v python3 >/dev/null; then
    apt-get update -qq
    apt-get install -y -qq python3
fi
