//! Step 3 of a fault, for a frame that was resolved: installs the leaf if nothing changed since the
//! look, and marks the pages that may now be written.

use super::Fault;
use super::plan::{Found, InstallPlan, Step};
use crate::addr::{Access, Level, Pfn};
use crate::format::Format;
use crate::host::Host;
use crate::second_stage::install::{self, NewLeaf, Rights};
use crate::sync::{Side, fence_after_rmw, record};
use crate::table::cursor::Cursor;
use crate::table::invalidation_seq::InvalidationSeq;
use crate::table::node::{self, TableUse};
use crate::table::pte::{Pte, State};
use crate::table::pte_ref::Changed;
use crate::table::retire::{FaultPin, Guard};

/// How often a fault tries to link page-table pages that it has filled. Each try that fails is one
/// that another thread has won.
const MAX_LINKS: usize = if cfg!(any(loom, shuttle)) { 2 } else { 64 };

impl<H: Host, F: Format> Fault<'_, H, F> {
    /// Step 3 for an empty PTE, or for a leaf through which the host now allows the access.
    #[inline(always)]
    pub(super) fn install(
        &mut self,
        pin: FaultPin<'_>,
        plan: &InstallPlan<'_, H::Backing, F>,
        leaf: NewLeaf,
    ) -> Result<Step, Changed> {
        match plan.found {
            Found::Empty(seq) => self.install_on_empty(pin, plan, seq, leaf),
            // The part is split off: the other pages stay mapped.
            Found::Forbidding(value, _) if plan.level > leaf.level => self.split(value, plan.level, value),
            Found::Forbidding(value, seen) => self.install_instead(value, seen, leaf),
            Found::Lacking(_) => unreachable!("no frame is asked for"),
        }
    }

    // A function of its own, so that the other steps have its stack.
    #[inline(never)]
    fn install_on_empty(
        &mut self,
        pin: FaultPin<'_>,
        plan: &InstallPlan<'_, H::Backing, F>,
        seen: InvalidationSeq,
        leaf: NewLeaf,
    ) -> Result<Step, Changed> {
        let locked = self.op.tree.pin_fault(pin, self.op.participant, Side::Read);
        let guard = &locked.guard;
        let (tree, gfn) = (self.op.tree, self.gfn);
        let (cursor, value) = Cursor::at_small(tree, guard, gfn).unwrap_or_else(|| Cursor::at_lowest(tree, guard, gfn));
        let State::Empty(seq) = value.state(cursor.level()) else { return Err(Changed) };
        // With another sequence number, the range was invalidated since the look. With a higher or
        // lower PTE than then, the leaf may not fit, or need more page-table pages than were
        // allocated.
        if seq != seen || cursor.level() > plan.level || cursor.level() < leaf.level {
            if seq != seen {
                self.refine(guard, plan.level, leaf.level, leaf.pfn);
            }
            return Err(Changed);
        }
        self.install_at(&cursor, guard, value, seq, leaf)
    }

    /// Ensures progress of this fault beside invalidations of its neighbours. Each of these stores
    /// its sequence number in the whole empty PTE that covers both.
    ///
    /// It replaces that PTE, of level `highest` at most, by the page-table pages that were
    /// allocated for a leaf of `leaf_level`. Their PTEs are all empty. From then on only
    /// invalidations in the block of the leaf overtake this fault. If there are still too many, the
    /// next leaf is a small one.
    ///
    /// The PTEs do not inherit a number but have a new one of this fault, which no other fault has
    /// seen. So they need not be filled again if an invalidation changes the number above meanwhile:
    /// filling takes longer than the invalidation of a neighbour, and the fault would never win
    /// beside a thread that invalidates all the time. (With break before make they do inherit it:
    /// what the fault has seen of flushes is for the number above.)
    ///
    /// It walks anew, so that the caller's cursor stays in registers.
    #[cold]
    #[inline(never)]
    pub(super) fn refine(&mut self, guard: &Guard<'_>, highest: Level, leaf_level: Level, pfn: Pfn) {
        self.nr_overtaken = self.nr_overtaken.saturating_add(1);
        let (tree, gfn) = (self.op.tree, self.gfn);
        // With break before make, the PTE must be flushed by now. A zap that removed a mapping
        // there and has not flushed yet has left an unflushed sequence number. Or its range covers
        // the PTE, and so this page, and is in flight. Invalidations beside this page clear the
        // flag (`second_stage/zap.rs`). So if the flag is set, a mapping was removed here since the
        // look, or this page itself was invalidated.
        let is_flushed =
            |seq: InvalidationSeq| !seq.is_unflushed() && tree.in_flight.free_level(gfn, Level::L4K).is_some();
        // Another look: it goes by what it reads itself.
        record!(FaultLooks { gfn: gfn.0 });
        let mut cursor = Cursor::new(tree, guard, gfn);
        let (mut value, State::Empty(seq)) = cursor.descend_to_lowest() else { return };
        let level = cursor.level();
        if level > highest || level <= leaf_level || (F::BREAK_BEFORE_MAKE && !is_flushed(seq)) {
            return;
        }
        let (number, nr_tries) = if F::BREAK_BEFORE_MAKE { (seq.flushed(), 1) } else { (tree.next_seq(), MAX_LINKS) };
        let mut prepared = install::prepare_to_refine(&cursor, self.tables, number, leaf_level);
        for _ in 0..nr_tries {
            match prepared.link_or_keep(cursor.stats(), cursor.pte(), value, TableUse::Fault, pfn) {
                Ok(_) => return,
                Err(kept) => prepared = kept,
            }
            // At once, while this CPU has the cache line.
            value = cursor.pte().load();
            if !matches!(value.state(level), State::Empty(_)) {
                // Another fault has refined it. The next look finds out.
                return;
            }
        }
    }

    /// Replaces the leaf `value` by `leaf`, inside one guard. If the PTE stayed empty until the
    /// host had answered, a reading vCPU would install the read-only leaf again and again.
    ///
    /// **Detecting an invalidation.** A leaf has no sequence number that shows whether the page was
    /// invalidated since the look. After the host has withdrawn its answer, another fault may even
    /// have installed the very same leaf again. So the counter is read again after the exchange:
    /// - If the number of this fault is the only one since the look, no thread has invalidated the
    ///   page.
    /// - If another thread took a number, for whatever page, the PTE stays empty and the fault asks
    ///   again.
    /// - A thread that takes a number later finds the new leaf, and zaps it.
    ///
    /// **No flush is due.** The frame is the same, and CPUs may use it until an invalidation, which
    /// flushes. A CPU that has the old leaf cached faults on the write and walks anew. On Intel an
    /// EPT violation drops the translation that caused it (Intel SDM vol. 3C, "Operations that
    /// Invalidate Cached Mappings"). Elsewhere the end of each fault does ([`Host::flush_local`]).
    /// The same holds wherever access is restored.
    ///
    /// **The accessed bit.** The host is notified that the page was used before the leaf goes, as
    /// by a zap: if the fault is overtaken, no later step reports it. The new leaf keeps the bit.
    ///
    /// A huge leaf of which the host allows a part is split before, so that its other pages stay.
    #[cold]
    #[inline(never)]
    fn install_instead(&mut self, value: Pte<F>, seen: InvalidationSeq, leaf: NewLeaf) -> Result<Step, Changed> {
        let tree = self.op.tree;
        let locked = self.op.pin_locked(Side::Read);
        let guard = &locked.guard;
        let mut cursor = Cursor::new(tree, guard, self.gfn);
        let (found, _) = cursor.descend_to_lowest();
        let level = cursor.level();
        if found != value || level != leaf.level {
            return Err(Changed);
        }
        if self.frame_in(value, level) != leaf.pfn {
            return Err(Changed);
        }
        let seq = tree.next_seq();
        // If this fault fails below, another one may install something smaller here.
        let seq = if F::BREAK_BEFORE_MAKE && level > Level::L4K { seq.unflushed() } else { seq };
        let is_accessed = value.is_accessed();
        if is_accessed {
            node::report_zapped(tree, value, level, cursor.block());
        }
        let leaf = NewLeaf { used: leaf.used.or(is_accessed.then_some(Access::Read)), ..leaf };
        let empty = Pte::empty(seq);
        cursor.pte().zap_leaf(cursor.stats(), value, seq)?;
        // A store-load pair with a thread that takes a sequence number and then looks at the PTE.
        fence_after_rmw();
        if tree.current_seq().follows(seen) { self.install_at(&cursor, guard, empty, seq, leaf) } else { Err(Changed) }
    }

    /// The frame of this fault's page in the leaf `leaf` of `level`.
    fn frame_in(&self, leaf: Pte<F>, level: Level) -> Pfn {
        Pfn(self.op.tree.encoding.frame(leaf, level).0 + (self.gfn.0 & (level.nr_pages() - 1)))
    }

    /// Whether the host resolved a page whose leaf forbids the access to another frame or memory
    /// type, without invalidating it. In that case the leaf is still there, and no sequence number
    /// was taken since the look.
    #[inline]
    pub(super) fn is_another_frame(&self, plan: &InstallPlan<'_, H::Backing, F>, leaf: &NewLeaf) -> bool {
        let Found::Forbidding(value, seen) = plan.found else { return false };
        let tree = self.op.tree;
        let encoding = &tree.encoding;
        let memory_of = |bits| encoding.attributes_of(bits).memory;
        let is_same_memory =
            || memory_of(value.attribute_bits(plan.level)) == memory_of(encoding.bits_of(leaf.attributes));
        if self.frame_in(value, plan.level) == leaf.pfn && is_same_memory() {
            return false;
        }
        let guard = self.op.pin();
        let mut cursor = Cursor::new(tree, &guard, self.gfn);
        cursor.descend_to_lowest().0 == value && tree.current_seq() == seen
    }

    /// Installs `leaf` in the PTE at the cursor, which is `value`, empty with `seq`.
    #[inline(always)]
    fn install_at(
        &mut self,
        cursor: &Cursor<'_, H, F>,
        guard: &Guard<'_>,
        value: Pte<F>,
        seq: InvalidationSeq,
        leaf: NewLeaf,
    ) -> Result<Step, Changed> {
        // Below a protected directory entry the leaf does not allow a write yet. The push-down
        // restores W and marks the page. If it were marked here too, a ring would have it twice.
        let is_nearer = self.access == Access::Write && cursor.is_protected();
        let rights = match leaf.rights {
            Rights::Writable if is_nearer => Rights::WriteProtected,
            rights => rights,
        };
        install::install(cursor, self.tables, value, seq, NewLeaf { rights, ..leaf })?;
        if rights == Rights::Writable && self.marks(leaf.level) {
            self.mark_leaf(guard, leaf.level);
        }
        Ok(if is_nearer { Step::Nearer } else { Step::Done })
    }

    /// Whether this fault marks the pages of a leaf of `level` that it makes writable. Where CPUs'
    /// dirty bits are the log, they report leaves of 4 KiB. But a leaf that is installed for a
    /// write gets its dirty bit here, and no CPU reports it.
    #[inline]
    pub(super) fn marks(&self, level: Level) -> bool {
        self.marks_for(self.access, level)
    }

    /// As [`marks`](Self::marks), for a leaf that is installed for `access`.
    #[inline]
    pub(super) fn marks_for(&self, access: Access, level: Level) -> bool {
        access == Access::Write || self.op.tree.config.first_write_faults(level)
    }
}
