#!/usr/bin/env bash
# All operations at once on overcommitted CPUs, with everything verified. For hours by hand:
# STRESS_SECONDS=7200 ci/stress.sh
set -euo pipefail
cd "$(dirname "$0")/.."
cargo run --release -- stress --duration "${STRESS_SECONDS:-60}s" --seed "${STRESS_SEED:-1}"
