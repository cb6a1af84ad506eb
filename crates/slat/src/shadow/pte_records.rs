//! What is recorded of each PTE of a shadow page: what it leads to, and its neighbours in the list
//! of PTEs that lead to the same frame.
//!
//! # Guarantees
//! Records stay with the number of a shadow page when the page is gone, for the next page. So a new
//! page mostly allocates none. [`Pages::free_unused`](super::page::Pages::free_unused) frees those
//! of numbers that are not in use, after a grace period.
//!
//! # Use
//! Three kinds of callers reach the records of a page:
//! - a thread that holds the lock of the page, which is alive, or dead with a pin of the thread;
//! - a thread that holds the lock of the frame that one of the PTEs leads to, for that PTE;
//! - a thread with a guard, which only reads what a PTE leads to.
//!
//! # Why it is correct
//! A page's number is in use until all of its PTEs were zapped, under both locks, and its last pin
//! is over. So the records that a lock holder reaches are those of a number in use. A guard that
//! reads the pointer to records keeps them: they are retired after the pointer was cleared, and are
//! freed when all guards that began before that are over (`docs/protocols/deferred-freeing.md`).

#![expect(unsafe_code, reason = "records are reached by raw pointers")]

use alloc::boxed::Box;
use core::ptr::{self, NonNull};

use crate::addr::Gfn;
use crate::boxed::Zeroed;
use crate::format::{Format, Npt};
use crate::sync::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use crate::table::retire::Epochs;

/// PTEs of a shadow page: as in the second stage.
pub(super) const NR_ENTRIES: usize = Npt::TABLE_ENTRIES;
const INDEX_BITS: u32 = NR_ENTRIES.trailing_zeros();

/// The number of a shadow page's record, from 1 on; 0 is none.
pub(super) type PageNumber = u32;

/// A shadow page in one generation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PageRef {
    pub(super) number: PageNumber,
    pub(super) generation: u32,
}

/// A PTE of a shadow page. In the lists it is a number, and 0 is none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PtePlace {
    pub(super) page: PageNumber,
    pub(super) index: usize,
}

impl PtePlace {
    #[inline]
    pub(super) fn number(self) -> u32 {
        self.page << INDEX_BITS | self.index as u32
    }

    /// The PTE with this number; `None` for 0.
    #[inline]
    pub(super) fn from_number(number: u32) -> Option<PtePlace> {
        (number != 0).then_some(PtePlace { page: number >> INDEX_BITS, index: number as usize % NR_ENTRIES })
    }
}

/// What a PTE leads to. It is stored beside the PTE, and never computed anew: the PTE must leave
/// the list that it was put into, whatever the page has become.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Target {
    None,
    /// A leaf PTE that maps the block that begins with this frame, of the page's level.
    Leaf(Gfn),
    /// A link to the page below.
    Link(PageRef),
    /// The same, which is not written yet: CPUs do not walk it, but flushes of the guest concern
    /// what is below.
    Linking(PageRef),
}

const TARGET_LEAF: u64 = 1;
const TARGET_LINK: u64 = 2;
const TARGET_LINKING: u64 = 3;
const TARGET_KIND: u64 = 3;
const TARGET_NUMBER_SHIFT: u32 = 2;
const TARGET_GENERATION_SHIFT: u32 = 32;

impl Target {
    #[inline]
    fn word(self) -> u64 {
        match self {
            Target::None => 0,
            Target::Leaf(gfn) => gfn.0 << TARGET_NUMBER_SHIFT | TARGET_LEAF,
            Target::Link(page) => page.target_bits() | TARGET_LINK,
            Target::Linking(page) => page.target_bits() | TARGET_LINKING,
        }
    }

    #[inline]
    fn from_word(word: u64) -> Target {
        let page = || PageRef {
            number: word as u32 >> TARGET_NUMBER_SHIFT,
            generation: (word >> TARGET_GENERATION_SHIFT) as u32,
        };
        match word & TARGET_KIND {
            TARGET_LEAF => Target::Leaf(Gfn(word >> TARGET_NUMBER_SHIFT)),
            TARGET_LINK => Target::Link(page()),
            TARGET_LINKING => Target::Linking(page()),
            _ => Target::None,
        }
    }
}

impl PageRef {
    #[inline]
    fn target_bits(self) -> u64 {
        u64::from(self.generation) << TARGET_GENERATION_SHIFT | u64::from(self.number) << TARGET_NUMBER_SHIFT
    }
}

/// See the module.
pub(super) struct PteRecords {
    targets: [AtomicU64; NR_ENTRIES],
    next: [AtomicU32; NR_ENTRIES],
    previous: [AtomicU32; NR_ENTRIES],
    /// Of retired records: the next of the list, and the epoch in which they were retired.
    next_retired: AtomicPtr<PteRecords>,
    retired_in: AtomicU64,
}

// SAFETY: all fields are atomics, for which zero is valid.
unsafe impl Zeroed for PteRecords {
    #[cfg(loom)]
    fn zeroed() -> PteRecords {
        PteRecords {
            targets: Zeroed::zeroed(),
            next: Zeroed::zeroed(),
            previous: Zeroed::zeroed(),
            next_retired: AtomicPtr::new(ptr::null_mut()),
            retired_in: AtomicU64::new(0),
        }
    }
}

impl PteRecords {
    /// What PTE `index` leads to. Without the locks, what it led to at some moment.
    #[inline]
    pub(super) fn target(&self, index: usize) -> Target {
        // Acquire: a thread that follows the link reads what the page below was made from.
        Target::from_word(self.targets[index].load(Ordering::Acquire))
    }

    #[inline]
    pub(super) fn set_target(&self, index: usize, target: Target) {
        self.targets[index].store(target.word(), Ordering::Release);
    }

    /// The numbers of the PTEs after and before PTE `index` in its list.
    #[inline]
    pub(super) fn neighbours(&self, index: usize) -> (&AtomicU32, &AtomicU32) {
        (&self.next[index], &self.previous[index])
    }
}

/// A list of records that no page uses, and that a guard may still read.
pub(super) struct RetiredRecords {
    first: AtomicPtr<PteRecords>,
}

impl RetiredRecords {
    pub(super) fn new() -> RetiredRecords {
        RetiredRecords { first: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Retires `unused`, and frees what no guard can read any more, of these and of those that were
    /// retired before. `barrier_on_all_cpus` is the host's.
    ///
    /// # Safety
    /// What the iterator returns came from a box and belongs to the caller. From then on no thread
    /// finds a pointer to it, and only guards of `epochs` that are open already read it.
    pub(super) unsafe fn retire(
        &self,
        unused: impl Iterator<Item = NonNull<PteRecords>>,
        epochs: &Epochs,
        barrier_on_all_cpus: impl FnOnce(),
    ) {
        // Acquire: reads the fields of what other threads have retired.
        let mut list = self.first.swap(ptr::null_mut(), Ordering::Acquire);
        for records in unused {
            // SAFETY: the caller's. A guard may still read the targets, and no other field.
            let of = unsafe { records.as_ref() };
            // After the iterator has made it unreachable.
            of.retired_in.store(epochs.advance_epoch(), Ordering::Relaxed);
            of.next_retired.store(list, Ordering::Relaxed);
            list = records.as_ptr();
        }
        if list.is_null() {
            return;
        }
        let oldest_open = epochs.oldest_open(barrier_on_all_cpus);
        while let Some(records) = NonNull::new(list) {
            // SAFETY: of a list that is this thread's.
            let of = unsafe { records.as_ref() };
            list = of.next_retired.load(Ordering::Relaxed);
            if of.retired_in.load(Ordering::Relaxed) < oldest_open {
                // SAFETY: from a box. All guards that could have read the pointer are over, and no
                // list has the records.
                drop(unsafe { Box::from_raw(records.as_ptr()) });
            } else {
                // SAFETY: from a box, and off the list.
                unsafe { self.push(records) }
            }
        }
    }

    /// Puts records back.
    ///
    /// # Safety
    /// They came from a box, and are in no list.
    unsafe fn push(&self, records: NonNull<PteRecords>) {
        let mut first = self.first.load(Ordering::Relaxed);
        loop {
            // SAFETY: this thread's until the exchange.
            unsafe { records.as_ref() }.next_retired.store(first, Ordering::Relaxed);
            match self.first.compare_exchange(first, records.as_ptr(), Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(found) => first = found,
            }
        }
    }
}

impl Drop for RetiredRecords {
    fn drop(&mut self) {
        let mut next = self.first.load(Ordering::Relaxed);
        while !next.is_null() {
            // SAFETY: the list holds records of boxes alone, and `&mut self` excludes all other
            // users.
            let records = unsafe { Box::from_raw(next) };
            next = records.next_retired.load(Ordering::Relaxed);
        }
    }
}
