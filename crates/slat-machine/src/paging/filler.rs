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
use super::userfaultfd::{Userfaultfds, Wake};
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
    Copy(Userfaultfds),
    /// Into another mapping of the file; the userfaultfd then has it mapped.
    Continue(Alias, Userfaultfds),
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
            Filler::Copy(descriptors) => descriptors.of(page).copy(page, source.take()?, wake)?,
            Filler::Continue(alias, descriptors) => {
                // The page is in the file: the alias was made for all of it.
                let _ = alias.write(offset_bytes, source.take()?);
                descriptors.of(page).map_cached(page, wake)?;
            }
        }
        Ok(())
    }
}
