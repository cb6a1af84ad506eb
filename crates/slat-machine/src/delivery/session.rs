//! One resolver's time: the rings that it was given, and its death.
//!
//! # Protocol
//! - Each session has a file of rings and doorbells of its own. So nothing that a resolver does
//!   after it was declared dead reaches its successor's rings, and a vCPU that still looks at the
//!   old ones finds what was answered in time.
//! - A session ends once: [`Shared::end`] says so in the session, and then signals an eventfd of
//!   the session's that the other side never had and that nobody empties. Who sleeps waits for it
//!   too, so no vCPU sleeps through an end, and no end waits for anything that is the other side's.
//!   (It has the wakers, and could make them block and keep them full: the VMM only reads those,
//!   which never blocks.)
//! - Should the other side eat a completion's signal, the vCPU looks again after [`NAP`].
//! - A doorbell is the one eventfd of the other side's that the VMM writes. A vCPU that is stuck in
//!   one is let out by the watcher, which ends a session whose doorbells block or are full, and
//!   empties them again and again after that. That bounds the wait for all but a resolver that
//!   fills the doorbell anew each time before the vCPU's write gets there, and which must be
//!   killed. The watcher and [`Delivery`](super::Delivery)'s drop do not wait for it.
//! - One watcher thread sees the end of the socket. Nobody else has to.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use slat::PageSize;

use super::bitmap::SharedBitmap;
use super::ring::{Rings, Sleeper};
use super::shared;
use crate::descriptors::EventFd;

/// The longest sleep without a look around: a way out if the other side eats signals.
pub(super) const NAP: Duration = Duration::from_millis(100);

/// How often the watcher looks after the doorbells of a resolver that lives.
const WATCH: Duration = Duration::from_secs(1);

/// What belongs to one resolver.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) epoch: u64,
    pub(super) rings: Rings,
    /// One for each thread of the resolver.
    pub(super) doorbells: Vec<EventFd>,
    pub(super) socket: UnixStream,
    is_over: AtomicBool,
    /// Readable from the end on.
    pub(super) ended: EventFd,
}

impl Session {
    pub(super) fn new(epoch: u64, rings: Rings, doorbells: Vec<EventFd>, socket: UnixStream) -> io::Result<Session> {
        Ok(Session { epoch, rings, doorbells, socket, is_over: AtomicBool::new(false), ended: EventFd::new()? })
    }

    pub(super) fn is_over(&self) -> bool {
        // Acquire: with the release in `Shared::end`; a vCPU that sees the end goes on to look for
        // a successor.
        self.is_over.load(Ordering::Acquire)
    }

    /// Wakes the resolver's thread that serves `vcpu`, if it sleeps. Whether it did.
    pub(super) fn ring_doorbell(&self, vcpu: u32) -> bool {
        let shard = vcpu % self.rings.layout().nr_shards;
        let sleeps = self.rings.take_sleeper(Sleeper::Shard(shard));
        if sleeps {
            self.doorbells[shard as usize].signal();
        }
        sleeps
    }

    /// Lets whoever is stuck in a doorbell get out: a resolver may make them block, and fill them
    /// to the brim. It may do that again as long as it lives, so once is not enough.
    fn free_doorbells(&self) {
        for doorbell in &self.doorbells {
            doorbell.keep_nonblocking();
            doorbell.drain();
        }
    }
}

/// What the delivery, its ports, its waiters and its watcher share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) nr_vcpus: u32,
    pub(super) ring_entries: u32,
    pub(super) page_size: PageSize,
    pub(super) bitmap: Arc<SharedBitmap>,
    pub(super) timeout: Duration,
    /// One for each waiter.
    pub(super) wakers: Vec<EventFd>,
    /// Wakes the watcher.
    pub(super) command: EventFd,
    /// The last session, alive or not. Nobody takes this lock in a fault.
    present: Mutex<Option<Arc<Session>>>,
    changed: Condvar,
    /// The epoch of `present`; 0 before the first.
    epoch: AtomicU64,
    is_closed: AtomicBool,
}

impl Shared {
    pub(super) fn new(
        (nr_vcpus, ring_entries, page_size): (u32, u32, PageSize),
        bitmap: Arc<SharedBitmap>,
        timeout: Duration,
        wakers: Vec<EventFd>,
        command: EventFd,
    ) -> Shared {
        Shared {
            nr_vcpus,
            ring_entries,
            page_size,
            bitmap,
            timeout,
            wakers,
            command,
            present: Mutex::new(None),
            changed: Condvar::new(),
            epoch: AtomicU64::new(0),
            is_closed: AtomicBool::new(false),
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        // Acquire: as for `Session::is_over`.
        self.is_closed.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<Session>>> {
        // Whoever panicked with the lock has left a whole value behind.
        self.present.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The last session, if it lives.
    pub(super) fn live_session(&self) -> Option<Arc<Session>> {
        self.lock().as_ref().filter(|session| !session.is_over()).cloned()
    }

    /// The epoch of the last session.
    pub(super) fn epoch(&self) -> u64 {
        // Acquire: who sees it finds the session.
        self.epoch.load(Ordering::Acquire)
    }

    /// Makes `session` the present one, unless one lives or the delivery is closed; then whether it
    /// is closed or the epoch of the living one.
    pub(super) fn begin(&self, session: Session) -> Result<(), Option<u64>> {
        let mut present = self.lock();
        if self.is_closed() {
            return Err(None);
        }
        if let Some(living) = present.as_ref().filter(|session| !session.is_over()) {
            return Err(Some(living.epoch));
        }
        let epoch = session.epoch;
        if let Some(former) = present.replace(Arc::new(session)) {
            // The watcher looks after it no more.
            former.free_doorbells();
        }
        // Release: with `epoch`.
        self.epoch.store(epoch, Ordering::Release);
        self.changed.notify_all();
        drop(present);
        self.command.signal();
        Ok(())
    }

    /// Waits until a session lives.
    pub(super) fn wait_for_session(&self, limit: Duration) -> Option<Arc<Session>> {
        let began = Instant::now();
        let mut present = self.lock();
        loop {
            if let Some(session) = present.as_ref().filter(|session| !session.is_over()) {
                return Some(Arc::clone(session));
            }
            let left = limit.checked_sub(began.elapsed()).filter(|left| !left.is_zero())?;
            if self.is_closed() {
                return None;
            }
            present = self.changed.wait_timeout(present, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Declares the session's resolver dead and wakes all vCPUs.
    pub(super) fn end(&self, session: &Session) {
        // Release: with `is_over`. The first to come does the rest.
        if session.is_over.swap(true, Ordering::AcqRel) {
            return;
        }
        // It may be alive, and shall know.
        let _ = session.socket.shutdown(std::net::Shutdown::Both);
        session.free_doorbells();
        session.ended.signal();
        self.wake_who_wants_a_session();
    }

    fn wake_who_wants_a_session(&self) {
        // With the lock, so that nobody is between its look and its wait.
        let _present = self.lock();
        self.changed.notify_all();
    }

    /// Ends everything.
    pub(super) fn close(&self) {
        // Release: with `is_closed`.
        self.is_closed.store(true, Ordering::Release);
        let present = self.lock().clone();
        if let Some(session) = present {
            self.end(&session);
            session.free_doorbells();
        }
        self.wake_who_wants_a_session();
        self.command.signal();
    }

    /// The watcher: sees the end of each session's socket, until the delivery is closed.
    pub(super) fn watch(&self) {
        while !self.is_closed() {
            let present = self.lock().clone();
            let waited = match present {
                None => shared::wait_readable([self.command.as_fd()], WATCH).map(|[command]| (command, false)),
                Some(session) if session.is_over() => {
                    session.free_doorbells();
                    shared::wait_readable([self.command.as_fd()], NAP).map(|[command]| (command, false))
                }
                Some(session) => {
                    let files = [self.command.as_fd(), session.socket.as_fd()];
                    let waited = shared::wait_readable(files, WATCH).map(|[command, socket]| (command, socket));
                    // After the handshake nobody writes: whatever there is to read, it is the end.
                    // A resolver that made its doorbell block, or filled it, means to catch vCPUs
                    // in it.
                    let is_end = matches!(waited, Ok((_, true)));
                    if is_end || session.doorbells.iter().any(|bell| bell.keep_nonblocking() || bell.is_full()) {
                        self.end(&session);
                    }
                    waited
                }
            };
            match waited {
                Ok((true, _)) => self.command.drain(),
                Ok(_) => {}
                // Out of kernel memory: not in the way of anything but time.
                Err(_) => std::thread::sleep(NAP),
            }
        }
    }
}
