//! The memory that shadow paging accesses beside the second stage: the guest's own tables, and the
//! shadow page tables.
//!
//! The host may invalidate guest memory, and the guest's tables with it. The memory stays while a
//! thread holds the lock of its frame and the second stage has a leaf PTE for it. An invalidation
//! zaps that PTE first, and then waits for the lock before the frame becomes anything else.

#![expect(unsafe_code, reason = "reads and writes the guest's page tables, and the hardware's, through raw pointers")]

use super::guest::{Decoded, GuestMode};
use super::lock::{Briefly, Busy, UntilFree, Wait};
use super::page::{NR_ENTRIES, ShadowPage};
use super::rmap::Frame;
use super::{Mmu, SecondStage};
use crate::addr::{Gfn, Gpa, Level, PAGE_SIZE};
use crate::error::{FaultError, OutOfMemory};
use crate::host::Host;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::table::node;

/// Why the guest's memory could not be accessed.
#[derive(Clone, Copy, Debug)]
pub(super) enum NoMemory {
    /// The second stage has no leaf PTE for the frame, or none that may be written: it must map the
    /// frame first.
    NotMapped,
    /// The host has no pointer for the frame.
    NoPointer,
}

/// The result of a compare-and-exchange.
pub(super) enum Exchanged {
    Yes,
    /// The guest's PTE has changed.
    No,
}

/// The guest's word of `size_bytes` (4 or 8) at `pointer`.
///
/// # Safety
/// `pointer` is aligned, and valid for reads.
unsafe fn load(pointer: *mut u8, size_bytes: u64) -> u64 {
    // Acquire: what the guest stored before it made the PTE is visible to a thread that uses the
    // PTE.
    if size_bytes == 4 {
        // SAFETY: as the caller promises.
        u64::from(unsafe { &*pointer.cast::<AtomicU32>() }.load(Ordering::Acquire))
    } else {
        // SAFETY: as above.
        unsafe { &*pointer.cast::<AtomicU64>() }.load(Ordering::Acquire)
    }
}

/// Writes the guest's byte at `at`.
///
/// # Safety
/// The aligned word of 4 bytes around `at` is valid for writes.
unsafe fn write_byte(at: *mut u8, byte: u8) {
    let offset = at.addr() % 4;
    // SAFETY: as the caller promises.
    let cell = unsafe { &*at.wrapping_sub(offset).cast::<AtomicU32>() };
    let shift = 8 * offset as u32;
    let mut word = cell.load(Ordering::Relaxed);
    while let Err(found) = cell.compare_exchange(
        word,
        word & !(0xff << shift) | u32::from(byte) << shift,
        Ordering::AcqRel,
        Ordering::Relaxed,
    ) {
        word = found;
    }
}

impl<'v, H: Host> Mmu<'v, H> {
    /// Shadow PTE `index` of a page.
    ///
    /// # Safety
    /// As long as the caller uses the result, it holds one of two locks. Either that of the page,
    /// which is alive; or that of the frame that the PTE leads to, and then the PTE leads there.
    /// The page-table page is freed only after its PTEs were zapped under both.
    pub(super) unsafe fn cell(&self, page: &ShadowPage, index: usize) -> &'v AtomicU64 {
        // SAFETY: the page-table page was filled before the shadow page could be found; and as the
        // caller promises, it is not freed.
        let cells: &'v [AtomicU64] = unsafe { node::entries(self.host(), page.table(), NR_ENTRIES) };
        &cells[index]
    }

    /// Calls `f` with the pointer to guest address `gpa`, under the lock of its frame, which has a
    /// record.
    fn with_guest_memory<W: Wait, T>(
        &self,
        gpa: Gpa,
        f: impl FnOnce(*mut u8, SecondStage, &Frame) -> Result<T, NoMemory>,
    ) -> Result<Result<T, NoMemory>, W::Busy> {
        let gfn = gpa.gfn();
        let Some(frame) = self.shadow.frames.get(gfn, Level::L4K) else { return Ok(Err(NoMemory::NotMapped)) };
        let (_guard, second) = self.lock_frame::<W>(frame, gfn)?;
        Ok(second.ok_or(NoMemory::NotMapped).and_then(|second| {
            let page = self.host().guest_memory_ptr(second.pfn).ok_or(NoMemory::NoPointer)?;
            f(page.wrapping_add((gpa.0 % PAGE_SIZE) as usize), second, frame)
        }))
    }

    /// The guest's PTE of `size_bytes` at `gpa`.
    #[inline(never)]
    pub(super) fn read_guest<W: Wait>(&self, gpa: Gpa, size_bytes: u64) -> Result<Result<u64, NoMemory>, W::Busy> {
        debug_assert!(gpa.0 % size_bytes == 0);
        self.with_guest_memory::<W, _>(gpa, |pointer, _, _| {
            // SAFETY: the frame's memory stays (see the module), and the PTE is aligned inside of
            // it.
            Ok(unsafe { load(pointer, size_bytes) })
        })
    }

    /// As [`read_guest`](Self::read_guest), for a shadow PTE that is made of it. `None` while an
    /// emulated write to the table is under way: then nothing may be made of its PTEs.
    #[inline(never)]
    pub(super) fn read_guest_for_entry(
        &self,
        gpa: Gpa,
        size_bytes: u64,
    ) -> Result<Result<Option<u64>, NoMemory>, Busy> {
        self.with_guest_memory::<Briefly, _>(gpa, |pointer, _, frame| {
            if frame.nr_writers().load(Ordering::Relaxed) != 0 {
                return Ok(None);
            }
            // SAFETY: as in `read_guest`.
            Ok(Some(unsafe { load(pointer, size_bytes) }))
        })
    }

    /// Reads the guest's PTEs of `size_bytes` from `gpa` on into `entries`, none beyond the page.
    pub(super) fn read_guest_entries<W: Wait>(
        &self,
        gpa: Gpa,
        size_bytes: u64,
        entries: &mut [u64],
    ) -> Result<Result<(), NoMemory>, W::Busy> {
        debug_assert!(gpa.0 % PAGE_SIZE + size_bytes * entries.len() as u64 <= PAGE_SIZE);
        self.with_guest_memory::<W, _>(gpa, |pointer, _, _| {
            for (index, pte) in entries.iter_mut().enumerate() {
                // SAFETY: as in `read_guest`.
                *pte = unsafe { load(pointer.wrapping_add(index * size_bytes as usize), size_bytes) };
            }
            Ok(())
        })
    }

    /// Whether one of the four PDPTEs at `gpa` has a reserved bit set. `None` if the second stage
    /// must map the page first.
    pub(crate) fn has_bad_pdpte(&self, mode: GuestMode, gpa: Gpa) -> Result<Option<bool>, FaultError> {
        if self.frame_of_memory(gpa.gfn())?.is_none() {
            return Ok(None);
        }
        let mut entries = [0; 4];
        let Ok(read) = self.read_guest_entries::<UntilFree>(gpa, mode.entry_bytes(), &mut entries);
        match read {
            Ok(()) => Ok(Some(entries.iter().any(|&pte| mode.decode(pte, Level::L1G) == Decoded::Reserved))),
            Err(NoMemory::NotMapped) => Ok(None),
            Err(NoMemory::NoPointer) => Err(FaultError::NoGuestMemory { gpa }),
        }
    }

    /// Sets `bits` in the guest's PTE of `size_bytes` at `gpa`, if it is still `old`.
    #[inline(never)]
    pub(super) fn mark_guest(
        &self,
        gpa: Gpa,
        size_bytes: u64,
        old: u64,
        bits: u64,
    ) -> Result<Result<Exchanged, NoMemory>, Busy> {
        self.with_guest_memory::<Briefly, _>(gpa, |pointer, second, _| {
            if !second.is_writable {
                return Err(NoMemory::NotMapped);
            }
            // AcqRel: as a CPU's locked operation.
            let is_exchanged = if size_bytes == 4 {
                // SAFETY: as in `read_guest`.
                let cell = unsafe { &*pointer.cast::<AtomicU32>() };
                cell.compare_exchange(old as u32, (old | bits) as u32, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            } else {
                // SAFETY: as above.
                let cell = unsafe { &*pointer.cast::<AtomicU64>() };
                cell.compare_exchange(old, old | bits, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            };
            Ok(if is_exchanged { Exchanged::Yes } else { Exchanged::No })
        })
    }

    /// Writes `bytes` at `gpa`, none beyond the page. Aligned words of 8 and 4 bytes are written at
    /// once, others byte by byte, as the architecture allows. If it writes, it ends the emulated
    /// write that the caller has [begun](super::rmap::Frame::nr_writers).
    pub(super) fn write_guest(&self, gpa: Gpa, bytes: &[u8]) -> Result<(), NoMemory> {
        let Ok(written) = self.with_guest_memory::<UntilFree, _>(gpa, |pointer, second, frame| {
            if !second.is_writable {
                return Err(NoMemory::NotMapped);
            }
            frame.nr_writers().fetch_sub(1, Ordering::Relaxed);
            let mut done = 0;
            while done < bytes.len() {
                let at = pointer.wrapping_add(done);
                let rest = &bytes[done..];
                let is_aligned = |size: usize| ((gpa.0 % PAGE_SIZE) as usize + done) % size == 0;
                if let (Some(word), true) = (rest.first_chunk::<8>(), is_aligned(8)) {
                    // SAFETY: as in `read_guest`. Release: what was written before is visible to a
                    // thread that reads the PTE.
                    unsafe { &*at.cast::<AtomicU64>() }.store(u64::from_le_bytes(*word), Ordering::Release);
                    done += 8;
                } else if let (Some(word), true) = (rest.first_chunk::<4>(), is_aligned(4)) {
                    // SAFETY: as above.
                    unsafe { &*at.cast::<AtomicU32>() }.store(u32::from_le_bytes(*word), Ordering::Release);
                    done += 4;
                } else {
                    // SAFETY: as in `read_guest`; the aligned word around a byte of a page is in
                    // that page.
                    unsafe { write_byte(at, rest[0]) }
                    done += 1;
                }
            }
            Ok(())
        });
        written
    }

    /// The record of `gfn`. If there is none yet, it is made if the second stage has a leaf PTE for
    /// `gfn`; else `None`. The guest can name any frame, and must not make the engine keep more
    /// records than the guest has memory.
    pub(super) fn frame_of_memory(&self, gfn: Gfn) -> Result<Option<&'v Frame>, OutOfMemory> {
        let frames = &self.shadow.frames;
        if let Some(frame) = frames.get(gfn, Level::L4K) {
            return Ok(Some(frame));
        }
        if !self.tree.whole().contains(gfn) || self.second_stage(gfn).is_none() {
            return Ok(None);
        }
        frames.touch(gfn)?;
        Ok(frames.get(gfn, Level::L4K))
    }
}
