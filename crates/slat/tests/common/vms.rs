//! VMs and memslots of tests.

use std::sync::Arc;

use slat::baselines::Locking;
use slat::dirty::HugePageLogging;
use slat::format::Format;
use slat::{Config, Gpa, MemoryRegion, MemoryRegionFlags, PageSize, Vm};

use super::{TestBacking, TestHost};

pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

/// The configuration of most tests. Where the first write splits huge pages, each split is that of
/// one call.
pub fn lazily_splitting(locking: Locking) -> Config {
    Config::default().with_locking(locking).with_huge_page_logging(HugePageLogging::SplitLazily)
}

/// Of a deleted memslot of 512 GiB, or of some of these, only page-table pages are left that cover
/// more than that.
#[allow(dead_code, reason = "each test binary uses a part")]
pub fn assert_only_upper_tables_are_left<F: Format>(vm: &Vm<TestHost, F>) {
    let nr_upper = 1 + usize::from(F::ROOT_LEVEL.0.saturating_sub(4));
    assert_eq!((vm.stats().live_tables(), vm.host().live_tables()), (nr_upper as u64, nr_upper));
}

/// An empty VM.
pub fn vm<F: Format>(locking: Locking) -> Arc<Vm<TestHost, F>> {
    Arc::new(Vm::new(TestHost::default(), lazily_splitting(locking)).unwrap())
}

/// A region with a new backing whose frames begin at `first_pfn`.
pub fn region(
    slot: u32,
    gpa: u64,
    size_bytes: u64,
    first_pfn: u64,
    max_size: PageSize,
) -> MemoryRegion<Arc<TestBacking>> {
    MemoryRegion {
        slot,
        flags: MemoryRegionFlags::empty(),
        guest_phys_addr: Gpa(gpa),
        memory_size: size_bytes,
        backing: Some(Arc::new(TestBacking::new(first_pfn, size_bytes / 4096, max_size))),
        userfault_bitmap: None,
    }
}

/// A change of an existing memslot.
pub fn change(slot: u32, flags: MemoryRegionFlags, gpa: u64, size_bytes: u64) -> MemoryRegion<Arc<TestBacking>> {
    MemoryRegion {
        slot,
        flags,
        guest_phys_addr: Gpa(gpa),
        memory_size: size_bytes,
        backing: None,
        userfault_bitmap: None,
    }
}

/// Zaps everything in a VM without memslots that no other thread uses, and checks that the root is
/// the only page-table page. Page-table pages that a memslot covered only in part stay linked, so
/// memslots that cover the space are made and deleted.
pub fn assert_no_table_is_left<F: Format>(vm: &Vm<TestHost, F>) {
    let whole = 1 << F::GPA_BITS;
    vm.set_user_memory_region(region(0, 0, whole, 0, PageSize::Size4K)).unwrap();
    vm.set_user_memory_region(change(0, MemoryRegionFlags::empty(), 0, 0)).unwrap();
    vm.reclaim();
    assert_eq!((vm.stats().live_tables(), vm.host().live_tables()), (1, 1));
}
