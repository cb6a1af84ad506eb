//! Pinned pages get other rights: to be written, and to be executed. The memory type stays.
//!
//! One exchange changes a leaf, and keeps its frame. A leaf of which only a part changes is split
//! before. At the end the range is flushed: a CPU may have kept a right that was taken away, and on
//! Arm the lack of one that was given.

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
use crate::table::pte::State;
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

    fn visit(&mut self, guard: &Guard<'_>, cursor: &mut Cursor<'_, H, F>) -> Next<ProtectWork<F>> {
        let tree = self.op.tree;
        let (value, state) = cursor.descend_to_lowest();
        let (level, block) = (cursor.level(), cursor.block());
        if state == State::Broken {
            return match broken::cancel(self.op, guard, cursor) {
                Some(pinned) => Next::Leave(ProtectWork::FinishSplit(pinned)),
                None => Next::Again(1),
            };
        }
        if state != State::Leaf || !value.is_pinned() {
            return Next::Advance(1);
        }
        let mapped = tree.encoding.attributes_of(value.attribute_bits(level)).memory;
        // By their bits: some formats express two types alike.
        let bits_of = |memory| tree.encoding.attribute_bits(LeafAttributes { memory, execute: Execute::None });
        if bits_of(mapped) != bits_of(self.protection.attributes.memory) {
            return Next::Leave(ProtectWork::Fail(MapError::MemoryTypeFixed { gpa: cursor.gfn().gpa(), mapped }));
        }
        if self.pass == Pass::Check {
            return Next::Advance(1);
        }
        if !self.range.covers(block) || (level > Level::L4K && keeps_small(tree, self.protection.attributes)) {
            return Next::Leave(ProtectWork::Split);
        }
        let pfn = tree.encoding.frame(value, level);
        let new = pinned_leaf(tree, pfn, level, self.attributes, self.writable);
        if new != value {
            if cursor.pte().exchange(value, new).is_err() {
                return Next::Again(1);
            }
            self.batch.add(block);
        }
        self.nr_pages += block.nr_pages();
        Next::Advance(1)
    }
}
