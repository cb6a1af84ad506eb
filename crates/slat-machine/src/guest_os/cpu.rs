//! The CPU interface of the mini guest kernel: accesses at virtual addresses, and the instructions
//! by which a guest controls its own translation.
//!
//! Two CPUs implement it: `PlainCpu` walks the guest's page tables itself, as
//! hardware without a hypervisor does; the other runs on an engine with shadow paging. The manuals
//! define what both must do, and the kernel relies on no more.
//!
//! Sources: Intel SDM vol. 2, MOV to control registers, INVLPG, INVPCID; vol. 3A, "Process-Context
//! Identifiers", "Page-fault exceptions", "Invalidation of TLBs and paging-structure caches".

use slat::shadow::{Gva, PagingRegister, Privilege};

use crate::hardware::cpu::CpuError;
use crate::hardware::shadow_cpu::{ShadowCpu, ShadowHandler};

/// CR0: protected mode.
pub(crate) const CR0_PE: u64 = 1 << 0;
/// CR0: supervisor writes respect read-only pages.
pub(crate) const CR0_WP: u64 = 1 << 16;
/// CR0: paging.
pub(crate) const CR0_PG: u64 = 1 << 31;
/// CR4: PTEs of 8 bytes.
pub(crate) const CR4_PAE: u64 = 1 << 5;
/// CR4: global pages.
pub(crate) const CR4_PGE: u64 = 1 << 7;
/// CR4: PCIDs.
pub(crate) const CR4_PCIDE: u64 = 1 << 17;
/// CR4: a supervisor does not fetch from user pages.
pub(crate) const CR4_SMEP: u64 = 1 << 20;
/// CR4: a supervisor does not read or write user pages unless EFLAGS.AC is set.
pub(crate) const CR4_SMAP: u64 = 1 << 21;
/// EFER: long mode.
pub(crate) const EFER_LME: u64 = 1 << 8;
/// EFER: the no-execute bit of PTEs is in effect.
pub(crate) const EFER_NXE: u64 = 1 << 11;
/// CR3 operand: keep what is cached for the PCID.
pub(crate) const CR3_NO_FLUSH: u64 = 1 << 63;
/// CR3: the PCID.
pub(crate) const CR3_PCID: u64 = 0xfff;

/// INVPCID type: one address in one PCID.
pub(crate) const INVPCID_ADDRESS: u64 = 0;
/// INVPCID type: one PCID.
pub(crate) const INVPCID_CONTEXT: u64 = 1;
/// INVPCID type: all PCIDs and global translations.
pub(crate) const INVPCID_ALL: u64 = 2;
/// INVPCID type: all PCIDs but no global translations.
pub(crate) const INVPCID_ALL_NON_GLOBAL: u64 = 3;

/// Page-fault error code, bit 0: a page is present, and the access was not permitted.
pub(crate) const ERROR_PRESENT: u32 = 1 << 0;
/// Page-fault error code, bit 1: a write.
pub(crate) const ERROR_WRITE: u32 = 1 << 1;
/// Page-fault error code, bit 2: an access of user mode.
pub(crate) const ERROR_USER: u32 = 1 << 2;
/// Page-fault error code, bit 4: a fetch.
pub(crate) const ERROR_FETCH: u32 = 1 << 4;

/// A virtual CPU as its guest sees it. After reset: all registers 0 (paging off: a virtual address
/// is the guest-physical one) and [`Privilege::Supervisor`].
///
/// # Errors
/// [`CpuError::Guest`]: an exception for the kernel. All others, exits to user space included, are
/// errors of the machine. Nothing has changed then.
pub trait KernelGuestCpu {
    /// Reads 8 aligned bytes.
    fn read(&mut self, gva: Gva) -> Result<u64, CpuError>;

    /// Writes 8 aligned bytes.
    fn write(&mut self, gva: Gva, value: u64) -> Result<(), CpuError>;

    /// Fetches 8 aligned bytes of instructions.
    fn fetch(&mut self, gva: Gva) -> Result<u64, CpuError>;

    /// The privilege of the following accesses: SYSCALL, SYSRET, exceptions, STAC, CLAC.
    fn set_privilege(&mut self, privilege: Privilege);

    /// MOV to CR0, CR3 or CR4, or WRMSR to IA32_EFER. Of CR3, bit 63 keeps what is cached for the
    /// PCID, if CR4.PCIDE is set.
    fn write_register(&mut self, register: PagingRegister, value: u64) -> Result<(), CpuError>;

    /// INVLPG.
    fn invlpg(&mut self, gva: Gva) -> Result<(), CpuError>;

    /// INVPCID of type `kind`; the descriptor is the PCID and the linear address.
    fn invpcid(&mut self, kind: u64, descriptor: [u64; 2]) -> Result<(), CpuError>;
}

impl<V: ShadowHandler> KernelGuestCpu for ShadowCpu<V> {
    fn read(&mut self, gva: Gva) -> Result<u64, CpuError> {
        ShadowCpu::read(self, gva)
    }

    fn write(&mut self, gva: Gva, value: u64) -> Result<(), CpuError> {
        ShadowCpu::write(self, gva, value)
    }

    fn fetch(&mut self, gva: Gva) -> Result<u64, CpuError> {
        ShadowCpu::fetch(self, gva)
    }

    fn set_privilege(&mut self, privilege: Privilege) {
        ShadowCpu::set_privilege(self, privilege);
    }

    fn write_register(&mut self, register: PagingRegister, value: u64) -> Result<(), CpuError> {
        ShadowCpu::write_register(self, register, value)
    }

    fn invlpg(&mut self, gva: Gva) -> Result<(), CpuError> {
        ShadowCpu::invlpg(self, gva)
    }

    fn invpcid(&mut self, kind: u64, descriptor: [u64; 2]) -> Result<(), CpuError> {
        ShadowCpu::invpcid(self, kind, descriptor)
    }
}
