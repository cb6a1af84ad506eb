//! What is known of each guest frame: the shadow leaf PTEs that map it (its reverse map), and the
//! shadow pages made from the guest table in it. It is a radix tree by frame number. It grows where
//! it is touched, and is freed with the VM.
//!
//! There is a [`Frame`] for each frame of 4 KiB, and for each block of 2 MiB and 1 GiB. A leaf PTE
//! is in the list of its own size.
//!
//! Both lists run through the shadow pages themselves (`page`), so that adding to them allocates
//! nothing. A `Frame`, and all that its lock is said to guard, changes only under that lock. Hence
//! all orders are relaxed. (One exception: `nr_tables` of a block also falls without the lock,
//! which only permits more.)

#![expect(unsafe_code, reason = "says which types are zeroed")]

use alloc::boxed::Box;

use super::lock::WordLock;
use crate::addr::{Gfn, GfnRange, Level};
use crate::boxed::{OnceBox, Zeroed, try_zeroed};
use crate::error::OutOfMemory;
use crate::sync::{AtomicU32, Ordering};

/// Entries of a node: 9 bits of the frame number, as in page-table pages.
const NR_ENTRIES: usize = 512;

/// A guest frame, or a block of them.
pub(super) struct Frame {
    pub(super) lock: WordLock,
    /// Number of the first shadow leaf PTE that maps it; 0 if none does.
    pub(super) leaves: AtomicU32,
    /// Number of the first shadow page made from the guest table in it; 0 if none is.
    pub(super) pages: AtomicU32,
    count: AtomicU32,
}

// SAFETY: all fields are atomics, for which zero is valid; a lock of zero is free.
unsafe impl Zeroed for Frame {
    #[cfg(loom)]
    fn zeroed() -> Frame {
        let zero = || AtomicU32::new(0);
        Frame { lock: WordLock::new(), leaves: zero(), pages: zero(), count: zero() }
    }
}

impl Frame {
    /// For a block: how many shadow pages are made from guest tables in it. While there are any, no
    /// leaf PTE maps the block.
    #[inline]
    pub(super) fn nr_tables(&self) -> &AtomicU32 {
        &self.count
    }

    /// For a frame of 4 KiB: how many emulated writes to it are under way. While there are any, no
    /// shadow PTE is made of what is in it. A vCPU that reads the new value before the write is
    /// over, and flushes, must find nothing of the old.
    #[inline]
    pub(super) fn nr_writers(&self) -> &AtomicU32 {
        &self.count
    }

    /// Whether both lists are empty and no thread holds the lock: see [`WordLock::is_free`].
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.lock.is_free() && self.leaves.load(Ordering::Relaxed) == 0 && self.pages.load(Ordering::Relaxed) == 0
    }
}

struct Node<Below> {
    frames: [Frame; NR_ENTRIES],
    below: [OnceBox<Below>; NR_ENTRIES],
}

// SAFETY: all fields are frames, or places for boxes, for which zero is valid.
unsafe impl<Below> Zeroed for Node<Below> {
    #[cfg(loom)]
    fn zeroed() -> Node<Below> {
        Node { frames: Zeroed::zeroed(), below: Zeroed::zeroed() }
    }
}

type Node4K = [Frame; NR_ENTRIES];
type Node2M = Node<Node4K>;
type Node1G = Node<Node2M>;

/// The frames of one VM.
pub(super) struct Frames {
    top: Box<[OnceBox<Node1G>; NR_ENTRIES]>,
}

#[inline]
fn index(gfn: Gfn, level: Level) -> usize {
    (gfn.0 / level.nr_pages()) as usize % NR_ENTRIES
}

impl Frames {
    pub(super) fn new() -> Result<Frames, OutOfMemory> {
        Ok(Frames { top: try_zeroed()? })
    }

    /// Makes the records of `gfn` and of the blocks that contain it.
    pub(super) fn touch(&self, gfn: Gfn) -> Result<(), OutOfMemory> {
        let node_1g = self.top[index(gfn, Level(4))].get_or_make()?;
        let node_2m = node_1g.below[index(gfn, Level::L1G)].get_or_make()?;
        node_2m.below[index(gfn, Level::L2M)].get_or_make()?;
        Ok(())
    }

    /// The record of the block of `level` that contains `gfn`, if there is one.
    #[inline]
    pub(super) fn get(&self, gfn: Gfn, level: Level) -> Option<&Frame> {
        let node_1g = self.top[index(gfn, Level(4))].get()?;
        if level == Level::L1G {
            return Some(&node_1g.frames[index(gfn, Level::L1G)]);
        }
        let node_2m = node_1g.below[index(gfn, Level::L1G)].get()?;
        if level == Level::L2M {
            return Some(&node_2m.frames[index(gfn, Level::L2M)]);
        }
        Some(&node_2m.below[index(gfn, Level::L2M)].get()?[index(gfn, Level::L4K)])
    }

    /// The records of all pages of the block of 2 MiB that contains `gfn`, if there are any.
    #[inline]
    pub(super) fn of_block(&self, gfn: Gfn) -> Option<&[Frame; NR_ENTRIES]> {
        let node_1g = self.top[index(gfn, Level(4))].get()?;
        let node_2m = node_1g.below[index(gfn, Level::L1G)].get()?;
        node_2m.below[index(gfn, Level::L2M)].get()
    }

    /// Visits the records of all blocks that share a frame with `range`, of every size, as far as
    /// they exist.
    pub(super) fn for_each(&self, range: GfnRange, mut visit: impl FnMut(&Frame, Gfn, Level)) {
        let blocks = |range: GfnRange, level: Level| {
            (range.start.0 / level.nr_pages()..range.end.0.div_ceil(level.nr_pages()))
                .map(move |block| Gfn(block * level.nr_pages()))
        };
        for top in blocks(range, Level(4)).take(NR_ENTRIES) {
            let Some(node_1g) = self.top[index(top, Level(4))].get() else { continue };
            for gfn_1g in blocks(range.intersection(top.block(Level(4))), Level::L1G) {
                visit(&node_1g.frames[index(gfn_1g, Level::L1G)], gfn_1g, Level::L1G);
                let Some(node_2m) = node_1g.below[index(gfn_1g, Level::L1G)].get() else { continue };
                for gfn_2m in blocks(range.intersection(gfn_1g.block(Level::L1G)), Level::L2M) {
                    visit(&node_2m.frames[index(gfn_2m, Level::L2M)], gfn_2m, Level::L2M);
                    let Some(node_4k) = node_2m.below[index(gfn_2m, Level::L2M)].get() else { continue };
                    for gfn in blocks(range.intersection(gfn_2m.block(Level::L2M)), Level::L4K) {
                        visit(&node_4k[index(gfn, Level::L4K)], gfn, Level::L4K);
                    }
                }
            }
        }
    }
}
