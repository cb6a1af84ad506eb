//! What a fault does where it needs no frame: it restores access through a leaf PTE, pushes a
//! protected directory entry down, splits a huge leaf, or aborts the work on a broken PTE.

use super::Fault;
use super::plan::{LeafPlan, Step};
use crate::addr::{Access, Level};
use crate::dirty::log;
use crate::error::FaultError;
use crate::format::Format;
use crate::host::Host;
use crate::second_stage::broken::{self, BrokenPinned};
use crate::second_stage::install;
use crate::second_stage::push_down::{self, Others, Pushed};
use crate::second_stage::split;
use crate::slot::view::SlotView;
use crate::stats::Counter;
use crate::sync::{Side, spin_loop};
use crate::table::cursor::Cursor;
use crate::table::pte::{Pte, State};
use crate::table::pte_ref::{Changed, PteRef};
use crate::table::retire::Guard;

/// How often a fault reads a broken PTE before it aborts the recovery. A running recovery is mostly
/// over by then; aborting it costs as much as it does, and one more fault. A recovery whose thread
/// is preempted is not waited for.
const SPINS_BEFORE_CANCEL: usize = if cfg!(any(loom, shuttle)) { 1 } else { 100 };

impl<H: Host, F: Format> Fault<'_, H, F> {
    /// Carries out a plan that needs no frame.
    #[inline(always)]
    pub(super) fn act_on_leaf(&mut self, plan: &LeafPlan<F>) -> Result<Result<Step, Changed>, FaultError> {
        match *plan {
            LeafPlan::Restore(value) => Ok(self.restore(value).map(|()| Step::Done)),
            LeafPlan::Split(value, level) => {
                self.top_up(1, self.op.tree.encoding.frame(value, level))?;
                Ok(self.split(value, level, split::parts_of::<F>(&self.op.tree.config, value, level)))
            }
            LeafPlan::PushDown => Ok(self.push_down()),
        }
    }

    /// Whether a huge leaf of `level` must be split before a write: because `slot_logs` by smaller
    /// pages, or because the ring has no room for all of its pages.
    #[inline]
    pub(super) fn splits(&self, level: Level, slot_logs: bool) -> bool {
        let largest = || if slot_logs { self.op.tree.config.largest_logged_write() } else { Level::L1G };
        level > Level::L4K && (level > largest() || level.nr_pages() > self.max_opened())
    }

    /// Step 3 for a leaf that only lacks access, under the VM's lock.
    #[inline(never)]
    fn restore(&self, value: Pte<F>) -> Result<(), Changed> {
        let tree = self.op.tree;
        let locked = self.op.pin_locked(Side::Read);
        let mut cursor = Cursor::new(tree, &locked.guard, self.gfn);
        let found = cursor.descend_to_lowest().0;
        // The level is compared, too: the very same value may by now be that of a larger leaf.
        let opens_too_many = self.access == Access::Write && cursor.level().nr_pages() > self.max_opened();
        if found != value || opens_too_many {
            return Err(Changed);
        }
        self.restore_at(cursor.pte(), &locked.guard, value, None)
    }

    /// Restores access through the leaf `value` in `pte`, and marks the pages that may be written.
    /// `slot` is their memslot, if that was found in the same guard.
    #[inline]
    pub(super) fn restore_at(
        &self,
        pte: PteRef<'_, F>,
        guard: &Guard<'_>,
        value: Pte<F>,
        slot: Option<&SlotView<'_, H::Backing>>,
    ) -> Result<(), Changed> {
        if pte.level() == Level::L4K {
            // What most faults do, with all levels constant.
            self.restore_to(pte, guard, value, slot)
        } else {
            self.restore_huge(pte, guard, value)
        }
    }

    #[inline(never)]
    fn restore_huge(&self, pte: PteRef<'_, F>, guard: &Guard<'_>, value: Pte<F>) -> Result<(), Changed> {
        self.restore_to(pte, guard, value, None)
    }

    #[inline(always)]
    pub(super) fn restore_to(
        &self,
        pte: PteRef<'_, F>,
        guard: &Guard<'_>,
        value: Pte<F>,
        slot: Option<&SlotView<'_, H::Backing>>,
    ) -> Result<(), Changed> {
        install::restore_access::<F>(self.op.tree.config.access_tracking, pte, value, self.access)?;
        if self.access == Access::Write {
            self.count(Counter::WritesRestored);
            match slot {
                Some(slot) => log::mark_page_of(self.op.slots, guard, self.ring, slot, self.gfn),
                None => self.mark_leaf(guard, pte.level()),
            }
        } else {
            self.count(Counter::AccessesRestored);
        }
        Ok(())
    }

    /// Sets A, and for a write D, of a leaf that allows the access. A CPU that sets neither faults
    /// until they are set (Arm with VTCR_EL2.HA clear: "Access flag fault"; RISC-V without Svadu,
    /// Svade). The bits say what the CPU is about to do.
    ///
    /// Where CPUs' dirty bits are the log, it also marks the page, as for any leaf that this fault
    /// makes dirty ([`marks_for`](Self::marks_for)): no CPU will put it into a modification log.
    /// Elsewhere a writable leaf has been marked before.
    #[cold]
    pub(super) fn set_marks(&self) -> Result<Step, Changed> {
        let tree = self.op.tree;
        let locked = self.op.pin_locked(Side::Read);
        let mut cursor = Cursor::new(tree, &locked.guard, self.gfn);
        let (value, state) = cursor.descend_to_lowest();
        let writes = self.access == Access::Write;
        if state != State::Leaf || (writes && (!value.is_writable() || cursor.is_protected())) {
            return Err(Changed);
        }
        let marked = value.marked(self.access);
        // If hardware or another fault was first, the next look finds what is missing.
        cursor.pte().exchange(value, marked)?;
        if writes && !tree.config.first_write_faults(cursor.level()) {
            self.mark_leaf(&locked.guard, cursor.level());
        }
        self.count(Counter::Spurious);
        Ok(Step::Done)
    }

    /// Step 3 for a leaf below a protected directory entry, under the VM's lock.
    #[inline(never)]
    fn push_down(&self) -> Result<Step, Changed> {
        let locked = self.op.pin_locked(Side::Read);
        self.push_down_in(&locked.guard)
    }

    #[cold]
    pub(super) fn push_down_in(&self, guard: &Guard<'_>) -> Result<Step, Changed> {
        let slots = self.op.slots;
        let others = || {
            let logs = slots.find(guard, self.gfn).is_none_or(|slot| slot.logs());
            if logs { Others::Protect } else { Others::Leave }
        };
        let pushed = push_down::push_down(self.op.tree, guard, self.gfn, others)?;
        self.count(Counter::WritesRestored);
        // Also if W of the directory entry could not be restored: see `push_down`.
        self.mark_leaf(guard, Level::L4K);
        match pushed {
            Pushed::Open => {
                self.count(Counter::TablesUnprotected);
                Ok(Step::Done)
            }
            Pushed::LeafOnly => Err(Changed),
        }
    }

    /// Replaces the huge leaf `value` of `level` by a page-table page, for which the cache has one.
    /// Its parts allow what `whole` does; with break before make, what `split_by_breaking` says.
    #[cold]
    #[inline(never)]
    pub(super) fn split(&mut self, value: Pte<F>, level: Level, whole: Pte<F>) -> Result<Step, Changed> {
        let tree = self.op.tree;
        if F::BREAK_BEFORE_MAKE {
            split::split_by_breaking(self.op, self.tables, self.gfn, value, level)?;
        } else {
            let locked = self.op.pin_locked(Side::Read);
            let mut cursor = Cursor::new(tree, &locked.guard, self.gfn);
            // The level is compared, too: the very same value may by now be that of another leaf.
            if cursor.descend_to_lowest().0 != value || cursor.level() != level {
                return Err(Changed);
            }
            install::split_into(&cursor, self.tables, value, whole)?;
        }
        Ok(Step::Nearer)
    }

    /// Aborts the recovery or the split that is under way where the page is. A split of a pinned leaf
    /// is finished instead.
    #[cold]
    pub(super) fn cancel(&self) {
        if let Some(pinned) = self.cancel_unless_pinned() {
            pinned.finish(self.op);
        }
    }

    // A function of its own, so that to finish a split has its stack.
    #[inline(never)]
    fn cancel_unless_pinned(&self) -> Option<BrokenPinned<F>> {
        let tree = self.op.tree;
        let locked = self.op.pin_locked(Side::Read);
        let mut cursor = Cursor::new(tree, &locked.guard, self.gfn);
        let (broken, state) = cursor.descend_to_lowest();
        if state == State::Broken && !F::BREAK_BEFORE_MAKE {
            for _ in 0..SPINS_BEFORE_CANCEL {
                spin_loop();
                if cursor.pte().load() != broken {
                    return None;
                }
            }
        }
        broken::cancel(self.op, &locked.guard, &cursor)
    }
}
