//! Epochs under loom: a thing that a guard can reach is not freed while the guard is open.
//! Schedules of a few threads with at most [`PREEMPTIONS`] preemptions, with the memory orders as
//! they are written.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p slat --release --lib loom`

extern crate std;

use core::ptr::NonNull;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use super::{Epochs, Exclusive, Fences, Participant};
use crate::sync::{AtomicU64, Ordering};

/// Enough for a reader that a retirement and its reclaim overtake, and that continues then.
const PREEMPTIONS: usize = 3;

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(PREEMPTIONS);
    builder.check(model);
}

/// A thing behind a pointer, as a page-table page behind a directory entry.
struct Thing {
    /// 1 while it can be found.
    linked: AtomicU64,
    /// Loom fails the test if the free is concurrent with a use.
    memory: UnsafeCell<u64>,
}

impl Thing {
    fn new() -> Thing {
        Thing { linked: AtomicU64::new(1), memory: UnsafeCell::new(7) }
    }

    fn is_linked(&self) -> bool {
        self.linked.load(Ordering::Acquire) == 1
    }

    fn use_memory(&self) {
        // SAFETY: loom has checked that no free is concurrent before it calls the closure.
        assert_eq!(self.memory.with(|memory| unsafe { *memory }), 7, "used after it was freed");
    }

    fn unlink(&self) {
        self.linked.compare_exchange(1, 0, Ordering::SeqCst, Ordering::Acquire).expect("unlinked once");
    }

    fn free(&self) {
        // SAFETY: loom has checked that no other access is concurrent before it calls the closure.
        self.memory.with_mut(|memory| unsafe { *memory = 0 });
    }
}

struct World {
    epochs: Epochs,
    things: [Thing; 2],
}

impl World {
    fn new() -> Arc<World> {
        World::with(Fences::Both)
    }

    fn with(fences: Fences) -> Arc<World> {
        Arc::new(World { epochs: Epochs::new(fences), things: [Thing::new(), Thing::new()] })
    }

    fn read(&self, participant: &Participant, thing: usize) {
        let _guard = self.epochs.pin(participant);
        if self.things[thing].is_linked() {
            self.things[thing].use_memory();
        }
    }

    /// As [`read`](Self::read), where `lock` is taken with the guard.
    fn read_under_a_lock(&self, participant: &Participant, thing: usize, lock: &AtomicU64) -> bool {
        let lock = || lock.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).ok();
        // SAFETY: a compare-and-exchange that succeeds is a read-modify-write.
        let Some((_guard, _)) = (unsafe { self.epochs.pin_by_rmw(participant, lock) }) else { return false };
        if self.things[thing].is_linked() {
            self.things[thing].use_memory();
        }
        true
    }

    fn read_in_a_call(&self, thing: usize) {
        let participant = self.epochs.borrow_participant().expect("memory for a participant");
        self.read(&participant, thing);
    }

    /// Unlinks a thing, and frees it if that is allowed at once. Returns its tag.
    fn retire(&self, thing: usize) -> u64 {
        self.things[thing].unlink();
        let tag = self.epochs.advance_epoch();
        if tag < self.epochs.oldest_open(|| ()) {
            self.things[thing].free();
        }
        tag
    }
}

/// Checks `read`, which reads thing 0, beside the retirement of that thing.
fn check_beside_a_retirement(read: fn(&World)) {
    check(move || {
        let world = World::new();
        let reader = thread::spawn({
            let world = Arc::clone(&world);
            move || read(&world)
        });
        world.retire(0);
        reader.join().expect("no check fails");
    });
}

#[test]
fn a_guard_keeps_what_it_found() {
    check_beside_a_retirement(|world| world.read_in_a_call(0));
}

#[test]
fn a_guard_that_opens_with_a_lock_keeps_what_it_found() {
    check_beside_a_retirement(|world| {
        let participant = world.epochs.borrow_participant().expect("memory for a participant");
        let lock = AtomicU64::new(0);
        assert!(world.read_under_a_lock(&participant, 0, &lock));
        // The lock is held: no guard opens, and none stays open.
        assert!(!world.read_under_a_lock(&participant, 0, &lock));
        assert!(participant.is_outside());
    });
}

#[test]
fn guards_of_a_participant_protect_in_any_order_of_their_ends() {
    check_beside_a_retirement(|world| {
        let participant = world.epochs.borrow_participant().expect("memory for a participant");
        let first = world.epochs.pin(&participant);
        let is_found = world.things[0].is_linked();
        let second = world.epochs.pin(&participant);
        if is_found {
            world.things[0].use_memory();
        }
        drop(first);
        if world.things[0].is_linked() {
            world.things[0].use_memory();
        }
        drop(second);
    });
}

#[test]
fn a_guard_within_a_fault_does_not_end_the_guard_of_the_fault() {
    check_beside_a_retirement(|world| {
        let mut owned = world.epochs.take_participant().expect("memory for a participant");
        // SAFETY: the epochs are alive, and the participant is released at the end.
        let (participant, own) = unsafe { (owned.get(), owned.exclusive(&world.epochs)) };
        let guard = own.pin.open();
        drop(world.epochs.pin(participant));
        if world.things[0].is_linked() {
            world.things[0].use_memory();
        }
        drop(guard);
        // SAFETY: as above.
        unsafe { owned.release() }
    });
}

#[test]
fn what_a_fault_keeps_for_its_next_guard_is_not_freed_in_it() {
    check_beside_a_retirement(|world| {
        let mut owned = world.epochs.take_participant().expect("memory for a participant");
        // SAFETY: the epochs are alive, and the participant is released at the end.
        let Exclusive { mut pin, .. } = unsafe { owned.exclusive(&world.epochs) };
        let guard = pin.reborrow().open();
        let is_found = world.things[0].is_linked();
        // SAFETY: found in the guard, if at all, and freed only when `oldest_open` allows it.
        let kept = unsafe { guard.keep(&world.things[0]) };
        drop(guard);
        // SAFETY: the pin has opened the first guard.
        if let Some(again) = unsafe { pin.reborrow().reopen(kept) }.filter(|_| is_found) {
            again.thing().use_memory();
        }
        // SAFETY: as above.
        unsafe { owned.release() }
    });
}

#[test]
fn each_retired_thing_waits_for_its_own_guards_only() {
    check(|| {
        let world = World::new();
        let reader = thread::spawn({
            let world = Arc::clone(&world);
            move || {
                let participant = world.epochs.borrow_participant().expect("memory for a participant");
                world.read(&participant, 0);
                world.read(&participant, 1);
            }
        });
        world.retire(0);
        world.retire(1);
        reader.join().expect("no check fails");
    });
}

/// Checks that a reclaimer which reads the announcement of `second`, a later guard, observes what
/// the guard before that has done.
fn check_two_guards(second: fn(&World, &Participant)) {
    check(move || {
        let world = World::with(Fences::Remote);
        let participant = world.epochs.borrow_participant().expect("memory for a participant");
        let reclaimer = thread::spawn({
            let world = Arc::clone(&world);
            move || world.retire(0)
        });
        world.read(&participant, 0);
        second(&world, &participant);
        reclaimer.join().expect("no check fails");
    });
}

#[test]
fn a_later_announcement_hands_on_what_the_guard_before_it_did() {
    check_two_guards(|world, participant| world.read(participant, 1));
}

#[test]
fn a_later_announcement_with_a_lock_hands_on_what_the_guard_before_it_did() {
    check_two_guards(|world, participant| {
        assert!(world.read_under_a_lock(participant, 1, &AtomicU64::new(0)));
    });
}

#[test]
fn a_thread_may_reclaim_what_another_retired() {
    check(|| {
        let world = World::new();
        let reader = thread::spawn({
            let world = Arc::clone(&world);
            move || world.read_in_a_call(0)
        });
        // The list of retired things: the tag, or 0 for an empty list.
        let list = Arc::new(AtomicU64::new(0));
        let reclaimer = thread::spawn({
            let (world, list) = (Arc::clone(&world), Arc::clone(&list));
            move || {
                let tag = list.swap(0, Ordering::Acquire);
                if tag != 0 && tag < world.epochs.oldest_open(|| ()) {
                    world.things[0].free();
                }
            }
        });
        world.things[0].unlink();
        list.store(world.epochs.advance_epoch(), Ordering::Release);
        reader.join().expect("no check fails");
        reclaimer.join().expect("no check fails");
    });
}

#[test]
fn a_hazard_pointer_keeps_a_backing() {
    check(|| {
        let world = World::new();
        let resolver = thread::spawn({
            let world = Arc::clone(&world);
            move || {
                let mut participant = world.epochs.borrow_participant().expect("memory for a participant");
                let (participant, hazard) = participant.with_hazard();
                let guard = world.epochs.pin(participant);
                if world.things[0].is_linked() {
                    // SAFETY: found in the guard, and freed only when `oldest_open` and
                    // `is_resolving` allow it.
                    let thing = unsafe { hazard.protect(NonNull::from(&world.things[0])) };
                    drop(guard);
                    thing.get().use_memory();
                }
            }
        });
        world.things[0].unlink();
        let tag = world.epochs.advance_epoch();
        // The order of the two checks matters.
        if tag < world.epochs.oldest_open(|| ()) && !world.epochs.is_resolving(NonNull::from(&world.things[0])) {
            world.things[0].free();
        }
        resolver.join().expect("no check fails");
    });
}
