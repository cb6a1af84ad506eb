//! Atomics that cost the virtual time of a modelled machine.
//!
//! # Guarantees
//! The machine is asked before each operation on an atomic. What it does until it returns happens
//! before the operation.
//!
//! # Use
//! A thread that runs a model calls [`attach`]. From then on its accesses are the machine's, until
//! the value that it got is dropped. Other threads, and this one before and afterwards, access the
//! core atomics and nothing else.
//!
//! # Implementation
//! The machine is a variable of the thread. It runs its CPUs as coroutines on that thread. So when
//! it returns from [`Machine::access`], other CPUs may have run.
//!
//! The lock of a VM is the machine's, too ([`Lock`]): what is measured against is the lock of a
//! kernel, and a thread that spins in virtual time would cost a step for each turn.

extern crate std;

use core::cell::Cell;
use core::fmt;
use core::marker::PhantomData;
use core::panic::Location;
use std::thread_local;

use crossbeam_utils::CachePadded;

pub use super::stepped::Step;
use super::{AtomicU32, Locking, Park, Side};

/// A machine on which the engine runs.
pub trait Machine {
    /// The running CPU is about to access the atomic at `address`, at this place of the source.
    fn access(&self, address: usize, step: Step, place: &'static Location<'static>);

    /// It will access that word soon.
    fn prefetch(&self, address: usize);

    /// An address on the stack of the running thread, the same in each run.
    fn stack_address(&self) -> usize;

    /// Its earlier stores are to be visible before its later loads.
    fn fence(&self);

    /// It has looked for another CPU's store in vain, and is about to look again.
    fn pause(&self);

    /// It takes the lock at `address`. Returns `false` if that is held and the CPU does not wait.
    fn acquire(&self, address: usize, side: Side, wait: LockWait) -> bool;

    /// It releases that lock.
    fn release(&self, address: usize, side: Side);

    /// Whether other CPUs wait for that lock.
    fn is_contended(&self, address: usize) -> bool;
}

/// Whether a CPU waits for a lock that is held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LockWait {
    /// It goes on without.
    Never,
    /// It waits.
    Allowed,
}

thread_local! {
    static MACHINE: Cell<Option<&'static dyn Machine>> = const { Cell::new(None) };
}

/// Detaches the machine when it is dropped, on the same thread.
#[derive(Debug)]
pub struct Attached(PhantomData<*const ()>);

/// Passes all accesses of this thread to `machine`.
pub fn attach(machine: &'static dyn Machine) -> Attached {
    MACHINE.set(Some(machine));
    Attached(PhantomData)
}

impl Drop for Attached {
    fn drop(&mut self) {
        MACHINE.set(None);
    }
}

#[inline]
#[track_caller]
pub(super) fn access(address: usize, step: Step) {
    if let Some(machine) = MACHINE.get() {
        machine.access(address, step, Location::caller());
    }
}

pub(super) fn prefetch(address: usize) {
    if let Some(machine) = MACHINE.get() {
        machine.prefetch(address);
    }
}

pub(super) fn stack_address() -> Option<usize> {
    MACHINE.get().map(Machine::stack_address)
}

pub(super) fn fence() {
    if let Some(machine) = MACHINE.get() {
        machine.fence();
    }
}

pub(super) fn pause() {
    if let Some(machine) = MACHINE.get() {
        machine.pause();
    }
}

/// The optional lock of a VM, as the machine has locks.
#[derive(Debug)]
pub struct Lock {
    locking: Locking,
    /// Its address is the lock's, and no other thing is on its cache line.
    word: CachePadded<AtomicU32>,
}

/// Holds the lock until it is dropped.
#[must_use]
pub struct LockGuard<'a, P: Park> {
    lock: &'a Lock,
    side: Side,
    _park: P,
}

impl Lock {
    /// A free lock.
    pub fn new(locking: Locking) -> Lock {
        Lock { locking, word: CachePadded::new(AtomicU32::new(0)) }
    }

    /// Its kind.
    #[inline]
    pub fn locking(&self) -> Locking {
        self.locking
    }

    /// Takes the lock if that needs no wait.
    pub fn try_acquire<P: Park>(&self, park: P, side: Side) -> Option<LockGuard<'_, P>> {
        self.take(park, side, LockWait::Never)
    }

    /// Takes the lock, and waits for it if need be.
    pub fn acquire<P: Park>(&self, park: P, side: Side) -> LockGuard<'_, P> {
        let side = self.side(side);
        self.call(|machine, address| machine.acquire(address, side, LockWait::Allowed));
        LockGuard { lock: self, side, _park: park }
    }

    /// Whether other threads wait for the lock.
    pub fn is_contended(&self) -> bool {
        self.call(|machine, address| machine.is_contended(address)).unwrap_or(false)
    }

    fn take<P: Park>(&self, park: P, side: Side, wait: LockWait) -> Option<LockGuard<'_, P>> {
        let side = self.side(side);
        let is_taken = self.call(|machine, address| machine.acquire(address, side, wait)).unwrap_or(true);
        is_taken.then(|| LockGuard { lock: self, side, _park: park })
    }

    fn side(&self, side: Side) -> Side {
        if self.locking == Locking::Exclusive { Side::Write } else { side }
    }

    /// Calls the machine, if there are a lock and a machine.
    fn call<R>(&self, call: impl FnOnce(&dyn Machine, usize) -> R) -> Option<R> {
        let machine = MACHINE.get().filter(|_| self.locking != Locking::None)?;
        Some(call(machine, core::ptr::from_ref(&*self.word).addr()))
    }
}

impl<P: Park> fmt::Debug for LockGuard<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockGuard").field("lock", self.lock).field("side", &self.side).finish()
    }
}

impl<P: Park> Drop for LockGuard<'_, P> {
    fn drop(&mut self) {
        self.lock.call(|machine, address| machine.release(address, self.side));
    }
}
