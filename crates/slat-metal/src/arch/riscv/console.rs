//! The serial line of the hypervisor, and the end of the machine: by semihosting, which is an
//! emulator's console of its own (Semihosting for AArch32 and AArch64, 6 "Semihosting operations";
//! RISC-V Semihosting, 1.1). The UART is the guest's. Where no emulator takes the calls, the
//! firmware's console is the UART, and the firmware ends the machine.

#![expect(unsafe_code, reason = "calls the emulator by a breakpoint")]

use core::arch::asm;
use core::fmt::{self, Write};
use core::sync::atomic::{AtomicU64, Ordering};

use crate::console::Verdict;

/// Prints a text that ends with a zero byte.
const SYS_WRITE0: u64 = 0x04;
/// Ends the program, with a status.
const SYS_EXIT_EXTENDED: u64 = 0x20;
/// The reason of such an end: the program itself.
const APPLICATION_EXIT: u64 = 0x2_0026;

/// The emulator's status.
const PASSED: u64 = 0x21;
const FAILED: u64 = 0x23;

/// Bytes of a text in one call.
const PART_BYTES: usize = 255;

unsafe extern "C" {
    /// Not 0 as soon as a call was not taken: `boot.s`.
    static no_semihosting: AtomicU64;
}

/// Asks the emulator for `operation`. Returns whether it took the call.
///
/// # Safety
/// The memory at `argument` is what the operation reads.
unsafe fn call(operation: u64, argument: *const u64) -> bool {
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
        write(text);
        Ok(())
    }
}

fn write(text: &str) {
    for part in text.as_bytes().chunks(PART_BYTES) {
        let mut bytes = [0; PART_BYTES + 1];
        bytes[..part.len()].copy_from_slice(part);
        // SAFETY: a text that ends with a zero byte.
        if !unsafe { call(SYS_WRITE0, bytes.as_ptr().cast()) } {
            for &byte in part {
                // Where there is no console, nothing can be said.
                let _ = sbi_rt::console_write_byte(byte);
            }
        }
    }
}

/// Ends the machine, and the emulator with a status.
pub fn end(verdict: Verdict) -> ! {
    let status = if verdict == Verdict::Pass { PASSED } else { FAILED };
    let block = [APPLICATION_EXIT, status];
    // SAFETY: the reason and the status.
    unsafe { call(SYS_EXIT_EXTENDED, block.as_ptr()) };
    sbi_rt::system_reset(sbi_rt::Shutdown, sbi_rt::NoReason);
    super::halt()
}
