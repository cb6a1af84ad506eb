//! A host for tests. The physical addresses of its page-table pages are not its pointers;
//! allocations can be made to fail; flushes and zapped leaves are recorded. Another call can
//! overtake a flush, a resolve or an allocation, and frames and page-table pages can have nodes.
//!
//! - `backing`: frames that are numbers without memory behind them.
//! - `tables`: a reference walk.
//! - `vms`: VMs and memslots.
//! - `bits`: what a test's format inherits.
//! - `formats`: a test for each format and locking.
//! - `broken`: a format with break before make, and an observer that checks it.
//! - `log`: the dirty log of a memslot, and a CPU that sets A and D.
//! - `guest`: threads that walk the page tables as CPUs do.
//! - `trap` and `hooked`: they stop or overtake a thread at a critical point.
//! - `answers`: what the host says of a page, as a test chooses.
//! - `parking`: threads that sleep on a word.

#![allow(dead_code, reason = "each test binary uses a part")]
#![allow(missing_docs)]
#![allow(unsafe_code, reason = "implements the host's contract over the global allocator")]

pub mod answers;
mod backing;
mod bits;
pub mod broken;
mod formats;
pub mod guest;
pub mod hooked;
pub mod log;
mod nodes;
mod parking;
pub mod random;
mod tables;
pub mod trap;
mod vms;

#[cfg(target_os = "linux")]
#[path = "../support/membarrier.rs"]
mod membarrier;

use std::alloc::{Layout, alloc, dealloc};
use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::mem::take;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::{Duration, Instant};

pub use backing::{Frame, PRIVATE_PFN, TestBacking, Writes};
#[allow(unused_imports, reason = "each test binary uses a part")]
pub(crate) use bits::bits_of;
#[allow(unused_imports, reason = "each test binary uses a part")]
pub(crate) use formats::{each, for_each_locking, lockings};
pub use nodes::Nodes;
use slat::baselines::Park;
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved, ZappedLeaf};
use slat::{Access, Gfn, GfnRange, Gpa, Host, Hpa, NodeId, Pfn};
pub use tables::*;
pub use vms::*;

/// The longest wait of a test for an event that must occur. Even on a slow machine a longer wait
/// would never end.
pub const LONGEST_WAIT: Duration = Duration::from_secs(600);

/// Waits until `has_happened`. Returns early if `is_over`, which another thread sets when it fails.
#[track_caller]
pub fn wait_until(what: &str, is_over: &AtomicBool, has_happened: impl Fn() -> bool) {
    let start = Instant::now();
    while !has_happened() && !is_over.load(Ordering::SeqCst) {
        assert!(start.elapsed() < LONGEST_WAIT, "not in {LONGEST_WAIT:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The difference between a host-physical address and a pointer. Pointers are below it, and
/// addresses have at least 48 bits in every format.
pub const BIAS: u64 = 1 << 47;

/// The contents of a freed page-table page. No PTE has this value.
const POISON: u64 = 0x5a5a_5a5a_5a5a_5a5a;

/// Where incoherent walkers read a PTE, from where CPUs do: the page as it is in memory, behind the
/// caches. (Formats with such walkers have page-table pages of 4 KiB alone.)
pub const IN_MEMORY: usize = 4096;

/// The layout of a page-table page and of the same in memory.
fn with_memory(layout: Layout) -> Layout {
    Layout::from_size_align(2 * layout.size(), layout.align()).unwrap()
}

/// So many freed page-table pages keep their memory, so that a late walk reads [`POISON`].
const QUARANTINE_CAPACITY: usize = 4096;

thread_local! {
    /// How many methods of the host this thread is in. A test that counts the engine's memory skips
    /// the host's.
    pub static INSIDE_HOST: Cell<u32> = const { Cell::new(0) };
}

/// Marks this thread as inside the host.
struct InsideHost;

impl InsideHost {
    fn enter() -> InsideHost {
        INSIDE_HOST.set(INSIDE_HOST.get() + 1);
        InsideHost
    }
}

impl Drop for InsideHost {
    fn drop(&mut self) {
        INSIDE_HOST.set(INSIDE_HOST.get() - 1);
    }
}

/// A call of the host that another call can overtake.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Call {
    Flush,
    /// The end of a flush, before it returns.
    FlushEnd,
    Resolve,
    Allocate(AllocationWait),
    LeafZapped,
    /// The clean of a PTE that is present, or of a whole page.
    Clean,
    /// The clean of a PTE that is not present.
    CleanAbsent,
}

/// Runs once, at the `nth` call (from 1 on) of its kind.
struct CallHook {
    call: Call,
    nth: u32,
    run: Box<dyn FnOnce() + Send>,
}

impl std::fmt::Debug for CallHook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CallHook").field("call", &self.call).field("nth", &self.nth).finish_non_exhaustive()
    }
}

/// Frames that were released, the pages that had them, and how many flushes there had been.
pub type Released = Arc<Mutex<Vec<(GfnRange, Pfn, usize)>>>;

#[derive(Debug)]
pub struct TestHost {
    /// Live page-table pages: host-physical address to size.
    tables: Mutex<HashMap<u64, usize>>,
    /// Allocations that still succeed; negative: all do.
    allocations_left: AtomicI64,
    quarantine: Mutex<VecDeque<(u64, Layout)>>,
    /// Whether the page-table page that was freed last is allocated next.
    pub reuses_tables: AtomicBool,
    pub nr_reused_tables: AtomicU64,
    pub flushes: Mutex<Vec<Vec<GfnRange>>>,
    /// Whether a VM is made that reports each leaf.
    needs_zapped_leaves: bool,
    /// Zapped leaves, if they are to be recorded.
    pub zapped: Mutex<Option<Vec<ZappedLeaf>>>,
    /// Of pinned pages; `None` when the host is dropped.
    released: Option<Released>,
    /// Receives them, also if the host is dropped by then.
    pub zapped_sender: Mutex<Option<mpsc::Sender<ZappedLeaf>>>,
    /// Pages that a CPU had to flush at the end of its fault.
    pub local_flushes: Mutex<Vec<Gpa>>,
    /// The report of a leaf that panics, counted down to 1; 0 for none.
    pub panics_at_zapped: AtomicU32,
    /// The answer of `should_yield`.
    pub always_yields: AtomicBool,
    /// Whether other threads run between a resolve and its use.
    pub is_slow: AtomicBool,
    /// Accesses of guests, which a flush waits for.
    pub gate: guest::Gate,
    /// The sleepers by word and ticket, and the next ticket.
    parked: Mutex<(Vec<(usize, u64)>, u64)>,
    wakeup: Condvar,
    start: Instant,
    /// How far the engine's clock is ahead of the machine's.
    pub clock_ahead_ns: AtomicU64,
    pub resolves: AtomicU64,
    /// Queries whether a page is resident.
    pub nr_resident_queries: AtomicU64,
    /// What the CPUs have put into their page-modification logs; see [`log`].
    pub modification_log: Mutex<Vec<Gpa>>,
    hook: Mutex<Option<CallHook>>,
    /// How each page-table page was requested, since the list was last taken.
    pub asked: Mutex<Vec<(TableNode, AllocationWait)>>,
    /// Whether only allocations that may wait succeed.
    pub refuses_without_wait: AtomicBool,
    /// If there is more than one node.
    pub nodes: Mutex<Option<Nodes>>,
    /// Nodes of live page-table pages, if there are nodes.
    table_nodes: Mutex<HashMap<u64, u32>>,
    /// Held while PTEs are written back: else an older value could be written over a newer one.
    write_back: Mutex<()>,
    traps: Option<Box<trap::Traps>>,
    answers: Option<Box<answers::Answers>>,
}

impl Default for TestHost {
    fn default() -> TestHost {
        let _inside = InsideHost::enter();
        TestHost {
            tables: Mutex::default(),
            allocations_left: AtomicI64::new(-1),
            quarantine: Mutex::default(),
            reuses_tables: AtomicBool::new(false),
            nr_reused_tables: AtomicU64::new(0),
            flushes: Mutex::default(),
            needs_zapped_leaves: true,
            zapped: Mutex::default(),
            released: Some(Arc::default()),
            zapped_sender: Mutex::default(),
            local_flushes: Mutex::default(),
            panics_at_zapped: AtomicU32::new(0),
            always_yields: AtomicBool::new(false),
            is_slow: AtomicBool::new(false),
            gate: guest::Gate::default(),
            parked: Mutex::default(),
            wakeup: Condvar::new(),
            start: Instant::now(),
            clock_ahead_ns: AtomicU64::new(0),
            resolves: AtomicU64::new(0),
            nr_resident_queries: AtomicU64::new(0),
            modification_log: Mutex::default(),
            hook: Mutex::default(),
            asked: Mutex::default(),
            refuses_without_wait: AtomicBool::new(false),
            nodes: Mutex::default(),
            table_nodes: Mutex::default(),
            write_back: Mutex::default(),
            traps: None,
            answers: None,
        }
    }
}

impl TestHost {
    /// A host that needs no report of leaves.
    pub fn without_reports() -> TestHost {
        let mut host = TestHost::default();
        host.needs_zapped_leaves = false;
        host
    }

    /// Lets `n` more allocations of page-table pages succeed, then none.
    pub fn fail_after(&self, n: i64) {
        self.allocations_left.store(n, Ordering::SeqCst);
    }

    /// Calls `run` before the `nth` call of `call` from now on (from 1 on).
    pub fn overtake(&self, call: Call, nth: u32, run: impl FnOnce() + Send + 'static) {
        *self.hook.lock().unwrap() = Some(CallHook { call, nth, run: Box::new(run) });
    }

    /// Removes the hook. Returns whether it was called.
    pub fn was_overtaken(&self) -> bool {
        self.hook.lock().unwrap().take().is_none()
    }

    fn called(&self, call: Call) {
        let mut hook = self.hook.lock().unwrap();
        let due = match &mut *hook {
            Some(CallHook { call: of, nth, .. }) if *of == call => {
                *nth -= 1;
                if *nth == 0 { hook.take() } else { None }
            }
            _ => None,
        };
        drop(hook);
        if let Some(CallHook { run, .. }) = due {
            run();
        }
    }

    /// The page-table page that was freed last, if it is allocated next.
    fn freed_last(&self, layout: Layout) -> Option<*mut u8> {
        if !self.reuses_tables.load(Ordering::SeqCst) {
            return None;
        }
        let (table, _) = self.quarantine.lock().unwrap().pop_back_if(|(_, freed)| *freed == layout)?;
        self.nr_reused_tables.fetch_add(1, Ordering::SeqCst);
        Some((table - BIAS) as *mut u8)
    }

    pub fn never_fail(&self) {
        self.allocations_left.store(-1, Ordering::SeqCst);
    }

    /// Records zapped leaves from now on.
    pub fn record_zapped(&self) {
        *self.zapped.lock().unwrap() = Some(Vec::new());
    }

    /// The leaves that were zapped since the last call, by their guest frames.
    pub fn take_zapped(&self) -> Vec<ZappedLeaf> {
        let mut zapped = self.zapped.lock().unwrap().as_mut().map(take).expect("leaves are recorded");
        zapped.sort_by_key(|leaf| leaf.range.start);
        zapped
    }

    /// What was released since it was last taken. It outlives the host.
    pub fn released(&self) -> &Released {
        self.released.as_ref().expect("the host is alive")
    }

    /// The frames of pinned pages that were released since the last call, and the pages that had
    /// them, in order.
    pub fn take_released(&self) -> Vec<(Gfn, Pfn)> {
        let released = take(&mut *self.released().lock().unwrap());
        let pages = |(range, pfn, _): &(GfnRange, Pfn, usize)| {
            let (start, pfn) = (range.start, *pfn);
            (0..range.nr_pages()).map(move |page| (Gfn(start.0 + page), Pfn(pfn.0 + page)))
        };
        let mut pages: Vec<_> = released.iter().flat_map(pages).collect();
        pages.sort();
        pages
    }

    /// The page-table page at `table`, for a test: traps do not notice.
    pub fn page(&self, table: Hpa) -> *mut u8 {
        (table.0 - BIAS) as *mut u8
    }

    fn resolve_in(&self, backing: &TestBacking, gfn: Gfn, page: u64, access: Access) -> Result<Resolved, Unresolved> {
        if let Some(answers) = &self.answers {
            return answers.resolve(gfn, access);
        }
        self.called(Call::Resolve);
        assert!(!backing.dropped.load(Ordering::SeqCst), "resolve in a backing that was dropped");
        if page >= backing.nr_pages || backing.gone.load(Ordering::SeqCst) {
            return Err(Unresolved::Gone);
        }
        let (Frame { pfn, writes }, max_size) = backing.frame(page);
        let writable = match (writes, access) {
            (Writes::Refused, Access::Write) => return Err(Unresolved::Gone),
            (Writes::Allowed, _) | (_, Access::Write) => true,
            _ => false,
        };
        if self.is_slow.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        Ok(Resolved { writable, ..Resolved::memory(Pfn(pfn), max_size) })
    }

    /// The end of a resolve.
    fn pass(&self, trap: impl Fn(&trap::Traps) -> &trap::Trap, backing: &TestBacking) {
        if let Some(traps) = &self.traps {
            trap(traps).pass();
            assert!(!backing.dropped.load(Ordering::SeqCst), "the backing was dropped under a resolve");
        }
    }

    pub fn live_tables(&self) -> usize {
        self.tables.lock().unwrap().len()
    }

    pub fn nr_flushes(&self) -> usize {
        self.flushes.lock().unwrap().len()
    }
}

impl Drop for TestHost {
    fn drop(&mut self) {
        let _inside = InsideHost::enter();
        assert!(std::thread::panicking() || self.live_tables() == 0, "tables leaked");
        for (table, layout) in self.quarantine.get_mut().unwrap().drain(..) {
            // SAFETY: it was allocated with this layout, and the VM and its guests are gone.
            unsafe { dealloc((table - BIAS) as *mut u8, with_memory(layout)) }
        }
        // Here, where it counts as the host's.
        drop((take(&mut self.tables), take(&mut self.quarantine), take(&mut self.flushes), take(&mut self.zapped)));
        drop((take(&mut self.zapped_sender), take(&mut self.local_flushes), take(&mut self.released)));
        drop((take(&mut self.gate.words), take(&mut self.parked), take(&mut self.modification_log)));
        drop((take(&mut self.hook), take(&mut self.asked), take(&mut self.nodes), take(&mut self.table_nodes)));
    }
}

// SAFETY: page-table pages come from the global allocator and stay until freed. No CPU caches
// anything, because the tests walk the page tables at each access, and a flush waits for the
// accesses that have begun before it. Frames are numbers.
unsafe impl Host for TestHost {
    type Backing = Arc<TestBacking>;

    fn allocate_table(&self, layout: Layout, node: TableNode, wait: AllocationWait) -> Option<Hpa> {
        let _inside = InsideHost::enter();
        self.called(Call::Allocate(wait));
        self.asked.lock().unwrap().push((node, wait));
        if wait == AllocationWait::Never && self.refuses_without_wait.load(Ordering::SeqCst) {
            return None;
        }
        let left = self.allocations_left.load(Ordering::SeqCst);
        if left == 0 {
            return None;
        }
        if left > 0 {
            self.allocations_left.store(left - 1, Ordering::SeqCst);
        }
        let pointer = self.freed_last(layout).unwrap_or_else(|| {
            // SAFETY: the layout is not of size zero.
            unsafe { alloc(with_memory(layout)) }
        });
        assert!(!pointer.is_null());
        // SAFETY: just allocated. Garbage, so that no code relies on zeroes.
        unsafe { pointer.write_bytes(0xa5, layout.size()) };
        // SAFETY: as above. A walk of what is in memory, before it is cleaned, is noticed.
        unsafe { pointer.add(layout.size()).write_bytes(POISON as u8, layout.size()) };
        let table = pointer as u64 + BIAS;
        self.tables.lock().unwrap().insert(table, layout.size());
        if let Some(nodes) = *self.nodes.lock().unwrap() {
            self.table_nodes.lock().unwrap().insert(table, nodes.place(node));
        }
        Some(Hpa(table))
    }

    fn node_of(&self, frame: Pfn) -> NodeId {
        if let Some(answers) = &self.answers {
            answers.nodes_of.lock().unwrap().push(frame);
        }
        let Some(nodes) = *self.nodes.lock().unwrap() else { return NodeId(0) };
        let of_table = self.table_nodes.lock().unwrap().get(&frame.hpa().0).copied();
        NodeId(of_table.unwrap_or((frame.0 / nodes.frames_apart % nodes.nr_nodes) as u32))
    }

    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        let _inside = InsideHost::enter();
        let size = self.tables.lock().unwrap().remove(&table.0);
        self.table_nodes.lock().unwrap().remove(&table.0);
        assert_eq!(size, Some(layout.size()), "free of {table}, which is not live with this size");
        if let Some(traps) = &self.traps {
            traps.freed_unflushed.fetch_add(u32::from(self.nr_flushes() == 0), Ordering::SeqCst);
        }
        if let Some(answers) = &self.answers {
            answers.assert_without_bits(table);
        }
        let pointer = self.page(table);
        for word in 0..layout.size() / 8 {
            // SAFETY: inside the page-table page. Garbage, so that a late walk is noticed.
            let entry = unsafe { AtomicU64::from_ptr(pointer.cast::<u64>().add(word)) }.swap(POISON, Ordering::SeqCst);
            // Every format has at least 48 bits of host-physical address, and no test has memory in
            // the upper half of 51.
            assert!(entry & 7 != 0 || entry >> 50 & 1 == 1, "{entry:#x} is not present, and has an address in reach");
            // SAFETY: as above.
            let in_memory = unsafe { pointer.add(layout.size()).cast::<u64>().add(word) };
            // SAFETY: as above.
            unsafe { AtomicU64::from_ptr(in_memory) }.store(POISON, Ordering::SeqCst);
        }
        let mut quarantine = self.quarantine.lock().unwrap();
        quarantine.push_back((table.0, layout));
        if quarantine.len() > QUARANTINE_CAPACITY
            && let Some((oldest, layout)) = quarantine.pop_front()
        {
            // SAFETY: it was allocated with this layout and freed once (checked when it was freed).
            unsafe { dealloc((oldest - BIAS) as *mut u8, with_memory(layout)) }
        }
    }

    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        if let Some(traps) = &self.traps {
            traps.look();
        }
        self.page(self.answers.as_ref().map_or(table, |answers| answers.without_bits(table)))
    }

    fn resolve(&self, backing: &Self::Backing, gfn: Gfn, page: u64, access: Access) -> Result<Resolved, Unresolved> {
        self.resolves.fetch_add(1, Ordering::Relaxed);
        let resolved = self.resolve_in(backing, gfn, page, access);
        self.pass(|traps| &traps.in_resolve, backing);
        resolved
    }

    fn resolve_private(
        &self,
        backing: &Self::Backing,
        gfn: Gfn,
        page: u64,
        access: Access,
    ) -> Result<Resolved, Unresolved> {
        self.resolves.fetch_add(1, Ordering::Relaxed);
        let shared = self.resolve_in(backing, gfn, page, access)?;
        self.pass(|traps| &traps.in_resolve, backing);
        Ok(Resolved { pfn: Pfn(PRIVATE_PFN + shared.pfn.0), ..shared })
    }

    fn resolve_resident(&self, backing: &Self::Backing, gfn: Gfn, page: u64, access: Access) -> Option<Resolved> {
        assert_ne!(access, Access::Write, "a neighbour is not written");
        self.nr_resident_queries.fetch_add(1, Ordering::Relaxed);
        let is_resident =
            self.answers.is_some() || (backing.is_resident)(page) || backing.resident.read().unwrap().contains(&page);
        let resolved = if is_resident { self.resolve_in(backing, gfn, page, access).ok() } else { None };
        self.pass(|traps| &traps.in_resident, backing);
        resolved
    }

    fn flush(&self, ranges: &[GfnRange]) {
        let _inside = InsideHost::enter();
        assert!(ranges.iter().all(|range| !range.is_empty()), "a flush of nothing: {ranges:?}");
        if let Some(traps) = &self.traps {
            traps.end_step();
            traps.in_flush.pass();
        }
        self.called(Call::Flush);
        self.gate.wait_for_accesses();
        broken::flushed(ranges);
        self.flushes.lock().unwrap().push(ranges.to_vec());
        self.called(Call::FlushEnd);
    }

    fn flush_local(&self, gpa: Gpa) {
        let _inside = InsideHost::enter();
        self.local_flushes.lock().unwrap().push(gpa);
    }

    fn has_incoherent_walkers(&self) -> bool {
        true
    }

    fn clean_ptes(&self, first: *const u8, size_bytes: usize) {
        let _inside = InsideHost::enter();
        // SAFETY: in a live page-table page.
        let value = unsafe { AtomicU64::from_ptr(first.cast_mut().cast()) }.load(Ordering::SeqCst);
        self.called(if size_bytes == 8 && value & 7 == 0 { Call::CleanAbsent } else { Call::Clean });
        let _held = self.write_back.lock().unwrap();
        // These bytes alone, and not the rest of their lines: so no clean is missing unnoticed.
        for offset in (0..size_bytes).step_by(8) {
            let at = first.cast_mut().wrapping_add(offset);
            // SAFETY: in a live page-table page, in whose memory it has its place.
            let value = unsafe { AtomicU64::from_ptr(at.cast()) }.load(Ordering::SeqCst);
            // SAFETY: as above.
            unsafe { AtomicU64::from_ptr(at.add(IN_MEMORY).cast()) }.store(value, Ordering::SeqCst);
        }
    }

    fn drain_modification_logs(&self, log: &mut dyn FnMut(&[Gpa])) {
        // Held during the drain: another call returns only when that is done.
        let mut written = self.modification_log.lock().unwrap();
        // In parts, as CPUs' logs are.
        written.chunks(3).for_each(log);
        written.clear();
    }

    fn leaf_zapped(&self, leaf: ZappedLeaf) {
        let _inside = InsideHost::enter();
        let left = self.panics_at_zapped.load(Ordering::Relaxed);
        if left != 0 {
            self.panics_at_zapped.store(left - 1, Ordering::Relaxed);
            assert_ne!(left, 1, "a leaf is reported");
        }
        if let Some(zapped) = self.zapped.lock().unwrap().as_mut() {
            zapped.push(leaf);
        }
        if let Some(sender) = self.zapped_sender.lock().unwrap().as_ref() {
            sender.send(leaf).unwrap();
        }
        self.called(Call::LeafZapped);
    }

    fn needs_zapped_leaves(&self) -> bool {
        self.needs_zapped_leaves
    }

    fn release_mapped(&self, range: GfnRange, pfn: Pfn) {
        let _inside = InsideHost::enter();
        let nr_flushes = self.nr_flushes();
        self.released().lock().unwrap().push((range, pfn, nr_flushes));
    }

    fn should_yield(&self) -> bool {
        if let Some(traps) = &self.traps {
            traps.end_step();
        }
        self.always_yields.load(Ordering::Relaxed)
    }

    fn yield_now(&self) {
        std::thread::yield_now();
    }

    #[cfg(target_os = "linux")]
    fn has_barrier_on_all_cpus(&self) -> bool {
        // Every other host, so that both ways are tested.
        static HOSTS: AtomicU64 = AtomicU64::new(0);
        self.traps.is_none() && HOSTS.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) && membarrier::is_available()
    }

    #[cfg(target_os = "linux")]
    fn barrier_on_all_cpus(&self) {
        membarrier::on_all_cpus();
    }

    fn timestamp_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64 + self.clock_ahead_ns.load(Ordering::Relaxed)
    }

    fn parking(&self) -> Option<&dyn Park> {
        Some(self)
    }
}
