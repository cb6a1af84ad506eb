//! The engine's host on Linux: page-table pages from a reserved region for each node, sleep by
//! futex, the flush of the software CPUs, a clock. One [`MachineHost`] belongs to one VM.
//!
//! # Implementation
//! - The region of page-table pages is mapped as long as the host lives. A software CPU whose
//!   thread was preempted during a walk may read a page-table page that was freed meanwhile, and
//!   must read memory (its access then does not commit, see [`commit`](crate::hardware::commit)).
//!   So a freed page is only put on a list, and allocated again from there.
//! - Allocating and freeing take no lock: a thread that is preempted between them must not delay a
//!   fault.
//! - Nothing is kept about guest memory: [`Host::resolve`] asks the [`Backing`] each time, as a
//!   hypervisor must.
//! - A host whose memory has movable pages knows its VM ([`MachineHost::attach`]). It invalidates
//!   pages in the guest before it changes them, sometimes during a resolve. It is notified of what
//!   the guest did through the zapped leaves.

#![expect(unsafe_code, reason = "futex, and the promise of the trait Host")]

mod tables;

use core::alloc::Layout;
use std::fmt;
use std::io;
use std::ptr;
use std::sync::{Arc, OnceLock, Weak};

use slat::baselines::{AtomicU32, Park};
use slat::format::Format;
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved, ZappedLeaf};
use slat::{Access, Gfn, GfnRange, Gpa, Host, Hpa, MemoryRegion, MemoryRegionFlags, NodeId, PAGE_SIZE, Pfn, Vm};
use thiserror::Error;

use crate::hardware::commit::FlushDomain;
use crate::hardware::cpu;
use crate::hardware::membarrier;
use crate::hardware::modification_log::ModificationLogs;
use crate::hardware::walk::HardwareFormat;
use crate::linux::clock;
use crate::memory::numa::spans::{MemorySpan, MemorySpans};
use crate::memory::numa::{NodeMap, NumaError, ReadCounts, WalkCounter};
use crate::memory::phys;
use crate::memory::{Backing, Pages};
use tables::Tables;

/// Address space kept for page-table pages larger than 4 KiB, and for the gaps in front of them:
/// one root or two.
const ROOTS_BYTES: u64 = 256 << 10;
/// Why a host cannot be made.
#[derive(Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message names the fields")]
pub enum HostError {
    /// There is no address space for page-table pages.
    #[error("cannot reserve {size_bytes} bytes of address space for tables")]
    NoAddressSpace { size_bytes: u64, source: io::Error },
    /// The page-table pages could not be placed on their nodes.
    #[error(transparent)]
    Numa(#[from] NumaError),
}

/// The memory of one memslot: a part of a [`Backing`], which several memslots can share.
#[derive(Clone, Debug)]
pub struct BackingSlice {
    /// The memory.
    pub backing: Backing,
    /// The offset of the memslot's first page, in bytes: a multiple of 4 KiB. For huge leaves it
    /// must be as far from a multiple of their size as the memslot's guest-physical address is.
    pub offset_bytes: u64,
}

impl BackingSlice {
    /// A memslot at `gpa` that has all of `backing`, without flags.
    pub fn region(slot: u32, gpa: Gpa, backing: &Backing) -> MemoryRegion<BackingSlice> {
        MemoryRegion {
            slot,
            flags: MemoryRegionFlags::empty(),
            guest_phys_addr: gpa,
            memory_size: backing.size_bytes(),
            backing: Some(BackingSlice { backing: backing.clone(), offset_bytes: 0 }),
            userfault_bitmap: None,
        }
    }
}

/// What a test's host has from the [`MachineHost`] in its field `$inner`: page-table pages and
/// time.
#[cfg(test)]
macro_rules! machine_tables {
    ($inner:tt) => {
        type Backing = BackingSlice;

        fn allocate_table(&self, layout: Layout, node: TableNode, wait: AllocationWait) -> Option<Hpa> {
            self.$inner.allocate_table(layout, node, wait)
        }
        fn node_of(&self, frame: Pfn) -> NodeId {
            self.$inner.node_of(frame)
        }
        unsafe fn free_table(&self, table: Hpa, layout: Layout) {
            // SAFETY: as the caller promises.
            unsafe { self.$inner.free_table(table, layout) }
        }
        fn table_ptr(&self, table: Hpa) -> *mut u8 {
            self.$inner.table_ptr(table)
        }
        fn timestamp_ns(&self) -> u64 {
            self.$inner.timestamp_ns()
        }
    };
}
#[cfg(test)]
pub(crate) use machine_tables;

/// The VM, of any format, as its host needs it.
trait Guest: fmt::Debug + Send + Sync {
    /// Makes `change` while `range` is invalidated in the guest.
    fn while_invalid(&self, range: GfnRange, change: &mut dyn FnMut()) -> Result<(), slat::error::RangeError>;
}

impl<F: Format + 'static> Guest for Weak<Vm<MachineHost, F>> {
    fn while_invalid(&self, range: GfnRange, change: &mut dyn FnMut()) -> Result<(), slat::error::RangeError> {
        // Without a VM there is no guest that could use the range.
        let vm = self.upgrade();
        let invalidation = vm.as_ref().map(|vm| vm.invalidate_range(range)).transpose()?;
        change();
        drop(invalidation);
        Ok(())
    }
}

/// How a flush is made, on all CPUs and on the caller's.
#[derive(Clone, Copy, Debug)]
struct Instructions {
    flush: fn(&FlushDomain, &[GfnRange]),
    flush_local: fn(Gpa),
}

/// The software machine, as the engine sees it.
#[derive(Debug)]
pub struct MachineHost {
    nodes: Arc<NodeMap>,
    tables: Tables,
    /// Where guest memory is; set once.
    memory: OnceLock<MemorySpans>,
    flush_domain: Arc<FlushDomain>,
    instructions: Instructions,
    modification_logs: ModificationLogs,
    /// The VM, and the memory that its host changes while it runs.
    guest: OnceLock<(Box<dyn Guest>, Arc<Pages>)>,
}

impl MachineHost {
    /// Makes a host of one node whose flushes reach the CPUs of `flush_domain`, with address space
    /// for `max_tables` page-table pages at a time. (They take memory as they are touched.)
    ///
    /// # Errors
    /// [`HostError`].
    pub fn new(flush_domain: Arc<FlushDomain>, max_tables: u64) -> Result<MachineHost, HostError> {
        MachineHost::with_nodes(flush_domain, max_tables, Arc::new(NodeMap::one()))
    }

    /// A host with these nodes.
    ///
    /// # Errors
    /// [`HostError`].
    pub fn with_nodes(
        flush_domain: Arc<FlushDomain>,
        max_tables: u64,
        nodes: Arc<NodeMap>,
    ) -> Result<MachineHost, HostError> {
        // The clock takes time to start, which should not be part of the first measurement.
        clock::timestamp_ns();
        let bytes_per_node = max_tables.saturating_mul(PAGE_SIZE).saturating_add(ROOTS_BYTES);
        Ok(MachineHost {
            tables: Tables::new(bytes_per_node, max_tables, &nodes)?,
            nodes,
            memory: OnceLock::new(),
            flush_domain,
            instructions: Instructions { flush: FlushDomain::flush, flush_local: cpu::flush_local },
            modification_logs: ModificationLogs::default(),
            guest: OnceLock::new(),
        })
    }

    /// Has it flush by the instructions of `F`'s processors, as the manual has them. Without it, a
    /// flush drops all that CPUs have cached of the pages, at once.
    #[must_use]
    pub fn with_instructions_of<F: HardwareFormat>(self) -> MachineHost {
        MachineHost { instructions: Instructions { flush: F::flush, flush_local: F::flush_local }, ..self }
    }

    /// Attaches to the host of `vm` the `pages` that it changes while the guest runs; only the
    /// first time.
    pub fn attach<F: Format + 'static>(vm: &Arc<Vm<MachineHost, F>>, pages: &Arc<Pages>) {
        let guest: Box<dyn Guest> = Box::new(Arc::downgrade(vm));
        // The first stays.
        let _ = vm.host().guest.set((guest, Arc::clone(pages)));
    }

    /// Makes `change` while `range` is invalidated in the guest.
    ///
    /// # Errors
    /// The engine's: nothing was changed.
    pub(crate) fn while_invalid(
        &self,
        range: GfnRange,
        change: &mut dyn FnMut(),
    ) -> Result<(), slat::error::RangeError> {
        if let Some((guest, _)) = self.guest.get() {
            return guest.while_invalid(range, change);
        }
        change();
        Ok(())
    }

    /// Page-table pages that the engine has now. Exact while no thread allocates or frees.
    pub fn live_tables(&self) -> u64 {
        self.tables.nr_live()
    }

    /// Those of them that are on each node. Exact while no thread allocates or frees.
    pub fn live_tables_by_node(&self) -> Vec<(NodeId, u64)> {
        self.nodes.ids().iter().enumerate().map(|(place, &node)| (node, self.tables.nr_live_at(place))).collect()
    }

    /// The nodes.
    pub fn nodes(&self) -> &Arc<NodeMap> {
        &self.nodes
    }

    /// Sets where guest memory is; only the first time.
    pub(crate) fn set_memory_spans(&self, spans: Vec<MemorySpan>) {
        // The first stay.
        let _ = self.memory.set(MemorySpans::new(spans));
    }

    /// A counter of a CPU's reads of page tables, which adds to `counts`; `None` with one node.
    pub fn walk_counter(&self, counts: &Arc<ReadCounts>) -> Option<WalkCounter> {
        let new = || WalkCounter::new(Arc::clone(&self.nodes), Arc::clone(self.tables.spans()), Arc::clone(counts));
        (!self.nodes.is_one()).then(new)
    }

    fn node_of_many(&self, frame: Pfn) -> NodeId {
        let address = frame.hpa();
        let in_memory = || self.memory.get().and_then(|memory| memory.node_of(address));
        // Memory without a known node.
        let first = || self.nodes.ids()[self.nodes.memory_place(0)];
        self.tables.spans().node_of(address).or_else(in_memory).unwrap_or_else(first)
    }

    /// The page-modification logs of the CPUs: a CPU that logs takes one from here.
    pub fn modification_logs(&self) -> &ModificationLogs {
        &self.modification_logs
    }

    /// The CPUs that a flush reaches.
    pub fn flush_domain(&self) -> &Arc<FlushDomain> {
        &self.flush_domain
    }
}

// SAFETY: page-table pages are disjoint parts of one region that stays mapped, at the pointer that
// `phys` computes from their address; `FlushDomain::flush` guarantees what `flush` must, and so do
// the instructions of each format (`HardwareFormat::flush`) for the CPUs of that format;
// `ModificationLogs::drain` what `drain_modification_logs` must; a backing keeps its frames, or
// changes them while they are invalidated; and none of it unwinds.
unsafe impl Host for MachineHost {
    type Backing = BackingSlice;

    fn allocate_table(&self, layout: Layout, node: TableNode, _: AllocationWait) -> Option<Hpa> {
        // Never waits: moving a mark or taking from a list takes no lock.
        self.tables.allocate(layout, self.nodes.places_for(node))
    }

    #[inline]
    fn node_of(&self, frame: Pfn) -> NodeId {
        if self.nodes.is_one() { self.nodes.ids()[0] } else { self.node_of_many(frame) }
    }

    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        self.tables.free(table, layout);
    }

    #[inline]
    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        phys::ptr_of(table)
    }

    fn resolve(&self, backing: &BackingSlice, gfn: Gfn, page: u64, access: Access) -> Result<Resolved, Unresolved> {
        let offset_bytes = page.checked_mul(PAGE_SIZE).and_then(|bytes| bytes.checked_add(backing.offset_bytes));
        backing.backing.resolve(offset_bytes.ok_or(Unresolved::Gone)?, access, &|change| {
            self.while_invalid(GfnRange::new(gfn, 1), change)
        })
    }

    fn resolve_private(
        &self,
        backing: &BackingSlice,
        _: Gfn,
        page: u64,
        access: Access,
    ) -> Result<Resolved, Unresolved> {
        let offset_bytes = page.checked_mul(PAGE_SIZE).and_then(|bytes| bytes.checked_add(backing.offset_bytes));
        backing.backing.resolve_private(offset_bytes.ok_or(Unresolved::Gone)?, access)
    }

    fn leaf_zapped(&self, leaf: ZappedLeaf) {
        if let Some((_, pages)) = self.guest.get() {
            pages.note_zapped(leaf);
        }
    }

    #[inline]
    fn guest_memory_ptr(&self, frame: Pfn) -> Option<*mut u8> {
        // Guest memory and the engine's page-table pages have the same mapping.
        phys::pointer_to(frame.hpa())
    }

    fn flush(&self, ranges: &[GfnRange]) {
        (self.instructions.flush)(&self.flush_domain, ranges);
    }

    fn flush_local(&self, gpa: Gpa) {
        (self.instructions.flush_local)(gpa);
    }

    fn drain_modification_logs(&self, log: &mut dyn FnMut(&[Gpa])) {
        self.modification_logs.drain(&self.flush_domain, log);
    }

    // `should_yield` stays false: Linux preempts a thread by itself.

    fn yield_now(&self) {
        std::thread::yield_now();
    }

    fn has_barrier_on_all_cpus(&self) -> bool {
        membarrier::is_available()
    }

    fn barrier_on_all_cpus(&self) {
        membarrier::on_all_cpus();
    }

    #[inline]
    fn timestamp_ns(&self) -> u64 {
        clock::timestamp_ns()
    }

    fn run_delay_ns(&self) -> u64 {
        clock::run_delay_ns()
    }

    fn parking(&self) -> Option<&dyn Park> {
        Some(self)
    }
}

// By the C library: rustix wakes by a reference, and the word of a wake-up may be gone.
impl Park for MachineHost {
    fn park(&self, word: &AtomicU32, expected: u32) {
        let forever = ptr::null::<libc::timespec>();
        let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: the word is an aligned 32-bit integer that outlives the call, and no timeout is
        // allowed. Every result (woken, interrupted, another value) is a reason to return that the
        // trait permits.
        unsafe { libc::syscall(libc::SYS_futex, ptr::from_ref(word), operation, expected, forever) };
    }

    fn unpark_one(&self, word: *const AtomicU32) -> bool {
        futex_wake(word, 1) > 0
    }

    fn unpark_all(&self, word: *const AtomicU32) {
        futex_wake(word, i32::MAX);
    }
}

/// The number of threads that were woken; negative for an error, which only a word that was
/// unmapped can cause.
fn futex_wake(word: *const AtomicU32, most: i32) -> libc::c_long {
    // SAFETY: the kernel takes the word of a private wake-up for a number only; it may be gone.
    unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, most) }
}

#[cfg(test)]
mod tests;
