//! What user space decides for single pages: at which of them faults exit (userfault), and which
//! are private to the guest (attributes).

use core::convert::Infallible;

use super::{Vm, too_high};
use crate::addr::{Gfn, GfnRange, Gpa, PAGE_SHIFT, PAGE_SIZE};
use crate::error::{AddressTooHigh, FaultError, SlotError};
use crate::exit::{Exit, MemoryFaultFlags, Outcome};
use crate::format::Format;
use crate::host::Host;
use crate::second_stage::invalidate::Invalidation;
use crate::second_stage::rescan;
use crate::slot::MemoryAttributes;
use crate::slot::view::SlotView;
use crate::table::retire::Participant;

/// Pages that are checked one by one inside one guard.
const PAGES_PER_TURN: u64 = 1 << 12;
/// Pages whose attributes are set, by words of 64, inside one guard.
const PAGES_SET_PER_TURN: u64 = PAGES_PER_TURN * u64::BITS as u64;

impl<H: Host, F: Format> Vm<H, F> {
    /// Unmaps those of `nr_pages` pages from `first_page` on of memslot `slot` whose userfault bit
    /// is set. Returns how many pages these are (with a bit for 2 MiB: all of its pages). Pages
    /// whose bit is clear stay mapped.
    ///
    /// Use it to poison a page, or to take a range back, without turning the flag off and on
    /// ([`UserfaultBitmap`](crate::slots::UserfaultBitmap) has the steps). Faults that begin after
    /// a bit was set observe it at once, if the memslot has
    /// [`MemoryRegionFlags::USERFAULT`](crate::MemoryRegionFlags::USERFAULT). When this call
    /// returns, the bit also holds for earlier faults and for pages that were mapped: no CPU uses
    /// the page until its bit is cleared.
    ///
    /// # Errors
    /// [`SlotError::NoSuchSlot`], [`SlotError::NotUserfault`], [`SlotError::EmptyRange`],
    /// [`SlotError::RangePastEnd`], [`SlotError::UserfaultBitmapGone`], [`SlotError::OutOfMemory`].
    /// With the last two, a part may be done.
    ///
    /// # Example
    /// ```
    /// # mod host { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/doc_host.rs")); }
    /// # use host::*;
    /// use slat::*;
    /// use slat::slots::*;
    /// # fn main() -> Result<(), Error> {
    /// use std::sync::Arc;
    /// use std::sync::atomic::{AtomicU64, Ordering};
    /// let vm = vm(Config::default());
    /// // No page of the memslot has arrived yet.
    /// let words = Arc::new((0..4).map(|_| AtomicU64::new(u64::MAX)).collect::<Vec<_>>());
    /// let bitmap = UserfaultBitmap::new(Arc::<Vec<AtomicU64>>::clone(&words), PageSize::Size4K);
    /// let slot = region(MemoryRegionFlags::USERFAULT, 1 << 20);
    /// vm.set_user_memory_region(MemoryRegion { userfault_bitmap: Some(bitmap), ..slot })?;
    /// let mut vcpu = vm.create_vcpu()?;
    /// let fault = Exit::MemoryFault { flags: MemoryFaultFlags::USERFAULT, gpa: Gpa(0x3000), size: PAGE_SIZE };
    /// assert_eq!(vcpu.handle_fault(Gpa(0x3008), Access::Read)?, Outcome::Exit(fault));
    /// // Fill page 3, and then clear its bit with release.
    /// words[0].fetch_and(!(1 << 3), Ordering::Release);
    /// assert_eq!(vcpu.handle_fault(Gpa(0x3008), Access::Read)?, Outcome::Resume);
    /// // Take it back: set the bit first.
    /// words[0].fetch_or(1 << 3, Ordering::Release);
    /// assert_eq!(vm.rescan_userfault(0, 3, 1)?, 1);
    /// assert_eq!(vcpu.handle_fault(Gpa(0x3008), Access::Read)?, Outcome::Exit(fault));
    /// # Ok(())
    /// # }
    /// ```
    pub fn rescan_userfault(&self, slot: u32, first_page: u64, nr_pages: u64) -> Result<u64, SlotError> {
        let participant = self.tree.epochs.borrow_participant()?;
        let result = rescan::rescan(self.operation(&participant), slot, first_page, nr_pages);
        drop(participant);
        self.tree.reclaim();
        result
    }

    /// Checks whether user space may access the `size_bytes` bytes from `gpa` on itself, as the
    /// guest could: for a device that it emulates, or a copy that it makes.
    ///
    /// [`Outcome::Resume`]: it may. [`Outcome::Exit`] with [`Exit::MemoryFault`] names the first
    /// page that user space must not access yet: its contents have not arrived, or it is private.
    /// User space would read garbage, or write in vain.
    ///
    /// A thread that takes pages back must make sure that accesses after such a check are over.
    ///
    /// # Errors
    /// [`FaultError::NoMemslot`]: a page has no memslot. [`FaultError::BadSize`],
    /// [`FaultError::AddressTooHigh`], [`FaultError::UserfaultBitmapGone`],
    /// [`FaultError::OutOfMemory`].
    pub fn check_access(&self, gpa: Gpa, size_bytes: u64) -> Result<Outcome, FaultError> {
        if size_bytes == 0 {
            return Err(FaultError::BadSize { size_bytes });
        }
        let range = self.check_bytes(gpa, size_bytes)?;
        let participant = self.tree.epochs.borrow_participant()?;
        let checked = self.for_parts(&participant, range, PAGES_PER_TURN, |slot, part| {
            match check_part(slot, part).transpose() {
                None => Ok(()),
                Some(stop) => Err(stop),
            }
        });
        match checked {
            Ok(()) => Ok(Outcome::Resume),
            Err(stop) => stop.map(Outcome::Exit),
        }
    }

    /// Makes the `size_bytes` bytes from `gpa` on private to the guest, or shared. Both numbers are
    /// multiples of 4 KiB. The whole range is in memslots with
    /// [`MemoryRegionFlags::GUEST_MEMFD`](crate::MemoryRegionFlags::GUEST_MEMFD). A new memslot is
    /// shared. KVM's `KVM_SET_MEMORY_ATTRIBUTES`.
    ///
    /// When the call returns, no CPU uses the memory that a page had before. Its contents stay.
    ///
    /// Of concurrent calls for one page, one takes effect last. If a memslot of the range is
    /// deleted during the call, the attributes of its pages go with it; all other pages of the
    /// range get theirs.
    ///
    /// # Errors
    /// [`SlotError::UnalignedAddress`], [`SlotError::BadSize`], [`SlotError::AddressTooHigh`],
    /// [`SlotError::UnknownAttributes`], [`SlotError::NoGuestMemfd`], [`SlotError::OutOfMemory`].
    ///
    /// # Example
    /// ```
    /// # mod host { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/doc_host.rs")); }
    /// # use host::*;
    /// use slat::*;
    /// use slat::slots::*;
    /// # fn main() -> Result<(), Error> {
    /// let vm = vm_with_memory(Config::default(), MemoryRegionFlags::GUEST_MEMFD);
    /// // The guest asked for a private page. From now on `Host::resolve_private` resolves its faults there.
    /// vm.set_memory_attributes(Gpa(0x3000), PAGE_SIZE, MemoryAttributes::PRIVATE)?;
    /// assert_eq!(vm.create_vcpu()?.handle_fault(Gpa(0x3008), Access::Write)?, Outcome::Resume);
    /// // The VMM has no mapping of it.
    /// let fault = Exit::MemoryFault { flags: MemoryFaultFlags::PRIVATE, gpa: Gpa(0x3000), size: PAGE_SIZE };
    /// assert_eq!(vm.check_access(Gpa(0x2ff8), 16)?, Outcome::Exit(fault));
    /// assert_eq!(vm.check_access(Gpa(0x2ff0), 16)?, Outcome::Resume);
    /// # Ok(())
    /// # }
    /// ```
    pub fn set_memory_attributes(
        &self,
        gpa: Gpa,
        size_bytes: u64,
        attributes: MemoryAttributes,
    ) -> Result<(), SlotError> {
        if MemoryAttributes::from_bits(attributes.bits()).is_none() {
            return Err(SlotError::UnknownAttributes { attributes: attributes.bits() });
        }
        if !gpa.is_page_aligned() {
            return Err(SlotError::UnalignedAddress { gpa });
        }
        if size_bytes == 0 || size_bytes % PAGE_SIZE != 0 {
            return Err(SlotError::BadSize { size_bytes });
        }
        let range = self.check_bytes(gpa, size_bytes)?;
        // First check the whole range, so that a refused call changes nothing.
        let participant = self.tree.epochs.borrow_participant()?;
        self.for_parts(&participant, range, u64::MAX, |slot, part| {
            let has_private = slot.is_some_and(|slot| slot.private().is_some());
            if has_private { Ok(()) } else { Err(SlotError::NoGuestMemfd { gpa: part.start.gpa() }) }
        })?;
        let invalidation = Invalidation::new(&self.tree.in_flight, &self.operation(&participant), range)?;
        // A memslot that was deleted since then took its pages with it, and another may be in its
        // place. All other pages of the range get their attributes.
        let Ok(()) = self.for_parts::<Infallible>(&participant, range, PAGES_SET_PER_TURN, |slot, part| {
            if let Some((slot, private)) = slot.and_then(|slot| Some((slot, slot.private()?))) {
                let first = part.start.0 - slot.range().start.0;
                slot.visit(part.nr_pages() / u64::from(u64::BITS) + 2);
                private.set(GfnRange::new(Gfn(first), part.nr_pages()), attributes);
            }
            Ok(())
        });
        drop(invalidation);
        drop(participant);
        self.tree.reclaim();
        Ok(())
    }

    /// The attributes of the page at `gpa`.
    ///
    /// # Errors
    /// [`SlotError::NoMemslot`]: no memslot has the page. [`SlotError::AddressTooHigh`],
    /// [`SlotError::OutOfMemory`].
    pub fn memory_attributes(&self, gpa: Gpa) -> Result<MemoryAttributes, SlotError> {
        let gfn = self.check_gpa(gpa)?;
        let participant = self.tree.epochs.borrow_participant()?;
        let guard = self.tree.epochs.pin(&participant);
        let slot = self.slots.find(&guard, gfn).ok_or(SlotError::NoMemslot { gpa })?;
        Ok(slot.attributes_of(gfn))
    }

    /// The frames of the `size_bytes` bytes, at least one, from `gpa` on.
    fn check_bytes(&self, gpa: Gpa, size_bytes: u64) -> Result<GfnRange, AddressTooHigh> {
        let last = gpa.0.checked_add(size_bytes.saturating_sub(1)).ok_or_else(|| too_high(gpa, self.gpa_bits()))?;
        let range = GfnRange { start: gpa.gfn(), end: Gfn((last >> PAGE_SHIFT) + 1) };
        self.check_end(range)?;
        Ok(range)
    }

    /// Calls `step` for each part of `range` in order: the part that one memslot has, with at most
    /// `max_pages`, or a hole between memslots. Each call has its own guard and its own look-up of
    /// the memslot.
    fn for_parts<E>(
        &self,
        participant: &Participant,
        range: GfnRange,
        max_pages: u64,
        mut step: impl FnMut(Option<&SlotView<'_, H::Backing>>, GfnRange) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut next = range.start;
        while next < range.end {
            let guard = self.tree.epochs.pin(participant);
            let slot = self.slots.find_from(&guard, next);
            let (slot, end) = match slot.as_ref().map(SlotView::range) {
                Some(found) if found.contains(next) => {
                    (slot.as_ref(), found.end.min(Gfn(next.0.saturating_add(max_pages))))
                }
                Some(found) => (None, found.start),
                None => (None, range.end),
            };
            let end = end.min(range.end);
            step(slot, GfnRange { start: next, end })?;
            next = end;
        }
        Ok(())
    }
}

/// The exit for the first page of `part` that user space must not access yet, if `slot` has one.
fn check_part<B>(slot: Option<&SlotView<'_, B>>, part: GfnRange) -> Result<Option<Exit>, FaultError> {
    let slot = slot.ok_or(FaultError::NoMemslot { gpa: part.start.gpa() })?;
    if slot.is_plain() {
        return Ok(None);
    }
    for gfn in (part.start.0..part.end.0).map(Gfn) {
        slot.visit(1);
        if let Some(exit) = slot.userfault_exit(gfn)? {
            return Ok(Some(exit));
        }
        if slot.attributes_of(gfn).contains(MemoryAttributes::PRIVATE) {
            let flags = MemoryFaultFlags::PRIVATE;
            return Ok(Some(Exit::MemoryFault { flags, gpa: gfn.gpa(), size: PAGE_SIZE }));
        }
    }
    Ok(None)
}
