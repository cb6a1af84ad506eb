//! Accesses to a process's pages, by the process or by the kernel for it, and the page faults that
//! they cause.

use slat::Access;
use slat::shadow::Privilege;

use super::address_space::{AddressSpace, Expected, RegionRights, UserPage, error_code, gva_of};
use super::core::Core;
use super::cpu::{ERROR_PRESENT, KernelGuestCpu};
use super::error::KernelError;
use super::layout::direct;
use crate::hardware::cpu::CpuError;
use crate::hardware::walk::guest::GuestFault;

/// An access needs two faults at most: one that is resolved, and one for what a CPU has cached of
/// each root. More is no progress.
const MAX_FAULTS: u32 = 8;

/// The result of an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Touched {
    /// It completed.
    Completed,
    /// The process may not make it: a signal.
    Denied,
}

impl<C: KernelGuestCpu> Core<C> {
    /// Accesses `page` of the loaded address space, as the process ([`Privilege::User`], in user
    /// mode) or as the kernel ([`Privilege::SupervisorWithAc`], in the kernel, without fetches),
    /// and resolves the faults.
    pub(crate) fn touch(
        &mut self,
        space: &mut AddressSpace,
        page: u64,
        access: Access,
        privilege: Privilege,
    ) -> Result<Touched, KernelError> {
        let gva = gva_of(page);
        let mark = if access == Access::Write { space.next_mark(page) } else { 0 };
        for _ in 0..MAX_FAULTS {
            let expected = space.expect(page, access, privilege);
            self.set_privilege(privilege);
            let (reported, error_code) = match self.access(gva, access, mark) {
                Ok(found) => {
                    self.completed(space, page, access, privilege, (found, expected))?;
                    if privilege != Privilege::User {
                        self.set_privilege(Privilege::Supervisor);
                    }
                    return Ok(Touched::Completed);
                }
                Err(CpuError::Guest(GuestFault::Page { gva, error_code })) => (gva, error_code),
                Err(error) => return Err(KernelError::Access { gva, access, privilege, error }),
            };
            let called_for = match expected {
                Expected::Fault(code) => Some(code),
                Expected::Completes => spurious(space, page, access, privilege),
            };
            if reported != gva || called_for != Some(error_code) {
                return Err(KernelError::WrongFault {
                    gva,
                    access,
                    privilege,
                    reported,
                    error_code,
                    expected: called_for,
                });
            }
            let touched = if privilege == Privilege::User {
                self.enter_kernel(gva.0)?;
                let touched = self.resolve(space, page, access)?;
                self.leave_kernel()?;
                touched
            } else {
                self.set_privilege(Privilege::Supervisor);
                self.resolve(space, page, access)?
            };
            if touched == Touched::Denied {
                return Ok(touched);
            }
        }
        Err(KernelError::Stuck { gva, access, privilege, nr_faults: MAX_FAULTS })
    }

    /// Checks an access to `page` that completed, and its value if it was not a write.
    fn completed(
        &mut self,
        space: &mut AddressSpace,
        page: u64,
        access: Access,
        privilege: Privilege,
        (value, expected): (u64, Expected),
    ) -> Result<(), KernelError> {
        let gva = gva_of(page);
        match (expected, space.pages.get_mut(&page)) {
            (Expected::Fault(expected), _) => Err(KernelError::NoFault { gva, access, privilege, expected }),
            (Expected::Completes, None) => Ok(()),
            (Expected::Completes, Some(page)) => {
                page.is_accessed = true;
                if access == Access::Write {
                    page.is_dirty = true;
                    page.mark = value;
                }
                self.check(gva, value, page.mark)
            }
        }
    }

    /// An access by the current root that must fault with `expected`, and that is not resolved. In
    /// the kernel; the privilege may be the process's, as if it had not entered.
    pub(crate) fn must_fault(
        &mut self,
        gva: slat::shadow::Gva,
        access: Access,
        privilege: Privilege,
        expected: u32,
    ) -> Result<(), KernelError> {
        self.set_privilege(privilege);
        let done = self.access(gva, access, 0);
        self.set_privilege(Privilege::Supervisor);
        match done {
            Ok(_) => Err(KernelError::NoFault { gva, access, privilege, expected }),
            Err(CpuError::Guest(GuestFault::Page { gva: reported, error_code })) => {
                if reported != gva || error_code != expected {
                    let expected = Some(expected);
                    return Err(KernelError::WrongFault { gva, access, privilege, reported, error_code, expected });
                }
                self.counters.stray_accesses += 1;
                Ok(())
            }
            Err(error) => Err(KernelError::Access { gva, access, privilege, error }),
        }
    }

    /// The kernel's page fault handler.
    fn resolve(&mut self, space: &mut AddressSpace, page: u64, access: Access) -> Result<Touched, KernelError> {
        let Some(rights) = space.rights(page).filter(|rights| rights.allow(access)) else {
            return Ok(Touched::Denied);
        };
        self.counters.page_faults += 1;
        match space.pages.get(&page).copied() {
            None => self.fill(space, page, access, rights)?,
            Some(old) if old.rights.allow(access) => self.counters.spurious_faults += 1,
            Some(old) => self.make_writable(space, page, old)?,
        }
        Ok(Touched::Completed)
    }

    /// Maps a page that is not present, with contents of its own, as from a file.
    fn fill(
        &mut self,
        space: &mut AddressSpace,
        page: u64,
        access: Access,
        rights: RegionRights,
    ) -> Result<(), KernelError> {
        let frame = self.zeroed_frame()?;
        let mark = space.next_mark(page);
        self.write(direct(frame.gpa()), mark)?;
        // A page that was only read becomes writable by a fault of its own.
        let rights =
            if rights == RegionRights::ReadWrite && access != Access::Write { RegionRights::Read } else { rights };
        let new = UserPage { frame, rights, mark, is_accessed: false, is_dirty: false, may_fault: false };
        self.map_page(space, page, new)
    }

    /// A write to a page whose region is writable and whose PTE is not: copies the page if it is
    /// shared.
    fn make_writable(&mut self, space: &mut AddressSpace, page: u64, old: UserPage) -> Result<(), KernelError> {
        // The only user stays alone: only a user of a frame can share it.
        if self.kernel.frames.lock().nr_users(old.frame) == 1 {
            // No flush: a CPU that still has the old translation faults and then retries.
            return self.change_rights(
                space,
                page,
                UserPage { rights: RegionRights::ReadWrite, may_fault: true, ..old },
            );
        }
        self.counters.copies_on_write += 1;
        let frame = self.zeroed_frame()?;
        self.read_checked(direct(old.frame.gpa()), old.mark)?;
        self.write(direct(frame.gpa()), old.mark)?;
        let new = UserPage {
            frame,
            rights: RegionRights::ReadWrite,
            mark: old.mark,
            is_accessed: false,
            is_dirty: false,
            may_fault: false,
        };
        self.change_frame(space, page, new)?;
        self.kernel.frames.lock().release(old.frame);
        Ok(())
    }
}

/// Error code of a fault that the page tables do not require, but an old translation of a CPU may
/// cause.
fn spurious(space: &AddressSpace, page: u64, access: Access, privilege: Privilege) -> Option<u32> {
    space.pages.get(&page)?.may_fault.then(|| error_code(access, privilege, ERROR_PRESENT))
}
