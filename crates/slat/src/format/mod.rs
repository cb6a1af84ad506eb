//! The formats of page tables. Each [`Vm`](crate::Vm) has one as its parameter.
//!
//! # Use
//! Take the format of the hardware: [`Ept`] for Intel, [`Npt`] for AMD, [`Stage2`] for Arm,
//! [`Sv39x4`], [`Sv48x4`] or [`Sv57x4`] for RISC-V, and [`Vtd`] for Intel's IOMMUs, in a tree beside
//! that of the CPUs. Its page says what the control registers must hold. With shadow paging the
//! format is [`Npt`] ([`shadow`](mod@crate::shadow)).
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
//! 2 and in RISC-V's G-stage (bit 0), and in VT-d's second stage (bits 0 and 1).
//!
//! What page tables depend on beside the format is [`Hardware`]: memory types, execution, levels.
//! `attributes` has these, and `table/encoding.rs` what the engine makes of them for one VM.

#![expect(unsafe_code, reason = "the trait is a promise that tables rely on")]

mod attributes;
mod ept;
mod gstage;
mod npt;
mod stage2;
mod vtd;
pub(crate) mod walkers;
pub(crate) mod x86;

pub use attributes::{CpuFeatures, Execute, Geometry, Hardware, LeafAttributes, MemoryType};
pub use ept::Ept;
pub use gstage::{Sv39x4, Sv48x4, Sv57x4};
pub use npt::Npt;
pub use stage2::Stage2;
pub use vtd::Vtd;

use crate::addr::{Access, Hpa, Level, Pfn};

/// Runs a block for each format, in which `$name` is the format's type. The list of formats for the
/// tests of every crate. What a test must know of a format it takes from the constants of
/// [`Format`].
#[cfg(feature = "baselines")]
#[doc(hidden)]
#[macro_export]
macro_rules! for_each_format {
    ($name:ident => $block:block) => {
        $crate::for_each_format!($name => $block, Npt, Ept, Stage2, Sv39x4, Sv48x4, Sv57x4, Vtd)
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
/// - [`ADDRESS`](Format::ADDRESS) of a PTE made by [`table`](Format::table) or
///   [`leaf`](Format::leaf) has the address that it was made with, as
///   [`address_bits`](Format::address_bits) and [`hpa`](Format::hpa) say, which are inverse to each
///   other for page-aligned addresses of [`HPA_BITS`](Format::HPA_BITS) bits;
/// - in a leaf PTE, [`WRITABLE`](Format::WRITABLE), [`ACCESSED`](Format::ACCESSED),
///   [`DIRTY`](Format::DIRTY), [`HOST_WRITABLE`](Format::HOST_WRITABLE),
///   [`WAS_DIRTY`](Format::WAS_DIRTY) and [`ATTRIBUTES`](Format::ATTRIBUTES) are apart from each
///   other, and (of its level) from the address;
/// - in a directory entry, `WRITABLE` and [`GENERATION`](Format::GENERATION) (if it has bits) are
///   apart from each other and from the address;
/// - with any combination of those bits, a PTE made by `table` is present and no leaf PTE, and one
///   made by `leaf` is present and a leaf PTE of its level;
/// - a PTE whose lowest three bits are clear is not present;
/// - [`pack_attributes`](Format::pack_attributes) answers less than 128, and
///   [`unpack_attributes`](Format::unpack_attributes) what it was made of;
/// - [`root_entries`](Format::root_entries) answers a power of two, from 2 to
///   [`MAX_ROOT_ENTRIES`](Format::MAX_ROOT_ENTRIES), for each of the
///   [`GEOMETRIES`](Format::GEOMETRIES), and each of these has a root of level 2 to 5;
/// - all functions depend on their arguments alone.
pub unsafe trait Format: Send + Sync + 'static {
    /// Whether walkers read page tables through the CPUs' caches: that of [`Npt`] if they do, that
    /// of [`Vtd`] if they may read past them. With the latter, the engine passes each PTE that it
    /// has written to [`Host::clean_ptes`](crate::Host::clean_ptes).
    type Walkers: walkers::Walkers;
    /// Whether they may read past the caches. Follows from the type.
    const HAS_INCOHERENT_WALKERS: bool = !<Self::Walkers as walkers::Walkers>::ARE_COHERENT;

    /// The name that the command and the reports use.
    const NAME: &'static str;
    /// Level of the root's PTEs, unless a VM is configured otherwise ([`Hardware::levels`]).
    const ROOT_LEVEL: Level;
    /// Guest-physical address bits that the tables translate, unless a VM is configured otherwise
    /// ([`Hardware::gpa_bits`]).
    const GPA_BITS: u32;
    /// What a VM can be configured with, by number of levels.
    const GEOMETRIES: &'static [Geometry];
    /// Host-physical address bits that a PTE can hold; at most 52.
    const HPA_BITS: u32;
    /// The most PTEs that a root can have.
    const MAX_ROOT_ENTRIES: usize;
    /// PTEs of a page-table page below the root. (512 in every format: 9 bits a level.)
    const TABLE_ENTRIES: usize;
    /// The bits of a PTE that hold an address.
    const ADDRESS: u64;
    /// Whether [`Hardware::address_bits`] may have bits.
    const HAS_ADDRESS_BITS: bool;
    /// The features that matter to the format.
    const FEATURES: CpuFeatures;

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
    ///   Fence Instruction": implementations may cache invalid entries), at any level.
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

    /// A leaf PTE of `level` for `pfn` that may be read; not writable, not accessed, not dirty.
    /// [`ATTRIBUTES`](Format::ATTRIBUTES) are clear.
    fn leaf(pfn: Pfn, level: Level) -> Pte;

    /// A directory entry that points to the page-table page at `table` and takes no right from what
    /// is below.
    fn table(table: Hpa) -> Pte;

    /// PTEs of a root of `root_level` for `gpa_bits` bits.
    fn root_entries(_root_level: Level, _gpa_bits: u32) -> usize {
        Self::MAX_ROOT_ENTRIES
    }

    /// The bits of a PTE that hold the address `hpa`, which is page-aligned.
    #[inline]
    fn address_bits(hpa: Hpa) -> u64 {
        hpa.0
    }

    /// The address that `bits`, of [`ADDRESS`](Format::ADDRESS), hold.
    #[inline]
    fn hpa(bits: u64) -> Hpa {
        Hpa(bits)
    }

    /// The address that a present PTE holds: of the page-table page, or of the memory that the leaf
    /// PTE maps. With [`Hardware::address_bits`].
    #[inline]
    fn address(pte: Pte, level: Level) -> Hpa {
        let inside = if Self::is_leaf(pte, level) { Self::address_bits(Hpa(level.size_bytes() - 1)) } else { 0 };
        Self::hpa(pte.0 & Self::ADDRESS & !inside)
    }

    /// The bits of a leaf PTE of 4 KiB that say how it is accessed and executed.
    const ATTRIBUTES: u64;

    /// Those of [`ATTRIBUTES`](Format::ATTRIBUTES) that express `attributes` on such CPUs. `None`
    /// if nothing does.
    fn attribute_bits(attributes: LeafAttributes, hardware: &Hardware) -> Option<u64>;

    /// The bits of a leaf PTE of `level` that say what `bits` do in one of 4 KiB.
    #[inline]
    fn attribute_bits_at(bits: u64, _level: Level) -> u64 {
        bits
    }

    /// The attributes of a leaf PTE of `level`, in seven bits.
    fn pack_attributes(pte: Pte, level: Level) -> u64;

    /// The bits of a leaf PTE of `level` that were packed.
    fn unpack_attributes(packed: u64, level: Level) -> u64;

    /// Whether the guest may fetch instructions through a leaf PTE of any level. `access` is a
    /// fetch.
    fn may_execute(pte: Pte, access: Access) -> bool;
}
