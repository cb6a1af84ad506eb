use std::sync::Arc;
use std::sync::atomic::Ordering::Release;

use slat::error::SlotError;
use slat::format::Npt;
use slat::shadow::Gva;
use slat::slots::{MemoryAttributes, MemoryFaultFlags, UserfaultBitmap, UserfaultWords};
use slat::{Config, Exit, Gpa, MemoryRegion, MemoryRegionFlags, Outcome, Vm};

use super::*;
use crate::hardware::commit::{FlushDomain, Port};
use crate::hardware::cpu::Cpu;
use crate::hardware::tlb::Geometry;
use crate::vm::host::{BackingSlice, MachineHost};

const SLOT: u32 = 3;
const START: Gpa = Gpa(0x10_0000);
const NR_PAGES: u64 = 8;

fn page_of(byte: u8) -> [u8; PAGE_SIZE as usize] {
    [byte; PAGE_SIZE as usize]
}

#[test]
fn the_user_has_no_mapping() {
    let memory = Arc::new(GuestMemfd::new(4 * PAGE_SIZE, None).unwrap());
    println!("origin: {:?}", memory.origin());
    memory.install(2, &page_of(7)).unwrap();
    assert_eq!((memory.word(2, 511), memory.word(3, 0)), (Some(0x0707_0707_0707_0707), Some(0)));
    assert_eq!((memory.word(4, 0), memory.word(0, 512)), (None, None));
    assert_eq!(memory.install(4, &page_of(7)), Err(NoSuchPage { page: 4, nr_pages: 4 }));
    let backing = Backing::of_guest_memfd(memory);
    assert!(backing.as_ptr().is_null());
    assert_eq!((backing.peek(2), backing.load(8), backing.store(8, 1)), (None, None, None));
    assert!(backing.discard(0, PAGE_SIZE).is_err());
    // Private pages have frames, others have not: there is no shared part.
    assert!(backing.resolve_private(2 * PAGE_SIZE, Access::Read).is_ok());
    assert!(backing.resolve_private(4 * PAGE_SIZE, Access::Read).is_err());
    assert!(backing.resolve(0, Access::Read, &|_| Ok(())).is_err());
}

#[test]
fn the_shared_part_has_the_same_size() {
    let shared = Backing::new(BackingKind::Anonymous, 2 * PAGE_SIZE).unwrap();
    let memory = GuestMemfd::new(4 * PAGE_SIZE, Some(shared.clone()));
    assert!(matches!(memory, Err(MemoryError::SharedPartSize { shared_bytes: 8192, .. })));
    assert!(matches!(GuestMemfd::new(100, None), Err(MemoryError::UnalignedSize { .. })));
    assert!(matches!(GuestMemfd::new(0, None), Err(MemoryError::ZeroSize)));
    let memory = GuestMemfd::new(2 * PAGE_SIZE, Some(shared)).unwrap();
    assert!(memory.shared().is_some());
}

fn region(flags: MemoryRegionFlags, backing: Option<BackingSlice>) -> MemoryRegion<BackingSlice> {
    let memory_size = NR_PAGES * PAGE_SIZE;
    MemoryRegion { slot: SLOT, flags, guest_phys_addr: START, memory_size, backing, userfault_bitmap: None }
}

fn at(page: u64) -> Gpa {
    Gpa(START.0 + page * PAGE_SIZE)
}

/// KVM's guest_memfd cases. A private page comes from the guest_memfd and a shared one from the
/// memslot's other memory, whatever the other of the two has. The VMM may use only shared pages.
/// The userfault flag may be turned on and off.
#[test]
fn private_and_shared_pages_are_two_memories() {
    let size_bytes = NR_PAGES * PAGE_SIZE;
    let shared = Backing::new(BackingKind::Anonymous, size_bytes).unwrap();
    let private = Arc::new(GuestMemfd::new(size_bytes, Some(shared.clone())).unwrap());
    let host = MachineHost::new(Arc::new(FlushDomain::new()), 1024).unwrap();
    let vm = Arc::new(Vm::<MachineHost, Npt>::new(host, Config::default()).unwrap());
    let flags = MemoryRegionFlags::GUEST_MEMFD;
    let backing = BackingSlice { backing: Backing::of_guest_memfd(Arc::clone(&private)), offset_bytes: 0 };
    vm.set_user_memory_region(region(flags, Some(backing))).unwrap();
    let port = Port::new(vm.host().flush_domain());
    let mut cpu = Cpu::<_, Npt>::new(vm.create_vcpu().unwrap(), port, 1, vm.root(), Geometry::default());
    let gva = |page| Gva(at(page).0);
    let fault = |flags, page| Ok(Outcome::Exit(Exit::MemoryFault { flags, gpa: at(page), size: PAGE_SIZE }));
    cpu.write(gva(2), 20).unwrap();
    assert_eq!((shared.load(2 * PAGE_SIZE), private.word(2, 0)), (Some(20), Some(0)));

    vm.set_memory_attributes(at(2), 2 * PAGE_SIZE, MemoryAttributes::PRIVATE).unwrap();
    assert_eq!(cpu.read(gva(2)), Ok(0), "the guest's own memory is another");
    cpu.write(gva(2), 22).unwrap();
    private.install(3, &page_of(3)).unwrap();
    assert_eq!(cpu.read(gva(3)), Ok(0x0303_0303_0303_0303));
    assert_eq!((shared.load(2 * PAGE_SIZE), private.word(2, 0)), (Some(20), Some(22)));
    assert_eq!(vm.check_access(at(2), 8), fault(MemoryFaultFlags::PRIVATE, 2));

    vm.set_memory_attributes(at(2), PAGE_SIZE, MemoryAttributes::empty()).unwrap();
    assert_eq!(cpu.read(gva(2)), Ok(20), "it is still there");
    assert_eq!(vm.check_access(at(2), 8), Ok(Outcome::Resume));
    vm.set_memory_attributes(at(2), PAGE_SIZE, MemoryAttributes::PRIVATE).unwrap();
    assert_eq!(cpu.read(gva(2)), Ok(22));

    // Userfault may be turned on and off, with logging or without; no other flag may change.
    let bits = Arc::new(vec![slat::baselines::AtomicU64::new(0)]);
    for logs in [MemoryRegionFlags::empty(), MemoryRegionFlags::LOG_DIRTY_PAGES] {
        bits[0].store(0b1100, Release);
        let words: Arc<dyn UserfaultWords> = bits.clone();
        let bitmap = Some(UserfaultBitmap::new(words, PageSize::Size4K));
        let on = region(flags | logs | MemoryRegionFlags::USERFAULT, None);
        vm.set_user_memory_region(MemoryRegion { userfault_bitmap: bitmap, ..on }).unwrap();
        for page in [2, 3] {
            let flags = MemoryFaultFlags::PRIVATE | MemoryFaultFlags::USERFAULT;
            let exit = Exit::MemoryFault { flags, gpa: at(page), size: PAGE_SIZE };
            assert_eq!(cpu.handler().handle_fault(at(page), Access::Read), Ok(Outcome::Exit(exit)));
        }
        private.install(3, &page_of(logs.bits() as u8)).unwrap();
        bits[0].fetch_and(!0b1000, Release);
        assert_eq!(cpu.read(gva(3)), Ok(u64::from(logs.bits()) * 0x0101_0101_0101_0101));
        vm.set_user_memory_region(region(flags | logs, None)).unwrap();
        assert_eq!(cpu.read(gva(2)), Ok(22));
    }
    let moved = MemoryRegion { guest_phys_addr: Gpa(START.0 * 2), ..region(flags, None) };
    assert!(matches!(vm.set_user_memory_region(moved), Err(SlotError::GuestMemfdFixed { .. })));
    assert!(vm.set_user_memory_region(region(flags | MemoryRegionFlags::READONLY, None)).is_err());
}
