//! What is measured: the operations, on which pages, and what each of the tables must be able to do.

use std::sync::Mutex;

use super::arena::FRAME_BYTES;
use super::run::{self, Order, PARTITION_PAGES, Shape, Subject, Times};

/// Frame of guest page 0.
const FIRST_FRAME: u64 = 1 << 24;
/// Pages between the first pages of two threads that have pages of their own: 64 GiB.
pub(crate) const PART_PAGES: u64 = 1 << 24;
/// Pages in 2 MiB.
pub(crate) const BLOCK_PAGES: u64 = 512;
/// Pages that one call maps, where it maps several: they share what a cursor or a section costs.
pub(crate) const BATCH: u64 = 64;
/// Pages that one call asks for.
const QUERIES: u64 = 512;
/// From one page to the next where each is to be in another table than the one before: odd, so that all are reached.
const SCATTER: u64 = 40_503;

/// One row of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Operation {
    /// 4 KiB pages one by one, [`BATCH`] in a call, into tables that are there.
    MapBatch,
    /// A 4 KiB page a call, into tables that are there.
    MapSingle,
    /// A range of 4 KiB pages whose frames are known to follow each other, into tables that are not there.
    MapRangeKnown,
    /// The same, but for each page the frame must be asked for.
    MapRangeEach,
    /// A range of 2 MiB pages.
    MapRangeHuge,
    /// Where pages are mapped, one after the other.
    Query,
    /// Where pages are mapped, each in another table.
    QueryScattered,
    /// The right to write taken from all pages of a range.
    ProtectRange,
    /// The right to write taken from pages one by one.
    ProtectPages,
    /// A page a call taken away.
    UnmapSingle,
    /// A range taken away.
    UnmapRange,
    /// A 2 MiB page replaced by a table of 4 KiB pages.
    Split,
}

/// Which pages two threads use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Sharing {
    /// Each its own.
    Disjoint,
    /// Every other page of the same tables.
    SameBlock,
    /// The same pages.
    SamePage,
}

/// Frames behind the guest's pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Frames {
    /// In order, shifted by a page against the guest's, so that no large leaf fits.
    Shifted,
    /// The same; each has to be asked for.
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

/// What the tables say about a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Leaf {
    pub(crate) frame: u64,
    pub(crate) writable: bool,
    pub(crate) huge: bool,
}

/// One thread's hands on the tables. What is mapped already may stay or be mapped again.
pub(crate) trait Table {
    /// Maps 4 KiB pages, writable, one by one.
    fn map(&mut self, pages: Pages);

    /// Maps one 4 KiB page, writable.
    #[inline]
    fn map_single(&mut self, page: u64) {
        self.map(Pages { first: page, step: 1, nr_pages: 1 });
    }

    /// Maps a range, writable, in 2 MiB pages if the frames are aligned.
    fn map_range(&mut self, first: u64, nr_pages: u64, frames: Frames);

    /// Sum of the frames of the pages `start + (page & mask)`.
    fn query(&mut self, start: u64, mask: u64, pages: Pages) -> u64;

    /// Takes the right to write from 4 KiB pages one by one.
    fn protect(&mut self, pages: Pages);

    /// Takes the right to write from a range.
    fn protect_range(&mut self, first: u64, nr_pages: u64);

    fn unmap_single(&mut self, page: u64);

    fn unmap_range(&mut self, first: u64, nr_pages: u64);

    /// Splits the 2 MiB page at `page`, if nobody has.
    fn split(&mut self, page: u64);

    /// What the tables say about a page, for the check.
    fn look(&mut self, page: u64) -> Option<Leaf>;
}

/// Tables of one kind, shared by the threads of a measurement.
pub(crate) trait Shared: Sync {
    type Hands: Table;

    /// A thread's way to the tables: `step` is done with each number that it is given.
    fn each(&self, nr_threads: u64, step: impl Fn(&mut Self::Hands, u64)) -> impl FnMut(u64);
}

/// A peer. One thread keeps the mutex; of two, each takes it for each call.
impl<T: Table + Send> Shared for Mutex<T> {
    type Hands = T;

    #[inline]
    fn each(&self, nr_threads: u64, step: impl Fn(&mut T, u64)) -> impl FnMut(u64) {
        let mut kept = (nr_threads == 1).then(|| self.lock().unwrap());
        move |number| match &mut kept {
            Some(table) => step(table, number),
            None => step(&mut self.lock().unwrap(), number),
        }
    }
}

/// A measurement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Job {
    pub(crate) operation: Operation,
    pub(crate) sharing: Sharing,
    pub(crate) nr_threads: u64,
    /// For how many times fewer pages than usual.
    pub(crate) divisor: u64,
}

impl Job {
    /// What the figures are for: 4 KiB pages, or 2 MiB pages where those are mapped or split; for each thread.
    pub(crate) fn units(self) -> u64 {
        let units = match self.operation {
            // A run is a millisecond or less: shorter than what the scheduler gives to somebody else, so that most runs
            // have their CPUs for themselves on a machine with other users.
            Operation::MapRangeKnown | Operation::MapRangeEach | Operation::UnmapRange => 1 << 17,
            Operation::Split => 1 << 9,
            Operation::UnmapSingle => 1 << 13,
            _ => 1 << 15,
        };
        (units / self.divisor).max(QUERIES)
    }

    fn unit_pages(self) -> u64 {
        if self.huge() { BLOCK_PAGES } else { 1 }
    }

    fn huge(self) -> bool {
        matches!(self.operation, Operation::MapRangeHuge | Operation::Split)
    }

    pub(crate) fn frames(self) -> Frames {
        match self.operation {
            Operation::MapRangeEach => Frames::ShiftedUnknown,
            _ if self.huge() => Frames::Aligned,
            _ => Frames::Shifted,
        }
    }

    /// Parts of the memory that are used.
    pub(crate) fn nr_parts(self) -> u64 {
        if self.sharing == Sharing::Disjoint { self.nr_threads } else { 1 }
    }

    /// Pages of each part.
    pub(crate) fn part_pages(self) -> u64 {
        let threads = if self.sharing == Sharing::SameBlock && !self.huge() { self.nr_threads } else { 1 };
        self.units() * self.unit_pages() * threads
    }

    /// Units in one call.
    fn units_of_call(self) -> u64 {
        match self.operation {
            Operation::MapBatch => BATCH,
            Operation::Query | Operation::QueryScattered => QUERIES,
            Operation::MapSingle | Operation::UnmapSingle | Operation::Split => 1,
            // One call for all.
            _ => self.units(),
        }
    }

    /// The pages of the call that begins with unit `unit` of thread `thread`.
    #[inline]
    fn pages(self, thread: u64, unit: u64) -> Pages {
        let (nr_pages, pages) = (self.units_of_call(), self.unit_pages());
        match self.sharing {
            Sharing::Disjoint => Pages { first: thread * PART_PAGES + unit * pages, step: pages, nr_pages },
            Sharing::SameBlock if !self.huge() => {
                Pages { first: unit * self.nr_threads + thread, step: self.nr_threads, nr_pages }
            }
            Sharing::SameBlock | Sharing::SamePage => Pages { first: unit * pages, step: pages, nr_pages },
        }
    }

    /// Brings the tables to where the operation begins.
    pub(crate) fn prepare(self, table: &mut impl Table) {
        for part in 0..self.nr_parts() {
            let first = part * PART_PAGES;
            match self.operation {
                // The tables: a page in each.
                Operation::MapBatch | Operation::MapSingle => {
                    for page in (first + BLOCK_PAGES - 1..first + self.part_pages()).step_by(BLOCK_PAGES as usize) {
                        table.map_single(page);
                    }
                }
                Operation::MapRangeKnown | Operation::MapRangeEach | Operation::MapRangeHuge => {}
                _ => table.map_range(first, self.part_pages(), self.frames()),
            }
        }
    }

    /// Does call number `call` of thread `thread`.
    #[inline]
    fn call(self, table: &mut impl Table, thread: u64, call: u64) {
        let pages = self.pages(thread, call * self.units_of_call());
        match self.operation {
            Operation::MapBatch => table.map(pages),
            Operation::MapSingle => table.map_single(pages.first),
            Operation::MapRangeKnown | Operation::MapRangeEach | Operation::MapRangeHuge => {
                table.map_range(pages.first, self.part_pages(), self.frames());
            }
            Operation::Query => {
                std::hint::black_box(table.query(0, u64::MAX, pages));
            }
            Operation::QueryScattered => {
                let start = thread * PART_PAGES * u64::from(self.sharing == Sharing::Disjoint);
                let first = (pages.first - start) * SCATTER;
                let pages = Pages { first, step: SCATTER, ..pages };
                std::hint::black_box(table.query(start, self.part_pages() - 1, pages));
            }
            Operation::ProtectRange => table.protect_range(pages.first, self.part_pages()),
            Operation::ProtectPages => table.protect(pages),
            Operation::UnmapSingle => table.unmap_single(pages.first),
            Operation::UnmapRange => table.unmap_range(pages.first, self.part_pages()),
            Operation::Split => table.split(pages.first),
        }
    }

    /// Sees that the operation did what it is for: on each page, or, of 2 MiB pages, in each once and somewhere else.
    pub(crate) fn check(self, table: &mut impl Table) {
        let step = if self.huge() { BLOCK_PAGES as usize - 1 } else { 1 };
        let part = |part| (0..self.part_pages()).step_by(step).map(move |page| part * PART_PAGES + page);
        for page in (0..self.nr_parts()).flat_map(part) {
            let leaf = table.look(page);
            if matches!(self.operation, Operation::UnmapSingle | Operation::UnmapRange) {
                assert_eq!(leaf, None, "{self:?}: page {page} is still mapped");
                continue;
            }
            let leaf = leaf.unwrap_or_else(|| panic!("{self:?}: page {page} is not mapped"));
            assert_eq!(leaf.frame, self.frames().frame(page), "{self:?}: page {page}");
            assert_eq!(leaf.huge, self.operation == Operation::MapRangeHuge, "{self:?}: page {page}");
            let protects = matches!(self.operation, Operation::ProtectRange | Operation::ProtectPages);
            // A table that is split for a log stays protected where the guest has not written.
            assert!(leaf.writable != protects || self.operation == Operation::Split, "{self:?}: page {page}");
        }
    }

    /// Runs it on tables that are prepared.
    pub(crate) fn run(self, tables: &impl Shared) -> Times {
        let calls = self.units() / self.units_of_call();
        run::run(
            &Running { job: self, tables },
            Shape { nr_threads: self.nr_threads, order: Order::Partitioned, pages: calls },
        )
    }
}

struct Running<'t, S> {
    job: Job,
    tables: &'t S,
}

impl<S: Shared> Subject for Running<'_, S> {
    fn cpu(&self) -> impl FnMut(u64) {
        let job = self.job;
        // What the runner numbers as pages of partitions are calls of threads here.
        self.tables.each(job.nr_threads, move |table, number| {
            job.call(table, number / PARTITION_PAGES, number % PARTITION_PAGES);
        })
    }
}

/// Byte address of a page.
#[inline]
pub(crate) fn address(page: u64) -> usize {
    page as usize * FRAME_BYTES
}
