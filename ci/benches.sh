#!/usr/bin/env bash
# Runs every bench of the engine with its smallest sizes: it must run to its end. The figures mean
# nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
benches=()
for bench in crates/slat/benches/*.rs; do
    benches+=(--bench "$(basename "$bench" .rs)")
done
# Without `cargo bench`'s argument `--bench` each takes its smallest sizes.
cargo test --workspace "${benches[@]}"
