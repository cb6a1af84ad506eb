//! The published set of memslots: an immutable set behind one pointer.
//!
//! # Guarantees
//! - A fault finds the memslot of a frame without a lock, and writes no line that others read.
//! - A set, a memslot, a dirty bitmap or what refers to a userfault bitmap is freed only when no
//!   open guard may have found it, and a memslot only when no participant resolves in its backing.
//! - Of two changes of one memslot at a time, the second gets [`SlotError::SlotBusy`].
//! - What waits to be freed is bounded ([`MAX_RETIRED_BYTES`]).
//!
//! # Use
//! To change a memslot, [claim](Slots::claim) it, then [`Claim::replace`] or [`Claim::remove`] it.
//! To move or delete it, the caller invalidates its range first (`table/invalidation_seq.rs`), and
//! keeps the range in flight until the new set is published; to shrink it, the end that it loses.
//!
//! # Implementation
//! A change
//! 1. allocates the node for what it takes out of the set, and the memory for another set,
//! 2. makes that set, which shares most of its memory with the old one (`slot/chunks.rs`),
//! 3. swaps the pointer by a compare-and-exchange, and starts over if another change came first,
//! 4. puts the old set, and what the new one does not have, on the list of retired things.
//!
//! # Why it is correct
//! The change whose exchange takes things out of the set owns them. Step 4 tags them with an epoch;
//! `table/retire.rs` has the argument for freeing them. A memslot that is deleted or moved stays in
//! the set until nothing of it is mapped, so no other takes its place before.

#![expect(unsafe_code, reason = "published sets are reached by raw pointers and freed by epochs")]

use alloc::boxed::Box;
use core::mem;
use core::ptr::{self, NonNull};

use super::attributes::PrivatePages;
use super::chunks::{Change, Draft, Replaced, Room, SlotEntry, SlotSet};
use super::new::{Attachments, NewSlot, Unpublished, free};
use super::region::MemoryRegionFlags;
use super::userfault::UserfaultBitmap;
use super::view::SlotView;
use crossbeam_utils::CachePadded;

use crate::addr::{Gfn, GfnRange};
use crate::boxed::try_box;
use crate::error::{OutOfMemory, SlotError};
use crate::slot::bitmap::Bitmap;
use crate::sync::{AtomicBool, AtomicPtr, AtomicU64, Ordering, record};
use crate::table::retire::{Epochs, EpochsId, Guard, Participant};

/// What stays the same as long as a memslot exists. On lines of its own: faults read that of their
/// memslot, and must not notice a claim of another.
#[repr(align(128))]
pub(crate) struct Slot<B> {
    pub(super) backing: B,
    /// Which pages are private, if the memslot has a guest_memfd.
    pub(super) private: Option<Box<PrivatePages>>,
    pub(super) claimed: AtomicBool,
}

/// Bytes that retired things may hold, all behind open guards, before changes are refused.
pub(crate) const MAX_RETIRED_BYTES: u64 = 256 << 20;
/// Changes that may have left something in any case, however large.
const MIN_RETIRED: u64 = 64;

/// What a change took out of the published set.
struct Retired<B> {
    next: *mut Retired<B>,
    tag: u64,
    /// What it holds, in bytes, less the backing of the memslot.
    size_bytes: u64,
    set: Option<NonNull<SlotSet<B>>>,
    /// What that set had besides, and the next has not.
    replaced: Replaced<B>,
    slot: Option<NonNull<Slot<B>>>,
    log: Option<NonNull<Bitmap>>,
    userfault: Option<NonNull<UserfaultBitmap>>,
}

pub(crate) struct Slots<B> {
    /// By these, sets and memslots are freed.
    epochs: EpochsId,
    current: AtomicPtr<SlotSet<B>>,
    /// Away from `current`, which each fault reads.
    retired: CachePadded<RetiredList<B>>,
}

struct RetiredList<B> {
    first: AtomicPtr<Retired<B>>,
    /// Only counts.
    len: AtomicU64,
    size_bytes: AtomicU64,
}

// SAFETY: the raw pointers own what they point to, or share it by the rules of the module. Backings
// are Send and Sync.
unsafe impl<B: Send + Sync> Send for Slots<B> {}
// SAFETY: as above.
unsafe impl<B: Send + Sync> Sync for Slots<B> {}

/// A memslot that no other call changes until this is dropped. A panic drops it, too.
pub(crate) struct Claim<'s, B> {
    /// As it is published.
    entry: SlotEntry<B>,
    slots: &'s Slots<B>,
}

impl<B> Drop for Claim<'_, B> {
    fn drop(&mut self) {
        // SAFETY: only the owner of the claim can retire the memslot, and then forgets the claim.
        let slot = unsafe { self.entry.slot.as_ref() };
        // Release: hands the state that this change left over to the next.
        slot.claimed.store(false, Ordering::Release);
        record!(SlotReleased { slot: self.entry.slot.addr().get() as u64 });
    }
}

impl<B> Claim<'_, B> {
    /// The memslot as the published set has it.
    pub(crate) fn entry(&self) -> &SlotEntry<B> {
        &self.entry
    }

    /// The log of the memslot, whether it logs or did so before.
    pub(crate) fn log(&self) -> Option<&Bitmap> {
        // SAFETY: a log is retired by `replace` and `remove` alone, and no reference outlives them.
        self.entry.log.map(|log| unsafe { log.as_ref() })
    }

    /// The userfault bitmap of the memslot.
    pub(crate) fn userfault(&self) -> Option<&UserfaultBitmap> {
        // SAFETY: as for `log`.
        self.entry.userfault.map(|userfault| unsafe { userfault.as_ref() })
    }

    /// Publishes the set with the memslot at `range`, with `flags` and `attachments`. The memslot
    /// keeps its log unless its size changes, and with `USERFAULT` its userfault bitmap, where
    /// `attachments` has none.
    ///
    /// On an error nothing was published, and `attachments` are freed.
    #[inline(never)]
    pub(crate) fn replace(
        &mut self,
        epochs: &Epochs,
        participant: &Participant,
        range: GfnRange,
        flags: MemoryRegionFlags,
        attachments: Attachments,
    ) -> Result<(), SlotError> {
        let (log, userfault) = (attachments.log.map(Unpublished::new), attachments.userfault.map(Unpublished::new));
        let before = &self.entry;
        let kept_log = before.log.filter(|_| range.nr_pages() == before.range.nr_pages());
        let kept_userfault = before.userfault.filter(|_| flags.contains(MemoryRegionFlags::USERFAULT));
        let entry = SlotEntry {
            range,
            flags,
            log: Unpublished::of(&log).or(kept_log),
            userfault: Unpublished::of(&userfault).or(kept_userfault),
            ..before.duplicate()
        };
        let change = Change { id: before.id, before: Some(before), after: Some(&entry) };
        // SAFETY: what is new in the entry came from boxes, which the set owns from then on. The
        // rest is the claimed memslot's. The claim forgets what the set does not have any more.
        unsafe { self.slots.publish(epochs, participant, &change) }?;
        mem::forget((log, userfault));
        self.entry = entry;
        Ok(())
    }

    /// Publishes the set without the memslot, which stays claimed: a call that still finds it in an
    /// old set must not change it.
    ///
    /// On an error nothing was published, and the claim is over.
    pub(crate) fn remove(self, epochs: &Epochs, participant: &Participant) -> Result<(), SlotError> {
        let change = Change { id: self.entry.id, before: Some(&self.entry), after: None };
        // SAFETY: it adds nothing, and the claim is forgotten.
        unsafe { self.slots.publish(epochs, participant, &change) }?;
        // Retired by now, and perhaps freed: not to be touched.
        mem::forget(self);
        Ok(())
    }
}

impl<B> Slots<B> {
    pub(crate) fn new(epochs: &Epochs) -> Result<Slots<B>, OutOfMemory> {
        let empty = Box::into_raw(SlotSet::empty()?);
        let (len, size_bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        let retired = RetiredList { first: AtomicPtr::new(ptr::null_mut()), len, size_bytes };
        Ok(Slots { epochs: epochs.id(), current: AtomicPtr::new(empty), retired: CachePadded::new(retired) })
    }

    /// Panics if guards of other epochs than `epochs` protect what is found here.
    #[inline]
    pub(crate) fn check_epochs(&self, epochs: EpochsId) {
        self.epochs.check(epochs);
    }

    /// The published set. SeqCst: stands in store-load pairs with `protect` (see `dirty/log.rs`).
    /// As an acquire load it observes the contents of the set.
    #[inline]
    fn current<'s>(&'s self, guard: &'s Guard<'_>) -> &'s SlotSet<B> {
        guard.check_epochs(self.epochs);
        // SAFETY: checked just now.
        unsafe { self.current_unchecked(guard) }
    }

    /// # Safety
    /// The guard is of the VM of these memslots.
    #[inline]
    unsafe fn current_unchecked<'s>(&'s self, _guard: &'s Guard<'_>) -> &'s SlotSet<B> {
        // SAFETY: never null. A set that was published during the guard, of these epochs, is freed
        // only after it.
        let current = unsafe { &*self.current.load(Ordering::SeqCst) };
        record!(SlotsRead);
        current
    }

    /// The memslot that has `gfn`.
    #[inline]
    pub(crate) fn find<'s>(&'s self, guard: &'s Guard<'s>, gfn: Gfn) -> Option<SlotView<'s, B>> {
        guard.check_epochs(self.epochs);
        // SAFETY: checked just now.
        unsafe { self.find_unchecked(guard, gfn) }
    }

    /// As [`find`](Self::find), for a fault. With the check, what is found goes through memory there,
    /// and a fault takes 22 ns and not 15.
    ///
    /// # Safety
    /// The guard is of the VM of these memslots.
    #[inline]
    pub(crate) unsafe fn find_unchecked<'s>(&'s self, guard: &'s Guard<'s>, gfn: Gfn) -> Option<SlotView<'s, B>> {
        // SAFETY: as the caller promises.
        let set = unsafe { self.current_unchecked(guard) };
        set.find(&guard.participant().last_slot, gfn).map(|entry| SlotView { entry, set, guard })
    }

    /// The memslot that has `gfn`, if it logs.
    #[inline(always)]
    pub(crate) fn find_logging<'s>(&'s self, guard: &'s Guard<'s>, gfn: Gfn) -> Option<SlotView<'s, B>> {
        let set = self.current(guard);
        if set.any_logs() { Self::find_if_logs(set, guard, gfn) } else { None }
    }

    /// Never inlined: few memslots log.
    #[inline(never)]
    fn find_if_logs<'s>(set: &'s SlotSet<B>, guard: &'s Guard<'s>, gfn: Gfn) -> Option<SlotView<'s, B>> {
        let found = set.find(&guard.participant().last_slot, gfn);
        found.map(|entry| SlotView { entry, set, guard }).filter(SlotView::logs)
    }

    /// Whether `view` is of the set that is published now: what it says is still so.
    #[inline]
    pub(crate) fn is_current(&self, view: &SlotView<'_, B>) -> bool {
        // SeqCst: as in `current`. The view's guard is open, so no other set has the address of the
        // set.
        let is_current = ptr::eq(self.current.load(Ordering::SeqCst), view.set);
        record!(SlotsRead);
        is_current
    }

    /// The memslot that has `gfn`, or else the first above it.
    pub(crate) fn find_from<'s>(&'s self, guard: &'s Guard<'s>, gfn: Gfn) -> Option<SlotView<'s, B>> {
        let set = self.current(guard);
        set.from(gfn).next().map(|entry| SlotView { entry, set, guard })
    }

    pub(crate) fn by_id<'s>(&'s self, guard: &'s Guard<'s>, id: u32) -> Option<SlotView<'s, B>> {
        let set = self.current(guard);
        set.by_id(&guard.participant().last_slot, id).map(|entry| SlotView { entry, set, guard })
    }

    /// Claims memslot `id` for a change. `Ok(None)`: there is none.
    #[inline(never)]
    pub(crate) fn claim(
        &self,
        epochs: &Epochs,
        participant: &Participant,
        id: u32,
    ) -> Result<Option<Claim<'_, B>>, SlotError> {
        let guard = epochs.pin(participant);
        let Some(view) = self.by_id(&guard, id) else { return Ok(None) };
        // SAFETY: found in an open guard.
        let slot = unsafe { view.entry.slot.as_ref() };
        // Acquire: takes over the state that the last change of the memslot left.
        if slot.claimed.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return Err(SlotError::SlotBusy { slot: id });
        }
        record!(SlotClaimed { slot: view.entry.slot.addr().get() as u64 });
        // Read again, now that it is fixed: the set may have changed since. The memslot is there:
        // one that was deleted stays claimed, so the exchange would have failed.
        Ok(self.by_id(&guard, id).map(|now| Claim { entry: now.entry.duplicate(), slots: self }))
    }

    /// Checks that memslot `id` could have `range` now.
    #[inline(never)]
    pub(crate) fn check_vacant(
        &self,
        epochs: &Epochs,
        participant: &Participant,
        id: u32,
        range: GfnRange,
    ) -> Result<(), SlotError> {
        let guard = epochs.pin(participant);
        self.current(&guard).check_vacant(id, range)
    }

    /// Publishes the set with memslot `new`. On an error it publishes nothing and frees `new`.
    pub(crate) fn insert(&self, epochs: &Epochs, participant: &Participant, new: NewSlot<B>) -> Result<(), SlotError> {
        let NewSlot { range, id, flags, slot, log, userfault } = new;
        let (log_pointer, userfault_pointer) = (Unpublished::of(&log), Unpublished::of(&userfault));
        let entry =
            SlotEntry { range, id, flags, slot: slot.pointer(), log: log_pointer, userfault: userfault_pointer };
        record!(SlotMade { slot: entry.slot.addr().get() as u64 });
        let change = Change { id, before: None, after: Some(&entry) };
        // SAFETY: what the entry points to came from boxes, which the set owns from then on.
        unsafe { self.publish(epochs, participant, &change) }?;
        mem::forget((slot, log, userfault));
        // The claim that it was made with.
        drop(Claim { entry, slots: self });
        Ok(())
    }

    /// Publishes `change` of the set that is current by then, and retires what that takes out.
    ///
    /// On an error nothing was published, and what the change would add is still the caller's.
    ///
    /// # Safety
    /// The claim is of a memslot of this VM. What the change adds exists until the set owns it.
    /// What it takes out of the set is not used through the claim any more.
    // Never inlined: the room for a set would be on the stack below the walks of a change.
    #[inline(never)]
    unsafe fn publish(
        &self,
        epochs: &Epochs,
        participant: &Participant,
        change: &Change<'_, B>,
    ) -> Result<(), SlotError> {
        let mut node = try_box(Retired::nothing())?;
        if let Some(before) = change.before {
            let kept = change.after.map_or((None, None), |after| (after.log, after.userfault));
            node.log = before.log.filter(|&log| Some(log) != kept.0);
            node.userfault = before.userfault.filter(|&bitmap| Some(bitmap) != kept.1);
            node.slot = change.after.is_none().then_some(before.slot);
        }
        // SAFETY: what the memslot has exists while the claim is held.
        node.size_bytes = unsafe { node.holds(change) };
        loop {
            // Allocation, outside of the guard.
            let sizes = self.current(&epochs.pin(participant)).sizes();
            let mut room = Room::new(sizes, change)?;
            let guard = epochs.pin(participant);
            let old_pointer = self.current.load(Ordering::SeqCst);
            record!(SetBuilt);
            // SAFETY: as for `current`.
            let old = unsafe { &*old_pointer };
            if !room.fits(old) {
                continue;
            }
            let mut draft = Draft::empty();
            room.build(old, change, &mut draft, &mut node.replaced)?;
            let is_claimed = |before: &SlotEntry<B>| {
                old.by_id(&participant.last_slot, before.id).is_some_and(|entry| entry.slot == before.slot)
            };
            debug_assert!(change.before.is_none_or(is_claimed), "changes need a claim");
            let size_bytes = old.size_bytes() + node.replaced.size_bytes();
            // SeqCst: release for the set's contents, and the store of the store-load pairs with
            // `mark_if_logging`. The guard keeps `old` from being freed and its address from being
            // used again, so equal pointers are equal sets.
            let new = draft.set().expect("a draft that was built has a set").as_ptr();
            let published = self.current.compare_exchange(old_pointer, new, Ordering::SeqCst, Ordering::Relaxed);
            #[cfg(shuttle)]
            if published.is_ok() {
                // Directly behind the exchange: other threads act on it from then on.
                record!(SlotsPublished);
                if let Some(SlotEntry { range, flags, log, .. }) = change.after {
                    let logs = flags.contains(MemoryRegionFlags::LOG_DIRTY_PAGES);
                    let log = log.map_or(0, |log| log.addr().get() as u64);
                    record!(EntryPublished { start: range.start.0, logs, log });
                }
            }
            // Before the draft is freed, or the room.
            drop(guard);
            if published.is_ok() {
                node.set = NonNull::new(old_pointer);
                draft.publish();
                node.size_bytes += size_bytes;
                node.tag = epochs.advance_epoch();
                self.push_retired(node);
                return Ok(());
            }
        }
    }

    fn push_retired(&self, node: Box<Retired<B>>) {
        self.retired.len.fetch_add(1, Ordering::Relaxed);
        self.retired.size_bytes.fetch_add(node.size_bytes, Ordering::Relaxed);
        let node = Box::into_raw(node);
        let mut head = self.retired.first.load(Ordering::Relaxed);
        loop {
            // SAFETY: the node is this thread's until the exchange succeeds.
            unsafe { (*node).next = head };
            match self.retired.first.compare_exchange(head, node, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(found) => head = found,
            }
        }
    }

    /// How many changes have left something that is not freed yet.
    pub(crate) fn nr_retired(&self) -> u64 {
        self.retired.len.load(Ordering::Relaxed)
    }

    /// Frees what changes have left, if that is too much. To be called before a change.
    ///
    /// # Errors
    /// [`SlotError::TooMuchRetired`]: it still is.
    pub(crate) fn make_room(&self, epochs: &Epochs, barrier_on_all_cpus: impl FnOnce()) -> Result<(), SlotError> {
        let held = || {
            let (len, size_bytes) = (self.nr_retired(), self.retired.size_bytes.load(Ordering::Relaxed));
            (len >= MIN_RETIRED && size_bytes >= MAX_RETIRED_BYTES).then_some(size_bytes)
        };
        if held().is_some() {
            self.reclaim(epochs, barrier_on_all_cpus);
        }
        held().map_or(Ok(()), |size_bytes| Err(SlotError::TooMuchRetired { size_bytes }))
    }

    /// Frees the retired things that no guard can have found and no participant resolves in.
    #[inline]
    pub(crate) fn reclaim(&self, epochs: &Epochs, barrier_on_all_cpus: impl FnOnce()) {
        // A load first: mostly there is nothing, and then the line stays where it is.
        if !self.retired.first.load(Ordering::Relaxed).is_null() {
            self.reclaim_retired(epochs, barrier_on_all_cpus);
        }
    }

    #[inline(never)]
    fn reclaim_retired(&self, epochs: &Epochs, barrier_on_all_cpus: impl FnOnce()) {
        self.epochs.check(epochs.id());
        // Acquire: observes the nodes.
        let mut next = self.retired.first.swap(ptr::null_mut(), Ordering::Acquire);
        let oldest = epochs.oldest_open(barrier_on_all_cpus);
        while !next.is_null() {
            // SAFETY: nodes come from boxes, and the swap made the list this thread's.
            let node = unsafe { Box::from_raw(next) };
            next = node.next;
            self.retired.len.fetch_sub(1, Ordering::Relaxed);
            self.retired.size_bytes.fetch_sub(node.size_bytes, Ordering::Relaxed);
            if node.tag < oldest && !node.slot.is_some_and(|slot| epochs.is_resolving(slot)) {
                // SAFETY: no guard can have found it, none resolves in it, and only this node has
                // it.
                unsafe { node.free_all() };
                #[cfg(shuttle)]
                if let Some(slot) = node.slot {
                    record!(SlotFreed { slot: slot.addr().get() as u64 });
                }
            } else {
                self.push_retired(node);
            }
        }
    }
}

impl<B> Retired<B> {
    fn nothing() -> Retired<B> {
        let next = ptr::null_mut();
        let replaced = Replaced::nothing();
        Retired { next, tag: 0, size_bytes: 0, set: None, replaced, slot: None, log: None, userfault: None }
    }

    /// How many bytes it will hold, less the set, when `change` is published.
    ///
    /// # Safety
    /// What the node has is not freed meanwhile.
    unsafe fn holds(&self, change: &Change<'_, B>) -> u64 {
        let fixed = size_of::<Retired<B>>() + size_of::<Slot<B>>();
        // SAFETY: as the caller promises.
        let (slot, log, userfault) = unsafe {
            let slot = self.slot.and_then(|slot| slot.as_ref().private.as_deref().map(PrivatePages::size_bytes));
            let log = self.log.map(|log| log.as_ref().size_bytes());
            let nr_pages = change.before.map_or(0, |before| before.range.nr_pages());
            (slot, log, self.userfault.map(|bitmap| bitmap.as_ref().needed_bytes(nr_pages)))
        };
        [slot, log, userfault].into_iter().flatten().sum::<u64>() + fixed as u64
    }

    /// # Safety
    /// What the node holds is not used any more.
    unsafe fn free_all(&self) {
        // SAFETY: sets, memslots and logs come from boxes; as the caller promises.
        unsafe {
            free(self.set);
            self.replaced.free();
            free(self.slot);
            free(self.log);
            free(self.userfault);
        }
    }
}

impl<B> Drop for Slots<B> {
    fn drop(&mut self) {
        let mut next = self.retired.first.load(Ordering::Relaxed);
        while !next.is_null() {
            // SAFETY: nodes come from boxes, and with `&mut self` what they hold is not in use.
            let node = unsafe { Box::from_raw(next) };
            next = node.next;
            // SAFETY: as above.
            unsafe { node.free_all() };
        }
        // SAFETY: the current set came from a box, and with `&mut self` it is not in use.
        let set = unsafe { Box::from_raw(self.current.load(Ordering::Relaxed)) };
        for entry in set.entries() {
            // SAFETY: the last set owns its memslots and what they have, when the VM ends.
            unsafe {
                free(Some(entry.slot));
                free(entry.log);
                free(entry.userfault);
            }
        }
        // SAFETY: as above.
        unsafe { set.free_parts() }
    }
}
