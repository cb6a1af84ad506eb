//! The machine with CPUs that have no second stage: the same guests, through page tables of their
//! own in one address space.

use slat::baselines::Locking;
use slat::dirty::{DirtyTracking, HugePageLogging, ManualProtect};
use slat::format::{Ept, Npt};
use slat::shadow::ShadowPaging;
use slat::{Config, PAGE_SIZE, PageSize};

use super::events_tests::{self, EVENTS, run_beside};
use super::tests::{dirty_pages, huge, populate_then_log, small, toggle_logging_beside_guests};
use super::*;
use crate::hardware::tlb::Geometry;
use crate::memory::BackingKind;
use crate::memory::numa::FirstTouch;
use crate::vm::guest::{Order, Sharing, value};

/// `config` with shadow paging.
fn shadow(config: MachineConfig) -> MachineConfig {
    let nr_pages = config.bytes_per_vcpu * config.nr_vcpus as u64 / PAGE_SIZE;
    MachineConfig { shadow: Some(shadow_paging(nr_pages)), ..config }
}

#[test]
fn guests_run_and_the_dirty_log_has_their_writes() {
    for locking in [Locking::None, Locking::Shared, Locking::Exclusive] {
        for protection in [DirtyTracking::WriteProtect, DirtyTracking::WriteProtectLeaves] {
            let engine = Config::default().with_locking(locking).with_dirty_tracking(protection);
            populate_then_log::<Npt>(&shadow(MachineConfig { engine, ..small() }));
        }
    }
    let tlb = Geometry { size_4k: (2, 2), size_2m: (1, 1), size_1g: (1, 1) };
    populate_then_log::<Npt>(&shadow(MachineConfig { flush_method: Some(FlushMethod::Waiting), tlb, ..small() }));
}

#[test]
fn large_pages_of_host_and_guest_combine_in_any_way() {
    for backing in [BackingKind::Anonymous, BackingKind::AnonymousThp] {
        for guest_page_size in [PageSize::Size4K, PageSize::Size2M] {
            for logging in [HugePageLogging::Split, HugePageLogging::MarkWhole] {
                // Whole pages of 2 MiB are reported, as the user of the machine has chosen.
                if logging == HugePageLogging::MarkWhole && backing == BackingKind::AnonymousThp {
                    continue;
                }
                let engine = Config::default().with_huge_page_logging(logging);
                let config = MachineConfig { backing, guest_page_size, engine, ..huge() };
                populate_then_log::<Npt>(&shadow(config));
            }
        }
    }
    for guest_page_size in [PageSize::Size4K, PageSize::Size2M] {
        toggle_logging_beside_guests::<Npt>(&shadow(MachineConfig { guest_page_size, ..huge() }));
    }
}

#[test]
fn large_pages_of_the_guest_are_for_a_second_stage_too() {
    let paging = crate::hardware::cpu::Paging::TwoDimensional;
    populate_then_log::<Ept>(&MachineConfig { guest_page_size: PageSize::Size2M, paging, ..huge() });
}

#[test]
fn one_address_space_has_one_set_of_shadow_tables() {
    let machine =
        Machine::<Npt>::new(&shadow(MachineConfig { nr_vcpus: 8, bytes_per_vcpu: 2 << 20, ..small() })).unwrap();
    let program = Program { sharing: Sharing::Overlapping, ..Program::default() };
    machine.run(program).unwrap();
    let vm = machine.vm();
    // A shadow page for each 2 MiB, and those above; and those of the page tables with which paging
    // was turned on: three for each CPU at most.
    let stats = vm.stats();
    assert!((8 + 3..=8 + 3 + 3 * 8).contains(&stats.shadow_pages), "{}", stats.shadow_pages);
    assert!(stats.shadow_leaves() >= machine.nr_pages(), "{stats:?}");
    assert_eq!((stats.shadow_evictions, stats.guest_page_faults), (0, 0), "{stats:?}");
}

#[test]
fn the_host_changes_memory_below_shadow_tables() {
    for event in EVENTS {
        run_beside::<Npt>(&shadow(events_tests::config(4)), &[event], Sharing::Partitioned, 200);
    }
    for sharing in [Sharing::Partitioned, Sharing::Overlapping] {
        run_beside::<Npt>(&shadow(events_tests::config(3)), &EVENTS, sharing, 400);
    }
}

#[test]
fn few_shadow_tables_are_correct() {
    // 80 shadow pages, of 2 MiB each, would be needed; there are 64.
    let config = MachineConfig { nr_vcpus: 2, bytes_per_vcpu: 80 << 20, nr_slots: 1, ..small() };
    let shadow = Some(ShadowPaging { max_pages: ShadowPaging::MIN_PAGES, ..ShadowPaging::default() });
    let machine = Machine::<Npt>::new(&MachineConfig { shadow, ..config }).unwrap();
    machine.run(Program::default()).unwrap();
    machine.set_region_flags(MemoryRegionFlags::LOG_DIRTY_PAGES).unwrap();
    machine.run(Program { write_percent: 0, oldest_round: 1, ..Program::default() }).unwrap();
    assert!(dirty_pages(&machine).is_empty());
    let round = 2;
    machine.run(Program { round, write_percent: 10, oldest_round: 1, ..Program::default() }).unwrap();
    let is_written = |page: &u64| machine.peek(*page) == Some(value(round, *page));
    assert!(dirty_pages(&machine).into_iter().eq((0..machine.nr_pages()).filter(is_written)));
    assert!(machine.vm().stats().shadow_evictions > 0);
    assert!(machine.vm().stats().shadow_pages_peak <= ShadowPaging::MIN_PAGES.into());
}

#[test]
fn a_full_ring_stops_a_cpu_until_there_is_room() {
    let config = MachineConfig { nr_vcpus: 1, bytes_per_vcpu: 4 << 20, nr_slots: 1, ..small() };
    let engine = config.engine.with_manual_protect(ManualProtect::Enabled);
    let config = MachineConfig { engine, dirty_ring_entries: Some(256), ..config };
    let machine = Machine::<Npt>::new(&shadow(config)).unwrap();
    machine.set_region_flags(MemoryRegionFlags::LOG_DIRTY_PAGES).unwrap();
    let running = machine.start(Program::default()).unwrap();
    // Nothing is harvested before the ring is full.
    while machine.vm().stats().exits == 0 {
        assert!(!machine.has_stopped());
        std::thread::yield_now();
    }
    let mut seen = vec![false; machine.nr_pages() as usize];
    while seen.contains(&false) {
        for ring in machine.vm().dirty_rings() {
            ring.harvest(|dirty| seen[dirty.page as usize] = true);
        }
        machine.vm().reset_dirty_rings().unwrap();
        assert!(!machine.has_stopped());
        std::thread::yield_now();
    }
    running.stop().unwrap();
}

#[test]
fn the_calling_thread_populates_with_a_cpu_of_its_own() {
    let machine = Machine::<Npt>::new(&shadow(small())).unwrap();
    let report = machine.populate(Program::default(), FirstTouch::Main).unwrap();
    assert_eq!((report.vcpus.len(), report.total().nr_accesses), (1, machine.nr_pages()));
    assert!((0..machine.nr_pages()).all(|page| machine.peek(page) == Some(value(1, page))));
    machine.set_region_flags(MemoryRegionFlags::LOG_DIRTY_PAGES).unwrap();
    machine.run(Program { write_percent: 0, oldest_round: 1, order: Order::Random, ..Program::default() }).unwrap();
    assert!(dirty_pages(&machine).is_empty());
}

#[test]
fn features_without_shadow_paging_are_refused() {
    let refused = |config: MachineConfig| match Machine::<Npt>::new(&shadow(config)) {
        Err(MachineError::Engine(error)) => error,
        other => panic!("{other:?}"),
    };
    let engine = Config::default().with_dirty_tracking(DirtyTracking::DirtyBit);
    assert_eq!(refused(MachineConfig { engine, ..small() }), slat::Error::from(slat::error::ConfigError::NoDirtyBit));
    assert!(matches!(
        Machine::<Ept>::new(&shadow(small())),
        Err(MachineError::Config(MachineConfigError::NoShadowPaging { format: "ept" }))
    ));
}
