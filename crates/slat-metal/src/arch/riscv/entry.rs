//! Where `boot.s` enters Rust.

#![expect(unsafe_code, reason = "is entered by the firmware")]

use slat_metal::arch::boot;
use slat_metal::start;

/// The boot CPU comes here, on its stack, with its hart's number and the device tree.
#[unsafe(no_mangle)]
extern "C" fn boot_cpu_main(hart: u64, tree: u64) -> ! {
    // SAFETY: what the firmware has handed over.
    let boot = unsafe { boot::read(hart, tree) }.unwrap_or_else(|error| slat_metal::error!("{error}"));
    // SAFETY: the boot CPU comes here once.
    unsafe { crate::boot_cpu(boot) }
}

/// Each other CPU comes here, in the same way.
#[unsafe(no_mangle)]
extern "C" fn other_cpu_main() -> ! {
    // SAFETY: each other CPU comes here once.
    unsafe { start::other_cpu() }
}
