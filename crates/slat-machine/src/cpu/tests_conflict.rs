//! A CPU of a format with break before make detects a change without it; one of another format goes
//! on.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use slat::format::{Npt, Stage2, Sv48x4};
use slat::{Gfn, GfnRange, PageSize};

use super::tests::{Idle, Memory, page};
use super::*;
use crate::commit::FlushDomain;
use crate::memory::{Backing, BackingKind};

/// PTEs of the level above the lowest, for 2 MiB of contiguous memory.
struct Entries {
    table: u64,
    huge: u64,
}

/// Pages 0 to 511 by one huge leaf or by a page-table page, as the test wants.
struct Guest<F> {
    memory: Arc<Memory>,
    _backing: Backing,
    domain: Arc<FlushDomain>,
    entries: Entries,
    cpu: Cpu<Idle, F>,
}

/// The PTEs of a format: the shift of the address, and the bits of each kind.
struct Bits {
    shift: u32,
    table: u64,
    huge: u64,
    page: u64,
}

const NPT: Bits = Bits { shift: 0, table: 7, huge: 0x87 | 0x60, page: 7 | 0x60 };
/// Write-back, read and write, access flag set.
const STAGE2: Bits = Bits { shift: 0, table: 3, huge: 0x4fd, page: 0x4ff };
const GSTAGE: Bits = Bits { shift: 2, table: 1, huge: 0xdf, page: 0xdf };

impl<F: HardwareFormat> Guest<F> {
    fn new(bits: &Bits) -> Guest<F> {
        let backing = Backing::new(BackingKind::Anonymous, 4 << 20).unwrap();
        let block = phys::hpa_of(backing.as_ptr()).0.next_multiple_of(PageSize::Size2M.size_bytes());
        let memory = Memory::new(0);
        let entry = |address: u64, kind| address >> bits.shift | kind;
        for level in 0..2 {
            memory.tables[level].set(0, entry(memory.tables[level + 1].hpa().0, bits.table));
        }
        for gfn in 0..512 {
            memory.leaf(gfn).store(entry(block + (gfn << 12), bits.page), Ordering::Relaxed);
        }
        let entries = Entries { table: entry(memory.tables[3].hpa().0, bits.table), huge: entry(block, bits.huge) };
        let domain = Arc::new(FlushDomain::new());
        let cpu = Cpu::new(Idle, Port::new(&domain), 1, memory.tables[0].hpa(), Geometry::default());
        Guest { memory, _backing: backing, domain, entries, cpu }
    }

    fn make(&self, entry: u64) {
        self.memory.tables[2].set(0, entry);
    }
}

/// Touches page 3; a huge leaf replaces the page-table page; page 4 is touched, and page 3 again.
fn make_huge<F: HardwareFormat>(bits: &Bits, flush: Option<GfnRange>) -> Result<(), CpuError> {
    let mut guest = Guest::<F>::new(bits);
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

#[test]
fn a_huge_page_over_cached_small_ones_is_a_conflict_where_there_are_any() {
    let all = GfnRange::new(Gfn(0), 512);
    let conflict = CpuError::TlbConflict { gpa: Gpa(0x4000), cached: PageSize::Size4K, walked: PageSize::Size2M };
    assert_eq!(make_huge::<Stage2>(&STAGE2, None), Err(conflict));
    assert_eq!(make_huge::<Stage2>(&STAGE2, Some(page(7))), Err(conflict), "another page was flushed");
    assert_eq!(make_huge::<Stage2>(&STAGE2, Some(all)), Ok(()));
    // Other formats use either translation.
    assert_eq!(make_huge::<Npt>(&NPT, None), Ok(()));
    assert_eq!(make_huge::<Sv48x4>(&GSTAGE, None), Ok(()));
}

/// A cached huge page hides the small ones, until an access needs more rights.
#[test]
fn a_small_page_beside_a_cached_huge_one_is_a_conflict_where_there_are_any() {
    let read_only = |bits: &Bits, write: u64| Bits { huge: bits.huge & !write, ..*bits };
    let touch = |flush: Option<GfnRange>| {
        let mut guest = Guest::<Stage2>::new(&read_only(&STAGE2, 1 << 7));
        guest.make(guest.entries.huge);
        guest.cpu.read(Gva(0x3000)).unwrap();
        if let Some(range) = flush {
            guest.make(0);
            guest.domain.flush(&[range]);
        }
        guest.make(guest.entries.table);
        guest.cpu.write(Gva(0x4000), 1)
    };
    let conflict = CpuError::TlbConflict { gpa: Gpa(0x4000), cached: PageSize::Size2M, walked: PageSize::Size4K };
    assert_eq!(touch(None), Err(conflict));
    assert_eq!(touch(Some(page(512))), Err(conflict), "another page was flushed");
    assert_eq!(touch(Some(page(511))), Ok(()), "any part of it");

    let mut guest = Guest::<Npt>::new(&read_only(&NPT, 1 << 1));
    guest.make(guest.entries.huge);
    guest.cpu.read(Gva(0x3000)).unwrap();
    guest.make(guest.entries.table);
    assert_eq!(guest.cpu.write(Gva(0x4000), 1), Ok(()));
}
