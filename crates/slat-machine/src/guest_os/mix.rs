//! The operations of processes in a run: a mix by weights, drawn from random numbers.

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use slat::Access;

use super::address_space::{Region, RegionRights};
use super::counters::KernelCounters;
use super::cpu::KernelGuestCpu;
use super::error::KernelError;
use super::layout::{NR_WINDOWS, USER_STACK, WINDOW_PAGES, window};
use super::process::KernelCpu;

/// Pages from the start of a window that its mapping may reach.
const WINDOW_SPAN: u64 = 1024;
/// With this many regions, a process's mappings are not split any further.
const MAX_REGIONS: usize = 40;
/// Most pages that a system call accesses.
const MAX_BUFFER_PAGES: u64 = 3;

/// A step of a run: some work in user mode, some touches of present pages, then one operation that
/// is drawn by weight. If an operation is impossible, one that makes room for it is done instead,
/// and counted as that.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct WorkloadMix {
    /// Weight of system calls that access a few pages of the process.
    pub system_calls: u32,
    /// Weight of touches of a page that is not present.
    pub page_faults: u32,
    /// Weight of fork; if a CPU has the most processes, one exits instead.
    pub forks: u32,
    /// Weight of exec.
    pub execs: u32,
    /// Weight of exit.
    pub exits: u32,
    /// Weight of mmap of 1 to 48 pages; if all places are taken, munmap instead.
    pub mmaps: u32,
    /// Weight of munmap; if nothing is mapped, mmap instead.
    pub munmaps: u32,
    /// Weight of mprotect.
    pub mprotects: u32,
    /// Weight of a switch to another process.
    pub context_switches: u32,
    /// Weight of moves of a process between CPUs.
    pub migrations: u32,
    /// Weight of temporary mappings of the kernel.
    pub kernel_maps: u32,
    /// Weight of accesses that must fault.
    pub stray_accesses: u32,
    /// Accesses of user mode before each operation.
    pub touches_per_step: u32,
    /// How many of a hundred touches of writable pages are writes.
    pub write_percent: u8,
    /// User work of each step, in nanoseconds: only summed up.
    pub user_work_ns: u64,
}

impl WorkloadMix {
    /// Like a build: short-lived processes that map, fault and make many system calls. The weights
    /// are chosen to have all operations of a build, not measured in one.
    pub const COMPILE: WorkloadMix = WorkloadMix {
        system_calls: 600,
        page_faults: 300,
        forks: 4,
        execs: 4,
        exits: 4,
        mmaps: 20,
        munmaps: 16,
        mprotects: 8,
        context_switches: 40,
        migrations: 4,
        kernel_maps: 0,
        stray_accesses: 0,
        touches_per_step: 8,
        write_percent: 40,
        user_work_ns: 2_000,
    };

    /// System calls only.
    pub const SYSTEM_CALLS: WorkloadMix = WorkloadMix {
        system_calls: 1,
        page_faults: 0,
        forks: 0,
        execs: 0,
        exits: 0,
        mmaps: 0,
        munmaps: 0,
        mprotects: 0,
        context_switches: 0,
        migrations: 0,
        touches_per_step: 4,
        user_work_ns: 500,
        ..WorkloadMix::COMPILE
    };

    /// All operations, so that each error is likely.
    pub const EVERYTHING: WorkloadMix = WorkloadMix {
        system_calls: 100,
        page_faults: 200,
        forks: 20,
        execs: 10,
        exits: 10,
        mmaps: 60,
        munmaps: 50,
        mprotects: 50,
        context_switches: 60,
        migrations: 20,
        kernel_maps: 40,
        stray_accesses: 80,
        touches_per_step: 4,
        write_percent: 50,
        user_work_ns: 0,
    };
}

impl Default for WorkloadMix {
    fn default() -> WorkloadMix {
        WorkloadMix::COMPILE
    }
}

impl<C: KernelGuestCpu> KernelCpu<C> {
    /// Does `nr_steps` steps of `mix`. They depend on `seed`, on what was done before and, with
    /// several virtual CPUs, on the processes that come from others.
    ///
    /// # Errors
    /// [`KernelError`]: the first deviation.
    pub fn run(&mut self, mix: &WorkloadMix, nr_steps: u64, seed: u64) -> Result<KernelCounters, KernelError> {
        let before = *self.counters();
        let mut rng = SmallRng::seed_from_u64(seed);
        type Operation<C> = fn(&mut KernelCpu<C>, &WorkloadMix, &mut SmallRng) -> Result<(), KernelError>;
        let operations: [(u32, Operation<C>); 12] = [
            (mix.system_calls, KernelCpu::some_system_call),
            (mix.page_faults, KernelCpu::touch_fresh),
            (mix.forks, |cpu, _, _| if cpu.has_place() { cpu.fork() } else { cpu.exit() }),
            (mix.execs, |cpu, _, _| cpu.exec()),
            (mix.exits, |cpu, _, _| cpu.exit()),
            (mix.mmaps, |cpu, _, rng| cpu.map_some(rng).map(|_| ())),
            (mix.munmaps, |cpu, _, rng| cpu.unmap_some(rng)),
            (mix.mprotects, |cpu, _, rng| cpu.protect_some(rng)),
            (mix.context_switches, |cpu, _, _| cpu.switch()),
            (mix.migrations, |cpu, _, _| {
                cpu.migrate();
                Ok(())
            }),
            (mix.kernel_maps, |cpu, _, rng| cpu.map_temporarily(rng.random())),
            (mix.stray_accesses, |cpu, _, rng| cpu.stray(rng)),
        ];
        let total: u64 = operations.iter().map(|(weight, _)| u64::from(*weight)).sum();
        if total == 0 {
            return Err(KernelError::EmptyMix);
        }
        for _ in 0..nr_steps {
            self.core.counters.steps += 1;
            self.core.counters.user_work_ns += mix.user_work_ns;
            for _ in 0..mix.touches_per_step {
                if let Some(page) = self.some_present_page(&mut rng) {
                    let access = self.some_access(page, mix, &mut rng);
                    self.touch(page, access)?;
                }
            }
            let mut drawn = rng.random_range(0..total);
            for (weight, operation) in &operations {
                match drawn.checked_sub((*weight).into()) {
                    Some(rest) => drawn = rest,
                    None => {
                        operation(self, mix, &mut rng)?;
                        break;
                    }
                }
            }
        }
        Ok(*self.counters() - before)
    }

    fn some_region(&self, rng: &mut SmallRng) -> Option<(u64, Region)> {
        let regions = &self.current.regions;
        if regions.is_empty() {
            return None;
        }
        regions.iter().nth(rng.random_range(0..regions.len())).map(|(first, region)| (*first, *region))
    }

    /// A page of a random region.
    fn some_page(&self, rng: &mut SmallRng) -> Option<u64> {
        let (first, region) = self.some_region(rng)?;
        Some(first + rng.random_range(0..region.nr_pages))
    }

    /// A present page, near a random one.
    fn some_present_page(&self, rng: &mut SmallRng) -> Option<u64> {
        let page = self.some_page(rng)?;
        let pages = &self.current.pages;
        pages.range(page..).next().or_else(|| pages.iter().next()).map(|(page, _)| *page)
    }

    /// A random access that the process may make to `page`.
    fn some_access(&self, page: u64, mix: &WorkloadMix, rng: &mut SmallRng) -> Access {
        match self.current.rights(page) {
            Some(RegionRights::ReadWrite) if rng.random_range(0..100) < mix.write_percent => Access::Write,
            Some(RegionRights::ReadExecute) if rng.random() => Access::Execute,
            _ => Access::Read,
        }
    }

    fn some_system_call(&mut self, mix: &WorkloadMix, rng: &mut SmallRng) -> Result<(), KernelError> {
        let mut pages = Vec::new();
        for _ in 0..rng.random_range(0..=MAX_BUFFER_PAGES) {
            // Most buffers are present; the kernel itself faults on the others.
            let is_there = rng.random_range(0..8) != 0;
            let page = if is_there { self.some_present_page(rng) } else { self.some_page(rng) };
            if let Some(page) = page {
                let access = match self.some_access(page, mix, rng) {
                    Access::Execute | Access::ExecuteUser => Access::Read,
                    access => access,
                };
                pages.push((page, access));
            }
        }
        self.system_call(&pages)
    }

    /// A page that is mapped and not present.
    fn some_fresh_page(&self, rng: &mut SmallRng) -> Option<u64> {
        let page = self.some_page(rng)?;
        let (first, region) = self.current.regions.range(..=page).next_back()?;
        (page..first + region.nr_pages).find(|page| !self.current.pages.contains_key(page))
    }

    fn touch_fresh(&mut self, mix: &WorkloadMix, rng: &mut SmallRng) -> Result<(), KernelError> {
        /// Draws before a new mapping is made.
        const TRIES: u32 = 4;
        let fresh = (0..TRIES).find_map(|_| self.some_fresh_page(rng));
        let page = match fresh {
            Some(page) => Some(page),
            None => self.map_some(rng)?,
        };
        let Some(page) = page else { return Ok(()) };
        let access = self.some_access(page, mix, rng);
        self.touch(page, access)
    }

    /// Whether there is a mapping at a window.
    fn is_used(&self, number: u64) -> bool {
        let first = window(number);
        self.current.regions.range(first..first + WINDOW_SPAN).next().is_some()
    }

    /// Maps some pages and returns the first; unmaps some if there is no place.
    fn map_some(&mut self, rng: &mut SmallRng) -> Result<Option<u64>, KernelError> {
        let begin = rng.random_range(0..NR_WINDOWS);
        let free = (begin..begin + NR_WINDOWS).map(|number| number % NR_WINDOWS).find(|number| !self.is_used(*number));
        let Some(number) = free else {
            self.unmap_window(begin)?;
            return Ok(None);
        };
        // At the start of a page-table page, across two of them, or anywhere.
        let offset = match rng.random_range(0..3) {
            0 => 0,
            1 => 512 - 4,
            _ => rng.random_range(0..512),
        };
        let first = window(number) + offset;
        let rights = match rng.random_range(0..8) {
            0 => RegionRights::Read,
            1 => RegionRights::ReadExecute,
            _ => RegionRights::ReadWrite,
        };
        self.mmap(first, Region { nr_pages: rng.random_range(1..=WINDOW_PAGES), rights })?;
        Ok(Some(first))
    }

    fn unmap_window(&mut self, number: u64) -> Result<(), KernelError> {
        self.munmap(window(number), WINDOW_SPAN)
    }

    fn unmap_some(&mut self, rng: &mut SmallRng) -> Result<(), KernelError> {
        let begin = rng.random_range(0..NR_WINDOWS);
        let used = (begin..begin + NR_WINDOWS).map(|number| number % NR_WINDOWS).find(|number| self.is_used(*number));
        let Some(number) = used else {
            return self.map_some(rng).map(|_| ());
        };
        let first = window(number);
        let region = self.current.regions.range(first..).next().map(|(first, region)| (*first, region.nr_pages));
        match region {
            // A part of a region: some of its page-table pages stay.
            Some((first, nr_pages)) if nr_pages > 1 && self.current.regions.len() < MAX_REGIONS && rng.random() => {
                let begin = rng.random_range(0..nr_pages);
                self.munmap(first + begin, rng.random_range(1..=nr_pages - begin))
            }
            _ => self.unmap_window(number),
        }
    }

    fn protect_some(&mut self, rng: &mut SmallRng) -> Result<(), KernelError> {
        let Some((first, region)) = self.some_region(rng) else { return Ok(()) };
        let rights = match rng.random_range(0..4) {
            0 => RegionRights::Read,
            1 => RegionRights::ReadExecute,
            _ => RegionRights::ReadWrite,
        };
        if self.current.regions.len() >= MAX_REGIONS {
            return self.mprotect(first, region.nr_pages, rights);
        }
        let begin = rng.random_range(0..region.nr_pages);
        self.mprotect(first + begin, rng.random_range(1..=region.nr_pages - begin), rights)
    }

    /// An access of a random kind that must fault; none if there is no such page.
    fn stray(&mut self, rng: &mut SmallRng) -> Result<(), KernelError> {
        let access = [Access::Read, Access::Write, Access::Execute][rng.random_range(0..3)];
        let page = match rng.random_range(0..4) {
            0 if !self.current.unmapped.is_empty() => {
                Some(self.current.unmapped[rng.random_range(0..self.current.unmapped.len())])
            }
            1 => self.some_present_page(rng),
            2 => {
                // Not of the program itself, which would lose more and more.
                let page = self.some_present_page(rng).filter(|page| (window(0)..USER_STACK).contains(page));
                return page.map_or(Ok(()), |page| self.unmap_and_look(page));
            }
            _ => {
                let page = self.some_present_page(rng);
                return self.core.stray_privileges(&mut self.current, page);
            }
        };
        match page {
            Some(page) if !self.current.rights(page).is_some_and(|rights| rights.allow(access)) => {
                self.core.stray_touch(&mut self.current, page, access)
            }
            _ => Ok(()),
        }
    }
}
