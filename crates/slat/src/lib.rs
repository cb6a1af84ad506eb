//! slat: second-level address translation, the memory-virtualization engine of a hypervisor.
//!
//! (crate docs below)
#![no_std]

extern crate alloc;

mod addr;
mod boxed;
mod dirty;
mod error;
mod format;
mod host;
mod second_stage;
mod slot;
mod stats;
pub mod sync;
mod table;
mod vcpu;
mod vm;

pub use addr::{Access, Gfn, GfnRange, Gpa, Gva, Hpa, Level, PAGE_SHIFT, PAGE_SIZE, PageSize, Pfn};
pub use error::Error;
pub use format::{Entry, Ept, Format, Npt};
pub use host::{Gone, Host, Resolved};
pub use slot::{MAX_SLOTS, MemoryRegion, MemoryRegionFlags};
pub use stats::{Histogram, Stats};
pub use sync::{Locking, Park};
pub use vcpu::{Exit, Outcome, Vcpu};
pub use vm::{Config, Vm};
