//! Reads of a source that take time: bounded for each machine and for all, tried again while there
//! is hope.
//!
//! # Guarantees
//! - The bytes of all reads that are under way, and of those that were read and not yet put in
//!   place, stay within a [`Budget`], or are those of one read that is larger. Reads get their
//!   share in the order in which they ask for it. A read that failed holds none while it waits for
//!   its next try.
//! - Reads for the faults of one machine have at most [`Limits::vm_bytes`], from their first try to
//!   the end, or are one read that is larger. A replay has one granule for each of its threads
//!   beside that. All replays have a quarter of the budget at most, and one that waits for its share
//!   has claimed no page: faults do not wait for the replays of other machines.
//! - Reads of one snapshot have half of the budget at most, where there are others
//!   ([`Budget::of_source`]): a server that does not answer leaves the rest to them.
//! - A read ends when its machine does.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::pages::{Claimed, masks, runs};
use super::regions::Regions;
use super::{OnFailure, Shared};
use crate::source::{PAGE_BYTES, SourceError};

/// Words of pages that one read is for.
pub const MAX_WORDS: usize = 16;

const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Memory for reads that are under way, of all machines together.
#[derive(Clone, Debug)]
pub struct Budget {
    pages: Arc<Semaphore>,
    nr_pages: u32,
    /// What replays may have of it at most, so that faults do not wait for them.
    of_replays: Arc<Semaphore>,
    nr_of_replays: u32,
    /// What the reads of one snapshot may have of it at most.
    of_source: Option<Arc<Semaphore>>,
}

/// A part of a [`Budget`], until it is dropped.
#[derive(Debug)]
pub(super) struct Share {
    _pages: OwnedSemaphorePermit,
    _of_replays: Option<OwnedSemaphorePermit>,
    _of_source: Option<OwnedSemaphorePermit>,
}

/// What a read is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Reader {
    Fault,
    Replay,
}

impl Budget {
    /// Of so many bytes.
    pub fn new(nr_bytes: u64) -> Budget {
        let nr_pages = u32::try_from(nr_bytes / PAGE_BYTES).unwrap_or(u32::MAX).clamp(1, 1 << 28);
        let nr_of_replays = (nr_pages / 4).max(1);
        let semaphore = |nr_pages: u32| Arc::new(Semaphore::new(nr_pages as usize));
        let (pages, of_replays) = (semaphore(nr_pages), semaphore(nr_of_replays));
        Budget { pages, nr_pages, of_replays, nr_of_replays, of_source: None }
    }

    /// The same for the reads of one snapshot, which have half of it at most.
    #[must_use]
    pub fn of_source(&self) -> Budget {
        let most = Semaphore::new((self.nr_pages / 2).max(1) as usize);
        Budget { of_source: Some(Arc::new(most)), ..self.clone() }
    }

    /// What one read may have at most.
    fn most_pages(&self) -> u32 {
        if self.of_source.is_some() { (self.nr_pages / 2).max(1) } else { self.nr_pages }
    }

    /// Bytes that are not used now.
    pub fn free_bytes(&self) -> u64 {
        self.pages.available_permits() as u64 * PAGE_BYTES
    }

    async fn take(&self, nr_bytes: u64, reader: Reader) -> Share {
        let nr_pages = nr_pages(nr_bytes);
        let take = |semaphore: &Arc<Semaphore>, most: u32| {
            let taken = Arc::clone(semaphore).acquire_many_owned(nr_pages.min(most));
            async { taken.await.expect("never closed") }
        };
        // First its own: what waits for the whole budget is bounded, too.
        let of_replays = match reader {
            Reader::Fault => None,
            Reader::Replay => Some(take(&self.of_replays, self.nr_of_replays).await),
        };
        let of_source = match &self.of_source {
            Some(of_source) => Some(take(of_source, self.most_pages()).await),
            None => None,
        };
        Share { _pages: take(&self.pages, self.most_pages()).await, _of_replays: of_replays, _of_source: of_source }
    }

    /// As [`take`](Self::take) for a replay, if it need not wait.
    fn take_now(&self, nr_bytes: u64) -> Option<Share> {
        let nr_pages = nr_pages(nr_bytes);
        let take = |semaphore: &Arc<Semaphore>, most: u32| {
            Arc::clone(semaphore).try_acquire_many_owned(nr_pages.min(most)).ok()
        };
        let _of_replays = Some(take(&self.of_replays, self.nr_of_replays)?);
        let _of_source = match &self.of_source {
            Some(of_source) => Some(take(of_source, self.most_pages())?),
            None => None,
        };
        Some(Share { _pages: take(&self.pages, self.most_pages())?, _of_replays, _of_source })
    }
}

fn nr_pages(nr_bytes: u64) -> u32 {
    u32::try_from(nr_bytes.div_ceil(PAGE_BYTES)).unwrap_or(u32::MAX)
}

/// How reads are limited.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Of all machines.
    pub budget: Budget,
    /// Of the faults of one machine; one read is always possible.
    pub vm_bytes: u64,
    /// A read that takes longer has failed, and is tried again.
    pub read_timeout: Duration,
    /// How long errors that may pass are put up with.
    pub patience: Duration,
}

impl Limits {
    /// Bytes of the budget, by default.
    pub const BUDGET_BYTES: u64 = 256 << 20;
    /// [`vm_bytes`](Limits::vm_bytes), by default.
    pub const VM_BYTES: u64 = 8 << 20;
    /// [`read_timeout`](Limits::read_timeout), by default.
    pub const READ_TIMEOUT: Duration = Duration::from_secs(30);
    /// [`patience`](Limits::patience), by default.
    pub const PATIENCE: Duration = Duration::from_secs(60);
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            budget: Budget::new(Limits::BUDGET_BYTES),
            vm_bytes: Limits::VM_BYTES,
            read_timeout: Limits::READ_TIMEOUT,
            patience: Limits::PATIENCE,
        }
    }
}

/// Claimed pages of neighbouring words, to be filled by one read.
#[derive(Clone, Copy, Debug)]
pub struct Batch {
    place: usize,
    first_word: usize,
    masks: [u64; MAX_WORDS],
    /// The page that a thread waits for, if one does.
    pub waited_for: Option<u64>,
    /// When its message was read.
    pub since: Instant,
}

impl Batch {
    /// None, of the region `place`; words from `first_word` on can be added.
    pub fn new(place: usize, first_word: usize, waited_for: Option<u64>, since: Instant) -> Batch {
        Batch { place, first_word, masks: [0; MAX_WORDS], waited_for, since }
    }

    /// Adds claimed pages.
    pub fn add(&mut self, word: usize, mask: u64) {
        self.masks[word - self.first_word] |= mask;
    }

    /// Whether it has no page.
    pub fn is_empty(&self) -> bool {
        self.masks == [0; MAX_WORDS]
    }

    /// The pages, by words.
    pub fn claimed(&self) -> impl Iterator<Item = Claimed> + use<> {
        let Batch { place, first_word, masks, .. } = *self;
        let with_pages = masks.into_iter().enumerate().filter(|(_, mask)| *mask != 0);
        with_pages.map(move |(nr, mask)| Claimed { place, word: first_word + nr, mask })
    }

    /// The pages from the first to the last, which are claimed or not.
    pub fn hull(&self) -> std::ops::Range<u64> {
        let all = || self.claimed().flat_map(|claimed| runs(claimed.mask).map(move |run| (claimed.first_page(), run)));
        let start = all().map(|(first, run)| first + run.start).min().unwrap_or(0);
        let end = all().map(|(first, run)| first + run.end).max().unwrap_or(0);
        start..end
    }

    /// Where the hull is in the snapshot.
    pub fn offsets(&self, regions: &Regions) -> std::ops::Range<u64> {
        let (placed, hull) = (&regions.all()[self.place], self.hull());
        placed.offset_of(hull.start)..placed.offset_of(hull.end)
    }

    /// Its page `page`, if it has that.
    pub fn of_page(&self, page: u64) -> Option<Claimed> {
        let (word, mask) = masks(page..page + 1).next()?;
        self.claimed().find(|claimed| claimed.word == word && claimed.mask & mask != 0).map(|c| Claimed { mask, ..c })
    }
}

/// The bytes of a batch, and what they take of the budget.
#[derive(Debug)]
pub struct Fetched {
    /// All of the hull; none where they are in shared memory.
    pub bytes: Bytes,
    _share: Share,
}

/// What became of a batch.
pub type Outcome = (Batch, Result<Fetched, SourceError>);

/// Reads that wait for their turn, and how many are under way.
#[derive(Debug, Default)]
pub struct Queue {
    waiting: std::collections::VecDeque<Batch>,
    bytes_under_way: u64,
    fetched: Vec<Outcome>,
}

impl Shared {
    /// Lets `batch` be read, now or when the machine's other reads are through.
    pub(super) fn fetch(self: &Arc<Shared>, batch: Batch) {
        self.queue.lock().waiting.push_back(batch);
        self.start_reads();
    }

    /// Takes what was read.
    pub(super) fn take_fetched(self: &Arc<Shared>) -> Vec<Outcome> {
        let mut queue = self.queue.lock();
        let fetched = std::mem::take(&mut queue.fetched);
        drop(queue);
        fetched
    }

    fn start_reads(self: &Arc<Shared>) {
        let mut queue = self.queue.lock();
        while let Some(batch) = queue.waiting.front().copied() {
            let nr_bytes = self.bytes_of(&batch);
            if queue.bytes_under_way > 0 && queue.bytes_under_way + nr_bytes > self.options.limits.vm_bytes {
                break;
            }
            queue.waiting.pop_front();
            queue.bytes_under_way += nr_bytes;
            self.runtime.spawn(Arc::clone(self).read_batch(batch));
        }
    }

    /// What a batch held is free: it was put in place, or given up.
    pub(super) fn read_is_over(self: &Arc<Shared>, batch: &Batch) {
        self.queue.lock().bytes_under_way -= self.bytes_of(batch);
        self.start_reads();
    }

    /// Whether threads wait for reads of the machine's faults.
    pub(super) fn has_reads(&self) -> bool {
        self.queue.lock().bytes_under_way > 0
    }

    fn bytes_of(&self, batch: &Batch) -> u64 {
        let offsets = batch.offsets(&self.installer.regions);
        offsets.end - offsets.start
    }

    async fn read_batch(self: Arc<Shared>, batch: Batch) {
        let mut ended = self.ended.subscribe();
        self.options.metrics.reads_in_flight.inc();
        tokio::select! {
            biased;
            _ = ended.wait_for(Option::is_some) => {}
            outcome = self.read_patiently(&batch) => {
                self.queue.lock().fetched.push((batch, outcome));
                self.wake_up();
            }
        }
        self.options.metrics.reads_in_flight.dec();
    }

    /// Memory for a replay's read of `nr_bytes`, if there is some now.
    pub(super) fn share_now(&self, nr_bytes: u64) -> Option<Share> {
        self.options.limits.budget.take_now(nr_bytes)
    }

    /// The same, once there is some. `None`: the machine has ended.
    pub(super) async fn share_unless_ended(&self, nr_bytes: u64) -> Option<Share> {
        self.unless_ended(self.options.limits.budget.take(nr_bytes, Reader::Replay)).await
    }

    /// Reads `batch` for a replay, in one try. `None`: the machine has ended.
    pub(super) async fn read_unless_ended(&self, batch: &Batch, share: Share) -> Option<Result<Fetched, SourceError>> {
        self.unless_ended(self.read_once(batch, Reader::Replay, share)).await
    }

    async fn unless_ended<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let mut ended = self.ended.subscribe();
        tokio::select! {
            biased;
            _ = ended.wait_for(Option::is_some) => None,
            done = work => Some(done),
        }
    }

    async fn read_once(&self, batch: &Batch, reader: Reader, share: Share) -> Result<Fetched, SourceError> {
        let offsets = batch.offsets(&self.installer.regions);
        let nr_bytes = offsets.end - offsets.start;
        let limits = &self.options.limits;
        let end = offsets.end;
        let read = async {
            match &self.options.shared_memory {
                Some(memory) => memory.fill(offsets).await.map(|()| Bytes::new()),
                None => self.source.read_shared(offsets).await,
            }
        };
        // The first that is polled, and so begins, is the read itself.
        let read = futures_util::future::join(read, async {
            if reader == Reader::Fault {
                self.source.read_ahead(end, &self.runtime);
            }
        });
        let error = match tokio::time::timeout(limits.read_timeout, read).await {
            Ok((Ok(bytes), ())) => {
                self.options.metrics.read_bytes.inc_by(nr_bytes);
                return Ok(Fetched { bytes, _share: share });
            }
            Ok((Err(error), ())) => error,
            Err(_) => SourceError::Unavailable {
                server: "the source".to_string(),
                why: format!("no answer in {:?}", limits.read_timeout),
            },
        };
        self.options.metrics.source_errors.inc();
        Err(error)
    }

    async fn read_patiently(&self, batch: &Batch) -> Result<Fetched, SourceError> {
        let limits = &self.options.limits;
        let first_try = tokio::time::Instant::now();
        let mut pause = FIRST_PAUSE;
        loop {
            let share = limits.budget.take(self.bytes_of(batch), Reader::Fault).await;
            let error = match self.read_once(batch, Reader::Fault, share).await {
                Ok(fetched) => return Ok(fetched),
                Err(error) => error,
            };
            let is_hopeless = !error.may_pass()
                || (self.options.on_failure == OnFailure::Poison && first_try.elapsed() >= limits.patience);
            if is_hopeless {
                return Err(error);
            }
            let offsets = batch.offsets(&self.installer.regions);
            tracing::warn!(vm = self.options.name, ?offsets, %error, ?pause, "a read failed, and is tried again");
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn replays_leave_most_of_the_budget_to_faults() {
        let budget = Budget::new(16 * PAGE_BYTES);
        let first = budget.take(4 * PAGE_BYTES, Reader::Replay).await;
        let second = budget.take(PAGE_BYTES, Reader::Replay);
        tokio::pin!(second);
        assert!(futures_util::poll!(&mut second).is_pending());
        // Beside a replay that waits.
        let fault = budget.take(12 * PAGE_BYTES, Reader::Fault).await;
        assert_eq!(budget.free_bytes(), 0);
        assert!(budget.take_now(PAGE_BYTES).is_none());
        drop(first);
        assert!(futures_util::poll!(&mut second).is_ready());
        drop(fault);
        // One that is larger than all is possible.
        drop(budget.take(100 * PAGE_BYTES, Reader::Replay).await);
        assert_eq!(budget.free_bytes(), 16 * PAGE_BYTES);
    }

    #[tokio::test]
    async fn one_snapshot_leaves_half_of_the_budget_to_others() {
        let budget = Budget::new(16 * PAGE_BYTES);
        let (one, other) = (budget.of_source(), budget.of_source());
        let held = one.take(100 * PAGE_BYTES, Reader::Fault).await;
        assert_eq!(budget.free_bytes(), 8 * PAGE_BYTES);
        let waits = one.take(PAGE_BYTES, Reader::Fault);
        tokio::pin!(waits);
        assert!(futures_util::poll!(&mut waits).is_pending());
        assert!(one.take_now(PAGE_BYTES).is_none() && other.take_now(PAGE_BYTES).is_some());
        drop(other.take(8 * PAGE_BYTES, Reader::Fault).await);
        drop(held);
        assert!(futures_util::poll!(&mut waits).is_ready());
    }

    #[test]
    fn a_batch_knows_its_pages() {
        let mut batch = Batch::new(0, 3, Some(200), Instant::now());
        assert!(batch.is_empty());
        batch.add(3, 1 << 8);
        batch.add(4, 3);
        assert_eq!(batch.hull(), 200..258);
        assert_eq!(batch.of_page(200).map(|claimed| (claimed.word, claimed.mask)), Some((3, 1 << 8)));
        assert_eq!(batch.of_page(258), None);
        assert_eq!(batch.claimed().count(), 2);
    }
}
