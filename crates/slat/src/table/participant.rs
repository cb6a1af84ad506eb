//! Participants and guards: what the thread of a vCPU, or of a VM call, shows to the threads that
//! free things.
//!
//! # Guarantees
//! One thread at a time owns a participant: its owner has a [`Participant`], the list of
//! participants yields [`SharedParticipant`] alone. As long as a guard is borrowed, what was
//! reached inside is not freed; nor is a thing before its [`Protected`] is dropped.
//!
//! # Use
//! Guards of a participant nest ([`NestedGuard`]). The guards of a fault follow one another: a
//! [`FaultPin`] opens them, and only one of them borrows it at a time. A [`HazardPointer`] has room
//! for one thing: to protect another, the caller drops the first. [`retire`](super::retire) has the
//! protocol.
//!
//! Debug builds record in the participant how its owner holds the VM's lock. Each change of a PTE
//! asserts that through a [`LockCheck`].

#![expect(unsafe_code, reason = "a participant is its owner's although others reach it")]

use alloc::boxed::Box;
use core::cell::Cell;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use core::ops::Deref;
use core::ptr::{self, NonNull};

use super::retire::Epochs;
use crate::boxed::{Zeroed, try_zeroed};
use crate::error::OutOfMemory;
use crate::page_words::HarvestRoom;
use crate::pool::{PoolLink, Pooled};
use crate::stats::Recorder;
#[cfg(shuttle)]
use crate::sync::events::address;
use crate::sync::{AtomicPtr, AtomicU32, AtomicU64, Ordering, Side, record};

/// The most PTEs, words of bitmaps and pages that one guard visits, so that what is retired behind
/// it does not wait long. A longer walk leaves its guard and goes on in another. Checked in builds
/// with debug assertions.
pub(crate) const MAX_GUARD_STEPS: u64 = 1 << 15;

/// Announcement of a participant whose owner is in no guard.
pub(super) const IDLE: u64 = 0;

/// Which epochs a participant, a guard or a memslot set belongs to: their address. They do not move
/// once they have one of these.
///
/// A guard of one VM protects nothing of another. That each function gets the guard of its own VM is
/// easy to see, and easy to break. So it is checked where a guard begins ([`Epochs::pin`],
/// [`OwnedParticipant::exclusive`]), where page tables and memslots are reached in it
/// (`node::root_ptes`, `Slots::current`), and where these are freed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct EpochsId(usize);

impl EpochsId {
    #[inline]
    pub(super) fn of(epochs: &Epochs) -> EpochsId {
        EpochsId(ptr::from_ref(epochs).addr())
    }

    /// Panics if `other` are other epochs: a defect of the engine.
    #[inline]
    pub(crate) fn check(self, other: EpochsId) {
        if self != other {
            mixed_up();
        }
    }
}

#[cold]
#[inline(never)]
fn mixed_up() -> ! {
    panic!("two VMs are mixed up");
}

/// The part of a participant that all threads reach. On lines of its own: the owner writes it at
/// every fault.
#[repr(align(128))]
pub(crate) struct SharedParticipant {
    /// The epochs that it announces to. They do not change once it is in their list.
    pub(super) epochs: EpochsId,
    /// Epoch in which the first of the open counted guards began, or [`IDLE`].
    pub(super) announced: AtomicU64,
    /// Epoch in which the open guard of a fault began, or [`IDLE`].
    pub(super) announced_by_fault: AtomicU64,
    /// Number of open counted guards. Only the owner accesses it.
    nr_open: Cell<u64>,
    /// The working memory of the owner's harvests, unless one is under way or none was. Only the
    /// owner accesses it.
    harvest_room: Cell<Option<Box<HarvestRoom>>>,
    /// How the owner holds the VM's lock. Only the owner accesses it.
    #[cfg(debug_assertions)]
    hold: Cell<Hold>,
    /// Address of the memslot in whose backing the owner resolves, or null: it must not be freed.
    pub(super) resolving: AtomicPtr<()>,
    /// Place in the published set of the memslot that the owner found last. A hint: the owner
    /// compares what is there.
    pub(crate) last_slot: AtomicU32,
    link: PoolLink<SharedParticipant>,
    pub(crate) stats: Recorder,
}

// SAFETY: a number, atomics whose first value is zero, cells of a number, of no box (a null pointer)
// and of `Hold::NoLock` (zero), a null pointer, and fields that are `Zeroed` themselves.
unsafe impl Zeroed for SharedParticipant {
    #[cfg(loom)]
    fn zeroed() -> SharedParticipant {
        SharedParticipant {
            epochs: EpochsId(0),
            announced: AtomicU64::new(IDLE),
            announced_by_fault: AtomicU64::new(IDLE),
            nr_open: Cell::new(0),
            harvest_room: Cell::new(None),
            #[cfg(debug_assertions)]
            hold: Cell::new(Hold::NoLock),
            resolving: AtomicPtr::new(ptr::null_mut()),
            last_slot: AtomicU32::new(0),
            link: PoolLink::new(),
            stats: Zeroed::zeroed(),
        }
    }
}

// SAFETY: it is one field of the participant.
unsafe impl Pooled for SharedParticipant {
    fn link(&self) -> &PoolLink<SharedParticipant> {
        &self.link
    }
}

// SAFETY: all fields but the cells are atomics, or do not change once the participant is in its list.
// The cells are used through a `Participant` alone, which is one thread's, and what they have may be
// used and freed by any thread.
unsafe impl Send for SharedParticipant {}
// SAFETY: as above.
unsafe impl Sync for SharedParticipant {}

impl SharedParticipant {
    /// The participant for the thread that owns it.
    ///
    /// # Safety
    /// The caller has the participant in use, and no other thread has it before the answer is gone.
    #[inline]
    unsafe fn owned(&self) -> &Participant {
        // SAFETY: a `Participant` is a `SharedParticipant` and nothing else.
        unsafe { &*ptr::from_ref(self).cast() }
    }
}

/// A participant as its owner has it. It alone opens guards, so no other thread can end one.
#[repr(transparent)]
pub(crate) struct Participant {
    shared: SharedParticipant,
    /// The owner is one thread: this is not `Sync`.
    not_sync: PhantomData<Cell<()>>,
}

impl Deref for Participant {
    type Target = SharedParticipant;

    #[inline]
    fn deref(&self) -> &SharedParticipant {
        &self.shared
    }
}

impl Participant {
    /// Panics if the participant announces to other epochs than `epochs`.
    #[inline]
    pub(crate) fn check_epochs(&self, epochs: EpochsId) {
        self.epochs.check(epochs);
    }

    /// Whether no counted guard is open.
    #[inline]
    pub(super) fn is_outside(&self) -> bool {
        self.nr_open.get() == 0
    }

    /// Calls `harvest` with working memory, whose contents are those of any harvest before. It is
    /// allocated for the first harvest of the participant, and kept for the next.
    #[inline]
    pub(crate) fn with_harvest_room<T>(&self, harvest: impl FnOnce(&mut HarvestRoom) -> T) -> Result<T, OutOfMemory> {
        let mut room = match self.harvest_room.take() {
            Some(room) => room,
            None => try_zeroed()?,
        };
        let answer = harvest(&mut room);
        self.harvest_room.set(Some(room));
        Ok(answer)
    }

    /// Frees the working memory of harvests.
    pub(super) fn free_harvest_room(&self) {
        self.harvest_room.set(None);
    }

    /// Records how the owner holds the VM's lock from now on.
    #[cfg(debug_assertions)]
    #[cfg_attr(not(any(test, feature = "baselines")), expect(dead_code, reason = "there is no lock"))]
    pub(super) fn record_hold(&self, hold: Hold) {
        self.hold.set(hold);
    }

    /// How the owner holds the VM's lock.
    #[cfg(debug_assertions)]
    pub(super) fn hold(&self) -> Hold {
        self.hold.get()
    }
}

/// How the owner of a participant holds the VM's lock. Each includes those before.
#[cfg(debug_assertions)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[cfg_attr(not(any(test, feature = "baselines")), expect(dead_code, reason = "there is no lock"))]
#[repr(u8)]
pub(super) enum Hold {
    /// The VM has none.
    NoLock = 0,
    Outside,
    Read,
    Write,
}

/// Asserts in debug builds that a thread holds the VM's lock, if there is one. Nothing in other
/// builds.
#[derive(Clone, Copy)]
pub(crate) struct LockCheck<'s> {
    /// `None`: PTEs that no other thread reaches.
    #[cfg(debug_assertions)]
    participant: Option<&'s Participant>,
    lifetime: PhantomData<&'s Participant>,
}

impl<'s> LockCheck<'s> {
    /// For PTEs outside of a tree.
    #[cfg(test)]
    pub(crate) const NONE: LockCheck<'s> = LockCheck {
        #[cfg(debug_assertions)]
        participant: None,
        lifetime: PhantomData,
    };

    #[inline]
    pub(super) fn of(_participant: &'s Participant) -> LockCheck<'s> {
        LockCheck {
            #[cfg(debug_assertions)]
            participant: Some(_participant),
            lifetime: PhantomData,
        }
    }

    /// Asserts that the thread holds this side of the lock, or the write side.
    #[inline]
    pub(crate) fn assert(self, _side: Side) {
        #[cfg(debug_assertions)]
        {
            let needed = match _side {
                Side::Read => Hold::Read,
                Side::Write => Hold::Write,
            };
            let hold = self.participant.map_or(Hold::NoLock, Participant::hold);
            assert!(hold == Hold::NoLock || hold >= needed, "a PTE changes under {hold:?}, and needs {needed:?}");
        }
    }
}

/// What the participant of a vCPU has once, for its faults.
pub(crate) struct Exclusive<'r> {
    pub(crate) pin: FaultPin<'r>,
    pub(crate) hazard: HazardPointer<'r>,
}

/// The right to open the guard of a fault: one at a time, which ends before the next begins.
pub(crate) struct FaultPin<'r> {
    participant: &'r Participant,
    /// Those of the participant.
    pub(super) epochs: &'r Epochs,
}

impl FaultPin<'_> {
    #[inline]
    pub(crate) fn reborrow(&mut self) -> FaultPin<'_> {
        FaultPin { ..*self }
    }

    #[inline]
    pub(super) fn participant(&self) -> &Participant {
        self.participant
    }

    /// Panics if its guards are of other epochs than `epochs`.
    #[inline]
    pub(crate) fn check_epochs(&self, epochs: EpochsId) {
        self.epochs.id().check(epochs);
    }
}

/// The hazard pointer of a participant: it keeps one thing at a time from being freed, without a
/// guard.
pub(crate) struct HazardPointer<'r>(&'r Participant);

impl<'r> HazardPointer<'r> {
    pub(crate) fn reborrow(&mut self) -> HazardPointer<'_> {
        HazardPointer(self.0)
    }

    /// Panics if the guard is of another participant.
    #[inline]
    pub(crate) fn check_guard(&self, guard: &Guard<'_>) {
        if !ptr::eq(self.0, guard.participant) {
            mixed_up();
        }
    }

    /// Protects `thing` until the answer is dropped.
    ///
    /// # Safety
    /// `thing` was reached in a guard of this participant that is still open. A reclaim frees it only if
    /// [`Epochs::oldest_open`], and after that [`Epochs::is_resolving`], have allowed that.
    #[inline]
    pub(crate) unsafe fn protect<T>(self, thing: NonNull<T>) -> Protected<'r, T> {
        // Release is enough: the end of the guard (a release store) comes after, and a reclaimer
        // that observes that end (acquire) observes this.
        self.0.resolving.store(thing.as_ptr().cast(), Ordering::Release);
        record!(HazardSet { thing: thing.addr().get() as u64 });
        Protected { thing, participant: self.0 }
    }
}

/// A thing that a hazard pointer keeps from being freed.
pub(crate) struct Protected<'r, T> {
    thing: NonNull<T>,
    participant: &'r Participant,
}

impl<T> Protected<'_, T> {
    #[inline]
    pub(crate) fn get(&self) -> &T {
        // SAFETY: it was reached in a guard, and protected inside of it. The hazard pointer has no
        // other thing before this is dropped.
        unsafe { self.thing.as_ref() }
    }
}

impl<T> Drop for Protected<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // Release: the uses of the thing precede its free, by a thread that observes this.
        self.participant.resolving.store(ptr::null_mut(), Ordering::Release);
        record!(HazardCleared);
    }
}

/// An open guard. What was reached inside is not freed as long as it is borrowed.
pub(crate) struct Guard<'a> {
    participant: &'a Participant,
    #[cfg(debug_assertions)]
    steps: AtomicU64,
}

impl<'a> Guard<'a> {
    /// # Safety
    /// An announcement of the participant stands, and stays as long as the guard.
    #[inline]
    unsafe fn new(participant: &'a Participant) -> Guard<'a> {
        Guard {
            participant,
            #[cfg(debug_assertions)]
            steps: AtomicU64::new(0),
        }
    }

    pub(crate) fn participant(&self) -> &'a Participant {
        self.participant
    }

    /// Panics if the guard is of other epochs than `epochs`.
    #[inline]
    pub(crate) fn check_epochs(&self, epochs: EpochsId) {
        self.participant.check_epochs(epochs);
    }

    /// The check that this thread holds the VM's lock, for the PTEs that the guard reaches.
    #[inline]
    pub(crate) fn lock_check(&self) -> LockCheck<'a> {
        LockCheck::of(self.participant)
    }

    /// Counts `nr_steps` more PTEs, words or pages that this guard visits.
    #[inline]
    pub(crate) fn visit(&self, nr_steps: u64) {
        #[cfg(debug_assertions)]
        {
            // Relaxed: a count.
            let steps = self.steps.fetch_add(nr_steps, Ordering::Relaxed) + nr_steps;
            assert!(steps <= MAX_GUARD_STEPS, "a guard of {steps} steps");
        }
        #[cfg(not(debug_assertions))]
        let _ = (nr_steps, MAX_GUARD_STEPS);
    }
}

/// A counted guard. Guards of a participant nest, and end in any order: the announcement of the
/// first stays until the last is over.
#[must_use]
pub(crate) struct NestedGuard<'a>(Guard<'a>);

impl<'a> NestedGuard<'a> {
    /// # Safety
    /// The participant's announcement for counted guards stands.
    #[inline]
    pub(super) unsafe fn new(participant: &'a Participant) -> NestedGuard<'a> {
        participant.nr_open.set(participant.nr_open.get() + 1);
        record!(GuardOpened { announcement: address(&participant.announced) });
        // SAFETY: the announcement stays until the last counted guard is dropped.
        NestedGuard(unsafe { Guard::new(participant) })
    }
}

impl<'a> Deref for NestedGuard<'a> {
    type Target = Guard<'a>;

    #[inline]
    fn deref(&self) -> &Guard<'a> {
        &self.0
    }
}

impl Drop for NestedGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        let participant = self.0.participant;
        participant.nr_open.set(participant.nr_open.get() - 1);
        if participant.nr_open.get() == 0 {
            // Release: all accesses of the guard precede a reclaim that observes its end.
            participant.announced.store(IDLE, Ordering::Release);
        }
        record!(GuardClosed { announcement: address(&participant.announced), is_last: participant.is_outside() });
    }
}

/// The guard of a fault, which has an announcement of its own. It is not counted, because a count
/// costs a fault 50 instructions: what the compiler keeps in registers goes to the stack.
#[must_use]
pub(crate) struct FaultGuard<'p>(Guard<'p>);

impl<'p> FaultGuard<'p> {
    /// # Safety
    /// The announcement of the pin's participant for the guards of faults stands.
    #[inline]
    pub(super) unsafe fn new(pin: FaultPin<'p>) -> FaultGuard<'p> {
        record!(GuardOpened { announcement: address(&pin.participant.announced_by_fault) });
        // SAFETY: no other guard borrows the pin, so the announcement stays until this is dropped.
        FaultGuard(unsafe { Guard::new(pin.participant) })
    }
}

impl<'p> Deref for FaultGuard<'p> {
    type Target = Guard<'p>;

    #[inline]
    fn deref(&self) -> &Guard<'p> {
        &self.0
    }
}

impl Drop for FaultGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: as for a counted guard.
        self.0.participant.announced_by_fault.store(IDLE, Ordering::Release);
        record!(FaultUnpinned);
        record!(GuardClosed { announcement: address(&self.0.participant.announced_by_fault), is_last: true });
    }
}

/// A guard with a participant of its own.
#[must_use]
pub(crate) struct LoneGuard<'a> {
    // Dropped in this order.
    guard: NestedGuard<'a>,
    _record: BorrowedParticipant<'a>,
}

impl<'a> LoneGuard<'a> {
    #[inline]
    pub(super) fn new(epochs: &Epochs, participant: BorrowedParticipant<'a>) -> LoneGuard<'a> {
        LoneGuard { guard: epochs.pin(participant.0), _record: participant }
    }

    /// The guard. Its participant is not reachable for longer than the guard.
    pub(crate) fn get<'s>(&'s self) -> &'s Guard<'s> {
        &self.guard
    }
}

/// The use of a participant for one call of the VM.
pub(crate) struct BorrowedParticipant<'a>(&'a Participant);

impl<'a> BorrowedParticipant<'a> {
    /// # Safety
    /// The caller has set `in_use`, and leaves its end to the answer.
    #[inline]
    pub(super) unsafe fn new(participant: &'a SharedParticipant) -> BorrowedParticipant<'a> {
        // SAFETY: as the caller promises.
        BorrowedParticipant(unsafe { participant.owned() })
    }

    /// The participant, and its hazard pointer.
    pub(crate) fn with_hazard(&mut self) -> (&Participant, HazardPointer<'_>) {
        (self.0, HazardPointer(self.0))
    }

    /// Keeps the participant in use, for a vCPU.
    pub(super) fn keep(self) -> OwnedParticipant {
        OwnedParticipant(NonNull::from(&ManuallyDrop::new(self).0.shared))
    }
}

impl Deref for BorrowedParticipant<'_> {
    type Target = Participant;

    #[inline]
    fn deref(&self) -> &Participant {
        self.0
    }
}

impl Drop for BorrowedParticipant<'_> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: `self` has it in use, until now.
        unsafe { release_participant(self.0) }
    }
}

/// # Safety
/// The caller has the participant in use, and this is the end of that use.
#[inline]
unsafe fn release_participant(participant: &SharedParticipant) {
    debug_assert!(participant.announced.load(Ordering::Relaxed) == IDLE);
    debug_assert!(participant.announced_by_fault.load(Ordering::Relaxed) == IDLE);
    // SAFETY: as the caller promises.
    unsafe { participant.link.release() }
}

/// A participant that a vCPU has for its life.
pub(crate) struct OwnedParticipant(NonNull<SharedParticipant>);

// SAFETY: a `SharedParticipant` is `Sync`, and the thread that has this is the participant's owner.
unsafe impl Send for OwnedParticipant {}

impl OwnedParticipant {
    /// # Safety
    /// The `Epochs` that it came from is alive for `'a`, and this is not released before.
    #[inline]
    pub(crate) unsafe fn get<'a>(&self) -> &'a Participant {
        // SAFETY: participants live as long as their `Epochs`, and this one is in use as long as
        // `self`.
        unsafe { self.0.as_ref().owned() }
    }

    /// What the participant of `epochs` has once.
    ///
    /// # Safety
    /// As for [`get`](Self::get), and what this has answered before is gone.
    #[inline]
    pub(crate) unsafe fn exclusive<'a>(&mut self, epochs: &'a Epochs) -> Exclusive<'a> {
        // SAFETY: as the caller promises.
        let participant: &Participant = unsafe { self.get() };
        participant.check_epochs(epochs.id());
        Exclusive { pin: FaultPin { participant, epochs }, hazard: HazardPointer(participant) }
    }

    /// Releases the participant for others to use.
    ///
    /// # Safety
    /// The `Epochs` that it came from is alive. Neither this nor its answers are used any more.
    pub(crate) unsafe fn release(&mut self) {
        // SAFETY: as the caller promises.
        unsafe { release_participant(self.get()) }
    }
}
