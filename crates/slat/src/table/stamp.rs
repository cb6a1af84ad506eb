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
//! along what later changes have left inside. Hence "the very stamp" and not "at most that stamp"; and hence each
//! unlinking takes a stamp of its own, so that no value ever comes back to a page. Then whoever looked before the
//! unlinking fails. Whoever looks after it must see the later change as published: that change published, made a full
//! fence, and then walked into the table, so before the table was unlinked; the fault reads the parent entry, and then the
//! ranges. (`models/slots.py` and `models/upgrade.py` show what happens otherwise.)

use super::entry::Stamp;
use crate::sync::{AtomicU64, Ordering};

/// The VM's counter of stamps.
pub(crate) struct StampCounter(AtomicU64);

impl StampCounter {
    pub(crate) fn new() -> StampCounter {
        StampCounter(AtomicU64::new(Stamp::FIRST.0))
    }

    /// A stamp greater than all before.
    pub(crate) fn next(&self) -> Stamp {
        // AcqRel: release hands on what the caller published, acquire takes over what earlier takers published.
        Stamp(self.0.fetch_add(Stamp::STEP, Ordering::AcqRel) + Stamp::STEP)
    }

    /// The greatest stamp so far. Whoever took it, or one before, has published what it stands for, and the caller will
    /// see that.
    pub(crate) fn current(&self) -> Stamp {
        // Acquire: pairs with the release of every taker so far (they form one release sequence), and comes before the
        // caller's reads of what they published.
        Stamp(self.0.load(Ordering::Acquire))
    }
}

#[cfg(all(test, loom))]
#[path = "stamp_loom.rs"]
mod loom_tests;
