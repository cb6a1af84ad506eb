//! Arm's stage 2 page tables built by hand. The constants here are the manual's, written once more.

use slat::format::Stage2;
use slat::{Access, Gfn, GfnRange, Gpa, Hpa, Level, PageSize};

use super::cached::PteCache;
use super::tests::{ACCESSES, ADDRESS, FRAME, Way, fault};
use super::{ALL_FETCHES, HardwareFormat, Mapping, Marks, Memory, Misconfiguration, Purpose, Stop, Walker};
use crate::hardware::commit::Scope;
use crate::hardware::commit::tests::uninterrupted;
use crate::hardware::tlb::Writes;

/// A table descriptor.
const LINK: u64 = 0b11;
/// MemAttr normal write-back, S2AP read and write, inner shareable.
const ATTRIBUTES: u64 = 0b1111 << 2 | 0b11 << 6 | 0b11 << 8;
const PAGE: u64 = 0b11 | ATTRIBUTES;
const BLOCK: u64 = 0b01 | ATTRIBUTES;
const AF: u64 = 1 << 10;
const XN: u64 = 1 << 54;

/// EC and WnR.
fn class(access: Access) -> u64 {
    match access {
        Access::Read => 0x24 << 26,
        Access::Write => 0x24 << 26 | 1 << 6,
        Access::Execute | Access::ExecuteUser => 0x20 << 26,
    }
}

/// Level 4 is the manual's level 0.
fn translation(level: u8) -> u64 {
    0b000100 | u64::from(4 - level)
}

fn permission(level: u8) -> u64 {
    0b001100 | u64::from(4 - level)
}

fn leaf(level: u8) -> u64 {
    let bits = if level == 1 { PAGE } else { BLOCK };
    FRAME & !((1 << (12 + 9 * (level - 1))) - 1) | bits
}

#[test]
fn maps_pages_of_each_size() {
    for (level, size) in [(1, PageSize::Size4K), (2, PageSize::Size2M), (3, PageSize::Size1G)] {
        let mask = size.size_bytes() - 1;
        for access in ACCESSES {
            let way = Way::new(LINK, level, leaf(level));
            let hpa = Hpa(FRAME & !mask | ADDRESS & mask);
            // There is no dirty bit: a write needs no walk of its own.
            let (writes, fetches, memory) = (Writes::Allowed, ALL_FETCHES, Memory::WriteBack);
            let expected = Ok(Mapping { gpa: Gpa(ADDRESS), hpa, size, writes, fetches, memory });
            assert_eq!(way.walk::<Stage2>(access), expected);
            assert_eq!(way.get(level), leaf(level) | AF, "nothing but the access flag");
            for above in level + 1..=4 {
                assert_eq!(way.get(above) & AF, 0, "tables have none");
            }
            assert_eq!(way.walk::<Stage2>(access), expected);
        }
        // Without the right to write.
        let way = Way::new(LINK, level, leaf(level) & !(1 << 7));
        assert_eq!(way.walk::<Stage2>(Access::Read).map(|mapping| mapping.writes), Ok(Writes::MustWalk));
    }
}

/// Every S2AP and XN, in leaves of every level.
#[test]
fn permissions_are_those_of_the_leaf() {
    for level in 1..=3 {
        for s2ap in 0..4_u64 {
            for xn in [0, XN] {
                for access in ACCESSES {
                    let entry = leaf(level) & !(0b11 << 6) | s2ap << 6 | xn;
                    let way = Way::new(LINK, level, entry);
                    let permitted = match access {
                        Access::Read => s2ap & 1 != 0,
                        Access::Write => s2ap & 2 != 0,
                        Access::Execute | Access::ExecuteUser => xn == 0,
                    };
                    let got = way.walk::<Stage2>(access);
                    if permitted {
                        assert!(got.is_ok(), "{s2ap:#b} {xn:#x} {access:?}: {got:?}");
                    } else {
                        assert_eq!(got, fault(access, class(access) | permission(level)));
                        assert_eq!(way.get(level), entry, "a denied access marks nothing");
                    }
                }
            }
        }
    }
}

#[test]
fn an_invalid_descriptor_may_have_any_other_bits() {
    for level in 1..=4 {
        let way = Way::new(LINK, 1, leaf(1));
        way.set(level, !1);
        for access in ACCESSES {
            assert_eq!(way.walk::<Stage2>(access), fault(access, class(access) | translation(level)));
        }
    }
    // A block at the manual's levels 0 and 3.
    for level in [1, 4] {
        let way = Way::new(LINK, level, FRAME & !((1 << 39) - 1) | BLOCK);
        assert_eq!(way.walk::<Stage2>(Access::Write), fault(Access::Write, 0x9000_0040 | translation(level)));
    }
}

#[test]
fn reserved_bits_and_encodings_are_misconfigurations() {
    // (level of the leaf, level of the entry, bits to be set)
    let mut cases = Vec::new();
    for level in 1..=3 {
        cases.extend([11, 48, 49, 50, 51, 52, 53].map(|bit| (level, level, 1_u64 << bit)));
    }
    for level in 2..=4 {
        cases.extend([48, 49, 50, 59, 60, 61, 62, 63].map(|bit| (1, level, 1_u64 << bit)));
    }
    cases.extend((12..21).map(|bit| (2, 2, 1_u64 << bit)));
    cases.extend((12..30).map(|bit| (3, 3, 1_u64 << bit)));
    for (at, level, bits) in cases {
        let way = Way::new(LINK, at, leaf(at));
        way.or(level, bits);
        let code = 0x24 << 26 | translation(level);
        let misconfiguration = Misconfiguration { gpa: Gpa(ADDRESS), level: Level(level), entry: way.get(level), code };
        assert_eq!(way.walk::<Stage2>(Access::Read), Err(Stop::Misconfigured(misconfiguration)), "{bits:#x} at {at}");
    }
    for mem_attr in 0..16 {
        let way = Way::new(LINK, 1, leaf(1) & !(0b1111 << 2) | mem_attr << 2);
        let is_bad = matches!(way.walk::<Stage2>(Access::Read), Err(Stop::Misconfigured(_)));
        assert_eq!(is_bad, matches!(mem_attr, 0b0100 | 0b1000 | 0b1100), "{mem_attr:#b}");
    }
    for shareability in 0..4 {
        let way = Way::new(LINK, 1, leaf(1) & !(0b11 << 8) | shareability << 8);
        let is_bad = matches!(way.walk::<Stage2>(Access::Read), Err(Stop::Misconfigured(_)));
        assert_eq!(is_bad, shareability == 1, "{shareability:#b}");
    }
}

#[test]
fn ignored_bits_are_ignored() {
    for bit in (2..12).chain(51..59) {
        for level in 2..=4 {
            let way = Way::new(LINK, 1, leaf(1));
            way.or(level, 1 << bit);
            assert!(way.walk::<Stage2>(Access::Write).is_ok(), "bit {bit} of level {level}");
        }
    }
    for level in 1..=3 {
        for bit in 55..64 {
            let way = Way::new(LINK, level, leaf(level) | 1 << bit);
            assert!(way.walk::<Stage2>(Access::Execute).is_ok(), "bit {bit} of level {level}");
        }
    }
}

#[test]
fn addresses_beyond_the_input_size_fault_at_the_top() {
    let mut way = Way::new(LINK, 1, leaf(1));
    for bit in [48, 49, 50, 63] {
        way.gpa = Gpa(ADDRESS | 1 << bit);
        match way.walk::<Stage2>(Access::Read) {
            Err(Stop::Fault(fault)) => assert_eq!((fault.gpa, fault.code), (way.gpa, 0x24 << 26 | 0b000100)),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn guest_tables_are_accessed_as_by_writes() {
    let way = Way::new(LINK, 1, leaf(1));
    assert!(way.walk_for::<Stage2>(Access::Read, Purpose::GuestTable).is_ok());
    way.clear(1, 1 << 7);
    // A data abort, S1PTW, WnR.
    let code = 0x24 << 26 | 1 << 7 | 1 << 6 | permission(1);
    assert_eq!(way.walk_for::<Stage2>(Access::Read, Purpose::GuestTable), fault(Access::Write, code));
}

/// With VTCR_EL2.HA clear: an access-flag fault, which comes before a permission fault.
#[test]
fn without_hardware_an_access_faults_until_the_flag_is_set() {
    for level in 1..=3 {
        for access in ACCESSES {
            for denied in [0, 0b11 << 6] {
                let entry = leaf(level) & !denied;
                let mut way = Way::new(LINK, level, entry);
                way.processor.marks = Marks::ByFaults;
                let flag = 0b001000 | u64::from(4 - level);
                assert_eq!(way.walk::<Stage2>(access), fault(access, class(access) | flag));
                assert_eq!(way.get(level), entry);
            }
            let mut way = Way::new(LINK, level, leaf(level) | AF);
            way.processor.marks = Marks::ByFaults;
            assert!(way.walk::<Stage2>(access).is_ok());
        }
    }
}

/// What may be cached: valid descriptors, and of leaves those with the access flag.
#[test]
fn a_cached_descriptor_serves_until_it_is_flushed() {
    const PAGE_OF_IT: GfnRange = GfnRange::new(Gfn(ADDRESS >> 12), 1);
    for level in 1..=3 {
        let cached = PteCache::default();
        let walk = |way: &Way, access| {
            uninterrupted(Stop::Restart, || {
                let walker = Walker { cached: Some(&cached), ..way.walker() };
                Stage2::walk(walker, Gpa(ADDRESS), access, Purpose::Data)
            })
        };
        // One that is not valid is not cached.
        let way = Way::new(LINK, level, 0);
        assert!(walk(&way, Access::Read).is_err());
        way.set(level, leaf(level) & !(1 << 7));
        let denied = fault(Access::Write, class(Access::Write) | permission(level));
        assert_eq!(walk(&way, Access::Write), denied);
        // Without the flag it is not cached either, though the access was denied.
        way.set(level, leaf(level));
        let before = walk(&way, Access::Write);
        assert!(before.is_ok());
        // With it, the right is.
        way.set(level, 0);
        assert_eq!(walk(&way, Access::Write), before, "still cached");
        cached.drop_range(Scope::Combined, PAGE_OF_IT);
        assert_eq!(walk(&way, Access::Write), before, "it is of the second stage");
        cached.drop_range(Scope::SecondStage, PAGE_OF_IT);
        assert!(walk(&way, Access::Write).is_err());
        way.set(level, leaf(level) & !(1 << 7) | AF);
        assert_eq!(walk(&way, Access::Write), denied);
        way.set(level, leaf(level) | AF);
        assert_eq!(walk(&way, Access::Write), denied, "the right that it lacked is cached");
        cached.drop_range(Scope::Leaves, PAGE_OF_IT);
        assert_eq!(walk(&way, Access::Write), before);
    }
}
