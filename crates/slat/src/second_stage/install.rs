//! The single steps that faults and zaps do to the tree: install a leaf, give access back, split a huge leaf, take away
//! what is there.
//!
//! All run inside a section, on what a cursor found there, and neither allocate nor wait: the tables that they link come
//! from the caller's cache. Each is one compare-and-exchange; `Err(Changed)` means that somebody was faster and that the
//! fault starts over.

use super::age::AccessTracking;
use crate::addr::{Access, Level, Pfn};
use crate::format::{Entry, Format};
use crate::host::Host;
use crate::stats::{Counter, Recorder};
use crate::table::entry::{self, EntryRef, Stamp};
use crate::table::frames::{TableCache, TableUse};
use crate::table::walk::{self, Cursor};

/// The entry is no longer what the fault's decision was made on.
pub(crate) struct Changed;

/// What a leaf is to be.
#[derive(Clone, Copy)]
pub(crate) struct NewLeaf {
    /// Frame of the page that faulted.
    pub(crate) pfn: Pfn,
    /// Level of the leaf.
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
    /// The host allows writing; the leaf does not, so that the first write is seen.
    WriteProtected,
    /// Writes go through.
    Writable,
}

/// The leaf with A set if it is used (a fault is an access), and D if it is written, so that no CPU has to set them. Where
/// CPUs do not set A, a leaf is used as soon as it is there, and where they do not set D, dirty as soon as it can be written:
/// nothing else would tell.
fn used_leaf<F: Format>(leaf: Entry, used: Option<Access>, tracking: AccessTracking) -> Entry {
    let accessed = if used.is_some() || tracking == AccessTracking::Faults { F::ACCESSED } else { 0 };
    let is_written =
        used == Some(Access::Write) || (tracking.writes_are_unseen::<F>() && entry::is_writable::<F>(leaf));
    let dirty = if is_written { F::DIRTY } else { 0 };
    Entry(leaf.0 | accessed | dirty)
}

impl NewLeaf {
    pub(crate) fn entry<F: Format>(self, tracking: AccessTracking) -> Entry {
        let first = Pfn(self.pfn.0 & !(self.level.nr_pages() - 1));
        let rights = match self.rights {
            Rights::ReadOnly => 0,
            Rights::WriteProtected => F::HOST_WRITABLE,
            Rights::Writable => F::HOST_WRITABLE | F::WRITABLE,
        };
        used_leaf::<F>(Entry(F::leaf(first, self.level).0 | rights), self.used, tracking)
    }
}

/// Installs `leaf` for the frame at the cursor, whose current entry is `value`, empty with `stamp`. Links as many tables
/// as lie between, with all their other entries empty and of the same stamp: one compare-and-exchange shows it all.
///
/// The cache must hold `cursor.level() - leaf.level` tables.
#[inline(always)]
pub(crate) fn install<H: Host, F: Format>(
    cursor: &Cursor<'_, H, F>,
    host: &H,
    cache: &mut TableCache,
    value: Entry,
    stamp: Stamp,
    leaf: NewLeaf,
) -> Result<(), Changed> {
    link(
        cursor,
        host,
        cache,
        value,
        stamp,
        Prepared {
            entry: leaf.entry::<F>(cursor.tree().config.access_tracking),
            level: leaf.level,
            nr_tables: 0,
            pfn: leaf.pfn,
        },
    )
}

/// What is to hang on an entry of `level`, and how many tables of the cache it takes with it.
pub(crate) struct Prepared {
    pub(crate) entry: Entry,
    pub(crate) level: Level,
    pub(crate) nr_tables: usize,
    /// The memory that it is for.
    pub(crate) pfn: Pfn,
}

impl Prepared {
    /// An entry of `level` that is empty with `stamp`: what hangs above it then says the same, piece by piece.
    pub(crate) fn empty(stamp: Stamp, level: Level, pfn: Pfn) -> Prepared {
        Prepared { entry: entry::empty(stamp), level, nr_tables: 0, pfn }
    }
}

/// Puts `prepared` where it belongs below the cursor's entry `value`, as [`install`] does with a leaf.
#[inline(always)]
pub(crate) fn link<H: Host, F: Format>(
    cursor: &Cursor<'_, H, F>,
    host: &H,
    cache: &mut TableCache,
    value: Entry,
    stamp: Stamp,
    prepared: Prepared,
) -> Result<(), Changed> {
    let Prepared { entry: mut new, mut level, mut nr_tables, pfn } = prepared;
    while level < cursor.level() {
        let inside = walk::index_of::<F>(cursor.gfn(), level);
        // Whoever makes something of the entry has flushed it, if that was needed.
        let beside = entry::empty(stamp.flushed());
        new = cache.prepare::<H, F>(host, nr_tables, |index| if index == inside { new } else { beside });
        nr_tables += 1;
        level = level.up();
    }
    cursor.entry().compare_exchange::<F>(value, new).map_err(|_| Changed)?;
    cache.linked(host, cursor.stats(), nr_tables, TableUse::Fault, Some(pfn));
    Ok(())
}

/// Gives the guest access back to the leaf `value` in `entry`, which is tracked or lacks the right to write: the host allows
/// `access`, and tells nothing new.
#[inline]
pub(crate) fn give_back<F: Format>(
    tracking: AccessTracking,
    entry: EntryRef<'_>,
    value: Entry,
    access: Access,
) -> Result<(), Changed> {
    let leaf = entry::untracked::<F>(value, entry.level());
    let new = match access {
        Access::Write => {
            debug_assert!(entry::is_host_writable::<F>(value));
            Entry(leaf.0 | F::WRITABLE)
        }
        Access::Read | Access::Execute => leaf,
    };
    let new = used_leaf::<F>(new, Some(access), tracking);
    entry.compare_exchange::<F>(value, new).map_err(|_| Changed)
}

/// Replaces the huge leaf `value` at the cursor, tracked or not, by a table of leaves one level lower that allow the same. No
/// flush is owed: whatever a CPU has cached of the huge leaf is still true.
///
/// The cache must hold a table.
pub(crate) fn split<H: Host, F: Format>(
    cursor: &Cursor<'_, H, F>,
    host: &H,
    cache: &mut TableCache,
    value: Entry,
) -> Result<(), Changed> {
    split_into(cursor, host, cache, value, value)
}

/// As [`split`], but the parts allow what `whole` does, which is `value` but perhaps writable: for who has read that, and
/// writes are seen otherwise.
pub(crate) fn split_into<H: Host, F: Format>(
    cursor: &Cursor<'_, H, F>,
    host: &H,
    cache: &mut TableCache,
    value: Entry,
    whole: Entry,
) -> Result<(), Changed> {
    let level = cursor.level();
    let table = prepare_parts::<H, F>(host, cache, whole, level);
    // Hardware may set A or D of the huge leaf meanwhile: then the exchange fails, and the next try copies them.
    cursor.entry().compare_exchange::<F>(value, table).map_err(|_| Changed)?;
    let pfn = entry::frame::<F>(value, level);
    cache.linked(host, cursor.stats(), 1, TableUse::Split, Some(pfn));
    count_split(cursor.stats(), level);
    Ok(())
}

/// Fills a table of the cache with the parts of the huge leaf `whole` of `level`, and returns the entry that links it.
pub(crate) fn prepare_parts<H: Host, F: Format>(host: &H, cache: &mut TableCache, whole: Entry, level: Level) -> Entry {
    let mut parts_of = |level| cache.prepare::<H, F>(host, 0, |index| entry::part_of_huge::<F>(whole, level, index));
    match level {
        // A constant, for all but one split in 512: then so are the shifts, which are most of what it takes to fill a table.
        Level::L2M => parts_of(Level::L2M),
        _ => parts_of(level),
    }
}

/// Counts a split of a leaf of `level`.
pub(crate) fn count_split(stats: &Recorder, level: Level) {
    stats.count(Counter::Splits);
    if level > Level::L2M {
        stats.count(Counter::Splits1G);
    }
}

/// Takes away what is at the cursor, `value`, and leaves `stamp`, or renews the stamp of an empty entry. If hardware could
/// use it, a flush of its block is owed. Returns the empty entry.
pub(crate) fn take_away<H: Host, F: Format>(
    cursor: &Cursor<'_, H, F>,
    value: Entry,
    stamp: Stamp,
) -> Result<Entry, Changed> {
    let empty = entry::empty(stamp);
    cursor.entry().compare_exchange::<F>(value, empty).map_err(|_| Changed)?;
    Ok(empty)
}
