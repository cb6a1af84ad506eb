//! The host changes memory while guests run: nothing is lost, no CPU uses an old frame, and all
//! frames are released.

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use slat::baselines::Locking;
use slat::format::{Ept, Npt};
use slat::tables::AccessTracking;
use slat::{Config, PAGE_SIZE};

use super::*;
use crate::hardware::cpu::Paging;
use crate::memory::{Effect, FrameUse, Snapshot};
use crate::vm::guest::{Order, Sharing, value};

const NR_PAGES_PER_VCPU: u64 = 24;
const NR_SPARE: u64 = 16;

pub(super) fn config(nr_vcpus: usize) -> MachineConfig {
    MachineConfig {
        nr_vcpus,
        bytes_per_vcpu: NR_PAGES_PER_VCPU * PAGE_SIZE,
        nr_slots: 2,
        host_events: HostEvents::Allowed { nr_spare_frames: NR_SPARE },
        ..MachineConfig::default()
    }
}

fn reading() -> Program {
    Program { write_percent: 0, oldest_round: 1, ..Program::default() }
}

/// What may happen to pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Event {
    Discard,
    Move,
    Protect,
    SwapOut,
    Invalidate,
}

pub(super) const EVENTS: [Event; 5] = [Event::Discard, Event::Move, Event::Protect, Event::SwapOut, Event::Invalidate];

/// Does `event` somewhere; holds and verifies a few snapshots.
fn happen<F: HardwareFormat>(machine: &Machine<F>, event: Event, rng: &mut SmallRng, snapshots: &mut Vec<Snapshot>) {
    let page = rng.random_range(0..machine.nr_pages());
    let some = page..(page + rng.random_range(1..6)).min(machine.nr_pages());
    match event {
        Event::Discard => machine.discard(some).unwrap(),
        Event::Move => drop(machine.move_page(page).unwrap()),
        Event::Protect => snapshots.extend(machine.protect(page).unwrap().ok()),
        Event::SwapOut => drop(machine.swap_out(page).unwrap()),
        Event::Invalidate => machine.invalidate(some).unwrap(),
    }
    if snapshots.len() > rng.random_range(0..4) {
        snapshots.swap_remove(rng.random_range(0..snapshots.len())).verify().unwrap();
    }
}

/// Only pages have frames; and after a discard of all pages there are none.
fn check_frames<F: HardwareFormat>(machine: &Machine<F>) {
    let pages = machine.pages().unwrap();
    let frame_use = pages.frame_use();
    assert_eq!(frame_use, FrameUse { nr_frames: frame_use.nr_pages, nr_snapshots: 0, ..frame_use });
    machine.discard(0..machine.nr_pages()).unwrap();
    assert_eq!(pages.frame_use(), FrameUse::default());
    pages.check_free_frames().unwrap();
}

/// Does `events` on two threads while guests run and verify, with dirty logging.
pub(super) fn run_beside<F: HardwareFormat>(
    config: &MachineConfig,
    events: &[Event],
    sharing: Sharing,
    nr_events: usize,
) {
    let machine = Machine::<F>::new(config).unwrap();
    machine.set_region_flags(MemoryRegionFlags::LOG_DIRTY_PAGES).unwrap();
    machine.run(Program { sharing, ..Program::default() }).unwrap();
    let program = Program { order: Order::Random, sharing, write_percent: 50, oldest_round: 1, ..Program::default() };
    let running = machine.start(program).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let (machine, running) = (&machine, &running);
            scope.spawn(move || {
                let (mut rng, mut snapshots) = (SmallRng::seed_from_u64(thread), Vec::new());
                for turn in 0..nr_events {
                    happen(machine, events[rng.random_range(0..events.len())], &mut rng, &mut snapshots);
                    running.advance_round();
                    if turn % 8 == 0 {
                        // The guests need time to touch the changed pages.
                        let before = machine.progress().total();
                        while machine.progress().total() < before + 64 && !machine.has_stopped() {
                            std::thread::yield_now();
                        }
                        let mut bitmap = vec![0; machine.slots()[0].nr_pages.div_ceil(64) as usize];
                        machine.vm().get_dirty_log(machine.slots()[thread as usize].id, &mut bitmap).unwrap();
                    }
                }
                for snapshot in snapshots {
                    snapshot.verify().unwrap();
                }
            });
        }
    });
    let report = running.stop().unwrap();
    assert!(report.total().nr_reads > 0);
    machine.run(Program { sharing, round: ROUND_END - 1, ..reading() }).unwrap();
    let counts = machine.pages().unwrap().counts();
    for event in events {
        let done = match event {
            Event::Discard => counts.nr_discarded,
            Event::Move => counts.nr_moved,
            Event::Protect => counts.nr_protected,
            Event::SwapOut => counts.nr_swapped_out,
            Event::Invalidate => 1,
        };
        assert_ne!(done, 0, "{event:?}");
    }
    check_frames(&machine);
}

#[test]
fn each_event_alone_beside_one_and_many_guests() {
    for event in EVENTS {
        let mut numbers_of_cpus = [1, 4].into_iter().cycle();
        slat::for_each_format!(F => {
            let config = config(numbers_of_cpus.next().unwrap());
            run_beside::<F>(&config, &[event], Sharing::Partitioned, 200);
        });
    }
}

#[test]
fn all_events_with_each_locking_format_and_flush_method() {
    for locking in [Locking::None, Locking::Shared, Locking::Exclusive] {
        for access_tracking in [AccessTracking::AccessedBit, AccessTracking::Faults] {
            let engine = Config::default().with_locking(locking).with_access_tracking(access_tracking);
            let config = MachineConfig { engine, ..config(4) };
            let mut sharings = [Sharing::Partitioned, Sharing::Overlapping].into_iter().cycle();
            slat::for_each_format!(F => {
                run_beside::<F>(&config, &EVENTS, sharings.next().unwrap(), 200);
            });
            let config = MachineConfig { flush_method: Some(FlushMethod::Waiting), ..config };
            run_beside::<Ept>(&config, &EVENTS, Sharing::Partitioned, 50);
        }
    }
}

/// The same few pages again and again: events overtake answers of the host, and leaves come back
/// with the same value.
#[test]
fn events_on_hot_pages_lose_nothing() {
    let config = MachineConfig { bytes_per_vcpu: PAGE_SIZE, ..config(4) };
    for events in [&EVENTS[..], &[Event::Protect], &[Event::Move, Event::SwapOut]] {
        let mut sharings = [Sharing::Partitioned, Sharing::Overlapping].into_iter().cycle();
        slat::for_each_format!(F => {
            run_beside::<F>(&config, events, sharings.next().unwrap(), 300);
        });
    }
}

#[test]
fn all_events_beside_guests_with_paging() {
    let config = MachineConfig { paging: Paging::TwoDimensional, ..config(4) };
    slat::for_each_format!(F => {
        run_beside::<F>(&config, &EVENTS, Sharing::Partitioned, 300);
    });
}

#[test]
fn each_event_has_its_effect() {
    let machine = Machine::<Npt>::new(&config(2)).unwrap();
    let nr_pages = machine.nr_pages();
    let pages = machine.pages().unwrap();
    machine.run(Program::default()).unwrap();
    assert!((0..nr_pages).all(|page| machine.peek(page) == Some(value(1, page))));

    for page in 0..nr_pages {
        assert_eq!(machine.move_page(page).unwrap(), Effect::Done);
    }
    machine.run(reading()).unwrap();
    for page in 0..nr_pages {
        assert_eq!(machine.swap_out(page).unwrap(), Effect::Done);
    }
    assert_eq!(pages.frame_use(), FrameUse::default());
    machine.run(reading()).unwrap();
    // They were only read: nothing is saved again.
    for page in 0..nr_pages {
        assert_eq!(machine.swap_out(page).unwrap(), Effect::Done);
    }
    assert_eq!((pages.counts().nr_swapped_out, pages.counts().nr_dropped_clean), (nr_pages, nr_pages));
    machine.run(Program { round: 2, ..Program::default() }).unwrap();
    assert_eq!(pages.counts().nr_swapped_in, 2 * nr_pages);

    let before = machine.vm().stats().faults;
    let snapshot = machine.protect(5).unwrap().unwrap();
    machine.run(Program { round: 2, ..reading() }).unwrap();
    machine.run(Program { round: 3, ..Program::default() }).unwrap();
    snapshot.verify().unwrap();
    assert_eq!(pages.counts().nr_copied_on_write, 1);
    // One to read, one to write; the copy invalidates the page, and the fault starts over.
    assert_eq!(machine.vm().stats().faults - before, 2);
    drop(snapshot);

    machine.discard(0..10).unwrap();
    machine.run(Program { round: 3, ..reading() }).unwrap();
    assert!((0..nr_pages).all(|page| machine.peek(page) == Some(if page < 10 { 0 } else { value(3, page) })));
    check_frames(&machine);
    assert!(pages.counts().nr_zapped_dirty > 0 && pages.counts().nr_zapped_accessed > 0);
}

#[test]
fn a_change_without_an_invalidation_is_detected() {
    // Without the invalidation the guest keeps the old frame.
    let machine = Machine::<Npt>::new(&config(1)).unwrap();
    machine.run(Program::default()).unwrap();
    let behind = |change: &mut dyn FnMut()| {
        change();
        Ok(())
    };
    assert_eq!(machine.pages().unwrap().relocate(3, &behind), Ok(Effect::Done));
    match machine.run(reading()) {
        Err(MachineError::Guest { error: GuestError::NotAsWritten { page: 3, found, expected, .. }, .. }) => {
            assert_eq!((found, expected), (crate::memory::POISON, value(1, 3)));
        }
        other => panic!("{other:?}"),
    }
    // And a write into it shows in the frame.
    assert!(machine.run(Program { round: 2, ..Program::default() }).is_ok());
    machine.pages().unwrap().check_free_frames().unwrap_err();
}

#[test]
fn events_on_missing_pages_are_refused() {
    let machine = Machine::<Npt>::new(&MachineConfig { host_events: HostEvents::None, ..config(1) }).unwrap();
    assert!(matches!(machine.move_page(0), Err(MachineError::NoHostEvents)));
    let machine = Machine::<Npt>::new(&config(1)).unwrap();
    let nr_pages = machine.nr_pages();
    assert!(matches!(machine.swap_out(nr_pages), Err(MachineError::NoSuchPages { .. })));
    assert!(matches!(machine.discard(1..nr_pages + 1), Err(MachineError::NoSuchPages { .. })));
    assert!(matches!(machine.move_page(u64::MAX), Err(MachineError::NoSuchPages { .. })));
    assert!(matches!(
        machine.invalidate(3..3),
        Err(MachineError::Engine(slat::Error::Range(slat::error::RangeError::EmptyRange { .. })))
    ));
    assert_eq!(machine.move_page(0).unwrap(), Effect::NoFrame);
}
