//! What each page of a guest_memfd slot is: shared with the VMM, or private to the guest. One bit a page, which belongs to
//! the slot.
//!
//! A fault reads the bit after its entry, and asks the host for the one memory or the other. Whoever changes bits does so in
//! the middle of an invalidation: the range is published and a stamp taken before, the pages are taken away behind. A fault
//! that read the old bit finds the stamp or the range, and starts over (`models/userfault.py`, rule `store-first`).

use alloc::boxed::Box;

use crate::addr::GfnRange;
use crate::boxed::{ZeroedWords, try_box};
use crate::dirty::bitmap::nr_words;
use crate::error::Error;
use crate::sync::Ordering;

bitflags::bitflags! {
    /// Attributes of guest memory, with KVM's names and values.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct MemoryAttributes: u64 {
        /// The page is the guest's alone: it comes from the slot's guest_memfd
        /// ([`Host::resolve_private`](crate::Host::resolve_private)), and the VMM has no mapping of it. Pages without it are
        /// shared.
        const PRIVATE = 1 << 3;
    }
}

const BITS: u64 = u64::BITS as u64;

/// Which pages of a slot are private.
pub(crate) struct PrivatePages(ZeroedWords);

impl PrivatePages {
    /// All of `nr_pages` shared.
    pub(crate) fn new(nr_pages: u64) -> Result<Box<PrivatePages>, Error> {
        try_box(PrivatePages(ZeroedWords::new(nr_words(nr_pages))?))
    }

    /// What it takes of the heap, in bytes.
    pub(crate) fn size_bytes(&self) -> u64 {
        size_of_val(&*self.0) as u64
    }

    /// The bits of word number `index`. Acquire: what a fault reads next is not older than the bits.
    fn word(&self, index: usize) -> u64 {
        self.0[index].load(Ordering::Acquire)
    }

    /// What page `page` of the slot is.
    pub(crate) fn of(&self, page: u64) -> MemoryAttributes {
        if self.word((page / BITS) as usize) >> (page % BITS) & 1 != 0 {
            MemoryAttributes::PRIVATE
        } else {
            MemoryAttributes::empty()
        }
    }

    /// Whether all pages of `pages`, numbers within the slot, are what the first is.
    pub(crate) fn are_alike(&self, pages: GfnRange) -> bool {
        let first = if self.of(pages.start.0).is_empty() { 0 } else { u64::MAX };
        words_of(pages).all(|(index, mask)| (self.word(index) ^ first) & mask == 0)
    }

    /// Makes all of `pages`, numbers within the slot, what `attributes` says.
    pub(crate) fn set(&self, pages: GfnRange, attributes: MemoryAttributes) {
        for (index, mask) in words_of(pages) {
            // Release: whoever sees the bits sees the range published, and the stamp that was taken for it.
            if attributes.contains(MemoryAttributes::PRIVATE) {
                self.0[index].fetch_or(mask, Ordering::Release);
            } else {
                self.0[index].fetch_and(!mask, Ordering::Release);
            }
        }
    }
}

/// The words that have the bits of `pages`, each with a mask of these bits.
fn words_of(pages: GfnRange) -> impl Iterator<Item = (usize, u64)> {
    let (start, end) = (pages.start.0, pages.end.0);
    (start / BITS..end.div_ceil(BITS)).map(move |index| {
        let first = start.saturating_sub(index * BITS);
        let count = (end - index * BITS).min(BITS) - first;
        (index as usize, (u64::MAX >> (BITS - count)) << first)
    })
}
