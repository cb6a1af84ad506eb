//! Pinned pages: memory that a caller maps in advance, without a fault, and that stays as it is
//! mapped until a call unmaps it.
//!
//! # Guarantees
//! - When a call has returned, each page of its range is mapped as it says: no operation but
//!   another such call, an invalidation, and the deletion or move of the memslot changes that.
//! - Calls for other pages, faults, and all other operations go on beside it. None waits for
//!   another.
//! - The frames of a page are released to the host once, when no CPU uses them any more
//!   ([`Host::release_mapped`]).
//!
//! # Use
//! A memslot with [`MemoryRegionFlags::PINNED`](crate::MemoryRegionFlags::PINNED) says where such
//! pages may be. Then [`map_range`], [`protect_range`], and to unmap them an invalidation
//! (`invalidate`), after [`split_end`].
//!
//! # Implementation
//! A leaf of a pinned page has marks that no other leaf has ([`Pte::PINNED`]). So each operation
//! sees at the leaf itself that it must leave it alone.
//!
//! A mapping is made in steps. Each step, inside one guard,
//! 1. walks to the lowest PTE of the next page, and reads it, or several of one page-table page,
//! 2. reads the ranges in flight, and then the memslot,
//! 3. walks again, and installs leaves by compare-and-exchange, on the very values that step 1 read.
//!
//! A mapping of a single page does not walk again unless something was retired meanwhile: the
//! argument is that of a fault (`vcpu/small.rs`).
//!
//! Where the PTE covers more than a leaf, a step fills a page-table page with leaves, and links it
//! by one exchange. So a page costs a store.
//!
//! If a step finds that it cannot go on, an *undo* empties the leaves that the earlier steps have
//! installed, and flushes all that they had mapped.
//!
//! # Why it is correct
//! A step is a fault whose host has answered already: `table/invalidation_seq.rs` has the argument.
//! The second walk matters. The first may end in a page-table page that was unlinked since; a leaf
//! there would be lost. That the second walk finds the very value shows that the PTE was linked
//! after step 2. If it is unlinked later, it holds another number before that.
//!
//! An undo need not keep other threads out of its range: faults install nothing in a pinned
//! memslot, and it empties only leaves with the frames of its own call. Each gets a fresh number.
//! Who has emptied such a leaf before it may not have flushed yet, so it flushes also where it finds
//! nothing. It finishes the split of a leaf that it finds broken, for the parts are its own
//! (`models/proofs/undo.py`).

#![expect(unsafe_code, reason = "installs leaves where it has found empty PTEs")]

mod protect;

pub(crate) use protect::protect_range;

use core::convert::Infallible;

use super::broken::{self, BrokenPinned};
use super::install;
use super::split::{self, Leaves};
use super::walk::{self, Next, TurnEnd, Walk};
use crate::addr::{Gfn, GfnRange, Level, PageSize, Pfn};
use crate::error::{MapError, OutOfMemory};
use crate::format::{Execute, Format, LeafAttributes};
use crate::host::{AllocationWait, Host, TableNode};
use crate::operation::Operation;
use crate::slot::MemoryRegionFlags;
use crate::stats::Counter;
use crate::sync::{Side, record};
use crate::table::Tree;
use crate::table::cursor::{self, Cursor};
use crate::table::encoding::Supported;
use crate::table::invalidation_seq::InvalidationSeq;
use crate::table::node::TableCache;
use crate::table::pte::{Pte, State};
use crate::table::pte_ref::Changed;
use crate::table::retire::Guard;

/// PTEs that a turn visits before it leaves its guard.
const ENTRIES_PER_TURN: u64 = 4096;

/// PTEs of one page-table page that a step reads and then exchanges.
const PTES_PER_STEP: usize = 32;

/// What the guest, or a device behind an IOMMU, may do with pages that are mapped in advance, and
/// how they are cached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Protection {
    /// Whether they may be written. They may be read in any case.
    pub writable: bool,
    /// Their memory type, and from where they may be executed.
    pub attributes: LeafAttributes,
}

/// Pages that are mapped in advance by [`Vm::map_range`](crate::Vm::map_range).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// The guest frames, all in one pinned memslot.
    pub range: GfnRange,
    /// The host frame of the first. The others follow.
    pub pfn: Pfn,
    /// What may be done with them.
    pub protection: Protection,
    /// The largest leaf. A leaf is as large as this and the alignment of both frames allow.
    pub largest: PageSize,
}

impl Mapping {
    /// The host frame of `gfn`.
    fn frame(&self, gfn: Gfn) -> Pfn {
        Pfn(self.pfn.0 + (gfn.0 - self.range.start.0))
    }
}

/// The leaf of `level` for `pfn`, which is aligned.
fn pinned_leaf<H: Host, F: Format>(
    tree: &Tree<H, F>,
    pfn: Pfn,
    level: Level,
    attributes: Supported,
    writable: Writable,
) -> Pte<F> {
    let rights = match writable {
        Writable::Yes => F::WRITABLE,
        Writable::No => 0,
    };
    tree.encoding.leaf(pfn, level, tree.encoding.bits_of(attributes)).with(Pte::<F>::PINNED | rights)
}

#[derive(Clone, Copy)]
enum Writable {
    Yes,
    No,
}

impl Writable {
    fn of(protection: &Protection) -> Writable {
        if protection.writable { Writable::Yes } else { Writable::No }
    }
}

/// Whether executable leaves have to be small.
fn keeps_small<H: Host, F: Format>(tree: &Tree<H, F>, attributes: LeafAttributes) -> bool {
    tree.config.hardware.splits_on_fetch() && attributes.execute != Execute::None
}

/// Maps the pages of `mapping`, whose frames a PTE can hold.
///
/// # Errors
/// Why the first page that could not be mapped was not. The pages before it are unmapped again, and
/// their frames are not released.
pub(crate) fn map_range<H: Host, F: Format>(op: Operation<'_, H, F>, mapping: &Mapping) -> Result<(), MapError> {
    let Mapping { range, protection, .. } = *mapping;
    let Some(attributes) = op.tree.encoding.supported(protection.attributes) else {
        return Err(MapError::UnsupportedAttributes { gpa: range.start.gpa(), attributes: protection.attributes });
    };
    if range.nr_pages() == 1 && map_page(op, mapping, attributes).is_ok() {
        return Ok(());
    }
    let largest = if keeps_small(op.tree, protection.attributes) { Level::L4K } else { mapping.largest.level() };
    let mut map = Map {
        op,
        mapping,
        largest,
        attributes,
        writable: Writable::of(&protection),
        tables: TableCache::new(),
        flushed: None,
        done: range.start,
    };
    let result = walk::run(op, range, &mut map);
    map.tables.drain(op.tree, op.stats());
    if result.is_err() && map.done > range.start {
        undo(op, mapping, map.done);
    }
    result
}

/// Maps the one page of `mapping`, if it has a PTE of 4 KiB that is empty, and there is no lock. A
/// step with all levels constant, and without what a long mapping keeps. Nor does it walk again,
/// unless something was retired meanwhile: `vcpu/small.rs` says why that is right.
fn map_page<H: Host, F: Format>(
    op: Operation<'_, H, F>,
    mapping: &Mapping,
    attributes: Supported,
) -> Result<(), Changed> {
    let tree = op.tree;
    let gfn = mapping.range.start;
    if tree.is_locked() {
        return Err(Changed);
    }
    let guard = &op.pin();
    record!(FaultLooks { gfn: gfn.0 });
    let (mut cursor, seen) = Cursor::at_small(tree, guard, gfn).ok_or(Changed)?;
    let State::Empty(seq) = seen.state(Level::L4K) else { return Err(Changed) };
    let is_pinned = || {
        let slot = op.slots.find(guard, gfn);
        slot.is_some_and(|slot| slot.flags().contains(MemoryRegionFlags::PINNED))
    };
    let is_flushed = !F::BREAK_BEFORE_MAKE || !seq.is_unflushed();
    if !is_flushed || tree.in_flight.free_level(gfn, Level::L4K).is_none() || !is_pinned() {
        return Err(Changed);
    }
    record!(HostAnswers { gfn: gfn.0, pfn: mapping.pfn.0, is_writable: 0 });
    if tree.epochs.has_retired_since(guard) {
        let (again, value) = Cursor::at_small(tree, guard, gfn).ok_or(Changed)?;
        if value != seen {
            return Err(Changed);
        }
        cursor = again;
    }
    let leaf = pinned_leaf(tree, mapping.pfn, Level::L4K, attributes, Writable::of(&mapping.protection));
    // SAFETY: an empty PTE of 4 KiB, and a leaf.
    unsafe { cursor.pte_at(Level::L4K).install(op.stats(), seen, leaf) }
}

/// What a turn leaves its guard for.
enum Work<F> {
    /// The cache has too few page-table pages, or none from this node.
    Allocate(usize, TableNode),
    /// An empty PTE is flushed before another leaf size is made there.
    Flush(Pte<F>, Level),
    /// Another thread splits a pinned leaf by breaking it.
    FinishSplit(BrokenPinned<F>),
    Fail(MapError),
}

/// A mapping under way.
struct Map<'m, H: Host, F: Format> {
    op: Operation<'m, H, F>,
    mapping: &'m Mapping,
    largest: Level,
    attributes: Supported,
    writable: Writable,
    tables: TableCache,
    /// The unflushed PTE that was flushed last; as in a zap.
    flushed: Option<Pte<F>>,
    /// The pages before this one are mapped.
    done: Gfn,
}

/// Why a step has not mapped its page.
enum Stop<F> {
    /// Another thread was faster.
    Changed,
    Work(Work<F>),
}

impl<F> From<Changed> for Stop<F> {
    fn from(Changed: Changed) -> Stop<F> {
        Stop::Changed
    }
}

impl<F> From<MapError> for Stop<F> {
    fn from(error: MapError) -> Stop<F> {
        Stop::Work(Work::Fail(error))
    }
}

impl<H: Host, F: Format> Walk<H, F> for Map<'_, H, F> {
    type Work = Work<F>;
    type Error = MapError;
    const SIDE: Option<Side> = Some(Side::Read);

    fn turn(&mut self, guard: &Guard<'_>, start: Gfn) -> TurnEnd<Work<F>> {
        let mut nr_steps = 0;
        let mut next = start;
        let end = loop {
            if next >= self.mapping.range.end || nr_steps >= ENTRIES_PER_TURN {
                break TurnEnd::At(next);
            }
            match self.step(guard, next) {
                Ok((end, steps)) => {
                    self.done = end;
                    next = end;
                    nr_steps += steps;
                }
                Err(Stop::Changed) => nr_steps += 1,
                Err(Stop::Work(work)) => break TurnEnd::Work(next, work),
            }
        };
        guard.visit(nr_steps);
        end
    }

    fn work(&mut self, gfn: Gfn, work: Work<F>) -> Result<Gfn, MapError> {
        match work {
            Work::Allocate(count, node) => self
                .tables
                .top_up(self.op.tree, self.op.stats(), count, node, AllocationWait::Allowed)
                .map_err(|()| OutOfMemory)?,
            Work::Flush(value, level) => {
                self.op.flush(&[gfn.block(level)]);
                self.flushed = Some(value);
            }
            Work::FinishSplit(broken) => broken.finish(self.op),
            Work::Fail(error) => return Err(error),
        }
        Ok(gfn)
    }
}

impl<H: Host, F: Format> Map<'_, H, F> {
    /// Maps `gfn`, and pages behind it. Returns the first page that it has not mapped, and how many
    /// PTEs it has visited.
    fn step(&mut self, guard: &Guard<'_>, gfn: Gfn) -> Result<(Gfn, u64), Stop<F>> {
        let tree = self.op.tree;
        // For the proofs a step is a fault. They know no more of rights than whether the host allows
        // writes, which is no matter of a pinned leaf.
        record!(FaultLooks { gfn: gfn.0 });
        let mut cursor = Cursor::new(tree, guard, gfn);
        let (value, state) = cursor.descend_to_lowest();
        let level = cursor.level();
        let State::Empty(seq) = state else { return Err(self.occupied(guard, &cursor, value, state)) };
        let leaf_level = self.leaf_level(gfn, level);
        if level == leaf_level {
            return self.install_run(guard, &cursor, value);
        }
        // The page-table page for the leaf, in the block of the PTE that links it.
        let last = self.mapping.range.end.align_down(leaf_level).min(gfn.block(leaf_level.up()).end);
        self.check(guard, gfn, leaf_level)?;
        // Beside another range in flight only the leaf itself is installed.
        let free = tree.in_flight.free_level(gfn, level);
        let end = if free == Some(level) { last } else { gfn.block(leaf_level).end };
        if F::BREAK_BEFORE_MAKE && seq.is_unflushed() && self.flushed != Some(value) {
            return Err(Stop::Work(Work::Flush(value, level)));
        }
        self.fill(guard, gfn, end, leaf_level, (value, level, seq))
    }

    /// The level of the leaf for `gfn`, where the lowest PTE has `level`.
    fn leaf_level(&self, gfn: Gfn, level: Level) -> Level {
        let pfn = self.mapping.frame(gfn);
        let mut leaf = self.largest.min(level).min(Level::L1G);
        let fits =
            |leaf: Level| (gfn.0 | pfn.0) & (leaf.nr_pages() - 1) == 0 && self.mapping.range.covers(gfn.block(leaf));
        while leaf > Level::L4K && !fits(leaf) {
            leaf = leaf.down();
        }
        leaf
    }

    /// Checks that a leaf of `level` may be installed for `gfn`: it reaches into no range in flight,
    /// and the whole mapping is in a pinned memslot. The PTE was read before.
    fn check(&self, guard: &Guard<'_>, gfn: Gfn, level: Level) -> Result<(), MapError> {
        if self.op.tree.in_flight.free_level(gfn, level) != Some(level) {
            return Err(MapError::Busy { gpa: gfn.gpa() });
        }
        self.check_slot(guard, gfn)
    }

    fn check_slot(&self, guard: &Guard<'_>, gfn: Gfn) -> Result<(), MapError> {
        let not_pinned = |gfn: Gfn| Err(MapError::NotPinned { gpa: gfn.gpa() });
        match self.op.slots.find(guard, gfn) {
            Some(slot) if slot.flags().contains(MemoryRegionFlags::PINNED) => {
                if slot.range().covers(self.mapping.range) { Ok(()) } else { not_pinned(slot.range().end) }
            }
            _ => not_pinned(gfn),
        }
    }

    /// What a step does about a PTE that is not empty.
    #[cold]
    fn occupied(&self, guard: &Guard<'_>, cursor: &Cursor<'_, H, F>, value: Pte<F>, state: State) -> Stop<F> {
        let (gfn, level) = (cursor.gfn(), cursor.level());
        if let Err(error) = self.check(guard, gfn, Level::L4K) {
            return error.into();
        }
        if state == State::Broken {
            return match broken::cancel(self.op, guard, cursor) {
                Some(pinned) => Stop::Work(Work::FinishSplit(pinned)),
                None => Stop::Changed,
            };
        }
        let first = self.op.tree.encoding.frame(value, level);
        let mapped = Pfn(first.0 + (gfn.0 & (level.nr_pages() - 1)));
        MapError::AlreadyMapped { gpa: gfn.gpa(), pfn: self.mapping.frame(gfn), mapped }.into()
    }

    /// Installs leaves of the cursor's level in its PTE, which was read as `value`, and in those
    /// behind it, as far as they are empty.
    fn install_run(
        &mut self,
        guard: &Guard<'_>,
        cursor: &Cursor<'_, H, F>,
        value: Pte<F>,
    ) -> Result<(Gfn, u64), Stop<F>> {
        let tree = self.op.tree;
        let (gfn, level) = (cursor.gfn(), cursor.level());
        let is_usable = |value: Pte<F>| match value.state(level) {
            State::Empty(seq) => !F::BREAK_BEFORE_MAKE || !seq.is_unflushed() || self.flushed == Some(value),
            _ => false,
        };
        if !is_usable(value) {
            return Err(Stop::Work(Work::Flush(value, level)));
        }
        let page_of = |nth: usize| Gfn(gfn.0 + nth as u64 * level.nr_pages());
        // All of one page-table page, and of one block that is wholly free or not.
        let block = gfn.block(level.up());
        let nr_wanted = (self.mapping.range.end.align_down(level).min(block.end).0 - gfn.0) / level.nr_pages();
        let nr_wanted = nr_wanted.min(PTES_PER_STEP as u64) as usize;
        let mut seen = [value; PTES_PER_STEP];
        let mut nr_seen = 1;
        let mut reader = Cursor::clone_at(cursor);
        while nr_seen < nr_wanted {
            let Some(value) = reader.move_to_pte(page_of(nr_seen), level).map(|pte| pte.load()) else { break };
            if !is_usable(value) {
                break;
            }
            seen[nr_seen] = value;
            nr_seen += 1;
        }
        self.check(guard, gfn, level)?;
        if tree.in_flight.free_level(gfn, level.up()) != Some(level.up()) {
            nr_seen = 1;
        }
        record!(HostAnswers { gfn: gfn.0, pfn: self.mapping.frame(gfn).0, is_writable: 0 });
        // The second walk; see the module.
        let mut cursor = Cursor::new(tree, guard, gfn);
        cursor.descend_to(level);
        if cursor.level() != level {
            return Err(Stop::Changed);
        }
        let leaf = pinned_leaf(tree, self.mapping.frame(gfn), level, self.attributes, self.writable);
        let mut nr_installed = 0;
        while nr_installed < nr_seen {
            let Some(pte) = cursor.move_to_pte(page_of(nr_installed), level) else { break };
            let leaf = leaf.behind(nr_installed as u64, level);
            // SAFETY: an empty PTE, as `is_usable` has found, and a leaf of this level.
            if unsafe { pte.exchange_unchecked(seen[nr_installed], leaf) }.is_err() {
                break;
            }
            nr_installed += 1;
        }
        if nr_installed == 0 {
            return Err(Stop::Changed);
        }
        self.op.stats().add(Counter::installed(level), nr_installed as u64);
        Ok((page_of(nr_installed), nr_seen as u64))
    }

    /// Fills a page-table page with leaves of `leaf_level` for the pages from `gfn` to `end`, and
    /// links it, with those between, where the lowest PTE was read as `value`, of `level`, empty
    /// with `seq`.
    fn fill(
        &mut self,
        guard: &Guard<'_>,
        gfn: Gfn,
        end: Gfn,
        leaf_level: Level,
        (value, level, seq): (Pte<F>, Level, InvalidationSeq),
    ) -> Result<(Gfn, u64), Stop<F>> {
        let tree = self.op.tree;
        let pfn = self.mapping.frame(gfn);
        let nr_tables = usize::from(level.0 - leaf_level.0);
        let node = tree.config.table_placement.node_for(&tree.host, Some(pfn));
        if !self.tables.has(nr_tables, node)
            && self.tables.top_up(tree, self.op.stats(), nr_tables, node, AllocationWait::Never).is_err()
        {
            return Err(Stop::Work(Work::Allocate(nr_tables, node)));
        }
        let first = cursor::index_of::<F>(gfn, leaf_level);
        let nr_leaves = (end.0 - gfn.0) / leaf_level.nr_pages();
        let leaf = pinned_leaf(tree, pfn, leaf_level, self.attributes, self.writable);
        let beside = Pte::empty(seq.flushed());
        let pte = |index: usize| {
            let nth = index.wrapping_sub(first) as u64;
            if nth < nr_leaves { leaf.behind(nth, leaf_level) } else { beside }
        };
        // SAFETY: leaves and empty PTEs.
        let prepared = unsafe { self.tables.prepare(tree, leaf_level, pte) }.with_leaves(nr_leaves);
        record!(HostAnswers { gfn: gfn.0, pfn: pfn.0, is_writable: 0 });
        // The second walk; see the module.
        let mut cursor = Cursor::new(tree, guard, gfn);
        let (found, _) = cursor.descend_to_lowest();
        if found != value || cursor.level() != level {
            return Err(Stop::Changed);
        }
        install::link(&cursor, prepared, value, seq, pfn)?;
        Ok((end, F::TABLE_ENTRIES as u64))
    }
}

/// Empties the leaves that a mapping has installed before `end`, and flushes. Their frames are not
/// released: the caller keeps them.
#[cold]
fn undo<H: Host, F: Format>(op: Operation<'_, H, F>, mapping: &Mapping, end: Gfn) {
    let range = GfnRange { start: mapping.range.start, end };
    record!(UndoBegins { start: range.start.0, end: range.end.0 });
    let Ok(()) = walk::run(op, range, &mut Undo { op, mapping, range });
    // Also what other calls have emptied: they may not have flushed yet.
    op.flush(&[range]);
}

struct Undo<'m, H: Host, F: Format> {
    op: Operation<'m, H, F>,
    mapping: &'m Mapping,
    range: GfnRange,
}

impl<H: Host, F: Format> Walk<H, F> for Undo<'_, H, F> {
    /// Another thread splits a pinned leaf by breaking it.
    type Work = BrokenPinned<F>;
    type Error = Infallible;
    const SIDE: Option<Side> = Some(Side::Read);

    fn turn(&mut self, guard: &Guard<'_>, start: Gfn) -> TurnEnd<BrokenPinned<F>> {
        let Undo { op, mapping, range } = *self;
        walk::visit_ptes(op.tree, guard, GfnRange { start, ..range }, ENTRIES_PER_TURN, |cursor| {
            let (value, state) = cursor.descend_to_lowest();
            let (level, block) = (cursor.level(), cursor.block());
            if state == State::Broken {
                return match broken::cancel(op, guard, cursor) {
                    Some(pinned) => Next::Leave(pinned),
                    None => Next::Again(1),
                };
            }
            let is_own = state == State::Leaf
                && value.is_pinned()
                && range.covers(block)
                && op.tree.encoding.frame(value, level) == mapping.frame(block.start);
            if is_own {
                let seq = op.tree.next_seq();
                let seq = if F::BREAK_BEFORE_MAKE { seq.unflushed() } else { seq };
                if cursor.pte().zap_leaf(op.stats(), value, seq).is_err() {
                    return Next::Again(1);
                }
            }
            Next::Advance(1)
        })
    }

    fn work(&mut self, gfn: Gfn, broken: BrokenPinned<F>) -> Result<Gfn, Infallible> {
        broken.finish(self.op);
        Ok(gfn)
    }
}

/// Splits the pinned leaf across the end of `range`, so that its part can change alone. A walk over
/// the range splits that across the start, before it has changed anything.
pub(crate) fn split_end<H: Host, F: Format>(op: Operation<'_, H, F>, range: GfnRange) -> Result<(), OutOfMemory> {
    if range.nr_pages() > 1 {
        let last = GfnRange::new(Gfn(range.end.0 - 1), 1);
        split::split_range(op, last, Level::L4K, Leaves::Pinned, |block| !range.covers(block))?;
    }
    Ok(())
}
