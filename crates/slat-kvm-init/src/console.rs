//! The console of the emulated machine: the lines and the end of `slat-metal`.

use crate::arch::Port;
use crate::wrong::Wrong;

/// How the run ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// All was measured.
    Pass,
    /// Something was wrong.
    Fail,
}

impl Verdict {
    /// The status that the emulator ends with.
    pub(crate) fn status(self) -> u8 {
        match self {
            Verdict::Pass => 0x21,
            Verdict::Fail => 0x23,
        }
    }
}

/// The right to use it.
pub(crate) struct Console(Port);

impl Console {
    /// Gets it.
    pub(crate) fn open() -> Result<Console, Wrong> {
        Port::open().map(Console)
    }

    /// Prints a line.
    pub(crate) fn line(&mut self, text: &str) {
        self.0.print(&format!("{text}\n"));
    }

    /// A count of `nr_events` events, for one of them.
    pub(crate) fn figure(&mut self, name: &str, paging: &str, count: u64, nr_events: u64) {
        self.line(&format!("figure {name}_{paging} {:.2} instructions", count as f64 / nr_events as f64));
    }

    /// How many pages there are to an event.
    pub(crate) fn pages_each(&mut self, name: &str, paging: &str, nr_pages: f64) {
        self.line(&format!("figure {name}_{paging} {nr_pages:.2} count"));
    }

    /// Prints the verdict, and ends the machine. Returns where the emulator does not take the call.
    pub(crate) fn end(&mut self, verdict: Verdict, text: &str) {
        let word = if verdict == Verdict::Pass { "pass" } else { "fail" };
        self.line(&format!("verdict {word} {text}"));
        self.0.end(verdict);
    }
}
