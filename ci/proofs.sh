#!/usr/bin/env bash
# The proofs of the protocols, for any number of threads and pages. Two solvers prove each. Without any one rule a
# conjunct is lost, and for some rules a run loses a promise: those that `models/proofs/lost.txt` says.
#
# The verdict depends on these files alone, so they are proved once (ci/once.sh); again by hand: ci/proofs.sh again
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONDONTWRITEBYTECODE=1
packages=(z3-solver==5.4.1.0 cvc5==1.4.2)
venv=target/proofs
python=$PWD/$venv/bin/python

if ! "$python" -c 'import z3, cvc5' 2>/dev/null; then
    if ! { python3 -m venv "$venv" && "$venv/bin/pip" install --quiet "${packages[@]}"; }; then
        echo "proofs: FAILED: they need Python 3 with venv, and ${packages[*]} from a package index"
        exit 1
    fi
fi

# Behind the environment: ci/replay.sh uses it.
source ci/once.sh
once models/proofs/proved.txt "${1:-}" ci/proofs.sh models/proofs/*.py models/proofs/lost.txt

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
cd models/proofs

# A proof is a file that runs; others are parts of proofs. The longest first, so that no CPU is idle at the end.
mapfile -t names < <(grep -lE '^ *(prover\.)?main\(' -- *.py | grep -v '^prover' | xargs wc -c | sort -rn | sed -n 's/.* \(.*\)\.py$/\1/p')
for name in "${names[@]}"; do
    while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n || true; done
    { "$python" "$name.py" --all || echo "proofs: FAILED: $name.py"; } >"$results/$name" 2>&1 &
done
wait
for name in "${names[@]}"; do cat "$results/$name"; done
# Once more at the end, where it is seen, with the lines before it that say what was lost.
if grep -q FAILED -r "$results"; then
    echo "proofs: FAILED:"
    grep -h -B 10 FAILED -r "$results"
    exit 1
fi
cd ../..
record
