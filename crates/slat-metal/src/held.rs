//! What the TLB of a CPU may still hold, where an emulator's is more forgiving.
//!
//! # Guarantees
//! A CPU that goes on after a fault must have flushed the page of the fault, in a format that needs
//! it ([`Format::NEEDS_LOCAL_FLUSH`]). And in a format with break before make
//! ([`Format::BREAK_BEFORE_MAKE`]), it must not find a block of 2 MiB mapped by leaves of another
//! size than before, unless a flush of that block lies between. A CPU that breaks one of these
//! rules is noticed here, whatever the emulator's TLB does.
//!
//! # Implementation
//! Flushes that were carried out have numbers, and each block has that of its last one
//! ([`Flushes`]). For each block, a CPU keeps the size of the leaf that it went on with after its
//! last fault there, and the number of flushes before it looked ([`Held`]). If the size is another
//! one now, the block's last flush must have a greater number.
//!
//! # Why it is correct
//! The engine breaks an entry, flushes, and makes the new one. A CPU that saw the old entry read
//! the number of flushes before that flush took its own. A CPU that sees the new entry sees that
//! flush in the table of flushes, too: the flush is in the table when the engine's call of it
//! returns, and the engine makes the entry after that. So no flush that was carried out is missed.
//! The record may forgive what a CPU would not: a leaf that it got without a fault is not in it,
//! and two blocks may share a place in the table.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

#[cfg(doc)]
use slat::format::Format;
use slat::{Gfn, GfnRange, PageSize};

/// Places for blocks of 2 MiB.
const NR_BLOCKS: usize = 1024;
const BLOCK_PAGES: u64 = 512;

fn place(block: u64) -> usize {
    block as usize % NR_BLOCKS
}

/// The flushes that were carried out, by block.
#[derive(Debug)]
pub(crate) struct Flushes {
    /// How many there were.
    nr: AtomicU64,
    /// The last one of everything, and that of each block.
    of_all: AtomicU64,
    of_blocks: Box<[AtomicU64]>,
}

impl Flushes {
    pub fn new() -> Flushes {
        let of_blocks = (0..NR_BLOCKS).map(|_| AtomicU64::new(0)).collect();
        Flushes { nr: AtomicU64::new(0), of_all: AtomicU64::new(0), of_blocks }
    }

    /// How many there were.
    pub fn nr(&self) -> u64 {
        self.nr.load(Ordering::SeqCst)
    }

    /// `ranges` have been flushed.
    pub fn note(&self, ranges: &[GfnRange]) {
        let number = self.nr.fetch_add(1, Ordering::SeqCst) + 1;
        for range in ranges {
            let (first, end) = (range.start.0 / BLOCK_PAGES, range.end.0.div_ceil(BLOCK_PAGES));
            if end - first >= NR_BLOCKS as u64 {
                self.of_all.fetch_max(number, Ordering::SeqCst);
            } else {
                (first..end).for_each(|block| {
                    self.of_blocks[place(block)].fetch_max(number, Ordering::SeqCst);
                });
            }
        }
    }

    fn last(&self, block: u64) -> u64 {
        self.of_all.load(Ordering::SeqCst).max(self.of_blocks[place(block)].load(Ordering::SeqCst))
    }
}

/// A block that a CPU went on with.
#[derive(Clone, Copy, Default, Debug)]
struct Block {
    number: u64,
    size: Option<PageSize>,
    nr_flushes: u64,
}

/// What one CPU may hold. Its places come with its first use.
#[derive(Default, Debug)]
pub(crate) struct Held(Vec<Block>);

impl Held {
    /// The CPU goes on with a leaf of `size` at `gfn`, which it looked up after `nr_flushes`
    /// flushes. Returns whether it may hold nothing of another size there.
    #[must_use]
    pub fn take(&mut self, flushes: &Flushes, gfn: Gfn, size: PageSize, nr_flushes: u64) -> bool {
        let number = gfn.0 / BLOCK_PAGES;
        self.0.resize(NR_BLOCKS, Block::default());
        let old = core::mem::replace(&mut self.0[place(number)], Block { number, size: Some(size), nr_flushes });
        let is_other = old.number == number && old.size.is_some_and(|old| old != size);
        !is_other || flushes.last(number) > old.nr_flushes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GFN: Gfn = Gfn(5 * BLOCK_PAGES + 3);
    const BLOCK: GfnRange = GfnRange::new(Gfn(5 * BLOCK_PAGES), BLOCK_PAGES);

    #[test]
    fn another_size_needs_a_flush_between() {
        let (flushes, mut held) = (Flushes::new(), Held::default());
        assert!(held.take(&flushes, GFN, PageSize::Size2M, flushes.nr()));
        // The same size, and another block: nothing has to be flushed.
        assert!(held.take(&flushes, GFN, PageSize::Size2M, flushes.nr()));
        assert!(held.take(&flushes, Gfn(GFN.0 + BLOCK_PAGES), PageSize::Size4K, flushes.nr()));
        // A flush elsewhere does not help, one of the block does.
        flushes.note(&[GfnRange::new(Gfn(0), 1)]);
        assert!(!held.take(&flushes, GFN, PageSize::Size4K, flushes.nr()));
        flushes.note(&[BLOCK]);
        assert!(held.take(&flushes, GFN, PageSize::Size2M, flushes.nr()));
    }

    #[test]
    fn a_flush_before_the_cpu_looked_does_not_count() {
        let (flushes, mut held) = (Flushes::new(), Held::default());
        flushes.note(&[BLOCK]);
        assert!(held.take(&flushes, GFN, PageSize::Size2M, flushes.nr()));
        assert!(!held.take(&flushes, GFN, PageSize::Size4K, flushes.nr()));
    }
}
