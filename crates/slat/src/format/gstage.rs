//! RISC-V G-stage: Sv39x4, Sv48x4 and Sv57x4 (RISC-V Privileged Architecture, chapter "H Extension
//! for Hypervisor Support", section "Two-Stage Address Translation"; the PTEs are those of "Sv39:
//! Page-Based 39-bit Virtual-Memory System"). The root is four times as large as the other
//! page-table pages, 16 KiB and aligned to that. So guest-physical addresses have two bits more
//! than the virtual ones of Sv39, Sv48 and Sv57.
//!
//! Hardware sets A and D (Svadu), or a fault does (Svade).
//! [`AccessTracking::Faults`](crate::tables::AccessTracking::Faults) leaves none clear in a leaf
//! PTE that needs it. All accesses of a guest count as user accesses here, so U is set in each leaf
//! PTE.
//!
//! A PTE with R, W and X clear points to a page-table page. It has no room for rights and cannot be
//! protected. Physical addresses have 56 bits; the engine uses 52 (`table/pte.rs` keeps them in
//! bits 12 to 51).

#![expect(unsafe_code, reason = "implements Format")]

use super::walkers::CoherentWalkers;
use super::{CpuFeatures, Execute, Format, Geometry, Hardware, LeafAttributes, MemoryType, Pte};
use crate::addr::{Access, Hpa, Level, Pfn};

/// Marker of RISC-V's Sv39x4 tables: 3 levels, 41 bits of guest-physical address.
///
/// hgatp has the mode Sv39x4, the VMID and the page number of [`Vm::root`](crate::Vm::root), which
/// is 16 KiB large and aligned to that. With Svadu (enabled for the G-stage by `menvcfg.ADUE`),
/// CPUs set A and D. Without it, an access faults where they are clear, and the fault sets them.
///
/// [`Host::flush_local`](crate::Host::flush_local) is required.
#[derive(Clone, Copy, Debug)]
pub struct Sv39x4;

/// Marker of RISC-V's Sv48x4 tables: 4 levels, 50 bits of guest-physical address.
///
/// hgatp has the mode Sv48x4, the VMID and the page number of [`Vm::root`](crate::Vm::root), which
/// is 16 KiB large and aligned to that. With Svadu (enabled for the G-stage by `menvcfg.ADUE`),
/// CPUs set A and D. Without it, an access faults where they are clear, and the fault sets them.
///
/// [`Host::flush_local`](crate::Host::flush_local) is required.
#[derive(Clone, Copy, Debug)]
pub struct Sv48x4;

/// Marker of RISC-V's Sv57x4 tables: 5 levels, 59 bits of guest-physical address.
///
/// hgatp has the mode Sv57x4, the VMID and the page number of [`Vm::root`](crate::Vm::root), which
/// is 16 KiB large and aligned to that. With Svadu (enabled for the G-stage by `menvcfg.ADUE`),
/// CPUs set A and D. Without it, an access faults where they are clear, and the fault sets them.
///
/// [`Host::flush_local`](crate::Host::flush_local) is required.
#[derive(Clone, Copy, Debug)]
pub struct Sv57x4;

/// V, bit 0. If it is clear, all other bits are software's.
const VALID: u64 = 1 << 0;
/// R, bit 1.
const READ: u64 = 1 << 1;
/// W, bit 2. Write without read is reserved.
const WRITE: u64 = 1 << 2;
/// X, bit 3.
const EXECUTE: u64 = 1 << 3;
/// U, bit 4.
const USER: u64 = 1 << 4;
/// A, bit 6; reserved in a directory entry, as are D and U.
const ACCESSED: u64 = 1 << 6;
/// D, bit 7.
const DIRTY: u64 = 1 << 7;
/// RSW, bits 8 and 9: reserved for software.
const SOFTWARE_8: u64 = 1 << 8;
/// Bit 9, likewise.
const SOFTWARE_9: u64 = 1 << 9;
/// PBMT, bits 61 and 62, with Svpbmt: the memory type of the physical memory attributes (0),
/// non-cacheable (1), or I/O (2).
const PBMT_SHIFT: u32 = 61;
/// Physical page number, bits 10 to 53.
const PPN: u64 = ((1 << 44) - 1) << PPN_SHIFT;
const PPN_SHIFT: u32 = 10;

fn with_ppn(pfn: Pfn) -> u64 {
    pfn.0 << PPN_SHIFT & PPN
}

/// Implements [`Format`] for one of the three, which differ in name, levels and address bits.
macro_rules! gstage {
    ($format:ty, $name:literal, $root_level:literal, $gpa_bits:literal) => {
        // SAFETY: the bits of the page number are apart from all flag bits. `is_present` and
        // `is_leaf` read only bits that `leaf` and `table` set as they must (`leaf` sets R, `table`
        // none of R, W and X). Of the flag bits only W and X are among these, and they are never
        // set in a directory entry, as those have no generation. No state is kept.
        unsafe impl Format for $format {
            type Walkers = CoherentWalkers;

            const NAME: &'static str = $name;
            const ROOT_LEVEL: Level = Level($root_level);
            const GPA_BITS: u32 = $gpa_bits;
            const GEOMETRIES: &'static [Geometry] =
                &[Geometry { root_level: Level($root_level), gpa_bits: 32..=$gpa_bits }];
            const HPA_BITS: u32 = 52;
            const MAX_ROOT_ENTRIES: usize = 2048;
            const TABLE_ENTRIES: usize = 512;
            const ADDRESS: u64 = PPN;
            const HAS_ADDRESS_BITS: bool = false;
            const FEATURES: CpuFeatures = CpuFeatures::SVPBMT;

            const WRITABLE: u64 = WRITE;
            const ACCESSED: u64 = ACCESSED;
            const DIRTY: u64 = DIRTY;
            const HAS_DIRTY_BIT: bool = true;
            const HOST_WRITABLE: u64 = SOFTWARE_8;
            const WAS_DIRTY: u64 = SOFTWARE_9;
            const GENERATION: u64 = 0;
            const BREAK_BEFORE_MAKE: bool = false;
            const NEEDS_LOCAL_FLUSH: bool = true;
            const HAS_MODIFICATION_LOG: bool = false;

            #[inline]
            fn is_present(pte: Pte) -> bool {
                pte.0 & VALID != 0
            }

            #[inline]
            fn is_leaf(pte: Pte, _level: Level) -> bool {
                pte.0 & (READ | WRITE | EXECUTE) != 0
            }

            #[inline]
            fn leaf(pfn: Pfn, _level: Level) -> Pte {
                Pte(with_ppn(pfn) | VALID | READ | USER)
            }

            #[inline]
            fn table(table: Hpa) -> Pte {
                Pte(with_ppn(table.pfn()) | VALID)
            }

            #[inline]
            fn address_bits(hpa: Hpa) -> u64 {
                hpa.0 >> (12 - PPN_SHIFT)
            }

            #[inline]
            fn hpa(bits: u64) -> Hpa {
                Hpa(bits << (12 - PPN_SHIFT))
            }

            const ATTRIBUTES: u64 = EXECUTE | 0b11 << PBMT_SHIFT;

            fn attribute_bits(attributes: LeafAttributes, hardware: &Hardware) -> Option<u64> {
                let has_types = hardware.features.contains(CpuFeatures::SVPBMT);
                let memory = match attributes.memory {
                    MemoryType::WriteBack | MemoryType::AsGuest => 0,
                    MemoryType::NonCached if has_types => 1,
                    MemoryType::Device | MemoryType::DeviceStrict if has_types => 2,
                    // A device is one by its physical memory attributes.
                    MemoryType::Device | MemoryType::DeviceStrict => 0,
                    MemoryType::WriteThrough | MemoryType::NonCached => return None,
                };
                let execute = match attributes.execute {
                    Execute::All => EXECUTE,
                    Execute::None => 0,
                    Execute::User | Execute::Supervisor => return None,
                };
                Some(memory << PBMT_SHIFT | execute)
            }

            #[inline]
            fn pack_attributes(pte: Pte, _level: Level) -> u64 {
                pte.0 >> EXECUTE.trailing_zeros() & 1 | (pte.0 >> PBMT_SHIFT & 0b11) << 1
            }

            #[inline]
            fn unpack_attributes(packed: u64, _level: Level) -> u64 {
                (packed & 1) << EXECUTE.trailing_zeros() | (packed >> 1 & 0b11) << PBMT_SHIFT
            }

            #[inline]
            fn may_execute(pte: Pte, _access: Access) -> bool {
                pte.0 & EXECUTE != 0
            }
        }
    };
}

gstage!(Sv39x4, "gstage-sv39x4", 3, 41);
gstage!(Sv48x4, "gstage", 4, 50);
gstage!(Sv57x4, "gstage-sv57x4", 5, 59);

#[cfg(test)]
mod tests {
    use super::*;

    fn entries_are_those_of_the_manual<F: Format>() {
        // V, R and U; the page number two bits lower than in the address. X is an attribute.
        let pages = [(0xab_cdef_0123, Level::L4K), (0x80_0000_0200, Level::L2M), (0x80_0004_0000, Level::L1G)];
        let leaves = [0x0002_af37_bc04_8c13, 0x0002_0000_0008_0013, 0x0002_0000_1000_0013].map(Pte);
        assert_eq!(pages.map(|(pfn, level)| F::leaf(Pfn(pfn), level)), leaves);
        for (leaf, (pfn, level)) in leaves.into_iter().zip(pages) {
            assert_eq!(F::address(leaf, level).pfn().0, pfn);
        }
        assert_eq!(F::table(Hpa(0x000f_ffff_ffff_c000)), Pte(0x0003_ffff_ffff_f001));
        assert_eq!((F::WRITABLE, F::ACCESSED, F::DIRTY), (0x04, 0x40, 0x80));
        assert_eq!(F::HOST_WRITABLE | F::WAS_DIRTY, 0b11 << 8);
        assert!(F::is_leaf(leaves[0], Level::L1G) && !F::is_leaf(F::table(Hpa(0x1000)), Level::L2M));
    }

    #[test]
    fn sv39x4_entries_are_those_of_the_manual() {
        entries_are_those_of_the_manual::<Sv39x4>();
    }

    #[test]
    fn sv48x4_entries_are_those_of_the_manual() {
        entries_are_those_of_the_manual::<Sv48x4>();
    }

    #[test]
    fn sv57x4_entries_are_those_of_the_manual() {
        entries_are_those_of_the_manual::<Sv57x4>();
    }

    #[test]
    fn roots_are_four_times_as_large() {
        const { assert!(Sv39x4::MAX_ROOT_ENTRIES == 2048 && Sv57x4::MAX_ROOT_ENTRIES == 2048) };
        const { assert!(Sv39x4::GPA_BITS == 12 + 2 * 9 + 11 && Sv48x4::GPA_BITS == 12 + 3 * 9 + 11) };
        const { assert!(Sv57x4::GPA_BITS == 12 + 4 * 9 + 11) };
    }
}
