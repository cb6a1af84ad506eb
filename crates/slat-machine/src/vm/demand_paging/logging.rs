//! Dirty logging while pages arrive: the oracle.
//!
//! vCPUs write each page once in a round, the first round while the pages come. Another thread
//! harvests the log all the while. All writes are known, so the exact contents of the log are
//! known:
//! - a reported page is there: no guest has written a page that has not come, and filling a page is
//!   not a write of the guest;
//! - when a round is over, the harvests since its beginning, and one more, have reported every
//!   page;
//! - after that the log is empty.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use slat::Vm;

use super::{DemandPaging, DemandPagingError, DemandPagingReport, PagesFrom, SLOT};
use crate::hardware::walk::HardwareFormat;
use crate::paging::Arrivals;
use crate::vm::host::MachineHost;

/// How long the harvester waits between two harvests.
const BETWEEN_HARVESTS: Duration = Duration::from_micros(500);

/// The result of rounds of writes, with concurrent harvests.
#[derive(Clone, Debug)]
pub struct DirtyRounds {
    /// The first round, in which the pages came.
    pub paging: DemandPagingReport,
    /// Harvests in all rounds.
    pub nr_harvests: u64,
    /// Pages that they have reported; those of each round at least once.
    pub nr_reported: u64,
}

/// The pages reported in a round.
struct Reported {
    bits: Vec<u64>,
    nr_harvests: u64,
    nr_reported: u64,
}

impl Reported {
    /// Harvests the log.
    fn harvest<F: HardwareFormat>(
        &mut self,
        vm: &Vm<MachineHost, F>,
        arrivals: Option<(&Arrivals, u64)>,
        round: u64,
    ) -> Result<u64, DemandPagingError> {
        let mut dirty = vec![0; self.bits.len()];
        vm.get_dirty_log(SLOT, &mut dirty)?;
        self.nr_harvests += 1;
        let mut nr_pages = 0;
        for (index, word) in dirty.into_iter().enumerate() {
            self.bits[index] |= word;
            let mut left = word;
            while left != 0 {
                let page = index as u64 * 64 + u64::from(left.trailing_zeros());
                left &= left - 1;
                nr_pages += 1;
                if arrivals.is_some_and(|(arrivals, block_pages)| arrivals.is_missing(page / block_pages)) {
                    return Err(DemandPagingError::FalseReport { page, round });
                }
            }
        }
        self.nr_reported += nr_pages;
        Ok(nr_pages)
    }
}

impl<F: HardwareFormat> DemandPaging<F> {
    /// Runs with `resolver`, and then `nr_rounds` less one rounds more, in which the vCPUs write
    /// all pages again. In all of them another thread harvests the dirty log, and its reports are
    /// compared with the writes. For a VM that was made with
    /// [`DirtyLogging::On`](super::DirtyLogging::On).
    ///
    /// # Errors
    /// [`DemandPagingError::MissedWrite`], [`DemandPagingError::FalseReport`]; and those of
    /// [`run`](DemandPaging::run).
    pub fn check_dirty_log(&mut self, resolver: PagesFrom, nr_rounds: u64) -> Result<DirtyRounds, DemandPagingError> {
        let mut reported =
            Reported { bits: vec![0; self.nr_pages().div_ceil(64) as usize], nr_harvests: 0, nr_reported: 0 };
        let mut paging = self.round_of(1, &resolver, &mut reported)?;
        for round in 2..=nr_rounds {
            // Its `engine` counts everything since the VM was made.
            let next = self.round_of(round, &PagesFrom::None, &mut reported)?;
            paging.engine = next.engine;
        }
        let Reported { nr_harvests, nr_reported, .. } = reported;
        Ok(DirtyRounds { paging, nr_harvests, nr_reported })
    }

    fn round_of(
        &mut self,
        round: u64,
        resolver: &PagesFrom,
        reported: &mut Reported,
    ) -> Result<DemandPagingReport, DemandPagingError> {
        reported.bits.fill(0);
        let vm = std::sync::Arc::clone(&self.vm);
        let arrivals = std::sync::Arc::clone(&self.arrivals);
        let checked = self.config.mode.uses_bitmap().then_some((&*arrivals, self.layout.block_pages));
        let is_over = AtomicBool::new(false);
        let report = std::thread::scope(|scope| {
            let harvester = scope.spawn(|| {
                // Relaxed: the exact moment does not matter.
                while !is_over.load(Ordering::Relaxed) {
                    reported.harvest(&vm, checked, round)?;
                    std::thread::sleep(BETWEEN_HARVESTS);
                }
                Ok::<_, DemandPagingError>(())
            });
            let report = if round == 1 { self.run(resolver.clone()) } else { self.run_round() };
            is_over.store(true, Ordering::Relaxed);
            match harvester.join() {
                Ok(harvested) => harvested.and(report),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })?;
        reported.harvest(&vm, checked, round)?;
        for page in 0..self.layout.nr_pages {
            if reported.bits[(page / 64) as usize] >> (page % 64) & 1 == 0 {
                return Err(DemandPagingError::MissedWrite { page, round });
            }
        }
        reported.bits.fill(0);
        if reported.harvest(&vm, checked, round)? > 0 {
            let page = reported.bits.iter().enumerate().find(|(_, word)| **word != 0);
            let page = page.map_or(0, |(index, word)| index as u64 * 64 + u64::from(word.trailing_zeros()));
            return Err(DemandPagingError::FalseReport { page, round });
        }
        Ok(report)
    }
}
