//! The fault path of one vCPU: look, resolve, act.
//!
//! # Guarantees
//! - A leaf from an answer that is out of date never stays: the fault's exchange fails, or the
//!   change that made the answer out of date zaps the leaf.
//! - A page that a fault makes writable is marked dirty before the fault returns, if its memslot
//!   logs and no CPU will report the write.
//! - Without the VM's lock, a fault waits for no invalidation, harvest or change of memslots.
//!
//! # Use
//! The thread of the vCPU calls [`Vcpu::handle_fault`] when the hardware exits, and acts on its
//! [`Outcome`]. Prefault (`prefault`) and fault-around (`fault_around`) take the same steps.
//!
//! # Implementation
//! A fault
//! 1. *looks*, inside a guard: it walks to the lowest PTE, reads it, and only then reads what the
//!    answer depends on (the ranges in flight, the memslot, its flags). The result is a `Plan`.
//! 2. *resolves*, outside of any guard: it allocates the page-table pages that the plan may need,
//!    and asks the host for the frame, if it needs one.
//! 3. *acts*, inside a guard (and the VM's lock, if there is one): it walks again, and carries the
//!    plan out by one compare-and-exchange if the PTE still allows it. Otherwise it starts over. If
//!    the leaf may now be written and the memslot logs, it marks the page.
//!
//! Without a lock, the look itself restores a leaf PTE that only lacks W, or that is tracked. Such
//! a fault needs one guard and no second walk. Most faults take a shorter way ([`small`]), and come
//! here only if that does not settle them.
//!
//! # Why it is correct
//! `table/invalidation_seq.rs` has the argument for installing on the invalidation sequence number
//! that the look read. `dirty/log.rs` has the one for marking after W was restored.

#![expect(unsafe_code, reason = "the vCPU's participant is kept alive by its VM")]

mod act;
mod batch;
mod block;
mod fault_around;
mod on_leaf;
mod plan;
mod prefault;
mod resolve;
mod shadow;
mod small;
mod timing;
mod translate;

use alloc::sync::Arc;
use core::mem;

use plan::{Found, InstallPlan, LeafPlan, Plan, Step};
use small::{Small, SmallFault};
use timing::Timing;

use crate::addr::{Access, Gfn, Gpa, Level, PageSize};
use crate::dirty::log;
use crate::dirty::ring::DirtyRing;
use crate::dirty::rings::OwnedRing;
use crate::error::{ConfigError, FaultError, OutOfMemory};
use crate::exit::{Exit, Outcome};
use crate::format::Format;
use crate::harvest::mark;
use crate::host::{Host, Resolved};
use crate::operation::Operation;
use crate::second_stage::install::NewLeaf;
use crate::slot::{MemoryAttributes, MemoryRegionFlags};
use crate::stats::{Counter, is_sampled};
use crate::sync::record;
use crate::table::Tree;
use crate::table::cursor::Cursor;
use crate::table::derived::VcpuState;
use crate::table::node::TableCache;
use crate::table::pte::{Pte, State};
use crate::table::pte_ref::Changed;
use crate::table::retire::{Exclusive, FaultPin, Guard, HazardPointer, OwnedParticipant};
use crate::vm::Vm;

/// After so many overtaking invalidations a fault maps a small page where a larger one would do.
/// Then only invalidations of this very page can overtake it.
const OVERTAKEN_BEFORE_SMALL_LEAF: u32 = 4;

/// Flags of memslots in which user space, too, restricts what a fault may map.
const NEEDS_PAGE_STATE: MemoryRegionFlags = MemoryRegionFlags::READONLY
    .union(MemoryRegionFlags::USERFAULT)
    .union(MemoryRegionFlags::GUEST_MEMFD)
    .union(MemoryRegionFlags::PINNED);

/// What user space allows for a page.
enum PageState {
    /// The page has these attributes, and may be mapped by leaves up to this level.
    May(MemoryAttributes, Level),
    Exit,
    UserfaultPending,
}

/// The memory side of one virtual CPU. One thread uses it at a time.
///
/// [`Vm::create_vcpu`] makes it. The thread that runs the guest calls
/// [`handle_fault`](Vcpu::handle_fault) for each second-stage fault, and acts on the [`Outcome`].
/// With [`shadow`](crate::shadow) paging it calls [`entry`](Vcpu::entry) before the guest runs, and
/// another method for each kind of exit. A thread that only maps memory ahead of time needs a vCPU
/// as well ([`pre_fault_memory`](Vcpu::pre_fault_memory)).
pub struct Vcpu<H: Host, F: Format> {
    vm: Arc<Vm<H, F>>,
    participant: OwnedParticipant,
    /// Where the pages are recorded that this vCPU makes writable, if the VM logs by rings.
    ring: Option<OwnedRing>,
    tables: TableCache,
    /// With shadow paging.
    derived: Option<VcpuState>,
    /// Of the fault under way, if it is in the sample.
    timing: Option<Timing>,
}

impl<H: Host, F: Format> Vm<H, F> {
    /// Creates a vCPU of this VM. It keeps the VM alive.
    ///
    /// # Errors
    /// [`ConfigError::OutOfMemory`].
    pub fn create_vcpu(self: &Arc<Self>) -> Result<Vcpu<H, F>, ConfigError> {
        Ok(Vcpu::new(Arc::clone(self))?)
    }
}

impl<H: Host, F: Format> Vcpu<H, F> {
    fn new(vm: Arc<Vm<H, F>>) -> Result<Vcpu<H, F>, OutOfMemory> {
        let mut participant = vm.tree.epochs.take_participant()?;
        let ring = match vm.rings.take() {
            Ok(ring) => ring,
            Err(error) => {
                // SAFETY: `vm` keeps the epochs that it came from alive, and it is not used after
                // this.
                unsafe { participant.release() }
                return Err(error);
            }
        };
        let mut vcpu = Vcpu { vm, participant, ring, tables: TableCache::new(), derived: None, timing: None };
        if let Some(derived) = &vcpu.vm.tree.derived {
            vcpu.derived = Some(derived.new_vcpu(&vcpu.vm.tree)?);
        }
        Ok(vcpu)
    }

    /// The VM.
    pub fn vm(&self) -> &Arc<Vm<H, F>> {
        &self.vm
    }

    /// The dirty ring of this vCPU, if the VM logs by rings ([`Vm::enable_dirty_ring`]). Other
    /// threads find it by [`Vm::dirty_rings`], also after the vCPU is dropped.
    pub fn dirty_ring(&self) -> Option<&DirtyRing> {
        // SAFETY: `self.vm` keeps the VM alive, and with it its rings.
        self.ring.as_ref().map(|ring| unsafe { ring.get() })
    }

    /// Marks the pages dirty that this vCPU's CPU wrote into its page-modification log, if their
    /// memslots log. `written` has the logged addresses.
    ///
    /// Call it when the log is full, before the log is reset. For the logs of other CPUs there is
    /// [`Host::drain_modification_logs`].
    pub fn log_modifications(&mut self, written: &[Gpa]) {
        // SAFETY: `self.vm` keeps the VM alive, and with it the epochs that the participant came
        // from.
        let participant = unsafe { self.participant.get() };
        mark::mark_written(self.vm.operation(participant), written);
    }

    /// Handles a second-stage fault: the guest did `access` at `gpa`, and the page tables did not
    /// allow it.
    ///
    /// It blocks only in [`Host::allocate_table`], [`Host::resolve`] and [`Host::flush`], and for
    /// the VM's lock if there is one. While the page is being invalidated, it calls
    /// [`Host::yield_now`] once. Call it on the thread of the vCPU: where the format needs it, it
    /// calls [`Host::flush_local`] last.
    ///
    /// # Errors
    /// [`FaultError::AddressTooHigh`], [`FaultError::BackingGone`], [`FaultError::BadResolve`],
    /// [`FaultError::UserfaultBitmapGone`], [`FaultError::OutOfMemory`]. Nothing has changed for
    /// the guest, and the caller may try the same fault again.
    ///
    /// # Example
    /// ```
    /// # mod host { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/doc_host.rs")); }
    /// # use host::*;
    /// use slat::*;
    /// # fn main() -> Result<(), Error> {
    /// # let vm = vm_with_memory(Config::default(), MemoryRegionFlags::READONLY);
    /// # let mut vcpu = vm.create_vcpu()?;
    /// // The hardware's exit reports the address and the access.
    /// let (gpa, access) = (Gpa(0x3008), Access::Read);
    /// match vcpu.handle_fault(gpa, access)? {
    ///     Outcome::Resume => { /* run the guest again */ }
    ///     Outcome::Exit(Exit::Mmio { gpa, access }) => panic!("emulate a device: {access:?} at {gpa}"),
    ///     Outcome::Exit(exit) => panic!("user space acts on {exit:?} first"),
    /// }
    /// // A write to a read-only memslot is for a device, such as a flash memory.
    /// assert!(matches!(vcpu.handle_fault(gpa, Access::Write)?, Outcome::Exit(Exit::Mmio { .. })));
    /// # Ok(())
    /// # }
    /// ```
    pub fn handle_fault(&mut self, gpa: Gpa, access: Access) -> Result<Outcome, FaultError> {
        let result = match self.serve_small(gpa, access) {
            Small::Done => Ok(Outcome::Resume),
            small => self.go_on(gpa, access, small),
        };
        if self.timing.is_some() {
            self.stop_timing();
        }
        flush_local(&self.vm.tree, gpa, &result);
        result
    }

    /// Counts a fault, and serves it if it is a small one.
    // A function of its own, as `go_on`: its stack is free when the fault goes on.
    #[inline(never)]
    fn serve_small(&mut self, gpa: Gpa, access: Access) -> Small {
        let (fault, own) = match small_fault(&self.vm, &mut self.participant, self.ring.as_ref(), gpa, access) {
            Ok(fault) => fault,
            Err(error) => return Small::Failed(error),
        };
        let stats = fault.op.stats();
        let nr_faults = stats.get(Counter::Faults);
        stats.count(Counter::Faults);
        // Early, so that a short run has a sample. But not the first fault of a period: the very
        // first fault of a vCPU, with cold caches, represents no other.
        if is_sampled(nr_faults) {
            return self.serve_timed(gpa, access);
        }
        fault.serve(own, None)
    }

    /// Begins to take the time of a fault that is in the sample, and serves it if it is a small one.
    #[cold]
    #[inline(never)]
    fn serve_timed(&mut self, gpa: Gpa, access: Access) -> Small {
        let timing = self.timing.insert(Timing::start(&self.vm.tree.host));
        match small_fault(&self.vm, &mut self.participant, self.ring.as_ref(), gpa, access) {
            Ok((fault, own)) => fault.serve(own, Some(timing)),
            Err(error) => Small::Failed(error),
        }
    }

    /// Goes on with a fault that is no small one, or failed as one. It makes the fault anew, so that
    /// one that succeeds stays in registers.
    #[inline(never)]
    fn go_on(&mut self, gpa: Gpa, access: Access, small: Small) -> Result<Outcome, FaultError> {
        let (mut fault, own) = self.fault(gpa, access)?;
        fault.go_on(small, own)
    }

    #[inline]
    fn fault(&mut self, gpa: Gpa, access: Access) -> Result<(Fault<'_, H, F>, Exclusive<'_>), FaultError> {
        let Vcpu { vm, participant, ring, tables, timing, .. } = self;
        let (SmallFault { op, ring, gfn, access }, own) = small_fault(vm, participant, ring.as_ref(), gpa, access)?;
        let timing = timing.as_mut();
        Ok((Fault { op, ring, tables, gfn, gpa, access, nr_overtaken: 0, timing }, own))
    }
}

/// A fault of the vCPU with `participant` and `ring`.
#[inline(always)]
fn small_fault<'v, H: Host, F: Format>(
    vm: &'v Vm<H, F>,
    participant: &'v mut OwnedParticipant,
    ring: Option<&'v OwnedRing>,
    gpa: Gpa,
    access: Access,
) -> Result<(SmallFault<'v, H, F>, Exclusive<'v>), FaultError> {
    let gfn = vm.check_gpa(gpa)?;
    // SAFETY: `vm` is the vCPU's, and keeps the epochs that the participant came from alive. The
    // exclusive part is used by this fault alone, because it borrows the participant.
    let (participant, own) = unsafe { (participant.get(), participant.exclusive(&vm.tree.epochs)) };
    // SAFETY: as above: the VM keeps its rings alive, too.
    let ring = ring.map(|ring| unsafe { ring.get() });
    Ok((SmallFault { op: vm.operation(participant), ring, gfn, access }, own))
}

/// Flushes what the CPU may still have cached of the page that it faulted on, also after a spurious
/// fault.
#[inline]
fn flush_local<H: Host, F: Format>(tree: &Tree<H, F>, gpa: Gpa, result: &Result<Outcome, FaultError>) {
    if F::NEEDS_LOCAL_FLUSH && matches!(result, Ok(Outcome::Resume)) {
        tree.host.flush_local(gpa);
    }
}

impl<H: Host, F: Format> Drop for Vcpu<H, F> {
    fn drop(&mut self) {
        // SAFETY: `self.vm` keeps the VM alive, and with it the epochs that the participant came
        // from.
        let participant = unsafe { self.participant.get() };
        if let (Some(derived), Some(state)) = (&self.vm.tree.derived, self.derived.take()) {
            derived.end_vcpu(&self.vm.tree, participant, state);
        }
        self.tables.drain(&self.vm.tree, &participant.stats);
        // SAFETY: as above, and the participant is not used after this.
        unsafe { self.participant.release() }
        match &mut self.ring {
            // SAFETY: as above: the VM keeps its rings alive, too, and the ring is not used after
            // this.
            Some(ring) => unsafe { ring.release() },
            None => self.vm.rings.leave(),
        }
    }
}

/// What a fault looks at next.
enum Look {
    /// The block of 2 MiB, which may be served as a whole.
    Block,
    /// The lowest PTE.
    Lowest,
}

/// One fault under way.
struct Fault<'v, H: Host, F: Format> {
    op: Operation<'v, H, F>,
    ring: Option<&'v DirtyRing>,
    tables: &'v mut TableCache,
    gfn: Gfn,
    gpa: Gpa,
    access: Access,
    /// How often an invalidation changed an empty PTE between the look at it and the exchange.
    nr_overtaken: u32,
    timing: Option<&'v mut Timing>,
}

impl<'v, H: Host, F: Format> Fault<'v, H, F> {
    #[inline]
    fn serve(&mut self, mut own: Exclusive<'_>, mut next: Look) -> Result<Outcome, FaultError> {
        loop {
            // In each round, because a step that failed may have pushed its page all the same.
            if self.is_ring_full() {
                self.count(Counter::Exits);
                return Ok(Outcome::Exit(Exit::DirtyRingFull));
            }
            let mut maps_around = false;
            // Not moved out of: it is large for a stack.
            let mut plan = match mem::replace(&mut next, Look::Lowest) {
                Look::Lowest => self.look(own.pin.reborrow(), own.hazard.reborrow()),
                Look::Block => self.look_at_block(own.pin.reborrow(), own.hazard.reborrow()),
            };
            let changed = match &mut plan {
                Plan::Spurious(_) => {
                    self.count(Counter::Spurious);
                    return Ok(Outcome::Resume);
                }
                Plan::SetMarks(_) => self.set_marks(),
                Plan::Exit => {
                    self.count(Counter::Exits);
                    return Ok(Outcome::Exit(Exit::Mmio { gpa: self.gpa, access: self.access }));
                }
                Plan::UserfaultPending => match self.userfault_outcome() {
                    Ok(Outcome::Resume) => Err(Changed),
                    exit => return exit,
                },
                Plan::BeingInvalidated => {
                    // The guest comes back. The thread that invalidates the page is not a vCPU, so
                    // let it run here.
                    self.count(Counter::Retries);
                    self.op.host().yield_now();
                    return Ok(Outcome::Resume);
                }
                Plan::Cancel => {
                    self.cancel();
                    Err(Changed)
                }
                Plan::Install(plan) => {
                    let resolved = match self.resolve(plan) {
                        Ok(resolved) => resolved,
                        Err(reason) => return self.unresolved(plan.found, plan.attributes, reason),
                    };
                    let leaf = self.prepare(plan, resolved, resolved.max_size.level())?;
                    let step = self.install(own.pin.reborrow(), plan, leaf);
                    maps_around =
                        self.maps_around(leaf.level) && matches!((plan.found, &step), (Found::Empty(_), Ok(_)));
                    step
                }
                Plan::OnLeaf(plan) => self.act_on_leaf(plan)?,
                Plan::Served => return Ok(Outcome::Resume),
                Plan::LookLower => continue,
                Plan::StartOver => Err(Changed),
            };
            // The neighbours may have another backing by now.
            drop(plan);
            if maps_around {
                self.map_around(own.hazard.reborrow());
            }
            match changed {
                Ok(Step::Done) => return Ok(Outcome::Resume),
                Ok(Step::Nearer) => {}
                Err(Changed) => self.count(Counter::Retries),
            }
        }
    }

    #[inline]
    fn count(&self, counter: Counter) {
        self.op.stats().count(counter);
    }

    #[inline]
    fn is_ring_full(&self) -> bool {
        self.ring.is_some_and(DirtyRing::is_soft_full)
    }

    /// The largest number of pages that one step may make writable. With a ring this is its room,
    /// also if the memslot does not log now: it may begin to log before the pages are marked.
    #[inline]
    fn max_opened(&self) -> u64 {
        self.ring.map_or(u64::MAX, DirtyRing::room)
    }

    #[inline]
    fn leaf(
        &self,
        plan: &InstallPlan<'_, H::Backing, F>,
        gfn: Gfn,
        mut resolved: Resolved,
    ) -> Result<NewLeaf, FaultError> {
        if self.nr_overtaken >= OVERTAKEN_BEFORE_SMALL_LEAF {
            resolved.max_size = PageSize::Size4K;
        }
        plan.leaf(self.op.tree, self.max_opened(), gfn, self.access, resolved)
    }

    /// Marks the pages of this fault's leaf of `level`, which is writable by now, if their memslot
    /// logs.
    #[inline(always)]
    fn mark_leaf(&self, guard: &Guard<'_>, level: Level) {
        log::mark_leaf_if_logging(self.op.slots, guard, self.ring, self.gfn, level);
    }

    /// Step 1: finds out what there is, and decides what to do about it.
    #[inline]
    fn look<'r>(&self, pin: FaultPin<'_>, hazard: HazardPointer<'r>) -> Plan<'r, H::Backing, F> {
        let tree = self.op.tree;
        let guard = pin.open();
        record!(FaultLooks { gfn: self.gfn.0 });
        let (cursor, value) = Cursor::at_small(tree, &guard, self.gfn).unwrap_or_else(|| {
            // Nothing that the first walk read is kept.
            record!(FaultLooks { gfn: self.gfn.0 });
            Cursor::at_lowest(tree, &guard, self.gfn)
        });
        self.decide(&guard, hazard, &cursor, value, cursor.level())
    }

    /// Decides what to do about the PTE at the cursor, the lowest one, of `level`, which was read as
    /// `value`.
    // In one piece: the order of the reads is the protocol.
    #[inline(always)]
    fn decide<'r>(
        &self,
        guard: &Guard<'_>,
        hazard: HazardPointer<'r>,
        cursor: &Cursor<'_, H, F>,
        value: Pte<F>,
        level: Level,
    ) -> Plan<'r, H::Backing, F> {
        // The PTE first, then the ranges in flight and the memslot: see
        // `table/invalidation_seq.rs`.
        let Operation { tree, slots, .. } = self.op;
        let writes = self.access == Access::Write;
        let is_protected = writes && cursor.is_protected();
        let found = match value.state(level) {
            State::Leaf if self.is_allowed_by(value, is_protected) => {
                return if value.is_marked(self.access) { Plan::Spurious(level) } else { Plan::SetMarks(level) };
            }
            State::Leaf if writes && value.has(F::HOST_WRITABLE) => Found::Lacking(value),
            State::Tracked if !writes || value.is_host_writable() => Found::Lacking(value),
            // A leaf has no sequence number; see `install_instead`.
            State::Leaf | State::Tracked => Found::Forbidding(value, tree.current_seq()),
            State::Empty(seq) => Found::Empty(seq),
            State::Broken => return Plan::Cancel,
            // In a page-table page that was unlinked: the next walk finds another.
            State::Frozen => return Plan::StartOver,
            State::Table => unreachable!("a walk passes it"),
        };
        let Some(max_level) = tree.in_flight.free_level(self.gfn, level) else {
            return Plan::BeingInvalidated;
        };
        let Some(slot) = slots.find(guard, self.gfn) else { return Plan::Exit };
        let (attributes, max_level) = if slot.flags().intersects(NEEDS_PAGE_STATE) {
            match self.check_page_state(guard, max_level) {
                PageState::May(attributes, max_level) => (attributes, max_level),
                PageState::Exit => return Plan::Exit,
                PageState::UserfaultPending => return Plan::UserfaultPending,
            }
        } else {
            (MemoryAttributes::empty(), max_level)
        };
        let Found::Lacking(leaf) = found else {
            return Plan::Install(InstallPlan {
                backing: slot.keep_for_resolve(hazard),
                slot: slot.range(),
                flags: slot.flags(),
                attributes,
                level,
                max_level,
                found,
                answer: None,
            });
        };
        let is_locked = tree.is_locked();
        let restored = if is_protected {
            if is_locked {
                return Plan::OnLeaf(LeafPlan::PushDown);
            }
            self.push_down_in(guard).map(|_| ())
        } else if writes && self.splits(level, slot.logs()) {
            return Plan::OnLeaf(LeafPlan::Split(leaf, level));
        } else if is_locked {
            return Plan::OnLeaf(LeafPlan::Restore(leaf));
        } else {
            self.restore_at(cursor.pte_at(level), guard, leaf, Some(&slot))
        };
        if restored.is_ok() { Plan::Served } else { Plan::StartOver }
    }

    /// Whether the leaf `value`, which is not tracked, allows the access. Above it may be a
    /// protected directory entry.
    #[inline]
    fn is_allowed_by(&self, value: Pte<F>, is_protected: bool) -> bool {
        if self.access == Access::Write {
            return value.has(F::WRITABLE) && !is_protected;
        }
        self.access == Access::Read || value.may_execute(self.access)
    }

    /// Reads what user space allows for the page: its attributes and the largest leaf up to
    /// `max_level`, or what the fault does instead of mapping the page.
    #[cold]
    fn check_page_state(&self, guard: &Guard<'_>, max_level: Level) -> PageState {
        // Looked up a second time, so that faults in plain memslots keep theirs in registers.
        let Some(slot) = self.op.slots.find(guard, self.gfn) else { return PageState::Exit };
        let exits = if self.access == Access::Write { MemoryRegionFlags::READONLY } else { MemoryRegionFlags::empty() };
        if slot.flags().intersects(exits | MemoryRegionFlags::PINNED) {
            return PageState::Exit;
        }
        if !slot.may_use(self.gfn) {
            return PageState::UserfaultPending;
        }
        let level = slot.userfault().map_or(max_level, |userfault| max_level.min(userfault.level()));
        PageState::May(slot.attributes_of(self.gfn), level)
    }

    /// The level of the largest block around the fault's page, up to `largest`, whose pages all
    /// have the attributes of the fault's. It is not part of the look, which does not know the size
    /// of the host's block yet: 512 GiB have 2 Mi words of attributes.
    ///
    /// As in the look, the attributes are read after the PTE. If they change later, the PTE gets
    /// another sequence number, or is replaced by a page-table page, before they are stored. Then
    /// nothing is installed.
    #[cold]
    #[inline(never)]
    fn limit_to_alike(&self, largest: Level) -> Level {
        let slots = self.op.slots;
        let guard = self.op.pin();
        let mut level = Level::L4K;
        if let Some(slot) = slots.find(&guard, self.gfn) {
            // From below, because blocks that differ are mostly found early.
            while level < largest.min(Level::L1G) && slot.are_alike(self.gfn.block(level.up())) {
                level = level.up();
            }
        }
        level
    }

    /// What user space must do before the page can be mapped; `None` if it has done so in the
    /// meantime.
    #[cold]
    fn userfault_exit(&self) -> Result<Option<Exit>, FaultError> {
        let guard = self.op.pin();
        self.op.slots.find(&guard, self.gfn).map_or(Ok(None), |slot| slot.userfault_exit(self.gfn))
    }
}
