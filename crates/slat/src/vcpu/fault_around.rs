//! Fault-around: neighbours of the page that the guest has faulted on, which are resident anyway, are mapped along, so that
//! a guest that goes through such memory faults once for a window of pages.
//!
//! The fault itself goes its way. Once its page is mapped, the other entries of the window are looked
//! at, in the order of `together`, and the host is asked which of their pages are resident. The host's
//! answer for the fault's own page says nothing about them, even if it was a large block: that answer
//! may be older than the entries that were seen now, and a stamp guards only an answer that came after
//! it. Each neighbour is installed by an exchange of its own; one that has changed meanwhile is passed
//! over. A window of more than [`GROUP`] pages is done group by group, the fault's own first, so that a
//! fault needs little of the stack.
//!
//! A neighbour gets what a read would give it (so it is never written unseen where the slot logs), and counts as not used.
//! Where CPUs do not set A, a leaf is used as soon as it is there, and where they do not set D, dirty as soon as it can be
//! written; there it is mapped without the right to write: a page that somebody has used is found out when it is aged next,
//! but one that counts as written would be written back for nothing.

use super::Fault;
use super::together::{Batch, Missing, NOTHING};
use crate::addr::{Access, Gfn, GfnRange, Level};
use crate::config::{FaultAround, MAX_FAULT_AROUND_PAGES};
use crate::dirty::ring::DIRTY_RING_RESERVE;
use crate::format::Format;
use crate::host::Host;
use crate::second_stage::install::{NewLeaf, Rights};
use crate::slot::MemoryAttributes;
use crate::stats::Counter;
use crate::sync::Side;
use crate::table::entry::{self, State};
use crate::table::retire::{HazardPointer, Section};
use crate::table::walk::Cursor;

/// Pages of a window that go together: a fault has little of the stack.
const GROUP: usize = 8;

// A ring that is not soft-full has room for a whole window, if the slot begins to log meanwhile.
const _: () = assert!(MAX_FAULT_AROUND_PAGES as u32 <= DIRTY_RING_RESERVE);

impl<H: Host, F: Format> Fault<'_, H, F> {
    /// Whether a leaf of `level` is installed with its neighbours.
    #[inline]
    pub(super) fn maps_around(&self, level: Level) -> bool {
        self.tree.config.fault_around != FaultAround::Off && level == Level::L4K
    }

    /// Maps the neighbours of this fault's page, which is mapped by a leaf of 4 KiB now.
    #[cold]
    #[inline(never)]
    pub(super) fn map_around(&self, mut hazard: HazardPointer<'_>) {
        // Windows and groups are aligned, and the one is a multiple of the other.
        let window_pages = self.tree.config.fault_around.nr_pages();
        let group_pages = window_pages.min(GROUP as u64);
        let own = self.gfn.0 & !(group_pages - 1);
        let first = self.gfn.0 & !(window_pages - 1);
        self.map_group(hazard.reborrow(), own, group_pages);
        for group in (first..first + window_pages).step_by(GROUP) {
            if group != own {
                self.map_group(hazard.reborrow(), group, group_pages);
            }
        }
    }

    /// Maps the neighbours among the `nr_pages` pages from `first` on. It and its parts are never
    /// inlined: each needs its part of the stack for itself.
    #[inline(never)]
    fn map_group(&self, hazard: HazardPointer<'_>, first: u64, nr_pages: u64) {
        let page = |index| Gfn(first + index as u64);
        let mut neighbours = Batch::<_, GROUP>::new(self.access_around(), Missing::PassOver, page);
        if let Some(slot_range) = self.resolve_around(hazard, nr_pages, &mut neighbours) {
            self.install_around(&mut neighbours, slot_range);
        }
    }

    #[inline(never)]
    fn install_around<P: Fn(usize) -> Gfn>(&self, neighbours: &mut Batch<P, GROUP>, slot_range: GfnRange) {
        let locked = self.tree.enter(self.record, Side::Read);
        let nr_leaves = self.install_together(&locked.section, neighbours, slot_range);
        self.record.stats.add(Counter::Around, nr_leaves);
    }

    /// What the neighbours are mapped for.
    fn access_around(&self) -> Access {
        if self.access == Access::Execute { Access::Execute } else { Access::Read }
    }

    /// Makes leaves for the first `nr_pages` of `neighbours`. Returns the range of the slot that they are in, if there are any.
    #[inline(never)]
    fn resolve_around<P: Fn(usize) -> Gfn>(
        &self,
        hazard: HazardPointer<'_>,
        nr_pages: u64,
        neighbours: &mut Batch<P, GROUP>,
    ) -> Option<GfnRange> {
        let tree = self.tree;
        let access = self.access_around();
        let section = tree.epochs.enter(self.record);
        self.look_around(&section, nr_pages, neighbours);
        if neighbours.is_empty() {
            return None;
        }
        neighbours.retain(self.free_pages()?);
        let plan = self.plan_together(&section, hazard, neighbours)?;
        drop(section);
        if plan.attributes.contains(MemoryAttributes::PRIVATE) {
            return None;
        }
        let config = &tree.config;
        self.make_leaves(neighbours, |gfn| {
            let resolved = tree.host.resolve_resident(plan.backing.get(), gfn, plan.page(gfn), access)?;
            let leaf = plan.leaf::<F>(config, self.max_opened(), gfn, access, resolved).ok()?;
            let is_unseen = config.access_tracking.writes_are_unseen::<F>() && leaf.rights == Rights::Writable;
            let rights = if is_unseen { Rights::WriteProtected } else { leaf.rights };
            let leaf = NewLeaf { level: Level::L4K, rights, used: None, ..leaf };
            Some((resolved, leaf.entry::<F>(config.access_tracking)))
        });
        Some(plan.slot)
    }

    /// Finds the empty entries of `neighbours`, this fault's own aside. There are none if the page is not
    /// mapped by a leaf of 4 KiB any more.
    #[inline(never)]
    fn look_around<P: Fn(usize) -> Gfn>(&self, section: &Section<'_>, nr_pages: u64, neighbours: &mut Batch<P, GROUP>) {
        let mut cursor = Cursor::new(self.tree, section, self.gfn);
        if cursor.descend_to_lowest().1 != State::Leaf || cursor.level() != Level::L4K {
            return;
        }
        // In one table, for the window is aligned and smaller than a table.
        for _ in 0..nr_pages {
            let gfn = neighbours.next_page();
            cursor.move_to(gfn);
            let value = cursor.entry().load();
            // What must be flushed first is left to a fault of its own.
            let is_wanted = gfn != self.gfn
                && matches!(entry::state::<F>(value, Level::L4K), State::Empty(stamp) if !stamp.is_unflushed());
            neighbours.push(if is_wanted { value } else { NOTHING });
        }
    }
}
