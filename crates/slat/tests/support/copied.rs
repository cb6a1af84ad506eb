//! A host's copy of the staying area. It copies what the dirty log of a memslot reports; the
//! memslot covers the area or some of its pages.

use std::ops::Range;

use slat::dirty::ManualProtect;

use crate::schedules::random;
use crate::tlb_world::{BLOCK, PAGES, STAYING, TestVm};

pub struct Copied {
    nr_writes: [u64; PAGES],
    manual: ManualProtect,
    slot: u32,
    /// The used pages of the area that the memslot covers.
    pages: Range<usize>,
}

impl Copied {
    /// For a memslot that has just begun to log: all pages are copied.
    pub fn new(vm: &TestVm, manual: ManualProtect, slot: u32, pages: Range<usize>) -> Copied {
        Copied { nr_writes: vm.host().with_memory(|memory| memory.nr_writes(STAYING)), manual, slot, pages }
    }

    pub fn harvest(&mut self, vm: &TestVm) -> u64 {
        let mut bitmap = [0; BLOCK as usize / 64];
        let nr_slot_pages =
            if self.pages.end == PAGES { BLOCK } else { self.pages.end as u64 } - self.pages.start as u64;
        // The whole log, or the word with the used pages.
        let of_word = nr_slot_pages == BLOCK && random(3) == 0;
        let nr_pages = if of_word {
            vm.get_dirty_log_range(self.slot, 0, 64, &mut bitmap).unwrap()
        } else {
            vm.get_dirty_log(self.slot, &mut bitmap).unwrap()
        };
        if self.manual != ManualProtect::Disabled {
            vm.clear_dirty_log(self.slot, 0, if of_word { 64 } else { nr_slot_pages }, &bitmap).unwrap();
        }
        let now = vm.host().with_memory(|memory| memory.nr_writes(STAYING));
        for page in self.pages.clone().filter(|page| bitmap[0] >> (page - self.pages.start) & 1 == 1) {
            self.nr_writes[page] = now[page];
        }
        nr_pages
    }

    /// Copies each write that returned from its fault before the first harvest. One of the two
    /// harvests reports it.
    pub fn harvest_twice(&mut self, vm: &TestVm) {
        self.harvest(vm);
        let before = vm.host().with_memory(|memory| memory.nr_writes(STAYING));
        vm.host().wait_for_faults();
        self.harvest(vm);
        self.assert_has(before);
    }

    pub fn assert_has(&self, nr_writes: [u64; PAGES]) {
        for (page, (copied, written)) in self.nr_writes.iter().zip(nr_writes).enumerate() {
            let is_copied = !self.pages.contains(&page) || *copied >= written;
            assert!(is_copied, "page {page}: {written} writes long ago, {copied} copied");
        }
    }
}
