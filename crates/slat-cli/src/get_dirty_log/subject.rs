//! The subjects: a memslot with a dirty log, and a guest that writes it.
//!
//! The guests of the engine and of its peers are the same software CPU, which walks page tables of
//! the same format over the same memory. Only the code that handles its faults and gets the log
//! differs. With `--paging shadow` the engine's guest is a CPU without a second stage, whose shadow
//! leaves the engine finds by a reverse map. All memory was touched before, so no write waits for
//! the kernel.

use std::sync::Arc;

use slat::dirty::DirtyTracking;
use slat::format::Npt;
use slat::shadow::Gva;
use slat::{Config, Gfn, Gpa, MemoryRegion, MemoryRegionFlags, PageSize, Vcpu, Vm};
use slat_machine::commit::{FlushDomain, FlushMethod, Port};
use slat_machine::cpu::Cpu;
use slat_machine::guest::{GuestCpu, GuestError, GuestTables};
use slat_machine::host::{BackingSlice, MachineHost};
use slat_machine::machine::{MachineError, TABLES_GPA, shadow_paging};
use slat_machine::memory::{Backing, BackingKind};
use slat_machine::shadow_cpu::ShadowCpu;
use slat_machine::tlb::Geometry;
use slat_machine::walk::HardwareFormat;

use super::Method;
use crate::failure::{Failure, check_failed};

/// Where the memslot is, in all but the real KVM: at a multiple of 1 GiB.
const SLOT_GPA: Gpa = Gpa(4 << 30);
/// Its number.
const SLOT: u32 = 0;
/// The memslot with the page tables of a guest without a second stage.
const TABLES_SLOT: u32 = 1;

/// A memslot with a dirty log, and a guest that writes it. One thread uses guest and log in turn.
pub(super) trait Subject {
    /// The guest writes `value` to the first word of each of `pages`.
    fn write(&mut self, pages: &[u32], value: u64) -> Result<(), Failure>;

    /// Gets the log into `log`, which has as many words as the memslot needs, and begins a new log.
    /// This is what is timed.
    fn get_dirty_log(&mut self, log: &mut [u64]) -> Result<(), Failure>;
}

/// The memory of the slot, touched.
pub(super) fn memory(kind: BackingKind, size_bytes: u64) -> Result<Backing, Failure> {
    let memory = Backing::new(kind, size_bytes).map_err(MachineError::from)?;
    for page in 0..size_bytes >> Gfn::SHIFT {
        memory.store(page << Gfn::SHIFT, 0);
    }
    Ok(memory)
}

/// The address of a page of the slot.
pub(super) fn gpa(page: u32) -> Gpa {
    Gpa(SLOT_GPA.0 + (u64::from(page) << Gfn::SHIFT))
}

/// The page of the slot that has an address, which is in the slot.
pub(super) fn page(gpa: Gpa) -> u32 {
    ((gpa.0 - SLOT_GPA.0) >> Gfn::SHIFT) as u32
}

/// Writes `value` to `page` as the guest.
#[inline]
pub(super) fn write_page<C: GuestCpu>(cpu: &mut C, page: u32, value: u64) -> Result<(), Failure> {
    cpu.write(Gva(gpa(page).0), value)
        .map_err(|error| check_failed(format_args!("the guest wrote page {page}: {error}")))
}

/// Writes `value` to `pages` as the guest, which is back in its VMM afterwards, as a real vCPU
/// would be.
pub(super) fn write_pages<C: GuestCpu>(cpu: &mut C, pages: &[u32], value: u64) -> Result<(), Failure> {
    let written = pages.iter().try_for_each(|&page| write_page(cpu, page, value));
    cpu.exit_guest_mode();
    written
}

/// The engine: a VM with a slot that logs, and its vCPU.
pub(super) struct Slat<F: HardwareFormat, C> {
    vm: Arc<Vm<MachineHost, F>>,
    cpu: C,
}

impl<F: HardwareFormat> Slat<F, Cpu<Vcpu<MachineHost, F>, F>> {
    /// The engine as `method` has it: [`Method::Slat`] or [`Method::SlatLeaf`].
    pub(super) fn new(method: Method, memory: &Backing) -> Result<Self, Failure> {
        let vm = with_slot(|host| Vm::new(host, config(method)), memory, 0)?;
        let cpu = Cpu::new(vm.create_vcpu()?, Port::new(vm.host().flush_domain()), 1, vm.root(), Geometry::default());
        Ok(Slat { vm, cpu })
    }
}

impl Slat<Npt, ShadowCpu<Vcpu<MachineHost, Npt>>> {
    /// The same without a second stage. The guest's own page tables map the memslot at its own
    /// address, by pages of 2 MiB as the real KVM's guest does; the log still has pages of 4 KiB.
    pub(super) fn shadow(method: Method, memory: &Backing) -> Result<Self, Failure> {
        let nr_pages = memory.size_bytes() >> Gfn::SHIFT;
        let paging = shadow_paging(nr_pages);
        let new = |host| Vm::with_shadow_paging(host, config(method), paging);
        let vm = with_slot(new, memory, 2 * u64::from(paging.max_pages))?;
        let tables = GuestTables {
            memory: TABLES_GPA,
            memory_bytes: 0,
            gva: Gva(SLOT_GPA.0),
            gpa: SLOT_GPA,
            nr_pages,
            page_size: PageSize::Size2M,
        };
        let tables = GuestTables { memory_bytes: tables.needed_bytes(), ..tables };
        let backing = Backing::new(BackingKind::Anonymous, tables.memory_bytes).map_err(MachineError::from)?;
        vm.set_user_memory_region(MemoryRegion {
            slot: TABLES_SLOT,
            flags: MemoryRegionFlags::empty(),
            guest_phys_addr: TABLES_GPA,
            memory_size: tables.memory_bytes,
            backing: Some(BackingSlice { backing, offset_bytes: 0 }),
            userfault_bitmap: None,
        })?;
        let mut cpu = ShadowCpu::new(vm.create_vcpu()?, Port::new(vm.host().flush_domain()), 1, Geometry::default());
        let start = |error| check_failed(format_args!("the guest turned its paging on: {error}"));
        let root = tables.build(&mut cpu).map_err(start)?;
        cpu.turn_paging_on(root).map_err(GuestError::Start).map_err(start)?;
        cpu.exit_guest_mode();
        Ok(Slat { vm, cpu })
    }
}

impl<F: HardwareFormat, C> Slat<F, C> {
    /// VM and vCPU separately, for a guest that runs on another thread.
    pub(super) fn parts(&mut self) -> (&Vm<MachineHost, F>, &mut C) {
        (&self.vm, &mut self.cpu)
    }
}

/// A VM with `memory` as the memslot that logs, with enough page-table pages for it and
/// `nr_more_tables` more.
fn with_slot<F: HardwareFormat>(
    new: impl FnOnce(MachineHost) -> Result<Vm<MachineHost, F>, slat::error::ConfigError>,
    memory: &Backing,
    nr_more_tables: u64,
) -> Result<Arc<Vm<MachineHost, F>>, Failure> {
    // Many times what maps the slot.
    let max_tables = (memory.size_bytes() >> Gfn::SHIFT) / 128 + (1 << 12) + nr_more_tables;
    let host = MachineHost::new(Arc::new(FlushDomain::new()), max_tables).map_err(MachineError::from)?;
    let vm = Arc::new(new(host)?);
    vm.set_user_memory_region(MemoryRegion {
        slot: SLOT,
        flags: MemoryRegionFlags::LOG_DIRTY_PAGES,
        guest_phys_addr: SLOT_GPA,
        memory_size: memory.size_bytes(),
        backing: Some(BackingSlice { backing: memory.clone(), offset_bytes: 0 }),
        userfault_bitmap: None,
    })?;
    Ok(vm)
}

/// How the engine write-protects pages again.
fn config(method: Method) -> Config {
    let protection = match method {
        Method::SlatLeaf => DirtyTracking::WriteProtectLeaves,
        _ => DirtyTracking::WriteProtect,
    };
    Config::default().with_dirty_tracking(protection)
}

/// Gets the log of the engine's memslot.
pub(super) fn get_dirty_log<F: HardwareFormat>(vm: &Vm<MachineHost, F>, log: &mut [u64]) -> Result<u64, Failure> {
    Ok(vm.get_dirty_log(SLOT, log)?)
}

impl<F: HardwareFormat, C: GuestCpu> Subject for Slat<F, C> {
    fn write(&mut self, pages: &[u32], value: u64) -> Result<(), Failure> {
        write_pages(&mut self.cpu, pages, value)
    }

    fn get_dirty_log(&mut self, log: &mut [u64]) -> Result<(), Failure> {
        get_dirty_log(&self.vm, log).map(drop)
    }
}

/// The flush method of all VMs here.
pub(super) fn flush_method() -> FlushMethod {
    FlushDomain::new().method()
}
