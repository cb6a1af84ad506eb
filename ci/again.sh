#!/usr/bin/env bash
# Runs the README's test command N times (`ci/again.sh N`), every other time with a load on each
# CPU, and then once on one CPU. It continues after a run that fails, prints where its output is,
# and fails at the end. By hand only: it takes long.
set -euo pipefail
cd "$(dirname "$0")/.."
nr_runs=${1:?how many times}
logs=${CARGO_TARGET_DIR:-target}/again
rm -rf "$logs"
mkdir -p "$logs"
cargo test --workspace --no-run

nr_failed=0
load=()
unload() {
    if [ ${#load[@]} != 0 ]; then kill "${load[@]}" 2>/dev/null || true; fi
    load=()
}
trap unload EXIT

# `NAME COMMAND...`
run() {
    local name=$1 log="$logs/$1.log"
    shift
    if "$@" cargo test --workspace --no-fail-fast >"$log" 2>&1; then
        echo "again: $name: passed"
    else
        echo "again: FAILED: $name, see $log"
        grep -E '^test .* FAILED$|panicked at' "$log" || tail "$log"
        nr_failed=$((nr_failed + 1))
    fi
}

for ((number = 1; number <= nr_runs; number++)); do
    if ((number % 2 == 0)); then
        for ((cpu = 0; cpu < $(nproc); cpu++)); do
            while :; do :; done &
            load+=($!)
        done
        run "$number-loaded" env
        unload
    else
        run "$number" env
    fi
done
# The first CPU that this process may use.
cpus=$(taskset -cp $$ | sed 's/.*: *//')
run one-cpu taskset -c "${cpus%%[,-]*}"
if [ $nr_failed != 0 ]; then
    echo "again: $nr_failed of $((nr_runs + 1)) runs failed"
    exit 1
fi
