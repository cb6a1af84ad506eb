//! The debug console, port 0xe9, which the guest does not have, and the end of the machine.

#![expect(unsafe_code, reason = "writes to ports")]

use core::fmt::{self, Write};

use x86_64::instructions::port::Port;

use crate::console::Verdict;

const DEBUG_CONSOLE: u16 = 0xe9;
/// QEMU's device `isa-debug-exit`: the machine ends with the status `value << 1 | 1`.
const DEBUG_EXIT: u16 = 0xf4;
/// Bochs's port, where this word ends the machine.
const SHUTDOWN: u16 = 0x8900;
const SHUTDOWN_WORD: &[u8] = b"Shutdown";
const PASSED: u8 = 0x10;
const FAILED: u8 = 0x11;

/// The debug console.
#[derive(Debug)]
pub struct Console;

impl Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut port = Port::<u8>::new(DEBUG_CONSOLE);
        for byte in text.bytes() {
            // SAFETY: the port prints, or nothing is there.
            unsafe { port.write(byte) };
        }
        Ok(())
    }
}

/// Ends the machine.
pub fn end(verdict: Verdict) -> ! {
    let code = if verdict == Verdict::Pass { PASSED } else { FAILED };
    // SAFETY: the machine ends, or no such device is there.
    unsafe { Port::<u8>::new(DEBUG_EXIT).write(code) };
    for &letter in SHUTDOWN_WORD {
        // SAFETY: as above.
        unsafe { Port::<u8>::new(SHUTDOWN).write(letter) };
    }
    super::halt()
}
