//! The walker of shadow page tables, on page tables built by hand. The constants here are the
//! manual's, written once more. The tests of the CPU cover the rights: see
//! [`shadow_cpu`](crate::hardware::shadow_cpu).

use std::sync::Arc;

use slat::format::Npt;
use slat::shadow::Gva;
use slat::{Access, Level, PageSize};

use super::shadow::{ShadowMapping, ShadowStop, walk};
use super::tests::Page;
use super::{Processor, Walker};
use crate::hardware::commit::tests::uninterrupted;
use crate::hardware::commit::{FlushDomain, Port};
use crate::hardware::tlb::Rights;
use crate::memory::phys;

const PRESENT: u64 = 1;
const RW: u64 = 2;
const US: u64 = 4;
const A: u64 = 1 << 5;
const D: u64 = 1 << 6;
const PS: u64 = 1 << 7;
const NX: u64 = 1 << 63;
const LINK: u64 = PRESENT | RW | US;

/// Indexes 1, 2, 3, 4, 5 and the offset 0x568.
const ADDRESS: u64 = 1 << 48 | 2 << 39 | 3 << 30 | 4 << 21 | 5 << 12 | 0x568;
const FRAME: u64 = phys::BIAS | 0x12_4000_0000;
const ALL: Rights = Rights::WRITE.and(Rights::EXECUTE).and(Rights::USER);

/// The page-table pages on the way to [`ADDRESS`], from level 5 down to 1.
struct Way {
    tables: [Box<Page>; 5],
    port: Port,
    levels: u8,
}

impl Way {
    /// With `leaf` as the PTE of `level`.
    fn new(levels: u8, level: u8, leaf: u64) -> Way {
        let port = Port::new(&Arc::new(FlushDomain::new()));
        let way = Way { tables: std::array::from_fn(|_| Page::new()), port, levels };
        for above in level + 1..=5 {
            way.set(above, way.table(above - 1).hpa().0 | LINK);
        }
        way.set(level, leaf);
        way
    }

    fn table(&self, level: u8) -> &Page {
        &self.tables[usize::from(5 - level)]
    }

    fn set(&self, level: u8, entry: u64) {
        self.table(level).set(u64::from(6 - level), entry);
    }

    fn get(&self, level: u8) -> u64 {
        self.table(level).get(u64::from(6 - level))
    }

    fn walker(&self) -> Walker<'_> {
        let root = self.table(self.levels).hpa();
        Walker {
            port: &self.port,
            generation: self.port.generation(),
            root,
            processor: Processor::of::<Npt>(),
            cached: None,
            log: None,
            memory: (),
        }
    }

    fn walk(&self, access: Access, needed: Rights) -> Result<ShadowMapping, ShadowStop> {
        uninterrupted(ShadowStop::Restart, || walk(self.walker(), self.levels, Gva(ADDRESS), access, needed))
    }

    fn read(&self) -> Result<ShadowMapping, ShadowStop> {
        self.walk(Access::Read, Rights::NONE)
    }
}

const LEVELS: [u8; 2] = [4, 5];
const SIZES: [(u8, PageSize); 3] = [(1, PageSize::Size4K), (2, PageSize::Size2M), (3, PageSize::Size1G)];

/// A leaf PTE of `level`, with these and other bits.
fn leaf(level: u8, bits: u64) -> u64 {
    FRAME | bits | if level > 1 { PS } else { 0 }
}

#[test]
fn translates_and_marks() {
    for levels in LEVELS {
        for (level, size) in SIZES {
            let way = Way::new(levels, level, leaf(level, LINK));
            let hpa = slat::Hpa(FRAME | (ADDRESS & (size.size_bytes() - 1)));
            let read = ShadowMapping { hpa, size, rights: ALL.without(Rights::WRITE) };
            assert_eq!(way.read(), Ok(read), "not dirty yet: {levels}, {level}");
            assert_eq!(way.get(level) & (A | D), A);
            assert_eq!(way.walk(Access::Write, Rights::WRITE), Ok(ShadowMapping { rights: ALL, ..read }));
            assert_eq!(way.get(level) & (A | D), A | D);
            assert_eq!(way.read(), Ok(ShadowMapping { rights: ALL, ..read }));
            for above in level + 1..=5 {
                let expected = if above > levels { 0 } else { A };
                assert_eq!(way.get(above) & (A | D), expected, "{levels}, {level}: {above}");
            }
        }
    }
}

#[test]
fn rights_are_those_of_all_levels() {
    for levels in LEVELS {
        for at in 1..=levels {
            let users = Way::new(levels, 1, leaf(1, LINK | D));
            for (entry, rights) in [
                (users.get(at), ALL),
                (users.get(at) & !RW, ALL.without(Rights::WRITE)),
                (users.get(at) | NX, ALL.without(Rights::EXECUTE)),
                (users.get(at) & !US, ALL.without(Rights::USER).and(Rights::SUPERVISOR)),
                (users.get(at) & !(RW | US) | NX, Rights::SUPERVISOR),
            ] {
                users.set(at, entry);
                assert_eq!(users.read().map(|mapping| mapping.rights), Ok(rights), "{levels} levels, {at}: {entry:#x}");
            }
        }
    }
}

#[test]
fn a_fault_marks_nothing() {
    for levels in LEVELS {
        for at in 1..=levels {
            let way = Way::new(levels, 1, leaf(1, LINK));
            let good = way.get(at);
            let nothing = || (1..=levels).all(|level| way.get(level) & (A | D) == 0);
            // Not present, whatever the other bits are.
            for entry in [0, good & !PRESENT, !PRESENT] {
                way.set(at, entry);
                assert_eq!(way.read(), Err(ShadowStop::PageFault), "{levels}, {at}");
            }
            way.set(at, good & !(RW | US) | NX);
            for (access, needed) in
                [(Access::Write, Rights::WRITE), (Access::Execute, Rights::EXECUTE), (Access::Read, Rights::USER)]
            {
                assert_eq!(way.walk(access, needed), Err(ShadowStop::PageFault), "{levels}, {at}");
            }
            way.set(at, good);
            assert_eq!(way.walk(Access::Read, Rights::SUPERVISOR), Err(ShadowStop::PageFault));
            assert!(nothing());
        }
    }
}

#[test]
fn reserved_bits_are_never_accepted() {
    for levels in LEVELS {
        // Bits 7 and 8 above level 3.
        for at in 4..=levels {
            for bit in [1 << 7, 1 << 8] {
                let way = Way::new(levels, 1, leaf(1, LINK));
                way.set(at, way.get(at) | bit);
                let expected = ShadowStop::Misconfigured { level: Level(at), entry: way.get(at) };
                assert_eq!(way.read(), Err(expected), "{levels}, {at}, {bit:#x}");
            }
        }
        // Address bits below a large page, but for bit 12.
        for (level, size) in &SIZES[1..] {
            for bit in 12..size.size_bytes().trailing_zeros() {
                let entry = leaf(*level, LINK) | 1 << bit;
                let got = Way::new(levels, *level, entry).read();
                if bit == 12 {
                    assert_eq!(got.map(|mapping| mapping.hpa.0 & !(size.size_bytes() - 1)), Ok(FRAME));
                } else {
                    assert_eq!(got, Err(ShadowStop::Misconfigured { level: Level(*level), entry }));
                }
            }
        }
        // Software's bits, cacheability, and the global bit of a leaf, which has no effect here.
        let ignored = 0x7ff << 52 | 0b11 << 3 | 0b111 << 9 | 1 << 8;
        assert!(Way::new(levels, 1, leaf(1, LINK | ignored | PS)).read().is_ok());
    }
}

#[test]
fn addresses_without_memory_are_errors() {
    for levels in LEVELS {
        for at in 1..=levels {
            let way = Way::new(levels, 1, leaf(1, LINK));
            way.set(at, 0x5000 | LINK);
            let hpa = slat::Hpa(if at == 1 { 0x5568 } else { 0x5000 });
            assert_eq!(way.read(), Err(ShadowStop::NoMemory { hpa }), "{levels}, {at}");
        }
    }
}

#[test]
fn a_walk_that_a_flush_overtakes_starts_over() {
    let way = Way::new(4, 1, leaf(1, LINK));
    let walker = way.walker();
    way.port.domain().flush(&[]);
    assert_eq!(walk(walker, 4, Gva(ADDRESS), Access::Write, Rights::WRITE), Err(ShadowStop::Restart));
    assert_eq!(way.get(1), leaf(1, LINK));
}
