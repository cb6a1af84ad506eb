//! The bits of an x86 PTE: of the guest's page tables, of the shadow page tables made from them,
//! and of AMD's nested page tables (Intel SDM vol. 3A, 4.3 to 4.5; AMD APM vol. 2, 5.4.1).

/// P, bit 0.
pub(crate) const PRESENT: u64 = 1 << 0;
/// R/W, bit 1.
pub(crate) const READ_WRITE: u64 = 1 << 1;
/// U/S, bit 2.
pub(crate) const USER: u64 = 1 << 2;
/// PWT, bit 3, and above it PCD: the lowest two bits of the number of a memory type in the PAT
/// (Intel SDM vol. 3A, "Page Attribute Table").
pub(crate) const WRITE_THROUGH: u64 = 1 << 3;
/// PAT, bit 7, in leaf PTEs of 4 KiB: the highest bit of that number.
pub(crate) const PAT_SMALL: u64 = 1 << 7;
/// PAT, bit 12, in leaf PTEs of huge pages.
pub(crate) const PAT_HUGE: u64 = 1 << 12;
/// A, bit 5, in every mode, but not in PAE's PDPTEs.
pub(crate) const ACCESSED: u64 = 1 << 5;
/// D, bit 6, in leaf PTEs of every mode.
pub(crate) const DIRTY: u64 = 1 << 6;
/// PS, bit 7, in PTEs above level 1 that may be leaf PTEs. At level 1 the bit is PAT.
pub(crate) const PAGE_SIZE_BIT: u64 = 1 << 7;
/// G, bit 8, in leaf PTEs.
pub(crate) const GLOBAL: u64 = 1 << 8;
/// XD (NX), bit 63 of a PTE of 8 bytes.
pub(crate) const EXECUTE_DISABLE: u64 = 1 << 63;
/// The physical address in a PTE of 8 bytes, bits 12 to 51.
pub(crate) const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
