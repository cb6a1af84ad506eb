//! Fault-around: neighbours of the page that the guest has faulted on, which are resident anyway, are mapped along, so that
//! a guest that goes through such memory faults once for a window of pages.
//!
//! The fault itself goes its way. Once its page is resolved, the other entries of the window are looked at, in the order of
//! `together`, and the host is asked which of their pages are resident. What it has answered for the fault's own page says
//! nothing about them, even if it was a large block: that answer may be older than the entries that were seen now, and a stamp
//! guards only an answer that came after it. The neighbours are installed in the section that installs the fault's own leaf,
//! each by its own exchange; one that has been changed meanwhile is passed over.
//!
//! A neighbour gets what a read would give it (so it is never written unseen where the slot logs), and counts as not used.
//! Where CPUs do not set A, a leaf is used as soon as it is there, and where they do not set D, dirty as soon as it can be
//! written; there it is mapped without the right to write: a page that somebody has used is found out when it is aged next,
//! but one that counts as written would be written back for nothing.

use super::together::{Batch, Missing, TOGETHER};
use super::{Fault, Step};
use crate::addr::{Access, Gfn, GfnRange, Level};
use crate::config::{FaultAround, MAX_FAULT_AROUND_PAGES};
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

const _: () = assert!(MAX_FAULT_AROUND_PAGES as usize <= TOGETHER);

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
        let access = if self.access == Access::Execute { Access::Execute } else { Access::Read };
        let mut neighbours = Batch::new(access, Missing::PassOver);
        let slot_range = self.resolve_around(stamp, access, &mut neighbours);
        let locked = self.vm.tree.enter(self.record, Side::Read);
        let step = self.install_on_empty_in(&locked.section, level, stamp, leaf)?;
        if let Some(slot_range) = slot_range {
            let nr_leaves = self.install_together(&locked.section, &mut neighbours, slot_range);
            self.record.stats.add(Counter::Around, nr_leaves);
        }
        Ok(step)
    }

    /// Makes leaves for the other pages of the window, where `stamp` was seen for this fault's. Returns the range of the slot
    /// that they are in, if there are any.
    fn resolve_around(&self, stamp: Stamp, access: Access, neighbours: &mut Batch) -> Option<GfnRange> {
        let Vm { tree, .. } = self.vm;
        let section = tree.epochs.enter(self.record);
        self.look_around(&section, stamp, neighbours);
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

    /// Finds the empty entries of the window, this fault's own aside. None if that has been changed: the fault will start over.
    fn look_around(&self, section: &Section<'_>, stamp: Stamp, neighbours: &mut Batch) {
        let mut cursor = Cursor::new(&self.vm.tree, section, self.gfn);
        if cursor.descend_to_lowest().1 != State::Empty(stamp) {
            return;
        }
        // In one table, for the window is aligned and smaller than a table.
        let nr_pages = self.vm.tree.config.fault_around.nr_pages();
        let first = self.gfn.0 & !(nr_pages - 1);
        for gfn in (first..first + nr_pages).map(Gfn).filter(|&gfn| gfn != self.gfn) {
            // Where there is no table yet, all pages have the stamp of the entry on which the fault will hang it.
            let value = if cursor.level() == Level::L4K {
                cursor.move_to(gfn);
                cursor.entry().load()
            } else {
                entry::empty(stamp.flushed())
            };
            // What must be flushed first is left to a fault of its own.
            if matches!(entry::state::<F>(value, Level::L4K), State::Empty(stamp) if !stamp.is_unflushed()) {
                neighbours.push(gfn, value);
            }
        }
    }
}
