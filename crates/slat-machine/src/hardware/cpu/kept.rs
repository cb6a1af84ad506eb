//! Faults that a CPU repeats for an access until the page is flushed, and the flush of this CPU
//! alone.
//!
//! It is the machine's oracle for a missing [`Host::flush_local`](slat::Host::flush_local): without
//! that, a guest of Arm's or RISC-V's formats faults on the same access for ever.

use std::cell::Cell;

use slat::{Access, GfnRange, Gpa};

use crate::hardware::walk::Fault;

/// Faults that a CPU can keep. More than one, so that an old one is detected, too.
const CAPACITY: usize = 16;

/// The last faults of a CPU, by page and access.
#[derive(Debug, Default)]
pub(super) struct KeptFaults {
    faults: [Option<Fault>; CAPACITY],
    /// The one that is replaced next.
    next: usize,
}

impl KeptFaults {
    pub(super) fn keep(&mut self, fault: Fault) {
        if self.find(fault.gpa, fault.access).is_none() {
            self.faults[self.next] = Some(fault);
            self.next = (self.next + 1) % CAPACITY;
        }
    }

    /// The fault that is kept for `access` to the page of `gpa`, with that address.
    pub(super) fn find(&self, gpa: Gpa, access: Access) -> Option<Fault> {
        let is_same = |fault: &&Fault| fault.gpa.gfn() == gpa.gfn() && fault.access == access;
        self.faults.iter().flatten().find(is_same).map(|&fault| Fault { gpa, ..fault })
    }

    pub(super) fn drop_range(&mut self, range: GfnRange) {
        for fault in &mut self.faults {
            *fault = fault.filter(|fault| !range.contains(fault.gpa.gfn()));
        }
    }
}

thread_local! {
    /// The page that the CPU of this thread has to drop.
    static LOCAL_FLUSH: Cell<Option<Gpa>> = const { Cell::new(None) };
}

/// Has the CPU that the calling thread runs drop the page at `gpa` before it goes on. For hosts,
/// and other handlers of its faults.
pub fn flush_local(gpa: Gpa) {
    LOCAL_FLUSH.set(Some(gpa));
}

/// The host's request during a fault of this thread's CPU.
pub(super) fn take_local_flush() -> Option<Gpa> {
    LOCAL_FLUSH.take()
}
