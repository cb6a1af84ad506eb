#!/usr/bin/env bash
# The README's test command, which runs the examples of the engine, too; then what is behind a feature.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo test --workspace
cargo test -p slat --features vm-memory --test vm_memory --test checked_memory --example vm_memory
cargo test -p slat --features vm-memory --doc
