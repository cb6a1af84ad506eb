//! Whether each page of a guest_memfd memslot is shared with the VMM, or private to the guest.
//!
//! # Guarantees
//! After a change of attributes returns, no CPU uses a page through a leaf of the other kind, and
//! no fault installs one.
//!
//! # Use
//! The caller of [`PrivatePages::set`] holds the pages in an invalidation.
//!
//! # Implementation
//! The memslot has one bit for each page. A fault reads the bit after its PTE, and asks the host
//! for private or shared memory. A change publishes the range, takes a sequence number, zaps and
//! flushes the range, stores the bits, and withdraws the range.
//!
//! # Why it is correct
//! A fault that read the old bit finds another number in the PTE, or the range in flight, and
//! starts over (`models/proofs/userfault.py`, rule attributes-after-zap).

use alloc::boxed::Box;

use crate::addr::GfnRange;
use crate::bits::bit_range;
use crate::boxed::{ZeroedWords, try_box};
use crate::error::OutOfMemory;
use crate::slot::bitmap::nr_words;
use crate::sync::{Ordering, record};

bitflags::bitflags! {
    /// Attributes of guest memory, with KVM's names and values.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct MemoryAttributes: u64 {
        /// The page is the guest's alone. It comes from the memslot's guest_memfd
        /// ([`Host::resolve_private`](crate::Host::resolve_private)), and the VMM has no mapping of
        /// it. Pages without this attribute are shared.
        const PRIVATE = 1 << 3;
    }
}

const BITS: u64 = u64::BITS as u64;

/// Which pages of a memslot are private.
pub(crate) struct PrivatePages(ZeroedWords);

impl PrivatePages {
    /// All of `nr_pages` pages shared.
    pub(crate) fn new(nr_pages: u64) -> Result<Box<PrivatePages>, OutOfMemory> {
        try_box(PrivatePages(ZeroedWords::new(nr_words(nr_pages))?))
    }

    /// Returns the bytes of the heap that it takes.
    pub(crate) fn size_bytes(&self) -> u64 {
        size_of_val(&*self.0) as u64
    }

    /// Returns the bits of word `index`. Acquire: what a fault reads next is not older than the
    /// bits.
    fn word(&self, index: usize) -> u64 {
        let value = self.0[index].load(Ordering::Acquire);
        record!(AttributesRead { word: index as u64, value });
        value
    }

    /// Returns the attributes of page `page` of the memslot.
    pub(crate) fn of(&self, page: u64) -> MemoryAttributes {
        if self.word((page / BITS) as usize) >> (page % BITS) & 1 != 0 {
            MemoryAttributes::PRIVATE
        } else {
            MemoryAttributes::empty()
        }
    }

    /// Whether all of `pages`, numbers within the memslot, have the attributes of the first.
    pub(crate) fn are_alike(&self, pages: GfnRange) -> bool {
        let first = if self.of(pages.start.0).is_empty() { 0 } else { u64::MAX };
        words_of(pages).all(|(index, mask)| (self.word(index) ^ first) & mask == 0)
    }

    /// Gives all of `pages`, numbers within the memslot, `attributes`.
    pub(crate) fn set(&self, pages: GfnRange, attributes: MemoryAttributes) {
        for (index, mask) in words_of(pages) {
            // Release: a thread that reads the bits observes the range in flight, and the sequence
            // number that was taken for it.
            if attributes.contains(MemoryAttributes::PRIVATE) {
                self.0[index].fetch_or(mask, Ordering::Release);
            } else {
                self.0[index].fetch_and(!mask, Ordering::Release);
            }
            record!(AttributesStored {
                word: index as u64,
                mask,
                is_private: attributes.contains(MemoryAttributes::PRIVATE),
            });
        }
    }
}

/// The words that have the bits of `pages`, each with a mask of these bits.
fn words_of(pages: GfnRange) -> impl Iterator<Item = (usize, u64)> {
    let (start, end) = (pages.start.0, pages.end.0);
    (start / BITS..end.div_ceil(BITS)).map(move |index| {
        let first = start.saturating_sub(index * BITS);
        let count = (end - index * BITS).min(BITS) - first;
        (index as usize, bit_range(first, count))
    })
}
