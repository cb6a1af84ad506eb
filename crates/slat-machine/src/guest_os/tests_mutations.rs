//! CPUs that break the rules of the manual: the kernel must detect each.

use slat::shadow::{Gva, PagingRegister, Privilege};

use super::plain_cpu::{PlainCpu, PlainMemory};
use super::tests::CONFIGS;
use super::*;
use crate::guest_os::cpu::CR4_PGE;
use crate::hardware::cpu::CpuError;
use crate::hardware::walk::guest::GuestFault;

/// What a CPU leaves out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    Nothing,
    Invlpg,
    FlushOfCr3,
    /// Of this type.
    Invpcid(u64),
    FlushOfCr4,
    NoExecute,
    Smap,
    /// Flushes more than it must: this one is correct.
    KeepsNothing,
    /// One of so many writes of user mode.
    LosesWrites(u64),
}

struct Faulty {
    cpu: PlainCpu,
    fault: Fault,
    pcids: Pcids,
    privilege: Privilege,
    nr_writes: u64,
}

impl KernelGuestCpu for Faulty {
    fn read(&mut self, gva: Gva) -> Result<u64, CpuError> {
        self.cpu.read(gva)
    }

    fn write(&mut self, gva: Gva, value: u64) -> Result<(), CpuError> {
        self.nr_writes += u64::from(self.privilege == Privilege::User);
        let is_lost = match self.fault {
            Fault::LosesWrites(every) => self.privilege == Privilege::User && self.nr_writes.is_multiple_of(every),
            _ => false,
        };
        let old = is_lost.then(|| self.cpu.clone().read(gva));
        self.cpu.write(gva, value)?;
        match old {
            Some(Ok(old)) => self.cpu.write(gva, old),
            _ => Ok(()),
        }
    }

    fn fetch(&mut self, gva: Gva) -> Result<u64, CpuError> {
        if self.fault == Fault::NoExecute { self.cpu.read(gva) } else { self.cpu.fetch(gva) }
    }

    fn set_privilege(&mut self, privilege: Privilege) {
        self.privilege = privilege;
        self.cpu.set_privilege(match (self.fault, privilege) {
            (Fault::Smap, Privilege::Supervisor) => Privilege::SupervisorWithAc,
            _ => privilege,
        });
    }

    fn write_register(&mut self, register: PagingRegister, value: u64) -> Result<(), CpuError> {
        match (self.fault, register) {
            (Fault::FlushOfCr3, PagingRegister::Cr3) => {
                self.cpu.load_cr3_without_flush(value);
                Ok(())
            }
            (Fault::KeepsNothing, PagingRegister::Cr3) if self.pcids == Pcids::On => {
                self.cpu.write_register(register, value & !(1 << 63))
            }
            // At the start the bit is set; later it is cleared to flush.
            (Fault::FlushOfCr4, PagingRegister::Cr4) if self.nr_writes != 0 => {
                assert_eq!(self.cpu.clone().write_register(register, value | CR4_PGE), Ok(()));
                Ok(())
            }
            _ => self.cpu.write_register(register, value),
        }
    }

    fn invlpg(&mut self, gva: Gva) -> Result<(), CpuError> {
        if self.fault == Fault::Invlpg { Ok(()) } else { self.cpu.invlpg(gva) }
    }

    fn invpcid(&mut self, kind: u64, descriptor: [u64; 2]) -> Result<(), CpuError> {
        if self.fault == Fault::Invpcid(kind) { Ok(()) } else { self.cpu.invpcid(kind, descriptor) }
    }
}

fn run(config: KernelConfig, fault: Fault) -> Result<(), KernelError> {
    let kernel = Kernel::new(config).unwrap();
    let cpu = PlainCpu::new(PlainMemory::new(config.memory_bytes()));
    let cpu = Faulty { cpu, fault, pcids: config.pcids, privilege: Privilege::Supervisor, nr_writes: 0 };
    let mut cpu = KernelCpu::start(kernel, 0, cpu)?;
    cpu.run(&WorkloadMix::EVERYTHING, 20_000, 1)?;
    // Where other flushes are rare, those of the kernel's own mappings matter.
    cpu.run(&WorkloadMix { kernel_maps: 1, ..WorkloadMix::SYSTEM_CALLS }, 1_000, 2)?;
    cpu.shut_down().map(|_| ())
}

fn is_stale(error: &KernelError) -> bool {
    // A translation was used, or prevented an access, after its page was unmapped.
    matches!(
        error,
        KernelError::WrongValue { .. }
            | KernelError::NoFault { .. }
            | KernelError::WrongFault { .. }
            | KernelError::Access { error: CpuError::Guest(GuestFault::Page { .. }), .. }
            | KernelError::WrongEntry { .. }
    )
}

#[test]
fn a_cpu_that_omits_a_flush_is_detected() {
    let [both, isolation, pcids, neither] = CONFIGS;
    for (config, fault) in [
        (both, Fault::Invlpg),
        (both, Fault::FlushOfCr3),
        (both, Fault::Invpcid(0)),
        (both, Fault::Invpcid(1)),
        (both, Fault::Invpcid(3)),
        (isolation, Fault::Invlpg),
        (isolation, Fault::FlushOfCr3),
        (pcids, Fault::Invlpg),
        (pcids, Fault::FlushOfCr3),
        (pcids, Fault::Invpcid(1)),
        (pcids, Fault::Invpcid(2)),
        (neither, Fault::Invlpg),
        (neither, Fault::FlushOfCr3),
        (neither, Fault::FlushOfCr4),
    ] {
        let error = run(config, fault).err().unwrap_or_else(|| panic!("{fault:?} under {config:?} was not detected"));
        assert!(is_stale(&error), "{fault:?} under {config:?}: {error}");
    }
}

#[test]
fn a_cpu_that_grants_too_much_or_loses_writes_is_detected() {
    for config in CONFIGS {
        for fault in [Fault::NoExecute, Fault::Smap] {
            let error = run(config, fault).unwrap_err();
            assert!(
                matches!(error, KernelError::NoFault { .. } | KernelError::WrongFault { .. }),
                "{fault:?}: {error}"
            );
        }
        let error = run(config, Fault::LosesWrites(1_000)).unwrap_err();
        assert!(matches!(error, KernelError::WrongValue { .. }), "{error}");
    }
}

#[test]
fn a_cpu_that_flushes_too_much_is_correct() {
    for config in CONFIGS {
        for fault in [Fault::Nothing, Fault::KeepsNothing] {
            assert_eq!(run(config, fault), Ok(()));
        }
    }
}
