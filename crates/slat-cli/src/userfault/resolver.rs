//! The resolver of `--delivery ring` as another process: this program, with a hidden command.
//!
//! Its standard input is one end of a socket pair. Over it the two processes shake hands and hand
//! over the files of rings, bitmap and memory. The resolver ends when the other end is closed, so
//! it never outlives its parent, and only the socket needs a cleanup. It prints an error to its
//! standard error, which the parent reads: the parent reports the resolver's failure as its own,
//! with the same exit code.

use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use clap::Args;
use slat_machine::paging::{ParseSourceError, SourceSpec};
use slat_machine::vm::demand_paging::{Copier, ServeConfig, serve_rings};

use super::source::Source;
use crate::failure::Failure;

/// The hidden command.
const COMMAND: &str = "userfault-resolver";

/// How long each process waits for the other.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How long the parent waits for the error of a resolver that may have none.
const SHORT_TIMEOUT: Duration = Duration::from_secs(1);

/// The options of the hidden command.
#[derive(Clone, Debug, Args)]
pub(crate) struct ResolverArgs {
    /// Source of pages.
    #[arg(long, value_parser = |text: &str| text.parse::<SourceSpec>().map_err(|error: ParseSourceError| error.to_string()))]
    source: SourceSpec,
    /// Latency of each page, in nanoseconds.
    #[arg(long)]
    delay_ns: u64,
    /// Pages that the background copier has in flight.
    #[arg(long)]
    copier: Option<usize>,
}

/// The process's main function.
pub(crate) fn main(args: &ResolverArgs) -> Result<(), Failure> {
    let no_socket =
        |error| Failure::CannotServe(format!("there is no socket to a virtual machine: {error}; use --delivery ring"));
    let stream = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().map_err(no_socket)?);
    let config = ServeConfig {
        source: args.source.open()?.delayed_by(Duration::from_nanos(args.delay_ns)),
        nr_threads: 1,
        copier: args.copier.map(|window| Copier { window }),
        timeout: TIMEOUT,
    };
    serve_rings(stream, &config)?;
    Ok(())
}

/// A resolver process. Dropping this ends it.
#[derive(Debug)]
pub(super) struct ResolverProcess {
    child: Child,
}

impl ResolverProcess {
    /// Starts one, and returns the virtual machine's end of its socket.
    pub(super) fn start(source: &Source, copier: Option<Copier>) -> Result<(ResolverProcess, UnixStream), Failure> {
        let failed = |error| {
            Failure::CannotServe(format!("the resolver process cannot be started: {error}; use --resolver thread"))
        };
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command.arg(COMMAND);
        command.args(["--source", &source.spec.to_string()]);
        command.args(["--delay-ns", &source.open.delay().as_nanos().to_string()]);
        if let Some(Copier { window }) = copier {
            command.args(["--copier", &window.to_string()]);
        }
        // A signal from a terminal goes to the command's whole process group: the resolver must end
        // with its socket, and not before.
        command.process_group(0);
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::piped());
        let child = command.spawn().map_err(failed)?;
        Ok((ResolverProcess { child }, ours))
    }

    /// Runs `action`, and kills the process after `delay`. Returns whether that was before the
    /// action's end, of a process that had not ended by itself.
    pub(super) fn kill_during<T>(&mut self, delay: Duration, action: impl FnOnce() -> T) -> (T, bool) {
        std::thread::scope(|scope| {
            let (is_over, over) = mpsc::channel::<()>();
            let killer = scope.spawn(move || {
                let is_due = over.recv_timeout(delay) == Err(RecvTimeoutError::Timeout);
                is_due && matches!(self.child.try_wait(), Ok(None)) && self.child.kill().is_ok()
            });
            let result = action();
            drop(is_over);
            (result, killer.join().unwrap_or(false))
        })
    }

    /// Waits for the end of a process whose socket is closed or about to be. Returns why it failed,
    /// if it did.
    pub(super) fn finish(self) -> Result<(), Failure> {
        let does_not_end =
            || Err(Failure::CannotServe("the resolver process does not end; use --resolver thread".to_owned()));
        self.end_within(TIMEOUT).unwrap_or_else(does_not_end)
    }

    /// Why it failed, if it did and ends soon.
    pub(super) fn failure(self) -> Option<Failure> {
        self.end_within(SHORT_TIMEOUT)?.err()
    }

    /// `None`: it has not ended.
    fn end_within(mut self, timeout: Duration) -> Option<Result<(), Failure>> {
        let begin = Instant::now();
        let status = loop {
            match self.child.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) if begin.elapsed() < timeout => std::thread::sleep(Duration::from_millis(1)),
                Ok(None) => return None,
                Err(error) => {
                    return Some(Err(Failure::CannotServe(format!(
                        "the resolver process: {error}; use --resolver thread"
                    ))));
                }
            }
        };
        let mut said = String::new();
        if let Some(stderr) = &mut self.child.stderr {
            let _ = stderr.read_to_string(&mut said);
        }
        let reason = said.lines().last().unwrap_or_default().trim_start_matches("slat: ");
        Some(match status.code() {
            Some(0) => Ok(()),
            Some(1) => Err(Failure::Check(reason.trim_start_matches("check failed: ").to_owned())),
            Some(2) => Err(Failure::Usage(reason.to_owned())),
            Some(_) if !reason.is_empty() => {
                Err(Failure::CannotServe(reason.trim_start_matches("this machine cannot do that: ").to_owned()))
            }
            _ => Err(Failure::CannotServe(format!("the resolver process has ended: {status}; use --resolver thread"))),
        })
    }
}

impl Drop for ResolverProcess {
    fn drop(&mut self) {
        // Both fail if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
