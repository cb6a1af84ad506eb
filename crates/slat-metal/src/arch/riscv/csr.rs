//! Control and status registers: reading, writing, and the bits that the hypervisor needs (RISC-V
//! Privileged Architecture, chapters "Supervisor-Level ISA" and "H Extension for Hypervisor
//! Support").

/// Reads a register.
macro_rules! read {
    ($name:literal) => {{
        let value: u64;
        // SAFETY: the hypervisor runs in HS-mode, which has the register; reading it changes
        // nothing.
        unsafe { core::arch::asm!(concat!("csrr {}, ", $name), out(reg) value, options(nomem, nostack)) };
        value
    }};
}

/// Writes a register. Unsafe to expand where the register decides what the CPU accesses or
/// executes.
macro_rules! write {
    ($name:literal, $value:expr) => {
        core::arch::asm!(concat!("csrw ", $name, ", {}"), in(reg) u64::from($value), options(nostack))
    };
}

/// Sets bits of a register. As [`write`].
macro_rules! set {
    ($name:literal, $bits:expr) => {
        core::arch::asm!(concat!("csrs ", $name, ", {}"), in(reg) u64::from($bits), options(nostack))
    };
}

/// Clears bits of a register. As [`write`].
macro_rules! clear {
    ($name:literal, $bits:expr) => {
        core::arch::asm!(concat!("csrc ", $name, ", {}"), in(reg) u64::from($bits), options(nostack))
    };
}

pub(crate) use {clear, read, set, write};

/// The cause of an interrupt has this bit.
pub const INTERRUPT: u64 = 1 << 63;

/// Interrupts of the supervisor level, in `sie` and `sip`: software.
pub const SUPERVISOR_SOFTWARE: u64 = 1 << 1;
/// Interrupts of the guest, in `hideleg`, `hie`, `hip` and `hvip`: software, timer, external.
pub const GUEST_SOFTWARE: u64 = 1 << 2;
/// Its timer.
pub const GUEST_TIMER: u64 = 1 << 6;
/// Its external interrupts.
pub const GUEST_EXTERNAL: u64 = 1 << 10;

/// `sstatus`: the privilege before the trap, S if it is set.
pub const STATUS_SPP: u64 = 1 << 8;
/// `sstatus`: the floating-point and vector units are on, and their state is dirty.
pub const STATUS_FS: u64 = 3 << 13;
/// The vector unit.
pub const STATUS_VS: u64 = 3 << 9;
/// `sstatus`: XLEN of user mode is 64.
pub const STATUS_UXL_64: u64 = 2 << 32;

/// `hstatus`: the trap came from the guest, and SRET goes there.
pub const HSTATUS_SPV: u64 = 1 << 7;
/// `hstatus`: the privilege of the guest before the trap, S if it is set.
pub const HSTATUS_SPVP: u64 = 1 << 8;
/// `hstatus`: XLEN of the guest's supervisor mode is 64.
pub const HSTATUS_VSXL_64: u64 = 2 << 32;

/// `henvcfg`: the guest has `vstimecmp` (Sstc).
pub const ENVCFG_STCE: u64 = 1 << 63;

/// `hgatp`: where the mode, and the VMID, begin.
pub const HGATP_MODE_SHIFT: u32 = 60;
/// The VMID.
pub const HGATP_VMID_SHIFT: u32 = 44;
