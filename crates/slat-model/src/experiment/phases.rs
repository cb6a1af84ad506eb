//! The phases of a dirty-logging migration, as KVM's dirty_log_perf_test has them: populate memory,
//! enable dirty logging, dirty memory and get the dirty log in rounds, disable dirty logging.

use slat_costed::baselines::Locking;
pub use slat_costed::dirty::DirtyTracking;
use slat_costed::{Access, Config, Error, Gfn, MemoryRegionFlags, PageSize};

use super::failure::Failure;
use super::vm::{GuestVm, VmShape, check_pages, cpus_for, pages_apart};
use crate::error::ModelError;
pub use crate::guest::Around;
use crate::guest::{GuestWork, Hypervisor, ModificationLog};
use crate::host::Backing;
use crate::machine::{self, Report};
use crate::parameters::{Parameters, Ps, ns};
use crate::topology::Topology;

/// Which pages each vCPU accesses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// Its own part.
    Partitioned,
    /// All.
    Overlapping,
}

/// The lock of the VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lock {
    /// None: slat.
    None,
    /// A queued reader/writer lock.
    Shared,
    /// A queued spinlock.
    Exclusive,
}

impl Lock {
    pub(super) fn locking(self) -> Locking {
        match self {
            Lock::None => Locking::None,
            Lock::Shared => Locking::Shared,
            Lock::Exclusive => Locking::Exclusive,
        }
    }
}

/// An experiment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Phases {
    /// vCPUs, each on a CPU of its own.
    pub nr_vcpus: usize,
    /// Pages of 4 KiB: of each vCPU's part, or with overlapping accesses of all.
    pub nr_pages: u64,
    /// Which of them each vCPU accesses.
    pub sharing: Sharing,
    /// The lock of the VM.
    pub lock: Lock,
    /// Whose faults these are.
    pub hypervisor: Hypervisor,
    /// How writes are found.
    pub tracking: DirtyTracking,
    /// Rounds of dirtying.
    pub nr_rounds: u32,
    /// What is around the engine.
    pub around: Around,
    /// For what is random: when vCPUs begin.
    pub seed: u64,
}

/// The times of the phases, in nanoseconds of virtual time.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PhaseTimes {
    /// Populate memory.
    pub populate_ns: u64,
    /// Enable dirty logging.
    pub enable_ns: u64,
    /// Dirty memory, each round.
    pub dirty_ns: Vec<u64>,
    /// Get the dirty log, each round.
    pub get_ns: Vec<u64>,
    /// Disable dirty logging.
    pub disable_ns: u64,
    /// Pages that the logs had.
    pub nr_logged: u64,
}

/// What a run has shown.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PhasesRun {
    /// The times.
    pub times: PhaseTimes,
    /// Where they went.
    pub report: Report,
}

impl Phases {
    /// Runs the phases on `topology`.
    ///
    /// # Errors
    /// [`ModelError::TooManyVcpus`]; [`ModelError::Engine`]; [`ModelError::Check`] if the log lacks
    /// a page that was written.
    pub fn run(&self, topology: &Topology, parameters: &Parameters) -> Result<PhasesRun, ModelError> {
        let cpus = cpus_for(topology, self.nr_vcpus)?;
        check_pages(self.nr_pages, if self.sharing == Sharing::Partitioned { self.nr_vcpus } else { 1 })?;
        let is_logged = self.tracking == DirtyTracking::PageModificationLog;
        let shape = VmShape {
            topology: topology.clone(),
            parameters: parameters.clone(),
            cpus,
            nr_pages: self.nr_pages_of_slot(),
            backing: Backing::Anonymous,
            page_size: PageSize::Size4K,
            config: Config::default().with_dirty_tracking(self.tracking).with_locking(self.lock.locking()),
            work: GuestWork::new(parameters, self.hypervisor, self.around),
            modification_log: if is_logged { ModificationLog::On } else { ModificationLog::Off },
            around: self.around,
            moves: false,
            seed: self.seed,
        };
        let phases = self.clone();
        let outcome = machine::run(topology, parameters, move || phases.run_as_task(shape))?;
        Ok(PhasesRun { times: outcome.result?, report: outcome.report })
    }

    fn nr_pages_in_all(&self) -> u64 {
        match self.sharing {
            Sharing::Partitioned => self.nr_pages * self.nr_vcpus as u64,
            Sharing::Overlapping => self.nr_pages,
        }
    }

    /// Pages of the memslot, in which each vCPU has a part.
    fn nr_pages_of_slot(&self) -> u64 {
        match self.sharing {
            Sharing::Partitioned => pages_apart(self.nr_pages) * self.nr_vcpus as u64,
            Sharing::Overlapping => self.nr_pages,
        }
    }

    fn run_as_task(&self, shape: VmShape) -> Result<PhaseTimes, Failure> {
        let of_leaf = self.work_of_kvm(&shape.parameters);
        let guest = GuestVm::new(shape)?;
        let nr_pages = self.nr_pages_in_all();
        let mut times = PhaseTimes { populate_ns: ns(self.pass(&guest, Access::Write)?), ..PhaseTimes::default() };
        let (set, time) = guest.timed(|| {
            let set = guest.set_flags(MemoryRegionFlags::LOG_DIRTY_PAGES);
            guest.of_kvm(nr_pages, of_leaf.enable);
            set
        });
        set?;
        times.enable_ns = ns(time);
        let mut bitmap = vec![0_u64; self.nr_pages_of_slot().div_ceil(64) as usize];
        for round in 0..self.nr_rounds {
            times.dirty_ns.push(ns(self.pass(&guest, Access::Write)?));
            let (got, time) = guest.timed(|| {
                let got = guest.vm.get_dirty_log(0, &mut bitmap);
                guest.of_kvm(nr_pages, of_leaf.get);
                got
            });
            let nr_logged = got.map_err(Error::from)?;
            if nr_logged != nr_pages {
                return Err(Failure::Check(format!(
                    "round {round}: {nr_pages} pages were written, and the log has {nr_logged}"
                )));
            }
            times.nr_logged += nr_logged;
            times.get_ns.push(ns(time));
        }
        let (set, time) = guest.timed(|| guest.set_flags(MemoryRegionFlags::empty()));
        set?;
        times.disable_ns = ns(time);
        Ok(times)
    }

    /// The plain work of KVM for a leaf, by which code it runs.
    fn work_of_kvm(&self, parameters: &Parameters) -> WorkOfKvm {
        let kvm = &parameters.kvm;
        let (enable, get) = match self.lock {
            Lock::Exclusive => (kvm.enable_instructions_alone, kvm.get_instructions_alone),
            Lock::None | Lock::Shared => (kvm.enable_instructions_shared, kvm.get_instructions_shared),
        };
        let [enable, get] = [enable, get].map(|instructions| parameters.instructions(instructions.get()));
        WorkOfKvm { enable, get }
    }

    /// Each vCPU accesses each of its pages once.
    fn pass(&self, guest: &GuestVm, access: Access) -> Result<Ps, Error> {
        let (nr_pages, sharing) = (self.nr_pages, self.sharing);
        guest.run(move |vcpu, index| {
            let first = if sharing == Sharing::Partitioned { index as u64 * pages_apart(nr_pages) } else { 0 };
            for page in first..first + nr_pages {
                vcpu.touch_memory(Gfn(page));
                vcpu.access(Gfn(page), access)?;
            }
            Ok(())
        })
    }
}

/// Plain work for a leaf PTE in picoseconds.
struct WorkOfKvm {
    enable: Ps,
    get: Ps,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phases(nr_vcpus: usize, lock: Lock, sharing: Sharing, around: Around) -> Phases {
        let (hypervisor, tracking) = (Hypervisor::Slat, DirtyTracking::WriteProtect);
        Phases { nr_vcpus, nr_pages: 512, sharing, lock, hypervisor, tracking, nr_rounds: 2, around, seed: 1 }
    }

    fn run(phases: &Phases) -> PhasesRun {
        let topology = Topology::with_cpus(phases.nr_vcpus).unwrap();
        phases.run(&topology, &Parameters::built_in().unwrap()).unwrap()
    }

    #[test]
    fn a_run_is_the_same_each_time_with_each_lock() {
        for lock in [Lock::None, Lock::Shared, Lock::Exclusive] {
            for sharing in [Sharing::Partitioned, Sharing::Overlapping] {
                let phases = phases(24, lock, sharing, Around::Host);
                let first = run(&phases);
                assert_eq!(first, run(&phases), "{lock:?} {sharing:?}");
                let nr_pages = if sharing == Sharing::Partitioned { 512 * 24 } else { 512 };
                assert_eq!(first.times.nr_logged, 2 * nr_pages);
            }
        }
    }

    #[test]
    fn without_a_lock_96_cpus_populate_more_than_60_times_as_fast_as_one() {
        let rate = |nr_vcpus| {
            let phases = Phases {
                nr_pages: 4096,
                nr_rounds: 0,
                ..phases(nr_vcpus, Lock::None, Sharing::Partitioned, Around::Nothing)
            };
            4096.0 * nr_vcpus as f64 / run(&phases).times.populate_ns as f64
        };
        let gain = rate(96) / rate(1);
        assert!(gain > 60.0, "{gain}");
    }

    #[test]
    fn no_phase_is_slower_than_with_one_lock() {
        for sharing in [Sharing::Partitioned, Sharing::Overlapping] {
            let [none, one] = [Lock::None, Lock::Exclusive]
                .map(|lock| run(&Phases { nr_pages: 2048, ..phases(96, lock, sharing, Around::Nothing) }).times);
            let sum = |times: &[u64]| times.iter().sum::<u64>();
            for (name, none, one) in [
                ("populate", none.populate_ns, one.populate_ns),
                ("enable", none.enable_ns, one.enable_ns),
                ("dirty", sum(&none.dirty_ns), sum(&one.dirty_ns)),
                ("get", sum(&none.get_ns), sum(&one.get_ns)),
                ("disable", none.disable_ns, one.disable_ns),
            ] {
                assert!(none <= one + one / 10 + 2000, "{sharing:?} {name}: {none} ns, with one lock {one}");
            }
        }
    }

    #[test]
    fn a_number_of_vcpus_that_the_machine_does_not_have_is_an_error() {
        for nr_vcpus in [0, 3] {
            let phases = phases(nr_vcpus, Lock::None, Sharing::Partitioned, Around::Host);
            let error = phases.run(&Topology::named("1x2").unwrap(), &Parameters::built_in().unwrap()).unwrap_err();
            assert!(matches!(error, ModelError::TooManyVcpus { nr_cpus: 2, .. }), "{error}");
        }
    }
}
