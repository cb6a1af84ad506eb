//! What a CPU needs to run Linux, beside what each guest needs: the same on AMD's virtualization and
//! on Intel's.

#![expect(unsafe_code, reason = "its contract is a promise about hardware and memory")]

use alloc::boxed::Box;

use super::state::State as Moved;
use crate::arch::x86::registers::{Event, Registers, State};
use crate::virtual_cpu::{SecondStage, VirtualCpu};

/// A CPU that runs Linux.
pub trait PcCpu: VirtualCpu {
    /// One on `second_stage`, which may use what `identity` says.
    ///
    /// # Safety
    /// As for [`VirtualCpu::new`].
    unsafe fn with_machine(second_stage: SecondStage) -> Self;

    /// Sets all registers but for the general ones, which are 0.
    fn set_state(&mut self, state: &State);

    /// The general registers, but for `rax` and `rsp`.
    fn registers(&mut self) -> &mut Registers;

    /// The register.
    fn rax(&self) -> u64;

    /// The stack pointer.
    fn rsp(&self) -> u64;

    /// EFER, as the guest has it.
    fn efer(&self) -> u64;

    /// Sets EFER, but for LMA, which the CPU sets.
    fn set_efer(&mut self, value: u64);

    /// Delivers `event` at the next entry.
    fn inject(&mut self, event: Event);

    /// What goes to another machine with the guest, of a CPU that is outside of it. `None`: an
    /// interrupt is in service, so it is not the moment.
    fn moved(&mut self) -> Option<Box<Moved>>;

    /// Becomes what has come from another machine. The guest's time-stamp counter is `tsc_offset`
    /// ahead of the machine's.
    fn become_moved(&mut self, state: &Moved, tsc_offset: u64);
}
