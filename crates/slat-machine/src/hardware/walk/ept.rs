//! The walker for Intel's extended page tables: four or five levels, accessed and dirty flags
//! enabled (EPTP bit 6), execute-only translations supported, mode-based execute control if it is
//! on, no sub-page or shadow-stack permissions; with page-modification logging, if the CPU has a
//! log.
//!
//! Source: Intel SDM vol. 3C, chapter "VMX support for address translation": "EPT translation
//! mechanism" (formats of the entries), "EPT misconfigurations", "EPT violations", "Accessed and
//! dirty flags for EPT", "Page-Modification Logging"; and chapter "VM exits", table "Exit
//! qualification for EPT violations".

use slat::format::CpuFeatures;
use slat::{Access, Gpa, Hpa, Level};

use super::{
    Fault, Grants, HardwareFormat, Mapping, Memory, Misconfiguration, Purpose, Stop, Used, WalkMemory, Walker,
};
use super::{MAX_LEVELS, address_mask, fetches_if, index, mapping, shift};
use crate::hardware::tlb::{Rights, Writes};

const READ: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const EXECUTE: u64 = 1 << 2;
const PERMISSIONS: u64 = READ | WRITE | EXECUTE;
/// Execute access of user mode, with mode-based execute control. Bit 2 is that of supervisor mode
/// then, and an entry with this bit alone is present.
const EXECUTE_USER: u64 = 1 << 10;
const MEMORY_TYPE_SHIFT: u32 = 3;
const MEMORY_TYPE: u64 = 0b111 << MEMORY_TYPE_SHIFT;
const PAGE: u64 = 1 << 7;
const ACCESSED: u64 = 1 << 8;
const DIRTY: u64 = 1 << 9;

/// One of the memory types that are reserved; 2 and 3 are, too. (It is UC- in a PAT alone.)
const MEMORY_TYPE_RESERVED: u64 = 7;

// Exit qualification for EPT violations.
const QUALIFICATION_READ: u64 = 1 << 0;
const QUALIFICATION_WRITE: u64 = 1 << 1;
const QUALIFICATION_FETCH: u64 = 1 << 2;
/// Bits 3 to 5: the permissions of all PTEs that were used, in the order of the PTEs' bits 0 to 2.
const QUALIFICATION_PERMISSIONS_SHIFT: u32 = 3;
/// With mode-based execute control: bit 10 of all PTEs that were used.
const QUALIFICATION_EXECUTE_USER: u64 = 1 << 6;
const QUALIFICATION_LINEAR_VALID: u64 = 1 << 7;
/// The access was to the translation of the linear address, not to a guest paging-structure entry.
const QUALIFICATION_FINAL: u64 = 1 << 8;

// SAFETY: it walks as the manual says, through `Walker` and `Used` alone. The flush is of
// everything.
unsafe impl HardwareFormat for slat::format::Ept {
    const GUEST_PHYSICAL_BITS: u32 = 48;
    const LEVELS: u8 = 4;
    const GUEST_PML4E_RESERVED: u64 = 0;
    const LOGS_MODIFICATIONS: bool = true;
    const HAS_TLB_CONFLICTS: bool = false;

    // Always: a walk that is called, and passes its result in memory, takes a fifth longer.
    #[inline(always)]
    fn walk<C: WalkMemory>(walker: Walker<'_, C>, gpa: Gpa, access: Access, purpose: Purpose) -> Result<Mapping, Stop> {
        let access = match purpose {
            Purpose::Data => access,
            Purpose::GuestTable => Access::Write,
        };
        let top = walker.processor.levels;
        // An address beyond what the levels translate has no translation.
        if gpa.0 >> shift(top + 1) != 0 {
            return Err(violation(gpa, access, purpose, 0));
        }

        let has_modes = walker.processor.features.contains(CpuFeatures::MBEC);
        let all = if has_modes { PERMISSIONS | EXECUTE_USER } else { PERMISSIONS };
        let mut table = walker.root;
        let mut permissions = all;
        let mut path = [Used { at: std::ptr::null_mut(), entry: 0 }; MAX_LEVELS as usize];
        let mut level = top;
        loop {
            let Some(used) = Used::read_second_stage(walker, table, index(gpa.0, level), level)? else {
                return Err(Stop::NoMemory { gpa, hpa: table });
            };
            let entry = used.entry;
            if entry & all == 0 {
                return Err(violation(gpa, access, purpose, 0));
            }
            if is_misconfigured(entry, level) {
                return Err(Stop::Misconfigured(Misconfiguration { gpa, level: Level(level), entry, code: 0 }));
            }
            permissions &= entry;
            path[usize::from(level) - 1] = used;
            if is_leaf(entry, level) {
                break;
            }
            table = Hpa(entry & address_mask(12));
            level -= 1;
        }

        let needed = match access {
            Access::Read => READ,
            Access::Write => WRITE,
            Access::ExecuteUser if has_modes => EXECUTE_USER,
            Access::Execute | Access::ExecuteUser => EXECUTE,
        };
        if permissions & needed == 0 {
            return Err(violation(gpa, access, purpose, permissions));
        }

        for above in (level..top).rev() {
            set(path[usize::from(above)], walker, gpa, ACCESSED)?;
        }
        let marks = if access == Access::Write { ACCESSED | DIRTY } else { ACCESSED };
        let leaf = set(path[usize::from(level) - 1], walker, gpa, marks)?;
        let writes = if permissions & WRITE != 0 && leaf & DIRTY != 0 { Writes::Allowed } else { Writes::MustWalk };
        let user = if has_modes { EXECUTE_USER } else { EXECUTE };
        let fetches = fetches_if(permissions & EXECUTE != 0, Rights::EXECUTE)
            .and(fetches_if(permissions & user != 0, Rights::EXECUTE_USER));
        // With a guest's write-back it makes no difference whether its PAT is ignored (SDM vol. 3C,
        // "Memory Type Used for Translated Guest-Physical Addresses").
        let memory = memory_type(leaf).unwrap_or(Memory::Device);
        mapping(walker, gpa, leaf & address_mask(shift(level)), level, Grants { writes, fetches, memory })
    }
}

/// Sets `flags` in a PTE if they are not set, on the way to `gpa`. Returns the PTE's value after
/// that. A CPU that logs checks its log for room before it sets either flag, and logs the page
/// before it sets the dirty flag.
#[inline]
pub(super) fn set<C: WalkMemory>(used: Used, walker: Walker<'_, C>, gpa: Gpa, flags: u64) -> Result<u64, Stop> {
    let missing = flags & !used.entry;
    if missing != 0
        && let Some(log) = walker.log
    {
        if missing & DIRTY == 0 { log.check_room()? } else { log.append(gpa)? }
    }
    used.set(walker, flags)
}

/// Whether the PTE maps a page. Bit 7 is ignored in PTEs of level 1 and reserved in those of levels
/// 4 and 5.
fn is_leaf(entry: u64, level: u8) -> bool {
    level == 1 || entry & PAGE != 0
}

/// Whether a present PTE is misconfigured by the manual.
fn is_misconfigured(entry: u64, level: u8) -> bool {
    // Writable but not readable. (Executable but not readable is fine where execute-only
    // translations are supported.)
    if entry & (READ | WRITE) == WRITE {
        return true;
    }
    if level >= 4 {
        return entry & (MEMORY_TYPE | 1 << 6 | PAGE) != 0;
    }
    if !is_leaf(entry, level) {
        return entry & (MEMORY_TYPE | 1 << 6) != 0;
    }
    // Address bits below the size of a large page.
    let reserved = address_mask(12) & !address_mask(shift(level));
    entry & reserved != 0 || memory_type(entry).is_none()
}

/// The memory type of a leaf. `None`: reserved.
fn memory_type(leaf: u64) -> Option<Memory> {
    let number = (leaf & MEMORY_TYPE) >> MEMORY_TYPE_SHIFT;
    if number == MEMORY_TYPE_RESERVED { None } else { Memory::of_x86(number) }
}

fn violation(gpa: Gpa, access: Access, purpose: Purpose, permissions: u64) -> Stop {
    let mut code = QUALIFICATION_LINEAR_VALID | (permissions & PERMISSIONS) << QUALIFICATION_PERMISSIONS_SHIFT;
    if permissions & EXECUTE_USER != 0 {
        code |= QUALIFICATION_EXECUTE_USER;
    }
    code |= match (purpose, access) {
        // With accessed and dirty flags enabled, both bits are set for an access to a guest
        // paging-structure entry.
        (Purpose::GuestTable, _) => QUALIFICATION_READ | QUALIFICATION_WRITE,
        (Purpose::Data, Access::Read) => QUALIFICATION_READ,
        (Purpose::Data, Access::Write) => QUALIFICATION_WRITE,
        (Purpose::Data, Access::Execute | Access::ExecuteUser) => QUALIFICATION_FETCH,
    };
    if purpose == Purpose::Data {
        code |= QUALIFICATION_FINAL;
    }
    Stop::Fault(Fault { gpa, access, code })
}
