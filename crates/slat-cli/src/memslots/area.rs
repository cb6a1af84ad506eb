//! The memory of the tests: an area split evenly into memslots, the host's operations on it, and
//! the vCPU.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use slat::baselines::Locking;
use slat::{Config, Gfn, GfnRange, Gpa, MemoryRegion, MemoryRegionFlags, Vcpu, Vm};
use slat_machine::hardware::commit::{FlushDomain, Port};
use slat_machine::hardware::cpu::Cpu;
use slat_machine::hardware::tlb::Geometry;
use slat_machine::hardware::walk::HardwareFormat;
use slat_machine::memory::{Backing, BackingKind};
use slat_machine::vm::host::{BackingSlice, MachineHost};
use slat_machine::vm::machine::{MachineError, REGION_GPA};

use crate::failure::Failure;

/// Pages of the area: 512 MiB, and 64 KiB so that its end is aligned to no large page.
pub(super) const AREA_PAGES: u64 = ((512 << 20) + (64 << 10)) >> Gfn::SHIFT;

/// Memslots that the area can have: all but memslot 0, which a VMM uses for the guest's program.
pub(super) const MAX_AREA_SLOTS: u32 = MemoryRegion::MAX_SLOTS - 1;

/// Page-table pages that the VM may have at a time: many times what maps the area.
const MAX_TABLES: u64 = 1 << 16;

pub(super) type AreaCpu<F> = Cpu<Vcpu<MachineHost, F>, F>;

/// Guest-physical address of page number `page` of the area, while all memslots are in their
/// places.
pub(super) fn gpa(page: u64) -> Gpa {
    Gpa(REGION_GPA.0 + (page << Gfn::SHIFT))
}

/// A slot of the area.
#[derive(Clone, Debug)]
pub(super) struct AreaSlot {
    pub(super) id: u32,
    /// Its pages, counted from the area's start.
    pub(super) pages: Range<u64>,
}

pub(super) struct Area<F: HardwareFormat> {
    pub(super) vm: Arc<Vm<MachineHost, F>>,
    /// The area's memory in the host: page n begins at n times the page size.
    pub(super) backing: Backing,
    pub(super) flush_domain: Arc<FlushDomain>,
    nr_slots: u32,
}

impl<F: HardwareFormat> Area<F> {
    /// Makes the area with `nr_slots` memslots (1 to [`MAX_AREA_SLOTS`]). Returns the time that it
    /// took to set them all, too.
    pub(super) fn new(nr_slots: u32, locking: Locking) -> Result<(Area<F>, Duration), Failure> {
        let flush_domain = Arc::new(FlushDomain::new());
        let host = MachineHost::new(Arc::clone(&flush_domain), MAX_TABLES).map_err(MachineError::from)?;
        let host = host.with_instructions_of::<F>();
        let vm = Arc::new(Vm::new(host, Config::default().with_locking(locking))?);
        let backing = Backing::new(BackingKind::Anonymous, AREA_PAGES << Gfn::SHIFT).map_err(MachineError::from)?;
        let area = Area { vm, backing, flush_domain, nr_slots };
        let begin = Instant::now();
        for index in 0..nr_slots {
            area.set_slot(&area.slot(index), 0, Some(&area.backing))?;
        }
        Ok((area, begin.elapsed()))
    }

    /// Memslot number `index` of the area: an equal part, and the last one has the rest too.
    fn slot(&self, index: u32) -> AreaSlot {
        let pages_per_slot = AREA_PAGES / u64::from(self.nr_slots);
        let first = u64::from(index) * pages_per_slot;
        let end = if index + 1 == self.nr_slots { AREA_PAGES } else { first + pages_per_slot };
        AreaSlot { id: index + 1, pages: first..end }
    }

    /// The slot at the area's end.
    pub(super) fn last_slot(&self) -> AreaSlot {
        self.slot(self.nr_slots - 1)
    }

    fn set_slot(
        &self,
        slot: &AreaSlot,
        up_pages: u64,
        backing: Option<&Backing>,
    ) -> Result<(), slat::error::SlotError> {
        let offset_bytes = slot.pages.start << Gfn::SHIFT;
        self.vm.set_user_memory_region(MemoryRegion {
            slot: slot.id,
            flags: MemoryRegionFlags::empty(),
            guest_phys_addr: gpa(slot.pages.start + up_pages),
            memory_size: (slot.pages.end - slot.pages.start) << Gfn::SHIFT,
            backing: backing.map(|backing| BackingSlice { backing: backing.clone(), offset_bytes }),
            userfault_bitmap: None,
        })
    }

    /// Moves the memslot to `up_pages` above its place.
    pub(super) fn move_slot(&self, slot: &AreaSlot, up_pages: u64) -> Result<(), Failure> {
        Ok(self.set_slot(slot, up_pages, None)?)
    }

    /// Invalidates `pages` of the area, and discards them in the kernel meanwhile.
    pub(super) fn discard(&self, pages: &Range<u64>) -> Result<(), Failure> {
        let nr_pages = pages.end - pages.start;
        let invalidation = self.vm.invalidate_range(GfnRange::new(gpa(pages.start).gfn(), nr_pages))?;
        let result = self.backing.discard(pages.start << Gfn::SHIFT, nr_pages << Gfn::SHIFT);
        drop(invalidation);
        result.map_err(|error| Failure::CannotServe(format!("{error}; please report this with the command line")))
    }

    /// A vCPU of the area's VM.
    pub(super) fn create_cpu(&self) -> Result<AreaCpu<F>, Failure> {
        let port = Port::new(&self.flush_domain);
        Ok(Cpu::new(self.vm.create_vcpu()?, port, 1, self.vm.root(), Geometry::default()))
    }
}
