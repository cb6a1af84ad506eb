//! AMD's virtualization, SVM: a CPU that runs a guest (AMD APM vol. 2, chapter 15).

pub mod enable;
pub mod run;
pub mod vmcb;

pub use enable::{Missing, enable};
pub use run::{Allowed, SvmCpu};
