//! What locks of a VM there are to compare with, and how their threads sleep. `lock` has the locks;
//! on a modelled machine, `costed` has those of the machine.

use super::AtomicU32;

/// How threads sleep and wake when they wait for a lock: the surroundings implement it.
/// [`Host::parking`](crate::Host::parking) returns it for the lock of a VM.
pub trait Park {
    /// Called in each turn of a short spin.
    #[inline]
    fn relax(&self) {
        super::spin_loop();
    }

    /// Sleeps while `*word == expected`, until [`unpark_one`](Park::unpark_one) or
    /// [`unpark_all`](Park::unpark_all) is called for `word`. May return for no reason. The
    /// comparison and the begin of the sleep are one atomic step with respect to the unparks (as
    /// with a futex).
    fn park(&self, word: &AtomicU32, expected: u32);

    /// Wakes one of the threads that sleep on `word`, if there is one; returns whether it did.
    /// `word` is only an address: it may already be gone.
    fn unpark_one(&self, word: *const AtomicU32) -> bool;

    /// Wakes all threads that sleep on `word`, which is only an address.
    fn unpark_all(&self, word: *const AtomicU32);
}

impl<P: Park + ?Sized> Park for &P {
    #[inline]
    fn relax(&self) {
        (**self).relax();
    }

    fn park(&self, word: &AtomicU32, expected: u32) {
        (**self).park(word, expected);
    }

    fn unpark_one(&self, word: *const AtomicU32) -> bool {
        (**self).unpark_one(word)
    }

    fn unpark_all(&self, word: *const AtomicU32) {
        (**self).unpark_all(word);
    }
}

/// The lock that a VM holds while it changes its page tables.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Locking {
    /// None at all.
    #[default]
    None,
    /// A reader/writer lock: faults are readers, zap and harvest are writers (KVM's parallel
    /// faults, as published).
    Shared,
    /// A mutex: the baseline of that series.
    Exclusive,
}
