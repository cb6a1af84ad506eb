//! The machine put together: guest memory in slots, a VM of the engine, and one thread for each virtual CPU.
//!
//! Its shape is that of KVM's memory stress selftests: a test region of `nr_vcpus * bytes_per_vcpu`, split evenly into
//! `nr_slots` slots with numbers from 1 on, of which each virtual CPU owns an equal part; and, if the guest has paging
//! on, its page tables in one more slot: one address space for all virtual CPUs. All threads are started before anything is measured, and sleep between runs.
//!
//! # The protocol of a run
//! [`Machine::run`] posts a [`Program`] to all threads and returns when the last has done its pass.
//! [`Machine::start`] posts it and returns at once: the virtual CPUs do pass after pass until [`Running::stop`]. While
//! they run, [`Running::advance_round`] lets their writes carry a new round. The first virtual CPU that fails stops the
//! others. Only one program runs at a time.
//!
//! If the configuration allows it ([`HostEvents`]), the host changes the region's memory meanwhile, by the methods in
//! `events`. Where memory and virtual CPUs are, on a machine with several nodes, is decided in `nodes`.

mod config;
pub(crate) mod crew;
mod events;
#[cfg(test)]
mod events_tests;
mod nodes;
#[cfg(test)]
mod nodes_tests;
mod parts;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_shadow;
mod worker;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_utils::CachePadded;
use slat::shadow::Gva;
use slat::{Gfn, Gpa, MemoryRegion, MemoryRegionFlags, Vcpu, Vm};
use thiserror::Error;

pub use config::{ConfigError, HostEvents, MAX_VCPUS, MachineConfig, Pins};
use crew::{Busy, Crew, Finished, Work};
use nodes::Seats;
pub use parts::shadow_paging;
use parts::{add_tables_slot, new_cpu, new_shadow_cpu};
pub(crate) use parts::{enough_tables, overhead_bytes};
use worker::{Answer, Job, Parts, Repeat, Seat, Signals, Worker};

use crate::commit::{FlushDomain, FlushMethod, NotRestartable};
use crate::cpu::Counters;
use crate::guest::{GuestCpu, GuestError, GuestTables, Ledger, Program, ProgramError, ROUND_END};
use crate::host::{BackingSlice, HostError, MachineHost};
use crate::memory::{Backing, MemoryError, Reserved};
use crate::numa::{NodeMap, NumaError};
use crate::topology::{self, PinError};
use crate::walk::HardwareFormat;

/// Guest-physical address of the test region: aligned to 1 GiB, so that the backing's alignment decides about large
/// pages.
pub const REGION_GPA: Gpa = Gpa(64 << 30);

/// Guest-physical address of the memory for the guest's own page tables.
pub const TABLES_GPA: Gpa = Gpa(1 << 30);

/// What can go wrong with a machine.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MachineError {
    /// The configuration makes no sense.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The program makes no sense.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// There is no memory for the guest.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The host's side could not be set up.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The flush method that was asked for cannot be had.
    #[error(transparent)]
    Flush(#[from] NotRestartable),
    /// The engine refused something.
    #[error("engine: {0}")]
    Engine(#[from] slat::Error),
    /// A thread could not be pinned.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// There are no such nodes, or they do not serve.
    #[error(transparent)]
    Numa(#[from] NumaError),
    /// Memory was to be touched by virtual CPUs of other nodes.
    #[error("all vCPUs have the same home node: there is none on another to touch their memory first")]
    NoOtherNode,
    /// A virtual CPU's thread could not be started.
    #[error("the thread of vCPU {vcpu} could not be started: {source}")]
    Thread {
        /// The virtual CPU.
        vcpu: usize,
        /// Why.
        source: std::io::Error,
    },
    /// The host must not change this machine's memory.
    #[error("the machine was made without host events")]
    NoHostEvents,
    /// Pages that the test region has not.
    #[error("pages {start} to {end} are not in a region of {nr_pages}")]
    NoSuchPages {
        /// The first page.
        start: u64,
        /// The page behind the last.
        end: u64,
        /// Pages of the region.
        nr_pages: u64,
    },
    /// A program is running already.
    #[error("a program is running already")]
    Busy,
    /// A virtual CPU failed.
    #[error("vCPU {vcpu}: {error}")]
    Guest {
        /// The virtual CPU; the first of them, if several failed.
        vcpu: usize,
        /// How.
        error: GuestError,
    },
    /// A virtual CPU's thread panicked; it is of no use any more.
    #[error("the thread of vCPU {vcpu} panicked: {message}")]
    Panicked {
        /// The virtual CPU.
        vcpu: usize,
        /// The panic's message.
        message: String,
    },
}

impl From<Busy> for MachineError {
    fn from(_: Busy) -> MachineError {
        MachineError::Busy
    }
}

/// A slot of the test region.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Slot {
    /// The slot's number.
    pub id: u32,
    /// Where it begins.
    pub gpa: Gpa,
    /// Number of its first page within the region.
    pub first_page: u64,
    /// Its size in pages of 4 KiB.
    pub nr_pages: u64,
}

/// What one virtual CPU did in a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VcpuReport {
    /// From its first access to its last.
    pub elapsed: Duration,
    /// Passes over its pages that it completed.
    pub nr_passes: u64,
    /// What its CPU did.
    pub counters: Counters,
}

/// What all virtual CPUs did in a run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RunReport {
    /// From the start of the run until the last virtual CPU had finished.
    pub wall: Duration,
    /// One for each virtual CPU.
    pub vcpus: Vec<VcpuReport>,
}

impl RunReport {
    /// The sum of the virtual CPUs' counters.
    pub fn total(&self) -> Counters {
        self.vcpus.iter().fold(Counters::default(), |sum, vcpu| Counters {
            nr_accesses: sum.nr_accesses + vcpu.counters.nr_accesses,
            nr_reads: sum.nr_reads + vcpu.counters.nr_reads,
            nr_tlb_misses: sum.nr_tlb_misses + vcpu.counters.nr_tlb_misses,
            nr_walks: sum.nr_walks + vcpu.counters.nr_walks,
            nr_faults: sum.nr_faults + vcpu.counters.nr_faults,
            nr_restarts: sum.nr_restarts + vcpu.counters.nr_restarts,
            nr_flushes_seen: sum.nr_flushes_seen + vcpu.counters.nr_flushes_seen,
            nr_full_drops: sum.nr_full_drops + vcpu.counters.nr_full_drops,
            nr_translations_dropped: sum.nr_translations_dropped + vcpu.counters.nr_translations_dropped,
            nr_pages_logged: sum.nr_pages_logged + vcpu.counters.nr_pages_logged,
            nr_log_full_exits: sum.nr_log_full_exits + vcpu.counters.nr_log_full_exits,
            walk_reads: sum.walk_reads + vcpu.counters.walk_reads,
        })
    }
}

/// A machine that runs a guest on second-stage tables of format `F`.
pub struct Machine<F: HardwareFormat> {
    // First, so that the threads have ended before anything they use goes.
    crew: Crew<Job, Result<Answer, GuestError>>,
    signals: Arc<Signals>,
    vm: Arc<Vm<MachineHost, F>>,
    region: Backing,
    slots: Vec<Slot>,
    flush_domain: Arc<FlushDomain>,
    seats: Seats,
    config: MachineConfig,
    _overhead: Reserved,
}

impl<F: HardwareFormat> fmt::Debug for Machine<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine")
            .field("format", &F::NAME)
            .field("slots", &self.slots)
            .field("flush_domain", &self.flush_domain)
            .finish_non_exhaustive()
    }
}

impl<F: HardwareFormat> Machine<F> {
    /// Builds the machine and starts its threads; with paging, the guest builds its tables. If the configuration has a
    /// pin for the main thread, that is the calling one, and it stays pinned.
    ///
    /// # Errors
    /// [`MachineError`]: what is wrong with the configuration, or what could not be had.
    pub fn new(config: &MachineConfig) -> Result<Machine<F>, MachineError> {
        Machine::with_nodes(config, config.nodes.map()?)
    }

    /// With `nodes` instead of those of the configuration.
    fn with_nodes(config: &MachineConfig, nodes: NodeMap) -> Result<Machine<F>, MachineError> {
        let layout = config.layout()?;
        let seats = Seats::new(config, nodes)?;
        let flush_domain = Arc::new(match config.flush_method {
            Some(method) => FlushDomain::with_method(method)?,
            None => FlushDomain::new(),
        });
        let max_tables = config.max_tables.unwrap_or_else(|| parts::most_tables(config, layout.nr_pages));
        let host = MachineHost::with_nodes(Arc::clone(&flush_domain), max_tables, Arc::clone(seats.nodes()))?;
        let vm = Arc::new(Vm::new(host, config.engine)?);
        if let Some(nr_entries) = config.dirty_ring_entries {
            vm.enable_dirty_ring(nr_entries)?;
        }

        let overhead = Reserved::new(parts::all_overhead_bytes(config, layout.nr_pages))?;
        let size_bytes = layout.nr_pages << Gfn::SHIFT;
        let region = match config.host_events {
            HostEvents::None => Backing::new(config.backing, size_bytes)?,
            HostEvents::Allowed { nr_spare_frames } => Backing::with_movable_pages(size_bytes, nr_spare_frames)?,
        };
        if let Some(pages) = region.pages() {
            MachineHost::attach(&vm, pages);
        }
        let pages_per_slot = layout.nr_pages / u64::from(config.nr_slots);
        let mut slots = Vec::with_capacity(config.nr_slots as usize);
        for index in 0..config.nr_slots {
            let first_page = u64::from(index) * pages_per_slot;
            let slot = Slot {
                id: index + 1,
                gpa: Gpa(REGION_GPA.0 + (first_page << Gfn::SHIFT)),
                first_page,
                nr_pages: pages_per_slot,
            };
            vm.set_user_memory_region(MemoryRegion {
                slot: slot.id,
                flags: config.region_flags,
                guest_phys_addr: slot.gpa,
                memory_size: slot.nr_pages << Gfn::SHIFT,
                backing: Some(BackingSlice { backing: region.clone(), offset_bytes: first_page << Gfn::SHIFT }),
                userfault_bitmap: None,
            })?;
            slots.push(slot);
        }

        let (tables, tables_memory) = if config.has_guest_tables() {
            let (tables, memory) = add_tables_slot(&vm, config, layout.nr_pages)?;
            (Some(tables), Some(memory))
        } else {
            (None, None)
        };
        vm.host().set_memory_spans(seats.place(&region, tables_memory.as_ref())?);

        let signals = Arc::new(Signals {
            stop: CachePadded::new(AtomicBool::new(false)),
            round: CachePadded::new(AtomicU64::new(0)),
            progress: (0..config.nr_vcpus).map(|_| CachePadded::default()).collect(),
        });
        let mut works: Vec<Work<Job, Result<Answer, GuestError>>> = Vec::with_capacity(config.nr_vcpus);
        for index in 0..config.nr_vcpus {
            let seat = seats.of(index, config);
            works.push(if config.is_shadow() {
                work(new_shadow_cpu(&vm, config)?, index, seat, config, &region, &signals)
            } else {
                work(new_cpu(&vm, config, seats.counts(index))?, index, seat, config, &region, &signals)
            });
        }
        let crew = Crew::start(works).map_err(|(vcpu, source)| MachineError::Thread { vcpu, source })?;
        let machine = Machine {
            crew,
            signals,
            vm,
            region,
            slots,
            flush_domain,
            seats,
            config: config.clone(),
            _overhead: overhead,
        };
        machine.boot(config, tables)?;
        Ok(machine)
    }

    /// Pins the threads and turns paging on.
    fn boot(&self, config: &MachineConfig, tables: Option<GuestTables>) -> Result<(), MachineError> {
        if config.pins.is_some() || !self.seats.nodes().is_one() {
            for answer in self.do_job(Job::Pin)?.0 {
                if let Answer::Pinned(result) = answer {
                    result?;
                }
            }
        }
        if let Some(cpu) = config.pins.as_ref().and_then(|pins| pins.main) {
            topology::pin_current_thread(cpu)?;
        }
        if let Some(tables) = tables {
            for answer in self.do_job(Job::BuildTables(tables))?.0 {
                if let Answer::Root(root) = answer {
                    self.do_job(Job::TurnPagingOn { root })?;
                }
            }
        }
        Ok(())
    }

    fn do_job(&self, job: Job) -> Result<(Vec<Answer>, Duration), MachineError> {
        self.crew.post(job)?;
        answers(self.crew.finish())
    }

    /// Runs `program` once on all virtual CPUs: each does one pass over its pages.
    ///
    /// # Errors
    /// The program makes no sense, another one is running, or a virtual CPU failed.
    pub fn run(&self, program: Program) -> Result<RunReport, MachineError> {
        self.post(program, Repeat::Once, Parts::Own)?;
        report(self.crew.finish())
    }

    /// Starts `program` on all virtual CPUs: each does pass after pass over its pages until it is told to stop.
    ///
    /// # Errors
    /// The program makes no sense, or another one is running.
    pub fn start(&self, program: Program) -> Result<Running<'_, F>, MachineError> {
        self.post(program, Repeat::UntilStopped, Parts::Own)?;
        Ok(Running { machine: self, is_collected: false })
    }

    fn post(&self, program: Program, repeat: Repeat, parts: Parts) -> Result<(), MachineError> {
        self.post_job(&program, Job::Run { program, repeat, parts })
    }

    /// Posts the job for which, or beside which, `program` begins.
    fn post_job(&self, program: &Program, job: Job) -> Result<(), MachineError> {
        program.check()?;
        let prepare = || {
            // Relaxed: the board's lock, which the threads take to get the job, orders it.
            self.signals.stop.store(false, Ordering::Relaxed);
            self.signals.round.store(program.round, Ordering::Relaxed);
        };
        Ok(self.crew.post_after(prepare, job)?)
    }

    /// The engine's VM.
    pub fn vm(&self) -> &Arc<Vm<MachineHost, F>> {
        &self.vm
    }

    /// The slots of the test region, in its order.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Gives all slots of the test region the flags `flags`: switches dirty logging on and off.
    ///
    /// # Errors
    /// The engine's; the slots before the one that failed have the new flags.
    pub fn set_region_flags(&self, flags: MemoryRegionFlags) -> Result<(), MachineError> {
        for slot in &self.slots {
            self.vm.set_user_memory_region(MemoryRegion {
                slot: slot.id,
                flags,
                guest_phys_addr: slot.gpa,
                memory_size: slot.nr_pages << Gfn::SHIFT,
                backing: None,
                userfault_bitmap: None,
            })?;
        }
        Ok(())
    }

    /// Size of the test region in pages of 4 KiB.
    pub fn nr_pages(&self) -> u64 {
        self.region.size_bytes() >> Gfn::SHIFT
    }

    /// How flushes work here.
    pub fn flush_method(&self) -> FlushMethod {
        self.flush_domain.method()
    }

    /// Reads the first 8 bytes of page number `page` of the test region, from the host's side and behind the engine's
    /// back; `None` beyond its end.
    pub fn peek(&self, page: u64) -> Option<u64> {
        self.region.peek(page)
    }

    /// Whether the virtual CPUs were told to stop, or one of them has failed and stopped all.
    pub fn has_stopped(&self) -> bool {
        // Relaxed: when exactly it is noticed does not matter.
        self.signals.stop.load(Ordering::Relaxed)
    }

    /// How far the virtual CPUs are, for whoever watches them, also after the machine is gone.
    pub fn progress(&self) -> Progress {
        Progress(Arc::clone(&self.signals))
    }
}

/// How far the virtual CPUs of a machine are: whether they get on.
#[derive(Clone, Debug)]
pub struct Progress(Arc<Signals>);

impl Progress {
    /// About how many touches virtual CPU `vcpu` has done so far; 0 if there is none.
    pub fn nr_touches(&self, vcpu: usize) -> u64 {
        // Relaxed: when exactly it is seen does not matter.
        self.0.progress.get(vcpu).map_or(0, |nr_touches| nr_touches.load(Ordering::Relaxed))
    }

    /// About how many touches all have done so far.
    pub fn total(&self) -> u64 {
        (0..self.0.progress.len()).map(|vcpu| self.nr_touches(vcpu)).sum()
    }
}

/// What the thread of virtual CPU `index` does, on `cpu`.
fn work<F: HardwareFormat, C: GuestCpu<Handler = Vcpu<MachineHost, F>> + Send + 'static>(
    cpu: C,
    index: usize,
    seat: Seat,
    config: &MachineConfig,
    region: &Backing,
    signals: &Arc<Signals>,
) -> Work<Job, Result<Answer, GuestError>> {
    let pages_per_vcpu = config.bytes_per_vcpu >> Gfn::SHIFT;
    let mut worker = Worker {
        cpu,
        region: Gva(REGION_GPA.0),
        index: index as u64,
        nr_vcpus: config.nr_vcpus as u64,
        pages_per_vcpu,
        seat: Some(seat),
        signals: Arc::clone(signals),
        ledger: region.pages().map(|pages| {
            let first_page = index as u64 * pages_per_vcpu;
            (Ledger::new(first_page, pages_per_vcpu), Arc::clone(pages))
        }),
    };
    Box::new(move |job| worker.work(job))
}

/// All answers, or the first failure. A virtual CPU's own error goes before a panic, which may be its consequence.
fn answers(finished: Finished<Result<Answer, GuestError>>) -> Result<(Vec<Answer>, Duration), MachineError> {
    let mut answers = Vec::with_capacity(finished.endings.len());
    let mut panic = None;
    for (vcpu, ending) in finished.endings.into_iter().enumerate() {
        match ending {
            Ok(Ok(answer)) => answers.push(answer),
            Ok(Err(error)) => return Err(MachineError::Guest { vcpu, error }),
            Err(message) => {
                panic.get_or_insert(MachineError::Panicked { vcpu, message });
            }
        }
    }
    panic.map_or(Ok((answers, finished.wall)), Err)
}

fn report(finished: Finished<Result<Answer, GuestError>>) -> Result<RunReport, MachineError> {
    let (answers, wall) = answers(finished)?;
    let vcpus = answers
        .into_iter()
        .map(|answer| match answer {
            Answer::Ran(report) => report,
            Answer::Done | Answer::Pinned(_) | Answer::Root(_) => VcpuReport::default(),
        })
        .collect();
    Ok(RunReport { wall, vcpus })
}

/// A program that runs until it is stopped, or until this is dropped.
#[derive(Debug)]
#[must_use = "the program stops when this is dropped"]
pub struct Running<'a, F: HardwareFormat> {
    machine: &'a Machine<F>,
    is_collected: bool,
}

impl<F: HardwareFormat> Running<'_, F> {
    /// Lets the writes from now on carry the next round; returns it. It stays at the last one that there is.
    pub fn advance_round(&self) -> u64 {
        let next = |round: u64| Some((round + 1).min(ROUND_END - 1));
        // Release: what the caller did before is seen by who writes the round.
        match self.machine.signals.round.fetch_update(Ordering::AcqRel, Ordering::Acquire, next) {
            Ok(round) | Err(round) => (round + 1).min(ROUND_END - 1),
        }
    }

    /// Stops the virtual CPUs and waits for them. Passes that were under way are left unfinished.
    ///
    /// # Errors
    /// A virtual CPU failed.
    pub fn stop(mut self) -> Result<RunReport, MachineError> {
        self.is_collected = true;
        report(self.collect())
    }

    fn collect(&self) -> Finished<Result<Answer, GuestError>> {
        // Relaxed: when exactly they notice does not matter.
        self.machine.signals.stop.store(true, Ordering::Relaxed);
        self.machine.crew.finish()
    }
}

impl<F: HardwareFormat> Drop for Running<'_, F> {
    fn drop(&mut self) {
        if !self.is_collected {
            self.collect();
        }
    }
}

impl<F: HardwareFormat> Drop for Machine<F> {
    fn drop(&mut self) {
        // A `Running` that was forgotten would let the threads run for ever.
        self.signals.stop.store(true, Ordering::Relaxed);
    }
}
