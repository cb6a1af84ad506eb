//! Long walks over the page tables, in turns.
//!
//! # Guarantees
//! A walk stays in one guard, and in the VM's lock, for a bounded number of steps. Between two
//! turns other threads may run, and what the walk has retired may be freed.
//!
//! # Use
//! A walk implements [`Walk`]: one turn inside a guard, and what it must do outside of guards
//! before it goes on (allocate, flush, ask the host). [`run`] runs the turns. Most turns visit the
//! PTEs of a range one after the other: [`visit_ptes`].
//!
//! # Implementation
//! Each turn begins at the root, since all that an earlier guard has reached may be freed.

use crate::addr::{Gfn, GfnRange};
use crate::format::Format;
use crate::host::Host;
use crate::operation::Operation;
use crate::sync::Side;
use crate::table::Tree;
use crate::table::cursor::Cursor;
use crate::table::retire::Guard;

/// Why a turn ended, and the first frame that it did not reach.
pub(crate) enum TurnEnd<W> {
    /// The range is done, or the next turn goes on from here.
    At(Gfn),
    /// This must be done outside of guards first.
    Work(Gfn, W),
}

/// What a turn does after the visit of a PTE. Each visit counts some steps.
pub(crate) enum Next<W> {
    /// It goes on behind the block of the PTE.
    Advance(u64),
    /// It visits the cursor's PTE: that has changed, or the cursor has moved.
    Again(u64),
    /// It ends, for this work.
    Leave(W),
}

/// A walk under way.
pub(crate) trait Walk<H: Host, F: Format> {
    /// What must be done outside of guards.
    type Work;
    /// Why that may end the walk.
    type Error;
    /// The side of the VM's lock that a turn needs, if any.
    const SIDE: Option<Side>;

    /// One turn, inside a guard, from `start` on.
    fn turn(&mut self, guard: &Guard<'_>, start: Gfn) -> TurnEnd<Self::Work>;

    /// Does what the turn that ended at `gfn` has asked for. Returns where to go on.
    fn work(&mut self, gfn: Gfn, work: Self::Work) -> Result<Gfn, Self::Error>;
}

/// Walks over `range`, turn by turn.
///
/// # Errors
/// Those of [`Walk::work`].
pub(crate) fn run<H: Host, F: Format, W: Walk<H, F>>(
    op: Operation<'_, H, F>,
    range: GfnRange,
    walk: &mut W,
) -> Result<(), W::Error> {
    let mut next = range.start;
    while next < range.end {
        let end = match W::SIDE {
            // Without a lock the plain guard: a guard with room for a lock costs a walk over one
            // page a tenth of its time.
            Some(side) if op.tree.is_locked() => turn_locked(op, side, walk, next),
            _ => walk.turn(&op.pin(), next),
        };
        next = match end {
            TurnEnd::At(gfn) => gfn,
            TurnEnd::Work(gfn, work) => walk.work(gfn, work)?,
        };
        if next < range.end && op.tree.should_yield() {
            op.host().yield_now();
        }
    }
    Ok(())
}

/// A turn that holds `side` of the VM's lock.
// Never inlined: its guard is large for the stack of those without a lock.
#[inline(never)]
fn turn_locked<H: Host, F: Format, W: Walk<H, F>>(
    op: Operation<'_, H, F>,
    side: Side,
    walk: &mut W,
    start: Gfn,
) -> TurnEnd<W::Work> {
    walk.turn(&op.pin_locked(side).guard, start)
}

/// One turn of at most `max_steps` steps over the PTEs of `range`.
#[inline]
pub(crate) fn visit_ptes<'g, H: Host, F: Format, W>(
    tree: &'g Tree<H, F>,
    guard: &'g Guard<'g>,
    range: GfnRange,
    max_steps: u64,
    visit: impl FnMut(&mut Cursor<'g, H, F>) -> Next<W>,
) -> TurnEnd<W> {
    visit_ptes_from(Cursor::new(tree, guard, range.start), guard, range, max_steps, visit)
}

/// As [`visit_ptes`], from the PTE of `cursor` on.
#[inline]
pub(crate) fn visit_ptes_from<'g, H: Host, F: Format, W>(
    mut cursor: Cursor<'g, H, F>,
    guard: &Guard<'_>,
    range: GfnRange,
    max_steps: u64,
    mut visit: impl FnMut(&mut Cursor<'g, H, F>) -> Next<W>,
) -> TurnEnd<W> {
    let mut nr_steps = 0;
    let end = loop {
        if cursor.gfn() >= range.end || nr_steps >= max_steps {
            break TurnEnd::At(cursor.gfn());
        }
        match visit(&mut cursor) {
            Next::Advance(steps) => {
                cursor.advance();
                nr_steps += steps;
            }
            Next::Again(steps) => nr_steps += steps,
            Next::Leave(work) => break TurnEnd::Work(cursor.gfn(), work),
        }
    };
    guard.visit(nr_steps);
    end
}
