//! What the readers of userfaultfds do.
//!
//! A reader that gets a fault claims the page (`arrivals.rs`). If it wins, it fetches the page,
//! waits for it, fills it, and wakes the threads that wait in the kernel. If it loses, another
//! reader or a vCPU's thread fills the page. A reader wakes too; a vCPU that has exited does not,
//! because as a rule no thread waits in the kernel for its page. So where vCPUs exit, a reader that
//! loses waits until the page is published, and then wakes.
//!
//! A reader sleeps through a source's latency, one page at a time: so do readers of a userfaultfd
//! in KVM's test, and the number of readers is an option for that reason.

use std::sync::Arc;

use slat_pager::source::requests::{PageRequests, Wait};

use super::arrivals::Arrivals;
use super::error::VcpuError;
use super::fetch::FetchFrom;
use super::userfaultfd::{Readers, Userfaultfd, UserfaultfdError, Userfaultfds, Wake};

/// Whether vCPUs exit for pages, or sleep in the kernel as other threads do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum VcpusExit {
    Yes,
    No,
}

/// Starts `nr_readers` for each descriptor.
pub(crate) fn start_readers(
    descriptors: &Userfaultfds,
    nr_readers: usize,
    from: &FetchFrom,
    arrivals: &Arc<Arrivals>,
    vcpus_exit: VcpusExit,
) -> Result<Readers, UserfaultfdError> {
    Readers::start(descriptors, nr_readers, || {
        let mut reader = Reader { from: from.clone(), arrivals: Arc::clone(arrivals), source: None, vcpus_exit };
        move |descriptor, page| reader.serve(descriptor, page)
    })
}

struct Reader {
    from: FetchFrom,
    arrivals: Arc<Arrivals>,
    /// After its first page.
    source: Option<PageRequests>,
    vcpus_exit: VcpusExit,
}

impl Reader {
    fn serve(&mut self, descriptor: &Userfaultfd, page: u64) -> Result<(), VcpuError> {
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
            descriptor.wake(page..page + 1)?;
        }
        Ok(())
    }

    fn deliver(&mut self, page: u64) -> Result<(), VcpuError> {
        let source = match &mut self.source {
            Some(source) => source,
            none => none.insert(self.from.source.requests()?),
        };
        source.request(page)?;
        while source.arrived(Wait::ForEver)?.is_none() {}
        self.from.filler.fill(page, source, Wake::Waiters)?;
        self.arrivals.publish(page);
        Ok(())
    }
}
