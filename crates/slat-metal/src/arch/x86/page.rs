//! Pages that the CPU gets by their addresses.

#![expect(unsafe_code, reason = "allocates zeroed memory")]

use alloc::alloc::{alloc_zeroed, handle_alloc_error};
use alloc::boxed::Box;
use core::alloc::Layout;

/// A type that is valid as zeros, and whose address the CPU gets.
///
/// # Safety
/// All bytes zero are a value of the type, which has a size.
pub(crate) unsafe trait Zeroed: Sized {
    /// A value of zeros.
    fn zeroed() -> Box<Self> {
        let layout = Layout::new::<Self>();
        // SAFETY: the layout has a size; zeros are a value, as the trait promises.
        unsafe {
            let block = alloc_zeroed(layout).cast::<Self>();
            if block.is_null() {
                handle_alloc_error(layout);
            }
            Box::from_raw(block)
        }
    }
}

// SAFETY: integers.
unsafe impl Zeroed for Page {}

/// A page that the CPU uses as it likes.
#[derive(Debug)]
#[repr(C, align(4096))]
pub struct Page([u8; 4096]);

impl Page {
    /// A page of zeros.
    pub fn new() -> Box<Page> {
        Page::zeroed()
    }

    /// Sets its first four bytes.
    pub fn set_first_word(&mut self, word: u32) {
        self.0[..4].copy_from_slice(&word.to_le_bytes());
    }

    /// Its physical address: memory is mapped to itself.
    pub fn address(&self) -> u64 {
        core::ptr::from_ref(self).expose_provenance() as u64
    }
}
