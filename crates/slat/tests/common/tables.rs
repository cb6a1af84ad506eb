//! A reference walk: what hardware finds in the page tables.

use std::sync::atomic::{AtomicU64, Ordering};

use slat::format::{Format, Pte};
use slat::{Access, Gfn, Gpa, Hpa, Level, Pfn, Vm};

use super::{IN_MEMORY, POISON, TestHost, hooked};

/// The translation of an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Translation {
    /// Frame of the 4 KiB page.
    pub pfn: Pfn,
    pub level: Level,
    pub writable: bool,
    pub pte: Pte,
}

/// The lowest PTE for `gfn`: its address, its value, its level.
pub fn walk<F: Format>(host: &TestHost, root: Hpa, gfn: Gfn) -> (*mut u64, Pte, Level) {
    walk_with::<F>(host, root, gfn, |_| ())
}

/// [`walk`] that passes each directory entry on the way to `through`.
fn walk_with<F: Format>(host: &TestHost, root: Hpa, gfn: Gfn, through: impl FnMut(Pte)) -> (*mut u64, Pte, Level) {
    hooked::without_looks(|| walk_quietly::<F>(host, root, gfn, through))
}

fn walk_quietly<F: Format>(
    host: &TestHost,
    root: Hpa,
    gfn: Gfn,
    mut through: impl FnMut(Pte),
) -> (*mut u64, Pte, Level) {
    let (mut table, mut level) = (root, F::ROOT_LEVEL);
    loop {
        let nr_entries = if level == F::ROOT_LEVEL { F::MAX_ROOT_ENTRIES } else { F::TABLE_ENTRIES };
        let index = (gfn.0 / level.nr_pages()) as usize % nr_entries;
        // SAFETY: inside a live page-table page.
        let cell = unsafe { host.page(table).cast::<u64>().add(index) };
        // SAFETY: as above; atomic, because other threads may write.
        let cached = Pte(unsafe { AtomicU64::from_ptr(cell) }.load(Ordering::SeqCst));
        // SAFETY: as above.
        let entry = if F::HAS_INCOHERENT_WALKERS { unsafe { in_memory::<F>(cell, cached) } } else { cached };
        assert_ne!(entry.0, POISON, "a walk for {gfn} in a table that was freed");
        if !F::is_present(entry) || F::is_leaf(entry, level) {
            return (cell, entry, level);
        }
        through(entry);
        table = F::address(entry, level);
        level = Level(level.0 - 1);
    }
}

/// What a walker reads that looks past the CPUs' caches, where these have `cached`. A and D are as
/// they are there: the tests set them as hardware would.
///
/// # Safety
/// `cell` is in a live page-table page.
unsafe fn in_memory<F: Format>(cell: *mut u64, cached: Pte) -> Pte {
    // SAFETY: behind each page-table page is its memory.
    let cell = unsafe { cell.byte_add(IN_MEMORY) };
    // SAFETY: as above.
    let found = unsafe { AtomicU64::from_ptr(cell) }.load(Ordering::SeqCst);
    if (found ^ cached.0) & !(F::ACCESSED | F::DIRTY) == 0 { cached } else { Pte(found) }
}

/// The PTEs of a page-table page.
pub fn entries_of(host: &TestHost, table: Hpa) -> [u64; 512] {
    std::array::from_fn(|index| {
        // SAFETY: inside a live page-table page.
        let cell = unsafe { host.page(table).cast::<u64>().add(index) };
        // SAFETY: as above; atomic, because other threads may write.
        unsafe { AtomicU64::from_ptr(cell) }.load(Ordering::SeqCst)
    })
}

/// Address of the lowest PTE for `gfn`, and its level.
pub fn lowest_entry<F: Format>(host: &TestHost, root: Hpa, gfn: Gfn) -> (*mut u64, Level) {
    let (cell, _, level) = walk::<F>(host, root, gfn);
    (cell, level)
}

/// Walks as hardware does, at a moment when no page-table page is freed; else see `guest`.
pub fn translate<F: Format>(vm: &Vm<TestHost, F>, gpa: Gpa) -> Option<Translation> {
    let mut writable = true;
    let (_, entry, level) = walk_with::<F>(vm.host(), vm.root(), gpa.gfn(), |entry| {
        // Each PTE on the way must allow it, in formats whose directory entries have rights.
        writable &= F::GENERATION == 0 || entry.0 & F::WRITABLE == F::WRITABLE;
    });
    F::is_present(entry).then(|| Translation {
        pfn: Pfn(hooked::without_looks(|| F::address(entry, level)).pfn().0 + gpa.gfn().0 % level.nr_pages()),
        level,
        writable: writable && entry.0 & F::WRITABLE == F::WRITABLE,
        pte: entry,
    })
}

/// What hardware does at an access that the leaf `found` at `gpa` allows: sets A, and D for a write
/// if the format has D. Returns whether the leaf was still there and allowed it. The caller keeps
/// its page-table page from being freed.
pub fn set_accessed_and_dirty<F: Format>(vm: &Vm<TestHost, F>, gpa: Gpa, found: Translation, access: Access) -> bool {
    let (cell, entry, level) = walk::<F>(vm.host(), vm.root(), gpa.gfn());
    if entry != found.pte || level != found.level || (access == Access::Write && !found.writable) {
        return false;
    }
    let bits = F::ACCESSED | if access == Access::Write && F::HAS_DIRTY_BIT { F::DIRTY } else { 0 };
    // SAFETY: a PTE of a live page-table page, as the caller promises; by compare-and-exchange, as
    // hardware does it.
    let cell = unsafe { AtomicU64::from_ptr(cell) };
    cell.compare_exchange(entry.0, entry.0 | bits, Ordering::SeqCst, Ordering::SeqCst).is_ok()
}
