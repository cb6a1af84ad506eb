//! The tree of page-table pages, and which operation may change what in it.
//!
//! Read `pte` first: it has the states of a PTE and the transitions between them. `pte_ref` changes
//! a PTE, and `encoding` is what the format leaves to a VM. `invalidation_seq` invalidates a range beside faults that are under way, `in_flight`
//! holds the ranges in flight. `generation` bounds how often a directory entry is protected. `node`
//! turns memory of the host into page-table pages, `cursor` moves through them. `tlb` collects the
//! flushes that are due, and flushes `derived` tables first; `retire` and `participant` say when an
//! unlinked page-table page may be freed. `vm_lock` is the optional lock.

pub(crate) mod cursor;
pub(crate) mod derived;
pub(crate) mod encoding;
pub(crate) mod generation;
pub(crate) mod in_flight;
pub(crate) mod invalidation_seq;
pub(crate) mod node;
mod participant;
pub(crate) mod pte;
pub(crate) mod pte_ref;
pub(crate) mod retire;
pub(crate) mod tlb;
#[cfg_attr(not(feature = "baselines"), path = "no_lock.rs")]
pub(crate) mod vm_lock;

use alloc::boxed::Box;
use crossbeam_utils::CachePadded;

use crate::addr::{GfnRange, Hpa, Level};
use crate::boxed::Vacant;
use crate::config::Config;
use crate::error::ConfigError;
use crate::format::Format;
use crate::host::Host;
use crate::stats::Counter;
use crate::sync::{Side, record};
use derived::DerivedTables;
use encoding::Encoding;
use generation::Generations;
use in_flight::RangesInFlight;
use invalidation_seq::InvalidationSeq;
use invalidation_seq::InvalidationSeqCounter;
use pte_ref::Cleaner;
use retire::{Epochs, FaultGuard, FaultPin, Fences, NestedGuard, Participant, SharedParticipant};
use tlb::TlbBatch;
use vm_lock::{HeldLock, VmLock};

/// The page tables of one VM, with the state of their protocols.
pub(crate) struct Tree<H: Host, F: Format> {
    pub(crate) host: H,
    root: Hpa,
    pub(crate) encoding: Encoding<F>,
    lock: CachePadded<VmLock>,
    pub(crate) config: Config,
    pub(crate) generations: CachePadded<Generations>,
    invalidation_seq: CachePadded<InvalidationSeqCounter>,
    pub(crate) in_flight: RangesInFlight,
    pub(crate) epochs: Epochs,
    /// The page tables that hardware walks instead of this tree.
    pub(crate) derived: Option<Box<dyn DerivedTables<H, F>>>,
}

/// A guard that may change the tree. It is inside the VM's lock, if there is one. The order of the
/// fields is the order of the drops: guard, lock.
pub(crate) struct LockedGuard<'a, H: Host, S = NestedGuard<'a>> {
    pub(crate) guard: S,
    _lock: HeldLock<'a, H>,
}

impl<H: Host, F: Format> Tree<H, F> {
    pub(crate) fn new(
        host: H,
        config: Config,
        derived: Option<Box<dyn DerivedTables<H, F>>>,
    ) -> Result<Box<Tree<H, F>>, ConfigError> {
        let encoding = Encoding::new(&config.hardware)?;
        let memory = Vacant::new()?;
        let root = node::new_root::<H, F>(&host, &encoding).ok_or(ConfigError::OutOfMemory)?;
        let fences = if host.has_barrier_on_all_cpus() { Fences::Remote } else { Fences::Both };
        let lock = VmLock::new(&config);
        Ok(memory.fill(Tree {
            host,
            root,
            encoding,
            config,
            generations: CachePadded::new(Generations::new()),
            invalidation_seq: CachePadded::new(InvalidationSeqCounter::new()),
            in_flight: RangesInFlight::default(),
            epochs: Epochs::new(fences).with_lock_timing(lock.timing()),
            lock: CachePadded::new(lock),
            derived,
        }))
    }

    /// Host-physical address of the root, as hardware sees it.
    pub(crate) fn root(&self) -> Hpa {
        self.root
    }

    /// Cleans PTEs of the tree.
    #[inline]
    pub(crate) fn cleaner(&self) -> Cleaner<'_, F> {
        Cleaner::new(&self.host)
    }

    /// Level of the root's PTEs.
    #[inline]
    pub(crate) fn root_level(&self) -> Level {
        self.encoding.root_level()
    }

    /// All frames that the tree can translate.
    pub(crate) fn whole(&self) -> GfnRange {
        self.encoding.frames()
    }

    /// Returns an invalidation sequence number greater than all before; see `invalidation_seq`.
    pub(crate) fn next_seq(&self) -> InvalidationSeq {
        self.invalidation_seq.next()
    }

    /// Returns the greatest invalidation sequence number so far; see `invalidation_seq`.
    pub(crate) fn current_seq(&self) -> InvalidationSeq {
        self.invalidation_seq.current()
    }

    /// Whether guards that change the tree are inside a lock.
    #[inline]
    pub(crate) fn is_locked(&self) -> bool {
        self.lock.exists()
    }

    /// Whether a long operation should leave its guard for a while.
    pub(crate) fn should_yield(&self) -> bool {
        self.host.should_yield() || self.lock.is_contended()
    }

    /// Takes the VM's lock alone, if there is one, and waits for it.
    #[inline]
    pub(crate) fn lock<'a>(&'a self, participant: &'a Participant) -> HeldLock<'a, H> {
        self.lock.acquire(&self.host, participant, Side::Write)
    }

    /// Opens a guard that changes the tree, inside the VM's lock if there is one, for which it
    /// waits.
    #[inline(always)]
    pub(crate) fn pin<'a>(&'a self, participant: &'a Participant, side: Side) -> LockedGuard<'a, H> {
        let lock = self.lock.acquire(&self.host, participant, side);
        LockedGuard { guard: self.epochs.pin(participant), _lock: lock }
    }

    /// As [`pin`](Self::pin), for a fault.
    #[inline(always)]
    pub(crate) fn pin_fault<'a>(
        &'a self,
        pin: FaultPin<'a>,
        participant: &'a Participant,
        side: Side,
    ) -> LockedGuard<'a, H, FaultGuard<'a>> {
        let lock = self.lock.acquire(&self.host, participant, side);
        LockedGuard { guard: self.epochs.pin_fault(pin), _lock: lock }
    }

    /// Flushes `ranges` in derived tables, and then on all CPUs.
    pub(crate) fn flush(&self, participant: &Participant, ranges: &[GfnRange]) {
        match self.derived {
            None => self.flush_cpus(participant, ranges),
            Some(_) => self.flush_all(participant, ranges),
        }
    }

    #[cold]
    fn flush_all(&self, participant: &Participant, ranges: &[GfnRange]) {
        let mut batch = TlbBatch::new(self, participant);
        ranges.iter().for_each(|&range| batch.add(range));
        batch.flush();
    }

    /// Flushes `ranges` on all CPUs, where derived tables allow no more than they may already.
    pub(crate) fn flush_cpus(&self, participant: &Participant, ranges: &[GfnRange]) {
        participant.stats.count(Counter::Flushes);
        #[cfg(shuttle)]
        for range in ranges {
            record!(FlushBegins { start: range.start.0, end: range.end.0 });
        }
        self.host.flush(ranges);
        record!(FlushEnds);
    }

    /// Makes room for turns that protect directory entries, if little is left. Called outside of
    /// guards.
    #[inline]
    pub(crate) fn renew_generations(&self) {
        self.generations.renew_if_low(&self.epochs, || self.host.barrier_on_all_cpus());
    }

    /// Frees the page-table pages whose grace period is over.
    pub(crate) fn reclaim(&self) {
        self.epochs.reclaim_tables(&self.host, &self.encoding);
    }

    /// Page-table pages that are linked, or kept by vCPUs, approximately.
    pub(crate) fn nr_linked_tables(&self) -> u64 {
        let participants = self.epochs.participants();
        let count = |participant: &SharedParticipant, counter| participant.stats.get(counter);
        let (allocated, freed) =
            participants.fold((0, self.epochs.nr_freed_tables()), |(allocated, freed): (u64, u64), participant| {
                (
                    allocated + count(participant, Counter::TablesAllocated),
                    freed + count(participant, Counter::TablesFreed),
                )
            });
        allocated.saturating_sub(freed).saturating_sub(self.epochs.nr_deferred_tables())
    }
}

impl<H: Host, F: Format> Drop for Tree<H, F> {
    #[expect(unsafe_code, reason = "frees the page-table pages that guards may have reached")]
    fn drop(&mut self) {
        self.epochs.free_all_tables(&self.host, &self.encoding);
        // SAFETY: this is the end of the tree.
        unsafe { node::free_tree(self) }
    }
}
