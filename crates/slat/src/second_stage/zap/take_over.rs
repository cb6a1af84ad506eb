//! What becomes of page-table pages that a zap has unlinked: which may be unlinked, and how they
//! come to the TLB batch, empty or with their leaves. The head of `second_stage/zap.rs` says why it
//! is right.

use arrayvec::ArrayVec;

use super::{MAX_DEFERRED_LEAF_TABLES, MAX_DEFERRED_TABLES, NR_LIST_PTES, Zap};
use crate::addr::{Gfn, Hpa, Level};
use crate::format::Format;
use crate::host::Host;
use crate::second_stage::broken;
use crate::stats::Counter;
use crate::table::cursor::Cursor;
use crate::table::node;
use crate::table::pte::{Pte, State};
use crate::table::pte_ref::Changed;
use crate::table::retire::Guard;

/// Whether page-table pages may be unlinked with their leaves.
pub(super) enum Room {
    Yes,
    /// Perhaps, once what the zap has unlinked is flushed and retired.
    AfterFlush,
    No,
}

impl<H: Host, F: Format> Zap<'_, '_, H, F> {
    pub(super) fn may_unlink(&mut self) -> bool {
        let may_unlink = self.op.tree.epochs.nr_listed_tables() < MAX_DEFERRED_TABLES;
        self.leaves_tables |= !may_unlink;
        may_unlink
    }

    /// Whether one more page-table page may be unlinked with its leaves, and those below it.
    pub(super) fn room_for_leaf_tables(&self) -> Room {
        let epochs = &self.op.tree.epochs;
        let nr_listed = epochs.nr_listed_tables() + self.batch.nr_unlinked();
        let nr_tables = epochs.nr_deferred_tables() + self.batch.nr_unlinked_with_leaves();
        if nr_listed < MAX_DEFERRED_TABLES && nr_tables < MAX_DEFERRED_LEAF_TABLES {
            Room::Yes
        } else if self.batch.nr_unlinked() > 0 {
            Room::AfterFlush
        } else {
            Room::No
        }
    }

    /// Adds a page-table page of PTEs of `level`, which this thread unlinked inside `guard`, to
    /// the batch.
    ///
    /// PTEs of the lowest level stay as they are: empty, with numbers of this zap or of later ones,
    /// so that no fault installs there any more. PTEs above are frozen, because an overtaken fault
    /// could still link empty page-table pages there. What it has linked is added, too.
    ///
    /// # Safety
    /// The page-table page is one of the tree, and its address was read inside `guard`. This
    /// thread alone has unlinked it, or frozen the PTE above it. It has no leaf and gets none. The
    /// batch flushes what it covered.
    pub(super) unsafe fn take_over(&mut self, guard: &Guard<'_>, table: Hpa, level: Level, start: Gfn) {
        // SAFETY: as the caller promises.
        let ptes = unsafe { node::linked_ptes::<H, F>(self.op.host(), guard, table, level) };
        for (index, pte) in (0..).zip(ptes.iter()) {
            if level == Level::L4K {
                debug_assert!(
                    matches!(pte.load().state(level), State::Empty(_)),
                    "a table is unlinked that is not empty"
                );
                if !cfg!(debug_assertions) {
                    break;
                }
                continue;
            }
            let gfn = Gfn(start.0 + index * level.nr_pages());
            // SAFETY: the page-table page is retired below.
            let old = unsafe { pte.freeze() };
            match old.state(level) {
                // SAFETY: this thread has just frozen the PTE. What was linked there is empty, too.
                State::Table => unsafe { self.take_over(guard, old.table_below(), level.down(), gfn) },
                // A recovery of an empty page-table page that was linked there. The page belongs to
                // the owner of the broken PTE.
                // SAFETY: the PTE was read inside the guard, and was broken.
                State::Broken => unsafe { broken::report_frozen(*self.op, guard, old, level, gfn) },
                state => debug_assert!(matches!(state, State::Empty(_)), "a table is unlinked with a leaf in it"),
            }
        }
        // SAFETY: as the caller promises; its PTEs are empty, or were frozen above.
        unsafe { self.batch.add_unlinked(table) }
    }

    /// Unlinks the page-table page that the cursor's PTE, which is `value`, names. Adds it to the
    /// batch with its leaves, and with the page-table pages of leaves below it: see the module.
    /// Returns how many PTEs it visited.
    ///
    /// # Safety
    /// The cursor walks the zap's tree inside `guard`. Its PTE was read as `value`, a directory
    /// entry, and is of 1 GiB at most.
    // A loop and no recursion, and the exchange is in it: less stack.
    #[inline(never)]
    pub(super) unsafe fn unlink_with_leaves(
        &mut self,
        guard: &Guard<'_>,
        cursor: &Cursor<'_, H, F>,
        value: Pte<F>,
    ) -> Result<u64, Changed> {
        debug_assert!(value.state(cursor.level()) == State::Table, "{value:?} names no page-table page");
        // A fresh number, and no frozen PTE before the exchange, as where empty page-table pages
        // are unlinked.
        cursor.replace(value, Pte::empty(self.op.tree.next_seq()))?;
        let (mut table, mut level, mut start) = (value.table_below(), cursor.level().down(), cursor.block().start);
        debug_assert!(level <= Level::L2M, "page-table pages of leaves are named by one that is retired");
        self.batch.add(cursor.block());
        let (op, stats) = (self.op, self.op.stats());
        // Page-table pages below the first PTEs.
        let mut below = ArrayVec::<(Hpa, Gfn), NR_LIST_PTES>::new();
        let mut nr_steps = 0;
        loop {
            // SAFETY: its address was in the PTE that was exchanged above, or that was frozen
            // below.
            let ptes = unsafe { node::linked_ptes::<H, F>(op.host(), guard, table, level) };
            let nr_frozen = if level == Level::L4K { NR_LIST_PTES } else { F::TABLE_ENTRIES };
            let (mut nr_leaves, mut nr_tables) = (0, 1);
            for (index, pte) in ptes.iter().take(nr_frozen).enumerate() {
                let gfn = Gfn(start.0 + index as u64 * level.nr_pages());
                let mut value = pte.load();
                while let Err(found) = pte.freeze_as_was(value) {
                    value = found;
                }
                match value.state(level) {
                    State::Leaf | State::Tracked => nr_leaves += 1,
                    // This thread has just frozen the PTE, which the list overwrites.
                    State::Table if index < NR_LIST_PTES => below.push((value.table_below(), gfn)),
                    // The frozen PTE names it.
                    State::Table => nr_tables += 1,
                    // SAFETY: the PTE was read inside the guard, and was broken.
                    State::Broken => unsafe { broken::report_frozen(*op, guard, value, level, gfn) },
                    State::Empty(_) | State::Frozen => {}
                }
            }
            stats.add(Counter::zapped(level), nr_leaves);
            stats.add(Counter::Zapped, nr_leaves);
            nr_steps += nr_frozen as u64;
            // SAFETY: this thread alone has unlinked it, and the batch has its block. The first
            // PTEs were frozen above, and in a page-table page of directory entries all. They alone
            // name the page-table pages below, none of which a list has, but for those of the
            // first, which are added next.
            unsafe { self.batch.add_unlinked_with_leaves(table, nr_tables) }
            let Some(next) = below.pop() else { return Ok(nr_steps) };
            (table, start) = next;
            level = Level::L4K;
        }
    }
}
