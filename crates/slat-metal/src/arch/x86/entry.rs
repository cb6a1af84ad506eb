//! Where the boot loader enters, and what compilers expect of a C library.

#![expect(unsafe_code, reason = "is entered by the boot loader, and copies memory for the compiler")]

use slat_metal::arch::boot;
use slat_metal::start;

/// The boot CPU comes here, on its stack, in 64-bit mode, with memory mapped to itself.
#[unsafe(no_mangle)]
extern "C" fn boot_cpu_main(info: u32) -> ! {
    // SAFETY: the value of `ebx` at the multiboot entry.
    let boot = unsafe { boot::read(info) }.unwrap_or_else(|error| slat_metal::error!("{error}"));
    // SAFETY: the boot CPU comes here once.
    unsafe { crate::boot_cpu(boot) }
}

/// Each other CPU comes here, in the same way.
#[unsafe(no_mangle)]
extern "C" fn other_cpu_main() -> ! {
    // SAFETY: each other CPU comes here once.
    unsafe { start::other_cpu() }
}

/// As C's.
///
/// # Safety
/// As C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, nr_bytes: usize) -> *mut u8 {
    // SAFETY: the caller's promise. REP MOVSB goes upwards, as the direction flag is clear.
    unsafe {
        core::arch::asm!("rep movsb", inout("rcx") nr_bytes => _, inout("rdi") to => _, inout("rsi") from => _,
            options(nostack, preserves_flags));
    }
    to
}

/// As C's.
///
/// # Safety
/// As C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, nr_bytes: usize) -> *mut u8 {
    if to.addr().wrapping_sub(from.addr()) >= nr_bytes {
        // SAFETY: upwards nothing is overwritten before it is read.
        return unsafe { memcpy(to, from, nr_bytes) };
    }
    // SAFETY: the caller's promise. Downwards nothing is overwritten before it is read; at least
    // one byte is moved.
    unsafe {
        core::arch::asm!("std", "rep movsb", "cld", inout("rcx") nr_bytes => _,
            inout("rdi") to.add(nr_bytes - 1) => _, inout("rsi") from.add(nr_bytes - 1) => _, options(nostack));
    }
    to
}

/// As C's.
///
/// # Safety
/// As C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, byte: i32, nr_bytes: usize) -> *mut u8 {
    // SAFETY: the caller's promise.
    unsafe {
        core::arch::asm!("rep stosb", inout("rcx") nr_bytes => _, inout("rdi") to => _, in("al") byte as u8,
            options(nostack, preserves_flags));
    }
    to
}

/// As C's.
///
/// # Safety
/// As C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(left: *const u8, right: *const u8, nr_bytes: usize) -> i32 {
    for index in 0..nr_bytes {
        // SAFETY: the caller's promise. Volatile, since the compiler would make this loop a call of
        // this function.
        let (left, right) = unsafe { (left.add(index).read_volatile(), right.add(index).read_volatile()) };
        if left != right {
            return i32::from(left) - i32::from(right);
        }
    }
    0
}

/// As C's.
///
/// # Safety
/// As C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(left: *const u8, right: *const u8, nr_bytes: usize) -> i32 {
    // SAFETY: the caller's promise.
    unsafe { memcmp(left, right, nr_bytes) }
}

/// As C's.
///
/// # Safety
/// As C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn strlen(text: *const u8) -> usize {
    let mut length = 0;
    // SAFETY: the caller's promise. Volatile, as above.
    while unsafe { text.add(length).read_volatile() } != 0 {
        length += 1;
    }
    length
}
