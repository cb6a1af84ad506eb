//! The other modes of paging: five levels, physical address extension, 32 bits; two modes over the
//! same page tables; and what vCPUs share.

use super::*;

const STRATEGIES: [ShadowStrategy; 4] =
    [ShadowStrategy::Baseline, ShadowStrategy::RootCache, ShadowStrategy::RootsByPcid, ShadowStrategy::PcidTagged];

#[test]
fn five_levels() {
    let vm = vm();
    let mut cpu = Cpu::new(&vm);
    let va = 0x00ab_1234_5678_9000;
    map(&vm, ROOT, 5, va, DATA, P | W | U);
    cpu.set_registers(PagingRegisters { cr4: PAE | LA57, ..LONG });
    assert_eq!(cpu.vcpu().entry().unwrap().levels, 5);
    assert_eq!(cpu.page_at(va), Ok(DATA));
    cpu.store(va, 1).unwrap();
    assert_eq!(vm.host().load(ROOT + 4, index(va, 1)) & (A | D), A | D);
    assert_eq!(cpu.vcpu().handle_page_fault(Gva(1 << 56), READ), GENERAL_PROTECTION);
    // With four levels, after paging was off.
    cpu.set_registers(PagingRegisters::default());
    assert_eq!(cpu.page_at(DATA << 12), Ok(DATA));
    cpu.set_registers(PagingRegisters { cr3: (ROOT + 1) << 12, ..LONG });
    assert_eq!(cpu.page_at(va & ((1 << 47) - 1)), Ok(DATA));
}

#[test]
fn physical_address_extension() {
    let vm = vm();
    let mut cpu = Cpu::new(&vm);
    // Two tables of page-directory pointers in one page, neither at its beginning.
    for (nth, offset) in [(0, 0x20), (1, 0xfe0)] {
        let tables = ROOT + 1 + 2 * nth;
        vm.host().store(ROOT, offset / 8 + 3 - (nth * 2), tables << 12 | P);
        vm.host().store(tables, 3, (tables + 1) << 12 | P | W | U);
        vm.host().store(tables + 1, 7, (DATA + nth) << 12 | P | W | U);
    }
    let registers = PagingRegisters { cr0: PG | WP, cr3: ROOT << 12 | 0x20, cr4: PAE, efer: NXE };
    cpu.set_registers(registers);
    let vas = [3 << 30 | 3 << 21 | 7 << 12, 1 << 30 | 3 << 21 | 7 << 12];
    assert_eq!(cpu.page_at(vas[0]), Ok(DATA));
    assert!(matches!(cpu.page_at(vas[1]), Err(Exit::PageFault { error_code: 0, .. })));
    cpu.load_cr3(ROOT << 12 | 0xfe0);
    assert_eq!(cpu.page_at(vas[1]), Ok(DATA + 1));
    assert!(matches!(cpu.page_at(vas[0]), Err(Exit::PageFault { error_code: 0, .. })));
    cpu.store(vas[1], 3).unwrap();
    assert_eq!(vm.host().load(ROOT + 4, 7) & (A | D), A | D);
    assert_eq!(vm.host().load(ROOT, (0xfe0 / 8) + 1) & (A | W), 0, "there are none in these entries");
    // A write to one table of the page does not affect the other.
    assert_eq!(cpu.vcpu().write_guest_table(Gpa((ROOT << 12) + 0x38), &[0; 8]), RESUMED);
    assert_eq!(cpu.page_at(vas[1]), Ok(DATA + 1));
    cpu.load_cr3(ROOT << 12 | 0x20);
    assert!(matches!(cpu.page_at(vas[0]), Err(Exit::PageFault { error_code: 0, .. })));
}

#[test]
fn two_levels_of_32_bits() {
    let vm = vm();
    let mut cpu = Cpu::new(&vm);
    for (nth, va) in (0..).zip([0x0040_1000_u64, 0x7fe0_2000, 0xc060_3000]) {
        store_32(&vm, ROOT, va >> 22, (ROOT + 1 + nth) << 12 | P | W | U);
        store_32(&vm, ROOT + 1 + nth, va >> 12 & 1023, (DATA + nth) << 12 | P | W | U);
    }
    // 4 MiB from page 0 on.
    store_32(&vm, ROOT, 0x200, P | W | U | LARGE);
    cpu.set_registers(PagingRegisters { cr0: PG | WP, cr3: ROOT << 12, cr4: PSE, efer: 0 });
    for (nth, va) in (0..).zip([0x0040_1000, 0x7fe0_2000, 0xc060_3000]) {
        assert_eq!(cpu.page_at(va), Ok(DATA + nth));
    }
    for page in [1, 511, 512, 1000] {
        assert_eq!(cpu.page_at(0x8000_0000 + page * 4096), Ok(page));
        cpu.store(0x8000_0000 + 0x200 * 4096 + 8 * (page % 500), page).unwrap();
    }
    assert_eq!(vm.host().load(ROOT, 0x100) & (A | D), A | D);
    assert_eq!(
        cpu.page_at(0x8000_0000 + NR_PAGES * 4096),
        Err(Exit::PageFault { gva: Gva(0x8040_0000), error_code: 0 })
    );
    // Without PSE it points to a page table.
    cpu.set_registers(PagingRegisters { cr0: PG | WP, cr3: ROOT << 12, cr4: 0, efer: 0 });
    assert!(matches!(cpu.page_at(0x8000_1000), Err(Exit::PageFault { error_code: 0, .. })));
    assert_eq!(cpu.page_at(0x0040_1000), Ok(DATA));
}

#[test]
fn two_modes_over_the_same_tables() {
    for strategy in STRATEGIES {
        let vm = new_vm(Config::default(), paging(strategy), NR_PAGES, 8, MemoryRegionFlags::empty());
        let mut long = guest(&vm);
        let lowest = ROOT + 3;
        // For the other mode, `lowest` is the lowest page table and the page directory.
        let mut pae = Cpu::new(&vm);
        let at = index(VA, 1);
        vm.host().store(0x30, 0, 0x31 << 12 | P);
        vm.host().store(0x30, 1, lowest << 12 | P);
        vm.host().store(0x31, 0, lowest << 12 | P | W | U);
        vm.host().store(DATA, 0, (DATA + 5) << 12 | P | W);
        // It maps `lowest` itself.
        vm.host().store(lowest, at + 1, lowest << 12 | P | W);
        pae.set_registers(PagingRegisters { cr0: PG | WP, cr3: 0x30 << 12, cr4: PAE, efer: NXE });
        let (as_lowest, as_directory) = (at << 12, 1 << 30 | at << 21);
        assert_eq!(pae.page_at(as_lowest), Ok(DATA));
        assert_eq!(pae.page_at(as_directory), Ok(DATA + 5), "{strategy:?}");
        // One vCPU writes, the other flushes.
        for (page, in_page) in [(DATA + 1, DATA + 6), (DATA, DATA + 5)] {
            vm.host().store(page, 0, in_page << 12 | P | W);
            pae.store(((at + 1) << 12) + at * 8, page << 12 | P | W | U).unwrap();
            pae.invlpg(as_lowest);
            pae.invlpg(as_directory);
            assert_eq!((pae.page_at(as_lowest), pae.page_at(as_directory)), (Ok(page), Ok(in_page)), "{strategy:?}");
            long.invlpg(VA);
            assert_eq!(long.page_at(VA), Ok(page), "{strategy:?}");
        }
    }
}

/// Intel SDM vol. 3A, 4.4.1.
#[test]
fn a_load_of_bad_pdptes_is_a_general_protection_fault() {
    for strategy in STRATEGIES {
        let vm = new_vm(Config::default(), paging(strategy), NR_PAGES, 8, MemoryRegionFlags::empty());
        let mut cpu = Cpu::new(&vm);
        vm.host().store(ROOT, 0, (ROOT + 1) << 12 | P);
        vm.host().store(ROOT + 1, 0, (ROOT + 2) << 12 | P | W | U);
        vm.host().store(ROOT + 2, 7, DATA << 12 | P | W | U);
        // A reserved bit is ignored in a PDPTE that is not present, and an error in one that is
        // present.
        let (good, unused, bad) = (ROOT << 12, ROOT << 12 | 0x20, ROOT << 12 | 0x40);
        vm.host().store(ROOT, 4 + 1, (ROOT + 1) << 12 | W | U | A);
        vm.host().store(ROOT, 8 + 2, (ROOT + 1) << 12 | P | A);
        let pae = PagingRegisters { cr0: PG | WP, cr3: good, cr4: PAE, efer: NXE };
        let va = 7 << 12;
        cpu.set_registers(pae);
        assert_eq!(cpu.page_at(va), Ok(DATA));
        assert_eq!(cpu.vcpu().load_cr3(bad), GENERAL_PROTECTION, "{strategy:?}");
        assert_eq!(cpu.vcpu().paging_registers(), Ok(pae), "nothing has changed");
        assert_eq!(cpu.page_at(va), Ok(DATA));
        assert_eq!(cpu.vcpu().load_cr3(unused), RESUMED);
        assert_eq!(cpu.vcpu().write_paging_register(PagingRegister::Cr3, good), RESUMED);
        assert_eq!(cpu.page_at(va), Ok(DATA));
        // Some changes of CR0 and CR4 load them, too.
        vm.host().store(ROOT, 3, (ROOT + 1) << 12 | P | W);
        assert_eq!(cpu.vcpu().write_paging_register(PagingRegister::Cr4, PAE | PGE), GENERAL_PROTECTION);
        assert_eq!(cpu.vcpu().paging_registers(), Ok(pae), "nothing has changed");
        cpu.write_register(PagingRegister::Cr0, PG);
        cpu.write_register(PagingRegister::Efer, 0);
        assert_eq!(cpu.page_at(va), Ok(DATA), "{strategy:?}: no other does");
        vm.host().store(ROOT, 3, 0);
        cpu.write_register(PagingRegister::Cr4, PAE | PGE);
        // Without paging nothing is checked until paging is turned on.
        cpu.write_register(PagingRegister::Cr0, 1);
        cpu.load_cr3(bad);
        assert_eq!(cpu.vcpu().write_paging_register(PagingRegister::Cr0, PG), GENERAL_PROTECTION);
        cpu.load_cr3(good);
        cpu.write_register(PagingRegister::Cr0, PG);
        assert_eq!(cpu.page_at(va), Ok(DATA));
        // Where there is no memory nothing is checked; a walk reports it.
        let hole = (NR_PAGES + 3) << 12;
        cpu.load_cr3(hole);
        assert_eq!(cpu.page_at(va), Err(Exit::TableMmio { gva: Gva(va), gpa: Gpa(hole) }));
        vm.host().has_no_pointers.store(true, Ordering::Relaxed);
        assert_eq!(cpu.vcpu().load_cr3(good), Err(FaultError::NoGuestMemory { gpa: Gpa(good) }));
        vm.host().has_no_pointers.store(false, Ordering::Relaxed);
        // A saved state may be restored before its memory exists: an error is found at the first
        // use.
        cpu.set_registers(PagingRegisters { cr3: bad, ..pae });
        let va = 2 << 30;
        assert_eq!(cpu.page_at(va), Err(Exit::PageFault { gva: Gva(va), error_code: 0b1001 }));
    }
}

/// A page that is not resident when PDPTEs are loaded.
#[test]
fn a_load_of_pdptes_exits_for_their_page() {
    let vm = vm();
    let mut cpu = Cpu::new(&vm);
    let words = Arc::new(vec![AtomicU64::new(1)]);
    let bitmap = UserfaultBitmap::new(Arc::<Vec<AtomicU64>>::clone(&words), PageSize::Size4K);
    let slot =
        slat::MemoryRegion { userfault_bitmap: Some(bitmap), ..second_slot(MemoryRegionFlags::USERFAULT, ROOT, 8) };
    vm.set_user_memory_region(slot).unwrap();
    let registers = PagingRegisters { cr0: PG | WP, cr3: ROOT << 12, cr4: PAE, efer: NXE };
    cpu.set_registers(registers);
    let exit = cpu.vcpu().load_cr3(NR_PAGES << 12);
    assert!(matches!(exit, Ok(Outcome::Exit(Exit::MemoryFault { gpa, .. })) if gpa.0 == NR_PAGES << 12), "{exit:?}");
    assert_eq!(cpu.vcpu().paging_registers(), Ok(registers), "nothing has changed");
    words[0].store(0, Ordering::Release);
    cpu.load_cr3(NR_PAGES << 12);
}

/// In PAE's PDPTEs the bits of A and D are reserved.
#[test]
fn accessed_bits_of_another_mode_change_pdptes() {
    for strategy in STRATEGIES {
        let vm = new_vm(Config::default(), paging(strategy), NR_PAGES, 8, MemoryRegionFlags::empty());
        let (mut pae, mut long) = (Cpu::new(&vm), Cpu::new(&vm));
        let table = 0x30;
        vm.host().store(table, 0, 0x31 << 12 | P);
        vm.host().store(0x31, 3, 0x32 << 12 | P | W | U);
        vm.host().store(0x32, 7, DATA << 12 | P | W | U);
        // For the other mode it is a lowest page table, and the PDPTE a page.
        map(&vm, table - 3, 4, 0, 0x31, P);
        let va = 3 << 21 | 7 << 12;
        pae.set_registers(PagingRegisters { cr0: PG | WP, cr3: table << 12, cr4: PAE, efer: NXE });
        assert_eq!(pae.page_at(va), Ok(DATA));
        long.set_registers(PagingRegisters { cr3: (table - 3) << 12, ..LONG });
        assert_eq!(long.page_at(0), Ok(0x31));
        assert_eq!(vm.host().load(table, 0), 0x31 << 12 | P | A);
        pae.invlpg(va);
        let fault = Exit::PageFault { gva: Gva(va), error_code: 0b1001 };
        assert_eq!(pae.page_at(va), Err(fault), "{strategy:?}");
        assert_eq!(pae.vcpu().load_cr3(table << 12), GENERAL_PROTECTION, "{strategy:?}");
    }
}

/// In a PTE of 8 bytes, A and D of the second of two PTEs of 4 bytes are address bits.
#[test]
fn accessed_bits_of_two_levels_change_addresses_of_wide_entries() {
    for strategy in STRATEGIES {
        let vm = new_vm(Config::default(), paging(strategy), NR_PAGES, 8, MemoryRegionFlags::empty());
        let high = 1 << 32;
        let slot = second_slot(MemoryRegionFlags::empty(), 0x50, 8);
        vm.set_user_memory_region(slat::MemoryRegion { guest_phys_addr: Gpa(high), ..slot }).unwrap();
        let (mut long, mut narrow) = (Cpu::new(&vm), Cpu::new(&vm));
        // PTE 1 of this page directory leads to the first page above 4 GiB; its upper half maps
        // page 0.
        let (directory, va) = (0x32, 1 << 21);
        map(&vm, 0x30, 4, 0, 0, 0);
        vm.host().store(directory, 1, high | P | W | U);
        vm.host().store(0x50, 0, DATA << 12 | P | W | U);
        store_32(&vm, 0x60, 0, directory << 12 | P | W | U);
        long.set_registers(PagingRegisters { cr3: 0x30 << 12, ..LONG });
        assert_eq!(long.page_at(va), Ok(DATA));
        narrow.set_registers(PagingRegisters { cr0: PG | WP, cr3: 0x60 << 12, cr4: 0, efer: 0 });
        assert_eq!(narrow.page_at(3 << 12), Ok(0));
        assert_eq!(vm.host().load(directory, 1) >> 32, P | A);
        long.invlpg(va);
        let gpa = Gpa((P | A) << 32);
        assert_eq!(long.page_at(va), Err(Exit::TableMmio { gva: Gva(va), gpa }), "{strategy:?}");
    }
}

/// The guest's supervisor may write a user's read-only page (CR0.WP clear, SMAP), and no shadow PTE
/// can express that.
#[test]
fn no_write_to_a_device_is_emulated() {
    let vm = vm();
    let mut cpu = guest(&vm);
    vm.set_user_memory_region(second_slot(MemoryRegionFlags::READONLY, 0x40, 8)).unwrap();
    let (memory, read_only, hole) = (DATA + 1, NR_PAGES, NR_PAGES + 100);
    for (nth, gfn) in (1..).zip([memory, read_only, hole]) {
        vm.host().store(ROOT + 3, index(VA, 1) + nth, gfn << 12 | P | U);
    }
    cpu.set_registers(PagingRegisters { cr0: PG, cr4: PAE | 1 << 21, ..LONG });
    let write = GuestAccess { access: Access::Write, privilege: Privilege::SupervisorWithAc };
    let mut exit = |nth: u64| cpu.vcpu().handle_page_fault(Gva(VA + (nth << 12) + 8), write);
    assert_eq!(exit(1), Ok(Outcome::Exit(Exit::EmulateWrite { gpa: Gpa((memory << 12) + 8) })));
    for (nth, gfn) in [(2, read_only), (3, hole)] {
        assert_eq!(exit(nth), Ok(Outcome::Exit(mmio((gfn << 12) + 8, Access::Write))));
    }
}

/// As [`ShadowStrategy`] documents: after a load of CR3 that keeps, the CPU may use what another
/// vCPU has cached since the PCID was left.
#[test]
fn a_kept_pcid_may_have_what_other_vcpus_cached() {
    for strategy in STRATEGIES {
        let vm = new_vm(Config::default(), paging(strategy), NR_PAGES, 8, MemoryRegionFlags::empty());
        map(&vm, ROOT, 4, VA, DATA, 0);
        map(&vm, 0x30, 4, VA, DATA + 2, P | W);
        let (root, lowest, at) = (ROOT << 12 | 1, ROOT + 3, index(VA, 1));
        let window = VA + 0x1000;
        vm.host().store(lowest, at + 1, lowest << 12 | P | W);
        let mut cpus = [(); 2].map(|()| Cpu::new(&vm));
        for cpu in &mut cpus {
            cpu.long_mode(ROOT << 12);
            cpu.load_cr3(root);
            assert!(cpu.page_at(VA).is_err());
        }
        let [first, second] = &mut cpus;
        first.load_cr3(0x30 << 12 | 2);
        // While the PCID is not the first CPU's, the second maps the page, accesses it, and maps
        // another, without a flush.
        second.store(window + at * 8, DATA << 12 | P | W | A).unwrap();
        assert_eq!(second.page_at(VA), Ok(DATA));
        second.store(window + at * 8, (DATA + 1) << 12 | P | W | A).unwrap();
        first.load_cr3(root | KEEP);
        let kept = if strategy == ShadowStrategy::Baseline { DATA + 1 } else { DATA };
        assert_eq!(first.page_at(VA), Ok(kept), "{strategy:?}");
        // Any flush of the address, or of the PCID, ends that.
        first.load_cr3(root);
        assert_eq!(first.page_at(VA), Ok(DATA + 1), "{strategy:?}");
    }
}
