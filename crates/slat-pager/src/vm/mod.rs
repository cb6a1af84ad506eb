//! One virtual machine that is served.
//!
//! # Guarantees
//! - A page gets what the snapshot has, or zeros once the monitor has given it up. What cannot be
//!   had is never replaced by anything else: the thread waits ([`OnFailure::Pause`]), or fails as
//!   with broken memory ([`OnFailure::Poison`]).
//! - A machine has threads of its own, a bounded share of the memory for reads, and nothing else
//!   that another machine needs. So it can harm or starve no other.
//! - When a [`Vm`] is dropped, pages that were not brought fail from then on; they never read as
//!   zeros. [`Vm::leave`] and [`WhenDropped::Leave`] leave the machine as it is instead, for a
//!   successor. A monitor in the same process unmaps the memory only after that.
//!
//! # Use
//! ```no_run
//! # use std::sync::Arc;
//! # use slat_pager::{source::Source, vm::{Region, Vm, Options}, userfaultfd::Userfaultfd};
//! # fn example(userfaultfd: Userfaultfd, source: Arc<dyn Source>) -> Result<(), Box<dyn std::error::Error>> {
//! let region = Region { address: 0x7f00_0000_0000, size_bytes: 1 << 30, offset: 0, page_bytes: 4096 };
//! let vm = slat_pager::attach(userfaultfd.into(), &[region], source)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Implementation
//! A message is read (`serve`), its page and those around it are claimed ([`pages`]), their bytes
//! are taken from the source's mapping or read ([`fetch`]), and one call puts them in place
//! ([`install`]). What must outlive the pager is in [`state`]. vCPUs that use a file of the monitor
//! ask for pages by it ([`userfault_bitmap`], [`vcpu_faults`]).

mod close;
pub mod fetch;
pub mod install;
pub mod pages;
mod populate;
pub mod regions;
mod serve;
pub mod state;
pub mod userfault_bitmap;
pub mod vcpu_faults;

use std::fmt::Debug;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFlags};
use thiserror::Error;
use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::metrics::Metrics;
use crate::shared_memory::SharedMemory;
use crate::source::{PAGE_BYTES, Source};
use crate::userfaultfd::{NotUserfaultfd, Userfaultfd};
use close::Children;
use fetch::{Limits, MAX_WORDS, Queue};
use install::Installer;
use pages::Pages;
pub use regions::{Region, RegionError, Regions};
use state::State;
use userfault_bitmap::UserfaultBitmap;
use vcpu_faults::{Requests, VcpuFaults};

/// Bytes of the pages that a fault brings, by default.
pub const GRANULE_BYTES: u64 = 64 << 10;

/// The most that a fault on a page of 4 KiB brings.
const MOST_GRANULE_BYTES: u64 = MAX_WORDS as u64 * 64 / 2 * PAGE_BYTES;

/// What becomes of a thread whose page cannot be had.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnFailure {
    /// Its access fails like one to broken memory (SIGBUS).
    #[default]
    Poison,
    /// It waits, until the source is there again or a successor takes over.
    Pause,
}

/// What becomes of pages that were not brought when a [`Vm`] is dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum WhenDropped {
    /// They fail: no one else serves them.
    #[default]
    Fail,
    /// Their threads wait for a successor, as after [`Vm::leave`].
    Leave,
}

/// Is told of faults.
pub trait Observer: Debug + Send + Sync {
    /// A thread waits for the page at `offset` of the snapshot, which was absent. Called by a fault
    /// thread: it must not wait.
    fn faulted(&self, offset: u64);
}

/// How a machine is served.
#[derive(Clone, Debug)]
pub struct Options {
    /// For logs.
    pub name: String,
    /// Threads that read faults.
    pub nr_threads: NonZeroUsize,
    /// Pages of so many bytes around a fault are filled with it: a power of two. The source's
    /// granule, if that is more.
    pub granule_bytes: u64,
    /// What becomes of a thread whose page cannot be had.
    pub on_failure: OnFailure,
    /// What becomes of the rest when the machine is dropped, or its threads cannot be started.
    pub when_dropped: WhenDropped,
    /// Of reads.
    pub limits: Limits,
    /// Where it is counted.
    pub metrics: Arc<Metrics>,
    /// Is told of faults.
    pub observer: Option<Arc<dyn Observer>>,
    /// Memory of the same snapshot that the machine maps privately, and that other machines map,
    /// too: its pages are filled once for all of them, and mapped. A page that is given up without
    /// a message (a userfaultfd without EVENT_REMOVE) comes back as the snapshot has it: the kernel
    /// does not say whether it has reclaimed the page or the monitor has given it up. `None`: the
    /// machine's memory is its own, and gets copies.
    pub shared_memory: Option<Arc<SharedMemory>>,
    /// Where vCPUs use a file of the monitor, and not its mapping: at which pages they leave the guest.
    /// Not together with `shared_memory`.
    pub userfault_bitmap: Option<Arc<UserfaultBitmap>>,
    /// Runs reads. `None`: the runtime of the caller, or one that this library makes.
    pub runtime: Option<Handle>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            name: String::new(),
            nr_threads: NonZeroUsize::MIN,
            granule_bytes: GRANULE_BYTES,
            on_failure: OnFailure::default(),
            when_dropped: WhenDropped::default(),
            limits: Limits::default(),
            metrics: Arc::default(),
            observer: None,
            shared_memory: None,
            userfault_bitmap: None,
            runtime: None,
        }
    }
}

/// Why a machine is not served.
#[derive(Debug, Error)]
pub enum AttachError {
    /// The descriptor.
    #[error(transparent)]
    Descriptor(#[from] NotUserfaultfd),
    /// The regions.
    #[error("the regions are wrong: {0}")]
    Regions(#[from] RegionError),
    /// A page is more than 2 MiB and than the machine's reads may have ([`Limits::vm_bytes`]).
    #[error("a page has {page_bytes} bytes; reads of a machine may have {vm_bytes}")]
    LargePages {
        /// Of the region.
        page_bytes: u64,
        /// Of the machine.
        vm_bytes: u64,
    },
    /// The state is that of another machine.
    #[error("the state that was kept is of other regions")]
    OtherState,
    /// The bitmap of the machine's vCPUs.
    #[error(transparent)]
    UserfaultBitmap(#[from] userfault_bitmap::UserfaultBitmapError),
    /// The shared memory is of another snapshot.
    #[error("the shared memory is of another snapshot than the machine")]
    OtherMemory,
    /// The machine's monitor is gone, or refuses.
    #[error(transparent)]
    Call(#[from] crate::userfaultfd::CallError),
    /// No thread, no memory.
    #[error("cannot {what}: {error}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The reason.
        error: io::Error,
    },
}

/// Why a machine is not served any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// Its monitor has ended.
    Gone,
    /// The pager has stopped.
    Stopped,
    /// The descriptor cannot be read.
    Failed(String),
}

/// What the threads and reads of a machine share.
#[derive(Debug)]
struct Shared {
    installer: Installer,
    source: Arc<dyn Source>,
    options: Options,
    runtime: Handle,
    /// An eventfd: something was read, or the machine has ended.
    wakeup: OwnedFd,
    queue: Mutex<Queue>,
    ended: watch::Sender<Option<End>>,
    /// The monitor has said something untrue: nothing more is filled.
    is_distrusted: AtomicBool,
    children: Mutex<Children>,
    requests: Mutex<Requests>,
}

impl Shared {
    fn wake_up(&self) {
        // It fails when its counter is full: then the threads are awake.
        let _ = rustix::io::write(&self.wakeup, &1_u64.to_ne_bytes());
    }

    fn end(&self, why: End) {
        self.ended.send_if_modified(|ended| {
            let is_first = ended.is_none();
            if is_first {
                *ended = Some(why);
            }
            is_first
        });
        self.wake_up();
    }

    fn has_ended(&self) -> bool {
        self.ended.borrow().is_some()
    }

    fn is_distrusted(&self) -> bool {
        self.is_distrusted.load(Ordering::Relaxed)
    }
}

/// A machine that is served.
#[derive(Debug)]
pub struct Vm {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    is_left: bool,
}

/// Serves the faults of `uffd` on `regions` from `source`, as [`Options::default`] says.
///
/// # Errors
/// [`AttachError`].
pub fn attach(uffd: OwnedFd, regions: &[Region], source: Arc<dyn Source>) -> Result<Vm, AttachError> {
    let userfaultfd = Userfaultfd::from_fd(uffd)?;
    let regions = Regions::new(regions, source.size_bytes())?;
    let options = Options::default();
    let state = State::anonymous(options.nr_threads.get(), regions.nr_words())
        .map_err(|error| AttachError::System { what: "have memory for a machine's pages", error })?;
    Vm::attach(userfaultfd, regions, source, state, options)
}

impl Vm {
    /// Serves the faults of `userfaultfd` on `regions` from `source`. `state` may have come from a
    /// pager that has died.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn attach(
        userfaultfd: impl Into<Arc<Userfaultfd>>,
        regions: Regions,
        source: Arc<dyn Source>,
        state: State,
        options: Options,
    ) -> Result<Vm, AttachError> {
        options.check(&regions, &*source, &state)?;
        let runtime = match options.runtime.clone().map(Ok).unwrap_or_else(Handle::try_current) {
            Ok(runtime) => runtime,
            Err(_) => shared_runtime().map_err(|error| AttachError::System { what: "start a runtime", error })?,
        };
        let state = Arc::new(state);
        let pages = Pages::new(Arc::clone(&state));
        let wakeup = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| AttachError::System { what: "make an eventfd", error: error.into() })?;
        let installer = Installer::new(userfaultfd.into(), regions, pages, options.userfault_bitmap.clone())
            .map_err(|error| AttachError::System { what: "map zeros", error })?;
        // Threads whose messages a dead pager has read fault again, and wait for ours. Where the
        // kernel has no such addresses, no page of them can be poisoned either.
        installer.wake_all()?;
        let shared = Arc::new(Shared {
            installer,
            source,
            runtime,
            wakeup,
            queue: Mutex::default(),
            ended: watch::channel(None).0,
            is_distrusted: AtomicBool::new(false),
            children: Mutex::default(),
            requests: Mutex::default(),
            options,
        });
        let nr_threads = shared.options.nr_threads.get();
        let buffers: Vec<_> = std::iter::from_fn(|| state.take_buffer()).collect();
        let mut servers: Vec<_> = buffers.into_iter().map(|b| serve::Server::new(Arc::clone(&shared), b)).collect();
        // What a dead pager has read and perhaps not noted, by all of its buffers.
        servers.iter_mut().for_each(serve::Server::note_left_removals);
        servers.truncate(nr_threads);
        // From here on, if this fails: as when it is dropped.
        let is_left = shared.options.when_dropped == WhenDropped::Leave;
        let mut vm = Vm { shared, threads: Vec::with_capacity(nr_threads), is_left };
        vm.shared.options.metrics.vms.inc();
        vm.shared.options.metrics.vms_served.inc();
        for server in servers {
            let thread = std::thread::Builder::new().name("slat-fault".to_string()).stack_size(256 << 10);
            let thread = thread.spawn(move || server.run());
            vm.threads.push(thread.map_err(|error| AttachError::System { what: "start a thread", error })?);
        }
        Ok(vm)
    }

    /// Changes once the machine has ended.
    pub fn ended(&self) -> watch::Receiver<Option<End>> {
        self.shared.ended.subscribe()
    }

    /// The regions.
    pub fn regions(&self) -> &Regions {
        &self.shared.installer.regions
    }

    /// Bytes of pages that were filled and not given up since.
    pub fn present_bytes(&self) -> u64 {
        // Regions may have pages of different sizes.
        let present = self.shared.installer.pages.state().present();
        let of_region = |placed: &regions::Placed| {
            let words = pages::masks(placed.pages());
            let nr =
                |(word, mask): (usize, u64)| u64::from((present[word].load(Ordering::Relaxed) & mask).count_ones());
            words.map(nr).sum::<u64>() * placed.region.page_bytes
        };
        self.regions().all().iter().map(of_region).sum()
    }

    /// Fills pages from threads of the caller, beside faults.
    pub fn populator(&self) -> Populator {
        Populator { shared: Arc::clone(&self.shared) }
    }

    /// Brings pages for vCPUs, whose memory is a file of the monitor; `None` if it is not.
    pub fn vcpu_faults(&self) -> Option<VcpuFaults> {
        let memory = Arc::clone(self.shared.installer.userfault_bitmap.as_ref()?);
        Some(VcpuFaults { shared: Arc::clone(&self.shared), memory })
    }

    /// Stops to serve, and leaves the machine as it is: another process has a copy of the
    /// descriptor and serves on.
    pub fn leave(mut self) {
        self.is_left = true;
    }

    /// The monitor has ended: what was kept for a successor is removed. No page is poisoned: a
    /// process that lives on may have other memory at these addresses, and the kernel takes the
    /// calls of a descriptor for memory of another one of the same process.
    pub fn forget(mut self) {
        self.is_left = true;
        self.shared.end(End::Gone);
        self.shared.installer.pages.state().forget();
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.shared.end(End::Stopped);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!(vm = self.shared.options.name, "a fault thread has panicked");
            }
        }
        self.shared.options.metrics.vms.dec();
        if !self.is_left {
            self.shared.fail_closed();
        }
    }
}

/// Fills pages of a machine that no fault has asked for.
#[derive(Clone, Debug)]
pub struct Populator {
    shared: Arc<Shared>,
}

impl Populator {
    /// Fills the absent pages of the `offsets` of the snapshot, and returns how many bytes that
    /// were. Waits for the source; pages that another thread has claimed are left to it. Stops
    /// early once the machine has ended, or its monitor was wrong about its memory.
    ///
    /// # Errors
    /// Of the source, without another try. Pages that were not filled are absent again.
    pub fn populate(&self, offsets: std::ops::Range<u64>) -> Result<u64, crate::source::SourceError> {
        self.shared.populate(offsets)
    }

    /// Where the bytes come from.
    pub fn source(&self) -> &dyn Source {
        &*self.shared.source
    }

    /// Whether faults wait to be read.
    pub fn faults_wait(&self) -> bool {
        let mut userfaultfd = [rustix::event::PollFd::new(&*self.shared.installer.userfaultfd, PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut userfaultfd, Some(&now)).is_ok_and(|nr_ready| nr_ready > 0)
    }

    /// Whether nothing is filled any more: the machine has ended, or its monitor was wrong about its
    /// memory.
    pub fn is_over(&self) -> bool {
        self.shared.has_ended() || self.shared.is_distrusted()
    }
}

fn shared_runtime() -> io::Result<Handle> {
    static RUNTIME: OnceLock<tokio::runtime::Runtime> = OnceLock::new();
    if let Some(runtime) = RUNTIME.get() {
        return Ok(runtime.handle().clone());
    }
    let made = tokio::runtime::Builder::new_multi_thread().thread_name("slat-source").enable_all().build()?;
    Ok(RUNTIME.get_or_init(|| made).handle().clone())
}

impl Options {
    /// Whether what belongs to a machine fits together.
    fn check(&self, regions: &Regions, source: &dyn Source, state: &State) -> Result<(), AttachError> {
        if !state.fits(regions.nr_words()) {
            return Err(AttachError::OtherState);
        }
        // A page is read whole: a larger one would take the memory of other machines' reads.
        let vm_bytes = self.limits.vm_bytes.max(MOST_GRANULE_BYTES);
        let page_bytes = regions.all().iter().map(|placed| placed.region.page_bytes).max().unwrap_or(PAGE_BYTES);
        if page_bytes > vm_bytes {
            return Err(AttachError::LargePages { page_bytes, vm_bytes });
        }
        if self.shared_memory.as_ref().is_some_and(|memory| memory.identity() != source.identity()) {
            return Err(AttachError::OtherMemory);
        }
        Ok(())
    }

    /// Bytes that a fault in a region with pages of `page_bytes` brings.
    fn granule_bytes(&self, source: &dyn Source, page_bytes: u64) -> u64 {
        let granule_bytes = self.granule_bytes.next_power_of_two().max(source.granule_bytes());
        granule_bytes.clamp(PAGE_BYTES, MOST_GRANULE_BYTES).max(page_bytes)
    }
}
