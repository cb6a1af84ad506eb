//! Stamps: how a range is taken away from under faults that are on their way, without waiting for them.
//!
//! Whoever changes the ground under a fault (withdraws a slot, invalidates a range) does three things in this order:
//! 1. it makes the new state visible (the slot's place, the published range);
//! 2. it takes a stamp from the counter here;
//! 3. it gives that stamp, or leaves a greater one, to every empty entry of the range, and zaps its leaves.
//!
//! A fault does the reverse: it reads the entry first, then the state, and installs only onto an empty entry whose stamp
//! is not above the one that it read. So a fault that looked before the change finds a greater stamp (or its leaf is
//! zapped), and one that read the new stamp has the new state to see: nobody waits.
//!
//! Why that is enough: let a change publish P, take stamp S and visit entry E. A fault that reads E before the visit
//! read a stamp below S, or one S' > S that another change left there. In the first case its compare-and-exchange comes
//! before the visit, and the visit zaps the leaf, or after, and fails because the stamp in E is S or greater. In the
//! second case S' was taken after S, the counter's modification order hands P on to whoever took S', and the fault read
//! S' with acquire: it sees P. A fault that reads E after the visit sees P for the same reason.

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
        Stamp(self.0.fetch_add(1, Ordering::AcqRel) + 1)
    }

    /// The greatest stamp so far. Whoever took it, or one before, has published what it stands for, and the caller will
    /// see that.
    pub(crate) fn current(&self) -> Stamp {
        // Acquire: pairs with the release of every taker so far (they form one release sequence), and comes before the
        // caller's reads of what they published.
        Stamp(self.0.load(Ordering::Acquire))
    }
}
