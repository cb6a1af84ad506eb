//! Shadow paging: refused input and faults, calls in every order, addresses at the limits. In
//! `memory` guest page tables are in missing or inaccessible memory; in `modes` is each paging mode
//! once.

mod memory;
mod modes;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::shadow_cpu::{A, Cpu, D, G, P, ShadowHost, TestVm, U, W, index, new_vm, region};
use slat::dirty::DirtyTracking;
use slat::error::{ConfigError, FaultError};
use slat::format::{Format, Npt};
use slat::shadow::{
    GuestAccess, Gva, LocalFlush, PagingRegister, PagingRegisters, Privilege, ShadowPaging, ShadowStrategy,
};
use slat::slots::{MemoryAttributes, MemoryFaultFlags, UserfaultBitmap};
use slat::tables::AccessTracking;
use slat::{Access, Config, Exit, Gfn, GfnRange, Gpa, MemoryRegionFlags, Outcome, PageSize, Vm};

const NR_PAGES: u64 = 1024;
const PG: u64 = 1 << 31 | 1;
const WP: u64 = 1 << 16;
const PSE: u64 = 1 << 4;
const PAE: u64 = 1 << 5;
const PGE: u64 = 1 << 7;
const LA57: u64 = 1 << 12;
const PCIDE: u64 = 1 << 17;
const LME: u64 = 1 << 8;
const NXE: u64 = 1 << 11;
const KEEP: u64 = 1 << 63;
/// In a guest PTE: a large page (PS, bit 7).
const LARGE: u64 = 1 << 7;

/// Long mode with four levels.
const LONG: PagingRegisters = PagingRegisters { cr0: PG | WP, cr3: ROOT << 12, cr4: PAE, efer: LME | NXE };
/// Where the top page table is; the others follow it.
const ROOT: u64 = 0x10;
const DATA: u64 = 0x80;
const VA: u64 = 0x0000_1234_5678_9000;
const READ: GuestAccess = GuestAccess { access: Access::Read, privilege: Privilege::Supervisor };
const GENERAL_PROTECTION: Result<Outcome, FaultError> = Ok(Outcome::Exit(Exit::GeneralProtection));
const RESUMED: Result<Outcome, FaultError> = Ok(Outcome::Resume);

fn paging(strategy: ShadowStrategy) -> ShadowPaging {
    ShadowPaging { strategy, ..ShadowPaging::default() }
}

fn vm() -> Arc<TestVm> {
    new_vm(Config::default(), paging(ShadowStrategy::RootCache), NR_PAGES, 8, MemoryRegionFlags::empty())
}

fn new_with(config: Config, shadow: ShadowPaging) -> Result<(), ConfigError> {
    Vm::with_shadow_paging(ShadowHost::new(512, 0), config, shadow).map(drop)
}

/// Makes page tables of `levels` from frame `root` on, each behind the last, and maps the page at
/// `va`.
fn map(vm: &TestVm, root: u64, levels: u32, va: u64, gfn: u64, bits: u64) {
    let mut table = root;
    for level in (2..=levels).rev() {
        vm.host().store(table, index(va, level), (table + 1) << 12 | P | W | U);
        table += 1;
    }
    vm.host().store(table, index(va, 1), gfn << 12 | bits);
}

/// Stores PTE `index` of 4 bytes.
fn store_32(vm: &TestVm, gfn: u64, index: u64, value: u64) {
    let shift = index % 2 * 32;
    let word = vm.host().load(gfn, index / 2);
    vm.host().store(gfn, index / 2, word & !(0xffff_ffff << shift) | value << shift);
}

/// A guest in long mode that maps a page at `VA`.
fn guest(vm: &Arc<TestVm>) -> Cpu {
    map(vm, ROOT, 4, VA, DATA, P | W | U);
    let mut cpu = Cpu::new(vm);
    cpu.set_registers(LONG);
    assert_eq!(cpu.page_at(VA), Ok(DATA));
    cpu
}

fn mmio(gpa: u64, access: Access) -> Exit {
    Exit::Mmio { gpa: Gpa(gpa), access }
}

fn delete(vm: &TestVm, slot: u32) {
    vm.set_user_memory_region(slat::MemoryRegion {
        slot,
        memory_size: 0,
        ..region(0, MemoryRegionFlags::empty(), None)
    })
    .unwrap();
}

/// Memslot 1: `nr_pages` behind memslot 0, of memory with pages from `first` on.
fn second_slot(flags: MemoryRegionFlags, first: u64, nr_pages: u64) -> slat::MemoryRegion<u64> {
    slat::MemoryRegion { slot: 1, guest_phys_addr: Gpa(NR_PAGES << 12), ..region(nr_pages, flags, Some(first)) }
}

#[test]
fn unsupported_configurations_are_refused() {
    let new = |config: Config| new_with(config, ShadowPaging::default());
    assert_eq!(new(Config::default()), Ok(()));
    assert_eq!(new(Config::default().with_access_tracking(AccessTracking::AccessedBit)), Ok(()));
    assert_eq!(new(Config::default().with_dirty_tracking(DirtyTracking::DirtyBit)), Err(ConfigError::NoDirtyBit));
    let logs = Config::default().with_dirty_tracking(DirtyTracking::PageModificationLog);
    assert_eq!(new(logs), Err(ConfigError::NoModificationLog { format: Npt::NAME }));
    let with = |previous_roots, max_pages| {
        new_with(Config::default(), ShadowPaging { previous_roots, max_pages, ..ShadowPaging::default() })
    };
    assert_eq!(with(31, 64), Ok(()));
    assert_eq!(with(0, 1 << 20), Ok(()));
    assert_eq!(with(32, 64), Err(ConfigError::TooManyRoots { previous_roots: 32 }));
    assert_eq!(with(3, 63), Err(ConfigError::BadShadowPages { max_pages: 63 }));
    assert_eq!(with(3, (1 << 20) + 1), Err(ConfigError::BadShadowPages { max_pages: (1 << 20) + 1 }));
}

#[test]
fn without_shadow_paging_there_is_none() {
    let vm = new_vm_without();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.paging_registers(), Err(FaultError::NotShadow));
    assert_eq!(vcpu.set_paging_registers(LONG), Err(FaultError::NotShadow));
    assert_eq!(vcpu.write_paging_register(PagingRegister::Cr0, 0), Err(FaultError::NotShadow));
    assert_eq!(vcpu.load_cr3(0), Err(FaultError::NotShadow));
    assert_eq!(vcpu.invlpg(Gva(0)), Err(FaultError::NotShadow));
    assert_eq!(vcpu.invpcid(9, [0, 0]), Err(FaultError::NotShadow));
    assert_eq!(vcpu.entry(), Err(FaultError::NotShadow));
    assert_eq!(vcpu.handle_page_fault(Gva(0), READ), Err(FaultError::NotShadow));
    assert_eq!(vcpu.write_guest_table(Gpa(0), &[]), Err(FaultError::NotShadow));
    assert_eq!(vcpu.handle_fault(Gpa(0), Access::Write), RESUMED);
    let stats = vm.stats();
    assert_eq!((stats.shadow_pages, stats.shadow_pages_peak, stats.shadow_leaves()), (0, 0, 0));
}

fn new_vm_without() -> Arc<TestVm> {
    let vm = Arc::new(TestVm::new(ShadowHost::new(NR_PAGES, 8), Config::default()).unwrap());
    vm.set_user_memory_region(region(NR_PAGES, MemoryRegionFlags::empty(), Some(0))).unwrap();
    vm
}

#[test]
fn invalid_registers_fault_in_the_guest_and_change_nothing() {
    let vm = vm();
    let mut cpu = guest(&vm);
    // Registers that are restored.
    for (bad, register) in [
        (PagingRegisters { cr0: 1 << 31, ..LONG }, PagingRegister::Cr0),
        (PagingRegisters { cr4: 0, ..LONG }, PagingRegister::Cr4),
        (PagingRegisters { cr4: PCIDE, efer: 0, ..LONG }, PagingRegister::Cr4),
        (PagingRegisters { cr4: PAE | 1 << 22, ..LONG }, PagingRegister::Cr4),
        (PagingRegisters { cr4: PAE | 1 << 28, ..LONG }, PagingRegister::Cr4),
        (PagingRegisters { cr3: 1 << 48, ..LONG }, PagingRegister::Cr3),
        (PagingRegisters { cr3: KEEP, ..LONG }, PagingRegister::Cr3),
    ] {
        let error = FaultError::BadPagingRegister { register, value: bad.get(register) };
        assert_eq!(cpu.vcpu().set_paging_registers(bad), Err(error), "{bad:x?}");
        assert_eq!(cpu.vcpu().paging_registers(), Ok(LONG));
    }
    // Values that the guest writes.
    for (register, bad) in [
        (PagingRegister::Cr0, 1 << 31),
        (PagingRegister::Cr3, LONG.cr3 | KEEP),
        (PagingRegister::Cr3, 1 << 48),
        (PagingRegister::Cr4, 0),
        (PagingRegister::Cr4, PAE | 1 << 22),
        (PagingRegister::Cr4, PAE | 1 << 23),
        (PagingRegister::Cr4, PAE | 1 << 24),
        (PagingRegister::Cr4, PAE | 1 << 28),
        (PagingRegister::Cr4, PAE | LA57),
        (PagingRegister::Efer, NXE),
    ] {
        assert_eq!(cpu.vcpu().write_paging_register(register, bad), GENERAL_PROTECTION, "{register:?} = {bad:x}");
        assert_eq!(cpu.vcpu().paging_registers(), Ok(LONG));
    }
    for bad in [LONG.cr3 | KEEP, 1 << 48, 1 << 62] {
        assert_eq!(cpu.vcpu().load_cr3(bad), GENERAL_PROTECTION, "{bad:x}");
    }
    for (kind, pcid, va) in [(4, 0, 0), (u64::MAX, 0, 0), (2, 1 << 12, 0), (0, 0, 1 << 47), (0, 1, 0), (1, 1, 0)] {
        assert_eq!(cpu.vcpu().invpcid(kind, [pcid, va]), GENERAL_PROTECTION, "{kind} {pcid:x} {va:x}");
    }
    for va in [1 << 47, 0xffff_7fff_ffff_ffff, 1 << 63] {
        assert_eq!(cpu.vcpu().handle_page_fault(Gva(va), READ), GENERAL_PROTECTION, "{va:x}");
        assert_eq!(cpu.vcpu().invlpg(Gva(va)), RESUMED, "INVLPG of what is no address does nothing");
    }
    // PCIDs may be turned on only while the PCID is 0.
    cpu.load_cr3(LONG.cr3 | 0x18);
    assert_eq!(cpu.vcpu().write_paging_register(PagingRegister::Cr4, PAE | PCIDE), GENERAL_PROTECTION);
    cpu.load_cr3(LONG.cr3);
    cpu.write_register(PagingRegister::Cr4, PAE | PCIDE);
    assert_eq!(cpu.page_at(VA), Ok(DATA));
    // A saved state may have both, though only one of its registers differs.
    assert_eq!(cpu.vcpu().write_paging_register(PagingRegister::Cr3, LONG.cr3 | 0x18), RESUMED);
    cpu.write_register(PagingRegister::Cr4, PAE);
    cpu.set_registers(PagingRegisters { cr3: LONG.cr3 | 0x18, cr4: PAE | PCIDE, ..LONG });
    cpu.set_registers(PagingRegisters { cr4: PAE | LA57, ..LONG });
    cpu.set_registers(LONG);
    assert_eq!(cpu.page_at(VA), Ok(DATA));
}

#[test]
fn calls_in_any_order() {
    let vm = vm();
    let mut cpu = Cpu::new(&vm);
    // Without paging, as a CPU starts.
    assert_eq!(cpu.vcpu().handle_page_fault(Gva(DATA << 12), READ), RESUMED);
    assert_eq!(cpu.page_at(DATA << 12), Ok(DATA));
    cpu.invlpg(0);
    cpu.invpcid(2, 0, 0);
    cpu.load_cr3(0xffff_f000);
    assert_eq!(cpu.page_at(DATA << 12), Ok(DATA), "CR3 means nothing yet");
    assert_eq!(cpu.page_at(0xffff_f000), Err(mmio(0xffff_f000, Access::Read)));
    assert_eq!(cpu.vcpu().handle_page_fault(Gva(1 << 32), READ), GENERAL_PROTECTION);
    map(&vm, ROOT, 4, VA, DATA, P | W | U);
    cpu.set_registers(LONG);
    let first = cpu.vcpu().entry().unwrap();
    assert_eq!(first.flush, LocalFlush::None, "it was returned already");
    assert_eq!(cpu.vcpu().entry(), Ok(first));
    // Two vCPUs share the root, and one is dropped.
    let mut other = guest(&vm);
    assert_eq!(other.vcpu().entry().unwrap().root, first.root);
    drop(cpu);
    assert_eq!(other.page_at(VA), Ok(DATA));
    let nr_pages = vm.stats().shadow_pages;
    let third = guest(&vm);
    drop(other);
    assert_eq!(vm.stats().shadow_pages, nr_pages);
    drop(third);
    assert_eq!((vm.stats().shadow_pages, vm.stats().shadow_leaves()), (0, 0));
    // And again from nothing.
    assert_eq!(guest(&vm).page_at(VA), Ok(DATA));
}

#[test]
fn addresses_at_the_ends() {
    let vm = vm();
    let mut cpu = Cpu::new(&vm);
    let ends = [0, 0x7fff_ffff_f000, 0xffff_8000_0000_0000, 0xffff_ffff_ffff_f000];
    for (nth, va) in (0..).zip(ends) {
        let root = ROOT + 4 * nth;
        map(&vm, root, 4, va, DATA + nth, P | W);
        cpu.set_registers(PagingRegisters { cr3: root << 12, ..LONG });
        assert_eq!(cpu.page_at(va), Ok(DATA + nth));
        assert_eq!(cpu.load(va + 0xff8).map(drop), Ok(()));
        cpu.store(va + 0xff0, 7).unwrap();
        assert_eq!(vm.host().load(DATA + nth, 0xff0 / 8), 7);
        cpu.invlpg(va | 0xfff);
        assert_eq!(cpu.page_at(va), Ok(DATA + nth));
    }
    // The last page that 32 bits can name; no page follows it.
    store_32(&vm, 0x30, 1023, 0x31 << 12 | P | W);
    store_32(&vm, 0x31, 1023, DATA << 12 | P | W);
    cpu.set_registers(PagingRegisters { cr0: PG | WP, cr3: 0x30 << 12, cr4: 0, efer: 0 });
    assert_eq!(cpu.page_at(0xffff_f000), Ok(DATA));
    assert_eq!(cpu.vcpu().handle_page_fault(Gva(1 << 32), READ), GENERAL_PROTECTION);
    assert!(matches!(cpu.page_at(0), Err(Exit::PageFault { gva: Gva(0), error_code: 0 })));
}

#[test]
fn emulated_writes_of_every_size() {
    let vm = vm();
    let mut cpu = guest(&vm);
    let vcpu = cpu.vcpu();
    let bytes: Vec<u8> = (1..=65).collect();
    for (gpa, len) in [(0x5000, 0), (0x5000, 65), (0x5fff, 2), (0x5fc1, 64), (u64::MAX, 1)] {
        let error = vcpu.write_guest_table(Gpa(gpa), &bytes[..len]);
        match gpa {
            u64::MAX => assert!(matches!(error, Err(FaultError::AddressTooHigh { .. })), "{error:?}"),
            _ => assert_eq!(error, Err(FaultError::BadWrite { gpa: Gpa(gpa), len })),
        }
    }
    assert!((0..511).all(|index| vm.host().load(5, index) == 0), "nothing was written");
    let gpa = (NR_PAGES << 12) + 1;
    assert_eq!(vcpu.write_guest_table(Gpa(gpa), &[1]), Ok(Outcome::Exit(mmio(gpa, Access::Write))));
    let mut expected = [0; 4096 - 8];
    for (gpa, len) in
        [(0x5fb8_usize, 64), (0x5001, 1), (0x5003, 3), (0x500d, 9), (0x5021, 63), (0x5064, 4), (0x5070, 8)]
    {
        assert_eq!(vcpu.write_guest_table(Gpa(gpa as u64), &bytes[..len]), RESUMED);
        let at = gpa % 4096;
        if at + len <= expected.len() {
            expected[at..at + len].copy_from_slice(&bytes[..len]);
        } else {
            unreachable!("the last word has the label");
        }
    }
    let found: Vec<u8> = (0..511).flat_map(|index| vm.host().load(5, index).to_le_bytes()).collect();
    assert!(found == expected, "{found:x?}");
}

#[test]
fn a_table_that_points_to_itself() {
    for strategy in [ShadowStrategy::Baseline, ShadowStrategy::RootCache, ShadowStrategy::PcidTagged] {
        let vm = new_vm(Config::default(), paging(strategy), NR_PAGES, 8, MemoryRegionFlags::empty());
        let mut cpu = guest(&vm);
        // PTE 5 of the top page table.
        let own = ROOT << 12 | P | W | U;
        assert_eq!(cpu.vcpu().write_guest_table(Gpa((ROOT << 12) + 40), &own.to_le_bytes()), RESUMED);
        let [top, other] =
            [0x5 << 39 | 5 << 30 | 5 << 21 | 5 << 12, 0x5 << 39 | 5 << 30 | 5 << 21 | index(VA, 4) << 12];
        assert_eq!(cpu.page_at(top), Ok(ROOT));
        assert_eq!(cpu.page_at(other), Ok(ROOT + 1));
        // Through itself it writes its page tables: another page at `VA`, by the lowest.
        let leaf = 5 << 39 | VA >> 9 & !7 & ((1 << 39) - 1);
        assert_eq!(cpu.load(leaf).unwrap() >> 12, DATA);
        cpu.store(leaf, (DATA + 1) << 12 | P | W | U).unwrap();
        cpu.invlpg(VA);
        assert_eq!(cpu.page_at(VA), Ok(DATA + 1), "{strategy:?}");
        // And clears the PTE through which it writes.
        cpu.store(top + 40, 0).unwrap();
        cpu.load_cr3(ROOT << 12);
        assert_eq!(cpu.load(top), Err(Exit::PageFault { gva: Gva(top), error_code: 0 }));
        assert_eq!(cpu.page_at(VA), Ok(DATA + 1));
    }
}

/// A translation that was global when it was cached, and is not global now, is flushed by a load of
/// CR3.
#[test]
fn pages_that_were_global_once() {
    let vm = vm();
    let mut cpu = guest(&vm);
    let (table, at) = (ROOT + 3, index(VA, 1));
    vm.host().store(table, at + 1, table << 12 | P | W);
    let place = VA + 4096 + at * 8;
    let entry = |gfn: u64, bits: u64| gfn << 12 | P | W | U | A | D | bits;
    let with_globals = PagingRegisters { cr4: PAE | PGE, ..LONG };
    cpu.set_registers(with_globals);
    for (gfn, without) in [(DATA + 1, with_globals), (DATA + 3, LONG)] {
        cpu.store(place, entry(gfn, G)).unwrap();
        cpu.invlpg(VA);
        assert_eq!(cpu.page_at(VA), Ok(gfn));
        if without == with_globals {
            cpu.store(place, entry(gfn, 0)).unwrap();
            cpu.invlpg(VA);
        } else {
            cpu.set_registers(without);
        }
        assert_eq!(cpu.page_at(VA), Ok(gfn));
        cpu.store(place, entry(gfn + 1, 0)).unwrap();
        cpu.load_cr3(LONG.cr3);
        assert_eq!(cpu.page_at(VA), Ok(gfn + 1));
    }
}

/// A second-stage fault does not touch the shadow page tables: it maps the page in the second
/// stage. So do prefaults.
#[test]
fn second_stage_faults_fill_the_second_stage_alone() {
    let vm = vm();
    let mut cpu = guest(&vm);
    drop(vm.invalidate_range(GfnRange::new(Gfn(0), NR_PAGES)).unwrap());
    assert_eq!(vm.stats().shadow_leaves(), 0);
    assert_eq!(cpu.vcpu().handle_fault(Gpa(0), Access::Write), RESUMED);
    assert_eq!(cpu.vcpu().pre_fault_memory(Gpa(0), NR_PAGES << 12, Access::Write), Ok(NR_PAGES << 12));
    assert_eq!(vm.stats().shadow_leaves(), 0);
    let (faults, resolves) = (vm.stats().faults, vm.host().nr_resolves.load(Ordering::Relaxed));
    assert_eq!(cpu.page_at(VA), Ok(DATA));
    cpu.store(VA, 1).unwrap();
    assert_eq!(vm.stats().faults, faults, "the second stage had all of it");
    assert_eq!(vm.host().nr_resolves.load(Ordering::Relaxed), resolves);
    assert!(vm.stats().shadow_leaves() > 0);
}

/// A later use of an aged page is found.
#[test]
fn aged_pages_that_are_used_again() {
    let vm = vm();
    let mut cpu = guest(&vm);
    let page = GfnRange::new(Gfn(DATA), 1);
    for _ in 0..2 {
        // The second stage has a huge leaf, which is aged as a whole.
        assert_eq!(vm.age_range(page), Ok(1));
        assert_eq!(vm.test_age_range(page), Ok(0));
        assert_eq!(cpu.page_at(VA), Ok(DATA));
        assert_eq!(vm.test_age_range(page), Ok(1), "the guest has read it");
    }
}

/// A large page of the guest contains its own page tables, and is mapped first. Writes of the guest
/// to them must take effect.
#[test]
fn a_large_page_with_tables_in_it() {
    for strategy in [ShadowStrategy::Baseline, ShadowStrategy::RootCache, ShadowStrategy::PcidTagged] {
        let vm = new_vm(Config::default(), paging(strategy), NR_PAGES, 8, MemoryRegionFlags::empty());
        let window = 0x7f_c000_0000_u64;
        // The page tables that map it are elsewhere.
        let top = 600;
        for (table, level, next) in [(top, 4, top + 1), (top + 1, 3, top + 2)] {
            vm.host().store(table, index(window, level), next << 12 | P | W);
        }
        vm.host().store(top + 2, index(window, 2), P | W | LARGE | A | D);
        map(&vm, ROOT, 4, VA, DATA, P | W | U);
        vm.host().store(top, index(VA, 4), (ROOT + 1) << 12 | P | W | U);
        // Another lowest page table.
        vm.host().store(0x38, index(VA, 1), (DATA + 1) << 12 | P | W | U);
        let mut cpu = Cpu::new(&vm);
        cpu.set_registers(PagingRegisters { cr3: top << 12, ..LONG });
        let place = window + ((ROOT + 2) << 12) + index(VA, 2) * 8;
        // It is written as one page, before there are shadow page tables of its contents.
        cpu.store(place, (ROOT + 3) << 12 | P | W | U).unwrap();
        assert_eq!(vm.stats().shadow_leaves(), 1, "{strategy:?}");
        assert_eq!(cpu.page_at(VA), Ok(DATA));
        for (table, page) in [(0x38, DATA + 1), (ROOT + 3, DATA), (0x38, DATA + 1)] {
            cpu.store(place, table << 12 | P | W | U).unwrap();
            cpu.invlpg(VA);
            assert_eq!(cpu.page_at(VA), Ok(page), "{strategy:?}");
        }
        assert_eq!(vm.stats().emulated_writes, 3, "{strategy:?}");
    }
}

/// A root that another vCPU has built, with PTEs that are stale for that vCPU alone.
#[test]
fn a_root_that_another_has() {
    for strategy in [ShadowStrategy::Baseline, ShadowStrategy::RootCache, ShadowStrategy::PcidTagged] {
        let vm = new_vm(Config::default(), paging(strategy), NR_PAGES, 8, MemoryRegionFlags::empty());
        let mut cpu = guest(&vm);
        vm.host().store(ROOT + 3, index(VA, 1) + 1, (ROOT + 3) << 12 | P | W);
        let mut other = Cpu::new(&vm);
        for page in [DATA + 1, DATA + 2] {
            // It does not flush.
            cpu.store(VA + 4096 + index(VA, 1) * 8, page << 12 | P | W | U).unwrap();
            other.set_registers(PagingRegisters::default());
            other.set_registers(LONG);
            assert_eq!(other.page_at(VA), Ok(page), "{strategy:?}");
        }
    }
}

/// A remembered root was evicted, and its record is another page table's by now.
#[test]
fn roots_that_were_evicted() {
    for strategy in [ShadowStrategy::RootCache, ShadowStrategy::PcidTagged] {
        let paging = ShadowPaging { strategy, max_pages: 64, ..ShadowPaging::default() };
        let vm = new_vm(Config::default(), paging, NR_PAGES, 8, MemoryRegionFlags::empty());
        let mut cpu = guest(&vm);
        cpu.set_registers(PagingRegisters { cr4: PAE | PCIDE, ..LONG });
        // Another top page table, with very many below it.
        let root = 0x100;
        vm.host().store(root, 0, (root + 1) << 12 | P | W);
        vm.host().store(root + 1, 0, (root + 2) << 12 | P | W);
        for nth in 0..200 {
            vm.host().store(root + 2, nth, (root + 3 + nth) << 12 | P | W);
            vm.host().store(root + 3 + nth, 0, (600 + nth) << 12 | P | W);
        }
        for _ in 0..3 {
            cpu.load_cr3(LONG.cr3 | 1 | KEEP);
            assert_eq!(cpu.page_at(VA), Ok(DATA), "{strategy:?}");
            cpu.load_cr3(root << 12 | 2 | KEEP);
            for nth in 0..200 {
                assert_eq!(cpu.page_at(nth << 21), Ok(600 + nth), "{strategy:?}");
            }
        }
        assert!(vm.stats().shadow_evictions > 100 && vm.stats().shadow_pages_peak <= 64);
    }
}

/// During an invalidation faults make the guest try again, and do not wait.
#[test]
fn faults_during_an_invalidation() {
    let vm = vm();
    let mut cpu = guest(&vm);
    for page in [DATA, ROOT, ROOT + 3] {
        let invalidation = vm.invalidate_range(GfnRange::new(Gfn(page), 1)).unwrap();
        for _ in 0..3 {
            assert_eq!(cpu.vcpu().handle_page_fault(Gva(VA), READ), RESUMED);
        }
        drop(invalidation);
        assert_eq!(cpu.page_at(VA), Ok(DATA));
    }
}
