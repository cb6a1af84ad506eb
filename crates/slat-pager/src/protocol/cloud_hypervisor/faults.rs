//! Serves the page faults that come on the second connection.
//!
//! # Guarantees
//! - A fault is answered after all its bytes are in the memory that both sides share.
//! - Answers come in the order of the faults, as the frames have no numbers. Up to [`IN_FLIGHT`]
//!   faults are served at once; behind them the connection is not read, but its end is noticed.
//!   `Abandon` is answered last, and nothing is read behind it.
//! - A source that fails for a while makes the guest wait. One that fails for ever is answered by
//!   an error, after which the VMM exits, or not at all: the guest stays as it is ([`OnFailure`]).
//!
//! # Implementation
//! One thread reads, serves what needs no read of the source itself, gives the rest to the runtime,
//! and writes the answers. The present VMM has one fault in flight: it waits for no other thread
//! then.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::{Errno, read, retry_on_intr, write};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tracing::{debug, error, warn};

use super::memory::GuestMemory;
use super::sweep::{Asker, Sweep};
use super::wire::{self, Command, FRAME_BYTES, RANGE_BYTES, Request, Response};
use super::{Error, OnFailure};
use crate::shared_memory::Filled;
use crate::working_set::Recorder;

/// How many faults of one VM are served at once.
pub const IN_FLIGHT: usize = 256;
/// How long the pager waits between two tries of a source.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// What was served.
#[derive(Debug, Default)]
pub struct Counters {
    /// Faults that were answered.
    pub nr_faults: AtomicU64,
    /// Faults of them whose bytes were there before they came.
    pub nr_hits: AtomicU64,
    /// Faults of them that the VMM asked for on its own, as far as the pager can tell.
    pub nr_swept: AtomicU64,
    /// Tries of the source that failed.
    pub nr_failures: AtomicU64,
}

/// Serves one connection.
pub(super) struct FaultServer {
    pub(super) socket: UnixStream,
    pub(super) memory: Arc<GuestMemory>,
    pub(super) counters: Arc<Counters>,
    pub(super) recorder: Option<Arc<Recorder>>,
    pub(super) on_failure: OnFailure,
    pub(super) runtime: Handle,
}

/// The outcome of a fault that is in flight.
type Outcome = Arc<OnceLock<Response>>;

impl FaultServer {
    /// Serves until the VMM closes the connection.
    pub(super) fn serve(self) -> Result<(), Error> {
        let finished = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(failed)?);
        let mut sweep = Sweep::new(self.memory.size_bytes());
        let mut in_flight: VecDeque<Outcome> = VecDeque::new();
        let mut received = Received::default();
        let mut is_abandoned = false;
        // Those that still run end with the connection.
        let mut tasks = JoinSet::new();
        loop {
            self.answer(&mut in_flight)?;
            while tasks.try_join_next().is_some() {}
            if is_abandoned && in_flight.is_empty() {
                return Ok(());
            }
            let reads = !is_abandoned && in_flight.len() < IN_FLIGHT;
            match if reads { received.next()? } else { None } {
                Some(Frame::Fault(gpas)) => {
                    in_flight.push_back(self.begin(gpas, &mut sweep, &finished, &mut tasks));
                    continue;
                }
                Some(Frame::Abandon) => {
                    debug!("the VMM abandons its page faults");
                    in_flight.push_back(answered(Response::Ok));
                    is_abandoned = true;
                    continue;
                }
                None => {}
            }
            // The end of the connection (POLLHUP) is reported whatever is watched.
            let watched = if reads { PollFlags::IN } else { PollFlags::empty() };
            match self.wait(watched, &in_flight, &finished)? {
                Woken::Finished => {}
                Woken::Received if reads && received.receive(&self.socket)? => {}
                Woken::Received => return Ok(()),
            }
        }
    }

    /// Writes the answers of the faults that are served, up to the first that is not.
    fn answer(&self, in_flight: &mut VecDeque<Outcome>) -> Result<(), Error> {
        while let Some(response) = in_flight.front().and_then(|outcome| outcome.get()) {
            self.send(*response)?;
            in_flight.pop_front();
        }
        Ok(())
    }

    /// Waits until `watched` is there on the connection, or its end, or a fault is served.
    fn wait(&self, watched: PollFlags, in_flight: &VecDeque<Outcome>, finished: &OwnedFd) -> Result<Woken, Error> {
        if in_flight.is_empty() {
            return Ok(Woken::Received);
        }
        let mut descriptors = [PollFd::new(finished, PollFlags::IN), PollFd::new(&self.socket, watched)];
        retry_on_intr(|| poll(&mut descriptors, None)).map_err(failed)?;
        if descriptors[0].revents().is_empty() {
            return Ok(Woken::Received);
        }
        // Resets the count. It is not zero: this is its only reader.
        let _ = read(finished, &mut [0; 8]);
        Ok(Woken::Finished)
    }

    fn begin(&self, gpas: Range<u64>, sweep: &mut Sweep, finished: &Arc<OwnedFd>, tasks: &mut JoinSet<()>) -> Outcome {
        self.counters.nr_faults.fetch_add(1, Ordering::Relaxed);
        let Some((slot, range)) = self.memory.find(&gpas) else {
            warn!(?gpas, "a page fault is not in the memory of the VM");
            return answered(Response::Error);
        };
        let flat = slot.start + range.start..slot.start + range.end;
        let asker = sweep.ask(&flat);
        match &asker {
            Asker::Vmm(doubtful) => {
                self.counters.nr_swept.fetch_add(1 + doubtful.len() as u64, Ordering::Relaxed);
                if let Some(recorder) = &self.recorder {
                    doubtful.iter().for_each(|offset| recorder.forget(*offset));
                }
            }
            Asker::Guest => {
                if let Some(recorder) = &self.recorder {
                    recorder.record(flat.start);
                }
            }
        }
        if slot.memory.is_present(range.clone()) {
            self.counters.nr_hits.fetch_add(1, Ordering::Relaxed);
            // A balloon may have taken its memory since.
            match slot.memory.back(range) {
                Ok(()) => return answered(Response::Ok),
                Err(error) => {
                    error!(%error, ?gpas, "memory for a page cannot be had");
                    return answered(Response::Error);
                }
            }
        }
        // The VMM asks for all anyway.
        let ahead_of = (asker == Asker::Guest).then_some(range.end);
        match slot.memory.try_fill(range) {
            Ok(Filled::Now) => return answered(Response::Ok),
            Ok(Filled::FromCache) => {
                if let Some(end) = ahead_of {
                    slot.memory.read_ahead(end, &self.runtime);
                }
                return answered(Response::Ok);
            }
            Ok(Filled::Waits) => {}
            // Tried again, as the policy says.
            Err(error) => debug!(%error, ?gpas, "a page is not served at once"),
        }
        let outcome = Outcome::default();
        let (of_task, finished) = (Arc::clone(&outcome), Arc::clone(finished));
        let (memory, counters, on_failure) = (Arc::clone(&self.memory), Arc::clone(&self.counters), self.on_failure);
        let waits = self.memory.note_waiting();
        let runtime = self.runtime.clone();
        let serve = async move {
            // The first that is polled, and so begins, is the fault's own read.
            let own = fill(&memory, &gpas, on_failure, &counters);
            let ahead = async {
                if let Some(end) = ahead_of
                    && let Some((slot, _)) = memory.find(&gpas)
                {
                    slot.memory.read_ahead(end, &runtime);
                }
            };
            let (response, ()) = futures_util::future::join(own, ahead).await;
            drop(waits);
            // Set by this task alone.
            let _ = of_task.set(response);
            // Fails only where the count is at its end: then it is readable.
            let _ = write(&*finished, &1_u64.to_ne_bytes());
        };
        tasks.spawn_on(serve, &self.runtime);
        outcome
    }

    fn send(&self, response: Response) -> Result<(), Error> {
        // What was counted is seen by a thread that finds this answer in the socket.
        fence(Ordering::Release);
        let bytes = response.to_bytes();
        let mut left = &bytes[..];
        while !left.is_empty() {
            match send(&self.socket, left, SendFlags::NOSIGNAL) {
                Ok(nr_sent) => left = &left[nr_sent..],
                Err(Errno::INTR) => {}
                // The VMM is gone: what is received next says so.
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(()),
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(())
    }
}

/// Fills `gpas` as often as the policy has it tried.
async fn fill(memory: &GuestMemory, gpas: &Range<u64>, on_failure: OnFailure, counters: &Counters) -> Response {
    let mut pause = FIRST_PAUSE;
    loop {
        let error = match memory.fill(gpas.clone()).await {
            Ok(()) => return Response::Ok,
            Err(error) => error,
        };
        counters.nr_failures.fetch_add(1, Ordering::Relaxed);
        match on_failure {
            OnFailure::Refuse if !error.may_pass() => {
                error!(%error, ?gpas, "a page cannot be had: the VMM will exit");
                return Response::Error;
            }
            OnFailure::Wait if !error.may_pass() => error!(%error, ?gpas, "a page cannot be had: the guest waits"),
            _ => warn!(%error, ?gpas, "a page cannot be had for now: the guest waits"),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LAST_PAUSE);
    }
}

fn answered(response: Response) -> Outcome {
    Arc::new(OnceLock::from(response))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Woken {
    Finished,
    Received,
}

/// Bytes of the connection, and where the next frame is in them.
struct Received {
    bytes: Box<[u8]>,
    filled: Range<usize>,
}

enum Frame {
    Fault(Range<u64>),
    Abandon,
}

impl Default for Received {
    fn default() -> Received {
        Received { bytes: vec![0; 64 * (FRAME_BYTES + RANGE_BYTES)].into(), filled: 0..0 }
    }
}

impl Received {
    /// Waits for more bytes; false at the end. A VMM that is killed may leave an answer unread: the
    /// end is a reset then.
    fn receive(&mut self, socket: impl AsFd) -> Result<bool, Error> {
        self.bytes.copy_within(self.filled.clone(), 0);
        self.filled = 0..self.filled.len();
        // There is room: what is left is less than a frame.
        match retry_on_intr(|| recv(&socket, &mut self.bytes[self.filled.end..], RecvFlags::empty())) {
            Ok((0, _)) | Err(Errno::CONNRESET) if self.filled.is_empty() => Ok(false),
            Ok((0, _)) | Err(Errno::CONNRESET) => Err(Error::Closed("the rest of a page fault")),
            Ok((nr_bytes, _)) => {
                self.filled.end += nr_bytes;
                Ok(true)
            }
            Err(error) => Err(failed(error)),
        }
    }

    /// The next frame that is whole.
    fn next(&mut self) -> Result<Option<Frame>, Error> {
        let filled = &self.bytes[self.filled.clone()];
        let Some((head, rest)) = filled.split_first_chunk::<FRAME_BYTES>() else { return Ok(None) };
        let request = Request::from_bytes(*head)?;
        match (request.command, request.length) {
            (Command::Abandon, 0) => return Ok(Some(Frame::Abandon)),
            (Command::PageFault, length) if length == RANGE_BYTES as u64 => {}
            (command @ (Command::PageFault | Command::Abandon), length) => {
                return Err(Error::Length { command, length });
            }
            (found, _) => return Err(Error::OutOfOrder { found, expected: "PageFault" }),
        }
        let Some(range) = rest.first_chunk::<RANGE_BYTES>() else { return Ok(None) };
        let gpas = wire::page_fault(*range)?;
        self.filled.start += FRAME_BYTES + RANGE_BYTES;
        Ok(Some(Frame::Fault(gpas)))
    }
}

fn failed(error: Errno) -> Error {
    Error::Io { what: "serve page faults", error: io::Error::from(error) }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// The end of a VMM that was killed while an answer was on its way, after it had sent `bytes`.
    fn killed_after(bytes: &[u8]) -> Result<(), Error> {
        let (mut ours, mut vmm) = UnixStream::pair().unwrap();
        vmm.write_all(bytes).unwrap();
        ours.write_all(&Response::Ok.to_bytes()).unwrap();
        drop(vmm);
        let mut received = Received::default();
        while received.receive(&ours)? {}
        Ok(())
    }

    #[test]
    fn a_vmm_that_is_killed_before_it_reads_an_answer_has_ended() {
        killed_after(&[]).unwrap();
        assert!(matches!(killed_after(&[0]), Err(Error::Closed(_))));
    }
}
