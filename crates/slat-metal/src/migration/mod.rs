//! A live migration: a Linux guest goes from one machine, the source, to another one, the target,
//! and goes on there.
//!
//! # Guarantees
//! - The guest's memory, registers and devices are on the target what they were on the source when
//!   it stopped there.
//! - The guest runs on one machine at a time, and never sees a page before it has come.
//! - A page that does not come, or comes as another one, is noticed by the target, whatever the
//!   guest does with it.
//!
//! # Implementation
//! The machines share memory, with a [`ring`] of records ([`record`]) in each direction
//! ([`channel`]).
//! 1. *Pre-copy.* The source turns the dirty log on, sends all memory that has frames, and then,
//!    round by round, what the log has ([`source`]). The guest runs.
//! 2. *The switch.* The source lets the guest write some more, stops it, and takes the log once
//!    more. It sends the CPUs, the devices, a hash of each page, and the numbers of the pages that
//!    the log has had since the last round: these pages it does not send. The target compares all
//!    other pages with their hashes, and withholds these by the memslot's userfault bitmap
//!    ([`target`]). Then the guest runs there.
//! 3. *Post-copy.* The guest's access to a page that is withheld leaves the guest. The target asks
//!    for the page, writes it, and clears its bit. Meanwhile it asks for the others, too.
//!
//! # Why it is correct
//! A page that the source has sent is equal to the guest's unless the guest has written it since.
//! A write after the log was turned on is in the log: in that of a round, after which the page is
//! sent again, or in a later one, the last of which is taken when the guest has stopped. So a page
//! that is in no later log was sent after its last write, or is zero on both machines.

pub mod channel;
pub mod record;
pub mod ring;
pub mod source;
pub mod target;

pub use source::Source;
pub use target::Target;

use core::sync::atomic::{AtomicU64, Ordering};

use record::Hash;

/// The hash of a page's words.
pub fn hash_of(words: &[AtomicU64]) -> u64 {
    // Relaxed: the guest does not run, or the page is sent again.
    words.iter().fold(Hash::new(), |hash, word| hash.with(word.load(Ordering::Relaxed))).value()
}

/// That of a page of zeros.
pub fn hash_of_zeros() -> u64 {
    (0..record::MAX_WORDS).fold(Hash::new(), |hash, _| hash.with(0)).value()
}

/// Whether a page is zero.
pub fn is_zero(words: &[AtomicU64]) -> bool {
    words.iter().all(|word| word.load(Ordering::Relaxed) == 0)
}

/// The numbers of the bits that are set in `bitmap`.
pub fn set_bits(bitmap: &[u64]) -> impl Iterator<Item = u64> + '_ {
    (0..).step_by(64).zip(bitmap).flat_map(|(first, &word)| {
        let mut rest = word;
        core::iter::from_fn(move || {
            let bit = (rest != 0).then(|| u64::from(rest.trailing_zeros()))?;
            rest &= rest - 1;
            Some(first + bit)
        })
    })
}

/// Sets the bits of `more` in `bitmap`, too. Returns how many are set then.
pub fn add_bits(bitmap: &mut [u64], more: &[u64]) -> u64 {
    let words = bitmap.iter_mut().zip(more);
    words
        .map(|(word, &more)| {
            *word |= more;
            u64::from(word.count_ones())
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    #[test]
    fn bits_come_in_their_order() {
        let bits: Vec<_> = set_bits(&[1 << 63 | 1, 0, 1 << 5]).collect();
        assert_eq!(bits, [0, 63, 133]);
        assert_eq!(set_bits(&[u64::MAX; 2]).count(), 128);
        assert_eq!(set_bits(&[]).next(), None);
        let mut bitmap = [0b101, 0];
        assert_eq!(add_bits(&mut bitmap, &[0b110, 1 << 63]), 4);
        assert_eq!(bitmap, [0b111, 1 << 63]);
    }

    #[test]
    fn each_word_and_its_place_count_in_a_hash() {
        let page = || (0..512).map(AtomicU64::new).collect::<Vec<_>>();
        let (first, other, swapped) = (page(), page(), page());
        assert_eq!(hash_of(&first), hash_of(&other));
        other[511].store(0, Ordering::Relaxed);
        assert_ne!(hash_of(&first), hash_of(&other));
        swapped[3].store(4, Ordering::Relaxed);
        swapped[4].store(3, Ordering::Relaxed);
        assert_ne!(hash_of(&first), hash_of(&swapped));
        assert!(!is_zero(&first) && is_zero(&[AtomicU64::new(0)]));
        assert_eq!(hash_of(&[const { AtomicU64::new(0) }; record::MAX_WORDS]), hash_of_zeros());
    }
}
