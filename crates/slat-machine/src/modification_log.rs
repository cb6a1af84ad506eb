//! Page-modification logging: an EPT CPU writes down which pages it makes dirty, so that the
//! hypervisor need not look at every leaf for dirty bits that are set.
//!
//! Source: Intel SDM vol. 3C, chapter "VMX support for address translation", section
//! "Page-Modification Logging". A log has 512 entries, guest-physical addresses with bits 11 to 0
//! clear. Whenever a walk sets the dirty bit of a leaf, the address of the access goes into the
//! log, from index 511 down. With no index left the CPU exits before it sets a bit.
//!
//! Hardware's log belongs to software while the CPU is stopped, and KVM stops all CPUs for a
//! harvest. Here it may be read at any time beside its CPU, also if that CPU's thread has lost its
//! processor in the midst of an access: nobody ever waits for a CPU. So two things differ. The
//! index is not set back to 511 by software, but goes round; the log is full while it holds 512
//! entries that nobody has been given. And the entry is written before the dirty bit and not after
//! it.
//!
//! # The protocol
//! CPU: has read the generation and walked to a leaf that is not dirty. It appends the page to its
//! log; then sets the dirty bit by a checked compare-and-exchange (see [`commit`](crate::commit));
//! then does the access. If the exchange is refused or lost, the access starts over, and the entry
//! stays: a report too many.
//!
//! Drain ([`ModificationLogs::drain`]): (1) notes how far each log is filled; (2) flushes, naming
//! no range; (3) gives the entries up to there to the engine, which marks the pages, and only then
//! (4) gives their places back to the CPU.
//!
//! Harvest, the engine's: drains; takes the marks; clears the dirty bits of what it took; flushes;
//! reports.
//!
//! # Why no write is missed
//! A page whose leaf is dirty is always in a log, or marked, or in the hands of a harvest that took
//! its mark and has not looked at the leaf yet. That is so when the dirty bit is set: the entry was
//! appended before, so it is in the log, unless a drain has given it out. But a drain gives out
//! what it found before its flush. The CPU had read its generation before it appended, so that
//! flush is one which its walk has not seen: when the flush has returned, the exchange is done or
//! will be refused. It was not refused, so it was done before the page was marked. And it stays so:
//! the entry leaves the log after the page is marked, and who takes the mark looks at the leaf
//! afterwards and clears the dirty bit.
//!
//! Without step 2 a drain could come between the entry and the exchange, and its harvest be done
//! with a leaf that is not dirty yet. The exchange may still succeed before the harvest's own
//! flush; then the leaf is dirty, nothing says so, and all later writes to the page are missed. For
//! the same reason the flush comes before anything is given out: another harvest might take the
//! mark.
//!
//! # Several drains at once
//! An entry stays in its log until somebody has given it to the engine and the engine has marked
//! the page. So a drain never has to rely on another that has lost its processor: it gives out
//! itself what it finds. When a drain has returned, every page of which a dirty bit was set before
//! the drain began has been given to the engine after that, by this drain or another one, and the
//! engine has marked it. A harvest therefore has every write that was done when it began, whatever
//! CPUs and other drains do; only what another harvest has taken is reported by that one, and what
//! another call is about to mark by the next, as everywhere in a dirty log. The price are entries
//! that are given out twice.
//!
//! # What it costs
//! A CPU makes two plain stores for each dirty bit that it sets, and takes no lock. A drain looks
//! at each log and flushes once if any has entries. CPUs do not empty their logs at other faults
//! and exits, as KVM does: it would put work on the fault that a harvest can do without stopping
//! the CPU.

#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::iter;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crossbeam_utils::CachePadded;
use slat::Gpa;
use thiserror::Error;

use crate::commit::FlushDomain;

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
    /// Entries that have been given out: their places are free. Never above `nr_logged`, and at
    /// most 512 below it.
    nr_drained: CachePadded<AtomicU64>,
    /// Whether a CPU has the log.
    is_taken: AtomicBool,
    next: OnceLock<Arc<Buffer>>,
}

impl Buffer {
    /// An empty log that a CPU has.
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

    /// How many entries were written so far, if some of them were not given out.
    fn filled(&self) -> Option<u64> {
        // Acquire: the entries up to there can be read; and it orders the load below, which thereby
        // is no older.
        let nr_logged = self.nr_logged.load(Ordering::Acquire);
        // Acquire: what was given out was marked, and whoever skips it here sees the marks.
        (self.nr_drained.load(Ordering::Acquire) < nr_logged).then_some(nr_logged)
    }

    /// Gives the entries with numbers below `end`, which [`filled`](Self::filled) said or the CPU
    /// knows, to `log`, unless others have given them out.
    fn give_out(&self, end: u64, log: &mut dyn FnMut(&[Gpa])) {
        // Acquire: as in `filled`. Not before `end` was read: the CPU wrote entry `end - 1` after
        // it had seen that all but 511 before it were given out, so this is no less, and the
        // entries fit.
        let start = self.nr_drained.load(Ordering::Acquire);
        if start >= end {
            return;
        }
        let mut pages = [Gpa(0); NR_ENTRIES as usize];
        for (page, number) in pages.iter_mut().zip(start..end) {
            // Acquire: if the CPU has written a newer entry over it, somebody else has given this
            // one out meanwhile and had it marked; then that is seen. The newer one is given out
            // too early, which is a report too many: it stays in the log and is given out again.
            page.0 = self.entry(number).load(Ordering::Acquire);
        }
        log(pages.get(..(end - start) as usize).unwrap_or(&pages));
        // Release: the marks come first, for all who see the entries as given out, and the loads
        // above come before the CPU writes over them. The maximum, because others may be further:
        // each step is a read-modify-write, so who reads the last one sees what came before all of
        // them.
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
    /// Entries that had been given out when the CPU last looked.
    // A cell also keeps the log from being shared by threads.
    nr_drained: Cell<u64>,
}

impl ModificationLog {
    fn of(buffer: Arc<Buffer>) -> ModificationLog {
        // Relaxed: written by this CPU's predecessor, whose release was acquired with the claim;
        // the copy of `nr_drained` may be too small, then it is read again.
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
        // Acquire: the drains that gave the entries out have read them, so they may be written
        // over.
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
        // Release: a drain that looks for the older entry in this place, and finds this one, sees
        // that the older one was given out and marked, as this CPU has seen it.
        self.buffer.entry(number).store(gpa.0 & !OFFSET, Ordering::Release);
        // Release: the entry comes first. And the read of the generation: the flush of the drain
        // that sees this is newer.
        self.buffer.nr_logged.store(number + 1, Ordering::Release);
        Ok(())
    }

    /// Gives all entries to `log`, as the CPU does when its log is full. No flush is needed: this
    /// CPU is not between an entry and its dirty bit. Entries that drains are giving out at the
    /// same time may be given twice.
    pub fn empty(&self, log: &mut dyn FnMut(&[Gpa])) {
        self.buffer.give_out(self.nr_ever_logged(), log);
    }
}

impl Drop for ModificationLog {
    fn drop(&mut self) {
        // Release: the next CPU that has the log goes on behind this one's entries.
        self.buffer.is_taken.store(false, Ordering::Release);
    }
}

/// The logs of all CPUs of a VM. They are a list that only grows, as far as there were CPUs at a
/// time: who drains it reads it without a lock, so that a thread that adds a CPU or takes one away
/// cannot hold it up.
#[derive(Debug, Default)]
pub struct ModificationLogs {
    first: OnceLock<Arc<Buffer>>,
    nr_drains: CachePadded<AtomicU64>,
}

impl ModificationLogs {
    fn buffers(&self) -> impl Iterator<Item = &Arc<Buffer>> {
        iter::successors(self.first.get(), |buffer| buffer.next.get())
    }

    /// A log for one more CPU.
    pub fn add(&self) -> ModificationLog {
        // Acquire: pairs with the release of the CPU that had the log.
        let claim = |buffer: &&Arc<Buffer>| !buffer.is_taken.swap(true, Ordering::Acquire);
        if let Some(buffer) = self.buffers().find(claim) {
            return ModificationLog::of(Arc::clone(buffer));
        }
        let buffer = Arc::new(Buffer::new());
        let mut last = &self.first;
        // Whoever else adds one may be faster; then behind that one.
        while last.set(Arc::clone(&buffer)).is_err() {
            if let Some(other) = last.get() {
                last = &other.next;
            }
        }
        ModificationLog::of(buffer)
    }

    /// Gives the pages that the CPUs of `domain` have logged to `log`, a part at a time, some
    /// perhaps twice.
    ///
    /// Of each dirty bit that a CPU had set before the call, it returns only when the page was
    /// given to this `log`, or to that of another drain or of the CPU's exit, after the bit was
    /// set, and that call of `log` has returned. Waits for no CPU, but as far as a flush does.
    pub fn drain(&self, domain: &FlushDomain, log: &mut dyn FnMut(&[Gpa])) {
        // Relaxed: a statistic.
        self.nr_drains.fetch_add(1, Ordering::Relaxed);
        let filled: Vec<_> = self.buffers().filter_map(|buffer| Some((buffer, buffer.filled()?))).collect();
        if filled.is_empty() {
            return;
        }
        // Its number is taken after the entries were seen, hence it is newer than what their CPUs
        // have read.
        domain.flush(&[]);
        for (buffer, end) in filled {
            buffer.give_out(end, log);
        }
    }

    /// Drains so far.
    pub fn nr_drains(&self) -> u64 {
        self.nr_drains.load(Ordering::Relaxed)
    }
}

impl Drop for ModificationLogs {
    fn drop(&mut self) {
        // One by one: a list of thousands that drops itself would need a deep stack.
        let mut next = self.first.take();
        while let Some(buffer) = next.and_then(Arc::into_inner) {
            let Buffer { next: mut behind, .. } = buffer;
            next = behind.take();
        }
    }
}
