//! The memory behind userfaultfds: which descriptor has which part, and the threads that read them.
//!
//! A reader that gets a fault claims the page (`arrivals.rs`). If it wins, it fetches the page,
//! waits for it, fills it, and wakes the threads that wait in the kernel. If it loses, another
//! reader or a vCPU's thread fills the page. A reader wakes too; a vCPU that has exited does not,
//! because as a rule no thread waits in the kernel for its page. So where vCPUs exit, a reader that
//! loses waits until the page is published, and then wakes.
//!
//! A reader sleeps through a source's latency, one page at a time: so do readers of a userfaultfd
//! in KVM's test, and the number of readers is an option for that reason.

use std::num::NonZeroUsize;
use std::sync::Arc;

use crossbeam_queue::ArrayQueue;
use slat::{Gfn, PAGE_SIZE};
use slat_pager::source::requests::{PageRequests, Wait};

use super::arrivals::Arrivals;
use super::error::VcpuError;
use super::fetch::FetchFrom;
use super::filler::Userfaultfds;
use super::userfaultfd::{ReaderError, Readers, RegisterMode, ReportedFault, Userfaultfd, UserfaultfdError, Wake};
use crate::memory::Backing;

/// Registers `memory`, of which no page was touched by this mapping, with `nr_descriptors` for
/// equal parts of it.
pub(crate) fn register(
    memory: &Backing,
    mode: RegisterMode,
    nr_descriptors: usize,
) -> Result<Userfaultfds, UserfaultfdError> {
    let pages_each = (memory.size_bytes() >> Gfn::SHIFT) / nr_descriptors as u64;
    let mut all = Vec::with_capacity(nr_descriptors);
    for number in 0..nr_descriptors as u64 {
        let mut descriptor = Userfaultfd::new()?;
        let first = number * pages_each;
        descriptor.register(memory, first << Gfn::SHIFT..(first + pages_each) << Gfn::SHIFT, mode)?;
        all.push(Arc::new(descriptor));
    }
    Ok(Userfaultfds { all: all.into(), pages_each })
}

/// The readers of all descriptors during a run.
pub(crate) struct AllReaders(Vec<Readers<VcpuError>>);

impl AllReaders {
    /// Starts `nr_readers` for each descriptor.
    pub(crate) fn start(
        descriptors: &Userfaultfds,
        nr_readers: usize,
        from: &FetchFrom,
        arrivals: &Arc<Arrivals>,
        vcpus_exit: VcpusExit,
    ) -> Result<AllReaders, UserfaultfdError> {
        let nr_readers = NonZeroUsize::new(nr_readers).unwrap_or(NonZeroUsize::MIN);
        let mut all = Vec::with_capacity(descriptors.all.len());
        for descriptor in descriptors.all.iter() {
            let server = Server {
                descriptor: Arc::clone(descriptor),
                from: from.clone(),
                arrivals: Arc::clone(arrivals),
                sources: ArrayQueue::new(nr_readers.get()),
                vcpus_exit,
            };
            all.push(Readers::start(Arc::clone(descriptor), nr_readers, move |fault| server.serve(fault))?);
        }
        Ok(AllReaders(all))
    }

    /// Ends them. Returns the first failure.
    pub(crate) fn stop(self) -> Option<VcpuError> {
        let mut failure = None;
        for readers in self.0 {
            let error = match readers.stop() {
                Ok(()) => continue,
                Err(ReaderError::Handler(error)) => error,
                Err(ReaderError::Userfaultfd(error)) => error.into(),
            };
            failure.get_or_insert(error);
        }
        failure
    }
}

/// Whether vCPUs exit for pages, or sleep in the kernel as other threads do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum VcpusExit {
    Yes,
    No,
}

/// What the readers of one descriptor do.
#[derive(Debug)]
struct Server {
    descriptor: Arc<Userfaultfd>,
    from: FetchFrom,
    arrivals: Arc<Arrivals>,
    /// Sources that no reader uses at the moment.
    sources: ArrayQueue<PageRequests>,
    vcpus_exit: VcpusExit,
}

impl Server {
    fn serve(&self, fault: &ReportedFault<'_>) -> Result<(), VcpuError> {
        let page = fault.offset_bytes >> Gfn::SHIFT;
        if self.arrivals.claim(page) {
            return self.deliver(page).inspect_err(|error| {
                self.arrivals.release(page);
                self.arrivals.fail(error);
            });
        }
        if self.vcpus_exit == VcpusExit::Yes {
            while self.arrivals.is_missing(page) {
                if let Some(error) = self.arrivals.failure() {
                    return Err(error);
                }
                self.arrivals.sleep(|| !self.arrivals.is_missing(page));
            }
            self.descriptor.wake(fault.memory, fault.offset_bytes..fault.offset_bytes + PAGE_SIZE)?;
        }
        Ok(())
    }

    fn deliver(&self, page: u64) -> Result<(), VcpuError> {
        let mut source = match self.sources.pop() {
            Some(source) => source,
            None => self.from.source.requests()?,
        };
        source.request(page)?;
        while source.arrived(Wait::ForEver)?.is_none() {}
        self.from.filler.fill(page, &mut source, Wake::Waiters)?;
        self.arrivals.publish(page);
        // There is room for one of each reader.
        let _ = self.sources.push(source);
        Ok(())
    }
}
