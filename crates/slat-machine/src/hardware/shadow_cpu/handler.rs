//! The hypervisor of a CPU without a second stage.

use slat::error::FaultError;
use slat::format::Npt;
use slat::shadow::{GuestAccess, GuestEntry, Gva, PagingRegister, PagingRegisters};
use slat::{Gpa, Host, Outcome, Vcpu};

/// Handles the exits: the engine's [`Vcpu`], or a test.
pub trait ShadowHandler {
    /// What to load before the guest runs: called before each entry. See [`Vcpu::entry`].
    ///
    /// # Errors
    /// The engine's: the guest cannot run.
    fn entry(&mut self) -> Result<GuestEntry, FaultError>;

    /// The guest writes CR0, CR4 or EFER: see [`Vcpu::write_paging_register`].
    ///
    /// # Errors
    /// The engine's.
    fn write_paging_register(&mut self, register: PagingRegister, value: u64) -> Result<Outcome, FaultError>;

    /// The hypervisor sets all of them: see [`Vcpu::set_paging_registers`].
    ///
    /// # Errors
    /// The engine's.
    fn set_paging_registers(&mut self, registers: PagingRegisters) -> Result<(), FaultError>;

    /// The guest writes CR3: see [`Vcpu::load_cr3`].
    ///
    /// # Errors
    /// The engine's.
    fn load_cr3(&mut self, value: u64) -> Result<Outcome, FaultError>;

    /// The guest invalidates a page: see [`Vcpu::invlpg`].
    ///
    /// # Errors
    /// The engine's.
    fn invlpg(&mut self, gva: Gva) -> Result<Outcome, FaultError>;

    /// The guest invalidates by PCID: see [`Vcpu::invpcid`].
    ///
    /// # Errors
    /// The engine's.
    fn invpcid(&mut self, kind: u64, descriptor: [u64; 2]) -> Result<Outcome, FaultError>;

    /// Handles a page fault: see [`Vcpu::handle_page_fault`].
    ///
    /// # Errors
    /// The engine's.
    fn handle_page_fault(&mut self, gva: Gva, access: GuestAccess) -> Result<Outcome, FaultError>;

    /// Emulates a write of the guest: see [`Vcpu::write_guest_table`].
    ///
    /// # Errors
    /// The engine's.
    fn write_guest_table(&mut self, gpa: Gpa, bytes: &[u8]) -> Result<Outcome, FaultError>;
}

impl<H: Host> ShadowHandler for Vcpu<H, Npt> {
    fn entry(&mut self) -> Result<GuestEntry, FaultError> {
        Vcpu::entry(self)
    }

    fn write_paging_register(&mut self, register: PagingRegister, value: u64) -> Result<Outcome, FaultError> {
        Vcpu::write_paging_register(self, register, value)
    }

    fn set_paging_registers(&mut self, registers: PagingRegisters) -> Result<(), FaultError> {
        Vcpu::set_paging_registers(self, registers)
    }

    fn load_cr3(&mut self, value: u64) -> Result<Outcome, FaultError> {
        Vcpu::load_cr3(self, value)
    }

    fn invlpg(&mut self, gva: Gva) -> Result<Outcome, FaultError> {
        Vcpu::invlpg(self, gva)
    }

    fn invpcid(&mut self, kind: u64, descriptor: [u64; 2]) -> Result<Outcome, FaultError> {
        Vcpu::invpcid(self, kind, descriptor)
    }

    fn handle_page_fault(&mut self, gva: Gva, access: GuestAccess) -> Result<Outcome, FaultError> {
        Vcpu::handle_page_fault(self, gva, access)
    }

    fn write_guest_table(&mut self, gpa: Gpa, bytes: &[u8]) -> Result<Outcome, FaultError> {
        Vcpu::write_guest_table(self, gpa, bytes)
    }
}
