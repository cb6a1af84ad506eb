//! The guest of a measurement: a process of its own, with memory that comes from a pager and
//! threads that touch it. It speaks Firecracker's handshake.

#![expect(unsafe_code, reason = "the memory of the guest is a mapping that a pager fills")]

use std::io::{self, BufRead, BufReader, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::{Deserialize, Serialize};

use super::snapshot;
use crate::source::PAGE_BYTES;
use crate::userfaultfd::{RegisterMode, Userfaultfd, features};

/// The arguments that make a process of this program a guest.
const ARGUMENTS: [&str; 2] = ["bench", "--guest"];

/// What a guest does.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Spec {
    pub(super) socket: PathBuf,
    pub(super) size_bytes: u64,
    pub(super) memory: GuestMemory,
    /// The pages that it touches, in this order, shared among the threads.
    pub(super) pages: Vec<u32>,
    pub(super) nr_threads: usize,
    /// The first touches of so many pages are the first work.
    pub(super) nr_first: usize,
    /// Each so-many-th page is written, too. 0: none.
    pub(super) write_each: usize,
}

/// What the memory of a guest is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum GuestMemory {
    /// Its own, as Firecracker's.
    Anonymous,
    /// A private mapping of a file that all clones share.
    Private(PathBuf),
}

impl GuestMemory {
    fn features(&self) -> u64 {
        match self {
            GuestMemory::Anonymous => features::EVENT_REMOVE,
            GuestMemory::Private(_) => features::MISSING_SHMEM | features::MINOR_SHMEM,
        }
    }
}

/// Whether guests can be.
///
/// # Errors
/// No userfaultfd for this user, or one that lacks what guests need.
pub(super) fn check() -> io::Result<()> {
    let all = [GuestMemory::Anonymous, GuestMemory::Private(PathBuf::new())];
    all.iter().try_for_each(|memory| Userfaultfd::open(memory.features()).map(drop)).map_err(io::Error::other)
}

/// What a guest has seen.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Seen {
    /// From before the handshake to the end of the first work, and of all.
    pub(super) first_s: f64,
    pub(super) whole_s: f64,
    /// The longest wait for a page.
    pub(super) longest_s: f64,
    /// Memory that only this guest has.
    pub(super) own_bytes: u64,
    pub(super) nr_wrong: u64,
}

/// A guest that runs.
#[derive(Debug)]
pub(super) struct Guest {
    child: Child,
    said: BufReader<std::process::ChildStdout>,
}

impl Guest {
    pub(super) fn start(spec: &Spec) -> io::Result<Guest> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(ARGUMENTS)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut stdin = child.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
        stdin.write_all(&serde_json::to_vec(spec)?)?;
        let stdout = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        Ok(Guest { child, said: BufReader::new(stdout) })
    }

    /// Readable once it has ended, before it says anything.
    pub(super) fn output(&self) -> BorrowedFd<'_> {
        self.said.get_ref().as_fd()
    }

    /// Waits until it has touched all.
    pub(super) fn seen(&mut self) -> io::Result<Seen> {
        let mut line = String::new();
        self.said.read_line(&mut line)?;
        let seen: Seen = serde_json::from_str(&line)?;
        if seen.nr_wrong > 0 {
            return Err(io::Error::other(format!("{} pages have wrong bytes", seen.nr_wrong)));
        }
        Ok(seen)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // It waits for this; it may be gone.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A mapping that is never unmapped.
#[derive(Clone, Copy)]
struct Memory {
    start: NonNull<u8>,
    nr_pages: u64,
}

// SAFETY: threads access it by atomic reads and writes of words alone.
unsafe impl Send for Memory {}
// SAFETY: as for `Send`.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(spec: &Spec) -> io::Result<Memory> {
        let nr_bytes = spec.size_bytes as usize;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let start = match &spec.memory {
            // SAFETY: a new mapping, where the kernel likes.
            GuestMemory::Anonymous => unsafe { mmap_anonymous(std::ptr::null_mut(), nr_bytes, protection, flags) },
            GuestMemory::Private(path) => {
                let file = std::fs::File::open(path)?;
                // SAFETY: as above.
                unsafe { mmap(std::ptr::null_mut(), nr_bytes, protection, flags, file.as_fd(), 0) }
            }
        }?;
        if matches!(spec.memory, GuestMemory::Anonymous) {
            // SAFETY: advice about the mapping that was just made; pages come one by one.
            let _ = unsafe { madvise(start, nr_bytes, Advice::LinuxNoHugepage) };
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Memory { start, nr_pages: spec.size_bytes / PAGE_BYTES })
    }

    fn address(self) -> u64 {
        self.start.as_ptr().expose_provenance() as u64
    }

    /// The first two words of a page.
    fn words(self, page: u32) -> &'static [AtomicU64; 2] {
        assert!(u64::from(page) < self.nr_pages);
        // SAFETY: the page is in the mapping, which stays, and is aligned. All accesses are atomic.
        unsafe { self.start.add(page as usize * PAGE_BYTES as usize).cast().as_ref() }
    }

    fn touch(self, page: u32) -> u64 {
        self.words(page)[0].load(Ordering::Relaxed)
    }

    fn write(self, page: u32) {
        self.words(page)[1].store(7, Ordering::Relaxed);
    }
}

/// What the process of a guest does: it takes its [`Spec`] from its input, and writes what it has
/// seen to its output. Then it waits to be killed.
///
/// # Errors
/// Of the operating system.
pub(super) fn run() -> io::Result<()> {
    let spec: Spec = serde_json::from_reader(io::stdin())?;
    if spec.pages.iter().any(|page| u64::from(*page) >= spec.size_bytes / PAGE_BYTES) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let memory = Memory::new(&spec)?;
    let range = memory.address()..memory.address() + spec.size_bytes;
    let mode = match spec.memory {
        GuestMemory::Anonymous => RegisterMode::MISSING,
        GuestMemory::Private(_) => RegisterMode::MISSING.and(RegisterMode::MINOR),
    };
    let userfaultfd = Userfaultfd::open(spec.memory.features()).map_err(io::Error::other)?;
    // SAFETY: the mapping is the threads' below alone, which wait, and accept what comes.
    unsafe { userfaultfd.register(range, mode) }.map_err(io::Error::other)?;
    let socket = UnixStream::connect(&spec.socket)?;
    let own_before = own_bytes()?;

    let start = Instant::now();
    hand_over(&socket, &userfaultfd, memory.address(), spec.size_bytes)?;
    let (next, nr_done, nr_wrong, longest_ns) =
        (AtomicUsize::new(0), AtomicUsize::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let first_ns = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..spec.nr_threads {
            scope.spawn(|| {
                // Relaxed: counts, and the scope's end synchronizes.
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(page) = spec.pages.get(index) else { break };
                    let before = Instant::now();
                    let found = memory.touch(*page);
                    longest_ns.fetch_max(before.elapsed().as_nanos() as u64, Ordering::Relaxed);
                    nr_wrong.fetch_add(u64::from(found != snapshot::first_word(u64::from(*page))), Ordering::Relaxed);
                    if spec.write_each != 0 && index % spec.write_each == 0 {
                        memory.write(*page);
                    }
                    if nr_done.fetch_add(1, Ordering::Relaxed) + 1 == spec.nr_first {
                        first_ns.store(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let seen = Seen {
        first_s: first_ns.into_inner() as f64 / 1e9,
        whole_s: start.elapsed().as_secs_f64(),
        longest_s: longest_ns.into_inner() as f64 / 1e9,
        own_bytes: own_bytes()?.saturating_sub(own_before),
        nr_wrong: nr_wrong.into_inner(),
    };
    let mut stdout = io::stdout().lock();
    serde_json::to_writer(&mut stdout, &seen)?;
    stdout.write_all(b"\n")?;
    stdout.flush()?;
    loop {
        thread::park();
    }
}

/// Firecracker's handshake.
fn hand_over(socket: &UnixStream, userfaultfd: &Userfaultfd, address: u64, size_bytes: u64) -> io::Result<()> {
    let regions = serde_json::json!([{
        "base_host_virt_addr": address,
        "size": size_bytes,
        "offset": 0,
        "page_size": PAGE_BYTES,
        "page_size_kib": PAGE_BYTES,
    }]);
    let bytes = serde_json::to_vec(&regions)?;
    let descriptors = [userfaultfd.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    // There is space for one.
    let _ = ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    // One message is sent whole where the socket's buffer is empty.
    sendmsg(socket, &[io::IoSlice::new(&bytes)], &mut ancillary, SendFlags::empty())?;
    Ok(())
}

/// Anonymous memory of this process that is there, with its page tables.
fn own_bytes() -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let kib = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()
    };
    match (kib("RssAnon:"), kib("VmPTE:")) {
        (Some(anonymous), Some(tables)) => Ok((anonymous + tables) << 10),
        _ => Err(io::Error::other("/proc/self/status has no RssAnon and VmPTE")),
    }
}
