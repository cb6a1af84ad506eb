#!/usr/bin/env bash
# A short fuzz: the operation sequences of the model test, with many more cases than in the ordinary
# run; then fuzzers that are guided by coverage, each for FUZZ_SECONDS. They begin with the inputs in
# fuzz/seeds. `ci/fuzz.sh build` only builds. `ci/fuzz.sh keep` adds to fuzz/seeds what longer runs
# found. The flags of the sanitizer are not stable ones.
set -euo pipefail
cd "$(dirname "$0")/.."

# `TARGET MOST_BYTES`
fuzz() {
    local target=$1 most_bytes=$2
    shift 2
    mkdir -p "fuzz/corpus/$target" "fuzz/seeds/$target"
    RUSTC_BOOTSTRAP=1 cargo fuzz run "$target" "$@" -- -max_len="$most_bytes" -len_control=0 "${flags[@]}"
}

# `FIRST SECOND`: two folders with inputs of all targets. What a target finds goes to the first.
all() {
    local target
    for target in operations:800 shadow:1203; do
        fuzz "${target%:*}" "${target#*:}" "$1/${target%:*}" "$2/${target%:*}"
    done
}

case ${1:-run} in
build) RUSTC_BOOTSTRAP=1 cargo fuzz build ;;
keep)
    # By lines that are reached, not by how often: few inputs.
    flags=(-set_cover_merge=1 -use_counters=0)
    all fuzz/seeds fuzz/corpus
    ;;
run)
    # The build of the tests, which exists already. For the whole workspace: otherwise the dependencies
    # would be built again.
    PROPTEST_CASES="${PROPTEST_CASES:-1000}" cargo test --workspace --test engine model::
    flags=(-max_total_time="${FUZZ_SECONDS:-15}")
    all fuzz/corpus fuzz/seeds
    ;;
*)
    echo "usage: ci/fuzz.sh [build | keep]" >&2
    exit 2
    ;;
esac
