#!/usr/bin/env bash
# The hypervisor on the engine under QEMU, with AMD's nested paging, at Arm's EL2 and in RISC-V's
# HS-mode: the guest that accesses memory at random, with its page tables walked once more by the
# software machine's walkers, and Linux; on AMD's also a guest that runs wild, and a Linux that goes
# from one machine to another. Where emulator or kernel cannot be had, this is skipped. On two free
# CPUs a run takes some 20 s, Linux on AMD's 40 s, and the suite there 80 s: 10^5 operations, half of
# them on a machine of two nodes. AMD's emulators go in pairs, since each runs its CPUs in turns.
# Beside other load it may take minutes. More by hand:
# METAL_OPERATIONS=1000000 METAL_TIMEOUT=5h ci/metal.sh; or one machine alone: ci/metal.sh arm
set -euo pipefail
cd "$(dirname "$0")/.."

# `MACHINE GUEST ARGUMENT...`
run() {
    local machine=$1 guest=$2 status=0
    shift 2
    cargo run --release --quiet -- metal --machine "$machine" --guest "$guest" \
        --timeout "${METAL_TIMEOUT:-4m}" "$@" || status=$?
    if [ "$status" = 3 ]; then
        echo "metal: skipped: $machine, $guest: the line above says what is missing"
    elif [ "$status" != 0 ]; then
        return "$status"
    fi
}

machines=("$@"); [ $# != 0 ] || machines=(svm arm riscv)
for machine in "${machines[@]}"; do
    if [ "$machine" = svm ]; then
        half=$((${METAL_OPERATIONS:-100000} / 2))
        run svm suite --cpus 2 --operations "$half" --nodes 2 &
        beside=$!
        run svm suite --cpus 2 --operations "$half" --seed 2 || { wait "$beside" || :; exit 1; }
        wait "$beside"
        run svm linux --cpus 2 --operations "${METAL_OPERATIONS:-10000}" --append quiet &
        beside=$!
        {
            run svm wild --operations "${METAL_OPERATIONS:-10000}" &&
                run svm migration --cpus 1 --append quiet
        } || { wait "$beside" || :; exit 1; }
        wait "$beside"
    else
        # Less: each emulated CPU is slower there.
        run "$machine" suite --cpus 2 --operations "${METAL_OPERATIONS:-2000}"
        run "$machine" linux --cpus 2 --operations "${METAL_OPERATIONS:-2000}" --append "quiet slat.rounds=2 slat.pages=4000"
    fi
done
