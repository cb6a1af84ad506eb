//! Panics in what a caller supplies: the words of a userfault bitmap, a host's resolve. The panic
//! reaches the caller, and leaves nothing claimed, published or unflushed.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::common::{Call, MIB, TestHost, assert_no_table_is_left, change, each, region, translate, vm};
use slat::baselines::Locking;
use slat::error::{FaultError, LogError, SlotError};
use slat::format::Format;
use slat::slots::{MemoryFaultFlags, UserfaultBitmap, UserfaultWords};
use slat::{Access, Exit, GfnRange, Gpa, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Vm};

const USERFAULT: MemoryRegionFlags = MemoryRegionFlags::USERFAULT;
const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();
const SIZE: u64 = 8 * MIB;
const START: u64 = 2 * MIB;
const RESUMED: Result<Outcome, FaultError> = Ok(Outcome::Resume);

/// Words that panic at read number `panics_at`, counted from 1; never if that is 0.
struct Panicking {
    words: Vec<AtomicU64>,
    panics_at: AtomicU32,
}

impl Panicking {
    fn new(word: u64) -> Arc<Panicking> {
        let words = (0..SIZE / PAGE_SIZE / 64).map(|_| AtomicU64::new(word)).collect();
        Arc::new(Panicking { words, panics_at: AtomicU32::new(0) })
    }

    fn bitmap(self: &Arc<Self>) -> Option<UserfaultBitmap> {
        Some(UserfaultBitmap::new(Arc::<Panicking>::clone(self), PageSize::Size4K))
    }
}

impl UserfaultWords for Panicking {
    fn words(&self) -> &[AtomicU64] {
        let left = self.panics_at.load(Ordering::SeqCst);
        if left != 0 {
            self.panics_at.store(left - 1, Ordering::SeqCst);
            assert_ne!(left, 1, "the words are read");
        }
        &self.words
    }
}

fn panics<R>(call: impl FnOnce() -> R) {
    assert!(catch_unwind(AssertUnwindSafe(call)).is_err(), "it does not panic");
}

fn gpa(page: u64) -> Gpa {
    Gpa(START + page * PAGE_SIZE)
}

fn set_flags<F: Format>(
    vm: &Vm<TestHost, F>,
    flags: MemoryRegionFlags,
    userfault_bitmap: Option<UserfaultBitmap>,
) -> Result<(), SlotError> {
    vm.set_user_memory_region(MemoryRegion { userfault_bitmap, ..change(0, flags, START, SIZE) })
}

each!(userfault_words_that_panic_leave_their_slot_unchanged, words_that_panic);
fn words_that_panic<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    let words = Panicking::new(0);
    let memory = || region(0, START, SIZE, 0x400, PageSize::Size2M);
    // When the memslot is made.
    words.panics_at.store(1, Ordering::SeqCst);
    panics(|| {
        vm.set_user_memory_region(MemoryRegion { flags: USERFAULT, userfault_bitmap: words.bitmap(), ..memory() })
    });
    assert_eq!(set_flags(&vm, NO_FLAGS, None), Err(SlotError::NoBacking { slot: 0 }));
    vm.set_user_memory_region(memory()).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.handle_fault(gpa(0), Access::Write), RESUMED);
    // When the flag is turned on.
    words.panics_at.store(1, Ordering::SeqCst);
    panics(|| set_flags(&vm, USERFAULT, words.bitmap()));
    assert!(translate(&vm, gpa(0)).is_some(), "nothing was zapped");
    assert_eq!(set_flags(&vm, LOG, None), Ok(()));
    assert_eq!(set_flags(&vm, USERFAULT, words.bitmap()), Ok(()));
    // When it is moved.
    words.panics_at.store(1, Ordering::SeqCst);
    panics(|| vm.set_user_memory_region(change(0, USERFAULT, 64 * MIB, SIZE)));
    assert_eq!(vcpu.handle_fault(gpa(0), Access::Write), RESUMED);
    vm.set_user_memory_region(change(0, USERFAULT, 64 * MIB, SIZE)).unwrap();
    vm.set_user_memory_region(change(0, USERFAULT, START, SIZE)).unwrap();
    // In a fault.
    words.panics_at.store(1, Ordering::SeqCst);
    panics(|| vcpu.handle_fault(gpa(0), Access::Write));
    assert_eq!(vcpu.handle_fault(gpa(0), Access::Write), RESUMED);
    words.panics_at.store(1, Ordering::SeqCst);
    panics(|| vm.check_access(gpa(0), PAGE_SIZE));
    assert_eq!(vm.check_access(gpa(0), PAGE_SIZE), Ok(Outcome::Resume));
    drop(vcpu);
    vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
    assert_no_table_is_left(&vm);
}

each!(a_rescan_flushes_what_it_zapped_before_a_panic, rescan_that_panics);
fn rescan_that_panics<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    let words = Panicking::new(0);
    let memory = region(0, START, SIZE, 0x400, PageSize::Size2M);
    vm.set_user_memory_region(MemoryRegion { flags: USERFAULT, userfault_bitmap: words.bitmap(), ..memory }).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    for page in 0..SIZE / PAGE_SIZE {
        assert_eq!(vcpu.handle_fault(gpa(page), Access::Write), RESUMED);
    }
    // So many runs that it zaps some, and then reads again.
    words.words.iter().for_each(|word| word.store(0x5555_5555_5555_5555, Ordering::Release));
    for panics_at in [100, 200, 1000] {
        vm.host().flushes.lock().unwrap().clear();
        words.panics_at.store(panics_at, Ordering::SeqCst);
        panics(|| vm.rescan_userfault(0, 0, SIZE / PAGE_SIZE));
        let flushed = vm.host().flushes.lock().unwrap().concat();
        let is_flushed = |page: u64| flushed.iter().any(|range: &GfnRange| range.contains(gpa(page).gfn()));
        let gone: Vec<u64> = (0..SIZE / PAGE_SIZE).filter(|&page| translate(&vm, gpa(page)).is_none()).collect();
        assert!(!gone.is_empty() && gone.iter().all(|page| page % 2 == 0));
        let again = vcpu.handle_fault(gpa(0), Access::Read);
        let flags = MemoryFaultFlags::USERFAULT;
        assert_eq!(again, Ok(Outcome::Exit(Exit::MemoryFault { flags, gpa: gpa(0), size: PAGE_SIZE })));
        assert!(gone.iter().all(|&page| is_flushed(page)), "{gone:?} are zapped, and flushed are {flushed:?}");
        // For the next round.
        words.words.iter().for_each(|word| word.store(0, Ordering::Release));
        for page in gone {
            assert_eq!(vcpu.handle_fault(gpa(page), Access::Write), RESUMED);
        }
        words.words.iter().for_each(|word| word.store(0x5555_5555_5555_5555, Ordering::Release));
    }
    assert_eq!(vm.rescan_userfault(0, 0, SIZE / PAGE_SIZE), Ok(SIZE / PAGE_SIZE / 2));
    drop(vcpu);
    vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
    assert_no_table_is_left(&vm);
}

each!(an_invalidation_flushes_what_it_zapped_before_a_panic, invalidation_that_panics);
fn invalidation_that_panics<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    vm.set_user_memory_region(region(0, START, SIZE, 0x400, PageSize::Size4K)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    let nr_pages = SIZE / PAGE_SIZE;
    for page in 0..nr_pages {
        assert_eq!(vcpu.handle_fault(gpa(page), Access::Write), RESUMED);
    }
    let all = GfnRange::new(gpa(0).gfn(), nr_pages);
    for nth in [1, 2, 700] {
        vm.host().flushes.lock().unwrap().clear();
        vm.host().panics_at_zapped.store(nth, Ordering::Relaxed);
        panics(|| vm.invalidate_range(all));
        let flushed = vm.host().flushes.lock().unwrap().concat();
        let gone: Vec<u64> = (0..nr_pages).filter(|&page| translate(&vm, gpa(page)).is_none()).collect();
        assert_eq!(gone.len() as u32, nth - 1);
        for page in gone {
            assert!(flushed.iter().any(|range: &GfnRange| range.contains(gpa(page).gfn())), "page {page}: {flushed:?}");
            // The range is not in flight any more.
            assert_eq!(vcpu.handle_fault(gpa(page), Access::Write), RESUMED);
            assert!(translate(&vm, gpa(page)).is_some());
        }
    }
    drop(vm.invalidate_range(all).unwrap());
    assert!((0..nr_pages).all(|page| translate(&vm, gpa(page)).is_none()));
    drop(vcpu);
    vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
    assert_no_table_is_left(&vm);
}

each!(a_resolve_that_panics_while_a_flag_is_turned_off_leaves_its_slot_free, resolve_that_panics);
fn resolve_that_panics<F: Format>(locking: Locking) {
    for flag in [LOG, USERFAULT] {
        for nth in 1..=3 {
            let vm = vm::<F>(locking);
            let words = Panicking::new(0);
            vm.set_user_memory_region(region(0, START, SIZE, 0x400, PageSize::Size2M)).unwrap();
            let mut vcpu = vm.create_vcpu().unwrap();
            set_flags(&vm, flag, words.bitmap().filter(|_| flag == USERFAULT)).unwrap();
            for page in 0..SIZE / PAGE_SIZE {
                assert_eq!(vcpu.handle_fault(gpa(page), Access::Write), RESUMED);
            }
            vm.host().overtake(Call::Resolve, nth, || panic!("the host resolves"));
            panics(|| set_flags(&vm, NO_FLAGS, None));
            assert_eq!(vm.stats().recoveries, u64::from(nth) - 1, "recoveries that were made before");
            // The flag is off, the memslot is free, and the rest can be done later.
            assert_eq!(vm.get_dirty_log(0, &mut [0; 32]), Err(LogError::NotLogging { slot: 0 }));
            assert_eq!(vm.rescan_userfault(0, 0, 1), Err(SlotError::NotUserfault { slot: 0 }));
            assert_eq!(set_flags(&vm, LOG, None), Ok(()));
            assert_eq!(set_flags(&vm, NO_FLAGS, None), Ok(()));
            assert_eq!(vm.stats().recoveries, 4);
            for page in (0..SIZE / PAGE_SIZE).step_by(7) {
                assert_eq!(vcpu.handle_fault(gpa(page), Access::Write), RESUMED);
            }
            drop(vcpu);
            vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
            assert_no_table_is_left(&vm);
        }
    }
}

each!(a_fault_that_a_panic_ends_is_not_in_the_sample_nor_is_the_next, fault_that_panics);
fn fault_that_panics<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    vm.set_user_memory_region(region(0, START, SIZE, 0x400, PageSize::Size4K)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    let nr_timed = || vm.stats().fault_ns.count();
    // The 9th fault is the first that is timed.
    for page in 0..8 {
        assert_eq!(vcpu.handle_fault(gpa(page), Access::Write), RESUMED);
    }
    vm.host().overtake(Call::Resolve, 1, || panic!("the host resolves"));
    panics(|| vcpu.handle_fault(gpa(8), Access::Write));
    assert_eq!(vcpu.handle_fault(gpa(8), Access::Write), RESUMED);
    assert_eq!(nr_timed(), 0);
    // The sample goes on.
    for page in 9..512 {
        assert_eq!(vcpu.handle_fault(gpa(page), Access::Write), RESUMED);
    }
    assert_ne!(nr_timed(), 0);
}
