//! Many vCPUs at once, beside threads that change memslots: no fault is lost or fails, and no
//! access reaches an old frame.
//!
//! Every test runs for each locking and both formats, for a bounded time. With 64 guests on few
//! cores most of them are preempted in the middle of an operation, as intended.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use crate::common::guest::{Guest, Stop};
use crate::common::random::Random;
use crate::common::{GIB, MIB, TestHost, assert_no_table_is_left, change, each, region, translate, vm, wait_until};
use slat::baselines::Locking;
use slat::error::SlotError;
use slat::format::Format;
use slat::{Access, Exit, Gpa, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Vm};

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();

/// How long each test runs for one locking and format, where it does not count rounds.
const RUN: Duration = Duration::from_millis(300);

each!(vcpus_that_fault_on_one_page_install_once_and_all_succeed, same_page);
fn same_page<F: Format>(locking: Locking) {
    const GUESTS: u64 = 8;
    const PAGES: u64 = 300;
    let vm = vm::<F>(locking);
    vm.set_user_memory_region(region(0, GIB, PAGES * PAGE_SIZE, 0x100_0000, PageSize::Size4K)).unwrap();
    let barrier = Barrier::new(GUESTS as usize);
    std::thread::scope(|scope| {
        for index in 0..GUESTS {
            let (mut guest, barrier) = (Guest::new(&vm), &barrier);
            scope.spawn(move || {
                for page in 0..PAGES {
                    let gpa = Gpa(GIB + page * PAGE_SIZE);
                    let access = if index % 2 == 0 { Access::Write } else { Access::Read };
                    barrier.wait();
                    assert_eq!(guest.vcpu.handle_fault(gpa, access), Ok(Outcome::Resume));
                    let found = guest.during_access(gpa, |found| found.expect("a fault that was fixed"));
                    assert_eq!((found.pfn.0, found.writable), (0x100_0000 + page, true));
                }
            });
        }
    });
    let stats = vm.stats();
    assert_eq!((stats.installed_4k, stats.writes_restored, stats.zapped), (PAGES, 0, 0));
    assert_eq!(stats.faults, stats.installed_4k + stats.spurious, "a fault that was neither served nor spurious");
    let nr_tables = F::ROOT_LEVEL.0;
    assert_eq!((vm.stats().live_tables(), vm.host().live_tables()), (nr_tables.into(), nr_tables.into()));
    vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
    assert_no_table_is_left(&vm);
}

each!(vcpus_that_go_over_one_range_in_different_orders_map_each_page_once, different_orders);
fn different_orders<F: Format>(locking: Locking) {
    const GUESTS: u64 = 64;
    const BLOCKS: u64 = 4;
    let vm = vm::<F>(locking);
    // The first memslot's blocks are mapped by 2 MiB, the second's by 4 KiB.
    vm.set_user_memory_region(region(0, GIB, BLOCKS * 2 * MIB, 0x100_0000, PageSize::Size2M)).unwrap();
    vm.set_user_memory_region(region(1, GIB + BLOCKS * 2 * MIB, 2 * MIB, 0x200_0000, PageSize::Size4K)).unwrap();
    let nr_pages = (BLOCKS + 1) * 512;
    let expected = |page| if page < BLOCKS * 512 { 0x100_0000 + page } else { 0x200_0000 + page - BLOCKS * 512 };
    std::thread::scope(|scope| {
        for index in 0..GUESTS {
            let mut guest = Guest::new(&vm);
            scope.spawn(move || {
                // Odd strides visit every page once.
                let stride = (Random::new(index).next() % nr_pages) | 1;
                let stride = if stride.is_multiple_of(5) { stride + 2 } else { stride };
                for turn in 0..nr_pages {
                    let page = (index * 37 + turn * stride) % nr_pages;
                    let gpa = Gpa(GIB + page * PAGE_SIZE);
                    while guest.try_access(gpa, Access::Write, |found| assert_eq!(found.pfn.0, expected(page))).is_err()
                    {
                    }
                }
            });
        }
    });
    for page in 0..nr_pages {
        assert_eq!(translate(&vm, Gpa(GIB + page * PAGE_SIZE)).unwrap().pfn.0, expected(page));
    }
    let stats = vm.stats();
    assert_eq!((stats.installed_2m, stats.installed_4k, stats.writes_restored), (BLOCKS, 512, 0));
    for slot in 0..2 {
        vm.set_user_memory_region(change(slot, NO_FLAGS, 0, 0)).unwrap();
    }
    assert_no_table_is_left(&vm);
}

/// The life of the memslot that changes under the guests, as a sequence of versions.
mod life {
    use super::*;

    pub const SLOT: u32 = 7;
    pub const NR_PAGES: u64 = 512 + 40;
    pub const START: u64 = GIB / PAGE_SIZE;
    /// Pages of the space that the memslot ever covers.
    pub const SPACE: u64 = NR_PAGES + 1;
    /// Each life of the memslot: none, created, moved up by a page, logging, not logging, moved
    /// back.
    pub const VERSIONS_A_LIFE: u64 = 6;

    pub fn first_pfn(version: u64) -> u64 {
        (version / VERSIONS_A_LIFE + 1) << 12
    }

    /// Where the memslot begins in a version, if it exists.
    pub fn start(version: u64) -> Option<u64> {
        match version % VERSIONS_A_LIFE {
            0 => None,
            1 | 5 => Some(START),
            _ => Some(START + 1),
        }
    }

    /// The frame of a page in a version.
    pub fn pfn(version: u64, gfn: u64) -> Option<u64> {
        let page = gfn.checked_sub(start(version)?)?;
        (page < NR_PAGES).then_some(first_pfn(version) + page)
    }

    /// Makes version `version` from the one before.
    pub fn enter<F: Format>(vm: &Vm<TestHost, F>, version: u64) -> Result<(), SlotError> {
        let size_bytes = NR_PAGES * PAGE_SIZE;
        let at = start(version).unwrap_or(0) * PAGE_SIZE;
        vm.set_user_memory_region(match version % VERSIONS_A_LIFE {
            0 => change(SLOT, NO_FLAGS, 0, 0),
            1 => {
                let size = if version.is_multiple_of(2) { PageSize::Size4K } else { PageSize::Size2M };
                region(SLOT, at, size_bytes, first_pfn(version), size)
            }
            3 => change(SLOT, LOG, at, size_bytes),
            _ => change(SLOT, NO_FLAGS, at, size_bytes),
        })
    }
}

/// The versions that guests may access: from the last one whose making has returned to the last one
/// begun.
#[derive(Default)]
struct Versions {
    made: AtomicU64,
    begun: AtomicU64,
}

impl Versions {
    /// Whether `allowed` holds for a version since `from`.
    fn any_since(&self, from: u64, allowed: impl Fn(u64) -> bool) -> bool {
        (from..=self.begun.load(Ordering::SeqCst)).any(allowed)
    }
}

/// Accesses the changing memslot, and sometimes the one behind it, which never changes, until
/// `stop`.
fn live_in_changing_memory<F: Format>(mut guest: Guest<F>, thread: u64, versions: &Versions, stop: &AtomicBool) {
    let mut random = Random::new(thread);
    while !stop.load(Ordering::Relaxed) {
        let number = random.next();
        let access = if number & 1 == 0 { Access::Write } else { Access::Read };
        let page = (number >> 8) % (life::SPACE + 16);
        let gfn = life::START + page;
        let gpa = Gpa(gfn * PAGE_SIZE);
        if page >= life::SPACE {
            let expected = STABLE_PFN + page - life::SPACE;
            if let Err(Some(exit)) = guest.try_access(gpa, access, |found| assert_eq!(found.pfn.0, expected)) {
                panic!("the slot at {gpa} was never changed, and yet: {exit:?}");
            }
            continue;
        }
        let from = versions.made.load(Ordering::SeqCst);
        let result = guest.try_access(gpa, access, |found| {
            let pfn = found.pfn.0;
            // Read now, not when the access began: a change returns only when no access uses what
            // it has zapped.
            let from = versions.made.load(Ordering::SeqCst);
            let allowed = |version| life::pfn(version, gfn) == Some(pfn);
            assert!(versions.any_since(from, allowed), "frame {pfn:#x} at {gfn:#x} is not of a version since {from}");
        });
        if let Err(Some(Exit::Mmio { .. })) = result {
            let allowed = |version| life::pfn(version, gfn).is_none();
            assert!(versions.any_since(from, allowed), "no memory at {gfn:#x}, and yet in all versions since {from}");
        }
    }
}

/// First frame of the memslot behind the changing one.
const STABLE_PFN: u64 = 0xf00_0000_0000 >> 12;

each!(a_slot_that_changes_under_64_vcpus_never_shows_an_old_version, changing_slot);
fn changing_slot<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    let stable_gpa = (life::START + life::SPACE) * PAGE_SIZE;
    vm.set_user_memory_region(region(1, stable_gpa, 16 * PAGE_SIZE, STABLE_PFN, PageSize::Size4K)).unwrap();
    let (versions, stop) = (Versions::default(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for thread in 0..64 {
            let (guest, versions, stop) = (Guest::new(&vm), &versions, &stop);
            scope.spawn(move || live_in_changing_memory(guest, thread, versions, stop));
        }
        let start = Instant::now();
        let mut version = 0;
        let mut bitmap = [0; life::NR_PAGES.div_ceil(64) as usize];
        while start.elapsed() < RUN {
            version += 1;
            versions.begun.store(version, Ordering::SeqCst);
            life::enter(&vm, version).unwrap();
            versions.made.store(version, Ordering::SeqCst);
            // This thread alone frees page-table pages, so it may walk without a guard.
            for gfn in life::START..life::START + life::SPACE {
                let expected = life::pfn(version, gfn);
                let found = translate(&vm, Gpa(gfn * PAGE_SIZE)).map(|found| found.pfn.0);
                assert!(found.is_none() || found == expected, "{found:x?} at {gfn:#x} in version {version}");
            }
            if version % life::VERSIONS_A_LIFE == 3 {
                vm.get_dirty_log(life::SLOT, &mut bitmap).unwrap();
            }
        }
        stop.store(true, Ordering::SeqCst);
    });
    if life::start(versions.made.load(Ordering::SeqCst)).is_some() {
        vm.set_user_memory_region(change(life::SLOT, NO_FLAGS, 0, 0)).unwrap();
    }
    vm.set_user_memory_region(change(1, NO_FLAGS, 0, 0)).unwrap();
    assert_no_table_is_left(&vm);
}

each!(a_backing_is_dropped_after_its_slot_and_not_before, dropped_backing);
fn dropped_backing<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let guest = |thread: u64| {
            let (mut guest, stop) = (Guest::new(&vm), &stop);
            scope.spawn(move || {
                let mut random = Random::new(thread);
                while !stop.load(Ordering::Relaxed) {
                    // The host checks that it never resolves in a backing that was dropped.
                    let gpa = Gpa(random.next() % 16 * PAGE_SIZE);
                    let _ = guest.try_access(gpa, Access::Write, drop);
                }
                guest
            })
        };
        let guests: Vec<_> = (0..8).map(guest).collect();
        let start = Instant::now();
        let mut dropped = Vec::new();
        while start.elapsed() < RUN {
            let memory = region(0, 0, 16 * PAGE_SIZE, 0x1000, PageSize::Size4K);
            dropped.push(Arc::clone(&memory.backing.as_ref().unwrap().dropped));
            vm.set_user_memory_region(memory).unwrap();
            assert!(!dropped.last().unwrap().load(Ordering::SeqCst));
            std::thread::yield_now();
            assert!(!dropped.last().unwrap().load(Ordering::SeqCst), "a backing was dropped before its slot");
            vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
        }
        stop.store(true, Ordering::SeqCst);
        // The vCPUs may still exist, but must be out of their guards.
        let guests: Vec<_> = guests.into_iter().map(|guest| guest.join().unwrap()).collect();
        vm.reclaim();
        assert!(dropped.iter().all(|dropped| dropped.load(Ordering::SeqCst)), "backings are never dropped");
        drop(guests);
    });
    assert_no_table_is_left(&vm);
}

each!(the_second_of_two_concurrent_changes_of_a_slot_gets_slot_busy, busy_slot);
fn busy_slot<F: Format>(locking: Locking) {
    const SIZE: u64 = 64 * PAGE_SIZE;
    let vm = vm::<F>(locking);
    vm.set_user_memory_region(region(0, 0, SIZE, 0x1000, PageSize::Size4K)).unwrap();
    let (stop, done) = (AtomicBool::new(false), [AtomicU64::new(0), AtomicU64::new(0)]);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (mut guest, stop) = (Guest::new(&vm), &stop);
            scope.spawn(move || {
                let _stop = Stop(stop);
                let mut random = Random::new(thread);
                while !stop.load(Ordering::Relaxed) {
                    let gfn = random.next() % 72;
                    let found = guest.try_access(Gpa(gfn * PAGE_SIZE), Access::Write, |found| found.pfn.0);
                    // The memslot is at 0 or at 8 pages.
                    assert!(found.is_err() || found == Ok(0x1000 + gfn) || found == Ok(0x1000 + gfn - 8), "{found:x?}");
                }
            });
        }
        for thread in 0..2 {
            let (vm, stop, done) = (&vm, &stop, &done[thread as usize]);
            scope.spawn(move || {
                let _stop = Stop(stop);
                let mut random = Random::new(thread + 100);
                while !stop.load(Ordering::Relaxed) {
                    let number = random.next();
                    let flags = if number & 1 == 0 { NO_FLAGS } else { LOG };
                    let gpa = if number & 2 == 0 { 0 } else { 8 * PAGE_SIZE };
                    match vm.set_user_memory_region(change(0, flags, gpa, SIZE)) {
                        Ok(()) => drop(done.fetch_add(1, Ordering::Relaxed)),
                        Err(error) => {
                            assert_eq!(error, SlotError::SlotBusy { slot: 0 });
                            std::thread::yield_now();
                        }
                    }
                }
            });
        }
        // A thread may be unlucky for long, but not for ever.
        let _stop = Stop(&stop);
        let start = Instant::now();
        let has_each_changed = || done.iter().all(|done| done.load(Ordering::SeqCst) != 0);
        wait_until("a change of each thread", &stop, || start.elapsed() >= RUN && has_each_changed());
    });
    vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
    assert_no_table_is_left(&vm);
}

each!(slots_that_come_and_go_side_by_side_do_not_disturb_each_other, neighbours);
fn neighbours<F: Format>(locking: Locking) {
    const PAGES: u64 = 100;
    let vm = vm::<F>(locking);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..4u32 {
            let (mut guest, stop, vm) = (Guest::new(&vm), &stop, &vm);
            scope.spawn(move || {
                // Each has its own memslot; they share page-table pages.
                let gpa = u64::from(thread) * PAGES * PAGE_SIZE;
                let mut lives = 0;
                while !stop.load(Ordering::Relaxed) {
                    lives += 1;
                    let first_pfn = (lives * 4 + u64::from(thread)) << 10;
                    vm.set_user_memory_region(region(thread, gpa, PAGES * PAGE_SIZE, first_pfn, PageSize::Size4K))
                        .unwrap();
                    for page in 0..PAGES {
                        let gpa = Gpa(gpa + page * PAGE_SIZE);
                        let check = |found: crate::common::Translation| assert_eq!(found.pfn.0, first_pfn + page);
                        while let Err(exit) = guest.try_access(gpa, Access::Write, check) {
                            assert_eq!(exit, None);
                        }
                    }
                    vm.set_user_memory_region(change(thread, NO_FLAGS, 0, 0)).unwrap();
                    for page in 0..PAGES {
                        guest.during_access(Gpa(gpa + page * PAGE_SIZE), |found| assert_eq!(found, None));
                    }
                }
            });
        }
        std::thread::sleep(RUN);
        stop.store(true, Ordering::SeqCst);
    });
    assert_no_table_is_left(&vm);
}
