//! The operations, and the few places and sizes that they choose from: so few that memslots, leaves
//! and ranges meet.

use slat::format::Format;
use slat::slots::MemoryAttributes;
use slat::{Access, MemoryRegionFlags, PageSize};

use crate::common::{GIB, MIB, Writes};

pub const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
pub const READONLY: MemoryRegionFlags = MemoryRegionFlags::READONLY;
pub const GUEST_MEMFD: MemoryRegionFlags = MemoryRegionFlags::GUEST_MEMFD;
pub const USERFAULT: MemoryRegionFlags = MemoryRegionFlags::USERFAULT;

pub const NR_SLOTS: u32 = 5;
pub const NR_PLACES: usize = 14;
/// Where memslots and ranges begin: adjacent, apart, across the ends of blocks of each size, and
/// next to the end of the space.
pub const fn places<F: Format>() -> [u64; NR_PLACES] {
    [
        0,
        0x1000,
        2 * MIB - 0x1000,
        2 * MIB,
        3 * MIB,
        4 * MIB,
        6 * MIB,
        GIB - 0x1000,
        GIB,
        GIB + 2 * MIB,
        2 * GIB,
        512 * GIB - 2 * MIB,
        (1 << F::GPA_BITS) - 2 * MIB,
        (1 << F::GPA_BITS) - 0x1000,
    ]
}
pub const NR_PAGES: [u64; 8] = [1, 3, 63, 512, 515, 1024, 1536, 1 << 18];
/// Pages of ranges that are not a memslot's: also of whole PTEs of each level, and of the whole
/// space.
pub const RANGE_PAGES: [u64; 8] = [1, 2, 511, 512, 1025, 1 << 18, 1 << 27, 1 << 36];
pub const SIZES: [PageSize; 3] = [PageSize::Size4K, PageSize::Size2M, PageSize::Size1G];
pub const WRITES: [Writes; 3] = [Writes::Allowed, Writes::IfWritten, Writes::Refused];

/// Masks of a log's words, in turn: all, every other page, few, none and all.
pub const MASKS: [&[u64]; 4] = [&[u64::MAX], &[0x5555_5555_5555_5555], &[1 << 63 | 1, 0, 1 << 7], &[0, u64::MAX, 0]];

/// A range of a memslot's log.
#[derive(Clone, Copy, Debug)]
pub enum LogRange {
    /// So many words from a word on (modulo the words of the memslot), or up to the end of the
    /// memslot.
    Words { first: u64, nr_words: u64 },
    /// Any pages.
    Pages { first: u64, nr_pages: u64 },
}

impl LogRange {
    /// First page and number of pages, in a memslot of `slot_pages`.
    pub fn of(self, slot_pages: u64) -> (u64, u64) {
        match self {
            LogRange::Words { first, nr_words } => {
                let first = first % slot_pages.div_ceil(64) * 64;
                (first, (nr_words * 64).min(slot_pages - first))
            }
            LogRange::Pages { first, nr_pages } => (first, nr_pages),
        }
    }
}

/// A userfault bitmap for a memslot, with words in turn.
#[derive(Clone, Copy, Debug)]
pub struct NewBitmap {
    pub granularity: usize,
    pub words: usize,
}

/// The contents of new bitmaps: nothing, all, every other bit, few.
pub const BITMAP_WORDS: [&[u64]; 4] = [&[0], &[u64::MAX], &[0x5555_5555_5555_5555], &[1 << 63 | 1, 0, 0x3fc]];

/// A change of bits of a userfault bitmap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bits {
    Set,
    Clear,
}

/// How the frames of a backing are aligned, compared with the guest's.
#[derive(Clone, Copy, Debug)]
pub enum Alignment {
    Like1G,
    Like2M,
    Odd,
}

/// A page: `page` (modulo the size; `u64::MAX` for the last one) of a memslot, or a place if there
/// is no such memslot.
#[derive(Clone, Copy, Debug)]
pub enum At {
    Slot { slot: u32, page: u64 },
    Place(usize),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum By {
    /// A vCPU's fault.
    Fault,
    /// Hardware, where a leaf allows it; else a fault.
    Hardware,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Aging {
    Age,
    Test,
}

#[derive(Clone, Debug)]
pub enum Op {
    Create {
        slot: u32,
        place: usize,
        pages: usize,
        flags: u32,
        size: usize,
        alignment: Alignment,
        writes: usize,
        bitmap: Option<NewBitmap>,
    },
    Delete {
        slot: u32,
    },
    Move {
        slot: u32,
        place: usize,
    },
    SetFlags {
        slot: u32,
        flags: u32,
    },
    Resize {
        slot: u32,
    },
    Touch {
        at: At,
        access: Access,
        by: By,
    },
    Harvest {
        slot: u32,
    },
    /// Gets the log of some pages; mostly of a valid range.
    GetRange {
        slot: u32,
        range: LogRange,
    },
    /// Clears the bits of a mask, which repeats every few words, for some pages.
    Clear {
        slot: u32,
        range: LogRange,
        mask: usize,
    },
    /// The VMM has written pages itself.
    MarkDirty {
        slot: u32,
        page: u64,
        pages: usize,
    },
    /// Begins an invalidation and keeps it.
    Begin {
        at: At,
        pages: usize,
    },
    /// Ends one of the kept invalidations.
    End {
        index: usize,
    },
    /// An invalidation during which a page of a memslot moves to another frame.
    Replace {
        slot: u32,
        page: u64,
        writes: usize,
    },
    Age {
        at: At,
        pages: usize,
        aging: Aging,
    },
    /// Splits leaves larger than `SIZES[largest]` ahead of time.
    Split {
        at: At,
        pages: usize,
        largest: usize,
    },
    /// Recovers huge leaves.
    Recover {
        at: At,
        pages: usize,
    },
    /// Turns userfault on with a new bitmap, or with the memslot's own if there is no new one; or
    /// turns it off.
    Userfault {
        slot: u32,
        on: bool,
        bitmap: Option<NewBitmap>,
    },
    /// Sets or clears bits of the memslot's userfault bitmap, if it has one.
    SetBits {
        slot: u32,
        page: u64,
        pages: usize,
        bits: Bits,
    },
    Rescan {
        slot: u32,
        page: u64,
        pages: usize,
    },
    /// Makes pages private or shared.
    Attributes {
        at: At,
        pages: usize,
        attributes: MemoryAttributes,
    },
    /// Queries whether the VMM may access some bytes.
    CheckAccess {
        at: At,
        pages: usize,
    },
    /// The host asks for a yield at every check, or never.
    Yield {
        always: u32,
    },
}
