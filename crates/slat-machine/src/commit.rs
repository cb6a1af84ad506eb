//! The flush rule of the software CPUs: when [`FlushDomain::flush`] has returned, no CPU completes
//! an access through a translation of the ranges it names that is older than the flush.
//!
//! Hardware keeps that rule with its TLB shootdown. A software CPU is a thread, and a thread can be
//! preempted between looking a translation up and storing through it; the store would then land
//! whenever the scheduler likes, long after the flush, in memory that meanwhile belongs to somebody
//! else. Waiting for the thread would be wrong, too: a CPU that does not run must not delay a
//! flush.
//!
//! # The protocol
//! - A flush domain has a *generation*. A CPU reads it ([`Port::generation`]), then looks its
//!   translation up (TLB or walk), then does one *checked operation*: it compares the generation
//!   again and does its side effect, in one indivisible piece. If the generation has moved on, the
//!   operation does nothing and answers [`Stale`]: the CPU starts the access over. Whoever takes a
//!   translation away changes the tables first and flushes then, so a CPU that reads the new
//!   generation walks the new tables.
//! - [`FlushDomain::flush`] takes the next number, leaves a record of its ranges, lets the
//!   generation be that number at least, then makes sure that no CPU stands between its comparison
//!   and its side effect any more. The number is taken after the tables were changed, so generation
//!   n means: flushes 1 to n have changed their tables.
//! - A CPU keeps translations from one generation to the next. Before it looks one up, it catches
//!   up: it asks which ranges were flushed behind the generation that it knows
//!   ([`Port::flushed_since`]) and drops its translations of them. If it lags too far behind for
//!   that, or a record is missing, the answer is: everything.
//! - A CPU outside of guest mode ([`Port::exit_guest_mode`]) does no operation at all, and a flush
//!   need not mind it.
//! - All that a CPU does to memory it does by checked operations: data, and the accessed and dirty
//!   bits of the tables. Table entries are read by checked loads, so a walk never follows a pointer
//!   out of a table that was freed after a flush.
//!
//! The comparison asks for *any* flush, also of ranges that the access has nothing to do with: an
//! access that a flush overtakes is done over, which is cheap, and the rule needs no more words
//! than that. Only what is kept *between* accesses goes by ranges.
//!
//! # Why a CPU that catches up misses nothing
//! Flushers take numbers by one counter and move the generation on by a maximum, so the generation
//! may pass a flush whose flusher has lost its processor between the two steps. Three things can
//! then be asked of a CPU that reads generation m, of each flush n up to m:
//! - Does it see the tables as flush n left them? Yes: they were changed before number n was taken.
//!   The flusher that moved the generation to m took its number from the same counter later, and so
//!   has seen what was before n; the CPU has read its generation.
//! - Does it drop what flush n names? Yes: if the record of n is there, by it; if it is not there
//!   yet, everything.
//! - Does flush n, when its flusher goes on, still restart or wait for the CPUs that have an older
//!   generation than n? Yes: it does so after the generation is n or more, whoever made it so.
//!
//! The record is written before the generation moves on and not after: the CPUs of a busy machine
//! look at the generation every few nanoseconds, and would often be faster than the record.
//!
//! # Two methods
//! *Restartable* ([`FlushMethod::Restartable`]): each checked operation is a Linux restartable
//! sequence (rseq(2)) of which the side effect is the last instruction. The kernel sends a thread
//! that was preempted or interrupted in the middle of it to its abort handler, and
//! `membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED_RSEQ)` does the same to those that are running now.
//! Nobody waits for a thread that has no CPU.
//!
//! *Waiting* ([`FlushMethod::Waiting`]): each CPU says in a word of its own that it is inside a
//! checked operation, and the flush waits until it has left. It is correct everywhere, but a CPU
//! that is preempted inside delays the flush, and each operation pays for a full fence.

#![expect(unsafe_code, reason = "checked operations work on raw memory; rseq and membarrier are raw interfaces")]

mod records;
#[cfg(all(target_arch = "x86_64", target_os = "linux", target_pointer_width = "64", not(miri)))]
mod restartable;
#[cfg(not(all(target_arch = "x86_64", target_os = "linux", target_pointer_width = "64", not(miri))))]
#[path = "commit/restartable_missing.rs"]
mod restartable;
#[cfg(test)]
pub(crate) mod tests;
#[cfg(test)]
mod tests_records;
mod waiting;

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crossbeam_utils::CachePadded;
use slat::{Gfn, GfnRange};
use thiserror::Error;

use records::Records;
use restartable::Restartable;
use waiting::{Gate, Gates};

/// How a flush makes sure that no CPU is in the middle of an access.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FlushMethod {
    /// Restartable sequences and `membarrier`: the flush never waits for a CPU thread that does not
    /// run.
    Restartable,
    /// The flush waits for the CPUs that are inside an access, also when their threads were
    /// preempted there.
    Waiting,
}

impl fmt::Display for FlushMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FlushMethod::Restartable => "restartable sequences (a flush never waits for a preempted CPU thread)",
            FlushMethod::Waiting => {
                "waiting fallback (a flush waits for CPU threads inside an access, even preempted ones)"
            }
        })
    }
}

/// Why the flush method [`FlushMethod::Restartable`] cannot be had here.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum NotRestartable {
    /// The critical sections are written for Linux on x86-64.
    #[error("restartable sequences are implemented for Linux on x86-64 only")]
    Platform,
    /// The C library has registered no restartable sequences: glibc before 2.35, another C library,
    /// valgrind, or `GLIBC_TUNABLES=glibc.pthread.rseq=0`.
    #[error("the C library has not registered restartable sequences (glibc 2.35 or later does)")]
    NotRegistered,
    /// The kernel refused to register the process for `membarrier` on restartable sequences (Linux
    /// before 5.10, or a system call filter).
    #[error("membarrier for restartable sequences is refused: {}", std::io::Error::from_raw_os_error(*errno))]
    NoMembarrier {
        /// The error number of membarrier(2).
        errno: i32,
    },
}

/// The generation moved on before the operation's side effect: nothing was done, and the access
/// must start over.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("the translation was flushed before the access completed")]
pub struct Stale;

/// The number of the newest flush at some time: a translation that was looked up under it has seen
/// that flush and all before.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Generation(u64);

impl Generation {
    /// How many flushes there were between `earlier` and this one.
    #[inline]
    pub fn nr_flushes_since(self, earlier: Generation) -> u64 {
        self.0.wrapping_sub(earlier.0)
    }
}

/// Ranges that a CPU catches up with at a time. With more, filling the TLB anew costs no more than
/// looking for them.
const MAX_LIST: usize = 32;

/// Some ranges of guest-physical memory. Those that touch each other are put together.
#[derive(Clone, Debug)]
pub struct RangeList {
    ranges: [GfnRange; MAX_LIST],
    len: usize,
}

impl RangeList {
    fn new() -> RangeList {
        RangeList { ranges: [GfnRange::new(Gfn(0), 0); MAX_LIST], len: 0 }
    }

    /// Adds `range`; `false` if there is no room.
    fn add(&mut self, range: GfnRange) -> bool {
        if range.is_empty() {
            return true;
        }
        // The same page, or a page and its neighbour, again and again: the ordinary case.
        let touching = |other: &&mut GfnRange| range.start <= other.end && other.start <= range.end;
        if let Some(other) = self.ranges[..self.len].iter_mut().find(touching) {
            other.start = other.start.min(range.start);
            other.end = other.end.max(range.end);
            return true;
        }
        let Some(free) = self.ranges.get_mut(self.len) else {
            return false;
        };
        *free = range;
        self.len += 1;
        true
    }

    /// The ranges, none of them empty.
    pub fn as_slice(&self) -> &[GfnRange] {
        &self.ranges[..self.len]
    }
}

/// The CPUs that one flush reaches: one domain per VM.
#[derive(Debug)]
pub struct FlushDomain {
    // On a line of its own: every access of every CPU reads it.
    generation: CachePadded<AtomicU64>,
    /// The number of the last flush that has begun: never less than the generation.
    last_number: CachePadded<AtomicU64>,
    /// CPUs in guest mode. On a line of its own: they write it when they enter and exit.
    nr_in_guest_mode: CachePadded<AtomicU64>,
    records: Records,
    method: Method,
    gates: Gates,
    #[cfg(test)]
    defect: Defect,
}

/// What flushes leave out: the tests of the rule must notice.
#[cfg(test)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Defect {
    None,
    /// They do not mind CPUs that stand between their comparison and their side effect.
    NoBarrier,
    /// They name nothing.
    NoRanges,
}

#[derive(Debug)]
enum Method {
    Restartable(Restartable),
    Waiting,
}

impl FlushDomain {
    /// A domain with the best method that works here.
    pub fn new() -> FlushDomain {
        FlushDomain::restartable().unwrap_or_else(|_| FlushDomain::waiting())
    }

    /// A domain with the given method.
    ///
    /// # Errors
    /// Says why [`FlushMethod::Restartable`] was asked for and cannot be had.
    /// [`FlushMethod::Waiting`] always works.
    pub fn with_method(method: FlushMethod) -> Result<FlushDomain, NotRestartable> {
        match method {
            FlushMethod::Restartable => FlushDomain::restartable(),
            FlushMethod::Waiting => Ok(FlushDomain::waiting()),
        }
    }

    fn restartable() -> Result<FlushDomain, NotRestartable> {
        Ok(FlushDomain::of(Method::Restartable(Restartable::register()?)))
    }

    fn waiting() -> FlushDomain {
        FlushDomain::of(Method::Waiting)
    }

    fn of(method: Method) -> FlushDomain {
        FlushDomain {
            generation: CachePadded::default(),
            last_number: CachePadded::default(),
            nr_in_guest_mode: CachePadded::default(),
            records: Records::new(),
            method,
            gates: Gates::default(),
            #[cfg(test)]
            defect: Defect::None,
        }
    }

    /// The domain with a defect.
    #[cfg(test)]
    pub(crate) fn with_defect(self, defect: Defect) -> FlushDomain {
        FlushDomain { defect, ..self }
    }

    /// The method in force.
    pub fn method(&self) -> FlushMethod {
        match self.method {
            Method::Restartable(_) => FlushMethod::Restartable,
            Method::Waiting => FlushMethod::Waiting,
        }
    }

    /// Returns only when no CPU of this domain can complete an access to a page of `ranges` that
    /// looked its translation up before this call. CPUs keep their translations of other pages, if
    /// `ranges` are few.
    pub fn flush(&self, ranges: &[GfnRange]) {
        self.complete_flush(self.begin_flush(), ranges);
    }

    /// Takes the number of a flush. A thread may lose its processor, for any time, between this and
    /// the rest.
    pub(crate) fn begin_flush(&self) -> u64 {
        // AcqRel: the caller's changes to the tables come before it, and so do those of all flushes
        // with lower numbers; all of them are released together by the rest.
        self.last_number.fetch_add(1, Ordering::AcqRel) + 1
    }

    fn complete_flush(&self, number: u64, ranges: &[GfnRange]) {
        #[cfg(test)]
        let ranges = if self.defect == Defect::NoRanges { &[] } else { ranges };
        self.records.write(number, ranges);
        // SeqCst: releases the changes to the tables to the CPUs that read the new generation, and
        // the record with them; and in the waiting method it is one half of a store-load pair (see
        // `waiting`). It is that also when a flush with a higher number was faster: then it reads
        // what that one wrote, and a CPU whose fence comes later reads no less. The maximum: the
        // generation must not go back, or an access that was overtaken could take itself for one
        // that was not.
        self.generation.fetch_max(number, Ordering::SeqCst);
        #[cfg(test)]
        if self.defect == Defect::NoBarrier {
            return;
        }
        // A store-load pair with `Port::enter_guest_mode`: the generation is written before the
        // CPUs are counted, so one that is not counted yet will read it. Acquire: what those did
        // that have exited comes before the flush returns.
        fence(Ordering::SeqCst);
        if self.nr_in_guest_mode.load(Ordering::Acquire) == 0 {
            return;
        }
        match &self.method {
            Method::Restartable(restartable) => restartable.restart_running_threads(),
            Method::Waiting => self.gates.wait_until_left(),
        }
    }
}

impl Default for FlushDomain {
    fn default() -> FlushDomain {
        FlushDomain::new()
    }
}

/// A CPU's way to memory: one per CPU, used by one thread at a time.
#[derive(Debug)]
pub struct Port {
    domain: Arc<FlushDomain>,
    mode: Mode,
    is_in_guest_mode: Cell<bool>,
    // A gate counts one thread's entries: the port may move between threads, but not be shared by
    // them.
    _not_sync: PhantomData<Cell<()>>,
}

#[derive(Debug)]
enum Mode {
    Restartable(Restartable),
    Waiting(Arc<Gate>),
}

impl Port {
    /// A new CPU in `domain`.
    pub fn new(domain: &Arc<FlushDomain>) -> Port {
        let mode = match &domain.method {
            Method::Restartable(restartable) => Mode::Restartable(*restartable),
            Method::Waiting => Mode::Waiting(domain.gates.add()),
        };
        let port =
            Port { domain: Arc::clone(domain), mode, is_in_guest_mode: Cell::new(false), _not_sync: PhantomData };
        port.enter_guest_mode();
        port
    }

    /// Lets the CPU access memory, from a generation on that it reads after this. A new one may.
    #[inline]
    pub fn enter_guest_mode(&self) {
        if !self.is_in_guest_mode.replace(true) {
            // SeqCst, and a fence: the other half of the store-load pair in `complete_flush`.
            self.domain.nr_in_guest_mode.fetch_add(1, Ordering::SeqCst);
            fence(Ordering::SeqCst);
        }
    }

    /// Says that the CPU does nothing until it enters guest mode again: flushes need not mind it
    /// till then.
    pub fn exit_guest_mode(&self) {
        if self.is_in_guest_mode.replace(false) {
            // Release: what the CPU did comes before whoever does not count it any more.
            self.domain.nr_in_guest_mode.fetch_sub(1, Ordering::Release);
        }
    }

    /// The domain that the CPU belongs to.
    pub fn domain(&self) -> &Arc<FlushDomain> {
        &self.domain
    }

    /// The current generation. Read it before the translation is looked up.
    #[inline]
    pub fn generation(&self) -> Generation {
        // Acquire: pairs with the flush's increment; the table reads that follow see what was
        // written before the flush.
        Generation(self.domain.generation.load(Ordering::Acquire))
    }

    /// What was flushed after `earlier` and up to `now`, two generations that this CPU has read.
    /// `None`: it cannot be told any more, or not yet, or it is too many ranges; it must be taken
    /// for everything.
    pub fn flushed_since(&self, earlier: Generation, now: Generation) -> Option<RangeList> {
        self.domain.records.between(earlier.0, now.0)
    }

    /// Whether no flush has begun since `generation` was read. Only a hint that saves work: it is
    /// true of the past.
    #[inline]
    pub fn is_current(&self, generation: Generation) -> bool {
        self.generation() == generation
    }

    /// Loads the word at `at`, with acquire ordering, if `generation` is still current.
    ///
    /// # Errors
    /// [`Stale`]: a flush has begun.
    ///
    /// # Safety
    /// `at` is aligned to 8 bytes. As long as `generation` is current, it is valid for atomic
    /// reads.
    #[inline]
    pub unsafe fn load_u64(&self, generation: Generation, at: *const u64) -> Result<u64, Stale> {
        debug_assert!(self.is_in_guest_mode.get(), "an access outside of guest mode");
        match &self.mode {
            // SAFETY: the caller's promise; the port is used by this thread, which the C library
            // registered.
            Mode::Restartable(restartable) => unsafe { restartable.load(&self.domain.generation, generation.0, at) },
            Mode::Waiting(gate) => gate.inside(&self.domain.generation, generation.0, || {
                // SAFETY: the caller's promise. Acquire: as on the other path, where the
                // instruction itself has it.
                unsafe { AtomicU64::from_ptr(at.cast_mut()) }.load(Ordering::Acquire)
            }),
        }
    }

    /// Stores `value` at `at`, with release ordering, if `generation` is still current.
    ///
    /// # Errors
    /// [`Stale`]: a flush has begun, and nothing was stored.
    ///
    /// # Safety
    /// `at` is aligned to 8 bytes. As long as `generation` is current, it is valid for atomic
    /// writes.
    #[inline]
    pub unsafe fn store_u64(&self, generation: Generation, at: *mut u64, value: u64) -> Result<(), Stale> {
        debug_assert!(self.is_in_guest_mode.get(), "an access outside of guest mode");
        match &self.mode {
            // SAFETY: the caller's promise; the port is used by this thread, which the C library
            // registered.
            Mode::Restartable(restartable) => unsafe {
                restartable.store(&self.domain.generation, generation.0, at, value)
            },
            Mode::Waiting(gate) => gate.inside(&self.domain.generation, generation.0, || {
                // SAFETY: the caller's promise. Release: as on the other path, where the
                // instruction itself has it.
                unsafe { AtomicU64::from_ptr(at) }.store(value, Ordering::Release);
            }),
        }
    }

    /// Replaces `current` at `at` by `new`, atomically and sequentially consistent, if `generation`
    /// is still current. The inner result is that of [`AtomicU64::compare_exchange`]: the value
    /// that was there.
    ///
    /// # Errors
    /// [`Stale`]: a flush has begun, and nothing was exchanged.
    ///
    /// # Safety
    /// `at` is aligned to 8 bytes. As long as `generation` is current, it is valid for atomic reads
    /// and writes.
    #[inline]
    pub unsafe fn compare_exchange_u64(
        &self,
        generation: Generation,
        at: *mut u64,
        current: u64,
        new: u64,
    ) -> Result<Result<u64, u64>, Stale> {
        debug_assert!(self.is_in_guest_mode.get(), "an access outside of guest mode");
        match &self.mode {
            // SAFETY: the caller's promise; the port is used by this thread, which the C library
            // registered.
            Mode::Restartable(restartable) => unsafe {
                restartable.compare_exchange(&self.domain.generation, generation.0, at, current, new)
            },
            Mode::Waiting(gate) => gate.inside(&self.domain.generation, generation.0, || {
                // SAFETY: the caller's promise. SeqCst: what a locked instruction is on the other
                // path.
                unsafe { AtomicU64::from_ptr(at) }.compare_exchange(current, new, Ordering::SeqCst, Ordering::SeqCst)
            }),
        }
    }

    /// Stores `value` at `at` and returns what was there before, atomically and sequentially
    /// consistent, if `generation` is still current.
    ///
    /// # Errors
    /// [`Stale`]: a flush has begun, and nothing was exchanged.
    ///
    /// # Safety
    /// As [`compare_exchange_u64`](Self::compare_exchange_u64).
    #[inline]
    pub unsafe fn exchange_u64(&self, generation: Generation, at: *mut u64, value: u64) -> Result<u64, Stale> {
        // SAFETY: the caller's promise.
        let mut current = unsafe { self.load_u64(generation, at) }?;
        loop {
            // SAFETY: as above.
            match unsafe { self.compare_exchange_u64(generation, at, current, value) }? {
                Ok(before) => return Ok(before),
                Err(found) => current = found,
            }
        }
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.exit_guest_mode();
        if let Mode::Waiting(gate) = &self.mode {
            self.domain.gates.remove(gate);
        }
    }
}
