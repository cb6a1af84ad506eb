//! The plain model: memslots, leaves and page-table pages as maps, and what each operation should
//! do to them.

#[path = "plain_dirty_log.rs"]
mod dirty_log;
#[path = "plain_huge.rs"]
mod huge;
#[path = "plain_userfault.rs"]
mod userfault;

use std::collections::{BTreeMap, BTreeSet};

use slat::dirty::{DirtyTracking, HugePageLogging, ManualProtect};
use slat::error::{FaultError, SlotError};
use slat::format::Format;
use slat::host::ZappedLeaf;
use slat::tables::{AccessTracking, FaultAround};
use slat::{Access, Config, Exit, Gfn, GfnRange, Level, MemoryRegionFlags, Outcome, PageSize, Pfn};

use super::ops::{Aging, LOG, READONLY, USERFAULT};
use crate::common::{Frame, PRIVATE_PFN, Writes};
pub use userfault::Userfault;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Leaf {
    /// Frame of its first page.
    pub pfn: u64,
    pub level: Level,
    pub writable: bool,
    pub host_writable: bool,
    pub accessed: bool,
    pub dirty: bool,
    /// Written before its D was cleared for the log.
    pub was_dirty: bool,
    /// Aged in a configuration without A: not present for hardware.
    pub tracked: bool,
}

#[derive(Debug)]
pub struct Slot {
    pub range: GfnRange,
    pub flags: MemoryRegionFlags,
    pub first_pfn: u64,
    pub max_size: PageSize,
    pub writes: Writes,
    /// Pages that were moved to another frame.
    pub frames: BTreeMap<u64, Frame>,
    /// The log; no bits are set behind the end of the memslot.
    pub dirty: Vec<u64>,
    /// If the memslot has userfault.
    pub userfault: Option<Userfault>,
    /// Pages that are private.
    pub private: BTreeSet<u64>,
}

/// Whether the host answers that page `page` of a memslot is resident.
pub fn is_resident(page: u64) -> bool {
    !page.is_multiple_of(3)
}

/// Words for the log of `nr_pages`, all bits set or none.
pub fn log_words(nr_pages: u64, are_set: bool) -> Vec<u64> {
    let mut words = vec![if are_set { u64::MAX } else { 0 }; nr_pages.div_ceil(64) as usize];
    if let Some(last) = words.last_mut()
        && !nr_pages.is_multiple_of(64)
    {
        *last &= (1 << (nr_pages % 64)) - 1;
    }
    words
}

impl Slot {
    /// Marks those of `pages` that the memslot has, if it logs.
    fn mark(&mut self, pages: GfnRange) {
        if !self.flags.contains(LOG) {
            return;
        }
        let pages = pages.intersection(self.range);
        for page in pages.start.0 - self.range.start.0..pages.start.0 - self.range.start.0 + pages.nr_pages() {
            self.dirty[page as usize / 64] |= 1 << (page % 64);
        }
    }

    fn frame(&self, gfn: Gfn) -> Frame {
        let page = gfn.0 - self.range.start.0;
        let first = Frame { pfn: self.first_pfn + page, writes: self.writes };
        let frame = self.frames.get(&page).copied().unwrap_or(first);
        Frame { pfn: frame.pfn + self.is_private(gfn) as u64 * PRIVATE_PFN, ..frame }
    }

    /// The end of the largest block of contiguous frames from the one at `gfn` on, as the host
    /// reports it.
    fn block_end(&self, gfn: Gfn) -> Gfn {
        let page = gfn.0 - self.range.start.0;
        let pfn = self.first_pfn + page;
        let mut level = self.max_size.level();
        loop {
            let inside = pfn % level.nr_pages();
            let (start, end) = (page.saturating_sub(inside), page + level.nr_pages() - inside);
            if self.frames.range(start..end).next().is_none() {
                return Gfn(self.range.start.0 + end);
            }
            if level == Level::L4K {
                return Gfn(gfn.0 + 1);
            }
            level = level.down();
        }
    }

    /// The largest leaf up to `most` for `gfn`: inside the memslot, with contiguous and aligned
    /// frames.
    fn level(&self, gfn: Gfn, most: Level) -> Level {
        let mut level = self.max_size.level().min(most);
        loop {
            let block = gfn.block(level);
            let fits = level == Level::L4K
                || (self.allows_leaf(block, level)
                    && (self.frame(gfn).pfn ^ gfn.0).is_multiple_of(level.nr_pages())
                    && self.frames.keys().all(|page| !block.contains(Gfn(self.range.start.0 + page))));
            if fits {
                return level;
            }
            level = level.down();
        }
    }
}

/// The expected state.
#[derive(Debug)]
pub struct Model {
    pub slots: BTreeMap<u32, Slot>,
    /// Leaves by their first frame.
    pub leaves: BTreeMap<u64, Leaf>,
    /// Directory entries, by level and first frame of their blocks.
    pub tables: BTreeSet<(Level, u64)>,
    /// First frames of the blocks of protected directory entries.
    pub protected: BTreeSet<u64>,
    /// Invalidations in flight.
    pub in_flight: Vec<GfnRange>,
    /// Leaves that were zapped since the last comparison.
    pub zapped: Vec<ZappedLeaf>,
    /// Pages that CPUs have logged since their logs were drained.
    pub logged: Vec<Gfn>,
    pub root_level: Level,
    /// Whether CPUs set D, directory entries can be protected, and a leaf is broken before it is
    /// split.
    pub has_dirty_bit: bool,
    pub closes: bool,
    pub breaks: bool,
    pub config: Config,
    /// Frames that were used up, in millions.
    pub nr_created: u64,
    /// Leaves that were mapped along with another page.
    pub nr_around: u64,
    /// Faults that exited because of a userfault bit.
    pub nr_userfaults: u64,
}

impl Model {
    pub fn new<F: Format>(config: Config) -> Model {
        Model {
            slots: BTreeMap::new(),
            leaves: BTreeMap::new(),
            tables: BTreeSet::new(),
            protected: BTreeSet::new(),
            in_flight: Vec::new(),
            zapped: Vec::new(),
            logged: Vec::new(),
            root_level: F::ROOT_LEVEL,
            has_dirty_bit: F::HAS_DIRTY_BIT,
            closes: F::GENERATION != 0,
            breaks: F::BREAK_BEFORE_MAKE,
            config,
            nr_created: 0,
            nr_around: 0,
            nr_userfaults: 0,
        }
    }

    /// Whether a writable leaf counts as written.
    fn writes_set_no_bit(&self) -> bool {
        self.config.access_tracking == AccessTracking::Faults || !self.has_dirty_bit
    }

    /// Whether hardware's dirty bits are the log of leaves of 4 KiB.
    fn logs_by_dirty_bits(&self) -> bool {
        !matches!(self.config.dirty_tracking, DirtyTracking::WriteProtect | DirtyTracking::WriteProtectLeaves)
    }

    /// Whether the first write to a leaf of `level` must fault in a memslot that logs.
    fn first_write_faults(&self, level: Level) -> bool {
        level > Level::L4K || !self.logs_by_dirty_bits()
    }

    fn largest_logged_write(&self) -> Level {
        match self.config.huge_page_logging {
            HugePageLogging::Split | HugePageLogging::SplitLazily => Level::L4K,
            HugePageLogging::MarkWhole | HugePageLogging::MarkWholeLazily => Level::L2M,
        }
    }

    fn mark(&mut self, pages: GfnRange) {
        if let Some(id) = self.slot_at(pages.start) {
            self.slots.get_mut(&id).expect("it is there").mark(pages);
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
        leaf.writable && !self.is_protected(gfn, leaf.level)
    }

    fn is_protected(&self, gfn: Gfn, level: Level) -> bool {
        level == Level::L4K && self.protected.contains(&gfn.align_down(Level::L2M).0)
    }

    /// Pushes a protection down: what the first write below the directory entry does to the leaves.
    fn push_down(&mut self, gfn: Gfn) {
        let block = gfn.block(Level::L2M);
        let logs = self.slot_at(gfn).is_none_or(|id| self.slots[&id].flags.contains(LOG));
        for (_, leaf) in self.leaves.range_mut(block.start.0..block.end.0).filter(|(first, _)| **first != gfn.0) {
            leaf.writable &= !logs;
        }
        self.protected.remove(&block.start.0);
    }

    /// Level of the empty PTE for `gfn`.
    fn empty_level(&self, gfn: Gfn) -> Level {
        let mut level = self.root_level;
        while self.tables.contains(&(level, gfn.align_down(level).0)) {
            level = level.down();
        }
        level
    }

    /// The largest block up to `level` around `gfn` that reaches into no range in flight.
    fn free_level(&self, gfn: Gfn, mut level: Level) -> Option<Level> {
        while self.in_flight.iter().any(|range| range.overlaps(gfn.block(level))) {
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
        let logs = self.slot_at(Gfn(first)).is_none_or(|id| self.slots[&id].flags.contains(LOG));
        for part in 0..512 {
            let offset = part * level.nr_pages();
            // After a break in a memslot that logs, a part becomes writable by its own write fault
            // only.
            let writable = leaf.writable && !(self.breaks && logs);
            self.leaves.insert(first + offset, Leaf { pfn: leaf.pfn + offset, level, writable, ..leaf });
        }
    }

    /// Splits the huge leaves that `range` covers in part, so that their other parts stay.
    fn split_edges(&mut self, range: GfnRange) {
        for edge in [range.start, Gfn(range.end.0 - 1)] {
            let mut level = self.root_level;
            while !range.covers(edge.block(level)) {
                let first = edge.align_down(level).0;
                if self.leaves.get(&first).is_some_and(|leaf| leaf.level == level) {
                    self.tables.insert((level, first));
                    self.split(first);
                }
                if !self.tables.contains(&(level, first)) {
                    break;
                }
                level = level.down();
            }
        }
    }

    pub fn nr_leaves(&self, level: Level) -> u64 {
        self.leaves.values().filter(|leaf| leaf.level == level).count() as u64
    }

    fn zap_leaf(&mut self, first: u64) {
        let Some(leaf) = self.leaves.remove(&first) else { return };
        if leaf.level == Level::L4K && self.logs_by_dirty_bits() && leaf.dirty {
            self.mark(GfnRange::new(Gfn(first), 1));
        }
        self.zapped.push(ZappedLeaf {
            range: GfnRange::new(Gfn(first), leaf.level.nr_pages()),
            pfn: Pfn(leaf.pfn),
            accessed: leaf.accessed,
            dirty: leaf.dirty || leaf.was_dirty,
        });
    }

    pub fn zap_range(&mut self, range: GfnRange) {
        self.split_edges(range);
        let gone: Vec<u64> = self.leaves.range(range.start.0..range.end.0).map(|(&first, _)| first).collect();
        for first in gone {
            self.zap_leaf(first);
        }
        self.tables.retain(|&(level, first)| !range.covers(Gfn(first).block(level)));
        self.protected.retain(|first| self.tables.contains(&(Level::L2M, *first)));
    }

    /// What hardware does at an access. Returns whether the page tables allow it.
    pub fn access(&mut self, gfn: Gfn, access: Access) -> bool {
        let Some((first, leaf)) = self.leaf_at(gfn) else { return false };
        let writes = access == Access::Write;
        if leaf.tracked || (writes && !self.is_writable(gfn, leaf)) {
            return false;
        }
        if writes && !leaf.dirty {
            self.logged.push(gfn);
        }
        self.leaves.insert(first, Leaf { accessed: true, dirty: leaf.dirty || writes, ..leaf });
        true
    }

    /// The pages around `gfn` that may be mapped along with it, and itself.
    pub fn window(&self, gfn: Gfn) -> GfnRange {
        let nr_pages = match self.config.fault_around {
            FaultAround::Off => 1,
            FaultAround::Pages(nr_pages) => u64::from(nr_pages),
        };
        GfnRange::new(Gfn(gfn.0 / nr_pages * nr_pages), nr_pages)
    }

    /// Maps the missing resident pages around `gfn`, as not used.
    fn map_around(&mut self, gfn: Gfn) {
        let Some(slot) = self.slot_at(gfn).map(|id| &self.slots[&id]).filter(|slot| !slot.is_private(gfn)) else {
            return;
        };
        let may_write = !slot.flags.contains(READONLY);
        let first_write_faults =
            self.writes_set_no_bit() || (slot.flags.contains(LOG) && self.first_write_faults(Level::L4K));
        // Of contiguous frames the host is asked for the first only, in each group of 8 pages.
        let (mut group, mut answered_to) = (u64::MAX, Gfn(0));
        let mut around = Vec::new();
        let window = self.window(gfn);
        for gfn in (window.start.0..window.end.0).map(Gfn).filter(|other| *other != gfn) {
            let is_free = self.leaf_at(gfn).is_none() && self.free_level(gfn, Level::L4K).is_some();
            if !slot.range.contains(gfn) || !is_free || !slot.is_mapped_along(gfn) {
                continue;
            }
            if gfn.0 / 8 != group {
                (group, answered_to) = (gfn.0 / 8, gfn);
            }
            if gfn >= answered_to {
                if !is_resident(gfn.0 - slot.range.start.0) {
                    continue;
                }
                answered_to = slot.block_end(gfn);
            }
            let frame = slot.frame(gfn);
            let host_writable = may_write && frame.writes == Writes::Allowed;
            let writable = host_writable && !first_write_faults;
            let accessed = self.config.access_tracking == AccessTracking::Faults;
            let (dirty, was_dirty, tracked) = (false, false, false);
            let (pfn, level) = (frame.pfn, Level::L4K);
            around.push((gfn.0, Leaf { pfn, level, writable, host_writable, accessed, dirty, was_dirty, tracked }));
        }
        self.nr_around += around.len() as u64;
        self.leaves.extend(around);
    }

    pub fn fault(&mut self, gfn: Gfn, access: Access) -> Result<Outcome, FaultError> {
        let exit = Ok(Outcome::Exit(Exit::Mmio { gpa: gfn.gpa(), access }));
        let writes = access == Access::Write;
        loop {
            let found = self.leaf_at(gfn);
            if let Some((first, leaf)) = found
                && !leaf.tracked
                && (!writes || self.is_writable(gfn, leaf))
            {
                // A CPU that sets neither A nor D faults for them.
                let is_marked = leaf.accessed && (!writes || leaf.dirty);
                if !is_marked && writes && !self.first_write_faults(leaf.level) {
                    self.mark(GfnRange::new(Gfn(first), leaf.level.nr_pages()));
                }
                self.leaves.insert(first, Leaf { accessed: true, dirty: leaf.dirty || writes, ..leaf });
                return Ok(Outcome::Resume);
            }
            let entry_level = found.map_or_else(|| self.empty_level(gfn), |(_, leaf)| leaf.level);
            let Some(free_level) = self.free_level(gfn, entry_level) else { return Ok(Outcome::Resume) };
            let Some(id) = self.slot_at(gfn) else { return exit };
            let Some(slot) = self.slots.get(&id) else { return exit };
            if writes && slot.flags.contains(READONLY) {
                return exit;
            }
            if let Some(exit) = slot.userfault_exit(gfn) {
                self.nr_userfaults += 1;
                return Ok(Outcome::Exit(exit));
            }
            let logs = slot.flags.contains(LOG);
            if let Some((first, leaf)) = found
                && (!writes || leaf.host_writable)
            {
                if writes && logs && leaf.level > self.largest_logged_write() {
                    self.tables.insert((leaf.level, first));
                    // Where the first writes to the parts are found without faults, the parts may
                    // be writable.
                    let writable = !self.first_write_faults(leaf.level.down());
                    self.leaves.insert(first, Leaf { writable, ..leaf });
                    self.split(first);
                    continue;
                }
                if writes {
                    self.mark(GfnRange::new(Gfn(first), leaf.level.nr_pages()));
                }
                let (writable, dirty) = (leaf.writable || writes, leaf.dirty || writes);
                self.leaves.insert(first, Leaf { writable, dirty, accessed: true, tracked: false, ..leaf });
                if writes && self.is_protected(gfn, leaf.level) {
                    self.push_down(gfn);
                }
                return Ok(Outcome::Resume);
            }
            let frame = slot.frame(gfn);
            if writes && frame.writes == Writes::Refused {
                return Err(FaultError::BackingGone { gpa: gfn.gpa() });
            }
            let most = if writes && logs { self.largest_logged_write() } else { Level::L1G };
            let level = slot.level(gfn, free_level.min(most));
            if let Some((first, leaf)) = found
                && leaf.level > level
            {
                // A part of it is writable now: the others stay.
                self.tables.insert((leaf.level, first));
                self.split(first);
                continue;
            }
            let host_writable = (writes || frame.writes == Writes::Allowed) && !slot.flags.contains(READONLY);
            let writable = host_writable && (writes || !logs || !self.first_write_faults(level));
            if writable && (writes || self.first_write_faults(level)) {
                self.mark(gfn.block(level));
            }
            if let Some((first, leaf)) = found {
                // It is read-only, and is replaced. Its use is reported.
                self.leaves.remove(&first);
                if leaf.accessed && !leaf.tracked {
                    let range = GfnRange::new(Gfn(first), leaf.level.nr_pages());
                    let dirty = leaf.dirty || leaf.was_dirty;
                    self.zapped.push(ZappedLeaf { range, pfn: Pfn(leaf.pfn), accessed: true, dirty });
                }
            }
            let pfn = frame.pfn & !(level.nr_pages() - 1);
            // Where CPUs set no D, a writable leaf counts as written.
            let dirty = writes || (writable && self.writes_set_no_bit());
            let (was_dirty, tracked) = (false, false);
            let leaf = Leaf { pfn, level, writable, host_writable, accessed: true, dirty, was_dirty, tracked };
            self.leaves.insert(gfn.align_down(level).0, leaf);
            let mut above = level;
            while above < self.root_level {
                above = above.up();
                self.tables.insert((above, gfn.align_down(above).0));
            }
            if found.is_none() && level == Level::L4K {
                self.map_around(gfn);
            }
            if writes && self.is_protected(gfn, level) {
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
            let used = match self.config.access_tracking {
                AccessTracking::AccessedBit => leaf.accessed,
                AccessTracking::Faults => !leaf.tracked,
            };
            if !used {
                continue;
            }
            nr_used += block.intersection(range).nr_pages();
            if aging == Aging::Age {
                leaf.accessed = false;
                if self.config.access_tracking == AccessTracking::Faults {
                    (leaf.tracked, leaf.writable) = (true, false);
                }
            }
        }
        nr_used
    }

    /// The expected result of a change of an existing memslot; it is made if that is `Ok`.
    pub fn change(
        &mut self,
        id: u32,
        range: GfnRange,
        flags: MemoryRegionFlags,
        bitmap: Option<&Userfault>,
    ) -> Result<(), SlotError> {
        let before = self.slots.get(&id).ok_or(SlotError::NoBacking { slot: id })?;
        let (start, moves) = (range.start, range.start != before.range.start);
        let resizes = range.nr_pages() != before.range.nr_pages();
        if resizes && (moves || before.flags.contains(super::ops::GUEST_MEMFD)) {
            return Err(SlotError::SizeFixed { slot: id, memory_size: range.nr_pages() * slat::PAGE_SIZE });
        }
        if (before.flags ^ flags).contains(READONLY) {
            return Err(SlotError::ReadOnlyFixed { slot: id });
        }
        let userfault = before.userfault_after(id, range, flags, bitmap)?;
        let begins_userfault = userfault.is_some() && bitmap.is_some();
        if let Some(other) = self.overlapping(id, range) {
            return Err(SlotError::Overlap { slot: id, gpa: start.gpa(), other });
        }
        let (old_range, begins) = (before.range, flags.contains(LOG) && !before.flags.contains(LOG));
        let ends = (before.flags - flags).intersects(LOG | USERFAULT);
        if moves || begins_userfault {
            self.zap_range(old_range);
        } else if range.end < old_range.end {
            self.zap_range(GfnRange { start: range.end, end: old_range.end });
        }
        if !moves && begins && self.config.manual_protect != ManualProtect::InitiallySet {
            if self.config.huge_page_logging.splits_eagerly() {
                self.split_range(range, self.largest_logged_write(), |_| true);
            }
            self.protect(range, &log_words(range.nr_pages(), true));
        }
        let slot = self.slots.get_mut(&id).ok_or(SlotError::NoSuchSlot { slot: id })?;
        (slot.range, slot.flags, slot.userfault) = (range, flags, userfault);
        if begins || !flags.contains(LOG) {
            let are_set = begins && self.config.manual_protect == ManualProtect::InitiallySet;
            slot.dirty = log_words(range.nr_pages(), are_set);
        } else if range != old_range {
            // All pages of a memslot that logs have another address now, or another log.
            slot.dirty = log_words(range.nr_pages(), true);
        }
        if ends && !moves {
            self.recover_range(range);
        }
        Ok(())
    }
}
