//! A virtual CPU as its thread has it: the jobs that it does, and what it looks at while it runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;
use slat::{Exit, Gva, Vcpu};

use super::{REGION_GPA, VcpuReport};
use crate::cpu::{Cpu, CpuError, Paging};
use crate::guest::{self, GuestError, GuestTables, Ledger, Program, Touches};
use crate::host::MachineHost;
use crate::memory::Pages;
use crate::topology::{self, PinError};
use crate::walk::HardwareFormat;

/// Touches between two looks at whether to stop.
const TOUCHES_PER_LOOK: usize = 64;

/// How often a CPU whose dirty ring is full looks whether there is room.
const RING_POLL: Duration = Duration::from_micros(50);

#[derive(Clone, Copy, Debug)]
pub(super) enum Repeat {
    Once,
    UntilStopped,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Job {
    /// To the thread's processor.
    Pin,
    /// The first virtual CPU builds the guest's tables.
    BuildTables(GuestTables),
    /// All turn paging on with this value in CR3.
    TurnPagingOn {
        cr3: u64,
    },
    Run {
        program: Program,
        repeat: Repeat,
    },
}

#[derive(Debug)]
pub(super) enum Answer {
    Done,
    Pinned(Result<(), PinError>),
    Cr3(u64),
    Ran(VcpuReport),
}

/// What the virtual CPUs look at while they run.
#[derive(Debug)]
pub(super) struct Signals {
    pub(super) stop: CachePadded<AtomicBool>,
    pub(super) round: CachePadded<AtomicU64>,
    /// Touches done so far, about: one for each virtual CPU.
    pub(super) progress: Box<[CachePadded<AtomicU64>]>,
}

/// A virtual CPU as its thread has it.
pub(super) struct Worker<F: HardwareFormat> {
    pub(super) cpu: Cpu<Vcpu<MachineHost, F>, F>,
    pub(super) index: u64,
    pub(super) nr_vcpus: u64,
    pub(super) pages_per_vcpu: u64,
    pub(super) pin: Option<u32>,
    pub(super) signals: Arc<Signals>,
    /// For memory that the host changes.
    pub(super) ledger: Option<(Ledger, Arc<Pages>)>,
}

impl<F: HardwareFormat> Worker<F> {
    pub(super) fn work(&mut self, job: &Job) -> Result<Answer, GuestError> {
        let answer = self.do_job(job);
        self.cpu.exit_guest_mode();
        answer
    }

    fn do_job(&mut self, job: &Job) -> Result<Answer, GuestError> {
        let answer = match *job {
            Job::Pin => Ok(Answer::Pinned(self.pin.map_or(Ok(()), topology::pin_current_thread))),
            Job::BuildTables(tables) if self.index == 0 => tables.build(&mut self.cpu).map(Answer::Cr3),
            Job::BuildTables(_) => Ok(Answer::Done),
            Job::TurnPagingOn { cr3 } => self.cpu.load_cr3(cr3).map_err(GuestError::Start).map(|()| {
                self.cpu.set_paging(Paging::TwoDimensional);
                Answer::Done
            }),
            Job::Run { program, repeat } => self.run(&program, repeat).map(Answer::Ran),
        };
        if answer.is_err() {
            // Relaxed: the others need not see anything else of it.
            self.signals.stop.store(true, Ordering::Relaxed);
        }
        answer
    }

    fn run(&mut self, program: &Program, repeat: Repeat) -> Result<VcpuReport, GuestError> {
        let region = match self.cpu.paging() {
            Paging::Off => Gva(REGION_GPA.0),
            Paging::TwoDimensional => guest::REGION_GVA,
        };
        let before = self.cpu.counters();
        let begin = Instant::now();
        let signals = &*self.signals;
        // Acquire, and so at `advance_round`: who writes a round has seen it here. The store that carries it is a release
        // and the load that finds it an acquire, so the reader, who asks afterwards, sees that round or a later one.
        let newest_round = || signals.round.load(Ordering::Acquire);
        let mut touches = Touches::new(program, self.index, self.nr_vcpus, self.pages_per_vcpu);
        if let Some((ledger, _)) = &mut self.ledger {
            ledger.begin(program.sharing);
        }
        let mut nr_passes = 0;
        'passes: loop {
            for (nr_touches, touch) in touches.by_ref().enumerate() {
                if nr_touches.is_multiple_of(TOUCHES_PER_LOOK) {
                    // Relaxed, both: when exactly it is noticed does not matter.
                    signals.progress[self.index as usize].fetch_add(TOUCHES_PER_LOOK as u64, Ordering::Relaxed);
                    if signals.stop.load(Ordering::Relaxed) {
                        break 'passes;
                    }
                }
                match &mut self.ledger {
                    None => loop {
                        match guest::touch(&mut self.cpu, program, region, touch, newest_round) {
                            Err(GuestError::Access { error: CpuError::Exit(Exit::DirtyRingFull), .. }) => {}
                            done => break done?,
                        }
                        while self.cpu.handler().dirty_ring().is_some_and(|ring| ring.is_soft_full()) {
                            if signals.stop.load(Ordering::Relaxed) {
                                break 'passes;
                            }
                            thread::sleep(RING_POLL);
                        }
                    },
                    Some((ledger, pages)) => {
                        guest::touch_changing(&mut self.cpu, program, region, touch, newest_round, (ledger, pages))?;
                    }
                }
            }
            nr_passes += 1;
            match repeat {
                Repeat::Once => break,
                Repeat::UntilStopped => touches.rewind(),
            }
        }
        Ok(VcpuReport { elapsed: begin.elapsed(), nr_passes, counters: self.cpu.counters().since(before) })
    }
}
