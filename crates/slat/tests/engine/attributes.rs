//! Attributes of pages beside memslots that come and go. The promise of `set_memory_attributes`
//! holds for each page that has the same memslot before and after the call.

use std::sync::Arc;

use crate::common::{Call, MIB, PRIVATE_PFN, TestHost, change, each, region, translate, vm};
use slat::baselines::Locking;
use slat::error::{FaultError, SlotError};
use slat::format::Format;
use slat::slots::MemoryAttributes;
use slat::{Access, Gpa, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Vm};

const GUEST_MEMFD: MemoryRegionFlags = MemoryRegionFlags::GUEST_MEMFD;
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();
const PRIVATE: MemoryAttributes = MemoryAttributes::PRIVATE;
const SHARED: MemoryAttributes = MemoryAttributes::empty();

/// Memslot `n` has `PAGES` pages from page `n * PAGES` on; memslots 0 to 4 are side by side.
const PAGES: u64 = 100;
const NR_SLOTS: u32 = 5;
const BASE: u64 = 2 * MIB;

fn gpa(page: u64) -> Gpa {
    Gpa(BASE + page * PAGE_SIZE)
}

fn create<F: Format>(vm: &Vm<TestHost, F>, slot: u32, flags: MemoryRegionFlags, page: u64, nr_pages: u64) {
    let memory = region(slot, gpa(page).0, nr_pages * PAGE_SIZE, 0x1_0000 + page, PageSize::Size2M);
    vm.set_user_memory_region(MemoryRegion { flags, ..memory }).unwrap();
}

fn delete<F: Format>(vm: &Vm<TestHost, F>, slot: u32) {
    vm.set_user_memory_region(change(slot, NO_FLAGS, 0, 0)).unwrap();
}

/// What happens to the memslots while `set_memory_attributes` flushes.
#[derive(Clone, Copy, Debug)]
enum Meanwhile {
    /// These memslots are deleted.
    Delete(&'static [u32]),
    /// Memslot 2 is replaced by one of these pages and flags, with the same number.
    Replace(MemoryRegionFlags, u64, u64),
}

const ALL_MEANWHILE: [Meanwhile; 11] = [
    Meanwhile::Delete(&[]),
    Meanwhile::Delete(&[0]),
    Meanwhile::Delete(&[2]),
    Meanwhile::Delete(&[4]),
    Meanwhile::Delete(&[1, 2]),
    Meanwhile::Delete(&[1, 3]),
    Meanwhile::Delete(&[0, 2, 4]),
    Meanwhile::Replace(GUEST_MEMFD, 2 * PAGES, PAGES),
    Meanwhile::Replace(GUEST_MEMFD, 2 * PAGES + 10, 20),
    Meanwhile::Replace(NO_FLAGS, 2 * PAGES + 10, 20),
    Meanwhile::Replace(NO_FLAGS, 2 * PAGES, PAGES),
];

impl Meanwhile {
    fn run<F: Format>(self, vm: &Vm<TestHost, F>) {
        match self {
            Meanwhile::Delete(slots) => slots.iter().for_each(|&slot| delete(vm, slot)),
            Meanwhile::Replace(flags, page, nr_pages) => {
                delete(vm, 2);
                create(vm, 2, flags, page, nr_pages);
            }
        }
    }

    /// The attributes of `page` after a call that makes all pages `attributes`; `None` if it has no
    /// memslot.
    fn expected(self, page: u64, attributes: MemoryAttributes) -> Option<MemoryAttributes> {
        let slot = (page / PAGES) as u32;
        match self {
            Meanwhile::Delete(slots) => (!slots.contains(&slot)).then_some(attributes),
            Meanwhile::Replace(flags, first, nr_pages) if slot == 2 => {
                let is_memfd = flags.contains(GUEST_MEMFD);
                (first..first + nr_pages).contains(&page).then_some(if is_memfd { attributes } else { SHARED })
            }
            Meanwhile::Replace(..) => Some(attributes),
        }
    }
}

each!(slots_deleted_meanwhile_leave_no_old_page, slots_that_go_meanwhile);
fn slots_that_go_meanwhile<F: Format>(locking: Locking) {
    for meanwhile in ALL_MEANWHILE {
        for (before, after) in [(SHARED, PRIVATE), (PRIVATE, SHARED)] {
            let vm = vm::<F>(locking);
            (0..NR_SLOTS).for_each(|slot| create(&vm, slot, GUEST_MEMFD, u64::from(slot) * PAGES, PAGES));
            let size = u64::from(NR_SLOTS) * PAGES * PAGE_SIZE;
            vm.set_memory_attributes(gpa(0), size, before).unwrap();
            let other = Arc::downgrade(&vm);
            vm.host().overtake(Call::Flush, 1, move || meanwhile.run(&*other.upgrade().unwrap()));
            assert_eq!(vm.set_memory_attributes(gpa(0), size, after), Ok(()));
            assert!(vm.host().was_overtaken());
            let mut vcpu = vm.create_vcpu().unwrap();
            for page in 0..u64::from(NR_SLOTS) * PAGES {
                let expected = meanwhile.expected(page, after);
                let no_memory = SlotError::NoMemslot { gpa: gpa(page) };
                assert_eq!(
                    vm.memory_attributes(gpa(page)),
                    expected.ok_or(no_memory),
                    "page {page}, {after:?}, {meanwhile:?}"
                );
                if let Some(expected) = expected {
                    assert_eq!(vcpu.handle_fault(gpa(page), Access::Read), Ok(Outcome::Resume));
                    let is_private = translate(&vm, gpa(page)).unwrap().pfn.0 >= PRIVATE_PFN;
                    assert_eq!(is_private, expected == PRIVATE, "page {page}, {after:?}, {meanwhile:?}");
                }
            }
        }
    }
}

/// The whole range is checked before anything is changed: the error names the first page that
/// cannot be private.
#[test]
fn a_hole_is_refused_and_changes_nothing() {
    let vm = vm::<slat::format::Npt>(Locking::None);
    create(&vm, 0, GUEST_MEMFD, 0, PAGES);
    create(&vm, 1, GUEST_MEMFD, 2 * PAGES, PAGES);
    create(&vm, 2, NO_FLAGS, 3 * PAGES, PAGES);
    let none = |page| Err(SlotError::NoGuestMemfd { gpa: gpa(page) });
    for (first, nr_pages, missing) in [
        (0, 2 * PAGES, PAGES),
        (0, PAGES + 1, PAGES),
        (PAGES - 1, 2, PAGES),
        (PAGES, PAGES, PAGES),
        (2 * PAGES - 1, 2, 2 * PAGES - 1),
        (2 * PAGES, 2 * PAGES, 3 * PAGES),
        (3 * PAGES, 1, 3 * PAGES),
        (4 * PAGES, 1, 4 * PAGES),
    ] {
        assert_eq!(vm.set_memory_attributes(gpa(first), nr_pages * PAGE_SIZE, PRIVATE), none(missing));
    }
    for page in (0..PAGES).chain(2 * PAGES..3 * PAGES) {
        assert_eq!(vm.memory_attributes(gpa(page)), Ok(SHARED), "page {page}");
    }
    assert_eq!(vm.check_access(gpa(0), 2 * PAGES * PAGE_SIZE), Err(FaultError::NoMemslot { gpa: gpa(PAGES) }));
    assert_eq!(vm.check_access(gpa(2 * PAGES), 2 * PAGES * PAGE_SIZE), Ok(Outcome::Resume));
}
