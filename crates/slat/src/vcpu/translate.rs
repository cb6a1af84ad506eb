//! The translation of a page, for the thread of a vCPU.

#![expect(unsafe_code, reason = "the vCPU's participant is kept alive by its VM")]

use super::Vcpu;
use crate::addr::Gpa;
use crate::format::Format;
use crate::host::Host;
use crate::second_stage::query::{self, Translation};

impl<H: Host, F: Format> Vcpu<H, F> {
    /// As [`Vm::translate`](crate::Vm::translate), for a thread that has a vCPU, such as one that
    /// emulates an instruction of the guest. It writes nothing that other threads read or write, and
    /// it cannot fail.
    ///
    /// # Example
    /// ```
    /// # mod host { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/doc_host.rs")); }
    /// # use host::*;
    /// use slat::*;
    /// # fn main() -> Result<(), Error> {
    /// let vm = vm_with_memory(Config::default(), MemoryRegionFlags::empty());
    /// let mut vcpu = vm.create_vcpu()?;
    /// assert_eq!(vcpu.translate(Gpa(0x3008)), None);
    /// assert_eq!(vcpu.handle_fault(Gpa(0x3008), Access::Read)?, Outcome::Resume);
    /// assert_eq!(vcpu.translate(Gpa(0x3008)), vm.translate(Gpa(0x3008))?);
    /// # Ok(())
    /// # }
    /// ```
    #[inline]
    pub fn translate(&mut self, gpa: Gpa) -> Option<Translation> {
        // SAFETY: `self.vm` keeps the VM alive, and with it the epochs that the participant came
        // from.
        let participant = unsafe { self.participant.get() };
        query::translate(&self.vm.tree, &self.vm.tree.epochs.pin(participant), gpa)
    }
}
