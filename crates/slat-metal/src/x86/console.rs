//! What the image says: lines on the debug console, port 0xe9, which the guest does not have. And
//! the end of the machine.
//!
//! `slat metal` reads these lines:
//! - `say TEXT`: for a person;
//! - `progress DONE TOTAL TEXT`;
//! - `figure NAME VALUE UNIT`, in base units;
//! - `verdict pass TEXT`, `verdict fail TEXT` (a check found something wrong) or `verdict error
//!   TEXT` (the run could not be made): the last one.

#![expect(unsafe_code, reason = "writes to ports")]

use core::fmt::{self, Write};

use spin::Mutex;
use x86_64::instructions::port::Port;

use super::boot;

const DEBUG_CONSOLE: u16 = 0xe9;
/// QEMU's device `isa-debug-exit`: the machine ends with the status `value << 1 | 1`.
const DEBUG_EXIT: u16 = 0xf4;
/// Bochs's port, where this word ends the machine.
const SHUTDOWN: u16 = 0x8900;
const SHUTDOWN_WORD: &[u8] = b"Shutdown";
const PASSED: u8 = 0x10;
const FAILED: u8 = 0x11;

struct DebugConsole;

impl Write for DebugConsole {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut port = Port::<u8>::new(DEBUG_CONSOLE);
        for byte in text.bytes() {
            // SAFETY: the port prints, or nothing is there.
            unsafe { port.write(byte) };
        }
        Ok(())
    }
}

/// One line at a time. The first CPU that gives the verdict keeps it.
static CONSOLE: Mutex<DebugConsole> = Mutex::new(DebugConsole);

/// Prints a line of `kind`.
pub fn line(kind: &str, text: fmt::Arguments<'_>) {
    // The console never fails.
    let _ = writeln!(CONSOLE.lock(), "{kind} {text}");
}

/// What a person reads.
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => { $crate::x86::console::line("say", format_args!($($text)*)) };
}

/// How far the run is.
pub fn progress(done: u64, total: u64, text: &str) {
    line("progress", format_args!("{done} {total} {text}"));
}

/// A figure for the results.
pub fn figure(name: &str, value: u64, unit: &str) {
    line("figure", format_args!("{name} {value} {unit}"));
}

/// A time for the results.
pub fn figure_ms(name: &str, ms: u64) {
    line("figure", format_args!("{name} {}.{:03} s", ms / 1000, ms % 1000));
}

/// Prints the figures of the image itself.
pub fn figures() {
    figure("stack", boot::max_stack_bytes() as u64, "B");
}

/// How the run ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// All that was checked was right.
    Pass,
    /// A check found something wrong.
    Fail,
    /// The run could not be made, or the hypervisor itself failed.
    Error,
}

/// Prints the verdict and ends the machine.
pub fn end(verdict: Verdict, text: fmt::Arguments<'_>) -> ! {
    let (word, code) = match verdict {
        Verdict::Pass => ("pass", PASSED),
        Verdict::Fail => ("fail", FAILED),
        Verdict::Error => ("error", FAILED),
    };
    // Kept locked: nothing follows the verdict. A CPU that fails while it prints would wait for
    // ever, so after a while the verdict comes in the middle of a line.
    let mut console = (0..1_000_000).find_map(|_| CONSOLE.try_lock());
    let mut unlocked = DebugConsole;
    let console = console.as_deref_mut().unwrap_or(&mut unlocked);
    let _ = writeln!(console, "verdict {word} {text}");
    // SAFETY: the machine ends, or no such device is there.
    unsafe { Port::<u8>::new(DEBUG_EXIT).write(code) };
    for &letter in SHUTDOWN_WORD {
        // SAFETY: as above.
        unsafe { Port::<u8>::new(SHUTDOWN).write(letter) };
    }
    loop {
        x86_64::instructions::hlt();
    }
}

/// Ends the machine: the run cannot be made.
#[macro_export]
macro_rules! error {
    ($($text:tt)*) => {
        $crate::x86::console::end($crate::x86::console::Verdict::Error, format_args!($($text)*))
    };
}

/// Ends the machine: a check found something wrong.
#[macro_export]
macro_rules! fail {
    ($($text:tt)*) => {
        $crate::x86::console::end($crate::x86::console::Verdict::Fail, format_args!($($text)*))
    };
}
