//! The memory that is split and recovered: one memslot from address 0 on, mapped before anything is
//! measured.

use std::sync::Arc;

use slat::format::Npt;
use slat::host::Resolved;
use slat::{Access, Config, Gfn, GfnRange, Gpa, Host, MemoryRegion, MemoryRegionFlags, PAGE_SIZE, PageSize, Pfn, Vm};

use super::bench_host::{Answer, BenchHost};

/// Pages in 2 MiB, and in 1 GiB.
pub(crate) const BLOCK: u64 = 512;
pub(crate) const GIB: u64 = 1 << 18;
/// Frame of guest page 0: leaves of 1 GiB fit.
const FIRST_FRAME: u64 = 1 << 24;

/// The sizes in which pages may be mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Backing {
    /// All by leaves of this size.
    Whole(PageSize),
    /// Every second block by a leaf of 2 MiB, those between by leaves of 4 KiB.
    EveryOtherBlock,
}

impl Answer for Backing {
    #[inline]
    fn resolved(&self, gfn: Gfn, _page: u64) -> Resolved {
        let max_size = match *self {
            Backing::Whole(size) => size,
            Backing::EveryOtherBlock if (gfn.0 / BLOCK).is_multiple_of(2) => PageSize::Size2M,
            Backing::EveryOtherBlock => PageSize::Size4K,
        };
        Resolved::memory(Pfn(FIRST_FRAME + gfn.0), max_size)
    }
}

pub(crate) type BenchVm = Vm<BenchHost<Backing>, Npt>;

pub(crate) fn range(first: u64, nr_pages: u64) -> GfnRange {
    GfnRange::new(Gfn(first), nr_pages)
}

/// A VM with a memslot of `nr_pages`, nothing of it mapped.
pub(crate) fn new_vm<H: Host<Backing = Backing>>(
    host: H,
    config: Config,
    nr_pages: u64,
    backing: Backing,
) -> Arc<Vm<H, Npt>> {
    let vm = Arc::new(Vm::new(host, config).unwrap());
    set_slot(&vm, nr_pages, MemoryRegionFlags::empty(), Some(backing));
    vm
}

pub(crate) fn set_slot<H: Host<Backing = Backing>>(
    vm: &Vm<H, Npt>,
    nr_pages: u64,
    flags: MemoryRegionFlags,
    backing: Option<Backing>,
) {
    let memory_size = nr_pages * PAGE_SIZE;
    vm.set_user_memory_region(MemoryRegion {
        slot: 0,
        flags,
        guest_phys_addr: Gpa(0),
        memory_size,
        backing,
        userfault_bitmap: None,
    })
    .unwrap();
}

/// Maps `nr_pages` by huge leaves, writable, where nothing is mapped; of
/// [`Backing::EveryOtherBlock`] only those blocks.
pub(crate) fn map_huge<H: Host<Backing = Backing>>(vm: &Arc<Vm<H, Npt>>, nr_pages: u64, backing: Backing) {
    let mut vcpu = vm.create_vcpu().unwrap();
    let (step, at_once) = match backing {
        Backing::Whole(_) => (nr_pages, nr_pages),
        Backing::EveryOtherBlock => (2 * BLOCK, BLOCK),
    };
    for first in (0..nr_pages).step_by(step as usize) {
        let size_bytes = at_once * PAGE_SIZE;
        assert_eq!(vcpu.pre_fault_memory(Gfn(first).gpa(), size_bytes, Access::Write), Ok(size_bytes));
    }
}
