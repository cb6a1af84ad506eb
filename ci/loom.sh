#!/usr/bin/env bash
# loom: every interleaving of small models of single structures, up to a bound of preemptions. With
# a higher bound by hand, which takes minutes: LOOM_MAX_PREEMPTIONS=3 ci/loom.sh
# - Models of three threads have lower bounds of their own: LOOM_MORE_OF_THREE=1 adds one.
# - LOOM_TESTS='table::retire shadow::page' runs the unit tests with such names alone. A name that no
#   test has is an error.
# ci/nightly.sh sets all three.
#
# The verdict depends on the engine's source, loom's tests and the versions of dependencies alone, so they are checked once
# (ci/once.sh); again by hand: ci/loom.sh again
set -euo pipefail
cd "$(dirname "$0")/.."
# As in ci/shuttle.sh.
export CARGO_PROFILE_RELEASE_LTO=off
export RUSTFLAGS="--cfg loom -D warnings" CARGO_TARGET_DIR=target/loom LOOM_MAX_PREEMPTIONS="${LOOM_MAX_PREEMPTIONS:-2}"
if [ -n "${LOOM_TESTS:-}" ]; then
    read -ra tests <<<"$LOOM_TESTS"
    listed="$(cargo test -q -p slat --release --lib -- --list)"
    for test in "${tests[@]}"; do
        grep -qF -- "$test" <<<"$(grep ': test$' <<<"$listed")" || {
            echo "loom: FAILED: no test has a name with $test"
            exit 1
        }
    done
    cargo test -p slat --release --lib -- "${tests[@]}"
    exit
fi
# Other bounds than CI's have no record.
if [ "$LOOM_MAX_PREEMPTIONS" = 2 ] && [ -z "${LOOM_MORE_OF_THREE:-}" ]; then
    source ci/once.sh
    mkdir -p target/loom
    cargo tree -q -p slat -e normal --depth 1 --prefix none --format '{p} {f}' | sed 's, (/.*),,' | LC_ALL=C sort -u >target/loom/versions.txt
    mapfile -t sources < <(find crates/slat/src -name '*.rs' | LC_ALL=C sort)
    once ci/loom_passed.txt "${1:-}" ci/loom.sh target/loom/versions.txt crates/slat/tests/loom_*.rs "${sources[@]}"
fi
cargo test -p slat --release --lib loom
cargo test -p slat --release --test 'loom_*'
[ -z "${record_file:-}" ] || record
