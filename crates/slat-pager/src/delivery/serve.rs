//! A resolver that takes its pages from a source, in a thread or in a process of its own.
//!
//! Faults come first: a copier, which brings what was not asked for, has one page in flight while a
//! vCPU waits.

#![expect(unsafe_code, reason = "a resolver makes pages where they belong, in guest memory")]

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use thiserror::Error;

use super::{AttachError, PageClaim, Request, Resolver, ResolverError, Shard, ShardWake};
use crate::source::requests::{MAX_IN_FLIGHT, NextArrival, OpenSource, PageRequests, RequestError, Wait, wait_until};
use crate::source::{PAGE_BYTES as PAGE_SIZE, PageBytes};

/// The code of a failure: the source does not have the page.
const SOURCE_FAILED: u32 = 1;

/// How long a thread sleeps before it looks whether its VMM is still there.
const LONGEST_SLEEP: Duration = Duration::from_millis(20);

/// Brings the pages that were not requested yet.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Copier {
    /// Pages that it has in flight at a time, while no vCPU waits for a page; while one does, a
    /// single one.
    pub window: usize,
}

/// Why a resolver ended before its VMM.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServeError {
    /// There is no VMM to serve.
    #[error(transparent)]
    Handshake(#[from] AttachError),
    /// The rings cannot be used any more.
    #[error(transparent)]
    Resolver(#[from] ResolverError),
    /// The source does not give a page.
    #[error(transparent)]
    Source(#[from] RequestError),
    /// The memory is not shared.
    #[error("the VMM does not share the guest's memory")]
    NoMemory,
    /// Waiting for pages failed.
    #[error("waiting for pages failed: {0}")]
    Wait(#[source] std::io::Error),
    /// A thread could not be started.
    #[error("a thread could not be started: {0}")]
    Thread(#[source] std::io::Error),
}

/// The configuration of a resolver.
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// The source of the pages.
    pub source: OpenSource,
    /// Threads, each of which serves some of the vCPUs, and has requests of its own.
    pub nr_threads: u32,
    /// The background copier, on the first thread.
    pub copier: Option<Copier>,
    /// For how long the handshake may take.
    pub timeout: Duration,
}

/// Serves the VMM at the other end of `stream` as its resolver, with pages from a source, until it
/// closes the delivery. Returns how many blocks were filled. For a thread, or for a process of its
/// own.
///
/// # Errors
/// [`ServeError`]: the VMM finds that its resolver is gone.
pub fn serve_rings(stream: UnixStream, config: &ServeConfig) -> Result<u64, ServeError> {
    let (resolver, shards) = Resolver::attach(stream, config.nr_threads, config.timeout)?;
    std::thread::scope(|scope| {
        let mut threads = Vec::with_capacity(shards.len());
        let mut failure = None;
        for (number, shard) in shards.into_iter().enumerate() {
            let resolver = &resolver;
            let serve = move || Server::new(resolver, shard, config, number == 0)?.serve();
            // A thread that is not started drops its shard, and the others end with it.
            match std::thread::Builder::new().name(format!("resolver {number}")).spawn_scoped(scope, serve) {
                Ok(thread) => threads.push(thread),
                Err(error) => failure = Some(ServeError::Thread(error)),
            }
        }
        let mut nr_filled = 0;
        for thread in threads {
            match thread.join() {
                Ok(Ok(nr)) => nr_filled += nr,
                Ok(Err(error)) => failure = failure.or(Some(error)),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        failure.map_or(Ok(nr_filled), Err)
    })
}

/// The requester of a block in flight, with its right to the block.
#[derive(Debug)]
enum Requester {
    Vcpu(Request),
    Copier(PageClaim),
}

impl Requester {
    fn block(&self) -> u64 {
        match self {
            Requester::Vcpu(request) => request.page(),
            Requester::Copier(claim) => claim.page(),
        }
    }
}

#[derive(Debug)]
struct ServedBlock {
    requester: Requester,
    nr_left: u64,
    /// The source could not deliver one of its pages. The block stays until the others have come,
    /// so that none of them is taken for a page of a later request.
    has_failed: bool,
}

/// One thread of a resolver.
struct Server<'a> {
    resolver: &'a Arc<Resolver>,
    shard: Shard,
    source: PageRequests,
    block_pages: u64,
    in_flight: VecDeque<ServedBlock>,
    /// Pages of blocks in flight for which the source had no room.
    unasked: VecDeque<u64>,
    /// Requests of vCPUs among those in flight.
    nr_faults: usize,
    copier: Option<Copier>,
    /// The block at which the copier goes on.
    next_block: u64,
    nr_filled: u64,
}

impl<'a> Server<'a> {
    fn new(
        resolver: &'a Arc<Resolver>,
        shard: Shard,
        config: &ServeConfig,
        copies: bool,
    ) -> Result<Server<'a>, ServeError> {
        Ok(Server {
            resolver,
            shard,
            source: config.source.requests()?,
            block_pages: resolver.page_bytes() / PAGE_SIZE,
            in_flight: VecDeque::new(),
            unasked: VecDeque::new(),
            nr_faults: 0,
            copier: config.copier.filter(|_| copies),
            next_block: 0,
            nr_filled: 0,
        })
    }

    fn serve(mut self) -> Result<u64, ServeError> {
        let mut requests = Vec::new();
        loop {
            self.shard.sweep(&mut requests)?;
            self.take_up(&mut requests);
            self.copy_ahead();
            self.send()?;
            if self.take(Wait::No)? {
                continue;
            }
            self.shard.announce();
            // Also what is there by now: the last look before the sleep.
            if self.shard.sweep(&mut requests)? > 0 {
                self.shard.withdraw();
                continue;
            }
            match self.source.next_arrival() {
                NextArrival::Nothing => {
                    if self.shard.park(LONGEST_SLEEP)? == ShardWake::Closed {
                        return Ok(self.nr_filled);
                    }
                }
                NextArrival::Now => self.shard.withdraw(),
                NextArrival::At(at) => {
                    wait_until(&[self.shard.as_fd()], Some(at)).map_err(ServeError::Wait)?;
                    // Empties the doorbell.
                    if self.shard.park(Duration::ZERO)? == ShardWake::Closed {
                        return Ok(self.nr_filled);
                    }
                }
                NextArrival::Readable { descriptor, until } => {
                    let longest = Instant::now() + LONGEST_SLEEP;
                    let until = until.map_or(longest, |until| until.min(longest));
                    wait_until(&[self.shard.as_fd(), descriptor], Some(until)).map_err(ServeError::Wait)?;
                    if self.shard.park(Duration::ZERO)? == ShardWake::Closed {
                        return Ok(self.nr_filled);
                    }
                }
            }
        }
    }

    /// Takes requests. Faults go before the pages of the copier.
    fn take_up(&mut self, requests: &mut Vec<Request>) {
        for request in requests.drain(..) {
            self.nr_faults += 1;
            self.ask(Requester::Vcpu(request));
        }
    }

    fn copy_ahead(&mut self) {
        let Some(Copier { window }) = self.copier else { return };
        let window = if self.nr_faults > 0 { 1 } else { window };
        let nr_blocks = self.resolver.bitmap().nr_pages();
        while self.in_flight.len() - self.nr_faults < window && self.next_block < nr_blocks {
            if let Some(claim) = self.resolver.claim(self.next_block) {
                self.ask(Requester::Copier(claim));
            }
            self.next_block += 1;
        }
    }

    fn ask(&mut self, requester: Requester) {
        let first = requester.block() * self.block_pages;
        self.in_flight.push_back(ServedBlock { requester, nr_left: self.block_pages, has_failed: false });
        self.unasked.extend(first..first + self.block_pages);
    }

    fn send(&mut self) -> Result<(), ServeError> {
        while self.source.nr_in_flight() < MAX_IN_FLIGHT
            && let Some(page) = self.unasked.pop_front()
        {
            self.source.request(page)?;
        }
        Ok(())
    }

    /// Takes all pages that are here. Returns whether there were any.
    fn take(&mut self, wait: Wait) -> Result<bool, ServeError> {
        let mut has_taken = false;
        while let Some(page) = self.source.arrived(wait)? {
            has_taken = true;
            let block = page / self.block_pages;
            let Some(place) = self.in_flight.iter().position(|in_flight| in_flight.requester.block() == block) else {
                // A page that was not requested.
                self.source.take()?;
                continue;
            };
            match self.fill(place, page) {
                Ok(()) => {}
                Err(ServeError::Source(_)) => self.in_flight[place].has_failed = true,
                Err(error) => return Err(error),
            }
            let in_flight = &mut self.in_flight[place];
            in_flight.nr_left -= 1;
            if in_flight.nr_left > 0 {
                continue;
            }
            let done = if place == 0 { self.in_flight.pop_front() } else { self.in_flight.swap_remove_front(place) };
            let Some(ServedBlock { requester, has_failed, .. }) = done else { continue };
            self.nr_filled += u64::from(!has_failed);
            match requester {
                Requester::Vcpu(request) => {
                    self.nr_faults -= 1;
                    if has_failed {
                        self.shard.fail(request, SOURCE_FAILED)?;
                    } else {
                        self.shard.complete(request)?;
                    }
                }
                Requester::Copier(claim) if has_failed => self.resolver.give_up(claim)?,
                Requester::Copier(claim) => self.resolver.filled(claim)?,
            }
            self.send()?;
        }
        Ok(has_taken)
    }

    /// Puts the page that is here into the block in flight at `place`.
    fn fill(&mut self, place: usize, page: u64) -> Result<(), ServeError> {
        let guest_page = match &self.in_flight[place].requester {
            Requester::Vcpu(request) => self.resolver.page(request),
            Requester::Copier(claim) => self.resolver.claimed_page(claim),
        }
        .ok_or(ServeError::NoMemory)?;
        let offset_bytes = ((page % self.block_pages) * PAGE_SIZE) as usize;
        if offset_bytes + PAGE_SIZE as usize > guest_page.size_bytes() {
            // Behind the end of the memory: the page is never read.
            self.source.take()?;
            return Ok(());
        }
        let at = guest_page.as_ptr().wrapping_add(offset_bytes).cast::<PageBytes>();
        // SAFETY: within the block, which is in a mapping that lives as long as the resolver. The
        // block is claimed, so no other thread writes it, and the guest does not reach it before it
        // is complete.
        self.source.take_into(unsafe { &mut *at })?;
        Ok(())
    }
}
