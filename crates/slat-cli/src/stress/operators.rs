//! The threads that operate while the guests run: each repeats one kind of operation, drawn from
//! its generator.

mod huge;
mod memslots;

use std::thread;
use std::time::Duration;

use rand::RngExt;
use rand::rngs::SmallRng;
use slat_machine::hardware::walk::HardwareFormat;
use slat_machine::memory::{Effect, Snapshot};
use slat_machine::vm::machine::Machine;

pub(super) use self::huge::Calls;
use self::huge::HugeSlot;
use self::memslots::Visitors;
use super::tally::Figure;
use super::turn::World;
use super::watch::Beat;
use crate::failure::{Failure, check_failed, ensure};

/// Snapshots that one thread holds at most.
const MAX_SNAPSHOTS: usize = 8;

/// The few pages of half of all events.
const HOT_PAGES: u64 = 4;

/// Pages of one discard or invalidation at most.
const MAX_PAGES: u64 = 8;

/// The task of a thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Operator {
    /// Discards, moves, protects and swaps pages.
    HostEvents(u32),
    /// Turns dirty logs on and off and harvests them.
    Logs,
    /// Invalidates without change, ages, tests, reclaims.
    Aging,
    /// Creates, moves, re-flags and deletes its own memslots, and accesses them through its own
    /// CPU.
    Slots(u32, Visitors),
    /// Reads memslots that are created and deleted meanwhile.
    Visitor(u32),
    /// Accesses a memslot of huge pages through its own CPU, and harvests its log.
    HugePages,
    /// Splits and recovers huge pages.
    Splits,
}

/// All threads of a turn.
pub(super) const ALL: [Operator; 10] = [
    Operator::HostEvents(0),
    Operator::HostEvents(1),
    Operator::Logs,
    Operator::Aging,
    Operator::Slots(0, Visitors::Come),
    Operator::Slots(1, Visitors::None),
    Operator::Visitor(0),
    Operator::Visitor(1),
    Operator::HugePages,
    Operator::Splits,
];

impl Operator {
    pub(super) fn name(self) -> String {
        match self {
            Operator::HostEvents(number) => format!("the thread of host events {number}"),
            Operator::Logs => "the thread of dirty logs".to_owned(),
            Operator::Aging => "the thread that ages".to_owned(),
            Operator::Slots(number, _) => format!("the thread of slots {number}"),
            Operator::Visitor(number) => format!("visitor {number}"),
            Operator::HugePages => "the thread of huge pages".to_owned(),
            Operator::Splits => "the thread that splits".to_owned(),
        }
    }

    /// Works until the turn is over.
    pub(super) fn run<F: HardwareFormat>(
        self,
        world: &World<F>,
        rng: &mut SmallRng,
        beat: &Beat,
    ) -> Result<(), Failure> {
        match self {
            Operator::HostEvents(_) => {
                let mut snapshots = Vec::new();
                repeat(world, rng, beat, |rng| host_event(&world.machine, rng, &mut snapshots))?;
                snapshots.iter().try_for_each(|snapshot: &Snapshot| snapshot.verify().map_err(check_failed))
            }
            Operator::Logs => repeat(world, rng, beat, |rng| log(world, rng)),
            Operator::Aging => repeat(world, rng, beat, |rng| age(world, rng)),
            Operator::Visitor(_) => {
                let mut cpu = memslots::new_cpu(world)?;
                repeat(world, rng, beat, |rng| memslots::visit(world, &mut cpu, rng))
            }
            Operator::Slots(number, visitors) => {
                let mut slots = memslots::Slots::new(world, number, visitors)?;
                repeat(world, rng, beat, |rng| slots.step(rng))?;
                slots.delete_all()
            }
            Operator::HugePages => {
                let mut slot = HugeSlot::new(world)?;
                repeat(world, rng, beat, |rng| slot.step(rng))?;
                slot.delete()
            }
            Operator::Splits => repeat(world, rng, beat, |rng| huge::disturb(world, rng)),
        }
    }
}

/// Repeats `step` until the turn is over, with pauses for the guests.
fn repeat<F: HardwareFormat>(
    world: &World<F>,
    rng: &mut SmallRng,
    beat: &Beat,
    mut step: impl FnMut(&mut SmallRng) -> Result<(), Failure>,
) -> Result<(), Failure> {
    while !world.is_over() {
        step(rng)?;
        beat.beat();
        // A thread that yields waits for the time slices of many vCPUs: only now and then.
        match rng.random_range(0..64) {
            0 => thread::sleep(Duration::from_micros(rng.random_range(1..500))),
            1..4 => thread::yield_now(),
            _ => {}
        }
    }
    Ok(())
}

/// A page of the region: half of the time one of a few, so that many events meet on the same page.
fn some_page<F: HardwareFormat>(machine: &Machine<F>, rng: &mut SmallRng) -> u64 {
    let nr_pages = machine.nr_pages();
    let most = if rng.random() { nr_pages } else { nr_pages.min(HOT_PAGES) };
    rng.random_range(0..most)
}

/// A few pages of the region.
fn some_pages<F: HardwareFormat>(machine: &Machine<F>, rng: &mut SmallRng, most: u64) -> std::ops::Range<u64> {
    let start = some_page(machine, rng);
    start..(start + rng.random_range(1..=most)).min(machine.nr_pages())
}

fn host_event<F: HardwareFormat>(
    machine: &Machine<F>,
    rng: &mut SmallRng,
    snapshots: &mut Vec<Snapshot>,
) -> Result<(), Failure> {
    let page = some_page(machine, rng);
    match rng.random_range(0..10) {
        0 => machine.discard(some_pages(machine, rng, MAX_PAGES))?,
        1..=4 => drop::<Effect>(machine.move_page(page)?),
        5..=6 => drop::<Effect>(machine.swap_out(page)?),
        _ => {
            if snapshots.len() >= MAX_SNAPSHOTS {
                let snapshot = snapshots.swap_remove(rng.random_range(0..MAX_SNAPSHOTS));
                snapshot.verify().map_err(check_failed)?;
            }
            snapshots.extend(machine.protect(page)?.ok());
        }
    }
    Ok(())
}

fn log<F: HardwareFormat>(world: &World<F>, rng: &mut SmallRng) -> Result<(), Failure> {
    let log = &world.logs[rng.random_range(0..world.logs.len())];
    match rng.random_range(0..6) {
        0 => log.toggle(&world.machine, &world.tally),
        _ => log.harvest(&world.machine, &world.tally),
    }
}

fn age<F: HardwareFormat>(world: &World<F>, rng: &mut SmallRng) -> Result<(), Failure> {
    let World { machine, tally, .. } = world;
    match rng.random_range(0..8) {
        0..=2 => {
            let most = if rng.random_range(0..8) == 0 { machine.nr_pages() } else { MAX_PAGES };
            machine.invalidate(some_pages(machine, rng, most))?;
            tally.add(Figure::Invalidated, 1);
        }
        which @ 3..=6 => {
            let most = machine.nr_pages();
            let range = machine.gfns(some_pages(machine, rng, most));
            let vm = machine.vm();
            let nr_used = if which < 5 { vm.age_range(range)? } else { vm.test_age_range(range)? };
            ensure!(nr_used <= range.nr_pages(), Check, "{nr_used} pages of {} used", range.nr_pages());
            tally.add(Figure::Agings, 1);
        }
        _ => {
            machine.vm().reclaim();
            tally.add(Figure::Reclaims, 1);
        }
    }
    Ok(())
}
