#!/usr/bin/env bash
# Installs what the checks need besides Rust itself: its formatter and linter, its targets for the
# hypervisor and its Linux on Arm and RISC-V (of rustup; other checks skip what is missing), the fuzzer
# with a C++ compiler for its runtime, Python for the models and proofs, valgrind for the count of a
# fault's instructions, a browser for the report, and nginx and systemd's programs for the pager.
# (Where systemd runs the machine, Debian's package of nginx also starts it.) ci/deny.sh installs its own
# tool, beside the tests.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo fmt --version >/dev/null 2>&1 || rustup component add rustfmt
cargo clippy --version >/dev/null 2>&1 || rustup component add clippy
targets=(aarch64-unknown-none-softfloat aarch64-unknown-linux-gnu riscv64imac-unknown-none-elf riscv64gc-unknown-linux-gnu)
! command -v rustup >/dev/null || rustup target add "${targets[@]}" || echo "setup: skipped: these targets of Rust"
cargo fuzz --version >/dev/null 2>&1 || cargo install cargo-fuzz --locked
missing=()
command -v python3 >/dev/null || missing+=(python3)
python3 -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
command -v valgrind >/dev/null || missing+=(valgrind)
command -v c++ >/dev/null || missing+=(g++)
command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || missing+=(chromium)
command -v nginx >/dev/null || [[ -x /usr/sbin/nginx ]] || missing+=(nginx)
command -v systemd-socket-activate >/dev/null || missing+=(systemd)
if ((${#missing[@]})); then
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${missing[@]}"
fi
