//! The other modes of paging: five levels, physical address extension, 32 bits; and two over the same tables.

use super::*;

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
    // With four, by way of no paging.
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
    // A write to one table of the page leaves the other.
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
    // Without PSE it points to a table.
    cpu.set_registers(PagingRegisters { cr0: PG | WP, cr3: ROOT << 12, cr4: 0, efer: 0 });
    assert!(matches!(cpu.page_at(0x8000_1000), Err(Exit::PageFault { error_code: 0, .. })));
    assert_eq!(cpu.page_at(0x0040_1000), Ok(DATA));
}

#[test]
fn two_modes_over_the_same_tables() {
    for strategy in [ShadowStrategy::Baseline, ShadowStrategy::RootCache, ShadowStrategy::PcidTagged] {
        let vm = new_vm(config(strategy), NR_PAGES, 8, MemoryRegionFlags::empty());
        let mut long = guest(&vm);
        let lowest = ROOT + 3;
        // The other's: `lowest` is its lowest table, and its page directory too.
        let mut pae = Cpu::new(&vm);
        let at = index(VA, 1);
        vm.host().store(0x30, 0, 0x31 << 12 | P);
        vm.host().store(0x30, 1, lowest << 12 | P);
        vm.host().store(0x31, 0, lowest << 12 | P | W | U);
        vm.host().store(DATA, 0, (DATA + 5) << 12 | P | W);
        // It sees `lowest` itself.
        vm.host().store(lowest, at + 1, lowest << 12 | P | W);
        pae.set_registers(PagingRegisters { cr0: PG | WP, cr3: 0x30 << 12, cr4: PAE, efer: NXE });
        let (as_lowest, as_directory) = (at << 12, 1 << 30 | at << 21);
        assert_eq!(pae.page_at(as_lowest), Ok(DATA));
        assert_eq!(pae.page_at(as_directory), Ok(DATA + 5), "{strategy:?}");
        // One writes, the other flushes.
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
