//! The guide's rule for calls of the host: the VM's lock is not held wherever the host may block.
//! Each such method here takes the lock itself, by a call of the VM. There is one thread, so if the
//! call has to sleep for the lock, this thread holds it.
#![cfg(not(any(loom, shuttle)))]
#![allow(missing_docs)]
#![allow(unsafe_code, reason = "implements the host's contract over the global allocator")]

use std::alloc::{Layout, alloc, dealloc};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::io::Write;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use slat::baselines::{Locking, Park};
use slat::dirty::{DirtyTracking, ManualProtect};
use slat::format::{Ept, Format, LeafAttributes, Npt, Stage2};
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};
use slat::slots::{MemoryAttributes, UserfaultBitmap};
use slat::tables::{Mapping, Protection};
use slat::{
    Access, Config, Gfn, GfnRange, Gpa, Host, Hpa, MemoryRegion, MemoryRegionFlags, PAGE_SIZE, PageSize, Pfn, Vm,
};

const MIB: u64 = 1 << 20;
const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const NONE: MemoryRegionFlags = MemoryRegionFlags::empty();

thread_local! {
    /// The host's method that this thread is in.
    static INSIDE: Cell<&'static str> = const { Cell::new("") };
}

/// The VM, once it exists, and the methods that have called it.
struct Probe<F: Format> {
    vm: OnceLock<Weak<Vm<Prober<F>, F>>>,
    came_by: Mutex<BTreeSet<&'static str>>,
}

impl<F: Format> Probe<F> {
    fn enter(&self, method: &'static str) {
        // Neither for the calls below this one, nor while there is no VM.
        if INSIDE.get().is_empty() {
            let Some(vm) = self.vm.get().and_then(Weak::upgrade) else { return };
            INSIDE.set(method);
            // Nothing is mapped there; the call takes the lock to find that.
            assert_eq!(vm.split_range(GfnRange::new(Gfn(1 << 30), 1), PageSize::Size4K), Ok(0));
            self.came_by.lock().unwrap().insert(method);
            INSIDE.set("");
        }
    }
}

struct Prober<F: Format>(Arc<Probe<F>>);

struct Backing<F: Format>(Arc<Probe<F>>);

impl<F: Format> Drop for Backing<F> {
    fn drop(&mut self) {
        self.0.enter("the drop of a backing");
    }
}

impl<F: Format> Park for Prober<F> {
    fn park(&self, _: &AtomicU32, _: u32) {
        // A panic must not leave the host; and the harness would capture the usual output.
        let _ = writeln!(std::io::stderr(), "the VM's lock is held during a call of the host: {}", INSIDE.get());
        std::process::abort();
    }
    fn unpark_one(&self, _: *const AtomicU32) -> bool {
        false
    }
    fn unpark_all(&self, _: *const AtomicU32) {}
}

// SAFETY: the global allocator hands out each page-table page once. No CPU walks them. There is one
// thread, for which each moment is a barrier.
unsafe impl<F: Format> Host for Prober<F> {
    type Backing = Backing<F>;

    fn allocate_table(&self, layout: Layout, _: TableNode, wait: AllocationWait) -> Option<Hpa> {
        if wait == AllocationWait::Never {
            return None;
        }
        self.0.enter("allocate_table");
        // SAFETY: a page-table page has a size.
        Some(Hpa(unsafe { alloc(layout) }.expose_provenance() as u64))
    }
    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        // SAFETY: it came from `allocate_table`.
        unsafe { dealloc(self.table_ptr(table), layout) }
    }
    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(table.0 as usize)
    }
    fn resolve(&self, _: &Backing<F>, _: Gfn, page: u64, _: Access) -> Result<Resolved, Unresolved> {
        self.0.enter("resolve");
        Ok(Resolved::memory(Pfn((1 << 20) + page), PageSize::Size2M))
    }
    fn resolve_private(&self, _: &Backing<F>, _: Gfn, page: u64, _: Access) -> Result<Resolved, Unresolved> {
        self.0.enter("resolve_private");
        Ok(Resolved::memory(Pfn((1 << 21) + page), PageSize::Size2M))
    }
    fn flush(&self, _: &[GfnRange]) {
        self.0.enter("flush");
    }
    fn release_mapped(&self, _: GfnRange, _: Pfn) {
        self.0.enter("release_mapped");
    }
    fn drain_modification_logs(&self, _: &mut dyn FnMut(&[Gpa])) {
        self.0.enter("drain_modification_logs");
    }
    fn has_barrier_on_all_cpus(&self) -> bool {
        true
    }
    fn barrier_on_all_cpus(&self) {
        self.0.enter("barrier_on_all_cpus");
    }
    fn should_yield(&self) -> bool {
        true
    }
    fn yield_now(&self) {
        self.0.enter("yield_now");
    }
    fn timestamp_ns(&self) -> u64 {
        0
    }

    fn parking(&self) -> Option<&dyn Park> {
        Some(self)
    }
}

/// Every operation on memslots and pages, once. Returns the host's methods that have called the VM.
fn do_everything<F: Format>(config: Config) -> BTreeSet<&'static str> {
    let probe = Arc::new(Probe::<F> { vm: OnceLock::new(), came_by: Mutex::default() });
    let vm = Arc::new(Vm::<_, F>::new(Prober(Arc::clone(&probe)), config).unwrap());
    probe.vm.set(Arc::downgrade(&vm)).unwrap_or_else(|_| unreachable!("set once"));
    let set = |flags, start: u64, size_bytes, backing, userfault_bitmap| {
        let guest_phys_addr = Gpa(start);
        let region =
            MemoryRegion { slot: 0, flags, guest_phys_addr, memory_size: size_bytes, backing, userfault_bitmap };
        vm.set_user_memory_region(region).unwrap();
    };
    let backing = || Some(Backing(Arc::clone(&probe)));
    let whole = GfnRange::new(Gfn(0), 1024);

    set(NONE, 0, 4 * MIB, backing(), None);
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.pre_fault_memory(Gpa(0), 4 * MIB, Access::Write), Ok(4 * MIB));
    set(LOG, 0, 4 * MIB, None, None);
    for page in 0..8 {
        let _resumed = vcpu.handle_fault(Gpa(page * 100 * PAGE_SIZE), Access::Write).unwrap();
    }
    let mut bitmap = [0; 16];
    vm.get_dirty_log(0, &mut bitmap).unwrap();
    vm.clear_dirty_log(0, 0, 1024, &bitmap).unwrap();
    set(NONE, 0, 4 * MIB, None, None);
    vm.split_range(whole, PageSize::Size4K).unwrap();
    vm.recover_range(whole).unwrap();
    vm.age_range(whole).unwrap();
    drop(vm.invalidate_range(GfnRange::new(Gfn(3), 700)).unwrap());
    let _resumed = vcpu.handle_fault(Gpa(0x3000), Access::Write).unwrap();

    let words: Arc<Vec<AtomicU64>> = Arc::new((0..16).map(|_| AtomicU64::new(1)).collect());
    set(MemoryRegionFlags::USERFAULT, 0, 4 * MIB, None, Some(UserfaultBitmap::new(words, PageSize::Size4K)));
    let _resumed = vcpu.handle_fault(Gpa(0x3000), Access::Write).unwrap();
    vm.rescan_userfault(0, 0, 1024).unwrap();
    set(NONE, 0, 4 * MIB, None, None);
    set(NONE, 8 * MIB, 4 * MIB, None, None);
    set(NONE, 0, 0, None, None);

    set(MemoryRegionFlags::GUEST_MEMFD, 0, 4 * MIB, backing(), None);
    vm.set_memory_attributes(Gpa(0), PAGE_SIZE, MemoryAttributes::PRIVATE).unwrap();
    let _resumed = vcpu.handle_fault(Gpa(0), Access::Write).unwrap();
    set(NONE, 0, 0, None, None);

    set(MemoryRegionFlags::PINNED, 0, 4 * MIB, backing(), None);
    let protection = Protection { writable: true, attributes: LeafAttributes::DATA };
    let mapping = Mapping { range: whole, pfn: Pfn(1 << 22), protection, largest: PageSize::Size2M };
    vm.map_range(&mapping).unwrap();
    vm.map_range(&mapping).unwrap_err();
    vm.unmap_range(GfnRange::new(Gfn(3), 1)).unwrap();
    vm.protect_range(GfnRange::new(Gfn(600), 1), &Protection { writable: false, ..protection }).unwrap();
    set(NONE, 0, 0, None, None);
    vm.reclaim();
    probe.came_by.lock().unwrap().clone()
}

fn methods_that_called<F: Format>(config: Config) -> BTreeSet<&'static str> {
    [Locking::Shared, Locking::Exclusive].into_iter().fold(BTreeSet::new(), |mut all, locking| {
        for manual_protect in [ManualProtect::Disabled, ManualProtect::Enabled, ManualProtect::InitiallySet] {
            let mut config = config.with_manual_protect(manual_protect);
            config.locking = locking;
            all.extend(do_everything::<F>(config));
        }
        all
    })
}

#[test]
fn the_lock_is_not_held_where_the_host_may_block() {
    let mut came_by = methods_that_called::<Npt>(Config::default());
    came_by.extend(methods_that_called::<Npt>(Config::default().with_dirty_tracking(DirtyTracking::DirtyBit)));
    came_by.extend(methods_that_called::<Stage2>(Config::default()));
    let logs = Config::default().with_dirty_tracking(DirtyTracking::PageModificationLog);
    came_by.extend(methods_that_called::<Ept>(logs));
    // Each of them was called, and returned.
    let expected = [
        "allocate_table",
        "barrier_on_all_cpus",
        "drain_modification_logs",
        "flush",
        "release_mapped",
        "resolve",
        "resolve_private",
        "the drop of a backing",
        "yield_now",
    ];
    assert_eq!(came_by, BTreeSet::from(expected));
}
