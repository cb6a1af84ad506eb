#!/usr/bin/env bash
# Checks the page of `slat report` in a real browser: pages of the sample results, and of those in
# the folder $SLAT_RESULTS if there are any. report_browser.py checks what a person would notice;
# the screenshots are kept in target/report.
set -euo pipefail
cd "$(dirname "$0")/.."

for browser in chromium chromium-browser google-chrome; do
    if command -v "$browser" >/dev/null; then break; fi
done

out=${CARGO_TARGET_DIR:-target}/report
samples=crates/slat-cli/tests/data
cargo build --release --bin slat
slat=${CARGO_TARGET_DIR:-target}/release/slat
rm -rf "$out"
mkdir -p "$out"

# All systems, all systems before and after, and each experiment.
pages=()
page() {
    local name=$1
    shift
    "$slat" report "$@" -o "$out/$name.html"
    pages+=("$out/$name.html")
}
page compare "$samples/compare.json"
page before_after "$samples/compare.json" "$samples/compare_after.json"
page experiments "$samples"/{parallel_faults,userfault,dirty_log,numa_split,shadow,stress}.json
if [[ -n ${SLAT_RESULTS:-} ]]; then
    for result in "$SLAT_RESULTS"/*.json; do
        page "results_$(basename "$result" .json)" "$result"
    done
fi
python3 ci/report_browser.py "$browser" "$out" "${pages[@]}"
