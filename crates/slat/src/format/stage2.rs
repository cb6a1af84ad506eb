//! Arm stage 2: VMSAv8-64, 4 KiB granule, 32 to 48 bits of intermediate physical address in three
//! or four levels (Arm ARM, chapter "The AArch64 Virtual Memory System Architecture", "VMSAv8-64
//! translation table format descriptors"). Arm counts levels from the root down: its level 0 is
//! level 4 here, its level 3 is level 1. [`Stage2`] says what VTCR_EL2 must hold.
//!
//! Hardware sets the access flag (FEAT_HAFDBS, VTCR_EL2.HA), or a fault does.
//! [`AccessTracking::Faults`](crate::tables::AccessTracking::Faults) leaves none clear.
//!
//! The dirty state that hardware can manage (VTCR_EL2.HD, DBM in bit 51) is not used. There
//! S2AP\[1\] alone would say both that a page may be written and that it was. So D is a software
//! bit, set together with W, and dirty bits cannot be the log.
//!
//! Stage 2 tables are not hierarchical: a directory entry has no permission, and cannot be
//! protected.

#![expect(unsafe_code, reason = "implements Format")]

use super::walkers::CoherentWalkers;
use super::{CpuFeatures, Execute, Format, Geometry, Hardware, LeafAttributes, MemoryType, Pte};
use crate::addr::{Access, Hpa, Level, PAGE_SHIFT, Pfn};

/// Marker of Arm's stage 2 tables, 4 KiB granule: 4 levels and 40 to 48 bits of guest-physical
/// address (48 by default), or 3 levels and 32 to 43 bits.
///
/// VTTBR_EL2 has [`Vm::root`](crate::Vm::root) and the VMID. VTCR_EL2 has T0SZ 64 less the address
/// bits ([`Vm::gpa_bits`](crate::Vm::gpa_bits)), SL0 2 for 4 levels and 1 for 3, and TG0 0, with DS
/// clear. With 3 levels and more than 39 bits, the root is 2 to 16 page-table pages behind each
/// other, aligned to their size together (Arm ARM, "Concatenated translation tables").
///
/// With VTCR_EL2.HA, CPUs set the access flag. Without it, an access faults where the flag is
/// clear, and the fault sets it. CPUs set no dirty bit: the dirty state that hardware can manage
/// (VTCR_EL2.HD) is not used, so a leaf PTE that may be written counts as dirty.
///
/// Without [`CpuFeatures::FWB`] the memory type is combined with that of the guest, and the weaker
/// one holds. With it, it holds whatever the guest says, and there is no
/// [`MemoryType::WriteThrough`].
///
/// [`Host::flush_local`](crate::Host::flush_local) is required.
#[derive(Clone, Copy, Debug)]
pub struct Stage2;

/// Bit 0: the descriptor is valid. If it is clear, all other bits are ignored.
const VALID: u64 = 1 << 0;
/// Bit 1: of a table descriptor, or of a page descriptor at the lowest level; clear in a block
/// descriptor.
const TABLE_OR_PAGE: u64 = 1 << 1;
/// MemAttr, bits 2 to 5.
const MEMORY_SHIFT: u32 = 2;
/// S2AP\[0\], bit 6: reads are allowed.
const READ: u64 = 1 << 6;
/// S2AP\[1\], bit 7: writes are allowed.
const WRITE: u64 = 1 << 7;
/// SH, bits 8 and 9: inner shareable.
const INNER_SHAREABLE: u64 = 0b11 << 8;
/// AF, bit 10, in leaf PTEs: the access flag.
const ACCESS_FLAG: u64 = 1 << 10;
/// XN, bits 53 and 54. The lower one only with FEAT_XNX. 0b00: all may execute, 0b01: EL0 alone,
/// 0b10: none, 0b11: EL1 alone.
const EXECUTE_NEVER_SHIFT: u32 = 53;
/// Bit 55, one of the bits 55 to 58 that are reserved for software use in leaf PTEs.
const SOFTWARE_55: u64 = 1 << 55;
/// Bit 56, likewise.
const SOFTWARE_56: u64 = 1 << 56;
/// Bit 57, likewise.
const SOFTWARE_57: u64 = 1 << 57;
/// Output address or address of the next table, bits 12 to 47.
const ADDRESS: u64 = 0x0000_ffff_ffff_f000;

// SAFETY: address bits 12 to 47 are apart from all flag bits. `is_present` and `is_leaf` read only
// bits that `leaf` and `table` set as they must, and none of the flag bits is among these. No state
// is kept.
unsafe impl Format for Stage2 {
    type Walkers = CoherentWalkers;

    const NAME: &'static str = "stage2";
    const ROOT_LEVEL: Level = Level(4);
    const GPA_BITS: u32 = 48;
    const GEOMETRIES: &'static [Geometry] =
        &[Geometry { root_level: Level(3), gpa_bits: 32..=43 }, Geometry { root_level: Level(4), gpa_bits: 40..=48 }];
    const HPA_BITS: u32 = 48;
    const MAX_ROOT_ENTRIES: usize = 16 * 512;
    const TABLE_ENTRIES: usize = 512;
    const ADDRESS: u64 = ADDRESS;
    const HAS_ADDRESS_BITS: bool = false;
    const FEATURES: CpuFeatures = CpuFeatures::FWB.union(CpuFeatures::XNX);

    const WRITABLE: u64 = WRITE;
    const ACCESSED: u64 = ACCESS_FLAG;
    const DIRTY: u64 = SOFTWARE_57;
    const HAS_DIRTY_BIT: bool = false;
    const HOST_WRITABLE: u64 = SOFTWARE_55;
    const WAS_DIRTY: u64 = SOFTWARE_56;
    const GENERATION: u64 = 0;
    const BREAK_BEFORE_MAKE: bool = true;
    const NEEDS_LOCAL_FLUSH: bool = true;
    const HAS_MODIFICATION_LOG: bool = false;

    #[inline]
    fn is_present(pte: Pte) -> bool {
        pte.0 & VALID != 0
    }

    #[inline]
    fn is_leaf(pte: Pte, level: Level) -> bool {
        level == Level::L4K || pte.0 & TABLE_OR_PAGE == 0
    }

    #[inline]
    fn leaf(pfn: Pfn, level: Level) -> Pte {
        let kind = if level == Level::L4K { TABLE_OR_PAGE } else { 0 };
        Pte(pfn.hpa().0 & ADDRESS | VALID | kind | READ | INNER_SHAREABLE)
    }

    #[inline]
    fn table(table: Hpa) -> Pte {
        Pte(table.0 & ADDRESS | VALID | TABLE_OR_PAGE)
    }

    fn root_entries(root_level: Level, gpa_bits: u32) -> usize {
        let index_bits = gpa_bits - PAGE_SHIFT - root_level.nr_pages().trailing_zeros();
        // A root for fewer bits uses the first of its page-table page.
        Self::TABLE_ENTRIES.max(1 << index_bits)
    }

    const ATTRIBUTES: u64 = 0b1111 << MEMORY_SHIFT | 0b11 << EXECUTE_NEVER_SHIFT;

    fn attribute_bits(attributes: LeafAttributes, hardware: &Hardware) -> Option<u64> {
        let forces = hardware.features.contains(CpuFeatures::FWB);
        let memory = match (attributes.memory, forces) {
            (MemoryType::WriteBack | MemoryType::AsGuest, false) => 0b1111,
            (MemoryType::WriteBack, true) => 0b0110,
            (MemoryType::AsGuest, true) => 0b0111,
            (MemoryType::WriteThrough, false) => 0b1010,
            (MemoryType::WriteThrough, true) => return None,
            (MemoryType::NonCached, _) => 0b0101,
            (MemoryType::Device, _) => 0b0001,
            (MemoryType::DeviceStrict, _) => 0b0000,
        };
        let has_modes = hardware.features.contains(CpuFeatures::XNX);
        let execute_never = match attributes.execute {
            Execute::All => 0b00,
            Execute::None => 0b10,
            Execute::User if has_modes => 0b01,
            Execute::Supervisor if has_modes => 0b11,
            Execute::User | Execute::Supervisor => return None,
        };
        Some(memory << MEMORY_SHIFT | execute_never << EXECUTE_NEVER_SHIFT)
    }

    #[inline]
    fn pack_attributes(pte: Pte, _level: Level) -> u64 {
        pte.0 >> MEMORY_SHIFT & 0b1111 | (pte.0 >> EXECUTE_NEVER_SHIFT & 0b11) << 4
    }

    #[inline]
    fn unpack_attributes(packed: u64, _level: Level) -> u64 {
        (packed & 0b1111) << MEMORY_SHIFT | (packed >> 4 & 0b11) << EXECUTE_NEVER_SHIFT
    }

    #[inline]
    fn may_execute(pte: Pte, access: Access) -> bool {
        match pte.0 >> EXECUTE_NEVER_SHIFT & 0b11 {
            0b00 => true,
            0b01 => access == Access::ExecuteUser,
            0b10 => false,
            _ => access == Access::Execute,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_those_of_the_manual() {
        // Page: 0b11, S2AP 0b01, SH 0b11, AF 0; MemAttr is an attribute. Block: 0b01.
        assert_eq!(Stage2::leaf(Pfn(0xa_bcde_1234), Level::L4K), Pte(0x0000_abcd_e123_4343));
        assert_eq!(Stage2::leaf(Pfn(0x8_0000_0200), Level::L2M), Pte(0x0000_8000_0020_0341));
        assert_eq!(Stage2::leaf(Pfn(0x8_0004_0000), Level::L1G), Pte(0x0000_8000_4000_0341));
        let default = Stage2::attribute_bits(LeafAttributes::default(), &Hardware::default());
        assert_eq!(default, Some(0b1111 << 2));
        // Table: 0b11 and the address; the attribute bits of stage 1 table descriptors are
        // reserved.
        assert_eq!(Stage2::table(Hpa(0xffff_ffff_f000)), Pte(0x0000_ffff_ffff_f003));
        assert_eq!((Stage2::WRITABLE, Stage2::ACCESSED), (0x80, 0x400));
        assert_eq!(Stage2::HOST_WRITABLE | Stage2::WAS_DIRTY | Stage2::DIRTY, 0b111 << 55);
    }
}
