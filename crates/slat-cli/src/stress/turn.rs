//! One turn: a machine, its guests in bursts, and the other threads.
//!
//! # Implementation
//! - The guests run for a burst, while their round advances every few milliseconds. Then they stop,
//!   the dirty logs are compared with memory, and the next burst begins. The other threads never
//!   pause.
//! - In most bursts each vCPU has its own pages, for which it knows exactly what it must read. In
//!   some bursts all vCPUs write all pages.
//! - A thread that finds an error ends the turn. At the end all memory is read once more and then
//!   discarded: every frame must be released.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::options::HugePagesArg;
use rand::RngExt;
use rand::rngs::SmallRng;
use slat::{Config, GfnRange, PAGE_SIZE};
use slat_machine::hardware::commit::FlushMethod;
use slat_machine::hardware::walk::HardwareFormat;
use slat_machine::memory::FrameUse;
use slat_machine::vm::guest::{Order, Program, Sharing};
use slat_machine::vm::machine::{HostEvents, Machine, MachineConfig, RunReport};

use super::Plan;
use super::logs::Log;
use super::operators::{self, Calls, Operator};
use super::tally::{Figure, Tally};
use super::watch::{Beat, Counter, Watch, counter_of};
use crate::failure::{Failure, check_failed, ensure, no_thread};
use crate::session::Session;

/// Time between two rounds of the guests: writes of one round have the same value.
const ROUND: Duration = Duration::from_millis(2);

/// Bursts last so many rounds.
const BURST_ROUNDS: std::ops::Range<u32> = 10..60;

/// Frames for events and snapshots.
const NR_SPARE_FRAMES: u64 = 64;

/// What all threads of a turn share.
pub(super) struct World<F: HardwareFormat> {
    pub(super) machine: Machine<F>,
    pub(super) logs: Vec<Log>,
    pub(super) plan: Plan,
    /// Where memslots that have visitors were a moment ago.
    pub(super) visited: Mutex<Vec<GfnRange>>,
    /// The calls of the splitting thread that are in flight.
    pub(super) splitter: Calls,
    pub(super) tally: Arc<Tally>,
    stop: AtomicBool,
}

impl<F: HardwareFormat> World<F> {
    pub(super) fn is_over(&self) -> bool {
        // Relaxed, here and below: it does not matter when exactly the flag is observed.
        self.stop.load(Ordering::Relaxed)
    }

    fn end(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// The threads of operators. Each ends when the turn is over, or ends it by a failure.
struct OperatorThreads<F: HardwareFormat> {
    world: Arc<World<F>>,
    threads: Vec<(String, JoinHandle<Result<(), Failure>>)>,
}

impl<F: HardwareFormat> OperatorThreads<F> {
    /// Waits for all; returns the first failure.
    fn end(&mut self) -> Result<(), Failure> {
        self.world.end();
        let mut result = Ok(());
        for (name, thread) in self.threads.drain(..) {
            let ending = thread.join().unwrap_or_else(|_| Err(check_failed(format_args!("{name} panicked"))));
            if result.is_ok() {
                result = ending;
            }
        }
        result
    }
}

impl<F: HardwareFormat> Drop for OperatorThreads<F> {
    fn drop(&mut self) {
        // An earlier error is reported instead.
        let _ = self.end();
    }
}

/// Runs the turn `plan` until `end`.
pub(super) fn run<F: HardwareFormat>(
    plan: &Plan,
    end: Instant,
    tally: &Arc<Tally>,
    watch: &Watch,
    session: &Session,
) -> Result<FlushMethod, Failure> {
    let main = Beat::default();
    // Making a machine may take long, too.
    watch.set(vec![("the thread of the turns".to_owned(), counter_of(&main))]);
    let machine = Machine::<F>::new(&MachineConfig {
        nr_vcpus: plan.nr_vcpus,
        bytes_per_vcpu: plan.pages_per_vcpu * PAGE_SIZE,
        nr_slots: plan.nr_slots,
        host_events: HostEvents::Allowed { nr_spare_frames: NR_SPARE_FRAMES },
        engine: Config::default()
            .with_locking(plan.locking)
            .with_access_tracking(plan.tracking)
            .with_dirty_tracking(plan.dirty_tracking)
            .with_manual_protect(plan.manual_protect)
            .with_huge_page_logging(HugePagesArg::Split.logging(plan.splitting)),
        paging: plan.paging,
        marks: plan.marks,
        ..MachineConfig::default()
    })?;
    let logs = machine.slots().iter().map(|&slot| Log::new(slot, plan.manual_protect)).collect();
    let world = Arc::new(World {
        machine,
        logs,
        plan: *plan,
        visited: Mutex::default(),
        splitter: Calls::default(),
        tally: Arc::clone(tally),
        stop: AtomicBool::new(false),
    });
    let _watched = session.watch(world.machine.vm());
    let mut operator_threads = OperatorThreads { world: Arc::clone(&world), threads: Vec::new() };
    let mut counters: Vec<(String, Counter)> = Vec::new();
    for (index, operator) in operators::ALL.into_iter().enumerate() {
        let (name, beat) = (operator.name(), Beat::default());
        counters.push((name.clone(), counter_of(&beat)));
        operator_threads.threads.push((name.clone(), start(name, operator, &world, plan.rng(2 + index as u64), beat)?));
    }
    for vcpu in 0..plan.nr_vcpus {
        let progress = world.machine.progress();
        counters.push((format!("vCPU {vcpu}"), Arc::new(move || progress.nr_touches(vcpu))));
    }
    counters.push(("the thread of the turns".to_owned(), counter_of(&main)));
    watch.set(counters);
    let result = guests(plan, end, &world, &main);
    // A failure of an operator is why the guests stopped early; a guest's own failure comes first.
    let operated = operator_threads.end();
    drop(operator_threads);
    let round = result.and_then(|round| operated.map(|()| round))?;
    conclude(&world, round, &main)?;
    Ok(world.machine.flush_method())
}

fn start<F: HardwareFormat>(
    name: String,
    operator: Operator,
    world: &Arc<World<F>>,
    mut rng: SmallRng,
    beat: Beat,
) -> Result<JoinHandle<Result<(), Failure>>, Failure> {
    let world = Arc::clone(world);
    let work = move || {
        let result = operator.run(&world, &mut rng, &beat);
        if result.is_err() {
            world.end();
        }
        beat.end();
        result
    };
    thread::Builder::new().name(name).spawn(work).map_err(|error| no_thread(&error))
}

/// The guests' bursts until `end`. Returns the last round.
fn guests<F: HardwareFormat>(plan: &Plan, end: Instant, world: &World<F>, main: &Beat) -> Result<u64, Failure> {
    let mut rng = plan.rng(1);
    let machine = &world.machine;
    note(world, &machine.run(Program { seed: plan.seed, ..Program::default() })?);
    let mut round = 1;
    while Instant::now() < end && !world.is_over() {
        main.beat();
        let program = Program {
            order: if rng.random_range(0..4) == 0 { Order::Sequential } else { Order::Random },
            sharing: if rng.random_range(0..4) == 0 { Sharing::Overlapping } else { Sharing::Partitioned },
            write_percent: [5, 30, 50, 90][rng.random_range(0..4)],
            seed: rng.random(),
            round: round + 1,
            oldest_round: 1,
        };
        let nr_rounds = rng.random_range(BURST_ROUNDS);
        let running = machine.start(program)?;
        for _ in 0..nr_rounds {
            if Instant::now() >= end || machine.has_stopped() || world.is_over() {
                break;
            }
            thread::sleep(ROUND);
            round = running.advance_round();
            main.beat();
        }
        note(world, &running.stop()?);
        world.tally.add(Figure::Bursts, 1);
        for log in &world.logs {
            log.check_stopped(machine, &world.tally)?;
        }
    }
    Ok(round)
}

fn note<F: HardwareFormat>(world: &World<F>, report: &RunReport) {
    let total = report.total();
    world.tally.add(Figure::Accesses, total.nr_accesses);
    world.tally.add(Figure::Reads, total.nr_reads);
}

/// Reads all memory once more, discards it, and checks that all frames are released.
fn conclude<F: HardwareFormat>(world: &World<F>, round: u64, main: &Beat) -> Result<(), Failure> {
    let World { machine, tally, .. } = world;
    main.beat();
    note(world, &machine.run(Program { write_percent: 0, round, oldest_round: 1, ..Program::default() })?);
    let pages = machine.pages()?;
    let frame_use = pages.frame_use();
    if frame_use != (FrameUse { nr_frames: frame_use.nr_pages, nr_snapshots: 0, ..frame_use }) {
        return Err(check_failed(format_args!("frames that belong to no page: {frame_use:?}")));
    }
    machine.discard(0..machine.nr_pages())?;
    ensure!(
        pages.frame_use() == FrameUse::default(),
        Check,
        "frames of pages that were discarded: {:?}",
        pages.frame_use()
    );
    pages.check_free_frames().map_err(check_failed)?;
    tally.add(Figure::FrameUses, 1);

    tally.add_machine(&pages.counts(), &machine.vm().stats());
    Ok(())
}
