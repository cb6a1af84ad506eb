#!/usr/bin/env bash
# The explicit-state models of the protocols. With all rules no violation is found; without any one
# rule a violation is found.
set -euo pipefail
cd "$(dirname "$0")/../models"
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

check zap no-number number-before-publish check-before-read no-inherit refine-no-inherit number-again number-passed \
    huge-ignores-published no-flush flush-if-changed free-before-flush table-before-flush split-no-dirty tracked-clean \
    blind-exchange report-late unlink-full
check levels no-freeze-upper freeze-early leave-linked old-number
check slots no-number number-before-publish old-number withdraw-before-set check-before-read slots-before-ranges
check published see-torn number-before-fill blind-claim check-before-read withdraw-early withdraw-claim-first \
    withdraw-keeps-claim withdraw-keeps-active first-chunk-only
check upgrade no-counter counter-before-exchange counter-after-published at-most
check recover recover-no-freeze freeze-no-dirty cancel-unreported cancel-no-freeze report-first cancel-old-number retire-first \
    wait-on-broken
check recover_log no-published number-first slot-first copy-W no-reread flags-first mark-one log-bits no-D-mark report-then-swap \
    swap-blindly retire-first cancel-no-freeze skip-no-flush
check recover_levels walk-again not-down table-as-nothing broken-first broken-as-table no-freeze-below give-early keep keep-below
check lazy protect-if-unprotected flush-if-changed skip-protected blind-unprotect no-clear mark-if-unprotected flags-first flags-once \
    install-no-mark protect-first publish-late path-first mark-first clear-late
check generation no-window three-generations admit-outside renew-always renew-blindly turn-again two-guards
check summary summary-first word-first store-zero mask-clears never-again look-away
check dirty_bit no-restart restart-first log-late clear-first no-flush clear-all mark-late mark-once blind-zap flags-first \
    fault-no-mark publish-late keep-dirty
check break recover-no-flush split-no-flush split-at-once cancel-plain install-no-flush flush-first oom-plain drop-flag flush-any keep-flag \
    refine-unflushed refine-published instead-plain reuse split-freezes split-copies-W split-mark-never \
    split-marks-first split-unreported no-freeze mark-never
check userfault no-number no-zap flush-if-changed no-flush flush-first flag-last number-first withdraw-first store-first \
    bit-first slot-first ranges-last resolve-first attribute-first clear-first counter-last no-counter huge-while-on \
    huge-beside run-bits run-attributes one-attribute no-fence number-if-empty pass-broken bare-unlink bare-plain \
    drop-odd swap-only recover-no-counter recover-no-flag recover-no-ranges recover-no-attributes \
    recover-one-attribute recover-attributes-first
check shadow no-reread invlpg-no-lock no-local-flush local-flush-if-changed fault-keeps fault-lock-blind \
    fault-skip-syncing unsync-late bitmap-late write-while-syncing pass-syncing no-flush flush-first flush-if-cleared compare-first no-seq drop-if-synced \
    register-late link-first no-link-sync part-lock unregister-first walk-no-lock keep-dead-root root-not-synced \
    no-second-reread create-late leaf-first store-blind visit-if-zapped visit-first flush-before-visit no-visit \
    skip-empty leaves-before-lock visit-one-size insert-first number-late number-first no-huge no-clear \
    no-track-flush ready-early found-is-ready ignore-pending pending-first count-late settle-first uncounted \
    narrow-uncounted invlpg-local store-first drop-no-lock no-writers no-emulated-flush page-while-pending \
    no-step-check no-generation same-generation link-no-recheck end-sync-blindly no-own-count dead-late unlink-late \
    zap-no-lock pin-no-generation free-before-flush

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
! grep -q '^models: FAILED' -r "$results"
