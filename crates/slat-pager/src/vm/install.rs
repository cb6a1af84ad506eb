//! Puts contents into pages of a machine, in the order that removals demand.
//!
//! # Guarantees
//! - A page that the monitor has given up never gets what the snapshot has, also where it was on
//!   its way at that moment.
//! - Every thread that waits for a page is woken once the page is there, or when its claim ends; by
//!   the caller where that says so ([`Unwoken`]).
//!
//! # Implementation
//! The *gate* is a lock. A fill looks at the removed pages and calls the kernel while it has the
//! gate shared. A read of messages, with the marking of the removed pages that it found, has it
//! exclusive.
//!
//! Where vCPUs use a file of the monitor, a page is filled through the monitor's mapping like any
//! other, and then its bit is cleared.
//!
//! # Why it is correct
//! Before a removal's message is read, the kernel refuses fills (`EAGAIN`). It is read and marked
//! with the gate exclusive; each later fill sees the mark. So no fill of the snapshot's bytes comes
//! after the message was read, and the removal itself only after that.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::RwLock;
use rustix::io::Errno;

use super::pages::{Claimed, Pages, bit, run_mask};
use super::regions::{Placed, Regions};
use super::userfault_bitmap::UserfaultBitmap;
use crate::source::{Mapped, PAGE_BYTES};
use crate::userfaultfd::{Stopped, Userfaultfd, Wake};

/// Pages that one call fills with zeros: those of a word.
const MOST_ZEROS: u64 = 64;

/// What claimed pages get.
#[derive(Clone, Copy, Debug)]
pub enum Contents<'c> {
    /// Zeros.
    Zeros,
    /// What the memory that all clones share has.
    Shared,
    /// Bytes of a mapping.
    Bytes {
        /// The page that the first of them is for.
        first_page: u64,
        /// All.
        bytes: Mapped<'c>,
    },
}

/// What a page gets that needs nothing of the source.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Again {
    /// Zeros: it was given up, with a message or, where the machine's memory is its own, without.
    Zeros,
    /// What the memory that all clones share has: the kernel has reclaimed its PTE. Zeros if it was
    /// given up.
    Shared,
    /// What the monitor's own file has.
    File,
}

/// What became of pages that were to be poisoned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Poisoned {
    /// Accesses fail.
    Now,
    /// They have contents, which stay.
    HaveContents,
    /// They are not mapped.
    Unmapped,
}

/// Why claimed pages were not all filled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stuck {
    /// Messages have to be read first, or the kernel lacks memory. These are still claimed.
    Again(u64),
    /// The bytes cannot be read (the file was cut, or its memory is broken). These are still
    /// claimed.
    Unreadable(u64),
    /// The monitor said something about its memory that is not so. These are still claimed.
    Refused(u64, Errno),
    /// The monitor has ended.
    Gone,
}

/// What an installer has done.
#[derive(Debug, Default)]
pub struct Done {
    /// Pages that were filled.
    pub nr_filled: u64,
    /// Pages that were there.
    pub nr_there: u64,
    /// Pages that were filled and whose waiters were not woken ([`Wake::None`]).
    pub unwoken: Unwoken,
}

/// Pages whose waiters are woken later, by one call ([`Installer::wake_unwoken`]).
#[derive(Debug, Default)]
pub struct Unwoken {
    /// All are in it. It may have others.
    addresses: Option<Range<u64>>,
}

impl Unwoken {
    fn add(&mut self, addresses: Range<u64>) {
        self.addresses = Some(match self.addresses.take() {
            Some(all) => all.start.min(addresses.start)..all.end.max(addresses.end),
            None => addresses,
        });
    }
}

/// Fills pages of one machine.
#[derive(Debug)]
pub struct Installer {
    pub(super) userfaultfd: Arc<Userfaultfd>,
    pub(super) regions: Regions,
    pub(super) pages: Pages,
    pub(super) gate: RwLock<()>,
    /// Zeros to copy, where the kernel has no call for zeros: for a page of hugetlb, or for
    /// [`MOST_ZEROS`] pages of a guest_memfd.
    zeros: Option<memmap2::Mmap>,
    /// If vCPUs use a file of the monitor.
    pub(super) userfault_bitmap: Option<Arc<UserfaultBitmap>>,
}

impl Installer {
    /// For a machine.
    ///
    /// # Errors
    /// No address space for zeros.
    pub fn new(
        userfaultfd: Arc<Userfaultfd>,
        regions: Regions,
        pages: Pages,
        userfault_bitmap: Option<Arc<UserfaultBitmap>>,
    ) -> std::io::Result<Installer> {
        let huge = regions.all().iter().filter(|placed| placed.region.is_hugetlb()).map(|p| p.region.page_bytes).max();
        let copied = userfault_bitmap.as_ref().map(|_| MOST_ZEROS * PAGE_BYTES);
        let zeros = match huge.max(copied) {
            // Never written: it takes no memory but for its page tables.
            Some(nr_bytes) => Some(memmap2::MmapOptions::new().len(nr_bytes as usize).map_anon()?.make_read_only()?),
            None => None,
        };
        Ok(Installer { userfaultfd, regions, pages, gate: RwLock::new(()), zeros, userfault_bitmap })
    }

    /// Fills claimed pages. With [`Wake::None`] the caller wakes their waiters
    /// ([`Installer::wake_unwoken`]).
    ///
    /// # Errors
    /// [`Stuck`]; `done` counts what was filled all the same.
    pub fn install(&self, claimed: Claimed, contents: Contents<'_>, wake: Wake, done: &mut Done) -> Result<(), Stuck> {
        let Claimed { place, word, mask } = claimed;
        let page_bytes = self.regions.all()[place].region.page_bytes;
        let _gate = self.gate.read();
        let removed = mask & self.pages.removed(word);
        if removed != 0 {
            // Their waiters fault again, and get zeros.
            self.wake(claimed, removed);
        }
        let mut rest = mask & !removed;
        let mut most_pages = if matches!(contents, Contents::Zeros) { self.most_zeros(place) } else { 64 };
        while rest != 0 {
            let first = u64::from(rest.trailing_zeros());
            let run = first..first + u64::from((rest >> first).trailing_ones()).min(most_pages);
            let first_page = claimed.first_page() + run.start;
            let result = self.fill(place, first_page, run.end - run.start, contents, wake);
            let nr_filled = match &result {
                Ok(()) => run.end - run.start,
                Err(stopped) => (stopped.filled_bytes / page_bytes).min(run.end - run.start),
            };
            let filled = run_mask(&(first..first + nr_filled));
            self.pages.filled(word, filled);
            done.nr_filled += nr_filled;
            rest &= !filled;
            if wake == Wake::None && nr_filled > 0 {
                let start = self.regions.all()[place].address_of(first_page);
                done.unwoken.add(start..start + nr_filled * page_bytes);
            }
            let Err(Stopped { error, .. }) = result else { continue };
            if nr_filled > 0 {
                continue;
            }
            let one = 1 << first;
            match error {
                Errno::EXIST => {
                    self.pages.filled(word, one);
                    self.wake(claimed, one);
                    done.nr_there += 1;
                    rest &= !one;
                }
                Errno::AGAIN | Errno::NOMEM | Errno::INTR => return Err(Stuck::Again(rest)),
                Errno::SRCH => return Err(Stuck::Gone),
                Errno::FAULT | Errno::HWPOISON => return Err(Stuck::Unreadable(rest)),
                // The run may cross mappings, which the monitor splits as it likes.
                Errno::NOENT | Errno::INVAL if run.end - run.start > 1 => most_pages = 1,
                // The page is not mapped any more.
                Errno::NOENT => {
                    self.pages.release(word, one);
                    self.wake(claimed, one);
                    rest &= !one;
                }
                error => return Err(Stuck::Refused(rest, error)),
            }
        }
        Ok(())
    }

    /// Answers a fault on a page that was filled or removed, or is in the monitor's own file: if it
    /// is there, its waiters are woken. If it is not, it is filled.
    ///
    /// # Errors
    /// [`Stuck`], with the page.
    pub fn fill_again(&self, place: usize, page: u64, again: Again, done: &mut Done) -> Result<(), Stuck> {
        let (word, mask) = bit(page);
        let _gate = self.gate.read();
        let contents = match again {
            // What the file has; zeros if it has lost the page.
            _ if self.userfault_bitmap.is_some() => Contents::Shared,
            Again::Shared if self.pages.removed(word) & mask != 0 => Contents::Zeros,
            Again::Shared | Again::File => Contents::Shared,
            Again::Zeros => Contents::Zeros,
        };
        match self.fill(place, page, 1, contents, Wake::Waiters) {
            Ok(()) => {
                if matches!(contents, Contents::Zeros) {
                    self.pages.remove(page..page + 1);
                }
                done.nr_filled += 1;
                Ok(())
            }
            Err(Stopped { error, .. }) => match error {
                // `EFAULT`: the file has lost the page meanwhile, and the next fault says so.
                Errno::EXIST | Errno::NOENT | Errno::FAULT => {
                    // A pager may have died that had given it zeros.
                    let is_there = error == Errno::EXIST && self.pages.removed(word) & mask != 0;
                    if let (true, Some(bitmap)) = (is_there, &self.userfault_bitmap) {
                        let offset = self.regions.all()[place].offset_of(page);
                        bitmap.allow(offset..offset + PAGE_BYTES);
                    }
                    self.wake(Claimed { place, word, mask }, mask);
                    done.nr_there += 1;
                    Ok(())
                }
                Errno::AGAIN | Errno::NOMEM | Errno::INTR => Err(Stuck::Again(mask)),
                Errno::SRCH => Err(Stuck::Gone),
                error => Err(Stuck::Refused(mask, error)),
            },
        }
    }

    /// Gives claimed pages up. Their waiters fault again.
    pub fn release(&self, claimed: Claimed) {
        self.pages.release(claimed.word, claimed.mask);
        self.wake(claimed, claimed.mask);
    }

    /// Lets accesses to claimed pages fail for good; pages that got contents otherwise stay. Those
    /// that were given up meanwhile are zeros, as their waiters find when they fault again. Returns
    /// how many fail.
    ///
    /// # Errors
    /// Pages that could not be poisoned yet, or never on this kernel. They are still claimed.
    pub fn poison(&self, claimed: Claimed) -> Result<u64, Stuck> {
        let _gate = self.gate.read();
        let removed = claimed.mask & self.pages.removed(claimed.word);
        self.wake(claimed, removed);
        let claimed = Claimed { mask: claimed.mask & !removed, ..claimed };
        let mut nr_poisoned = 0;
        self.poison_by(&self.userfaultfd, claimed, |became, mask| match became {
            Poisoned::Now => {
                self.pages.filled(claimed.word, mask);
                nr_poisoned += u64::from(mask.count_ones());
            }
            Poisoned::HaveContents => {
                self.pages.filled(claimed.word, mask);
                self.wake(claimed, mask);
            }
            Poisoned::Unmapped => self.release(Claimed { mask, ..claimed }),
        })?;
        Ok(nr_poisoned)
    }

    /// Lets accesses to the pages of `claimed` that have no contents fail for good, in the memory
    /// of `userfaultfd`: the machine's, or a copy of it that a child of the monitor has. Tells
    /// `note` what became of which pages.
    ///
    /// # Errors
    /// As of [`poison`](Self::poison).
    pub fn poison_by(
        &self,
        userfaultfd: &Userfaultfd,
        claimed: Claimed,
        mut note: impl FnMut(Poisoned, u64),
    ) -> Result<(), Stuck> {
        let placed = &self.regions.all()[claimed.place];
        let page_bytes = placed.region.page_bytes;
        let (mut rest, mut most_pages) = (claimed.mask, 64);
        while rest != 0 {
            let first = u64::from(rest.trailing_zeros());
            let nr_pages = u64::from((rest >> first).trailing_ones()).min(most_pages);
            let start = placed.address_of(claimed.first_page() + first);
            let (nr_done, became) = match userfaultfd.poison(start..start + nr_pages * page_bytes, Wake::Waiters) {
                Ok(()) => (nr_pages, Poisoned::Now),
                Err(Stopped { filled_bytes, .. }) if filled_bytes >= page_bytes => {
                    (filled_bytes / page_bytes, Poisoned::Now)
                }
                Err(Stopped { error, .. }) => match error {
                    Errno::EXIST => (1, Poisoned::HaveContents),
                    Errno::AGAIN | Errno::NOMEM | Errno::INTR => return Err(Stuck::Again(rest)),
                    Errno::SRCH => return Err(Stuck::Gone),
                    // The run may cross mappings, as in `install`.
                    Errno::NOENT | Errno::INVAL if nr_pages > 1 => {
                        most_pages = 1;
                        continue;
                    }
                    Errno::NOENT => (1, Poisoned::Unmapped),
                    error => return Err(Stuck::Refused(rest, error)),
                },
            };
            let mask = run_mask(&(first..first + nr_done));
            note(became, mask);
            rest &= !mask;
        }
        Ok(())
    }

    /// Wakes all threads that wait for any page. They fault again.
    ///
    /// # Errors
    /// Of the first call that failed.
    pub fn wake_all(&self) -> Result<(), crate::userfaultfd::CallError> {
        self.regions.all().iter().try_for_each(|placed| self.userfaultfd.wake(placed.region.addresses()))
    }

    fn most_zeros(&self, place: usize) -> u64 {
        if self.regions.all()[place].region.is_hugetlb() { 1 } else { MOST_ZEROS }
    }

    /// Wakes the waiters of pages that were filled without that, by one call. Other threads that
    /// wait for pages between them fault once more.
    pub fn wake_unwoken(&self, unwoken: &mut Unwoken) {
        if let Some(addresses) = std::mem::take(unwoken).addresses {
            // It fails for a range that is none, and regions were checked.
            let _ = self.userfaultfd.wake(addresses);
        }
    }

    fn fill(&self, place: usize, page: u64, nr_pages: u64, contents: Contents<'_>, wake: Wake) -> Result<(), Stopped> {
        let placed = &self.regions.all()[place];
        let page_bytes = placed.region.page_bytes;
        let start = placed.address_of(page);
        let result = match (contents, &self.zeros) {
            (Contents::Bytes { first_page, bytes }, _) => {
                let at = (page - first_page) * page_bytes;
                bytes.part(at..at + nr_pages * page_bytes).fill(&self.userfaultfd, start, wake)
            }
            (Contents::Shared, _) => self.userfaultfd.map_cached(start..start + nr_pages * page_bytes, wake),
            (Contents::Zeros, Some(zeros)) if placed.region.is_hugetlb() || self.userfault_bitmap.is_some() => {
                self.userfaultfd.copy(start, &zeros[..(nr_pages * page_bytes) as usize], wake)
            }
            (Contents::Zeros, _) => self.userfaultfd.zero(start..start + nr_pages * page_bytes, wake),
        };
        match &self.userfault_bitmap {
            Some(bitmap) => self.allow_filled(bitmap, placed, page..page + nr_pages, contents, wake, result),
            None => result,
        }
    }

    /// Lets vCPUs use those of `pages` that a fill with `result` has given contents.
    fn allow_filled(
        &self,
        bitmap: &UserfaultBitmap,
        placed: &Placed,
        pages: Range<u64>,
        contents: Contents<'_>,
        wake: Wake,
        result: Result<(), Stopped>,
    ) -> Result<(), Stopped> {
        let page_bytes = placed.region.page_bytes;
        let offset = placed.offset_of(pages.start);
        let first = placed.address_of(pages.start)..placed.address_of(pages.start) + page_bytes;
        let again = |error| Err(Stopped { call: "UFFDIO_CONTINUE", filled_bytes: 0, error });
        match (result, contents) {
            (Ok(()), _) => bitmap.allow(offset..offset + (pages.end - pages.start) * page_bytes),
            (Err(stopped), _) if stopped.filled_bytes > 0 => {
                bitmap.allow(offset..offset + stopped.filled_bytes);
                return Err(stopped);
            }
            // The file has lost the page: the monitor has given it up.
            (Err(Stopped { error: Errno::FAULT, .. }), Contents::Shared) => {
                let Some(zeros) = &self.zeros else { return again(Errno::FAULT) };
                self.userfaultfd.copy(first.start, &zeros[..page_bytes as usize], wake)?;
                bitmap.allow(offset..offset + page_bytes);
            }
            // The first page was claimed, so it is not poisoned: the file has it, mapped here or not.
            (Err(stopped @ Stopped { error: Errno::EXIST, .. }), Contents::Bytes { .. } | Contents::Zeros) => {
                match self.userfaultfd.map_cached(first, wake) {
                    Ok(()) | Err(Stopped { error: Errno::EXIST, .. }) => bitmap.allow(offset..offset + page_bytes),
                    // The file has lost it meanwhile.
                    Err(Stopped { error: Errno::FAULT, .. }) => return again(Errno::AGAIN),
                    Err(stopped) => return Err(stopped),
                }
                return Err(stopped);
            }
            (Err(stopped), _) => return Err(stopped),
        }
        Ok(())
    }

    /// Wakes the waiters of some pages of the word of `claimed`.
    fn wake(&self, claimed: Claimed, mask: u64) {
        let placed = &self.regions.all()[claimed.place];
        for run in super::pages::runs(mask) {
            let start = placed.address_of(claimed.first_page() + run.start);
            // It fails for a range that is none, and regions were checked.
            let _ = self.userfaultfd.wake(start..start + (run.end - run.start) * placed.region.page_bytes);
        }
    }
}
