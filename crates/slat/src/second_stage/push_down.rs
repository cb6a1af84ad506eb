//! Push-down: the way back from a protected directory entry. The next writer gives W to one page
//! and takes it from the other 511.
//!
//! # Guarantees
//! Where the memslot logs, no page below the entry can be written that is not marked, once the
//! writer has marked its own.
//!
//! # Use
//! A write fault below a protected entry calls [`push_down`] and then marks its page. If the answer
//! is [`Pushed::LeafOnly`], it starts over.
//!
//! # Implementation
//! In one guard, a push-down
//! 1. reads the entry, protected and of some generation, and then whether the memslot logs,
//! 2. if it does, clears W of the other leaves,
//! 3. sets W of its own leaf,
//! 4. restores W of the entry, by a compare-and-exchange from the value of step 1,
//! 5. marks its page, even if step 4 failed: another thread may have restored W of the entry since
//!    step 3.
//!
//! # Why it is correct
//! A leaf below may have W and no bit in the log, since the harvest that protected the entry took
//! the bit. Hence step 2.
//!
//! If the memslot does not log, step 2 is not needed. Should it begin to log, its entry is
//! protected anew after the flag is set, and step 4 precedes that or fails; or its leaves lose W
//! one by one after the flag is set. Where all bits are set from the beginning, each is taken
//! before its leaf is visited.
//!
//! Neither change needs a flush. Where a CPU has a leaf cached with W, its bit is still set, or the
//! harvest that took it flushes. A CPU that has the protected entry cached faults and walks anew.

use super::install;
use crate::addr::{Access, Gfn, Level};
use crate::config::AccessTracking;
use crate::format::Format;
use crate::host::Host;
use crate::table::Tree;
use crate::table::cursor::{self, Cursor};
use crate::table::pte::{Pte, State};
use crate::table::pte_ref::{Changed, PteRef, Ptes};
use crate::table::retire::Guard;

/// Leaves that are read together.
const LEAVES_PER_LOOK: usize = 16;

/// What becomes of the other pages of the page-table page.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Others {
    /// They lose W: their memslot logs.
    Protect,
    /// They stay as they are: it does not log.
    Leave,
}

/// How far a push-down came.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pushed {
    /// The page may be written.
    Open,
    /// Its leaf has W, but the directory entry above has changed meanwhile.
    LeafOnly,
}

/// Clears W of `leaves` of 4 KiB.
fn protect_all<F: Format>(leaves: Ptes<'_, F>) {
    for leaves in leaves.chunks(LEAVES_PER_LOOK) {
        // Loads first: few leaves have W. A PTE that is no leaf has the bit clear. Acquire:
        // they must not be older than the load of the entry above.
        if leaves.iter().fold(0, |any, leaf| any | leaf.load().bits()) & F::WRITABLE == 0 {
            continue;
        }
        for leaf in leaves.iter() {
            if leaf.load().is_writable() {
                leaf.clear(F::WRITABLE);
            }
        }
    }
}

/// Gives W to page `gfn`, which the host allows to be written, below a protected directory entry:
/// steps 1 to 4 of the module. The caller marks the page.
///
/// # Errors
/// The entry is not protected, or the leaf has changed. The page has not got W; others may have
/// lost it.
pub(crate) fn push_down<H: Host, F: Format>(
    tree: &Tree<H, F>,
    guard: &Guard<'_>,
    gfn: Gfn,
    others: impl FnOnce() -> Others,
) -> Result<Pushed, Changed> {
    let mut above = Cursor::new(tree, guard, gfn);
    above.descend_to(Level::L2M);
    let Some((table, leaves)) = above.read_table(Level::L2M) else { return Err(Changed) };
    if !table.is_protected() {
        return Err(Changed);
    }
    let own_index = cursor::index_of::<F>(gfn, Level::L4K);
    push_down_in::<F>(tree.config.access_tracking, above.pte(), table, leaves, own_index, others)
}

/// [`push_down`] for the leaf at `own_index` of `leaves`, below the entry `above`, which was read
/// as `table`.
fn push_down_in<F: Format>(
    tracking: AccessTracking,
    above: PteRef<'_, F>,
    table: Pte<F>,
    leaves: Ptes<'_, F>,
    own_index: usize,
    others: impl FnOnce() -> Others,
) -> Result<Pushed, Changed> {
    let own = leaves.at(own_index);
    let value = own.load();
    let (State::Leaf | State::Tracked, true) = (value.state(Level::L4K), value.is_host_writable()) else {
        return Err(Changed);
    };
    if others() == Others::Protect {
        protect_all(leaves.slice(..own_index));
        protect_all(leaves.slice(own_index + 1..));
    }
    install::restore_access::<F>(tracking, own, value, Access::Write)?;
    match above.exchange(table, table.unprotected()) {
        Ok(()) => Ok(Pushed::Open),
        Err(Changed) => Ok(Pushed::LeafOnly),
    }
}

#[cfg(all(test, loom))]
#[path = "push_down_loom.rs"]
mod loom_tests;
