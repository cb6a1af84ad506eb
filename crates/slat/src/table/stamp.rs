//! Stamps: how a range is taken away from under faults that are on their way, without waiting for them.
//!
//! Whoever changes the ground under a fault (deletes or moves a slot, invalidates a range for the host) does this, in this
//! order:
//! 1. it publishes the range (`published`);
//! 2. it takes a stamp from the counter here;
//! 3. it gives that stamp, or leaves a greater one, to every empty entry of the range, and zaps its leaves;
//! 4. it flushes, lets the change happen (the host moves the page, the set without the slot is published), and only then
//!    withdraws the range.
//!
//! A fault does the reverse: it reads the entry first, then the published ranges, then the slots; and it installs only
//! onto an empty entry that has *the very stamp* that it read. So a fault that looked before the change finds another
//! stamp (or its leaf is zapped), and one that read the new stamp has the change to see: nobody waits.
//!
//! # Why that is enough
//! Let a change publish, take stamp S and visit entry E. A fault that reads E before the visit read a stamp below S, or
//! one S' > S that another change left there. In the first case its compare-and-exchange comes before the visit, and the
//! visit zaps the leaf, or after, and fails because E has another stamp. In the second case S' was taken after S, the
//! counter's modification order hands the publication on to whoever took S', and the fault read S' with acquire: it sees
//! the range. A fault that reads E after the visit sees it for the same reason. If it does not find the range published,
//! the change is over, and the fault sees what the change has done.
//!
//! # Stamps do not only rise
//! A page's stamp is that of its lowest entry, and two things may replace a greater stamp by a smaller one. A fault that
//! takes a read-only leaf away (`vcpu`) has taken its stamp before the exchange. And a change that unlinks a table takes
//! along what later changes have left inside. Hence "the very stamp" and not "at most that stamp"; and hence the rule
//! below. A fault that looked before an unlinking then fails, for the unlinking has a fresh stamp. A fault that looks after
//! it must see the later change as published: that change published, made a full fence, and then walked into the table, so
//! before the table was unlinked; the fault reads the parent entry, and then the ranges. (`models/slots.py` and
//! `models/upgrade.py` show what happens otherwise.)
//!
//! # No stamp comes back to a page
//! "The very stamp" proves that nothing has happened since the look only if no stamp is given to a page twice. Each place
//! that stores a stamp keeps to that:
//! - A zap gives its own stamp to entries of the lowest level alone, and to each page once (`second_stage/zap.rs`).
//! - All else is a *fresh* stamp, which is taken for one exchange and stored by that one alone: that of a zap for an entry
//!   above the lowest level, empty or a leaf; of an unlinking; of a cancelled recovery or split; of a fault that replaces a
//!   read-only leaf.
//! - The entries of a new table inherit the stamp of the entry that it hangs on: to each page the stamp that it has. What
//!   goes with it is the flag *unflushed*, which is no part of the stamp: the table is made once the flush is over, and no
//!   entry gets the flag back without another stamp.
//!
//! Otherwise this goes wrong, with a block of pages, three changes and a fault (`models/zap.py`, rules stamp-again and
//! stamp-passed): K takes the fresh stamp u for an unlinking of the block. J takes its own stamp S, greater than u, visits the
//! page, and a fault F reads S there. I publishes the page, zaps it and holds it. K unlinks: the block is empty with u. J
//! comes by the block once more, finds u below S, and stores S. A neighbour's fault hangs a table there, the page inherits
//! S, and F, which looked at the published ranges before I was among them, installs on S what I has taken away.

use super::entry::Stamp;
use crate::sync::{AtomicU64, Ordering};

/// The VM's counter of stamps.
pub(crate) struct StampCounter(AtomicU64);

impl StampCounter {
    pub(crate) fn new() -> StampCounter {
        StampCounter(AtomicU64::new(Stamp::FIRST.number()))
    }

    /// A stamp greater than all before.
    pub(crate) fn next(&self) -> Stamp {
        // AcqRel: release hands on what the caller published, acquire takes over what earlier takers published.
        Stamp::from_number(self.0.fetch_add(Stamp::STEP, Ordering::AcqRel) + Stamp::STEP)
    }

    /// The greatest stamp so far. Whoever took it, or one before, has published what it stands for, and the caller will
    /// see that.
    pub(crate) fn current(&self) -> Stamp {
        // Acquire: pairs with the release of every taker so far (they form one release sequence), and comes before the
        // caller's reads of what they published.
        Stamp::from_number(self.0.load(Ordering::Acquire))
    }
}

#[cfg(all(test, loom))]
#[path = "stamp_loom.rs"]
mod loom_tests;
