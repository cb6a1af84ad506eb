//! What the engine must know of a guest's vCPU to read the guest's own page tables: its paging
//! registers, and for each page fault the access and its privilege. The raw bits are those of the
//! Intel SDM vol. 3A, "Control Registers" (2.5) and "Extended Feature Enable Register" (2.2.1);
//! AMD's are the same (APM vol. 2, 3.1).

use crate::addr::{Access, Gva, Hpa};

/// CR0.PE, bit 0: protected mode.
pub(crate) const CR0_PE: u64 = 1 << 0;
/// CR0.WP, bit 16: R/W holds for supervisors, too.
pub(crate) const CR0_WP: u64 = 1 << 16;
/// CR0.NW, bit 29, and CR0.CD, bit 30: caching. With PAE a change loads the PDPTEs.
pub(crate) const CR0_NW: u64 = 1 << 29;
/// As CR0.NW.
pub(crate) const CR0_CD: u64 = 1 << 30;
/// CR0.PG, bit 31: paging.
pub(crate) const CR0_PG: u64 = 1 << 31;

/// Bit 63 of the *operand* of MOV to CR3, with PCIDs: nothing has to be invalidated. CR3 itself
/// never holds it (4.10.4.1).
pub(crate) const CR3_KEEP: u64 = 1 << 63;
/// Bits 11:0 of CR3, with PCIDs: the current one (table 4-13).
pub(crate) const CR3_PCID: u64 = 0xfff;

/// CR4.PSE, bit 4: 4 MiB pages with 32-bit paging.
pub(crate) const CR4_PSE: u64 = 1 << 4;
/// CR4.PAE, bit 5: PTEs of 8 bytes.
pub(crate) const CR4_PAE: u64 = 1 << 5;
/// CR4.PGE, bit 7: global pages.
pub(crate) const CR4_PGE: u64 = 1 << 7;
/// CR4.LA57, bit 12: five levels in long mode.
pub(crate) const CR4_LA57: u64 = 1 << 12;
/// CR4.PCIDE, bit 17: PCIDs.
pub(crate) const CR4_PCIDE: u64 = 1 << 17;
/// CR4.SMEP, bit 20: supervisors cannot execute user pages.
pub(crate) const CR4_SMEP: u64 = 1 << 20;
/// CR4.SMAP, bit 21: supervisors can access user pages only with EFLAGS.AC.
pub(crate) const CR4_SMAP: u64 = 1 << 21;
/// CR4.PKE, bit 22; CR4.CET, bit 23; CR4.PKS, bit 24; CR4.LAM_SUP, bit 28. Protection keys, shadow
/// stacks and masked linear addresses change what PTEs and addresses mean. Shadow paging supports
/// none of them. For a guest they are reserved bits, as its CPUID must say.
pub(crate) const CR4_UNSUPPORTED: u64 = 1 << 22 | 1 << 23 | 1 << 24 | 1 << 28;

/// EFER.LME, bit 8: paging, when it is on, is that of long mode.
pub(crate) const EFER_LME: u64 = 1 << 8;
/// EFER.LMA, bit 10: LME and CR0.PG, as the CPU reports it.
#[cfg(test)]
pub(crate) const EFER_LMA: u64 = 1 << 10;
/// EFER.NXE, bit 11: bit 63 of a PTE forbids execution.
pub(crate) const EFER_NXE: u64 = 1 << 11;

/// The registers that select how the guest's own page tables are read, with the guest's values: raw
/// bits as in the Intel SDM vol. 3A, "Control Registers" (2.5). The default, all zero, is a vCPU
/// without paging.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct PagingRegisters {
    /// CR0: PE, WP and PG count; also changes of CD and NW, which load the PDPTEs of PAE.
    pub cr0: u64,
    /// CR3, without bit 63: an operand of MOV to CR3 may have that bit, the register never has.
    pub cr3: u64,
    /// CR4: PSE, PAE, PGE, LA57, PCIDE, SMEP and SMAP count. PKE, CET, PKS and LAM_SUP are not
    /// supported: for the guest these bits are reserved.
    pub cr4: u64,
    /// IA32_EFER: LME and NXE count. LMA is ignored: it follows from LME and CR0.PG.
    pub efer: u64,
}

/// One of the [`PagingRegisters`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PagingRegister {
    /// CR0.
    Cr0,
    /// CR3.
    Cr3,
    /// CR4.
    Cr4,
    /// IA32_EFER.
    Efer,
}

impl PagingRegisters {
    /// The value of one register.
    pub fn get(self, register: PagingRegister) -> u64 {
        match register {
            PagingRegister::Cr0 => self.cr0,
            PagingRegister::Cr3 => self.cr3,
            PagingRegister::Cr4 => self.cr4,
            PagingRegister::Efer => self.efer,
        }
    }

    /// The same registers, with `value` in one of them.
    #[must_use]
    pub fn with(self, register: PagingRegister, value: u64) -> PagingRegisters {
        match register {
            PagingRegister::Cr0 => PagingRegisters { cr0: value, ..self },
            PagingRegister::Cr3 => PagingRegisters { cr3: value, ..self },
            PagingRegister::Cr4 => PagingRegisters { cr4: value, ..self },
            PagingRegister::Efer => PagingRegisters { efer: value, ..self },
        }
    }
}

/// An access by a guest-virtual address, which the guest's own page tables allow or forbid.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GuestAccess {
    /// Read, write or execute.
    pub access: Access,
    /// The privilege of the code that does it.
    pub privilege: Privilege,
}

/// The privilege of an access (Intel SDM vol. 3A, "Determination of Access Rights", 4.6).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Privilege {
    /// Code at CPL 3.
    User,
    /// Code at CPL 0 to 2 while EFLAGS.AC is clear. Also the CPU itself, at any CPL and with any
    /// EFLAGS.AC, where it accesses a system structure such as a descriptor table (an *implicit*
    /// supervisor-mode access).
    Supervisor,
    /// Code at CPL 0 to 2 while EFLAGS.AC is set: CR4.SMAP allows it user pages.
    SupervisorWithAc,
}

/// What a CPU must load before it runs the guest ([`Vcpu::entry`](crate::Vcpu::entry)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GuestEntry {
    /// The root of the shadow page tables, for CR3: valid until the next call of this vCPU.
    pub root: Hpa,
    /// Levels of the shadow page tables: 4, or 5 (CR4.LA57).
    pub levels: u8,
    /// The PCID under which the CPU caches their translations. It is the host's, and not one
    /// of the guest's PCIDs. All vCPUs use the same numbers.
    pub pcid: u16,
    /// What the CPU must flush first, if it ran this vCPU last, and this vCPU last ran there. In
    /// any other case the CPU flushes all, since vCPUs use the same PCIDs.
    pub flush: LocalFlush,
}

/// What one CPU must flush of its cached translations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LocalFlush {
    /// Nothing.
    None,
    /// Those of this address, in all PCIDs.
    Page(Gva),
    /// Those of the PCID in [`GuestEntry::pcid`].
    Context,
    /// All of this VM.
    All,
}
