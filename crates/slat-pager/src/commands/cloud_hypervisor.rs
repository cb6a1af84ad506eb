//! `slat-pager store` and `slat-pager restore`: Cloud Hypervisor's snapshots.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use clap::{Args, ValueEnum};
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use tokio::runtime::{Handle, Runtime};

use super::{CacheArgs, TlsArgs, print_line};
use crate::linux::unix_socket;
use crate::protocol::cloud_hypervisor::config::Slot;
use crate::protocol::cloud_hypervisor::folder::{CONFIG, STATE, check_free, memory_name};
use crate::protocol::cloud_hypervisor::memory::GuestMemory;
use crate::protocol::cloud_hypervisor::restore::{self, Memory, Record, Restored, Snapshot, Then, Timeouts, whole};
use crate::protocol::cloud_hypervisor::{self, OnFailure, config};
use crate::snapshot::{OpenWith, SnapshotName};
use crate::source::Source;
use crate::source::cache::BlockCache;
use crate::working_set::Plan;
use crate::working_set::record::DEFAULT_BYTES;
use crate::working_set::replay::{Progress, nr_threads, replay};

/// The working set, in the folder of the snapshot.
const WORKING_SET: &str = "working-set";

/// Take a snapshot from Cloud Hypervisor.
///
/// The VMM is told `pause`, and then `send-migration destination_url=unix:SOCKET,local=on`. It ends
/// once the snapshot is durable.
#[derive(Debug, Args)]
pub struct Store {
    /// Where the VMM connects.
    #[arg(long)]
    pub socket: PathBuf,
    /// The folder that is made for the snapshot.
    #[arg(long, value_name = "FOLDER")]
    pub to: PathBuf,
    /// How long the VMM has for each of its messages.
    #[arg(long, default_value = "60s", value_parser = humantime::parse_duration)]
    pub timeout: Duration,
}

/// Restore a snapshot in Cloud Hypervisor, page by page.
///
/// The VMM is told `receive-migration receiver_url=unix:SOCKET,memory_mode=postcopy` before or
/// after. Ends with the VM, or once it has all its memory.
#[derive(Debug, Args)]
pub struct Restore {
    /// Where the VMM listens.
    #[arg(long)]
    pub socket: PathBuf,
    /// The folder of the snapshot.
    #[arg(long, value_name = "FOLDER")]
    pub from: PathBuf,
    /// The memory of each slot, if it is not in the folder: the name of a snapshot (chunks:...,
    /// s3://...), in which `{slot}` is the slot's number.
    #[arg(long, value_name = "NAME")]
    pub memory: Option<String>,
    /// What the VM does once it is restored.
    #[arg(long, value_enum, default_value = "run")]
    pub then: Then,
    /// When its memory comes.
    #[arg(long, value_enum, default_value = "on-demand")]
    pub memory_comes: MemoryComes,
    /// What was fetched is kept.
    #[command(flatten)]
    pub cache: CacheArgs,
    /// For peers.
    #[command(flatten)]
    pub tls: TlsArgs,
    /// The working set: recorded to FILE if there is none, replayed if there is. [default:
    /// `working-set` in the folder]
    #[arg(long, value_name = "FILE")]
    pub working_set: Option<PathBuf>,
    /// What becomes of a guest whose page can never be had.
    #[arg(long, value_enum, default_value = "exit")]
    pub on_failure: OnFailure,
    /// How long the VMM has for each of its messages, and to listen.
    #[arg(long, default_value = "60s", value_parser = humantime::parse_duration)]
    pub timeout: Duration,
}

/// When memory comes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum MemoryComes {
    /// When it is touched.
    OnDemand,
    /// When it is touched, and the rest beside that.
    OnDemandAndAll,
    /// All before the VM is there. The VMM is not told `memory_mode=postcopy`.
    Before,
}

/// Takes a snapshot.
///
/// # Errors
/// [`cloud_hypervisor::Error`]; of the socket.
pub fn store(options: &Store) -> Result<(), Box<dyn Error>> {
    // The VMM is paused when it connects: what is wrong with the folder is said before.
    check_free(&options.to)?;
    let listener = unix_socket::bind(&options.socket)?;
    tracing::info!("waiting for a VMM at {}", options.socket.display());
    let bar = spinner(format!("waiting for a VMM at {}", options.socket.display()));
    let accepted = listener.accept();
    // One snapshot: nothing else may connect.
    std::fs::remove_file(&options.socket)?;
    bar.set_message("taking a snapshot");
    let stored = cloud_hypervisor::store::store(accepted?.0, &options.to, options.timeout)?;
    bar.finish_and_clear();
    let (data, memory) = (HumanBytes(stored.data_bytes), HumanBytes(stored.memory_bytes));
    print_line(format_args!("{}: {data} of {memory} memory", options.to.display()))?;
    Ok(())
}

/// Restores a snapshot, and serves the VM until it ends.
///
/// # Errors
/// [`cloud_hypervisor::Error`]; of the snapshot.
pub fn restore(options: &Restore) -> Result<(), Box<dyn Error>> {
    let runtime = Runtime::new()?;
    let snapshot = runtime.block_on(open(options))?;
    let memory = match options.memory_comes {
        MemoryComes::Before => Memory::Before,
        MemoryComes::OnDemand | MemoryComes::OnDemandAndAll => {
            Memory::OnDemand { record: Record::UpTo(DEFAULT_BYTES), on_failure: options.on_failure }
        }
    };
    let bar = spinner(format!("restoring in the VMM at {}", options.socket.display()));
    let timeouts = Timeouts { listen: options.timeout, frame: options.timeout };
    let restored = restore::restore(&options.socket, &snapshot, memory, options.then, timeouts, runtime.handle())?;
    bar.finish_and_clear();
    if options.memory_comes == MemoryComes::Before {
        return Ok(restored.wait()?);
    }
    let nr_threads = snapshot.memory.values().map(|source| nr_threads(&**source)).max().unwrap_or(1);
    serve(options, restored, nr_threads, runtime.handle())
}

/// Replays or records the working set, fills the rest if that is asked for, and waits for the end.
fn serve(options: &Restore, restored: Restored, nr_threads: usize, runtime: &Handle) -> Result<(), Box<dyn Error>> {
    let file = options.working_set.clone().unwrap_or_else(|| options.from.join(WORKING_SET));
    let memory = Arc::clone(restored.memory());
    let plan = Plan::new(&file, memory.identity(), || restored.recorder().cloned());
    let progress = Arc::new(Progress::default());
    let (ended, end) = tokio::sync::oneshot::channel::<()>();
    let fills_all = options.memory_comes == MemoryComes::OnDemandAndAll;
    let filling = runtime.spawn({
        let (memory, progress) = (Arc::clone(&memory), Arc::clone(&progress));
        async move {
            let gone = async {
                // Dropped at the end.
                let _ = end.await;
            };
            plan.run(file, memory, nr_threads, progress, gone).await;
        }
    });
    let filling_all = fills_all.then(|| fill_all(memory, nr_threads, Arc::clone(&progress)));
    let served = restored.wait();
    progress.stop();
    drop(ended);
    runtime.block_on(filling)?;
    if let Some(thread) = filling_all {
        thread.join().map_err(|_| "the thread that fills memory has panicked")?;
    }
    Ok(served?)
}

fn fill_all(memory: Arc<GuestMemory>, nr_threads: usize, progress: Arc<Progress>) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        if let Err(error) = replay(&whole(&memory), &*memory, nr_threads, &progress) {
            tracing::warn!(%error, "the rest of the memory comes by faults");
        }
    })
}

/// The names of the memory of slots, which may need a cache.
fn names(options: &Restore, slots: &[Slot]) -> Result<Vec<(u32, SnapshotName)>, Box<dyn Error>> {
    let name = |slot: &Slot| match &options.memory {
        Some(name) if !name.contains("{slot}") => Err("--memory has no {slot}".into()),
        Some(name) => Ok((slot.number, name.replace("{slot}", &slot.number.to_string()).parse()?)),
        None => Ok((slot.number, SnapshotName::File(options.from.join(memory_name(slot.number))))),
    };
    slots.iter().map(name).collect()
}

async fn open(options: &Restore) -> Result<Snapshot, Box<dyn Error>> {
    let read = |name: &str| {
        let path = options.from.join(name);
        std::fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))
    };
    let (configuration, state) = (read(CONFIG)?, read(STATE)?);
    let names = names(options, &config::slots(&configuration)?)?;
    let cache = match names.iter().any(|(_, name)| name.is_fetched()) {
        true => Some(BlockCache::new(&options.cache.config().options())?),
        false => None,
    };
    let with = OpenWith { cache, tls: options.tls.files(), ..OpenWith::default() };
    let mut memory: BTreeMap<u32, Arc<dyn Source>> = BTreeMap::new();
    for (slot, name) in names {
        memory.insert(slot, name.open(&with).await?);
    }
    Ok(Snapshot { config: configuration, state, memory })
}

fn spinner(message: String) -> ProgressBar {
    let bar = ProgressBar::new_spinner().with_message(message);
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}
