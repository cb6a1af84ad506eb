//! The pager as a process, and monitors in processes of their own.

#![allow(dead_code, reason = "each test takes what it needs")]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::Duration;

use crate::registered::userfaultfd;
use crate::support::{CLIENT, bytes};

pub const SEED: u64 = 41;
pub const MIB: usize = 1 << 20;
pub const SIZE: usize = 16 * MIB;

pub struct Client {
    pub child: Child,
    pub lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Client {
    pub fn start(name: &str, argument: &Path) -> Client {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--ignored", "--nocapture", "--test-threads=1"])
            .env(CLIENT, argument)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Client { child, lines }
    }

    /// Until the client says `word`; false if it ended before.
    pub fn wait_for(&mut self, word: &str) -> bool {
        self.lines.by_ref().map_while(Result::ok).any(|line| line.contains(word))
    }

    /// Its input ends; it must be content.
    pub fn end(mut self) {
        drop(self.child.stdin.take());
        while self.wait_for("\0") {}
        assert!(self.child.wait().unwrap().success());
    }
}

pub struct Pager {
    pub child: Child,
}

impl Drop for Pager {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Pager {
    pub fn start(folder: &Path, arguments: &[&str]) -> Pager {
        let pager = Pager::command(folder).args(arguments).spawn().unwrap();
        let mut pager = Pager { child: pager };
        pager.wait_until_it_listens(&socket(folder));
        pager
    }

    pub fn command(folder: &Path) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_slat-pager"));
        command.args(["serve", "--log", "warn", "--granule", "4KiB", "--sandbox", "required"]);
        command.arg("--socket").arg(socket(folder)).arg("--memory").arg(folder.join("memory"));
        command.arg("--metrics").arg(format!("unix:{}", folder.join("metrics").display()));
        command
    }

    /// A successor binds the socket anew, and serves metrics once it has taken over.
    pub fn wait_until_it_listens(&mut self, socket: &Path) {
        let metrics = socket.with_file_name("metrics");
        while UnixStream::connect(&metrics).is_err() {
            assert!(self.child.try_wait().unwrap().is_none(), "the pager has ended");
            thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn proc(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{name}", self.child.id()))
    }

    pub fn nr_descriptors(&self) -> usize {
        fs::read_dir(self.proc("fd")).unwrap().count()
    }

    /// A number of /proc/PID/status.
    pub fn status(&self, name: &str) -> String {
        let status = fs::read_to_string(self.proc("status")).unwrap();
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().to_string()
    }
}

pub fn socket(folder: &Path) -> PathBuf {
    folder.join("pager.sock")
}

pub fn metric(folder: &Path, name: &str) -> f64 {
    let mut stream = UnixStream::connect(folder.join("metrics")).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: pager\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let line = text.lines().find(|line| line.starts_with(&format!("slat_pager_{name}{{")));
    line.unwrap_or_else(|| panic!("no {name} in {text}")).rsplit(' ').next().unwrap().parse().unwrap()
}

/// The files of machines that a successor would find.
pub fn noted(folder: &Path) -> usize {
    let state = folder.join("pager.sock.state");
    let files = fs::read_dir(state).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "vm")).count()
}

/// A folder with a snapshot; `None` if there is no userfaultfd here, which is said.
pub fn folder() -> Option<tempfile::TempDir> {
    userfaultfd(0)?;
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("memory"), bytes(SEED, 0..SIZE as u64)).unwrap();
    Some(folder)
}
