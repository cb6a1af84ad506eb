//! Memory that gets its frames when the guest first uses it: the backing of a memslot that is not
//! pinned.
//!
//! # Guarantees
//! - A page has at most one frame, however many threads fault on it at once, and keeps it until the
//!   page is removed.
//! - A frame that was allocated here is freed once: when its page is removed, or with the memory.
//!
//! # Use
//! Faults call [`LazyMemory::resolve`]. The holder of the address space's lock adds and removes
//! pages; it removes one only while the engine has the page in flight, or after the memslot was
//! deleted.
//!
//! # Implementation
//! Each page has a word: no frame yet, the frame and its flags, or a hole. A fault that finds none
//! allocates a frame and stores it by a compare-and-exchange. A fault that loses frees its own.
//!
//! # Why it is correct
//! `resolve` returns one frame until the word changes. The word of a page that is mapped changes
//! only in [`LazyMemory::remove`], between the return of `Vm::invalidate_range` and the drop of its
//! value. That is what `Host::resolve` asks for. A fault that stores a frame too late fails, because
//! it expects the word that it read: a hole differs from that. If the page was added again meanwhile
//! with the same flags, the word is the same, and its frame is the new page's first.

#![expect(unsafe_code, reason = "frees frames")]

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use ax_memory_addr::PhysAddr;
use axvm_types::MappingFlags;
use slat::host::{Resolved, Unresolved};
use slat::{Access, PAGE_SIZE, PageSize, Pfn};

use crate::flags;
use crate::host::PagingHost;
use crate::{AddrSpaceError, AddrSpaceResult};

/// A page's word. Bits 12 to 51: its frame.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Word(u64);

/// Bits 0 to 5 of a word: the page's `MappingFlags`.
const FLAGS: u64 = 0x3f;
/// The page has a frame.
const FRAME: u64 = 1 << 6;
/// The frame was allocated here.
const OWNED: u64 = 1 << 7;
/// There is no page.
const HOLE: Word = Word(1 << 8);

const _: () = assert!(MappingFlags::all().bits() as u64 == FLAGS);

impl Word {
    fn new(flags: MappingFlags) -> Word {
        Word(flags.bits() as u64)
    }

    fn with_frame(self, frame: PhysAddr, bits: u64) -> Word {
        Word(self.0 & FLAGS | frame.as_usize() as u64 | FRAME | bits)
    }

    fn flags(self) -> MappingFlags {
        MappingFlags::from_bits_truncate((self.0 & FLAGS) as usize)
    }

    fn frame(self) -> Option<Pfn> {
        (self.0 & FRAME != 0).then_some(Pfn(self.0 / PAGE_SIZE))
    }

    /// The frame to free when the page goes.
    fn owned(self) -> Option<PhysAddr> {
        (self.0 & OWNED != 0).then(|| PhysAddr::from_usize((self.0 & !(PAGE_SIZE - 1)) as usize))
    }
}

/// The memory of one memslot. A page takes 8 bytes.
pub struct LazyMemory<P: PagingHost> {
    host: Arc<P>,
    words: Vec<AtomicU64>,
}

impl<P: PagingHost> LazyMemory<P> {
    /// `nr_pages` pages with `flags`, without frames.
    ///
    /// # Errors
    /// [`AddrSpaceError::OutOfMemory`].
    pub(crate) fn new(host: Arc<P>, nr_pages: u64, flags: MappingFlags) -> AddrSpaceResult<Arc<LazyMemory<P>>> {
        let mut words = Vec::new();
        words.try_reserve_exact(nr_pages as usize).map_err(|_| AddrSpaceError::OutOfMemory)?;
        words.resize_with(nr_pages as usize, || AtomicU64::new(Word::new(flags).0));
        Ok(Arc::new(LazyMemory { host, words }))
    }

    /// [`slat::Host::resolve`] for page `page`.
    pub(crate) fn resolve(&self, page: u64, access: Access) -> Result<Resolved, Unresolved> {
        let cell = self.words.get(page as usize).ok_or(Unresolved::Gone)?;
        // Acquire: the frame's contents, which are published with it.
        let mut word = Word(cell.load(Ordering::Acquire));
        loop {
            if word == HOLE {
                return Err(Unresolved::Mmio);
            }
            let protection = flags::protection_of(word.flags());
            let is_allowed = match access {
                Access::Read => true,
                Access::Write => protection.writable,
                Access::Execute | Access::ExecuteUser => protection.attributes.execute.permits(access),
            };
            if !is_allowed {
                return Err(Unresolved::Mmio);
            }
            if let Some(pfn) = word.frame() {
                let memory = Resolved::memory(pfn, PageSize::Size4K);
                return Ok(Resolved { writable: protection.writable, attributes: protection.attributes, ..memory });
            }
            let frame = self.host.alloc_frame().ok_or(Unresolved::Gone)?;
            let with_frame = word.with_frame(frame, OWNED);
            // Release: publishes the frame's contents. Acquire: as above, for the frame of another.
            match cell.compare_exchange(word.0, with_frame.0, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => word = with_frame,
                Err(found) => {
                    // SAFETY: allocated just now, and known to no other thread.
                    unsafe { self.host.dealloc_frame(frame) };
                    word = Word(found);
                }
            }
        }
    }

    /// Adds page `page`, which is a hole, without a frame.
    pub(crate) fn add(&self, page: u64, flags: MappingFlags) {
        self.store(page, Word::new(flags));
    }

    /// Adds page `page`, which is a hole, with a frame that stays its owner's.
    pub(crate) fn add_frame(&self, page: u64, flags: MappingFlags, frame: Pfn) {
        self.store(page, Word::new(flags).with_frame(PhysAddr::from_usize(frame.hpa().0 as usize), 0));
    }

    fn store(&self, page: u64, word: Word) {
        // Release: what the owner of a frame has written there comes first.
        let before = self.words[page as usize].swap(word.0, Ordering::AcqRel);
        debug_assert!(before == HOLE.0, "the lock's holder adds pages where areas leave room");
    }

    /// Makes page `page` a hole, and frees its frame.
    ///
    /// # Safety
    /// No CPU uses the page, and none will until this returns: it is in flight, or its memslot was
    /// deleted.
    pub(crate) unsafe fn remove(&self, page: u64) {
        let before = Word(self.words[page as usize].swap(HOLE.0, Ordering::AcqRel));
        if let Some(frame) = before.owned() {
            // SAFETY: allocated by `resolve`. The swap has made this call its only owner.
            unsafe { self.host.dealloc_frame(frame) };
        }
    }

    /// The frame of page `page`, if it has one.
    pub(crate) fn frame(&self, page: u64) -> Option<Pfn> {
        Word(self.words[page as usize].load(Ordering::Acquire)).frame()
    }
}

impl<P: PagingHost> Drop for LazyMemory<P> {
    fn drop(&mut self) {
        for page in 0..self.words.len() as u64 {
            // SAFETY: the engine drops a backing when its memslot is deleted, or the VM is gone. The
            // frames that are left were allocated by faults that came too late.
            unsafe { self.remove(page) };
        }
    }
}
