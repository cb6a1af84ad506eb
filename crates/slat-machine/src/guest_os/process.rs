//! A virtual CPU with its processes: each operation from user mode to user mode.

use std::collections::VecDeque;
use std::sync::Arc;

use slat::Access;
use slat::shadow::Privilege;

use super::Kernel;
use super::address_space::{AddressSpace, Region, RegionRights, error_code, gva_of};
use super::core::Core;
use super::counters::KernelCounters;
use super::cpu::KernelGuestCpu;
use super::error::KernelError;
use super::layout::IDLE_ROOT;

/// A virtual CPU of a [`Kernel`], with its processes. Between its methods it is in user mode of one
/// of them.
///
/// After an error the state of the CPU and its processes is undefined.
#[derive(Debug)]
pub struct KernelCpu<C> {
    pub(super) core: Core<C>,
    pub(super) current: AddressSpace,
    pub(super) queue: VecDeque<AddressSpace>,
}

impl<C: KernelGuestCpu> KernelCpu<C> {
    /// Starts virtual CPU `vcpu` (from 0 on) of `kernel` on `cpu`, which comes from reset, with one
    /// process. The first CPU to start builds the kernel's own page tables; the others wait for it.
    ///
    /// # Errors
    /// [`KernelError`]: there is no such CPU, it was started before, or it gave a wrong result.
    pub fn start(kernel: Arc<Kernel>, vcpu: u16, cpu: C) -> Result<KernelCpu<C>, KernelError> {
        let mut core = Core::start(kernel, vcpu, cpu)?;
        let current = core.new_program()?;
        core.switch_to(&current)?;
        core.leave_kernel()?;
        Ok(KernelCpu { core, current, queue: VecDeque::new() })
    }

    /// The counts since the start.
    pub fn counters(&self) -> &KernelCounters {
        &self.core.counters
    }

    /// The CPU.
    pub fn cpu(&self) -> &C {
        &self.core.cpu
    }

    /// The CPU, for its runner: the guest's own state must not change.
    pub fn cpu_mut(&mut self) -> &mut C {
        &mut self.core.cpu
    }

    /// Ends all processes, also those that wait for any CPU, checks their contents a last time, and
    /// returns the CPU.
    ///
    /// # Errors
    /// [`KernelError`]: a deviation.
    pub fn shut_down(mut self) -> Result<C, KernelError> {
        self.core.enter_kernel(0)?;
        let migrating = std::mem::take(&mut *self.core.kernel.migrating.lock());
        self.queue.extend(migrating);
        self.core.unmap_everything(&mut self.current)?;
        for next in std::mem::take(&mut self.queue) {
            self.core.switch_to(&next)?;
            let old = std::mem::replace(&mut self.current, next);
            self.core.free_roots(old)?;
            self.core.unmap_everything(&mut self.current)?;
        }
        self.core.load_cr3(IDLE_ROOT)?;
        self.core.asids.unload();
        self.core.free_roots(self.current)?;
        Ok(self.core.cpu)
    }

    pub(super) fn touch(&mut self, page: u64, access: Access) -> Result<(), KernelError> {
        self.core.touch(&mut self.current, page, access, Privilege::User).map(|_| ())
    }

    /// Enters the kernel, does `work`, and leaves.
    fn in_kernel<T>(
        &mut self,
        work: impl FnOnce(&mut Core<C>, &mut AddressSpace) -> Result<T, KernelError>,
    ) -> Result<T, KernelError> {
        self.core.enter_kernel(self.current.id)?;
        let done = work(&mut self.core, &mut self.current)?;
        self.core.leave_kernel()?;
        Ok(done)
    }

    pub(super) fn system_call(&mut self, pages: &[(u64, Access)]) -> Result<(), KernelError> {
        self.in_kernel(|core, space| core.system_call(space, pages))
    }

    pub(super) fn mmap(&mut self, first: u64, region: Region) -> Result<(), KernelError> {
        self.in_kernel(|core, space| {
            core.mmap(space, first, region);
            Ok(())
        })
    }

    pub(super) fn munmap(&mut self, first: u64, nr_pages: u64) -> Result<(), KernelError> {
        self.in_kernel(|core, space| core.munmap(space, first, nr_pages))
    }

    /// The kernel reads `page` for the process, unmaps it, and reads it again before it leaves.
    pub(super) fn unmap_and_look(&mut self, page: u64) -> Result<(), KernelError> {
        let privilege = Privilege::SupervisorWithAc;
        self.in_kernel(|core, space| {
            core.touch(space, page, Access::Read, privilege)?;
            core.munmap(space, page, 1)?;
            core.must_fault(gva_of(page), Access::Read, privilege, error_code(Access::Read, privilege, 0))
        })
    }

    pub(super) fn mprotect(&mut self, first: u64, nr_pages: u64, rights: RegionRights) -> Result<(), KernelError> {
        self.in_kernel(|core, space| core.mprotect(space, first, nr_pages, rights))
    }

    pub(super) fn map_temporarily(&mut self, value: u64) -> Result<(), KernelError> {
        self.in_kernel(|core, _| core.map_temporarily(value))
    }

    /// Whether there may be another process.
    pub(super) fn has_place(&self) -> bool {
        self.queue.len() + 1 < usize::from(self.core.kernel.config().processes_per_vcpu)
    }

    pub(super) fn fork(&mut self) -> Result<(), KernelError> {
        let child = self.in_kernel(Core::fork)?;
        self.queue.push_back(child);
        Ok(())
    }

    /// Switches to another process, if there is one.
    pub(super) fn switch(&mut self) -> Result<(), KernelError> {
        self.core.enter_kernel(self.current.id)?;
        if let Some(next) = self.queue.pop_front() {
            self.core.counters.context_switches += 1;
            self.core.switch_to(&next)?;
            self.queue.push_back(std::mem::replace(&mut self.current, next));
        }
        self.core.leave_kernel()
    }

    /// The process begins another program: the new address space is loaded before the old one is
    /// unmapped.
    pub(super) fn exec(&mut self) -> Result<(), KernelError> {
        self.core.enter_kernel(self.current.id)?;
        self.core.counters.execs += 1;
        let new = self.core.new_program()?;
        self.core.switch_to(&new)?;
        let mut old = std::mem::replace(&mut self.current, new);
        self.core.unmap_everything(&mut old)?;
        self.core.free_roots(old)?;
        self.core.leave_kernel()
    }

    /// The process ends: its address space is unmapped while it is loaded. The next one runs, or a
    /// new one.
    pub(super) fn exit(&mut self) -> Result<(), KernelError> {
        self.core.enter_kernel(self.current.id)?;
        self.core.counters.exits += 1;
        self.core.unmap_everything(&mut self.current)?;
        let next = match self.queue.pop_front() {
            Some(next) => next,
            None => self.core.new_program()?,
        };
        self.core.switch_to(&next)?;
        let old = std::mem::replace(&mut self.current, next);
        self.core.free_roots(old)?;
        self.core.leave_kernel()
    }

    /// Takes a process that waits for a CPU and releases one of its own.
    pub(super) fn migrate(&mut self) {
        let has_place = self.has_place();
        let nr_vcpus = self.core.kernel.config().nr_vcpus;
        let mut migrating = self.core.kernel.migrating.lock();
        if has_place && let Some(space) = migrating.pop_front() {
            self.core.counters.migrations += 1;
            self.queue.push_back(space);
        }
        if migrating.len() < usize::from(nr_vcpus)
            && let Some(space) = self.queue.pop_front()
        {
            migrating.push_back(space);
        }
    }
}
