//! The walker for Arm's stage 2 page tables: VMSAv8-64, 4 KiB granule, three or four levels with up
//! to 48 bits of intermediate physical address, 48 bits of output address. Arm counts levels from
//! the root down: its level 0 is level 4 here, its level 3 is level 1.
//!
//! The processor sets the access flag by itself (FEAT_HAFDBS with VTCR_EL2.HA set and VTCR_EL2.HD
//! clear) unless [`Marks`] say that faults do, and has no dirty state. FEAT_XNX and FEAT_S2FWB are
//! as [`Processor`](super::Processor) says. It has no other feature that defines further bits:
//! FEAT_LPA2, FEAT_XS, FEAT_BBM, FEAT_HAFT. Real processors may interpret or ignore what the manual
//! then reserves (RES0, or a reserved encoding of SH or MemAttr). Here it is a misconfiguration,
//! since an engine must not write such a descriptor. So is the contiguous bit: this walker does not
//! check whether the fifteen neighbours agree.
//!
//! Permissions are not hierarchical: only the leaf's count.
//!
//! It caches each descriptor that it may ([`PteCache`](super::cached::PteCache)): one that is
//! valid, and has the access flag where it maps memory. That it lacks a permission is no obstacle.
//!
//! The guest's own page tables are x86's all the same ([`guest`](super::guest)). Its walks set bits
//! in them, so each counts as a write, as on Arm a walk that updates a descriptor.
//!
//! Source: Arm ARM (DDI 0487), chapter "The AArch64 Virtual Memory System Architecture": "VMSAv8-64
//! translation table format descriptors", "Stage 2 memory type and Cacheability attributes", "Stage
//! 2 data accesses and instruction execution permissions", "Hardware management of the Access
//! flag", "TLB maintenance requirements and the TLB maintenance instructions"; and "ESR_EL2,
//! Exception Syndrome Register (EL2)".

use slat::format::CpuFeatures;
use slat::{Access, Gfn, GfnRange, Gpa, Hpa, Level};

use super::cached::Kind;
use super::{ALL_FETCHES, Marks, index, mapping, page_size, shift};
use super::{Fault, Grants, HardwareFormat, Mapping, Memory, Misconfiguration, Purpose, Stop, WalkMemory, Walker};
use crate::hardware::commit::{FlushDomain, Scope};
use crate::hardware::cpu;
use crate::hardware::tlb::{Rights, Writes};

const VALID: u64 = 1 << 0;
/// A table above the lowest level, a page at the lowest. Clear, it is a block, and at the lowest
/// level and the highest a reserved encoding, which counts as invalid.
const TABLE_OR_PAGE: u64 = 1 << 1;
const MEMATTR_SHIFT: u32 = 2;
const READ: u64 = 1 << 6;
const WRITE: u64 = 1 << 7;
const SHAREABILITY: u64 = 0b11 << 8;
/// The reserved one of its encodings.
const SHAREABILITY_RESERVED: u64 = 0b01 << 8;
const ACCESS_FLAG: u64 = 1 << 10;
/// XN, bits 53 and 54. Without FEAT_XNX the lower one is reserved.
const EXECUTE_NEVER_SHIFT: u32 = 53;
const EXECUTE_NEVER_LOW: u64 = 1 << EXECUTE_NEVER_SHIFT;

/// Bits of a leaf, outside of the address, that must be zero: bit 11 (FnXS), bits 48 to 50, DBM,
/// contiguous. Bits 55 to 58 are software's, and those above are ignored.
const LEAF_RESERVED: u64 = 1 << 11 | 0b111 << 48 | 1 << 51 | 1 << 52;
/// The same of a table descriptor: bits 48 to 50, and those with stage 1's permissions. Bits 2 to
/// 11 and 51 to 58 are ignored.
const TABLE_RESERVED: u64 = 0b111 << 48 | 0b1_1111 << 59;

// ESR_EL2 of an abort from a lower exception level: the exception class and the fields of the ISS
// that concern the translation.
const CLASS_INSTRUCTION_ABORT: u64 = 0x20 << 26;
const CLASS_DATA_ABORT: u64 = 0x24 << 26;
const ISS_STAGE1_WALK: u64 = 1 << 7;
const ISS_WRITE: u64 = 1 << 6;
/// Fault status codes, of level 0.
const STATUS_TRANSLATION: u64 = 0b00_0100;
const STATUS_ACCESS_FLAG: u64 = 0b00_1000;
const STATUS_PERMISSION: u64 = 0b00_1100;
/// The bits of a status that are not its level.
const STATUS_TYPE: u64 = 0b11_1100;

// SAFETY: it walks as the manual says, through `Walker` and `Used` alone. The flush drops the
// PTEs of all levels, and then all that combines both stages.
unsafe impl HardwareFormat for slat::format::Stage2 {
    const GUEST_PHYSICAL_BITS: u32 = 48;
    const LEVELS: u8 = 4;
    const GUEST_PML4E_RESERVED: u64 = 0;
    const LOGS_MODIFICATIONS: bool = false;
    const HAS_TLB_CONFLICTS: bool = true;

    const CACHES_PTES: bool = true;

    /// A TLB never holds a descriptor that is not valid, or has the access flag clear; it may hold
    /// one that lacks a permission (Arm ARM, "TLB maintenance").
    fn keeps(fault: Fault) -> bool {
        fault.code & (STATUS_TYPE | ISS_STAGE1_WALK) == STATUS_PERMISSION
    }

    /// TLBI IPAS2E1IS of each page, DSB, TLBI VMALLE1IS, DSB. The first leaves translations alone
    /// that combine both stages. When the second begins, no walk finds the old stage 2 any more, so
    /// no CPU makes another such translation of it.
    fn flush(domain: &FlushDomain, ranges: &[GfnRange]) {
        domain.invalidate(Scope::SecondStage, ranges);
        domain.invalidate(Scope::Combined, &[GfnRange { start: Gfn(0), end: Gfn(u64::MAX) }]);
    }

    /// TLBI IPAS2E1, DSB, TLBI VMALLE1, DSB.
    fn flush_local(gpa: Gpa) {
        cpu::invalidate_local(Scope::SecondStage, gpa);
        cpu::invalidate_local(Scope::Combined, gpa);
    }

    // Always: a walk that is called, and passes its result in memory, takes a fifth longer.
    #[inline(always)]
    fn walk<C: WalkMemory>(walker: Walker<'_, C>, gpa: Gpa, access: Access, purpose: Purpose) -> Result<Mapping, Stop> {
        let access = match purpose {
            Purpose::Data => access,
            Purpose::GuestTable => Access::Write,
        };
        let syndrome = |status: u64, level: u8| code(access, purpose) | status | u64::from(4 - level);
        let fault = |status: u64, level: u8| Stop::Fault(Fault { gpa, access, code: syndrome(status, level) });
        // An address beyond the input size is a translation fault of the manual's level 0.
        if gpa.0 >> walker.processor.gpa_bits != 0 {
            return Err(fault(STATUS_TRANSLATION, 4));
        }

        // The leaf, its level, and where it is unless it was cached.
        let (mut level, mut entry, mut used) = match walker.lowest_cached(gpa) {
            Some((level, entry)) => (level, entry, None),
            None => {
                // Up to 16 tables side by side are one root.
                let level = walker.processor.levels;
                let used = walker.read_pte(gpa, walker.root, gpa.0 >> shift(level), level)?;
                (level, used.entry, Some(used))
            }
        };
        loop {
            if !is_valid(entry, level) {
                return Err(fault(STATUS_TRANSLATION, level));
            }
            if is_misconfigured(entry, level, walker.processor.features) {
                let code = syndrome(STATUS_TRANSLATION, level);
                return Err(Stop::Misconfigured(Misconfiguration { gpa, level: Level(level), entry, code }));
            }
            if is_leaf(entry, level) {
                break;
            }
            walker.keep(gpa, level, entry, Kind::Table);
            level -= 1;
            let below = walker.read_pte(gpa, Hpa(entry & address_mask(12)), index(gpa.0, level), level)?;
            (entry, used) = (below.entry, Some(below));
        }

        // One of the two was cached before the other was made, and no flush came between.
        if used.is_some()
            && let Some(other) = walker.cached.and_then(|cached| cached.other_leaf(gpa, level))
        {
            return Err(Stop::TlbConflict { gpa, cached: page_size(other), walked: page_size(level) });
        }

        let permitted = match access {
            Access::Read => entry & READ != 0,
            Access::Write => entry & WRITE != 0,
            Access::Execute => fetches(entry).grant(Rights::EXECUTE),
            Access::ExecuteUser => fetches(entry).grant(Rights::EXECUTE_USER),
        };
        // Only leaves have the flag. The fault for it comes first.
        if entry & ACCESS_FLAG == 0 && walker.processor.marks == Marks::ByFaults {
            return Err(fault(STATUS_ACCESS_FLAG, level));
        }
        if !permitted {
            if entry & ACCESS_FLAG != 0 {
                walker.keep(gpa, level, entry, Kind::Leaf);
            }
            return Err(fault(STATUS_PERMISSION, level));
        }
        // What is cached has the flag.
        let leaf = match used {
            Some(used) => used.set(walker, ACCESS_FLAG)?,
            None => entry,
        };
        walker.keep(gpa, level, leaf, Kind::Leaf);
        let writes = if leaf & WRITE != 0 { Writes::Allowed } else { Writes::MustWalk };
        let memory = memory(leaf, walker.processor.features).unwrap_or(Memory::Device);
        let grants = Grants { writes, fetches: fetches(leaf), memory };
        mapping(walker, gpa, leaf & address_mask(shift(level)), level, grants)
    }
}

/// The bits of an output address in a descriptor, from `page_bits` (log2 of the page's size) up to
/// bit 47.
const fn address_mask(page_bits: u32) -> u64 {
    ((1 << 48) - 1) & !((1 << page_bits) - 1)
}

fn is_valid(entry: u64, level: u8) -> bool {
    entry & VALID != 0 && (entry & TABLE_OR_PAGE != 0 || matches!(level, 2 | 3))
}

/// Whether a valid descriptor maps memory.
fn is_leaf(entry: u64, level: u8) -> bool {
    level == 1 || entry & TABLE_OR_PAGE == 0
}

/// Whether a valid descriptor has reserved bits or values.
fn is_misconfigured(entry: u64, level: u8, features: CpuFeatures) -> bool {
    if !is_leaf(entry, level) {
        return entry & TABLE_RESERVED != 0;
    }
    // Address bits below the size of a block; nT is one of them.
    let below = address_mask(12) & !address_mask(shift(level));
    let by_mode = if features.contains(CpuFeatures::XNX) { 0 } else { EXECUTE_NEVER_LOW };
    entry & (LEAF_RESERVED | by_mode | below) != 0
        || entry & SHAREABILITY == SHAREABILITY_RESERVED
        || memory(entry, features).is_none()
}

/// From where a leaf may be executed. With a lower bit of zero this is also the rule without
/// FEAT_XNX.
fn fetches(leaf: u64) -> Rights {
    match leaf >> EXECUTE_NEVER_SHIFT & 0b11 {
        0b00 => ALL_FETCHES,
        0b01 => Rights::EXECUTE_USER,
        0b10 => Rights::NONE,
        _ => Rights::EXECUTE,
    }
}

/// What MemAttr of a leaf says of its memory. `None`: reserved.
fn memory(leaf: u64, features: CpuFeatures) -> Option<Memory> {
    let mem_attr = leaf >> MEMATTR_SHIFT & 0b1111;
    if features.contains(CpuFeatures::FWB) {
        // Each kind of device; as the weaker of this and the guest's; and what is forced.
        return match mem_attr {
            0b0000..=0b0011 => Some(Memory::Device),
            0b0101 => Some(Memory::NonCached),
            0b0110 | 0b0111 => Some(Memory::WriteBack),
            _ => None,
        };
    }
    // Outer and inner cacheability: 01 none, 10 write-through, 11 write-back. Inner 00 is reserved.
    match (mem_attr >> 2, mem_attr & 0b11) {
        (0b00, _) => Some(Memory::Device),
        (_, 0b00) => None,
        (0b11, 0b11) => Some(Memory::WriteBack),
        (0b01, 0b01) => Some(Memory::NonCached),
        _ => Some(Memory::WriteThrough),
    }
}

/// The syndrome without the fault status code.
fn code(access: Access, purpose: Purpose) -> u64 {
    let access = match access {
        Access::Read => CLASS_DATA_ABORT,
        Access::Write => CLASS_DATA_ABORT | ISS_WRITE,
        Access::Execute | Access::ExecuteUser => CLASS_INSTRUCTION_ABORT,
    };
    let purpose = match purpose {
        Purpose::Data => 0,
        Purpose::GuestTable => ISS_STAGE1_WALK,
    };
    access | purpose
}
