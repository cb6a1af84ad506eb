//! Cases of KVM's own tests of its memory interface, on this engine. mmu_stress_test: many vCPUs
//! over several memslots that are remade, made read-only and writable again meanwhile.
//! set_memory_region_test: memslots that are moved and deleted while in use, invalid ones, and the
//! greatest number of them.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex};

use crate::common::guest::Guest;
use crate::common::{GIB, MIB, TestBacking, TestHost, assert_no_table_is_left, change, each, region, translate, vm};
use slat::baselines::Locking;
use slat::error::{FaultError, SlotError};
use slat::format::Format;
use slat::{Access, Exit, Gfn, GfnRange, Gpa, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Vm};

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();

mod stress {
    use super::*;

    pub const NR_GUESTS: u64 = 8;
    pub const NR_SLOTS: u32 = 3;
    /// A memslot begins and ends inside a block.
    pub const FIRST: u64 = MIB;
    pub const SLOT_PAGES: u64 = 3 * 512 + 17;

    pub fn range(slot: u32) -> GfnRange {
        GfnRange::new(Gfn(FIRST / PAGE_SIZE + u64::from(slot) * SLOT_PAGES), SLOT_PAGES)
    }

    /// Frame of guest frame `gfn` in each life of the memslots.
    pub fn pfn(life: u64, gfn: u64) -> u64 {
        (life << 20) + gfn
    }

    /// Makes all memslots; every other one of huge pages.
    pub fn create<F: Format>(vm: &Vm<TestHost, F>, life: u64) -> Vec<Arc<TestBacking>> {
        let make = |slot| {
            let range = range(slot);
            let size = if slot % 2 == 0 { PageSize::Size2M } else { PageSize::Size4K };
            let start = range.start.gpa().0;
            let memory = region(slot, start, SLOT_PAGES * PAGE_SIZE, pfn(life, range.start.0), size);
            let backing = Arc::clone(memory.backing.as_ref().unwrap());
            vm.set_user_memory_region(memory).unwrap();
            backing
        };
        (0..NR_SLOTS).map(make).collect()
    }

    pub fn delete<F: Format>(vm: &Vm<TestHost, F>) {
        for slot in 0..NR_SLOTS {
            vm.set_user_memory_region(change(slot, NO_FLAGS, 0, 0)).unwrap();
        }
    }

    /// The frames of all memslots, beginning with a share of `guest`'s own.
    pub fn frames(guest: u64) -> impl Iterator<Item = u64> + Clone {
        let (first, all) = (FIRST / PAGE_SIZE, u64::from(NR_SLOTS) * SLOT_PAGES);
        let offset = guest * all / NR_GUESTS;
        (0..all).map(move |page| first + (page + offset) % all)
    }
}

/// Accesses page `gfn` until that succeeds, and checks that it has the frame of `life`. An error
/// among `allowed` is returned; any other fails the test.
fn access<F: Format>(guest: &mut Guest<F>, life: u64, gfn: u64, access: Access) -> Result<(), FaultError> {
    let gpa = Gfn(gfn).gpa();
    loop {
        let done = guest.during_access(gpa, |found| {
            let found = found.filter(|found| access != Access::Write || found.writable);
            found.map(|found| assert_eq!(found.pfn.0, stress::pfn(life, gfn))).is_some()
        });
        if done {
            return Ok(());
        }
        assert_eq!(guest.vcpu.handle_fault(gpa, access)?, Outcome::Resume);
    }
}

each!(many_vcpus_touch_all_slots_through_their_lives, mmu_stress);
fn mmu_stress<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    let backings = Mutex::new(stress::create(&vm, 1));
    let (phase, is_read_only) = (Barrier::new(stress::NR_GUESTS as usize + 1), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for index in 0..stress::NR_GUESTS {
            let (mut guest, phase, is_read_only) = (Guest::new(&vm), &phase, &is_read_only);
            scope.spawn(move || {
                // Run 1; reset; run 2.
                for life in [1, 2] {
                    for gfn in stress::frames(index) {
                        assert_eq!(access(&mut guest, life, gfn, Access::Write), Ok(()));
                    }
                    phase.wait();
                    phase.wait();
                }
                // Read-only, while this writes: an error is allowed once that has begun, and
                // required when it is done.
                for gfn in stress::frames(index).cycle() {
                    let was_read_only = is_read_only.load(Ordering::SeqCst);
                    let result = access(&mut guest, 2, gfn, Access::Write);
                    if result != Ok(()) {
                        assert_eq!(result, Err(FaultError::BackingGone { gpa: Gfn(gfn).gpa() }));
                    }
                    assert!(!was_read_only || result.is_err(), "a write to read-only page {gfn:#x}");
                    if was_read_only {
                        break;
                    }
                }
                for gfn in stress::frames(index) {
                    assert_eq!(
                        access(&mut guest, 2, gfn, Access::Write),
                        Err(FaultError::BackingGone { gpa: Gfn(gfn).gpa() })
                    );
                    assert_eq!(access(&mut guest, 2, gfn, Access::Read), Ok(()));
                }
                phase.wait();
                phase.wait();
                // Writable again.
                for gfn in stress::frames(index) {
                    assert_eq!(access(&mut guest, 2, gfn, Access::Write), Ok(()));
                }
            });
        }
        for life in [1, 2] {
            phase.wait();
            for gfn in stress::frames(0) {
                let found = translate(&vm, Gfn(gfn).gpa()).map(|found| (found.pfn.0, found.writable));
                assert_eq!(found, Some((stress::pfn(life, gfn), true)));
            }
            if life == 1 {
                stress::delete(&vm);
                assert!(stress::frames(0).all(|gfn| translate(&vm, Gfn(gfn).gpa()).is_none()));
                *backings.lock().unwrap() = stress::create(&vm, 2);
            }
            phase.wait();
        }
        let backings = backings.lock().unwrap();
        for (slot, backing) in (0..).zip(&*backings) {
            let held = vm.invalidate_range(stress::range(slot)).unwrap();
            backing.writes_are_refused.store(true, Ordering::SeqCst);
            drop(held);
        }
        is_read_only.store(true, Ordering::SeqCst);
        phase.wait();
        // A leaf that is not writable becomes writable without an invalidation.
        for backing in &*backings {
            backing.writes_are_refused.store(false, Ordering::SeqCst);
        }
        phase.wait();
    });
    stress::delete(&vm);
    assert_no_table_is_left(&vm);
}

/// The guest reads one page while its memslot is moved away and back, or deleted and made again. It
/// finds the page's frame or a device, and the required one of them when nothing moves.
fn in_use<F: Format>(locking: Locking, remove: fn(&Vm<TestHost, F>), restore: fn(&Vm<TestHost, F>)) {
    const ROUNDS: u32 = 30;
    let vm = vm::<F>(locking);
    restore(&vm);
    // Even: the memslot exists. Odd: it does not. A number in between for each change.
    let version = AtomicU32::new(0);
    let nr_seen = [AtomicU64::new(0), AtomicU64::new(0)];
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let (mut guest, version, nr_seen) = (Guest::new(&vm), &version, &nr_seen);
            scope.spawn(move || {
                while version.load(Ordering::SeqCst) < 4 * ROUNDS {
                    let before = version.load(Ordering::SeqCst);
                    let result = guest.try_access(Gpa(GIB), Access::Read, |found| assert_eq!(found.pfn.0, 0x1000));
                    let is_there = match result {
                        Ok(()) => true,
                        Err(Some(exit)) => {
                            assert_eq!(exit, Exit::Mmio { gpa: Gpa(GIB), access: Access::Read });
                            false
                        }
                        Err(None) => continue,
                    };
                    // Nothing changed between the start and the end of the access: then its result
                    // is known.
                    if before.is_multiple_of(2) && version.load(Ordering::SeqCst) == before {
                        assert_eq!(is_there, before.is_multiple_of(4), "in version {before}");
                        nr_seen[usize::from(is_there)].fetch_add(1, Ordering::SeqCst);
                    }
                }
            });
        }
        for round in 0..2 * ROUNDS {
            let seen = &nr_seen[usize::from(round % 2 == 0)];
            let enough = seen.load(Ordering::SeqCst) + 3;
            while seen.load(Ordering::SeqCst) < enough {
                std::thread::yield_now();
            }
            version.fetch_add(1, Ordering::SeqCst);
            if round % 2 == 0 {
                remove(&vm)
            } else {
                restore(&vm)
            }
            version.fetch_add(1, Ordering::SeqCst);
        }
    });
    remove(&vm);
}

each!(a_slot_in_use_is_deleted_and_made_again, delete_in_use);
fn delete_in_use<F: Format>(locking: Locking) {
    in_use::<F>(
        locking,
        |vm| vm.set_user_memory_region(change(3, NO_FLAGS, 0, 0)).unwrap(),
        |vm| vm.set_user_memory_region(region(3, GIB, 2 * MIB, 0x1000, PageSize::Size2M)).unwrap(),
    );
}

each!(a_slot_in_use_is_moved_away_and_back, move_in_use);
fn move_in_use<F: Format>(locking: Locking) {
    in_use::<F>(
        locking,
        // By less than its size, as in KVM's test.
        |vm| vm.set_user_memory_region(change(3, NO_FLAGS, GIB + PAGE_SIZE, 2 * MIB)).unwrap(),
        |vm| match vm.set_user_memory_region(change(3, NO_FLAGS, GIB, 2 * MIB)) {
            Err(SlotError::NoBacking { .. }) => {
                vm.set_user_memory_region(region(3, GIB, 2 * MIB, 0x1000, PageSize::Size2M)).unwrap();
            }
            moved => moved.unwrap(),
        },
    );
}

each!(without_slots_every_access_is_mmio, zero_slots);
fn zero_slots<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    let mut vcpu = vm.create_vcpu().unwrap();
    for gpa in [0, 0xfff, GIB, (1 << F::GPA_BITS) - 1] {
        for access in [Access::Read, Access::Write, Access::Execute] {
            let gpa = Gpa(gpa);
            assert_eq!(vcpu.handle_fault(gpa, access), Ok(Outcome::Exit(Exit::Mmio { gpa, access })));
        }
    }
    assert_eq!((vm.stats().exits, vm.host().live_tables()), (12, 1));
}

each!(each_unknown_flag_is_refused, invalid_flags);
fn invalid_flags<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    let known = MemoryRegionFlags::all();
    for bit in 0..32 {
        let flags = MemoryRegionFlags::from_bits_retain(1 << bit);
        let result = vm.set_user_memory_region(MemoryRegion { flags, ..region(0, 0, MIB, 0x100, PageSize::Size4K) });
        if flags == MemoryRegionFlags::USERFAULT {
            assert_eq!(result, Err(SlotError::NoUserfaultBitmap { slot: 0 }));
        } else if known.contains(flags) {
            assert_eq!(result, Ok(()));
            vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
        } else {
            assert_eq!(result, Err(SlotError::UnknownFlags { slot: 0, flags: 1 << bit }));
        }
    }
    let both = MemoryRegionFlags::READONLY | LOG;
    assert_eq!(
        vm.set_user_memory_region(MemoryRegion { flags: both, ..region(0, 0, MIB, 0x100, PageSize::Size4K) }),
        Ok(())
    );
}

#[test]
fn memslots_are_limited_by_their_numbers() {
    let vm = vm::<slat::format::Npt>(Locking::None);
    let gpa = |slot: u32| u64::from(slot) * 2 * PAGE_SIZE;
    let new = |slot: u32| region(slot, gpa(slot), PAGE_SIZE, 0x1000 + u64::from(slot), PageSize::Size4K);
    for slot in 0..MemoryRegion::MAX_SLOTS {
        vm.set_user_memory_region(new(slot)).unwrap();
    }
    for slot in [MemoryRegion::MAX_SLOTS, MemoryRegion::MAX_SLOTS + 1, u32::MAX] {
        assert_eq!(vm.set_user_memory_region(new(slot)), Err(SlotError::SlotTooHigh { slot }));
    }
    // Over an existing one.
    let last = MemoryRegion::MAX_SLOTS - 1;
    vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
    let over = region(0, gpa(last), PAGE_SIZE, 0x1000, PageSize::Size4K);
    assert_eq!(vm.set_user_memory_region(over), Err(SlotError::Overlap { slot: 0, gpa: Gpa(gpa(last)), other: last }));
    let mut vcpu = vm.create_vcpu().unwrap();
    for slot in [1, MemoryRegion::MAX_SLOTS / 2, last] {
        assert_eq!(vcpu.handle_fault(Gpa(gpa(slot)), Access::Write), Ok(Outcome::Resume));
        assert_eq!(translate(&vm, Gpa(gpa(slot))).unwrap().pfn.0, 0x1000 + u64::from(slot));
    }
}
