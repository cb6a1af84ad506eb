//! The walker for Arm's stage 2 page tables: VMSAv8-64, 4 KiB granule, four levels, 48 bits of
//! intermediate physical address and of output address. Arm counts levels from the root down: its
//! level 0 is level 4 here, its level 3 is level 1.
//!
//! The processor sets the access flag by itself (FEAT_HAFDBS with VTCR_EL2.HA set and VTCR_EL2.HD
//! clear) and has no dirty state. It has no feature that defines further bits: FEAT_LPA2, FEAT_XNX,
//! FEAT_XS, FEAT_BBM, FEAT_S2FWB, FEAT_HAFT. Real processors may interpret or ignore what the
//! manual then reserves (RES0, or a reserved encoding of SH or MemAttr). Here it is a
//! misconfiguration, since an engine must not write such a descriptor. So is the contiguous bit:
//! this walker does not check whether the fifteen neighbours agree.
//!
//! Permissions are not hierarchical: only the leaf's count.
//!
//! The guest's own page tables are x86's all the same ([`guest`](super::guest)). Its walks set bits
//! in them, so each counts as a write, as on Arm a walk that updates a descriptor.
//!
//! Source: Arm ARM (DDI 0487), chapter "The AArch64 Virtual Memory System Architecture": "VMSAv8-64
//! translation table format descriptors", "Stage 2 memory type and Cacheability attributes", "Stage
//! 2 data accesses and instruction execution permissions", "Hardware management of the Access
//! flag"; and "ESR_EL2, Exception Syndrome Register (EL2)".

use slat::{Access, Gpa, Hpa, Level};

use super::{CountReads, Fault, HardwareFormat, Mapping, Misconfiguration, Purpose, Stop, Used, Walker};
use super::{index, mapping, shift};
use crate::hardware::tlb::Writes;

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
const EXECUTE_NEVER: u64 = 1 << 54;

/// Reserved: bits of MemAttr for normal memory without an inner cacheability.
const MEMATTR_RESERVED: [u64; 3] = [0b0100, 0b1000, 0b1100];

/// Bits of a leaf, outside of the address, that must be zero: bit 11 (FnXS), bits 48 to 50, DBM,
/// contiguous, and the lower bit of XN. Bits 55 to 58 are software's, and those above are ignored.
const LEAF_RESERVED: u64 = 1 << 11 | 0b111 << 48 | 1 << 51 | 1 << 52 | 1 << 53;
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
const STATUS_PERMISSION: u64 = 0b00_1100;
/// The bits of a status that are not its level.
const STATUS_TYPE: u64 = 0b11_1100;

impl HardwareFormat for slat::format::Stage2 {
    const GUEST_PHYSICAL_BITS: u32 = 48;
    const GUEST_PML4E_RESERVED: u64 = 0;
    const LOGS_MODIFICATIONS: bool = false;
    const HAS_TLB_CONFLICTS: bool = true;

    /// A TLB never holds a descriptor that is not valid, or has the access flag clear; it may hold
    /// one that lacks a permission (Arm ARM, "TLB maintenance").
    fn keeps(fault: Fault) -> bool {
        fault.code & STATUS_TYPE == STATUS_PERMISSION
    }

    // Always: a walk that is called, and passes its result in memory, takes a fifth longer.
    #[inline(always)]
    fn walk<C: CountReads>(walker: Walker<'_, C>, gpa: Gpa, access: Access, purpose: Purpose) -> Result<Mapping, Stop> {
        let access = match purpose {
            Purpose::Data => access,
            Purpose::GuestTable => Access::Write,
        };
        let syndrome = |status: u64, level: u8| code(access, purpose) | status | u64::from(4 - level);
        let fault = |status: u64, level: u8| Stop::Fault(Fault { gpa, access, code: syndrome(status, level) });
        // An address beyond the input size is a translation fault of the highest level.
        if gpa.0 >> Self::GUEST_PHYSICAL_BITS != 0 {
            return Err(fault(STATUS_TRANSLATION, 4));
        }

        let mut table = walker.root;
        let mut level = 4;
        let used = loop {
            let Some(used) = Used::read_second_stage(walker, table, index(gpa.0, level), level)? else {
                return Err(Stop::NoMemory { gpa, hpa: table });
            };
            let entry = used.entry;
            if !is_valid(entry, level) {
                return Err(fault(STATUS_TRANSLATION, level));
            }
            if is_misconfigured(entry, level) {
                let code = syndrome(STATUS_TRANSLATION, level);
                return Err(Stop::Misconfigured(Misconfiguration { gpa, level: Level(level), entry, code }));
            }
            if is_leaf(entry, level) {
                break used;
            }
            table = Hpa(entry & address_mask(12));
            level -= 1;
        };

        let permitted = match access {
            Access::Read => used.entry & READ != 0,
            Access::Write => used.entry & WRITE != 0,
            Access::Execute | Access::ExecuteUser => used.entry & EXECUTE_NEVER == 0,
        };
        if !permitted {
            return Err(fault(STATUS_PERMISSION, level));
        }
        // Only leaves have the flag.
        let leaf = used.set(walker, ACCESS_FLAG)?;
        let writes = if leaf & WRITE != 0 { Writes::Allowed } else { Writes::MustWalk };
        mapping(gpa, leaf & address_mask(shift(level)), level, writes)
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
fn is_misconfigured(entry: u64, level: u8) -> bool {
    if !is_leaf(entry, level) {
        return entry & TABLE_RESERVED != 0;
    }
    // Address bits below the size of a block; nT is one of them.
    let below = address_mask(12) & !address_mask(shift(level));
    entry & (LEAF_RESERVED | below) != 0
        || entry & SHAREABILITY == SHAREABILITY_RESERVED
        || MEMATTR_RESERVED.contains(&(entry >> MEMATTR_SHIFT & 0b1111))
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
