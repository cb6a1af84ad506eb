//! Serving a page fault: a walk of the guest's tables, as its CPU would make it, and the shadow
//! PTEs that follow from it.
//!
//! Mostly the shadow pages down to the last table exist, and only the last PTE is missing. A link
//! says what the guest's PTE says, or is about to be zapped. So the *known path* follows the links
//! and does not read the guest's upper tables. A page fault that the guest must get always comes
//! from a whole walk.

use super::Mmu;
use super::guest::{Decoded, FAULT_PRESENT, FAULT_RESERVED, GuestLeaf, GuestMode, PagingMode, Rights};
use super::install::{NotMade, SeenPte, ShadowLeaf};
use super::lock::{Briefly, Busy};
use super::memory::{Exchanged, NoMemory};
use super::page::PageRef;
use super::pte_records::Target;
use super::role::{Made, MarkKind, Role, part_for};
use super::sync::index_of;
use crate::addr::{Access, Gfn, Gpa, Gva, Level, PAGE_SHIFT, PAGE_SIZE};
use crate::error::{FaultError, OutOfMemory};
use crate::exit::Exit;
use crate::format::Npt;
use crate::format::x86::{ACCESSED, DIRTY};
use crate::host::Host;
use crate::registers::{GuestAccess, Privilege};
use crate::stats::Counter;
use crate::sync::{Ordering, fence_after_rmw};
use crate::table::tlb::TlbBatch;

/// Levels of the deepest guest tables.
const MAX_LEVELS: usize = 5;

/// How a vCPU translates.
#[derive(Clone, Copy)]
pub(crate) struct View<'u> {
    pub(super) mode: GuestMode,
    pub(super) cr3: u64,
    pub(super) root: PageRef,
    /// Frames of tables in which A and D cannot be set, because the guest may only read them. The
    /// marks count as set.
    pub(super) unmarkable: &'u [Gfn],
}

/// Most tables of one walk.
pub(crate) const MAX_TABLES: usize = MAX_LEVELS;

/// How far a fault has come.
pub(crate) enum Step {
    /// The guest can go on.
    Done,
    /// Something has changed: start over.
    Again,
    /// An emulated write to the guest's table is under way, and ends with a flush; or another thread
    /// holds a lock. The fault does nothing, and the guest tries again.
    Later,
    /// User space or the guest must act.
    Exit(Exit),
    /// The second stage must first map the page that the guest accesses.
    Map(Gpa, Access),
    /// The second stage must first map a guest table that the walk reads.
    MapTable(Gpa),
    /// The second stage must first map for writing a guest table in which the walk sets a mark.
    MapMarked(Gpa),
}

/// One guest PTE of a walk.
#[derive(Clone, Copy)]
struct Walked {
    value: u64,
    /// The table that the PTE points to; not used of a leaf PTE.
    table: Gfn,
}

/// The result of a walk.
struct Walk {
    /// The PTEs by level, from 1 on.
    entries: [Walked; MAX_LEVELS],
    /// The level of the leaf PTE.
    leaf_level: Level,
    leaf: GuestLeaf,
    /// What all PTEs allow together.
    rights: Rights,
    /// For each level, what the PTEs above it allow together.
    rights_above: [Rights; MAX_LEVELS],
    /// The marks that the PTE of each level lacked.
    marks: [u64; MAX_LEVELS],
}

impl Walk {
    /// What the page below a page of `role` on the way to `leaf` is made from, and in which role.
    #[inline]
    fn below(&self, view: &View<'_>, role: Role, gva: Gva, leaf: ShadowLeaf) -> (Gfn, Role) {
        let View { mode, cr3, .. } = *view;
        let level = role.level();
        let below = level.down();
        let part = part_for(mode, below, gva.0, cr3);
        if level <= self.leaf_level {
            let part = u64::from(leaf.is_dirty);
            (leaf.gfn.align_down(level), role.below(Made::Large, part, self.rights))
        } else if level > mode.root_level() {
            let made = if below > mode.root_level() { Made::Above } else { Made::Table };
            (mode.root_table(cr3).gfn(), role.below(made, part, Rights::ALL))
        } else {
            let rights = self.rights_above[usize::from(below.0) - 1];
            (self.entries[usize::from(level.0) - 1].table, role.below(Made::Table, part, rights))
        }
    }
}

/// What stops a walk: a step of the host or the guest, or an error.
enum Stop {
    Step(Step),
    Error(FaultError),
}

impl From<Busy> for Stop {
    fn from(_: Busy) -> Stop {
        Stop::Step(Step::Later)
    }
}

impl From<OutOfMemory> for Stop {
    fn from(error: OutOfMemory) -> Stop {
        Stop::Error(error.into())
    }
}

fn no_memory(gpa: Gpa, no_memory: NoMemory) -> Stop {
    match no_memory {
        NoMemory::NotMapped => Stop::Step(Step::MapTable(gpa)),
        NoMemory::NoPointer => Stop::Error(FaultError::NoGuestMemory { gpa }),
    }
}

impl<'v, H: Host> Mmu<'v, H> {
    /// Serves one step of a guest page fault at `gva`. The caller calls it again as the [`Step`]
    /// says.
    ///
    /// Never inlined: its stack would add to that of what else the caller does.
    #[inline(never)]
    pub(crate) fn serve(&self, view: &View<'_>, gva: Gva, access: GuestAccess) -> Result<Step, FaultError> {
        let mut batch = self.batch();
        let step = match self.serve_on_known_way(view, gva, access, &mut batch) {
            Ok(Some(step)) => Ok(step),
            Ok(None) => self.serve_by_walk(view, gva, access, &mut batch),
            Err(stop) => Err(stop),
        };
        self.flush(&mut batch);
        match step {
            Ok(step) | Err(Stop::Step(step)) => Ok(step),
            Err(Stop::Error(error)) => Err(error),
        }
    }

    /// Serves the fault by the known path: if there is a page of the lowest level for `gva`, made
    /// of a guest table, through that page's PTE. `None` if a whole walk is needed.
    ///
    /// Never inlined: its stack would lie below that of an eviction by a whole walk.
    #[inline(never)]
    fn serve_on_known_way(
        &self,
        view: &View<'_>,
        gva: Gva,
        access: GuestAccess,
        batch: &mut TlbBatch<'v, H, Npt>,
    ) -> Result<Option<Step>, Stop> {
        let pages = &self.shadow.pages;
        let mut reference = view.root;
        let guard = self.pin();
        let role = loop {
            let page = pages.get(reference.number);
            let role = page.role();
            page.note_walked();
            if role.level() == Level::L4K {
                break role;
            }
            // SAFETY: both are of this VM.
            let target = unsafe { page.target_in(&guard, index_of(gva, role.level())) };
            let Target::Link(below) = target else { return Ok(None) };
            // After the target was read: the record may be that of another page by now, whose links
            // lead elsewhere.
            if !page.is_alive(reference.generation) {
                return Ok(None);
            }
            reference = below;
        };
        drop(guard);
        if !role.is_of_table() {
            return Ok(None);
        }
        let page = pages.get(reference.number);
        let index = index_of(gva, Level::L4K);
        let (gpa, size_bytes) = page.guest_entry(index);
        // What was read of the record is of this generation if the page is still alive.
        if !page.is_alive(reference.generation) {
            return Ok(None);
        }
        let Ok(value) = self.read_guest::<Briefly>(gpa, size_bytes)? else { return Ok(None) };
        let decoded = view.mode.decode(value, Level::L4K);
        let Decoded::Leaf(leaf) = decoded else { return Ok(None) };
        let rights = role.rights().and(leaf.rights);
        if view.mode.check(rights, access).is_err() || self.must_emulate(view, rights, access) {
            return Ok(None);
        }
        let missing = decoded.missing_marks(access.access);
        let value = match self.set_marks(view, gpa, size_bytes, value, missing, batch) {
            Ok(Some(value)) => value,
            Ok(None) => return Ok(Some(Step::Again)),
            Err(stop) => return Err(stop),
        };
        let leaf = Self::shadow_leaf(leaf, rights, access, leaf.gfn);
        if self.frame_of_memory(leaf.gfn)?.is_none() {
            return Ok(Some(Step::Map(Gpa(leaf.gfn.gpa().0 + gva.0 % PAGE_SIZE), access.access)));
        }
        let _lock = self.lock_of_baseline();
        let made = self.install_leaf(reference, index, Some(value), leaf, access.access, batch);
        self.after_install(made, gva, leaf.gfn, access.access, missing).map(Some)
    }

    /// What follows from the attempt to install the leaf PTE for the page `gfn`. The guest's own
    /// leaf PTE lacked the marks `missing`.
    fn after_install(
        &self,
        made: Result<(), NotMade>,
        gva: Gva,
        gfn: Gfn,
        access: Access,
        missing: u64,
    ) -> Result<Step, Stop> {
        let gpa = Gpa(gfn.gpa().0 + gva.0 % PAGE_SIZE);
        match made {
            Ok(()) => {
                if missing & ACCESSED == 0 {
                    self.count(Counter::EntriesSynced);
                }
                Ok(Step::Done)
            }
            Err(NotMade::Changed | NotMade::TooLarge) => Ok(Step::Again),
            Err(NotMade::BeingWritten | NotMade::Busy) => Ok(Step::Later),
            Err(NotMade::NotMapped) => Ok(Step::Map(gpa, access)),
            Err(NotMade::Tracked) => Ok(Step::Exit(Exit::EmulateWrite { gpa })),
        }
    }

    /// Whether the write must be emulated. The guest's supervisor writes a user's read-only page,
    /// and no bits let it do so without hiding from SMAP that this is a user page.
    fn must_emulate(&self, view: &View<'_>, rights: Rights, access: GuestAccess) -> bool {
        access.access == Access::Write
            && access.privilege != Privilege::User
            && !view.mode.write_protect()
            && view.mode.smap()
            && rights.has(Rights::USER)
            && !rights.has(Rights::WRITE)
    }

    /// Sets `missing` in the guest's PTE, which is `value`, and returns the new value. `None` if
    /// the PTE has changed.
    fn set_marks(
        &self,
        view: &View<'_>,
        gpa: Gpa,
        size_bytes: u64,
        value: u64,
        missing: u64,
        batch: &mut TlbBatch<'v, H, Npt>,
    ) -> Result<Option<u64>, Stop> {
        if missing == 0 || view.unmarkable.contains(&gpa.gfn()) {
            return Ok(Some(value));
        }
        match self.mark_guest(gpa, size_bytes, value, missing)? {
            Ok(Exchanged::Yes) => {
                // A store-load pair with `new_page` and the lock of a page. One side: the bits are
                // set, and no kind of role that misreads them was made yet. The other side: the
                // kind is noted, the page is locked, and the PTE is read.
                fence_after_rmw();
                let kinds = MarkKind::of_mark(gpa, size_bytes);
                if self.shadow.made_kinds.load(Ordering::Relaxed) & kinds.bits() != 0 {
                    self.drop_misread(gpa.gfn(), gpa.0 % PAGE_SIZE, size_bytes, kinds, batch);
                }
                Ok(Some(value | missing))
            }
            Ok(Exchanged::No) => Ok(None),
            Err(NoMemory::NotMapped) => Err(Stop::Step(Step::MapMarked(gpa))),
            Err(NoMemory::NoPointer) => Err(Stop::Error(FaultError::NoGuestMemory { gpa })),
        }
    }

    fn shadow_leaf(leaf: GuestLeaf, rights: Rights, access: GuestAccess, gfn: Gfn) -> ShadowLeaf {
        let is_dirty = leaf.is_dirty || access.access == Access::Write;
        ShadowLeaf { gfn, rights, is_dirty }
    }

    /// Walks the guest's tables and sets the missing marks.
    ///
    /// Never inlined: its stack would lie below that of an eviction.
    #[inline(never)]
    fn walk(
        &self,
        view: &View<'_>,
        gva: Gva,
        access: GuestAccess,
        batch: &mut TlbBatch<'v, H, Npt>,
    ) -> Result<Walk, Stop> {
        let View { mode, cr3, .. } = *view;
        let page_fault = |flags: u32| {
            self.count(Counter::GuestPageFaults);
            Stop::Step(Step::Exit(Exit::PageFault { gva, error_code: mode.error_code(access, flags) }))
        };
        let size_bytes = mode.entry_bytes();
        let mut entries = [Walked { value: 0, table: Gfn(0) }; MAX_LEVELS];
        let mut rights_above = [Rights::ALL; MAX_LEVELS];
        let mut places = [Gpa(0); MAX_LEVELS];
        let mut marks = [0; MAX_LEVELS];
        let mut rights = Rights::ALL;
        let mut table = mode.root_table(cr3);
        let mut level = mode.root_level();
        let leaf = loop {
            let at = usize::from(level.0) - 1;
            let gpa = mode.entry_gpa(table, level, gva);
            if self.frame_of_memory(gpa.gfn())?.is_none() {
                return Err(no_memory(gpa, NoMemory::NotMapped));
            }
            let value = self.read_guest::<Briefly>(gpa, size_bytes)?.map_err(|error| no_memory(gpa, error))?;
            let decoded = mode.decode(value, level);
            places[at] = gpa;
            marks[at] = decoded.missing_marks(access.access);
            rights_above[at] = rights;
            entries[at].value = value;
            match decoded {
                Decoded::NotPresent => return Err(page_fault(0)),
                Decoded::Reserved => return Err(page_fault(FAULT_PRESENT | FAULT_RESERVED)),
                Decoded::Table { table: below, rights: its, .. } => {
                    entries[at].table = below.gfn();
                    rights = rights.and(its);
                    table = below;
                    level = level.down();
                }
                Decoded::Leaf(leaf) => break leaf,
            }
        };
        rights = rights.and(leaf.rights);
        if mode.check(rights, access).is_err() {
            return Err(page_fault(FAULT_PRESENT));
        }
        for at in (usize::from(level.0) - 1..usize::from(mode.root_level().0)).rev() {
            match self.set_marks(view, places[at], size_bytes, entries[at].value, marks[at], batch)? {
                Some(value) => entries[at].value = value,
                None => return Err(Stop::Step(Step::Again)),
            }
        }
        Ok(Walk { entries, leaf_level: level, leaf, rights, rights_above, marks })
    }

    /// The walk of a guest with paging off: all memory at its own address.
    #[inline(never)]
    fn walk_unpaged(gva: Gva) -> Walk {
        let leaf_level = Level::L1G;
        let gfn = Gfn(gva.0 >> PAGE_SHIFT).align_down(leaf_level);
        let leaf = GuestLeaf {
            gfn,
            nr_pages: leaf_level.nr_pages(),
            rights: Rights::ALL,
            is_global: false,
            is_accessed: true,
            is_dirty: true,
        };
        Walk {
            entries: [Walked { value: ACCESSED | DIRTY, table: Gfn(0) }; MAX_LEVELS],
            leaf_level: Level(MAX_LEVELS as u8),
            leaf,
            rights: Rights::ALL,
            rights_above: [Rights::ALL; MAX_LEVELS],
            marks: [0; MAX_LEVELS],
        }
    }

    fn serve_by_walk(
        &self,
        view: &View<'_>,
        gva: Gva,
        access: GuestAccess,
        batch: &mut TlbBatch<'v, H, Npt>,
    ) -> Result<Step, Stop> {
        let is_paged = view.mode.paging() != PagingMode::Off;
        let walk = if is_paged { self.walk(view, gva, access, batch)? } else { Self::walk_unpaged(gva) };
        // The accessed page, a part of the guest's large page.
        let page_number = gva.0 >> PAGE_SHIFT;
        let gfn = if is_paged { Gfn(walk.leaf.gfn.0 + page_number % walk.leaf.nr_pages) } else { Gfn(page_number) };
        let gpa = Gpa(gfn.gpa().0 + gva.0 % PAGE_SIZE);
        if self.must_emulate(view, walk.rights, access) {
            // A write to a device or to read-only memory is not emulated here: the second stage
            // decides that first.
            let is_writable = self.second_stage(gfn).is_some_and(|second| second.is_writable);
            return Ok(if is_writable {
                Step::Exit(Exit::EmulateWrite { gpa })
            } else {
                Step::Map(gpa, Access::Write)
            });
        }
        if self.frame_of_memory(gfn)?.is_none() {
            return Ok(Step::Map(gpa, access.access));
        }
        let leaf = Self::shadow_leaf(walk.leaf, walk.rights, access, gfn);
        let _lock = self.lock_of_baseline();
        self.make_path(view, &walk, gva, leaf, access.access, batch)
    }

    /// Makes what `walk` lacks in the shadow tables, from the root to a leaf PTE for `leaf`.
    #[inline]
    fn make_path(
        &self,
        view: &View<'_>,
        walk: &Walk,
        gva: Gva,
        leaf: ShadowLeaf,
        access: Access,
        batch: &mut TlbBatch<'v, H, Npt>,
    ) -> Result<Step, Stop> {
        let pages = &self.shadow.pages;
        let gfn = leaf.gfn;
        let leaf_at = usize::from(walk.leaf_level.0) - 1;
        let mut reference = view.root;
        loop {
            let page = pages.get(reference.number);
            let role = page.role();
            let level = role.level();
            let index = index_of(gva, level);
            page.note_walked();
            let pte = &walk.entries[usize::from(level.0) - 1];
            let seen: SeenPte = role.is_of_table().then_some(pte.value);
            if level <= walk.leaf_level && self.may_be_leaf(gfn, level) {
                let block = ShadowLeaf { gfn: gfn.align_down(level), ..leaf };
                let made = self.install_leaf(reference, index, seen, block, access, batch);
                if !matches!(made, Err(NotMade::TooLarge)) {
                    return self.after_install(made, gva, gfn, access, walk.marks[leaf_at]);
                }
            }
            if level == Level::L4K {
                return Ok(Step::Again);
            }
            let (below_gfn, below_role) = walk.below(view, role, gva, leaf);
            // SAFETY: both are of this VM.
            let known = match unsafe { page.target_in(&self.pin(), index) } {
                Target::Link(link) => {
                    // The page below is the right one only if it was made from the same frame, in
                    // the same role.
                    let page = pages.get(link.number);
                    let is_wanted =
                        page.gfn() == below_gfn && page.role() == below_role && page.is_alive(link.generation);
                    is_wanted.then_some(link)
                }
                _ => None,
            };
            reference = match known {
                Some(link) => link,
                None => {
                    let new = self.page_for::<Briefly>(below_gfn, below_role)??;
                    if walk.marks[usize::from(level.0) - 1] & ACCESSED == 0 {
                        self.count(Counter::EntriesSynced);
                    }
                    match self.link(view.mode, reference, index, seen, new, batch) {
                        Ok(()) => new,
                        Err(NotMade::BeingWritten | NotMade::Busy) => return Ok(Step::Later),
                        Err(_) => return Ok(Step::Again),
                    }
                }
            };
        }
    }

    /// Whether a leaf PTE of `level` can map `gfn`, as far as can be seen without the locks.
    fn may_be_leaf(&self, gfn: Gfn, level: Level) -> bool {
        if level == Level::L4K {
            return true;
        }
        let has_room = |level: Level| {
            let frame = self.shadow.frames.get(gfn, level);
            frame.is_some_and(|frame| frame.nr_tables().load(Ordering::Relaxed) == 0)
        };
        level <= Level::L1G && has_room(level) && self.second_stage(gfn).is_some_and(|second| second.level >= level)
    }
}
