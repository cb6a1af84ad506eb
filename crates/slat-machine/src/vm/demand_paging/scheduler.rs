//! A thread that runs vCPUs: one, or many in turn.
//!
//! # Implementation
//! The thread keeps a queue of vCPUs that can run. It takes the first and lets it touch pages until
//! it exits for one that is missing, or its turn is over. For an exit the thread requests the page.
//! Unless the page is there at once, it goes on with the next vCPU in the queue. If the queue is
//! empty, it takes what has arrived, which puts vCPUs back into the queue. It sleeps only if
//! nothing has arrived. So a page costs no switch of threads if a thread has more vCPUs than the
//! turns that a page takes. With one vCPU for each thread, the kernel's scheduler goes on with the
//! next.
//!
//! Any thread may run a CPU, one at a time. The flush rule ([`commit`](crate::hardware::commit))
//! needs no more: the restartable sequence of an access is the thread's, and begins and ends within
//! that access.
//!
//! Nothing is allocated or locked for a page on this path.
//!
//! # Failures
//! The first thread that cannot get a page reports it to all ([`Arrivals::fail`]). Each thread
//! reads that once a turn, and no sleep is longer than
//! `LONGEST_SLEEP`. Every vCPU that has pages left ends with that
//! error, or with its own. Pages that were requested and did not come can be claimed again. The
//! vCPUs are as they were: a later run goes on with them.

use std::collections::VecDeque;
use std::sync::Arc;

use slat::slots::MemoryFaultFlags;

use super::lane::{Lane, Turn, VcpuPaging};
use crate::hardware::cpu::CpuError;
use crate::hardware::walk::HardwareFormat;
use crate::linux::clock;
use crate::linux::topology;
use crate::paging::{Arrivals, Asked, Fetch, FetchFrom, PageSupply, RingPages, VcpuError};

/// Touches that a vCPU makes, and exits that are served at once, before the next one's turn.
const TOUCHES_PER_TURN: u64 = 64;

/// Turns between two looks at what has arrived, while there are vCPUs to run.
const TURNS_PER_LOOK: u32 = 16;

/// No source of pages was named.
struct Nowhere;

impl PageSupply for Nowhere {
    fn still_waits(&mut self, _: usize) -> Result<bool, VcpuError> {
        Ok(false)
    }

    fn ask(&mut self, _: usize, page: u64, _: MemoryFaultFlags) -> Result<Asked, VcpuError> {
        Err(VcpuError::NoSource { page })
    }

    fn collect(&mut self, _: &mut VecDeque<usize>) -> Result<(), VcpuError> {
        Ok(())
    }

    fn sleep(&mut self, _: &mut VecDeque<usize>) -> Result<(), VcpuError> {
        Ok(())
    }

    fn failure_of(&mut self, _: usize) -> Option<VcpuError> {
        None
    }
}

/// The task of the threads.
#[derive(Clone, Debug)]
pub(super) struct PagingJob {
    /// Touch all pages once more, and write this round; `None`: touch the pages that were not
    /// touched yet.
    pub(super) round: Option<u64>,
    /// The source of pages; `None`: the rings, if there are any.
    pub(super) from: Option<FetchFrom>,
}

/// How a vCPU ended a run.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) vcpu: usize,
    pub(super) report: VcpuPaging,
    /// Times of touches, in ns.
    pub(super) samples: Vec<u32>,
    pub(super) error: Option<VcpuError>,
}

/// A thread's vCPUs.
pub(super) struct Scheduler<F: HardwareFormat> {
    lanes: Vec<Lane<F>>,
    arrivals: Arc<Arrivals>,
    rings: Option<RingPages>,
    /// Indices into `lanes`.
    ready: VecDeque<usize>,
    /// The processor to pin the thread to, until it is pinned.
    pin: Option<u32>,
}

impl<F: HardwareFormat> Scheduler<F> {
    pub(super) fn new(
        lanes: Vec<Lane<F>>,
        arrivals: Arc<Arrivals>,
        rings: Option<RingPages>,
        pin: Option<u32>,
    ) -> Scheduler<F> {
        let ready = VecDeque::with_capacity(lanes.len());
        Scheduler { lanes, arrivals, rings, ready, pin }
    }

    pub(super) fn work(&mut self, job: &PagingJob) -> Vec<Ended> {
        let _others = FailOnPanic(Arc::clone(&self.arrivals));
        if let Some(Err(error)) = self.pin.take().map(topology::pin_current_thread) {
            self.arrivals.fail(&VcpuError::Pin(Arc::new(error)));
        }
        let now_ns = clock::timestamp_ns();
        for lane in &mut self.lanes {
            if let Some(round) = job.round {
                lane.begin_round(round);
            }
            lane.begin(now_ns);
        }
        let errors = match (&job.from, self.rings.take()) {
            (Some(from), rings) => {
                self.rings = rings;
                match Fetch::open(from, &self.arrivals, self.lanes.len()) {
                    Ok(mut fetch) => self.run(&mut fetch),
                    Err(error) => {
                        self.arrivals.fail(&error);
                        vec![None; self.lanes.len()]
                    }
                }
            }
            (None, Some(mut rings)) => {
                let errors = self.run(&mut rings);
                self.rings = Some(rings);
                errors
            }
            (None, None) => self.run(&mut Nowhere),
        };
        let failure = self.arrivals.failure();
        let ended = |(lane, own): (&mut Lane<F>, Option<VcpuError>)| {
            lane.exit_guest_mode();
            // If a page's backing is gone because its faults are not served any more, the cause is
            // the failure of that service.
            let is_gone =
                matches!(own, Some(VcpuError::Cpu(CpuError::Engine(slat::error::FaultError::BackingGone { .. }))));
            let own = if is_gone && failure.is_some() { None } else { own };
            let error = if lane.is_finished() { None } else { own.or_else(|| failure.clone()) };
            let (report, samples) = lane.report();
            Ended { vcpu: lane.vcpu, report, samples, error }
        };
        self.lanes.iter_mut().zip(errors).map(ended).collect()
    }

    /// Runs the vCPUs until all have touched all, or the run has failed. Returns for each vCPU its
    /// own reason to stop, if it has one.
    fn run<P: PageSupply>(&mut self, pages: &mut P) -> Vec<Option<VcpuError>> {
        let mut errors = vec![None; self.lanes.len()];
        if let Err((lane, error)) = self.run_all(pages) {
            self.arrivals.fail(&error);
            errors = (0..self.lanes.len()).map(|lane| pages.failure_of(lane)).collect();
            if let Some(lane) = lane {
                errors[lane] = Some(error);
            }
        }
        errors
    }

    /// # Errors
    /// What ended the run, and the vCPU whose own error it is.
    fn run_all<P: PageSupply>(&mut self, pages: &mut P) -> Result<(), (Option<usize>, VcpuError)> {
        let of_all = |error| (None, error);
        self.ready.clear();
        let mut nr_left = 0;
        for (lane, _) in self.lanes.iter().enumerate().filter(|(_, lane)| !lane.is_finished()) {
            nr_left += 1;
            if !pages.still_waits(lane).map_err(|error| (Some(lane), error))? {
                self.ready.push_back(lane);
            }
        }
        let mut nr_turns = 0_u32;
        while nr_left > 0 {
            if self.arrivals.has_failed() {
                return Ok(());
            }
            let Some(lane) = self.ready.pop_front() else {
                pages.collect(&mut self.ready).map_err(of_all)?;
                if self.ready.is_empty() {
                    self.lanes.iter().for_each(Lane::exit_guest_mode);
                    pages.sleep(&mut self.ready).map_err(of_all)?;
                }
                continue;
            };
            match Self::turn(&mut self.lanes[lane], lane, pages).map_err(|error| (Some(lane), error))? {
                EndOfTurn::Goes => self.ready.push_back(lane),
                EndOfTurn::Waits => {}
                EndOfTurn::Finished => {
                    self.lanes[lane].exit_guest_mode();
                    nr_left -= 1;
                }
            }
            nr_turns += 1;
            if nr_turns.is_multiple_of(TURNS_PER_LOOK) {
                pages.collect(&mut self.ready).map_err(of_all)?;
            }
        }
        Ok(())
    }

    fn turn<P: PageSupply>(lane: &mut Lane<F>, place: usize, pages: &mut P) -> Result<EndOfTurn, VcpuError> {
        for _ in 0..TOUCHES_PER_TURN {
            match lane.run(TOUCHES_PER_TURN)? {
                Turn::Goes => return Ok(EndOfTurn::Goes),
                Turn::Finished => return Ok(EndOfTurn::Finished),
                Turn::Exited(page, flags) => {
                    if pages.ask(place, page, flags)? == Asked::Waits {
                        return Ok(EndOfTurn::Waits);
                    }
                }
            }
        }
        Ok(EndOfTurn::Goes)
    }
}

/// Ends the waits for a thread that has panicked.
struct FailOnPanic(Arc<Arrivals>);

impl Drop for FailOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(&VcpuError::Panicked { message: "another thread of the run panicked".to_owned() });
        }
    }
}

/// How a vCPU ended its turn.
enum EndOfTurn {
    Goes,
    Waits,
    Finished,
}
