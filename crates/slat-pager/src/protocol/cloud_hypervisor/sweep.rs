//! Tells the page faults of a guest from those that the VMM sends on its own.
//!
//! Between faults, Cloud Hypervisor asks for each page of the memory in turn, from the lowest
//! address on, and skips those that it asked for before. The frames are the same. A working set has
//! only what the guest touched: this follows the VMM's cursor and knows its requests by it. A fault
//! of the guest that happens to be just there counts as the VMM's; it comes early anyway.

use std::ops::Range;

use crate::source::PAGE_BYTES;
use crate::source::pages::PageSet;

/// What asked for a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Asker {
    Guest,
    Vmm,
}

/// The cursor of the VMM, over memory whose slots lie one after the other.
#[derive(Debug)]
pub(super) struct Sweep {
    /// The pages that were asked for.
    asked: PageSet,
    /// The first page behind the last that the VMM asked for that was not asked for.
    next: u64,
}

impl Sweep {
    pub(super) fn new(size_bytes: u64) -> Sweep {
        Sweep { asked: PageSet::new(size_bytes.div_ceil(PAGE_BYTES)), next: 0 }
    }

    /// Takes a request for the bytes `range`.
    pub(super) fn ask(&mut self, range: &Range<u64>) -> Asker {
        let asker = if range.start / PAGE_BYTES == self.next { Asker::Vmm } else { Asker::Guest };
        self.asked.insert_bytes(range.clone());
        while self.asked.contains(self.next) {
            self.next += 1;
        }
        asker
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cursor_of_the_vmm_is_followed() {
        let mut sweep = Sweep::new(200 * PAGE_BYTES);
        let mut ask = |page: u64| sweep.ask(&(page * PAGE_BYTES..(page + 1) * PAGE_BYTES));
        assert_eq!(ask(0), Asker::Vmm);
        assert_eq!(ask(2), Asker::Guest);
        assert_eq!(ask(100), Asker::Guest);
        assert_eq!(ask(1), Asker::Vmm);
        // Skips page 2.
        assert_eq!(ask(3), Asker::Vmm);
        for page in 4..200 {
            let asker = if page == 100 { Asker::Guest } else { Asker::Vmm };
            assert_eq!(ask(page), asker, "{page}");
        }
        assert_eq!(ask(5), Asker::Guest);
    }

    #[test]
    fn the_end_of_the_memory_is_no_end_of_the_words() {
        let mut sweep = Sweep::new(3 * PAGE_BYTES);
        assert_eq!(sweep.ask(&(0..2 * PAGE_BYTES)), Asker::Vmm);
        assert_eq!(sweep.ask(&(2 * PAGE_BYTES..3 * PAGE_BYTES)), Asker::Vmm);
    }
}
