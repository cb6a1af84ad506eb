//! The plain model: slots, leaves and tables as maps, and what each operation should do to them.

use std::collections::{BTreeMap, BTreeSet};

use slat::{
    Access, AccessTracking, Error, Exit, Gfn, GfnRange, Level, MemoryRegionFlags, Outcome, PageSize, Pfn, ZappedLeaf,
};

use super::ops::{Aging, LOG, READONLY};
use crate::common::{Frame, Writes};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Leaf {
    /// Frame of its first page.
    pub pfn: u64,
    pub level: Level,
    pub writable: bool,
    pub host_writable: bool,
    pub accessed: bool,
    pub dirty: bool,
    /// Aged where there is no accessed bit: not present for hardware.
    pub tracked: bool,
}

#[derive(Debug)]
pub struct Slot {
    pub range: GfnRange,
    pub flags: MemoryRegionFlags,
    pub first_pfn: u64,
    pub max_size: PageSize,
    pub writes: Writes,
    /// Pages that were given another frame.
    pub frames: BTreeMap<u64, Frame>,
    pub dirty: BTreeSet<u64>,
}

impl Slot {
    fn frame(&self, gfn: Gfn) -> Frame {
        let page = gfn.0 - self.range.start.0;
        let first = Frame { pfn: self.first_pfn + page, writes: self.writes };
        self.frames.get(&page).copied().unwrap_or(first)
    }

    /// The largest leaf up to `most` for `access` to `gfn`: all in the slot, none of it with another frame, aligned as the frames are.
    fn level(&self, gfn: Gfn, most: Level, access: Access) -> Level {
        let logs_write = self.flags.contains(LOG) && access == Access::Write;
        let mut level = if logs_write { Level::L4K } else { self.max_size.level().min(most) };
        loop {
            let block = gfn.block(level);
            let fits = level == Level::L4K
                || (self.range.covers(block)
                    && (self.frame(gfn).pfn ^ gfn.0).is_multiple_of(level.nr_pages())
                    && self.frames.keys().all(|page| !block.contains(Gfn(self.range.start.0 + page))));
            if fits {
                return level;
            }
            level = level.down();
        }
    }
}

/// What should be.
#[derive(Debug)]
pub struct Model {
    pub slots: BTreeMap<u32, Slot>,
    /// Leaves by their first frame.
    pub leaves: BTreeMap<u64, Leaf>,
    /// Table entries, by level and first frame of what they cover.
    pub tables: BTreeSet<(Level, u64)>,
    /// First frames of those above leaves of 4 KiB that are closed.
    pub closed: BTreeSet<u64>,
    /// Invalidations that are held.
    pub held: Vec<GfnRange>,
    /// What was taken away since the host was last asked.
    pub zapped: Vec<ZappedLeaf>,
    pub root_level: Level,
    pub access_tracking: AccessTracking,
    /// Frames that were given out by the million.
    pub nr_created: u64,
}

impl Model {
    pub fn new(root_level: Level, access_tracking: AccessTracking) -> Model {
        Model {
            slots: BTreeMap::new(),
            leaves: BTreeMap::new(),
            tables: BTreeSet::new(),
            closed: BTreeSet::new(),
            held: Vec::new(),
            zapped: Vec::new(),
            root_level,
            access_tracking,
            nr_created: 0,
        }
    }

    fn slot_at(&self, gfn: Gfn) -> Option<u32> {
        self.slots.iter().find(|(_, slot)| slot.range.contains(gfn)).map(|(id, _)| *id)
    }

    pub fn leaf_at(&self, gfn: Gfn) -> Option<(u64, Leaf)> {
        let (&first, &leaf) = self.leaves.range(..=gfn.0).next_back()?;
        (gfn.0 < first + leaf.level.nr_pages()).then_some((first, leaf))
    }

    /// Whether the guest may write through `leaf`, which is at `gfn`.
    pub fn is_writable(&self, gfn: Gfn, leaf: Leaf) -> bool {
        leaf.writable && !self.is_closed(gfn, leaf.level)
    }

    fn is_closed(&self, gfn: Gfn, level: Level) -> bool {
        level == Level::L4K && self.closed.contains(&gfn.align_down(Level::L2M).0)
    }

    /// What the first write below a closed entry does to it and to the other leaves.
    fn push_down(&mut self, gfn: Gfn) {
        let block = gfn.block(Level::L2M);
        let logs = self.slot_at(gfn).is_none_or(|id| self.slots[&id].flags.contains(LOG));
        for (_, leaf) in self.leaves.range_mut(block.start.0..block.end.0).filter(|(first, _)| **first != gfn.0) {
            leaf.writable &= !logs;
        }
        self.closed.remove(&block.start.0);
    }

    /// Level of the empty entry for `gfn`.
    fn empty_level(&self, gfn: Gfn) -> Level {
        let mut level = self.root_level;
        while self.tables.contains(&(level, gfn.align_down(level).0)) {
            level = level.down();
        }
        level
    }

    /// The largest block up to `level` around `gfn` that reaches into no invalidation.
    fn free_level(&self, gfn: Gfn, mut level: Level) -> Option<Level> {
        while self.held.iter().any(|range| range.overlaps(gfn.block(level))) {
            if level == Level::L4K {
                return None;
            }
            level = level.down();
        }
        Some(level)
    }

    pub fn overlapping(&self, id: u32, range: GfnRange) -> Option<u32> {
        let others = self.slots.iter().filter(|(other, slot)| **other != id && slot.range.overlaps(range));
        others.min_by_key(|(_, slot)| slot.range.start).map(|(other, _)| *other)
    }

    /// Replaces the huge leaf that begins at frame `first` by its parts.
    fn split(&mut self, first: u64) {
        let Some(leaf) = self.leaves.remove(&first) else { return };
        let level = leaf.level.down();
        for part in 0..512 {
            let offset = part * level.nr_pages();
            self.leaves.insert(first + offset, Leaf { pfn: leaf.pfn + offset, level, ..leaf });
        }
    }

    /// Makes tables of the entries that `range` covers in part: what lies beside it stays.
    fn refine(&mut self, range: GfnRange) {
        for edge in [range.start, Gfn(range.end.0 - 1)] {
            let mut level = self.root_level;
            while !range.covers(edge.block(level)) {
                let first = edge.align_down(level).0;
                if self.tables.insert((level, first)) {
                    self.split(first);
                }
                level = level.down();
            }
        }
    }

    fn zap_leaf(&mut self, first: u64) {
        let Some(leaf) = self.leaves.remove(&first) else { return };
        self.zapped.push(ZappedLeaf {
            range: GfnRange::new(Gfn(first), leaf.level.nr_pages()),
            pfn: Pfn(leaf.pfn),
            accessed: leaf.accessed,
            dirty: leaf.dirty,
        });
    }

    pub fn take_away(&mut self, range: GfnRange) {
        self.refine(range);
        let gone: Vec<u64> = self.leaves.range(range.start.0..range.end.0).map(|(&first, _)| first).collect();
        for first in gone {
            self.zap_leaf(first);
        }
        self.tables.retain(|&(level, first)| !range.covers(Gfn(first).block(level)));
        self.closed.retain(|first| self.tables.contains(&(Level::L2M, *first)));
    }

    /// What hardware does at an access; says whether the tables allow it.
    pub fn access(&mut self, gfn: Gfn, access: Access) -> bool {
        let Some((first, leaf)) = self.leaf_at(gfn) else { return false };
        let writes = access == Access::Write;
        if leaf.tracked || (writes && !self.is_writable(gfn, leaf)) {
            return false;
        }
        self.leaves.insert(first, Leaf { accessed: true, dirty: leaf.dirty || writes, ..leaf });
        true
    }

    pub fn fault(&mut self, gfn: Gfn, access: Access) -> Result<Outcome, Error> {
        let exit = Ok(Outcome::Exit(Exit::Mmio { gpa: gfn.gpa(), access }));
        let writes = access == Access::Write;
        loop {
            let found = self.leaf_at(gfn);
            if let Some((_, leaf)) = found
                && !leaf.tracked
                && (!writes || self.is_writable(gfn, leaf))
            {
                return Ok(Outcome::Resume);
            }
            let entry_level = found.map_or_else(|| self.empty_level(gfn), |(_, leaf)| leaf.level);
            let Some(free_level) = self.free_level(gfn, entry_level) else { return Ok(Outcome::Resume) };
            let Some(id) = self.slot_at(gfn) else { return exit };
            let Some(slot) = self.slots.get_mut(&id) else { return exit };
            if writes && slot.flags.contains(READONLY) {
                return exit;
            }
            let logs = slot.flags.contains(LOG);
            let page = gfn.0 - slot.range.start.0;
            if let Some((first, leaf)) = found
                && (!writes || leaf.host_writable)
            {
                if writes && logs && leaf.level > Level::L4K {
                    self.tables.insert((leaf.level, first));
                    self.split(first);
                    continue;
                }
                if writes && logs {
                    slot.dirty.insert(page);
                }
                let (writable, dirty) = (leaf.writable || writes, leaf.dirty || writes);
                self.leaves.insert(first, Leaf { writable, dirty, accessed: true, tracked: false, ..leaf });
                if writes && self.is_closed(gfn, leaf.level) {
                    self.push_down(gfn);
                }
                return Ok(Outcome::Resume);
            }
            let frame = slot.frame(gfn);
            if writes && frame.writes == Writes::Refused {
                return Err(Error::BackingGone { gpa: gfn.gpa() });
            }
            let level = slot.level(gfn, free_level, access);
            if let Some((first, leaf)) = found
                && leaf.level > level
            {
                // A part of it may be written now: the others stay.
                self.tables.insert((leaf.level, first));
                self.split(first);
                continue;
            }
            let host_writable = (writes || frame.writes == Writes::Allowed) && !slot.flags.contains(READONLY);
            let writable = host_writable && (writes || !logs);
            if logs && writable {
                slot.dirty.insert(page);
            }
            if let Some((first, _)) = found {
                // It may not be written: it is replaced.
                self.leaves.remove(&first);
            }
            let pfn = frame.pfn & !(level.nr_pages() - 1);
            // Where CPUs set no D, what can be written counts as written.
            let dirty = writes || (writable && self.access_tracking == AccessTracking::Faults);
            let leaf = Leaf { pfn, level, writable, host_writable, accessed: true, dirty, tracked: false };
            self.leaves.insert(gfn.align_down(level).0, leaf);
            let mut above = level;
            while above < self.root_level {
                above = above.up();
                self.tables.insert((above, gfn.align_down(above).0));
            }
            if writes && self.is_closed(gfn, level) {
                self.push_down(gfn);
            }
            return Ok(Outcome::Resume);
        }
    }

    pub fn age(&mut self, range: GfnRange, aging: Aging) -> u64 {
        let first = self.leaf_at(range.start).map_or(range.start.0, |(first, _)| first);
        let mut nr_used = 0;
        for (&first, leaf) in self.leaves.range_mut(first..range.end.0) {
            let block = GfnRange::new(Gfn(first), leaf.level.nr_pages());
            let used = match self.access_tracking {
                AccessTracking::AccessedBit => leaf.accessed,
                AccessTracking::Faults => !leaf.tracked,
            };
            if !used {
                continue;
            }
            nr_used += block.intersection(range).nr_pages();
            if aging == Aging::Age {
                leaf.accessed = false;
                if self.access_tracking == AccessTracking::Faults {
                    (leaf.tracked, leaf.writable) = (true, false);
                }
            }
        }
        nr_used
    }

    /// Takes the right to write from `pages` of the slot that has `range`: where there are many in a block, from the entry
    /// above.
    fn protect(&mut self, range: GfnRange, pages: impl Iterator<Item = Gfn>) {
        const FEW: usize = 16;
        let mut blocks = BTreeMap::<u64, Vec<Gfn>>::new();
        pages.for_each(|gfn| blocks.entry(gfn.align_down(Level::L2M).0).or_default().push(gfn));
        for (first, pages) in blocks {
            let may_close = self.tables.contains(&(Level::L2M, first)) && range.covers(Gfn(first).block(Level::L2M));
            if may_close && pages.len() > FEW {
                self.closed.insert(first);
                continue;
            }
            for gfn in pages {
                if let Some((first, leaf)) = self.leaf_at(gfn) {
                    self.leaves.insert(first, Leaf { writable: false, ..leaf });
                }
            }
        }
    }

    /// The slot's log; a new one begins.
    pub fn harvest(&mut self, id: u32) -> BTreeSet<u64> {
        let Some(slot) = self.slots.get_mut(&id) else { return BTreeSet::new() };
        let (range, dirty) = (slot.range, std::mem::take(&mut slot.dirty));
        self.protect(range, dirty.iter().map(|page| Gfn(range.start.0 + page)));
        dirty
    }

    /// What a change of an existing slot must answer; done, if that is `Ok`.
    pub fn change(&mut self, id: u32, start: Gfn, flags: MemoryRegionFlags) -> Result<(), Error> {
        let before = self.slots.get(&id).ok_or(Error::NoBacking { slot: id })?;
        let range = GfnRange::new(start, before.range.nr_pages());
        if (before.flags ^ flags).contains(READONLY) {
            return Err(Error::ReadOnlyFixed { slot: id });
        }
        if let Some(other) = self.overlapping(id, range) {
            return Err(Error::Overlap { slot: id, gpa: start.gpa(), other });
        }
        let (old_range, begins) = (before.range, flags.contains(LOG) && !before.flags.contains(LOG));
        if range != old_range {
            self.take_away(old_range);
        } else if begins {
            self.protect(range, (range.start.0..range.end.0).map(Gfn));
        }
        let slot = self.slots.get_mut(&id).ok_or(Error::NoSuchSlot { slot: id })?;
        (slot.range, slot.flags) = (range, flags);
        if !flags.contains(LOG) {
            slot.dirty.clear();
        } else if range != old_range && !begins {
            // All pages of a slot that logs have another address now.
            slot.dirty = (0..range.nr_pages()).collect();
        }
        Ok(())
    }
}
