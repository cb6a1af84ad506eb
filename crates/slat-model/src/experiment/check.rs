//! All oracles on the modelled machine: guests write and read everywhere, while other CPUs do
//! everything else. A seed replays exactly.
//!
//! # Guarantees
//! A run fails if
//! - a CPU accesses a frame that is not its page's any more (a stale translation),
//! - a read finds something else than what was written last,
//! - a page was written and no harvest reports it: a copy of the memory, kept up by harvests alone,
//!   is not the memory when the guests have stopped.
//!
//! # Implementation
//! All runs on one thread of the system. An access of the guest to its memory, between the
//! translation and the next step of any CPU, is one step. So the oracles are plain variables.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use slat_costed::dirty::{DirtyTracking, HugePageLogging};
use slat_costed::{Access, Config, Error, Gfn, GfnRange, MemoryRegionFlags, PageSize};

use super::failure::Failure;
use super::vm::{GuestVm, VmShape, check_pages, cpus_for};
use crate::error::ModelError;
use crate::guest::{Accessed, Around, GuestWork, Hypervisor, ModificationLog, VirtualCpu};
use crate::host::Backing;
use crate::machine::{self, Report};
use crate::parameters::Parameters;
use crate::topology::Topology;

/// What is in a frame that is no page's.
const NOTHING: u64 = u64::MAX;

/// Tasks beside the vCPUs.
const NR_OPERATORS: usize = 4;

/// A run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Check {
    /// vCPUs.
    pub nr_vcpus: usize,
    /// CPUs on which they run, with the tasks of the hypervisor; fewer than vCPUs are allowed.
    pub nr_cpus: usize,
    /// Pages of 4 KiB of the guest, at least 1.
    pub nr_pages: u64,
    /// Accesses of each vCPU.
    pub nr_accesses: u64,
    /// Decides everything else.
    pub seed: u64,
}

/// What a run has done.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Checked {
    /// Accesses of the guest that were compared.
    pub nr_accesses: u64,
    /// Harvests.
    pub nr_harvests: u64,
    /// Pages that moved to another frame.
    pub nr_moves: u64,
    /// Splits, recoveries, and calls that age.
    pub nr_others: u64,
    /// How often logging was turned off and on.
    pub nr_toggles: u64,
    /// Of the engine: faults that it began again.
    pub nr_retries: u64,
}

/// A run that has passed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CheckRun {
    /// What it has done.
    pub checked: Checked,
    /// The trace.
    pub report: Report,
}

/// The memory, and what it should be.
struct Memory {
    frames: Vec<Cell<u64>>,
    /// For each page what was written last.
    written: Vec<Cell<u64>>,
    /// The copy that harvests keep up.
    copy: Vec<Cell<u64>>,
    next: Cell<u64>,
    is_over: Cell<bool>,
    checked: RefCell<Checked>,
    wrong: RefCell<Option<String>>,
}

impl Check {
    /// Runs it on `topology`.
    ///
    /// # Errors
    /// [`ModelError::Check`]: what an oracle found. [`ModelError::TooManyVcpus`];
    /// [`ModelError::Engine`].
    pub fn run(&self, topology: &Topology, parameters: &Parameters) -> Result<CheckRun, ModelError> {
        if self.nr_pages == 0 || self.nr_vcpus == 0 {
            return Err(ModelError::Check(format!("{} vCPUs with {} pages do nothing", self.nr_vcpus, self.nr_pages)));
        }
        let cpus = cpus_for(topology, self.nr_cpus)?;
        check_pages(self.nr_pages, 2)?;
        let mut random = SmallRng::seed_from_u64(self.seed);
        let tracking = [
            DirtyTracking::WriteProtect,
            DirtyTracking::WriteProtectLeaves,
            DirtyTracking::DirtyBit,
            DirtyTracking::PageModificationLog,
        ][random.random_range(0..4)];
        let huge_pages = [HugePageLogging::Split, HugePageLogging::SplitLazily][random.random_range(0..2)];
        let is_logged = tracking == DirtyTracking::PageModificationLog;
        let around = [Around::Nothing, Around::Host][random.random_range(0..2)];
        let shape = VmShape {
            topology: topology.clone(),
            parameters: parameters.clone(),
            cpus: (0..self.nr_vcpus).map(|vcpu| cpus[vcpu % cpus.len()]).collect(),
            nr_pages: self.nr_pages,
            backing: Backing::Anonymous,
            page_size: PageSize::Size2M,
            config: Config::default().with_dirty_tracking(tracking).with_huge_page_logging(huge_pages),
            work: GuestWork::new(parameters, Hypervisor::Slat, around),
            modification_log: if is_logged { ModificationLog::On } else { ModificationLog::Off },
            around,
            moves: true,
            seed: self.seed,
        };
        let check = self.clone();
        let outcome = machine::run(topology, parameters, move || check.run_as_task(shape, &cpus))?;
        Ok(CheckRun { checked: outcome.result?, report: outcome.report })
    }

    fn run_as_task(&self, shape: VmShape, cpus: &[usize]) -> Result<Checked, Failure> {
        let guest = Rc::new(GuestVm::new(shape)?);
        let cells = |nr_cells: u64, value: u64| (0..nr_cells).map(|_| Cell::new(value)).collect::<Vec<_>>();
        let memory = Rc::new(Memory {
            frames: cells(2 * self.nr_pages, 0),
            written: cells(self.nr_pages, 0),
            copy: cells(self.nr_pages, 0),
            next: Cell::new(1),
            is_over: Cell::new(false),
            checked: RefCell::default(),
            wrong: RefCell::new(None),
        });
        guest.set_flags(MemoryRegionFlags::LOG_DIRTY_PAGES)?;
        let operators: Vec<_> = (0..NR_OPERATORS)
            .map(|operator| {
                let (guest, memory) = (Rc::clone(&guest), Rc::clone(&memory));
                let random = SmallRng::seed_from_u64(self.seed ^ (1 + operator as u64) << 32);
                machine::spawn(cpus[(self.nr_vcpus + operator) % cpus.len()], move || {
                    memory.note(operate(&guest, &memory, operator, random));
                })
            })
            .collect();
        let (seed, nr_accesses, to) = (self.seed, self.nr_accesses, Rc::clone(&memory));
        let ran = guest.run(move |vcpu, index| -> Result<(), Error> {
            let random = SmallRng::seed_from_u64(seed.wrapping_add(index as u64 + 1));
            access_all(vcpu, &to, nr_accesses, random)
        });
        memory.is_over.set(true);
        operators.into_iter().for_each(machine::join);
        ran?;
        if let Some(wrong) = memory.wrong.take() {
            return Err(Failure::Check(wrong));
        }
        harvest(&guest, &memory)?;
        memory.compare()?;
        let mut checked = memory.checked.borrow().clone();
        checked.nr_retries = guest.vm.stats().retries;
        Ok(checked)
    }
}

impl Memory {
    fn nr_pages(&self) -> u64 {
        self.written.len() as u64
    }

    fn count(&self, count: impl FnOnce(&mut Checked)) {
        count(&mut self.checked.borrow_mut());
    }

    /// Keeps the first thing that is wrong, which ends the run.
    fn find(&self, wrong: impl FnOnce() -> String) {
        if self.wrong.borrow().is_none() {
            *self.wrong.borrow_mut() = Some(wrong());
        }
    }

    fn note(&self, result: Result<(), Error>) {
        if let Err(error) = result {
            self.find(|| format!("an operation failed: {error}"));
        }
    }

    fn is_over(&self) -> bool {
        self.is_over.get() || self.wrong.borrow().is_some()
    }

    /// The guest accesses `page` through a translation to `frame`.
    fn access(&self, page: u64, frame: u64, access: Access, right_frame: u64) {
        if frame != right_frame {
            self.find(|| {
                format!("a {access:?} of page {page} went to frame {frame:#x}, and its frame is {right_frame:#x}")
            });
            return;
        }
        let content = &self.frames[frame as usize];
        if access == Access::Write {
            let value = self.next.replace(self.next.get() + 1);
            content.set(value);
            self.written[page as usize].set(value);
        } else if content.get() != self.written[page as usize].get() {
            let (found, written) = (content.get(), self.written[page as usize].get());
            self.find(|| format!("a read of page {page} found {found}, and {written} was written last"));
        }
        self.count(|checked| checked.nr_accesses += 1);
    }

    fn compare(&self) -> Result<(), Failure> {
        for (page, (copy, written)) in self.copy.iter().zip(&self.written).enumerate() {
            if copy != written {
                let (copy, written) = (copy.get(), written.get());
                return Err(Failure::Check(format!(
                    "no harvest has reported page {page}: the copy has {copy}, and {written} was written last"
                )));
            }
        }
        Ok(())
    }
}

/// The accesses of one vCPU.
fn access_all(vcpu: &mut VirtualCpu, memory: &Memory, nr_accesses: u64, mut random: SmallRng) -> Result<(), Error> {
    for _ in 0..nr_accesses {
        if memory.is_over() {
            break;
        }
        // Some pages are accessed by all CPUs again and again.
        let nr_pages = if random.random_range(0..4) == 0 { memory.nr_pages().min(8) } else { memory.nr_pages() };
        let page = random.random_range(0..nr_pages);
        let access = if random.random_range(0..3) == 0 { Access::Read } else { Access::Write };
        let frame = loop {
            if let Some(frame) = vcpu.translate(Gfn(page), access) {
                break frame;
            }
            if let Accessed::Exit(exit) = vcpu.access(Gfn(page), access)? {
                memory.find(|| format!("a {access:?} of page {page} exits: {exit}"));
                return Ok(());
            }
        };
        memory.access(page, frame, access, vcpu.frame_of(page));
    }
    Ok(())
}

/// One of the tasks beside the vCPUs, until they have ended.
fn operate(guest: &GuestVm, memory: &Memory, operator: usize, mut random: SmallRng) -> Result<(), Error> {
    guest.begin_call();
    while !memory.is_over() {
        machine::elapse(random.random_range(0..20_000_000));
        let first = random.random_range(0..memory.nr_pages());
        let length = 1 << random.random_range(0..11);
        let range = GfnRange { start: Gfn(first), end: Gfn((first + length).min(memory.nr_pages())) };
        match operator {
            0 if random.random_range(0..50) == 0 => toggle(guest, memory)?,
            0 => harvest(guest, memory)?,
            1 => move_pages(guest, memory, range)?,
            2 => {
                match random.random_range(0..3) {
                    0 => _ = guest.vm.split_range(range, PageSize::Size4K)?,
                    1 => _ = guest.vm.recover_range(range)?,
                    _ => _ = guest.vm.age_range(range)?,
                }
                memory.count(|checked| checked.nr_others += 1);
            }
            _ => drop(guest.vm.invalidate_range(range)?),
        }
    }
    Ok(())
}

/// Gets the log, and copies what it names.
fn harvest(guest: &GuestVm, memory: &Memory) -> Result<(), Error> {
    let mut bitmap = vec![0_u64; memory.nr_pages().div_ceil(64) as usize];
    guest.vm.get_dirty_log(0, &mut bitmap)?;
    for page in (0..memory.nr_pages()).filter(|page| bitmap[(page / 64) as usize] >> (page % 64) & 1 == 1) {
        copy(guest, memory, page);
    }
    memory.count(|checked| checked.nr_harvests += 1);
    Ok(())
}

fn copy(guest: &GuestVm, memory: &Memory, page: u64) {
    let frame = guest.vm.host().frame_of(page);
    memory.copy[page as usize].set(memory.frames[frame as usize].get());
}

/// Turns logging off and on again. All pages are copied after that.
fn toggle(guest: &GuestVm, memory: &Memory) -> Result<(), Error> {
    guest.set_flags(MemoryRegionFlags::empty())?;
    machine::elapse(5_000_000);
    guest.set_flags(MemoryRegionFlags::LOG_DIRTY_PAGES)?;
    (0..memory.nr_pages()).for_each(|page| copy(guest, memory, page));
    memory.count(|checked| checked.nr_toggles += 1);
    Ok(())
}

/// Moves each page of `range` to its other frame.
fn move_pages(guest: &GuestVm, memory: &Memory, range: GfnRange) -> Result<(), Error> {
    let invalidation = guest.vm.invalidate_range(range)?;
    for page in range.start.0..range.end.0 {
        let old = guest.vm.host().move_page(page);
        let new = guest.vm.host().frame_of(page);
        memory.frames[new as usize].set(memory.frames[old as usize].replace(NOTHING));
        memory.count(|checked| checked.nr_moves += 1);
    }
    drop(invalidation);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(nr_vcpus: usize, nr_cpus: usize, seed: u64) -> CheckRun {
        let check = Check { nr_vcpus, nr_cpus, nr_pages: 1200, nr_accesses: 200, seed };
        let run = check.run(&Topology::named("2x48").unwrap(), &Parameters::built_in().unwrap());
        run.unwrap_or_else(|error| panic!("seed {seed}: {error}"))
    }

    #[test]
    fn everything_beside_everything_on_96_cpus() {
        for seed in 0..6 {
            let Checked { nr_accesses, nr_harvests, nr_moves, nr_others, .. } = run(92, 96, seed).checked;
            assert_eq!(nr_accesses, 92 * 200);
            assert!(nr_harvests > 1 && nr_moves > 1 && nr_others > 1, "seed {seed}");
        }
    }

    #[test]
    fn more_vcpus_than_cpus_are_preempted_anywhere() {
        for seed in 0..4 {
            run(12, 3, seed);
        }
    }

    #[test]
    fn a_seed_replays_exactly() {
        assert_eq!(run(20, 24, 7), run(20, 24, 7));
        assert_ne!(run(20, 24, 7).report.trace_hash, run(20, 24, 8).report.trace_hash);
    }
}
