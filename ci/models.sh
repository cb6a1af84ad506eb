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
