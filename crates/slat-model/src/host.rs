//! The hypervisor around the engine: page-table pages and frames of the modelled machine's nodes,
//! what the operating system does for a page, and interrupts that flush TLBs.
//!
//! # Implementation
//! Frames have no memory: what an experiment needs of them is their node. A page gets its frame at
//! its first resolve, on the node of the CPU that asks, as with first touch. It costs what the page
//! fault of an operating system costs, with its locks. Later resolves only look it up. A page of
//! shared memory may have a frame that the process has not mapped ([`ModelHost::place_shared`]).
//! Its first resolve is a page fault that allocates nothing.

#![expect(unsafe_code, reason = "implements Host")]

mod userfault;

use std::alloc::Layout;
use std::panic::Location;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use slat_costed::baselines::{Park, Side};
use slat_costed::costed::Step;
use slat_costed::host::{AllocationWait, Host, Resolved, TableNode, Unresolved};
use slat_costed::{Access, Gfn, GfnRange, Gpa, Hpa, NodeId, PageSize, Pfn};

use crate::arena;
use crate::guest::Around;
use crate::machine::{self, LockWord, TaskId};
use crate::parameters::{PS_PER_NS, Parameters, Ps, ns};
use crate::topology::{MAX_NODES, Topology};
use userfault::Userfault;
pub(crate) use userfault::{UserfaultShape, Wakeup};

/// No node yet: the page has no frame.
const NOWHERE: u8 = u8::MAX;

/// Beside a node: the process has not mapped the page.
const UNMAPPED: u8 = 1 << 7;

/// Whether the memory of the guest is there before it is touched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Backing {
    /// Each page is zeroed at its first touch.
    Anonymous,
    /// The pages are there.
    Allocated,
}

/// What the operating system does, in picoseconds.
struct Cost {
    page_lookup: Ps,
    page_fault: Ps,
    zero_page: Ps,
    zero_on_node: Ps,
    zone_batch: u64,
    zone_held: Ps,
    lru_batch: u64,
    lru_held: Ps,
    page_table_held: Ps,
}

/// The host of one VM.
pub(crate) struct ModelHost {
    /// For each page of the guest the node of its frame, with [`UNMAPPED`] if the process has not
    /// mapped it, or [`NOWHERE`].
    nodes: Vec<AtomicU8>,
    /// The node of each CPU.
    node_of_cpu: Vec<u8>,
    tables: Mutex<Tables>,
    pub(crate) vcpus: Vec<VcpuPlace>,
    /// Counts flushes: a CPU whose TLB has seen fewer drops all of it.
    flushes: AtomicU64,
    cost: Cost,
    around: Around,
    /// The memory is in pages of this size.
    page_size: PageSize,
    mmap_lock: LockWord,
    zone_locks: Vec<LockWord>,
    lru_locks: Vec<LockWord>,
    /// Of the process: one for each 2 MiB.
    page_table_locks: Vec<LockWord>,
    /// How many pages each CPU has got.
    got: Vec<AtomicU64>,
    /// Of pages that move: for each, in which of two places it is.
    places: Vec<AtomicU8>,
    /// With userfault, what the operating system has for it.
    userfault: OnceLock<Userfault>,
}

/// Where a vCPU runs, and what its hardware has logged.
pub(crate) struct VcpuPlace {
    /// The number of its task.
    task: AtomicUsize,
    is_in_guest: AtomicBool,
    /// Its page-modification log.
    log: Mutex<Vec<Gpa>>,
}

/// Page-table pages of each node.
struct Tables {
    next: [usize; MAX_NODES],
    free: [Vec<usize>; MAX_NODES],
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No task is suspended with one of these, so they are never waited for.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl VcpuPlace {
    pub(crate) fn enter_guest(&self) {
        self.task.store(machine::current_task().0, Relaxed);
        self.is_in_guest.store(true, Relaxed);
    }

    fn task(&self) -> TaskId {
        TaskId(self.task.load(Relaxed))
    }

    pub(crate) fn leave_guest(&self) {
        self.is_in_guest.store(false, Relaxed);
    }

    /// Logs a page; returns the log if it is full.
    pub(crate) fn log(&self, gpa: Gpa) -> Option<Vec<Gpa>> {
        let mut log = lock(&self.log);
        log.push(gpa);
        (log.len() == LOG_ENTRIES).then(|| std::mem::take(&mut *log))
    }
}

/// Entries of a page-modification log (Intel SDM vol. 3C, "Page-Modification Logging").
const LOG_ENTRIES: usize = 512;

impl ModelHost {
    pub(crate) fn new(
        topology: &Topology,
        parameters: &Parameters,
        nr_vcpus: usize,
        nr_pages: u64,
        page_size: PageSize,
        around: Around,
    ) -> ModelHost {
        let host = &parameters.host;
        let locks = |nr_locks: usize| (0..nr_locks).map(|_| LockWord::default()).collect();
        ModelHost {
            nodes: (0..nr_pages).map(|_| AtomicU8::new(NOWHERE)).collect(),
            node_of_cpu: (0..topology.nr_cpus()).map(|cpu| topology.node_of(cpu) as u8).collect(),
            tables: Mutex::new(Tables { next: [0; MAX_NODES], free: Default::default() }),
            vcpus: (0..nr_vcpus)
                .map(|_| VcpuPlace {
                    task: AtomicUsize::new(0),
                    is_in_guest: AtomicBool::new(false),
                    log: Mutex::new(Vec::with_capacity(LOG_ENTRIES)),
                })
                .collect(),
            flushes: AtomicU64::new(0),
            cost: Cost {
                page_lookup: host.page_lookup.ps(),
                page_fault: host.page_fault.ps(),
                zero_page: host.zero_page.ps(),
                zero_on_node: (4096.0 / host.zero_bytes_per_ns.get() * PS_PER_NS as f64) as Ps,
                zone_batch: host.zone_batch.whole(),
                zone_held: host.zone_held.ps(),
                lru_batch: host.lru_batch.whole(),
                lru_held: host.lru_held.ps(),
                page_table_held: host.page_table_held.ps(),
            },
            around,
            page_size,
            mmap_lock: LockWord::default(),
            zone_locks: locks(topology.nr_nodes()),
            lru_locks: locks(topology.nr_nodes()),
            page_table_locks: locks(nr_pages.div_ceil(512) as usize),
            got: (0..topology.nr_cpus()).map(|_| AtomicU64::new(0)).collect(),
            places: Vec::new(),
            userfault: OnceLock::new(),
        }
    }

    /// The same, with pages that move between two places ([`move_page`](Self::move_page)).
    pub(crate) fn with_places(self) -> ModelHost {
        ModelHost { places: (0..self.nodes.len()).map(|_| AtomicU8::new(0)).collect(), ..self }
    }

    /// The frame of `page`.
    pub(crate) fn frame_of(&self, page: u64) -> u64 {
        let place = self.places.get(page as usize).map_or(0, |place| place.load(Relaxed));
        page + u64::from(place) * self.nodes.len() as u64
    }

    /// Gives `page` its other frame, and returns the one that it had. The page is being
    /// invalidated.
    pub(crate) fn move_page(&self, page: u64) -> u64 {
        let frame = self.frame_of(page);
        self.places[page as usize].fetch_xor(1, Relaxed);
        frame
    }

    /// The largest block around `page` whose frames follow each other.
    fn block_of(&self, page: u64) -> PageSize {
        let nr_pages = self.page_size.level().nr_pages();
        let first = page / nr_pages * nr_pages;
        let is_together = |page: &u64| self.frame_of(*page) - page == self.frame_of(first) - first;
        let is_whole =
            first + nr_pages <= self.nodes.len() as u64 && (first..first + nr_pages).all(|page| is_together(&page));
        if is_whole { self.page_size } else { PageSize::Size4K }
    }

    /// How many flushes there were.
    pub(crate) fn nr_flushes(&self) -> u64 {
        self.flushes.load(Relaxed)
    }

    /// The node of a CPU.
    pub(crate) fn node_of_cpu(&self, cpu: usize) -> u8 {
        self.node_of_cpu[cpu]
    }

    /// The node of the frame of `page`; `None`: it has none yet.
    pub(crate) fn node_of_page(&self, page: u64) -> Option<u8> {
        let node = self.nodes.get(page as usize)?.load(Relaxed);
        (node != NOWHERE).then_some(node & !UNMAPPED)
    }

    /// Whether the process has mapped `page`.
    pub(crate) fn is_mapped(&self, page: u64) -> bool {
        self.nodes.get(page as usize).is_some_and(|node| node.load(Relaxed) & UNMAPPED == 0)
    }

    /// Gives `page` a frame on `node` at no cost, before an experiment.
    pub(crate) fn place(&self, page: u64, node: u8) {
        self.nodes[page as usize].store(node, Relaxed);
    }

    /// The same in shared memory: the process has not mapped the page yet.
    pub(crate) fn place_shared(&self, page: u64, node: u8) {
        self.nodes[page as usize].store(node | UNMAPPED, Relaxed);
    }

    /// The operating system finds the page, makes it if need be, and takes a reference to it.
    fn look_up(&self, page: u64) {
        let cost = &self.cost;
        // get_user_pages: without a lock if the page is there, and else by a page fault of the
        // process.
        if self.is_mapped(page) {
            machine::work(cost.page_lookup);
        } else if !self.wait_for_userfault(page) {
            self.lock_mmap();
            self.map_in_process(page);
            // The page table is read again to take the reference.
            machine::work(cost.page_lookup);
            self.mmap_lock.release(Side::Read);
        }
        machine::access(arena::frame_address(page), Step::Rmw, Location::caller());
    }

    /// The hypervisor gives its reference to the page back.
    pub(crate) fn put_page(&self, page: u64) {
        if self.around == Around::Host && self.is_mapped(page) {
            machine::access(arena::frame_address(page), Step::Rmw, Location::caller());
        }
    }

    /// A page fault of the process, without the lock of its mappings.
    fn map_in_process(&self, page: u64) {
        machine::work(self.cost.page_fault);
        if self.node_of_page(page).is_none() {
            self.make(page);
        }
        // The page table is written, or found written.
        self.page_table_locks[(page / 512) as usize].hold(Side::Write, self.cost.page_table_held);
        self.nodes[page as usize].fetch_and(!UNMAPPED, Relaxed);
    }

    /// A page of `node`, of whatever size the memory has, is written as a whole.
    fn write_frame(&self, node: u8) {
        let nr_pages = self.page_size.level().nr_pages();
        machine::use_server(usize::from(node), self.cost.zero_on_node * nr_pages);
        machine::work(self.cost.zero_page.saturating_sub(self.cost.zero_on_node) * nr_pages);
    }

    /// A frame of this CPU's node, zeroed.
    fn make(&self, page: u64) {
        let cost = &self.cost;
        let cpu = machine::current_cpu();
        let node = self.node_of_cpu[cpu];
        let got = self.got[cpu].fetch_add(1, Relaxed);
        if got.is_multiple_of(cost.zone_batch) {
            self.zone_locks[usize::from(node)].hold(Side::Write, cost.zone_held);
        }
        self.write_frame(node);
        if got.is_multiple_of(cost.lru_batch) {
            self.lru_locks[usize::from(node)].hold(Side::Write, cost.lru_held);
        }
        self.place_first(page, node);
    }

    /// Gives `page` a frame on `node`, and all pages of its huge page; another CPU may have been
    /// faster.
    fn place_first(&self, page: u64, node: u8) {
        let nr_pages = self.page_size.level().nr_pages();
        let first = page / nr_pages * nr_pages;
        if self.nodes[page as usize].compare_exchange(NOWHERE, node, Relaxed, Relaxed).is_ok() {
            let end = (first + nr_pages).min(self.nodes.len() as u64);
            (first..end).for_each(|page| self.place(page, node));
        }
    }
}

// SAFETY: page-table pages are in the arena, each in one place, where nothing else is. `flush`
// makes each vCPU's TLB be dropped before its next access; a walk that was under way compares the
// count of flushes before it reads or writes a PTE of the lowest level, and starts over. The
// answers of `resolve` change by `move_page` alone, inside an invalidation.
unsafe impl Host for ModelHost {
    type Backing = ();

    fn allocate_table(&self, layout: Layout, node: TableNode, _wait: AllocationWait) -> Option<Hpa> {
        let caller = self.node_of_cpu[machine::current_cpu()];
        let node = match node {
            TableNode::Node(NodeId(node)) => usize::try_from(node).ok().filter(|&node| node < self.zone_locks.len())?,
            TableNode::Caller | TableNode::CallerPolicy => usize::from(caller),
        };
        // All page-table pages of the formats that are modelled are of 4 KiB.
        if layout.size() > 4096 || layout.align() > 4096 {
            return None;
        }
        let index = {
            let mut tables = lock(&self.tables);
            match tables.free[node].pop() {
                Some(index) => index,
                None => {
                    let index = tables.next[node];
                    arena::table_offset(node, index)?;
                    tables.next[node] += 1;
                    index
                }
            }
        };
        arena::table_offset(node, index).map(|offset| Hpa(offset as u64))
    }

    unsafe fn free_table(&self, table: Hpa, _layout: Layout) {
        let node = arena::node_of_table(table.0 as usize);
        let first = arena::table_offset(node, 0).unwrap_or(0);
        lock(&self.tables).free[node].push((table.0 as usize - first) / 4096);
    }

    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        arena::table_ptr(table.0 as usize)
    }

    fn node_of(&self, frame: Pfn) -> NodeId {
        NodeId(u32::from(self.node_of_page(frame.0).unwrap_or(0)))
    }

    fn resolve(&self, (): &(), _gfn: Gfn, page: u64, _access: Access) -> Result<Resolved, Unresolved> {
        if self.around == Around::Nothing {
            self.place_first(page, self.node_of_cpu[machine::current_cpu()]);
        } else {
            let engine = machine::set_engine_work(0, 0);
            self.look_up(page);
            machine::set_engine_work(engine.0, engine.1);
        }
        let size = if self.places.is_empty() { self.page_size } else { self.block_of(page) };
        Ok(Resolved::memory(Pfn(self.frame_of(page)), size))
    }

    fn flush(&self, _ranges: &[GfnRange]) {
        self.flushes.fetch_add(1, Relaxed);
        // A vCPU that was preempted has left its guest, and flushes before it enters.
        let in_guest = self.vcpus.iter().filter(|vcpu| vcpu.is_in_guest.load(Relaxed));
        machine::interrupt(&in_guest.map(VcpuPlace::task).collect::<Vec<_>>());
    }

    fn drain_modification_logs(&self, log: &mut dyn FnMut(&[Gpa])) {
        for vcpu in &self.vcpus {
            let written = std::mem::take(&mut *lock(&vcpu.log));
            if !written.is_empty() {
                log(&written);
            }
        }
    }

    fn needs_zapped_leaves(&self) -> bool {
        false
    }

    fn has_barrier_on_all_cpus(&self) -> bool {
        true
    }

    fn barrier_on_all_cpus(&self) {
        machine::interrupt(&self.vcpus.iter().map(VcpuPlace::task).collect::<Vec<_>>());
    }

    fn yield_now(&self) {
        machine::yield_cpu();
    }

    fn timestamp_ns(&self) -> u64 {
        ns(machine::now())
    }

    fn parking(&self) -> Option<&dyn Park> {
        None
    }
}
