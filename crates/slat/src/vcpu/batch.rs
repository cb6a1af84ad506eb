//! Batches of 4 KiB pages that share guards and walks: those of a prefault, and the neighbours of
//! fault-around.
//!
//! The order is that of `table/invalidation_seq.rs`, for all pages at once. The caller
//! 1. reads all PTEs, then the ranges in flight, then the memslot, inside a guard,
//! 2. asks the host, outside of any guard,
//! 3. installs each leaf by an exchange of its own, on the very PTE that step 1 read.

#![expect(unsafe_code, reason = "installs leaves where it has found empty PTEs")]

use super::{Fault, Found, InstallPlan};
use crate::addr::{Access, Gfn, GfnRange, Level, PageSize, Pfn};
use crate::dirty::log;
use crate::dirty::ring::DirtyRing;
use crate::format::Format;
use crate::host::{Host, Resolved};
use crate::second_stage::install::NewLeaf;
use crate::slot::MemoryRegionFlags;
use crate::stats::Counter;
use crate::sync::fence_after_rmw;
use crate::table::Tree;
use crate::table::cursor::Cursor;
use crate::table::invalidation_seq::InvalidationSeq;
use crate::table::pte::Pte;
use crate::table::retire::{Guard, HazardPointer};

/// Largest batch: no more than a ring that is not soft-full has room for. It is on the stack.
pub(super) const BATCH_PAGES: usize = 64;
const _: () = assert!(BATCH_PAGES <= DirtyRing::RESERVE as usize);

/// What happens to the other pages when nothing can be installed for one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Missing {
    /// The pages after it are left out.
    Stop,
    /// Only that page is left out.
    PassOver,
}

/// Some pages, the PTEs that were read for them, and the leaves to install there.
pub(super) struct Batch<P, F, const CAPACITY: usize> {
    /// The access that the leaves are installed for.
    access: Access,
    missing: Missing,
    nr_pages: usize,
    /// Maps an index to its page.
    page: P,
    /// The empty PTE; frozen where nothing is to be installed.
    seen: [Pte<F>; CAPACITY],
    leaves: [Pte<F>; CAPACITY],
}

impl<P: Fn(usize) -> Gfn, F: Format, const CAPACITY: usize> Batch<P, F, CAPACITY> {
    pub(super) fn new(access: Access, missing: Missing, page: P) -> Batch<P, F, CAPACITY> {
        let nothing = [Pte::FROZEN; CAPACITY];
        Batch { access, missing, nr_pages: 0, page, seen: nothing, leaves: nothing }
    }

    #[inline]
    pub(super) fn nr_pages(&self) -> usize {
        self.nr_pages
    }

    /// Whether nothing is to be installed.
    pub(super) fn is_empty(&self) -> bool {
        self.seen[..self.nr_pages].iter().all(|&seen| seen == Pte::FROZEN)
    }

    /// The page that is added next.
    pub(super) fn next_page(&self) -> Gfn {
        (self.page)(self.nr_pages)
    }

    /// Adds the next page, unless the batch is full: with the number of its empty PTE, or `None` if
    /// nothing is to be installed.
    #[inline]
    pub(super) fn push(&mut self, seen: Option<InvalidationSeq>) {
        if let Some(pte) = self.seen.get_mut(self.nr_pages) {
            *pte = seen.map_or(Pte::FROZEN, Pte::empty);
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
                *seen = Pte::FROZEN;
            }
        }
    }
}

/// Pages with the same rights whose frames follow each other, as one answer of the host says. Two
/// leaves of a run differ only in their frame.
#[derive(Clone, Copy)]
pub(super) struct Run<F> {
    pub(super) pages: GfnRange,
    /// Of the first page.
    pub(super) leaf: Pte<F>,
}

impl<F: Format> Run<F> {
    /// From the leaf `leaf` of `level`, which was made of `resolved` for `gfn`, to the end of the
    /// host's block.
    #[inline]
    pub(super) fn new(gfn: Gfn, resolved: Resolved, leaf: Pte<F>, level: Level) -> Run<F> {
        let inside = level.nr_pages() - 1;
        let pfn = Pfn(resolved.pfn.0 & !inside);
        let block_pages = resolved.max_size.level().nr_pages();
        let pages = GfnRange::new(gfn.align_down(level), block_pages - (pfn.0 & (block_pages - 1)));
        Run { pages, leaf }
    }

    /// The leaf of 4 KiB for `gfn`, which is in the run.
    #[inline]
    pub(super) fn small_leaf(&self, gfn: Gfn) -> Pte<F> {
        self.leaf.behind(gfn.0 - self.pages.start.0, Level::L4K)
    }
}

impl<'v, H: Host, F: Format> Fault<'v, H, F> {
    /// Returns a test whether a page is in no range in flight; `None` if this fault's page is in
    /// one. Call it after all PTEs were read and before the memslot is.
    pub(super) fn free_pages(&self) -> Option<impl Fn(Gfn) -> bool + use<'v, H, F>> {
        let in_flight = &self.op.tree.in_flight;
        // Mostly this block is everything, and then no page is tested by itself.
        let free = self.gfn.block(in_flight.free_level(self.gfn, self.op.tree.root_level())?);
        Some(move |gfn| free.contains(gfn) || in_flight.free_level(gfn, Level::L4K).is_some())
    }

    /// Plans small leaves in the memslot of this fault's page. Leaves out the pages of `batch` that
    /// the plan does not fit. Call it last in the look.
    #[inline(always)]
    pub(super) fn plan_batch<'r, P: Fn(usize) -> Gfn, const CAPACITY: usize>(
        &self,
        guard: &Guard<'_>,
        hazard: HazardPointer<'r>,
        batch: &mut Batch<P, F, CAPACITY>,
    ) -> Option<InstallPlan<'r, H::Backing, F>> {
        let slot = self.op.slots.find(guard, self.gfn)?;
        if slot.flags().contains(MemoryRegionFlags::PINNED) {
            return None;
        }
        let attributes = slot.attributes_of(self.gfn);
        batch.retain(|gfn| {
            slot.range().contains(gfn)
                && (slot.is_plain() || (slot.may_use(gfn) && slot.attributes_of(gfn) == attributes))
        });
        Some(InstallPlan {
            backing: slot.keep_for_resolve(hazard),
            slot: slot.range(),
            flags: slot.flags(),
            attributes,
            level: Level::L4K,
            max_level: Level::L4K,
            found: Found::Empty(InvalidationSeq::FIRST),
            answer: None,
        })
    }

    /// Makes the leaves of `batch`, of 4 KiB and not used yet. `leaf` asks the host for a page;
    /// later pages of the same answer follow from it.
    #[inline]
    pub(super) fn make_leaves<P: Fn(usize) -> Gfn, const CAPACITY: usize>(
        &self,
        batch: &mut Batch<P, F, CAPACITY>,
        leaf: impl Fn(Gfn) -> Option<(Resolved, NewLeaf)>,
    ) {
        let Tree { encoding, config, .. } = self.op.tree;
        let mut run: Option<Run<F>> = None;
        let entries = batch.seen[..batch.nr_pages].iter().zip(&mut batch.leaves);
        for (index, (&seen, new)) in entries.enumerate() {
            if seen == Pte::FROZEN {
                continue;
            }
            let gfn = (batch.page)(index);
            if let Some(run) = run.as_ref().filter(|run| run.pages.contains(gfn)) {
                *new = run.small_leaf(gfn);
            } else if let Some((resolved, leaf)) = leaf(gfn) {
                let leaf = NewLeaf { level: Level::L4K, used: None, ..leaf }.pte(encoding, config.access_tracking);
                *new = leaf;
                let has_more = resolved.max_size > PageSize::Size4K;
                run = has_more.then(|| Run::new(gfn, resolved, leaf, Level::L4K));
            } else if batch.missing == Missing::Stop {
                batch.nr_pages = index;
                return;
            }
        }
    }

    /// Installs the leaves of `batch`, all for pages in `slot_range`. Leaves out the pages whose
    /// PTEs changed since the look. Returns the number of leaves.
    #[inline(always)]
    pub(super) fn install_batch<P: Fn(usize) -> Gfn, const CAPACITY: usize>(
        &self,
        guard: &Guard<'_>,
        batch: &mut Batch<P, F, CAPACITY>,
        slot_range: GfnRange,
    ) -> u64 {
        let (nr_leaves, any_writable) = self.exchange_batch(guard, batch);
        // All at once: the exchanges account nothing.
        self.op.stats().add(Counter::Installed4K, nr_leaves);
        if any_writable && self.marks_for(batch.access, Level::L4K) {
            self.mark_batch(guard, batch, slot_range);
        }
        nr_leaves
    }

    /// Exchanges the PTEs that were seen for the leaves. Returns the number of leaves, and whether
    /// one is writable.
    // By itself, as `mark_batch`: their stack frames do not add up.
    #[inline(never)]
    fn exchange_batch<P: Fn(usize) -> Gfn, const CAPACITY: usize>(
        &self,
        guard: &Guard<'_>,
        batch: &mut Batch<P, F, CAPACITY>,
    ) -> (u64, bool) {
        let mut cursor = Cursor::new(self.op.tree, guard, self.gfn);
        let mut nr_leaves = 0;
        let mut any_writable = false;
        let entries = batch.seen[..batch.nr_pages].iter().zip(&mut batch.leaves);
        for (index, (&seen, leaf)) in entries.enumerate() {
            if *leaf == Pte::FROZEN {
                continue;
            }
            // An empty PTE is its sequence number: an equal value has an equal number.
            let pte = cursor.move_to_pte((batch.page)(index), Level::L4K);
            // SAFETY: `push` stores empty PTEs, `make_leaves` leaves of this level. Else a frozen
            // one would be there, which is passed over above.
            if pte.is_some_and(|pte| unsafe { pte.exchange_unchecked(seen, *leaf) }.is_ok()) {
                any_writable |= leaf.is_writable();
                nr_leaves += 1;
            } else if batch.missing == Missing::Stop {
                batch.nr_pages = index;
                break;
            } else {
                *leaf = Pte::FROZEN;
            }
        }
        (nr_leaves, any_writable)
    }

    /// As `mark_if_logging` does for one leaf: the leaves are writable before the flags are read.
    #[inline(never)]
    fn mark_batch<P: Fn(usize) -> Gfn, const CAPACITY: usize>(
        &self,
        guard: &Guard<'_>,
        batch: &Batch<P, F, CAPACITY>,
        slot_range: GfnRange,
    ) {
        fence_after_rmw();
        let slot = self.op.slots.find(guard, self.gfn);
        if slot.is_none_or(|slot| slot.logs() || slot.range() != slot_range) {
            for (index, &leaf) in batch.leaves[..batch.nr_pages].iter().enumerate() {
                if leaf != Pte::FROZEN && leaf.is_writable() {
                    log::mark_page_if_logging(self.op.slots, guard, self.ring, (batch.page)(index));
                }
            }
        }
    }
}
