"""The dirty log: `dirty/`, `harvest/`, `slot/bitmap.rs`, and the flags of memslots.

Locations: `pte` is a leaf PTE (1: it has W), `word` a word of the bitmap, `summary` the word above it, `set` the
published memslot set (1: the memslot logs).
"""

from places import PUBLISH_SET, READ_PTE, READ_SET, exchange
from shape import Test, Weaker, cas, fence, load, rmw, store

BITMAP = "slot/bitmap.rs"
RING = "dirty/ring.rs"
MAKE_WRITABLE = exchange(1)
THEN_READ = fence("fence_after_rmw", at=(
    "dirty/log.rs mark_if_logging fence_after_rmw", "dirty/log.rs mark_page_if_logging fence_after_rmw",
    "dirty/log.rs mark_page_of fence_after_rmw", "vcpu/batch.rs Fault::mark_batch fence_after_rmw",
))
READ_WORD = load("word", "SeqCst", "word", at=f"{BITMAP} Bitmap::has self.marks")
TAKE_WORD = rmw("word", 2, "SeqCst", at=(
    f"{BITMAP} Bitmap::take_word words.swap", f"{BITMAP} Bitmap::unset word.fetch_and",
    f"{BITMAP} Bitmap::unset word.fetch_or",
))
REARM = fence("fence_after_rmw", at="harvest/log.rs LogCall::rearm fence_after_rmw")
BEGIN_TO_LOG = fence("full_fence", at="vm/region.rs Vm::begin_to_log full_fence")
SET_WORD = rmw("word", 1, "SeqCst", at=(
    f"{BITMAP} Bitmap::set word.fetch_or", f"{BITMAP} Bitmap::set word.fetch_and",
))
CLEAR_SUMMARY = rmw("summary", 2, "SeqCst", at=(
    f"{BITMAP} Bitmap::take summary.fetch_and", f"{BITMAP} Bitmap::take_masked summary.fetch_and",
    f"{BITMAP} Bitmap::clear_all summary.swap",
))
CLEARED = fence("fence_after_rmw", at=(
    f"{BITMAP} Bitmap::take fence_after_rmw", f"{BITMAP} Bitmap::take_masked fence_after_rmw",
    f"{BITMAP} Bitmap::clear_all fence_after_rmw",
))
PUSH = (
    store("entry", 1, "Release", at=f"{RING} DirtyRing::push page_word.store"),
    store("pushed", 1, "Release", at=f"{RING} DirtyRing::push pushed.store"),
)
READ_PUSHED = load("pushed", "Acquire", "pushed", at=(
    f"{RING} DirtyRing::harvest pushed.load", f"{RING} DirtyRing::entry pushed.load",
    f"{RING} DirtyRing::mark_harvested pushed.load",
))
HARVESTED = cas("harvested", 0, 1, "Release", at=f"{RING} DirtyRing::harvest harvested.compare_exchange")
READ_HARVESTED = load("harvested", "Acquire", "harvested", at=f"{RING} DirtyRing::reset harvested.load")
FINISH = rmw("first", 1, "AcqRel", at=f"{RING} DirtyRing::finish_reset first.fetch_max")
READ_FIRST = load("first", "Acquire", "first", at=f"{RING} DirtyRing::first_index first.load")

TESTS = [
    Test(
        "marked-already", "A fault restores W and finds the page marked; the harvest that took the mark misses W.", (
            (MAKE_WRITABLE, THEN_READ, READ_WORD),
            (TAKE_WORD, REARM, READ_PTE),
        ), "0:word=1 1:pte=0", (Weaker("0.1=none 0.2=Relaxed", "ar"), Weaker("1.1=none", "a")), {"word": 1},
    ),
    Test(
        "marked-already-and", "The same, where the harvest clears W by an AND.", (
            (MAKE_WRITABLE, THEN_READ, READ_WORD),
            (TAKE_WORD, REARM,
             rmw("pte", 0, "SeqCst", "pte", at="table/pte_ref.rs PteRef::clear cell.fetch_and")),
        ), "0:word=1 1:pte=0", (Weaker("1.1=none 1.2=Relaxed", "a"),), {"word": 1},
    ),
    Test(
        "memslot-flag", "A fault restores W and finds that the memslot does not log; the enabling misses W.", (
            (MAKE_WRITABLE, THEN_READ, READ_SET),
            (PUBLISH_SET, BEGIN_TO_LOG, READ_PTE),
        ), "0:set=0 1:pte=0", (Weaker("0.1=none 0.2=Relaxed", "ar"), Weaker("1.1=none", "ar")),
    ),
    Test(
        "memslot-flag-and-marks",
        "The same where all pages are marked at first: the mark is there, and the harvest that takes it misses W.", (
            (MAKE_WRITABLE, THEN_READ, READ_SET),
            (PUBLISH_SET, fence("full_fence", at="vm/region.rs Vm::change_slot full_fence"), READ_WORD),
            (TAKE_WORD, REARM, READ_PTE),
        ), "0:set=0 1:word=1 2:pte=0", (Weaker("1.1=none 1.2=Relaxed", "ar"), Weaker("2.1=none", "a")), {"word": 1},
    ),
    Test(
        "page-written", "The VMM writes a page and finds it marked; the harvest's caller reads the page as it was.", (
            (store("page", 1, "Relaxed"), fence("full_fence", at="harvest/mark.rs mark_pages full_fence"), READ_WORD),
            (TAKE_WORD, REARM, load("page", "Relaxed", "page")),
        ), "0:word=1 1:page=0", (Weaker("0.1=none", "alx"), Weaker("1.1=none", "a")), {"word": 1},
    ),
    Test(
        "page-logged-by-cpu", "A CPU sets D and its log finds the page marked; the harvest of the mark misses D.", (
            (store("pte", 1, "Relaxed"), fence("full_fence", at="harvest/mark.rs mark_written full_fence"), READ_WORD),
            (TAKE_WORD, REARM, READ_PTE),
        ), "0:word=1 1:pte=0", (Weaker("0.1=none", "alx"), Weaker("1.1=none", "a")), {"word": 1},
    ),
    Test(
        "summary", "A mark finds its summary set; the harvest that cleared the summary misses the mark.", (
            (SET_WORD, fence("fence_after_rmw", at=f"{BITMAP} Bitmap::summarize fence_after_rmw"),
             load("summary", "SeqCst", "summary", at=f"{BITMAP} Bitmap::summarize summary.load")),
            (CLEAR_SUMMARY, CLEARED,
             rmw("word", 2, "SeqCst", "word", at=f"{BITMAP} Bitmap::take_word words.swap")),
        ), "0:summary=1 1:word=0", (Weaker("1.1=none 1.2=Relaxed", "a"),), {"summary": 1},
    ),
    Test(
        "summary-set", "A thread finds a summary bit set, and misses the mark below it.", (
            (SET_WORD, rmw("summary", 1, "SeqCst", at=f"{BITMAP} Bitmap::summarize summary.fetch_or")),
            (load("summary", "Acquire", "summary", at=(
                f"{BITMAP} Bitmap::look summary.load", f"{BITMAP} Bitmap::copy summary.load",
            )),
             load("word", "Acquire", "word", at=(
                 f"{BITMAP} Bitmap::look self.marks", f"{BITMAP} Bitmap::copy words.load",
                 f"{BITMAP} Bitmap::copy word.load",
             ))),
        ), "1:summary=1 1:word=0", (Weaker("1.0=Relaxed", "alr"), Weaker("0.1=Relaxed", "a")),
    ),
    Test(
        "mark-read", "A caller finds a page marked, and reads the page as it was before the mark.", (
            (store("page", 1, "Relaxed"), SET_WORD),
            (load("word", "Acquire", "word", at=f"{BITMAP} Bitmap::is_marked self.marks"),
             load("page", "Relaxed", "page")),
        ), "1:word=1 1:page=0", (Weaker("1.0=Relaxed", "alr"), Weaker("0.1=Relaxed", "alr")),
    ),
    Test(
        "rings-and-memslot", "Rings are enabled beside a memslot that begins to log: neither observes the other.", (
            (cas("rings", 0, 1, "Acquire", at="dirty/rings.rs Rings::enable state.compare_exchange"),
             fence("full_fence", at="vm/region.rs Vm::begin_to_log_by_rings full_fence"), READ_SET),
            (PUBLISH_SET, BEGIN_TO_LOG,
             load("rings", "Relaxed", "rings", at="dirty/rings.rs Rings::are_enabled state.load")),
        ), "0:set=0 1:rings=0", (Weaker("0.1=none", "al"), Weaker("1.1=none", "ar")),
    ),
    Test(
        "rings-and-vcpus", "Rings are enabled, and what a vCPU that is gone has done is not observed.", (
            (store("leaf", 1, "Relaxed"), rmw("rings", 1, "Release", at="dirty/rings.rs Rings::leave state.fetch_sub")),
            (cas("rings", 1, 2, "Acquire", at="dirty/rings.rs Rings::enable state.compare_exchange"),
             load("leaf", "Relaxed", "leaf")),
        ), "1:leaf=0", (Weaker("0.1=Relaxed", "alr"), Weaker("1.0=Relaxed", "alr")),
    ),
    Test(
        "ring-entry", "A harvest finds an entry pushed, and reads what the entry held before.", (
            PUSH,
            (READ_PUSHED, load("entry", "Relaxed", "entry")),
        ), "1:pushed=1 1:entry=0", (Weaker("0.1=Relaxed", "alr"), Weaker("1.0=Relaxed", "alr")),
    ),
    Test(
        "ring-leaf", "A reset finds an entry harvested, and its leaf as it was before the fault.", (
            (MAKE_WRITABLE, *PUSH),
            (READ_PUSHED, HARVESTED),
            (READ_HARVESTED, READ_PTE),
        ), "1:pushed=1 2:harvested=1 2:pte=0",
        (Weaker("0.2=Relaxed", "a"), Weaker("1.0=Relaxed 1.1=Relaxed", "alr"),
         Weaker("2.0=Relaxed", "alr")),
    ),
    Test(
        "ring-leaf-marked", "The same, where the entry was marked out of order.", (
            (MAKE_WRITABLE, *PUSH),
            (READ_PUSHED, rmw("mark", 1, "Release", at=f"{RING} DirtyRing::mark_harvested mark_word.fetch_max")),
            (load("mark", "Acquire", "mark", at=f"{RING} DirtyRing::is_marked mark_word.load"), READ_PTE),
        ), "1:pushed=1 2:mark=1 2:pte=0", (Weaker("1.0=Relaxed 1.1=Relaxed", "alr"), Weaker("2.0=Relaxed", "alr")),
    ),
    Test(
        "ring-of-two-harvests", "The same, where another harvest took the entry behind it.", (
            (MAKE_WRITABLE, HARVESTED),
            (cas("harvested", 1, 2, "Release", at=f"{RING} DirtyRing::harvest harvested.compare_exchange"),),
            (READ_HARVESTED, READ_PTE),
        ), "2:harvested=2 2:pte=0", (Weaker("0.1=Relaxed", "ar"), Weaker("2.0=Relaxed", "alr")),
    ),
    Test(
        "ring-refilled", "A harvest takes an entry, and reads what the vCPU stored there after the entry was reset.", (
            (load("entry", "Relaxed", "entry"), HARVESTED),
            (READ_HARVESTED, FINISH),
            (READ_FIRST, store("entry", 2, "Release", at=f"{RING} DirtyRing::push page_word.store")),
        ), "0:entry=2 1:harvested=1 2:first=1",
        (Weaker("0.1=Relaxed", "alr"), Weaker("1.0=Relaxed 1.1=Relaxed", "alr"),
         Weaker("2.0=Relaxed 2.1=Relaxed", "alr")),
    ),
    Test(
        "ring-entry-late", "A reader finds a refilled entry, and misses that the one it asked for was reset.", (
            (FINISH,),
            (READ_FIRST, store("entry", 2, "Release", at=f"{RING} DirtyRing::push page_word.store")),
            (load("entry", "Acquire", "entry", at=f"{RING} DirtyRing::entry self.page_at"),
             load("first", "Acquire", "late", at=f"{RING} DirtyRing::first_index first.load")),
        ), "1:first=1 2:entry=2 2:late=0",
        (Weaker("1.0=Relaxed 1.1=Relaxed", "alr"), Weaker("2.0=Relaxed", "alr")),
    ),
    Test(
        "ring-marked-and-refilled",
        "A harvest reads a refilled entry, and misses that the one it wants was marked and reset.", (
            (rmw("mark", 1, "Release", at=f"{RING} DirtyRing::mark_harvested mark_word.fetch_max"),),
            (load("mark", "Acquire", "mark", at=f"{RING} DirtyRing::is_marked mark_word.load"), FINISH),
            (READ_FIRST, store("entry", 2, "Release", at=f"{RING} DirtyRing::push page_word.store")),
            (load("entry", "Acquire", "entry", at=f"{RING} DirtyRing::harvest self.page_at"),
             load("mark", "Acquire", "late", at=f"{RING} DirtyRing::is_marked mark_word.load")),
        ), "1:mark=1 2:first=1 3:entry=2 3:late=0", (Weaker("3.0=Relaxed", "alr"),),
    ),
    Test(
        "ring-reset-by-another", "A reset relies on what a faster one has protected, and does not observe that.", (
            (rmw("pte", 1, "SeqCst", at="table/pte_ref.rs PteRef::clear cell.fetch_and"), FINISH),
            (rmw("first", 1, "AcqRel", "first", at=f"{RING} DirtyRing::finish_reset first.fetch_max"), READ_PTE),
        ), "1:first=1 1:pte=0", (Weaker("0.1=Relaxed", "a"), Weaker("1.0=Relaxed", "alr")),
    ),
    Test(
        "ring-reset-observed", "A thread finds entries reset, and their pages as they were before.", (
            (rmw("pte", 1, "SeqCst", at="table/pte_ref.rs PteRef::clear cell.fetch_and"), FINISH),
            (READ_FIRST, READ_PTE),
        ), "1:first=1 1:pte=0", (Weaker("0.1=Relaxed", "a"), Weaker("1.0=Relaxed", "alr")),
    ),
]
