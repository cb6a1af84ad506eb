//! The CPUs of the machine, each of which runs one vCPU.

use std::thread;

use kvm_ioctls::VcpuFd;
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::wrong::Wrong;

/// How many the calling thread may use: all, until it stays on one ([`beside`]).
pub(crate) fn number() -> Result<u64, Wrong> {
    let found = thread::available_parallelism().map_err(|error| Wrong::system("count the CPUs", error))?;
    Ok(found.get() as u64)
}

/// Keeps the calling thread on CPU `number`.
fn stay_on(number: u64) -> Result<(), Wrong> {
    let mut cpus = CpuSet::new();
    cpus.set(number as usize);
    sched_setaffinity(None, &cpus).map_err(|error| Wrong::system("keep a thread on a CPU", error))
}

/// Ends the process, since vCPU `number` failed.
fn end(number: u64, wrong: &Wrong) -> ! {
    println!("vCPU {number}: {wrong}");
    std::process::exit(1)
}

/// Does `own` on CPU 0, and `work` with each of `vcpus` on the CPUs from 1 on, at the same time.
///
/// The thread of a vCPU that fails ends the process, and so the machine: the others may wait for that
/// vCPU for ever.
pub(crate) fn beside<T: Send, U>(
    vcpus: &mut [VcpuFd],
    work: impl Fn(u64, &mut VcpuFd) -> Result<T, Wrong> + Sync,
    own: impl FnOnce() -> Result<U, Wrong>,
) -> Result<(U, Vec<T>), Wrong> {
    let work = |number, vcpu: &mut VcpuFd| {
        stay_on(number).and_then(|()| work(number, vcpu)).unwrap_or_else(|wrong| end(number, &wrong))
    };
    stay_on(0)?;
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = (1..).zip(vcpus).map(|(number, vcpu)| scope.spawn(move || work(number, vcpu))).collect();
        let value = match own() {
            Err(wrong) if !threads.is_empty() => end(0, &wrong),
            value => value?,
        };
        let done = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| std::process::exit(1)));
        Ok((value, done.collect()))
    })
}
