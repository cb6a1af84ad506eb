#!/usr/bin/env bash
# Lints, with warnings denied. (ci/loom.sh and ci/shuttle.sh deny the compiler's own warnings.)
set -euo pipefail
cd "$(dirname "$0")/.."
cargo clippy --workspace --all-targets -- -D warnings
# The engine as an embedder has it, without the baselines.
cargo clippy -p slat --lib -- -D warnings
# The pager's library as the machine has it, without all that serves VMs of KVM.
cargo clippy -p slat-pager --lib --no-default-features -- -D warnings
# The hypervisor's image, which nothing unwinds in.
cargo clippy -p slat-metal --bin slat-metal --features image --profile metal -- -D warnings
# The same for other architectures, and the first processes of a Linux there.
foreign() {
    local target=$1
    if [ -d "$(rustc --print target-libdir --target "$target")" ]; then
        cargo clippy --target "$@" -- -D warnings
    else
        echo "clippy: skipped: Rust has no target $target here: rustup target add $target"
    fi
}
for target in aarch64-unknown-none-softfloat riscv64imac-unknown-none-elf; do
    foreign "$target" -p slat-metal --bin slat-metal --features image --profile metal
done
for target in aarch64-unknown-linux-gnu riscv64gc-unknown-linux-gnu; do
    foreign "$target" -p slat-guest-init -p slat-kvm-init
done
