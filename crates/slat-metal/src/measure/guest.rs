//! The guest that is measured (`measured.s`): what it writes, and where the words are by which it is
//! told and says what it has counted. The process that drives KVM has the same guest, and this file.

/// Pages that are measured: 16 MiB.
pub const NR_PAGES: u64 = 4096;
/// Pages of a block of 2 MiB.
pub const BLOCK_PAGES: u64 = 512;
/// Blocks of 2 MiB among the pages.
pub const NR_BLOCKS: u64 = NR_PAGES / BLOCK_PAGES;
const PAGE_BYTES: u64 = 4096;

// Offsets in the block of words of a CPU, and the bytes from one to that of the next CPU.
const FIRST: u64 = 0;
const COUNT: u64 = 8;
const DISTANCE: u64 = 16;
const GATE: u64 = 24;
#[cfg(target_arch = "x86_64")]
pub const WINDOW: u64 = 32;
#[cfg(target_arch = "x86_64")]
pub const LOOKS: u64 = 40;
pub const DIFFERENCES: u64 = 48;
pub const BLOCK_BYTES: u64 = 64 << 10;

/// From one gate to the next.
pub const GATE_BYTES: u64 = 64;
/// What a gate waits for, a word each.
pub const GATE_WORDS: usize = 3;

/// Instructions of a look whether all CPUs are done.
#[cfg(target_arch = "x86_64")]
pub const LOOK: u64 = 4;

const _: () = assert!(DIFFERENCES + 8 * NR_PAGES <= BLOCK_BYTES && GATE_WORDS as u64 * 8 <= GATE_BYTES);

/// What a CPU of the guest writes: `nr_pages` pages from `first` on, `distance` pages apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Writes {
    pub first: u64,
    pub nr_pages: u64,
    pub distance: u64,
}

impl Writes {
    /// The words of a CPU that tell it to, by their offsets: the guest has the pages from the address
    /// `start` on, and the gate at the address `gate`.
    pub fn words(self, start: u64, gate: u64) -> [(u64, u64); 4] {
        let Writes { first, nr_pages, distance } = self;
        [(FIRST, start + first * PAGE_BYTES), (COUNT, nr_pages), (DISTANCE, distance * PAGE_BYTES), (GATE, gate)]
    }
}
