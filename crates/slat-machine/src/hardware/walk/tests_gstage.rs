//! What RISC-V's G-stage alone has: leaves of 512 GiB, addresses of 56 bits, and PTEs of any kind
//! that are cached.

use slat::{Access, GfnRange, Hpa, PageSize};

use super::cached::PteCache;
use super::tests::{FRAME, Way, leaf};
use super::tests_manuals::{SV39X4, SV48X4, SV57X4};
use super::{Purpose, Stop, Walker};
use crate::hardware::commit::Scope;
use crate::hardware::tlb::Writes;
use crate::memory::phys;

const W: u64 = 1 << 2;
const A: u64 = 1 << 6;

#[test]
fn large_leaves_and_high_addresses() {
    // 512 GiB in one leaf PTE: the TLB keeps 1 GiB around the address.
    let way = Way::new(&SV48X4, 4, SV48X4.entry(phys::BIAS, SV48X4.block));
    let hpa = Hpa(phys::BIAS | way.gpa.0 & ((1 << 39) - 1));
    let found = way.walk(Access::Read).unwrap();
    assert_eq!((found.gpa, found.hpa, found.size, found.writes), (way.gpa, hpa, PageSize::Size1G, Writes::MustWalk));
    way.set(4, SV48X4.entry(phys::BIAS | 1 << 38, SV48X4.block));
    assert_eq!(way.walk(Access::Read), way.misconfigured(4, Access::Read));

    let way = Way::new(&SV48X4, 1, SV48X4.entry(1 << 55 | FRAME, SV48X4.page));
    let no_memory = Stop::NoMemory { gpa: way.gpa, hpa: Hpa(1 << 55 | FRAME | 0x568) };
    assert_eq!(way.walk(Access::Read), Err(no_memory));
}

/// Any PTE may be cached: one that is not valid, one that lacks a right, one that maps memory.
#[test]
fn a_cached_pte_serves_until_it_is_flushed() {
    for (manual, level) in
        [SV39X4, SV48X4, SV57X4].into_iter().flat_map(|manual| [1, 2, 3].map(|level| (manual, level)))
    {
        let cached = PteCache::default();
        let way = Way::new(&manual, level, 0);
        let page = GfnRange::new(way.gpa.gfn(), 1);
        let leaf = leaf(&manual, level);
        let walk = |access| way.walk_with(|walker| Walker { cached: Some(&cached), ..walker }, access, Purpose::Data);
        let (no_read, no_write) = (way.fault(Access::Read, 21), way.fault(Access::Write, 23));
        assert_eq!(walk(Access::Read), no_read);
        way.set(level, leaf & !W);
        assert_eq!(walk(Access::Read), no_read, "that it was not valid");
        cached.drop_range(Scope::Combined, page);
        cached.drop_range(Scope::Leaves, page);
        assert_eq!(walk(Access::Read).is_ok(), level == 1, "by address, one of the lowest level alone");
        cached.drop_range(Scope::All, page);
        assert!(walk(Access::Read).is_ok());
        way.set(level, leaf);
        assert_eq!(walk(Access::Write), no_write, "the right that it lacked");
        cached.drop_range(Scope::Leaves, page);
        let before = walk(Access::Write);
        assert!(before.is_ok());
        way.set(level, 0);
        assert_eq!(walk(Access::Write), before, "that it was there");
        cached.drop_range(Scope::Leaves, page);
        assert_eq!(walk(Access::Write), no_write);
        // To set a mark it reads the PTE once more.
        cached.drop_range(Scope::All, page);
        way.set(level, leaf);
        assert!(walk(Access::Read).is_ok());
        way.set(level, leaf & !W | A);
        assert_eq!(walk(Access::Write), no_write);
    }
}
