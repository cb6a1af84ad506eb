//! Pinned pages get other rights: to be written, and to be executed. The memory type stays.
//!
//! One exchange changes a leaf, and keeps its frame. A leaf of which only a part changes is split
//! before. At the end what is pinned of the range is flushed, to the end of each page-table page: a
//! CPU may have kept a right that was taken away, and on Arm the lack of one that was given. That is
//! so also where nothing has changed: another thread may have changed the leaves, and not flushed.

use super::{Writable, keeps_small, pinned_leaf, split_end};
use crate::addr::{Gfn, GfnRange, Level};
use crate::error::{MapError, OutOfMemory};
use crate::format::{Execute, Format, LeafAttributes};
use crate::host::Host;
use crate::operation::Operation;
use crate::second_stage::broken::{self, BrokenPinned};
use crate::second_stage::map::Protection;
use crate::second_stage::split::{self, Leaves};
use crate::second_stage::walk::{self, Next, TurnEnd, Walk};
use crate::sync::Side;
use crate::table::cursor::Cursor;
use crate::table::encoding::Supported;
use crate::table::pte::{Pte, State};
use crate::table::pte_ref::{Changed, PteRef, Ptes};
use crate::table::retire::Guard;
use crate::table::tlb::TlbBatch;

/// PTEs that a turn visits before it leaves its guard.
const ENTRIES_PER_TURN: u64 = 4096;

/// Gives the pinned pages of `range` other rights, and flushes. Returns how many pages these are.
///
/// # Errors
/// [`MapError::UnsupportedAttributes`], [`MapError::MemoryTypeFixed`], [`MapError::OutOfMemory`].
/// No page has changed then, unless another call has mapped pages of the range meanwhile.
pub(crate) fn protect_range<H: Host, F: Format>(
    op: Operation<'_, H, F>,
    range: GfnRange,
    protection: &Protection,
) -> Result<u64, MapError> {
    let Some(attributes) = op.tree.encoding.supported(protection.attributes) else {
        return Err(MapError::UnsupportedAttributes { gpa: range.start.gpa(), attributes: protection.attributes });
    };
    let writable = Writable::of(protection);
    let batch = op.batch();
    let mut protect = Protect { op, range, protection, attributes, writable, pass: Pass::Check, nr_pages: 0, batch };
    if range.nr_pages() > 1 {
        walk::run(op, range, &mut protect)?;
        protect.split()?;
    }
    protect.pass = Pass::Change;
    walk::run(op, range, &mut protect)?;
    Ok(protect.nr_pages)
}

/// What a walk over pinned pages does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    Check,
    Change,
}

struct Protect<'m, H: Host, F: Format> {
    op: Operation<'m, H, F>,
    range: GfnRange,
    protection: &'m Protection,
    attributes: Supported,
    writable: Writable,
    pass: Pass,
    nr_pages: u64,
    batch: TlbBatch<'m, H, F>,
}

/// What a turn of a [`Protect`] leaves its guard for.
enum ProtectWork<F> {
    /// A leaf that was mapped just now is larger than what changes.
    Split,
    FinishSplit(BrokenPinned<F>),
    Fail(MapError),
}

impl<H: Host, F: Format> Walk<H, F> for Protect<'_, H, F> {
    type Work = ProtectWork<F>;
    type Error = MapError;
    const SIDE: Option<Side> = Some(Side::Read);

    fn turn(&mut self, guard: &Guard<'_>, start: Gfn) -> TurnEnd<ProtectWork<F>> {
        let rest = GfnRange { start, ..self.range };
        walk::visit_ptes(self.op.tree, guard, rest, ENTRIES_PER_TURN, |cursor| self.visit(guard, cursor))
    }

    fn work(&mut self, gfn: Gfn, work: ProtectWork<F>) -> Result<Gfn, MapError> {
        match work {
            ProtectWork::Split => self.split()?,
            ProtectWork::FinishSplit(broken) => broken.finish(self.op),
            ProtectWork::Fail(error) => return Err(error),
        }
        Ok(gfn)
    }
}

impl<H: Host, F: Format> Protect<'_, H, F> {
    fn split(&self) -> Result<(), OutOfMemory> {
        split_end(self.op, self.range)?;
        split::split_range(self.op, GfnRange::new(self.range.start, 1), Level::L4K, Leaves::Pinned, |block| {
            !self.range.covers(block)
        })?;
        if keeps_small(self.op.tree, self.protection.attributes) {
            split::split_range(self.op, self.range, Level::L4K, Leaves::Pinned, |_| true)?;
        }
        Ok(())
    }

    /// Visits the cursor's PTE. Those of 4 KiB are visited together, from above.
    fn visit(&mut self, guard: &Guard<'_>, cursor: &mut Cursor<'_, H, F>) -> Next<ProtectWork<F>> {
        let (value, state) = cursor.descend_to(Level::L2M);
        let (level, block) = (cursor.level(), cursor.block());
        match state {
            State::Table => match cursor.read_table(Level::L2M) {
                Some((_, ptes)) => self.visit_small(cursor, ptes),
                None => Next::Again(1),
            },
            State::Broken => match broken::cancel(self.op, guard, cursor) {
                Some(pinned) => Next::Leave(ProtectWork::FinishSplit(pinned)),
                None => Next::Again(1),
            },
            State::Leaf if value.is_pinned() => {
                if let Err(error) = self.check(value, level, cursor.gfn()) {
                    return Next::Leave(ProtectWork::Fail(error));
                }
                if self.pass == Pass::Check {
                    return Next::Advance(1);
                }
                if !self.range.covers(block) || keeps_small(self.op.tree, self.protection.attributes) {
                    return Next::Leave(ProtectWork::Split);
                }
                self.batch.add(block);
                if self.change(cursor.pte(), value, level).is_err() {
                    return Next::Again(1);
                }
                self.nr_pages += block.nr_pages();
                Next::Advance(1)
            }
            _ => Next::Advance(1),
        }
    }

    /// Visits `ptes` of the lowest level, those of the page-table page below the cursor's PTE, from
    /// the cursor's page on, as far as the range goes. If it does not come to the end, the cursor is
    /// where it goes on.
    fn visit_small(&mut self, cursor: &mut Cursor<'_, H, F>, ptes: Ptes<'_, F>) -> Next<ProtectWork<F>> {
        let (part, pages) = cursor.small_pages(ptes, self.range.end);
        let mut checked = None;
        for (gfn, pte) in pages {
            loop {
                let value = pte.load();
                match value.state(Level::L4K) {
                    State::Leaf if value.is_pinned() => {}
                    State::Leaf | State::Tracked | State::Empty(_) => break,
                    // The page-table page was unlinked meanwhile, or is broken.
                    State::Frozen | State::Broken | State::Table => {
                        cursor.move_to(gfn);
                        return Next::Again(1 + gfn.0 - part.start.0);
                    }
                }
                // Most leaves have the attributes of the one before.
                let bits = value.attribute_bits(Level::L4K);
                if checked != Some(bits) {
                    if let Err(error) = self.check(value, Level::L4K, gfn) {
                        cursor.move_to(gfn);
                        return Next::Leave(ProtectWork::Fail(error));
                    }
                    if checked.is_none() && self.pass == Pass::Change {
                        self.batch.add(part);
                    }
                    checked = Some(bits);
                }
                if self.pass == Pass::Change {
                    if self.change(pte, value, Level::L4K).is_err() {
                        continue;
                    }
                    self.nr_pages += 1;
                }
                break;
            }
        }
        Next::Advance(1 + part.nr_pages())
    }

    /// Checks that the pinned leaf `value`, which maps `gfn`, has the memory type that is asked for.
    fn check(&self, value: Pte<F>, level: Level, gfn: Gfn) -> Result<(), MapError> {
        let encoding = &self.op.tree.encoding;
        let mapped = encoding.attributes_of(value.attribute_bits(level)).memory;
        // By their bits: some formats express two types alike.
        let bits_of = |memory| encoding.attribute_bits(LeafAttributes { memory, execute: Execute::None });
        if bits_of(mapped) != bits_of(self.protection.attributes.memory) {
            return Err(MapError::MemoryTypeFixed { gpa: gfn.gpa(), mapped });
        }
        Ok(())
    }

    /// Gives the pinned leaf `value` of `level` in `pte` the rights. It is flushed also if it has them
    /// already: the thread that has changed it may not have come to its flush.
    #[inline]
    fn change(&self, pte: PteRef<'_, F>, value: Pte<F>, level: Level) -> Result<(), Changed> {
        let pfn = self.op.tree.encoding.frame(value, level);
        let new = pinned_leaf(self.op.tree, pfn, level, self.attributes, self.writable);
        if new == value { Ok(()) } else { pte.exchange(value, new) }
    }
}
