//! Step 3 of a fault: what was resolved is installed, if nothing has changed since the look that would forbid it, and what may
//! now be written is marked.

use super::plan::{Found, InstallPlan, Step};
use super::{Fault, installed};
use crate::addr::{Access, Level, Pfn};
use crate::format::{Entry, Format};
use crate::host::Host;
use crate::second_stage::install::{self, Changed, NewLeaf, Prepared, Rights};
use crate::second_stage::zap;
use crate::sync::{Side, fence_after_rmw};
use crate::table::Tree;
use crate::table::entry::{self, Stamp, State};
use crate::table::retire::{FaultPin, Section};
use crate::table::walk::Cursor;

impl<H: Host, F: Format> Fault<'_, H, F> {
    /// Step 3 for an entry that is empty, or a leaf that the host has now allowed to be written.
    #[inline]
    pub(super) fn install(
        &mut self,
        pin: FaultPin<'_>,
        plan: &InstallPlan<'_, H::Backing>,
        leaf: NewLeaf,
    ) -> Result<Step, Changed> {
        match plan.found {
            Found::Empty(stamp) => self.install_on_empty(pin, plan, stamp, leaf),
            // A part of it: the other pages stay.
            Found::ReadOnly(value, _) if plan.level > leaf.level => self.split(value, plan.level, value),
            Found::ReadOnly(value, seen) => self.install_instead(value, seen, leaf),
            Found::Lacking(_) => unreachable!("no frame is asked for"),
        }
    }

    #[inline]
    fn install_on_empty(
        &mut self,
        pin: FaultPin<'_>,
        plan: &InstallPlan<'_, H::Backing>,
        seen: Stamp,
        leaf: NewLeaf,
    ) -> Result<Step, Changed> {
        let locked = self.tree.enter_fault(pin, self.record, Side::Read);
        let (section, highest) = (&locked.section, plan.level);
        let (cursor, value, State::Empty(stamp)) = Cursor::at_lowest(self.tree, section, self.gfn) else {
            return Err(Changed);
        };
        // Another stamp: the range was taken away since the look. A higher or lower entry than then: the leaf may not fit,
        // or need more tables than were taken.
        if stamp != seen || cursor.level() > highest || cursor.level() < leaf.level {
            if stamp != seen {
                self.refine(section, highest, leaf.level, leaf.pfn);
            }
            return Err(Changed);
        }
        if cursor.level() == Level::L4K {
            // What most faults do, with all levels constant.
            self.install_at(&cursor, section, value, stamp, NewLeaf { level: Level::L4K, ..leaf })
        } else {
            self.install_higher(cursor, section, value, stamp, leaf)
        }
    }

    /// Makes sure that this fault gets through beside invalidations of its neighbours, which give a stamp to the whole empty
    /// entry that both are in, again and again. The entry, of level `highest` at most, is replaced by the tables that were
    /// taken for a leaf of `leaf_level`, whose entries are all empty with the stamp that the entry has. They say the same,
    /// piece by piece, so nothing has to be looked at before. From then on only what is invalidated in the block of the leaf
    /// overtakes this fault; if even that is too much, the next leaf is a small one.
    ///
    /// It walks anew: the caller's cursor must stay in registers.
    #[cold]
    #[inline(never)]
    pub(super) fn refine(&mut self, section: &Section<'_>, highest: Level, leaf_level: Level, pfn: Pfn) {
        self.nr_overtaken = self.nr_overtaken.saturating_add(1);
        let Tree { host, published, .. } = self.tree;
        let mut cursor = Cursor::new(self.tree, section, self.gfn);
        let (value, State::Empty(stamp)) = cursor.descend_to_lowest() else { return };
        let level = cursor.level();
        if level > highest || level <= leaf_level {
            return;
        }
        // Where a break must come before a make, the entry has to be flushed by now. A zap that has taken something away there
        // and not flushed yet says so in the stamp; unless its range covers the entry, and so this page, and is published.
        // Invalidations beside this page clear that flag (`second_stage/zap.rs`). So if it is set, something was mapped here
        // and taken away since the look, or this page was invalidated itself.
        let is_flushed = || !stamp.is_unflushed() && published.free_level(self.gfn, Level::L4K).is_some();
        if !F::BREAK_BEFORE_MAKE || is_flushed() {
            let empty = Prepared::empty(stamp, leaf_level, pfn);
            // If the entry has changed once more, the next look finds out.
            let _: Result<(), Changed> = install::link(&cursor, host, self.tables, value, stamp, empty);
        }
    }

    /// Takes the leaf `value` away and installs `leaf` in its place, in one section: between the two, and before the host
    /// has answered, a reader would put the read-only leaf back, again and again.
    ///
    /// A leaf has no stamp that would tell whether the page was taken away since the look, and the very same leaf put back
    /// by another fault after the host has forbidden what it answered here. The counter tells, read once more when the leaf
    /// is gone: if this fault's stamp is the only one since the look, nobody has. If somebody has taken a stamp, wherever,
    /// the entry is left empty, and the fault asks again. Who takes one later finds what is installed here, and zaps it.
    ///
    /// No flush is owed: the frame is the same, and CPUs may use it until an invalidation, which flushes; and one that has
    /// the leaf cached faults on the write and walks anew (Intel SDM vol. 3C, "Operations that Invalidate Cached Mappings":
    /// an EPT violation drops the translation that caused it; elsewhere the end of each fault does,
    /// [`Host::flush_local`]; so it is wherever a right is given). That
    /// the page was used is told to the host before the leaf goes, as by a zap (the fault may be overtaken, and then nothing
    /// else would tell), and kept in the leaf that takes its place. A huge leaf of which the host gives a part
    /// is split before, so that its other pages stay.
    #[cold]
    #[inline(never)]
    fn install_instead(&mut self, value: Entry, seen: Stamp, leaf: NewLeaf) -> Result<Step, Changed> {
        let tree = self.tree;
        let locked = tree.enter(self.record, Side::Read);
        let section = &locked.section;
        let mut cursor = Cursor::new(tree, section, self.gfn);
        let (found, _) = cursor.descend_to_lowest();
        let level = cursor.level();
        if found != value || level != leaf.level {
            return Err(Changed);
        }
        if self.frame_in(value, level) != leaf.pfn {
            return Err(Changed);
        }
        let stamp = tree.next_stamp();
        // If nothing comes of it here, others may put something smaller there.
        let stamp = if F::BREAK_BEFORE_MAKE && level > Level::L4K { stamp.unflushed() } else { stamp };
        let is_accessed = entry::is_accessed::<F>(value);
        if is_accessed {
            zap::report(tree, value, level, cursor.block());
        }
        let leaf = NewLeaf { used: leaf.used.or(is_accessed.then_some(Access::Read)), ..leaf };
        let empty = install::take_away(&cursor, value, stamp)?;
        self.count(zap::zapped_leaf(level));
        // A store-load pair with who takes a stamp, and then looks at the entry.
        fence_after_rmw();
        if tree.current_stamp().follows(seen) {
            self.install_at(&cursor, section, empty, stamp, leaf)
        } else {
            Err(Changed)
        }
    }

    /// The frame of this fault's page in the leaf `leaf` of `level`.
    fn frame_in(&self, leaf: Entry, level: Level) -> Pfn {
        Pfn(entry::frame::<F>(leaf, level).0 + (self.gfn.0 & (level.nr_pages() - 1)))
    }

    /// Whether the host has given a page that is mapped read-only another frame, and not invalidated it: then the leaf is
    /// still there, and nobody has taken a stamp since the look.
    #[inline]
    pub(super) fn is_another_frame(&self, plan: &InstallPlan<'_, H::Backing>, leaf: &NewLeaf) -> bool {
        let Found::ReadOnly(value, seen) = plan.found else { return false };
        if self.frame_in(value, plan.level) == leaf.pfn {
            return false;
        }
        let tree = self.tree;
        let section = tree.epochs.enter(self.record);
        let mut cursor = Cursor::new(tree, &section, self.gfn);
        cursor.descend_to_lowest().0 == value && tree.current_stamp() == seen
    }

    /// [`install_at`](Self::install_at) for an entry of more than a page. It takes the cursor itself, so
    /// that its caller's stays in registers.
    #[inline(never)]
    fn install_higher(
        &mut self,
        cursor: Cursor<'_, H, F>,
        section: &Section<'_>,
        value: Entry,
        stamp: Stamp,
        leaf: NewLeaf,
    ) -> Result<Step, Changed> {
        self.install_at(&cursor, section, value, stamp, leaf)
    }

    /// Installs `leaf` in the entry at the cursor, which is `value`, empty with `stamp`.
    #[inline(always)]
    fn install_at(
        &mut self,
        cursor: &Cursor<'_, H, F>,
        section: &Section<'_>,
        value: Entry,
        stamp: Stamp,
        leaf: NewLeaf,
    ) -> Result<Step, Changed> {
        // Below a closed entry the leaf is of no use to a write yet. The step that opens the entry
        // gives the right to write, and marks the page: if it were marked here too, a ring would
        // have it twice.
        let is_nearer = self.access == Access::Write && cursor.is_closed();
        let rights = match leaf.rights {
            Rights::Writable if is_nearer => Rights::WriteProtected,
            rights => rights,
        };
        install::install(cursor, &self.tree.host, self.tables, value, stamp, NewLeaf { rights, ..leaf })?;
        self.count(installed(leaf.level));
        if rights == Rights::Writable && self.marks(leaf.level) {
            self.mark_leaf(section, leaf.level);
        }
        Ok(if is_nearer { Step::Nearer } else { Step::Done })
    }

    /// Whether this fault is to mark the pages of a leaf of `level` that it makes writable. Where CPUs' dirty bits are the
    /// log, they tell of leaves of 4 KiB; what is written at once has its dirty bit set here, so that no CPU will tell.
    #[inline]
    pub(super) fn marks(&self, level: Level) -> bool {
        self.marks_for(self.access, level)
    }

    /// As [`marks`](Self::marks), of a leaf that is installed for `access`.
    #[inline]
    pub(super) fn marks_for(&self, access: Access, level: Level) -> bool {
        access == Access::Write || self.tree.config.first_write_faults(level)
    }
}
