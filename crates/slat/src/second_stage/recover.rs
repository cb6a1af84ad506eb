//! Recovery: huge leaves take the place of page-table pages, once nothing needs small ones any
//! more.
//!
//! # Guarantees
//! - A huge leaf is made only of leaves that were all there, with frames that follow each other, if
//!   host and memslot allow it.
//! - No write is lost for the dirty log or for the host.
//! - No fault, harvest or invalidation waits for a recovery.
//!
//! # Use
//! [`recover_range`] recovers all that it can, from the lowest level up: 4 KiB to 2 MiB to 1 GiB.
//! Some blocks stay small:
//! - Those of a memslot that logs. With
//!   [`HugePageLogging::MarkWhole`](crate::dirty::HugePageLogging) and write protection, leaves of
//!   2 MiB come back all the same.
//! - Those larger than the blocks of a userfault bitmap, or with private and shared pages.
//! - The rest, when too many unlinked page-table pages wait for a guard: [`MAX_DEFERRED_TABLES`],
//!   and as many as were linked when the recovery began.
//!
//! # Implementation
//! For each block the recovery
//! 1. reads the counter of sequence numbers, finds the page-table page, and asks the host outside
//!    of the guard whether the page may be mapped by the larger leaf,
//! 2. exchanges the directory entry for a broken PTE, and reads the counter again,
//! 3. freezes the PTEs below one by one, and gathers what the guest did through them,
//! 4. exchanges the broken PTE for a leaf of the whole block. If that cannot be, it cancels: the
//!    next access asks the host, and gets the huge leaf that way.
//! 5. If it gave W, it makes a full fence, reads the memslot's flags again, and marks all pages if
//!    the memslot logs by now.
//!
//! Steps 2 to 5 are in one guard. The page-table page is given up in any case. One flush for many
//! is due, only so that they may be freed: what CPUs have cached of the small leaves agrees with
//! the huge one. Where both must not be cached at once ([`Format::BREAK_BEFORE_MAKE`]), the
//! recovery leaves its guard and flushes before step 4.
//!
//! # Why it is correct
//! A fault or a zap that needs the broken PTE cancels (`broken`), and step 4 fails. So step 4 need
//! not look at the ranges in flight: a zap finds the broken PTE, or the huge leaf.
//!
//! The host's answer is true as long as no page of the block is invalidated. A leaf holds no
//! sequence number that shows it, so the counter does.
//!
//! W is never copied. The huge leaf has it if the host allows it, the memslot does not log, and
//! there are no rings. Step 5 then does what a fault does, so that a harvest or an enabling may
//! pass a broken PTE by. Elsewhere the first write restores W.

#![expect(unsafe_code, reason = "gives up the tables that it has broken")]

use core::convert::Infallible;

use super::broken::{cancel, find_broken, give_up};
use super::walk::{self, Next, TurnEnd, Walk};
use super::zap::{MAX_DEFERRED_TABLES, TABLES_PER_FLUSH};
use crate::addr::{Access, Gfn, GfnRange, Level, Pfn};
use crate::config::AccessTracking;
use crate::dirty::log;
use crate::dirty::rings::WithoutRings;
use crate::format::{Execute, Format, LeafAttributes};
use crate::host::{Host, Resolved};
use crate::operation::Operation;
use crate::slot::view::{BackingRef, SlotView};
use crate::slot::{MemoryAttributes, MemoryRegionFlags};
use crate::sync::{Side, fence_after_rmw};
use crate::table::Tree;
use crate::table::cursor::Cursor;
use crate::table::invalidation_seq::InvalidationSeq;
use crate::table::pte::{Breaking, FrozenLeaves, Pte, State};
use crate::table::pte_ref::{Changed, Ptes};
use crate::table::retire::{Guard, HazardPointer};
use crate::table::tlb::TlbBatch;

/// How often a block is tried that other threads change.
const MAX_TRIES: usize = 8;

/// PTEs, and words of attributes, that a turn visits before it leaves its guard.
const STEPS_PER_TURN: u64 = 4096;

/// Recovers huge leaves in `range`, as large as the host and the memslots' logs allow. Returns how
/// many page-table pages became leaves.
pub(crate) fn recover_range<H: Host, F: Format>(
    op: Operation<'_, H, F>,
    hazard: HazardPointer<'_>,
    range: GfnRange,
) -> u64 {
    let max_deferred = MAX_DEFERRED_TABLES + op.tree.nr_linked_tables();
    let recovery = Recovery {
        op,
        without_rings: op.rings.keep_out(),
        max_deferred,
        batch: op.batch(),
        nr_recovered: 0,
        is_full: false,
    };
    let mut pass = Pass { recovery, hazard, range, level: Level::L2M };
    while pass.level <= op.tree.root_level().min(Level::L1G) && range.has_block(pass.level) && !pass.recovery.is_full {
        let Ok(()) = walk::run(op, range, &mut pass);
        pass.level = pass.level.up();
    }
    let Recovery { batch, nr_recovered, .. } = pass.recovery;
    drop(batch);
    op.tree.reclaim();
    nr_recovered
}

/// A page-table page that may become a leaf.
struct Candidate<'r, B> {
    /// The block that the leaf would map.
    block: GfnRange,
    level: Level,
    /// The page of the first leaf below, its number in the memslot, and its frame.
    gfn: Gfn,
    page: u64,
    pfn: Pfn,
    is_host_writable: bool,
    attributes: MemoryAttributes,
    backing: BackingRef<'r, B>,
    /// The counter of sequence numbers, read before all that.
    seen: InvalidationSeq,
}

/// What the leaves of a page-table page say together.
struct Gathered {
    is_host_writable: bool,
    is_accessed: bool,
    is_dirty: bool,
    /// Whether one of them was not tracked.
    is_present: bool,
    /// Attribute bits of the first, as a leaf of 4 KiB has them.
    attributes: u64,
    /// Whether all have these.
    are_alike: bool,
}

struct Recovery<'r, H: Host, F: Format> {
    op: Operation<'r, H, F>,
    without_rings: Option<WithoutRings<'r>>,
    max_deferred: u64,
    batch: TlbBatch<'r, H, F>,
    nr_recovered: u64,
    /// No more page-table pages can be given up for now.
    is_full: bool,
}

/// The walk that tries all blocks of one level.
struct Pass<'r, H: Host, F: Format> {
    recovery: Recovery<'r, H, F>,
    hazard: HazardPointer<'r>,
    range: GfnRange,
    level: Level,
}

/// A block may be recovered, which the host is asked first.
struct Try;

impl<H: Host, F: Format> Walk<H, F> for Pass<'_, H, F> {
    type Work = Try;
    type Error = Infallible;
    /// It changes nothing; the tries do.
    const SIDE: Option<Side> = None;

    fn turn(&mut self, guard: &Guard<'_>, start: Gfn) -> TurnEnd<Try> {
        let Pass { ref recovery, range, level, .. } = *self;
        walk::visit_ptes(recovery.op.tree, guard, GfnRange { start, ..range }, STEPS_PER_TURN, |cursor| {
            cursor.descend_to(level);
            if !range.covers(cursor.block()) {
                return Next::Advance(1);
            }
            match cursor.read_table(level).map(|(_, ptes)| first_leaf(ptes)) {
                Some(Some(_)) => Next::Leave(Try),
                Some(None) => Next::Advance(1 + F::TABLE_ENTRIES as u64),
                None => Next::Advance(1),
            }
        })
    }

    fn work(&mut self, start: Gfn, _: Try) -> Result<Gfn, Infallible> {
        let Pass { recovery, hazard, level, .. } = self;
        let block = start.block(*level);
        for _ in 0..MAX_TRIES {
            let Some(candidate) = recovery.look(hazard.reborrow(), block, *level) else { break };
            if !recovery.make_room() {
                recovery.is_full = true;
                return Ok(self.range.end);
            }
            if recovery.try_recover(candidate).is_ok() {
                break;
            }
        }
        Ok(block.end)
    }
}

impl<'r, H: Host, F: Format> Recovery<'r, H, F> {
    /// Makes sure that one more page-table page may be given up. Returns whether it may.
    fn make_room(&mut self) -> bool {
        let tree = self.op.tree;
        if self.batch.nr_unlinked() >= TABLES_PER_FLUSH {
            self.batch.flush();
        }
        if tree.epochs.nr_listed_tables() >= self.max_deferred {
            // The guards that they waited for may be over by now.
            tree.reclaim();
        }
        tree.epochs.nr_listed_tables() < self.max_deferred
    }

    /// Looks at the page-table page for `block`, if there is one, and finds out whether the host
    /// may be asked for a leaf of `level` there.
    ///
    /// Never inlined, like `try_recover`: its stack is free again when the batch is flushed.
    #[inline(never)]
    fn look<'h>(&self, hazard: HazardPointer<'h>, block: GfnRange, level: Level) -> Option<Candidate<'h, H::Backing>> {
        let Operation { tree, slots, .. } = self.op;
        let guard = self.op.pin();
        let seen = tree.current_seq();
        let mut cursor = Cursor::new(tree, &guard, block.start);
        cursor.descend_to(level);
        let (_, ptes) = cursor.read_table(level)?;
        let parts = level.down();
        let (index, leaf) = first_leaf(ptes)?;
        let gfn = Gfn(block.start.0 + index * parts.nr_pages());
        let pfn = tree.encoding.frame(leaf, parts);
        if (pfn.0 ^ gfn.0) & (level.nr_pages() - 1) != 0 {
            return None;
        }
        // Inside a range in flight the host's answer may be outdated, and no sequence number shows
        // it.
        tree.in_flight.free_level(gfn, level).filter(|&free| free == level)?;
        let slot = slots.find(&guard, gfn)?;
        guard.visit(index + slot.steps_of(block));
        if !self.may_recover(&slot, block, level) {
            return None;
        }
        Some(Candidate {
            block,
            level,
            gfn,
            page: gfn.0 - slot.range().start.0,
            pfn,
            is_host_writable: leaf.is_host_writable(),
            attributes: slot.attributes_of(gfn),
            backing: slot.keep_for_resolve(hazard),
            seen,
        })
    }

    /// Whether `slot` may have a leaf of `level` for `block`.
    fn may_recover(&self, slot: &SlotView<'_, H::Backing>, block: GfnRange, level: Level) -> bool {
        if slot.flags().contains(MemoryRegionFlags::PINNED) {
            return false;
        }
        let config = &self.op.tree.config;
        let needs = slot.logs()
            && !(config.dirty_tracking.write_protects()
                && config.huge_page_logging.marks_whole()
                && level <= config.largest_logged_write());
        !needs && slot.allows_leaf(block, level)
    }

    /// Makes a leaf of the page-table page of `candidate`, if the host allows it.
    // In one piece: the guard and the broken PTE last through all steps.
    #[inline(never)]
    fn try_recover(&mut self, candidate: Candidate<'_, H::Backing>) -> Result<(), Changed> {
        let Candidate { block, level, gfn, page, pfn, is_host_writable, attributes, backing, seen } = candidate;
        let (op, tree) = (self.op, self.op.tree);
        let resolved = backing.resolve(op.host(), attributes, gfn, page, Access::Read);
        drop(backing);
        let is_huge = |resolved: Resolved| {
            resolved.pfn == pfn
                && resolved.max_size.level() >= level
                // A block that may be written needs that answer: `max_size` holds with `writable`.
                && (resolved.writable || !is_host_writable)
        };
        if !resolved.is_ok_and(is_huge) {
            return Ok(());
        }
        let locked = op.pin_locked(Side::Read);
        // A recovery that is bound to fail would cost the guest faults.
        if tree.current_seq() != seen {
            return Err(Changed);
        }
        let mut cursor = Cursor::new(tree, &locked.guard, block.start);
        cursor.descend_to(level);
        let Some((value, leaves)) = cursor.read_table(level) else { return Ok(()) };
        // Nor are so many leaves given up because one is missing, or still a page-table page.
        if level > Level::L2M && !leaves.iter().all(|pte| pte.load().is_leaf(level.down())) {
            return Ok(());
        }
        let table = value.table_below();
        let broken = Pte::broken(value, Breaking::Recovery);
        cursor.replace(value, broken)?;
        if !F::BREAK_BEFORE_MAKE {
            self.batch.add(block);
        }
        let first = Pfn(pfn.0 & !(level.nr_pages() - 1));
        // The counter is read only now. A directory entry holds no sequence number: since the
        // search, the block may have been emptied, its memslot deleted, and all be filled anew. An
        // invalidation that begins from now on finds the broken PTE, or what becomes of it. The
        // other side of this store-load pair takes a number, and then reads the PTE (`invalidate`).
        fence_after_rmw();
        let is_overtaken = tree.current_seq() != seen;
        let slot = op.slots.find(&locked.guard, gfn).filter(|slot| self.may_recover(slot, block, level));
        // The pages are marked in the memslot's bitmap, and in no ring.
        let may_write = slot.as_ref().is_some_and(|slot| !slot.logs()) && self.without_rings.is_some();
        let leaf = slot
            .filter(|_| !is_overtaken)
            // As hardware sees it.
            .and_then(|_| gather(leaves, tree.encoding.leaf(first, level, 0).plain_frame(level)))
            .and_then(|gathered| self.leaf(&gathered, first, level, may_write));
        if !F::BREAK_BEFORE_MAKE {
            // At this very PTE: a walk from the root could end at a broken PTE above.
            self.make(&locked.guard, &cursor, broken, leaf);
            // SAFETY: this call has broken the PTE, and `make` has replaced it. The batch has the
            // block.
            unsafe { give_up(op, &locked.guard, table, level.down(), &mut self.batch) }
            return Ok(());
        }
        drop(locked);
        op.flush(&[block]);
        let locked = op.pin_locked(Side::Read);
        if let Some(cursor) = find_broken(op, &locked.guard, block.start, level) {
            self.make(&locked.guard, &cursor, broken, leaf);
        }
        // SAFETY: as above; the flush is over.
        unsafe { give_up(op, &locked.guard, table, level.down(), &mut self.batch) }
        Ok(())
    }

    /// Exchanges this recovery's broken PTE at the cursor for `leaf`, or cancels if that is `None`.
    /// When this returns, the broken PTE is not there any more.
    fn make(&mut self, guard: &Guard<'_>, cursor: &Cursor<'_, H, F>, broken: Pte<F>, leaf: Option<Pte<F>>) {
        match leaf {
            Some(leaf) if cursor.replace(broken, leaf).is_ok() => {
                self.made(guard, leaf, cursor.block());
            }
            None if cursor.pte().load() == broken => {
                let pinned = cancel(self.op, guard, cursor);
                debug_assert!(pinned.is_none(), "this is a recovery");
            }
            _ => {}
        }
    }

    /// The leaf of `level` for all that was `gathered`, from frame `first` on, with W only if
    /// `may_write`. `None` if the parts do not have the same attributes. Where a fetch has split a
    /// huge leaf, those that were executed differ; the huge leaf is not executed either way.
    fn leaf(&self, gathered: &Gathered, first: Pfn, level: Level, may_write: bool) -> Option<Pte<F>> {
        let Tree { encoding, config, .. } = self.op.tree;
        let attributes = if config.hardware.splits_on_fetch() {
            let attributes = encoding.attributes_of(gathered.attributes);
            encoding.attribute_bits(LeafAttributes { execute: Execute::None, ..attributes })?
        } else if gathered.are_alike {
            gathered.attributes
        } else {
            return None;
        };
        let tracking = config.access_tracking;
        let bit = |is_set: bool, bit: u64| if is_set { bit } else { 0 };
        let may_write = may_write && gathered.is_host_writable && gathered.is_present;
        let marks = bit(gathered.is_host_writable, F::HOST_WRITABLE)
            | bit(may_write, F::WRITABLE)
            // As in `install`: where CPUs set neither, a leaf has A from the beginning, and D with
            // W.
            | bit(gathered.is_accessed || tracking == AccessTracking::Faults, F::ACCESSED)
            | bit(gathered.is_dirty || (tracking.writes_are_unseen::<F>() && may_write), F::DIRTY);
        let leaf = encoding.leaf(first, level, attributes).with(marks);
        Some(if gathered.is_present { leaf } else { leaf.tracked(level) })
    }

    /// Counts the leaf that was just made for `block`, and marks its pages if need be.
    fn made(&mut self, guard: &Guard<'_>, leaf: Pte<F>, block: GfnRange) {
        self.nr_recovered += 1;
        if leaf.is_writable() {
            log::mark_if_logging(self.op.slots, guard, None, block.start, block);
        }
    }
}

/// The first leaf in `ptes`, tracked or not, and its index.
fn first_leaf<F: Format>(ptes: Ptes<'_, F>) -> Option<(u64, Pte<F>)> {
    let values = ptes.iter().map(|pte| pte.load());
    (0..).zip(values).find(|(_, value)| value.is_leaf(ptes.level()))
}

/// Freezes `ptes`, which are to map the frames from `first` on, as hardware sees them. `None`: they
/// do not make one leaf, and some may not be frozen.
fn gather<F: Format>(ptes: Ptes<'_, F>, first: Pfn) -> Option<Gathered> {
    let level = ptes.level();
    let mut leaves = FrozenLeaves::new();
    let mut pfn = first;
    let mut attributes = None;
    for pte in ptes.iter() {
        let mut value = pte.load();
        let frozen = loop {
            match value.state(level) {
                State::Leaf | State::Tracked => match pte.freeze_as_was(value) {
                    Ok(frozen) => break frozen,
                    // Hardware has set A or D, or another thread has changed the PTE.
                    Err(found) => value = found,
                },
                // Frozen by a cancel: the exchange of the broken PTE fails.
                State::Frozen => break value,
                State::Empty(_) | State::Table | State::Broken => return None,
            }
        };
        if frozen.frame_before_freezing() != Some(pfn) {
            return None;
        }
        leaves.add(frozen);
        attributes.get_or_insert(frozen);
        pfn = Pfn(pfn.0 + level.nr_pages());
    }
    Some(Gathered {
        is_host_writable: leaves.are_host_writable()?,
        is_accessed: leaves.is_any_accessed(),
        is_dirty: leaves.is_any_dirty(),
        is_present: !leaves.are_all_tracked(),
        attributes: attributes?.attribute_bits(level),
        are_alike: leaves.differing_attributes() == 0,
    })
}
