#!/usr/bin/env bash
# Builds the documentation, with warnings denied.
set -euo pipefail
cd "$(dirname "$0")/.."
export RUSTDOCFLAGS="-D warnings"
cargo doc --workspace --all-features --no-deps --document-private-items
# As a user reads it: public text must not link to what is private.
cargo doc -p slat --features vm-memory --no-deps
