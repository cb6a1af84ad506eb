//! The vCPU's end of a delivery.
//!
//! # Protocol
//! - A port belongs to one thread at a time. Its indices, and what is in flight, are its own
//!   memory.
//! - A page is *there* when its bit is clear, never because somebody says so. A completion is only
//!   the news that it is time to look. So a wrong completion cannot show the guest a page that is
//!   not filled.
//! - Each ask has a ticket: the epoch (16 bits) and a number that only grows. A completion counts
//!   if its ticket and its page are those of a request in flight. All else is counted and
//!   forgotten: *double* if it was answered before, *late* if it was overtaken (asked again, of
//!   another epoch), *unasked* if no ask had it.
//! - A request in flight ends in one of four ways: its page is there; the resolver says that it
//!   cannot fill it; the resolver said too often that it is there and it was not; the port is
//!   dropped. A dead resolver and a time-out end none.
//! - To sleep: announce it, look at the ring and at the end of the session, and then wait for the
//!   eventfd. The pair with the resolver is in [`Rings`](super::ring::Rings), that with the
//!   session's end in [`session`](super::session).

use std::collections::VecDeque;
use std::hint;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::error::DeliveryError;
use super::ring::{Entry, NotPushed, Reader, Sleeper, Writer};
use super::session::{NAP, Session, Shared};
use super::shared;

/// Asks for one page that the resolver answers without clearing the bit.
pub const MAX_ANSWERS: u32 = 4;

/// Looks at the ring before a vCPU sleeps: about as long as an eventfd takes to wake somebody.
const LOOKS: u32 = 20;

/// Bits of a ticket that number the asks.
const TICKET_BITS: u32 = 48;

/// The status of a completion: the page is there.
pub(super) const DONE: u64 = 0;
/// The low half of the status of a completion: the page cannot be filled; the high half says why.
pub(super) const FAILED: u64 = 1;

/// What became of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Requested {
    /// The resolver was asked, now or before.
    InFlight,
    /// The page is there: there was nothing to ask.
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
    /// Completions of what nobody asked for.
    pub unasked: u64,
    /// Completions of pages whose bit was still set.
    pub not_cleared: u64,
    /// Pages that were there without a completion.
    pub unannounced: u64,
}

#[derive(Clone, Copy, Debug)]
struct InFlight {
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
pub struct Port {
    shared: Arc<Shared>,
    vcpu: u32,
    session: Option<Arc<Session>>,
    requests: Writer,
    completions: Reader,
    in_flight: Vec<InFlight>,
    /// Pages that are there and were not reported yet.
    ready: VecDeque<u64>,
    /// The number of the last ask; numbers begin at 1.
    nr_asked: u64,
    /// Tickets that were answered lately, by their number.
    answered: Box<[u64]>,
    stats: PortStats,
}

impl Port {
    pub(super) fn new(shared: Arc<Shared>, vcpu: u32) -> Port {
        let answered = vec![0; 4 * shared.ring_entries as usize].into_boxed_slice();
        Port {
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

    /// Which vCPU's it is.
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

    /// What was counted so far.
    pub fn stats(&self) -> PortStats {
        self.stats
    }

    /// Asks for `page`; `flags` are those of the exit, and only handed on. Never blocks.
    ///
    /// # Errors
    /// [`DeliveryError::ResolverGone`] and [`DeliveryError::NoResolver`]: the page counts as in
    /// flight all the same, see [`resume`](Port::resume). [`DeliveryError::RingFull`],
    /// [`DeliveryError::NoSuchPage`], [`DeliveryError::RingCorrupt`], [`DeliveryError::Closed`],
    /// and those of [`poll`](Port::poll) about other pages: it does not.
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
            // What was found by its bit has left its answer in the ring, or is going to, and the
            // rings hold no more.
            match self.take_completions() {
                // Said below, where the page counts as in flight.
                Ok(()) | Err(DeliveryError::ResolverGone { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let is_live = self.session.as_ref().is_some_and(|session| !session.is_over());
        if self.in_flight.len() >= ring_entries as usize || is_live && self.nr_unanswered() >= u64::from(ring_entries) {
            return Err(DeliveryError::RingFull { vcpu, page, ring_entries });
        }
        // A vCPU that had nothing in flight when its resolver died has lost nothing: it just goes
        // on with the next one.
        if self.in_flight.is_empty() && self.session.as_ref().is_none_or(|session| session.is_over()) {
            self.change_session()?;
        }
        self.in_flight.push(InFlight { page, flags, ticket: 0, nr_answers: 0, since: Instant::now() });
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

    /// The next page that is there now, of those that were asked for. Never blocks.
    ///
    /// # Errors
    /// [`DeliveryError::PageFailed`], [`DeliveryError::NotCleared`] (the page is no longer in
    /// flight); [`DeliveryError::ResolverGone`], [`DeliveryError::NoResolver`] (if anything is in
    /// flight: see [`resume`](Port::resume)); [`DeliveryError::RingCorrupt`],
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
    /// for [`poll`](Port::poll).
    ///
    /// # Errors
    /// Those of [`poll`](Port::poll), also about other pages; [`DeliveryError::TimedOut`]: the page
    /// is still in flight; [`DeliveryError::NotInFlight`].
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
            let has_news = self.look_shortly();
            // In each turn: a resolver that sends nonsense all the time must not hold us either.
            let waited = began.elapsed();
            let Some(left) = self.shared.timeout.checked_sub(waited).filter(|left| !left.is_zero()) else {
                return Err(DeliveryError::TimedOut { vcpu: self.vcpu, page, waited });
            };
            if has_news { self.take_completions()? } else { self.park(left)? }
        }
    }

    /// For who only polls: finds pages that are there although nobody has said so, and requests
    /// that take too long. To be called when a [`Waiter`] slept in vain.
    ///
    /// # Errors
    /// [`DeliveryError::TimedOut`]: the page is still in flight, and has its time once more.
    pub fn check(&mut self) -> Result<(), DeliveryError> {
        self.take_what_is_there();
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
    /// Those of [`request`](Port::request) and of [`wait`](Port::wait).
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

    /// As [`resume`](Port::resume), without waiting: whether there is a resolver that lives.
    ///
    /// # Errors
    /// [`DeliveryError::Closed`]; those of the ring.
    pub fn try_resume(&mut self) -> Result<bool, DeliveryError> {
        if self.shared.is_closed() {
            return Err(DeliveryError::Closed { vcpu: self.vcpu });
        }
        self.change_session()
    }

    /// Requests of this session whose answers were not taken, be their pages there or not. A
    /// resolver that answers twice makes it too low, and pays for that itself.
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

    /// Goes over to `session`. What is there by now is not asked for again: the bit was cleared
    /// once, by whoever filled it.
    fn adopt(&mut self, session: Arc<Session>) -> Result<(), DeliveryError> {
        if self.session.as_ref().is_some_and(|own| own.epoch == session.epoch) {
            return Ok(());
        }
        self.session = Some(session);
        (self.requests, self.completions) = (Writer::default(), Reader::default());
        self.take_what_is_there();
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
        let InFlight { page, flags, .. } = self.in_flight[index];
        let ticket = ticket(session.epoch, self.nr_asked);
        self.requests.push(session.rings.requests(vcpu), Entry { ticket, page, word: flags }).map_err(|error| {
            match error {
                NotPushed::Full => DeliveryError::RingFull { vcpu, page, ring_entries: self.shared.ring_entries },
                NotPushed::BadIndex(bad) => DeliveryError::corrupt(vcpu, bad),
            }
        })?;
        self.in_flight[index].ticket = ticket;
        self.stats.asked += 1;
        self.stats.doorbells += u64::from(session.ring_doorbell(vcpu));
        Ok(())
    }

    /// Whether there is something to take, at once or within a few looks.
    fn look_shortly(&self) -> bool {
        let Some(session) = &self.session else { return true };
        let ring = session.rings.completions(self.vcpu);
        for _ in 0..LOOKS {
            if self.completions.has_news(ring) || session.is_over() || self.shared.is_closed() {
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
        if self.completions.has_news(ring) || session.is_over() || self.shared.is_closed() {
            session.rings.withdraw_sleep(Sleeper::Waiter(number));
            return Ok(());
        }
        self.stats.parks += 1;
        let is_woken = sleep(&self.shared, number, Some(session), limit)?;
        session.rings.withdraw_sleep(Sleeper::Waiter(number));
        if !is_woken {
            self.take_what_is_there();
        }
        Ok(())
    }

    /// Moves to `ready` what is there although nobody has said so: filled for somebody else, or by
    /// a resolver that died (or forgot) between the bit and the completion.
    fn take_what_is_there(&mut self) {
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

    /// Takes the completions that there are.
    fn take_completions(&mut self) -> Result<(), DeliveryError> {
        let vcpu = self.vcpu;
        // Before the ring: what was answered before the end is taken.
        let is_over = self.session.as_ref().is_none_or(|session| session.is_over());
        // As many as a ring holds: a resolver may push as fast as they are taken.
        for _ in 0..self.shared.ring_entries {
            let Some(session) = &self.session else { break };
            let popped = self.completions.pop(session.rings.completions(vcpu));
            match popped.map_err(|bad| DeliveryError::corrupt(vcpu, bad)) {
                Ok(Some(completion)) => self.take_completion(completion)?,
                Ok(None) => break,
                // A dead resolver's nonsense is of no interest: what it has really done, the bits
                // say.
                Err(_) if is_over => break,
                Err(error) => return Err(error),
            }
        }
        if is_over {
            self.take_what_is_there();
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

    fn take_completion(&mut self, completion: Entry) -> Result<(), DeliveryError> {
        let (vcpu, page, epoch) =
            (self.vcpu, completion.page, self.session.as_ref().map_or(0, |session| session.epoch));
        let found =
            self.in_flight.iter().position(|request| request.ticket == completion.ticket && request.page == page);
        // What was asked of nobody has ticket 0, as has a completion of nonsense.
        let found = found.filter(|_| completion.ticket != 0);
        let Some(index) = found else {
            self.count_stray(completion, epoch);
            return Ok(());
        };
        if completion.word & u64::from(u32::MAX) == FAILED {
            self.close_request(index);
            return Err(DeliveryError::PageFailed { vcpu, page, code: (completion.word >> 32) as u32 });
        }
        // Acquire, in there: what follows reads the page.
        if !self.shared.bitmap.is_set(page) {
            self.close_request(index);
            self.ready.push_back(page);
            return Ok(());
        }
        self.stats.not_cleared += 1;
        let request = &mut self.in_flight[index];
        request.nr_answers += 1;
        let nr_answers = request.nr_answers;
        if nr_answers >= MAX_ANSWERS {
            self.close_request(index);
            return Err(DeliveryError::NotCleared { vcpu, page, nr_answers });
        }
        if self.session.as_ref().is_some_and(|session| session.is_over()) { Ok(()) } else { self.ask(index) }
    }

    /// Takes a request out of those in flight and remembers that it was answered.
    fn close_request(&mut self, index: usize) {
        let request = self.in_flight.remove(index);
        let place = number(request.ticket) as usize % self.answered.len();
        self.answered[place] = request.ticket;
    }

    fn count_stray(&mut self, completion: Entry, epoch: u64) {
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
/// most a nap; whether one of the two happened.
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
    /// Somebody woke it, or the resolver is gone, or the delivery closed.
    Woken,
    /// The time was over, or a nap (100 ms): look whether there is something all the same.
    TimedOut,
}

/// Where a thread sleeps that runs several vCPUs: vCPU v's waiter is v modulo the number of
/// waiters.
///
/// The thread polls its ports; if that gave nothing, it [announces](Waiter::announce) its sleep,
/// polls all of them once more, and then [parks](Waiter::park), or [withdraws](Waiter::withdraw)
/// what it announced.
#[derive(Debug)]
pub struct Waiter {
    shared: Arc<Shared>,
    number: u32,
    /// The last one, if it lived when the sleep was announced.
    session: Option<Arc<Session>>,
}

impl Waiter {
    pub(super) fn new(shared: Arc<Shared>, number: u32) -> Waiter {
        Waiter { shared, number, session: None }
    }

    /// Says that the thread is about to sleep.
    pub fn announce(&mut self) {
        if self.session.as_ref().is_some_and(|session| session.is_over()) {
            // The polls that follow see its end: that wakes nobody again.
            self.session = None;
        }
        if self.session.as_ref().map_or(0, |session| session.epoch) != self.shared.epoch() {
            self.session = self.shared.live_session();
        }
        if let Some(session) = &self.session {
            session.rings.announce_sleep(Sleeper::Waiter(self.number));
        }
    }

    /// Says that it is awake.
    pub fn withdraw(&self) {
        if let Some(session) = &self.session {
            session.rings.withdraw_sleep(Sleeper::Waiter(self.number));
        }
    }

    /// Sleeps until it is woken, at most `limit` and at most 100 ms, and withdraws what was
    /// announced.
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
