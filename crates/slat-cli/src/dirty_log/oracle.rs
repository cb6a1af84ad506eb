//! The dirty-log oracle: what the log promises (`dirty/log.rs` of the engine), held against the guest's memory.
//!
//! - *Stopped*: when all vCPU calls have returned, one harvest is exact. The guest has written the round's number, so
//!   page by page: reported if and only if it holds this round.
//! - *Running*: a migration in small. The host keeps a copy of all pages, harvests while the guest writes, and copies
//!   what is reported. After the last harvest, with the guest stopped, the copy must equal the memory: a write that no
//!   harvest reported would be missing in it.

use slat_machine::guest::{PAGE_BITS, Program};
use slat_machine::machine::Machine;
use slat_machine::walk::HardwareFormat;

use super::get_dirty_logs;
use crate::failure::{Failure, check_failed};

/// Harvests taken while the guest runs.
const LIVE_HARVESTS: u32 = 8;

/// Calls `visit` with the number of each page and whether the bitmaps have it.
fn for_each_page<F: HardwareFormat>(machine: &Machine<F>, bitmaps: &[Vec<u64>], mut visit: impl FnMut(u64, Reported)) {
    for (slot, bitmap) in machine.slots().iter().zip(bitmaps) {
        for page in 0..slot.nr_pages {
            let reported = bitmap[(page / 64) as usize] >> (page % 64) & 1 == 1;
            visit(slot.first_page + page, if reported { Reported::Dirty } else { Reported::Clean });
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Reported {
    Dirty,
    Clean,
}

/// Holds a harvest against memory in which exactly the pages written in `round` hold its number.
pub(super) fn check_stopped<F: HardwareFormat>(
    machine: &Machine<F>,
    bitmaps: &[Vec<u64>],
    round: u64,
) -> Result<(), Failure> {
    let (mut lost, mut false_alarms, mut example) = (0_u64, 0_u64, None);
    for_each_page(machine, bitmaps, |page, reported| {
        let written = machine.peek(page).is_some_and(|value| value >> PAGE_BITS == round);
        match (written, reported) {
            (true, Reported::Clean) => lost += 1,
            (false, Reported::Dirty) => false_alarms += 1,
            _ => return,
        }
        example.get_or_insert(page);
    });
    match example {
        None => Ok(()),
        Some(page) => Err(check_failed(format_args!(
            "dirty log of round {round}: {lost} pages written and not reported, {false_alarms} reported and not \
             written, for example page {page}"
        ))),
    }
}

/// Migrates the guest's memory while it runs `program`, round after round. Returns the last round.
pub(super) fn check_running<F: HardwareFormat>(
    machine: &Machine<F>,
    bitmaps: &mut [Vec<u64>],
    program: Program,
) -> Result<u64, Failure> {
    let mut copy: Vec<Option<u64>> = (0..machine.nr_pages()).map(|page| machine.peek(page)).collect();
    let mut copy_reported = |bitmaps: &[Vec<u64>]| {
        for_each_page(machine, bitmaps, |page, reported| {
            if reported == Reported::Dirty {
                copy[page as usize] = machine.peek(page);
            }
        });
    };
    let mut round = program.round + 1;
    let running = machine.start(Program { round, ..program })?;
    for _ in 0..LIVE_HARVESTS {
        get_dirty_logs(machine, bitmaps)?;
        copy_reported(bitmaps);
        round = running.advance_round();
    }
    running.stop()?;
    get_dirty_logs(machine, bitmaps)?;
    copy_reported(bitmaps);
    let lost = (0..machine.nr_pages()).filter(|&page| copy[page as usize] != machine.peek(page)).count();
    match lost {
        0 => Ok(round),
        lost => Err(check_failed(format_args!("migration while running: {lost} pages written and never reported"))),
    }
}
