//! The two-dimensional walk: the guest's own long-mode page tables of four levels, of which the
//! second stage translates each PTE, and at last the page itself.
//!
//! The guest's memory types are all write-back: its PWT, PCD and PAT bits are ignored.
//!
//! The guest is a supervisor with CR0.WP and EFER.NXE set, without SMEP, SMAP and protection keys,
//! so that the user/supervisor bits deny nothing. Accessed and dirty bits are set in guest memory,
//! from the guest's root down, when the guest's own permissions allow the access and before the
//! second stage translates the page.
//!
//! Sources: Intel SDM vol. 3A, chapter "Paging" ("4-level paging", "Access rights", "Page-fault
//! exceptions", "Accessed and dirty flags"); AMD APM vol. 2, 5.3 to 5.6 and 15.25.5.

use slat::shadow::Gva;
use slat::{Access, Gpa, PageSize};
use thiserror::Error;

use super::{HardwareFormat, Mapping, Purpose, Stop, Used, WalkMemory, Walker};
use super::{address_mask, index, page_size, shift};
use crate::hardware::tlb::{Rights, Writes};

pub(crate) const PRESENT: u64 = 1 << 0;
pub(crate) const WRITABLE: u64 = 1 << 1;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
pub(crate) const PAGE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;
const LARGE_PAT: u64 = 1 << 12;

/// Page-fault error code, bit 0: the page is present, and the access was not permitted.
pub const ERROR_PRESENT: u32 = 1 << 0;
/// Page-fault error code, bit 1: the access was a write.
pub const ERROR_WRITE: u32 = 1 << 1;
/// Page-fault error code, bit 3: a reserved bit was set.
pub const ERROR_RESERVED: u32 = 1 << 3;
/// Page-fault error code, bit 4: the access was an instruction fetch.
pub const ERROR_FETCH: u32 = 1 << 4;

/// An exception that the guest's own page tables or address cause: for the guest, not the
/// hypervisor.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message names the fields")]
pub enum GuestFault {
    /// A page fault (#PF).
    #[error("guest page fault at {gva} with error code {error_code:#x}")]
    Page {
        gva: Gva,
        /// The error code, bits as in [`ERROR_PRESENT`] and the constants after it.
        error_code: u32,
    },
    /// A general-protection fault (#GP) for a value written to a register or an operand of an
    /// instruction, or for a supervisor instruction in user mode.
    #[error("general-protection fault")]
    GeneralProtection,
    /// A general-protection fault (#GP): the address is not canonical.
    #[error("guest address {gva} is not canonical")]
    NonCanonical { gva: Gva },
}

/// Why a two-dimensional walk ended without a translation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum GuestStop {
    /// The second stage stopped it.
    #[error(transparent)]
    SecondStage(#[from] Stop),
    /// The guest's own page tables or address stopped it.
    #[error(transparent)]
    Guest(#[from] GuestFault),
}

/// Translates `gva` through the guest's page tables at `table` (the address in CR3) and the
/// walker's second stage. The mapping's size is that of the smaller of the two pages.
///
/// # Errors
/// [`GuestStop`]: why there is no translation.
pub fn walk<F: HardwareFormat, C: WalkMemory>(
    walker: Walker<'_, C>,
    table: Gpa,
    gva: Gva,
    access: Access,
) -> Result<Mapping, GuestStop> {
    // Bits 63 to 47 are all alike.
    if !matches!(gva.0 as i64 >> 47, 0 | -1) {
        return Err(GuestFault::NonCanonical { gva }.into());
    }
    let page_fault = |flags: u32| -> GuestStop {
        let error_code = flags
            | match access {
                Access::Read => 0,
                Access::Write => ERROR_WRITE,
                Access::Execute | Access::ExecuteUser => ERROR_FETCH,
            };
        GuestFault::Page { gva, error_code }.into()
    };

    let mut table = table;
    let mut writable = WRITABLE;
    let mut denied = 0;
    let mut path = [Used { at: std::ptr::null_mut(), entry: 0 }; 4];
    let mut level = 4;
    loop {
        let entry_gpa = Gpa(table.0 + 8 * index(gva.0, level));
        let at = F::walk(walker, entry_gpa, Access::Write, Purpose::GuestTable)?;
        let used =
            Used::read(walker, at.hpa, 0).map_err(Stop::from)?.ok_or(Stop::NoMemory { gpa: entry_gpa, hpa: at.hpa })?;
        let entry = used.entry;
        if entry & PRESENT == 0 {
            return Err(page_fault(0));
        }
        if entry & reserved::<F>(entry, level) != 0 {
            return Err(page_fault(ERROR_PRESENT | ERROR_RESERVED));
        }
        writable &= entry;
        denied |= entry & NO_EXECUTE;
        path[usize::from(level) - 1] = used;
        if level == 1 || entry & PAGE != 0 {
            break;
        }
        table = Gpa(entry & address_mask(12));
        level -= 1;
    }

    let permitted = match access {
        Access::Read => true,
        Access::Write => writable != 0,
        Access::Execute | Access::ExecuteUser => denied == 0,
    };
    if !permitted {
        return Err(page_fault(ERROR_PRESENT));
    }

    for above in (level..4).rev() {
        path[usize::from(above)].set(walker, ACCESSED)?;
    }
    let marks = if access == Access::Write { ACCESSED | DIRTY } else { ACCESSED };
    let leaf = path[usize::from(level) - 1].set(walker, marks)?;

    let page = leaf & address_mask(shift(level));
    let gpa = Gpa(page | (gva.0 & ((1 << shift(level)) - 1)));
    let second = F::walk(walker, gpa, access, Purpose::Data)?;
    let writes = if writable != 0 && leaf & DIRTY != 0 { second.writes } else { Writes::MustWalk };
    // The guest's own tables have one right to execute, for both modes.
    let fetches = if denied == 0 { second.fetches } else { Rights::NONE };
    let size = smaller(page_size(level), second.size);
    Ok(Mapping { gpa, hpa: second.hpa, size, writes, fetches, memory: second.memory })
}

fn smaller(left: PageSize, right: PageSize) -> PageSize {
    if left.level() < right.level() { left } else { right }
}

/// The bits that must be zero in a present PTE.
fn reserved<F: HardwareFormat>(entry: u64, level: u8) -> u64 {
    // Address bits beyond the guest's MAXPHYADDR, too.
    address_mask(12) & !((1 << F::GUEST_PHYSICAL_BITS) - 1)
        | match level {
            4 => PAGE | F::GUEST_PML4E_RESERVED,
            2 | 3 if entry & PAGE != 0 => address_mask(12) & !address_mask(shift(level)) & !LARGE_PAT,
            _ => 0,
        }
}
