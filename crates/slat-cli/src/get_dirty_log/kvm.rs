//! The most important peer: the KVM of this machine (`crate::kvm`). Its memslot has the size and
//! the memory of all others. The log is got in KVM's legacy mode, in which the call begins a new
//! log too. The vCPU is out of the guest when the log is got.

use slat::Gfn;
use slat::dirty::ManualProtect;
use slat_machine::memory::Backing;

use super::subject::Subject;
use crate::failure::Failure;
use crate::kvm::{KvmError, KvmGuest, KvmVm, Logging, VmShape};

/// A VM of the real KVM with one slot.
pub(super) struct KvmPeer {
    vm: KvmVm,
    /// One.
    guests: Vec<KvmGuest>,
}

impl KvmPeer {
    /// A VM whose memslot is all of `memory`, and logs.
    pub(super) fn new(memory: &Backing) -> Result<KvmPeer, KvmError> {
        let shape = VmShape {
            nr_vcpus: 1,
            nr_slots: 1,
            nr_listed: memory.size_bytes() >> Gfn::SHIFT,
            manual_protect: ManualProtect::Disabled,
        };
        let (vm, guests) = KvmVm::new(memory, &shape)?;
        vm.set_logging(Logging::On)?;
        Ok(KvmPeer { vm, guests })
    }
}

impl Subject for KvmPeer {
    fn write(&mut self, pages: &[u32], value: u64) -> Result<(), Failure> {
        Ok(self.guests.iter_mut().try_for_each(|guest| guest.write_listed(pages, value))?)
    }

    fn get_dirty_log(&mut self, log: &mut [u64]) -> Result<(), Failure> {
        Ok(self.vm.get_dirty_log(0, log)?)
    }
}
