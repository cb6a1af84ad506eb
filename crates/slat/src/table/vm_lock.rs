//! The optional lock of a VM, and its times. `no_lock.rs` is this module without the feature
//! `baselines`: the same interface, and no lock.

use crate::config::Config;
use crate::error::OutOfMemory;
use crate::host::Host;
use crate::stats::{Counter, is_sampled};
use crate::sync::{AtomicU32, Lock, LockGuard, Locking, Park, Side, spin_loop};

#[cfg(debug_assertions)]
use super::participant::Hold;
use super::retire::Participant;

/// The lock that a VM holds while it changes its page tables, if its [`Locking`] is not `None`.
pub(crate) struct VmLock(Lock);

/// Whether the participants of a VM record the times of its lock.
#[derive(Clone, Copy)]
pub(crate) struct LockTiming {
    is_on: bool,
}

/// The VM's lock, held until this is dropped. `None` in a VM without one.
pub(crate) struct HeldLock<'a, H: Host>(#[expect(dead_code, reason = "is dropped")] Option<Held<'a, H>>);

struct Held<'a, H: Host> {
    _guard: LockGuard<'a, ParkOf<'a, H>>,
    timed: Option<TimedHold<'a, H>>,
    #[cfg(debug_assertions)]
    participant: &'a Participant,
}

/// By how many acquisitions the timed holds come after the timed faults. Small, for calls that take
/// the lock some dozen times; large enough that a few faults without the lock do not undo it.
const HOLDS_APART: u64 = 32;

/// A hold of the lock that is timed.
struct TimedHold<'a, H: Host> {
    host: &'a H,
    participant: &'a Participant,
    start_ns: u64,
}

/// How threads of a host wait for the lock: [`Host::parking`], or by yielding.
struct ParkOf<'a, H>(&'a H);

impl<H: Host> Park for ParkOf<'_, H> {
    #[inline]
    fn relax(&self) {
        match self.0.parking() {
            Some(parking) => parking.relax(),
            None => spin_loop(),
        }
    }

    fn park(&self, word: &AtomicU32, expected: u32) {
        match self.0.parking() {
            Some(parking) => parking.park(word, expected),
            // A return for no reason: the thread looks again.
            None => {
                spin_loop();
                self.0.yield_now();
            }
        }
    }

    fn unpark_one(&self, word: *const AtomicU32) -> bool {
        self.0.parking().is_some_and(|parking| parking.unpark_one(word))
    }

    fn unpark_all(&self, word: *const AtomicU32) {
        if let Some(parking) = self.0.parking() {
            parking.unpark_all(word);
        }
    }
}

impl LockTiming {
    pub(super) const OFF: LockTiming = LockTiming { is_on: false };

    /// Makes room for the times in `participant`, whose owner does not hold the lock.
    pub(super) fn prepare(self, participant: &Participant) -> Result<(), OutOfMemory> {
        if !self.is_on {
            return Ok(());
        }
        #[cfg(debug_assertions)]
        participant.record_hold(Hold::Outside);
        participant.stats.make_lock_times()
    }
}

impl<H: Host> Drop for Held<'_, H> {
    /// Runs before the lock is released. The clock is read then, since to wake a sleeper costs more
    /// than most holds, and may cost the CPU.
    #[inline]
    fn drop(&mut self) {
        #[cfg(debug_assertions)]
        self.participant.record_hold(Hold::Outside);
        if let Some(timed) = &self.timed {
            timed.record();
        }
    }
}

impl<H: Host> TimedHold<'_, H> {
    #[cold]
    fn record(&self) {
        let hold_ns = self.host.timestamp_ns().saturating_sub(self.start_ns);
        if let Some(times) = self.participant.stats.lock_times() {
            times.hold_ns.record(hold_ns);
        }
    }
}

impl VmLock {
    pub(super) fn new(config: &Config) -> VmLock {
        VmLock(Lock::new(config.locking))
    }

    /// Whether there is a lock.
    #[inline]
    pub(super) fn exists(&self) -> bool {
        self.0.locking() != Locking::None
    }

    pub(super) fn timing(&self) -> LockTiming {
        LockTiming { is_on: self.exists() }
    }

    /// Whether other threads wait for the lock.
    #[inline]
    pub(super) fn is_contended(&self) -> bool {
        self.0.is_contended()
    }

    /// Takes the lock, if there is one, and waits for it.
    #[inline(always)]
    pub(super) fn acquire<'a, H: Host>(
        &'a self,
        host: &'a H,
        participant: &'a Participant,
        side: Side,
    ) -> HeldLock<'a, H> {
        HeldLock(match self.0.locking() {
            Locking::None => None,
            _ => Some(self.acquire_timed(host, participant, side)),
        })
    }

    /// Takes the lock.
    ///
    /// All waits are timed, holds by sample. A thread that waits loses more than two readings of
    /// the clock. Most holds are as short as these readings, and to time each would keep other
    /// threads out for twice as long. Whether a hold is timed is decided before the lock is taken.
    /// Where each fault takes the lock once, it is not the hold of a timed fault: otherwise both
    /// clocks would be in the guest's stall.
    #[inline]
    fn acquire_timed<'a, H: Host>(&'a self, host: &'a H, participant: &'a Participant, side: Side) -> Held<'a, H> {
        #[cfg(debug_assertions)]
        assert!(participant.hold() == Hold::Outside, "the lock is taken by its holder");
        let is_timed = is_sampled(participant.stats.get(Counter::LockAcquisitions).wrapping_sub(HOLDS_APART));
        participant.stats.count(Counter::LockAcquisitions);
        let guard = match self.0.try_acquire(ParkOf(host), side) {
            Some(guard) => guard,
            None => self.wait(host, participant, side),
        };
        #[cfg(debug_assertions)]
        participant.record_hold(match side {
            Side::Read => Hold::Read,
            Side::Write => Hold::Write,
        });
        Held {
            _guard: guard,
            timed: if is_timed { Some(time_hold(host, participant)) } else { None },
            #[cfg(debug_assertions)]
            participant,
        }
    }

    #[cold]
    fn wait<'a, H: Host>(
        &'a self,
        host: &'a H,
        participant: &'a Participant,
        side: Side,
    ) -> LockGuard<'a, ParkOf<'a, H>> {
        let start_ns = host.timestamp_ns();
        let guard = self.0.acquire(ParkOf(host), side);
        participant.stats.count(Counter::LockWaits);
        if let Some(times) = participant.stats.lock_times() {
            times.wait_ns.record(host.timestamp_ns().saturating_sub(start_ns));
        }
        guard
    }
}

#[cold]
fn time_hold<'a, H: Host>(host: &'a H, participant: &'a Participant) -> TimedHold<'a, H> {
    TimedHold { host, participant, start_ns: host.timestamp_ns() }
}
