//! The phases of a dirty-logging migration, as KVM's dirty_log_perf_test has them: populate memory,
//! enable dirty logging, dirty memory and get the dirty log in rounds, disable dirty logging.

use slat_costed::baselines::Locking;
pub use slat_costed::dirty::DirtyTracking;
use slat_costed::{Access, Config, Error, Gfn, MemoryRegionFlags};

use super::failure::Failure;
use super::vm::{GuestVm, VmShape};
use crate::error::ModelError;
use crate::guest::{GuestWork, Hypervisor, ModificationLog};
use crate::host::Backing;
use crate::machine::{self, Report};
use crate::parameters::{PS_PER_NS, Parameters, Ps};
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

/// What is around the engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Around {
    /// The exits, the operating system and the guest's own work.
    Host,
    /// Nothing.
    Nothing,
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
        let nr_cpus = topology.nr_cpus();
        if self.nr_vcpus > nr_cpus || self.nr_vcpus == 0 {
            return Err(ModelError::TooManyVcpus {
                nr_vcpus: self.nr_vcpus,
                nr_cpus,
                topology: topology.name().to_owned(),
            });
        }
        let is_engine_alone = self.around == Around::Nothing;
        let is_logged = self.tracking == DirtyTracking::PageModificationLog;
        let shape = VmShape {
            topology: topology.clone(),
            parameters: parameters.clone(),
            cpus: topology.spread(self.nr_vcpus),
            nr_pages: self.nr_pages_in_all(),
            backing: Backing::Anonymous,
            config: Config::default().with_dirty_tracking(self.tracking).with_locking(match self.lock {
                Lock::None => Locking::None,
                Lock::Shared => Locking::Shared,
                Lock::Exclusive => Locking::Exclusive,
            }),
            work: GuestWork::new(parameters, self.hypervisor, is_engine_alone),
            modification_log: if is_logged { ModificationLog::On } else { ModificationLog::Off },
            is_engine_alone,
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
        let mut bitmap = vec![0_u64; nr_pages.div_ceil(64) as usize];
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
            let first = if sharing == Sharing::Partitioned { index as u64 * nr_pages } else { 0 };
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

fn ns(time: Ps) -> u64 {
    time / PS_PER_NS
}
