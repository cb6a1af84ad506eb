//! The console by semihosting, which QEMU has for programs of Linux, too (`userspace=on`): as
//! `slat-metal` uses it (Semihosting for AArch32 and AArch64, 6 "Semihosting operations"; RISC-V
//! Semihosting, 1.1).

#![expect(unsafe_code, reason = "asks the emulator")]

use super::semihosting_call;
use crate::console::Verdict;
use crate::wrong::Wrong;

/// Prints a text, up to its zero byte.
const SYS_WRITE0: u64 = 0x04;
/// Ends the emulator, for a reason and with a status.
const SYS_EXIT_EXTENDED: u64 = 0x20;
/// The reason: the program itself.
const APPLICATION_EXIT: u64 = 0x2_0026;

/// The right to call the emulator.
pub(crate) struct Port(());

impl Port {
    /// Nothing refuses it.
    #[expect(clippy::unnecessary_wraps, reason = "on x86 Linux gives the right")]
    pub(crate) fn open() -> Result<Port, Wrong> {
        Ok(Port(()))
    }

    /// Prints `text`, which has no zero byte.
    pub(crate) fn print(&mut self, text: &str) {
        let ended = [text.as_bytes(), &[0]].concat();
        // SAFETY: it reads up to the zero byte.
        unsafe { semihosting_call(SYS_WRITE0, &ended) };
    }

    /// Ends the machine.
    pub(crate) fn end(&mut self, verdict: Verdict) {
        let block = [APPLICATION_EXIT, verdict.status().into()].map(u64::to_le_bytes).concat();
        // SAFETY: it reads two words, which are there.
        unsafe { semihosting_call(SYS_EXIT_EXTENDED, &block) };
    }
}
