//! How long the lock is held, if there is one: which holds are timed, and from when to when.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::common::hooked::{Hooked, at_look, was_called};
use crate::common::{MIB, TestHost, change, region, vm};
use slat::baselines::Locking;
use slat::format::{Format, Npt};
use slat::stats::Stats;
use slat::{Access, Config, Gfn, MemoryRegionFlags, Outcome, PageSize, Vcpu, Vm};

const LOCKS: [Locking; 2] = [Locking::Shared, Locking::Exclusive];
const SLOT: u32 = 0;

/// Longer than any thread is without its CPU.
const MINUTE_NS: u64 = 60_000_000_000;

fn fill<F: Format>(vcpu: &mut Vcpu<TestHost, F>, pages: impl IntoIterator<Item = u64>) {
    for page in pages {
        assert_eq!(vcpu.handle_fault(Gfn(page).gpa(), Access::Write), Ok(Outcome::Resume));
    }
}

/// The statistics of a VM in which one vCPU has filled 300 pages.
fn after_300_faults(locking: Locking) -> Stats {
    let vm = vm::<Npt>(locking);
    vm.set_user_memory_region(region(SLOT, 0, 2 * MIB, 0x1000, PageSize::Size4K)).unwrap();
    fill(&mut vm.create_vcpu().unwrap(), 0..300);
    vm.stats()
}

#[test]
fn one_hold_in_128_is_timed() {
    for locking in LOCKS {
        let stats = after_300_faults(locking);
        assert_eq!((stats.lock_acquisitions, stats.lock_waits, stats.lock_hold_ns.count()), (300, 0, 3), "{locking:?}");
        assert!(stats.lock_hold_ns.max() < MINUTE_NS);
    }
}

#[test]
fn without_a_lock_nothing_is_held() {
    let stats = after_300_faults(Locking::None);
    assert_eq!((stats.lock_acquisitions, stats.lock_hold_ns.count(), stats.lock_wait_ns.count()), (0, 0, 0));
}

/// The time of the hold of a fault in which a minute passes at the `nth` look at a PTE; `None` if
/// it has not so many looks.
fn hold_with_a_minute_at_look(locking: Locking, nth: u32) -> Option<u64> {
    let vm: Arc<Vm<TestHost, Hooked>> =
        Arc::new(Vm::new(TestHost::default(), Config::default().with_locking(locking)).unwrap());
    vm.set_user_memory_region(region(SLOT, 0, 2 * MIB, 0x1000, PageSize::Size4K)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    fill(&mut vcpu, 0..40);
    assert_eq!(vm.stats().lock_hold_ns.count(), 0);
    let of_clock = Arc::clone(&vm);
    at_look(Npt::ROOT_LEVEL, nth, move || {
        of_clock.host().clock_ahead_ns.fetch_add(MINUTE_NS, Ordering::Relaxed);
    });
    fill(&mut vcpu, 40..41);
    let holds = vm.stats().lock_hold_ns;
    assert_eq!(holds.count(), 1);
    was_called().then(|| holds.max())
}

#[test]
fn a_hold_lasts_from_acquire_to_release() {
    for locking in LOCKS {
        let long: Vec<bool> = (1..)
            .map_while(|nth| hold_with_a_minute_at_look(locking, nth))
            .map(|hold_ns| hold_ns >= MINUTE_NS)
            .collect();
        // A fault reads the PTEs without the lock, and once more with it; between the two it
        // resolves.
        let nr_before = long.iter().take_while(|is_long| !**is_long).count();
        assert!(nr_before > 0 && nr_before < long.len(), "{locking:?}: {long:?}");
        assert!(long[nr_before..].iter().all(|is_long| *is_long), "{locking:?}: {long:?}");
    }
}

#[test]
fn each_turn_of_a_long_operation_is_a_hold_of_its_own() {
    for locking in LOCKS {
        let vm = vm::<Npt>(locking);
        vm.set_user_memory_region(region(SLOT, 0, 512 * MIB, 0x1000, PageSize::Size4K)).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        fill(&mut vcpu, (0..256).map(|table| table * 512));
        let filled = vm.stats();
        assert_eq!((filled.lock_acquisitions, filled.lock_hold_ns.count()), (256, 2));
        vm.host().always_yields.store(true, Ordering::Relaxed);
        vm.set_user_memory_region(change(SLOT, MemoryRegionFlags::empty(), 0, 0)).unwrap();
        let nr_turns = vm.stats().lock_acquisitions - filled.lock_acquisitions;
        // One of the first 128 is timed, the 41st.
        assert!(nr_turns > 40 && vm.stats().lock_hold_ns.count() > 2, "{locking:?}: {nr_turns}");
    }
}
