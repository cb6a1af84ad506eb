#!/usr/bin/env bash
# Licenses, sources and versions of all dependencies (deny.toml). Known vulnerabilities are checked where the
# database of advisories can be fetched: `cargo deny check advisories`.
set -euo pipefail
cd "$(dirname "$0")/.."
# Two minutes on two CPUs, the first time. Optimized it would take five to build, and runs a second.
cargo deny --version >/dev/null 2>&1 ||
    CARGO_PROFILE_RELEASE_OPT_LEVEL=0 CARGO_PROFILE_RELEASE_DEBUG=none CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 \
        cargo install cargo-deny@0.18.3 --locked --no-default-features
cargo deny --workspace --all-features check --hide-inclusion-graph bans licenses sources
