//! Addresses, frame numbers, levels and ranges. They are newtypes, so that the compiler keeps apart
//! guest-physical and host-physical, and byte addresses and page numbers.

use core::fmt;

/// log2 of the base page's size, 4096 bytes, in every supported format.
pub(crate) const PAGE_SHIFT: u32 = 12;
/// Size of a base page in bytes.
pub const PAGE_SIZE: u64 = 1 << PAGE_SHIFT;

/// Address bits that one level of page-table pages below the root translates (512 PTEs), in every
/// supported format.
pub(crate) const LEVEL_SHIFT: u32 = 9;

macro_rules! address {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(pub u64);

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

address!(
    /// Guest-virtual address, in bytes.
    Gva
);
address!(
    /// Guest-physical address, in bytes.
    Gpa
);
address!(
    /// Guest frame number: a guest-physical address in units of 4 KiB pages.
    Gfn
);
address!(
    /// Host-physical address, in bytes. It is never used as a pointer:
    /// [`Host::table_ptr`](crate::Host::table_ptr) converts it.
    Hpa
);
address!(
    /// Host page frame number: a host-physical address in units of 4 KiB pages.
    Pfn
);

/// Number of a NUMA node of the host. The numbers need not follow each other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
#[repr(transparent)]
pub struct NodeId(pub u32);

impl Gpa {
    /// The frame that contains this address.
    #[inline]
    pub const fn gfn(self) -> Gfn {
        Gfn(self.0 >> PAGE_SHIFT)
    }

    /// Whether the address is a multiple of the page size.
    #[inline]
    pub const fn is_page_aligned(self) -> bool {
        self.0 % PAGE_SIZE == 0
    }
}

impl Gfn {
    /// log2 of the size of a frame in bytes.
    pub const SHIFT: u32 = PAGE_SHIFT;

    /// The address of the frame's first byte.
    #[inline]
    pub const fn gpa(self) -> Gpa {
        Gpa(self.0 << PAGE_SHIFT)
    }

    /// The first frame of the naturally aligned block of `level` that contains this frame.
    #[inline]
    pub const fn align_down(self, level: Level) -> Gfn {
        Gfn(self.0 & !(level.nr_pages() - 1))
    }

    /// The naturally aligned block of `level` that contains this frame.
    #[inline]
    pub const fn block(self, level: Level) -> GfnRange {
        let start = self.align_down(level);
        GfnRange::new(start, level.nr_pages())
    }
}

impl Hpa {
    /// The frame that contains this address.
    #[inline]
    pub const fn pfn(self) -> Pfn {
        Pfn(self.0 >> PAGE_SHIFT)
    }
}

impl Pfn {
    /// The address of the frame's first byte.
    #[inline]
    pub const fn hpa(self) -> Hpa {
        Hpa(self.0 << PAGE_SHIFT)
    }
}

/// Level of a PTE in the page tables, as KVM counts: a PTE of level 1 maps 4 KiB, of level 2 2 MiB,
/// of level 3 1 GiB. The root's PTEs have the highest level, 5 at most. The methods are for levels
/// 1 to 5.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(transparent)]
pub struct Level(pub u8);

impl Level {
    /// PTEs that map 4 KiB.
    pub const L4K: Level = Level(1);
    /// PTEs that map 2 MiB, or point to a page-table page for 4 KiB pages.
    pub const L2M: Level = Level(2);
    /// PTEs that map 1 GiB, or point to a page-table page for 2 MiB pages.
    pub const L1G: Level = Level(3);

    /// Base pages covered by one PTE of this level.
    #[inline]
    pub const fn nr_pages(self) -> u64 {
        1 << (LEVEL_SHIFT * (self.0 as u32 - 1))
    }

    /// Bytes covered by one PTE of this level.
    #[inline]
    pub const fn size_bytes(self) -> u64 {
        self.nr_pages() << PAGE_SHIFT
    }

    /// The level below, which must exist (`self` is above [`Level::L4K`]).
    #[inline]
    pub const fn down(self) -> Level {
        Level(self.0 - 1)
    }

    /// The level above.
    #[inline]
    pub const fn up(self) -> Level {
        Level(self.0 + 1)
    }
}

impl Level {
    /// The size of a leaf of this level; for a level without leaves, the largest size.
    pub(crate) const fn page_size(self) -> PageSize {
        match self {
            Level::L4K => PageSize::Size4K,
            Level::L2M => PageSize::Size2M,
            _ => PageSize::Size1G,
        }
    }
}

/// Sizes that a leaf can have.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum PageSize {
    /// 4 KiB.
    Size4K,
    /// 2 MiB.
    Size2M,
    /// 1 GiB.
    Size1G,
}

impl PageSize {
    /// The level of the PTEs that map a page of this size.
    #[inline]
    pub const fn level(self) -> Level {
        match self {
            PageSize::Size4K => Level::L4K,
            PageSize::Size2M => Level::L2M,
            PageSize::Size1G => Level::L1G,
        }
    }

    /// The size in bytes.
    #[inline]
    pub const fn size_bytes(self) -> u64 {
        self.level().size_bytes()
    }
}

/// What the guest does to memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Access {
    /// A data read.
    Read,
    /// A data write.
    Write,
    /// An instruction fetch. Where leaf PTEs tell user from supervisor code
    /// ([`Execute::User`](crate::format::Execute::User)): of supervisor code.
    Execute,
    /// An instruction fetch of user code. Elsewhere the same as `Execute`.
    ExecuteUser,
}

impl Access {
    /// Whether it is an instruction fetch.
    #[inline]
    pub const fn is_fetch(self) -> bool {
        matches!(self, Access::Execute | Access::ExecuteUser)
    }
}

/// A half-open range of guest frames: `start` is in, `end` is not.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GfnRange {
    /// First frame of the range.
    pub start: Gfn,
    /// First frame after the range.
    pub end: Gfn,
}

impl GfnRange {
    /// The range of `nr_pages` frames from `start` on, or up to the largest frame number.
    #[inline]
    pub const fn new(start: Gfn, nr_pages: u64) -> GfnRange {
        GfnRange { start, end: Gfn(start.0.saturating_add(nr_pages)) }
    }

    /// Number of frames in the range.
    #[inline]
    pub const fn nr_pages(self) -> u64 {
        self.end.0.saturating_sub(self.start.0)
    }

    /// Whether the range has no frame.
    #[inline]
    pub const fn is_empty(self) -> bool {
        self.end.0 <= self.start.0
    }

    /// Whether `gfn` is in the range.
    #[inline]
    pub const fn contains(self, gfn: Gfn) -> bool {
        self.start.0 <= gfn.0 && gfn.0 < self.end.0
    }

    /// Whether all of `other` is in the range.
    #[inline]
    pub const fn covers(self, other: GfnRange) -> bool {
        self.start.0 <= other.start.0 && other.end.0 <= self.end.0
    }

    /// Whether a whole, naturally aligned block of `level` is in the range.
    pub(crate) const fn has_block(self, level: Level) -> bool {
        let nr_pages = level.nr_pages();
        self.start.0.div_ceil(nr_pages) < self.end.0 / nr_pages
    }

    /// Whether the range, which is not empty, is a proper part of the block of `level` in which it
    /// begins.
    #[inline]
    pub(crate) const fn is_part_of_block(self, level: Level) -> bool {
        let block = self.start.block(level);
        self.end.0 <= block.end.0 && self.nr_pages() < level.nr_pages()
    }

    /// Whether the two ranges share a frame.
    #[inline]
    pub const fn overlaps(self, other: GfnRange) -> bool {
        self.start.0 < other.end.0 && other.start.0 < self.end.0
    }

    /// The frames that are in both ranges; an empty range if there are none.
    #[inline]
    pub const fn intersection(self, other: GfnRange) -> GfnRange {
        let start = if self.start.0 > other.start.0 { self.start } else { other.start };
        let end = if self.end.0 < other.end.0 { self.end } else { other.end };
        if start.0 < end.0 { GfnRange { start, end } } else { GfnRange { start, end: start } }
    }
}
