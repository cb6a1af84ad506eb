//! Ranges of bits in a word.

/// A word with `count` bits set from bit `first` on; at least one, and none beyond bit 63.
#[inline]
pub(crate) const fn bit_range(first: u64, count: u64) -> u64 {
    debug_assert!(count != 0 && first + count <= u64::BITS as u64);
    (u64::MAX >> (u64::BITS as u64 - count)) << first
}
