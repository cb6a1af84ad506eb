//! The parts of a machine: CPUs of either kind, the memslot of the guest's own page tables, and how
//! much of everything is needed.

use std::sync::Arc;

use slat::dirty::DirtyTracking;
use slat::format::Npt;
use slat::shadow::ShadowPaging;
use slat::{Config, Gfn, PAGE_SIZE, Vcpu, Vm};

use super::{MachineConfig, MachineError, REGION_GPA, TABLES_GPA};
use crate::hardware::commit::Port;
use crate::hardware::cpu::Cpu;
use crate::hardware::shadow_cpu::ShadowCpu;
use crate::hardware::walk::{HardwareFormat, Processor};
use crate::memory::numa::ReadCounts;
use crate::memory::{Backing, BackingKind};
use crate::vm::guest::{self, GuestCpu, GuestTables};
use crate::vm::host::{BackingSlice, MachineHost};

/// The VM tag of a CPU's translations: each machine has TLBs of its own.
const VM_TAG: u16 = 1;

/// The default shadow paging, with enough shadow pages for one address space of a guest with
/// `nr_pages` pages of 4 KiB, and for the page tables with which the guest's paging was turned on:
/// none has to be evicted for another.
pub fn shadow_paging(nr_pages: u64) -> ShadowPaging {
    const TO_SPARE: u64 = 1 << 8;
    let lowest = nr_pages.div_ceil(512) + 1;
    // The levels above, and the same for the guest's page tables, which are as many pages as the
    // lowest level has page-table pages.
    let nr_tables = lowest + 2 * lowest.div_ceil(512) + TO_SPARE;
    let max_pages = nr_tables.clamp(ShadowPaging::MIN_PAGES.into(), ShadowPaging::MAX_PAGES.into()) as u32;
    ShadowPaging { max_pages, ..ShadowPaging::default() }
}

/// Page-table pages that a machine may have at a time: twice what maps its memory by 4 KiB, for
/// those whose freeing is deferred, and some more. They only cost address space.
pub(crate) fn enough_tables(nr_vcpus: usize, nr_pages: u64) -> u64 {
    const TO_SPARE: u64 = 1 << 16;
    2 * (nr_pages >> 9) + 8 * nr_vcpus as u64 + TO_SPARE
}

/// The same with shadow pages, if there are any.
pub(super) fn most_tables(config: &MachineConfig, nr_pages: u64) -> u64 {
    let nr_shadow = config.shadow.map_or(0, |shadow| 2 * u64::from(shadow.max_pages));
    enough_tables(config.nr_vcpus, nr_pages) + nr_shadow
}

/// Memory beside the guest's, rounded up: a thread's stack, caches and participant (about 95 KiB),
/// page tables (0.2% of what they map by 4 KiB), bitmaps and a checker's copy of the pages (0.5%),
/// the program itself.
pub(crate) fn overhead_bytes(nr_vcpus: usize, nr_pages: u64) -> u64 {
    (8 << 20) + nr_vcpus as u64 * (128 << 10) + (nr_pages << Gfn::SHIFT) / 128
}

/// The same with what shadow paging needs: a shadow page with its record (12 KiB) for each
/// page-table page of the guest and for those that map these, and a record for each guest frame (20
/// bytes); about 50 bytes for a page.
pub(super) fn all_overhead_bytes(config: &MachineConfig, nr_pages: u64) -> u64 {
    let shadow_bytes = if config.is_shadow() { (4 << 20) + nr_pages * 50 } else { 0 };
    overhead_bytes(config.nr_vcpus, nr_pages) + shadow_bytes
}

/// What kind of VM and CPUs a machine has.
pub(super) trait Hardware<F: HardwareFormat> {
    /// The CPUs.
    type Cpu: GuestCpu<Handler = Vcpu<MachineHost, F>> + Send + 'static;

    /// A VM for such CPUs.
    fn new_vm(&self, host: MachineHost, engine: Config) -> Result<Vm<MachineHost, F>, slat::error::ConfigError>;

    /// A CPU with the guest's paging off. Its walks are counted in `counts` if there are several
    /// nodes.
    fn new_cpu(
        vm: &Arc<Vm<MachineHost, F>>,
        config: &MachineConfig,
        counts: &Arc<ReadCounts>,
    ) -> Result<Self::Cpu, MachineError>;
}

/// CPUs with a second stage.
pub(super) struct SecondStage;

impl<F: HardwareFormat> Hardware<F> for SecondStage {
    type Cpu = Cpu<Vcpu<MachineHost, F>, F>;

    fn new_vm(&self, host: MachineHost, engine: Config) -> Result<Vm<MachineHost, F>, slat::error::ConfigError> {
        Vm::new(host, engine)
    }

    fn new_cpu(
        vm: &Arc<Vm<MachineHost, F>>,
        config: &MachineConfig,
        counts: &Arc<ReadCounts>,
    ) -> Result<Self::Cpu, MachineError> {
        let host = vm.host();
        let cpu = Cpu::new(vm.create_vcpu()?, Port::new(host.flush_domain()), VM_TAG, vm.root(), config.tlb);
        let processor = Processor { marks: config.marks, ..Processor::of_vm(vm, &config.engine.hardware) };
        let cpu = cpu.with_processor(processor);
        let cpu = match config.engine.dirty_tracking {
            DirtyTracking::PageModificationLog => cpu.with_modification_log(host.modification_logs().add()),
            DirtyTracking::WriteProtect | DirtyTracking::WriteProtectLeaves | DirtyTracking::DirtyBit => cpu,
        };
        cpu.exit_guest_mode();
        Ok(cpu.with_walk_counter(host.walk_counter(counts)))
    }
}

/// CPUs without a second stage, whose walks are not counted.
pub(super) struct Shadow(pub(super) ShadowPaging);

impl Hardware<Npt> for Shadow {
    type Cpu = ShadowCpu<Vcpu<MachineHost, Npt>>;

    fn new_vm(&self, host: MachineHost, engine: Config) -> Result<Vm<MachineHost, Npt>, slat::error::ConfigError> {
        Vm::with_shadow_paging(host, engine, self.0)
    }

    fn new_cpu(
        vm: &Arc<Vm<MachineHost, Npt>>,
        config: &MachineConfig,
        _counts: &Arc<ReadCounts>,
    ) -> Result<Self::Cpu, MachineError> {
        let mut cpu = ShadowCpu::new(vm.create_vcpu()?, Port::new(vm.host().flush_domain()), VM_TAG, config.tlb);
        cpu.exit_guest_mode();
        Ok(cpu)
    }
}

/// Adds the memslot for the guest's page tables, which map the whole region. Returns where they go,
/// and in which memory.
pub(super) fn add_tables_slot<F: HardwareFormat>(
    vm: &Vm<MachineHost, F>,
    config: &MachineConfig,
    nr_pages: u64,
) -> Result<(GuestTables, Backing), MachineError> {
    let mut tables = GuestTables {
        memory: TABLES_GPA,
        memory_bytes: 0,
        gva: guest::REGION_GVA,
        gpa: REGION_GPA,
        nr_pages,
        page_size: config.guest_page_size,
    };
    tables.memory_bytes = tables.needed_bytes().next_multiple_of(PAGE_SIZE);
    let backing = Backing::new(BackingKind::Anonymous, tables.memory_bytes)?;
    vm.set_user_memory_region(BackingSlice::region(config.nr_slots + 1, TABLES_GPA, &backing))?;
    Ok((tables, backing))
}
