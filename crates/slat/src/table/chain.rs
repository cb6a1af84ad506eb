//! Chains of page-table pages that wait to be freed. The links and the labels lie in the first two
//! PTEs of the pages ([`retire`](super::retire)).

#![expect(unsafe_code, reason = "page-table pages are reached by their addresses")]

use super::node;
use super::pte;
use crate::addr::Hpa;
use crate::host::Host;
use crate::sync::{AtomicU64, Ordering, record};

/// What is in a page-table page that is retired.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Contents {
    /// PTEs that are empty or frozen, and name nothing.
    Nothing,
    /// Leaves, or page-table pages of leaves.
    Leaves,
}

/// What the second PTE of a retired page-table page carries: the tag and the contents.
#[derive(Clone, Copy)]
pub(super) struct Label {
    pub(super) tag: u64,
    pub(super) contents: Contents,
}

impl Label {
    pub(super) fn bits(self) -> u64 {
        pte::frozen_number(self.tag << 1 | u64::from(self.contents == Contents::Leaves))
    }

    pub(super) fn read(cell: &AtomicU64) -> Label {
        let number = pte::number_of(cell.load(Ordering::Relaxed));
        Label { tag: number >> 1, contents: if number & 1 == 0 { Contents::Nothing } else { Contents::Leaves } }
    }
}

/// The first PTEs of a page of a chain, which hold the links of the lists here.
///
/// # Safety
/// The page was pushed to a chain, and is not freed for `'a`.
pub(super) unsafe fn chain_cells<'a, H: Host>(host: &H, table: Hpa) -> &'a [AtomicU64] {
    // SAFETY: as the caller promises, and every page-table page has at least two PTEs (`node`).
    unsafe { node::entries(host, table, 2) }
}

/// Page-table pages that were unlinked, linked through their first PTEs. One thread owns the chain.
pub(crate) struct TableChain {
    pub(super) ends: Option<(Hpa, Hpa)>,
    pub(super) len: u64,
    /// With those that go with them.
    pub(super) nr_tables: u64,
}

impl TableChain {
    pub(crate) fn new() -> TableChain {
        TableChain { ends: None, len: 0, nr_tables: 0 }
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// How many there are, with those that go with them.
    pub(crate) fn nr_tables(&self) -> u64 {
        self.nr_tables
    }

    /// Adds a page-table page that was emptied.
    ///
    /// # Safety
    /// - The page is one of the tree whose epochs the chain is retired to, and not its root.
    /// - No PTE points to it any more, or names it. If it was ever linked, its own PTEs are all
    ///   empty or frozen, and no page-table page is linked below them any more.
    /// - It is in no chain yet, and no other thread puts it into one.
    /// - The CPUs are flushed before the chain is retired.
    pub(crate) unsafe fn push<H: Host>(&mut self, host: &H, table: Hpa) {
        // SAFETY: as the caller promises.
        unsafe { self.push_with(host, table, Contents::Nothing, 1) }
    }

    /// Adds a page-table page with leaves of 4 KiB, or with frozen PTEs that name the page-table
    /// pages of such leaves. With those it makes `nr_tables`.
    ///
    /// # Safety
    /// As for [`push`](Self::push), but:
    /// - Its first two PTEs are frozen, and name nothing. The others are empty or leaves of 4 KiB,
    ///   of which threads with older guards may still change one into the other; or all of them are
    ///   frozen.
    /// - No thread frees what the frozen PTEs name, and no other PTE names it. Its level is the
    ///   lowest.
    pub(crate) unsafe fn push_with_leaves<H: Host>(&mut self, host: &H, table: Hpa, nr_tables: u64) {
        // SAFETY: as the caller promises.
        unsafe { self.push_with(host, table, Contents::Leaves, nr_tables) }
    }

    /// # Safety
    /// As for [`push`](Self::push) or [`push_with_leaves`](Self::push_with_leaves).
    unsafe fn push_with<H: Host>(&mut self, host: &H, table: Hpa, contents: Contents, nr_tables: u64) {
        // SAFETY: it is in the chain from now on, and is freed only after that is retired.
        store_frozen(&unsafe { chain_cells(host, table) }[1], Label { tag: 0, contents }.bits());
        self.nr_tables += nr_tables;
        // SAFETY: as the caller promises, and it has a label.
        unsafe { self.push_labelled(host, table) }
    }

    /// Adds a page-table page that came from a chain.
    ///
    /// # Safety
    /// It is in no chain any more, and this thread alone puts it into one.
    pub(super) unsafe fn push_labelled<H: Host>(&mut self, host: &H, table: Hpa) {
        // SAFETY: as above.
        let cells = unsafe { chain_cells(host, table) };
        self.len += 1;
        self.ends = Some(match self.ends {
            None => (table, table),
            Some((first, last)) => {
                store_frozen(&cells[0], pte::frozen_link(first));
                (table, last)
            }
        });
    }
}

/// Stores the bits of a frozen PTE with a payload, in an unlinked page-table page of the caller's.
pub(super) fn store_frozen(cell: &AtomicU64, frozen: u64) {
    // Release: a walk that reads a frozen PTE starts over at the root, and must observe the
    // unlinking there, whichever payload it has read.
    cell.store(frozen, Ordering::Release);
    record!(PteFrozen { cell: core::ptr::from_ref(cell).addr() as u64 });
}
