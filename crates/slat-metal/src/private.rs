//! The private memory of a vCPU that runs the image's own code: its page tables if it has some, its
//! stack, and what it exchanges with the hypervisor. It is a block of 2 MiB that stays where it is.

#![expect(unsafe_code, reason = "allocates the block, and reaches its words by their addresses")]

use core::alloc::Layout;
use core::sync::atomic::AtomicU64;

use slat::{Gpa, NodeId, PAGE_SIZE, Pfn};

use crate::arch::guest;
use crate::{error, memory};

/// The size of the block.
pub const PRIVATE_BYTES: u64 = 2 << 20;

/// The block.
#[derive(Debug)]
pub struct Private {
    address: u64,
    /// Where the guest has it.
    pub gpa: Gpa,
}

impl Private {
    const LAYOUT: Layout = match Layout::from_size_align(PRIVATE_BYTES as usize, PRIVATE_BYTES as usize) {
        Ok(layout) => layout,
        Err(_) => panic!("the size is a power of two"),
    };

    /// The first byte behind the page tables. The stack grows downwards from the end of the block.
    pub const FREE: u64 = 2 * PAGE_SIZE;

    /// A block on `node`, of zeros but for the page tables, which the guest has at `gpa`.
    pub fn new(gpa: Gpa, node: NodeId) -> Private {
        // SAFETY: the layout has a size.
        let block = unsafe { memory::allocate(Private::LAYOUT, node) };
        if block.is_null() {
            error!("no memory for the vCPUs");
        }
        // SAFETY: allocated just now, with this size.
        unsafe { block.write_bytes(0, PRIVATE_BYTES as usize) };
        let private = Private { address: block.expose_provenance() as u64, gpa };
        guest::write_page_tables(&private);
        private
    }

    /// The word at `offset`.
    pub fn word(&self, offset: u64) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset < PRIVATE_BYTES, "{offset:#x} is no word of the block");
        // SAFETY: an aligned word of the block, which lives as long as this.
        unsafe { &*((self.address + offset) as *const AtomicU64) }
    }

    /// Where the hypervisor has it.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its first frame: memory is mapped to itself.
    pub fn first_frame(&self) -> Pfn {
        Pfn(self.address / PAGE_SIZE)
    }

    /// Where the guest has what is behind the page tables.
    pub fn free_gpa(&self) -> Gpa {
        Gpa(self.gpa.0 + Private::FREE)
    }

    /// The end of the stack, for the guest.
    pub fn stack_end(&self) -> Gpa {
        Gpa(self.gpa.0 + PRIVATE_BYTES)
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, with this layout; it goes back to the global allocator.
        unsafe { alloc::alloc::dealloc(self.address as *mut u8, Private::LAYOUT) };
    }
}
