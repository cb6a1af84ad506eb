//! Broken entries: somebody is between a table and a huge leaf, and whoever meets that does not wait.
//!
//! A broken entry names a table. In a recovery (`recover`) that is the table which hung there, whose entries its owner is
//! freezing; in a split (`split`, where the format needs a break) it is the table that is to hang there. Both belong to the
//! one who broke the entry.
//!
//! Whoever needs the entry cancels: it tells the host what the guest did through each leaf, freezes what is not frozen yet,
//! takes a stamp, and exchanges the broken entry for an empty one with that stamp. The owner's exchange then fails, and it
//! retires its table. Several may cancel at once: the exchange of one succeeds, and by then all has been told. A fault may
//! have walked into the table before it was broken; hence the freezing, and hence the stamp of its own. No flush is owed
//! for it: the frames stay the guest's until an invalidation, which flushes; the owner owes one for the table. But where
//! tables and huge leaves must not be cached at once, the empty entry says that a flush must come before the next make
//! ([`Stamp::unflushed`](crate::table::entry::Stamp::unflushed)).
//!
//! A table may be retired while somebody still reads it here, inside a section: links of the list of retired tables do not
//! look like frozen leaves, and the exchange fails, for the owner has retired it only once the entry was no longer broken.
//! Who only protects, ages or asks passes a broken entry by. What was to be protected is marked instead: whoever makes the
//! huge leaf writable reads the slot's flags again after that (`models/recover.py`).

#![expect(unsafe_code, reason = "reads the tables that broken and frozen entries name")]

use super::zap::{mark_dirty, report, zapped_leaf};
use crate::addr::{Gfn, Hpa, Level};
use crate::format::{Entry, Format};
use crate::host::Host;
use crate::slot::set::Slots;
use crate::stats::Counter;
use crate::table::Tree;
use crate::table::entry::{self, Breaking, EntryRef, Frozen, State};
use crate::table::frames;
use crate::table::retire::Section;
use crate::table::tlb::TlbBatch;
use crate::table::walk::Cursor;

/// What is told, and to whom.
struct Telling<'c, H: Host, F: Format> {
    tree: &'c Tree<H, F>,
    slots: &'c Slots<H::Backing>,
    section: &'c Section<'c>,
    nr_4k: u64,
    nr_2m: u64,
}

/// Cancels what is under way at the cursor's entry, which was found broken.
#[cold]
pub(crate) fn cancel<H: Host, F: Format>(
    tree: &Tree<H, F>,
    slots: &Slots<H::Backing>,
    section: &Section<'_>,
    cursor: &Cursor<'_, H, F>,
) {
    let (entry, level) = (cursor.entry(), cursor.level());
    let value = entry.load();
    if entry::state::<F>(value, level) != State::Broken {
        return;
    }
    let (table, breaking) = entry::table_of_broken(value);
    let mut telling = Telling { tree, slots, section, nr_4k: 0, nr_2m: 0 };
    // SAFETY: a broken entry that was read inside the section names it.
    unsafe { telling.tell_and_freeze(table, level.down(), cursor.block().start, breaking) }
    let stamp = tree.next_stamp();
    let stamp = if F::BREAK_BEFORE_MAKE { stamp.unflushed() } else { stamp };
    if entry.compare_exchange::<F>(value, entry::empty(stamp)).is_err() {
        return;
    }
    let stats = cursor.stats();
    match breaking {
        Breaking::Split => stats.count(zapped_leaf(level)),
        Breaking::Recovery => {
            stats.add(Counter::Zapped4K, telling.nr_4k);
            stats.add(Counter::Zapped2M, telling.nr_2m);
        }
    }
    stats.count(Counter::Zapped);
}

/// Tells what is behind the broken entry `value` of `level`, for the pages from `start` on, and freezes it, once the entry
/// itself was frozen.
///
/// # Safety
/// `value` was read inside the section from an entry of `level` of this tree, and is broken.
pub(super) unsafe fn tell_frozen<H: Host, F: Format>(
    tree: &Tree<H, F>,
    slots: &Slots<H::Backing>,
    section: &Section<'_>,
    value: Entry,
    level: Level,
    start: Gfn,
) {
    let (table, breaking) = entry::table_of_broken(value);
    let mut telling = Telling { tree, slots, section, nr_4k: 0, nr_2m: 0 };
    // SAFETY: as the caller promises.
    unsafe { telling.tell_and_freeze(table, level.down(), start, breaking) }
}

impl<H: Host, F: Format> Telling<'_, H, F> {
    /// Tells what the entries of `table`, of `level` and for the pages from `start` on, are or were. Those of a table that
    /// is given up are frozen.
    ///
    /// # Safety
    /// The table's address was read inside the section, in an entry of the level above.
    unsafe fn tell_and_freeze(&mut self, table: Hpa, level: Level, start: Gfn, breaking: Breaking) {
        // SAFETY: as the caller promises.
        let cells = unsafe { frames::linked_entries::<H, F>(&self.tree.host, self.section, table, level) };
        for (index, cell) in cells.iter().enumerate() {
            let gfn = Gfn(start.0 + index as u64 * level.nr_pages());
            let entry = EntryRef::new(cell, level);
            let mut value = entry.load();
            loop {
                let state = entry::state::<F>(value, level);
                let told = (self.nr_4k, self.nr_2m);
                if breaking == Breaking::Split && matches!(state, State::Table | State::Broken) {
                    // It was linked by now, and is in use: there is nothing to cancel any more.
                    return;
                }
                if state == State::Broken {
                    // Before it is frozen: then nobody could tell any more what was behind it.
                    let (below, breaking) = entry::table_of_broken(value);
                    // SAFETY: `value` is of this table, and was read inside the section.
                    unsafe { self.tell_and_freeze(below, level.down(), gfn, breaking) }
                    if breaking == Breaking::Split {
                        // Still one leaf, as far as it was counted.
                        (self.nr_4k, self.nr_2m) = (told.0, told.1 + 1);
                    }
                }
                // A table that was to be linked stays its owner's: perhaps it is linked yet.
                if breaking == Breaking::Recovery && state != State::Frozen {
                    if let Err(found) = entry.freeze_as_was::<F>(value) {
                        value = found;
                        (self.nr_4k, self.nr_2m) = told;
                        continue;
                    }
                }
                let leaf = match (state, breaking) {
                    (State::Leaf | State::Tracked, _) => value,
                    (State::Table, _) => {
                        let below = F::address(value, level);
                        // SAFETY: as above.
                        unsafe { self.tell_and_freeze(below, level.down(), gfn, Breaking::Recovery) }
                        break;
                    }
                    (State::Frozen, _) => match entry::before_freezing::<F>(value, level) {
                        Frozen::Leaf(leaf) => leaf,
                        Frozen::Table(below) => {
                            // SAFETY: as above.
                            unsafe { self.tell_and_freeze(below, level.down(), gfn, Breaking::Recovery) }
                            break;
                        }
                        Frozen::Nothing => break,
                    },
                    (State::Empty(_) | State::Broken, _) => break,
                };
                report(self.tree, leaf, level, gfn.block(level));
                // The exchange is over for it: no CPU sets the dirty bit any more.
                mark_dirty(self.tree, self.slots, self.section, leaf, level, gfn.block(level));
                match level {
                    Level::L4K => self.nr_4k += 1,
                    _ => self.nr_2m += 1,
                }
                break;
            }
        }
    }
}

/// Gives the table at `table`, whose entries have `level` and are frozen, and what hung below it, to `batch`. For the owner
/// of the broken entry, once that is no longer there.
///
/// # Safety
/// This thread has broken the entry that pointed to the table, in a recovery. That entry is not
/// broken any more and does not point to the table. The batch flushes what the entry covers.
pub(super) unsafe fn give_up<H: Host, F: Format>(
    tree: &Tree<H, F>,
    section: &Section<'_>,
    table: Hpa,
    level: Level,
    batch: &mut TlbBatch<'_, H, F>,
) {
    if level > Level::L4K {
        // SAFETY: the table is not freed before the batch has it, and that is below.
        for cell in unsafe { frames::linked_entries::<H, F>(&tree.host, section, table, level) } {
            let value = EntryRef::new(cell, level).load();
            debug_assert!(entry::state::<F>(value, level) == State::Frozen, "a table is given up that is in use");
            if let Frozen::Table(below) = entry::before_freezing::<F>(value, level) {
                // SAFETY: as for the table: what hung below it belongs to the same thread.
                unsafe { give_up(tree, section, below, level.down(), batch) }
            }
        }
    }
    // SAFETY: as the caller promises; all of its entries are frozen.
    unsafe { batch.add_unlinked(table) }
}

/// The entry of `level` for `gfn`, which the caller has broken in an earlier section. `None`: the table that it was in is
/// gone. Then, and if something else is found there, it is not broken any more, and all who read behind it have read.
///
/// A walk may end at a broken entry above, while this one is still to be frozen: that is cancelled.
#[inline]
pub(super) fn find_broken<'s, H: Host, F: Format>(
    tree: &'s Tree<H, F>,
    slots: &Slots<H::Backing>,
    section: &'s Section<'s>,
    gfn: Gfn,
    level: Level,
) -> Option<Cursor<'s, H, F>> {
    loop {
        let mut cursor = Cursor::new(tree, section, gfn);
        let (_, state) = cursor.descend_to(level);
        if cursor.level() == level {
            return Some(cursor);
        }
        if state != State::Broken {
            return None;
        }
        cancel(tree, slots, section, &cursor);
    }
}
