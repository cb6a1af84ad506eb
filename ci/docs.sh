#!/usr/bin/env bash
# Builds the documentation, with warnings denied.
set -euo pipefail
cd "$(dirname "$0")/.."
RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --document-private-items
RUSTDOCFLAGS="-D warnings" cargo doc -p slat --features vm-memory --no-deps --document-private-items
# As a user reads it: public text must not link to what is private.
RUSTDOCFLAGS="-D warnings" cargo doc -p slat --features vm-memory --no-deps
