//! slat in the bench of the peers. Its operations are those of a hypervisor, so each does more than the peers' next to it:
//! a mapping is a fault that is served before it happens, a protection begins a dirty log or takes it, an unmapping is an
//! invalidation that faults respect until it is over, and a split is a guest's write.

#![expect(unsafe_code, reason = "implements the host's contract over the arena")]

use std::alloc::Layout;
use std::array;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Instant;

use slat::{
    Access, Config, Gfn, GfnRange, Gone, Gpa, Host, Hpa, MemoryRegion, MemoryRegionFlags, Npt, Outcome, PageSize, Park,
    Pfn, Resolved, Vcpu, Vm,
};

use super::arena::{FRAME_BYTES, Memory};
use super::futex_park::FutexPark;
use super::membarrier;
use super::operation::{BATCH, Frames, Job, Leaf, Operation, PART_PAGES, Pages, Shared, Table, address};

pub(crate) struct BenchHost {
    memory: Memory,
    start: Instant,
}

impl Park for BenchHost {
    fn park(&self, word: &AtomicU32, expected: u32) {
        FutexPark.park(word, expected);
    }

    fn unpark_one(&self, word: *const AtomicU32) -> bool {
        FutexPark.unpark_one(word)
    }

    fn unpark_all(&self, word: *const AtomicU32) {
        FutexPark.unpark_all(word);
    }
}

// SAFETY: the arena hands a frame out once and keeps it mapped for ever; no CPU walks the tables, so there is nothing to
// flush; a page's frame is a fixed number.
unsafe impl Host for BenchHost {
    type Backing = Frames;

    fn allocate_table(&self, layout: Layout) -> Option<Hpa> {
        assert!(layout.size() <= FRAME_BYTES);
        self.memory.allocate().map(|frame| Hpa(frame as u64))
    }

    unsafe fn free_table(&self, table: Hpa, _layout: Layout) {
        self.memory.free(table.0 as usize);
    }

    #[inline]
    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        self.memory.pointer(table.0 as usize)
    }

    #[inline]
    fn resolve(&self, frames: &Frames, gfn: Gfn, _page: u64, _access: Access) -> Result<Resolved, Gone> {
        let max_size = if *frames == Frames::ShiftedUnknown { PageSize::Size4K } else { PageSize::Size2M };
        Ok(Resolved { pfn: Pfn(frames.frame(gfn.0)), max_size, writable: true })
    }

    fn flush(&self, _ranges: &[GfnRange]) {}

    fn has_barrier_on_all_cpus(&self) -> bool {
        membarrier::is_available()
    }

    fn barrier_on_all_cpus(&self) {
        membarrier::on_all_cpus();
    }

    fn timestamp_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }
}

/// A VM with a slot for each part of the memory.
pub(crate) struct Engine {
    vm: Arc<Vm<BenchHost, Npt>>,
    job: Job,
}

fn set_slot(vm: &Vm<BenchHost, Npt>, part: u64, nr_pages: u64, flags: MemoryRegionFlags, backing: Option<Frames>) {
    let (guest_phys_addr, memory_size) = (Gpa(address(part * PART_PAGES) as u64), address(nr_pages) as u64);
    vm.set_user_memory_region(MemoryRegion { slot: part as u32, flags, guest_phys_addr, memory_size, backing })
        .unwrap();
}

impl Engine {
    pub(crate) fn new(memory: Memory, job: Job) -> Engine {
        let vm = Arc::new(Vm::new(BenchHost { memory, start: Instant::now() }, Config::default()).unwrap());
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
            assert_eq!(stats.protected, pages);
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
    vcpu: Vcpu<BenchHost, Npt>,
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
