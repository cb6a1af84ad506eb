//! The dirty rings of one VM: how vCPUs get them, and how all of them are reset.
//!
//! # Guarantees
//! - A ring is freed with its VM, so the entries of a vCPU that was dropped are harvested like the
//!   others.
//! - There are never more rings than there were vCPUs at once: a new vCPU takes a ring that no vCPU
//!   has.
//! - Rings are enabled only while there is no vCPU, no recovery of huge pages, and no split by way
//!   of a broken PTE: these open pages and push none.
//!
//! # Use
//! [`Rings::take`] gives a vCPU its ring, [`RingsReset::reset`] resets them all.
//!
//! # Implementation
//! One word has either the size of the rings, or the number of calls and vCPUs that keep the VM
//! without rings. So of these and the call that enables rings one comes first.
//!
//! A reset
//! 1. protects the pages of the harvested entries of up to 32 rings,
//! 2. flushes once,
//! 3. makes the entries empty.
//!
//! It protects as a harvest of bitmaps does: in short guards, the pages of a page-table page
//! together, and lazily where there are many (`second_stage/protect.rs`).
//!
//! # Why it is correct
//! `ring` has the argument.

#![expect(unsafe_code, reason = "rings are reached by raw pointers, which their VM keeps alive")]

use alloc::boxed::Box;
use core::ptr::{self, NonNull};

use super::bitmap::{PAGES_PER_WORD, PageWords};
use super::ring::{DirtyPage, DirtyRing, Reset};
use crate::addr::{Gfn, GfnRange};
use crate::boxed::{Zeroed, try_box, try_zeroed};
use crate::error::Error;
use crate::format::Format;
use crate::host::Host;
use crate::second_stage::protect::Protector;
use crate::slot::set::Slots;
use crate::sync::{AtomicPtr, AtomicU64, Ordering, Side};
use crate::table::Tree;
use crate::table::retire::{Guard, Participant};
use crate::table::tlb::TlbBatch;

/// Set in [`Rings::state`] if the VM has rings; the rest is their size.
const ENABLED: u64 = 1 << 63;

/// The rings of one VM, or none.
pub(crate) struct Rings {
    /// [`ENABLED`] and the size of each ring, in entries; or how many vCPUs and [`WithoutRings`]
    /// there are.
    state: AtomicU64,
    first: AtomicPtr<DirtyRing>,
}

/// As long as this lives, the VM has no rings.
pub(crate) struct WithoutRings<'r>(&'r Rings);

impl Drop for WithoutRings<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl Rings {
    pub(crate) fn new() -> Rings {
        Rings { state: AtomicU64::new(0), first: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Enables rings: each vCPU that is made from now on has one of `nr_entries` entries.
    ///
    /// # Errors
    /// [`Error::BadRingSize`], [`Error::DirtyRingEnabled`]. [`Error::VcpusExist`]: a vCPU or a
    /// [`WithoutRings`] exists.
    pub(crate) fn enable(&self, nr_entries: u32) -> Result<(), Error> {
        if !nr_entries.is_power_of_two() || !(DirtyRing::MIN_ENTRIES..=DirtyRing::MAX_ENTRIES).contains(&nr_entries) {
            return Err(Error::BadRingSize { nr_entries });
        }
        // Acquire: observes the leaves of the vCPUs that are gone. Relaxed on failure: the number
        // is all that is used.
        match self.state.compare_exchange(0, ENABLED | u64::from(nr_entries), Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Ok(()),
            Err(state) if state & ENABLED != 0 => Err(Error::DirtyRingEnabled),
            Err(_) => Err(Error::VcpusExist),
        }
    }

    /// Whether pages are logged by rings, and not by bitmaps.
    pub(crate) fn are_enabled(&self) -> bool {
        // Relaxed: rings that are enabled stay so. Callers that need more make a fence.
        self.state.load(Ordering::Relaxed) & ENABLED != 0
    }

    /// Keeps the VM without rings, if it has none. `Err` is the size of its rings, in entries.
    fn enter(&self) -> Result<(), u32> {
        let more = |state: u64| (state & ENABLED == 0).then_some(state + 1);
        // Relaxed, both: the number is all that is used.
        match self.state.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => Ok(()),
            Err(enabled) => Err(enabled as u32),
        }
    }

    /// Keeps the VM without rings as long as the value lives; `None` if it has some.
    pub(crate) fn keep_out(&self) -> Option<WithoutRings<'_>> {
        self.enter().ok().map(|()| WithoutRings(self))
    }

    /// Returns the ring for a new vCPU, if vCPUs have rings. To be called as the last step of
    /// making the vCPU that may fail: a vCPU without a ring keeps the VM without rings, until it
    /// [leaves](Rings::leave).
    pub(crate) fn take(&self) -> Result<Option<OwnedRing>, Error> {
        match self.enter() {
            Ok(()) => Ok(None),
            Err(nr_entries) => self.take_ring(nr_entries).map(Some),
        }
    }

    /// To be called when a vCPU that has no ring is dropped.
    pub(crate) fn leave(&self) {
        // Release: see `enable`.
        let before = self.state.fetch_sub(1, Ordering::Release);
        debug_assert!(before & ENABLED == 0 && before != 0, "it has not entered");
    }

    fn take_ring(&self, nr_entries: u32) -> Result<OwnedRing, Error> {
        for ring in self.iter() {
            // Relaxed first: the line of a ring that is in use stays where it is. Acquire: `pushed`
            // is as the vCPU before has left it.
            let in_use = &ring.listed.in_use;
            if !in_use.load(Ordering::Relaxed)
                && in_use.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                return Ok(OwnedRing(NonNull::from(ring)));
            }
        }
        let mut new = try_box(DirtyRing::new(nr_entries, DirtyRing::RESERVE)?)?;
        // Relaxed: if the exchange fails, it returns what is listed by then.
        let mut head = self.first.load(Ordering::Relaxed);
        loop {
            new.listed.next = head;
            let pointer = NonNull::from(Box::leak(new));
            // Release: a walk of the list observes the ring and, through the chain of exchanges,
            // those behind it.
            match self.first.compare_exchange(head, pointer.as_ptr(), Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return Ok(OwnedRing(pointer)),
                Err(found) => {
                    head = found;
                    // SAFETY: the exchange failed, so no other thread has the pointer, which came
                    // from a box.
                    new = unsafe { Box::from_raw(pointer.as_ptr()) };
                }
            }
        }
    }

    /// All rings, also those that no vCPU has now.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &DirtyRing> + Clone {
        // Acquire: observes the rings.
        let mut next = self.first.load(Ordering::Acquire).cast_const();
        core::iter::from_fn(move || {
            // SAFETY: the pointer is null or a ring of the list; rings are freed only with the
            // `Rings`.
            let ring = unsafe { next.as_ref() }?;
            next = ring.listed.next;
            Some(ring)
        })
    }
}

impl Drop for Rings {
    fn drop(&mut self) {
        let mut next = self.first.load(Ordering::Relaxed);
        while !next.is_null() {
            // SAFETY: every ring of the list came from a box, and with `&mut self` none is in use:
            // references borrow the `Rings`, and vCPUs keep the VM that holds it alive.
            let ring = unsafe { Box::from_raw(next) };
            next = ring.listed.next.cast_mut();
        }
    }
}

/// Words of pages that are protected in one guard.
const WORDS_PER_TURN: usize = 128;
/// Rings whose resets share a flush.
const RINGS_PER_FLUSH: usize = 32;

/// The working memory of a reset: too large for a stack.
struct Room {
    words: [PageWord; WORDS_PER_TURN],
    pages: PageWords<WORDS_PER_TURN>,
    /// Where the reset of each ring ended.
    reached: [u64; RINGS_PER_FLUSH],
}

// SAFETY: it consists of integers, of which all zeroes are a value.
unsafe impl Zeroed for Room {
    #[cfg(loom)]
    fn zeroed() -> Room {
        Room { words: [PageWord::default(); WORDS_PER_TURN], pages: PageWords::new(), reached: [0; RINGS_PER_FLUSH] }
    }
}

/// Some of 64 pages of a memslot.
#[derive(Clone, Copy, Default)]
struct PageWord {
    slot: u32,
    /// The number of the first page, divided by 64.
    index: u64,
    /// Bit n: page n from the first on.
    bits: u64,
}

impl PageWord {
    fn of(DirtyPage { slot, page }: DirtyPage) -> PageWord {
        PageWord { slot, index: page / PAGES_PER_WORD, bits: 1 << (page % PAGES_PER_WORD) }
    }

    /// Returns the bits for pages below `nr_pages`.
    fn bits_below(&self, nr_pages: u64) -> u64 {
        match nr_pages.saturating_sub(self.index * PAGES_PER_WORD) {
            0 => 0,
            left => self.bits & (u64::MAX >> PAGES_PER_WORD.saturating_sub(left)),
        }
    }
}

/// Sorts `words` by memslot and page, so that those of a page-table page are together, and merges
/// words of the same pages. Returns them.
fn in_order(words: &mut [PageWord]) -> &[PageWord] {
    words.sort_unstable_by_key(|word| (word.slot, word.index));
    let mut len = words.len().min(1);
    for index in 1..words.len() {
        let word = words[index];
        let last = &mut words[len - 1];
        if (last.slot, last.index) == (word.slot, word.index) {
            last.bits |= word.bits;
        } else {
            words[len] = word;
            len += 1;
        }
    }
    &words[..len]
}

/// One call that resets all rings of a VM.
pub(crate) struct RingsReset<'c, H: Host, F: Format> {
    pub(crate) tree: &'c Tree<H, F>,
    pub(crate) slots: &'c Slots<H::Backing>,
    pub(crate) participant: &'c Participant,
}

impl<H: Host, F: Format> RingsReset<'_, H, F> {
    /// Protects the pages of all harvested entries of `rings`, flushes, and makes the entries
    /// empty. Returns how many entries no other reset had made empty before.
    pub(crate) fn reset<'r>(&self, mut rings: impl Iterator<Item = &'r DirtyRing> + Clone) -> Result<u64, Error> {
        let mut room = try_zeroed::<Room>()?;
        let mut nr_reset = 0;
        loop {
            let mut batch = TlbBatch::new(self.tree, self.participant);
            let protected = rings.clone();
            let mut nr_rings = 0;
            for ring in rings.by_ref().take(RINGS_PER_FLUSH) {
                let mut reset = ring.reset();
                self.protect_entries(&mut reset, &mut room, &mut batch);
                room.reached[nr_rings] = reset.reached();
                nr_rings += 1;
            }
            // Before any entry is empty: a thread that finds an entry empty need not flush.
            batch.flush();
            let reached = room.reached[..nr_rings].iter();
            nr_reset += protected.zip(reached).map(|(ring, &reached)| ring.finish_reset(reached)).sum::<u64>();
            if nr_rings < RINGS_PER_FLUSH {
                return Ok(nr_reset);
            }
        }
    }

    /// Protects the pages of the entries that `reset` gives out, turn by turn.
    fn protect_entries(&self, reset: &mut Reset<'_>, room: &mut Room, batch: &mut TlbBatch<'_, H, F>) {
        let Room { words, pages, .. } = room;
        let mut len = 0;
        for page in reset {
            let new = PageWord::of(page);
            match words[..len].last_mut() {
                // Mostly a guest writes forward, or backward.
                Some(last) if (last.slot, last.index) == (new.slot, new.index) => last.bits |= new.bits,
                _ => {
                    if len == WORDS_PER_TURN {
                        self.protect(words, pages, batch);
                        len = 0;
                    }
                    words[len] = new;
                    len += 1;
                }
            }
        }
        if len != 0 {
            self.protect(&mut words[..len], pages, batch);
        }
    }

    /// Protects the pages of `words`, in one guard.
    fn protect(&self, words: &mut [PageWord], pages: &mut PageWords<WORDS_PER_TURN>, batch: &mut TlbBatch<'_, H, F>) {
        let tree = self.tree;
        // A directory entry is protected once at most in a turn, so its pages must be together.
        let words = in_order(words);
        tree.generations.renew_if_low(&tree.epochs, || tree.host.barrier_on_all_cpus());
        let locked = tree.pin(self.participant, Side::Write);
        locked.guard.visit(words.len() as u64 * PAGES_PER_WORD);
        for words in words.chunk_by(|word, next| word.slot == next.slot) {
            // If the memslot was deleted or moved since the pages were pushed, all its PTEs were
            // zapped and flushed before the new set was published. The pages at its new place, or
            // of another memslot with the same number, were pushed for themselves.
            if let Some(slot) = self.slots.by_id(&locked.guard, words[0].slot) {
                self.protect_in_slot(&locked.guard, slot.range(), words, pages, batch);
            }
        }
        drop(locked);
        if tree.should_yield() {
            tree.host.yield_now();
        }
    }
}

/// Words from the first on that are protected together.
const TURN_WORDS: u64 = 1 << 13;

impl<H: Host, F: Format> RingsReset<'_, H, F> {
    /// Protects the pages of `words`, which are in order, of the memslot that has `range`.
    fn protect_in_slot(
        &self,
        guard: &Guard<'_>,
        range: GfnRange,
        mut words: &[PageWord],
        pages: &mut PageWords<WORDS_PER_TURN>,
        batch: &mut TlbBatch<'_, H, F>,
    ) {
        while let Some(first) = words.first().map(|word| word.index) {
            let (near, far) = words.split_at(words.partition_point(|word| word.index - first < TURN_WORDS));
            pages.clear();
            for word in near {
                pages.push((word.index - first) as usize, word.bits_below(range.nr_pages()));
            }
            // Each with an admission of its own: a page-table page may have pages in both.
            let mut protector = Protector::new(self.tree, guard, range);
            protector.protect(Gfn(range.start.0 + first * PAGES_PER_WORD), pages, batch);
            protector.finish(self.participant);
            words = far;
        }
    }
}

/// The ring that a vCPU has for its life.
pub(crate) struct OwnedRing(NonNull<DirtyRing>);

// SAFETY: a `DirtyRing` is `Sync`, and the pointer is only ever read.
unsafe impl Send for OwnedRing {}

impl OwnedRing {
    /// # Safety
    /// The `Rings` that it came from is alive for `'a`.
    pub(crate) unsafe fn get<'a>(&self) -> &'a DirtyRing {
        // SAFETY: rings live as long as their `Rings`.
        unsafe { self.0.as_ref() }
    }

    /// Releases the ring, with its entries, for a later vCPU to use.
    ///
    /// # Safety
    /// The `Rings` that it came from is alive. This is not used any more.
    pub(crate) unsafe fn release(&mut self) {
        // SAFETY: as the caller promises. Release: see `take_ring`.
        unsafe { self.get() }.listed.in_use.store(false, Ordering::Release);
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
#[path = "rings_tests.rs"]
mod tests;

#[cfg(all(test, loom))]
#[path = "rings_loom.rs"]
mod loom_tests;
