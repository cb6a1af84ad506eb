//! The dirty log of the plain model.

use super::*;
use slat::error::LogError;

impl Model {
    /// Write-protects the pages `bits` of the memslot that has `range`, or clears their D. Where a
    /// block has many, protects their directory entry.
    pub(super) fn protect(&mut self, range: GfnRange, bits: &[u64]) {
        const FEW: u64 = 16;
        let is_lazy = self.closes && self.config.dirty_tracking == DirtyTracking::WriteProtect;
        let by_dirty_bits = self.logs_by_dirty_bits();
        let has = |gfn: u64| {
            let page = gfn.wrapping_sub(range.start.0);
            page < range.nr_pages() && bits[page as usize / 64] >> (page % 64) & 1 != 0
        };
        let blocks: Vec<u64> =
            self.tables.range((Level::L2M, 0)..=(Level::L2M, u64::MAX)).map(|table| table.1).collect();
        let mut just_protected = BTreeSet::new();
        for first in blocks.into_iter().filter(|first| is_lazy && range.covers(Gfn(*first).block(Level::L2M))) {
            if (first..first + 512).filter(|gfn| has(*gfn)).count() as u64 > FEW {
                self.protected.insert(first);
                just_protected.insert(first);
            }
        }
        let first = self.leaf_at(range.start).map_or(range.start.0, |(first, _)| first);
        for (&first, leaf) in self.leaves.range_mut(first..range.end.0) {
            let block = GfnRange::new(Gfn(first), leaf.level.nr_pages()).intersection(range);
            if just_protected.contains(&Gfn(first).align_down(Level::L2M).0) || !(block.start.0..block.end.0).any(has) {
                continue;
            }
            if by_dirty_bits {
                (leaf.dirty, leaf.was_dirty) = (false, leaf.dirty || leaf.was_dirty);
            }
            if !by_dirty_bits || leaf.level > Level::L4K {
                leaf.writable = false;
            }
        }
    }

    /// Whether the log of `nr_pages` pages from `first_page` on of memslot `id` may be requested,
    /// with a bitmap that is long enough.
    pub fn check_range(&self, id: u32, (first_page, nr_pages): (u64, u64)) -> Result<(), LogError> {
        let slot = self.slots.get(&id).ok_or(LogError::NoSuchSlot { slot: id })?;
        let slot_pages = slot.range.nr_pages();
        if !slot.flags.contains(LOG) {
            Err(LogError::NotLogging { slot: id })
        } else if nr_pages == 0 {
            Err(empty_range(slot, first_page))
        } else if u128::from(first_page) + u128::from(nr_pages) > u128::from(slot_pages) {
            Err(LogError::RangePastEnd { slot: id, first_page, nr_pages, slot_pages })
        } else if first_page % 64 != 0 || (nr_pages % 64 != 0 && first_page + nr_pages != slot_pages) {
            Err(LogError::UnalignedRange { slot: id, first_page, nr_pages })
        } else {
            Ok(())
        }
    }

    /// The log of some pages of memslot `id`; cleared, unless clears are manual.
    pub fn get(&mut self, id: u32, pages: (u64, u64)) -> Result<Vec<u64>, LogError> {
        self.check_range(id, pages)?;
        self.collect(id, pages);
        let words = words_of(pages);
        let found = self.slots[&id].dirty[words.clone()].to_vec();
        if self.config.manual_protect == ManualProtect::Disabled {
            self.clear_and_protect(id, words.start, &found);
        }
        Ok(found)
    }

    /// Clears what `mask` selects of some pages of the log of memslot `id`. Returns their number.
    pub fn clear(&mut self, id: u32, pages: (u64, u64), mask: &[u64]) -> Result<u64, LogError> {
        self.check_range(id, pages)?;
        let words = words_of(pages);
        let is_eager = self.config.huge_page_logging.splits_eagerly();
        if is_eager && self.config.manual_protect == ManualProtect::InitiallySet {
            let start = self.slots[&id].range.start.0 + pages.0;
            let range = GfnRange::new(Gfn(start), pages.1);
            let is_named = |block: GfnRange| {
                let named = block.intersection(range);
                let (first, last) = (named.start.0 - start, named.end.0 - 1 - start);
                mask[first as usize / 64..=last as usize / 64].iter().any(|word| *word != 0)
            };
            self.split_range(range, self.largest_logged_write(), is_named);
        }
        let bits: Vec<u64> =
            self.slots[&id].dirty[words.clone()].iter().zip(mask).map(|(word, mask)| word & mask).collect();
        self.clear_and_protect(id, words.start, &bits);
        Ok(bits.iter().map(|word| u64::from(word.count_ones())).sum())
    }

    /// Marks the pages that the CPUs have logged.
    fn collect(&mut self, id: u32, pages: (u64, u64)) {
        match self.config.dirty_tracking {
            DirtyTracking::WriteProtect | DirtyTracking::WriteProtectLeaves => {}
            DirtyTracking::DirtyBit => {
                let start = self.slots[&id].range.start.0 + pages.0;
                let leaves = self.leaves.range(start..start + pages.1);
                let dirty: Vec<u64> = leaves
                    .filter(|(_, leaf)| leaf.level == Level::L4K && leaf.dirty)
                    .map(|(first, _)| *first)
                    .collect();
                dirty.into_iter().for_each(|gfn| self.mark(GfnRange::new(Gfn(gfn), 1)));
            }
            DirtyTracking::PageModificationLog => {
                std::mem::take(&mut self.logged).into_iter().for_each(|gfn| self.mark(GfnRange::new(gfn, 1)));
            }
        }
    }

    /// Clears `bits`, all set, in the words from `first` on, and protects their pages, as many
    /// words at a time as the engine does in a turn. The pages of a block count as one group only
    /// within a turn.
    fn clear_and_protect(&mut self, id: u32, first: usize, bits: &[u64]) {
        const SUMMARY_WORD: usize = 64;
        let Some(slot) = self.slots.get_mut(&id) else { return };
        let range = slot.range;
        let mut turn = vec![0; slot.dirty.len()];
        let mut nr_words = 0;
        for (index, &word) in (first..).zip(bits) {
            if index % SUMMARY_WORD == 0 && nr_words > SUMMARY_WORD {
                self.protect(range, &turn);
                turn.fill(0);
                nr_words = 0;
            }
            if let Some(slot) = self.slots.get_mut(&id) {
                slot.dirty[index] &= !word;
            }
            turn[index] = word;
            nr_words += usize::from(word != 0);
        }
        if nr_words != 0 {
            self.protect(range, &turn);
        }
    }

    /// As [`Vm::mark_dirty`](slat::Vm::mark_dirty).
    pub fn mark_dirty(&mut self, id: u32, first_page: u64, nr_pages: u64) -> Result<(), LogError> {
        let slot = self.slots.get_mut(&id).ok_or(LogError::NoSuchSlot { slot: id })?;
        let slot_pages = slot.range.nr_pages();
        if nr_pages == 0 {
            return Err(empty_range(slot, first_page));
        }
        if u128::from(first_page) + u128::from(nr_pages) > u128::from(slot_pages) {
            return Err(LogError::RangePastEnd { slot: id, first_page, nr_pages, slot_pages });
        }
        slot.mark(GfnRange::new(Gfn(slot.range.start.0 + first_page), nr_pages));
        Ok(())
    }
}

/// The error for no pages from `first_page` on of `slot`.
fn empty_range(slot: &Slot, first_page: u64) -> LogError {
    let start = Gfn(slot.range.start.0.saturating_add(first_page));
    LogError::EmptyRange { start, end: start }
}

/// The words of a log that hold `pages` (first and number).
fn words_of((first_page, nr_pages): (u64, u64)) -> std::ops::Range<usize> {
    let first = first_page as usize / 64;
    first..first + nr_pages.div_ceil(64) as usize
}
