#!/usr/bin/env bash
# What takes too long for each commit. By hand and at night.
# - loom with two preemptions more, on what the store-load pairs and sequence locks are made of; with
#   three threads one more.
# - CI's loom, proofs and models once more, also if nothing has changed.
# - herd7 on the litmus tests (models/litmus/herd.py says what that needs).
set -euo pipefail
cd "$(dirname "$0")/.."
env -u LOOM_TESTS -u LOOM_MAX_PREEMPTIONS -u LOOM_MORE_OF_THREE ci/loom.sh again
export LOOM_TESTS="${LOOM_TESTS:-table::retire table::invalidation_seq table::in_flight shadow::page dirty::log dirty::ring slot::bitmap}"
LOOM_MAX_PREEMPTIONS="${LOOM_MAX_PREEMPTIONS:-4}" LOOM_MORE_OF_THREE="${LOOM_MORE_OF_THREE:-1}" ci/loom.sh
ci/proofs.sh again
ci/models.sh again
models/litmus/run
