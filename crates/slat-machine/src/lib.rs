//! A software machine on Linux that runs the engine: a *machine* and not a mock. Threads, memory
//! and concurrency are real; only the CPU's translation hardware is a program.
//!
//! A hypervisor's memory management shows its bugs and its costs with many CPUs, and such machines
//! are rare. Here a laptop runs 64 virtual CPUs over real memory. Each is a thread with a TLB and a
//! page-table walker written from the processor manuals. So every missing flush, lost write or
//! wrong frame shows in what the guest reads.
//!
//! From the bottom up; no module uses one below it in this list, but for
//! [`shadow_machine`](hardware::walk::HardwareFormat::shadow_machine):
//! - [`linux`]: what the machine asks of Linux beside memory: time, processors.
//! - [`memory`]: physical addresses, guest memory of several kinds, NUMA nodes.
//! - [`hardware`]: CPUs with TLBs and walkers, and the rule by which they are flushed.
//! - [`paging`]: memory that is still elsewhere: userfaultfd, sources of pages, and resolvers.
//! - [`vm`]: the engine's [`slat::Host`], guest programs, and complete machines.
//! - [`guest_os`]: a mini guest kernel, for shadow paging.

#![cfg_attr(not(test), warn(clippy::incompatible_msrv))]

#[macro_use]
mod counters;
pub mod guest_os;
pub mod hardware;
pub mod linux;
pub mod memory;
pub mod paging;
pub mod vm;
