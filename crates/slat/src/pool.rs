//! A list of things that one thread at a time uses: participants and dirty rings.
//!
//! # Guarantees
//! - A thing is freed with its pool.
//! - A thing is made only when a claim has found each of the others in use.
//! - No thread waits for another.
//!
//! # Use
//! [`Pool::claim`] finds a thing that no thread uses. If there is none, make one and
//! [`add`](Pool::add) it. Its user ends the use by [`PoolLink::release`].
//!
//! # Implementation
//! A thing is pushed to the front of the list once, and stays. Its user has its flag set. A claim
//! is one atomic exchange of that flag, and a release is a store.
//!
//! Most things of a pool may be in use for long: each vCPU has a participant for its life. So that
//! a claim does not pass them by, the pool keeps hints: what a thread claimed last is tried first.
//! There are many of them, and the address of a thread's stack selects one. A hint that is wrong
//! costs a search of the list, and decides nothing.

#![expect(unsafe_code, reason = "things are linked by raw pointers, and freed with the pool")]

use alloc::boxed::Box;
use core::ptr;

use crossbeam_utils::CachePadded;

use crate::boxed::{OnceBox, Zeroed};
use crate::sync::{AtomicBool, AtomicPtr, Ordering, stack_address};

/// Number of hints. Threads that share one use the same things in turn, too, and each call then
/// fetches the lines of its thing from another CPU. With 16 hints only 6 of 16 threads had one alone;
/// with so many all 16 do, and 52 of 64.
///
/// One for the model checkers, whose schedules must not depend on addresses.
const NR_HINTS: usize = if cfg!(any(loom, shuttle)) { 1 } else { 256 };

/// For each hash of a stack, the thing that a thread with such a stack has claimed last, or null.
/// Written only when that changes.
struct Hints<T>([AtomicPtr<T>; NR_HINTS]);

// SAFETY: null pointers.
unsafe impl<T> Zeroed for Hints<T> {
    #[cfg(loom)]
    fn zeroed() -> Hints<T> {
        Hints(core::array::from_fn(|_| AtomicPtr::new(ptr::null_mut())))
    }
}

/// Things of which each has one user at a time, or none.
pub(crate) struct Pool<T: Pooled> {
    first: AtomicPtr<T>,
    /// Made with the first hint. Each is a thing of the list, or null.
    hints: OnceBox<Hints<T>>,
}

/// What a pool keeps in a thing: on a line of its own, so that a search for a free thing takes no
/// line away from a user.
pub(crate) struct PoolLink<T>(CachePadded<Link<T>>);

struct Link<T> {
    is_in_use: AtomicBool,
    /// The thing that was pushed before. It does not change once this one is pushed.
    next: AtomicPtr<T>,
}

/// A thing of a pool.
///
/// # Safety
/// [`link`](Pooled::link) returns a field of the thing, the same at each call.
///
/// Each thread reaches each thing, and any thread may free it: so a thing is `Send` and `Sync`,
/// which the pool's raw pointers would not ask for.
pub(crate) unsafe trait Pooled: Sized + Send + Sync {
    fn link(&self) -> &PoolLink<Self>;
}

impl<T> PoolLink<T> {
    pub(crate) fn new() -> PoolLink<T> {
        let (is_in_use, next) = (AtomicBool::new(false), AtomicPtr::new(ptr::null_mut()));
        PoolLink(CachePadded::new(Link { is_in_use, next }))
    }

    /// Ends the use of the thing.
    ///
    /// # Safety
    /// The caller is the user of the thing, and does not use it any more.
    #[inline]
    pub(crate) unsafe fn release(&self) {
        // Release: the next user observes what this one has done.
        self.0.is_in_use.store(false, Ordering::Release);
    }

    /// Begins the use of the thing, if it has no user.
    #[inline]
    fn try_claim(&self) -> bool {
        let is_in_use = &self.0.is_in_use;
        // Relaxed first: the line of a thing that is in use stays where it is. Acquire: observes
        // what the last user has done.
        !is_in_use.load(Ordering::Relaxed)
            && is_in_use.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }
}

// SAFETY: atomics whose first value is zero, and a null pointer.
unsafe impl<T> Zeroed for PoolLink<T> {
    #[cfg(loom)]
    fn zeroed() -> PoolLink<T> {
        PoolLink::new()
    }
}

impl<T> Hints<T> {
    /// The hint of the calling thread.
    #[inline]
    fn of_caller(&self) -> &AtomicPtr<T> {
        &self.0[nth_hint(stack_address())]
    }
}

/// Which hint is that of a thread whose stack has `address`.
#[inline]
fn nth_hint(address: usize) -> usize {
    // Stacks are 16 KiB apart at least. The multiplication spreads what is a multiple of some size
    // (Knuth, The Art of Computer Programming, vol. 3, 6.4, Fibonacci hashing).
    let stack = (address >> 14) as u64;
    (stack.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as usize % NR_HINTS
}

impl<T: Pooled> Pool<T> {
    pub(crate) fn new() -> Pool<T> {
        Pool { first: AtomicPtr::new(ptr::null_mut()), hints: OnceBox::new() }
    }

    /// All things, in use or not.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> + Clone {
        // Acquire: observes the things as they were pushed.
        let mut next = self.first.load(Ordering::Acquire).cast_const();
        core::iter::from_fn(move || {
            // SAFETY: null or a thing of the list; these are freed only with the pool.
            let thing = unsafe { next.as_ref() }?;
            // Relaxed: it was stored before the thing was pushed.
            next = thing.link().0.next.load(Ordering::Relaxed);
            Some(thing)
        })
    }

    /// Returns a thing that had no user. The caller is its user now.
    #[inline]
    pub(crate) fn claim(&self) -> Option<&T> {
        // Acquire: observes the thing as it was pushed.
        let last = self.hints.get().map_or(ptr::null_mut(), |hints| hints.of_caller().load(Ordering::Acquire));
        // SAFETY: null or a thing of the list; these are freed only with the pool.
        match unsafe { last.as_ref() } {
            Some(thing) if thing.link().try_claim() => Some(thing),
            _ => self.search(),
        }
    }

    #[cold]
    fn search(&self) -> Option<&T> {
        let found = self.iter().find(|thing| thing.link().try_claim())?;
        self.remember(found);
        Some(found)
    }

    /// Has the calling thread try `thing`, which is on the list, first. Without memory it does not.
    fn remember(&self, thing: &T) {
        if let Ok(hints) = self.hints.get_or_make() {
            // Release: a thread that reads the hint observes the thing as it was pushed.
            hints.of_caller().store(ptr::from_ref(thing).cast_mut(), Ordering::Release);
        }
    }

    /// Adds `thing`. The caller is its user.
    pub(crate) fn add(&self, thing: Box<T>) -> &T {
        thing.link().0.is_in_use.store(true, Ordering::Relaxed);
        let pushed: *mut T = Box::into_raw(thing);
        // SAFETY: from a box; from the exchange on it is freed only with the pool, which `&self`
        // keeps.
        let thing = unsafe { &*pushed };
        let mut first = self.first.load(Ordering::Relaxed);
        loop {
            thing.link().0.next.store(first, Ordering::Relaxed);
            // Release: a walk of the list observes the thing and, through the chain of exchanges,
            // those behind it.
            match self.first.compare_exchange(first, pushed, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => {
                    self.remember(thing);
                    return thing;
                }
                Err(found) => first = found,
            }
        }
    }
}

impl<T: Pooled> Drop for Pool<T> {
    fn drop(&mut self) {
        let mut next = self.first.load(Ordering::Relaxed);
        while !next.is_null() {
            // SAFETY: every thing of the list came from a box. With `&mut self` none is in use:
            // references borrow the pool, and those that do not are gone by their own contract.
            let thing = unsafe { Box::from_raw(next) };
            next = thing.link().0.next.load(Ordering::Relaxed);
        }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
#[path = "pool_tests.rs"]
mod tests;

#[cfg(all(test, loom))]
#[path = "pool_loom.rs"]
mod loom_tests;
