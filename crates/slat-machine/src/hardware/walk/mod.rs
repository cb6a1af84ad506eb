//! The page-table walkers of the software CPUs, written from the manuals.
//!
//! They share no code with the engine's formats, not even a constant: they are the oracle for it. A
//! PTE that hardware would refuse is refused here.
//!
//! # Implementation
//! - A walk belongs to a generation that was read before it began. It reads every PTE by a checked
//!   load and sets every accessed or dirty bit by a checked compare-and-exchange against the value
//!   that it walked with (see [`commit`](crate::hardware::commit)). So it never reads a page-table
//!   page that was freed after a flush, and never sets a bit in a PTE that has changed meanwhile.
//! - On Arm and RISC-V a walk may begin at a PTE that the CPU has cached ([`cached`]).
//! - The bits are set only when the whole walk has succeeded, from the root down, as the manuals
//!   allow (a PTE's accessed bit may be set early, but need not).
//! - A CPU with page-modification logging logs a page before it sets the dirty bit of the page's
//!   leaf PTE, by an exchange that is checked against a generation read before; see
//!   [`modification_log`](crate::hardware::modification_log).
//! - A walk that lost a race, against a flush or for a PTE, ends with [`Stop::Restart`]; the CPU
//!   starts the access over.
//!
//! Sources: Intel SDM vol. 3C, chapter "VMX support for address translation", sections "EPT
//! translation mechanism", "EPT-induced VM exits" and "Accessed and dirty flags for EPT"; AMD APM
//! vol. 2, 5.3 (long-mode translation) and 15.25 (nested paging); Intel SDM vol. 3A, chapter
//! "Paging"; Arm ARM, chapter "The AArch64 Virtual Memory System Architecture"; RISC-V Privileged
//! Architecture, "Hypervisor Extension"; Intel's VT-d specification, 3.7 and 9.8.
//!
//! The guest's own page tables, the first stage, are x86's long-mode page tables under every second
//! stage ([`guest`]): the machine exists for the second. Each walker notes what its format's own
//! guests would do otherwise. Without a second stage there is one dimension, that of the page
//! tables which the hypervisor keeps in place of the guest's ([`shadow`]).

#![expect(unsafe_code, reason = "walkers read and write tables through raw pointers")]

pub mod cached;
mod ept;
pub mod foreign;
mod gstage;
pub mod guest;
mod npt;
pub mod shadow;
mod stage2;
#[cfg(test)]
pub(crate) mod tests;
#[cfg(test)]
mod tests_attributes;
#[cfg(test)]
mod tests_foreign;
#[cfg(test)]
mod tests_gstage;
#[cfg(test)]
mod tests_guest;
#[cfg(test)]
mod tests_log;
#[cfg(test)]
mod tests_manuals;
#[cfg(test)]
mod tests_nodes;
#[cfg(test)]
mod tests_shadow;
#[cfg(test)]
mod tests_stage2;
mod vtd;

use slat::format::{CpuFeatures, Format, Hardware};
use slat::{Access, GfnRange, Gpa, Host, Hpa, Level, PageSize, Vm};
use thiserror::Error;

use self::cached::PteCache;
use crate::hardware::commit::{FlushDomain, Generation, Port, Stale};
use crate::hardware::cpu;
use crate::hardware::modification_log::{LogFull, ModificationLog};
use crate::hardware::tlb::{Rights, Writes};
use crate::memory::numa::WalkCounter;
use crate::memory::phys;
use crate::vm::machine::{Machine, MachineConfig, MachineConfigError, MachineError};

/// The memory that the page tables of a walk are in, and what is noted of the walk. A type and not
/// an option, so that a walk in this machine's own memory, of which nothing is noted, has no code
/// for it.
///
/// # Safety
/// Where a [`Walker`] has such a value, each address that [`pointer_to`](WalkMemory::pointer_to)
/// returns is that of a word which is mapped, and accessed atomically alone, as long as its
/// generation is current.
pub unsafe trait WalkMemory: Copy {
    /// The address of the PTE at `hpa`; `None` if there is no memory.
    #[inline]
    fn pointer_to(self, hpa: Hpa) -> Option<*mut u64> {
        phys::pointer_to(hpa)
    }

    /// Whether a leaf PTE may lead to `hpa`: whether there is memory.
    #[inline]
    fn has(self, hpa: Hpa) -> bool {
        self.pointer_to(hpa).is_some()
    }

    /// A second-stage PTE of level `level` was read in `table`.
    #[inline]
    fn count(self, _table: Hpa, _level: u8) {}

    /// A bit of the PTE at `at` was set.
    #[inline]
    fn changed(self, _at: *mut u64) {}
}

// SAFETY: of this machine's own memory, see `Used::read`.
unsafe impl WalkMemory for () {}

/// Counts reads by node.
// SAFETY: as above.
unsafe impl WalkMemory for &WalkCounter {
    #[inline]
    fn count(self, table: Hpa, level: u8) {
        WalkCounter::count(self, table, level);
    }
}

/// What the hypervisor loads into the registers that control the walks, and what the processor (or
/// the IOMMU) has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Processor {
    /// Levels of page tables: EPTP's walk length, VTCR_EL2.SL0, the mode of hgatp, AW of VT-d.
    pub levels: u8,
    /// Bits of a guest-physical address that are translated. (VTCR_EL2.T0SZ; on other processors
    /// the levels say it.)
    pub gpa_bits: u8,
    /// What it has, and what is turned on.
    pub features: CpuFeatures,
    /// The host's PAT, where nested page tables use it.
    pub pat: u64,
    /// What sets A and D, on Arm and RISC-V.
    pub marks: Marks,
}

/// What sets the accessed and the dirty bit of a leaf PTE, where processors differ.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Marks {
    /// The processor: Arm's FEAT_HAFDBS with VTCR_EL2.HA set, RISC-V's Svadu.
    #[default]
    ByHardware,
    /// The hypervisor: an access faults where one of them is clear and it needs it set (Arm with HA
    /// clear, RISC-V's Svade).
    ByFaults,
}

impl Processor {
    /// One with what every processor of the format has.
    pub const fn of<F: HardwareFormat>() -> Processor {
        Processor {
            levels: F::LEVELS,
            gpa_bits: F::GUEST_PHYSICAL_BITS as u8,
            features: CpuFeatures::empty(),
            pat: Hardware::PAT_AT_RESET,
            marks: Marks::ByHardware,
        }
    }

    /// That of a VM which was configured for `hardware`.
    pub fn of_vm<H: Host, F: Format>(vm: &Vm<H, F>, hardware: &Hardware) -> Processor {
        let (levels, gpa_bits) = (vm.root_level().0, vm.gpa_bits() as u8);
        Processor { levels, gpa_bits, features: hardware.features, pat: hardware.pat, marks: Marks::ByHardware }
    }
}

/// The common parameters of the walks of one access.
#[derive(Clone, Copy, Debug)]
pub struct Walker<'a, C = ()> {
    /// The CPU's access to memory.
    pub(crate) port: &'a Port,
    /// Read before the access began.
    pub(crate) generation: Generation,
    /// The root (nCR3, or the address in EPTP, VTTBR_EL2, hgatp or the PASID-table entry).
    pub(crate) root: Hpa,
    /// What controls the walk.
    pub(crate) processor: Processor,
    /// The PTEs that the CPU has cached, if its format caches any
    /// ([`HardwareFormat::CACHES_PTES`]).
    pub(crate) cached: Option<&'a PteCache>,
    /// The CPU's page-modification log, if it has one and that is on. Only EPT has it.
    pub(crate) log: Option<&'a ModificationLog>,
    /// Where the page tables are.
    pub(crate) memory: C,
}

impl<'a, C: WalkMemory> Walker<'a, C> {
    /// A walker of the page tables under `root` in `memory`, without caches and without a log.
    ///
    /// # Safety
    /// As long as `generation` is current, there is a page-table page at `root` of the size that
    /// `processor` says, and at each address in a directory entry below it. Each is aligned to its
    /// size, and all accesses to it are atomic.
    pub unsafe fn new(
        port: &'a Port,
        generation: Generation,
        root: Hpa,
        processor: Processor,
        memory: C,
    ) -> Walker<'a, C> {
        Walker { port, generation, root, processor, cached: None, log: None, memory }
    }
}

/// A format of second-stage page tables, as hardware walks it.
///
/// # Safety
/// CPUs access memory where these methods say:
/// - [`walk`](HardwareFormat::walk) reads and writes memory of the walker's page tables alone. It
///   answers with an address only if leaf PTEs lead there that it has read, or that the CPU has
///   cached. It keeps no PTE in the cache that it has not read.
/// - [`flush`](HardwareFormat::flush) drops, on all CPUs, each translation and each leaf PTE of the
///   ranges, and what may lead to page-table pages that are freed after it.
pub unsafe trait HardwareFormat: Format {
    /// Bits of a guest-physical address that the page tables translate, unless the processor is
    /// told otherwise. A guest with paging has a MAXPHYADDR of as many.
    const GUEST_PHYSICAL_BITS: u32;

    /// Levels of page tables, unless it is told otherwise.
    const LEVELS: u8;

    /// Bits of a guest PML4 entry that are reserved on the vendor's processors besides those of the
    /// manual's common part.
    const GUEST_PML4E_RESERVED: u64;

    /// Whether the vendor's processors have page-modification logging. (The engine's format has
    /// such a constant too; this one is hardware's.)
    const LOGS_MODIFICATIONS: bool;

    /// Whether the vendor's processors may refuse an access of which the TLB has translations of
    /// two sizes (Arm: a TLB conflict abort). The machine's then always do. Others use either.
    const HAS_TLB_CONFLICTS: bool;

    /// Whether walks use [`PteCache`]. (The others' processors have such caches, too. Their
    /// hypervisors have one instruction that flushes everything, and their faults drop what caused
    /// them.)
    const CACHES_PTES: bool = false;

    /// Whether the processors may repeat `fault` for the access, from a translation that combines
    /// both stages. The machine's then always do. There is none where a PTE of the guest was
    /// accessed in vain.
    fn keeps(_fault: Fault) -> bool {
        false
    }

    /// The flush of `ranges` on all CPUs of `domain`, by the instructions that the manual asks for
    /// where page tables have changed.
    fn flush(domain: &FlushDomain, ranges: &[GfnRange]) {
        domain.flush(ranges);
    }

    /// The flush of the page at `gpa` on the CPU of this thread, after a fault.
    fn flush_local(gpa: Gpa) {
        cpu::flush_local(gpa);
    }

    /// Translates `gpa` through the page tables under the walker's root and sets accessed and dirty
    /// bits.
    ///
    /// # Errors
    /// [`Stop`]: why there is no translation.
    fn walk<C: WalkMemory>(walker: Walker<'_, C>, gpa: Gpa, access: Access, purpose: Purpose) -> Result<Mapping, Stop>;

    /// Builds a machine with shadow paging ([`MachineConfig::shadow`]). The engine has that with
    /// one format.
    ///
    /// # Errors
    /// [`MachineConfigError::NoShadowPaging`] with all others; those of [`Machine::new`].
    fn shadow_machine(_config: &MachineConfig) -> Result<Machine<Self>, MachineError>
    where
        Self: Sized,
    {
        Err(MachineConfigError::NoShadowPaging { format: Self::NAME }.into())
    }
}

/// The purpose of an access to guest-physical memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// The guest's own access to data or code.
    Data,
    /// The processor's access to a PTE of the guest. Always counts as a write (AMD APM vol. 2,
    /// 15.25.5; Intel SDM vol. 3C, "Accessed and dirty flags for EPT", which are enabled here).
    GuestTable,
}

/// The result of a walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// The guest-physical address that the second stage translated.
    pub gpa: Gpa,
    /// The address's own host-physical address (not the start of its page).
    pub hpa: Hpa,
    /// Size of the page that maps it.
    pub size: PageSize,
    /// Whether a TLB entry of this walk serves writes.
    pub writes: Writes,
    /// From where instructions may be fetched: of [`Rights::EXECUTE`] and [`Rights::EXECUTE_USER`].
    pub fetches: Rights,
    /// How the memory is accessed.
    pub memory: Memory,
}

/// From both modes.
pub(crate) const ALL_FETCHES: Rights = Rights::EXECUTE.and(Rights::EXECUTE_USER);

/// How the processor accesses the memory of a translation for a guest that asks for write-back
/// memory. So it is as cacheable as the second stage allows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Memory {
    /// Through the caches, write-back.
    WriteBack,
    /// Through the caches, write-through; x86's write-protected memory, too.
    WriteThrough,
    /// Past the caches, as ordinary memory: accesses may be speculative, merged and repeated (x86's
    /// WC, Arm's Normal Non-cacheable, RISC-V's NC).
    NonCached,
    /// As registers of a device (x86's UC, Arm's Device, RISC-V's IO).
    Device,
    /// As the attributes of the physical address say (RISC-V's PMA), which are a device's where
    /// there is one. DMA, too: a request of a device to another one has no cache.
    ByAddress,
}

impl Memory {
    /// Whether registers of a device may be accessed so.
    pub fn suits_devices(self) -> bool {
        matches!(self, Memory::Device | Memory::ByAddress)
    }

    /// That of x86's memory type with this number (Intel SDM vol. 3A, "Memory Cache Control"; AMD
    /// APM vol. 2, 7.8.1). The numbers are those of MTRRs and of a PAT. `None`: reserved.
    fn of_x86(number: u64) -> Option<Memory> {
        match number {
            // UC, and UC- of a PAT: the guest could make WC of that.
            0 | 7 => Some(Memory::Device),
            1 => Some(Memory::NonCached),
            // WT, WP.
            4 | 5 => Some(Memory::WriteThrough),
            6 => Some(Memory::WriteBack),
            _ => None,
        }
    }
}

/// What a leaf grants besides its address.
#[derive(Clone, Copy, Debug)]
struct Grants {
    writes: Writes,
    fetches: Rights,
    memory: Memory,
}

/// `rights` if `grant` says so.
#[inline]
fn fetches_if(grant: bool, rights: Rights) -> Rights {
    if grant { rights } else { Rights::NONE }
}

/// Why a second-stage walk ended without a translation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message names the fields")]
pub enum Stop {
    /// A flush has begun, or a PTE changed while its accessed or dirty bit was about to be set:
    /// start the access over.
    #[error("the translation changed during the walk")]
    Restart,
    /// The hypervisor must act.
    #[error("second-stage fault: {0}")]
    Fault(Fault),
    /// An accessed or dirty bit is to be set, and the page-modification log is full: an exit. The
    /// bit is not set.
    #[error(transparent)]
    LogFull(#[from] LogFull),
    /// A PTE that maps a part of the same memory is cached with another size: see
    /// [`CpuError::TlbConflict`](crate::hardware::cpu::CpuError::TlbConflict).
    #[error("a PTE of {cached:?} is cached for {gpa}, and the tables have one of {walked:?}")]
    TlbConflict { gpa: Gpa, cached: PageSize, walked: PageSize },
    /// A PTE has reserved bits set: the page tables are misconfigured.
    #[error("second-stage tables are misconfigured: {0}")]
    Misconfigured(Misconfiguration),
    /// The page tables have an address without memory.
    #[error("second-stage tables lead to {hpa} for {gpa}, where there is no memory")]
    NoMemory { gpa: Gpa, hpa: Hpa },
}

impl From<Stale> for Stop {
    fn from(_: Stale) -> Stop {
        Stop::Restart
    }
}

/// An EPT violation, nested page fault, stage 2 abort or guest-page fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("{access:?} of {gpa} with code {code:#x}")]
pub struct Fault {
    /// The guest-physical address.
    pub gpa: Gpa,
    /// The access as hardware counts it: [`Access::Write`] for guest page tables.
    pub access: Access,
    /// EPT: the exit qualification. NPT: EXITINFO1, the error code. Stage 2: the bits of ESR_EL2
    /// that concern the translation: EC, S1PTW, WnR, and DFSC or IFSC. G-stage: scause, and htinst
    /// in the upper half. VT-d: the fault reason.
    pub code: u64,
}

/// An EPT misconfiguration, or a PTE with reserved bits or values.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("entry {entry:#x} of level {} for {gpa} (code {code:#x})", level.0)]
pub struct Misconfiguration {
    /// The guest-physical address that was translated.
    pub gpa: Gpa,
    /// Level of the PTE.
    pub level: Level,
    /// The PTE.
    pub entry: u64,
    /// As for [`Fault`]; EPT: 0, the exit has no qualification.
    pub code: u64,
}

/// A PTE that a walk used: its address and its value.
#[derive(Clone, Copy, Debug)]
struct Used {
    at: *mut u64,
    entry: u64,
}

impl Used {
    /// Reads PTE `index` of the page-table page at `table`; `None` if there is no memory.
    #[inline]
    fn read<C: WalkMemory>(walker: Walker<'_, C>, table: Hpa, index: u64) -> Result<Option<Used>, Stale> {
        let Some(at) = walker.memory.pointer_to(Hpa(table.0.wrapping_add(8 * index))) else {
            return Ok(None);
        };
        // SAFETY: the address came from the root, from a PTE that was read while the generation was
        // current, or from a directory entry that the CPU had cached. A page-table page is freed
        // only after a flush of its range that includes directory entries. (A flush of leaf PTEs
        // alone, `Scope::Leaves`, keeps cached directory entries of its range, and no page-table
        // page is freed after it.) So as long as the generation is current there is a page-table
        // page at `table`, and `index` is in it. (Hosts of tests whose flushes leave something out
        // keep theirs mapped.) It is aligned to its size. In other memory the word is there by the contract of
        // `WalkMemory`.
        let entry = unsafe { walker.port.load_u64(walker.generation, at)? };
        Ok(Some(Used { at, entry }))
    }

    /// Reads PTE `index` of the second-stage page-table page at `table`, of `level`; `None` if
    /// there is no memory.
    #[inline]
    fn read_second_stage<C: WalkMemory>(
        walker: Walker<'_, C>,
        table: Hpa,
        index: u64,
        level: u8,
    ) -> Result<Option<Used>, Stale> {
        let used = Used::read(walker, table, index)?;
        if used.is_some() {
            walker.memory.count(table, level);
        }
        Ok(used)
    }

    /// Sets `bits` in the PTE if they are not set. Returns the PTE's value after that.
    #[inline]
    fn set<C: WalkMemory>(self, walker: Walker<'_, C>, bits: u64) -> Result<u64, Stop> {
        if self.entry & bits == bits {
            return Ok(self.entry);
        }
        let new = self.entry | bits;
        // SAFETY: as in `read`, and all writes to page tables are compare-and-exchanges.
        match unsafe { walker.port.compare_exchange_u64(walker.generation, self.at, self.entry, new)? } {
            Ok(_) => {
                walker.memory.changed(self.at);
                Ok(new)
            }
            Err(_) => Err(Stop::Restart),
        }
    }
}

/// The most levels of page tables, of any format and of the guest.
const MAX_LEVELS: u8 = 5;

/// Index of the PTE of `level` on the way to `address` in page-table pages of 512 PTEs.
#[inline]
fn index(address: u64, level: u8) -> u64 {
    address >> shift(level) & 0x1ff
}

/// log2 of the bytes that a PTE of `level` maps.
#[inline]
fn shift(level: u8) -> u32 {
    12 + 9 * (u32::from(level) - 1)
}

/// The bits of a page's address in a PTE of x86, from `page_bits` (log2 of the page's size) up to
/// bit 51, hence to the MAXPHYADDR of this machine.
#[inline]
const fn address_mask(page_bits: u32) -> u64 {
    ((1 << 52) - 1) & !((1 << page_bits) - 1)
}

/// The size of a page; for a larger one, what a TLB keeps of it.
#[inline]
pub(crate) fn page_size(level: u8) -> PageSize {
    match level {
        1 => PageSize::Size4K,
        2 => PageSize::Size2M,
        _ => PageSize::Size1G,
    }
}

/// The translation itself: the address `page` from the leaf, the offset from the guest-physical
/// address.
#[inline]
fn mapping<C: WalkMemory>(
    walker: Walker<'_, C>,
    gpa: Gpa,
    page: u64,
    level: u8,
    grants: Grants,
) -> Result<Mapping, Stop> {
    let hpa = Hpa(page | (gpa.0 & ((1 << shift(level)) - 1)));
    if !walker.memory.has(hpa) {
        return Err(Stop::NoMemory { gpa, hpa });
    }
    let Grants { writes, fetches, memory } = grants;
    Ok(Mapping { gpa, hpa, size: page_size(level), writes, fetches, memory })
}
