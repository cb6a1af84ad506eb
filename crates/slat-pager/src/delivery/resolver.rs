//! The resolver's end of a delivery: a thread or process that fills pages for the vCPUs of a VMM.
//!
//! # Protocol
//! - *Claims.* A thread claims a page before it fills it, in memory of the resolver's own process,
//!   which dies with it. With the claim it reads the bit. A clear bit means that the page was
//!   filled since the request; the request is only completed. To finish: fill, clear the bit with
//!   release, release the claim with release. The next claim of the page (acquire) observes the bit
//!   clear. So between two settings of its bit a page is filled once, however many vCPUs ask for
//!   it, in whichever shard, and also beside a background copier.
//! - A thread that does not get the claim *defers* its request, and looks again in each sweep. It
//!   must not sleep through the release. So the release of a claim looks for deferred requests of
//!   all shards, and rings all doorbells if there are any. This is a store-load pair with fences,
//!   between "defer, then look at the claim" and "release the claim, then look for deferred
//!   requests".
//! - *Sleep*: announce, sweep once more, block. The order with the vCPUs is in [`SharedRings`].
//! - A vCPU is woken as soon as its page is complete, not after the sweep: it can run while the
//!   next page is filled.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::time::Duration;

use super::bitmap::SharedBitmap;
use super::error::{AttachError, ResolverError};
use super::guest_page::GuestPage;
use super::handshake::{self, Deadline, Hello};
use super::port::{DONE, FAILED};
use super::ring::{NotPushed, Reader, RingEntry, SharedRings, Sleeper, Writer};
use super::session::NAP;
use super::shared;
use crate::linux::descriptors::EventFd;
use crate::linux::mapping::MappedMemory;
use parts::WelcomeParts;

mod parts;

/// The identity of the next resolver of this process. 0 is none.
static NEXT_RESOLVER: AtomicU64 = AtomicU64::new(1);

/// The code of a failure: the bitmap has no such page.
const NO_SUCH_PAGE: u32 = u32::MAX;

/// The guest's memory, as this process has it mapped.
#[derive(Debug)]
struct GuestMemory {
    mapping: MappedMemory,
    page_bytes: u64,
}

/// The right to fill a page. It ends with [`Resolver::filled`] or [`Resolver::give_up`] of the
/// resolver that made it.
#[must_use = "no other thread fills the page until the claim is released"]
#[derive(PartialEq, Eq, Debug)]
pub struct PageClaim {
    /// The resolver that made it.
    resolver: u64,
    /// A page of that resolver's bitmap.
    page: u64,
}

impl PageClaim {
    /// The page.
    pub fn page(&self) -> u64 {
        self.page
    }
}

/// A page that a vCPU waits for, with its claim. It ends with [`Shard::complete`] or
/// [`Shard::fail`] of the shard that took it.
#[must_use = "a vCPU waits for it"]
#[derive(PartialEq, Eq, Debug)]
pub struct Request {
    claim: PageClaim,
    vcpu: u32,
    flags: u64,
    ticket: u64,
}

impl Request {
    /// The vCPU that waits.
    pub fn vcpu(&self) -> u32 {
        self.vcpu
    }

    /// The page: the number of its bit.
    pub fn page(&self) -> u64 {
        self.claim.page
    }

    /// The flags of the exit.
    pub fn flags(&self) -> u64 {
        self.flags
    }
}

/// What a shard has counted.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct ResolverStats {
    /// Requests taken out of the rings.
    pub requests: u64,
    /// Pages that were filled and whose bit was cleared here.
    pub filled: u64,
    /// Requests for pages that were there already.
    pub already_there: u64,
    /// Requests that waited for the claim of another thread.
    pub deferred: u64,
    /// Requests that were answered with a failure.
    pub failed: u64,
    /// vCPUs or waiters that slept and were woken.
    pub wakes: u64,
    /// Sweeps over all rings.
    pub sweeps: u64,
    /// Times that the shard slept.
    pub parks: u64,
}

/// How a sleep ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ShardWake {
    /// There may be work.
    Work,
    /// The time was over.
    TimedOut,
    /// The VMM has closed the delivery, or is gone.
    Closed,
}

/// A resolver: what its shards share.
#[derive(Debug)]
pub struct Resolver {
    /// Unique in this process, whichever VMM the resolver serves: each VMM counts its own epochs.
    identity: u64,
    epoch: u64,
    pub(super) rings: SharedRings,
    bitmap: SharedBitmap,
    memory: Option<GuestMemory>,
    page_bytes: u64,
    pub(super) doorbells: Vec<EventFd>,
    pub(super) wakers: Vec<EventFd>,
    socket: UnixStream,
    /// One bit a page: a thread fills it.
    claims: Box<[AtomicU64]>,
    /// Requests of all shards that wait for the claims of other threads.
    nr_deferred: AtomicUsize,
    is_closed: AtomicBool,
}

impl Resolver {
    /// Runs the handshake with a VMM over `stream`, and makes a shard for each of `nr_threads`:
    /// shard t serves the vCPUs v with v % `nr_threads` = t. Dropping any shard ends the resolver.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn attach(
        stream: UnixStream,
        nr_threads: u32,
        timeout: Duration,
    ) -> Result<(Arc<Resolver>, Vec<Shard>), AttachError> {
        let deadline = Deadline::new(timeout);
        stream.set_nonblocking(false).map_err(|source| AttachError::System { call: "fcntl", source })?;
        handshake::send_hello(&stream, Hello { version: handshake::VERSION, nr_threads }, deadline)?;
        let welcome = handshake::receive_welcome(&stream, deadline)?;
        if welcome.version != handshake::VERSION {
            return Err(AttachError::Version { ours: handshake::VERSION, theirs: welcome.version });
        }
        match welcome.status {
            0 => {}
            handshake::REFUSED_THREADS => {
                return Err(AttachError::BadThreads { nr_threads, nr_vcpus: welcome.layout.nr_vcpus });
            }
            code => return Err(AttachError::Refused { code }),
        }
        let made = handshake::receive_descriptors(&stream, welcome.nr_descriptors, deadline)
            .and_then(|files| WelcomeParts::new(files, &welcome, nr_threads));
        let parts = match made {
            Ok(parts) => parts,
            Err(error) => {
                // If it does not arrive, the VMM finds the end of the socket.
                let _ = handshake::send_ready(&stream, welcome.epoch, handshake::REFUSED_CONTENTS, deadline);
                return Err(error);
            }
        };
        handshake::send_ready(&stream, welcome.epoch, 0, deadline)?;
        let WelcomeParts { rings, bitmap, memory, page_bytes, doorbells, wakers } = parts;
        let claims = (0..bitmap.words().len()).map(|_| AtomicU64::new(0)).collect();
        let resolver = Arc::new(Resolver {
            // Relaxed: only a number.
            identity: NEXT_RESOLVER.fetch_add(1, Ordering::Relaxed),
            epoch: welcome.epoch,
            rings,
            bitmap,
            memory,
            page_bytes,
            doorbells,
            wakers,
            socket: stream,
            claims,
            nr_deferred: AtomicUsize::new(0),
            is_closed: AtomicBool::new(false),
        });
        let shards = (0..nr_threads).map(|number| Shard::new(&resolver, number)).collect();
        Ok((resolver, shards))
    }

    /// Which resolver of its VMM it is.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The bitmap.
    pub fn bitmap(&self) -> &SharedBitmap {
        &self.bitmap
    }

    /// What a bit stands for.
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Where to fill the page of a request. `None` if the request is another resolver's, the VMM
    /// does not share its memory, or the shared memory is shorter.
    pub fn page<'a>(&'a self, request: &'a Request) -> Option<GuestPage<'a>> {
        self.claimed_page(&request.claim)
    }

    /// Where to fill a page that was claimed, as for [`page`](Resolver::page).
    pub fn claimed_page<'a>(&'a self, claim: &'a PageClaim) -> Option<GuestPage<'a>> {
        self.check(claim).ok()?;
        let GuestMemory { mapping, page_bytes } = self.memory.as_ref()?;
        let offset = claim.page.checked_mul(*page_bytes).filter(|offset| *offset < mapping.size_bytes())?;
        // Cannot truncate: inside a mapping.
        let size_bytes = (mapping.size_bytes() - offset).min(*page_bytes) as usize;
        Some(GuestPage::new(mapping, offset as usize, size_bytes))
    }

    /// Claims a page that is missing. `None` if it is there, or claimed.
    pub fn claim(&self, page: u64) -> Option<PageClaim> {
        if page >= self.bitmap.nr_pages() || !self.try_claim(page) {
            return None;
        }
        if self.bitmap.is_set(page) {
            return Some(PageClaim { resolver: self.identity, page });
        }
        self.release(page);
        None
    }

    /// The page is filled: clears its bit, and releases the claim.
    ///
    /// # Errors
    /// [`ResolverError::OtherResolver`].
    pub fn filled(&self, claim: PageClaim) -> Result<(), ResolverError> {
        self.check(&claim)?;
        self.bitmap.clear(claim.page);
        self.release(claim.page);
        Ok(())
    }

    /// Releases the claim without having filled the page.
    ///
    /// # Errors
    /// [`ResolverError::OtherResolver`].
    pub fn give_up(&self, claim: PageClaim) -> Result<(), ResolverError> {
        self.check(&claim)?;
        self.release(claim.page);
        Ok(())
    }

    /// Checks that this resolver made the claim: then it is the page's only one, and the bitmap has
    /// the page.
    fn check(&self, claim: &PageClaim) -> Result<(), ResolverError> {
        let PageClaim { resolver, page } = *claim;
        if resolver == self.identity { Ok(()) } else { Err(ResolverError::OtherResolver { page }) }
    }

    /// Releases the claim of a page of the bitmap.
    fn release(&self, page: u64) {
        // Release: the bit is clear before the claim is free. Cannot truncate: pages have words in
        // memory.
        self.claims[(page / 64) as usize].fetch_and(!(1 << (page % 64)), Ordering::Release);
        // With the fence in `Shard::defer`: either that side finds the claim free, or this load
        // finds its count. With the fence in `announce_sleep`: either that side finds the claim
        // free in its last look, or this side rings its doorbell.
        fence(Ordering::SeqCst);
        if self.nr_deferred.load(Ordering::Relaxed) != 0 {
            for (number, doorbell) in self.doorbells.iter().enumerate() {
                if self.rings.take_sleeper(Sleeper::Shard(number as u32)) {
                    doorbell.signal();
                }
            }
        }
    }

    /// Claims the page, if it is free. Returns whether it was.
    fn try_claim(&self, page: u64) -> bool {
        let bit = 1 << (page % 64);
        // Acquire: the claimer before has cleared the bit, and the caller's read of the bit
        // observes that.
        self.claims[(page / 64) as usize].fetch_or(bit, Ordering::Acquire) & bit == 0
    }

    fn close(&self) {
        // Relaxed: a hint for the other shards, which also find the end of the socket.
        self.is_closed.store(true, Ordering::Relaxed);
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }
}

/// A vCPU's rings, from the resolver's side.
#[derive(Debug)]
struct Served {
    vcpu: u32,
    requests: Reader,
    completions: Writer,
}

/// One thread's part of a resolver: the vCPUs that it serves.
#[derive(Debug)]
pub struct Shard {
    resolver: Arc<Resolver>,
    number: u32,
    vcpus: Vec<Served>,
    deferred: VecDeque<Request>,
    stats: ResolverStats,
}

impl Shard {
    fn new(resolver: &Arc<Resolver>, number: u32) -> Shard {
        let layout = resolver.rings.layout();
        let served = |vcpu| Served { vcpu, requests: Reader::default(), completions: Writer::default() };
        Shard {
            resolver: Arc::clone(resolver),
            number,
            vcpus: (number..layout.nr_vcpus).step_by(layout.nr_shards as usize).map(served).collect(),
            deferred: VecDeque::new(),
            stats: ResolverStats::default(),
        }
    }

    /// What was counted so far.
    pub fn stats(&self) -> ResolverStats {
        self.stats
    }

    /// Takes all pending entries of all rings. A page that has to be filled is added to `requests`;
    /// a page that is there is completed; a page that another thread fills is deferred. Returns how
    /// many were added.
    ///
    /// # Errors
    /// [`ResolverError`]; what was taken so far is in `requests`.
    pub fn sweep(&mut self, requests: &mut Vec<Request>) -> Result<usize, ResolverError> {
        let before = requests.len();
        self.stats.sweeps += 1;
        for _ in 0..self.deferred.len() {
            let Some(request) = self.deferred.pop_front() else { break };
            // Relaxed: counts down only what this thread has counted up.
            self.resolver.nr_deferred.fetch_sub(1, Ordering::Relaxed);
            self.sort(request, requests)?;
        }
        let nr_entries = self.resolver.rings.layout().nr_entries;
        for index in 0..self.vcpus.len() {
            // No more than the ring holds, so that a vCPU that asks without end does not keep
            // others waiting.
            for _ in 0..nr_entries {
                let Served { vcpu, requests: ring, .. } = &mut self.vcpus[index];
                let vcpu = *vcpu;
                let popped = ring.pop(self.resolver.rings.requests(vcpu));
                let Some(entry) = popped.map_err(|bad| ResolverError::RingCorrupt { vcpu, bad })? else { break };
                self.stats.requests += 1;
                // Not yet a claim: `sort` makes it.
                let claim = PageClaim { resolver: self.resolver.identity, page: entry.page };
                let request = Request { claim, vcpu, flags: entry.word, ticket: entry.ticket };
                if entry.page >= self.resolver.bitmap.nr_pages() {
                    self.stats.failed += 1;
                    self.answer(&request, FAILED | u64::from(NO_SUCH_PAGE) << 32)?;
                } else {
                    let nr_deferred = self.deferred.len();
                    self.sort(request, requests)?;
                    self.stats.deferred += (self.deferred.len() - nr_deferred) as u64;
                }
            }
        }
        Ok(requests.len() - before)
    }

    /// Completes, defers or claims a request for a page of the bitmap.
    fn sort(&mut self, request: Request, requests: &mut Vec<Request>) -> Result<(), ResolverError> {
        let page = request.page();
        if !self.resolver.try_claim(page) {
            // Then a fence, then another look: see `Resolver::release`.
            self.resolver.nr_deferred.fetch_add(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if !self.resolver.try_claim(page) {
                let vcpu = request.vcpu;
                self.deferred.push_back(request);
                // More than the rings hold: the VMM repeats requests that were not answered.
                let limit = self.vcpus.len() * self.resolver.rings.layout().nr_entries as usize;
                return if self.deferred.len() > limit { Err(ResolverError::RingFull { vcpu }) } else { Ok(()) };
            }
            self.resolver.nr_deferred.fetch_sub(1, Ordering::Relaxed);
        }
        if self.resolver.bitmap.is_set(page) {
            requests.push(request);
            return Ok(());
        }
        self.resolver.release(page);
        self.stats.already_there += 1;
        self.answer(&request, DONE)
    }

    /// The page is filled: clears its bit and wakes its vCPU.
    ///
    /// # Errors
    /// [`ResolverError::OtherResolver`] changes nothing; after any other error the bit is clear.
    pub fn complete(&mut self, request: Request) -> Result<(), ResolverError> {
        self.resolver.check(&request.claim)?;
        self.stats.filled += u64::from(self.resolver.bitmap.clear(request.page()));
        self.resolver.release(request.page());
        self.answer(&request, DONE)
    }

    /// Reports to its vCPU that the page cannot be filled.
    ///
    /// # Errors
    /// [`ResolverError`].
    pub fn fail(&mut self, request: Request, code: u32) -> Result<(), ResolverError> {
        self.resolver.check(&request.claim)?;
        self.stats.failed += 1;
        self.resolver.release(request.page());
        self.answer(&request, FAILED | u64::from(code) << 32)
    }

    fn answer(&mut self, request: &Request, status: u64) -> Result<(), ResolverError> {
        let Request { claim: PageClaim { page, .. }, vcpu, ticket, .. } = *request;
        let Resolver { rings, wakers, .. } = &*self.resolver;
        // A shard serves every `nr_shards`th vCPU.
        let served = self.vcpus.get_mut((vcpu / rings.layout().nr_shards) as usize);
        let served = served.filter(|served| served.vcpu == vcpu).ok_or(ResolverError::OtherShard { vcpu })?;
        served.completions.push(rings.completions(vcpu), RingEntry { ticket, page, word: status }).map_err(
            |error| match error {
                NotPushed::Full => ResolverError::RingFull { vcpu },
                NotPushed::BadIndex(bad) => ResolverError::RingCorrupt { vcpu, bad },
            },
        )?;
        let waiter = vcpu % wakers.len() as u32;
        if rings.take_sleeper(Sleeper::Waiter(waiter)) {
            self.stats.wakes += 1;
            wakers[waiter as usize].signal();
        }
        Ok(())
    }

    /// Announces that this thread is about to sleep. It sweeps once more, and only then
    /// [parks](Shard::park).
    pub fn announce(&self) {
        self.resolver.rings.announce_sleep(Sleeper::Shard(self.number));
    }

    /// Withdraws the announcement.
    pub fn withdraw(&self) {
        self.resolver.rings.withdraw_sleep(Sleeper::Shard(self.number));
    }

    /// Sleeps until there is work, at most `limit`, and withdraws the announcement.
    ///
    /// # Errors
    /// [`ResolverError::System`].
    pub fn park(&mut self, limit: Duration) -> Result<ShardWake, ResolverError> {
        self.stats.parks += 1;
        let files = [self.doorbell().as_fd(), self.resolver.socket.as_fd()];
        let waited = shared::wait_readable(files, limit);
        self.withdraw();
        let [is_rung, is_over] = waited.map_err(|source| ResolverError::System { call: "ppoll", source })?;
        if is_rung {
            self.doorbell().drain();
        }
        // Relaxed: see `Resolver::close`.
        if is_over || self.resolver.is_closed.load(Ordering::Relaxed) {
            return Ok(ShardWake::Closed);
        }
        Ok(if is_rung { ShardWake::Work } else { ShardWake::TimedOut })
    }

    fn doorbell(&self) -> &EventFd {
        &self.resolver.doorbells[self.number as usize]
    }

    /// The doorbell, for a loop that also waits for other things; [`park`](Shard::park) with a
    /// limit of zero empties it.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.doorbell().as_fd()
    }

    /// Serves the vCPUs with `fill` until the VMM closes the delivery. `fill` fills one page, or
    /// returns the code of its failure. It gets the page if the VMM shares its memory.
    ///
    /// # Errors
    /// [`ResolverError`].
    pub fn serve(
        &mut self,
        mut fill: impl FnMut(&Request, Option<GuestPage<'_>>) -> Result<(), u32>,
    ) -> Result<ResolverStats, ResolverError> {
        let resolver = Arc::clone(&self.resolver);
        let mut requests = Vec::new();
        loop {
            if self.sweep(&mut requests)? == 0 {
                self.announce();
                if self.sweep(&mut requests)? == 0 && self.park(NAP)? == ShardWake::Closed {
                    return Ok(self.stats);
                }
                self.withdraw();
            }
            for request in requests.drain(..) {
                match fill(&request, resolver.page(&request)) {
                    Ok(()) => self.complete(request)?,
                    Err(code) => self.fail(request, code)?,
                }
            }
        }
    }
}

impl Drop for Shard {
    fn drop(&mut self) {
        // Otherwise its vCPUs would wait for ever. The VMM's watcher finds the end, and another
        // resolver can come. The deferred requests do not matter any more.
        self.resolver.close();
    }
}
