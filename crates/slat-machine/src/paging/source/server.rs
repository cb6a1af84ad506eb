//! Pages for other processes: the server. `protocol.rs` has the messages.
//!
//! One thread accepts, and each connection has one, with a source of its own. It never waits in a
//! read or a write. It takes requests while pages of earlier ones are on their way (they may have a
//! latency), sends answers as there is room for them, and otherwise waits for all of this and for
//! the end of the server. A user that does not read its answers, requests a missing page, or
//! disconnects, concerns only its own connection.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};

use rustix::event::{PollFd, PollFlags};

use super::protocol::{
    GREETING, HEADER_BYTES, Header, Listener, PageRequest, PeerAddress, REPLIES_AT_ONCE, REPLY_BYTES, REQUEST_BYTES,
    Stream,
};
use super::wait::wait;
use super::{MAX_IN_FLIGHT, NextArrival, PAGE_SIZE, PageSource, SourceError, SourceSpec, Wait};
use crate::linux::clock::timestamp_ns;
use crate::linux::descriptors::EventFd;

/// Connections at once. More are closed at once.
const MAX_CONNECTIONS: usize = 1024;

/// Serves a source of pages on threads of this process, until it is dropped.
#[derive(Debug)]
pub struct PeerServer {
    address: PeerAddress,
    ending: Arc<Ending>,
    acceptor: Option<JoinHandle<()>>,
}

/// Ends the threads: the flag while they are busy, the event while they wait. The event is never
/// emptied.
#[derive(Debug)]
struct Ending {
    has_begun: AtomicBool,
    event: EventFd,
}

impl Ending {
    fn has_begun(&self) -> bool {
        // Relaxed: nothing else is read because of it.
        self.has_begun.load(Ordering::Relaxed)
    }
}

/// Removes a socket's name when the server ends, however it ends.
#[derive(Debug)]
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // It may be gone already; there is nowhere to report that.
        let _ = fs::remove_file(&self.0);
    }
}

impl PeerServer {
    /// Listens at the address (port 0 is a free one) and serves the source there. Each connection
    /// opens it anew. The name of a Unix socket must be free: remove a name that a killed server
    /// has left.
    ///
    /// # Errors
    /// [`SourceError::NotLoopback`], [`SourceError::Serve`]; and the errors of opening the source,
    /// which is tried once.
    pub fn start(address: PeerAddress, source: SourceSpec) -> Result<PeerServer, SourceError> {
        if !address.is_on_this_machine() {
            return Err(SourceError::NotLoopback { address });
        }
        drop(source.open()?);
        let start = || {
            let (listener, address) = Listener::bind(&address)?;
            let file = match &address {
                PeerAddress::Unix(path) => Some(SocketFile(path.clone())),
                PeerAddress::Tcp(_) => None,
            };
            let ending = Arc::new(Ending { has_begun: AtomicBool::new(false), event: EventFd::new()? });
            let acceptors_ending = Arc::clone(&ending);
            let acceptor = Builder::new().name("page-server".into()).spawn(move || {
                accept_all(&listener, &source, &acceptors_ending);
                // In this order: no client finds a name without a listener.
                drop(file);
                drop(listener);
            })?;
            Ok(PeerServer { address, ending, acceptor: Some(acceptor) })
        };
        start().map_err(|cause| SourceError::Serve { address: address.clone(), cause })
    }

    /// Where it listens.
    pub fn address(&self) -> &PeerAddress {
        &self.address
    }
}

impl Drop for PeerServer {
    /// Closes all connections, and waits for the threads.
    fn drop(&mut self) {
        self.ending.has_begun.store(true, Ordering::Relaxed);
        self.ending.event.signal();
        if let Some(acceptor) = self.acceptor.take() {
            // A thread that panicked has printed its message itself.
            let _ = acceptor.join();
        }
    }
}

fn accept_all(listener: &Listener, source: &SourceSpec, ending: &Arc<Ending>) {
    /// When no more files can be open, connections cannot be taken from the queue either.
    const RETRY_NS: u64 = 10_000_000;
    let mut connections: Vec<JoinHandle<()>> = Vec::new();
    while !ending.has_begun() {
        let waited = match listener.accept() {
            Ok(stream) => {
                connections.retain(|connection| !connection.is_finished());
                if connections.len() < MAX_CONNECTIONS {
                    // A source that cannot be opened any more, or a thread that cannot be started,
                    // does not end the server: the user finds the connection closed.
                    connections.extend(serve(stream, source, ending).ok());
                }
                Ok(false)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let entries = &mut [
                    PollFd::from_borrowed_fd(ending.event.as_fd(), PollFlags::IN),
                    PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN),
                ];
                wait(entries, u64::MAX)
            }
            Err(_) => wait(
                &mut [PollFd::from_borrowed_fd(ending.event.as_fd(), PollFlags::IN)],
                timestamp_ns().saturating_add(RETRY_NS),
            ),
        };
        if waited.is_err() {
            break;
        }
    }
    // Also where waiting failed: no thread may outlive the server.
    ending.has_begun.store(true, Ordering::Relaxed);
    for connection in connections {
        let _ = connection.join();
    }
}

fn serve(stream: Stream, source: &SourceSpec, ending: &Arc<Ending>) -> io::Result<JoinHandle<()>> {
    let (source, ending) = (source.clone(), Arc::clone(ending));
    Builder::new().name("page-connection".into()).spawn(move || {
        let Ok(source) = source.open() else { return };
        let mut connection = Connection::new(stream, source);
        // An error ends the connection, and so the user finds out.
        while !ending.has_begun() && matches!(connection.step(&ending), Ok(Step::Go)) {}
    })
}

/// The state of one connection.
#[derive(Debug)]
struct Connection {
    stream: Stream,
    source: Box<dyn PageSource>,
    /// Requests that were passed to the source.
    asked: VecDeque<PageRequest>,
    /// Received requests, and the beginning of another: the first `nr_incoming` bytes.
    incoming: Box<[u8]>,
    nr_incoming: usize,
    /// Answers: the first `nr_outgoing` bytes, of which the first `nr_sent` are sent.
    outgoing: Box<[u8]>,
    nr_outgoing: usize,
    nr_sent: usize,
}

#[derive(PartialEq, Eq, Debug)]
enum Step {
    Go,
    Closed,
}

impl Connection {
    fn new(stream: Stream, source: Box<dyn PageSource>) -> Connection {
        let mut connection = Connection {
            stream,
            source,
            asked: VecDeque::with_capacity(MAX_IN_FLIGHT),
            incoming: vec![0; MAX_IN_FLIGHT * REQUEST_BYTES].into_boxed_slice(),
            nr_incoming: 0,
            outgoing: vec![0; REPLIES_AT_ONCE * REPLY_BYTES].into_boxed_slice(),
            nr_outgoing: 0,
            nr_sent: 0,
        };
        connection.push(&GREETING);
        connection
    }

    /// Does what can be done now, or waits until something can.
    fn step(&mut self, ending: &Ending) -> Result<Step, SourceError> {
        let broken = |cause| SourceError::Wait { cause };
        let mut has_done_something = false;
        if self.wants_requests() {
            match self.stream.receive(&mut self.incoming[self.nr_incoming..]).map_err(broken)? {
                Some(0) => return Ok(Step::Closed),
                Some(nr_bytes) => {
                    self.nr_incoming += nr_bytes;
                    has_done_something = true;
                }
                None => {}
            }
        }
        has_done_something |= self.ask() > 0;
        has_done_something |= self.answer()? > 0;
        has_done_something |= self.send().map_err(broken)? > 0;
        if !has_done_something {
            return self.wait(ending).map_err(broken);
        }
        Ok(Step::Go)
    }

    fn wants_requests(&self) -> bool {
        self.nr_incoming < self.incoming.len() && self.asked.len() < MAX_IN_FLIGHT
    }

    fn has_room(&self) -> bool {
        self.nr_outgoing + REPLY_BYTES <= self.outgoing.len()
    }

    /// Adds bytes to send. There must be room.
    fn push(&mut self, bytes: &[u8]) {
        self.outgoing[self.nr_outgoing..][..bytes.len()].copy_from_slice(bytes);
        self.nr_outgoing += bytes.len();
    }

    /// Passes requests on to the source. Returns how many.
    fn ask(&mut self) -> usize {
        let mut nr_asked = 0;
        // There must be room for a refusal.
        while self.asked.len() < MAX_IN_FLIGHT && self.has_room() {
            let rest = &self.incoming[nr_asked * REQUEST_BYTES..self.nr_incoming];
            let Some(request) = rest.first_chunk().map(PageRequest::from_bytes) else { break };
            match self.source.request(request.page) {
                Ok(()) => self.asked.push_back(request),
                Err(_) => self.push(&Header::refused(request).to_bytes()),
            }
            nr_asked += 1;
        }
        if nr_asked > 0 {
            self.incoming.copy_within(nr_asked * REQUEST_BYTES..self.nr_incoming, 0);
            self.nr_incoming -= nr_asked * REQUEST_BYTES;
        }
        nr_asked
    }

    /// Makes answers of the pages that are here. Returns how many.
    fn answer(&mut self) -> Result<usize, SourceError> {
        let mut nr_answered = 0;
        while self.has_room() {
            let Some(page) = self.source.arrived(Wait::No)? else { break };
            let position = self.asked.iter().position(|request| request.page == page);
            let Some(request) = position.and_then(|position| self.asked.remove(position)) else { break };
            let into = self.outgoing[self.nr_outgoing + HEADER_BYTES..].first_chunk_mut::<PAGE_SIZE>();
            if into.is_some_and(|into| self.source.take_into(into).is_ok()) {
                self.push(&Header::page(request).to_bytes());
                self.nr_outgoing += PAGE_SIZE;
            } else {
                self.push(&Header::refused(request).to_bytes());
            }
            nr_answered += 1;
        }
        Ok(nr_answered)
    }

    /// Sends what there is room for. Returns how many bytes.
    fn send(&mut self) -> io::Result<usize> {
        let unsent = &self.outgoing[self.nr_sent..self.nr_outgoing];
        if unsent.is_empty() {
            return Ok(0);
        }
        let nr_bytes = self.stream.send(unsent)?.unwrap_or(0);
        self.nr_sent += nr_bytes;
        if self.nr_sent == self.nr_outgoing {
            (self.nr_sent, self.nr_outgoing) = (0, 0);
        }
        Ok(nr_bytes)
    }

    fn wait(&self, ending: &Ending) -> io::Result<Step> {
        let mut events = PollFlags::empty();
        if self.wants_requests() {
            events |= PollFlags::IN;
        }
        if self.nr_outgoing > 0 {
            events |= PollFlags::OUT;
        }
        let ends = PollFd::from_borrowed_fd(ending.event.as_fd(), PollFlags::IN);
        let stream = PollFd::from_borrowed_fd(self.stream.as_fd(), events);
        // Without room for an answer no page of the source can be used.
        let next = if self.has_room() { self.source.next_arrival() } else { NextArrival::Nothing };
        let (source, until_ns) = match next {
            NextArrival::Nothing => (None, u64::MAX),
            NextArrival::At(at_ns) => (None, at_ns),
            NextArrival::Readable { descriptor, until_ns } => (Some(descriptor), until_ns),
        };
        let source = source.map(|descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN));
        let mut entries: Vec<_> = [stream, ends].into_iter().chain(source).collect();
        wait(&mut entries, until_ns)?;
        // Where nothing is read or sent, only this shows that the user has disconnected. Otherwise
        // the wait would end at once, again and again.
        let has_gone = entries[0].revents().intersects(PollFlags::HUP | PollFlags::ERR);
        Ok(if events.is_empty() && has_gone { Step::Closed } else { Step::Go })
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
