#!/usr/bin/env bash
# Lints, with warnings denied, in the normal build and in those of the model checkers.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo clippy --workspace --all-targets -- -D warnings
cargo clippy -p slat --features vm-memory --lib --test vm_memory --test checked_memory --example vm_memory -- -D warnings
RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo clippy -p slat --lib --tests -- -D warnings
RUSTFLAGS="--cfg shuttle" CARGO_TARGET_DIR=target/shuttle cargo clippy -p slat --lib --tests -- -D warnings
