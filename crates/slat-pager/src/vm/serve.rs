//! The threads that answer the faults of one machine.
//!
//! # Guarantees
//! - A thread waits for messages and for what was read, and for nothing else: a fault whose bytes
//!   are mapped or cached is answered at once; the bytes of others are read elsewhere and put in
//!   place here.
//! - A fault is never answered by a wake-up alone, unless its page is there: a thread that is woken
//!   beside others faults again.
//!
//! # Implementation
//! A round reads messages (removals are noted before anything else happens), answers the faults,
//! puts in place what was read, and tries again what the kernel has put off. A thread sleeps only
//! when a round found nothing.
//!
//! A thread of the guest that is woken takes the CPU from the thread that woke it. So faults that
//! were read together are woken together, by one call for all addresses between them. Threads that
//! wait there for something else fault again, and lose their place among the messages: where reads
//! are under way or messages are left, each fault is woken by itself.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use bytes::Bytes;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::fetch::{Batch, Fetched};
use super::install::{Again, Contents, Done, Stuck};
use super::pages::{Claimed, PageState, bit, masks};
use super::state::{BUFFER_MESSAGES, MessageBuffer};
use super::{End, OnFailure, Shared};
use crate::shared_memory::Filled;
use crate::source::{Mapped, SourceError};
use crate::userfaultfd::{Cause, Event, Fault, Wake};

/// Pages of 4 KiB that are filled before those that wait for them are woken, at most: the first of
/// them waits for all, about half a millisecond. So pages of 2 MiB are woken one by one.
const MOST_UNWOKEN: u64 = 512;

/// What a thread does once more for pages that the kernel has put off.
#[derive(Clone, Debug)]
enum Task {
    /// Bring the pages of a batch, which are claimed.
    Bring(Batch),
    /// Put in place what was read.
    Place(Claimed, Rc<Read>),
    /// Answer a fault on a page that was filled or removed.
    Again(usize, u64, Again),
    /// Poison pages.
    Poison(Claimed),
}

/// What was read for a batch. Its memory is free when the last part of it is in place.
#[derive(Debug)]
struct Read {
    shared: Arc<Shared>,
    batch: Batch,
    fetched: Fetched,
}

impl Drop for Read {
    fn drop(&mut self) {
        self.shared.read_is_over(&self.batch);
    }
}

/// What claimed pages get without a read of the source.
#[derive(Debug)]
pub(super) enum AtHand<'s> {
    Zeros,
    Shared(Filled),
    Mapped(Mapped<'s>),
    Cached(Bytes),
}

impl AtHand<'_> {
    pub(super) fn contents(&self, batch: &Batch) -> Contents<'_> {
        let first_page = batch.hull().start;
        match self {
            AtHand::Zeros => Contents::Zeros,
            AtHand::Shared(_) => Contents::Shared,
            AtHand::Mapped(bytes) => Contents::Bytes { first_page, bytes: *bytes },
            AtHand::Cached(bytes) => Contents::Bytes { first_page, bytes: Mapped::of(bytes) },
        }
    }
}

/// A thread of a machine.
#[derive(Debug)]
pub(super) struct Server {
    shared: Arc<Shared>,
    buffer: MessageBuffer,
}

impl Server {
    pub(super) fn new(shared: Arc<Shared>, buffer: MessageBuffer) -> Server {
        Server { shared, buffer }
    }

    /// Notes the removals in a buffer that a dead pager has left.
    pub(super) fn note_left_removals(&mut self) {
        let _gate = self.shared.installer.gate.write();
        for range in self.buffer.messages().iter().filter_map(crate::userfaultfd::removed) {
            self.shared.note_removed(range);
        }
    }

    /// Serves until the machine ends.
    pub(super) fn run(mut self) {
        let mut worker = Worker {
            shared: Arc::clone(&self.shared),
            again: Vec::new(),
            done: Done::default(),
            wake: Wake::Waiters,
            unwoken_since: Vec::new(),
        };
        let mut nr_idle = 0_u32;
        while !self.shared.has_ended() {
            match self.round(&mut worker) {
                Ok(true) => nr_idle = 0,
                Ok(false) => {
                    worker.wait(nr_idle);
                    nr_idle = nr_idle.saturating_add(1);
                }
                Err(error) => self.shared.end(End::Failed(error.to_string())),
            }
        }
    }

    /// Whether there was anything to do.
    fn round(&mut self, worker: &mut Worker) -> Result<bool, crate::userfaultfd::CallError> {
        let installer = &self.shared.installer;
        let messages = {
            let _gate = installer.gate.write();
            let messages = installer.userfaultfd.read(self.buffer.messages())?;
            messages.removed().for_each(|range| self.shared.note_removed(range));
            messages
        };
        let nr_messages = messages.nr();
        if nr_messages > 0 {
            let since = Instant::now();
            worker.wake = if self.shared.wakes_together(nr_messages) { Wake::None } else { Wake::Waiters };
            for event in messages {
                match event {
                    Event::Fault(fault) => worker.answer(fault, since),
                    // Noted with the gate.
                    Event::Remove(_) | Event::Unmap(_) => {}
                    Event::Fork(child) => {
                        // That may take long.
                        worker.wake_unwoken();
                        worker.shared.close_child(child);
                    }
                    event => worker.shared.distrust(&format!("{event:?} is not served")),
                }
            }
            worker.wake_unwoken();
            worker.wake = Wake::Waiters;
        }
        let requests = self.shared.take_requests();
        let nr_requests = requests.len();
        for (place, page) in requests {
            worker.requested(place, page);
        }
        let nr_again = worker.again.len();
        for task in std::mem::take(&mut worker.again) {
            worker.perform(task);
        }
        let fetched = self.shared.take_fetched();
        let nr_fetched = fetched.len();
        for (batch, outcome) in fetched {
            worker.fetched(batch, outcome);
        }
        worker.count();
        self.shared.answer_requests();
        Ok(nr_messages + nr_requests > 0 || nr_fetched > 0 || worker.again.len() < nr_again)
    }
}

/// What a thread knows beside its messages.
#[derive(Debug)]
struct Worker {
    shared: Arc<Shared>,
    again: Vec<Task>,
    done: Done,
    /// Whether pages that are filled now are woken by their fill, or by the round.
    wake: Wake,
    /// When those faults came that the round wakes.
    unwoken_since: Vec<Instant>,
}

impl Worker {
    fn answer(&mut self, fault: Fault, since: Instant) {
        let shared = Arc::clone(&self.shared);
        let installer = &shared.installer;
        shared.options.metrics.faults.inc();
        let Some((place, page)) = installer.regions.find(fault.address) else {
            shared.distrust(&format!("a fault at {:#x}, which is in no region", fault.address));
            let start = fault.address & !(crate::source::PAGE_BYTES - 1);
            // The thread waits if this fails.
            let _ = installer.userfaultfd.poison(start..start + crate::source::PAGE_BYTES, Wake::Waiters);
            return;
        };
        let (word, mask) = bit(page);
        let range = || {
            let placed = &installer.regions.all()[place];
            placed.address_of(page)..placed.address_of(page) + placed.region.page_bytes
        };
        match fault.cause {
            Cause::WriteProtected => {
                if let Err(error) = installer.userfaultfd.allow_writes(range()) {
                    // A change of the mapping is under way: the thread tries again.
                    tracing::debug!(vm = shared.options.name, %error, "a write-protected page");
                    let _ = installer.userfaultfd.wake(range());
                }
                return;
            }
            Cause::Minor if shared.options.shared_memory.is_none() && installer.userfault_bitmap.is_none() => {
                return self.perform(Task::Again(place, page, Again::File));
            }
            // Of an absent page the file may not have all yet.
            Cause::Minor | Cause::Missing => {}
        }
        match installer.pages.get(page) {
            PageState::Present if fault.cause == Cause::Minor => self.perform(Task::Again(place, page, Again::Shared)),
            PageState::Removed | PageState::Present => self.perform(Task::Again(place, page, Again::Zeros)),
            // Its claim's end wakes the thread.
            PageState::InFlight => shared.options.metrics.faults_in_flight.inc(),
            PageState::Absent if shared.is_distrusted() => {
                let claimed = installer.pages.claim(word, mask);
                if claimed == 0 {
                    return self.missed(place, page);
                }
                self.perform(Task::Poison(Claimed { place, word, mask }));
            }
            PageState::Absent => {
                let batch = shared.claim_around(place, page, since);
                if batch.of_page(page).is_none() {
                    self.missed(place, page);
                }
                if let Some(observer) = &shared.options.observer {
                    observer.faulted(installer.regions.all()[place].offset_of(page));
                }
                if !batch.is_empty() {
                    self.bring(batch);
                }
            }
        }
    }

    /// A vCPU waits for a page.
    fn requested(&mut self, place: usize, page: u64) {
        let address = self.shared.installer.regions.all()[place].address_of(page);
        match self.shared.installer.pages.get(page) {
            PageState::Absent => self.answer(Fault { address, cause: Cause::Missing, is_write: false }, Instant::now()),
            PageState::Removed => self.perform(Task::Again(place, page, Again::Zeros)),
            // It is answered when the page is there. One that was poisoned never is.
            PageState::Present | PageState::InFlight => {}
        }
    }

    /// The page of a fault was absent, and could not be claimed: another thread was faster. One that
    /// fills it wakes this fault's thread, which waits since before its message was read. One that
    /// has noted its removal does not.
    fn missed(&mut self, place: usize, page: u64) {
        if self.shared.installer.pages.get(page) == PageState::Removed {
            self.perform(Task::Again(place, page, Again::Zeros));
        }
    }

    fn perform(&mut self, task: Task) {
        match task {
            Task::Bring(batch) => self.bring(batch),
            Task::Place(claimed, read) => self.place(claimed, read),
            Task::Again(place, page, again) => {
                let result = self.shared.installer.fill_again(place, page, again, &mut self.done);
                let (word, mask) = bit(page);
                self.stuck(Claimed { place, word, mask }, result, |_| Task::Again(place, page, again));
            }
            Task::Poison(claimed) => {
                let result = self.shared.installer.poison(claimed);
                match result {
                    Ok(nr_poisoned) => self.shared.options.metrics.poisoned_pages.inc_by(nr_poisoned),
                    // This kernel cannot: the threads wait.
                    Err(Stuck::Refused(_, error)) => {
                        tracing::error!(vm = self.shared.options.name, %error, "cannot poison; the machine waits");
                    }
                    Err(stuck) => self.stuck(claimed, Err(stuck), Task::Poison),
                }
            }
        }
    }

    /// Fills claimed pages, or lets them be read.
    fn bring(&mut self, batch: Batch) {
        let shared = Arc::clone(&self.shared);
        let Some(at_hand) = shared.at_hand(&batch) else { return shared.fetch(batch) };
        let contents = at_hand.contents(&batch);
        let before = self.done.nr_filled;
        for claimed in batch.claimed() {
            let part = |mask| {
                let mut part = Batch::new(claimed.place, claimed.word, batch.waited_for, batch.since);
                part.add(claimed.word, mask);
                part
            };
            match shared.installer.install(claimed, contents, self.wake, &mut self.done) {
                // A read says what is wrong with the file.
                Err(Stuck::Unreadable(rest)) => shared.fetch(part(rest)),
                result => self.stuck(claimed, result, |rest| Task::Bring(part(rest.mask))),
            }
        }
        let filled_bytes = (self.done.nr_filled - before) * shared.page_bytes(&batch);
        match at_hand {
            AtHand::Zeros => shared.options.metrics.zero_bytes.inc_by(filled_bytes),
            AtHand::Mapped(_) | AtHand::Shared(Filled::Now | Filled::Waits) => {
                shared.options.metrics.mapped_bytes.inc_by(filled_bytes)
            }
            AtHand::Cached(_) | AtHand::Shared(Filled::FromCache) => {
                shared.options.metrics.read_bytes.inc_by(filled_bytes);
                shared.source.read_ahead(batch.offsets(&shared.installer.regions).end, &shared.runtime);
            }
        }
        shared.options.metrics.filled_bytes.inc_by(filled_bytes);
        match self.wake {
            Wake::Waiters => shared.options.metrics.latency_seconds.observe(batch.since.elapsed().as_secs_f64()),
            Wake::None => self.unwoken_since.push(batch.since),
        }
    }

    /// Wakes those whose pages were filled without that.
    fn wake_unwoken(&mut self) {
        self.shared.installer.wake_unwoken(&mut self.done.unwoken);
        for since in self.unwoken_since.drain(..) {
            self.shared.options.metrics.latency_seconds.observe(since.elapsed().as_secs_f64());
        }
    }

    fn fetched(&mut self, batch: Batch, outcome: Result<Fetched, SourceError>) {
        let shared = Arc::clone(&self.shared);
        match outcome {
            Ok(fetched) => {
                let read = Rc::new(Read { shared: Arc::clone(&shared), batch, fetched });
                for claimed in batch.claimed() {
                    self.place(claimed, Rc::clone(&read));
                }
                shared.options.metrics.latency_seconds.observe(batch.since.elapsed().as_secs_f64());
            }
            Err(error) => {
                shared.read_is_over(&batch);
                self.cannot_be_had(batch, &error);
            }
        }
    }

    fn place(&mut self, claimed: Claimed, read: Rc<Read>) {
        let contents = self.shared.read_contents(&read.batch, &read.fetched);
        let before = self.done.nr_filled;
        let result = self.shared.installer.install(claimed, contents, self.wake, &mut self.done);
        let filled_bytes = (self.done.nr_filled - before) * self.shared.page_bytes(&read.batch);
        self.shared.options.metrics.filled_bytes.inc_by(filled_bytes);
        self.stuck(claimed, result, |rest| Task::Place(rest, read));
    }

    fn stuck(&mut self, claimed: Claimed, result: Result<(), Stuck>, again: impl FnOnce(Claimed) -> Task) {
        match result {
            Ok(()) => {}
            Err(Stuck::Again(mask)) => {
                self.shared.options.metrics.tried_again.inc();
                self.again.push(again(Claimed { mask, ..claimed }));
            }
            Err(Stuck::Gone) => self.shared.end(End::Gone),
            Err(Stuck::Refused(mask, error)) => {
                self.shared.distrust(&format!("the kernel refuses to fill its pages: {error}"));
                self.perform(Task::Poison(Claimed { mask, ..claimed }));
            }
            // Own memory cannot be read: broken.
            Err(Stuck::Unreadable(mask)) => self.perform(Task::Poison(Claimed { mask, ..claimed })),
        }
    }

    fn cannot_be_had(&mut self, batch: Batch, error: &SourceError) {
        let shared = Arc::clone(&self.shared);
        let offsets = batch.offsets(&shared.installer.regions);
        tracing::error!(vm = shared.options.name, ?offsets, %error, policy = ?shared.options.on_failure,
            "pages cannot be had");
        let waited_for = batch.waited_for.and_then(|page| batch.of_page(page));
        let hull = batch.hull();
        if let (Some(one), false) = (waited_for, error.may_pass() || hull.end - hull.start == 1) {
            // What is wrong may be another page.
            let mut alone = Batch::new(one.place, one.word, batch.waited_for, batch.since);
            alone.add(one.word, one.mask);
            for claimed in batch.claimed() {
                let own = if claimed.word == one.word { one.mask } else { 0 };
                shared.installer.release(Claimed { mask: claimed.mask & !own, ..claimed });
            }
            shared.fetch(alone);
            return;
        }
        if shared.options.on_failure == OnFailure::Pause && waited_for.is_some() {
            // The page stays claimed, and its threads wait.
            return;
        }
        for claimed in batch.claimed() {
            let poisoned = waited_for.filter(|one| one.word == claimed.word).map_or(0, |one| one.mask);
            if poisoned != 0 {
                self.perform(Task::Poison(Claimed { mask: poisoned, ..claimed }));
            }
            // Threads that wait for the others ask for them by themselves.
            shared.installer.release(Claimed { mask: claimed.mask & !poisoned, ..claimed });
        }
    }

    fn count(&mut self) {
        self.shared.options.metrics.pages_there.inc_by(self.done.nr_there);
        self.done = Done::default();
    }

    /// Waits until there is something to do; not for long if something is to be tried again.
    fn wait(&self, nr_idle: u32) {
        const FEW: u32 = 8;
        if !self.again.is_empty() && nr_idle < FEW {
            std::thread::yield_now();
            return;
        }
        let timeout = (!self.again.is_empty()).then_some(Timespec { tv_sec: 0, tv_nsec: 200_000 });
        let mut fds = [
            PollFd::new(&*self.shared.installer.userfaultfd, PollFlags::IN),
            PollFd::new(&self.shared.wakeup, PollFlags::IN),
        ];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => self.shared.end(End::Failed(format!("poll: {error}"))),
        }
        if fds[0].revents().intersects(PollFlags::ERR | PollFlags::NVAL) {
            self.shared.end(End::Failed("the userfaultfd has an error".to_string()));
        }
        // The counter stays once the machine has ended, for the other threads.
        if fds[1].revents().contains(PollFlags::IN) && !self.shared.has_ended() {
            let _ = rustix::io::read(&self.shared.wakeup, &mut [0_u8; 8]);
            if self.shared.has_ended() {
                self.shared.wake_up();
            }
        }
    }
}

impl Shared {
    /// Whether the faults of so many messages are woken by one call.
    fn wakes_together(&self, nr_messages: usize) -> bool {
        if !(2..BUFFER_MESSAGES).contains(&nr_messages) || self.has_reads() {
            return false;
        }
        let base = crate::source::PAGE_BYTES;
        let largest = self.installer.regions.all().iter().map(|placed| placed.region.page_bytes).max();
        let granule = self.options.granule_bytes(&*self.source, largest.unwrap_or(base));
        nr_messages as u64 * (granule / base) <= MOST_UNWOKEN
    }

    /// Notes that `range` is given up. The caller has the gate exclusive.
    fn note_removed(&self, range: std::ops::Range<u64>) {
        let mut nr_bytes = 0;
        for (place, pages) in self.installer.regions.touched(range.clone()) {
            let placed = &self.installer.regions.all()[place];
            let whole = placed.address_of(pages.start)..placed.address_of(pages.end - 1) + placed.region.page_bytes;
            if whole.start < range.start || whole.end > range.end {
                // Of a huge page a part: the monitor's pages are not what it said.
                self.distrust("a part of a page was removed");
            }
            nr_bytes += whole.end - whole.start;
            self.installer.pages.remove(pages.clone());
            self.look_again_at_requests(pages);
        }
        self.options.metrics.removed_bytes.inc_by(nr_bytes);
    }

    /// The monitor has said something untrue: no page is filled any more.
    pub(super) fn distrust(&self, why: &str) {
        if !self.is_distrusted.swap(true, Ordering::Relaxed) {
            self.options.metrics.violations.inc();
            tracing::error!(
                vm = self.options.name,
                why,
                "the monitor is wrong about its memory; it gets no more of it"
            );
        }
    }

    /// Claims what is absent of the granule of `page`, if `page` is.
    fn claim_around(&self, place: usize, page: u64, since: Instant) -> Batch {
        let installer = &self.installer;
        let placed = &installer.regions.all()[place];
        let region = &placed.region;
        let granule = self.options.granule_bytes(&*self.source, region.page_bytes);
        let start = placed.offset_of(page) & !(granule - 1);
        let offsets = start.max(region.offset)..start.saturating_add(granule).min(region.offset + region.size_bytes);
        let first = (offsets.start - region.offset) / region.page_bytes;
        let end = (offsets.end - region.offset).div_ceil(region.page_bytes);
        let pages = placed.first_page + first..placed.first_page + end;
        let mut batch = Batch::new(place, (pages.start / 64) as usize, Some(page), since);
        for (word, mask) in masks(pages) {
            batch.add(word, installer.pages.claim(word, mask));
        }
        batch
    }

    pub(super) fn page_bytes(&self, batch: &Batch) -> u64 {
        batch.claimed().next().map_or(0, |claimed| self.installer.regions.all()[claimed.place].region.page_bytes)
    }

    /// What claimed pages get without a read of the source, if that is possible.
    pub(super) fn at_hand(&self, batch: &Batch) -> Option<AtHand<'_>> {
        let offsets = batch.offsets(&self.installer.regions);
        if let Some(memory) = &self.options.shared_memory {
            // An error is one that a read finds, too.
            return memory.try_fill(offsets).ok().filter(|filled| *filled != Filled::Waits).map(AtHand::Shared);
        }
        if self.source.is_zero(offsets.clone()) {
            return Some(AtHand::Zeros);
        }
        let mapped = self.source.mapped(offsets.clone()).map(AtHand::Mapped);
        mapped.or_else(|| self.source.cached(offsets).map(AtHand::Cached))
    }

    /// What pages of `batch` get once it was read.
    pub(super) fn read_contents<'f>(&self, batch: &Batch, fetched: &'f Fetched) -> Contents<'f> {
        if self.options.shared_memory.is_some() {
            return Contents::Shared;
        }
        let bytes = Mapped::of(&fetched.bytes);
        Contents::Bytes { first_page: batch.hull().start, bytes }
    }
}
