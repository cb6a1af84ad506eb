//! The areas of an address space, and the memslots that they are in.
//!
//! An *area* is what one call has mapped, or what is left of it. A *region* is a memslot. A mapping
//! gets a region of its own where there is none. A region stays until none of its areas is left, so
//! an area that was unmapped in part leaves a hole in it, and a later mapping may lie in holes of
//! several regions, and between them.

use alloc::sync::Arc;
use alloc::vec::Vec;

use ax_memory_addr::PhysAddr;
use axvm_types::MappingFlags;
use slat::{Gfn, GfnRange, Pfn};

use crate::host::PagingHost;
use crate::lazy::LazyMemory;
use crate::{AddrSpaceError, AddrSpaceResult};

/// Where an area's frames come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Source {
    /// They follow each other, from the frame of the area's first page on.
    Linear(Pfn),
    /// From the host, one by one.
    Alloc,
}

/// Memory with the same flags.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Area {
    pub(crate) range: GfnRange,
    pub(crate) flags: MappingFlags,
    pub(crate) source: Source,
}

impl Area {
    /// The frame of `gfn` in a linear area.
    pub(crate) fn linear_frame(&self, gfn: Gfn) -> Option<Pfn> {
        match self.source {
            Source::Linear(first) => Some(Pfn(first.0 + (gfn.0 - self.range.start.0))),
            Source::Alloc => None,
        }
    }

    /// The part of the area in `range`.
    pub(crate) fn part(&self, range: GfnRange) -> Area {
        let range = self.range.intersection(range);
        let source = self.linear_frame(range.start).map_or(Source::Alloc, Source::Linear);
        Area { range, source, ..*self }
    }
}

/// A memslot.
pub(crate) struct Region<P: PagingHost> {
    pub(crate) slot: u32,
    pub(crate) range: GfnRange,
    /// `None`: it is pinned.
    pub(crate) memory: Option<Arc<LazyMemory<P>>>,
    /// Of a pinned one: the frames that the host allocated, with their pages.
    pub(crate) frames: Vec<(Gfn, PhysAddr)>,
}

impl<P: PagingHost> Region<P> {
    /// The numbers of the pages of `range` in the memslot.
    pub(crate) fn pages(&self, range: GfnRange) -> core::ops::Range<u64> {
        range.start.0 - self.range.start.0..range.end.0 - self.range.start.0
    }
}

/// All areas and regions, each in the order of their addresses.
pub(crate) struct Layout<P: PagingHost> {
    pub(crate) areas: Vec<Area>,
    pub(crate) regions: Vec<Region<P>>,
    /// Bit n % 64 of word n / 64 is set while memslot n exists.
    slots: Vec<u64>,
}

/// PTEs of a page-table page, in each format.
const TABLE_ENTRIES: u64 = 512;

/// Makes room for another element.
fn reserve<T>(list: &mut Vec<T>) -> AddrSpaceResult {
    list.try_reserve(1).map_err(|_| AddrSpaceError::OutOfMemory)
}

impl<P: PagingHost> Layout<P> {
    pub(crate) fn new() -> Layout<P> {
        Layout { areas: Vec::new(), regions: Vec::new(), slots: Vec::new() }
    }

    /// Makes room for one area more, so that adding one, or cutting one in two, cannot fail.
    ///
    /// # Errors
    /// [`AddrSpaceError::OutOfMemory`].
    pub(crate) fn reserve_area(&mut self) -> AddrSpaceResult {
        reserve(&mut self.areas)
    }

    /// The area that has `gfn`.
    pub(crate) fn area_at(&self, gfn: Gfn) -> Option<&Area> {
        let index = self.areas.partition_point(|area| area.range.end <= gfn);
        self.areas.get(index).filter(|area| area.range.contains(gfn))
    }

    /// The areas that have pages of `range`.
    pub(crate) fn areas_in(&self, range: GfnRange) -> &[Area] {
        let first = self.areas.partition_point(|area| area.range.end <= range.start);
        let end = self.areas.partition_point(|area| area.range.start < range.end);
        &self.areas[first..end.max(first)]
    }

    /// `range`, whose pages are in no area, enlarged as far as whole page-table pages have nothing
    /// else: to unmap that unlinks them. `whole` is what the page tables translate.
    pub(crate) fn with_empty_tables(&self, range: GfnRange, whole: GfnRange) -> GfnRange {
        let next = self.areas.partition_point(|area| area.range.end <= range.start);
        let start = next.checked_sub(1).map_or(whole.start, |before| self.areas[before].range.end);
        let hole = GfnRange { start, end: self.areas.get(next).map_or(whole.end, |area| area.range.start) };
        let mut enlarged = range;
        for nr_pages in (1..).map_while(|level| TABLE_ENTRIES.checked_pow(level)) {
            let start = Gfn(range.start.0 / nr_pages * nr_pages);
            let around = GfnRange { start, end: Gfn(range.end.0.next_multiple_of(nr_pages)) };
            if !hole.covers(around) {
                break;
            }
            enlarged = around;
        }
        enlarged
    }

    pub(crate) fn insert_area(&mut self, area: Area) {
        let index = self.areas.partition_point(|other| other.range.start < area.range.start);
        self.areas.insert(index, area);
    }

    /// Cuts `range` out of all areas. One more area may be left: see
    /// [`reserve_area`](Layout::reserve_area).
    pub(crate) fn cut_areas(&mut self, range: GfnRange) {
        let first = self.areas.partition_point(|area| area.range.end <= range.start);
        while let Some(&area) = self.areas.get(first).filter(|area| area.range.start < range.end) {
            let before = area.part(GfnRange { start: area.range.start, end: range.start });
            let after = area.part(GfnRange { start: range.end, end: area.range.end });
            match (before.range.is_empty(), after.range.is_empty()) {
                (true, true) => drop(self.areas.remove(first)),
                (true, false) => return self.areas[first] = after,
                (false, _) => {
                    self.areas[first] = before;
                    if !after.range.is_empty() {
                        return self.areas.insert(first + 1, after);
                    }
                    return self.cut_areas(GfnRange { start: area.range.end, end: range.end });
                }
            }
        }
    }

    /// The region at `gfn`, and where it, or the gap between regions there, ends.
    pub(crate) fn region_at(&mut self, gfn: Gfn) -> (Option<&mut Region<P>>, Gfn) {
        let index = self.regions.partition_point(|region| region.range.end <= gfn);
        match self.regions.get_mut(index) {
            Some(region) if region.range.contains(gfn) => {
                let end = region.range.end;
                (Some(region), end)
            }
            Some(region) => (None, region.range.start),
            None => (None, Gfn(u64::MAX)),
        }
    }

    /// The region that has `gfn`.
    pub(crate) fn region_of(&self, gfn: Gfn) -> Option<&Region<P>> {
        let index = self.regions.partition_point(|region| region.range.end <= gfn);
        self.regions.get(index).filter(|region| region.range.contains(gfn))
    }

    /// Adds a region in a gap: `create` makes the memslot of a number that is free.
    ///
    /// # Errors
    /// Those of `create`, and [`AddrSpaceError::OutOfMemory`]: there is no region then.
    pub(crate) fn add_region(
        &mut self,
        range: GfnRange,
        memory: Option<Arc<LazyMemory<P>>>,
        create: impl FnOnce(u32) -> AddrSpaceResult,
    ) -> AddrSpaceResult {
        reserve(&mut self.regions)?;
        let word = match self.slots.iter().position(|&word| word != u64::MAX) {
            Some(word) => word,
            None => {
                reserve(&mut self.slots)?;
                self.slots.push(0);
                self.slots.len() - 1
            }
        };
        let bit = self.slots[word].trailing_ones();
        let slot = word as u32 * 64 + bit;
        create(slot)?;
        self.slots[word] |= 1 << bit;
        let index = self.regions.partition_point(|other| other.range.start < range.start);
        self.regions.insert(index, Region { slot, range, memory, frames: Vec::new() });
        Ok(())
    }

    /// Removes the region at `index`, whose memslot is gone.
    pub(crate) fn remove_region(&mut self, index: usize) -> Region<P> {
        let region = self.regions.remove(index);
        self.slots[region.slot as usize / 64] &= !(1 << (region.slot % 64));
        region
    }
}
