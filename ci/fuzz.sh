#!/usr/bin/env bash
# A short fuzz: the operation sequences of the model test, with many more cases than the ordinary run; then such that a
# fuzzer makes, guided by coverage (FUZZ_SECONDS of them). The flags of the sanitizer are not stable ones.
set -euo pipefail
cd "$(dirname "$0")/.."
# The tests' own build, which is there already: of the whole workspace, or the dependencies would be built anew.
PROPTEST_CASES="${PROPTEST_CASES:-1000}" cargo test --workspace --test model
RUSTC_BOOTSTRAP=1 cargo fuzz run operations -- -max_total_time="${FUZZ_SECONDS:-15}" -len_control=0 -max_len=800
