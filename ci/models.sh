#!/usr/bin/env bash
# The explicit-state models of the protocols. With all rules no violation is found; without any one
# rule a violation is found.
#
# The verdict depends on these files alone, so they are checked once (ci/once.sh); again by hand: ci/models.sh again
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/once.sh
once models/checked.txt "${1:-}" ci/models.sh models/*.py
cd models
export PYTHONDONTWRITEBYTECODE=1
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT

# One run: `MODEL [RULE]`. Prints its result alone, without other output. A model that does not run
# at all has found nothing: its output must name the violation.
run() {
    local model=$1 rule=${2:-} log="$results/$1-${2:-all}.log" status=0
    python3 "$model.py" $rule >"$log" 2>&1 || status=$?
    if [ -z "$rule" ] && [ "$status" = 0 ]; then
        echo "$model.py: $(wc -l <"$log") configurations, $(awk '{ n += $2 } END { print n }' "$log") states, nothing wrong"
    elif [ -n "$rule" ] && [ "$status" = 1 ] && grep -q ' VIOLATION: ' "$log"; then
        echo "$model.py notices $rule:$(sed -n 's/.* VIOLATION://p' "$log")"
    else
        sed 's/^/    /' "$log"
        echo "models: FAILED: $model.py $rule"
    fi
}

# All models, each `MODEL RULE...`.
models=()
check() {
    models+=("$*")
}

check zap table-before-flush split-no-dirty tracked-clean blind-exchange report-late
check recover recover-no-freeze freeze-no-dirty cancel-unreported report-first wait-on-broken
check recover_log log-bits no-D-mark report-then-swap swap-blindly
check recover_levels walk-again not-down table-as-nothing broken-first broken-as-table no-freeze-below keep
check break keep-flag reuse split-freezes split-copies-W split-unreported no-freeze
check userfault clear-first run-bits run-attributes no-fence pass-broken bare-plain drop-odd recover-no-counter recover-no-flag recover-no-ranges recover-no-attributes recover-one-attribute recover-attributes-first
check shadow wait-for-writer wait-for-syncing part-lock walk-no-lock keep-dead-root root-not-synced insert-first invlpg-local drop-no-lock page-while-pending end-sync-blindly

# Runs in parallel, one on each CPU: first the models with all rules, which take longest, so that no
# CPU is idle at the end.
start() {
    local name=$1-${2:-all}
    while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do wait -n || true; done
    run "$@" >"$results/$name" &
}
at_once=$(nproc)
for line in "${models[@]}"; do start "${line%% *}"; done
for line in "${models[@]}"; do
    read -r model rules <<<"$line"
    for rule in $rules; do start "$model" "$rule"; done
done
wait
for line in "${models[@]}"; do
    read -r model rules <<<"$line"
    for rule in all $rules; do cat "$results/$model-$rule"; done
done
if grep -q '^models: FAILED' -r "$results"; then exit 1; fi
cd ..
record
