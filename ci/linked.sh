#!/usr/bin/env bash
# What the smallest host links of the engine: nothing of shadow paging, which it does not use.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build -p slat --release --example smallest_host
host=target/release/examples/smallest_host
size -A "$host" | awk '$1 == ".text" { print ".text of the smallest host: " $2 " bytes" }'
symbols=$(nm -C "$host")
grep -q 'slat::vm::' <<<"$symbols" || { echo "it has no symbols of the engine"; exit 1; }
# `Error` names a paging register, and prints it.
! grep 'slat::shadow' <<<"$symbols" | grep -v 'slat::shadow::registers::PagingRegister as core::fmt::Debug'
