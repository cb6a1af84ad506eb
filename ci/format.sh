#!/usr/bin/env bash
# Formatting as rustfmt.toml says.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo fmt --all --check
