//! The role of a shadow page: what it is, beside the frame that it was made from. Two pages made
//! from one frame are the same only if their roles are equal.
//!
//! The role is all that the page's PTEs depend on and that is not in the guest's table itself:
//! - how the guest's CPU reads the table,
//! - which rights the PTEs above have left,
//! - which part of the table the page is made of (a guest table of 1024 PTEs of 4 bytes makes
//!   several shadow pages).

use super::guest::{GuestMode, PagingMode, Rights};
use crate::addr::{Gpa, Level};

/// What a page's PTEs are made from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Made {
    /// From a guest table, PTE by PTE.
    Table,
    /// From one guest PTE, which maps a large page. Or, with the guest's paging off, from nothing.
    /// The PTEs map the frames from the page's own on.
    Large,
    /// From the guest's CR3: hardware has more levels than the guest, and the page is above the
    /// guest's root.
    Above,
    /// From nothing: the guest's CR3 points to no memory, and the page stays empty.
    Nothing,
}

/// See the module. Roles are compared as a whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Role(u64);

const LEVEL_SHIFT: u32 = 0;
const MADE_SHIFT: u32 = 3;
const PAGING_SHIFT: u32 = 5;
const RIGHTS_SHIFT: u32 = 8;
const MODE_SHIFT: u32 = 11;
const PART_SHIFT: u32 = 16;
const TAG_SHIFT: u32 = 24;

bitflags::bitflags! {
    /// PTEs in which A and D, bits 5 and 6, mean something else in another paging mode than in that
    /// of the vCPU that sets them for its own access. (In all other PTEs these bits have no other
    /// meaning at any level.)
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(super) struct MarkKind: u32 {
        /// PAE's PDPTEs, in which the bits are reserved.
        const PDPTES = 1 << 0;
        /// PTEs of 8 bytes, whose upper half has address bits there.
        const WIDE = 1 << 1;
    }
}

impl MarkKind {
    /// The kinds of PTEs that misread marks in the guest's PTE of `size_bytes` at `gpa`.
    #[inline]
    pub(super) fn of_mark(gpa: Gpa, size_bytes: u64) -> MarkKind {
        if size_bytes == 4 && gpa.0 % 8 == 4 { MarkKind::WIDE } else { MarkKind::PDPTES }
    }
}

/// Bytes of a guest table.
const TABLE_BYTES: u64 = 4096;

impl Role {
    /// The role of the top page of what hardware walks for a guest in `mode`, with part and tag 0.
    pub(super) fn root(mode: GuestMode) -> Role {
        let level = Level(mode.shadow_levels());
        let made = match mode.paging() {
            PagingMode::Off => Made::Large,
            _ if level > mode.root_level() => Made::Above,
            _ => Made::Table,
        };
        let flags = u64::from(mode.write_protect())
            | u64::from(mode.smep()) << 1
            | u64::from(mode.smap()) << 2
            | u64::from(mode.no_execute()) << 3
            | u64::from(mode.page_size_extensions()) << 4;
        let made_bits = |made: Made| (made as u64) << MADE_SHIFT;
        Role(
            u64::from(level.0) << LEVEL_SHIFT
                | made_bits(made)
                | (mode.paging() as u64) << PAGING_SHIFT
                | u64::from(Rights::ALL.0) << RIGHTS_SHIFT
                | flags << MODE_SHIFT,
        )
    }

    /// The role of such a page that is made from part `part` of its frame. `tag` is the PCID, if
    /// pages belong to one.
    pub(super) fn with_part(self, part: u64, tag: u64) -> Role {
        debug_assert!(self.part() == 0);
        Role(self.0 | part << PART_SHIFT | tag << TAG_SHIFT)
    }

    /// The role of a page one level below, made as `made` from part `part` of its frame, with
    /// `rights` left to it.
    pub(super) fn below(self, made: Made, part: u64, rights: Rights) -> Role {
        let mut kept = self.0 & !(7 << LEVEL_SHIFT | 3 << MADE_SHIFT | 7 << RIGHTS_SHIFT | 0xff << PART_SHIFT);
        if made == Made::Large {
            // The page follows from the one guest PTE above. It serves all PCIDs whose PTE says the
            // same.
            kept &= (1 << TAG_SHIFT) - 1;
        }
        Role(
            kept | u64::from(self.level().0 - 1) << LEVEL_SHIFT
                | (made as u64) << MADE_SHIFT
                | u64::from(rights.0) << RIGHTS_SHIFT
                | part << PART_SHIFT,
        )
    }

    /// The role of a top page that stays empty, in place of one in this role.
    pub(super) fn empty_root(self) -> Role {
        let kept = self.0 & !(3 << MADE_SHIFT | 0xff << PART_SHIFT);
        Role(kept | (Made::Nothing as u64) << MADE_SHIFT)
    }

    pub(super) fn is_empty_root(self) -> bool {
        self.made() == Made::Nothing
    }

    pub(super) fn bits(self) -> u64 {
        self.0
    }

    pub(super) fn from_bits(bits: u64) -> Role {
        Role(bits)
    }

    #[inline]
    pub(super) fn level(self) -> Level {
        Level((self.0 >> LEVEL_SHIFT & 7) as u8)
    }

    #[inline]
    pub(super) fn made(self) -> Made {
        match self.0 >> MADE_SHIFT & 3 {
            0 => Made::Table,
            1 => Made::Large,
            2 => Made::Above,
            _ => Made::Nothing,
        }
    }

    /// Whether the guest changes the page by writing to the frame that it was made from.
    pub(super) fn is_of_table(self) -> bool {
        self.made() == Made::Table
    }

    #[inline]
    pub(super) fn rights(self) -> Rights {
        Rights((self.0 >> RIGHTS_SHIFT & 7) as u8)
    }

    /// Whether the guest's CPU reads the tables of both alike, and both belong to the same PCID. If
    /// not, neither page is below the other.
    pub(super) fn is_of_guest_of(self, other: Role) -> bool {
        const FREE: u64 = 7 << LEVEL_SHIFT | 3 << MADE_SHIFT | 7 << RIGHTS_SHIFT | 0xff << PART_SHIFT;
        (self.0 ^ other.0) & !FREE == 0
    }

    /// Whether pages in both roles are made in the same mode of the guest's CPU.
    pub(super) fn is_of_mode_of(self, other: Role) -> bool {
        const MODE: u64 = 7 << PAGING_SHIFT | 0x1f << MODE_SHIFT;
        (self.0 ^ other.0) & MODE == 0
    }

    /// CR0.WP.
    #[inline]
    pub(super) fn heeds_write_protection(self) -> bool {
        self.0 >> MODE_SHIFT & 1 != 0
    }

    /// CR4.SMEP.
    pub(super) fn has_smep(self) -> bool {
        self.0 >> MODE_SHIFT & 2 != 0
    }

    /// CR4.SMAP.
    pub(super) fn has_smap(self) -> bool {
        self.0 >> MODE_SHIFT & 4 != 0
    }

    fn part(self) -> u64 {
        self.0 >> PART_SHIFT & 0xff
    }

    pub(super) fn is_of_two_levels(self) -> bool {
        self.0 >> PAGING_SHIFT & 7 == PagingMode::TwoLevel as u64
    }

    fn is_of_pae(self) -> bool {
        self.0 >> PAGING_SHIFT & 7 == PagingMode::Pae as u64
    }

    /// The kinds of marks, set by vCPUs in other modes, that such a page misreads.
    pub(super) fn mark_kind(self) -> MarkKind {
        match (self.is_of_table(), self.is_of_two_levels()) {
            (false, _) | (true, true) => MarkKind::empty(),
            (true, false) if self.is_of_pae() && self.level() == Level::L1G => MarkKind::PDPTES | MarkKind::WIDE,
            (true, false) => MarkKind::WIDE,
        }
    }

    /// The guest's PTE that shadow PTE `index` is made from: its offset in the guest's table and
    /// its size, in bytes.
    pub(super) fn guest_entry(self, index: usize) -> (u64, u64) {
        debug_assert!(self.made() == Made::Table);
        let index = index as u64;
        match (self.is_of_two_levels(), self.is_of_pae(), self.level()) {
            // Four pages for the 1024 PTEs of 4 MiB, each of which makes two.
            (true, _, Level::L2M) => ((self.part() * 256 + index / 2) * 4, 4),
            (true, ..) => ((self.part() * 512 + index) * 4, 4),
            // The four PTEs of the page-directory-pointer table lie anywhere in their page.
            (_, true, Level::L1G) => ((self.part() * 32 + index * 8) % TABLE_BYTES, 8),
            _ => (index * 8, 8),
        }
    }

    /// The shadow PTEs that are made from `len` bytes from `offset` on of the guest's table: the
    /// first index, and the first after them.
    pub(super) fn entries_of(self, offset: u64, len: u64) -> (usize, usize) {
        let (size, per_guest_entry, first_byte, nr) = match (self.is_of_two_levels(), self.is_of_pae(), self.level()) {
            (true, _, Level::L2M) => (4, 2, self.part() * 1024, 512),
            (true, ..) => (4, 1, self.part() * 2048, 512),
            (_, true, Level::L1G) => (8, 1, self.part() * 32, 4),
            _ => (8, 1, 0, 512),
        };
        let end_byte = first_byte + nr / per_guest_entry * size;
        let start = offset.clamp(first_byte, end_byte) - first_byte;
        let end = (offset + len).clamp(first_byte, end_byte) - first_byte;
        if start == end {
            return (0, 0);
        }
        ((start / size * per_guest_entry) as usize, (end.div_ceil(size) * per_guest_entry) as usize)
    }
}

/// Which part of its frame the shadow page of `level` for address `gva` is made from.
pub(super) fn part_for(mode: GuestMode, level: Level, gva: u64, cr3: u64) -> u64 {
    match (mode.paging(), level) {
        (PagingMode::TwoLevel, Level::L2M) => gva >> 30 & 3,
        (PagingMode::TwoLevel, Level::L4K) => gva >> 21 & 1,
        (PagingMode::Pae, Level::L1G) => cr3 >> 5 & 0x7f,
        _ => 0,
    }
}
