//! The walker of hardware without a second stage: long-mode page tables of four or five levels,
//! CR0.WP and EFER.NXE set, no protection keys and no global pages (CR4.PGE clear). It walks what
//! the hypervisor keeps in place of the guest's own page tables. So a reserved bit there is the
//! machine's error, and not an exception for the guest.
//!
//! Writing and user access must be granted at every level, no-execute denies at any. A page that
//! the user may not access at some level is a supervisor page; SMEP and SMAP distinguish no more.
//!
//! Sources: Intel SDM vol. 3A, chapter "Paging" ("4-level paging and 5-level paging", "Access
//! rights", "Accessed and dirty flags"); AMD APM vol. 2, 5.3 to 5.6.

use slat::shadow::Gva;
use slat::{Access, Hpa, Level, PageSize};
use thiserror::Error;

use super::{MAX_LEVELS, Used, Walker, address_mask, index, page_size, shift};
use crate::hardware::commit::Stale;
use crate::hardware::tlb::Rights;
use crate::memory::phys;

const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const PAGE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;
/// Bits 7 and 8 of a PTE above level 3 must be zero (bit 8: on AMD's processors).
const TOP_RESERVED: u64 = 0b11 << 7;
/// The page-attribute-table bit of a large page: the lowest address bit of its PTE, but no address
/// bit.
const LARGE_PAT: u64 = 1 << 12;

/// The result of a walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShadowMapping {
    /// The address's own host-physical address (not the start of its page).
    pub hpa: Hpa,
    /// Size of the page that maps it.
    pub size: PageSize,
    /// The accesses that a TLB entry of this walk serves.
    pub rights: Rights,
}

/// Why a walk ended without a translation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[expect(missing_docs, reason = "the message names the fields")]
pub enum ShadowStop {
    /// A flush has begun, or a PTE changed while its accessed or dirty bit was about to be set:
    /// start the access over.
    #[error("the translation changed during the walk")]
    Restart,
    /// There is no page, or it does not grant what the access needs: a page fault (#PF), which the
    /// hypervisor intercepts.
    #[error("page fault")]
    PageFault,
    /// A PTE has reserved bits set: the page tables are misconfigured.
    #[error("entry {entry:#x} of level {} has reserved bits set", level.0)]
    Misconfigured { level: Level, entry: u64 },
    /// The page tables have an address without memory.
    #[error("the tables lead to {hpa}, where there is no memory")]
    NoMemory { hpa: Hpa },
}

impl From<Stale> for ShadowStop {
    fn from(_: Stale) -> ShadowStop {
        ShadowStop::Restart
    }
}

/// Translates `gva` through page tables of `levels` levels, 4 or 5, for an access that needs the
/// rights `needed`; sets accessed and dirty bits. Only the address bits count that the page tables
/// translate: the caller has checked the others.
///
/// # Errors
/// [`ShadowStop`]: why there is no translation.
pub fn walk(
    walker: Walker<'_>,
    levels: u8,
    gva: Gva,
    access: Access,
    needed: Rights,
) -> Result<ShadowMapping, ShadowStop> {
    debug_assert!((4..=MAX_LEVELS).contains(&levels), "{levels} levels");
    let mut table = walker.root;
    let mut granted = WRITABLE | USER;
    let mut denied = 0;
    let mut path = [Used { at: std::ptr::null_mut(), entry: 0 }; MAX_LEVELS as usize];
    let mut level = levels;
    loop {
        let used = Used::read(walker, table, index(gva.0, level))?.ok_or(ShadowStop::NoMemory { hpa: table })?;
        let entry = used.entry;
        if entry & PRESENT == 0 {
            return Err(ShadowStop::PageFault);
        }
        if entry & reserved(entry, level) != 0 {
            return Err(ShadowStop::Misconfigured { level: Level(level), entry });
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

    let of = |has: bool, right: Rights| if has { right } else { Rights::NONE };
    let rights = of(granted & WRITABLE != 0, Rights::WRITE)
        .and(of(denied == 0, Rights::EXECUTE))
        .and(if granted & USER != 0 { Rights::USER } else { Rights::SUPERVISOR });
    if !rights.grant(needed) {
        return Err(ShadowStop::PageFault);
    }

    // A walker without a log stops at a PTE for one reason only: another thread has changed it.
    let set = |used: Used, bits: u64| used.set(walker, bits).map_err(|_| ShadowStop::Restart);
    for above in (level..levels).rev() {
        set(path[usize::from(above)], ACCESSED)?;
    }
    let marks = if access == Access::Write { ACCESSED | DIRTY } else { ACCESSED };
    let leaf = set(path[usize::from(level) - 1], marks)?;
    let rights = if leaf & DIRTY == 0 { rights.without(Rights::WRITE) } else { rights };

    let page = leaf & address_mask(shift(level));
    let hpa = Hpa(page | (gva.0 & ((1 << shift(level)) - 1)));
    match phys::pointer_to::<u64>(hpa) {
        Some(_) => Ok(ShadowMapping { hpa, size: page_size(level), rights }),
        None => Err(ShadowStop::NoMemory { hpa }),
    }
}

/// Whether the PTE maps a page. Bit 7 is the page-attribute-table bit in PTEs of level 1 and
/// reserved above level 3.
fn is_leaf(entry: u64, level: u8) -> bool {
    level == 1 || entry & PAGE != 0
}

/// The bits that must be zero in a present PTE.
fn reserved(entry: u64, level: u8) -> u64 {
    match level {
        4 | 5 => TOP_RESERVED,
        2 | 3 if is_leaf(entry, level) => address_mask(12) & !address_mask(shift(level)) & !LARGE_PAT,
        _ => 0,
    }
}
