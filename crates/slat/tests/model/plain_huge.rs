//! Huge pages in the plain model: split ahead of time, and recovered.

use super::*;

impl Model {
    /// Splits the leaves above `target` that reach into `range` and for which `is_wanted` holds,
    /// from the largest down. Returns how many.
    pub fn split_range(&mut self, range: GfnRange, target: Level, is_wanted: impl Fn(GfnRange) -> bool) -> u64 {
        let mut nr_split = 0;
        if range.is_empty() {
            return 0;
        }
        for level in [Level::L1G, Level::L2M].into_iter().filter(|level| *level > target) {
            let start = range.start.align_down(level).0;
            let huge: Vec<u64> = self
                .leaves
                .range(start..range.end.0)
                .filter(|(first, leaf)| leaf.level == level && is_wanted(Gfn(**first).block(level)))
                .map(|(first, _)| *first)
                .collect();
            nr_split += huge.len() as u64;
            for first in huge {
                self.tables.insert((level, first));
                if !self.first_write_faults(level.down())
                    && let Some(leaf) = self.leaves.get_mut(&first)
                {
                    // The dirty bits of the parts record writes.
                    leaf.writable |= leaf.host_writable && !leaf.tracked;
                }
                self.split(first);
            }
        }
        nr_split
    }

    /// Recovers huge leaves in `range`. Returns how many.
    pub fn recover_range(&mut self, range: GfnRange) -> u64 {
        let mut nr_recovered = 0;
        for level in [Level::L2M, Level::L1G] {
            let is_inside = |first: &u64| range.covers(Gfn(*first).block(level));
            let tables = self.tables.range((level, 0)..=(level, u64::MAX)).map(|table| table.1);
            let tables: Vec<u64> = tables.filter(is_inside).collect();
            nr_recovered += tables.into_iter().filter(|first| self.recover(level, *first)).count() as u64;
        }
        nr_recovered
    }

    /// Makes a leaf of the page-table page at the PTE of `level` for `first`, if that is allowed.
    fn recover(&mut self, level: Level, first: u64) -> bool {
        let (block, parts) = (Gfn(first).block(level), level.down());
        let below = || self.leaves.range(block.start.0..block.end.0);
        let Some((gfn, leaf)) = below().find(|(_, leaf)| leaf.level == parts).map(|(gfn, leaf)| (*gfn, *leaf)) else {
            return false;
        };
        if self.free_level(Gfn(first), level) != Some(level) {
            return false;
        }
        let Some(slot) = self.slot_at(Gfn(gfn)).map(|id| &self.slots[&id]) else { return false };
        let logs = slot.flags.contains(LOG);
        if logs && (self.logs_by_dirty_bits() || level > self.largest_logged_write()) {
            return false;
        }
        // The host's answer for the first mapped page.
        let is_same_frame = slot.frame(Gfn(gfn)).pfn == leaf.pfn;
        if !slot.allows_leaf(block, level) || !is_same_frame || slot.level(Gfn(gfn), level) < level {
            return false;
        }
        // A read-only answer to a read does not report a writable block.
        if leaf.host_writable && slot.frame(Gfn(gfn)).writes != Writes::Allowed {
            return false;
        }
        // Many large leaves are not zapped because one is missing, or smaller.
        if parts > Level::L4K && !(below().count() == 512 && below().all(|(_, leaf)| leaf.level == parts)) {
            return false;
        }
        let expected = |(part, (gfn, part_leaf)): (u64, (&u64, &Leaf))| {
            let offset = part * parts.nr_pages();
            *gfn == first + offset
                && part_leaf.pfn == leaf.pfn + offset
                && part_leaf.host_writable == leaf.host_writable
        };
        let is_whole = below().count() == 512 && (0..).zip(below()).all(expected);
        let tracked = below().all(|(_, leaf)| leaf.tracked);
        let writable = leaf.host_writable && !logs && !tracked;
        let whole = Leaf {
            pfn: leaf.pfn,
            level,
            writable,
            host_writable: leaf.host_writable,
            accessed: !tracked
                && (self.config.access_tracking == AccessTracking::Faults || below().any(|(_, leaf)| leaf.accessed)),
            dirty: below().any(|(_, leaf)| leaf.dirty || leaf.was_dirty) || (self.writes_set_no_bit() && writable),
            was_dirty: false,
            tracked,
        };
        let gone: Vec<u64> = below().map(|(gfn, _)| *gfn).collect();
        for gfn in gone {
            if is_whole {
                self.leaves.remove(&gfn);
            } else {
                self.zap_leaf(gfn);
            }
        }
        self.tables.remove(&(level, first));
        self.protected.remove(&first);
        if is_whole {
            self.leaves.insert(first, whole);
        }
        is_whole
    }
}
