//! What flushes drop: a part of what CPUs cache of ranges of pages.
//!
//! x86 has one instruction for all that depends on a second stage. Arm has one for entries of stage
//! 2, and one for those that combine both stages. RISC-V has one for all, and one for leaf PTEs. A
//! host has to choose the right ones, and on Arm the order: that is what the scopes are for.

use slat::{Gfn, GfnRange};

/// What an instruction drops of the pages that it names. CPUs keep the rest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u64)]
pub enum Scope {
    /// All: translations, PTEs of each level, faults (x86's INVEPT; RISC-V's HFENCE.GVMA with rs1 =
    /// x0; Arm's TLBI VMALLS12E1IS).
    All,
    /// Translations and PTEs of the second stage that map memory, or lowest ones that are not valid
    /// (RISC-V's HFENCE.GVMA with an address). What was read of directory entries stays: with rs1
    /// other than x0 the fence orders accesses to leaf PTEs alone (Privileged Architecture,
    /// "Supervisor Memory-Management Fence Instruction").
    Leaves,
    /// PTEs of the second stage, of each level; no translation that combines both stages, and no
    /// fault of one (Arm's TLBI IPAS2E1IS).
    SecondStage,
    /// Translations that combine both stages, and their faults, of all pages, whatever the range
    /// (Arm's TLBI VMALLE1IS). No PTE of the second stage. As with each scope, an empty range drops
    /// nothing.
    Combined,
}

impl Scope {
    /// Each, at the place that is its number.
    pub(super) const EACH: [Scope; 4] = [Scope::All, Scope::Leaves, Scope::SecondStage, Scope::Combined];
}

/// What one flush drops of some pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Dropped {
    /// The part of what is cached of them.
    pub scope: Scope,
    /// The pages.
    pub range: GfnRange,
}

/// The most ranges that a CPU catches up with at a time. With more, filling the TLB anew costs no
/// more than searching for them.
pub(super) const MAX_LIST: usize = 32;

/// What some flushes drop. Ranges of one scope that touch each other are merged. The order is lost:
/// a CPU that catches up has used nothing between them.
#[derive(Clone, Debug)]
pub struct DroppedList {
    dropped: [Dropped; MAX_LIST],
    len: usize,
}

impl DroppedList {
    pub(super) fn new() -> DroppedList {
        DroppedList { dropped: [Dropped { scope: Scope::All, range: GfnRange::new(Gfn(0), 0) }; MAX_LIST], len: 0 }
    }

    /// Adds `new`; `false` if there is no room.
    pub(super) fn add(&mut self, new: Dropped) -> bool {
        let range = new.range;
        if range.is_empty() {
            return true;
        }
        // The same page, or a page and its neighbour, again and again: the common case.
        let touching = |other: &&mut Dropped| {
            other.scope == new.scope && range.start <= other.range.end && other.range.start <= range.end
        };
        if let Some(Dropped { range: other, .. }) = self.dropped[..self.len].iter_mut().find(touching) {
            other.start = other.start.min(range.start);
            other.end = other.end.max(range.end);
            return true;
        }
        let Some(free) = self.dropped.get_mut(self.len) else {
            return false;
        };
        *free = new;
        self.len += 1;
        true
    }

    /// The parts, none of them of an empty range.
    pub fn as_slice(&self) -> &[Dropped] {
        &self.dropped[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_is_at_the_place_of_its_number() {
        assert!(Scope::EACH.into_iter().enumerate().all(|(place, scope)| place == scope as usize));
    }

    #[test]
    fn ranges_of_different_scopes_stay_apart() {
        let mut list = DroppedList::new();
        let part = |scope, start, nr_pages| Dropped { scope, range: GfnRange::new(Gfn(start), nr_pages) };
        let (first, second) = (part(Scope::SecondStage, 4, 2), part(Scope::Combined, 5, 1));
        for new in [first, second, part(Scope::SecondStage, 6, 1), part(Scope::Combined, 9, 0)] {
            assert!(list.add(new));
        }
        assert_eq!(list.as_slice(), [part(Scope::SecondStage, 4, 3), second]);
    }
}
