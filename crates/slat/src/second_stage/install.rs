//! The single changes that faults and zaps make to PTEs: install a leaf, restore access, split a
//! huge leaf, empty a PTE.
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
use crate::stats::{Counter, Recorder};
use crate::table::cursor::{self, Cursor};
use crate::table::invalidation_seq::InvalidationSeq;
use crate::table::node::{TableCache, TableUse};
use crate::table::pte::Pte;
use crate::table::pte_ref::PteRef;

/// The PTE is no longer what the caller has read.
pub(crate) struct Changed;

/// A leaf that is to be installed.
#[derive(Clone, Copy)]
pub(crate) struct NewLeaf {
    /// Frame of the page that faulted.
    pub(crate) pfn: Pfn,
    pub(crate) level: Level,
    pub(crate) rights: Rights,
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
fn used_leaf<F: Format>(leaf: Pte<F>, used: Option<Access>, tracking: AccessTracking) -> Pte<F> {
    let accessed = if used.is_some() || tracking == AccessTracking::Faults { F::ACCESSED } else { 0 };
    let is_written = used == Some(Access::Write) || (tracking.writes_are_unseen::<F>() && leaf.is_writable());
    let dirty = if is_written { F::DIRTY } else { 0 };
    leaf.with(accessed | dirty)
}

impl NewLeaf {
    pub(crate) fn pte<F: Format>(self, tracking: AccessTracking) -> Pte<F> {
        let first = Pfn(self.pfn.0 & !(self.level.nr_pages() - 1));
        let rights = match self.rights {
            Rights::ReadOnly => 0,
            Rights::WriteProtected => F::HOST_WRITABLE,
            Rights::Writable => F::HOST_WRITABLE | F::WRITABLE,
        };
        used_leaf(Pte::leaf(first, self.level).with(rights), self.used, tracking)
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
    host: &H,
    cache: &mut TableCache,
    value: Pte<F>,
    seq: InvalidationSeq,
    leaf: NewLeaf,
) -> Result<(), Changed> {
    link(
        cursor,
        host,
        cache,
        value,
        seq,
        Prepared {
            pte: leaf.pte::<F>(cursor.tree().config.access_tracking),
            level: leaf.level,
            nr_tables: 0,
            pfn: leaf.pfn,
        },
    )
}

/// A PTE of `level` to be linked, with the page-table pages of the cache that it takes along.
pub(crate) struct Prepared<F> {
    pub(crate) pte: Pte<F>,
    pub(crate) level: Level,
    pub(crate) nr_tables: usize,
    /// The memory that it is for.
    pub(crate) pfn: Pfn,
}

impl<F: Format> Prepared<F> {
    /// A PTE of `level` that is empty with `seq`: linked below an empty PTE, it changes nothing.
    pub(crate) fn empty(seq: InvalidationSeq, level: Level, pfn: Pfn) -> Prepared<F> {
        Prepared { pte: Pte::empty(seq), level, nr_tables: 0, pfn }
    }
}

/// Links `prepared` below the cursor's PTE `value`, as [`install`] does with a leaf.
#[inline(always)]
pub(crate) fn link<H: Host, F: Format>(
    cursor: &Cursor<'_, H, F>,
    host: &H,
    cache: &mut TableCache,
    value: Pte<F>,
    seq: InvalidationSeq,
    prepared: Prepared<F>,
) -> Result<(), Changed> {
    let Prepared { pte: mut new, mut level, mut nr_tables, pfn } = prepared;
    while level < cursor.level() {
        let inside = cursor::index_of::<F>(cursor.gfn(), level);
        // The caller has flushed the PTE, if that was needed.
        let beside = Pte::empty(seq.flushed());
        // SAFETY: `linked` follows the exchange at once.
        new = unsafe { cache.prepare::<H, F>(host, nr_tables, |index| if index == inside { new } else { beside }) };
        nr_tables += 1;
        level = level.up();
    }
    cursor.pte().compare_exchange(value, new).map_err(|_| Changed)?;
    cache.linked(host, cursor.stats(), nr_tables, TableUse::Fault, Some(pfn));
    Ok(())
}

/// Restores `access` to the leaf `value` in `pte`, which is tracked or lacks W. The leaf itself
/// says that the host allows it.
#[inline]
pub(crate) fn restore_access<F: Format>(
    tracking: AccessTracking,
    pte: PteRef<'_, F>,
    value: Pte<F>,
    access: Access,
) -> Result<(), Changed> {
    let leaf = value.untracked(pte.level());
    let new = match access {
        Access::Write => {
            debug_assert!(value.is_host_writable());
            leaf.with(F::WRITABLE)
        }
        Access::Read | Access::Execute => leaf,
    };
    let new = used_leaf(new, Some(access), tracking);
    pte.compare_exchange(value, new).map_err(|_| Changed)
}

/// Replaces the huge leaf `value` at the cursor, tracked or not, by a page-table page of leaves one
/// level lower that allow the same. This needs no flush: translations that CPUs have cached of the
/// huge leaf stay true.
///
/// The cache must hold a page-table page.
pub(crate) fn split<H: Host, F: Format>(
    cursor: &Cursor<'_, H, F>,
    host: &H,
    cache: &mut TableCache,
    value: Pte<F>,
) -> Result<(), Changed> {
    split_into(cursor, host, cache, value, value)
}

/// As [`split`], but the parts allow what `whole` does: `value`, perhaps with W. The caller has
/// made sure that the host allows it, and that writes are found out without a fault.
pub(crate) fn split_into<H: Host, F: Format>(
    cursor: &Cursor<'_, H, F>,
    host: &H,
    cache: &mut TableCache,
    value: Pte<F>,
    whole: Pte<F>,
) -> Result<(), Changed> {
    let level = cursor.level();
    // SAFETY: `linked` follows the exchange at once.
    let table = unsafe { prepare_parts::<H, F>(host, cache, whole, level) };
    // If hardware sets A or D of the huge leaf meanwhile, the exchange fails, and the next try
    // copies them.
    cursor.pte().compare_exchange(value, table).map_err(|_| Changed)?;
    let pfn = value.frame(level);
    cache.linked(host, cursor.stats(), 1, TableUse::Split, Some(pfn));
    count_split(cursor.stats(), level);
    Ok(())
}

/// Fills a page-table page of the cache with the parts of the huge leaf `whole` of `level`. Returns
/// the directory entry that links it.
///
/// # Safety
/// As for [`TableCache::prepare`].
pub(crate) unsafe fn prepare_parts<H: Host, F: Format>(
    host: &H,
    cache: &mut TableCache,
    whole: Pte<F>,
    level: Level,
) -> Pte<F> {
    let mut parts_of = |level| {
        // SAFETY: as the caller promises.
        unsafe { cache.prepare::<H, F>(host, 0, |index| whole.part(level, index)) }
    };
    match level {
        // A constant level for all but one split in 512. So the shifts are constants, too, which
        // are most of the work.
        Level::L2M => parts_of(Level::L2M),
        _ => parts_of(level),
    }
}

pub(crate) fn count_split(stats: &Recorder, level: Level) {
    stats.count(Counter::Splits);
    if level > Level::L2M {
        stats.count(Counter::Splits1G);
    }
}

/// Empties the PTE at the cursor, which holds `value` and may be empty already, and stores `seq`.
/// Returns the empty PTE. If hardware could use `value`, a flush of its block is due.
pub(crate) fn zap_pte<H: Host, F: Format>(
    cursor: &Cursor<'_, H, F>,
    value: Pte<F>,
    seq: InvalidationSeq,
) -> Result<Pte<F>, Changed> {
    let empty = Pte::empty(seq);
    cursor.pte().compare_exchange(value, empty).map_err(|_| Changed)?;
    Ok(empty)
}
