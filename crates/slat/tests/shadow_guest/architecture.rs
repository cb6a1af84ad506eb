//! The rules by which a guest's own page tables translate its addresses, from the Intel SDM vol.
//! 3A, chapter "Paging": 32-bit paging with 4 MiB pages and PSE-36, PAE, and 4 and 5 levels;
//! rights, reserved bits, error codes, A and D.
//!
//! Where processors differ: 1 GiB pages, PSE-36 and execute-disable are supported. With PAE the
//! four PDPTEs are read from memory, as AMD's CPUs do for a guest with nested paging (APM vol. 2,
//! 15.25): a reserved bit in one is a page fault. But a load of CR3, and whatever else loads PDPTEs
//! on Intel's CPUs ("PDPTE Registers"), is a general-protection fault if one has a reserved bit.
//!
//! Nothing here caches; `stale` has what may be stale.

use slat::Access;
use slat::shadow::{PagingRegisters, Privilege};

pub const CR0_PE: u64 = 1;
pub const CR0_WP: u64 = 1 << 16;
pub const CR0_PG: u64 = 1 << 31;
pub const CR4_PSE: u64 = 1 << 4;
pub const CR4_PAE: u64 = 1 << 5;
pub const CR4_PGE: u64 = 1 << 7;
pub const CR4_LA57: u64 = 1 << 12;
pub const CR4_PCIDE: u64 = 1 << 17;
pub const CR4_SMEP: u64 = 1 << 20;
pub const CR4_SMAP: u64 = 1 << 21;
pub const EFER_LME: u64 = 1 << 8;
pub const EFER_LMA: u64 = 1 << 10;
pub const EFER_NXE: u64 = 1 << 11;

pub const PRESENT: u64 = 1;
pub const WRITABLE: u64 = 1 << 1;
pub const USER: u64 = 1 << 2;
pub const ACCESSED: u64 = 1 << 5;
pub const DIRTY: u64 = 1 << 6;
pub const LARGE: u64 = 1 << 7;
pub const GLOBAL: u64 = 1 << 8;
pub const NO_EXECUTE: u64 = 1 << 63;

/// The width of guest-physical addresses (MAXPHYADDR).
pub const PHYSICAL_BITS: u32 = 48;
const ADDRESS: u64 = (1 << PHYSICAL_BITS) - 0x1000;
/// Bits of a PTE from MAXPHYADDR to 51.
const TOO_HIGH: u64 = (1 << 52) - (1 << PHYSICAL_BITS);

/// How the registers translate addresses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PagingMode {
    /// Linear addresses are physical ones.
    Off,
    Bits32,
    Pae,
    FourLevel,
    FiveLevel,
}

impl PagingMode {
    pub fn of(registers: &PagingRegisters) -> PagingMode {
        let PagingRegisters { cr0, cr4, efer, .. } = *registers;
        match (cr0 & CR0_PG != 0, cr4 & CR4_PAE != 0, efer & EFER_LME != 0, cr4 & CR4_LA57 != 0) {
            (false, _, _, _) => PagingMode::Off,
            (true, false, _, _) => PagingMode::Bits32,
            (true, true, false, _) => PagingMode::Pae,
            (true, true, true, false) => PagingMode::FourLevel,
            (true, true, true, true) => PagingMode::FiveLevel,
        }
    }

    /// Levels of page tables.
    pub fn levels(self) -> u8 {
        match self {
            PagingMode::Off => 0,
            PagingMode::Bits32 => 2,
            PagingMode::Pae => 3,
            PagingMode::FourLevel => 4,
            PagingMode::FiveLevel => 5,
        }
    }

    pub fn entry_bytes(self) -> u64 {
        if self == PagingMode::Bits32 { 4 } else { 8 }
    }

    pub fn is_long(self) -> bool {
        matches!(self, PagingMode::FourLevel | PagingMode::FiveLevel)
    }

    /// Lowest bit of a linear address that selects a PTE of `level`; the bits below are inside its
    /// page.
    pub fn shift(self, level: u8) -> u32 {
        12 + u32::from(level - 1) * self.index_bits()
    }

    fn index_bits(self) -> u32 {
        if self == PagingMode::Bits32 { 10 } else { 9 }
    }

    /// Index of the PTE for `la` in a page table of `level`.
    pub fn index(self, la: u64, level: u8) -> u64 {
        let bits = if self == PagingMode::Pae && level == 3 { 2 } else { self.index_bits() };
        (la >> self.shift(level)) & ((1 << bits) - 1)
    }

    /// The linear address with these indices, from the highest level down.
    pub fn compose(self, indices: &[u64]) -> u64 {
        let levels = (1..=self.levels()).rev();
        let la = levels.zip(indices).fold(0, |la, (level, index)| la | (index << self.shift(level)));
        match self {
            PagingMode::FourLevel => ((la << 16) as i64 >> 16) as u64,
            PagingMode::FiveLevel => ((la << 7) as i64 >> 7) as u64,
            _ => la & 0xffff_ffff,
        }
    }

    /// The address of the top page table.
    pub fn root(self, cr3: u64) -> u64 {
        match self {
            PagingMode::Bits32 => cr3 & 0xffff_f000,
            PagingMode::Pae => cr3 & 0xffff_ffe0,
            _ => cr3 & ADDRESS,
        }
    }
}

/// The rights of all PTEs on a path.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Rights {
    pub writable: bool,
    pub user: bool,
    pub executable: bool,
}

impl Rights {
    pub const ALL: Rights = Rights { writable: true, user: true, executable: true };

    fn and(self, entry: u64) -> Rights {
        Rights {
            writable: self.writable && entry & WRITABLE != 0,
            user: self.user && entry & USER != 0,
            executable: self.executable && entry & NO_EXECUTE == 0,
        }
    }

    /// "Determination of Access Rights".
    pub fn permits(self, registers: &PagingRegisters, access: Access, privilege: Privilege) -> bool {
        let (wp, smep) = (registers.cr0 & CR0_WP != 0, registers.cr4 & CR4_SMEP != 0);
        let smap = registers.cr4 & CR4_SMAP != 0;
        match privilege {
            Privilege::User => {
                self.user
                    && match access {
                        Access::Read => true,
                        Access::Write => self.writable,
                        Access::Execute | Access::ExecuteUser => self.executable,
                    }
            }
            Privilege::Supervisor | Privilege::SupervisorWithAc => {
                let smap_allows = !smap || !self.user || privilege == Privilege::SupervisorWithAc;
                match access {
                    Access::Read => smap_allows,
                    Access::Write => smap_allows && (!wp || self.writable),
                    Access::Execute | Access::ExecuteUser => self.executable && !(self.user && smep),
                }
            }
        }
    }
}

/// What a PTE means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Meaning {
    NotPresent,
    /// It has a reserved bit set.
    Reserved,
    /// It points to the page table at this address.
    Table {
        gpa: u64,
        rights: Rights,
    },
    /// It maps the page that begins at this address.
    Page {
        gpa: u64,
        rights: Rights,
        dirty: bool,
        global: bool,
    },
}

/// Decodes `entry`, of `level`, on a path that has allowed `rights` so far.
pub fn meaning(registers: &PagingRegisters, mode: PagingMode, level: u8, entry: u64, rights: Rights) -> Meaning {
    if entry & PRESENT == 0 {
        return Meaning::NotPresent;
    }
    if mode == PagingMode::Pae && level == 3 {
        let reserved = 0b1_1110_0110 | TOO_HIGH | 0xfff << 52;
        // It has no rights.
        return if entry & reserved == 0 { Meaning::Table { gpa: entry & ADDRESS, rights } } else { Meaning::Reserved };
    }
    let has_nx = mode != PagingMode::Bits32 && registers.efer & EFER_NXE != 0;
    let is_page = level == 1
        || entry & LARGE != 0
            && match mode {
                PagingMode::Bits32 => registers.cr4 & CR4_PSE != 0,
                _ => level <= 3,
            };
    let large_base = !((1 << mode.shift(level)) - 1);
    let reserved = match mode {
        PagingMode::Off => 0,
        // PSE-36: bits 20 to 13 are bits 39 to 32 of the address.
        PagingMode::Bits32 => u64::from(is_page && level == 2) << 21,
        PagingMode::Pae | PagingMode::FourLevel | PagingMode::FiveLevel => {
            let high = TOO_HIGH | if mode == PagingMode::Pae { 0x7ff << 52 } else { 0 };
            let nx = if has_nx { 0 } else { NO_EXECUTE };
            // No page is that large.
            let large = if level > 3 { LARGE } else { 0 };
            // Bit 12 is PAT.
            let inside = if is_page && level > 1 { !large_base & !0x1fff } else { 0 };
            high | nx | large | inside
        }
    };
    if entry & reserved != 0 {
        return Meaning::Reserved;
    }
    let rights = rights.and(if has_nx { entry } else { entry & !NO_EXECUTE });
    let (dirty, global) = (entry & DIRTY != 0, entry & GLOBAL != 0);
    match (mode, is_page) {
        (PagingMode::Bits32, true) if level == 2 => {
            let gpa = (entry & 0xffc0_0000) | ((entry & 0x001f_e000) << 19);
            Meaning::Page { gpa, rights, dirty, global }
        }
        (PagingMode::Bits32, true) => Meaning::Page { gpa: entry & 0xffff_f000, rights, dirty, global },
        (PagingMode::Bits32, false) => Meaning::Table { gpa: entry & 0xffff_f000, rights },
        (_, true) => Meaning::Page { gpa: entry & ADDRESS & large_base, rights, dirty, global },
        (_, false) => Meaning::Table { gpa: entry & ADDRESS, rights },
    }
}

/// Whether a MOV to CR0 or CR4 that changes `old` to `new` loads the PDPTEs ("PDPTE Registers").
/// With PAE each MOV to CR3 does.
pub fn loads_pdptes(old: &PagingRegisters, new: &PagingRegisters) -> bool {
    // CD and NW, too.
    let by_cr0 = (old.cr0 ^ new.cr0) & (CR0_PG | 3 << 29) != 0;
    let by_cr4 = (old.cr4 ^ new.cr4) & (CR4_PAE | CR4_PGE | CR4_PSE | CR4_SMEP) != 0;
    PagingMode::of(new) == PagingMode::Pae && (by_cr0 || by_cr4)
}

/// Whether one of the four PDPTEs has a reserved bit set.
pub fn has_bad_pdpte(registers: &PagingRegisters, read: impl Fn(u64) -> Option<u64>) -> bool {
    let table = PagingMode::Pae.root(registers.cr3);
    let is_bad = |entry| meaning(registers, PagingMode::Pae, 3, entry, Rights::ALL) == Meaning::Reserved;
    (0..4).any(|index| read(table + 8 * index).is_some_and(is_bad))
}

/// A PTE on the way of a walk.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    pub gpa: u64,
    pub level: u8,
    pub is_page: bool,
}

/// The end of a walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// The address of a byte.
    Reached { gpa: u64 },
    /// Page fault with this error code.
    Fault { error_code: u32 },
    /// A page table would be where there is no memory.
    NoTable { gpa: u64 },
}

/// A walk of the current page tables, for one access.
#[derive(Clone, Debug)]
pub struct Walk {
    /// The valid present PTEs.
    pub steps: Vec<Step>,
    /// The PTE behind them, if the walk ends at an invalid one.
    pub bad: Option<Step>,
    pub end: End,
    pub rights: Rights,
}

pub fn error_code(registers: &PagingRegisters, access: Access, privilege: Privilege, bits: u32) -> u32 {
    let mode = PagingMode::of(registers);
    let has_nx = registers.efer & EFER_NXE != 0 && mode != PagingMode::Bits32;
    let has_fetch_bit = registers.cr4 & CR4_SMEP != 0 || has_nx;
    bits | u32::from(access == Access::Write) << 1
        | u32::from(privilege == Privilege::User) << 2
        | u32::from(access == Access::Execute && has_fetch_bit) << 4
}

/// Walks the page tables for one access. `read` returns the 8 bytes that hold an address, or `None`
/// where there is no memory.
pub fn walk(
    registers: &PagingRegisters,
    la: u64,
    access: Access,
    privilege: Privilege,
    read: impl Fn(u64) -> Option<u64>,
) -> Walk {
    let mode = PagingMode::of(registers);
    let mut walk = Walk { steps: Vec::new(), bad: None, end: End::Reached { gpa: la }, rights: Rights::ALL };
    if mode == PagingMode::Off {
        return walk;
    }
    let fault = |bits| End::Fault { error_code: error_code(registers, access, privilege, bits) };
    let mut table = mode.root(registers.cr3);
    for level in (1..=mode.levels()).rev() {
        let gpa = table + mode.index(la, level) * mode.entry_bytes();
        let entry = match read(gpa) {
            Some(word) => entry_in(word, gpa, mode),
            None => {
                walk.end = End::NoTable { gpa };
                return walk;
            }
        };
        match meaning(registers, mode, level, entry, walk.rights) {
            bad @ (Meaning::NotPresent | Meaning::Reserved) => {
                walk.end = fault(if bad == Meaning::Reserved { 1 | 1 << 3 } else { 0 });
                walk.bad = Some(Step { gpa, level, is_page: false });
                return walk;
            }
            Meaning::Table { gpa: next, rights } => {
                walk.steps.push(Step { gpa, level, is_page: false });
                (table, walk.rights) = (next, rights);
            }
            Meaning::Page { gpa: page, rights, .. } => {
                walk.steps.push(Step { gpa, level, is_page: true });
                walk.rights = rights;
                let inside = la & ((1 << mode.shift(level)) - 1);
                let may = rights.permits(registers, access, privilege);
                walk.end = if may { End::Reached { gpa: page | inside } } else { fault(1) };
                return walk;
            }
        }
    }
    unreachable!("an entry of level 1 leads to no table")
}

/// Whether PTEs of this level have an accessed flag: PDPTEs of PAE have none.
pub fn has_accessed_flag(mode: PagingMode, level: u8) -> bool {
    mode != PagingMode::Pae || level < 3
}

/// The PTE at `gpa` in the 8 bytes that hold it.
pub fn entry_in(word: u64, gpa: u64, mode: PagingMode) -> u64 {
    if mode == PagingMode::Bits32 { (word >> (8 * (gpa & 4))) & 0xffff_ffff } else { word }
}
