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

use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use slat::Vm;
use slat_machine::host::MachineHost;
use slat_machine::walk::HardwareFormat;

use crate::failure::{Failure, no_thread};
use crate::live::{Live, View, Watched};
use crate::results::{Outcome, ResultsFile};

/// How often the time is drawn while a run lasts.
const TICK: Duration = Duration::from_millis(200);

/// The stack of an experiment, as large as a main thread's.
const STACK_BYTES: usize = 8 << 20;

/// For tests of interruptions: the number of outcomes that an experiment hands over before it stops
/// for ever, and prints so on the standard error.
const HOLD_AFTER: &str = "SLAT_TEST_HOLD_AFTER";

/// The exit code of a process that SIGINT ended, as shells give it.
pub(crate) const INTERRUPTED: u8 = 130;

/// An experiment's interface to the user.
#[derive(Clone)]
pub(crate) struct Session {
    shared: Arc<Shared>,
    /// Makes the outcome of the whole from the outcome of a part.
    whole: Arc<dyn Fn(Outcome) -> Outcome + Send + Sync>,
}

struct Shared {
    so_far: Mutex<Option<Outcome>>,
    bars: MultiProgress,
    /// With `--live`.
    live: Option<Live>,
    /// Files to remove when the process is interrupted.
    temporary: Mutex<Vec<PathBuf>>,
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

/// Locks, and ignores poison.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session {
    fn new(view: View) -> Result<Session, Failure> {
        let bars = MultiProgress::new();
        let live = match view {
            View::Progress => None,
            View::Live => Some(Live::start(&bars)?),
        };
        let left_before_hold = std::env::var(HOLD_AFTER).ok().and_then(|nr| nr.parse().ok()).map(AtomicU64::new);
        let shared = Shared { so_far: Mutex::default(), bars, live, temporary: Mutex::default(), left_before_hold };
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
        self.shared.bars.suspend(|| print(text))
    }

    /// Shows how far an experiment of `nr_runs` runs is.
    pub(crate) fn progress(&self, nr_runs: u64) -> Progress {
        let bar = self.shared.bars.add(ProgressBar::new(nr_runs));
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len}  {msg}  {elapsed}") {
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

    /// Removes `path` if the process is interrupted.
    pub(crate) fn remove_if_interrupted(&self, path: PathBuf) {
        lock(&self.shared.temporary).push(path);
    }

    /// Stops drawing.
    fn close(&self) {
        if let Some(live) = &self.shared.live {
            live.end();
        }
        // An error means that nothing was drawn.
        let _ = self.shared.bars.clear();
        self.shared.bars.set_draw_target(ProgressDrawTarget::hidden());
    }

    /// Removes temporary files.
    fn clean_up(&self) {
        for path in lock(&self.shared.temporary).drain(..) {
            // It may have been removed already.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// The progress of an experiment. Dropping it clears it from the screen.
pub(crate) struct Progress {
    bar: ProgressBar,
    live: Option<Live>,
}

impl Progress {
    /// Shows the run that begins.
    pub(crate) fn begin(&self, run: String) {
        if let Some(live) = &self.live {
            live.begin(self.bar.position() + 1, self.bar.length().unwrap_or_default(), &run);
        }
        self.bar.set_message(run);
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

enum Event {
    Ended(thread::Result<Result<Outcome, Failure>>),
    Interrupted,
}

/// Where results go besides the screen.
#[derive(Default)]
pub(crate) struct Files {
    pub(crate) json: Option<ResultsFile>,
    pub(crate) markdown: Option<ResultsFile>,
}

/// Runs `experiment` with the view `view`, and delivers its outcome: prints its text, and writes it
/// to `files`, as the result of `command`.
pub(crate) fn run(
    command: &str,
    view: View,
    files: Files,
    experiment: impl FnOnce(&Session) -> Result<Outcome, Failure> + Send + 'static,
) -> Result<(), Failure> {
    let (sender, events) = mpsc::channel();
    interrupt_by_signals(sender.clone())?;
    let session = Session::new(view)?;
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
    wait(command, files, &session, &events)
}

fn wait(command: &str, files: Files, session: &Session, events: &Receiver<Event>) -> Result<(), Failure> {
    let event = events.recv();
    session.close();
    match event {
        Ok(Event::Ended(Ok(result))) => {
            let outcome = result?;
            let delivered = deliver(files, &outcome, command, false);
            match outcome.failure {
                // Reported even if no reader of the output is left.
                Some(what) => quiet(delivered).and(Err(Failure::Check(what))),
                None => delivered,
            }
        }
        Ok(Event::Ended(Err(panic))) => resume_unwind(panic),
        Ok(Event::Interrupted) | Err(mpsc::RecvError) => {
            let so_far = lock(&session.shared.so_far).take();
            session.clean_up();
            if let Some(outcome) = &so_far {
                quiet(deliver(files, outcome, command, true))?;
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

/// Writes the files and prints the text; a failure of one does not prevent the others.
fn deliver(files: Files, outcome: &Outcome, command: &str, interrupted: bool) -> Result<(), Failure> {
    let mut object = outcome.json.clone();
    object["command"] = command.into();
    object["interrupted"] = interrupted.into();
    let json = files.json.map_or(Ok(()), |file| file.write(&format!("{object:#}\n")));
    let markdown = files.markdown.zip(outcome.markdown.as_deref());
    let markdown = markdown.map_or(Ok(()), |(file, text)| file.write(text));
    let printed = print(&outcome.text);
    // A file that cannot be written is reported even if no reader of the output is left.
    json.and(markdown).and(printed)
}

/// A pipe without a reader is no failure here: the result that follows says more.
fn quiet(result: Result<(), Failure>) -> Result<(), Failure> {
    result.or_else(|failure| if failure.is_closed_pipe() { Ok(()) } else { Err(failure) })
}

/// Prints `text`, now.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Failure::Print)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn outcome(text: &str) -> Outcome {
        Outcome { text: text.to_owned(), json: json!({}), markdown: None, failure: None }
    }

    #[test]
    fn the_outcome_of_a_part_becomes_the_wholes() {
        let session = Session::new(View::Progress).unwrap();
        let part = session.within(|part| outcome(&format!("b {} c", part.text)));
        let part_of_part = part.within(|part| outcome(&format!("[{}]", part.text)));
        part_of_part.so_far(outcome("x"));
        assert_eq!(lock(&session.shared.so_far).take().unwrap().text, "b [x] c");
    }

    #[test]
    fn an_interrupted_experiment_delivers_what_it_has() {
        let (sender, events) = mpsc::channel();
        let session = Session::new(View::Progress).unwrap();
        let path = std::env::temp_dir().join(format!("slat-session-test-{}", std::process::id()));
        std::fs::write(&path, "").unwrap();
        session.remove_if_interrupted(path.clone());
        sender.send(Event::Interrupted).unwrap();
        assert!(matches!(
            wait("slat", Files { json: None, markdown: None }, &session, &events),
            Err(Failure::Interrupted { measured: false })
        ));
        assert!(!path.exists());
        session.so_far(outcome(""));
        sender.send(Event::Interrupted).unwrap();
        assert!(matches!(
            wait("slat", Files { json: None, markdown: None }, &session, &events),
            Err(Failure::Interrupted { measured: true })
        ));
    }
}
