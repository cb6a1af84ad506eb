//! The walker for AMD's nested page tables: long-mode page tables of four or five
//! levels, EFER.NXE set.
//!
//! Source: AMD APM vol. 2, 5.3 "Long-mode page translation" and 5.4 "Page-translation-table entry
//! fields"; 15.25 "Nested paging", above all 15.25.5 "Nested table walk" (all nested accesses are
//! user accesses; accesses to guest page tables are writes), 15.25.6 "Nested versus guest page
//! faults, fault ordering" (the error code).

use slat::{Access, Gpa, Hpa, Level};

use super::{ALL_FETCHES, MAX_LEVELS, address_mask, fetches_if, index, mapping, shift};
use super::{
    Fault, Grants, HardwareFormat, Mapping, Memory, Misconfiguration, Purpose, Stop, Used, WalkMemory, Walker,
};
use crate::hardware::tlb::Writes;
use crate::vm::machine::{Machine, MachineConfig, MachineError};

const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
/// PWT and PCD: the lowest two bits of a number in the PAT.
const PAT_LOW_SHIFT: u32 = 3;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const PAGE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;
/// Bits 7 and 8 of a PML4 or PML5 entry must be zero.
const PML4E_RESERVED: u64 = 0b11 << 7;
/// The page-attribute-table bit of a large page: the lowest address bit of its PTE, but no address
/// bit.
const LARGE_PAT: u64 = 1 << 12;

// EXITINFO1 of a nested page fault.
const CODE_PRESENT: u64 = 1 << 0;
const CODE_WRITE: u64 = 1 << 1;
const CODE_USER: u64 = 1 << 2;
const CODE_RESERVED: u64 = 1 << 3;
const CODE_FETCH: u64 = 1 << 4;
const CODE_FINAL: u64 = 1 << 32;
const CODE_GUEST_TABLE: u64 = 1 << 33;

// SAFETY: it walks as the manual says, through `Walker` and `Used` alone. The flush is of
// everything.
unsafe impl HardwareFormat for slat::format::Npt {
    const GUEST_PHYSICAL_BITS: u32 = 48;
    const LEVELS: u8 = 4;
    const GUEST_PML4E_RESERVED: u64 = 1 << 8;
    const LOGS_MODIFICATIONS: bool = false;
    const HAS_TLB_CONFLICTS: bool = false;

    fn shadow_machine(config: &MachineConfig) -> Result<Machine<Self>, MachineError> {
        Machine::with_shadow_paging(config)
    }

    // Always: a walk that is called, and passes its result in memory, takes a fifth longer.
    #[inline(always)]
    fn walk<C: WalkMemory>(walker: Walker<'_, C>, gpa: Gpa, access: Access, purpose: Purpose) -> Result<Mapping, Stop> {
        let access = match purpose {
            Purpose::Data => access,
            Purpose::GuestTable => Access::Write,
        };
        let fault = |present: u64| Stop::Fault(Fault { gpa, access, code: code(access, purpose) | present });
        let top = walker.processor.levels;
        // An address beyond what the levels translate has no translation.
        if gpa.0 >> shift(top + 1) != 0 {
            return Err(fault(0));
        }

        let mut table = walker.root;
        // Writing and user access must be granted at every level, no-execute denies at any.
        let mut granted = WRITABLE | USER;
        let mut denied = 0;
        let mut path = [Used { at: std::ptr::null_mut(), entry: 0 }; MAX_LEVELS as usize];
        let mut level = top;
        loop {
            let Some(used) = Used::read_second_stage(walker, table, index(gpa.0, level), level)? else {
                return Err(Stop::NoMemory { gpa, hpa: table });
            };
            let entry = used.entry;
            if entry & PRESENT == 0 {
                return Err(fault(0));
            }
            if entry & reserved(entry, level) != 0 {
                let code = code(access, purpose) | CODE_PRESENT | CODE_RESERVED;
                return Err(Stop::Misconfigured(Misconfiguration { gpa, level: Level(level), entry, code }));
            }
            granted &= entry;
            denied |= entry & NO_EXECUTE;
            path[usize::from(level) - 1] = used;
            if is_leaf(entry, level) {
                break;
            }
            table = Hpa(entry & address_mask(12));
            level -= 1;
        }

        let permitted = granted & USER != 0
            && match access {
                Access::Read => true,
                Access::Write => granted & WRITABLE != 0,
                Access::Execute | Access::ExecuteUser => denied == 0,
            };
        if !permitted {
            return Err(fault(CODE_PRESENT));
        }

        for above in (level..top).rev() {
            path[usize::from(above)].set(walker, ACCESSED)?;
        }
        let marks = if access == Access::Write { ACCESSED | DIRTY } else { ACCESSED };
        let leaf = path[usize::from(level) - 1].set(walker, marks)?;
        let writes = if granted & WRITABLE != 0 && leaf & DIRTY != 0 { Writes::Allowed } else { Writes::MustWalk };
        let fetches = fetches_if(denied == 0, ALL_FETCHES);
        let memory = memory(leaf, level, walker.processor.pat);
        mapping(walker, gpa, leaf & address_mask(shift(level)), level, Grants { writes, fetches, memory })
    }
}

/// Whether the PTE maps a page. Bit 7 is the page-attribute-table bit in PTEs of level 1 and
/// reserved in levels 4 and 5.
fn is_leaf(entry: u64, level: u8) -> bool {
    level == 1 || entry & PAGE != 0
}

/// What a leaf says of its memory by a number in the host's PAT, which the hypervisor loads with
/// types that exist (15.25.8).
fn memory(leaf: u64, level: u8, pat: u64) -> Memory {
    let high = if level == 1 { PAGE } else { LARGE_PAT };
    let number = leaf >> PAT_LOW_SHIFT & 0b11 | if leaf & high != 0 { 0b100 } else { 0 };
    Memory::of_x86(pat >> (8 * number) & 0xff).unwrap_or(Memory::Device)
}

/// The bits that must be zero in a present PTE.
fn reserved(entry: u64, level: u8) -> u64 {
    match level {
        4 | 5 => PML4E_RESERVED,
        2 | 3 if is_leaf(entry, level) => address_mask(12) & !address_mask(shift(level)) & !LARGE_PAT,
        _ => 0,
    }
}

/// The error code without the present and reserved bits.
fn code(access: Access, purpose: Purpose) -> u64 {
    let access = match access {
        Access::Read => 0,
        Access::Write => CODE_WRITE,
        Access::Execute | Access::ExecuteUser => CODE_FETCH,
    };
    let purpose = match purpose {
        Purpose::Data => CODE_FINAL,
        Purpose::GuestTable => CODE_GUEST_TABLE,
    };
    CODE_USER | access | purpose
}
