//! The call that passes dirty pages on, run by run, and needs no bitmap of the caller.
//!
//! # Guarantees
//! - A run is passed on when its pages are protected and flushed: what the guest writes from then on
//!   is in a later log.
//! - No mark is lost. A run counts as passed on when the callback has returned. What was taken and
//!   not passed on is marked again: if the callback stops or panics, and if a flush panics.
//! - Nothing is held while the callback runs. It may call any method of the VM.
//! - The call takes less than 6 KiB of the heap, whatever the size of the memslot: the working memory
//!   of the participant ([`HarvestRoom`]).
//!
//! # Use
//! [`LogCall::for_each`] takes the marks, [`LogCall::for_each_copied`] changes nothing.
//!
//! # Implementation
//! The [`Window`] has room for the marks of some turns of a harvest. When another turn could find no
//! room, the harvest flushes and passes the runs on. So there is one flush for at least 128 words
//! with dirty pages, or one for all.
//!
//! # Why it is correct
//! Until it has marked again what it took, the call is one that is about to mark (`dirty/log.rs`):
//! the first harvest that begins after it has returned reports these pages. They are protected
//! already. So a write between the two marks its page, and marks once more what will be marked.

use core::ops::{ControlFlow, Range};

use super::log::{Found, LogCall, Reader};
use super::mark::mark_pages;
use crate::error::LogError;
use crate::format::Format;
use crate::host::Host;
use crate::page_words::{HarvestRoom, PAGES_PER_WORD, TakenWords, WINDOW_WORDS};

/// What gets a run of dirty pages: their numbers in the memslot.
pub(crate) type Callback<'f> = dyn FnMut(Range<u64>) -> ControlFlow<()> + 'f;

/// Marks that were taken or copied, and are to be passed on.
struct Window<'r> {
    /// The number of each word in the log, and its marks.
    words: &'r mut [[u64; 2]; WINDOW_WORDS],
    nr_words: usize,
    /// The first of them that has marks left.
    next: usize,
}

impl<'r> Window<'r> {
    fn new(words: &'r mut [[u64; 2]; WINDOW_WORDS]) -> Window<'r> {
        Window { words, nr_words: 0, next: 0 }
    }

    /// Adds marks, whose offsets are counted from word `first_word` of the log.
    fn add(&mut self, first_word: u64, taken: &TakenWords) {
        let taken = taken.offsets().iter().zip(taken.bits());
        for (room, (&offset, &bits)) in self.words[self.nr_words..].iter_mut().zip(taken) {
            *room = [first_word + u64::from(offset), bits];
            self.nr_words += 1;
        }
    }

    fn is_full(&self) -> bool {
        WINDOW_WORDS - self.nr_words < TakenWords::CAPACITY
    }

    /// Takes the next run of pages out of the window.
    fn next_run(&mut self) -> Option<Range<u64>> {
        let mut run: Option<Range<u64>> = None;
        while let Some([word, bits]) = self.words[..self.nr_words].get_mut(self.next) {
            let shift = u64::from(bits.trailing_zeros());
            let start = *word * PAGES_PER_WORD + shift;
            match &run {
                // The word has no page left, or the run ends before the next.
                _ if *bits == 0 => {
                    self.next += 1;
                    continue;
                }
                Some(run) if run.end != start => break,
                _ => {}
            }
            let nr_pages = u64::from((*bits >> shift).trailing_ones());
            let start = run.map_or(start, |run| run.start);
            let end = *word * PAGES_PER_WORD + shift + nr_pages;
            // To the end of the word, or less: then there is a page left behind it.
            *bits &= u64::MAX.checked_shl((shift + nr_pages) as u32).unwrap_or(0);
            run = Some(start..end);
        }
        if run.is_none() {
            (self.nr_words, self.next) = (0, 0);
        }
        run
    }
}

/// Passes runs on that a harvest took. What is left when it is dropped is marked again.
struct TakenRuns<'c, 'f, H: Host, F: Format> {
    call: &'c LogCall<'c, H, F>,
    /// The first word of the call in the log.
    first_word: u64,
    window: Window<'c>,
    /// The run that the callback has.
    current: Range<u64>,
    callback: &'c mut Callback<'f>,
    nr_pages: u64,
}

impl<H: Host, F: Format> Reader for TakenRuns<'_, '_, H, F> {
    fn receive(&mut self, reached: Range<usize>, taken: &TakenWords) {
        self.window.add(self.first_word + reached.start as u64, taken);
    }

    fn is_full(&self) -> bool {
        self.window.is_full()
    }

    fn read(&mut self) -> ControlFlow<()> {
        while let Some(run) = self.window.next_run() {
            self.current = run.clone();
            let result = (self.callback)(run.clone());
            self.nr_pages += run.end - run.start;
            self.current = 0..0;
            result?;
        }
        ControlFlow::Continue(())
    }
}

impl<H: Host, F: Format> Drop for TakenRuns<'_, '_, H, F> {
    fn drop(&mut self) {
        let LogCall { op, id } = *self.call;
        let mut next = Some(self.current.clone()).filter(|run| !run.is_empty());
        while let Some(run) = next.or_else(|| self.window.next_run()) {
            // An error: the memslot was deleted meanwhile, or is another one and has fewer pages.
            let _ = mark_pages(op, id, run.start, run.end - run.start);
            next = None;
        }
    }
}

impl<H: Host, F: Format> LogCall<'_, H, F> {
    /// Takes the log of `pages` (first and number), protects the pages taken, and passes them to
    /// `callback`, until it breaks. Returns the number of pages passed on.
    pub(crate) fn for_each(&self, pages: (u64, u64), callback: &mut Callback<'_>) -> Result<u64, LogError> {
        self.op.participant.with_harvest_room(|HarvestRoom { taken, window }| {
            self.collect(Some(pages), usize::MAX)?;
            let (first_word, window) = (pages.0 / PAGES_PER_WORD, Window::new(window));
            let mut runs = TakenRuns { call: self, first_word, window, current: 0..0, callback, nr_pages: 0 };
            self.harvest(Some(pages), usize::MAX, taken, |log, words, _, taken| log.take(words, taken), &mut runs)?;
            Ok(runs.nr_pages)
        })?
    }

    /// As [`for_each`](Self::for_each), but changes nothing.
    pub(crate) fn for_each_copied(&self, pages: (u64, u64), callback: &mut Callback<'_>) -> Result<u64, LogError> {
        self.op.participant.with_harvest_room(|room| self.copy_runs(pages, room, callback))?
    }

    fn copy_runs(
        &self,
        pages: (u64, u64),
        HarvestRoom { taken: found, window }: &mut HarvestRoom,
        callback: &mut Callback<'_>,
    ) -> Result<u64, LogError> {
        let mut window = Window::new(window);
        self.collect(Some(pages), usize::MAX)?;
        let (mut nr_pages, mut done, mut is_over) = (0, 0, false);
        while !is_over {
            let guard = self.op.pin();
            let Found { log, words, turn, .. } = self.find(&guard, Some(pages), usize::MAX, done)?;
            found.clear();
            let reached = log.find_marked(turn.clone(), found);
            guard.visit((reached - turn.start) as u64);
            drop(guard);
            window.add(turn.start as u64, found);
            done += reached - turn.start;
            is_over = reached == words.end;
            if is_over || window.is_full() {
                while let Some(run) = window.next_run() {
                    nr_pages += run.end - run.start;
                    if callback(run).is_break() {
                        return Ok(nr_pages);
                    }
                }
            }
        }
        Ok(nr_pages)
    }
}
