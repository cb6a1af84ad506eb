//! Fills pages that no thread waits for: replays of a working set, and whatever else is brought ahead.
//!
//! Pages are claimed as for a fault (`serve`), read once, and filled here, by the caller's thread. What
//! cannot be read or filled is absent again, and a fault finds why.

use std::ops::Range;
use std::time::Instant;

use super::fetch::Batch;
use super::install::{Contents, Done, Stuck};
use super::pages::{Claimed, masks};
use super::{End, Shared};
use crate::source::SourceError;
use crate::userfaultfd::Wake;

impl Shared {
    /// See [`Populator::populate`](super::Populator::populate).
    pub(super) fn populate(&self, offsets: Range<u64>) -> Result<u64, SourceError> {
        let granule = self.options.granule_bytes(&*self.source, crate::source::PAGE_BYTES);
        let mut nr_bytes = 0;
        for (place, pages) in self.installer.regions.touched_offsets(offsets) {
            let page_bytes = self.installer.regions.all()[place].region.page_bytes;
            let step = (granule / page_bytes).max(1);
            for first in pages.clone().step_by(step as usize) {
                if self.has_ended() || self.is_distrusted() {
                    return Ok(nr_bytes);
                }
                nr_bytes += self.populate_part(place, first..(first + step).min(pages.end))? * page_bytes;
            }
        }
        Ok(nr_bytes)
    }

    /// Fills the absent ones of `pages`, and returns how many.
    fn populate_part(&self, place: usize, pages: Range<u64>) -> Result<u64, SourceError> {
        let nr_bytes = (pages.end - pages.start) * self.installer.regions.all()[place].region.page_bytes;
        let mut share = None;
        loop {
            let mut batch = Batch::new(place, (pages.start / 64) as usize, None, Instant::now());
            for (word, mask) in masks(pages.clone()) {
                batch.add(word, self.installer.pages.claim(word, mask));
            }
            if batch.is_empty() {
                return Ok(0);
            }
            if let Some(at_hand) = self.at_hand(&batch) {
                return Ok(self.fill_claimed(&batch, at_hand.contents(&batch)));
            }
            let Some(own) = share.take().or_else(|| self.share_now(nr_bytes)) else {
                // Replays of other machines may have it for long, and faults wait for claimed pages.
                self.give_up(&batch);
                share = self.runtime.block_on(self.share_unless_ended(nr_bytes));
                if share.is_none() {
                    return Ok(0);
                }
                continue;
            };
            return match self.runtime.block_on(self.read_unless_ended(&batch, own)) {
                Some(Ok(read)) => Ok(self.fill_claimed(&batch, self.read_contents(&batch, &read))),
                unread => {
                    self.give_up(&batch);
                    unread.map_or(Ok(0), |failed| failed.map(|_| 0))
                }
            };
        }
    }

    /// Claimed pages are absent again.
    fn give_up(&self, batch: &Batch) {
        batch.claimed().for_each(|claimed| self.installer.release(claimed));
        self.answer_requests();
    }

    /// Fills claimed pages, and returns how many. The others are absent again.
    fn fill_claimed(&self, batch: &Batch, contents: Contents<'_>) -> u64 {
        let mut done = Done::default();
        for mut claimed in batch.claimed() {
            while let Err(stuck) = self.installer.install(claimed, contents, Wake::Waiters, &mut done) {
                match stuck {
                    Stuck::Again(mask) if !self.has_ended() => {
                        claimed.mask = mask;
                        std::thread::yield_now();
                    }
                    // A fault finds what is wrong, if there is one.
                    Stuck::Again(mask) | Stuck::Unreadable(mask) | Stuck::Refused(mask, _) => {
                        self.installer.release(Claimed { mask, ..claimed });
                        break;
                    }
                    // No thread waits any more.
                    Stuck::Gone => {
                        self.end(End::Gone);
                        break;
                    }
                }
            }
        }
        self.options.metrics.filled_bytes.inc_by(done.nr_filled * self.page_bytes(batch));
        self.answer_requests();
        done.nr_filled
    }
}
