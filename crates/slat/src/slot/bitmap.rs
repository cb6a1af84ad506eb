//! The bitmap of a memslot's dirty log, and its summary.
//!
//! The bitmap has one bit for each 4 KiB page, least significant bit first, as KVM lays it out. The
//! summary above it has one bit for each word.
//!
//! # Guarantees
//! - A harvest costs its dirty pages, and not the size of its memslot.
//! - A word has a mark below a clear summary bit only while a call that marks, or that clears by a
//!   mask, is under way (`models/proofs/dirty_log.py`). A summary bit above a word of zero is
//!   harmless.
//! - Marks of faults in different 2 MiB blocks share no cache line, if the memslot begins at a
//!   multiple of 2 MiB. The bitmap is aligned to lines, so that one line serves 512 pages.
//!
//! # Use
//! Faults [mark](Bitmap::mark), and harvests [take](Bitmap::take) or [copy](Bitmap::copy). The
//! order between marks and leaves is that of `log`.
//!
//! # Implementation
//! Marking
//! 1. sets the word, unless the bit is set already: then one load is all,
//! 2. makes a full fence,
//! 3. sets the bit of the summary, unless it is set.
//!
//! Taking
//! 1. clears the bit of the summary,
//! 2. makes a full fence,
//! 3. clears the word.
//!
//! A clear by masks clears the summary bits of the words of which it seems to leave nothing, and
//! then the words. It sets them again if something is left.
//!
//! A line of the summary serves 128 MiB, and is written once for each word between two harvests.
//!
//! # Why it is correct
//! Word and summary are a store-load pair. A call that marks and finds the summary bit set comes
//! before a harvest that clears the bit. So that harvest clears the word later, and takes the mark.

use alloc::boxed::Box;
use core::hint::black_box;
use core::ops::Range;

use crate::bits::{SetBits, bit_range};
use crate::boxed::{ZeroedWords, try_box};
use crate::error::OutOfMemory;
use crate::page_words::{PAGES_PER_WORD, TakenWords};
#[cfg(shuttle)]
use crate::sync::events::address;
use crate::sync::{AtomicU64, Ordering, fence_after_rmw, record};

/// Words that a word of the summary stands for.
const GROUP_WORDS: usize = u64::BITS as usize;

/// The dirty log of one memslot.
pub(crate) struct Bitmap {
    words: ZeroedWords,
    summary: ZeroedWords,
    /// The value of a word without marks: zero, or all ones. A log whose pages are all marked at
    /// first has all ones here, so that its words are zero and no memory is touched for them.
    clean: u64,
}

/// Returns the number of words that `nr_pages` bits need.
pub(crate) fn nr_words(nr_pages: u64) -> usize {
    nr_pages.div_ceil(PAGES_PER_WORD) as usize
}

/// Returns how many bits are set. None, one and all are fast, because not every CPU that this is
/// built for counts bits by an instruction.
#[inline]
pub(crate) fn nr_bits(word: u64) -> u64 {
    match word {
        u64::MAX => PAGES_PER_WORD,
        _ if word & word.wrapping_sub(1) == 0 => u64::from(word != 0),
        _ => u64::from(word.count_ones()),
    }
}

impl Bitmap {
    /// A bitmap of `nr_pages` clear bits.
    pub(crate) fn new(nr_pages: u64) -> Result<Box<Bitmap>, OutOfMemory> {
        let words = ZeroedWords::new(nr_words(nr_pages))?;
        let summary = ZeroedWords::new(words.len().div_ceil(GROUP_WORDS))?;
        try_box(Bitmap { words, summary, clean: 0 })
    }

    /// A bitmap of `nr_pages` set bits. It writes the summary, one word for each 16 MiB, and the
    /// last word alone.
    pub(crate) fn new_marked(nr_pages: u64) -> Result<Box<Bitmap>, OutOfMemory> {
        let mut bitmap = Bitmap::new(nr_pages)?;
        bitmap.clean = u64::MAX;
        // Relaxed, both: publishing the bitmap releases them.
        if let Some(last) = bitmap.words.last().filter(|_| nr_pages % PAGES_PER_WORD != 0) {
            last.store(!bit_range(0, nr_pages % PAGES_PER_WORD), Ordering::Relaxed);
        }
        let nr_words = bitmap.words.len() as u64;
        for (index, summary) in bitmap.summary.iter().enumerate() {
            let count = (nr_words - index as u64 * GROUP_WORDS as u64).min(GROUP_WORDS as u64);
            summary.store(bit_range(0, count), Ordering::Relaxed);
        }
        Ok(bitmap)
    }

    /// Returns the bytes of the heap that the bitmap takes.
    pub(crate) fn size_bytes(&self) -> u64 {
        (size_of::<Bitmap>() + size_of_val(&*self.words) + size_of_val(&*self.summary)) as u64
    }

    /// Clears all marks. A mark that is set meanwhile is not lost, because the order is that of a
    /// harvest.
    pub(crate) fn clear_all(&self) {
        for (group, summary) in self.summary.iter().enumerate() {
            // Relaxed: as in `skip_clean`.
            if summary.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let seen = summary.swap(0, Ordering::SeqCst);
            record!(SummaryCleared { group: group as u64, words: seen });
            // The other side of the pair in `summarize`.
            fence_after_rmw();
            for index in SetBits(seen) {
                self.take_word(group * GROUP_WORDS + index);
            }
        }
    }

    /// Clears all marks in word `index`, and returns those from before.
    #[inline]
    fn take_word(&self, index: usize) -> u64 {
        let marks = self.words[index].swap(self.clean, Ordering::SeqCst) ^ self.clean;
        record!(MarksTaken { word: index as u64, marks, log: address(self) });
        marks
    }

    /// Returns the marks in word `index`.
    #[inline]
    fn marks(&self, index: usize, ordering: Ordering) -> u64 {
        self.words[index].load(ordering) ^ self.clean
    }

    /// Whether all marks `mask` are set in word `index`.
    #[inline]
    fn has(&self, index: usize, mask: u64) -> bool {
        // SeqCst: as in `mark`.
        let has = self.marks(index, Ordering::SeqCst) & mask == mask;
        if has {
            record!(MarksFound { word: index as u64, mask, log: address(self) });
        }
        has
    }

    /// Sets the marks `mask` in word `index`.
    #[inline]
    fn set(&self, index: usize, mask: u64) {
        let word = &self.words[index];
        if self.clean == 0 {
            word.fetch_or(mask, Ordering::SeqCst)
        } else {
            word.fetch_and(!mask, Ordering::SeqCst)
        };
        record!(MarksSet { word: index as u64, mask, log: address(self) });
    }

    /// Clears the marks `mask` in word `index`, and returns the marks from before.
    #[inline]
    fn unset(&self, index: usize, mask: u64) -> u64 {
        let word = &self.words[index];
        let before = if self.clean == 0 {
            word.fetch_and(!mask, Ordering::SeqCst)
        } else {
            !word.fetch_or(mask, Ordering::SeqCst)
        };
        record!(MarksTaken { word: index as u64, marks: before & mask, log: address(self) });
        before
    }

    /// As [`mark`](Bitmap::mark), for one page.
    #[inline]
    pub(crate) fn mark_page(&self, page: u64) {
        let index = (page / PAGES_PER_WORD) as usize;
        let mask = 1 << (page % PAGES_PER_WORD);
        // SeqCst: as in `mark`.
        if self.has(index, mask) {
            return;
        }
        self.set(index, mask);
        self.summarize(index / GROUP_WORDS, 1 << (index % GROUP_WORDS));
    }

    /// As [`mark`](Bitmap::mark), for those pages of word `index` that `marks` names, or none.
    #[inline]
    pub(crate) fn mark_word(&self, index: usize, marks: u64) {
        // SeqCst: as in `mark`.
        if marks != 0 && !self.has(index, marks) {
            self.set(index, marks);
            self.summarize(index / GROUP_WORDS, 1 << (index % GROUP_WORDS));
        }
    }

    /// Marks `nr_pages` pages from `first` on. The caller has made a full fence after what the
    /// marks are for (a leaf became writable, or the page was written); see `log`.
    #[inline]
    pub(crate) fn mark(&self, first: u64, nr_pages: u64) {
        let (mut page, end) = (first, first + nr_pages);
        while page < end {
            let group = (page / PAGES_PER_WORD) as usize / GROUP_WORDS;
            let group_end = end.min((group + 1) as u64 * (GROUP_WORDS as u64 * PAGES_PER_WORD));
            let mut changed = 0;
            while page < group_end {
                let index = (page / PAGES_PER_WORD) as usize;
                let count = (PAGES_PER_WORD - page % PAGES_PER_WORD).min(group_end - page);
                let mask = bit_range(page % PAGES_PER_WORD, count);
                // SeqCst: "marked already" is a load after a store, in a pair with the harvest (see
                // `log`).
                if !self.has(index, mask) {
                    self.set(index, mask);
                    changed |= 1 << (index % GROUP_WORDS);
                }
                page += count;
            }
            if changed != 0 {
                self.summarize(group, changed);
            }
        }
    }

    /// Sets the bits `changed` in word `group` of the summary. The caller has just set their words.
    #[inline]
    fn summarize(&self, group: usize, changed: u64) {
        // A store-load pair: the word is set before the summary is read. A harvest clears the
        // summary before it reads the word.
        fence_after_rmw();
        let summary = &self.summary[group];
        if summary.load(Ordering::SeqCst) & changed != changed {
            summary.fetch_or(changed, Ordering::SeqCst);
        }
        record!(Summarized { group: group as u64, words: changed });
    }

    /// Takes the marks of the words `range`, as many as `taken` has room for. Offsets are counted
    /// from `range.start`. Returns the first word not reached.
    pub(crate) fn take(&self, range: Range<usize>, taken: &mut TakenWords) -> usize {
        let mut next = range.start;
        loop {
            next = self.skip_clean(next..range.end);
            if next >= range.end {
                break;
            }
            let (group, in_range, end) = group_of(next, range.end);
            let summary = &self.summary[group];
            let seen = summary.load(Ordering::Relaxed) & in_range;
            record!(SummarySkipped { group: group as u64, words: in_range & !seen });
            if seen != 0 {
                if !taken.has_room_for(nr_bits(seen) as usize) {
                    break;
                }
                let words = &self.words[group * GROUP_WORDS..end];
                // Words that are not in the cache come all at once for plain loads, and one after
                // the other for exchanges. One load brings a whole line.
                let touch = |line: usize| words.get(line).map_or(0, |word| word.load(Ordering::Relaxed));
                black_box(SetBits(lines_of(seen)).fold(0, |any, line| any | touch(line)));
                // Only what was read as set: another harvest may take the others.
                let found = summary.fetch_and(!seen, Ordering::SeqCst) & seen;
                record!(SummaryCleared { group: group as u64, words: found });
                record!(SummarySkipped { group: group as u64, words: seen & !found });
                // The other side of the pair in `summarize`.
                fence_after_rmw();
                taken.extend(SetBits(found).map(|index| {
                    let index = group * GROUP_WORDS + index;
                    (index - range.start, self.take_word(index))
                }));
            }
            next = end;
        }
        next
    }

    /// Returns the first word of `range` whose word of the summary is not zero, or the end of
    /// `range`.
    ///
    /// Relaxed: most words of most summaries are zero, and a load leaves the line shared. The next
    /// harvest reports a mark that is missed here, as it does one that comes a moment later.
    #[inline]
    fn skip_clean(&self, range: Range<usize>) -> usize {
        let first = range.start / GROUP_WORDS;
        let groups = &self.summary[first..range.end.div_ceil(GROUP_WORDS).max(first)];
        let has_marks = |(_group, summary): (usize, &AtomicU64)| {
            let words = summary.load(Ordering::Relaxed);
            record!(SummarySkipped { group: _group as u64, words: if words == 0 { u64::MAX } else { 0 } });
            words != 0
        };
        match (first..).zip(groups).position(has_marks) {
            Some(0) => range.start,
            Some(nr_clean) => (first + nr_clean) * GROUP_WORDS,
            None => range.end.max(range.start),
        }
    }

    /// Takes those marks of the words from `range.start` on that `masks` names, one mask for each
    /// word of `range`, as many as `taken` has room for. Returns the first word not reached.
    pub(crate) fn take_masked(&self, range: Range<usize>, masks: &[u64], taken: &mut TakenWords) -> usize {
        let mut next = range.start;
        while next < range.end && taken.has_room_for(GROUP_WORDS) {
            let (group, in_range, end) = group_of(next, range.end);
            // Words of which nothing seems to be left: their summary bits are cleared, and set
            // again if a mark comes meanwhile. Another harvest may miss that mark now, and the next
            // one reports it.
            let mut emptied = 0;
            for index in next..end {
                let (word, mask) = (self.marks(index, Ordering::Relaxed), masks[index - range.start]);
                if word & mask != 0 && word & !mask == 0 {
                    emptied |= 1 << (index % GROUP_WORDS);
                }
            }
            debug_assert!(emptied & !in_range == 0);
            if emptied != 0 {
                self.summary[group].fetch_and(!emptied, Ordering::SeqCst);
                record!(SummaryCleared { group: group as u64, words: emptied });
                // The other side of the pair in `summarize`.
                fence_after_rmw();
            }
            let mut left = 0;
            for index in next..end {
                let mask = masks[index - range.start];
                let mut before = self.marks(index, Ordering::Relaxed);
                if before & mask == 0 {
                    record!(MarksTaken { word: index as u64, marks: 0, log: address(self) });
                } else {
                    before = self.unset(index, mask);
                    taken.push(index - range.start, before & mask);
                }
                // Also where nothing was left to take: another harvest may have taken it, and marks
                // have come since.
                if before & !mask != 0 {
                    left |= 1 << (index % GROUP_WORDS);
                }
            }
            if left & emptied != 0 {
                self.summarize(group, left & emptied);
            }
            next = end;
        }
        next
    }

    /// As [`take`](Bitmap::take), but changes nothing.
    pub(crate) fn find_marked(&self, range: Range<usize>, found: &mut TakenWords) -> usize {
        let mut next = self.skip_clean(range.clone());
        while next < range.end && found.has_room_for(GROUP_WORDS) {
            let (_, _, end) = group_of(next, range.end);
            self.look(next..end, |index, marks| found.push(index - range.start, marks));
            next = self.skip_clean(end..range.end);
        }
        next
    }

    /// Copies the words `range` to `out`, which has as many, and changes nothing. Returns the number
    /// of marked pages.
    pub(crate) fn copy(&self, range: Range<usize>, mut out: &mut [u64]) -> u64 {
        let clean = self.clean;
        let mut nr_pages = 0;
        let mut next = range.start;
        while next < range.end {
            let marked = self.skip_clean(next..range.end);
            let (skipped, rest) = out.split_at_mut(marked - next);
            skipped.fill(0);
            (out, next) = (rest, marked);
            if next == range.end {
                break;
            }
            let (group, in_range, end) = group_of(next, range.end);
            let words = &self.words[next..end];
            let (copied, rest) = out.split_at_mut(words.len());
            // Acquire, both: the caller observes what was written before a mark that it finds here.
            let marked = self.summary[group].load(Ordering::Acquire) & in_range;
            if marked == in_range {
                // To find each bit of the summary would take longer than to read its word.
                for (copied, word) in copied.iter_mut().zip(words) {
                    *copied = word.load(Ordering::Acquire) ^ clean;
                    nr_pages += nr_bits(*copied);
                }
            } else {
                copied.fill(0);
                for index in SetBits(marked) {
                    let index = index - next % GROUP_WORDS;
                    copied[index] = words[index].load(Ordering::Acquire) ^ clean;
                    nr_pages += nr_bits(copied[index]);
                }
            }
            (out, next) = (rest, end);
        }
        nr_pages
    }

    /// Returns how many pages are marked in those words of `range` that exist.
    pub(crate) fn nr_marked(&self, range: Range<usize>) -> u64 {
        let mut nr_pages = 0;
        let end = range.end.min(self.words.len());
        self.look(range.start.min(end)..end, |_, marks| nr_pages += nr_bits(marks));
        nr_pages
    }

    /// Calls `see` with the number and the marks of those words of `range` that have any.
    #[inline]
    fn look(&self, range: Range<usize>, mut see: impl FnMut(usize, u64)) {
        let mut next = range.start;
        loop {
            next = self.skip_clean(next..range.end);
            if next >= range.end {
                break;
            }
            let (group, in_range, end) = group_of(next, range.end);
            // Acquire, both: the caller observes what was written before a mark that it finds here.
            for index in SetBits(self.summary[group].load(Ordering::Acquire) & in_range) {
                let index = group * GROUP_WORDS + index;
                see(index, self.marks(index, Ordering::Acquire));
            }
            next = end;
        }
    }

    /// Whether page `page` is marked.
    pub(crate) fn is_marked(&self, page: u64) -> bool {
        self.marks((page / PAGES_PER_WORD) as usize, Ordering::Acquire) >> (page % PAGES_PER_WORD) & 1 != 0
    }
}

/// Of each cache line of eight words that `words` names, the first.
#[inline]
fn lines_of(words: u64) -> u64 {
    let words = words | words >> 4;
    let words = words | words >> 2;
    (words | words >> 1) & 0x0101_0101_0101_0101
}

/// Returns the number of the summary word of word `next`, its bits for the words from `next` on and
/// below `range_end`, and the first word behind those.
#[inline]
fn group_of(next: usize, range_end: usize) -> (usize, u64, usize) {
    let group = next / GROUP_WORDS;
    let end = range_end.min((group + 1) * GROUP_WORDS);
    (group, bit_range((next % GROUP_WORDS) as u64, (end - next) as u64), end)
}

#[cfg(all(test, not(any(loom, shuttle))))]
#[path = "bitmap_tests.rs"]
mod tests;

#[cfg(all(test, loom))]
#[path = "bitmap_loom.rs"]
mod loom_tests;
