//! Where `boot.s` enters Rust.

#![expect(unsafe_code, reason = "is entered by the boot loader")]

use slat_metal::arch::boot;
use slat_metal::start;

/// The boot CPU comes here, on its stack, at EL2, with memory mapped to itself.
#[unsafe(no_mangle)]
extern "C" fn boot_cpu_main(device_tree: u64) -> ! {
    // SAFETY: the value of `x0` at the entry.
    let boot = unsafe { boot::read(device_tree) }.unwrap_or_else(|error| slat_metal::error!("{error}"));
    // SAFETY: the boot CPU comes here once.
    unsafe { crate::boot_cpu(boot) }
}

/// Each other CPU comes here, in the same way.
#[unsafe(no_mangle)]
extern "C" fn other_cpu_main() -> ! {
    // SAFETY: each other CPU comes here once.
    unsafe { start::other_cpu() }
}
