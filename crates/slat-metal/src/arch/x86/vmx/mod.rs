//! Intel's virtualization, VMX: a CPU that runs a guest (Intel SDM vol. 3C, "Introduction to
//! Virtual Machine Extensions").

pub mod controls;
pub mod enable;
mod log;
pub mod run;
pub mod vmcs;

pub use enable::{Missing, enable};
pub use run::VmxCpu;
