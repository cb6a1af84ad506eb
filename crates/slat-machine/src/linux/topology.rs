//! The machine that this runs on: CPUs, memory, names. Experiments pin their threads by it, refuse
//! what does not fit, and report it with their results.
//!
//! Everything is read from the kernel at the call; nothing is cached, since CPUs and memory change.
//! A value that the kernel does not report is `None` or "unknown", never a guess.

#![expect(unsafe_code, reason = "the affinity calls of the C library")]

use std::fs;
use std::io;
use std::path::Path;

use thiserror::Error;

/// CPUs that an affinity mask can name here, at least as many as any kernel is built for (`NR_CPUS`
/// is at most 8192). A mask of rustix has 1024.
const MAX_CPUS: usize = 8192;
const MASK_WORDS: usize = MAX_CPUS / 64;

/// A thread that could not be pinned.
#[derive(Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message names the fields")]
pub enum PinError {
    /// No CPU can have this number.
    #[error("there is no CPU {cpu}")]
    NoSuchCpu { cpu: u32 },
    /// The CPU does not exist, is offline, or this process may not use it.
    #[error("cannot run on CPU {cpu}")]
    Refused { cpu: u32, source: io::Error },
}

/// The numbers of the CPUs that this thread may run on now, in rising order. At least one.
pub fn usable_cpus() -> Vec<u32> {
    let mut mask = [0u64; MASK_WORDS];
    // SAFETY: the kernel writes at most the size in the argument, which is the mask's.
    let result = unsafe { libc::sched_getaffinity(0, size_of_val(&mask), mask.as_mut_ptr().cast()) };
    let cpus = (0..MAX_CPUS as u32).filter(|&cpu| mask[cpu as usize / 64] >> (cpu % 64) & 1 != 0).collect::<Vec<_>>();
    // It can only fail on a kernel with still more CPUs; CPU 0 exists everywhere.
    if result != 0 || cpus.is_empty() { vec![0] } else { cpus }
}

/// Keeps the calling thread on CPU `cpu` from now on.
///
/// # Errors
/// [`PinError`]; the thread then runs where it could run before.
pub fn pin_current_thread(cpu: u32) -> Result<(), PinError> {
    if cpu as usize >= MAX_CPUS {
        return Err(PinError::NoSuchCpu { cpu });
    }
    run_on_cpus(&[cpu]).map_err(|source| PinError::Refused { cpu, source })
}

/// Keeps the calling thread on `cpus` from now on; impossible numbers are ignored.
///
/// # Errors
/// The kernel's error; the thread then runs where it could run before.
pub(crate) fn run_on_cpus(cpus: &[u32]) -> Result<(), io::Error> {
    let mut mask = [0u64; MASK_WORDS];
    for cpu in cpus {
        if let Some(word) = mask.get_mut(*cpu as usize / 64) {
            *word |= 1 << (cpu % 64);
        }
    }
    // SAFETY: the kernel reads at most the size in the argument, which is the mask's.
    let result = unsafe { libc::sched_setaffinity(0, size_of_val(&mask), mask.as_ptr().cast()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The number of the CPU that runs the calling thread at this moment.
// The C library reads it from the thread's own memory, without a call.
#[inline]
pub(crate) fn current_cpu() -> u32 {
    // SAFETY: takes nothing, returns a number.
    let cpu = unsafe { libc::sched_getcpu() };
    // It fails only on a kernel without this call; CPU 0 exists everywhere.
    u32::try_from(cpu).unwrap_or(0)
}

/// The number behind `name` in a text of lines "name value" or "name: value kB".
pub(crate) fn field(text: &str, name: &str) -> Option<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix([':', ' ']))
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
}

fn meminfo_bytes(name: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    field(&text, name).map(|kib| kib << 10)
}

/// Memory of the machine, in bytes.
pub fn total_memory_bytes() -> Option<u64> {
    meminfo_bytes("MemTotal")
}

/// Memory that is available without swapping, in bytes: the kernel's estimate for the machine, or
/// what the control group of this process still allows, if that is less.
pub fn available_memory_bytes() -> Option<u64> {
    let machine = meminfo_bytes("MemAvailable");
    match (machine, cgroup_available_bytes()) {
        (Some(machine), Some(group)) => Some(machine.min(group)),
        (machine, group) => machine.or(group),
    }
}

/// Physical memory that this process holds, in bytes.
pub(crate) fn resident_memory_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    field(&text, "VmRSS").map(|kib| kib << 10)
}

/// What the memory control groups of this process allow beyond their use
/// (Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst). The groups above count as well,
/// down from the root.
fn cgroup_available_bytes() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    groups
        .lines()
        .filter_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let (controllers, path) = (parts.next()?, parts.next()?);
            if controllers.is_empty() {
                group_and_above("/sys/fs/cgroup", path, "memory.max", "memory.current", "")
            } else if controllers.split(',').any(|controller| controller == "memory") {
                group_and_above(
                    "/sys/fs/cgroup/memory",
                    path,
                    "memory.limit_in_bytes",
                    "memory.usage_in_bytes",
                    "total_",
                )
            } else {
                None
            }
        })
        .min()
}

fn group_and_above(root: &str, path: &str, limit: &str, usage: &str, prefix: &str) -> Option<u64> {
    let path = Path::new(path.trim_start_matches('/'));
    path.ancestors()
        .filter_map(|group| {
            let directory = Path::new(root).join(group);
            let read = |name: &str| fs::read_to_string(directory.join(name)).ok();
            // "max" is no number: there is no limit.
            let limit_bytes = read(limit)?.trim().parse::<u64>().ok()?;
            let usage_bytes = read(usage)?.trim().parse::<u64>().ok()?;
            // The kernel drops cached files before it runs out.
            let stat = read("memory.stat").unwrap_or_default();
            let cached_bytes = ["inactive_file", "active_file"]
                .iter()
                .filter_map(|name| field(&stat, &format!("{prefix}{name}")))
                .sum::<u64>();
            Some(limit_bytes.saturating_sub(usage_bytes.saturating_sub(cached_bytes)))
        })
        .min()
}

/// The description of the machine in a report.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostDescription {
    /// The name of the CPU model.
    pub cpu_model: String,
    /// CPUs that this process may use.
    pub nr_cpus: usize,
    /// The kernel's release.
    pub kernel_release: String,
    /// Memory of the machine, in bytes; 0 if it is not known.
    pub memory_bytes: u64,
}

impl HostDescription {
    /// Describes the machine as it is now.
    pub fn read() -> HostDescription {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu_model = cpuinfo
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.trim_start().strip_prefix(':'))
            .map_or_else(|| "unknown".to_owned(), |name| name.trim().to_owned());
        HostDescription {
            cpu_model,
            nr_cpus: usable_cpus().len(),
            kernel_release: rustix::system::uname().release().to_string_lossy().into_owned(),
            memory_bytes: total_memory_bytes().unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_thread_stays_where_it_is_pinned() {
        for cpu in usable_cpus() {
            thread::spawn(move || {
                pin_current_thread(cpu).expect("a CPU of ours");
                assert_eq!(usable_cpus(), [cpu]);
                assert_eq!(current_cpu(), cpu);
            })
            .join()
            .expect("pinning works");
        }
    }

    #[test]
    fn cpus_that_are_not_there_are_refused() {
        let before = usable_cpus();
        assert!(matches!(pin_current_thread(u32::MAX), Err(PinError::NoSuchCpu { cpu: u32::MAX })));
        let refused = MAX_CPUS as u32 - 1;
        assert!(before.contains(&refused) || matches!(pin_current_thread(refused), Err(PinError::Refused { .. })));
        assert_eq!(usable_cpus(), before);
    }

    #[test]
    fn memory_sizes_are_reported() {
        let total = total_memory_bytes().expect("Linux reports it");
        let available = available_memory_bytes().expect("Linux reports it");
        assert!(available > 0 && available <= total);
        let resident = resident_memory_bytes().expect("Linux reports it");
        assert!(resident > 0 && resident < total);
    }

    #[test]
    fn fields_are_whole_words() {
        let text = "MemTotalled: 1 kB\nMemTotal:       24 kB\nactive_file 5\ninactive_file 6\n";
        assert_eq!(field(text, "MemTotal"), Some(24));
        assert_eq!(field(text, "active_file"), Some(5));
        assert_eq!(field(text, "file"), None);
        assert_eq!(field("x: many", "x"), None);
    }

    #[test]
    fn the_machine_describes_itself() {
        let description = HostDescription::read();
        assert!(description.nr_cpus > 0 && description.memory_bytes > 0);
        assert!(!description.kernel_release.is_empty() && !description.cpu_model.is_empty());
    }
}
