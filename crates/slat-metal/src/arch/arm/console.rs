//! The hypervisor's console, and the end of the machine: by semihosting, which an emulator has of its
//! own (Arm Semihosting, "Semihosting operations"). The serial line is the guest's. Where nothing
//! takes the call, the firmware ends the machine, without a word.

#![expect(unsafe_code, reason = "calls the emulator by an instruction")]

use core::arch::asm;
use core::fmt::{self, Write};
use core::sync::atomic::{AtomicBool, Ordering};

use crate::console::Verdict;

/// Prints a text that ends with a zero byte.
const SYS_WRITE0: u64 = 0x04;
/// Ends the program, with a status.
const SYS_EXIT_EXTENDED: u64 = 0x20;
/// The reason of such an end: the program itself.
const APPLICATION_EXIT: u64 = 0x2_0026;

/// The statuses of the end, which are those of QEMU's `isa-debug-exit` on a PC.
const PASSED: u64 = 0x21;
pub(super) const FAILED: u64 = 0x23;

/// Bytes of a text in one call.
const PART_BYTES: usize = 127;

/// Set by an exception of the hypervisor: it may be the call itself, so another one would not help.
static IS_BROKEN: AtomicBool = AtomicBool::new(false);

/// Asks the emulator for `operation`.
///
/// # Safety
/// The memory at `argument` is what the operation reads.
unsafe fn call(operation: u64, argument: *const u8) {
    // SAFETY: the emulator reads the argument alone, as the caller promises.
    unsafe { asm!("hlt #0xf000", inout("x0") operation => _, in("x1") argument, options(nostack)) };
}

/// The console.
#[derive(Debug)]
pub struct Console;

impl Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for part in text.as_bytes().chunks(PART_BYTES) {
            let mut bytes = [0; PART_BYTES + 1];
            bytes[..part.len()].copy_from_slice(part);
            // SAFETY: a text that ends with a zero byte.
            unsafe { call(SYS_WRITE0, bytes.as_ptr()) };
        }
        Ok(())
    }
}

/// An exception of the hypervisor begins to be reported. Returns whether there was one before: then
/// the report itself fails.
pub(super) fn note_exception() -> bool {
    IS_BROKEN.swap(true, Ordering::Relaxed)
}

/// Ends the machine.
pub fn end(verdict: Verdict) -> ! {
    let block = [APPLICATION_EXIT, if verdict == Verdict::Pass { PASSED } else { FAILED }];
    // SAFETY: the reason and the status.
    unsafe { call(SYS_EXIT_EXTENDED, block.as_ptr().cast()) };
    super::psci::system_off()
}
