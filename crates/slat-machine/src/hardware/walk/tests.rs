//! The walkers of second stages and of shadow page tables, on page tables built by hand, against
//! the manuals (`tests_manuals.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use slat::format::Format;
use slat::{Access, Gpa, Hpa, Level};

use super::tests_manuals::{ALL, Manual, Outcome, Place};
use super::{
    ALL_FETCHES, Fault, HardwareFormat, Mapping, Marks, Misconfiguration, Processor, Purpose, Stop, Walker, page_size,
    shift,
};
use crate::hardware::commit::tests::uninterrupted;
use crate::hardware::commit::{FlushDomain, Port};
use crate::hardware::tlb::Writes;
use crate::memory::phys;

/// A page of memory.
#[repr(align(4096))]
pub(crate) struct Page(pub(crate) [AtomicU64; 512]);

impl Page {
    pub(crate) const fn new() -> Page {
        Page([const { AtomicU64::new(0) }; 512])
    }

    pub(crate) fn hpa(&self) -> Hpa {
        phys::hpa_of(self.0.as_ptr())
    }

    pub(crate) fn get(&self, index: u64) -> u64 {
        self.0[index as usize].load(Ordering::Relaxed)
    }

    /// Release: as a hypervisor's write of a PTE.
    pub(crate) fn set(&self, index: u64, entry: u64) {
        self.0[index as usize].store(entry, Ordering::Release);
    }
}

/// The largest root: 16 KiB, aligned to that.
#[repr(align(16384))]
struct Root([AtomicU64; 2048]);

/// The page-table pages on the way to one address. Below the root, the index is the level.
pub(super) struct Way {
    manual: Manual,
    root: Box<Root>,
    root_index: u64,
    /// Those below the root, from level 1 on.
    below: Box<[Page]>,
    pub(super) port: Port,
    pub(super) gpa: Gpa,
    /// That of the manual, unless the test has another.
    pub(super) processor: Processor,
}

pub(super) const FRAME: u64 = phys::BIAS | 0x12_3456_7000;

/// A leaf PTE of `level`, with all rights.
pub(super) fn leaf(manual: &Manual, level: u8) -> u64 {
    manual.entry(FRAME & !((1 << shift(level)) - 1), manual.leaf_bits(level))
}

impl Way {
    /// To a PTE `leaf` of `level`.
    pub(super) fn new(manual: &Manual, level: u8, leaf: u64) -> Way {
        Way::below(1, manual, level, leaf)
    }

    /// Below this PTE of the root.
    fn below(root_index: u64, manual: &Manual, level: u8, leaf: u64) -> Way {
        let top = manual.levels();
        let offset: u64 = (1..top).map(|level| u64::from(level) << shift(level)).sum();
        let way = Way {
            manual: *manual,
            root: Box::new(Root([const { AtomicU64::new(0) }; 2048])),
            root_index,
            below: (1..top).map(|_| Page::new()).collect(),
            port: Port::new(&Arc::new(FlushDomain::new())),
            gpa: Gpa((root_index << shift(top)) + offset + 0x568),
            processor: manual.processor,
        };
        for above in level + 1..=top {
            way.set(above, manual.entry(way.table(above - 1).0, manual.link));
        }
        way.set(level, leaf);
        way
    }

    /// The address of the page-table page of `level`, which is not the root's.
    pub(super) fn table(&self, level: u8) -> Hpa {
        self.below[usize::from(level) - 1].hpa()
    }

    fn place(&self, level: u8) -> &AtomicU64 {
        match self.below.get(usize::from(level) - 1) {
            Some(page) => &page.0[usize::from(level)],
            None => &self.root.0[self.root_index as usize],
        }
    }

    pub(super) fn set(&self, level: u8, entry: u64) {
        self.place(level).store(entry, Ordering::Relaxed);
    }

    pub(super) fn get(&self, level: u8) -> u64 {
        self.place(level).load(Ordering::Relaxed)
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
            root: phys::hpa_of(self.root.0.as_ptr()),
            processor: self.processor,
            cached: None,
            log: None,
            memory: (),
        }
    }

    /// With a walker of which `with` has changed something.
    pub(super) fn walk_with<'a>(
        &'a self,
        with: impl Fn(Walker<'a>) -> Walker<'a>,
        access: Access,
        purpose: Purpose,
    ) -> Result<Mapping, Stop> {
        uninterrupted(Stop::Restart, || (self.manual.walk)(with(self.walker()), self.gpa, access, purpose))
    }

    pub(super) fn walk(&self, access: Access) -> Result<Mapping, Stop> {
        self.walk_with(|walker| walker, access, Purpose::Data)
    }

    pub(super) fn fault(&self, access: Access, code: u64) -> Result<Mapping, Stop> {
        Err(Stop::Fault(Fault { gpa: self.gpa, access, code }))
    }

    pub(super) fn misconfigured(&self, level: u8, access: Access) -> Result<Mapping, Stop> {
        let (gpa, entry, code) = (self.gpa, self.get(level), (self.manual.reserved_code)(access, level));
        Err(Stop::Misconfigured(Misconfiguration { gpa, level: Level(level), entry, code }))
    }
}

const ACCESSES: [Access; 3] = [Access::Read, Access::Write, Access::Execute];

/// All PTEs on the ways to leaves of all sizes, by each manual, with the way to each.
fn for_each_place(mut test: impl FnMut(&Manual, Place, &dyn Fn() -> Way)) {
    for manual in &ALL {
        for leaf_level in 1..=3 {
            for level in leaf_level..=manual.levels() {
                let place = Place { leaf: leaf_level, level };
                test(manual, place, &|| Way::new(manual, leaf_level, leaf(manual, leaf_level)));
            }
        }
    }
}

/// The bits of a mask, one by one.
fn each_bit(mask: u64) -> impl Iterator<Item = u64> {
    (0..64).map(|number| 1 << number).filter(move |bit| mask & bit != 0)
}

#[test]
fn pages_of_each_size_are_mapped_and_marked() {
    for manual in &ALL {
        let Manual { accessed: a, dirty: d, link_accessed, .. } = *manual;
        let last = (1 << manual.root_bits) - 1;
        for (level, root_index) in [1, 2, 3].into_iter().flat_map(|level| [0, 1, 511, last].map(|index| (level, index)))
        {
            let clean = leaf(manual, level);
            let way = Way::below(root_index, manual, level, clean);
            let size = page_size(level);
            let mask = size.size_bytes() - 1;
            let (gpa, hpa) = (way.gpa, Hpa(FRAME & !mask | way.gpa.0 & mask));
            let expected = |writes| Ok(Mapping { gpa, hpa, size, writes, fetches: ALL_FETCHES, memory: manual.memory });
            // Without a dirty bit, a write needs no walk of its own.
            let at_first = if d == 0 { Writes::Allowed } else { Writes::MustWalk };
            assert_eq!(way.walk(Access::Read), expected(at_first), "{}", manual.name);
            assert_eq!(way.get(level), clean | a);
            assert_eq!(way.walk(Access::Write), expected(Writes::Allowed), "{}", manual.name);
            for access in ACCESSES {
                assert_eq!(way.walk(access), expected(Writes::Allowed), "{}", manual.name);
                assert_eq!(way.get(level), clean | a | d);
            }
            for above in level + 1..=manual.levels() {
                assert_eq!(way.get(above), manual.entry(way.table(above - 1).0, manual.link | link_accessed));
            }
            way.clear(level, manual.writable);
            assert_eq!(way.walk(Access::Read), expected(Writes::MustWalk), "without the right to write");
        }
    }
}

/// Every combination of rights in each PTE, and one that is not present with all other bits.
#[test]
fn rights_are_those_of_the_manual() {
    for_each_place(|manual, place, way| {
        let (name, rights) = (manual.name, (manual.rights)(place));
        let combinations = (0..1 << rights.count_ones()).map(|chosen: u64| {
            let bits = each_bit(rights).enumerate().filter(|(number, _)| chosen >> number & 1 != 0);
            Some(bits.fold(0, |all, (_, bit)| all | bit))
        });
        for granted in combinations.chain([None]) {
            for access in ACCESSES {
                let way = way();
                match granted {
                    Some(bits) => {
                        way.clear(place.level, rights);
                        way.or(place.level, bits);
                    }
                    None => way.set(place.level, !manual.present),
                }
                let (entry, clean) = (way.get(place.level), way.get(place.leaf));
                let expected = match (manual.outcome)(place, entry, access) {
                    Outcome::LeadsOn => continue,
                    Outcome::Granted => {
                        assert!(way.walk(access).is_ok(), "{name} {place:?}: {entry:#x} {access:?}");
                        continue;
                    }
                    Outcome::Fault(code) => way.fault(access, code),
                    Outcome::Misconfigured => way.misconfigured(place.level, access),
                };
                assert_eq!(way.walk(access), expected, "{name} {place:?}: {entry:#x} {access:?}");
                assert_eq!(way.get(place.leaf), clean, "a denied access marks nothing");
            }
        }
    });
}

#[test]
fn reserved_bits_are_misconfigurations_and_ignored_bits_are_ignored() {
    for_each_place(|manual, place, way| {
        for bit in each_bit((manual.reserved)(place)) {
            for access in [Access::Read, Access::Write] {
                let way = way();
                way.or(place.level, bit);
                let expected = way.misconfigured(place.level, access);
                assert_eq!(way.walk(access), expected, "{} {place:?}: {bit:#x}", manual.name);
            }
        }
        for bit in each_bit((manual.ignored)(place)) {
            let (way, other) = (way(), way());
            way.or(place.level, bit);
            let found = |way: &Way| way.walk(Access::Write).map(|found| (found.hpa, found.size, found.writes));
            assert!(found(&other).is_ok());
            assert_eq!(found(&way), found(&other), "{} {place:?}: {bit:#x}", manual.name);
        }
    });
}

#[test]
fn guest_tables_are_accessed_as_by_writes() {
    for manual in &ALL {
        let Some(code) = manual.table_code else { continue };
        let way = Way::new(manual, 1, leaf(manual, 1));
        let walk = || way.walk_with(|walker| walker, Access::Read, Purpose::GuestTable);
        assert!(walk().is_ok(), "{}", manual.name);
        assert_eq!(way.get(1), leaf(manual, 1) | manual.accessed | manual.dirty);
        way.clear(1, manual.writable);
        assert_eq!(walk(), way.fault(Access::Write, code), "{}", manual.name);
    }
}

#[test]
fn walks_stop_at_impossible_addresses() {
    for manual in &ALL {
        // A pointer without the bias.
        let address = FRAME & !phys::BIAS;
        let way = Way::new(manual, 1, manual.entry(address, manual.page));
        let no_memory = |hpa| Err(Stop::NoMemory { gpa: way.gpa, hpa: Hpa(hpa) });
        assert_eq!(way.walk(Access::Read), no_memory(address | 0x568), "{}", manual.name);
        for level in 2..=manual.levels() {
            let way = Way::new(manual, 1, leaf(manual, 1));
            way.set(level, manual.entry(0x1000, manual.link));
            assert_eq!(way.walk(Access::Read), no_memory(0x1000), "{}, {level}", manual.name);
        }

        let mut way = Way::below((1 << manual.root_bits) - 1, manual, 1, leaf(manual, 1));
        assert!(way.walk(Access::Read).is_ok());
        let (gpa, Some(code)) = (way.gpa, manual.beyond_code) else { continue };
        for bit in shift(manual.levels()) + manual.root_bits..64 {
            way.gpa = Gpa(gpa.0 | 1 << bit);
            assert_eq!(way.walk(Access::Read), way.fault(Access::Read, code), "{}, {bit}", manual.name);
        }
    }
}

#[test]
fn a_flushed_generation_stops_the_walk() {
    for manual in &ALL {
        let way = Way::new(manual, 1, leaf(manual, 1));
        let walker = way.walker();
        way.port.domain().flush(&[]);
        assert_eq!((manual.walk)(walker, way.gpa, Access::Write, Purpose::Data), Err(Stop::Restart));
        assert_eq!(way.get(1), leaf(manual, 1), "and marks nothing");
    }
}

/// Arm with VTCR_EL2.HA clear, RISC-V's Svade: an access faults where A, or D for a write, is
/// clear, whether it has the right or not.
#[test]
fn without_hardware_an_access_faults_until_its_marks_are_set() {
    for manual in &ALL {
        let Some(code) = manual.mark_code else { continue };
        let Manual { accessed: a, dirty: d, .. } = *manual;
        for level in 1..=3 {
            for (marks, access) in [0, a, d, a | d].into_iter().flat_map(|marks| ACCESSES.map(|access| (marks, access)))
            {
                let needed = if access == Access::Write { a | d } else { a };
                let mut way = Way::new(manual, level, leaf(manual, level) | marks);
                way.processor.marks = Marks::ByFaults;
                let expected = way.fault(access, code(access, level));
                let name = manual.name;
                if marks & needed == needed {
                    assert!(way.walk(access).is_ok(), "{name}: {marks:#x} {access:?}");
                } else {
                    assert_eq!(way.walk(access), expected, "{name}: {marks:#x} {access:?}");
                    way.clear(level, manual.writable);
                    assert_eq!(way.walk(access), expected, "{name}: {marks:#x} {access:?}");
                }
                assert_eq!(way.get(level) & (a | d), marks, "it sets none");
            }
        }
    }
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
