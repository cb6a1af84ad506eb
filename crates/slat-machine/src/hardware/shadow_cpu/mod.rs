//! A software CPU of hardware without a second stage: it walks one kind of page tables, the *shadow
//! page tables* that the hypervisor keeps in place of the guest's own, and exits for everything
//! that could make the two differ.
//!
//! # The hardware
//! The CPU runs with CR0.WP, EFER.NXE and CR4.PCIDE set and CR4.PGE clear, whatever the guest's
//! values are. (A CPU [without PCIDs](ShadowCpu::without_pcids) has CR4.PCIDE clear.) CR4.SMEP and
//! CR4.SMAP are the guest's while the guest's paging is on. Without paging it has no user pages,
//! and the bits must not act on the page tables that replace its own. CR4.LA57 depends on the page
//! tables ([`GuestEntry::levels`]). All page faults, all writes to CR0, CR3, CR4 and IA32_EFER,
//! INVLPG and INVPCID are intercepted. (Intel SDM vol. 3C, "VM-execution control fields" without
//! "enable EPT"; AMD APM vol. 2, 15.9 to 15.13.)
//!
//! # Implementation
//! An access is done as by the [`Cpu`](crate::hardware::cpu::Cpu) with a second stage: by a checked
//! operation of the generation that the TLB has caught up with, or starts over. The differences:
//! - After each exit the CPU first asks the hypervisor what to load ([`ShadowHandler::entry`]), and
//!   drops the translations that the entry names. It does the same after the hypervisor had access
//!   to it ([`ShadowCpu::handler`]) or it slept ([`ShadowCpu::exit_guest_mode`]).
//! - A translation belongs to the VM and to the *host's* PCID. It is dropped by a flush of an
//!   entry, by a replacement, or by any flush of the flush domain. Those flushes name
//!   guest-physical pages, which this hardware does not have, so it drops its whole TLB. Such a
//!   flush is no exit: the CPU goes on with the root that it has loaded, which the hypervisor keeps
//!   until the next entry.
//! - A translation serves each access that needs no rights beyond those of the walk that made it,
//!   with any privilege. Otherwise the CPU walks anew before it faults, as hardware may. If it then
//!   faults, it keeps the translation as long as it may (Intel's processors would drop it): until
//!   the page fault is the guest's own.
//! - A write that the hypervisor wants to emulate ([`Exit::EmulateWrite`]) is passed to it as a
//!   write to guest-physical memory, which completes the access.

#![expect(unsafe_code, reason = "the CPU accesses guest memory through raw pointers")]

mod exits;
mod handler;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_exits;
#[cfg(test)]
mod tests_rights;

use slat::format::Npt;
use slat::shadow::{GuestAccess, GuestEntry, Gva, LocalFlush, PagingRegisters, Privilege};
use slat::{Access, Exit, Gpa, Hpa, Outcome};

use crate::hardware::commit::{Generation, Port, Stale};
use crate::hardware::cpu::{CpuError, PATIENT_FAULTS, STUCK_FAULTS};
use crate::hardware::tlb::{Context, Geometry, Rights, Tlb};
use crate::hardware::walk::guest::GuestFault;
use crate::hardware::walk::shadow::{self, ShadowStop};
use crate::hardware::walk::{Processor, Walker};
use crate::memory::phys;

pub use exits::ShadowCpuCounters;
pub use handler::{ShadowExit, ShadowHandler};

/// CR0.PG.
const CR0_PAGING: u64 = 1 << 31;
/// CR4.SMEP.
const CR4_SMEP: u64 = 1 << 20;
/// CR4.SMAP.
const CR4_SMAP: u64 = 1 << 21;
/// IA32_EFER.LME.
const EFER_LONG_MODE: u64 = 1 << 8;

/// A software CPU without a second stage, whose exits `V` handles.
#[derive(Debug)]
pub struct ShadowCpu<V> {
    handler: V,
    port: Port,
    tlb: Tlb,
    /// The generation of the TLB.
    caught_up: Generation,
    vm: u16,
    registers: PagingRegisters,
    privilege: Privilege,
    needed: NeededRights,
    /// What the last entry loaded; `None` from the next exit on.
    loaded: Option<Loaded>,
    has_pcids: bool,
    /// The root and the PCID of the last entry.
    entered: Option<(Hpa, u16)>,
    /// Faults on one access after which it fails: [`STUCK_FAULTS`], or fewer in a test.
    max_faults: u64,
    counters: ShadowCpuCounters,
}

/// The CPU's state from one entry to the next exit.
#[derive(Clone, Copy, Debug)]
struct Loaded {
    root: Hpa,
    levels: u8,
    context: Context,
}

/// The rights that each kind of access needs now.
#[derive(Clone, Copy, Debug)]
struct NeededRights {
    read: Rights,
    write: Rights,
    fetch: Rights,
}

impl NeededRights {
    /// Intel SDM vol. 3A, "Determination of access rights", with CR0.WP and EFER.NXE set.
    fn new(registers: PagingRegisters, privilege: Privilege) -> NeededRights {
        let is_on = |bit: u64| registers.cr0 & CR0_PAGING != 0 && registers.cr4 & bit != 0;
        let supervisor_if = |restricted: bool| if restricted { Rights::SUPERVISOR } else { Rights::NONE };
        let (data, fetch) = match privilege {
            Privilege::User => (Rights::USER, Rights::USER),
            Privilege::Supervisor => (supervisor_if(is_on(CR4_SMAP)), supervisor_if(is_on(CR4_SMEP))),
            Privilege::SupervisorWithAc => (Rights::NONE, supervisor_if(is_on(CR4_SMEP))),
        };
        NeededRights { read: data, write: data.and(Rights::WRITE), fetch: fetch.and(Rights::EXECUTE) }
    }

    #[inline]
    fn by(&self, access: Access) -> Rights {
        match access {
            Access::Read => self.read,
            Access::Write => self.write,
            Access::Execute | Access::ExecuteUser => self.fetch,
        }
    }
}

/// The result of an access without a translation in the TLB.
enum Miss {
    /// The memory was found.
    Found(Hpa),
    /// Start over.
    Again,
    /// The access is a write to be emulated, at this address.
    Emulate(Gpa),
}

/// The result of an access.
enum Done<T> {
    /// It was done.
    Here(T),
    /// It is a write to be emulated, at this address.
    Emulate(Gpa),
}

impl<V: ShadowHandler> ShadowCpu<V> {
    /// A CPU of VM `vm` (a tag for the TLB), with paging off, at supervisor privilege.
    pub fn new(handler: V, port: Port, vm: u16, geometry: Geometry) -> ShadowCpu<V> {
        let (registers, privilege) = (PagingRegisters::default(), Privilege::Supervisor);
        ShadowCpu {
            handler,
            caught_up: port.generation(),
            port,
            tlb: Tlb::new(geometry),
            vm,
            registers,
            privilege,
            needed: NeededRights::new(registers, privilege),
            loaded: None,
            has_pcids: true,
            entered: None,
            max_faults: STUCK_FAULTS,
            counters: ShadowCpuCounters::default(),
        }
    }

    /// The CPU without PCIDs: each entry with another root or PCID than the last flushes all
    /// translations.
    pub fn without_pcids(self) -> ShadowCpu<V> {
        ShadowCpu { has_pcids: false, ..self }
    }

    /// The counts so far.
    pub fn counters(&self) -> ShadowCpuCounters {
        ShadowCpuCounters { nr_tlb_misses: self.tlb.nr_misses(), ..self.counters }
    }

    /// The CPU makes no access for a while: until the next one, flushes ignore it, as a hypervisor
    /// sends no interrupt to a CPU that does not run its guest.
    pub fn exit_guest_mode(&mut self) {
        self.loaded = None;
        self.port.exit_guest_mode();
    }

    /// The hypervisor's side.
    pub fn handler(&mut self) -> &mut V {
        self.loaded = None;
        &mut self.handler
    }

    /// The registers, as the guest sees them. EFER.LMA is not among them: it is EFER.LME with
    /// CR0.PG.
    pub fn registers(&self) -> PagingRegisters {
        self.registers
    }

    /// Changes the privilege level, or EFLAGS.AC (SYSCALL, IRET, STAC and the like): no exit.
    #[inline]
    pub fn set_privilege(&mut self, privilege: Privilege) {
        self.privilege = privilege;
        self.needed = NeededRights::new(self.registers, privilege);
    }

    /// Reads the 8 bytes at `gva`.
    ///
    /// # Errors
    /// [`CpuError`]: nothing was read.
    #[inline]
    pub fn read(&mut self, gva: Gva) -> Result<u64, CpuError> {
        self.load(gva, Access::Read)
    }

    /// Fetches the 8 bytes at `gva` as an instruction; returns what is there.
    ///
    /// # Errors
    /// [`CpuError`]: nothing was fetched.
    #[inline]
    pub fn fetch(&mut self, gva: Gva) -> Result<u64, CpuError> {
        self.load(gva, Access::Execute)
    }

    #[inline]
    fn load(&mut self, gva: Gva, access: Access) -> Result<u64, CpuError> {
        let done = self.access(gva, access, |port, generation, at| {
            // SAFETY: see `access`.
            unsafe { port.load_u64(generation, at) }
        })?;
        match done {
            Done::Here(value) => Ok(value),
            // Only writes are emulated.
            Done::Emulate(gpa) => Err(CpuError::Exit(Exit::EmulateWrite { gpa })),
        }
    }

    /// Writes the 8 bytes at `gva`. The hypervisor may emulate the write.
    ///
    /// # Errors
    /// [`CpuError`]: nothing was written.
    #[inline]
    pub fn write(&mut self, gva: Gva, value: u64) -> Result<(), CpuError> {
        let done = self.access(gva, Access::Write, |port, generation, at| {
            // SAFETY: see `access`.
            unsafe { port.store_u64(generation, at, value) }
        })?;
        match done {
            Done::Here(()) => Ok(()),
            Done::Emulate(gpa) => self.emulate_write(gpa, value),
        }
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
    ) -> Result<Done<T>, CpuError> {
        if !gva.0.is_multiple_of(8) {
            return Err(CpuError::Unaligned { gva });
        }
        let mut nr_faults = 0;
        loop {
            let was_in_guest = self.loaded.is_some();
            let loaded = match self.loaded {
                Some(loaded) => loaded,
                None => self.enter()?,
            };
            let generation = self.port.generation();
            if generation != self.caught_up {
                self.counters.nr_interruptions += u64::from(was_in_guest);
                self.catch_up(generation);
            }
            let needed = self.needed.by(access);
            let hpa = match self.tlb.lookup(loaded.context, gva.0, needed) {
                Some(hpa) => hpa,
                None => match self.miss(loaded, gva, access, generation, &mut nr_faults)? {
                    Miss::Found(hpa) => hpa,
                    Miss::Again => continue,
                    Miss::Emulate(gpa) => return Ok(Done::Emulate(gpa)),
                },
            };
            let Some(at) = phys::pointer_to::<u64>(hpa) else {
                return Err(CpuError::ShadowNoMemory { gva, hpa });
            };
            match operation(&self.port, generation, at) {
                Ok(value) => {
                    self.counters.nr_accesses += 1;
                    self.counters.nr_reads += u64::from(access != Access::Write);
                    return Ok(Done::Here(value));
                }
                Err(Stale) => self.counters.nr_restarts += 1,
            }
        }
    }

    /// Drops everything, since there were flushes until `generation`.
    #[cold]
    #[inline(never)]
    fn catch_up(&mut self, generation: Generation) {
        self.counters.nr_flushes_seen += generation.nr_flushes_since(self.caught_up);
        self.counters.nr_full_drops += 1;
        self.counters.nr_translations_dropped += self.tlb.clear();
        self.caught_up = generation;
    }

    /// Enters the guest: loads the hypervisor's entry, and flushes as it requires.
    #[cold]
    #[inline(never)]
    fn enter(&mut self) -> Result<Loaded, CpuError> {
        let entry = self.handler.entry()?;
        let GuestEntry { root, levels, pcid, flush } = entry;
        // CR3 has 12 bits for the PCID, where the address has none.
        if !matches!(levels, 4 | 5) || pcid >= 1 << 12 || !root.0.is_multiple_of(1 << 12) {
            return Err(CpuError::BadEntry { entry });
        }
        let has_changed = self.entered.replace((root, pcid)) != Some((root, pcid));
        let flush = if has_changed && !self.has_pcids { LocalFlush::All } else { flush };
        let context = Context { vm: self.vm, pcid: if self.has_pcids { pcid } else { 0 } };
        match flush {
            LocalFlush::None => {}
            LocalFlush::Page(gva) => {
                self.counters.nr_page_flushes += 1;
                self.tlb.invalidate_page_in_vm(self.vm, gva.0);
            }
            LocalFlush::Context => {
                self.counters.nr_context_flushes += 1;
                self.tlb.invalidate_context(context);
            }
            LocalFlush::All => {
                self.counters.nr_all_flushes += 1;
                // The TLB has translations of this VM only.
                self.tlb.clear();
            }
        }
        self.counters.nr_entries += 1;
        self.port.enter_guest_mode();
        let loaded = Loaded { root, levels, context };
        self.loaded = Some(loaded);
        Ok(loaded)
    }

    /// Walks; fills the TLB, or has the fault handled.
    #[inline(never)]
    fn miss(
        &mut self,
        loaded: Loaded,
        gva: Gva,
        access: Access,
        generation: Generation,
        nr_faults: &mut u64,
    ) -> Result<Miss, CpuError> {
        let stop = match self.walk(loaded, gva, access, generation)? {
            Ok(hpa) => return Ok(Miss::Found(hpa)),
            Err(stop) => stop,
        };
        // A walk that a flush has overtaken may have read half of one state and half of another.
        if !self.port.is_current(generation) || stop == ShadowStop::Restart {
            self.counters.nr_restarts += 1;
            return Ok(Miss::Again);
        }
        match stop {
            ShadowStop::PageFault => {}
            ShadowStop::Misconfigured { level, entry } => {
                return Err(CpuError::ShadowMisconfigured { gva, level, entry });
            }
            ShadowStop::NoMemory { hpa } => return Err(CpuError::ShadowNoMemory { gva, hpa }),
            // Handled above.
            ShadowStop::Restart => return Ok(Miss::Again),
        }
        *nr_faults += 1;
        self.counters.nr_page_fault_exits += 1;
        if *nr_faults > self.max_faults {
            return Err(CpuError::Stuck { gva, nr_faults: *nr_faults });
        }
        if *nr_faults > PATIENT_FAULTS {
            std::thread::yield_now();
        }
        self.loaded = None;
        let exit = ShadowExit::PageFault(gva, GuestAccess { access, privilege: self.privilege });
        match self.handler.handle_exit(exit)? {
            Outcome::Resume => Ok(Miss::Again),
            Outcome::Exit(Exit::EmulateWrite { gpa }) => Ok(Miss::Emulate(gpa)),
            Outcome::Exit(exit) => {
                if let Exit::PageFault { .. } = exit {
                    // Intel SDM vol. 3A, "Operations that Invalidate TLBs and Paging-Structure
                    // Caches".
                    self.tlb.invalidate_page(loaded.context, gva.0);
                }
                Err(exit.into())
            }
        }
    }

    /// Walks, and fills the TLB with the result. The outer error is the guest's fault: there is
    /// nothing to walk for.
    fn walk(
        &mut self,
        loaded: Loaded,
        gva: Gva,
        access: Access,
        generation: Generation,
    ) -> Result<Result<Hpa, ShadowStop>, GuestFault> {
        let nr_bits = 12 + 9 * u32::from(loaded.levels);
        let is_long_mode = self.registers.efer & EFER_LONG_MODE != 0 && self.registers.cr0 & CR0_PAGING != 0;
        if is_long_mode {
            // The bits from the highest translated one up are all alike.
            if !matches!(gva.0 as i64 >> (nr_bits - 1), 0 | -1) {
                return Err(GuestFault::NonCanonical { gva });
            }
        } else if gva.0 >> nr_bits != 0 {
            // The page tables have no translation of it.
            return Ok(Err(ShadowStop::PageFault));
        }
        self.counters.nr_walks += 1;
        let (root, processor) = (loaded.root, Processor::of::<Npt>());
        let walker = Walker { port: &self.port, generation, root, processor, cached: None, log: None, memory: () };
        Ok(shadow::walk(walker, loaded.levels, gva, access, self.needed.by(access)).map(|mapping| {
            debug_assert_eq!(generation, self.caught_up, "a fill is of the TLB's generation");
            // Its guest-physical page is unknown here: no flush by ranges uses it.
            self.tlb.fill(loaded.context, gva.0, Gpa(0), mapping.size, mapping.hpa, mapping.rights);
            mapping.hpa
        }))
    }
}
