//! What the kernel in miniature reports: a CPU that does not do what the guest's tables say.

use slat::Access;
use slat::shadow::{Gva, Privilege};
use thiserror::Error;

use super::cpu::Trap;

/// A kernel that makes no sense.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// No virtual CPU, or more than the image has space for.
    #[error("{nr_vcpus} virtual CPUs are not between 1 and {max}")]
    Vcpus {
        /// What was asked for.
        nr_vcpus: u16,
        /// The most.
        max: u16,
    },
    /// A virtual CPU without processes.
    #[error("a virtual CPU needs at least one process")]
    NoProcesses,
    /// More memory than the direct map can show.
    #[error("{memory_bytes} bytes of memory are more than {max_bytes}")]
    Memory {
        /// What would be needed.
        memory_bytes: u64,
        /// The most.
        max_bytes: u64,
    },
}

/// What went wrong in the kernel in miniature. `E` is how the machine fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum KernelError<E> {
    /// There is no such virtual CPU.
    #[error("there is no virtual CPU {vcpu}: the kernel was made for {nr_vcpus}")]
    NoVcpu {
        /// What was asked for.
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
        /// What was to be done.
        access: Access,
        /// By whom.
        privilege: Privilege,
        /// Why it was not.
        trap: Trap<E>,
    },
    /// An instruction that must complete did not.
    #[error("{instruction} of {operand:#x}: {trap}")]
    Instruction {
        /// Its name.
        instruction: &'static str,
        /// What it was to do: the new value, the address or the PCID.
        operand: u64,
        /// Why it was not done.
        trap: Trap<E>,
    },
    /// Something else was read than the tables lead to: a stale translation, or a write that was lost or went elsewhere.
    #[error("read {found:#x} at {gva} as {privilege:?}: expected {expected:#x}")]
    WrongValue {
        /// The address.
        gva: Gva,
        /// By whom.
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
        /// What was done.
        access: Access,
        /// By whom.
        privilege: Privilege,
        /// Error code of the fault that the tables call for.
        expected: u32,
    },
    /// A page fault that the tables do not call for.
    #[error(
        "{access:?} at {gva} as {privilege:?}: page fault at {reported} with error code {error_code:#x}, expected {}",
        expected.map_or("none".into(), |code| format!("error code {code:#x}"))
    )]
    WrongFault {
        /// The address.
        gva: Gva,
        /// What was to be done.
        access: Access,
        /// By whom.
        privilege: Privilege,
        /// The address that the fault has.
        reported: Gva,
        /// The error code that it has.
        error_code: u32,
        /// The error code that it should have; none if it should not be.
        expected: Option<u32>,
    },
    /// An access faults again and again.
    #[error("{access:?} at {gva} as {privilege:?} does not complete after {nr_faults} faults")]
    Stuck {
        /// The address.
        gva: Gva,
        /// What is to be done.
        access: Access,
        /// By whom.
        privilege: Privilege,
        /// Faults so far.
        nr_faults: u32,
    },
    /// A table holds another entry than was written there; accessed and dirty bits count where they are known.
    #[error("entry of level {level} for {gva} at guest-physical {gpa:#x} is {found:#x}: expected {expected:#x}")]
    WrongEntry {
        /// An address that the entry translates.
        gva: Gva,
        /// The table's level.
        level: u8,
        /// Where the entry is.
        gpa: u64,
        /// What it is.
        found: u64,
        /// What it should be.
        expected: u64,
    },
}
