//! Guest page tables where there is no memory, or none that the guest or the engine may use.

use super::*;

#[test]
fn tables_where_there_is_no_memory() {
    for strategy in [ShadowStrategy::Baseline, ShadowStrategy::RootCache, ShadowStrategy::PcidTagged] {
        let vm = new_vm(Config::default(), paging(strategy), NR_PAGES, 8, MemoryRegionFlags::empty());
        let mut cpu = guest(&vm);
        let hole = NR_PAGES + 3;
        cpu.load_cr3(hole << 12);
        let place = (hole << 12) + index(VA, 4) * 8;
        assert!(matches!(cpu.page_at(VA), Err(Exit::TableMmio { gva: Gva(VA), gpa }) if gpa.0 == place));
        for top in [(1 << 36) - 1, hole] {
            cpu.load_cr3(top << 12);
            assert!(matches!(cpu.page_at(VA), Err(Exit::TableMmio { .. })), "{top:x}");
        }
        // A memslot is added, with page tables in it.
        vm.set_user_memory_region(second_slot(MemoryRegionFlags::empty(), ROOT - 3, 4)).unwrap();
        assert_eq!(cpu.page_at(VA), Ok(DATA), "{strategy:?}: {place:x}");
        // And deleted, under the current root.
        delete(&vm, 1);
        assert!(matches!(cpu.page_at(VA), Err(Exit::TableMmio { gpa, .. }) if gpa.0 == place));
        cpu.load_cr3(ROOT << 12);
        assert_eq!(cpu.page_at(VA), Ok(DATA));
        // A page table of each level, and the page.
        for level in [3, 2, 1] {
            let (table, at) = (ROOT + 3 - level, index(VA, level as u32 + 1));
            let old = vm.host().load(table, at);
            let entry = (NR_PAGES + level) << 12 | P | W | U;
            assert_eq!(cpu.vcpu().write_guest_table(Gpa((table << 12) + at * 8), &entry.to_le_bytes()), RESUMED);
            let place = (NR_PAGES + level) * 4096 + index(VA, level as u32) * 8;
            let exit = Exit::TableMmio { gva: Gva(VA), gpa: Gpa(place) };
            assert_eq!(cpu.page_at(VA), Err(exit), "{strategy:?}: level {level}");
            // Beyond what the guest can address.
            let entry = 1 << 48 | P | W | U;
            assert_eq!(cpu.vcpu().write_guest_table(Gpa((table << 12) + at * 8), &u64::to_le_bytes(entry)), RESUMED);
            assert_eq!(cpu.page_at(VA), Err(Exit::PageFault { gva: Gva(VA), error_code: 9 }));
            assert_eq!(cpu.vcpu().write_guest_table(Gpa((table << 12) + at * 8), &old.to_le_bytes()), RESUMED);
        }
        assert_eq!(cpu.page_at(VA), Ok(DATA));
        // The other memslot is deleted.
        delete(&vm, 0);
        assert!(matches!(cpu.page_at(VA), Err(Exit::TableMmio { gpa, .. }) if gpa.0 >> 12 == ROOT));
        assert_eq!(vm.stats().shadow_leaves(), 0);
        vm.set_user_memory_region(region(NR_PAGES, MemoryRegionFlags::empty(), Some(0))).unwrap();
        assert_eq!(cpu.page_at(VA), Ok(DATA));
    }
}

#[test]
fn tables_that_may_only_be_read() {
    let vm = vm();
    let mut cpu = guest(&vm);
    // Memslot 1 has pages 0x40 on. The page tables are there, and the page is not.
    let first = 0x40;
    vm.set_user_memory_region(second_slot(MemoryRegionFlags::READONLY, first, 8)).unwrap();
    for (nth, level) in (2..=4).rev().enumerate() {
        let next = NR_PAGES + nth as u64 + 1;
        vm.host().store(first + nth as u64, index(VA, level), next << 12 | P | W | U);
    }
    vm.host().store(first + 3, index(VA, 1), DATA << 12 | P | W | U);
    cpu.load_cr3(NR_PAGES << 12);
    for _ in 0..2 {
        assert_eq!(cpu.page_at(VA), Ok(DATA));
        cpu.store(VA, 5).unwrap();
        assert_eq!(vm.host().load(DATA, 0), 5);
        assert_eq!(vm.host().load(first + 3, index(VA, 1)) & (A | D), 0, "A and D cannot be set");
        cpu.load_cr3(NR_PAGES << 12);
    }
    // The guest writes its page table: an access to a device.
    vm.host().store(first + 3, index(VA, 1) + 1, (NR_PAGES + 3) << 12 | P | W);
    assert_eq!(cpu.page_at(VA + 0x1000), Ok(first + 3));
    assert_eq!(cpu.store(VA + 0x1008, 1), Err(mmio((NR_PAGES + 3) * 4096 + 8, Access::Write)));
    let gpa = (NR_PAGES + 3) << 12;
    assert_eq!(cpu.vcpu().write_guest_table(Gpa(gpa), &[1; 8]), Ok(Outcome::Exit(mmio(gpa, Access::Write))));
}

#[test]
fn tables_in_userfault_pages() {
    let vm = vm();
    let mut cpu = guest(&vm);
    let words: Arc<Vec<AtomicU64>> = Arc::new(vec![AtomicU64::new(0b1111)]);
    let bitmap = UserfaultBitmap::new(Arc::<Vec<AtomicU64>>::clone(&words), PageSize::Size4K);
    let slot = second_slot(MemoryRegionFlags::USERFAULT, ROOT, 8);
    vm.set_user_memory_region(slat::MemoryRegion { userfault_bitmap: Some(bitmap), ..slot }).unwrap();
    let pending = |page: u64| Exit::MemoryFault {
        flags: MemoryFaultFlags::USERFAULT,
        gpa: Gpa((NR_PAGES + page) << 12),
        size: 4096,
    };
    cpu.load_cr3(NR_PAGES << 12);
    assert_eq!(cpu.page_at(VA), Err(pending(0)));
    let write = cpu.vcpu().write_guest_table(Gpa(NR_PAGES << 12), &[0; 8]);
    assert_eq!(write, Ok(Outcome::Exit(pending(0))));
    words[0].store(0b1110, Ordering::SeqCst);
    // The top page table leads to the others in memslot 0.
    assert_eq!(cpu.page_at(VA), Ok(DATA));
    words[0].store(0b1111, Ordering::SeqCst);
    assert_eq!(vm.rescan_userfault(1, 0, 8), Ok(4));
    assert_eq!(cpu.page_at(VA), Err(pending(0)), "its shadow pages are zapped");
}

#[test]
fn tables_in_private_memory() {
    let vm = vm();
    let mut cpu = guest(&vm);
    vm.set_user_memory_region(second_slot(MemoryRegionFlags::GUEST_MEMFD, ROOT, 8)).unwrap();
    vm.set_memory_attributes(Gpa(NR_PAGES << 12), 4096, MemoryAttributes::PRIVATE).unwrap();
    cpu.load_cr3(NR_PAGES << 12);
    assert_eq!(cpu.page_at(VA), Ok(DATA));
    vm.set_memory_attributes(Gpa(NR_PAGES << 12), 4096, MemoryAttributes::empty()).unwrap();
    assert_eq!(cpu.page_at(VA), Ok(DATA));
}

#[test]
fn tables_that_the_engine_cannot_reach() {
    let vm = vm();
    map(&vm, ROOT, 4, VA, DATA, P | W | U);
    vm.host().has_no_pointers.store(true, Ordering::Relaxed);
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.set_paging_registers(LONG), Ok(()));
    vcpu.entry().unwrap();
    let error = vcpu.handle_page_fault(Gva(VA), READ);
    assert_eq!(error, Err(FaultError::NoGuestMemory { gpa: Gpa((ROOT << 12) + index(VA, 4) * 8) }));
    assert_eq!(vcpu.write_guest_table(Gpa(0x5008), &[0; 8]), Err(FaultError::NoGuestMemory { gpa: Gpa(0x5008) }));
    vm.host().has_no_pointers.store(false, Ordering::Relaxed);
    assert_eq!(vcpu.handle_page_fault(Gva(VA), READ), RESUMED);
    assert_eq!(vcpu.write_guest_table(Gpa(0x5008), &[1, 2, 3, 4, 5, 6, 7, 8]), RESUMED);
    assert_eq!(vm.host().load(5, 1), 0x0807_0605_0403_0201);
}
