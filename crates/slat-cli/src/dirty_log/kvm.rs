//! The most important peer: the KVM of this machine (`crate::kvm`). Its memslot has the size and
//! the memory of all others. The log is got in KVM's legacy mode, in which the call begins a new
//! log too. The vCPU that writes is out of the guest when the log is got, and the other vCPUs run.

use slat::Gfn;
use slat::dirty::ManualProtect;
use slat_machine::memory::Backing;

use super::Method;
use super::subject::{DirtyLog, Guest, Subject, pages_read};
use crate::failure::Failure;
use crate::kvm::{KvmError, KvmGuest, KvmVm, Logging, VmShape};

/// Reads of a guest before its vCPU exits: a fraction of a millisecond or more, as a host's timer
/// interrupts it.
const READS_PER_SLICE: u64 = 1 << 19;

/// The log of a VM of the real KVM with one slot.
struct KvmLog(KvmVm);

impl DirtyLog for KvmLog {
    fn get(&self, log: &mut [u64]) -> Result<Option<u64>, Failure> {
        self.0.get_dirty_log(0, log)?;
        Ok(None)
    }
}

struct KvmVcpu {
    guest: KvmGuest,
    /// Pages that it reads in turn.
    nr_read: u32,
}

impl Guest for KvmVcpu {
    fn write(&mut self, pages: &[u32], value: u64) -> Result<(), Failure> {
        if pages.is_empty() {
            return Ok(());
        }
        Ok(self.guest.write_listed(pages, value)?)
    }

    fn run(&mut self) -> Result<(), Failure> {
        Ok(self.guest.read_pages(self.nr_read.into(), READS_PER_SLICE)?)
    }

    // The vCPU has exited when a program has ended.
    fn exit(&mut self) {}

    fn nr_faults(&self) -> Option<u64> {
        None
    }
}

/// A VM whose memslot is all of `memory`, and logs, with `nr_others` vCPUs beside the one that
/// writes.
pub(super) fn kvm(memory: &Backing, nr_others: u16) -> Result<Subject, Failure> {
    let (log, guests) = vm(memory, nr_others)?;
    Subject::new(Method::Kvm, log, guests)
}

fn vm(memory: &Backing, nr_others: u16) -> Result<(KvmLog, Vec<Box<dyn Guest>>), KvmError> {
    let shape = VmShape {
        nr_vcpus: usize::from(nr_others) + 1,
        nr_slots: 1,
        nr_listed: memory.size_bytes() >> Gfn::SHIFT,
        manual_protect: ManualProtect::Disabled,
    };
    let (vm, guests) = KvmVm::new(memory, &shape)?;
    vm.set_logging(Logging::On)?;
    let guest = |guest| Box::new(KvmVcpu { guest, nr_read: pages_read(memory) }) as Box<dyn Guest>;
    Ok((KvmLog(vm), guests.into_iter().map(guest).collect()))
}
