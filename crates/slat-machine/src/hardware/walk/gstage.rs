//! The walkers for RISC-V's G-stage, Sv39x4, Sv48x4 and Sv57x4: the page tables of Sv39, Sv48 and
//! Sv57 under a root that is four times as large, for guest-physical addresses of 41, 50 and 59
//! bits.
//!
//! The processor sets A and D by itself (Svadu, enabled for the G-stage), unless [`Marks`] say that
//! faults do (Svade). It has no Svnapot, and Svpbmt if [`Processor`](super::Processor) says so:
//! otherwise bits 61 and 62 of a PTE must be zero. In the manual a reserved or misaligned PTE is a
//! guest-page fault like any other. Here it is a misconfiguration, with the fault's code, since an
//! engine must not write such a PTE.
//!
//! It has no Svvptc, and caches each PTE that it reads ([`PteCache`](super::cached::PteCache)),
//! also one that is not valid.
//!
//! Only leaf PTEs have permissions. Every access of a guest is one of user mode here, so a leaf PTE
//! without U denies it.
//!
//! The guest's own page tables are x86's all the same ([`guest`](super::guest)). Its walks set bits
//! in them, so each counts as a write, as on RISC-V a walk that updates A or D of the guest's PTE.
//! Addresses of a guest with paging have as many bits as these page tables translate.
//!
//! A leaf PTE of the highest level of Sv48x4 maps 512 GiB. The manual allows it, so it is walked;
//! the TLB keeps 1 GiB of it.
//!
//! Source: The RISC-V Instruction Set Manual, Volume II (Privileged Architecture): "Sv32:
//! Page-Based 32-bit Virtual-Memory Systems", section "Virtual Address Translation Process"; "Sv39:
//! Page-Based 39-bit Virtual-Memory System"; "Hypervisor Extension", sections "Two-Stage Address
//! Translation", "Trap Cause Codes" and "Transformed Instruction or Pseudoinstruction for mtinst or
//! htinst"; "Svadu: Hardware Updating of A/D Bits".

use std::cell::Cell;

use slat::format::CpuFeatures;
use slat::{Access, Gfn, GfnRange, Gpa, Hpa, Level};

use super::cached::Kind;
use super::{ALL_FETCHES, Marks, fetches_if, index, mapping, shift};
use super::{Fault, Grants, HardwareFormat, Mapping, Memory, Misconfiguration, Purpose, Stop, WalkMemory, Walker};
use crate::hardware::commit::{FlushDomain, Scope};
use crate::hardware::cpu;
use crate::hardware::tlb::Writes;

const VALID: u64 = 1 << 0;
const READ: u64 = 1 << 1;
const WRITE: u64 = 1 << 2;
const EXECUTE: u64 = 1 << 3;
const USER: u64 = 1 << 4;
const ACCESSED: u64 = 1 << 6;
const DIRTY: u64 = 1 << 7;
/// Where the page number begins.
const PPN_SHIFT: u32 = 10;
/// Its bits: 44.
const PPN: u64 = (1 << 44) - 1;
/// PBMT, the memory type of a leaf, with Svpbmt; reserved otherwise.
const PBMT_SHIFT: u32 = 61;
const PBMT: u64 = 0b11 << PBMT_SHIFT;
/// Bits 54 to 60, and N.
const RESERVED: u64 = 0x7f << 54 | 1 << 63;
/// Bits that a directory entry must not have.
const TABLE_RESERVED: u64 = USER | ACCESSED | DIRTY | PBMT;

// Causes of a trap, in the lower half of the code.
const CAUSE_INSTRUCTION_GUEST_PAGE_FAULT: u64 = 20;
const CAUSE_LOAD_GUEST_PAGE_FAULT: u64 = 21;
const CAUSE_STORE_GUEST_PAGE_FAULT: u64 = 23;
/// In its upper half htinst: zero, or the pseudoinstruction for a write to one of the guest's PTEs
/// (of 64 bits).
const TINST_GUEST_TABLE_WRITE: u64 = 0x3020 << 32;

/// Implements [`HardwareFormat`] for one of the three, which differ in levels and address bits.
macro_rules! gstage {
    ($format:ident, $root:literal, $gpa_bits:literal) => {
        // SAFETY: it walks as the manual says, through `Walker` and `Used` alone. The flush drops
        // leaf PTEs, and everything where page-table pages may be gone.
        unsafe impl HardwareFormat for slat::format::$format {
            const GUEST_PHYSICAL_BITS: u32 = $gpa_bits;
            const LEVELS: u8 = $root;
            const GUEST_PML4E_RESERVED: u64 = 0;
            const LOGS_MODIFICATIONS: bool = false;
            const HAS_TLB_CONFLICTS: bool = false;
            const CACHES_PTES: bool = true;

            /// PTEs may be cached that are not valid, or allow less (Privileged Architecture,
            /// "Supervisor Memory-Management Fence Instruction"): the processor has no Svvptc.
            fn keeps(fault: Fault) -> bool {
                fault.code & TINST_GUEST_TABLE_WRITE == 0
            }

            fn flush(domain: &FlushDomain, ranges: &[GfnRange]) {
                flush(domain, ranges);
            }

            fn flush_local(gpa: Gpa) {
                flush_local(gpa);
            }

            #[inline(always)]
            fn walk<C: WalkMemory>(
                walker: Walker<'_, C>,
                gpa: Gpa,
                access: Access,
                purpose: Purpose,
            ) -> Result<Mapping, Stop> {
                walk_from::<$root, C>(walker, gpa, access, purpose)
            }
        }
    };
}

gstage!(Sv39x4, 3, 41);
gstage!(Sv48x4, 4, 50);
gstage!(Sv57x4, 5, 59);

/// HFENCE.GVMA on all harts: by address, which drops leaf PTEs, for ranges that are smaller than
/// what a page-table page of the lowest level maps; else all of the VMID, because page-table pages
/// may have gone. It is for hosts that answer `true` in [`Host::needs_zapped_leaves`], as the
/// machine's does.
///
/// [`Host::needs_zapped_leaves`]: slat::Host::needs_zapped_leaves
fn flush(domain: &FlushDomain, ranges: &[GfnRange]) {
    let is_small = |range: &GfnRange| range.nr_pages() < 1 << (shift(2) - shift(1));
    if ranges.iter().all(is_small) {
        domain.invalidate(Scope::Leaves, ranges);
    } else {
        domain.invalidate(Scope::All, &[GfnRange { start: Gfn(0), end: Gfn(u64::MAX) }]);
    }
}

thread_local! {
    /// The page that this thread's hart flushed last.
    static LAST_LOCAL: Cell<Option<Gfn>> = const { Cell::new(None) };
}

/// HFENCE.GVMA on this hart: by address. The second time in turn all of the VMID, because then it
/// is a PTE above the lowest level that is kept and not valid any more, or not yet.
fn flush_local(gpa: Gpa) {
    let is_again = LAST_LOCAL.replace(Some(gpa.gfn())) == Some(gpa.gfn());
    cpu::invalidate_local(if is_again { Scope::All } else { Scope::Leaves }, gpa);
}

/// The walk from a root whose PTEs have level `ROOT`.
// Always: a walk that is called, and passes its result in memory, takes a fifth longer.
#[inline(always)]
fn walk_from<const ROOT: u8, C: WalkMemory>(
    walker: Walker<'_, C>,
    gpa: Gpa,
    access: Access,
    purpose: Purpose,
) -> Result<Mapping, Stop> {
    let access = match purpose {
        Purpose::Data => access,
        Purpose::GuestTable => Access::Write,
    };
    let code = code(access, purpose);
    let fault = Stop::Fault(Fault { gpa, access, code });
    // The root's index has two bits more than the others; those above must be zero.
    if gpa.0 >> (shift(ROOT) + 11) != 0 {
        return Err(fault);
    }

    let (mut level, mut entry, mut used) = match walker.lowest_cached(gpa) {
        Some((level, entry)) => (level, entry, None),
        None => {
            let used = walker.read_pte(gpa, walker.root, gpa.0 >> shift(ROOT), ROOT)?;
            (ROOT, used.entry, Some(used))
        }
    };
    loop {
        if entry & VALID == 0 {
            walker.keep(gpa, level, entry, Kind::Invalid);
            return Err(fault);
        }
        if is_misconfigured(entry, level, walker.processor.features) {
            return Err(Stop::Misconfigured(Misconfiguration { gpa, level: Level(level), entry, code }));
        }
        if is_leaf(entry) {
            break;
        }
        walker.keep(gpa, level, entry, Kind::Table);
        level -= 1;
        let below = walker.read_pte(gpa, address(entry), index(gpa.0, level), level)?;
        (entry, used) = (below.entry, Some(below));
    }

    let needed = match access {
        Access::Read => READ,
        Access::Write => WRITE,
        Access::Execute | Access::ExecuteUser => EXECUTE,
    };
    let marks = if access == Access::Write { ACCESSED | DIRTY } else { ACCESSED };
    let faults = entry & marks != marks && walker.processor.marks == Marks::ByFaults;
    if entry & (needed | USER) != needed | USER || faults {
        walker.keep(gpa, level, entry, Kind::Leaf);
        return Err(fault);
    }
    let leaf = match used {
        Some(used) => used.set(walker, marks)?,
        None if entry & marks == marks => entry,
        // To set them the processor reads the PTE once more, and compares.
        None => {
            if let Some(cached) = walker.cached {
                cached.forget(gpa, level);
            }
            return Err(Stop::Restart);
        }
    };
    walker.keep(gpa, level, leaf, Kind::Leaf);
    let writes = if leaf & (WRITE | DIRTY) == WRITE | DIRTY { Writes::Allowed } else { Writes::MustWalk };
    let fetches = fetches_if(leaf & EXECUTE != 0, ALL_FETCHES);
    let memory = memory(leaf).unwrap_or(Memory::ByAddress);
    mapping(walker, gpa, address(leaf).0, level, Grants { writes, fetches, memory })
}

/// The address in a PTE: 56 bits.
fn address(entry: u64) -> Hpa {
    Hpa((entry >> PPN_SHIFT & PPN) << 12)
}

/// Whether a valid PTE maps memory.
fn is_leaf(entry: u64) -> bool {
    entry & (READ | WRITE | EXECUTE) != 0
}

/// Whether a valid PTE is reserved, misaligned, or a directory entry of the lowest level.
fn is_misconfigured(entry: u64, level: u8, features: CpuFeatures) -> bool {
    let pbmt = if features.contains(CpuFeatures::SVPBMT) { 0 } else { PBMT };
    if entry & (RESERVED | pbmt) != 0 || memory(entry).is_none() {
        return true;
    }
    if !is_leaf(entry) {
        return level == 1 || entry & TABLE_RESERVED != 0;
    }
    entry & (READ | WRITE) == WRITE || address(entry).0 & ((1 << shift(level)) - 1) != 0
}

/// What PBMT of a leaf says of its memory. `None`: reserved.
fn memory(leaf: u64) -> Option<Memory> {
    match (leaf & PBMT) >> PBMT_SHIFT {
        0 => Some(Memory::ByAddress),
        1 => Some(Memory::NonCached),
        2 => Some(Memory::Device),
        _ => None,
    }
}

/// The cause of the trap, and htinst.
fn code(access: Access, purpose: Purpose) -> u64 {
    let cause = match access {
        Access::Read => CAUSE_LOAD_GUEST_PAGE_FAULT,
        Access::Write => CAUSE_STORE_GUEST_PAGE_FAULT,
        Access::Execute | Access::ExecuteUser => CAUSE_INSTRUCTION_GUEST_PAGE_FAULT,
    };
    match purpose {
        Purpose::Data => cause,
        Purpose::GuestTable => cause | TINST_GUEST_TABLE_WRITE,
    }
}
