//! Faults that a CPU repeats for an access until they are flushed, and the flush of this CPU alone.
//!
//! A processor that caches translations of both stages together may also cache that one lacks a
//! right (Arm), or has none (RISC-V without Svvptc). PTEs of the second stage alone are cached in
//! [`PteCache`](crate::hardware::walk::cached::PteCache); a host has to flush both. It is the
//! machine's oracle for a missing [`Host::flush_local`](slat::Host::flush_local), or half of one:
//! without that, a guest of Arm's or RISC-V's formats faults on the same access for ever.

use std::cell::RefCell;

use arrayvec::ArrayVec;
use slat::{Access, GfnRange, Gpa, PAGE_SIZE};

use crate::hardware::commit::{Dropped, Scope};
use crate::hardware::tlb::Context;
use crate::hardware::walk::Fault;

/// Faults that a CPU can keep. More than one, so that an old one is detected, too.
const CAPACITY: usize = 16;

#[derive(Clone, Copy, Debug)]
struct Kept {
    context: Context,
    /// The page of the guest's address.
    page: u64,
    fault: Fault,
}

/// The last faults of a CPU, by page and access.
#[derive(Debug, Default)]
pub(super) struct KeptFaults {
    faults: [Option<Kept>; CAPACITY],
    /// The one that is replaced next.
    next: usize,
}

impl KeptFaults {
    /// Keeps the fault of an access to `gva`.
    pub(super) fn keep(&mut self, context: Context, gva: u64, fault: Fault) {
        if self.find(context, gva, fault.access).is_none() {
            self.faults[self.next] = Some(Kept { context, page: gva / PAGE_SIZE, fault });
            self.next = (self.next + 1) % CAPACITY;
        }
    }

    /// The fault that is kept for `access` to the page of `gva`, at that address.
    pub(super) fn find(&self, context: Context, gva: u64, access: Access) -> Option<Fault> {
        let is_same =
            |kept: &&Kept| kept.context == context && kept.page == gva / PAGE_SIZE && kept.fault.access == access;
        let fault = self.faults.iter().flatten().find(is_same)?.fault;
        let gpa = Gpa(fault.gpa.gfn().gpa().0 + gva % PAGE_SIZE);
        Some(Fault { gpa, ..fault })
    }

    /// Drops those of accesses to guest-physical pages of `range`.
    pub(super) fn drop_range(&mut self, range: GfnRange) {
        self.retain(|kept| !range.contains(kept.fault.gpa.gfn()));
    }

    pub(super) fn drop_context(&mut self, context: Context) {
        self.retain(|kept| kept.context != context);
    }

    pub(super) fn clear(&mut self) {
        self.retain(|_| false);
    }

    fn retain(&mut self, stays: impl Fn(&Kept) -> bool) {
        self.faults.iter_mut().for_each(|kept| *kept = kept.filter(&stays));
    }
}

/// Instructions of one local flush, at most.
const MAX_LOCAL: usize = 4;

thread_local! {
    /// What the CPU of this thread has to drop.
    static LOCAL_FLUSH: RefCell<ArrayVec<Dropped, MAX_LOCAL>> = const { RefCell::new(ArrayVec::new_const()) };
}

/// Has the CPU that the calling thread runs drop all of the page at `gpa` before it goes on. For
/// hosts, and other handlers of its faults.
pub fn flush_local(gpa: Gpa) {
    invalidate_local(Scope::All, gpa);
}

/// Has it drop what an instruction of `scope` does. Of more than four in one fault the last are
/// left out.
pub fn invalidate_local(scope: Scope, gpa: Gpa) {
    let dropped = Dropped { scope, range: GfnRange::new(gpa.gfn(), 1) };
    // Without room, the CPU faults once more.
    let _ = LOCAL_FLUSH.with_borrow_mut(|all| all.try_push(dropped));
}

/// The host's requests during a fault of this thread's CPU.
pub(super) fn take_local_flush() -> ArrayVec<Dropped, MAX_LOCAL> {
    LOCAL_FLUSH.take()
}
