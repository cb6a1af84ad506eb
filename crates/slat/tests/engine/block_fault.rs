//! The first fault in a block of 2 MiB that the host has as a whole, overtaken while the host answers:
//! what is installed is what the host would answer now, the host is asked no more often than that
//! takes, and no write is lost from the log.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crate::common::answers::{answer_vm, frame_of, new_flags, slot};
use crate::common::hooked::{Hooked, at_look, was_called};
use crate::common::log::{LOG, NO_FLAGS, dirty_trackings, pages_of};
use crate::common::{TestHost, change, region};
use slat::format::{Format, Hardware};
use slat::host::Resolved;
use slat::tables::Translation;
use slat::{
    Access, Config, Exit, Gfn, GfnRange, Gpa, Host, Level, MemoryRegion, Outcome, PAGE_SIZE, PageSize, Pfn, Vm,
};

const BIG: u64 = 512;
const NR_PAGES: u64 = 4 * BIG;
const SIZE_BYTES: u64 = NR_PAGES * PAGE_SIZE;
/// The page that faults, in the second block.
const PAGE: Gfn = Gfn(BIG + 7);
/// What is added to a frame for each answer before: the host has moved the block.
const MOVED: u64 = 1 << 21;

type TestVm<F> = Vm<TestHost, F>;

/// The first block is mapped, so that there is a page-table page for the others.
fn vm<F: Format>(config: Config) -> Arc<TestVm<F>> {
    let vm = answer_vm::<F>(config, Hardware::default(), SIZE_BYTES, NO_FLAGS);
    vm.host().answer(|gfn, _| Ok(Resolved::memory(frame_of(gfn), PageSize::Size2M)));
    assert_eq!(vm.create_vcpu().unwrap().handle_fault(Gpa(0), Access::Read), Ok(Outcome::Resume));
    assert_eq!(vm.stats().pages_2m(), 1);
    vm
}

/// A write to [`PAGE`], while whose first answer `meanwhile` runs. Each answer has the block at
/// another place. Returns the outcome and the number of answers.
fn write_beside<F: Format>(
    vm: &Arc<TestVm<F>>,
    meanwhile: impl Fn(&TestVm<F>) + Send + Sync + 'static,
) -> (Outcome, u64) {
    let nr_answers = Arc::new(AtomicU64::new(0));
    let (counter, weak): (_, Weak<TestVm<F>>) = (Arc::clone(&nr_answers), Arc::downgrade(vm));
    vm.host().answer(move |gfn, _| {
        let nr_before = counter.fetch_add(1, Ordering::SeqCst);
        if nr_before == 0 {
            meanwhile(&weak.upgrade().unwrap());
        }
        Ok(Resolved::memory(Pfn(frame_of(gfn).0 + nr_before * MOVED), PageSize::Size2M))
    });
    let outcome = vm.create_vcpu().unwrap().handle_fault(PAGE.gpa(), Access::Write).unwrap();
    (outcome, nr_answers.load(Ordering::SeqCst))
}

fn mapped<H: Host, F: Format>(vm: &Vm<H, F>) -> Option<Translation> {
    vm.translate(PAGE.gpa()).unwrap()
}

fn logged_pages<H: Host, F: Format>(vm: &Vm<H, F>) -> Vec<u64> {
    let mut bitmap = vec![0; NR_PAGES.div_ceil(64) as usize];
    vm.get_dirty_log(0, &mut bitmap).unwrap();
    pages_of(&bitmap, 0)
}

#[test]
fn an_answer_before_an_invalidation_is_not_installed() {
    let ranges = [(PAGE.0, 1), (BIG, 1), (2 * BIG - 1, 1), (BIG, BIG), (BIG - 1, 2), (0, NR_PAGES)];
    slat::for_each_format!(F => {
        for (first, nr_pages) in ranges {
            let vm = vm::<F>(Config::default());
            let range = GfnRange::new(Gfn(first), nr_pages);
            let (outcome, nr_answers) = write_beside(&vm, move |vm| drop(vm.invalidate_range(range).unwrap()));
            assert_eq!((outcome, nr_answers), (Outcome::Resume, 2), "{range:?}");
            let found = mapped(&vm).unwrap();
            assert_eq!((found.pfn.0, found.writable), (frame_of(PAGE).0 + MOVED, true), "{range:?}");
            assert_eq!(vm.stats().retries, 1, "{range:?}");
        }
    });
}

#[test]
fn nothing_is_installed_in_a_range_in_flight() {
    slat::for_each_format!(F => {
        // A page beside that of the fault: its own may be mapped, the block may not.
        for (first, nr_answers) in [(PAGE.0, 0), (PAGE.0 + 1, 1)] {
            let vm = vm::<F>(Config::default());
            let held = vm.invalidate_range(GfnRange::new(Gfn(first), 1)).unwrap();
            assert_eq!(write_beside(&vm, |_| {}), (Outcome::Resume, nr_answers));
            assert_eq!(mapped(&vm).map(|found| found.size), (nr_answers > 0).then_some(PageSize::Size4K));
            assert_eq!(vm.translate(Gfn(first).gpa()).unwrap(), None);
            drop(held);
        }
    });
}

#[test]
fn an_answer_stays_good_whatever_is_retired_elsewhere() {
    slat::for_each_format!(F => {
        let vm = vm::<F>(Config::default());
        vm.host().answer(|gfn, _| Ok(Resolved::memory(frame_of(gfn), PageSize::Size4K)));
        let elsewhere = GfnRange::new(Gfn(3 * BIG), BIG);
        let mut vcpu = vm.create_vcpu().unwrap();
        let size_bytes = BIG * PAGE_SIZE;
        assert_eq!(vcpu.pre_fault_memory(elsewhere.start.gpa(), size_bytes, Access::Write), Ok(size_bytes));
        let nr_before = vm.stats().live_tables();
        assert_eq!(
            write_beside(&vm, move |vm| drop(vm.invalidate_range(elsewhere).unwrap())),
            (Outcome::Resume, 1)
        );
        assert_eq!(mapped(&vm).map(|found| (found.pfn, found.size)), Some((frame_of(PAGE), PageSize::Size2M)));
        assert_eq!(vm.stats().retries, 0);
        vm.reclaim();
        assert_eq!(vm.stats().live_tables(), nr_before - 1, "a page-table page was unlinked");
    });
}

#[test]
fn a_log_that_begins_during_the_answer_has_the_page() {
    slat::for_each_format!(F => {
        for tracking in dirty_trackings::<F>() {
            let vm = vm::<F>(Config::default().with_dirty_tracking(tracking));
            let (outcome, _) = write_beside(&vm, |vm| {
                let changed = MemoryRegion { backing: None, ..slot(0, Gpa(0), SIZE_BYTES, LOG) };
                vm.set_user_memory_region(changed).unwrap();
            });
            assert_eq!(outcome, Outcome::Resume);
            let found = mapped(&vm).unwrap();
            let is_logged = logged_pages(&vm).contains(&PAGE.0);
            assert!(found.writable && is_logged, "{tracking:?}: {found:?}, in the log: {is_logged}");
        }
    });
}

#[test]
fn a_memslot_that_is_deleted_during_the_answer_has_no_leaf() {
    slat::for_each_format!(F => {
        let vm = vm::<F>(Config::default());
        let (outcome, nr_answers) = write_beside(&vm, |vm| {
            let deleted = MemoryRegion { backing: None, ..slot(0, Gpa(0), 0, NO_FLAGS) };
            vm.set_user_memory_region(deleted).unwrap();
        });
        assert_eq!(outcome, Outcome::Exit(Exit::Mmio { gpa: PAGE.gpa(), access: Access::Write }));
        assert_eq!((nr_answers, mapped(&vm)), (1, None));
    });
}

#[test]
fn a_host_that_has_less_is_asked_once() {
    // How far the frames are from where a huge leaf could map them.
    let answers = [
        (0, PageSize::Size4K, PageSize::Size4K),
        (1, PageSize::Size2M, PageSize::Size4K),
        (1, PageSize::Size1G, PageSize::Size4K),
        (0, PageSize::Size1G, PageSize::Size2M),
    ];
    slat::for_each_format!(F => {
        for (distance, max_size, size) in answers {
            let frame = move |gfn| Pfn(frame_of(gfn).0 + distance);
            for flags in [NO_FLAGS, LOG] {
                let vm = vm::<F>(Config::default());
                let nr_answers = Arc::new(AtomicU64::new(0));
                let counter = Arc::clone(&nr_answers);
                vm.host().answer(move |gfn, _| {
                    counter.fetch_add(1, Ordering::SeqCst);
                    Ok(Resolved::memory(frame(gfn), max_size))
                });
                let mut vcpu = vm.create_vcpu().unwrap();
                new_flags(&vcpu, SIZE_BYTES, flags);
                assert_eq!(vcpu.handle_fault(PAGE.gpa(), Access::Write), Ok(Outcome::Resume));
                let found = mapped(&vm).unwrap();
                assert_eq!(found.pfn, frame(PAGE));
                if flags == NO_FLAGS {
                    assert_eq!(found.size, size, "{max_size:?}");
                }
                assert_eq!((nr_answers.load(Ordering::SeqCst), vm.stats().retries), (1, 0));
            }
        }
    });
}

// The hook before the exchange is in the check of transitions, which release builds do not have.
#[cfg(debug_assertions)]
#[test]
fn a_log_that_begins_right_before_the_exchange_has_the_page() {
    let vm: Arc<Vm<TestHost, Hooked>> = Arc::new(Vm::new(TestHost::default(), Config::default()).unwrap());
    vm.set_user_memory_region(region(0, 0, SIZE_BYTES, 0, PageSize::Size2M)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.handle_fault(Gpa(0), Access::Write), Ok(Outcome::Resume));
    let meanwhile = {
        let vm = Arc::clone(&vm);
        let begin = move || vm.set_user_memory_region(change(0, LOG, 0, SIZE_BYTES)).unwrap();
        move || std::thread::spawn(begin).join().unwrap()
    };
    at_look(Level::L2M, 1, meanwhile);
    assert_eq!(vcpu.handle_fault(PAGE.gpa(), Access::Write), Ok(Outcome::Resume));
    assert!(was_called(), "the hook was not reached");
    let found = mapped(&vm).unwrap();
    let is_logged = logged_pages(&vm).contains(&PAGE.0);
    assert!(found.writable && is_logged, "{found:?}, in the log: {is_logged}");
}
