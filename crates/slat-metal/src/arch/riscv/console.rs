//! The hypervisor's console, and the end of the machine: by semihosting, which an emulator has of
//! its own ([`semihosting`]). The UART is the guest's. Where nothing takes the call, the firmware's
//! console is the UART, and the firmware ends the machine.

#![expect(unsafe_code, reason = "calls the emulator by a breakpoint")]

use core::arch::asm;
use core::fmt::{self, Write};
use core::sync::atomic::{AtomicU64, Ordering};

use crate::console::Verdict;
use crate::semihosting::{self, SYS_EXIT_EXTENDED, SYS_WRITE0};

unsafe extern "C" {
    /// Not 0 as soon as a call was not taken: `boot.s`.
    static no_semihosting: AtomicU64;
}

/// Asks the emulator for `operation`. Returns whether it took the call.
///
/// # Safety
/// The memory at `argument` is what the operation reads.
unsafe fn call(operation: u64, argument: *const u8) -> bool {
    // SAFETY: the three instructions are the call; they are not compressed, and aligned so that
    // they are in one page. Without an emulator that takes it, the trap goes behind the breakpoint.
    unsafe {
        asm!(
            ".option push",
            ".option norvc",
            ".balign 16",
            "slli x0, x0, 0x1f",
            "ebreak",
            "srai x0, x0, 7",
            ".option pop",
            inout("a0") operation => _,
            in("a1") argument,
            options(nostack),
        );
        no_semihosting.load(Ordering::Relaxed) == 0
    }
}

/// The hypervisor's console.
#[derive(Debug)]
pub struct Console;

impl Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for part in semihosting::parts(text) {
            // SAFETY: a text that ends with a zero byte.
            if !unsafe { call(SYS_WRITE0, semihosting::ended(part).as_ptr()) } {
                for &byte in part {
                    // Where there is no console, nothing can be said.
                    let _ = sbi_rt::console_write_byte(byte);
                }
            }
        }
        Ok(())
    }
}

/// Ends the machine, and the emulator with a status.
pub fn end(verdict: Verdict) -> ! {
    // SAFETY: the reason and the status.
    unsafe { call(SYS_EXIT_EXTENDED, semihosting::exit_block(verdict).as_ptr().cast()) };
    sbi_rt::system_reset(sbi_rt::Shutdown, sbi_rt::NoReason);
    super::halt()
}
