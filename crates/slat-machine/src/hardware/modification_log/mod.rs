//! Page-modification logging: an EPT CPU logs the pages that it makes dirty, so that the hypervisor
//! need not search every leaf for set dirty bits.
//!
//! Source: Intel SDM vol. 3C, chapter "VMX support for address translation", section
//! "Page-Modification Logging". A log has 512 entries, guest-physical addresses with bits 11 to 0
//! clear. When a walk sets the dirty bit of a leaf, the CPU writes the address of the access to the
//! log, from index 511 down. With no index left the CPU exits before it sets a bit.
//!
//! Hardware's log belongs to software while the CPU is stopped, and KVM stops all CPUs for a
//! harvest. Here a drain may read the log at any time beside its CPU, also if that CPU's thread was
//! preempted in the middle of an access: no thread waits for a CPU. So two things differ. Software
//! does not set the index back to 511; it wraps around, and the log is full while it holds 512
//! entries that were not drained. And the CPU writes the entry before the dirty bit and not after
//! it.
//!
//! # Implementation
//! The CPU has read the generation and walked to a leaf that is not dirty. It
//! 1. appends the page to its log,
//! 2. sets the dirty bit by a checked compare-and-exchange (see
//!    [`commit`](crate::hardware::commit)),
//! 3. does the access.
//!
//! If the exchange fails, the access starts over, and the entry stays: a report too many.
//!
//! A drain ([`ModificationLogs::drain`])
//! 1. reads how far each log is filled,
//! 2. flushes, with no range,
//! 3. passes the entries up to there to the engine, which marks the pages,
//! 4. releases their places to the CPU.
//!
//! A harvest of the engine drains, takes the marks, clears the dirty bits of the taken pages,
//! flushes, and reports.
//!
//! # Why no write is missed
//! A page whose leaf is dirty is always in a log, or marked, or taken by a harvest that has not
//! read the leaf yet. This holds when the dirty bit is set. The entry was appended before, so it is
//! in the log, unless a drain has passed it on. A drain passes on only what it found before its
//! flush. The CPU had read its generation before it appended, so its walk has not observed that
//! flush: when the flush has returned, the exchange is done or will fail. It did not fail, so it
//! was done before the page was marked. And it stays so: the entry leaves the log after the page is
//! marked, and the harvest that takes the mark reads the leaf afterwards and clears the dirty bit.
//!
//! Without step 2 a drain could come between the entry and the exchange, and its harvest could
//! finish while the leaf is not dirty yet. The exchange may still succeed before the harvest's own
//! flush. Then the leaf is dirty without a mark, and all later writes to the page are missed. For
//! the same reason the flush comes before any entry is passed on: another harvest might take the
//! mark.
//!
//! # Concurrent drains
//! An entry stays in its log until a drain has passed it to the engine and the engine has marked
//! the page. So a drain never relies on another one that was preempted: it passes on what it finds
//! itself. When a drain has returned, every page of which a dirty bit was set before the drain
//! began was passed to the engine after that, by this drain or another one, and the engine has
//! marked it. A harvest therefore has every write that was done when it began, whatever CPUs and
//! other drains do. Pages that another harvest has taken are in its report, and pages that another
//! call is about to mark in the next one, as everywhere in a dirty log. The cost is entries that
//! are passed on twice.
//!
//! # Cost
//! A CPU makes two plain stores for each dirty bit that it sets, and takes no lock. A drain reads
//! each log and flushes once if any has entries. CPUs do not empty their logs at other faults and
//! exits, as KVM does: the fault would do work that a harvest can do without stopping the CPU.

#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::iter;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crossbeam_utils::CachePadded;
use slat::Gpa;
use thiserror::Error;

use crate::hardware::commit::FlushDomain;

/// Entries of a log.
pub const NR_ENTRIES: u64 = 512;

/// Bits of an address that an entry does not keep.
const OFFSET: u64 = 0xfff;

/// No index is left: nothing was logged, and the CPU must exit before it sets an accessed or dirty
/// bit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("the page-modification log is full")]
pub struct LogFull;

/// A log in memory. Entries have numbers, which count up for ever; entry n is at index 511 - n mod
/// 512.
#[derive(Debug)]
struct Buffer {
    entries: [AtomicU64; NR_ENTRIES as usize],
    /// Entries written so far. Only the CPU writes it.
    nr_logged: CachePadded<AtomicU64>,
    /// Entries that were passed on: their places are free. Never above `nr_logged`, and at most 512
    /// below it.
    nr_drained: CachePadded<AtomicU64>,
    /// Whether a CPU has the log.
    is_taken: AtomicBool,
    next: OnceLock<Arc<Buffer>>,
}

impl Buffer {
    /// An empty log, taken by a CPU.
    fn new() -> Buffer {
        Buffer {
            entries: [const { AtomicU64::new(0) }; NR_ENTRIES as usize],
            nr_logged: CachePadded::default(),
            nr_drained: CachePadded::default(),
            is_taken: AtomicBool::new(true),
            next: OnceLock::new(),
        }
    }

    fn entry(&self, number: u64) -> &AtomicU64 {
        &self.entries[(NR_ENTRIES - 1 - number % NR_ENTRIES) as usize]
    }

    /// How many entries were written so far; `None` if all were passed on.
    fn filled(&self) -> Option<u64> {
        // Acquire: the entries up to there can be read; and it orders the load below, which thereby
        // is no older.
        let nr_logged = self.nr_logged.load(Ordering::Acquire);
        // Acquire: the pages of passed-on entries were marked, and a drain that skips them here
        // observes the marks.
        (self.nr_drained.load(Ordering::Acquire) < nr_logged).then_some(nr_logged)
    }

    /// Passes the entries with numbers below `end` to `log`, unless others have.
    /// [`filled`](Self::filled) returned `end`, or the CPU knows it.
    fn pass_on(&self, end: u64, log: &mut dyn FnMut(&[Gpa])) {
        // Acquire: as in `filled`. Not before `end` was read. The CPU wrote entry `end - 1` after
        // it had observed that all but 511 before it were passed on, so this is no less, and the
        // entries fit.
        let start = self.nr_drained.load(Ordering::Acquire);
        if start >= end {
            return;
        }
        let mut pages = [Gpa(0); NR_ENTRIES as usize];
        for (page, number) in pages.iter_mut().zip(start..end) {
            // Acquire: if the CPU has written a newer entry over it, another thread has passed this
            // one on meanwhile and had it marked; then that is observed. The newer one is passed on
            // too early, which is a report too many: it stays in the log and is passed on again.
            page.0 = self.entry(number).load(Ordering::Acquire);
        }
        log(pages.get(..(end - start) as usize).unwrap_or(&pages));
        // Release: the marks come first, for every thread that finds the entries passed on, and the
        // loads above come before the CPU writes over them. The maximum, because others may be
        // further: each step is a read-modify-write, so a reader of the last one observes what came
        // before all of them.
        self.nr_drained.fetch_max(end, Ordering::Release);
    }
}

/// A CPU's log: one per CPU, used by one thread at a time. Entries that are left when it is dropped
/// are drained later.
#[derive(Debug)]
pub struct ModificationLog {
    buffer: Arc<Buffer>,
    /// Entries written before this CPU had the log.
    nr_before: u64,
    /// Entries that were passed on when the CPU last read the number.
    // A cell, so that two threads cannot share the log.
    nr_drained: Cell<u64>,
}

impl ModificationLog {
    fn of(buffer: Arc<Buffer>) -> ModificationLog {
        // Relaxed: written by the CPU that had the log before, whose release was acquired with the
        // claim; the copy of `nr_drained` may be too small, then it is read again.
        let nr_before = buffer.nr_logged.load(Ordering::Relaxed);
        ModificationLog { nr_drained: Cell::new(nr_before.saturating_sub(NR_ENTRIES)), nr_before, buffer }
    }

    fn nr_ever_logged(&self) -> u64 {
        // Relaxed: only this CPU writes it.
        self.buffer.nr_logged.load(Ordering::Relaxed)
    }

    /// Entries that this CPU has logged so far.
    pub fn nr_logged(&self) -> u64 {
        self.nr_ever_logged() - self.nr_before
    }

    /// Whether there is an index left.
    ///
    /// # Errors
    /// [`LogFull`]: there is not.
    #[inline]
    pub fn check_room(&self) -> Result<(), LogFull> {
        if self.nr_ever_logged() - self.nr_drained.get() < NR_ENTRIES {
            return Ok(());
        }
        // Acquire: the drains that passed the entries on have read them, so they may be
        // overwritten.
        self.nr_drained.set(self.buffer.nr_drained.load(Ordering::Acquire));
        if self.nr_ever_logged() - self.nr_drained.get() < NR_ENTRIES { Ok(()) } else { Err(LogFull) }
    }

    /// Logs the page of `gpa`. To be called before its dirty bit is set, and after the generation
    /// was read with which that is checked.
    ///
    /// # Errors
    /// [`LogFull`]: nothing was logged.
    #[inline]
    pub fn append(&self, gpa: Gpa) -> Result<(), LogFull> {
        self.check_room()?;
        let number = self.nr_ever_logged();
        // Release: a drain that looks for the older entry in this place, and finds this one,
        // observes that the older one was passed on and marked, as this CPU has observed it.
        self.buffer.entry(number).store(gpa.0 & !OFFSET, Ordering::Release);
        // Release: the entry comes first, and the read of the generation: the flush of the drain
        // that observes this is newer.
        self.buffer.nr_logged.store(number + 1, Ordering::Release);
        Ok(())
    }

    /// Passes all entries to `log`, as the CPU does when its log is full. No flush is needed: this
    /// CPU is not between an entry and its dirty bit. Entries that drains are passing on at the
    /// same time may be passed on twice.
    pub fn empty(&self, log: &mut dyn FnMut(&[Gpa])) {
        self.buffer.pass_on(self.nr_ever_logged(), log);
    }
}

impl Drop for ModificationLog {
    fn drop(&mut self) {
        // Release: the next CPU that takes the log goes on behind this one's entries.
        self.buffer.is_taken.store(false, Ordering::Release);
    }
}

/// The logs of all CPUs of a VM: a list that only grows, up to the largest number of concurrent
/// CPUs. A drain reads it without a lock, so a thread that adds or removes a CPU cannot delay it.
#[derive(Debug, Default)]
pub struct ModificationLogs {
    first: OnceLock<Arc<Buffer>>,
    nr_drains: CachePadded<AtomicU64>,
}

impl ModificationLogs {
    fn buffers(&self) -> impl Iterator<Item = &Arc<Buffer>> {
        iter::successors(self.first.get(), |buffer| buffer.next.get())
    }

    /// Returns a log for one more CPU.
    pub fn add(&self) -> ModificationLog {
        // Acquire: pairs with the release of the CPU that had the log.
        let claim = |buffer: &&Arc<Buffer>| !buffer.is_taken.swap(true, Ordering::Acquire);
        if let Some(buffer) = self.buffers().find(claim) {
            return ModificationLog::of(Arc::clone(buffer));
        }
        let buffer = Arc::new(Buffer::new());
        let mut last = &self.first;
        // Another thread may add one first; then behind that one.
        while last.set(Arc::clone(&buffer)).is_err() {
            if let Some(other) = last.get() {
                last = &other.next;
            }
        }
        ModificationLog::of(buffer)
    }

    /// Passes the pages that the CPUs of `domain` have logged to `log`, a part at a time, some
    /// perhaps twice.
    ///
    /// For each dirty bit that a CPU had set before the call, it returns only after the page was
    /// passed to this `log`, or to that of another drain or of the CPU's exit, after the bit was
    /// set, and that call of `log` has returned. Waits for a CPU only as far as a flush does.
    pub fn drain(&self, domain: &FlushDomain, log: &mut dyn FnMut(&[Gpa])) {
        // Relaxed: a statistic.
        self.nr_drains.fetch_add(1, Ordering::Relaxed);
        let filled: Vec<_> = self.buffers().filter_map(|buffer| Some((buffer, buffer.filled()?))).collect();
        if filled.is_empty() {
            return;
        }
        // Its number is taken after the entries were read, hence it is newer than the generations
        // that their CPUs have read.
        domain.flush(&[]);
        for (buffer, end) in filled {
            buffer.pass_on(end, log);
        }
    }

    /// Drains so far.
    pub fn nr_drains(&self) -> u64 {
        self.nr_drains.load(Ordering::Relaxed)
    }
}

impl Drop for ModificationLogs {
    fn drop(&mut self) {
        // One by one: the recursive drop of a list of thousands would need a deep stack.
        let mut next = self.first.take();
        while let Some(buffer) = next.and_then(Arc::into_inner) {
            let Buffer { next: mut behind, .. } = buffer;
            next = behind.take();
        }
    }
}
