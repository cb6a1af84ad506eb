//! The memory of a logging memslot, and the host's copy of it.

use std::sync::atomic::{AtomicU64, Ordering};

use slat::Config;
use slat::dirty::ManualProtect;
use slat::error::LogError;
use slat::format::Format;

use crate::schedules::random;
use crate::world::{TestVm, find};
use crate::{BLOCK, SLOT};

/// The number of used pages: see [`Memory::pages`].
pub const PAGES: usize = 3;
pub const FIRST_PFN: u64 = 1 << 20;

/// The memory of a memslot, and the host's copy of it.
pub struct Memory {
    config: Config,
    /// All pages of the memslot.
    pub nr_pages: u64,
    contents: [AtomicU64; PAGES],
    copy: [AtomicU64; PAGES],
}

/// Words of the largest log.
const LOG_WORDS: usize = 2 * BLOCK as usize / 64;

impl Memory {
    pub fn new(config: Config, nr_pages: u64) -> Memory {
        Memory { config, nr_pages, contents: Default::default(), copy: Default::default() }
    }

    /// The used pages: if the memslot has two blocks, one lies in the second.
    pub fn pages(&self) -> [u64; PAGES] {
        if self.nr_pages > BLOCK { [0, 1, BLOCK] } else { [0, 1, 2] }
    }

    pub fn write(&self, pfn: u64) {
        let page = self.pages().iter().position(|page| FIRST_PFN + page == pfn);
        self.contents[page.expect("guests use these pages only")].fetch_add(1, Ordering::SeqCst);
    }

    pub fn contents_now(&self) -> [u64; PAGES] {
        std::array::from_fn(|page| self.contents[page].load(Ordering::SeqCst))
    }

    pub fn copy_all(&self) {
        self.copy_pages(0, &[u64::MAX; LOG_WORDS]);
    }

    /// Copies the pages of `bitmap`, which begins with page `first`.
    fn copy_pages(&self, first: u64, bitmap: &[u64]) {
        for (index, page) in self.pages().into_iter().enumerate() {
            let word = page.checked_sub(first).and_then(|bit| bitmap.get(bit as usize / 64));
            if word.is_some_and(|word| word >> (page % 64) & 1 == 1) {
                self.copy[index].fetch_max(self.contents[index].load(Ordering::SeqCst), Ordering::SeqCst);
            }
        }
    }

    /// Harvests the memslot, and copies what the log reports.
    pub fn harvest<F: Format>(&self, vm: &TestVm<F>) -> Result<u64, LogError> {
        let mut bitmap = [0; LOG_WORDS];
        let nr_pages = vm.get_dirty_log(SLOT, &mut bitmap)?;
        if self.config.manual_protect != ManualProtect::Disabled {
            vm.clear_dirty_log(SLOT, 0, self.nr_pages, &bitmap)?;
        }
        self.copy_pages(0, &bitmap);
        Ok(nr_pages)
    }

    /// Harvests a word of the log, or clears some of its pages unread, and copies those.
    pub fn harvest_part<F: Format>(&self, vm: &TestVm<F>) {
        let first = self.pages()[random(PAGES as u64) as usize] / 64 * 64;
        let nr_pages = (self.nr_pages - first).min(64);
        let mut bitmap = [1 + random(7)];
        if random(2) == 0 {
            vm.get_dirty_log_range(SLOT, first, nr_pages, &mut bitmap).unwrap();
            if self.config.manual_protect != ManualProtect::Disabled {
                vm.clear_dirty_log(SLOT, first, nr_pages, &bitmap).unwrap();
            }
        } else {
            vm.clear_dirty_log(SLOT, first, nr_pages, &bitmap).unwrap();
        }
        self.copy_pages(first, &bitmap);
    }

    pub fn assert_copied(&self, counts: [u64; PAGES]) {
        for (page, &count) in counts.iter().enumerate() {
            let copied = self.copy[page].load(Ordering::SeqCst);
            assert!(copied >= count, "page {page}: {count} writes long ago, {copied} copied; {:?}", self.config);
        }
    }

    /// All threads have stopped. One harvest reports all writes, and leaves no page writable that
    /// no log would report.
    pub fn assert_one_harvest_is_exact<F: Format>(&self, vm: &TestVm<F>) {
        self.harvest(vm).unwrap();
        self.assert_copied(self.contents_now());
        for gfn in (0..4).chain(BLOCK..BLOCK + 4) {
            let is_unseen = find(vm, gfn).is_some_and(|it| it.is_writable_unlogged::<F>(self.config.dirty_tracking));
            assert!(!is_unseen, "frame {gfn:#x} can be written, and was not reported; {:?}", self.config);
        }
        assert_eq!(self.harvest(vm), Ok(0));
    }
}
