//! Memory types and execution: what the host says of a page reaches its leaf, and stays with it.

use std::sync::Arc;

use crate::common::answers::{answer_vm, frame_of, lowest_pte, new_flags};
use crate::common::{MIB, TestHost, each};
use slat::baselines::Locking;
use slat::dirty::{DirtyTracking, HugePageLogging};
use slat::error::FaultError;
use slat::format::{CpuFeatures, Ept, Execute, Format, Hardware, LeafAttributes, MemoryType, Npt, Stage2};
use slat::host::{Resolved, Unresolved};
use slat::tables::{AccessTracking, FaultAround, Translation};
use slat::{
    Access, Config, Exit, Gfn, GfnRange, Gpa, Hpa, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Pfn, Vcpu, Vm,
};

const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();
const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const RESUME: Result<Outcome, FaultError> = Ok(Outcome::Resume);
const SIZE: u64 = 8 * MIB;

/// Everything that some format can say, on CPUs that have all that there is.
fn attributes_of<F: Format>() -> Vec<LeafAttributes> {
    let memory = [
        MemoryType::WriteBack,
        MemoryType::AsGuest,
        MemoryType::WriteThrough,
        MemoryType::NonCached,
        MemoryType::Device,
        MemoryType::DeviceStrict,
    ];
    let execute = [Execute::All, Execute::None, Execute::User, Execute::Supervisor];
    let all = memory.into_iter().flat_map(|memory| execute.map(|execute| LeafAttributes { memory, execute }));
    all.filter(|&attributes| {
        let is_good = !attributes.memory.is_device() || attributes.execute == Execute::None;
        is_good && F::attribute_bits(attributes, &hardware::<F>()).is_some()
    })
    .collect()
}

/// CPUs with all that the format knows, but for the erratum; for AMD, with the PAT of Linux.
fn hardware<F: Format>() -> Hardware {
    let features = F::FEATURES - CpuFeatures::ITLB_MULTIHIT;
    Hardware { features, pat: 0x0407_0506_0007_0106, ..Hardware::default() }
}

fn new_vm<F: Format>(config: Config, flags: MemoryRegionFlags) -> (Arc<Vm<TestHost, F>>, Vcpu<TestHost, F>) {
    let vm = answer_vm::<F>(config, hardware::<F>(), SIZE, flags);
    let vcpu = vm.create_vcpu().unwrap();
    (vm, vcpu)
}

fn query<F: Format>(vm: &Vm<TestHost, F>, gpa: Gpa) -> Option<Translation> {
    vm.read_tables().unwrap().cursor().query(gpa)
}

/// What the leaf at `gpa` expresses, however it is encoded: two memory types may have one encoding.
fn bits_at<F: Format>(vm: &Vm<TestHost, F>, gpa: Gpa) -> Option<u64> {
    F::attribute_bits(query(vm, gpa)?.attributes, &hardware::<F>())
}

fn answer_with<F: Format>(vm: &Vm<TestHost, F>, attributes: LeafAttributes, max_size: PageSize) {
    vm.host().answer(move |gfn, _| Ok(Resolved { attributes, ..Resolved::memory(frame_of(gfn), max_size) }));
}

each!(a_leaf_has_the_attributes_of_its_answer, of_answer);
fn of_answer<F: Format>(locking: Locking) {
    for attributes in attributes_of::<F>() {
        for size in [PageSize::Size4K, PageSize::Size2M] {
            let config = Config::default().with_locking(locking).with_fault_around(FaultAround::Pages(16));
            let (vm, mut vcpu) = new_vm::<F>(config, NO_FLAGS);
            let wanted = F::attribute_bits(attributes, &hardware::<F>());
            answer_with(&vm, attributes, size);
            assert_eq!(vcpu.handle_fault(Gpa(0x3000), Access::Read), RESUME);
            // Its neighbours by fault-around, others by prefault, in one piece and page by page.
            assert_eq!(vcpu.pre_fault_memory(Gpa(2 * MIB), 4 * MIB, Access::Write), Ok(4 * MIB));
            assert_eq!(vcpu.pre_fault_pages(&[Gpa(0x10_0000), Gpa(0x10_5000)], Access::Read), Ok(2));
            for gpa in [0x3000, 0x4000, 2 * MIB, 4 * MIB + 0x7000, 0x10_0000, 0x10_5000].map(Gpa) {
                assert_eq!(bits_at(&vm, gpa), wanted, "{attributes:?} at {gpa}");
                let found = query(&vm, gpa).unwrap();
                assert_eq!((found.size, found.pfn), (size, frame_of(gpa.gfn())));
                assert_eq!(found.attributes.execute, attributes.execute);
            }
            assert_eq!(vcpu.handle_fault(Gpa(0x3000), Access::Write), RESUME);
            assert_eq!(bits_at(&vm, Gpa(0x3000)), wanted, "{attributes:?} after a write");
        }
    }
}

each!(a_split_and_a_recovery_keep_attributes, through_sizes);
fn through_sizes<F: Format>(locking: Locking) {
    for attributes in attributes_of::<F>() {
        for dirty_tracking in [DirtyTracking::WriteProtect, DirtyTracking::WriteProtectLeaves] {
            let config = Config::default().with_locking(locking).with_dirty_tracking(dirty_tracking);
            let (vm, mut vcpu) = new_vm::<F>(config, NO_FLAGS);
            let wanted = F::attribute_bits(attributes, &hardware::<F>());
            answer_with(&vm, attributes, PageSize::Size2M);
            assert_eq!(vcpu.handle_fault(Gpa(2 * MIB), Access::Write), RESUME);
            new_flags(&vcpu, SIZE, LOG);
            assert_eq!(query(&vm, Gpa(2 * MIB)).unwrap().size, PageSize::Size4K);
            for page in [0, 1, 255, 511] {
                assert_eq!(bits_at(&vm, Gpa(2 * MIB + page * PAGE_SIZE)), wanted, "{attributes:?}, page {page}");
            }
            // Protected, written again, taken by a harvest.
            assert_eq!(vcpu.handle_fault(Gpa(2 * MIB), Access::Write), RESUME);
            vm.get_dirty_log(0, &mut [0; 32]).unwrap();
            assert_eq!(bits_at(&vm, Gpa(2 * MIB)), wanted);
            new_flags(&vcpu, SIZE, NO_FLAGS);
            let found = query(&vm, Gpa(2 * MIB)).unwrap();
            assert_eq!((found.size, bits_at(&vm, Gpa(2 * MIB))), (PageSize::Size2M, wanted), "{attributes:?}");
            assert_eq!(vm.split_range(GfnRange::new(Gfn(512), 512), PageSize::Size4K), Ok(1));
            assert_eq!(bits_at(&vm, Gpa(3 * MIB)), wanted);
        }
    }
}

each!(an_aged_page_keeps_its_attributes, aged);
fn aged<F: Format>(locking: Locking) {
    for attributes in attributes_of::<F>() {
        for tracking in [AccessTracking::Faults, AccessTracking::AccessedBit] {
            for size in [PageSize::Size4K, PageSize::Size2M] {
                let config = Config::default().with_locking(locking).with_access_tracking(tracking);
                let (vm, mut vcpu) = new_vm::<F>(config, NO_FLAGS);
                let wanted = F::attribute_bits(attributes, &hardware::<F>());
                answer_with(&vm, attributes, size);
                assert_eq!(vcpu.handle_fault(Gpa(0x5000), Access::Write), RESUME);
                assert!(vm.age_range(GfnRange::new(Gfn(0), 512)).unwrap() >= 1);
                assert_eq!(bits_at(&vm, Gpa(0x5000)), wanted);
                // A tracked huge leaf is split as it is.
                vm.split_range(GfnRange::new(Gfn(0), 512), PageSize::Size4K).unwrap();
                assert_eq!(bits_at(&vm, Gpa(0x5000)), wanted);
                vm.host().answer(|_, _| panic!("the page is there"));
                assert_eq!(vcpu.handle_fault(Gpa(0x5000), Access::Read), RESUME);
                assert_eq!(vcpu.handle_fault(Gpa(0x5000), Access::Write), RESUME);
                assert_eq!(bits_at(&vm, Gpa(0x5000)), wanted, "{attributes:?}");
            }
        }
    }
}

each!(parts_that_differ_do_not_become_one_leaf, differ);
fn differ<F: Format>(locking: Locking) {
    let config = Config::default().with_locking(locking);
    let (vm, mut vcpu) = new_vm::<F>(config, NO_FLAGS);
    let attributes_of = |gfn: Gfn| if gfn.0 == 77 { LeafAttributes::DATA } else { LeafAttributes::default() };
    let small = move |gfn, _| {
        Ok(Resolved { attributes: attributes_of(gfn), ..Resolved::memory(frame_of(gfn), PageSize::Size4K) })
    };
    vm.host().answer(small);
    assert_eq!(vcpu.pre_fault_memory(Gpa(0), 2 * MIB, Access::Write), Ok(2 * MIB));
    assert_eq!(query(&vm, Gpa(77 * PAGE_SIZE)).unwrap().attributes, LeafAttributes::DATA);
    // The host says that the block is one by now, without an invalidation. Nothing is lost: what is
    // not one leaf is mapped by the next access.
    answer_with(&vm, LeafAttributes::default(), PageSize::Size2M);
    vm.recover_range(GfnRange::new(Gfn(0), 512)).unwrap();
    assert_eq!(query(&vm, Gpa(0)), None);
    assert_eq!(vcpu.handle_fault(Gpa(0), Access::Read), RESUME);
    assert_eq!(query(&vm, Gpa(77 * PAGE_SIZE)).unwrap().attributes, LeafAttributes::default());
}

each!(attributes_that_the_format_lacks_are_refused, lacking);
fn lacking<F: Format>(locking: Locking) {
    let config = Config::default().with_locking(locking);
    let vm = answer_vm::<F>(config, Hardware::default(), SIZE, NO_FLAGS);
    let mut vcpu = vm.create_vcpu().unwrap();
    let executed_device = LeafAttributes { execute: Execute::All, ..LeafAttributes::DEVICE };
    let by_user = LeafAttributes { execute: Execute::User, ..LeafAttributes::default() };
    for attributes in [executed_device, by_user] {
        answer_with(&vm, attributes, PageSize::Size4K);
        let refused = FaultError::UnsupportedAttributes { gpa: Gpa(0x3000), attributes };
        assert_eq!(vcpu.handle_fault(Gpa(0x3000), Access::Read), Err(refused));
        assert_eq!(vcpu.pre_fault_memory(Gpa(0x3000), PAGE_SIZE, Access::Read), Err(refused));
        assert!(refused.to_string().contains("0x3000"), "{refused}");
        assert_eq!(query(&vm, Gpa(0x3000)), None);
    }
    answer_with(&vm, LeafAttributes::DEVICE, PageSize::Size4K);
    assert_eq!(vcpu.handle_fault(Gpa(0x3000), Access::Write), RESUME);
}

each!(a_device_or_a_read_only_page_in_a_memslot_exits, exits);
fn exits<F: Format>(locking: Locking) {
    let (vm, mut vcpu) = new_vm::<F>(Config::default().with_locking(locking), NO_FLAGS);
    // Page 3 is a device. Page 4 must not be written, page 5 must not be executed.
    vm.host().answer(|gfn, _| match gfn.0 {
        3 => Err(Unresolved::Mmio),
        4 => Ok(Resolved { writable: false, ..Resolved::memory(frame_of(gfn), PageSize::Size4K) }),
        5 => Ok(Resolved { attributes: LeafAttributes::DATA, ..Resolved::memory(frame_of(gfn), PageSize::Size4K) }),
        _ => Err(Unresolved::Gone),
    });
    let mmio = |gpa: u64, access| Ok(Outcome::Exit(Exit::Mmio { gpa: Gpa(gpa), access }));
    for access in [Access::Read, Access::Write, Access::Execute] {
        assert_eq!(vcpu.handle_fault(Gpa(0x3008), access), mmio(0x3008, access));
        assert_eq!(
            vcpu.pre_fault_memory(Gpa(0x3000), PAGE_SIZE, access),
            Err(FaultError::NoMemslot { gpa: Gpa(0x3000) })
        );
    }
    // Before and after the page is mapped.
    for _ in 0..2 {
        assert_eq!(vcpu.handle_fault(Gpa(0x4010), Access::Write), mmio(0x4010, Access::Write));
        assert_eq!(vcpu.handle_fault(Gpa(0x5020), Access::Execute), mmio(0x5020, Access::Execute));
        assert_eq!(vcpu.handle_fault(Gpa(0x4010), Access::Read), RESUME);
        assert_eq!(vcpu.handle_fault(Gpa(0x4010), Access::Execute), RESUME);
        assert_eq!(vcpu.handle_fault(Gpa(0x5020), Access::Write), RESUME);
    }
    assert_eq!(vcpu.handle_fault(Gpa(0x6000), Access::Read), Err(FaultError::BackingGone { gpa: Gpa(0x6000) }));
    assert_eq!(vm.stats().exits, 7);
}

each!(a_refusal_counts_only_if_nothing_has_changed_since, overtaken);
fn overtaken<F: Format>(locking: Locking) {
    let (vm, mut vcpu) = new_vm::<F>(Config::default().with_locking(locking), NO_FLAGS);
    // The device goes, and memory takes its place, while the fault has the old answer.
    let weak = Arc::downgrade(&vm);
    vm.host().answer(move |gfn, _| {
        let vm = weak.upgrade().unwrap();
        drop(vm.invalidate_range(GfnRange::new(gfn, 1)).unwrap());
        Err(Unresolved::Mmio)
    });
    assert_eq!(vcpu.handle_fault(Gpa(0x3000), Access::Read), RESUME, "the guest comes back");
    assert_eq!(query(&vm, Gpa(0x3000)), None);
}

each!(a_fetch_that_the_host_allows_later_makes_the_page_executable, fetches);
fn fetches<F: Format>(locking: Locking) {
    for size in [PageSize::Size4K, PageSize::Size2M] {
        let (vm, mut vcpu) = new_vm::<F>(Config::default().with_locking(locking), NO_FLAGS);
        answer_with(&vm, LeafAttributes::DATA, size);
        assert_eq!(vcpu.handle_fault(Gpa(0x3000), Access::Write), RESUME);
        assert_eq!(query(&vm, Gpa(0x3000)).unwrap().attributes, LeafAttributes::DATA);
        // The whole block, or one page of it.
        for allowed in [PageSize::Size4K, size] {
            vm.host().answer(move |gfn, access| {
                let execute = if access.is_fetch() { Execute::All } else { Execute::None };
                let attributes = LeafAttributes { execute, ..LeafAttributes::default() };
                Ok(Resolved { attributes, ..Resolved::memory(frame_of(gfn), allowed) })
            });
            assert_eq!(vcpu.handle_fault(Gpa(0x3000), Access::Execute), RESUME);
            let found = query(&vm, Gpa(0x3000)).unwrap();
            assert_eq!((found.attributes, found.size), (LeafAttributes::default(), allowed.min(found.size)));
            assert_eq!((found.pfn, found.writable), (frame_of(Gfn(3)), true));
            // The right to execute is no reason to ask again.
            vm.host().answer(|_, _| panic!("the page is there"));
            assert_eq!(vcpu.handle_fault(Gpa(0x3000), Access::Execute), RESUME);
            assert_eq!(vcpu.handle_fault(Gpa(0x3000), Access::Write), RESUME);
            drop(vm.invalidate_range(GfnRange::new(Gfn(0), 512)).unwrap());
            answer_with(&vm, LeafAttributes::DATA, size);
            assert_eq!(vcpu.handle_fault(Gpa(0x3000), Access::Write), RESUME);
        }
    }
}

/// Where leaves tell user from supervisor code.
fn by_mode<F: Format>(features: CpuFeatures) {
    for (execute, allowed, forbidden) in [
        (Execute::User, Access::ExecuteUser, Access::Execute),
        (Execute::Supervisor, Access::Execute, Access::ExecuteUser),
    ] {
        let vm = answer_vm::<F>(Config::default(), Hardware { features, ..Hardware::default() }, SIZE, NO_FLAGS);
        let mut vcpu = vm.create_vcpu().unwrap();
        let attributes = LeafAttributes { execute, ..LeafAttributes::default() };
        answer_with(&vm, attributes, PageSize::Size4K);
        let exit = Ok(Outcome::Exit(Exit::Mmio { gpa: Gpa(0x3000), access: forbidden }));
        for _ in 0..2 {
            assert_eq!(vcpu.handle_fault(Gpa(0x3000), forbidden), exit);
            assert_eq!(vcpu.handle_fault(Gpa(0x3000), allowed), RESUME);
            assert_eq!(query(&vm, Gpa(0x3000)).unwrap().attributes, attributes);
        }
    }
}

#[test]
fn a_page_is_executed_by_the_mode_that_may() {
    by_mode::<Ept>(CpuFeatures::MBEC);
    by_mode::<Stage2>(CpuFeatures::XNX);
}

each!(another_memory_type_without_an_invalidation_is_refused, changed_type);
fn changed_type<F: Format>(locking: Locking) {
    let (vm, mut vcpu) = new_vm::<F>(Config::default().with_locking(locking), NO_FLAGS);
    let read_only = |gfn| Resolved { writable: false, ..Resolved::memory(frame_of(gfn), PageSize::Size4K) };
    vm.host().answer(move |gfn, _| Ok(read_only(gfn)));
    assert_eq!(vcpu.handle_fault(Gpa(0x3000), Access::Read), RESUME);
    let attributes = LeafAttributes { memory: MemoryType::Device, execute: Execute::None };
    answer_with(&vm, attributes, PageSize::Size4K);
    let is_one_type =
        F::attribute_bits(attributes, &hardware::<F>()) == F::attribute_bits(LeafAttributes::DATA, &hardware::<F>());
    let refused = Err(FaultError::BadResolve { gpa: Gpa(0x3000) });
    assert_eq!(vcpu.handle_fault(Gpa(0x3000), Access::Write), if is_one_type { RESUME } else { refused });
}

/// Huge pages are executed nowhere, and a fetch splits them.
fn multihit(locking: Locking, lets: HugePageLogging) {
    let hardware = Hardware { features: CpuFeatures::ITLB_MULTIHIT, ..Hardware::default() };
    let config = Config::default().with_locking(locking).with_huge_page_logging(lets);
    let vm = answer_vm::<Ept>(config, hardware, SIZE, NO_FLAGS);
    let mut vcpu = vm.create_vcpu().unwrap();
    answer_with(&vm, LeafAttributes::default(), PageSize::Size2M);
    let executed = |gpa| query(&vm, Gpa(gpa)).map(|found| (found.size, found.attributes.execute));
    assert_eq!(vcpu.handle_fault(Gpa(2 * MIB), Access::Write), RESUME);
    assert_eq!(executed(2 * MIB), Some((PageSize::Size2M, Execute::None)));
    assert_eq!(vcpu.handle_fault(Gpa(2 * MIB + 0x3000), Access::Execute), RESUME);
    assert_eq!(executed(2 * MIB + 0x3000), Some((PageSize::Size4K, Execute::All)));
    // The others are as they were, and still writable.
    assert_eq!(executed(2 * MIB), Some((PageSize::Size4K, Execute::None)));
    assert!(query(&vm, Gpa(2 * MIB)).unwrap().writable && query(&vm, Gpa(2 * MIB + 0x3000)).unwrap().writable);
    // A first access that is a fetch maps one page.
    assert_eq!(vcpu.handle_fault(Gpa(4 * MIB), Access::Execute), RESUME);
    assert_eq!(executed(4 * MIB), Some((PageSize::Size4K, Execute::All)));
    // A recovery makes the huge page once more, which is not executed; the next fetch splits it.
    assert_eq!(vm.recover_range(GfnRange::new(Gfn(512), 512)), Ok(1));
    assert_eq!(executed(2 * MIB + 0x3000), Some((PageSize::Size2M, Execute::None)));
    assert_eq!(vcpu.handle_fault(Gpa(2 * MIB + 0x3000), Access::Execute), RESUME);
    assert_eq!(executed(2 * MIB + 0x3000), Some((PageSize::Size4K, Execute::All)));
    // Pages of a prefault for execution are small, others are huge and not executed.
    assert_eq!(vcpu.pre_fault_memory(Gpa(6 * MIB), 2 * MIB, Access::Execute), Ok(2 * MIB));
    assert_eq!(executed(7 * MIB), Some((PageSize::Size4K, Execute::All)));
}

#[test]
fn huge_pages_are_not_executed_on_cpus_with_the_multihit_erratum() {
    for locking in [Locking::None, Locking::Exclusive] {
        multihit(locking, HugePageLogging::Split);
        multihit(locking, HugePageLogging::MarkWholeLazily);
    }
}

/// Hardware sees the bits in each PTE, and the host in none of the frames.
fn encrypted<F: Format>(locking: Locking) {
    let c_bit = Hpa(1 << 51);
    let hardware = Hardware { address_bits: c_bit, ..Hardware::default() };
    let config = Config::default().with_locking(locking).with_access_tracking(AccessTracking::Faults);
    let vm = answer_vm::<F>(config, hardware, SIZE, NO_FLAGS);
    assert_eq!(vm.root().0 & c_bit.0, c_bit.0, "of the root");
    let mut vcpu = vm.create_vcpu().unwrap();
    vm.host().record_zapped();
    answer_with(&vm, LeafAttributes::default(), PageSize::Size2M);
    assert_eq!(vcpu.handle_fault(Gpa(2 * MIB), Access::Write), RESUME);
    assert_eq!(lowest_pte(&vm, Gpa(2 * MIB)).0.0 & c_bit.0, c_bit.0);
    let found = query(&vm, Gpa(2 * MIB + 0x7000)).unwrap();
    assert_eq!((found.pfn, found.size), (frame_of(Gfn(519)), PageSize::Size2M));
    // Split, tracked, restored, recovered.
    new_flags(&vcpu, SIZE, LOG);
    assert_eq!(vm.age_range(GfnRange::new(Gfn(512), 512)), Ok(512));
    assert_eq!(vcpu.handle_fault(Gpa(2 * MIB + 0x7000), Access::Write), RESUME);
    assert_eq!(lowest_pte(&vm, Gpa(2 * MIB + 0x7000)).0.0 & c_bit.0, c_bit.0);
    assert_eq!(query(&vm, Gpa(2 * MIB + 0x7000)).unwrap().pfn, frame_of(Gfn(519)));
    new_flags(&vcpu, SIZE, NO_FLAGS);
    assert_eq!(query(&vm, Gpa(2 * MIB + 0x7000)).unwrap().size, PageSize::Size2M);
    drop(vm.invalidate_range(GfnRange::new(Gfn(512), 512)).unwrap());
    let zapped: Vec<Pfn> = vm.host().take_zapped().into_iter().map(|leaf| leaf.pfn).collect();
    assert_eq!(zapped, [frame_of(Gfn(512))]);
    let asked = vm.host().answers().nodes_of.lock().unwrap().clone();
    assert!(asked.iter().all(|pfn| pfn.hpa().0 & c_bit.0 == 0), "{asked:?}");
    // A frame that has the bit already is beyond what is left.
    vm.host().answer(|gfn, _| Ok(Resolved::memory(Pfn(frame_of(gfn).0 | 1 << 39), PageSize::Size4K)));
    assert_eq!(vcpu.handle_fault(Gpa(0), Access::Read), Err(FaultError::BadResolve { gpa: Gpa(0) }));
}

#[test]
fn the_bits_of_every_address_are_hidden_from_the_host() {
    for locking in [Locking::None, Locking::Exclusive] {
        encrypted::<Npt>(locking);
        encrypted::<Ept>(locking);
    }
}
