//! AMD nested paging: PTEs are long-mode PTEs (AMD APM vol. 2, 15.25 "Nested Paging" and 5.3
//! "Long-Mode Page Translation"). Guest accesses count as user accesses in the nested tables
//! (15.25.5), so U/S is set everywhere.

#![expect(unsafe_code, reason = "implements Format")]

use super::x86::{self, ADDRESS, PAGE_SIZE_BIT, PRESENT, READ_WRITE, USER};
use super::{Format, Pte};
use crate::addr::{Hpa, Level, Pfn};

/// Marker of AMD's nested page tables: 4 levels, 48 bits of guest-physical address.
///
/// [`Vm::root`](crate::Vm::root) goes into nCR3. The PTEs are long-mode PTEs with U/S set, since
/// accesses of a guest count as user accesses there (AMD APM vol. 2, 15.25.5). CPUs set A and D.
///
/// Bits of a PTE: P, R/W, U/S are 0 to 2, A is 5, and the address is 12 to 51. Of a leaf PTE: D is
/// 6, and 52 and 53 are [`HOST_WRITABLE`](Format::HOST_WRITABLE) and
/// [`WAS_DIRTY`](Format::WAS_DIRTY); 7 is set if it is a huge page. Of a directory entry, 52 to 62
/// are the [`GENERATION`](Format::GENERATION).
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

// SAFETY: address bits 12 to 51 are apart from all flag bits. `is_present` and `is_leaf` read only
// bits that `leaf` and `table` set as they must, and none of the flag bits is among these. No state
// is kept.
unsafe impl Format for Npt {
    const NAME: &'static str = "npt";
    const ROOT_LEVEL: Level = if IS_SMALL { Level(3) } else { Level(4) };
    const GPA_BITS: u32 = if IS_SMALL { 32 } else { 48 };
    const HPA_BITS: u32 = 52;
    const ROOT_ENTRIES: usize = if IS_SMALL { 4 } else { 512 };
    const TABLE_ENTRIES: usize = if IS_SMALL { 4 } else { 512 };

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

    #[inline]
    fn address(pte: Pte, _level: Level) -> Hpa {
        // In a huge leaf PTE the bits between 12 and its size are PAT or must be zero (5.3.4);
        // `leaf` leaves them clear.
        Hpa(pte.0 & ADDRESS)
    }
}
