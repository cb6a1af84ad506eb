#!/usr/bin/env bash
# Every bench of the engine, as shortly as it goes: it must run to its end. What it measures so is worth nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
benches=()
for bench in crates/slat/benches/*.rs; do
    benches+=(--bench "$(basename "$bench" .rs)")
done
# Without `cargo bench`'s argument `--bench` each takes its smallest sizes.
cargo test -p slat --release "${benches[@]}"
