//! The measured operations: on which pages, and what each crate's tables must be able to do.
//!
//! Each thread has its own pages, 64 GiB of addresses from those of the next: threads share only
//! the upper page-table pages. A call whose time is taken ignores a failure. Instead all pages are
//! looked up after the measurement ([`PeerJob::check`]), and the results of queries are added up
//! and compared.

use clap::ValueEnum;

use super::memory::TABLE_BYTES;

/// Frame of guest page 0.
const FIRST_FRAME: u64 = 1 << 24;
/// Pages between the first pages of two threads: 64 GiB.
pub(crate) const PART_PAGES: u64 = 1 << 24;
/// Pages in 2 MiB.
pub(crate) const BLOCK_PAGES: u64 = 512;
/// Pages that one call maps, where it maps several: they share the cost of a cursor or a guard.
pub(crate) const BATCH: u64 = 64;
/// Pages that one call looks up; and so the fewest that a thread can have.
pub(crate) const QUERIES: u64 = 512;
/// Pages for each thread, at most and by default. A run then takes some milliseconds or less,
/// shorter than a time slice of another process. So most runs have their CPUs for themselves on a
/// machine with other users.
pub(crate) const MAX_PAGES: u64 = 1 << 15;
/// The distance of pages where each is in another page-table page than the one before: odd, so that
/// all are reached.
const SCATTER: u64 = 40_503;

/// A row of the tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Operation {
    /// A fault on each page, without page-table pages.
    Fault,
    /// A 4 KiB page a call, into existing page-table pages.
    #[value(name = "map-4k")]
    Map4k,
    /// The same, 64 pages a call.
    #[value(name = "map-4k-batch")]
    Map4kBatch,
    /// A range of consecutive frames, without page-table pages.
    MapRange,
    /// The same, but each page's frame is looked up.
    MapRangeEach,
    /// A range of 2 MiB pages.
    #[value(name = "map-range-2m")]
    MapRange2m,
    /// Lookups of pages, in order.
    Query,
    /// Lookups of pages, each in another page-table page.
    QueryScattered,
    /// Write protection of a range.
    ProtectRange,
    /// Write protection of pages one by one.
    #[value(name = "protect-4k")]
    Protect4k,
    /// Unmapping, a page a call.
    #[value(name = "unmap-4k")]
    Unmap4k,
    /// Unmapping of a range.
    UnmapRange,
    /// A 2 MiB page replaced by a page-table page of 4 KiB pages.
    #[value(name = "split-2m")]
    Split2m,
}

impl Operation {
    /// The name of its figures.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Operation::Fault => "fault",
            Operation::Map4k => "map_4k",
            Operation::Map4kBatch => "map_4k_batch",
            Operation::MapRange => "map_range",
            Operation::MapRangeEach => "map_range_each",
            Operation::MapRange2m => "map_range_2m",
            Operation::Query => "query",
            Operation::QueryScattered => "query_scattered",
            Operation::ProtectRange => "protect_range",
            Operation::Protect4k => "protect_4k",
            Operation::Unmap4k => "unmap_4k",
            Operation::UnmapRange => "unmap_range",
            Operation::Split2m => "split_2m",
        }
    }

    /// The title in the table.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Operation::Fault => "page fault",
            Operation::Map4k => "map one",
            Operation::Map4kBatch => "map one, 64 a call",
            Operation::MapRange => "map range, frames known",
            Operation::MapRangeEach => "map range, each asked",
            Operation::MapRange2m => "map range, 2M (each)",
            Operation::Query => "query, in order",
            Operation::QueryScattered => "query, scattered",
            Operation::ProtectRange => "protect range",
            Operation::Protect4k => "protect one by one",
            Operation::Unmap4k => "unmap one",
            Operation::UnmapRange => "unmap range",
            Operation::Split2m => "split 2M (each)",
        }
    }

    /// Why slat may be behind a crate that one thread has for itself, and what would be lost if it
    /// was not.
    pub(crate) fn why_behind(self) -> &'static str {
        match self {
            Operation::Fault | Operation::Map4k | Operation::Map4kBatch | Operation::Split2m => {
                "a locked exchange for each PTE, inside a guard; without them, no other thread could fault, map or \
                 unmap meanwhile"
            }
            Operation::MapRange | Operation::MapRangeEach | Operation::MapRange2m => {
                "each step looks for invalidations under way; without that, a page that the host takes away could be \
                 mapped"
            }
            Operation::Query | Operation::QueryScattered => {
                "a guard, and an answer with memory type, execute rights, A and D; without the guard, the page-table \
                 page could be freed under the walk"
            }
            Operation::ProtectRange | Operation::Protect4k => {
                "a locked exchange for each PTE, and a flush; without them, a write of a CPU could be lost"
            }
            Operation::Unmap4k => {
                "each call publishes its range, takes a number and flushes; without that, a fault that has asked the \
                 host before could map the page again"
            }
            Operation::UnmapRange => {
                "page-table pages are kept until no CPU and no thread can read them; without that, calls of other \
                 threads would have to wait"
            }
        }
    }

    /// Whether its pages are of 2 MiB when it begins, or when it ends.
    fn is_huge(self) -> bool {
        matches!(self, Operation::MapRange2m | Operation::Split2m)
    }
}

/// Frames of the guest's pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Frames {
    /// In order, shifted by a page against the guest's, so that no large leaf fits.
    Shifted,
    /// The same; each is looked up.
    ShiftedUnknown,
    /// In order, shifted by 2 MiB: leaves of that size fit, and no larger ones.
    Aligned,
}

impl Frames {
    /// Frame of guest page `page`.
    #[inline]
    pub(crate) fn frame(self, page: u64) -> u64 {
        FIRST_FRAME + page + if self == Frames::Aligned { BLOCK_PAGES } else { 1 }
    }
}

/// Pages `first`, `first + step`, ..
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pages {
    pub(crate) first: u64,
    pub(crate) step: u64,
    pub(crate) nr_pages: u64,
}

impl Pages {
    #[inline]
    pub(crate) fn iter(self) -> impl Iterator<Item = u64> {
        (0..self.nr_pages).map(move |index| self.first + index * self.step)
    }
}

/// The leaf PTE of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Leaf {
    pub(crate) frame: u64,
    pub(crate) writable: bool,
    pub(crate) huge: bool,
}

/// One thread's access to page tables. A page that is mapped already may stay or be mapped again.
/// Operations that a crate does not have do nothing, and the check notices.
pub(crate) trait Table {
    /// A guest's write to a page that is not mapped.
    #[inline]
    fn fault(&mut self, _page: u64) {}

    /// Maps 4 KiB pages, writable, one by one.
    #[inline]
    fn map(&mut self, _pages: Pages) {}

    /// Maps one 4 KiB page, writable.
    #[inline]
    fn map_single(&mut self, page: u64) {
        self.map(Pages { first: page, step: 1, nr_pages: 1 });
    }

    /// Maps a range, writable, in 2 MiB pages if the frames are aligned.
    fn map_range(&mut self, _first: u64, _nr_pages: u64, _frames: Frames) {}

    /// Sum of the frames of the pages `start + (page & mask)`, as far as they are mapped.
    #[inline]
    fn query(&mut self, _start: u64, _mask: u64, _pages: Pages) -> u64 {
        0
    }

    /// Write-protects 4 KiB pages one by one.
    fn protect(&mut self, _pages: Pages) {}

    /// Write-protects a range.
    fn protect_range(&mut self, _first: u64, _nr_pages: u64) {}

    #[inline]
    fn unmap_single(&mut self, _page: u64) {}

    fn unmap_range(&mut self, _first: u64, _nr_pages: u64) {}

    /// Splits the 2 MiB page at `page`.
    #[inline]
    fn split(&mut self, _page: u64) {}

    /// The leaf PTE of a page, for the check.
    fn look(&mut self, page: u64) -> Option<Leaf>;

    /// Whether a page that should have the frame `expected` may have `found`: another one only
    /// where the crate chooses frames.
    fn is_right_frame(&mut self, expected: u64, found: u64) -> bool {
        expected == found
    }
}

/// A measurement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PeerJob {
    pub(crate) operation: Operation,
    pub(crate) nr_threads: u64,
    /// A power of two from [`QUERIES`] to [`MAX_PAGES`]: 4 KiB pages for each thread. Ranges are
    /// four times as long; a quarter of the pages is unmapped one by one, and for each 64 of them a
    /// huge page is split.
    pub(crate) pages: u64,
}

impl PeerJob {
    /// The units of the figures: 4 KiB pages, or 2 MiB pages where those are mapped or split; for
    /// each thread.
    pub(crate) fn units(self) -> u64 {
        match self.operation {
            Operation::MapRange | Operation::MapRangeEach | Operation::UnmapRange => self.pages * 4,
            Operation::Split2m => self.pages / 64,
            Operation::Unmap4k => self.pages / 4,
            _ => self.pages,
        }
    }

    fn unit_pages(self) -> u64 {
        if self.operation.is_huge() { BLOCK_PAGES } else { 1 }
    }

    pub(crate) fn frames(self) -> Frames {
        match self.operation {
            Operation::Fault | Operation::MapRangeEach => Frames::ShiftedUnknown,
            operation if operation.is_huge() => Frames::Aligned,
            _ => Frames::Shifted,
        }
    }

    /// Pages of each thread.
    pub(crate) fn part_pages(self) -> u64 {
        self.units() * self.unit_pages()
    }

    /// Pages of all threads.
    pub(crate) fn all_pages(self) -> u64 {
        self.nr_threads * self.part_pages()
    }

    /// Units in one call.
    fn units_of_call(self) -> u64 {
        match self.operation {
            Operation::Map4kBatch => BATCH,
            Operation::Query | Operation::QueryScattered => QUERIES,
            Operation::Fault | Operation::Map4k | Operation::Unmap4k | Operation::Split2m => 1,
            // One call for all.
            _ => self.units(),
        }
    }

    /// Calls of each thread.
    pub(crate) fn calls(self) -> u64 {
        self.units() / self.units_of_call()
    }

    /// Prepares the tables for the operation.
    pub(crate) fn prepare(self, table: &mut impl Table) {
        match self.operation {
            Operation::Map4k | Operation::Map4kBatch => self.table_makers().for_each(|page| table.map_single(page)),
            Operation::Fault | Operation::MapRange | Operation::MapRangeEach | Operation::MapRange2m => {}
            _ => self.first_pages().for_each(|first| table.map_range(first, self.part_pages(), self.frames())),
        }
    }

    /// The first page of each thread.
    fn first_pages(self) -> impl Iterator<Item = u64> {
        (0..self.nr_threads).map(|thread| thread * PART_PAGES)
    }

    /// The pages that are mapped beforehand, one in each page-table page, which makes it. None where
    /// page-table pages are not to be there.
    pub(crate) fn table_makers(self) -> impl Iterator<Item = u64> {
        let is_asked = matches!(self.operation, Operation::Map4k | Operation::Map4kBatch);
        let pages =
            move |first: u64| (first + BLOCK_PAGES - 1..first + self.part_pages()).step_by(BLOCK_PAGES as usize);
        self.first_pages().filter(move |_| is_asked).flat_map(pages)
    }

    /// Makes call number `call` of thread `thread`. Returns the sum of a query, else 0.
    #[inline]
    pub(crate) fn call(self, table: &mut impl Table, thread: u64, call: u64) -> u64 {
        let (start, step, nr_pages) = (thread * PART_PAGES, self.unit_pages(), self.units_of_call());
        let pages = Pages { first: start + call * nr_pages * step, step, nr_pages };
        match self.operation {
            Operation::Fault => table.fault(pages.first),
            Operation::Map4k => table.map_single(pages.first),
            Operation::Map4kBatch => table.map(pages),
            Operation::MapRange | Operation::MapRangeEach | Operation::MapRange2m => {
                table.map_range(pages.first, self.part_pages(), self.frames());
            }
            Operation::Query => return table.query(0, u64::MAX, pages),
            Operation::QueryScattered => {
                let pages = Pages { first: (pages.first - start) * SCATTER, step: SCATTER, ..pages };
                return table.query(start, self.part_pages() - 1, pages);
            }
            Operation::ProtectRange => table.protect_range(pages.first, self.part_pages()),
            Operation::Protect4k => table.protect(pages),
            Operation::Unmap4k => table.unmap_single(pages.first),
            Operation::UnmapRange => table.unmap_range(pages.first, self.part_pages()),
            Operation::Split2m => table.split(pages.first),
        }
        0
    }

    /// Checks that the operation has done its work on each page, or, of 2 MiB pages, on one page of
    /// each at varying offsets. `found` is the sum of the results of its calls.
    ///
    /// # Errors
    /// What is wrong, as a sentence.
    pub(crate) fn check(self, table: &mut impl Table, found: u64) -> Result<(), String> {
        let pages = (0..self.nr_threads).flat_map(|thread| {
            let step = if self.operation.is_huge() { BLOCK_PAGES as usize - 1 } else { 1 };
            (0..self.part_pages()).step_by(step).map(move |page| thread * PART_PAGES + page)
        });
        let asks = matches!(self.operation, Operation::Query | Operation::QueryScattered);
        let expected =
            if asks { pages.clone().fold(0, |sum: u64, page| sum.wrapping_add(self.frames().frame(page))) } else { 0 };
        if found != expected {
            return Err(format!("the sum of the frames is {found:#x}, not {expected:#x}"));
        }
        pages.into_iter().try_for_each(|page| self.check_page(table, page))
    }

    fn check_page(self, table: &mut impl Table, page: u64) -> Result<(), String> {
        let leaf = match (table.look(page), self.operation) {
            (None, Operation::Unmap4k | Operation::UnmapRange) => return Ok(()),
            (Some(_), Operation::Unmap4k | Operation::UnmapRange) => {
                return Err(format!("page {page:#x} is still mapped"));
            }
            (None, _) => return Err(format!("page {page:#x} is not mapped")),
            (Some(leaf), _) => leaf,
        };
        let frame = self.frames().frame(page);
        // One of the peers splits by protecting a page.
        let may_be_either = self.operation == Operation::Split2m;
        let writable = !matches!(self.operation, Operation::ProtectRange | Operation::Protect4k);
        if !table.is_right_frame(frame, leaf.frame) {
            Err(format!("page {page:#x} has frame {:#x}, and should have {frame:#x}", leaf.frame))
        } else if leaf.huge != (self.operation == Operation::MapRange2m) {
            Err(format!("page {page:#x} is{} in a huge page", if leaf.huge { "" } else { " not" }))
        } else if leaf.writable != writable && !may_be_either {
            Err(format!("page {page:#x} may{} be written", if leaf.writable { "" } else { " not" }))
        } else {
            Ok(())
        }
    }
}

/// Byte address of a page.
#[inline]
pub(crate) fn address(page: u64) -> usize {
    page as usize * TABLE_BYTES
}
