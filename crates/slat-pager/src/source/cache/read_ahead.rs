//! Which blocks are read ahead of faults, and how many.
//!
//! # Guarantees
//! - Of the blocks that were read ahead, those that no read has used are at most [`FIRST_BLOCKS`],
//!   and one for each block that was used, and one for each [`MISSES`] blocks that were fetched
//!   because a read asked for them.
//! - At most [`MOST_AT_ONCE`] are on their way.
//! - After one that failed no other begins until reads have earned it.
//!
//! # Implementation
//! An account. A block that is read ahead takes its share from it. One that is used puts two shares
//! back, and one that had to be fetched a part of a share. So the number of blocks that are read
//! ahead grows twofold with each success and shrinks with each block that is not used, whatever the
//! order of the reads is: a guest touches a dense working set in any order.

use std::collections::HashSet;
use std::time::Duration;

use parking_lot::Mutex;

/// What is read ahead before any block was used.
pub const FIRST_BLOCKS: u64 = 8;
/// For so many blocks that had to be fetched one more is read ahead.
pub const MISSES: u64 = 8;
/// Blocks on their way.
pub const MOST_AT_ONCE: usize = 8;
/// What takes longer has failed. A read that asks for the same block waits for this one, and begins
/// its own only then.
pub(super) const LONGEST_READ: Duration = Duration::from_secs(30);
/// What the account has at most.
const MOST_BLOCKS: u64 = 32;

/// The account of a source.
#[derive(Debug)]
pub(super) struct ReadAhead {
    /// What the account can have, in parts of a block.
    most_parts: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// A block has [`MISSES`] of them.
    parts: u64,
    under_way: HashSet<u64>,
    /// Read ahead, and not asked for so far.
    unused: HashSet<u64>,
}

impl ReadAhead {
    /// For a cache that has room for `room_blocks` blocks: what is read ahead may take a quarter.
    pub(super) fn new(room_blocks: u64) -> ReadAhead {
        let most_parts = MOST_BLOCKS.min(room_blocks / 4) * MISSES;
        let parts = most_parts.min(FIRST_BLOCKS * MISSES);
        ReadAhead { most_parts, state: Mutex::new(State { parts, under_way: HashSet::new(), unused: HashSet::new() }) }
    }

    /// Up to how many blocks behind one that a fault has asked for are worth a look.
    pub(super) fn reach_blocks(&self) -> u64 {
        let blocks = self.state.lock().parts / MISSES;
        if blocks == 0 { 0 } else { (blocks / 2).clamp(1, MOST_AT_ONCE as u64) }
    }

    /// A read has found `block` in memory, or on its way.
    pub(super) fn hit(&self, block: u64) {
        let mut state = self.state.lock();
        if state.unused.remove(&block) {
            state.parts = (state.parts + 2 * MISSES).min(self.most_parts);
        }
    }

    /// `block` was fetched for a read that asked for it.
    pub(super) fn missed(&self, block: u64) {
        let mut state = self.state.lock();
        // It was read ahead in vain, if it was: it did not stay.
        state.unused.remove(&block);
        state.parts = (state.parts + 1).min(self.most_parts);
    }

    /// Whether `block` is to be read ahead now. Its end is told by [`ReadAhead::ended`].
    pub(super) fn begin(&self, block: u64) -> bool {
        let mut state = self.state.lock();
        if state.parts < MISSES || state.under_way.len() >= MOST_AT_ONCE || !state.under_way.insert(block) {
            return false;
        }
        state.parts -= MISSES;
        state.unused.insert(block);
        true
    }

    /// What became of a block that [`ReadAhead::begin`] has begun.
    pub(super) fn ended(&self, block: u64, became: Became) {
        let mut state = self.state.lock();
        state.under_way.remove(&block);
        match became {
            Became::Fetched => {}
            Became::WasThere => {
                if state.unused.remove(&block) {
                    state.parts = (state.parts + MISSES).min(self.most_parts);
                }
            }
            Became::Failed => {
                state.unused.remove(&block);
                state.parts = 0;
            }
        }
    }
}

/// What became of a block that was read ahead.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Became {
    /// It is in memory.
    Fetched,
    /// Another reader had fetched it, or did.
    WasThere,
    /// It cannot be had now.
    Failed,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Reads of `blocks` that find what was read ahead; returns how many were fetched because they
    /// were asked for, how many were read ahead and used, and how many are left.
    fn run(blocks: &[u64], nr_blocks: u64) -> (u64, u64, u64) {
        let ahead = ReadAhead::new(1 << 20);
        let mut there = HashSet::new();
        let (mut nr_missed, mut nr_begun) = (0, 0);
        for &block in blocks {
            if there.insert(block) {
                nr_missed += 1;
                ahead.missed(block);
            } else {
                ahead.hit(block);
            }
            for next in block + 1..(block + 1 + ahead.reach_blocks()).min(nr_blocks) {
                if !there.contains(&next) && ahead.begin(next) {
                    there.insert(next);
                    nr_begun += 1;
                    ahead.ended(next, Became::Fetched);
                }
            }
        }
        let nr_unused = ahead.state.lock().unused.len() as u64;
        (nr_missed, nr_begun - nr_unused, nr_unused)
    }

    proptest! {
        #[test]
        fn what_is_not_used_is_bounded(blocks in prop::collection::vec(0u64..2000, 0..400), nr_blocks in 1u64..2000) {
            let blocks: Vec<u64> = blocks.into_iter().map(|block| block % nr_blocks).collect();
            let (nr_missed, nr_used, nr_unused) = run(&blocks, nr_blocks);
            prop_assert!(
                nr_unused <= FIRST_BLOCKS + nr_used + nr_missed / MISSES,
                "{nr_missed} {nr_used} {nr_unused}"
            );
        }
    }

    #[test]
    fn one_after_the_other() {
        let (nr_missed, nr_used, nr_unused) = run(&(0..500).collect::<Vec<_>>(), 500);
        assert_eq!((nr_missed, nr_used, nr_unused), (1, 499, 0));
    }

    #[test]
    fn all_in_any_order() {
        let mut blocks: Vec<u64> = (0..128).collect();
        blocks.sort_by_key(|block| *blake3::hash(&block.to_le_bytes()).as_bytes());
        let (nr_missed, nr_used, nr_unused) = run(&blocks, 128);
        assert!(nr_missed < 96 && nr_unused == 0, "{nr_missed} {nr_used} {nr_unused}");
    }

    #[test]
    fn what_fails_stops_it_and_what_was_there_costs_nothing() {
        let ahead = ReadAhead::new(1 << 20);
        assert_eq!(ahead.reach_blocks(), 4);
        assert!(ahead.begin(1) && !ahead.begin(1));
        ahead.ended(1, Became::WasThere);
        assert_eq!(ahead.state.lock().parts, FIRST_BLOCKS * MISSES);
        assert!(ahead.begin(2));
        ahead.ended(2, Became::Failed);
        assert!(ahead.reach_blocks() == 0 && !ahead.begin(3));
        (0..MISSES).for_each(|block| ahead.missed(100 + block));
        assert!(ahead.begin(3) && !ahead.begin(4));
        // No room, no block.
        assert!(!ReadAhead::new(3).begin(1));
    }
}
