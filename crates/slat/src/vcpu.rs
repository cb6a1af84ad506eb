//! One vCPU's way through a fault: look, resolve, act.
//!
//! 1. *Look*, inside a read section: walk to the lowest entry, read it, and only then read what the answer depends on
//!    (the published ranges, the slot, its flags). The result is a plan.
//! 2. *Resolve*, outside: allocate the tables that the plan may need; ask the host for the frame, if it needs one.
//! 3. *Act*, inside a section (and the VM's lock, if there is one): walk again, and carry the plan out by one
//!    compare-and-exchange if the entry still allows it; else start over. If the leaf may now be written, mark the page
//!    if its slot logs.
//!
//! Without a lock, a fault that needs nothing but a leaf's right to write, or a tracked leaf itself, given back is fixed
//! within the first section.

#![expect(unsafe_code, reason = "the vCPU's record is kept alive by its VM")]

mod act;
mod fault_around;
mod on_leaf;
mod plan;
mod prefault;
mod shadow;
mod timing;
mod together;

use alloc::boxed::Box;
use alloc::sync::Arc;

use plan::{Found, InstallPlan, LeafPlan, Plan, Step};
use timing::Timing;

use crate::addr::{Access, Gfn, Gpa, Gva, Level, PageSize, Pfn};
use crate::dirty::log;
use crate::dirty::ring::DirtyRing;
use crate::dirty::rings::OwnedRing;
use crate::error::Error;
use crate::format::Format;
use crate::host::{AllocationWait, Gone, Host, Resolved};
use crate::second_stage::install::{Changed, NewLeaf};
use crate::shadow::roots::Roots;
use crate::slot::set::Slots;
use crate::slot::view::SlotView;
use crate::slot::{MemoryAttributes, MemoryFaultFlags, MemoryRegionFlags};
use crate::stats::{Counter, is_sampled};
use crate::sync::Locking;
use crate::table::Tree;
use crate::table::entry::{self, State};
use crate::table::frames::{TableCache, TableUse};
use crate::table::retire::{Exclusive, FaultPin, HazardPointer, OwnedRecord, Record, Section};
use crate::table::walk::Cursor;
use crate::vm::Vm;

/// So often an invalidation may overtake a fault before it maps a small page where a larger one would do: that is overtaken
/// by invalidations of this very page alone.
const OVERTAKEN_BEFORE_SMALL_LEAF: u32 = 4;

/// Flags of slots in which it is not the host alone who says what a fault may map.
const LOOK_CLOSER: MemoryRegionFlags =
    MemoryRegionFlags::READONLY.union(MemoryRegionFlags::USERFAULT).union(MemoryRegionFlags::GUEST_MEMFD);

/// What user space says of a page.
enum Told {
    /// It has these attributes, and may be mapped by leaves up to this level.
    May(MemoryAttributes, Level),
    Exit,
    Withheld,
}

/// What became of a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Outcome {
    /// Run the guest again: the fault is fixed, or was spurious, or the page is being taken away at this moment.
    Resume,
    /// User space must act before the guest can go on.
    Exit(Exit),
}

/// Why a vCPU leaves to user space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Exit {
    /// The address that the guest accesses has no memory, or the guest wrote to a read-only slot: a device is meant.
    Mmio {
        /// The address.
        gpa: Gpa,
        /// What the guest did.
        access: Access,
    },
    /// A table of the guest's, which the CPU would read to translate `gva`, is where no memory is. What the guest accesses is not
    /// known; hardware reads what a device gives it, mostly ones, and acts on that. With shadow paging.
    TableMmio {
        /// The address that the guest accesses.
        gva: Gva,
        /// Where the entry of the table would be.
        gpa: Gpa,
    },
    /// User space must see to the page before the guest can use it: fetch it, and clear its bit in the slot's
    /// [`UserfaultBitmap`](crate::UserfaultBitmap). KVM's `KVM_EXIT_MEMORY_FAULT`.
    MemoryFault {
        /// Why, for the page that the guest has touched.
        flags: MemoryFaultFlags,
        /// The first byte of what is meant: of the page, or of the block that the bitmap has a bit for.
        gpa: Gpa,
        /// How many bytes.
        size: u64,
    },
    /// The guest's own tables forbid the access: a page fault (#PF) is to be injected. With shadow paging.
    PageFault {
        /// The address, for CR2.
        gva: Gva,
        /// The error code (Intel SDM vol. 3A, "Page-Fault Exceptions").
        error_code: u32,
    },
    /// What the guest wrote into a register, or gave to an instruction, cannot be: a general-protection fault, #GP(0), is to be
    /// injected, and nothing has changed. With shadow paging.
    GeneralProtection,
    /// The guest writes into one of its page tables, or where its CPU cannot be let write: the instruction is to be emulated, its
    /// write made by [`Vcpu::write_guest_table`]. It is never a device's address: there was memory that may be written. With shadow
    /// paging.
    EmulateWrite {
        /// The address.
        gpa: Gpa,
    },
    /// The vCPU's dirty ring is nearly full: what is in it must be harvested and reset
    /// ([`Vm::reset_dirty_rings`]) before the vCPU can open more pages. All of its faults exit until there is room.
    DirtyRingFull,
}

/// The memory side of one virtual CPU. It belongs to one thread at a time.
pub struct Vcpu<H: Host, F: Format> {
    vm: Arc<Vm<H, F>>,
    record: OwnedRecord,
    /// Where the pages go that this vCPU opens, if the VM logs by rings.
    ring: Option<OwnedRing>,
    tables: TableCache,
    /// With shadow paging.
    roots: Option<Box<Roots>>,
}

impl<H: Host, F: Format> Vcpu<H, F> {
    pub(crate) fn new(vm: Arc<Vm<H, F>>) -> Result<Vcpu<H, F>, Error> {
        let roots = Vcpu::new_roots(&vm)?;
        let mut record = vm.tree.epochs.take_record()?;
        match vm.tree.rings.take() {
            Ok(ring) => {
                if let Some(shadow) = &vm.tree.shadow {
                    shadow.add_vcpu();
                }
                Ok(Vcpu { vm, record, ring, tables: TableCache::new(), roots })
            }
            Err(error) => {
                // SAFETY: `vm` keeps the epochs that it came from, and this is its end.
                unsafe { record.release() }
                Err(error)
            }
        }
    }

    /// The VM.
    pub fn vm(&self) -> &Arc<Vm<H, F>> {
        &self.vm
    }

    /// The dirty ring of this vCPU, if the VM logs by rings ([`Vm::enable_dirty_ring`]). [`Vm::dirty_rings`] has it too, for
    /// other threads, and when the vCPU is gone.
    pub fn dirty_ring(&self) -> Option<&DirtyRing> {
        // SAFETY: `self.vm` keeps the VM alive, and with it its rings.
        self.ring.as_ref().map(|ring| unsafe { ring.get() })
    }

    /// Hands over what this vCPU's CPU has put into its page-modification log: the addresses that it wrote, of which the
    /// pages count as written from now on, if their slots log. To be called when the log is full, before it is reset; see
    /// [`Host::drain_modification_logs`] for the logs of other CPUs.
    pub fn log_modifications(&mut self, written: &[Gpa]) {
        // SAFETY: `self.vm` keeps the VM alive, and with it the epochs that the record came from.
        let record = unsafe { self.record.get() };
        log::mark_written(&self.vm.slots, &self.vm.tree.epochs, record, written);
    }

    /// Serves a second-stage fault: the guest did `access` at `gpa`, and the tables did not allow it.
    ///
    /// Blocks only in [`Host::allocate_table`], [`Host::resolve`] and [`Host::flush`], and for the VM's lock if it has
    /// one. Where the format needs it, [`Host::flush_local`] is called last, so the thread of the vCPU is the caller.
    ///
    /// # Errors
    /// [`Error::AddressTooHigh`], [`Error::BackingGone`], [`Error::BadResolve`], [`Error::UserfaultBitmapGone`],
    /// [`Error::OutOfMemory`]; nothing has changed then for the guest, and the same fault may be tried again.
    ///
    /// # Example
    /// ```
    /// # mod host { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/doc_host.rs")); }
    /// # use host::*;
    /// use slat::*;
    /// # fn main() -> Result<(), Error> {
    /// # let vm = vm_with_memory(Config::default(), MemoryRegionFlags::READONLY);
    /// # let mut vcpu = vm.create_vcpu()?;
    /// // What the hardware's exit says: where, and what the guest did.
    /// let (gpa, access) = (Gpa(0x3008), Access::Read);
    /// match vcpu.handle_fault(gpa, access)? {
    ///     Outcome::Resume => { /* run the guest again */ }
    ///     Outcome::Exit(Exit::Mmio { gpa, access }) => panic!("emulate a device: {access:?} at {gpa}"),
    ///     Outcome::Exit(exit) => panic!("see to {exit:?} first"),
    /// }
    /// // A read-only slot is a device to those who write: a flash memory, say.
    /// assert!(matches!(vcpu.handle_fault(gpa, Access::Write)?, Outcome::Exit(Exit::Mmio { .. })));
    /// # Ok(())
    /// # }
    /// ```
    pub fn handle_fault(&mut self, gpa: Gpa, access: Access) -> Result<Outcome, Error> {
        let (mut fault, own) = self.fault(gpa, access)?;
        let record = fault.record;
        let nr_faults = record.stats.get(Counter::Faults);
        record.stats.count(Counter::Faults);
        // Not the first of a period: a vCPU's very first fault, with all its cold caches, stands for none but itself. But
        // early, so that a short run has a sample.
        if is_sampled(nr_faults) {
            fault.start_timing();
        }
        // The one call of it, so that it needs no frame of its own.
        let result = fault.serve(own);
        // A right given back, a new leaf, or a spurious fault: the CPU may still have what it faulted on.
        if F::NEEDS_LOCAL_FLUSH && matches!(result, Ok(Outcome::Resume)) {
            fault.tree.host.flush_local(gpa);
        }
        if fault.timing.is_some() {
            fault.stop_timing();
        }
        result
    }

    #[inline]
    fn fault(&mut self, gpa: Gpa, access: Access) -> Result<(Fault<'_, H, F>, Exclusive<'_>), Error> {
        let gfn = self.vm.check_gpa(gpa)?;
        // SAFETY: `self.vm` keeps the VM alive, and with it the epochs that the record came from.
        // What it has once is this fault's alone, which borrows the vCPU.
        let (record, own) = unsafe { (self.record.get(), self.record.exclusive()) };
        // SAFETY: as above, and its rings.
        let ring = self.ring.as_ref().map(|ring| unsafe { ring.get() });
        let (tree, slots, tables) = (&*self.vm.tree, &self.vm.slots, &mut self.tables);
        Ok((Fault { tree, slots, record, ring, tables, gfn, gpa, access, nr_overtaken: 0, timing: None }, own))
    }
}

impl<H: Host, F: Format> Drop for Vcpu<H, F> {
    fn drop(&mut self) {
        self.drop_roots();
        // SAFETY: `self.vm` keeps the VM alive, and with it the epochs that the record came from.
        let record = unsafe { self.record.get() };
        self.tables.drain::<H, F>(&self.vm.tree.host, &record.stats);
        // SAFETY: as above, and this is its end.
        unsafe { self.record.release() }
        match &mut self.ring {
            // SAFETY: as above, and its rings.
            Some(ring) => unsafe { ring.release() },
            None => self.vm.tree.rings.leave(),
        }
    }
}

/// What counts leaves of `level` that faults install.
#[inline]
fn installed(level: Level) -> Counter {
    match level {
        Level::L4K => Counter::Installed4K,
        Level::L2M => Counter::Installed2M,
        _ => Counter::Installed1G,
    }
}

/// One fault under way.
struct Fault<'v, H: Host, F: Format> {
    tree: &'v Tree<H, F>,
    slots: &'v Slots<H::Backing>,
    record: &'v Record,
    ring: Option<&'v DirtyRing>,
    tables: &'v mut TableCache,
    gfn: Gfn,
    gpa: Gpa,
    access: Access,
    /// How often an invalidation came between a look at an empty entry and the exchange.
    nr_overtaken: u32,
    timing: Option<Timing>,
}

impl<'v, H: Host, F: Format> Fault<'v, H, F> {
    #[inline]
    fn serve(&mut self, mut own: Exclusive<'_>) -> Result<Outcome, Error> {
        loop {
            // Each time: a step that was overtaken has pushed its page all the same.
            if self.is_ring_full() {
                self.count(Counter::Exits);
                return Ok(Outcome::Exit(Exit::DirtyRingFull));
            }
            let changed = match self.look(own.pin.reborrow(), own.hazard.reborrow()) {
                Plan::Spurious(_) => {
                    self.count(Counter::Spurious);
                    return Ok(Outcome::Resume);
                }
                Plan::SetMarks(_) => self.set_marks(),
                Plan::Exit => {
                    self.count(Counter::Exits);
                    return Ok(Outcome::Exit(Exit::Mmio { gpa: self.gpa, access: self.access }));
                }
                Plan::Withheld => match self.why_withheld() {
                    None => Err(Changed),
                    Some(Error::MemoryFault { flags, gpa, size }) => {
                        self.count(Counter::Exits);
                        self.count(Counter::Userfaults);
                        return Ok(Outcome::Exit(Exit::MemoryFault { flags, gpa, size }));
                    }
                    Some(error) => return Err(error),
                },
                Plan::TakenAway => {
                    // The guest comes back. Whoever takes it away is no vCPU; it gets the CPU if it wants it.
                    self.count(Counter::Retries);
                    self.tree.host.yield_now();
                    return Ok(Outcome::Resume);
                }
                Plan::Cancel => self.cancel(),
                Plan::Install(mut plan) => {
                    let Ok(resolved) = self.resolve(&plan) else {
                        return self.gone(plan.found, plan.attributes);
                    };
                    if plan.flags.contains(MemoryRegionFlags::GUEST_MEMFD) {
                        plan.max_level = self.narrow_to_alike(plan.max_level.min(resolved.max_size.level()));
                    }
                    self.flush_before_make(&plan);
                    let leaf = self.leaf(&plan, self.gfn, resolved)?;
                    if self.is_another_frame(&plan, &leaf) {
                        return Err(Error::BadResolve { gpa: self.gpa });
                    }
                    self.top_up_for(&plan, &leaf)?;
                    let step = self.install(own.pin.reborrow(), &plan, leaf);
                    if self.maps_around(leaf.level) && matches!((plan.found, &step), (Found::Empty(_), Ok(_))) {
                        // The neighbours' backing may be another by now.
                        self.map_around(plan.backing.release());
                    }
                    step
                }
                Plan::OnLeaf(plan) => self.act_on_leaf(plan)?,
                Plan::Restored => return Ok(Outcome::Resume),
                Plan::StartOver => Err(Changed),
            };
            match changed {
                Ok(Step::Done) => return Ok(Outcome::Resume),
                Ok(Step::Nearer) => {}
                Err(Changed) => self.count(Counter::Retries),
            }
        }
    }

    #[inline]
    fn count(&self, counter: Counter) {
        self.record.stats.count(counter);
    }

    #[inline]
    fn is_ring_full(&self) -> bool {
        self.ring.is_some_and(DirtyRing::is_soft_full)
    }

    /// How many pages one step may make writable. With a ring, as many as it has room for: their slot may begin to log
    /// before they are marked, even if it does not log now.
    #[inline]
    fn max_opened(&self) -> u64 {
        self.ring.map_or(u64::MAX, DirtyRing::room)
    }

    #[inline]
    fn leaf(&self, plan: &InstallPlan<'_, H::Backing>, gfn: Gfn, mut resolved: Resolved) -> Result<NewLeaf, Error> {
        if self.nr_overtaken >= OVERTAKEN_BEFORE_SMALL_LEAF {
            resolved.max_size = PageSize::Size4K;
        }
        plan.leaf::<F>(&self.tree.config, self.max_opened(), gfn, self.access, resolved)
    }

    /// Marks the pages of this fault's leaf of `level`, which it has just made writable, if their slot
    /// logs.
    #[inline(always)]
    fn mark_leaf(&self, section: &Section<'_>, level: Level) {
        let (slots, gfn) = (self.slots, self.gfn);
        if level == Level::L4K {
            log::mark_page_if_logging(slots, section, self.ring, gfn);
        } else {
            log::mark_if_logging(slots, section, self.ring, gfn, gfn.block(level));
        }
    }

    /// Step 1: what there is, and what to do about it.
    #[inline]
    fn look<'r>(&self, pin: FaultPin<'_>, hazard: HazardPointer<'r>) -> Plan<'r, H::Backing> {
        let (tree, slots) = (self.tree, self.slots);
        let section = tree.epochs.enter_fault(pin);
        // The entry first, the ranges and the slot after: see `table/stamp.rs`.
        let (cursor, value, state) = Cursor::at_lowest(tree, &section, self.gfn);
        let writes = self.access == Access::Write;
        let is_closed = writes && cursor.is_closed();
        let found = match state {
            State::Leaf if !writes || (entry::is_writable::<F>(value) && !is_closed) => {
                let level = cursor.level();
                return if entry::is_marked::<F>(value, self.access) {
                    Plan::Spurious(level)
                } else {
                    Plan::SetMarks(level)
                };
            }
            State::Leaf | State::Tracked if !writes || entry::is_host_writable::<F>(value) => Found::Lacking(value),
            // A leaf has no stamp; see `install_instead`.
            State::Leaf | State::Tracked => Found::ReadOnly(value, tree.current_stamp()),
            State::Empty(stamp) => Found::Empty(stamp),
            State::Broken => return Plan::Cancel,
            State::Table | State::Frozen => unreachable!("descend_to_lowest passes them"),
        };
        let Some(max_level) = tree.published.free_level(self.gfn, cursor.level()) else { return Plan::TakenAway };
        let Some(slot) = slots.find(&section, self.gfn) else { return Plan::Exit };
        let (attributes, max_level) = if slot.flags().intersects(LOOK_CLOSER) {
            match self.look_closer(&section, max_level) {
                Told::May(attributes, max_level) => (attributes, max_level),
                Told::Exit => return Plan::Exit,
                Told::Withheld => return Plan::Withheld,
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
                level: cursor.level(),
                max_level,
                found,
            });
        };
        let is_locked = tree.locking() != Locking::None;
        let restored = if is_closed {
            if is_locked {
                return Plan::OnLeaf(LeafPlan::PushDown);
            }
            self.push_down_in(&section).map(|_| ())
        } else if writes && self.splits(cursor.level(), slot.logs()) {
            return Plan::OnLeaf(LeafPlan::Split(leaf, cursor.level()));
        } else if is_locked {
            return Plan::OnLeaf(LeafPlan::GiveBack(leaf));
        } else {
            self.give_back_at(cursor.entry(), &section, leaf)
        };
        match restored {
            Ok(()) => Plan::Restored,
            Err(Changed) => Plan::StartOver,
        }
    }

    /// What user space says of the page: its attributes, and the largest leaf for it up to `max_level`; or what there is to be
    /// done instead of mapping it.
    #[cold]
    fn look_closer(&self, section: &Section<'_>, max_level: Level) -> Told {
        // Found once more: that the caller's need not be in memory spares each fault in a plain slot its copy.
        let Some(slot) = self.slots.find(section, self.gfn) else { return Told::Exit };
        if self.access == Access::Write && slot.flags().contains(MemoryRegionFlags::READONLY) {
            return Told::Exit;
        }
        if slot.check_userfault(self.gfn).is_err() {
            return Told::Withheld;
        }
        let level = slot.userfault().map_or(max_level, |userfault| max_level.min(userfault.level()));
        Told::May(slot.attributes_of(self.gfn), level)
    }

    /// The level of the largest block around the fault's page, up to `largest`, whose pages have the
    /// attributes of the fault's. Not asked in the look, which does not know yet how
    /// large a block the host has: a block of 512 GiB has 2 Mi words of attributes.
    ///
    /// As in the look they are read after the entry was. If they are changed after that, the entry
    /// gets another stamp, or is replaced by a table, before they are stored; then nothing is
    /// installed.
    #[cold]
    #[inline(never)]
    fn narrow_to_alike(&self, largest: Level) -> Level {
        let (tree, slots) = (self.tree, self.slots);
        let section = tree.epochs.enter(self.record);
        let mut level = Level::L4K;
        if let Some(slot) = slots.find(&section, self.gfn) {
            // From below: what is not alike is mostly found out soon.
            while level < largest.min(Level::L1G) && slot.are_alike(self.gfn.block(level.up())) {
                level = level.up();
            }
        }
        level
    }

    /// What user space is to do before the page can be mapped; `None` if it has done that meanwhile.
    #[cold]
    fn why_withheld(&self) -> Option<Error> {
        let section = self.tree.epochs.enter(self.record);
        self.slots.find(&section, self.gfn)?.check_userfault(self.gfn).err()
    }

    /// Step 2: the frame.
    fn resolve(&mut self, plan: &InstallPlan<'_, H::Backing>) -> Result<Resolved, Gone> {
        let host = &self.tree.host;
        let resolve = || plan.resolve(host, self.gfn, self.access);
        match &mut self.timing {
            None => resolve(),
            Some(timing) => {
                let outside_start_ns = host.timestamp_ns();
                let start_delay_ns = host.run_delay_ns();
                let start_ns = host.timestamp_ns();
                let resolved = resolve();
                timing.resolve_ns += host.timestamp_ns().saturating_sub(start_ns);
                timing.resolve_run_delay_ns += host.run_delay_ns().saturating_sub(start_delay_ns);
                timing.outside_ns += host.timestamp_ns().saturating_sub(outside_start_ns);
                resolved
            }
        }
    }

    /// What becomes of a fault whose page is gone. If the answer may be of the past, the guest comes
    /// back, unless user space is to act first.
    #[cold]
    #[inline(never)]
    fn gone(&self, found: Found, attributes: MemoryAttributes) -> Result<Outcome, Error> {
        self.check_gone(found, attributes)?;
        match self.why_withheld() {
            None => Ok(Outcome::Resume),
            Some(Error::MemoryFault { flags, gpa, size }) => {
                self.count(Counter::Exits);
                self.count(Counter::Userfaults);
                Ok(Outcome::Exit(Exit::MemoryFault { flags, gpa, size }))
            }
            Some(error) => Err(error),
        }
    }

    /// The host has no frame. An error, unless something has changed since the look, which had
    /// `found` and `attributes`: the entry, the ranges that are being taken away, or what user
    /// space says of the page. Then the host's answer may be of the past: user space has taken the
    /// page back, say, and thrown its contents away.
    #[cold]
    #[inline(never)]
    fn check_gone(&self, found: Found, attributes: MemoryAttributes) -> Result<(), Error> {
        let (tree, slots) = (self.tree, self.slots);
        let section = tree.epochs.enter(self.record);
        let mut cursor = Cursor::new(tree, &section, self.gfn);
        // In the order of `look`. A change that is over has left another stamp.
        let (value, state) = cursor.descend_to_lowest();
        let is_same = match found {
            Found::Empty(stamp) => state == State::Empty(stamp),
            Found::ReadOnly(leaf, stamp) => value == leaf && tree.current_stamp() == stamp,
            Found::Lacking(_) => unreachable!("no frame is asked for"),
        };
        let is_free = is_same && tree.published.free_level(self.gfn, cursor.level()).is_some();
        let slot = if is_free { slots.find(&section, self.gfn) } else { None };
        let is_asked_for = |slot: &SlotView<'_, H::Backing>| {
            slot.check_userfault(self.gfn).is_ok() && slot.attributes_of(self.gfn) == attributes
        };
        if slot.as_ref().is_some_and(is_asked_for) {
            return Err(Error::BackingGone { gpa: self.gpa });
        }
        self.count(Counter::Retries);
        Ok(())
    }

    /// Flushes what CPUs may have cached of the entry, if nothing can be made of it before that.
    #[inline]
    fn flush_before_make(&self, plan: &InstallPlan<'_, H::Backing>) {
        if F::BREAK_BEFORE_MAKE && matches!(plan.found, Found::Empty(stamp) if stamp.is_unflushed()) {
            self.tree.flush(self.record, &[self.gfn.block(plan.level)]);
        }
    }

    /// Takes from the host what step 3 may link to install `leaf`.
    #[inline]
    fn top_up_for(&mut self, plan: &InstallPlan<'_, H::Backing>, leaf: &NewLeaf) -> Result<(), Error> {
        match plan.found {
            // A part of it is split off, one level at a time.
            Found::ReadOnly(value, _) if plan.level > leaf.level => {
                self.top_up(1, TableUse::Split, entry::frame::<F>(value, plan.level))
            }
            _ => self.top_up(usize::from(plan.level.0 - leaf.level.0), TableUse::Fault, leaf.pfn),
        }
    }

    /// Takes from the host what step 3 may link for `table_use` of the memory at `pfn`.
    #[inline]
    fn top_up(&mut self, nr_tables: usize, table_use: TableUse, pfn: Pfn) -> Result<(), Error> {
        if nr_tables == 0 {
            return Ok(());
        }
        let Tree { host, config, .. } = self.tree;
        let placement = match table_use {
            TableUse::Fault => config.fault_table_placement,
            TableUse::Split => config.split_table_placement,
        };
        let node = placement.node_for(host, Some(pfn));
        if self.tables.has(nr_tables, node) {
            return Ok(());
        }
        self.tables
            .top_up::<H, F>(host, &self.record.stats, nr_tables, node, AllocationWait::Allowed)
            .map_err(|()| Error::OutOfMemory)
    }
}
