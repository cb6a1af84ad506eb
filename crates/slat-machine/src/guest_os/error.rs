//! The errors of the mini guest kernel: a CPU whose results differ from the guest's page tables.

use slat::Access;
use slat::shadow::{Gva, PagingRegister, Privilege};
use thiserror::Error;

use crate::hardware::cpu::CpuError;

/// Why a kernel's configuration is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message names the fields")]
pub enum KernelConfigError {
    /// No virtual CPU, or more than the image has space for.
    #[error("{nr_vcpus} virtual CPUs are not between 1 and {max}")]
    Vcpus { nr_vcpus: u16, max: u16 },
    /// A virtual CPU without processes.
    #[error("a virtual CPU needs at least one process")]
    NoProcesses,
    /// More memory than the direct map covers.
    #[error("{memory_bytes} bytes of memory are more than {max_bytes}")]
    Memory { memory_bytes: u64, max_bytes: u64 },
}

/// An error that the mini guest kernel found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message names the fields")]
pub enum KernelError {
    /// There is no such virtual CPU.
    #[error("there is no virtual CPU {vcpu}: the kernel was made for {nr_vcpus}")]
    NoVcpu { vcpu: u16, nr_vcpus: u16 },
    /// The virtual CPU was started before.
    #[error("virtual CPU {vcpu} was started before")]
    Started { vcpu: u16 },
    /// All weights of a mix are zero.
    #[error("the mix has no operation")]
    EmptyMix,
    /// No frame is free: the kernel has lost some.
    #[error("no frame is free")]
    OutOfFrames,
    /// An access that must complete did not.
    #[error("{access:?} at {gva} as {privilege:?}: {error}")]
    Access { gva: Gva, access: Access, privilege: Privilege, error: CpuError },
    /// A write of a register that must complete did not.
    #[error("write of {value:#x} to {register:?}: {error}")]
    Register { register: PagingRegister, value: u64, error: CpuError },
    /// A flush that must complete did not: of an address, or of this INVPCID's PCID.
    #[error("{instruction} of {operand:#x}: {error}")]
    Flush { instruction: &'static str, operand: u64, error: CpuError },
    /// A read returned another value than that of the page tables: a stale translation, or a lost
    /// or misdirected write.
    #[error("read {found:#x} at {gva} as {privilege:?}: expected {expected:#x}")]
    WrongValue { gva: Gva, privilege: Privilege, found: u64, expected: u64 },
    /// An access completed that the tables do not allow: a stale translation.
    #[error("{access:?} at {gva} as {privilege:?} completed: expected a page fault with error code {expected:#x}")]
    NoFault {
        gva: Gva,
        access: Access,
        privilege: Privilege,
        /// Error code of the fault that the page tables require.
        expected: u32,
    },
    /// A page fault that the page tables do not require.
    #[error(
        "{access:?} at {gva} as {privilege:?}: page fault at {reported} with error code {error_code:#x}, expected {}",
        expected.map_or("none".into(), |code| format!("error code {code:#x}"))
    )]
    WrongFault {
        gva: Gva,
        access: Access,
        privilege: Privilege,
        reported: Gva,
        error_code: u32,
        /// The right error code; `None` if it should not fault.
        expected: Option<u32>,
    },
    /// An access faults again and again.
    #[error("{access:?} at {gva} as {privilege:?} does not complete after {nr_faults} faults")]
    Stuck { gva: Gva, access: Access, privilege: Privilege, nr_faults: u32 },
    /// A page-table page holds another PTE than was written there; accessed and dirty bits count
    /// where they are known.
    #[error("entry of level {level} for {gva} at guest-physical {gpa:#x} is {found:#x}: expected {expected:#x}")]
    WrongEntry { gva: Gva, level: u8, gpa: u64, found: u64, expected: u64 },
}
