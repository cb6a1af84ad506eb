//! The six tests: what host and guest do in one iteration of each.
//!
//! - *Map, unmap, unmap chunked* are one experiment: the guest fills one half of an area while the
//!   host discards the other, then the other way round. The tests differ in the size of the area,
//!   and in how much the host discards at a time: a half, a page, 2 MiB. (KVM's guest touches few
//!   pages between two unmaps. Here it fills all of them, so that each call of the host finds PTEs
//!   to zap. The figures are not comparable one to one.)
//! - *Move active, move inactive*: the last memslot moves up and back while the guest writes a
//!   window, which overlaps the memslot, or is elsewhere (`guest.rs` has what must hold).
//! - *RW*: guest and host each write a word of every page of the area; then each reads and clears
//!   the other's words.

use std::ops::Range;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use slat::baselines::Locking;
use slat::stats::Stats;
use slat::{Gfn, PAGE_SIZE};
use slat_machine::hardware::commit::FlushMethod;
use slat_machine::hardware::walk::HardwareFormat;

use super::MemslotsArgs;
use super::area::{AREA_PAGES, Area};
use super::guest::{AreaGuest, GuestJob, VALUES, pages};
use crate::failure::{Failure, check_failed, ensure};
use crate::session::Session;

/// Pages of test 0.
const MAP_PAGES: u64 = pages(32 << 20);
/// Pages of tests 1 and 2.
const UNMAP_PAGES: u64 = pages(128 << 20);
/// Pages that test 2 unmaps at a time.
const CHUNK_PAGES: u64 = pages(2 << 20);
/// The window of tests 3 and 4, and how far the memslot moves.
const MOVE_PAGES: u64 = pages(192 << 10);
/// The host's word of each page in test 5; the guest's is the first.
const HOST_WORD_BYTES: u64 = PAGE_SIZE / 2;

/// The tests, by their numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(super) enum Test {
    Map,
    Unmap,
    #[value(name = "unmap chunked")]
    UnmapChunked,
    #[value(name = "move active area")]
    MoveActive,
    #[value(name = "move inactive area")]
    MoveInactive,
    #[value(name = "RW")]
    Rw,
}

/// The figures of one run of a test.
pub(super) struct Run {
    /// For setting all slots.
    pub(super) setup: Duration,
    /// For all iterations.
    pub(super) elapsed: Duration,
    /// At least one.
    pub(super) nr_iterations: u64,
    pub(super) counts: TestCounts,
    /// The engine's counters after the last iteration; nothing counts before the first.
    pub(super) stats: Stats,
    pub(super) flush_method: FlushMethod,
}

impl Run {
    /// Seconds for an iteration.
    pub(super) fn iteration_s(&self) -> f64 {
        self.elapsed.as_secs_f64() / self.nr_iterations as f64
    }
}

/// The counts of a test.
#[derive(Default)]
pub(super) struct TestCounts {
    /// Calls by which the host unmapped or moved memory, and the time in them.
    pub(super) nr_host_calls: u64,
    pub(super) host_time: Duration,
    /// Words that host or guest verified.
    pub(super) nr_verified: u64,
    pub(super) nr_mmio_exits: u64,
}

struct Bench<'a, F: HardwareFormat> {
    area: &'a Area<F>,
    guest: AreaGuest,
    extra_checks: bool,
    time: Duration,
    counts: TestCounts,
}

pub(super) fn run<F: HardwareFormat>(
    args: &MemslotsArgs,
    test: Test,
    locking: Locking,
    session: &Session,
) -> Result<Run, Failure> {
    let (area, setup) = Area::<F>::new(args.slots, locking)?;
    let _watched = session.watch(&area.vm);
    let guest = AreaGuest::start(area.create_cpu()?, args.timeout)?;
    let mut bench = Bench {
        area: &area,
        guest,
        extra_checks: args.extra_checks,
        time: args.duration,
        counts: TestCounts::default(),
    };
    let (elapsed, nr_iterations) = match test {
        Test::Map => bench.by_halves(MAP_PAGES, MAP_PAGES / 2),
        Test::Unmap => bench.by_halves(UNMAP_PAGES, 1),
        Test::UnmapChunked => bench.by_halves(UNMAP_PAGES, CHUNK_PAGES),
        Test::MoveActive => bench.move_last_slot(active_window(area.last_slot().pages.start)),
        Test::MoveInactive => bench.move_last_slot(0..MOVE_PAGES.min(area.last_slot().pages.start)),
        Test::Rw => bench.read_and_write(),
    }?;
    Ok(Run {
        setup,
        elapsed,
        nr_iterations,
        counts: bench.counts,
        stats: area.vm.stats(),
        flush_method: area.flush_domain.method(),
    })
}

/// The window of test 3, for a memslot that begins at page `slot_start`: half of it in the memslot,
/// as far as memslots and the area's end allow.
fn active_window(slot_start: u64) -> Range<u64> {
    let start = slot_start.saturating_sub(MOVE_PAGES / 2);
    start..(start + MOVE_PAGES).min(AREA_PAGES)
}

impl<F: HardwareFormat> Bench<'_, F> {
    /// Repeats `iteration` until the time is over; returns the time and the number of iterations.
    fn repeat(
        &mut self,
        mut iteration: impl FnMut(&mut Self, u64) -> Result<(), Failure>,
    ) -> Result<(Duration, u64), Failure> {
        let begin = Instant::now();
        let mut nr_iterations = 0;
        loop {
            iteration(self, nr_iterations)?;
            nr_iterations += 1;
            let elapsed = begin.elapsed();
            if elapsed >= self.time {
                return Ok((elapsed, nr_iterations));
            }
        }
    }

    /// Tests 0 to 2, on the first `nr_pages` of the area.
    fn by_halves(&mut self, nr_pages: u64, chunk_pages: u64) -> Result<(Duration, u64), Failure> {
        let halves = [0..nr_pages / 2, nr_pages / 2..nr_pages];
        let (elapsed, nr_iterations) = self.repeat(|bench, iteration| {
            for (index, half) in halves.iter().enumerate() {
                // The halves swap their values each time, so that the check finds no value of an
                // earlier iteration.
                let value = VALUES[(index + iteration as usize) % 2];
                bench.guest.post(GuestJob::Fill { pages: half.clone(), value });
                bench.discard(&halves[1 - index], chunk_pages)?;
                bench.finish_guest()?;
                bench.check(half, value)?;
            }
            Ok(())
        })?;
        // The machine's frames are the host's addresses, so the check of values would not notice a
        // page that was never zapped.
        let (faults, discarded) = (self.area.vm.stats().faults, nr_pages * nr_iterations);
        ensure!(
            faults >= discarded,
            Check,
            "the guest faulted {faults} times on {discarded} pages that were not mapped"
        );
        Ok((elapsed, nr_iterations))
    }

    fn discard(&mut self, pages: &Range<u64>, chunk_pages: u64) -> Result<(), Failure> {
        let begin = Instant::now();
        for start in pages.clone().step_by(chunk_pages as usize) {
            self.area.discard(&(start..(start + chunk_pages).min(pages.end)))?;
            self.counts.nr_host_calls += 1;
        }
        self.counts.host_time += begin.elapsed();
        if self.extra_checks {
            self.check(pages, 0)?;
        }
        Ok(())
    }

    fn finish_guest(&mut self) -> Result<(), Failure> {
        let done = self.guest.wait()?;
        self.counts.nr_verified += done.nr_verified;
        Ok(())
    }

    /// Whether the first words of the first and the last page, or of all, are `expected`.
    fn check(&mut self, pages: &Range<u64>, expected: u64) -> Result<(), Failure> {
        let step = if self.extra_checks { 1 } else { pages.end - pages.start - 1 };
        for page in pages.clone().step_by(step as usize) {
            self.expect(page, 0, expected)?;
        }
        Ok(())
    }

    fn expect(&mut self, page: u64, offset_bytes: u64, expected: u64) -> Result<(), Failure> {
        match self.area.backing.load((page << Gfn::SHIFT) + offset_bytes) {
            Some(found) if found == expected => {
                self.counts.nr_verified += 1;
                Ok(())
            }
            found => Err(check_failed(format_args!(
                "page {page} of the area holds {:#x} where the host expects {expected:#x}",
                found.unwrap_or(0)
            ))),
        }
    }

    /// Tests 3 and 4: the guest writes `window` while the last memslot moves away and back.
    fn move_last_slot(&mut self, window: Range<u64>) -> Result<(Duration, u64), Failure> {
        let slot = self.area.last_slot();
        let moving = window.start.max(slot.pages.start)..window.end.max(slot.pages.start);
        self.guest.post(GuestJob::Window { pages: window.clone(), moving });
        let (elapsed, nr_iterations) = self.repeat(|bench, _| {
            for up_pages in [MOVE_PAGES, 0] {
                bench.guest.steps().next();
                let begin = Instant::now();
                bench.area.move_slot(&slot, up_pages)?;
                bench.counts.host_time += begin.elapsed();
                bench.guest.steps().next();
                if bench.extra_checks {
                    // Otherwise the memslot moves again before the guest has written much.
                    bench.guest.wait_for_pass();
                }
            }
            Ok(())
        })?;
        let done = self.guest.stop()?;
        self.counts.nr_host_calls = 2 * nr_iterations;
        self.counts.nr_verified += done.nr_verified;
        self.counts.nr_mmio_exits = done.nr_mmio_exits;
        for (page, written) in window.zip(done.written) {
            self.expect(page, 0, written)?;
        }
        Ok((elapsed, nr_iterations))
    }

    fn read_and_write(&mut self) -> Result<(Duration, u64), Failure> {
        let all = 0..AREA_PAGES;
        let [by_guest, by_host] = VALUES;
        self.repeat(|bench, _| {
            bench.guest.post(GuestJob::Fill { pages: all.clone(), value: by_guest });
            for page in all.clone() {
                bench.area.backing.store((page << Gfn::SHIFT) + HOST_WORD_BYTES, by_host);
            }
            bench.finish_guest()?;
            bench.guest.post(GuestJob::Take { pages: all.clone(), offset_bytes: HOST_WORD_BYTES, expected: by_host });
            for page in all.clone() {
                bench.expect(page, 0, by_guest)?;
                bench.area.backing.store(page << Gfn::SHIFT, 0);
            }
            bench.finish_guest()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_is_half_in_the_slot_or_wholly_in_the_only_one() {
        assert_eq!(active_window(0), 0..48);
        assert_eq!(active_window(1000), 976..1024);
        assert_eq!(active_window(10), 0..48);
        assert_eq!(active_window(AREA_PAGES - 8), AREA_PAGES - 32..AREA_PAGES);
    }
}
