//! Shadow paging, for hardware that has no second stage, or uses it for something else.
//!
//! The hardware walks *shadow page tables*, which translate the guest's virtual addresses to frames
//! of the host. The engine makes them from the guest's own page tables and from the second stage,
//! which it keeps as for any VM.
//!
//! # Guarantees
//! - After a flush by the guest (INVLPG, INVPCID, a load of CR3, a page fault) its vCPU uses no
//!   translation from before what was flushed. A translation may be stale where the architecture
//!   lets it be stale. ([`ShadowStrategy`] has one exception, for loads of CR3 with bit 63.)
//! - Everything that holds for a VM with a second stage holds here: memslots, dirty log, userfault,
//!   invalidation.
//! - The root that [`Vcpu::entry`](crate::Vcpu::entry) returned is not freed while the CPU is in
//!   the guest. Only this vCPU's own calls, and its drop, end its use.
//! - A fault waits neither for the flush of an emulated write nor for a thread that holds a lock:
//!   the guest comes back. (It does wait where it evicts pages or builds a root.)
//!
//! # Use
//! 1. Implement [`Host::guest_memory_ptr`]: the engine reads and writes the guest's page tables by
//!    that pointer. [`Host::flush`] names guest frames, which such a CPU does not know: it flushes
//!    everything.
//! 2. Create the VM by [`Vm::with_shadow_paging`](crate::Vm::with_shadow_paging), and memslots as
//!    for any VM. The format is [`Npt`]: shadow PTEs are long-mode PTEs.
//! 3. Create a vCPU. Its paging is off until the guest turns it on, or until
//!    [`Vcpu::set_paging_registers`](crate::Vcpu::set_paging_registers).
//! 4. Each time before the CPU runs the guest, call [`Vcpu::entry`](crate::Vcpu::entry), flush what
//!    the [`GuestEntry`] names, and load its root and PCID, with CR4.LA57 set for five levels.
//! 5. When the CPU exits, call the method of the list below, and act on its
//!    [`Outcome`](crate::Outcome).
//!
//! A CPU without PCIDs ignores that of the entry. It flushes all if the root or the PCID is not that
//! of its last entry.
//!
//! Hardware walks with CR0.WP, EFER.NXE and CR4.PCIDE set and CR4.PGE clear. While the guest's
//! paging is on, CR4.SMEP and SMAP are the guest's.
//!
//! The CPU exits for the following.
//! - A page fault: [`Vcpu::handle_page_fault`](crate::Vcpu::handle_page_fault).
//! - A write of CR0, CR4 or EFER:
//!   [`Vcpu::write_paging_register`](crate::Vcpu::write_paging_register).
//! - A load of CR3: [`Vcpu::load_cr3`](crate::Vcpu::load_cr3).
//! - INVLPG and INVPCID: [`Vcpu::invlpg`](crate::Vcpu::invlpg),
//!   [`Vcpu::invpcid`](crate::Vcpu::invpcid).
//!
//! After [`Outcome::Resume`](crate::Outcome::Resume) the guest repeats the access of a page fault;
//! every other instruction of this list is done. If a call exits with
//! [`Exit::MemoryFault`](crate::Exit::MemoryFault) or
//! [`Exit::DirtyRingFull`](crate::Exit::DirtyRingFull), serve the exit, and let the guest execute
//! the instruction again.
//!
//! These exits to user space exist besides those of any VM:
//! - [`Exit::PageFault`](crate::Exit::PageFault): the guest's own tables forbid the access. Inject
//!   the fault.
//! - [`Exit::EmulateWrite`](crate::Exit::EmulateWrite): the guest writes one of its page tables.
//!   Emulate the instruction: pass the bytes that it writes to
//!   [`Vcpu::write_guest_table`](crate::Vcpu::write_guest_table). After its `Resume` the
//!   instruction is done.
//! - [`Exit::GeneralProtection`](crate::Exit::GeneralProtection): an operand is not valid, or an
//!   address is not canonical. Inject the fault.
//! - [`Exit::TableMmio`](crate::Exit::TableMmio): a page table of the guest is where no memory is.
//!
//! While the guest runs, only the guest itself may store into its page tables.
//! [`Vm::with_shadow_paging`](crate::Vm::with_shadow_paging) says what devices and the VMM do.
//!
//! `docs/protocols/shadow-paging.md` in the repository says how it works, and why it is correct.

#![expect(unsafe_code, reason = "finds the shadow page tables of a vCPU without a check of their type")]

pub(crate) mod guest;
mod install;
mod lock;
mod memory;
mod page;
mod pte_records;
mod rmap;
mod role;
pub(crate) mod roots;
mod sync;
pub(crate) mod walk;
mod write;
mod zap;

pub use crate::addr::Gva;
pub use crate::config::{ShadowPaging, ShadowStrategy};
pub use crate::registers::{GuestAccess, GuestEntry, LocalFlush, PagingRegister, PagingRegisters, Privilege};

use crossbeam_utils::CachePadded;

use alloc::boxed::Box;
use core::ptr;

use crate::addr::{Gfn, GfnRange, Level, Pfn};
use crate::boxed::Vacant;
use crate::error::OutOfMemory;
use crate::format::Npt;
use crate::host::Host;
use crate::stats::{Counter, Stats};
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::table::Tree;
use crate::table::cursor::Cursor;
use crate::table::derived::{DerivedTables, VcpuState};
use crate::table::pte::State;
use crate::table::retire::{Guard, NestedGuard, Participant};
use crate::table::tlb::TlbBatch;
use crate::table::vm_lock::HeldLock;
use lock::{Wait, WordGuard};
use page::Pages;
use rmap::{Frame, Frames};
use roots::Roots;

/// The shadow page tables of one VM.
///
/// # Guarantees
/// Those of the module.
///
/// # Use
/// A VM with shadow paging keeps its second stage, the tree of guest frames, and no hardware walks
/// it. Hardware walks the shadow page tables. They are a cache of the guest's tables and of the
/// leaf PTEs of the second stage, and are flushed like a TLB.
///
/// The flush of a `TlbBatch` first zaps the shadow leaf PTEs of the guest frames, or takes W from
/// them; a reverse map finds them. So the protocols of the second stage know nothing of shadow
/// paging: [`Shadow`] is the `DerivedTables` of the tree. Only
/// [`Vm::with_shadow_paging`](crate::Vm::with_shadow_paging) names it, so a program that does not
/// call that links none of this module.
///
/// - `guest` decodes the guest's tables, `memory` reads them.
/// - `page`: a shadow page is a hardware page-table page, made from a guest frame in a `role`.
/// - `rmap` has, for each guest frame, the leaf PTEs that map it and the pages made from it.
/// - `walk` and `install` serve the guest's page faults, `write` its writes to its tables.
/// - `zap` removes PTEs and pages; `sync` compares pages with the guest's tables after a flush.
/// - `roots` keeps the roots of each vCPU, and knows which of them a flush by the guest concerns.
///
/// # Implementation
/// **Locks** (`lock`). Each guest frame and each shadow page has one; `page` says what each guards.
/// A thread takes the locks of pages by falling level, then that of one frame. It holds none across
/// a flush, an allocation or a resolve, and has no guard open where it waits for one. A fault that
/// finds one held for long gives up, and the guest comes back. It may leave a link that is
/// registered and not written: the next fault goes on from there.
///
/// **Leaf PTEs.** A fault makes a leaf PTE under the locks of its page and of the frame that it
/// maps. Under them it reads the second stage once more, and installs what it finds then. A thread
/// that changes the second stage does that first, and then visits the frames under their locks.
///
/// **Upper guest tables** are write-protected while a shadow page of them exists. A write to one
/// exits and is emulated. The emulation zaps what was made of the old PTE before the guest goes on.
///
/// **Lowest guest tables** may be written. Then their pages are *unsync*: a shadow PTE may be what
/// the guest's PTE said before, as in a TLB. What the guest flushes is compared with the guest's
/// tables again: for this vCPU, and for all, since vCPUs share pages. A fault reads the guest's PTE
/// once more, under the lock of the page, before it makes the shadow PTE.
///
/// **Synchronization** of many pages:
/// 1. Under the lock of each page's frame, it takes W from the leaf PTEs of the guest's table, and
///    the page is *syncing*.
/// 2. It flushes all CPUs once.
/// 3. Under each page's lock, it compares the page's PTEs with the guest's. If the guest has not
///    written the table meanwhile, the page is *synced*.
///
/// A thread that finds a page syncing does all of that itself: its flush must be over when it
/// returns, and what another thread is about to do does not help.
///
/// **Page faults of the guest.** A page fault flushes its address in the current PCID, as INVLPG
/// does. Mostly nothing is stale there: `Mmu::may_be_stale` finds that out without locks. Where it
/// finds a lock held, or a PTE in an unsync page, the PTE is compared.
///
/// **Links.** A link to a page makes all visible that is below that page. Under the parent's lock
/// 1. the page gets its new parent,
/// 2. what is unsync below it is compared with the guest's tables,
/// 3. the link is written.
///
/// **Changes that are not flushed yet** are counted before they are made, until their flush is over
/// (`Shadow::nr_unflushed`). A thread that protects a guest table, and finds nothing to protect,
/// still flushes if the count is not zero.
///
/// # Why it is correct
/// - A visit of a frame and a fault that makes a leaf PTE of it take the same lock, the frame's. If
///   the visit comes second, it finds the leaf PTE; if it comes first, the fault finds the change.
/// - A synchronization and a fault take the same lock, the page's. If the synchronization comes
///   second, it finds what was made of a changed PTE; if it comes first, the fault reads the new
///   PTE.
/// - A vCPU that flushes while a link is made finds the new parent, and compares what is below. Or
///   it comes before step 2, and the linking thread compares.
/// - CPUs have nothing cached that no shadow PTE says, except for the changes that are counted.
///
/// `docs/protocols/shadow-paging.md` has the rules one by one. `models/proofs/shadow_sync.py` and its
/// neighbours prove these guarantees.
pub(crate) struct Shadow {
    config: ShadowPaging,
    frames: Frames,
    pages: Pages,
    /// Changes that are not flushed yet: see above.
    nr_unflushed: CachePadded<AtomicU64>,
    nr_vcpus: AtomicU64,
    /// The [`MarkKind`](role::MarkKind)s of all pages that were ever made.
    made_kinds: AtomicU32,
}

impl Shadow {
    /// Never inlined: its parts would lie on the stack of the function that makes a VM.
    #[inline(never)]
    pub(crate) fn new(config: ShadowPaging) -> Result<Box<Shadow>, OutOfMemory> {
        let (memory, frames, pages) = (Vacant::new()?, Frames::new()?, Pages::new(config.max_pages)?);
        Ok(memory.fill(Shadow {
            config,
            frames,
            pages,
            nr_unflushed: CachePadded::new(AtomicU64::new(0)),
            nr_vcpus: AtomicU64::new(0),
            made_kinds: AtomicU32::new(0),
        }))
    }

    /// Panics if these are not the tables that are derived from `tree`.
    fn check_tree<H: Host>(&self, tree: &Tree<H, Npt>) {
        let derived = tree.derived.as_deref();
        assert!(derived.is_some_and(|derived| ptr::addr_eq(derived, self)), "two VMs are mixed up");
    }
}

// SAFETY: no other type implements it for `Npt`, and `new_vcpu` returns `Roots`.
unsafe impl<H: Host> DerivedTables<H, Npt> for Shadow {
    fn zap_unbacked<'t>(&'t self, range: GfnRange, batch: &mut TlbBatch<'t, H, Npt>) {
        Mmu::new(batch.tree(), self, batch.participant()).zap_unbacked(range, batch);
    }

    fn write_protect<'t>(&'t self, words: &mut dyn Iterator<Item = (Gfn, u64)>, batch: &mut TlbBatch<'t, H, Npt>) {
        Mmu::new(batch.tree(), self, batch.participant()).write_protect(words, batch);
    }

    fn new_vcpu(&self, tree: &Tree<H, Npt>) -> Result<VcpuState, OutOfMemory> {
        let state = Roots::new(self.config, tree.encoding.gpa_bits())?;
        self.nr_vcpus.fetch_add(1, Ordering::Relaxed);
        Ok(state)
    }

    fn end_vcpu(&self, tree: &Tree<H, Npt>, participant: &Participant, mut state: VcpuState) {
        if let Some(roots) = state.downcast_mut::<Roots>() {
            roots.end(Mmu::new(tree, self, participant));
        }
    }

    fn reclaim(&self, tree: &Tree<H, Npt>) {
        self.check_tree(tree);
        // SAFETY: guards that reach the pages are those of the tree from which they are derived.
        unsafe { self.pages.free_unused(&tree.epochs, || tree.host.barrier_on_all_cpus()) }
    }

    fn add_stats(&self, stats: &mut Stats) {
        stats.shadow_pages += self.pages.nr_in_use();
        stats.shadow_pages_peak += self.pages.peak();
    }
}

/// The shadow page tables of `tree` and the roots of a vCPU, if there are any.
///
/// # Safety
/// `state` came from [`DerivedTables::new_vcpu`] of `tree`, and `participant` from its epochs.
#[inline]
pub(crate) unsafe fn of_vcpu<'v, H: Host>(
    tree: &'v Tree<H, Npt>,
    participant: &'v Participant,
    state: Option<&'v mut VcpuState>,
) -> Option<(Mmu<'v, H>, &'v mut Roots)> {
    let derived: *const dyn DerivedTables<H, Npt> = tree.derived.as_deref()?;
    let state = &mut **state?;
    debug_assert!(state.is::<Roots>());
    // SAFETY: `Shadow` is the type that implements `DerivedTables<H, Npt>` (its contract). So the
    // derived tables of `tree` are a `Shadow`, and as the caller promises, `state` is what that
    // made for a vCPU: `Roots`. (A check of the types would cost a tenth of a load of CR3.)
    let (shadow, roots) = unsafe { (&*derived.cast::<Shadow>(), &mut *ptr::from_mut(state).cast::<Roots>()) };
    Some((Mmu { tree, shadow, participant }, roots))
}

/// The shadow page tables, with what a caller needs to change them. All of it is of one VM.
pub(crate) struct Mmu<'v, H: Host> {
    tree: &'v Tree<H, Npt>,
    shadow: &'v Shadow,
    participant: &'v Participant,
}

impl<H: Host> Clone for Mmu<'_, H> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<H: Host> Copy for Mmu<'_, H> {}

/// What the second stage has for a frame.
#[derive(Clone, Copy)]
struct SecondStage {
    /// The host frame.
    pfn: Pfn,
    /// The level of the leaf PTE.
    level: Level,
    is_writable: bool,
    /// The attribute bits of a leaf PTE of 4 KiB.
    attributes: u64,
}

impl<'v, H: Host> Mmu<'v, H> {
    fn new(tree: &'v Tree<H, Npt>, shadow: &'v Shadow, participant: &'v Participant) -> Mmu<'v, H> {
        shadow.check_tree(tree);
        participant.check_epochs(tree.epochs.id());
        Mmu { tree, shadow, participant }
    }

    /// Opens a guard.
    // Never inlined: it would cost the deep calls of shadow paging stack.
    #[inline(never)]
    fn pin(&self) -> NestedGuard<'v> {
        self.tree.epochs.pin(self.participant)
    }

    pub(crate) fn host(&self) -> &'v H {
        &self.tree.host
    }

    pub(crate) fn count(&self, counter: Counter) {
        self.participant.stats.count(counter);
    }

    /// Takes the VM's lock, if it has one and the strategy is [`ShadowStrategy::Baseline`]. It comes
    /// before all locks of pages and frames, and is held across flushes and allocations.
    #[inline]
    fn lock_of_baseline(&self) -> Option<HeldLock<'v, H>> {
        let is_baseline = self.shadow.config.strategy.keeps_no_root();
        is_baseline.then(|| self.tree.lock(self.participant))
    }

    /// What the second stage has for `gfn` at this moment. If the caller holds the lock of the
    /// frame, and puts the shadow leaf PTE that it makes of the answer into the frame's list before
    /// it releases the lock, then each later change of the second stage finds that leaf PTE.
    fn second_stage(&self, gfn: Gfn) -> Option<SecondStage> {
        self.second_stage_in(&self.pin(), gfn)
    }

    /// Takes the lock of `frame`, which is that of `gfn`, and returns it with what the second stage
    /// has for `gfn`.
    #[inline]
    fn lock_frame<'f, W: Wait>(
        &self,
        frame: &'f Frame,
        gfn: Gfn,
    ) -> Result<(WordGuard<'f, H>, Option<SecondStage>), W::Busy>
    where
        'v: 'f,
    {
        // One fence for the guard and the lock. A thread that has to wait opens no guard meanwhile.
        // SAFETY: all of an `Mmu` is of one VM. `try_lock` ends with a read-modify-write if it returns
        // the lock.
        let pinned = unsafe { self.tree.epochs.pin_by_rmw(self.participant, || frame.lock.try_lock(self.host())) };
        Ok(match pinned {
            Some((guard, held)) => (held, self.second_stage_in(&guard, gfn)),
            None => {
                let held = W::lock(&frame.lock, self.host())?;
                (held, self.second_stage(gfn))
            }
        })
    }

    /// Never inlined: it would be in two places on the stack of a page fault.
    #[inline(never)]
    fn second_stage_in(&self, guard: &Guard<'_>, gfn: Gfn) -> Option<SecondStage> {
        let mut cursor = Cursor::new(self.tree, guard, gfn);
        let (leaf, State::Leaf) = cursor.descend_to_lowest() else { return None };
        let level = cursor.level();
        let pfn = Pfn(self.tree.encoding.frame(leaf, level).0 + (gfn.0 & (level.nr_pages() - 1)));
        let is_writable = leaf.is_writable() && !cursor.is_protected();
        Some(SecondStage { pfn, level, is_writable, attributes: leaf.attribute_bits(level) })
    }
}
