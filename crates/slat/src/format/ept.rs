//! Intel extended page tables (Intel SDM vol. 3C, chapter "VMX Support for Address Translation",
//! section "EPT Translation Mechanism", tables "Format of an EPT ... Entry"), with accessed and
//! dirty flags enabled in the EPTP.

#![expect(unsafe_code, reason = "implements Format")]

use super::walkers::CoherentWalkers;
use super::{CpuFeatures, Execute, Format, Geometry, Hardware, LeafAttributes, MemoryType, Pte};
use crate::addr::{Access, Hpa, Level, Pfn};

/// Marker of Intel's extended page tables: 4 levels and 48 bits of guest-physical address, or 5 and
/// 57.
///
/// The EPTP has [`Vm::root`](crate::Vm::root), a walk length of as many levels, and bit 6, so that
/// CPUs set A and D. Bit 6 is clear for a VM with
/// [`AccessTracking::Faults`](crate::tables::AccessTracking::Faults).
///
/// Bits of a PTE: R, W, X are 0 to 2, A is 8, and the address is 12 to 51. Of a leaf PTE: the
/// memory type is 5 to 3, and 6 says that the guest's PAT is ignored (it is clear for
/// [`MemoryType::AsGuest`] and [`MemoryType::Device`]); 7 is set if it is a huge page; D is 9; 10
/// is X of user code with [`CpuFeatures::MBEC`], and ignored without; 52 and 53 are
/// [`HOST_WRITABLE`](Format::HOST_WRITABLE) and [`WAS_DIRTY`](Format::WAS_DIRTY). Of a directory
/// entry, 52 to 62 are the [`GENERATION`](Format::GENERATION).
#[derive(Clone, Copy, Debug)]
pub struct Ept;

/// Read access, bit 0. A PTE is present if any of bits 0 to 2 is set.
const READ: u64 = 1 << 0;
/// Write access, bit 1. Write without read is a misconfiguration.
const WRITE: u64 = 1 << 1;
/// Execute access, bit 2.
const EXECUTE: u64 = 1 << 2;
/// Memory type of a leaf PTE, bits 3 to 5, with the numbers of MTRRs: 0 UC, 1 WC, 4 WT, 6 WB.
const MEMORY_TYPE_SHIFT: u32 = 3;
/// Bit 6 of a leaf PTE: the guest's PAT is ignored.
const IGNORE_PAT: u64 = 1 << 6;
/// Bit 10: execute access of user code, with mode-based execute control; bit 2 is that of
/// supervisor code then.
const EXECUTE_USER: u64 = 1 << 10;
/// Bit 7 of a PTE of level 2 or 3: it maps a page. Reserved or ignored elsewhere.
const MAPS_PAGE: u64 = 1 << 7;
/// Accessed, bit 8.
const ACCESSED: u64 = 1 << 8;
/// Dirty, bit 9, in leaf PTEs.
const DIRTY: u64 = 1 << 9;
/// Bit 52, ignored by hardware in every PTE.
const SOFTWARE_52: u64 = 1 << 52;
/// Bit 53, likewise.
const SOFTWARE_53: u64 = 1 << 53;
/// Bits 52 to 62 of a directory entry, all ignored there.
const TABLE_SOFTWARE: u64 = 0x7ff << 52;
/// Physical address, bits 12 to 51.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

// SAFETY: address bits 12 to 51 are apart from all flag bits. `is_present` and `is_leaf` read only
// bits that `leaf` and `table` set as they must. Of the flag bits only W and X are among these, and
// they decide nothing, as `leaf` and `table` set R. No state is kept.
unsafe impl Format for Ept {
    type Walkers = CoherentWalkers;

    const NAME: &'static str = "ept";
    const ROOT_LEVEL: Level = Level(4);
    const GPA_BITS: u32 = 48;
    const GEOMETRIES: &'static [Geometry] =
        &[Geometry { root_level: Level(4), gpa_bits: 32..=48 }, Geometry { root_level: Level(5), gpa_bits: 32..=57 }];
    const HPA_BITS: u32 = 52;
    const MAX_ROOT_ENTRIES: usize = 512;
    const TABLE_ENTRIES: usize = 512;
    const ADDRESS: u64 = ADDRESS;
    const HAS_ADDRESS_BITS: bool = true;
    const FEATURES: CpuFeatures = CpuFeatures::MBEC.union(CpuFeatures::ITLB_MULTIHIT);

    const WRITABLE: u64 = WRITE;
    const ACCESSED: u64 = ACCESSED;
    const DIRTY: u64 = DIRTY;
    const HAS_DIRTY_BIT: bool = true;
    const HOST_WRITABLE: u64 = SOFTWARE_52;
    const WAS_DIRTY: u64 = SOFTWARE_53;
    const GENERATION: u64 = TABLE_SOFTWARE;
    const BREAK_BEFORE_MAKE: bool = false;
    const NEEDS_LOCAL_FLUSH: bool = false;
    const HAS_MODIFICATION_LOG: bool = true;

    #[inline]
    fn is_present(pte: Pte) -> bool {
        pte.0 & (READ | WRITE | EXECUTE) != 0
    }

    #[inline]
    fn is_leaf(pte: Pte, level: Level) -> bool {
        level == Level::L4K || pte.0 & MAPS_PAGE != 0
    }

    #[inline]
    fn leaf(pfn: Pfn, level: Level) -> Pte {
        let size = if level == Level::L4K { 0 } else { MAPS_PAGE };
        Pte(pfn.hpa().0 & ADDRESS | READ | size)
    }

    #[inline]
    fn table(table: Hpa) -> Pte {
        Pte(table.0 & ADDRESS | READ | WRITE | EXECUTE | EXECUTE_USER | ACCESSED)
    }

    const ATTRIBUTES: u64 = EXECUTE | 0b111 << MEMORY_TYPE_SHIFT | IGNORE_PAT | EXECUTE_USER;

    fn attribute_bits(attributes: LeafAttributes, hardware: &Hardware) -> Option<u64> {
        let memory = match attributes.memory {
            MemoryType::WriteBack => 6 << MEMORY_TYPE_SHIFT | IGNORE_PAT,
            MemoryType::AsGuest => 6 << MEMORY_TYPE_SHIFT,
            MemoryType::WriteThrough => 4 << MEMORY_TYPE_SHIFT | IGNORE_PAT,
            MemoryType::NonCached => 1 << MEMORY_TYPE_SHIFT | IGNORE_PAT,
            MemoryType::Device => 0,
            MemoryType::DeviceStrict => IGNORE_PAT,
        };
        let has_modes = hardware.features.contains(CpuFeatures::MBEC);
        let execute = match attributes.execute {
            Execute::All => EXECUTE | EXECUTE_USER,
            Execute::None => 0,
            Execute::User if has_modes => EXECUTE_USER,
            Execute::Supervisor if has_modes => EXECUTE,
            Execute::User | Execute::Supervisor => return None,
        };
        Some(memory | execute)
    }

    // Bits 2 to 6 stay together; bit 10 follows.
    #[inline]
    fn pack_attributes(pte: Pte, _level: Level) -> u64 {
        pte.0 >> 2 & 0x1f | pte.0 >> 5 & 0x20
    }

    #[inline]
    fn unpack_attributes(packed: u64, _level: Level) -> u64 {
        (packed & 0x1f) << 2 | (packed & 0x20) << 5
    }

    #[inline]
    fn may_execute(pte: Pte, access: Access) -> bool {
        pte.0 & if access == Access::ExecuteUser { EXECUTE_USER } else { EXECUTE } != 0
    }
}
