//! The walker for VT-d's second-stage page tables: what an IOMMU does for a DMA request, in
//! scalable mode, with three to five levels, second-stage accessed and dirty flags enabled (SSADE),
//! extended memory types and execute requests disabled (EMTE, ERE), and pages of 2 MiB and 1 GiB.
//!
//! An entry is present if R or W is set. Both rights are those of all entries on the way. Bits 10,
//! 52 to 60 and 63 are ignored. What hardware may interpret, ignore or refuse, depending on its
//! revision and on what is enabled (bits 2 to 6 and 61), is refused here, since an engine must not
//! set it.
//!
//! A device does not execute: a fetch is a read. The guest's own page tables are x86's all the same
//! ([`guest`](super::guest)), and accesses to them count as writes: so the CPUs of a machine can
//! walk these tables, too, and an engine is tested with them as with any.
//!
//! Source: Intel Virtualization Technology for Directed I/O, Architecture Specification, rev. 4.1:
//! 3.7 "Second-Stage Translation" with "Access Rights" and "Accessed and Dirty Flags"; 7.1.3 "Fault
//! Conditions and Remapping Hardware Behavior for Various Requests"; 9.8 "Second-Stage Paging
//! Entries"; 10.4.2 and 10.4.3, the capability registers.

use slat::format::CpuFeatures;
use slat::{Access, Gpa, Hpa, Level};

use super::{ALL_FETCHES, MAX_LEVELS, address_mask, index, mapping, shift};
use super::{
    Fault, Grants, HardwareFormat, Mapping, Memory, Misconfiguration, Purpose, Stop, Used, WalkMemory, Walker,
};
use crate::hardware::tlb::Writes;

const READ: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const RIGHTS: u64 = READ | WRITE;
/// PS, of an entry of level 2 or 3.
const PAGE: u64 = 1 << 7;
const ACCESSED: u64 = 1 << 8;
const DIRTY: u64 = 1 << 9;
/// SNP, in leaves, if the hardware has snoop control.
const SNOOP: u64 = 1 << 11;
/// X, EMT and IPAT; TM of old revisions; and bit 61.
const RESERVED: u64 = 1 << 2 | 0b1111 << 3 | 0b11 << 61;

// Fault reasons in scalable mode (7.1.3).
/// A reserved field of a second-stage entry is not zero.
const REASON_RESERVED: u64 = 0x7a;
/// The address is beyond what the tables translate.
const REASON_TOO_HIGH: u64 = 0x83;
/// No permission to write.
const REASON_WRITE: u64 = 0x85;
/// No permission to read.
const REASON_READ: u64 = 0x86;

// SAFETY: it walks as the manual says, through `Walker` and `Used` alone. The flush is of
// everything.
unsafe impl HardwareFormat for slat::format::Vtd {
    const GUEST_PHYSICAL_BITS: u32 = 48;
    const LEVELS: u8 = 4;
    const GUEST_PML4E_RESERVED: u64 = 0;
    const LOGS_MODIFICATIONS: bool = false;
    const HAS_TLB_CONFLICTS: bool = false;

    // Always: a walk that is called, and passes its result in memory, takes a fifth longer.
    #[inline(always)]
    fn walk<C: WalkMemory>(walker: Walker<'_, C>, gpa: Gpa, access: Access, purpose: Purpose) -> Result<Mapping, Stop> {
        let access = match purpose {
            Purpose::Data => access,
            Purpose::GuestTable => Access::Write,
        };
        let fault = |code| Stop::Fault(Fault { gpa, access, code });
        let (needed, reason) = match access {
            Access::Write => (WRITE, REASON_WRITE),
            Access::Read | Access::Execute | Access::ExecuteUser => (READ, REASON_READ),
        };
        let top = walker.processor.levels;
        if gpa.0 >> shift(top + 1) != 0 {
            return Err(fault(REASON_TOO_HIGH));
        }

        let mut table = walker.root;
        let mut granted = RIGHTS;
        let mut path = [Used { at: std::ptr::null_mut(), entry: 0 }; MAX_LEVELS as usize];
        let mut level = top;
        loop {
            let Some(used) = Used::read_second_stage(walker, table, index(gpa.0, level), level)? else {
                return Err(Stop::NoMemory { gpa, hpa: table });
            };
            let entry = used.entry;
            if entry & RIGHTS == 0 {
                return Err(fault(reason));
            }
            if entry & reserved(entry, level, walker.processor.features) != 0 {
                let code = REASON_RESERVED;
                return Err(Stop::Misconfigured(Misconfiguration { gpa, level: Level(level), entry, code }));
            }
            granted &= entry;
            path[usize::from(level) - 1] = used;
            if is_leaf(entry, level) {
                break;
            }
            table = Hpa(entry & address_mask(12));
            level -= 1;
        }
        if granted & needed == 0 {
            return Err(fault(reason));
        }

        for above in (level..top).rev() {
            path[usize::from(above)].set(walker, ACCESSED)?;
        }
        let marks = if access == Access::Write { ACCESSED | DIRTY } else { ACCESSED };
        let leaf = path[usize::from(level) - 1].set(walker, marks)?;
        let writes = if granted & WRITE != 0 && leaf & DIRTY != 0 { Writes::Allowed } else { Writes::MustWalk };
        let grants = Grants { writes, fetches: ALL_FETCHES, memory: Memory::ByAddress };
        mapping(walker, gpa, leaf & address_mask(shift(level)), level, grants)
    }
}

/// Whether the entry maps a page. Bit 7 is ignored at level 1 and reserved above level 3.
fn is_leaf(entry: u64, level: u8) -> bool {
    level == 1 || matches!(level, 2 | 3) && entry & PAGE != 0
}

/// The bits that must be zero in a present entry.
fn reserved(entry: u64, level: u8, features: CpuFeatures) -> u64 {
    if !is_leaf(entry, level) {
        return RESERVED | SNOOP | PAGE;
    }
    let snoop = if features.contains(CpuFeatures::SNOOP_CONTROL) { 0 } else { SNOOP };
    // Address bits below the size of a large page.
    RESERVED | snoop | address_mask(12) & !address_mask(shift(level))
}
