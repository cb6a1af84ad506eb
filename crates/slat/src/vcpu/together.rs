//! Pages of 4 KiB that go the way of a fault together, so that they share sections and walks: those of a prefault, and the
//! neighbours that a fault maps along.
//!
//! The order is that of `table/stamp.rs`, for all at once: all entries are looked at, then the published ranges, then the slot;
//! the host is asked outside of the section; and each leaf is installed by an exchange of its own on the very entry that the
//! look saw.

use super::{Fault, Found, InstallPlan};
use crate::addr::{Access, Gfn, GfnRange, Level, PageSize, Pfn};
use crate::dirty::log;
use crate::dirty::ring::DIRTY_RING_RESERVE;
use crate::format::{Entry, Format};
use crate::host::{Host, Resolved};
use crate::stats::Counter;
use crate::sync::fence_after_rmw;
use crate::table::entry::{self, Stamp};
use crate::table::retire::{HazardPointer, Section};
use crate::table::walk::Cursor;

/// Most pages that go together: no more than a ring that is not soft-full has room for. They are on the stack.
pub(super) const TOGETHER: usize = 32;
const _: () = assert!(TOGETHER <= DIRTY_RING_RESERVE as usize);

/// Stands for the entry, or the leaf, of a page for which there is nothing to install: a value that no empty entry has, and
/// no leaf.
pub(super) const NOTHING: Entry = Entry(u64::MAX);

/// What becomes of the other pages when nothing can be installed for one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Missing {
    /// Those behind it are left.
    Stop,
    /// It is passed over.
    PassOver,
}

/// Some pages, the entries that were seen for them, and what is to be installed there.
pub(super) struct Batch<P, const CAPACITY: usize> {
    /// What the leaves are for.
    access: Access,
    missing: Missing,
    nr_pages: usize,
    /// The page of each index.
    page: P,
    /// The empty entry, or [`NOTHING`] where nothing is to be installed.
    seen: [Entry; CAPACITY],
    leaves: [Entry; CAPACITY],
}

impl<P: Fn(usize) -> Gfn, const CAPACITY: usize> Batch<P, CAPACITY> {
    pub(super) fn new(access: Access, missing: Missing, page: P) -> Batch<P, CAPACITY> {
        let nothing = [NOTHING; CAPACITY];
        Batch { access, missing, nr_pages: 0, page, seen: nothing, leaves: nothing }
    }

    #[inline]
    pub(super) fn nr_pages(&self) -> usize {
        self.nr_pages
    }

    /// Whether nothing is to be installed.
    pub(super) fn is_empty(&self) -> bool {
        self.seen[..self.nr_pages].iter().all(|&seen| seen == NOTHING)
    }

    /// The page that is added next.
    pub(super) fn next_page(&self) -> Gfn {
        (self.page)(self.nr_pages)
    }

    /// Adds the next page, unless it is full.
    #[inline]
    pub(super) fn push(&mut self, seen: Entry) {
        if let Some(entry) = self.seen.get_mut(self.nr_pages) {
            *entry = seen;
            self.nr_pages += 1;
        }
    }

    /// Leaves out the pages that do not fit.
    #[inline]
    pub(super) fn retain(&mut self, fits: impl Fn(Gfn) -> bool) {
        for (index, seen) in self.seen[..self.nr_pages].iter_mut().enumerate() {
            if !fits((self.page)(index)) {
                if self.missing == Missing::Stop {
                    self.nr_pages = index;
                    return;
                }
                *seen = NOTHING;
            }
        }
    }
}

/// Pages whose frames follow each other, as the host has said of one of them; with the same rights.
#[derive(Clone, Copy)]
pub(super) struct Run {
    pub(super) pages: GfnRange,
    /// Frame of the first.
    pfn: Pfn,
    /// The bits of each leaf that say neither where its memory is nor that it is a leaf.
    attributes: u64,
}

impl Run {
    /// From the leaf `leaf` of `level`, which was made of `resolved` for `gfn`, to the end of the block that the host has told
    /// of.
    #[inline]
    pub(super) fn new<F: Format>(gfn: Gfn, resolved: Resolved, leaf: Entry, level: Level) -> Run {
        let inside = level.nr_pages() - 1;
        let pfn = Pfn(resolved.pfn.0 & !inside);
        let block_pages = resolved.max_size.level().nr_pages();
        // Nothing but the frame differs between two leaves of a run.
        let attributes = leaf.0 & !F::leaf(pfn, level).0;
        let pages = GfnRange::new(gfn.align_down(level), block_pages - (pfn.0 & (block_pages - 1)));
        Run { pages, pfn, attributes }
    }

    /// The leaf of 4 KiB for `gfn`, which is in the run.
    #[inline]
    pub(super) fn small_leaf<F: Format>(&self, gfn: Gfn) -> Entry {
        self.leaf::<F>(Pfn(self.pfn.0 + (gfn.0 - self.pages.start.0)), Level::L4K)
    }

    /// The leaf of `level` for the first page. The next call gives the one behind it.
    #[inline(always)]
    pub(super) fn pop<F: Format>(&mut self, level: Level) -> Entry {
        let leaf = self.leaf::<F>(self.pfn, level);
        self.pfn.0 += level.nr_pages();
        leaf
    }

    #[inline(always)]
    fn leaf<F: Format>(&self, pfn: Pfn, level: Level) -> Entry {
        Entry(F::leaf(pfn, level).0 | self.attributes)
    }
}

impl<'v, H: Host, F: Format> Fault<'v, H, F> {
    /// What says whether a page is in no published range, if this fault's is in none. To be asked when all entries have been
    /// read, and before the slot is.
    pub(super) fn free_pages(&self) -> Option<impl Fn(Gfn) -> bool + use<'v, H, F>> {
        let published = &self.tree.published;
        // Mostly all there is; then the pages around this one are not asked for one by one.
        let free = self.gfn.block(published.free_level(self.gfn, F::ROOT_LEVEL)?);
        Some(move |gfn| free.contains(gfn) || published.free_level(gfn, Level::L4K).is_some())
    }

    /// What small leaves are to be made of, in the slot that has this fault's page; leaves out the pages of `batch` for which
    /// that does not hold. To be asked last.
    #[inline(always)]
    pub(super) fn plan_together<'r, P: Fn(usize) -> Gfn, const CAPACITY: usize>(
        &self,
        section: &Section<'_>,
        hazard: HazardPointer<'r>,
        batch: &mut Batch<P, CAPACITY>,
    ) -> Option<InstallPlan<'r, H::Backing>> {
        let slot = self.slots.find(section, self.gfn)?;
        let attributes = slot.attributes_of(self.gfn);
        batch.retain(|gfn| {
            slot.range().contains(gfn)
                && (slot.is_plain() || (slot.check_userfault(gfn).is_ok() && slot.attributes_of(gfn) == attributes))
        });
        Some(InstallPlan {
            backing: slot.keep_for_resolve(hazard),
            slot: slot.range(),
            flags: slot.flags(),
            attributes,
            level: Level::L4K,
            max_level: Level::L4K,
            found: Found::Empty(Stamp::FIRST),
        })
    }

    /// Makes the leaves of `batch`: what `leaf` answers for a page with what the host has told, or follows from that for one
    /// before.
    #[inline]
    pub(super) fn make_leaves<P: Fn(usize) -> Gfn, const CAPACITY: usize>(
        &self,
        batch: &mut Batch<P, CAPACITY>,
        leaf: impl Fn(Gfn) -> Option<(Resolved, Entry)>,
    ) {
        let mut run: Option<Run> = None;
        let entries = batch.seen[..batch.nr_pages].iter().zip(&mut batch.leaves);
        for (index, (&seen, new)) in entries.enumerate() {
            if seen == NOTHING {
                continue;
            }
            let gfn = (batch.page)(index);
            if let Some(run) = run.as_ref().filter(|run| run.pages.contains(gfn)) {
                *new = run.small_leaf::<F>(gfn);
            } else if let Some((resolved, leaf)) = leaf(gfn) {
                *new = leaf;
                let has_more = resolved.max_size > PageSize::Size4K;
                run = has_more.then(|| Run::new::<F>(gfn, resolved, leaf, Level::L4K));
            } else if batch.missing == Missing::Stop {
                batch.nr_pages = index;
                return;
            }
        }
    }

    /// Installs the leaves of `batch`, all of which are for pages in `slot_range`; leaves out the pages that have been changed
    /// since the look. Returns the number of leaves.
    #[inline(never)]
    pub(super) fn install_together<P: Fn(usize) -> Gfn, const CAPACITY: usize>(
        &self,
        section: &Section<'_>,
        batch: &mut Batch<P, CAPACITY>,
        slot_range: GfnRange,
    ) -> u64 {
        let mut cursor = Cursor::new(self.tree, section, self.gfn);
        let mut nr_leaves = 0;
        let mut any_writable = false;
        let entries = batch.seen[..batch.nr_pages].iter().zip(&mut batch.leaves);
        for (index, (&seen, leaf)) in entries.enumerate() {
            if *leaf == NOTHING {
                continue;
            }
            // An empty entry is its stamp: where the entry is the one that was seen, so is the stamp.
            let entry = cursor.move_to_entry((batch.page)(index), Level::L4K);
            if entry.is_some_and(|entry| entry.compare_exchange::<F>(seen, *leaf).is_ok()) {
                any_writable |= entry::is_writable::<F>(*leaf);
                nr_leaves += 1;
            } else if batch.missing == Missing::Stop {
                batch.nr_pages = index;
                break;
            } else {
                *leaf = NOTHING;
            }
        }
        self.record.stats.add(Counter::Installed4K, nr_leaves);
        if any_writable && self.marks_for(batch.access, Level::L4K) {
            // As `mark_if_logging` would for each: the leaves are writable before the flags are read.
            fence_after_rmw();
            let slot = self.slots.find(section, self.gfn);
            if slot.is_none_or(|slot| slot.logs() || slot.range() != slot_range) {
                for (index, &leaf) in batch.leaves[..batch.nr_pages].iter().enumerate() {
                    if leaf != NOTHING && entry::is_writable::<F>(leaf) {
                        log::mark_page_if_logging(self.slots, section, self.ring, (batch.page)(index));
                    }
                }
            }
        }
        nr_leaves
    }
}
