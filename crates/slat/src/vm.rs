//! The operations on a VM's memory: dirty rings, invalidation, aging, statistics. Memslots are
//! changed in `region`; their dirty logs are in `dirty_log`, userfault and page attributes in
//! `page_state`. Names and rules are KVM's.

mod dirty_log;
mod mapping;
mod page_state;
mod region;
mod shadow;

use alloc::boxed::Box;

use crate::addr::{Gfn, GfnRange, Gpa, Hpa, Level, PAGE_SIZE, PageSize};
use crate::config::Config;
#[cfg(doc)]
use crate::config::{HugePageLogging, ManualProtect};
use crate::dirty::ring::DirtyRing;
use crate::dirty::rings::Rings;
use crate::error::{AddressTooHigh, ConfigError, LogError, RangeError};
use crate::format::Format;
use crate::harvest::rings::RingsReset;
use crate::host::Host;
use crate::operation::Operation;
use crate::second_stage::age::{self, Aging};
use crate::second_stage::invalidate::Invalidation;
use crate::second_stage::query::TableReader;
use crate::second_stage::split::{self, Leaves};
#[cfg(doc)]
use crate::slot::MemoryAttributes;
use crate::slot::set::Slots;
use crate::stats::Stats;
use crate::table::Tree;
use crate::table::retire::Participant;

/// The guest-physical memory of a virtual machine: its memslots, and the second-stage page tables
/// that translate it.
///
/// All methods may be called from several threads at once, and while its vCPUs fault. The page of
/// the [crate](crate#what-it-can-do) lists them by topic. vCPUs share the VM, so put it into an
/// [`Arc`](alloc::sync::Arc): [`create_vcpu`](Vm::create_vcpu) needs one.
///
/// Dropping it notifies the host of all mapped leaves ([`Host::leaf_zapped`]) and frees all
/// page-table pages. Before the last reference is dropped, stop the CPUs that walk them, and flush
/// their translations.
pub struct Vm<H: Host, F: Format> {
    /// Boxed: a VM is moved on the stack, and the tree is large.
    pub(crate) tree: Box<Tree<H, F>>,
    pub(crate) slots: Slots<H::Backing>,
    /// Where pages are logged, if not in bitmaps.
    pub(crate) rings: Rings,
}

impl<H: Host, F: Format> Vm<H, F> {
    /// Creates a VM without memory. Hardware walks its second stage, behind the guest's own page
    /// tables.
    ///
    /// # Errors
    /// [`ConfigError::OutOfMemory`]. For a configuration that is not supported:
    /// [`ConfigError::NoDirtyBit`], [`ConfigError::NoDirtyBitInFormat`],
    /// [`ConfigError::NoModificationLog`], [`ConfigError::BadFaultAround`].
    pub fn new(host: H, config: Config) -> Result<Vm<H, F>, ConfigError> {
        config.check::<F>()?;
        let tree = Tree::new(host, config, None)?;
        Ok(Vm { slots: Slots::new(&tree.epochs)?, tree, rings: Rings::new() })
    }

    /// The host that the VM was created with.
    pub fn host(&self) -> &H {
        &self.tree.host
    }

    /// Host-physical address of the root page-table page. It never changes. It goes into nCR3 (AMD
    /// APM vol. 2, 15.25.3) or, with its control bits, into the EPTP (Intel SDM vol. 3C,
    /// "Extended-Page-Table Pointer"), VTTBR_EL2 (Arm) or hgatp (RISC-V), with
    /// [`Hardware::address_bits`](crate::format::Hardware::address_bits) if its page-table pages
    /// have them.
    ///
    /// With shadow paging no hardware walks it: each CPU loads the root of its vCPU's
    /// [`entry`](crate::Vcpu::entry).
    pub fn root(&self) -> Hpa {
        self.tree.root()
    }

    /// Level of the root's PTEs: the number of levels that the hardware is told.
    pub fn root_level(&self) -> Level {
        self.tree.root_level()
    }

    /// Bits of a guest-physical address that the page tables translate.
    pub fn gpa_bits(&self) -> u32 {
        self.tree.encoding.gpa_bits()
    }

    /// Logs by dirty rings instead of bitmaps: each vCPU gets a ring of `nr_entries` entries. KVM's
    /// `KVM_CAP_DIRTY_LOG_RING`.
    ///
    /// Call it while there is no vCPU; it holds for the VM's life. If there were vCPUs before, the
    /// memslots that log are write-protected. Marks in their bitmaps are lost, so harvest them
    /// before.
    ///
    /// From then on, each fault that makes a page writable in a memslot that logs pushes an entry
    /// into the ring of its vCPU ([`Vcpu::dirty_ring`](crate::Vcpu::dirty_ring)). A page may be
    /// there more than once. When [`DirtyRing::RESERVE`] entries are
    /// left, the vCPU's faults exit with [`Exit::DirtyRingFull`](crate::Exit::DirtyRingFull). To go
    /// on:
    /// 1. harvest the entries,
    /// 2. call [`reset_dirty_rings`](Vm::reset_dirty_rings),
    /// 3. read the pages.
    ///
    /// When no vCPU runs, one harvest of all rings is exact.
    ///
    /// A memslot that is moved while it logs is dirty as a whole, and nothing is pushed for that.
    /// Also with [`ManualProtect::InitiallySet`], a memslot that begins to log is write-protected,
    /// and nothing is pushed.
    ///
    /// No step makes more pages writable than the ring has room for, in memslots that do not log as
    /// well. So no page of 1 GiB is mapped as one for writing, and a page of 2 MiB only if 512
    /// entries are free. Harvest and reset the rings also when logging has ended.
    ///
    /// # Errors
    /// [`ConfigError::BadRingSize`], [`ConfigError::RingNeedsPageFaults`],
    /// [`ConfigError::DirtyRingEnabled`], [`ConfigError::OutOfMemory`].
    /// [`ConfigError::VcpusExist`]: there is a vCPU, or another thread recovers huge pages
    /// ([`recover_range`](Vm::recover_range)), or splits them in a format with
    /// [`Format::BREAK_BEFORE_MAKE`].
    ///
    /// # Example
    /// ```
    /// # mod host { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/doc_host.rs")); }
    /// # use host::*;
    /// use slat::*;
    /// # fn main() -> Result<(), Error> {
    /// let vm = vm(Config::default());
    /// vm.enable_dirty_ring(256)?;
    /// vm.set_user_memory_region(region(MemoryRegionFlags::LOG_DIRTY_PAGES, 1 << 20))?;
    /// let mut vcpu = vm.create_vcpu()?;
    /// let mut gpa = Gpa(0);
    /// while vcpu.handle_fault(gpa, Access::Write)? == Outcome::Resume {
    ///     gpa = Gpa(gpa.0 + PAGE_SIZE);
    /// }
    /// // It stopped with `Exit::DirtyRingFull`: harvest, reset, and only then read the pages.
    /// let mut pages = Vec::new();
    /// for ring in vm.dirty_rings() {
    ///     ring.harvest(|dirty| pages.push((dirty.slot, dirty.page)));
    /// }
    /// assert_eq!(pages, (0..192).map(|page| (0, page)).collect::<Vec<_>>());
    /// assert_eq!(vm.reset_dirty_rings()?, 192);
    /// assert_eq!(vcpu.handle_fault(gpa, Access::Write)?, Outcome::Resume);
    /// # Ok(())
    /// # }
    /// ```
    pub fn enable_dirty_ring(&self, nr_entries: u32) -> Result<(), ConfigError> {
        let Config { dirty_tracking, huge_page_logging, .. } = self.tree.config;
        if !dirty_tracking.write_protects() || huge_page_logging.marks_whole() {
            return Err(ConfigError::RingNeedsPageFaults);
        }
        let participant = self.tree.epochs.borrow_participant()?;
        self.rings.enable(nr_entries)?;
        self.begin_to_log_by_rings(&participant);
        Ok(())
    }

    /// The dirty rings of all vCPUs, also of those that were dropped. A later vCPU takes over the
    /// ring of a dropped one, with its entries.
    pub fn dirty_rings(&self) -> impl Iterator<Item = &DirtyRing> {
        self.rings.iter()
    }

    /// Frees the harvested entries of all dirty rings, and logs their pages anew. Returns how many
    /// entries it freed. KVM's `KVM_RESET_DIRTY_RINGS`.
    ///
    /// Call it after harvesting and before reading the pages: what the guest writes to them after
    /// this call is pushed again.
    ///
    /// Any number of threads may call it at once, beside harvests and running vCPUs. One of the
    /// calls counts an entry. But when any call returns, the pages that its caller has harvested
    /// are protected.
    ///
    /// # Errors
    /// [`LogError::NoDirtyRing`], [`LogError::OutOfMemory`].
    pub fn reset_dirty_rings(&self) -> Result<u64, LogError> {
        if !self.rings.are_enabled() {
            return Err(LogError::NoDirtyRing);
        }
        let participant = self.tree.epochs.borrow_participant()?;
        Ok(RingsReset { op: self.operation(&participant) }.reset(self.rings.iter())?)
    }

    /// Unmaps the guest frames of `range` and keeps faults out until the returned value is dropped.
    /// Call it before the host gives pages other frames, frees them, or forbids writing them. KVM's
    /// MMU notifier, from `invalidate_range_start` to `invalidate_range_end`.
    ///
    /// The host need not know which frames are mapped, nor in which memslots, if any. But it must
    /// name every guest frame that has the page; while a memslot is being moved, both places of the
    /// page.
    ///
    /// When the call returns, no CPU uses a frame of the range any more. The host has been notified
    /// of what the guest did through each leaf ([`Host::leaf_zapped`]). Faults inside the range
    /// resume the guest, which tries again; faults outside do not notice. Any number of
    /// invalidations may run at once, also of the same pages.
    ///
    /// Then copy the pages, if they move, and change what [`Host::resolve`] returns for them. From
    /// there on the old frames may be used for something else, also before the drop. The dirty log
    /// keeps what the guest wrote before, and gets nothing by the call.
    ///
    /// It blocks only on [`Host::flush`], and on the VM's lock if there is one. The flush is called
    /// even if nothing was mapped. All of memory is `GfnRange::new(Gfn(0), 1 << (F::GPA_BITS - 12))`.
    ///
    /// # Errors
    /// [`RangeError::EmptyRange`], [`RangeError::AddressTooHigh`]. [`RangeError::OutOfMemory`]:
    /// there is no memory to publish the range. Nothing has changed then.
    ///
    /// # Example
    /// ```
    /// # mod host { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/doc_host.rs")); }
    /// # use host::*;
    /// use slat::*;
    /// # fn main() -> Result<(), Error> {
    /// let vm = vm_with_memory(Config::default(), MemoryRegionFlags::empty());
    /// let mut vcpu = vm.create_vcpu()?;
    /// assert_eq!(vcpu.handle_fault(Gpa(0x3008), Access::Write)?, Outcome::Resume);
    /// let invalidation = vm.invalidate_range(GfnRange::new(Gfn(3), 1))?;
    /// assert_eq!(vm.read_tables()?.cursor().query(Gpa(0x3008)), None);
    /// // Now the host gives the page another frame. Until the drop, faults on it resume the guest:
    /// assert_eq!(vcpu.handle_fault(Gpa(0x3008), Access::Read)?, Outcome::Resume);
    /// assert_eq!(vm.read_tables()?.cursor().query(Gpa(0x3008)), None);
    /// drop(invalidation);
    /// assert_eq!(vcpu.handle_fault(Gpa(0x3008), Access::Read)?, Outcome::Resume);
    /// assert!(vm.read_tables()?.cursor().query(Gpa(0x3008)).is_some());
    /// # Ok(())
    /// # }
    /// ```
    pub fn invalidate_range(&self, range: GfnRange) -> Result<Invalidation<'_>, RangeError> {
        self.check_range(range)?;
        let participant = self.tree.epochs.borrow_participant()?;
        let result = Invalidation::new(&self.tree.in_flight, &self.operation(&participant), range);
        drop(participant);
        self.reclaim_removed();
        Ok(result?)
    }

    /// Splits all leaves larger than `largest` that reach into `range`, while vCPUs run. Returns
    /// how many it split.
    ///
    /// Turning on [`LOG_DIRTY_PAGES`](crate::MemoryRegionFlags::LOG_DIRTY_PAGES) does this by
    /// itself ([`HugePageLogging`]). To have it done sooner, call this
    /// before, from several threads. Threads that split disjoint ranges do not delay each other. A
    /// block that is being recovered ([`recover_range`](Vm::recover_range)) is skipped.
    ///
    /// # Errors
    /// [`RangeError::EmptyRange`], [`RangeError::AddressTooHigh`]. [`RangeError::OutOfMemory`]: the
    /// remaining leaves are unchanged.
    ///
    /// # Example
    /// ```
    /// # mod host { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/doc_host.rs")); }
    /// # use host::*;
    /// use slat::*;
    /// # fn main() -> Result<(), Error> {
    /// let vm = vm(Config::default());
    /// vm.set_user_memory_region(region(MemoryRegionFlags::empty(), 4 << 20))?;
    /// let mut vcpu = vm.create_vcpu()?;
    /// vcpu.pre_fault_memory(Gpa(0), 4 << 20, Access::Write)?;
    /// assert_eq!(vm.stats().pages_2m(), 2);
    /// // Split the first huge page into pages of 4 KiB, and recover it.
    /// let first = GfnRange::new(Gfn(0), 512);
    /// assert_eq!(vm.split_range(first, PageSize::Size4K)?, 1);
    /// assert_eq!((vm.stats().pages_2m(), vm.stats().pages_4k()), (1, 512));
    /// assert_eq!(vm.recover_range(first)?, 1);
    /// assert_eq!((vm.stats().pages_2m(), vm.stats().pages_4k()), (2, 0));
    /// # Ok(())
    /// # }
    /// ```
    pub fn split_range(&self, range: GfnRange, largest: PageSize) -> Result<u64, RangeError> {
        self.check_range(range)?;
        if largest.level() >= self.tree.root_level() {
            return Ok(0);
        }
        let participant = self.tree.epochs.borrow_participant()?;
        Ok(split::split_range(self.operation(&participant), range, largest.level(), Leaves::NotPinned, |_| true)?)
    }

    /// Recovers huge leaves in `range`, while vCPUs run, as large as the host and the memslots'
    /// logs allow. Returns how many page-table pages became leaves. Turning off
    /// [`LOG_DIRTY_PAGES`](crate::MemoryRegionFlags::LOG_DIRTY_PAGES), or `USERFAULT`, does this by
    /// itself.
    ///
    /// A huge leaf is no larger than the blocks of a userfault bitmap, and does not cover both
    /// private and shared pages.
    ///
    /// A page that only the guest's next access can map as a part of a huge leaf is unmapped, and
    /// not counted. Blocks that another thread works on are left as they are. So is the rest of the
    /// range while too many page-table pages wait to be freed.
    ///
    /// # Errors
    /// [`RangeError::EmptyRange`], [`RangeError::AddressTooHigh`], [`RangeError::OutOfMemory`].
    pub fn recover_range(&self, range: GfnRange) -> Result<u64, RangeError> {
        self.check_range(range)?;
        let mut participant = self.tree.epochs.borrow_participant()?;
        Ok(self.recover(&mut participant, range))
    }

    /// Returns how many pages of `range` the guest has used since they were mapped or last aged.
    /// From now on they count as not used. A huge leaf counts with all of its pages in the range,
    /// and is aged as a whole.
    ///
    /// Nothing is flushed, except with shadow paging. Accesses through cached translations may stay
    /// unseen until the CPU replaces them.
    ///
    /// # Errors
    /// [`RangeError::EmptyRange`], [`RangeError::AddressTooHigh`], [`RangeError::OutOfMemory`].
    ///
    /// # Example
    /// ```
    /// # mod host { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/doc_host.rs")); }
    /// # use host::*;
    /// use slat::*;
    /// # fn main() -> Result<(), Error> {
    /// let vm = vm_with_memory(Config::default(), MemoryRegionFlags::empty());
    /// let mut vcpu = vm.create_vcpu()?;
    /// for page in 0..3 {
    ///     assert_eq!(vcpu.handle_fault(Gpa(page * PAGE_SIZE), Access::Read)?, Outcome::Resume);
    /// }
    /// let range = GfnRange::new(Gfn(0), 256);
    /// assert_eq!(vm.test_age_range(range)?, 3);
    /// assert_eq!(vm.age_range(range)?, 3);
    /// // The guest has used none since.
    /// assert_eq!(vm.age_range(range)?, 0);
    /// # Ok(())
    /// # }
    /// ```
    pub fn age_range(&self, range: GfnRange) -> Result<u64, RangeError> {
        self.age_or_test(range, Aging::Age)
    }

    /// As [`age_range`](Vm::age_range), but changes nothing.
    ///
    /// # Errors
    /// Those of [`age_range`](Vm::age_range).
    pub fn test_age_range(&self, range: GfnRange) -> Result<u64, RangeError> {
        self.age_or_test(range, Aging::Test)
    }

    fn age_or_test(&self, range: GfnRange, aging: Aging) -> Result<u64, RangeError> {
        self.check_range(range)?;
        let participant = self.tree.epochs.borrow_participant()?;
        let nr_used = age::age_range(self.operation(&participant), range, aging);
        if aging == Aging::Age && self.tree.derived.is_some() {
            // Shadow leaves would hide accesses for good, and not only until a CPU replaces its
            // translation.
            self.tree.flush(&participant, &[range]);
        }
        Ok(nr_used)
    }

    /// Opens a reader of the page tables: what is mapped, and how it was used.
    ///
    /// # Errors
    /// [`RangeError::OutOfMemory`].
    pub fn read_tables(&self) -> Result<TableReader<'_, H, F>, RangeError> {
        Ok(TableReader::new(&self.tree)?)
    }

    /// Frees what invalidations and changes of memslots have removed, as far as no vCPU can still
    /// use it. These calls free most of what earlier ones left. Call this when vCPUs have been idle
    /// for a while.
    ///
    /// What was zapped with its leaves ([`Host::needs_zapped_leaves`]) it frees in steps, between
    /// which it may yield.
    ///
    /// With shadow paging it also frees the memory that the VM keeps for new shadow pages: 8 KiB
    /// for each page that was in use at the same time as others and is gone. Call it when memory is
    /// short.
    pub fn reclaim(&self) {
        self.tree.reclaim_all();
        self.reclaim_removed();
        if let Some(derived) = self.tree.derived.as_deref() {
            derived.reclaim(&self.tree);
        }
    }

    /// Frees what may be freed of what was removed, beside the work of a call.
    fn reclaim_removed(&self) {
        self.tree.reclaim();
        self.slots.reclaim(&self.tree.epochs, || self.tree.host.barrier_on_all_cpus());
    }

    /// The counters and histograms of all vCPUs and calls so far.
    ///
    /// # Example
    /// ```
    /// # mod host { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/doc_host.rs")); }
    /// # use host::*;
    /// use slat::*;
    /// # fn main() -> Result<(), Error> {
    /// let vm = vm_with_memory(Config::default(), MemoryRegionFlags::empty());
    /// let mut vcpu = vm.create_vcpu()?;
    /// assert_eq!(vcpu.handle_fault(Gpa(0x3008), Access::Read)?, Outcome::Resume);
    /// assert_eq!(vcpu.handle_fault(Gpa(0x3008), Access::Read)?, Outcome::Resume);
    /// let stats = vm.stats();
    /// assert_eq!((stats.faults, stats.spurious, stats.installed_4k, stats.pages_4k()), (2, 1, 1, 1));
    /// # Ok(())
    /// # }
    /// ```
    pub fn stats(&self) -> Stats {
        let mut stats = Stats::default();
        for participant in self.tree.epochs.participants() {
            stats.add(&participant.stats);
        }
        // Those that no participant counts: the root, and page-table pages whose freeing was
        // deferred.
        stats.tables_allocated += 1;
        stats.tables_freed += self.tree.epochs.nr_freed_tables();
        // As leaves that went with their page-table pages.
        stats.zapped_4k += self.tree.epochs.nr_freed_leaves();
        stats.zapped += self.tree.epochs.nr_freed_leaves();
        if let Some(derived) = &self.tree.derived {
            derived.add_stats(&mut stats);
        }
        stats
    }

    /// An operation on this VM by the owner of `participant`.
    pub(crate) fn operation<'v>(&'v self, participant: &'v Participant) -> Operation<'v, H, F> {
        Operation { tree: &self.tree, slots: &self.slots, rings: &self.rings, participant }
    }

    /// Checks that `range` is not empty, and that the format translates all of it.
    fn check_range(&self, range: GfnRange) -> Result<(), RangeError> {
        if range.is_empty() {
            return Err(RangeError::EmptyRange { start: range.start, end: range.end });
        }
        Ok(self.check_end(range)?)
    }

    /// Checks that the format translates all of `range`, which is not empty.
    fn check_end(&self, range: GfnRange) -> Result<(), AddressTooHigh> {
        let whole = self.tree.whole();
        if !whole.covers(range) {
            let beyond = if whole.contains(range.start) { whole.end } else { range.start };
            // There are more frame numbers than addresses.
            return Err(too_high(Gpa(beyond.0.saturating_mul(PAGE_SIZE)), self.gpa_bits()));
        }
        Ok(())
    }

    /// Checks that the format translates `gpa`.
    #[inline]
    pub(crate) fn check_gpa(&self, gpa: Gpa) -> Result<Gfn, AddressTooHigh> {
        let gfn = gpa.gfn();
        if self.tree.whole().contains(gfn) { Ok(gfn) } else { Err(too_high(gpa, self.gpa_bits())) }
    }
}

#[cold]
#[inline(never)]
fn too_high(gpa: Gpa, gpa_bits: u32) -> AddressTooHigh {
    AddressTooHigh { gpa, gpa_bits }
}
