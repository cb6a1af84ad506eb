//! The servers that are compared, each for one guest after the other.

use std::io;
use std::num::NonZeroUsize;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::{ClockId, clock_gettime};
use tokio::runtime::Handle;

use super::guest::Guest;
use super::poll_loop::PollLoop;
use crate::protocol::firecracker;
use crate::shared_memory::SharedMemory;
use crate::source::Source;
use crate::userfaultfd::Userfaultfd;
use crate::vm::state::State;
use crate::vm::{Options, Region, Regions, Vm};
use crate::working_set::replay::{Progress, nr_threads, replay, steps};
use crate::working_set::{Recorder, WorkingSet};

/// A way to serve.
#[derive(Clone, Debug)]
pub(super) enum Server {
    /// The plain loop, which brings aligned ranges of so many bytes.
    Loop(u64),
    /// Ours.
    Slat {
        /// Threads that read faults.
        nr_threads: usize,
        /// What a fault brings.
        granule_bytes: u64,
        /// What is brought in advance.
        replay: Option<Arc<WorkingSet>>,
        /// Records what is touched.
        record: Option<Arc<Recorder>>,
        /// Memory that all clones share.
        shared: Option<Arc<SharedMemory>>,
    },
}

impl Server {
    pub(super) fn slat(nr_threads: usize, granule_bytes: u64) -> Server {
        Server::Slat { nr_threads, granule_bytes, replay: None, record: None, shared: None }
    }
}

/// A guest that is served.
#[derive(Debug)]
pub(super) enum Served {
    Loop(PollLoop),
    Slat { vm: Vm, progress: Arc<Progress>, replay: Option<JoinHandle<()>> },
}

/// Where guests come to.
#[derive(Debug)]
pub(super) struct Desk {
    listener: UnixListener,
    path: PathBuf,
    runtime: Handle,
}

impl Desk {
    pub(super) fn new(folder: &Path, runtime: Handle) -> io::Result<Desk> {
        let path = folder.join("bench.sock");
        Ok(Desk { listener: UnixListener::bind(&path)?, path, runtime })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Takes `guest`, which was started last, and serves it from `source`.
    pub(super) fn serve(&self, guest: &Guest, server: &Server, source: &Arc<dyn Source>) -> io::Result<Served> {
        let mut descriptors =
            [PollFd::new(&self.listener, PollFlags::IN), PollFd::from_borrowed_fd(guest.output(), PollFlags::IN)];
        rustix::io::retry_on_intr(|| poll(&mut descriptors, None))?;
        if descriptors[0].revents().is_empty() {
            return Err(io::Error::other("a guest has ended before it was served"));
        }
        let (socket, _) = self.listener.accept()?;
        socket.set_nonblocking(true)?;
        let handshake = self.runtime.block_on(async {
            let socket = tokio::net::UnixStream::from_std(socket)?;
            firecracker::receive(&socket).await.map_err(io::Error::other)
        })?;
        let [region] = <[Region; 1]>::try_from(handshake.regions).map_err(|_| io::ErrorKind::InvalidData)?;
        let source = Arc::clone(source);
        match server {
            Server::Loop(granule_bytes) => {
                let runtime = self.runtime.clone();
                Ok(Served::Loop(PollLoop::start(handshake.userfaultfd, region, source, *granule_bytes, runtime)?))
            }
            Server::Slat { .. } => self.attach(server, handshake.userfaultfd, region, source),
        }
    }

    fn attach(
        &self,
        server: &Server,
        userfaultfd: Userfaultfd,
        region: Region,
        source: Arc<dyn Source>,
    ) -> io::Result<Served> {
        let Server::Slat { nr_threads: threads, granule_bytes, replay: set, record, shared } = server else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let regions = Regions::new(&[region], source.size_bytes()).map_err(io::Error::other)?;
        let state = State::anonymous(*threads, regions.nr_words())?;
        let options = Options {
            nr_threads: NonZeroUsize::new(*threads).unwrap_or(NonZeroUsize::MIN),
            granule_bytes: *granule_bytes,
            observer: record.clone().map(|recorder| recorder as _),
            runtime: Some(self.runtime.clone()),
            shared_memory: shared.clone(),
            ..Options::default()
        };
        let nr_replaying = nr_threads(&*source);
        let vm = Vm::attach(userfaultfd, regions, source, state, options).map_err(io::Error::other)?;
        let progress = Arc::new(Progress::default());
        let replay = set.clone().map(|set| {
            let (populator, progress) = (vm.populator(), Arc::clone(&progress));
            thread::spawn(move || {
                // What fails comes by faults, which say so.
                let _ = replay(&steps(&set), &populator, nr_replaying, &progress);
            })
        });
        Ok(Served::Slat { vm, progress, replay })
    }
}

impl Served {
    /// Ends the service. The guest was killed before, or waits for nothing.
    pub(super) fn stop(self) -> io::Result<()> {
        match self {
            Served::Loop(poll_loop) => poll_loop.stop(),
            Served::Slat { vm, progress, replay } => {
                progress.stop();
                vm.forget();
                if let Some(replay) = replay {
                    replay.join().map_err(|_| io::Error::other("the replay has panicked"))?;
                }
                Ok(())
            }
        }
    }
}

/// CPU time of this process, in seconds: of the servers, as the guests are other processes.
pub(super) fn cpu_s() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
