//! What becomes of page-table pages that a zap has unlinked: which may be unlinked, and how they come
//! to the TLB batch, empty or with their leaves. The head of `second_stage/zap.rs` says why it is
//! right.

use super::{MAX_DEFERRED_LEAF_TABLES, MAX_DEFERRED_TABLES, NR_LIST_PTES, Zap};
use crate::addr::{Gfn, Hpa, Level};
use crate::format::Format;
use crate::host::Host;
use crate::second_stage::broken;
use crate::stats::Counter;
use crate::table::node;
use crate::table::pte::State;
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
                State::Broken => unsafe { broken::report_frozen(self.op, guard, old, level, gfn) },
                state => debug_assert!(matches!(state, State::Empty(_)), "a table is unlinked with a leaf in it"),
            }
        }
        // SAFETY: as the caller promises; its PTEs are empty, or were frozen above.
        unsafe { self.batch.add_unlinked(table) }
    }

    /// Adds a page-table page of PTEs of `level`, which this thread unlinked inside `guard`, to the
    /// batch, with its leaves and with the page-table pages of leaves below it: see the module.
    /// Returns how many PTEs it visited.
    ///
    /// # Safety
    /// As for [`take_over`](Self::take_over), but that there may be leaves, and that faults may
    /// install some. `level` is 2 MiB at most.
    pub(super) unsafe fn take_over_with_leaves(
        &mut self,
        guard: &Guard<'_>,
        table: Hpa,
        level: Level,
        start: Gfn,
    ) -> u64 {
        debug_assert!(level <= Level::L2M, "page-table pages of leaves are named by one that is retired");
        let (op, stats) = (self.op, self.op.stats());
        // SAFETY: as the caller promises.
        let ptes = unsafe { node::linked_ptes::<H, F>(op.host(), guard, table, level) };
        let nr_frozen = if level == Level::L4K { NR_LIST_PTES } else { F::TABLE_ENTRIES };
        let (mut nr_leaves, mut nr_tables, mut nr_steps) = (0, 1, nr_frozen as u64);
        for (index, pte) in ptes.iter().take(nr_frozen).enumerate() {
            let gfn = Gfn(start.0 + index as u64 * level.nr_pages());
            let mut value = pte.load();
            while let Err(found) = pte.freeze_as_was(value) {
                value = found;
            }
            match value.state(level) {
                State::Leaf | State::Tracked => nr_leaves += 1,
                State::Table if index < NR_LIST_PTES => {
                    // SAFETY: this thread has just frozen the PTE, which the list overwrites.
                    nr_steps += unsafe { self.take_over_with_leaves(guard, value.table_below(), level.down(), gfn) };
                }
                // The frozen PTE names it.
                State::Table => nr_tables += 1,
                // SAFETY: the PTE was read inside the guard, and was broken.
                State::Broken => unsafe { broken::report_frozen(op, guard, value, level, gfn) },
                State::Empty(_) | State::Frozen => {}
            }
        }
        stats.add(Counter::zapped(level), nr_leaves);
        stats.add(Counter::Zapped, nr_leaves);
        // SAFETY: as the caller promises. The first PTEs were frozen above, and in a page-table
        // page of directory entries all. They alone name the page-table pages below, none of which
        // a list has, but for those of the first, which were added above.
        unsafe { self.batch.add_unlinked_with_leaves(table, nr_tables) }
        nr_steps
    }
}
