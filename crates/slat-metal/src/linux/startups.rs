//! The start of a guest's CPUs by each other.

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use spin::Mutex;
use thiserror::Error;

/// Where a CPU begins: what its architecture's call for it has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Start {
    /// The first instruction, or what stands for it.
    pub entry: u64,
    /// What the CPU gets in a register, where the call has that.
    pub argument: u64,
}

/// The CPU has been started before.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("the CPU has been started")]
pub struct AlreadyStarted;

/// What vCPUs ask of each other.
#[derive(Debug)]
pub struct Startups {
    /// For each vCPU: where it was started.
    starts: Vec<Mutex<Option<Start>>>,
    nr_waiting: AtomicU64,
}

impl Startups {
    /// None of `nr_cpus` vCPUs was started.
    pub fn new(nr_cpus: usize) -> Startups {
        Startups { starts: (0..nr_cpus).map(|_| Mutex::new(None)).collect(), nr_waiting: AtomicU64::new(0) }
    }

    /// vCPUs that wait for their start.
    pub fn nr_waiting(&self) -> u64 {
        self.nr_waiting.load(Ordering::SeqCst)
    }

    /// Starts vCPU `cpu`. `None`: there is no such vCPU.
    ///
    /// # Errors
    /// [`AlreadyStarted`]: it goes on as it is.
    pub fn start(&self, cpu: usize, start: Start) -> Option<Result<(), AlreadyStarted>> {
        // The lock orders what the guest wrote for its CPU before what that CPU does.
        let mut place = self.starts.get(cpu)?.lock();
        if place.is_some() {
            return Some(Err(AlreadyStarted));
        }
        *place = Some(start);
        Some(Ok(()))
    }

    /// Whether vCPU `cpu` was started. `None`: there is no such vCPU.
    pub fn is_started(&self, cpu: usize) -> Option<bool> {
        Some(self.starts.get(cpu)?.lock().is_some())
    }

    pub(super) fn begin_wait(&self) {
        self.nr_waiting.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn end_wait(&self) {
        self.nr_waiting.fetch_sub(1, Ordering::SeqCst);
    }

    pub(super) fn wait(&self, cpu: usize) -> Start {
        loop {
            if let Some(start) = *self.starts[cpu].lock() {
                return start;
            }
            core::hint::spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_is_started_once() {
        let startups = Startups::new(2);
        let start = Start { entry: 0x8000, argument: 7 };
        assert_eq!(startups.is_started(1), Some(false));
        assert_eq!(startups.start(1, start), Some(Ok(())));
        assert_eq!(startups.start(1, Start { entry: 0, argument: 0 }), Some(Err(AlreadyStarted)));
        assert_eq!(startups.wait(1), start);
        assert_eq!((startups.start(2, start), startups.is_started(2)), (None, None));
    }
}
