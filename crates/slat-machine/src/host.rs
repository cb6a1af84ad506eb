//! The engine's surroundings on Linux: tables from one reserved region, sleep by futex, the flush of the software CPUs,
//! a clock. One [`MachineHost`] belongs to one VM.
//!
//! # Protocol
//! - The region of tables is mapped as long as the host lives: a software CPU whose thread was stopped in the midst of a
//!   walk may read a table that was freed meanwhile, and must read memory (its access then does not commit, see
//!   [`commit`](crate::commit)). So a freed table is only put on a list, from where it is given out again.
//! - Allocating and freeing take no lock: a thread that loses its CPU between them must not hold up a fault.
//! - Nothing is kept about guest memory: [`Host::resolve`] asks the [`Backing`] each time, as a hypervisor must.
//! - A host whose memory has movable pages knows its VM ([`MachineHost::attach`]): it takes pages away from the guest
//!   before it changes them, sometimes in the midst of a resolve, and hears what the guest did through the leaves that go.

#![expect(unsafe_code, reason = "the region of tables, futex, and the promise of the trait Host")]

use core::alloc::Layout;
use std::fmt;
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use crossbeam_queue::SegQueue;
use crossbeam_utils::CachePadded;
use slat::sync::AtomicU32;
use slat::{
    Access, AllocationWait, Format, Gfn, GfnRange, Gone, Gpa, Host, Hpa, PAGE_SHIFT, PAGE_SIZE, Park, Resolved,
    TableNode, Vm, ZappedLeaf,
};
use thiserror::Error;

use crate::clock;
use crate::commit::FlushDomain;
use crate::membarrier;
use crate::memory::{Backing, Pages};
use crate::modification_log::ModificationLogs;
use crate::phys;

/// Address space kept for tables larger than 4 KiB, and for the gaps in front of them: one root or two.
const ROOTS_BYTES: u64 = 256 << 10;
/// Tables of 4 KiB (2^12) up to 64 KiB (2^16): x86's and Arm's, RISC-V's roots, and Arm's concatenated roots.
const MIN_TABLE_SHIFT: u32 = PAGE_SHIFT;
const NR_TABLE_SIZES: usize = 5;

/// A host that could not be made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HostError {
    /// There is no address space for tables.
    #[error("cannot reserve {size_bytes} bytes of address space for tables")]
    NoAddressSpace {
        /// Bytes that were asked for.
        size_bytes: u64,
        /// What the kernel said.
        source: io::Error,
    },
}

/// The memory of one slot: a part of a [`Backing`], which several slots can share.
#[derive(Clone, Debug)]
pub struct BackingSlice {
    /// The memory.
    pub backing: Backing,
    /// Where in it the slot's first page is, in bytes: a multiple of 4 KiB. For huge leaves it must be as far from a
    /// multiple of their size as the slot's guest-physical address is.
    pub offset_bytes: u64,
}

/// The VM of any format, as its host needs it.
trait Guest: fmt::Debug + Send + Sync {
    /// Makes `change` while `range` is taken away from the guest.
    fn while_invalid(&self, range: GfnRange, change: &mut dyn FnMut()) -> Result<(), slat::Error>;
}

impl<F: Format + 'static> Guest for Weak<Vm<MachineHost, F>> {
    fn while_invalid(&self, range: GfnRange, change: &mut dyn FnMut()) -> Result<(), slat::Error> {
        // Without a VM there is no guest that could use the range.
        let vm = self.upgrade();
        let invalidation = vm.as_ref().map(|vm| vm.invalidate_range(range)).transpose()?;
        change();
        drop(invalidation);
        Ok(())
    }
}

/// The software machine, as the engine sees it.
#[derive(Debug)]
pub struct MachineHost {
    tables: Tables,
    flush_domain: Arc<FlushDomain>,
    nr_flushes: CachePadded<AtomicU64>,
    modification_logs: ModificationLogs,
    /// The VM, and the memory that its host changes while it runs.
    guest: OnceLock<(Box<dyn Guest>, Arc<Pages>)>,
}

impl MachineHost {
    /// A host whose flushes reach the CPUs of `flush_domain`, with address space for `max_tables` tables at a time. (They
    /// take memory as they are touched.)
    ///
    /// # Errors
    /// [`HostError`].
    pub fn new(flush_domain: Arc<FlushDomain>, max_tables: u64) -> Result<MachineHost, HostError> {
        // The clock takes its time to start, which should not fall into the first measurement.
        clock::timestamp_ns();
        Ok(MachineHost {
            tables: Tables::new(max_tables.saturating_mul(PAGE_SIZE).saturating_add(ROOTS_BYTES), max_tables)?,
            flush_domain,
            nr_flushes: CachePadded::new(AtomicU64::new(0)),
            modification_logs: ModificationLogs::default(),
            guest: OnceLock::new(),
        })
    }

    /// Tells the host of `vm` that `pages` are the memory which it changes while the guest runs; only the first time.
    pub fn attach<F: Format + 'static>(vm: &Arc<Vm<MachineHost, F>>, pages: &Arc<Pages>) {
        let guest: Box<dyn Guest> = Box::new(Arc::downgrade(vm));
        // The first stays.
        let _ = vm.host().guest.set((guest, Arc::clone(pages)));
    }

    /// Makes `change` while `range` is taken away from the guest.
    ///
    /// # Errors
    /// The engine's: nothing was changed.
    pub(crate) fn while_invalid(&self, range: GfnRange, change: &mut dyn FnMut()) -> Result<(), slat::Error> {
        if let Some((guest, _)) = self.guest.get() {
            return guest.while_invalid(range, change);
        }
        change();
        Ok(())
    }

    /// Tables that the engine holds now. Exact while nobody allocates or frees.
    pub fn live_tables(&self) -> u64 {
        self.tables.nr_live.load(Ordering::Relaxed)
    }

    /// Flushes that the engine has asked for.
    pub fn nr_flushes(&self) -> u64 {
        self.nr_flushes.load(Ordering::Relaxed)
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

// SAFETY: tables are disjoint parts of one region that stays mapped, at the pointer that `phys` computes from their
// address; `FlushDomain::flush` promises what `flush` must, and `ModificationLogs::drain` what
// `drain_modification_logs` must; a backing keeps its frames, or changes them while they are
// invalidated; and none of it unwinds.
unsafe impl Host for MachineHost {
    type Backing = BackingSlice;

    fn allocate_table(&self, layout: Layout, _: TableNode, _: AllocationWait) -> Option<Hpa> {
        self.tables.allocate(layout)
    }

    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        self.tables.free(table, layout);
    }

    #[inline]
    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        phys::ptr_of(table)
    }

    fn resolve(&self, backing: &BackingSlice, gfn: Gfn, page: u64, access: Access) -> Result<Resolved, Gone> {
        let offset_bytes = page.checked_mul(PAGE_SIZE).and_then(|bytes| bytes.checked_add(backing.offset_bytes));
        backing
            .backing
            .resolve(offset_bytes.ok_or(Gone)?, access, &|change| self.while_invalid(GfnRange::new(gfn, 1), change))
    }

    fn leaf_zapped(&self, leaf: ZappedLeaf) {
        if let Some((_, pages)) = self.guest.get() {
            pages.note_zapped(leaf);
        }
    }

    fn flush(&self, ranges: &[GfnRange]) {
        // Relaxed: a statistic.
        self.nr_flushes.fetch_add(1, Ordering::Relaxed);
        self.flush_domain.flush(ranges);
    }

    fn drain_modification_logs(&self, log: &mut dyn FnMut(&[Gpa])) {
        self.modification_logs.drain(&self.flush_domain, log);
    }

    // `should_yield` stays false: Linux takes the CPU away from a thread by itself.

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
}

impl Park for MachineHost {
    fn park(&self, word: &AtomicU32, expected: u32) {
        let forever = ptr::null::<libc::timespec>();
        let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: the word is an aligned 32-bit integer that outlives the call, and no timeout is allowed. Every result
        // (woken, interrupted, another value) is a reason to return that the trait permits.
        unsafe { libc::syscall(libc::SYS_futex, ptr::from_ref(word), operation, expected, forever) };
    }

    fn unpark_one(&self, word: *const AtomicU32) -> bool {
        futex_wake(word, 1) > 0
    }

    fn unpark_all(&self, word: *const AtomicU32) {
        futex_wake(word, i32::MAX);
    }
}

/// The number of threads that were woken; negative for an error, of which there is none but a word that is gone.
fn futex_wake(word: *const AtomicU32, most: i32) -> libc::c_long {
    // SAFETY: the kernel takes the word of a private wake-up for a number only; it may be gone.
    unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, most) }
}

/// The allocator of tables: a mark that rises through the region, and a list of freed tables for each size.
#[derive(Debug)]
struct Tables {
    start: *mut u8,
    size_bytes: u64,
    /// Bytes from the region's start that were given out at least once.
    used_bytes: CachePadded<AtomicU64>,
    nr_live: CachePadded<AtomicU64>,
    max_live: u64,
    free: [SegQueue<Hpa>; NR_TABLE_SIZES],
}

// SAFETY: the region's pages go to one owner at a time; the pointer itself is never written.
unsafe impl Send for Tables {}
// SAFETY: as above.
unsafe impl Sync for Tables {}

/// Index of the list for a table's size, and that size in bytes.
fn size_class(layout: Layout) -> Option<(usize, u64)> {
    // A table as large as its alignment satisfies both; and a page at least, since the CPU's formats know no less.
    let size_bytes = (layout.size().max(layout.align()) as u64).max(PAGE_SIZE).checked_next_power_of_two()?;
    let class = (size_bytes.trailing_zeros() - MIN_TABLE_SHIFT) as usize;
    (class < NR_TABLE_SIZES).then_some((class, size_bytes))
}

impl Tables {
    fn new(size_bytes: u64, max_tables: u64) -> Result<Tables, HostError> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: without MAP_FIXED the kernel takes addresses that nobody uses.
        let start = unsafe { libc::mmap(ptr::null_mut(), size_bytes as usize, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(HostError::NoAddressSpace { size_bytes, source: io::Error::last_os_error() });
        }
        Ok(Tables {
            start: start.cast(),
            size_bytes,
            used_bytes: CachePadded::default(),
            nr_live: CachePadded::default(),
            max_live: max_tables,
            free: Default::default(),
        })
    }

    fn allocate(&self, layout: Layout) -> Option<Hpa> {
        let (class, size_bytes) = size_class(layout)?;
        // Relaxed: the count limits, it hands nothing over. Counted before it is taken, so that the limit holds at any
        // moment; with little left, two threads may both be refused, which a real shortage may do as well.
        if self.nr_live.fetch_add(1, Ordering::Relaxed) >= self.max_live {
            self.nr_live.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        let table = self.free[class].pop().or_else(|| self.take_fresh(size_bytes));
        if table.is_none() {
            self.nr_live.fetch_sub(1, Ordering::Relaxed);
        }
        table
    }

    fn take_fresh(&self, size_bytes: u64) -> Option<Hpa> {
        let base = self.start.addr() as u64;
        // The gap in front of a larger table is lost; there is at most one such table for each root.
        let place = |used: u64| (base + used).next_multiple_of(size_bytes) - base;
        let end = |used: u64| place(used).checked_add(size_bytes).filter(|&end| end <= self.size_bytes);
        // Relaxed: whoever moves the mark owns what it passed over, and nobody had that before.
        let used = self.used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, end).ok()?;
        Some(phys::hpa_of(self.start.wrapping_add(place(used) as usize)))
    }

    fn free(&self, table: Hpa, layout: Layout) {
        // Without a class it did not come from here.
        let Some((class, _)) = size_class(layout) else { return };
        // The queue's own ordering hands the table over to the one who pops it.
        self.free[class].push(table);
        self.nr_live.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Tables {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this size; the host is gone, and with it the VM and its CPUs, which hold it.
        let result = unsafe { libc::munmap(self.start.cast(), self.size_bytes as usize) };
        debug_assert_eq!(result, 0, "munmap of a mapping of our own");
    }
}

#[cfg(test)]
#[path = "host_tests.rs"]
mod tests;
