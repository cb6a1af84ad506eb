//! A dirty ring under loom, with guests that write, and users that harvest, reset and then copy, as
//! in a migration. When all threads are done and the rest is harvested, every copy equals its page.
//! Schedules of a few threads with at most [`PREEMPTIONS`] preemptions, with the memory orders as
//! they are written.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p slat --release --lib loom`

extern crate std;

use std::vec::Vec;

use loom::sync::Arc;
use loom::thread;

use super::*;

const PREEMPTIONS: usize = 3;
/// For three threads: with one more, a model takes minutes.
const PREEMPTIONS_OF_THREE: usize = 2;

/// Runs threads `0..nr_threads` beside each other on a new world, and then checks it.
///
/// Once for each thread that may run first without a preemption: loom compares a write only with
/// the last access of its location. So a thread that reads what it then writes hides from loom that
/// other threads had read it before.
fn race<W: Send + Sync + 'static>(
    nr_threads: usize,
    world: impl Fn() -> W + Copy + Send + Sync + 'static,
    run: impl Fn(&W, usize) + Copy + Send + Sync + 'static,
    look: impl Fn(&W) + Copy + Send + Sync + 'static,
) {
    for first in 0..nr_threads {
        let mut builder = loom::model::Builder::new();
        let bound = builder.preemption_bound.get_or_insert(PREEMPTIONS);
        if nr_threads > 2 {
            *bound = (*bound).min(crate::sync::preemptions_of_three(PREEMPTIONS_OF_THREE));
        }
        builder.check(move || {
            let world = Arc::new(world());
            let others = (0..nr_threads).filter(|&index| index != first).map(|index| {
                let world = Arc::clone(&world);
                thread::spawn(move || run(&world, index))
            });
            let others = others.collect::<Vec<_>>();
            run(&world, first);
            others.into_iter().for_each(|thread| thread.join().expect("no check fails"));
            look(&world);
        });
    }
}

/// Set while the page is writable. The bits above count the writes. Leaf and page are one word, so
/// that clearing this bit is a protection and its flush in one.
const WRITABLE: u64 = 1;
const WRITE: u64 = 2;
const NR_PAGES: usize = 2;

struct World {
    ring: DirtyRing,
    pages: [AtomicU64; NR_PAGES],
    copies: [AtomicU64; NR_PAGES],
}

impl World {
    fn new(nr_entries: u32) -> World {
        let zeroes = || core::array::from_fn(|_| AtomicU64::new(0));
        World { ring: DirtyRing::new(nr_entries, 0).expect("memory for a ring"), pages: zeroes(), copies: zeroes() }
    }

    /// The vCPU writes to `page`, if its ring has room for the fault. All accesses to pages are
    /// relaxed: the ring alone orders them.
    fn write(&self, page: usize) {
        let word = &self.pages[page];
        if word.load(Ordering::Relaxed) & WRITABLE == 0 {
            if self.ring.room() == 0 {
                return;
            }
            word.fetch_or(WRITABLE, Ordering::Relaxed);
            self.ring.push(DirtyPage { slot: 3, page: page as u64 });
        }
        let mut value = word.load(Ordering::Relaxed);
        // If it was protected since, the guest faults again; the model stops here.
        while value & WRITABLE != 0 {
            match word.compare_exchange(value, value + WRITE, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return,
                Err(found) => value = found,
            }
        }
    }

    fn harvest(&self) -> Vec<usize> {
        let mut pages = Vec::new();
        self.ring.harvest(|found| {
            assert_eq!(found.slot, 3);
            pages.push(found.page as usize);
        });
        pages
    }

    /// Harvests the oldest entries by their marks.
    fn mark(&self) -> Vec<usize> {
        let mut pages = Vec::new();
        let mut index = self.ring.first_index();
        while let DirtyRingEntry::Dirty(found) = self.ring.entry(index) {
            if self.ring.mark_harvested(index) {
                pages.push(found.page as usize);
            }
            index += 1;
        }
        pages
    }

    fn reset_and_copy(&self, harvested: &[usize]) {
        let mut reset = self.ring.reset();
        for page in &mut reset {
            // A locked AND changes the current value, not one that this thread has read: that needs
            // no order. It runs only where the page is writable, as in the engine, so that the
            // model would notice an old value.
            let word = &self.pages[page.page as usize];
            if word.load(Ordering::Relaxed) & WRITABLE != 0 {
                word.fetch_and(!WRITABLE, Ordering::Relaxed);
            }
        }
        reset.finish();
        for &page in harvested {
            // Copies of several threads: the newest stays, as if the threads had synchronized.
            self.copies[page].fetch_max(self.pages[page].load(Ordering::Relaxed) / WRITE, Ordering::Relaxed);
        }
    }

    /// Counts each harvested page, in place of its copy.
    fn count_harvested(&self) {
        for page in self.harvest() {
            self.copies[page].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The end of the migration: the guest is stopped.
    fn assert_copied(&self) {
        self.reset_and_copy(&self.harvest());
        for (page, copy) in self.pages.iter().zip(&self.copies) {
            assert_eq!(copy.load(Ordering::Relaxed), page.load(Ordering::Relaxed) / WRITE, "a write is lost");
        }
    }
}

/// What a thread does.
#[derive(Clone, Copy)]
enum Step {
    Write(usize),
    /// Harvest, reset and copy.
    Migrate,
    /// The same, by marks.
    MigrateByMarks,
    /// A reset alone.
    Reset,
}

use Step::{Migrate, MigrateByMarks, Reset as ResetAlone, Write};

impl World {
    fn run(&self, step: Step) {
        match step {
            Write(page) => self.write(page),
            Migrate => self.reset_and_copy(&self.harvest()),
            MigrateByMarks => self.reset_and_copy(&self.mark()),
            ResetAlone => self.reset_and_copy(&[]),
        }
    }
}

/// Runs each of `threads` beside the others, on a ring of `nr_entries`, after `before`. The first
/// is the vCPU.
fn model(nr_entries: u32, before: &'static [Step], threads: &'static [&'static [Step]]) {
    race(
        threads.len(),
        move || {
            let world = World::new(nr_entries);
            before.iter().for_each(|&step| world.run(step));
            world
        },
        move |world, index| threads[index].iter().for_each(|&step| world.run(step)),
        World::assert_copied,
    );
}

#[test]
fn a_vcpu_and_a_migration() {
    model(2, &[], &[&[Write(0), Write(1), Write(0), Write(0)], &[Migrate, Migrate]]);
    model(2, &[], &[&[Write(0), Write(1), Write(0), Write(0)], &[MigrateByMarks, MigrateByMarks]]);
}

#[test]
fn a_vcpu_and_two_migrations() {
    model(2, &[Write(0)], &[&[Write(1)], &[Migrate], &[Migrate]]);
}

#[test]
fn a_vcpu_and_two_migrations_by_marks() {
    model(2, &[Write(0)], &[&[Write(1)], &[MigrateByMarks], &[MigrateByMarks]]);
}

#[test]
fn a_vcpu_a_migration_and_a_reset() {
    model(2, &[Write(0)], &[&[Write(1), Write(0)], &[Migrate, Migrate], &[ResetAlone]]);
    model(2, &[Write(0)], &[&[Write(1), Write(0)], &[MigrateByMarks, MigrateByMarks], &[ResetAlone]]);
}

#[test]
fn around_the_end_of_the_ring() {
    model(1, &[Write(0)], &[&[Write(1), Write(0)], &[Migrate], &[Migrate, Migrate]]);
    model(1, &[Write(0)], &[&[Write(1), Write(0)], &[MigrateByMarks], &[MigrateByMarks, MigrateByMarks]]);
}

#[test]
fn a_reset_rereads_what_another_reset_protected() {
    model(1, &[Write(0)], &[&[Write(0), ResetAlone, Write(1)], &[Migrate]]);
    model(1, &[Write(0)], &[&[Write(0), ResetAlone, Write(1)], &[MigrateByMarks]]);
}

#[test]
fn an_entry_is_never_confused_with_a_later_one() {
    // The page is the index.
    let push = |world: &World, page| {
        if world.ring.room() != 0 {
            world.ring.push(DirtyPage { slot: 3, page });
        }
    };
    race(
        3,
        move || {
            let world = World::new(1);
            push(&world, 0);
            world
        },
        move |world, index| match index {
            0 => push(world, 1),
            1 => world.reset_and_copy(&world.harvest()),
            _ => {
                if let DirtyRingEntry::Dirty(found) | DirtyRingEntry::Harvested(found) = world.ring.entry(0) {
                    assert_eq!(found, DirtyPage { slot: 3, page: 0 });
                }
                assert!(world.ring.nr_used() <= 2, "entries were reset before they were pushed");
            }
        },
        |_| {},
    );
}

#[test]
fn a_harvest_takes_no_page_of_an_entry_that_was_marked_and_filled_anew() {
    race(
        3,
        || {
            let world = World::new(1);
            world.ring.push(DirtyPage { slot: 3, page: 0 });
            world
        },
        |world, index| match index {
            0 if world.ring.room() != 0 => world.ring.push(DirtyPage { slot: 3, page: 1 }),
            0 => {}
            1 => {
                world.ring.mark_harvested(0);
                world.reset_and_copy(&[]);
            }
            _ => world.count_harvested(),
        },
        |world| {
            world.count_harvested();
            assert!(world.copies[1].load(Ordering::Relaxed) <= 1, "pushed once, and taken twice");
        },
    );
}

#[test]
fn a_marked_page_is_protected() {
    race(
        2,
        || World::new(2),
        |world, index| match index {
            0 => world.write(0),
            // A thread that marks need not have read the entry.
            _ => {
                if world.ring.mark_harvested(0) {
                    world.reset_and_copy(&[]);
                }
            }
        },
        |world| {
            let is_writable = world.pages[0].load(Ordering::Relaxed) & WRITABLE != 0;
            assert_eq!(is_writable, world.ring.first_index() == 0);
        },
    );
}

#[test]
fn two_harvests_share_the_entries() {
    race(
        3,
        || {
            let world = World::new(2);
            world.write(0);
            world
        },
        |world, index| match index {
            0 => world.write(1),
            _ => world.count_harvested(),
        },
        |world| {
            world.count_harvested();
            assert!(world.copies.iter().all(|copy| copy.load(Ordering::Relaxed) == 1));
        },
    );
}
