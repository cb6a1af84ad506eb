//! Intel's virtualization, VMX: a CPU that runs a guest (Intel SDM vol. 3C, "Introduction to
//! Virtual Machine Extensions").

mod bitmap;
pub mod controls;
pub mod enable;
mod log;
pub mod run;
pub mod vmcs;

pub(super) use bitmap::MsrBitmap;
pub(super) use controls::Held;
pub use enable::{Missing, enable};
pub use run::VmxCpu;
