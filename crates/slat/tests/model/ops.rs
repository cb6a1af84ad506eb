//! The operations, and the few places and sizes that they choose from: so few that slots, leaves and ranges meet.

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
/// Where slots and ranges begin: together, apart, across the ends of blocks of each size, and next to the end of the
/// space.
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
/// Pages of ranges that are not a slot's: also of whole entries of each level, and of the whole space.
pub const RANGE_PAGES: [u64; 8] = [1, 2, 511, 512, 1025, 1 << 18, 1 << 27, 1 << 36];
pub const SIZES: [PageSize; 3] = [PageSize::Size4K, PageSize::Size2M, PageSize::Size1G];
pub const WRITES: [Writes; 3] = [Writes::Allowed, Writes::IfAskedFor, Writes::Refused];

/// Masks of a log's words, in turn: all, every other page, few, none and all.
pub const MASKS: [&[u64]; 4] = [&[u64::MAX], &[0x5555_5555_5555_5555], &[1 << 63 | 1, 0, 1 << 7], &[0, u64::MAX, 0]];

/// A range of a slot's log.
#[derive(Clone, Copy, Debug)]
pub enum LogRange {
    /// From a word on (modulo the slot's) so many words, or to the slot's end if it has no more.
    Words { first: u64, nr_words: u64 },
    /// Any pages.
    Pages { first: u64, nr_pages: u64 },
}

impl LogRange {
    /// First page and number of pages, of a slot of `slot_pages`.
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

/// A userfault bitmap that a slot is given, with words in turn.
#[derive(Clone, Copy, Debug)]
pub struct NewBitmap {
    pub granularity: usize,
    pub words: usize,
}

/// What new bitmaps hold: nothing, all, every other bit, few.
pub const BITMAP_WORDS: [&[u64]; 4] = [&[0], &[u64::MAX], &[0x5555_5555_5555_5555], &[1 << 63 | 1, 0, 0x3fc]];

/// Who sets, or clears, bits of a userfault bitmap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bits {
    Set,
    Clear,
}

/// How the frames of a backing lie, compared with the guest's.
#[derive(Clone, Copy, Debug)]
pub enum Alignment {
    Like1G,
    Like2M,
    Odd,
}

/// A page: `page` (modulo the size; `u64::MAX` for the last one) of a slot, or a place if there is no such slot.
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
    /// Gets the log of some pages; mostly such a range as may be asked for.
    GetRange {
        slot: u32,
        range: LogRange,
    },
    /// Clears of some pages the bits of a mask, which repeats every few words.
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
    /// An invalidation that is held until it is ended.
    Begin {
        at: At,
        pages: usize,
    },
    /// Ends one of those that are held.
    End {
        index: usize,
    },
    /// An invalidation during which a page of a slot gets another frame.
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
    /// Splits ahead of time what is larger than `SIZES[largest]`.
    Split {
        at: At,
        pages: usize,
        largest: usize,
    },
    /// Puts huge leaves back.
    Recover {
        at: At,
        pages: usize,
    },
    /// Turns userfault on with a new bitmap or, without one, with the one that the slot has; else off.
    Userfault {
        slot: u32,
        on: bool,
        bitmap: Option<NewBitmap>,
    },
    /// Sets or clears bits of the slot's userfault bitmap, if it has one.
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
    /// Asks whether the VMM may access some bytes.
    CheckAccess {
        at: At,
        pages: usize,
    },
    /// The host wants to run at every look, or never.
    Yield {
        always: u32,
    },
}
