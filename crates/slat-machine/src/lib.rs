//! Software machine.

pub mod clock;
pub mod commit;
pub mod cpu;
pub mod guest;
pub mod host;
pub mod machine;
pub mod memory;
pub mod phys;
pub mod tlb;
pub mod topology;
pub mod walk;
