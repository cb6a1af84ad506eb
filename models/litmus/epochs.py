"""Epochs: `table/retire.rs`, `table/participant.rs`, and the windows of `table/generation.rs`.

Locations: `announced` is a participant's announcement (0: none, unless a test says otherwise), `pointer` leads to the
thing while it is 0, `epoch` is the VM's, `page` is the thing itself.
"""

from places import LOAD_PTE, exchange
from shape import BarrierOnAllCpus, Test, Weaker, cas, fence, load, rmw, store

RETIRE = "table/retire.rs"
ANNOUNCE = f"{RETIRE} Epochs::announce_epoch"
FREED_EARLY = "A reclaimer misses an announcement, and the guard reaches what was unlinked before."

ANNOUNCED = [
    rmw("announced", 1, "SeqCst", at=f"{ANNOUNCE} announced.swap"),
    fence("fence_after_rmw", at=f"{ANNOUNCE} fence_after_rmw"),
]
ANNOUNCED_REMOTE = [
    store("announced", 1, "Release", at=f"{ANNOUNCE} announced.store"),
    fence("fence_against_remote_barrier", at=f"{ANNOUNCE} fence_against_remote_barrier"),
]
ANNOUNCED_BY_LOCK = [
    store("announced", 1, "Release", at=f"{RETIRE} Epochs::pin_by_rmw announced.store"),
    cas("held", 0, 1, "Acquire", at="shadow/lock.rs WordLock::try_lock 0.compare_exchange"),
    fence("fence_after_rmw", at=f"{RETIRE} Epochs::pin_by_rmw fence_after_rmw"),
]
READ_LINK = load("pointer", "Acquire", "link", at=LOAD_PTE)
UNLINK = exchange(1, loc="pointer")
FENCE = fence("full_fence", at=f"{RETIRE} Epochs::oldest_open full_fence")
BARRIER = BarrierOnAllCpus(on=0, at=(f"{RETIRE} Epochs::oldest_open barrier_on_all_cpus",))
READ_ANNOUNCED = load("announced", "Acquire", "announced", at=f"{RETIRE} Epochs::oldest_open announced.load")
RETIRED = cas("list", 0, 1, "Release", at=f"{RETIRE} Epochs::push_tables first.compare_exchange")
TAKEN = rmw("list", 2, "Acquire", "list", at=f"{RETIRE} Epochs::reclaim_tables first.swap")
MISSED = "0:link=0 1:announced=0"
ADVANCE = rmw("epoch", 1, "AcqRel", at=f"{RETIRE} Epochs::advance_epoch epoch.fetch_add")

TESTS = [
    Test(
        "epoch-fence", FREED_EARLY, (
            (*ANNOUNCED, READ_LINK),
            (UNLINK, FENCE, READ_ANNOUNCED),
        ), MISSED, (Weaker("0.1=none", "a"), Weaker("1.1=none", "ar")),
    ),
    Test(
        "epoch-remote", FREED_EARLY, (
            (*ANNOUNCED_REMOTE, READ_LINK),
            (UNLINK, FENCE, BARRIER, READ_ANNOUNCED),
        ), MISSED, (Weaker("1.2=none", "alrx"),),
    ),
    Test(
        "epoch-memslots", "The same with a memslot set that was replaced.", (
            (*ANNOUNCED, load("pointer", "SeqCst", "link", at="slot/set.rs Slots::current_unchecked current.load")),
            (cas("pointer", 0, 1, "SeqCst", at="slot/set.rs Slots::publish current.compare_exchange"), FENCE,
             READ_ANNOUNCED),
        ), MISSED, (Weaker("0.1=none 0.2=Relaxed", "a"), Weaker("1.1=none", "ar")),
    ),
    Test(
        "epoch-records", "The same with the records of a shadow page's PTEs.", (
            (*ANNOUNCED, load("pointer", "Acquire", "link", at="shadow/page.rs ShadowPage::target_in ptes.load")),
            (rmw("pointer", 1, "Relaxed", at="shadow/page.rs Pages::free_unused ptes.swap"), FENCE, READ_ANNOUNCED),
        ), MISSED, (Weaker("0.1=none", "a"), Weaker("1.1=none", "alr")),
    ),
    Test(
        "epoch-records-new", "As epoch-new, with the records of a shadow page's PTEs.", (
            (load("epoch", "Acquire", "epoch", at=f"{RETIRE} Epochs::announce epoch.load"),
             load("pointer", "Acquire", "link", at="shadow/page.rs ShadowPage::target_in ptes.load")),
            (rmw("pointer", 1, "Relaxed", at="shadow/page.rs Pages::free_unused ptes.swap"), ADVANCE),
        ), "0:epoch=1 0:link=0", (Weaker("0.0=Relaxed", "alr"), Weaker("1.1=Relaxed", "alr")),
    ),
    Test(
        "epoch-lock", FREED_EARLY, (
            (*ANNOUNCED_BY_LOCK, READ_LINK),
            (UNLINK, FENCE, READ_ANNOUNCED),
        ), MISSED, (Weaker("0.2=none", "r"), Weaker("0.1=none", "x")),
    ),
    Test(
        "epoch-lock-remote", FREED_EARLY, (
            (*ANNOUNCED_BY_LOCK, READ_LINK),
            (UNLINK, FENCE, BARRIER, READ_ANNOUNCED),
        ), MISSED,
    ),
    Test(
        "epoch-third-thread", "As epoch-fence, where one thread unlinks and another reclaims.", (
            (*ANNOUNCED, READ_LINK),
            (TAKEN, FENCE, READ_ANNOUNCED),
            (UNLINK, RETIRED),
        ), f"{MISSED} 1:list=1", (Weaker("1.0=Relaxed 1.1=none", "alr"), Weaker("2.1=Relaxed", "ar")),
    ),
    Test(
        "epoch-third-thread-remote", "As epoch-remote, where one thread unlinks and another reclaims.", (
            (*ANNOUNCED_REMOTE, READ_LINK),
            (TAKEN, FENCE, BARRIER, READ_ANNOUNCED),
            (UNLINK, RETIRED),
        ), f"{MISSED} 1:list=1", (Weaker("1.2=none", "alrx"),),
    ),
    Test(
        "epoch-keep", "A guard takes over what was retired, and the reclaimer misses its announcement.", (
            (*ANNOUNCED, load("epoch", "Acquire", "epoch", at=f"{RETIRE} FaultPin::reopen epoch.load")),
            (ADVANCE, FENCE, READ_ANNOUNCED),
        ), "0:epoch=0 1:announced=0", (Weaker("0.1=none", "a"), Weaker("1.1=none", "a")),
    ),
    Test(
        "epoch-keep-remote", "As epoch-keep, with the barrier on all CPUs.", (
            (*ANNOUNCED_REMOTE, load("epoch", "Acquire", "epoch", at=f"{RETIRE} FaultPin::reopen epoch.load")),
            (ADVANCE, FENCE, BARRIER, READ_ANNOUNCED),
        ), "0:epoch=0 1:announced=0", (Weaker("1.2=none", "alrx"),),
    ),
    Test(
        "epoch-new", "A guard announces the new epoch, and reaches what was unlinked in the old one.", (
            (load("epoch", "Acquire", "epoch", at=(
                f"{RETIRE} Epochs::announce epoch.load", f"{RETIRE} Epochs::pin_by_rmw epoch.load",
            )), READ_LINK),
            (UNLINK, ADVANCE),
        ), "0:epoch=1 0:link=0", (Weaker("0.0=Relaxed", "alr"), Weaker("1.1=Relaxed", "ar")),
    ),
    Test(
        "epoch-end", "A guard that is observed to be over (2) reads what is made of the page after it was freed.", (
            (load("page", "Relaxed", "page"), store("announced", 2, "Release", at=(
                "table/participant.rs NestedGuard::drop announced.store",
                "table/participant.rs FaultGuard::drop announced_by_fault.store",
            ))),
            (READ_ANNOUNCED, store("page", 1, "Relaxed")),
        ), "0:page=1 1:announced=2", (Weaker("0.1=Relaxed", "alr"), Weaker("1.0=Relaxed", "alr")),
    ),
    Test(
        "epoch-later", "The same, where the reclaimer reads the announcement (3) of the next guard instead.", (
            (
                load("page", "Relaxed", "page"),
                store("announced", 2, "Release", at="table/participant.rs FaultGuard::drop announced_by_fault.store"),
                store("announced", 3, "Release", at=(
                    f"{ANNOUNCE} announced.store", f"{RETIRE} Epochs::pin_by_rmw announced.store",
                )),
            ),
            (READ_ANNOUNCED, store("page", 1, "Relaxed")),
        ), "0:page=1 1:announced=3", (Weaker("0.2=Relaxed", ""),),
    ),
    Test(
        "hazard", "A reclaimer observes the guard's end (2), and misses the hazard pointer that it has set.", (
            (
                store("resolving", 1, "Release", at="table/participant.rs HazardPointer::protect resolving.store"),
                store("announced", 2, "Release", at=(
                    "table/participant.rs NestedGuard::drop announced.store",
                    "table/participant.rs FaultGuard::drop announced_by_fault.store",
                )),
            ),
            (READ_ANNOUNCED, load("resolving", "Acquire", "resolving", at=(
                f"{RETIRE} Epochs::is_resolving resolving.load",
            ))),
        ), "1:announced=2 1:resolving=0", (Weaker("0.1=Relaxed", "alr"), Weaker("1.0=Relaxed", "alr")),
    ),
    Test(
        "hazard-end", "A resolve that is observed to be over (2) reads what is made of the backing afterwards.", (
            (load("page", "Relaxed", "page"),
             store("resolving", 2, "Release", at="table/participant.rs Protected::drop resolving.store")),
            (load("resolving", "Acquire", "resolving", at=f"{RETIRE} Epochs::is_resolving resolving.load"),
             store("page", 1, "Relaxed")),
        ), "0:page=1 1:resolving=2", (Weaker("0.1=Relaxed", "alr"), Weaker("1.0=Relaxed", "alr")),
    ),
    Test(
        "frozen", "A walk finds the frozen PTE of a retired page-table page, starts over, and comes there again.", (
            (UNLINK, store("pte", 1, "Release", at="table/chain.rs store_frozen cell.store")),
            (load("pte", "Acquire", "pte", at=LOAD_PTE), READ_LINK),
        ), "1:pte=1 1:link=0", (Weaker("0.1=Relaxed", "ar"), Weaker("1.0=Relaxed", "alr")),
    ),
    Test(
        "freeze", "The same, where a PTE is frozen before its page-table page is retired.", (
            (UNLINK, rmw("pte", 1, "AcqRel", at=(
                "table/pte_ref.rs PteRef::freeze cell.swap",
            ))),
            (load("pte", "Acquire", "pte", at=LOAD_PTE), READ_LINK),
        ), "1:pte=1 1:link=0", (Weaker("0.1=Relaxed", "ar"), Weaker("1.0=Relaxed", "alr")),
    ),
    Test(
        "freeze-below", "A thread freezes a directory entry, and reads what the page below held before it was made.", (
            (store("entry", 1, "Relaxed"), exchange(1)),
            (rmw("pte", 2, "AcqRel", "pte", at="table/pte_ref.rs PteRef::freeze cell.swap"),
             load("entry", "Relaxed", "entry")),
        ), "1:pte=1 1:entry=0", (Weaker("0.1=Relaxed", "alr"), Weaker("1.0=Relaxed", "alr")),
    ),
    Test(
        "freeze-as-was", "As freeze-below, where the frozen PTE keeps what it was: so does the thread that finds it.", (
            (store("entry", 1, "Relaxed"), exchange(1)),
            (cas("pte", 1, 2, "AcqRel", "Acquire",
                 at="table/pte_ref.rs PteRef::freeze_as_was cell.compare_exchange"),),
            (load("pte", "Acquire", "pte", at=LOAD_PTE), load("entry", "Relaxed", "entry")),
        ), "2:pte=2 2:entry=0", (Weaker("2.0=Relaxed", "alr"),),
    ),
    Test(
        "retired-since", "A fault finds a range withdrawn, and the epoch as before its page-table page was retired.", (
            (ADVANCE, rmw("ranges", 1, "Release", at="table/in_flight.rs InFlight::withdraw word.fetch_and")),
            (load("ranges", "Acquire", "ranges", at="table/in_flight.rs RangesInFlight::free_level word.load"),
             load("epoch", "Acquire", "epoch", at=f"{RETIRE} Epochs::current epoch.load")),
        ), "1:ranges=1 1:epoch=0", (Weaker("0.1=Relaxed", "a"), Weaker("1.0=Relaxed", "alr")),
    ),
    Test(
        "split-again", "A thread finds its page-table page in a later split, and the epoch as before its retirement.", (
            (ADVANCE, exchange(1)),
            (load("pte", "Acquire", "pte", at=LOAD_PTE),
             load("epoch", "Acquire", "epoch", at=f"{RETIRE} Epochs::current epoch.load")),
        ), "1:pte=1 1:epoch=0", (Weaker("1.0=Relaxed", "alr"),),
    ),
    Test(
        "generations", "A push-down succeeds on what a turn protects that its guard should have held up.", (
            (exchange(3, 2, "entry"),
             store("announced", 2, "Release", at="table/participant.rs FaultGuard::drop announced_by_fault.store")),
            (READ_ANNOUNCED, store("limit", 1, "Release", at="table/generation.rs Generations::renew limit.store")),
            (load("limit", "Acquire", "limit", at="table/generation.rs Generations::admit limit.load"),
             exchange(2, loc="entry")),
        ), "1:announced=2 2:limit=1", (Weaker("1.0=Relaxed 1.1=Relaxed", "alr"),),
    ),
]
