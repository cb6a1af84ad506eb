//! Aging: finds out, page by page, what the guest has used, and begins anew. It takes no lock,
//! waits for nothing, and needs no flush, except with shadow paging, where the caller flushes.
//!
//! Where leaves have an accessed bit, aging reads and clears it. A CPU that has the leaf cached
//! does not set A again until its translation is replaced. So pages may look older than they are,
//! as with all aging.
//!
//! Where they have none, aging makes the leaf *tracked* (`table/pte.rs`): the next access faults,
//! and the fault makes it a leaf again. A tracked leaf has lost W, which the first write restores,
//! as after a harvest. So the protocol of the dirty log need not know of tracked leaves.

use core::convert::Infallible;

use super::walk::{self, Next, TurnEnd, Walk};
use crate::addr::{Gfn, GfnRange, Level};
use crate::config::AccessTracking;
use crate::format::Format;
use crate::host::Host;
use crate::operation::Operation;
use crate::sync::Side;
use crate::table::Tree;
use crate::table::cursor::Cursor;
use crate::table::pte::{Pte, State};
use crate::table::pte_ref::Changed;
use crate::table::retire::Guard;

/// What becomes of the pages that were used.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Aging {
    /// They count as not used from now on.
    Age,
    /// They stay as they are.
    Test,
}

/// PTEs that a turn visits before it leaves its guard.
const ENTRIES_PER_TURN: u64 = 4096;

/// Ages or tests `range`. Returns the number of its pages that the guest has used.
pub(crate) fn age_range<H: Host, F: Format>(op: Operation<'_, H, F>, range: GfnRange, aging: Aging) -> u64 {
    let mut age = Age { tree: op.tree, range, aging, nr_used: 0 };
    let Ok(()) = walk::run(op, range, &mut age);
    age.nr_used
}

struct Age<'a, H: Host, F: Format> {
    tree: &'a Tree<H, F>,
    range: GfnRange,
    aging: Aging,
    nr_used: u64,
}

impl<H: Host, F: Format> Walk<H, F> for Age<'_, H, F> {
    type Work = Infallible;
    type Error = Infallible;
    /// The lock protects no A: hardware sets it at any time.
    const SIDE: Option<Side> = None;

    fn turn(&mut self, guard: &Guard<'_>, start: Gfn) -> TurnEnd<Infallible> {
        let Age { tree, range, aging, .. } = *self;
        let rest = GfnRange { start, ..range };
        walk::visit_ptes(tree, guard, rest, ENTRIES_PER_TURN, |cursor| {
            // A tracked leaf has not been used since it was aged. A pinned one is not aged; if it
            // takes the place of another just now, it may lose A once, which its next use restores.
            if let (leaf, State::Leaf) = cursor.descend_to_lowest() {
                match age_leaf(tree.config.access_tracking, cursor, leaf, aging) {
                    Ok(Used::Yes) => {
                        // Pages before the cursor were counted already, as small leaves, before a
                        // recovery made one leaf of them.
                        let rest = GfnRange { start: cursor.gfn(), end: range.end };
                        self.nr_used += cursor.block().intersection(rest).nr_pages();
                    }
                    Ok(Used::No) => {}
                    Err(Changed) => return Next::Again(0),
                }
            }
            Next::Advance(1)
        })
    }

    fn work(&mut self, _: Gfn, work: Infallible) -> Result<Gfn, Infallible> {
        match work {}
    }
}

enum Used {
    Yes,
    No,
}

/// Whether `leaf` at the cursor was used; ages it if so.
fn age_leaf<H: Host, F: Format>(
    tracking: AccessTracking,
    cursor: &Cursor<'_, H, F>,
    leaf: Pte<F>,
    aging: Aging,
) -> Result<Used, Changed> {
    let pte = cursor.pte();
    let aged = match tracking {
        _ if leaf.is_pinned() => return Ok(Used::No),
        AccessTracking::AccessedBit if !leaf.is_accessed() => return Ok(Used::No),
        AccessTracking::AccessedBit => leaf.without(F::ACCESSED),
        // A leaf that is present was used, or is about to be.
        AccessTracking::Faults => leaf.tracked(pte.level()),
    };
    if aging == Aging::Test {
        return Ok(Used::Yes);
    }
    if tracking == AccessTracking::AccessedBit && pte.level() == Level::L4K {
        pte.clear(F::ACCESSED);
        return Ok(Used::Yes);
    }
    pte.exchange(leaf, aged)?;
    Ok(Used::Yes)
}
