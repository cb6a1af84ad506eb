//! The dirty-log oracle: compares what the log promises (`dirty/log.rs` of the engine) with the
//! guest's memory.
//!
//! - *Stopped*: when all vCPU calls have returned, one harvest is exact. The guest has written the
//!   round's number, so a page is reported if and only if it holds this round. Two settings report
//!   more, and the oracle knows what ([`Besides`]).
//! - *Again*: while the guest is still stopped, the log reports the same until it is cleared, and
//!   nothing from then on.
//! - *Running*: a small migration. The host keeps a copy of all pages. It harvests while the guest
//!   writes (where getting does not clear: gets, clears), and then copies what was reported. After
//!   the last harvest, with the guest stopped, the copy must equal the memory: a write that no
//!   harvest reported would be missing in it.

use slat::Level;
use slat_machine::hardware::walk::HardwareFormat;
use slat_machine::vm::guest::{PAGE_BITS, Program};
use slat_machine::vm::machine::Machine;

use super::logs::Logs;
use crate::failure::{Failure, check_failed};

/// Pages of 4 KiB in 2 MiB.
const PAGES_2M: u64 = Level::L2M.nr_pages();

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

/// What a harvest reports besides the pages that were written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Besides {
    Nothing,
    /// Pages in the same 2 MiB as one that was written, if they are one huge page: they may be
    /// reported.
    SameHugePage,
    /// All are dirty when logging begins, and must be reported.
    All,
}

/// Compares a harvest with memory in which exactly the pages written in `round` hold its number.
pub(super) fn check_stopped<F: HardwareFormat>(
    machine: &Machine<F>,
    bitmaps: &[Vec<u64>],
    round: u64,
    besides: Besides,
) -> Result<(), Failure> {
    let is_written = |page| machine.peek(page).is_some_and(|value| value >> PAGE_BITS == round);
    // The region begins at a multiple of 1 GiB.
    let is_written_nearby = |page| {
        let start = page & !(PAGES_2M - 1);
        (start..start + PAGES_2M).any(is_written)
    };
    let (mut lost, mut false_alarms, mut example) = (0_u64, 0_u64, None);
    for_each_page(machine, bitmaps, |page, reported| {
        let is_right = match (reported, besides) {
            (Reported::Clean, Besides::All) => false,
            (Reported::Clean, Besides::Nothing | Besides::SameHugePage) => !is_written(page),
            (Reported::Dirty, Besides::All) => true,
            (Reported::Dirty, Besides::SameHugePage) => is_written(page) || is_written_nearby(page),
            (Reported::Dirty, Besides::Nothing) => is_written(page),
        };
        match reported {
            _ if is_right => return,
            Reported::Clean => lost += 1,
            Reported::Dirty => false_alarms += 1,
        }
        example.get_or_insert(page);
    });
    match example {
        None => Ok(()),
        Some(page) => Err(check_failed(format_args!(
            "dirty log of round {round}: {lost} pages dirty and not reported, {false_alarms} reported and not dirty, for \
             example page {page}"
        ))),
    }
}

/// What the log must report when it is got once more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Again {
    TheSame,
    Nothing,
}

/// Gets the log once more, with the guest stopped.
pub(super) fn check_again<F: HardwareFormat>(logs: &Logs<'_, F>, again: Again) -> Result<(), Failure> {
    let found = logs.get_again()?;
    let is_right = match again {
        Again::TheSame => found == logs.bitmaps,
        Again::Nothing => found.iter().flatten().all(|&word| word == 0),
    };
    if is_right {
        return Ok(());
    }
    Err(check_failed(match again {
        Again::TheSame => "the dirty log differs when it is got again",
        Again::Nothing => "the dirty log is not empty after it was cleared",
    }))
}

/// Migrates the guest's memory while it runs `program`, round after round. Returns the last round.
pub(super) fn check_running<F: HardwareFormat>(
    machine: &Machine<F>,
    logs: &mut Logs<'_, F>,
    program: Program,
) -> Result<u64, Failure> {
    let mut copy: Vec<Option<u64>> = (0..machine.nr_pages()).map(|page| machine.peek(page)).collect();
    let mut migrate = || -> Result<(), Failure> {
        logs.forget();
        logs.get()?;
        if logs.are_cleared_apart() {
            // Before pages are copied: the next log reports what is written from then on.
            logs.clear()?;
        }
        for_each_page(machine, &logs.bitmaps, |page, reported| {
            if reported == Reported::Dirty {
                copy[page as usize] = machine.peek(page);
            }
        });
        Ok(())
    };
    let mut round = program.round + 1;
    let running = machine.start(Program { round, ..program })?;
    for _ in 0..LIVE_HARVESTS {
        migrate()?;
        round = running.advance_round();
    }
    running.stop()?;
    migrate()?;
    let lost = (0..machine.nr_pages()).filter(|&page| copy[page as usize] != machine.peek(page)).count();
    match lost {
        0 => Ok(round),
        lost => Err(check_failed(format_args!("migration while running: {lost} pages written and never reported"))),
    }
}
