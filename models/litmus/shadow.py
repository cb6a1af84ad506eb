"""Shadow paging: `shadow/`.

Locations: `role` is what a record says of its page (also the frame and the page-table page), `life` its generation,
`target` what a PTE leads to, `held` a lock (1: held, 2: free again), `guest` a guest's PTE, `second` a PTE of the
second stage, `leaf` a shadow PTE.
"""

from places import exchange
from shape import Test, Weaker, cas, fence, load, rmw, store

PAGE = "shadow/page.rs"
ROLE = load("role", "Acquire", "role", at=(
    f"{PAGE} ShadowPage::role role.load", f"{PAGE} ShadowPage::gfn gfn.load", f"{PAGE} ShadowPage::table table.load",
))
SET_ROLE = store("role", 1, "Release", at=(
    f"{PAGE} ShadowPage::prepare role.store", f"{PAGE} ShadowPage::prepare gfn.store",
    f"{PAGE} ShadowPage::prepare table.store",
))
LIFE = load("life", "Acquire", "life", at=(
    f"{PAGE} ShadowPage::is_alive life.load", f"{PAGE} ShadowPage::generation life.load",
))
COME_ALIVE = rmw("life", 1, "Release", at=f"{PAGE} ShadowPage::come_alive life.fetch_or")
END_OF_LIFE = cas("life", 0, 1, "AcqRel", at=(
    f"{PAGE} ShadowPage::unpin life.compare_exchange", f"{PAGE} ShadowPage::die life.compare_exchange",
))
RELEASE_RECORD = rmw("in_use", 1, "Release", at=f"{PAGE} Pages::release in_use.fetch_and")
CLAIM_RECORD = rmw("in_use", 2, "Acquire", "in_use", at=f"{PAGE} Pages::claim word.fetch_or")
TARGET = load("target", "Acquire", "target", at="shadow/pte_records.rs PteRecords::target targets.load")
SET_TARGET = store("target", 1, "Release", at="shadow/pte_records.rs PteRecords::set_target targets.store")
LOCK = (
    cas("held", 0, 1, "Acquire", at="shadow/lock.rs WordLock::try_lock 0.compare_exchange"),
    fence("fence_after_rmw", at="shadow/lock.rs WordLock::try_lock fence_after_rmw"),
)
LOCK_NEXT = cas("held", 2, 3, "Acquire", at="shadow/lock.rs WordLock::try_lock 0.compare_exchange")
UNLOCK = store("held", 2, "Release", at="shadow/lock.rs WordGuard::drop 0.store")
IS_FREE = load("held", "Acquire", "held", at="shadow/lock.rs WordLock::is_free 0.load")
READ_GUEST = load("guest", "Acquire", "guest", at=(
    "shadow/memory.rs load cast.load", "shadow/memory.rs load cast.load#2",
))
NOTE_UNSYNC = rmw("unsync", 1, "AcqRel", at=f"{PAGE} Pages::note_unsync unsync.fetch_or")
READ_UNSYNC = load("unsync", "Acquire", "unsync", at=(
    f"{PAGE} Pages::next_unsync word.load", f"{PAGE} Pages::is_unsync unsync.load",
))
MARK = cas("guest", 0, 1, "AcqRel", at=(
    "shadow/memory.rs Mmu::mark_guest cell.compare_exchange",
    "shadow/memory.rs Mmu::mark_guest cell.compare_exchange#2",
))
READ_SECOND = load("second", "Acquire", "second", at="table/pte_ref.rs PteRef::load cell.load")
KINDS = "made_kinds"
COUNT_UNFLUSHED = rmw("count", 1, "SeqCst", at="table/tlb.rs TlbBatch::count_in counter.fetch_add")
HAS_UNFLUSHED = load("count", "SeqCst", "count", at="shadow/zap.rs Mmu::has_unflushed nr_unflushed.load")
FIND_UNFLUSHED = (LOCK_NEXT, load("leaf", "Relaxed", "leaf"), HAS_UNFLUSHED)

TESTS = [
    Test(
        "record-of-next-page", "A walk reads the record of the next page, and finds the page of before alive.", (
            (END_OF_LIFE, RELEASE_RECORD),
            (CLAIM_RECORD, SET_ROLE),
            (ROLE, LIFE),
        ), "1:in_use=1 2:role=1 2:life=0",
        (Weaker("2.0=Relaxed", "alr"), Weaker("1.0=Relaxed 1.1=Relaxed", "alr")),
    ),
    Test(
        "record-of-next-page-target", "The same with a PTE of the next page, which leads elsewhere.", (
            (END_OF_LIFE, RELEASE_RECORD),
            (CLAIM_RECORD, SET_TARGET),
            (TARGET, LIFE),
        ), "1:in_use=1 2:target=1 2:life=0", (Weaker("2.0=Relaxed", "alr"),),
    ),
    Test(
        "record-frame-and-lock", "A zap locks the frame of the next page, and finds the link to the page of before.", (
            (SET_TARGET, END_OF_LIFE, RELEASE_RECORD),
            (CLAIM_RECORD, SET_ROLE),
            (ROLE, *LOCK, TARGET),
        ), "1:in_use=1 2:role=1 2:target=0", (Weaker("2.0=Relaxed 2.1=Relaxed 2.2=none", "alr"),),
    ),
    Test(
        "record-alive", "A thread finds a page alive, and reads what its record said before.", (
            (SET_ROLE, COME_ALIVE),
            (LIFE, ROLE),
        ), "1:life=1 1:role=0", (Weaker("0.1=Relaxed", "alr"), Weaker("1.0=Relaxed", "alr")),
    ),
    Test(
        "record-linked", "A thread finds a link to a page, and reads what the page's record said before.", (
            (SET_ROLE, COME_ALIVE, SET_TARGET),
            (TARGET, ROLE),
        ), "1:target=1 1:role=0", (Weaker("0.2=Relaxed", "alr"), Weaker("1.0=Relaxed", "alr")),
    ),
    Test(
        "page-pinned", "A vCPU pins a page, and reads what its record said before.", (
            (SET_ROLE, COME_ALIVE),
            (cas("life", 1, 2, "AcqRel", at=f"{PAGE} ShadowPage::pin life.compare_exchange"), ROLE),
        ), "1:role=0", (Weaker("0.1=Relaxed", "alr"), Weaker("1.0=Relaxed", "alr")),
    ),
    Test(
        "page-unpinned", "The last pin ends and the page is freed, while an earlier user still reads it.", (
            (load("page", "Relaxed", "page"), END_OF_LIFE),
            (cas("life", 1, 2, "AcqRel", at=f"{PAGE} ShadowPage::unpin life.compare_exchange"),
             store("page", 1, "Relaxed")),
        ), "0:page=1", (Weaker("0.1=Acquire", "alr"), Weaker("1.0=Release", "ar")),
    ),
    Test(
        "guest-flush", "A guest changes its PTE and flushes: the page is not known as unsync, and has the old PTE.", (
            (store("guest", 1, "Relaxed"), fence("full_fence", at="shadow/sync.rs Mmu::sync_root full_fence"),
             READ_UNSYNC),
            (NOTE_UNSYNC, *LOCK, READ_GUEST),
        ), "0:unsync=0 1:guest=0", (Weaker("0.1=none", "alrx"), Weaker("1.1=Relaxed 1.2=none", "a")),
    ),
    Test(
        "guest-flush-one-page", "The same for one address: the page's lock is found free.", (
            (store("guest", 1, "Relaxed"), fence("full_fence", at="shadow/sync.rs Mmu::may_be_stale full_fence"),
             IS_FREE),
            (*LOCK, READ_GUEST),
        ), "0:held=0 1:guest=0", (Weaker("0.1=none", "alrx"), Weaker("1.1=none", "alr")),
    ),
    Test(
        "lock-found-free", "A thread finds a lock free, and misses what the last holder stored.", (
            (SET_TARGET, UNLOCK),
            (IS_FREE, TARGET),
        ), "1:held=2 1:target=0", (Weaker("0.1=Relaxed", "alr"), Weaker("1.0=Relaxed", "alr")),
    ),
    Test(
        "held", "A holder of a lock misses what the holder before it stored.", (
            (SET_TARGET, UNLOCK),
            (LOCK_NEXT, TARGET),
        ), "1:target=0", (Weaker("0.1=Relaxed", "alr"), Weaker("1.0=Relaxed", "alr")),
    ),
    Test(
        "lock-reads", "A holder of a lock reads what the next holder stores.", (
            (load("target", "Relaxed", "target"), UNLOCK),
            (LOCK_NEXT, SET_TARGET),
        ), "0:target=1", (Weaker("0.1=Relaxed", "alr"),),
    ),
    Test(
        "marks", "A fault sets A in a guest's PTE and finds no page that misreads that; such a page misses A.", (
            (MARK, fence("fence_after_rmw", at="shadow/walk.rs Mmu::set_marks fence_after_rmw"),
             load(KINDS, "Relaxed", "kinds", at="shadow/walk.rs Mmu::set_marks made_kinds.load")),
            (rmw(KINDS, 1, "Relaxed", at="shadow/install.rs Mmu::list_page made_kinds.fetch_or"), *LOCK, READ_GUEST),
        ), "0:kinds=0 1:guest=0", (Weaker("0.1=none", "ar"), Weaker("1.2=none", "alr")),
    ),
    Test(
        "marks-of-another-page", "The same, where another thread has noted the kind of page.", (
            (MARK, fence("fence_after_rmw", at="shadow/walk.rs Mmu::set_marks fence_after_rmw"),
             load(KINDS, "Relaxed", "kinds", at="shadow/walk.rs Mmu::set_marks made_kinds.load")),
            (rmw(KINDS, 1, "Relaxed", at="shadow/install.rs Mmu::list_page made_kinds.fetch_or"),),
            (load(KINDS, "Relaxed", "noted", at="shadow/install.rs Mmu::list_page made_kinds.load"), *LOCK, READ_GUEST),
        ), "0:kinds=0 2:noted=1 2:guest=0", (Weaker("0.1=none", "ar"), Weaker("2.2=none", "alr")),
    ),
    Test(
        "second-stage", "The second stage changes, and a frame's lock is free; a later holder misses the change.", (
            (exchange(1, loc="second"),
             fence("full_fence", at="shadow/zap.rs Mmu::zap_unbacked full_fence"), IS_FREE),
            (*LOCK, READ_SECOND),
        ), "0:held=0 1:second=0", (Weaker("0.1=none", "ar"), Weaker("1.1=none", "alr")),
    ),
    Test(
        "second-stage-w", "The same, where a harvest has taken W.", (
            (rmw("second", 1, "SeqCst", at="table/pte_ref.rs PteRef::clear cell.fetch_and"),
             fence("fence_after_rmw", at="shadow/zap.rs Mmu::write_protect fence_after_rmw"), IS_FREE),
            (*LOCK, READ_SECOND),
        ), "0:held=0 1:second=0", (Weaker("0.1=none", "a"), Weaker("1.1=none", "alr")),
    ),
    Test(
        "unsync-before-w", "A guest writes its table through a leaf with W, and its flush finds no page unsync.", (
            (NOTE_UNSYNC, store("leaf", 1, "Release", at="shadow/install.rs Mmu::install_leaf cell.store")),
            (load("leaf", "Relaxed", "leaf"), store("guest", 1, "Relaxed", addr="leaf")),
            (load("guest", "Relaxed", "guest"), fence("full_fence", at="shadow/sync.rs Mmu::sync_root full_fence"),
             READ_UNSYNC),
        ), "1:leaf=1 2:guest=1 2:unsync=0", (Weaker("0.1=Relaxed", "a"), Weaker("2.1=none", "alr")),
    ),
    Test(
        "unflushed", "A thread finds a shadow PTE zapped under the lock of its frame, and no flush under way.", (
            (COUNT_UNFLUSHED,
             store("leaf", 1, "Release", at=(
                 "shadow/zap.rs Mmu::drop_leaf cell.store", "shadow/zap.rs Mmu::drop_entry cell.store",
                 "shadow/zap.rs Mmu::zap_page cell.store", "shadow/install.rs Mmu::protect_leaves cell.store",
             )), UNLOCK),
            FIND_UNFLUSHED,
        ), "1:leaf=1 1:count=0", (Weaker("0.2=Relaxed", "a"),),
    ),
    Test(
        "unflushed-w", "The same, where W was taken.", (
            (COUNT_UNFLUSHED,
             rmw("leaf", 1, "AcqRel", at=(
                 "shadow/zap.rs Mmu::write_protect_leaves cell.fetch_and",
                 "shadow/sync.rs Mmu::write_protect_leaf cell.fetch_and",
             )), UNLOCK),
            FIND_UNFLUSHED,
        ), "1:leaf=1 1:count=0", (Weaker("0.1=Relaxed 0.2=Relaxed", "a"),),
    ),
    Test(
        "flush-is-over", "A thread finds no flush under way, and does not observe the one that was.", (
            (store("flushed", 1, "Relaxed"),
             rmw("count", 1, "SeqCst", at="table/tlb.rs TlbBatch::flush_cpus_and_release counter.fetch_sub")),
            (HAS_UNFLUSHED,
             load("flushed", "Relaxed", "flushed")),
        ), "1:count=1 1:flushed=0", (Weaker("0.1=Relaxed", "alr"), Weaker("1.0=Relaxed", "alr")),
    ),
    Test(
        "tracked", "A thread finds a table tracked, and does not observe the flush before that.", (
            (store("flushed", 1, "Relaxed"),
             store("tracked", 1, "Release", at="shadow/install.rs Mmu::finish_tracking tracked_generation.store")),
            (load("tracked", "Acquire", "tracked", at="shadow/install.rs Mmu::finish_tracking tracked_generation.load"),
             load("flushed", "Relaxed", "flushed")),
        ), "1:tracked=1 1:flushed=0", (Weaker("0.1=Relaxed", "alr"), Weaker("1.0=Relaxed", "alr")),
    ),
    Test(
        "shadow-link-walker", "A page-table walker finds a shadow page linked, and not what is in it.", (
            (store("entry", 1, "Relaxed"), store("leaf", 1, "Release", at="shadow/install.rs Mmu::link cell.store")),
            (load("leaf", "Relaxed", "leaf"), load("entry", "Relaxed", "entry", addr="leaf")),
        ), "1:leaf=1 1:entry=0", (Weaker("0.1=Relaxed", "alr"),),
    ),
    Test(
        "guest-table", "A walk of the guest's tables finds a PTE, and what the guest had below it before.", (
            (store("page", 1, "Relaxed"), store("guest", 1, "Release", at=(
                "shadow/memory.rs Mmu::write_guest cast.store", "shadow/memory.rs Mmu::write_guest cast.store#2",
            ))),
            (READ_GUEST, load("page", "Relaxed", "page")),
        ), "1:guest=1 1:page=0", (Weaker("0.1=Relaxed", "alr"), Weaker("1.0=Relaxed", "alr")),
    ),
    Test(
        "guest-table-bytes", "The same, where a byte of the PTE was written.", (
            (store("page", 1, "Relaxed"),
             cas("guest", 0, 1, "AcqRel", at="shadow/memory.rs write_byte cell.compare_exchange")),
            (READ_GUEST, load("page", "Relaxed", "page")),
        ), "1:guest=1 1:page=0", (Weaker("0.1=Relaxed", "alr"),),
    ),
    Test(
        "synced", "A page is found synced, and its PTE as it was before it was compared.", (
            (store("leaf", 1, "Relaxed"),
             rmw("unsync", 2, "AcqRel", at=f"{PAGE} Pages::note_synced unsync.fetch_and")),
            (READ_UNSYNC, load("leaf", "Relaxed", "leaf")),
        ), "1:unsync=2 1:leaf=0", (Weaker("0.1=Relaxed", "alr"), Weaker("1.0=Relaxed", "alr")),
    ),
]
