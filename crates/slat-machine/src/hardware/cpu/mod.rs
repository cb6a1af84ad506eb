//! A software CPU: what the hardware of one virtual CPU does for an access, up to the fault that
//! the engine handles.
//!
//! # Implementation
//! One access is a loop: read the generation; if it is new, catch up with the flushes; look into
//! the TLB, else walk the page tables; do the access by a checked operation. If anything intervenes
//! (a flush, a lost race for an accessed bit, a fault that the engine has handled), the access
//! starts over. So it completes through one translation that was valid from its look-up to its side
//! effect, or not at all.
//!
//! With page-modification logging ([`Cpu::with_modification_log`]) the walk also fills the CPU's
//! log. When that is full, the CPU passes all of it to the handler, and the access starts over,
//! too.
//!
//! The TLB is always that of one generation, the one that the CPU has caught up with. It has no
//! translation of a flushed page from a walk before that flush. A walk under that generation adds
//! translations that hold for that generation. If a flush overtakes the walk, its result may be
//! stale when it is filled in. Nothing uses it: the checked operation fails, and the next turn of
//! the loop catches up with that flush, and drops the translation if it is in the flushed ranges.
//!
//! For the same reason a fill can check a format's rule of break before make
//! ([`CpuError::TlbConflict`]): what the walk found was in the page tables before the beginning of
//! any flush that the TLB has not caught up with. So if a translation of another size is cached for
//! the same page, no flush came between the two.
//!
//! A CPU of Arm or RISC-V has three caches, and keeps in each what it may: translations that
//! combine both stages (the TLB), faults of such (`kept`), and PTEs of the second stage by
//! themselves ([`PteCache`]), directory entries too. It repeats the fault of an access until the
//! page is flushed on all CPUs, or on this one at the end of the fault ([`Host::flush_local`]), by
//! the instructions for both kinds.

#![expect(unsafe_code, reason = "the CPU accesses guest memory through raw pointers")]

mod error;
mod kept;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_attributes;
#[cfg(test)]
mod tests_conflict;
#[cfg(test)]
mod tests_log;
#[cfg(test)]
mod tests_moves;
#[cfg(test)]
mod tests_strict;

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use slat::format::Format;
use slat::shadow::Gva;
use slat::{Access, Gfn, GfnRange, Gpa, Host, Hpa, Outcome, PageSize, Vcpu};

pub use self::error::CpuError;
use self::kept::{KeptFaults, take_local_flush};
pub use self::kept::{flush_local, invalidate_local};
use crate::hardware::commit::{Dropped, Generation, Port, Scope, Stale};
use crate::hardware::modification_log::ModificationLog;
use crate::hardware::tlb::{Context, Geometry, Rights, Tlb};
use crate::hardware::walk::cached::PteCache;
use crate::hardware::walk::guest::{self, GuestStop};
use crate::hardware::walk::{Fault, HardwareFormat, Mapping, Processor, Purpose, Stop, WalkMemory, Walker, page_size};
use crate::memory::numa::{WalkCounter, WalkReads};
use crate::memory::phys;

/// Faults on one access after which the CPU yields its time slice at each further one: another
/// thread delays it.
pub(crate) const PATIENT_FAULTS: u64 = 64;

/// Faults on one access after which the CPU fails. Each was answered with "run the guest again".
pub(crate) const STUCK_FAULTS: u64 = 1 << 22;

/// Handles second-stage faults: the engine's [`Vcpu`], or a test.
pub trait FaultHandler {
    /// Handles a second-stage fault, as the CPU reports it: see [`Vcpu::handle_fault`]. The engine
    /// needs its address and its access alone. Where the format needs it
    /// ([`Format::NEEDS_LOCAL_FLUSH`]), it ends with [`flush_local`].
    ///
    /// # Errors
    /// The engine's.
    fn handle_fault(&mut self, fault: Fault) -> Result<Outcome, slat::error::FaultError>;

    /// Takes the pages in the CPU's page-modification log, which is full: see
    /// [`Vcpu::log_modifications`]. The CPU has made all of them dirty, or may have tried to. A
    /// page may occur several times. A CPU without a log has none.
    fn log_modifications(&mut self, _written: &[Gpa]) {}
}

impl<H: Host, F: Format> FaultHandler for Vcpu<H, F> {
    fn handle_fault(&mut self, fault: Fault) -> Result<Outcome, slat::error::FaultError> {
        Vcpu::handle_fault(self, fault.gpa, fault.access)
    }

    fn log_modifications(&mut self, written: &[Gpa]) {
        Vcpu::log_modifications(self, written);
    }
}

/// Whether the guest has paging on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Paging {
    /// Off: its addresses are guest-physical.
    #[default]
    Off,
    /// On, in two dimensions: its addresses go through its own page tables and then through the
    /// second stage.
    TwoDimensional,
}

counters! {
    /// The counts of a CPU.
    pub struct CpuCounters {
        /// Accesses that completed.
        nr_accesses: u64,
        /// Those of them that were reads.
        nr_reads: u64,
        /// Look-ups for which the TLB had no usable entry.
        nr_tlb_misses: u64,
        /// Walks of the page tables (a two-dimensional walk is one).
        nr_walks: u64,
        /// Second-stage faults that the engine handled.
        nr_faults: u64,
        /// Accesses started over because the translation changed meanwhile.
        nr_restarts: u64,
        /// Flushes that the CPU has caught up with.
        nr_flushes_seen: u64,
        /// Times that it dropped its whole TLB because records were missing, or had too many
        /// ranges.
        nr_full_drops: u64,
        /// Translations that it dropped from its TLB for flushes.
        nr_translations_dropped: u64,
        /// Entries that it wrote into its page-modification log.
        nr_pages_logged: u64,
        /// Times that the log was full: exits.
        nr_log_full_exits: u64,
        /// Second-stage PTEs that its walks have read; counted where there are several nodes.
        walk_reads: WalkReads,
    }
}

/// A software CPU whose second-stage page tables have format `F` and whose faults `V` handles.
#[derive(Debug)]
pub struct Cpu<V, F> {
    handler: V,
    port: Port,
    log: Option<ModificationLog>,
    counter: Option<WalkCounter>,
    tlb: Tlb,
    kept: KeptFaults,
    /// PTEs of the second stage; `None` where the format caches none.
    cached: Option<PteCache>,
    /// The generation of the caches.
    caught_up: Generation,
    root: Hpa,
    processor: Processor,
    context: Context,
    paging: Paging,
    cr3: u64,
    /// Faults on one access after which it fails: [`STUCK_FAULTS`], or fewer in a test.
    max_faults: u64,
    /// Where registers of devices are.
    devices: Option<Arc<[Range<u64>]>>,
    counters: CpuCounters,
    _format: PhantomData<fn() -> F>,
}

impl<V: FaultHandler, F: HardwareFormat> Cpu<V, F> {
    /// Makes a CPU of VM `vm` (a tag for the TLB), paging off, with the second-stage root at `root`
    /// (nCR3 or EPTP).
    pub fn new(handler: V, port: Port, vm: u16, root: Hpa, geometry: Geometry) -> Cpu<V, F> {
        Cpu {
            handler,
            caught_up: port.generation(),
            port,
            log: None,
            counter: None,
            tlb: Tlb::new(geometry),
            kept: KeptFaults::default(),
            cached: F::CACHES_PTES.then(PteCache::default),
            root,
            processor: Processor::of::<F>(),
            context: Context { vm, pcid: Context::UNPAGED },
            paging: Paging::Off,
            cr3: 0,
            max_faults: STUCK_FAULTS,
            devices: None,
            counters: CpuCounters::default(),
            _format: PhantomData,
        }
    }

    /// Loads what controls its walks. Without it, that is what every processor of the format has.
    #[must_use]
    pub fn with_processor(self, processor: Processor) -> Cpu<V, F> {
        Cpu { processor, ..self }
    }

    /// Makes it report accesses to `devices`, ranges of host-physical addresses, that are not those
    /// of a device ([`CpuError::CachedDevice`]).
    #[must_use]
    pub fn with_devices(self, devices: Arc<[Range<u64>]>) -> Cpu<V, F> {
        Cpu { devices: Some(devices), ..self }
    }

    /// Turns page-modification logging on, into `log`. For a format without it, the log stays empty
    /// ([`HardwareFormat::LOGS_MODIFICATIONS`]).
    #[must_use]
    pub fn with_modification_log(self, log: ModificationLog) -> Cpu<V, F> {
        Cpu { log: Some(log), ..self }
    }

    /// Has `counter`, if any, count its walks. The CPU then is on the node of the thread that runs
    /// it, and caches no PTEs: what is counted is what a walk has to read.
    #[must_use]
    pub fn with_walk_counter(self, counter: Option<WalkCounter>) -> Cpu<V, F> {
        match counter {
            Some(counter) => Cpu { counter: Some(counter), cached: None, ..self },
            None => self,
        }
    }

    /// The counts so far.
    pub fn counters(&self) -> CpuCounters {
        CpuCounters {
            walk_reads: self.counter.as_ref().map_or(WalkReads::default(), WalkCounter::reads),
            nr_tlb_misses: self.tlb.nr_misses(),
            nr_pages_logged: self.log.as_ref().map_or(0, ModificationLog::nr_logged),
            ..self.counters
        }
    }

    /// The CPU makes no access for a while: until the next one, flushes ignore it, as a hypervisor
    /// sends no interrupt to a CPU that does not run its guest.
    pub fn exit_guest_mode(&self) {
        self.port.exit_guest_mode();
    }

    /// The handler of second-stage faults.
    pub fn handler(&mut self) -> &mut V {
        &mut self.handler
    }

    /// Turns the guest's paging on or off (CR0.PG); drops the translations of the current context,
    /// as hardware does.
    pub fn set_paging(&mut self, paging: Paging) {
        self.drop_context(self.context);
        self.paging = paging;
        self.context.pcid = match paging {
            Paging::Off => Context::UNPAGED,
            Paging::TwoDimensional => (self.cr3 & CR3_PCID) as u16,
        };
    }

    /// Writes CR3 with CR4.PCIDE set: the address of the top table, the PCID in bits 11 to 0, and
    /// bit 63 to keep the translations of that PCID (Intel SDM vol. 3A, "Operations that invalidate
    /// TLBs and paging-structure caches").
    ///
    /// # Errors
    /// [`CpuError::BadCr3`] if address bits beyond the guest's are set.
    pub fn load_cr3(&mut self, value: u64) -> Result<(), CpuError> {
        if value & !(CR3_KEEP | cr3_address::<F>() | CR3_PCID) != 0 {
            return Err(CpuError::BadCr3 { value });
        }
        self.cr3 = value & !CR3_KEEP;
        let pcid = (value & CR3_PCID) as u16;
        if value & CR3_KEEP == 0 {
            self.drop_context(Context { pcid, ..self.context });
        }
        if self.paging == Paging::TwoDimensional {
            self.context.pcid = pcid;
        }
        Ok(())
    }

    /// Reads the 8 bytes at `gva` (a guest-physical address while paging is off).
    ///
    /// # Errors
    /// [`CpuError`]: nothing was read.
    #[inline]
    pub fn read(&mut self, gva: Gva) -> Result<u64, CpuError> {
        self.access(gva, Access::Read, |port, generation, at| {
            // SAFETY: see `access`.
            unsafe { port.load_u64(generation, at) }
        })
    }

    /// Fetches the 8 bytes at `gva` to execute them, in supervisor mode with [`Access::Execute`]
    /// and in user mode with [`Access::ExecuteUser`].
    ///
    /// # Errors
    /// [`CpuError`]: nothing was executed.
    pub fn fetch(&mut self, gva: Gva, access: Access) -> Result<u64, CpuError> {
        debug_assert!(matches!(access, Access::Execute | Access::ExecuteUser), "{access:?} is no fetch");
        self.access(gva, access, |port, generation, at| {
            // SAFETY: see `access`.
            unsafe { port.load_u64(generation, at) }
        })
    }

    /// Writes the 8 bytes at `gva` (a guest-physical address while paging is off).
    ///
    /// # Errors
    /// [`CpuError`]: nothing was written.
    #[inline]
    pub fn write(&mut self, gva: Gva, value: u64) -> Result<(), CpuError> {
        self.access(gva, Access::Write, |port, generation, at| {
            // SAFETY: see `access`.
            unsafe { port.store_u64(generation, at, value) }
        })
    }

    /// Writes the 8 bytes at `gva` and returns what they were before, atomically (XCHG).
    ///
    /// # Errors
    /// [`CpuError`]: nothing was written.
    #[inline]
    pub fn exchange(&mut self, gva: Gva, value: u64) -> Result<u64, CpuError> {
        self.access(gva, Access::Write, |port, generation, at| {
            // SAFETY: see `access`.
            unsafe { port.exchange_u64(generation, at, value) }
        })
    }

    /// Does `operation` at the memory behind `gva`.
    ///
    /// It is called with a generation and a pointer that was looked up after the generation was
    /// read. The pointer is aligned, because `gva` is and pages are. It is valid as long as the
    /// generation is current: the engine maps only frames that the host resolved, and flushes
    /// before a frame is freed.
    #[inline]
    fn access<T>(
        &mut self,
        gva: Gva,
        access: Access,
        operation: impl Fn(&Port, Generation, *mut u64) -> Result<T, Stale>,
    ) -> Result<T, CpuError> {
        if !gva.0.is_multiple_of(8) {
            return Err(CpuError::Unaligned { gva });
        }
        self.port.enter_guest_mode();
        let mut nr_faults = 0;
        loop {
            let generation = self.port.generation();
            if generation != self.caught_up {
                self.catch_up(generation);
            }
            let hit = match access {
                Access::Write => self.tlb.lookup_write(self.context, gva.0),
                Access::Read => self.tlb.lookup_read(self.context, gva.0),
                Access::Execute => self.tlb.lookup(self.context, gva.0, Rights::EXECUTE),
                Access::ExecuteUser => self.tlb.lookup(self.context, gva.0, Rights::EXECUTE_USER),
            };
            let hpa = match hit {
                Some(hpa) => hpa,
                None => match self.miss(gva, access, generation, &mut nr_faults)? {
                    Some(hpa) => hpa,
                    None => continue,
                },
            };
            let Some(at) = phys::pointer_to::<u64>(hpa) else {
                return Err(CpuError::NoMemory { gpa: Gpa(gva.0), hpa });
            };
            match operation(&self.port, generation, at) {
                Ok(value) => {
                    self.counters.nr_accesses += 1;
                    self.counters.nr_reads += u64::from(access == Access::Read);
                    return Ok(value);
                }
                Err(Stale) => self.counters.nr_restarts += 1,
            }
        }
    }

    /// Drops what was flushed since the CPU last caught up, until `generation`.
    #[cold]
    #[inline(never)]
    fn catch_up(&mut self, generation: Generation) {
        self.counters.nr_flushes_seen += generation.nr_flushes_since(self.caught_up);
        self.counters.nr_translations_dropped += match self.port.flushed_since(self.caught_up, generation) {
            Some(flushed) => flushed.as_slice().iter().map(|&dropped| self.invalidate(dropped)).sum(),
            None => {
                self.counters.nr_full_drops += 1;
                let range = GfnRange { start: Gfn(0), end: Gfn(u64::MAX) };
                self.invalidate(Dropped { scope: Scope::All, range })
            }
        };
        self.caught_up = generation;
    }

    /// Drops what an instruction names. Returns the number of translations among it.
    fn invalidate(&mut self, Dropped { scope, range }: Dropped) -> u64 {
        if let Some(cached) = &self.cached {
            cached.drop_range(scope, range);
        }
        match scope {
            Scope::All | Scope::Leaves => {
                self.kept.drop_range(range);
                self.tlb.drop_range(range)
            }
            Scope::SecondStage => 0,
            Scope::Combined => {
                self.kept.clear();
                self.tlb.clear()
            }
        }
    }

    /// Drops what a guest's flush of an address space does: translations and faults of it.
    fn drop_context(&mut self, context: Context) {
        self.kept.drop_context(context);
        self.tlb.invalidate_context(context);
    }

    /// Walks; fills the TLB, or has the fault handled. `None`: start over.
    #[inline(never)]
    fn miss(
        &mut self,
        gva: Gva,
        access: Access,
        generation: Generation,
        nr_faults: &mut u64,
    ) -> Result<Option<Hpa>, CpuError> {
        let found = match self.kept.find(self.context, gva.0, access) {
            Some(fault) => Err(GuestStop::SecondStage(Stop::Fault(fault))),
            None => {
                self.counters.nr_walks += 1;
                self.walk(gva, access, generation, self.cached.as_ref())
            }
        };
        if F::HAS_TLB_CONFLICTS && self.paging == Paging::Off {
            // What is cached hides what was made since, but hardware may walk at any time, also for
            // another access.
            let walked = if self.cached.is_some() { self.walk(gva, Access::Read, generation, None) } else { found };
            if let Ok(Mapping { gpa, size: walked, .. }) = walked
                && let Some(cached) = self.other_size(gva, gpa, walked)
            {
                return Err(CpuError::TlbConflict { gpa, cached, walked });
            }
        }
        let stop = match found {
            Ok(mapping) => {
                debug_assert_eq!(generation, self.caught_up, "a fill is of the TLB's generation");
                if let Some(error) = self.misused_device(mapping, generation) {
                    return error.map_or(Ok(None), Err);
                }
                let rights = Rights::from(mapping.writes).and(mapping.fetches);
                self.tlb.fill(self.context, gva.0, mapping.gpa, mapping.size, mapping.hpa, rights);
                return Ok(Some(mapping.hpa));
            }
            Err(stop) => stop,
        };
        // A walk that a flush has overtaken may have read half of one state and half of another.
        if !self.port.is_current(generation) || stop == GuestStop::SecondStage(Stop::Restart) {
            self.counters.nr_restarts += 1;
            return Ok(None);
        }
        match stop {
            GuestStop::SecondStage(Stop::Fault(fault)) => {
                *nr_faults += 1;
                self.counters.nr_faults += 1;
                if *nr_faults > self.max_faults {
                    return Err(CpuError::Stuck { gva, nr_faults: *nr_faults });
                }
                if *nr_faults > PATIENT_FAULTS {
                    std::thread::yield_now();
                }
                if F::keeps(fault) {
                    self.kept.keep(self.context, gva.0, fault);
                }
                // A request that another CPU's fault on this thread has left is not for this CPU.
                let _ = take_local_flush();
                let outcome = self.handler.handle_fault(fault);
                for dropped in take_local_flush() {
                    self.invalidate(dropped);
                }
                match outcome? {
                    Outcome::Resume => Ok(None),
                    Outcome::Exit(exit) => Err(exit.into()),
                }
            }
            GuestStop::SecondStage(Stop::Misconfigured(misconfiguration)) => {
                Err(CpuError::Misconfigured(misconfiguration))
            }
            GuestStop::SecondStage(Stop::TlbConflict { gpa, cached, walked }) => {
                Err(CpuError::TlbConflict { gpa, cached, walked })
            }
            GuestStop::SecondStage(Stop::NoMemory { gpa, hpa }) => Err(CpuError::NoMemory { gpa, hpa }),
            GuestStop::SecondStage(Stop::LogFull(_)) => {
                self.counters.nr_log_full_exits += 1;
                if let Some(log) = &self.log {
                    log.empty(&mut |written| self.handler.log_modifications(written));
                }
                Ok(None)
            }
            // Handled above.
            GuestStop::SecondStage(Stop::Restart) => Ok(None),
            GuestStop::Guest(fault) => Err(CpuError::Guest(fault)),
        }
    }

    /// Whether `mapping`, the result of a walk, is of a device and not as for one: the error, or
    /// `None` if a flush has overtaken the walk, which starts over.
    fn misused_device(&self, mapping: Mapping, generation: Generation) -> Option<Option<CpuError>> {
        let Mapping { gpa, hpa, memory, .. } = mapping;
        let is_device = self.devices.as_ref().is_some_and(|devices| devices.iter().any(|range| range.contains(&hpa.0)));
        if !is_device || memory.suits_devices() {
            return None;
        }
        Some(self.port.is_current(generation).then_some(CpuError::CachedDevice { gpa, hpa, memory }))
    }

    /// The size of a cached translation or PTE of a part of the page that was walked to, if it is
    /// another.
    fn other_size(&self, gva: Gva, gpa: Gpa, walked: PageSize) -> Option<PageSize> {
        let other_leaf = || self.cached.as_ref()?.other_leaf(gpa, walked.level().0).map(page_size);
        self.tlb.other_size(self.context, gva.0, walked).or_else(other_leaf)
    }

    fn walk(
        &self,
        gva: Gva,
        access: Access,
        generation: Generation,
        cached: Option<&PteCache>,
    ) -> Result<Mapping, GuestStop> {
        match &self.counter {
            None => self.walk_counting(gva, access, generation, cached, ()),
            Some(counter) => {
                counter.begin_walk();
                self.walk_counting(gva, access, generation, cached, counter)
            }
        }
    }

    fn walk_counting<C: WalkMemory>(
        &self,
        gva: Gva,
        access: Access,
        generation: Generation,
        cached: Option<&PteCache>,
        memory: C,
    ) -> Result<Mapping, GuestStop> {
        let (root, processor, log) = (self.root, self.processor, self.log.as_ref());
        let walker = Walker { port: &self.port, generation, root, processor, cached, log, memory };
        match self.paging {
            Paging::Off => Ok(F::walk(walker, Gpa(gva.0), access, Purpose::Data)?),
            Paging::TwoDimensional => {
                let table = Gpa(self.cr3 & cr3_address::<F>());
                guest::walk::<F, C>(walker, table, gva, access)
            }
        }
    }
}

/// Bits 11 to 0 of CR3: the process-context identifier.
const CR3_PCID: u64 = 0xfff;
/// Address bits of CR3. No x86 has more than 52 (Intel SDM vol. 3A, 5.5).
const fn cr3_address<F: HardwareFormat>() -> u64 {
    ((1 << F::GUEST_PHYSICAL_BITS) - 1) & ((1 << 52) - 1) & !CR3_PCID
}
/// Bit 63 of a value written to CR3: do not invalidate.
pub(crate) const CR3_KEEP: u64 = 1 << 63;
