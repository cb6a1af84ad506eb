//! The kernel on the engine's shadow paging: every access is checked, with each strategy.

use slat::format::Npt;
use slat::shadow::{ShadowPaging, ShadowStrategy};
use slat::{Gpa, Vcpu, Vm};

use super::tests::CONFIGS;
use super::*;
use crate::hardware::commit::{FlushDomain, Port};
use crate::hardware::shadow_cpu::ShadowCpu;
use crate::hardware::tlb::Geometry;
use crate::memory::{Backing, BackingKind};
use crate::vm::host::{BackingSlice, MachineHost};

type Machine = Arc<Vm<MachineHost, Npt>>;

fn machine(config: &KernelConfig, shadow: ShadowPaging) -> Machine {
    let host = MachineHost::new(Arc::new(FlushDomain::new()), 1 << 16).unwrap();
    let vm = Arc::new(Vm::with_shadow_paging(host, slat::Config::default(), shadow).unwrap());
    let backing = Backing::new(BackingKind::Anonymous, config.memory_bytes()).unwrap();
    vm.set_user_memory_region(BackingSlice::region(0, Gpa(0), &backing)).unwrap();
    vm
}

fn start(
    vm: &Machine,
    kernel: &Arc<Kernel>,
    vcpu: u16,
) -> Result<KernelCpu<ShadowCpu<Vcpu<MachineHost, Npt>>>, KernelError> {
    let port = Port::new(vm.host().flush_domain());
    let cpu = ShadowCpu::new(vm.create_vcpu().unwrap(), port, 1, Geometry::default());
    KernelCpu::start(Arc::clone(kernel), vcpu, cpu)
}

const STRATEGIES: [ShadowStrategy; 4] =
    [ShadowStrategy::Baseline, ShadowStrategy::RootCache, ShadowStrategy::RootsByPcid, ShadowStrategy::PcidTagged];

#[test]
fn all_strategies_follow_the_guests_tables() {
    for strategy in STRATEGIES {
        for config in CONFIGS {
            let kernel = Kernel::new(config).unwrap();
            let vm = machine(&config, ShadowPaging { strategy, ..ShadowPaging::default() });
            let done = start(&vm, &kernel, 0).and_then(|mut cpu| {
                let done = cpu.run(&WorkloadMix::EVERYTHING, 3_000, 1)?;
                cpu.shut_down()?;
                Ok(done)
            });
            let done = done.unwrap_or_else(|error| panic!("{strategy:?}, {config:?}: {error}"));
            assert_eq!(done.steps, 3_000);
            assert_eq!(kernel.nr_frames_used(), 0);
        }
    }
}

#[test]
fn few_shadow_pages_are_enough() {
    for strategy in STRATEGIES {
        let config = KernelConfig::default();
        let kernel = Kernel::new(config).unwrap();
        let shadow =
            ShadowPaging { strategy, max_pages: slat::shadow::ShadowPaging::MIN_PAGES, ..ShadowPaging::default() };
        let vm = machine(&config, shadow);
        let mut cpu = start(&vm, &kernel, 0).unwrap();
        let done = cpu.run(&WorkloadMix::EVERYTHING, 2_000, 2);
        done.and_then(|_| cpu.shut_down()).unwrap_or_else(|error| panic!("{strategy:?}: {error}"));
    }
}

#[test]
fn processes_move_between_vcpus_on_threads() {
    for strategy in STRATEGIES {
        let config = KernelConfig { nr_vcpus: 3, processes_per_vcpu: 4, ..KernelConfig::default() };
        let kernel = Kernel::new(config).unwrap();
        let vm = machine(&config, ShadowPaging { strategy, ..ShadowPaging::default() });
        let mix = WorkloadMix { migrations: 200, ..WorkloadMix::EVERYTHING };
        std::thread::scope(|scope| {
            for vcpu in 0..3 {
                let (vm, kernel) = (&vm, &kernel);
                scope.spawn(move || {
                    let run = || {
                        let mut cpu = start(vm, kernel, vcpu)?;
                        cpu.run(&mix, 1_500, u64::from(vcpu))?;
                        cpu.shut_down()
                    };
                    run().map(|_| ()).unwrap_or_else(|error| panic!("{strategy:?}, vCPU {vcpu}: {error}"));
                });
            }
        });
    }
}
