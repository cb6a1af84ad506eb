//! A descriptor of userfaultfd: the queues of its faults and of its readers.
//!
//! # Guarantees
//! A fault that waits is in one queue until it is woken. A fault that joins the queue wakes the
//! first reader that sleeps. A reader finds each fault that has joined the queue before it slept.
//!
//! # Implementation
//! A queue changes inside its lock, whose word costs what a lock costs. The vectors behind it are
//! plain memory of the model. The costs of the entries are accesses to lines of their own.

use std::panic::Location;
use std::sync::Mutex;

use slat_costed::baselines::Side;
use slat_costed::costed::Step;

use super::super::lock;
use super::{Message, Userfault, Word};
use crate::machine::{self, LockWord, TaskId};

/// A descriptor, with its readers.
pub(super) struct Descriptor {
    /// The references to its file.
    pub(super) file: Word,
    /// The references to it, the sequence of moves between its queues, and the lock against changes
    /// of the mappings.
    pub(super) context: Word,
    /// The owner of that lock.
    pub(super) owner: Word,
    /// Of the faults. The heads of the queues are on the same line.
    pub(super) faults_lock: LockWord,
    /// Of the readers.
    readers_lock: LockWord,
    epoll_locks: Vec<LockWord>,
    pub(super) queues: Mutex<Queues>,
}

/// Which queue a fault waits in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Queue {
    /// No reader has read it.
    Pending,
    /// A reader has.
    Read,
}

/// What waits on a descriptor.
#[derive(Default)]
pub(super) struct Queues {
    /// By [`Queue`]. The fault that came last is first.
    waiters: [Vec<Waiter>; 2],
    pub(super) readers: Vec<Reader>,
    pub(super) is_closed: bool,
}

/// A fault in a queue.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Waiter {
    pub(super) page: u64,
    pub(super) task: TaskId,
}

/// A thread that reads a descriptor.
#[derive(Clone, Copy, Default)]
pub(super) struct Reader {
    /// Its epoll instance has an event.
    is_ready: bool,
    pub(super) sleeper: Option<TaskId>,
}

impl Userfault {
    /// Adds an entry as the first one of a queue.
    pub(super) fn add(&self, queue: Queue, descriptor: &Descriptor, waiter: Waiter) {
        let next = lock(&descriptor.queues).waiters[queue as usize].first().copied();
        self.entry_of(waiter).access(Step::Store);
        if let Some(next) = next {
            self.entry_of(next).access(Step::Store);
        }
        lock(&descriptor.queues).waiters[queue as usize].insert(0, waiter);
    }

    /// Removes the entry number `index` of a queue.
    fn remove(&self, queue: Queue, descriptor: &Descriptor, index: usize) -> Waiter {
        let (waiter, neighbours) = {
            let mut queues = lock(&descriptor.queues);
            let queue = &mut queues.waiters[queue as usize];
            let waiter = queue.remove(index);
            (waiter, [index.checked_sub(1).and_then(|before| queue.get(before)).copied(), queue.get(index).copied()])
        };
        self.entry_of(waiter).access(Step::Store);
        for neighbour in neighbours.into_iter().flatten() {
            self.entry_of(neighbour).access(Step::Store);
        }
        waiter
    }

    /// A fault that has joined the queue wakes a reader that sleeps, if there is one.
    pub(super) fn wake_reader(&self, descriptor: &Descriptor) {
        descriptor.lock_readers();
        for (index, epoll_lock) in descriptor.epoll_locks.iter().enumerate() {
            epoll_lock.acquire(Side::Write);
            machine::work(self.cost.epoll_callback);
            let sleeper = {
                let reader = &mut lock(&descriptor.queues).readers[index];
                reader.is_ready = true;
                reader.sleeper.take()
            };
            if let Some(sleeper) = sleeper {
                machine::work(self.cost.wake_call);
                machine::wake(sleeper);
            }
            epoll_lock.release(Side::Write);
            if sleeper.is_some() {
                break;
            }
        }
        descriptor.readers_lock.release(Side::Write);
    }

    /// `epoll_wait`: the reader sleeps until a fault is pending. Returns `false` if no more come.
    pub(super) fn wait_for_event(&self, descriptor: &Descriptor, reader: usize) -> bool {
        machine::work(self.cost.syscall + self.cost.epoll_wait);
        let epoll_lock = &descriptor.epoll_locks[reader];
        loop {
            epoll_lock.acquire(Side::Write);
            let (is_ready, is_closed) = {
                let mut queues = lock(&descriptor.queues);
                let is_closed = queues.is_closed;
                let found = &mut queues.readers[reader];
                let is_ready = std::mem::take(&mut found.is_ready);
                found.sleeper = (!is_ready && !is_closed).then(machine::current_task);
                (is_ready, is_closed)
            };
            epoll_lock.release(Side::Write);
            match () {
                () if is_ready && self.poll(descriptor) => {
                    // The event stays until a poll finds nothing: it is triggered by the level.
                    lock(&descriptor.queues).readers[reader].is_ready = true;
                    return true;
                }
                () if is_ready => {}
                () if is_closed => return false,
                () => self.sleep(),
            }
        }
    }

    /// Whether a fault is pending. Epoll holds a reference to the file while it asks.
    fn poll(&self, descriptor: &Descriptor) -> bool {
        descriptor.file.access(Step::Rmw);
        descriptor.access_heads(Step::Load);
        let is_pending = !lock(&descriptor.queues).waiters[Queue::Pending as usize].is_empty();
        descriptor.file.access(Step::Rmw);
        is_pending
    }

    /// `read`: the oldest pending fault; `None` if another reader was faster.
    pub(super) fn read(&self, descriptor: &Descriptor) -> Option<Message> {
        machine::work(self.cost.syscall + self.cost.read_message);
        descriptor.file.access(Step::Rmw);
        descriptor.lock_readers();
        descriptor.faults_lock.acquire(Side::Write);
        let last = lock(&descriptor.queues).waiters[Queue::Pending as usize].len().checked_sub(1);
        let message = last.map(|last| {
            descriptor.context.access(Step::Store);
            let waiter = self.remove(Queue::Pending, descriptor, last);
            self.add(Queue::Read, descriptor, waiter);
            Message { page: waiter.page }
        });
        descriptor.faults_lock.release(Side::Write);
        descriptor.readers_lock.release(Side::Write);
        descriptor.file.access(Step::Rmw);
        message
    }

    /// Wakes the fault on `page`.
    pub(super) fn wake_fault(&self, descriptor: &Descriptor, page: u64) {
        descriptor.context.access(Step::Load);
        descriptor.access_heads(Step::Load);
        descriptor.faults_lock.acquire(Side::Write);
        for queue in [Queue::Pending, Queue::Read] {
            // The queue does not change while its lock is held.
            let waiters = lock(&descriptor.queues).waiters[queue as usize].clone();
            let mut nr_removed = 0;
            for (index, &waiter) in waiters.iter().enumerate() {
                self.entry_of(waiter).access(Step::Load);
                machine::work(self.cost.wait_entry);
                if waiter.page == page {
                    machine::work(self.cost.wake_call);
                    self.remove(queue, descriptor, index - nr_removed);
                    nr_removed += 1;
                    machine::wake(waiter.task);
                }
            }
        }
        descriptor.faults_lock.release(Side::Write);
    }
}

impl Descriptor {
    pub(super) fn new(nr_readers: usize) -> Descriptor {
        Descriptor {
            file: Word::default(),
            context: Word::default(),
            owner: Word::default(),
            faults_lock: LockWord::default(),
            readers_lock: LockWord::default(),
            epoll_locks: (0..nr_readers).map(|_| LockWord::default()).collect(),
            queues: Mutex::new(Queues { readers: vec![Reader::default(); nr_readers], ..Queues::default() }),
        }
    }

    /// The line of the locks and the heads of the queues.
    #[track_caller]
    fn access_heads(&self, step: Step) {
        machine::access(self.faults_lock.address(), step, Location::caller());
    }

    /// Takes the lock of the readers, whose word is on the line of the other ones.
    #[track_caller]
    fn lock_readers(&self) {
        self.access_heads(Step::Rmw);
        self.readers_lock.acquire(Side::Write);
    }
}
