//! The model-specific registers whose use leaves the guest (Intel SDM vol. 3C, "MSR-Bitmap
//! Address"): bits for reads and for writes of two ranges, a KiB each. The use of others leaves it
//! always.

#![expect(unsafe_code, reason = "says that it is valid as zeros")]

use alloc::boxed::Box;

use crate::arch::x86::page::Zeroed;

/// Bytes of each part, and where writes begin.
const PART_BYTES: usize = 1 << 10;
const WRITES: usize = 2 * PART_BYTES;

/// The map.
#[derive(Debug)]
#[repr(C, align(4096))]
pub(in crate::arch::x86) struct MsrBitmap([u8; 4096]);

// SAFETY: integers.
unsafe impl Zeroed for MsrBitmap {}

impl MsrBitmap {
    /// A map that keeps all registers from the guest.
    pub fn new() -> Box<MsrBitmap> {
        let mut map = MsrBitmap::zeroed();
        map.0.fill(0xff);
        map
    }

    /// The byte of the register's bit for reads, and the bit.
    fn place(msr: u32) -> Option<(usize, u8)> {
        let (part, index) = match msr {
            0..=0x1fff => (0, msr),
            0xc000_0000..=0xc000_1fff => (PART_BYTES, msr - 0xc000_0000),
            _ => return None,
        };
        Some((part + (index / 8) as usize, 1 << (index % 8)))
    }

    /// Lets the guest read `msr`, without an exit.
    pub fn allow_reads(&mut self, msr: u32) {
        if let Some((byte, bit)) = MsrBitmap::place(msr) {
            self.0[byte] &= !bit;
        }
    }

    /// Lets the guest read and write `msr`, without an exit.
    pub fn allow(&mut self, msr: u32) {
        self.allow_reads(msr);
        if let Some((byte, bit)) = MsrBitmap::place(msr) {
            self.0[WRITES + byte] &= !bit;
        }
    }

    /// Its physical address: memory is mapped to itself.
    pub fn address(&self) -> u64 {
        core::ptr::from_ref(self).expose_provenance() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_register_has_a_bit_for_reads_and_one_for_writes() {
        let mut map = MsrBitmap::new();
        map.allow_reads(0x830);
        map.allow(0xc000_0081);
        // In no range: each use leaves the guest.
        map.allow(0xc001_0117);
        map.allow(0x4b56_4d00);
        assert_eq!(map.0[0x830 / 8], 0xfe);
        assert_eq!([map.0[0x400 + 0x81 / 8], map.0[0xc00 + 0x81 / 8]], [0xfd; 2]);
        assert_eq!(map.0.iter().map(|byte| byte.count_zeros()).sum::<u32>(), 3);
    }
}
