//! Events while several CPUs run the guest, as `slat-metal` measures them: their names are the same
//! (`crates/slat-metal/src/measure/together.rs`).
//!
//! # What is in a count
//! - A fault: what all CPUs execute for a block of 2 MiB, less the same of writes without a fault.
//!   The least of all blocks and rounds: in others Linux's timer came.
//! - An invalidation: what `madvise(MADV_DONTNEED)` costs all CPUs of a page that the guest has
//!   mapped, less what it costs of a page that no guest has, while all vCPUs but one are in the guest.
//!   The medians over the pages. Linux flushes its own page tables on all CPUs, too: that is in both.

use crate::arch::TURN;
use crate::clock::{Clock, least, median};
use crate::console::Console;
use crate::events::called;
use crate::guest::{BLOCK_PAGES, LOOK, NR_PAGES};
use crate::memory::{Memory, PAGE_SIZE, Pages};
use crate::vm::{Clearing, Logging, Phase, Subject};
use crate::wrong::Wrong;

/// How often blocks are measured.
const ROUNDS: u64 = 2;

/// Measures everything, with `nr_cpus` CPUs.
pub(crate) fn measure(console: &mut Console, paging: &str, clock: Clock, nr_cpus: u64) -> Result<(), Wrong> {
    let pages_each = BLOCK_PAGES / nr_cpus;
    let phase = |nr_writers, pages_each, logging| Phase { nr_writers, pages_each, logging };
    let phases = [
        phase(nr_cpus, pages_each, Logging::Off),
        phase(nr_cpus, pages_each, Logging::Off),
        phase(nr_cpus, pages_each / 2, Logging::Off),
        phase(1, pages_each, Logging::Off),
        phase(1, pages_each / 2, Logging::Off),
        phase(nr_cpus, pages_each, Logging::On),
    ];
    let mut counts = phases.map(|_| Vec::new());
    for _ in 0..ROUNDS {
        let mut subject = Subject::with_vcpus(Pages::Small, Clearing::WithGet, nr_cpus)?;
        counts.iter_mut().zip(subject.write_together(phases)?).for_each(|(all, more)| all.extend(more));
    }
    let [faults, access, half, one_whole, one_half, protected] = counts.map(|counts| least(&counts));
    // By all vCPUs, and by one while the others look whether it is done.
    for (nr_writers, whole, half) in [(nr_cpus, access, half), (1, one_whole, one_half)] {
        let (expected, found) = ((pages_each - pages_each / 2) * nr_writers * TURN, whole.saturating_sub(half));
        // A vCPU that sees later than another one that all are done has looked once more.
        if found.abs_diff(expected) > nr_cpus * LOOK {
            return Err(Wrong::Clock { of: "the guest on all CPUs", expected, found });
        }
    }
    let nr_pages = nr_cpus * pages_each;
    console.figure("demand_fault_mean", paging, faults.saturating_sub(access), nr_pages);
    console.figure("write_protect_fault_mean", paging, protected.saturating_sub(access), nr_pages);
    if nr_cpus > 1 { invalidations(console, paging, clock, nr_cpus) } else { Ok(()) }
}

fn invalidations(console: &mut Console, paging: &str, clock: Clock, nr_cpus: u64) -> Result<(), Wrong> {
    let mut subject = Subject::with_vcpus(Pages::Small, Clearing::WithGet, nr_cpus)?;
    let of_none = Memory::new(NR_PAGES * PAGE_SIZE, Pages::Small)?;
    subject.run(0, NR_PAGES, 1)?;
    let (of_guest, of_none) = subject.beside_others(|memory, looks| {
        let page = |memory: &Memory, page| {
            let before = looks();
            let count = called(clock, || memory.take_back(page * PAGE_SIZE, PAGE_SIZE))?;
            Ok(count.saturating_sub(LOOK * (looks() - before)))
        };
        let pages = |memory| (0..NR_PAGES).map(|number| page(memory, number)).collect::<Result<Vec<u64>, Wrong>>();
        Ok((median(pages(memory)?), median(pages(&of_none)?)))
    })?;
    console.figure("invalidate_page_running", paging, of_guest.saturating_sub(of_none), 1);
    Ok(())
}
