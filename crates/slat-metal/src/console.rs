//! What the image says: lines on a console that the guest does not have. And the end of the
//! machine.
//!
//! `slat metal` reads these lines:
//! - `say TEXT`: for a person;
//! - `progress DONE TOTAL TEXT`;
//! - `figure NAME VALUE UNIT`, in base units;
//! - `ready TEXT`: another machine may start, which this one needs;
//! - `tables WORDS`: where page tables are that are to be walked (`suite/tables.rs`);
//! - `verdict pass TEXT`, `verdict fail CHECK TEXT` (a check found something wrong: its
//!   name, `Check::name`) or `verdict error TEXT` (the run could not be made): the last one.

use core::fmt::{self, Write};

use spin::Mutex;

use crate::arch::console::{self, Console};
use crate::boot;

/// One line at a time. The first CPU that gives the verdict keeps it.
static CONSOLE: Mutex<Console> = Mutex::new(Console);

/// Prints a line of `kind`.
pub fn line(kind: &str, text: fmt::Arguments<'_>) {
    // The console never fails.
    let _ = writeln!(CONSOLE.lock(), "{kind} {text}");
}

/// What a person reads.
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => { $crate::console::line("say", format_args!($($text)*)) };
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
    Fail(Check),
    /// The run could not be made, or the hypervisor itself failed.
    Error,
}

/// What a check has found wrong. Of what is left out on purpose
/// ([`Control`](crate::host::Control)) one of these must come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Check {
    /// The guest accessed memory that it should not have had any more, or not what it had.
    Access,
    /// The dirty log has not what the guest wrote.
    Log,
    /// A CPU entered the guest without a flush.
    EntryFlush,
    /// A CPU went on after a fault without a flush.
    LocalFlush,
    /// Leaves were replaced without a flush.
    BreakFlush,
    /// A walk of the page tables finds something else than the engine.
    Tables,
    /// A page came otherwise than it went.
    Hash,
    /// The guest had a page before it came.
    Withheld,
    /// The other machine says nothing.
    Silence,
    /// Anything else.
    Other,
}

impl Check {
    /// Its word in the verdict.
    fn name(self) -> &'static str {
        match self {
            Check::Access => "access",
            Check::Log => "log",
            Check::EntryFlush => "entry-flush",
            Check::LocalFlush => "local-flush",
            Check::BreakFlush => "break-flush",
            Check::Tables => "tables",
            Check::Hash => "hash",
            Check::Withheld => "withheld",
            Check::Silence => "silence",
            Check::Other => "other",
        }
    }
}

/// Prints the verdict and ends the machine.
pub fn end(verdict: Verdict, text: fmt::Arguments<'_>) -> ! {
    let (word, check) = match verdict {
        Verdict::Pass => ("pass ", ""),
        Verdict::Fail(check) => ("fail ", check.name()),
        Verdict::Error => ("error ", ""),
    };
    let space = if check.is_empty() { "" } else { " " };
    // Kept locked: nothing follows the verdict. A CPU that fails while it prints would wait for
    // ever, so after a while the verdict comes in the middle of a line.
    let mut locked = (0..1_000_000).find_map(|_| CONSOLE.try_lock());
    let mut unlocked = Console;
    let to = locked.as_deref_mut().unwrap_or(&mut unlocked);
    let _ = writeln!(to, "verdict {word}{check}{space}{text}");
    console::end(verdict)
}

/// Ends the machine: the run cannot be made.
#[macro_export]
macro_rules! error {
    ($($text:tt)*) => {
        $crate::console::end($crate::console::Verdict::Error, format_args!($($text)*))
    };
}

/// Ends the machine: a check found something wrong. `fail!(Log; "...")` says which
/// `console::Check` did.
#[macro_export]
macro_rules! fail {
    ($check:ident; $($text:tt)*) => {
        $crate::console::end(
            $crate::console::Verdict::Fail($crate::console::Check::$check),
            format_args!($($text)*),
        )
    };
    ($($text:tt)*) => {
        $crate::fail!(Other; $($text)*)
    };
}
