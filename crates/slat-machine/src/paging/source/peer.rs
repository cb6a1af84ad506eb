//! Pages from another process: the client. `protocol.rs` has the messages.
//!
//! One system call sends the collected requests, and one receives all answers that are there. A
//! page is shown in the buffer that it was received into, or copied once from there. The peer is
//! not trusted. Each answer must be to a request that was sent, and have the size of a page. Each
//! request must be answered within a timeout, so a peer cannot hold one page back by answering
//! others.
//!
//! A request is *overdue* when its timeout is over and its answer is not on its way: nothing is
//! left to receive, or a received answer is to a request that was sent after the timeout was over
//! (a stream has an order). The reason is that the user may have been away while answers waited in
//! the socket. A peer cannot send to a user that does not read. So all times begin anew when the
//! user comes back to received bytes after a whole timeout.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

use super::in_flight::check_range;
use super::protocol::{
    GREETING, HEADER_BYTES, Header, PageRequest, PeerAddress, REPLIES_AT_ONCE, REPLY_BYTES, REQUEST_BYTES, Stream,
};
use super::wait::wait;
use super::{MAX_IN_FLIGHT, NextArrival, PAGE_SIZE, PageBytes, PageSource, SourceError, Wait};
use crate::linux::clock::timestamp_ns;

/// A connection to a server of pages.
#[derive(Debug)]
pub(super) struct PeerSource {
    address: PeerAddress,
    stream: Stream,
    pub(super) time_out_ns: u64,
    /// Requests without an answer, in the order of the requests.
    in_flight: VecDeque<Asked>,
    next_sequence: u64,
    /// Requests that are not sent yet.
    outgoing: Vec<u8>,
    /// The received bytes: `start..end` is not taken yet, and less than an answer unless `here` is
    /// set.
    incoming: Box<[u8]>,
    start: usize,
    end: usize,
    /// The answer at `start`, which is whole.
    here: Option<Header>,
    /// When the user last looked at the socket.
    looked_ns: u64,
    has_ended: bool,
}

#[derive(Clone, Copy, Debug)]
struct Asked {
    request: PageRequest,
    /// When it was sent, or could have been if the peer had read the requests before it. `u64::MAX`
    /// before that.
    sent_ns: u64,
}

impl PeerSource {
    /// Connects. The connection and the greeting may take `time_out`, and each answer later too.
    pub(super) fn connect(address: PeerAddress, time_out: Duration) -> Result<PeerSource, SourceError> {
        if !address.is_on_this_machine() {
            return Err(SourceError::NotLoopback { address });
        }
        let connect = || {
            let mut stream = Stream::connect(&address, time_out)?;
            let greeting = receive_greeting(&mut stream, time_out)?;
            Ok((stream, greeting))
        };
        let (stream, greeting) = match connect() {
            Ok(connected) => connected,
            Err(cause) => return Err(SourceError::Connect { address, cause }),
        };
        if greeting != GREETING {
            return Err(SourceError::NotASource { address });
        }
        Ok(PeerSource {
            address,
            stream,
            time_out_ns: nanoseconds(time_out),
            in_flight: VecDeque::with_capacity(MAX_IN_FLIGHT),
            next_sequence: 0,
            outgoing: Vec::with_capacity(MAX_IN_FLIGHT * REQUEST_BYTES),
            incoming: vec![0; REPLIES_AT_ONCE * REPLY_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
            here: None,
            looked_ns: 0,
            has_ended: false,
        })
    }

    /// Returns one answer, if one comes in time.
    fn next(&mut self, how_long: Wait) -> Result<Option<u64>, SourceError> {
        loop {
            // While pages are here already, requests are collected: the user takes those pages and
            // requests others.
            if self.outgoing.len() >= REPLIES_AT_ONCE * REQUEST_BYTES {
                self.send()?;
            }
            if let Some(header) = self.parse()? {
                self.here = Some(header);
                return Ok(Some(header.request.page));
            }
            self.send()?;
            let now_ns = timestamp_ns();
            let away_ns = now_ns.saturating_sub(self.looked_ns);
            self.looked_ns = now_ns;
            if self.receive()? {
                if away_ns >= self.time_out_ns {
                    self.begin_anew(now_ns);
                }
                continue;
            }
            if now_ns >= self.overdue_at_ns() {
                return Err(self.silent(now_ns));
            }
            let until_ns = how_long.until_ns();
            if now_ns >= until_ns {
                return Ok(None);
            }
            let events = if self.outgoing.is_empty() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
            let mut entries = [PollFd::from_borrowed_fd(self.stream.as_fd(), events)];
            wait(&mut entries, until_ns.min(self.overdue_at_ns())).map_err(|cause| SourceError::Wait { cause })?;
            // A user that waits here is not away.
            self.looked_ns = timestamp_ns();
        }
    }

    /// The peer may not have been able to send: all requests count as sent now.
    fn begin_anew(&mut self, now_ns: u64) {
        for asked in self.in_flight.iter_mut().take_while(|asked| asked.sent_ns != u64::MAX) {
            asked.sent_ns = now_ns;
        }
    }

    /// Sends as much as there is room for.
    fn send(&mut self) -> Result<(), SourceError> {
        if !self.outgoing.is_empty() {
            let now_ns = timestamp_ns();
            for asked in self.in_flight.iter_mut().rev().take_while(|asked| asked.sent_ns == u64::MAX) {
                asked.sent_ns = now_ns;
            }
        }
        while !self.outgoing.is_empty() {
            match self.stream.send(&self.outgoing).map_err(|cause| self.broken(cause))? {
                Some(nr_bytes) => drop(self.outgoing.drain(..nr_bytes)),
                None => break,
            }
        }
        Ok(())
    }

    /// Receives what is there. Returns whether there was something.
    fn receive(&mut self) -> Result<bool, SourceError> {
        self.incoming.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        match self.stream.receive(&mut self.incoming[self.end..]).map_err(|cause| self.broken(cause))? {
            Some(0) => Err(self.closed()),
            Some(nr_bytes) => {
                self.end += nr_bytes;
                Ok(true)
            }
            None => Ok(false),
        }
    }

    /// The answer at the front, when it is complete. Its request is answered then.
    fn parse(&mut self) -> Result<Option<Header>, SourceError> {
        let Some(header) = Header::from_bytes(&self.incoming[self.start..self.end]) else { return Ok(None) };
        let Header { request: PageRequest { sequence, page }, status, size_bytes } = header;
        let is_answer = |asked: &Asked| asked.request == header.request && asked.sent_ns != u64::MAX;
        let Some(position) = self.in_flight.iter().position(is_answer) else {
            let address = self.address.clone();
            // A sequence number that is in flight for another page is not an answer to a request.
            let is_answered =
                sequence < self.next_sequence && self.in_flight.iter().all(|asked| asked.request.sequence != sequence);
            return Err(match is_answered {
                true => SourceError::Duplicate { address, page },
                false => SourceError::NotRequested { address, page },
            });
        };
        let expected_bytes = if status == Header::PAGE { PAGE_SIZE } else { 0 };
        if size_bytes as usize != expected_bytes {
            return Err(SourceError::WrongSize { address: self.address.clone(), page, size_bytes });
        }
        if self.end - self.start < HEADER_BYTES + expected_bytes {
            return Ok(None);
        }
        let asked_ns = self.in_flight[position].sent_ns;
        if position > 0 && asked_ns >= self.overdue_at_ns() {
            return Err(self.silent(asked_ns));
        }
        self.in_flight.remove(position);
        Ok(Some(header))
    }

    /// The offset of the page that is taken.
    fn take_range(&mut self) -> Result<usize, SourceError> {
        let header = self.here.take().ok_or(SourceError::NothingArrived)?;
        let at = self.start + HEADER_BYTES;
        self.start = at + header.size_bytes as usize;
        match header.status {
            Header::PAGE => Ok(at),
            _ => Err(SourceError::Refused { address: self.address.clone(), page: header.request.page }),
        }
    }

    /// When the oldest request was sent; the others were sent later, or with it.
    fn oldest_ns(&self) -> u64 {
        self.in_flight.front().map_or(u64::MAX, |asked| asked.sent_ns)
    }

    /// When the oldest request has to be answered at the latest.
    pub(super) fn overdue_at_ns(&self) -> u64 {
        self.oldest_ns().saturating_add(self.time_out_ns)
    }

    fn oldest_page(&self) -> u64 {
        self.in_flight.front().map_or(0, |asked| asked.request.page)
    }

    fn silent(&self, now_ns: u64) -> SourceError {
        SourceError::Silent {
            address: self.address.clone(),
            page: self.oldest_page(),
            nr_pages: self.in_flight.len(),
            waited_ms: now_ns.saturating_sub(self.oldest_ns()) / 1_000_000,
        }
    }

    fn closed(&self) -> SourceError {
        SourceError::Closed { address: self.address.clone(), page: self.oldest_page(), nr_pages: self.in_flight.len() }
    }

    fn broken(&self, cause: io::Error) -> SourceError {
        match cause.kind() {
            // A peer that closes with requests unread resets the connection: the user sees no
            // difference.
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => self.closed(),
            _ => SourceError::Broken { address: self.address.clone(), nr_pages: self.in_flight.len(), cause },
        }
    }
}

impl PageSource for PeerSource {
    fn request(&mut self, page: u64) -> Result<(), SourceError> {
        check_range(page)?;
        if self.has_ended {
            return Err(SourceError::Ended { address: self.address.clone() });
        }
        let is_here = self.here.is_some_and(|header| header.request.page == page);
        if is_here || self.in_flight.iter().any(|asked| asked.request.page == page) {
            return Err(SourceError::AlreadyRequested { page });
        }
        if self.nr_in_flight() >= MAX_IN_FLIGHT {
            return Err(SourceError::TooManyInFlight { page });
        }
        let request = PageRequest { sequence: self.next_sequence, page };
        self.next_sequence += 1;
        self.in_flight.push_back(Asked { request, sent_ns: u64::MAX });
        self.outgoing.extend_from_slice(&request.to_bytes());
        Ok(())
    }

    fn arrived(&mut self, how_long: Wait) -> Result<Option<u64>, SourceError> {
        if self.has_ended {
            return Err(SourceError::Ended { address: self.address.clone() });
        }
        if let Some(header) = self.here {
            // A user that does not take the page is busy; the requests must not wait for it.
            return match self.send() {
                Ok(()) => Ok(Some(header.request.page)),
                Err(error) => Err(self.end_with(error)),
            };
        }
        if self.in_flight.is_empty() {
            return Ok(None);
        }
        self.next(how_long).map_err(|error| self.end_with(error))
    }

    fn take(&mut self) -> Result<&PageBytes, SourceError> {
        let at = self.take_range()?;
        self.incoming[at..].first_chunk().ok_or(SourceError::NothingArrived)
    }

    fn take_into(&mut self, into: &mut PageBytes) -> Result<(), SourceError> {
        into.copy_from_slice(self.take()?);
        Ok(())
    }

    fn nr_in_flight(&self) -> usize {
        self.in_flight.len() + usize::from(self.here.is_some())
    }

    fn next_arrival(&self) -> NextArrival<'_> {
        if self.nr_in_flight() == 0 {
            return NextArrival::Nothing;
        }
        // Received bytes that were not read yet make no descriptor readable, and an unsent request
        // has no answer.
        let has_answer = self.end - self.start >= HEADER_BYTES;
        match self.here.is_some() || has_answer || !self.outgoing.is_empty() {
            true => NextArrival::At(0),
            false => NextArrival::Readable { descriptor: self.stream.as_fd(), until_ns: self.overdue_at_ns() },
        }
    }
}

impl PeerSource {
    /// Ends the source: no answer of the peer is used any more.
    fn end_with(&mut self, error: SourceError) -> SourceError {
        self.has_ended = true;
        self.in_flight.clear();
        self.outgoing.clear();
        self.here = None;
        error
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Receives the first message of the server.
fn receive_greeting(stream: &mut Stream, time_out: Duration) -> io::Result<[u8; GREETING.len()]> {
    let until_ns = timestamp_ns().saturating_add(nanoseconds(time_out));
    let mut greeting = [0; GREETING.len()];
    let mut nr_received = 0;
    while nr_received < greeting.len() {
        match stream.receive(&mut greeting[nr_received..])? {
            Some(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Some(nr_bytes) => nr_received += nr_bytes,
            None if timestamp_ns() >= until_ns => return Err(io::ErrorKind::TimedOut.into()),
            None => drop(wait(&mut [PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::IN)], until_ns)?),
        }
    }
    Ok(greeting)
}
