//! The expected contents of the pages that only one virtual CPU writes, while the host discards
//! some of them: the exact oracle for host memory events.
//!
//! # Implementation
//! A read finds the value that was last written or read there, or zero if the page was discarded
//! since. The page's [`Discards`], which are counted before a discard begins and after it has
//! ended, decide which of the two is right:
//! - Zero is right only if a discard had begun by the end of the read that was not over when the
//!   value's write began.
//! - The value is right only if no discard began after the write's end and was over before the read
//!   began. (By the numbers this is exact if discards of one page do not overlap; otherwise some
//!   errors are missed.)
//!
//! A read counts as a write of the value that it found: zeros do not turn into an old value again.

use std::sync::atomic::{Ordering, fence};

use slat::shadow::Gva;

use super::{Action, GuestCpu, GuestError, Program, Sharing, Touch, value};
use crate::memory::{Discards, Pages};

/// No page holds this value: the contents of the page are unknown.
const UNKNOWN: u64 = u64::MAX;

#[derive(Clone, Copy, Debug)]
struct LedgerEntry {
    value: u64,
    /// Discards that were over before the value was written.
    done_before: u32,
    /// Discards that had begun when it was written.
    begun_after: u32,
}

/// The expected contents of one virtual CPU's pages.
#[derive(Clone, Debug)]
pub struct Ledger {
    first_page: u64,
    entries: Box<[LedgerEntry]>,
    sharing: Sharing,
}

impl Ledger {
    /// For `nr_pages` fresh pages from `first_page` on.
    pub fn new(first_page: u64, nr_pages: u64) -> Ledger {
        let fresh = LedgerEntry { value: 0, done_before: 0, begun_after: 0 };
        Ledger { first_page, entries: vec![fresh; nr_pages as usize].into_boxed_slice(), sharing: Sharing::Partitioned }
    }

    /// Begins a program. If all virtual CPUs write all pages, the contents of all pages are
    /// unknown, now and until they have ended.
    pub fn begin(&mut self, sharing: Sharing) {
        self.sharing = sharing;
        if sharing == Sharing::Overlapping {
            self.entries.fill(LedgerEntry { value: UNKNOWN, done_before: 0, begun_after: 0 });
        }
    }

    fn entry(&mut self, page: u64) -> Option<&mut LedgerEntry> {
        self.entries.get_mut(usize::try_from(page.checked_sub(self.first_page)?).ok()?)
    }

    fn note_write(&mut self, page: u64, value: u64, before: Discards, after: Discards) {
        if self.sharing == Sharing::Partitioned
            && let Some(entry) = self.entry(page)
        {
            *entry = LedgerEntry { value, done_before: before.done, begun_after: after.begun };
        }
    }

    /// Whether a read may find `found`, which began and ended at these numbers of discards. The
    /// error is the expected value.
    fn check_read(
        &mut self,
        page: u64,
        found: u64,
        before: Discards,
        after: Discards,
        accepts: impl Fn(u64) -> bool,
    ) -> Result<(), Option<u64>> {
        // Pages that other CPUs write: the check is only whether zeros have a reason.
        let Some(entry) = self.entry(page).filter(|entry| entry.value != UNKNOWN) else {
            let is_right = accepts(found) || (found == 0 && after.begun != 0);
            if !is_right {
                return Err(None);
            }
            self.note_write(page, found, before, after);
            return Ok(());
        };
        // Numbers may wrap, but never differ by as much.
        let is_later = |discard: u32, than: u32| discard.wrapping_sub(than) as i32 > 0;
        let is_right = if found == entry.value {
            found == 0 || !is_later(before.done, entry.begun_after)
        } else {
            found == 0 && is_later(after.begun, entry.done_before)
        };
        if !is_right {
            return Err(Some(entry.value));
        }
        entry.value = found;
        Ok(())
    }
}

/// Does one touch as [`touch`](super::touch) does, of memory that the host changes, and compares a
/// read with `ledger`.
///
/// # Errors
/// [`GuestError`]: the access failed or found a wrong value.
pub fn touch<C: GuestCpu>(
    cpu: &mut C,
    program: &Program,
    region: Gva,
    touch: Touch,
    newest_round: impl Fn() -> u64,
    (ledger, pages): (&mut Ledger, &Pages),
) -> Result<(), GuestError> {
    let Touch { page, action } = touch;
    let gva = super::page_gva(region, page);
    let before = pages.discards(page);
    match action {
        Action::Write => {
            let value = value(newest_round(), page);
            // If the write fails, the old number of discards stays: then the run ends.
            cpu.write(gva, value).map_err(|error| GuestError::Access { gva, action, error })?;
            // SeqCst: the discards are counted after the write is visible.
            fence(Ordering::SeqCst);
            ledger.note_write(page, value, before, pages.discards(page));
            Ok(())
        }
        Action::Read => {
            let found = cpu.read(gva).map_err(|error| GuestError::Access { gva, action, error })?;
            let after = pages.discards(page);
            let newest_round = newest_round();
            ledger.check_read(page, found, before, after, |found| program.accepts(page, found, newest_round)).map_err(
                |expected| match expected {
                    Some(expected) => GuestError::NotAsWritten { gva, page, found, expected },
                    None => {
                        GuestError::WrongValue { gva, page, found, oldest_round: program.oldest_round, newest_round }
                    }
                },
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn discards(begun: u32, done: u32) -> Discards {
        Discards { begun, done }
    }

    #[test]
    fn a_value_stays_until_a_discard_may_have_begun() {
        let none = discards(0, 0);
        let mut ledger = Ledger::new(7, 1);
        let accepts = |_: u64| panic!("the contents are known");
        assert_eq!(ledger.check_read(7, 0, none, none, accepts), Ok(()));
        assert_eq!(ledger.check_read(7, 5, none, none, accepts), Err(Some(0)), "from nowhere");
        ledger.note_write(7, 5, none, none);
        assert_eq!(ledger.check_read(7, 5, none, none, accepts), Ok(()));
        assert_eq!(ledger.check_read(7, 0, none, none, accepts), Err(Some(5)), "lost");
        assert_eq!(ledger.check_read(7, 4, none, none, accepts), Err(Some(5)), "an older value");
        // A discard begins during the read: both values are right, and after zeros the value is
        // wrong.
        assert_eq!(ledger.check_read(7, 5, none, discards(1, 0), accepts), Ok(()));
        assert_eq!(ledger.check_read(7, 0, none, discards(1, 0), accepts), Ok(()));
        assert_eq!(ledger.check_read(7, 5, discards(1, 0), discards(1, 1), accepts), Err(Some(0)), "came back");
    }

    #[test]
    fn after_a_discard_the_value_is_wrong() {
        let mut ledger = Ledger::new(0, 2);
        let accepts = |_: u64| panic!("the contents are known");
        // The first discard is under way while page 1 is written: the value may be lost or not. The
        // second discards it in any case.
        ledger.note_write(1, 9, discards(3, 2), discards(3, 2));
        assert_eq!(ledger.check_read(1, 9, discards(3, 3), discards(3, 3), accepts), Ok(()));
        assert_eq!(ledger.clone().check_read(1, 0, discards(3, 3), discards(3, 3), accepts), Ok(()));
        assert_eq!(ledger.check_read(1, 9, discards(4, 3), discards(4, 4), accepts), Ok(()));
        assert_eq!(ledger.check_read(1, 9, discards(4, 4), discards(4, 4), accepts), Err(Some(9)));
        // All discards were over before the write.
        ledger.note_write(1, 10, discards(4, 4), discards(4, 4));
        assert_eq!(ledger.check_read(1, 0, discards(4, 4), discards(4, 4), accepts), Err(Some(10)));
    }

    #[test]
    fn pages_of_others_may_hold_what_the_program_accepts() {
        let (none, one) = (discards(0, 0), discards(1, 1));
        let mut ledger = Ledger::new(0, 1);
        ledger.begin(Sharing::Overlapping);
        ledger.note_write(0, 7, none, none);
        assert_eq!(ledger.check_read(0, 8, none, none, |found| found == 8), Ok(()));
        assert_eq!(ledger.check_read(3, 8, none, none, |found| found == 8), Ok(()));
        assert_eq!(ledger.check_read(3, 9, none, none, |found| found == 8), Err(None));
        assert_eq!(ledger.check_read(3, 0, none, none, |_| false), Err(None), "never discarded");
        assert_eq!(ledger.check_read(3, 0, one, one, |_| false), Ok(()));
        ledger.begin(Sharing::Partitioned);
        // Its own again: its contents are known from the read on.
        assert_eq!(ledger.check_read(0, 8, none, none, |found| found == 8), Ok(()));
        assert_eq!(ledger.check_read(0, 7, none, none, |_| true), Err(Some(8)));
    }
}
