//! Userfault: faults exit at the pages that user space marks, and at no others. Leaves are zapped
//! when the flag is turned on or a bit is rescanned. Huge pages are recovered.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::common::{Call, MIB, TestBacking, TestHost, assert_no_table_is_left, change, each, region, translate, vm};
use slat::baselines::Locking;
use slat::error::{FaultError, SlotError};
use slat::format::Format;
use slat::slots::{MemoryAttributes, MemoryFaultFlags, UserfaultBitmap, UserfaultWords};
use slat::{Access, Exit, GfnRange, Gpa, Level, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Vm};

const USERFAULT: MemoryRegionFlags = MemoryRegionFlags::USERFAULT;
const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const GUEST_MEMFD: MemoryRegionFlags = MemoryRegionFlags::GUEST_MEMFD;
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();
const SIZE: u64 = 4 * MIB;
const PAGES: u64 = SIZE / PAGE_SIZE;

/// Words that all begin as `word`.
fn words(nr_words: usize, word: u64) -> Arc<Vec<AtomicU64>> {
    Arc::new((0..nr_words).map(|_| AtomicU64::new(word)).collect())
}

fn set(words: &Arc<Vec<AtomicU64>>, page: u64) {
    words[page as usize / 64].fetch_or(1 << (page % 64), Ordering::Release);
}

fn clear(words: &Arc<Vec<AtomicU64>>, page: u64) {
    words[page as usize / 64].fetch_and(!(1 << (page % 64)), Ordering::Release);
}

fn bitmap(words: &Arc<Vec<AtomicU64>>, granularity: PageSize) -> Option<UserfaultBitmap> {
    Some(UserfaultBitmap::new(Arc::<Vec<AtomicU64>>::clone(words), granularity))
}

/// Turns userfault on or off, beside `others`, in memslot 0 at 2 MiB.
fn turn<F: Format>(
    vm: &Vm<TestHost, F>,
    flags: MemoryRegionFlags,
    bitmap: Option<UserfaultBitmap>,
) -> Result<(), SlotError> {
    vm.set_user_memory_region(MemoryRegion { userfault_bitmap: bitmap, ..change(0, flags, 2 * MIB, SIZE) })
}

fn gpa(page: u64) -> Gpa {
    Gpa(2 * MIB + page * PAGE_SIZE)
}

fn slot(flags: MemoryRegionFlags, bitmap: Option<UserfaultBitmap>) -> MemoryRegion<Arc<TestBacking>> {
    MemoryRegion { flags, userfault_bitmap: bitmap, ..region(0, 2 * MIB, SIZE, 0x400, PageSize::Size2M) }
}

fn exit(flags: MemoryFaultFlags, page: u64, size: u64) -> Result<Outcome, FaultError> {
    Ok(Outcome::Exit(Exit::MemoryFault { flags, gpa: gpa(page), size }))
}

const RESUMED: Result<Outcome, FaultError> = Ok(Outcome::Resume);

fn faults_exit_until_the_bit_is_clear<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    let words = words(16, u64::MAX);
    vm.set_user_memory_region(slot(USERFAULT, bitmap(&words, PageSize::Size4K))).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    for access in [Access::Read, Access::Write, Access::Execute] {
        let exit = exit(MemoryFaultFlags::USERFAULT, 7, PAGE_SIZE);
        assert_eq!(vcpu.handle_fault(Gpa(gpa(7).0 + 0x123), access), exit);
        assert_eq!(vcpu.pre_fault_memory(gpa(7), PAGE_SIZE, access), {
            Err(FaultError::UserfaultPending { gpa: gpa(7) })
        });
    }
    assert_eq!(translate(&vm, gpa(7)), None);
    assert_eq!(vm.host().resolves.load(Ordering::Relaxed), 0, "no pending page is resolved");
    clear(&words, 7);
    assert_eq!(vcpu.handle_fault(gpa(7), Access::Write), RESUMED);
    assert_eq!(translate(&vm, gpa(7)).unwrap().level, Level::L4K);
    assert_eq!(vcpu.handle_fault(gpa(6), Access::Read), exit(MemoryFaultFlags::USERFAULT, 6, PAGE_SIZE));
    assert_eq!(vcpu.handle_fault(gpa(8), Access::Read), exit(MemoryFaultFlags::USERFAULT, 8, PAGE_SIZE));
    let stats = vm.stats();
    assert_eq!((stats.exits, stats.userfaults), (5, 5));
    // A bit that is set later takes effect on mapped pages when it is rescanned.
    set(&words, 7);
    assert_eq!(vcpu.handle_fault(gpa(7), Access::Write), RESUMED);
    let nr_flushes = vm.host().nr_flushes();
    assert_eq!(vm.rescan_userfault(0, 7, 1), Ok(1));
    assert!(vm.host().nr_flushes() > nr_flushes);
    assert_eq!(translate(&vm, gpa(7)), None);
    assert_eq!(vcpu.handle_fault(gpa(7), Access::Write), exit(MemoryFaultFlags::USERFAULT, 7, PAGE_SIZE));
    drop(vcpu);
    vm.set_user_memory_region(change(0, NO_FLAGS, 2 * MIB, 0)).unwrap();
    assert_no_table_is_left(&vm);
}
each!(faults_exit_until_the_bit_is_clear_, faults_exit_until_the_bit_is_clear);

/// A rescan has notified the host of a page. Before it empties the leaf, the page is invalidated,
/// user space clears the bit, and the guest writes again. The host must be notified of that write,
/// too, by the end of the next invalidation.
fn a_rescan_that_is_overtaken_hides_no_write<F: Format>(locking: Locking) {
    let page = GfnRange::new(gpa(7).gfn(), 1);
    let is_dirty = |vm: &Vm<TestHost, F>| {
        drop(vm.invalidate_range(page).unwrap());
        vm.host().take_zapped().iter().any(|leaf| leaf.range == page && leaf.dirty)
    };
    let vm = vm::<F>(locking);
    let words = words(16, 0);
    vm.set_user_memory_region(slot(USERFAULT, bitmap(&words, PageSize::Size4K))).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.handle_fault(gpa(7), Access::Write), RESUMED);
    set(&words, 7);
    vm.host().record_zapped();
    // What the guest may write, if the other calls come in between.
    let writes_in_between = Arc::new(AtomicBool::new(false));
    if locking == Locking::None {
        let (vm, words, writes) = (Arc::clone(&vm), Arc::clone(&words), Arc::clone(&writes_in_between));
        vm.clone().host().overtake(Call::LeafZapped, 1, move || {
            let others = std::thread::spawn(move || {
                drop(vm.invalidate_range(page).unwrap());
                clear(&words, 7);
                assert_eq!(vm.create_vcpu().unwrap().handle_fault(gpa(7), Access::Write), RESUMED);
                writes.store(translate(&vm, gpa(7)).is_some(), Ordering::Relaxed);
                vm.host().take_zapped();
            });
            others.join().unwrap();
        });
    }
    assert_eq!(vm.rescan_userfault(0, 7, 1), Ok(1));
    assert!(vm.host().was_overtaken());
    assert!(!writes_in_between.load(Ordering::Relaxed) || is_dirty(&vm), "the host is not notified of a write");
    clear(&words, 7);
    assert_eq!(vcpu.handle_fault(gpa(7), Access::Write), RESUMED);
    vm.host().take_zapped();
    assert!(is_dirty(&vm));
}
each!(a_rescan_that_is_overtaken_hides_no_write_, a_rescan_that_is_overtaken_hides_no_write);

fn turning_userfault_on_zaps_all_and_off_recovers_huge_pages<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    vm.set_user_memory_region(slot(NO_FLAGS, None)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.handle_fault(gpa(0), Access::Write), RESUMED);
    assert_eq!(translate(&vm, gpa(0)).unwrap().level, Level::L2M);
    // No bit is set.
    let words = words(16, 0);
    turn(&vm, USERFAULT, bitmap(&words, PageSize::Size4K)).unwrap();
    assert_eq!(translate(&vm, gpa(0)), None);
    for page in 0..PAGES {
        assert_eq!(vcpu.handle_fault(gpa(page), Access::Write), RESUMED);
        assert_eq!(translate(&vm, gpa(page)).unwrap().level, Level::L4K);
    }
    // Changed in another way, it keeps its bitmap; nothing is zapped.
    turn(&vm, USERFAULT | LOG, None).unwrap();
    turn(&vm, USERFAULT, bitmap(&words, PageSize::Size4K)).unwrap();
    assert_eq!(vm.stats().recoveries, 0, "small leaves only, as long as it is on");
    assert!(translate(&vm, gpa(0)).is_some());
    turn(&vm, NO_FLAGS, None).unwrap();
    assert_eq!(vm.stats().recoveries, 2);
    for page in 0..PAGES {
        assert_eq!(translate(&vm, gpa(page)).unwrap().level, Level::L2M);
    }
    // While it logs by small pages, no huge page is recovered.
    turn(&vm, LOG | USERFAULT, bitmap(&words, PageSize::Size4K)).unwrap();
    for page in 0..PAGES {
        assert_eq!(vcpu.handle_fault(gpa(page), Access::Write), RESUMED);
    }
    turn(&vm, LOG, None).unwrap();
    assert_eq!(translate(&vm, gpa(0)).unwrap().level, Level::L4K);
    assert_eq!(vm.get_dirty_log(0, &mut [0; 16]), Ok(PAGES));
    turn(&vm, NO_FLAGS, None).unwrap();
    assert_eq!(translate(&vm, gpa(0)).unwrap().level, Level::L2M);
}
each!(
    turning_userfault_on_zaps_all_and_off_recovers_huge_pages_,
    turning_userfault_on_zaps_all_and_off_recovers_huge_pages
);

fn huge_pages_remain_with_a_bit_for_each<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    let words = words(1, 0b11);
    vm.set_user_memory_region(slot(USERFAULT, bitmap(&words, PageSize::Size2M))).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.handle_fault(gpa(700), Access::Read), exit(MemoryFaultFlags::USERFAULT, 512, 2 * MIB));
    clear(&words, 1);
    assert_eq!(vcpu.handle_fault(gpa(700), Access::Read), RESUMED);
    assert_eq!(translate(&vm, gpa(700)).unwrap().level, Level::L2M);
    assert_eq!(vcpu.handle_fault(gpa(511), Access::Read), exit(MemoryFaultFlags::USERFAULT, 0, 2 * MIB));
    set(&words, 1);
    // A part of it is rescanned: all of it is zapped.
    assert_eq!(vm.rescan_userfault(0, 600, 1), Ok(512));
    assert_eq!(translate(&vm, gpa(1000)), None);
    assert_eq!(vcpu.handle_fault(gpa(512), Access::Write), exit(MemoryFaultFlags::USERFAULT, 512, 2 * MIB));
}
each!(huge_pages_remain_with_a_bit_for_each_, huge_pages_remain_with_a_bit_for_each);

/// A memslot of 2.5 GiB, of which a bit stands for 1 GiB: the last block is shorter.
fn pages_of_1_gib_arrive_as_a_whole<F: Format>(locking: Locking) {
    const GIB: u64 = 1 << 30;
    let vm = vm::<F>(locking);
    let words = words(1, 0b111);
    let at = |bytes: u64| Gpa(4 * GIB + bytes);
    let memory = region(0, 4 * GIB, 5 * GIB / 2, 1 << 18, PageSize::Size1G);
    let of_1g = bitmap(&words, PageSize::Size1G);
    vm.set_user_memory_region(MemoryRegion { flags: USERFAULT, userfault_bitmap: of_1g, ..memory }).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    let exit = |block: u64, size| {
        Ok(Outcome::Exit(Exit::MemoryFault { flags: MemoryFaultFlags::USERFAULT, gpa: at(block * GIB), size }))
    };
    assert_eq!(vcpu.handle_fault(at(GIB + 5 * MIB), Access::Write), exit(1, GIB));
    assert_eq!(vcpu.handle_fault(at(2 * GIB), Access::Read), exit(2, GIB / 2));
    clear(&words, 1);
    assert_eq!(vcpu.handle_fault(at(GIB + 5 * MIB), Access::Write), RESUMED);
    let level = |bytes| translate(&vm, at(bytes)).map(|translation| translation.level);
    assert_eq!((level(2 * GIB - 1), level(GIB - 1), level(2 * GIB)), (Some(Level::L1G), None, None));
    assert_eq!(vcpu.handle_fault(at(GIB - 1), Access::Read), exit(0, GIB));
    clear(&words, 2);
    assert_eq!(vcpu.handle_fault(at(2 * GIB + MIB), Access::Read), RESUMED);
    assert_eq!(level(2 * GIB), Some(Level::L2M));
    // A page of it is taken back: all of the block is.
    set(&words, 1);
    assert_eq!(vm.rescan_userfault(0, (GIB + MIB) / PAGE_SIZE, 1), Ok(GIB / PAGE_SIZE));
    assert_eq!((level(GIB + MIB), level(2 * GIB)), (None, Some(Level::L2M)));
    assert_eq!(vcpu.handle_fault(at(GIB), Access::Read), exit(1, GIB));
}
each!(pages_of_1_gib_arrive_as_a_whole_, pages_of_1_gib_arrive_as_a_whole);

/// Memory in pages of 1 GiB that arrives by 4 KiB, and is one leaf again when userfault is off.
#[test]
fn pages_of_1_gib_arrive_by_4_kib_and_come_back() {
    const GIB: u64 = 1 << 30;
    const PAGES: u64 = GIB / PAGE_SIZE;
    let vm = vm::<slat::format::Npt>(Locking::None);
    let words = words(PAGES as usize / 64, u64::MAX);
    let memory = region(0, GIB, GIB, 1 << 18, PageSize::Size1G);
    let small = bitmap(&words, PageSize::Size4K);
    vm.set_user_memory_region(MemoryRegion { flags: USERFAULT, userfault_bitmap: small, ..memory }).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    let at = |page: u64| Gpa(GIB + page * PAGE_SIZE);
    for page in [0, 700, PAGES - 1] {
        let flags = MemoryFaultFlags::USERFAULT;
        let exit = Exit::MemoryFault { flags, gpa: at(page), size: PAGE_SIZE };
        assert_eq!(vcpu.handle_fault(at(page), Access::Write), Ok(Outcome::Exit(exit)));
        clear(&words, page);
        assert_eq!(vcpu.handle_fault(at(page), Access::Write), RESUMED);
        assert_eq!(translate(&vm, at(page)).unwrap().level, Level::L4K);
    }
    words.iter().for_each(|word| word.store(0, Ordering::Release));
    vcpu.pre_fault_memory(at(0), GIB, Access::Write).unwrap();
    assert_eq!(translate(&vm, at(701)).unwrap().level, Level::L4K);
    vm.set_user_memory_region(change(0, NO_FLAGS, GIB, GIB)).unwrap();
    assert_eq!(translate(&vm, at(700)).unwrap().level, Level::L1G);
}

fn a_rescan_zaps_what_is_set_and_nothing_else<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    let words = words(16, 0);
    vm.set_user_memory_region(slot(USERFAULT, bitmap(&words, PageSize::Size4K))).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    for page in 0..PAGES {
        assert_eq!(vcpu.handle_fault(gpa(page), Access::Write), RESUMED);
    }
    let is_taken = |page: u64| page % 7 == 3 || (100..300).contains(&page) || page == PAGES - 1;
    (0..PAGES).filter(|&page| is_taken(page)).for_each(|page| set(&words, page));
    // Outside the requested range nothing is zapped.
    assert_eq!(vm.rescan_userfault(0, 4, 95), Ok((4..99).filter(|&page| is_taken(page)).count() as u64));
    for page in 0..PAGES {
        let goes = is_taken(page) && (4..99).contains(&page);
        assert_eq!(translate(&vm, gpa(page)).is_none(), goes, "page {page}");
    }
    assert_eq!(vm.rescan_userfault(0, 0, PAGES), Ok((0..PAGES).filter(|&page| is_taken(page)).count() as u64));
    for page in 0..PAGES {
        assert_eq!(translate(&vm, gpa(page)).is_none(), is_taken(page), "page {page}");
    }
}
each!(a_rescan_zaps_what_is_set_and_nothing_else_, a_rescan_zaps_what_is_set_and_nothing_else);

struct Revocable(Vec<AtomicU64>, AtomicU64);

impl UserfaultWords for Revocable {
    fn words(&self) -> &[AtomicU64] {
        &self.0[..self.1.load(Ordering::SeqCst) as usize]
    }
}

#[test]
fn a_bitmap_that_shrinks_is_an_error_and_no_panic() {
    let vm = vm::<slat::format::Npt>(Locking::None);
    let words = Arc::new(Revocable((0..16).map(|_| AtomicU64::new(0)).collect(), AtomicU64::new(16)));
    let bitmap = UserfaultBitmap::new(Arc::<Revocable>::clone(&words), PageSize::Size4K);
    vm.set_user_memory_region(slot(USERFAULT, Some(bitmap))).unwrap();
    words.1.store(1, Ordering::SeqCst);
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.handle_fault(gpa(63), Access::Write), RESUMED);
    let gone = FaultError::UserfaultBitmapGone { slot: 0, gpa: gpa(64) };
    assert_eq!(vcpu.handle_fault(gpa(64), Access::Write), Err(gone));
    assert_eq!(vcpu.pre_fault_memory(gpa(64), PAGE_SIZE, Access::Read), Err(gone));
    assert_eq!(vm.check_access(gpa(64), 1), Err(gone));
    let gone = SlotError::UserfaultBitmapGone { slot: 0, gpa: gpa(64) };
    assert_eq!(vm.rescan_userfault(0, 0, PAGES), Err(gone));
    turn(&vm, NO_FLAGS, None).unwrap();
    assert_eq!(vcpu.handle_fault(gpa(64), Access::Write), RESUMED);
}

#[test]
fn bad_input_is_refused_and_changes_nothing() {
    let vm = vm::<slat::format::Npt>(Locking::None);
    let set_region = |region| vm.set_user_memory_region(region);
    let enough = words(16, 0);
    assert_eq!(set_region(slot(USERFAULT, None)), Err(SlotError::NoUserfaultBitmap { slot: 0 }));
    let too_short = SlotError::BitmapTooShort { slot: 0, words: 15, needed: 16 };
    assert_eq!(set_region(slot(USERFAULT, bitmap(&words(15, 0), PageSize::Size4K))), Err(too_short));
    let no_words = SlotError::BitmapTooShort { slot: 0, words: 0, needed: 1 };
    assert_eq!(set_region(slot(USERFAULT, bitmap(&words(0, 0), PageSize::Size2M))), Err(no_words));
    let unaligned = |gpa, size_bytes| SlotError::UnalignedUserfaultSlot { slot: 0, gpa: Gpa(gpa), size_bytes };
    let of_1g = bitmap(&enough, PageSize::Size1G);
    assert_eq!(set_region(slot(USERFAULT, of_1g)), Err(unaligned(2 * MIB, 1 << 30)));
    let odd = MemoryRegion { guest_phys_addr: Gpa(3 * MIB), ..slot(USERFAULT, bitmap(&enough, PageSize::Size2M)) };
    assert_eq!(set_region(odd), Err(unaligned(3 * MIB, 2 * MIB)));
    let read_only = MemoryRegionFlags::READONLY | GUEST_MEMFD;
    assert_eq!(set_region(slot(read_only, None)), Err(SlotError::ReadOnlyGuestMemfd { slot: 0 }));
    assert_eq!(vm.rescan_userfault(0, 0, 1), Err(SlotError::NoSuchSlot { slot: 0 }));

    set_region(slot(NO_FLAGS, None)).unwrap();
    assert_eq!(vm.rescan_userfault(0, 0, 1), Err(SlotError::NotUserfault { slot: 0 }));
    assert_eq!(turn(&vm, USERFAULT, None), Err(SlotError::NoUserfaultBitmap { slot: 0 }));
    assert_eq!(turn(&vm, USERFAULT, bitmap(&words(15, 0), PageSize::Size4K)), Err(too_short));
    assert_eq!(turn(&vm, GUEST_MEMFD, None), Err(SlotError::GuestMemfdFixed { slot: 0 }));
    let private = MemoryAttributes::PRIVATE;
    assert_eq!(vm.set_memory_attributes(gpa(0), SIZE, private), Err(SlotError::NoGuestMemfd { gpa: gpa(0) }));

    turn(&vm, USERFAULT, bitmap(&enough, PageSize::Size2M)).unwrap();
    // Moved while on: the bits move along, but not to where they would mark other pages.
    assert_eq!(set_region(change(0, USERFAULT, 9 * MIB, SIZE)), Err(unaligned(9 * MIB, 2 * MIB)));
    set(&enough, 0);
    set_region(change(0, USERFAULT, 8 * MIB, SIZE)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    let flags = MemoryFaultFlags::USERFAULT;
    let exit = Outcome::Exit(Exit::MemoryFault { flags, gpa: Gpa(8 * MIB), size: 2 * MIB });
    assert_eq!(vcpu.handle_fault(Gpa(8 * MIB), Access::Read), Ok(exit));
    assert!(matches!(vm.rescan_userfault(0, 0, 0), Err(SlotError::EmptyRange { .. })));
    let past = |first_page, nr_pages| SlotError::RangePastEnd { slot: 0, first_page, nr_pages, slot_pages: PAGES };
    assert_eq!(vm.rescan_userfault(0, PAGES, 1), Err(past(PAGES, 1)));
    assert_eq!(vm.rescan_userfault(0, u64::MAX, 2), Err(past(u64::MAX, 2)));
    assert_eq!(vm.rescan_userfault(0, 1, PAGES), Err(past(1, PAGES)));
    assert_eq!(vm.check_access(Gpa(8 * MIB), 0), Err(FaultError::BadSize { size_bytes: 0 }));
    assert_eq!(vm.check_access(Gpa(0), 1), Err(FaultError::NoMemslot { gpa: Gpa(0) }));
    assert!(matches!(vm.check_access(Gpa(u64::MAX), 2), Err(FaultError::AddressTooHigh { .. })));
    assert_eq!(vm.check_access(Gpa(10 * MIB), 2 * MIB), Ok(Outcome::Resume));
    let fault = Exit::MemoryFault { flags, gpa: Gpa(8 * MIB), size: 2 * MIB };
    assert_eq!(vm.check_access(Gpa(10 * MIB - 1), 1), Ok(Outcome::Exit(fault)));
}

/// KVM's `set_memory_region_test` and `guest_memfd_test`, as far as they concern userfault. The
/// flag may be toggled on a memslot with a guest_memfd after it was made. Nothing else of it can be
/// changed.
fn userfault_is_toggled_on_a_guest_memfd_slot<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    let words = words(16, u64::MAX);
    vm.set_user_memory_region(slot(GUEST_MEMFD, None)).unwrap();
    for _ in 0..2 {
        turn(&vm, GUEST_MEMFD | USERFAULT, bitmap(&words, PageSize::Size4K)).unwrap();
        turn(&vm, GUEST_MEMFD | USERFAULT | LOG, None).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        assert_eq!(vcpu.handle_fault(gpa(1), Access::Write), exit(MemoryFaultFlags::USERFAULT, 1, PAGE_SIZE));
        vm.set_memory_attributes(gpa(1), PAGE_SIZE, MemoryAttributes::PRIVATE).unwrap();
        let both = MemoryFaultFlags::USERFAULT | MemoryFaultFlags::PRIVATE;
        assert_eq!(vcpu.handle_fault(gpa(1), Access::Write), exit(both, 1, PAGE_SIZE));
        vm.set_memory_attributes(gpa(1), PAGE_SIZE, MemoryAttributes::empty()).unwrap();
        turn(&vm, GUEST_MEMFD, None).unwrap();
    }
    let fixed = SlotError::GuestMemfdFixed { slot: 0 };
    assert_eq!(turn(&vm, NO_FLAGS, None), Err(fixed));
    assert_eq!(vm.set_user_memory_region(change(0, GUEST_MEMFD, 8 * MIB, SIZE)), Err(fixed));
    assert_eq!(vm.set_user_memory_region(change(0, GUEST_MEMFD, 2 * MIB, SIZE / 2)), {
        Err(SlotError::SizeFixed { slot: 0, memory_size: SIZE / 2 })
    });
    let backing = region(0, 2 * MIB, SIZE, 0x400, PageSize::Size4K).backing;
    let changed = MemoryRegion { backing, ..change(0, GUEST_MEMFD, 2 * MIB, SIZE) };
    assert_eq!(vm.set_user_memory_region(changed), Err(SlotError::BackingFixed { slot: 0 }));
    assert_eq!(
        turn(&vm, GUEST_MEMFD | MemoryRegionFlags::READONLY, None),
        Err(SlotError::ReadOnlyGuestMemfd { slot: 0 })
    );
    vm.set_user_memory_region(change(0, GUEST_MEMFD, 2 * MIB, 0)).unwrap();
}
each!(userfault_is_toggled_on_a_guest_memfd_slot_, userfault_is_toggled_on_a_guest_memfd_slot);

fn huge_pages_are_recovered_as_far_as_a_beginning_log_allows<F: Format>(locking: Locking) {
    let config =
        crate::common::lazily_splitting(locking).with_huge_page_logging(slat::dirty::HugePageLogging::MarkWhole);
    let vm = Arc::new(Vm::<TestHost, F>::new(TestHost::default(), config).unwrap());
    let words = words(16, 0);
    vm.set_user_memory_region(slot(USERFAULT, bitmap(&words, PageSize::Size4K))).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    for page in 0..PAGES {
        assert_eq!(vcpu.handle_fault(gpa(page), Access::Write), RESUMED);
    }
    turn(&vm, LOG, None).unwrap();
    assert_eq!(vm.stats().recoveries, 2);
    let leaf = translate(&vm, gpa(700)).unwrap();
    assert_eq!((leaf.level, leaf.writable), (Level::L2M, false));
    assert_eq!(vcpu.handle_fault(gpa(700), Access::Write), RESUMED);
    assert_eq!(vm.get_dirty_log(0, &mut [0; 16]), Ok(512));
}
each!(
    huge_pages_are_recovered_as_far_as_a_beginning_log_allows_,
    huge_pages_are_recovered_as_far_as_a_beginning_log_allows
);
