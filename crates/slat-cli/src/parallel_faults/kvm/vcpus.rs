//! The threads of KVM's vCPUs, one each. All threads are started first. Then each job is posted to
//! all at once, and is over when the last thread has ended it, as for the engine's vCPUs. So the
//! times include neither the start of threads nor their end.

use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use slat_machine::linux::topology::pin_current_thread;
use slat_machine::vm::guest::value;
use slat_machine::vm::machine::{MachineError, Pins};

use crate::failure::{Failure, check_failed, no_thread};
use crate::kvm::KvmGuest;

/// Pages to write, and what to write to the first of them.
struct WriteJob {
    pages: Range<u64>,
    first: u64,
}

/// The end of a job, and its result.
type Ending = (Instant, Result<(), Failure>);

struct VcpuThread {
    jobs: Sender<WriteJob>,
    endings: Receiver<Ending>,
}

impl VcpuThread {
    fn start<'scope>(
        scope: &'scope Scope<'scope, '_>,
        index: usize,
        mut guest: KvmGuest,
        cpu: Option<u32>,
    ) -> Result<VcpuThread, Failure> {
        let (jobs, posted) = channel::<WriteJob>();
        let (ended, endings) = channel();
        let work = move || {
            let pinned = cpu.map_or(Ok(()), pin_current_thread).map_err(MachineError::from);
            // If the receiver is gone, so is the sender of jobs, and the loop ends.
            let _ = ended.send((Instant::now(), pinned.map_err(Failure::from)));
            for job in posted {
                let written = guest.write_pages(job.pages, job.first);
                let _ = ended.send((Instant::now(), written.map_err(Failure::from)));
            }
        };
        thread::Builder::new()
            .name(format!("kvm vcpu {index}"))
            .spawn_scoped(scope, work)
            .map_err(|error| no_thread(&error))?;
        Ok(VcpuThread { jobs, endings })
    }

    /// Waits for the end of the posted job, and returns its time.
    fn ended(&self) -> Result<Instant, Failure> {
        let (end, result) = self.endings.recv().map_err(|_| check_failed("the thread of a vCPU of KVM panicked"))?;
        result.map(|()| end)
    }
}

pub(super) struct Vcpus(Vec<VcpuThread>);

impl Vcpus {
    /// Has each vCPU write `round` to the pages of `part`. Returns the time from the post to the
    /// end of the last vCPU.
    pub(super) fn write(&self, part: impl Fn(u64) -> Range<u64>, round: u64) -> Result<Duration, Failure> {
        let begin = Instant::now();
        for (vcpu, thread) in (0..).zip(&self.0) {
            let pages = part(vcpu);
            let first = value(round, pages.start);
            // A thread that has ended is noticed below.
            let _ = thread.jobs.send(WriteJob { pages, first });
        }
        // All threads are awaited, also after a failure: no vCPU runs when this returns.
        let ends: Vec<_> = self.0.iter().map(VcpuThread::ended).collect();
        let last = ends.into_iter().try_fold(begin, |last, end| Ok::<_, Failure>(last.max(end?)))?;
        Ok(last - begin)
    }
}

/// Runs `action` with a thread for each of `guests`, on the CPUs that `pins` names.
pub(super) fn with_threads<R>(
    guests: Vec<KvmGuest>,
    pins: Option<&Pins>,
    action: impl FnOnce(&Vcpus) -> Result<R, Failure>,
) -> Result<R, Failure> {
    thread::scope(|scope| {
        let cpu = |index| pins.and_then(|pins| pins.vcpus.get(index).copied());
        let start = |(index, guest)| VcpuThread::start(scope, index, guest, cpu(index));
        // Dropped at the end of the closure in any case, which ends the threads.
        let vcpus = Vcpus(guests.into_iter().enumerate().map(start).collect::<Result<_, _>>()?);
        vcpus.0.iter().try_for_each(|thread| thread.ended().map(drop))?;
        action(&vcpus)
    })
}
