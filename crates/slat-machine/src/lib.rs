//! A software machine on Linux that runs the engine: a *machine* and not a mock. Threads, memory
//! and concurrency are real; only the CPU's translation hardware is a program.
//!
//! A hypervisor's memory management shows its bugs and its costs with many CPUs, and such machines
//! are rare. Here a laptop runs 64 virtual CPUs over real memory. Each is a thread with a TLB and a
//! page-table walker written from the processor manuals. So every missing flush, lost write or
//! wrong frame shows in what the guest reads.
//!
//! From the bottom up:
//! - [`commit`]: the flush rule. When a flush returns, no CPU completes an access through an older
//!   translation of its ranges, and no preempted CPU delays a flush.
//! - [`modification_log`]: the logs in which EPT CPUs write the pages that they make dirty, and how
//!   they are read beside the CPUs.
//! - [`phys`], [`memory`], [`clock`], [`topology`]: physical addresses, guest memory of several
//!   kinds, time, the host.
//! - [`userfaultfd`]: faults of guest memory that this process answers itself.
//! - [`numa`]: the nodes, of this machine or of the host, and the reads of walks on each.
//! - [`tlb`], [`walk`], [`cpu`]: what hardware does for an access; [`shadow_cpu`]: the same without
//!   a second stage.
//! - [`host`]: the engine's [`slat::Host`].
//! - [`source`]: the sources of pages that a guest does not have yet.
//! - [`delivery`]: userfaults to a resolver elsewhere, by rings in shared memory.
//! - [`guest`], [`machine`]: guest programs, and the complete machine.
//! - [`kernel`]: a mini guest kernel, for shadow paging.
//! - [`demand_paging`]: a complete machine whose memory is still elsewhere, and arrives page by
//!   page.

pub mod clock;
pub mod commit;
pub mod cpu;
pub mod delivery;
pub mod demand_paging;
mod descriptors;
mod engine_error;
pub mod guest;
pub mod host;
pub mod kernel;
pub mod machine;
mod membarrier;
pub mod memory;
pub mod modification_log;
pub mod numa;
pub mod phys;
pub mod shadow_cpu;
pub mod source;
pub mod tlb;
pub mod topology;
pub mod userfaultfd;
pub mod walk;
