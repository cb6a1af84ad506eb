//! What becomes of a fault: the guest goes on, or user space acts first.

use thiserror::Error;

use crate::addr::{Access, Gpa, Gva};

/// What the caller does after a fault, or after a check of its own access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Outcome {
    /// Run the guest again. The fault is fixed or was spurious, or the page is being invalidated
    /// now. After [`Vm::check_access`](crate::Vm::check_access): make the access.
    Resume,
    /// User space must act before the guest can go on.
    Exit(Exit),
}

/// Why a vCPU exits to user space. It is no error of the engine. But it has a message, and can be
/// the cause of an error that a caller makes of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum Exit {
    /// Emulate a device: the address has no memory, or the guest wrote to a read-only memslot.
    #[error("no slot has memory for {gpa} that allows the access ({access:?})")]
    Mmio {
        /// The address.
        gpa: Gpa,
        /// What the guest did.
        access: Access,
    },
    /// The CPU would read a page table of the guest to translate `gva`, and there is no memory
    /// where that table is. The page that the guest accesses is therefore not known. Hardware reads
    /// what a device returns there, mostly ones, and acts on that. With shadow paging.
    #[error("the guest's page-table entry for {gva} is at {gpa}, where no slot has memory")]
    TableMmio {
        /// The address that the guest accesses.
        gva: Gva,
        /// The address of the PTE in the guest's page table.
        gpa: Gpa,
    },
    /// User space must fetch the page and clear its bit in the memslot's
    /// [`UserfaultBitmap`](crate::slots::UserfaultBitmap), which has the steps, before the guest
    /// can use it. Several vCPUs may exit for one page. KVM's `KVM_EXIT_MEMORY_FAULT`.
    #[error("user space must act on {size} bytes at {gpa} first ({flags:?})")]
    MemoryFault {
        /// The reason, for the page that the guest accessed.
        flags: MemoryFaultFlags,
        /// The first byte of the page, or of the block that one bit of the bitmap stands for.
        gpa: Gpa,
        /// The size of that page or block in bytes.
        size: u64,
    },
    /// Inject a page fault (#PF): the guest's own page tables forbid the access. With shadow
    /// paging.
    #[error("page fault of the guest at {gva}, error code {error_code:#x}")]
    PageFault {
        /// The address, for CR2.
        gva: Gva,
        /// The error code (Intel SDM vol. 3A, "Page-Fault Exceptions").
        error_code: u32,
    },
    /// Inject a general-protection fault, #GP(0): the guest loaded a register with an invalid
    /// value, or gave an instruction an invalid operand. Nothing has changed. With shadow paging.
    #[error("general-protection fault of the guest")]
    GeneralProtection,
    /// Emulate the instruction, and make its write with
    /// [`Vcpu::write_guest_table`](crate::Vcpu::write_guest_table). The guest writes into one of
    /// its page tables, or its CPU cannot be allowed to write there. The address is never that of a
    /// device: there was memory that may be written. With shadow paging.
    #[error("a write of the guest at {gpa} must be emulated")]
    EmulateWrite {
        /// The address.
        gpa: Gpa,
    },
    /// Harvest and reset the vCPU's dirty ring
    /// ([`Vm::reset_dirty_rings`](crate::Vm::reset_dirty_rings)): it is nearly full. Until there is
    /// room, all faults of the vCPU exit. Any thread may do both, also that of the vCPU.
    #[error("the dirty ring of the vCPU is nearly full")]
    DirtyRingFull,
}

bitflags::bitflags! {
    /// Why a memory fault exits to user space, with KVM's values.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct MemoryFaultFlags: u64 {
        /// The page is private
        /// ([`MemoryAttributes::PRIVATE`](crate::slots::MemoryAttributes::PRIVATE)).
        const PRIVATE = 1 << 3;
        /// The page's bit is set in its memslot's
        /// [`UserfaultBitmap`](crate::slots::UserfaultBitmap).
        const USERFAULT = 1 << 4;
    }
}
