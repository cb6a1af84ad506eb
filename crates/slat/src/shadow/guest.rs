//! The guest's own page tables as the architecture defines them: the paging mode that the registers
//! select, what a PTE says, and whether it allows an access. Of all that the guest has, shadow PTEs
//! are made from this alone.
//!
//! Nothing here accesses memory. For each level, the caller
//! 1. reads the PTE at the address that [`GuestMode::entry_gpa`] returns,
//! 2. [decodes](GuestMode::decode) it,
//! 3. for a table, [combines](Rights::and) the rights of all PTEs so far, and goes on one level
//!    down,
//! 4. for a leaf PTE, [checks](GuestMode::check) the access, and sets in memory the
//!    [marks](Decoded::missing_marks) that the CPU would set.
//!
//! So reserved bits are checked on the way and rights at the end. Page faults need this order: one
//! with RSVD says nothing of rights.
//!
//! Sections are those of the Intel SDM vol. 3A in editions where "Paging" is chapter 4 (5 in later
//! ones). Where processors differ, these choices hold:
//! - 1 GiB pages, PSE-36 and execute-disable exist.
//! - Bit 8 of a PTE that points to a table is ignored, as Intel has it.
//! - With PAE, each walk reads the four PDPTEs from memory, not from registers that a load of CR3
//!   fills. AMD's processors do that for a guest with nested paging (APM vol. 2, "Legacy PAE Mode"
//!   under 15.25). A guest that keeps to the manuals loads CR3 after it has changed a PDPTE, and
//!   finds no difference.
//! - As Intel has it (4.4.1), a load of CR3 is a #GP if a PDPTE has a reserved bit set. A PDPTE
//!   that gets such a bit afterwards is a #PF with RSVD when it is used.

use crate::addr::{Access, Gfn, Gpa, Gva, LEVEL_SHIFT, Level, PAGE_SHIFT, PAGE_SIZE};
use crate::bits::bit_range;
use crate::format::x86::{ACCESSED, ADDRESS, DIRTY, EXECUTE_DISABLE, GLOBAL, PAGE_SIZE_BIT, PRESENT, READ_WRITE, USER};
use crate::registers::{
    CR0_CD, CR0_NW, CR0_PE, CR0_PG, CR0_WP, CR3_KEEP, CR3_PCID, CR4_LA57, CR4_PAE, CR4_PCIDE, CR4_PGE, CR4_PSE,
    CR4_SMAP, CR4_SMEP, CR4_UNSUPPORTED, EFER_LME, EFER_NXE, GuestAccess, PagingRegister, PagingRegisters, Privilege,
};

/// Bits of a #PF's error code (4.7). P: every PTE was present.
pub(crate) const FAULT_PRESENT: u32 = 1 << 0;
/// W/R: a write.
pub(crate) const FAULT_WRITE: u32 = 1 << 1;
/// U/S: by user code.
pub(crate) const FAULT_USER: u32 = 1 << 2;
/// RSVD: a PTE has a reserved bit set. Then P is set, too.
pub(crate) const FAULT_RESERVED: u32 = 1 << 3;
/// I/D: an instruction fetch.
pub(crate) const FAULT_FETCH: u32 = 1 << 4;

/// Address in a 32-bit PTE, bits 31:12.
const ADDRESS_32: u64 = bits(12, 31);
/// Address bits 31:22 in a PDE that maps 4 MiB (table 4-4).
const ADDRESS_4M: u64 = bits(22, 31);
/// Address bits 39:32 in a PDE that maps 4 MiB (table 4-4).
const PSE36: u64 = bits(13, 20);
/// How far these bits lie higher in the address than in the PDE.
const PSE36_SHIFT: u32 = 32 - 13;
/// Reserved in a PDE that maps 4 MiB, whatever the guest's MAXPHYADDR (table 4-4 counts it as 40 at
/// most).
const RESERVED_4M: u64 = 1 << 21;
/// Reserved in a PDPTE of PAE (table 4-8), beside the bits above the address.
const RESERVED_PDPTE: u64 = bits(1, 2) | bits(5, 8);
/// Address of PAE's table of PDPTEs in CR3 (table 4-7).
const PDPT_ADDRESS: u64 = bits(5, 31);
/// log2 of the PTEs in a table of 32-bit paging.
const LEVEL_SHIFT_32: u32 = 10;

/// A mask of bits `low` to `high`, both included; empty if `low` is greater.
const fn bits(low: u32, high: u32) -> u64 {
    if low <= high { bit_range(low as u64, (high - low) as u64 + 1) } else { 0 }
}

/// The guest did what raises #GP(0).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct GeneralProtection;

/// The paging modes (4.1.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PagingMode {
    /// CR0.PG is clear: addresses are guest-physical.
    Off,
    /// 32-bit paging: two levels of 1024 PTEs of 4 bytes.
    TwoLevel,
    /// PAE paging: three levels, with four PTEs in the root.
    Pae,
    /// 4-level paging, in long mode.
    FourLevel,
    /// 5-level paging, in long mode.
    FiveLevel,
}

impl PagingMode {
    const fn is_long(self) -> bool {
        matches!(self, PagingMode::FourLevel | PagingMode::FiveLevel)
    }
}

bitflags::bitflags! {
    /// Modifiers of a paging mode (4.1.3). Each is set only where it takes effect.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    struct Modifiers: u8 {
        const WRITE_PROTECT = 1 << 0;
        const PAGE_SIZE_EXTENSIONS = 1 << 1;
        const GLOBAL_PAGES = 1 << 2;
        const PCIDS = 1 << 3;
        const SMEP = 1 << 4;
        const SMAP = 1 << 5;
        const NO_EXECUTE = 1 << 6;
    }
}

/// What a load of CR3 does to cached translations of the PCID that it names (4.10.4.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Keep {
    /// They may stay.
    Keep,
    /// They must be flushed, all but the global ones.
    Flush,
}

/// What the paging registers select, decoded once. Modes are equal if they give every PTE the same
/// meaning and every access the same rights: a modifier without effect in its paging mode is left
/// out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct GuestMode {
    paging: PagingMode,
    modifiers: Modifiers,
    /// Bits of a guest-physical address: the guest's MAXPHYADDR.
    gpa_bits: u8,
}

impl GuestMode {
    /// Guest-physical address bits of the guest's CPU.
    pub(crate) fn gpa_bits(self) -> u32 {
        self.gpa_bits.into()
    }

    /// The mode that `registers` select, for a guest with `gpa_bits` guest-physical address bits
    /// (32 to 52).
    ///
    /// # Errors
    /// The register that no vCPU can hold beside the others, because the instruction that would
    /// make it so raises #GP:
    /// - CR0 for PG without PE;
    /// - CR4 for LME and PG without PAE (4.1.2), for PCIDE outside long mode (4.10.1), and for a
    ///   bit that shadow paging does not support ([`PagingRegisters::cr4`]);
    /// - CR3 for a reserved bit.
    pub(crate) fn new(registers: PagingRegisters, gpa_bits: u32) -> Result<GuestMode, PagingRegister> {
        let PagingRegisters { cr0, cr3, cr4, efer } = registers;
        let paging = match (cr0 & CR0_PG != 0, efer & EFER_LME != 0, cr4 & CR4_PAE != 0) {
            (false, ..) => PagingMode::Off,
            _ if cr0 & CR0_PE == 0 => return Err(PagingRegister::Cr0),
            (true, false, false) => PagingMode::TwoLevel,
            (true, false, true) => PagingMode::Pae,
            (true, true, false) => return Err(PagingRegister::Cr4),
            (true, true, true) if cr4 & CR4_LA57 != 0 => PagingMode::FiveLevel,
            (true, true, true) => PagingMode::FourLevel,
        };
        if cr4 & CR4_UNSUPPORTED != 0 || cr4 & CR4_PCIDE != 0 && !paging.is_long() {
            return Err(PagingRegister::Cr4);
        }
        let is_on = paging != PagingMode::Off;
        let mut modifiers = Modifiers::empty();
        modifiers.set(Modifiers::WRITE_PROTECT, is_on && cr0 & CR0_WP != 0);
        modifiers.set(Modifiers::PAGE_SIZE_EXTENSIONS, paging == PagingMode::TwoLevel && cr4 & CR4_PSE != 0);
        modifiers.set(Modifiers::GLOBAL_PAGES, is_on && cr4 & CR4_PGE != 0);
        modifiers.set(Modifiers::PCIDS, cr4 & CR4_PCIDE != 0);
        modifiers.set(Modifiers::SMEP, is_on && cr4 & CR4_SMEP != 0);
        modifiers.set(Modifiers::SMAP, is_on && cr4 & CR4_SMAP != 0);
        modifiers.set(Modifiers::NO_EXECUTE, is_on && paging != PagingMode::TwoLevel && efer & EFER_NXE != 0);
        let mode = GuestMode { paging, modifiers, gpa_bits: gpa_bits as u8 };
        if cr3 & (CR3_KEEP | mode.reserved_cr3(gpa_bits)) != 0 {
            return Err(PagingRegister::Cr3);
        }
        Ok(mode)
    }

    /// The registers of a vCPU that has `old` and writes `value` into `register` by MOV to CR0, MOV
    /// to CR4 or WRMSR, and the mode that they select. (CR3 has [rules of its
    /// own](Self::check_cr3).)
    ///
    /// The caller checks what depends on the code segment: setting PG with LME in a 64-bit segment
    /// and clearing PG in 64-bit mode are not allowed.
    ///
    /// # Errors
    /// As [`GuestMode::new`], which has the rules for PG, PAE and for turning paging off with
    /// PCIDE. Besides: LA57 changes in long mode (4.1.2), LME changes with paging on, or PCIDE is
    /// set while the PCID in CR3 is not 0 (4.10.1).
    pub(crate) fn check_write(
        old: PagingRegisters,
        register: PagingRegister,
        value: u64,
        gpa_bits: u32,
    ) -> Result<(PagingRegisters, GuestMode), GeneralProtection> {
        let new = old.with(register, value);
        let mode = GuestMode::new(new, gpa_bits).map_err(|_| GeneralProtection)?;
        let changed_cr4 = old.cr4 ^ new.cr4;
        let la57 = changed_cr4 & CR4_LA57 != 0 && mode.paging.is_long();
        let pcide = changed_cr4 & new.cr4 & CR4_PCIDE != 0 && new.cr3 & CR3_PCID != 0;
        let lme = (old.efer ^ new.efer) & EFER_LME != 0 && new.cr0 & CR0_PG != 0;
        if la57 || pcide || lme { Err(GeneralProtection) } else { Ok((new, mode)) }
    }

    /// Whether a MOV to CR0 or CR4 loads the PDPTEs (4.4.1). It changes `old` into `new`, which
    /// selects this mode.
    pub(crate) fn loads_pdptes(self, old: PagingRegisters, new: PagingRegisters) -> bool {
        self.paging == PagingMode::Pae
            && ((old.cr0 ^ new.cr0) & (CR0_CD | CR0_NW | CR0_PG) != 0
                || (old.cr4 ^ new.cr4) & (CR4_PAE | CR4_PGE | CR4_PSE | CR4_SMEP) != 0)
    }

    pub(crate) fn paging(self) -> PagingMode {
        self.paging
    }

    /// Whether supervisors, too, need [`Rights::WRITE`] to write: CR0.WP, with paging.
    pub(crate) fn write_protect(self) -> bool {
        self.modifiers.contains(Modifiers::WRITE_PROTECT)
    }

    /// Whether supervisors may not execute user pages: CR4.SMEP, with paging.
    pub(crate) fn smep(self) -> bool {
        self.modifiers.contains(Modifiers::SMEP)
    }

    /// Whether supervisors may access user pages only with EFLAGS.AC: CR4.SMAP, with paging.
    pub(crate) fn smap(self) -> bool {
        self.modifiers.contains(Modifiers::SMAP)
    }

    /// Whether PTEs can forbid execution: EFER.NXE, with PTEs of 8 bytes. If not, all pages can be
    /// executed.
    pub(crate) fn no_execute(self) -> bool {
        self.modifiers.contains(Modifiers::NO_EXECUTE)
    }

    /// Whether 32-bit paging has pages of 4 MiB: CR4.PSE.
    pub(crate) fn page_size_extensions(self) -> bool {
        self.modifiers.contains(Modifiers::PAGE_SIZE_EXTENSIONS)
    }

    /// Whether translations are tagged with PCIDs: CR4.PCIDE.
    pub(crate) fn pcide(self) -> bool {
        self.modifiers.contains(Modifiers::PCIDS)
    }

    /// Whether leaf PTEs can be global: CR4.PGE, with paging.
    pub(crate) fn global_pages(self) -> bool {
        self.modifiers.contains(Modifiers::GLOBAL_PAGES)
    }

    /// Level of the PTEs in the guest's root table, which is also the number of levels; 0 without
    /// paging.
    pub(crate) fn root_level(self) -> Level {
        Level(match self.paging {
            PagingMode::Off => 0,
            PagingMode::TwoLevel => 2,
            PagingMode::Pae => 3,
            PagingMode::FourLevel => 4,
            PagingMode::FiveLevel => 5,
        })
    }

    /// Levels of the shadow page tables, which are always those of long mode.
    pub(crate) fn shadow_levels(self) -> u8 {
        if self.paging == PagingMode::FiveLevel { 5 } else { 4 }
    }

    /// Bytes of a guest PTE: 4 or 8.
    pub(crate) fn entry_bytes(self) -> u64 {
        if self.paging == PagingMode::TwoLevel { 4 } else { 8 }
    }

    /// Address of the guest's root table, for the value `cr3` of CR3 (tables 4-3, 4-7, 4-12 and
    /// 4-13): a multiple of 4096, or of 32 with PAE paging. It has no meaning without paging.
    pub(crate) fn root_table(self, cr3: u64) -> Gpa {
        Gpa(cr3
            & match self.paging {
                PagingMode::Off | PagingMode::TwoLevel => ADDRESS_32,
                PagingMode::Pae => PDPT_ADDRESS,
                PagingMode::FourLevel | PagingMode::FiveLevel => ADDRESS,
            })
    }

    /// Address of the PTE for `gva` in the table at `table`, whose PTEs are of `level`, 1 to
    /// [`root_level`](Self::root_level) (4.3, 4.4.2, 4.5).
    pub(crate) fn entry_gpa(self, table: Gpa, level: Level, gva: Gva) -> Gpa {
        let (level_shift, index_bits) = match (self.paging, level) {
            (PagingMode::TwoLevel, _) => (LEVEL_SHIFT_32, LEVEL_SHIFT_32),
            (PagingMode::Pae, Level::L1G) => (LEVEL_SHIFT, 2),
            _ => (LEVEL_SHIFT, LEVEL_SHIFT),
        };
        let shift = PAGE_SHIFT + level_shift * (u32::from(level.0) - 1);
        let index = gva.0 >> shift & bits(0, index_bits - 1);
        Gpa(table.0 + index * self.entry_bytes())
    }

    /// Whether the mode can translate `gva`: canonical with 48 or 57 bits in long mode (SDM vol. 1,
    /// 3.3.7.1), 32 bits in the others.
    pub(crate) fn is_canonical(self, gva: Gva) -> bool {
        let unused_bits = match self.paging {
            PagingMode::Off | PagingMode::TwoLevel | PagingMode::Pae => return gva.0 <= u64::from(u32::MAX),
            PagingMode::FourLevel => 64 - 48,
            PagingMode::FiveLevel => 64 - 57,
        };
        (gva.0 << unused_bits) as i64 >> unused_bits == gva.0 as i64
    }

    /// What the guest's PTE `pte` of `level`, 1 to [`root_level`](Self::root_level), says. With
    /// 32-bit paging only the lower half is read. Without paging it counts as not present.
    pub(crate) fn decode(self, pte: u64, level: Level) -> Decoded {
        if pte & PRESENT == 0 {
            return Decoded::NotPresent;
        }
        match (self.paging, level) {
            (PagingMode::Off, _) => Decoded::NotPresent,
            (PagingMode::TwoLevel, _) => self.decode_4_bytes(pte & bits(0, 31), level),
            (PagingMode::Pae, Level::L1G) => self.decode_pdpte(pte),
            _ => self.decode_8_bytes(pte, level),
        }
    }

    /// 32-bit paging (tables 4-4 to 4-6).
    fn decode_4_bytes(self, pte: u64, level: Level) -> Decoded {
        if level == Level::L4K {
            return self.leaf(pte, Gpa(pte & ADDRESS_32), 1);
        }
        let can_be_leaf = self.modifiers.contains(Modifiers::PAGE_SIZE_EXTENSIONS);
        if !can_be_leaf || pte & PAGE_SIZE_BIT == 0 {
            return Decoded::table(pte, ADDRESS_32);
        }
        let address = pte & ADDRESS_4M | (pte & PSE36) << PSE36_SHIFT;
        if pte & RESERVED_4M != 0 || address & self.beyond_memory(39) != 0 {
            return Decoded::Reserved;
        }
        self.leaf(pte, Gpa(address), 1 << LEVEL_SHIFT_32)
    }

    /// PAE's root PTEs (table 4-8), which have neither rights nor marks.
    fn decode_pdpte(self, pte: u64) -> Decoded {
        if pte & (RESERVED_PDPTE | self.beyond_memory(63)) != 0 {
            return Decoded::Reserved;
        }
        Decoded::Table { table: Gpa(pte & ADDRESS), rights: Rights::ALL, is_accessed: true }
    }

    /// PAE paging below the root (tables 4-9 to 4-11), 4-level and 5-level paging (tables 4-14 to
    /// 4-20).
    fn decode_8_bytes(self, pte: u64, level: Level) -> Decoded {
        // Long mode ignores bits 62:52. With PAE paging they are reserved, like the address bits
        // that the guest lacks.
        let mut reserved = self.beyond_memory(if self.paging == PagingMode::Pae { 62 } else { 51 });
        if !self.no_execute() {
            reserved |= EXECUTE_DISABLE;
        }
        let is_leaf = level == Level::L4K || pte & PAGE_SIZE_BIT != 0;
        if is_leaf {
            // Between PAT (bit 12) and the address of a large page.
            reserved |= (level.size_bytes() - 1) & !(2 * PAGE_SIZE - 1);
        }
        if level > Level::L1G {
            reserved |= PAGE_SIZE_BIT;
        }
        if pte & reserved != 0 {
            return Decoded::Reserved;
        }
        if !is_leaf {
            return Decoded::table(pte, ADDRESS);
        }
        // PAT is the only bit of `ADDRESS` that may be set here and is not of the address.
        self.leaf(pte, Gpa(pte & ADDRESS & !(level.size_bytes() - 1)), level.nr_pages())
    }

    fn leaf(self, pte: u64, address: Gpa, nr_pages: u64) -> Decoded {
        Decoded::Leaf(GuestLeaf {
            gfn: address.gfn(),
            nr_pages,
            rights: Rights::of(pte),
            is_global: self.global_pages() && pte & GLOBAL != 0,
            is_accessed: pte & ACCESSED != 0,
            is_dirty: pte & DIRTY != 0,
        })
    }

    /// Whether `rights`, those of the leaf PTE and of all PTEs above it, allow `access` (4.6.1).
    /// Without paging, [`Rights::ALL`] allow everything.
    ///
    /// # Errors
    /// The error code of the guest's #PF, with P set.
    pub(crate) fn check(self, rights: Rights, access: GuestAccess) -> Result<(), u32> {
        let is_user_page = rights.has(Rights::USER);
        let may_touch = match access.privilege {
            Privilege::User => is_user_page,
            Privilege::Supervisor => !(is_user_page && self.smap()),
            Privilege::SupervisorWithAc => true,
        };
        let is_user = access.privilege == Privilege::User;
        let is_allowed = match access.access {
            Access::Read => may_touch,
            Access::Write => may_touch && (rights.has(Rights::WRITE) || !is_user && !self.write_protect()),
            // SMAP is for data; for instructions there is SMEP.
            Access::Execute | Access::ExecuteUser => {
                rights.has(Rights::EXECUTE) && if is_user { is_user_page } else { !(is_user_page && self.smep()) }
            }
        };
        if is_allowed { Ok(()) } else { Err(self.error_code(access, FAULT_PRESENT)) }
    }

    /// The error code of a #PF for `access` (4.7). `flags` is 0 if a PTE was not present,
    /// [`FAULT_PRESENT`] if the rights did not suffice, [`FAULT_PRESENT`] and [`FAULT_RESERVED`]
    /// for a PTE that is [`Decoded::Reserved`].
    pub(crate) fn error_code(self, access: GuestAccess, flags: u32) -> u32 {
        let mut error_code = flags;
        if access.privilege == Privilege::User {
            error_code |= FAULT_USER;
        }
        match access.access {
            Access::Write => error_code |= FAULT_WRITE,
            // A CPU on which nothing forbids execution does not distinguish fetches from reads.
            Access::Execute | Access::ExecuteUser if self.smep() || self.no_execute() => error_code |= FAULT_FETCH,
            Access::Execute | Access::ExecuteUser | Access::Read => (),
        }
        error_code
    }

    /// What MOV to CR3 with the operand `value` does: the value that CR3 gets, without bit 63, and
    /// what happens to cached translations (4.10.4.1). `gpa_bits` as in [`GuestMode::new`].
    ///
    /// # Errors
    /// Bit 63 without PCIDs, or another reserved bit.
    pub(crate) fn check_cr3(self, value: u64, gpa_bits: u32) -> Result<(u64, Keep), GeneralProtection> {
        let cr3 = value & !CR3_KEEP;
        let keep = match (value != cr3, self.pcide()) {
            (true, true) => Keep::Keep,
            (true, false) => return Err(GeneralProtection),
            (false, _) => Keep::Flush,
        };
        if cr3 & self.reserved_cr3(gpa_bits) != 0 { Err(GeneralProtection) } else { Ok((cr3, keep)) }
    }

    /// The PCID in CR3's value `cr3`; 0 without PCIDs (4.10.1).
    pub(crate) fn pcid(self, cr3: u64) -> u16 {
        if self.pcide() { (cr3 & CR3_PCID) as u16 } else { 0 }
    }

    /// Reserved bits of CR3 below bit 63 (tables 4-12 and 4-13). Outside long mode the upper half
    /// of CR3 is ignored (tables 4-3 and 4-7), and no instruction sets it.
    fn reserved_cr3(self, gpa_bits: u32) -> u64 {
        if self.paging.is_long() { bits(gpa_bits, 62) } else { 0 }
    }

    /// Address bits, up to bit `last`, that no guest-physical address has.
    fn beyond_memory(self, last: u32) -> u64 {
        bits(self.gpa_bits.into(), last)
    }
}

/// What a guest PTE says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Decoded {
    /// P is clear; the guest may use all other bits.
    NotPresent,
    /// A reserved bit is set: an access through the PTE is a #PF with RSVD.
    Reserved,
    /// It points to a table of the next lower level.
    Table {
        /// Address of the table.
        table: Gpa,
        /// What the PTE allows for all that is below.
        rights: Rights,
        /// Whether A is set, or the PTE has no A.
        is_accessed: bool,
    },
    /// It maps memory.
    Leaf(GuestLeaf),
}

/// What a guest's leaf PTE maps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct GuestLeaf {
    /// First frame of the page.
    pub gfn: Gfn,
    /// Size of the page in base pages: 1; 512 (2 MiB), 1024 (4 MiB, 32-bit paging); 2^18 (1 GiB).
    pub nr_pages: u64,
    /// What the leaf PTE itself allows.
    pub rights: Rights,
    /// Whether its translations are global: G, with CR4.PGE.
    pub is_global: bool,
    /// A.
    pub is_accessed: bool,
    /// D.
    pub is_dirty: bool,
}

impl Decoded {
    fn table(pte: u64, address: u64) -> Decoded {
        Decoded::Table { table: Gpa(pte & address), rights: Rights::of(pte), is_accessed: pte & ACCESSED != 0 }
    }

    /// The bits that the CPU must set in the PTE in memory before `access` goes through it (4.8); 0
    /// if none is missing.
    pub(crate) fn missing_marks(self, access: Access) -> u64 {
        match self {
            Decoded::Table { is_accessed: false, .. } => ACCESSED,
            Decoded::Leaf(leaf) => leaf.missing_marks(access),
            Decoded::NotPresent | Decoded::Reserved | Decoded::Table { .. } => 0,
        }
    }
}

impl GuestLeaf {
    /// As [`Decoded::missing_marks`].
    pub(crate) fn missing_marks(self, access: Access) -> u64 {
        let accessed = if self.is_accessed { 0 } else { ACCESSED };
        let dirty = if self.is_dirty || access != Access::Write { 0 } else { DIRTY };
        accessed | dirty
    }
}

/// What one PTE, or all PTEs of a walk together, allow. Reading is always allowed, at least to a
/// supervisor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rights(pub(crate) u8);

impl Rights {
    /// R/W: it may be written.
    pub(crate) const WRITE: Rights = Rights(1 << 0);
    /// U/S: it is a user page, which user code may access.
    pub(crate) const USER: Rights = Rights(1 << 1);
    /// Not XD: it may be executed.
    pub(crate) const EXECUTE: Rights = Rights(1 << 2);
    /// All rights, with which a walk starts.
    pub(crate) const ALL: Rights = Rights(0b111);

    /// The rights in a PTE that has no reserved bit set. (XD is reserved where it has no meaning,
    /// and clear in a 32-bit PTE.)
    fn of(pte: u64) -> Rights {
        let write = if pte & READ_WRITE != 0 { Rights::WRITE.0 } else { 0 };
        let user = if pte & USER != 0 { Rights::USER.0 } else { 0 };
        let execute = if pte & EXECUTE_DISABLE == 0 { Rights::EXECUTE.0 } else { 0 };
        Rights(write | user | execute)
    }

    /// What both `self` and `other` allow.
    pub(crate) fn and(self, other: Rights) -> Rights {
        Rights(self.0 & other.0)
    }

    /// Whether all of `other` is allowed.
    pub(crate) fn has(self, other: Rights) -> bool {
        self.0 & other.0 == other.0
    }
}

#[cfg(test)]
#[path = "guest_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "guest_model_tests.rs"]
mod model_tests;
