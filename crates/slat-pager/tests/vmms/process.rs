//! Programs that the machine runs, and what they print.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use crate::{Outcome, guest};

/// Longer than any step takes in an emulated machine.
pub const PATIENCE: Duration = Duration::from_secs(240);
/// Longer than such a machine says nothing.
pub const LONGEST_SILENCE: Duration = Duration::from_secs(300);
/// Between two looks at something that is awaited.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// What a guest has verified.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Round {
    pub nr_pages: u64,
    /// Pages that were free before.
    pub nr_scratch: u64,
    pub memory_kib: u64,
}

/// A program that is killed when it is dropped.
pub struct Program {
    name: &'static str,
    child: Child,
    lines: Receiver<String>,
    /// Open, so that a serial line has another end.
    _stdin: Option<ChildStdin>,
}

impl Program {
    /// Starts it; each line that it prints is shown.
    pub fn start(name: &'static str, command: &mut Command) -> Outcome<Program> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("{name}: {error}"))?;
        let (sender, lines) = mpsc::channel();
        let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        if let (Some(stdout), Some(stderr)) = (stdout, stderr) {
            let of_stdout = sender.clone();
            thread::spawn(move || read(name, stdout, &of_stdout));
            thread::spawn(move || read(name, stderr, &sender));
        }
        Ok(Program { name, child, lines, _stdin: stdin })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills it, as the kernel does.
    pub fn kill(mut self) -> Outcome<()> {
        self.child.kill().map_err(|error| format!("{}: {error}", self.name))?;
        let status = self.child.wait().map_err(|error| format!("{}: {error}", self.name))?;
        match status.signal() {
            Some(libc::SIGKILL) => Ok(()),
            _ => Err(format!("{} had ended before it was killed: {status}", self.name)),
        }
    }

    /// Waits for its end.
    pub fn wait(mut self) -> Outcome<ExitStatus> {
        let name = self.name;
        until(&format!("the end of {name}"), || self.child.try_wait().map_err(|error| format!("{name}: {error}")))
    }

    /// The next line, which comes in `time`. A guest that is wrong ends it.
    pub fn next_line(&mut self, what: &str, time: Duration) -> Outcome<String> {
        let line = self.lines.recv_timeout(time).map_err(|error| match error {
            RecvTimeoutError::Timeout => {
                format!("{}: {what} did not come in time; its threads: {}", self.name, waits(self.child.id()))
            }
            RecvTimeoutError::Disconnected => format!("{} ended before {what}", self.name),
        })?;
        good(&line)?;
        Ok(line)
    }

    /// Waits for a line from which `found` makes something.
    pub fn line<T>(&mut self, what: &str, found: impl Fn(&str) -> Option<T>) -> Outcome<T> {
        let begin = Instant::now();
        loop {
            let line = self.next_line(what, PATIENCE.saturating_sub(begin.elapsed()))?;
            if let Some(found) = found(&line) {
                return Ok(found);
            }
        }
    }

    /// Waits for a line of the log with `what`, and returns the number after `name` in it.
    pub fn number_after(&mut self, what: &str, name: &str) -> Outcome<u64> {
        self.line(what, |line| line.split_once(what)?.1.split_once(name)?.1.split(' ').next()?.parse().ok())
    }

    /// Waits until the guest has filled its memory.
    pub fn filled(&mut self) -> Outcome<()> {
        self.line("a filled memory", |line| line.contains(guest::FILLED).then_some(()))
    }

    /// Waits for a part of a round.
    pub fn part(&mut self) -> Outcome<()> {
        self.line("a part of a round", |line| line.contains(guest::PART).then_some(()))
    }

    /// Waits for a round that is `good`.
    pub fn round(&mut self, what: &str, good: impl Fn(&Round) -> bool) -> Outcome<Round> {
        self.line(what, |line| parse_round(line).filter(&good))
    }

    /// Waits for the end of two rounds: the second began after this call, unless a line of an older
    /// one is still on its way.
    pub fn whole_round(&mut self) -> Outcome<Round> {
        self.lines.try_iter().try_for_each(|line| good(&line).map(drop))?;
        self.round("a round", |_| true)?;
        let round = self.round("a whole round", |_| true)?;
        match round.nr_pages == guest::NR_PAGES as u64 {
            true => Ok(round),
            false => Err(format!("a round of {} pages, not {}", round.nr_pages, guest::NR_PAGES)),
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Where in the kernel each thread of a process waits: `handle_userfault` is a page that the pager
/// has not filled.
fn waits(pid: u32) -> String {
    let read = |path: PathBuf| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().filter_map(Result::ok);
    let threads = tasks.map(|task| format!("{} {}", read(task.path().join("comm")), read(task.path().join("wchan"))));
    threads.collect::<Vec<_>>().join(", ")
}

/// Sends each line, and shows it.
fn read(name: &str, from: impl Read, to: &Sender<String>) {
    for line in BufReader::new(from).split(b'\n').map_while(Result::ok) {
        // A guest's line ends by "\r\n".
        let line = String::from_utf8_lossy(&line).trim_end().to_owned();
        println!("{name}| {line}");
        // The receiver may be gone.
        let _ = to.send(line);
    }
}

/// The line, unless something is wrong in a guest.
fn good(line: &str) -> Outcome<&str> {
    if line.contains(guest::WRONG) || line.contains("Kernel panic") { Err(line.to_owned()) } else { Ok(line) }
}

fn parse_round(line: &str) -> Option<Round> {
    let mut words = line.split_once(guest::ROUND)?.1.split(' ');
    let mut number_after = |name| words.by_ref().skip_while(|word| *word != name).nth(1)?.parse().ok();
    Some(Round {
        nr_pages: number_after("verified")?,
        nr_scratch: number_after("scratch")?,
        memory_kib: number_after("memory")?,
    })
}

/// Waits until a server listens at `socket`: its file exists before that.
pub fn listening(socket: &Path) -> Outcome<()> {
    until(&format!("a server at {}", socket.display()), || Ok(UnixStream::connect(socket).ok().map(drop)))
}

/// Waits until `found` has something.
pub fn until<T>(what: &str, mut found: impl FnMut() -> Outcome<Option<T>>) -> Outcome<T> {
    let begin = Instant::now();
    loop {
        if let Some(found) = found()? {
            return Ok(found);
        }
        if begin.elapsed() >= PATIENCE {
            return Err(format!("{what} did not come in time"));
        }
        thread::sleep(LOOK_AGAIN);
    }
}

/// Waits for a file.
pub fn file(path: &Path) -> Outcome<()> {
    until(&path.display().to_string(), || Ok(path.exists().then_some(())))
}
