#!/usr/bin/env bash
# A short fuzz: the operation sequences of the model test, with many more cases than the ordinary run.
set -euo pipefail
cd "$(dirname "$0")/.."
PROPTEST_CASES="${PROPTEST_CASES:-2000}" cargo test -p slat --release --test model
