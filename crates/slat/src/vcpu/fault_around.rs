//! Fault-around: a fault also maps resident neighbours of its page. A guest that walks through such
//! memory then faults once for a window of pages.
//!
//! # Guarantees
//! - A neighbour gets what a read would get, so it is never written unseen where the memslot logs.
//! - A neighbour counts as not used. Where CPUs do not set A, a leaf counts as used as soon as it
//!   is installed. Where they do not set D, it counts as dirty as soon as it is writable. There
//!   neighbours are mapped without W: a page that counts as used by mistake is found at its next
//!   aging, but one that counts as dirty would be written back for nothing.
//!
//! # Implementation
//! First the fault maps its own page. Then it
//! 1. reads the other PTEs of the window, in the order of `batch`,
//! 2. asks the host which of their pages are resident,
//! 3. installs each neighbour by an exchange of its own, and passes over a PTE that changed.
//!
//! A window of more than [`GROUP`] pages is done group by group, the fault's own group first. So a
//! fault needs little stack.
//!
//! # Why it is correct
//! The host's answer for the fault's own page is not used for its neighbours, even if that answer
//! was a large block. It may be older than the PTEs of step 1, and a sequence number guards only
//! answers that came after it was read.

use super::Fault;
use super::batch::{Batch, Missing};
use crate::addr::{Access, Gfn, GfnRange, Level};
use crate::config::FaultAround;
use crate::dirty::ring::DirtyRing;
use crate::format::Format;
use crate::host::Host;
use crate::second_stage::install::{NewLeaf, Rights};
use crate::slot::MemoryAttributes;
use crate::stats::Counter;
use crate::sync::Side;
use crate::table::cursor::Cursor;
use crate::table::pte::State;
use crate::table::retire::{Guard, HazardPointer};

/// Pages of a window that are mapped as one batch, which is on the stack.
const GROUP: usize = 8;

// A ring that is not soft-full has room for a whole window, if the memslot begins to log now.
const _: () = assert!(FaultAround::MAX_PAGES as u32 <= DirtyRing::RESERVE);

impl<H: Host, F: Format> Fault<'_, H, F> {
    /// Whether a fault that installed a leaf of `level` maps its neighbours.
    #[inline]
    pub(super) fn maps_around(&self, level: Level) -> bool {
        self.op.tree.config.fault_around != FaultAround::Off && level == Level::L4K
    }

    /// Maps the neighbours of this fault's page, which is mapped by a leaf of 4 KiB now.
    #[cold]
    #[inline(never)]
    pub(super) fn map_around(&self, mut hazard: HazardPointer<'_>) {
        // Windows and groups are aligned, and a window is a multiple of a group.
        let window_pages = self.op.tree.config.fault_around.nr_pages();
        let group_pages = window_pages.min(GROUP as u64);
        let own = self.gfn.0 & !(group_pages - 1);
        // Numbers that differ from the own group's below the size of the window only: each group
        // once, the own first.
        let mut offset = 0;
        while offset < window_pages {
            self.map_group(hazard.reborrow(), own ^ offset, group_pages);
            offset += group_pages;
        }
    }

    /// Maps the neighbours among the `nr_pages` pages from `first` on. Its parts are never inlined,
    /// so that their stack frames do not add up.
    #[inline(always)]
    fn map_group(&self, hazard: HazardPointer<'_>, first: u64, nr_pages: u64) {
        let page = |index| Gfn(first + index as u64);
        let mut neighbours = Batch::<_, F, GROUP>::new(self.access_around(), Missing::PassOver, page);
        if let Some(slot_range) = self.resolve_around(hazard, nr_pages, &mut neighbours) {
            self.install_around(&mut neighbours, slot_range);
        }
    }

    #[inline(never)]
    fn install_around<P: Fn(usize) -> Gfn>(&self, neighbours: &mut Batch<P, F, GROUP>, slot_range: GfnRange) {
        let locked = self.op.pin_locked(Side::Read);
        let nr_leaves = self.install_batch(&locked.guard, neighbours, slot_range);
        self.op.stats().add(Counter::Around, nr_leaves);
    }

    /// The access that the neighbours are mapped for.
    fn access_around(&self) -> Access {
        if self.access.is_fetch() { self.access } else { Access::Read }
    }

    /// Makes leaves for the first `nr_pages` of `neighbours`. Returns the range of their memslot,
    /// or `None` if there is nothing to install.
    #[inline(never)]
    fn resolve_around<P: Fn(usize) -> Gfn>(
        &self,
        hazard: HazardPointer<'_>,
        nr_pages: u64,
        neighbours: &mut Batch<P, F, GROUP>,
    ) -> Option<GfnRange> {
        let tree = self.op.tree;
        let access = self.access_around();
        let guard = self.op.pin();
        self.look_around(&guard, nr_pages, neighbours);
        if neighbours.is_empty() {
            return None;
        }
        neighbours.retain(self.free_pages()?);
        let plan = self.plan_batch(&guard, hazard, neighbours)?;
        drop(guard);
        if plan.attributes.contains(MemoryAttributes::PRIVATE) {
            return None;
        }
        let config = &tree.config;
        self.make_leaves(neighbours, |gfn| {
            let resolved = tree.host.resolve_resident(plan.backing.get(), gfn, plan.page(gfn), access)?;
            let leaf = plan.leaf(tree, self.max_opened(), gfn, access, resolved).ok()?;
            let is_unseen = config.access_tracking.writes_are_unseen::<F>() && leaf.rights == Rights::Writable;
            let rights = if is_unseen { Rights::WriteProtected } else { leaf.rights };
            Some((resolved, NewLeaf { rights, ..leaf }))
        });
        Some(plan.slot)
    }

    /// Finds the empty PTEs of `neighbours`, without this fault's own. It finds none if the page is
    /// no longer mapped by a leaf of 4 KiB.
    #[inline(never)]
    fn look_around<P: Fn(usize) -> Gfn>(&self, guard: &Guard<'_>, nr_pages: u64, neighbours: &mut Batch<P, F, GROUP>) {
        let mut cursor = Cursor::new(self.op.tree, guard, self.gfn);
        if cursor.descend_to_lowest().1 != State::Leaf || cursor.level() != Level::L4K {
            return;
        }
        // All in one page-table page: the window is aligned and smaller than that.
        for _ in 0..nr_pages {
            let gfn = neighbours.next_page();
            cursor.move_to(gfn);
            let value = cursor.pte().load();
            // An unflushed PTE is left to a fault of its own, which flushes first.
            let seq = match value.state(Level::L4K) {
                State::Empty(seq) if gfn != self.gfn && !seq.is_unflushed() => Some(seq),
                _ => None,
            };
            neighbours.push(seq);
        }
    }
}
