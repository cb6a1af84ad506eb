//! The address space: mapping, unmapping, faults, translations. `copy` has the copies of devices.

#![expect(unsafe_code, reason = "frees the frames of pages that no CPU uses")]

use alloc::sync::Arc;
use core::fmt;

use ax_memory_addr::PhysAddr;
use axvm_types::{GuestPhysAddr, MappingFlags};
use slat::format::Format;
use slat::tables::{Mapping, Translation};
use slat::{
    Access, Config, Gfn, GfnRange, Gpa, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Pfn, Vcpu, Vm,
};
use spin::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::host::{EngineHost, PagingHost};
use crate::layout::{Area, Layout, Region, Source};
use crate::lazy::LazyMemory;
use crate::vcpus::Vcpus;
use crate::{AddrSpaceError, AddrSpaceResult, flags};

/// The guest-physical address space of a VM.
///
/// All methods take a shared reference, and any number of threads may call them at once. Faults and
/// translations take no lock. Calls that map or unmap wait for each other, and so do they and copies
/// of devices; these go on beside each other.
pub struct AddrSpace<P: PagingHost, F: Format> {
    vm: Arc<Vm<EngineHost<P>, F>>,
    start: usize,
    end: usize,
    config: Config,
    vcpus: Vcpus<P, F>,
    pub(crate) layout: RwLock<Layout<P>>,
}

/// A range that was checked, as frames.
fn frames(start: GuestPhysAddr, size: usize) -> GfnRange {
    GfnRange::new(Gpa(start.as_usize() as u64).gfn(), size as u64 / PAGE_SIZE)
}

fn check_aligned(subject: &'static str, value: usize) -> AddrSpaceResult {
    let alignment = PAGE_SIZE as usize;
    if value.is_multiple_of(alignment) { Ok(()) } else { Err(AddrSpaceError::Unaligned { subject, value, alignment }) }
}

impl<P: PagingHost, F: Format> AddrSpace<P, F> {
    /// An address space of `size` bytes from `base` on, with nothing mapped.
    ///
    /// # Errors
    /// [`AddrSpaceError::AddressOverflow`]; [`AddrSpaceError::OutOfRange`]: it ends beyond what the
    /// page tables translate; [`AddrSpaceError::OutOfMemory`].
    pub fn new_empty(host: P, base: GuestPhysAddr, size: usize) -> AddrSpaceResult<AddrSpace<P, F>> {
        AddrSpace::with_config(host, Config::default(), base, size)
    }

    /// As [`new_empty`](AddrSpace::new_empty), with page tables for the hardware that `config`
    /// describes, such as 3 levels and 40 bits on Arm.
    ///
    /// # Errors
    /// Those of [`new_empty`](AddrSpace::new_empty), and [`AddrSpaceError::InvalidMapping`]: the
    /// format has no such configuration.
    pub fn with_config(host: P, config: Config, base: GuestPhysAddr, size: usize) -> AddrSpaceResult<AddrSpace<P, F>> {
        let start = base.as_usize();
        let end = start.checked_add(size).ok_or(AddrSpaceError::AddressOverflow { start, size })?;
        let nr_cpus = host.nr_cpus();
        let vm = Arc::new(Vm::new(EngineHost(Arc::new(host)), config)?);
        let limit = 1_usize.checked_shl(vm.gpa_bits()).unwrap_or(usize::MAX);
        if end > limit {
            let (space_start, space_end) = (GuestPhysAddr::from_usize(0), GuestPhysAddr::from_usize(limit));
            return Err(AddrSpaceError::OutOfRange { start: base, size, space_start, space_end });
        }
        Ok(AddrSpace { vm, start, end, config, vcpus: Vcpus::new(nr_cpus)?, layout: RwLock::new(Layout::new()) })
    }

    /// The first address.
    pub fn base(&self) -> GuestPhysAddr {
        GuestPhysAddr::from_usize(self.start)
    }

    /// The address after the last.
    pub fn end(&self) -> GuestPhysAddr {
        GuestPhysAddr::from_usize(self.end)
    }

    /// Its size in bytes.
    pub fn size(&self) -> usize {
        self.end - self.start
    }

    /// What the hypervisor provides.
    pub fn host(&self) -> &P {
        &self.vm.host().0
    }

    /// The engine's VM, for what the original does not have: the dirty log, aging, statistics. It
    /// has a memslot for each area. Leave their number, size and place to the address space.
    pub fn vm(&self) -> &Arc<Vm<EngineHost<P>, F>> {
        &self.vm
    }

    /// Physical address of the root page-table page, for the hardware.
    pub fn page_table_root(&self) -> PhysAddr {
        PhysAddr::from_usize(self.vm.root().0 as usize)
    }

    /// The number of levels, for the hardware.
    pub fn page_table_levels(&self) -> usize {
        usize::from(self.vm.root_level().0)
    }

    /// Whether all of a range is in the address space.
    pub fn contains_range(&self, start: GuestPhysAddr, size: usize) -> bool {
        start.as_usize().checked_add(size).is_some_and(|end| self.start <= start.as_usize() && end <= self.end)
    }

    pub(crate) fn contains(&self, gpa: GuestPhysAddr) -> bool {
        (self.start..self.end).contains(&gpa.as_usize())
    }

    /// The frames of a range, if it is aligned and in the address space.
    fn check_range(&self, start: GuestPhysAddr, size: usize) -> AddrSpaceResult<GfnRange> {
        if start.as_usize().checked_add(size).is_none() {
            return Err(AddrSpaceError::AddressOverflow { start: start.as_usize(), size });
        }
        if !self.contains_range(start, size) {
            let (space_start, space_end) = (self.base(), self.end());
            return Err(AddrSpaceError::OutOfRange { start, size, space_start, space_end });
        }
        check_aligned("guest-physical address", start.as_usize())?;
        check_aligned("size", size)?;
        Ok(frames(start, size))
    }

    /// Waits while another thread maps or unmaps.
    pub(crate) fn read_layout(&self) -> RwLockReadGuard<'_, Layout<P>> {
        loop {
            match self.layout.try_read() {
                Some(layout) => return layout,
                None => self.host().yield_now(),
            }
        }
    }

    fn write_layout(&self) -> RwLockWriteGuard<'_, Layout<P>> {
        loop {
            match self.layout.try_write() {
                Some(layout) => return layout,
                None => self.host().yield_now(),
            }
        }
    }

    /// Maps the physical range from `start_paddr` on, with pages as large as fit. The guest may use
    /// it when the call returns. The memory stays the caller's: no CPU uses it any more when
    /// [`unmap`](AddrSpace::unmap) has returned.
    ///
    /// # Errors
    /// [`AddrSpaceError::OutOfRange`], [`AddrSpaceError::Unaligned`],
    /// [`AddrSpaceError::AddressOverflow`], [`AddrSpaceError::InvalidMapping`],
    /// [`AddrSpaceError::MappingConflict`], [`AddrSpaceError::MappingState`],
    /// [`AddrSpaceError::OutOfMemory`]. Nothing has changed then.
    pub fn map_linear(
        &self,
        start_vaddr: GuestPhysAddr,
        start_paddr: PhysAddr,
        size: usize,
        flags: MappingFlags,
    ) -> AddrSpaceResult {
        let range = self.check_range(start_vaddr, size)?;
        let start = start_paddr.as_usize();
        check_aligned("host-physical address", start)?;
        start.checked_add(size).ok_or(AddrSpaceError::AddressOverflow { start, size })?;
        self.map(Area { range, flags, source: Source::Linear(Pfn(start as u64 / PAGE_SIZE)) }, false)
    }

    /// Maps memory that the host allocates, a frame of 4 KiB for each page: when the guest first
    /// uses the page, or now, if `populate` is set.
    ///
    /// # Errors
    /// Those of [`map_linear`](AddrSpace::map_linear).
    pub fn map_alloc(&self, start: GuestPhysAddr, size: usize, flags: MappingFlags, populate: bool) -> AddrSpaceResult {
        let range = self.check_range(start, size)?;
        self.map(Area { range, flags, source: Source::Alloc }, populate)
    }

    fn map(&self, area: Area, populate: bool) -> AddrSpaceResult {
        flags::check::<F>(area.flags, &self.config.hardware)?;
        if area.range.is_empty() {
            return Err(AddrSpaceError::InvalidMapping);
        }
        let mut layout = self.write_layout();
        if !layout.areas_in(area.range).is_empty() {
            return Err(AddrSpaceError::MappingConflict);
        }
        layout.reserve_area()?;
        layout.insert_area(area);
        let mut next = area.range.start;
        while next < area.range.end {
            let (region, end) = layout.region_at(next);
            let piece = area.part(GfnRange { start: next, end: end.min(area.range.end) });
            let result = match region {
                Some(region) => self.fill_hole(region, piece, populate),
                None => self.add_region(&mut layout, piece, populate),
            };
            if let Err(error) = result {
                let _ = self.remove(&mut layout, GfnRange { start: area.range.start, end: next });
                layout.cut_areas(area.range);
                return Err(error);
            }
            next = piece.range.end;
        }
        Ok(())
    }

    /// Maps `piece` where no memslot is: by one of its own.
    fn add_region(&self, layout: &mut Layout<P>, piece: Area, populate: bool) -> AddrSpaceResult {
        let (memory, slot_flags) = match piece.source {
            Source::Linear(_) => (None, MemoryRegionFlags::PINNED),
            Source::Alloc => {
                let host = Arc::clone(&self.vm.host().0);
                (Some(LazyMemory::new(host, piece.range.nr_pages(), piece.flags)?), MemoryRegionFlags::empty())
            }
        };
        layout.add_region(piece.range, memory.clone(), |slot| {
            Ok(self.vm.set_user_memory_region(MemoryRegion {
                slot,
                flags: slot_flags,
                guest_phys_addr: piece.range.start.gpa(),
                memory_size: piece.range.nr_pages() * PAGE_SIZE,
                backing: Some(memory),
                userfault_bitmap: None,
            })?)
        })?;
        let result = match piece.source {
            Source::Linear(pfn) => self.map_pinned(&piece, piece.range, pfn),
            Source::Alloc if populate => self.populate(&piece),
            Source::Alloc => Ok(()),
        };
        if result.is_err() {
            let index = layout.regions.partition_point(|region| region.range.start < piece.range.start);
            self.delete_region(layout, index)?;
        }
        result
    }

    /// Maps `piece` in a hole of `region`.
    fn fill_hole(&self, region: &mut Region<P>, piece: Area, populate: bool) -> AddrSpaceResult {
        let Some(memory) = &region.memory else {
            return match piece.source {
                Source::Linear(pfn) => self.map_pinned(&piece, piece.range, pfn),
                Source::Alloc => self.alloc_pinned(region, &piece),
            };
        };
        for (page, gfn) in region.pages(piece.range).zip(piece.range.start.0..) {
            match piece.linear_frame(Gfn(gfn)) {
                Some(frame) => memory.add_frame(page, piece.flags, frame),
                None => memory.add(page, piece.flags),
            }
        }
        if !populate && piece.source == Source::Alloc {
            return Ok(());
        }
        self.populate(&piece).inspect_err(|_| {
            let _ = self.take(region, piece.range);
        })
    }

    fn map_pinned(&self, area: &Area, range: GfnRange, pfn: Pfn) -> AddrSpaceResult {
        let (protection, largest) = (flags::protection_of(area.flags), self.host().max_page_size());
        Ok(self.vm.map_range(&Mapping { range, pfn, protection, largest })?)
    }

    /// Maps pages of a pinned memslot to frames that the host allocates. They cannot come by faults,
    /// so they come now.
    fn alloc_pinned(&self, region: &mut Region<P>, piece: &Area) -> AddrSpaceResult {
        let nr_pages = piece.range.nr_pages() as usize;
        region.frames.try_reserve(nr_pages).map_err(|_| AddrSpaceError::OutOfMemory)?;
        for gfn in (piece.range.start.0..piece.range.end.0).map(Gfn) {
            let mapped = self.host().alloc_frame().ok_or(AddrSpaceError::OutOfMemory).and_then(|frame| {
                region.frames.push((gfn, frame));
                self.map_pinned(piece, GfnRange::new(gfn, 1), Pfn(frame.as_usize() as u64 / PAGE_SIZE))
            });
            if let Err(error) = mapped {
                let _ = self.take(region, piece.range);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Maps all pages of `piece`, which is in a memslot that is not pinned.
    fn populate(&self, piece: &Area) -> AddrSpaceResult {
        let access = if piece.flags.contains(MappingFlags::WRITE) { Access::Write } else { Access::Read };
        let size_bytes = piece.range.nr_pages() * PAGE_SIZE;
        let mapped = self.vcpus.with(&self.vm, self.host().this_cpu(), |vcpu| {
            vcpu.pre_fault_memory(piece.range.start.gpa(), size_bytes, access)
        });
        if mapped == Some(Ok(size_bytes)) { Ok(()) } else { Err(AddrSpaceError::OutOfMemory) }
    }

    /// Unmaps a range: any part of areas, also of several, and of none. When it returns, no CPU uses
    /// a page of the range, and the frames that the host allocated for it are freed.
    ///
    /// # Errors
    /// [`AddrSpaceError::OutOfRange`], [`AddrSpaceError::Unaligned`],
    /// [`AddrSpaceError::AddressOverflow`]. [`AddrSpaceError::OutOfMemory`],
    /// [`AddrSpaceError::MappingState`]: the pages before the one that could not be unmapped are
    /// unmapped, and the areas say so.
    pub fn unmap(&self, start: GuestPhysAddr, size: usize) -> AddrSpaceResult {
        let range = self.check_range(start, size)?;
        self.remove(&mut self.write_layout(), range)
    }

    /// Unmaps everything. What cannot be unmapped for lack of memory stays, and a later call unmaps
    /// it.
    pub fn clear(&self) {
        let all = GfnRange { start: Gfn(0), end: Gfn(u64::MAX) };
        let _ = self.remove(&mut self.write_layout(), all);
    }

    fn remove(&self, layout: &mut Layout<P>, range: GfnRange) -> AddrSpaceResult {
        layout.reserve_area()?;
        let mut index = layout.regions.partition_point(|region| region.range.end <= range.start);
        while let Some(region) = layout.regions.get(index).filter(|region| region.range.start < range.end) {
            let part = region.range.intersection(range);
            let areas = layout.areas_in(region.range).iter().map(|area| area.range.intersection(region.range));
            if areas.into_iter().all(|area| part.covers(area)) {
                self.delete_region(layout, index)?;
                layout.cut_areas(part);
                let enlarged = layout.with_empty_tables(part, self.whole());
                if enlarged != part {
                    // Without memory for it, page-table pages stay.
                    drop(self.vm.invalidate_range(enlarged));
                }
            } else {
                self.take(&mut layout.regions[index], part)?;
                layout.cut_areas(part);
                index += 1;
            }
        }
        Ok(())
    }

    /// What the page tables translate.
    fn whole(&self) -> GfnRange {
        GfnRange::new(Gfn(0), 1 << (self.vm.gpa_bits() - PAGE_SIZE.trailing_zeros()))
    }

    /// Deletes the memslot of a region, and frees its frames.
    fn delete_region(&self, layout: &mut Layout<P>, index: usize) -> AddrSpaceResult {
        let Region { slot, range, .. } = layout.regions[index];
        self.vm.set_user_memory_region(MemoryRegion {
            slot,
            flags: MemoryRegionFlags::empty(),
            guest_phys_addr: range.start.gpa(),
            memory_size: 0,
            backing: None,
            userfault_bitmap: None,
        })?;
        let mut region = layout.remove_region(index);
        // SAFETY: the memslot was deleted.
        unsafe { self.free_frames(&mut region, range) };
        Ok(())
    }

    /// Unmaps `range` of `region`, and frees the frames that the host allocated.
    fn take(&self, region: &mut Region<P>, range: GfnRange) -> AddrSpaceResult {
        if region.memory.is_none() {
            self.vm.unmap_range(range)?;
            // SAFETY: unmapped and flushed; nothing but this address space maps pages there.
            unsafe { self.free_frames(region, range) };
        } else {
            let in_flight = self.vm.invalidate_range(range)?;
            // SAFETY: the pages are in flight.
            unsafe { self.free_frames(region, range) };
            drop(in_flight);
        }
        Ok(())
    }

    /// Frees the frames that the host allocated for `range` of `region`.
    ///
    /// # Safety
    /// No CPU uses a page of the range, and none will until this returns.
    unsafe fn free_frames(&self, region: &mut Region<P>, range: GfnRange) {
        if let Some(memory) = &region.memory {
            for page in region.pages(range) {
                // SAFETY: as the caller promises.
                unsafe { memory.remove(page) };
            }
        }
        region.frames.retain(|&(gfn, frame)| {
            if range.contains(gfn) {
                // SAFETY: `alloc_pinned` allocated it, and the list forgets it.
                unsafe { self.host().dealloc_frame(frame) };
            }
            !range.contains(gfn)
        });
    }

    /// Handles a page fault of the guest at `vaddr`, whose access needs `access_flags`. Returns
    /// whether the guest can go on: the page is mapped now, or was already. Otherwise no area allows
    /// the access, or there is no frame.
    ///
    /// It takes no lock, and waits for no other fault. It takes the engine's vCPU of its CPU for the
    /// time of the call; [`AddrSpaceVcpu`] saves that.
    #[inline]
    pub fn handle_page_fault(&self, vaddr: GuestPhysAddr, access_flags: MappingFlags) -> bool {
        self.contains(vaddr)
            && self.vcpus.with(&self.vm, self.host().this_cpu(), |vcpu| handle(vcpu, vaddr, access_flags)) == Some(true)
    }

    /// What the thread of a vCPU keeps for its own faults and translations.
    ///
    /// # Errors
    /// [`AddrSpaceError::OutOfMemory`].
    pub fn create_vcpu(&self) -> AddrSpaceResult<AddrSpaceVcpu<P, F>> {
        Ok(AddrSpaceVcpu { vcpu: self.vm.create_vcpu()?, start: self.start, end: self.end })
    }

    /// The physical address of `vaddr`. `None`: nothing is mapped there now (of an area that is
    /// mapped lazily: the guest has not used the page yet). It takes no lock.
    #[inline]
    pub fn translate(&self, vaddr: GuestPhysAddr) -> Option<PhysAddr> {
        self.contains(vaddr)
            .then(|| self.vcpus.with(&self.vm, self.host().this_cpu(), |vcpu| translate(vcpu, vaddr)))
            .flatten()
            .flatten()
    }

    /// The physical address of `vaddr`, what the guest may do there, and the size of the page.
    ///
    /// # Errors
    /// [`AddrSpaceError::Unmapped`], [`AddrSpaceError::OutOfMemory`].
    #[inline]
    pub fn query(&self, vaddr: GuestPhysAddr) -> AddrSpaceResult<(PhysAddr, MappingFlags, PageSize)> {
        if !self.contains(vaddr) {
            return Err(AddrSpaceError::Unmapped { address: vaddr });
        }
        let found = self.vcpus.with(&self.vm, self.host().this_cpu(), |vcpu| query(vcpu, vaddr));
        found.unwrap_or(Err(AddrSpaceError::OutOfMemory))
    }
}

fn paddr(vaddr: GuestPhysAddr, found: &Translation) -> PhysAddr {
    PhysAddr::from_usize(found.pfn.hpa().0 as usize + vaddr.as_usize() % PAGE_SIZE as usize)
}

// By reference: a translation that is copied just after it was written piece by piece makes the CPU
// wait for its stores.
#[inline]
fn translate<P: PagingHost, F: Format>(vcpu: &mut Vcpu<EngineHost<P>, F>, vaddr: GuestPhysAddr) -> Option<PhysAddr> {
    vcpu.translate(Gpa(vaddr.as_usize() as u64)).as_ref().map(|found| paddr(vaddr, found))
}

#[inline]
fn query<P: PagingHost, F: Format>(
    vcpu: &mut Vcpu<EngineHost<P>, F>,
    vaddr: GuestPhysAddr,
) -> AddrSpaceResult<(PhysAddr, MappingFlags, PageSize)> {
    match &vcpu.translate(Gpa(vaddr.as_usize() as u64)) {
        Some(found) => Ok((paddr(vaddr, found), flags::flags_of(found), found.size)),
        None => Err(AddrSpaceError::Unmapped { address: vaddr }),
    }
}

#[inline]
fn handle<P: PagingHost, F: Format>(
    vcpu: &mut Vcpu<EngineHost<P>, F>,
    vaddr: GuestPhysAddr,
    access_flags: MappingFlags,
) -> bool {
    flags::accesses(access_flags)
        .all(|access| vcpu.handle_fault(Gpa(vaddr.as_usize() as u64), access) == Ok(Outcome::Resume))
}

/// The address space as the thread of a vCPU has it: for its faults and translations. They share
/// nothing with other threads.
pub struct AddrSpaceVcpu<P: PagingHost, F: Format> {
    vcpu: Vcpu<EngineHost<P>, F>,
    start: usize,
    end: usize,
}

impl<P: PagingHost, F: Format> AddrSpaceVcpu<P, F> {
    /// As [`AddrSpace::handle_page_fault`].
    #[inline]
    pub fn handle_page_fault(&mut self, vaddr: GuestPhysAddr, access_flags: MappingFlags) -> bool {
        self.contains(vaddr) && handle(&mut self.vcpu, vaddr, access_flags)
    }

    /// As [`AddrSpace::translate`].
    #[inline]
    pub fn translate(&mut self, vaddr: GuestPhysAddr) -> Option<PhysAddr> {
        self.contains(vaddr).then(|| translate(&mut self.vcpu, vaddr)).flatten()
    }

    /// As [`AddrSpace::query`].
    ///
    /// # Errors
    /// [`AddrSpaceError::Unmapped`].
    #[inline]
    pub fn query(&mut self, vaddr: GuestPhysAddr) -> AddrSpaceResult<(PhysAddr, MappingFlags, PageSize)> {
        if !self.contains(vaddr) {
            return Err(AddrSpaceError::Unmapped { address: vaddr });
        }
        query(&mut self.vcpu, vaddr)
    }

    fn contains(&self, vaddr: GuestPhysAddr) -> bool {
        (self.start..self.end).contains(&vaddr.as_usize())
    }
}

impl<P: PagingHost, F: Format> fmt::Debug for AddrSpace<P, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddrSpace")
            .field("range", &(self.start..self.end))
            .field("page_table_root", &self.page_table_root())
            .field("areas", &self.read_layout().areas)
            .finish_non_exhaustive()
    }
}

impl<P: PagingHost, F: Format> Drop for AddrSpace<P, F> {
    fn drop(&mut self) {
        self.clear();
    }
}
