//! Ranges of bits in a word.

/// A word with `count` bits set from bit `first` on; at least one, and none beyond bit 63.
#[inline]
pub(crate) const fn bit_range(first: u64, count: u64) -> u64 {
    debug_assert!(count != 0 && first + count <= u64::BITS as u64);
    (u64::MAX >> (u64::BITS as u64 - count)) << first
}

/// The numbers of the bits that are set, from the least significant on.
pub(crate) struct SetBits(pub(crate) u64);

impl Iterator for SetBits {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        let lowest = (self.0 != 0).then(|| self.0.trailing_zeros() as usize)?;
        self.0 &= self.0 - 1;
        Some(lowest)
    }
}
