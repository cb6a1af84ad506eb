//! Invalid ranges of a memslot's pages, for the dirty log and for the userfault bitmap. Each call
//! refuses them alike, before anything changes.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::common::{TestHost, each, lazily_splitting, region};
use slat::baselines::Locking;
use slat::dirty::ManualProtect;
use slat::error::{LogError, SlotError};
use slat::format::Format;
use slat::slots::UserfaultBitmap;
use slat::{Access, Gfn, Gpa, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Vm};

const FIRST: u64 = 512;
/// One word of the log, and one page.
const PAGES: u64 = 65;
const DIRTY: [u64; 2] = [1, 64];

fn world<F: Format>(locking: Locking, manual_protect: ManualProtect) -> Vm<TestHost, F> {
    let config = lazily_splitting(locking).with_manual_protect(manual_protect);
    let vm = Arc::new(Vm::<TestHost, F>::new(TestHost::default(), config).unwrap());
    let words: Arc<Vec<AtomicU64>> = Arc::new((0..2).map(|_| AtomicU64::new(0)).collect());
    let flags = MemoryRegionFlags::LOG_DIRTY_PAGES | MemoryRegionFlags::USERFAULT;
    vm.set_user_memory_region(MemoryRegion {
        flags,
        userfault_bitmap: Some(UserfaultBitmap::new(words, PageSize::Size4K)),
        ..region(0, FIRST * PAGE_SIZE, PAGES * PAGE_SIZE, 0x1000, PageSize::Size4K)
    })
    .unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    for page in DIRTY {
        assert_eq!(vcpu.handle_fault(Gpa((FIRST + page) * PAGE_SIZE), Access::Write), Ok(Outcome::Resume));
    }
    drop(vcpu);
    Arc::into_inner(vm).unwrap()
}

/// The errors of the calls for `nr_pages` pages from `first_page` on: get, clear, mark; rescan.
/// Nothing may change.
fn refused<F: Format>(vm: &Vm<TestHost, F>, first_page: u64, nr_pages: u64) -> ([LogError; 3], SlotError) {
    let before = (vm.nr_marked_dirty(), vm.stats().flushes, vm.stats().protected);
    let mut bitmap = [0x55aa; 4];
    let get = vm.get_dirty_log_range(0, first_page, nr_pages, &mut bitmap).unwrap_err();
    assert_eq!(bitmap, [0x55aa; 4], "the bitmap was written");
    let clear = vm.clear_dirty_log(0, first_page, nr_pages, &[u64::MAX; 4]).unwrap_err();
    let mark = vm.mark_dirty(0, first_page, nr_pages).unwrap_err();
    let rescan = vm.rescan_userfault(0, first_page, nr_pages).unwrap_err();
    assert_eq!((vm.nr_marked_dirty(), vm.stats().flushes, vm.stats().protected), before, "{first_page}, {nr_pages}");
    ([get, clear, mark], rescan)
}

each!(ranges_that_have_no_page_or_reach_behind_the_slot_are_refused_alike, bad_ranges);
fn bad_ranges<F: Format>(locking: Locking) {
    for manual_protect in [ManualProtect::Disabled, ManualProtect::Enabled] {
        let vm = world::<F>(locking, manual_protect);
        for first_page in [0, 1, 63, 64, 65, 66, 1 << 40, u64::MAX] {
            let start = Gfn(FIRST.saturating_add(first_page));
            let empty = LogError::EmptyRange { start, end: start };
            let empty_slot_range = SlotError::EmptyRange { start, end: start };
            assert_eq!(refused(&vm, first_page, 0), ([empty; 3], empty_slot_range), "{first_page}");
        }
        for (first_page, nr_pages) in [
            (0, PAGES + 1),
            (0, u64::MAX),
            (1, PAGES),
            (64, 2),
            (64, 64),
            (PAGES, 1),
            (PAGES, u64::MAX),
            (128, 64),
            (1 << 63, 1 << 63),
            (u64::MAX, 1),
            (u64::MAX, u64::MAX),
        ] {
            let past_log = LogError::RangePastEnd { slot: 0, first_page, nr_pages, slot_pages: PAGES };
            let past_slot = SlotError::RangePastEnd { slot: 0, first_page, nr_pages, slot_pages: PAGES };
            assert_eq!(refused(&vm, first_page, nr_pages), ([past_log; 3], past_slot));
        }
        // Whole words only, for the log.
        for (first_page, nr_pages) in [(0, 1), (0, 63), (1, 64), (63, 2), (1, 1)] {
            let unaligned = Err(LogError::UnalignedRange { slot: 0, first_page, nr_pages });
            assert_eq!(vm.get_dirty_log_range(0, first_page, nr_pages, &mut [0; 4]), unaligned);
            assert_eq!(vm.clear_dirty_log(0, first_page, nr_pages, &[u64::MAX; 4]), unaligned);
        }
        for (first_page, nr_pages, words) in [(0, PAGES, 1), (0, 64, 0), (64, 1, 0)] {
            let needed = (nr_pages as usize).div_ceil(64);
            let too_short = Err(LogError::BitmapTooShort { slot: 0, words, needed });
            assert_eq!(vm.get_dirty_log_range(0, first_page, nr_pages, &mut [0; 4][..words]), too_short);
            assert_eq!(vm.clear_dirty_log(0, first_page, nr_pages, &[u64::MAX; 4][..words]), too_short);
        }
        for page in [PAGES, u64::MAX] {
            let past_end = LogError::RangePastEnd { slot: 0, first_page: page, nr_pages: 1, slot_pages: PAGES };
            assert_eq!(vm.is_marked_dirty(0, page), Err(past_end));
        }
        // All is still there.
        assert_eq!(vm.get_dirty_log_range(0, 64, 1, &mut [0; 1]), Ok(1));
        assert_eq!(vm.get_dirty_log_range(0, 0, 64, &mut [0; 1]), Ok(1));
    }
}
