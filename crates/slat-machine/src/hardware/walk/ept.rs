//! The walker for Intel's extended page tables: four levels, accessed and dirty flags enabled (EPTP
//! bit 6), execute-only translations supported, no mode-based execute control, no sub-page or
//! shadow-stack permissions; with page-modification logging, if the CPU has a log.
//!
//! Source: Intel SDM vol. 3C, chapter "VMX support for address translation": "EPT translation
//! mechanism" (formats of the entries), "EPT misconfigurations", "EPT violations", "Accessed and
//! dirty flags for EPT", "Page-Modification Logging"; and chapter "VM exits", table "Exit
//! qualification for EPT violations".

use slat::{Access, Gpa, Hpa, Level};

use super::{CountReads, Fault, HardwareFormat, Mapping, Misconfiguration, Purpose, Stop, Used, Walker};
use super::{address_mask, index, mapping, shift};
use crate::hardware::tlb::Writes;

const READ: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const EXECUTE: u64 = 1 << 2;
const PERMISSIONS: u64 = READ | WRITE | EXECUTE;
const MEMORY_TYPE_SHIFT: u32 = 3;
const MEMORY_TYPE: u64 = 0b111 << MEMORY_TYPE_SHIFT;
const PAGE: u64 = 1 << 7;
const ACCESSED: u64 = 1 << 8;
const DIRTY: u64 = 1 << 9;

/// Uncacheable, write combining, write through, write protected, write back; 2, 3 and 7 are
/// reserved.
const MEMORY_TYPES: [u64; 5] = [0, 1, 4, 5, 6];

// Exit qualification for EPT violations.
const QUALIFICATION_READ: u64 = 1 << 0;
const QUALIFICATION_WRITE: u64 = 1 << 1;
const QUALIFICATION_FETCH: u64 = 1 << 2;
/// Bits 3 to 5: the permissions of all PTEs that were used, in the order of the PTEs' bits 0 to 2.
const QUALIFICATION_PERMISSIONS_SHIFT: u32 = 3;
const QUALIFICATION_LINEAR_VALID: u64 = 1 << 7;
/// The access was to the translation of the linear address, not to a guest paging-structure entry.
const QUALIFICATION_FINAL: u64 = 1 << 8;

impl HardwareFormat for slat::format::Ept {
    const GUEST_PHYSICAL_BITS: u32 = 48;
    const GUEST_PML4E_RESERVED: u64 = 0;
    const LOGS_MODIFICATIONS: bool = true;
    const HAS_TLB_CONFLICTS: bool = false;

    // Always: a walk that is called, and passes its result in memory, takes a fifth longer.
    #[inline(always)]
    fn walk<C: CountReads>(walker: Walker<'_, C>, gpa: Gpa, access: Access, purpose: Purpose) -> Result<Mapping, Stop> {
        let access = match purpose {
            Purpose::Data => access,
            Purpose::GuestTable => Access::Write,
        };
        // Four levels translate 48 bits; an address beyond them has no translation.
        if gpa.0 >> Self::GUEST_PHYSICAL_BITS != 0 {
            return Err(violation(gpa, access, purpose, 0));
        }

        let mut table = walker.root;
        let mut permissions = PERMISSIONS;
        let mut path = [Used { at: std::ptr::null_mut(), entry: 0 }; 4];
        let mut level = 4;
        loop {
            let Some(used) = Used::read_second_stage(walker, table, index(gpa.0, level), level)? else {
                return Err(Stop::NoMemory { gpa, hpa: table });
            };
            let entry = used.entry;
            if entry & PERMISSIONS == 0 {
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
            Access::Execute | Access::ExecuteUser => EXECUTE,
        };
        if permissions & needed == 0 {
            return Err(violation(gpa, access, purpose, permissions));
        }

        for above in (level..4).rev() {
            set(path[usize::from(above)], walker, gpa, ACCESSED)?;
        }
        let marks = if access == Access::Write { ACCESSED | DIRTY } else { ACCESSED };
        let leaf = set(path[usize::from(level) - 1], walker, gpa, marks)?;
        let writes = if permissions & WRITE != 0 && leaf & DIRTY != 0 { Writes::Allowed } else { Writes::MustWalk };
        mapping(gpa, leaf & address_mask(shift(level)), level, writes)
    }
}

/// Sets `flags` in a PTE if they are not set, on the way to `gpa`. Returns the PTE's value after
/// that. A CPU that logs checks its log for room before it sets either flag, and logs the page
/// before it sets the dirty flag.
#[inline]
pub(super) fn set<C>(used: Used, walker: Walker<'_, C>, gpa: Gpa, flags: u64) -> Result<u64, Stop> {
    let missing = flags & !used.entry;
    if missing != 0
        && let Some(log) = walker.log
    {
        if missing & DIRTY == 0 { log.check_room()? } else { log.append(gpa)? }
    }
    used.set(walker, flags)
}

/// Whether the PTE maps a page. Bit 7 is ignored in PTEs of level 1 and reserved in those of level
/// 4.
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
    if level == 4 {
        return entry & (MEMORY_TYPE | 1 << 6 | PAGE) != 0;
    }
    if !is_leaf(entry, level) {
        return entry & (MEMORY_TYPE | 1 << 6) != 0;
    }
    // Address bits below the size of a large page.
    let reserved = address_mask(12) & !address_mask(shift(level));
    entry & reserved != 0 || !MEMORY_TYPES.contains(&(entry >> MEMORY_TYPE_SHIFT & 0b111))
}

fn violation(gpa: Gpa, access: Access, purpose: Purpose, permissions: u64) -> Stop {
    let mut code = QUALIFICATION_LINEAR_VALID | (permissions & PERMISSIONS) << QUALIFICATION_PERMISSIONS_SHIFT;
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
