#!/usr/bin/env bash
# What the documents claim: all systems in one run, which fails if slat loses a comparison that it claims to win. The machine may
# have had other work at that moment, so a run that failed is made once more. Then the report of it, in a real browser.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${CARGO_TARGET_DIR:-target}/compare
rm -rf "$out"
mkdir -p "$out"
run() {
    cargo run --release -- compare --quick --json "$out/compare.json" --markdown "$out/compare.md"
}
run || { [ $? = 1 ] && run; }
# A figure that is looked for and not there would go unnoticed otherwise.
! grep -n 'Not measured: .*: no figure' "$out/compare.md"
SLAT_RESULTS=$out ci/report.sh
