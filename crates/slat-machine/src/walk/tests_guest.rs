//! The two-dimensional walk: guest tables built by hand in a guest of a few pages.

use std::sync::Arc;

use slat::{Access, Ept, Gpa, Gva, Hpa, Npt, PageSize};

use super::guest::{self, GuestFault, GuestStop};
use super::tests::Page;
use super::{HardwareFormat, Mapping, Stop, Walker};
use crate::commit::{FlushDomain, Port};
use crate::tlb::Writes;

const PRESENT: u64 = 1;
const RW: u64 = 2;
const A: u64 = 1 << 5;
const D: u64 = 1 << 6;
const PS: u64 = 1 << 7;
const NX: u64 = 1 << 63;

/// Indexes 0, 3, 0, 5 and the offset 0x18.
pub(super) const GVA: u64 = 3 << 30 | 5 << 12 | 0x18;

/// Guest pages 0 to 3 are the guest's tables of levels 4 to 1, page 4 is data. The second stage maps them one by one.
pub(super) struct Guest {
    pages: [Box<Page>; 5],
    pub(super) second: [Box<Page>; 4],
    pub(super) port: Port,
    second_leaf: u64,
    indexes: [u64; 4],
}

impl Guest {
    pub(super) fn new(second_leaf: u64) -> Guest {
        let guest = Guest {
            pages: std::array::from_fn(|_| Page::new()),
            second: std::array::from_fn(|_| Page::new()),
            port: Port::new(&Arc::new(FlushDomain::new())),
            second_leaf,
            indexes: [0, 3, 0, 5],
        };
        for level in 0..3 {
            guest.second[level].set(0, guest.second[level + 1].hpa().0 | 7);
        }
        for page in 0..5 {
            guest.second[3].set(page, guest.pages[page as usize].hpa().0 | second_leaf);
            if page < 4 {
                guest.pages[page as usize].set(guest.indexes[page as usize], (page + 1) << 12 | PRESENT | RW);
            }
        }
        guest
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
            root: self.second[0].hpa(),
            log: None,
            counter: (),
        }
    }

    fn walk<F: HardwareFormat>(&self, access: Access) -> Result<Mapping, GuestStop> {
        guest::walk::<F, _>(self.walker(), Gpa(0), Gva(GVA), access)
    }
}

fn page_fault(error_code: u32) -> Result<Mapping, GuestStop> {
    Err(GuestStop::Guest(GuestFault::Page { gva: Gva(GVA), error_code }))
}

/// The second stage's accessed and dirty bits.
struct Marks {
    a: u64,
    d: u64,
}

fn all<F: HardwareFormat>(leaf: u64, writable_bit: u64, marks: Marks) {
    // A read sets A in all guest entries, D in none; guest table pages are dirty in the second stage, data is not.
    let guest = Guest::new(leaf);
    let hpa = Hpa(guest.pages[4].hpa().0 | 0x18);
    let expected = |writes| Ok(Mapping { gpa: Gpa(0x4018), hpa, size: PageSize::Size4K, writes });
    assert_eq!(guest.walk::<F>(Access::Read), expected(Writes::MustWalk));
    for level in 1..=4 {
        assert_eq!(guest.entry(level) & (A | D), A);
        assert_eq!(guest.second[3].get(4 - level as u64) & (marks.a | marks.d), marks.a | marks.d);
    }
    assert_eq!(guest.second[3].get(4) & (marks.a | marks.d), marks.a);
    assert_eq!(guest.walk::<F>(Access::Write), expected(Writes::Allowed));
    assert_eq!(guest.entry(1) & (A | D), A | D);
    assert_eq!(guest.entry(2) & D, 0);
    assert_eq!(guest.second[3].get(4) & (marks.a | marks.d), marks.a | marks.d);
    assert_eq!(guest.walk::<F>(Access::Read), expected(Writes::Allowed));

    // Dirty in the guest, not in the second stage: a write must walk, and the other way round.
    guest.second[3].set(4, guest.pages[4].hpa().0 | leaf);
    assert_eq!(guest.walk::<F>(Access::Read), expected(Writes::MustWalk));
    let guest = Guest::new(leaf | marks.d);
    assert_eq!(guest.walk::<F>(Access::Read).map(|mapping| mapping.writes), Ok(Writes::MustWalk));

    // The guest's own permissions, at each level.
    for level in 1..=4 {
        let guest = Guest::new(leaf);
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
        guest.set_entry(level, entry | 1 << 48);
        assert_eq!(guest.walk::<F>(Access::Write), page_fault(0xb));
    }
    for (level, bits) in [(4, PS), (3, PS | 1 << 13), (3, PS | 1 << 29), (2, PS | 1 << 13), (2, PS | 1 << 20)] {
        let guest = Guest::new(leaf);
        guest.set_entry(level, PRESENT | RW | bits);
        assert_eq!(guest.walk::<F>(Access::Read), page_fault(9), "level {level} bits {bits:#x}");
    }

    // A large guest page over small second-stage pages: the translation is a small one.
    for level in [2, 3] {
        let guest = Guest::new(leaf);
        guest.set_entry(level, PRESENT | RW | PS);
        guest.second[3].set(5, guest.pages[4].hpa().0 | leaf);
        assert_eq!(guest.walk::<F>(Access::Write), expected_small(&guest));
    }

    // The second stage denies: guest tables, then the page.
    for (page, access) in
        [(0, Access::Write), (1, Access::Write), (2, Access::Write), (3, Access::Write), (4, Access::Read)]
    {
        let guest = Guest::new(leaf);
        guest.second[3].set(page, 0);
        let gpa = if page == 4 { page << 12 | 0x18 } else { page << 12 | (guest.indexes[page as usize] * 8) };
        match guest.walk::<F>(Access::Read) {
            Err(GuestStop::SecondStage(Stop::Fault(fault))) => {
                assert_eq!((fault.gpa, fault.access), (Gpa(gpa), access));
            }
            other => panic!("{other:?}"),
        }
    }
    let guest = Guest::new(leaf);
    guest.second[3].set(2, guest.pages[2].hpa().0 | leaf & !writable_bit);
    assert!(
        matches!(guest.walk::<F>(Access::Read), Err(GuestStop::SecondStage(Stop::Fault(_)))),
        "a guest table in read-only memory"
    );
    assert_eq!(guest.second_leaf, leaf);
}

fn expected_small(guest: &Guest) -> Result<Mapping, GuestStop> {
    let hpa = Hpa(guest.pages[4].hpa().0 | 0x18);
    Ok(Mapping { gpa: Gpa(0x5018), hpa, size: PageSize::Size4K, writes: Writes::Allowed })
}

#[test]
fn two_dimensional_walk_over_ept() {
    all::<Ept>(7 | 6 << 3, 2, Marks { a: 1 << 8, d: 1 << 9 });
}

#[test]
fn two_dimensional_walk_over_npt() {
    all::<Npt>(7, 2, Marks { a: 1 << 5, d: 1 << 6 });
    let guest = Guest::new(7);
    guest.set_entry(4, guest.entry(4) | 1 << 8);
    assert_eq!(guest.walk::<Npt>(Access::Read), page_fault(9));
}

#[test]
fn addresses_must_be_canonical() {
    let guest = Guest::new(7);
    for gva in [1 << 47, u64::MAX >> 1, !(1 << 47)] {
        let got = guest::walk::<Npt, _>(guest.walker(), Gpa(0), Gva(gva), Access::Read);
        assert_eq!(got, Err(GuestStop::Guest(GuestFault::NonCanonical { gva: Gva(gva) })), "{gva:#x}");
    }
}
