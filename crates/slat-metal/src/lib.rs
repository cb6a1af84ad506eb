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
//! - [`x86`]: the machine: start, descriptor tables, interrupts, clock, memory, console.
//! - [`virtual_cpu`]: a CPU that runs a guest. [`svm`]: by AMD's virtualization; [`vmx`]: by
//!   Intel's.
//! - [`host`]: what the engine needs. [`ram`]: a guest's memory, whose frames can move.
//! - [`operations`]: what is done to that memory while guests run.
//! - [`suite`] and [`linux`]: the two guests. [`measure`]: a third one, by which events are
//!   counted.
//! - [`private`]: the memory of a vCPU that runs the image's own code.
//! - [`options`]: the command line.

#![no_std]
#![cfg(target_arch = "x86_64")]

extern crate alloc;

pub mod host;
pub mod linux;
pub mod measure;
pub mod operations;
pub mod options;
pub mod private;
pub mod ram;
pub mod start;
pub mod suite;
pub mod svm;
pub mod virtual_cpu;
pub mod vmx;
pub mod x86;
