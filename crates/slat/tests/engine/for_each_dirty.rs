//! `for_each_dirty`: the dirty log as runs of pages, in bounded memory. No mark is lost where the
//! callback stops or panics.

use std::collections::BTreeSet;
use std::ops::{ControlFlow, Range};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::common::{TestHost, change, each, lazily_splitting, region};
use slat::baselines::Locking;
use slat::dirty::{DirtyTracking, ManualProtect};
use slat::error::LogError;
use slat::format::Format;
use slat::{Access, Config, Gpa, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Vcpu, Vm};

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
/// Not at a multiple of 64 pages, nor of 2 MiB.
const FIRST: u64 = 515;
const PAGES: u64 = 3000;

/// A memslot that logs, with 4 KiB pages.
fn world<F: Format>(config: Config, first: u64, nr_pages: u64) -> (Arc<Vm<TestHost, F>>, Vcpu<TestHost, F>) {
    let vm = Arc::new(Vm::<TestHost, F>::new(TestHost::default(), config).unwrap());
    let memory = region(0, first * PAGE_SIZE, nr_pages * PAGE_SIZE, 0x1000, PageSize::Size4K);
    vm.set_user_memory_region(MemoryRegion { flags: LOG, ..memory }).unwrap();
    let vcpu = vm.create_vcpu().unwrap();
    (vm, vcpu)
}

fn write<F: Format>(vcpu: &mut Vcpu<TestHost, F>, first: u64, pages: impl IntoIterator<Item = u64>) {
    for page in pages {
        assert_eq!(vcpu.handle_fault(Gpa((first + page) * PAGE_SIZE), Access::Write), Ok(Outcome::Resume));
    }
}

fn runs<F: Format>(vm: &Vm<TestHost, F>, first_page: u64, nr_pages: u64) -> Vec<Range<u64>> {
    let mut runs = Vec::new();
    let passed = vm.for_each_dirty(0, first_page, nr_pages, |run| {
        runs.push(run);
        ControlFlow::Continue(())
    });
    assert_eq!(passed, Ok(runs.iter().map(|run| run.end - run.start).sum()));
    assert!(runs.iter().all(|run| !run.is_empty()) && runs.is_sorted_by(|one, next| one.end <= next.start));
    runs
}

fn pages(runs: Vec<Range<u64>>) -> Vec<u64> {
    runs.into_iter().flatten().collect()
}

each!(the_runs_are_what_was_written, written);
fn written<F: Format>(locking: Locking) {
    for first in [FIRST, 512] {
        let (vm, mut vcpu) = world::<F>(lazily_splitting(locking), first, PAGES);
        assert_eq!(runs(&vm, 0, PAGES), [], "nothing was written");
        let scattered = (0..PAGES).filter(|page| page % 37 == 5);
        let patterns: [Vec<u64>; 5] = [
            vec![0],
            vec![PAGES - 1],
            [62, 63, 64, 65, 128, 191, 192].into(),
            scattered.collect(),
            (0..PAGES).collect(),
        ];
        for written in patterns {
            // Twice: the pages are protected anew.
            for _ in 0..2 {
                write(&mut vcpu, first, written.iter().copied());
                let flushes = vm.host().nr_flushes();
                assert_eq!(pages(runs(&vm, 0, PAGES)), written);
                assert!(vm.host().nr_flushes() > flushes, "pages are passed on before they are flushed");
                assert_eq!(runs(&vm, 0, PAGES), []);
            }
        }
        write(&mut vcpu, first, [62, 63, 64, 65, 128, 191, 192]);
        assert_eq!(runs(&vm, 64, 128), [64..66, 128..129, 191..192], "only the range");
        assert_eq!(runs(&vm, 0, PAGES), [62..64, 192..193]);
    }
}

each!(a_callback_that_stops_loses_nothing, stops);
fn stops<F: Format>(locking: Locking) {
    let (vm, mut vcpu) = world::<F>(lazily_splitting(locking), FIRST, PAGES);
    let written: Vec<u64> = (0..PAGES).filter(|page| page % 3 != 0).collect();
    let nr_runs = runs_of(&written).len();
    for stop_at in [1, 2, 64, 700, nr_runs] {
        write(&mut vcpu, FIRST, written.iter().copied());
        let mut passed = Vec::new();
        let nr_pages = vm.for_each_dirty(0, 0, PAGES, |run| {
            passed.push(run);
            if passed.len() == stop_at { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert_eq!(passed.len(), stop_at);
        let mut all = pages(passed);
        assert_eq!(nr_pages, Ok(all.len() as u64));
        // The guest writes all of it meanwhile: what was passed on is reported once more.
        let rest = pages(runs(&vm, 0, PAGES));
        all.extend(&rest);
        assert_eq!(all, written, "each page is passed on once");
        write(&mut vcpu, FIRST, [1]);
        assert_eq!(pages(runs(&vm, 0, PAGES)), [1], "pages that were marked again are protected");
    }
}

fn runs_of(pages: &[u64]) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for &page in pages {
        match runs.last_mut() {
            Some(run) if run.end == page => run.end += 1,
            _ => runs.push(page..page + 1),
        }
    }
    runs
}

each!(a_callback_may_harvest, harvests);
fn harvests<F: Format>(locking: Locking) {
    // More than a harvest takes before it calls.
    const NR_PAGES: u64 = 20_000;
    let (vm, mut vcpu) = world::<F>(lazily_splitting(locking), FIRST, NR_PAGES);
    let written: Vec<u64> = (0..NR_PAGES).step_by(48).collect();
    for _ in 0..2 {
        write(&mut vcpu, FIRST, written.iter().copied());
        let (mut outer, mut inner) = (Vec::new(), Vec::new());
        let nr_pages = vm.for_each_dirty(0, 0, NR_PAGES, |run| {
            outer.push(run);
            inner.extend(runs(&vm, 0, NR_PAGES));
            ControlFlow::Continue(())
        });
        let (mut all, inner) = (pages(outer), pages(inner));
        assert_eq!(nr_pages, Ok(all.len() as u64));
        assert!(!inner.is_empty(), "the first callback comes before the last page was taken");
        all.extend(inner);
        all.sort_unstable();
        assert_eq!(all, written, "each page is passed on once");
    }
}

each!(a_callback_that_panics_loses_not_even_its_run, panics);
fn panics<F: Format>(locking: Locking) {
    let (vm, mut vcpu) = world::<F>(lazily_splitting(locking), FIRST, PAGES);
    let written: Vec<u64> = (0..PAGES).step_by(2).collect();
    for panic_at in [1, 100, written.len()] {
        write(&mut vcpu, FIRST, written.iter().copied());
        let mut passed = Vec::new();
        let result = catch_unwind(AssertUnwindSafe(|| {
            vm.for_each_dirty(0, 0, PAGES, |run| {
                assert!(passed.len() + 1 < panic_at, "the callback panics");
                passed.push(run);
                ControlFlow::Continue(())
            })
        }));
        assert!(result.is_err());
        let mut all = pages(passed);
        assert_eq!(all.len(), panic_at - 1);
        all.extend(pages(runs(&vm, 0, PAGES)));
        assert_eq!(all, written);
    }
}

each!(with_manual_protect_nothing_changes, manual_protect);
fn manual_protect<F: Format>(locking: Locking) {
    let config = lazily_splitting(locking).with_manual_protect(ManualProtect::Enabled);
    let (vm, mut vcpu) = world::<F>(config, FIRST, PAGES);
    let written: Vec<u64> = (0..PAGES).filter(|page| page % 5 < 2).collect();
    write(&mut vcpu, FIRST, written.iter().copied());
    let before = (vm.stats().protected, vm.stats().tables_protected, vm.host().nr_flushes());
    assert_eq!(pages(runs(&vm, 0, PAGES)), written);
    assert_eq!(vm.for_each_dirty(0, 0, PAGES, |_| ControlFlow::Break(())), Ok(2));
    assert_eq!(pages(runs(&vm, 0, PAGES)), written, "it was a copy");
    assert_eq!((vm.stats().protected, vm.stats().tables_protected, vm.host().nr_flushes()), before);
    assert_eq!(vm.clear_dirty_log(0, 0, 64, &[u64::MAX]), Ok(written.iter().filter(|&&page| page < 64).count() as u64));
    assert!(pages(runs(&vm, 0, PAGES)).into_iter().eq(written.into_iter().filter(|&page| page >= 64)));
}

each!(calls_that_cannot_be_done_say_why, refused);
fn refused<F: Format>(locking: Locking) {
    let (vm, mut vcpu) = world::<F>(lazily_splitting(locking), FIRST, PAGES);
    write(&mut vcpu, FIRST, [7]);
    let call = |slot, first_page, nr_pages| {
        vm.for_each_dirty(slot, first_page, nr_pages, |_| unreachable!("the callback of a call that is refused"))
    };
    assert_eq!(call(1, 0, 64), Err(LogError::NoSuchSlot { slot: 1 }));
    for (first_page, nr_pages) in [(0, 1), (1, 64), (63, 1), (0, PAGES - 1)] {
        assert_eq!(call(0, first_page, nr_pages), Err(LogError::UnalignedRange { slot: 0, first_page, nr_pages }));
    }
    for (first_page, nr_pages) in [(0, PAGES + 1), (PAGES, 1), (64, u64::MAX), (u64::MAX, u64::MAX)] {
        let past_end = LogError::RangePastEnd { slot: 0, first_page, nr_pages, slot_pages: PAGES };
        assert_eq!(call(0, first_page, nr_pages), Err(past_end));
    }
    assert!(matches!(call(0, 0, 0), Err(LogError::EmptyRange { .. })));
    assert_eq!(pages(runs(&vm, 0, PAGES)), [7]);
    vm.set_user_memory_region(change(0, MemoryRegionFlags::empty(), FIRST * PAGE_SIZE, PAGES * PAGE_SIZE)).unwrap();
    assert_eq!(call(0, 0, PAGES), Err(LogError::NotLogging { slot: 0 }));
    drop(vcpu);
    vm.enable_dirty_ring(256).unwrap();
    assert_eq!(call(0, 0, PAGES), Err(LogError::DirtyRingInUse { slot: 0 }));
}

each!(a_memslot_that_goes_in_the_callback_ends_the_call, deleted);
fn deleted<F: Format>(locking: Locking) {
    // More than one window, so that the harvest goes on after the callback.
    let nr_pages = 64 * 1024;
    let (vm, mut vcpu) = world::<F>(lazily_splitting(locking), 512, nr_pages);
    let written: Vec<u64> = (0..nr_pages).step_by(64).collect();
    write(&mut vcpu, 512, written.iter().copied());
    let mut passed = Vec::new();
    let result = vm.for_each_dirty(0, 0, nr_pages, |run| {
        if passed.is_empty() {
            vm.set_user_memory_region(change(0, MemoryRegionFlags::empty(), 512 * PAGE_SIZE, 0)).unwrap();
        }
        passed.push(run);
        ControlFlow::Continue(())
    });
    assert_eq!(result, Err(LogError::NoSuchSlot { slot: 0 }));
    let passed = pages(passed);
    assert!(passed.len() > 100 && passed.len() < written.len());
    assert_eq!(passed, written[..passed.len()], "what was taken is passed on all the same");
}

#[test]
fn dirty_bits_of_the_cpus_are_found() {
    let config = lazily_splitting(Locking::None).with_dirty_tracking(DirtyTracking::DirtyBit);
    let (vm, mut vcpu) = world::<slat::format::Npt>(config, FIRST, PAGES);
    let written = [0, 1, 2, 63, 64, 65, 700, 2999];
    for _ in 0..2 {
        write(&mut vcpu, FIRST, written);
        assert_eq!(runs(&vm, 0, PAGES), runs_of(&written));
    }
}

/// Threads write and harvest at once, some of them by a callback that stops. Each page that was
/// written is reported by one at least; after the end, the log is exact.
#[test]
fn beside_writers_and_other_harvests_no_page_is_missed() {
    const NR_ROUNDS: u64 = 40;
    let (vm, mut vcpu) = world::<slat::format::Ept>(Config::default(), 512, PAGES);
    let is_over = AtomicBool::new(false);
    let reported = thread::scope(|scope| {
        let harvesters = [0_u64, 1, 2].map(|kind| {
            let (vm, is_over) = (&vm, &is_over);
            scope.spawn(move || {
                let mut reported = BTreeSet::new();
                let mut bitmap = vec![0_u64; PAGES.div_ceil(64) as usize];
                while !is_over.load(Ordering::SeqCst) {
                    if kind == 0 {
                        vm.get_dirty_log(0, &mut bitmap).unwrap();
                        let is_set = |page: &u64| bitmap[*page as usize / 64] >> (page % 64) & 1 != 0;
                        reported.extend((0..PAGES).filter(is_set));
                        continue;
                    }
                    let mut left = 20 * kind;
                    vm.for_each_dirty(0, 0, PAGES, |run| {
                        reported.extend(run);
                        left -= 1;
                        if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
                    })
                    .unwrap();
                }
                reported
            })
        });
        let mut written = BTreeSet::new();
        for round in 0..NR_ROUNDS {
            let pages = (0..PAGES).filter(|page| page % NR_ROUNDS == round);
            write(&mut vcpu, 512, pages.clone());
            written.extend(pages);
        }
        is_over.store(true, Ordering::SeqCst);
        let mut reported: BTreeSet<u64> = BTreeSet::new();
        for harvester in harvesters {
            reported.extend(harvester.join().unwrap());
        }
        reported.extend(pages(runs(&vm, 0, PAGES)));
        assert_eq!(reported, written);
        reported
    });
    assert_eq!(reported.len() as u64, PAGES);
    assert_eq!(runs(&vm, 0, PAGES), []);
}
