#!/usr/bin/env bash
# Counts the instructions of a fault, and of a page that is mapped ahead, looked up or invalidated, by
# valgrind's callgrind, whose counts are repeatable. Fails if they are too many.
set -euo pipefail
cd "$(dirname "$0")/.."
nr_faults=65536
built=$(cargo test -p slat --release --bench fault_count --no-run 2>&1) || { echo "$built"; exit 1; }
binary=$(sed -n 's/.*Executable.*(\(.*\))$/\1/p' <<<"$built")

# `NAME MOST [ARGUMENT]`
count() {
    local name=$1 most=$2 nr_instructions
    shift 2
    nr_instructions=$(valgrind --tool=callgrind --callgrind-out-file=/dev/null --toggle-collect='*::touch*' \
        "$binary" "$nr_faults" "$@" 2>&1 | sed -n 's/.*Collected : //p')
    echo "$name: $((nr_instructions / nr_faults)) instructions a page, at most $most"
    ((nr_instructions / nr_faults <= most))
}
# With Rust 1.95: 239, 470, 244, 25, 38, 558, 481, 386. Another compiler may need a few more.
count "a page installed" 250
count "a page of 2 MiB installed" 490 blocks
count "write access restored" 265 log
count "a page mapped ahead" 30 prefault
count "a page looked up" 50 query
count "a page invalidated" 580 invalidate
count "a page installed in another of 32764 memslots" 490 slots
count "a page installed while 20 000 elsewhere are in flight" 405 held
