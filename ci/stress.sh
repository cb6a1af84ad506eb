#!/usr/bin/env bash
# All operations at once on overcommitted CPUs, with everything verified. For hours by hand:
# STRESS_SECONDS=7200 ci/stress.sh
set -euo pipefail
cd "$(dirname "$0")/.."
cargo run --release -- stress --seconds "${STRESS_SECONDS:-15}" --seed "${STRESS_SEED:-1}"
