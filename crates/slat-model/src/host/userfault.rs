//! Demand paging in user space as Linux does it: userfaultfd with its wait queues, the threads that
//! read it, and the writes of a process to its own memory.
//!
//! # Guarantees
//! A thread that faults on a page of a descriptor sleeps until a reader has resolved the page and
//! has woken it. A message is read once.
//!
//! # Use
//! [`ModelHost::use_userfault`] comes first. A reader calls [`ModelHost::read_message`] and
//! [`ModelHost::resolve_userfault`] until the first returns `None`. A vCPU thread that has exited
//! for a page calls [`ModelHost::resolve_userfault`] or [`ModelHost::write_page`].
//!
//! # Implementation
//! The model has the words of Linux 6.13 that threads of one process share here, each on the cache
//! line that it is on there (fs/userfaultfd.c, mm/userfaultfd.c, fs/eventpoll.c, mm/memory.c,
//! kernel/sched/core.c):
//! - `mmap_lock`, of each slow page lookup of KVM: a try that may not sleep, the one that sleeps in
//!   the userfault, and its retry. A reader that has got it also writes its owner, which is on the
//!   next line (include/linux/mm_types.h says so).
//! - The lock of a mapping (VMA), of the ioctls of a descriptor and of page faults from user space.
//!   Each descriptor has a mapping of its own.
//! - `mm_users`, which each ioctl of a descriptor takes by a load and an exchange, and releases.
//! - `mm_count`, which a CPU takes that becomes idle after a thread of the process.
//! - The count of the references to the file of a descriptor, which each system call on it holds.
//! - Of a descriptor the lock against changes of the mappings. Its ioctls take it as readers. It is
//!   on the line of the descriptor's count of references, and its owner is on the next line.
//! - Of a descriptor the locks of its three wait queues, which are on one line. A fault waits in a
//!   queue, *pending* or read, by an entry on the stack of its thread. To wake one, a thread looks
//!   at each entry of both, inside the lock.
//! - Of each reader the lock of its epoll instance. A fault goes through the readers in one order,
//!   inside the lock of the queue of readers, until it has woken one.
//!
//! A loop around an exchange that compares costs one exchange: those of `mm_users` and of the lock
//! of a mapping. Its retries are not modelled.
//!
//! # Why it is correct
//! A fault checks the page before it joins the queue, and not once more afterwards, as Linux does.
//! Only one thread faults on a page, and only a reader of its message resolves the page. So the
//! page is not resolved between the check and the entry in the queue.

mod descriptor;

use std::panic::Location;

use slat_costed::baselines::{AtomicU64, Side};
use slat_costed::costed::Step;

use super::{ModelHost, lock};
use crate::machine;
use crate::parameters::{Parameters, Ps};
use descriptor::{Descriptor, Queue, Waiter};

/// Which pages have which descriptor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UserfaultShape {
    /// Pages of each part of the memory, which one thread alone touches.
    pub(crate) part_pages: u64,
    /// How many parts there are.
    pub(crate) nr_parts: usize,
    /// Descriptors: none, one of the whole memory, or one for each part.
    pub(crate) nr_descriptors: usize,
    /// Readers of each descriptor.
    pub(crate) nr_readers: usize,
}

/// Whether a page that was resolved wakes the fault that waits for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Wakeup {
    /// The caller has read the message of the fault.
    Faults,
    /// No fault waits (`UFFDIO_COPY_MODE_DONTWAKE`).
    Nothing,
}

/// A fault that a reader has read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Message {
    pub(crate) page: u64,
}

/// What the operating system has for userfaults of one process.
pub(super) struct Userfault {
    shape: UserfaultShape,
    cost: Cost,
    mmap_owner: Word,
    mm_users: Word,
    mm_count: Word,
    /// The locks of the mappings, which are only read here.
    mappings: Vec<Word>,
    descriptors: Vec<Descriptor>,
    /// The entry in a wait queue of the thread of each part.
    entries: Vec<Word>,
}

/// In picoseconds.
struct Cost {
    syscall: Ps,
    epoll_wait: Ps,
    read_message: Ps,
    epoll_callback: Ps,
    wait_entry: Ps,
    wake_call: Ps,
}

/// A word that threads share, on a line of its own.
#[derive(Default)]
struct Word(Box<AtomicU64>);

impl Word {
    #[track_caller]
    fn access(&self, step: Step) {
        machine::access(std::ptr::from_ref(&*self.0).addr(), step, Location::caller());
    }
}

impl Userfault {
    fn part_of(&self, page: u64) -> usize {
        (page / self.shape.part_pages) as usize
    }

    fn descriptor_of(&self, page: u64) -> Option<&Descriptor> {
        self.descriptors.get(if self.descriptors.len() == 1 { 0 } else { self.part_of(page) })
    }

    fn mapping_of(&self, page: u64) -> &Word {
        &self.mappings[if self.mappings.len() == 1 { 0 } else { self.part_of(page) }]
    }

    fn entry_of(&self, waiter: Waiter) -> &Word {
        &self.entries[self.part_of(waiter.page)]
    }

    /// The running thread sleeps until another one wakes it.
    fn sleep(&self) {
        // An idle CPU keeps the page tables of the thread that ran last, and holds a reference.
        let becomes_idle = machine::is_alone_on_cpu();
        if becomes_idle {
            self.mm_count.access(Step::Rmw);
        }
        machine::block();
        if becomes_idle {
            self.mm_count.access(Step::Rmw);
        }
    }
}

impl ModelHost {
    /// From now on user space resolves the pages that have a descriptor and that the process has
    /// not mapped.
    pub(crate) fn use_userfault(&self, shape: UserfaultShape, parameters: &Parameters) {
        let words = |nr_words: usize| (0..nr_words).map(|_| Word::default()).collect();
        let of = &parameters.userfault;
        let userfault = Userfault {
            shape,
            cost: Cost {
                syscall: of.syscall.ps(),
                epoll_wait: of.epoll_wait.ps(),
                read_message: of.read_message.ps(),
                epoll_callback: of.epoll_callback.ps(),
                wait_entry: of.wait_entry.ps(),
                wake_call: of.wake_call.ps(),
            },
            mmap_owner: Word::default(),
            mm_users: Word::default(),
            mm_count: Word::default(),
            mappings: words(shape.nr_descriptors.max(1)),
            descriptors: (0..shape.nr_descriptors).map(|_| Descriptor::new(shape.nr_readers)).collect(),
            entries: words(shape.nr_parts),
        };
        let is_first = self.userfault.set(userfault).is_ok();
        debug_assert!(is_first, "userfault is set up once");
    }

    fn userfault(&self) -> &Userfault {
        self.userfault.get().expect("`use_userfault` comes first")
    }

    /// Takes the lock of all mappings, as a reader.
    pub(super) fn lock_mmap(&self) {
        self.mmap_lock.acquire(Side::Read);
        if let Some(userfault) = self.userfault.get() {
            userfault.mmap_owner.access(Step::Load);
            userfault.mmap_owner.access(Step::Store);
        }
    }

    /// A thread of the kernel looks up a page that the process has not mapped. Returns `false` if
    /// no descriptor has the page. Else it sleeps until the page is mapped, and finds it.
    pub(super) fn wait_for_userfault(&self, page: u64) -> bool {
        let Some(userfault) = self.userfault.get() else { return false };
        let Some(descriptor) = userfault.descriptor_of(page) else { return false };
        // A page fault that ends at the userfault maps nothing.
        let is_found = || {
            self.lock_mmap();
            let is_found = self.is_mapped(page);
            machine::work(if is_found { self.cost.page_lookup } else { self.cost.page_fault / 2 });
            is_found
        };
        // KVM asks without sleep first, to see whether a guest could do something else meanwhile.
        let mut may_sleep = false;
        while !is_found() {
            if may_sleep {
                descriptor.context.access(Step::Rmw);
                descriptor.faults_lock.acquire(Side::Write);
                let waiter = Waiter { page, task: machine::current_task() };
                userfault.add(Queue::Pending, descriptor, waiter);
                descriptor.faults_lock.release(Side::Write);
                self.mmap_lock.release(Side::Read);
                userfault.wake_reader(descriptor);
                userfault.sleep();
                descriptor.context.access(Step::Rmw);
            } else {
                self.mmap_lock.release(Side::Read);
                may_sleep = true;
            }
        }
        self.mmap_lock.release(Side::Read);
        true
    }

    /// The next fault for reader number `reader` of a descriptor: it waits for one. `None` when no
    /// more come.
    pub(crate) fn read_message(&self, descriptor: usize, reader: usize) -> Option<Message> {
        let userfault = self.userfault();
        let descriptor = &userfault.descriptors[descriptor];
        while userfault.wait_for_event(descriptor, reader) {
            if let Some(message) = userfault.read(descriptor) {
                return Some(message);
            }
        }
        None
    }

    /// No more faults come: [`ModelHost::read_message`] returns `None` to all readers.
    pub(crate) fn close_descriptors(&self) {
        for descriptor in &self.userfault().descriptors {
            let sleepers: Vec<_> = {
                let mut queues = lock(&descriptor.queues);
                queues.is_closed = true;
                queues.readers.iter_mut().filter_map(|reader| reader.sleeper.take()).collect()
            };
            sleepers.into_iter().for_each(machine::wake);
        }
    }

    /// `UFFDIO_COPY` or, if the page has a frame, `UFFDIO_CONTINUE`. Returns `false` if the page is
    /// mapped already.
    pub(crate) fn resolve_userfault(&self, page: u64, wakeup: Wakeup) -> bool {
        let userfault = self.userfault();
        let Some(descriptor) = userfault.descriptor_of(page) else { return false };
        // The published test calls gettid before the ioctl.
        machine::work(2 * userfault.cost.syscall);
        descriptor.file.access(Step::Rmw);
        userfault.mm_users.access(Step::Load);
        userfault.mm_users.access(Step::Rmw);
        let is_new = self.map_under_mapping(userfault, page, Some(descriptor));
        userfault.mm_users.access(Step::Rmw);
        if wakeup == Wakeup::Faults {
            userfault.wake_fault(descriptor, page);
        }
        descriptor.file.access(Step::Rmw);
        is_new
    }

    /// A thread of the process writes all of a page. Returns `false` if it was mapped already.
    pub(crate) fn write_page(&self, page: u64) -> bool {
        let userfault = self.userfault();
        let is_new = !self.is_mapped(page);
        if is_new {
            machine::work(userfault.cost.syscall);
            self.map_under_mapping(userfault, page, None);
        }
        self.write_frame(self.node_of_page(page).unwrap_or(0));
        is_new
    }

    /// A page of the process is mapped inside the lock of its mapping, and with a descriptor inside
    /// the one that is against changes of the mappings.
    fn map_under_mapping(&self, userfault: &Userfault, page: u64, descriptor: Option<&Descriptor>) -> bool {
        let mapping = userfault.mapping_of(page);
        mapping.access(Step::Rmw);
        if let Some(descriptor) = descriptor {
            descriptor.context.access(Step::Rmw);
            descriptor.owner.access(Step::Load);
            descriptor.owner.access(Step::Store);
        }
        let is_new = !self.is_mapped(page);
        self.map_in_process(page);
        if let Some(descriptor) = descriptor {
            descriptor.context.access(Step::Rmw);
        }
        mapping.access(Step::Rmw);
        is_new
    }
}
