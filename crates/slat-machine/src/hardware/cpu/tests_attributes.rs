//! CPUs find a page that is executed although it must not be, and a device that is accessed through
//! the caches; and they reach both ends of every address space. Each check is made once more with
//! leaves that have the wrong attributes, which must show.

use core::alloc::Layout;

use slat::error::FaultError;
use slat::format::{
    CpuFeatures, Ept, Execute, Format, Hardware, LeafAttributes, MemoryType, Npt, Stage2, Sv39x4, Sv48x4, Sv57x4, Vtd,
};
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};
use slat::{Config, Exit, NodeId, PAGE_SIZE, Pfn, Vm};

use super::*;
use crate::hardware::commit::FlushDomain;
use crate::hardware::walk::{Memory, Processor};
use crate::memory::{Backing, BackingKind};
use crate::vm::host::{BackingSlice, MachineHost, machine_tables};

const SIZE_BYTES: u64 = 2 << 20;
/// Pages of the memslot with attributes of their own.
const DEVICE: u64 = 1;
const DATA: u64 = 2;
const USER: u64 = 3;

/// What a host, or the engine, says wrongly of each page.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Defect {
    Nothing,
    /// It is ordinary memory.
    Memory,
    /// It may be executed, if it is no device.
    Execution,
}

/// The machine's host, which gives pages attributes.
struct Attributing {
    inner: MachineHost,
    features: CpuFeatures,
    defect: Defect,
}

impl Attributing {
    fn attributes_of(&self, page: u64) -> LeafAttributes {
        let attributes = match page {
            DEVICE => LeafAttributes::DEVICE,
            DATA => LeafAttributes::DATA,
            USER => LeafAttributes { memory: MemoryType::WriteBack, execute: Execute::User },
            _ => LeafAttributes::default(),
        };
        // Where write-back memory is what the address says, that is right for a device, too.
        let has_types = self.features.contains(CpuFeatures::SVPBMT);
        let memory = if has_types { MemoryType::NonCached } else { MemoryType::WriteBack };
        match self.defect {
            Defect::Nothing => attributes,
            Defect::Memory => LeafAttributes { memory, ..attributes },
            // The engine refuses a device that may be executed.
            Defect::Execution if page != DEVICE => LeafAttributes { execute: Execute::All, ..attributes },
            Defect::Execution => attributes,
        }
    }
}

// SAFETY: each method is that of `MachineHost`.
unsafe impl Host for Attributing {
    machine_tables!(inner);

    fn resolve(&self, backing: &BackingSlice, gfn: Gfn, page: u64, access: Access) -> Result<Resolved, Unresolved> {
        let resolved = self.inner.resolve(backing, gfn, page, access)?;
        Ok(Resolved { max_size: slat::PageSize::Size4K, attributes: self.attributes_of(page), ..resolved })
    }
    fn flush(&self, ranges: &[GfnRange]) {
        self.inner.flush(ranges);
    }
    fn flush_local(&self, gpa: Gpa) {
        self.inner.flush_local(gpa);
    }
}

/// A VM whose leaves may be wrong, and a CPU, which finds that.
struct Machine<F: Format> {
    vm: Arc<Vm<Attributing, F>>,
    cpu: Cpu<Vcpu<Attributing, F>, F>,
    backing: Backing,
}

impl<F: HardwareFormat> Machine<F> {
    /// With memslots of [`SIZE_BYTES`] at `starts`, over the same memory.
    fn new(hardware: Hardware, defect: Defect, starts: &[u64]) -> Machine<F> {
        let domain = Arc::new(FlushDomain::new());
        let inner = MachineHost::new(Arc::clone(&domain), 1 << 10).unwrap();
        let host = Attributing { inner, features: hardware.features, defect };
        let vm = Arc::new(Vm::<_, F>::new(host, Config::default().with_hardware(hardware)).unwrap());
        let backing = Backing::new(BackingKind::Anonymous, SIZE_BYTES).unwrap();
        for (slot, &start) in (0..).zip(starts) {
            vm.set_user_memory_region(BackingSlice::region(slot, Gpa(start), &backing)).unwrap();
        }
        let device = backing.frame_of(DEVICE).unwrap().hpa().0;
        let cpu = Cpu::new(vm.create_vcpu().unwrap(), Port::new(&domain), 1, vm.root(), Geometry::default())
            .with_processor(Processor::of_vm(&vm, &hardware))
            .with_devices(Arc::from_iter(std::iter::once(device..device + PAGE_SIZE)));
        Machine { vm, cpu, backing }
    }
}

/// A CPU's finding.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Finding {
    Nothing,
    /// The access is not permitted: the engine has not mapped the page so, and user space decides.
    Refused,
    Cached(Memory),
}

fn finding<T: std::fmt::Debug>(result: Result<T, CpuError>) -> Finding {
    match result {
        Ok(_) => Finding::Nothing,
        Err(CpuError::Exit(Exit::Mmio { access: Access::Execute | Access::ExecuteUser, .. })) => Finding::Refused,
        Err(CpuError::CachedDevice { memory, .. }) => Finding::Cached(memory),
        other => panic!("{other:?}"),
    }
}

/// What a CPU finds that reads the device, and that fetches from data, mapped with `defect`.
fn findings<F: HardwareFormat>(hardware: Hardware, defect: Defect) -> [Finding; 2] {
    let Machine { vm: _vm, mut cpu, backing } = Machine::<F>::new(hardware, defect, &[0]);
    let at = |page: u64| Gva(page * PAGE_SIZE);
    assert_eq!((cpu.write(at(0), 7), cpu.fetch(at(0), Access::Execute)), (Ok(()), Ok(7)));
    assert_eq!(cpu.fetch(at(0), Access::ExecuteUser), Ok(7));
    let device = cpu.read(at(DEVICE));
    if let Err(CpuError::CachedDevice { gpa, hpa, .. }) = device {
        assert_eq!((gpa, hpa), (Gpa(at(DEVICE).0), backing.frame_of(DEVICE).unwrap().hpa()));
    }
    // The TLB has data's translation before it is executed.
    assert_eq!((cpu.write(at(DATA), 9), cpu.read(at(DATA))), (Ok(()), Ok(9)));
    let [supervisor, user] = [Access::Execute, Access::ExecuteUser].map(|access| finding(cpu.fetch(at(DATA), access)));
    assert_eq!(supervisor, user);
    [finding(device), supervisor]
}

/// `cached` is what the CPU finds if the engine maps the device as memory.
fn is_found<F: HardwareFormat>(features: CpuFeatures, cached: Memory) {
    // The PAT of Linux, for AMD.
    let hardware = Hardware { features, pat: 0x0407_0506_0007_0106, ..Hardware::default() };
    assert_eq!(findings::<F>(hardware, Defect::Nothing), [Finding::Nothing, Finding::Refused], "{}", F::NAME);
    let with_wrong_types = findings::<F>(hardware, Defect::Memory);
    assert_eq!(with_wrong_types, [Finding::Cached(cached), Finding::Refused], "{}", F::NAME);
    let with_wrong_rights = findings::<F>(hardware, Defect::Execution);
    assert_eq!(with_wrong_rights, [Finding::Nothing, Finding::Nothing], "{}", F::NAME);
}

#[test]
fn a_cached_device_and_execution_of_data_are_found() {
    is_found::<Ept>(CpuFeatures::empty(), Memory::WriteBack);
    is_found::<Ept>(CpuFeatures::MBEC, Memory::WriteBack);
    is_found::<Npt>(CpuFeatures::empty(), Memory::WriteBack);
    for features in [CpuFeatures::empty(), CpuFeatures::FWB, CpuFeatures::XNX, CpuFeatures::FWB | CpuFeatures::XNX] {
        is_found::<Stage2>(features, Memory::WriteBack);
    }
    is_found::<Sv39x4>(CpuFeatures::SVPBMT, Memory::NonCached);
    is_found::<Sv48x4>(CpuFeatures::SVPBMT, Memory::NonCached);
    is_found::<Sv57x4>(CpuFeatures::SVPBMT, Memory::NonCached);
}

/// Without Svpbmt the physical address alone says what a device is; an IOMMU has no cache and
/// executes nothing.
#[test]
fn where_tables_have_no_memory_types_nothing_is_found() {
    let none = Hardware::default();
    assert_eq!(findings::<Sv48x4>(none, Defect::Nothing), [Finding::Nothing, Finding::Refused]);
    let snoop = Hardware { features: CpuFeatures::SNOOP_CONTROL, ..none };
    for hardware in [none, snoop] {
        assert_eq!(findings::<Vtd>(hardware, Defect::Nothing), [Finding::Nothing, Finding::Nothing]);
    }
}

/// A page of user code, with the features that tell modes apart.
#[test]
fn user_code_is_not_executed_by_the_supervisor() {
    fn of<F: HardwareFormat>(features: CpuFeatures, defect: Defect) -> [Finding; 2] {
        let hardware = Hardware { features, ..Hardware::default() };
        let Machine { vm: _vm, mut cpu, .. } = Machine::<F>::new(hardware, defect, &[0]);
        cpu.write(Gva(USER * PAGE_SIZE), 5).unwrap();
        [Access::ExecuteUser, Access::Execute].map(|access| finding(cpu.fetch(Gva(USER * PAGE_SIZE), access)))
    }
    for (defect, supervisor) in [(Defect::Nothing, Finding::Refused), (Defect::Execution, Finding::Nothing)] {
        assert_eq!(of::<Ept>(CpuFeatures::MBEC, defect), [Finding::Nothing, supervisor]);
        assert_eq!(of::<Stage2>(CpuFeatures::XNX, defect), [Finding::Nothing, supervisor]);
    }
}

/// The first and the last words of the address space, and what is beyond.
fn both_ends<F: HardwareFormat>(gpa_bits: u8, levels: u8) {
    let hardware = Hardware { gpa_bits: Some(gpa_bits), levels: Some(levels), ..Hardware::default() };
    let end = 1_u64 << gpa_bits;
    let Machine { vm, mut cpu, backing } = Machine::<F>::new(hardware, Defect::Nothing, &[0, end - SIZE_BYTES]);
    let what = format!("{} with {levels} levels and {gpa_bits} bits", F::NAME);
    // Both memslots are the same memory; the walk alone tells which page is which.
    for (gva, value) in [(0, 1), (SIZE_BYTES - 8, 2), (end - SIZE_BYTES + 8, 3), (end - 16, 4)] {
        assert_eq!(cpu.write(Gva(gva), value), Ok(()), "{what}: {gva:#x}");
        assert_eq!(cpu.read(Gva(gva)), Ok(value), "{what}: {gva:#x}");
    }
    assert_eq!((cpu.read(Gva(8)), cpu.read(Gva(end - 8))), (Ok(3), Ok(2)), "{what}");
    assert_eq!(cpu.read(Gva(end - SIZE_BYTES)), Ok(1), "{what}");
    let too_high = FaultError::AddressTooHigh { gpa: Gpa(end), gpa_bits: gpa_bits.into() };
    assert_eq!(cpu.read(Gva(end)), Err(CpuError::Engine(too_high)), "{what}");
    // No page is left behind a flush.
    let last = GfnRange::new(Gpa(end - PAGE_SIZE).gfn(), 1);
    drop(vm.invalidate_range(last).unwrap());
    assert_eq!(cpu.read(Gva(end - 16)), Ok(4), "{what}");
    drop(backing);
}

#[test]
fn every_geometry_reaches_both_ends() {
    for bits in [32, 40, 48] {
        both_ends::<Ept>(bits, 4);
        both_ends::<Npt>(bits, 4);
    }
    for bits in [48, 49, 57] {
        both_ends::<Ept>(bits, 5);
        both_ends::<Npt>(bits, 5);
    }
    // Up to 16 page-table pages are one root.
    for bits in 32..=43 {
        both_ends::<Stage2>(bits, 3);
    }
    for bits in [40, 44, 48] {
        both_ends::<Stage2>(bits, 4);
    }
    both_ends::<Sv39x4>(41, 3);
    both_ends::<Sv48x4>(50, 4);
    both_ends::<Sv57x4>(59, 5);
    for (bits, levels) in [(32, 3), (39, 3), (40, 4), (48, 4), (49, 5), (57, 5)] {
        both_ends::<Vtd>(bits, levels);
    }
}
