//! The single changes that faults make to PTEs: install a leaf, restore access, split a huge leaf.
//!
//! All run inside a guard, on the PTE that a cursor found there. They neither allocate nor wait:
//! the page-table pages that they link come from the caller's cache. Each is one
//! compare-and-exchange. [`Changed`] means that another thread or hardware was faster; the fault
//! starts over.

#![expect(unsafe_code, reason = "links the tables that it has prepared")]

use crate::addr::{Access, Level, Pfn};
use crate::config::AccessTracking;
use crate::format::Format;
use crate::host::Host;
use crate::table::Tree;
use crate::table::cursor::{self, Cursor};
use crate::table::encoding::{Encoding, Supported};
use crate::table::invalidation_seq::InvalidationSeq;
use crate::table::node::{Prepared, TableCache, TableUse};
use crate::table::pte::{Pte, State};
use crate::table::pte_ref::{Changed, PteRef};

/// A leaf that is to be installed.
#[derive(Clone, Copy)]
pub(crate) struct NewLeaf {
    /// Frame of the page that faulted.
    pub(crate) pfn: Pfn,
    pub(crate) level: Level,
    pub(crate) rights: Rights,
    pub(crate) attributes: Supported,
    /// The access for which it is installed; `None` if the guest has not used the page.
    pub(crate) used: Option<Access>,
}

/// What the guest may do through a leaf.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rights {
    /// The host does not allow writing.
    ReadOnly,
    /// The host allows writing. The leaf lacks W, so that the first write faults.
    WriteProtected,
    /// Writes go through.
    Writable,
}

/// `leaf` with A if it is `used` (a fault is an access), and D if it is written, so that no CPU has
/// to set them.
///
/// Where CPUs do not set A, a leaf counts as used as soon as it is installed. Where they do not set
/// D, it counts as dirty as soon as it has W, since no CPU records a write through it.
#[inline(always)]
fn used_leaf<F: Format>(leaf: Pte<F>, used: Option<Access>, tracking: AccessTracking) -> Pte<F> {
    let accessed = if used.is_some() || tracking == AccessTracking::Faults { F::ACCESSED } else { 0 };
    let is_written = used == Some(Access::Write) || (tracking.writes_are_unseen::<F>() && leaf.is_writable());
    let dirty = if is_written { F::DIRTY } else { 0 };
    leaf.with(accessed | dirty)
}

impl NewLeaf {
    #[inline(always)]
    pub(crate) fn pte<F: Format>(self, encoding: &Encoding<F>, tracking: AccessTracking) -> Pte<F> {
        let first = Pfn(self.pfn.0 & !(self.level.nr_pages() - 1));
        let rights = match self.rights {
            Rights::ReadOnly => 0,
            Rights::WriteProtected => F::HOST_WRITABLE,
            Rights::Writable => F::HOST_WRITABLE | F::WRITABLE,
        };
        used_leaf(encoding.leaf(first, self.level, encoding.bits_of(self.attributes)).with(rights), self.used, tracking)
    }
}

/// Installs `leaf` for the frame at the cursor, whose PTE is `value`, empty with `seq`. The
/// page-table pages that lie between are linked by the same compare-and-exchange. All their other
/// PTEs are empty with the same number.
///
/// The cache must hold `cursor.level() - leaf.level` page-table pages.
#[inline(always)]
pub(crate) fn install<H: Host, F: Format>(
    cursor: &Cursor<'_, H, F>,
    cache: &mut TableCache,
    value: Pte<F>,
    seq: InvalidationSeq,
    leaf: NewLeaf,
) -> Result<(), Changed> {
    let Tree { encoding, config, .. } = cursor.tree();
    let pte = leaf.pte(encoding, config.access_tracking);
    if leaf.level == cursor.level() {
        debug_assert!(value == Pte::empty(seq));
        // SAFETY: a PTE with a number is empty, and the leaf is of this level.
        return unsafe { cursor.pte().install(cursor.stats(), Pte::empty(seq), pte) };
    }
    // SAFETY: a leaf.
    let prepared = unsafe { prepare_around(cursor, cache, seq, leaf.level, pte) };
    link(cursor, prepared.with_leaves(1), value, seq, leaf.pfn)
}

/// Fills page-table pages of the cache that an empty PTE at the cursor can be replaced by, down to
/// one whose PTEs have `level`. All their PTEs are empty with `number`. That is the one of the PTE,
/// or one that the caller has just taken: no thread has seen it, so no fault can install what it has
/// resolved before.
pub(crate) fn prepare_to_refine<'c, H: Host, F: Format>(
    cursor: &Cursor<'c, H, F>,
    cache: &'c mut TableCache,
    number: InvalidationSeq,
    level: Level,
) -> Prepared<'c, H, F> {
    // SAFETY: an empty PTE.
    let prepared = unsafe { prepare_around(cursor, cache, number, level, Pte::empty(number)) };
    raise(cursor, prepared, number)
}

/// Fills a page-table page of the cache with `pte`, of `level`, where the cursor is, and with PTEs
/// that are empty with `seq`.
///
/// # Safety
/// `pte` names no page-table page.
unsafe fn prepare_around<'c, H: Host, F: Format>(
    cursor: &Cursor<'c, H, F>,
    cache: &'c mut TableCache,
    seq: InvalidationSeq,
    level: Level,
    pte: Pte<F>,
) -> Prepared<'c, H, F> {
    let inside = cursor::index_of::<F>(cursor.gfn(), level);
    // The caller has flushed the PTE, if that was needed.
    let beside = Pte::empty(seq.flushed());
    // SAFETY: as the caller promises.
    unsafe {
        cache.prepare_by(cursor.tree(), level, beside, |ptes| {
            ptes.skip(inside);
            ptes.push(pte);
        })
    }
}

/// Links `prepared` where the cursor's PTE is `value`, with those between, as [`install`] does with
/// a leaf.
pub(crate) fn link<H: Host, F: Format>(
    cursor: &Cursor<'_, H, F>,
    prepared: Prepared<'_, H, F>,
    value: Pte<F>,
    seq: InvalidationSeq,
    pfn: Pfn,
) -> Result<(), Changed> {
    let prepared = raise(cursor, prepared, seq);
    prepared.link(cursor.stats(), cursor.pte(), value, TableUse::Fault, pfn).map(drop)
}

/// Fills the page-table pages between `prepared` and the cursor. Their other PTEs are empty with
/// `seq`.
#[inline(always)]
fn raise<'c, H: Host, F: Format>(
    cursor: &Cursor<'_, H, F>,
    mut prepared: Prepared<'c, H, F>,
    seq: InvalidationSeq,
) -> Prepared<'c, H, F> {
    while prepared.level() < cursor.level() {
        prepared.raise(cursor::index_of::<F>(cursor.gfn(), prepared.level()), seq.flushed());
    }
    prepared
}

/// Restores `access` to the leaf `value` in `pte`, which is tracked or lacks W. The leaf itself
/// says that the host allows it.
#[inline(always)]
pub(crate) fn restore_access<F: Format>(
    tracking: AccessTracking,
    pte: PteRef<'_, F>,
    value: Pte<F>,
    access: Access,
) -> Result<(), Changed> {
    let leaf = match value.state(pte.level()) {
        State::Leaf => value,
        State::Tracked => value.untracked(pte.level()),
        State::Empty(_) | State::Table | State::Broken | State::Frozen => return Err(Changed),
    };
    let new = match access {
        Access::Write => {
            debug_assert!(value.is_host_writable());
            leaf.with(F::WRITABLE)
        }
        Access::Read | Access::Execute | Access::ExecuteUser => leaf,
    };
    let new = used_leaf(new, Some(access), tracking);
    // SAFETY: checked above. The other is the same leaf with more rights.
    unsafe { pte.exchange_unchecked(value, new) }
}

/// Replaces the huge leaf `value` at the cursor, tracked or not, by a page-table page of leaves one
/// level lower that allow the same. This needs no flush: translations that CPUs have cached of the
/// huge leaf stay true.
///
/// The cache must hold a page-table page.
pub(crate) fn split<H: Host, F: Format>(
    cursor: &Cursor<'_, H, F>,
    cache: &mut TableCache,
    value: Pte<F>,
) -> Result<(), Changed> {
    split_into(cursor, cache, value, value)
}

/// As [`split`], but the parts allow what `whole` does: `value`, perhaps with W. The caller has
/// made sure that the host allows it, and that writes are found out without a fault.
pub(crate) fn split_into<H: Host, F: Format>(
    cursor: &Cursor<'_, H, F>,
    cache: &mut TableCache,
    value: Pte<F>,
    whole: Pte<F>,
) -> Result<(), Changed> {
    let (tree, level) = (cursor.tree(), cursor.level());
    let parts = prepare_parts(tree, cache, whole, level);
    // If hardware sets A or D of the huge leaf meanwhile, the exchange fails, and the next try
    // copies them.
    parts.link(cursor.stats(), cursor.pte(), value, TableUse::Split, tree.encoding.frame(value, level)).map(drop)
}

/// Fills a page-table page of the cache with the parts of the huge leaf `whole` of `level`.
pub(crate) fn prepare_parts<'c, H: Host, F: Format>(
    tree: &'c Tree<H, F>,
    cache: &'c mut TableCache,
    whole: Pte<F>,
    level: Level,
) -> Prepared<'c, H, F> {
    // SAFETY: parts are leaves.
    unsafe { cache.prepare(tree, level.down(), whole.parts(level)) }
}
