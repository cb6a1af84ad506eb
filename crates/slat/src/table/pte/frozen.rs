//! Frozen PTEs: what they were, and what they carry in page-table pages that were retired. The
//! parent module has the states.

use super::{
    ADDRESS, ATTRIBUTES_SHIFT, FROZEN_BIT, PAYLOAD_SHIFT, Pte, State, address_in, hidden_address, hidden_number,
    number_in,
};
use crate::addr::{Hpa, Level, Pfn};
use crate::format::Format;

// What a frozen PTE was. A link of retired page-table pages has neither of these two bits. None of
// the others is where an AND could hit it that was meant for the leaf.
pub(super) const FROZEN_LEAF: u64 = 1 << 9;
pub(super) const FROZEN_TABLE: u64 = 1 << 11;
// In the order of the x86 formats, where the first two are at home, and the other two adjacent.
const FROZEN_HOST_WRITABLE: u64 = 1 << 52;
const FROZEN_WAS_DIRTY: u64 = 1 << 53;
const FROZEN_ACCESSED: u64 = 1 << 54;
const FROZEN_DIRTY: u64 = 1 << 55;
const FROZEN_TRACKED: u64 = 1 << 56;

/// What a frozen PTE was, if
/// [`PteRef::freeze_as_was`](crate::table::pte_ref::PteRef::freeze_as_was) froze it.
pub(crate) enum Frozen<F> {
    /// This leaf, tracked or not, without its right to write.
    Leaf(Pte<F>),
    /// A PTE that pointed to this page-table page.
    Table(Hpa),
    Nothing,
}

impl<F: Format> Pte<F> {
    /// What this frozen PTE of `level` was.
    pub(crate) fn before_freezing(self, level: Level) -> Frozen<F> {
        debug_assert!(self.0 & FROZEN_BIT != 0);
        let bit = |from: u64, to: u64| if self.0 & from != 0 { to } else { 0 };
        if self.0 & FROZEN_LEAF == 0 {
            return if self.0 & FROZEN_TABLE != 0 { Frozen::Table(address_in(self.0)) } else { Frozen::Nothing };
        }
        let marks = bit(FROZEN_HOST_WRITABLE, F::HOST_WRITABLE)
            | bit(FROZEN_DIRTY, F::DIRTY)
            | bit(FROZEN_ACCESSED, F::ACCESSED)
            | bit(FROZEN_WAS_DIRTY, F::WAS_DIRTY);
        let leaf = self.unpacked(level).with(marks);
        Frozen::Leaf(if self.0 & FROZEN_TRACKED != 0 { leaf.tracked(level) } else { leaf })
    }

    /// The frame, as hardware sees it, of the leaf, tracked or not, that this frozen PTE was; `None`
    /// if it was none.
    #[inline]
    pub(crate) fn frame_before_freezing(self) -> Option<Pfn> {
        debug_assert!(self.0 & FROZEN_BIT != 0);
        (self.0 & FROZEN_LEAF != 0).then(|| address_in(self.0).pfn())
    }

    /// This PTE of `level` frozen, so that [`before_freezing`](Self::before_freezing) returns what
    /// it was.
    #[inline]
    pub(in crate::table) fn frozen_as_was(self, level: Level) -> Pte<F> {
        match self.state(level) {
            found @ (State::Leaf | State::Tracked) => {
                let leaf = self.untracked(level);
                let bit = |from: u64, to: u64| if leaf.0 & from != 0 { to } else { 0 };
                Pte::from_bits(
                    hidden_address(F::hpa(leaf.leaf_address(level)))
                        | FROZEN_BIT
                        | FROZEN_LEAF
                        | bit(F::HOST_WRITABLE, FROZEN_HOST_WRITABLE)
                        | bit(F::DIRTY, FROZEN_DIRTY)
                        | bit(F::ACCESSED, FROZEN_ACCESSED)
                        | bit(F::WAS_DIRTY, FROZEN_WAS_DIRTY)
                        | if found == State::Tracked { FROZEN_TRACKED } else { 0 }
                        | leaf.packed_attributes(level) << ATTRIBUTES_SHIFT,
                )
            }
            State::Table => Pte::from_bits(hidden_address(self.table_below()) | FROZEN_TABLE | FROZEN_BIT),
            State::Empty(_) | State::Broken => Pte::FROZEN,
            // It may have a link of retired page-table pages.
            State::Frozen => self,
        }
    }
}

/// The attributes of many leaves, tracked or not, before they were frozen.
#[derive(Clone, Copy)]
pub(crate) struct FrozenLeaves {
    any: u64,
    all: u64,
}

impl FrozenLeaves {
    pub(crate) fn new() -> FrozenLeaves {
        FrozenLeaves { any: 0, all: u64::MAX }
    }

    #[inline]
    pub(crate) fn add<F>(&mut self, frozen: Pte<F>) {
        self.any |= frozen.0;
        self.all &= frozen.0;
    }

    /// Whether the host allows writing; `None` if only for some.
    pub(crate) fn are_host_writable(self) -> Option<bool> {
        let (any, all) = (self.any & FROZEN_HOST_WRITABLE != 0, self.all & FROZEN_HOST_WRITABLE != 0);
        (any == all).then_some(all)
    }

    pub(crate) fn is_any_accessed(self) -> bool {
        self.any & FROZEN_ACCESSED != 0
    }

    pub(crate) fn is_any_dirty(self) -> bool {
        self.any & (FROZEN_DIRTY | FROZEN_WAS_DIRTY) != 0
    }

    pub(crate) fn are_all_tracked(self) -> bool {
        self.all & FROZEN_TRACKED != 0
    }

    /// The bits in which the packed attributes of some differ.
    pub(crate) fn differing_attributes(self) -> u64 {
        (self.any ^ self.all) >> ATTRIBUTES_SHIFT
    }
}

/// The bits of a frozen PTE that carries `next`, a page-aligned address.
#[inline]
pub(in crate::table) fn frozen_link(next: Hpa) -> u64 {
    debug_assert!(next.0 & ((1 << PAYLOAD_SHIFT) - 1) == 0);
    // With the bits that it may have above bit 51: the end of a list is no address.
    next.0 ^ ADDRESS | FROZEN_BIT
}

/// The bits of a frozen PTE that carries the number `payload` (below 2^52).
#[inline]
pub(in crate::table) fn frozen_number(payload: u64) -> u64 {
    hidden_number(payload) | FROZEN_BIT
}

pub(in crate::table) fn link_of(bits: u64) -> Hpa {
    debug_assert!(bits & FROZEN_BIT != 0);
    Hpa((bits ^ ADDRESS) & !((1 << PAYLOAD_SHIFT) - 1))
}

pub(in crate::table) fn number_of(bits: u64) -> u64 {
    debug_assert!(bits & FROZEN_BIT != 0);
    number_in(bits)
}
