//! A software machine on Linux to run the engine on: a *machine* and not a mock. Threads, memory
//! and concurrency are real; only the CPU's translation hardware is a program.
//!
//! Why: a hypervisor's memory management shows its bugs and its costs under many CPUs, and those
//! are hard to come by. Here a laptop runs 64 virtual CPUs, each a thread with a TLB and a
//! page-table walker written from the processor manuals, over real memory; and every missing flush,
//! lost write or wrong frame shows in what the guest reads.
//!
//! From the bottom up:
//! - [`commit`]: the flush rule. When a flush returns, no CPU completes an access through an older
//!   translation of what it named, and no preempted CPU delays a flush. CPUs drop what was named
//!   and keep the rest.
//! - [`modification_log`]: what EPT CPUs write down when they make pages dirty, and how it is read
//!   beside them.
//! - [`phys`], [`memory`], [`clock`], [`topology`]: physical addresses, guest memory of several
//!   kinds, time, the host.
//! - [`userfaultfd`]: faults of guest memory that this process answers itself.
//! - [`numa`]: the nodes, of this machine or of the host, and what walks read on which.
//! - [`tlb`], [`walk`], [`cpu`]: what hardware does with an access; [`shadow_cpu`]: what it does
//!   without a second stage.
//! - [`host`]: the engine's [`slat::Host`].
//! - [`source`]: where pages come from that a guest does not have yet.
//! - [`delivery`]: userfaults to a resolver elsewhere, by rings in shared memory.
//! - [`guest`], [`machine`]: guest programs, and the whole put together.
//! - [`kernel`]: a guest that behaves as an operating system's kernel does, to try shadow paging
//!   with.
//! - [`demand_paging`]: the whole put together where the memory is still elsewhere, and comes page
//!   by page.

pub mod clock;
pub mod commit;
pub mod cpu;
pub mod delivery;
pub mod demand_paging;
mod descriptors;
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
