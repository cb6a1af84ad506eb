//! Pages that a thread of this process fetches from a source of its own.
//!
//! A [`Fetcher`] has blocks in flight that its user has claimed. It requests their pages, puts each
//! in place as it comes, and publishes a block when all of it has come. Its drop releases what is
//! still in flight. A thread that runs vCPUs uses it by [`Fetch`], which adds the claims, and the
//! vCPUs whose block another thread fetches.
//!
//! Some sources have a page at once (made from its number, or read from a file). Then the page is
//! taken right after its request. A source that once does not have the page at once is treated as
//! one with a latency: requests are then made one after the other, and pages are taken when no vCPU
//! can run.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use slat::slots::MemoryFaultFlags;
use slat_pager::source::requests::{MAX_IN_FLIGHT, OpenSource, PageRequests, Wait};

use super::arrivals::{Arrivals, LONGEST_SLEEP};
use super::error::VcpuError;
use super::filler::Filler;
use super::pages::{Asked, PageSupply};
use super::userfaultfd::Wake;

/// How long a thread waits for its source while one of its vCPUs waits for a page that another
/// thread fetches.
const OTHERS: Duration = Duration::from_micros(100);

/// The source to open, and where its pages go.
#[derive(Clone, Debug)]
pub(crate) struct FetchFrom {
    pub(crate) source: OpenSource,
    pub(crate) filler: Arc<Filler>,
    pub(crate) block_pages: u64,
}

/// A block in flight.
#[derive(Clone, Copy, Debug)]
struct FetchedBlock<T> {
    block: u64,
    /// Pages of it that have not come.
    nr_left: u64,
    /// The requester.
    tag: T,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Fetcher<T> {
    source: PageRequests,
    filler: Arc<Filler>,
    arrivals: Arc<Arrivals>,
    block_pages: u64,
    in_flight: VecDeque<FetchedBlock<T>>,
    /// Pages of blocks in flight for which the source had no room.
    unasked: VecDeque<u64>,
    /// Blocks that it has published.
    nr_filled: u64,
}

impl<T: Copy> Fetcher<T> {
    pub(crate) fn open(from: &FetchFrom, arrivals: &Arc<Arrivals>, nr_blocks: usize) -> Result<Fetcher<T>, VcpuError> {
        Ok(Fetcher {
            source: from.source.requests()?,
            filler: Arc::clone(&from.filler),
            arrivals: Arc::clone(arrivals),
            block_pages: from.block_pages,
            in_flight: VecDeque::with_capacity(nr_blocks),
            unasked: VecDeque::new(),
            nr_filled: 0,
        })
    }

    /// Requests all pages of `block`, which the caller has claimed.
    #[inline]
    pub(crate) fn ask(&mut self, block: u64, tag: T) -> Result<(), VcpuError> {
        self.in_flight.push_back(FetchedBlock { block, nr_left: self.block_pages, tag });
        if self.block_pages == 1 && self.unasked.is_empty() && self.source.nr_in_flight() < MAX_IN_FLIGHT {
            self.source.request(block)?;
        } else {
            let first = block * self.block_pages;
            self.unasked.extend(first..first + self.block_pages);
        }
        Ok(())
    }

    /// Blocks that were requested and have not come.
    pub(crate) fn nr_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Blocks that have come.
    pub(crate) fn nr_filled(&self) -> u64 {
        self.nr_filled
    }

    /// Takes pages until a block is complete, publishes it, and returns the tag of its requester.
    /// `None` if none was complete when the wait was over.
    pub(crate) fn next(&mut self, wait: Wait) -> Result<Option<T>, VcpuError> {
        loop {
            while !self.unasked.is_empty() && self.source.nr_in_flight() < MAX_IN_FLIGHT {
                if let Some(page) = self.unasked.pop_front() {
                    self.source.request(page)?;
                }
            }
            let Some(page) = self.source.arrived(wait)? else { return Ok(None) };
            self.filler.fill(page, &mut self.source, Wake::None)?;
            let block = page / self.block_pages;
            // Mostly the first: sources answer about in the order of the requests.
            let Some(place) = self.in_flight.iter().position(|in_flight| in_flight.block == block) else { continue };
            let in_flight = &mut self.in_flight[place];
            in_flight.nr_left -= 1;
            if in_flight.nr_left == 0 {
                let tag = in_flight.tag;
                if place == 0 {
                    self.in_flight.pop_front();
                } else {
                    self.in_flight.swap_remove_front(place);
                }
                self.arrivals.publish(block);
                self.nr_filled += 1;
                return Ok(Some(tag));
            }
        }
    }
}

impl<T> Drop for Fetcher<T> {
    fn drop(&mut self) {
        for in_flight in &self.in_flight {
            self.arrivals.release(in_flight.block);
        }
    }
}

/// The pages of the vCPUs of one thread.
#[derive(Debug)]
pub(crate) struct Fetch {
    fetcher: Fetcher<usize>,
    arrivals: Arc<Arrivals>,
    block_pages: u64,
    /// Whether pages are there as soon as they are requested.
    is_prompt: bool,
    /// vCPUs that wait for their own fetches.
    nr_waiting: u64,
    /// vCPUs that wait for a block which another thread fetches.
    others: Vec<(usize, u64)>,
}

impl Fetch {
    pub(crate) fn open(from: &FetchFrom, arrivals: &Arc<Arrivals>, nr_lanes: usize) -> Result<Fetch, VcpuError> {
        Ok(Fetch {
            fetcher: Fetcher::open(from, arrivals, nr_lanes)?,
            arrivals: Arc::clone(arrivals),
            block_pages: from.block_pages,
            is_prompt: true,
            nr_waiting: 0,
            others: Vec::with_capacity(nr_lanes),
        })
    }

    fn take(&mut self, wait: Wait, ready: &mut VecDeque<usize>) -> Result<bool, VcpuError> {
        let Some(lane) = self.fetcher.next(wait)? else { return Ok(false) };
        self.nr_waiting -= 1;
        self.arrivals.faults_served(1);
        ready.push_back(lane);
        Ok(true)
    }
}

impl PageSupply for Fetch {
    fn still_waits(&mut self, _: usize) -> Result<bool, VcpuError> {
        // The source of the earlier run was dropped, with what was in flight.
        Ok(false)
    }

    #[inline]
    fn ask(&mut self, lane: usize, page: u64, _: MemoryFaultFlags) -> Result<Asked, VcpuError> {
        let block = page / self.block_pages;
        if !self.arrivals.claim(block) {
            if !self.arrivals.is_missing(block) {
                return Ok(Asked::IsThere);
            }
            self.others.push((lane, block));
            return Ok(Asked::Waits);
        }
        self.fetcher.ask(block, lane)?;
        if self.is_prompt {
            if self.fetcher.next(Wait::No)?.is_some() {
                debug_assert_eq!(self.fetcher.nr_in_flight(), 0, "the only one was its own");
                return Ok(Asked::IsThere);
            }
            self.is_prompt = false;
        }
        self.nr_waiting += 1;
        self.arrivals.fault_waits();
        Ok(Asked::Waits)
    }

    fn collect(&mut self, ready: &mut VecDeque<usize>) -> Result<(), VcpuError> {
        if self.fetcher.nr_in_flight() > 0 {
            // Only one: its vCPU requests the next page at once, which is on its way while the
            // others are put in place.
            self.take(Wait::No, ready)?;
        }
        let arrivals = &self.arrivals;
        self.others.retain(|&(lane, block)| {
            let waits = arrivals.is_missing(block);
            if !waits {
                ready.push_back(lane);
            }
            waits
        });
        Ok(())
    }

    fn sleep(&mut self, ready: &mut VecDeque<usize>) -> Result<(), VcpuError> {
        if self.fetcher.nr_in_flight() > 0 {
            let longest = if self.others.is_empty() { LONGEST_SLEEP } else { OTHERS };
            self.take(Wait::Until(Instant::now() + longest), ready)?;
        } else {
            let others = &self.others;
            self.arrivals.sleep(|| others.iter().any(|&(_, block)| !self.arrivals.is_missing(block)));
        }
        Ok(())
    }

    fn failure_of(&mut self, _: usize) -> Option<VcpuError> {
        None
    }
}

impl Drop for Fetch {
    fn drop(&mut self) {
        self.arrivals.faults_served(self.nr_waiting);
    }
}
