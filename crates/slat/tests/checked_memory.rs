//! vm-memory's view of guest memory without missing pages: an access of a device is refused where a
//! vCPU would exit.
#![cfg(not(any(loom, shuttle)))]
#![allow(missing_docs)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::{MIB, region, vm};
use slat::baselines::Locking;
use slat::error::FaultError;
use slat::format::Npt;
use slat::slots::{MemoryAttributes, MemoryFaultFlags, UserfaultBitmap};
use slat::{CheckedMemory, Exit, Gpa, MemoryRegion, MemoryRegionFlags, PAGE_SIZE, PageSize};
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryError, GuestMemoryMmap, Permissions};

/// Why an access was refused: an exit, or the engine's error.
fn refused<T: std::fmt::Debug, E: std::error::Error + Copy + 'static>(result: Result<T, GuestMemoryError>) -> E {
    match result.unwrap_err() {
        GuestMemoryError::IOError(error) => *error.get_ref().unwrap().downcast_ref().unwrap(),
        error => panic!("refused in another way: {error}"),
    }
}

#[test]
fn pages_that_have_not_arrived_are_neither_read_nor_written() {
    let vm = vm::<Npt>(Locking::None);
    let words = Arc::new(vec![AtomicU64::new(0b110), AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0)]);
    let bitmap = UserfaultBitmap::new(Arc::<Vec<AtomicU64>>::clone(&words), PageSize::Size4K);
    let flags = MemoryRegionFlags::USERFAULT | MemoryRegionFlags::GUEST_MEMFD;
    let slot = region(0, MIB, MIB, 0x100, PageSize::Size4K);
    vm.set_user_memory_region(MemoryRegion { flags, userfault_bitmap: Some(bitmap), ..slot }).unwrap();
    let mapped: GuestMemoryMmap = GuestMemoryMmap::from_ranges(&[(GuestAddress(MIB), MIB as usize)]).unwrap();
    let memory = CheckedMemory::new(mapped, Arc::clone(&vm));
    let page = |page: u64| GuestAddress(MIB + page * PAGE_SIZE);
    let fault = |flags, page: u64| Exit::MemoryFault { flags, gpa: Gpa(MIB + page * PAGE_SIZE), size: PAGE_SIZE };
    let userfault = MemoryFaultFlags::USERFAULT;

    memory.write_slice(&[1; 8], page(0)).unwrap();
    assert_eq!(memory.read_obj::<u8>(page(0)).unwrap(), 1);
    assert_eq!(refused::<_, Exit>(memory.read_obj::<u8>(page(1))), fault(userfault, 1));
    // An access is refused as a whole: the part that could have been written is unchanged.
    let before = GuestAddress(page(1).0 - 4);
    assert_eq!(refused::<_, Exit>(memory.write_slice(&[7; 8], before)), fault(userfault, 1));
    assert_eq!(memory.read_obj::<u32>(before).unwrap(), 0);
    assert_eq!(refused::<_, Exit>(memory.read_slice(&mut [0; 3 * PAGE_SIZE as usize], page(0))), fault(userfault, 1));
    assert!(!memory.check_range(page(2), 1, Permissions::Read));
    assert!(memory.check_range(page(3), 1, Permissions::Read));
    assert!(memory.physical_memory().is_none(), "a way around the check");

    words[0].fetch_and(!0b10, Ordering::Release);
    memory.write_slice(&[7; 8], before).unwrap();
    assert_eq!(memory.read_obj::<u64>(before).unwrap(), u64::from_ne_bytes([7; 8]));
    vm.set_memory_attributes(Gpa(page(1).0), PAGE_SIZE, MemoryAttributes::PRIVATE).unwrap();
    assert_eq!(refused::<_, Exit>(memory.read_obj::<u8>(page(1))), fault(MemoryFaultFlags::PRIVATE, 1));
    assert_eq!(refused::<_, Exit>(memory.read_obj::<u8>(page(2))), fault(userfault, 2));
    let no_slot: FaultError = refused(memory.read_obj::<u8>(GuestAddress(0)));
    assert_eq!(no_slot, FaultError::NoMemslot { gpa: Gpa(0) });
    memory.write_slice(&[], page(2)).unwrap();
}
