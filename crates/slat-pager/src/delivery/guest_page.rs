//! A page in the resolver's mapping of the guest's memory, while it is filled.
//!
//! Threads of the resolver may share it. The VMM has the same memory mapped and is not trusted. So
//! the page is written by atomic stores of whole words: if two threads fill it at once, each word
//! is from one of them.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::linux::mapping::MappedMemory;

const WORD_BYTES: usize = size_of::<u64>();

/// One page of the guest's memory that is to be filled. No guest reads it yet: its bit is set and
/// it is claimed. Threads of the claimer may share it.
#[derive(Debug)]
pub struct GuestPage<'a> {
    words: &'a [AtomicU64],
}

impl<'a> GuestPage<'a> {
    /// The page at `offset_bytes`; both numbers are multiples of 4 KiB, and it ends inside the
    /// mapping.
    pub(super) fn new(mapping: &'a MappedMemory, offset_bytes: usize, size_bytes: usize) -> GuestPage<'a> {
        debug_assert!((offset_bytes | size_bytes).is_multiple_of(crate::source::PAGE_BYTES as usize));
        let words = mapping.words_of(offset_bytes as u64..(offset_bytes + size_bytes) as u64);
        debug_assert!(words.is_some(), "{size_bytes} bytes at {offset_bytes} of {}", mapping.size_bytes());
        GuestPage { words: words.unwrap_or_default() }
    }
}

impl GuestPage<'_> {
    /// Its first byte, aligned to 4 KiB. A caller that writes through it keeps other threads from
    /// writing meanwhile.
    pub fn as_ptr(&self) -> *mut u8 {
        self.words.as_ptr().cast_mut().cast()
    }

    /// Its size, whole pages of 4 KiB; the last one of 2 MiB may be shorter.
    pub fn size_bytes(&self) -> usize {
        size_of_val(self.words)
    }

    /// Fills it with `bytes` from its start on, as far as both go. If two threads do so at once,
    /// each word is from one of them.
    pub fn copy_from(&self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<WORD_BYTES>();
        // Relaxed, all of them: the bit, which is cleared with release, hands the page over.
        for (own, word) in self.words.iter().zip(words) {
            own.store(u64::from_ne_bytes(*word), Ordering::Relaxed);
        }
        if !rest.is_empty()
            && let Some(last) = self.words.get(words.len())
        {
            // By whole words too: atomics of two sizes must not race.
            let mut word = last.load(Ordering::Relaxed).to_ne_bytes();
            word[..rest.len()].copy_from_slice(rest);
            last.store(u64::from_ne_bytes(word), Ordering::Relaxed);
        }
    }
}
