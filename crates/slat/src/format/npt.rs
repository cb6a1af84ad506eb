//! AMD nested paging: PTEs are long-mode PTEs (AMD APM vol. 2, 15.25 "Nested Paging" and 5.3
//! "Long-Mode Page Translation"). Guest accesses count as user accesses in the nested tables
//! (15.25.5), so U/S is set everywhere.

#![expect(unsafe_code, reason = "implements Format")]

use super::walkers::CoherentWalkers;
use super::x86::{
    self, ADDRESS, EXECUTE_DISABLE, PAGE_SIZE_BIT, PAT_HUGE, PAT_SMALL, PRESENT, READ_WRITE, USER, WRITE_THROUGH,
};
use super::{CpuFeatures, Execute, Format, Geometry, Hardware, LeafAttributes, MemoryType, Pte};
use crate::addr::{Access, Hpa, Level, Pfn};

/// Marker of AMD's nested page tables: 4 levels and 48 bits of guest-physical address, or 5 and 57.
///
/// [`Vm::root`](crate::Vm::root) goes into nCR3. The PTEs are long-mode PTEs with U/S set, since
/// accesses of a guest count as user accesses there (AMD APM vol. 2, 15.25.5). CPUs set A and D.
/// There are as many levels as in the host's own page tables (15.25.3).
///
/// Bits of a PTE: P, R/W, U/S are 0 to 2, A is 5, and the address is 12 to 51. Of a leaf PTE: PWT
/// and PCD are 3 and 4, PAT is 7, or 12 in a huge page: the number of a memory type in the host's
/// PAT (15.25.8). D is 6, NX 63; 52 and 53 are [`HOST_WRITABLE`](Format::HOST_WRITABLE) and
/// [`WAS_DIRTY`](Format::WAS_DIRTY); 7 is set if it is a huge page. Of a directory entry, 52 to 62
/// are the [`GENERATION`](Format::GENERATION).
///
/// The guest's PAT is combined with the memory type: [`MemoryType::WriteBack`] is what the guest
/// makes of it. User and supervisor code are not told apart.
///
/// A VM with [`shadow`](mod@crate::shadow) paging has this format, too.
#[derive(Clone, Copy, Debug)]
pub struct Npt;

/// Bit 52, one of the bits 52 to 58 that are available to software (5.4, figure 5-21 and
/// following).
const SOFTWARE_52: u64 = 1 << 52;
/// Bit 53, likewise.
const SOFTWARE_53: u64 = 1 << 53;
/// Bits 52 to 62 of a directory entry, all available to software there (5.3.3, figures of the PDE,
/// PDPE and PML4E).
const TABLE_SOFTWARE: u64 = 0x7ff << 52;

/// Under shuttle page-table pages have four PTEs, in three levels: there each visit of a PTE is a
/// step. A level is nine bits of the address all the same. (Shadow paging, whose pages have four
/// PTEs there, has no format but this.)
const IS_SMALL: bool = cfg!(shuttle);

/// The bits that are the lowest two of the number of a memory type: PWT and PCD.
const TYPE_LOW: u64 = 0b11 << WRITE_THROUGH.trailing_zeros();

// Memory types in the PAT (APM vol. 2, 7.8.1).
const UC: u8 = 0;
const WC: u8 = 1;
const WT: u8 = 4;
const WB: u8 = 6;
const UC_MINUS: u8 = 7;

/// The number in `pat` of the first of `types` that it has.
fn number_in(pat: u64, types: &[u8]) -> Option<u64> {
    let numbers = pat.to_le_bytes();
    types.iter().find_map(|memory_type| numbers.iter().position(|found| found == memory_type)).map(|found| found as u64)
}

// SAFETY: address bits 12 to 51 are apart from all flag bits; that of PAT in a huge page is below
// the page's size. `is_present` and `is_leaf` read only bits that `leaf` and `table` set as they
// must, and none of the flag bits is among these: bit 7 of a leaf of 4 KiB is PAT, and decides
// nothing there. No state is kept.
unsafe impl Format for Npt {
    type Walkers = CoherentWalkers;

    const NAME: &'static str = "npt";
    const ROOT_LEVEL: Level = if IS_SMALL { Level(3) } else { Level(4) };
    const GPA_BITS: u32 = if IS_SMALL { 32 } else { 48 };
    const GEOMETRIES: &'static [Geometry] = if IS_SMALL {
        &[Geometry { root_level: Level(3), gpa_bits: 32..=32 }]
    } else {
        &[Geometry { root_level: Level(4), gpa_bits: 32..=48 }, Geometry { root_level: Level(5), gpa_bits: 32..=57 }]
    };
    const HPA_BITS: u32 = 52;
    const MAX_ROOT_ENTRIES: usize = if IS_SMALL { 4 } else { 512 };
    const TABLE_ENTRIES: usize = if IS_SMALL { 4 } else { 512 };
    const ADDRESS: u64 = ADDRESS;
    const HAS_ADDRESS_BITS: bool = true;
    const FEATURES: CpuFeatures = CpuFeatures::empty();

    const WRITABLE: u64 = READ_WRITE;
    const ACCESSED: u64 = x86::ACCESSED;
    const DIRTY: u64 = x86::DIRTY;
    const HAS_DIRTY_BIT: bool = true;
    const HOST_WRITABLE: u64 = SOFTWARE_52;
    const WAS_DIRTY: u64 = SOFTWARE_53;
    const GENERATION: u64 = if IS_SMALL { 7 << 52 } else { TABLE_SOFTWARE };
    const BREAK_BEFORE_MAKE: bool = false;
    const NEEDS_LOCAL_FLUSH: bool = false;
    const HAS_MODIFICATION_LOG: bool = false;

    #[inline]
    fn is_present(pte: Pte) -> bool {
        pte.0 & PRESENT != 0
    }

    #[inline]
    fn is_leaf(pte: Pte, level: Level) -> bool {
        level == Level::L4K || pte.0 & PAGE_SIZE_BIT != 0
    }

    #[inline]
    fn leaf(pfn: Pfn, level: Level) -> Pte {
        let size = if level == Level::L4K { 0 } else { PAGE_SIZE_BIT };
        Pte(pfn.hpa().0 & ADDRESS | PRESENT | USER | size)
    }

    #[inline]
    fn table(table: Hpa) -> Pte {
        // A is set here: no walk has to set it, and nothing reads it in a directory entry.
        Pte(table.0 & ADDRESS | PRESENT | READ_WRITE | USER | x86::ACCESSED)
    }

    const ATTRIBUTES: u64 = TYPE_LOW | PAT_SMALL | EXECUTE_DISABLE;

    fn attribute_bits(attributes: LeafAttributes, hardware: &Hardware) -> Option<u64> {
        let types: &[u8] = match attributes.memory {
            MemoryType::WriteBack | MemoryType::AsGuest => &[WB],
            MemoryType::WriteThrough => &[WT],
            MemoryType::NonCached => &[WC],
            MemoryType::Device => &[UC_MINUS, UC],
            MemoryType::DeviceStrict => &[UC],
        };
        let number = number_in(hardware.pat, types)?;
        let pat = if number & 0b100 != 0 { PAT_SMALL } else { 0 };
        let execute = match attributes.execute {
            Execute::All => 0,
            Execute::None => EXECUTE_DISABLE,
            Execute::User | Execute::Supervisor => return None,
        };
        Some((number & 0b11) << WRITE_THROUGH.trailing_zeros() | pat | execute)
    }

    #[inline]
    fn attribute_bits_at(bits: u64, level: Level) -> u64 {
        if level == Level::L4K {
            return bits;
        }
        bits & !PAT_SMALL | (bits & PAT_SMALL) << (PAT_HUGE.trailing_zeros() - PAT_SMALL.trailing_zeros())
    }

    #[inline]
    fn pack_attributes(pte: Pte, level: Level) -> u64 {
        let pat = if level == Level::L4K { PAT_SMALL } else { PAT_HUGE };
        pte.0 >> WRITE_THROUGH.trailing_zeros() & 0b11
            | (pte.0 >> pat.trailing_zeros() & 1) << 2
            | (pte.0 >> EXECUTE_DISABLE.trailing_zeros() & 1) << 3
    }

    #[inline]
    fn unpack_attributes(packed: u64, level: Level) -> u64 {
        let pat = if level == Level::L4K { PAT_SMALL } else { PAT_HUGE };
        (packed & 0b11) << WRITE_THROUGH.trailing_zeros()
            | (packed >> 2 & 1) << pat.trailing_zeros()
            | (packed >> 3 & 1) << EXECUTE_DISABLE.trailing_zeros()
    }

    #[inline]
    fn may_execute(pte: Pte, _access: Access) -> bool {
        pte.0 & EXECUTE_DISABLE == 0
    }
}
