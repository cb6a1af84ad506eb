use slat::PAGE_SIZE;

use super::*;

const CONTEXT: Context = Context { vm: 1, pcid: 2 };
const SIZES: [PageSize; 3] = [PageSize::Size4K, PageSize::Size2M, PageSize::Size1G];

/// The distance of guest-physical addresses from those of the guest: none while it has paging off.
const DISTANCES: [u64; 2] = [0, 7 << 30];

fn tlb() -> Tlb {
    Tlb::new(Geometry { size_4k: (2, 2), size_2m: (2, 1), size_1g: (1, 1) })
}

/// Fills the 4 KiB page at `address`, which is its guest-physical address too.
fn fill_small(tlb: &mut Tlb, address: u64, hpa: u64, writes: Writes) {
    tlb.fill(CONTEXT, address, Gpa(address), PageSize::Size4K, Hpa(hpa), writes);
}

fn pages(start: u64, nr_pages: u64) -> GfnRange {
    GfnRange::new(Gfn(start), nr_pages)
}

#[test]
fn a_look_up_finds_what_was_filled_in_each_size() {
    for (size, offset) in SIZES.into_iter().zip([0xff8, 0x12_3458, 0x1234_5678]) {
        let mut tlb = tlb();
        let base = 5 << 30;
        let hpa = 1 << 47 | 3 << 30;
        tlb.fill(CONTEXT, base + 8, Gpa(8), size, Hpa(hpa + 8), Writes::MustWalk);
        assert_eq!(tlb.lookup_read(CONTEXT, base + offset), Some(Hpa(hpa + offset)));
        assert_eq!(tlb.lookup_read(CONTEXT, base + size.size_bytes()), None);
        assert_eq!(tlb.nr_misses(), 1);
    }
}

#[test]
fn contexts_are_separate() {
    let mut tlb = tlb();
    fill_small(&mut tlb, 0, 0x9000, Writes::Allowed);
    for other in [Context { vm: 2, ..CONTEXT }, Context { pcid: 3, ..CONTEXT }] {
        assert_eq!(tlb.lookup_read(other, 0), None);
        tlb.invalidate_context(other);
    }
    assert_eq!(tlb.lookup_read(CONTEXT, 0), Some(Hpa(0x9000)));
    tlb.invalidate_context(CONTEXT);
    assert_eq!(tlb.lookup_read(CONTEXT, 0), None);
}

#[test]
fn a_read_filled_entry_does_not_serve_writes_until_a_write_fills_it() {
    let mut tlb = tlb();
    fill_small(&mut tlb, 0x1000, 0x9000, Writes::MustWalk);
    assert_eq!(tlb.lookup_write(CONTEXT, 0x1000), None);
    fill_small(&mut tlb, 0x1000, 0x9000, Writes::Allowed);
    assert_eq!(tlb.lookup_write(CONTEXT, 0x1008), Some(Hpa(0x9008)));
    assert_eq!(tlb.lookup_read(CONTEXT, 0x1008), Some(Hpa(0x9008)));
    assert_eq!(tlb.clear(), 1, "it replaced the other");
}

#[test]
fn a_small_page_serves_writes_beside_a_read_filled_large_one() {
    let mut tlb = tlb();
    tlb.fill(CONTEXT, 0, Gpa(0), PageSize::Size2M, Hpa(0x20_0000), Writes::MustWalk);
    fill_small(&mut tlb, 0x1000, 0x20_1000, Writes::Allowed);
    assert_eq!(tlb.lookup_write(CONTEXT, 0x1000), Some(Hpa(0x20_1000)));
}

#[test]
fn dead_entries_are_replaced_before_live_ones() {
    let mut tlb = tlb();
    // Pages 0, 2, 4 and 6 share a set of two ways; page 0 dies.
    fill_small(&mut tlb, 0, 0xa000, Writes::Allowed);
    fill_small(&mut tlb, 0x2000, 0xb000, Writes::Allowed);
    assert_eq!(tlb.drop_range(pages(0, 1)), 1);
    fill_small(&mut tlb, 0x4000, 0xc000, Writes::Allowed);
    assert!(tlb.lookup_read(CONTEXT, 0x2000).is_some());
    assert!(tlb.lookup_read(CONTEXT, 0x4000).is_some());
    // No dead one left: one of the two is replaced.
    fill_small(&mut tlb, 0x6000, 0xd000, Writes::Allowed);
    let live = [0x2000, 0x4000, 0x6000].map(|address| tlb.lookup_read(CONTEXT, address).is_some());
    assert_eq!(live.iter().filter(|live| **live).count(), 2);
    assert!(live[2]);
    assert_eq!(tlb.clear(), 2);
}

#[test]
fn a_page_and_everything_can_be_dropped() {
    let mut tlb = tlb();
    tlb.fill(CONTEXT, 0, Gpa(0), PageSize::Size2M, Hpa(0x20_0000), Writes::Allowed);
    tlb.fill(CONTEXT, 0x20_0000, Gpa(0x20_0000), PageSize::Size2M, Hpa(0x40_0000), Writes::Allowed);
    tlb.invalidate_page(CONTEXT, 0x1000);
    assert_eq!(tlb.lookup_read(CONTEXT, 0), None);
    assert!(tlb.lookup_read(CONTEXT, 0x20_0000).is_some());
    assert_eq!(tlb.clear(), 1);
    assert_eq!(tlb.lookup_read(CONTEXT, 0x20_0000), None);
    assert_eq!(tlb.clear(), 0);
}

#[test]
fn odd_geometries_are_rounded() {
    let mut tlb = Tlb::new(Geometry { size_4k: (0, 0), size_2m: (3, 1000), size_1g: (1, 1) });
    fill_small(&mut tlb, 0, 0x1000, Writes::Allowed);
    assert!(tlb.lookup_write(CONTEXT, 0).is_some());
    assert_eq!(tlb.drop_range(pages(0, 1)), 1);
}

#[test]
fn one_small_page_drops_the_large_ones_around_it() {
    for distance in DISTANCES {
        for size in SIZES {
            let nr_pages = size.size_bytes() / PAGE_SIZE;
            for page in [0, nr_pages / 2, nr_pages - 1] {
                let mut tlb = Tlb::new(Geometry::default());
                for address in [1 << 30, 2 << 30] {
                    // By an access in the middle of the page.
                    let [gva, gpa, hpa] = [0, distance, 0].map(|offset| address + offset + size.size_bytes() - 8);
                    tlb.fill(CONTEXT, gva, Gpa(gpa), size, Hpa(hpa), Writes::Allowed);
                }
                let gfn = ((1 << 30) + distance) / PAGE_SIZE;
                for beside in [pages(gfn - 1, 1), pages(gfn + nr_pages, 1), pages(gfn + page, 0)] {
                    let is_other = size == PageSize::Size1G && beside.start.0 == gfn + nr_pages;
                    assert!(is_other || tlb.drop_range(beside) == 0, "{size:?} {beside:?}");
                }
                assert_eq!(tlb.drop_range(pages(gfn + page, 1)), 1, "{size:?} {page}");
                assert_eq!(tlb.lookup_read(CONTEXT, 1 << 30), None);
                assert_eq!(tlb.lookup_read(CONTEXT, 2 << 30), Some(Hpa(2 << 30)));
            }
        }
    }
}

#[test]
fn a_range_names_guest_physical_pages() {
    let mut tlb = Tlb::new(Geometry::default());
    // Guest pages 1 and 2 are guest-physical 2 and 1.
    tlb.fill(CONTEXT, 0x1000, Gpa(0x2000), PageSize::Size4K, Hpa(0xa000), Writes::Allowed);
    tlb.fill(CONTEXT, 0x2000, Gpa(0x1000), PageSize::Size4K, Hpa(0xb000), Writes::Allowed);
    assert_eq!(tlb.drop_range(pages(1, 1)), 1);
    assert_eq!(tlb.lookup_read(CONTEXT, 0x1000), Some(Hpa(0xa000)));
    assert_eq!(tlb.lookup_read(CONTEXT, 0x2000), None);
}

#[test]
fn a_range_drops_its_pages_in_all_contexts() {
    for distance in DISTANCES {
        let mut tlb = Tlb::new(Geometry::default());
        for pcid in [1, 2, Context::UNPAGED] {
            let context = Context { vm: 1, pcid };
            let gpa = if pcid == Context::UNPAGED { 0x3000 } else { 0x3000 + distance };
            tlb.fill(context, 0x3000, Gpa(gpa), PageSize::Size4K, Hpa(0xa000), Writes::Allowed);
        }
        assert_eq!(tlb.drop_range(pages(3, 1)), if distance == 0 { 3 } else { 1 });
        assert_eq!(tlb.drop_range(pages(3 + distance / PAGE_SIZE, 1)), if distance == 0 { 0 } else { 2 });
    }
}

#[test]
fn no_entry_is_live_again_after_the_last_version() {
    let mut tlb = tlb();
    fill_small(&mut tlb, 0x1000, 0x9000, Writes::Allowed);
    let array = &mut tlb.arrays[0];
    assert_eq!(array.version, FIRST_VERSION);
    // As after all but the last version.
    array.clear();
    array.version = !(FIRST_VERSION - 1);
    fill_small(&mut tlb, 0x2000, 0x8000, Writes::Allowed);
    assert_eq!(tlb.clear(), 1);
    assert_eq!(tlb.arrays[0].version, FIRST_VERSION);
    assert_eq!(tlb.lookup_read(CONTEXT, 0x1000), None);
    assert_eq!(tlb.lookup_read(CONTEXT, 0x2000), None);
}

/// Random fills and drops against a list. The TLB is so large that nothing is replaced.
#[test]
fn a_range_drops_exactly_its_pages() {
    use rand::{RngExt, SeedableRng};
    let mut random = rand::rngs::SmallRng::seed_from_u64(7);
    for distance in DISTANCES {
        let mut tlb = Tlb::new(Geometry { size_4k: (64, 64), size_2m: (16, 64), size_1g: (4, 64) });
        let mut kept: Vec<(u64, PageSize)> = Vec::new();
        for turn in 0..3000 {
            let size = SIZES[random.random_range(0..3)];
            let address = random.random_range(0..8_u64 << 30) & !(size.size_bytes() - 1);
            if kept.len() < 60 && !kept.contains(&(address, size)) {
                tlb.fill(CONTEXT, address, Gpa(address + distance), size, Hpa(address), Writes::Allowed);
                kept.push((address, size));
            }
            if turn % 4 == 0 {
                let start = (kept[random.random_range(0..kept.len())].0 + distance) / PAGE_SIZE;
                let before = random.random_range(0..3).min(start);
                let nr_pages = [1, 3, 700, 1 << 18, 1 << 40][random.random_range(0..5)];
                let range = pages(start - before, nr_pages);
                let is_hit = |&(address, size): &(u64, PageSize)| {
                    range.overlaps(pages((address + distance) / PAGE_SIZE, size.size_bytes() / PAGE_SIZE))
                };
                let nr_hit = kept.iter().filter(|entry| is_hit(entry)).count() as u64;
                assert_eq!(tlb.drop_range(range), nr_hit, "{range:?}");
                kept.retain(|entry| !is_hit(entry));
                if kept.is_empty() {
                    continue;
                }
            }
            for &(address, size) in &kept {
                let array = &tlb.arrays[SIZES.iter().position(|&other| other == size).unwrap()];
                assert!(array.find(CONTEXT, address).is_some(), "{size:?} {address:#x} in turn {turn}");
            }
            assert_eq!(tlb.arrays.iter().map(|array| array.nr_live).sum::<u64>(), kept.len() as u64);
        }
    }
}

#[test]
fn another_size_of_a_page_is_found_in_either_order() {
    let block = 5 << 30;
    for (first, cached) in SIZES.into_iter().enumerate() {
        for (second, walked) in SIZES.into_iter().enumerate() {
            let mut tlb = tlb();
            // Somewhere in the middle of the larger one.
            let (at, again) = (block + 0x1000, if first < second { block } else { block + 0x1000 });
            tlb.fill(CONTEXT, at, Gpa(at), cached, Hpa(1 << 47 | at), Writes::Allowed);
            let found = (first != second).then_some(cached);
            assert_eq!(tlb.other_size(CONTEXT, again, walked), found, "{cached:?}, then {walked:?}");
            let beyond = block + cached.size_bytes().max(walked.size_bytes());
            assert_eq!(tlb.other_size(CONTEXT, beyond, walked), None);
            assert_eq!(tlb.other_size(Context { vm: 2, ..CONTEXT }, again, walked), None);
            tlb.drop_range(GfnRange::new(Gpa(at).gfn(), 1));
            assert_eq!(tlb.other_size(CONTEXT, again, walked), None, "it was flushed");
        }
    }
}

#[test]
fn an_entry_serves_accesses_that_need_no_other_rights() {
    let all = [Rights::WRITE, Rights::EXECUTE, Rights::USER, Rights::SUPERVISOR];
    for missing in all {
        let mut tlb = tlb();
        let rights = all.into_iter().filter(|&right| right != missing).fold(Rights::NONE, Rights::and);
        tlb.fill(CONTEXT, 0x1000, Gpa(0), PageSize::Size4K, Hpa(0x9000), rights);
        assert_eq!(tlb.lookup(CONTEXT, 0x1018, rights), Some(Hpa(0x9018)));
        assert_eq!(tlb.lookup(CONTEXT, 0x1018, Rights::NONE), Some(Hpa(0x9018)));
        for needed in all {
            assert_eq!(tlb.lookup(CONTEXT, 0x1018, needed).is_some(), needed != missing, "{missing:?}");
            assert_eq!(tlb.lookup(CONTEXT, 0x1018, needed.and(missing)), None, "{missing:?}");
        }
        assert!(rights.grant(rights) && !rights.and(missing).without(missing).grant(missing));
    }
}

#[test]
fn a_page_is_dropped_in_all_contexts_of_its_vm() {
    for size in SIZES {
        let mut tlb = Tlb::new(Geometry { size_4k: (2, 4), size_2m: (2, 4), size_1g: (1, 8) });
        let contexts = [(1, 2), (1, 3), (2, 2)].map(|(vm, pcid)| Context { vm, pcid });
        let at = |page: u64| page * size.size_bytes() + 8;
        for (context, page) in contexts.into_iter().flat_map(|context| [(context, 5), (context, 6)]) {
            tlb.fill(context, at(page), Gpa(0), size, Hpa(0), Writes::Allowed);
        }
        tlb.invalidate_page_in_vm(1, at(6) - 16);
        let found = contexts.map(|context| [5, 6].map(|page| tlb.lookup_read(context, at(page)).is_some()));
        assert_eq!(found, [[false, true], [false, true], [true, true]], "{size:?}");
    }
}
