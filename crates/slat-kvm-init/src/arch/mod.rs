//! What depends on the instruction set: the counter, the console, how KVM is loaded, and how the
//! guest starts and ends. The guest's code is that of `slat-metal` for the same architecture.

#[cfg(target_arch = "aarch64")]
mod arm;
#[cfg(target_arch = "riscv64")]
mod riscv;
#[cfg(not(target_arch = "x86_64"))]
mod semihosting;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "aarch64")]
pub(crate) use arm::*;
#[cfg(target_arch = "riscv64")]
pub(crate) use riscv::*;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::*;
