//! The protocol steps of the engine as they happen under shuttle, for the proofs to check
//! (`models/proofs/replay.py`).
//!
//! # Guarantees
//! The events of a schedule are in the order in which their atomic operations happened.
//!
//! # Use
//! A test calls [`start`], runs its threads, and calls [`finish`]. The engine calls [`record`]
//! directly behind the atomic operation, with no scheduling point in between.
//!
//! # Implementation
//! Shuttle runs all threads of a schedule on one thread of the system, so the events are in a
//! variable of that thread.

extern crate std;

use core::cell::RefCell;
use std::thread_local;
use std::vec::Vec;

/// A step of a protocol. Addresses and frame numbers are plain numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// A fault on a frame begins its look.
    FaultLooks {
        /// The frame.
        gfn: u64,
    },
    /// The host answers for the page of a fault.
    HostAnswers {
        /// The frame of the guest.
        gfn: u64,
        /// The frame of the host.
        pfn: u64,
        /// Whether the guest may write to it.
        is_writable: u8,
    },
    /// Inside an invalidation: from now on the host has no other answer for the page.
    HostChanges {
        /// The frame of the guest.
        gfn: u64,
        /// The frame of the host.
        pfn: u64,
    },
    /// A CPU translates by a leaf.
    CpuTranslates {
        /// Number of the CPU.
        cpu: u64,
        /// The frame of the guest.
        gfn: u64,
        /// The address of the leaf PTE.
        cell: u64,
    },
    /// A PTE was read.
    PteRead {
        /// Its address.
        cell: u64,
        /// Its level.
        level: u8,
        /// Its bits.
        value: u64,
    },
    /// A PTE was exchanged.
    PteReplaced {
        /// Its address.
        cell: u64,
        /// Its level.
        level: u8,
        /// Its bits before.
        old: u64,
        /// Its bits after.
        new: u64,
    },
    /// A frozen PTE was stored in a page-table page that was unlinked.
    PteFrozen {
        /// Its address.
        cell: u64,
    },
    /// A PTE was stored in a page-table page that is to be linked.
    PteMade {
        /// Its address.
        cell: u64,
        /// Its bits.
        value: u64,
    },
    /// A number was taken from the counter of invalidation sequence numbers.
    NumberTaken {
        /// The number.
        number: u64,
    },
    /// That counter was read.
    NumberRead {
        /// The greatest number so far.
        number: u64,
    },
    /// A range is in flight from now on.
    Published {
        /// The address of its place.
        place: u64,
        /// The first frame.
        start: u64,
        /// The frame behind the last.
        end: u64,
    },
    /// A range is no longer in flight.
    Withdrawn {
        /// The address of its place.
        place: u64,
    },
    /// A fault reads which ranges are in flight.
    RangesRead {
        /// The frame of the fault.
        gfn: u64,
    },
    /// What it has found: the level of the largest block that is free, or 0.
    RangesFound {
        /// The frame of the fault.
        gfn: u64,
        /// The level.
        level: u8,
    },
    /// The published set of memslots was read.
    SlotsRead,
    /// Another set of memslots was published.
    SlotsPublished,
    /// All marks of a mask were found set in a word of a dirty bitmap.
    MarksFound {
        /// Number of the word.
        word: u64,
        /// The mask.
        mask: u64,
    },
    /// Marks were set in a word.
    MarksSet {
        /// Number of the word.
        word: u64,
        /// The marks.
        mask: u64,
    },
    /// Words were set in the summary, or were found set there.
    Summarized {
        /// Number of the summary's word.
        group: u64,
        /// The words.
        words: u64,
    },
    /// A harvest found words unset in the summary and skips them.
    SummarySkipped {
        /// Number of the summary's word.
        group: u64,
        /// The words.
        words: u64,
    },
    /// Words were unset in the summary.
    SummaryCleared {
        /// Number of the summary's word.
        group: u64,
        /// The words.
        words: u64,
    },
    /// Marks were taken from a word, or none were there to take.
    MarksTaken {
        /// Number of the word.
        word: u64,
        /// The marks.
        marks: u64,
    },
    /// The test begins to harvest, with these masks if it clears by masks.
    HarvestBegins {
        /// The masks of the two words that are used.
        masks: Option<[u64; 2]>,
    },
    /// The test has the marks of its harvest.
    HarvestEnds,
    /// The test begins to write to a page itself and to mark it.
    VmmWrites {
        /// The frame of the guest.
        gfn: u64,
    },
    /// The test has turned logging on.
    LogsNow,
    /// A CPU writes to a page through the leaf that it translated by.
    CpuWrites {
        /// Number of the CPU.
        cpu: u64,
        /// The frame of the guest.
        gfn: u64,
    },
    /// A CPU forgets the leaf that it translated by.
    CpuForgets {
        /// Number of the CPU.
        cpu: u64,
        /// The frame of the guest.
        gfn: u64,
    },
    /// The host is asked to flush a range.
    FlushBegins {
        /// The first frame.
        start: u64,
        /// The frame behind the last.
        end: u64,
    },
    /// All CPUs have flushed.
    FlushEnds,
}

/// What a PTE is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PteKind {
    /// It has this number.
    Empty(u64),
    /// It has this number; a flush is due.
    Unflushed(u64),
    /// It maps this frame of the host, tracked or not; whether the host allows writing, and whether
    /// the guest may write.
    Leaf(u64, bool, bool),
    /// It points to the page-table page at this address.
    Table(u64),
    /// It stands before or behind the page-table page at this address.
    Broken(u64),
    /// It is frozen.
    Frozen,
}

thread_local! {
    static EVENTS: RefCell<Option<Vec<(usize, Event)>>> = const { RefCell::new(None) };
}

/// Records the events of this schedule from now on.
pub fn start() {
    EVENTS.with_borrow_mut(|events| *events = Some(Vec::new()));
}

/// Returns the events since [`start`], each with the number of its thread.
pub fn finish() -> Vec<(usize, Event)> {
    EVENTS.with_borrow_mut(Option::take).unwrap_or_default()
}

/// Records `event` of the running thread, if the test records.
pub fn record(event: Event) {
    EVENTS.with_borrow_mut(|events| {
        if let Some(events) = events {
            events.push((usize::from(shuttle::current::me()), event));
        }
    });
}
