//! The two-dimensional walk: guest page tables built by hand in a guest of a few pages.

use std::sync::Arc;

use slat::format::{Ept, Npt, Stage2, Sv39x4, Sv48x4, Vtd};
use slat::shadow::Gva;
use slat::{Access, Gpa, Hpa, PageSize};

use super::guest::{self, GuestFault, GuestStop};
use super::tests::Page;
use super::tests_manuals::{EPT, Manual, NPT, STAGE2, SV39X4, SV48X4, VTD};
use super::{ALL_FETCHES, HardwareFormat, Mapping, Memory, Stop, Walker};
use crate::hardware::commit::tests::uninterrupted;
use crate::hardware::commit::{FlushDomain, Port};
use crate::hardware::tlb::Writes;

const PRESENT: u64 = 1;
const RW: u64 = 2;
const A: u64 = 1 << 5;
const D: u64 = 1 << 6;
const PS: u64 = 1 << 7;
const NX: u64 = 1 << 63;

/// Indexes 0, 3, 0, 5 and the offset 0x18.
pub(super) const GVA: u64 = 3 << 30 | 5 << 12 | 0x18;

/// Guest pages 0 to 3 are the guest's page-table pages of levels 4 to 1, page 4 is data. The second
/// stage maps them one by one.
pub(super) struct Guest {
    pages: Box<[Page; 5]>,
    pub(super) second: Box<[Page; 4]>,
    pub(super) port: Port,
    manual: Manual,
    indexes: [u64; 4],
}

impl Guest {
    pub(super) fn new(manual: &Manual) -> Guest {
        let guest = Guest {
            pages: Box::new([const { Page::new() }; 5]),
            second: Box::new([const { Page::new() }; 4]),
            port: Port::new(&Arc::new(FlushDomain::new())),
            manual: *manual,
            indexes: [0, 3, 0, 5],
        };
        for level in 0..3 {
            guest.second[level].set(0, manual.entry(guest.second[level + 1].hpa().0, manual.link));
        }
        for page in 0..5 {
            guest.set_leaf(page, page, manual.page);
            if page < 4 {
                guest.pages[page as usize].set(guest.indexes[page as usize], (page + 1) << 12 | PRESENT | RW);
            }
        }
        guest
    }

    /// Maps guest page `gfn` to memory page `page`.
    fn set_leaf(&self, gfn: u64, page: u64, leaf: u64) {
        self.second[3].set(gfn, self.manual.entry(self.pages[page as usize].hpa().0, leaf));
    }

    fn entry(&self, level: usize) -> u64 {
        self.pages[4 - level].get(self.indexes[4 - level])
    }

    fn set_entry(&self, level: usize, entry: u64) {
        self.pages[4 - level].set(self.indexes[4 - level], entry);
    }

    pub(super) fn walker(&self) -> Walker<'_> {
        Walker {
            port: &self.port,
            generation: self.port.generation(),
            root: self.second[4 - usize::from(self.manual.levels())].hpa(),
            processor: self.manual.processor,
            cached: None,
            log: None,
            memory: (),
        }
    }

    fn walk<F: HardwareFormat>(&self, access: Access) -> Result<Mapping, GuestStop> {
        let interrupted = GuestStop::SecondStage(Stop::Restart);
        uninterrupted(interrupted, || guest::walk::<F, _>(self.walker(), Gpa(0), Gva(GVA), access))
    }
}

fn page_fault(error_code: u32) -> Result<Mapping, GuestStop> {
    Err(GuestStop::Guest(GuestFault::Page { gva: Gva(GVA), error_code }))
}

/// The translation of a page that may be executed.
fn executable(page: u64, hpa: Hpa, writes: Writes, memory: Memory) -> Result<Mapping, GuestStop> {
    let (gpa, size, fetches) = (Gpa(page << 12 | 0x18), PageSize::Size4K, ALL_FETCHES);
    Ok(Mapping { gpa, hpa, size, writes, fetches, memory })
}

fn all<F: HardwareFormat>(manual: &Manual) {
    let Manual { page: leaf, accessed, dirty, memory, .. } = *manual;
    // A read sets A in all PTEs of the guest, D in none; page-table pages of the guest are dirty in
    // the second stage, data is not.
    let guest = Guest::new(manual);
    let hpa = Hpa(guest.pages[4].hpa().0 | 0x18);
    let expected = |writes| executable(4, hpa, writes, memory);
    assert_eq!(guest.walk::<F>(Access::Read), expected(Writes::MustWalk));
    for level in 1..=4 {
        assert_eq!(guest.entry(level) & (A | D), A);
        assert_eq!(guest.second[3].get(4 - level as u64) & (accessed | dirty), accessed | dirty);
    }
    assert_eq!(guest.second[3].get(4) & (accessed | dirty), accessed);
    assert_eq!(guest.walk::<F>(Access::Write), expected(Writes::Allowed));
    assert_eq!(guest.entry(1) & (A | D), A | D);
    assert_eq!(guest.entry(2) & D, 0);
    assert_eq!(guest.second[3].get(4) & (accessed | dirty), accessed | dirty);
    assert_eq!(guest.walk::<F>(Access::Read), expected(Writes::Allowed));

    // Dirty in the guest, not in the second stage: a write must walk, and the other way round.
    // Without dirty bits there is none to set.
    guest.set_leaf(4, 4, leaf);
    let writes = if dirty == 0 { Writes::Allowed } else { Writes::MustWalk };
    assert_eq!(guest.walk::<F>(Access::Read), expected(writes));
    let guest = Guest::new(&Manual { page: leaf | dirty, ..*manual });
    assert_eq!(guest.walk::<F>(Access::Read).map(|mapping| mapping.writes), Ok(Writes::MustWalk));

    // The guest's own permissions, at each level.
    for level in 1..=4 {
        let guest = Guest::new(manual);
        let entry = guest.entry(level);
        guest.set_entry(level, entry & !RW);
        assert_eq!(guest.walk::<F>(Access::Write), page_fault(3));
        assert_eq!(guest.entry(4) & A, 0);
        assert!(guest.walk::<F>(Access::Read).is_ok());
        guest.set_entry(level, entry | NX);
        assert_eq!(guest.walk::<F>(Access::Execute), page_fault(0x11));
        assert!(guest.walk::<F>(Access::Write).is_ok());
        guest.set_entry(level, entry & !PRESENT);
        assert_eq!(guest.walk::<F>(Access::Read), page_fault(0));
        assert_eq!(guest.walk::<F>(Access::Write), page_fault(2));
        assert_eq!(guest.walk::<F>(Access::Execute), page_fault(0x10));
        // Reserved: address bits beyond the guest's.
        guest.set_entry(level, entry | 1 << F::GUEST_PHYSICAL_BITS);
        assert_eq!(guest.walk::<F>(Access::Write), page_fault(0xb));
    }
    for (level, bits) in [(4, PS), (3, PS | 1 << 13), (3, PS | 1 << 29), (2, PS | 1 << 13), (2, PS | 1 << 20)] {
        let guest = Guest::new(manual);
        guest.set_entry(level, PRESENT | RW | bits);
        assert_eq!(guest.walk::<F>(Access::Read), page_fault(9), "level {level} bits {bits:#x}");
    }

    // A large guest page over small second-stage pages: the translation is a small one.
    for level in [2, 3] {
        let guest = Guest::new(manual);
        guest.set_entry(level, PRESENT | RW | PS);
        guest.set_leaf(5, 4, leaf);
        let hpa = Hpa(guest.pages[4].hpa().0 | 0x18);
        assert_eq!(guest.walk::<F>(Access::Write), executable(5, hpa, Writes::Allowed, memory));
    }

    // The second stage denies: page-table pages of the guest, then the page.
    for (page, access) in
        [(0, Access::Write), (1, Access::Write), (2, Access::Write), (3, Access::Write), (4, Access::Read)]
    {
        let guest = Guest::new(manual);
        guest.second[3].set(page, 0);
        let gpa = if page == 4 { page << 12 | 0x18 } else { page << 12 | (guest.indexes[page as usize] * 8) };
        match guest.walk::<F>(Access::Read) {
            Err(GuestStop::SecondStage(Stop::Fault(fault))) => {
                assert_eq!((fault.gpa, fault.access), (Gpa(gpa), access));
            }
            other => panic!("{other:?}"),
        }
    }
    let guest = Guest::new(manual);
    guest.set_leaf(2, 2, leaf & !manual.writable);
    assert!(
        matches!(guest.walk::<F>(Access::Read), Err(GuestStop::SecondStage(Stop::Fault(_)))),
        "a guest table in read-only memory"
    );
}

#[test]
fn two_dimensional_walks() {
    all::<Ept>(&EPT);
    all::<Npt>(&NPT);
    all::<Stage2>(&STAGE2);
    all::<Vtd>(&VTD);
    all::<Sv48x4>(&SV48X4);
    all::<Sv39x4>(&SV39X4);
}

#[test]
fn amd_reserves_another_bit_of_a_root_entry() {
    let guest = Guest::new(&NPT);
    guest.set_entry(4, guest.entry(4) | 1 << 8);
    assert_eq!(guest.walk::<Npt>(Access::Read), page_fault(9));
}

#[test]
fn addresses_must_be_canonical() {
    let guest = Guest::new(&NPT);
    for gva in [1 << 47, u64::MAX >> 1, !(1 << 47)] {
        let got = guest::walk::<Npt, _>(guest.walker(), Gpa(0), Gva(gva), Access::Read);
        assert_eq!(got, Err(GuestStop::Guest(GuestFault::NonCanonical { gva: Gva(gva) })), "{gva:#x}");
    }
}
