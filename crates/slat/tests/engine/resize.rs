//! A memslot that grows or shrinks at its end: what stays mapped and what goes, what its dirty log
//! and its userfault bitmap have then, what is refused; and guests, harvests and invalidations
//! beside it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::guest::{Guest, Stop};
use crate::common::log::pages_of;
use crate::common::{GIB, MIB, TestBacking, TestHost, assert_no_table_is_left, change, each, region, translate, vm};
use slat::baselines::Locking;
use slat::dirty::ManualProtect;
use slat::error::{LogError, SlotError};
use slat::format::Format;
use slat::slots::{MemoryFaultFlags, UserfaultBitmap, UserfaultWords};
use slat::{
    Access, Config, Exit, Gfn, GfnRange, Gpa, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Vcpu, Vm,
};

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();
const USERFAULT: MemoryRegionFlags = MemoryRegionFlags::USERFAULT;
/// The memslot, and the first frame of its backing, which has [`MOST`] bytes.
const START: u64 = GIB;
const FIRST_PFN: u64 = 0x10_0000;
const MOST: u64 = 16 * MIB;

/// Memslot 0 of `size` bytes, with a backing that has more.
fn slot(size: u64, flags: MemoryRegionFlags, max_size: PageSize) -> MemoryRegion<Arc<TestBacking>> {
    MemoryRegion { memory_size: size, flags, ..region(0, START, MOST, FIRST_PFN, max_size) }
}

fn resize<F: Format>(vm: &Vm<TestHost, F>, flags: MemoryRegionFlags, size: u64) -> Result<(), SlotError> {
    vm.set_user_memory_region(change(0, flags, START, size))
}

fn gpa(page: u64) -> Gpa {
    Gpa(START + page * PAGE_SIZE)
}

fn pages_in(size: u64) -> u64 {
    size / PAGE_SIZE
}

/// Writes page `page`, which must be of the memslot.
fn write<F: Format>(vcpu: &mut Vcpu<TestHost, F>, page: u64) {
    assert_eq!(vcpu.handle_fault(gpa(page), Access::Write), Ok(Outcome::Resume), "page {page}");
    let found = translate(vcpu.vm(), gpa(page)).unwrap();
    assert_eq!((found.pfn.0, found.writable), (FIRST_PFN + page, true));
}

/// Accesses page `page`, which must not be of the memslot.
fn exits<F: Format>(vcpu: &mut Vcpu<TestHost, F>, page: u64) {
    let exit = Exit::Mmio { gpa: gpa(page), access: Access::Read };
    assert_eq!(vcpu.handle_fault(gpa(page), Access::Read), Ok(Outcome::Exit(exit)), "page {page}");
    assert_eq!(translate(vcpu.vm(), gpa(page)), None);
}

fn log<F: Format>(vm: &Vm<TestHost, F>, size: u64) -> Vec<u64> {
    let mut bitmap = vec![0; pages_in(size).div_ceil(64) as usize];
    let nr_pages = vm.get_dirty_log(0, &mut bitmap).unwrap();
    let pages = pages_of(&bitmap, 0);
    assert_eq!(pages.len() as u64, nr_pages);
    pages
}

fn delete<F: Format>(vm: &Vm<TestHost, F>) {
    vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
    assert_no_table_is_left(vm);
}

each!(a_memslot_that_grows_keeps_what_is_mapped, grow);
fn grow<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    vm.set_user_memory_region(slot(4 * MIB, NO_FLAGS, PageSize::Size2M)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    write(&mut vcpu, 0);
    write(&mut vcpu, 1023);
    exits(&mut vcpu, 1024);
    let before = (translate(&vm, gpa(0)), translate(&vm, gpa(1023)), vm.stats().zapped, vm.host().nr_flushes());
    // By one page, and then to the end of the backing: blocks that were partly outside are whole.
    for size in [4 * MIB + PAGE_SIZE, MOST] {
        resize(&vm, NO_FLAGS, size).unwrap();
        let after = (translate(&vm, gpa(0)), translate(&vm, gpa(1023)), vm.stats().zapped, vm.host().nr_flushes());
        assert_eq!(after, before);
        write(&mut vcpu, pages_in(size) - 1);
        exits(&mut vcpu, pages_in(size));
    }
    write(&mut vcpu, 1024);
    drop(vcpu);
    delete(&vm);
}

each!(a_memslot_that_shrinks_loses_its_end_alone, shrink);
fn shrink<F: Format>(locking: Locking) {
    for max_size in [PageSize::Size4K, PageSize::Size2M] {
        let vm = vm::<F>(locking);
        vm.set_user_memory_region(slot(8 * MIB, NO_FLAGS, max_size)).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        let mapped = [0, 600, 1023, 1024, 1030, 2047];
        mapped.iter().for_each(|&page| write(&mut vcpu, page));
        // In the midst of a block, then by one page, then to a border, then to one page.
        for end in [1031, 1030, 1024, 1] {
            resize(&vm, NO_FLAGS, end * PAGE_SIZE).unwrap();
            for page in mapped {
                let found = translate(&vm, gpa(page)).map(|found| found.pfn.0);
                assert_eq!(found, (page < end).then_some(FIRST_PFN + page), "page {page} of {end}");
            }
            for page in [end, end + 1, 2047] {
                exits(&mut vcpu, page);
            }
            write(&mut vcpu, end - 1);
        }
        // Another memslot takes the place.
        vm.set_user_memory_region(region(1, START + PAGE_SIZE, MIB, 0x50_0000, PageSize::Size4K)).unwrap();
        assert_eq!(vcpu.handle_fault(gpa(1), Access::Write), Ok(Outcome::Resume));
        assert_eq!(translate(&vm, gpa(1)).unwrap().pfn.0, 0x50_0000);
        vm.set_user_memory_region(change(1, NO_FLAGS, 0, 0)).unwrap();
        drop(vcpu);
        delete(&vm);
    }
}

each!(a_size_that_cannot_be_is_refused_and_changes_nothing, refused);
fn refused<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    vm.set_user_memory_region(slot(4 * MIB, LOG, PageSize::Size4K)).unwrap();
    vm.set_user_memory_region(region(1, START + 8 * MIB, MIB, 0x50_0000, PageSize::Size4K)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    write(&mut vcpu, 3);
    let refused = |flags, gpa, size, error| {
        let before = (vm.stats().zapped, vm.host().nr_flushes());
        assert_eq!(vm.set_user_memory_region(change(0, flags, gpa, size)), Err(error));
        assert_eq!((vm.stats().zapped, vm.host().nr_flushes()), before);
    };
    let overlap = SlotError::Overlap { slot: 0, gpa: Gpa(START), other: 1 };
    refused(LOG, START, 8 * MIB + PAGE_SIZE, overlap);
    refused(NO_FLAGS, START, 512 * MIB, overlap);
    refused(LOG, START, 4 * MIB + 1, SlotError::UnalignedSize { slot: 0, memory_size: 4 * MIB + 1 });
    refused(LOG, START, u64::MAX << 12, SlotError::AddressTooHigh { gpa: Gpa(START), gpa_bits: F::GPA_BITS });
    // Moved by the same call.
    for size in [MIB, 5 * MIB] {
        refused(LOG, 2 * START, size, SlotError::SizeFixed { slot: 0, memory_size: size });
    }
    refused(LOG | MemoryRegionFlags::READONLY, START, MIB, SlotError::ReadOnlyFixed { slot: 0 });
    refused(LOG | USERFAULT, START, MIB, SlotError::NoUserfaultBitmap { slot: 0 });
    // The last size that fits beside the other memslot.
    assert_eq!(log(&vm, 4 * MIB), [3]);
    resize(&vm, LOG, 8 * MIB).unwrap();
    // The other cannot grow into this one, nor past the end of the space.
    let end = (1 << F::GPA_BITS) - START - 8 * MIB;
    let too_high = SlotError::AddressTooHigh { gpa: Gpa(START + 8 * MIB), gpa_bits: F::GPA_BITS };
    assert_eq!(vm.set_user_memory_region(change(1, NO_FLAGS, START + 8 * MIB, end + PAGE_SIZE)), Err(too_high));
    vm.set_user_memory_region(change(1, NO_FLAGS, START + 8 * MIB, end)).unwrap();
    vm.set_user_memory_region(change(1, NO_FLAGS, 0, 0)).unwrap();
    drop(vcpu);
    delete(&vm);
}

each!(a_guest_memfd_and_pinned_memory_keep_their_size, kept_sizes);
fn kept_sizes<F: Format>(locking: Locking) {
    for flags in [MemoryRegionFlags::GUEST_MEMFD, MemoryRegionFlags::PINNED] {
        let vm = vm::<F>(locking);
        vm.set_user_memory_region(slot(MIB, flags, PageSize::Size4K)).unwrap();
        for size in [PAGE_SIZE, 2 * MIB] {
            assert_eq!(resize(&vm, flags, size), Err(SlotError::SizeFixed { slot: 0, memory_size: size }));
        }
        delete(&vm);
    }
}

each!(a_memslot_that_logs_is_dirty_as_a_whole_after_a_resize, logging);
fn logging<F: Format>(locking: Locking) {
    for manual_protect in [ManualProtect::Disabled, ManualProtect::Enabled, ManualProtect::InitiallySet] {
        let config = Config::default().with_locking(locking).with_manual_protect(manual_protect);
        let vm = Arc::new(Vm::<TestHost, F>::new(TestHost::default(), config).unwrap());
        vm.set_user_memory_region(slot(MIB, LOG, PageSize::Size4K)).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        // Takes the log, and write-protects its pages.
        let harvest = |size| {
            let pages = log(&vm, size);
            if manual_protect != ManualProtect::Disabled {
                let nr_pages = pages_in(size);
                let all = vec![u64::MAX; nr_pages.div_ceil(64) as usize];
                vm.clear_dirty_log(0, 0, nr_pages, &all).unwrap();
            }
            pages
        };
        harvest(MIB);
        write(&mut vcpu, 3);
        for size in [2 * MIB + PAGE_SIZE, 65 * PAGE_SIZE, 5 * PAGE_SIZE, MIB] {
            resize(&vm, LOG, size).unwrap();
            let short = LogError::BitmapTooShort { slot: 0, words: 0, needed: pages_in(size).div_ceil(64) as usize };
            assert_eq!(vm.get_dirty_log(0, &mut []), Err(short));
            assert_eq!(harvest(size), Vec::from_iter(0..pages_in(size)));
            // All is protected by now: writes are found, and nothing else is reported.
            assert_eq!(harvest(size), [0_u64; 0]);
            write(&mut vcpu, 3);
            write(&mut vcpu, pages_in(size) - 1);
            assert_eq!(harvest(size), [3, pages_in(size) - 1]);
            write(&mut vcpu, 2);
        }
        drop(vcpu);
        delete(&vm);
    }
}

each!(an_old_log_has_the_new_size_when_logging_begins_again, old_log);
fn old_log<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    vm.set_user_memory_region(slot(MIB, LOG, PageSize::Size4K)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    write(&mut vcpu, 7);
    // The log ends with the resize, before it, begins with it, and after it.
    resize(&vm, NO_FLAGS, 2 * MIB).unwrap();
    write(&mut vcpu, 511);
    resize(&vm, LOG, 2 * MIB).unwrap();
    write(&mut vcpu, 511);
    assert_eq!(log(&vm, 2 * MIB), [511]);
    write(&mut vcpu, 8);
    resize(&vm, NO_FLAGS, 2 * MIB).unwrap();
    resize(&vm, LOG, 3 * MIB).unwrap();
    assert_eq!(log(&vm, 3 * MIB), [0_u64; 0]);
    write(&mut vcpu, 7);
    write(&mut vcpu, 767);
    assert_eq!(log(&vm, 3 * MIB), [7, 767]);
    drop(vcpu);
    delete(&vm);
}

each!(a_userfault_bitmap_must_have_the_bits_of_what_is_added, userfault);
fn userfault<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    // Two words: 128 pages. The pages from 64 on have their bits set.
    let words: Arc<[AtomicU64; 2]> = Arc::new([AtomicU64::new(0), AtomicU64::new(u64::MAX)]);
    struct Words(Arc<[AtomicU64; 2]>);
    impl UserfaultWords for Words {
        fn words(&self) -> &[AtomicU64] {
            &*self.0
        }
    }
    let bitmap = UserfaultBitmap::new(Arc::new(Words(Arc::clone(&words))), PageSize::Size4K);
    let size = 64 * PAGE_SIZE;
    vm.set_user_memory_region(MemoryRegion {
        userfault_bitmap: Some(bitmap),
        ..slot(size, USERFAULT, PageSize::Size4K)
    })
    .unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    write(&mut vcpu, 63);
    let short = SlotError::BitmapTooShort { slot: 0, words: 2, needed: 3 };
    assert_eq!(resize(&vm, USERFAULT, 129 * PAGE_SIZE), Err(short));
    resize(&vm, USERFAULT, 128 * PAGE_SIZE).unwrap();
    assert!(translate(&vm, gpa(63)).is_some());
    let exit = Exit::MemoryFault { flags: MemoryFaultFlags::USERFAULT, gpa: gpa(127), size: PAGE_SIZE };
    assert_eq!(vcpu.handle_fault(gpa(127), Access::Write), Ok(Outcome::Exit(exit)));
    words[1].store(0, Ordering::SeqCst);
    write(&mut vcpu, 127);
    // Shrunk and grown again, the page has its bit as before.
    resize(&vm, USERFAULT, 100 * PAGE_SIZE).unwrap();
    words[1].store(u64::MAX, Ordering::SeqCst);
    exits(&mut vcpu, 127);
    assert_eq!(vm.rescan_userfault(0, 0, 100), Ok(36));
    resize(&vm, USERFAULT, 128 * PAGE_SIZE).unwrap();
    assert_eq!(vcpu.handle_fault(gpa(127), Access::Write), Ok(Outcome::Exit(exit)));
    drop(vcpu);
    delete(&vm);
}

each!(a_shrinking_memslot_is_used_by_no_cpu_beside_all_other_calls, beside);
fn beside<F: Format>(locking: Locking) {
    const RUN: Duration = Duration::from_millis(300);
    const GUESTS: u64 = 4;
    /// The memslot always has these pages, and at most so many.
    const KEPT: u64 = 700;
    const PAGES: u64 = 1400;
    let vm = vm::<F>(locking);
    vm.set_user_memory_region(slot(PAGES * PAGE_SIZE, LOG, PageSize::Size2M)).unwrap();
    // Pages from this on are gone: stored after the call that has removed them, and before the next
    // that adds some.
    let (gone_from, stop) = (AtomicU64::new(PAGES), AtomicBool::new(false));
    let nr_resizes = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for index in 0..GUESTS {
            let (mut guest, gone_from, stop) = (Guest::new(&vm), &gone_from, &stop);
            scope.spawn(move || {
                let _stop = Stop(stop);
                let mut page = index * 331;
                while !stop.load(Ordering::SeqCst) {
                    page = (page + 97) % PAGES;
                    let result = guest.try_access(gpa(page), Access::Write, |found| {
                        // Before the access is over, no shrinking call returns.
                        assert!(page < gone_from.load(Ordering::SeqCst), "page {page} is used");
                        assert_eq!(found.pfn.0, FIRST_PFN + page);
                    });
                    match result {
                        Ok(()) | Err(None) => {}
                        Err(Some(exit)) => {
                            assert_eq!(exit, Exit::Mmio { gpa: gpa(page), access: Access::Write });
                            assert!(page >= KEPT, "page {page} is always there");
                        }
                    }
                }
            });
        }
        scope.spawn(|| {
            let _stop = Stop(&stop);
            let mut bitmap = [0; PAGES.div_ceil(64) as usize];
            while !stop.load(Ordering::SeqCst) {
                match vm.get_dirty_log(0, &mut bitmap) {
                    Ok(_) | Err(LogError::NoSuchSlot { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
                drop(vm.invalidate_range(GfnRange::new(Gfn(START / PAGE_SIZE + KEPT - 9), 20)).unwrap());
                std::thread::yield_now();
            }
        });
        let _stop = Stop(&stop);
        let begin = Instant::now();
        let mut seed = 1_u64;
        while begin.elapsed() < RUN && !stop.load(Ordering::SeqCst) {
            seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            let nr_pages = KEPT + (seed >> 33) % (PAGES - KEPT) + 1;
            gone_from.fetch_max(nr_pages, Ordering::SeqCst);
            resize(&vm, LOG, nr_pages * PAGE_SIZE).unwrap();
            gone_from.store(nr_pages, Ordering::SeqCst);
            nr_resizes.fetch_add(1, Ordering::Relaxed);
        }
    });
    assert!(nr_resizes.load(Ordering::Relaxed) > 1);
    delete(&vm);
}
