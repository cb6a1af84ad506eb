//! Pages that threads map in advance, and unmap, while CPUs use them. Each mapping has a frame of its
//! own, so that no answer of the host comes back.

use std::alloc::Layout;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use shuttle::thread::{self, ThreadId};
use slat::baselines::AtomicU64;
use slat::events::{self, Event};
use slat::format::{Format, LeafAttributes};
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};
use slat::tables::{Mapping, Protection};
use slat::{Access, Config, Gfn, GfnRange, Gpa, Host, Hpa, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Pfn, Vm};

use super::schedules::{check_less, pick, random};
use super::world::{Backing, Breaking, ShuttleHost, Tiny, backing, find_by, region};
use super::{BLOCK, NR_GUESTS, NR_PAGES, SCHEDULES, USED, is_record_of, on_threads, save};

pub struct PinnedHost {
    inner: ShuttleHost,
    /// Mappings so far.
    nr_mappings: AtomicU64,
    /// A thread that mostly gets no page-table page.
    refused: OnceLock<ThreadId>,
}

impl PinnedHost {
    /// The number of the first frame, of 2 MiB, that no other mapping has.
    pub fn fresh_frame(&self) -> u64 {
        (self.nr_mappings.fetch_add(1, Ordering::SeqCst) + 1) * 16 * BLOCK
    }

    pub fn refuse_this_thread(&self) {
        self.refused.set(thread::current().id()).unwrap();
    }

    pub fn step(&self) {
        self.inner.step();
    }
}

// SAFETY: `ShuttleHost` keeps the contract; nothing is resolved.
unsafe impl Host for PinnedHost {
    type Backing = Backing;

    fn allocate_table(&self, layout: Layout, node: TableNode, wait: AllocationWait) -> Option<Hpa> {
        let is_refused = self.refused.get() == Some(&thread::current().id());
        if (wait == AllocationWait::Never || is_refused) && random(3) == 0 {
            return None;
        }
        self.inner.allocate_table(layout, node, wait)
    }

    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { self.inner.free_table(table, layout) }
    }

    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        self.inner.table_ptr(table)
    }

    fn resolve(&self, _: &Backing, _: Gfn, _: u64, _: Access) -> Result<Resolved, Unresolved> {
        unreachable!("pinned pages are mapped in advance")
    }

    fn flush(&self, ranges: &[GfnRange]) {
        self.inner.flush(ranges);
    }

    /// Other memory is there from now on: no CPU may use the frames of before.
    fn release_mapped(&self, range: GfnRange, _: Pfn) {
        let other = self.fresh_frame();
        for gfn in USED.into_iter().filter(|&gfn| range.contains(Gfn(gfn))) {
            events::record(Event::HostChanges { gfn, pfn: other + gfn });
        }
    }

    fn yield_now(&self) {
        self.inner.yield_now();
    }

    fn timestamp_ns(&self) -> u64 {
        0
    }
}

pub type PinnedVm<F> = Arc<Vm<PinnedHost, F>>;

pub const PROTECTION: Protection = Protection { writable: true, attributes: LeafAttributes::DATA };

/// What is mapped at a time.
#[derive(Clone, Copy, PartialEq)]
enum Mapped {
    Pages,
    /// Or blocks. Where a block has a page-table page, such a mapping fails half way, for its PTEs
    /// stand for several pages; so this tries what is mapped and undone, too.
    Blocks,
}

fn mapper<F: Format>(vm: &PinnedVm<F>, mapped: Mapped, block: u64) {
    for _ in 0..3 {
        let is_huge = mapped == Mapped::Blocks && random(3) == 0;
        let first = if is_huge { block } else { block + random(4) };
        let (nr_pages, largest) = if is_huge { (BLOCK, PageSize::Size2M) } else { (1, PageSize::Size4K) };
        let pfn = Pfn(vm.host().fresh_frame() + first);
        let mapping = Mapping { range: GfnRange::new(Gfn(first), nr_pages), pfn, protection: PROTECTION, largest };
        let is_mapped = vm.map_range(&mapping).is_ok();
        vm.host().inner.step();
        if is_mapped && random(2) == 0 {
            let read_only = Protection { writable: false, ..PROTECTION };
            vm.protect_range(mapping.range, &read_only).unwrap();
        }
    }
}

/// Unmaps pages, parts of blocks, or blocks.
fn unmapper<F: Format>(vm: &PinnedVm<F>) {
    for _ in 0..2 {
        let block = GfnRange::new(Gfn(random(2) * BLOCK), BLOCK);
        let page = GfnRange::new(Gfn(block.start.0 + random(3)), 1);
        let parts = [block, page, GfnRange::new(block.start, 2), GfnRange::new(Gfn(0), BLOCK + 1)];
        let range = pick(&parts);
        if random(3) == 0 {
            drop(vm.invalidate_range(range).unwrap());
        } else {
            vm.unmap_range(range).unwrap();
        }
    }
}

pub fn guest<F: Format>(vm: &PinnedVm<F>, index: usize, pages: [u64; 2]) {
    let mut vcpu = vm.create_vcpu().unwrap();
    let host = vm.host();
    for _ in 0..3 {
        let gfn = pick(&pages);
        let is_done = host.inner.during_access(index, || {
            events::record(Event::CpuWalks { cpu: index as u64 });
            let reads = |cell| events::record(Event::CpuReads { cpu: index as u64, gfn, cell });
            let found = find_by(vm, gfn, reads);
            if let Some(found) = &found {
                events::record(Event::CpuTranslates { cpu: index as u64, gfn, cell: found.address() });
            }
            host.inner.step();
            found.is_some()
        });
        if !is_done {
            let outcome = vcpu.handle_fault(Gpa(gfn * PAGE_SIZE), Access::Read).unwrap();
            assert!(matches!(outcome, Outcome::Resume | Outcome::Exit(_)));
        }
    }
}

/// A VM with one memslot, which is pinned.
pub fn new_vm<F: Format>() -> PinnedVm<F> {
    let inner = ShuttleHost::new(NR_GUESTS, Config::default().dirty_tracking);
    let host = PinnedHost { inner, nr_mappings: AtomicU64::new(0), refused: OnceLock::new() };
    let vm: PinnedVm<F> = Arc::new(Vm::new(host, Config::default()).unwrap());
    let memory = backing(0, PageSize::Size4K);
    vm.set_user_memory_region(region(0, MemoryRegionFlags::PINNED, 0, NR_PAGES, Some(memory))).unwrap();
    vm
}

/// Runs one schedule.
fn pinned<F: Format>(vm: &PinnedVm<F>, mapped: Mapped) {
    let first = pick(&[0, BLOCK]);
    let bodies: Vec<Box<dyn FnOnce(&PinnedVm<F>) + Send>> = vec![
        Box::new(move |vm| guest(vm, 0, [first, first + 1])),
        Box::new(move |vm| mapper(vm, mapped, first)),
        Box::new(move |vm| mapper(vm, mapped, first)),
        Box::new(unmapper),
        Box::new(unmapper),
    ];
    on_threads(vm, bodies);
}

fn recorded<F: Format>() {
    events::start();
    let vm = new_vm::<F>();
    is_record_of("invalidation", &vm);
    pinned(&vm, Mapped::Pages);
    save();
}

#[test]
fn pinned_pages_with_two_levels() {
    check_less(SCHEDULES, recorded::<Tiny<2>>);
}

#[test]
fn pinned_pages_with_three_levels() {
    check_less(SCHEDULES, recorded::<Tiny<3>>);
}

/// Not replayed: PTEs stand for several pages. Undone mappings are in `undo.rs`.
#[test]
fn pinned_blocks() {
    check_less(SCHEDULES, || pinned(&new_vm::<Tiny<2>>(), Mapped::Blocks));
    check_less(SCHEDULES, || pinned(&new_vm::<Breaking<2>>(), Mapped::Blocks));
}
