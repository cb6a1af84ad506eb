//! Shadow paging: tables that lead from the guest's virtual addresses straight to the host's frames, for hardware that has no
//! second stage, or has it in use.
//!
//! A VM with shadow paging has its second stage all the same: the tree of guest frames, with slots, dirty log, userfault and
//! invalidation as ever. But no hardware walks it. What hardware walks is made here, of the guest's own tables and of the
//! leaves of the second stage; it is a cache of both, and like a TLB it is flushed: whatever flushes guest frames
//! ([`Tree::flush`](crate::table::Tree::flush)) first takes the shadow leaves of these frames away, or their right to write.
//! A reverse map finds them. So nothing of the second stage's protocol changes.
//!
//! # The parts
//! `guest` says what the guest's tables mean, `memory` reads them. A shadow page (`page`) is a table of the hardware's, made
//! from a guest frame in a `role`; `frames` has, for each guest frame, the leaves that map it and the pages made from it.
//! `walk` and `install` serve the guest's page faults, `write` its writes to tables, `zap` takes away, `sync` brings pages up to
//! date when the guest flushes, `roots` keeps the roots of each vCPU and says what a flush of the guest's concerns.
//!
//! # The protocol
//! *Locks* (`lock`): one for each guest frame and one for each shadow page; see `page` for what each guards. Locks of pages
//! are taken by falling level, then that of one frame. No other lock, none across a flush, an allocation or the host's
//! resolving; no section is open where one is waited for.
//!
//! *Leaves.* A leaf is made under the locks of its page and of the frame that it maps, and there the second stage is looked at
//! once more: it has what it has then. Who changes the second stage does that first, and then visits the frames under their
//! locks. So either the visit finds the leaf, or the leaf's maker finds the change.
//!
//! *Tables of the guest's.* Those of upper levels are write-protected as long as there is a shadow page of them: a write to one
//! exits, is emulated, and takes away what was made from the entry, before the guest goes on. Those of the lowest level may be
//! written: then their pages are *unsync*, and entries may be what the guest's said before, as in a TLB. What the guest
//! flushes is compared with the guest's again, for this vCPU's sake, and for all, since pages are shared. The guest's entry
//! is read under the page's lock, once more, before the shadow entry is made of it: so who synchronizes a page finds what was
//! made from an entry that has changed, or comes first, and then the maker reads what is there now.
//!
//! *Synchronization* of many pages: (1) of each, under its frame's lock, the guest's table loses the right to be written, and
//! the page is *syncing*; (2) one flush of all CPUs; (3) the entries of each page are compared with the guest's, under the
//! page's lock; and if the guest has not written the table meanwhile, the page is in sync. Who meets a page that is syncing
//! does all of that itself: what another is about to do is of no use to a flush that must be over.
//!
//! *Page faults of the guest's.* A page fault flushes its address, in the current PCID, as INVLPG does. Mostly nothing is stale there:
//! a look without locks (`Mmu::may_be_stale`) tells. What it cannot tell, a lock that is held or an entry of a page that is unsync,
//! is compared.
//!
//! *Links.* A link to a page makes all visible that is below it. So (1) the page learns of its new parent, (2) what is unsync
//! below is compared with the guest's, (3) the link is written; all under the parent's lock. A vCPU that flushes either finds
//! the parent, and does the comparing itself, or comes before (2).
//!
//! *CPUs have nothing cached that no shadow entry says*, but for changes whose flush is under way: they are counted while it
//! is (`Shadow::nr_debts`). Who protects a guest table, and finds nothing to protect, still flushes if there are any.
//!
//! What goes wrong otherwise: `models/shadow.py`.

mod frames;
pub(crate) mod guest;
mod install;
mod lock;
mod memory;
mod page;
pub(crate) mod registers;
mod role;
pub(crate) mod roots;
mod sync;
pub(crate) mod walk;
mod write;
mod zap;

pub use registers::{GuestAccess, GuestEntry, LocalFlush, PagingRegister, PagingRegisters, Privilege};

use crossbeam_utils::CachePadded;

use alloc::boxed::Box;

use crate::addr::{Gfn, Level, PAGE_SHIFT, Pfn};
use crate::boxed::Vacant;
use crate::config::ShadowPaging;
use crate::error::Error;
use crate::format::Format;
use crate::host::Host;
use crate::stats::Counter;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::table::Tree;
use crate::table::entry::{self, State};
use crate::table::retire::Record;
use crate::table::walk::Cursor;
use frames::Frames;
use page::Pages;
pub(crate) use zap::Debt;

/// Present, bit 0 of a shadow entry (Intel SDM vol. 3A, tables 4-14 to 4-20; AMD APM vol. 2, 5.4.1).
const PRESENT: u64 = 1 << 0;
/// R/W, bit 1.
const WRITABLE: u64 = 1 << 1;
/// U/S, bit 2.
const USER: u64 = 1 << 2;
/// A, bit 5: set beforehand, so that no CPU has to.
const ACCESSED: u64 = 1 << 5;
/// D, bit 6, in leaves: as A.
const DIRTY: u64 = 1 << 6;
/// PS, bit 7, in leaves above the lowest level.
const PAGE_SIZE_BIT: u64 = 1 << 7;
/// XD, bit 63.
const NO_EXECUTE: u64 = 1 << 63;
/// Bits 51 to 12.
const ADDRESS: u64 = (1 << 52) - (1 << PAGE_SHIFT);

/// The shadow tables of one VM.
pub(crate) struct Shadow {
    config: ShadowPaging,
    frames: Frames,
    pages: Pages,
    /// Changes that CPUs may not have been flushed for: see the module.
    nr_debts: CachePadded<AtomicU64>,
    nr_vcpus: AtomicU64,
    /// Of which kinds pages were ever made: [`MarkKind`](role::MarkKind).
    made_kinds: AtomicU32,
}

impl Shadow {
    /// Never inlined: its parts would be on the stack of what makes a VM.
    #[inline(never)]
    pub(crate) fn new(config: ShadowPaging) -> Result<Box<Shadow>, Error> {
        let (memory, frames, pages) = (Vacant::new()?, Frames::new()?, Pages::new(config.max_pages)?);
        Ok(memory.fill(Shadow {
            config,
            frames,
            pages,
            nr_debts: CachePadded::new(AtomicU64::new(0)),
            nr_vcpus: AtomicU64::new(0),
            made_kinds: AtomicU32::new(0),
        }))
    }

    /// A vCPU has been made, which ends by [`Roots::end`](roots::Roots::end).
    pub(crate) fn add_vcpu(&self) {
        self.nr_vcpus.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn nr_pages(&self) -> u64 {
        self.pages.nr_in_use()
    }

    pub(crate) fn pages_peak(&self) -> u64 {
        self.pages.peak()
    }
}

/// The shadow tables with what a caller needs to change them.
pub(crate) struct Mmu<'v, H: Host, F: Format> {
    tree: &'v Tree<H, F>,
    shadow: &'v Shadow,
    record: &'v Record,
}

impl<H: Host, F: Format> Clone for Mmu<'_, H, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<H: Host, F: Format> Copy for Mmu<'_, H, F> {}

/// What the second stage has for a frame.
#[derive(Clone, Copy)]
struct SecondStage {
    /// The host's frame.
    pfn: Pfn,
    /// The level of its leaf.
    level: Level,
    is_writable: bool,
}

impl<'v, H: Host, F: Format> Mmu<'v, H, F> {
    pub(crate) fn new(tree: &'v Tree<H, F>, shadow: &'v Shadow, record: &'v Record) -> Mmu<'v, H, F> {
        Mmu { tree, shadow, record }
    }

    pub(crate) fn host(&self) -> &'v H {
        &self.tree.host
    }

    pub(crate) fn count(&self, counter: Counter) {
        self.record.stats.count(counter);
    }

    /// What the second stage has for `gfn` at this moment. Who asks under the lock of the frame, and makes of the answer what
    /// is in the frame's lists before the lock is released, is found by who takes it away.
    fn second_stage(&self, gfn: Gfn) -> Option<SecondStage> {
        let section = self.tree.epochs.enter(self.record);
        let mut cursor = Cursor::new(self.tree, &section, gfn);
        let (leaf, State::Leaf) = cursor.descend_to_lowest() else { return None };
        let level = cursor.level();
        let pfn = Pfn(entry::frame::<F>(leaf, level).0 + (gfn.0 & (level.nr_pages() - 1)));
        let is_writable = entry::is_writable::<F>(leaf) && !cursor.is_closed();
        Some(SecondStage { pfn, level, is_writable })
    }
}
