//! Words and summary under loom: a harvest finds every mark. Schedules of a few threads with at
//! most [`PREEMPTIONS`] preemptions, with the memory orders as they are written.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p slat --release --lib loom`

extern crate std;

use core::ops::Range;
use std::vec::Vec;

use loom::sync::Arc;
use loom::thread;

use super::Bitmap;
use crate::page_words::{PAGES_PER_WORD, TakenWords};
use crate::sync::{AtomicU64, Ordering, fence_after_rmw, full_fence};

const PREEMPTIONS: usize = 3;
/// For three threads: with one more, a model takes minutes.
const PREEMPTIONS_OF_THREE: usize = 3;

/// Two words, which share a word of the summary.
const NR_PAGES: u64 = 2 * PAGES_PER_WORD;

/// What a thread does.
#[derive(Clone, Copy)]
enum Step {
    Mark(u64),
    Take(Range2),
    /// Clears what the mask selects of the first word.
    Clear(u64),
}

/// The words `.0` to `.1`: `Range` cannot be copied.
#[derive(Clone, Copy)]
struct Range2(usize, usize);

const ALL: Step = Take(Range2(0, 2));
const FIRST: Step = Take(Range2(0, 1));
const SECOND: Step = Take(Range2(1, 2));

use Step::{Clear, Mark, Take};

/// The bits that were harvested, of both words.
type Harvested = [u64; 2];

fn run(log: &Bitmap, step: Step) -> Harvested {
    let (mut taken, mut words) = (TakenWords::new(), [0; 2]);
    match step {
        Mark(page) => log.mark(page, 1),
        Take(Range2(start, end)) => assert_eq!(log.take(Range { start, end }, &mut taken), end),
        Clear(mask) => assert_eq!(log.take_masked(0..1, &[mask], &mut taken), 1),
    }
    let first = if let Take(Range2(start, _)) = step { start } else { 0 };
    for (&offset, bits) in taken.offsets().iter().zip(taken.bits()) {
        words[first + usize::from(offset)] |= bits;
    }
    words
}

fn or(a: Harvested, b: Harvested) -> Harvested {
    [a[0] | b[0], a[1] | b[1]]
}

/// Runs each of `threads` beside the others, on a log in which `marked` is marked already. After
/// one more harvest, all marks must have been harvested.
fn model(marked: &'static [u64], threads: &'static [&'static [Step]]) {
    let mut builder = loom::model::Builder::new();
    let bound = builder.preemption_bound.get_or_insert(PREEMPTIONS);
    if threads.len() > 2 {
        *bound = (*bound).min(crate::sync::preemptions_of_three(PREEMPTIONS_OF_THREE));
    }
    builder.check(move || {
        let log = Arc::new(Bitmap::new(NR_PAGES).expect("memory for a bitmap"));
        marked.iter().for_each(|&page| log.mark(page, 1));
        let (first, others) = threads.split_first().expect("a model has a thread");
        let others = others.iter().map(|&steps| {
            let log = Arc::clone(&log);
            thread::spawn(move || steps.iter().fold([0; 2], |taken, &step| or(taken, run(&log, step))))
        });
        let others = others.collect::<Vec<_>>();
        let mut taken = first.iter().fold([0; 2], |taken, &step| or(taken, run(&log, step)));
        for thread in others {
            taken = or(taken, thread.join().expect("no check fails"));
        }
        taken = or(taken, run(&log, ALL));
        let marks =
            threads.iter().copied().flatten().filter_map(|&step| if let Mark(page) = step { Some(page) } else { None });
        for page in marks.chain(marked.iter().copied()) {
            let is_harvested = taken[(page / PAGES_PER_WORD) as usize] >> (page % PAGES_PER_WORD) & 1 == 1;
            assert!(is_harvested, "the mark of page {page} is lost");
        }
        assert_eq!(run(&log, ALL), [0; 2], "a page is harvested twice");
    });
}

#[test]
fn marks_beside_a_harvest() {
    // In one word, in two, and in a page that is marked already.
    model(&[], &[&[Mark(0)], &[ALL]]);
    model(&[0], &[&[Mark(0)], &[ALL, ALL]]);
    model(&[], &[&[Mark(0)], &[Mark(1)], &[ALL]]);
    model(&[], &[&[Mark(0)], &[Mark(64)], &[ALL]]);
    model(&[0], &[&[Mark(0)], &[Mark(1)], &[ALL]]);
    model(&[1], &[&[Mark(0), Mark(64)], &[ALL, ALL]]);
}

#[test]
fn a_mark_beside_harvests_of_which_one_cuts_a_summary_word() {
    model(&[64], &[&[Mark(0)], &[ALL], &[FIRST]]);
    model(&[0], &[&[Mark(64)], &[ALL], &[FIRST]]);
    model(&[0, 64], &[&[Mark(0), Mark(64)], &[FIRST, SECOND]]);
    model(&[0], &[&[Mark(64)], &[SECOND], &[FIRST]]);
}

#[test]
fn a_mark_beside_what_clears_by_a_mask() {
    model(&[0], &[&[Mark(1)], &[Clear(1)]]);
    model(&[0, 1], &[&[Mark(0)], &[Clear(1), Clear(2)]]);
    model(&[0], &[&[Mark(64)], &[Clear(1)], &[ALL]]);
    // Another thread harvests what the mask selects: nothing is left to clear, and there is a mark
    // beside it.
    model(&[0], &[&[Mark(1)], &[Clear(1)], &[ALL]]);
    model(&[0], &[&[Mark(1)], &[Clear(1)], &[Clear(1)]]);
}

/// A thread that writes a page itself, and then finds it marked already, has written it before the
/// mark is harvested.
#[test]
fn a_harvest_that_clears_a_mark_observes_the_write_before_it() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(PREEMPTIONS);
    builder.check(|| {
        let shared = Arc::new((Bitmap::new(NR_PAGES).expect("memory for a bitmap"), AtomicU64::new(0)));
        shared.0.mark(0, 1);
        let writer = thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                let (log, page) = &*shared;
                page.store(1, Ordering::Relaxed);
                full_fence();
                log.mark(0, 1);
            }
        });
        let (log, page) = &*shared;
        let harvest = || {
            (run(log, ALL)[0] != 0).then(|| {
                // As before a harvest reads the leaves.
                fence_after_rmw();
                page.load(Ordering::Relaxed)
            })
        };
        let early = harvest();
        writer.join().expect("no check fails");
        assert!(early.max(harvest()) == Some(1), "the page was written, and only its old contents were copied");
    });
}
