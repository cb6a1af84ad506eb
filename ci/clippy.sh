#!/usr/bin/env bash
# Lints, with warnings denied. (ci/loom.sh and ci/shuttle.sh deny the compiler's own warnings.)
set -euo pipefail
cd "$(dirname "$0")/.."
cargo clippy --workspace --all-targets -- -D warnings
# The engine as an embedder has it, without the baselines.
cargo clippy -p slat --lib -- -D warnings
# The hypervisor's image, which nothing unwinds in.
cargo clippy -p slat-metal --bin slat-metal --features image --profile metal -- -D warnings
