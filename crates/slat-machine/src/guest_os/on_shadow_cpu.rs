//! The mini guest kernel on a CPU whose hypervisor keeps shadow page tables.

use slat::shadow::{Gva, Privilege};

use super::cpu::{Completed, KernelGuestCpu, Trap};
use crate::hardware::cpu::CpuError;
use crate::hardware::shadow_cpu::{ShadowCpu, ShadowHandler};
use crate::hardware::walk::guest::GuestFault;

/// The guest's own faults are for the kernel; all others, exits to user space included, are for the
/// machine.
fn trap(error: CpuError) -> Trap<CpuError> {
    match error {
        CpuError::Guest(GuestFault::Page { gva, error_code }) => Trap::PageFault { gva, error_code },
        CpuError::Guest(_) => Trap::GeneralProtection,
        error => Trap::Machine(error),
    }
}

impl<V: ShadowHandler> KernelGuestCpu for ShadowCpu<V> {
    type Error = CpuError;

    fn read(&mut self, gva: Gva) -> Completed<u64, CpuError> {
        ShadowCpu::read(self, gva).map_err(trap)
    }

    fn write(&mut self, gva: Gva, value: u64) -> Completed<(), CpuError> {
        ShadowCpu::write(self, gva, value).map_err(trap)
    }

    fn fetch(&mut self, gva: Gva) -> Completed<u64, CpuError> {
        ShadowCpu::fetch(self, gva).map_err(trap)
    }

    fn set_privilege(&mut self, privilege: Privilege) {
        ShadowCpu::set_privilege(self, privilege);
    }

    fn mov_to_cr0(&mut self, value: u64) -> Completed<(), CpuError> {
        ShadowCpu::mov_to_cr0(self, value).map_err(trap)
    }

    fn mov_to_cr3(&mut self, value: u64) -> Completed<(), CpuError> {
        ShadowCpu::mov_to_cr3(self, value).map_err(trap)
    }

    fn mov_to_cr4(&mut self, value: u64) -> Completed<(), CpuError> {
        ShadowCpu::mov_to_cr4(self, value).map_err(trap)
    }

    fn write_efer(&mut self, value: u64) -> Completed<(), CpuError> {
        ShadowCpu::write_efer(self, value).map_err(trap)
    }

    fn invlpg(&mut self, gva: Gva) -> Completed<(), CpuError> {
        ShadowCpu::invlpg(self, gva).map_err(trap)
    }

    fn invpcid(&mut self, kind: u64, descriptor: [u64; 2]) -> Completed<(), CpuError> {
        ShadowCpu::invpcid(self, kind, descriptor).map_err(trap)
    }
}
