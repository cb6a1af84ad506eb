//! Which pages have been asked for, which have arrived, and how one waits for a page that another thread fetches.
//!
//! # The protocol
//! A block (a page of 4 KiB, or what a bit of the userfault bitmap stands for) is in one of three states:
//!
//! | state | claim | userfault bit | who may do what |
//! |---|---|---|---|
//! | missing | 0 | 1 | anybody may claim it |
//! | claimed | 1 | 1 | its claimer, and nobody else, fills it; then it *publishes* it, or gives the claim back |
//! | there | 1 | 0 | guests use it; it is never claimed again |
//!
//! - A claim is one `fetch_or` on a bitmap that belongs to the VMM: of all who find a page missing (vCPUs, readers of a
//!   userfaultfd, the background copier) one wins. So each page is fetched and filled exactly once, and its filler may write
//!   it without minding anybody.
//! - To publish is to clear the userfault bit, after the page was filled: the engine maps it from then on. A block whose bit
//!   was clear already would have been filled twice; these are counted ([`Arrivals::nr_filled_twice`]), and there are none.
//! - Whose claim is lost waits for the bit to clear. It looks again each time that a block is published, and sleeps between,
//!   but never longer than a moment: the way out is [`Arrivals::fail`], after which nobody waits any more.
//! - A claimer that cannot fetch gives its claim back ([`Arrivals::release`]): the block is missing again, and another run
//!   can fetch it.
//!
//! Where vCPUs do not exit there is no userfault bitmap, and the bits stand here only.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crossbeam_utils::CachePadded;
use slat::slots::UserfaultWords;

use super::VcpuError;

const BITS: u64 = u64::BITS as u64;

/// How long a thread sleeps at most until it looks again.
pub(super) const LONGEST_SLEEP: Duration = Duration::from_millis(20);

/// See the [module](self).
pub(super) struct Arrivals {
    nr_blocks: u64,
    claims: Box<[AtomicU64]>,
    /// The userfault bitmap.
    missing: Arc<dyn UserfaultWords>,
    nr_filled_twice: AtomicU64,
    /// vCPUs whose own fetch is under way: the copier steps back for them.
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
    pub(super) fn new(nr_blocks: u64, missing: Arc<dyn UserfaultWords>) -> Arrivals {
        for (index, word) in missing.words().iter().enumerate() {
            let first = index as u64 * BITS;
            let nr_bits = nr_blocks.saturating_sub(first).min(BITS);
            // Relaxed: nobody else knows the bitmap yet.
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
    pub(super) fn words(&self) -> Arc<dyn UserfaultWords> {
        Arc::clone(&self.missing)
    }

    pub(super) fn nr_blocks(&self) -> u64 {
        self.nr_blocks
    }

    /// Claims `block`; `false` if somebody has it already, or it is there.
    #[inline]
    pub(super) fn claim(&self, block: u64) -> bool {
        let (word, mask) = place(block);
        // Acquire: the claimer comes after whoever gave the claim back. (Release is for that one.)
        self.claims[word].fetch_or(mask, Ordering::Acquire) & mask == 0
    }

    /// Claims the first block from `from` on that nobody has; `None` if all are claimed.
    pub(super) fn claim_next(&self, from: u64) -> Option<u64> {
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

    /// Gives back the claim of a block that could not be fetched.
    pub(super) fn release(&self, block: u64) {
        let (word, mask) = place(block);
        // Release: what was written to the page comes before the next claimer.
        self.claims[word].fetch_and(!mask, Ordering::Release);
    }

    /// Whether `block` is not there yet.
    #[inline]
    pub(super) fn is_missing(&self, block: u64) -> bool {
        let (word, mask) = place(block);
        // SeqCst: with `sleep` and `publish`, see there; and acquire, for the page.
        self.missing.words()[word].load(Ordering::SeqCst) & mask != 0
    }

    /// Says that a claimed block is filled: lets the guest have it.
    #[inline]
    pub(super) fn publish(&self, block: u64) {
        let (word, mask) = place(block);
        // Release: the page's contents come before the bit. SeqCst: a store-load pair with `sleep`. Either this sees that
        // somebody sleeps, or who is about to sleep sees the bit clear.
        let before = self.missing.words()[word].fetch_and(!mask, Ordering::SeqCst);
        if before & mask == 0 {
            self.nr_filled_twice.fetch_add(1, Ordering::Relaxed);
        }
        if self.nr_sleeping.load(Ordering::SeqCst) != 0 {
            self.wake();
        }
    }

    /// Blocks that were there when they were published. None.
    pub(super) fn nr_filled_twice(&self) -> u64 {
        self.nr_filled_twice.load(Ordering::Relaxed)
    }

    /// Blocks that are there.
    pub(super) fn nr_there(&self) -> u64 {
        let words = self.missing.words().iter().enumerate();
        // What a resolver in another process may have set behind the last block is nobody's.
        let in_word = |index: usize| match self.nr_blocks.saturating_sub(index as u64 * BITS) {
            0 => 0,
            nr_bits => u64::MAX >> (BITS - nr_bits.min(BITS)),
        };
        // Acquire: who counts them may look at them.
        let missing = words.map(|(index, word)| word.load(Ordering::Acquire) & in_word(index));
        self.nr_blocks - missing.map(|word| u64::from(word.count_ones())).sum::<u64>()
    }

    /// A vCPU waits for a fetch of its own from now on.
    pub(super) fn fault_waits(&self) {
        // Relaxed, as below: a hint for the copier.
        self.nr_faults_waiting.fetch_add(1, Ordering::Relaxed);
    }

    /// `nr_faults` of them wait no longer.
    pub(super) fn faults_served(&self, nr_faults: u64) {
        self.nr_faults_waiting.fetch_sub(nr_faults, Ordering::Relaxed);
    }

    /// Whether a vCPU waits for a fetch of its own.
    pub(super) fn has_waiting_faults(&self) -> bool {
        self.nr_faults_waiting.load(Ordering::Relaxed) != 0
    }

    fn lock(&self) -> MutexGuard<'_, Option<VcpuError>> {
        // Nothing under it panics.
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes all that sleep.
    fn wake(&self) {
        // Under the lock: who has looked and does not sleep yet, holds it.
        drop(self.lock());
        self.changed.notify_all();
    }

    /// Sleeps until a block was published for which `is_over` says so, or the run has failed, or a moment is over.
    pub(super) fn sleep(&self, is_over: impl Fn() -> bool) {
        let mut failure = self.lock();
        // SeqCst: see `publish`.
        self.nr_sleeping.fetch_add(1, Ordering::SeqCst);
        if failure.is_none() && !is_over() {
            failure = self.changed.wait_timeout(failure, LONGEST_SLEEP).unwrap_or_else(PoisonError::into_inner).0;
        }
        self.nr_sleeping.fetch_sub(1, Ordering::SeqCst);
        drop(failure);
    }

    /// Ends the run: nobody waits any more. The first failure stays.
    pub(super) fn fail(&self, error: &VcpuError) {
        self.lock().get_or_insert_with(|| error.clone());
        // Release: whoever sees it finds the failure.
        self.has_failed.store(true, Ordering::Release);
        self.changed.notify_all();
    }

    /// Whether the run has failed.
    #[inline]
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    /// Why the run has failed, if it has.
    pub(super) fn failure(&self) -> Option<VcpuError> {
        self.lock().clone()
    }

    /// Begins a run: earlier failures are forgotten. Nobody else is at it.
    pub(super) fn begin(&self) {
        *self.lock() = None;
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
    fn each_block_is_claimed_once_and_can_be_given_back() {
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
    fn bits_behind_the_last_block_are_nobodys() {
        let arrivals = Arrivals::new(70, words(3));
        for word in arrivals.words().words() {
            word.store(u64::MAX, Ordering::Relaxed);
        }
        assert_eq!(arrivals.nr_there(), 0);
        arrivals.publish(69);
        assert_eq!(arrivals.nr_there(), 1);
    }

    #[test]
    fn of_many_one_wins_and_all_see_it_filled() {
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
