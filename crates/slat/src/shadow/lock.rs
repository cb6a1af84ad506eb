//! The locks of shadow paging: one word each, never held across an allocation, a resolve or a flush.
//!
//! There are very many, one for each guest frame that is in use and one for each shadow page, so that vCPUs meet only where
//! they work on the same page. Here, and nowhere else in the engine, a vCPU can wait for another that was preempted: it gives
//! its CPU away then. (What a frame has is a list, and lists that several threads link and unlink want a lock.)
//!
//! Most are held for a few dozen instructions. Longer is the lock of a page held in three cases: while up to 32 of its entries are
//! compared with the guest's; while all of its entries are taken away; and that of an upper page, while a page is linked below it,
//! until all that is unsync below has been compared. And the lock of a frame while all leaves that map it lose a right.
//!
//! An emulated write spans a flush, and holds no lock meanwhile. A fault that would make an entry of the table then makes none
//! and resumes the guest: it does not wait for the flush.

use crate::host::Host;
use crate::sync::{AtomicU32, Ordering, fence_after_rmw, spin_loop};

/// Zero: the records that have locks are made of zeroes.
const FREE: u32 = 0;
const HELD: u32 = 1;

/// Turns of a waiter's loop after which it gives its CPU away.
const PATIENCE: u32 = 128;

#[derive(Debug)]
pub(super) struct WordLock(AtomicU32);

#[must_use]
pub(super) struct WordGuard<'l>(&'l WordLock);

impl WordLock {
    #[cfg(loom)]
    pub(super) fn new() -> WordLock {
        WordLock(AtomicU32::new(FREE))
    }

    /// Waits until the lock is free and takes it.
    #[inline]
    pub(super) fn lock<H: Host>(&self, host: &H) -> WordGuard<'_> {
        // Acquire: sees what the last holder did.
        if self.0.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.wait(host);
        }
        // A store-load pair with `is_free`.
        fence_after_rmw();
        WordGuard(self)
    }

    /// As [`lock`](Self::lock), as long as `is_wanted`: `None` if it is not any more when the lock is taken, or before.
    #[inline]
    pub(super) fn lock_while<H: Host>(&self, host: &H, is_wanted: impl Fn() -> bool) -> Option<WordGuard<'_>> {
        let mut nr_turns = 0_u32;
        while is_wanted() {
            if self.0.load(Ordering::Relaxed) == FREE
                && self.0.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                fence_after_rmw();
                let guard = WordGuard(self);
                // Once more: what makes it unwanted needs the lock from here on.
                return is_wanted().then_some(guard);
            }
            nr_turns = nr_turns.wrapping_add(1);
            if nr_turns % PATIENCE == 0 {
                host.yield_now();
            } else {
                spin_loop();
            }
        }
        None
    }

    #[cold]
    fn wait<H: Host>(&self, host: &H) {
        let mut nr_turns = 0_u32;
        loop {
            nr_turns = nr_turns.wrapping_add(1);
            if nr_turns % PATIENCE == 0 {
                host.yield_now();
            } else {
                spin_loop();
            }
            if self.0.load(Ordering::Relaxed) == FREE
                && self.0.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                return;
            }
        }
    }

    /// Whether nobody holds the lock. Who asks after a full fence knows that whoever takes it from then on sees what came
    /// before the fence, and sees what all earlier holders did.
    #[inline]
    pub(super) fn is_free(&self) -> bool {
        self.0.load(Ordering::Acquire) == FREE
    }
}

impl Drop for WordGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.0.store(FREE, Ordering::Release);
    }
}
