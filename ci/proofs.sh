#!/usr/bin/env bash
# The proofs of the protocols, for any number of threads and pages. Two solvers prove each; without any one rule a
# conjunct is lost, and for some rules a shortest run to the loss of a promise is found.
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

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
cd models/proofs

# One run: `PROOF [OPTION]`.
run() {
    local name=$1 option=${2:-} status=0 began=$SECONDS
    "$python" "$name.py" $option >"$results/$name$option" 2>&1 || status=$?
    [ "$status" = 0 ] || echo "proofs: FAILED: $name.py $option" >>"$results/$name$option"
    echo "    $name.py $option: $((SECONDS - began)) s" >>"$results/$name$option"
}

# A proof is a file that runs; others are parts of proofs.
mapfile -t names < <(grep -lE '^ *(prover\.)?main\(' -- *.py | grep -v '^prover' | sed 's/\.py$//')
options=(--cvc5 '' --rules --traces)
for option in "${options[@]}"; do
    for name in "${names[@]}"; do
        while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n || true; done
        run "$name" "$option" &
    done
done
wait
for name in "${names[@]}"; do
    for option in '' --cvc5 --rules --traces; do cat "$results/$name$option"; done
done
! grep -q 'FAILED' -r "$results"
