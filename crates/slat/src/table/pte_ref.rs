//! A PTE in a page-table page, and the operations that change one. `pte` has the states and the
//! changes between them.

use core::marker::PhantomData;

use super::pte::{self, Pte};
#[cfg(debug_assertions)]
use super::pte::{Breaking, State};
use crate::addr::Level;
use crate::format::Format;
use crate::sync::{AtomicU64, Ordering};

/// A PTE in a page-table page that is linked or was: the only way to change one.
pub(crate) struct PteRef<'s, F> {
    cell: &'s AtomicU64,
    level: Level,
    format: PhantomData<F>,
}

impl<F> Clone for PteRef<'_, F> {
    #[inline]
    fn clone(&self) -> Self {
        *self
    }
}

impl<F> Copy for PteRef<'_, F> {}

impl<'s, F: Format> PteRef<'s, F> {
    #[inline]
    pub(crate) fn new(cell: &'s AtomicU64, level: Level) -> PteRef<'s, F> {
        PteRef { cell, level, format: PhantomData }
    }

    #[inline]
    pub(crate) fn level(&self) -> Level {
        self.level
    }

    /// Acquire: pairs with the release of the thread that linked the page-table page or the leaf,
    /// so that a page-table page is observed filled. It also orders this read before the reads of
    /// the state that the answer depends on (see `invalidation_seq`).
    #[inline]
    pub(crate) fn load(&self) -> Pte<F> {
        Pte::from_bits(self.cell.load(Ordering::Acquire))
    }

    /// Replaces `old` by `new`, if `old` is still there; else returns what is there. SeqCst:
    /// release, so that a walk observes the PTEs of a new page-table page; acquire, as for `load`;
    /// and total order with the accesses of the memslot set and of the dirty bitmap that pair with
    /// it (see `fence_after_rmw` at the callers).
    #[inline]
    pub(crate) fn compare_exchange(&self, old: Pte<F>, new: Pte<F>) -> Result<(), Pte<F>> {
        #[cfg(debug_assertions)]
        self.assert_transition(old, new);
        match self.cell.compare_exchange(old.bits(), new.bits(), Ordering::SeqCst, Ordering::Acquire) {
            Ok(_) => Ok(()),
            Err(found) => Err(Pte::from_bits(found)),
        }
    }

    /// Clears `bits` of a PTE of the lowest level with one AND, and returns what it was before. The
    /// PTE may be no leaf by now: in all that it can be then, W and A are clear. (A is cleared so
    /// only where no leaf is ever tracked.)
    #[inline]
    pub(crate) fn clear(&self, bits: u64) -> Pte<F> {
        const {
            assert!((F::WRITABLE | F::ACCESSED) & pte::SET_WHERE_NOT_PRESENT == 0);
            assert!(F::WRITABLE & pte::SET_WHERE_TRACKED == 0);
        }
        debug_assert!(self.level == Level::L4K, "an AND above the lowest level could hit a directory entry");
        debug_assert!(bits & !(F::WRITABLE | F::ACCESSED) == 0, "not for {bits:#x}");
        // SeqCst: stands in the store-load pairs of the dirty log.
        Pte::from_bits(self.cell.fetch_and(!bits, Ordering::SeqCst))
    }

    /// Freezes a PTE of a page-table page that the caller has unlinked; returns what it was before.
    #[inline]
    pub(crate) fn freeze(&self) -> Pte<F> {
        // AcqRel: observes what the PTE pointed to as its writer left it.
        Pte::from_bits(self.cell.swap(Pte::<F>::FROZEN.bits(), Ordering::AcqRel))
    }

    /// Freezes `value`, which keeps what it was, and returns that; `Err` is what is there instead.
    #[inline]
    pub(crate) fn freeze_as_was(&self, value: Pte<F>) -> Result<Pte<F>, Pte<F>> {
        // AcqRel, Acquire: as for `freeze`, also for a thread that finds it frozen.
        let frozen = value.frozen_as_was(self.level);
        match self.cell.compare_exchange(value.bits(), frozen.bits(), Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(frozen),
            Err(found) => Err(Pte::from_bits(found)),
        }
    }

    #[cfg(debug_assertions)]
    fn assert_transition(&self, old: Pte<F>, new: Pte<F>) {
        let level = self.level;
        let allowed = match (old.state(level), new.state(level)) {
            (State::Empty(_), State::Leaf | State::Table) => true,
            (State::Empty(before), State::Empty(after)) => before < after,
            (State::Leaf, State::Leaf | State::Tracked) | (State::Tracked, State::Leaf) => {
                old.frame(level) == new.frame(level)
                    && old.is_host_writable() == new.is_host_writable()
                    && (new.is_dirty() || !old.is_dirty())
            }
            (State::Leaf | State::Tracked, State::Table) => level > Level::L4K,
            (State::Table, State::Table) => {
                level == Level::L2M
                    && Pte::<F>::CAN_BE_PROTECTED
                    && (new == old.protected() || (old.is_protected() && new == old.unprotected()))
            }
            (State::Leaf | State::Tracked | State::Table | State::Broken, State::Empty(_)) => true,
            (State::Table, State::Broken) => new.table_of_broken() == (old.table_below(level), Breaking::Recovery),
            (State::Leaf | State::Tracked, State::Broken) => {
                F::BREAK_BEFORE_MAKE && level > Level::L4K && new.table_of_broken().1 == Breaking::Split
            }
            (State::Broken, State::Leaf | State::Tracked) => old.table_of_broken().1 == Breaking::Recovery,
            (State::Broken, State::Table) => old.table_of_broken() == (new.table_below(level), Breaking::Split),
            _ => false,
        };
        assert!(allowed, "forbidden change of a PTE of level {}: {old:?} to {new:?}", level.0);
        let is_leaf = new.state(level) == State::Leaf;
        assert!(
            !is_leaf || !new.is_writable() || new.is_host_writable(),
            "writable leaf that the host does not allow to write: {new:?}"
        );
    }
}
