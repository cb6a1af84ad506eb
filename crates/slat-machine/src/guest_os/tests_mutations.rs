//! CPUs that break the rules of the manual: the kernel must detect each.

use super::plain_cpu::{Fault, PlainCpu, PlainMemory};
use super::tests::CONFIGS;
use super::*;
use crate::hardware::cpu::CpuError;
use crate::hardware::walk::guest::GuestFault;

fn run(config: KernelConfig, fault: Fault) -> Result<(), KernelError> {
    let kernel = Kernel::new(config).unwrap();
    let mut cpu = PlainCpu::new(PlainMemory::new(config.memory_bytes()));
    cpu.fault = fault;
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
