//! The leaves of 4 KiB of one page-table page, which a zap visits in one loop. What is the same for
//! all of them is done once. The head of `second_stage/zap.rs` says why it is right.

use super::{Faults, Work, Zap, mark_dirty};
use crate::addr::{Gfn, GfnRange, Level};
use crate::format::Format;
use crate::host::Host;
use crate::second_stage::walk::Next;
use crate::stats::Counter;
use crate::sync::Side;
use crate::table::cursor::Cursor;
use crate::table::node;
use crate::table::pte::{Pte, State};
use crate::table::pte_ref::Ptes;
use crate::table::retire::Guard;

impl<H: Host, F: Format> Zap<'_, '_, H, F> {
    /// Zaps the range, a part of a block of 2 MiB, as far as there are PTEs of 4 KiB for it: most
    /// invalidations are so small, and the turns of a walk would be half of their cost. No
    /// page-table page is unlinked. Returns the first page that is left to the walk.
    #[inline(always)]
    pub(super) fn zap_in_one_table(&mut self) -> Gfn {
        let zap_in = |zap: &mut Self, guard: &Guard<'_>| {
            let mut cursor = Cursor::above_small(zap.op.tree, guard, zap.range.start);
            let Some((_, ptes)) = cursor.read_table(Level::L2M) else { return zap.range.start };
            guard.visit(1 + zap.range.nr_pages());
            match zap.zap_ptes(guard, &mut cursor, ptes) {
                Next::Advance(_) => zap.range.end,
                Next::Again(_) | Next::Leave(_) => cursor.gfn(),
            }
        };
        // As in `walk::run`.
        if self.op.tree.is_locked() {
            return zap_in(self, &self.op.pin_locked(Side::Write).guard);
        }
        zap_in(self, &self.op.pin())
    }

    /// Visits `ptes` of the lowest level, those of the page-table page below the cursor's PTE, from
    /// the cursor's page on, as far as the range goes, as [`visit`](Self::visit) does. If it does not
    /// come to the end, the cursor is where it goes on: no page is visited twice, so none gets the
    /// zap's number twice.
    #[expect(clippy::too_many_lines, reason = "one match over the states of a PTE, in a loop that is hot")]
    #[inline(never)]
    pub(super) fn zap_ptes(
        &mut self,
        guard: &Guard<'_>,
        cursor: &mut Cursor<'_, H, F>,
        ptes: Ptes<'_, F>,
    ) -> Next<Work<F>> {
        let (op, tree) = (self.op, self.op.tree);
        let (part, pages) = cursor.small_pages(ptes, self.range.end);
        let marks = !tree.config.first_write_faults(Level::L4K);
        let may_come_back = F::BREAK_BEFORE_MAKE && self.faults == Faults::MayComeBack;
        let of_leaf = if may_come_back { self.seq.unflushed() } else { self.seq };
        let mut nr_zapped = 0;
        let mut next = Next::Advance(1 + part.nr_pages());
        'ptes: for (gfn, pte) in pages {
            self.visits(gfn);
            loop {
                let value = pte.load();
                match value.state(Level::L4K) {
                    State::Leaf | State::Tracked => {
                        let range = GfnRange::new(gfn, 1);
                        let is_pinned = value.is_pinned();
                        let pfn = || tree.encoding.frame(value, Level::L4K);
                        if is_pinned && !self.batch.has_room_to_release(range, pfn()) {
                            cursor.move_to(gfn);
                            next = Next::Leave(Work::Retire);
                            break 'ptes;
                        }
                        if marks && !is_pinned {
                            mark_dirty(*op, guard, value, Level::L4K, range);
                        }
                        if !is_pinned {
                            node::report_zapped(tree, value, Level::L4K, range);
                        }
                        if pte.exchange(value, Pte::empty(of_leaf)).is_err() {
                            continue;
                        }
                        if nr_zapped == 0 {
                            // Not at the end: a report may unwind.
                            self.batch.add(part);
                        }
                        nr_zapped += 1;
                        if is_pinned {
                            self.batch.add_released(range, pfn());
                            self.nr_pinned += 1;
                        } else if marks {
                            mark_dirty(*op, guard, value, Level::L4K, range);
                        }
                    }
                    State::Empty(found) if found < self.seq => {
                        let is_unflushed = F::BREAK_BEFORE_MAKE && found.is_unflushed();
                        let seq = if is_unflushed { self.seq.unflushed() } else { self.seq };
                        if pte.exchange(value, Pte::empty(seq)).is_err() {
                            continue;
                        }
                    }
                    // As in `visit`.
                    State::Empty(_) => pte.clean(),
                    // The page-table page was unlinked meanwhile, or is broken.
                    State::Frozen | State::Broken | State::Table => {
                        cursor.move_to(gfn);
                        next = Next::Again(0);
                        break 'ptes;
                    }
                }
                break;
            }
        }
        op.stats().add(Counter::Zapped4K, nr_zapped);
        op.stats().add(Counter::Zapped, nr_zapped);
        next
    }
}
