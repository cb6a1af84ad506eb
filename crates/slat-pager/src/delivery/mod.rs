//! Userfaults delivered to a resolver in another thread or another process, without an exit to the
//! VMM: each vCPU writes its request into a ring in shared memory, sleeps, and goes on when its
//! page is there.
//!
//! One queue for all vCPUs (a userfaultfd, a pipe to one thread) is the bottleneck of post-copy
//! with many vCPUs. Here two vCPUs share no queue, no lock, and no cache line that both write. One
//! sweep over all rings serves all pending requests, so many faults cost few context switches.
//!
//! # Guarantees
//! - **A page is there when its bit is clear**, and nothing else counts: not a completion, not a
//!   wake-up. The resolver writes the whole page, clears the bit with release, and then completes
//!   the request. The vCPU reads the bit with acquire.
//! - **No wake-up is lost.** A thread announces its sleep in shared memory, looks once more, and
//!   then sleeps. The other side writes its entry, and then looks for a sleeper. A fence on either
//!   side: `ring.rs`.
//! - **Every wait ends**: by a timeout, by the resolver's death, or by the delivery's end. The
//!   exception is a live resolver that deliberately keeps vCPUs blocked in its doorbell;
//!   `session.rs` has the bound, and only vCPUs can be blocked so. The end of its socket shows that
//!   a resolver has died; one watcher thread observes it (`session.rs`). What was in flight stays
//!   known to its port (`port.rs`), which asks the next resolver, in new rings.
//! - **A page is filled once** between two settings of its bit, while one resolver lives: the
//!   thread that fills claims the page first, among all threads of that resolver (`resolver.rs`),
//!   and reads the bit after that.
//! - **A new resolver fills no page again.** It is not asked for a page whose bit is clear; if it
//!   is asked all the same, it completes the request without a fill. A killed resolver may leave a
//!   page half filled. The bit of that page is set, so no guest has seen it, and the next resolver
//!   fills the whole page. So no page changes under a guest by a fill, the bit goes from 1 to 0
//!   once, and a vCPU's request is reported once. (A resolver that was only *declared* dead has the
//!   memory mapped, and can write anything. Kill it.)
//! - **The other side is not trusted.** A value from shared memory is read once, and checked before
//!   its use. An impossible value is an error or is counted, see [`PortStats`]. Files that both
//!   sides map cannot shrink. A resolver may fill pages with wrong contents, or never answer: that
//!   is a timeout.
//!
//! # What is here, and what is the engine's
//! A VMM on the engine (the software machine of slat) has a [`Delivery`] and reads its
//! [`SharedBitmap`] as the engine's userfault bits; that binding is the VMM's. A resolver attaches by a
//! socket: [`serve_rings`] is one that takes pages from a source. Nothing here needs the engine.
//!
//! The model is the exit-less mode that was discussed for KVM Userfault: a ring and an eventfd each
//! way for each vCPU.

mod bitmap;
mod error;
mod guest_page;
mod handshake;
mod port;
mod resolver;
mod ring;
mod serve;
mod session;
mod shared;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::source::PAGE_BYTES as PAGE_SIZE;
use parking_lot::Mutex;

pub use bitmap::SharedBitmap;
pub use error::{AttachError, BadIndex, DeliveryConfigError, DeliveryError, ResolverError};
pub use guest_page::GuestPage;
pub use port::{DeliveryPort, MAX_ANSWERS, Parked, PortStats, Requested, Waiter};
pub use resolver::{PageClaim, Request, Resolver, ResolverStats, Shard, ShardWake};
pub use serve::{Copier, ServeConfig, ServeError, serve_rings};

use crate::linux::descriptors::{EventFd, sealed_file};
use handshake::{Deadline, Welcome};
use ring::{RingLayout, SharedRings};
use session::{Session, Shared};

/// The guest's memory as a file that a resolver maps: page 0 of the bitmap is at `offset_bytes`.
#[derive(Debug)]
pub struct SharedMemoryFile {
    /// A memory file that is sealed against shrinking, or can be.
    pub file: OwnedFd,
    /// Where the memory starts in it, a multiple of the page size.
    pub offset_bytes: u64,
    /// Its size, a multiple of the page size; not more than the bitmap has bits for.
    pub size_bytes: u64,
}

/// What a delivery is made of.
#[derive(Debug)]
pub struct DeliveryConfig {
    /// vCPUs, each with its rings.
    pub nr_vcpus: u32,
    /// Eventfds that vCPUs sleep on: vCPU v sleeps on number v modulo this. One for each vCPU if
    /// each has its thread; one for each thread if a thread runs several.
    pub nr_waiters: u32,
    /// Requests that a vCPU may have in flight; a power of two.
    pub ring_entries: u32,
    /// What a bit of the bitmap stands for: 4 KiB, 2 MiB or 1 GiB.
    pub page_bytes: u64,
    /// The userfault bitmap.
    pub bitmap: Arc<SharedBitmap>,
    /// The guest's memory, unless the resolver reaches it in another way.
    pub memory: Option<SharedMemoryFile>,
    /// The limit of every wait.
    pub timeout: Duration,
}

impl DeliveryConfig {
    /// A thread for each vCPU, 16 requests in flight for each, pages of 4 KiB, no file of the
    /// memory, 10 seconds.
    pub fn new(nr_vcpus: u32, bitmap: Arc<SharedBitmap>) -> DeliveryConfig {
        DeliveryConfig {
            nr_vcpus,
            nr_waiters: nr_vcpus,
            ring_entries: 16,
            page_bytes: PAGE_SIZE,
            bitmap,
            memory: None,
            timeout: Duration::from_secs(10),
        }
    }
}

/// Which of the vCPUs and waiters were handed out.
#[derive(Debug, Default)]
struct Taken {
    ports: Vec<bool>,
    waiters: Vec<bool>,
}

/// The VMM's end: it hands out ports to vCPUs and admits resolvers, one after the other. Dropping
/// it ends all waits.
#[derive(Debug)]
pub struct Delivery {
    shared: Arc<Shared>,
    memory: Option<SharedMemoryFile>,
    taken: Mutex<Taken>,
    /// The epoch of the last resolver.
    last_epoch: AtomicU64,
    watcher: Option<JoinHandle<()>>,
}

impl Delivery {
    /// A delivery without a resolver.
    ///
    /// # Errors
    /// [`DeliveryConfigError`].
    pub fn new(config: DeliveryConfig) -> Result<Delivery, DeliveryConfigError> {
        let DeliveryConfig { nr_vcpus, nr_waiters, ring_entries, page_bytes, bitmap, memory, timeout } = config;
        if !(RingLayout { nr_shards: 1, nr_waiters, nr_vcpus, nr_entries: ring_entries }).is_possible() {
            return Err(DeliveryConfigError::BadCounts { nr_vcpus, nr_waiters, ring_entries });
        }
        if !is_page(page_bytes) {
            return Err(DeliveryConfigError::BadPage { page_bytes });
        }
        let eventfd = || EventFd::new().map_err(|source| DeliveryConfigError::System { call: "eventfd", source });
        let wakers = (0..nr_waiters).map(|_| eventfd()).collect::<Result<Vec<_>, _>>()?;
        let command = eventfd()?;
        if let Some(memory) = &memory {
            check_memory(memory, bitmap.nr_pages().saturating_mul(page_bytes))?;
        }
        let numbers = (nr_vcpus, ring_entries, page_bytes);
        let shared = Arc::new(Shared::new(numbers, bitmap, timeout, wakers, command));
        let watched = Arc::clone(&shared);
        let watcher = thread::Builder::new()
            .name("delivery-watcher".to_owned())
            .spawn(move || watched.watch())
            .map_err(|source| DeliveryConfigError::System { call: "clone", source })?;
        let taken = Taken { ports: vec![false; nr_vcpus as usize], waiters: vec![false; nr_waiters as usize] };
        Ok(Delivery { shared, memory, taken: Mutex::new(taken), last_epoch: AtomicU64::new(0), watcher: Some(watcher) })
    }

    /// Returns the port of a vCPU, once.
    ///
    /// # Errors
    /// [`DeliveryConfigError::Taken`].
    pub fn take_port(&self, vcpu: u32) -> Result<DeliveryPort, DeliveryConfigError> {
        let mut taken = self.taken.lock();
        take(&mut taken.ports, "vCPU", vcpu)?;
        Ok(DeliveryPort::new(Arc::clone(&self.shared), vcpu))
    }

    /// Returns a waiter, on which a thread that runs several vCPUs sleeps; once.
    ///
    /// # Errors
    /// [`DeliveryConfigError::Taken`].
    pub fn take_waiter(&self, number: u32) -> Result<Waiter, DeliveryConfigError> {
        let mut taken = self.taken.lock();
        take(&mut taken.waiters, "waiter", number)?;
        Ok(Waiter::new(Arc::clone(&self.shared), number))
    }

    /// The bitmap.
    pub fn bitmap(&self) -> &Arc<SharedBitmap> {
        &self.shared.bitmap
    }

    /// Whether a resolver lives.
    pub fn is_attached(&self) -> bool {
        self.shared.live_session().is_some()
    }

    /// Declares the present resolver dead: vCPUs that wait get [`DeliveryError::ResolverGone`].
    pub fn detach(&self) {
        if let Some(session) = self.shared.live_session() {
            self.shared.end(&session);
        }
    }

    /// Attaches the resolver at the other end of `stream`, with new rings. Returns its epoch, the
    /// number of the resolver.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn attach(&self, stream: UnixStream) -> Result<u64, AttachError> {
        if self.shared.is_closed() {
            return Err(AttachError::DeliveryClosed);
        }
        if let Some(living) = self.shared.live_session() {
            return Err(AttachError::AlreadyAttached { epoch: living.epoch });
        }
        // Relaxed: only a number. 16 bits of it are in tickets, so none comes back within 65536
        // resolvers.
        let epoch = self.last_epoch.fetch_add(1, Ordering::Relaxed) + 1;
        let session = self.run_handshake(stream, epoch)?;
        match self.shared.begin(session) {
            Ok(()) => Ok(epoch),
            Err(None) => Err(AttachError::DeliveryClosed),
            Err(Some(epoch)) => Err(AttachError::AlreadyAttached { epoch }),
        }
    }

    fn run_handshake(&self, stream: UnixStream, epoch: u64) -> Result<Session, AttachError> {
        let Shared { nr_vcpus, ring_entries, bitmap, wakers, .. } = &*self.shared;
        let deadline = Deadline::new(self.shared.timeout);
        let failed = |call| move |source| AttachError::System { call, source };
        stream.set_nonblocking(false).map_err(failed("fcntl"))?;
        let hello = handshake::receive_hello(&stream, deadline)?;
        let layout = RingLayout {
            nr_shards: hello.nr_threads,
            nr_waiters: wakers.len() as u32,
            nr_vcpus: *nr_vcpus,
            nr_entries: *ring_entries,
        };
        let mut welcome = Welcome {
            version: handshake::VERSION,
            status: 0,
            epoch,
            layout,
            nr_pages: bitmap.nr_pages(),
            page_bytes: self.shared.page_bytes,
            memory_offset_bytes: self.memory.as_ref().map_or(0, |memory| memory.offset_bytes),
            memory_bytes: self.memory.as_ref().map_or(0, |memory| memory.size_bytes),
            nr_descriptors: 0,
        };
        let refused = if hello.version != handshake::VERSION {
            Some((handshake::REFUSED_VERSION, AttachError::Version { ours: handshake::VERSION, theirs: hello.version }))
        } else if !layout.is_possible() {
            let error = AttachError::BadThreads { nr_threads: hello.nr_threads, nr_vcpus: *nr_vcpus };
            Some((handshake::REFUSED_THREADS, error))
        } else {
            None
        };
        if let Some((status, error)) = refused {
            welcome.status = status;
            // If it does not arrive, the resolver has hung up already.
            let _ = handshake::send_welcome(&stream, welcome, deadline);
            return Err(error);
        }
        let file = sealed_file(c"slat-rings", layout.size_bytes()).map_err(failed("memfd_create"))?;
        let rings = SharedRings::new(file.as_fd(), layout).map_err(failed("mmap"))?;
        let doorbells = (0..layout.nr_shards).map(|_| EventFd::new()).collect::<Result<Vec<_>, _>>();
        let doorbells = doorbells.map_err(failed("eventfd"))?;
        let mut files: Vec<BorrowedFd<'_>> = vec![file.as_fd(), bitmap.as_fd()];
        files.extend(self.memory.as_ref().map(|memory| memory.file.as_fd()));
        files.extend(doorbells.iter().chain(wakers).map(AsFd::as_fd));
        welcome.nr_descriptors = files.len() as u64;
        handshake::send_welcome(&stream, welcome, deadline)?;
        handshake::send_descriptors(&stream, &files, deadline)?;
        handshake::receive_ready(&stream, epoch, deadline)?;
        Session::new(epoch, rings, doorbells, stream).map_err(failed("eventfd"))
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        self.shared.close();
        if let Some(watcher) = self.watcher.take() {
            // A watcher that panicked has printed its message already.
            let _ = watcher.join();
        }
    }
}

/// Whether a bit of a bitmap may stand for so many bytes.
fn is_page(nr_bytes: u64) -> bool {
    [4 << 10, 2 << 20, 1 << 30].contains(&nr_bytes)
}

/// Marks `number` as handed out; an error if it was before.
fn take(taken: &mut [bool], what: &'static str, number: u32) -> Result<(), DeliveryConfigError> {
    match taken.get_mut(number as usize) {
        Some(is_taken) if !*is_taken => {
            *is_taken = true;
            Ok(())
        }
        _ => Err(DeliveryConfigError::Taken { what, number }),
    }
}

/// Checks that the memory lies in its file, and seals the file so that it stays there.
fn check_memory(memory: &SharedMemoryFile, bitmap_bytes: u64) -> Result<(), DeliveryConfigError> {
    let SharedMemoryFile { file, offset_bytes, size_bytes } = memory;
    let (offset_bytes, size_bytes) = (*offset_bytes, *size_bytes);
    let check = || {
        let file_bytes =
            shared::file_size(file.as_fd()).map_err(|source| DeliveryConfigError::System { call: "fstat", source })?;
        let is_inside = offset_bytes.checked_add(size_bytes).is_some_and(|end| end <= file_bytes);
        let is_whole = offset_bytes.is_multiple_of(PAGE_SIZE) && size_bytes.is_multiple_of(PAGE_SIZE);
        if !is_inside || !is_whole || size_bytes == 0 || size_bytes > bitmap_bytes {
            return Err(DeliveryConfigError::BadMemory { offset_bytes, size_bytes, file_bytes, bitmap_bytes });
        }
        Ok(())
    };
    // Before the seal, since the memory may be refused; and after it, since the file may have been
    // cut meanwhile.
    check()?;
    if !shared::is_sealed(file.as_fd()) {
        shared::seal_against_shrinking(file.as_fd())
            .map_err(|source| DeliveryConfigError::UnsealedMemory { source })?;
    }
    check()
}

#[cfg(test)]
mod tests;
