//! One run: a machine with shadow page tables, the mini guest kernel on it, and the counts of both.

use std::sync::Arc;
use std::thread;

use slat::baselines::Locking;
use slat::format::Npt;
use slat::shadow::ShadowStrategy;
use slat::stats::Stats;
use slat::{Config, Gpa, Vcpu, Vm};
use slat_machine::guest_os::{self, Kernel, KernelCpu, KernelError, Pcids, WorkloadMix};
use slat_machine::hardware::commit::{FlushDomain, FlushMethod, Port};
use slat_machine::hardware::shadow_cpu::{ShadowCpu, ShadowCpuCounters};
use slat_machine::hardware::tlb::Geometry;
use slat_machine::linux::clock::{run_delay_ns, timestamp_ns};
use slat_machine::memory::{Backing, BackingKind};
use slat_machine::vm::host::{BackingSlice, MachineHost};
use slat_machine::vm::machine::MachineError;

use super::ShadowArgs;
use super::model::Parts;
use super::timed::Timed;
use crate::failure::{Failure, check_failed, no_thread};
use crate::session::Session;

/// Page-table pages of the engine, at most: many times what a run needs.
const MAX_TABLES: u64 = 1 << 20;

/// The part of the measured steps that runs before as warm-up: processes have come and gone, page
/// tables exist.
const WARM_UP_PART: u64 = 10;

/// One VM with shadow tables over a guest's whole memory.
pub(super) struct ShadowMachine {
    pub(super) vm: Arc<Vm<MachineHost, Npt>>,
    pub(super) memory: Backing,
    pub(super) flush_domain: Arc<FlushDomain>,
}

impl ShadowMachine {
    /// With `size_bytes` of memory from guest-physical 0 on, all present and zero.
    pub(super) fn new(args: &ShadowArgs, strategy: ShadowStrategy, size_bytes: u64) -> Result<ShadowMachine, Failure> {
        let memory = Backing::new(BackingKind::Anonymous, size_bytes).map_err(MachineError::from)?;
        let flush_domain = Arc::new(FlushDomain::new());
        let host = MachineHost::new(Arc::clone(&flush_domain), MAX_TABLES).map_err(MachineError::from)?;
        // The hypervisor of 2018 did all of this under one lock.
        let locking = if strategy == ShadowStrategy::Baseline { Locking::Exclusive } else { Locking::None };
        let config = Config::default().with_locking(locking);
        let vm = Arc::new(Vm::with_shadow_paging(host, config, args.shadow_paging(strategy))?);
        vm.set_user_memory_region(BackingSlice::region(0, Gpa(0), &memory))?;
        Ok(ShadowMachine { vm, memory, flush_domain })
    }

    pub(super) fn port(&self) -> Port {
        Port::new(&self.flush_domain)
    }
}

/// A vCPU of the engine, with a clock.
type TimedVcpu = Timed<Vcpu<MachineHost, Npt>>;
type GuestKernel = KernelCpu<ShadowCpu<TimedVcpu>>;

pub(super) struct VcpuRun {
    pub(super) parts: Parts,
    pub(super) cpu: ShadowCpuCounters,
    pub(super) kernel: guest_os::KernelCounters,
}

pub(super) struct Run {
    pub(super) vcpus: Vec<VcpuRun>,
    before: Stats,
    after: Stats,
    /// Shadow pages in use at the end.
    pub(super) nr_tables: u64,
    /// The most shadow pages in use.
    pub(super) tables_peak: u64,
    pub(super) flush_method: FlushMethod,
}

impl Run {
    /// A count of the engine during the run, as a row has it.
    pub(super) fn count(&self, of: impl Fn(&Stats) -> u64) -> Option<f64> {
        Some((of(&self.after) - of(&self.before)) as f64)
    }

    /// A sum over the CPUs' counters, as a row has it.
    pub(super) fn cpus(&self, of: impl Fn(&ShadowCpuCounters) -> u64) -> Option<f64> {
        Some(self.vcpus.iter().map(|vcpu| of(&vcpu.cpu)).sum::<u64>() as f64)
    }

    /// A sum over the guest kernel's counters.
    pub(super) fn guest(&self, of: impl Fn(&guest_os::KernelCounters) -> u64) -> u64 {
        self.vcpus.iter().map(|vcpu| of(&vcpu.kernel)).sum()
    }

    /// The slowest vCPU's time in seconds.
    pub(super) fn guest_time_s(&self, exit_cost_ns: f64) -> f64 {
        self.vcpus.iter().map(|vcpu| vcpu.parts.time_s(exit_cost_ns)).fold(0.0, f64::max)
    }

    /// Time in the engine, of all vCPUs, in seconds.
    pub(super) fn engine_s(&self) -> f64 {
        self.vcpus.iter().map(|vcpu| vcpu.parts.engine_ns).sum::<f64>() * 1e-9
    }
}

/// Runs the work on a new machine, and shuts the machine down.
pub(super) fn run(
    args: &ShadowArgs,
    strategy: ShadowStrategy,
    nr_vcpus: u16,
    seed: u64,
    clock_ns: f64,
    session: &Session,
) -> Result<Run, Failure> {
    let config = guest_os::KernelConfig {
        nr_vcpus,
        isolation: args.isolation,
        pcids: args.pcid,
        processes_per_vcpu: args.processes,
    };
    let kernel = Kernel::new(config).map_err(|error| Failure::Usage(error.to_string()))?;
    let machine = ShadowMachine::new(args, strategy, config.memory_bytes())?;
    let _watched = session.watch(&machine.vm);
    let mix = args.mix();
    let nr_steps = |vcpu: u16| steps_of(args.steps, nr_vcpus, vcpu);
    let seed = |vcpu: u16| seed.wrapping_add(u64::from(vcpu));

    let fresh = (0..nr_vcpus).map(|vcpu| Ok((vcpu, machine.vm.create_vcpu()?)));
    let fresh: Vec<(u16, Vcpu<MachineHost, Npt>)> = fresh.collect::<Result<_, slat::error::ConfigError>>()?;
    let cpus = on_threads(fresh, |(vcpu, engine)| {
        let cpu = ShadowCpu::new(Timed::new(engine), machine.port(), 1, Geometry::default());
        let cpu = match args.host_pcid {
            Pcids::On => cpu,
            Pcids::Off => cpu.without_pcids(),
        };
        let mut cpu = KernelCpu::start(Arc::clone(&kernel), vcpu, cpu).map_err(|error| failed(vcpu, &error))?;
        // Half of the maximum of processes, so that forks and exits can change the number both
        // ways.
        let forks = WorkloadMix { forks: 1, touches_per_step: mix.touches_per_step, ..NOTHING };
        cpu.run(&forks, u64::from(args.processes / 2), seed(vcpu)).map_err(|error| failed(vcpu, &error))?;
        cpu.run(&mix, nr_steps(vcpu) / WARM_UP_PART, !seed(vcpu)).map_err(|error| failed(vcpu, &error))?;
        cpu.cpu_mut().exit_guest_mode();
        Ok((vcpu, cpu))
    })?;

    let before = machine.vm.stats();
    let done = on_threads(cpus, |(vcpu, mut cpu)| {
        let run =
            measure(&mut cpu, &mix, nr_steps(vcpu), seed(vcpu), clock_ns).map_err(|error| failed(vcpu, &error))?;
        Ok((cpu, run))
    })?;
    let after = machine.vm.stats();
    let (nr_tables, tables_peak) = (after.shadow_pages, after.shadow_pages_peak);

    let (cpus, vcpus): (Vec<GuestKernel>, Vec<VcpuRun>) = done.into_iter().unzip();
    for (vcpu, cpu) in (0..).zip(cpus) {
        cpu.shut_down().map_err(|error| failed(vcpu, &error))?.exit_guest_mode();
    }
    match kernel.nr_frames_used() {
        0 => Ok(Run { vcpus, before, after, nr_tables, tables_peak, flush_method: machine.flush_domain.method() }),
        left => Err(check_failed(format_args!("{left} frames of the guest are still in use"))),
    }
}

const NOTHING: WorkloadMix = WorkloadMix { system_calls: 0, ..WorkloadMix::SYSTEM_CALLS };

fn steps_of(nr_steps: u64, nr_vcpus: u16, vcpu: u16) -> u64 {
    let edge = |vcpu: u16| u128::from(nr_steps) * u128::from(vcpu) / u128::from(nr_vcpus);
    (edge(vcpu + 1) - edge(vcpu)) as u64
}

/// The work of one vCPU, on the calling thread.
fn measure(
    guest: &mut GuestKernel,
    mix: &WorkloadMix,
    nr_steps: u64,
    seed: u64,
    clock_ns: f64,
) -> Result<VcpuRun, KernelError> {
    let (cpu, spent) = {
        let cpu = guest.cpu_mut();
        (cpu.counters(), cpu.handler().spent())
    };
    let (begin, delay) = (timestamp_ns(), run_delay_ns());
    let kernel = guest.run(mix, nr_steps, seed)?;
    let (elapsed, delay) = (timestamp_ns() - begin, run_delay_ns() - delay);
    let engine = guest.cpu_mut();
    let cpu = engine.counters().since(cpu);
    let spent_ns = engine.handler().spent().since_ns(spent, clock_ns);
    engine.exit_guest_mode();
    // A thread that waited for a CPU was in the engine with the probability of the engine's share
    // of its time.
    let running = 1.0 - (delay as f64 / elapsed.max(1) as f64).min(1.0);
    let nr_exits = cpu.nr_exits() + cpu.nr_interruptions;
    let parts = Parts { work_ns: kernel.user_work_ns as f64, engine_ns: spent_ns * running, nr_exits };
    Ok(VcpuRun { parts, cpu, kernel })
}

/// Runs `action` with each item on a separate thread; returns the results in order, or the first
/// failure.
fn on_threads<I: Send, O: Send>(
    items: Vec<I>,
    action: impl Fn(I) -> Result<O, Failure> + Sync,
) -> Result<Vec<O>, Failure> {
    let action = &action;
    thread::scope(|scope| {
        let mut threads = Vec::with_capacity(items.len());
        for item in items {
            let thread = thread::Builder::new().spawn_scoped(scope, move || action(item));
            threads.push(thread.map_err(|error| no_thread(&error))?);
        }
        let join = |thread: thread::ScopedJoinHandle<'_, Result<O, Failure>>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        // All threads are joined, also after a failure.
        let results: Vec<Result<O, Failure>> = threads.into_iter().map(join).collect();
        results.into_iter().collect()
    })
}

fn failed(vcpu: u16, error: &KernelError) -> Failure {
    check_failed(format_args!("vCPU {vcpu}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_the_vcpus_are_all_steps() {
        for (nr_steps, nr_vcpus) in [(1, 1), (10, 3), (100_001, 128)] {
            let steps: Vec<u64> = (0..nr_vcpus).map(|vcpu| steps_of(nr_steps, nr_vcpus, vcpu)).collect();
            assert_eq!(steps.iter().sum::<u64>(), nr_steps);
            assert!(steps.iter().max().unwrap() - steps.iter().min().unwrap() <= 1);
        }
    }
}
