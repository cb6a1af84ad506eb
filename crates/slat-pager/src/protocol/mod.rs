//! How virtual machine monitors hand over their memory.

pub mod cloud_hypervisor;
