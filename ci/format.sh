#!/usr/bin/env bash
# Checks the formatting of rustfmt.toml.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo fmt --all --check
