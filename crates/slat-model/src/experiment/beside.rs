//! Operations of the hypervisor beside vCPUs that fault: how many of both there are, and how long
//! the longest of each waits.
//!
//! Each vCPU writes the pages of its part, round after round, for a time. Meanwhile another thread
//! harvests the dirty log, or invalidates pages. There may be more vCPUs than CPUs: then they are
//! preempted anywhere, inside the engine, too.

use std::cell::Cell;
use std::rc::Rc;

use slat_costed::{Access, Config, Error, Gfn, GfnRange, MemoryRegionFlags, PageSize};

use super::failure::Failure;
use super::phases::{Around, Lock};
use super::vm::{GuestVm, VmShape, check_pages, cpus_for, pages_apart};
use crate::error::ModelError;
use crate::guest::{GuestWork, Hypervisor, ModificationLog};
use crate::host::Backing;
use crate::machine::{self, LockKind, Report};
use crate::parameters::{PS_PER_NS, Parameters, Ps, ns};
use crate::topology::Topology;

/// For how long a guest computes that has all of its pages, before it writes them again.
const COMPUTES: Ps = 1000 * PS_PER_NS;

/// What the hypervisor's thread does all the time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// Nothing.
    Nothing,
    /// It gets the dirty log of the whole memslot.
    Harvest,
    /// It invalidates a page of a vCPU's part, another one each time.
    InvalidatePage,
    /// It invalidates 2 MiB that no vCPU uses.
    InvalidateUnused,
}

/// An experiment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Beside {
    /// vCPUs.
    pub nr_vcpus: usize,
    /// CPUs on which they run; another one is for the hypervisor's thread.
    pub nr_cpus: usize,
    /// Pages of 4 KiB of each vCPU.
    pub nr_pages: u64,
    /// The lock of the VM.
    pub lock: Lock,
    /// How tasks wait for it.
    pub lock_kind: LockKind,
    /// What runs beside the vCPUs.
    pub operation: Operation,
    /// What is around the engine.
    pub around: Around,
    /// For how long, in nanoseconds of virtual time.
    pub duration_ns: u64,
    /// For what is random: when vCPUs begin.
    pub seed: u64,
}

/// How many there were, and the longest.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Counted {
    /// How many.
    pub count: u64,
    /// The longest in nanoseconds, without the time in which its own thread had no CPU.
    pub longest_ns: u64,
    /// All together in nanoseconds, likewise.
    pub total_ns: u64,
}

/// What a run has shown.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BesideRun {
    /// Accesses of all vCPUs that faulted.
    pub faults: Counted,
    /// Calls of the hypervisor's thread.
    pub operations: Counted,
    /// Rounds in which a vCPU had all of its pages, so that it faulted less than it could.
    pub nr_idle_rounds: u64,
    /// The time of the run in nanoseconds.
    pub duration_ns: u64,
    /// Where it went.
    pub report: Report,
}

/// What all vCPUs have done.
#[derive(Clone, Default)]
struct Vcpus {
    faults: Counted,
    nr_idle_rounds: u64,
}

impl Counted {
    fn add(&mut self, time: Ps) {
        let ns = ns(time);
        self.count += 1;
        self.total_ns += ns;
        self.longest_ns = self.longest_ns.max(ns);
    }

    fn join(&mut self, other: &Counted) {
        self.count += other.count;
        self.total_ns += other.total_ns;
        self.longest_ns = self.longest_ns.max(other.longest_ns);
    }
}

impl Beside {
    /// Runs the experiment on `topology`.
    ///
    /// # Errors
    /// [`ModelError::TooManyVcpus`] if there are not enough CPUs; [`ModelError::Engine`].
    pub fn run(&self, topology: &Topology, parameters: &Parameters) -> Result<BesideRun, ModelError> {
        // The first is for the hypervisor's thread, if there is one more.
        let nr_cpus = (self.nr_cpus + 1).min(topology.nr_cpus());
        cpus_for(topology, self.nr_cpus)?;
        check_pages(self.nr_pages, self.nr_vcpus.saturating_add(1))?;
        if self.nr_vcpus == 0 {
            cpus_for(topology, 0)?;
        }
        let spread = topology.spread(nr_cpus);
        let of_vcpus = &spread[nr_cpus - self.nr_cpus..];
        let own_cpu = spread[0];
        let shape = VmShape {
            topology: topology.clone(),
            parameters: parameters.clone(),
            cpus: (0..self.nr_vcpus).map(|vcpu| of_vcpus[vcpu % of_vcpus.len()]).collect(),
            nr_pages: pages_apart(self.nr_pages) * (self.nr_vcpus as u64 + 1),
            backing: Backing::Anonymous,
            page_size: PageSize::Size4K,
            config: Config::default().with_locking(self.lock.locking()),
            work: GuestWork::new(parameters, Hypervisor::Slat, self.around),
            modification_log: ModificationLog::Off,
            around: self.around,
            moves: false,
            seed: self.seed,
        };
        let beside = self.clone();
        let outcome = machine::run(topology, parameters, move || beside.run_as_task(shape, own_cpu))?;
        let (vcpus, operations, duration) = outcome.result?;
        let Vcpus { faults, nr_idle_rounds } = vcpus;
        Ok(BesideRun { faults, operations, nr_idle_rounds, duration_ns: ns(duration), report: outcome.report })
    }

    fn run_as_task(&self, shape: VmShape, own_cpu: usize) -> Result<(Vcpus, Counted, Ps), Failure> {
        machine::set_lock_kind(self.lock_kind);
        let guest = Rc::new(GuestVm::new(shape)?);
        guest.set_flags(MemoryRegionFlags::LOG_DIRTY_PAGES)?;
        let duration = self.duration_ns * PS_PER_NS;
        let end = machine::now() + duration;
        // Each vCPU counts itself out. The main task would end the operations late: it has to wait
        // for a CPU.
        let nr_running = Rc::new(Cell::new(self.nr_vcpus));
        let operations = {
            let (guest, nr_running) = (Rc::clone(&guest), Rc::clone(&nr_running));
            let (operation, nr_pages, nr_vcpus) = (self.operation, self.nr_pages, self.nr_vcpus as u64);
            let counted = Rc::new(std::cell::RefCell::new(Ok(Counted::default())));
            let to = Rc::clone(&counted);
            let task = machine::spawn(own_cpu, move || {
                // A fault that never ends beside it shall be seen, and not last for ever.
                let is_over = || nr_running.get() == 0 || machine::now() > end + 10 * duration;
                *to.borrow_mut() = operate(&guest, operation, nr_pages, nr_vcpus, is_over);
            });
            (task, counted)
        };
        let vcpus = Rc::new(std::cell::RefCell::new(Vcpus::default()));
        let to = Rc::clone(&vcpus);
        let nr_pages = self.nr_pages;
        let nr_left = Rc::clone(&nr_running);
        let ran = guest.run(move |vcpu, index| -> Result<(), Error> {
            let (mut counted, mut nr_idle_rounds) = (Counted::default(), 0);
            let first = index as u64 * pages_apart(nr_pages);
            'all: loop {
                let nr_before = counted.count;
                for page in first..first + nr_pages {
                    if machine::now() >= end {
                        break 'all;
                    }
                    vcpu.touch_memory(Gfn(page));
                    if vcpu.translate(Gfn(page), Access::Write).is_none() {
                        let (result, time) = timed_with_cpu(|| vcpu.access(Gfn(page), Access::Write));
                        result?;
                        counted.add(time);
                    }
                }
                if counted.count == nr_before {
                    // It has all of its pages, and computes.
                    nr_idle_rounds += 1;
                    machine::elapse(COMPUTES);
                }
            }
            let mut all = to.borrow_mut();
            all.faults.join(&counted);
            all.nr_idle_rounds += nr_idle_rounds;
            nr_left.set(nr_left.get() - 1);
            Ok(())
        });
        // After an error, too.
        nr_running.set(0);
        machine::join(operations.0);
        let time = ran?;
        let operations = std::mem::replace(&mut *operations.1.borrow_mut(), Ok(Counted::default()))?;
        let vcpus = vcpus.borrow().clone();
        Ok((vcpus, operations, time))
    }
}

/// The time of `f`, without that in which this task had no CPU.
fn timed_with_cpu<R>(f: impl FnOnce() -> R) -> (R, Ps) {
    let without = machine::without_cpu();
    let (result, time) = machine::timed(f);
    (result, time.saturating_sub(machine::without_cpu() - without))
}

/// Does `operation` again and again, until the vCPUs have ended.
fn operate(
    guest: &GuestVm,
    operation: Operation,
    nr_pages: u64,
    nr_vcpus: u64,
    is_over: impl Fn() -> bool,
) -> Result<Counted, Error> {
    let mut counted = Counted::default();
    let mut bitmap = vec![0_u64; (pages_apart(nr_pages) * (nr_vcpus + 1)).div_ceil(64) as usize];
    guest.begin_call();
    for turn in 0_u64.. {
        if is_over() || operation == Operation::Nothing {
            break;
        }
        let part = turn % nr_vcpus * pages_apart(nr_pages);
        let range = |first: u64, nr_pages: u64| GfnRange { start: Gfn(first), end: Gfn(first + nr_pages) };
        let (result, time) = timed_with_cpu(|| -> Result<(), Error> {
            match operation {
                Operation::Nothing => {}
                Operation::Harvest => _ = guest.vm.get_dirty_log(0, &mut bitmap)?,
                Operation::InvalidatePage => {
                    drop(guest.vm.invalidate_range(range(part + turn / nr_vcpus % nr_pages, 1))?);
                }
                Operation::InvalidateUnused => {
                    drop(guest.vm.invalidate_range(range(nr_vcpus * pages_apart(nr_pages), 512))?);
                }
            }
            Ok(())
        });
        result?;
        counted.add(time);
    }
    Ok(counted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(lock: Lock, lock_kind: LockKind, operation: Operation, nr_vcpus: usize, nr_cpus: usize) -> BesideRun {
        let beside = Beside {
            nr_vcpus,
            nr_cpus,
            nr_pages: 256,
            lock,
            lock_kind,
            operation,
            around: Around::Nothing,
            duration_ns: 100_000,
            seed: 1,
        };
        beside.run(&Topology::named("2x48").unwrap(), &Parameters::built_in().unwrap()).unwrap()
    }

    /// Each invalidation leaves another number in the empty PTE above a page-table page that the
    /// fault is about to link. A fault that filled its page anew after each of them never won.
    #[test]
    fn a_fault_wins_beside_a_thread_that_invalidates_its_neighbours_all_the_time() {
        for nr_vcpus in [1, 8, 40] {
            let alone = run(Lock::None, LockKind::Spinning, Operation::Nothing, nr_vcpus, nr_vcpus);
            let beside = run(Lock::None, LockKind::Spinning, Operation::InvalidateUnused, nr_vcpus, nr_vcpus);
            assert!(beside.operations.count > 50, "{beside:?}");
            let (longest, alone) = (beside.faults.longest_ns, alone.faults.longest_ns);
            assert!(longest < alone + 20_000, "{nr_vcpus} vCPUs: a fault of {longest} ns, alone {alone}");
        }
    }

    #[test]
    fn operations_go_on_beside_faults() {
        for operation in [Operation::Harvest, Operation::InvalidatePage] {
            for lock in [Lock::None, Lock::Shared, Lock::Exclusive] {
                let run = run(lock, LockKind::Spinning, operation, 8, 8);
                assert!(run.faults.count > 20 && run.operations.count > 1, "{lock:?} {operation:?}: {run:?}");
            }
        }
    }

    #[test]
    fn vcpus_that_nothing_takes_pages_from_are_idle_in_the_end() {
        let idle = |operation| run(Lock::None, LockKind::Spinning, operation, 2, 2).nr_idle_rounds;
        assert!(idle(Operation::Nothing) > 10);
        assert!(idle(Operation::Harvest) < idle(Operation::Nothing));
    }

    #[test]
    fn operations_end_with_the_faults_that_they_are_beside() {
        for lock in [Lock::None, Lock::Exclusive] {
            let run = run(lock, LockKind::Spinning, Operation::InvalidatePage, 8, 8);
            let Counted { total_ns, longest_ns, .. } = run.operations;
            assert!(total_ns > run.duration_ns / 2, "{lock:?}: {run:?}");
            assert!(total_ns <= run.duration_ns + longest_ns, "{lock:?}: {run:?}");
        }
    }

    #[test]
    fn without_a_lock_nothing_waits_for_a_vcpu_that_was_preempted() {
        let quantum_ns = 4_000_000;
        let longest = |lock, lock_kind| {
            let beside = Beside {
                nr_vcpus: 16,
                nr_cpus: 4,
                nr_pages: 2048,
                lock,
                lock_kind,
                operation: Operation::InvalidatePage,
                around: Around::Nothing,
                duration_ns: 20_000_000,
                seed: 1,
            };
            let run = beside.run(&Topology::named("1x16").unwrap(), &Parameters::built_in().unwrap()).unwrap();
            run.faults.longest_ns.max(run.operations.longest_ns)
        };
        let without = longest(Lock::None, LockKind::Sleeping);
        assert!(without < quantum_ns / 10, "{without} ns");
        let behind_a_lock = longest(Lock::Exclusive, LockKind::Sleeping);
        assert!(behind_a_lock > 3 * without, "{behind_a_lock} ns, without {without}");
    }
}
