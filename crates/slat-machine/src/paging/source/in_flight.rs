//! The requests of a source that has every page at once.

use std::collections::VecDeque;

use super::{MAX_IN_FLIGHT, NextArrival, PAGE_SIZE, SourceError};

/// Pages that are in flight in a source that has them at once, in the order of the requests.
#[derive(Debug)]
pub(super) struct PagesInFlight {
    pages: VecDeque<u64>,
}

impl PagesInFlight {
    pub(super) fn new() -> PagesInFlight {
        PagesInFlight { pages: VecDeque::with_capacity(MAX_IN_FLIGHT) }
    }

    pub(super) fn push(&mut self, page: u64) -> Result<(), SourceError> {
        check_range(page)?;
        if self.pages.contains(&page) {
            return Err(SourceError::AlreadyRequested { page });
        }
        if self.pages.len() >= MAX_IN_FLIGHT {
            return Err(SourceError::TooManyInFlight { page });
        }
        self.pages.push_back(page);
        Ok(())
    }

    pub(super) fn first(&self) -> Option<u64> {
        self.pages.front().copied()
    }

    pub(super) fn take(&mut self) -> Result<u64, SourceError> {
        self.pages.pop_front().ok_or(SourceError::NothingArrived)
    }

    pub(super) fn len(&self) -> usize {
        self.pages.len()
    }

    pub(super) fn next_arrival(&self) -> NextArrival<'static> {
        if self.pages.is_empty() { NextArrival::Nothing } else { NextArrival::At(0) }
    }
}

/// Whether a file could have the page: its offsets are signed.
pub(super) fn check_range(page: u64) -> Result<(), SourceError> {
    const END: u64 = i64::MAX as u64 / PAGE_SIZE as u64;
    if page < END { Ok(()) } else { Err(SourceError::PageOutOfRange { page }) }
}
