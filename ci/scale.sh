#!/usr/bin/env bash
# The modelled machine: all oracles on 96 CPUs for a minute, and the predictions with little memory.
# Two runs of one seed must have the same trace.
set -euo pipefail
cd "$(dirname "$0")/.."
slat=(cargo run --release --quiet -- scale --seed 1)
"${slat[@]}" --check --seconds "${SCALE_SECONDS:-60}"
hashes() {
    "${slat[@]}" --system parallel-faults --cpus 1,96 --bytes 256K --json - 2>/dev/null | grep -o '"trace_hash": *"[^"]*"'
}
first=$(hashes)
again=$(hashes)
[ -n "$first" ] && [ "$first" = "$again" ] || { echo "scale: FAILED: two runs of one seed differ"; exit 1; }
"${slat[@]}" --cpus 1,8,96 --bytes 256K
