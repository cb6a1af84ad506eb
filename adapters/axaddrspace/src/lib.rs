//! The address space of AxVM's crate `axaddrspace`, over slat. Names and semantics are those of
//! version 0.6 of that crate, so that a hypervisor can change from one to the other. What differs is
//! below.
//!
//! # Use
//! 1. Implement [`PagingHost`]: frames, where they are in virtual memory, and a flush of the TLBs.
//! 2. Make an [`AddrSpace`] for the page tables of the hardware: `AddrSpace<Host, Ept>`, and so on.
//! 3. Map memory with [`AddrSpace::map_linear`] and [`AddrSpace::map_alloc`].
//! 4. Give [`AddrSpace::page_table_root`] to the hardware, and its faults to
//!    [`AddrSpace::handle_page_fault`].
//!
//! # What differs
//! - **All methods take `&self`**, and any number of threads may call them. Faults and translations
//!   take no lock, so a hypervisor needs none around the address space. Calls that map or unmap, and
//!   copies of devices, share a lock of the areas.
//! - **The page table is slat**, so the type has a format instead of a page table, and
//!   [`PagingHost`] is what is left of `NestedPageTableOps`. It has a flush, which names the VM's
//!   translations and returns when all CPUs have dropped them. Frames are freed after that.
//! - **A fault on a page that is mapped** (another vCPU was faster, or a CPU had an old translation)
//!   returns `true`, and the page keeps its frame. In the original it gets another frame, and the
//!   contents are lost. That holds for linear and populated areas, too, where the original returns
//!   `false`.
//! - **Unmapping a part of a huge page** leaves the rest mapped.
//! - **Memory that cannot be read is refused**, and so are devices that may be executed
//!   ([`AddrSpaceError::InvalidMapping`]). `USER` says nothing, and is ignored also in a fault's
//!   access.
//! - **[`AddrSpace::translate_and_get_limit`]** returns how much memory follows the address, and not
//!   the size of the area: that ends elsewhere, and its frames need not follow each other. It gives
//!   pages that the guest has not used yet their frames.
//! - **[`AddrSpace::translated_byte_buffer`]** returns pointers and not `&'static mut` references,
//!   which two calls would give to the same memory. It returns `None` where the original panics (a
//!   hole in the range), and crosses from one area to the next. Pages that the guest has not used yet
//!   get their frames.
//! - **[`AddrSpace::read_buffer`] and [`AddrSpace::write_buffer`]** are those of
//!   `GuestMemoryAccessor`. They look at the rights of the areas, and use
//!   [`PagingHost::phys_to_virt`] where the original takes a physical address for a pointer.
//!   `read_obj`, `write_obj` and their volatile likes are missing: not each `Copy` type may have any
//!   bytes.
//! - **Errors change nothing**, so `NeedsRepair` is never returned. [`AddrSpaceError::OutOfMemory`]
//!   is new.
//! - **An area that is mapped lazily where a linear area was unmapped in part** is populated at once.

#![no_std]

extern crate alloc;

mod copy;
mod error;
mod flags;
mod host;
mod layout;
mod lazy;
mod space;
mod vcpus;

pub use axvm_types::MappingFlags;
pub use error::{AddrSpaceError, AddrSpaceResult};
pub use host::{EngineHost, PagingHost};
pub use slat::PageSize;
pub use space::{AddrSpace, AddrSpaceVcpu};
