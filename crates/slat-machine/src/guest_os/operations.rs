//! The kernel's operations for processes: system calls on memory, fork, exec, exit. Each runs
//! between one entry into the kernel and the exit from it.

use slat::Access;
use slat::shadow::Privilege;

use super::address_space::{AddressSpace, Region, RegionRights, UserPage, gva_of};
use super::boot::global;
use super::core::{Core, FlushAll, Gathered};
use super::cpu::{ERROR_PRESENT, KernelGuestCpu};
use super::error::KernelError;
use super::faults::Touched;
use super::layout::{
    DATA_PAGES, NO_EXECUTE, PRESENT, STACK_PAGES, TEXT_PAGES, USER_DATA, USER_STACK, USER_TEXT, WRITABLE, direct,
    kernel_map,
};
use super::{Isolation, address_space};

/// Temporary mappings until all of them are flushed.
const NR_KERNEL_MAPS: u64 = 16;

impl<C: KernelGuestCpu> Core<C> {
    /// An address space with a program: text, data and stack, none of it present yet.
    pub(crate) fn new_program(&mut self) -> Result<AddressSpace, KernelError> {
        let mut space = self.new_space()?;
        space.add_region(USER_TEXT, Region { nr_pages: TEXT_PAGES, rights: RegionRights::ReadExecute });
        space.add_region(USER_DATA, Region { nr_pages: DATA_PAGES, rights: RegionRights::ReadWrite });
        space.add_region(USER_STACK, Region { nr_pages: STACK_PAGES, rights: RegionRights::ReadWrite });
        Ok(space)
    }

    /// A system call that only reads: `pages` of the process as a buffer, and by the direct map.
    pub(crate) fn system_call(&mut self, space: &mut AddressSpace, pages: &[(u64, Access)]) -> Result<(), KernelError> {
        self.counters.system_calls += 1;
        for (page, access) in pages {
            self.touch(space, *page, *access, Privilege::SupervisorWithAc)?;
            if let Some(page) = space.pages.get(page) {
                self.read_checked(direct(page.frame.gpa()), page.mark)?;
            }
        }
        Ok(())
    }

    /// A copy of `parent`, equal to it until one of them writes.
    pub(crate) fn fork(&mut self, parent: &mut AddressSpace) -> Result<AddressSpace, KernelError> {
        self.counters.forks += 1;
        let mut child = self.new_space()?;
        child.regions = parent.regions.clone();
        let mut loses_rights = false;
        for (page, old) in parent.pages.clone() {
            let mut shared = old;
            if old.rights == RegionRights::ReadWrite {
                shared.rights = RegionRights::Read;
                self.change_rights(parent, page, shared)?;
                loses_rights = true;
            } else {
                self.check_entry(parent, page)?;
            }
            self.kernel.frames.lock().share(old.frame);
            self.map_page(&mut child, page, UserPage { is_accessed: false, may_fault: false, ..shared })?;
        }
        if loses_rights {
            self.flush_all(parent, FlushAll::AtOnce)?;
        }
        Ok(child)
    }

    /// Maps pages; none is present yet.
    pub(crate) fn mmap(&mut self, space: &mut AddressSpace, first: u64, region: Region) {
        self.counters.mmaps += 1;
        space.add_region(first, region);
    }

    /// Unmaps `nr_pages` from `first` on.
    pub(crate) fn munmap(&mut self, space: &mut AddressSpace, first: u64, nr_pages: u64) -> Result<(), KernelError> {
        self.counters.munmaps += 1;
        space.remove_regions(first, nr_pages);
        self.unmap_pages(space, first, nr_pages)
    }

    fn unmap_pages(&mut self, space: &mut AddressSpace, first: u64, nr_pages: u64) -> Result<(), KernelError> {
        let mut gathered = Gathered::default();
        for page in space.present_pages(first, nr_pages) {
            self.unmap_page(space, page, &mut gathered)?;
            space.note_unmapped(page);
        }
        self.release(space, gathered)
    }

    /// Changes the rights of `nr_pages` from `first` on. Only pages that lose rights are flushed.
    pub(crate) fn mprotect(
        &mut self,
        space: &mut AddressSpace,
        first: u64,
        nr_pages: u64,
        rights: RegionRights,
    ) -> Result<(), KernelError> {
        self.counters.mprotects += 1;
        space.protect_regions(first, nr_pages, rights);
        let mut losing = Vec::new();
        for page in space.present_pages(first, nr_pages) {
            let old = space.pages[&page];
            // A shared page becomes writable by a fault.
            let is_shared = self.kernel.frames.lock().nr_users(old.frame) != 1;
            let rights = if rights == RegionRights::ReadWrite && is_shared { RegionRights::Read } else { rights };
            let loses = |access| old.rights.allow(access) && !rights.allow(access);
            let gains = |access| !old.rights.allow(access) && rights.allow(access);
            let either = [Access::Write, Access::Execute];
            let may_fault = old.may_fault || either.into_iter().any(gains);
            if either.into_iter().any(loses) {
                losing.push(page);
            }
            self.change_rights(space, page, UserPage { rights, may_fault, ..old })?;
        }
        if losing.is_empty() { Ok(()) } else { self.flush_pages(space, &losing) }
    }

    /// Unmaps all of `space`, whether it is loaded or not; [`free_roots`](Core::free_roots) does
    /// the rest.
    pub(crate) fn unmap_everything(&mut self, space: &mut AddressSpace) -> Result<(), KernelError> {
        space.regions.clear();
        self.unmap_pages(space, 0, 1 << address_space::PAGE_BITS)
    }

    /// Maps a page of the kernel temporarily, and reads it by both mappings. Such mappings are not
    /// flushed one by one.
    pub(crate) fn map_temporarily(&mut self, value: u64) -> Result<(), KernelError> {
        self.counters.kernel_maps += 1;
        let slot = self.nr_kernel_maps % NR_KERNEL_MAPS;
        if slot == 0 && self.nr_kernel_maps != 0 {
            self.flush_kernel()?;
        }
        self.nr_kernel_maps += 1;
        let frame = self.zeroed_frame()?;
        let gva = kernel_map(self.vcpu, slot);
        let entry = direct(self.kernel_map_table.gpa() + 8 * slot);
        let bits = PRESENT | WRITABLE | NO_EXECUTE | global(self.kernel.config().isolation);
        self.write(entry, frame.gpa() | bits)?;
        self.write(direct(frame.gpa()), value)?;
        self.read_checked(gva, value)?;
        self.write(gva, !value)?;
        self.read_checked(direct(frame.gpa()), !value)?;
        self.write(entry, 0)?;
        self.kernel.frames.lock().release(frame);
        Ok(())
    }

    /// In user mode: the process touches `page` without the right, and gets a signal.
    pub(crate) fn stray_touch(
        &mut self,
        space: &mut AddressSpace,
        page: u64,
        access: Access,
    ) -> Result<(), KernelError> {
        if self.touch(space, page, access, Privilege::User)? == Touched::Denied {
            self.counters.stray_accesses += 1;
        }
        Ok(())
    }

    /// In user mode: the process touches the kernel's half. Then the kernel touches, by mistake,
    /// what SMAP and SMEP protect.
    pub(crate) fn stray_privileges(&mut self, space: &mut AddressSpace, page: Option<u64>) -> Result<(), KernelError> {
        use address_space::error_code;
        let image = direct(0);
        // User roots map nothing there; otherwise the page is the kernel's.
        let presence = match self.kernel.config().isolation {
            Isolation::On => 0,
            Isolation::Off => ERROR_PRESENT,
        };
        for access in [Access::Read, Access::Write] {
            let expected = error_code(access, Privilege::User, presence);
            self.must_fault(image, access, Privilege::User, expected)?;
            self.enter_kernel(image.0)?;
            self.leave_kernel()?;
        }
        let Some(page) = page.filter(|page| space.pages.contains_key(page)) else { return Ok(()) };
        self.enter_kernel(image.0)?;
        let expected = |access| error_code(access, Privilege::Supervisor, ERROR_PRESENT);
        self.must_fault(gva_of(page), Access::Read, Privilege::Supervisor, expected(Access::Read))?;
        self.must_fault(gva_of(page), Access::Execute, Privilege::Supervisor, expected(Access::Execute))?;
        self.leave_kernel()
    }
}
