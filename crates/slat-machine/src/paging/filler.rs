//! How a page that has come gets to its place in the guest's memory.
//!
//! The thread that fills has claimed the page (`arrivals.rs`). So no other thread writes it, and
//! the guest cannot reach it before it is published.

#![expect(unsafe_code, reason = "pages are made where they belong, in guest memory")]

use std::sync::Arc;

use slat::Gfn;
use slat_pager::source::PageBytes;
use slat_pager::source::requests::PageRequests;

use super::error::VcpuError;
use super::userfaultfd::{Filled, Userfaultfd, Wake};
use crate::memory::{Alias, Backing, GuestMemfd};

/// Where pages go.
#[derive(Debug)]
pub(crate) enum Filler {
    /// Into the mapping: made there, without a copy between. The first write of a page takes the
    /// kernel's fault for it.
    InPlace(Backing),
    /// Into memory that has no mapping.
    Install(Arc<GuestMemfd>),
    /// By the userfaultfd's copy.
    Copy(Backing, Userfaultfds),
    /// Into another mapping of the file; the userfaultfd then has it mapped.
    Continue(Backing, Alias, Userfaultfds),
}

/// The userfaultfds of the memory, and which one has which page.
#[derive(Clone, Debug)]
pub(crate) struct Userfaultfds {
    pub(crate) all: Arc<[Arc<Userfaultfd>]>,
    pub(crate) pages_each: u64,
}

impl Userfaultfds {
    /// Wakes all threads that wait in the kernel for pages of `memory`. A page that was put in
    /// place without a wake-up may have a waiter whose message no reader has read. For abandoned
    /// memory, all waiters were woken before.
    pub(crate) fn wake_all(&self, memory: &Backing) {
        for (number, descriptor) in self.all.iter().enumerate() {
            let first = number as u64 * self.pages_each;
            let _ = descriptor.wake(memory, first << Gfn::SHIFT..(first + self.pages_each) << Gfn::SHIFT);
        }
    }

    fn of(&self, page: u64) -> &Userfaultfd {
        &self.all[((page / self.pages_each) as usize).min(self.all.len() - 1)]
    }
}

impl Filler {
    /// Puts the page that `source` has next into page number `page`. Wakes the threads that wait
    /// for it in the kernel if `wake` is set, or if the page was there already.
    pub(crate) fn fill(&self, page: u64, source: &mut PageRequests, wake: Wake) -> Result<(), VcpuError> {
        let offset_bytes = page << Gfn::SHIFT;
        match self {
            Filler::InPlace(memory) => {
                let at = memory.as_ptr().wrapping_add(offset_bytes as usize).cast::<PageBytes>();
                // SAFETY: the page is one of the memory, which has a mapping (`Filler::InPlace` is
                // made for no other) that lives as long as `memory`. The caller has claimed it: no
                // other thread writes it. The guest does not reach it, since its userfault bit is
                // set, and the machine's own reads check that bit first.
                source.take_into(unsafe { &mut *at })?;
            }
            Filler::Install(memory) => memory.install(page, source.take()?)?,
            Filler::Copy(memory, descriptors) => {
                let descriptor = descriptors.of(page);
                let bytes = source.take()?;
                finish(descriptor, memory, offset_bytes, wake, || {
                    descriptor.copy(memory, offset_bytes, bytes.as_slice(), wake)
                })?;
            }
            Filler::Continue(memory, alias, descriptors) => {
                let descriptor = descriptors.of(page);
                let bytes = source.take()?;
                // The page is in the file: the alias was made for all of it.
                let _ = alias.write(offset_bytes, bytes);
                let range = offset_bytes..offset_bytes + bytes.len() as u64;
                finish(descriptor, memory, offset_bytes, wake, || descriptor.map_cached(memory, range.clone(), wake))?;
            }
        }
        Ok(())
    }
}

/// Repeats `call` until the page is there. If it was there before, wakes the threads that wait for
/// it in the kernel.
fn finish(
    descriptor: &Userfaultfd,
    memory: &Backing,
    offset_bytes: u64,
    wake: Wake,
    call: impl Fn() -> Result<Filled, super::userfaultfd::UserfaultfdError>,
) -> Result<(), VcpuError> {
    loop {
        match call()? {
            Filled::Done => return Ok(()),
            Filled::AlreadyThere => {
                if wake == Wake::None {
                    descriptor.wake(memory, offset_bytes..offset_bytes + slat::PAGE_SIZE)?;
                }
                return Ok(());
            }
            // The process's memory map is being changed, for a short time.
            Filled::TryAgain { .. } => std::thread::yield_now(),
        }
    }
}
