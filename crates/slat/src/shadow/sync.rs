//! Synchronization: when the guest flushes, shadow pages of the lowest level become what the
//! guest's tables say. The protocol is at [`Shadow`](super::Shadow).

#![expect(unsafe_code, reason = "entries are reached under the locks that keep their tables")]

use super::Mmu;
use super::install;
use super::lock::{Briefly, Busy, UntilFree, Wait};
use super::page::{NR_ENTRIES, PageRef, PtePlace, ShadowPage, SyncState};
use super::pte_records::Target;
use super::rmap::Frame;
use crate::addr::{Gfn, Gva, Level, PAGE_SHIFT};
use crate::format::Npt;
use crate::format::x86::{PRESENT, READ_WRITE};
use crate::host::Host;
use crate::shadow::guest::{Decoded, GuestMode};
use crate::stats::Counter;
use crate::sync::{Ordering, full_fence};
use crate::table::tlb::TlbBatch;

/// Pages that are protected and compared for one flush. They are on the stack, of which a call has
/// 2 KiB (`ci/stack.sh`).
const PAGES_PER_TURN: usize = 40;

/// Guest PTEs that are read under one lock.
const ENTRIES_PER_READ: usize = if NR_ENTRIES < 32 { NR_ENTRIES } else { 32 };

/// Parents of one page that are looked at. A page with more counts as one that is below everything.
const MAX_PARENTS: usize = 16;

/// A page that is being synchronized.
#[derive(Clone, Copy)]
struct Syncing {
    page: PageRef,
    sequence: u32,
}

impl<'v, H: Host> Mmu<'v, H> {
    /// Synchronizes all pages below `root`. Afterwards no shadow PTE there is made of a guest PTE
    /// that the guest had changed before the call.
    pub(super) fn sync_root(&self, mode: GuestMode, root: PageRef) {
        let pages = &self.shadow.pages;
        // A store-load pair with `Pages::note_unsync`. One side: the guest stores a PTE, flushes,
        // and this thread reads which pages are unsync. The other side: a page is noted as unsync,
        // its lock is taken, and the guest's PTE is read.
        full_fence();
        let mut from = 1;
        // Pages that become unsync meanwhile may be found, or not.
        while from != 0 {
            let mut turn = [Syncing { page: PageRef { number: 0, generation: 0 }, sequence: 0 }; PAGES_PER_TURN];
            let mut len = 0;
            let mut batch = self.batch();
            loop {
                let Some(number) = pages.next_unsync(from) else {
                    from = 0;
                    break;
                };
                from = number + 1;
                if let Some(syncing) = self.begin_sync(number, root, &mut batch) {
                    turn[len] = syncing;
                    len += 1;
                    if len == PAGES_PER_TURN {
                        break;
                    }
                }
            }
            if len == 0 {
                debug_assert!(batch.is_empty());
                continue;
            }
            // Compared twice: before the flush, so that it serves what is zapped here too; and
            // after it, when the guest cannot write unseen any more. The second comparison seldom
            // finds anything.
            for &syncing in &turn[..len] {
                let Ok(nr_compared) = self.compare_page::<UntilFree>(mode, syncing.page, &mut batch);
                self.participant.stats.add(Counter::EntriesCompared, nr_compared);
            }
            // Flushes even if no W was taken here: the thread that took it may not have flushed
            // yet.
            self.add(&mut batch);
            self.flush(&mut batch);
            for &syncing in &turn[..len] {
                let Ok(_) = self.compare_page::<UntilFree>(mode, syncing.page, &mut batch);
                self.end_sync(syncing);
            }
            self.participant.stats.add(Counter::ShadowSyncs, len as u64);
            self.flush(&mut batch);
        }
    }

    /// Protects the table of page `number`, if the page is below `root` and not synced.
    fn begin_sync(&self, number: u32, root: PageRef, batch: &mut TlbBatch<'v, H, Npt>) -> Option<Syncing> {
        let page = self.shadow.pages.get(number);
        let reference = PageRef { number, generation: page.generation()? };
        let Ok(true) = self.is_below::<UntilFree>(reference, root) else { return None };
        let Ok(syncing) = self.with_frame_of::<UntilFree, _>(reference, |frame, page| {
            let (state, sequence) = page.sync_state();
            if state == SyncState::Synced {
                return None;
            }
            page.set_sync_state(SyncState::Syncing);
            // SAFETY: the frame is locked.
            unsafe { self.protect_leaves(frame, batch) }
            Some(Syncing { page: reference, sequence })
        });
        syncing.flatten()
    }

    /// Makes the page synced, if the guest has not written its table since [`Mmu::begin_sync`].
    fn end_sync(&self, syncing: Syncing) {
        let Ok(_) = self.with_frame_of::<UntilFree, _>(syncing.page, |_, page| {
            if page.sync_state() == (SyncState::Syncing, syncing.sequence) {
                page.set_sync_state(SyncState::Synced);
                self.shadow.pages.note_synced(syncing.page.number);
            }
        });
    }

    /// Calls `f` under the lock of the frame that the page is made from, if the page is alive.
    fn with_frame_of<W: Wait, T>(
        &self,
        reference: PageRef,
        f: impl FnOnce(&Frame, &ShadowPage) -> T,
    ) -> Result<Option<T>, W::Busy> {
        let page = self.shadow.pages.get(reference.number);
        let gfn = page.gfn();
        let Some(frame) = self.shadow.frames.get(gfn, Level::L4K) else { return Ok(None) };
        let _guard = W::lock(&frame.lock, self.host())?;
        Ok((page.is_alive(reference.generation) && page.gfn() == gfn).then(|| f(frame, page)))
    }

    /// Whether `page` is reached from `above`. May return `true` where it is not.
    ///
    /// Never inlined: the parents lie on the stack.
    #[inline(never)]
    fn is_below<W: Wait>(&self, page: PageRef, above: PageRef) -> Result<bool, W::Busy> {
        if page == above {
            return Ok(true);
        }
        let (role, role_above) =
            (self.shadow.pages.get(page.number).role(), self.shadow.pages.get(above.number).role());
        if role.level() >= role_above.level() || !role.is_of_guest_of(role_above) {
            return Ok(false);
        }
        let mut parents = [PageRef { number: 0, generation: 0 }; MAX_PARENTS];
        let mut len = 0;
        let found = self.with_frame_of::<W, _>(page, |_, page| {
            let pages = &self.shadow.pages;
            let mut next = PtePlace::from_number(page.parents.load(Ordering::Relaxed));
            while let Some(place) = next {
                // SAFETY: the PTE is in a list of the frame, which is locked.
                next = unsafe { pages.behind(place) };
                // Dead pages have no PTEs to keep.
                let Some(generation) = pages.get(place.page).generation() else { continue };
                let parent = PageRef { number: place.page, generation };
                if parents[..len].contains(&parent) {
                    continue;
                }
                if len == MAX_PARENTS {
                    return false;
                }
                parents[len] = parent;
                len += 1;
            }
            true
        })?;
        match found {
            None => Ok(false),
            Some(false) => Ok(true),
            Some(true) => {
                for &parent in &parents[..len] {
                    if self.is_below::<W>(parent, above)? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
        }
    }

    /// Compares what is unsync in `below`, or below it, with the guest's tables. The caller holds
    /// the lock of a page above.
    pub(super) fn sync_below(
        &self,
        mode: GuestMode,
        below: PageRef,
        batch: &mut TlbBatch<'v, H, Npt>,
    ) -> Result<(), Busy> {
        if self.shadow.pages.get(below.number).role().level() == Level::L4K {
            if self.shadow.pages.next_unsync(below.number) == Some(below.number) {
                let nr_compared = self.compare_page::<Briefly>(mode, below, batch)?;
                self.participant.stats.add(Counter::EntriesCompared, nr_compared);
            }
            return Ok(());
        }
        let mut from = 1;
        while let Some(number) = self.shadow.pages.next_unsync(from) {
            from = number + 1;
            let Some(generation) = self.shadow.pages.get(number).generation() else { continue };
            let page = PageRef { number, generation };
            if self.is_below::<Briefly>(page, below)? {
                let nr_compared = self.compare_page::<Briefly>(mode, page, batch)?;
                self.participant.stats.add(Counter::EntriesCompared, nr_compared);
            }
        }
        Ok(())
    }

    /// Compares the PTEs of a page of the lowest level with the guest's, and zaps or write-protects
    /// those that the guest's no longer allow. Returns how many it has compared.
    ///
    /// It releases the page's lock between one read of guest PTEs and the next, so that no vCPU
    /// waits for all 512. What is made in between is made of what the guest's PTE says then.
    ///
    /// Never inlined: the guest PTEs that it reads at a time lie on the stack.
    #[inline(never)]
    fn compare_page<W: Wait>(
        &self,
        mode: GuestMode,
        reference: PageRef,
        batch: &mut TlbBatch<'v, H, Npt>,
    ) -> Result<u64, W::Busy> {
        let page = self.shadow.pages.get(reference.number);
        let (mut nr_compared, mut first) = (0, 0);
        while first < NR_ENTRIES {
            // Only in this generation is the page of the lowest level, so that its lock may be
            // waited for.
            let is_alive = || page.is_alive(reference.generation);
            let Some(_guard) = W::lock_while(&page.lock, self.host(), is_alive)? else { return Ok(nr_compared) };
            // SAFETY: the page is locked, and was found alive under the lock.
            let ptes = unsafe { page.ptes() };
            let has_none = |first: usize| (first..first + ENTRIES_PER_READ).all(|at| ptes.target(at) == Target::None);
            while first < NR_ENTRIES && has_none(first) {
                first += ENTRIES_PER_READ;
            }
            if first == NR_ENTRIES {
                break;
            }
            let mut entries = [0; ENTRIES_PER_READ];
            let (gpa, size_bytes) = page.guest_entry(first);
            // A guest PTE that cannot be read counts as not present.
            if self.read_guest_entries::<W>(gpa, size_bytes, &mut entries)?.is_err() {
                entries.fill(0);
            }
            for (index, pte) in (first..).zip(entries) {
                if ptes.target(index) != Target::None {
                    // SAFETY: as above.
                    unsafe { self.compare_entry::<W>(mode, reference.number, index, pte, batch)? }
                    nr_compared += 1;
                }
            }
            first += ENTRIES_PER_READ;
        }
        Ok(nr_compared)
    }

    /// Compares one PTE of a page of the lowest level with the guest's, `pte`.
    ///
    /// PTEs of global pages are compared in every flush. One that has not changed stays. One that
    /// has changed may be stale only for the vCPUs that had it cached, but which these are is not
    /// known.
    ///
    /// # Safety
    /// The caller holds the lock of the page, which is alive.
    unsafe fn compare_entry<W: Wait>(
        &self,
        mode: GuestMode,
        number: u32,
        index: usize,
        pte: u64,
        batch: &mut TlbBatch<'v, H, Npt>,
    ) -> Result<(), W::Busy> {
        let page = self.shadow.pages.get(number);
        // SAFETY: as the caller promises.
        let Target::Leaf(gfn) = unsafe { page.ptes() }.target(index) else { return Ok(()) };
        let role = page.role();
        // SAFETY: as above.
        let value = unsafe { self.cell(page, index) }.load(Ordering::Relaxed);
        if value & PRESENT == 0 {
            return Ok(());
        }
        let place = PtePlace { page: number, index };
        let leaf = match mode.decode(pte, Level::L4K) {
            Decoded::Leaf(leaf) if leaf.gfn == gfn && leaf.is_accessed => leaf,
            _ => {
                self.count(Counter::EntriesSynced);
                // SAFETY: as above.
                return unsafe { self.drop_entry::<W>(place, batch) };
            }
        };
        let is_within = |value| install::leaf_is_within(role, role.rights().and(leaf.rights), leaf.is_dirty, value);
        if is_within(value) {
            return Ok(());
        }
        self.count(Counter::EntriesSynced);
        if is_within(value & !READ_WRITE) {
            // SAFETY: as above.
            unsafe { self.write_protect_leaf::<W>(place, gfn, batch) }
        } else {
            // SAFETY: as above.
            unsafe { self.drop_entry::<W>(place, batch) }
        }
    }

    /// Takes W from the leaf PTE at `place`, if it still maps `gfn`.
    ///
    /// # Safety
    /// The caller holds the lock of its page, which is alive.
    unsafe fn write_protect_leaf<W: Wait>(
        &self,
        place: PtePlace,
        gfn: Gfn,
        batch: &mut TlbBatch<'v, H, Npt>,
    ) -> Result<(), W::Busy> {
        let page = self.shadow.pages.get(place.page);
        let Some(frame) = self.shadow.frames.get(gfn, Level::L4K) else { return Ok(()) };
        let _guard = W::lock(&frame.lock, self.host())?;
        // SAFETY: as the caller promises.
        if unsafe { page.ptes() }.target(place.index) == Target::Leaf(gfn) {
            self.add(batch);
            // SAFETY: the PTE leads to the frame, which is locked.
            unsafe { self.cell(page, place.index) }.fetch_and(!READ_WRITE, Ordering::AcqRel);
        }
        Ok(())
    }

    /// Whether a PTE that translates `gva` from `root` on may be made of a guest PTE that the guest
    /// has changed. It takes no lock. It is for page faults of the guest, after which mostly
    /// nothing is stale.
    pub(super) fn may_be_stale(&self, root: PageRef, gva: Gva) -> bool {
        let pages = &self.shadow.pages;
        // A store-load pair with `WordLock::lock`. One side: the guest stores its PTE, and the lock
        // is found free here. The other side: the lock is taken, and the guest's PTE is read
        // (`link`, `install_leaf`).
        full_fence();
        let guard = self.pin();
        let mut reference = root;
        loop {
            let page = pages.get(reference.number);
            let role = page.role();
            // Before the target: then what earlier holders made is read here, and later holders
            // read the guest's PTE as it is now.
            let is_free = page.lock.is_free();
            // SAFETY: both are of this VM.
            let target = unsafe { page.target_in(&guard, index_of(gva, role.level())) };
            if !is_free || !page.is_alive(reference.generation) {
                return true;
            }
            match target {
                Target::None => return false,
                Target::Link(below) | Target::Linking(below) => reference = below,
                Target::Leaf(_) => {
                    return role.level() == Level::L4K && role.is_of_table() && pages.is_unsync(reference.number);
                }
            }
        }
    }

    /// Synchronizes the PTE that translates `gva` from `root` on.
    pub(super) fn sync_address<W: Wait>(
        &self,
        mode: GuestMode,
        root: PageRef,
        gva: Gva,
        batch: &mut TlbBatch<'v, H, Npt>,
    ) -> Result<(), W::Busy> {
        let mut reference = root;
        loop {
            let page = self.shadow.pages.get(reference.number);
            // Under the lock: a thread that is about to link a page here holds it.
            let is_alive = || page.is_alive(reference.generation);
            let Some(_guard) = W::lock_while(&page.lock, self.host(), is_alive)? else { return Ok(()) };
            let role = page.role();
            let index = index_of(gva, role.level());
            // SAFETY: the page is locked, and was found alive under the lock.
            match unsafe { page.ptes() }.target(index) {
                Target::None => return Ok(()),
                Target::Link(below) | Target::Linking(below) => reference = below,
                Target::Leaf(_) => {
                    if role.level() == Level::L4K && role.is_of_table() {
                        let (gpa, size_bytes) = page.guest_entry(index);
                        let pte = self.read_guest::<W>(gpa, size_bytes)?.unwrap_or(0);
                        // SAFETY: as above.
                        unsafe { self.compare_entry::<W>(mode, reference.number, index, pte, batch)? }
                        self.count(Counter::EntriesCompared);
                    }
                    return Ok(());
                }
            }
        }
    }
}

/// The index of the PTE of `level` that translates `gva`.
#[inline]
pub(super) fn index_of(gva: Gva, level: Level) -> usize {
    ((gva.0 >> PAGE_SHIFT) / level.nr_pages()) as usize % NR_ENTRIES
}
