//! `slat-pager serve`: many machines, each with the snapshot of the socket that it came to.
//!
//! # Guarantees
//! - A machine is noted in a file before its first fault is answered, and from then on survives
//!   this process ([`takeover`]).
//! - A monitor that is refused gets nothing. If its handshake was complete, the descriptor stays
//!   open here until its socket ends: its threads wait, and read no zeros. If not, the socket is
//!   closed, and its threads wait as long as the monitor has the descriptor.
//! - No error of one connection ends another, or the daemon.
//! - What waits for the files of one snapshot has a few threads at most: where a disk hangs,
//!   machines of other snapshots are served.
//! - However the daemon ends, the pages of its machines do not fail: they wait for a successor.
//! - A snapshot that cannot be opened keeps no other from being served, nor their machines from being
//!   taken over. It is tried again, while its machines and VMMs wait. A daemon that can open none
//!   does not start.
//!
//! # Implementation
//! What needs rights comes first: sockets, orphans, metrics. Then [`sandbox::enter`], and only then
//! threads, sources, and what monitors and servers send.

mod calls;
pub mod http;
pub mod listen;
mod machine;
pub mod sandbox;
pub mod takeover;

use std::collections::HashSet;
use std::io;
use std::os::unix::net::UnixListener as StdListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use prometheus::Registry;
use thiserror::Error;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, oneshot, watch};
use tokio_util::task::TaskTracker;

use crate::config::{Config, SandboxMode, SocketConfig};
use crate::metrics::{CacheMetrics, Metrics};
use crate::snapshot::{OpenWith, SnapshotName};
use crate::source::cache::BlockCache;
use crate::source::{Source, SourceError};
use crate::vm::fetch::{Budget, Limits};
use listen::Passed;
use sandbox::Files;
use takeover::{Lock, Orphan, Standby};

/// Why a daemon does not start.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum DaemonError {
    #[error("cannot use the runtime folder {}: {error}", folder.display())]
    Folder { folder: PathBuf, error: io::Error },
    #[error("another pager has the runtime folder {} (--standby waits for its end)", folder.display())]
    Taken { folder: PathBuf },
    #[error("cannot listen on {}: {error}", path.display())]
    Listen { path: PathBuf, error: io::Error },
    #[error("cannot serve metrics: {0}")]
    Metrics(io::Error),
    #[error("cannot give up rights: {0}")]
    Sandbox(#[from] sandbox::SandboxError),
    #[error("cannot have a cache: {0}")]
    Cache(SourceError),
    #[error("the snapshot `{name}`: {error}")]
    Snapshot { name: String, error: SourceError },
    #[error("cannot {what}: {error}")]
    System { what: &'static str, error: io::Error },
}

/// A socket with all that its machines need.
#[derive(Debug)]
struct Socket {
    config: SocketConfig,
    source: Arc<dyn Source>,
    metrics: Arc<Metrics>,
    limits: Limits,
    /// For each machine whose files are made and read.
    attaching: Arc<Semaphore>,
}

/// How many machines of a socket are begun at once: a disk that hangs has a thread for each.
const MOST_ATTACHING: usize = 8;

/// How long after a try to open a snapshot another follows, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// What all machines share.
#[derive(Debug)]
struct Daemon {
    runtime_folder: PathBuf,
    boot: String,
    slots: Arc<Semaphore>,
    tasks: TaskTracker,
    /// Becomes true when the daemon leaves its machines.
    leave: watch::Receiver<bool>,
    /// The machines that are served, by the process of the monitor and the inode of its userfaultfd.
    served: Mutex<HashSet<(i32, u64)>>,
}

/// Serves as `config` says, until a signal (SIGTERM, SIGINT). The machines are left for a
/// successor.
///
/// # Errors
/// [`DaemonError`].
#[expect(unsafe_code, reason = "files of machines that a dead pager has left are opened once")]
pub fn serve(config: &Config, standby: Standby, mut passed: Passed) -> Result<(), DaemonError> {
    let system = |what| move |error| DaemonError::System { what, error };
    raise_limits();
    let runtime_folder = config.runtime_folder();
    let lock = Lock::take(&runtime_folder, standby).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => DaemonError::Taken { folder: runtime_folder.clone() },
        _ => DaemonError::Folder { folder: runtime_folder.clone(), error },
    })?;
    let listen = |socket: &SocketConfig| {
        let failed = |error| DaemonError::Listen { path: socket.path.clone(), error };
        passed.listen(&socket.path).map_err(failed)
    };
    let listeners = config.sockets.iter().map(listen).collect::<Result<Vec<_>, _>>()?;
    if passed.nr_left() > 0 {
        tracing::warn!(nr = passed.nr_left(), "the service manager passed sockets that the configuration lacks");
    }
    // SAFETY: the folder was locked above, and no file there was opened since. The lock ends with
    // the process, or below, where the orphans are dropped before it.
    let orphans = unsafe { takeover::orphans(&runtime_folder) }
        .map_err(|error| DaemonError::Folder { folder: runtime_folder.clone(), error })?;
    let metrics = config.metrics.as_ref().map(http::Listener::bind).transpose().map_err(DaemonError::Metrics)?;
    let boot = takeover::boot().map_err(system("read the boot id"))?;
    sandbox::enter(config.sandbox, &files(config, &runtime_folder))?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .thread_name("slat-pager")
        .enable_all()
        .build()
        .map_err(system("start a runtime"))?;
    let (leave, left) = watch::channel(false);
    let daemon = Daemon {
        runtime_folder,
        boot,
        slots: Arc::new(Semaphore::new(config.max_vms.min(Semaphore::MAX_PERMITS))),
        tasks: TaskTracker::new(),
        leave: left,
        served: Mutex::default(),
    };
    let start = Start { listeners, orphans, passed, metrics };
    let result = runtime.block_on(run(Arc::new(daemon), config, start, leave));
    // Reads that are under way are of no use any more.
    runtime.shutdown_timeout(Duration::from_secs(1));
    // A thread that does not end has its machine still: the folder is free when the process has
    // ended.
    std::mem::forget(lock);
    result
}

/// What was opened before rights were given up.
struct Start {
    listeners: Vec<StdListener>,
    orphans: Vec<Orphan>,
    /// Listeners were taken from it.
    passed: Passed,
    metrics: Option<http::Listener>,
}

async fn run(
    daemon: Arc<Daemon>,
    config: &Config,
    mut start: Start,
    leave: watch::Sender<bool>,
) -> Result<(), DaemonError> {
    let metrics = start.metrics.take();
    let system = |what| move |error| DaemonError::System { what, error };
    let mut end = signal(SignalKind::terminate()).map_err(system("wait for signals"))?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(system("wait for signals"))?;
    let registry = Registry::new();
    let with = OpenWith {
        cache: match config.sockets.iter().any(|socket| socket.memory.is_fetched()) {
            true => Some(BlockCache::new(&config.cache.options()).map_err(DaemonError::Cache)?),
            false => None,
        },
        store_options: config.store.0.clone().into_iter().collect(),
        tls: config.tls.clone(),
    };
    if let Some(cache) = &with.cache {
        let metrics = Box::new(CacheMetrics::new(Arc::clone(cache)));
        registry.register(metrics).map_err(|error| DaemonError::Metrics(io::Error::other(error)))?;
    }
    serve_sockets(&daemon, config, &with, &registry, start).await?;
    if let Some(metrics) = metrics {
        tokio::spawn(metrics.serve(registry));
    }
    // It fails without a service manager.
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    tokio::select! {
        _ = end.recv() => {}
        _ = interrupt.recv() => {}
    }
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    leave.send_replace(true);
    daemon.tasks.close();
    if tokio::time::timeout(Duration::from_secs(10), daemon.tasks.wait()).await.is_err() {
        tracing::warn!("a machine's thread does not end");
    }
    Ok(())
}

/// Begins to serve each socket, and waits until the snapshot of each was opened or could not be.
///
/// # Errors
/// There is none that could.
async fn serve_sockets(
    daemon: &Arc<Daemon>,
    config: &Config,
    with: &OpenWith,
    registry: &Registry,
    start: Start,
) -> Result<(), DaemonError> {
    let Start { listeners, mut orphans, passed, .. } = start;
    let system = |what| move |error| DaemonError::System { what, error };
    let whole = Budget::new(config.read_memory);
    let budget = || if config.sockets.len() > 1 { whole.of_source() } else { whole.clone() };
    let listen = |listener| UnixListener::from_std(listener).map_err(system("listen"));
    let listeners = listeners.into_iter().map(listen).collect::<Result<Vec<_>, _>>()?;
    let passed = Arc::new(Mutex::new(passed));
    let mut tries = Vec::new();
    for (socket, listener) in config.sockets.iter().zip(listeners) {
        let is_its = |orphan: &Orphan| orphan.description.socket == socket.path;
        let (its, others) = orphans.into_iter().partition(is_its);
        orphans = others;
        let opening = Opening {
            config: socket.clone(),
            with: with.clone(),
            budget: budget(),
            registry: registry.clone(),
            listener,
            orphans: its,
            passed: Arc::clone(&passed),
        };
        let (tried, first_try) = oneshot::channel();
        tokio::spawn(opening.serve(Arc::clone(daemon), tried));
        tries.push(first_try);
    }
    for Orphan { description, .. } in &orphans {
        tracing::error!(socket = %description.socket.display(), pid = description.pid,
            "a machine of a socket that is not served any more; it waits");
    }
    drop((passed, orphans));
    let (mut nr_served, mut failed) = (0, Vec::new());
    for first_try in tries {
        match first_try.await {
            Ok(Ok(())) => nr_served += 1,
            Ok(Err(error)) => failed.push(error),
            Err(_) => failed.push(system("open a snapshot")(io::Error::other("its task has panicked"))),
        }
    }
    for error in failed {
        if nr_served == 0 {
            return Err(error);
        }
        tracing::error!(%error, "a socket is not served yet");
    }
    Ok(())
}

async fn open(
    config: &SocketConfig,
    with: &OpenWith,
    budget: Budget,
    registry: &Registry,
) -> Result<Socket, DaemonError> {
    let opened = config.memory.open(with).await;
    let source = opened.map_err(|error| DaemonError::Snapshot { name: config.memory.to_string(), error })?;
    let metrics = Metrics::new(&config.path.to_string_lossy());
    metrics.register(registry).map_err(|error| DaemonError::Metrics(io::Error::other(error)))?;
    let limits = Limits {
        budget,
        vm_bytes: config.vm_read_memory,
        read_timeout: config.read_timeout,
        patience: config.patience,
    };
    let attaching = Arc::new(Semaphore::new(MOST_ATTACHING));
    Ok(Socket { config: config.clone(), source, metrics: Arc::new(metrics), limits, attaching })
}

/// A socket whose snapshot is to be opened.
struct Opening {
    config: SocketConfig,
    with: OpenWith,
    budget: Budget,
    registry: Registry,
    listener: UnixListener,
    /// The machines that a dead pager has left on it.
    orphans: Vec<Orphan>,
    /// What the service manager has kept. What no machine takes, it has still.
    passed: Arc<Mutex<Passed>>,
}

impl Opening {
    /// Opens the snapshot, takes its machines over, and accepts others. `tried` is sent how the first
    /// try ended.
    async fn serve(self, daemon: Arc<Daemon>, tried: oneshot::Sender<Result<(), DaemonError>>) {
        let Opening { config, with, budget, registry, listener, orphans, passed } = self;
        let (mut tried, mut pause) = (Some(tried), FIRST_PAUSE);
        let socket = loop {
            let error = match open(&config, &with, budget.clone(), &registry).await {
                Ok(socket) => break Arc::new(socket),
                Err(error) => error,
            };
            match tried.take() {
                // The receiver goes with the daemon.
                Some(tried) => drop(tried.send(Err(error))),
                None => tracing::warn!(socket = %config.path.display(), %error, "it is not served yet"),
            }
            tokio::time::sleep(pause).await;
            pause = (2 * pause).min(LONGEST_PAUSE);
        };
        for orphan in orphans {
            machine::take_over(&daemon, &socket, orphan, &mut passed.lock());
        }
        drop(passed);
        tracing::info!(socket = %config.path.display(), memory = %config.memory,
            size_bytes = socket.source.size_bytes(), "serving");
        if let Some(tried) = tried {
            let _ = tried.send(Ok(()));
        }
        accept(daemon, socket, listener).await;
    }
}

async fn accept(daemon: Arc<Daemon>, socket: Arc<Socket>, listener: UnixListener) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => machine::serve(&daemon, &socket, stream),
            Err(error) => {
                // No descriptors or no memory, for now.
                tracing::error!(%error, "cannot accept a monitor");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// The files of sources and of all else.
fn files(config: &Config, runtime_folder: &Path) -> Files {
    let mut files = Files { read: Vec::new(), write: vec![runtime_folder.to_path_buf()] };
    files.write.extend(config.cache.folder.clone());
    if let Some(tls) = &config.tls {
        files.read.extend([tls.certificates.clone(), tls.key.clone(), tls.authorities.clone()]);
    }
    for socket in &config.sockets {
        match &socket.memory {
            SnapshotName::File(path) => files.read.push(path.clone()),
            // What is beside them says what they have.
            SnapshotName::Layers(base, layers) => {
                files.read.extend([base].into_iter().chain(layers).filter_map(|path| path.parent()).map(parent_folder));
            }
            SnapshotName::Chunks(index) if !index.contains("://") => {
                files.read.extend(Path::new(index).parent().map(parent_folder));
            }
            SnapshotName::Chunks(_) | SnapshotName::Object(_) | SnapshotName::Peer { .. } => {}
        }
        files.write.extend(socket.working_set.as_deref().and_then(Path::parent).map(parent_folder));
    }
    if config.sandbox != SandboxMode::Off {
        tracing::debug!(?files, "the files of the sandbox");
    }
    files
}

/// The folder of a file that is named without one is the present one.
fn parent_folder(parent: &Path) -> PathBuf {
    if parent.as_os_str().is_empty() { PathBuf::from(".") } else { parent.to_path_buf() }
}

/// As many descriptors and as much locked memory as the process may have: a machine takes four
/// descriptors and a locked page.
fn raise_limits() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    for resource in [Resource::Nofile, Resource::Memlock] {
        let mut limit = getrlimit(resource);
        limit.current = limit.maximum;
        if let Err(error) = setrlimit(resource, limit) {
            tracing::debug!(?resource, %error, "a limit stays");
        }
    }
}
