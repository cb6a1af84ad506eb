//! Demand paging: guests run while their memory is still elsewhere, and each page comes when it is
//! touched, as in a VM that is migrated or restored. Userfault exits exist for this.
//!
//! The setup is that of KVM's demand paging test: a region of `nr_vcpus * bytes_per_vcpu` in one
//! memslot, of which each vCPU touches its own part once, page by page (or all of them touch all).
//! The modes ([`PagingMode`]) differ in what detects a missing page, and what delivers it.
//! Transparent huge pages are off, unless the configuration asks for such memory and there is no
//! userfaultfd, which serves pages of 4 KiB.
//!
//! # Implementation
//! - [`paging`](crate::paging) brings the pages.
//! - `scheduler.rs`: a thread runs its vCPUs, many or one, and goes on with others while pages are
//!   on their way.
//! - All contents are verified. A touch returns the first word that the guest found in the page,
//!   and writes another; whole pages are compared afterwards ([`DemandPaging::verify`]).
//! - A run that fails leaves its vCPUs where they were. [`DemandPaging::run`] goes on from there
//!   with another resolver, and fetches the pages that have not come.
//! - It is otherwise in the modes `missing` and `minor`: to release the threads that wait in the
//!   kernel, the memory is abandoned ([`Backing::is_lost`]), and such a VM can only be torn down.
//!   The same holds for the modes with both, if it is a reader that fails.

mod config;
mod error;
mod lane;
mod logging;
mod report;
mod scheduler;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_failures;

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use slat::dirty::DirtyTracking;
use slat::slots::{MemoryAttributes, UserfaultBitmap, UserfaultWords};
use slat::{Gfn, MemoryRegion, MemoryRegionFlags, PAGE_SIZE, Vm};
use slat_pager::source::pattern::WORDS_PER_PAGE;

pub use crate::paging::{Copier, ServeConfig, ServeError, VcpuError, serve_rings};
pub use config::{
    DemandPagingConfig, Descriptors, DirtyLogging, PagedBacking, PagingConfigError, PagingMode, VcpuThreads,
};
pub use error::DemandPagingError;
pub use lane::VcpuPaging;
pub use logging::DirtyRounds;
pub use report::{DemandPagingReport, GuestMemfdOrigin};

use config::PagedLayout;
use lane::Lane;
use scheduler::{Ended, PagingJob, Scheduler};

use crate::hardware::commit::{FlushDomain, Port};
use crate::hardware::cpu::Cpu;
use crate::hardware::walk::{HardwareFormat, Processor};
use crate::linux::topology;
use crate::memory::{Backing, BackingKind, GuestMemfd, Reserved};
use crate::paging::{
    Arrivals, Delivery, DeliveryConfig, EngineBitmap, FetchFrom, Filler, OpenSource, Readers, RegisterMode, RingPages,
    SharedBitmap, SharedMemoryFile, Userfaultfds, VcpusExit, copy_rest, start_readers,
};
use crate::vm::guest::{self, Sharing};
use crate::vm::host::{BackingSlice, MachineHost};
use crate::vm::machine::crew::{Crew, Work};
use crate::vm::machine::{REGION_GPA, enough_tables, overhead_bytes};

/// The number of the memslot that has the memory.
pub const SLOT: u32 = 1;

/// Entries of each vCPU's ring: a vCPU waits for one page at a time.
const RING_ENTRIES: u32 = 4;

/// The limit of every wait of the rings.
const RING_TIMEOUT: Duration = Duration::from_secs(10);

/// What delivers the pages in a run.
#[derive(Clone, Debug)]
pub enum PagesFrom {
    /// Nothing: the mode needs no resolver, or all pages are there.
    None,
    /// This process: the vCPUs' threads, the readers of a userfaultfd, or, with rings, a thread.
    /// Each has requests of its own.
    Source(OpenSource),
    /// A resolver that is attached to the rings ([`DemandPaging::delivery`]).
    Elsewhere,
}

/// A VM whose memory arrives page by page, on second-stage page tables of format `F`.
pub struct DemandPaging<F: HardwareFormat> {
    // First, so that the threads end before the things that they use are dropped.
    crew: Option<Crew<PagingJob, Vec<Ended>>>,
    /// The vCPUs, until their threads take them.
    lanes: Vec<Lane<F>>,
    vm: Arc<Vm<MachineHost, F>>,
    memory: Backing,
    arrivals: Arc<Arrivals>,
    /// Puts pages in place; `None` if this process fills no pages.
    filler: Option<Arc<Filler>>,
    descriptors: Option<Userfaultfds>,
    delivery: Option<Delivery>,
    config: DemandPagingConfig,
    layout: PagedLayout,
    /// The word that the vCPUs write.
    round: u64,
    /// Whether all vCPUs have touched all of their pages in this round.
    is_finished: bool,
    nr_copied: u64,
    _overhead: Reserved,
}

impl<F: HardwareFormat> fmt::Debug for DemandPaging<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DemandPaging").field("format", &F::NAME).field("config", &self.config).finish_non_exhaustive()
    }
}

impl<F: HardwareFormat> DemandPaging<F> {
    /// Makes the VM and its memory, all of it missing, unless the mode is [`PagingMode::None`].
    ///
    /// # Errors
    /// [`DemandPagingError`]: what is wrong with the configuration, or what could not be made.
    pub fn new(config: &DemandPagingConfig) -> Result<DemandPaging<F>, DemandPagingError> {
        let layout = config.layout()?;
        if let Some(cpu) = config.pins.as_ref().and_then(|pins| pins.main) {
            topology::pin_current_thread(cpu)?;
        }
        let flush_domain = Arc::new(match config.flush_method {
            Some(method) => FlushDomain::with_method(method)?,
            None => FlushDomain::new(),
        });
        let max_tables = config.max_tables.unwrap_or_else(|| enough_tables(config.nr_vcpus, layout.nr_pages));
        let vm =
            Arc::new(Vm::new(MachineHost::new(flush_domain, max_tables)?.with_instructions_of::<F>(), config.engine)?);
        let overhead = Reserved::new(overhead_bytes(config.nr_vcpus, layout.nr_pages))?;
        let size_bytes = layout.nr_pages << Gfn::SHIFT;
        let memory = match config.backing {
            PagedBacking::Memory(kind) => {
                let memory = Backing::new(kind, size_bytes)?;
                if kind != BackingKind::AnonymousThp || config.mode.uses_userfaultfd() {
                    memory.frames().without_huge_pages();
                }
                memory
            }
            PagedBacking::GuestMemfd => Backing::of_guest_memfd(Arc::new(GuestMemfd::new(size_bytes, None)?)),
        };
        // The pages of a file are in it from the beginning, and only the guest's mapping lacks
        // them; but to a userfaultfd a page that is in the file is not missing.
        let is_empty = matches!(config.mode, PagingMode::Missing | PagingMode::MissingUserfault);
        let alias = if memory.file().is_some() && !is_empty { Some(memory.alias()?) } else { None };
        if let Some(alias) = &alias {
            alias.populate()?;
        }

        let nr_blocks = layout.nr_pages / layout.block_pages;
        let mut delivery = None;
        let words: Arc<dyn UserfaultWords> = if config.mode == PagingMode::UserfaultRing {
            let bitmap = Arc::new(SharedBitmap::new(nr_blocks).map_err(boxed)?);
            delivery = Some((Arc::clone(&bitmap), shared_file(&memory, size_bytes)?));
            Arc::new(EngineBitmap(bitmap))
        } else {
            let new = || slat::baselines::AtomicU64::new(0);
            Arc::new((0..nr_blocks.div_ceil(u64::from(u64::BITS))).map(|_| new()).collect::<Vec<_>>())
        };
        let arrivals = Arc::new(Arrivals::new(nr_blocks, words));
        let register_mode = if config.mode.is_minor() { RegisterMode::Minor } else { RegisterMode::Missing };
        let descriptors = if layout.nr_descriptors > 0 {
            Some(Userfaultfds::register(&memory, register_mode, layout.nr_descriptors)?)
        } else {
            None
        };
        let filler = match (&descriptors, config.mode.is_minor(), alias) {
            _ if matches!(config.mode, PagingMode::None | PagingMode::UserfaultRing) => None,
            (Some(descriptors), true, Some(alias)) => Some(Filler::Continue(alias, descriptors.clone())),
            (Some(descriptors), ..) => Some(Filler::Copy(descriptors.clone())),
            (None, ..) => Some(match memory.guest_memfd() {
                Some(private) => Filler::Install(Arc::clone(private)),
                None => Filler::InPlace(memory.clone()),
            }),
        };
        let mut paging = DemandPaging {
            crew: None,
            lanes: Vec::with_capacity(config.nr_vcpus),
            vm,
            memory,
            arrivals,
            filler: filler.map(Arc::new),
            descriptors,
            delivery: None,
            config: config.clone(),
            layout,
            round: 1,
            is_finished: false,
            nr_copied: 0,
            _overhead: overhead,
        };
        paging.make_slot()?;
        paging.make_lanes()?;
        paging.delivery = match delivery {
            Some((bitmap, file)) => Some(paging.make_delivery(bitmap, file)?),
            None => None,
        };
        Ok(paging)
    }

    fn make_slot(&self) -> Result<(), DemandPagingError> {
        let size_bytes = self.layout.nr_pages << Gfn::SHIFT;
        let region = BackingSlice::region(SLOT, REGION_GPA, &self.memory);
        let (flags, userfault_bitmap) = (self.flags(), self.bitmap());
        self.vm.set_user_memory_region(MemoryRegion { flags, userfault_bitmap, ..region })?;
        if self.memory.guest_memfd().is_some() {
            self.vm.set_memory_attributes(REGION_GPA, size_bytes, MemoryAttributes::PRIVATE)?;
        }
        Ok(())
    }

    /// The flags that the slot is made with.
    pub fn flags(&self) -> MemoryRegionFlags {
        let mut flags = MemoryRegionFlags::empty();
        flags.set(MemoryRegionFlags::USERFAULT, self.config.mode.uses_bitmap());
        flags.set(MemoryRegionFlags::LOG_DIRTY_PAGES, self.config.dirty_logging == DirtyLogging::On);
        flags.set(MemoryRegionFlags::GUEST_MEMFD, self.memory.guest_memfd().is_some());
        flags
    }

    /// The userfault bitmap, if vCPUs exit. Only for reading: setting a bit marks a page as missing
    /// that has been delivered, and no side delivers it again.
    pub fn bitmap(&self) -> Option<UserfaultBitmap> {
        let uses = self.config.mode.uses_bitmap();
        uses.then(|| UserfaultBitmap::new(self.arrivals.words(), self.config.granularity))
    }

    fn make_lanes(&mut self) -> Result<(), DemandPagingError> {
        let contents = if self.config.mode == PagingMode::None { None } else { Some(self.config.contents) };
        for vcpu in 0..self.config.nr_vcpus {
            let host = self.vm.host();
            let port = Port::new(host.flush_domain());
            let cpu = Cpu::new(self.vm.create_vcpu()?, port, 1, self.vm.root(), self.config.tlb);
            let cpu = cpu.with_processor(Processor::of_vm(&self.vm, &self.config.engine.hardware));
            let cpu = match self.config.engine.dirty_tracking {
                DirtyTracking::PageModificationLog => cpu.with_modification_log(host.modification_logs().add()),
                DirtyTracking::WriteProtect | DirtyTracking::WriteProtectLeaves | DirtyTracking::DirtyBit => cpu,
            };
            cpu.exit_guest_mode();
            let (first_page, nr_pages) = match self.config.sharing {
                Sharing::Partitioned => (vcpu as u64 * self.layout.pages_per_vcpu, self.layout.pages_per_vcpu),
                Sharing::Overlapping => (0, self.layout.nr_pages),
            };
            self.lanes.push(Lane::new(vcpu, cpu, first_page, nr_pages, contents));
        }
        Ok(())
    }

    /// The rings, with as many waiters as there will be threads: the answers of a resolver
    /// elsewhere have a latency.
    fn make_delivery(&self, bitmap: Arc<SharedBitmap>, file: SharedMemoryFile) -> Result<Delivery, DemandPagingError> {
        let nr_vcpus = self.config.nr_vcpus as u32;
        Delivery::new(DeliveryConfig {
            nr_waiters: self.nr_threads_with_rings() as u32,
            ring_entries: RING_ENTRIES,
            page_bytes: self.config.granularity.size_bytes(),
            memory: Some(file),
            timeout: RING_TIMEOUT,
            ..DeliveryConfig::new(nr_vcpus, bitmap)
        })
        .map_err(boxed)
    }

    fn nr_threads_with_rings(&self) -> usize {
        self.config.nr_vcpu_threads(true)
    }

    /// Starts the threads, which stay; thread v modulo their number runs vCPU v.
    fn start_threads(&mut self, has_latency: bool) -> Result<(), DemandPagingError> {
        // No vCPUs: an earlier run could not start the threads, and they are gone.
        if self.crew.is_some() || self.lanes.is_empty() {
            return Ok(());
        }
        let nr_threads = if self.delivery.is_some() {
            self.nr_threads_with_rings()
        } else {
            self.config.nr_vcpu_threads(has_latency)
        };
        let mut lanes: Vec<Vec<Lane<F>>> = (0..nr_threads).map(|_| Vec::new()).collect();
        for (index, lane) in std::mem::take(&mut self.lanes).into_iter().enumerate() {
            lanes[index % nr_threads].push(lane);
        }
        let mut works: Vec<Work<PagingJob, Vec<Ended>>> = Vec::with_capacity(nr_threads);
        for (thread, lanes) in lanes.into_iter().enumerate() {
            let rings = match &self.delivery {
                None => None,
                Some(delivery) => {
                    let ports = lanes.iter().map(|lane| delivery.take_port(lane.vcpu as u32));
                    let ports = ports.collect::<Result<Vec<_>, _>>().map_err(boxed)?;
                    let waiter = delivery.take_waiter(thread as u32).map_err(boxed)?;
                    Some(RingPages::new(ports, waiter, self.layout.block_pages))
                }
            };
            let pin = self.config.pins.as_ref().and_then(|pins| pins.vcpus.get(thread).copied());
            let mut scheduler = Scheduler::new(lanes, Arc::clone(&self.arrivals), rings, pin);
            works.push(Box::new(move |job| scheduler.work(job)));
        }
        self.crew = Some(Crew::start(works).map_err(|(_, source)| DemandPagingError::Thread(source))?);
        Ok(())
    }

    /// Lets the vCPUs touch all pages that they have not touched yet, while `resolver` delivers the
    /// missing ones.
    ///
    /// # Errors
    /// [`DemandPagingError::WrongResolver`]: nothing was done. [`DemandPagingError::Vcpus`]: the
    /// vCPUs that did not finish, and why; the [module](self) describes how to go on.
    /// [`DemandPagingError::Background`], and what could not be made.
    pub fn run(&mut self, resolver: PagesFrom) -> Result<DemandPagingReport, DemandPagingError> {
        self.run_job(None, &resolver)
    }

    /// Lets the vCPUs touch all pages once more, and write the next round's word into each.
    fn run_round(&mut self) -> Result<DemandPagingReport, DemandPagingError> {
        self.round += 1;
        self.is_finished = false;
        self.run_job(Some(self.round), &PagesFrom::None)
    }

    fn run_job(&mut self, round: Option<u64>, resolver: &PagesFrom) -> Result<DemandPagingReport, DemandPagingError> {
        let mode = self.config.mode;
        let wrong = |from| Err(DemandPagingError::WrongResolver { mode, from });
        let source = match resolver {
            PagesFrom::None if mode != PagingMode::None && self.arrivals.nr_there() < self.arrivals.nr_blocks() => {
                return wrong("from nowhere");
            }
            PagesFrom::Source(_) if mode == PagingMode::None => return wrong("from a source"),
            PagesFrom::Elsewhere if mode != PagingMode::UserfaultRing => return wrong("by rings"),
            PagesFrom::Source(source) => Some(source),
            PagesFrom::None | PagesFrom::Elsewhere => None,
        };
        self.start_threads(source.is_some_and(OpenSource::has_latency))?;
        let Some(crew) = &self.crew else { return wrong("without threads") };
        self.arrivals.begin();
        let from = match (source, &self.filler) {
            (Some(source), Some(filler)) => Some(FetchFrom {
                source: source.clone(),
                filler: Arc::clone(filler),
                block_pages: self.layout.block_pages,
            }),
            _ => None,
        };
        let readers = match (&from, &self.descriptors) {
            (Some(from), Some(descriptors)) => {
                let vcpus_exit = if mode.uses_bitmap() { VcpusExit::Yes } else { VcpusExit::No };
                let nr_readers = self.config.nr_readers;
                Some(start_readers(descriptors, nr_readers, from, &self.arrivals, vcpus_exit)?)
            }
            _ => None,
        };
        let job = PagingJob { round, from: from.clone().filter(|_| mode.vcpus_fetch()) };
        let arrivals = &self.arrivals;
        let mut background = None;
        let (finished, nr_copied) = std::thread::scope(|scope| {
            let copier = match (self.config.copier, &job.from) {
                (Some(copier), Some(from)) => Some(scope.spawn(move || copy_rest(copier, from, arrivals))),
                _ => None,
            };
            let ring_resolver = match (&self.delivery, source) {
                (Some(delivery), Some(source)) => {
                    let serve = ServeConfig {
                        source: source.clone(),
                        nr_threads: 1,
                        copier: self.config.copier,
                        timeout: RING_TIMEOUT,
                    };
                    let (ours, theirs) = UnixStream::pair().map_err(DemandPagingError::Thread)?;
                    let thread = scope.spawn(move || serve_rings(theirs, &serve));
                    if let Err(error) = delivery.attach(ours) {
                        return Err(boxed(error));
                    }
                    Some((delivery, thread))
                }
                _ => None,
            };
            crew.post(job.clone()).map_err(|_| DemandPagingError::Busy)?;
            let finished = crew.finish();
            if let Some((delivery, thread)) = ring_resolver {
                delivery.detach();
                if let Ok(Err(error)) = thread.join() {
                    background = Some(("resolver", VcpuError::Resolver { message: error.to_string() }));
                }
            }
            let nr_copied = match copier.map(std::thread::ScopedJoinHandle::join) {
                None => 0,
                Some(Ok(Ok(nr_copied))) => nr_copied,
                Some(Ok(Err(error))) => {
                    background = Some(("background copier", error));
                    0
                }
                Some(Err(panic)) => std::panic::resume_unwind(panic),
            };
            Ok((finished, nr_copied))
        })?;
        if let Some(Err(error)) = readers.map(Readers::stop) {
            background.get_or_insert(("readers of a userfaultfd", error));
        }
        if let Some(descriptors) = &self.descriptors {
            descriptors.wake_all();
        }
        self.nr_copied += nr_copied;
        let ended = report::ended(finished.endings)?;
        if let Some((thread, error)) = background {
            return Err(DemandPagingError::Background { thread, error });
        }
        if self.arrivals.nr_filled_twice() > 0 {
            return Err(DemandPagingError::FilledTwice { nr_pages: self.arrivals.nr_filled_twice() });
        }
        self.is_finished = true;
        Ok(report::report(self, finished.wall, ended))
    }

    /// Compares every byte of every page that is there. Returns how many pages. To be called
    /// between runs.
    ///
    /// # Errors
    /// [`DemandPagingError::WrongWord`]: the first word that is not what was sent, or what the
    /// guest has written since.
    pub fn verify(&self) -> Result<u64, DemandPagingError> {
        let contents = if self.config.mode == PagingMode::None { None } else { Some(self.config.contents) };
        let mut nr_verified = 0;
        for page in 0..self.layout.nr_pages {
            if contents.is_some() && self.arrivals.is_missing(page / self.layout.block_pages) {
                continue;
            }
            for index in 0..WORDS_PER_PAGE {
                let sent = contents.map_or(0, |contents| contents.word(page, index));
                let written = guest::value(self.round, page);
                let expected = if index == 0 && self.is_finished { written } else { sent };
                let found = match self.memory.guest_memfd() {
                    Some(private) => private.word(page, index),
                    None => self.memory.load(page * PAGE_SIZE + 8 * index as u64),
                }
                .unwrap_or(!expected);
                let is_in_between = index == 0 && !self.is_finished && found & guest::value(0, u64::MAX >> 24) == page;
                if found != expected && !is_in_between {
                    let offset_bytes = index * 8;
                    return Err(DemandPagingError::WrongWord { page, offset_bytes, found, expected });
                }
            }
            nr_verified += 1;
        }
        Ok(nr_verified)
    }

    /// The VM.
    pub fn vm(&self) -> &Arc<Vm<MachineHost, F>> {
        &self.vm
    }

    /// The memory.
    pub fn memory(&self) -> &Backing {
        &self.memory
    }

    /// The guest_memfd, if that is the memory.
    pub fn guest_memfd(&self) -> Option<&GuestMemfd> {
        self.memory.guest_memfd().map(|memory| &**memory)
    }

    /// The rings, in mode [`PagingMode::UserfaultRing`], for a resolver in another process.
    pub fn delivery(&self) -> Option<&Delivery> {
        self.delivery.as_ref()
    }

    /// Threads that run the vCPUs; 0 before the first run.
    pub fn nr_threads(&self) -> usize {
        self.crew.as_ref().map_or(0, Crew::nr_threads)
    }

    /// The size of the memory in pages.
    pub fn nr_pages(&self) -> u64 {
        self.layout.nr_pages
    }

    /// Pages that are there. All of them in mode [`PagingMode::None`].
    pub fn nr_there(&self) -> u64 {
        if self.config.mode == PagingMode::None {
            self.layout.nr_pages
        } else {
            self.arrivals.nr_there() * self.layout.block_pages
        }
    }
}

fn boxed(error: impl std::error::Error + Send + Sync + 'static) -> DemandPagingError {
    DemandPagingError::Delivery(Box::new(error))
}

/// The memory for a resolver to map.
fn shared_file(memory: &Backing, size_bytes: u64) -> Result<SharedMemoryFile, DemandPagingError> {
    let kind = memory.kind();
    let not_shared = || crate::memory::MemoryError::NotShared { kind };
    debug_assert_eq!(kind, BackingKind::Shmem, "see `PagedLayout`");
    let file: OwnedFd =
        memory.file().ok_or_else(not_shared)?.as_fd().try_clone_to_owned().map_err(DemandPagingError::Thread)?;
    Ok(SharedMemoryFile { file, offset_bytes: 0, size_bytes })
}
