//! The layout of guest-physical memory, of the kernel's half of the address space and of a
//! process's; and the bits of PTEs.
//!
//! The kernel's half resembles x86-64 Linux's: a direct map of all memory by pages of 2 MiB, the
//! kernel's text, the *entry area*, which is the only part that user roots map under page-table
//! isolation, and an area for temporary mappings.
//!
//! The image is guest-physical memory below 2 MiB; all other memory belongs to
//! [`GuestFrames`](super::frames::GuestFrames).

use slat::shadow::Gva;
use slat::{Gfn, PAGE_SIZE};

/// PTE: present.
pub(crate) const PRESENT: u64 = 1 << 0;
/// PTE: writes are allowed.
pub(crate) const WRITABLE: u64 = 1 << 1;
/// PTE: user mode is allowed.
pub(crate) const USER: u64 = 1 << 2;
/// PTE: it was used.
pub(crate) const ACCESSED: u64 = 1 << 5;
/// PTE: it was written through.
pub(crate) const DIRTY: u64 = 1 << 6;
/// PTE above level 1: maps a page.
pub(crate) const PAGE: u64 = 1 << 7;
/// PTE: survives a CR3 load.
pub(crate) const GLOBAL: u64 = 1 << 8;
/// PTE: fetches are not allowed.
pub(crate) const NO_EXECUTE: u64 = 1 << 63;
/// Bits of an address in a PTE.
pub(crate) const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Bytes of the image, and of the pages that make up the direct map.
pub(crate) const IMAGE_BYTES: u64 = 1 << 21;

/// Start of the direct map.
const DIRECT_MAP: u64 = 0xffff_8880_0000_0000;
/// Start of the temporary mappings, a page-table page of level 1 for each virtual CPU.
const KERNEL_MAPS: u64 = 0xffff_c900_0000_0000;
/// Start of the entry area: a page of text, then a page of data for each virtual CPU.
const ENTRY_AREA: u64 = 0xffff_fe00_0000_0000;
/// Start of the kernel's text: maps the image.
const TEXT: u64 = 0xffff_ffff_8000_0000;

/// The indices in a root of the four areas.
pub(crate) const KERNEL_ROOT_INDEXES: [u64; 4] = [273, 402, ENTRY_ROOT_INDEX, 511];
/// The index of the entry area.
pub(crate) const ENTRY_ROOT_INDEX: u64 = 508;

/// The most virtual CPUs for which the image has space.
pub(crate) const MAX_VCPUS: u16 = 128;

/// The most bytes of memory for which the image has page-table pages of the direct map.
pub(crate) const MAX_MEMORY_BYTES: u64 = 64 << 30;

/// Image page: text of the entry area.
pub(crate) const ENTRY_TEXT_PAGE: u64 = 0x1000;
/// Image page: the kernel's text.
pub(crate) const TEXT_PAGE: u64 = 0x2000;
/// Image page: the root without a process; the page after it is its user root.
pub(crate) const IDLE_ROOT: u64 = 0x4000;
/// Image pages from here on: the kernel's lower page-table pages and the entry area's data.
pub(crate) const IMAGE_TABLES: u64 = 0x6000;

/// The contents of the entry area's text.
pub(crate) const ENTRY_TEXT_WORD: u64 = 0x656e_7472_7920_0f05;
/// The contents of the kernel's text.
pub(crate) const TEXT_WORD: u64 = 0x6b65_726e_656c_9090;

/// The page of the kernel's text that is fetched from.
pub(crate) const TEXT_GVA: Gva = Gva(TEXT + TEXT_PAGE);
/// The page of the entry area's text.
pub(crate) const ENTRY_TEXT_GVA: Gva = Gva(ENTRY_AREA);

/// The address of `gpa` in the direct map.
pub(crate) const fn direct(gpa: u64) -> Gva {
    Gva(DIRECT_MAP + gpa)
}

/// The entry area's data of a virtual CPU.
pub(crate) const fn entry_data(vcpu: u16) -> Gva {
    Gva(ENTRY_AREA + PAGE_SIZE * (1 + vcpu as u64))
}

/// Temporary mapping number `slot` (below 512) of a virtual CPU.
pub(crate) const fn kernel_map(vcpu: u16, slot: u64) -> Gva {
    Gva(KERNEL_MAPS + ((vcpu as u64) << 21) + (slot << Gfn::SHIFT))
}

/// Index of the PTE for `gva` in a page-table page of `level`.
pub(crate) const fn index(gva: u64, level: u8) -> u64 {
    gva >> (Gfn::SHIFT + 9 * (level as u32 - 1)) & 0x1ff
}

/// First page of a process's text.
pub(crate) const USER_TEXT: u64 = 0x40_0000 >> Gfn::SHIFT;
/// First page of its data.
pub(crate) const USER_DATA: u64 = 0x60_0000 >> Gfn::SHIFT;
/// First page of its stack, whose end is that of a page-table page.
pub(crate) const USER_STACK: u64 = (0x7ffd_0000_0000 >> Gfn::SHIFT) - STACK_PAGES;
/// Pages of text.
pub(crate) const TEXT_PAGES: u64 = 8;
/// Pages of data.
pub(crate) const DATA_PAGES: u64 = 16;
/// Pages of stack.
pub(crate) const STACK_PAGES: u64 = 8;

/// Places for further mappings: more than a program of a build fills, on average, before the next
/// exec.
pub(crate) const NR_WINDOWS: u64 = 64;
/// Most pages of one: more than are flushed one by one.
pub(crate) const WINDOW_PAGES: u64 = 48;

/// First page of a place for a mapping. Neighbours are in different page-table pages of level 1;
/// places with a distance of four, of level 2 too.
pub(crate) const fn window(number: u64) -> u64 {
    (0x7f00_0000_0000 + ((number % 4) << 30) + ((number / 4) << 23)) >> Gfn::SHIFT
}

/// The most frames of a process: its pages; two page-table pages of level 1 for each place, since
/// mappings may straddle; those of level 2 and 3 above these; two roots.
pub(crate) const PROCESS_FRAMES: u64 =
    TEXT_PAGES + DATA_PAGES + STACK_PAGES + NR_WINDOWS * (WINDOW_PAGES + 2) + 4 + (4 + 3) + 3 + 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_agree_with_their_root_indexes() {
        let places = [direct(0).0, kernel_map(0, 0).0, ENTRY_TEXT_GVA.0, TEXT_GVA.0];
        assert_eq!(places.map(|gva| index(gva, 4)), KERNEL_ROOT_INDEXES);
        assert_eq!(index(direct(MAX_MEMORY_BYTES - 1).0, 4), KERNEL_ROOT_INDEXES[0]);
        assert_eq!(index(kernel_map(MAX_VCPUS - 1, 511).0, 4), KERNEL_ROOT_INDEXES[1]);
        assert_eq!(index(entry_data(MAX_VCPUS - 1).0, 2), index(ENTRY_TEXT_GVA.0, 2), "one table of level 1");
    }

    #[test]
    fn windows_do_not_overlap() {
        let mut starts: Vec<u64> = (0..NR_WINDOWS).map(window).collect();
        starts.extend([USER_TEXT, USER_DATA, USER_STACK]);
        starts.sort_unstable();
        // A mapping may begin up to 512 pages after the start of its window.
        assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= 512));
        assert!(window(4) - window(0) >= 512 + WINDOW_PAGES);
    }
}
