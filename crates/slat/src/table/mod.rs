//! The tree of page-table pages, and which operation may change what in it.
//!
//! Read `pte` first: it has the states of a PTE and the transitions between them. `pte_ref` changes
//! a PTE, and `encoding` is what the format leaves to a VM. `invalidation_seq` invalidates a range
//! beside faults that are under way, `in_flight` holds the ranges in flight. `generation` bounds
//! how often a directory entry is protected. `node` turns memory of the host into page-table pages,
//! `cursor` moves through them. `tlb` collects the flushes that are due, and flushes `derived`
//! tables first; `retire` and `participant` say when an unlinked page-table page may be freed.
//! `vm_lock` is the optional lock.

mod chain;
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
use crate::sync::{AtomicBool, Ordering, Side, full_fence, record};
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

/// Page-table pages with leaves that a call frees beside its own work. Each is read first, to count
/// what was mapped, which takes up to 1 us.
const TABLES_PER_RECLAIM: u64 = 128;

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
    /// [`Host::needs_zapped_leaves`].
    needs_zapped_leaves: bool,
    /// Whether there was ever a pinned memslot, or about to be one.
    has_pinned: AtomicBool,
}

/// A guard that may change the tree. It is inside the VM's lock, if there is one. The order of the
/// fields is the order of the drops: guard, lock.
pub(crate) struct LockedGuard<'a, H: Host, S = NestedGuard<'a>> {
    pub(crate) guard: S,
    _lock: HeldLock<'a, H>,
}

impl<H: Host, F: Format> Tree<H, F> {
    #[expect(unsafe_code, reason = "a tree is made in its box")]
    pub(crate) fn new(
        host: H,
        config: Config,
        derived: Option<Box<dyn DerivedTables<H, F>>>,
    ) -> Result<Box<Tree<H, F>>, ConfigError> {
        let encoding = Encoding::new(&config.hardware)?;
        let memory = Vacant::new()?;
        let node = config.table_placement.node_for(&host, None);
        let root = node::new_root::<H, F>(&host, &encoding, node).ok_or(ConfigError::OutOfMemory)?;
        let fences = if host.has_barrier_on_all_cpus() { Fences::Remote } else { Fences::Both };
        let lock = VmLock::new(&config);
        let needs_zapped_leaves = host.needs_zapped_leaves();
        // In place, field by field: a value on the stack would take more of it than any call.
        let init = |tree: *mut Tree<H, F>| {
            // SAFETY: the memory of a box, of which each field is written once. Nothing panics.
            unsafe {
                (&raw mut (*tree).host).write(host);
                (&raw mut (*tree).root).write(root);
                (&raw mut (*tree).encoding).write(encoding);
                (&raw mut (*tree).config).write(config);
                (&raw mut (*tree).generations).write(CachePadded::new(Generations::new()));
                (&raw mut (*tree).invalidation_seq).write(CachePadded::new(InvalidationSeqCounter::new()));
                (&raw mut (*tree).in_flight).write(RangesInFlight::default());
                (&raw mut (*tree).epochs).write(Epochs::new(fences).with_lock_timing(lock.timing()));
                (&raw mut (*tree).lock).write(CachePadded::new(lock));
                (&raw mut (*tree).derived).write(derived);
                (&raw mut (*tree).needs_zapped_leaves).write(needs_zapped_leaves);
                (&raw mut (*tree).has_pinned).write(AtomicBool::new(false));
            }
        };
        // SAFETY: `init` writes all fields; this does not compile with another.
        let tree = unsafe { memory.fill_by(init) };
        let Tree {
            host: _,
            root: _,
            encoding: _,
            config: _,
            lock: _,
            generations: _,
            invalidation_seq: _,
            in_flight: _,
            epochs: _,
            derived: _,
            needs_zapped_leaves: _,
            has_pinned: _,
        } = &*tree;
        Ok(tree)
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
        LockedGuard { guard: pin.open(), _lock: lock }
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

    /// Notes that there is a pinned memslot at `range`, before it is published: from now on zaps
    /// visit each leaf. `false`: one that may not is under way there.
    pub(crate) fn note_pinned(&self, range: GfnRange) -> bool {
        self.has_pinned.store(true, Ordering::Relaxed);
        if self.needs_zapped_leaves {
            return true;
        }
        // A store-load pair with a zap, which publishes its range, and then reads the flag.
        full_fence();
        let mut next = range.start;
        while next < range.end {
            match self.in_flight.free_level(next, self.root_level()) {
                Some(level) => next = next.block(level).end,
                None => return false,
            }
        }
        true
    }

    /// Whether the end of the VM must visit each leaf: the host is notified of it, or its frame is
    /// released.
    pub(crate) fn needs_each_leaf(&self) -> bool {
        self.needs_zapped_leaves || self.has_pinned.load(Ordering::Relaxed)
    }

    /// Whether a zap may unlink page-table pages with the leaves in them (`second_stage/zap.rs`
    /// says why it may not elsewhere). The one place that decides. The range of the zap is
    /// published.
    pub(crate) fn may_unlink_leaves(&self) -> bool {
        !self.needs_zapped_leaves
            && !self.has_pinned.load(Ordering::Relaxed)
            && self.config.dirty_tracking.write_protects()
            && self.derived.is_none()
    }

    /// Frees page-table pages whose grace period is over: all that were emptied, and of those with
    /// leaves as many as one call frees beside its own work. Returns whether there are more.
    #[expect(unsafe_code, reason = "passes on what belongs together")]
    #[inline]
    pub(crate) fn reclaim(&self) -> bool {
        // SAFETY: all of it is this tree's.
        let reclaim = || unsafe { self.epochs.reclaim_tables(&self.host, &self.encoding, TABLES_PER_RECLAIM) };
        self.epochs.has_retired_tables() && reclaim()
    }

    /// Frees all page-table pages whose grace period is over, and yields in between.
    pub(crate) fn reclaim_all(&self) {
        while self.reclaim() {
            if self.should_yield() {
                self.host.yield_now();
            }
        }
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
        // SAFETY: all of it is this tree's.
        unsafe { self.epochs.free_all_tables(&self.host, &self.encoding) }
        // SAFETY: this is the end of the tree.
        unsafe { node::free_tree(self) }
    }
}
