//! What a vCPU of Linux has on each machine, and how its page faults are handled.

#![expect(unsafe_code, reason = "a presence is a promise about a CPU")]

use fastrand::Rng;
use slat::error::FaultError;
use slat::{Access, Exit, Gpa, Outcome};
use thiserror::Error;

use super::{Beside, Linux, LinuxCpu};
use crate::arch::clock;
use crate::arch::linux::Cpu;
use crate::cpus::Presence;
use crate::error;
#[cfg(target_arch = "x86_64")]
use crate::fail;
use crate::operations::MetalVcpu;
use crate::virtual_cpu::VirtualCpu;

/// How late a page comes that the guest waits for, at most.
const MAX_LATE_US: u64 = 300;

/// A page fault that the vCPU cannot go on from.
#[derive(Debug, Error)]
pub(crate) enum Unhandled {
    /// Nothing maps the page.
    #[error("{0}")]
    Exit(Exit),
    /// The engine refuses it.
    #[error(transparent)]
    Error(#[from] FaultError),
}

/// A vCPU, without its CPU.
pub(crate) struct Vcpu<C: VirtualCpu = Cpu> {
    vcpu: MetalVcpu<C::Format>,
    pub(crate) presence: Presence,
    pub(crate) number: usize,
    rng: Rng,
}

impl<C: LinuxCpu> Vcpu<C> {
    /// vCPU `number`, on the calling CPU.
    ///
    /// # Safety
    /// As for [`Presence::new`]: it is the only one of this number.
    pub(crate) unsafe fn new(linux: &Linux<C>, number: usize) -> Vcpu<C> {
        let vcpu = linux.vm.create_vcpu().unwrap_or_else(|error| error!("no vCPU: {error}"));
        // SAFETY: as the caller promises.
        let presence = unsafe { Presence::new(&linux.cpus, number) };
        Vcpu { vcpu, presence, number, rng: Rng::with_seed(linux.options.seed ^ number as u64) }
    }

    /// Handles a fault at `gpa`. A page that is withheld comes after a while.
    ///
    /// # Errors
    /// [`Unhandled`].
    pub(crate) fn handle_fault(&mut self, linux: &Linux<C>, gpa: Gpa, access: Access) -> Result<(), Unhandled> {
        match self.vcpu.handle_fault(gpa, access)? {
            Outcome::Resume => self.presence.resume(&linux.vm, gpa),
            Outcome::Exit(Exit::MemoryFault { gpa, .. }) => {
                self.wait_for_page(linux, gpa);
            }
            Outcome::Exit(exit) => return Err(Unhandled::Exit(exit)),
        }
        Ok(())
    }

    /// Returns when the page at `gpa`, which was withheld, may be there.
    fn wait_for_page(&mut self, linux: &Linux<C>, gpa: Gpa) {
        match &linux.beside {
            Beside::Operations(operations) => {
                clock::wait_us(self.rng.u64(0..MAX_LATE_US));
                operations.bring(gpa);
            }
            #[cfg(target_arch = "x86_64")]
            Beside::Source(_) => fail!("a memory fault at {gpa}, and this machine withholds no page"),
            #[cfg(target_arch = "x86_64")]
            Beside::Target(target) => target.fetch(gpa),
        }
    }
}
