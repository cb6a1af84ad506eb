//! The subjects: a memslot with a dirty log, a guest that writes it, and vCPUs that run beside.
//!
//! The guests of the engine and of its peers are the same software CPU, which walks page tables of
//! the same format over the same memory. Only the code that handles its faults and gets the log
//! differs. With `--paging shadow` the engine's guest is a CPU without a second stage, whose shadow
//! leaves the engine finds by a reverse map. All memory was touched before, so no write waits for
//! the kernel (except with `--workload range`, whose slot is larger than its memory).

use std::sync::Arc;

use slat::dirty::DirtyTracking;
use slat::format::Npt;
use slat::shadow::Gva;
use slat::{Config, Gfn, Gpa, MemoryRegion, MemoryRegionFlags, PageSize, Vm};
use slat_machine::hardware::commit::{FlushDomain, FlushMethod, Port};
use slat_machine::hardware::cpu::Cpu;
use slat_machine::hardware::shadow_cpu::ShadowCpu;
use slat_machine::hardware::tlb::Geometry;
use slat_machine::hardware::walk::HardwareFormat;
use slat_machine::memory::{Backing, BackingKind};
use slat_machine::vm::guest::{GuestCpu, GuestError, GuestTables};
use slat_machine::vm::host::{BackingSlice, MachineHost};
use slat_machine::vm::machine::{MachineError, TABLES_GPA, shadow_paging};

use super::Method;
use super::running::RunningVcpus;
use crate::failure::{Failure, check_failed};

/// Where the memslot is, in all but the real KVM: at a multiple of 1 GiB.
const SLOT_GPA: Gpa = Gpa(4 << 30);
const SLOT: u32 = 0;
/// The memslot with the page tables of a guest without a second stage.
const TABLES_SLOT: u32 = 1;

/// Reads of a software guest before it looks whether it is to stop: about a microsecond.
pub(super) const READS_PER_SLICE: u32 = 64;
/// Pages that a guest reads in turn: as many as its TLB has room for, or nearly.
const PAGES_READ: u32 = 512;

/// A memslot with a dirty log.
pub(super) trait DirtyLog: Send + Sync {
    /// Gets the log into `log`, which has as many words as the memslot needs, and begins a new log.
    /// This is what is timed. One thread at a time.
    ///
    /// Returns how many pages the log has; `None`: the method does not count them.
    fn get(&self, log: &mut [u64]) -> Result<Option<u64>, Failure>;

    /// The same for `nr_pages` pages from `first_page` on. A method without such a call fails.
    fn get_range(&self, _first_page: u64, _nr_pages: u64, _log: &mut [u64]) -> Result<u64, Failure> {
        Err(check_failed("this method gets whole logs only"))
    }

    /// Seconds that the last call waited for a grace period. `None`: the method has none.
    fn grace_period(&self) -> Option<f64> {
        None
    }

    /// Nanoseconds of all faults in the engine; extrapolated from a sample. `None`: not counted.
    fn engine_time_ns(&self) -> Option<u64> {
        None
    }
}

/// A vCPU with its guest. One thread at a time uses it.
pub(super) trait Guest: Send {
    /// The guest writes `value` to the first word of each of `pages`.
    fn write(&mut self, pages: &[u32], value: u64) -> Result<(), Failure>;

    /// Runs guest code that only reads, for a short time. Then the vCPU is still in the guest, if
    /// its kind allows it.
    fn run(&mut self) -> Result<(), Failure>;

    /// The vCPU is back in its VMM.
    fn exit(&mut self);

    /// The faults so far. `None`: not counted.
    fn nr_faults(&self) -> Option<u64>;
}

/// What is measured: a method's VM.
pub(super) struct Subject {
    pub(super) method: Method,
    pub(super) log: Box<dyn DirtyLog>,
    /// The vCPU that writes.
    pub(super) guest: Box<dyn Guest>,
    pub(super) others: RunningVcpus,
}

impl Subject {
    /// A subject whose first guest writes, and whose other guests run beside the calls.
    pub(super) fn new(
        method: Method,
        log: impl DirtyLog + 'static,
        guests: impl IntoIterator<Item = Box<dyn Guest>>,
    ) -> Result<Subject, Failure> {
        let mut guests = guests.into_iter();
        let Some(guest) = guests.next() else { unreachable!("a subject has the guest that writes") };
        Ok(Subject { method, log: Box::new(log), guest, others: RunningVcpus::start(guests)? })
    }
}

/// A guest on a software CPU.
pub(super) struct SoftwareGuest<C> {
    cpu: C,
    /// Pages that it reads in turn, from the slot's first on.
    nr_read: u32,
    next: u32,
}

impl<C: GuestCpu + Send> SoftwareGuest<C> {
    pub(super) fn new(cpu: C, memory: &Backing) -> SoftwareGuest<C> {
        SoftwareGuest { cpu, nr_read: pages_read(memory), next: 0 }
    }

    #[inline]
    pub(super) fn write_page(&mut self, page: u32, value: u64) -> Result<(), Failure> {
        let written = self.cpu.write(Gva(gpa(page).0), value);
        written.map_err(|error| check_failed(format_args!("the guest wrote page {page}: {error}")))
    }

    #[inline]
    pub(super) fn read_next(&mut self) -> Result<(), Failure> {
        let page = self.next;
        self.next = if page + 1 < self.nr_read { page + 1 } else { 0 };
        let read = self.cpu.read(Gva(gpa(page).0));
        read.map(drop).map_err(|error| check_failed(format_args!("the guest read page {page}: {error}")))
    }
}

/// Pages that a guest reads in turn: a power of two.
pub(super) fn pages_read(memory: &Backing) -> u32 {
    let nr_pages = (memory.size_bytes() >> Gfn::SHIFT).min(PAGES_READ.into()) as u32;
    1 << nr_pages.max(1).ilog2()
}

impl<C: GuestCpu + Send> Guest for SoftwareGuest<C> {
    fn write(&mut self, pages: &[u32], value: u64) -> Result<(), Failure> {
        pages.iter().try_for_each(|&page| self.write_page(page, value))
    }

    fn run(&mut self) -> Result<(), Failure> {
        (0..READS_PER_SLICE).try_for_each(|_| self.read_next())
    }

    fn exit(&mut self) {
        self.cpu.exit_guest_mode();
    }

    fn nr_faults(&self) -> Option<u64> {
        Some(self.cpu.counters().nr_faults)
    }
}

pub(super) fn memory(kind: BackingKind, size_bytes: u64) -> Result<Backing, Failure> {
    Ok(Backing::new(kind, size_bytes).map_err(MachineError::from)?)
}

pub(super) fn touch(memory: &Backing) {
    for page in 0..memory.size_bytes() >> Gfn::SHIFT {
        memory.store(page << Gfn::SHIFT, 0);
    }
}

/// The address of a page of the slot.
pub(super) fn gpa(page: u32) -> Gpa {
    Gpa(SLOT_GPA.0 + (u64::from(page) << Gfn::SHIFT))
}

/// The page of the slot that has an address, which is in the slot.
pub(super) fn page(gpa: Gpa) -> u32 {
    ((gpa.0 - SLOT_GPA.0) >> Gfn::SHIFT) as u32
}

/// The engine as `method` has it, [`Method::Slat`] or [`Method::SlatLeaf`], with `nr_others` vCPUs
/// beside the one that writes.
pub(super) fn slat<F: HardwareFormat>(method: Method, memory: &Backing, nr_others: u16) -> Result<Subject, Failure> {
    let vm = with_slot::<F>(|host| Vm::new(host, config(method)), memory, 0)?;
    let mut guests: Vec<Box<dyn Guest>> = Vec::new();
    for _ in 0..=nr_others {
        let port = Port::new(vm.host().flush_domain());
        let cpu = Cpu::<_, F>::new(vm.create_vcpu()?, port, 1, vm.root(), Geometry::default());
        guests.push(Box::new(SoftwareGuest::new(cpu, memory)));
    }
    Subject::new(method, EngineLog(vm), guests)
}

/// The same without a second stage. The guest's own page tables map the memslot at its own address,
/// by pages of 2 MiB as the real KVM's guest does; the log still has pages of 4 KiB.
pub(super) fn slat_shadow(method: Method, memory: &Backing, nr_others: u16) -> Result<Subject, Failure> {
    let nr_pages = memory.size_bytes() >> Gfn::SHIFT;
    let paging = shadow_paging(nr_pages);
    let new = |host| Vm::with_shadow_paging(host, config(method), paging);
    let vm = with_slot::<Npt>(new, memory, 2 * u64::from(paging.max_pages))?;
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
    let start = |error| check_failed(format_args!("the guest turned its paging on: {error}"));
    let (mut root, mut guests) = (None, Vec::<Box<dyn Guest>>::new());
    for _ in 0..=nr_others {
        let port = Port::new(vm.host().flush_domain());
        let mut cpu = ShadowCpu::new(vm.create_vcpu()?, port, 1, Geometry::default());
        // The first builds the tables, and all use them.
        let at = match root {
            Some(at) => at,
            None => tables.build(&mut cpu).map_err(start)?,
        };
        root = Some(at);
        cpu.turn_paging_on(at).map_err(GuestError::Start).map_err(start)?;
        cpu.exit_guest_mode();
        guests.push(Box::new(SoftwareGuest::new(cpu, memory)));
    }
    Subject::new(method, EngineLog(vm), guests)
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
    let vm = Arc::new(new(host.with_instructions_of::<F>())?);
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

/// The log of the engine's memslot.
struct EngineLog<F: HardwareFormat>(Arc<Vm<MachineHost, F>>);

impl<F: HardwareFormat> DirtyLog for EngineLog<F> {
    fn get(&self, log: &mut [u64]) -> Result<Option<u64>, Failure> {
        Ok(Some(self.0.get_dirty_log(SLOT, log)?))
    }

    fn get_range(&self, first_page: u64, nr_pages: u64, log: &mut [u64]) -> Result<u64, Failure> {
        Ok(self.0.get_dirty_log_range(SLOT, first_page, nr_pages, log)?)
    }

    fn engine_time_ns(&self) -> Option<u64> {
        Some(self.0.stats().engine_time_ns())
    }
}

/// The flush method of all VMs here.
pub(super) fn flush_method() -> FlushMethod {
    FlushDomain::new().method()
}
