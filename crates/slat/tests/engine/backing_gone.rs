//! A host that answers `Gone` answers for the moment of the question. If user space has changed the
//! state behind the answer meanwhile, the fault checks again, and acts on the new state.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::{Call, MIB, PRIVATE_PFN, TestBacking, TestHost, Translation, change, each, region, translate, vm};
use slat::baselines::Locking;
use slat::error::FaultError;
use slat::format::Format;
use slat::slots::{MemoryAttributes, MemoryFaultFlags, UserfaultBitmap};
use slat::{Access, Exit, Gfn, GfnRange, Gpa, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Vcpu, Vm};

const BOTH: MemoryRegionFlags = MemoryRegionFlags::USERFAULT.union(MemoryRegionFlags::GUEST_MEMFD);
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();
const SIZE: u64 = 4 * MIB;
const START: u64 = 2 * MIB;
/// The page that the guest accesses.
const GPA: Gpa = Gpa(START + 3 * PAGE_SIZE);
const RESUMED: Result<Outcome, FaultError> = Ok(Outcome::Resume);

struct World<F: Format> {
    vm: Arc<Vm<TestHost, F>>,
    vcpu: Vcpu<TestHost, F>,
    words: Arc<Vec<AtomicU64>>,
    backing: Arc<TestBacking>,
}

/// What happens during a resolve, which then answers `Gone` once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Meanwhile {
    Nothing,
    SetsBit,
    TakesBack,
    TakesBackAndGives,
    MakesPrivate,
    Invalidates,
    Deletes,
    Replaces,
}

impl Meanwhile {
    fn run<F: Format>(self, vm: &Vm<TestHost, F>, words: &[AtomicU64]) {
        let set_bit = || words[0].fetch_or(1 << 3, Ordering::Release);
        match self {
            Meanwhile::Nothing => {}
            Meanwhile::SetsBit => drop(set_bit()),
            Meanwhile::TakesBack | Meanwhile::TakesBackAndGives => {
                set_bit();
                assert_eq!(vm.rescan_userfault(0, 3, 1), Ok(1));
                if self == Meanwhile::TakesBackAndGives {
                    words[0].fetch_and(!(1 << 3), Ordering::Release);
                }
            }
            Meanwhile::MakesPrivate => vm.set_memory_attributes(GPA, PAGE_SIZE, MemoryAttributes::PRIVATE).unwrap(),
            Meanwhile::Invalidates => drop(vm.invalidate_range(GfnRange::new(GPA.gfn(), 1)).unwrap()),
            Meanwhile::Deletes | Meanwhile::Replaces => {
                vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
                if self == Meanwhile::Replaces {
                    vm.set_user_memory_region(region(0, START, SIZE, 0x8000, PageSize::Size4K)).unwrap();
                }
            }
        }
    }
}

impl<F: Format> World<F> {
    fn new(locking: Locking) -> World<F> {
        let vm = vm::<F>(locking);
        let words: Arc<Vec<AtomicU64>> = Arc::new((0..16).map(|_| AtomicU64::new(0)).collect());
        let bitmap = UserfaultBitmap::new(Arc::<Vec<AtomicU64>>::clone(&words), PageSize::Size4K);
        let memory = region(0, START, SIZE, 0x400, PageSize::Size4K);
        let backing = Arc::clone(memory.backing.as_ref().unwrap());
        vm.set_user_memory_region(MemoryRegion { flags: BOTH, userfault_bitmap: Some(bitmap), ..memory }).unwrap();
        let vcpu = vm.create_vcpu().unwrap();
        World { vm, vcpu, words, backing }
    }

    /// The result of the guest's access. It tries once more if the first fault resumes and maps
    /// nothing.
    fn fault(&mut self, access: Access) -> Result<Outcome, FaultError> {
        let outcome = self.vcpu.handle_fault(GPA, access);
        let is_done = |found: Translation| access != Access::Write || found.writable;
        if outcome == RESUMED && !translate(&self.vm, GPA).is_some_and(is_done) {
            return self.vcpu.handle_fault(GPA, access);
        }
        outcome
    }

    /// Lets `meanwhile` overtake the next resolve, which answers `Gone`.
    fn overtake(&self, meanwhile: Meanwhile) {
        let (vm, words, backing) = (Arc::downgrade(&self.vm), Arc::clone(&self.words), Arc::clone(&self.backing));
        self.vm.host().overtake(Call::Resolve, 1, move || {
            let vm = vm.upgrade().unwrap();
            meanwhile.run(&vm, &words);
            backing.gone.store(true, Ordering::SeqCst);
            let backing = Arc::clone(&backing);
            vm.host().overtake(Call::Resolve, 1, move || backing.gone.store(false, Ordering::SeqCst));
        });
    }
}

const WITHHELD: Exit = Exit::MemoryFault { flags: MemoryFaultFlags::USERFAULT, gpa: GPA, size: PAGE_SIZE };

each!(a_fault_whose_backing_is_gone_checks_again_before_it_fails, page_goes);
fn page_goes<F: Format>(locking: Locking) {
    let gone = FaultError::BackingGone { gpa: GPA };
    for access in [Access::Read, Access::Write] {
        let mmio = Exit::Mmio { gpa: GPA, access };
        for (meanwhile, expected, pfn) in [
            (Meanwhile::Nothing, Err(gone), None),
            (Meanwhile::SetsBit, Ok(Outcome::Exit(WITHHELD)), None),
            (Meanwhile::TakesBack, Ok(Outcome::Exit(WITHHELD)), None),
            (Meanwhile::TakesBackAndGives, RESUMED, Some(0x403)),
            (Meanwhile::MakesPrivate, RESUMED, Some(PRIVATE_PFN + 0x403)),
            (Meanwhile::Invalidates, RESUMED, Some(0x403)),
            (Meanwhile::Deletes, Ok(Outcome::Exit(mmio)), None),
            (Meanwhile::Replaces, RESUMED, Some(0x8003)),
        ] {
            let mut world = World::<F>::new(locking);
            world.overtake(meanwhile);
            assert_eq!(world.fault(access), expected, "{access:?}, {meanwhile:?}");
            assert_eq!(translate(&world.vm, GPA).map(|found| found.pfn.0), pfn, "{access:?}, {meanwhile:?}");
            // And before the guest's access.
            let mut world = World::<F>::new(locking);
            world.overtake(meanwhile);
            let expected = match expected {
                Ok(Outcome::Resume) => Ok(PAGE_SIZE),
                Ok(Outcome::Exit(Exit::MemoryFault { .. })) => Err(FaultError::UserfaultPending { gpa: GPA }),
                Ok(Outcome::Exit(_)) => Err(FaultError::NoMemslot { gpa: GPA }),
                Err(error) => Err(error),
            };
            assert_eq!(world.vcpu.pre_fault_memory(GPA, PAGE_SIZE, access), expected, "{access:?}, {meanwhile:?}");
        }
    }
}

// The page is mapped for reading only, and gone for a write.
each!(a_write_to_a_read_only_leaf_checks_again_before_it_fails, write_to_read_only);
fn write_to_read_only<F: Format>(locking: Locking) {
    for (meanwhile, expected) in [
        (Meanwhile::Nothing, Err(FaultError::BackingGone { gpa: GPA })),
        (Meanwhile::SetsBit, Ok(Outcome::Exit(WITHHELD))),
        (Meanwhile::TakesBack, Ok(Outcome::Exit(WITHHELD))),
        (Meanwhile::MakesPrivate, RESUMED),
        (Meanwhile::Invalidates, RESUMED),
    ] {
        let mut world = World::<F>::new(locking);
        world.backing.reads_are_writable.store(false, Ordering::SeqCst);
        assert_eq!(world.vcpu.handle_fault(GPA, Access::Read), RESUMED);
        assert!(!translate(&world.vm, GPA).unwrap().writable);
        world.overtake(meanwhile);
        assert_eq!(world.fault(Access::Write), expected, "{meanwhile:?}");
    }
}

// While the page is being invalidated, the guest comes back.
each!(a_page_that_is_gone_during_an_invalidation_is_resolved_later, during_invalidation);
fn during_invalidation<F: Format>(locking: Locking) {
    let mut world = World::<F>::new(locking);
    let (vm, backing) = (Arc::clone(&world.vm), Arc::clone(&world.backing));
    world.vm.host().overtake(Call::Resolve, 1, move || {
        // Leaked: the range stays in flight for good.
        std::mem::forget(vm.invalidate_range(GfnRange::new(Gfn(GPA.0 / PAGE_SIZE), 1)).unwrap());
        backing.gone.store(true, Ordering::SeqCst);
    });
    assert_eq!(world.vcpu.handle_fault(GPA, Access::Read), RESUMED);
    assert_eq!(translate(&world.vm, GPA), None);
    assert_eq!(world.vcpu.handle_fault(GPA, Access::Read), RESUMED);
}
