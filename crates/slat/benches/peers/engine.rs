//! slat in the bench of the peers. Its operations are those of a hypervisor, so each does more than the peers' next to it:
//! a mapping is a fault that is served before it happens, a protection begins a dirty log or takes it, an unmapping is an
//! invalidation that faults respect until it is over, and a split is a guest's write.

use std::array;
use std::sync::Arc;

use slat::{
    Access, Config, Gfn, GfnRange, Gpa, MemoryRegion, MemoryRegionFlags, Npt, Outcome, PageSize, Pfn, Resolved, Vcpu,
    Vm,
};

use super::arena::Memory;
use super::bench_host::{Answer, BenchHost};
use super::operation::{BATCH, Frames, Job, Leaf, Operation, PART_PAGES, Pages, Shared, Table, address};

impl Answer for Frames {
    #[inline]
    fn resolved(&self, gfn: Gfn, _page: u64) -> Resolved {
        let max_size = if *self == Frames::ShiftedUnknown { PageSize::Size4K } else { PageSize::Size2M };
        Resolved { pfn: Pfn(self.frame(gfn.0)), max_size, writable: true }
    }
}

type PeerHost = BenchHost<Frames>;

/// A VM with a slot for each part of the memory.
pub(crate) struct Engine {
    vm: Arc<Vm<PeerHost, Npt>>,
    job: Job,
}

fn set_slot(vm: &Vm<PeerHost, Npt>, part: u64, nr_pages: u64, flags: MemoryRegionFlags, backing: Option<Frames>) {
    let (guest_phys_addr, memory_size) = (Gpa(address(part * PART_PAGES) as u64), address(nr_pages) as u64);
    vm.set_user_memory_region(MemoryRegion {
        slot: part as u32,
        flags,
        guest_phys_addr,
        memory_size,
        backing,
        userfault_bitmap: None,
    })
    .unwrap();
}

impl Engine {
    pub(crate) fn new(memory: Memory, job: Job) -> Engine {
        let vm = Arc::new(Vm::new(BenchHost::new(memory), Config::default()).unwrap());
        for part in 0..job.nr_parts() {
            // Pages that are mapped for writing then are dirty: there is something to take and to protect.
            let logs = job.operation == Operation::ProtectPages;
            let flags = if logs { MemoryRegionFlags::LOG_DIRTY_PAGES } else { MemoryRegionFlags::empty() };
            set_slot(&vm, part, job.part_pages(), flags, Some(job.frames()));
        }
        Engine { vm, job }
    }

    pub(crate) fn hands(&self) -> Hands {
        let vcpu = self.vm.create_vcpu().unwrap();
        Hands { vcpu, bitmap: vec![0; self.job.part_pages().div_ceil(64) as usize] }
    }

    /// What follows [`Job::prepare`].
    pub(crate) fn prepare(&self) {
        if self.job.operation == Operation::Split {
            for part in 0..self.job.nr_parts() {
                set_slot(&self.vm, part, self.job.part_pages(), MemoryRegionFlags::LOG_DIRTY_PAGES, None);
            }
        }
    }

    /// What follows [`Job::check`]: the engine's own count.
    pub(crate) fn check(&self) {
        let (stats, pages) = (self.vm.stats(), self.job.nr_parts() * self.job.part_pages());
        match self.job.operation {
            Operation::MapRangeHuge => assert_eq!(stats.installed_2m * 512, pages),
            Operation::Split => assert_eq!(stats.splits * 512, pages),
            _ => assert_eq!(stats.installed_4k, pages),
        }
        if matches!(self.job.operation, Operation::ProtectRange | Operation::ProtectPages) {
            assert_eq!(stats.protected + 512 * stats.tables_closed, pages);
        }
    }
}

impl Shared for Engine {
    type Hands = Hands;

    #[inline]
    fn each(&self, _nr_threads: u64, step: impl Fn(&mut Hands, u64)) -> impl FnMut(u64) {
        let mut hands = self.hands();
        move |number| step(&mut hands, number)
    }
}

/// One vCPU, and what its thread does with the VM.
pub(crate) struct Hands {
    vcpu: Vcpu<PeerHost, Npt>,
    bitmap: Vec<u64>,
}

#[inline]
fn gpa(page: u64) -> Gpa {
    Gfn(page).gpa()
}

impl Table for Hands {
    #[inline]
    fn map(&mut self, pages: Pages) {
        assert_eq!(pages.nr_pages, BATCH);
        let list: [Gpa; BATCH as usize] = array::from_fn(|index| gpa(pages.first + index as u64 * pages.step));
        assert_eq!(self.vcpu.pre_fault_pages(&list, Access::Write), Ok(list.len()));
    }

    #[inline]
    fn map_single(&mut self, page: u64) {
        assert_eq!(self.vcpu.handle_fault(gpa(page), Access::Write), Ok(Outcome::Resume));
    }

    fn map_range(&mut self, first: u64, nr_pages: u64, _frames: Frames) {
        let size_bytes = address(nr_pages) as u64;
        assert_eq!(self.vcpu.pre_fault_memory(gpa(first), size_bytes, Access::Write), Ok(size_bytes));
    }

    #[inline]
    fn query(&mut self, start: u64, mask: u64, pages: Pages) -> u64 {
        let reader = self.vcpu.vm().read_tables().unwrap();
        let mut cursor = reader.cursor();
        pages.iter().map(|page| cursor.query(gpa(start + (page & mask))).unwrap().pfn.0).sum()
    }

    fn protect(&mut self, pages: Pages) {
        let slot = pages.first / PART_PAGES;
        self.vcpu.vm().get_dirty_log(slot as u32, &mut self.bitmap).unwrap();
    }

    fn protect_range(&mut self, first: u64, nr_pages: u64) {
        set_slot(self.vcpu.vm(), first / PART_PAGES, nr_pages, MemoryRegionFlags::LOG_DIRTY_PAGES, None);
    }

    #[inline]
    fn unmap_single(&mut self, page: u64) {
        drop(self.vcpu.vm().invalidate_range(GfnRange::new(Gfn(page), 1)).unwrap());
    }

    fn unmap_range(&mut self, first: u64, nr_pages: u64) {
        drop(self.vcpu.vm().invalidate_range(GfnRange::new(Gfn(first), nr_pages)).unwrap());
    }

    #[inline]
    fn split(&mut self, page: u64) {
        self.map_single(page);
    }

    fn look(&mut self, page: u64) -> Option<Leaf> {
        let found = self.vcpu.vm().read_tables().unwrap().cursor().query(gpa(page))?;
        Some(Leaf { frame: found.pfn.0, writable: found.writable, huge: found.size != PageSize::Size4K })
    }
}
