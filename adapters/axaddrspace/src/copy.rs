//! Copies of devices from and to the guest's memory.
//!
//! # Guarantees
//! A copy is complete, or an error and nothing is written. It crosses areas, pages whose frames do
//! not follow each other, and pages that the guest has not used yet; these get their frames. It
//! never goes beyond what is mapped, and never panics. No page that it accesses is unmapped
//! meanwhile.
//!
//! # Implementation
//! A copy holds the lock of the areas for reading. It finds frames by the areas, not by the page
//! tables: so it needs no translation that a fault would have to install. The guest and other
//! devices may write at the same time, so memory is accessed by atomic loads and stores.

#![expect(unsafe_code, reason = "accesses the guest's memory by pointers")]

use alloc::vec::Vec;
use core::ptr;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use ax_memory_addr::PhysAddr;
use axvm_types::{GuestPhysAddr, MappingFlags};
use slat::format::Format;
use slat::{Access, Gfn, Gpa, PAGE_SIZE, Pfn};

use crate::host::PagingHost;
use crate::layout::Layout;
use crate::space::AddrSpace;
use crate::{AddrSpaceError, AddrSpaceResult};

/// Pages of memory that is not linear in one piece, at most.
const MAX_PAGES: u64 = 512;

/// What a device does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Copies {
    FromGuest,
    ToGuest,
}

impl Copies {
    fn operation(self) -> &'static str {
        match self {
            Copies::FromGuest => "read guest memory",
            Copies::ToGuest => "write guest memory",
        }
    }
}

/// Memory of the guest whose frames follow each other.
struct Piece {
    paddr: PhysAddr,
    size: usize,
    flags: MappingFlags,
}

impl<P: PagingHost, F: Format> AddrSpace<P, F> {
    /// The piece at `gpa`, as long as `layout` and frames allow, at most `longest` bytes. `None`: no
    /// area has it, or there is no frame.
    fn piece(&self, layout: &Layout<P>, gpa: usize, longest: usize) -> Option<Piece> {
        let (at, in_page) = (Gpa(gpa as u64).gfn(), gpa as u64 % PAGE_SIZE);
        let area = layout.area_at(at)?;
        let limited = |nr_pages: u64| longest.min((nr_pages * PAGE_SIZE - in_page) as usize);
        let (first, nr_pages) = match area.linear_frame(at) {
            Some(first) => (first, area.range.end.0 - at.0),
            None => {
                let first = layout.first_frame(at)?;
                let wanted = (in_page + longest as u64).div_ceil(PAGE_SIZE).min(MAX_PAGES);
                let follows = |&page: &u64| layout.frame(Gfn(at.0 + page)) == Some(Pfn(first.0 + page));
                let end = wanted.min(area.range.end.0 - at.0);
                (first, 1 + (1..end).take_while(follows).count() as u64)
            }
        };
        let paddr = PhysAddr::from_usize((first.hpa().0 + in_page) as usize);
        Some(Piece { paddr, size: limited(nr_pages), flags: area.flags })
    }

    /// The physical address of `vaddr`, and for how many bytes from there on memory follows: to the
    /// end of its area, or to the next page whose frame is elsewhere. `None`: no area has the
    /// address, or there is no frame. A page that the guest has not used yet gets its frame.
    pub fn translate_and_get_limit(&self, vaddr: GuestPhysAddr) -> Option<(PhysAddr, usize)> {
        let piece = self.piece(&self.read_layout(), vaddr.as_usize(), usize::MAX / 2)?;
        Some((piece.paddr, piece.size))
    }

    /// Where `len` bytes of the guest's memory from `vaddr` on are: a slice for each piece whose
    /// frames follow each other. `None`: some are not memory, or there is no frame. Pages that the
    /// guest has not used yet get their frames.
    ///
    /// A slice may be used until its pages are unmapped. The guest may write there at any time, so it
    /// must not become a reference.
    pub fn translated_byte_buffer(&self, vaddr: GuestPhysAddr, len: usize) -> Option<Vec<NonNull<[u8]>>> {
        let mut slices = Vec::new();
        self.for_each_piece(&self.read_layout(), vaddr, len, Copies::FromGuest, |paddr, _, size| {
            slices.try_reserve(1).map_err(|_| AddrSpaceError::OutOfMemory)?;
            let data = self.host().phys_to_virt(paddr).as_mut_ptr();
            slices.extend(NonNull::new(ptr::slice_from_raw_parts_mut(data, size)));
            Ok(())
        })
        .ok()?;
        Some(slices)
    }

    /// Reads the guest's memory, as a device does.
    ///
    /// # Errors
    /// [`AddrSpaceError::AddressOverflow`]; [`AddrSpaceError::Unmapped`]: the first byte is not
    /// memory; [`AddrSpaceError::InsufficientAccess`]: a later one is not. Then nothing was read.
    pub fn read_buffer(&self, vaddr: GuestPhysAddr, buffer: &mut [u8]) -> AddrSpaceResult {
        let layout = self.read_layout();
        self.for_each_piece(&layout, vaddr, buffer.len(), Copies::FromGuest, |_, _, _| Ok(()))?;
        self.for_each_piece(&layout, vaddr, buffer.len(), Copies::FromGuest, |paddr, at, size| {
            // SAFETY: the piece is memory of the guest, and stays so while the lock is held.
            unsafe { read(self.host().phys_to_virt(paddr).as_mut_ptr(), &mut buffer[at..at + size]) };
            Ok(())
        })
    }

    /// Writes the guest's memory, as a device does. The pages are marked in the dirty log, if their
    /// memslot has one.
    ///
    /// # Errors
    /// Those of [`read_buffer`](AddrSpace::read_buffer), also for memory that the guest may not
    /// write. Then nothing was written.
    pub fn write_buffer(&self, vaddr: GuestPhysAddr, buffer: &[u8]) -> AddrSpaceResult {
        let layout = self.read_layout();
        self.for_each_piece(&layout, vaddr, buffer.len(), Copies::ToGuest, |_, _, _| Ok(()))?;
        self.for_each_piece(&layout, vaddr, buffer.len(), Copies::ToGuest, |paddr, at, size| {
            // SAFETY: as in `read_buffer`.
            unsafe { write(self.host().phys_to_virt(paddr).as_mut_ptr(), &buffer[at..at + size]) };
            self.mark_dirty(&layout, vaddr.as_usize() + at, size);
            Ok(())
        })
    }

    /// Calls `visit` for each piece of `len` bytes from `vaddr` on, with its address, its offset, and
    /// its size.
    fn for_each_piece(
        &self,
        layout: &Layout<P>,
        vaddr: GuestPhysAddr,
        len: usize,
        copies: Copies,
        mut visit: impl FnMut(PhysAddr, usize, usize) -> AddrSpaceResult,
    ) -> AddrSpaceResult {
        let start = vaddr.as_usize();
        start.checked_add(len).ok_or(AddrSpaceError::AddressOverflow { start, size: len })?;
        let mut at = 0;
        while at < len {
            let is_allowed = |piece: &Piece| {
                !piece.flags.contains(MappingFlags::DEVICE)
                    && (copies == Copies::FromGuest || piece.flags.contains(MappingFlags::WRITE))
            };
            let Some(piece) = self.piece(layout, start + at, len - at).filter(is_allowed) else {
                let (operation, requested) = (copies.operation(), len);
                return Err(match at {
                    0 => AddrSpaceError::Unmapped { address: vaddr },
                    available => AddrSpaceError::InsufficientAccess { operation, address: vaddr, requested, available },
                });
            };
            visit(piece.paddr, at, piece.size)?;
            at += piece.size;
        }
        Ok(())
    }

    /// Marks `size` bytes from `gpa` on, in one area, in the dirty log of their memslots.
    fn mark_dirty(&self, layout: &Layout<P>, gpa: usize, size: usize) {
        let (mut next, end) = (Gpa(gpa as u64).gfn(), Gpa((gpa + size - 1) as u64).gfn().0 + 1);
        while next.0 < end {
            let Some(region) = layout.region_of(next) else { return };
            let region_end = region.range.end.0.min(end);
            if region.memory.is_some() {
                // A VM with dirty rings has no such log: there the VMM records its own writes.
                let _ = self.vm().mark_dirty(region.slot, next.0 - region.range.start.0, region_end - next.0);
            }
            next.0 = region_end;
        }
    }
}

impl<P: PagingHost> Layout<P> {
    /// The frame of page `gfn` in an area of allocated memory. If it has none, it gets one.
    fn first_frame(&self, gfn: Gfn) -> Option<Pfn> {
        let region = self.region_of(gfn)?;
        let Some(memory) = &region.memory else { return self.frame(gfn) };
        Some(memory.resolve(gfn.0 - region.range.start.0, Access::Read).ok()?.pfn)
    }

    /// The frame of page `gfn` in an area of allocated memory, if it has one.
    fn frame(&self, gfn: Gfn) -> Option<Pfn> {
        let region = self.region_of(gfn)?;
        let Some(memory) = &region.memory else {
            let (_, frame) = region.frames.iter().find(|(page, _)| *page == gfn)?;
            return Some(Pfn(frame.as_usize() as u64 / PAGE_SIZE));
        };
        memory.frame(gfn.0 - region.range.start.0)
    }
}

/// Runs of whole words, and single bytes before and after them: the length of each.
fn parts(address: usize, len: usize) -> (usize, usize, usize) {
    let before = address.wrapping_neg() % 8;
    if before >= len { (len, 0, 0) } else { (before, (len - before) / 8 * 8, (len - before) % 8) }
}

/// Reads `to.len()` bytes at `from`.
///
/// # Safety
/// They are memory. Other threads access it, if at all, by atomic operations.
unsafe fn read(from: *mut u8, to: &mut [u8]) {
    let (before, words, _) = parts(from as usize, to.len());
    // SAFETY: as the caller promises: all indices are below `to.len()`.
    let byte = |index: usize| unsafe { AtomicU8::from_ptr(from.add(index)) }.load(Ordering::Relaxed);
    for (index, to) in to.iter_mut().enumerate().take(before) {
        *to = byte(index);
    }
    for (word, to) in to[before..before + words].chunks_exact_mut(8).enumerate() {
        // SAFETY: as above; `parts` aligns the words.
        let from = unsafe { AtomicU64::from_ptr(from.add(before + word * 8).cast()) };
        to.copy_from_slice(&from.load(Ordering::Relaxed).to_ne_bytes());
    }
    for (index, to) in to.iter_mut().enumerate().skip(before + words) {
        *to = byte(index);
    }
}

/// Writes `from` at `to`.
///
/// # Safety
/// As [`read`].
unsafe fn write(to: *mut u8, from: &[u8]) {
    let (before, words, _) = parts(to as usize, from.len());
    // SAFETY: as the caller promises: all indices are below `from.len()`.
    let byte = |index: usize| unsafe { AtomicU8::from_ptr(to.add(index)) };
    for (index, &from) in from.iter().enumerate().take(before) {
        byte(index).store(from, Ordering::Relaxed);
    }
    for (word, from) in from[before..before + words].chunks_exact(8).enumerate() {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(from);
        // SAFETY: as above; `parts` aligns the words.
        let to = unsafe { AtomicU64::from_ptr(to.add(before + word * 8).cast()) };
        to.store(u64::from_ne_bytes(bytes), Ordering::Relaxed);
    }
    for (index, &from) in from.iter().enumerate().skip(before + words) {
        byte(index).store(from, Ordering::Relaxed);
    }
}
