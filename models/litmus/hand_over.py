"""What a release hands over to an acquire, where that is all: lists, claims, first uses, the optional lock.

`memory` is what is handed over, `word` what carries it. For each pair there is the shape of writes (what was stored
before is read) and, where a user gives something up, that of reads (what is stored afterwards is not read).
"""

from shape import Test, Weaker, cas, load, rmw, store

BOTH = (Weaker("0.1=Relaxed", "alr"), Weaker("1.0=Relaxed", "alr"))
STATE = "sync/lock.rs"


def condition(take):
    return "" if take.kind == "cas" else f"1:{take.reg}=1 "


def writes(name, about, give, take):
    """`give` stores 1 into `word`, `take` finds it."""
    return Test(
        name, about, ((store("memory", 1, "Relaxed"), give), (take, load("memory", "Relaxed", "memory"))),
        f"{condition(take)}1:memory=0", BOTH,
    )


def reads(name, about, give, take):
    # With LSE a compare-and-exchange stores only what it has compared: later stores wait for that.
    late = "ar" if take.kind == "cas" else "alr"
    return Test(
        name, about, ((load("memory", "Relaxed", "memory"), give), (take, store("memory", 1, "Relaxed"))),
        f"{condition(take)}0:memory=1", (Weaker("0.1=Relaxed", "alr"), Weaker("1.0=Relaxed", late)),
    )


POOL_PUSH = cas("word", 0, 1, "Release", at="pool.rs Pool::add first.compare_exchange")
RELEASES = [
    "pool.rs PoolLink::release is_in_use.store", "slot/set.rs Claim::drop claimed.store",
    "table/generation.rs Generations::renew is_renewing.store",
]
CLAIMS = ["pool.rs PoolLink::try_claim is_in_use.compare_exchange", "slot/set.rs Slots::claim claimed.compare_exchange"]
RENEW = "table/generation.rs Generations::renew is_renewing.swap"
IN_USE = [
    "shadow/page.rs Pages::release in_use.fetch_and", "shadow/page.rs Pages::claim word.fetch_and",
    "shadow/page.rs Pages::free_unused word.fetch_and",
]
TAKE_IN_USE = ["shadow/page.rs Pages::claim word.fetch_or", "shadow/page.rs Pages::free_unused word.fetch_or"]
PUSHES = [
    "table/retire.rs Epochs::push_tables first.compare_exchange",
    "slot/set.rs Slots::push_retired first.compare_exchange",
    "shadow/pte_records.rs RetiredRecords::push first.compare_exchange",
]
LIST_TAKES = [
    "table/retire.rs Epochs::reclaim_tables first.swap", "slot/set.rs Slots::reclaim_retired first.swap",
    "shadow/pte_records.rs RetiredRecords::retire first.swap",
]
LOCKED = [
    f"{STATE} Lock::try_acquire state.fetch_update", f"{STATE} Lock::try_acquire state.fetch_update#2",
    f"{STATE} Lock::acquire state.compare_exchange_weak", f"{STATE} Lock::acquire state.compare_exchange",
    f"{STATE} Lock::wait_exclusive state.compare_exchange", f"{STATE} Lock::wait_read state.compare_exchange_weak",
    f"{STATE} Lock::wait_write state.compare_exchange_weak",
]
UNLOCKED = [
    f"{STATE} LockGuard::drop state.fetch_sub", f"{STATE} Lock::release_alone state.swap",
]
UNLOCKED_BY_CAS = [
    f"{STATE} LockGuard::drop state.compare_exchange", f"{STATE} Lock::release_write state.compare_exchange_weak",
]
LINK = "table/in_flight.rs RangesInFlight::link_another next.compare_exchange"
ONCE = "boxed.rs OnceBox::get_or_make 0.compare_exchange"

TESTS = [
    writes(
        "first-use", "A thread finds what another has made at its first use, and not what is in it.",
        cas("word", 0, 1, "AcqRel", "Acquire", at=ONCE),
        load("word", "Acquire", "word", at="boxed.rs OnceBox::get 0.load"),
    ),
    writes(
        "chunk-linked", "A thread finds a new chunk of ranges linked, and not what is in it.",
        cas("word", 0, 1, "AcqRel", "Acquire", at=LINK),
        load("word", "Acquire", "word", at="table/in_flight.rs Chunk::next next.load"),
    ),
    writes(
        "pool-push", "A walk of a pool finds a thing, and not what is in it.",
        POOL_PUSH, load("word", "Acquire", "word", at="pool.rs Pool::iter first.load"),
    ),
    Test(
        "pool-chain", "A walk of a pool finds the thing behind another one, and not what is in it.", (
            (store("memory", 1, "Relaxed"), POOL_PUSH),
            (cas("word", 1, 2, "Release", at="pool.rs Pool::add first.compare_exchange"),),
            (load("word", "Acquire", "word", at="pool.rs Pool::iter first.load"), load("memory", "Relaxed", "memory")),
        ), "2:word=2 2:memory=0", (Weaker("0.1=Relaxed", "alr"), Weaker("2.0=Relaxed", "alr")),
    ),
    Test(
        "pool-hint", "A thread finds a thing of a pool by a hint, and not what is in it.", (
            (store("memory", 1, "Relaxed"), POOL_PUSH),
            (load("word", "Acquire", "word", at="pool.rs Pool::iter first.load"),
             store("hint", 1, "Release", at="pool.rs Pool::remember of_caller.store")),
            (load("hint", "Acquire", "hint", at="pool.rs Pool::claim of_caller.load"),
             load("memory", "Relaxed", "memory")),
        ), "1:word=1 2:hint=1 2:memory=0",
        (Weaker("1.0=Relaxed 1.1=Relaxed", "alr"), Weaker("2.0=Relaxed", "alr")),
    ),
    writes(
        "claim", "The next user of a thing misses what the last one stored.",
        store("word", 1, "Release", at=RELEASES), cas("word", 1, 2, "Acquire", at=CLAIMS),
    ),
    reads(
        "claim-reads", "The last user of a thing reads what the next one stores.",
        store("word", 1, "Release", at=RELEASES), cas("word", 1, 2, "Acquire", at=CLAIMS),
    ),
    writes(
        "renewal", "The next thread that renews a window misses what the last one stored.",
        store("word", 1, "Release", at=RELEASES[2]), rmw("word", 2, "Acquire", "word", at=RENEW),
    ),
    writes(
        "record-in-use", "The next user of a record misses what the last one stored.",
        rmw("word", 1, "Release", at=IN_USE), rmw("word", 2, "Acquire", "word", at=TAKE_IN_USE),
    ),
    reads(
        "record-in-use-reads", "The last user of a record reads what the next one stores.",
        rmw("word", 1, "Release", at=IN_USE), rmw("word", 2, "Acquire", "word", at=TAKE_IN_USE),
    ),
    writes(
        "record-made", "A thread finds a record, or the records of its PTEs, and not what is in it.",
        store("word", 1, "Release", at=(
            "shadow/page.rs Pages::complete records.store", "shadow/page.rs Pages::complete ptes.store",
        )),
        load("word", "Acquire", "word", at=(
            "shadow/page.rs Pages::peek records.load", "shadow/page.rs ShadowPage::target_in ptes.load",
            "shadow/page.rs ShadowPage::prefetch_link ptes.load",
        )),
    ),
    writes(
        "retired-list", "A thread takes a list of retired things, and misses their links and tags.",
        cas("word", 0, 1, "Release", at=PUSHES), rmw("word", 2, "Acquire", "word", at=LIST_TAKES),
    ),
    writes(
        "last-vcpu", "The last vCPU to leave misses what another has stored.",
        rmw("word", 1, "AcqRel", at="shadow/roots.rs Roots::end nr_vcpus.fetch_sub"),
        rmw("word", 2, "AcqRel", "word", at="shadow/roots.rs Roots::end nr_vcpus.fetch_sub"),
    ),
    writes(
        "vm-lock", "A holder of the VM's lock misses what the last one stored.",
        rmw("word", 1, "Release", at=UNLOCKED), cas("word", 1, 2, "Acquire", at=LOCKED),
    ),
    reads(
        "vm-lock-reads", "A holder of the VM's lock reads what the next one stores.",
        rmw("word", 1, "Release", at=UNLOCKED), cas("word", 1, 2, "Acquire", at=LOCKED),
    ),
    writes(
        "vm-lock-handed-over", "The same, where threads wait for it.",
        cas("word", 0, 1, "Release", at=UNLOCKED_BY_CAS),
        rmw("word", 2, "Acquire", "word", at=f"{STATE} Lock::wait_exclusive state.swap"),
    ),
    writes(
        "vm-lock-wake-up", "A waiting writer observes the count of a wake-up, and its flag (memory) as set.",
        rmw("word", 1, "Release", at=f"{STATE} Lock::wake_writer writers.fetch_add"),
        load("word", "Acquire", "word", at=f"{STATE} Lock::wait_write writers.load"),
    ),
]
