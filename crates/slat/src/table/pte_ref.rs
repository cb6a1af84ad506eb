//! A PTE in a page-table page, and the operations that change one. `pte` has the states and the
//! changes between them.
//!
//! # Guarantees
//! - Each exchange is one of the changes in the table of `pte`. Debug builds check that.
//! - A safe operation stores no PTE that names a page-table page, unless the PTE before named the
//!   same one: it checks that. [`PteRef::link`] stores others, and is unsafe.
//!   [`Prepared`](super::node::Prepared) calls it for page-table pages that it owns.
//! - Where both states are known, an unsafe operation saves the check.
//! - Where walkers may read page tables past the CPUs' caches ([`Cleaner`]), a PTE is cleaned after
//!   each change. It is cleaned also when it is read and is present: the thread that wrote it may
//!   not have come to that yet, and the reader relies on what it has read.
//! - In a VM with a lock, the thread holds the side that the change needs. Debug builds check that.
//!
//! # Use
//! A walk gets a [`PteRef`] from its cursor, or from the [`Ptes`] of a page-table page. It loads
//! the PTE and replaces it: [`PteRef::replace`] also accounts the leaves that come or go.
//! [`PteRef::exchange`] accounts nothing. It is for a change of rights, A or D, and for a caller
//! that accounts many changes at once.

#![expect(unsafe_code, reason = "a PTE names memory that walks follow")]

use core::marker::PhantomData;
use core::slice::{self, SliceIndex};

use super::invalidation_seq::InvalidationSeq;
use super::participant::LockCheck;
use super::pte::{self, Breaking, Pte, State};
use super::retire::{FaultGuard, FaultPin, Guard, Kept, KeptGuard};
use crate::addr::Level;
use crate::format::Format;
use crate::format::walkers::Walkers;
use crate::host::Host;
use crate::stats::{Counter, Recorder};
use crate::sync::{AtomicU64, Ordering, Side, prefetch, record};

/// The PTE is no longer what the caller has read: another thread or hardware was faster.
#[derive(Debug)]
pub(crate) struct Changed;

/// What cleans the PTEs of a tree for walkers that read past the CPUs' caches. Of no size in a
/// format without these.
pub(crate) struct Cleaner<'s, F: Format>(<F::Walkers as Walkers>::Cleaner<'s>);

impl<F: Format> Clone for Cleaner<'_, F> {
    #[inline]
    fn clone(&self) -> Self {
        *self
    }
}

impl<F: Format> Copy for Cleaner<'_, F> {}

impl<'s, F: Format> Cleaner<'s, F> {
    #[inline]
    pub(crate) fn new<H: Host>(host: &'s H) -> Cleaner<'s, F> {
        Cleaner(F::Walkers::cleaner(host))
    }

    /// For PTEs outside of a tree.
    #[cfg(test)]
    pub(crate) fn none() -> Cleaner<'s, F> {
        Cleaner(F::Walkers::no_cleaner())
    }

    /// Cleans `ptes`, after they were written.
    #[inline]
    pub(crate) fn clean(self, ptes: &[AtomicU64]) {
        F::Walkers::clean(self.0, ptes);
    }
}

/// PTEs of one page-table page, one after the other.
pub(crate) struct Ptes<'s, F: Format> {
    pub(super) cells: &'s [AtomicU64],
    level: Level,
    lock: LockCheck<'s>,
    cleaner: Cleaner<'s, F>,
    format: PhantomData<F>,
}

impl<F: Format> Clone for Ptes<'_, F> {
    #[inline]
    fn clone(&self) -> Self {
        *self
    }
}

impl<F: Format> Copy for Ptes<'_, F> {}

impl<'s, F: Format> Ptes<'s, F> {
    /// # Safety
    /// `cells` are PTEs of `level` in a page-table page, or no walk reaches them.
    #[inline]
    pub(crate) unsafe fn new(
        cells: &'s [AtomicU64],
        level: Level,
        lock: LockCheck<'s>,
        cleaner: Cleaner<'s, F>,
    ) -> Ptes<'s, F> {
        Ptes { cells, level, lock, cleaner, format: PhantomData }
    }

    #[inline]
    pub(crate) fn level(self) -> Level {
        self.level
    }

    #[inline]
    pub(crate) fn at(self, index: usize) -> PteRef<'s, F> {
        self.with_level(&self.cells[index])
    }

    #[inline]
    pub(crate) fn get(self, index: usize) -> Option<PteRef<'s, F>> {
        self.cells.get(index).map(|cell| self.with_level(cell))
    }

    /// As [`get`](Self::get), if they are of the lowest level.
    #[inline]
    pub(crate) fn leaf(self, index: usize) -> Option<LeafRef<'s, F>> {
        let cell = self.cells.get(index).filter(|_| self.level == Level::L4K)?;
        Some(LeafRef { cell, lock: self.lock, format: PhantomData })
    }

    #[inline]
    fn with_level(self, cell: &'s AtomicU64) -> PteRef<'s, F> {
        PteRef { cell, level: self.level, lock: self.lock, cleaner: self.cleaner, format: PhantomData }
    }

    #[inline]
    pub(crate) fn iter(self) -> impl Iterator<Item = PteRef<'s, F>> {
        self.cells.iter().map(move |cell| self.with_level(cell))
    }

    /// Those of `range`. None, if there are not so many.
    #[inline]
    pub(crate) fn slice(self, range: impl SliceIndex<[AtomicU64], Output = [AtomicU64]>) -> Ptes<'s, F> {
        Ptes { cells: self.cells.get(range).unwrap_or_default(), ..self }
    }

    /// All of them, `len` at a time.
    #[inline]
    pub(crate) fn chunks(self, len: usize) -> impl Iterator<Item = Ptes<'s, F>> {
        self.cells.chunks(len).map(move |cells| Ptes { cells, ..self })
    }
}

/// A PTE of the lowest level: a [`PteRef`] that takes less room, for a caller that keeps many.
pub(crate) struct LeafRef<'s, F: Format> {
    cell: &'s AtomicU64,
    lock: LockCheck<'s>,
    format: PhantomData<F>,
}

impl<F: Format> Clone for LeafRef<'_, F> {
    #[inline]
    fn clone(&self) -> Self {
        *self
    }
}

impl<F: Format> Copy for LeafRef<'_, F> {}

impl<'s, F: Format> LeafRef<'s, F> {
    /// Has its cache line fetched, and waits for nothing.
    #[inline]
    pub(crate) fn prefetch(self) {
        prefetch(self.cell);
    }

    /// The PTE, in a tree with this cleaner.
    #[inline]
    pub(crate) fn pte(self, cleaner: Cleaner<'s, F>) -> PteRef<'s, F> {
        PteRef { cell: self.cell, level: Level::L4K, lock: self.lock, cleaner, format: PhantomData }
    }
}

/// A PTE in a page-table page that is linked or was: the only way to change one.
pub(crate) struct PteRef<'s, F: Format> {
    cell: &'s AtomicU64,
    level: Level,
    lock: LockCheck<'s>,
    cleaner: Cleaner<'s, F>,
    format: PhantomData<F>,
}

impl<F: Format> Clone for PteRef<'_, F> {
    #[inline]
    fn clone(&self) -> Self {
        *self
    }
}

impl<F: Format> Copy for PteRef<'_, F> {}

/// A PTE that one guard of a fault has found, for the next.
pub(crate) struct KeptPte<F> {
    cell: Kept<AtomicU64>,
    level: Level,
    format: PhantomData<F>,
}

/// A guard with a PTE that the guard before it has found.
pub(crate) struct PteGuard<'p, F> {
    cell: KeptGuard<'p, AtomicU64>,
    level: Level,
    format: PhantomData<F>,
}

impl<F: Format> KeptPte<F> {
    /// The next guard of the fault. `None`, and no guard, if any page-table page was retired since
    /// the first guard began.
    ///
    /// # Safety
    /// `pin` has opened the first guard.
    #[inline]
    pub(crate) unsafe fn reopen(self, pin: FaultPin<'_>) -> Option<PteGuard<'_, F>> {
        let KeptPte { cell, level, .. } = self;
        // SAFETY: as the caller promises.
        Some(PteGuard { cell: unsafe { pin.reopen(cell) }?, level, format: PhantomData })
    }
}

impl<F: Format> PteGuard<'_, F> {
    #[inline]
    pub(crate) fn guard(&self) -> &Guard<'_> {
        self.cell.guard()
    }

    /// The PTE. Its page-table page may have been unlinked meanwhile, but was not retired. `cleaner`
    /// is that of the tree.
    #[inline]
    pub(crate) fn pte<'s>(&'s self, cleaner: Cleaner<'s, F>) -> PteRef<'s, F> {
        let (level, lock) = (self.level, self.guard().lock_check());
        PteRef { cell: self.cell.thing(), level, lock, cleaner, format: PhantomData }
    }
}

impl<'s, F: Format> PteRef<'s, F> {
    /// # Safety
    /// `cell` is a PTE of `level` in a page-table page, or no walk reaches it.
    #[inline]
    pub(crate) unsafe fn new(
        cell: &'s AtomicU64,
        level: Level,
        lock: LockCheck<'s>,
        cleaner: Cleaner<'s, F>,
    ) -> PteRef<'s, F> {
        PteRef { cell, level, lock, cleaner, format: PhantomData }
    }

    #[inline]
    pub(crate) fn level(&self) -> Level {
        self.level
    }

    /// Keeps the PTE for the next guard of a fault.
    ///
    /// # Safety
    /// It was reached in `guard`, in a page-table page of a tree that exists as long as the answer.
    #[inline]
    pub(crate) unsafe fn keep(self, guard: &FaultGuard<'_>) -> KeptPte<F> {
        // SAFETY: as the caller promises; roots are not freed before the epochs.
        let cell = unsafe { guard.keep(self.cell) };
        KeptPte { cell, level: self.level, format: PhantomData }
    }

    /// Acquire: pairs with the release of the thread that linked the page-table page or the leaf,
    /// so that a page-table page is observed filled. It also orders this read before the reads of
    /// the state that the answer depends on (see `invalidation_seq`).
    #[inline]
    pub(crate) fn load(&self) -> Pte<F> {
        let value = self.cell.load(Ordering::Acquire);
        record!(PteRead { cell: self.address(), level: self.level.0, value });
        let value = Pte::from_bits(value);
        if F::HAS_INCOHERENT_WALKERS && value.is_present() {
            self.clean();
        }
        value
    }

    /// Cleans the PTE, if walkers may read past the CPUs' caches: after it was written, or where
    /// the caller relies on what another thread wrote and may not have cleaned yet.
    #[inline]
    pub(crate) fn clean(&self) {
        self.cleaner.clean(slice::from_ref(self.cell));
    }

    /// Has its cache line fetched, and waits for nothing.
    #[inline]
    pub(crate) fn prefetch(&self) {
        prefetch(self.cell);
    }

    /// Replaces `old` by `new`, if `old` is still there, and accounts that in `stats`. It has cases
    /// of its own for the most frequent changes: [`install`](Self::install) and
    /// [`zap_leaf`](Self::zap_leaf).
    ///
    /// `new` names no page-table page, or the one that `old` points to: as a directory entry, or
    /// broken for a recovery.
    #[inline]
    pub(crate) fn replace(&self, stats: &Recorder, old: Pte<F>, new: Pte<F>) -> Result<(), Changed> {
        self.exchange(old, new)?;
        self.account(stats, old, new);
        Ok(())
    }

    /// [`replace`](Self::replace) of the empty PTE `old` by the leaf `new`. A fault knows both
    /// states: to decode them once more would cost it 30 instructions.
    ///
    /// # Safety
    /// They are empty, and a leaf of this level.
    #[inline]
    pub(crate) unsafe fn install(&self, stats: &Recorder, old: Pte<F>, new: Pte<F>) -> Result<(), Changed> {
        debug_assert!(matches!((old.state(self.level), new.state(self.level)), (State::Empty(_), State::Leaf)));
        // SAFETY: as the caller promises.
        unsafe { self.exchange_unchecked(old, new)? }
        stats.count(Counter::installed(self.level));
        Ok(())
    }

    /// [`replace`](Self::replace) of `old`, a leaf, tracked or not, by an empty PTE with `seq`.
    #[inline]
    pub(crate) fn zap_leaf(&self, stats: &Recorder, old: Pte<F>, seq: InvalidationSeq) -> Result<(), Changed> {
        debug_assert!(old.is_leaf(self.level));
        if old.is_frozen() {
            return Err(Changed);
        }
        // SAFETY: checked above.
        unsafe { self.exchange_unchecked(old, Pte::empty(seq))? }
        stats.count(Counter::zapped(self.level));
        stats.count(Counter::Zapped);
        Ok(())
    }

    /// As [`replace`](Self::replace), but accounts nothing.
    #[inline]
    pub(crate) fn exchange(&self, old: Pte<F>, new: Pte<F>) -> Result<(), Changed> {
        let is_safe = self.is_safe(old, new);
        debug_assert!(is_safe, "{old:?} to {new:?} of level {} names another page-table page", self.level.0);
        if !is_safe {
            return Err(Changed);
        }
        // SAFETY: checked above.
        unsafe { self.exchange_unchecked(old, new) }
    }

    /// As [`replace`](Self::replace), where `new` names a page-table page that `old` does not
    /// point to.
    ///
    /// # Safety
    /// - `old` is not frozen.
    /// - The page-table page is filled with PTEs of the level below, and no other PTE names it.
    /// - It is the caller's alone. If this succeeds, it is the tree's.
    /// - If `old` is broken, this thread has broken it, for that page-table page.
    #[inline]
    pub(crate) unsafe fn link(&self, stats: &Recorder, old: Pte<F>, new: Pte<F>) -> Result<(), Changed> {
        // SAFETY: as the caller promises.
        unsafe { self.exchange_unchecked(old, new)? }
        self.account(stats, old, new);
        Ok(())
    }

    /// Whether a walk that follows `new` reaches memory of the tree alone.
    #[inline]
    fn is_safe(&self, old: Pte<F>, new: Pte<F>) -> bool {
        let level = self.level;
        if new.names_no_table(level) {
            // It may be a link of retired page-table pages.
            return !old.is_frozen();
        }
        if old.state(level) != State::Table {
            return false;
        }
        match new.state(level) {
            State::Table => new.table_below() == old.table_below(),
            State::Broken => new.breaking() == Breaking::Recovery && new.table_of_broken() == old.table_below(),
            _ => false,
        }
    }

    /// The one exchange. SeqCst: release, so that a walk observes the PTEs of a new page-table
    /// page; acquire, as for `load`; and total order with the accesses of the memslot set and of
    /// the dirty bitmap that pair with it (see `fence_after_rmw` at the callers).
    ///
    /// # Safety
    /// - `old` is not frozen.
    /// - `new` is empty or a leaf of this level, tracked or not; or
    ///   [`exchange`](Self::exchange) allows it, or [`link`](Self::link).
    #[inline]
    pub(crate) unsafe fn exchange_unchecked(&self, old: Pte<F>, new: Pte<F>) -> Result<(), Changed> {
        #[cfg(debug_assertions)]
        self.assert_transition(old, new);
        let result = self.cell.compare_exchange(old.bits(), new.bits(), Ordering::SeqCst, Ordering::Acquire);
        self.record(result, old.bits(), new.bits());
        result.map(|_| self.clean()).map_err(|_| Changed)
    }

    /// Accounts that `new` has replaced `old`. What a page-table page brings along is accounted
    /// where it is linked (`node`), and what a recovery leaves behind where it is aborted.
    #[inline]
    fn account(&self, stats: &Recorder, old: Pte<F>, new: Pte<F>) {
        let level = self.level;
        match (old.state(level), new.state(level)) {
            (State::Table, State::Empty(_)) => stats.count(Counter::Zapped),
            (State::Broken, State::Empty(_)) => {
                if old.breaking() == Breaking::Split {
                    stats.count(Counter::zapped(level));
                }
                stats.count(Counter::Zapped);
            }
            (State::Leaf | State::Tracked | State::Broken, State::Table) => {
                stats.count(Counter::Splits);
                if level > Level::L2M {
                    stats.count(Counter::Splits1G);
                }
            }
            (State::Broken, State::Leaf | State::Tracked) => {
                stats.count(Counter::Recoveries);
                if level > Level::L2M {
                    stats.count(Counter::Recoveries1G);
                }
            }
            _ => {}
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
        if cfg!(debug_assertions) && bits & F::WRITABLE != 0 {
            // All that a push-down needs. A harvest has asserted the write side (`Protector::new`).
            self.lock.assert(Side::Read);
        }
        // Above the lowest level nothing is cleared: a bit could be that of a broken PTE. Callers
        // have a constant level.
        let bits = if self.level == Level::L4K { bits } else { 0 };
        // SeqCst: stands in the store-load pairs of the dirty log.
        let kept = !(bits & (F::WRITABLE | F::ACCESSED));
        let old = self.cell.fetch_and(kept, Ordering::SeqCst);
        self.record(Ok(old), old, old & kept);
        self.clean();
        Pte::from_bits(old)
    }

    /// Freezes a PTE of a page-table page that the caller has unlinked; returns what it was before.
    ///
    /// # Safety
    /// The page-table page is not retired yet: then its PTEs have the links of a list.
    #[inline]
    pub(crate) unsafe fn freeze(&self) -> Pte<F> {
        self.lock.assert(Side::Write);
        // AcqRel: observes what the PTE pointed to as its writer left it.
        let old = self.cell.swap(Pte::<F>::FROZEN.bits(), Ordering::AcqRel);
        self.record(Ok(old), old, Pte::<F>::FROZEN.bits());
        self.clean();
        Pte::from_bits(old)
    }

    /// Freezes `value`, which keeps what it was, and returns that; `Err` is what is there instead.
    #[inline]
    pub(crate) fn freeze_as_was(&self, value: Pte<F>) -> Result<Pte<F>, Pte<F>> {
        self.lock.assert(Side::Read);
        // AcqRel, Acquire: as for `freeze`, also for a thread that finds it frozen.
        let frozen = value.frozen_as_was(self.level);
        let result = self.cell.compare_exchange(value.bits(), frozen.bits(), Ordering::AcqRel, Ordering::Acquire);
        self.record(result, value.bits(), frozen.bits());
        // Also what is there instead.
        self.clean();
        match result {
            Ok(_) => Ok(frozen),
            Err(found) => Err(Pte::from_bits(found)),
        }
    }

    /// Records for the proofs that `_old` was replaced by `_new`, or what was found instead.
    /// Directly behind the exchange: what the thread reads next may be `_old` again.
    #[inline(always)]
    fn record(&self, _result: Result<u64, u64>, _old: u64, _new: u64) {
        #[cfg(shuttle)]
        match _result {
            Ok(_) => {
                record!(PteReplaced { cell: self.address(), level: self.level.0, old: _old, new: _new });
            }
            Err(found) => {
                record!(PteKept { cell: self.address(), level: self.level.0, found });
            }
        }
    }

    /// Its address, for [`record!`].
    #[cfg(shuttle)]
    fn address(&self) -> u64 {
        core::ptr::from_ref(self.cell).addr() as u64
    }

    /// The side of the VM's lock that a change needs: the read side, unless other threads must not
    /// make any change beside it. Aging needs none.
    #[cfg(debug_assertions)]
    fn side_of(old: Pte<F>, new: Pte<F>, level: Level) -> Option<Side> {
        match (old.state(level), new.state(level)) {
            (State::Leaf, State::Tracked) => None,
            (State::Leaf, State::Leaf) if new == old.without(F::ACCESSED) => None,
            (State::Leaf, State::Leaf) if old.is_pinned() => Some(Side::Read),
            (State::Leaf, State::Leaf) => {
                let is_protected = old.is_writable() && !new.is_writable();
                let is_cleaned = old.is_dirty_for_log() && !new.is_dirty_for_log();
                Some(if is_protected || is_cleaned { Side::Write } else { Side::Read })
            }
            (State::Table, State::Table) if new.is_protected() => Some(Side::Write),
            (State::Table, State::Empty(_)) => Some(Side::Write),
            _ => Some(Side::Read),
        }
    }

    #[cfg(debug_assertions)]
    fn assert_transition(&self, old: Pte<F>, new: Pte<F>) {
        let level = self.level;
        if let Some(side) = Self::side_of(old, new, level) {
            self.lock.assert(side);
        }
        let allowed = match (old.state(level), new.state(level)) {
            (State::Empty(_), State::Leaf | State::Table) => true,
            (State::Leaf, State::Leaf) if old.is_pinned() => {
                new.is_pinned() && old.plain_frame(level) == new.plain_frame(level)
            }
            (State::Empty(before), State::Empty(after)) => before < after,
            (State::Leaf, State::Leaf | State::Tracked) | (State::Tracked, State::Leaf) => {
                old.plain_frame(level) == new.plain_frame(level)
                    && old.packed_attributes(level) == new.packed_attributes(level)
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
            (State::Table, State::Broken) => {
                new.breaking() == Breaking::Recovery && new.table_of_broken() == old.table_below()
            }
            (State::Leaf | State::Tracked, State::Broken) => {
                F::BREAK_BEFORE_MAKE && level > Level::L4K && new.breaking() == Breaking::Split
            }
            (State::Broken, State::Leaf | State::Tracked) => old.breaking() == Breaking::Recovery,
            (State::Broken, State::Table) => {
                old.breaking() == Breaking::Split && old.table_of_broken() == new.table_below()
            }
            _ => false,
        };
        assert!(allowed, "forbidden change of a PTE of level {}: {old:?} to {new:?}", level.0);
        let is_leaf = new.state(level) == State::Leaf;
        assert!(
            !is_leaf || !new.is_writable() || new.is_host_writable() || new.is_pinned(),
            "writable leaf that the host does not allow to write: {new:?}"
        );
    }
}

#[cfg(test)]
#[path = "pte_ref_tests.rs"]
mod tests;
