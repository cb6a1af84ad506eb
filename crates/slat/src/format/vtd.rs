//! Intel VT-d second-stage tables: what an IOMMU walks for DMA (Intel Virtualization Technology for
//! Directed I/O, Architecture Specification, rev. 4.1, 3.7 "Second-Stage Translation", 3.7.2
//! "Access Rights" and 9.8 "Second-Stage Paging Entries").
//!
//! A device does not fault and come back: DMA that finds no translation is aborted, and recorded
//! (7.1). So such a tree is one of its own, beside that of the CPUs, over memory that is pinned
//! ([`Vm::map_range`](crate::Vm::map_range)).
//!
//! Hardware ignores bits 10, 52 to 60 and 63 of an entry. Those are fewer adjacent bits than a
//! generation needs, so no directory entry is protected, although it has R and W.

#![expect(unsafe_code, reason = "implements Format")]

use super::walkers::IncoherentWalkers;
use super::{CpuFeatures, Execute, Format, Geometry, Hardware, LeafAttributes, MemoryType, Pte};
use crate::addr::{Access, Hpa, Level, Pfn};

/// Marker of Intel VT-d's second-stage tables: 4 levels and 48 bits of DMA address, or 3 and 39, or
/// 5 and 57 (CAP.SAGAW).
///
/// The PASID-table entry, or the context entry in legacy mode, has the root
/// ([`Vm::root`](crate::Vm::root)) as SSPTPTR and the levels as AW ([`Vm::root_level`] less 2). Not
/// more than CAP.SSLPS allows may be mapped by one leaf (2 MiB, 1 GiB).
///
/// A and D are set by hardware with SSADE in the PASID-table entry (ECAP.SSADS), which needs page
/// walks that snoop (fault 7Ch otherwise). Elsewhere they are ignored, and the VM has
/// [`AccessTracking::Faults`](crate::tables::AccessTracking::Faults).
///
/// Bits of a PTE: R and W are 0 and 1, in directory entries too; A is 8, and the address is 12 to
/// 51. Of a leaf PTE: 7 is set if it is a huge page; D is 9; 11 is SNP; 52 and 53 are
/// [`HOST_WRITABLE`](Format::HOST_WRITABLE) and [`WAS_DIRTY`](Format::WAS_DIRTY). Software alone
/// knows whether the memory may be executed (54; no device does it) and its type (55 to 57). Bit 2
/// (for execute requests) and bits 3 to 6 (EMT, IPAT) stay clear: EMTE and ERE of the PASID-table
/// entry must be clear, too.
///
/// With [`CpuFeatures::SNOOP_CONTROL`], [`MemoryType::WriteBack`] makes a device snoop the CPUs'
/// caches, whatever its requests say. All other types leave that to the requests, and without the
/// feature that one, too. There is no [`MemoryType::WriteThrough`].
///
/// # Obligations
/// - Where page walks do not snoop the caches (ECAP.C or ECAP.SMPWCS clear), the host implements
///   [`Host::clean_ptes`](crate::Host::clean_ptes).
/// - An IOMMU in caching mode (CAP.CM, of a hypervisor's) keeps entries that were not present: the
///   host flushes what was mapped before a device uses it. One with CAP.RWBF flushes its write
///   buffer in [`Host::clean_ptes`](crate::Host::clean_ptes).
/// - A flush invalidates the IOTLB and the paging-structure caches, and those of the devices (ATS),
///   and waits for it.
///
/// [`Vm::root_level`]: crate::Vm::root_level
#[derive(Clone, Copy, Debug)]
pub struct Vtd;

/// Read, bit 0. An entry is present if bit 0 or 1 is set; there is no bit for it.
const READ: u64 = 1 << 0;
/// Write, bit 1. Both rights are those of all entries on the way.
const WRITE: u64 = 1 << 1;
/// PS, bit 7 of an entry of level 2 or 3: it maps a page. Reserved at the higher levels.
const PAGE_SIZE: u64 = 1 << 7;
/// A, bit 8. Ignored without SSADE.
const ACCESSED: u64 = 1 << 8;
/// D, bit 9 of a leaf. Ignored without SSADE.
const DIRTY: u64 = 1 << 9;
/// SNP, bit 11 of a leaf: the request snoops, whatever it says itself. Reserved without ECAP.SC.
const SNOOP: u64 = 1 << 11;
/// Bit 52, one of the bits 52 to 60, which are ignored in every entry.
const SOFTWARE_52: u64 = 1 << 52;
/// Bit 53, likewise.
const SOFTWARE_53: u64 = 1 << 53;
/// Bit 54, likewise: whether the memory may be executed, which no device does.
const SOFTWARE_EXECUTE: u64 = 1 << 54;
/// Bits 55 to 57, likewise: the memory type as the host said it, which hardware has but in SNP.
const SOFTWARE_TYPE_SHIFT: u32 = 55;
const SOFTWARE_TYPE: u64 = 0b111 << SOFTWARE_TYPE_SHIFT;
/// Address, bits 12 to 51. Those from the host's address width on are reserved.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

// SAFETY: address bits 12 to 51 are apart from all flag bits. `is_present` and `is_leaf` read only
// bits that `leaf` and `table` set as they must. Of the flag bits only W is among these, and it
// decides nothing, as `leaf` and `table` set R. No state is kept.
unsafe impl Format for Vtd {
    type Walkers = IncoherentWalkers;

    const NAME: &'static str = "vtd";
    const ROOT_LEVEL: Level = Level(4);
    const GPA_BITS: u32 = 48;
    const GEOMETRIES: &'static [Geometry] = &[
        Geometry { root_level: Level(3), gpa_bits: 32..=39 },
        Geometry { root_level: Level(4), gpa_bits: 32..=48 },
        Geometry { root_level: Level(5), gpa_bits: 32..=57 },
    ];
    const HPA_BITS: u32 = 52;
    const MAX_ROOT_ENTRIES: usize = 512;
    const TABLE_ENTRIES: usize = 512;
    const ADDRESS: u64 = ADDRESS;
    const HAS_ADDRESS_BITS: bool = true;
    const FEATURES: CpuFeatures = CpuFeatures::SNOOP_CONTROL;

    const WRITABLE: u64 = WRITE;
    const ACCESSED: u64 = ACCESSED;
    const DIRTY: u64 = DIRTY;
    const HAS_DIRTY_BIT: bool = true;
    const HOST_WRITABLE: u64 = SOFTWARE_52;
    const WAS_DIRTY: u64 = SOFTWARE_53;
    const GENERATION: u64 = 0;
    const BREAK_BEFORE_MAKE: bool = false;
    const NEEDS_LOCAL_FLUSH: bool = false;
    const HAS_MODIFICATION_LOG: bool = false;

    #[inline]
    fn is_present(pte: Pte) -> bool {
        pte.0 & (READ | WRITE) != 0
    }

    #[inline]
    fn is_leaf(pte: Pte, level: Level) -> bool {
        level == Level::L4K || pte.0 & PAGE_SIZE != 0
    }

    #[inline]
    fn leaf(pfn: Pfn, level: Level) -> Pte {
        let size = if level == Level::L4K { 0 } else { PAGE_SIZE };
        Pte(pfn.hpa().0 & ADDRESS | READ | size)
    }

    #[inline]
    fn table(table: Hpa) -> Pte {
        // A is set here: no walk has to set it, and nothing reads it in a directory entry.
        Pte(table.0 & ADDRESS | READ | WRITE | ACCESSED)
    }

    const ATTRIBUTES: u64 = SNOOP | SOFTWARE_EXECUTE | SOFTWARE_TYPE;

    fn attribute_bits(attributes: LeafAttributes, hardware: &Hardware) -> Option<u64> {
        let has_snoop_control = hardware.features.contains(CpuFeatures::SNOOP_CONTROL);
        let snoop = match attributes.memory {
            MemoryType::WriteBack if has_snoop_control => SNOOP,
            MemoryType::WriteThrough => return None,
            _ => 0,
        };
        let execute = match attributes.execute {
            Execute::All => SOFTWARE_EXECUTE,
            Execute::None => 0,
            Execute::User | Execute::Supervisor => return None,
        };
        Some(snoop | execute | (attributes.memory as u64) << SOFTWARE_TYPE_SHIFT)
    }

    #[inline]
    fn pack_attributes(pte: Pte, _level: Level) -> u64 {
        pte.0 >> SNOOP.trailing_zeros() & 1 | (pte.0 >> SOFTWARE_EXECUTE.trailing_zeros() & 0b1111) << 1
    }

    #[inline]
    fn unpack_attributes(packed: u64, _level: Level) -> u64 {
        (packed & 1) << SNOOP.trailing_zeros() | (packed >> 1 & 0b1111) << SOFTWARE_EXECUTE.trailing_zeros()
    }

    #[inline]
    fn may_execute(pte: Pte, _access: Access) -> bool {
        pte.0 & SOFTWARE_EXECUTE != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bits that hardware ignores, in every entry.
    const IGNORED: u64 = 1 << 10 | 0x1ff << 52 | 1 << 63;

    #[test]
    fn entries_are_those_of_the_specification() {
        assert_eq!(Vtd::leaf(Pfn(0xa_bcde_1234), Level::L4K), Pte(0x0000_abcd_e123_4001));
        assert_eq!(Vtd::leaf(Pfn(0x8_0000_0200), Level::L2M), Pte(0x0000_8000_0020_0081));
        assert_eq!(Vtd::leaf(Pfn(0x8_0004_0000), Level::L1G), Pte(0x0000_8000_4000_0081));
        assert_eq!(Vtd::table(Hpa(0x000f_ffff_ffff_f000)), Pte(0x000f_ffff_ffff_f103));
        assert_eq!((Vtd::WRITABLE, Vtd::ACCESSED, Vtd::DIRTY), (2, 0x100, 0x200));
    }

    /// No bit is set that an IOMMU could call reserved.
    #[test]
    fn software_uses_ignored_bits_alone() {
        assert_eq!((Vtd::HOST_WRITABLE | Vtd::WAS_DIRTY) & !IGNORED, 0);
        let plain = Hardware::default();
        let with_snoop = Hardware { features: CpuFeatures::SNOOP_CONTROL, ..plain };
        for memory in MemoryType::ALL {
            for execute in Execute::ALL {
                let attributes = LeafAttributes { memory, execute };
                let bits = Vtd::attribute_bits(attributes, &plain);
                assert_eq!(bits.unwrap_or(0) & !IGNORED, 0, "{attributes:?}");
                let bits = Vtd::attribute_bits(attributes, &with_snoop);
                let snoop = if memory == MemoryType::WriteBack { 1 << 11 } else { 0 };
                assert!(bits.is_none_or(|bits| bits & !IGNORED == snoop), "{attributes:?}");
            }
        }
    }
}
