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
//! - [`VcpuFaults::fill_all`] leaves no page at which a vCPU leaves the guest, but those that cannot be
//!   had: vCPUs need not ask any more.
//!
//! # Implementation
//! A request is like a message: a thread of the machine takes it, and brings what it finds absent.
//! Whoever fills pages looks for requests that are answered by it.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use tokio::sync::oneshot;

use super::install::{Again, Done};
use super::pages::PageState;
use super::regions::Placed;
use super::state::State;
use super::userfault_bitmap::UserfaultBitmap;
use super::{Populator, Shared};
use crate::source::PAGE_BYTES;
use crate::working_set::replay::{Progress, replay};

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
/// Between two looks at what could not be had.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

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

    /// What survives the pager.
    pub(crate) fn state(&self) -> &Arc<State> {
        self.shared.installer.pages.state()
    }

    /// Fills all pages at which a vCPU leaves the guest, by up to `nr_threads` threads, behind the
    /// faults of the monitor's own. Tries again what cannot be had for now. Returns once there are no
    /// such pages, or the machine has ended.
    pub fn fill_all(&self, nr_threads: usize) {
        let populator = Populator { shared: Arc::clone(&self.shared) };
        let mut pause = FIRST_PAUSE;
        while !populator.is_over() {
            let steps = self.faulting();
            if let Err(error) = replay(&steps, &populator, nr_threads, &Progress::default()) {
                tracing::warn!(vm = self.shared.options.name, %error, "pages for vCPUs cannot be had for now");
                // It has ended there: other pages may be had.
                self.fill_each(&populator, &steps);
            }
            self.give_zeros_to_removed(&steps);
            if self.faulting().is_empty() {
                tracing::info!(vm = self.shared.options.name, "vCPUs leave the guest at no page any more");
                return;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Parts of the snapshot with pages at which a vCPU leaves the guest. All such pages are in them.
    fn faulting(&self) -> Vec<Range<u64>> {
        const STEP_BYTES: u64 = 1 << 20;
        let of_region = |placed: &Placed| {
            let offsets = placed.region.offsets();
            (offsets.start..offsets.end).step_by(STEP_BYTES as usize).map(move |s| s..offsets.end.min(s + STEP_BYTES))
        };
        let steps = self.shared.installer.regions.all().iter().flat_map(of_region);
        let has_one =
            |step: &Range<u64>| step.clone().step_by(PAGE_BYTES as usize).any(|offset| self.memory.faults(offset));
        steps.filter(has_one).collect()
    }

    /// Fills pages one by one, until one fails that may be had later.
    fn fill_each(&self, populator: &Populator, parts: &[Range<u64>]) {
        let pages = parts.iter().flat_map(|part| part.clone().step_by(PAGE_BYTES as usize));
        for offset in pages.filter(|offset| self.memory.faults(*offset)) {
            let filled = populator.populate(offset..offset + PAGE_BYTES);
            if populator.is_over() || filled.is_err_and(|error| error.may_pass()) {
                return;
            }
        }
    }

    /// Removed pages are brought by no replay: a vCPU that touches one is given zeros.
    fn give_zeros_to_removed(&self, parts: &[Range<u64>]) {
        let installer = &self.shared.installer;
        let mut done = Done::default();
        let regions = parts.iter().flat_map(|part| installer.regions.touched_offsets(part.clone()));
        for (place, page) in regions.flat_map(|(place, pages)| pages.map(move |page| (place, page))) {
            let faults = self.memory.faults(installer.regions.all()[place].offset_of(page));
            if faults && installer.pages.get(page) == PageState::Removed {
                // What is put off is tried again with the others.
                let _ = installer.fill_again(place, page, Again::Zeros, &mut done);
            }
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
