//! The errors of the mini guest kernel: a CPU whose results differ from the guest's page tables.

use slat::Access;
use slat::shadow::{Gva, Privilege};
use thiserror::Error;

use super::cpu::Trap;

/// Why a kernel's configuration is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum KernelConfigError {
    /// No virtual CPU, or more than the image has space for.
    #[error("{nr_vcpus} virtual CPUs are not between 1 and {max}")]
    Vcpus {
        /// The number in the configuration.
        nr_vcpus: u16,
        /// The most.
        max: u16,
    },
    /// A virtual CPU without processes.
    #[error("a virtual CPU needs at least one process")]
    NoProcesses,
    /// More memory than the direct map covers.
    #[error("{memory_bytes} bytes of memory are more than {max_bytes}")]
    Memory {
        /// The memory that would be needed.
        memory_bytes: u64,
        /// The most.
        max_bytes: u64,
    },
}

/// An error that the mini guest kernel found. `E` is the error of the machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum KernelError<E> {
    /// There is no such virtual CPU.
    #[error("there is no virtual CPU {vcpu}: the kernel was made for {nr_vcpus}")]
    NoVcpu {
        /// The number in the call.
        vcpu: u16,
        /// How many there are.
        nr_vcpus: u16,
    },
    /// The virtual CPU was started before.
    #[error("virtual CPU {vcpu} was started before")]
    Started {
        /// Its number.
        vcpu: u16,
    },
    /// All weights of a mix are zero.
    #[error("the mix has no operation")]
    EmptyMix,
    /// No frame is free: the kernel has lost some.
    #[error("no frame is free")]
    OutOfFrames,
    /// An access that must complete did not.
    #[error("{access:?} at {gva} as {privilege:?}: {trap}")]
    Access {
        /// The address.
        gva: Gva,
        /// The access.
        access: Access,
        /// The privilege.
        privilege: Privilege,
        /// The error.
        trap: Trap<E>,
    },
    /// An instruction that must complete did not.
    #[error("{instruction} of {operand:#x}: {trap}")]
    Instruction {
        /// Its name.
        instruction: &'static str,
        /// Its operand: the new value, the address or the PCID.
        operand: u64,
        /// The error.
        trap: Trap<E>,
    },
    /// A read returned another value than that of the page tables: a stale translation, or a lost
    /// or misdirected write.
    #[error("read {found:#x} at {gva} as {privilege:?}: expected {expected:#x}")]
    WrongValue {
        /// The address.
        gva: Gva,
        /// The privilege.
        privilege: Privilege,
        /// The value read.
        found: u64,
        /// The value that is there.
        expected: u64,
    },
    /// An access completed that the tables do not allow: a stale translation.
    #[error("{access:?} at {gva} as {privilege:?} completed: expected a page fault with error code {expected:#x}")]
    NoFault {
        /// The address.
        gva: Gva,
        /// The access.
        access: Access,
        /// The privilege.
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
        /// The address.
        gva: Gva,
        /// The access.
        access: Access,
        /// The privilege.
        privilege: Privilege,
        /// The address of the fault.
        reported: Gva,
        /// The error code of the fault.
        error_code: u32,
        /// The right error code; `None` if it should not fault.
        expected: Option<u32>,
    },
    /// An access faults again and again.
    #[error("{access:?} at {gva} as {privilege:?} does not complete after {nr_faults} faults")]
    Stuck {
        /// The address.
        gva: Gva,
        /// The access.
        access: Access,
        /// The privilege.
        privilege: Privilege,
        /// Faults so far.
        nr_faults: u32,
    },
    /// A page-table page holds another PTE than was written there; accessed and dirty bits count
    /// where they are known.
    #[error("entry of level {level} for {gva} at guest-physical {gpa:#x} is {found:#x}: expected {expected:#x}")]
    WrongEntry {
        /// An address that the PTE translates.
        gva: Gva,
        /// The level of the PTE.
        level: u8,
        /// Its guest-physical address.
        gpa: u64,
        /// Its value.
        found: u64,
        /// Its right value.
        expected: u64,
    },
}
