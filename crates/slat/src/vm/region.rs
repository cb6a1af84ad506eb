//! Creating, changing and deleting memslots, and what a change of their flags implies. The protocol
//! of the published set is in `slot/set.rs`.
//!
//! The parts of a change are never inlined, here and there: otherwise the stack of one would be below
//! the walks of the next.

use super::Vm;
use crate::addr::{Gfn, GfnRange};
use crate::boxed::try_box;
use crate::config::ManualProtect;
use crate::error::SlotError;
use crate::format::Format;
use crate::host::Host;
use crate::second_stage::invalidate::Invalidation;
use crate::second_stage::split::Leaves;
use crate::second_stage::{protect, recover, split};
use crate::slot::bitmap::Bitmap;
use crate::slot::new::{Attachments, NewSlot};
use crate::slot::set::Claim;
use crate::slot::{MemoryRegion, MemoryRegionFlags};
use crate::sync::full_fence;
use crate::table::retire::{BorrowedParticipant, Participant};

/// Old memslot sets that may wait for the next reclaim.
const MAX_WAITING_SETS: u64 = 8;

/// Flags that a memslot did not have before its change, and flags that it had.
#[derive(Default)]
struct ChangedFlags {
    begun: MemoryRegionFlags,
    ended: MemoryRegionFlags,
}

impl<H: Host, F: Format> Vm<H, F> {
    /// Creates, deletes, moves, resizes or changes a memslot; see [`MemoryRegion`].
    ///
    /// When a deletion or a move returns, no CPU uses the memslot's old range any more, and no fault
    /// maps it; when a memslot shrinks, this holds for the end that it loses, and the rest stays
    /// mapped. So the frames of a deleted memslot may be used for something else. Its backing is
    /// dropped then or later, since a resolve may still read it. During the call a fault in the
    /// range resumes the guest, whether it maps the page or not. After the call it exits, as where
    /// no memslot is.
    ///
    /// A memslot that logs already and is moved is dirty as a whole: all of its pages have another
    /// address. So is one that is resized: its log is another one. A call on the log that is under
    /// way may fail then, as if the memslot had been deleted and created anew; the next reports
    /// what it had taken. With dirty rings, neither makes a page dirty.
    ///
    /// Turning on [`MemoryRegionFlags::LOG_DIRTY_PAGES`] write-protects the memslot's pages: writes
    /// after the call are logged. Turning on [`MemoryRegionFlags::USERFAULT`] unmaps its pages:
    /// when the call returns, no CPU uses a page whose bit was set before.
    ///
    /// # Errors
    /// - For a bad description, the variant that names what is wrong.
    /// - [`SlotError::OutOfMemory`].
    /// - [`SlotError::SlotBusy`]: another thread is changing the same memslot. KVM would wait for
    ///   it. Or the memslot is pinned, and an invalidation of its range is in flight
    ///   ([`Host::needs_zapped_leaves`]).
    /// - [`SlotError::TooMuchRetired`]: what earlier changes left cannot be freed yet.
    ///
    /// After an error the memslot is as it was. If memory ran out, pages may have been unmapped;
    /// the next access maps them again.
    ///
    /// # Example
    /// ```
    /// # mod host { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/doc_host.rs")); }
    /// # use host::*;
    /// use slat::*;
    /// use slat::error::*;
    /// # fn main() -> Result<(), Error> {
    /// let vm = vm(Config::default());
    /// // Create it, with a backing.
    /// vm.set_user_memory_region(region(MemoryRegionFlags::empty(), 1 << 20))?;
    /// // Change its flags, and then move it: the backing stays.
    /// vm.set_user_memory_region(change(MemoryRegionFlags::LOG_DIRTY_PAGES, 1 << 20))?;
    /// let moved = MemoryRegion { guest_phys_addr: Gpa(1 << 30), ..change(MemoryRegionFlags::LOG_DIRTY_PAGES, 1 << 20) };
    /// vm.set_user_memory_region(moved)?;
    /// // Another memslot must not overlap it.
    /// let other = MemoryRegion { slot: 1, guest_phys_addr: Gpa(1 << 30), ..region(MemoryRegionFlags::empty(), 4096) };
    /// assert_eq!(vm.set_user_memory_region(other), Err(SlotError::Overlap { slot: 1, gpa: Gpa(1 << 30), other: 0 }));
    /// // Delete it, by size 0.
    /// vm.set_user_memory_region(change(MemoryRegionFlags::empty(), 0))?;
    /// assert_eq!(vm.get_dirty_log(0, &mut [0; 4]), Err(LogError::NoSuchSlot { slot: 0 }));
    /// # Ok(())
    /// # }
    /// ```
    pub fn set_user_memory_region(&self, region: MemoryRegion<H::Backing>) -> Result<(), SlotError> {
        let range = region.check(self.gpa_bits())?;
        let deletes = range.is_empty();
        let mut participant = self.tree.epochs.borrow_participant()?;
        self.slots.make_room(&self.tree.epochs, || self.tree.host.barrier_on_all_cpus())?;
        // Not moved out of the result: less stack.
        let result = match self.slots.claim(&self.tree.epochs, &participant, region.slot) {
            Err(error) => return Err(error),
            Ok(None) if deletes => Err(SlotError::NoSuchSlot { slot: region.slot }),
            Ok(None) => self.create_slot(&participant, region, range),
            Ok(Some(claim)) if deletes => self.delete_slot(&participant, claim),
            Ok(Some(ref mut claim)) => match self.change_slot(&participant, claim, &region, range) {
                Ok(changed) => {
                    // The claim is held. Not in `change_slot`, whose stack is free by now.
                    self.change_leaves(&mut participant, range, changed);
                    Ok(())
                }
                Err(error) => Err(error),
            },
        };
        drop(participant);
        self.tree.reclaim();
        // Freeing makes a barrier on all CPUs, so a few old sets and logs wait. A backing is freed
        // at once.
        if deletes || self.slots.nr_retired() >= MAX_WAITING_SETS {
            self.slots.reclaim(&self.tree.epochs, || self.tree.host.barrier_on_all_cpus());
        }
        result
    }

    #[inline(never)]
    fn create_slot(
        &self,
        participant: &Participant,
        region: MemoryRegion<H::Backing>,
        range: GfnRange,
    ) -> Result<(), SlotError> {
        let attachments = self.attachments_for(&region, range, None)?;
        let MemoryRegion { slot: id, flags, backing, .. } = region;
        let backing = backing.ok_or(SlotError::NoBacking { slot: id })?;
        let slot = NewSlot::new(id, range, flags, backing, attachments)?;
        if flags.contains(MemoryRegionFlags::PINNED) && !self.tree.note_pinned(range) {
            return Err(SlotError::SlotBusy { slot: id });
        }
        // No sequence number is needed: nothing was mapped there, and a fault that looked before
        // finds no memory.
        self.slots.insert(&self.tree.epochs, participant, slot)
    }

    #[inline(never)]
    fn delete_slot(&self, participant: &Participant, claim: Claim<'_, H::Backing>) -> Result<(), SlotError> {
        // In flight until the set without the memslot is published: no fault maps it again, and no
        // other memslot takes its place.
        let range = claim.entry().range;
        match Invalidation::new(&self.tree.in_flight, &self.operation(participant), range) {
            Ok(ref _invalidation) => claim.remove(&self.tree.epochs, participant),
            Err(error) => Err(error.into()),
        }
    }

    /// Changes the memslot that `claim` has. Returns the flags for which its leaves are to be changed.
    // In one piece: the order of the steps is the protocol, and a refusal changes nothing. Never
    // inlined, as `create_slot`.
    #[inline(never)]
    fn change_slot(
        &self,
        participant: &Participant,
        claim: &mut Claim<'_, H::Backing>,
        region: &MemoryRegion<H::Backing>,
        range: GfnRange,
    ) -> Result<ChangedFlags, SlotError> {
        let (range_before, flags_before) = (claim.entry().range, claim.entry().flags);
        let &MemoryRegion { slot: id, flags, memory_size, .. } = region;
        if region.backing.is_some() {
            return Err(SlotError::BackingFixed { slot: id });
        }
        let moves = range.start != range_before.start;
        let resizes = range.nr_pages() != range_before.nr_pages();
        let has_guest_memfd = flags_before.contains(MemoryRegionFlags::GUEST_MEMFD);
        // No fault would bring back what shares a pinned leaf with the end that is lost.
        if resizes && (moves || has_guest_memfd || flags_before.contains(MemoryRegionFlags::PINNED)) {
            return Err(SlotError::SizeFixed { slot: id, memory_size });
        }
        if (flags ^ flags_before).contains(MemoryRegionFlags::PINNED) {
            return Err(SlotError::PinnedFixed { slot: id });
        }
        if (flags ^ flags_before).contains(MemoryRegionFlags::READONLY) {
            return Err(SlotError::ReadOnlyFixed { slot: id });
        }
        if (flags ^ flags_before).contains(MemoryRegionFlags::GUEST_MEMFD) || (has_guest_memfd && moves) {
            return Err(SlotError::GuestMemfdFixed { slot: id });
        }
        let attachments = self.attachments_for(region, range, Some(&*claim))?;
        let begins_userfault = attachments.userfault.is_some();
        let changed = ChangedFlags { begun: flags - flags_before, ended: flags_before - flags };
        if range == range_before && flags == flags_before && !begins_userfault {
            return Ok(changed);
        }
        if moves || resizes {
            // Before anything is unmapped: a description that is refused changes nothing. `publish`
            // checks again.
            self.slots.check_vacant(&self.tree.epochs, participant, id, range)?;
            if flags.contains(MemoryRegionFlags::PINNED) && !self.tree.note_pinned(range) {
                return Err(SlotError::SlotBusy { slot: id });
            }
        }
        let begins_to_log = changed.begun.contains(MemoryRegionFlags::LOG_DIRTY_PAGES);
        // The memslot may still have the log of an earlier time. See `dirty/log.rs`.
        let uses_again = begins_to_log && attachments.log.is_none() && claim.log().is_some();
        let is_marked_at_first = self.tree.config.manual_protect == ManualProtect::InitiallySet;
        if let Some(log) = claim.log().filter(|_| uses_again && !is_marked_at_first) {
            log.clear_all();
        }
        // What the memslot loses: all of its range, or its end. Where it grows nothing is mapped.
        let lost = if moves || begins_userfault { range_before } else { GfnRange { start: range.end, ..range_before } };
        if lost.is_empty() {
            claim.replace(&self.tree.epochs, participant, range, flags, attachments)?;
        } else {
            // Not moved out of the result, as in `delete_slot`: less stack.
            match Invalidation::new(&self.tree.in_flight, &self.operation(participant), lost) {
                Ok(ref _invalidation) => {
                    claim.replace(&self.tree.epochs, participant, range, flags, attachments)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        if let Some(log) = claim.log().filter(|_| uses_again && is_marked_at_first) {
            // A store-load pair, see `dirty/log.rs`.
            full_fence();
            log.mark(0, range.nr_pages());
        }
        // Nothing is mapped of a memslot that has moved.
        Ok(if moves { ChangedFlags::default() } else { changed })
    }

    /// Changes the leaves of a memslot at `range`, whose flags have `changed`.
    #[inline(never)]
    fn change_leaves(&self, participant: &mut BorrowedParticipant<'_>, range: GfnRange, changed: ChangedFlags) {
        if changed.begun.contains(MemoryRegionFlags::LOG_DIRTY_PAGES) {
            self.begin_to_log(participant, range);
        }
        if changed.ended.intersects(MemoryRegionFlags::LOG_DIRTY_PAGES | MemoryRegionFlags::USERFAULT) {
            self.recover(participant, range);
        }
    }

    /// Write-protects all memslots that log, after rings were enabled. There was no vCPU at that
    /// moment, but earlier ones may have left pages that can be written without a fault.
    pub(super) fn begin_to_log_by_rings(&self, participant: &Participant) {
        // A store-load pair with a memslot that begins to log: rings are visible, then which
        // memslots log?
        full_fence();
        let mut next = Gfn(0);
        loop {
            let guard = self.tree.epochs.pin(participant);
            let Some(slot) = self.slots.find_from(&guard, next) else { return };
            let (range, logs) = (slot.range(), slot.logs());
            drop(guard);
            if logs {
                // If the memslot is moved or deleted in the meantime, its pages are unmapped.
                self.begin_to_log(participant, range);
            }
            next = range.end;
        }
    }

    /// Write-protects a memslot at `range` whose new flags are published.
    #[inline(never)]
    fn begin_to_log(&self, participant: &Participant, range: GfnRange) {
        // A store-load pair (`dirty/log.rs`): the flag is visible before leaves are read, and
        // before `are_enabled` is. A call that enables rings does the reverse.
        full_fence();
        if self.tree.config.manual_protect == ManualProtect::InitiallySet && !self.rings.are_enabled() {
            // All pages are marked, and each is protected when its mark is taken.
            return;
        }
        // Before they are protected, because the parts are as writable as the whole. Best effort:
        // the first write splits what is not split now.
        if self.tree.config.huge_page_logging.splits_eagerly() {
            let target = self.tree.config.largest_logged_write();
            let _ = split::split_range(self.operation(participant), range, target, Leaves::NotPinned, |_| true);
        }
        protect::protect_slot(self.operation(participant), range);
        // Flushed even if no leaf changed: one that is protected already may still be cached as
        // writable.
        self.tree.flush(participant, &[range]);
    }

    #[inline(never)]
    pub(super) fn recover(&self, participant: &mut BorrowedParticipant<'_>, range: GfnRange) -> u64 {
        let (participant, hazard) = participant.with_hazard();
        recover::recover_range(self.operation(participant), hazard, range)
    }

    /// The log and bitmap that the memslot needs for `region` at `range` and does not have yet. An
    /// existing memslot is held by `claim`.
    ///
    /// Never inlined, as `create_slot`, so that its values are not on the stack below the walks of
    /// a change.
    #[inline(never)]
    fn attachments_for(
        &self,
        region: &MemoryRegion<H::Backing>,
        range: GfnRange,
        claim: Option<&Claim<'_, H::Backing>>,
    ) -> Result<Attachments, SlotError> {
        let &MemoryRegion { slot, flags, .. } = region;
        let mut attachments = Attachments::default();
        if flags.contains(MemoryRegionFlags::USERFAULT) {
            let has = claim.and_then(Claim::userfault);
            let given = region.userfault_bitmap.as_ref();
            let bitmap = given.or(has).ok_or(SlotError::NoUserfaultBitmap { slot })?;
            bitmap.check(slot, range)?;
            if !has.is_some_and(|has| has.is_same(bitmap)) {
                attachments.userfault = Some(try_box(bitmap.clone())?);
            }
        }
        if flags.contains(MemoryRegionFlags::LOG_DIRTY_PAGES) && !self.rings.are_enabled() {
            let before = claim.map(Claim::entry);
            let logs = before.is_some_and(|before| before.flags.contains(MemoryRegionFlags::LOG_DIRTY_PAGES));
            let changes = before.is_some_and(|before| before.range != range);
            let resizes = before.is_some_and(|before| before.range.nr_pages() != range.nr_pages());
            let has_log = claim.is_some_and(|claim| claim.log().is_some());
            // `dirty/log.rs` has the cases: memslots that move or are resized, and logging that
            // ends and begins again.
            let nr_pages = range.nr_pages();
            attachments.log = match self.tree.config.manual_protect {
                _ if logs && !changes => None,
                _ if logs => Some(Bitmap::new_marked(nr_pages)?),
                _ if has_log && !resizes => None,
                ManualProtect::InitiallySet => Some(Bitmap::new_marked(nr_pages)?),
                ManualProtect::Disabled | ManualProtect::Enabled => Some(Bitmap::new(nr_pages)?),
            };
        }
        Ok(attachments)
    }
}
