//! The flush rule of the software CPUs: when [`FlushDomain::flush`] has returned, no CPU completes
//! an access to the flushed ranges through a translation from before the flush.
//!
//! Hardware keeps that rule with its TLB shootdown. A software CPU is a thread, and a thread can be
//! preempted between the look-up of a translation and the store through it. The store would then
//! happen long after the flush, in memory that has another owner. Waiting for the thread would be
//! wrong, too: a CPU that does not run must not delay a flush.
//!
//! # Implementation
//! - A flush domain has a *generation*. A CPU reads it ([`Port::generation`]), then looks its
//!   translation up (TLB or walk), then does one *checked operation*: it compares the generation
//!   again and does its side effect, indivisibly. If the generation has moved on, the operation
//!   does nothing and returns [`Stale`]: the CPU starts the access over. A flusher changes the page
//!   tables first and flushes then, so a CPU that reads the new generation walks the new page
//!   tables.
//! - [`FlushDomain::flush`] takes the next number, writes a record of its ranges, and raises the
//!   generation to that number at least. Then it ensures that no CPU is between its comparison and
//!   its side effect any more. The number is taken after the page tables were changed, so
//!   generation n means: flushes 1 to n have changed their page tables.
//! - A CPU keeps translations from one generation to the next. Before a look-up it catches up: it
//!   asks which ranges were flushed after its generation ([`Port::flushed_since`]) and drops its
//!   translations of them. If it lags too far behind, or a record is missing, it drops everything.
//! - A flush may be of a part of what CPUs cache ([`Scope`]), as the instructions of Arm and RISC-V
//!   are. A host then makes several.
//! - A CPU outside of guest mode ([`Port::exit_guest_mode`]) does no operation, and a flush ignores
//!   it.
//! - All accesses of a CPU to memory are checked operations: data, and the accessed and dirty bits
//!   of PTEs. PTEs are read by checked loads, so a walk never follows a pointer out of a page-table
//!   page that was freed after a flush.
//!
//! *Any* flush fails the comparison, also of ranges that the access does not use. An access that a
//! flush overtakes is repeated, which is cheap. Only translations that are kept *between* accesses
//! are dropped by ranges.
//!
//! # Why it is correct
//! Flushers take numbers from one counter and move the generation on by a maximum. So the
//! generation may pass a flush whose flusher was preempted between the two steps. For a CPU that
//! reads generation m, three claims hold for each flush n up to m:
//! - It observes the page tables as flush n left them. They were changed before number n was taken.
//!   The flusher that moved the generation to m took its number from the same counter later, and so
//!   has observed what was before n; the CPU has read its generation.
//! - It drops the ranges of flush n: by the record of n if that is there, otherwise by dropping
//!   everything.
//! - When the flusher of n goes on, flush n still restarts or waits for the CPUs with a generation
//!   older than n. It does so after the generation is n or more, whichever flusher raised it.
//!
//! The record is written before the generation moves on and not after: the CPUs of a busy machine
//! read the generation every few nanoseconds, and would often come before the record.
//!
//! # Two methods
//! *Restartable* ([`FlushMethod::Restartable`]): each checked operation is a Linux restartable
//! sequence (rseq(2)) of which the side effect is the last instruction. The kernel sends a thread
//! that was preempted or interrupted in the middle of it to its abort handler, and
//! `membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED_RSEQ)` does the same to those that are running now.
//! No flush waits for a thread that has no CPU.
//!
//! *Waiting* ([`FlushMethod::Waiting`]): each CPU sets a word of its own while it is inside a
//! checked operation, and the flush waits until it has left. It is correct everywhere, but a CPU
//! that is preempted inside delays the flush, and each operation takes a full fence.

#![expect(unsafe_code, reason = "checked operations work on raw memory; rseq and membarrier are raw interfaces")]

mod dropped;
mod records;
#[cfg(all(target_arch = "x86_64", target_os = "linux", target_pointer_width = "64", not(miri)))]
mod restartable;
#[cfg(not(all(target_arch = "x86_64", target_os = "linux", target_pointer_width = "64", not(miri))))]
#[path = "restartable_missing.rs"]
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
use slat::GfnRange;
use thiserror::Error;

#[cfg(test)]
use dropped::MAX_LIST;
pub use dropped::{Dropped, DroppedList, Scope};
use records::FlushRecords;
use restartable::Restartable;
use waiting::{Gate, Gates};

/// How a flush ensures that no CPU is in the middle of an access.
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

/// Why the flush method [`FlushMethod::Restartable`] is not available.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message names the fields")]
pub enum NotRestartable {
    /// The restartable sequences are written for Linux on x86-64.
    #[error("restartable sequences are implemented for Linux on x86-64 only")]
    Platform,
    /// The C library has registered no restartable sequences: glibc before 2.35, another C library,
    /// valgrind, or `GLIBC_TUNABLES=glibc.pthread.rseq=0`.
    #[error("the C library has not registered restartable sequences (glibc 2.35 or later does)")]
    NotRegistered,
    /// The kernel refused to register the process for `membarrier` on restartable sequences (Linux
    /// before 5.10, or a system call filter).
    #[error("membarrier for restartable sequences is refused: {}", std::io::Error::from_raw_os_error(*errno))]
    NoMembarrier { errno: i32 },
}

/// The generation moved on before the operation's side effect: nothing was done, and the access
/// must start over.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("the translation was flushed before the access completed")]
pub struct Stale;

/// The number of the newest flush at some time: a translation that was looked up under it observes
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

/// The CPUs that one flush reaches: one domain per VM.
#[derive(Debug)]
pub struct FlushDomain {
    // On a line of its own: every access of every CPU reads it.
    generation: CachePadded<AtomicU64>,
    /// The number of the last flush that has begun: never less than the generation.
    last_number: CachePadded<AtomicU64>,
    /// CPUs in guest mode. On a line of its own: they write it when they enter and exit.
    nr_in_guest_mode: CachePadded<AtomicU64>,
    records: FlushRecords,
    method: Method,
    gates: Gates,
    #[cfg(test)]
    defect: Defect,
}

/// What flushes leave out; the tests of the rule must detect it.
#[cfg(test)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Defect {
    None,
    /// They ignore CPUs between their comparison and their side effect.
    NoBarrier,
    /// They name no range.
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
    /// Why [`FlushMethod::Restartable`] is not available. [`FlushMethod::Waiting`] always works.
    pub fn with_method(method: FlushMethod) -> Result<FlushDomain, NotRestartable> {
        match method {
            FlushMethod::Restartable => FlushDomain::restartable(),
            FlushMethod::Waiting => Ok(FlushDomain::waiting()),
        }
    }

    fn restartable() -> Result<FlushDomain, NotRestartable> {
        Ok(FlushDomain::of(Method::Restartable(Restartable::register()?)))
    }

    pub(crate) fn waiting() -> FlushDomain {
        FlushDomain::of(Method::Waiting)
    }

    fn of(method: Method) -> FlushDomain {
        FlushDomain {
            generation: CachePadded::default(),
            last_number: CachePadded::default(),
            nr_in_guest_mode: CachePadded::default(),
            records: FlushRecords::new(),
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

    /// The method in use.
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
        self.invalidate(Scope::All, ranges);
    }

    /// As [`flush`](Self::flush), by an instruction that drops only `scope` of what CPUs have. On
    /// return it is complete: on Arm a DSB is part of it.
    pub fn invalidate(&self, scope: Scope, ranges: &[GfnRange]) {
        self.complete_flush(self.begin_flush(), scope, ranges);
    }

    /// Takes the number of a flush. The thread may be preempted between this and the rest.
    pub(crate) fn begin_flush(&self) -> u64 {
        // AcqRel: the caller's changes to the page tables come before it, and so do those of all
        // flushes with lower numbers; the rest of the flush releases all of them.
        self.last_number.fetch_add(1, Ordering::AcqRel) + 1
    }

    fn complete_flush(&self, number: u64, scope: Scope, ranges: &[GfnRange]) {
        #[cfg(test)]
        let ranges = if self.defect == Defect::NoRanges { &[] } else { ranges };
        self.records.write(number, scope, ranges);
        // SeqCst: releases the changes to the page tables, and the record, to the CPUs that read
        // the new generation. In the waiting method it is one half of a store-load pair (see
        // `waiting`). It is that also when a flush with a higher number came first: then it reads
        // the value of that flush, and a CPU whose fence comes later reads no lower one. The
        // maximum: the generation must not go back, or an access that was overtaken could find its
        // old generation again.
        self.generation.fetch_max(number, Ordering::SeqCst);
        #[cfg(test)]
        if self.defect == Defect::NoBarrier {
            return;
        }
        // A store-load pair with `Port::enter_guest_mode`: the generation is written before the
        // CPUs are counted, so one that is not counted yet will read it. Acquire: what the CPUs did
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

/// A CPU's access to memory: one per CPU, used by one thread at a time.
#[derive(Debug)]
pub struct Port {
    domain: Arc<FlushDomain>,
    mode: PortMode,
    is_in_guest_mode: Cell<bool>,
    // A gate counts one thread's entries: the port may move between threads, but two threads must
    // not share it.
    _not_sync: PhantomData<Cell<()>>,
}

#[derive(Debug)]
enum PortMode {
    Restartable(Restartable),
    Waiting(Arc<Gate>),
}

impl Port {
    /// A new CPU in `domain`.
    pub fn new(domain: &Arc<FlushDomain>) -> Port {
        let mode = match &domain.method {
            Method::Restartable(restartable) => PortMode::Restartable(*restartable),
            Method::Waiting => PortMode::Waiting(domain.gates.add()),
        };
        let port =
            Port { domain: Arc::clone(domain), mode, is_in_guest_mode: Cell::new(false), _not_sync: PhantomData };
        port.enter_guest_mode();
        port
    }

    /// Lets the CPU access memory, with a generation that it reads after this call. A new CPU is in
    /// guest mode.
    #[inline]
    pub fn enter_guest_mode(&self) {
        if !self.is_in_guest_mode.replace(true) {
            // SeqCst, and a fence: the other half of the store-load pair in `complete_flush`.
            self.domain.nr_in_guest_mode.fetch_add(1, Ordering::SeqCst);
            fence(Ordering::SeqCst);
        }
    }

    /// The CPU does nothing until it enters guest mode again: flushes ignore it until then.
    pub fn exit_guest_mode(&self) {
        if self.is_in_guest_mode.replace(false) {
            // Release: what the CPU did comes before a flush that does not count it any more.
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
        // Acquire: pairs with the flush's increment; the reads of page tables that follow observe
        // what was written before the flush.
        Generation(self.domain.generation.load(Ordering::Acquire))
    }

    /// What was flushed after `earlier` and up to `now`, two generations that this CPU has read.
    /// `None` means everything: records are missing, or there are too many ranges.
    pub fn flushed_since(&self, earlier: Generation, now: Generation) -> Option<DroppedList> {
        self.domain.records.between(earlier.0, now.0)
    }

    /// Whether no flush has begun since `generation` was read. Only a hint that saves work: it is
    /// about the past.
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
            PortMode::Restartable(restartable) => unsafe {
                restartable.load(&self.domain.generation, generation.0, at)
            },
            PortMode::Waiting(gate) => gate.inside(&self.domain.generation, generation.0, || {
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
            PortMode::Restartable(restartable) => unsafe {
                restartable.store(&self.domain.generation, generation.0, at, value)
            },
            PortMode::Waiting(gate) => gate.inside(&self.domain.generation, generation.0, || {
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
            PortMode::Restartable(restartable) => unsafe {
                restartable.compare_exchange(&self.domain.generation, generation.0, at, current, new)
            },
            PortMode::Waiting(gate) => gate.inside(&self.domain.generation, generation.0, || {
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
        if let PortMode::Waiting(gate) = &self.mode {
            self.domain.gates.remove(gate);
        }
    }
}
