//! Demand paging, as KVM's demand_paging_test has it: each vCPU writes each page of its own part of
//! the memory once, and user space resolves the pages. By userfaultfd, by exits of the vCPUs, or by
//! both.
//!
//! # Implementation
//! With exits the memslot has the flag `USERFAULT`, and all bits of its bitmap are set.
//! The thread of the vCPU, back in user space, resolves the page, clears its bit and runs the vCPU
//! again: by an ioctl of the descriptor that wakes nothing, or without a descriptor by a write to
//! the page. The vCPU then finds the page by a lookup without locks.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};

use slat_costed::baselines::{AtomicU64, Locking};
use slat_costed::slots::{MemoryFaultFlags, UserfaultBitmap};
use slat_costed::{Access, Config, Exit, Gfn, Gpa, PageSize};

use super::failure::Failure;
use super::vm::{GuestVm, VmShape, cpus_for};
use crate::error::ModelError;
use crate::guest::{Accessed, Around, GuestWork, Hypervisor, ModificationLog};
use crate::host::{Backing, UserfaultShape, Wakeup};
use crate::machine::{self, Report};
use crate::parameters::{PS_PER_NS, Parameters, Ps, ns};
use crate::topology::Topology;

/// The descriptors of userfaultfd.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Uffds {
    /// One of the whole memory.
    One,
    /// One for the part of each vCPU.
    PerVcpu,
}

/// How user space resolves pages. With userfaultfd it copies them (`MISSING`), and continues those
/// that are there ([`Backing::Allocated`], `MINOR`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Not at all: the operating system does.
    None,
    /// By userfaultfd, with one reader for each descriptor.
    UserfaultfdOneReader,
    /// By userfaultfd, with one reader for each vCPU.
    Userfaultfd,
    /// By the vCPU's thread after an exit, through the descriptor.
    UserfaultfdAndExits,
    /// By the vCPU's thread after an exit, with a write.
    Exits,
}

/// An experiment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Userfault {
    /// vCPUs, each on a CPU of its own.
    pub nr_vcpus: usize,
    /// Pages of 4 KiB of each vCPU's part.
    pub nr_pages: u64,
    /// What the memory is: anonymous, or shared memory whose pages were allocated before.
    pub backing: Backing,
    /// The descriptors.
    pub uffds: Uffds,
    /// How pages are resolved.
    pub mode: Mode,
    /// Whose faults these are: KVM's, with a reader/writer lock, or slat's, without one.
    pub hypervisor: Hypervisor,
    /// For what is random: when vCPUs begin.
    pub seed: u64,
}

/// What a run has shown.
#[derive(Clone, PartialEq, Debug)]
pub struct UserfaultRun {
    /// Pages per second for each vCPU.
    pub pages_per_second: f64,
    /// The time from the start of the vCPUs to the end of the last, in nanoseconds.
    pub elapsed_ns: u64,
    /// Pages that arrived: all.
    pub nr_arrived: u64,
    /// Exits to user space.
    pub nr_exits: u64,
    /// Where the time went.
    pub report: Report,
}

/// What the main task returns.
#[derive(Clone)]
struct Ran {
    elapsed: Ps,
    nr_exits: u64,
    nr_arrived: u64,
}

impl Mode {
    fn uses_userfaultfd(self) -> bool {
        !matches!(self, Mode::None | Mode::Exits)
    }

    fn uses_exits(self) -> bool {
        matches!(self, Mode::UserfaultfdAndExits | Mode::Exits)
    }
}

impl Userfault {
    /// Runs the vCPUs on `topology`.
    ///
    /// # Errors
    /// [`ModelError::TooManyVcpus`]; [`ModelError::Engine`]; [`ModelError::Check`] if a page has
    /// not arrived, or was resolved twice.
    pub fn run(&self, topology: &Topology, parameters: &Parameters) -> Result<UserfaultRun, ModelError> {
        let cpus = cpus_for(topology, self.nr_vcpus)?;
        let locking = match self.hypervisor {
            Hypervisor::Slat => Locking::None,
            Hypervisor::Kvm => Locking::Shared,
        };
        let shape = VmShape {
            topology: topology.clone(),
            parameters: parameters.clone(),
            cpus,
            nr_pages: self.nr_pages_in_all(),
            // The pages of shared memory are placed below: the process has not mapped them.
            backing: Backing::Anonymous,
            config: Config::default().with_locking(locking),
            work: GuestWork::new(parameters, self.hypervisor, Around::Host),
            page_size: PageSize::Size4K,
            moves: false,
            modification_log: ModificationLog::Off,
            around: Around::Host,
            seed: self.seed,
        };
        let experiment = self.clone();
        let outcome = machine::run(topology, parameters, move || experiment.run_as_task(shape))?;
        let Ran { elapsed, nr_exits, nr_arrived } = outcome.result?;
        Ok(UserfaultRun {
            pages_per_second: self.nr_pages as f64 * 1e9 * PS_PER_NS as f64 / elapsed.max(1) as f64,
            elapsed_ns: ns(elapsed),
            nr_arrived,
            nr_exits,
            report: outcome.report,
        })
    }

    fn nr_pages_in_all(&self) -> u64 {
        self.nr_pages.saturating_mul(self.nr_vcpus as u64)
    }

    /// How many descriptors there are, and how many threads read each.
    fn descriptors(&self) -> (usize, usize) {
        match self.uffds {
            _ if !self.mode.uses_userfaultfd() => (0, 0),
            Uffds::One if self.mode == Mode::UserfaultfdOneReader => (1, 1),
            Uffds::One => (1, self.nr_vcpus),
            Uffds::PerVcpu => (self.nr_vcpus, 1),
        }
    }

    fn run_as_task(&self, shape: VmShape) -> Result<Ran, Failure> {
        let nr_pages = self.nr_pages_in_all();
        let user_exit = shape.parameters.userfault.user_exit.ps();
        let parameters = shape.parameters.clone();
        // The CPUs that the vCPUs leave free, or else theirs.
        let nr_cpus = shape.topology.nr_cpus();
        let free_cpus = match shape.topology.spread(nr_cpus).split_off(self.nr_vcpus) {
            free if free.is_empty() => shape.cpus.clone(),
            free => free,
        };
        let guest = GuestVm::new(shape)?;
        if self.backing == Backing::Allocated {
            // By a program on the first node.
            (0..nr_pages).for_each(|page| guest.vm.host().place_shared(page, 0));
        }
        let (nr_descriptors, nr_readers) = self.descriptors();
        guest.vm.host().use_userfault(
            UserfaultShape { part_pages: self.nr_pages, nr_parts: self.nr_vcpus, nr_descriptors, nr_readers },
            &parameters,
        );
        let words: Arc<Vec<AtomicU64>> =
            Arc::new((0..nr_pages.div_ceil(64)).map(|_| AtomicU64::new(u64::MAX)).collect());
        if self.mode.uses_exits() {
            guest.set_userfault(UserfaultBitmap::new(Arc::clone(&words) as _, PageSize::Size4K))?;
        }

        let counts = Rc::new(Counts::default());
        let readers: Vec<_> = (0..nr_descriptors * nr_readers)
            .map(|index| {
                let (vm, counts) = (Arc::clone(&guest.vm), Rc::clone(&counts));
                machine::spawn(free_cpus[index % free_cpus.len()], move || {
                    while let Some(message) = vm.host().read_message(index / nr_readers, index % nr_readers) {
                        counts.resolved(vm.host().resolve_userfault(message.page, Wakeup::Faults));
                    }
                })
            })
            .collect();
        let ran = self.run_vcpus(&guest, &words, &counts, user_exit);
        guest.vm.host().close_descriptors();
        readers.into_iter().for_each(machine::join);
        let elapsed = ran?;

        let nr_arrived = (0..nr_pages).filter(|&page| guest.vm.host().is_mapped(page)).count() as u64;
        let nr_resolved = if self.mode == Mode::None { nr_pages } else { counts.nr_resolved.get() };
        let nr_marked = words.iter().map(|word| u64::from(word.load(Relaxed).count_ones())).sum::<u64>();
        let is_marked = self.mode.uses_exits() && nr_marked != words.len() as u64 * 64 - nr_pages;
        if [nr_arrived, nr_resolved] != [nr_pages; 2] || counts.nr_twice.get() != 0 || is_marked {
            return Err(Failure::Check(format!(
                "of {nr_pages} pages {nr_resolved} were resolved, {} twice, and {nr_arrived} arrived; {nr_marked} bits \
                 are set",
                counts.nr_twice.get()
            )));
        }
        Ok(Ran { elapsed, nr_exits: counts.nr_exits.get(), nr_arrived })
    }

    /// Each vCPU writes each page of its part. Returns the time until the last has done so.
    fn run_vcpus(
        &self,
        guest: &GuestVm,
        words: &Arc<Vec<AtomicU64>>,
        counts: &Rc<Counts>,
        user_exit: Ps,
    ) -> Result<Ps, Failure> {
        let (mode, nr_pages) = (self.mode, self.nr_pages);
        let (vm, words, counts) = (Arc::clone(&guest.vm), Arc::clone(words), Rc::clone(counts));
        guest.run(move |vcpu, index| {
            let first = index as u64 * nr_pages;
            for page in first..first + nr_pages {
                vcpu.touch_memory(Gfn(page));
                while let Accessed::Exit(exit) = vcpu.access(Gfn(page), Access::Write)? {
                    let expected = Exit::MemoryFault {
                        flags: MemoryFaultFlags::USERFAULT,
                        gpa: Gpa(page << Gfn::SHIFT),
                        size: PageSize::Size4K.size_bytes(),
                    };
                    if exit != expected {
                        return Err(Failure::Check(format!("a write to page {page} exited: {exit}")));
                    }
                    counts.nr_exits.set(counts.nr_exits.get() + 1);
                    vcpu.leave();
                    machine::work(user_exit);
                    counts.resolved(match mode {
                        Mode::UserfaultfdAndExits => vm.host().resolve_userfault(page, Wakeup::Nothing),
                        _ => vm.host().write_page(page),
                    });
                    words[(page / 64) as usize].fetch_and(!(1 << (page % 64)), Release);
                    vcpu.enter();
                }
            }
            Ok(())
        })
    }
}

#[derive(Default)]
struct Counts {
    nr_exits: Cell<u64>,
    nr_resolved: Cell<u64>,
    nr_twice: Cell<u64>,
}

impl Counts {
    fn resolved(&self, is_new: bool) {
        let counter = if is_new { &self.nr_resolved } else { &self.nr_twice };
        counter.set(counter.get() + 1);
    }
}

#[cfg(test)]
#[path = "userfault_tests.rs"]
mod tests;
