//! The instructions in the pages of the suite's guest.

/// Instructions that return [`returned`] of `tag`.
pub const fn code(tag: u64) -> [u64; 2] {
    // movz w0, #low; movk w0, #high, lsl #16; ret
    let (low, high) = (tag & 0xffff, tag >> 16 & 0xffff);
    [(0x72a0_0000 | high << 5) << 32 | 0x5280_0000 | low << 5, 0xd65f_03c0]
}

/// What these return.
pub const fn returned(tag: u64) -> u64 {
    tag & 0xffff_ffff
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_those_of_the_manual() {
        // movz w0, #0x5678; movk w0, #0x1234, lsl #16; ret
        assert_eq!(code(0x1234_5678), [0x72a2_4680_528a_cf00, 0xd65f_03c0]);
        // Bits above the register are left out.
        assert_eq!(code(0xff_1234_5678), code(0x1234_5678));
        assert_eq!(returned(0xff_1234_5678), 0x1234_5678);
    }
}
