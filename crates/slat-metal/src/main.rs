//! The image: what the library leaves to the program that contains it, which is where the boot
//! loader enters (`entry`), the allocator, and the panic handler.

#![no_std]
#![no_main]
#![expect(unsafe_code, reason = "gives the allocator its memory")]

use core::panic::PanicInfo;

use slat_metal::boot::BootInfo;
use slat_metal::memory::{ImageAllocator, MEMORY};
use slat_metal::start;

#[cfg_attr(target_arch = "x86_64", path = "arch/x86/entry.rs")]
#[cfg_attr(target_arch = "aarch64", path = "arch/arm/entry.rs")]
#[cfg_attr(target_arch = "riscv64", path = "arch/riscv/entry.rs")]
mod entry;

#[global_allocator]
static ALLOCATOR: ImageAllocator = ImageAllocator;

/// Goes on as the boot CPU of the machine that `boot` describes.
///
/// # Safety
/// To be called once. The memory map is true, and nothing else uses its free memory.
unsafe fn boot_cpu(boot: BootInfo) -> ! {
    // SAFETY: the first use of the allocator.
    unsafe { MEMORY.add(&boot) };
    // SAFETY: once, as the caller promises.
    unsafe { start::boot_cpu(boot, MEMORY.free_bytes()) }
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    // The verdict is one line, and so no text of `info` itself, which has two.
    match info.location() {
        Some(place) => slat_metal::error!("panic of the hypervisor at {place}: {}", info.message()),
        None => slat_metal::error!("panic of the hypervisor: {}", info.message()),
    }
}
