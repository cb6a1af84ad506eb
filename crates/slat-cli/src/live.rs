//! `--live`: shows what the machine of an experiment does while it runs, on the standard error.
//!
//! # Implementation
//! - The experiment names the VM that runs now ([`Live::watch`], through the session) and keeps the
//!   returned value meanwhile. One VM is watched at a time, the last that was named.
//! - With `--live` a thread samples it ([`sample`]): twice a second on a terminal, every two
//!   seconds elsewhere. One more sample is taken when the VM is about to be dropped, so that a run
//!   shorter than the period is shown too.
//! - The view shows the differences of two samples of the same VM over the time between them
//!   (`rates`). The first sample is taken when the VM is named, so no other VM is in the
//!   differences.
//!
//! On a terminal the view is a few rows that are drawn over. Without a terminal, or on one that
//! cannot move its cursor (`TERM` is `dumb` or unset), it is lines, with one line for each run that
//! begins. It has no colors.
//!
//! # Cost
//! A sample takes no lock. It reads the counters of each vCPU, some 10 KiB each, which takes a few
//! lines from the vCPU's cache; and the words of the dirty bitmaps that have marks. `sample` says
//! what the engine does then. On a machine with 2 CPUs a sample took 8 µs with 4 vCPUs and 1 GiB
//! dirty, and 0.5 to 1 ms with 512 vCPUs.

mod rates;
mod sample;
#[cfg(test)]
mod tests;

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use slat::Vm;
use slat_machine::hardware::walk::HardwareFormat;
use slat_machine::vm::host::MachineHost;

use crate::failure::Failure;
use rates::{MAX_ROWS, Row};
use sample::Sample;

/// Time between two samples on a terminal.
const ROWS_PERIOD: Duration = Duration::from_millis(500);

/// Time between two samples without a terminal.
const LINES_PERIOD: Duration = Duration::from_secs(2);

/// No final sample is taken if the last one is younger.
const SHORTEST: Duration = Duration::from_millis(100);

/// What the screen shows while an experiment runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum View {
    /// Nothing, with `--quiet`.
    Nothing,
    /// The progress.
    Progress,
    /// The progress, and what the machine does.
    Live,
}

/// Locks, and ignores poison: a panic ends the command, so no later call finds state half changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Samples the machine that runs, and shows the figures. Clones share the state.
#[derive(Clone)]
pub(crate) struct Live(Arc<Inner>);

struct Inner {
    begin: Instant,
    screen: Screen,
    watched: Mutex<State>,
    /// Nothing is shown any more. Separate from the state, so that `end` does not wait for the
    /// state's lock.
    has_ended: AtomicBool,
}

enum Screen {
    /// Rows that are drawn over.
    Rows {
        /// The row above. Where the terminal shows Ctrl-C as "^C", the cursor moves on by a line,
        /// and the cleared rows begin a line too low.
        _blank: ProgressBar,
        rows: Vec<ProgressBar>,
    },
    /// Lines, one below another.
    Lines(Mutex<Box<dyn Write + Send>>),
}

struct State {
    current: Option<Current>,
    /// How many VMs were named so far.
    nr_named: u64,
    /// When a sample was shown last.
    shown: Instant,
}

/// The VM that is watched.
struct Current {
    number: u64,
    /// `None`: the VM was dropped.
    source: Box<dyn Fn() -> Option<Sample> + Send>,
    /// The time of the last sample, and the sample.
    last: (Instant, Sample),
    /// A sample of it was shown.
    is_seen: bool,
}

impl Screen {
    fn rows(bars: &MultiProgress) -> Screen {
        let blank = row(bars);
        blank.tick();
        Screen::Rows { _blank: blank, rows: (0..MAX_ROWS).map(|_| row(bars)).collect() }
    }
}

impl Live {
    /// Shows the view on the terminal that has `bars`, if there is one, above them; else in lines
    /// on the standard error.
    pub(crate) fn start(bars: &MultiProgress) -> Result<Live, Failure> {
        let (screen, period) = if bars.is_hidden() {
            (Screen::Lines(Mutex::new(Box::new(io::stderr()))), LINES_PERIOD)
        } else {
            (Screen::rows(bars), ROWS_PERIOD)
        };
        let live = Live::new(screen, Instant::now());
        let inner = Arc::downgrade(&live.0);
        let looks = move || {
            loop {
                thread::sleep(period);
                let Some(inner) = inner.upgrade() else { return };
                inner.look(Instant::now());
            }
        };
        let thread = thread::Builder::new().name("live".to_owned()).spawn(looks);
        thread.map_err(|error| Failure::CannotServe(format!("no thread for --live: {error}")))?;
        Ok(live)
    }

    fn new(screen: Screen, begin: Instant) -> Live {
        let state = State { current: None, nr_named: 0, shown: begin };
        Live(Arc::new(Inner { begin, screen, watched: Mutex::new(state), has_ended: AtomicBool::new(false) }))
    }

    pub(crate) fn begin(&self, number: u64, nr_runs: u64, run: &str) {
        self.0.line(Instant::now(), &format!("run {number} of {nr_runs}: {run}"));
    }

    /// Watches `vm` until the returned value is dropped, or another VM is named.
    pub(crate) fn watch<F: HardwareFormat>(&self, vm: &Arc<Vm<MachineHost, F>>) -> Watched {
        let vm = Arc::downgrade(vm);
        self.watch_source(Instant::now(), move || Some(Sample::of(&*vm.upgrade()?)))
    }

    fn watch_source(&self, now: Instant, source: impl Fn() -> Option<Sample> + Send + 'static) -> Watched {
        let mut state = lock(&self.0.watched);
        state.nr_named += 1;
        let number = state.nr_named;
        let last = (now, source().unwrap_or_default());
        state.current = Some(Current { number, source: Box::new(source), last, is_seen: false });
        Watched { live: self.clone(), number }
    }

    /// Stops showing. The owner of the bars clears the terminal.
    pub(crate) fn end(&self) {
        // Relaxed: a line that is being written may still appear.
        self.0.has_ended.store(true, Ordering::Relaxed);
    }
}

/// A row of the terminal, cut off at its edge.
fn row(bars: &MultiProgress) -> ProgressBar {
    let row = bars.add(ProgressBar::no_length());
    if let Ok(style) = ProgressStyle::with_template("{wide_msg}") {
        row.set_style(style);
    }
    row
}

/// The VM is watched until this is dropped.
#[must_use = "the VM is not watched any more when this is dropped"]
pub(crate) struct Watched {
    live: Live,
    number: u64,
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.live.0.leave(self.number, Instant::now());
    }
}

impl Inner {
    fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Relaxed)
    }

    /// Samples the VM that is watched, and shows what it has done since the last sample.
    fn look(&self, now: Instant) {
        if self.has_ended() {
            return;
        }
        let mut state = lock(&self.watched);
        if let Some(rows) = state.current.as_mut().and_then(|current| current.look(now)) {
            self.show(now, &rows);
            state.shown = now;
        } else if now.saturating_duration_since(state.shown) > 2 * ROWS_PERIOD {
            // Between two runs the rows stay for a while, but they do not describe what happens
            // now.
            self.blank();
        }
    }

    /// VM `number` is about to be dropped.
    fn leave(&self, number: u64, now: Instant) {
        let mut state = lock(&self.watched);
        let Some(mut current) = state.current.take_if(|current| current.number == number) else { return };
        let is_late = now.saturating_duration_since(current.last.0) >= SHORTEST;
        if (is_late || !current.is_seen)
            && !self.has_ended()
            && let Some(rows) = current.look(now)
        {
            self.show(now, &rows);
            state.shown = now;
        }
    }

    fn show(&self, now: Instant, rows: &[Row]) {
        match &self.screen {
            Screen::Rows { rows: bars, .. } => {
                for (index, bar) in bars.iter().enumerate() {
                    fill(bar, rows.get(index).map(Row::aligned).unwrap_or_default());
                }
            }
            Screen::Lines(_) => {
                let rows: Vec<String> = rows.iter().map(Row::plain).collect();
                self.line(now, &rows.join("; "));
            }
        }
    }

    fn blank(&self) {
        if let Screen::Rows { rows, .. } = &self.screen {
            rows.iter().for_each(|bar| fill(bar, String::new()));
        }
    }

    /// Writes a line, if the screen has lines.
    fn line(&self, now: Instant, text: &str) {
        if let Screen::Lines(out) = &self.screen
            && !self.has_ended()
        {
            let time = now.saturating_duration_since(self.begin).as_secs_f64();
            // An error means that no reader is left.
            let _ = writeln!(lock(out), "{time:8.1} s  {text}");
        }
    }
}

/// Draws a row that has changed; an unused row takes no space.
fn fill(bar: &ProgressBar, text: String) {
    if bar.message() != text {
        bar.set_message(text);
    }
}

impl Current {
    /// What it has done since the last sample; `None`: it was dropped.
    fn look(&mut self, now: Instant) -> Option<Vec<Row>> {
        let sample = (self.source)()?;
        let (then, last) = std::mem::replace(&mut self.last, (now, sample));
        self.is_seen = true;
        Some(rates::rows(&last, &self.last.1, now.saturating_duration_since(then)))
    }
}
