//! RISC-V's G-stage page tables built by hand, of all sizes. The constants here are the manual's,
//! written once more.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use slat::format::{Sv39x4, Sv48x4, Sv57x4};
use slat::{Access, GfnRange, Gpa, Hpa, Level, PageSize};

use super::cached::PteCache;
use super::tests::{ACCESSES, FRAME, Page};
use super::{
    ALL_FETCHES, Fault, HardwareFormat, Mapping, Marks, Memory, Misconfiguration, Processor, Purpose, Stop, Walker,
};
use crate::hardware::commit::tests::uninterrupted;
use crate::hardware::commit::{FlushDomain, Port, Scope};
use crate::hardware::tlb::Writes;
use crate::memory::phys;

const V: u64 = 1 << 0;
const R: u64 = 1 << 1;
const W: u64 = 1 << 2;
const X: u64 = 1 << 3;
const U: u64 = 1 << 4;
const A: u64 = 1 << 6;
const D: u64 = 1 << 7;
const LEAF: u64 = V | R | W | X | U;

/// 16 KiB, aligned to that.
#[repr(align(16384))]
struct Root([AtomicU64; 2048]);

/// The page-table pages on the way to one address, from the root down to level 1. The root's index
/// is 2047 at most.
struct Way {
    root: Box<Root>,
    /// Those of the levels below the root's, from level 1 on.
    below: Vec<Box<Page>>,
    root_index: u64,
    port: Port,
    gpa: Gpa,
}

/// A PTE with an address of 56 bits.
fn entry(address: u64, bits: u64) -> u64 {
    address >> 12 << 10 | bits
}

fn leaf_at(level: u8, bits: u64) -> u64 {
    entry(FRAME & !(size_of(level) - 1), bits)
}

/// Bytes that a PTE of `level` maps.
fn size_of(level: u8) -> u64 {
    4096 << (9 * (level - 1))
}

impl Way {
    /// With as many levels as the format has; `leaf` is the PTE of `level`.
    fn new<F: HardwareFormat>(root_index: u64, level: u8, leaf: u64) -> Way {
        let top = nr_levels::<F>();
        let index = |level: u8| u64::from(level) << (12 + 9 * (level - 1));
        let below_root: u64 = (1..top).map(index).sum();
        let way = Way {
            root: Box::new(Root([const { AtomicU64::new(0) }; 2048])),
            below: (1..top).map(|_| Page::new()).collect(),
            root_index,
            port: Port::new(&Arc::new(FlushDomain::new())),
            gpa: Gpa(root_index * size_of(top) + below_root + 0x568),
        };
        for above in level + 1..=top {
            way.set(above, entry(way.below[usize::from(above) - 2].hpa().0, V));
        }
        way.set(level, leaf);
        way
    }

    fn place(&self, level: u8) -> Option<&Page> {
        self.below.get(usize::from(level) - 1).map(Box::as_ref)
    }

    fn set(&self, level: u8, entry: u64) {
        match self.place(level) {
            Some(page) => page.set(level.into(), entry),
            None => self.root.0[self.root_index as usize].store(entry, Ordering::Relaxed),
        }
    }

    fn get(&self, level: u8) -> u64 {
        match self.place(level) {
            Some(page) => page.get(level.into()),
            None => self.root.0[self.root_index as usize].load(Ordering::Relaxed),
        }
    }

    fn walker(&self) -> Walker<'_> {
        Walker {
            port: &self.port,
            generation: self.port.generation(),
            root: phys::hpa_of(self.root.0.as_ptr()),
            processor: Processor::of::<Sv48x4>(),
            cached: None,
            log: None,
            memory: (),
        }
    }

    fn walk<F: HardwareFormat>(&self, access: Access) -> Result<Mapping, Stop> {
        self.walk_for::<F>(access, Purpose::Data)
    }

    fn walk_for<F: HardwareFormat>(&self, access: Access, purpose: Purpose) -> Result<Mapping, Stop> {
        uninterrupted(Stop::Restart, || F::walk(self.walker(), self.gpa, access, purpose))
    }

    fn fault(&self, access: Access) -> Result<Mapping, Stop> {
        Err(Stop::Fault(Fault { gpa: self.gpa, access, code: cause(access) }))
    }

    fn misconfiguration(&self, level: u8, access: Access) -> Result<Mapping, Stop> {
        let (gpa, entry, code) = (self.gpa, self.get(level), cause(access));
        Err(Stop::Misconfigured(Misconfiguration { gpa, level: Level(level), entry, code }))
    }
}

fn nr_levels<F: HardwareFormat>() -> u8 {
    match F::GUEST_PHYSICAL_BITS {
        41 => 3,
        50 => 4,
        _ => 5,
    }
}

fn cause(access: Access) -> u64 {
    match access {
        Access::Read => 21,
        Access::Write => 23,
        Access::Execute | Access::ExecuteUser => 20,
    }
}

fn maps_pages_of_each_size<F: HardwareFormat>() {
    for (level, size) in [(1, PageSize::Size4K), (2, PageSize::Size2M), (3, PageSize::Size1G)] {
        for root_index in [0, 1, 511, 512, 2047] {
            let way = Way::new::<F>(root_index, level, leaf_at(level, LEAF));
            let mask = size.size_bytes() - 1;
            let hpa = Hpa(FRAME & !mask | way.gpa.0 & mask);
            let (fetches, memory) = (ALL_FETCHES, Memory::ByAddress);
            let expected = |writes| Ok(Mapping { gpa: way.gpa, hpa, size, writes, fetches, memory });
            assert_eq!(way.walk::<F>(Access::Read), expected(Writes::MustWalk), "index {root_index}");
            assert_eq!(way.get(level) & (A | D), A);
            assert_eq!(way.walk::<F>(Access::Write), expected(Writes::Allowed));
            assert_eq!(way.get(level) & (A | D), A | D);
            assert_eq!(way.walk::<F>(Access::Execute), expected(Writes::Allowed));
            for above in level + 1..=nr_levels::<F>() {
                assert_eq!(way.get(above) & (A | D | U), 0, "only leaves have them");
            }
        }
    }
}

/// Every combination of V, R, W, X and U in a leaf of each level, against the plain rule.
fn permissions_are_those_of_the_leaf<F: HardwareFormat>() {
    for level in 1..=3 {
        for bits in 0..32_u64 {
            if level > 1 && bits == V {
                // It is a directory entry, and there is no page-table page.
                continue;
            }
            for access in ACCESSES {
                let way = Way::new::<F>(3, level, leaf_at(level, bits));
                let needed = match access {
                    Access::Read => R,
                    Access::Write => W,
                    Access::Execute | Access::ExecuteUser => X,
                };
                let got = way.walk::<F>(access);
                if bits & V == 0 {
                    assert_eq!(got, way.fault(access));
                } else if bits & (R | W) == W {
                    assert_eq!(got, way.misconfiguration(level, access));
                } else if bits & (R | W | X) == 0 {
                    // It is a directory entry: not at the lowest level, and not with U.
                    assert_eq!(got, way.misconfiguration(level, access));
                } else if bits & needed == 0 || bits & U == 0 {
                    assert_eq!(got, way.fault(access));
                    assert_eq!(way.get(level), leaf_at(level, bits), "a denied access marks nothing");
                } else {
                    assert!(got.is_ok(), "{bits:#b} {access:?}: {got:?}");
                }
            }
        }
    }
}

fn reserved_bits_are_misconfigurations<F: HardwareFormat>() {
    for level in 1..=nr_levels::<F>() {
        // Of a page-table page above level 1: D, A and U as well.
        let of_table: &[u32] = if level > 1 { &[4, 6, 7] } else { &[] };
        for &bit in (54..64).collect::<Vec<_>>().iter().chain(of_table) {
            let way = Way::new::<F>(1, 1, leaf_at(1, LEAF));
            way.set(level, way.get(level) | 1 << bit);
            assert_eq!(
                way.walk::<F>(Access::Write),
                way.misconfiguration(level, Access::Write),
                "bit {bit} of {level}"
            );
        }
        // G, and the two that are software's.
        for bit in [5, 8, 9] {
            let way = Way::new::<F>(1, 1, leaf_at(1, LEAF));
            way.set(level, way.get(level) | 1 << bit);
            assert!(way.walk::<F>(Access::Write).is_ok(), "bit {bit} of {level}");
        }
    }
    // Misaligned.
    for level in 2..=3 {
        for bit in 12..12 + 9 * (u32::from(level) - 1) {
            let way = Way::new::<F>(1, level, leaf_at(level, LEAF) | entry(1 << bit, 0));
            assert_eq!(way.walk::<F>(Access::Read), way.misconfiguration(level, Access::Read), "bit {bit}");
        }
    }
}

fn addresses_beyond_the_root_fault<F: HardwareFormat>() {
    let mut way = Way::new::<F>(2047, 1, leaf_at(1, LEAF));
    assert_eq!(way.gpa.0 >> (F::GUEST_PHYSICAL_BITS - 1), 1);
    assert!(way.walk::<F>(Access::Read).is_ok());
    let gpa = way.gpa;
    for bit in F::GUEST_PHYSICAL_BITS..64 {
        way.gpa = Gpa(gpa.0 | 1 << bit);
        assert_eq!(way.walk::<F>(Access::Read), way.fault(Access::Read), "bit {bit}");
    }
}

fn guest_tables_are_accessed_as_by_writes<F: HardwareFormat>() {
    let way = Way::new::<F>(5, 1, leaf_at(1, LEAF));
    let walk = || way.walk_for::<F>(Access::Read, Purpose::GuestTable);
    assert!(walk().is_ok());
    assert_eq!(way.get(1) & (A | D), A | D);
    way.set(1, leaf_at(1, LEAF & !W));
    let fault = Fault { gpa: way.gpa, access: Access::Write, code: 0x3020 << 32 | 23 };
    assert_eq!(walk(), Err(Stop::Fault(fault)));
}

fn stops_at_impossible_addresses<F: HardwareFormat>() {
    // A pointer without the bias, and an address of 56 bits.
    for address in [FRAME & !phys::BIAS, 1 << 55 | FRAME] {
        let way = Way::new::<F>(1, 1, entry(address, LEAF));
        let hpa = Hpa(address | 0x568);
        assert_eq!(way.walk::<F>(Access::Read), Err(Stop::NoMemory { gpa: way.gpa, hpa }));
    }
    let way = Way::new::<F>(1, 1, leaf_at(1, LEAF));
    way.set(3, entry(0x1000, V));
    assert_eq!(way.walk::<F>(Access::Read), Err(Stop::NoMemory { gpa: way.gpa, hpa: Hpa(0x1000) }));

    let way = Way::new::<F>(1, 1, leaf_at(1, LEAF));
    let walker = way.walker();
    way.port.domain().flush(&[]);
    assert_eq!(F::walk(walker, way.gpa, Access::Write, Purpose::Data), Err(Stop::Restart));
    assert_eq!(way.get(1), leaf_at(1, LEAF), "and marks nothing");
}

/// Svade: an access faults where A, or D for a write, is clear.
fn without_hardware_an_access_faults_until_its_marks_are_set<F: HardwareFormat>() {
    for level in 1..=3 {
        for (marks, access, is_granted) in [
            (0, Access::Read, false),
            (A, Access::Read, true),
            (A, Access::Write, false),
            (D, Access::Write, false),
            (A | D, Access::Write, true),
            (A, Access::Execute, true),
        ] {
            let entry = leaf_at(level, LEAF) | marks;
            let way = Way::new::<F>(1, level, entry);
            let found = uninterrupted(Stop::Restart, || {
                let processor = Processor { marks: Marks::ByFaults, ..Processor::of::<F>() };
                F::walk(Walker { processor, ..way.walker() }, way.gpa, access, Purpose::Data)
            });
            assert_eq!(found.is_ok(), is_granted, "{marks:#x} {access:?}: {found:?}");
            assert!(is_granted || found == way.fault(access));
            assert_eq!(way.get(level), entry, "it sets none");
        }
    }
}

/// Any PTE may be cached: one that is not valid, one that lacks a right, one that maps memory.
fn a_cached_pte_serves_until_it_is_flushed<F: HardwareFormat>() {
    for level in 1..=3 {
        let cached = PteCache::default();
        let way = Way::new::<F>(1, level, 0);
        let page = GfnRange::new(way.gpa.gfn(), 1);
        let walk = |access| {
            uninterrupted(Stop::Restart, || {
                F::walk(Walker { cached: Some(&cached), ..way.walker() }, way.gpa, access, Purpose::Data)
            })
        };
        assert_eq!(walk(Access::Read), way.fault(Access::Read));
        way.set(level, leaf_at(level, LEAF & !W));
        assert_eq!(walk(Access::Read), way.fault(Access::Read), "that it was not valid");
        cached.drop_range(Scope::Combined, page);
        cached.drop_range(Scope::Leaves, page);
        assert_eq!(walk(Access::Read).is_ok(), level == 1, "by address, one of the lowest level alone");
        cached.drop_range(Scope::All, page);
        assert!(walk(Access::Read).is_ok());
        way.set(level, leaf_at(level, LEAF));
        assert_eq!(walk(Access::Write), way.fault(Access::Write), "the right that it lacked");
        cached.drop_range(Scope::Leaves, page);
        let before = walk(Access::Write);
        assert!(before.is_ok());
        way.set(level, 0);
        assert_eq!(walk(Access::Write), before, "that it was there");
        cached.drop_range(Scope::Leaves, page);
        assert_eq!(walk(Access::Write), way.fault(Access::Write));
    }
    // To set a mark it reads the PTE once more.
    let (cached, way) = (PteCache::default(), Way::new::<F>(1, 1, leaf_at(1, LEAF)));
    let walk = |access| F::walk(Walker { cached: Some(&cached), ..way.walker() }, way.gpa, access, Purpose::Data);
    assert!(uninterrupted(Stop::Restart, || walk(Access::Read)).is_ok());
    way.set(1, leaf_at(1, LEAF & !W) | A);
    assert_eq!(uninterrupted(Stop::Restart, || walk(Access::Write)), way.fault(Access::Write));
}

fn all<F: HardwareFormat>() {
    without_hardware_an_access_faults_until_its_marks_are_set::<F>();
    a_cached_pte_serves_until_it_is_flushed::<F>();
    maps_pages_of_each_size::<F>();
    permissions_are_those_of_the_leaf::<F>();
    reserved_bits_are_misconfigurations::<F>();
    addresses_beyond_the_root_fault::<F>();
    guest_tables_are_accessed_as_by_writes::<F>();
    stops_at_impossible_addresses::<F>();
}

#[test]
fn three_levels_under_a_wide_root() {
    all::<Sv39x4>();
}

#[test]
fn four_levels_under_a_wide_root() {
    all::<Sv48x4>();
    // 512 GiB in one leaf PTE: the TLB keeps 1 GiB around the address.
    let way = Way::new::<Sv48x4>(1, 4, entry(0, LEAF));
    way.set(4, entry(phys::BIAS, LEAF));
    let hpa = Hpa(phys::BIAS | way.gpa.0 & ((1 << 39) - 1));
    let found = way.walk::<Sv48x4>(Access::Read).unwrap();
    assert_eq!((found.gpa, found.hpa, found.size, found.writes), (way.gpa, hpa, PageSize::Size1G, Writes::MustWalk));
    way.set(4, entry(phys::BIAS | 1 << 38, LEAF));
    assert_eq!(way.walk::<Sv48x4>(Access::Read), way.misconfiguration(4, Access::Read));
}

#[test]
fn five_levels_under_a_wide_root() {
    all::<Sv57x4>();
}
