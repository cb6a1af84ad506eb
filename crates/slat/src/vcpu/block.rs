//! The look of a fault at a block of 2 MiB of which nothing is mapped: the first fault in each block
//! of memory that the host has in blocks.
//!
//! # Guarantees
//! Those of each fault (`vcpu`). What such a fault does not settle is left to the next look: a
//! memslot that logs or in which user space restricts what a fault may map, a dirty ring, a lock, and
//! all that is not an empty PTE of 2 MiB.
//!
//! # Use
//! A fault of 4 KiB that found no page-table page for its page ([`small`](super::small)) looks here
//! before it looks at its lowest PTE.
//!
//! # Implementation
//! As in [`small`](super::small), levels are constants, and the PTE is kept from the look, which goes
//! on to resolve and to act. If that does not serve the fault, the answer goes into a plan: the host
//! is asked once for each look. So it is if the host has less than the block, or has the block
//! elsewhere than at its own offset, if a page-table page was retired, or the PTE changed.
//!
//! # Why it is correct
//! As in [`small`](super::small); the proof's step is one for leaves of any size. That no range in
//! flight may have a page of the block is looked at for the whole block. Of a PTE of 2 MiB another
//! fault may have made a directory entry meanwhile: it is not empty any more, and the exchange fails.

use super::plan::{Found, InstallPlan, Plan};
use super::resolve::ask;
use super::small::SmallFault;
use super::{Fault, NEEDS_PAGE_STATE};
use crate::addr::Level;
use crate::format::Format;
use crate::host::{Host, Resolved};
use crate::operation::Operation;
use crate::slot::{MemoryAttributes, MemoryRegionFlags};
use crate::sync::record;
use crate::table::cursor::Cursor;
use crate::table::pte::State;
use crate::table::pte_ref::Cleaner;
use crate::table::retire::{FaultPin, HazardPointer};

const LEVEL: Level = Level::L2M;

impl<H: Host, F: Format> Fault<'_, H, F> {
    /// Serves the fault, if nothing of its block is mapped, nothing restricts the leaf, and the host
    /// has the block as a whole.
    // In one piece: the order of the reads is the protocol. Its stack is free when the plan is carried
    // out.
    #[inline(never)]
    pub(super) fn look_at_block<'r>(
        &mut self,
        mut pin: FaultPin<'_>,
        hazard: HazardPointer<'r>,
    ) -> Plan<'r, H::Backing, F> {
        let Fault { op, ring, gfn, access, .. } = *self;
        let fault = SmallFault { op, ring, gfn, access };
        let Operation { tree, slots, .. } = op;
        // A ring must have room for all pages. A leaf that no fetch goes through is another one.
        if ring.is_some() || tree.is_locked() || tree.config.hardware.splits_on_fetch() {
            return Plan::LookLower;
        }
        pin.check_epochs(tree.epochs.id());
        slots.check_epochs(tree.epochs.id());
        let guard = pin.reborrow().open();
        // Nothing that the first look read is kept.
        record!(FaultLooks { gfn: gfn.0 });
        let cursor = Cursor::above_small(tree, &guard, gfn);
        if cursor.level() != LEVEL || (fault.writes() && cursor.is_protected()) {
            return Plan::LookLower;
        }
        let pte = cursor.pte_at(LEVEL);
        let State::Empty(seen) = pte.load().state(LEVEL) else { return Plan::LookLower };
        if F::BREAK_BEFORE_MAKE && seen.is_unflushed() {
            return Plan::LookLower;
        }
        // The PTE first, then the ranges in flight and the memslot: see
        // `table/invalidation_seq.rs`.
        if tree.in_flight.free_level(gfn, LEVEL) != Some(LEVEL) {
            return Plan::LookLower;
        }
        // SAFETY: the pin and the memslots are of the same tree: both were checked.
        let Some(slot) = (unsafe { slots.find_unchecked(&guard, gfn) }) else { return Plan::LookLower };
        let (flags, range) = (slot.flags(), slot.range());
        let restricts = NEEDS_PAGE_STATE.union(MemoryRegionFlags::LOG_DIRTY_PAGES);
        if flags.intersects(restricts) || !range.covers(gfn.block(LEVEL)) {
            return Plan::LookLower;
        }
        let backing = slot.keep_for_resolve(hazard);
        // SAFETY: the walk has reached it in the guard, and the operation keeps the tree.
        let kept = unsafe { pte.keep(&guard) };
        drop(guard);
        let attributes = MemoryAttributes::empty();
        let resolve = || backing.resolve(&tree.host, attributes, gfn, gfn.0 - range.start.0, access);
        let answer = ask(&tree.host, access, self.timing.as_deref_mut(), resolve);
        let is_whole = |resolved: &Resolved| {
            resolved.max_size.level() >= LEVEL && (resolved.pfn.0 ^ gfn.0) & (LEVEL.nr_pages() - 1) == 0
        };
        let leaf = match answer {
            Ok(resolved) if is_whole(&resolved) => fault.leaf(LEVEL, flags, resolved).ok(),
            _ => None,
        };
        if let Some((leaf, rights)) = leaf {
            // SAFETY: the pin has opened the first guard.
            if let Some(again) = unsafe { kept.reopen(pin) } {
                let pte = again.pte(Cleaner::new(&tree.host));
                // SAFETY: the leaf was made for this level, and such a PTE was kept.
                if unsafe { fault.install(again.guard(), pte, seen, leaf, rights) }.is_ok() {
                    return Plan::Served;
                }
            }
        }
        Plan::Install(InstallPlan {
            backing,
            slot: range,
            flags,
            attributes,
            level: LEVEL,
            max_level: LEVEL,
            found: Found::Empty(seen),
            answer: Some(answer),
        })
    }
}
