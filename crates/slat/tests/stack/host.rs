//! A host that takes almost no stack itself, and a global allocator that takes none: the measured
//! stack is the engine's.

use std::alloc::{GlobalAlloc, Layout};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};
use slat::{Access, Gfn, GfnRange, Gpa, Host, Hpa, PAGE_SIZE, PageSize, Pfn};

/// Hands out memory that was never used before, and keeps what is freed: so it needs no list, and
/// all of its memory is zero.
struct Bump {
    start: AtomicPtr<u8>,
    used_bytes: AtomicUsize,
}

impl Bump {
    /// Untouched memory costs nothing.
    const BYTES: usize = 16 << 30;

    /// Where the memory begins.
    fn start(&self) -> *mut u8 {
        let start = self.start.load(Ordering::Acquire);
        if !start.is_null() {
            return start;
        }
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: new memory, at an address of the kernel's choice.
        let new =
            unsafe { libc::mmap(std::ptr::null_mut(), Bump::BYTES, protection, flags | libc::MAP_NORESERVE, -1, 0) };
        assert_ne!(new, libc::MAP_FAILED);
        match self.start.compare_exchange(std::ptr::null_mut(), new.cast(), Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => new.cast(),
            Err(found) => found,
        }
    }
}

// SAFETY: each answer is aligned, inside the memory, and returned once.
unsafe impl GlobalAlloc for Bump {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let size_bytes = layout.size() + layout.align();
        let at = self.used_bytes.fetch_add(size_bytes, Ordering::Relaxed);
        if at + size_bytes > Bump::BYTES {
            return std::ptr::null_mut();
        }
        let start = self.start().wrapping_add(at);
        start.wrapping_add(start.addr().wrapping_neg() % layout.align())
    }

    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises. It is zero, since it was never used.
        unsafe { self.alloc(layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Bump = Bump { start: AtomicPtr::new(std::ptr::null_mut()), used_bytes: AtomicUsize::new(0) };

/// Guest memory with contiguous frames.
#[derive(Clone, Copy)]
pub struct Backing {
    pub first: Pfn,
    pub max_size: PageSize,
    pub writable: bool,
}

type Hook = Box<dyn FnMut() + Send>;

/// Freed page-table pages, of one page each.
struct FreeTables(Mutex<Vec<Hpa>>);

impl Default for FreeTables {
    /// As many as a scene has, so that it never grows.
    fn default() -> FreeTables {
        FreeTables(Mutex::new(Vec::with_capacity(1 << 14)))
    }
}

#[derive(Default)]
pub struct StackHost {
    free_tables: FreeTables,
    pub refuses_tables: AtomicBool,
    pub always_yields: AtomicBool,
    has_barrier: bool,
    ignores_zapped_leaves: bool,
    /// Runs once, in the next resolve.
    pub in_resolve: Mutex<Option<Hook>>,
    clock_ns: AtomicU64,
}

impl StackHost {
    /// A host that can make a barrier on all CPUs, or claims so.
    pub fn with_barrier() -> StackHost {
        StackHost { has_barrier: true, ..StackHost::default() }
    }

    /// A host that need not hear of zapped leaves: they go with their page-table pages.
    pub fn that_ignores_zapped_leaves() -> StackHost {
        StackHost { ignores_zapped_leaves: true, ..StackHost::default() }
    }
}

// SAFETY: page-table pages are the allocator's and have no other user; no CPU walks them.
unsafe impl Host for StackHost {
    type Backing = Backing;

    fn allocate_table(&self, layout: Layout, _: TableNode, _: AllocationWait) -> Option<Hpa> {
        if self.refuses_tables.load(Ordering::Relaxed) {
            return None;
        }
        if layout.size() == PAGE_SIZE as usize
            && let Some(table) = self.free_tables.0.lock().unwrap().pop()
        {
            return Some(table);
        }
        // SAFETY: the layout is not of size zero.
        let table = unsafe { ALLOCATOR.alloc_zeroed(layout) };
        (!table.is_null()).then(|| Hpa(table.expose_provenance() as u64))
    }

    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        if layout.size() == PAGE_SIZE as usize {
            self.free_tables.0.lock().unwrap().push(table);
        }
    }

    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(table.0 as usize)
    }

    fn resolve(&self, backing: &Backing, _: Gfn, page: u64, _: Access) -> Result<Resolved, Unresolved> {
        if let Ok(mut hook) = self.in_resolve.try_lock()
            && let Some(mut hook) = hook.take()
        {
            hook();
        }
        let &Backing { first, max_size, writable } = backing;
        Ok(Resolved { writable, ..Resolved::memory(Pfn(first.0 + page), max_size) })
    }

    fn resolve_private(&self, backing: &Backing, gfn: Gfn, page: u64, access: Access) -> Result<Resolved, Unresolved> {
        self.resolve(backing, gfn, page, access)
    }

    fn resolve_resident(&self, backing: &Backing, gfn: Gfn, page: u64, access: Access) -> Option<Resolved> {
        self.resolve(backing, gfn, page, access).ok()
    }

    fn flush(&self, _: &[GfnRange]) {}

    fn drain_modification_logs(&self, log: &mut dyn FnMut(&[Gpa])) {
        log(&[Gpa(0), Gpa(PAGE_SIZE), Gpa(1 << 32)]);
    }

    fn guest_memory_ptr(&self, frame: Pfn) -> Option<*mut u8> {
        Some(self.table_ptr(frame.hpa()))
    }

    fn has_barrier_on_all_cpus(&self) -> bool {
        self.has_barrier
    }

    fn needs_zapped_leaves(&self) -> bool {
        !self.ignores_zapped_leaves
    }

    fn should_yield(&self) -> bool {
        self.always_yields.load(Ordering::Relaxed)
    }

    fn timestamp_ns(&self) -> u64 {
        self.clock_ns.fetch_add(1000, Ordering::Relaxed)
    }
}

/// Memory with frames behind it: `size_bytes`, aligned to 2 MiB.
pub fn real_memory(size_bytes: usize) -> Pfn {
    let layout = Layout::from_size_align(size_bytes, 2 << 20).unwrap();
    // SAFETY: the layout is not of size zero.
    Hpa(unsafe { ALLOCATOR.alloc_zeroed(layout) }.expose_provenance() as u64).pfn()
}
