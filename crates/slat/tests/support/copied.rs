//! What a host has copied of the staying area, by the log of a slot that has it or some pages of it.

use std::ops::Range;

use slat::dirty::ManualProtect;

use crate::schedules::random;
use crate::tlb_world::{BLOCK, PAGES, STAYING, TestVm};

pub struct Copied {
    nr_writes: [u64; PAGES],
    manual: ManualProtect,
    slot: u32,
    /// The pages of the area that the slot has, of those that are used.
    pages: Range<usize>,
}

impl Copied {
    /// Of a slot that logs since a moment ago: everything is copied.
    pub fn new(vm: &TestVm, manual: ManualProtect, slot: u32, pages: Range<usize>) -> Copied {
        Copied { nr_writes: vm.host().with_memory(|memory| memory.nr_writes(STAYING)), manual, slot, pages }
    }

    pub fn harvest(&mut self, vm: &TestVm) -> u64 {
        let mut bitmap = [0; BLOCK as usize / 64];
        let nr_slot_pages =
            if self.pages.end == PAGES { BLOCK } else { self.pages.end as u64 } - self.pages.start as u64;
        // All, or the word that has the pages which are used.
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

    /// What was written before one harvest is in that or in the next, if the fault that opened the page has returned by
    /// then.
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
