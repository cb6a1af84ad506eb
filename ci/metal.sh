#!/usr/bin/env bash
# The hypervisor on the engine under QEMU, with AMD's nested paging, at Arm's EL2 and in RISC-V's
# HS-mode: the guest that accesses memory at random, with its page tables walked once more by the
# software machine's walkers, and Linux; on AMD's also a guest that runs wild, and a Linux that goes
# from one machine to another. Where emulator or kernel cannot be had, this is skipped. A run takes
# some 20 s; beside other load it may take minutes. More by hand:
# METAL_OPERATIONS=1000000 METAL_TIMEOUT=5h ci/metal.sh; or one machine alone: ci/metal.sh arm
set -euo pipefail
cd "$(dirname "$0")/.."
LOST="the emulator has lost the state of the guest"
said=$(mktemp)
trap 'rm -f "$said"' EXIT
machines=("$@"); [ $# != 0 ] || machines=(svm arm riscv)
for machine in "${machines[@]}"; do
    # Of Arm and RISC-V less: each emulated CPU is slower there.
    operations=2000 words="quiet slat.rounds=2 slat.pages=4000"
    [ "$machine" != svm ] || operations=10000 words=quiet
    guests=(suite linux)
    [ "$machine" != svm ] || guests+=(wild migration)
    for guest in "${guests[@]}"; do
        cpus=2
        case "$guest" in wild|migration) cpus=1 ;; esac
        amount=(--operations "${METAL_OPERATIONS:-$operations}"); [ "$guest" != migration ] || amount=()
        # The kernel says what it has to say in many lines.
        append=()
        case "$guest" in linux|migration) append=(--append "$words") ;; esac
        # QEMU with threads may lose a guest's state (docs/metal.md). Then the run says nothing.
        for try in first second last; do
            status=0
            cargo run --release --quiet -- metal --machine "$machine" --guest "$guest" --cpus "$cpus" "${amount[@]}" \
                --timeout "${METAL_TIMEOUT:-4m}" "${append[@]}" 2>&1 | tee "$said" || status=$?
            [ "$status" = 1 ] && grep -q "$LOST" "$said" || break
            echo "metal: the emulator lost the guest's state in the $try try"
        done
        if [ "$status" = 3 ]; then
            echo "metal: skipped: $machine, $guest: the line above says what is missing"
        elif [ "$status" != 0 ]; then
            exit "$status"
        fi
    done
done
