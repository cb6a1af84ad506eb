//! The dirty rings of one VM, and how vCPUs get them.
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
//! [`Rings::take`] gives a vCPU its ring, [`Rings::iter`] shows all. `harvest/rings.rs` resets them.
//!
//! # Implementation
//! One word has either the size of the rings, or the number of calls and vCPUs that keep the VM
//! without rings. So of these and the call that enables rings one comes first.

#![expect(unsafe_code, reason = "rings are reached by raw pointers, which their VM keeps alive")]

use alloc::boxed::Box;
use core::ptr::{self, NonNull};

use super::ring::{DIRTY_RING_RESERVE, DirtyRing, MAX_DIRTY_RING_ENTRIES, MIN_DIRTY_RING_ENTRIES};
use crate::boxed::try_box;
use crate::error::Error;
use crate::sync::{AtomicPtr, AtomicU64, Ordering};

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
        if !nr_entries.is_power_of_two() || !(MIN_DIRTY_RING_ENTRIES..=MAX_DIRTY_RING_ENTRIES).contains(&nr_entries) {
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
        let mut new = try_box(DirtyRing::new(nr_entries, DIRTY_RING_RESERVE)?)?;
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
