//! The second-stage walkers on page tables built by hand. The constants here are the manuals',
//! written once more.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use slat::format::{Ept, Format, Npt, Stage2, Vtd};
use slat::{Access, Gpa, Hpa, Level, PageSize};

use super::{ALL_FETCHES, Fault, HardwareFormat, Mapping, Memory, Misconfiguration, Processor, Purpose, Stop, Walker};
use crate::hardware::commit::tests::uninterrupted;
use crate::hardware::commit::{FlushDomain, Port};
use crate::hardware::tlb::Writes;
use crate::memory::phys;

/// A page of memory.
#[repr(align(4096))]
pub(super) struct Page([AtomicU64; 512]);

impl Page {
    pub(super) fn new() -> Box<Page> {
        Box::new(Page([const { AtomicU64::new(0) }; 512]))
    }

    pub(super) fn hpa(&self) -> Hpa {
        phys::hpa_of(self.0.as_ptr())
    }

    pub(super) fn get(&self, index: u64) -> u64 {
        self.0[index as usize].load(Ordering::Relaxed)
    }

    pub(super) fn set(&self, index: u64, entry: u64) {
        self.0[index as usize].store(entry, Ordering::Relaxed);
    }
}

/// The page-table pages on the way to one address, from level 4 down to 1.
pub(super) struct Way {
    tables: [Box<Page>; 4],
    indexes: [u64; 4],
    pub(super) port: Port,
    pub(super) gpa: Gpa,
    /// One with four levels and 48 bits, unless the test has another.
    pub(super) processor: Processor,
}

pub(super) const FRAME: u64 = phys::BIAS | 0x12_3456_7000;
/// Indexes 1, 2, 3, 4 and the offset 0x568.
pub(super) const ADDRESS: u64 = 1 << 39 | 2 << 30 | 3 << 21 | 4 << 12 | 0x568;

impl Way {
    /// Page-table pages linked by `link` bits, and `leaf` (address and bits) as the PTE of `level`.
    pub(super) fn new(link: u64, level: u8, leaf: u64) -> Way {
        let way = Way {
            tables: std::array::from_fn(|_| Page::new()),
            indexes: [1, 2, 3, 4],
            port: Port::new(&Arc::new(FlushDomain::new())),
            gpa: Gpa(ADDRESS),
            processor: Processor::of::<Npt>(),
        };
        for above in level + 1..=4 {
            way.set(above, way.tables[usize::from(5 - above)].hpa().0 | link);
        }
        way.set(level, leaf);
        way
    }

    /// The address of the page-table page of level 1; the index of its PTE is 4.
    pub(super) fn lowest_table(&self) -> Hpa {
        self.tables[3].hpa()
    }

    pub(super) fn set(&self, level: u8, entry: u64) {
        let at = usize::from(4 - level);
        self.tables[at].set(self.indexes[at], entry);
    }

    pub(super) fn get(&self, level: u8) -> u64 {
        let at = usize::from(4 - level);
        self.tables[at].get(self.indexes[at])
    }

    pub(super) fn or(&self, level: u8, bits: u64) {
        self.set(level, self.get(level) | bits);
    }

    pub(super) fn clear(&self, level: u8, bits: u64) {
        self.set(level, self.get(level) & !bits);
    }

    pub(super) fn walker(&self) -> Walker<'_> {
        Walker {
            port: &self.port,
            generation: self.port.generation(),
            root: self.tables[0].hpa(),
            processor: self.processor,
            cached: None,
            log: None,
            memory: (),
        }
    }

    pub(super) fn walk_for<F: HardwareFormat>(&self, access: Access, purpose: Purpose) -> Result<Mapping, Stop> {
        uninterrupted(Stop::Restart, || F::walk(self.walker(), self.gpa, access, purpose))
    }

    pub(super) fn walk<F: HardwareFormat>(&self, access: Access) -> Result<Mapping, Stop> {
        self.walk_for::<F>(access, Purpose::Data)
    }
}

pub(super) fn fault(access: Access, code: u64) -> Result<Mapping, Stop> {
    Err(Stop::Fault(Fault { gpa: Gpa(ADDRESS), access, code }))
}

pub(super) const ACCESSES: [Access; 3] = [Access::Read, Access::Write, Access::Execute];

/// Of a format with accessed and dirty bits: `bits` are these, and that of a large page. `leaf` may
/// be executed, and its memory is `memory`.
pub(super) fn maps_pages_of_each_size<F: HardwareFormat>(link: u64, leaf: u64, bits: [u64; 3], memory: Memory) {
    let [a, d, ps] = bits;
    for (level, size, leaf) in
        [(1, PageSize::Size4K, leaf), (2, PageSize::Size2M, leaf | ps), (3, PageSize::Size1G, leaf | ps)]
    {
        let mask = size.size_bytes() - 1;
        let way = Way::new(link, level, FRAME & !mask | leaf);
        let hpa = Hpa(FRAME & !mask | ADDRESS & mask);
        let fetches = ALL_FETCHES;
        let expected = |writes| Ok(Mapping { gpa: Gpa(ADDRESS), hpa, size, writes, fetches, memory });
        assert_eq!(way.walk::<F>(Access::Read), expected(Writes::MustWalk));
        for above in level..=4 {
            assert_eq!(way.get(above) & (a | d), a, "level {above}");
        }
        assert_eq!(way.walk::<F>(Access::Write), expected(Writes::Allowed));
        assert_eq!(way.get(level) & (a | d), a | d);
        for above in level + 1..=4 {
            assert_eq!(way.get(above) & d, 0, "only leaves are dirty");
        }
        assert_eq!(way.walk::<F>(Access::Read), expected(Writes::Allowed));
    }
}

mod ept {
    use super::*;

    /// Read, write, execute.
    const LINK: u64 = 0b111;
    /// The same, and memory type 6 (write back).
    const LEAF: u64 = 0b111 | 6 << 3;
    const A: u64 = 1 << 8;
    const D: u64 = 1 << 9;
    const PS: u64 = 1 << 7;

    /// Qualification of a data access: linear address valid, final.
    const FINAL: u64 = 0x180;

    fn bit(access: Access) -> u64 {
        match access {
            Access::Read => 1,
            Access::Write => 2,
            Access::Execute | Access::ExecuteUser => 4,
        }
    }

    #[test]
    fn maps_pages_of_each_size() {
        super::maps_pages_of_each_size::<Ept>(LINK, LEAF, [A, D, PS], Memory::WriteBack);
    }

    /// Every combination of permissions at each level, against the plain rule.
    #[test]
    fn permissions_of_all_levels_are_combined() {
        for level in 1..=4 {
            for permissions in 0..8_u64 {
                for access in ACCESSES {
                    let way = Way::new(LINK, 1, FRAME | LEAF);
                    way.clear(level, 0b111 & !permissions);
                    let got = way.walk::<Ept>(access);
                    if permissions == 0 {
                        assert_eq!(got, fault(access, FINAL | bit(access)));
                    } else if matches!(permissions, 0b010 | 0b110) {
                        assert!(matches!(got, Err(Stop::Misconfigured(_))), "{permissions:#b}");
                    } else if permissions & bit(access) == 0 {
                        assert_eq!(got, fault(access, FINAL | bit(access) | permissions << 3));
                        assert_eq!(way.get(1) & (A | D), 0, "a denied access marks nothing");
                    } else {
                        assert!(got.is_ok(), "{permissions:#b} {access:?}: {got:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn reserved_bits_and_memory_types_are_misconfigurations() {
        // (level of the leaf, level of the entry, bits to be set)
        let mut cases = vec![(1, 4, 1 << 7)];
        for level in 2..=4 {
            cases.extend((3..=6).map(|bit| (1, level, 1_u64 << bit)));
        }
        cases.extend((12..21).map(|bit| (2, 2, 1_u64 << bit)));
        cases.extend((12..30).map(|bit| (3, 3, 1_u64 << bit)));
        for (leaf, level, bits) in cases {
            let ps = if leaf == 1 { 0 } else { PS };
            let way = Way::new(LINK, leaf, FRAME & !((1 << 30) - 1) | LEAF | ps);
            way.or(level, bits);
            let misconfiguration =
                Misconfiguration { gpa: Gpa(ADDRESS), level: Level(level), entry: way.get(level), code: 0 };
            assert_eq!(way.walk::<Ept>(Access::Read), Err(Stop::Misconfigured(misconfiguration)), "{bits:#x}");
        }
        for memory_type in 0..8 {
            let way = Way::new(LINK, 1, FRAME | 0b111 | memory_type << 3);
            let is_bad = matches!(way.walk::<Ept>(Access::Read), Err(Stop::Misconfigured(_)));
            assert_eq!(is_bad, matches!(memory_type, 2 | 3 | 7), "type {memory_type}");
        }
    }

    #[test]
    fn ignored_bits_are_ignored() {
        for bit in (10..12).chain(52..64) {
            for level in 1..=4 {
                let way = Way::new(LINK, 1, FRAME | LEAF);
                way.or(level, 1 << bit);
                assert!(way.walk::<Ept>(Access::Write).is_ok(), "bit {bit} of level {level}");
            }
        }
        let way = Way::new(LINK, 1, FRAME | LEAF | PS | 1 << 6);
        assert_eq!(way.walk::<Ept>(Access::Read).map(|mapping| mapping.size), Ok(PageSize::Size4K));
    }

    #[test]
    fn an_entry_that_is_not_present_may_have_any_other_bits() {
        for level in 1..=4 {
            let way = Way::new(LINK, 1, FRAME | LEAF);
            way.set(level, !0b111);
            assert_eq!(way.walk::<Ept>(Access::Write), fault(Access::Write, FINAL | 2));
        }
    }

    #[test]
    fn guest_tables_are_accessed_as_by_writes() {
        let way = Way::new(LINK, 1, FRAME | LEAF);
        assert!(way.walk_for::<Ept>(Access::Read, Purpose::GuestTable).is_ok());
        assert_eq!(way.get(1) & (A | D), A | D);
        way.clear(1, 0b010);
        assert_eq!(way.walk_for::<Ept>(Access::Read, Purpose::GuestTable), fault(Access::Write, 0x80 | 3 | 0b101 << 3));
    }

    #[test]
    fn a_misconfiguration_comes_before_a_violation() {
        let way = Way::new(LINK, 1, FRAME | 0b011 | 7 << 3);
        way.clear(4, 0b010);
        assert!(matches!(way.walk::<Ept>(Access::Write), Err(Stop::Misconfigured(_))));
    }
}

mod npt {
    use super::*;

    /// Present, writable, user.
    const LINK: u64 = 0b111;
    const A: u64 = 1 << 5;
    const D: u64 = 1 << 6;
    const PS: u64 = 1 << 7;
    const NX: u64 = 1 << 63;

    /// Error code of a data access: user, final.
    const FINAL: u64 = 1 << 32 | 4;

    fn bit(access: Access) -> u64 {
        match access {
            Access::Read => 0,
            Access::Write => 2,
            Access::Execute | Access::ExecuteUser => 16,
        }
    }

    #[test]
    fn maps_pages_of_each_size() {
        super::maps_pages_of_each_size::<Npt>(LINK, LINK, [A, D, PS], Memory::WriteBack);
    }

    /// Every combination of P, RW, US and NX at each level, against the plain rule.
    #[test]
    fn permissions_of_all_levels_are_combined() {
        for level in 1..=4 {
            for low in 0..8_u64 {
                for nx in [0, NX] {
                    for access in ACCESSES {
                        let way = Way::new(LINK, 1, FRAME | LINK);
                        way.clear(level, 0b111 & !low);
                        way.or(level, nx);
                        let got = way.walk::<Npt>(access);
                        let permitted = low & 4 != 0
                            && match access {
                                Access::Read => true,
                                Access::Write => low & 2 != 0,
                                Access::Execute | Access::ExecuteUser => nx == 0,
                            };
                        if low & 1 == 0 {
                            assert_eq!(got, fault(access, FINAL | bit(access)));
                        } else if !permitted {
                            assert_eq!(got, fault(access, FINAL | bit(access) | 1));
                            assert_eq!(way.get(1) & (A | D), 0, "a denied access marks nothing");
                        } else {
                            assert!(got.is_ok(), "{low:#b} {nx:#x} {access:?}: {got:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn reserved_bits_are_reported() {
        let mut cases = vec![(1, 4, 1 << 7), (1, 4, 1 << 8)];
        cases.extend((13..21).map(|bit| (2, 2, 1_u64 << bit)));
        cases.extend((13..30).map(|bit| (3, 3, 1_u64 << bit)));
        for (leaf, level, bits) in cases {
            let ps = if leaf == 1 { 0 } else { PS };
            let way = Way::new(LINK, leaf, FRAME & !((1 << 30) - 1) | LINK | ps);
            way.or(level, bits);
            let misconfiguration = Misconfiguration {
                gpa: Gpa(ADDRESS),
                level: Level(level),
                entry: way.get(level),
                code: FINAL | 2 | 1 | 8,
            };
            assert_eq!(way.walk::<Npt>(Access::Write), Err(Stop::Misconfigured(misconfiguration)), "{bits:#x}");
        }
    }

    #[test]
    fn available_and_caching_bits_are_ignored() {
        // PWT, PCD, 9 to 11, 52 to 62.
        for bit in [3, 4].into_iter().chain(9..12).chain(52..63) {
            for level in 1..=4 {
                let way = Way::new(LINK, 1, FRAME | LINK);
                way.or(level, 1 << bit);
                assert!(way.walk::<Npt>(Access::Write).is_ok(), "bit {bit} of level {level}");
            }
        }
        // The page-attribute-table bit of a large page is no address bit.
        let way = Way::new(LINK, 2, FRAME & !0x1f_ffff | LINK | PS | 1 << 12);
        assert_eq!(way.walk::<Npt>(Access::Read).map(|mapping| mapping.hpa.0 & 0x1f_ffff), Ok(ADDRESS & 0x1f_ffff));
    }

    #[test]
    fn guest_tables_are_accessed_as_by_writes() {
        let way = Way::new(LINK, 1, FRAME | LINK);
        assert!(way.walk_for::<Npt>(Access::Read, Purpose::GuestTable).is_ok());
        assert_eq!(way.get(1) & (A | D), A | D);
        way.clear(1, 0b010);
        assert_eq!(way.walk_for::<Npt>(Access::Read, Purpose::GuestTable), fault(Access::Write, 1 << 33 | 4 | 2 | 1));
    }
}

fn ends_where_there_is_no_memory<F: HardwareFormat>(link: u64, leaf: u64) {
    // A pointer without the bias.
    let way = Way::new(link, 1, FRAME & !phys::BIAS | leaf);
    assert!(matches!(way.walk::<F>(Access::Read), Err(Stop::NoMemory { .. })));
    let way = Way::new(link, 1, FRAME | leaf);
    way.set(3, 0x1000 | link);
    assert_eq!(way.walk::<F>(Access::Read), Err(Stop::NoMemory { gpa: Gpa(ADDRESS), hpa: Hpa(0x1000) }));
}

fn ends_beyond_the_address_bits<F: HardwareFormat>(link: u64, leaf: u64) {
    let mut way = Way::new(link, 1, FRAME | leaf);
    way.gpa = Gpa(ADDRESS | 1 << 48);
    assert!(matches!(way.walk::<F>(Access::Read), Err(Stop::Fault(_))));
}

fn a_flushed_generation_stops_the_walk<F: HardwareFormat>(link: u64, leaf: u64) {
    let way = Way::new(link, 1, FRAME | leaf);
    let walker = way.walker();
    way.port.domain().flush(&[]);
    let got = F::walk(walker, way.gpa, Access::Write, Purpose::Data);
    assert_eq!(got, Err(Stop::Restart));
    assert_eq!(way.get(1), FRAME | leaf, "and marks nothing");
}

#[test]
fn formats_stop_at_impossible_addresses() {
    fn all<F: HardwareFormat>(link: u64, leaf: u64) {
        ends_where_there_is_no_memory::<F>(link, leaf);
        ends_beyond_the_address_bits::<F>(link, leaf);
        a_flushed_generation_stops_the_walk::<F>(link, leaf);
    }
    all::<Ept>(7, 7 | 6 << 3);
    all::<Npt>(7, 7);
    // A page with write-back memory that may be read and written.
    all::<Stage2>(3, 3 | 0b1111 << 2 | 0b11 << 6);
    all::<Vtd>(3, 3);
}

/// Both are written from the manuals.
#[test]
fn walkers_and_engine_agree_on_what_hardware_has() {
    slat::for_each_format!(F => {
        assert_eq!((F::GUEST_PHYSICAL_BITS, F::LEVELS), (F::GPA_BITS, F::ROOT_LEVEL.0), "{}", F::NAME);
        assert_eq!(F::LOGS_MODIFICATIONS, F::HAS_MODIFICATION_LOG, "{}", F::NAME);
        assert_eq!(F::HAS_TLB_CONFLICTS, F::BREAK_BEFORE_MAKE, "{}", F::NAME);
    });
}
