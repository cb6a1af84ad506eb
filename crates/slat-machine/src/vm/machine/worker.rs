//! A virtual CPU on its thread: its jobs, and the signals that it reads while it runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;
use rand::RngExt;
use rand::rngs::SmallRng;
use slat::shadow::Gva;
use slat::{Exit, Vcpu};

use super::{MachineError, VcpuReport};
use crate::hardware::cpu::CpuError;
use crate::hardware::walk::HardwareFormat;
use crate::linux::topology;
use crate::memory::Pages;
use crate::memory::numa::NodeMap;
use crate::vm::guest::{self, GuestCpu, GuestError, GuestTables, Ledger, Program, Sharing, Touches};
use crate::vm::host::MachineHost;

/// Touches between two reads of the stop signal.
const TOUCHES_PER_LOOK: usize = 64;

/// How often a CPU whose dirty ring is full checks whether there is room.
const RING_POLL: Duration = Duration::from_micros(50);

#[derive(Clone, Copy, Debug)]
pub(super) enum Repeat {
    Once,
    UntilStopped,
}

/// The parts of the region that a virtual CPU touches, if not all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Parts {
    Own,
    /// Those that [`Seat::parts_of_others`] has.
    OfOthers,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum VcpuJob {
    /// Pin the thread to its processor, or its node.
    Pin,
    /// Others write the pages of all virtual CPUs.
    ForgetPages,
    /// The first virtual CPU builds the guest's page tables.
    BuildTables(GuestTables),
    /// All turn paging on, with this root of the guest's page tables.
    TurnPagingOn {
        root: u64,
    },
    Run {
        program: Program,
        repeat: Repeat,
        parts: Parts,
    },
}

#[derive(Debug)]
pub(super) enum Answer {
    Done,
    Pinned(Result<(), MachineError>),
    /// The root of the guest's page tables.
    Root(u64),
    Ran(VcpuReport),
}

/// What the virtual CPUs read while they run.
#[derive(Debug)]
pub(super) struct Signals {
    pub(super) stop: CachePadded<AtomicBool>,
    pub(super) round: CachePadded<AtomicU64>,
    /// Touches done so far, about: one for each virtual CPU.
    pub(super) progress: Box<[CachePadded<AtomicU64>]>,
}

/// The processor and the nodes of a virtual CPU.
#[derive(Debug)]
pub(super) struct Seat {
    /// The processor that it is pinned to.
    pub(super) pin: Option<u32>,
    pub(super) nodes: Arc<NodeMap>,
    /// The place of its home.
    pub(super) home: usize,
    /// Draws its places, if it does not stay at home.
    pub(super) rng: Option<SmallRng>,
    /// Its last place: one for each virtual CPU.
    pub(super) taken: Arc<[AtomicUsize]>,
    /// The parts of the region that it touches in place of virtual CPUs of another node.
    pub(super) parts_of_others: Box<[u64]>,
}

impl Seat {
    /// Pins the thread to its processor, or its home node's, if it has to stay there.
    fn pin(&self) -> Result<(), MachineError> {
        match self.pin {
            Some(cpu) => topology::pin_current_thread(cpu)?,
            None if self.nodes.are_of_host() && !self.nodes.is_one() && self.rng.is_none() => {
                self.nodes.run_on(self.nodes.ids()[self.home])?;
            }
            None => {}
        }
        Ok(())
    }

    /// Chooses the place for a job that begins.
    fn take(&mut self, vcpu: u64) {
        if self.nodes.is_one() {
            return;
        }
        if !self.nodes.are_of_host() {
            let places = self.nodes.places_with_cpus();
            let place = self.rng.as_mut().map_or(self.home, |rng| places[rng.random_range(0..places.len())]);
            // There is such a node.
            let _ = self.nodes.run_on(self.nodes.ids()[place]);
        }
        // Relaxed: a caller may get the node before or after a move.
        self.taken[vcpu as usize].store(self.nodes.current_place(), Ordering::Relaxed);
    }
}

/// A virtual CPU on its thread.
pub(super) struct Worker<C> {
    pub(super) cpu: C,
    /// The guest's address of the region: its guest-physical address, until the guest's paging is
    /// on.
    pub(super) region: Gva,
    pub(super) index: u64,
    pub(super) nr_vcpus: u64,
    pub(super) pages_per_vcpu: u64,
    /// `None`: the thread is not the machine's.
    pub(super) seat: Option<Seat>,
    pub(super) signals: Arc<Signals>,
    /// For memory that the host changes.
    pub(super) ledger: Option<(Ledger, Arc<Pages>)>,
}

impl<F: HardwareFormat, C: GuestCpu<Handler = Vcpu<MachineHost, F>>> Worker<C> {
    pub(super) fn work(&mut self, job: &VcpuJob) -> Result<Answer, GuestError> {
        let answer = self.do_job(job);
        self.cpu.exit_guest_mode();
        answer
    }

    fn do_job(&mut self, job: &VcpuJob) -> Result<Answer, GuestError> {
        if let Some(seat) = &mut self.seat {
            if matches!(job, VcpuJob::Pin)
                && let Err(error) = seat.pin()
            {
                return Ok(Answer::Pinned(Err(error)));
            }
            seat.take(self.index);
        }
        let answer = match *job {
            VcpuJob::Pin => Ok(Answer::Pinned(Ok(()))),
            VcpuJob::ForgetPages => {
                if let Some((ledger, _)) = &mut self.ledger {
                    ledger.begin(Sharing::Overlapping);
                }
                Ok(Answer::Done)
            }
            VcpuJob::BuildTables(tables) if self.index == 0 => tables.build(&mut self.cpu).map(Answer::Root),
            VcpuJob::BuildTables(_) => Ok(Answer::Done),
            VcpuJob::TurnPagingOn { root } => self.turn_paging_on(root).map(|()| Answer::Done),
            VcpuJob::Run { program, repeat, parts } => {
                let parts = match (parts, &self.seat) {
                    (Parts::OfOthers, Some(seat)) => seat.parts_of_others.clone(),
                    _ => Box::from([self.index]),
                };
                self.run(&program, repeat, &parts).map(Answer::Ran)
            }
        };
        if answer.is_err() {
            // Relaxed: the others read nothing else because of it.
            self.signals.stop.store(true, Ordering::Relaxed);
        }
        answer
    }

    /// Turns paging on, with `root` as the root of the guest's page tables, which are built.
    pub(super) fn turn_paging_on(&mut self, root: u64) -> Result<(), GuestError> {
        self.cpu.turn_paging_on(root).map_err(GuestError::Start)?;
        self.region = guest::REGION_GVA;
        Ok(())
    }

    /// Runs `program` on the parts `parts` of the region, or on all of it if that is shared.
    pub(super) fn run(&mut self, program: &Program, repeat: Repeat, parts: &[u64]) -> Result<VcpuReport, GuestError> {
        let region = self.region;
        let before = self.cpu.counters();
        let begin = Instant::now();
        let signals = &*self.signals;
        // Acquire, as at `advance_round`: a CPU that writes a round has read it here. The store
        // that carries it is a release and the load that finds it an acquire. So the reader, which
        // reads the round afterwards, observes that round or a later one.
        let newest_round = || signals.round.load(Ordering::Acquire);
        let (is_own, whole) = (parts == [self.index], [self.index]);
        let parts = if program.sharing == Sharing::Overlapping { &whole } else { parts };
        let touches_of = |&part: &u64| Touches::new(program, part, self.nr_vcpus, self.pages_per_vcpu);
        let mut all_touches: Vec<Touches> = parts.iter().map(touches_of).collect();
        if let Some((ledger, _)) = &mut self.ledger {
            // The pages of others are in the ledgers of others.
            ledger.begin(if is_own { program.sharing } else { Sharing::Overlapping });
        }
        let mut nr_passes = 0;
        'passes: loop {
            for touches in &mut all_touches {
                for (nr_touches, touch) in touches.by_ref().enumerate() {
                    if nr_touches.is_multiple_of(TOUCHES_PER_LOOK) {
                        // Relaxed, both: the exact moment does not matter.
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
                            guest::touch_changing(
                                &mut self.cpu,
                                program,
                                region,
                                touch,
                                newest_round,
                                (ledger, pages),
                            )?;
                        }
                    }
                }
            }
            nr_passes += 1;
            match repeat {
                Repeat::Once => break,
                Repeat::UntilStopped => all_touches.iter_mut().for_each(Touches::rewind),
            }
        }
        Ok(VcpuReport { elapsed: begin.elapsed(), nr_passes, counters: self.cpu.counters().since(before) })
    }
}
