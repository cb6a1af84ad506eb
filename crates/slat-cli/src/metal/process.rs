//! Programs that the command starts. None outlives it: each is the leader of a process group, which
//! is killed when its value is dropped, and when the command is interrupted. If the command itself
//! is killed, the kernel kills the leader.
#![expect(unsafe_code, reason = "asks the kernel, between fork and exec, to end a child with its parent")]

use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

use rustix::process::{Pid, Signal, kill_process_group, set_parent_process_death_signal};

use crate::live::lock;
use crate::session::Session;

pub(super) struct Running {
    /// For its pipes.
    pub(super) child: Child,
    /// The process group, until the program has ended.
    group: Arc<Mutex<Option<Pid>>>,
}

fn kill(group: &Mutex<Option<Pid>>) {
    if let Some(group) = lock(group).take() {
        // It may have ended.
        let _ = kill_process_group(group, Signal::KILL);
    }
}

impl Running {
    /// Starts `command`. The kernel's part needs that this thread outlives the program.
    pub(super) fn start(command: &mut Command, session: &Session) -> io::Result<Running> {
        // A signal from a terminal goes to the command alone, which ends the group.
        command.process_group(0);
        let end_with_parent = || Ok(set_parent_process_death_signal(Some(Signal::KILL))?);
        // SAFETY: the child makes one system call, which takes no lock and allocates nothing.
        let child = unsafe { command.pre_exec(end_with_parent) }.spawn()?;
        let group = Arc::new(Mutex::new(i32::try_from(child.id()).ok().and_then(Pid::from_raw)));
        let of_signal = Arc::clone(&group);
        session.when_interrupted(move || kill(&of_signal));
        Ok(Running { child, group })
    }

    pub(super) fn wait(&mut self) -> io::Result<ExitStatus> {
        let status = self.child.wait()?;
        // Another process may get the number now.
        lock(&self.group).take();
        Ok(status)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        kill(&self.group);
        // Nothing is left that could be waited for, if it fails.
        let _ = self.child.wait();
    }
}

/// Runs `command` to its end, and returns what it printed.
pub(super) fn output(command: &mut Command, session: &Session) -> io::Result<Output> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running = Running::start(command, session)?;
    let (stdout, stderr) = (running.child.stdout.take(), running.child.stderr.take());
    let errors = thread::spawn(move || read(stderr));
    let stdout = read(stdout)?;
    let stderr = errors.join().unwrap_or_else(|_| Ok(Vec::new()))?;
    Ok(Output { status: running.wait()?, stdout, stderr })
}

fn read(pipe: Option<impl Read>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    pipe.map_or(Ok(0), |mut pipe| pipe.read_to_end(&mut bytes))?;
    Ok(bytes)
}

/// Why a program failed, in one line: the first line of its errors that looks like the reason.
pub(super) fn reason(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
    let reasons = ["error", "E: "];
    let found = lines().find(|line| reasons.iter().any(|start| line.starts_with(start))).or(lines().next_back());
    found.map_or_else(|| output.status.to_string(), str::to_owned)
}
