//! slat is the memory-virtualization engine of a hypervisor: it keeps the second-stage page tables that translate a
//! guest's physical addresses to the host's, and it answers the faults that the guest takes on them.
//!
//! # The problem
//! A virtual machine with many vCPUs faults on many pages at once: when it boots, when its memory is populated on demand,
//! when dirty logging is turned on before a migration. With one lock around the tables all those vCPUs stand in a queue,
//! and when the one that holds the lock is preempted, all of them wait for the scheduler. Deleting a slot, taking a range
//! of memory away, reading the dirty log: each wants the same lock.
//!
//! slat takes no lock on the VM, and no operation waits for a vCPU that was preempted. Each entry of the tables is
//! changed by one compare-and-exchange; whoever loses starts over. Ranges are taken away by stamps, tables are freed by
//! epochs, slots are published by swapping a pointer. For comparison the same code can run inside a reader/writer lock or
//! a mutex ([`Locking`]).
//!
//! # How to use it
//! Implement [`Host`] (memory for tables, frames for guest pages, a TLB flush), make a [`Vm`] of it for a table
//! [`Format`] ([`Npt`], [`Ept`], [`Stage2`], [`Sv39x4`] or [`Sv48x4`]), give it slots by [`Vm::set_user_memory_region`],
//! point the hardware at [`Vm::root`], and call [`Vcpu::handle_fault`] for each second-stage fault. Names are KVM's where
//! KVM has one.
//!
//! [`guide`] says in which order to write that, what each call may wait for, what is held when the host is called, and what a
//! flush owes; [`guide::porting`] is a list to check a port by. Three programs in `examples/` run, and check what they show:
//! `smallest_host` (no operating system, less than 150 lines), `toy_vmm` (a VMM with vCPU threads, an MMU notifier and a
//! migration, step by step) and `vm_memory` (devices written for the crate vm-memory).
//!
//! ```
//! # use std::alloc::{Layout, alloc, dealloc};
//! # use std::sync::Arc;
//! use slat::*;
//!
//! /// Tables come from the heap; each slot is backed by frames that follow each other.
//! struct Heap;
//! struct FirstFrame(Pfn);
//!
//! // The default locking is `None`, which never parks.
//! impl Park for Heap {
//!     fn park(&self, _word: &sync::AtomicU32, _expected: u32) {}
//!     fn unpark_one(&self, _word: *const sync::AtomicU32) -> bool { false }
//!     fn unpark_all(&self, _word: *const sync::AtomicU32) {}
//! }
//!
//! // SAFETY: the heap gives memory that is nobody else's, and no CPU runs on these tables.
//! unsafe impl Host for Heap {
//!     type Backing = FirstFrame;
//!
//!     fn allocate_table(&self, layout: Layout, _node: TableNode, _wait: AllocationWait) -> Option<Hpa> {
//!         // SAFETY: a table's layout is never empty.
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
//!     fn resolve(&self, first: &FirstFrame, _gfn: Gfn, page: u64, _access: Access) -> Result<Resolved, Gone> {
//!         Ok(Resolved { pfn: Pfn(first.0.0 + page), max_size: PageSize::Size2M, writable: true })
//!     }
//!     fn flush(&self, _ranges: &[GfnRange]) {}
//!     fn timestamp_ns(&self) -> u64 { 0 }
//! }
//!
//! # fn main() -> Result<(), Error> {
//! let vm = Arc::new(Vm::<Heap, Npt>::new(Heap, Config::default())?);
//! vm.set_user_memory_region(MemoryRegion {
//!     slot: 0,
//!     flags: MemoryRegionFlags::LOG_DIRTY_PAGES,
//!     guest_phys_addr: Gpa(0),
//!     memory_size: 1 << 20,
//!     backing: Some(FirstFrame(Pfn(0x100))),
//!     userfault_bitmap: None,
//! })?;
//! let mut vcpu = vm.create_vcpu()?;
//!
//! // The guest wrote to 0x3008, and the hardware found nothing there.
//! assert_eq!(vcpu.handle_fault(Gpa(0x3008), Access::Write)?, Outcome::Resume);
//! // It read where no slot is: a device, which user space emulates.
//! assert!(matches!(vcpu.handle_fault(Gpa(0xfee0_0000), Access::Read)?, Outcome::Exit(Exit::Mmio { .. })));
//!
//! let mut dirty = [0; 4];
//! assert_eq!(vm.get_dirty_log(0, &mut dirty)?, 1);
//! assert_eq!(dirty, [1 << 3, 0, 0, 0]);
//! # Ok(())
//! # }
//! ```
//!
//! # Hardware without a second stage
//! A VM made with [`Paging::Shadow`] keeps shadow tables, which lead from the guest's virtual addresses to the host's frames.
//! Everything above stays as it is; besides, the host says where guest memory can be read ([`Host::guest_memory_ptr`]), and each
//! vCPU's CPU exits for page faults ([`Vcpu::handle_page_fault`]), for writes of CR0, CR4 and EFER
//! ([`Vcpu::write_paging_register`]), for loads of CR3 ([`Vcpu::load_cr3`]), and for INVLPG and INVPCID ([`Vcpu::invlpg`],
//! [`Vcpu::invpcid`]). Before it runs again it loads what [`Vcpu::entry`] says. Hardware walks with CR0.WP, EFER.NXE and
//! CR4.PCIDE set, CR4.PGE clear, and with the guest's CR4.SMEP and SMAP while the guest's paging is on. [`Host::flush`] names
//! guest frames, which such a CPU knows nothing of: it forgets everything.
//!
//! # What it can do
//! | for | there is |
//! |---|---|
//! | slots | created, deleted, moved, re-flagged beside running vCPUs; read-only ones: [`Vm::set_user_memory_region`] |
//! | faults | 4 KiB, 2 MiB and 1 GiB; neighbours along with them ([`FaultAround`]); ahead of time ([`Vcpu::pre_fault_memory`], [`Vcpu::pre_fault_pages`]) |
//! | the host's memory management | [`Vm::invalidate_range`] (an MMU notifier), what the guest did reported ([`Host::leaf_zapped`]); [`Vm::age_range`] |
//! | the dirty log | as a bitmap, with KVM's manual protect and initially-all-set, or as rings ([`Vm::enable_dirty_ring`]); found out by write protection, dirty bits or modification logs ([`DirtyTracking`]) |
//! | huge pages | split when logging begins, or when written, or kept ([`HugePageLogging`]); put back when it ends ([`Vm::recover_range`]); tables on the right node ([`TablePlacement`]) |
//! | demand paging | exits for pages whose bit is set ([`UserfaultBitmap`]), pages taken back ([`Vm::rescan_userfault`]) |
//! | private memory | attributes of pages in guest_memfds ([`Vm::set_memory_attributes`]) |
//! | hardware without a second stage | [`Paging::Shadow`] |
//! | looking | [`Vm::stats`], [`Vm::read_tables`] |
//!
//! # Cargo features
//! None is on by default: the engine is `no_std` and needs `alloc`.
//! - `vm-memory` (needs std): `SlotBitmap` makes a slot's dirty log the bitmap of the vm-memory region that has its memory, and
//!   `CheckedMemory` refuses a device what a vCPU would exit for.
//!
//! Rust 1.85 or newer: that compiler builds the library in each run of the checks. `cfg(loom)` and `cfg(shuttle)` are for the engine's own tests.

//! Targets with pointers of 64 bits: numbers of pages, of words in a bitmap and of bytes in a page table are `usize`.

#![no_std]

#[cfg(not(target_pointer_width = "64"))]
compile_error!("slat needs pointers of 64 bits: a slot's pages are counted, and its bitmaps are indexed, by usize");

extern crate alloc;

mod addr;
mod boxed;
mod config;
mod dirty;
mod error;
mod format;
pub mod guide;
mod host;
mod second_stage;
mod shadow;
mod slot;
mod stats;
pub mod sync;
mod table;
mod vcpu;
mod vm;
#[cfg(feature = "vm-memory")]
mod vm_memory;

#[cfg(feature = "vm-memory")]
pub use self::vm_memory::{CheckedMemory, SlotBitmap};
pub use addr::{Access, Gfn, GfnRange, Gpa, Gva, Hpa, Level, NodeId, PAGE_SHIFT, PAGE_SIZE, PageSize, Pfn};
pub use config::{
    Config, DirtyTracking, FaultAround, HugePageLogging, HugePageSplitting, MAX_FAULT_AROUND_PAGES, MAX_PREVIOUS_ROOTS,
    MAX_SHADOW_PAGES, MIN_SHADOW_PAGES, ManualProtect, Paging, ShadowPaging, ShadowStrategy, TablePlacement,
    WriteProtection,
};
pub use dirty::ring::{
    DIRTY_RING_RESERVE, DirtyPage, DirtyRing, DirtyRingEntry, MAX_DIRTY_RING_ENTRIES, MIN_DIRTY_RING_ENTRIES,
};
pub use error::Error;
pub use format::{Entry, Ept, Format, Npt, Stage2, Sv39x4, Sv48x4};
pub use host::{AllocationWait, Gone, Host, Resolved, TableNode, ZappedLeaf};
pub use second_stage::age::AccessTracking;
pub use second_stage::invalidate::Invalidation;
pub use second_stage::query::{TableCursor, TableReader, Translation};
pub use shadow::{GuestAccess, GuestEntry, LocalFlush, PagingRegister, PagingRegisters, Privilege};
pub use slot::{
    MAX_SLOTS, MemoryAttributes, MemoryFaultFlags, MemoryRegion, MemoryRegionFlags, UserfaultBitmap, UserfaultWords,
};
pub use stats::{Histogram, Stats};
pub use sync::{Locking, Park};
pub use vcpu::{Exit, Outcome, Vcpu};
pub use vm::{Cap, Vm};
