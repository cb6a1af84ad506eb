//! Faults that an invalidation overtakes at each look at a PTE: no old frame is mapped.
//!
//! The looks right before exchanges are in the check of transitions, which release builds do not
//! have.
#![cfg(debug_assertions)]
#![allow(unsafe_code, reason = "the common host and format")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvError, channel};

use crate::common::hooked::{Hooked, at_look, was_called};
use crate::common::trap::trap_vm;
use crate::common::{Frame, MIB, TestHost, Writes, change, region, set_accessed_and_dirty, translate, walk};
use slat::baselines::Locking;
use slat::error::FaultError;
use slat::format::Format;
use slat::tables::AccessTracking;
use slat::{Access, Config, Gfn, GfnRange, Level, MemoryRegion, MemoryRegionFlags, Outcome, PageSize, Vm};

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();

fn pages(start: u64, nr_pages: u64) -> GfnRange {
    GfnRange::new(Gfn(start), nr_pages)
}

/// The state of the page before the fault is overtaken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Before {
    Empty,
    /// With a page-table page for it.
    EmptyInTable,
    ReadOnly,
    Protected,
    Tracked,
    Huge,
    HugeReadOnly,
}

/// What overtakes the fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Overtaking {
    /// The page moves to another frame.
    Replace,
    /// The page stays, is write-protected by the host, and is read.
    Forbid,
    /// The page moves to another frame while the whole space is invalidated, so that no page-table
    /// page stays; then it is read.
    ReplaceAll,
}

/// A fault is overtaken at its `nth` look at a PTE. Returns whether it has so many looks.
fn overtaken(before: Before, overtaking: Overtaking, access: Access, nth: u32) -> bool {
    let config = Config::default().with_access_tracking(AccessTracking::Faults);
    let vm = Arc::new(Vm::<TestHost, Hooked>::new(TestHost::default(), config).unwrap());
    let is_huge = matches!(before, Before::Huge | Before::HugeReadOnly);
    let size = if is_huge { PageSize::Size2M } else { PageSize::Size4K };
    let memory = region(0, 0, 4 * MIB, 0x1000, size);
    let backing = Arc::clone(memory.backing.as_ref().unwrap());
    let read_only = matches!(before, Before::ReadOnly | Before::HugeReadOnly);
    backing.reads_are_writable.store(!read_only, Ordering::SeqCst);
    let flags = if before == Before::Protected { LOG } else { NO_FLAGS };
    vm.set_user_memory_region(MemoryRegion { flags, ..memory }).unwrap();
    let (mut vcpu, mut other) = (vm.create_vcpu().unwrap(), vm.create_vcpu().unwrap());
    let gpa = Gfn(3).gpa();
    if before == Before::EmptyInTable {
        assert_eq!(vcpu.handle_fault(Gfn(4).gpa(), Access::Read), Ok(Outcome::Resume));
    } else if before != Before::Empty {
        assert_eq!(vcpu.handle_fault(gpa, Access::Read), Ok(Outcome::Resume));
    }
    if before == Before::Huge {
        vm.set_user_memory_region(change(0, LOG, 0, 4 * MIB)).unwrap();
    }
    if before == Before::Tracked {
        assert_eq!(vm.age_range(pages(0, 512)), Ok(1));
    }
    let meanwhile = {
        let vm = Arc::clone(&vm);
        move || {
            let overtakes = move || {
                let range = if overtaking == Overtaking::ReplaceAll { pages(0, 1 << 36) } else { pages(3, 1) };
                let guard = vm.invalidate_range(range).unwrap();
                let (pfn, writes) = match overtaking {
                    Overtaking::Forbid => (0x1003, Writes::Refused),
                    Overtaking::Replace | Overtaking::ReplaceAll => (0x9999, Writes::Allowed),
                };
                backing.frames.write().unwrap().insert(3, Frame { pfn, writes });
                drop(guard);
                if overtaking != Overtaking::Replace {
                    assert_eq!(other.handle_fault(gpa, Access::Read), Ok(Outcome::Resume));
                }
            };
            std::thread::spawn(overtakes).join().unwrap();
        }
    };
    at_look(Level(4), nth, meanwhile);
    let result = vcpu.handle_fault(gpa, access);
    let was_overtaken = was_called();
    let found = translate(&vm, gpa);
    if was_overtaken {
        let case = format!("{before:?} {overtaking:?} {access:?} {nth}: {result:?} {found:x?}");
        match overtaking {
            Overtaking::Forbid => assert!(found.is_none_or(|found| found.pfn.0 == 0x1003 && !found.writable), "{case}"),
            _ => assert!(found.is_none_or(|found| found.pfn.0 == 0x9999), "{case}"),
        }
        let gone = overtaking == Overtaking::Forbid && access == Access::Write;
        assert!(result == Ok(Outcome::Resume) || (gone && result == Err(FaultError::BackingGone { gpa })), "{case}");
        // The guest tries again, and must succeed. (The fault may have been complete before it was
        // overtaken.)
        let again = vcpu.handle_fault(gpa, access);
        assert_eq!(again, if gone { Err(FaultError::BackingGone { gpa }) } else { Ok(Outcome::Resume) }, "{case}");
        let written = access == Access::Write && !gone;
        assert!(gone || translate(&vm, gpa).is_some_and(|found| found.writable || !written), "{case}");
        if written && flags.contains(LOG) {
            assert_eq!(vm.get_dirty_log(0, &mut [0; 16]), Ok(1), "{case}");
        }
    }
    was_overtaken
}

#[test]
fn a_fault_that_is_overtaken_at_any_look_maps_nothing_old() {
    let mut nr_overtaken = 0;
    for before in [
        Before::Empty,
        Before::EmptyInTable,
        Before::ReadOnly,
        Before::Protected,
        Before::Tracked,
        Before::Huge,
        Before::HugeReadOnly,
    ] {
        for overtaking in [Overtaking::Replace, Overtaking::Forbid, Overtaking::ReplaceAll] {
            for access in [Access::Read, Access::Write] {
                nr_overtaken += (1..).take_while(|nth| overtaken(before, overtaking, access, *nth)).count();
            }
        }
    }
    // A fault on an empty root has no look at a present PTE before its exchange; all others have at
    // least three looks.
    assert!(nr_overtaken > 36 * 3, "{nr_overtaken}");
}

/// A write that replaces a read-only leaf has taken its number. At its `nth` look the page is
/// invalidated, and another write gets an answer from the host, and is slow with it. The page is
/// invalidated once more, the host forbids writes, and the same read-only leaf is installed again.
/// Then the first write goes on, and then the slow one. Returns whether there are so many looks.
fn a_slow_answer(nth: u32) -> bool {
    let vm = trap_vm::<Hooked>(Locking::None);
    let memory = region(0, 0, MIB, 0x1000, PageSize::Size4K);
    let backing = Arc::clone(memory.backing.as_ref().unwrap());
    backing.reads_are_writable.store(false, Ordering::SeqCst);
    vm.set_user_memory_region(memory).unwrap();
    let (mut vcpu, mut slow, mut reader) =
        (vm.create_vcpu().unwrap(), vm.create_vcpu().unwrap(), vm.create_vcpu().unwrap());
    let gpa = Gfn(3).gpa();
    assert_eq!(vcpu.handle_fault(gpa, Access::Read), Ok(Outcome::Resume));
    let (send, receive) = channel();
    let meanwhile = {
        let vm = Arc::clone(&vm);
        move || {
            let overtakes = move || {
                drop(vm.invalidate_range(pages(3, 1)).unwrap());
                let keeper = vm.host().traps().in_resolve.set();
                let writing = std::thread::spawn(move || slow.handle_fault(gpa, Access::Write));
                keeper.arrived.recv().unwrap();
                let guard = vm.invalidate_range(pages(3, 1)).unwrap();
                backing.writes_are_refused.store(true, Ordering::SeqCst);
                drop(guard);
                assert_eq!(reader.handle_fault(gpa, Access::Read), Ok(Outcome::Resume));
                send.send((keeper, writing)).unwrap();
            };
            std::thread::spawn(overtakes).join().unwrap();
        }
    };
    at_look(Level(4), nth, meanwhile);
    let result = vcpu.handle_fault(gpa, Access::Write);
    let was_overtaken = was_called();
    if was_overtaken {
        let (keeper, writing) = receive.recv().unwrap();
        keeper.go.send(()).unwrap();
        let slow_result = writing.join().unwrap();
        let entry = walk::<Hooked>(vm.host(), vm.root(), Gfn(3)).1;
        assert!(
            entry.0 & Hooked::WRITABLE == 0 || !Hooked::is_present(entry),
            "{nth}: {result:?} {slow_result:?} {entry:x?}"
        );
        assert_eq!(slow_result, Err(FaultError::BackingGone { gpa }), "{nth}");
    }
    was_overtaken
}

#[test]
fn an_answer_is_discarded_when_an_older_number_is_stored_later() {
    let nr_looks = (1..).take_while(|nth| a_slow_answer(*nth)).count();
    assert!(nr_looks > 10, "{nr_looks}");
}

/// An invalidation of `range` is overtaken, at its `nth` look at a PTE, by one of a single page
/// that the guest has written. When the second returns, its host frees the frame. By then the host
/// must have been notified that the page is dirty.
fn overtaken_by_another(range: GfnRange, nth: u32) -> bool {
    let vm = Arc::new(Vm::<TestHost, Hooked>::new(TestHost::default(), Config::default()).unwrap());
    vm.set_user_memory_region(region(0, 0, 8 * MIB, 0x1000, PageSize::Size4K)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    for gfn in [2, 3, 600] {
        assert_eq!(vcpu.handle_fault(Gfn(gfn).gpa(), Access::Write), Ok(Outcome::Resume));
    }
    let overtakes = {
        let vm = Arc::clone(&vm);
        move || {
            let guard = vm.invalidate_range(pages(3, 1)).unwrap();
            let reported = vm.host().zapped.lock().unwrap();
            assert!(
                reported.iter().flatten().any(|leaf| leaf.range == pages(3, 1) && leaf.dirty),
                "the host was not notified: {reported:?}"
            );
            drop(reported);
            drop(guard);
        }
    };
    vm.host().record_zapped();
    at_look(Level::L1G, nth, overtakes);
    drop(vm.invalidate_range(range).unwrap());
    let was_called = was_called();
    assert!([2, 3, 600].into_iter().all(|gfn| !range.contains(Gfn(gfn)) || translate(&vm, Gfn(gfn).gpa()).is_none()));
    was_called
}

#[test]
fn writes_are_reported_before_any_invalidation_of_the_page_returns() {
    for range in [pages(3, 1), pages(2, 2), pages(0, 512), pages(0, 2048)] {
        let nr_looks = (1..).take_while(|&nth| overtaken_by_another(range, nth)).count();
        assert!(nr_looks >= 5, "{nr_looks} looks in {range:?}");
    }
}

/// What happens to a page while a fault that found all PTEs empty holds an answer of the host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Younger {
    /// All is invalidated; then the page beside it is read. New page-table pages inherit the
    /// number.
    Linked,
    /// All is invalidated; then the page beside it. New page-table pages inherit the number.
    Refined,
    /// The page is invalidated without memory for a page-table page: the PTE above gets the number.
    OutOfMemory,
}

fn an_answer_is_held_beside(younger: Younger) {
    let vm = trap_vm::<Hooked>(Locking::None);
    let memory = region(0, 0, MIB, 0x1000, PageSize::Size4K);
    let backing = Arc::clone(memory.backing.as_ref().unwrap());
    vm.set_user_memory_region(memory).unwrap();
    let (mut slow, mut other) = (vm.create_vcpu().unwrap(), vm.create_vcpu().unwrap());
    let keeper = vm.host().traps().in_resolve.set();
    let reading = std::thread::spawn(move || slow.handle_fault(Gfn(3).gpa(), Access::Read));
    keeper.arrived.recv().unwrap();
    if younger == Younger::OutOfMemory {
        vm.host().fail_after(0);
    }
    let range = if younger == Younger::OutOfMemory { pages(3, 1) } else { pages(0, 1 << 36) };
    let guard = vm.invalidate_range(range).unwrap();
    backing.frames.write().unwrap().insert(3, Frame { pfn: 0x9999, writes: Writes::Allowed });
    drop(guard);
    vm.host().never_fail();
    match younger {
        Younger::Linked => assert_eq!(other.handle_fault(Gfn(4).gpa(), Access::Read), Ok(Outcome::Resume)),
        Younger::Refined => drop(vm.invalidate_range(pages(4, 1)).unwrap()),
        Younger::OutOfMemory => {}
    }
    keeper.go.send(()).unwrap();
    assert_eq!(reading.join().unwrap(), Ok(Outcome::Resume));
    let (_, entry, level) = walk::<Hooked>(vm.host(), vm.root(), Gfn(3));
    assert_eq!(Hooked::address(entry, level).pfn().0, 0x9999, "{younger:?}");
}

#[test]
fn a_stale_answer_is_discarded_where_the_number_was_inherited() {
    for younger in [Younger::Linked, Younger::Refined, Younger::OutOfMemory] {
        an_answer_is_held_beside(younger);
    }
}

/// An invalidation of a block stops at its `nth` look, until one of a page inside has reached its
/// `mth`. Then the first goes on, and unlinks the page-table page that the second is in. What the
/// second links there must not be leaked. Returns which of the looks exist.
fn unlinked_under_another(nth: u32, mth: u32) -> (bool, bool) {
    let vm = Arc::new(Vm::<TestHost, Hooked>::new(TestHost::default(), Config::default()).unwrap());
    vm.set_user_memory_region(region(0, 0, 8 * MIB, 0x1000, PageSize::Size4K)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    // So that there are page-table pages down to the empty PTE of page 3.
    assert_eq!(vcpu.handle_fault(Gfn(600).gpa(), Access::Write), Ok(Outcome::Resume));
    let ((here, arrived), (go, released), (send, receive)) = (channel(), channel::<()>(), channel());
    let part = {
        let vm = Arc::clone(&vm);
        move || {
            let part = std::thread::spawn(move || {
                at_look(Level(4), mth, move || {
                    here.send(()).unwrap();
                    released.recv().unwrap();
                });
                drop(vm.invalidate_range(pages(3, 1)).unwrap());
                was_called()
            });
            // An error means that it has no such look.
            let _: Result<(), RecvError> = arrived.recv();
            send.send(part).unwrap();
        }
    };
    at_look(Level(4), nth, part);
    drop(vm.invalidate_range(pages(0, 1 << 18)).unwrap());
    let was_called = was_called();
    let has_stopped = was_called && go.send(()).is_ok() && receive.recv().unwrap().join().unwrap();
    drop(vm.invalidate_range(pages(0, 1 << 36)).unwrap());
    vm.reclaim();
    drop(vcpu);
    assert_eq!((vm.stats().live_tables(), vm.host().live_tables()), (1, 1), "{nth} {mth}");
    (was_called, has_stopped)
}

#[test]
fn no_table_below_an_unlinked_table_is_leaked() {
    let mut nr_stopped = 0;
    let nr_looks = (1..).take_while(|&nth| {
        nr_stopped += (1..).take_while(|&mth| unlinked_under_another(nth, mth).1).count();
        unlinked_under_another(nth, 1).0
    });
    assert!(nr_looks.count() >= 5 && nr_stopped >= 20, "{nr_stopped}");
}

/// A CPU writes through a leaf at the `nth` look of an invalidation. If it could, the host is
/// notified that the page is dirty.
fn written_under_an_invalidation(size: PageSize, range: GfnRange, nth: u32) -> bool {
    let vm = Arc::new(Vm::<TestHost, Hooked>::new(TestHost::default(), Config::default()).unwrap());
    vm.set_user_memory_region(region(0, 0, 4 * MIB, 0x1000, size)).unwrap();
    let gpa = Gfn(3).gpa();
    assert_eq!(vm.create_vcpu().unwrap().handle_fault(gpa, Access::Read), Ok(Outcome::Resume));
    let is_written = Arc::new(AtomicBool::new(false));
    let write = {
        let (vm, is_written) = (Arc::clone(&vm), Arc::clone(&is_written));
        move || {
            let found = translate(&vm, gpa);
            let written = found.is_some_and(|found| set_accessed_and_dirty(&vm, gpa, found, Access::Write));
            is_written.store(written, Ordering::SeqCst);
        }
    };
    vm.host().record_zapped();
    at_look(Level(4), nth, write);
    drop(vm.invalidate_range(range).unwrap());
    let was_called = was_called();
    let is_reported = vm.host().take_zapped().iter().any(|leaf| leaf.range.contains(Gfn(3)) && leaf.dirty);
    assert_eq!(is_reported, is_written.load(Ordering::SeqCst), "{size:?} {range:?} {nth}");
    was_called
}

#[test]
fn writes_until_a_leaf_is_zapped_are_reported() {
    for size in [PageSize::Size4K, PageSize::Size2M] {
        for range in [pages(3, 1), pages(0, 512)] {
            let nr_looks = (1..).take_while(|&nth| written_under_an_invalidation(size, range, nth)).count();
            assert!(nr_looks >= 4, "{nr_looks}");
        }
    }
}

/// An aging is overtaken at its `nth` look by an invalidation that moves the page to another frame.
fn aging_is_overtaken(tracking: AccessTracking, size: PageSize, nth: u32) -> bool {
    let config = Config::default().with_access_tracking(tracking);
    let vm = Arc::new(Vm::<TestHost, Hooked>::new(TestHost::default(), config).unwrap());
    let memory = region(0, 0, 4 * MIB, 0x1000, size);
    let backing = Arc::clone(memory.backing.as_ref().unwrap());
    vm.set_user_memory_region(memory).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.handle_fault(Gfn(3).gpa(), Access::Write), Ok(Outcome::Resume));
    let overtakes = {
        let vm = Arc::clone(&vm);
        move || {
            let guard = vm.invalidate_range(pages(0, 512)).unwrap();
            backing.frames.write().unwrap().insert(3, Frame { pfn: 0x9999, writes: Writes::Allowed });
            drop(guard);
        }
    };
    at_look(Level(4), nth, overtakes);
    vm.age_range(pages(0, 512)).unwrap();
    let was_called = was_called();
    assert_eq!(vcpu.handle_fault(Gfn(3).gpa(), Access::Write), Ok(Outcome::Resume));
    let expected = if was_called { 0x9999 } else { 0x1003 };
    assert_eq!(translate(&vm, Gfn(3).gpa()).map(|found| found.pfn.0), Some(expected), "{tracking:?} {size:?} {nth}");
    was_called
}

#[test]
fn aging_restores_no_invalidated_leaf() {
    for tracking in [AccessTracking::AccessedBit, AccessTracking::Faults] {
        for size in [PageSize::Size4K, PageSize::Size2M] {
            let nr_looks = (1..).take_while(|&nth| aging_is_overtaken(tracking, size, nth)).count();
            assert!(nr_looks >= 3, "{nr_looks}");
        }
    }
}

/// An aging of small leaves is overtaken at its `nth` look by a recovery that makes them one leaf.
/// Each page counts once.
fn aging_is_overtaken_by_a_recovery(range: GfnRange, nth: u32) -> bool {
    let vm = Arc::new(Vm::<TestHost, Hooked>::new(TestHost::default(), Config::default()).unwrap());
    vm.set_user_memory_region(region(0, 0, 4 * MIB, 0x1000, PageSize::Size2M)).unwrap();
    assert_eq!(vm.create_vcpu().unwrap().handle_fault(Gfn(3).gpa(), Access::Write), Ok(Outcome::Resume));
    assert_eq!(vm.split_range(pages(0, 512), PageSize::Size4K), Ok(1));
    let recovering = Arc::clone(&vm);
    at_look(Level(4), nth, move || {
        let recover = move || assert_eq!(recovering.recover_range(pages(0, 512)), Ok(1));
        std::thread::spawn(recover).join().unwrap();
    });
    assert_eq!(vm.age_range(range), Ok(range.nr_pages()), "{nth}");
    was_called()
}

#[test]
fn aging_counts_a_recovered_page_once() {
    for range in [pages(0, 512), pages(5, 100)] {
        let (mut nth, mut nr_overtaken) = (1, 0);
        while aging_is_overtaken_by_a_recovery(range, nth) {
            nr_overtaken += 1;
            nth += 1 + nth / 3;
        }
        assert!(nr_overtaken > 10, "{nr_overtaken}");
    }
}
