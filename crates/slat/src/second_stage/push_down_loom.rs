//! Protecting a directory entry and pushing down under loom: when all threads are done, no page can
//! be written that is not marked. The memory orders are as they are written. A page-table page of
//! two leaves stands for one of 512, and a word for the memslot's flags.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p slat --release --lib loom`

#![expect(unsafe_code, reason = "PTEs without a page-table page")]

extern crate std;

use std::vec::Vec;

use loom::sync::Arc;
use loom::thread;

use super::{Others, Pushed, push_down_in};
use crate::addr::{Access, Hpa, Level, Pfn};
use crate::config::AccessTracking;
use crate::format::{Format, Npt};
use crate::page_words::TakenWords;
use crate::second_stage::{install, protect};
use crate::slot::bitmap::Bitmap;
use crate::sync::{AtomicU64, Ordering, fence_after_rmw, full_fence};
use crate::table::invalidation_seq::InvalidationSeq;
use crate::table::pte::{Pte, State};
use crate::table::pte_ref::{Cleaner, PteRef, Ptes};
use crate::table::retire::LockCheck;

const PREEMPTIONS: usize = 3;
/// For three threads and more: with one more, a model takes minutes.
const PREEMPTIONS_OF_THREE: usize = 2;

const NR_LEAVES: usize = 2;
const TRACKING: AccessTracking = AccessTracking::AccessedBit;

/// A page-table page, the directory entry above it, and the log.
struct World {
    above: AtomicU64,
    leaves: [AtomicU64; NR_LEAVES],
    log: std::boxed::Box<Bitmap>,
    /// Whether the memslot logs.
    logs: AtomicU64,
}

/// The initial state of a world.
#[derive(Clone, Copy)]
struct Start {
    /// The leaves: empty, not writable, or writable.
    leaves: [Leaf; NR_LEAVES],
    is_open: Option<()>,
    /// Page n is marked if bit n is set.
    marked: u64,
    logs: Option<()>,
}

#[derive(Clone, Copy)]
enum Leaf {
    Empty,
    Protected,
    Writable,
}

/// What a thread does.
#[derive(Clone, Copy)]
enum Step {
    /// Writes a page until that succeeds.
    Write(usize),
    /// Harvests by protecting the directory entry.
    Lazy,
    /// Harvests leaf by leaf.
    LeafByLeaf,
    /// Marks a page as not used.
    Age(usize),
    CeaseToLog,
    /// Protects the directory entry, or leaf by leaf.
    LogLazily,
    LogLeafByLeaf,
    /// Begins to log with all pages marked.
    LogMarked,
}

use Leaf::{Empty, Protected, Writable};
use Step::{Age, CeaseToLog, Lazy, LeafByLeaf, LogLazily, LogLeafByLeaf, LogMarked, Write};

impl Leaf {
    fn pte(self, index: usize) -> Pte<Npt> {
        let leaf = Pte::leaf(Pfn(5 + index as u64), Level::L4K).with(Npt::HOST_WRITABLE | Npt::ACCESSED);
        match self {
            Empty => Pte::empty(InvalidationSeq::FIRST),
            Protected => leaf,
            Writable => leaf.with(Npt::WRITABLE),
        }
    }
}

impl World {
    fn new(start: Start) -> World {
        let table = Pte::<Npt>::table(Hpa(1 << 20));
        let above = if start.is_open.is_some() { table } else { table.protected() };
        let log = Bitmap::new(64).expect("memory for a bitmap");
        (0..NR_LEAVES).filter(|index| start.marked >> index & 1 == 1).for_each(|index| log.mark(index as u64, 1));
        World {
            above: AtomicU64::new(above.bits()),
            leaves: core::array::from_fn(|index| AtomicU64::new(start.leaves[index].pte(index).bits())),
            log,
            logs: AtomicU64::new(u64::from(start.logs.is_some())),
        }
    }

    fn above(&self) -> PteRef<'_, Npt> {
        // SAFETY: no walk reaches it.
        unsafe { PteRef::new(&self.above, Level::L2M, LockCheck::NONE, Cleaner::none()) }
    }

    fn leaf(&self, index: usize) -> PteRef<'_, Npt> {
        self.leaves().at(index)
    }

    fn leaves(&self) -> Ptes<'_, Npt> {
        // SAFETY: no walk reaches them.
        unsafe { Ptes::new(&self.leaves, Level::L4K, LockCheck::NONE, Cleaner::none()) }
    }

    fn logs(&self) -> bool {
        self.logs.load(Ordering::Acquire) != 0
    }

    /// As `log::mark_if_logging`.
    fn mark_if_logging(&self, index: usize) {
        fence_after_rmw();
        if self.logs() {
            self.log.mark(index as u64, 1);
        }
    }

    /// As a fault does, look by look.
    fn write(&self, index: usize) {
        loop {
            let above = self.above().load();
            let value = self.leaf(index).load();
            let is_protected = above.is_protected();
            match value.state(Level::L4K) {
                State::Leaf if value.is_writable() && !is_protected => return,
                State::Leaf if is_protected => {
                    let others = || if self.logs() { Others::Protect } else { Others::Leave };
                    let above = self.above().load();
                    if !above.is_protected() {
                        continue;
                    }
                    let pushed = push_down_in::<Npt>(TRACKING, self.above(), above, self.leaves(), index, others);
                    let Ok(pushed) = pushed else { continue };
                    self.mark_if_logging(index);
                    if pushed == Pushed::Open {
                        return;
                    }
                }
                State::Leaf => {
                    if install::restore_access::<Npt>(TRACKING, self.leaf(index), value, Access::Write).is_ok() {
                        self.mark_if_logging(index);
                        return;
                    }
                }
                _ => {
                    if self.leaf(index).exchange(value, Writable.pte(index)).is_ok() {
                        self.mark_if_logging(index);
                        if !is_protected {
                            return;
                        }
                    }
                }
            }
        }
    }

    fn protect(&self) {
        loop {
            let value = self.above().load();
            if self.above().exchange(value, value.protected()).is_ok() {
                return;
            }
        }
    }

    fn protect_leaves(&self, pages: u64) {
        for index in (0..NR_LEAVES).filter(|index| pages >> index & 1 == 1) {
            protect::protect_leaf(self.leaf(index));
        }
    }

    fn run(&self, step: Step) {
        match step {
            Write(index) => self.write(index),
            Lazy | LeafByLeaf => {
                let mut taken = TakenWords::new();
                self.log.take(0..1, &mut taken);
                let pages = taken.bits().iter().fold(0, |pages, bits| pages | bits);
                if pages == 0 {
                    return;
                }
                fence_after_rmw();
                match step {
                    Lazy => self.protect(),
                    _ => self.protect_leaves(pages),
                }
            }
            Age(index) => drop(self.leaf(index).clear(Npt::ACCESSED)),
            CeaseToLog => self.logs.store(0, Ordering::SeqCst),
            LogLazily | LogLeafByLeaf | LogMarked => {
                // A new log. What is left in the old one matters only as marks.
                self.log.take(0..1, &mut TakenWords::new());
                if let LogMarked = step {
                    self.log.mark(0, NR_LEAVES as u64);
                }
                self.logs.store(1, Ordering::SeqCst);
                full_fence();
                match step {
                    LogLazily => self.protect(),
                    LogLeafByLeaf => self.protect_leaves(u64::MAX),
                    _ => {}
                }
            }
        }
    }

    fn assert_seen(&self) {
        if self.above().load().is_protected() {
            return;
        }
        let mut taken = TakenWords::new();
        self.log.take(0..1, &mut taken);
        let marked = taken.bits().iter().fold(0, |pages, bits| pages | bits);
        for index in 0..NR_LEAVES {
            let is_writable = self.leaf(index).load().is_writable();
            assert!(!is_writable || marked >> index & 1 == 1, "page {index} is writable and not marked");
        }
    }
}

/// Runs each of `threads` beside the others.
fn model(start: Start, threads: &'static [&'static [Step]]) {
    let mut builder = loom::model::Builder::new();
    let bound = builder.preemption_bound.get_or_insert(PREEMPTIONS);
    if threads.len() > 2 {
        *bound = (*bound).min(crate::sync::preemptions_of_three(PREEMPTIONS_OF_THREE));
    }
    builder.check(move || {
        let world = Arc::new(World::new(start));
        let (first, others) = threads.split_first().expect("a model has a thread");
        let others = others.iter().map(|&steps| {
            let world = Arc::clone(&world);
            thread::spawn(move || steps.iter().for_each(|&step| world.run(step)))
        });
        let others = others.collect::<Vec<_>>();
        first.iter().for_each(|&step| world.run(step));
        others.into_iter().for_each(|thread| thread.join().expect("no check fails"));
        world.assert_seen();
    });
}

/// After a lazy harvest: protected, and the leaves are unchanged.
const PROTECTED: Start = Start { leaves: [Writable, Writable], is_open: None, marked: 0, logs: Some(()) };
/// Before one.
const UNPROTECTED: Start = Start { is_open: Some(()), marked: 0b11, ..PROTECTED };
/// In a memslot that stopped logging while its directory entry was protected.
const QUIET: Start = Start { logs: None, ..PROTECTED };

#[test]
fn two_writes_below_a_protected_directory_entry() {
    model(PROTECTED, &[&[Write(0)], &[Write(1)]]);
    model(PROTECTED, &[&[Write(0)], &[Write(0)]]);
    model(Start { leaves: [Protected, Writable], ..PROTECTED }, &[&[Write(0)], &[Write(0)]]);
    // The leaf changes meanwhile.
    model(PROTECTED, &[&[Write(0)], &[Age(0)]]);
}

#[test]
fn a_write_and_harvests() {
    for start in [PROTECTED, UNPROTECTED, Start { marked: 0b10, ..PROTECTED }] {
        model(start, &[&[Write(0)], &[Lazy, Lazy]]);
        model(start, &[&[Write(0)], &[LeafByLeaf, Lazy]]);
        model(start, &[&[Write(0)], &[Lazy, LeafByLeaf]]);
    }
    // The directory entry is protected when the harvest begins, and there is a mark to harvest.
    model(PROTECTED, &[&[Write(0), Write(1)], &[Lazy]]);
}

#[test]
fn writes_of_two_pages_and_a_harvest() {
    for start in [PROTECTED, Start { marked: 0b01, ..PROTECTED }] {
        model(start, &[&[Write(0)], &[Write(1)], &[Lazy]]);
        model(start, &[&[Write(0)], &[Write(1)], &[LeafByLeaf]]);
    }
}

#[test]
fn writes_and_two_harvests() {
    model(Start { marked: 0b01, ..PROTECTED }, &[&[Write(0)], &[Lazy], &[LeafByLeaf]]);
    model(UNPROTECTED, &[&[Write(0)], &[Lazy], &[Lazy]]);
}

/// One write had found the directory entry unprotected, the other finds it protected, and the
/// second harvest finds it protected, too.
#[test]
fn writes_before_and_after_a_protection() {
    model(Start { leaves: [Protected, Protected], ..UNPROTECTED }, &[&[Lazy], &[Write(0)], &[Write(1)], &[Lazy]]);
}

#[test]
fn a_page_that_is_mapped_below_a_protected_directory_entry() {
    let start = Start { leaves: [Empty, Writable], ..PROTECTED };
    model(start, &[&[Write(0)], &[Write(1)]]);
    model(Start { marked: 0b10, ..start }, &[&[Write(0)], &[Lazy, Lazy]]);
    model(start, &[&[Write(0)], &[Write(1)], &[Lazy]]);
    model(start, &[&[Write(0)], &[Write(1)], &[LeafByLeaf]]);
}

#[test]
fn a_slot_that_logs_again() {
    for log in [LogLazily, LogLeafByLeaf, LogMarked] {
        let steps: &'static [Step] = match log {
            LogLazily => &[LogLazily],
            LogLeafByLeaf => &[LogLeafByLeaf],
            _ => &[LogMarked, Lazy],
        };
        let toggles: &'static [Step] = match log {
            LogLazily => &[CeaseToLog, LogLazily],
            LogLeafByLeaf => &[CeaseToLog, LogLeafByLeaf],
            _ => &[CeaseToLog, LogMarked, LeafByLeaf],
        };
        let of_one: &'static [&'static [Step]] = std::vec![&[Write(0)] as &[Step], steps].leak();
        let of_two: &'static [&'static [Step]] = std::vec![&[Write(0)] as &[Step], &[Write(1)], steps].leak();
        let toggled: &'static [&'static [Step]] = std::vec![&[Write(0)] as &[Step], toggles].leak();
        model(QUIET, of_one);
        model(QUIET, of_two);
        model(PROTECTED, toggled);
    }
}
