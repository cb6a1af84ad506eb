//! Which pages were requested, which have arrived, and how a thread waits for a page that another
//! thread fetches.
//!
//! # Implementation
//! A block (a page of 4 KiB, or what a bit of the userfault bitmap stands for) is in one of three
//! states:
//!
//! | state | claim | userfault bit | allowed |
//! |---|---|---|---|
//! | missing | 0 | 1 | any thread may claim it |
//! | claimed | 1 | 1 | only the claimer fills it; then it *publishes* or releases it |
//! | there | 1 | 0 | guests use it; it is never claimed again |
//!
//! - A claim is one `fetch_or` on a bitmap of the VMM: of all threads that find a page missing
//!   (vCPUs, readers of a userfaultfd, the background copier) one wins. So each page is fetched and
//!   filled once, and no other thread writes it meanwhile.
//! - To publish is to clear the userfault bit, after the page was filled: the engine maps it from
//!   then on. If the bit was clear already, the block was filled twice; these are counted
//!   ([`Arrivals::nr_filled_twice`]), and there are none.
//! - A thread that loses the claim waits for the bit to clear. It looks again each time that a
//!   block is published. Between two looks it sleeps, at most [`LONGEST_SLEEP`]. [`Arrivals::fail`]
//!   ends all waits.
//! - A claimer that cannot fetch releases its claim ([`Arrivals::release`]): the block is missing
//!   again, and another run can fetch it.
//!
//! Where vCPUs do not exit the engine has no userfault bitmap, and only this module uses the bits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_utils::CachePadded;
use parking_lot::{Condvar, Mutex};
use slat::slots::UserfaultWords;

use super::error::VcpuError;

const BITS: u64 = u64::BITS as u64;

/// How long a thread sleeps at most before it looks again.
pub(crate) const LONGEST_SLEEP: Duration = Duration::from_millis(20);

/// See the [module](self).
pub(crate) struct Arrivals {
    nr_blocks: u64,
    claims: Box<[AtomicU64]>,
    /// The userfault bitmap.
    missing: Arc<dyn UserfaultWords>,
    nr_filled_twice: AtomicU64,
    /// vCPUs whose own fetch is under way: the copier yields to them.
    nr_faults_waiting: CachePadded<AtomicU64>,
    nr_sleeping: CachePadded<AtomicU64>,
    has_failed: CachePadded<AtomicBool>,
    failure: Mutex<Option<VcpuError>>,
    changed: Condvar,
}

impl std::fmt::Debug for Arrivals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arrivals").field("nr_blocks", &self.nr_blocks).finish_non_exhaustive()
    }
}

impl Arrivals {
    /// All of `nr_blocks` missing; `missing` has at least as many bits.
    pub(crate) fn new(nr_blocks: u64, missing: Arc<dyn UserfaultWords>) -> Arrivals {
        for (index, word) in missing.words().iter().enumerate() {
            let first = index as u64 * BITS;
            let nr_bits = nr_blocks.saturating_sub(first).min(BITS);
            // Relaxed: no other thread has the bitmap yet.
            word.store(if nr_bits == 0 { 0 } else { u64::MAX >> (BITS - nr_bits) }, Ordering::Relaxed);
        }
        Arrivals {
            nr_blocks,
            claims: (0..nr_blocks.div_ceil(BITS)).map(|_| AtomicU64::new(0)).collect(),
            missing,
            nr_filled_twice: AtomicU64::new(0),
            nr_faults_waiting: CachePadded::default(),
            nr_sleeping: CachePadded::default(),
            has_failed: CachePadded::default(),
            failure: Mutex::new(None),
            changed: Condvar::new(),
        }
    }

    /// The userfault bitmap.
    pub(crate) fn words(&self) -> Arc<dyn UserfaultWords> {
        Arc::clone(&self.missing)
    }

    pub(crate) fn nr_blocks(&self) -> u64 {
        self.nr_blocks
    }

    /// Claims `block`; `false` if it is claimed, or there.
    #[inline]
    pub(crate) fn claim(&self, block: u64) -> bool {
        let (word, mask) = place(block);
        // Acquire: the claimer comes after the thread that released the claim.
        self.claims[word].fetch_or(mask, Ordering::Acquire) & mask == 0
    }

    /// Claims the first unclaimed block from `from` on; `None` if all are claimed.
    pub(crate) fn claim_next(&self, from: u64) -> Option<u64> {
        let mut block = from;
        while block < self.nr_blocks {
            // Relaxed: only a hint, the claim decides.
            let word = self.claims[(block / BITS) as usize].load(Ordering::Relaxed);
            let free = !word & (u64::MAX << (block % BITS));
            block = block / BITS * BITS + u64::from(free.trailing_zeros());
            if free != 0 && block < self.nr_blocks && self.claim(block) {
                return Some(block);
            }
        }
        None
    }

    /// Releases the claim of a block that could not be fetched.
    pub(crate) fn release(&self, block: u64) {
        let (word, mask) = place(block);
        // Release: what was written to the page comes before the next claimer.
        self.claims[word].fetch_and(!mask, Ordering::Release);
    }

    /// Whether `block` is not there yet.
    #[inline]
    pub(crate) fn is_missing(&self, block: u64) -> bool {
        let (word, mask) = place(block);
        // SeqCst: with `sleep` and `publish`, see there; and acquire, for the page.
        self.missing.words()[word].load(Ordering::SeqCst) & mask != 0
    }

    /// Publishes a claimed block, which is filled: the guest may have it.
    #[inline]
    pub(crate) fn publish(&self, block: u64) {
        let (word, mask) = place(block);
        // Release: the page's contents come before the bit. SeqCst: a store-load pair with `sleep`.
        // Either this thread finds the sleeper, or the sleeper finds the bit clear before it
        // sleeps.
        let before = self.missing.words()[word].fetch_and(!mask, Ordering::SeqCst);
        if before & mask == 0 {
            self.nr_filled_twice.fetch_add(1, Ordering::Relaxed);
        }
        if self.nr_sleeping.load(Ordering::SeqCst) != 0 {
            self.wake();
        }
    }

    /// Blocks that were there when they were published. None.
    pub(crate) fn nr_filled_twice(&self) -> u64 {
        self.nr_filled_twice.load(Ordering::Relaxed)
    }

    /// Blocks that are there.
    pub(crate) fn nr_there(&self) -> u64 {
        let words = self.missing.words().iter().enumerate();
        // A resolver in another process may have set bits behind the last block, which have no
        // meaning.
        let in_word = |index: usize| match self.nr_blocks.saturating_sub(index as u64 * BITS) {
            0 => 0,
            nr_bits => u64::MAX >> (BITS - nr_bits.min(BITS)),
        };
        // Acquire: the caller may read the pages that it counts.
        let missing = words.map(|(index, word)| word.load(Ordering::Acquire) & in_word(index));
        self.nr_blocks - missing.map(|word| u64::from(word.count_ones())).sum::<u64>()
    }

    /// A vCPU waits for a fetch of its own from now on.
    pub(crate) fn fault_waits(&self) {
        // Relaxed, as below: a hint for the copier.
        self.nr_faults_waiting.fetch_add(1, Ordering::Relaxed);
    }

    /// `nr_faults` of them wait no longer.
    pub(crate) fn faults_served(&self, nr_faults: u64) {
        self.nr_faults_waiting.fetch_sub(nr_faults, Ordering::Relaxed);
    }

    /// Whether a vCPU waits for a fetch of its own.
    pub(crate) fn has_waiting_faults(&self) -> bool {
        self.nr_faults_waiting.load(Ordering::Relaxed) != 0
    }

    /// Wakes all sleepers.
    fn wake(&self) {
        // Under the lock: a thread that has looked and does not sleep yet holds it.
        drop(self.failure.lock());
        self.changed.notify_all();
    }

    /// Sleeps until a block was published for which `is_over` holds, the run has failed, or
    /// [`LONGEST_SLEEP`] is over.
    pub(crate) fn sleep(&self, is_over: impl Fn() -> bool) {
        let mut failure = self.failure.lock();
        // SeqCst: see `publish`.
        self.nr_sleeping.fetch_add(1, Ordering::SeqCst);
        if failure.is_none() && !is_over() {
            self.changed.wait_for(&mut failure, LONGEST_SLEEP);
        }
        self.nr_sleeping.fetch_sub(1, Ordering::SeqCst);
        drop(failure);
    }

    /// Ends the run and all waits. The first failure stays.
    pub(crate) fn fail(&self, error: &VcpuError) {
        self.failure.lock().get_or_insert_with(|| error.clone());
        // Release: a thread that finds the flag finds the failure.
        self.has_failed.store(true, Ordering::Release);
        self.changed.notify_all();
    }

    /// Whether the run has failed.
    #[inline]
    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    /// Why the run has failed, if it has.
    pub(crate) fn failure(&self) -> Option<VcpuError> {
        self.failure.lock().clone()
    }

    /// Begins a run, without earlier failures. No other thread uses the arrivals now.
    pub(crate) fn begin(&self) {
        *self.failure.lock() = None;
        self.has_failed.store(false, Ordering::Release);
    }
}

#[inline]
fn place(block: u64) -> (usize, u64) {
    ((block / BITS) as usize, 1 << (block % BITS))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(nr_words: usize) -> Arc<dyn UserfaultWords> {
        Arc::new((0..nr_words).map(|_| slat::baselines::AtomicU64::new(0)).collect::<Vec<_>>())
    }

    #[test]
    fn each_block_is_claimed_once_and_can_be_released() {
        let arrivals = Arrivals::new(130, words(3));
        assert_eq!((arrivals.nr_there(), arrivals.is_missing(129)), (0, true));
        assert!(arrivals.claim(64) && !arrivals.claim(64));
        let mut from = 0;
        let mut nr_claimed = 0;
        while let Some(block) = arrivals.claim_next(from) {
            assert_ne!(block, 64);
            (from, nr_claimed) = (block + 1, nr_claimed + 1);
        }
        assert_eq!(nr_claimed, 129);
        arrivals.release(64);
        assert_eq!(arrivals.claim_next(0), Some(64));
        arrivals.publish(64);
        assert_eq!((arrivals.nr_there(), arrivals.is_missing(64), arrivals.nr_filled_twice()), (1, false, 0));
        arrivals.publish(64);
        assert_eq!(arrivals.nr_filled_twice(), 1);
    }

    #[test]
    fn bits_behind_the_last_block_have_no_meaning() {
        let arrivals = Arrivals::new(70, words(3));
        for word in arrivals.words().words() {
            word.store(u64::MAX, Ordering::Relaxed);
        }
        assert_eq!(arrivals.nr_there(), 0);
        arrivals.publish(69);
        assert_eq!(arrivals.nr_there(), 1);
    }

    #[test]
    fn one_claimer_wins_and_all_others_find_the_block_filled() {
        const BLOCKS: u64 = 2000;
        let arrivals = Arrivals::new(BLOCKS, words(32));
        let filled: Vec<AtomicU64> = (0..BLOCKS).map(|_| AtomicU64::new(0)).collect();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for block in 0..BLOCKS {
                        if arrivals.claim(block) {
                            filled[block as usize].fetch_add(1, Ordering::Relaxed);
                            arrivals.publish(block);
                        }
                        while arrivals.is_missing(block) {
                            arrivals.sleep(|| !arrivals.is_missing(block));
                        }
                        assert_eq!(filled[block as usize].load(Ordering::Relaxed), 1);
                    }
                });
            }
        });
        assert_eq!((arrivals.nr_there(), arrivals.nr_filled_twice()), (BLOCKS, 0));
    }
}
