//! Arm stage 2: VMSAv8-64, 4 KiB granule, 48 bits of intermediate physical address in four levels
//! (Arm ARM, chapter "The AArch64 Virtual Memory System Architecture", "VMSAv8-64 translation table
//! format descriptors"). Arm counts levels from the root down: its level 0 is level 4 here, its
//! level 3 is level 1. [`Stage2`] says what VTCR_EL2 must hold.
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

use super::{Format, Pte};
use crate::addr::{Hpa, Level, Pfn};

/// Marker of Arm's stage 2 tables: 4 KiB granule, 4 levels, 48 bits of guest-physical address.
///
/// VTTBR_EL2 has [`Vm::root`](crate::Vm::root) and the VMID. VTCR_EL2 has T0SZ 16, SL0 2 and TG0 0,
/// with DS clear. With VTCR_EL2.HA, CPUs set the access flag. Without it, an access faults where
/// the flag is clear, and the fault sets it. CPUs set no dirty bit: the dirty state that hardware
/// can manage (VTCR_EL2.HD) is not used, so a leaf PTE that may be written counts as dirty.
///
/// [`Host::flush_local`](crate::Host::flush_local) is required.
#[derive(Clone, Copy, Debug)]
pub struct Stage2;

/// Bit 0: the descriptor is valid. If it is clear, all other bits are ignored.
const VALID: u64 = 1 << 0;
/// Bit 1: of a table descriptor, or of a page descriptor at the lowest level; clear in a block
/// descriptor.
const TABLE_OR_PAGE: u64 = 1 << 1;
/// MemAttr, bits 2 to 5: normal memory, outer and inner write-back cacheable.
const WRITE_BACK: u64 = 0b1111 << 2;
/// S2AP\[0\], bit 6: reads are allowed.
const READ: u64 = 1 << 6;
/// S2AP\[1\], bit 7: writes are allowed.
const WRITE: u64 = 1 << 7;
/// SH, bits 8 and 9: inner shareable.
const INNER_SHAREABLE: u64 = 0b11 << 8;
/// AF, bit 10, in leaf PTEs: the access flag.
const ACCESS_FLAG: u64 = 1 << 10;
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
    const NAME: &'static str = "stage2";
    const ROOT_LEVEL: Level = Level(4);
    const GPA_BITS: u32 = 48;
    const HPA_BITS: u32 = 48;
    const ROOT_ENTRIES: usize = 512;
    const TABLE_ENTRIES: usize = 512;

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
        // XN, bits 53 and 54, stays clear: execution is allowed at EL1 and EL0.
        Pte(pfn.hpa().0 & ADDRESS | VALID | kind | WRITE_BACK | READ | INNER_SHAREABLE)
    }

    #[inline]
    fn table(table: Hpa) -> Pte {
        Pte(table.0 & ADDRESS | VALID | TABLE_OR_PAGE)
    }

    #[inline]
    fn address(pte: Pte, _level: Level) -> Hpa {
        // In a block the bits between 12 and its size are nT or reserved; `leaf` leaves them clear.
        Hpa(pte.0 & ADDRESS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_those_of_the_manual() {
        // Page: 0b11, MemAttr 0b1111, S2AP 0b01, SH 0b11, AF 0. Block: 0b01 and the same
        // attributes.
        assert_eq!(Stage2::leaf(Pfn(0xa_bcde_1234), Level::L4K), Pte(0x0000_abcd_e123_437f));
        assert_eq!(Stage2::leaf(Pfn(0x8_0000_0200), Level::L2M), Pte(0x0000_8000_0020_037d));
        assert_eq!(Stage2::leaf(Pfn(0x8_0004_0000), Level::L1G), Pte(0x0000_8000_4000_037d));
        // Table: 0b11 and the address; the attribute bits of stage 1 table descriptors are
        // reserved.
        assert_eq!(Stage2::table(Hpa(0xffff_ffff_f000)), Pte(0x0000_ffff_ffff_f003));
        assert_eq!((Stage2::WRITABLE, Stage2::ACCESSED), (0x80, 0x400));
        assert_eq!(Stage2::HOST_WRITABLE | Stage2::WAS_DIRTY | Stage2::DIRTY, 0b111 << 55);
    }
}
