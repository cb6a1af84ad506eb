//! The vCPU's end of a delivery.
//!
//! # Protocol
//! - A port belongs to one thread at a time. Its indices, and what is in flight, are its own
//!   memory.
//! - A page is *there* when its bit is clear, and not because of a completion. A completion only
//!   causes a look at the bit. So a wrong completion cannot show the guest a page that is not
//!   filled.
//! - Each ask has a ticket: the epoch (16 bits) and a number that only grows. A completion counts
//!   if its ticket and its page are those of a request in flight. Any other is counted and dropped:
//!   *double* if the request was answered before, *late* if it was asked again since or belongs to
//!   another epoch, *unasked* if no ask had the ticket.
//! - A request in flight ends in one of four ways: its page is there; the resolver reports that it
//!   cannot fill the page; the resolver has completed it too often without clearing the bit; the
//!   port is dropped. A dead resolver and a timeout end no request.
//! - To sleep, the port announces it, looks at the ring and at the end of the session, and then
//!   waits for the eventfd. [`SharedRings`](super::ring::SharedRings) has the pair with the
//!   resolver, [`session`](super::session) that with the session's end.

use std::collections::VecDeque;
use std::hint;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::error::DeliveryError;
use super::ring::{NotPushed, Reader, RingEntry, Sleeper, Writer};
use super::session::{NAP, Session, Shared};
use super::shared;

/// How often one page is asked for, if the resolver completes it without clearing the bit.
pub const MAX_ANSWERS: u32 = 4;

/// Looks at the ring before a vCPU sleeps: about the time that a wake-up by an eventfd takes.
const LOOKS: u32 = 20;

/// Bits of a ticket that number the asks.
const TICKET_BITS: u32 = 48;

/// The status of a completion: the page is there.
pub(super) const DONE: u64 = 0;
/// The low half of the status of a completion: the page cannot be filled; the high half is the
/// reason.
pub(super) const FAILED: u64 = 1;

/// What became of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Requested {
    /// The resolver was asked, now or before.
    InFlight,
    /// The page is there already; the resolver was not asked.
    AlreadyThere,
}

/// What a port has counted.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct PortStats {
    /// Requests put into the ring, repetitions included.
    pub asked: u64,
    /// Times that the resolver slept and was woken.
    pub doorbells: u64,
    /// Pages that were reported to be there.
    pub pages: u64,
    /// Times that the vCPU slept.
    pub parks: u64,
    /// Completions of requests that were answered before.
    pub double: u64,
    /// Completions of requests that were asked again since, or of another epoch, or whose page was
    /// found without them.
    pub late: u64,
    /// Completions of requests that were never made.
    pub unasked: u64,
    /// Completions of pages whose bit was still set.
    pub not_cleared: u64,
    /// Pages that were found there without a completion.
    pub unannounced: u64,
}

#[derive(Clone, Copy, Debug)]
struct RequestInFlight {
    page: u64,
    flags: u64,
    /// Of the last ask; 0 if there was none in this session.
    ticket: u64,
    nr_answers: u32,
    /// When the vCPU asked first.
    since: Instant,
}

/// One vCPU's end: it asks for pages and waits for them.
#[derive(Debug)]
pub struct DeliveryPort {
    shared: Arc<Shared>,
    vcpu: u32,
    session: Option<Arc<Session>>,
    requests: Writer,
    completions: Reader,
    in_flight: Vec<RequestInFlight>,
    /// Pages that are there and were not reported yet.
    ready: VecDeque<u64>,
    /// The number of the last ask; numbers begin at 1.
    nr_asked: u64,
    /// Tickets that were answered lately, by their number.
    answered: Box<[u64]>,
    stats: PortStats,
}

impl DeliveryPort {
    pub(super) fn new(shared: Arc<Shared>, vcpu: u32) -> DeliveryPort {
        let answered = vec![0; 4 * shared.ring_entries as usize].into_boxed_slice();
        DeliveryPort {
            shared,
            vcpu,
            session: None,
            requests: Writer::default(),
            completions: Reader::default(),
            in_flight: Vec::new(),
            ready: VecDeque::new(),
            nr_asked: 0,
            answered,
            stats: PortStats::default(),
        }
    }

    /// Returns the number of its vCPU.
    pub fn vcpu(&self) -> u32 {
        self.vcpu
    }

    /// The pages that were asked for and are not there yet.
    pub fn in_flight(&self) -> impl Iterator<Item = u64> + '_ {
        self.in_flight.iter().map(|request| request.page)
    }

    /// How many pages are in flight.
    pub fn nr_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Returns the counts so far.
    pub fn stats(&self) -> PortStats {
        self.stats
    }

    /// Asks for `page`; `flags` are those of the exit, and are only passed on. Never blocks.
    ///
    /// # Errors
    /// [`DeliveryError::ResolverGone`] and [`DeliveryError::NoResolver`]: the page counts as in
    /// flight all the same, see [`resume`](DeliveryPort::resume). [`DeliveryError::RingFull`],
    /// [`DeliveryError::NoSuchPage`], [`DeliveryError::RingCorrupt`], [`DeliveryError::Closed`],
    /// and those of [`poll`](DeliveryPort::poll) about other pages: it does not.
    pub fn request(&mut self, page: u64, flags: u64) -> Result<Requested, DeliveryError> {
        let (vcpu, nr_pages) = (self.vcpu, self.shared.bitmap.nr_pages());
        if self.shared.is_closed() {
            return Err(DeliveryError::Closed { vcpu });
        }
        if page >= nr_pages {
            return Err(DeliveryError::NoSuchPage { vcpu, page, nr_pages });
        }
        if self.in_flight.iter().any(|request| request.page == page) {
            return Ok(Requested::InFlight);
        }
        if !self.shared.bitmap.is_set(page) {
            return Ok(Requested::AlreadyThere);
        }
        let ring_entries = self.shared.ring_entries;
        if self.nr_unanswered() >= u64::from(ring_entries) {
            // A page that was found by its bit has a completion in the ring, now or soon, and the
            // ring has no room for more.
            match self.take_completions() {
                // Reported below, where the page counts as in flight.
                Ok(()) | Err(DeliveryError::ResolverGone { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let is_live = self.session.as_ref().is_some_and(|session| !session.is_over());
        if self.in_flight.len() >= ring_entries as usize || is_live && self.nr_unanswered() >= u64::from(ring_entries) {
            return Err(DeliveryError::RingFull { vcpu, page, ring_entries });
        }
        // A vCPU that had nothing in flight when its resolver died has lost nothing, and goes on
        // with the next one.
        if self.in_flight.is_empty() && self.session.as_ref().is_none_or(|session| session.is_over()) {
            self.change_session()?;
        }
        self.in_flight.push(RequestInFlight { page, flags, ticket: 0, nr_answers: 0, since: Instant::now() });
        match &self.session {
            None => Err(DeliveryError::NoResolver { vcpu }),
            Some(session) if session.is_over() => Err(DeliveryError::ResolverGone { vcpu, page, epoch: session.epoch }),
            Some(_) => {
                let last = self.in_flight.len() - 1;
                match self.ask(last) {
                    Ok(()) => Ok(Requested::InFlight),
                    Err(error) => {
                        self.in_flight.truncate(last);
                        Err(error)
                    }
                }
            }
        }
    }

    /// Returns a page that was asked for and is there now. Never blocks.
    ///
    /// # Errors
    /// [`DeliveryError::PageFailed`], [`DeliveryError::NotCleared`] (the page is no longer in
    /// flight); [`DeliveryError::ResolverGone`], [`DeliveryError::NoResolver`] (if anything is in
    /// flight: see [`resume`](DeliveryPort::resume)); [`DeliveryError::RingCorrupt`],
    /// [`DeliveryError::RingFull`], [`DeliveryError::Closed`].
    pub fn poll(&mut self) -> Result<Option<u64>, DeliveryError> {
        if self.ready.is_empty() {
            self.take_completions()?;
        }
        let page = self.ready.pop_front();
        self.stats.pages += u64::from(page.is_some());
        Ok(page)
    }

    /// Sleeps until `page`, which was asked for, is there. Other pages that come meanwhile are kept
    /// for [`poll`](DeliveryPort::poll).
    ///
    /// # Errors
    /// Those of [`poll`](DeliveryPort::poll), also about other pages; [`DeliveryError::TimedOut`]:
    /// the page is still in flight; [`DeliveryError::NotInFlight`].
    pub fn wait(&mut self, page: u64) -> Result<(), DeliveryError> {
        let began = Instant::now();
        loop {
            if let Some(at) = self.ready.iter().position(|ready| *ready == page) {
                self.ready.remove(at);
                self.stats.pages += 1;
                return Ok(());
            }
            if !self.in_flight.iter().any(|request| request.page == page) {
                return Err(DeliveryError::NotInFlight { vcpu: self.vcpu, page });
            }
            let found = self.look_shortly();
            // In each turn: a resolver that writes invalid completions all the time must not hold
            // up the vCPU either.
            let waited = began.elapsed();
            let Some(left) = self.shared.timeout.checked_sub(waited).filter(|left| !left.is_zero()) else {
                return Err(DeliveryError::TimedOut { vcpu: self.vcpu, page, waited });
            };
            if found { self.take_completions()? } else { self.park(left)? }
        }
    }

    /// Finds pages that are there without a completion, and requests that take too long. For a
    /// caller that only polls, after a [`Waiter`] has timed out.
    ///
    /// # Errors
    /// [`DeliveryError::TimedOut`]: the page is still in flight, and has its time once more.
    pub fn check(&mut self) -> Result<(), DeliveryError> {
        self.take_unannounced();
        let (vcpu, timeout, now) = (self.vcpu, self.shared.timeout, Instant::now());
        for request in &mut self.in_flight {
            let waited = now.saturating_duration_since(request.since);
            if waited >= timeout {
                request.since = now;
                return Err(DeliveryError::TimedOut { vcpu, page: request.page, waited });
            }
        }
        Ok(())
    }

    /// Asks for `page` and waits for it.
    ///
    /// # Errors
    /// Those of [`request`](DeliveryPort::request) and of [`wait`](DeliveryPort::wait).
    pub fn fetch(&mut self, page: u64, flags: u64) -> Result<(), DeliveryError> {
        match self.request(page, flags)? {
            Requested::AlreadyThere => Ok(()),
            Requested::InFlight => self.wait(page),
        }
    }

    /// Waits for a resolver that lives and asks it for all that is in flight and not there yet.
    ///
    /// # Errors
    /// [`DeliveryError::NoResolver`]: none came in time. [`DeliveryError::Closed`]; those of the
    /// ring.
    pub fn resume(&mut self, limit: Duration) -> Result<(), DeliveryError> {
        let vcpu = self.vcpu;
        let session = self.shared.wait_for_session(limit);
        if self.shared.is_closed() {
            return Err(DeliveryError::Closed { vcpu });
        }
        self.adopt(session.ok_or(DeliveryError::NoResolver { vcpu })?)
    }

    /// As [`resume`](DeliveryPort::resume), without waiting: whether there is a resolver that
    /// lives.
    ///
    /// # Errors
    /// [`DeliveryError::Closed`]; those of the ring.
    pub fn try_resume(&mut self) -> Result<bool, DeliveryError> {
        if self.shared.is_closed() {
            return Err(DeliveryError::Closed { vcpu: self.vcpu });
        }
        self.change_session()
    }

    /// Requests of this session whose answers were not taken, whether their pages are there or not.
    /// A resolver that answers twice makes the number too low, and then finds the ring full.
    fn nr_unanswered(&self) -> u64 {
        self.requests.nr_pushed().saturating_sub(self.completions.nr_popped())
    }

    /// Goes over to the session that lives, if any.
    fn change_session(&mut self) -> Result<bool, DeliveryError> {
        match self.shared.live_session() {
            Some(session) => self.adopt(session).map(|()| true),
            None => Ok(false),
        }
    }

    /// Goes over to `session`. A page that is there by now is not asked for again: its bit was
    /// cleared once already.
    fn adopt(&mut self, session: Arc<Session>) -> Result<(), DeliveryError> {
        if self.session.as_ref().is_some_and(|own| own.epoch == session.epoch) {
            return Ok(());
        }
        self.session = Some(session);
        (self.requests, self.completions) = (Writer::default(), Reader::default());
        self.take_unannounced();
        for index in 0..self.in_flight.len() {
            self.in_flight[index].nr_answers = 0;
            self.ask(index)?;
        }
        Ok(())
    }

    /// Puts a request into the ring, with a new ticket, and wakes the resolver if it sleeps.
    fn ask(&mut self, index: usize) -> Result<(), DeliveryError> {
        let vcpu = self.vcpu;
        let Some(session) = &self.session else { return Err(DeliveryError::NoResolver { vcpu }) };
        self.nr_asked += 1;
        let RequestInFlight { page, flags, .. } = self.in_flight[index];
        let ticket = ticket(session.epoch, self.nr_asked);
        self.requests.push(session.rings.requests(vcpu), RingEntry { ticket, page, word: flags }).map_err(|error| {
            match error {
                NotPushed::Full => DeliveryError::RingFull { vcpu, page, ring_entries: self.shared.ring_entries },
                NotPushed::BadIndex(bad) => DeliveryError::RingCorrupt { vcpu, bad },
            }
        })?;
        self.in_flight[index].ticket = ticket;
        self.stats.asked += 1;
        self.stats.doorbells += u64::from(session.ring_doorbell(vcpu));
        Ok(())
    }

    /// Whether there is something to take, now or within [`LOOKS`] looks.
    fn look_shortly(&self) -> bool {
        let Some(session) = &self.session else { return true };
        let ring = session.rings.completions(self.vcpu);
        for _ in 0..LOOKS {
            if self.completions.is_nonempty(ring) || session.is_over() || self.shared.is_closed() {
                return true;
            }
            hint::spin_loop();
        }
        false
    }

    /// Sleeps, at most `limit` and at most a nap, unless there is something to take.
    fn park(&mut self, limit: Duration) -> Result<(), DeliveryError> {
        let Some(session) = &self.session else { return Ok(()) };
        let number = self.vcpu % self.shared.wakers.len() as u32;
        session.rings.announce_sleep(Sleeper::Waiter(number));
        let ring = session.rings.completions(self.vcpu);
        if self.completions.is_nonempty(ring) || session.is_over() || self.shared.is_closed() {
            session.rings.withdraw_sleep(Sleeper::Waiter(number));
            return Ok(());
        }
        self.stats.parks += 1;
        let is_woken = sleep(&self.shared, number, Some(session), limit)?;
        session.rings.withdraw_sleep(Sleeper::Waiter(number));
        if !is_woken {
            self.take_unannounced();
        }
        Ok(())
    }

    /// Moves to `ready` the pages that are there without a completion: filled for another vCPU, or
    /// by a resolver that died (or failed) between the bit and the completion.
    fn take_unannounced(&mut self) {
        let before = self.ready.len();
        let (bitmap, ready) = (&self.shared.bitmap, &mut self.ready);
        self.in_flight.retain(|request| {
            let is_there = !bitmap.is_set(request.page);
            if is_there {
                ready.push_back(request.page);
            }
            !is_there
        });
        self.stats.unannounced += (self.ready.len() - before) as u64;
    }

    /// Takes the pending completions.
    fn take_completions(&mut self) -> Result<(), DeliveryError> {
        let vcpu = self.vcpu;
        // Read before the ring: completions from before the end are taken.
        let is_over = self.session.as_ref().is_none_or(|session| session.is_over());
        // At most as many as a ring holds: a resolver may push as fast as they are taken.
        for _ in 0..self.shared.ring_entries {
            let Some(session) = &self.session else { break };
            let popped = self.completions.pop(session.rings.completions(vcpu));
            match popped.map_err(|bad| DeliveryError::RingCorrupt { vcpu, bad }) {
                Ok(Some(completion)) => self.take_completion(completion)?,
                Ok(None) => break,
                // An invalid index of a dead resolver does not matter: the bits show what it has
                // filled.
                Err(_) if is_over => break,
                Err(error) => return Err(error),
            }
        }
        if is_over {
            self.take_unannounced();
        }
        if !self.ready.is_empty() {
            return Ok(());
        }
        if self.shared.is_closed() {
            return Err(DeliveryError::Closed { vcpu });
        }
        match (&self.session, self.in_flight.first()) {
            (_, None) => Ok(()),
            (None, Some(_)) => Err(DeliveryError::NoResolver { vcpu }),
            (Some(session), Some(request)) if is_over => {
                Err(DeliveryError::ResolverGone { vcpu, page: request.page, epoch: session.epoch })
            }
            _ => Ok(()),
        }
    }

    fn take_completion(&mut self, completion: RingEntry) -> Result<(), DeliveryError> {
        let (vcpu, page, epoch) =
            (self.vcpu, completion.page, self.session.as_ref().map_or(0, |session| session.epoch));
        let found =
            self.in_flight.iter().position(|request| request.ticket == completion.ticket && request.page == page);
        // A request that no resolver was asked for has ticket 0, as an invalid completion may have.
        let found = found.filter(|_| completion.ticket != 0);
        let Some(index) = found else {
            self.count_stray(completion, epoch);
            return Ok(());
        };
        if completion.word & u64::from(u32::MAX) == FAILED {
            self.end_request(index);
            return Err(DeliveryError::PageFailed { vcpu, page, code: (completion.word >> 32) as u32 });
        }
        // Acquire, inside `is_set`: the page is read next.
        if !self.shared.bitmap.is_set(page) {
            self.end_request(index);
            self.ready.push_back(page);
            return Ok(());
        }
        self.stats.not_cleared += 1;
        let request = &mut self.in_flight[index];
        request.nr_answers += 1;
        let nr_answers = request.nr_answers;
        if nr_answers >= MAX_ANSWERS {
            self.end_request(index);
            return Err(DeliveryError::NotCleared { vcpu, page, nr_answers });
        }
        if self.session.as_ref().is_some_and(|session| session.is_over()) { Ok(()) } else { self.ask(index) }
    }

    /// Takes a request out of those in flight and remembers that it was answered.
    fn end_request(&mut self, index: usize) {
        let request = self.in_flight.remove(index);
        let place = number(request.ticket) as usize % self.answered.len();
        self.answered[place] = request.ticket;
    }

    fn count_stray(&mut self, completion: RingEntry, epoch: u64) {
        let ticket_number = number(completion.ticket);
        let is_issued = (1..=self.nr_asked).contains(&ticket_number);
        let is_in_flight = self.in_flight.iter().any(|request| request.ticket == completion.ticket);
        if !is_issued || is_in_flight {
            self.stats.unasked += 1;
        } else if self.answered[ticket_number as usize % self.answered.len()] == completion.ticket
            && completion.ticket == ticket(epoch, ticket_number)
        {
            self.stats.double += 1;
        } else {
            self.stats.late += 1;
        }
    }
}

/// A ticket of ask number `number`.
fn ticket(epoch: u64, number: u64) -> u64 {
    epoch << TICKET_BITS | number & ((1 << TICKET_BITS) - 1)
}

/// The number of a ticket.
fn number(ticket: u64) -> u64 {
    ticket & ((1 << TICKET_BITS) - 1)
}

/// Sleeps on a waiter's eventfd until it is signalled or the session ends, at most `limit` and at
/// most [`NAP`]. Returns whether one of the two happened.
fn sleep(shared: &Shared, number: u32, session: Option<&Session>, limit: Duration) -> Result<bool, DeliveryError> {
    let waker = &shared.wakers[number as usize];
    let waited = match session {
        Some(session) => shared::wait_readable([waker.as_fd(), session.ended.as_fd()], limit.min(NAP)),
        None => shared::wait_readable([waker.as_fd()], limit.min(NAP)).map(|[is_signalled]| [is_signalled, false]),
    };
    match waited {
        Ok([is_signalled, has_ended]) => {
            if is_signalled {
                waker.drain();
            }
            Ok(is_signalled || has_ended)
        }
        Err(source) => Err(DeliveryError::System { call: "ppoll", number, source }),
    }
}

/// How a sleep ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Parked {
    /// Another side woke it, the resolver is gone, or the delivery is closed.
    Woken,
    /// The time or a nap (100 ms) is over. Look for completions all the same.
    TimedOut,
}

/// Where a thread sleeps that runs several vCPUs: vCPU v's waiter is v modulo the number of
/// waiters.
///
/// The thread polls its ports. If none has a page, it [announces](Waiter::announce) its sleep,
/// polls all of them once more, and then [parks](Waiter::park), or [withdraws](Waiter::withdraw)
/// the announcement.
#[derive(Debug)]
pub struct Waiter {
    shared: Arc<Shared>,
    number: u32,
    /// The last session, if it was not over when the sleep was announced.
    session: Option<Arc<Session>>,
}

impl Waiter {
    pub(super) fn new(shared: Arc<Shared>, number: u32) -> Waiter {
        Waiter { shared, number, session: None }
    }

    /// Announces that the thread is about to sleep.
    pub fn announce(&mut self) {
        if self.session.as_ref().is_some_and(|session| session.is_over()) {
            // The polls that follow find its end, so it has to wake no thread any more.
            self.session = None;
        }
        if self.session.as_ref().map_or(0, |session| session.epoch) != self.shared.epoch() {
            self.session = self.shared.live_session();
        }
        if let Some(session) = &self.session {
            session.rings.announce_sleep(Sleeper::Waiter(self.number));
        }
    }

    /// Withdraws the announcement.
    pub fn withdraw(&self) {
        if let Some(session) = &self.session {
            session.rings.withdraw_sleep(Sleeper::Waiter(self.number));
        }
    }

    /// Sleeps until it is woken, at most `limit` and at most 100 ms, and withdraws the
    /// announcement.
    ///
    /// # Errors
    /// [`DeliveryError::System`].
    pub fn park(&self, limit: Duration) -> Result<Parked, DeliveryError> {
        let is_woken = match self.shared.is_closed() {
            true => Ok(true),
            false => sleep(&self.shared, self.number, self.session.as_deref(), limit),
        };
        self.withdraw();
        is_woken.map(|is_woken| if is_woken { Parked::Woken } else { Parked::TimedOut })
    }
}
