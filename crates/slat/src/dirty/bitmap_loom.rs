//! The bitmap and its summary under loom: when all who mark and take are done, each mark was taken or is found.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p slat --release --lib loom`

extern crate std;

use std::vec::Vec;

use loom::sync::Arc;
use loom::thread;

use super::{Bitmap, TakenWords};

/// Words of the bitmap: one summary word stands for both.
const NR_WORDS: usize = 2;

/// What a thread does.
#[derive(Clone, Copy)]
enum Step {
    /// Marks a page.
    Mark(u64),
    /// Takes the words from the first number to the second.
    Take(usize, usize),
    /// Takes those pages of the first word that the mask names.
    Clear(u64),
}

use Step::{Clear, Mark, Take};

/// Does `step`; returns the bits that it took, by word.
fn run(bitmap: &Bitmap, step: Step) -> [u64; NR_WORDS] {
    let mut taken = TakenWords::new();
    let first = if let Take(start, _) = step { start } else { 0 };
    match step {
        Mark(page) => bitmap.mark(page, 1),
        Take(start, end) => {
            bitmap.take(start..end, &mut taken);
        }
        Clear(mask) => {
            bitmap.take_masked(0..1, &[mask], &mut taken);
        }
    }
    let mut bits = [0; NR_WORDS];
    for (&offset, word) in taken.offsets().iter().zip(taken.bits()) {
        bits[first + usize::from(offset)] |= word;
    }
    bits
}

/// Runs each of `threads` beside the others, on a bitmap in which `marked` are marked. At the end every page of `marked`
/// or of a mark was taken or is marked, and all that is marked is found.
fn model(marked: &'static [u64], threads: &'static [&'static [Step]]) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(3);
    builder.check(move || {
        let bitmap = Arc::new(Bitmap::new(64 * NR_WORDS as u64).expect("memory for a bitmap"));
        marked.iter().for_each(|&page| bitmap.mark(page, 1));
        let (first, others) = threads.split_first().expect("a model has a thread");
        let others = others.iter().map(|&steps| {
            let bitmap = Arc::clone(&bitmap);
            thread::spawn(move || steps.iter().map(|&step| run(&bitmap, step)).collect::<Vec<_>>())
        });
        let others = others.collect::<Vec<_>>();
        let mut seen: Vec<_> = first.iter().map(|&step| run(&bitmap, step)).collect();
        for thread in others {
            seen.extend(thread.join().expect("no check fails"));
        }
        let mut left = [0; NR_WORDS];
        bitmap.copy(0..NR_WORDS, &mut left);
        for page in 0..64 * NR_WORDS as u64 {
            let (word, bit) = ((page / 64) as usize, 1 << (page % 64));
            assert_eq!(left[word] & bit != 0, bitmap.is_marked(page), "page {page} is marked, and is not found");
            let was_marked = marked.contains(&page)
                || threads
                    .iter()
                    .flat_map(|steps| steps.iter())
                    .any(|step| matches!(step, Mark(other) if *other == page));
            let was_seen = seen.iter().any(|bits| bits[word] & bit != 0) || left[word] & bit != 0;
            assert_eq!(was_seen, was_marked, "page {page}");
        }
    });
}

#[test]
fn a_mark_beside_a_clear_of_another_page_of_its_word() {
    model(&[0], &[&[Mark(1)], &[Clear(1)]]);
    model(&[0, 1], &[&[Mark(1)], &[Clear(1)]]);
    model(&[0], &[&[Mark(1), Mark(2)], &[Clear(1 | 4)]]);
}

#[test]
fn two_clears_of_one_word_and_a_mark() {
    model(&[0, 1], &[&[Clear(1)], &[Clear(2)]]);
    model(&[0, 1], &[&[Clear(1)], &[Clear(2)], &[Mark(0)]]);
    model(&[0], &[&[Clear(1)], &[Clear(3)], &[Mark(1)]]);
}

#[test]
fn a_take_beside_marks_of_its_own_and_of_other_words() {
    model(&[0], &[&[Take(0, 2)], &[Mark(0)], &[Mark(64)]]);
    model(&[0, 64], &[&[Take(0, 1)], &[Mark(65)], &[Take(1, 2)]]);
    model(&[64], &[&[Take(0, 1)], &[Mark(0), Mark(64)]]);
}

#[test]
fn a_take_beside_a_clear_and_a_mark() {
    model(&[0], &[&[Take(0, 2)], &[Clear(1)], &[Mark(1)]]);
    model(&[0, 1], &[&[Take(0, 1)], &[Clear(2)], &[Mark(1)]]);
}
