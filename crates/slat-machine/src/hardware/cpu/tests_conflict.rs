//! A CPU of a format with break before make detects a change without it; one of another format goes
//! on.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use slat::format::Format;
use slat::{Gfn, GfnRange, Level, PageSize};

use super::tests::{Memory, page};
use super::*;
use crate::hardware::commit::{FlushDomain, Scope};
use crate::memory::{Backing, BackingKind};

/// PTEs of the level above the lowest, for 2 MiB of contiguous memory.
struct Entries {
    table: u64,
    huge: u64,
}

/// Flushes the page on this CPU, and has changed nothing.
struct Spurious;

impl FaultHandler for Spurious {
    fn handle_fault(&mut self, fault: Fault) -> Result<Outcome, slat::error::FaultError> {
        flush_local(fault.gpa);
        Ok(Outcome::Resume)
    }
}

/// Pages 0 to 511 by one huge leaf or by a page-table page, as the test wants.
struct Guest<F> {
    memory: Arc<Memory>,
    _backing: Backing,
    domain: Arc<FlushDomain>,
    entries: Entries,
    cpu: Cpu<Spurious, F>,
}

/// A leaf PTE as the engine makes it, used and written.
fn leaf<F: HardwareFormat>(address: u64, level: Level) -> u64 {
    F::leaf(Hpa(address).pfn(), level).0 | F::ACCESSED | F::DIRTY | F::WRITABLE
}

impl<F: HardwareFormat> Guest<F> {
    fn new() -> Guest<F> {
        let backing = Backing::new(BackingKind::Anonymous, 4 << 20).unwrap();
        let block = phys::hpa_of(backing.as_ptr()).0.next_multiple_of(PageSize::Size2M.size_bytes());
        let memory = Memory::new(3);
        let link = |above: usize, below: usize| memory.tables[above].set(0, F::table(memory.tables[below].hpa()).0);
        let root = match F::ROOT_LEVEL.0 {
            5 => 4,
            level => 4 - usize::from(level),
        };
        link(4, 0);
        link(0, 1);
        link(1, 2);
        for gfn in 0..512 {
            memory.leaf(gfn).store(leaf::<F>(block + (gfn << 12), Level::L4K), Ordering::Relaxed);
        }
        let entries = Entries { table: F::table(memory.tables[3].hpa()).0, huge: leaf::<F>(block, Level::L2M) };
        let domain = Arc::new(FlushDomain::new());
        let cpu = Cpu::new(Spurious, Port::new(&domain), 1, memory.tables[root].hpa(), Geometry::default());
        Guest { memory, _backing: backing, domain, entries, cpu }
    }

    fn make(&self, entry: u64) {
        self.memory.tables[2].set(0, entry);
    }
}

/// Touches page 3; a huge leaf replaces the page-table page; page 4 is touched, and page 3 again.
fn make_huge<F: HardwareFormat>(flush: Option<GfnRange>) -> Result<(), CpuError> {
    let mut guest = Guest::<F>::new();
    guest.make(guest.entries.table);
    guest.cpu.write(Gva(0x3000), 1)?;
    if let Some(range) = flush {
        guest.make(0);
        guest.domain.flush(&[range]);
    }
    guest.make(guest.entries.huge);
    guest.cpu.write(Gva(0x4000), 2)?;
    guest.cpu.write(Gva(0x3000), 3)
}

/// As [`make_huge`], where the flush comes before the break, and page 3 is touched between the two.
fn flush_before_the_break<F: HardwareFormat>() -> Result<(), CpuError> {
    let mut guest = Guest::<F>::new();
    guest.make(guest.entries.table);
    guest.domain.flush(&[GfnRange::new(Gfn(0), 512)]);
    guest.cpu.write(Gva(0x3000), 1)?;
    guest.make(0);
    guest.make(guest.entries.huge);
    guest.cpu.write(Gva(0x4000), 2)
}

/// The result of an access to page 4 without break before make. A format that does not need it uses
/// either translation.
fn conflict<F: Format>(cached: PageSize, walked: PageSize) -> Result<(), CpuError> {
    if F::BREAK_BEFORE_MAKE { Err(CpuError::TlbConflict { gpa: Gpa(0x4000), cached, walked }) } else { Ok(()) }
}

#[test]
fn a_huge_page_over_cached_small_ones_is_a_conflict_where_there_are_any() {
    let all = GfnRange::new(Gfn(0), 512);
    slat::for_each_format!(F => {
        let conflict = conflict::<F>(PageSize::Size4K, PageSize::Size2M);
        assert_eq!(make_huge::<F>(None), conflict, "{}", F::NAME);
        assert_eq!(flush_before_the_break::<F>(), conflict, "{}", F::NAME);
        assert_eq!(make_huge::<F>(Some(page(7))), conflict, "{}: another page was flushed", F::NAME);
        assert_eq!(make_huge::<F>(Some(all)), Ok(()), "{}", F::NAME);
    });
}

/// Reads page 3 through a huge leaf that cannot be written; a page-table page replaces it; page 4
/// is written. A cached huge page hides the small ones, until an access needs more rights.
fn make_small<F: HardwareFormat>(flush: Option<GfnRange>) -> Result<(), CpuError> {
    let mut guest = Guest::<F>::new();
    guest.make(guest.entries.huge & !F::WRITABLE);
    guest.cpu.read(Gva(0x3000)).unwrap();
    if let Some(range) = flush {
        guest.make(0);
        guest.domain.flush(&[range]);
    }
    guest.make(guest.entries.table);
    guest.cpu.write(Gva(0x4000), 1)
}

#[test]
fn a_small_page_beside_a_cached_huge_one_is_a_conflict_where_there_are_any() {
    slat::for_each_format!(F => {
        let conflict = conflict::<F>(PageSize::Size2M, PageSize::Size4K);
        assert_eq!(make_small::<F>(None), conflict, "{}", F::NAME);
        assert_eq!(make_small::<F>(Some(page(512))), conflict, "{}: another page was flushed", F::NAME);
        assert_eq!(make_small::<F>(Some(page(511))), Ok(()), "{}: any part of it", F::NAME);
    });
}

/// What page 4 is when the page-table page that maps it was replaced by another one. The CPU has
/// read page 3 through the first.
fn through_the_other_table<F: HardwareFormat>(scope: Option<Scope>) -> u64 {
    let mut guest = Guest::<F>::new();
    let (first, other) = (&guest.memory.pages[0], &guest.memory.pages[1]);
    let leaf = |at: &crate::hardware::walk::tests::Page| leaf::<F>(at.hpa().0, Level::L4K);
    guest.memory.leaf(4).store(leaf(first), Ordering::Relaxed);
    guest.memory.pages[2].set(4, leaf(other));
    other.set(0, 7);
    guest.make(guest.entries.table);
    guest.cpu.read(Gva(0x3000)).unwrap();
    // Broken, and made.
    guest.make(0);
    if let Some(scope) = scope {
        guest.domain.invalidate(scope, &[GfnRange::new(Gfn(0), 512)]);
    }
    guest.make(F::table(guest.memory.pages[2].hpa()).0);
    guest.cpu.read(Gva(0x4000)).unwrap()
}

#[test]
fn a_walk_goes_on_through_a_broken_directory_entry_until_it_is_flushed() {
    slat::for_each_format!(F => {
        let stale = if F::CACHES_PTES { 0 } else { 7 };
        assert_eq!(through_the_other_table::<F>(None), stale, "{}", F::NAME);
        assert_eq!(through_the_other_table::<F>(Some(Scope::Leaves)), stale, "{}: it is no leaf", F::NAME);
        assert_eq!(through_the_other_table::<F>(Some(Scope::Combined)), stale, "{}: it is of stage 2", F::NAME);
        assert_eq!(through_the_other_table::<F>(Some(Scope::SecondStage)), 7, "{}", F::NAME);
        assert_eq!(through_the_other_table::<F>(Some(Scope::All)), 7, "{}", F::NAME);
    });
}
