//! The formats of page tables. Each [`Vm`](crate::Vm) has one as its parameter.
//!
//! # Use
//! Take the format of the hardware: [`Ept`] for Intel, [`Npt`] for AMD, [`Stage2`] for Arm,
//! [`Sv39x4`] or [`Sv48x4`] for RISC-V. Its page says what the control registers must hold. With
//! shadow paging the format is [`Npt`] ([`shadow`](mod@crate::shadow)).
//!
//! A CPU that is a program walks the tables by the constants and functions of its [`Format`]
//! ([`guide`](crate::guide#cpus-that-are-programs)).
//!
//! # Implementation
//! A [`Format`] knows bits and nothing else: which bit lets the guest write, where the frame number
//! is, what makes a PTE a leaf PTE. What PTEs mean to the engine, and which thread may change what
//! into what, is the same for all formats (`docs/protocols/pte.md` in the repository).
//!
//! In every format, a PTE whose lowest three bits are clear is not present, and all its other bits
//! belong to software. This is so in long-mode tables (bit 0), in EPT (bits 0 to 2), in Arm's stage
//! 2 and in RISC-V's G-stage (bit 0).

#![expect(unsafe_code, reason = "the trait is a promise that tables rely on")]

mod ept;
mod gstage;
mod npt;
mod stage2;
pub(crate) mod x86;

pub use ept::Ept;
pub use gstage::{Sv39x4, Sv48x4};
pub use npt::Npt;
pub use stage2::Stage2;

use crate::addr::{Hpa, Level, Pfn};

/// Runs a block for each format, in which `$name` is the format's type. The list of formats for the
/// tests of every crate. What a test must know of a format it takes from the constants of
/// [`Format`].
#[cfg(feature = "baselines")]
#[doc(hidden)]
#[macro_export]
macro_rules! for_each_format {
    ($name:ident => $block:block) => {
        $crate::for_each_format!($name => $block, Npt, Ept, Stage2, Sv39x4, Sv48x4)
    };
    ($name:ident => $block:block, $($format:ident),*) => {{
        $({
            type $name = $crate::format::$format;
            $block
        })*
    }};
}

/// The 64 bits of a PTE.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Pte(pub u64);

impl core::fmt::Debug for Pte {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Pte({:#x})", self.0)
    }
}

/// A format of second-stage page tables.
///
/// # Safety
/// The engine follows the addresses that it reads from PTEs. So:
/// - [`address`](Format::address) of a PTE made by [`table`](Format::table) or
///   [`leaf`](Format::leaf) is the address that it was made with;
/// - in a leaf PTE, setting or clearing [`WRITABLE`](Format::WRITABLE),
///   [`ACCESSED`](Format::ACCESSED), [`DIRTY`](Format::DIRTY),
///   [`HOST_WRITABLE`](Format::HOST_WRITABLE) and [`WAS_DIRTY`](Format::WAS_DIRTY) does not change
///   the address;
/// - in a directory entry, setting or clearing `WRITABLE` and [`GENERATION`](Format::GENERATION)
///   (if it has bits) does not change the address;
/// - with any combination of those bits, a PTE made by `table` is present and no leaf PTE, and one
///   made by `leaf` is present and a leaf PTE of its level;
/// - a PTE whose lowest three bits are clear is not present;
/// - all functions depend on their arguments alone.
pub unsafe trait Format: Send + Sync + 'static {
    /// The name that the command and the reports use.
    const NAME: &'static str;
    /// Level of the root's PTEs.
    const ROOT_LEVEL: Level;
    /// Guest-physical address bits that the tables translate.
    const GPA_BITS: u32;
    /// Host-physical address bits that a PTE can hold; at most 52.
    const HPA_BITS: u32;
    /// PTEs of the root. (Other page-table pages have 512 in every format: 9 bits a level.)
    const ROOT_ENTRIES: usize;
    /// PTEs of a page-table page below the root.
    const TABLE_ENTRIES: usize;

    /// Set in a leaf PTE that the guest may write. In a format with a
    /// [`GENERATION`](Format::GENERATION), a directory entry without `WRITABLE` takes that
    /// right from all below. In other formats directory entries have no rights.
    const WRITABLE: u64;
    /// Set by hardware in a leaf PTE that was used. Where hardware sets none, a bit that it
    /// ignores. Such VMs need [`AccessTracking::Faults`](crate::tables::AccessTracking::Faults).
    const ACCESSED: u64;
    /// Set in a leaf PTE through which the guest wrote, by hardware. Where hardware sets none, a
    /// bit that it ignores, set together with [`WRITABLE`](Format::WRITABLE).
    const DIRTY: u64;
    /// Whether CPUs that walk such tables can set [`DIRTY`](Format::DIRTY). (The CPUs of a VM with
    /// [`AccessTracking::Faults`](crate::tables::AccessTracking::Faults) set it in no format.)
    const HAS_DIRTY_BIT: bool;
    /// A bit that hardware ignores in a leaf PTE: the host allows the guest to write the frame. A
    /// leaf PTE with this bit and without [`WRITABLE`](Format::WRITABLE) is write-protected for
    /// logging only.
    const HOST_WRITABLE: u64;
    /// A bit that hardware ignores in a leaf PTE: the guest wrote through it before
    /// [`DIRTY`](Format::DIRTY) was last cleared for the dirty log.
    const WAS_DIRTY: u64;
    /// At least 11 adjacent bits that hardware ignores in a directory entry. 0 if directory entries
    /// cannot be protected. Then all write protection is by leaf PTEs.
    const GENERATION: u64;
    /// Whether break before make is needed where a page-table page replaces a huge leaf PTE, or the
    /// other way. Then the PTE is not present until no CPU can have a translation cached through
    /// what was there before (Arm ARM, "Using break-before-make when updating translation table
    /// entries"). If `false`, CPUs may use either for a while, and both say the same (Intel SDM
    /// vol. 3A, "Recommended Invalidation" and vol. 3C, "Invalidating Cached Translation
    /// Information"; AMD APM vol. 2, 5.5.2).
    const BREAK_BEFORE_MAKE: bool;
    /// Whether a CPU that has faulted may go on using what it faulted on until it flushes that
    /// itself, whatever the tables say by then. The engine then calls
    /// [`Host::flush_local`](crate::Host::flush_local) before the guest goes on. The CPU may use
    /// - a leaf PTE that had fewer rights (Arm ARM, "TLB maintenance": a translation that gives a
    ///   permission fault may be held in a TLB),
    /// - a PTE that was not valid (RISC-V Privileged Architecture, "Supervisor Memory-Management
    ///   Fence Instruction": implementations may cache invalid entries).
    ///
    /// If `false`, a fault drops what caused it (Intel SDM vol. 3C, "Operations that Invalidate
    /// Cached Mappings"; AMD APM vol. 2, 5.5.2).
    const NEEDS_LOCAL_FLUSH: bool;
    /// Whether CPUs that walk such tables can log the pages whose D they set (page-modification
    /// logging).
    const HAS_MODIFICATION_LOG: bool;

    /// Whether hardware would use the PTE.
    fn is_present(pte: Pte) -> bool;

    /// Whether a present PTE of `level` maps memory, and does not point to a page-table page.
    fn is_leaf(pte: Pte, level: Level) -> bool;

    /// A leaf PTE of `level` for `pfn` that may be read and executed; not writable, not accessed,
    /// not dirty. Memory is write-back.
    fn leaf(pfn: Pfn, level: Level) -> Pte;

    /// A directory entry that points to the page-table page at `table` and takes no right from what
    /// is below.
    fn table(table: Hpa) -> Pte;

    /// The address that a present PTE holds: of the page-table page, or of the memory that the leaf
    /// PTE maps.
    fn address(pte: Pte, level: Level) -> Hpa;
}
