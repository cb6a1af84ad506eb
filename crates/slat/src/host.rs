//! The trait that an embedder implements: memory for page-table pages, frames for guest pages, a
//! TLB flush, and some calls to the scheduler.
//!
//! # Use
//! A `Host` value belongs to one [`Vm`](crate::Vm); [`Vm::host`](crate::Vm::host) returns it. A
//! hypervisor's value typically points to the VM's own state, such as the CPUs that `flush` must
//! reach. The engine calls it from any thread, several at a time.
//!
//! Six methods and the type of the backing are required. Each other method says what its default
//! does. [`guide`](crate::guide) has the order in which to write them.
//!
//! # Which methods may block
//! Each method says whether it may block. Where it may, the engine holds neither a lock nor a
//! guard, unless the method says otherwise. The [guide] has the list.
//!
//! [guide]: crate::guide#when-the-host-is-called-and-what-is-held-then
//!
//! - A *guard* is a part of an engine call. What is unlinked during a guard is not freed before the
//!   guard ends.
//! - *The VM's lock* exists only for comparison (feature `baselines`). In other builds, read "under
//!   the VM's lock" as "inside a guard".

#![expect(unsafe_code, reason = "the trait itself is the promise that tables may be handed to hardware")]

use core::alloc::Layout;

use crate::addr::{Access, Gfn, GfnRange, Gpa, Hpa, NodeId, PageSize, Pfn};
use crate::format::walkers::CleanPtes;
use crate::format::{Execute, LeafAttributes, MemoryType};
use crate::sync::AtomicU64;
#[cfg(feature = "baselines")]
use crate::sync::Park;

/// The answer of [`Host::resolve`] for a page of a memslot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Resolved {
    /// The frame of the requested page (not of the start of the huge page around it).
    pub pfn: Pfn,
    /// The largest block around the frame that one leaf may map. It is naturally aligned in
    /// host-physical memory. Of its frames those that belong to the memslot back the pages around
    /// this one in their order, and `writable` and `attributes` hold for all of these.
    ///
    /// The host need not look at the memslot's ends, nor at the alignment of guest-physical
    /// addresses: the engine maps less where these, or dirty logging, require it.
    pub max_size: PageSize,
    /// Whether the guest may write the frame.
    ///
    /// With `false` for a read, the first write asks again. A host that copies on write invalidates
    /// the page before it answers that write with another frame (see [`resolve`](Host::resolve)).
    /// With `false` for a write, the page is read-only here: the fault is
    /// [`Exit::Mmio`](crate::Exit::Mmio).
    pub writable: bool,
    /// How the guest may use it otherwise. They hold until the page is invalidated, but for
    /// execution: as with `writable`, a fetch that the leaf forbids asks again, and is
    /// [`Exit::Mmio`](crate::Exit::Mmio) if the answer forbids it.
    ///
    /// On Arm without [`CpuFeatures::FWB`](crate::format::CpuFeatures::FWB), the host maintains the
    /// data cache before it answers with memory that the guest may access past the cache, and on
    /// all Arm CPUs the instruction cache before it answers a fetch.
    pub attributes: LeafAttributes,
}

impl Resolved {
    /// The frame `pfn` of ordinary memory, in a block of `max_size`: it may be written and
    /// executed. For other answers change fields: `Resolved { writable: false,
    /// ..Resolved::memory(..) }`.
    #[inline]
    pub const fn memory(pfn: Pfn, max_size: PageSize) -> Resolved {
        let attributes = LeafAttributes { memory: MemoryType::WriteBack, execute: Execute::All };
        Resolved { pfn, max_size, writable: true, attributes }
    }
}

/// Where a page-table page is allocated, as a [`TablePlacement`](crate::tables::TablePlacement)
/// requests it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TableNode {
    /// On this node; on another if it has no memory.
    Node(NodeId),
    /// On the node of the CPU that the calling thread runs on; on another if it has no memory.
    Caller,
    /// Where the memory policy of the calling thread says.
    CallerPolicy,
}

/// Whether an allocation may wait until there is memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AllocationWait {
    /// It must not block: a guard is open, and perhaps the VM's lock is held.
    Never,
    /// It may reclaim, swap, sleep.
    Allowed,
}

/// A leaf that is being removed, and what the guest did through it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ZappedLeaf {
    /// The guest frames that it mapped.
    pub range: GfnRange,
    /// The first host frame.
    pub pfn: Pfn,
    /// Whether the guest used it since it was installed or last aged
    /// ([`Vm::age_range`](crate::Vm::age_range)).
    pub accessed: bool,
    /// Whether the guest wrote through it since it was installed.
    pub dirty: bool,
}

/// Why [`Host::resolve`] has no frame for a page of a memslot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unresolved {
    /// The backing has none and will not have one. For example, the file is too short, or the
    /// memory is poisoned. The fault returns
    /// [`FaultError::BackingGone`](crate::error::FaultError::BackingGone).
    Gone,
    /// A device is here: the fault is [`Exit::Mmio`](crate::Exit::Mmio).
    Mmio,
}

/// The environment of one VM: what the engine needs from the hypervisor around it.
///
/// # Safety
/// The engine builds page tables that hardware (or a software CPU) walks, and relies on this trait:
/// - [`allocate_table`](Host::allocate_table) returns memory of the requested layout that has no
///   other user until it is passed to [`free_table`](Host::free_table). Its host-physical address
///   is aligned alike and fits the format.
/// - [`table_ptr`](Host::table_ptr) returns a pointer to that memory, valid for reads and writes,
///   and the same at each call.
/// - [`flush`](Host::flush) returns only when no CPU can use a translation older than the call, and
///   no walk that began before the call is under way.
/// - [`barrier_on_all_cpus`](Host::barrier_on_all_cpus) is a barrier on all CPUs, if
///   [`has_barrier_on_all_cpus`](Host::has_barrier_on_all_cpus) returns `true`.
/// - An answer of [`resolve`](Host::resolve) stays true until the host invalidates the page
///   ([`Vm::invalidate_range`](crate::Vm::invalidate_range)), or the backing is dropped.
/// - No method unwinds.
pub unsafe trait Host: Send + Sync {
    /// What a memslot's memory comes from. The engine keeps it with the memslot and passes it to
    /// [`resolve`](Host::resolve). It drops it when the memslot is deleted and no resolve uses it
    /// any more.
    type Backing: Send + Sync;

    /// Allocates host-physical memory for a page-table page of `layout` (size and alignment in
    /// bytes, both powers of two), on `node` if that has memory. The contents do not matter. Any
    /// aligned address will do, 0 too.
    ///
    /// With [`AllocationWait::Allowed`] it may block. `None` means that there is no memory: a fault
    /// returns [`FaultError::OutOfMemory`](crate::error::FaultError::OutOfMemory) and has changed
    /// nothing, and a huge page that was to be split ahead of time is split by its first write.
    ///
    /// With [`AllocationWait::Never`] it must not block. `None` means that no memory is at hand: a
    /// split asks again when it may wait. An invalidation never waits for memory, and zaps the
    /// whole of a huge leaf instead of a part. A host may always answer `None` here.
    fn allocate_table(&self, layout: Layout, node: TableNode, wait: AllocationWait) -> Option<Hpa>;

    /// The node of a frame of guest memory or of a page-table page. It is called whenever a
    /// page-table page is allocated or linked, so it should be a simple look-up. The default is for
    /// a host of one node: always node 0.
    #[inline]
    fn node_of(&self, _frame: Pfn) -> NodeId {
        NodeId(0)
    }

    /// Frees a page-table page that [`allocate_table`](Host::allocate_table) returned. No CPU walks
    /// it any more. Must not block: it may be called inside a guard and under the VM's lock.
    ///
    /// # Safety
    /// `table` came from `allocate_table` of this host with the same `layout` and was not freed
    /// since.
    unsafe fn free_table(&self, table: Hpa, layout: Layout);

    /// The pointer by which the engine accesses the page-table page at `table`. It is called at
    /// each step of each walk, so it should be a single addition. Where a program is the CPU, an
    /// address may be an offset in one large allocation, for example.
    ///
    /// Here `table` has [`Hardware::address_bits`](crate::format::Hardware::address_bits), if there
    /// are any: a constant less in that addition.
    fn table_ptr(&self, table: Hpa) -> *mut u8;

    /// Finds the frame of page number `page` (4 KiB pages from the memslot's start) of `backing`
    /// for `access`. `gfn` is the guest frame that faulted. May block (to swap in, to fetch, to
    /// zero).
    ///
    /// Several threads may request the same page, also at once: the answer is the same frame, until
    /// the host invalidates the page. The answer must be what is true once all earlier
    /// invalidations of the page are over. After that, the host may withdraw it only between the
    /// return of [`Vm::invalidate_range`](crate::Vm::invalidate_range) for the page and the drop of
    /// the returned value. To withdraw is to use the frame for something else, to give the page
    /// another frame, or to forbid writing it. A fault with the old answer then does not install
    /// it, however late it comes. An answer with a larger `max_size` covers all pages of its block:
    /// the host invalidates only the pages that change, and no answer that covers one is installed.
    ///
    /// A resolve whose answer is installed observes what was written before the drop of each
    /// earlier invalidation of the page.
    ///
    /// This method may itself call `invalidate_range`, for instance to copy a page at its first
    /// write.
    ///
    /// # Errors
    /// [`Unresolved`]: what the fault does instead.
    fn resolve(&self, backing: &Self::Backing, gfn: Gfn, page: u64, access: Access) -> Result<Resolved, Unresolved>;

    /// As [`resolve`](Host::resolve), for a page that is private to the guest
    /// ([`Vm::set_memory_attributes`](crate::Vm::set_memory_attributes)): its frame in the
    /// guest_memfd that belongs to `backing`.
    ///
    /// # Errors
    /// Those of [`resolve`](Host::resolve). The default is for a host without guest_memfds: always
    /// [`Unresolved::Gone`].
    fn resolve_private(
        &self,
        _backing: &Self::Backing,
        _gfn: Gfn,
        _page: u64,
        _access: Access,
    ) -> Result<Resolved, Unresolved> {
        Err(Unresolved::Gone)
    }

    /// Returns what [`resolve`](Host::resolve) would answer for a resident page. `None` if the page
    /// is not resident, or if the host does not know. The default does not know. Must not block or
    /// change anything.
    ///
    /// It is called for the neighbours of a page that the guest has faulted on, with
    /// [`FaultAround`](crate::tables::FaultAround); never for private pages. `access` is a read, or
    /// an execution if that was the fault's. The answer binds the host as that of `resolve` does.
    /// No guard is open and no lock is held.
    #[inline]
    fn resolve_resident(&self, _backing: &Self::Backing, _gfn: Gfn, _page: u64, _access: Access) -> Option<Resolved> {
        None
    }

    /// Makes sure that no CPU of this VM uses a translation of `ranges` that it got before this
    /// call. This includes what it keeps of directory entries, and walks that are under way.
    /// Returns only when that is so. It may block, but must not wait for a CPU that is not running.
    ///
    /// There are 1 to 8 ranges, in no order. They may overlap, and reach beyond memslots. For large
    /// ones flush everything.
    ///
    /// On Arm and RISC-V a host for which [`needs_zapped_leaves`](Host::needs_zapped_leaves) is
    /// `true` may leave directory entries alone where a range has fewer than 512 pages: only leaf
    /// PTEs were changed or replaced there. With `false` each flush includes directory entries,
    /// however small the range is.
    ///
    /// [`guide`](crate::guide#what-flush-and-the-rest-guarantee) says exactly what a flush orders,
    /// and how one is usually written.
    fn flush(&self, ranges: &[GfnRange]);

    /// Flushes what the CPU of the calling thread has cached of the page of 4 KiB at `gpa`, of this
    /// VM. This includes PTEs of each level on the way to it, valid or not, and translations
    /// combined of both stages. (Where an instruction by address leaves directory entries, a host
    /// may flush everything at the second call in turn for the same page. See
    /// [`porting`](crate::guide::porting).)
    ///
    /// It is called in formats with [`NEEDS_LOCAL_FLUSH`](crate::format::Format::NEEDS_LOCAL_FLUSH)
    /// (Arm, RISC-V), and never on x86. [`Vcpu::handle_fault`](crate::Vcpu::handle_fault) calls it
    /// on its own thread, each time before it returns [`Outcome::Resume`](crate::Outcome::Resume).
    /// The default does nothing, so implement it for Arm and RISC-V. Without it, a guest may fault
    /// on that page for ever.
    ///
    /// It concerns no other CPU, and waits for none. If the thread moves before the guest goes on,
    /// the other CPU may have the old PTE, too. The guest then faults once more, and that CPU is
    /// flushed. No guard is open and no lock is held. Must not block.
    #[inline]
    fn flush_local(&self, _gpa: Gpa) {}

    /// Whether hardware may read the page tables of this VM past the caches of the CPUs, so that
    /// [`clean_ptes`](Host::clean_ptes) is implemented. Asked for each change of a PTE, in formats
    /// whose [`Walkers`](crate::format::Format::Walkers) may be incoherent ([`Vtd`]), and in no
    /// other. The default is `false`, for walkers that snoop the caches.
    ///
    /// [`Vtd`]: crate::format::Vtd
    #[inline]
    fn has_incoherent_walkers(&self) -> bool {
        false
    }

    /// Writes the `size_bytes` bytes from `first` on, which are PTEs, back to memory, and returns
    /// when they are there (on x86: CLWB or CLFLUSHOPT of each line, and SFENCE; VT-d
    /// specification, 6.8 "Write Buffer Flushing", where CAP.RWBF is set). `first` is a pointer
    /// into a page-table page, by [`table_ptr`](Host::table_ptr). They do not reach beyond that
    /// page. The default does nothing.
    ///
    /// A new page-table page is cleaned before a PTE points to it. A PTE is cleaned after it was
    /// changed: before the flush that the change needs, and before the call returns. A thread that
    /// relies on the change of another one cleans the PTE as well. Other threads may change the
    /// bytes meanwhile. Called inside a guard and under the VM's lock; must not block.
    #[inline]
    fn clean_ptes(&self, _first: *const u8, _size_bytes: usize) {}

    /// Passes to `log` the pages that CPUs of this VM wrote into their page-modification logs
    /// (Intel SDM vol. 3C, "Page-Modification Logging"), a part at a time. Pages that were passed
    /// need not be kept. For [`DirtyTracking::PageModificationLog`](crate::dirty::DirtyTracking).
    ///
    /// Two conditions must hold:
    /// - For each dirty bit that a CPU set before this call, the page is passed on after the bit
    ///   was set, and before this call returns. It is passed to this `log`, to that of another
    ///   call, or to [`Vcpu::log_modifications`](crate::Vcpu::log_modifications), and that call has
    ///   returned.
    /// - When a page is passed, each CPU that logged it has set its dirty bit already, or will log
    ///   it again before it sets the bit. The engine may clear the bit at that moment.
    ///
    /// A page may be passed twice, and so may one whose dirty bit no CPU has set in the end. Must
    /// not wait for a CPU that is not running. No guard is open and no lock is held; `log` does not
    /// block. The default passes nothing, so implement it for that tracking.
    #[inline]
    fn drain_modification_logs(&self, _log: &mut dyn FnMut(&[Gpa])) {}

    /// Notifies the host of a leaf that is being removed: whether the page was used or written. It
    /// runs inside a guard and under the VM's lock, so only record it. Do not block, and do not
    /// call the VM.
    ///
    /// When [`Vm::invalidate_range`](crate::Vm::invalidate_range) returns, the host has been
    /// notified of all that the guest did in the range. (A CPU that has the leaf cached may write
    /// until the flush, but only through a leaf that is `dirty` already.)
    ///
    /// A [`Vm`](crate::Vm) that is dropped notifies the host of all remaining leaves before it
    /// frees the page-table pages; the CPUs have left the guest by then. A fault that replaces a
    /// used leaf by one that may be written notifies it, too.
    ///
    /// The host may be notified more than once, also for a page that another call has invalidated
    /// since. So treat it as information about the guest's page, and do not access the frame. The
    /// default does nothing: it is for a host that keeps no accessed and dirty state of its pages.
    /// Such a host answers `false` in [`needs_zapped_leaves`](Host::needs_zapped_leaves), and is
    /// then notified of some leaves, or of none.
    #[inline]
    fn leaf_zapped(&self, _leaf: ZappedLeaf) {}

    /// Whether the host needs [`leaf_zapped`](Host::leaf_zapped). Called once, when the VM is
    /// created. The default is `true`: a host that implements that method loses no report.
    ///
    /// With `false`, an invalidation, a deletion or a move of a memslot, and the end of the VM take
    /// page-table pages away with the leaves in them: they neither visit nor report the leaves. The
    /// time of the call then depends on the number of directory entries of 2 MiB, and not of pages.
    /// What was taken away so waits to be freed, up to 65536 page-table pages (256 MiB), and the
    /// leaves in it count as mapped until then
    /// ([`Stats::pages_4k`](crate::stats::Stats::pages_4k)). Later calls free 128 page-table pages
    /// each. [`Vm::reclaim`](crate::Vm::reclaim) frees all.
    ///
    /// Leaves are visited all the same where CPUs' dirty bits are the log
    /// ([`DirtyTracking::DirtyBit`](crate::dirty::DirtyTracking::DirtyBit) and
    /// [`PageModificationLog`](crate::dirty::DirtyTracking::PageModificationLog)), with shadow
    /// paging, and in a VM that has or had a pinned memslot
    /// ([`MemoryRegionFlags::PINNED`](crate::MemoryRegionFlags::PINNED)). The first of these is
    /// refused ([`SlotError::SlotBusy`](crate::error::SlotError::SlotBusy)) while an invalidation
    /// of its range is in flight.
    ///
    /// A page-table page that was taken away keeps valid leaves until the call has flushed. A flush
    /// of one page by another thread may come before that. So it must include directory entries
    /// (RISC-V: a fence with rs1 = x0, whatever the range), or CPUs still come to the old leaf.
    ///
    /// It is a method beside `leaf_zapped` and no field of [`Config`](crate::Config), because it
    /// says how the host is written, and not how a VM is to be managed.
    #[inline]
    fn needs_zapped_leaves(&self) -> bool {
        true
    }

    /// Releases the frames from `first` on, which [`Vm::map_range`](crate::Vm::map_range) mapped at
    /// `range`: these pages are not mapped any more, and no CPU uses them. The host may use the
    /// frames for something else, or give up its reference to them.
    ///
    /// It is called once for each page that a `map_range` without an error mapped: by the call that
    /// unmapped it, after the flush ([`Vm::unmap_range`](crate::Vm::unmap_range), an invalidation,
    /// the deletion or move of the memslot), or by the end of the VM. So it is also for a page of a
    /// `map_range` that fails, if another call unmapped the page before that was undone. Pages whose
    /// frames follow each other are often passed together, whatever calls mapped them.
    ///
    /// No guard is open. The range may still be in flight. It must not unwind, and must not map
    /// pages of the range. The default does nothing: it is for a host whose frames stay as long as
    /// the VM.
    #[inline]
    fn release_mapped(&self, _range: GfnRange, _first: Pfn) {}

    /// The pointer by which the engine reads and writes the guest's memory in `frame`, a word at a
    /// time and atomically. It accesses the guest's page tables this way to build shadow page
    /// tables.
    ///
    /// The frame is one that [`resolve`](Host::resolve) returned. The pointer stays valid until the
    /// page is invalidated. With `None`, the default, shadow paging is not available. It is called
    /// under the lock of the guest frame; must not block.
    #[inline]
    fn guest_memory_ptr(&self, _frame: Pfn) -> Option<*mut u8> {
        None
    }

    /// Whether [`barrier_on_all_cpus`](Host::barrier_on_all_cpus) is implemented. The default is
    /// `false`. Called once, when the VM is created.
    #[inline]
    fn has_barrier_on_all_cpus(&self) -> bool {
        false
    }

    /// Makes a full memory barrier on every CPU that may run a thread of this VM, like an interrupt
    /// whose handler has one (Linux: `membarrier` with `MEMBARRIER_CMD_PRIVATE_EXPEDITED`; bare
    /// metal: an IPI). Called when memory is reclaimed, and now and then by calls that
    /// write-protect pages for the dirty log.
    ///
    /// A thread that is not running needs no barrier, since a switch of threads is one. The call
    /// must not wait for such a thread. With it, each fault makes two full fences fewer. Without
    /// [`has_barrier_on_all_cpus`](Host::has_barrier_on_all_cpus) it is not called.
    #[inline]
    fn barrier_on_all_cpus(&self) {}

    /// Whether the caller's CPU is needed for something else, so that a long operation should call
    /// [`yield_now`](Host::yield_now).
    ///
    /// It is called every few thousand PTEs that a walk passes by, and every few that it changes.
    /// This is inside the guard and the lock, or between two guards. So it should only read a flag.
    /// The guard is left from time to time in any case. The default is `false`.
    #[inline]
    fn should_yield(&self) -> bool {
        false
    }

    /// Lets other threads run: on an operating system, by its yield call. These call it:
    /// - a fault on a page that is being invalidated, once, before it resumes the guest;
    /// - long calls, after [`should_yield`](Host::should_yield);
    /// - with shadow paging, threads that wait for a lock, and page faults that start over.
    ///
    /// The default does nothing. Then the guest of such a fault comes back at once, again and
    /// again, until the invalidation is dropped.
    ///
    /// It may block, but not for a vCPU: with shadow paging, a thread that waits for the lock of a
    /// guest frame calls it while it holds the lock of a shadow page. If preemption is disabled
    /// ([`preempt_disable`](Host::preempt_disable)), it must not give the CPU away, and only waits
    /// for a moment.
    #[inline]
    fn yield_now(&self) {}

    /// Keeps the calling thread on its CPU until as many calls of
    /// [`preempt_enable`](Host::preempt_enable) have followed as there were of this: a hypervisor in
    /// a kernel counts, and its scheduler preempts no thread whose count is not zero. Interrupts
    /// stay enabled.
    ///
    /// Shadow paging calls it before it takes the lock of a guest frame or of a shadow page, of
    /// which a thread may hold several. So no thread waits for a holder that was preempted. Meanwhile
    /// it calls [`table_ptr`](Host::table_ptr), [`guest_memory_ptr`](Host::guest_memory_ptr) and, if
    /// it waits for another lock, [`yield_now`](Host::yield_now), and nothing that may block.
    ///
    /// The default does nothing. Then some calls wait until the scheduler lets a preempted holder go
    /// on: [the guide](crate::guide#the-promise-and-where-it-ends) has the list.
    #[inline]
    fn preempt_disable(&self) {}

    /// Ends what the last [`preempt_disable`](Host::preempt_disable) that has not ended yet began. It
    /// may preempt the thread at once, if that was the first one, and returns when the thread runs
    /// again. No lock of shadow paging is held then, but perhaps a guard.
    #[inline]
    fn preempt_enable(&self) {}

    /// A clock that never goes backwards, in nanoseconds. Read for every wait for the lock and for
    /// a sample of the faults. A constant is allowed: [`Stats`](crate::stats::Stats) then has no
    /// times.
    fn timestamp_ns(&self) -> u64;

    /// For how long, in nanoseconds since some fixed moment, the calling thread was ready to run
    /// but had no CPU. The guest-stall statistic subtracts it, because that time is the scheduler's
    /// and not the engine's. Return zero if the host does not know.
    #[inline]
    fn run_delay_ns(&self) -> u64 {
        0
    }

    /// How threads that wait for the VM's lock sleep. `None`, as by default: they do not, and call
    /// [`yield_now`](Host::yield_now) again and again. Only for a VM with a
    /// [`Locking`](crate::baselines::Locking) other than `None`.
    #[cfg(feature = "baselines")]
    #[inline]
    fn parking(&self) -> Option<&dyn Park> {
        None
    }
}

impl<H: Host> CleanPtes for H {
    #[inline]
    fn has_to_clean(&self) -> bool {
        self.has_incoherent_walkers()
    }

    #[inline]
    fn clean(&self, ptes: &[AtomicU64]) {
        self.clean_ptes(ptes.as_ptr().cast(), size_of_val(ptes));
    }
}
