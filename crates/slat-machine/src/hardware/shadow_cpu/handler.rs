//! The hypervisor of a CPU without a second stage.

use slat::error::FaultError;
use slat::format::Npt;
use slat::shadow::{GuestAccess, GuestEntry, Gva, PagingRegister, PagingRegisters};
use slat::{Gpa, Host, Outcome, Vcpu};

/// Why the CPU has left the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ShadowExit {
    /// The guest writes CR0, CR3, CR4 or EFER: see [`Vcpu::write_paging_register`].
    WriteRegister(PagingRegister, u64),
    /// The hypervisor sets all of them: see [`Vcpu::set_paging_registers`].
    SetRegisters(PagingRegisters),
    /// The guest invalidates a page: see [`Vcpu::invlpg`].
    Invlpg(Gva),
    /// The guest invalidates by PCID, with this type and descriptor: see [`Vcpu::invpcid`].
    Invpcid(u64, [u64; 2]),
    /// A page fault: see [`Vcpu::handle_page_fault`].
    PageFault(Gva, GuestAccess),
    /// A write of the guest is to be emulated: see [`Vcpu::write_guest_table`].
    WriteTable(Gpa, u64),
}

/// Handles the exits: the engine's [`Vcpu`], or a test.
pub trait ShadowHandler {
    /// What to load before the guest runs: called before each entry. See [`Vcpu::entry`].
    ///
    /// # Errors
    /// The engine's: the guest cannot run.
    fn entry(&mut self) -> Result<GuestEntry, FaultError>;

    /// Handles an exit.
    ///
    /// # Errors
    /// The engine's.
    fn handle_exit(&mut self, exit: ShadowExit) -> Result<Outcome, FaultError>;
}

impl<H: Host> ShadowHandler for Vcpu<H, Npt> {
    fn entry(&mut self) -> Result<GuestEntry, FaultError> {
        Vcpu::entry(self)
    }

    #[inline]
    fn handle_exit(&mut self, exit: ShadowExit) -> Result<Outcome, FaultError> {
        match exit {
            ShadowExit::WriteRegister(register, value) => self.write_paging_register(register, value),
            ShadowExit::SetRegisters(registers) => self.set_paging_registers(registers).map(|()| Outcome::Resume),
            ShadowExit::Invlpg(gva) => self.invlpg(gva),
            ShadowExit::Invpcid(kind, descriptor) => self.invpcid(kind, descriptor),
            ShadowExit::PageFault(gva, access) => self.handle_page_fault(gva, access),
            ShadowExit::WriteTable(gpa, value) => self.write_guest_table(gpa, &value.to_le_bytes()),
        }
    }
}
