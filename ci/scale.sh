#!/usr/bin/env bash
# The modelled machine: all oracles on 96 CPUs for a minute. Two runs of one seed must have the same
# trace. (The tests of the command run each system.)
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
