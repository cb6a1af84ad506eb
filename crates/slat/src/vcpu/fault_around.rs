//! Fault-around: neighbours of the page that the guest has faulted on, which are resident anyway, are mapped along, so that
//! a guest that goes through such memory faults once for a window of pages.
//!
//! The fault itself goes its way. Once its page is resolved, the other entries of the window are looked at, in the order of
//! `together`, and the host is asked which of their pages are resident. What it has answered for the fault's own page says
//! nothing about them, even if it was a large block: that answer may be older than the entries that were seen now, and a stamp
//! guards only an answer that came after it. The neighbours are installed in the section that installs the fault's own leaf,
//! each by its own exchange; one that has been changed meanwhile is passed over. A window of more than [`GROUP`] pages is done
//! group by group, the fault's own first, so that a fault needs little of the stack.
//!
//! A neighbour gets what a read would give it (so it is never written unseen where the slot logs), and counts as not used.
//! Where CPUs do not set A, a leaf is used as soon as it is there, and where they do not set D, dirty as soon as it can be
//! written; there it is mapped without the right to write: a page that somebody has used is found out when it is aged next,
//! but one that counts as written would be written back for nothing.

use super::together::{Batch, Missing};
use super::{Fault, Step};
use crate::addr::{Access, Gfn, GfnRange, Level};
use crate::config::{FaultAround, MAX_FAULT_AROUND_PAGES};
use crate::dirty::ring::DIRTY_RING_RESERVE;
use crate::format::Format;
use crate::host::Host;
use crate::second_stage::install::{Changed, NewLeaf, Rights};
use crate::slot::MemoryAttributes;
use crate::stats::Counter;
use crate::sync::Side;
use crate::table::entry::{self, Stamp, State};
use crate::table::retire::Section;
use crate::table::walk::Cursor;
use crate::vm::Vm;

/// Pages of a window that go together: a fault has little of the stack.
const GROUP: usize = 16;

// A ring that is not soft-full has room for a whole window, if the slot begins to log meanwhile.
const _: () = assert!(MAX_FAULT_AROUND_PAGES as u32 <= DIRTY_RING_RESERVE);

type Neighbours = Batch<GROUP>;

impl<H: Host, F: Format> Fault<'_, H, F> {
    /// Whether a leaf of `level` is installed with its neighbours.
    #[inline]
    pub(super) fn maps_around(&self, level: Level) -> bool {
        self.vm.tree.config.fault_around != FaultAround::Off && level == Level::L4K
    }

    /// Step 3 of a fault that has resolved its page of 4 KiB, which is to be mapped by `leaf` where an empty entry of
    /// `level` with `stamp` was seen: with its neighbours.
    #[cold]
    pub(super) fn install_around(&mut self, level: Level, stamp: Stamp, leaf: NewLeaf) -> Result<Step, Changed> {
        // Windows and groups are aligned, and the one is a multiple of the other.
        let window_pages = self.vm.tree.config.fault_around.nr_pages();
        let group_pages = window_pages.min(GROUP as u64);
        let own = self.gfn.0 & !(group_pages - 1);
        let step = self.install_with_group(GfnRange::new(Gfn(own), group_pages), level, stamp, leaf)?;
        let first = self.gfn.0 & !(window_pages - 1);
        for group in (first..first + window_pages).step_by(GROUP).filter(|&group| group != own) {
            self.install_group(GfnRange::new(Gfn(group), group_pages));
        }
        Ok(step)
    }

    /// The fault's own leaf, and its neighbours in `group`, in one section.
    #[inline(never)]
    fn install_with_group(
        &mut self,
        group: GfnRange,
        level: Level,
        stamp: Stamp,
        leaf: NewLeaf,
    ) -> Result<Step, Changed> {
        let mut neighbours = Neighbours::new(self.access_around(), Missing::PassOver);
        let slot_range = self.resolve_around(group, State::Empty(stamp), &mut neighbours);
        let locked = self.vm.tree.enter(self.record, Side::Read);
        let step = self.install_on_empty_in(&locked.section, level, stamp, leaf)?;
        self.install_neighbours(&locked.section, slot_range, &mut neighbours);
        Ok(step)
    }

    /// Those neighbours of a page that is mapped now that are in `group`.
    #[inline(never)]
    fn install_group(&self, group: GfnRange) {
        let mut neighbours = Neighbours::new(self.access_around(), Missing::PassOver);
        let slot_range = self.resolve_around(group, State::Leaf, &mut neighbours);
        let locked = self.vm.tree.enter(self.record, Side::Read);
        self.install_neighbours(&locked.section, slot_range, &mut neighbours);
    }

    fn install_neighbours(&self, section: &Section<'_>, slot_range: Option<GfnRange>, neighbours: &mut Neighbours) {
        if let Some(slot_range) = slot_range {
            let nr_leaves = self.install_together(section, neighbours, slot_range);
            self.record.stats.add(Counter::Around, nr_leaves);
        }
    }

    /// What the neighbours are mapped for.
    fn access_around(&self) -> Access {
        if self.access == Access::Execute { Access::Execute } else { Access::Read }
    }

    /// Makes leaves for the other pages of `group`, if this fault's entry is `own`. Returns the range of the slot that they are
    /// in, if there are any.
    fn resolve_around(&self, group: GfnRange, own: State, neighbours: &mut Neighbours) -> Option<GfnRange> {
        let Vm { tree, .. } = self.vm;
        let access = self.access_around();
        let section = tree.epochs.enter(self.record);
        self.look_around(&section, group, own, neighbours);
        if neighbours.nr_pages() == 0 {
            return None;
        }
        neighbours.retain(self.free_pages()?);
        let plan = self.plan_together(&section, neighbours)?;
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

    /// Finds the empty entries of `group`, this fault's own aside. None if that is not `own` any more.
    fn look_around(&self, section: &Section<'_>, group: GfnRange, own: State, neighbours: &mut Neighbours) {
        let mut cursor = Cursor::new(&self.vm.tree, section, self.gfn);
        if cursor.descend_to_lowest().1 != own {
            return;
        }
        // In one table, for the window is aligned and smaller than a table.
        for gfn in (group.start.0..group.end.0).map(Gfn).filter(|&gfn| gfn != self.gfn) {
            // Where there is no table yet, all pages have the stamp of the entry on which the fault will hang it.
            let value = match own {
                _ if cursor.level() == Level::L4K => {
                    cursor.move_to(gfn);
                    cursor.entry().load()
                }
                State::Empty(stamp) => entry::empty(stamp.flushed()),
                // A leaf of more than a page, which another has made meanwhile: it maps the neighbours, too.
                _ => return,
            };
            // What must be flushed first is left to a fault of its own.
            if matches!(entry::state::<F>(value, Level::L4K), State::Empty(stamp) if !stamp.is_unflushed()) {
                neighbours.push(gfn, value);
            }
        }
    }
}
