//! Epochs: when an unlinked page-table page, or a replaced memslot set, may be freed.
//!
//! # Guarantees
//! Memory that a guard can reach is not freed while the guard is open. No operation waits for a
//! guard to end: what cannot be freed yet stays on a list for the next
//! [`Vm::reclaim`](crate::Vm::reclaim).
//!
//! # Use
//! Open a guard ([`Guard`]) to read page-table pages or the memslot set. A guard is short:
//! - Inside it there is no flush, no allocation that waits, no resolve and no yield.
//! - It makes at most [`MAX_GUARD_STEPS`](super::participant::MAX_GUARD_STEPS) steps, whatever
//!   `Host::should_yield` answers. A change of memslots copies the whole set inside one guard (at
//!   most [`MAX_SLOTS`](crate::MemoryRegion::MAX_SLOTS) memslots).
//! - How long a `TableReader` is open is its user's matter.
//!
//! While the host resolves a page, a [`HazardPointer`] protects the backing of the memslot instead.
//!
//! To free a thing: unlink it, flush, retire it ([`Epochs::retire_tables`],
//! [`Epochs::advance_epoch`]).
//!
//! # Implementation
//! A guard announces the epoch in which it began, in its participant ([`Participant`]). A
//! retirement moves the epoch on, and tags the thing with the epoch before. The thing is freed when
//! every open guard announces an epoch later than the tag.
//!
//! Retired page-table pages need no memory of their own. Their first two PTEs are empty or frozen,
//! and no thread makes anything else of them; a frozen PTE has room for a payload. The first PTE
//! carries the link to the next page of the list, the second the tag.
//!
//! A page-table page that a zap has unlinked with leaves in it ([`Contents::Leaves`]) may have
//! leaves of 4 KiB in its other PTEs; or these are frozen, and name the page-table pages of such
//! leaves that were linked below it. Those are in no list, and were not even read: they are found
//! and counted when they are freed, as many in one call as its limit says.
//!
//! # Why it is correct
//! A guard that announces an epoch later than the tag began after the thing was unlinked, and
//! cannot reach it. That no older guard is missed takes a store-load pair. The guard stores its
//! announcement, then reads pointers; the reclaimer has stored the unlinking, then reads
//! announcements. A full fence stands between the two steps on both sides. So if the reclaimer
//! misses the announcement, the guard observes the unlinking.
//!
//! Guards are many and reclaims are few. Where the host can make a barrier on all CPUs at once, the
//! reclaimer makes it for both sides, and a guard begins without a fence ([`Fences::Remote`]).

#![expect(unsafe_code, reason = "participants and retired page-table pages are reached by raw pointers")]

use core::ptr::NonNull;

use crossbeam_utils::CachePadded;

pub(crate) use super::chain::TableChain;
use super::chain::{Contents, Label, chain_cells, store_frozen};
use super::encoding::Encoding;
use super::node;
use super::participant::IDLE;
#[cfg(all(test, loom))]
pub(crate) use super::participant::LockCheck;
pub(crate) use super::participant::{
    BorrowedParticipant, FaultGuard, LoneGuard, NestedGuard, OwnedParticipant, SharedParticipant,
};
pub(crate) use super::participant::{EpochsId, Exclusive, FaultPin, Guard, HazardPointer, Participant, Protected};
use super::pte;
use super::vm_lock::LockTiming;
use crate::addr::Hpa;
use crate::boxed::try_zeroed;
use crate::error::OutOfMemory;
use crate::format::Format;
use crate::host::Host;
use crate::pool::Pool;
#[cfg(shuttle)]
use crate::sync::events::address;
use crate::sync::{AtomicU64, Ordering, fence_after_rmw, fence_against_remote_barrier, full_fence, record};

/// The end of a list of page-table pages. No page has this address; the first page of memory may be
/// one.
const NO_TABLE: Hpa = Hpa(0xfff << 52);

/// Which fence stands between an announcement and the reads of its guard, and between an unlinking
/// and the reads of the announcements.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fences {
    /// A full fence on both sides.
    Both,
    /// None in the guard, and [`Host::barrier_on_all_cpus`] in the reclaimer.
    Remote,
}

/// The participants and the retired page-table pages of one VM.
pub(crate) struct Epochs {
    fences: Fences,
    lock_timing: LockTiming,
    /// The epoch, above [`IDLE`]. Each retirement writes it, each guard reads it when it begins.
    epoch: CachePadded<AtomicU64>,
    participants: Pool<SharedParticipant>,
    /// Apart from what guards read.
    retired_tables: CachePadded<RetiredTables>,
}

struct RetiredTables {
    /// Head of the list: a host-physical address, or [`NO_TABLE`].
    first: AtomicU64,
    /// Page-table pages on the list. Only a count, as those below: it bounds, and does not protect.
    nr_listed: AtomicU64,
    /// Page-table pages that were retired and not freed yet: with those below them.
    nr_deferred: AtomicU64,
    /// Those that were freed.
    nr_freed: AtomicU64,
    /// The leaves of 4 KiB in them.
    nr_freed_leaves: AtomicU64,
}

/// What a reclaim has freed.
#[derive(Default)]
pub(super) struct Freed {
    pub(super) nr_tables: u64,
    /// Leaves of 4 KiB in them.
    pub(super) nr_leaves: u64,
}

impl Epochs {
    pub(crate) fn new(fences: Fences) -> Epochs {
        Epochs {
            fences,
            lock_timing: LockTiming::OFF,
            epoch: CachePadded::new(AtomicU64::new(IDLE + 1)),
            participants: Pool::new(),
            retired_tables: CachePadded::new(RetiredTables {
                first: AtomicU64::new(NO_TABLE.0),
                nr_listed: AtomicU64::new(0),
                nr_deferred: AtomicU64::new(0),
                nr_freed: AtomicU64::new(0),
                nr_freed_leaves: AtomicU64::new(0),
            }),
        }
    }

    /// As `self`, with the times of the VM's lock.
    pub(crate) fn with_lock_timing(mut self, lock_timing: LockTiming) -> Epochs {
        self.lock_timing = lock_timing;
        self
    }

    /// Which epochs these are: a guard of others protects nothing here.
    #[inline]
    pub(crate) fn id(&self) -> EpochsId {
        EpochsId::of(self)
    }

    /// Opens a guard. Other guards of the participant may be open.
    #[inline]
    pub(crate) fn pin<'a>(&self, participant: &'a Participant) -> NestedGuard<'a> {
        participant.check_epochs(self.id());
        if participant.is_outside() {
            self.announce(&participant.announced);
        }
        // SAFETY: it was announced here, or when the first of the open guards began.
        unsafe { NestedGuard::new(participant) }
    }

    /// As [`pin`](Self::pin), where an atomic operation of the caller serves as the fence too.
    /// `None`, and no guard, if `rmw` answers that.
    ///
    /// # Safety
    /// The participant is of these epochs. If `rmw` returns a value, its last access of memory was
    /// an atomic read-modify-write.
    #[inline]
    pub(crate) unsafe fn pin_by_rmw<'a, T>(
        &self,
        participant: &'a Participant,
        rmw: impl FnOnce() -> Option<T>,
    ) -> Option<(NestedGuard<'a>, T)> {
        if participant.is_outside() {
            // Acquire: as in `announce`. Release: as in `announce_epoch`. The fence below orders
            // the store before every read of the guard.
            participant.announced.store(self.epoch.load(Ordering::Acquire), Ordering::Release);
        }
        // SAFETY: as in `pin`; nothing is read in the guard before the fence.
        let guard = unsafe { NestedGuard::new(participant) };
        let value = rmw()?;
        // It pairs with `oldest_open`, whichever fences that makes.
        fence_after_rmw();
        Some((guard, value))
    }

    /// Whether anything was retired since `guard` began, or since the first of the guards that are
    /// open with it did.
    #[inline]
    pub(crate) fn has_retired_since(&self, guard: &NestedGuard<'_>) -> bool {
        // Relaxed: this thread's own store.
        let epoch = guard.participant().announced.load(Ordering::Relaxed);
        self.current() != epoch
    }

    /// The current epoch. Each retirement ends one.
    #[inline]
    pub(crate) fn current(&self) -> u64 {
        // Acquire: as in `announce`.
        self.epoch.load(Ordering::Acquire)
    }

    #[inline]
    fn announce(&self, announced: &AtomicU64) {
        // Acquire: a guard that reads an epoch which a retirement began observes what was unlinked
        // before.
        let epoch = self.epoch.load(Ordering::Acquire);
        record!(EpochRead { announcement: address(announced), epoch });
        self.announce_epoch(announced, epoch);
    }

    /// Announces `epoch`, which is not above the current one.
    #[inline]
    fn announce_epoch(&self, announced: &AtomicU64, epoch: u64) {
        // The announcement precedes every read of the guard (pairs with `oldest_open`). Release, as
        // at the end of a guard, which SeqCst is, too: a reclaimer that reads this announcement
        // instead of that end observes what the guards before have done.
        match self.fences {
            Fences::Both => {
                announced.swap(epoch, Ordering::SeqCst);
                record!(Announced { announcement: address(announced), epoch });
                fence_after_rmw();
            }
            // The barrier that `oldest_open` makes on this CPU falls between two instructions here.
            // Before the store: then the reads follow it, too, and observe what was unlinked. After
            // the store: then the reclaimer observes the store. Only the compiler has to be held
            // back.
            Fences::Remote => {
                announced.store(epoch, Ordering::Release);
                record!(Announced { announcement: address(announced), epoch });
                fence_against_remote_barrier();
            }
        }
    }

    /// Returns a participant for one call: a free one, or a new one.
    #[inline]
    pub(crate) fn borrow_participant(&self) -> Result<BorrowedParticipant<'_>, OutOfMemory> {
        let participant = match self.participants.claim() {
            Some(participant) => participant,
            None => self.add_participant()?,
        };
        // SAFETY: this call is the user of the participant, and leaves the end of the use to the
        // `BorrowedParticipant`.
        let participant = unsafe { BorrowedParticipant::new(participant) };
        self.lock_timing.prepare(&participant)?;
        Ok(participant)
    }

    /// Makes a participant, in use. In place: it is large for a stack.
    #[cold]
    fn add_participant(&self) -> Result<&SharedParticipant, OutOfMemory> {
        let mut participant = try_zeroed::<SharedParticipant>()?;
        participant.epochs = self.id();
        Ok(self.participants.add(participant))
    }

    /// Opens a guard with a participant of its own.
    #[inline]
    pub(crate) fn pin_alone(&self) -> Result<LoneGuard<'_>, OutOfMemory> {
        Ok(LoneGuard::new(self, self.borrow_participant()?))
    }

    /// Returns a participant for a vCPU, which ends with [`OwnedParticipant::release`].
    pub(crate) fn take_participant(&self) -> Result<OwnedParticipant, OutOfMemory> {
        let participant = self.borrow_participant()?;
        participant.stats.make_fault_times()?;
        // A vCPU harvests nothing.
        participant.free_harvest_room();
        Ok(participant.keep())
    }

    /// All participants, in use or not.
    pub(crate) fn participants(&self) -> impl Iterator<Item = &SharedParticipant> {
        self.participants.iter()
    }

    /// Ends the epoch in which things were unlinked, and returns its number. The things may be
    /// freed once [`Epochs::oldest_open`] is above it.
    pub(crate) fn advance_epoch(&self) -> u64 {
        // AcqRel: release for the guards that begin in the new epoch and must observe the
        // unlinking; acquire because each retirement hands epochs on to the next.
        let epoch = self.epoch.fetch_add(1, Ordering::AcqRel);
        record!(EpochAdvanced { epoch });
        epoch
    }

    /// Returns the lowest epoch that an open guard announces; `u64::MAX` if no guard is open.
    /// Things that left their lists before this call, with tags below the answer, can be freed. The
    /// caller passes the host's barrier.
    pub(crate) fn oldest_open(&self, barrier_on_all_cpus: impl FnOnce()) -> u64 {
        // Pairs with `announce`: the unlinking of what is to be freed precedes the reads of the
        // announcements.
        full_fence();
        if self.fences == Fences::Remote {
            barrier_on_all_cpus();
        }
        let mut oldest = u64::MAX;
        for participant in self.participants() {
            for announced in [&participant.announced, &participant.announced_by_fault] {
                // Acquire: what a guard did that is observed to be over precedes the free.
                let epoch = announced.load(Ordering::Acquire);
                record!(AnnouncementRead { announcement: address(announced), epoch });
                if epoch != IDLE {
                    oldest = oldest.min(epoch);
                }
            }
        }
        record!(AnnouncementsRead);
        oldest
    }

    /// Whether a thread resolves in the backing of `slot`. Call it after [`Epochs::oldest_open`]
    /// has shown that no guard can reach the memslot.
    pub(crate) fn is_resolving<T>(&self, slot: NonNull<T>) -> bool {
        self.participants().any(|participant| participant.resolving.load(Ordering::Acquire) == slot.as_ptr().cast())
    }

    /// Retires a chain of unlinked, flushed page-table pages.
    ///
    /// # Safety
    /// `host` is that of the tree with these epochs.
    pub(crate) unsafe fn retire_tables<H: Host>(&self, host: &H, chain: TableChain) {
        let Some((first, last)) = chain.ends else { return };
        // Before the pages are on the list, so that no page is counted as freed before it is
        // counted here.
        self.retired_tables.nr_listed.fetch_add(chain.len, Ordering::Relaxed);
        self.retired_tables.nr_deferred.fetch_add(chain.nr_tables, Ordering::Relaxed);
        let tag = self.advance_epoch();
        let mut table = first;
        loop {
            // SAFETY: the page is of the chain, which is this thread's until it is on the list.
            let cells = unsafe { chain_cells(host, table) };
            store_frozen(&cells[1], Label { tag, ..Label::read(&cells[1]) }.bits());
            record!(TableRetired { table: table.0, tag });
            if table == last {
                break;
            }
            table = pte::link_of(cells[0].load(Ordering::Relaxed));
        }
        // SAFETY: as the caller promises.
        unsafe { self.push_tables(host, chain) }
    }

    /// Whether page-table pages wait for their grace period. Mostly none does.
    #[inline]
    pub(crate) fn has_retired_tables(&self) -> bool {
        self.retired_tables.first.load(Ordering::Relaxed) != NO_TABLE.0
    }

    /// Frees the retired page-table pages that no open guard can reach, but at most
    /// `max_with_leaves` of those with leaves. Returns whether there are more of these.
    ///
    /// # Safety
    /// `host` and `encoding` are those of the tree with these epochs.
    pub(crate) unsafe fn reclaim_tables<H: Host, F: Format>(
        &self,
        host: &H,
        encoding: &Encoding<F>,
        max_with_leaves: u64,
    ) -> bool {
        // Acquire: observes the links and tags of the list.
        let mut next = Hpa(self.retired_tables.first.swap(NO_TABLE.0, Ordering::Acquire));
        record!(TablesTaken);
        let oldest = self.oldest_open(|| host.barrier_on_all_cpus());
        let mut freed = Freed::default();
        let (mut nr_unlisted, mut left, mut has_more) = (0, max_with_leaves, false);
        let mut kept = TableChain::new();
        while next != NO_TABLE {
            let table = next;
            // SAFETY: the list holds pages of chains alone. It is this thread's, which frees below.
            let cells = unsafe { chain_cells(host, table) };
            next = pte::link_of(cells[0].load(Ordering::Relaxed));
            let label = Label::read(&cells[1]);
            let is_reachable = label.tag >= oldest;
            if !is_reachable && label.contents == Contents::Leaves {
                // SAFETY: as below; what its frozen PTEs name was linked below it alone.
                has_more |= !unsafe { node::free_leaves(host, encoding, table, &mut left, &mut freed) };
            }
            // Once the limit is reached, all others with leaves stay.
            if is_reachable || (label.contents == Contents::Leaves && has_more) {
                // SAFETY: it came from a chain, and is off the list now.
                unsafe { kept.push_labelled(host, table) }
                record!(TableKept { table: table.0 });
            } else {
                // SAFETY: the page was unlinked and flushed before it was retired, all guards that
                // could reach it are over, and the list it was on is this thread's alone. Roots are
                // never retired.
                unsafe { node::free(host, encoding, table) }
                record!(TableFreed { table: table.0 });
                freed.nr_tables += 1;
                nr_unlisted += 1;
            }
        }
        // SAFETY: as the caller promises.
        unsafe { self.push_tables(host, kept) }
        let retired = &self.retired_tables;
        retired.nr_listed.fetch_sub(nr_unlisted, Ordering::Relaxed);
        retired.nr_deferred.fetch_sub(freed.nr_tables, Ordering::Relaxed);
        retired.nr_freed.fetch_add(freed.nr_tables, Ordering::Relaxed);
        retired.nr_freed_leaves.fetch_add(freed.nr_leaves, Ordering::Relaxed);
        has_more
    }

    /// Page-table pages that were retired and freed.
    pub(crate) fn nr_freed_tables(&self) -> u64 {
        self.retired_tables.nr_freed.load(Ordering::Relaxed)
    }

    /// Leaves of 4 KiB that were freed with their page-table pages.
    pub(crate) fn nr_freed_leaves(&self) -> u64 {
        self.retired_tables.nr_freed_leaves.load(Ordering::Relaxed)
    }

    /// Page-table pages on the list of retired ones: without those that were linked below them.
    pub(crate) fn nr_listed_tables(&self) -> u64 {
        self.retired_tables.nr_listed.load(Ordering::Relaxed)
    }

    /// Page-table pages that were retired and not freed yet.
    pub(crate) fn nr_deferred_tables(&self) -> u64 {
        self.retired_tables.nr_deferred.load(Ordering::Relaxed)
    }

    /// Puts pages whose tags are set on the list.
    ///
    /// # Safety
    /// As for [`retire_tables`](Self::retire_tables).
    unsafe fn push_tables<H: Host>(&self, host: &H, chain: TableChain) {
        let Some((first, last)) = chain.ends else { return };
        let mut head = self.retired_tables.first.load(Ordering::Relaxed);
        loop {
            // SAFETY: the page is of the chain, which is this thread's until the exchange.
            let cells = unsafe { chain_cells(host, last) };
            store_frozen(&cells[0], pte::frozen_link(Hpa(head)));
            match self.retired_tables.first.compare_exchange(head, first.0, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => {
                    record!(TablesListed);
                    return;
                }
                Err(found) => head = found,
            }
        }
    }

    /// Frees all retired page-table pages, at the end of the VM.
    ///
    /// # Safety
    /// As for [`reclaim_tables`](Self::reclaim_tables).
    pub(crate) unsafe fn free_all_tables<H: Host, F: Format>(&mut self, host: &H, encoding: &Encoding<F>) {
        // Whatever is announced: with `&mut self` no guard is open, unless one was leaked.
        for participant in self.participants() {
            participant.announced.store(IDLE, Ordering::Relaxed);
            participant.announced_by_fault.store(IDLE, Ordering::Relaxed);
        }
        if self.has_retired_tables() {
            // SAFETY: as the caller promises.
            unsafe { self.reclaim_tables(host, encoding, u64::MAX) };
        }
    }
}

impl<'p> FaultPin<'p> {
    /// Opens the guard of a fault. Counted guards may be open beside it.
    #[inline]
    pub(crate) fn open(self) -> FaultGuard<'p> {
        self.epochs.announce(&self.participant().announced_by_fault);
        // SAFETY: it was announced just now, to the epochs of the participant.
        unsafe { FaultGuard::new(self) }
    }

    /// Opens the next guard of a fault, with what its first guard has found. `None`, and no guard,
    /// if anything was retired since the first guard began.
    ///
    /// # Safety
    /// `kept` is of a guard of this participant.
    #[inline]
    pub(crate) unsafe fn reopen<T>(self, kept: Kept<T>) -> Option<KeptGuard<'p, T>> {
        let epochs = self.epochs;
        // The epoch of the first guard once more, before the epoch is read: see `KeptGuard`.
        epochs.announce_epoch(&self.participant().announced_by_fault, kept.epoch);
        // SAFETY: it was announced just now, to the epochs of the participant.
        let guard = unsafe { FaultGuard::new(self) };
        // Acquire: as in `announce`.
        let epoch = epochs.epoch.load(Ordering::Acquire);
        record!(EpochReadAgain { announcement: address(&guard.participant().announced_by_fault), epoch });
        let is_same = epoch == kept.epoch;
        is_same.then_some(KeptGuard { guard, thing: kept.thing })
    }
}

impl FaultGuard<'_> {
    /// Keeps what a fault has found in this guard for the next guard of that fault.
    ///
    /// # Safety
    /// `thing` is reached in the guard, and is freed only after it is retired to the epochs of the
    /// guard's participant, which exist as long as the answer.
    #[inline]
    pub(crate) unsafe fn keep<T>(&self, thing: &T) -> Kept<T> {
        // Relaxed: this thread's own store.
        let epoch = self.participant().announced_by_fault.load(Ordering::Relaxed);
        record!(ThingKept { announcement: address(&self.participant().announced_by_fault), epoch });
        Kept { epoch, thing: NonNull::from(thing) }
    }
}

/// What a fault has found in one guard, for its next guard. A fault looks and acts in two guards,
/// and resolves between them; mostly nothing is retired meanwhile.
pub(crate) struct Kept<T> {
    /// What the first guard has announced.
    epoch: u64,
    thing: NonNull<T>,
}

/// A guard with a thing that an earlier guard has found.
///
/// The thing is not freed while this is open. The first guard found it linked, so its tag is not
/// below the epoch that the first guard announced, and this one announces the same. Let the epoch
/// be still that one, read after the announcement and its fence. Then the thing is retired later,
/// if at all: the fence of that reclaim comes after this guard's, and the reclaim finds the
/// announcement.
pub(crate) struct KeptGuard<'p, T> {
    guard: FaultGuard<'p>,
    thing: NonNull<T>,
}

impl<T> KeptGuard<'_, T> {
    #[inline]
    pub(crate) fn guard(&self) -> &Guard<'_> {
        &self.guard
    }

    #[inline]
    pub(crate) fn thing(&self) -> &T {
        // SAFETY: it is not freed as long as the guard is open (see above).
        unsafe { self.thing.as_ref() }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
#[path = "retire_tests.rs"]
mod tests;

#[cfg(all(test, loom))]
#[path = "retire_loom.rs"]
mod loom_tests;
