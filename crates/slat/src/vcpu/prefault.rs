//! Mapping pages before the guest asks for them: a range (KVM's `KVM_PRE_FAULT_MEMORY`), or a list, such as the pages that
//! a guest used before it was put into a snapshot.
//!
//! Both go the way of a fault: entry first, then what the answer depends on, resolve, one compare-and-exchange if the
//! stamp allows it. Where a whole table is missing, for 2 MiB or for 1 GiB of huge pages, it is filled before it is linked,
//! so that the block costs one exchange instead of 512. Pages of a list go the way together, so that they share sections and walks. What is
//! mapped anew has not been used: A and D stay clear (where CPUs set them). A leaf that was there and is given back counts
//! as used.

use super::{Fault, Found, InstallPlan, Plan, Step, Vcpu};
use crate::addr::{Access, Gfn, GfnRange, Gpa, Level, PAGE_SHIFT, PAGE_SIZE};
use crate::dirty::ring::DIRTY_RING_RESERVE;
use crate::error::Error;
use crate::format::{Entry, Format};
use crate::host::{Host, Resolved};
use crate::second_stage::install::{self, Changed, NewLeaf, Prepared, Rights};
use crate::slot::MemoryRegionFlags;
use crate::stats::Counter;
use crate::sync::{Side, fence_after_rmw};
use crate::table::entry::{self, Stamp, State};
use crate::table::frames::TableUse;
use crate::table::walk::Cursor;
use crate::vm::Vm;

impl<H: Host, F: Format> Vcpu<H, F> {
    /// Maps the `size_bytes` from `gpa` on, so that `access` to them does not fault: for a write, the pages that this makes
    /// writable count as written in a slot that logs. What is mapped already stays. Several vCPUs may do parts of a range
    /// at once.
    ///
    /// Returns how many bytes from `gpa` on are mapped by now; if not all, a second call with the rest says why.
    ///
    /// # Errors
    /// For the first page: [`Error::NoMemory`] if no slot has it, or not for writing; [`Error::Busy`] if it is being taken
    /// away at this moment, by an invalidation or a change of its slot: try again; [`Error::DirtyRingFull`]; and those of
    /// [`handle_fault`](Vcpu::handle_fault). [`Error::UnalignedAddress`], [`Error::BadSize`].
    pub fn pre_fault_memory(&mut self, gpa: Gpa, size_bytes: u64, access: Access) -> Result<u64, Error> {
        if !gpa.is_page_aligned() {
            return Err(Error::UnalignedAddress { gpa });
        }
        if size_bytes == 0 || !size_bytes.is_multiple_of(PAGE_SIZE) {
            return Err(Error::BadSize { size_bytes });
        }
        let range = GfnRange::new(gpa.gfn(), size_bytes >> PAGE_SHIFT);
        let mut next = range.start;
        while next < range.end {
            let result = self.fault(next.gpa(), access).and_then(|mut fault| fault.pre_fault(range.end));
            next = match result {
                Ok(next) => next,
                Err(error) if next == range.start => return Err(error),
                Err(_) => break,
            };
            if self.vm.tree.host.should_yield() {
                self.vm.tree.host.yield_now();
            }
        }
        Ok((next.0.min(range.end.0) - range.start.0) << PAGE_SHIFT)
    }
}

impl<H: Host, F: Format> Vcpu<H, F> {
    /// Maps the pages that hold the addresses `pages`, in their order, so that `access` to them does not fault: as
    /// [`pre_fault_memory`](Vcpu::pre_fault_memory) does for a range. It is fastest if they are sorted.
    ///
    /// Returns how many from the first on are mapped by now; if not all, a second call with the rest says why.
    ///
    /// # Errors
    /// For the first page: those of [`pre_fault_memory`](Vcpu::pre_fault_memory).
    pub fn pre_fault_pages(&mut self, pages: &[Gpa], access: Access) -> Result<usize, Error> {
        let mut done = 0;
        while let Some(&page) = pages.get(done) {
            let result =
                self.fault(page, access).and_then(|mut fault| match fault.pre_fault_together(&pages[done..]) {
                    0 => fault.pre_fault(Gfn(page.gfn().0 + 1)).map(|_| 1),
                    nr_pages => Ok(nr_pages),
                });
            match result {
                Ok(nr_pages) => done += nr_pages,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
            if self.vm.tree.host.should_yield() {
                self.vm.tree.host.yield_now();
            }
        }
        Ok(done)
    }
}

/// Pages of a list that go the way together: no more than a ring that is not soft-full has room for.
const TOGETHER: usize = 64;
const _: () = assert!(TOGETHER <= DIRTY_RING_RESERVE as usize);

/// Stands for the entry of a page that is mapped already: a value that no empty entry has.
const MAPPED: Entry = Entry(u64::MAX);

impl<H: Host, F: Format> Fault<'_, H, F> {
    /// Maps as many of `pages`, of which the first is this fault's, as need nothing but leaves of 4 KiB in tables that are
    /// there, and lie in one slot. Returns how many from the first on are mapped by now.
    fn pre_fault_together(&mut self, pages: &[Gpa]) -> usize {
        let Vm { tree, slots, .. } = self.vm;
        let access = self.access;
        if self.is_ring_full() {
            return 0;
        }
        let section = tree.epochs.enter(self.record);
        let mut cursor = Cursor::new(tree, &section, self.gfn);
        let mut nr_pages = 0;
        let mut seen = [MAPPED; TOGETHER];
        for (page, seen) in pages.iter().zip(&mut seen) {
            if !tree.whole().contains(page.gfn()) {
                break;
            }
            let Some(entry) = cursor.move_to_entry(page.gfn(), Level::L4K) else { break };
            if access == Access::Write && cursor.is_closed() {
                break;
            }
            let value = entry.load();
            match entry::state::<F>(value, Level::L4K) {
                State::Empty(_) => *seen = value,
                State::Leaf if access != Access::Write || entry::is_writable::<F>(value) => {}
                _ => break,
            }
            nr_pages += 1;
        }
        // The order is that of `table/stamp.rs`: all entries, then the ranges, then the slot.
        let Some(free_level) = tree.published.free_level(self.gfn, F::ROOT_LEVEL) else { return 0 };
        // Mostly all there is; then the pages around the first are not asked for one by one.
        let free = self.gfn.block(free_level);
        let is_free = |gfn| free.contains(gfn) || tree.published.free_level(gfn, Level::L4K).is_some();
        nr_pages = pages[..nr_pages].iter().take_while(|page| is_free(page.gfn())).count();
        let Some(slot) = slots.find(&section, self.gfn) else { return 0 };
        if access == Access::Write && slot.flags().contains(MemoryRegionFlags::READONLY) {
            return 0;
        }
        let plan = InstallPlan {
            backing: slot.keep_for_resolve(self.record),
            slot: slot.range(),
            flags: slot.flags(),
            level: Level::L4K,
            max_level: Level::L4K,
            found: Found::Empty(Stamp::FIRST),
        };
        drop(section);

        let mut leaves = [MAPPED; TOGETHER];
        for (index, page) in pages[..nr_pages].iter().enumerate() {
            let gfn = page.gfn();
            if !plan.slot.contains(gfn) {
                nr_pages = index;
                break;
            }
            if seen[index] == MAPPED {
                continue;
            }
            let resolved = tree.host.resolve(plan.backing.get(), gfn, plan.page(gfn), access).ok();
            let leaf = resolved.and_then(|resolved| self.leaf(&plan, gfn, resolved).ok());
            let Some(leaf) = leaf else {
                nr_pages = index;
                break;
            };
            leaves[index] = NewLeaf { level: Level::L4K, used: None, ..leaf }.entry::<F>(tree.config.access_tracking);
        }
        self.install_together(&pages[..nr_pages], plan.slot, &seen, &leaves)
    }

    /// Installs `leaves` instead of the empty entries `seen`, one for each of `pages`, but where the page is mapped. All
    /// pages are in `slot_range`. Returns the number of pages up to the first that was changed meanwhile.
    fn install_together(&self, pages: &[Gpa], slot_range: GfnRange, seen: &[Entry], leaves: &[Entry]) -> usize {
        let Vm { tree, slots, .. } = self.vm;
        let locked = tree.enter(self.record, Side::Read);
        let mut cursor = Cursor::new(tree, &locked.section, self.gfn);
        let mut nr_pages = 0;
        let mut nr_installed = 0;
        let mut any_writable = false;
        for ((page, &seen), &leaf) in pages.iter().zip(seen).zip(leaves) {
            if seen != MAPPED {
                let Some(entry) = cursor.move_to_entry(page.gfn(), Level::L4K) else { break };
                // An empty entry is its stamp: where the entry is the one that was seen, so is the stamp.
                if entry.compare_exchange::<F>(seen, leaf).is_err() {
                    break;
                }
                any_writable |= entry::is_writable::<F>(leaf);
                nr_installed += 1;
            }
            nr_pages += 1;
        }
        self.record.stats.add(Counter::Installed4K, nr_installed);
        if !any_writable || !self.marks(Level::L4K) {
            return nr_pages;
        }
        // As `mark_if_logging` would for each: the leaves are writable before the flags are read.
        fence_after_rmw();
        let may_log =
            slots.find(&locked.section, self.gfn).is_none_or(|slot| slot.logs() || slot.range() != slot_range);
        if may_log {
            let installed = pages[..nr_pages]
                .iter()
                .zip(leaves)
                .filter(|&(_, &leaf)| leaf != MAPPED && entry::is_writable::<F>(leaf));
            for (page, _) in installed {
                self.mark(&locked.section, page.gfn(), page.gfn().block(Level::L4K));
            }
        }
        nr_pages
    }

    /// Maps the page of this fault, and as many behind it below `end` as go with it. Returns the first that is not done.
    fn pre_fault(&mut self, end: Gfn) -> Result<Gfn, Error> {
        loop {
            if self.is_ring_full() {
                return Err(Error::DirtyRingFull { gpa: self.gpa });
            }
            let changed = match self.look() {
                Plan::Spurious(level) => return Ok(self.gfn.block(level).end),
                Plan::Exit => return Err(Error::NoMemory { gpa: self.gpa }),
                Plan::TakenAway => return Err(Error::Busy { gpa: self.gpa }),
                Plan::Install(plan) => {
                    let resolved = self.resolve(&plan)?;
                    let leaf = NewLeaf { used: None, ..self.leaf(&plan, self.gfn, resolved)? };
                    if self.is_another_frame(&plan, &leaf) {
                        return Err(Error::BadResolve { gpa: self.gpa });
                    }
                    self.top_up(usize::from(plan.level.0 - leaf.level.0), TableUse::Fault, leaf.pfn)?;
                    match plan.found {
                        Found::Empty(seen) if self.may_fill(&plan, leaf.level.up(), end) => match leaf.level {
                            Level::L4K => self.fill_block::<1>(&plan, seen, leaf, resolved),
                            Level::L2M => self.fill_block::<2>(&plan, seen, leaf, resolved),
                            _ => self.install_next(&plan, leaf),
                        },
                        _ => self.install_next(&plan, leaf),
                    }
                }
                // Done, or one step nearer: the next look tells.
                Plan::OnLeaf(plan) => self.act_on_leaf(plan)?.map(|_| self.gfn),
            };
            match changed {
                Ok(next) if next != self.gfn => return Ok(next),
                Ok(_) => {}
                Err(Changed) => self.count(Counter::Retries),
            }
        }
    }

    /// Installs `leaf`. Returns the first page that is not done.
    fn install_next(&mut self, plan: &InstallPlan<'_, H::Backing>, leaf: NewLeaf) -> Result<Gfn, Changed> {
        Ok(match self.install(plan, leaf)? {
            Step::Done => self.gfn.block(leaf.level).end,
            Step::Nearer => self.gfn,
        })
    }

    /// Whether the whole table below the entry of `level` for the page is missing, and all of it is wanted and may be
    /// mapped.
    fn may_fill(&self, plan: &InstallPlan<'_, H::Backing>, level: Level, end: Gfn) -> bool {
        let block = self.gfn.block(level);
        (block.nr_pages() <= self.max_opened() || !plan.may_give_write(self.access))
            && plan.level >= level
            && plan.max_level >= level
            && block.start == self.gfn
            && block.end <= end
            && plan.slot.covers(block)
    }

    /// Maps the block that begins with this page by a table that is filled before it is linked, with leaves of `LEVEL`: a
    /// constant, for it is used 512 times. `first` and `resolved` are those of the first page. Returns the first page that
    /// has none.
    fn fill_block<const LEVEL: u8>(
        &mut self,
        plan: &InstallPlan<'_, H::Backing>,
        seen: Stamp,
        first: NewLeaf,
        resolved: Resolved,
    ) -> Result<Gfn, Changed> {
        let tree = &self.vm.tree;
        let (host, access, start) = (&tree.host, self.access, self.gfn);
        let max_opened = self.max_opened();
        let leaf_level = Level(LEVEL);
        let leaf_pages = leaf_level.nr_pages();
        // The next leaf, and how many can be told from it on without asking the host: none, once there are no more.
        let mut leaf = first;
        let mut nr_known = contiguous_pages(resolved) / leaf_pages;
        let mut nr_filled = 0;
        let mut any_writable = leaf.rights == Rights::Writable;
        // All entries have the stamp of the look, which is that of the entry that they will hang on.
        let table = self.tables.prepare::<H, F>(host, 0, |index| {
            if nr_known == 0 {
                return entry::empty(seen);
            }
            let value = NewLeaf { level: leaf_level, used: None, ..leaf }.entry::<F>(tree.config.access_tracking);
            leaf.pfn.0 += leaf_pages;
            nr_known -= 1;
            nr_filled += 1;
            if nr_known == 0 && index + 1 < F::TABLE_ENTRIES {
                let gfn = Gfn(start.0 + nr_filled * leaf_pages);
                if let Ok(resolved) = host.resolve(plan.backing.get(), gfn, plan.page(gfn), access)
                    && let Ok(next) = plan.leaf::<F>(&tree.config, max_opened, gfn, access, resolved)
                    // A smaller one ends it: it needs a table of its own.
                    && next.level >= leaf_level
                {
                    leaf = next;
                    nr_known = contiguous_pages(resolved) / leaf_pages;
                    any_writable |= leaf.rights == Rights::Writable;
                }
            }
            value
        });
        let level = leaf_level.up();
        let locked = tree.enter(self.record, Side::Read);
        let mut cursor = Cursor::new(tree, &locked.section, start);
        let (value, State::Empty(stamp)) = cursor.descend_to_lowest() else { return Err(Changed) };
        if stamp != seen || cursor.level() > plan.level || cursor.level() < level {
            return Err(Changed);
        }
        let prepared = Prepared { entry: table, level, nr_tables: 1, pfn: first.pfn };
        install::link(&cursor, host, self.tables, value, stamp, prepared)?;
        self.record.stats.add(super::installed(leaf_level), nr_filled);
        let filled = GfnRange::new(start, nr_filled * leaf_pages);
        if any_writable && self.marks(leaf_level) {
            self.mark(&locked.section, start, filled);
        }
        Ok(filled.end)
    }
}

/// Pages from the resolved one on whose frames are known to follow each other.
fn contiguous_pages(resolved: Resolved) -> u64 {
    let nr_pages = resolved.max_size.level().nr_pages();
    nr_pages - resolved.pfn.0 % nr_pages
}
