//! The measured VMs, and the vCPU that works until it is stopped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use slat::baselines::Locking;
use slat::format::Npt;
use slat::tables::Invalidation;
use slat::{Gfn, GfnRange, Gpa, MemoryRegion, MemoryRegionFlags, PageSize, Vm};

use super::arena::{FRAME_BYTES, Memory};
use super::host::{self, FaultHost, FirstFrame};

pub(crate) type BenchVm = Vm<FaultHost, Npt>;

/// Pages in 1 GiB.
pub(crate) const GIB: u64 = 1 << 18;
/// The vCPUs' memory, in pages: its start and its length. The work beside them is done elsewhere.
pub(crate) const VCPU_MEMORY: u64 = 16 * GIB;
pub(crate) const VCPU_MEMORY_PAGES: u64 = 4 * GIB;
/// First host frame of memslots that are created here.
const FIRST_FRAME: u64 = 1 << 28;

/// A VM with memslot 0 of `nr_pages` from address 0 on, and the vCPUs' memory, in memslot 0 if it
/// reaches there, else in memslot 1.
pub(crate) fn new_vm(memory: Memory, locking: Locking, nr_pages: u64) -> Arc<BenchVm> {
    let vm = host::new_vm(memory, locking, nr_pages);
    if nr_pages <= VCPU_MEMORY {
        set_slot(
            &vm,
            1,
            VCPU_MEMORY,
            VCPU_MEMORY_PAGES,
            MemoryRegionFlags::empty(),
            Some(FirstFrame(FIRST_FRAME, PageSize::Size4K)),
        );
    }
    vm
}

pub(crate) fn set_slot(
    vm: &BenchVm,
    slot: u32,
    first: u64,
    nr_pages: u64,
    flags: MemoryRegionFlags,
    backing: Option<FirstFrame>,
) {
    let memory_size = nr_pages * FRAME_BYTES as u64;
    let region = MemoryRegion {
        slot,
        flags,
        guest_phys_addr: Gpa(first * FRAME_BYTES as u64),
        memory_size,
        backing,
        userfault_bitmap: None,
    };
    vm.set_user_memory_region(region).unwrap();
}

/// Turns dirty logging of memslot 0 off, which has `nr_pages`.
pub(crate) fn stop_logging(vm: &BenchVm, nr_pages: u64) {
    set_slot(vm, 0, 0, nr_pages, MemoryRegionFlags::empty(), None);
}

/// Deletes memslot 0 and creates it with `flags`, as KVM requires for a change between writable and
/// read-only.
pub(crate) fn recreate(vm: &BenchVm, nr_pages: u64, flags: MemoryRegionFlags) {
    set_slot(vm, 0, 0, 0, MemoryRegionFlags::empty(), None);
    set_slot(vm, 0, 0, nr_pages, flags, Some(FirstFrame(FIRST_FRAME, PageSize::Size4K)));
}

pub(crate) fn invalidate(vm: &BenchVm, first: u64, nr_pages: u64) -> Invalidation<'_> {
    vm.invalidate_range(GfnRange::new(Gfn(first), nr_pages)).unwrap()
}

/// A vCPU that writes to its pages one after the other, invalidates them all, and starts over.
/// Returns the number of faults.
pub(crate) fn fault_until(stop: &AtomicBool, vm: &Arc<BenchVm>, first: u64, nr_pages: u64) -> u64 {
    let mut vcpu = vm.create_vcpu().unwrap();
    let mut nr_faults = 0;
    while !stop.load(Ordering::Relaxed) {
        for page in first..first + nr_pages {
            host::write_fault(&mut vcpu, page);
        }
        nr_faults += nr_pages;
        drop(invalidate(vm, first, nr_pages));
    }
    nr_faults
}
