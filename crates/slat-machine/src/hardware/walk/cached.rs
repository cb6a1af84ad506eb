//! PTEs of the second stage that a processor has cached: those of each level on the way to a page,
//! and what maps it.
//!
//! A walk begins at the lowest PTE that is cached for its address, so it does not notice that one
//! above has changed, until a flush. Which PTEs a processor may cache is the walker's to say:
//! Arm's caches none that is not valid, RISC-V's any (see `stage2` and `gstage`).
//!
//! It belongs to one CPU, and to the generation that the CPU has caught up with, as its TLB does
//! ([`cpu`](crate::hardware::cpu)).

use std::cell::Cell;

use slat::{GfnRange, Gpa, Hpa};

use super::{MAX_LEVELS, Stop, Used, WalkMemory, Walker, shift};
use crate::hardware::commit::Scope;

/// PTEs that are kept of the lowest level, and of each level above. One is replaced by another of
/// the same place: its number modulo this.
const CAPACITY: (usize, usize) = (512, 64);

/// What a cached PTE is for a walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Not valid.
    Invalid,
    /// A directory entry.
    Table,
    /// It maps memory.
    Leaf,
}

#[derive(Clone, Copy, Debug)]
struct CachedPte {
    /// The guest-physical address, in units of what a PTE of the level maps.
    block: u64,
    entry: u64,
    kind: Kind,
}

// Inlined: a walk is called for each access that misses the TLB.
impl<C: WalkMemory> Walker<'_, C> {
    /// Reads PTE `index` of the page-table page at `table`, of `level`, on the way to `gpa`.
    #[inline(always)]
    pub(super) fn read_pte(self, gpa: Gpa, table: Hpa, index: u64, level: u8) -> Result<Used, Stop> {
        Used::read_second_stage(self, table, index, level)?.ok_or(Stop::NoMemory { gpa, hpa: table })
    }

    /// The lowest PTE that is cached on the way to `gpa`, and its level.
    #[inline(always)]
    pub(super) fn lowest_cached(self, gpa: Gpa) -> Option<(u8, u64)> {
        self.cached?.lowest(gpa)
    }

    /// Keeps the PTE of `level` on the way to `gpa`, if the CPU caches PTEs.
    #[inline(always)]
    pub(super) fn keep(self, gpa: Gpa, level: u8, entry: u64, kind: Kind) {
        if let Some(cached) = self.cached {
            cached.keep(gpa, level, entry, kind);
        }
    }
}

/// The PTEs that one CPU has cached.
#[derive(Debug)]
pub struct PteCache {
    levels: [Box<[Cell<Option<CachedPte>>]>; MAX_LEVELS as usize],
}

impl Default for PteCache {
    fn default() -> PteCache {
        let places = |level| if level == 0 { CAPACITY.0 } else { CAPACITY.1 };
        PteCache { levels: std::array::from_fn(|level| vec![Cell::new(None); places(level)].into_boxed_slice()) }
    }
}

impl PteCache {
    fn place(&self, level: u8, block: u64) -> &Cell<Option<CachedPte>> {
        let places = &self.levels[usize::from(level) - 1];
        &places[block as usize % places.len()]
    }

    fn find(&self, gpa: Gpa, level: u8) -> Option<CachedPte> {
        let block = gpa.0 >> shift(level);
        self.place(level, block).get().filter(|pte| pte.block == block)
    }

    /// The lowest PTE that is cached on the way to `gpa`, and its level.
    pub(super) fn lowest(&self, gpa: Gpa) -> Option<(u8, u64)> {
        (1..=MAX_LEVELS).find_map(|level| self.find(gpa, level).map(|pte| (level, pte.entry)))
    }

    /// Keeps the PTE of `level` on the way to `gpa`.
    pub(super) fn keep(&self, gpa: Gpa, level: u8, entry: u64, kind: Kind) {
        let block = gpa.0 >> shift(level);
        self.place(level, block).set(Some(CachedPte { block, entry, kind }));
    }

    /// Forgets it.
    pub(super) fn forget(&self, gpa: Gpa, level: u8) {
        if self.find(gpa, level).is_some() {
            self.place(level, gpa.0 >> shift(level)).set(None);
        }
    }

    /// The level of another PTE that maps a part of what the one of `level` on the way to `gpa`
    /// does.
    pub fn other_leaf(&self, gpa: Gpa, level: u8) -> Option<u8> {
        let is_leaf = |pte: CachedPte| pte.kind == Kind::Leaf;
        let above = (level + 1..=MAX_LEVELS).find(|&above| self.find(gpa, above).is_some_and(is_leaf));
        let is_within = |below: u8, pte: CachedPte| pte.block >> (shift(level) - shift(below)) == gpa.0 >> shift(level);
        above.or_else(|| {
            (1..level).find(|&below| {
                let mut places = self.levels[usize::from(below) - 1].iter();
                places.any(|place| place.get().is_some_and(|pte| is_leaf(pte) && is_within(below, pte)))
            })
        })
    }

    /// Drops what an instruction of `scope` does of the pages of `range`.
    pub(crate) fn drop_range(&self, scope: Scope, range: GfnRange) {
        let is_dropped = |level: u8, kind: Kind| match scope {
            Scope::All | Scope::SecondStage => true,
            Scope::Leaves => kind == Kind::Leaf || (kind == Kind::Invalid && level == 1),
            Scope::Combined => false,
        };
        if range.is_empty() || scope == Scope::Combined {
            return;
        }
        for (level, places) in (1..=MAX_LEVELS).zip(&self.levels) {
            // Of the number of a page.
            let shift = shift(level) - shift(1);
            let (first, last) = (range.start.0 >> shift, (range.end.0 - 1) >> shift);
            let clear = |place: &Cell<Option<CachedPte>>| {
                let is_hit = |pte: CachedPte| (first..=last).contains(&pte.block) && is_dropped(level, pte.kind);
                if place.get().is_some_and(is_hit) {
                    place.set(None);
                }
            };
            if last - first < places.len() as u64 {
                (first..=last).for_each(|block| clear(&places[block as usize % places.len()]));
            } else {
                places.iter().for_each(clear);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use slat::{Gfn, PAGE_SIZE};

    use super::*;

    const ALL: GfnRange = GfnRange { start: Gfn(0), end: Gfn(u64::MAX) };

    fn filled() -> PteCache {
        let cache = PteCache::default();
        cache.keep(Gpa(0), 3, 30, Kind::Table);
        cache.keep(Gpa(0), 2, 20, Kind::Table);
        cache.keep(Gpa(3 * PAGE_SIZE), 1, 13, Kind::Leaf);
        cache.keep(Gpa(4 * PAGE_SIZE), 1, 14, Kind::Invalid);
        cache.keep(Gpa(2 << 20), 2, 21, Kind::Leaf);
        cache.keep(Gpa(4 << 20), 2, 22, Kind::Invalid);
        cache
    }

    fn found(cache: &PteCache) -> [Option<(u8, u64)>; 5] {
        [3 * PAGE_SIZE, 4 * PAGE_SIZE, 5 * PAGE_SIZE, 3 << 20, 5 << 20].map(|gpa| cache.lowest(Gpa(gpa)))
    }

    #[test]
    fn the_lowest_is_found_and_dropped_by_its_scope() {
        let (leaf, invalid, table) = (Some((1, 13)), Some((1, 14)), Some((2, 20)));
        let (huge, high) = (Some((2, 21)), Some((2, 22)));
        let above = Some((3, 30));
        assert_eq!(found(&filled()), [leaf, invalid, table, huge, high]);
        for (scope, range, expected) in [
            (Scope::All, ALL, [None; 5]),
            (Scope::SecondStage, ALL, [None; 5]),
            (Scope::Combined, ALL, [leaf, invalid, table, huge, high]),
            (Scope::Leaves, ALL, [table, table, table, above, high]),
            // One page: what is above it, too, and the huge leaf around it.
            (Scope::All, GfnRange::new(Gfn(3), 1), [None, invalid, None, huge, high]),
            (Scope::Leaves, GfnRange::new(Gfn(4), 1), [leaf, table, table, huge, high]),
            (Scope::Leaves, GfnRange::new(Gfn(1023), 1), [leaf, invalid, table, above, high]),
            (Scope::All, GfnRange::new(Gfn(4), 0), [leaf, invalid, table, huge, high]),
        ] {
            let cache = filled();
            cache.drop_range(scope, range);
            assert_eq!(found(&cache), expected, "{scope:?} {range:?}");
        }
    }

    #[test]
    fn leaves_of_other_sizes_are_found() {
        let cache = filled();
        assert_eq!(cache.other_leaf(Gpa(0), 2), Some(1), "page 3 is in it");
        assert_eq!(cache.other_leaf(Gpa(0), 3), Some(1));
        assert_eq!(cache.other_leaf(Gpa(2 << 20), 2), None, "itself");
        assert_eq!(cache.other_leaf(Gpa(3 << 20), 1), Some(2));
        assert_eq!(cache.other_leaf(Gpa(5 << 20), 1), None, "one that is not valid maps nothing");
        cache.forget(Gpa(3 * PAGE_SIZE), 1);
        assert_eq!(cache.other_leaf(Gpa(0), 2), None);
    }
}
