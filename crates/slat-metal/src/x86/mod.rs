//! The machine itself: how its CPUs start, their descriptor tables and interrupts, its clock, its
//! memory and its console. What is here knows nothing of guests or of the engine.

pub mod apic;
pub mod boot;
pub mod clock;
pub mod console;
pub mod cpu;
pub mod memory;
