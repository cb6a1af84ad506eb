//! The published set of slots: an immutable sorted array behind one pointer. Faults look a frame up without a lock; a
//! change builds a new array and swaps the pointer by compare-and-exchange, starting over if another change came first.
//!
//! Lifetimes. A set, a slot, a dirty bitmap and what refers to a userfault bitmap are freed when
//! they are out of the published set and no section is open that could have found them
//! (`table/retire.rs`); a slot also not while a vCPU resolves a page in its backing. The change
//! that takes them out owns them: it puts them on the list of retired things, for which it has
//! allocated the node before. So reading takes no reference count, and no line is shared by faults.
//! What the list holds is bounded: a change is refused when it is too much ([`MAX_RETIRED_BYTES`]).
//! A log is not retired when its slot ceases to log: the slot keeps it.
//!
//! One change of a slot at a time: it *claims* the slot, and another that comes meanwhile gets [`Error::SlotBusy`]. While
//! a slot is being deleted or moved its range is published as taken away (`table/stamp.rs`), and the slot stays in the set
//! until nothing of it is mapped: nothing else can be put in its place.

#![expect(unsafe_code, reason = "published sets are reached by raw pointers and freed by epochs")]

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::mem;
use core::ptr::{self, NonNull};

use super::attributes::PrivatePages;
use super::region::MemoryRegionFlags;
use super::userfault::UserfaultBitmap;
use super::view::SlotView;
use crossbeam_utils::CachePadded;

use crate::addr::{Gfn, GfnRange};
use crate::boxed::try_box;
use crate::dirty::bitmap::Bitmap;
use crate::error::Error;
use crate::sync::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use crate::table::retire::{Epochs, Record, Section};

/// What stays the same during a slot's life. On lines of its own: each fault reads its slot's, and must not notice that
/// another slot is claimed.
#[repr(align(128))]
pub(crate) struct Slot<B> {
    pub(super) backing: B,
    /// What each page is, if the slot has a guest_memfd.
    pub(super) private: Option<Box<PrivatePages>>,
    /// A change of this slot is under way.
    claimed: AtomicBool,
}

/// A slot in a set.
pub(crate) struct SlotEntry<B> {
    pub(crate) range: GfnRange,
    pub(crate) id: u32,
    pub(crate) flags: MemoryRegionFlags,
    pub(super) slot: NonNull<Slot<B>>,
    /// The dirty log, if `flags` has `LOG_DIRTY_PAGES` and the VM does not log by rings. It stays
    /// with the slot when that flag goes, for when it comes again.
    pub(super) log: Option<NonNull<Bitmap>>,
    /// The pages at which faults exit, if `flags` has `USERFAULT`.
    pub(super) userfault: Option<NonNull<UserfaultBitmap>>,
}

impl<B> Clone for SlotEntry<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for SlotEntry<B> {}

/// An immutable set.
pub(crate) struct SlotSet<B> {
    /// Sorted by range; ranges do not overlap.
    entries: Vec<SlotEntry<B>>,
    /// Indices of `entries`, sorted by slot number.
    by_id: Vec<u32>,
}

/// What retired things may hold, in bytes, before further changes of slots are refused. That comes
/// to pass only behind a section that stays open: what no section can have found is freed first.
pub(crate) const MAX_RETIRED_BYTES: u64 = 256 << 20;
/// As many changes may have left something in any case, however large their slots are.
const MIN_RETIRED: u64 = 64;

/// Things that a change took out of the published set.
struct Retired<B> {
    next: *mut Retired<B>,
    tag: u64,
    /// What it holds, less the slot's backing.
    size_bytes: u64,
    set: Option<NonNull<SlotSet<B>>>,
    slot: Option<NonNull<Slot<B>>>,
    log: Option<NonNull<Bitmap>>,
    userfault: Option<NonNull<UserfaultBitmap>>,
}

/// The slots of one VM.
pub(crate) struct Slots<B> {
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

// SAFETY: the raw pointers own what they point to, or share it by the rules of the module; backings are Send and Sync.
unsafe impl<B: Send + Sync> Send for Slots<B> {}
// SAFETY: as above.
unsafe impl<B: Send + Sync> Sync for Slots<B> {}

/// A slot that the caller has claimed: no other call changes it, until this is dropped. So a panic
/// of what a caller supplies leaves it free.
pub(crate) struct Claim<B> {
    pub(crate) entry: SlotEntry<B>,
}

impl<B> Drop for Claim<B> {
    fn drop(&mut self) {
        // Release: hands the state that this change left over to the next.
        self.slot().claimed.store(false, Ordering::Release);
    }
}

impl<B> Claim<B> {
    fn slot(&self) -> &Slot<B> {
        // SAFETY: only the claim's owner can retire a slot.
        unsafe { self.entry.slot.as_ref() }
    }

    /// The log that the slot's published entry `entry` has, whether it logs or did so before.
    pub(crate) fn log_of<'c>(&'c self, entry: &'c SlotEntry<B>) -> Option<&'c Bitmap> {
        debug_assert!(entry.slot == self.entry.slot);
        // SAFETY: only the claim's owner takes a log out of the set, and so can retire it.
        entry.log.map(|log| unsafe { log.as_ref() })
    }

    /// The userfault bitmap that the slot has now.
    pub(crate) fn userfault(&self) -> Option<&UserfaultBitmap> {
        // SAFETY: as for `log_of`.
        self.entry.userfault.map(|userfault| unsafe { userfault.as_ref() })
    }
}

/// What a change does to the set. What it says to add is owned by the change until it is published.
enum Change<B> {
    Insert(SlotEntry<B>),
    /// Replaces the entry of a claimed slot.
    Replace(SlotEntry<B>),
    /// Removes a claimed slot.
    Remove(SlotEntry<B>),
}

impl<B> Change<B> {
    fn id(&self) -> u32 {
        match self {
            Change::Insert(entry) | Change::Replace(entry) | Change::Remove(entry) => entry.id,
        }
    }
}

impl<B> SlotSet<B> {
    fn with_capacity(capacity: usize) -> Result<SlotSet<B>, Error> {
        let (mut entries, mut by_id) = (Vec::new(), Vec::new());
        entries.try_reserve_exact(capacity).map_err(|_| Error::OutOfMemory)?;
        by_id.try_reserve_exact(capacity).map_err(|_| Error::OutOfMemory)?;
        Ok(SlotSet { entries, by_id })
    }

    /// Position in `by_id` of slot number `id`, or where it would be.
    fn position(&self, id: u32) -> Result<usize, usize> {
        self.by_id.binary_search_by_key(&id, |&index| self.entries[index as usize].id)
    }

    fn by_id(&self, id: u32) -> Option<&SlotEntry<B>> {
        let position = self.position(id).ok()?;
        Some(&self.entries[self.by_id[position] as usize])
    }

    /// The slot that has `gfn`. It is looked for at index `guess` first, which becomes the index of the
    /// slot that is found: an address is mostly in the slot of the one before.
    #[inline]
    fn find(&self, guess: &AtomicU32, gfn: Gfn) -> Option<&SlotEntry<B>> {
        // Relaxed: a guess orders nothing.
        match self.entries.get(guess.load(Ordering::Relaxed) as usize) {
            Some(entry) if entry.range.contains(gfn) => Some(entry),
            _ => self.search(guess, gfn),
        }
    }

    #[inline(never)]
    fn search(&self, guess: &AtomicU32, gfn: Gfn) -> Option<&SlotEntry<B>> {
        let index = self.entries.partition_point(|entry| entry.range.start <= gfn).checked_sub(1)?;
        let entry = self.entries.get(index).filter(|entry| entry.range.contains(gfn))?;
        // Relaxed: as above.
        guess.store(index as u32, Ordering::Relaxed);
        Some(entry)
    }

    /// The first slot other than `id` that shares a frame with `range`.
    fn overlapping(&self, id: u32, range: GfnRange) -> Option<&SlotEntry<B>> {
        let first = self.entries.partition_point(|entry| entry.range.end <= range.start);
        self.entries[first..].iter().take_while(|entry| entry.range.start < range.end).find(|entry| entry.id != id)
    }

    /// Fills this empty set, which has room for it, with `old` as changed. Allocates nothing.
    fn fill(&mut self, old: &SlotSet<B>, change: &Change<B>) -> Result<(), Error> {
        let id = change.id();
        let removed = old.position(id).ok().map(|position| old.by_id[position] as usize);
        let added = match change {
            Change::Insert(_) if removed.is_some() => return Err(Error::SlotBusy { slot: id }),
            Change::Insert(entry) | Change::Replace(entry) => Some(entry),
            Change::Remove(_) => None,
        };
        let (below, above) = old.entries.split_at(removed.unwrap_or(old.entries.len()));
        self.entries.extend_from_slice(below);
        self.entries.extend_from_slice(above.get(1..).unwrap_or_default());
        let mut at = None;
        if let Some(&added) = added {
            let index = self.entries.partition_point(|entry| entry.range.start < added.range.start);
            let neighbours = index.saturating_sub(1)..(index + 1).min(self.entries.len());
            if let Some(other) = self.entries[neighbours].iter().find(|other| other.range.overlaps(added.range)) {
                return Err(Error::Overlap { slot: id, gpa: added.range.start.gpa(), other: other.id });
            }
            self.entries.insert(index, added);
            at = Some(index);
        }
        // The others keep their order; only their indices move.
        self.by_id.extend(old.by_id.iter().map(|&index| index as usize).filter(|&index| Some(index) != removed).map(
            |index| {
                let without = index - usize::from(removed.is_some_and(|removed| removed < index));
                (without + usize::from(at.is_some_and(|at| at <= without))) as u32
            },
        ));
        if let Some(at) = at {
            let position = self.by_id.partition_point(|&index| self.entries[index as usize].id < id);
            self.by_id.insert(position, at as u32);
        }
        debug_assert!(self.by_id.is_sorted_by_key(|&index| self.entries[index as usize].id));
        debug_assert!(self.entries.is_sorted_by_key(|entry| entry.range.start));
        Ok(())
    }
}

impl<B> Slots<B> {
    pub(crate) fn new() -> Result<Slots<B>, Error> {
        let empty = Box::into_raw(try_box(SlotSet { entries: Vec::new(), by_id: Vec::new() })?);
        let (len, size_bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        let retired = RetiredList { first: AtomicPtr::new(ptr::null_mut()), len, size_bytes };
        Ok(Slots { current: AtomicPtr::new(empty), retired: CachePadded::new(retired) })
    }

    /// The published set. SeqCst: stands in store-load pairs with `protect` (see `dirty/log.rs`); as an acquire load it
    /// sees the set's contents.
    #[inline]
    fn current<'s>(&self, _section: &'s Section<'_>) -> &'s SlotSet<B> {
        // SAFETY: the pointer is never null; a set that was published when the section began, or since, is freed only
        // after the section.
        unsafe { &*self.current.load(Ordering::SeqCst) }
    }

    /// The slot that has `gfn`.
    #[inline]
    pub(crate) fn find<'s>(&self, section: &'s Section<'s>, gfn: Gfn) -> Option<SlotView<'s, B>> {
        self.current(section).find(&section.record().last_slot, gfn).map(|&entry| SlotView { entry, section })
    }

    /// The slot that has `gfn`, or else the first one above it.
    pub(crate) fn find_from<'s>(&self, section: &'s Section<'s>, gfn: Gfn) -> Option<SlotView<'s, B>> {
        let entries = &self.current(section).entries;
        let first = entries.partition_point(|entry| entry.range.end <= gfn);
        entries.get(first).map(|&entry| SlotView { entry, section })
    }

    /// The slot of number `id`.
    pub(crate) fn by_id<'s>(&self, section: &'s Section<'s>, id: u32) -> Option<SlotView<'s, B>> {
        self.current(section).by_id(id).map(|&entry| SlotView { entry, section })
    }

    /// Claims slot `id` for a change. `Ok(None)`: there is no such slot.
    pub(crate) fn claim(&self, epochs: &Epochs, record: &Record, id: u32) -> Result<Option<Claim<B>>, Error> {
        let section = epochs.enter(record);
        let Some(view) = self.by_id(&section, id) else { return Ok(None) };
        // SAFETY: found in an open section.
        let slot = unsafe { view.entry.slot.as_ref() };
        // Acquire: takes over the state that the last change of the slot left.
        if slot.claimed.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return Err(Error::SlotBusy { slot: id });
        }
        // The set may have changed since it was read, this slot's entry included: read it again, now that it is fixed.
        // It is there: a slot that was deleted stays claimed, so the exchange would have failed.
        Ok(self.by_id(&section, id).map(|now| Claim { entry: now.entry }))
    }

    /// Whether slot `id` could have `range` now.
    pub(crate) fn check_vacant(&self, epochs: &Epochs, record: &Record, id: u32, range: GfnRange) -> Result<(), Error> {
        let section = epochs.enter(record);
        match self.current(&section).overlapping(id, range) {
            Some(other) => Err(Error::Overlap { slot: id, gpa: range.start.gpa(), other: other.id }),
            None => Ok(()),
        }
    }

    /// Publishes the set with the new slot `entry`, which the caller has claimed as it was made.
    ///
    /// On an error nothing was published, and the slot still belongs to the caller.
    pub(crate) fn insert(&self, epochs: &Epochs, record: &Record, entry: SlotEntry<B>) -> Result<(), Error> {
        self.publish(epochs, record, &Change::Insert(entry))?;
        // The claim that it was made with.
        drop(Claim { entry });
        Ok(())
    }

    /// Publishes the set with `after` instead of the entry of the claimed slot.
    ///
    /// On an error nothing was published, and what is new in `after` still belongs to the caller.
    pub(crate) fn replace(
        &self,
        epochs: &Epochs,
        record: &Record,
        claim: &Claim<B>,
        after: SlotEntry<B>,
    ) -> Result<(), Error> {
        debug_assert!(claim.entry.slot == after.slot);
        self.publish(epochs, record, &Change::Replace(after))
    }

    /// Publishes the set without the claimed slot, which stays claimed: a call that still finds it
    /// in an old set must not change it.
    ///
    /// On an error nothing was published, and the slot is free to be changed.
    pub(crate) fn remove(&self, epochs: &Epochs, record: &Record, claim: Claim<B>) -> Result<(), Error> {
        self.publish(epochs, record, &Change::Remove(claim.entry))?;
        // Retired by now, and perhaps freed: not to be touched.
        mem::forget(claim);
        Ok(())
    }

    /// Publishes `change` of the set that is current by then. Whatever is out of the set afterwards is retired.
    ///
    /// On an error nothing was published, and what the change would have added still belongs to the caller.
    fn publish(&self, epochs: &Epochs, record: &Record, change: &Change<B>) -> Result<(), Error> {
        let mut node = try_box(Retired::nothing())?;
        let mut capacity = self.current(&epochs.enter(record)).entries.len() + 1;
        loop {
            // Allocation, outside of the section.
            let mut new = try_box(SlotSet::with_capacity(capacity)?)?;
            let section = epochs.enter(record);
            let old_pointer = self.current.load(Ordering::SeqCst);
            // SAFETY: as for `current`.
            let old = unsafe { &*old_pointer };
            let needed = old.entries.len() + 1;
            if needed > capacity {
                capacity = needed;
                continue;
            }
            new.fill(old, change)?;
            if let Change::Remove(removed) | Change::Replace(removed) = change {
                let before = old.by_id(removed.id).copied();
                debug_assert!(before.is_some_and(|before| before.slot == removed.slot), "changes need a claim");
                let after = new.by_id(removed.id);
                let kept = (after.and_then(|after| after.log), after.and_then(|after| after.userfault));
                node.log = before.and_then(|before| before.log).filter(|&log| Some(log) != kept.0);
                node.userfault = before.and_then(|before| before.userfault).filter(|&bitmap| Some(bitmap) != kept.1);
                node.slot = matches!(change, Change::Remove(_)).then_some(removed.slot);
            }
            // SAFETY: what `old` has is there as long as this section is open, and the change's
            // claim is held.
            node.size_bytes = unsafe { node.holds(old, change) };
            let new = Box::into_raw(new);
            // SeqCst: release for the set's contents; and the store of the store-load pairs with `mark_if_logging`.
            // The section keeps `old` from being freed and its address used again, so equal pointers are equal sets.
            let published = self.current.compare_exchange(old_pointer, new, Ordering::SeqCst, Ordering::Relaxed);
            drop(section);
            if published.is_ok() {
                // Not as a box: sections that are open still look at it.
                node.set = NonNull::new(old_pointer);
                node.tag = epochs.retire_era();
                self.push_retired(Box::into_raw(node));
                return Ok(());
            }
            // SAFETY: the exchange failed, so nobody else has seen the new set. It frees no slot.
            drop(unsafe { Box::from_raw(new) });
        }
    }

    fn push_retired(&self, node: *mut Retired<B>) {
        self.retired.len.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the node belongs to this thread until it is on the list.
        self.retired.size_bytes.fetch_add(unsafe { (*node).size_bytes }, Ordering::Relaxed);
        let mut head = self.retired.first.load(Ordering::Relaxed);
        loop {
            // SAFETY: the node belongs to this thread until the exchange succeeds.
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

    /// Frees what changes have left, if that is too much; an error if it still is. To be called
    /// before a change.
    ///
    /// # Errors
    /// [`Error::TooMuchRetired`].
    pub(crate) fn make_room(&self, epochs: &Epochs, barrier_on_all_cpus: impl FnOnce()) -> Result<(), Error> {
        let held = || {
            let (len, size_bytes) = (self.nr_retired(), self.retired.size_bytes.load(Ordering::Relaxed));
            (len >= MIN_RETIRED && size_bytes >= MAX_RETIRED_BYTES).then_some(size_bytes)
        };
        if held().is_some() {
            self.reclaim(epochs, barrier_on_all_cpus);
        }
        held().map_or(Ok(()), |size_bytes| Err(Error::TooMuchRetired { size_bytes }))
    }

    /// Frees the retired sets, slots and logs that nobody can use any more.
    pub(crate) fn reclaim(&self, epochs: &Epochs, barrier_on_all_cpus: impl FnOnce()) {
        // A look first: mostly there is nothing, and then the line stays where it is.
        if self.retired.first.load(Ordering::Relaxed).is_null() {
            return;
        }
        // Acquire: sees the nodes.
        let mut next = self.retired.first.swap(ptr::null_mut(), Ordering::Acquire);
        let oldest = epochs.oldest_open(barrier_on_all_cpus);
        while !next.is_null() {
            // SAFETY: nodes come from boxes, and the swap made the list this thread's.
            let node = unsafe { Box::from_raw(next) };
            next = node.next;
            self.retired.len.fetch_sub(1, Ordering::Relaxed);
            self.retired.size_bytes.fetch_sub(node.size_bytes, Ordering::Relaxed);
            if node.tag < oldest && !node.slot.is_some_and(|slot| epochs.is_resolving(slot)) {
                // SAFETY: no section can have found it, nobody resolves in it, and nothing but this node refers to it.
                unsafe { node.free_all() };
            } else {
                self.push_retired(Box::into_raw(node));
            }
        }
    }
}

/// What a change gives to a slot, in boxes: nobody has seen it before the change is published.
#[derive(Default)]
pub(crate) struct Attachments {
    pub(crate) log: Option<Box<Bitmap>>,
    pub(crate) userfault: Option<Box<UserfaultBitmap>>,
}

fn leak<T>(thing: Option<Box<T>>) -> Option<NonNull<T>> {
    thing.map(|thing| NonNull::from(Box::leak(thing)))
}

impl<B> SlotEntry<B> {
    /// An entry for a new slot, claimed by the caller, not yet published.
    pub(crate) fn new(
        id: u32,
        range: GfnRange,
        flags: MemoryRegionFlags,
        backing: B,
        attachments: Attachments,
    ) -> Result<SlotEntry<B>, Error> {
        let has_private = flags.contains(MemoryRegionFlags::GUEST_MEMFD);
        let private = has_private.then(|| PrivatePages::new(range.nr_pages())).transpose()?;
        let slot = try_box(Slot { backing, private, claimed: AtomicBool::new(true) })?;
        let slot = NonNull::from(Box::leak(slot));
        let Attachments { log, userfault } = attachments;
        Ok(SlotEntry { range, id, flags, slot, log: leak(log), userfault: leak(userfault) })
    }

    /// The same slot elsewhere, with other flags; with what `attachments` has, or else with what it
    /// had: its log in any case, its userfault bitmap if the flags still ask for it.
    pub(crate) fn changed(self, range: GfnRange, flags: MemoryRegionFlags, attachments: Attachments) -> SlotEntry<B> {
        let Attachments { log, userfault } = attachments;
        let log = leak(log).or(self.log);
        let userfault = leak(userfault).or(self.userfault.filter(|_| flags.contains(MemoryRegionFlags::USERFAULT)));
        SlotEntry { range, flags, log, userfault, ..self }
    }

    /// Frees what `changed` added to `before`, because this entry was not published.
    pub(crate) fn discard_change(self, before: &SlotEntry<B>) {
        // SAFETY: they came from boxes in `changed`, and were never published.
        unsafe {
            free(self.log.filter(|_| self.log != before.log));
            free(self.userfault.filter(|_| self.userfault != before.userfault));
        }
    }

    /// Frees a slot of [`SlotEntry::new`] that was not published.
    pub(crate) fn discard(self) {
        // SAFETY: all came from boxes in `new`, and were never published.
        unsafe {
            free(Some(self.slot));
            free(self.log);
            free(self.userfault);
        }
    }
}

/// Frees what comes from a box.
///
/// # Safety
/// It came from a box, and nobody uses it any more.
unsafe fn free<T>(thing: Option<NonNull<T>>) {
    if let Some(thing) = thing {
        // SAFETY: as the caller promises.
        drop(unsafe { Box::from_raw(thing.as_ptr()) });
    }
}

impl<B> Retired<B> {
    fn nothing() -> Retired<B> {
        let next = ptr::null_mut();
        Retired { next, tag: 0, size_bytes: 0, set: None, slot: None, log: None, userfault: None }
    }

    /// How many bytes it will hold, with the set `old`, when `change` of that is published.
    ///
    /// # Safety
    /// What the node has is not freed meanwhile.
    unsafe fn holds(&self, old: &SlotSet<B>, change: &Change<B>) -> u64 {
        let set = old.entries.capacity() * size_of::<SlotEntry<B>>() + old.by_id.capacity() * size_of::<u32>();
        let fixed = size_of::<Retired<B>>() + size_of::<SlotSet<B>>() + size_of::<Slot<B>>();
        // SAFETY: as the caller promises.
        let (slot, log, userfault) = unsafe {
            let slot = self.slot.and_then(|slot| slot.as_ref().private.as_deref().map(PrivatePages::size_bytes));
            let log = self.log.map(|log| log.as_ref().size_bytes());
            let nr_pages = old.by_id(change.id()).map_or(0, |before| before.range.nr_pages());
            (slot, log, self.userfault.map(|bitmap| bitmap.as_ref().needed_bytes(nr_pages)))
        };
        [slot, log, userfault].into_iter().flatten().sum::<u64>() + (set + fixed) as u64
    }

    /// # Safety
    /// Nobody uses what the node holds.
    unsafe fn free_all(&self) {
        // SAFETY: sets, slots and logs come from boxes; as the caller promises.
        unsafe {
            free(self.set);
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
            // SAFETY: nodes come from boxes, and with `&mut self` nobody uses what they hold.
            let node = unsafe { Box::from_raw(next) };
            next = node.next;
            // SAFETY: as above.
            unsafe { node.free_all() };
        }
        // SAFETY: the current set came from a box, and nobody uses it any more.
        let set = unsafe { Box::from_raw(self.current.load(Ordering::Relaxed)) };
        for entry in &set.entries {
            // SAFETY: a slot and what it has belong to the set that holds them when the VM ends.
            unsafe {
                free(Some(entry.slot));
                free(entry.log);
                free(entry.userfault);
            }
        }
    }
}
