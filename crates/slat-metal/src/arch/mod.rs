//! The machine: what differs from one architecture to another. Each has the same interface, by
//! which all other modules use the one that the image is built for:
//!
//! - `set_up`, `cpu_number`, `halt`, `start_other_cpus`, [`USABLE`]: its CPUs and its memory;
//! - [`BREAKS_BEFORE_MAKE`]: what the record of flushes is for;
//! - [`clock`] and [`console`];
//! - [`Kick`] and `kick`: how a CPU is made to leave its guest; `flush` and `flush_local`: how
//!   stale translations go; `has_control`: what can be left out of that;
//! - [`Trap`]: the exits that it alone has; [`Virtualization`]: the ways in which its CPUs run
//!   guests, each with its [`VirtualCpu`](crate::virtual_cpu::VirtualCpu);
//! - [`guest`]: what the suite's guest needs of the instruction set; [`measured`]: the guest by
//!   which instructions are counted;
//! - [`linux`]: the kernel's image, and the CPUs of a Linux guest.

#[cfg(target_arch = "aarch64")]
pub mod arm;
#[cfg(target_arch = "riscv64")]
pub mod riscv;
#[cfg(target_arch = "x86_64")]
pub mod x86;

#[cfg(target_arch = "aarch64")]
pub use arm::*;
#[cfg(target_arch = "riscv64")]
pub use riscv::*;
#[cfg(target_arch = "x86_64")]
pub use x86::*;

// What of the other architectures only computes: its tests run on each machine.
#[cfg(all(test, not(target_arch = "aarch64")))]
#[allow(dead_code, reason = "the rest of the architecture is the user")]
mod arm {
    pub mod code;
    pub mod gic_registers;
    mod linux {
        mod guarded;
        mod image;
        mod psci;
    }
    mod stage2 {
        mod syndrome;
    }
}
#[cfg(all(test, not(target_arch = "riscv64")))]
#[allow(dead_code, reason = "the rest of the architecture is the user")]
mod riscv {
    mod code;
    mod fault;
    mod features;
    mod machine;
    mod linux {
        mod answers;
        mod image;
    }
}
