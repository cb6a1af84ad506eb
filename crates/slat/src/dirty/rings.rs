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
//! [`Rings::take`] gives a vCPU its ring, [`Rings::iter`] shows all. `harvest/rings.rs` resets
//! them.
//!
//! # Implementation
//! One word has either the size of the rings, or the number of calls and vCPUs that keep the VM
//! without rings. So of these and the call that enables rings one comes first.

#![expect(unsafe_code, reason = "rings are reached by raw pointers, which their VM keeps alive")]

use core::ptr::NonNull;

use super::ring::DirtyRing;
use crate::boxed::try_box;
use crate::error::{ConfigError, OutOfMemory};
use crate::pool::{Pool, Pooled};
use crate::sync::{AtomicU64, Ordering, record};

/// Set in [`Rings::state`] if the VM has rings; the rest is their size.
const ENABLED: u64 = 1 << 63;

/// The rings of one VM, or none.
pub(crate) struct Rings {
    /// [`ENABLED`] and the size of each ring, in entries; or how many vCPUs and [`WithoutRings`]
    /// there are.
    state: AtomicU64,
    rings: Pool<DirtyRing>,
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
        Rings { state: AtomicU64::new(0), rings: Pool::new() }
    }

    /// Enables rings: each vCPU that is made from now on has one of `nr_entries` entries.
    ///
    /// # Errors
    /// [`ConfigError::BadRingSize`], [`ConfigError::DirtyRingEnabled`].
    /// [`ConfigError::VcpusExist`]: a vCPU or a [`WithoutRings`] exists.
    pub(crate) fn enable(&self, nr_entries: u32) -> Result<(), ConfigError> {
        if !nr_entries.is_power_of_two() || !(DirtyRing::MIN_ENTRIES..=DirtyRing::MAX_ENTRIES).contains(&nr_entries) {
            return Err(ConfigError::BadRingSize { nr_entries });
        }
        // Acquire: observes the leaves of the vCPUs that are gone. Relaxed on failure: the number
        // is all that is used.
        match self.state.compare_exchange(0, ENABLED | u64::from(nr_entries), Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => {
                record!(RingsEnabled);
                Ok(())
            }
            Err(state) if state & ENABLED != 0 => Err(ConfigError::DirtyRingEnabled),
            Err(_) => Err(ConfigError::VcpusExist),
        }
    }

    /// Whether pages are logged by rings, and not by bitmaps.
    pub(crate) fn are_enabled(&self) -> bool {
        // Relaxed: rings that are enabled stay so. Callers that need more make a fence.
        let are_enabled = self.state.load(Ordering::Relaxed) & ENABLED != 0;
        record!(RingsRead { are_enabled });
        are_enabled
    }

    /// Keeps the VM without rings, if it has none. `Err` is the size of its rings, in entries.
    fn enter(&self) -> Result<(), u32> {
        let more = |state: u64| (state & ENABLED == 0).then_some(state + 1);
        // Relaxed, both: the number is all that is used.
        match self.state.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => {
                record!(WithoutRingsBegins);
                Ok(())
            }
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
    pub(crate) fn take(&self) -> Result<Option<OwnedRing>, OutOfMemory> {
        match self.enter() {
            Ok(()) => Ok(None),
            Err(nr_entries) => self.take_ring(nr_entries).map(Some),
        }
    }

    /// To be called when a vCPU that has no ring is dropped.
    pub(crate) fn leave(&self) {
        // Release: see `enable`.
        let before = self.state.fetch_sub(1, Ordering::Release);
        record!(WithoutRingsEnds);
        debug_assert!(before & ENABLED == 0 && before != 0, "it has not entered");
    }

    fn take_ring(&self, nr_entries: u32) -> Result<OwnedRing, OutOfMemory> {
        let ring = match self.rings.claim() {
            Some(ring) => ring,
            None => {
                // Only the rings of tests are so small that it matters.
                let reserve = DirtyRing::RESERVE.min(nr_entries / 4);
                self.rings.add(try_box(DirtyRing::new(nr_entries, reserve)?)?)
            }
        };
        Ok(OwnedRing(NonNull::from(ring)))
    }

    /// All rings, also those that no vCPU has now.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &DirtyRing> + Clone {
        self.rings.iter()
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
        // SAFETY: as the caller promises: it has the ring, and does not use it any more.
        unsafe { self.get().link().release() }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
#[path = "rings_tests.rs"]
mod tests;

#[cfg(all(test, loom))]
#[path = "rings_loom.rs"]
mod loom_tests;
