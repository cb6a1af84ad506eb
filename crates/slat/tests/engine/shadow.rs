//! Shadow paging, case by case: a guest with long-mode page tables in its memory, and a CPU that
//! walks the shadow page tables.

#![allow(unsafe_code, reason = "implements the host's contract over the global allocator")]

mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use slat::shadow::{GuestAccess, Gva, LocalFlush, Privilege, ShadowStrategy};
use slat::{Access, Exit, Gfn, GfnRange, Gpa, Outcome};
use world::World;

use crate::shadow_cpu::{A, D, G, NX, P, PS, U, W};

const STRATEGIES: [ShadowStrategy; 4] =
    [ShadowStrategy::Baseline, ShadowStrategy::RootCache, ShadowStrategy::RootsByPcid, ShadowStrategy::PcidTagged];

/// An address whose indices all differ.
const VA: u64 = 0x0000_1234_5678_9000;

#[test]
fn a_page_is_mapped_and_marked() {
    for strategy in STRATEGIES {
        let mut world = World::new(strategy);
        let cr3 = world.map(0x10, VA, 0x80, P | W | U);
        world.long_mode(cr3);
        world.write_frame(0x80, 0, 0x1234);
        assert_eq!(world.read(VA), Ok(0x1234), "{strategy:?}");
        assert_eq!(world.entry_of(cr3, VA) & (A | D), A);
        world.write(VA + 8, 7).unwrap();
        assert_eq!(world.entry_of(cr3, VA) & (A | D), A | D);
        assert_eq!(world.frame_word(0x80, 1), 7);
        world.check_end();
    }
}

#[test]
fn a_guest_page_fault_is_delivered_to_the_guest() {
    let mut world = World::new(ShadowStrategy::RootCache);
    let cr3 = world.map(0x10, VA, 0x80, P | U);
    world.long_mode(cr3);
    assert_eq!(world.read(VA), Ok(0));
    assert_eq!(world.write(VA, 1), Err(Exit::PageFault { gva: Gva(VA), error_code: 0b11 }));
    assert_eq!(world.read(VA + 0x1000), Err(Exit::PageFault { gva: Gva(VA + 0x1000), error_code: 0 }));
    world.privilege = Privilege::User;
    assert_eq!(world.write(VA, 1), Err(Exit::PageFault { gva: Gva(VA), error_code: 0b111 }));
    world.check_end();
}

#[test]
fn a_changed_entry_may_be_stale_until_it_is_flushed() {
    for strategy in STRATEGIES {
        let mut world = World::new(strategy);
        let cr3 = world.map(0x10, VA, 0x80, P | W | U);
        world.long_mode(cr3);
        world.write_frame(0x80, 0, 80);
        world.write_frame(0x81, 0, 81);
        assert_eq!(world.read(VA), Ok(80));
        world.set_entry(cr3, VA, 0x81 << 12 | P | W | U | A | D);
        world.invlpg(VA);
        assert_eq!(world.read(VA), Ok(81), "{strategy:?}: INVLPG");
        world.set_entry(cr3, VA, 0x80 << 12 | P | W | U | A | D);
        world.load_cr3(cr3);
        assert_eq!(world.read(VA), Ok(80), "{strategy:?}: CR3");
        world.check_end();
    }
}

#[test]
fn the_guest_writes_its_own_tables() {
    for strategy in STRATEGIES {
        let mut world = World::new(strategy);
        let cr3 = world.map(0x10, VA, 0x80, P | W | U);
        // All page tables are mapped at 1 GiB and on, too.
        let window = 1 << 30;
        for frame in 0x10..0x40 {
            world.map_more(cr3, window + frame * 0x1000, frame, P | W);
        }
        world.long_mode(cr3);
        world.write_frame(0x80, 0, 80);
        world.write_frame(0x81, 0, 81);
        assert_eq!(world.read(VA), Ok(80));
        for level in [1, 2, 3, 4] {
            let place = world.place_of(cr3, VA, level);
            let old = world.read(window + place).unwrap();
            // Not present, flushed, and back.
            world.write(window + place, 0).unwrap();
            world.invlpg(VA);
            assert!(matches!(world.read(VA), Err(Exit::PageFault { error_code: 0, .. })), "{strategy:?} {level}");
            world.write(window + place, old).unwrap();
            assert_eq!(world.read(VA), Ok(80), "{strategy:?} {level}");
        }
        let stats = world.vm.stats();
        assert!(stats.emulated_writes >= 6, "upper tables are tracked: {stats:?}");
        world.load_cr3(cr3);
        // In sync now, and protected; a write through another address makes it unsync.
        let place = world.place_of(cr3, VA, 1);
        world.write(window + place, 0x81 << 12 | P | W | U | A | D).unwrap();
        world.invlpg(VA);
        assert_eq!(world.read(VA), Ok(81));
        world.check_end();
    }
}

/// A page fault flushes its address (Intel SDM vol. 3A, "Operations that Invalidate TLBs and
/// Paging-Structure Caches").
#[test]
fn a_page_fault_removes_the_stale_translation() {
    for (strategy, first) in STRATEGIES.into_iter().flat_map(|strategy| [(strategy, 0x81 << 12 | P | A), (strategy, 0)])
    {
        let mut world = World::new(strategy);
        let cr3 = world.map(0x10, VA, 0x80, P | A);
        let window = 1 << 30;
        let place = world.place_of(cr3, VA, 1);
        world.map_more(cr3, window, place >> 12, P | W);
        world.long_mode(cr3);
        world.write_frame(0x80, 0, 80);
        world.write_frame(0x81, 0, 81);
        assert_eq!(world.read(VA), Ok(80));
        world.write(window + place % 4096, first).unwrap();
        assert_eq!(world.read(VA), Ok(80), "nothing was flushed: {strategy:?}");
        let flushes = world.nr_flushes();
        assert!(matches!(world.write(VA, 1), Err(Exit::PageFault { .. })));
        assert_eq!(world.nr_flushes(), flushes + 1, "for what was stale");
        world.write(window + place % 4096, 0x81 << 12 | P | A).unwrap();
        assert_eq!(world.read(VA), Ok(81), "{strategy:?}: after the page fault");
        let flushes = world.nr_flushes();
        assert!(matches!(world.write(VA, 1), Err(Exit::PageFault { .. })));
        assert!(matches!(world.read(VA + 4096), Err(Exit::PageFault { .. })));
        assert_eq!(world.nr_flushes(), flushes, "nothing was stale: {strategy:?}");
        world.check_end();
    }
}

/// Two roots of one PCID: a page fault in one removes what the other has cached for the address.
#[test]
fn a_page_fault_flushes_its_own_pcid() {
    for strategy in STRATEGIES {
        let mut world = World::new(strategy);
        let first = world.map(0x10, VA, 0x80, P | A);
        let second = world.map(0x20, VA, 0x82, 0);
        let window = 1 << 30;
        let place = world.place_of(first, VA, 1);
        world.map_more(second, window, place >> 12, P | W);
        world.write_frame(0x80, 0, 80);
        world.write_frame(0x81, 0, 81);
        world.long_mode_with_pcids(first);
        let keep = 1 << 63;
        world.load_cr3(first | 1);
        assert_eq!(world.read(VA), Ok(80));
        world.load_cr3(second | 1 | keep);
        world.write(window + place % 4096, 0x81 << 12 | P | A).unwrap();
        assert!(matches!(world.read(VA), Err(Exit::PageFault { .. })));
        world.load_cr3(first | 1 | keep);
        assert_eq!(world.read(VA), Ok(81), "{strategy:?}");
        world.check_end();
    }
}

/// An emulated write spans a flush. A fault that needs the page table meanwhile yields the CPU and
/// resumes the guest.
#[test]
fn a_fault_does_not_wait_for_an_emulated_write() {
    for strategy in STRATEGIES {
        let mut world = World::new(strategy);
        let cr3 = world.map(0x10, VA, 0x80, P | W | U);
        world.long_mode(cr3);
        assert_eq!(world.read(VA), Ok(0));
        for level in [1, 2] {
            let place = world.place_of(cr3, VA, level);
            let entry = world.frame_word(place >> 12, place % 4096 / 8);
            let mut other = world.vm.create_vcpu().unwrap();
            other.set_paging_registers(world.vcpu.paging_registers().unwrap()).unwrap();
            other.entry().unwrap();
            let met = Arc::new(Mutex::new(None));
            let (vm, result) = (Arc::clone(&world.vm), Arc::clone(&met));
            vm.host().during_next_flush({
                let vm = Arc::clone(&vm);
                move || {
                    let before = vm.host().nr_yields();
                    let read = GuestAccess { access: Access::Read, privilege: Privilege::Supervisor };
                    let outcome = other.handle_page_fault(Gva(VA), read);
                    *result.lock().unwrap() = Some((outcome, vm.host().nr_yields() - before));
                }
            });
            assert_eq!(world.vcpu.write_guest_table(Gpa(place), &entry.to_le_bytes()), Ok(Outcome::Resume));
            assert_eq!(*met.lock().unwrap(), Some((Ok(Outcome::Resume), 1)), "{strategy:?}, level {level}");
            assert_eq!(world.read(VA), Ok(0));
        }
        world.check_end();
    }
}

/// A vCPU is preempted in the middle of a fault, wherever it holds the lock of a guest frame and
/// perhaps that of a shadow page. Another one that faults beside it resumes its guest.
#[test]
fn a_fault_does_not_wait_for_a_preempted_one() {
    for (strategy, is_linked) in STRATEGIES.into_iter().flat_map(|strategy| [(strategy, true), (strategy, false)]) {
        let mut nr_met = 0;
        for nth in 0.. {
            let mut world = World::new(strategy);
            let cr3 = world.map(0x10, VA, 0x80, P | W | U);
            world.map_more(cr3, VA + 0x1000, 0x81, P | W | U);
            world.map_more(cr3, VA + 0x2000, 0x82, P | W | U);
            world.long_mode(cr3);
            if is_linked {
                assert_eq!(world.read(VA), Ok(0));
            }
            world.vcpu.entry().unwrap();
            let mut other = world.vm.create_vcpu().unwrap();
            other.set_paging_registers(world.vcpu.paging_registers().unwrap()).unwrap();
            other.entry().unwrap();
            let met = Arc::new(Mutex::new(None));
            let (vm, result) = (Arc::clone(&world.vm), Arc::clone(&met));
            world.vm.host().under_lock_after(nth, move || {
                let before = vm.host().nr_yields();
                let read = GuestAccess { access: Access::Read, privilege: Privilege::Supervisor };
                let outcome = other.handle_page_fault(Gva(VA + 0x1000), read);
                *result.lock().unwrap() = Some((outcome, vm.host().nr_yields() - before));
            });
            assert_eq!(world.read(VA + 0x2000), Ok(0));
            if !world.vm.host().has_run_under_lock() {
                break;
            }
            let (outcome, nr_yields) = met.lock().unwrap().take().unwrap();
            assert_eq!(outcome, Ok(Outcome::Resume), "{strategy:?}, linked {is_linked}, access {nth}");
            assert!(nr_yields <= 1, "{strategy:?}, linked {is_linked}, access {nth}: {nr_yields} yields");
            nr_met += nr_yields;
            for page in 0..3 {
                assert_eq!(world.read(VA + page * 0x1000), Ok(0));
            }
            world.check_end();
        }
        assert!(nr_met >= 3, "{strategy:?}, linked {is_linked}: {nr_met} faults found a lock held");
    }
}

/// The flush of an emulated write panics. Nothing was written, and faults are served as before.
#[test]
fn an_emulated_write_ends_with_a_panic_of_the_host() {
    for strategy in STRATEGIES {
        let mut world = World::new(strategy);
        let cr3 = world.map(0x10, VA, 0x80, P | W | U);
        world.long_mode(cr3);
        assert_eq!(world.read(VA), Ok(0));
        let place = world.place_of(cr3, VA, 1);
        world.vm.host().during_next_flush(|| panic!("a panic of the host"));
        let write = AssertUnwindSafe(|| world.vcpu.write_guest_table(Gpa(place), &0_u64.to_le_bytes()));
        assert!(catch_unwind(write).is_err(), "{strategy:?}");
        assert_eq!(world.read(VA), Ok(0), "{strategy:?}");
        world.check_end();
    }
}

#[test]
fn large_pages_are_mapped_no_larger_than_the_hosts() {
    let mut world = World::new(ShadowStrategy::RootCache);
    let cr3 = world.map_large(0x10, 0x4000_0000, 0, P | W | U | PS | G | NX);
    world.long_mode(cr3);
    world.write_frame(0x123, 0, 5);
    assert_eq!(world.read(0x4012_3000), Ok(5));
    world.write(0x4012_3000, 6).unwrap();
    assert_eq!(world.frame_word(0x123, 0), 6);
    assert!(matches!(world.fetch(0x4012_3000), Err(Exit::PageFault { .. })));
    world.check_end();
}

#[test]
fn an_invalidation_removes_shadow_leaves() {
    for strategy in STRATEGIES {
        let mut world = World::new(strategy);
        let cr3 = world.map(0x10, VA, 0x80, P | W | U);
        world.long_mode(cr3);
        world.write(VA, 80).unwrap();
        let other = world.move_frame(0x80);
        assert_eq!(world.read(VA), Ok(80), "the page moved with what is in it");
        world.write(VA, 81).unwrap();
        assert_eq!(world.backing_word(other), 81);
        // A page table moves.
        for frame in 0x10..0x14 {
            world.move_frame(frame);
            assert_eq!(world.read(VA), Ok(81), "{strategy:?}: table {frame:#x}");
        }
        world.check_end();
    }
}

#[test]
fn writes_are_logged() {
    for strategy in STRATEGIES {
        let mut world = World::new(strategy);
        let cr3 = world.map(0x10, VA, 0x80, P | W | U);
        world.long_mode(cr3);
        world.write(VA, 1).unwrap();
        world.log(true);
        assert_eq!(world.dirty(), Vec::<u64>::new());
        world.write(VA, 2).unwrap();
        assert_eq!(world.dirty(), [0x80]);
        assert_eq!(world.dirty(), Vec::<u64>::new());
        world.read(VA).unwrap();
        assert_eq!(world.dirty(), Vec::<u64>::new());
        world.write(VA, 3).unwrap();
        assert_eq!(world.dirty(), [0x80]);
        // A and D are written too.
        world.map_more(cr3, VA + 0x1000, 0x81, P | W);
        world.dirty();
        world.read(VA + 0x1000).unwrap();
        let table = world.place_of(cr3, VA, 1) >> 12;
        assert_eq!(world.dirty(), [table], "{strategy:?}: the accessed bit");
        world.log(false);
        world.check_end();
    }
}

#[test]
fn switches_hit_and_keep() {
    for strategy in STRATEGIES {
        let mut world = World::new(strategy);
        let first = world.map(0x10, VA, 0x80, P | W | U);
        let second = world.map(0x20, VA, 0x81, P | W | U);
        world.write_frame(0x80, 0, 80);
        world.write_frame(0x81, 0, 81);
        world.long_mode_with_pcids(first);
        let keep = 1 << 63;
        for _ in 0..3 {
            world.load_cr3(first | 1 | keep);
            assert_eq!(world.read(VA), Ok(80));
            world.load_cr3(second | 2 | keep);
            assert_eq!(world.read(VA), Ok(81));
        }
        let stats = world.vm.stats();
        if strategy == ShadowStrategy::Baseline {
            assert_eq!(stats.root_hits, 0);
        } else {
            assert_eq!(stats.root_hits, 4, "{strategy:?}");
        }
        // The flush happened while another root was current.
        world.set_entry(first, VA, 0x81 << 12 | P | W | U | A | D);
        world.invpcid(1, 1, 0).unwrap();
        world.load_cr3(first | 1 | keep);
        assert_eq!(world.read(VA), Ok(81), "{strategy:?}");
        world.load_cr3(second | 2 | keep);
        world.set_entry(first, VA, 0x80 << 12 | P | W | U | A | D);
        world.invpcid(0, 1, VA).unwrap();
        world.load_cr3(first | 1 | keep);
        assert_eq!(world.read(VA), Ok(80), "{strategy:?}");
        assert_eq!(world.invpcid(4, 0, 0), Err(Exit::GeneralProtection));
        assert_eq!(world.invpcid(1, 1 << 12, 0), Err(Exit::GeneralProtection));
        assert_eq!(world.invpcid(0, 0, 1 << 47), Err(Exit::GeneralProtection));
        world.check_end();
    }
}

/// As KVM until 2018: the pages of a root that was left are found again by frame and role.
#[test]
fn the_baseline_keeps_shadow_pages_and_synchronizes_each_root() {
    let mut world = World::new(ShadowStrategy::Baseline);
    let first = world.map(0x10, VA, 0x80, P | W | U);
    let second = world.map(0x20, VA, 0x81, P | W | U);
    world.write_frame(0x80, 0, 80);
    world.write_frame(0x81, 0, 81);
    world.long_mode_with_pcids(first);
    assert_eq!(world.read(VA), Ok(80));
    let root = world.vcpu.entry().unwrap().root;
    world.load_cr3(second | 2);
    assert_eq!(world.read(VA), Ok(81));
    let built = world.vm.stats().shadow_pages_built;
    // The guest's table is unsync, so the load must find the new PTE, also with bit 63.
    world.set_entry(first, VA, 0x81 << 12 | P | W | U | A | D);
    world.load_cr3(first | 1 | 1 << 63);
    assert_eq!(world.read(VA), Ok(81));
    assert_eq!(world.vcpu.entry().unwrap().root, root);
    let stats = world.vm.stats();
    assert_eq!((stats.shadow_pages_built, stats.root_hits), (built, 0));
    assert!(stats.shadow_syncs > 0);
    world.load_cr3(second | 2 | 1 << 63);
    assert_eq!(world.vcpu.entry().unwrap().flush, LocalFlush::Context, "each load flushes the TLB");
    world.check_end();
}

/// INVPCID of another PCID than the current one synchronizes at once, or at the next switch.
#[test]
fn roots_by_pcid_are_invalidated_at_once() {
    for (strategy, is_at_once) in [(ShadowStrategy::RootCache, false), (ShadowStrategy::RootsByPcid, true)] {
        let mut world = World::new(strategy);
        let first = world.map(0x10, VA, 0x80, P | W | U);
        let second = world.map(0x20, VA, 0x81, P | W | U);
        world.write_frame(0x81, 0, 81);
        world.long_mode_with_pcids(first);
        world.load_cr3(first | 1);
        world.read(VA).unwrap();
        world.load_cr3(second | 2);
        for kind in [0, 1] {
            let before = world.vm.stats().entries_compared;
            world.invpcid(kind, 1, VA).unwrap();
            let compared = world.vm.stats().entries_compared - before;
            assert_eq!(compared > 0, is_at_once, "{strategy:?}, type {kind}");
        }
        world.set_entry(first, VA, 0x81 << 12 | P | W | U | A | D);
        world.invpcid(1, 1, 0).unwrap();
        world.load_cr3(first | 1 | 1 << 63);
        assert_eq!(world.read(VA), Ok(81), "{strategy:?}");
        world.check_end();
    }
}

/// A vCPU remembers one root for a PCID: another address space takes its place.
#[test]
fn a_pcid_has_one_root() {
    let mut world = World::new(ShadowStrategy::RootsByPcid);
    let first = world.map(0x10, VA, 0x80, P | W | U);
    let second = world.map(0x20, VA, 0x81, P | W | U);
    world.write_frame(0x80, 0, 80);
    world.write_frame(0x81, 0, 81);
    world.long_mode_with_pcids(first);
    for _ in 0..2 {
        world.load_cr3(first | 1);
        assert_eq!(world.read(VA), Ok(80));
        world.load_cr3(second | 1);
        assert_eq!(world.read(VA), Ok(81));
    }
    assert_eq!(world.vm.stats().root_hits, 0);
    world.load_cr3(second | 1 | 1 << 63);
    assert_eq!(world.vm.stats().root_hits, 1);
    world.check_end();
}

#[test]
fn bit_63_is_reserved_without_pcids() {
    let mut world = World::new(ShadowStrategy::RootCache);
    let cr3 = world.map(0x10, VA, 0x80, P | W | U);
    world.long_mode(cr3);
    assert_eq!(world.vcpu.load_cr3(cr3 | 1 << 63), Ok(Outcome::Exit(Exit::GeneralProtection)));
    assert_eq!(world.read(VA), Ok(0));
    assert_ne!(world.vcpu.entry().unwrap().flush, LocalFlush::All);
    world.check_end();
}

#[test]
fn without_paging_addresses_are_physical() {
    let mut world = World::new(ShadowStrategy::RootCache);
    world.write_frame(0x80, 3, 9);
    assert_eq!(world.read(0x80018), Ok(9));
    world.write(0x80018, 10).unwrap();
    assert_eq!(world.frame_word(0x80, 3), 10);
    assert!(matches!(world.read(0x4000_0000), Err(Exit::Mmio { .. })));
    world.check_end();
}

#[test]
fn few_tables_do() {
    for strategy in STRATEGIES {
        let mut world = World::with_pages(strategy, 64);
        let cr3 = world.map(0x10, VA, 0x200, P | W | U);
        for nth in 0..100 {
            world.map_more(cr3, (nth << 30) + 0x20_0000 * nth, 0x200 + nth, P | W);
            world.write_frame(0x200 + nth, 0, nth);
        }
        world.long_mode(cr3);
        for _ in 0..3 {
            for nth in 0..100 {
                assert_eq!(world.read((nth << 30) + 0x20_0000 * nth), Ok(nth), "{strategy:?}");
            }
        }
        assert!(world.vm.stats().shadow_evictions > 0);
        assert!(world.vm.stats().shadow_pages_peak <= 64);
        world.check_end();
    }
}

#[test]
fn an_invalidation_of_all_memory_is_safe_at_any_time() {
    let mut world = World::new(ShadowStrategy::RootCache);
    let cr3 = world.map(0x10, VA, 0x80, P | W | U);
    world.long_mode(cr3);
    world.write(VA, 1).unwrap();
    drop(world.vm.invalidate_range(GfnRange::new(Gfn(0), 1 << 10)).unwrap());
    assert_eq!(world.vm.stats().shadow_leaves(), 0);
    assert_eq!(world.read(VA), Ok(1));
    let _ = Access::Read;
    world.check_end();
}
