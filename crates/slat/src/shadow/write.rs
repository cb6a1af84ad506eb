//! Emulated writes to the guest's tables.
//!
//! # Guarantees
//! A vCPU that reads the new value of a guest PTE, and flushes, uses nothing that was made of the
//! old one.
//!
//! # Use
//! [`Mmu::emulate_write`] makes one write. [`Mmu::drop_misread`] is for marks that a vCPU has set.
//!
//! # Implementation
//! An emulated write
//! 1. counts itself (`Frame::nr_writers`): from then on no shadow PTE is made of the table's PTEs,
//! 2. zaps what was made of the old PTEs,
//! 3. flushes the CPUs,
//! 4. writes the new value, and counts itself out.
//!
//! A frame that is written again and again, without a walk in between, is no table any more, or is
//! being filled. Its pages of upper levels are removed, and the write protection with them.
//!
//! # Why it is correct
//! Steps 1 and 4, and each read of a guest PTE for a shadow PTE, are under the lock of the frame. A
//! fault holds the lock of the shadow page from that read until it has made the shadow PTE, and
//! step 2 takes that lock. So a shadow PTE is made before step 2, which zaps it, or from the new
//! value. Step 3 precedes the new value.

#![expect(unsafe_code, reason = "zaps PTEs under the locks that keep their records")]

use core::mem;

use super::Mmu;
use super::lock::UntilFree;
use super::memory::NoMemory;
use super::page::{PageRef, PtePlace};
use super::rmap::Frame;
use super::role::{MarkKind, Role};
use crate::addr::{Gfn, Gpa, Level, PAGE_SIZE};
use crate::error::FaultError;
use crate::format::Npt;
use crate::host::Host;
use crate::stats::Counter;
use crate::sync::Ordering;
use crate::table::tlb::TlbBatch;

/// So many emulated writes to a table, without a walk through its page, remove the page.
const FLOOD: u32 = 3;

/// An emulated write that is counted ([`Frame::nr_writers`]). If it ends without writing, also by a
/// panic of the host, the drop counts it out.
struct Writer<'w, H: Host> {
    frame: &'w Frame,
    host: &'w H,
}

impl<'w, H: Host> Writer<'w, H> {
    fn begin(frame: &'w Frame, host: &'w H) -> Writer<'w, H> {
        let _guard = frame.lock.lock(host);
        frame.nr_writers().fetch_add(1, Ordering::Relaxed);
        Writer { frame, host }
    }

    /// The write has counted itself out ([`Mmu::write_guest`]).
    fn has_ended(self) {
        mem::forget(self);
    }
}

impl<H: Host> Drop for Writer<'_, H> {
    fn drop(&mut self) {
        let _guard = self.frame.lock.lock(self.host);
        self.frame.nr_writers().fetch_sub(1, Ordering::Relaxed);
    }
}

impl<'v, H: Host> Mmu<'v, H> {
    /// Writes `bytes` at `gpa`, none beyond the page. `false` if the second stage has no page there
    /// that may be written.
    pub(crate) fn emulate_write(&self, gpa: Gpa, bytes: &[u8]) -> Result<bool, FaultError> {
        let gfn = gpa.gfn();
        let Some(frame) = self.frame_of_memory(gfn)? else { return Ok(false) };
        let writer = Writer::begin(frame, self.host());
        {
            let _lock = self.lock_of_baseline();
            let mut batch = self.batch();
            self.drop_made_of(gfn, gpa.0 % PAGE_SIZE, bytes.len() as u64, &mut batch);
            self.flush(&mut batch);
        }
        match self.write_guest(gpa, bytes) {
            Ok(()) => {
                writer.has_ended();
                self.count(Counter::EmulatedWrites);
                Ok(true)
            }
            Err(NoMemory::NotMapped) => Ok(false),
            Err(NoMemory::NoPointer) => Err(FaultError::NoGuestMemory { gpa }),
        }
    }

    /// Zaps what was made of the guest's PTEs in `len` bytes from `offset` on of frame `gfn`.
    pub(super) fn drop_made_of(&self, gfn: Gfn, offset: u64, len: u64, batch: &mut TlbBatch<'v, H, Npt>) {
        let pages = &self.shadow.pages;
        let mut last = None;
        while let Some(reference) = self.page_behind(gfn, last) {
            last = Some(reference);
            let page = pages.get(reference.number);
            let role = page.role();
            if !role.is_of_table() {
                continue;
            }
            if role.level() > Level::L4K
                && page.nr_writes.fetch_add(1, Ordering::Relaxed) + 1 >= FLOOD
                && !page.is_pinned()
            {
                self.zap_page(reference, batch);
                self.count(Counter::ShadowFloods);
                continue;
            }
            self.drop_entries_of(reference, role, offset, len, batch);
        }
    }

    /// As [`drop_made_of`](Self::drop_made_of), for marks that a vCPU has set: zaps what pages of
    /// `kinds` have made of them.
    #[cold]
    pub(super) fn drop_misread(
        &self,
        gfn: Gfn,
        offset: u64,
        len: u64,
        kinds: MarkKind,
        batch: &mut TlbBatch<'v, H, Npt>,
    ) {
        let mut last = None;
        while let Some(reference) = self.page_behind(gfn, last) {
            last = Some(reference);
            let role = self.shadow.pages.get(reference.number).role();
            if role.mark_kind().intersects(kinds) {
                self.drop_entries_of(reference, role, offset, len, batch);
            }
        }
    }

    fn drop_entries_of(&self, reference: PageRef, role: Role, offset: u64, len: u64, batch: &mut TlbBatch<'v, H, Npt>) {
        let page = self.shadow.pages.get(reference.number);
        let (start, end) = role.entries_of(offset, len);
        let Some(_guard) = page.lock.lock_while(self.host(), || page.is_alive(reference.generation)) else { return };
        for index in start..end {
            // SAFETY: the page is locked, and was found alive under the lock.
            let Ok(()) = unsafe { self.drop_entry::<UntilFree>(PtePlace { page: reference.number, index }, batch) };
        }
    }

    /// The page after `last` in the list of those made from `gfn`; the first, if `last` is not
    /// alive any more.
    fn page_behind(&self, gfn: Gfn, last: Option<PageRef>) -> Option<PageRef> {
        let pages = &self.shadow.pages;
        let frame = self.shadow.frames.get(gfn, Level::L4K)?;
        let _guard = frame.lock.lock(self.host());
        let number = match last {
            Some(last) if pages.get(last.number).is_alive(last.generation) => {
                pages.get(last.number).next_of_frame.load(Ordering::Relaxed)
            }
            _ => frame.pages.load(Ordering::Relaxed),
        };
        let generation = || pages.get(number).generation();
        (number != 0).then(generation).flatten().map(|generation| PageRef { number, generation })
    }
}
