//! Every kind of invalid request: each has its own error with the offending value, and leaves
//! translations, the dirty log, statistics and page-table pages unchanged. And the limits of valid
//! requests.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::common::{GIB, MIB, TestBacking, TestHost, Translation, assert_no_table_is_left, change, region, translate};
use slat::baselines::Locking;
use slat::error::{FaultError, LogError, RangeError, SlotError};
use slat::format::{Format, Npt};
use slat::slots::MemoryAttributes;
use slat::{
    Access, Config, Exit, Gfn, GfnRange, Gpa, Level, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize,
    Vcpu, Vm,
};

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const READONLY: MemoryRegionFlags = MemoryRegionFlags::READONLY;
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();

/// Runs a test for each format and locking.
macro_rules! each {
    ($name:ident, $test:ident) => {
        crate::common::each!($name, |F, locking| $test(World::<F>::new(locking)));
    };
}

/// A VM with two memslots in use: 1 logs and has dirty pages, 2 does not. There is a hole between
/// them.
struct World<F: Format> {
    vm: Arc<Vm<TestHost, F>>,
    vcpu: Vcpu<TestHost, F>,
}

const A: u64 = 16 * MIB;
const B: u64 = 32 * MIB;
const SIZE: u64 = 4 * MIB;
const NR_WORDS: usize = (SIZE / PAGE_SIZE / 64) as usize;
/// The dirty pages of memslot 1.
const DIRTY: [u64; 3] = [0, 65, SIZE / PAGE_SIZE - 1];

#[derive(PartialEq, Eq, Debug)]
struct Seen {
    translations: Vec<Option<Translation>>,
    /// Counters that a refused call must not move.
    counters: [u64; 10],
    live_tables: usize,
    nr_flushes: usize,
}

impl<F: Format> World<F> {
    fn new(locking: Locking) -> World<F> {
        let vm = Arc::new(Vm::new(TestHost::default(), Config::default().with_locking(locking)).unwrap());
        let mut vcpu = vm.create_vcpu().unwrap();
        vm.set_user_memory_region(MemoryRegion { flags: LOG, ..region(1, A, SIZE, 0x1_0000, PageSize::Size2M) })
            .unwrap();
        vm.set_user_memory_region(region(2, B, SIZE, 0x2_0000, PageSize::Size2M)).unwrap();
        for page in DIRTY {
            assert_eq!(vcpu.handle_fault(Gpa(A + page * PAGE_SIZE), Access::Write), Ok(Outcome::Resume));
        }
        assert_eq!(vcpu.handle_fault(Gpa(A + 7 * PAGE_SIZE), Access::Read), Ok(Outcome::Resume));
        assert_eq!(vcpu.handle_fault(Gpa(B), Access::Write), Ok(Outcome::Resume));
        World { vm, vcpu }
    }

    fn seen(&self) -> Seen {
        let pages = DIRTY.iter().copied().chain([1, 7, 64, 66]);
        let gpas =
            pages.flat_map(|page| [A + page * PAGE_SIZE, B + page * PAGE_SIZE]).chain([A - 1, A + SIZE, B + SIZE]);
        let stats = self.vm.stats();
        Seen {
            translations: gpas.map(|gpa| translate(&self.vm, Gpa(gpa))).collect(),
            counters: [
                stats.faults,
                stats.spurious,
                stats.retries,
                stats.installed_4k + stats.installed_2m + stats.installed_1g,
                stats.writes_restored,
                stats.splits,
                stats.flushes,
                stats.protected,
                stats.zapped,
                stats.live_tables(),
            ],
            live_tables: self.vm.host().live_tables(),
            nr_flushes: self.vm.host().nr_flushes(),
        }
    }

    /// Requests `region`, which must be refused with `error` and change nothing.
    fn refused(&self, region: MemoryRegion<Arc<TestBacking>>, error: SlotError) {
        let before = self.seen();
        let dropped = region.backing.as_ref().map(|backing| Arc::clone(&backing.dropped));
        assert_eq!(self.vm.set_user_memory_region(region), Err(error));
        assert_eq!(self.seen(), before, "{error}");
        assert!(dropped.is_none_or(|dropped| dropped.load(Ordering::SeqCst)), "{error}: the backing is kept");
    }

    fn refused_log(&self, slot: u32, words: usize, error: LogError) {
        let before = self.seen();
        let mut bitmap = vec![0x55aa; words];
        assert_eq!(self.vm.get_dirty_log(slot, &mut bitmap), Err(error));
        assert!(bitmap.iter().all(|word| *word == 0x55aa), "{error}: the bitmap was written");
        assert_eq!(self.seen(), before, "{error}");
    }

    /// The dirty log still has what the guest wrote; both memslots still work.
    fn finish(mut self) {
        let mut bitmap = [0; NR_WORDS];
        assert_eq!(self.vm.get_dirty_log(1, &mut bitmap), Ok(DIRTY.len() as u64));
        for page in 0..SIZE / PAGE_SIZE {
            assert_eq!(bitmap[page as usize / 64] >> (page % 64) & 1 == 1, DIRTY.contains(&page), "page {page}");
        }
        for (gpa, pfn) in [(A, 0x1_0000), (B, 0x2_0000)] {
            for page in [0, 5, SIZE / PAGE_SIZE - 1] {
                let gpa = Gpa(gpa + page * PAGE_SIZE);
                assert_eq!(self.vcpu.handle_fault(gpa, Access::Write), Ok(Outcome::Resume));
                assert_eq!(translate(&self.vm, gpa).unwrap().pfn.0, pfn + page);
            }
        }
        for slot in [1, 2] {
            self.vm.set_user_memory_region(change(slot, NO_FLAGS, 0, 0)).unwrap();
        }
        drop(self.vcpu);
        assert_no_table_is_left(&self.vm);
    }
}

fn new(slot: u32, gpa: u64, size: u64) -> MemoryRegion<Arc<TestBacking>> {
    region(slot, gpa, size, 0x9_0000, PageSize::Size4K)
}

each!(numbers_that_make_no_region_are_refused, numbers);
fn numbers<F: Format>(world: World<F>) {
    let gpa_bits = F::GPA_BITS;
    let space = 1u64 << gpa_bits;
    for slot in [MemoryRegion::MAX_SLOTS, MemoryRegion::MAX_SLOTS + 1, 32767, u32::MAX] {
        world.refused(new(slot, 0, PAGE_SIZE), SlotError::SlotTooHigh { slot });
        world.refused(change(slot, NO_FLAGS, 0, 0), SlotError::SlotTooHigh { slot });
        world.refused_log(slot, NR_WORDS, LogError::NoSuchSlot { slot });
    }
    for gpa in [1, 8, PAGE_SIZE - 1, PAGE_SIZE + 1, A + 2048, u64::MAX] {
        world.refused(new(3, gpa, PAGE_SIZE), SlotError::UnalignedAddress { gpa: Gpa(gpa) });
        world.refused(change(1, LOG, gpa, SIZE), SlotError::UnalignedAddress { gpa: Gpa(gpa) });
    }
    for memory_size in [1, PAGE_SIZE - 1, PAGE_SIZE + 1, u64::MAX] {
        world.refused(new(3, 0, memory_size), SlotError::UnalignedSize { slot: 3, memory_size });
        world.refused(change(2, NO_FLAGS, B, memory_size), SlotError::UnalignedSize { slot: 2, memory_size });
    }
    for (gpa, size) in [
        (space, PAGE_SIZE),
        (space - PAGE_SIZE, 2 * PAGE_SIZE),
        (0, space + PAGE_SIZE),
        (u64::MAX - PAGE_SIZE + 1, PAGE_SIZE),
        (u64::MAX - PAGE_SIZE + 1, 2 * PAGE_SIZE),
        (PAGE_SIZE, u64::MAX - PAGE_SIZE + 1),
        (1 << 63, 1 << 63),
    ] {
        world.refused(new(3, gpa, size), SlotError::AddressTooHigh { gpa: Gpa(gpa), gpa_bits });
    }
    let gpa = Gpa(space - SIZE + PAGE_SIZE);
    world.refused(change(1, LOG, gpa.0, SIZE), SlotError::AddressTooHigh { gpa, gpa_bits });
    world.finish();
}

each!(unknown_flags_are_refused, flags);
fn flags<F: Format>(world: World<F>) {
    for bits in [1 << 5, 1 << 31, u32::MAX, LOG.bits() | 1 << 6] {
        let flags = MemoryRegionFlags::from_bits_retain(bits);
        world.refused(MemoryRegion { flags, ..new(3, 0, PAGE_SIZE) }, SlotError::UnknownFlags { slot: 3, flags: bits });
        world.refused(change(1, flags, A, SIZE), SlotError::UnknownFlags { slot: 1, flags: bits });
        world.refused(change(1, flags, 0, 0), SlotError::UnknownFlags { slot: 1, flags: bits });
    }
    // Whether a memslot is read-only is fixed when it is made; so the log of the first must stay.
    for flags in [READONLY, READONLY | LOG] {
        world.refused(change(1, flags, A, SIZE), SlotError::ReadOnlyFixed { slot: 1 });
        world.refused(change(1, flags, 64 * MIB, SIZE), SlotError::ReadOnlyFixed { slot: 1 });
        world.refused(change(2, flags, B, SIZE), SlotError::ReadOnlyFixed { slot: 2 });
    }
    world.vm.set_user_memory_region(MemoryRegion { flags: READONLY, ..new(3, 64 * MIB, PAGE_SIZE) }).unwrap();
    world.refused(change(3, NO_FLAGS, 64 * MIB, PAGE_SIZE), SlotError::ReadOnlyFixed { slot: 3 });
    world.vm.set_user_memory_region(change(3, NO_FLAGS, 0, 0)).unwrap();
    world.finish();
}

each!(regions_that_overlap_are_refused_on_every_side, overlaps);
fn overlaps<F: Format>(world: World<F>) {
    let overlap = |slot, gpa, other| SlotError::Overlap { slot, gpa: Gpa(gpa), other };
    for (gpa, size) in [
        (A, SIZE),
        (A - PAGE_SIZE, 2 * PAGE_SIZE),
        (A + SIZE - PAGE_SIZE, 2 * PAGE_SIZE),
        (A + MIB, PAGE_SIZE),
        (A, PAGE_SIZE),
        (A + SIZE - PAGE_SIZE, PAGE_SIZE),
        (A - MIB, SIZE + 2 * MIB),
        (0, B),
        // Over both: the error names the lower one.
        (0, B + PAGE_SIZE),
        (A + MIB, B + SIZE),
    ] {
        world.refused(new(3, gpa, size), overlap(3, gpa, 1));
    }
    world.refused(new(3, A + SIZE, B - A - SIZE + PAGE_SIZE), overlap(3, A + SIZE, 2));
    // The same by moves. Nothing may have been zapped by then.
    for gpa in [B, B - PAGE_SIZE, B + PAGE_SIZE, B - SIZE + PAGE_SIZE, B + SIZE - PAGE_SIZE] {
        world.refused(change(1, LOG, gpa, SIZE), overlap(1, gpa, 2));
        world.refused(change(1, NO_FLAGS, gpa, SIZE), overlap(1, gpa, 2));
    }
    for gpa in [A, A - PAGE_SIZE, A + PAGE_SIZE] {
        world.refused(change(2, NO_FLAGS, gpa, SIZE), overlap(2, gpa, 1));
        world.refused(change(2, LOG, gpa, SIZE), overlap(2, gpa, 1));
    }
    // Next to another, on both sides, is no overlap.
    world.vm.set_user_memory_region(new(3, A + SIZE, B - A - SIZE)).unwrap();
    world.vm.set_user_memory_region(new(4, A - PAGE_SIZE, PAGE_SIZE)).unwrap();
    for slot in [3, 4] {
        world.vm.set_user_memory_region(change(slot, NO_FLAGS, 0, 0)).unwrap();
    }
    world.finish();
}

each!(a_backing_is_set_when_a_slot_is_made_and_never_again, backings);
fn backings<F: Format>(world: World<F>) {
    world.refused(change(3, NO_FLAGS, 0, PAGE_SIZE), SlotError::NoBacking { slot: 3 });
    world.refused(change(3, LOG, A, SIZE), SlotError::NoBacking { slot: 3 });
    world.refused(new(1, A, SIZE), SlotError::BackingFixed { slot: 1 });
    world.refused(new(1, 64 * MIB, SIZE), SlotError::BackingFixed { slot: 1 });
    world.refused(MemoryRegion { flags: LOG, ..new(2, B, SIZE) }, SlotError::BackingFixed { slot: 2 });
    world.finish();
}

each!(a_slot_is_not_moved_and_resized_at_once_and_what_is_not_there_is_not_deleted, sizes);
fn sizes<F: Format>(world: World<F>) {
    for memory_size in [PAGE_SIZE, SIZE - PAGE_SIZE, SIZE + PAGE_SIZE, GIB] {
        world.refused(change(1, LOG, 64 * MIB, memory_size), SlotError::SizeFixed { slot: 1, memory_size });
        world.refused(change(2, LOG, 64 * MIB, memory_size), SlotError::SizeFixed { slot: 2, memory_size });
    }
    for slot in [0, 3, MemoryRegion::MAX_SLOTS - 1] {
        world.refused(change(slot, NO_FLAGS, 0, 0), SlotError::NoSuchSlot { slot });
        world.refused(change(slot, LOG, A, 0), SlotError::NoSuchSlot { slot });
    }
    world.finish();
}

each!(ranges_of_frames_and_bytes_that_cannot_be_are_refused, frames);
fn frames<F: Format>(world: World<F>) {
    let (gpa_bits, nr_frames) = (F::GPA_BITS, 1 << (F::GPA_BITS - 12));
    let refused = |start, end, error: RangeError| {
        let (range, before) = (GfnRange { start: Gfn(start), end: Gfn(end) }, world.seen());
        let vm = &world.vm;
        assert_eq!(vm.invalidate_range(range).map(|_| 0), Err(error), "{range:?}");
        assert_eq!(vm.split_range(range, PageSize::Size4K), Err(error), "{range:?}");
        assert_eq!(vm.recover_range(range), Err(error), "{range:?}");
        assert_eq!(vm.age_range(range), Err(error), "{range:?}");
        assert_eq!(vm.test_age_range(range), Err(error), "{range:?}");
        assert_eq!(world.seen(), before, "{range:?}");
    };
    let a = A / PAGE_SIZE;
    for (start, end) in [(0, 0), (a, a), (a + 1, a), (nr_frames, nr_frames), (u64::MAX, 0), (u64::MAX, u64::MAX)] {
        refused(start, end, RangeError::EmptyRange { start: Gfn(start), end: Gfn(end) });
    }
    // The first address that is too high; and the greatest that an address can hold.
    for (start, end, beyond) in [
        (0, nr_frames + 1, nr_frames << 12),
        (a, u64::MAX, nr_frames << 12),
        (nr_frames, nr_frames + 1, nr_frames << 12),
        (nr_frames + 7, u64::MAX, (nr_frames + 7) << 12),
        (1 << 52, (1 << 52) + 1, u64::MAX),
        (u64::MAX - 1, u64::MAX, u64::MAX),
    ] {
        refused(start, end, RangeError::AddressTooHigh { gpa: Gpa(beyond), gpa_bits });
    }
    let space = 1 << F::GPA_BITS;
    let too_high = |gpa: u64| SlotError::AddressTooHigh { gpa: Gpa(gpa), gpa_bits };
    for (gpa, size_bytes, error) in [
        (A, 0, SlotError::BadSize { size_bytes: 0 }),
        (u64::MAX - 4095, 0, SlotError::BadSize { size_bytes: 0 }),
        (space, PAGE_SIZE, too_high(space)),
        (A, space, too_high(space)),
        (u64::MAX - 4095, PAGE_SIZE, too_high(u64::MAX - 4095)),
        (u64::MAX - 4095, 2 * PAGE_SIZE, too_high(u64::MAX - 4095)),
        (PAGE_SIZE, u64::MAX - 4095, too_high(space)),
        (2 * PAGE_SIZE, u64::MAX - 4095, too_high(2 * PAGE_SIZE)),
    ] {
        let before = world.seen();
        let private = MemoryAttributes::PRIVATE;
        assert_eq!(
            world.vm.set_memory_attributes(Gpa(gpa), size_bytes, private),
            Err(error),
            "{gpa:#x} {size_bytes:#x}"
        );
        let error = match error {
            SlotError::BadSize { size_bytes } => FaultError::BadSize { size_bytes },
            SlotError::AddressTooHigh { gpa, gpa_bits } => FaultError::AddressTooHigh { gpa, gpa_bits },
            error => panic!("no check finds {error}"),
        };
        assert_eq!(world.vm.check_access(Gpa(gpa), size_bytes), Err(error), "{gpa:#x}, {size_bytes:#x}");
        assert_eq!(world.seen(), before);
    }
    world.finish();
}

each!(a_dirty_log_that_cannot_be_returned_is_not_cleared, logs);
fn logs<F: Format>(world: World<F>) {
    for words in [0, 1, NR_WORDS - 1] {
        world.refused_log(1, words, LogError::BitmapTooShort { slot: 1, words, needed: NR_WORDS });
        world.refused_log(2, words, LogError::NotLogging { slot: 2 });
        world.refused_log(0, words, LogError::NoSuchSlot { slot: 0 });
    }
    world.refused_log(2, NR_WORDS, LogError::NotLogging { slot: 2 });
    // Words behind those of the memslot are the caller's.
    world.vm.set_user_memory_region(MemoryRegion { flags: LOG, ..new(3, 0, 65 * PAGE_SIZE) }).unwrap();
    world.refused_log(3, 1, LogError::BitmapTooShort { slot: 3, words: 1, needed: 2 });
    let mut bitmap = [7; 4];
    assert_eq!(world.vm.get_dirty_log(3, &mut bitmap), Ok(0));
    assert_eq!(bitmap, [0, 0, 7, 7]);
    world.vm.set_user_memory_region(change(3, NO_FLAGS, 0, 0)).unwrap();
    world.finish();
}

each!(a_change_that_changes_nothing_is_no_change, no_change);
fn no_change<F: Format>(world: World<F>) {
    let before = world.seen();
    world.vm.set_user_memory_region(change(1, LOG, A, SIZE)).unwrap();
    world.vm.set_user_memory_region(change(2, NO_FLAGS, B, SIZE)).unwrap();
    assert_eq!(world.seen(), before);
    world.finish();
}

each!(a_fault_beyond_the_space_is_an_error, far_faults);
fn far_faults<F: Format>(mut world: World<F>) {
    let gpa_bits = F::GPA_BITS;
    for gpa in [1 << gpa_bits, (1 << gpa_bits) + 0x123, 1 << 63, u64::MAX].map(Gpa) {
        let before = translate(&world.vm, Gpa(0));
        assert_eq!(world.vcpu.handle_fault(gpa, Access::Read), Err(FaultError::AddressTooHigh { gpa, gpa_bits }));
        assert_eq!(translate(&world.vm, Gpa(0)), before);
    }
    world.finish();
}

each!(the_last_page_of_the_space_is_memory_like_any_other, last_page);
fn last_page<F: Format>(mut world: World<F>) {
    let (last, vm) = ((1 << F::GPA_BITS) - PAGE_SIZE, Arc::clone(&world.vm));
    vm.set_user_memory_region(MemoryRegion { flags: LOG, ..new(MemoryRegion::MAX_SLOTS - 1, last, PAGE_SIZE) })
        .unwrap();
    assert_eq!(world.vcpu.handle_fault(Gpa(last + PAGE_SIZE - 1), Access::Write), Ok(Outcome::Resume));
    assert_eq!(translate(&vm, Gpa(last)).unwrap().pfn.0, 0x9_0000);
    let mmio = Exit::Mmio { gpa: Gpa(last - 1), access: Access::Read };
    assert_eq!(world.vcpu.handle_fault(Gpa(last - 1), Access::Read), Ok(Outcome::Exit(mmio)));
    let mut bitmap = [0];
    assert_eq!((vm.get_dirty_log(MemoryRegion::MAX_SLOTS - 1, &mut bitmap), bitmap), (Ok(1), [1]));
    // There and back: the ranges of the moves end with the space, too.
    vm.set_user_memory_region(change(MemoryRegion::MAX_SLOTS - 1, LOG, last - PAGE_SIZE, PAGE_SIZE)).unwrap();
    vm.set_user_memory_region(change(MemoryRegion::MAX_SLOTS - 1, LOG, last, PAGE_SIZE)).unwrap();
    assert_eq!(translate(&vm, Gpa(last)), None);
    assert_eq!(world.vcpu.handle_fault(Gpa(last), Access::Read), Ok(Outcome::Resume));
    vm.set_user_memory_region(change(MemoryRegion::MAX_SLOTS - 1, NO_FLAGS, 0, 0)).unwrap();
    assert_eq!(translate(&vm, Gpa(last)), None);
    world.finish();
}

each!(a_slot_may_be_as_large_as_the_space, whole_space);
fn whole_space<F: Format>(mut world: World<F>) {
    for slot in [1, 2] {
        world.vm.set_user_memory_region(change(slot, NO_FLAGS, 0, 0)).unwrap();
    }
    let size = 1 << F::GPA_BITS;
    world.vm.set_user_memory_region(region(0, 0, size, 0, PageSize::Size1G)).unwrap();
    // The frames are as many as a PTE can name.
    for gpa in [0, GIB, 600 * GIB, size.min(1 << F::HPA_BITS) - 1] {
        assert_eq!(world.vcpu.handle_fault(Gpa(gpa), Access::Write), Ok(Outcome::Resume));
        let found = translate(&world.vm, Gpa(gpa)).unwrap();
        assert_eq!(found.pfn.0, gpa / PAGE_SIZE);
        assert!(gpa == 0 || found.level == Level::L1G, "the block around {gpa:#x}");
    }
    world.vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
    drop(world.vcpu);
    world.vm.reclaim();
    assert_eq!((world.vm.stats().live_tables(), world.vm.host().live_tables()), (1, 1));
}

#[test]
fn thousands_of_slots_of_one_page_lie_side_by_side() {
    const NR_SLOTS: u32 = 4000;
    let vm: Arc<Vm<TestHost, Npt>> = Arc::new(Vm::new(TestHost::default(), Config::default()).unwrap());
    let mut vcpu = vm.create_vcpu().unwrap();
    // Memslot numbers and addresses in different orders, neither sorted. 1597 and 4000 have no
    // common factor.
    let at = |slot: u32| u64::from(slot * 1597 % NR_SLOTS) * PAGE_SIZE;
    let pfn = |slot: u32| 0x10_0000 + 2 * u64::from(slot);
    for slot in (0..NR_SLOTS).rev() {
        vm.set_user_memory_region(region(slot, at(slot), PAGE_SIZE, pfn(slot), PageSize::Size1G)).unwrap();
    }
    for slot in 0..NR_SLOTS {
        assert_eq!(vcpu.handle_fault(Gpa(at(slot)), Access::Write), Ok(Outcome::Resume));
        let found = translate(&vm, Gpa(at(slot))).unwrap();
        assert_eq!((found.pfn.0, found.level), (pfn(slot), Level::L4K));
    }
    let full = SlotError::Overlap { slot: NR_SLOTS, gpa: Gpa(at(17)), other: 17 };
    assert_eq!(vm.set_user_memory_region(new(NR_SLOTS, at(17), PAGE_SIZE)), Err(full));
    // Every other one is deleted; its neighbours stay.
    for slot in 0..NR_SLOTS {
        if (at(slot) / PAGE_SIZE).is_multiple_of(2) {
            vm.set_user_memory_region(change(slot, NO_FLAGS, 0, 0)).unwrap();
        }
    }
    for slot in 0..NR_SLOTS {
        let kept = at(slot) / PAGE_SIZE % 2 == 1;
        assert_eq!(translate(&vm, Gpa(at(slot))).map(|found| found.pfn.0), kept.then_some(pfn(slot)));
        let outcome = vcpu.handle_fault(Gpa(at(slot)), Access::Read).unwrap();
        assert_eq!(outcome == Outcome::Resume, kept);
        if kept {
            vm.set_user_memory_region(change(slot, NO_FLAGS, 0, 0)).unwrap();
        }
    }
    drop(vcpu);
    assert_no_table_is_left(&vm);
}
