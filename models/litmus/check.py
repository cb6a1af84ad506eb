#!/usr/bin/env python3
"""Checks that the litmus tests and the engine name the same operations: what `ci/litmus.sh` runs.

- Each operation that a test names is in the source, with the order of the test. So a weakened order fails here.
- Operations of one function stand in the source in the order of the test.
- Each operation of the engine with an order is named by a test, and each fence of the machine.
- The table of verdicts is that of the tests.
"""

import sys

import source
import table
import tests

#: What makes the fences of their names, as it must be: see `crates/slat/src/sync/mod.rs`.
DEFINITIONS = {
    "sync/mod.rs full_fence fence": ("SeqCst",),
    "sync/mod.rs full_fence fence#2": ("SeqCst",),
    "sync/mod.rs fence_against_remote_barrier compiler_fence": ("SeqCst",),
    "sync/mod.rs fence_against_remote_barrier full_fence": ("full_fence",),
    "sync/mod.rs fence_after_rmw compiler_fence": ("SeqCst",),
    "sync/mod.rs fence_after_rmw full_fence": ("full_fence",),
}
METHODS = {
    "load": ("load", "marks", "page_at"),
    "store": ("store",),
    "rmw": ("swap", "fetch_add", "fetch_sub", "fetch_or", "fetch_and", "fetch_max"),
    "cas": ("compare_exchange", "compare_exchange_weak", "fetch_update"),
    "fence": ("fence", *source.FENCE_CALLS),
    "barrier": (source.BARRIER,),
}
#: Crates and files with tests of their own here, of which not each order is named. Each fence is.
OTHERS = ("slat-machine/src", "slat-metal/src/cpus.rs", "slat-pager/src/delivery")
#: Fences there that belong to no protocol between CPUs.
UNNAMED = {
    "slat-machine/memory/mod.rs FixedMemory::is_lost fence": "an access that the kernel released, and a mark",
    "slat-machine/vm/guest/ledger.rs touch fence": "a guest's count of discards, to judge what it reads",
}


def problems():
    sites = {str(site): site for site in source.sites()}
    others = {str(site): site for folder in OTHERS for site in source.sites(folder)}
    named = set()
    for place, orders in DEFINITIONS.items():
        named.add(place)
        if place not in sites or sites[place].orders != orders:
            yield f"{place} is not {', '.join(orders)}"
    for test in tests.ALL:
        for ops in test.threads:
            last = {}
            for op in ops:
                for place in op.at:
                    named.add(place)
                    site = sites.get(place) or others.get(place)
                    if not site:
                        yield f"{test.name}: there is no {place}"
                        continue
                    method = site.call.split("#")[0].split(".")[-1]
                    if method not in METHODS[op.kind]:
                        yield f"{test.name}: {place} is no {op.kind}"
                    expected = (op.order, op.failure) if op.kind == "cas" else (op.order,)
                    if site.orders != expected:
                        found = ", ".join(site.orders)
                        yield f"{test.name}: {place} is {found}, and the test has {', '.join(expected)}"
                    function = site.file, site.function
                    if len(op.at) == 1 and last.get(function, -1) > site.offset:
                        yield f"{test.name}: {place} stands before what the test has before it"
                    last[function] = site.offset
    for place, site in sites.items():
        if place not in named and any(order != "Relaxed" for order in site.orders):
            yield f"no test has {place} ({', '.join(site.orders)})"
    for place, site in others.items():
        if site.call.startswith("fence") and place not in named and place not in UNNAMED:
            yield f"no test has {place} ({', '.join(site.orders)})"
    if table.PATH.read_text() != table.text():
        yield f"{table.PATH.name} is not what `models/litmus/run --write-table` writes"


def main():
    found = sorted(set(problems()))
    for problem in found:
        print("litmus: FAILED:", problem)
    if not found:
        nr_places = len({place for test in tests.ALL for ops in test.threads for op in ops for place in op.at})
        print(f"litmus: {len(tests.ALL)} tests name {nr_places} operations, as the source has them")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
