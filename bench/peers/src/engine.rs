//! slat as a subject, in two ways.
//!
//! With memslots whose pages faults map, its operations are those of a hypervisor, so each does more
//! than the peers' counterpart. A mapping is a pre-fault, a protection begins or gets a dirty log,
//! and an unmapping is an invalidation that faults respect until it is over. Splits are bare ones, as
//! the peers'.
//!
//! With pinned memslots, a caller maps, protects and unmaps pages as it does with the peers. An
//! unmapping still keeps faults out, and hands the frames back.

#![expect(unsafe_code, reason = "implements the unsafe trait Host")]

use std::alloc::Layout;
use std::array;
use std::sync::Arc;

use slat::baselines::Park;
use slat::error::SlotError;
use slat::format::{LeafAttributes, Npt};
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};
use slat::tables::{Mapping, Protection};
use slat::{
    Access, Config, Error, Gfn, GfnRange, Gpa, Host, Hpa, MemoryRegion, MemoryRegionFlags, PageSize, Pfn, Vcpu, Vm,
};

use super::measure::Shared;
use super::memory::Memory;
use super::operation::{BATCH, BLOCK_PAGES, Frames, Leaf, Operation, PART_PAGES, Pages, PeerJob, Table, address};

/// A host with the memory of the software machine, without its CPUs, and with computed frames: so
/// that only the engine is measured.
struct FrameHost(Memory);

#[inline]
fn resolved(frames: Frames, gfn: Gfn) -> Resolved {
    let max_size = if frames == Frames::ShiftedUnknown { PageSize::Size4K } else { PageSize::Size2M };
    Resolved::memory(Pfn(frames.frame(gfn.0)), max_size)
}

// SAFETY: the page-table pages are those of a `MachineHost`, which fulfils this trait's contract
// for them, and lives as long as the process. No CPU walks the tables, so there is nothing to
// flush. A page's frame is a fixed number.
unsafe impl Host for FrameHost {
    type Backing = Frames;

    fn allocate_table(&self, layout: Layout, node: TableNode, wait: AllocationWait) -> Option<Hpa> {
        self.0.host().allocate_table(layout, node, wait)
    }

    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { self.0.host().free_table(table, layout) };
    }

    #[inline]
    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        self.0.pointer(table)
    }

    #[inline]
    fn resolve(&self, frames: &Frames, gfn: Gfn, _page: u64, _access: Access) -> Result<Resolved, Unresolved> {
        Ok(resolved(*frames, gfn))
    }

    /// All memory is resident.
    #[inline]
    fn resolve_resident(&self, frames: &Frames, gfn: Gfn, _page: u64, _access: Access) -> Option<Resolved> {
        Some(resolved(*frames, gfn))
    }

    fn flush(&self, _ranges: &[GfnRange]) {}

    /// The peers report nothing either.
    fn needs_zapped_leaves(&self) -> bool {
        false
    }

    fn has_barrier_on_all_cpus(&self) -> bool {
        self.0.host().has_barrier_on_all_cpus()
    }

    fn barrier_on_all_cpus(&self) {
        self.0.host().barrier_on_all_cpus();
    }

    fn yield_now(&self) {
        self.0.host().yield_now();
    }

    fn timestamp_ns(&self) -> u64 {
        self.0.host().timestamp_ns()
    }

    fn parking(&self) -> Option<&dyn Park> {
        self.0.host().parking()
    }
}

/// How the pages of the memslots are mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Memslots {
    /// By faults, and in advance as by faults.
    Faulted,
    /// In advance, to frames that the caller knows.
    Pinned,
}

/// A VM with a slot for the memory of each thread.
pub(crate) struct Engine {
    vm: Arc<Vm<FrameHost, Npt>>,
    job: PeerJob,
    memslots: Memslots,
}

fn set_slot(
    vm: &Vm<FrameHost, Npt>,
    part: u64,
    nr_pages: u64,
    flags: MemoryRegionFlags,
    backing: Option<Frames>,
) -> Result<(), SlotError> {
    let (guest_phys_addr, memory_size) = (Gpa(address(part * PART_PAGES) as u64), address(nr_pages) as u64);
    vm.set_user_memory_region(MemoryRegion {
        slot: part as u32,
        flags,
        guest_phys_addr,
        memory_size,
        backing,
        userfault_bitmap: None,
    })
}

impl Engine {
    /// A VM, prepared for the operation.
    ///
    /// # Errors
    /// The engine's.
    pub(crate) fn new(memory: Memory, job: PeerJob, memslots: Memslots) -> Result<Engine, Error> {
        let vm = Arc::new(Vm::new(FrameHost(memory), Config::default())?);
        // Pages that are mapped for writing then are dirty, so the harvest has pages to report and
        // to protect.
        let flags = match memslots {
            Memslots::Pinned => MemoryRegionFlags::PINNED,
            Memslots::Faulted if job.operation == Operation::Protect4k => MemoryRegionFlags::LOG_DIRTY_PAGES,
            Memslots::Faulted => MemoryRegionFlags::empty(),
        };
        for part in 0..job.nr_threads {
            set_slot(&vm, part, job.part_pages(), flags, Some(job.frames()))?;
        }
        let engine = Engine { vm, job, memslots };
        let mut handle = engine.handle()?;
        job.prepare(&mut handle);
        if handle.is_pinned() {
            // Of a range that is mapped in part, nothing would be mapped. The page-table pages stay.
            job.table_makers().for_each(|page| handle.unmap_single(page));
        }
        Ok(engine)
    }

    /// A thread's access to the VM.
    ///
    /// # Errors
    /// The engine's.
    pub(crate) fn handle(&self) -> Result<VcpuHandle, Error> {
        let bitmap = vec![0; self.job.part_pages().div_ceil(64) as usize];
        let memslots = self.memslots;
        Ok(VcpuHandle { vcpu: self.vm.create_vcpu()?, frames: self.job.frames(), memslots, bitmap })
    }

    /// Checks the engine's own counts, after [`PeerJob::check`].
    ///
    /// # Errors
    /// Which count is wrong, as a sentence.
    pub(crate) fn check(&self) -> Result<(), String> {
        let (stats, pages) = (self.vm.stats(), self.job.all_pages());
        let expect = |what: &str, counted: u64| {
            if counted == pages { Ok(()) } else { Err(format!("{what}: {counted} pages counted, {pages} used")) }
        };
        match self.job.operation {
            Operation::MapRange2m => expect("2 MiB leaves", stats.installed_2m * BLOCK_PAGES)?,
            Operation::Split2m => expect("splits", stats.splits * BLOCK_PAGES)?,
            Operation::Fault => expect("faults", stats.faults)?,
            _ => {}
        }
        if !matches!(self.job.operation, Operation::MapRange2m | Operation::Split2m) {
            let is_pinned = self.memslots == Memslots::Pinned;
            let nr_unmapped = if is_pinned { self.job.table_makers().count() as u64 } else { 0 };
            expect("4 KiB leaves", stats.installed_4k - nr_unmapped)?;
        }
        let is_protected = matches!(self.job.operation, Operation::ProtectRange | Operation::Protect4k);
        if is_protected && self.memslots == Memslots::Faulted {
            expect("protected", stats.protected + BLOCK_PAGES * stats.tables_protected)?;
        }
        Ok(())
    }
}

impl Shared for Engine {
    type Handle = VcpuHandle;

    #[inline]
    fn each(&self, step: impl Fn(&mut VcpuHandle, u64) -> u64) -> Result<impl FnMut(u64) -> u64, Error> {
        let mut handle = self.handle()?;
        Ok(move |call| step(&mut handle, call))
    }
}

/// One vCPU, and the bitmap of its thread.
pub(crate) struct VcpuHandle {
    vcpu: Vcpu<FrameHost, Npt>,
    frames: Frames,
    memslots: Memslots,
    bitmap: Vec<u64>,
}

impl VcpuHandle {
    fn is_pinned(&self) -> bool {
        self.memslots == Memslots::Pinned
    }

    #[inline]
    fn map_pinned(&self, first: u64, nr_pages: u64) {
        let _ = self.vcpu.vm().map_range(&Mapping {
            range: GfnRange::new(Gfn(first), nr_pages),
            pfn: Pfn(self.frames.frame(first)),
            protection: Protection { writable: true, attributes: LeafAttributes::default() },
            largest: PageSize::Size2M,
        });
    }
}

#[inline]
fn gpa(page: u64) -> Gpa {
    Gfn(page).gpa()
}

// The check notices what fails here.
impl Table for VcpuHandle {
    #[inline]
    fn fault(&mut self, page: u64) {
        let _ = self.vcpu.handle_fault(gpa(page), Access::Write);
    }

    #[inline]
    fn map(&mut self, pages: Pages) {
        if self.is_pinned() {
            return self.map_pinned(pages.first, pages.nr_pages);
        }
        let list: [Gpa; BATCH as usize] = array::from_fn(|index| gpa(pages.first + index as u64 * pages.step));
        let _ = self.vcpu.pre_fault_pages(&list[..pages.nr_pages.min(BATCH) as usize], Access::Write);
    }

    #[inline]
    fn map_single(&mut self, page: u64) {
        if self.is_pinned() { self.map_pinned(page, 1) } else { self.fault(page) }
    }

    fn map_range(&mut self, first: u64, nr_pages: u64, _frames: Frames) {
        if self.is_pinned() {
            return self.map_pinned(first, nr_pages);
        }
        let _ = self.vcpu.pre_fault_memory(gpa(first), address(nr_pages) as u64, Access::Write);
    }

    #[inline]
    fn query(&mut self, start: u64, mask: u64, pages: Pages) -> u64 {
        if self.is_pinned() {
            let mut translate = |page: u64| self.vcpu.translate(gpa(start + (page & mask)));
            return pages.iter().map(|page| translate(page).map_or(0, |found| found.pfn.0)).sum();
        }
        let Ok(reader) = self.vcpu.vm().read_tables() else { return 0 };
        let mut cursor = reader.cursor();
        pages.iter().map(|page| cursor.query(gpa(start + (page & mask))).map_or(0, |found| found.pfn.0)).sum()
    }

    fn protect(&mut self, pages: Pages) {
        if self.is_pinned() {
            return pages.iter().for_each(|page| self.protect_range(page, 1));
        }
        let slot = pages.first / PART_PAGES;
        let _ = self.vcpu.vm().get_dirty_log(slot as u32, &mut self.bitmap);
    }

    fn protect_range(&mut self, first: u64, nr_pages: u64) {
        if self.is_pinned() {
            let read_only = Protection { writable: false, attributes: LeafAttributes::default() };
            let _ = self.vcpu.vm().protect_range(GfnRange::new(Gfn(first), nr_pages), &read_only);
            return;
        }
        let _ = set_slot(self.vcpu.vm(), first / PART_PAGES, nr_pages, MemoryRegionFlags::LOG_DIRTY_PAGES, None);
    }

    #[inline]
    fn unmap_single(&mut self, page: u64) {
        self.unmap_range(page, 1);
    }

    #[inline]
    fn unmap_range(&mut self, first: u64, nr_pages: u64) {
        if self.is_pinned() {
            let _ = self.vcpu.vm().unmap_range(GfnRange::new(Gfn(first), nr_pages));
            return;
        }
        drop(self.vcpu.vm().invalidate_range(GfnRange::new(Gfn(first), nr_pages)));
    }

    #[inline]
    fn split(&mut self, page: u64) {
        let _ = self.vcpu.vm().split_range(GfnRange::new(Gfn(page), BLOCK_PAGES), PageSize::Size4K);
    }

    fn look(&mut self, page: u64) -> Option<Leaf> {
        let found = self.vcpu.vm().read_tables().ok()?.cursor().query(gpa(page))?;
        Some(Leaf { frame: found.pfn.0, writable: found.writable, huge: found.size != PageSize::Size4K })
    }
}
