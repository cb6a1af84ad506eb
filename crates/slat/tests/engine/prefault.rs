//! Prefaults, and queries of the page tables: on one thread, then beside a memslot that comes and
//! goes, as in KVM's pre_fault_memory_test.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::common::trap::trap_vm;
use crate::common::{Frame, GIB, MIB, Writes, assert_no_table_is_left, change, each, region, translate, vm};
use slat::baselines::Locking;
use slat::error::FaultError;
use slat::format::{Format, LeafAttributes};
use slat::tables::Translation;
use slat::{
    Access, Exit, Gfn, GfnRange, Gpa, Host, Level, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Pfn,
    Vcpu, Vm,
};

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();

/// The translation of each page from `gpa` on.
fn mapped<H: Host, F: Format>(vm: &Vm<H, F>, gpa: u64, nr_pages: u64) -> Vec<Option<Translation>> {
    let reader = vm.read_tables().unwrap();
    let mut cursor = reader.cursor();
    (0..nr_pages).map(|page| cursor.query(Gpa(gpa + page * PAGE_SIZE))).collect()
}

fn maps_all_sizes<F: Format>(locking: Locking) {
    for (size, nr_resolves) in [(PageSize::Size4K, 2048), (PageSize::Size2M, 4), (PageSize::Size1G, 1)] {
        let vm = vm::<F>(locking);
        // The frames are aligned like the guest's pages.
        vm.set_user_memory_region(region(0, 4 * MIB, 8 * MIB, 4 * MIB / PAGE_SIZE, size)).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        assert_eq!(vcpu.pre_fault_memory(Gpa(4 * MIB), 8 * MIB, Access::Read), Ok(8 * MIB));
        assert_eq!(vm.host().resolves.load(Ordering::SeqCst), nr_resolves, "{size:?}");
        let leaf = if size == PageSize::Size4K { size } else { PageSize::Size2M };
        for (page, found) in mapped(&vm, 4 * MIB, 2048).into_iter().enumerate() {
            let expected = Translation {
                pfn: Pfn(4 * MIB / PAGE_SIZE + page as u64),
                size: leaf,
                writable: true,
                accessed: false,
                dirty: !F::HAS_DIRTY_BIT,
                attributes: LeafAttributes::default(),
            };
            assert_eq!(found, Some(expected), "page {page}");
        }
        assert_eq!(mapped(&vm, 4 * MIB - PAGE_SIZE, 1), [None]);
        assert_eq!(mapped(&vm, 12 * MIB, 1), [None]);
        // What is mapped stays, and is not resolved again.
        assert_eq!(vcpu.pre_fault_memory(Gpa(4 * MIB), 8 * MIB, Access::Write), Ok(8 * MIB));
        assert_eq!(vm.host().resolves.load(Ordering::SeqCst), nr_resolves);
        assert_eq!(vcpu.handle_fault(Gpa(5 * MIB), Access::Write), Ok(Outcome::Resume));
        assert_eq!(vm.stats().spurious, 1);
    }
}
each!(a_range_is_mapped_with_the_largest_leaves, maps_all_sizes);

/// Contiguous frames that are not aligned like the guest's pages: small leaves, and yet few
/// resolves.
fn asks_once_for_contiguous_frames<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    vm.set_user_memory_region(region(0, 0, 8 * MIB, 0x1_0003, PageSize::Size2M)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.pre_fault_memory(Gpa(0), 8 * MIB, Access::Read), Ok(8 * MIB));
    // Each block of frames ends in the middle of a block of pages.
    assert_eq!(vm.host().resolves.load(Ordering::SeqCst), 8);
    for (page, found) in mapped(&vm, 0, 2048).into_iter().enumerate() {
        assert_eq!(found.map(|t| (t.pfn, t.size)), Some((Pfn(0x1_0003 + page as u64), PageSize::Size4K)));
    }
}
each!(contiguous_frames_are_resolved_once, asks_once_for_contiguous_frames);

/// Huge pages fill a page-table page as small ones do; the prefault ends at a missing one.
fn fills_a_table_of_huge_pages<F: Format>(locking: Locking) {
    for (size, nr_backed, nr_resolves) in
        [(PageSize::Size2M, 1024, 1024), (PageSize::Size1G, 1024, 4), (PageSize::Size2M, 700, 702)]
    {
        let vm = vm::<F>(locking);
        // Shifted by 2 MiB against the guest's pages: no larger leaf fits.
        let mut huge = region(0, 0, 2 * GIB, 0, size);
        huge.backing = Some(std::sync::Arc::new(crate::common::TestBacking::new(512, nr_backed * 512, size)));
        vm.set_user_memory_region(huge).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        assert_eq!(vcpu.pre_fault_memory(Gpa(0), 2 * GIB, Access::Write), Ok(nr_backed * 2 * MIB));
        let stats = vm.stats();
        // One for each GiB, and those above.
        let nr_tables = 2 + u64::from(F::ROOT_LEVEL.0 - Level::L2M.0);
        assert_eq!((stats.installed_2m, stats.installed_4k, stats.live_tables()), (nr_backed, 0, nr_tables));
        // Once by the filling that found nothing, once by the fault that returned the error.
        assert_eq!(vm.host().resolves.load(Ordering::SeqCst), nr_resolves, "{size:?}, {nr_backed}");
        let reader = vm.read_tables().unwrap();
        let mut cursor = reader.cursor();
        for page in (0..1024 * 512).step_by(511) {
            let found = cursor.query(Gfn(page).gpa()).map(|found| (found.pfn, found.size, found.writable));
            let expected = (page < nr_backed * 512).then_some((Pfn(512 + page), PageSize::Size2M, true));
            assert_eq!(found, expected, "page {page}");
        }
    }
}
each!(a_table_of_huge_pages_is_filled_at_once, fills_a_table_of_huge_pages);

fn stops_where_memory_ends<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    let mut vcpu = vm.create_vcpu().unwrap();
    // 2 MiB and a page, as in KVM's test; one page more than the memslot has.
    let size_bytes = 2 * MIB + PAGE_SIZE;
    vm.set_user_memory_region(region(0, 2 * MIB, size_bytes, 7, PageSize::Size4K)).unwrap();
    assert_eq!(vcpu.pre_fault_memory(Gpa(2 * MIB), size_bytes + PAGE_SIZE, Access::Read), Ok(size_bytes));
    let behind = Gpa(2 * MIB + size_bytes);
    assert_eq!(vcpu.pre_fault_memory(behind, PAGE_SIZE, Access::Read), Err(FaultError::NoMemslot { gpa: behind }));
    assert_eq!(vcpu.pre_fault_memory(Gpa(0), PAGE_SIZE, Access::Read), Err(FaultError::NoMemslot { gpa: Gpa(0) }));

    // A backing that is shorter than its memslot, in the middle of a block.
    let mut short = region(1, GIB, 4 * MIB, 0, PageSize::Size4K);
    short.backing = Some(std::sync::Arc::new(crate::common::TestBacking::new(0x5000, 700, PageSize::Size4K)));
    vm.set_user_memory_region(short).unwrap();
    assert_eq!(vcpu.pre_fault_memory(Gpa(GIB), 4 * MIB, Access::Read), Ok(700 * PAGE_SIZE));
    let gone = Gpa(GIB + 700 * PAGE_SIZE);
    assert_eq!(vcpu.pre_fault_memory(gone, PAGE_SIZE, Access::Read), Err(FaultError::BackingGone { gpa: gone }));
    assert_eq!(mapped(&vm, GIB, 1024).iter().flatten().count(), 700);
}
each!(a_prefault_stops_where_memory_ends, stops_where_memory_ends);

fn refuses<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    let mut read_only = region(0, 0, MIB, 7, PageSize::Size4K);
    read_only.flags = MemoryRegionFlags::READONLY;
    vm.set_user_memory_region(read_only).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    let mut pre_fault = |gpa, size_bytes, access| vcpu.pre_fault_memory(Gpa(gpa), size_bytes, access);
    assert_eq!(pre_fault(1, PAGE_SIZE, Access::Read), Err(FaultError::UnalignedAddress { gpa: Gpa(1) }));
    assert_eq!(pre_fault(0, 0, Access::Read), Err(FaultError::BadSize { size_bytes: 0 }));
    assert_eq!(pre_fault(0, 4095, Access::Read), Err(FaultError::BadSize { size_bytes: 4095 }));
    assert_eq!(pre_fault(0, PAGE_SIZE, Access::Write), Err(FaultError::NoMemslot { gpa: Gpa(0) }));
    assert_eq!(pre_fault(0, u64::MAX - 4095, Access::Read), Ok(MIB));
    let too_high = Gpa(1 << F::GPA_BITS);
    let expected = Err(FaultError::AddressTooHigh { gpa: too_high, gpa_bits: F::GPA_BITS });
    assert_eq!(pre_fault(too_high.0, PAGE_SIZE, Access::Read), expected);
    let held = vm.invalidate_range(GfnRange::new(Gfn(5), 1)).unwrap();
    assert_eq!(pre_fault(4 * PAGE_SIZE, 3 * PAGE_SIZE, Access::Read), Ok(PAGE_SIZE));
    assert_eq!(pre_fault(5 * PAGE_SIZE, PAGE_SIZE, Access::Read), Err(FaultError::Busy { gpa: Gpa(5 * PAGE_SIZE) }));
    drop(held);
    assert_eq!(pre_fault(5 * PAGE_SIZE, PAGE_SIZE, Access::Read), Ok(PAGE_SIZE));
    vm.host().fail_after(0);
    let reader = vm.read_tables().unwrap();
    assert_eq!(reader.cursor().query(too_high), None);
    assert_eq!(reader.cursor().query(Gpa(u64::MAX)), None);
}
each!(bad_ranges_are_refused, refuses);

/// Without memory for page-table pages nothing changes, and each page-table page that there is
/// memory for is filled.
fn survives_without_memory<F: Format>(locking: Locking) {
    for nr_tables in 0..8 {
        let vm = vm::<F>(locking);
        vm.set_user_memory_region(region(0, 0, 8 * MIB, 0, PageSize::Size4K)).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        vm.host().fail_after(nr_tables);
        // Those above, and one for each block.
        let nr_above = u64::from(F::ROOT_LEVEL.0 - Level::L2M.0);
        let expected = match (nr_tables as u64).saturating_sub(nr_above) * 2 * MIB {
            0 => Err(FaultError::OutOfMemory),
            size_bytes => Ok(size_bytes.min(8 * MIB)),
        };
        assert_eq!(vcpu.pre_fault_memory(Gpa(0), 8 * MIB, Access::Read), expected, "{nr_tables} tables");
        vm.host().never_fail();
        assert_eq!(vcpu.pre_fault_memory(Gpa(0), 8 * MIB, Access::Read), Ok(8 * MIB));
        drop(vcpu);
        vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
        assert_no_table_is_left(&vm);
    }
}
each!(a_prefault_without_memory_for_tables_maps_what_it_can, survives_without_memory);

fn logs_prefaults<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    let mut logging = region(0, 0, 4 * MIB, 0, PageSize::Size2M);
    logging.flags = LOG;
    vm.set_user_memory_region(logging).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    let mut bitmap = [0; 16];
    assert_eq!(vcpu.pre_fault_memory(Gpa(0), 2 * MIB, Access::Read), Ok(2 * MIB));
    // Huge until a write.
    assert!(mapped(&vm, 0, 512).iter().all(|found| found.is_some_and(|t| !t.writable && t.size == PageSize::Size2M)));
    assert_eq!(vm.get_dirty_log(0, &mut bitmap), Ok(0));
    assert_eq!(vcpu.pre_fault_memory(Gpa(PAGE_SIZE), 4 * MIB - PAGE_SIZE, Access::Write), Ok(4 * MIB - PAGE_SIZE));
    assert_eq!(vm.get_dirty_log(0, &mut bitmap), Ok(1023));
    assert_eq!(bitmap[0], !1);
    assert!(mapped(&vm, 0, 1024).iter().all(|found| found.is_some_and(|t| !t.writable && t.size == PageSize::Size4K)));
}
each!(pages_prefaulted_for_writing_are_logged, logs_prefaults);

fn maps_a_list<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    vm.set_user_memory_region(region(0, 0, 8 * MIB, 0x1000, PageSize::Size4K)).unwrap();
    vm.set_user_memory_region(region(1, 8 * MIB, MIB, 0x8000, PageSize::Size4K)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    // Every third page of both memslots, one of them twice, out of order, and not at the starts of
    // pages.
    let mut pages: Vec<Gpa> = (0..9 * MIB).step_by(3 * PAGE_SIZE as usize).map(|gpa| Gpa(gpa + 8)).collect();
    pages.insert(40, pages[39]);
    pages.swap(100, 700);
    assert_eq!(vcpu.pre_fault_pages(&pages, Access::Read), Ok(pages.len()));
    for (page, found) in mapped(&vm, 0, 9 * 256).into_iter().enumerate() {
        let first_pfn = if page < 2048 { 0x1000 } else { 0x8000 - 2048 };
        let expected = page.is_multiple_of(3).then_some((Pfn(first_pfn + page as u64), true, false));
        assert_eq!(found.map(|t| (t.pfn, t.writable, t.accessed)), expected, "page {page}");
    }
    assert_eq!(vcpu.pre_fault_pages(&[], Access::Read), Ok(0));
    // A page that cannot be mapped ends the list, and is an error if it is the first.
    let list = [Gpa(PAGE_SIZE), Gpa(2 * PAGE_SIZE), Gpa(9 * MIB), Gpa(4 * PAGE_SIZE)];
    assert_eq!(vcpu.pre_fault_pages(&list, Access::Write), Ok(2));
    assert_eq!(vcpu.pre_fault_pages(&list[2..], Access::Write), Err(FaultError::NoMemslot { gpa: Gpa(9 * MIB) }));
    assert_eq!(mapped(&vm, 4 * PAGE_SIZE, 1), [None]);
    let too_high = Gpa(u64::MAX);
    let expected = Err(FaultError::AddressTooHigh { gpa: too_high, gpa_bits: F::GPA_BITS });
    assert_eq!(vcpu.pre_fault_pages(&[too_high], Access::Read), expected);
    assert_eq!(vcpu.pre_fault_pages(&[Gpa(0), too_high], Access::Read), Ok(1));
    let held = vm.invalidate_range(GfnRange::new(Gfn(4), 1)).unwrap();
    assert_eq!(vcpu.pre_fault_pages(&[Gpa(5 * PAGE_SIZE), Gpa(4 * PAGE_SIZE)], Access::Read), Ok(1));
    assert_eq!(
        vcpu.pre_fault_pages(&[Gpa(4 * PAGE_SIZE)], Access::Read),
        Err(FaultError::Busy { gpa: Gpa(4 * PAGE_SIZE) })
    );
    drop(held);
    assert_eq!(vcpu.pre_fault_pages(&[Gpa(4 * PAGE_SIZE)], Access::Read), Ok(1));
}
each!(a_list_of_pages_is_mapped, maps_a_list);

/// A reader's cursor in a page-table page observes what is mapped after that page was unlinked.
fn reader_goes_on<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    vm.set_user_memory_region(region(0, 0, 4 * MIB, 0x1000, PageSize::Size4K)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.pre_fault_memory(Gpa(0), 2 * MIB, Access::Read), Ok(2 * MIB));
    let reader = vm.read_tables().unwrap();
    let mut cursor = reader.cursor();
    assert!(cursor.query(Gpa(5 * PAGE_SIZE)).is_some());
    drop(vm.invalidate_range(GfnRange::new(Gfn(0), 512)).unwrap());
    assert_eq!(cursor.query(Gpa(6 * PAGE_SIZE)), None);
    assert_eq!(vcpu.pre_fault_memory(Gpa(0), 2 * MIB, Access::Read), Ok(2 * MIB));
    assert_eq!(cursor.query(Gpa(7 * PAGE_SIZE)).map(|found| found.pfn), Some(Pfn(0x1007)));
}
each!(a_reader_observes_what_is_mapped_after_its_table_was_unlinked, reader_goes_on);

fn logs_a_list<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    let mut logging = region(0, 0, 2 * MIB, 0, PageSize::Size4K);
    logging.flags = LOG;
    vm.set_user_memory_region(logging).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    let pages: Vec<Gpa> = (0..64).map(|page| Gpa(page * 2 * PAGE_SIZE)).collect();
    assert_eq!(vcpu.pre_fault_pages(&pages[..32], Access::Read), Ok(32));
    let mut bitmap = [0; 8];
    assert_eq!(vm.get_dirty_log(0, &mut bitmap), Ok(0));
    assert_eq!(vcpu.pre_fault_pages(&pages, Access::Write), Ok(64));
    assert_eq!(vm.get_dirty_log(0, &mut bitmap), Ok(64));
    assert_eq!(bitmap, [0x5555_5555_5555_5555, 0x5555_5555_5555_5555, 0, 0, 0, 0, 0, 0]);
}
each!(a_list_prefaulted_for_writing_is_logged, logs_a_list);

/// KVM's pre_fault_memory_test: the memslot is deleted and made again beside it. Sizes add up, and
/// only the allowed errors occur.
fn beside_a_slot_that_comes_and_goes<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    let size_bytes = 2 * MIB + PAGE_SIZE;
    let make = |first_pfn| {
        vm.set_user_memory_region(region(3, GIB, size_bytes, first_pfn, PageSize::Size4K)).unwrap();
    };
    make(0);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut vcpu = vm.create_vcpu().unwrap();
                let mut done = 0;
                while !is_over.load(Ordering::SeqCst) {
                    match vcpu.pre_fault_memory(Gpa(GIB + done), size_bytes - done, Access::Read) {
                        Ok(more) => {
                            assert!(more > 0 && more <= size_bytes - done && more.is_multiple_of(PAGE_SIZE));
                            done = (done + more) % size_bytes;
                        }
                        Err(FaultError::Busy { gpa } | FaultError::NoMemslot { gpa }) => {
                            assert_eq!(gpa, Gpa(GIB + done))
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
        for life in 1..200 {
            vm.set_user_memory_region(change(3, NO_FLAGS, 0, 0)).unwrap();
            assert!(mapped(&vm, GIB, 513).iter().all(Option::is_none), "left over");
            make(life << 20);
            thread::yield_now();
            let of_this_life = life << 20..(life << 20) + 513;
            assert!(mapped(&vm, GIB, 513).iter().flatten().all(|found| of_this_life.contains(&found.pfn.0)));
        }
        is_over.store(true, Ordering::SeqCst);
    });
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.pre_fault_memory(Gpa(GIB), size_bytes, Access::Read), Ok(size_bytes));
    vm.set_user_memory_region(change(3, NO_FLAGS, 0, 0)).unwrap();
    let exit = Outcome::Exit(Exit::Mmio { gpa: Gpa(GIB), access: Access::Read });
    assert_eq!(vcpu.handle_fault(Gpa(GIB), Access::Read), Ok(exit));
    drop(vcpu);
    assert_no_table_is_left(&vm);
}
each!(a_prefault_beside_a_slot_that_comes_and_goes, beside_a_slot_that_comes_and_goes);

each!(a_prefault_maps_no_page_behind_its_slot, nothing_behind_the_slot);
fn nothing_behind_the_slot<F: Format>(locking: Locking) {
    // The host has a block of 2 MiB, half of which is in the memslot.
    let vm = vm::<F>(locking);
    vm.set_user_memory_region(region(0, 0, MIB, 512, PageSize::Size2M)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.pre_fault_memory(Gpa(0), 2 * MIB, Access::Read), Ok(MIB));
    assert!(translate(&vm, Gpa(MIB)).is_none());
}

each!(a_prefault_fills_no_table_over_a_range_in_flight, nothing_in_a_held_range);
fn nothing_in_a_held_range<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    vm.set_user_memory_region(region(0, 0, 4 * MIB, 512, PageSize::Size4K)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    // Without a page-table page that would keep the page apart.
    vm.host().fail_after(0);
    let guard = vm.invalidate_range(GfnRange::new(Gfn(3), 1)).unwrap();
    vm.host().never_fail();
    assert_eq!(vcpu.pre_fault_memory(Gpa(0), 2 * MIB, Access::Read), Ok(3 * PAGE_SIZE));
    assert!(translate(&vm, Gfn(3).gpa()).is_none());
    drop(guard);
    assert_eq!(vcpu.pre_fault_memory(Gpa(0), 2 * MIB, Access::Read), Ok(2 * MIB));
}

/// Maps `nr_pages` from frame `first` on. Checks that the reported length is exactly what is
/// mapped, and that the error is `error` for the first page that is not. Returns how many are
/// mapped.
fn pre_fault_exactly<H: Host, F: Format>(
    vcpu: &mut Vcpu<H, F>,
    (first, nr_pages): (u64, u64),
    access: Access,
    error: impl FnOnce(Gpa) -> FaultError,
) -> u64 {
    let gpa = Gfn(first).gpa();
    let result = vcpu.pre_fault_memory(gpa, nr_pages * PAGE_SIZE, access);
    let done = result.unwrap_or(0) / PAGE_SIZE;
    if let Ok(size_bytes) = result {
        assert!(size_bytes > 0 && size_bytes.is_multiple_of(PAGE_SIZE));
    }
    let found = mapped(vcpu.vm(), gpa.0, nr_pages);
    let is_done = |found: &Option<Translation>| found.is_some_and(|t| access != Access::Write || t.writable);
    assert_eq!(found.iter().take_while(|found| is_done(found)).count() as u64, done, "of {nr_pages} from {gpa}");
    if done < nr_pages {
        let next = Gfn(first + done).gpa();
        let error = error(next);
        assert_eq!(result.map_or_else(Err, |_| vcpu.pre_fault_memory(next, PAGE_SIZE, access)), Err(error));
    }
    done
}

/// Each k-th page-table page is missing. The ends of memslots are not aligned, and frames lie
/// differently from the guest's pages.
fn every_table_may_be_missing<F: Format>(locking: Locking) {
    for (first, nr_pages) in [(0, 2048), (5, 1600), (509, 3), (511, 1026), (700, 100)] {
        for offset in [0, 1, 511, 512, 513] {
            for size in [PageSize::Size4K, PageSize::Size2M, PageSize::Size1G] {
                for (k, access) in (0..9).flat_map(|k| [(k, Access::Read), (k, Access::Write)]) {
                    let vm = vm::<F>(locking);
                    let first_pfn = 0x4_0000 + first + offset;
                    let memory = region(0, first * PAGE_SIZE, nr_pages * PAGE_SIZE, first_pfn, size);
                    vm.set_user_memory_region(memory).unwrap();
                    let mut vcpu = vm.create_vcpu().unwrap();
                    vm.host().fail_after(k);
                    let done = pre_fault_exactly(&mut vcpu, (first, nr_pages), access, |_| FaultError::OutOfMemory);
                    assert!(k < 8 || done == nr_pages, "{done} pages with {k} tables");
                    vm.host().never_fail();
                    assert_eq!(pre_fault_exactly(&mut vcpu, (first, nr_pages), access, |_| unreachable!()), nr_pages);
                    let nr_leaves = vm.stats().pages_4k() + 512 * vm.stats().pages_2m();
                    assert_eq!(nr_leaves, nr_pages, "no page more");
                    for (page, found) in (0..).zip(mapped(&vm, first * PAGE_SIZE, nr_pages)) {
                        let found = found.unwrap();
                        let block = (first + page) / 512 * 512;
                        let is_huge = size != PageSize::Size4K
                            && offset.is_multiple_of(512)
                            && (first..=first + nr_pages - 512.min(nr_pages)).contains(&block)
                            && nr_pages >= 512;
                        let expected = if is_huge { PageSize::Size2M } else { PageSize::Size4K };
                        assert_eq!((found.pfn, found.size), (Pfn(first_pfn + page), expected), "page {page}");
                        assert!(found.writable && !found.accessed && found.dirty != F::HAS_DIRTY_BIT);
                    }
                }
            }
        }
    }
}
each!(a_prefault_without_memory_for_tables_reports_how_far_it_mapped, every_table_may_be_missing);

/// What ends a prefault at a page in the middle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    /// The backing is shorter.
    Backing,
    /// It has no frame for that page, or for those behind it.
    Hole,
    /// The memslot ends, and none follows.
    Slot,
    /// A read-only memslot begins.
    ReadOnly,
    /// The page is being invalidated.
    Held,
    /// The same, without memory for a page-table page that would keep it apart.
    HeldWithoutMemory,
}

fn ends_in_the_midst<F: Format>(locking: Locking) {
    const ALL: [End; 6] = [End::Backing, End::Hole, End::Slot, End::ReadOnly, End::Held, End::HeldWithoutMemory];
    for end in ALL {
        for first in [0, 3] {
            for at in [1, 5, 508, 509, 511, 512, 513, 700, 1021, 1024, 1200] {
                // With contiguous frames, and without.
                for (size, offset) in [(PageSize::Size4K, 0), (PageSize::Size2M, 7), (PageSize::Size1G, 512)] {
                    let vm = vm::<F>(locking);
                    let nr_pages = if matches!(end, End::Slot | End::ReadOnly) { at } else { 2000 };
                    let first_pfn = 0x4_0000 + first + offset;
                    let memory = region(0, first * PAGE_SIZE, nr_pages * PAGE_SIZE, first_pfn, size);
                    let backing = std::sync::Arc::clone(memory.backing.as_ref().unwrap());
                    vm.set_user_memory_region(memory).unwrap();
                    let gfn = Gfn(first + at);
                    let mut held = None;
                    match end {
                        End::Backing => {
                            let mut short = region(0, first * PAGE_SIZE, 2000 * PAGE_SIZE, 0, size);
                            short.backing =
                                Some(std::sync::Arc::new(crate::common::TestBacking::new(first_pfn, at, size)));
                            vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
                            vm.set_user_memory_region(short).unwrap();
                        }
                        End::Hole => {
                            let frame = Frame { pfn: 0x9999, writes: Writes::Refused };
                            backing.frames.write().unwrap().insert(at, frame);
                        }
                        End::Slot => {}
                        End::ReadOnly => {
                            let memory = region(1, gfn.gpa().0, MIB, 0x8_0000, size);
                            let flags = MemoryRegionFlags::READONLY;
                            vm.set_user_memory_region(MemoryRegion { flags, ..memory }).unwrap();
                        }
                        End::Held | End::HeldWithoutMemory => {
                            if end == End::HeldWithoutMemory {
                                vm.host().fail_after(0);
                            }
                            held = Some(vm.invalidate_range(GfnRange::new(gfn, 3)).unwrap());
                            vm.host().never_fail();
                        }
                    }
                    let mut vcpu = vm.create_vcpu().unwrap();
                    let error = |gpa| match end {
                        End::Backing | End::Hole => FaultError::BackingGone { gpa },
                        End::Slot | End::ReadOnly => FaultError::NoMemslot { gpa },
                        End::Held | End::HeldWithoutMemory => FaultError::Busy { gpa },
                    };
                    let done = pre_fault_exactly(&mut vcpu, (first, 2000), Access::Write, error);
                    // Where this host answers with blocks, it promises frames behind the end of its
                    // memory.
                    assert!(
                        done == at || (done > at && end == End::Backing && size != PageSize::Size4K),
                        "{end:?} {size:?}: {done} pages of {at}"
                    );
                    drop(held);
                }
            }
        }
    }
}
each!(a_prefault_that_ends_early_reports_how_far_it_mapped, ends_in_the_midst);

/// The memslot is deleted, or a page invalidated, while the host resolves the second 2 MiB.
fn changed_in_the_midst<F: Format>(locking: Locking) {
    for deletes in [false, true] {
        let vm = trap_vm::<F>(locking);
        vm.set_user_memory_region(region(0, 0, 8 * MIB, 0x4_0000, PageSize::Size4K)).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        assert_eq!(vcpu.pre_fault_memory(Gpa(0), 2 * MIB, Access::Read), Ok(2 * MIB));
        let keeper = vm.host().traps().in_resolve.set();
        let (result, held) = thread::scope(|scope| {
            let vcpu = &mut vcpu;
            let filling = scope.spawn(move || vcpu.pre_fault_memory(Gpa(0), 8 * MIB, Access::Read));
            keeper.arrived.recv().unwrap();
            let held = if deletes {
                vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
                None
            } else {
                Some(vm.invalidate_range(GfnRange::new(Gfn(700), 2)).unwrap())
            };
            keeper.go.send(()).unwrap();
            (filling.join().unwrap(), held)
        });
        let nr_mapped = mapped(&vm, 0, 2048).iter().flatten().count();
        if deletes {
            assert_eq!((result, nr_mapped), (Ok(2 * MIB), 0));
        } else {
            assert_eq!((result, nr_mapped), (Ok(700 * PAGE_SIZE), 700));
            drop(held);
            let rest = 8 * MIB - 700 * PAGE_SIZE;
            assert_eq!(vcpu.pre_fault_memory(Gpa(700 * PAGE_SIZE), rest, Access::Read), Ok(rest));
        }
    }
}
each!(an_invalidation_during_a_prefault_ends_it_there, changed_in_the_midst);

/// Existing page-table pages are filled, 64 pages at a time. Between the steps the engine asks the
/// host whether to yield.
fn fills_up_tables<F: Format>(locking: Locking) {
    for always_yields in [false, true] {
        let vm = trap_vm::<F>(locking);
        vm.host().always_yields.store(always_yields, Ordering::SeqCst);
        vm.set_user_memory_region(region(0, 0, 8 * MIB, 0x4_0001, PageSize::Size1G)).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        for page in [0, 511, 700, 1024, 2047] {
            assert_eq!(vcpu.handle_fault(Gfn(page).gpa(), Access::Read), Ok(Outcome::Resume));
        }
        let resolves = vm.host().resolves.load(Ordering::SeqCst);
        vm.host().traps().forget_steps();
        assert_eq!(vcpu.pre_fault_memory(Gpa(0), 8 * MIB, Access::Write), Ok(8 * MIB));
        assert!((0..).zip(mapped(&vm, 0, 2048)).all(|(page, t)| t.is_some_and(|t| t.pfn.0 == 0x4_0001 + page)));
        assert_eq!((vm.stats().installed_4k, vm.stats().pages_4k()), (2048, 2048));
        assert_eq!(vm.host().resolves.load(Ordering::SeqCst) - resolves, 32);
        assert!(vm.host().traps().longest_step.load(Ordering::SeqCst) < 64);
    }
}
each!(existing_tables_are_filled, fills_up_tables);

/// KVM's pre_fault_memory_test, to the byte: 2 MiB, then a page with one more than there is, then
/// behind the end.
fn as_kvm_does<F: Format>(locking: Locking) {
    for size in [PageSize::Size4K, PageSize::Size2M] {
        let vm = vm::<F>(locking);
        let mut vcpu = vm.create_vcpu().unwrap();
        vm.set_user_memory_region(region(10, GIB, 2 * MIB + PAGE_SIZE, 0x4_0000, size)).unwrap();
        let mut left = |offset: u64, size_bytes: u64| {
            let done = vcpu.pre_fault_memory(Gpa(GIB + offset), size_bytes, Access::Read)?;
            Ok(size_bytes - done)
        };
        assert_eq!(left(0, 2 * MIB), Ok(0));
        assert_eq!(left(2 * MIB, 2 * PAGE_SIZE), Ok(PAGE_SIZE));
        let behind = GIB + 2 * MIB + PAGE_SIZE;
        assert_eq!(left(2 * MIB + PAGE_SIZE, PAGE_SIZE), Err(FaultError::NoMemslot { gpa: Gpa(behind) }));
        assert_eq!(mapped(&vm, GIB, 514).iter().flatten().count(), 513);
    }
}
each!(prefault_results_match_kvm, as_kvm_does);
