//! Runs faults on several threads at once and takes the time.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::cpus::{cpu_time, cpus, pin};

/// Pages between the first pages of two threads in [`Order::Partitioned`]: 1 GiB.
pub(crate) const PARTITION_PAGES: u64 = 1 << 18;
/// Turns of the barrier before it yields the CPU.
const SPIN_TURNS: u32 = 2000;

/// The pages that the threads write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Order {
    /// Each thread its own.
    Partitioned,
    /// All the same, upwards.
    Same,
    /// All the same; every other thread downwards.
    Opposite,
}

/// How many threads fault on how many pages each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Shape {
    pub(crate) nr_threads: u64,
    pub(crate) order: Order,
    /// Pages that each thread touches, at most [`PARTITION_PAGES`].
    pub(crate) pages: u64,
}

impl Shape {
    /// Pages of the memory that the threads use a part of.
    pub(crate) fn memory_pages(self) -> u64 {
        match self.order {
            Order::Partitioned => self.nr_threads * PARTITION_PAGES,
            Order::Same | Order::Opposite => PARTITION_PAGES,
        }
    }

    /// Number of calls.
    pub(crate) fn nr_faults(self) -> u64 {
        self.nr_threads * self.pages
    }

    /// Number of different pages.
    pub(crate) fn nr_pages(self) -> u64 {
        match self.order {
            Order::Partitioned => self.nr_faults(),
            Order::Same | Order::Opposite => self.pages,
        }
    }

    /// Number `index` of the different pages.
    pub(crate) fn page(self, index: u64) -> u64 {
        index / self.pages * PARTITION_PAGES + index % self.pages
    }

    /// First page of a thread, and what to add for the next.
    fn walk(self, thread: u64) -> (u64, u64) {
        match self.order {
            Order::Partitioned => (thread * PARTITION_PAGES, 1),
            Order::Opposite if thread % 2 == 1 => (self.pages - 1, u64::MAX),
            Order::Same | Order::Opposite => (0, 1),
        }
    }
}

/// The times of a run.
#[derive(Clone, Copy)]
pub(crate) struct Times {
    /// From the first thread's first fault to the last thread's last.
    pub(crate) wall: Duration,
    /// CPU time of the thread that used most. Unlike `wall` it does not grow when other processes
    /// use the machine, but it excludes sleeping for a lock.
    pub(crate) cpu: Duration,
}

/// Serves faults.
pub(crate) trait Subject: Sync {
    /// Writes to a page as one CPU. Made by the thread that uses it, before the time is taken.
    fn cpu(&self) -> impl FnMut(u64);
}

/// Waits until all `nr_threads` threads are here.
fn wait_for_all(arrived: &AtomicUsize, nr_threads: usize) {
    arrived.fetch_add(1, Ordering::AcqRel);
    let mut turns = 0;
    while arrived.load(Ordering::Acquire) < nr_threads {
        turns += 1;
        if turns < SPIN_TURNS { std::hint::spin_loop() } else { thread::yield_now() }
    }
}

/// The measured loop.
fn touch(mut fault: impl FnMut(u64), first: u64, step: u64, pages: u64) {
    let mut page = first;
    for _ in 0..pages {
        fault(page);
        page = page.wrapping_add(step);
    }
}

/// Runs all faults of `shape`.
pub(crate) fn run(subject: &impl Subject, shape: Shape) -> Times {
    let cpus = cpus();
    let nr_threads = shape.nr_threads as usize;
    let arrived = AtomicUsize::new(0);
    let times: Vec<(Instant, Instant, Duration)> = thread::scope(|scope| {
        let spawn = |thread: usize| {
            let (cpus, arrived) = (&cpus, &arrived);
            scope.spawn(move || {
                if nr_threads <= cpus.len() {
                    pin(cpus[thread]);
                }
                let (first, step) = shape.walk(thread as u64);
                let fault = subject.cpu();
                wait_for_all(arrived, nr_threads);
                let (begin, begin_cpu) = (Instant::now(), cpu_time());
                touch(fault, first, step, shape.pages);
                let cpu = cpu_time() - begin_cpu;
                (begin, Instant::now(), cpu)
            })
        };
        let threads: Vec<_> = (0..nr_threads).map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let begin = times.iter().map(|&(begin, ..)| begin).min().unwrap();
    let end = times.iter().map(|&(_, end, _)| end).max().unwrap();
    Times { wall: end - begin, cpu: times.iter().map(|&(.., cpu)| cpu).max().unwrap() }
}
