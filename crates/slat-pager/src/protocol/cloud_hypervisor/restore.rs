//! Gives a snapshot back to a VMM that waits for it.

use std::collections::BTreeMap;
use std::io;
use std::net::Shutdown;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use tokio::runtime::Handle;
use tracing::{info, warn};

use super::connection::Connection;
use super::faults::{Counters, FaultServer};
use super::memory::GuestMemory;
use super::taken::is_taken;
use super::wire::{Command, ROLE_FAULT, Request};
use super::{Error, OnFailure, config};
use crate::source::Source;
use crate::working_set::Recorder;
use crate::working_set::replay::{Progress, nr_threads, replay};

/// How long the pager waits before it looks again whether a VMM listens.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// What is restored.
#[derive(Debug)]
pub struct Snapshot {
    /// The configuration of the VM, as it came.
    pub config: Vec<u8>,
    /// The state of its devices, as it came.
    pub state: Vec<u8>,
    /// The memory of each slot.
    pub memory: BTreeMap<u32, Arc<dyn Source>>,
}

/// What the VM does once it is restored.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Then {
    /// It runs.
    Run,
    /// It is paused.
    Pause,
}

/// When its memory comes.
#[derive(Clone, Debug)]
pub enum Memory {
    /// When it is touched. The VMM was told `memory_mode=postcopy`.
    OnDemand {
        /// Records what the guest touches.
        record: Record,
        /// What becomes of a guest whose page cannot be had.
        on_failure: OnFailure,
    },
    /// All before it runs.
    Before,
}

/// Whether a working set is recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Record {
    /// Of at most so many bytes.
    UpTo(u64),
    /// None.
    Nothing,
}

/// How long a VMM may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Timeouts {
    /// To listen.
    pub listen: Duration,
    /// For each of its frames.
    pub frame: Duration,
}

/// A VM that was restored, and whose page faults are served until it ends.
#[derive(Debug)]
pub struct Restored {
    memory: Arc<GuestMemory>,
    counters: Arc<Counters>,
    recorder: Option<Arc<Recorder>>,
    serving: Option<Serving>,
}

#[derive(Debug)]
struct Serving {
    socket: UnixStream,
    thread: JoinHandle<Result<(), Error>>,
}

/// Restores `snapshot` in the VMM that listens at `socket`. Returns once it says that the VM is
/// there. The pager is connected before it fills memory, as that may take long.
///
/// # Errors
/// [`enum@Error`].
pub fn restore(
    socket: &Path,
    snapshot: &Snapshot,
    memory: Memory,
    then: Then,
    timeouts: Timeouts,
    runtime: &Handle,
) -> Result<Restored, Error> {
    let slots = config::slots(&snapshot.config)?;
    let guest = Arc::new(GuestMemory::new(&slots, &snapshot.memory, runtime.clone())?);
    let connected = connect(socket, timeouts.listen)?;
    if matches!(memory, Memory::Before) {
        let whole = whole(&guest);
        let source = snapshot.memory.values().next();
        let threads = source.map_or(1, |source| nr_threads(&**source));
        replay(&whole, &*guest, threads, &Progress::default())?;
    }
    let connection = Connection::new(connected, timeouts.frame).map_err(Error::io("use a connection"))?;
    connection.request(Request::new(Command::Start, 0), &[], "Start")?;
    for slot in guest.slots() {
        connection.send_memory(slot.slot.number, slot.memory.as_fd())?;
    }
    let config_length = snapshot.config.len() as u64;
    connection.request(Request::new(Command::Config, config_length), &snapshot.config, "Config")?;

    let mut restored = Restored { memory: guest, counters: Arc::default(), recorder: None, serving: None };
    if let Memory::OnDemand { record, on_failure } = memory {
        let second = UnixStream::connect(socket).map_err(Error::io("connect a second time, for page faults"))?;
        restored.serve(second, record, on_failure, timeouts.frame, runtime)?;
    }
    let state_length = snapshot.state.len() as u64;
    connection.request(Request::new(Command::State, state_length), &snapshot.state, "State")?;
    if let Some(Serving { socket, .. }) = &restored.serving
        && !is_taken(socket).map_err(|error| Error::io("look at a connection")(error.into()))?
        && restored.has_no_faults()
    {
        connection.send_all(&Request::new(Command::Abandon, 0).to_bytes())?;
        return Err(Error::NotOnDemand);
    }
    let (complete, what) = match then {
        Then::Run => (Command::Complete, "Complete"),
        Then::Pause => (Command::CompletePaused, "CompletePaused"),
    };
    connection.request(Request::new(complete, 0), &[], what)?;
    info!(socket = %socket.display(), "restored a VM");
    Ok(restored)
}

impl Restored {
    /// Its memory, for a replay.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// What was served.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Whether no fault was answered whose answer this thread has found in the socket, or found
    /// taken.
    fn has_no_faults(&self) -> bool {
        // With the fence of `FaultServer::send`: a fault is counted before its answer is in the socket. The
        // kernel's count of the socket's bytes is what both threads access between the fences.
        fence(Ordering::Acquire);
        self.counters.nr_faults.load(Ordering::Relaxed) == 0
    }

    /// Its recording, if there is one.
    pub fn recorder(&self) -> Option<&Arc<Recorder>> {
        self.recorder.as_ref()
    }

    /// Waits until the VMM closes the connection: it has all pages, or is gone.
    ///
    /// # Errors
    /// Frames that are none; the VMM was cut off then.
    pub fn wait(mut self) -> Result<(), Error> {
        match self.serving.take() {
            Some(Serving { thread, .. }) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            None => Ok(()),
        }
    }

    fn serve(
        &mut self,
        socket: UnixStream,
        record: Record,
        on_failure: OnFailure,
        timeout: Duration,
        runtime: &Handle,
    ) -> Result<(), Error> {
        let error = Error::io("serve page faults");
        let connection = Connection::new(socket, timeout).map_err(Error::io("use a connection"))?;
        connection.send_all(&ROLE_FAULT)?;
        let socket = connection.into_socket();
        // A guest may run for weeks without a fault, and the VMM may take its time for an answer.
        socket
            .set_read_timeout(None)
            .and_then(|()| socket.set_write_timeout(None))
            .map_err(Error::io("use a connection"))?;
        if let Record::UpTo(most_bytes) = record {
            let memory = &self.memory;
            let recorder = Recorder::new(memory.identity(), memory.size_bytes(), memory.around_bytes(), most_bytes);
            if recorder.is_none() {
                warn!("the VM has too much memory for a working set");
            }
            self.recorder = recorder.map(Arc::new);
        }
        let server = FaultServer {
            socket: socket.try_clone().map_err(Error::io("use a connection"))?,
            memory: Arc::clone(&self.memory),
            counters: Arc::clone(&self.counters),
            recorder: self.recorder.clone(),
            on_failure,
            runtime: runtime.clone(),
        };
        let spawned = thread::Builder::new().name("slat-faults".to_owned()).spawn(|| {
            let socket = server.socket.try_clone();
            let served = server.serve();
            // The VMM notices the end, whatever it was: a guest must not wait for a thread that is gone.
            let _ = socket.map(|socket| socket.shutdown(Shutdown::Both));
            served
        });
        self.serving = Some(Serving { socket, thread: spawned.map_err(error)? });
        Ok(())
    }
}

impl Drop for Restored {
    /// Cuts off a VM that was not waited for: it fails at its next fault.
    fn drop(&mut self) {
        if let Some(Serving { socket, thread }) = self.serving.take() {
            let _ = socket.shutdown(Shutdown::Both);
            let _ = thread.join();
        }
    }
}

/// All bytes of `memory`, in the order of addresses.
pub fn whole(memory: &GuestMemory) -> Vec<Range<u64>> {
    let step_bytes = memory.around_bytes().max(1 << 20);
    let starts = (0..memory.size_bytes()).step_by(step_bytes as usize);
    starts.map(|start| start..memory.size_bytes().min(start + step_bytes)).collect()
}

/// Connects to the VMM; it has `timeout` to listen.
fn connect(socket: &Path, timeout: Duration) -> Result<UnixStream, Error> {
    let deadline = Instant::now() + timeout;
    loop {
        match UnixStream::connect(socket) {
            Err(error)
                if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
                    && Instant::now() < deadline =>
            {
                thread::sleep(LOOK_AGAIN);
            }
            connected => return connected.map_err(Error::file(socket)),
        }
    }
}
