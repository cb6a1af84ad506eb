//! The way back from a closed table entry: the next write below gives the right to write to its own page, and takes it from
//! the 511 others one by one, before it opens the entry.
//!
//! In this order: (1) read the entry, closed and of some generation, and then whether the slot logs; (2) if it does, clear W
//! of the other leaves; (3) set W of its own; (4) open the entry by a compare-and-exchange from the value of (1); (5) mark
//! the page, also if (4) failed, for somebody else may have opened the entry since (3). If (4) failed, start over.
//!
//! A leaf of the closed table may have W and no bit in the log: the harvest that closed the entry took it. That is why the
//! others are cleared. If the slot does not log, they need not be: should it begin to, the entry is closed after the flag is
//! set, so that (4) comes before that closing or fails (or all bits are set, and each is taken before its leaf is looked at).
//!
//! Clearing W here owes no flush: what a CPU has cached as writable has a bit that is still set, or was flushed by who took
//! it. Opening owes none either: a CPU that has the closed entry cached faults and walks anew.

use super::age::AccessTracking;
use super::install::{self, Changed};
use crate::addr::{Access, Gfn, Level};
use crate::format::{Entry, Format};
use crate::host::Host;
use crate::sync::{AtomicU64, Ordering};
use crate::table::Tree;
use crate::table::entry::{self, EntryRef, State};
use crate::table::retire::Section;
use crate::table::walk::{self, Cursor};

/// Leaves that are looked at together.
const LEAVES_PER_LOOK: usize = 16;

/// What is to become of the other pages of the table.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Others {
    /// They lose the right to write: their slot logs.
    Protect,
    /// They stay as they are: it does not.
    Leave,
}

/// How far a push-down came.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pushed {
    /// The page may be written.
    Open,
    /// Its leaf says so, but the entry above has changed meanwhile.
    LeafOnly,
}

/// Clears W of the leaves of 4 KiB in `cells`.
fn protect_all<F: Format>(cells: &[AtomicU64]) {
    for cells in cells.chunks(LEAVES_PER_LOOK) {
        // A look first: mostly few have it. What is no leaf has the bit clear. Acquire, so that the look is not older than
        // the one at the entry above.
        if cells.iter().fold(0, |any, cell| any | cell.load(Ordering::Acquire)) & F::WRITABLE == 0 {
            continue;
        }
        for cell in cells {
            let leaf = EntryRef::new(cell, Level::L4K);
            if entry::is_writable::<F>(leaf.load()) {
                leaf.clear::<F>(F::WRITABLE);
            }
        }
    }
}

/// Gives the right to write to the page `gfn`, which the host allows to be written, below an entry that `section` has found
/// closed; steps 2 to 4 of the module. The caller marks the page.
///
/// # Errors
/// There is nothing to be done like that any more; nothing has changed.
pub(crate) fn push_down<H: Host, F: Format>(
    tree: &Tree<H, F>,
    section: &Section<'_>,
    gfn: Gfn,
    others: impl FnOnce() -> Others,
) -> Result<Pushed, Changed> {
    let mut above = Cursor::new(tree, section, gfn);
    above.descend_to(Level::L2M);
    let Some((table, leaves)) = above.read_table(Level::L2M) else { return Err(Changed) };
    if !entry::is_closed::<F>(table) {
        return Err(Changed);
    }
    let own_index = walk::index_of::<F>(gfn, Level::L4K);
    push_down_in::<F>(tree.config.access_tracking, above.entry(), table, leaves, own_index, others)
}

/// [`push_down`] in the table `leaves`, for the one at `own_index`: the entry above is `above`, and was read as `table`.
fn push_down_in<F: Format>(
    tracking: AccessTracking,
    above: EntryRef<'_>,
    table: Entry,
    leaves: &[AtomicU64],
    own_index: usize,
    others: impl FnOnce() -> Others,
) -> Result<Pushed, Changed> {
    let own = EntryRef::new(&leaves[own_index], Level::L4K);
    let value = own.load();
    let (State::Leaf | State::Tracked, true) =
        (entry::state::<F>(value, Level::L4K), entry::is_host_writable::<F>(value))
    else {
        return Err(Changed);
    };
    if others() == Others::Protect {
        let (below, from_own) = leaves.split_at(own_index);
        protect_all::<F>(below);
        protect_all::<F>(&from_own[1..]);
    }
    install::give_back::<F>(tracking, own, value, Access::Write)?;
    match above.compare_exchange::<F>(table, entry::opened::<F>(table)) {
        Ok(()) => Ok(Pushed::Open),
        Err(_) => Ok(Pushed::LeafOnly),
    }
}

#[cfg(all(test, loom))]
#[path = "push_down_loom.rs"]
mod loom_tests;
