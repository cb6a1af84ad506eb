//! What the program asks of Linux: processes, CPUs, memory, file systems.
#![expect(unsafe_code, reason = "fork")]

use std::ffi::CStr;
use std::fs;
use std::io;
use std::process::ExitCode;

use rustix::mount::{MountFlags, mount};
use rustix::process::{Pid, Signal, WaitOptions, set_parent_process_death_signal, waitpid};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::wrong::{Reported, Wrong};

/// A child process.
#[derive(Debug)]
pub(crate) struct Child(Pid);

/// The exit code of a child that has said what went wrong.
const REPORTED: i32 = 1;
/// The exit code of a child that panicked, which is Rust's.
const PANICKED: i32 = 101;

/// How a child ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ended {
    Code(i32),
    Signal(i32),
}

impl Ended {
    /// How it ended, for people, and whether it told the hypervisor what went wrong.
    pub(crate) fn describe(self) -> (String, Reported) {
        match self {
            // Such a child ends after its report.
            Ended::Code(REPORTED) => (format!("ended with {REPORTED}"), Reported::Yes),
            Ended::Code(code) => (format!("ended with {code}"), Reported::No),
            Ended::Signal(signal) => (format!("was killed by signal {signal}"), Reported::No),
        }
    }
}

/// Runs `body` in a new process, which ends with its code. Only in a process with one thread:
/// another one might hold a lock that `body` needs, such as the allocator's.
pub(crate) fn fork(body: impl FnOnce() -> ExitCode) -> Result<Child, Wrong> {
    let threads = std::fs::read_dir("/proc/self/task").map_err(|error| Wrong::system("count threads", error))?;
    if threads.count() != 1 {
        return Err(Wrong::system("fork", io::Error::other("this process has other threads")));
    }
    // SAFETY: this is the only thread.
    let id = unsafe { libc::fork() };
    match id {
        0 => {
            // No process is left behind when its parent is killed.
            let _ = set_parent_process_death_signal(Some(Signal::KILL));
            std::process::exit(match std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)) {
                Ok(code) if code == ExitCode::SUCCESS => 0,
                Ok(_) => REPORTED,
                Err(_) => PANICKED,
            })
        }
        id => match Pid::from_raw(id).filter(|_| id > 0) {
            Some(id) => Ok(Child(id)),
            None => Err(Wrong::system("fork", io::Error::last_os_error())),
        },
    }
}

impl Child {
    /// Waits for the end of the child.
    pub(crate) fn wait(self) -> Result<Ended, Wrong> {
        loop {
            match waitpid(Some(self.0), WaitOptions::empty()) {
                Err(rustix::io::Errno::INTR) | Ok(None) => {}
                Err(error) => return Err(Wrong::system("wait for a child", error)),
                Ok(Some((_, status))) => {
                    return Ok(match (status.exit_status(), status.terminating_signal()) {
                        (Some(code), _) => Ended::Code(code),
                        (None, signal) => Ended::Signal(signal.unwrap_or_default()),
                    });
                }
            }
        }
    }
}

/// The numbers of the CPUs that this process may use.
pub(crate) fn cpus() -> Result<Vec<usize>, Wrong> {
    let set = sched_getaffinity(None).map_err(|error| Wrong::system("read the CPUs", error))?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
}

/// Keeps this process on one CPU.
pub(crate) fn run_on(cpu: usize) -> Result<(), Wrong> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).map_err(|error| Wrong::system("choose a CPU", error))
}

/// Memory of the machine, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Memory {
    pub(crate) total: u64,
    /// What processes can have without swapping.
    pub(crate) available: u64,
}

pub(crate) fn memory() -> Result<Memory, Wrong> {
    let text = fs::read_to_string("/proc/meminfo").map_err(|error| Wrong::system("read /proc/meminfo", error))?;
    parse_memory(&text).ok_or_else(|| Wrong::system("understand /proc/meminfo", io::ErrorKind::InvalidData))
}

fn parse_memory(text: &str) -> Option<Memory> {
    let bytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
    };
    Some(Memory { total: bytes("MemTotal")?, available: bytes("MemAvailable")? })
}

/// Mounts what a first process finds missing.
pub(crate) fn mount_file_systems() -> Result<(), Wrong> {
    const TYPES: [(&str, &str, Option<&CStr>); 3] =
        [("proc", "/proc", None), ("devtmpfs", "/dev", None), ("tmpfs", "/tmp", Some(c"size=50%"))];
    for (name, folder, data) in TYPES {
        fs::create_dir_all(folder).map_err(|error| Wrong::system("make a folder to mount on", error))?;
        match mount(name, folder, name, MountFlags::empty(), data) {
            // The kernel has mounted it already.
            Ok(()) | Err(rustix::io::Errno::BUSY) => {}
            Err(error) => return Err(Wrong::system("mount proc, devtmpfs and tmpfs", error)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_from_the_kernels_text() {
        let text = "MemTotal:        1000 kB\nMemFree:   10 kB\nMemAvailable:    500 kB\n";
        assert_eq!(parse_memory(text), Some(Memory { total: 1000 << 10, available: 500 << 10 }));
        assert_eq!(parse_memory("MemTotal: 1000 kB\n"), None);
        let here = memory().unwrap();
        assert!(here.total > here.available && here.available > 0);
    }

    #[test]
    fn there_is_a_cpu() {
        assert!(!cpus().unwrap().is_empty());
    }
}
