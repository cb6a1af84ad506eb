//! The frames behind movable pages: allocated, shared, and poisoned when they are freed.
//!
//! # Implementation
//! - A frame is free or has users: its page, and the snapshots of it. The last user frees it.
//! - A free frame is full of [`POISON`], which no guest writes. So the value that a CPU reads
//!   through a stale translation shows the error. A write shows when the frame is allocated again
//!   (or by [`Frames::check_free`]). Frames are allocated in the order in which they were freed, so
//!   that a late write has time to show.
//! - A thread that is the only user of a frame may fill it and copy from it; frames of pages that a
//!   guest has mapped change at any time. All of these are atomic accesses to words. So a CPU that
//!   breaks the rules causes a finding and not undefined behaviour.

use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crossbeam_queue::SegQueue;
use slat::{Gfn, PAGE_SIZE, Pfn};
use thiserror::Error;

use super::FixedMemory;
use crate::linux::mapping::MappedMemory;
use crate::memory::phys;

/// The contents of a free frame. As a guest's value it would name a page beyond the end of any
/// region.
pub const POISON: u64 = 0xdead_f4ee_dead_f4ee;

/// Words of 8 bytes in a page.
const WORDS: usize = (PAGE_SIZE / 8) as usize;

/// The contents of a page outside of guest memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Contents(Box<[u64; WORDS]>);

impl Contents {
    /// The word that guests use: the first.
    pub(super) fn first_word(&self) -> u64 {
        self.0[0]
    }
}

/// A frame of these [`Frames`], by its number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Frame(u32);

/// A frame has wrong contents.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("{what}: byte {offset_bytes} of frame {pfn} is {found:#x} instead of {expected:#x}")]
pub struct Corruption {
    /// What was checked.
    pub what: &'static str,
    /// The frame.
    pub pfn: Pfn,
    /// Offset of the word in the frame.
    pub offset_bytes: u64,
    /// The value of the word.
    pub found: u64,
    /// The right value.
    pub expected: u64,
}

#[derive(Debug, Default)]
struct FrameState {
    nr_users: AtomicU32,
    /// Whether the guest wrote it since it was allocated, as far as the engine has reported.
    is_dirty: AtomicBool,
}

/// All frames of a movable memory.
#[derive(Debug)]
pub(super) struct Frames {
    memory: FixedMemory,
    states: Box<[FrameState]>,
    free: SegQueue<Frame>,
    nr_intact: AtomicU64,
    /// The first free frame that was found written.
    corruption: OnceLock<Corruption>,
}

impl Frames {
    /// The frames of `memory`, all free.
    pub(super) fn new(memory: FixedMemory) -> Frames {
        // Memory has far less than 2^44 bytes.
        let nr_frames = (memory.mapping.size_bytes() >> Gfn::SHIFT) as u32;
        let frames = Frames {
            memory,
            states: (0..nr_frames).map(|_| FrameState::default()).collect(),
            free: SegQueue::new(),
            nr_intact: AtomicU64::new(0),
            corruption: OnceLock::new(),
        };
        for number in 0..nr_frames {
            frames.fill(Frame(number), POISON);
            frames.free.push(Frame(number));
        }
        frames
    }

    /// The mapping that they are in.
    pub(super) fn mapping(&self) -> &MappedMemory {
        &self.memory.mapping
    }

    fn word(&self, frame: Frame, index: usize) -> &AtomicU64 {
        // Cannot overflow: frames are numbered within the mapping.
        &self.mapping().words()[frame.0 as usize * WORDS + index]
    }

    fn fill(&self, frame: Frame, value: u64) {
        for index in 0..WORDS {
            // Relaxed, here and below: a thread gets a frame through the queue or the lock of its
            // page.
            self.word(frame, index).store(value, Ordering::Relaxed);
        }
    }

    /// Allocates a frame with any contents; `None` if all are in use.
    pub(super) fn take(&self) -> Option<Frame> {
        let frame = self.free.pop()?;
        self.check_poison(frame, "a freed frame was written");
        let state = &self.states[frame.0 as usize];
        state.nr_users.store(1, Ordering::Relaxed);
        // A late report about its former page can only make it look dirty.
        state.is_dirty.store(false, Ordering::Relaxed);
        Some(frame)
    }

    /// Allocates a frame of zeros.
    pub(super) fn take_zeroed(&self) -> Option<Frame> {
        let frame = self.take()?;
        self.fill(frame, 0);
        Some(frame)
    }

    /// Allocates a frame with the contents `contents`.
    pub(super) fn take_with(&self, contents: &Contents) -> Option<Frame> {
        let frame = self.take()?;
        for (index, &value) in contents.0.iter().enumerate() {
            self.word(frame, index).store(value, Ordering::Relaxed);
        }
        Some(frame)
    }

    /// Allocates a frame with the contents of `source`, which no thread writes now.
    pub(super) fn take_copy(&self, source: Frame) -> Option<Frame> {
        let frame = self.take()?;
        for index in 0..WORDS {
            let value = self.word(source, index).load(Ordering::Relaxed);
            self.word(frame, index).store(value, Ordering::Relaxed);
        }
        Some(frame)
    }

    /// The contents of `frame`, which no thread writes now.
    pub(super) fn contents(&self, frame: Frame) -> Contents {
        let mut words = Box::new([0; WORDS]);
        for (index, word) in words.iter_mut().enumerate() {
            *word = self.word(frame, index).load(Ordering::Relaxed);
        }
        Contents(words)
    }

    /// The first word of `frame`. Acquire: as a CPU's read.
    pub(super) fn first_word(&self, frame: Frame) -> u64 {
        self.word(frame, 0).load(Ordering::Acquire)
    }

    /// Adds a user to `frame`, which has one.
    pub(super) fn share(&self, frame: Frame) {
        self.states[frame.0 as usize].nr_users.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether `frame` has a user besides the caller.
    pub(super) fn is_shared(&self, frame: Frame) -> bool {
        // Acquire: observes what a former user did.
        self.states[frame.0 as usize].nr_users.load(Ordering::Acquire) > 1
    }

    /// Ends one use of `frame`; the last one poisons and frees it.
    pub(super) fn release(&self, frame: Frame) {
        // AcqRel: all uses come before the poison.
        if self.states[frame.0 as usize].nr_users.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.fill(frame, POISON);
            self.free.push(frame);
        }
    }

    /// Compares `frame` with `expected`.
    pub(super) fn compare(&self, frame: Frame, expected: &Contents, what: &'static str) -> Result<(), Corruption> {
        self.compare_words(frame, |index| expected.0[index], what)
    }

    fn compare_words(
        &self,
        frame: Frame,
        expected: impl Fn(usize) -> u64,
        what: &'static str,
    ) -> Result<(), Corruption> {
        for index in 0..WORDS {
            let (found, expected) = (self.word(frame, index).load(Ordering::Relaxed), expected(index));
            if found != expected {
                let pfn = self.pfn(frame);
                return Err(Corruption { what, pfn, offset_bytes: index as u64 * 8, found, expected });
            }
        }
        Ok(())
    }

    fn check_poison(&self, frame: Frame, what: &'static str) {
        match self.compare_words(frame, |_| POISON, what) {
            Ok(()) => {
                self.nr_intact.fetch_add(1, Ordering::Relaxed);
            }
            // Only the first is kept.
            Err(corruption) => drop(self.corruption.set(corruption)),
        }
    }

    /// Checks the poison of all frames that are free now.
    pub(super) fn check_free(&self) {
        for _ in 0..self.free.len() {
            let Some(frame) = self.free.pop() else { return };
            self.check_poison(frame, "a free frame was written");
            self.free.push(frame);
        }
    }

    /// The first free frame that was found written.
    pub(super) fn corruption(&self) -> Option<Corruption> {
        self.corruption.get().copied()
    }

    /// How often a free frame was found intact.
    pub(super) fn nr_intact(&self) -> u64 {
        self.nr_intact.load(Ordering::Relaxed)
    }

    /// Frames that have users. Exact while no thread allocates or frees.
    pub(super) fn nr_used(&self) -> u64 {
        (self.states.len() - self.free.len()) as u64
    }

    /// The frame's number for the engine.
    pub(super) fn pfn(&self, frame: Frame) -> Pfn {
        phys::hpa_of(ptr::from_ref(self.word(frame, 0))).pfn()
    }

    /// Notes that the guest wrote the frame `pfn`, if it is one of these.
    pub(super) fn note_dirty(&self, pfn: Pfn) {
        let first = phys::hpa_of(self.mapping().start()).pfn();
        if let Some(state) = pfn.0.checked_sub(first.0).and_then(|number| self.states.get(number as usize)) {
            // Release: pairs with the load of the thread that swaps the page out.
            state.is_dirty.store(true, Ordering::Release);
        }
    }

    /// Whether the engine has reported that the guest wrote `frame` since it was allocated.
    pub(super) fn is_dirty(&self, frame: Frame) -> bool {
        self.states[frame.0 as usize].is_dirty.load(Ordering::Acquire)
    }
}
