//! One resolver's session: the rings that it was given, and its end.
//!
//! # Protocol
//! - Each session has a file of rings and doorbells of its own. So what a resolver writes after it
//!   was declared dead does not reach its successor's rings. A vCPU that still reads the old rings
//!   finds the completions that came in time.
//! - A session ends once. [`Shared::end`] marks the session, and then signals an eventfd that only
//!   the VMM has, and that is never emptied. A sleeping vCPU waits for that eventfd too, so no vCPU
//!   sleeps through an end, and no end waits for a thing of the other side. (The other side has the
//!   wakers, and could make them block and keep them full. The VMM only reads those, which never
//!   blocks.)
//! - If the other side reads the signal of a completion away, the vCPU looks again after [`NAP`].
//! - A doorbell is the only eventfd of the other side that the VMM writes. A vCPU may block in that
//!   write. The watcher ends a session whose doorbells block or are full, and then empties them
//!   again and again. That bounds the wait, except for a resolver that fills the doorbell anew each
//!   time before the vCPU's write completes; it must be killed. The watcher and the drop of
//!   [`Delivery`](super::Delivery) do not wait for it.
//! - One watcher thread observes the end of the socket. No other thread has to.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::bitmap::SharedBitmap;
use super::ring::{SharedRings, Sleeper};
use super::shared;
use crate::linux::descriptors::EventFd;

/// The longest sleep without a look: a bound if the other side reads signals away.
pub(super) const NAP: Duration = Duration::from_millis(100);

/// How often the watcher checks the doorbells of a resolver that lives.
const WATCH: Duration = Duration::from_secs(1);

/// What belongs to one resolver.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) epoch: u64,
    pub(super) rings: SharedRings,
    /// One for each thread of the resolver.
    pub(super) doorbells: Vec<EventFd>,
    pub(super) socket: UnixStream,
    is_over: AtomicBool,
    /// Readable from the end on.
    pub(super) ended: EventFd,
}

impl Session {
    pub(super) fn new(
        epoch: u64,
        rings: SharedRings,
        doorbells: Vec<EventFd>,
        socket: UnixStream,
    ) -> io::Result<Session> {
        Ok(Session { epoch, rings, doorbells, socket, is_over: AtomicBool::new(false), ended: EventFd::new()? })
    }

    pub(super) fn is_over(&self) -> bool {
        // Acquire: with the release in `Shared::end`; a vCPU that observes the end goes on to look
        // for a successor.
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

    /// Lets threads out that are blocked in a doorbell: a resolver may make doorbells block, and
    /// fill them. It can repeat that as long as it lives, so one call is not enough.
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
    pub(super) page_bytes: u64,
    pub(super) bitmap: Arc<SharedBitmap>,
    pub(super) timeout: Duration,
    /// One for each waiter.
    pub(super) wakers: Vec<EventFd>,
    /// Wakes the watcher.
    pub(super) command: EventFd,
    /// The last session, alive or not. No fault takes this lock.
    present: Mutex<Option<Arc<Session>>>,
    changed: Condvar,
    /// The epoch of `present`; 0 before the first.
    epoch: AtomicU64,
    is_closed: AtomicBool,
}

impl Shared {
    pub(super) fn new(
        (nr_vcpus, ring_entries, page_bytes): (u32, u32, u64),
        bitmap: Arc<SharedBitmap>,
        timeout: Duration,
        wakers: Vec<EventFd>,
        command: EventFd,
    ) -> Shared {
        Shared {
            nr_vcpus,
            ring_entries,
            page_bytes,
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

    /// The last session, if it lives.
    pub(super) fn live_session(&self) -> Option<Arc<Session>> {
        self.present.lock().as_ref().filter(|session| !session.is_over()).cloned()
    }

    /// The epoch of the last session.
    pub(super) fn epoch(&self) -> u64 {
        // Acquire: a reader of this epoch finds its session.
        self.epoch.load(Ordering::Acquire)
    }

    /// Makes `session` the present one. Fails if one lives (with its epoch), or if the delivery is
    /// closed (`None`).
    pub(super) fn begin(&self, session: Session) -> Result<(), Option<u64>> {
        let mut present = self.present.lock();
        if self.is_closed() {
            return Err(None);
        }
        if let Some(living) = present.as_ref().filter(|session| !session.is_over()) {
            return Err(Some(living.epoch));
        }
        let epoch = session.epoch;
        if let Some(former) = present.replace(Arc::new(session)) {
            // The watcher does not check it any more.
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
        let mut present = self.present.lock();
        loop {
            if let Some(session) = present.as_ref().filter(|session| !session.is_over()) {
                return Some(Arc::clone(session));
            }
            let left = limit.checked_sub(began.elapsed()).filter(|left| !left.is_zero())?;
            if self.is_closed() {
                return None;
            }
            self.changed.wait_for(&mut present, left);
        }
    }

    /// Declares the session's resolver dead and wakes all vCPUs.
    pub(super) fn end(&self, session: &Session) {
        // Release: with `is_over`. Only the first caller does the rest.
        if session.is_over.swap(true, Ordering::AcqRel) {
            return;
        }
        // The resolver may be alive, and then finds the end.
        let _ = session.socket.shutdown(std::net::Shutdown::Both);
        session.free_doorbells();
        session.ended.signal();
        self.wake_waiters_for_a_session();
    }

    fn wake_waiters_for_a_session(&self) {
        // With the lock, so that no thread is between its look and its wait.
        let _present = self.present.lock();
        self.changed.notify_all();
    }

    /// Ends everything.
    pub(super) fn close(&self) {
        // Release: with `is_closed`.
        self.is_closed.store(true, Ordering::Release);
        let present = self.present.lock().clone();
        if let Some(session) = present {
            self.end(&session);
            session.free_doorbells();
        }
        self.wake_waiters_for_a_session();
        self.command.signal();
    }

    /// The watcher: waits for the end of each session's socket, until the delivery is closed.
    pub(super) fn watch(&self) {
        while !self.is_closed() {
            let present = self.present.lock().clone();
            let waited = match present {
                None => shared::wait_readable([self.command.as_fd()], WATCH).map(|[command]| (command, false)),
                Some(session) if session.is_over() => {
                    session.free_doorbells();
                    shared::wait_readable([self.command.as_fd()], NAP).map(|[command]| (command, false))
                }
                Some(session) => {
                    let files = [self.command.as_fd(), session.socket.as_fd()];
                    let waited = shared::wait_readable(files, WATCH).map(|[command, socket]| (command, socket));
                    // After the handshake neither side writes: anything to read is the end. A
                    // resolver that made its doorbell block, or filled it, tries to block vCPUs in
                    // it.
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
                // Out of kernel memory: only costs time.
                Err(_) => std::thread::sleep(NAP),
            }
        }
    }
}
