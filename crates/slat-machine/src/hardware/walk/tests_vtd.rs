//! VT-d's second-stage page tables built by hand, with three to five levels. The constants here are
//! the specification's, written once more.

use std::sync::Arc;

use slat::format::{CpuFeatures, Vtd};
use slat::{Access, Gpa, Hpa, Level, PageSize};

use super::tests::{ACCESSES, ADDRESS, FRAME, Page, Way, fault, maps_pages_of_each_size};
use super::{Fault, HardwareFormat, Mapping, Memory, Misconfiguration, Processor, Purpose, Stop, Walker};
use crate::hardware::commit::tests::uninterrupted;
use crate::hardware::commit::{FlushDomain, Port};
use crate::hardware::tlb::Writes;

const R: u64 = 1 << 0;
const W: u64 = 1 << 1;
const RW: u64 = R | W;
const PS: u64 = 1 << 7;
const A: u64 = 1 << 8;
const D: u64 = 1 << 9;
const SNP: u64 = 1 << 11;

fn reason(access: Access) -> u64 {
    if access == Access::Write { 0x85 } else { 0x86 }
}

/// A leaf of `level` with `bits`.
fn leaf(level: u8, bits: u64) -> u64 {
    FRAME & !((1 << (12 + 9 * (level - 1))) - 1) | bits | if level > 1 { PS } else { 0 }
}

#[test]
fn maps_pages_of_each_size_and_marks_them() {
    maps_pages_of_each_size::<Vtd>(RW, RW, [A, D, PS], Memory::ByAddress);
}

/// Every combination of R and W at each level, against the plain rule. A device fetches nothing: a
/// fetch is a read.
#[test]
fn permissions_of_all_levels_are_combined() {
    for level in 1..=4 {
        for rights in 0..4_u64 {
            for access in ACCESSES {
                let way = Way::new(RW, 1, leaf(1, RW));
                way.clear(level, RW & !rights);
                let got = way.walk::<Vtd>(access);
                let needed = if access == Access::Write { W } else { R };
                if rights & needed == 0 {
                    assert_eq!(got, fault(access, reason(access)), "{rights:#b} at {level}");
                    assert_eq!(way.get(1) & (A | D), 0, "a denied access marks nothing");
                } else {
                    assert!(got.is_ok(), "{rights:#b} {access:?}: {got:?}");
                }
            }
        }
    }
}

#[test]
fn an_entry_that_is_not_present_may_have_any_other_bits() {
    for level in 1..=4 {
        let way = Way::new(RW, 1, leaf(1, RW));
        way.set(level, !RW);
        for access in ACCESSES {
            assert_eq!(way.walk::<Vtd>(access), fault(access, reason(access)));
        }
    }
}

#[test]
fn reserved_bits_are_misconfigurations() {
    // (level of the leaf, level of the entry, bit to be set)
    let mut cases = Vec::new();
    for level in 1..=4 {
        // X, EMT, IPAT; two that old and new revisions reserve or define; SNP without snoop
        // control, and in a directory entry in any case.
        cases.extend([2, 3, 4, 5, 6, 11, 61, 62].map(|bit| (1, level, bit)));
    }
    cases.push((1, 4, 7));
    for level in 2..=3 {
        cases.extend([2, 3, 4, 5, 6, 11, 61, 62].map(|bit| (level, level, bit)));
    }
    cases.extend((12..21).map(|bit| (2, 2, bit)));
    cases.extend((12..30).map(|bit| (3, 3, bit)));
    for (at, level, bit) in cases {
        let way = Way::new(RW, at, leaf(at, RW));
        way.or(level, 1 << bit);
        let misconfiguration =
            Misconfiguration { gpa: Gpa(ADDRESS), level: Level(level), entry: way.get(level), code: 0x7a };
        assert_eq!(way.walk::<Vtd>(Access::Read), Err(Stop::Misconfigured(misconfiguration)), "bit {bit} of {level}");
    }
}

#[test]
fn snoop_control_allows_snp_in_leaves_alone() {
    for at in 1..=3 {
        let mut way = Way::new(RW, at, leaf(at, RW | SNP));
        assert!(matches!(way.walk::<Vtd>(Access::Read), Err(Stop::Misconfigured(_))));
        way.processor.features = CpuFeatures::SNOOP_CONTROL;
        assert!(way.walk::<Vtd>(Access::Write).is_ok());
        for above in at + 1..=4 {
            let entry = way.get(above);
            way.or(above, SNP);
            assert!(matches!(way.walk::<Vtd>(Access::Read), Err(Stop::Misconfigured(_))), "at {above}");
            way.set(above, entry);
        }
    }
}

#[test]
fn ignored_bits_are_ignored() {
    for bit in [9, 10].into_iter().chain(52..61).chain([63]) {
        for level in 1..=4 {
            let way = Way::new(RW, 1, leaf(1, RW));
            way.or(level, 1 << bit);
            assert!(way.walk::<Vtd>(Access::Write).is_ok(), "bit {bit} of level {level}");
        }
    }
    // PS of an entry of the lowest level.
    let way = Way::new(RW, 1, leaf(1, RW | PS));
    assert_eq!(way.walk::<Vtd>(Access::Read).map(|mapping| mapping.size), Ok(PageSize::Size4K));
}

#[test]
fn guest_tables_are_accessed_as_by_writes() {
    let way = Way::new(RW, 1, leaf(1, RW));
    assert!(way.walk_for::<Vtd>(Access::Read, Purpose::GuestTable).is_ok());
    assert_eq!(way.get(1) & (A | D), A | D);
    way.clear(1, W);
    assert_eq!(way.walk_for::<Vtd>(Access::Read, Purpose::GuestTable), fault(Access::Write, 0x85));
}

/// Page-table pages of `levels` on the way to an address, from the root down.
struct Tables {
    tables: Vec<Box<Page>>,
    port: Port,
    gpa: Gpa,
}

impl Tables {
    /// To the page at `gpa`.
    fn new(levels: u8, gpa: u64, bits: u64) -> Tables {
        let tables: Vec<_> = (0..levels).map(|_| Page::new()).collect();
        for (nth, table) in tables.iter().enumerate() {
            let level = levels - nth as u8;
            let entry = tables.get(nth + 1).map_or(FRAME | bits, |below| below.hpa().0 | RW);
            table.set(gpa >> (12 + 9 * (level - 1)) & 511, entry);
        }
        Tables { tables, port: Port::new(&Arc::new(FlushDomain::new())), gpa: Gpa(gpa) }
    }

    fn walk(&self, gpa: Gpa) -> Result<Mapping, Stop> {
        let processor = Processor { levels: self.tables.len() as u8, ..Processor::of::<Vtd>() };
        uninterrupted(Stop::Restart, || {
            let (root, generation) = (self.tables[0].hpa(), self.port.generation());
            let walker = Walker { port: &self.port, generation, root, processor, cached: None, log: None, memory: () };
            Vtd::walk(walker, gpa, Access::Read, Purpose::Data)
        })
    }
}

#[test]
fn each_number_of_levels_reaches_both_ends() {
    for (levels, bits) in [(3, 39), (4, 48), (5, 57)] {
        for gpa in [0, (1_u64 << bits) - 4096 + 0x18] {
            let tables = Tables::new(levels, gpa, RW);
            let hpa = Hpa(FRAME | gpa & 0xfff);
            let found = tables.walk(tables.gpa).unwrap();
            assert_eq!(
                (found.hpa, found.size, found.writes),
                (hpa, PageSize::Size4K, Writes::MustWalk),
                "{levels} levels"
            );
            let beyond = Gpa(gpa | 1 << bits);
            let expected = Fault { gpa: beyond, access: Access::Read, code: 0x83 };
            assert_eq!(tables.walk(beyond), Err(Stop::Fault(expected)), "{levels} levels");
        }
    }
}
