#!/usr/bin/env bash
# The litmus tests name the engine's atomic operations as the code has them: a weakened order, or a
# fence that is left out, fails. In seconds and without herd7; models/litmus/run judges the tests.
set -euo pipefail
cd "$(dirname "$0")/../models/litmus"
PYTHONDONTWRITEBYTECODE=1 python3 check.py
