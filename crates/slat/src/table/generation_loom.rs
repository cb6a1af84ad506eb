//! The window of admissions under loom: while a guard is open, no more turns are admitted than the
//! module allows. With the memory orders as they are written, and a window of one turn.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p slat --release --lib loom`

extern crate std;

use loom::sync::Arc;
use loom::thread;

use super::{Generations, RENEWAL_ROOM, WINDOW};
use crate::sync::{AtomicU64, Ordering};
use crate::table::retire::{Epochs, Fences};

const PREEMPTIONS: usize = 3;
/// For three threads: with more, a model takes minutes.
const PREEMPTIONS_OF_THREE: usize = 1;

struct World {
    epochs: Epochs,
    generations: Generations,
    /// The generation of a directory entry that each admitted turn protects.
    generation: AtomicU64,
}

impl World {
    fn turn(&self) {
        let participant = self.epochs.borrow_participant().expect("memory for a participant");
        self.generations.renew_if_low(&self.epochs, || ());
        let _guard = self.epochs.pin(&participant);
        if self.generations.admit().is_some() {
            self.generation.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// A guard that reads a generation and compares it, beside threads with `nr_turns` turns each.
fn model(nr_turns: &'static [usize]) {
    let mut builder = loom::model::Builder::new();
    let bound = builder.preemption_bound.get_or_insert(PREEMPTIONS);
    if nr_turns.len() > 1 {
        *bound = (*bound).min(crate::sync::preemptions_of_three(PREEMPTIONS_OF_THREE));
    }
    builder.check(move || {
        let world = Arc::new(World {
            epochs: Epochs::new(Fences::Both),
            generations: Generations::new(),
            generation: AtomicU64::new(0),
        });
        let threads = nr_turns.iter().map(|&nr_turns| {
            let world = Arc::clone(&world);
            thread::spawn(move || (0..nr_turns).for_each(|_| world.turn()))
        });
        let threads = threads.collect::<std::vec::Vec<_>>();
        let participant = world.epochs.borrow_participant().expect("memory for a participant");
        let guard = world.epochs.pin(&participant);
        let seen = world.generation.load(Ordering::Acquire);
        // The comparison reads the newest value, as an exchange does.
        let nr_protected = world.generation.fetch_add(0, Ordering::SeqCst) - seen;
        drop(guard);
        let most = 2 * WINDOW + RENEWAL_ROOM + nr_turns.len() as u64;
        assert!(nr_protected <= most, "protected {nr_protected} times beside one guard");
        threads.into_iter().for_each(|thread| thread.join().expect("no check fails"));
        drop(participant);
        // No guard is open any more.
        world.turn();
        assert!(world.generation.fetch_add(0, Ordering::SeqCst) > 0, "no turn was admitted");
    });
}

#[test]
fn a_guard_beside_many_turns() {
    model(&[2 * WINDOW as usize + RENEWAL_ROOM as usize + 3]);
}

#[test]
fn a_guard_beside_two_threads_that_protect() {
    model(&[2, 1]);
}
