//! The optional lock of a VM. The engine does *not* need it; it is there to be measured.
//!
//! The engine's protocols take no lock. [`Locking::Exclusive`] and [`Locking::Shared`] put one
//! around each guard of the engine that changes page tables, to compare with hypervisors that
//! have one. Such a comparison is worth something only if the lock is a good one.
//!
//! # Guarantees
//! - A writer excludes all other threads, readers exclude writers. Neither starves.
//! - Threads that wait sleep through [`Park`]. No wake-up is lost.
//! - Without waiters it costs one compare-and-exchange to take and one read-modify-write to
//!   release. It never allocates.
//!
//! # Use
//! [`Lock::acquire`] returns a [`LockGuard`] that holds the lock until it is dropped. A holder
//! learns from [`Lock::is_contended`] that other threads wait.
//!
//! # Implementation
//! ## Exclusive
//! One word: [`FREE`], [`HELD`], or [`HELD_WAITED`] (held, and a thread may sleep). A release from
//! `HELD_WAITED` wakes one sleeper. The sleeper takes the lock as `HELD_WAITED`, because it cannot
//! know whether others still sleep. So a sleeper is always followed by a holder that will wake it.
//!
//! ## Shared
//! The `state` word counts the readers in its low bits. Above them are flags:
//!
//! | flag | meaning | set by | cleared by |
//! |---|---|---|---|
//! | [`WRITER`] | a writer holds the lock | the writer | the writer |
//! | [`READERS_SLEEP`] | readers sleep on `state`, or will | such a reader | the waker of all |
//! | [`WRITERS_SLEEP`] | writers sleep on `writers`, or will | such a writer | the waker of one |
//! | [`WRITER_NEXT`] | no reader may enter | a writer that lost too often | see below |
//! | [`READERS_NEXT`] | no writer may enter | a leaving writer | the next reader that enters |
//!
//! The next writer that enters clears `WRITER_NEXT`, and so does a writer that sets `READERS_NEXT`.
//!
//! Readers enter while no flag is set, or with `READERS_NEXT`. Writers enter while no thread is
//! inside and `READERS_NEXT` is clear. So waiting writers stop new readers. The lock may be taken
//! past threads that were woken and do not run yet: a lock that is handed to a sleeper stands idle
//! until the scheduler runs it.
//!
//! Writers sleep on a word of their own, which counts their wake-ups, so that a waker can choose
//! between one writer and all readers. A writer reads that count, then checks in `state` that its
//! flag is set, then sleeps if the count is the same. The waker clears the flag first and counts
//! second, so the writer observes it, or the sleep does not begin.
//!
//! # Why it is correct
//! - *Writers do not starve.* The readers inside leave, new ones wait. A writer that lost
//!   [`MAX_LOST`] times sets `WRITER_NEXT`, and the next thread that enters is a writer.
//! - *Readers do not starve.* In every [`MAX_PASSED`]th release that finds readers asleep, the
//!   writer leaves `READERS_NEXT`, and the next thread that enters is a reader.
//! - *No flag outlives its owner;* otherwise all threads would wait in vain.
//!   - A reader sets `READERS_SLEEP` and enters only after it was cleared, because readers do not
//!     enter while it is set, and no reader sets it under `READERS_NEXT`. So behind
//!     `READERS_SLEEP`, and behind a `READERS_NEXT` that replaces it, there is a reader that will
//!     enter.
//!   - A thread that enters as a writer clears `WRITER_NEXT`. So while it is set, its setter still
//!     waits.
//!   - `WRITERS_SLEEP` beside readers stands for a writer that waits, since a leaving writer always
//!     clears it. Beside a writer it may be stale: that writer may have set it itself and entered
//!     instead of sleeping, or have set it for others that are not there. So a leaving writer that
//!     finds no writer asleep goes on to the readers.

use crossbeam_utils::CachePadded;

use super::Ordering::{Acquire, Relaxed, Release};
use super::{AtomicU32, Locking, Park, Side};

// The word of a shared lock. All flags are above the count, so that a reader finds by one
// comparison with MAX_READERS whether it may enter.
const READER: u32 = 1;
const MAX_READERS: u32 = (1 << 24) - 1;
const WRITER: u32 = 1 << 24;
const READERS_SLEEP: u32 = 1 << 25;
const WRITERS_SLEEP: u32 = 1 << 26;
const WRITER_NEXT: u32 = 1 << 27;
const READERS_NEXT: u32 = 1 << 28;

// The word of an exclusive lock. Held, it looks like that of a shared lock with a writer.
const FREE: u32 = 0;
const HELD: u32 = WRITER;
const HELD_WAITED: u32 = WRITER | WRITERS_SLEEP;

/// Bits that are set while a thread is inside.
const INSIDE: u32 = MAX_READERS | WRITER;

/// Turns of [`Park::relax`] before a thread sleeps. The lock is held for much less time than it
/// takes to fall asleep and to be woken; a holder that lost its CPU is away for much longer than
/// any sensible spin. None for the model checkers: there a spinning thread makes the holder go on,
/// and no thread would ever sleep.
const SPIN_TURNS: u32 = if cfg!(any(loom, shuttle)) { 0 } else { 100 };
/// After finding readers inside at this many wake-ups, a writer sets [`WRITER_NEXT`].
const MAX_LOST: u32 = if cfg!(any(loom, shuttle)) { 1 } else { 4 };
/// One in so many releases by a writer that find readers asleep makes the readers next. A lock that
/// is handed over is idle until a sleeper runs, so this must be rare. Small for the model checkers,
/// so that they reach it.
const MAX_PASSED: u32 = if cfg!(any(loom, shuttle)) { 2 } else { 64 };

/// The optional lock of a VM.
#[derive(Debug)]
pub struct Lock {
    /// Never written, and so not in the cache line of the words. To read it there would fetch the
    /// line once more, before the exchange that must own it.
    locking: Locking,
    words: CachePadded<Words>,
}

#[derive(Debug)]
struct Words {
    /// See the module. Readers, and the threads that wait for an exclusive lock, sleep on it.
    state: AtomicU32,
    /// Counts the wake-ups of writers, which sleep on it.
    writers: AtomicU32,
    /// How often a leaving writer found readers asleep, since their last turn. Only a leaving
    /// writer, which still holds the lock, accesses it.
    passed: AtomicU32,
}

/// Holds the lock until it is dropped.
#[derive(Debug)]
#[must_use]
pub struct LockGuard<'a, P: Park> {
    lock: &'a Lock,
    park: P,
    held: Held,
}

/// How a lock is held: decided once, so that the release need not read the kind of the lock again.
/// The two ways to hold it alone are one until a thread waits: with more cases the compiler makes a
/// table of jumps, which is measurable.
#[derive(Clone, Copy, Debug)]
enum Held {
    Nothing,
    Read,
    Alone,
}

impl Held {
    #[inline]
    fn new(locking: Locking, side: Side) -> Held {
        match (locking, side) {
            (Locking::None, _) => Held::Nothing,
            (Locking::Shared, Side::Read) => Held::Read,
            (Locking::Shared, Side::Write) | (Locking::Exclusive, _) => Held::Alone,
        }
    }
}

/// The state after one more reader has entered, or `None` where it has to wait.
#[inline]
fn with_reader(state: u32) -> Option<u32> {
    if state < MAX_READERS {
        Some(state + READER)
    } else if state & READERS_NEXT != 0 {
        // No thread is inside then, so there is room for one.
        Some((state & !READERS_NEXT) + READER)
    } else {
        None
    }
}

/// The state after a writer has entered, or `None` where it has to wait.
#[inline]
fn with_writer(state: u32) -> Option<u32> {
    if state & (INSIDE | READERS_NEXT) == 0 { Some((state & !WRITER_NEXT) | WRITER) } else { None }
}

impl Lock {
    /// A free lock.
    pub fn new(locking: Locking) -> Lock {
        let words = Words { state: AtomicU32::new(0), writers: AtomicU32::new(0), passed: AtomicU32::new(0) };
        Lock { locking, words: CachePadded::new(words) }
    }

    /// Its kind.
    #[inline]
    pub fn locking(&self) -> Locking {
        self.locking
    }

    /// Takes the lock if that needs no wait.
    #[inline]
    pub fn try_acquire<P: Park>(&self, park: P, side: Side) -> Option<LockGuard<'_, P>> {
        // Acquire here and in `acquire`: what the last holders did precedes what this one does.
        // Pairs with the Release of `drop`. A failed attempt orders nothing.
        let held = Held::new(self.locking, side);
        let state = &self.words.state;
        let taken = match held {
            Held::Nothing => true,
            Held::Read => state.fetch_update(Acquire, Relaxed, with_reader).is_ok(),
            // The only free state of an exclusive lock's word is that of a shared lock's without
            // flags.
            Held::Alone => state.fetch_update(Acquire, Relaxed, with_writer).is_ok(),
        };
        // Not `then_some`: it would make a guard in any case, whose drop releases a lock that was
        // not taken.
        taken.then(|| LockGuard { lock: self, park, held })
    }

    /// Takes the lock, and waits for it if need be. A thread that holds it must not call this, for
    /// neither side.
    #[inline]
    pub fn acquire<P: Park>(&self, park: P, side: Side) -> LockGuard<'_, P> {
        let held = Held::new(self.locking, side);
        match held {
            Held::Nothing => {}
            Held::Read => {
                // Relaxed: only a guess, which the exchange checks.
                let state = self.words.state.load(Relaxed);
                if state >= MAX_READERS
                    || self.words.state.compare_exchange_weak(state, state + READER, Acquire, Relaxed).is_err()
                {
                    self.wait_read(&park);
                }
            }
            Held::Alone => {
                if self.words.state.compare_exchange(FREE, HELD, Acquire, Relaxed).is_err() {
                    self.wait_alone(&park);
                }
            }
        }
        LockGuard { lock: self, park, held }
    }

    /// Whether other threads wait for the lock, so that its holder should release it when it can.
    /// For a reader this means a writer, since readers wait behind readers only if a writer waits
    /// in between.
    ///
    /// A hint: it misses a thread that still spins, and may count one that has just entered.
    #[inline]
    pub fn is_contended(&self) -> bool {
        // Relaxed: a hint that is asked for again soon; no conclusion about other memory is drawn
        // from it.
        match self.locking {
            Locking::None => false,
            Locking::Exclusive => self.words.state.load(Relaxed) == HELD_WAITED,
            Locking::Shared => self.words.state.load(Relaxed) & (READERS_SLEEP | WRITERS_SLEEP | WRITER_NEXT) != 0,
        }
    }

    #[cold]
    fn wait_alone<P: Park>(&self, park: &P) {
        match self.locking {
            Locking::Exclusive => self.wait_exclusive(park),
            _ => self.wait_write(park),
        }
    }

    #[cold]
    fn release_alone<P: Park>(&self, park: &P) {
        match self.locking {
            Locking::Exclusive => {
                // Release: see `drop`.
                if self.words.state.swap(FREE, Release) == HELD_WAITED {
                    park.unpark_one(&self.words.state);
                }
            }
            _ => self.release_write(park),
        }
    }

    /// Spins while the lock is held and no thread sleeps. Behind a sleeper spinning is useless: the
    /// holder's release is the long one anyway, and this thread should leave the CPU to it.
    fn spin_exclusive<P: Park>(&self, park: &P) -> u32 {
        let mut turns = SPIN_TURNS;
        loop {
            // Relaxed: a guess, which the exchange or the sleep checks.
            let state = self.words.state.load(Relaxed);
            if state != HELD || turns == 0 {
                return state;
            }
            turns -= 1;
            park.relax();
        }
    }

    fn wait_exclusive<P: Park>(&self, park: &P) {
        if self.spin_exclusive(park) == FREE && self.words.state.compare_exchange(FREE, HELD, Acquire, Relaxed).is_ok()
        {
            return;
        }
        // From here on this thread may sleep, or may have slept beside others. Acquire for the case
        // that the lock was free; if it was not, the exchange only announces a sleeper.
        while self.words.state.swap(HELD_WAITED, Acquire) != FREE {
            loop {
                park.park(&self.words.state, HELD_WAITED);
                // Test before the next exchange, which would take the cache line away from the
                // holder.
                if self.spin_exclusive(park) != HELD_WAITED {
                    break;
                }
            }
        }
    }

    #[cold]
    fn wait_read<P: Park>(&self, park: &P) {
        let mut turns = SPIN_TURNS;
        // Relaxed, here and below: guesses, which an exchange or the sleep checks.
        let mut state = self.words.state.load(Relaxed);
        loop {
            if let Some(new) = with_reader(state) {
                match self.words.state.compare_exchange_weak(state, new, Acquire, Relaxed) {
                    Ok(_) => return,
                    Err(seen) => state = seen,
                }
                continue;
            }
            let asleep = state & (READERS_SLEEP | WRITERS_SLEEP | WRITER_NEXT) != 0;
            // Without any flag there are as many readers as can be counted: only spinning helps.
            if state == MAX_READERS || (turns > 0 && !asleep) {
                turns = turns.saturating_sub(1);
                park.relax();
                state = self.words.state.load(Relaxed);
                continue;
            }
            if state & READERS_SLEEP == 0 {
                // Relaxed: a flag for wakers, which read it in this very word.
                if let Err(seen) = self.words.state.compare_exchange(state, state | READERS_SLEEP, Relaxed, Relaxed) {
                    state = seen;
                    continue;
                }
            }
            park.park(&self.words.state, state | READERS_SLEEP);
            turns = SPIN_TURNS;
            state = self.words.state.load(Relaxed);
        }
    }

    fn wait_write<P: Park>(&self, park: &P) {
        let mut turns = SPIN_TURNS;
        let mut lost = 0;
        // Set once this thread has slept: it may have been woken instead of others, and must
        // announce them.
        let mut others = 0;
        // Relaxed, here and below: guesses, which an exchange or the sleep checks.
        let mut state = self.words.state.load(Relaxed);
        loop {
            if let Some(new) = with_writer(state) {
                match self.words.state.compare_exchange_weak(state, new | others, Acquire, Relaxed) {
                    Ok(_) => return,
                    Err(seen) => state = seen,
                }
                continue;
            }
            if turns > 0 && state & WRITERS_SLEEP == 0 && lost < MAX_LOST {
                turns -= 1;
                park.relax();
                state = self.words.state.load(Relaxed);
                continue;
            }
            let flags = if lost < MAX_LOST { WRITERS_SLEEP } else { WRITERS_SLEEP | WRITER_NEXT };
            if state & flags != flags {
                // Relaxed: a flag for wakers, which read it in this very word.
                if let Err(seen) = self.words.state.compare_exchange(state, state | flags, Relaxed, Relaxed) {
                    state = seen;
                    continue;
                }
            }
            // Acquire: a thread that observes the count of a wake-up also observes that the flag
            // was cleared for it, and then does not sleep on that count. Pairs with the Release in
            // `wake_writer`.
            let wakeups = self.words.writers.load(Acquire);
            state = self.words.state.load(Relaxed);
            if with_writer(state).is_some() || state & WRITERS_SLEEP == 0 {
                continue;
            }
            park.park(&self.words.writers, wakeups);
            others = WRITERS_SLEEP;
            turns = SPIN_TURNS;
            state = self.words.state.load(Relaxed);
            // Only losses to readers count: the flag helps against these.
            lost += u32::from(state & MAX_READERS != 0);
        }
    }

    /// Wakes a sleeping writer; the caller has cleared [`WRITERS_SLEEP`]. Returns whether there was
    /// one.
    fn wake_writer<P: Park>(&self, park: &P) -> bool {
        // Release: the cleared flag precedes the count; pairs with the Acquire in `wait_write`.
        self.words.writers.fetch_add(1, Release);
        park.unpark_one(&self.words.writers)
    }

    /// Wakes the readers of a lock that was left to writers, when none of these was asleep.
    fn wake_readers_instead<P: Park>(&self, park: &P) {
        // Relaxed: no critical section lies behind it, and the word's earlier releases stay visible
        // through a read-modify-write. On failure a writer has entered after all, or is sure to
        // enter, and will wake the readers.
        if self.words.state.compare_exchange(READERS_SLEEP, 0, Relaxed, Relaxed).is_ok() {
            park.unpark_all(&self.words.state);
        }
    }

    /// Wakes a writer after the last reader left `state` behind, with a flag in it.
    #[cold]
    fn wake_after_readers<P: Park>(&self, park: &P, mut state: u32) {
        // If a thread is inside again, it will wake the writer; if the flag is gone, another thread
        // has.
        while state & INSIDE == 0 && state & WRITERS_SLEEP != 0 {
            // Relaxed: no critical section lies behind it. Those of the readers were released by
            // their own subtractions, and a read-modify-write keeps these visible.
            match self.words.state.compare_exchange_weak(state, state & !WRITERS_SLEEP, Relaxed, Relaxed) {
                Ok(_) => {
                    // If no writer was asleep, the flag's setter is awake and will enter; see the
                    // module.
                    self.wake_writer(park);
                    return;
                }
                Err(seen) => state = seen,
            }
        }
    }

    /// Releases from the write side when other threads wait.
    fn release_write<P: Park>(&self, park: &P) {
        // Relaxed, all of them: this thread still holds the lock, so its predecessor's store
        // precedes its Acquire.
        let mut state = self.words.state.load(Relaxed);
        let passed = self.words.passed.load(Relaxed) + u32::from(state & READERS_SLEEP != 0);
        let readers_next = passed >= MAX_PASSED;
        self.words.passed.store(if readers_next { 0 } else { passed }, Relaxed);
        loop {
            let readers_sleep = state & READERS_SLEEP != 0;
            let writers_sleep = state & WRITERS_SLEEP != 0;
            let wake_readers = readers_sleep && (readers_next || !writers_sleep);
            let new = match (wake_readers, readers_next) {
                // Without the writers' flags all woken readers can enter, not just the first. The
                // writer that is woken with them will set its flag again.
                (true, true) => READERS_NEXT,
                (true, false) => 0,
                // To the writers; the readers' flag keeps new readers behind them.
                (false, _) => state & (READERS_SLEEP | WRITER_NEXT),
            };
            // Release: as in `drop`.
            match self.words.state.compare_exchange_weak(state, new, Release, Relaxed) {
                Ok(_) if wake_readers => {
                    park.unpark_all(&self.words.state);
                    if writers_sleep {
                        self.wake_writer(park);
                    }
                    return;
                }
                Ok(_) => {
                    if writers_sleep && !self.wake_writer(park) {
                        self.wake_readers_instead(park);
                    }
                    return;
                }
                Err(seen) => state = seen,
            }
        }
    }
}

impl<P: Park> Drop for LockGuard<'_, P> {
    #[inline]
    fn drop(&mut self) {
        let (lock, park) = (self.lock, &self.park);
        // Release in all of them: the critical section precedes what the next holder does, which
        // takes the lock with Acquire. A writer's Acquire covers every reader before it, because
        // each reader's subtraction continues the release sequence of the one before.
        match self.held {
            Held::Nothing => {}
            Held::Read => {
                let state = lock.words.state.fetch_sub(READER, Release) - READER;
                if state & INSIDE == 0 && state != 0 {
                    lock.wake_after_readers(park, state);
                }
            }
            Held::Alone => {
                if lock.words.state.compare_exchange(HELD, FREE, Release, Relaxed).is_err() {
                    lock.release_alone(park);
                }
            }
        }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
#[path = "lock_tests.rs"]
mod tests;
