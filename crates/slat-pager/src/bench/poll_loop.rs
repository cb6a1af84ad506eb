//! What ours is compared with: a plain handler of page faults, as the VMMs' examples are. One
//! thread waits for an event, reads it, fetches what is missing, copies it, and waits again.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use tokio::runtime::Handle;

use crate::source::{Mapped, PAGE_BYTES, Source};
use crate::userfaultfd::{Event, MESSAGE_BYTES, Userfaultfd, Wake};
use crate::vm::Region;

/// A handler that runs.
#[derive(Debug)]
pub(super) struct PollLoop {
    stop: Arc<OwnedFd>,
    thread: JoinHandle<io::Result<()>>,
}

impl PollLoop {
    /// Serves `region` from `source`, aligned ranges of `granule_bytes` at a time.
    pub(super) fn start(
        userfaultfd: Userfaultfd,
        region: Region,
        source: Arc<dyn Source>,
        granule_bytes: u64,
        runtime: Handle,
    ) -> io::Result<PollLoop> {
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || serve(&userfaultfd, &region, &*source, granule_bytes, &runtime, &stopped));
        Ok(PollLoop { stop, thread })
    }

    pub(super) fn stop(self) -> io::Result<()> {
        rustix::io::write(&self.stop, &1_u64.to_ne_bytes())?;
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

fn serve(
    userfaultfd: &Userfaultfd,
    region: &Region,
    source: &dyn Source,
    granule_bytes: u64,
    runtime: &Handle,
    stopped: &OwnedFd,
) -> io::Result<()> {
    let mut message = [[0; MESSAGE_BYTES]];
    let mut buffer = Vec::new();
    loop {
        let mut descriptors =
            [PollFd::new(userfaultfd, PollFlags::IN), PollFd::from_borrowed_fd(stopped.as_fd(), PollFlags::IN)];
        rustix::io::retry_on_intr(|| poll(&mut descriptors, None))?;
        if !descriptors[1].revents().is_empty() {
            return Ok(());
        }
        let faults: Vec<u64> = userfaultfd
            .read(&mut message)
            .map_err(io::Error::other)?
            .filter_map(|event| match event {
                Event::Fault(fault) => Some(fault.address),
                _ => None,
            })
            .collect();
        for address in faults {
            let offset = region.offset + (address - region.address);
            let start = offset - offset % granule_bytes;
            let range = start..(start + granule_bytes).min(region.offset + region.size_bytes);
            let bytes = bytes(source, range.clone(), &mut buffer, runtime)?;
            install(userfaultfd, region.address + (range.start - region.offset), bytes)?;
        }
    }
}

fn bytes<'s>(
    source: &'s dyn Source,
    range: Range<u64>,
    buffer: &'s mut Vec<u8>,
    runtime: &Handle,
) -> io::Result<Mapped<'s>> {
    if let Some(mapped) = source.mapped(range.clone()) {
        return Ok(mapped);
    }
    buffer.resize((range.end - range.start) as usize, 0);
    runtime.block_on(source.read(range.start, buffer)).map_err(io::Error::other)?;
    Ok(Mapped::of(buffer))
}

/// Copies `bytes`; where a page is there already, page by page.
fn install(userfaultfd: &Userfaultfd, address: u64, bytes: Mapped<'_>) -> io::Result<()> {
    if bytes.fill(userfaultfd, address, Wake::Waiters).is_ok() {
        return Ok(());
    }
    for at in (0..bytes.nr_bytes() as u64).step_by(PAGE_BYTES as usize) {
        // There already, mostly; its waiters are woken.
        if bytes.part(at..at + PAGE_BYTES).fill(userfaultfd, address + at, Wake::Waiters).is_err() {
            userfaultfd.wake(address + at..address + at + PAGE_BYTES).map_err(io::Error::other)?;
        }
    }
    Ok(())
}
