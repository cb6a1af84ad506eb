//! Locks of a kernel, in virtual time: a spinlock and a reader/writer lock, both queued.
//!
//! # Guarantees
//! Tasks get a lock in the order in which they have asked for it; readers between two writers
//! together. A task that holds one is not preempted, as in a kernel, unless locks sleep
//! ([`LockKind`]).
//!
//! # Implementation
//! To take a lock is an exchange on its word, and to release it a store, or for a reader another
//! exchange. A task that has to wait spins on a line of its own; the lock is handed to it for the
//! time of a transfer.

use std::collections::VecDeque;
use std::panic::Location;

use slat_costed::baselines::{AtomicU32, Side};
use slat_costed::costed::{LockWait, Step};

use super::state::{State, Waits};
use super::{access, suspend, with};
use crate::arena;
use crate::parameters::Ps;

/// How tasks wait for a lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LockKind {
    /// They spin, and a task that holds one is not preempted: the spinlocks of a kernel.
    Spinning,
    /// They sleep, and a holder may be preempted: a mutex of user space, or a spinlock of a kernel
    /// with real-time preemption.
    Sleeping,
}

#[derive(Default)]
pub(super) struct LockState {
    is_written: bool,
    nr_readers: u32,
    queue: VecDeque<(usize, Side)>,
    /// The task that has just found it held, by an exchange that need not be made again.
    has_tried: Option<usize>,
}

impl LockState {
    fn take(&mut self, side: Side) -> bool {
        let is_free = !self.is_written && self.queue.is_empty();
        match side {
            Side::Read if is_free => self.nr_readers += 1,
            Side::Write if is_free && self.nr_readers == 0 => self.is_written = true,
            _ => return false,
        }
        true
    }

    /// Takes those from the queue that have the lock now.
    fn hand_over(&mut self) -> Vec<usize> {
        let mut got = Vec::new();
        while let Some(&(task, side)) = self.queue.front() {
            match side {
                Side::Read if !self.is_written => self.nr_readers += 1,
                Side::Write if !self.is_written && self.nr_readers == 0 => self.is_written = true,
                _ => break,
            }
            got.push(task);
            self.queue.pop_front();
        }
        got
    }
}

#[track_caller]
pub(super) fn acquire(address: usize, side: Side, wait: LockWait, kind: LockKind) -> bool {
    let has_tried = with(|state| {
        let task = state.current_task();
        let lock = state.locks.entry(address).or_default();
        lock.has_tried.take_if(|tried| *tried == task).is_some()
    });
    if !has_tried {
        access(address, Step::Rmw, Location::caller());
    }
    let is_taken = with(|state| {
        let task = state.current_task();
        let lock = state.locks.entry(address).or_default();
        let is_taken = lock.take(side);
        match wait {
            _ if is_taken => state.count_lock(task, kind),
            LockWait::Never => lock.has_tried = Some(task),
            LockWait::Allowed => lock.queue.push_back((task, side)),
        }
        is_taken
    });
    if !is_taken {
        if wait == LockWait::Never {
            return false;
        }
        suspend(match kind {
            LockKind::Spinning => Waits::Spinning,
            LockKind::Sleeping => Waits::ForAnEnd,
        });
    }
    with(State::work_in_lock);
    true
}

#[track_caller]
pub(super) fn release(address: usize, side: Side, kind: LockKind) {
    let step = match side {
        Side::Read => Step::Rmw,
        Side::Write => Step::Store,
    };
    access(address, step, Location::caller());
    with(|state| {
        state.uncount_lock(kind);
        let Some(lock) = state.locks.get_mut(&address) else { return };
        match side {
            Side::Read => lock.nr_readers -= 1,
            Side::Write => lock.is_written = false,
        }
        for task in lock.hand_over() {
            state.count_lock(task, kind);
            let (core, now) = (state.core_of_task(task), state.now());
            let line = arena::line_of(address);
            let at = line.map_or(now, |line| state.lines.request(core, now, line, Step::Rmw).at);
            state.hand_lock_to(task, at);
        }
    });
}

pub(super) fn is_contended(address: usize) -> bool {
    with(|state| state.locks.get(&address).is_some_and(|lock| !lock.queue.is_empty()))
}

/// A spinlock of the host, on a line of its own.
#[derive(Debug, Default)]
pub(crate) struct LockWord(Box<AtomicU32>);

impl LockWord {
    pub(crate) fn address(&self) -> usize {
        std::ptr::from_ref(&*self.0).addr()
    }

    #[track_caller]
    pub(crate) fn acquire(&self, side: Side) {
        acquire(self.address(), side, LockWait::Allowed, LockKind::Spinning);
    }

    #[track_caller]
    pub(crate) fn release(&self, side: Side) {
        release(self.address(), side, LockKind::Spinning);
    }

    /// Does `held` of work inside the lock, on one side of it.
    #[track_caller]
    pub(crate) fn hold(&self, side: Side, held: Ps) {
        self.acquire(side);
        super::work(held);
        self.release(side);
    }
}
