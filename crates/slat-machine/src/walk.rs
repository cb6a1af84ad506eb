//! The page-table walkers of the software CPUs, written from the manuals.
//!
//! They share nothing with the engine's own code for the formats, not even a constant: they are the oracle for it. An
//! entry that hardware would refuse is refused here.
//!
//! # The protocol
//! - A walk belongs to a generation that was read before it began. It reads every entry by a checked load and sets every
//!   accessed or dirty bit by a checked compare-and-exchange against the value that it walked with
//!   (see [`commit`](crate::commit)). So it never reads a table that was freed after a flush, and never marks an entry
//!   that has meanwhile become something else.
//! - The bits are set only when the whole walk has succeeded, from the root down, as the manuals allow (an entry's
//!   accessed bit may be set early, but need not).
//! - A CPU with page-modification logging writes a page into its log before it sets the dirty bit of the page's leaf, by an
//!   exchange that is checked against a generation read before; see [`modification_log`](crate::modification_log).
//! - A walk that lost a race, against a flush or for an entry, ends with [`Stop::Restart`]; the CPU does the access
//!   again from its beginning.
//!
//! Sources: Intel SDM vol. 3C, chapter "VMX support for address translation", sections "EPT translation mechanism",
//! "EPT-induced VM exits" and "Accessed and dirty flags for EPT"; AMD APM vol. 2, 5.3 (long-mode translation) and 15.25
//! (nested paging); Intel SDM vol. 3A, chapter "Paging"; Arm ARM, chapter "The AArch64 Virtual Memory System
//! Architecture"; RISC-V Privileged Architecture, "Hypervisor Extension".
//!
//! The guest's own tables, the first stage, are x86's long-mode tables under every second stage ([`guest`]): the machine is
//! there for the second. What the formats' own guests would do otherwise is said at each. Without a second stage there is
//! one dimension, that of the tables which the hypervisor keeps in place of the guest's ([`shadow`]).

#![expect(unsafe_code, reason = "walkers read and write tables through raw pointers")]

mod ept;
mod gstage;
pub mod guest;
mod npt;
pub mod shadow;
mod stage2;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_gstage;
#[cfg(test)]
mod tests_guest;
#[cfg(test)]
mod tests_log;
#[cfg(test)]
mod tests_nodes;
#[cfg(test)]
mod tests_shadow;
#[cfg(test)]
mod tests_stage2;

use slat::{Access, Gpa, Hpa, Level, PageSize};
use thiserror::Error;

use crate::commit::{Generation, Port, Stale};
use crate::modification_log::{LogFull, ModificationLog};
use crate::numa::WalkCounter;
use crate::phys;
use crate::tlb::Writes;

/// What is told of each entry of a second-stage table that a walk reads. A type and not an option: where nothing is to be
/// counted, the walk has no trace of it.
pub trait CountReads: Copy {
    /// An entry of `table`, whose entries have `level`, was read.
    fn count(self, table: Hpa, level: u8);
}

/// Counts nothing.
impl CountReads for () {
    #[inline]
    fn count(self, _table: Hpa, _level: u8) {}
}

/// Counts by node.
impl CountReads for &WalkCounter {
    #[inline]
    fn count(self, table: Hpa, level: u8) {
        WalkCounter::count(self, table, level);
    }
}

/// What the walks of one access have in common.
#[derive(Clone, Copy, Debug)]
pub struct Walker<'a, C = ()> {
    /// The CPU's way to memory.
    pub port: &'a Port,
    /// Read before the access began.
    pub generation: Generation,
    /// The top table (nCR3, or the address in EPTP, VTTBR_EL2 or hgatp).
    pub root: Hpa,
    /// The CPU's page-modification log, if it has one and that is on. Only EPT has it.
    pub log: Option<&'a ModificationLog>,
    /// Counts reads of second-stage entries.
    pub counter: C,
}

/// A format of second-stage tables, as hardware walks it.
pub trait HardwareFormat: slat::format::Format {
    /// Bits of a guest-physical address that the tables translate. A guest with paging has a MAXPHYADDR of as many.
    const GUEST_PHYSICAL_BITS: u32;

    /// Bits of a guest PML4 entry that are reserved on the vendor's processors besides those of the manual's common part.
    const GUEST_PML4E_RESERVED: u64;

    /// Whether the vendor's processors have page-modification logging. (The engine's format may know it as well; this is
    /// what hardware says.)
    const LOGS_MODIFICATIONS: bool;

    /// Whether the vendor's processors may refuse an access of which the TLB has translations of two sizes (Arm: a TLB
    /// conflict abort). The machine's then always do. Others use either.
    const HAS_TLB_CONFLICTS: bool;

    /// Whether the processors may go on to answer the access with `fault`, which a walk has given, until a flush of the page.
    /// The machine's then always do.
    fn keeps(_fault: Fault) -> bool {
        false
    }

    /// Translates `gpa` through the tables under the walker's root and sets accessed and dirty bits.
    ///
    /// # Errors
    /// [`Stop`]: why there is no translation.
    fn walk<C: CountReads>(walker: Walker<'_, C>, gpa: Gpa, access: Access, purpose: Purpose) -> Result<Mapping, Stop>;
}

/// What an access to guest-physical memory is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// The guest's own access to data or code.
    Data,
    /// The processor's access to a guest page-table entry. Counts as a write whatever it does (AMD APM vol. 2, 15.25.5;
    /// Intel SDM vol. 3C, "Accessed and dirty flags for EPT", which are enabled here).
    GuestTable,
}

/// What a walk found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// The guest-physical address that the second stage translated.
    pub gpa: Gpa,
    /// Where the address itself lies (not the start of its page).
    pub hpa: Hpa,
    /// Size of the page that maps it.
    pub size: PageSize,
    /// Whether a TLB entry of this walk serves writes.
    pub writes: Writes,
}

/// Why a second-stage walk ended without a translation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum Stop {
    /// A flush has begun, or an entry changed while its accessed or dirty bit was about to be set: start the access over.
    #[error("the translation changed during the walk")]
    Restart,
    /// The hypervisor must act.
    #[error("second-stage fault: {0}")]
    Fault(Fault),
    /// An accessed or dirty bit is to be set, and the page-modification log is full: an exit. The bit is not set.
    #[error(transparent)]
    LogFull(#[from] LogFull),
    /// An entry has bits set that the format reserves: the tables are broken.
    #[error("second-stage tables are misconfigured: {0}")]
    Misconfigured(Misconfiguration),
    /// A table or page address where this machine has no memory: the tables are broken.
    #[error("second-stage tables lead to {hpa} for {gpa}, where there is no memory")]
    NoMemory {
        /// The address that was translated.
        gpa: Gpa,
        /// Where the tables led.
        hpa: Hpa,
    },
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
    /// EPT: the exit qualification. NPT: EXITINFO1, the error code. Stage 2: the bits of ESR_EL2 that are the
    /// translation's: EC, S1PTW, WnR, and DFSC or IFSC. G-stage: scause, and htinst in the upper half.
    pub code: u64,
}

/// An EPT misconfiguration, or an entry with something reserved in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("entry {entry:#x} of level {} for {gpa} (code {code:#x})", level.0)]
pub struct Misconfiguration {
    /// The guest-physical address that was translated.
    pub gpa: Gpa,
    /// Level of the entry.
    pub level: Level,
    /// The entry.
    pub entry: u64,
    /// As for [`Fault`]; EPT: 0, the exit has no qualification.
    pub code: u64,
}

/// An entry that a walk used: where it is and what it was.
#[derive(Clone, Copy, Debug)]
struct Used {
    at: *mut u64,
    entry: u64,
}

impl Used {
    /// Reads entry `index` of the table at `table`; `None` if there is no memory.
    #[inline]
    fn read<C>(walker: Walker<'_, C>, table: Hpa, index: u64) -> Result<Option<Used>, Stale> {
        let Some(table) = phys::pointer_to::<u64>(table) else {
            return Ok(None);
        };
        let at = table.wrapping_add(index as usize);
        // SAFETY: the address came from the root or from an entry that was read while the generation was current; a table
        // is freed only after a flush, so as long as it is current there is a table at `table`, and `index` is in it.
        // Tables are aligned to their size.
        let entry = unsafe { walker.port.load_u64(walker.generation, at)? };
        Ok(Some(Used { at, entry }))
    }

    /// Reads entry `index` of the second-stage table at `table`, of `level`; `None` if there is no memory.
    #[inline]
    fn read_second_stage<C: CountReads>(
        walker: Walker<'_, C>,
        table: Hpa,
        index: u64,
        level: u8,
    ) -> Result<Option<Used>, Stale> {
        let used = Used::read(walker, table, index)?;
        if used.is_some() {
            walker.counter.count(table, level);
        }
        Ok(used)
    }

    /// Sets `bits` in the entry if they are not set; says what the entry is now.
    #[inline]
    fn set<C>(self, walker: Walker<'_, C>, bits: u64) -> Result<u64, Stop> {
        if self.entry & bits == bits {
            return Ok(self.entry);
        }
        let new = self.entry | bits;
        // SAFETY: as in `read`, and tables are written by compare-and-exchange by all.
        match unsafe { walker.port.compare_exchange_u64(walker.generation, self.at, self.entry, new)? } {
            Ok(_) => Ok(new),
            Err(_) => Err(Stop::Restart),
        }
    }
}

/// Index of the entry of `level` on the way to `address` in tables of 512 entries.
#[inline]
fn index(address: u64, level: u8) -> u64 {
    address >> shift(level) & 0x1ff
}

/// log2 of the bytes that an entry of `level` maps.
#[inline]
fn shift(level: u8) -> u32 {
    12 + 9 * (u32::from(level) - 1)
}

/// The bits of a page's address in an entry of x86's, `page_bits` (log2 of the page's size) and up to bit 51, hence to the
/// MAXPHYADDR of this machine.
#[inline]
const fn address_mask(page_bits: u32) -> u64 {
    ((1 << 52) - 1) & !((1 << page_bits) - 1)
}

/// The size of a page; of what a TLB keeps of a larger one.
#[inline]
fn page_size(level: u8) -> PageSize {
    match level {
        1 => PageSize::Size4K,
        2 => PageSize::Size2M,
        _ => PageSize::Size1G,
    }
}

/// The translation itself: the address `page` from the leaf, the offset from the guest-physical address.
#[inline]
fn mapping(gpa: Gpa, page: u64, level: u8, writes: Writes) -> Result<Mapping, Stop> {
    let hpa = Hpa(page | (gpa.0 & ((1 << shift(level)) - 1)));
    match phys::pointer_to::<u64>(hpa) {
        Some(_) => Ok(Mapping { gpa, hpa, size: page_size(level), writes }),
        None => Err(Stop::NoMemory { gpa, hpa }),
    }
}
