//! The connection of an experiment to the user: progress, what was measured so far, and
//! interruption.
//!
//! # Implementation
//! - The experiment runs on its own thread. It never checks for an interruption; after each run it
//!   hands over an [`Outcome`] of what was measured so far ([`Session::so_far`]).
//! - The main thread waits for the experiment's end, or for SIGINT, SIGTERM or SIGHUP. On a signal
//!   it delivers the last outcome and ends the process. So an interruption takes the same short
//!   time whatever the experiment does, even if it hangs.
//! - No other thread writes to the standard output, or to the file of `--json`.
//! - If a file is the standard output (`--json -`), all text goes to the standard error.

use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, SystemTime};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use slat::Vm;
use slat_machine::hardware::walk::HardwareFormat;
use slat_machine::vm::host::MachineHost;

use crate::busy::Watch;
use crate::failure::{Failure, INTERRUPTED, no_thread};
use crate::live::{Live, View, Watched, lock};
use crate::results::{EMULATED_CPUS, MODELLED_CPUS, Outcome, ResultsFile, print, rfc3339};

/// How often the time is drawn while a run lasts.
const TICK: Duration = Duration::from_millis(200);

/// The stack of an experiment, as large as a main thread's.
const STACK_BYTES: usize = 8 << 20;

/// For tests of interruptions: the number of outcomes that an experiment hands over before it stops
/// for ever, and prints so on the standard error.
const HOLD_AFTER: &str = "SLAT_TEST_HOLD_AFTER";

/// An experiment's interface to the user.
#[derive(Clone)]
pub(crate) struct Session {
    shared: Arc<Shared>,
    /// Makes the outcome of the whole from the outcome of a part.
    whole: Arc<dyn Fn(Outcome) -> Outcome + Send + Sync>,
}

struct Shared {
    text_to: TextTo,
    so_far: Mutex<Option<Outcome>>,
    bars: MultiProgress,
    /// With `--live`.
    live: Option<Live>,
    /// What is done when the process is interrupted.
    clean_ups: Mutex<Vec<Box<dyn FnOnce() + Send>>>,
    /// How many more outcomes may be handed over, for a test ([`HOLD_AFTER`]).
    left_before_hold: Option<AtomicU64>,
}

impl Shared {
    /// Stops this thread for ever, if a test asks for it.
    fn hold_if_due(&self) {
        if self.left_before_hold.as_ref().is_some_and(|left| left.load(Ordering::Relaxed) == 0) {
            eprintln!("slat: held");
            loop {
                thread::park();
            }
        }
    }
}

impl Session {
    fn new(view: View, text_to: TextTo) -> Result<Session, Failure> {
        let bars = MultiProgress::new();
        if view == View::Nothing {
            bars.set_draw_target(ProgressDrawTarget::hidden());
        }
        let live = match view {
            View::Nothing | View::Progress => None,
            View::Live => Some(Live::start(&bars)?),
        };
        let left_before_hold = std::env::var(HOLD_AFTER).ok().and_then(|nr| nr.parse().ok()).map(AtomicU64::new);
        let shared =
            Shared { text_to, so_far: Mutex::default(), bars, live, clean_ups: Mutex::default(), left_before_hold };
        Ok(Session { shared: Arc::new(shared), whole: Arc::new(|outcome| outcome) })
    }

    /// A session for a part of this one's experiment: `whole` makes the outcome so far from the
    /// part's.
    pub(crate) fn within(&self, whole: impl Fn(Outcome) -> Outcome + Send + Sync + 'static) -> Session {
        let outer = Arc::clone(&self.whole);
        Session { shared: Arc::clone(&self.shared), whole: Arc::new(move |outcome| outer(whole(outcome))) }
    }

    /// Hands over what was measured so far.
    pub(crate) fn so_far(&self, outcome: Outcome) {
        *lock(&self.shared.so_far) = Some((self.whole)(outcome));
        if let Some(left) = &self.shared.left_before_hold {
            // Relaxed: one experiment hands over.
            left.fetch_sub(1, Ordering::Relaxed);
            self.shared.hold_if_due();
        }
    }

    /// Prints the text of a finished part.
    pub(crate) fn say(&self, text: &str) -> Result<(), Failure> {
        self.shared.bars.suspend(|| self.shared.text_to.print(text))
    }

    /// Shows how far an experiment of `nr_runs` runs is.
    pub(crate) fn progress(&self, nr_runs: u64) -> Progress {
        let bar = self.shared.bars.add(ProgressBar::new(nr_runs));
        if let Ok(style) = ProgressStyle::with_template("{bar:12} {pos}/{len} {elapsed} {wide_msg}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(TICK);
        Progress { bar, live: self.shared.live.clone() }
    }

    /// With `--live`, shows what `vm` does, until the returned value is dropped. Call it when the
    /// machine is ready, before the measurement.
    pub(crate) fn watch<F: HardwareFormat>(&self, vm: &Arc<Vm<MachineHost, F>>) -> Option<Watched> {
        self.shared.live.as_ref().map(|live| live.watch(vm))
    }

    pub(crate) fn remove_if_interrupted(&self, path: PathBuf) {
        // It may have been removed already.
        self.when_interrupted(move || drop(std::fs::remove_file(path)));
    }

    /// Does `action` if the process is interrupted, soon: the user waits for its end.
    pub(crate) fn when_interrupted(&self, action: impl FnOnce() + Send + 'static) {
        lock(&self.shared.clean_ups).push(Box::new(action));
    }

    fn close(&self) {
        if let Some(live) = &self.shared.live {
            live.end();
        }
        // An error means that nothing was drawn.
        let _ = self.shared.bars.clear();
        self.shared.bars.set_draw_target(ProgressDrawTarget::hidden());
    }

    /// Removes what would be left behind, the last one first: a program that writes into a folder
    /// is started after the folder is made, and must not write there while it is removed.
    fn clean_up(&self) {
        for action in lock(&self.shared.clean_ups).drain(..).rev() {
            action();
        }
    }
}

/// The progress of an experiment. Dropping it clears it from the screen.
pub(crate) struct Progress {
    bar: ProgressBar,
    live: Option<Live>,
}

impl Progress {
    pub(crate) fn begin(&self, run: String) {
        if let Some(live) = &self.live {
            live.begin(self.bar.position() + 1, self.bar.length().unwrap_or_default(), &run);
        }
        self.bar.set_message(run);
    }

    /// Shows how far a run is that counts its steps itself.
    pub(crate) fn show(&self, done: u64, total: u64, what: String) {
        self.bar.set_length(total);
        self.bar.set_position(done);
        self.bar.set_message(what);
    }

    /// Counts a run as done.
    pub(crate) fn step(&self) {
        self.bar.inc(1);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[expect(clippy::large_enum_variant, reason = "there is one of it")]
enum Event {
    Ended(thread::Result<Result<Outcome, Failure>>),
    Interrupted,
}

/// Where text for people goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum TextTo {
    Stdout,
    Stderr,
}

impl TextTo {
    /// The standard output, unless results go there.
    fn beside(json: Option<&ResultsFile>) -> TextTo {
        if json.is_some_and(ResultsFile::is_stdout) { TextTo::Stderr } else { TextTo::Stdout }
    }

    fn print(self, text: &str) -> Result<(), Failure> {
        match self {
            TextTo::Stdout => print(text).map_err(Failure::Print),
            TextTo::Stderr => io::stderr().lock().write_all(text.as_bytes()).map_err(Failure::Print),
        }
    }
}

/// The command of a session: its words, and when it began.
struct Begun {
    words: Vec<String>,
    time: SystemTime,
    watch: Watch,
}

/// Runs `experiment` with the view `view`, and delivers its outcome: prints its text, and writes it
/// to the file `json`, as the result of the command line `words`.
pub(crate) fn run(
    words: &[String],
    view: View,
    json: Option<ResultsFile>,
    experiment: impl FnOnce(&Session) -> Result<Outcome, Failure> + Send + 'static,
) -> Result<(), Failure> {
    let (sender, events) = mpsc::channel();
    interrupt_by_signals(sender.clone())?;
    let session = Session::new(view, TextTo::beside(json.as_ref()))?;
    let words = std::iter::once("slat".to_owned()).chain(words.iter().skip(1).cloned()).collect();
    let begun = Begun { words, time: SystemTime::now(), watch: Watch::begin() };
    {
        let session = session.clone();
        let body = move || {
            session.shared.hold_if_due();
            let result = catch_unwind(AssertUnwindSafe(|| experiment(&session)));
            // The receiver is gone only after an interruption.
            drop(sender.send(Event::Ended(result)));
        };
        let thread = thread::Builder::new().name("experiment".to_owned()).stack_size(STACK_BYTES).spawn(body);
        thread.map_err(|error| no_thread(&error))?;
    }
    wait(&begun, json, &session, &events)
}

fn wait(begun: &Begun, json: Option<ResultsFile>, session: &Session, events: &Receiver<Event>) -> Result<(), Failure> {
    let event = events.recv();
    session.close();
    match event {
        Ok(Event::Ended(Ok(result))) => {
            let outcome = result?;
            let delivered = deliver(json, &outcome, begun, false);
            match outcome.shortfall {
                // Reported even if no reader of the output is left.
                Some(shortfall) => quiet(delivered).and(Err(shortfall)),
                None => delivered,
            }
        }
        Ok(Event::Ended(Err(panic))) => resume_unwind(panic),
        Ok(Event::Interrupted) | Err(mpsc::RecvError) => {
            let so_far = lock(&session.shared.so_far).take();
            session.clean_up();
            if let Some(outcome) = &so_far {
                quiet(deliver(json, outcome, begun, true))?;
            }
            Err(Failure::Interrupted { measured: so_far.is_some() })
        }
    }
}

/// The first signal interrupts; the second ends the process at once, in case the first is stuck in
/// a pipe.
fn interrupt_by_signals(sender: Sender<Event>) -> Result<(), Failure> {
    let again = AtomicBool::new(false);
    let handler = move || {
        // Relaxed: it is alone on its thread.
        if again.swap(true, Ordering::Relaxed) || sender.send(Event::Interrupted).is_err() {
            std::process::exit(INTERRUPTED.into());
        }
    };
    ctrlc::set_handler(handler).map_err(|error| {
        Failure::CannotServe(format!("no handler of signals: {error}; please report this with the command line"))
    })
}

/// Writes the file and prints the text; a failure of one does not prevent the other.
fn deliver(json: Option<ResultsFile>, outcome: &Outcome, begun: &Begun, interrupted: bool) -> Result<(), Failure> {
    let text_to = TextTo::beside(json.as_ref());
    let busy = begun.watch.end();
    // Virtual time is the same on a busy machine, and of emulated CPUs no time is of interest.
    let is_virtual = outcome.results.as_ref().is_some_and(|results| {
        let measured_on = &results.host.measured_on;
        [MODELLED_CPUS, EMULATED_CPUS].iter().any(|cpus| measured_on.starts_with(cpus))
    });
    let warning =
        busy.filter(|busy| busy.is_disturbing() && !is_virtual).map(|busy| format!("{busy}\n")).unwrap_or_default();
    let written = json.zip(outcome.results.clone()).map_or(Ok(()), |(file, mut results)| {
        results.command.clone_from(&begun.words);
        results.time = rfc3339(begun.time);
        results.interrupted = interrupted;
        results.host.busy = busy;
        let (path, is_stdout) = (file.path().to_owned(), file.is_stdout());
        file.write_json(&results).map_err(|source| match is_stdout {
            true => Failure::Print(source),
            false => Failure::Write { path, source },
        })
    });
    let printed = text_to.print(&format!("{}{warning}", outcome.text));
    // A file that cannot be written is reported even if no reader of the output is left.
    written.and(printed)
}

/// A pipe without a reader is no failure here: the result that follows says more.
fn quiet(result: Result<(), Failure>) -> Result<(), Failure> {
    result.or_else(|failure| if failure.is_closed_pipe() { Ok(()) } else { Err(failure) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(text: &str) -> Outcome {
        Outcome { text: text.to_owned(), results: None, shortfall: None }
    }

    fn begun() -> Begun {
        Begun { words: vec!["slat".to_owned()], time: SystemTime::now(), watch: Watch::begin() }
    }

    #[test]
    fn the_outcome_of_a_part_becomes_the_wholes() {
        let session = Session::new(View::Progress, TextTo::Stdout).unwrap();
        let part = session.within(|part| outcome(&format!("b {} c", part.text)));
        let part_of_part = part.within(|part| outcome(&format!("[{}]", part.text)));
        part_of_part.so_far(outcome("x"));
        assert_eq!(lock(&session.shared.so_far).take().unwrap().text, "b [x] c");
    }

    #[test]
    fn an_interrupted_experiment_delivers_what_it_has() {
        let (sender, events) = mpsc::channel();
        let session = Session::new(View::Progress, TextTo::Stdout).unwrap();
        let path = std::env::temp_dir().join(format!("slat-session-test-{}", std::process::id()));
        std::fs::write(&path, "").unwrap();
        session.remove_if_interrupted(path.clone());
        sender.send(Event::Interrupted).unwrap();
        assert!(matches!(wait(&begun(), None, &session, &events), Err(Failure::Interrupted { measured: false })));
        assert!(!path.exists());
        session.so_far(outcome(""));
        sender.send(Event::Interrupted).unwrap();
        assert!(matches!(wait(&begun(), None, &session, &events), Err(Failure::Interrupted { measured: true })));
    }
}
