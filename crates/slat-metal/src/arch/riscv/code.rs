//! The instructions in the pages of the suite's guest.

/// Instructions that return [`returned`] of `tag`.
pub const fn code(tag: u64) -> [u64; 2] {
    let tag = tag & 0xffff_ffff;
    // The lower 12 bits are added as a signed number.
    let upper = (tag + 0x800) >> 12 & 0xf_ffff;
    // lui a0, upper; addiw a0, a0, lower; ret
    let (load, add, jump) = (upper << 12 | 0x537, (tag & 0xfff) << 20 | 0x5_051b, 0x8067);
    [load | add << 32, jump]
}

/// What these return.
pub const fn returned(tag: u64) -> u64 {
    tag as i32 as i64 as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_those_of_the_manual() {
        // lui a0, 0x12345; addiw a0, a0, 0x678; ret
        assert_eq!(code(0x1234_5678), [0x6785_051b_1234_5537, 0x8067]);
        // The lower bits are negative: one more above.
        assert_eq!(code(0xf_ffff_0fff), [0xfff5_051b_ffff_1537, 0x8067]);
        assert_eq!(returned(0x1_8000_0000), 0xffff_ffff_8000_0000);
    }
}
