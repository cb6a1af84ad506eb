//! The locks of shadow paging: one word each, never held across an allocation, a resolve or a
//! flush.
//!
//! # Guarantees
//! A lock excludes all other holders. A thread that takes it reads what earlier holders stored.
//!
//! Here, and at the optional lock of a VM (feature `baselines`), and nowhere else in the engine, a
//! thread can wait for one that was preempted: where the host cannot keep a holder from being
//! preempted ([`Host::preempt_disable`]). It yields its CPU meanwhile. A page fault does not: it
//! looks for a few turns ([`Briefly`]), and then resumes the guest, which faults again.
//!
//! Preemption is disabled before a lock is taken and enabled after it is released. So a thread is
//! never preempted with a lock, and a waiter waits only for what its holder still has to do.
//!
//! # Use
//! There is one lock for each guest frame in use and one for each shadow page, so that vCPUs meet
//! only where they work on the same page. (A frame has lists, which several threads link and
//! unlink.)
//!
//! These wait until a lock is free ([`UntilFree`]), because what they were called for must be done
//! when they return:
//! - the guest's flushes, and building a root: the locks of pages below the root, of the guest
//!   frames that these were made from, and of frames whose leaf PTEs go;
//! - an emulated write: those of what was made of the table;
//! - the check of PDPTEs: that of their frame;
//! - the flush of a change of the second stage, and a harvest: those of its guest frames;
//! - an eviction, which a fault begins where all records of pages are in use;
//! - marks of a vCPU in another paging mode than that of a page of the same guest table.
//!
//! Most locks are held for a part of one page fault. A waiter of a holder that runs waits less than
//! that. Longer are held
//! - the lock of a page, while up to 32 of its PTEs are compared with the guest's, or are zapped,
//! - the lock of an upper page, while a page is linked below it, until all that is unsync below has
//!   been compared,
//! - the lock of a frame, while all leaf PTEs that map it are zapped or write-protected.
//!
//! An emulated write spans a flush, and holds no lock meanwhile. A fault that would make a PTE from
//! the table then makes none and resumes the guest. It does not wait for the flush.

use core::convert::Infallible;

use crate::host::Host;
use crate::sync::{AtomicU32, Ordering, fence_after_rmw, spin_loop};

/// Zero, because the records that have locks are made of zeroes.
const FREE: u32 = 0;
const HELD: u32 = 1;

/// Turns of a waiter's loop before it yields its CPU.
const SPINS_BEFORE_YIELD: u32 = 128;

/// Turns of the loop of a thread that does not wait for longer: less time than a page fault of the
/// guest takes with its exit.
const SPINS_BRIEFLY: u32 = 16;

#[derive(Debug)]
pub(super) struct WordLock(AtomicU32);

/// A lock was held, and the thread has something better to do than to wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Busy;

/// How a thread takes a lock that another thread may hold.
pub(super) trait Wait {
    /// What it may get instead of the lock.
    type Busy;

    fn lock<'l, H: Host>(lock: &'l WordLock, host: &'l H) -> Result<WordGuard<'l, H>, Self::Busy>;

    /// As [`WordLock::lock_while`].
    fn lock_while<'l, H: Host>(
        lock: &'l WordLock,
        host: &'l H,
        is_wanted: impl Fn() -> bool,
    ) -> Result<Option<WordGuard<'l, H>>, Self::Busy>;
}

/// Waits until the lock is free, and yields the CPU meanwhile.
pub(super) enum UntilFree {}

/// Waits for [`SPINS_BRIEFLY`] turns of a loop, if the lock is held: long enough for most holders
/// that run. It never yields.
pub(super) enum Briefly {}

impl Wait for UntilFree {
    type Busy = Infallible;

    #[inline]
    fn lock<'l, H: Host>(lock: &'l WordLock, host: &'l H) -> Result<WordGuard<'l, H>, Infallible> {
        Ok(lock.lock(host))
    }

    #[inline]
    fn lock_while<'l, H: Host>(
        lock: &'l WordLock,
        host: &'l H,
        is_wanted: impl Fn() -> bool,
    ) -> Result<Option<WordGuard<'l, H>>, Infallible> {
        Ok(lock.lock_while(host, is_wanted))
    }
}

impl Wait for Briefly {
    type Busy = Busy;

    #[inline]
    fn lock<'l, H: Host>(lock: &'l WordLock, host: &'l H) -> Result<WordGuard<'l, H>, Busy> {
        lock.try_lock(host).or_else(|| lock.spin(host)).ok_or(Busy)
    }

    #[inline]
    fn lock_while<'l, H: Host>(
        lock: &'l WordLock,
        host: &'l H,
        is_wanted: impl Fn() -> bool,
    ) -> Result<Option<WordGuard<'l, H>>, Busy> {
        if !is_wanted() {
            return Ok(None);
        }
        let guard = Self::lock(lock, host)?;
        Ok(is_wanted().then_some(guard))
    }
}

/// A lock that this thread holds, which is not preempted meanwhile if the host can see to that.
#[must_use]
pub(super) struct WordGuard<'l, H: Host> {
    lock: &'l WordLock,
    host: &'l H,
}

impl WordLock {
    #[cfg(loom)]
    pub(super) fn new() -> WordLock {
        WordLock(AtomicU32::new(FREE))
    }

    /// Takes the lock, and waits until it is free.
    #[inline]
    pub(super) fn lock<'l, H: Host>(&'l self, host: &'l H) -> WordGuard<'l, H> {
        match self.try_lock(host) {
            Some(guard) => guard,
            None => self.wait(host),
        }
    }

    /// Takes the lock, if it is free. Its last access of memory is an atomic read-modify-write,
    /// unless the answer is `None`.
    #[inline]
    pub(super) fn try_lock<'l, H: Host>(&'l self, host: &'l H) -> Option<WordGuard<'l, H>> {
        host.preempt_disable();
        // Acquire: reads what earlier holders stored.
        if self.0.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_err() {
            host.preempt_enable();
            return None;
        }
        // A store-load pair with `is_free`.
        fence_after_rmw();
        Some(WordGuard { lock: self, host })
    }

    /// As [`lock`](Self::lock), but only while `is_wanted`. `None` if that ends before the lock is
    /// taken.
    #[inline]
    pub(super) fn lock_while<'l, H: Host>(
        &'l self,
        host: &'l H,
        is_wanted: impl Fn() -> bool,
    ) -> Option<WordGuard<'l, H>> {
        let mut nr_turns = 0_u32;
        while is_wanted() {
            if let Some(guard) = self.try_if_free(host) {
                // Once more: from here on, what ends it needs the lock.
                return is_wanted().then_some(guard);
            }
            relax(host, &mut nr_turns);
        }
        None
    }

    #[cold]
    fn spin<'l, H: Host>(&'l self, host: &'l H) -> Option<WordGuard<'l, H>> {
        (0..SPINS_BRIEFLY).find_map(|_| {
            spin_loop();
            self.try_if_free(host)
        })
    }

    #[cold]
    fn wait<'l, H: Host>(&'l self, host: &'l H) -> WordGuard<'l, H> {
        let mut nr_turns = 0_u32;
        loop {
            relax(host, &mut nr_turns);
            if let Some(guard) = self.try_if_free(host) {
                return guard;
            }
        }
    }

    /// As [`try_lock`](Self::try_lock), with a look first, which leaves the line where it is.
    #[inline]
    fn try_if_free<'l, H: Host>(&'l self, host: &'l H) -> Option<WordGuard<'l, H>> {
        if self.0.load(Ordering::Relaxed) == FREE { self.try_lock(host) } else { None }
    }

    /// Whether no thread holds the lock. If the caller asks after a full fence and the lock is
    /// free, it reads what all earlier holders stored; and each later holder reads what the caller
    /// stored before the fence.
    #[inline]
    pub(super) fn is_free(&self) -> bool {
        self.0.load(Ordering::Acquire) == FREE
    }
}

impl<H: Host> Drop for WordGuard<'_, H> {
    #[inline]
    fn drop(&mut self) {
        // Release: the next holder reads what this one stored.
        self.lock.0.store(FREE, Ordering::Release);
        self.host.preempt_enable();
    }
}

/// A turn of a waiter's loop.
#[inline]
fn relax<H: Host>(host: &H, nr_turns: &mut u32) {
    *nr_turns = nr_turns.wrapping_add(1);
    if *nr_turns % SPINS_BEFORE_YIELD == 0 {
        host.yield_now();
    } else {
        spin_loop();
    }
}
