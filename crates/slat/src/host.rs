//! What the engine asks of its surroundings, and all that an embedder writes: memory for tables, frames for guest
//! pages, a TLB flush, and a few words with the scheduler. [`guide`](crate::guide) has the order in which to write it, and
//! what is held at each call.
//!
//! A `Host` value belongs to one [`Vm`](crate::Vm); a hypervisor's value typically points to the VM's own state.
//! The engine calls it from any thread, several at a time. What each call may do is said at the method: "may block"
//! means that the engine holds neither a lock nor a read section there.

#![expect(unsafe_code, reason = "the trait itself is the promise that tables may be handed to hardware")]

use core::alloc::Layout;

use crate::addr::{Access, Gfn, GfnRange, Gpa, Hpa, NodeId, PageSize, Pfn};
use crate::sync::Park;

/// What [`Host::resolve`] found behind a page of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Resolved {
    /// The frame that backs the page which was asked for (not of the start of the huge page around it).
    pub pfn: Pfn,
    /// The largest block around the frame, naturally aligned in host-physical memory, whose frames back the pages around
    /// this one in their order, and which may be mapped by one leaf, with `writable` as here. The engine maps less where
    /// the slot's ends, alignment or dirty logging ask for it.
    pub max_size: PageSize,
    /// Whether the guest may write the frame. Must be `true` if the access was a write. A read may be answered with
    /// `false`: the first write then asks again. A host that copies on write invalidates the page before it answers that with
    /// another frame (see [`resolve`](Host::resolve)).
    pub writable: bool,
}

/// Where the memory of a table is to come from: what a [`TablePlacement`](crate::TablePlacement) asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TableNode {
    /// From this node; from another if it has none.
    Node(NodeId),
    /// From the node of the CPU that the calling thread runs on; from another if it has none.
    Caller,
    /// From wherever the memory policy of the calling thread says.
    CallerPolicy,
}

/// Whether an allocation may wait until there is memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AllocationWait {
    /// It is made inside a section, and perhaps the lock: what is not at hand is not there.
    Never,
    /// It may reclaim, swap, sleep.
    Allowed,
}

/// A leaf that is taken away, and what the guest did through it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ZappedLeaf {
    /// The guest frames that it mapped.
    pub range: GfnRange,
    /// The first host frame.
    pub pfn: Pfn,
    /// Whether the guest used it since it was installed or last aged ([`Vm::age_range`](crate::Vm::age_range)).
    pub accessed: bool,
    /// Whether the guest wrote through it since it was installed.
    pub dirty: bool,
}

/// The backing has no frame for the page and will not have one: the file is too short, the memory was poisoned or
/// taken away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gone;

/// The surroundings of one VM.
///
/// # Safety
/// The engine builds page tables that hardware (or a software CPU) walks, and trusts this trait for it:
/// - [`allocate_table`](Host::allocate_table) returns memory of the layout asked for that nobody else uses until it is
///   given to [`free_table`](Host::free_table); its host-physical address is aligned alike and fits the format;
///   [`table_ptr`](Host::table_ptr) returns a pointer to that memory, valid for reads and writes and the same at each
///   call.
/// - [`flush`](Host::flush) returns only when no CPU can use a translation older than the call.
/// - [`barrier_on_all_cpus`](Host::barrier_on_all_cpus) is one, if
///   [`has_barrier_on_all_cpus`](Host::has_barrier_on_all_cpus) says so.
/// - what [`resolve`](Host::resolve) answered stays true until the host invalidates the page
///   ([`Vm::invalidate_range`](crate::Vm::invalidate_range)), or the backing is dropped.
/// - no method unwinds.
pub unsafe trait Host: Park + Send + Sync {
    /// What a slot's memory comes from: the engine keeps it with the slot, passes it to [`resolve`](Host::resolve) and
    /// drops it when the slot is gone and no resolve uses it any more.
    type Backing: Send + Sync;

    /// Allocates host-physical memory for a table of `layout` (size and alignment in bytes, both powers of two), on `node`
    /// if that has some. The contents do not matter.
    ///
    /// With [`AllocationWait::Allowed`] it may block, and `None` means that there is no memory: a fault then fails with
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) and has changed nothing, a huge page that was to be split ahead of
    /// time is split when it is written. With [`AllocationWait::Never`] it must not block, and `None` means that nothing is
    /// at hand: a split asks again when it may wait, and an invalidation, which never waits for memory, takes the whole of a
    /// huge leaf away instead of a part. A host may always answer that.
    fn allocate_table(&self, layout: Layout, node: TableNode, wait: AllocationWait) -> Option<Hpa>;

    /// The node that a frame of guest memory, or of a table, is on. Asked whenever a table is allocated and linked: a mere
    /// look.
    #[inline]
    fn node_of(&self, _frame: Pfn) -> NodeId {
        NodeId(0)
    }

    /// Takes back a table that [`allocate_table`](Host::allocate_table) gave out. No CPU walks it any more. Must not block: it
    /// may be called inside a section and the lock.
    ///
    /// # Safety
    /// `table` came from `allocate_table` of this host with the same `layout` and was not freed since.
    unsafe fn free_table(&self, table: Hpa, layout: Layout);

    /// The pointer by which the engine reaches the table at `table`. Called at each step of each walk: it should be a
    /// mere addition.
    fn table_ptr(&self, table: Hpa) -> *mut u8;

    /// Finds the frame behind page number `page` (4 KiB pages from the slot's start) of `backing` for `access`.
    /// `gfn` is the guest frame that faulted. May block (to swap in, to fetch, to zero).
    ///
    /// The answer must be what is true once all earlier invalidations of the page are over, and the host must not take it
    /// back (give the frame to another use, give the page another frame, forbid writing it) but between the return of
    /// [`Vm::invalidate_range`](crate::Vm::invalidate_range) for the page and the drop of what that returned. A fault that
    /// got the old answer then does not install it, however late it comes. This method may itself call
    /// `invalidate_range`, for instance to copy a page that is written for the first time.
    ///
    /// # Errors
    /// [`Gone`]: the fault returns [`Error::BackingGone`](crate::Error::BackingGone).
    fn resolve(&self, backing: &Self::Backing, gfn: Gfn, page: u64, access: Access) -> Result<Resolved, Gone>;

    /// As [`resolve`](Host::resolve), for a page that is private to the guest
    /// ([`Vm::set_memory_attributes`](crate::Vm::set_memory_attributes)): its frame in the guest_memfd that belongs to `backing`.
    ///
    /// # Errors
    /// As there. A host without guest_memfds, as here, has none.
    fn resolve_private(
        &self,
        _backing: &Self::Backing,
        _gfn: Gfn,
        _page: u64,
        _access: Access,
    ) -> Result<Resolved, Gone> {
        Err(Gone)
    }

    /// What [`resolve`](Host::resolve) would answer for the page, if that is known without blocking and without changing
    /// anything: its frame is resident. `None` if it is not, or if nobody knows. Never asked for private pages. Asked, with
    /// [`FaultAround`](crate::FaultAround), for the neighbours of a page that the guest has faulted on; `access` is a read, or
    /// an execution if that was the fault's. The answer binds the host as that of `resolve` does. Called outside of sections
    /// and of the lock; must not block.
    #[inline]
    fn resolve_resident(&self, _backing: &Self::Backing, _gfn: Gfn, _page: u64, _access: Access) -> Option<Resolved> {
        None
    }

    /// Makes sure that no CPU of this VM uses a translation of `ranges` that it got before this call. Returns only when
    /// that is so; it must not wait for a CPU that is not running. May block.
    fn flush(&self, ranges: &[GfnRange]);

    /// Makes the CPU that the calling thread runs on forget what it has cached of the page of 4 KiB at `gpa`, of this VM: the
    /// entries of the tables, valid or not, and what was combined of both stages. Called in formats with
    /// [`NEEDS_LOCAL_FLUSH`](crate::Format::NEEDS_LOCAL_FLUSH) (Arm, RISC-V), each time before
    /// [`Vcpu::handle_fault`](crate::Vcpu::handle_fault) returns [`Outcome::Resume`](crate::Outcome::Resume), by the thread that
    /// has called that. Without it, a guest may fault on that page for ever.
    ///
    /// No other CPU is meant, and none is waited for. If the thread moves to another CPU before the guest goes on, that one may
    /// have the old entry, too: the guest then faults once more, and that CPU is flushed. Called outside of sections and of the
    /// lock; must not block. On x86 it is never called.
    #[inline]
    fn flush_local(&self, _gpa: Gpa) {}

    /// Gives `log` the pages that CPUs of this VM have written down in their page-modification logs (Intel SDM vol. 3C,
    /// "Page-Modification Logging"), a part at a time; what was given need not be kept. A page may be given twice, and one may
    /// be given that no CPU has made dirty in the end. For [`DirtyTracking::PageModificationLog`](crate::DirtyTracking).
    ///
    /// Of each dirty bit that a CPU has set before this call, it returns only when the page was given, after the bit was set,
    /// to this `log`, to that of another call, or to [`Vcpu::log_modifications`](crate::Vcpu::log_modifications), and that
    /// one has returned. And when a page is given, each CPU that had written it down has set its dirty bit already, or will
    /// write it down again before it does: for the engine may clear the bit then. Must not wait for a CPU that is not running. Called outside of sections and of the lock; `log` does
    /// not block.
    #[inline]
    fn drain_modification_logs(&self, _log: &mut dyn FnMut(&[Gpa])) {}

    /// A leaf is taken away: whoever manages the memory may want to know that the page was used or written. When
    /// [`Vm::invalidate_range`](crate::Vm::invalidate_range) returns, all that the guest did in the range has been told. (A
    /// CPU that has the leaf cached may write until the flush, but only through one that is `dirty` already.)
    ///
    /// A [`Vm`](crate::Vm) that is dropped tells of all leaves that are left, before it gives the tables back: the CPUs have left
    /// the guest by then. A fault that replaces a leaf by one that may be written tells of that as well, if it was used.
    ///
    /// It may be told more than once, also for a page that another call has invalidated meanwhile: take it as news of the
    /// guest's pages, and do not touch the frame for it. Called inside a section and the lock: note it, do not block, and do
    /// not call the VM.
    #[inline]
    fn leaf_zapped(&self, _leaf: ZappedLeaf) {}

    /// Where the engine may read the guest's memory in `frame`, and write it, a word at a time and atomically: its page tables,
    /// of which shadow tables are made. A frame that [`resolve`](Host::resolve) gave; the pointer stays valid until the page is
    /// invalidated. `None` if there is none: shadow paging then is not to be had. Called under the lock of the guest frame; must
    /// not block.
    #[inline]
    fn guest_memory_ptr(&self, _frame: Pfn) -> Option<*mut u8> {
        None
    }

    /// Whether [`barrier_on_all_cpus`](Host::barrier_on_all_cpus) does what it says. Asked once, when the VM is made.
    #[inline]
    fn has_barrier_on_all_cpus(&self) -> bool {
        false
    }

    /// Makes a full memory barrier on every CPU that may run a thread of this VM, like an interrupt whose handler has one
    /// (Linux: `membarrier` with `MEMBARRIER_CMD_PRIVATE_EXPEDITED`; bare metal: an IPI). A thread that is not running
    /// needs none, since a switch of threads is a barrier: it must not be waited for. With it, faults are spared two full
    /// fences each; without it they make them. Called when memory is reclaimed.
    #[inline]
    fn barrier_on_all_cpus(&self) {}

    /// Whether the caller's CPU is wanted for something else, so that a long operation should call
    /// [`yield_now`](Host::yield_now). Asked every few thousand entries that a walk passes by, and
    /// every few that it changes, inside the section and the lock or between two: a mere look. The
    /// section is left from time to time in any case.
    #[inline]
    fn should_yield(&self) -> bool {
        false
    }

    /// Lets others run. May block, but for no vCPU: with shadow paging, who waits for the lock of a guest frame calls it while it
    /// holds that of a shadow table.
    #[inline]
    fn yield_now(&self) {}

    /// A clock that never goes backwards, in nanoseconds. Read for every lock wait and for a sample of the faults.
    fn timestamp_ns(&self) -> u64;

    /// For how long, in nanoseconds since some fixed moment, the calling thread was ready to run but had no CPU. The
    /// guest-stall statistic takes it off, because that time is the scheduler's and not the engine's. Zero where the
    /// host cannot tell.
    #[inline]
    fn run_delay_ns(&self) -> u64 {
        0
    }
}
