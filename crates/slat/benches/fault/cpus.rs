//! Pinning a thread to a CPU, and the CPU time of a thread.

#![expect(unsafe_code, reason = "CPU affinity, and the clock of a thread")]

use std::time::Duration;

/// The CPUs that this process may use.
pub(crate) fn cpus() -> Vec<usize> {
    // SAFETY: a set of CPUs is a plain array of bits.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is writable and of the given size.
    let failed = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) } != 0;
    // SAFETY: the numbers are below the size of the set.
    (0..libc::CPU_SETSIZE as usize).filter(|&cpu| !failed && unsafe { libc::CPU_ISSET(cpu, &set) }).collect()
}

/// Keeps the calling thread on `cpu`. If the kernel refuses, the thread stays where it is.
pub(crate) fn pin(cpu: usize) {
    // SAFETY: as in `cpus`.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the number came from `cpus`; the set is readable and of the given size.
    unsafe {
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
    }
}

/// CPU time that the calling thread has used.
#[allow(dead_code, reason = "each bench uses a part")]
pub(crate) fn cpu_time() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the time is writable.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut now) } != 0;
    assert!(!failed, "no clock of the thread");
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}
