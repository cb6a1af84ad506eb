"""Faults and invalidations: `table/invalidation_seq.rs`, `table/in_flight.rs`, `second_stage/`, memslots, userfault.

Locations: `ranges` is the word of the ranges in flight (1: published), `seq` the counter of invalidation sequence
numbers, `pte` a PTE or the directory entry above it (1: as the invalidation leaves it), `page` what the host, the
guest or user space has in memory.
"""

import places
from places import PUBLISH_SET, READ_PTE, exchange
from shape import Test, Weaker, cas, fence, load, rmw, store

FLIGHT = "table/in_flight.rs"
PUBLISH = rmw("ranges", 1, "Release", at=f"{FLIGHT} Chunk::publish word.fetch_or")
NUMBER = rmw("seq", 1, "AcqRel", at="table/invalidation_seq.rs InvalidationSeqCounter::next 0.fetch_add")
VISIBLE = fence("fence_after_rmw", at=(
    "second_stage/invalidate.rs Invalidation::with_pinned fence_after_rmw",
    "second_stage/rescan.rs zap_run fence_after_rmw",
))
READ_RANGES = load("ranges", "Acquire", "ranges", at=f"{FLIGHT} RangesInFlight::free_level word.load")
CURRENT = load("seq", "Acquire", "seq", at="table/invalidation_seq.rs InvalidationSeqCounter::current 0.load")
WITHDRAW = rmw("ranges", 2, "Release", at=(
    f"{FLIGHT} InFlight::withdraw word.fetch_and", f"{FLIGHT} InFlight::withdraw word.fetch_sub",
    f"{FLIGHT} RangesInFlight::publish_in word.fetch_sub",
))
READ_SET = load("set", "SeqCst", "set", at=(*places.READ_SET.at, "slot/set.rs Slots::publish current.load"))
READ_BIT = load("bit", "Acquire", "bit", at="slot/userfault.rs UserfaultBitmap::word_of cell.load")

TESTS = [
    Test(
        "invalidation-three-threads",
        "An invalidation walks into a page-table page, another thread unlinks that, and a fault that finds it "
        "unlinked misses the range.", (
            (PUBLISH, NUMBER, VISIBLE, READ_PTE),
            (exchange(1),),
            (READ_PTE, READ_RANGES),
        ), "0:pte=0 2:pte=1 2:ranges=0", (Weaker("0.1=Relaxed 0.2=none", "alr"), Weaker("2.0=Relaxed", "alr")),
    ),
    Test(
        "rescan-three-threads", "The same, where the fault misses a userfault bit that was set before a rescan.", (
            (store("bit", 1, "Relaxed"), NUMBER, VISIBLE, READ_PTE),
            (exchange(1),),
            (READ_PTE, READ_BIT),
        ), "0:pte=0 2:pte=1 2:bit=0", (Weaker("0.2=none", "a"), Weaker("2.0=Relaxed", "alr")),
    ),
    Test(
        "number", "A fault reads the PTE as the invalidation left it, and misses the range.", (
            (PUBLISH, NUMBER, exchange(1)),
            (READ_PTE, READ_RANGES),
        ), "1:pte=1 1:ranges=0", (Weaker("1.0=Relaxed", "alr"),),
    ),
    Test(
        "number-of-another", "A fault reads the greater number of another thread, and misses the range.", (
            (PUBLISH, NUMBER),
            (rmw("seq", 2, "AcqRel", "seq", at="table/invalidation_seq.rs InvalidationSeqCounter::next 0.fetch_add"),
             exchange(1)),
            (READ_PTE, READ_RANGES),
        ), "1:seq=1 2:pte=1 2:ranges=0",
        (Weaker("0.1=Relaxed", "alr"), Weaker("1.0=Relaxed 1.1=Relaxed", "alr"), Weaker("2.0=Relaxed", "alr")),
    ),
    Test(
        "counter", "A thread reads the counter, and misses a range that was published before.", (
            (PUBLISH, NUMBER),
            (CURRENT, READ_RANGES),
        ), "1:seq=1 1:ranges=0", (Weaker("0.1=Relaxed", "alr"), Weaker("1.0=Relaxed", "alr")),
    ),
    Test(
        "range-in-list", "A fault reads the number of a range in a list, and misses the count or the range.", (
            (rmw("counts", 1, "Release", at=f"{FLIGHT} RangesInFlight::publish_in word.fetch_add"), PUBLISH, NUMBER,
             exchange(1)),
            (READ_PTE, load("counts", "Acquire", "counts", at=f"{FLIGHT} RangesInFlight::free_level word.load"),
             load("ranges", "Acquire", "ranges", at=f"{FLIGHT} free_level_in word.load")),
        ), "1:pte=1 1:counts=1 1:ranges=0", (Weaker("1.0=Relaxed", "al"),),
    ),
    Test(
        "range-in-list-count", "The same: it misses the count.", (
            (rmw("counts", 1, "Release", at=f"{FLIGHT} RangesInFlight::publish_in word.fetch_add"), PUBLISH, NUMBER,
             exchange(1)),
            (READ_PTE, load("counts", "Acquire", "counts", at=f"{FLIGHT} RangesInFlight::free_level word.load")),
        ), "1:pte=1 1:counts=0", (Weaker("1.0=Relaxed", "alr"),),
    ),
    Test(
        "withdrawn", "A fault misses a range that was withdrawn, and does not observe what the host did.", (
            (store("page", 1, "Relaxed"), WITHDRAW),
            (READ_RANGES, load("page", "Relaxed", "page")),
        ), "1:ranges=2 1:page=0", (Weaker("0.1=Relaxed", "alr"), Weaker("1.0=Relaxed", "alr")),
    ),
    Test(
        "withdrawn-from-list", "The same, where the list is not read because its count is zero.", (
            (store("page", 1, "Relaxed"), WITHDRAW,
             rmw("counts", 1, "Release", at=f"{FLIGHT} InFlight::withdraw word.fetch_sub")),
            (load("counts", "Acquire", "counts", at=f"{FLIGHT} RangesInFlight::free_level word.load"),
             load("page", "Relaxed", "page")),
        ), "1:counts=1 1:page=0", (Weaker("0.2=Relaxed", "alr"), Weaker("1.0=Relaxed", "alr")),
    ),
    Test(
        "torn-place", "A fault reads one bound of the place's next range, and not what the host of the first did.", (
            (store("page", 1, "Relaxed"), WITHDRAW),
            (cas("ranges", 2, 3, "Acquire", at=f"{FLIGHT} Chunk::publish word.compare_exchange"),
             store("bound", 1, "Release", at=(
                 f"{FLIGHT} Chunk::publish start.store", f"{FLIGHT} Chunk::publish end.store",
             ))),
            (load("bound", "Acquire", "bound", at=(
                f"{FLIGHT} Chunk::free_level start.load", f"{FLIGHT} Chunk::free_level end.load",
                f"{FLIGHT} RangesInFlight::is_apart start.load", f"{FLIGHT} RangesInFlight::is_apart end.load",
            )), load("page", "Relaxed", "page")),
        ), "2:bound=1 2:page=0",
        (Weaker("1.0=Relaxed 1.1=Relaxed", "alr"), Weaker("2.0=Relaxed", "alr")),
    ),
    Test(
        "bounds", "A fault finds a range active, and reads its place as it was before.", (
            (store("bound", 1, "Release", at=(
                f"{FLIGHT} Chunk::publish start.store", f"{FLIGHT} Chunk::publish end.store",
            )), PUBLISH),
            (READ_RANGES, load("bound", "Acquire", "bound", at=(
                f"{FLIGHT} Chunk::free_level start.load", f"{FLIGHT} RangesInFlight::is_apart start.load",
            ))),
        ), "1:ranges=1 1:bound=0", (Weaker("0.1=Relaxed", "alr"), Weaker("1.0=Relaxed", "alr")),
    ),
    Test(
        "number-and-break", "A recovery breaks a PTE and misses a number; its taker misses that the PTE is broken.", (
            (exchange(1), fence("fence_after_rmw", at=(
                "second_stage/recover.rs Recovery::try_recover fence_after_rmw",
            )), CURRENT),
            (NUMBER, VISIBLE, READ_PTE),
        ), "0:seq=0 1:pte=0", (Weaker("0.1=none", "ar"), Weaker("1.1=none", "a")),
    ),
    Test(
        "number-and-replacement", "The same, where a fault takes a read-only leaf away to install another.", (
            (exchange(1), fence("fence_after_rmw", at="vcpu/act.rs Fault::install_instead fence_after_rmw"), CURRENT),
            (NUMBER, VISIBLE, READ_PTE),
        ), "0:seq=0 1:pte=0", (Weaker("0.1=none", "ar"), Weaker("1.1=none", "a")),
    ),
    Test(
        "pinned", "A pinned memslot is made beside a zap that unlinks leaves: neither observes the other.", (
            (store("pinned", 1, "Relaxed", at="table/mod.rs Tree::note_pinned has_pinned.store"),
             fence("full_fence", at="table/mod.rs Tree::note_pinned full_fence"), READ_RANGES),
            (PUBLISH, NUMBER, VISIBLE,
             load("pinned", "Relaxed", "pinned", at="table/mod.rs Tree::may_unlink_leaves has_pinned.load")),
        ), "0:ranges=0 1:pinned=0", (Weaker("0.1=none", "alrx"), Weaker("1.1=Relaxed 1.2=none", "alr")),
    ),
    Test(
        "attributes", "A fault reads new attributes, and misses the number that was taken for them.", (
            (PUBLISH, NUMBER, rmw("bits", 1, "Release", at=(
                "slot/attributes.rs PrivatePages::set 0.fetch_or", "slot/attributes.rs PrivatePages::set 0.fetch_and",
            ))),
            (load("bits", "Acquire", "bits", at="slot/attributes.rs PrivatePages::word 0.load"), CURRENT),
        ), "1:bits=1 1:seq=0", (Weaker("0.2=Relaxed", "a"), Weaker("1.0=Relaxed", "alr")),
    ),
    Test(
        "attributes-in-range", "The same: it misses the range in flight.", (
            (PUBLISH, NUMBER, rmw("bits", 1, "Release", at=(
                "slot/attributes.rs PrivatePages::set 0.fetch_or", "slot/attributes.rs PrivatePages::set 0.fetch_and",
            ))),
            (load("bits", "Acquire", "bits", at="slot/attributes.rs PrivatePages::word 0.load"), READ_RANGES),
        ), "1:bits=1 1:ranges=0", (Weaker("1.0=Relaxed", "alr"),),
    ),
    Test(
        "memslots", "A thread finds a new memslot set, and reads what its memory held before.", (
            (store("contents", 1, "Relaxed"), PUBLISH_SET),
            (READ_SET, load("contents", "Relaxed", "contents")),
        ), "1:set=1 1:contents=0", (Weaker("0.1=Relaxed", "alr"), Weaker("1.0=Relaxed", "alr")),
    ),
    Test(
        "memslots-withdrawn", "A fault misses the range of a memslot that was deleted, and finds the old set.", (
            (PUBLISH_SET, WITHDRAW),
            (READ_RANGES, READ_SET),
        ), "1:ranges=2 1:set=0", (Weaker("0.1=Relaxed", "ar"), Weaker("1.0=Relaxed", "al")),
    ),
    Test(
        "link", "A thread finds a new page-table page linked, and reads what its memory held before.", (
            (store("entry", 1, "Relaxed"), exchange(1)),
            (READ_PTE, load("entry", "Relaxed", "entry")),
        ), "1:pte=1 1:entry=0", (Weaker("0.1=Relaxed", "alr"), Weaker("1.0=Relaxed", "alr")),
    ),
    Test(
        "link-walker",
        "A page-table walker does the same. It computes each address from the entry above.", (
            (store("entry", 1, "Relaxed"), exchange(1)),
            (load("pte", "Relaxed", "pte"), load("entry", "Relaxed", "entry", addr="pte")),
        ), "1:pte=1 1:entry=0", (Weaker("0.1=Relaxed", "alr"),),
    ),
    Test(
        "leaf-walker", "A guest finds a leaf, and reads its page as it was before the host resolved it.", (
            (store("page", 1, "Relaxed"), exchange(1)),
            (load("pte", "Relaxed", "pte"), load("page", "Relaxed", "page", addr="pte")),
        ), "1:pte=1 1:page=0", (Weaker("0.1=Relaxed", "alr"),),
    ),
    Test(
        "userfault", "User space fills a page and clears its bit (1); a guest reads what was there before.", (
            (store("page", 1, "Relaxed"), store("bit", 1, "Release")),
            (READ_BIT, exchange(1)),
            (load("pte", "Relaxed", "pte"), load("page", "Relaxed", "page", addr="pte")),
        ), "1:bit=1 2:pte=1 2:page=0", (Weaker("1.0=Relaxed 1.1=Relaxed", "alr"), Weaker("0.1=Relaxed", "alr")),
    ),
]
