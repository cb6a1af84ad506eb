//! slat is the memory-virtualization engine of a hypervisor. It keeps the second-stage page tables,
//! which translate a guest's physical addresses to the host's, and handles the faults that the
//! guest takes on them.
//!
//! # The problem
//! A virtual machine with many vCPUs faults on many pages at once: when it boots, when its memory
//! is populated on demand, when dirty logging begins before a migration. With one lock around the
//! page tables all those vCPUs queue, and if the holder is preempted, all of them wait for the
//! scheduler. Deleting a memslot, unmapping a range, reading the dirty log: each needs the same
//! lock.
//!
//! slat takes no lock on the VM, and no operation waits for a preempted vCPU. Each PTE is changed
//! by one compare-and-exchange, and the thread that loses starts over. Invalidation sequence
//! numbers keep faults out of unmapped ranges, epochs defer the freeing of page-table pages, and
//! swapping one pointer publishes the memslots. For comparison the same code can run inside a
//! reader/writer lock or a mutex (feature `baselines`).
//!
//! # How to use it
//! 1. Implement [`Host`]: memory for page-table pages, frames for guest pages, a TLB flush.
//! 2. Create a [`Vm`] with it for a [`Format`] of page tables ([`Npt`], [`Ept`], [`Stage2`],
//!    [`Sv39x4`], [`Sv48x4`], [`Sv57x4`] or [`Vtd`]), in an `Arc`.
//! 3. Add memslots by [`Vm::set_user_memory_region`].
//! 4. Create a [`Vcpu`] for each virtual CPU by [`Vm::create_vcpu`].
//! 5. Point the hardware at [`Vm::root`].
//! 6. Call [`Vcpu::handle_fault`] for each second-stage fault, and act on its [`Outcome`].
//!
//! Names are KVM's where KVM has one. At the root is what every user needs; the rest is in modules.
//!
//! # Where to read on
//! - [`guide`] first: the order in which to write a host, CPUs that are programs, a migration, what
//!   a flush guarantees, what each call may wait for. [`guide::porting`] is a checklist for a port.
//! - [`host`]: what the engine calls. [`format`](mod@format): page tables of AMD, Intel, Arm and
//!   RISC-V.
//! - [`slots`], [`dirty`], [`tables`], [`shadow`], [`stats`]: what you use beside memslots and
//!   faults. [`error`]: why an operation was not done.
//! - The programs in `examples/` run, and check what they show: `smallest_host` (no operating
//!   system, less than 150 lines), `toy_vmm` (a VMM with vCPU threads, an MMU notifier and a
//!   migration, step by step), `vm_memory` (devices written for the crate vm-memory), and
//!   `host_ept`, `host_arm` and `host_riscv` (a host without an operating system, with the
//!   instructions of its flush).
//! - The examples on the pages of this crate run as tests, with a host of their own. [`guide`] says
//!   what its functions `vm`, `vm_with_memory`, `region` and `change` do.
//!
//! # A program
//! ```
//! use std::alloc::{Layout, alloc, dealloc};
//! use std::sync::Arc;
//!
//! use slat::*;
//! use slat::format::*;
//! use slat::host::*;
//!
//! /// Page-table pages come from the heap; consecutive frames back each memslot.
//! struct Heap;
//! struct FirstFrame(Pfn);
//!
//! // SAFETY: the heap's memory has no other user, and no CPU walks these page tables.
//! unsafe impl Host for Heap {
//!     type Backing = FirstFrame;
//!
//!     fn allocate_table(&self, layout: Layout, _node: TableNode, _wait: AllocationWait) -> Option<Hpa> {
//!         // SAFETY: the layout of a page-table page is never empty.
//!         let table = unsafe { alloc(layout) };
//!         (!table.is_null()).then_some(Hpa(table as u64))
//!     }
//!     unsafe fn free_table(&self, table: Hpa, layout: Layout) {
//!         // SAFETY: the engine frees what it allocated.
//!         unsafe { dealloc(self.table_ptr(table), layout) }
//!     }
//!     fn table_ptr(&self, table: Hpa) -> *mut u8 {
//!         table.0 as *mut u8
//!     }
//!     fn resolve(&self, first: &FirstFrame, _gfn: Gfn, page: u64, _access: Access) -> Result<Resolved, Unresolved> {
//!         Ok(Resolved::memory(Pfn(first.0.0 + page), PageSize::Size2M))
//!     }
//!     fn flush(&self, _ranges: &[GfnRange]) {}
//!     fn timestamp_ns(&self) -> u64 { 0 }
//! }
//!
//! fn main() -> Result<(), Error> {
//!     let vm = Arc::new(Vm::<Heap, Npt>::new(Heap, Config::default())?);
//!     vm.set_user_memory_region(MemoryRegion {
//!         slot: 0,
//!         flags: MemoryRegionFlags::LOG_DIRTY_PAGES,
//!         guest_phys_addr: Gpa(0),
//!         memory_size: 1 << 20,
//!         backing: Some(FirstFrame(Pfn(0x100))),
//!         userfault_bitmap: None,
//!     })?;
//!     let mut vcpu = vm.create_vcpu()?;
//!
//!     // The guest wrote to 0x3008, and the hardware found no translation.
//!     assert_eq!(vcpu.handle_fault(Gpa(0x3008), Access::Write)?, Outcome::Resume);
//!     // It read where no memslot is: user space emulates a device.
//!     assert!(matches!(vcpu.handle_fault(Gpa(0xfee0_0000), Access::Read)?, Outcome::Exit(Exit::Mmio { .. })));
//!
//!     let mut dirty = [0; 4];
//!     assert_eq!(vm.get_dirty_log(0, &mut dirty)?, 1);
//!     assert_eq!(dirty, [1 << 3, 0, 0, 0]);
//!     Ok(())
//! }
//! ```
//!
//! # What it can do
//! - **Memslots** are created, deleted, moved and changed while vCPUs run; some may be read-only:
//!   [`Vm::set_user_memory_region`].
//! - **Faults** map 4 KiB, 2 MiB and 1 GiB, also neighbours ([`FaultAround`]), or ahead of time
//!   ([`Vcpu::pre_fault_memory`], [`Vcpu::pre_fault_pages`]).
//! - **Pinned memory** is mapped in advance ([`Vm::map_range`]): RAM, the registers of devices, what
//!   a device accesses through an IOMMU. No other operation changes it.
//! - **The host's memory management** invalidates ranges ([`Vm::invalidate_range`], an MMU
//!   notifier), is notified of what the guest did ([`Host::leaf_zapped`]), and ages pages
//!   ([`Vm::age_range`]).
//! - **The dirty log** is a bitmap, with KVM's manual protect and initially-all-set, or rings
//!   ([`Vm::enable_dirty_ring`]). Its pages are passed to a callback, too ([`Vm::for_each_dirty`]).
//!   Writes are found by write protection, dirty bits or modification logs ([`DirtyTracking`]).
//! - **Huge pages** are split when logging begins, or when written, or kept ([`HugePageLogging`]).
//!   They are recovered when it ends ([`Vm::recover_range`]). Page-table pages are on the right
//!   node ([`TablePlacement`]).
//! - **Demand paging**: faults exit for pages whose bit is set ([`UserfaultBitmap`]), and pages are
//!   taken back ([`Vm::rescan_userfault`]).
//! - **Private memory**: attributes of pages in guest_memfds ([`Vm::set_memory_attributes`]).
//! - **Hardware without a second stage**: shadow page tables, which translate the guest's virtual
//!   addresses to the host's frames ([`shadow`]). A program that does not call
//!   [`Vm::with_shadow_paging`] links nothing of that.
//! - **Observation**: [`Vm::stats`], [`Vm::read_tables`].
//!
//! # Cargo features
//! None is on by default: the engine is `no_std` and needs `alloc`.
//! - `baselines`: what slat is measured against. `Config::locking` puts a lock around everything
//!   that changes page tables; `Host::parking` says how threads wait for it.
//!   `ShadowStrategy::Baseline` finds and synchronizes the root at each load of CR3, and
//!   `RootsByPcid` searches for roots by PCID. Not for use.
//! - `vm-memory` (needs std): `SlotBitmap` makes a memslot's dirty log the bitmap of the vm-memory
//!   region that has its memory. `CheckedMemory` refuses a device the accesses for which a vCPU
//!   would exit.
//!
//! # Requirements
//! Rust 1.85 or newer: that compiler builds the library in each run of the checks. `cfg(loom)` and
//! `cfg(shuttle)` are for the engine's own tests.
//!
//! The target has pointers of 64 bits: numbers of pages, of words in a bitmap and of bytes in a
//! page table are `usize`.

#![warn(clippy::too_many_lines)]
#![cfg_attr(not(test), warn(clippy::incompatible_msrv))]
#![no_std]

#[cfg(not(target_pointer_width = "64"))]
compile_error!("slat needs pointers of 64 bits: a slot's pages are counted, and its bitmaps are indexed, by usize");

extern crate alloc;

mod addr;
mod bits;
mod boxed;
mod config;
pub mod dirty;
pub mod error;
mod exit;
pub mod format;
pub mod guide;
mod harvest;
pub mod host;
mod operation;
mod page_words;
mod pool;
mod registers;
mod second_stage;
pub mod shadow;
mod slot;
pub mod stats;
mod sync;
mod table;
mod vcpu;
mod vm;
#[cfg(feature = "vm-memory")]
mod vm_memory;

#[cfg(feature = "vm-memory")]
pub use self::vm_memory::{CheckedMemory, SlotBitmap};
pub use addr::{Access, Gfn, GfnRange, Gpa, Hpa, Level, NodeId, PAGE_SIZE, PageSize, Pfn};
pub use config::Config;
pub use error::Error;
pub use exit::{Exit, Outcome};
pub use host::Host;
pub use slot::{MemoryRegion, MemoryRegionFlags};
pub use vcpu::Vcpu;
pub use vm::Vm;

/// What user space decides for single pages of a memslot: at which of them faults exit, and which
/// are private to the guest.
///
/// # Use
/// - *Demand paging*: give a memslot the flag [`MemoryRegionFlags::USERFAULT`] and a
///   [`UserfaultBitmap`]. A fault on a page whose bit is set is [`Exit::MemoryFault`]. User space
///   fills the page and clears the bit. [`Vm::rescan_userfault`] takes pages back.
/// - *Private memory*: a memslot with a guest_memfd ([`MemoryRegionFlags::GUEST_MEMFD`]).
///   [`Vm::set_memory_attributes`] makes its pages private or shared, and
///   [`Host::resolve_private`] resolves the private ones.
/// - Before user space accesses such memory itself, it calls [`Vm::check_access`].
pub mod slots {
    pub use crate::exit::MemoryFaultFlags;
    pub use crate::slot::{MemoryAttributes, UserfaultBitmap, UserfaultWords};
}

/// The page tables of the second stage, for the host's memory management and for debuggers.
///
/// # Use
/// - Before the host moves, frees or protects frames: [`Vm::invalidate_range`], which returns an
///   [`Invalidation`].
/// - Which pages the guest has used: [`Vm::age_range`], as [`AccessTracking`] says.
/// - What is mapped: [`Vm::translate`], or [`Vm::read_tables`], which returns a [`TableReader`].
/// - To map memory in advance, and for devices: a memslot that is
///   [`PINNED`](MemoryRegionFlags::PINNED), and [`Vm::map_range`] with a [`Mapping`].
/// - What a fault maps besides its page: [`FaultAround`]. Where page-table pages are:
///   [`TablePlacement`].
pub mod tables {
    pub use crate::config::{AccessTracking, FaultAround, TablePlacement};
    pub use crate::second_stage::invalidate::Invalidation;
    pub use crate::second_stage::map::{Mapping, Protection};
    pub use crate::second_stage::query::{TableCursor, TableReader, Translation};
}

/// What slat is measured against: the lock of a VM (`Config::locking`, [`Host::parking`]), and the
/// atomics and fences that tests share with the engine. Not for use.
#[cfg(feature = "baselines")]
pub mod baselines {
    pub use crate::sync::{
        AtomicU32, AtomicU64, Lock, LockGuard, Locking, Park, Side, fence_after_rmw, full_fence, spin_loop,
    };
}

/// The machine whose virtual time the accesses of the engine cost.
#[cfg(feature = "costed")]
pub mod costed {
    pub use crate::sync::costed::{Attached, LockWait, Machine, Step, attach};
}

/// The steps of the protocols, for the proofs that replay them.
#[cfg(shuttle)]
pub mod events {
    pub use crate::sync::events::*;
    pub use crate::table::pte::kind;
}

// For links.
#[cfg(doc)]
use {dirty::*, error::*, format::*, host::*, shadow::*, slots::*, stats::*, tables::*};

/// The program in the README is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
