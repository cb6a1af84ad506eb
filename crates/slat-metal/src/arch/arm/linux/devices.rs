//! The guest's accesses to the interrupt controller, which the hypervisor does for it.
//!
//! They are done as they are, but that the interrupt of a kick stays as it is, no other one is of
//! its group, the guest sees the redistributors of its own CPUs alone, and these have no tables in
//! memory: a guest could let the controller write anywhere by them.

#![expect(unsafe_code, reason = "reads and writes the registers of the controller")]

use core::arch::asm;

use slat::Gpa;

use crate::arch::arm::gic::{
    self, CTLR_AFFINITY, CTLR_GROUP_0, GICD_CTLR, GICR_IGROUPR0, GICR_IPRIORITYR, KICK, SGI_FRAME, TYPER_LAST,
};
use crate::arch::arm::machine::{self, DISTRIBUTOR_BYTES, REDISTRIBUTOR_BYTES};
use crate::boot::Span;

/// The distributor's groups, a bit for each interrupt.
const GICD_IGROUPR: u64 = 0x80;
const GICD_IGROUPR_END: u64 = 0x100;
/// A redistributor's type.
const GICR_TYPER: u64 = 8;
/// The register that wakes a CPU's interface.
const GICR_WAKER: u64 = 0x14;
/// Bits of a CPU's own interrupts: set and clear of enabled, pending, active.
const GICR_FIRST_BITS: u64 = SGI_FRAME + 0x100;
const BITS_END: u64 = SGI_FRAME + 0x384;
/// Whether they are edges.
const GICR_ICFGR0: u64 = SGI_FRAME + 0xc00;
const GICR_ICFGR1: u64 = SGI_FRAME + 0xc04;

/// The priorities that have that of the kick.
const KICK_PRIORITIES: u64 = GICR_IPRIORITYR + (KICK & !3) as u64;
const PRIORITIES_END: u64 = GICR_IPRIORITYR + 32;

/// The controller, as the guest may access it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Devices {
    distributor: Span,
    redistributors: Span,
}

/// An access that no register has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BadAccess;

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

/// What is written to the distributor.
fn to_distributor(offset: u64, value: u64) -> u64 {
    match offset {
        GICD_CTLR => value | u64::from(CTLR_GROUP_0 | CTLR_AFFINITY),
        GICD_IGROUPR..GICD_IGROUPR_END => u64::MAX,
        _ => value,
    }
}

/// What is written to a redistributor. `None`: nothing.
fn to_redistributor(offset: u64, nr_bytes: u32, value: u64) -> Result<Option<u64>, BadAccess> {
    let kick = 1_u64 << KICK;
    let value = match offset {
        // Registers of 32 bits with a bit for the kick, which is another one in a part of them.
        GICR_IGROUPR0..BITS_END if nr_bytes != 4 => return Err(BadAccess),
        GICR_WAKER | GICR_ICFGR0 | GICR_ICFGR1 => Some(value),
        GICR_IGROUPR0 => Some(!kick),
        GICR_FIRST_BITS..BITS_END => Some(value & !kick),
        KICK_PRIORITIES.. if offset < KICK_PRIORITIES + 4 => {
            (nr_bytes == 4).then(|| u64::from(gic::with_kick_priority(value as u32)))
        }
        GICR_IPRIORITYR..PRIORITIES_END if nr_bytes <= 4 => Some(value),
        _ => None,
    };
    Ok(value)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kick_stays_as_it_is() {
        let all = u64::from(u32::MAX);
        for offset in [GICR_IGROUPR0, GICR_FIRST_BITS, SGI_FRAME + 0x180, SGI_FRAME + 0x280, SGI_FRAME + 0x380] {
            assert_eq!(to_redistributor(offset, 4, all).map(|value| value.unwrap() as u32), Ok(0xffff_7fff));
            assert_eq!(to_redistributor(offset, 8, all), Err(BadAccess));
            // The kick is bit 7 of this byte.
            assert_eq!(to_redistributor(offset + 1, 1, 0x80), Err(BadAccess));
        }
        assert_eq!(to_redistributor(KICK_PRIORITIES, 4, all), Ok(Some(0xff_ffff)));
        for (offset, nr_bytes) in [(KICK_PRIORITIES - 4, 8), (KICK_PRIORITIES + 3, 1)] {
            assert_eq!(to_redistributor(offset, nr_bytes, all), Ok(None));
        }
        assert_eq!(to_redistributor(GICR_IPRIORITYR + 16, 1, 0xa0), Ok(Some(0xa0)));
    }
}
