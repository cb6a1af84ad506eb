//! Pages that a vCPU waits for which has left the guest: its monitor asks for them, not a message of
//! the userfaultfd.
//!
//! # Guarantees
//! - A request is answered once vCPUs may use the page ([`GuestMemfd::faults`]), and never if it cannot
//!   be had: that vCPU waits, also with [`OnFailure::Poison`](super::OnFailure::Poison).
//! - A request whose page was claimed for another and given up again is brought anew.
//!
//! # Implementation
//! A request is like a message: a thread of the machine takes it, and brings what it finds absent.
//! Whoever fills pages looks for requests that are answered by it.

use std::sync::Arc;

use thiserror::Error;
use tokio::sync::oneshot;

use super::Shared;
use super::guest_memfd::GuestMemfd;
use super::pages::PageState;

/// Requests of vCPUs.
#[derive(Debug, Default)]
pub(super) struct Requests {
    /// Those that no thread has looked at.
    new: Vec<Request>,
    /// Those whose pages are brought.
    waiting: Vec<Request>,
}

#[derive(Debug)]
struct Request {
    place: usize,
    page: u64,
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
    pub(super) memory: Arc<GuestMemfd>,
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
        self.shared.requests.lock().new.push(Request { place, page: pages.start, answer });
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
        if self.installer.guest_memfd.is_none() {
            return Vec::new();
        }
        let mut requests = self.requests.lock();
        let new = std::mem::take(&mut requests.new);
        let pages = new.iter().map(|request| (request.place, request.page)).collect();
        requests.waiting.extend(new);
        pages
    }

    /// Answers the requests whose pages are there.
    pub(super) fn answer_requests(&self) {
        let Some(memory) = &self.installer.guest_memfd else { return };
        let mut requests = self.requests.lock();
        let mut is_absent_again = false;
        for request in std::mem::take(&mut requests.waiting) {
            let offset = self.installer.regions.all()[request.place].offset_of(request.page);
            if !memory.faults(offset) {
                // It fails if the request was dropped.
                let _ = request.answer.send(());
            } else if self.installer.pages.get(request.page) == PageState::Absent {
                is_absent_again = true;
                requests.new.push(request);
            } else if !request.answer.is_closed() {
                requests.waiting.push(request);
            }
        }
        drop(requests);
        if is_absent_again {
            self.wake_up();
        }
    }
}
