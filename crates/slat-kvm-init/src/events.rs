//! The events, as `slat-metal` measures them: their names are the same.
//!
//! # What is in a count
//! - A fault: what is counted of a write ([`Counter`](crate::vm::Counter)), less the same of a write
//!   without a fault. The median over the pages: Linux's timer comes between few of them. The memory
//!   is there before, so that the kernel neither allocates nor zeroes.
//! - A call: the system call with it, as a virtual machine monitor has it. The least of some rounds:
//!   in others Linux's timer came, or the call waited for it without an instruction, since time is
//!   counted (a change of memslots waits for readers).
//! - An invalidation: what `madvise(MADV_DONTNEED)` costs of memory that the guest has mapped, less
//!   what it costs of memory that no guest has. So it is what KVM's MMU notifier does, without what
//!   Linux does with its own page tables.

use std::hint::black_box;

use crate::arch::TURN;
use crate::clock::{Clock, least, median};
use crate::console::Console;
use crate::guest::{BLOCK_PAGES, NR_BLOCKS, NR_PAGES};
use crate::memory::{self, Memory, PAGE_SIZE, Pages};
use crate::vm::{Bitmap, Clearing, Logging, Subject};
use crate::wrong::Wrong;

/// How often each call is measured.
const ROUNDS: u64 = 5;

/// Each page of the bitmap.
const ALL: Bitmap = [u64::MAX; NR_PAGES as usize / 64];

/// Measures everything that one CPU does alone.
pub(crate) fn measure(console: &mut Console, paging: &str, clock: Clock) -> Result<(), Wrong> {
    let access = faults(console, paging, clock)?;
    log_at_once(console, paging, clock, access)?;
    log_in_two_steps(console, paging, clock)?;
    huge_pages(console, paging, clock, access)?;
    invalidations(console, paging, clock)
}

/// Returns what a write without a fault counts.
fn faults(console: &mut Console, paging: &str, clock: Clock) -> Result<u64, Wrong> {
    let mut subject = Subject::new(Pages::Small, Clearing::WithGet)?;
    let first = subject.write(NR_PAGES, 1, clock)?;
    let access = median(subject.write(NR_PAGES, 1, clock)?);
    check_guest_clock(&mut subject, clock)?;
    console.figure("access", paging, access, 1);
    // A fault may map more pages than its own.
    let faults: Vec<u64> = first.into_iter().filter(|&count| count > access).collect();
    if faults.is_empty() {
        return Err(Wrong::Guest("none of its writes to new memory was a fault".to_owned()));
    }
    console.pages_each("pages_per_demand_fault", paging, NR_PAGES as f64 / faults.len() as f64);
    console.figure("demand_fault", paging, median(faults).saturating_sub(access), 1);
    Ok(access)
}

/// Checks that a turn of the guest's loop, which has a known length, counts as that, to within a
/// hundredth. Many runs are tried, since Linux's timer may come in one.
fn check_guest_clock(subject: &mut Subject, clock: Clock) -> Result<(), Wrong> {
    let mut run = |nr_pages| {
        let counts = (0..3 * ROUNDS).map(|_| called(clock, || subject.run(0, nr_pages, 1)));
        counts.collect::<Result<Vec<u64>, Wrong>>().map(|counts| least(&counts))
    };
    // Not as constants, which take more or fewer instructions.
    let (half, all) = (run(black_box(NR_PAGES / 2))?, run(black_box(NR_PAGES))?);
    let (expected, found) = (NR_PAGES / 2 * TURN, all.saturating_sub(half));
    // An entry takes some more or fewer, as the kernel's clocks are.
    let is_right = found.abs_diff(expected) <= expected / 100;
    if is_right { Ok(()) } else { Err(Wrong::Clock { of: "the guest", expected, found }) }
}

/// The count of a call that succeeds.
pub(crate) fn called(clock: Clock, call: impl FnOnce() -> Result<(), Wrong>) -> Result<u64, Wrong> {
    let (result, count) = clock.time(call);
    result.map(|()| count)
}

/// Gets the log, which must have all pages.
fn get(clock: Clock, subject: &Subject) -> Result<u64, Wrong> {
    let mut bitmap: Bitmap = [0; NR_PAGES as usize / 64];
    let count = called(clock, || subject.get_dirty_log(&mut bitmap))?;
    if bitmap == ALL { Ok(count) } else { Err(Wrong::Log) }
}

fn log_at_once(console: &mut Console, paging: &str, clock: Clock, access: u64) -> Result<(), Wrong> {
    let mut subject = Subject::new(Pages::Small, Clearing::WithGet)?;
    let (mut enable, mut gets, mut disable, mut faults) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        subject.write(NR_PAGES, 1, clock)?;
        enable.push(called(clock, || subject.set_logging(Logging::On))?);
        subject.write(NR_PAGES, 1, clock)?;
        gets.push(get(clock, &subject)?);
        faults = subject.write(NR_PAGES, 1, clock)?;
        get(clock, &subject)?;
        disable.push(called(clock, || subject.set_logging(Logging::Off))?);
    }
    let first = faults.iter().step_by(BLOCK_PAGES as usize).copied().collect();
    console.figure("enable", paging, least(&enable), NR_PAGES);
    console.figure("get_and_clear", paging, least(&gets), NR_PAGES);
    console.figure("write_protect_fault", paging, median(faults).saturating_sub(access), 1);
    console.figure("write_protect_fault_first", paging, median(first).saturating_sub(access), 1);
    console.figure("disable", paging, least(&disable), NR_PAGES);
    Ok(())
}

fn log_in_two_steps(console: &mut Console, paging: &str, clock: Clock) -> Result<(), Wrong> {
    let mut subject = Subject::new(Pages::Small, Clearing::Apart)?;
    let (mut gets, mut clears) = (Vec::new(), Vec::new());
    subject.set_logging(Logging::On)?;
    for _ in 0..ROUNDS {
        subject.write(NR_PAGES, 1, clock)?;
        gets.push(get(clock, &subject)?);
        clears.push(called(clock, || subject.clear_dirty_log(&ALL))?);
    }
    console.figure("get", paging, least(&gets), NR_PAGES);
    console.figure("clear", paging, least(&clears), NR_PAGES);
    Ok(())
}

/// Pages of 2 MiB: mapped by a fault, and split because a log begins.
fn huge_pages(console: &mut Console, paging: &str, clock: Clock, access: u64) -> Result<(), Wrong> {
    memory::reserve_huge_pages(NR_PAGES * PAGE_SIZE)?;
    let (mut faults, mut enable) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let mut subject = Subject::new(Pages::Huge, Clearing::WithGet)?;
        faults.extend(subject.write(NR_BLOCKS, BLOCK_PAGES, clock)?);
        enable.push(called(clock, || subject.set_logging(Logging::On))?);
    }
    console.figure("demand_fault_2m", paging, median(faults).saturating_sub(access), 1);
    console.figure("enable_2m", paging, least(&enable), NR_BLOCKS);
    logged_huge_pages(console, paging, clock, access)
}

/// The first write to each page of 2 MiB since the log began.
fn logged_huge_pages(console: &mut Console, paging: &str, clock: Clock, access: u64) -> Result<(), Wrong> {
    let mut subject = Subject::new(Pages::Huge, Clearing::WithGet)?;
    subject.write(NR_BLOCKS, BLOCK_PAGES, clock)?;
    subject.set_logging(Logging::On)?;
    match subject.write(NR_BLOCKS, BLOCK_PAGES, clock) {
        Ok(faults) => {
            console.figure("write_fault_2m", paging, median(faults).saturating_sub(access), 1);
            Ok(())
        }
        // So it is on RISC-V, in Linux 6.12.
        Err(Wrong::Entry(error)) => {
            console.line(&format!("say KVM cannot split the pages of 2 MiB that it logs: {error}"));
            Ok(())
        }
        Err(wrong) => Err(wrong),
    }
}

fn invalidations(console: &mut Console, paging: &str, clock: Clock) -> Result<(), Wrong> {
    let nr_bytes = NR_PAGES * PAGE_SIZE;
    let page = |memory: &Memory, page| called(clock, || memory.take_back(page * PAGE_SIZE, PAGE_SIZE));
    let pages = |memory: &Memory| (0..NR_PAGES).map(|number| page(memory, number)).collect::<Result<Vec<u64>, _>>();
    let mapped = || {
        let mut subject = Subject::new(Pages::Small, Clearing::WithGet)?;
        subject.write(NR_PAGES, 1, clock)?;
        Ok::<_, Wrong>(subject)
    };
    // While a VM exists, so that the notifier is called here too.
    let subject = mapped()?;
    let of_guest = median(pages(&subject.memory)?);
    let of_none = median(pages(&Memory::new(nr_bytes, Pages::Small)?)?);
    console.figure("invalidate_page", paging, of_guest.saturating_sub(of_none), 1);
    let (mut of_guest, mut of_none) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let subject = mapped()?;
        of_guest.push(called(clock, || subject.memory.take_back(0, nr_bytes))?);
        let memory = Memory::new(nr_bytes, Pages::Small)?;
        of_none.push(called(clock, || memory.take_back(0, nr_bytes))?);
    }
    console.figure("invalidate_range", paging, least(&of_guest).saturating_sub(least(&of_none)), NR_PAGES);
    Ok(())
}
