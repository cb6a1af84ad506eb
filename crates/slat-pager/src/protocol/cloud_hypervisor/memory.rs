//! The guest memory of one VM: a [`SharedMemory`] for each slot, found by the guest's address.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tokio::runtime::Handle;

use super::Error;
use super::config::{Backing, Slot};
use crate::shared_memory::SharedMemory;
use crate::source::{Identity, Source, SourceError};
use crate::working_set::replay::Populate;

/// See the [module](self).
#[derive(Debug)]
pub struct GuestMemory {
    /// In the order of addresses.
    slots: Vec<GuestSlot>,
    identity: Identity,
    size_bytes: u64,
    runtime: Handle,
    faults_waiting: AtomicU32,
}

#[derive(Debug)]
pub(super) struct GuestSlot {
    pub(super) slot: Slot,
    pub(super) memory: SharedMemory,
    /// Where its first byte is, if the slots lie one after the other: what a working set numbers.
    pub(super) start: u64,
}

impl GuestMemory {
    /// Empty memory for `slots`, each of which has its bytes in a source.
    pub(super) fn new(
        slots: &[Slot],
        sources: &BTreeMap<u32, Arc<dyn Source>>,
        runtime: Handle,
    ) -> Result<GuestMemory, Error> {
        let mut all = Vec::with_capacity(slots.len());
        let mut identities = Vec::with_capacity(slots.len());
        let mut start = 0_u64;
        for slot in slots {
            let error = |what| Error::Slot { slot: slot.number, what };
            let source = sources.get(&slot.number).ok_or_else(|| error("the snapshot has no memory of it"))?;
            if source.size_bytes() != slot.nr_bytes {
                return Err(error("the snapshot has other memory of it: the size differs"));
            }
            identities.push(source.identity());
            let make = match slot.backing {
                Backing::Pages => SharedMemory::new,
                Backing::HugePages => SharedMemory::of_huge_pages,
            };
            let memory =
                make("slat-pager", slot.file_offset, Arc::clone(source)).map_err(Error::io("make guest memory"))?;
            all.push(GuestSlot { slot: *slot, memory, start });
            start = start.checked_add(slot.nr_bytes).ok_or_else(|| error("all slots have too many bytes"))?;
        }
        let identity = Identity::new("cloud-hypervisor", identities.iter().map(|identity| &identity.as_bytes()[..]));
        Ok(GuestMemory { slots: all, identity, size_bytes: start, runtime, faults_waiting: AtomicU32::new(0) })
    }

    /// What tells this memory from that of every other snapshot.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// How many bytes all slots have.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// How many bytes are there.
    pub fn present_bytes(&self) -> u64 {
        self.slots.iter().map(|slot| slot.memory.present_bytes()).sum()
    }

    /// How many bytes a fault fills around its page.
    pub fn around_bytes(&self) -> u64 {
        self.slots.iter().map(|slot| slot.memory.unit_bytes()).max().unwrap_or(crate::source::PAGE_BYTES)
    }

    /// Notes a fault that waits, until what is returned is dropped.
    pub(super) fn note_waiting(self: &Arc<Self>) -> FaultWaits {
        // Relaxed: a hint, here and below.
        self.faults_waiting.fetch_add(1, Ordering::Relaxed);
        FaultWaits(Arc::clone(self))
    }

    pub(super) fn slots(&self) -> &[GuestSlot] {
        &self.slots
    }

    /// The slot that has all of the guest's addresses `gpas`, and their bytes in it.
    pub(super) fn find(&self, gpas: &Range<u64>) -> Option<(&GuestSlot, Range<u64>)> {
        let index = self.slots.partition_point(|slot| slot.slot.end_gpa() <= gpas.start);
        let found = self.slots.get(index)?;
        let start = gpas.start.checked_sub(found.slot.start_gpa)?;
        (gpas.end <= found.slot.end_gpa()).then(|| (found, start..start + (gpas.end - gpas.start)))
    }

    /// Fills `gpas`, which are of one slot.
    pub(super) async fn fill(&self, gpas: Range<u64>) -> Result<(), SourceError> {
        match self.find(&gpas) {
            Some((slot, range)) => slot.memory.fill(range).await,
            None => Err(SourceError::OutOfRange { range: gpas, size_bytes: self.size_bytes }),
        }
    }
}

/// See [`GuestMemory::note_waiting`].
#[derive(Debug)]
pub(super) struct FaultWaits(Arc<GuestMemory>);

impl Drop for FaultWaits {
    fn drop(&mut self) {
        self.0.faults_waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Populate for GuestMemory {
    fn populate(&self, range: Range<u64>) -> Result<(), SourceError> {
        let first = self.slots.partition_point(|slot| slot.start + slot.slot.nr_bytes <= range.start);
        for slot in &self.slots[first..] {
            if slot.start >= range.end {
                break;
            }
            let start = range.start.max(slot.start) - slot.start;
            let end = (range.end - slot.start).min(slot.slot.nr_bytes);
            self.runtime.block_on(slot.memory.fill(start..end))?;
        }
        Ok(())
    }

    fn faults_wait(&self) -> bool {
        // A hint.
        self.faults_waiting.load(Ordering::Relaxed) > 0
    }
}
