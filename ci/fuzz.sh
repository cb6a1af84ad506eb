#!/usr/bin/env bash
# A short fuzz: the operation sequences of the model test, with many more cases than in the ordinary
# run; then sequences of a fuzzer that is guided by coverage (for FUZZ_SECONDS). The flags of the
# sanitizer are not stable ones.
set -euo pipefail
cd "$(dirname "$0")/.."
# The build of the tests, which exists already. For the whole workspace: otherwise the dependencies
# would be built again.
PROPTEST_CASES="${PROPTEST_CASES:-1000}" cargo test --workspace --test model
RUSTC_BOOTSTRAP=1 cargo fuzz run operations -- -max_total_time="${FUZZ_SECONDS:-15}" -len_control=0 -max_len=800
