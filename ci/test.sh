#!/usr/bin/env bash
# Runs the README's test command, which also runs the examples of the engine; then the tests of a
# feature.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo test --workspace
cargo test -p slat --features vm-memory --test vm_memory --test checked_memory --example vm_memory
cargo test -p slat --features vm-memory --doc
