//! The roots that one vCPU remembers, what flushes by the guest have left to do with them, and the
//! PCIDs of its CPU.
//!
//! # Guarantees
//! Before the vCPU uses a root that a flush by the guest concerns, nothing of what was flushed is
//! made of a guest PTE that was changed before the flush.
//!
//! # Use
//! `Vcpu` calls one method for each instruction that the CPU exits for, and [`Roots::entry`] before
//! the guest runs.
//!
//! # Implementation
//! Each remembered root has a host PCID, its place in the list plus one, so that the CPU keeps its
//! translations apart. The guest's own PCID decides only which roots a flush by the guest concerns;
//! several roots may have the same.
//!
//! A flush is a moment. Each root has the moment of its last synchronization, each guest PCID that
//! of its last flush. Single addresses that were flushed are in one short list for all PCIDs, since
//! a global page belongs to all. Each root has its position in that list. A root that is too far
//! behind is synchronized as a whole.
//!
//! A flush is carried out on the current root at once, and on another root when the vCPU switches
//! to it. With [`ShadowStrategy::RootCache`], INVLPG is carried out at once on all roots of the
//! current mode that have no earlier address left to do. The strategies that exist for comparison
//! differ: `RootsByPcid` carries an INVPCID out at once, too, and `Baseline` remembers no root.
//!
//! The page of the current root is pinned. Those of others may be evicted, and are then built
//! again.
//!
//! # Why it is correct
//! A root that was synchronized after all flushes of its PCID, and has done all addresses of the
//! list, is in sync for this vCPU. The vCPU may switch to it as it is, if the guest allows that
//! (bit 63 of CR3).

#![expect(unsafe_code, reason = "ends the pins of the pages that were its roots")]

use alloc::boxed::Box;

use arrayvec::ArrayVec;

use super::Mmu;
use super::guest::{GeneralProtection, GuestMode, Keep, PagingMode};
use super::lock::{Briefly, Busy, UntilFree};
use super::page::PageRef;
use super::role::{Role, part_for};
use super::walk::View;
use crate::addr::{Gfn, Gpa, Gva, Level};
use crate::boxed::{Vacant, ZeroedWords};
use crate::config::{ShadowPaging, ShadowStrategy};
use crate::error::{FaultError, OutOfMemory};
use crate::host::Host;
use crate::registers::{GuestEntry, LocalFlush, PagingRegister, PagingRegisters};
use crate::stats::Counter;
use crate::sync::Ordering;

/// PCIDs have 12 bits (Intel SDM vol. 3A, "Process-Context Identifiers").
const NR_PCIDS: usize = 1 << 12;

/// Flushed addresses that are kept for roots which are not current.
const NR_ADDRESSES: usize = 8;

const MAX_ROOTS: usize = ShadowPaging::MAX_PREVIOUS_ROOTS as usize + 1;

/// A root that the vCPU remembers.
struct Root {
    /// CR3, without bit 63.
    cr3: u64,
    role: Role,
    /// `None` if it is not built.
    page: Option<PageRef>,
    /// The moment when it was last current.
    used_at: u64,
    /// The moment when it was last synchronized.
    synced_at: u64,
    /// How many addresses of the list are done with.
    position: u64,
    /// Whether the CPU must flush its translations before it runs the guest.
    is_stale_on_cpu: bool,
}

/// See the module.
pub(crate) struct Roots {
    registers: PagingRegisters,
    mode: GuestMode,
    /// The role of the mode's top pages, as far as CR3 does not decide it.
    role_of_mode: Role,
    strategy: ShadowStrategy,
    max_roots: usize,
    roots: ArrayVec<Root, MAX_ROOTS>,
    /// The place of the current root. Its page, if it has one, is pinned.
    current: usize,
    /// The present moment: a count of flushes and switches.
    now: u64,
    /// The moment of the last flush of each PCID.
    flushed_at: ZeroedWords,
    all_flushed_at: u64,
    /// The last addresses that were flushed, and how many there ever were.
    addresses: [Gva; NR_ADDRESSES],
    nr_addresses: u64,
    flush: LocalFlush,
}

/// The registers that a vCPU gets.
pub(crate) struct NewRegisters {
    pub(crate) registers: PagingRegisters,
    pub(crate) mode: GuestMode,
    /// Whether this write loads the PDPTEs, which must then be good ([`Mmu::has_bad_pdpte`]).
    pub(crate) loads_pdptes: bool,
}

/// The type of an INVPCID (Intel SDM vol. 2A, "INVPCID").
const INDIVIDUAL_ADDRESS: u64 = 0;
const SINGLE_CONTEXT: u64 = 1;
const ALL_BUT_GLOBAL: u64 = 3;

impl Roots {
    /// The roots of a vCPU whose paging is off, of a guest with `gpa_bits` address bits.
    pub(super) fn new(config: ShadowPaging, gpa_bits: u32) -> Result<Box<Roots>, OutOfMemory> {
        let (memory, flushed_at) = (Vacant::new()?, ZeroedWords::new(NR_PCIDS)?);
        let registers = PagingRegisters::default();
        let Ok(mode) = GuestMode::new(registers, gpa_bits) else { unreachable!("a CPU begins like this") };
        let max_roots = match config.strategy {
            strategy if strategy.keeps_no_root() => 1,
            strategy if strategy.searches_by_pcid() => MAX_ROOTS,
            _ => usize::from(config.previous_roots) + 1,
        };
        let mut roots = memory.fill(Roots {
            registers,
            mode,
            role_of_mode: Role::root(mode),
            strategy: config.strategy,
            max_roots,
            roots: ArrayVec::new(),
            current: 0,
            now: 1,
            flushed_at,
            all_flushed_at: 0,
            addresses: [Gva(0); NR_ADDRESSES],
            nr_addresses: 0,
            flush: LocalFlush::All,
        });
        let root = roots.new_root();
        roots.roots.push(root);
        Ok(roots)
    }

    pub(crate) fn registers(&self) -> PagingRegisters {
        self.registers
    }

    /// The role of the top page for the current registers.
    fn root_role(&self) -> Role {
        let part = match self.mode.paging() {
            // The pages above a page-directory-pointer table serve that table alone, and its frame
            // may have several.
            PagingMode::Pae => part_for(self.mode, Level::L1G, 0, self.registers.cr3),
            _ => 0,
        };
        let tag = match self.strategy {
            ShadowStrategy::PcidTagged => u64::from(self.mode.pcid(self.registers.cr3)),
            _ => 0,
        };
        self.role_of_mode.with_part(part, tag)
    }

    /// CR3, as far as translations depend on it.
    fn cr3(&self) -> u64 {
        if self.mode.paging() == PagingMode::Off { 0 } else { self.registers.cr3 }
    }

    fn pcid(&self) -> u16 {
        self.mode.pcid(self.registers.cr3)
    }

    fn new_root(&self) -> Root {
        Root {
            cr3: self.cr3(),
            role: self.root_role(),
            page: None,
            used_at: self.now,
            synced_at: 0,
            position: 0,
            is_stale_on_cpu: true,
        }
    }

    /// The guest loads CR3 with `value`.
    pub(crate) fn load_cr3<H: Host>(&mut self, mmu: Mmu<'_, H>, value: u64) -> Result<(), GeneralProtection> {
        let (cr3, keep) = self.mode.check_cr3(value, self.mode.gpa_bits())?;
        self.registers.cr3 = cr3;
        if self.mode.paging() == PagingMode::Off {
            return Ok(());
        }
        mmu.count(Counter::Cr3Loads);
        if self.strategy.keeps_no_root() {
            self.release_current(mmu);
            return Ok(());
        }
        self.select(mmu);
        if keep == Keep::Flush {
            self.now += 1;
            self.flushed_at[usize::from(self.pcid())].store(self.now, Ordering::Relaxed);
        }
        self.bring_up_to_date(mmu, self.current);
        Ok(())
    }

    /// Gives the current root up (`ShadowStrategy::Baseline`). Its page stays. The next entry finds
    /// the page of the registers' root by frame and role, or makes it, and synchronizes it.
    fn release_current<H: Host>(&mut self, mmu: Mmu<'_, H>) {
        if let Some(page) = self.roots[self.current].page.take() {
            let _lock = mmu.lock_of_baseline();
            // SAFETY: the pin of the root, which has given up the page.
            unsafe { mmu.unpin(page) }
        }
        mmu.count(Counter::RootMisses);
        self.now += 1;
        self.roots[self.current] = self.new_root();
    }

    /// Makes the root for the registers' CR3 and mode the current one, built or not.
    fn select<H: Host>(&mut self, mmu: Mmu<'_, H>) {
        self.now += 1;
        let (cr3, role) = (self.cr3(), self.root_role());
        let current = &self.roots[self.current];
        if current.cr3 == cr3 && current.role == role {
            mmu.count(if current.page.is_some() { Counter::RootHits } else { Counter::RootMisses });
        } else {
            let old = current.page;
            let is_it = |root: &Root| root.cr3 == cr3 && root.role == role;
            let has_its_pcid =
                |root: &Root| self.strategy.searches_by_pcid() && self.mode.pcid(root.cr3) == self.pcid();
            let found = self.roots.iter().position(|root| is_it(root) || has_its_pcid(root));
            let place = found.unwrap_or_else(|| self.place_for_new());
            if !is_it(&self.roots[place]) {
                // The PCID has another address space now.
                self.roots[place] = self.new_root();
            }
            let is_hit = found.is_some() && {
                let root = &mut self.roots[place];
                // It may have been evicted.
                root.page = root.page.filter(|page| mmu.shadow.pages.get(page.number).pin(page.generation));
                root.page.is_some()
            };
            mmu.count(if is_hit { Counter::RootHits } else { Counter::RootMisses });
            self.current = place;
            if let Some(old) = old {
                // SAFETY: the pin of the root that was the current one. If it becomes that again,
                // it pins the page anew.
                unsafe { mmu.unpin(old) }
            }
        }
        self.roots[self.current].used_at = self.now;
    }

    /// A place for the registers' root: a free one, or that of the root that was current longest
    /// ago.
    fn place_for_new(&mut self) -> usize {
        let new = self.new_root();
        if self.roots.len() < self.max_roots {
            self.roots.push(new);
            return self.roots.len() - 1;
        }
        let oldest = |&place: &usize| self.roots[place].used_at;
        let place = (0..self.roots.len()).min_by_key(oldest).unwrap_or(0);
        self.roots[place] = new;
        place
    }

    /// Whether no flush has anything left to do with the root.
    fn is_up_to_date(&self, place: usize) -> bool {
        let root = &self.roots[place];
        root.synced_at >= self.flushed(place) && root.position == self.nr_addresses
    }

    /// The moment when the root was last flushed as a whole.
    fn flushed(&self, place: usize) -> u64 {
        let pcid = usize::from(self.mode.pcid(self.roots[place].cr3));
        self.flushed_at[pcid].load(Ordering::Relaxed).max(self.all_flushed_at)
    }

    /// Does what flushes have left to do with a root, if it is built.
    fn bring_up_to_date<H: Host>(&mut self, mmu: Mmu<'_, H>, place: usize) {
        let Some(page) = self.roots[place].page else { return };
        if self.is_up_to_date(place) {
            return;
        }
        let nr_behind = self.nr_addresses - self.roots[place].position;
        if self.roots[place].synced_at < self.flushed(place) || nr_behind > NR_ADDRESSES as u64 {
            mmu.sync_root(self.mode, page);
        } else {
            self.sync_addresses(mmu, place, page);
        }
        let root = &mut self.roots[place];
        root.synced_at = self.now;
        root.position = self.nr_addresses;
        root.is_stale_on_cpu = true;
    }

    /// Synchronizes the addresses of the list that are left to do with a root.
    ///
    /// Never inlined: its batch would lie on the stack of a whole synchronization.
    #[inline(never)]
    fn sync_addresses<H: Host>(&self, mmu: Mmu<'_, H>, place: usize, page: PageRef) {
        let mut batch = mmu.batch();
        for nth in self.roots[place].position..self.nr_addresses {
            let gva = self.addresses[nth as usize % NR_ADDRESSES];
            let Ok(()) = mmu.sync_address::<UntilFree>(self.mode, page, gva, &mut batch);
        }
        mmu.flush(&mut batch);
    }

    /// The registers and the mode after the guest's write of `value` into `register`.
    pub(crate) fn check_write(&self, register: PagingRegister, value: u64) -> Result<NewRegisters, GeneralProtection> {
        let (registers, mode) = GuestMode::check_write(self.registers, register, value, self.mode.gpa_bits())?;
        Ok(NewRegisters { registers, mode, loads_pdptes: mode.loads_pdptes(self.registers, registers) })
    }

    /// The mode, if a load of CR3 loads PDPTEs in it.
    #[inline]
    pub(crate) fn pae(&self) -> Option<GuestMode> {
        (self.mode.paging() == PagingMode::Pae).then_some(self.mode)
    }

    /// Sets the registers of a vCPU that is restored, or reset.
    pub(crate) fn restore<H: Host>(&mut self, mmu: Mmu<'_, H>, registers: PagingRegisters) -> Result<(), FaultError> {
        let mode = GuestMode::new(registers, self.mode.gpa_bits())
            .map_err(|register| FaultError::BadPagingRegister { register, value: registers.get(register) })?;
        self.set_registers(mmu, registers, mode);
        Ok(())
    }

    /// Sets the vCPU's registers, and flushes everything. That is more than some of their changes
    /// ask for (Intel SDM vol. 3A, "Operations that Invalidate TLBs and Paging-Structure Caches").
    pub(crate) fn set_registers<H: Host>(&mut self, mmu: Mmu<'_, H>, registers: PagingRegisters, mode: GuestMode) {
        self.registers = registers;
        self.mode = mode;
        self.role_of_mode = Role::root(mode);
        self.now += 1;
        self.all_flushed_at = self.now;
        self.flush = LocalFlush::All;
        if self.strategy.keeps_no_root() {
            self.release_current(mmu);
        } else {
            self.select(mmu);
            self.bring_up_to_date(mmu, self.current);
        }
    }

    /// INVLPG.
    pub(crate) fn invalidate_page<H: Host>(&mut self, mmu: Mmu<'_, H>, gva: Gva) {
        if self.mode.paging() == PagingMode::Off || !self.mode.is_canonical(gva) {
            return;
        }
        self.invalidate_address(mmu, gva, None);
    }

    /// Flushes one address: in PCID `pcid`, or in all if `None`, as it may be that of a global
    /// page.
    fn invalidate_address<H: Host>(&mut self, mmu: Mmu<'_, H>, gva: Gva, pcid: Option<u16>) {
        self.addresses[self.nr_addresses as usize % NR_ADDRESSES] = gva;
        self.nr_addresses += 1;
        let _lock = mmu.lock_of_baseline();
        let mut batch = mmu.batch();
        for place in 0..self.roots.len() {
            let root = &self.roots[place];
            let is_behind = root.position + 1 < self.nr_addresses;
            let is_meant = pcid.is_none_or(|pcid| pcid == self.mode.pcid(root.cr3));
            let is_of_mode = root.role.is_of_mode_of(self.root_role());
            if is_behind || !is_of_mode || (is_meant && self.is_deferred(place, pcid)) {
                continue;
            }
            if let Some(page) = root.page.filter(|_| is_meant) {
                let Ok(()) = mmu.sync_address::<UntilFree>(self.mode, page, gva, &mut batch);
            }
            self.roots[place].position = self.nr_addresses;
        }
        mmu.flush(&mut batch);
        // Another thread may have zapped a large guest page, of which the CPU has other parts
        // cached too, and not have flushed yet. Otherwise the CPU has nothing cached that no shadow
        // PTE says, and a PTE that was wrong was flushed above, on all CPUs. So the flush of this
        // one page removes nothing wrong, and no test can notice that it is left out. It stands for
        // what the guest asked of its CPU, and costs what INVLPG costs there.
        self.defer(if mmu.has_unflushed() { LocalFlush::All } else { LocalFlush::Page(gva) });
    }

    /// Flushes `gva` in the current PCID, because the guest gets a page fault there (Intel SDM vol.
    /// 3A, 4.10.4.1). The access, done again, must not find what the guest's tables no longer say.
    /// In the ordinary case nothing is stale, and no other built root has the PCID: then this takes
    /// no lock and flushes nothing. `Err` if another thread holds a lock: then the access, done
    /// again, faults again.
    pub(crate) fn page_faulted<H: Host>(&mut self, mmu: Mmu<'_, H>, gva: Gva) -> Result<(), Busy> {
        let pcid = self.pcid();
        // Roots that the vCPU can switch to without a flush.
        let is_of_pcid = |place: usize, root: &Root| {
            place != self.current && root.page.is_some() && self.mode.pcid(root.cr3) == pcid
        };
        if self.mode.pcide() && self.roots.iter().enumerate().any(|(place, root)| is_of_pcid(place, root)) {
            self.invalidate_address(mmu, gva, Some(pcid));
            return Ok(());
        }
        if let Some(page) = self.roots[self.current].page.filter(|&page| mmu.may_be_stale(page, gva)) {
            let mut batch = mmu.batch();
            let synced = mmu.sync_address::<Briefly>(self.mode, page, gva, &mut batch);
            mmu.flush(&mut batch);
            synced?;
        }
        // As for INVLPG.
        if mmu.has_unflushed() {
            self.defer(LocalFlush::All);
        }
        Ok(())
    }

    /// Whether a flush of `pcid`, or of an address of all PCIDs, is deferred until the vCPU
    /// switches to the root.
    ///
    /// Where tables serve all PCIDs, another PCID must not be flushed at once: that flush would not
    /// cover what is made in its tables later, for the current PCID. The other PCID can have cached
    /// nothing of that, so the guest need not flush it again.
    fn is_deferred(&self, place: usize, pcid: Option<u16>) -> bool {
        let is_at_once = pcid.is_none() || self.strategy.searches_by_pcid();
        place != self.current && (self.strategy == ShadowStrategy::PcidTagged || !is_at_once)
    }

    /// Carries out INVPCID (Intel SDM vol. 2A) of type `kind`. `descriptor` has the PCID and the
    /// address.
    pub(crate) fn invalidate_pcid<H: Host>(
        &mut self,
        mmu: Mmu<'_, H>,
        kind: u64,
        descriptor: [u64; 2],
    ) -> Result<(), GeneralProtection> {
        let [pcid, gva] = descriptor;
        let gva = Gva(gva);
        let has_pcid = matches!(kind, INDIVIDUAL_ADDRESS | SINGLE_CONTEXT);
        if kind > ALL_BUT_GLOBAL
            || pcid >= NR_PCIDS as u64
            || (has_pcid && pcid != 0 && !self.mode.pcide())
            || (kind == INDIVIDUAL_ADDRESS && !self.mode.is_canonical(gva))
        {
            return Err(GeneralProtection);
        }
        let pcid = pcid as u16;
        match kind {
            INDIVIDUAL_ADDRESS => self.invalidate_address(mmu, gva, Some(pcid)),
            SINGLE_CONTEXT => {
                self.now += 1;
                self.flushed_at[usize::from(pcid)].store(self.now, Ordering::Relaxed);
                for place in 0..self.roots.len() {
                    let is_at_once =
                        self.strategy.searches_by_pcid() && self.roots[place].role.is_of_mode_of(self.root_role());
                    if place == self.current || is_at_once {
                        self.bring_up_to_date(mmu, place);
                    }
                }
            }
            // With global pages or without: see `Mmu::compare_entry`.
            _ => {
                self.now += 1;
                self.all_flushed_at = self.now;
                self.bring_up_to_date(mmu, self.current);
                self.defer(LocalFlush::All);
            }
        }
        Ok(())
    }

    /// Defers `flush` of this vCPU's CPU to its next entry.
    fn defer(&mut self, flush: LocalFlush) {
        self.flush = match (self.flush, flush) {
            (LocalFlush::None, flush) => flush,
            (deferred, LocalFlush::None) => deferred,
            (deferred, flush) if deferred == flush => deferred,
            _ => LocalFlush::All,
        };
    }

    /// The frame of the guest's top table.
    fn root_gfn(&self) -> Gfn {
        match self.mode.paging() {
            PagingMode::Off => Gfn(0),
            _ => self.mode.root_table(self.registers.cr3).gfn(),
        }
    }

    /// Builds the current root, if it is not built. It becomes an empty root if the second stage
    /// has no memory for the guest's table.
    fn build<H: Host>(&mut self, mmu: Mmu<'_, H>) -> Result<PageRef, OutOfMemory> {
        let pages = &mmu.shadow.pages;
        let gfn = self.root_gfn();
        let has_table = || self.mode.paging() == PagingMode::Off || mmu.second_stage(gfn).is_some();
        let root = &mut self.roots[self.current];
        if let Some(page) = root.page {
            let is_empty = || pages.get(page.number).role().is_empty_root();
            if pages.get(page.number).is_alive(page.generation) && !(is_empty() && has_table()) {
                return Ok(page);
            }
            // The page died while it was pinned; or the root was empty, and its table has memory
            // now.
            root.page = None;
            // SAFETY: the pin of the root, which has given up the page.
            unsafe { mmu.unpin(page) }
        }
        let _lock = mmu.lock_of_baseline();
        // The guest may load CR3 with anything, and records of frames are kept only for memory.
        let (gfn, role) = if has_table() { (gfn, root.role) } else { (Gfn(0), root.role.empty_root()) };
        let page = loop {
            let Ok(page) = mmu.page_for::<UntilFree>(gfn, role);
            let page = page?;
            if pages.get(page.number).pin(page.generation) {
                break page;
            }
        };
        root.page = Some(page);
        // Other vCPUs may have left something unsync below, which this vCPU has flushed meanwhile.
        mmu.sync_root(self.mode, page);
        root.synced_at = self.now;
        root.position = self.nr_addresses;
        root.is_stale_on_cpu = true;
        Ok(page)
    }

    /// What the CPU must load before it runs the guest.
    pub(crate) fn entry<H: Host>(&mut self, mmu: Mmu<'_, H>) -> Result<GuestEntry, OutOfMemory> {
        let page = self.build(mmu)?;
        let root = &mut self.roots[self.current];
        if core::mem::take(&mut root.is_stale_on_cpu) {
            self.defer(LocalFlush::Context);
        }
        let flush = core::mem::replace(&mut self.flush, LocalFlush::None);
        if flush == LocalFlush::All {
            for root in &mut self.roots {
                root.is_stale_on_cpu = false;
            }
        }
        Ok(GuestEntry {
            root: mmu.shadow.pages.get(page.number).table(),
            levels: self.mode.shadow_levels(),
            pcid: self.current as u16 + 1,
            flush,
        })
    }

    /// The view by which a fault at `gva` is served. Or the address of the top table's PTE, if the
    /// second stage must map that table first.
    pub(crate) fn view<'u, H: Host>(
        &mut self,
        mmu: Mmu<'_, H>,
        gva: Gva,
        unmarkable: &'u [Gfn],
    ) -> Result<Result<View<'u>, Gpa>, OutOfMemory> {
        let root = self.build(mmu)?;
        if mmu.shadow.pages.get(root.number).role().is_empty_root() {
            let table = self.mode.root_table(self.registers.cr3);
            return Ok(Err(self.mode.entry_gpa(table, self.mode.root_level(), gva)));
        }
        Ok(Ok(View { mode: self.mode, cr3: self.registers.cr3, root, unmarkable }))
    }

    /// Whether the CPU translates `gva` at all.
    pub(crate) fn is_canonical(&self, gva: Gva) -> bool {
        match self.mode.paging() {
            PagingMode::Off => gva.0 <= u64::from(u32::MAX),
            _ => self.mode.is_canonical(gva),
        }
    }

    /// Ends the vCPU's use of the shadow page tables. The last vCPU removes all pages.
    pub(super) fn end<H: Host>(&mut self, mmu: Mmu<'_, H>) {
        if let Some(page) = self.roots[self.current].page.take() {
            // SAFETY: the pin of the root, which has given up the page.
            unsafe { mmu.unpin(page) }
        }
        // AcqRel: the last vCPU reads what all others have stored.
        if mmu.shadow.nr_vcpus.fetch_sub(1, Ordering::AcqRel) == 1 {
            mmu.zap_all();
        }
    }
}
