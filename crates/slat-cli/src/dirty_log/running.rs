//! vCPUs that run guest code while the log is got, each on its own thread.
//!
//! A dirty log is got while a guest runs: a flush must reach the vCPUs, and a grace period must
//! wait for those that may use what was replaced. These guests only read, so that the log has
//! exactly the pages that the other guest has written.
//!
//! The threads of one subject run at a time. Those of the others are parked.
//!
//! Each thread is pinned to a CPU, and the thread that gets the log to another, while there are
//! enough: a flush interrupts only what runs, so it is shorter where a vCPU waits for its CPU.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread::{self, JoinHandle};

use slat_machine::linux::topology::{pin_current_thread, usable_cpus};

use super::subject::Guest;
use crate::failure::{Failure, check_failed, no_thread};

const PAUSE: u8 = 0;
const RUN: u8 = 1;
const END: u8 = 2;

#[derive(Default)]
struct Shared {
    /// What the thread is to do.
    wanted: AtomicU8,
    /// Whether its vCPU runs.
    is_running: AtomicBool,
    /// Whether its guest failed, and the thread ends.
    has_failed: AtomicBool,
}

struct RunningVcpu {
    shared: Arc<Shared>,
    /// `None` after its failure was reported.
    thread: Option<JoinHandle<Result<(), Failure>>>,
}

/// The threads of a subject's vCPUs.
pub(super) struct RunningVcpus {
    vcpus: Vec<RunningVcpu>,
    cpus: Vec<u32>,
}

/// Runs `action` on a thread that is pinned to the first of this thread's CPUs.
pub(super) fn on_first_cpu<T: Send>(action: impl FnOnce() -> Result<T, Failure> + Send) -> Result<T, Failure> {
    thread::scope(|scope| {
        let pinned = || {
            pin(&usable_cpus(), 0);
            action()
        };
        let thread = thread::Builder::new().spawn_scoped(scope, pinned).map_err(|error| no_thread(&error))?;
        thread.join().unwrap_or_else(|_| Err(check_failed("the thread that gets the log panicked")))
    })
}

/// Pins this thread to one of `cpus`. Where that is refused, the scheduler places it.
fn pin(cpus: &[u32], place: usize) {
    let _ = pin_current_thread(cpus[place % cpus.len()]);
}

impl RunningVcpus {
    /// Starts a thread for each of `guests`, paused.
    pub(super) fn start(guests: impl Iterator<Item = Box<dyn Guest>>) -> Result<RunningVcpus, Failure> {
        let mut all = RunningVcpus { vcpus: Vec::new(), cpus: usable_cpus() };
        for (number, guest) in guests.enumerate() {
            let shared = Arc::new(Shared::default());
            let (of_thread, cpus) = (Arc::clone(&shared), all.cpus.clone());
            let thread = thread::Builder::new().spawn(move || {
                // The first is for the thread that gets the log.
                pin(&cpus, number + 1);
                run_vcpu(guest, &of_thread)
            });
            let thread = Some(thread.map_err(|error| no_thread(&error))?);
            all.vcpus.push(RunningVcpu { shared, thread });
        }
        Ok(all)
    }

    /// Pins this thread to a CPU that no other thread of the subject has, if there is one.
    pub(super) fn pin_another(&self) {
        pin(&self.cpus, self.vcpus.len() + 1);
    }

    /// Lets all run. When this returns, each has run guest code.
    pub(super) fn run(&mut self) -> Result<(), Failure> {
        self.vcpus.iter().for_each(|vcpu| vcpu.want(RUN));
        self.vcpus.iter_mut().try_for_each(|vcpu| vcpu.wait_until(true))
    }

    /// Has all return to their VMM.
    pub(super) fn pause(&mut self) -> Result<(), Failure> {
        self.vcpus.iter().for_each(|vcpu| vcpu.want(PAUSE));
        self.vcpus.iter_mut().try_for_each(|vcpu| vcpu.wait_until(false))
    }
}

impl Drop for RunningVcpus {
    fn drop(&mut self) {
        self.vcpus.iter().for_each(|vcpu| vcpu.want(END));
        for thread in self.vcpus.iter_mut().filter_map(|vcpu| vcpu.thread.take()) {
            // A failure was reported by `wait_until`, or the command has failed otherwise.
            let _ = thread.join();
        }
    }
}

impl RunningVcpu {
    fn want(&self, wanted: u8) {
        // Release and acquire (in `run_vcpu`): what this thread did to the VM comes before.
        self.shared.wanted.store(wanted, Ordering::Release);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    /// Waits until the vCPU runs, or has stopped. Fails if its guest failed.
    fn wait_until(&mut self, is_running: bool) -> Result<(), Failure> {
        loop {
            // Acquire and release (in `run_vcpu`): what the vCPU did comes before, a failure too.
            let is_there = self.shared.is_running.load(Ordering::Acquire) == is_running;
            let has_failed = self.shared.has_failed.load(Ordering::Relaxed);
            if has_failed || self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
                let ended = self.thread.take().map_or(Ok(Ok(())), JoinHandle::join);
                return ended.unwrap_or_else(|_| Err(check_failed("the thread of a running vCPU panicked")));
            }
            if is_there {
                return Ok(());
            }
            thread::yield_now();
        }
    }
}

fn run_vcpu(mut guest: Box<dyn Guest>, shared: &Shared) -> Result<(), Failure> {
    loop {
        match shared.wanted.load(Ordering::Acquire) {
            RUN => {
                let mut result = guest.run();
                shared.is_running.store(true, Ordering::Release);
                while result.is_ok() && shared.wanted.load(Ordering::Acquire) == RUN {
                    result = guest.run();
                }
                guest.exit();
                shared.has_failed.store(result.is_err(), Ordering::Relaxed);
                shared.is_running.store(false, Ordering::Release);
                result?;
            }
            END => return Ok(()),
            _ => thread::park(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    /// Counts its runs and exits; fails after so many runs.
    struct Counting(Arc<[AtomicU64; 2]>, u64);

    impl Guest for Counting {
        fn write(&mut self, _pages: &[u32], _value: u64) -> Result<(), Failure> {
            Ok(())
        }

        fn run(&mut self) -> Result<(), Failure> {
            match self.0[0].fetch_add(1, Ordering::Relaxed) < self.1 {
                true => Ok(()),
                false => Err(check_failed("enough")),
            }
        }

        fn exit(&mut self) {
            self.0[1].fetch_add(1, Ordering::Relaxed);
        }

        fn nr_faults(&self) -> Option<u64> {
            None
        }
    }

    fn counting(limit: u64) -> (RunningVcpus, Arc<[AtomicU64; 2]>) {
        let counts = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
        let guests = (0..2).map(|_| Box::new(Counting(Arc::clone(&counts), limit)) as Box<dyn Guest>);
        (RunningVcpus::start(guests).unwrap(), counts)
    }

    #[test]
    fn vcpus_run_between_run_and_pause_only() {
        let (mut vcpus, counts) = counting(u64::MAX);
        assert_eq!(counts[0].load(Ordering::Relaxed), 0);
        for turn in 1..4 {
            let before = counts[0].load(Ordering::Relaxed);
            vcpus.run().unwrap();
            assert!(counts[0].load(Ordering::Relaxed) >= before + 2);
            vcpus.pause().unwrap();
            let [runs, exits] = counts.each_ref().map(|count| count.load(Ordering::Relaxed));
            assert_eq!(exits, 2 * turn);
            thread::sleep(std::time::Duration::from_millis(2));
            assert_eq!(counts[0].load(Ordering::Relaxed), runs);
        }
    }

    #[test]
    fn a_guest_that_fails_is_reported_and_blocks_no_thread() {
        let (mut vcpus, _) = counting(0);
        let failed = [vcpus.run(), vcpus.pause()].into_iter().find_map(Result::err).unwrap();
        assert!(failed.to_string().contains("enough"), "{failed}");
    }
}
