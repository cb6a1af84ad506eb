//! Where the page-table pages are that replace huge pages when logging begins, and what that costs
//! the guest (S4): on the node of the thread that splits, or on the node of the huge page.
//!
//! Each vCPU has its memory on its own node, in huge pages. Logging is enabled, which splits them
//! all. Then each vCPU writes all of its pages, in rounds: each TLB miss reads a PTE.
//!
//! # Implementation
//! As published, CPUs log what they write (page-modification logging), so a write does not fault.
//! A smaller memory would fit into the caches. So these are made smaller by the same factor as the
//! memory of each vCPU ([`PUBLISHED_PAGES`]).

use std::rc::Rc;

use slat_costed::dirty::DirtyTracking;
use slat_costed::tables::TablePlacement;
use slat_costed::{Access, Config, Error, Gfn, GfnRange, MemoryRegionFlags, PageSize};

use super::failure::Failure;
use super::vm::{GuestVm, VmShape, check_pages, cpus_for, pages_apart};
use crate::error::ModelError;
use crate::guest::{Around, GuestWork, Hypervisor, ModificationLog};
use crate::host::Backing;
use crate::machine::{self, Report};
use crate::parameters::{Parameters, Ps, ns};
use crate::topology::Topology;

/// Pages of each vCPU in the published runs: 1 GiB.
pub const PUBLISHED_PAGES: u64 = 1 << 18;

/// Pages of a huge page.
const HUGE: u64 = 512;

/// The node of the page-table pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Placement {
    /// That of the thread that splits.
    Caller,
    /// That of the huge page.
    HugePage,
}

/// The threads that split.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Splitters {
    /// One, on the first node.
    One,
    /// One on each node, for the memory there.
    PerNode,
}

/// An experiment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NumaSplit {
    /// vCPUs, each on a CPU of its own.
    pub nr_vcpus: usize,
    /// Pages of 4 KiB of each vCPU, a multiple of 512.
    pub nr_pages: u64,
    /// Where page-table pages are.
    pub placement: Placement,
    /// Which threads split.
    pub splitters: Splitters,
    /// Rounds of dirtying.
    pub nr_rounds: u32,
    /// For what is random: when vCPUs begin.
    pub seed: u64,
}

/// The times in nanoseconds of virtual time.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SplitTimes {
    /// All huge pages are split.
    pub split_ns: u64,
    /// Dirty memory, each round.
    pub dirty_ns: Vec<u64>,
    /// Page-table pages for 4 KiB pages, on the node of their memory and elsewhere.
    pub nr_local_tables: u64,
    /// See there.
    pub nr_remote_tables: u64,
}

/// What a run has shown.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SplitRun {
    /// The times.
    pub times: SplitTimes,
    /// Where they went.
    pub report: Report,
}

impl NumaSplit {
    /// Runs the experiment on `topology`.
    ///
    /// # Errors
    /// [`ModelError::TooManyVcpus`]; [`ModelError::Engine`]; [`ModelError::Check`] if `nr_pages` is
    /// no multiple of 512, or a huge page is left.
    pub fn run(&self, topology: &Topology, parameters: &Parameters) -> Result<SplitRun, ModelError> {
        if !self.nr_pages.is_multiple_of(HUGE) || self.nr_pages == 0 {
            return Err(ModelError::Check(format!("{} pages are no huge pages of {HUGE}", self.nr_pages)));
        }
        let cpus = cpus_for(topology, self.nr_vcpus)?;
        check_pages(self.nr_pages, self.nr_vcpus)?;
        let parameters = parameters.with_smaller_caches(self.nr_pages as f64 / PUBLISHED_PAGES as f64);
        let placement = match self.placement {
            Placement::Caller => TablePlacement::CallerNode,
            Placement::HugePage => TablePlacement::HugePageNode,
        };
        let shape = VmShape {
            topology: topology.clone(),
            parameters: parameters.clone(),
            cpus,
            nr_pages: pages_apart(self.nr_pages) * self.nr_vcpus as u64,
            backing: Backing::Anonymous,
            page_size: PageSize::Size2M,
            config: Config::default()
                .with_dirty_tracking(DirtyTracking::PageModificationLog)
                .with_table_placement(placement),
            work: GuestWork::new(&parameters, Hypervisor::Slat, Around::Host),
            modification_log: ModificationLog::On,
            around: Around::Host,
            moves: false,
            seed: self.seed,
        };
        let split = self.clone();
        let outcome = machine::run(topology, &parameters, move || split.run_as_task(shape))?;
        Ok(SplitRun { times: outcome.result?, report: outcome.report })
    }

    fn run_as_task(&self, shape: VmShape) -> Result<SplitTimes, Failure> {
        let (topology, cpus) = (shape.topology.clone(), shape.cpus.clone());
        let guest = Rc::new(GuestVm::new(shape)?);
        self.pass(&guest)?;
        let mut times = SplitTimes { split_ns: ns(self.split(&guest, &topology, &cpus)?), ..SplitTimes::default() };
        guest.set_flags(MemoryRegionFlags::LOG_DIRTY_PAGES)?;
        let nr_huge = guest.vm.stats().pages_2m();
        if nr_huge != 0 {
            return Err(Failure::Check(format!("{nr_huge} huge pages are left")));
        }
        (times.nr_local_tables, times.nr_remote_tables) = guest.tables_by_place();
        let mut bitmap = vec![0_u64; (pages_apart(self.nr_pages) * self.nr_vcpus as u64).div_ceil(64) as usize];
        for _ in 0..self.nr_rounds {
            times.dirty_ns.push(ns(self.pass(&guest)?));
            guest.vm.get_dirty_log(0, &mut bitmap).map_err(Error::from)?;
        }
        Ok(times)
    }

    /// Splits all huge pages, and returns the time.
    fn split(&self, guest: &Rc<GuestVm>, topology: &Topology, cpus: &[usize]) -> Result<Ps, Error> {
        let nr_pages = self.nr_pages;
        let of_vcpu = move |vcpu: usize| {
            let first = vcpu as u64 * pages_apart(nr_pages);
            GfnRange { start: Gfn(first), end: Gfn(first + nr_pages) }
        };
        let nodes = match self.splitters {
            Splitters::One => 1,
            Splitters::PerNode => topology.nr_nodes(),
        };
        let begin = machine::now();
        let results = Rc::new(std::cell::RefCell::new(Ok(())));
        let tasks: Vec<_> = (0..nodes)
            .filter_map(|node| {
                let is_mine = |vcpu: &usize| nodes == 1 || topology.node_of(cpus[*vcpu]) == node;
                let ranges: Vec<_> = (0..cpus.len()).filter(is_mine).map(of_vcpu).collect();
                let cpu = (0..topology.nr_cpus()).find(|&cpu| topology.node_of(cpu) == node)?;
                let (guest, results) = (Rc::clone(guest), Rc::clone(&results));
                Some(machine::spawn(cpu, move || {
                    let (split, _) = guest.timed(|| {
                        ranges.into_iter().try_for_each(|range| guest.vm.split_range(range, PageSize::Size4K).map(drop))
                    });
                    if let Err(error) = split {
                        *results.borrow_mut() = Err(error.into());
                    }
                }))
            })
            .collect();
        tasks.into_iter().for_each(machine::join);
        let result = std::mem::replace(&mut *results.borrow_mut(), Ok(()));
        result.map(|()| machine::now() - begin)
    }

    /// Each vCPU writes each of its pages once.
    fn pass(&self, guest: &GuestVm) -> Result<Ps, Error> {
        let nr_pages = self.nr_pages;
        guest.run(move |vcpu, index| {
            let first = index as u64 * pages_apart(nr_pages);
            for page in first..first + nr_pages {
                vcpu.touch_memory(Gfn(page));
                vcpu.access(Gfn(page), Access::Write)?;
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(placement: Placement, splitters: Splitters) -> SplitTimes {
        let split = NumaSplit { nr_vcpus: 16, nr_pages: 1024, placement, splitters, nr_rounds: 1, seed: 1 };
        split.run(&Topology::named("8x52").unwrap(), &Parameters::built_in().unwrap()).unwrap().times
    }

    #[test]
    fn page_table_pages_are_where_the_placement_says() {
        let tables = |times: &SplitTimes| (times.nr_local_tables, times.nr_remote_tables);
        let caller = run(Placement::Caller, Splitters::One);
        assert_eq!(tables(&caller), (4, 28), "two of sixteen vCPUs are on the first node");
        let huge_page = run(Placement::HugePage, Splitters::One);
        assert_eq!(tables(&huge_page), (32, 0));
        assert!(huge_page.dirty_ns < caller.dirty_ns, "{huge_page:?} {caller:?}");
        let per_node = run(Placement::Caller, Splitters::PerNode);
        assert_eq!(tables(&per_node), (32, 0));
        assert!(per_node.split_ns < huge_page.split_ns / 2, "{per_node:?} {huge_page:?}");
    }

    #[test]
    fn a_part_of_a_huge_page_is_refused() {
        for nr_pages in [0, 1, 511, 513] {
            let split = NumaSplit {
                nr_vcpus: 1,
                nr_pages,
                placement: Placement::Caller,
                splitters: Splitters::One,
                nr_rounds: 1,
                seed: 1,
            };
            let error = split.run(&Topology::named("1x2").unwrap(), &Parameters::built_in().unwrap()).unwrap_err();
            assert!(matches!(error, ModelError::Check(_)), "{error}");
        }
    }
}
