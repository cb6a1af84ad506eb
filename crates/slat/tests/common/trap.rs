//! A host that stops a thread at a critical point, while other threads continue.

use std::alloc::Layout;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use slat::baselines::{Locking, Park};
use slat::format::Format;
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved, ZappedLeaf};
use slat::{Access, Config, Gfn, GfnRange, Host, Hpa, Vm};

use super::{TestBacking, TestHost};

/// A point in the host at which one thread stops, once the trap is set, until it is released.
#[derive(Debug, Default)]
pub struct Trap(Mutex<Option<(Sender<()>, Receiver<()>)>>);

/// The other side of a trap: it learns that a thread has stopped, and releases it.
pub struct Keeper {
    pub arrived: Receiver<()>,
    pub go: Sender<()>,
}

impl Trap {
    pub fn set(&self) -> Keeper {
        let ((here, arrived), (go, released)) = (channel(), channel());
        *self.0.lock().unwrap() = Some((here, released));
        Keeper { arrived, go }
    }

    fn pass(&self) {
        let set = self.0.lock().unwrap().take();
        if let Some((here, released)) = set {
            here.send(()).unwrap();
            released.recv().unwrap();
        }
    }
}

/// Called at each look at a page-table page, except at its own looks.
type AtTable = Box<dyn FnMut() + Send>;

#[derive(Default)]
pub struct Probe(Mutex<Option<AtTable>>);

impl Probe {
    pub fn set(&self, at_table: impl FnMut() + Send + 'static) {
        *self.0.lock().unwrap() = Some(Box::new(at_table));
    }

    pub fn remove(&self) {
        *self.0.lock().unwrap() = None;
    }

    fn pass(&self) {
        let set = self.0.lock().unwrap().take();
        if let Some(mut at_table) = set {
            at_table();
            *self.0.lock().unwrap() = Some(at_table);
        }
    }
}

impl std::fmt::Debug for Probe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Probe").finish_non_exhaustive()
    }
}

/// [`TestHost`] with a trap in `resolve` and in `resolve_resident`, one in `table_ptr` (so inside a
/// guard) and one in `flush`, and the order of the engine's calls.
#[derive(Debug, Default)]
pub struct TrapHost {
    pub host: TestHost,
    pub in_resolve: Trap,
    pub in_resident: Trap,
    pub in_guard: Trap,
    pub in_flush: Trap,
    pub at_table: Probe,
    /// Looks at page-table pages since the last `should_yield` or flush; and the most so far.
    step: AtomicU64,
    pub longest_step: AtomicU64,
    /// Frees that came before any flush.
    pub freed_unflushed: AtomicU32,
}

impl TrapHost {
    /// A host that needs no report of leaves.
    pub fn without_reports() -> TrapHost {
        TrapHost { host: TestHost::without_reports(), ..TrapHost::default() }
    }

    /// Counts steps from zero.
    pub fn forget_steps(&self) {
        self.step.store(0, Ordering::SeqCst);
        self.longest_step.store(0, Ordering::SeqCst);
    }
}

// SAFETY: all calls go to a host that keeps the contract.
unsafe impl Host for TrapHost {
    type Backing = Arc<TestBacking>;

    fn allocate_table(&self, layout: Layout, node: TableNode, wait: AllocationWait) -> Option<Hpa> {
        self.host.allocate_table(layout, node, wait)
    }

    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        self.freed_unflushed.fetch_add(u32::from(self.host.nr_flushes() == 0), Ordering::SeqCst);
        // SAFETY: as the caller promises.
        unsafe { self.host.free_table(table, layout) }
    }

    fn has_incoherent_walkers(&self) -> bool {
        self.host.has_incoherent_walkers()
    }

    fn clean_ptes(&self, first: *const u8, size_bytes: usize) {
        self.host.clean_ptes(first, size_bytes);
    }

    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        self.in_guard.pass();
        self.at_table.pass();
        let step = self.step.fetch_add(1, Ordering::SeqCst) + 1;
        self.longest_step.fetch_max(step, Ordering::SeqCst);
        self.host.table_ptr(table)
    }

    fn resolve(&self, backing: &Self::Backing, gfn: Gfn, page: u64, access: Access) -> Result<Resolved, Unresolved> {
        let resolved = self.host.resolve(backing, gfn, page, access);
        self.in_resolve.pass();
        assert!(!backing.dropped.load(Ordering::SeqCst), "the backing was dropped under a resolve");
        resolved
    }

    fn resolve_private(
        &self,
        backing: &Self::Backing,
        gfn: Gfn,
        page: u64,
        access: Access,
    ) -> Result<Resolved, Unresolved> {
        let resolved = self.host.resolve_private(backing, gfn, page, access);
        self.in_resolve.pass();
        resolved
    }

    fn resolve_resident(&self, backing: &Self::Backing, gfn: Gfn, page: u64, access: Access) -> Option<Resolved> {
        let resolved = self.host.resolve_resident(backing, gfn, page, access);
        self.in_resident.pass();
        assert!(!backing.dropped.load(Ordering::SeqCst), "the backing was dropped under a resolve");
        resolved
    }

    fn flush(&self, ranges: &[GfnRange]) {
        self.step.store(0, Ordering::SeqCst);
        self.in_flush.pass();
        self.host.flush(ranges);
    }

    fn leaf_zapped(&self, leaf: ZappedLeaf) {
        self.host.leaf_zapped(leaf);
    }

    fn needs_zapped_leaves(&self) -> bool {
        self.host.needs_zapped_leaves()
    }

    fn should_yield(&self) -> bool {
        self.step.store(0, Ordering::SeqCst);
        self.host.should_yield()
    }

    fn yield_now(&self) {
        self.host.yield_now();
    }

    fn timestamp_ns(&self) -> u64 {
        self.host.timestamp_ns()
    }

    fn parking(&self) -> Option<&dyn Park> {
        self.host.parking()
    }
}

/// An empty VM with such a host.
pub fn trap_vm<F: Format>(locking: Locking) -> Arc<Vm<TrapHost, F>> {
    trap_vm_with(Config::default().with_locking(locking))
}

/// As [`trap_vm`], with `config`.
pub fn trap_vm_with<F: Format>(config: Config) -> Arc<Vm<TrapHost, F>> {
    Arc::new(Vm::new(TrapHost::default(), config).unwrap())
}
