//! The background copier: fetches the pages that were not requested yet, so that in the end all
//! memory is there.
//!
//! Faults come first. A vCPU's own request goes to its thread's own source and never waits behind
//! the copier's. They share the link, the processors and the claims, and there the copier yields:
//! while a vCPU waits for a page, it has one request in flight. A vCPU that needs a page which the
//! copier has requested waits for that request (`arrivals.rs`).

use std::sync::Arc;
use std::time::Instant;

use slat_pager::delivery::Copier;
use slat_pager::source::requests::Wait;

use super::arrivals::{Arrivals, LONGEST_SLEEP};
use super::error::VcpuError;
use super::fetch::{FetchFrom, Fetcher};

/// Fetches until every block is claimed and its own are there, or the run has failed. Returns how
/// many blocks it has filled.
pub(crate) fn copy_rest(copier: Copier, from: &FetchFrom, arrivals: &Arc<Arrivals>) -> Result<u64, VcpuError> {
    let result = run(copier, from, arrivals);
    if let Err(error) = &result {
        arrivals.fail(error);
    }
    result
}

fn run(copier: Copier, from: &FetchFrom, arrivals: &Arc<Arrivals>) -> Result<u64, VcpuError> {
    let mut fetcher = Fetcher::open(from, arrivals, copier.window)?;
    let mut next = Some(0);
    while !arrivals.has_failed() {
        let window = if arrivals.has_waiting_faults() { 1 } else { copier.window };
        while fetcher.nr_in_flight() < window
            && let Some(from_block) = next
        {
            let claimed = arrivals.claim_next(from_block);
            if let Some(block) = claimed {
                fetcher.ask(block, ())?;
            }
            next = claimed.map(|block| block + 1);
        }
        if fetcher.nr_in_flight() == 0 {
            break;
        }
        if fetcher.next(Wait::Until(Instant::now() + LONGEST_SLEEP))?.is_some() {
            while fetcher.next(Wait::No)?.is_some() {}
        }
    }
    Ok(fetcher.nr_filled())
}
