"""The store-load pairs of the software machine and of the bare-metal hypervisor (`docs/protocols/`: delivery rings,
TLB flush).
"""

from shape import Test, Weaker, cas, fence, load, rmw, store

RINGS = "slat-pager/delivery/ring.rs"
RESOLVER = "slat-pager/delivery/resolver.rs"
COMMIT = "slat-machine/hardware/commit/mod.rs"
WAITING = "slat-machine/hardware/commit/waiting.rs"
RECORDS = "slat-machine/hardware/commit/records.rs"
ARRIVALS = "slat-machine/paging/arrivals.rs"
CPUS = "slat-metal/cpus.rs"
NEW_GENERATION = rmw("generation", 1, "SeqCst", at=f"{COMMIT} FlushDomain::complete_flush generation.fetch_max")

TESTS = [
    Test(
        "ring-sleep", "A side sleeps and misses a new entry; the other side misses that it sleeps.", (
            (store("asleep", 1, "Relaxed", at=f"{RINGS} SharedRings::announce_sleep flag.store"),
             fence("SeqCst", at=f"{RINGS} SharedRings::announce_sleep fence"), load("entry", "Relaxed", "entry")),
            (store("entry", 1, "Relaxed"), fence("SeqCst", at=f"{RINGS} SharedRings::take_sleeper fence"),
             load("asleep", "Relaxed", "asleep", at=f"{RINGS} SharedRings::take_sleeper flag.load")),
        ), "0:entry=0 1:asleep=0", (Weaker("0.1=none", "alrx"), Weaker("1.1=none", "alrx")),
    ),
    Test(
        "ring-deferred", "A request is deferred because its page is claimed; the claimer misses that it is deferred.", (
            (rmw("deferred", 1, "Relaxed", at=f"{RESOLVER} Shard::sort nr_deferred.fetch_add"),
             fence("SeqCst", at=f"{RESOLVER} Shard::sort fence"),
             rmw("claims", 2, "Acquire", "claims", at=f"{RESOLVER} Resolver::try_claim claims.fetch_or")),
            (rmw("claims", 1, "Release", at=f"{RESOLVER} Resolver::release claims.fetch_and"),
             fence("SeqCst", at=f"{RESOLVER} Resolver::release fence"),
             load("deferred", "Relaxed", "deferred", at=f"{RESOLVER} Resolver::release nr_deferred.load")),
        ), "0:claims=0 1:deferred=0", (Weaker("0.1=none", "alr"), Weaker("1.1=none", "alr")),
    ),
    Test(
        "arrival-sleep", "A thread sleeps for a page that has arrived; its arrival misses that it sleeps.", (
            (rmw("asleep", 1, "SeqCst", at=f"{ARRIVALS} Arrivals::sleep nr_sleeping.fetch_add"),
             load("missing", "SeqCst", "missing", at=f"{ARRIVALS} Arrivals::is_missing words.load")),
            (rmw("missing", 1, "SeqCst", at=f"{ARRIVALS} Arrivals::publish words.fetch_and"),
             load("asleep", "SeqCst", "asleep", at=f"{ARRIVALS} Arrivals::publish nr_sleeping.load")),
        ), "0:missing=0 1:asleep=0", (Weaker("0.1=Relaxed", "a"), Weaker("1.0=Relaxed", "al")),
    ),
    Test(
        "flush-enter", "A CPU enters the guest with the old generation, and the flush does not count it.", (
            (rmw("inside", 1, "SeqCst", at=f"{COMMIT} Port::enter_guest_mode nr_in_guest_mode.fetch_add"),
             fence("SeqCst", at=f"{COMMIT} Port::enter_guest_mode fence"),
             load("generation", "Acquire", "generation", at=f"{COMMIT} Port::generation generation.load")),
            (NEW_GENERATION,
             fence("SeqCst", at=f"{COMMIT} FlushDomain::complete_flush fence"),
             load("inside", "Acquire", "inside", at=f"{COMMIT} FlushDomain::complete_flush nr_in_guest_mode.load")),
        ), "0:generation=0 1:inside=0", (Weaker("0.1=none", "a"), Weaker("1.1=none", "a")),
    ),
    Test(
        "flush-gate", "A CPU begins an access with the old generation, and the flush finds it outside.", (
            (store("gate", 1, "Relaxed", at=f"{WAITING} Gate::inside 0.store"),
             fence("SeqCst", at=f"{WAITING} Gate::inside fence"),
             load("generation", "Relaxed", "generation", at=f"{WAITING} Gate::inside generation.load")),
            (NEW_GENERATION,
             fence("SeqCst", at=f"{WAITING} Gates::wait_until_left fence"),
             load("gate", "Acquire", "gate", at=f"{WAITING} Gates::wait_until_left 0.load")),
        ), "0:generation=0 1:gate=0", (Weaker("0.1=none", "alrx"), Weaker("1.1=none", "a")),
    ),
    Test(
        "flush-records", "A CPU reads ranges of a later flush, and finds the record to be that of before.", (
            (cas("sequence", 0, 1, "Acquire", at=f"{RECORDS} FlushRecords::write sequence.compare_exchange"),
             fence("Release", at=f"{RECORDS} FlushRecords::write fence"),
             store("ranges", 1, "Relaxed", at=f"{RECORDS} FlushRecords::write nr_ranges.store")),
            (load("ranges", "Relaxed", "ranges", at=f"{RECORDS} FlushRecords::read nr_ranges.load"),
             fence("Acquire", at=f"{RECORDS} FlushRecords::read fence"),
             load("sequence", "Relaxed", "sequence", at=f"{RECORDS} FlushRecords::read sequence.load#2")),
        ), "1:ranges=1 1:sequence=0", (Weaker("0.1=none", "alr"), Weaker("1.1=none", "alr")),
    ),
    Test(
        "metal-enter", "A CPU of the bare-metal hypervisor enters the guest without a flush that misses it.", (
            (store("present", 1, "SeqCst", at=f"{CPUS} Presence::enter flushes.store"),
             load("flushes", "SeqCst", "flushes", at=f"{CPUS} Presence::enter flushes.load")),
            (rmw("flushes", 1, "SeqCst", at=f"{CPUS} Cpus::flush_by_kicks flushes.fetch_add"),
             load("present", "SeqCst", "present", at=f"{CPUS} Cpus::flush_by_kicks flushes.load")),
        ), "0:flushes=0 1:present=0", (Weaker("0.0=Release", "x"), Weaker("1.1=Relaxed", "a")),
    ),
]
