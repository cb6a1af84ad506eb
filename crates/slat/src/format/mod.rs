//! One entry as the hardware reads it. A [`Format`] knows bits and nothing else: which bit lets the guest write, where
//! the frame number stands, what makes an entry a leaf. What entries mean to the engine (stamps, frozen entries, who
//! may change what into what) is `table/entry.rs`, the same for all formats.
//!
//! Every format leaves alone an entry whose lowest three bits are clear: it is not present in long-mode tables (bit 0),
//! in EPT (bits 0 to 2), in Arm's stage 2 and in RISC-V's G-stage (bit 0), and all other bits are then software's.

#![expect(unsafe_code, reason = "the trait is a promise that tables rely on")]

mod ept;
mod gstage;
mod npt;
mod stage2;

pub use ept::Ept;
pub use gstage::{Sv39x4, Sv48x4};
pub use npt::Npt;
pub use stage2::Stage2;

use crate::addr::{Hpa, Level, Pfn};

/// The 64 bits of a table entry.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Entry(pub u64);

impl core::fmt::Debug for Entry {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Entry({:#x})", self.0)
    }
}

/// A second-stage table format.
///
/// # Safety
/// The engine follows the addresses that it reads out of entries. So:
/// - [`address`](Format::address) of an entry made by [`table`](Format::table) or [`leaf`](Format::leaf) is the address
///   that it was made with, and setting or clearing [`WRITABLE`](Format::WRITABLE), [`ACCESSED`](Format::ACCESSED),
///   [`DIRTY`](Format::DIRTY), [`HOST_WRITABLE`](Format::HOST_WRITABLE) and [`WAS_DIRTY`](Format::WAS_DIRTY) in a leaf,
///   or `WRITABLE` and [`GENERATION`](Format::GENERATION) in a table entry (if there are any of the latter), does not
///   change it;
/// - an entry made by `table` is present and no leaf, one made by `leaf` is present and a leaf of its level, with any
///   combination of those bits;
/// - an entry whose lowest three bits are clear is not present;
/// - all functions depend on their arguments alone.
pub unsafe trait Format: Send + Sync + 'static {
    /// The name that the command and the reports use.
    const NAME: &'static str;
    /// Level of the root's entries.
    const ROOT_LEVEL: Level;
    /// Guest-physical address bits that the tables translate.
    const GPA_BITS: u32;
    /// Host-physical address bits that an entry can hold; at most 52.
    const HPA_BITS: u32;
    /// Entries of the root table. (Other tables have 512 in every format: 9 bits a level.)
    const ROOT_ENTRIES: usize;
    /// Entries of a table below the root.
    const TABLE_ENTRIES: usize;

    /// Set in a leaf that the guest may write. Clear in a table entry, it takes that right from all below, in a format that has
    /// a [`GENERATION`](Format::GENERATION); in others table entries have no rights.
    const WRITABLE: u64;
    /// Set by hardware in a leaf that was used. Where hardware sets none, a bit that it ignores; such VMs need
    /// [`AccessTracking::Faults`](crate::AccessTracking::Faults).
    const ACCESSED: u64;
    /// Set in a leaf through which the guest wrote: by hardware; or where that sets none, with the right to write, in a bit
    /// that it ignores.
    const DIRTY: u64;
    /// Whether CPUs that walk such tables can set [`DIRTY`](Format::DIRTY). (Those of a VM with
    /// [`AccessTracking::Faults`](crate::AccessTracking::Faults) do not in any format.)
    const HAS_DIRTY_BIT: bool;
    /// A bit that hardware ignores in a leaf: the host allows the guest to write the frame. A leaf with this bit and
    /// without [`WRITABLE`](Format::WRITABLE) is write-protected for logging only.
    const HOST_WRITABLE: u64;
    /// A bit that hardware ignores in a leaf: the guest wrote through it before [`DIRTY`](Format::DIRTY) was last cleared
    /// for the dirty log.
    const WAS_DIRTY: u64;
    /// At least 11 bits next to each other that hardware ignores in a table entry; or none, where table entries cannot be
    /// closed (`table/entry.rs`), and all write protection is leaf by leaf.
    const GENERATION: u64;
    /// Whether a table must not take the place of a huge leaf, or the other way, while a CPU may have cached a translation
    /// through what was there before: the entry is then not present until a flush is over (Arm ARM, "Using
    /// break-before-make when updating translation table entries"). Where it is `false`, CPUs may use either for a while
    /// (Intel SDM vol. 3A, "Recommended Invalidation" and vol. 3C, "Invalidating Cached Translation Information"; AMD APM
    /// vol. 2, 5.5.2): both say the same.
    const BREAK_BEFORE_MAKE: bool;
    /// Whether a CPU that has faulted may go on with what it faulted on until it flushes that itself, whatever the tables say by
    /// then: with a leaf that had fewer rights (Arm ARM, "TLB maintenance": a translation that gives a permission fault may be
    /// held in a TLB), or with an entry that was not valid (RISC-V Privileged Architecture, "Supervisor Memory-Management Fence
    /// Instruction": implementations may cache invalid entries). The engine then calls
    /// [`Host::flush_local`](crate::Host::flush_local) before a guest goes on. Where it is `false`, a fault drops what caused it
    /// (Intel SDM vol. 3C, "Operations that Invalidate Cached Mappings"; AMD APM vol. 2, 5.5.2).
    const NEEDS_LOCAL_FLUSH: bool;
    /// Whether CPUs that walk such tables can log which pages they set dirty (page-modification logging).
    const HAS_MODIFICATION_LOG: bool;

    /// Whether hardware would use the entry.
    fn is_present(entry: Entry) -> bool;

    /// Whether a present entry of `level` maps memory (and does not point to a table).
    fn is_leaf(entry: Entry, level: Level) -> bool;

    /// A leaf of `level` for `pfn` that may be read and executed; not writable, not accessed, not dirty. Memory is
    /// write-back.
    fn leaf(pfn: Pfn, level: Level) -> Entry;

    /// An entry that points to the table at `table` and takes no right away from what is below.
    fn table(table: Hpa) -> Entry;

    /// The address that a present entry holds: of the table, or of the memory that the leaf maps.
    fn address(entry: Entry, level: Level) -> Hpa;
}
