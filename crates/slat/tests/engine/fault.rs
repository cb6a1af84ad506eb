//! What a single fault does: sizes, rights, exits, errors.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::common::{Frame, GIB, MIB, TestHost, Translation, Writes, change, region, translate, vm};
use slat::error::{FaultError, LogError, SlotError};
use slat::format::{Format, Pte};
use slat::{Access, Exit, Gfn, GfnRange, Gpa, Level, MemoryRegionFlags, Outcome, PageSize, Pfn, Vm};

/// Runs a test for each format and locking.
macro_rules! each {
    ($name:ident, $test:ident) => {
        crate::common::each!($name, |F, locking| $test::<F>(vm(locking)));
    };
}

each!(a_fault_maps_the_frame_that_the_backing_names, maps);
fn maps<F: Format>(vm: Arc<Vm<TestHost, F>>) {
    vm.set_user_memory_region(region(3, 0x10000, 0x4000, 0x777, PageSize::Size4K)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(translate(&vm, Gpa(0x11000)), None);
    assert_eq!(vcpu.handle_fault(Gpa(0x11008), Access::Read), Ok(Outcome::Resume));
    let mapped = translate(&vm, Gpa(0x11000)).unwrap();
    assert_eq!((mapped.pfn, mapped.level, mapped.writable), (Pfn(0x778), Level::L4K, true));
    assert_ne!(mapped.pte.0 & F::ACCESSED, 0);
    // It is writable; where CPUs set no D, that counts as written.
    assert_eq!(mapped.pte.0 & F::DIRTY == 0, F::HAS_DIRTY_BIT);
    assert_eq!(translate(&vm, Gpa(0x10000)), None);
    // Again: spurious, and the frame stays. Now it is written.
    assert_eq!(vcpu.handle_fault(Gpa(0x11008), Access::Write), Ok(Outcome::Resume));
    let written = Translation { pte: Pte(mapped.pte.0 | F::DIRTY), ..mapped };
    assert_eq!(translate(&vm, Gpa(0x11000)), Some(written));
    let stats = vm.stats();
    let nr_tables = u64::from(F::ROOT_LEVEL.0);
    assert_eq!((stats.faults, stats.spurious, stats.installed_4k, stats.live_tables()), (2, 1, 1, nr_tables));
    assert_eq!(vm.host().nr_flushes(), 0);
}

each!(leaves_are_as_large_as_backing_alignment_and_slot_allow, sizes);
fn sizes<F: Format>(vm: Arc<Vm<TestHost, F>>) {
    let one_gib_pages = GIB / 4096;
    // Aligned alike: 1 GiB. Guest and host differ by 2 MiB: 2 MiB. By 4 KiB: 4 KiB. The memslot
    // ends inside: smaller there.
    vm.set_user_memory_region(region(0, 4 * GIB, GIB, 8 * one_gib_pages, PageSize::Size1G)).unwrap();
    vm.set_user_memory_region(region(1, 6 * GIB, GIB, 9 * one_gib_pages + 512, PageSize::Size1G)).unwrap();
    vm.set_user_memory_region(region(2, 8 * GIB, GIB, 11 * one_gib_pages + 1, PageSize::Size1G)).unwrap();
    vm.set_user_memory_region(region(3, 10 * GIB + 2 * MIB, GIB, 13 * one_gib_pages + 512, PageSize::Size1G)).unwrap();
    vm.set_user_memory_region(region(4, 14 * GIB + 4096, 4 * MIB, 17 * one_gib_pages + 1, PageSize::Size2M)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    for (gpa, pfn, level) in [
        (4 * GIB + 0x12345678, 8 * one_gib_pages + 0x12345, Level::L1G),
        (6 * GIB + 0x12345678, 9 * one_gib_pages + 512 + 0x12345, Level::L2M),
        (8 * GIB + 0x12345678, 11 * one_gib_pages + 1 + 0x12345, Level::L4K),
        (10 * GIB + 2 * MIB, 13 * one_gib_pages + 512, Level::L2M),
        (14 * GIB + 4096, 17 * one_gib_pages + 1, Level::L4K),
        (14 * GIB + 2 * MIB, 17 * one_gib_pages + 512, Level::L2M),
        (14 * GIB + 4 * MIB, 17 * one_gib_pages + 1024, Level::L4K),
    ] {
        assert_eq!(vcpu.handle_fault(Gpa(gpa), Access::Write), Ok(Outcome::Resume));
        let mapped = translate(&vm, Gpa(gpa)).unwrap();
        assert_eq!((mapped.pfn, mapped.level, mapped.writable), (Pfn(pfn), level, true), "{gpa:#x}");
    }
    let stats = vm.stats();
    assert_eq!((stats.installed_1g, stats.installed_2m, stats.installed_4k), (1, 3, 3));
}

each!(accesses_without_memory_and_writes_to_read_only_slots_exit, exits);
fn exits<F: Format>(vm: Arc<Vm<TestHost, F>>) {
    let mut rom = region(0, 0, MIB, 0x100, PageSize::Size4K);
    rom.flags = MemoryRegionFlags::READONLY;
    vm.set_user_memory_region(rom).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    let mmio = |gpa, access| Ok(Outcome::Exit(Exit::Mmio { gpa: Gpa(gpa), access }));
    assert_eq!(vcpu.handle_fault(Gpa(MIB), Access::Read), mmio(MIB, Access::Read));
    assert_eq!(vcpu.handle_fault(Gpa(0x10), Access::Write), mmio(0x10, Access::Write));
    assert_eq!(vcpu.handle_fault(Gpa(0x10), Access::Read), Ok(Outcome::Resume));
    assert!(!translate(&vm, Gpa(0)).unwrap().writable);
    assert_eq!(vcpu.handle_fault(Gpa(0x10), Access::Write), mmio(0x10, Access::Write));
    let too_high = Gpa(1 << F::GPA_BITS);
    assert_eq!(
        vcpu.handle_fault(too_high, Access::Read),
        Err(FaultError::AddressTooHigh { gpa: too_high, gpa_bits: F::GPA_BITS })
    );
    assert_eq!(vm.stats().exits, 3);
}

each!(a_backing_that_is_gone_is_an_error_and_changes_nothing, gone);
fn gone<F: Format>(vm: Arc<Vm<TestHost, F>>) {
    let memory = region(0, 0, MIB, 0x100, PageSize::Size4K);
    let backing = memory.backing.clone().unwrap();
    vm.set_user_memory_region(memory).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    backing.gone.store(true, Ordering::SeqCst);
    assert_eq!(vcpu.handle_fault(Gpa(0x3000), Access::Write), Err(FaultError::BackingGone { gpa: Gpa(0x3000) }));
    assert_eq!((translate(&vm, Gpa(0x3000)), vm.host().live_tables()), (None, 1));
    backing.gone.store(false, Ordering::SeqCst);
    assert_eq!(vcpu.handle_fault(Gpa(0x3000), Access::Write), Ok(Outcome::Resume));
}

each!(a_write_to_a_frame_that_was_mapped_for_reading_asks_the_host_again, copy_on_write);
fn copy_on_write<F: Format>(vm: Arc<Vm<TestHost, F>>) {
    let memory = region(0, 0, MIB, 0x100, PageSize::Size4K);
    let backing = memory.backing.clone().unwrap();
    backing.reads_are_writable.store(false, Ordering::SeqCst);
    vm.set_user_memory_region(memory).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.handle_fault(Gpa(0x3000), Access::Read), Ok(Outcome::Resume));
    assert!(!translate(&vm, Gpa(0x3000)).unwrap().writable);
    assert_eq!(vcpu.handle_fault(Gpa(0x3000), Access::Write), Ok(Outcome::Resume));
    assert!(translate(&vm, Gpa(0x3000)).unwrap().writable);
    // The frame is the same: no CPU has a wrong translation cached.
    assert_eq!((vm.host().resolves.load(Ordering::SeqCst), vm.host().nr_flushes()), (2, 0));
}

each!(a_copy_without_an_invalidation_is_refused, copied);
fn copied<F: Format>(vm: Arc<Vm<TestHost, F>>) {
    let memory = region(0, 0, MIB, 0x100, PageSize::Size4K);
    let backing = memory.backing.clone().unwrap();
    backing.reads_are_writable.store(false, Ordering::SeqCst);
    vm.set_user_memory_region(memory).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.handle_fault(Gpa(0x3000), Access::Read), Ok(Outcome::Resume));
    let frame = Frame { pfn: 0x777, writes: Writes::Allowed };
    backing.frames.write().unwrap().insert(3, frame);
    let refused = Err(FaultError::BadResolve { gpa: Gpa(0x3000) });
    assert_eq!(vcpu.handle_fault(Gpa(0x3000), Access::Write), refused);
    assert_eq!(vcpu.pre_fault_memory(Gpa(0x3000), 4096, Access::Write).map(|_| Outcome::Resume), refused);
    assert_eq!(translate(&vm, Gpa(0x3000)).map(|found| (found.pfn, found.writable)), Some((Pfn(0x103), false)));
    // As it should be.
    backing.frames.write().unwrap().clear();
    let guard = vm.invalidate_range(GfnRange::new(Gfn(3), 1)).unwrap();
    backing.frames.write().unwrap().insert(3, frame);
    drop(guard);
    assert_eq!(vcpu.handle_fault(Gpa(0x3000), Access::Write), Ok(Outcome::Resume));
    assert_eq!(translate(&vm, Gpa(0x3000)).map(|found| (found.pfn, found.writable)), Some((Pfn(0x777), true)));
}

each!(a_part_of_a_read_only_block_that_may_be_written_is_split_off, part_of_read_only);
fn part_of_read_only<F: Format>(vm: Arc<Vm<TestHost, F>>) {
    let memory = region(0, 0, 2 * MIB, 0x1000, PageSize::Size2M);
    let backing = memory.backing.clone().unwrap();
    backing.reads_are_writable.store(false, Ordering::SeqCst);
    vm.set_user_memory_region(memory).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.handle_fault(Gpa(0x3000), Access::Read), Ok(Outcome::Resume));
    // The same frame, but not those around it.
    backing.frames.write().unwrap().insert(3, Frame { pfn: 0x1003, writes: Writes::Allowed });
    assert_eq!(vcpu.handle_fault(Gpa(0x3000), Access::Write), Ok(Outcome::Resume));
    for page in 0..512 {
        let found = translate(&vm, Gpa(page << 12)).unwrap();
        assert_eq!(
            (found.pfn, found.level, found.writable),
            (Pfn(0x1000 + page), Level::L4K, page == 3),
            "page {page}"
        );
    }
    // None, except for the break of the block.
    assert_eq!(vm.host().nr_flushes(), usize::from(F::BREAK_BEFORE_MAKE));
}

each!(logging_protects_marks_and_splits, logging);
fn logging<F: Format>(vm: Arc<Vm<TestHost, F>>) {
    let log = MemoryRegionFlags::LOG_DIRTY_PAGES;
    vm.set_user_memory_region(region(0, 0, GIB, GIB / 4096, PageSize::Size1G)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.handle_fault(Gpa(0), Access::Write), Ok(Outcome::Resume));
    assert_eq!(translate(&vm, Gpa(0)).unwrap().level, Level::L1G);
    let mut bitmap = vec![u64::MAX; 4096];
    assert_eq!(vm.get_dirty_log(0, &mut bitmap), Err(LogError::NotLogging { slot: 0 }));
    vm.set_user_memory_region(change(0, log, 0, GIB)).unwrap();
    let huge = translate(&vm, Gpa(0)).unwrap();
    assert_eq!((huge.level, huge.writable), (Level::L1G, false));
    assert_eq!(vm.host().nr_flushes(), 1);
    // A read is spurious; a write splits down to 4 KiB and marks its page alone.
    assert_eq!(vcpu.handle_fault(Gpa(0x12345678), Access::Read), Ok(Outcome::Resume));
    assert_eq!(vcpu.handle_fault(Gpa(0x12345678), Access::Write), Ok(Outcome::Resume));
    let small = translate(&vm, Gpa(0x12345678)).unwrap();
    assert_eq!((small.level, small.writable, small.pfn), (Level::L4K, true, Pfn(GIB / 4096 + 0x12345)));
    let neighbour = translate(&vm, Gpa(0x12346000)).unwrap();
    assert_eq!((neighbour.level, neighbour.writable, neighbour.pfn), (Level::L4K, false, Pfn(GIB / 4096 + 0x12346)));
    assert_eq!(neighbour.pte.0 & (F::ACCESSED | F::DIRTY), huge.pte.0 & (F::ACCESSED | F::DIRTY));
    assert_eq!(vm.stats().splits, 2);
    let nr_breaks = if F::BREAK_BEFORE_MAKE { 2 } else { 0 };
    assert_eq!(vm.get_dirty_log(0, &mut bitmap), Ok(1));
    assert!((0..4096).all(|word| bitmap[word] == if word == 0x12345 / 64 { 1 << (0x12345 % 64) } else { 0 }));
    assert!(!translate(&vm, Gpa(0x12345678)).unwrap().writable);
    assert_eq!(vm.host().nr_flushes(), 2 + nr_breaks);
    // Nothing dirty, nothing flushed.
    assert_eq!(vm.get_dirty_log(0, &mut bitmap), Ok(0));
    assert_eq!(vm.host().nr_flushes(), 2 + nr_breaks);
    assert_eq!(
        vm.get_dirty_log(0, &mut bitmap[..4095]),
        Err(LogError::BitmapTooShort { slot: 0, words: 4095, needed: 4096 })
    );
    assert_eq!(vm.get_dirty_log(1, &mut bitmap), Err(LogError::NoSuchSlot { slot: 1 }));
    // Logging off: the next write only restores write access.
    vm.set_user_memory_region(change(0, MemoryRegionFlags::empty(), 0, GIB)).unwrap();
    let resolves = vm.host().resolves.load(Ordering::SeqCst);
    assert_eq!(vcpu.handle_fault(Gpa(0x12345678), Access::Write), Ok(Outcome::Resume));
    assert_eq!(vm.host().resolves.load(Ordering::SeqCst), resolves);
    assert!(translate(&vm, Gpa(0x12345678)).unwrap().writable);
}

each!(protecting_keeps_what_hardware_wrote, hardware_bits);
fn hardware_bits<F: Format>(vm: Arc<Vm<TestHost, F>>) {
    vm.set_user_memory_region(region(0, 0, MIB, 0x100, PageSize::Size4K)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.handle_fault(Gpa(0), Access::Read), Ok(Outcome::Resume));
    let before = translate(&vm, Gpa(0)).unwrap();
    let (cell, _) = crate::common::lowest_entry::<F>(vm.host(), vm.root(), Gpa(0).gfn());
    #[allow(unsafe_code)]
    // SAFETY: a live PTE, and no other thread is here.
    unsafe {
        cell.write(before.pte.0 | F::DIRTY)
    };
    vm.set_user_memory_region(change(0, MemoryRegionFlags::LOG_DIRTY_PAGES, 0, MIB)).unwrap();
    let after = translate(&vm, Gpa(0)).unwrap();
    assert_eq!(after.pte, Pte((before.pte.0 | F::DIRTY) & !F::WRITABLE));
}

each!(deleting_and_moving_zap_the_whole_slot, delete_and_move);
fn delete_and_move<F: Format>(vm: Arc<Vm<TestHost, F>>) {
    let memory = region(5, GIB, 4 * MIB + 0x3000, 0x100, PageSize::Size4K);
    let size_bytes = memory.memory_size;
    let dropped = Arc::clone(&memory.backing.as_ref().unwrap().dropped);
    vm.set_user_memory_region(memory).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    for page in 0..size_bytes / 4096 {
        assert_eq!(vcpu.handle_fault(Gpa(GIB + page * 4096), Access::Write), Ok(Outcome::Resume));
    }
    assert_eq!(vm.host().live_tables(), usize::from(F::ROOT_LEVEL.0) + 2);
    // Up by one page: the ranges overlap.
    vm.set_user_memory_region(change(5, MemoryRegionFlags::empty(), GIB + 4096, size_bytes)).unwrap();
    assert_eq!((translate(&vm, Gpa(GIB)), translate(&vm, Gpa(GIB + 4096))), (None, None));
    let flushes = vm.host().flushes.lock().unwrap().clone();
    assert!(flushes.len() == 1 && flushes[0].iter().any(|range| range.contains(Gpa(GIB).gfn())));
    assert_eq!(vcpu.handle_fault(Gpa(GIB + 4096), Access::Write), Ok(Outcome::Resume));
    assert_eq!(translate(&vm, Gpa(GIB + 4096)).unwrap().pfn, Pfn(0x100));
    assert_eq!(
        vcpu.handle_fault(Gpa(GIB), Access::Write),
        Ok(Outcome::Exit(Exit::Mmio { gpa: Gpa(GIB), access: Access::Write }))
    );
    vm.set_user_memory_region(change(5, MemoryRegionFlags::empty(), 0, 0)).unwrap();
    assert_eq!(translate(&vm, Gpa(GIB + 4096)), None);
    assert_eq!(
        vm.set_user_memory_region(change(5, MemoryRegionFlags::empty(), 0, 0)),
        Err(SlotError::NoSuchSlot { slot: 5 })
    );
    vm.reclaim();
    assert!(dropped.load(Ordering::SeqCst));
    drop(vcpu);
    assert_eq!(vm.stats().live_tables(), vm.host().live_tables() as u64);
    // Page-table pages that hold only parts of the memslot's block stay linked. Deleting a memslot
    // as large as their blocks unlinks them.
    vm.set_user_memory_region(region(5, 0, F::ROOT_LEVEL.size_bytes().max(1 << 39), 0, PageSize::Size4K)).unwrap();
    vm.set_user_memory_region(change(5, MemoryRegionFlags::empty(), 0, 0)).unwrap();
    vm.reclaim();
    assert_eq!((vm.stats().live_tables(), vm.host().live_tables()), (1, 1));
}
