//! The store-load pairs of the dirty log under loom: when all threads are done, no leaf is writable
//! whose page is not marked. Schedules of a few threads with at most [`PREEMPTIONS`] preemptions,
//! with the memory orders as they are written. (loom takes sequentially consistent accesses for
//! acquire and release; only fences are more.)
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p slat --release --lib loom`

#![expect(unsafe_code, reason = "PTEs without a page-table page")]

extern crate std;

use std::boxed::Box;
use std::vec::Vec;

use loom::sync::Arc;
use loom::thread;

use super::mark_if_logging;
use crate::addr::{Gfn, GfnRange, Level, Pfn};
use crate::format::{Format, Npt};
use crate::page_words::TakenWords;
use crate::slot::MemoryRegionFlags;
use crate::slot::bitmap::Bitmap;
use crate::slot::new::{Attachments, NewSlot};
use crate::slot::set::Slots;
use crate::sync::{AtomicU64, fence_after_rmw, full_fence};
use crate::table::pte::Pte;
use crate::table::pte_ref::{Cleaner, PteRef};
use crate::table::retire::LockCheck;
use crate::table::retire::{Epochs, Fences};

const PREEMPTIONS: usize = 3;

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(PREEMPTIONS);
    builder.check(model);
}

/// A leaf that the host allows to be written, and that is not writable.
fn protected_leaf() -> Pte<Npt> {
    Pte::leaf(Pfn(5), Level::L4K).with(Npt::HOST_WRITABLE)
}

/// A leaf in memory.
struct Leaf(AtomicU64);

impl Leaf {
    fn new() -> Leaf {
        Leaf(AtomicU64::new(protected_leaf().bits()))
    }

    fn pte(&self) -> PteRef<'_, Npt> {
        // SAFETY: no walk reaches it.
        unsafe { PteRef::new(&self.0, Level::L4K, LockCheck::NONE, Cleaner::none()) }
    }

    fn is_writable(&self) -> bool {
        self.pte().load().is_writable()
    }

    /// Restores write access, if it is missing. Returns whether it did.
    fn restore_write(&self) -> bool {
        let value = self.pte().load();
        !value.is_writable() && self.pte().exchange(value, value.with(Npt::WRITABLE)).is_ok()
    }

    fn protect(&self) {
        if self.is_writable() {
            self.pte().clear(Npt::WRITABLE);
        }
    }
}

/// A leaf and the word with its bit.
struct Page {
    leaf: Leaf,
    log: std::boxed::Box<Bitmap>,
}

/// Harvests all marks. Returns whether there was one.
fn harvests_mark(log: &Bitmap) -> bool {
    let mut harvested = TakenWords::new();
    log.take(0..1, &mut harvested);
    !harvested.is_empty()
}

/// What a thread does with the page.
#[derive(Clone, Copy)]
enum Step {
    Fault,
    Harvest,
}

impl Page {
    fn run(&self, step: Step) {
        match step {
            Step::Fault => {
                if self.leaf.restore_write() {
                    fence_after_rmw();
                    self.log.mark(0, 1);
                }
            }
            Step::Harvest => {
                if harvests_mark(&self.log) {
                    fence_after_rmw();
                    self.leaf.protect();
                }
            }
        }
    }
}

/// Runs each of `threads` beside the others, on a page that is marked already or not.
fn page_model(is_marked: Option<()>, threads: &'static [&'static [Step]]) {
    check(move || {
        let page = Arc::new(Page { leaf: Leaf::new(), log: Bitmap::new(64).expect("memory for a bitmap") });
        if is_marked.is_some() {
            page.log.mark(0, 1);
        }
        let (first, others) = threads.split_first().expect("a model has a thread");
        let others = others.iter().map(|&steps| {
            let page = Arc::clone(&page);
            thread::spawn(move || steps.iter().for_each(|&step| page.run(step)))
        });
        let others = others.collect::<Vec<_>>();
        first.iter().for_each(|&step| page.run(step));
        others.into_iter().for_each(|thread| thread.join().expect("no check fails"));
        assert!(!page.leaf.is_writable() || harvests_mark(&page.log), "the page is writable and not marked");
    });
}

use Step::{Fault, Harvest};

#[test]
fn a_fault_and_a_harvest() {
    page_model(None, &[&[Fault], &[Harvest]]);
    page_model(Some(()), &[&[Fault], &[Harvest]]);
}

#[test]
fn two_faults_and_a_harvest() {
    page_model(None, &[&[Fault], &[Fault], &[Harvest]]);
    page_model(Some(()), &[&[Fault], &[Fault], &[Harvest]]);
}

#[test]
fn faults_and_two_harvests() {
    page_model(Some(()), &[&[Fault], &[Harvest], &[Harvest]]);
    page_model(None, &[&[Fault, Fault], &[Harvest, Harvest]]);
}

/// A memslot of one page, which does not log yet, and the page's leaf.
struct World {
    /// Boxed: the world is moved.
    epochs: Box<Epochs>,
    slots: Slots<()>,
    leaf: Leaf,
}

const RANGE: GfnRange = GfnRange { start: Gfn(0), end: Gfn(1) };

impl World {
    fn new() -> World {
        let epochs = Box::new(Epochs::new(Fences::Both));
        let slots = Slots::new(&epochs).expect("memory for a set");
        let world = World { epochs, slots, leaf: Leaf::new() };
        let slot =
            NewSlot::new(0, RANGE, MemoryRegionFlags::empty(), (), Attachments::default()).expect("memory for a slot");
        let participant = world.epochs.borrow_participant().expect("memory for a participant");
        world.slots.insert(&world.epochs, &participant, slot).expect("memory for a set");
        drop(participant);
        world
    }

    fn fault(&self) {
        let participant = self.epochs.borrow_participant().expect("memory for a participant");
        let guard = self.epochs.pin(&participant);
        if self.leaf.restore_write() {
            mark_if_logging(&self.slots, &guard, None, RANGE.start, RANGE);
        }
    }

    fn enable(&self) {
        let participant = self.epochs.borrow_participant().expect("memory for a participant");
        let mut claim =
            self.slots.claim(&self.epochs, &participant, 0).expect("no other call has it").expect("the slot stays");
        let log = Bitmap::new(1).expect("memory for a bitmap");
        let attachments = Attachments { log: Some(log), userfault: None };
        let flags = MemoryRegionFlags::LOG_DIRTY_PAGES;
        claim.replace(&self.epochs, &participant, RANGE, flags, attachments).expect("memory for a set");
        full_fence();
        self.leaf.protect();
    }
}

#[test]
fn a_fault_beside_the_enabling_of_the_log() {
    check(|| {
        let world = Arc::new(World::new());
        let fault = thread::spawn({
            let world = Arc::clone(&world);
            move || world.fault()
        });
        world.enable();
        fault.join().expect("no check fails");
        let participant = world.epochs.borrow_participant().expect("memory for a participant");
        let guard = world.epochs.pin(&participant);
        let slot = world.slots.find(&guard, RANGE.start).expect("the slot stays");
        let is_marked = harvests_mark(slot.log().expect("the log is on"));
        assert!(!world.leaf.is_writable() || is_marked, "the page is writable and not marked");
    });
}
