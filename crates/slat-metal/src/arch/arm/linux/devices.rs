//! The guest's accesses to the interrupt controller, which the hypervisor does for it.
//!
//! They are done as they are, but that the interrupt of a kick stays as it is, no other one is of
//! its group, the guest sees the redistributors of its own CPUs alone, and these have no tables in
//! memory: a guest could let the controller write anywhere by them.

#![expect(unsafe_code, reason = "reads and writes the registers of the controller")]

use core::arch::asm;

use slat::Gpa;

use super::guarded::{BadAccess, to_distributor, to_redistributor};
use crate::arch::arm::gic;
use crate::arch::arm::gic_registers::TYPER_LAST;
use crate::arch::arm::machine::{self, DISTRIBUTOR_BYTES, REDISTRIBUTOR_BYTES};
use crate::boot::Span;

/// A redistributor's type.
const GICR_TYPER: u64 = 8;
/// The controller, as the guest may access it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Devices {
    distributor: Span,
    redistributors: Span,
}

/// A register, by the address that the guest has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Register {
    /// An offset in the distributor.
    Distributor(u64),
    /// An offset in a redistributor.
    Redistributor(u64),
}

impl Devices {
    /// The machine's controller, for a guest with `cpus`.
    pub fn new(cpus: &[u64]) -> Devices {
        let machine = machine::get();
        let start = machine.distributor.start;
        let ends = cpus.iter().map(|&mpidr| gic::redistributor(mpidr) + REDISTRIBUTOR_BYTES);
        let end = ends.max().unwrap_or(machine.redistributors.start);
        Devices {
            distributor: Span { start, end: start + DISTRIBUTOR_BYTES },
            redistributors: Span { start: machine.redistributors.start, end },
        }
    }

    /// The redistributors of the guest's CPUs.
    pub fn redistributors(&self) -> Span {
        self.redistributors
    }

    fn register(&self, gpa: Gpa, nr_bytes: u32) -> Result<Register, BadAccess> {
        let is_in = |span: Span| span.start <= gpa.0 && gpa.0 + u64::from(nr_bytes) <= span.end;
        let is_aligned = gpa.0.is_multiple_of(u64::from(nr_bytes));
        if is_aligned && is_in(self.distributor) {
            Ok(Register::Distributor(gpa.0 - self.distributor.start))
        } else if is_aligned && is_in(self.redistributors) {
            Ok(Register::Redistributor((gpa.0 - self.redistributors.start) % REDISTRIBUTOR_BYTES))
        } else {
            Err(BadAccess)
        }
    }

    /// Reads for the guest.
    ///
    /// # Errors
    /// [`BadAccess`].
    pub fn load(&self, gpa: Gpa, nr_bytes: u32) -> Result<u64, BadAccess> {
        let register = self.register(gpa, nr_bytes)?;
        // SAFETY: a register of the controller, whose reads change no more than the guest's own
        // state.
        let value = unsafe { read(gpa.0, nr_bytes)? };
        let last = self.redistributors.end - REDISTRIBUTOR_BYTES + GICR_TYPER;
        Ok(if gpa.0 == last && register == Register::Redistributor(GICR_TYPER) { value | TYPER_LAST } else { value })
    }

    /// Writes for the guest.
    ///
    /// # Errors
    /// [`BadAccess`].
    pub fn store(&self, gpa: Gpa, nr_bytes: u32, value: u64) -> Result<(), BadAccess> {
        let value = match self.register(gpa, nr_bytes)? {
            Register::Distributor(offset) => Some(to_distributor(offset, value)),
            Register::Redistributor(offset) => to_redistributor(offset, nr_bytes, value)?,
        };
        match value {
            // SAFETY: a register of the controller, and a value that keeps what is the
            // hypervisor's.
            Some(value) => unsafe { write(gpa.0, nr_bytes, value) },
            None => Ok(()),
        }
    }
}

/// Reads a register.
///
/// # Safety
/// It is one of the controller.
unsafe fn read(address: u64, nr_bytes: u32) -> Result<u64, BadAccess> {
    let value: u64;
    // SAFETY: as the caller promises; devices are mapped to themselves.
    unsafe {
        match nr_bytes {
            1 => asm!("ldrb {:w}, [{}]", out(reg) value, in(reg) address, options(nostack, preserves_flags)),
            4 => asm!("ldr {:w}, [{}]", out(reg) value, in(reg) address, options(nostack, preserves_flags)),
            8 => asm!("ldr {}, [{}]", out(reg) value, in(reg) address, options(nostack, preserves_flags)),
            _ => return Err(BadAccess),
        }
    }
    Ok(value)
}

/// Writes a register.
///
/// # Safety
/// As for [`read`]. The value changes nothing that is the hypervisor's.
unsafe fn write(address: u64, nr_bytes: u32, value: u64) -> Result<(), BadAccess> {
    // SAFETY: as above.
    unsafe {
        match nr_bytes {
            1 => asm!("strb {:w}, [{}]", in(reg) value, in(reg) address, options(nostack, preserves_flags)),
            4 => asm!("str {:w}, [{}]", in(reg) value, in(reg) address, options(nostack, preserves_flags)),
            8 => asm!("str {}, [{}]", in(reg) value, in(reg) address, options(nostack, preserves_flags)),
            _ => return Err(BadAccess),
        }
    }
    Ok(())
}
