#!/usr/bin/env bash
# The explicit-state models of the protocol: the rules must hold, and each rule that is left out must be missed.
set -euo pipefail
cd "$(dirname "$0")/../models"
python3 stamps.py
for rule in no-stamp-empty stamp-before-publish check-before-read no-inherit recover-no-freeze; do
    if python3 stamps.py "$rule" >/dev/null; then
        echo "models: stamps.py did not notice $rule" >&2
        exit 1
    fi
    echo "stamps.py notices $rule"
done
# Lazy protection, a later way to log, is modelled already: with both of its rules no page is lost; without either one is.
python3 lazy.py | awk '
    { kept = /flush by bits +bump always/; lost = / lost: / }
    kept && lost { print "models: lazy.py loses a page with both rules: " $0; bad = 1 }
    !kept && lost { missed++ }
    END { if (bad || !missed) exit 1; print "lazy.py: nothing lost with both rules, " missed " losses without" }'
