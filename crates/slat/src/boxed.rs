//! Heap memory whose allocation may fail: an error instead of an abort. (`Box::try_new` is not
//! stable.)

#![expect(unsafe_code, reason = "allocates by hand")]

use alloc::alloc::{Layout, alloc, alloc_zeroed, dealloc};
use alloc::boxed::Box;
use core::mem::MaybeUninit;
use core::ops::Deref;
use core::ptr::{self, NonNull};
use core::slice;

use crate::error::OutOfMemory;
use crate::sync::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// Returns a box with `value` in it.
pub(crate) fn try_box<T>(value: T) -> Result<Box<T>, OutOfMemory> {
    Ok(Vacant::new()?.fill(value))
}

/// A box with memory and no value yet: a large value is made in place.
pub(crate) struct Vacant<T>(Box<MaybeUninit<T>>);

impl<T> Vacant<T> {
    pub(crate) fn new() -> Result<Vacant<T>, OutOfMemory> {
        const { assert!(size_of::<T>() != 0) }
        // SAFETY: the layout's size is not zero (checked above).
        let memory = unsafe { alloc(Layout::new::<T>()) }.cast::<MaybeUninit<T>>();
        if memory.is_null() {
            return Err(OutOfMemory);
        }
        // SAFETY: the memory has the layout of a `T` and came from the global allocator, as a box's
        // must; it may be uninitialized.
        Ok(Vacant(unsafe { Box::from_raw(memory) }))
    }

    /// The box with what `init` writes.
    ///
    /// # Safety
    /// `init` initializes all of the value that has to be.
    pub(crate) unsafe fn fill_by(self, init: impl FnOnce(*mut T)) -> Box<T> {
        let Vacant(mut memory) = self;
        init(memory.as_mut_ptr());
        // SAFETY: as the caller promises.
        unsafe { memory.assume_init() }
    }

    /// The box with `value` in it.
    #[inline(always)]
    pub(crate) fn fill(self, value: T) -> Box<T> {
        let Vacant(mut memory) = self;
        memory.write(value);
        // SAFETY: just written.
        unsafe { memory.assume_init() }
    }
}

/// A type of which zeroed memory is a value. [`try_zeroed`] makes large values in place; a value
/// that is moved into a box first takes its size of the caller's stack.
///
/// # Safety
/// Zeroed memory is a valid value of the type, except under loom, whose atomics are more than their
/// value. There `zeroed` makes it.
pub(crate) unsafe trait Zeroed: Sized {
    /// The value that zeroed memory is elsewhere.
    #[cfg(loom)]
    fn zeroed() -> Self;
}

// SAFETY: the atomics are transparent over those of core, whose zero is all zeroes.
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

/// Implements [`Zeroed`] for types of which zero is a value.
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

/// Returns a box with zeroes in it, made in place.
pub(crate) fn try_zeroed<T: Zeroed>() -> Result<Box<T>, OutOfMemory> {
    const { assert!(size_of::<T>() != 0) }
    #[cfg(loom)]
    return try_box(T::zeroed());
    #[cfg(not(loom))]
    {
        // SAFETY: the layout's size is not zero (checked above).
        let memory = unsafe { alloc_zeroed(Layout::new::<T>()) }.cast::<T>();
        if memory.is_null() {
            return Err(OutOfMemory);
        }
        // SAFETY: the memory has the layout of a `T` and came from the global allocator, as a box's
        // must; and zeroes are a `T`.
        Ok(unsafe { Box::from_raw(memory) })
    }
}

/// A place for a box that is made at most once, and then lives as long as the place.
pub(crate) struct OnceBox<T>(AtomicPtr<T>);

// SAFETY: a null pointer is all zeroes: no box is there yet.
unsafe impl<T> Zeroed for OnceBox<T> {
    #[cfg(loom)]
    fn zeroed() -> OnceBox<T> {
        OnceBox::new()
    }
}

impl<T> OnceBox<T> {
    /// No box yet.
    pub(crate) fn new() -> OnceBox<T> {
        OnceBox(AtomicPtr::new(ptr::null_mut()))
    }
}

impl<T: Zeroed + Send + Sync> OnceBox<T> {
    /// The value, if it was made.
    #[inline]
    pub(crate) fn get(&self) -> Option<&T> {
        // Acquire: observes the value as it was made.
        let value = self.0.load(Ordering::Acquire);
        // SAFETY: null, or from a box of `get_or_make`, which is freed with `self` alone.
        unsafe { value.as_ref() }
    }

    /// The value; made of zeroes, if there was none.
    pub(crate) fn get_or_make(&self) -> Result<&T, OutOfMemory> {
        if let Some(value) = self.get() {
            return Ok(value);
        }
        let made = Box::into_raw(try_zeroed::<T>()?);
        // AcqRel: publishes the value, or observes that of another thread.
        match self.0.compare_exchange(ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: from a box, which is freed with `self` alone.
            Ok(_) => Ok(unsafe { &*made }),
            Err(found) => {
                // SAFETY: it came from a box just now, and no other thread has its address.
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

/// Atomic words, zero at first, on cache lines of their own. Words that were never touched take no
/// memory, where the allocator gets zeroed pages from the operating system.
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
    pub(crate) fn new(len: usize) -> Result<ZeroedWords, OutOfMemory> {
        // One line more, and the words are moved to the beginning of a line by hand. Asked for more
        // than its own alignment, std's allocator on Unix writes the zeroes, and so touches all.
        // (Nor may the size of an allocation be zero.)
        let words = Layout::array::<AtomicU64>(len).map_err(|_| OutOfMemory)?;
        let size_bytes = words.size().checked_add(LINE_BYTES).ok_or(OutOfMemory)?;
        let layout = Layout::from_size_align(size_bytes, words.align()).map_err(|_| OutOfMemory)?;
        // SAFETY: the layout's size is not zero.
        let memory = unsafe { alloc_zeroed(layout) };
        let allocation = NonNull::new(memory).ok_or(OutOfMemory)?;
        let before_bytes = memory.addr().wrapping_neg() % LINE_BYTES;
        // SAFETY: less than a line, by which the allocation is longer than the words.
        let first = unsafe { allocation.add(before_bytes) }.cast::<AtomicU64>();
        // loom's atomics are more than their value.
        #[cfg(loom)]
        for index in 0..len {
            // SAFETY: inside the allocation, which no other thread has.
            unsafe { first.add(index).write(AtomicU64::new(0)) };
        }
        Ok(ZeroedWords { first, len, allocation, layout })
    }
}

impl Deref for ZeroedWords {
    type Target = [AtomicU64];

    #[inline]
    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: `len` words were allocated, and all bits zero is an atomic zero (loom's were
        // written).
        unsafe { slice::from_raw_parts(self.first.as_ptr(), self.len) }
    }
}

impl Drop for ZeroedWords {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout.
        unsafe { dealloc(self.allocation.as_ptr(), self.layout) }
    }
}
