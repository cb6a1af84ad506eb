#!/usr/bin/env bash
# What takes too long for each commit: loom with two preemptions more, and herd7 on the litmus tests
# (models/litmus/herd.py says what that needs).
set -euo pipefail
cd "$(dirname "$0")/.."
LOOM_MAX_PREEMPTIONS="${LOOM_MAX_PREEMPTIONS:-4}" LOOM_MORE_OF_THREE="${LOOM_MORE_OF_THREE:-2}" ci/loom.sh
models/litmus/run
