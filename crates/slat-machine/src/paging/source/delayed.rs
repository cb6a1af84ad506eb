//! A latency for every fetch: a page is not here before its request plus the latency.
//!
//! The latencies overlap: requests pass on at once, so those in flight wait concurrently. A caller
//! with other work calls [`PageSource::next_arrival`] for the moment at which the first one is due.

use std::collections::VecDeque;

use super::wait::wait;
use super::{MAX_IN_FLIGHT, NextArrival, PageBytes, PageSource, SourceError, Wait};
use crate::linux::clock::timestamp_ns;

/// A source behind a latency.
#[derive(Debug)]
pub(super) struct DelayedSource {
    source: Box<dyn PageSource>,
    delay_ns: u64,
    /// What is in flight and when it is due: in the order of the requests, so the first is due
    /// first.
    due: VecDeque<Due>,
    /// Whether requests may not be sent yet.
    is_unsent: bool,
    /// The page that was returned as arrived and is not taken yet.
    here: Option<u64>,
    /// When the page is due that the source returned last: the source returns no other until that
    /// is taken.
    named_due_ns: u64,
}

#[derive(Clone, Copy, Debug)]
struct Due {
    page: u64,
    at_ns: u64,
}

impl DelayedSource {
    pub(super) fn new(source: Box<dyn PageSource>, delay_ns: u64) -> DelayedSource {
        let due = VecDeque::with_capacity(MAX_IN_FLIGHT);
        DelayedSource { source, delay_ns, due, is_unsent: false, here: None, named_due_ns: 0 }
    }

    /// The index of a page among those in flight: 0, unless the source has changed their order.
    fn position(&self, page: u64) -> Option<usize> {
        self.due.iter().position(|due| due.page == page)
    }

    /// The page that was returned is about to be taken.
    fn reset_arrived(&mut self) -> Result<(), SourceError> {
        let page = self.here.take().ok_or(SourceError::NothingArrived)?;
        if let Some(position) = self.position(page) {
            self.due.remove(position);
        }
        Ok(())
    }
}

impl PageSource for DelayedSource {
    fn request(&mut self, page: u64) -> Result<(), SourceError> {
        self.source.request(page)?;
        self.due.push_back(Due { page, at_ns: timestamp_ns().saturating_add(self.delay_ns) });
        self.is_unsent = true;
        Ok(())
    }

    fn arrived(&mut self, how_long: Wait) -> Result<Option<u64>, SourceError> {
        let until_ns = how_long.until_ns();
        loop {
            let Some(first) = self.due.front().copied() else { return Ok(None) };
            let now_ns = timestamp_ns();
            // Asking a peer is a system call: only if something is to be sent, or can be due.
            let mut next = None;
            if self.is_unsent || first.at_ns <= now_ns {
                next = self.source.arrived(Wait::No)?;
                if self.is_unsent && next.is_some() {
                    // The source may return the same page for a while: a call sends the requests.
                    next = self.source.arrived(Wait::No)?;
                }
                self.is_unsent = false;
            }
            if self.here.is_some() {
                return Ok(self.here);
            }
            // A source that changes the order returns no other page until the one that it has is
            // taken.
            let next_due_ns = match next.and_then(|page| self.position(page)) {
                Some(position) => self.due[position].at_ns,
                None => first.at_ns,
            };
            if next.is_some() {
                if next_due_ns <= now_ns {
                    self.here = next;
                    return Ok(next);
                }
                self.named_due_ns = next_due_ns;
            }
            if until_ns <= now_ns {
                return Ok(None);
            }
            if next_due_ns <= now_ns {
                // Due, and still on its way.
                if self.source.arrived(how_long)?.is_none() {
                    return Ok(None);
                }
            } else {
                wait(&mut [], next_due_ns.min(until_ns)).map_err(|cause| SourceError::Wait { cause })?;
            }
        }
    }

    fn take(&mut self) -> Result<&PageBytes, SourceError> {
        self.reset_arrived()?;
        self.source.take()
    }

    fn take_into(&mut self, into: &mut PageBytes) -> Result<(), SourceError> {
        self.reset_arrived()?;
        self.source.take_into(into)
    }

    fn nr_in_flight(&self) -> usize {
        self.source.nr_in_flight()
    }

    fn next_arrival(&self) -> NextArrival<'_> {
        match self.due.front() {
            Some(_) if self.is_unsent || self.here.is_some() => NextArrival::At(0),
            Some(first) => match first.at_ns.max(self.named_due_ns) {
                due_ns if due_ns > timestamp_ns() => NextArrival::At(due_ns),
                _ => self.source.next_arrival(),
            },
            None => self.source.next_arrival(),
        }
    }
}
