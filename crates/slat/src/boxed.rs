//! Boxes that report a failed allocation instead of aborting: `Box::try_new` is not stable yet.

#![expect(unsafe_code, reason = "allocates by hand")]

use alloc::alloc::{Layout, alloc};
use alloc::boxed::Box;

use crate::error::Error;

/// A box with `value` in it.
pub(crate) fn try_box<T>(value: T) -> Result<Box<T>, Error> {
    const { assert!(size_of::<T>() != 0) }
    // SAFETY: the layout's size is not zero (checked above).
    let memory = unsafe { alloc(Layout::new::<T>()) }.cast::<T>();
    if memory.is_null() {
        return Err(Error::OutOfMemory);
    }
    // SAFETY: the memory has the layout of a `T` and came from the global allocator, as a box's must.
    unsafe {
        memory.write(value);
        Ok(Box::from_raw(memory))
    }
}
