//! Heap memory whose allocation may fail: an error instead of an abort. (`Box::try_new` is not stable yet.)

#![expect(unsafe_code, reason = "allocates by hand")]

use alloc::alloc::{Layout, alloc, alloc_zeroed, dealloc};
use alloc::boxed::Box;
use core::mem::MaybeUninit;
use core::ops::Deref;
use core::ptr::{self, NonNull};
use core::slice;

use crate::error::Error;
use crate::sync::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// A box with `value` in it.
pub(crate) fn try_box<T>(value: T) -> Result<Box<T>, Error> {
    Ok(Vacant::new()?.fill(value))
}

/// A box that has its memory, and no value yet: so that a large value is made where it is to be.
pub(crate) struct Vacant<T>(Box<MaybeUninit<T>>);

impl<T> Vacant<T> {
    pub(crate) fn new() -> Result<Vacant<T>, Error> {
        const { assert!(size_of::<T>() != 0) }
        // SAFETY: the layout's size is not zero (checked above).
        let memory = unsafe { alloc(Layout::new::<T>()) }.cast::<MaybeUninit<T>>();
        if memory.is_null() {
            return Err(Error::OutOfMemory);
        }
        // SAFETY: the memory has the layout of a `T` and came from the global allocator, as a box's must; it may be
        // uninitialized.
        Ok(Vacant(unsafe { Box::from_raw(memory) }))
    }

    /// The box with `value` in it.
    #[inline(always)]
    pub(crate) fn fill(self, value: T) -> Box<T> {
        let Vacant(mut memory) = self;
        memory.write(value);
        // SAFETY: written just now.
        unsafe { memory.assume_init() }
    }
}

/// A type of which memory of zeroes is a value. Large values are made in place by it: what is made by value first takes their
/// size of the caller's stack.
///
/// # Safety
/// Memory of zeroes is a valid value of the type, other than under loom, whose atomics are more than their value. There
/// `zeroed` makes it.
pub(crate) unsafe trait Zeroed: Sized {
    /// The value that memory of zeroes is elsewhere.
    #[cfg(loom)]
    fn zeroed() -> Self;
}

// SAFETY: the atomics are transparent over core's, whose zero is all zeroes.
unsafe impl Zeroed for AtomicU32 {
    #[cfg(loom)]
    fn zeroed() -> AtomicU32 {
        AtomicU32::new(0)
    }
}

// SAFETY: as above.
unsafe impl Zeroed for AtomicU64 {
    #[cfg(loom)]
    fn zeroed() -> AtomicU64 {
        AtomicU64::new(0)
    }
}

/// Types that are [`Zeroed`] because zero is one of their values.
macro_rules! zeroed_numbers {
    ($($name:ident),*) => {
        $(
            // SAFETY: an integer.
            unsafe impl Zeroed for $name {
                #[cfg(loom)]
                fn zeroed() -> $name {
                    0
                }
            }
        )*
    };
}
zeroed_numbers!(u16, u64, usize);

// SAFETY: an array has its elements and nothing else.
unsafe impl<T: Zeroed, const N: usize> Zeroed for [T; N] {
    #[cfg(loom)]
    fn zeroed() -> [T; N] {
        core::array::from_fn(|_| T::zeroed())
    }
}

/// A box with zeroes in it, made in place.
pub(crate) fn try_zeroed<T: Zeroed>() -> Result<Box<T>, Error> {
    const { assert!(size_of::<T>() != 0) }
    #[cfg(loom)]
    return try_box(T::zeroed());
    #[cfg(not(loom))]
    {
        // SAFETY: the layout's size is not zero (checked above).
        let memory = unsafe { alloc_zeroed(Layout::new::<T>()) }.cast::<T>();
        if memory.is_null() {
            return Err(Error::OutOfMemory);
        }
        // SAFETY: the memory has the layout of a `T` and came from the global allocator, as a box's must; and zeroes are a `T`.
        Ok(unsafe { Box::from_raw(memory) })
    }
}

/// A place for a box that is made at most once, and then stays as long as the place does.
pub(crate) struct OnceBox<T>(AtomicPtr<T>);

// SAFETY: a null pointer is all zeroes: nothing is there yet.
unsafe impl<T> Zeroed for OnceBox<T> {
    #[cfg(loom)]
    fn zeroed() -> OnceBox<T> {
        OnceBox(AtomicPtr::new(ptr::null_mut()))
    }
}

impl<T: Zeroed + Send + Sync> OnceBox<T> {
    /// What is there.
    #[inline]
    pub(crate) fn get(&self) -> Option<&T> {
        // Acquire: sees the value as it was made.
        let value = self.0.load(Ordering::Acquire);
        // SAFETY: null, or from a box of `get_or_make`, which is freed with `self` alone.
        unsafe { value.as_ref() }
    }

    /// What is there; zeroes, if there was nothing.
    pub(crate) fn get_or_make(&self) -> Result<&T, Error> {
        if let Some(value) = self.get() {
            return Ok(value);
        }
        let made = Box::into_raw(try_zeroed::<T>()?);
        // AcqRel: shows the value to others, or another thread's to this one.
        match self.0.compare_exchange(ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: from a box, which is freed with `self` alone.
            Ok(_) => Ok(unsafe { &*made }),
            Err(found) => {
                // SAFETY: it came from a box just now, and no other thread has seen it.
                drop(unsafe { Box::from_raw(made) });
                // SAFETY: not null, because the exchange failed; as above.
                Ok(unsafe { &*found })
            }
        }
    }
}

impl<T> Drop for OnceBox<T> {
    fn drop(&mut self) {
        let value = self.0.load(Ordering::Relaxed);
        if !value.is_null() {
            // SAFETY: it came from a box, and with `&mut self` no thread uses it any more.
            drop(unsafe { Box::from_raw(value) });
        }
    }
}

/// Size of a cache line in bytes.
const LINE_BYTES: usize = 64;

/// Atomic words on cache lines of their own, zero at first. Where the allocator takes zeroed pages from the operating
/// system, words that were never touched take no memory.
pub(crate) struct ZeroedWords {
    first: NonNull<AtomicU64>,
    len: usize,
    allocation: NonNull<u8>,
    layout: Layout,
}

// SAFETY: owns its memory, as a boxed slice of atomics does.
unsafe impl Send for ZeroedWords {}
// SAFETY: as above.
unsafe impl Sync for ZeroedWords {}

impl ZeroedWords {
    pub(crate) fn new(len: usize) -> Result<ZeroedWords, Error> {
        // A line more, and the words moved to a line's beginning by hand: asked for more than the alignment that it has by
        // itself, std's allocator on Unix writes the zeroes, and so touches all. (Nor may an allocation have no size.)
        let words = Layout::array::<AtomicU64>(len).map_err(|_| Error::OutOfMemory)?;
        let size_bytes = words.size().checked_add(LINE_BYTES).ok_or(Error::OutOfMemory)?;
        let layout = Layout::from_size_align(size_bytes, words.align()).map_err(|_| Error::OutOfMemory)?;
        // SAFETY: the layout's size is not zero.
        let memory = unsafe { alloc_zeroed(layout) };
        let allocation = NonNull::new(memory).ok_or(Error::OutOfMemory)?;
        let before_bytes = memory.addr().wrapping_neg() % LINE_BYTES;
        // SAFETY: less than a line, by which the allocation is longer than the words.
        let first = unsafe { allocation.add(before_bytes) }.cast::<AtomicU64>();
        // loom's atomics are more than their value.
        #[cfg(loom)]
        for index in 0..len {
            // SAFETY: inside the allocation, which is nobody else's.
            unsafe { first.add(index).write(AtomicU64::new(0)) };
        }
        Ok(ZeroedWords { first, len, allocation, layout })
    }
}

impl Deref for ZeroedWords {
    type Target = [AtomicU64];

    #[inline]
    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: `len` words were allocated, and all bits zero is an atomic zero (loom's were written).
        unsafe { slice::from_raw_parts(self.first.as_ptr(), self.len) }
    }
}

impl Drop for ZeroedWords {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout.
        unsafe { dealloc(self.allocation.as_ptr(), self.layout) }
    }
}
