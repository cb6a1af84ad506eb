//! The complete machine: guest memory in memslots, a VM of the engine, and one thread for each
//! virtual CPU.
//!
//! The setup is that of KVM's memory stress selftests: a test region of `nr_vcpus *
//! bytes_per_vcpu`, split evenly into `nr_slots` memslots with numbers from 1 on, of which each
//! virtual CPU owns an equal part. If the guest has paging on, its page tables are in one more
//! memslot: one address space for all virtual CPUs. All threads are started before any measurement,
//! and sleep between runs.
//!
//! # Use
//! [`Machine::run`] posts a [`Program`] to all threads and returns when the last has done its pass.
//! [`Machine::start`] posts it and returns at once: the virtual CPUs do pass after pass until
//! [`Running::stop`]. While they run, [`Running::advance_round`] begins a new round, which their
//! writes then carry. The first virtual CPU that fails stops the others. Only one program runs at a
//! time.
//!
//! If the configuration allows it ([`HostEvents`]), the host changes the region's memory meanwhile,
//! by the methods in `events`. `nodes` places memory and virtual CPUs on a machine with several
//! nodes.

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
use slat::format::Npt;
use slat::shadow::Gva;
use slat::{Gfn, Gpa, MemoryRegion, MemoryRegionFlags, Vcpu, Vm};
use thiserror::Error;

pub use config::{HostEvents, MAX_VCPUS, MachineConfig, MachineConfigError, Pins};
use crew::{Busy, Crew, Finished, Work};
use nodes::Seats;
pub use parts::shadow_paging;
use parts::{Hardware, SecondStage, Shadow, add_tables_slot};
pub(crate) use parts::{enough_tables, overhead_bytes};
use worker::{Answer, Parts, Repeat, Seat, Signals, VcpuJob, Worker};

use crate::hardware::commit::{FlushDomain, FlushMethod, NotRestartable};
use crate::hardware::cpu::CpuCounters;
use crate::hardware::walk::HardwareFormat;
use crate::linux::topology::{self, PinError};
use crate::memory::numa::{NodeMap, NumaError};
use crate::memory::{Backing, MemoryError, Reserved};
use crate::vm::guest::{GuestCpu, GuestError, GuestTables, Ledger, Program, ProgramError, ROUND_END};
use crate::vm::host::{BackingSlice, HostError, MachineHost};

/// Guest-physical address of the test region: aligned to 1 GiB, so that only the backing's
/// alignment limits large pages.
pub const REGION_GPA: Gpa = Gpa(64 << 30);

/// Guest-physical address of the memory for the guest's own page tables.
pub const TABLES_GPA: Gpa = Gpa(1 << 30);

/// Why a machine cannot be made, or a call failed.
#[derive(Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message names the fields")]
pub enum MachineError {
    /// The configuration is refused.
    #[error(transparent)]
    Config(#[from] MachineConfigError),
    /// The program is refused.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// There is no memory for the guest.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The host's side could not be set up.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The flush method in the configuration is not available.
    #[error(transparent)]
    Flush(#[from] NotRestartable),
    /// The engine refused something.
    #[error("engine: {0}")]
    Engine(#[from] slat::Error),
    /// A thread could not be pinned.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// The nodes are refused.
    #[error(transparent)]
    Numa(#[from] NumaError),
    /// Virtual CPUs of other nodes were to touch the memory first.
    #[error("all vCPUs have the same home node: there is none on another to touch their memory first")]
    NoOtherNode,
    /// A virtual CPU's thread could not be started.
    #[error("the thread of vCPU {vcpu} could not be started: {source}")]
    Thread { vcpu: usize, source: std::io::Error },
    /// The machine has no host events.
    #[error("the machine was made without host events")]
    NoHostEvents,
    /// Pages outside of the test region.
    #[error("pages {start} to {end} are not in a region of {nr_pages}")]
    NoSuchPages { start: u64, end: u64, nr_pages: u64 },
    /// A program is running already.
    #[error("a program is running already")]
    Busy,
    /// A virtual CPU failed.
    #[error("vCPU {vcpu}: {error}")]
    Guest {
        /// The virtual CPU; the first of them, if several failed.
        vcpu: usize,
        error: GuestError,
    },
    /// A virtual CPU's thread panicked; it cannot be used any more.
    #[error("the thread of vCPU {vcpu} panicked: {message}")]
    Panicked { vcpu: usize, message: String },
}

crate::vm::engine_error::from_engine_errors!(MachineError: ConfigError, SlotError, LogError, RangeError);

impl From<Busy> for MachineError {
    fn from(_: Busy) -> MachineError {
        MachineError::Busy
    }
}

/// A memslot of the test region.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Slot {
    /// The memslot's number.
    pub id: u32,
    /// Its first guest-physical address.
    pub gpa: Gpa,
    /// Number of its first page within the region.
    pub first_page: u64,
    /// Its size in pages of 4 KiB.
    pub nr_pages: u64,
}

/// The result of one virtual CPU in a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VcpuReport {
    /// From its first access to its last.
    pub elapsed: Duration,
    /// Passes over its pages that it completed.
    pub nr_passes: u64,
    /// The counts of its CPU.
    pub counters: CpuCounters,
}

/// The results of all virtual CPUs in a run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RunReport {
    /// From the start of the run until the last virtual CPU had finished.
    pub wall: Duration,
    /// One for each virtual CPU.
    pub vcpus: Vec<VcpuReport>,
}

impl RunReport {
    /// The sum of the virtual CPUs' counters.
    pub fn total(&self) -> CpuCounters {
        self.vcpus.iter().fold(CpuCounters::default(), |sum, vcpu| sum + vcpu.counters)
    }
}

/// A machine that runs a guest on second-stage page tables of format `F`.
pub struct Machine<F: HardwareFormat> {
    // First, so that the threads end before the things that they use are dropped.
    crew: Crew<VcpuJob, Result<Answer, GuestError>>,
    signals: Arc<Signals>,
    vm: Arc<Vm<MachineHost, F>>,
    region: Backing,
    slots: Vec<Slot>,
    flush_domain: Arc<FlushDomain>,
    seats: Seats,
    config: MachineConfig,
    /// [`Machine::populate_here`] for the machine's hardware.
    populate_here: fn(&Machine<F>, Program) -> Result<RunReport, MachineError>,
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
    /// Builds the machine and starts its threads; with paging, the guest builds its page tables. If
    /// the configuration has a pin for the main thread, the calling thread is pinned, and stays so.
    ///
    /// # Errors
    /// [`MachineError`]: what is wrong with the configuration, or what could not be made.
    pub fn new(config: &MachineConfig) -> Result<Machine<F>, MachineError> {
        match config.shadow {
            None => Machine::with_nodes(config, config.nodes.map()?),
            Some(_) => F::shadow_machine(config),
        }
    }

    /// With `nodes` instead of those of the configuration, and a second stage.
    fn with_nodes(config: &MachineConfig, nodes: NodeMap) -> Result<Machine<F>, MachineError> {
        Machine::with_hardware(&SecondStage, config, nodes)
    }

    fn with_hardware<K: Hardware<F>>(
        hardware: &K,
        config: &MachineConfig,
        nodes: NodeMap,
    ) -> Result<Machine<F>, MachineError> {
        let layout = config.layout()?;
        let seats = Seats::new(config, nodes)?;
        let flush_domain = Arc::new(match config.flush_method {
            Some(method) => FlushDomain::with_method(method)?,
            None => FlushDomain::new(),
        });
        let max_tables = config.max_tables.unwrap_or_else(|| parts::most_tables(config, layout.nr_pages));
        let host = MachineHost::with_nodes(Arc::clone(&flush_domain), max_tables, Arc::clone(seats.nodes()))?;
        let host = host.with_instructions_of::<F>();
        let vm = Arc::new(hardware.new_vm(host, config.engine)?);
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
        let mut works: Vec<Work<VcpuJob, Result<Answer, GuestError>>> = Vec::with_capacity(config.nr_vcpus);
        for index in 0..config.nr_vcpus {
            let seat = seats.of(index, config);
            works.push(work(K::new_cpu(&vm, config, seats.counts(index))?, index, seat, config, &region, &signals));
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
            populate_here: Machine::populate_here::<K>,
            _overhead: overhead,
        };
        machine.boot(config, tables)?;
        Ok(machine)
    }

    /// Pins the threads and turns paging on.
    fn boot(&self, config: &MachineConfig, tables: Option<GuestTables>) -> Result<(), MachineError> {
        if config.pins.is_some() || !self.seats.nodes().is_one() {
            for answer in self.do_job(VcpuJob::Pin)?.0 {
                if let Answer::Pinned(result) = answer {
                    result?;
                }
            }
        }
        if let Some(cpu) = config.pins.as_ref().and_then(|pins| pins.main) {
            topology::pin_current_thread(cpu)?;
        }
        if let Some(tables) = tables {
            for answer in self.do_job(VcpuJob::BuildTables(tables))?.0 {
                if let Answer::Root(root) = answer {
                    self.do_job(VcpuJob::TurnPagingOn { root })?;
                }
            }
        }
        Ok(())
    }

    fn do_job(&self, job: VcpuJob) -> Result<(Vec<Answer>, Duration), MachineError> {
        self.crew.post(job)?;
        answers(self.crew.finish())
    }

    /// Runs `program` once on all virtual CPUs: each does one pass over its pages.
    ///
    /// # Errors
    /// The program is refused, another one is running, or a virtual CPU failed.
    pub fn run(&self, program: Program) -> Result<RunReport, MachineError> {
        self.post(program, Repeat::Once, Parts::Own)?;
        report(self.crew.finish())
    }

    /// Starts `program` on all virtual CPUs: each does pass after pass over its pages until it is
    /// stopped.
    ///
    /// # Errors
    /// The program is refused, or another one is running.
    pub fn start(&self, program: Program) -> Result<Running<'_, F>, MachineError> {
        self.post(program, Repeat::UntilStopped, Parts::Own)?;
        Ok(Running { machine: self, is_collected: false })
    }

    fn post(&self, program: Program, repeat: Repeat, parts: Parts) -> Result<(), MachineError> {
        self.post_job(&program, VcpuJob::Run { program, repeat, parts })
    }

    /// Posts the job that begins `program`, or prepares it.
    fn post_job(&self, program: &Program, job: VcpuJob) -> Result<(), MachineError> {
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

    /// The memslots of the test region, in its order.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Sets the flags of all memslots of the test region to `flags`: switches dirty logging on and
    /// off.
    ///
    /// # Errors
    /// The engine's; the memslots before the one that failed have the new flags.
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

    /// The flush method in use.
    pub fn flush_method(&self) -> FlushMethod {
        self.flush_domain.method()
    }

    /// Reads the first 8 bytes of page number `page` of the test region from the host's side,
    /// without the engine; `None` beyond its end.
    pub fn peek(&self, page: u64) -> Option<u64> {
        self.region.peek(page)
    }

    /// Whether the virtual CPUs were stopped, or one of them has failed and stopped all.
    pub fn has_stopped(&self) -> bool {
        // Relaxed: the exact moment does not matter.
        self.signals.stop.load(Ordering::Relaxed)
    }

    /// The progress of the virtual CPUs, which can be read also after the machine is dropped.
    pub fn progress(&self) -> Progress {
        Progress(Arc::clone(&self.signals))
    }
}

impl Machine<Npt> {
    /// With the shadow paging of the configuration, or the default.
    pub(crate) fn with_shadow_paging(config: &MachineConfig) -> Result<Machine<Npt>, MachineError> {
        Machine::with_hardware(&Shadow(config.shadow.unwrap_or_default()), config, config.nodes.map()?)
    }
}

/// The progress of the virtual CPUs of a machine.
#[derive(Clone, Debug)]
pub struct Progress(Arc<Signals>);

impl Progress {
    /// About how many touches virtual CPU `vcpu` has done so far; 0 if there is none.
    pub fn nr_touches(&self, vcpu: usize) -> u64 {
        // Relaxed: the exact moment does not matter.
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
) -> Work<VcpuJob, Result<Answer, GuestError>> {
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

/// All answers, or the first failure. A virtual CPU's own error goes before a panic, which may be
/// its consequence.
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
    /// Begins the next round, which all later writes carry. Returns it. The last possible round
    /// stays.
    pub fn advance_round(&self) -> u64 {
        let next = |round: u64| Some((round + 1).min(ROUND_END - 1));
        // Release: a thread that writes the round observes what the caller did before.
        match self.machine.signals.round.fetch_update(Ordering::AcqRel, Ordering::Acquire, next) {
            Ok(round) | Err(round) => (round + 1).min(ROUND_END - 1),
        }
    }

    /// Stops the virtual CPUs and waits for them. Passes that are under way stay unfinished.
    ///
    /// # Errors
    /// A virtual CPU failed.
    pub fn stop(mut self) -> Result<RunReport, MachineError> {
        self.is_collected = true;
        report(self.collect())
    }

    fn collect(&self) -> Finished<Result<Answer, GuestError>> {
        // Relaxed: the exact moment does not matter.
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
        // A leaked `Running` would let the threads run for ever.
        self.signals.stop.store(true, Ordering::Relaxed);
    }
}
