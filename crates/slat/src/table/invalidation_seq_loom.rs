//! Sequence numbers and ranges in flight under loom: a fault beside a thread that invalidates its
//! page, with the memory orders as they are written. Schedules of a few threads with at most
//! [`PREEMPTIONS`] preemptions. One PTE stands for the tree. Under loom a chunk of ranges in flight
//! has one place, so a second range goes to a second chunk.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p slat --release --lib loom`

#![expect(unsafe_code, reason = "PTEs without a page-table page")]

extern crate std;

use loom::sync::Arc;
use loom::thread;

use super::InvalidationSeqCounter;
use crate::addr::{Gfn, GfnRange, Level, Pfn};
use crate::format::{Format, Npt};
use crate::sync::{AtomicU64, Ordering};
use crate::table::in_flight::RangesInFlight;
use crate::table::invalidation_seq::InvalidationSeq;
use crate::table::pte::{Pte, State};
use crate::table::pte_ref::{Changed, Cleaner, PteRef};
use crate::table::retire::LockCheck;

const PREEMPTIONS: usize = 3;
/// For three threads: with one more, a model takes minutes.
const PREEMPTIONS_OF_THREE: usize = 2;

const PAGE: Gfn = Gfn(5);

/// A page: its PTE, and the host's frame for it. The host's word is read and written relaxed: the
/// protocol alone orders it.
struct World {
    seqs: InvalidationSeqCounter,
    in_flight: RangesInFlight,
    pte: AtomicU64,
    /// The host's word: the frame, and in bit 0 whether the guest may write.
    host: AtomicU64,
}

/// The host's word for frame `frame`.
const fn word(frame: u64, may_write: bool) -> u64 {
    frame << 1 | may_write as u64
}

impl World {
    fn new(host: u64) -> World {
        World {
            seqs: InvalidationSeqCounter::new(),
            in_flight: RangesInFlight::default(),
            pte: AtomicU64::new(Pte::<Npt>::empty(InvalidationSeq::FIRST).bits()),
            host: AtomicU64::new(host),
        }
    }

    fn pte(&self) -> PteRef<'_, Npt> {
        // SAFETY: no walk reaches it.
        unsafe { PteRef::new(&self.pte, Level::L4K, LockCheck::NONE, Cleaner::none()) }
    }

    fn leaf(host: u64) -> Pte<Npt> {
        let rights = if host & 1 != 0 { Npt::WRITABLE | Npt::HOST_WRITABLE } else { 0 };
        Pte::leaf(Pfn(host >> 1), Level::L4K).with(rights)
    }

    /// A fault: look, resolve, install. Returns where the engine starts over.
    fn fault(&self) {
        let value = self.pte().load();
        let State::Empty(seen) = value.state(Level::L4K) else { return };
        if self.in_flight.free_level(PAGE, Level::L4K).is_none() {
            return;
        }
        let resolved = self.host.load(Ordering::Relaxed);
        let value = self.pte().load();
        let State::Empty(seq) = value.state(Level::L4K) else { return };
        if seq == seen {
            let _: Result<(), Changed> = self.pte().exchange(value, World::leaf(resolved));
        }
    }

    /// As `install_instead` of `vcpu.rs`, for a host that makes the frame writable when it is
    /// asked.
    fn upgrade(&self) {
        let found = self.pte().load();
        if found.state(Level::L4K) != State::Leaf || found.is_host_writable() {
            return;
        }
        let seen = self.seqs.current();
        if self.in_flight.free_level(PAGE, Level::L4K).is_none() {
            return;
        }
        let resolved = self.host.fetch_or(1, Ordering::Relaxed) | 1;
        let empty = Pte::empty(self.seqs.next());
        if self.pte().exchange(found, empty).is_err() {
            return;
        }
        if self.seqs.current().follows(seen) {
            let _: Result<(), Changed> = self.pte().exchange(empty, World::leaf(resolved));
        }
    }

    /// Invalidates the page, and lets `change` change the host's word.
    fn invalidate(&self, range: GfnRange, change: impl FnOnce(&AtomicU64)) {
        let in_flight = self.in_flight.publish(range).expect("memory for a chunk");
        let seq = self.seqs.next();
        loop {
            let value = self.pte().load();
            match value.state(Level::L4K) {
                State::Empty(found) if found >= seq => break,
                _ if self.pte().exchange(value, Pte::empty(seq)).is_ok() => break,
                _ => {}
            }
        }
        change(&self.host);
        drop(in_flight);
    }

    /// The leaf, if there is one, matches the host's word at the end.
    fn assert_true(&self) {
        let value = self.pte().load();
        if value.state(Level::L4K) == State::Leaf {
            let host = self.host.load(Ordering::Relaxed);
            assert_eq!(value.plain_frame(Level::L4K), Pfn(host >> 1), "a stale frame");
            assert!(!value.is_writable() || host & 1 != 0, "writable, and the host forbids it");
        }
    }
}

/// Runs `threads` beside each other, in a world made by `prepare`.
fn model<const N: usize>(prepare: fn() -> World, threads: [fn(&World); N]) {
    let mut builder = loom::model::Builder::new();
    let bound = builder.preemption_bound.get_or_insert(PREEMPTIONS);
    if N > 2 {
        *bound = (*bound).min(crate::sync::preemptions_of_three(PREEMPTIONS_OF_THREE));
    }
    builder.check(move || {
        let world = Arc::new(prepare());
        let [first, others @ ..] = &threads[..] else { unreachable!("a model has a thread") };
        let others = others.iter().map(|&run| {
            let world = Arc::clone(&world);
            thread::spawn(move || run(&world))
        });
        let others = others.collect::<std::vec::Vec<_>>();
        first(&world);
        others.into_iter().for_each(|thread| thread.join().expect("no check fails"));
        world.assert_true();
    });
}

fn one_page() -> GfnRange {
    GfnRange::new(PAGE, 1)
}

fn new_frame(host: &AtomicU64) {
    host.fetch_add(word(1, false), Ordering::Relaxed);
}

fn writable() -> World {
    World::new(word(10, true))
}

#[test]
fn a_fault_and_an_invalidation() {
    model(writable, [|world| world.invalidate(one_page(), new_frame), World::fault]);
}

#[test]
fn a_fault_and_two_invalidations_beside_each_other() {
    model(
        writable,
        [
            |world| world.invalidate(one_page(), new_frame),
            |world| world.invalidate(GfnRange::new(Gfn(0), 512), new_frame),
            World::fault,
        ],
    );
}

/// The second range has the place of the first: a fault may read the start of one and the end of
/// the other.
#[test]
fn a_fault_and_a_place_that_is_used_again() {
    model(
        writable,
        [
            |world| {
                world.invalidate(GfnRange::new(Gfn(6), 3), |_| ());
                world.invalidate(GfnRange::new(Gfn(2), 4), new_frame);
            },
            World::fault,
        ],
    );
    model(
        writable,
        [
            |world| {
                world.invalidate(GfnRange::new(Gfn(2), 4), new_frame);
                world.invalidate(GfnRange::new(Gfn(6), 3), |_| ());
            },
            World::fault,
        ],
    );
}

#[test]
fn two_faults_and_an_invalidation() {
    model(
        writable,
        [
            |world| world.invalidate(one_page(), new_frame),
            |world| {
                world.fault();
                world.fault();
            },
        ],
    );
}

fn read_only() -> World {
    let world = World::new(word(10, false));
    world.fault();
    world
}

fn forbid(host: &AtomicU64) {
    host.fetch_and(!1, Ordering::Relaxed);
}

#[test]
fn a_replaced_leaf_and_the_same_leaf_again() {
    model(
        read_only,
        [World::upgrade, |world| {
            world.invalidate(one_page(), forbid);
            world.fault();
        }],
    );
}

#[test]
fn two_replacements_of_a_leaf_and_an_invalidation() {
    model(read_only, [World::upgrade, World::upgrade, |world| world.invalidate(one_page(), forbid)]);
}
