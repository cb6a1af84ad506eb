//! Pages that a vCPU waits for which has left the guest: its monitor asks for them, not a message of
//! the userfaultfd.
//!
//! # Guarantees
//! - A request is answered once vCPUs may use the page ([`UserfaultBitmap::faults`]), and never if it
//!   cannot be had: that vCPU waits, also with [`OnFailure::Poison`](super::OnFailure::Poison). So it
//!   does if the monitor sets the bit of a page that it has, and has not given up by a message.
//! - A request is brought anew whose page was claimed for another and given up again, and looked at
//!   anew if its page is removed meanwhile. It is brought so often at most that a monitor whose pages
//!   cannot be filled keeps no thread busy.
//!
//! # Implementation
//! A request is like a message: a thread of the machine takes it, and brings what it finds absent.
//! Whoever fills pages looks for requests that are answered by it.

use std::ops::Range;
use std::sync::Arc;

use thiserror::Error;
use tokio::sync::oneshot;

use super::Shared;
use super::pages::PageState;
use super::userfault_bitmap::UserfaultBitmap;

/// Requests of vCPUs.
#[derive(Debug, Default)]
pub(super) struct Requests {
    /// Those that no thread has looked at.
    new: Vec<Request>,
    /// Those whose pages are brought.
    waiting: Vec<Request>,
}

/// So often the page of a request is brought. Each time was in vain, and no read has failed for good.
const MOST_TRIES: u32 = 64;

#[derive(Debug)]
struct Request {
    place: usize,
    page: u64,
    nr_tries: u32,
    answer: oneshot::Sender<()>,
}

/// Why a vCPU gets no page.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum NoPage {
    /// No region has it.
    #[error("byte {offset:#x} of the snapshot is in no region")]
    Outside {
        /// What was asked for.
        offset: u64,
    },
    /// The machine has ended.
    #[error("the machine has ended")]
    Ended,
}

/// Asks for pages on behalf of vCPUs.
#[derive(Clone, Debug)]
pub struct VcpuFaults {
    pub(super) shared: Arc<Shared>,
    pub(super) memory: Arc<UserfaultBitmap>,
}

impl VcpuFaults {
    /// Returns once a vCPU may use the page at `offset` of the snapshot. It may be dropped.
    ///
    /// # Errors
    /// [`NoPage`].
    pub async fn bring(&self, offset: u64) -> Result<(), NoPage> {
        let end = offset.checked_add(1).ok_or(NoPage::Outside { offset })?;
        let found = self.shared.installer.regions.touched_offsets(offset..end).next();
        let (place, pages) = found.ok_or(NoPage::Outside { offset })?;
        if !self.memory.faults(offset) {
            return Ok(());
        }
        let (answer, answered) = oneshot::channel();
        self.shared.requests.lock().new.push(Request { place, page: pages.start, nr_tries: 1, answer });
        self.shared.wake_up();
        let mut ended = self.shared.ended.subscribe();
        tokio::select! {
            answered = answered => answered.map_err(|_| NoPage::Ended),
            _ = ended.wait_for(Option::is_some) => Err(NoPage::Ended),
        }
    }

    /// The monitor has broken the protocol: it gets no more of its memory.
    pub fn distrust(&self, why: &str) {
        self.shared.distrust(why);
    }
}

impl Shared {
    /// The pages of new requests.
    pub(super) fn take_requests(&self) -> Vec<(usize, u64)> {
        if self.installer.userfault_bitmap.is_none() {
            return Vec::new();
        }
        let mut requests = self.requests.lock();
        let new = std::mem::take(&mut requests.new);
        let pages = new.iter().map(|request| (request.place, request.page)).collect();
        requests.waiting.extend(new);
        pages
    }

    /// `pages` were removed: whoever brings one of them fills it no more.
    pub(super) fn look_again_at_requests(&self, pages: Range<u64>) {
        if self.installer.userfault_bitmap.is_none() {
            return;
        }
        let mut requests = self.requests.lock();
        let (removed, waiting) = std::mem::take(&mut requests.waiting)
            .into_iter()
            .partition::<Vec<_>, _>(|request| pages.contains(&request.page));
        requests.waiting = waiting;
        let is_any = !removed.is_empty();
        requests.new.extend(removed);
        drop(requests);
        if is_any {
            self.wake_up();
        }
    }

    /// Answers the requests whose pages are there.
    pub(super) fn answer_requests(&self) {
        let Some(memory) = &self.installer.userfault_bitmap else { return };
        let mut requests = self.requests.lock();
        let mut is_absent_again = false;
        for mut request in std::mem::take(&mut requests.waiting) {
            if request.answer.is_closed() {
                continue;
            }
            let offset = self.installer.regions.all()[request.place].offset_of(request.page);
            if !memory.faults(offset) {
                // It fails if the request was dropped.
                let _ = request.answer.send(());
            } else if self.installer.pages.get(request.page) == PageState::Absent && request.nr_tries < MOST_TRIES {
                is_absent_again = true;
                request.nr_tries += 1;
                requests.new.push(request);
            } else {
                requests.waiting.push(request);
            }
        }
        drop(requests);
        if is_absent_again {
            self.wake_up();
        }
    }
}
