//! CPUs of Arm and RISC-V repeat a fault until its page is flushed; the engine has it flushed at
//! the end of each fault.

use std::sync::Arc;

use slat::format::{Format, Npt, Stage2, Sv39x4, Sv48x4, Sv57x4};
use slat::{Config, GfnRange, MemoryRegion, MemoryRegionFlags, PAGE_SIZE, Vm};

use super::*;
use crate::hardware::commit::FlushDomain;
use crate::memory::{Backing, BackingKind};
use crate::vm::host::{BackingSlice, MachineHost};

const SIZE_BYTES: u64 = 2 << 20;

/// The engine, whose host does not flush the local CPU if the test wants that; it fails after a
/// bounded number of faults.
struct Engine<F: Format> {
    vcpu: Vcpu<MachineHost, F>,
    flushes: bool,
    faults_left: u64,
}

impl<F: Format> FaultHandler for Engine<F> {
    fn handle_fault(&mut self, Fault { gpa, access, .. }: Fault) -> Result<Outcome, slat::error::FaultError> {
        self.faults_left = self.faults_left.checked_sub(1).ok_or(slat::error::FaultError::Busy { gpa })?;
        let outcome = self.vcpu.handle_fault(gpa, access);
        if !self.flushes {
            let _ = take_local_flush();
        }
        outcome
    }

    fn log_modifications(&mut self, written: &[Gpa]) {
        self.vcpu.log_modifications(written);
    }
}

struct Machine<F: Format> {
    vm: Arc<Vm<MachineHost, F>>,
    cpus: [Cpu<Engine<F>, F>; 2],
}

impl<F: HardwareFormat> Machine<F> {
    fn new(flushes: bool) -> Machine<F> {
        let domain = Arc::new(FlushDomain::waiting());
        let host = MachineHost::new(Arc::clone(&domain), 1 << 10).unwrap();
        let vm = Arc::new(Vm::<_, F>::new(host, Config::default()).unwrap());
        let machine = Machine {
            cpus: std::array::from_fn(|_| {
                let engine = Engine { vcpu: vm.create_vcpu().unwrap(), flushes, faults_left: 8 };
                Cpu::new(engine, Port::new(&domain), 1, vm.root(), Geometry::default())
            }),
            vm,
        };
        let backing = Backing::new(BackingKind::Anonymous, SIZE_BYTES).unwrap();
        machine.set_region(MemoryRegionFlags::empty(), Some(BackingSlice { backing, offset_bytes: 0 }));
        machine
    }

    fn set_region(&self, flags: MemoryRegionFlags, backing: Option<BackingSlice>) {
        let region = MemoryRegion {
            slot: 0,
            flags,
            guest_phys_addr: Gpa(0),
            memory_size: SIZE_BYTES,
            backing,
            userfault_bitmap: None,
        };
        self.vm.set_user_memory_region(region).unwrap();
    }

    /// The machine, when the log has begun and both CPUs have read page 0. The second one has
    /// faulted on a write since.
    fn logging() -> Machine<F> {
        let mut machine = Machine::<F>::new(true);
        machine.cpus[0].write(Gva(0), 1).unwrap();
        machine.set_region(MemoryRegionFlags::LOG_DIRTY_PAGES, None);
        machine.cpus[0].read(Gva(0)).unwrap();
        machine.cpus[1].read(Gva(0)).unwrap();
        machine.cpus[1].handler.faults_left = 0;
        assert!(is_for_ever(machine.cpus[1].write(Gva(16), 3)), "the engine has not handled it yet");
        machine
    }
}

fn is_for_ever<T>(result: Result<T, CpuError>) -> bool {
    matches!(result, Err(CpuError::Engine(slat::error::FaultError::Busy { .. })))
}

/// A right that this CPU's own fault restores, and another CPU's fault.
fn a_right<F: HardwareFormat>(keeps: bool) {
    for flushes in [true, false] {
        let mut machine = Machine::<F>::logging();
        for cpu in &mut machine.cpus {
            cpu.handler.flushes = flushes;
            cpu.handler.faults_left = 8;
        }
        let [first, second] = &mut machine.cpus;
        let result = first.write(Gva(8), 2);
        assert_eq!(is_for_ever(result), keeps && !flushes, "{}: {result:?}", F::NAME);
        let nr_spurious = machine.vm.stats().spurious;
        let result = second.write(Gva(16), 3);
        assert_eq!(is_for_ever(result), keeps && !flushes, "{}: {result:?}", F::NAME);
        if flushes {
            assert_eq!(machine.vm.stats().spurious - nr_spurious, u64::from(keeps), "the leaf had the right by then");
            assert_eq!(first.read(Gva(16)), Ok(3));
        }
    }
}

/// A PTE that was not valid when it was read.
fn a_leaf<F: HardwareFormat>(keeps: bool) {
    for flushes in [true, false] {
        let mut machine = Machine::<F>::new(flushes);
        let result = machine.cpus[0].read(Gva(PAGE_SIZE));
        assert_eq!(is_for_ever(result), keeps && !flushes, "{}: {result:?}", F::NAME);
    }
}

#[test]
fn a_cpu_that_caches_a_missing_right_faults_for_ever_without_a_local_flush() {
    slat::for_each_format!(F => {
        a_right::<F>(F::NEEDS_LOCAL_FLUSH);
    });
}

#[test]
fn a_cpu_that_caches_an_invalid_pte_faults_for_ever_without_a_local_flush() {
    a_leaf::<Sv39x4>(true);
    a_leaf::<Sv57x4>(true);
    a_leaf::<Sv48x4>(true);
    a_leaf::<Stage2>(false);
    a_leaf::<Npt>(false);
}

/// A flush of all CPUs also ends the faults; a flush of another page does not.
#[test]
fn a_kept_fault_ends_with_a_flush_of_its_page() {
    for (page, is_flushed) in [(1, true), (0, false)] {
        let mut machine = Machine::<Sv39x4>::new(false);
        let [first, _] = &mut machine.cpus;
        assert!(is_for_ever(first.read(Gva(PAGE_SIZE))));
        first.handler.faults_left = 8;
        drop(machine.vm.invalidate_range(GfnRange::new(Gfn(page), 1)).unwrap());
        machine.cpus[1].handler.flushes = true;
        machine.cpus[1].read(Gva(PAGE_SIZE)).unwrap();
        assert_eq!(is_for_ever(machine.cpus[0].read(Gva(PAGE_SIZE))), !is_flushed);
    }
}
