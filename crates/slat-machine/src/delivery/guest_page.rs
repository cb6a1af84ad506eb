//! A page in the resolver's mapping of the guest's memory, while it is filled.
//!
//! Threads of the resolver may share it. The VMM has the same memory mapped and is not trusted. So
//! the page is written by atomic stores of whole words: if two threads fill it at once, each word
//! is from one of them.

#![expect(unsafe_code, reason = "stores into guest memory through a mapping")]

use std::sync::atomic::{AtomicU64, Ordering};

use super::shared::SharedMapping;

const WORD_BYTES: usize = size_of::<u64>();

/// One page of the guest's memory that is to be filled. No guest reads it yet: its bit is set and
/// it is claimed. Threads of the claimer may share it.
#[derive(Debug)]
pub struct GuestPage<'a> {
    start: *mut u8,
    size_bytes: usize,
    _mapping: &'a SharedMapping,
}

impl<'a> GuestPage<'a> {
    /// The page at `offset_bytes`; both numbers are multiples of 4 KiB, and it ends inside the
    /// mapping.
    pub(super) fn new(mapping: &'a SharedMapping, offset_bytes: usize, size_bytes: usize) -> GuestPage<'a> {
        debug_assert!((offset_bytes | size_bytes).is_multiple_of(slat::PAGE_SIZE as usize));
        debug_assert!((offset_bytes + size_bytes) as u64 <= mapping.size_bytes());
        GuestPage { start: mapping.as_ptr().wrapping_add(offset_bytes), size_bytes, _mapping: mapping }
    }
}

impl GuestPage<'_> {
    /// Its first byte, aligned to 4 KiB. A caller that writes through it keeps other threads from
    /// writing meanwhile.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    /// Its size, whole pages of 4 KiB; the last one of 2 MiB may be shorter.
    pub fn size_bytes(&self) -> usize {
        self.size_bytes
    }

    /// Fills it with `bytes` from its start on, as far as both go. If two threads do so at once,
    /// each word is from one of them.
    pub fn copy_from(&self, bytes: &[u8]) {
        let bytes = &bytes[..bytes.len().min(self.size_bytes)];
        let (words, rest) = bytes.as_chunks::<WORD_BYTES>();
        // Relaxed, all of them: the bit, which is cleared with release, hands the page over.
        for (nr, word) in words.iter().enumerate() {
            self.word(nr).store(u64::from_ne_bytes(*word), Ordering::Relaxed);
        }
        if !rest.is_empty() {
            // By whole words too: atomics of two sizes must not race. There is a word, since a page
            // ends with one.
            let last = self.word(words.len());
            let mut word = last.load(Ordering::Relaxed).to_ne_bytes();
            word[..rest.len()].copy_from_slice(rest);
            last.store(u64::from_ne_bytes(word), Ordering::Relaxed);
        }
    }

    /// A word of the page.
    fn word(&self, nr: usize) -> &AtomicU64 {
        debug_assert!((nr + 1) * WORD_BYTES <= self.size_bytes);
        // SAFETY: `copy_from`, its only caller, goes no further than `size_bytes`, which are whole
        // pages of the mapping, at a page boundary; the mapping lives as long as `self`, and its
        // file cannot shrink. A thread that shares a `GuestPage` or a request in this process
        // stores here atomically, as this does, unless by `as_ptr`, whose users keep others away. A
        // VMM that lets a guest touch the page meanwhile does so in another mapping, and for this
        // one that is like a device.
        unsafe { AtomicU64::from_ptr(self.start.cast::<u64>().wrapping_add(nr)) }
    }
}
