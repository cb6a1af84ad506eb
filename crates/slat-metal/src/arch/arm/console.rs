//! The hypervisor's console, and the end of the machine: by semihosting, which an emulator has of
//! its own ([`semihosting`]). The serial line is the guest's. Where nothing takes the call, the
//! firmware ends the machine, without a word.

#![expect(unsafe_code, reason = "calls the emulator by an instruction")]

use core::arch::asm;
use core::fmt::{self, Write};
use core::sync::atomic::{AtomicBool, Ordering};

use crate::console::Verdict;
use crate::semihosting::{self, SYS_EXIT_EXTENDED, SYS_WRITE0};

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
        for part in semihosting::parts(text) {
            // SAFETY: a text that ends with a zero byte.
            unsafe { call(SYS_WRITE0, semihosting::ended(part).as_ptr()) };
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
    // SAFETY: the reason and the status.
    unsafe { call(SYS_EXIT_EXTENDED, semihosting::exit_block(verdict).as_ptr().cast()) };
    super::psci::system_off()
}
