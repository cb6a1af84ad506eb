//! The debug console and the exit device of the machine: the lines and the end of `slat-metal`.

#![expect(unsafe_code, reason = "writes to ports")]

use std::arch::asm;
use std::io;

use crate::wrong::Wrong;

const DEBUG_CONSOLE: u16 = 0xe9;
/// QEMU's device `isa-debug-exit`: the machine ends with the status `value << 1 | 1`.
const DEBUG_EXIT: u16 = 0xf4;

/// How the run ended, as the exit device has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// All was measured.
    Pass = 0x10,
    /// Something was wrong.
    Fail = 0x11,
}

/// The right to use the two ports.
pub(crate) struct Console(());

impl Console {
    /// Asks Linux for the ports.
    pub(crate) fn open() -> Result<Console, Wrong> {
        for port in [DEBUG_CONSOLE, DEBUG_EXIT] {
            // SAFETY: it changes what this process may do, and no memory.
            if unsafe { libc::ioperm(port.into(), 1, 1) } != 0 {
                return Err(Wrong::system("use the ports of the debug console", io::Error::last_os_error()));
            }
        }
        Ok(Console(()))
    }

    fn write(&mut self, port: u16, value: u8) {
        // SAFETY: `open` got the right to both ports. One prints, the other ends the machine.
        unsafe { asm!("out dx, al", in("dx") port, in("al") value, options(nomem, nostack, preserves_flags)) };
    }

    /// Prints a line.
    pub(crate) fn line(&mut self, text: &str) {
        text.bytes().chain([b'\n']).for_each(|byte| self.write(DEBUG_CONSOLE, byte));
    }

    /// A count of `nr_events` events, for one of them.
    pub(crate) fn figure(&mut self, name: &str, paging: &str, count: u64, nr_events: u64) {
        self.line(&format!("figure {name}_{paging} {:.2} instructions", count as f64 / nr_events as f64));
    }

    /// How many pages there are to an event.
    pub(crate) fn pages_each(&mut self, name: &str, paging: &str, nr_pages: f64) {
        self.line(&format!("figure {name}_{paging} {nr_pages:.2} count"));
    }

    /// Prints the verdict, and ends the machine. Returns where it has no such device.
    pub(crate) fn end(&mut self, verdict: Verdict, text: &str) {
        let word = if verdict == Verdict::Pass { "pass" } else { "fail" };
        self.line(&format!("verdict {word} {text}"));
        self.write(DEBUG_EXIT, verdict as u8);
    }
}
