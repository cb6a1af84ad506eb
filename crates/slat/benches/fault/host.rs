//! The engine's host in the fault benches: memory exists already, so that resolving a page is a
//! mere addition.

use std::sync::Arc;

use slat::baselines::Locking;
use slat::format::Format;
use slat::host::Resolved;
use slat::{Access, Config, Gfn, Gpa, MemoryRegion, MemoryRegionFlags, Outcome, PageSize, Pfn, Vcpu, Vm};

use super::arena::{FRAME_BYTES, Memory};
use super::bench_host::{Answer, BenchHost};

/// The frame of the memslot's first page, which the others follow, and the size of the pages.
pub(crate) struct FirstFrame(pub(crate) u64, pub(crate) PageSize);

impl Answer for FirstFrame {
    #[inline]
    fn resolved(&self, _gfn: Gfn, page: u64) -> Resolved {
        Resolved::memory(Pfn(self.0 + page), self.1)
    }
}

/// The host of these benches.
pub(crate) type FaultHost = BenchHost<FirstFrame>;

/// Frame of the memslot's first page.
const FIRST_FRAME: u64 = 1 << 24;

/// A VM with one memslot of `nr_pages` from address 0 on, nothing of it mapped.
pub(crate) fn new_vm<F: Format>(memory: Memory, locking: Locking, nr_pages: u64) -> Arc<Vm<FaultHost, F>> {
    let vm = Vm::new(BenchHost::new(memory), Config::default().with_locking(locking)).unwrap();
    set_slot(&vm, nr_pages, MemoryRegionFlags::empty(), Some(FirstFrame(FIRST_FRAME, PageSize::Size4K)));
    Arc::new(vm)
}

/// Turns dirty logging on, which write-protects all leaves.
pub(crate) fn log_dirty_pages<F: Format>(vm: &Vm<FaultHost, F>, nr_pages: u64) {
    set_slot(vm, nr_pages, MemoryRegionFlags::LOG_DIRTY_PAGES, None);
}

fn set_slot<F: Format>(vm: &Vm<FaultHost, F>, nr_pages: u64, flags: MemoryRegionFlags, backing: Option<FirstFrame>) {
    let memory_size = nr_pages * FRAME_BYTES as u64;
    let region = MemoryRegion { slot: 0, flags, guest_phys_addr: Gpa(0), memory_size, backing, userfault_bitmap: None };
    vm.set_user_memory_region(region).unwrap();
}

/// Writes to page number `page`, where the page tables do not allow it.
#[inline]
pub(crate) fn write_fault<F: Format>(vcpu: &mut Vcpu<FaultHost, F>, page: u64) {
    let outcome = vcpu.handle_fault(Gfn(page).gpa(), Access::Write);
    assert_eq!(outcome, Ok(Outcome::Resume));
}
