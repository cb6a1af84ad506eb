//! A small type-1 hypervisor on the engine: it runs on the bare machine, maps its guests' memory
//! page by page with slat, and attacks that memory while the guests run.
//!
//! It is there for three reasons: as the engine's test under walkers that were not written for it
//! ([`suite`]), as the proof that Linux runs on it ([`linux`]), and as the port that an embedder
//! reads first ([`host`]).
//!
//! `slat metal` builds the image (feature `image`), and runs it in an emulator.
//!
//! # The parts
//! - [`arch`]: the machine, and the CPUs that run guests: all that differs by architecture.
//! - [`virtual_cpu`]: the interface of a CPU that runs a guest. [`cpus`]: those of one VM.
//! - [`host`]: what the engine needs. [`ram`]: a guest's memory, whose frames can move. [`memslot`]:
//!   its flags, its log and its userfault bitmap.
//! - [`operations`]: what is done to that memory while guests run.
//! - [`suite`] and [`linux`]: the two guests. [`measure`]: a third one, by which events are
//!   counted.
//! - [`private`]: the memory of a vCPU that runs the image's own code.
//! - [`boot`], [`nodes`], [`memory`], [`console`], [`options`]: what the loader hands over, the NUMA
//!   nodes, the allocator, what the image says, the command line.

#![no_std]
#![cfg(any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "riscv64"))]

extern crate alloc;

pub mod arch;
mod barrier;
pub mod boot;
pub mod bootargs;
pub mod console;
pub mod cpus;
#[cfg(any(test, not(target_arch = "x86_64")))]
pub mod device_tree;
mod held;
pub mod host;
pub mod linux;
pub mod measure;
pub mod memory;
pub mod memslot;
#[cfg(target_arch = "x86_64")]
pub mod migration;
pub mod nodes;
pub mod operations;
pub mod options;
pub mod private;
pub mod ram;
#[cfg(not(target_arch = "x86_64"))]
pub mod semihosting;
pub mod start;
pub mod suite;
pub mod virtual_cpu;
