//! Lazy write protection on one thread: which directory entries are protected, and what the next
//! write below them does to the other pages. (Formats whose directory entries cannot be protected
//! are not named for `each`.)

use std::sync::Arc;

use crate::common::{MIB, TestHost, assert_no_table_is_left, change, each, region, translate, vm};
use slat::baselines::Locking;
use slat::format::Format;
use slat::{Access, Gpa, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Vcpu, Vm};

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();

/// So many that a harvest protects the directory entry above them.
const MANY: u64 = 100;

fn write_all<F: Format>(vcpu: &mut Vcpu<TestHost, F>, start: u64, nr_pages: u64) {
    for page in 0..nr_pages {
        let gpa = Gpa(start + page * PAGE_SIZE);
        assert_eq!(vcpu.handle_fault(gpa, Access::Write), Ok(Outcome::Resume));
    }
}

fn may_be_written<F: Format>(vm: &Arc<Vm<TestHost, F>>, start: u64, nr_pages: u64) -> u64 {
    let is_writable = |page: &u64| translate(vm, Gpa(start + page * PAGE_SIZE)).is_some_and(|found| found.writable);
    (0..nr_pages).filter(is_writable).count() as u64
}

each!(the_next_write_restores_access_to_its_page_alone, opens_one, if F::GENERATION != 0);
fn opens_one<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    vm.set_user_memory_region(region(0, 0, 2 * MIB, 0, PageSize::Size4K)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    write_all(&mut vcpu, 0, MANY);
    vm.set_user_memory_region(change(0, LOG, 0, 2 * MIB)).unwrap();
    for round in 1..=3 {
        assert_eq!((vm.stats().tables_protected, may_be_written(&vm, 0, MANY)), (round, 0));
        write_all(&mut vcpu, 7 * PAGE_SIZE, 1);
        assert_eq!((vm.stats().tables_unprotected, may_be_written(&vm, 0, MANY)), (round, 1), "page 7, and no other");
        write_all(&mut vcpu, 0, MANY);
        assert_eq!(vm.get_dirty_log(0, &mut [0; 8]), Ok(MANY));
    }
    vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
    assert_no_table_is_left(&vm);
}

each!(a_directory_entry_that_two_slots_share_is_not_protected, shared, if F::GENERATION != 0);
fn shared<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    // The memslot that logs has a whole block, and a part of the one that it shares.
    vm.set_user_memory_region(region(0, 0, 3 * MIB, 0, PageSize::Size4K)).unwrap();
    vm.set_user_memory_region(region(1, 3 * MIB, MIB, 1 << 30, PageSize::Size4K)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    for start in [0, 2 * MIB, 3 * MIB] {
        write_all(&mut vcpu, start, MANY);
    }
    vm.set_user_memory_region(change(0, LOG, 0, 3 * MIB)).unwrap();
    for round in 1..=2 {
        assert_eq!(vm.stats().tables_protected, round, "of the whole block");
        assert_eq!(may_be_written(&vm, 3 * MIB, MANY), MANY, "the neighbour is not affected");
        // A write to the neighbour restores no write access to the memslot that logs.
        write_all(&mut vcpu, 3 * MIB, 1);
        assert_eq!(may_be_written(&vm, 0, MANY) + may_be_written(&vm, 2 * MIB, MANY), 0);
        write_all(&mut vcpu, 0, MANY);
        write_all(&mut vcpu, 2 * MIB, MANY);
        assert_eq!(vm.get_dirty_log(0, &mut [0; 12]), Ok(2 * MANY));
    }
    for slot in [0, 1] {
        vm.set_user_memory_region(change(slot, NO_FLAGS, 0, 0)).unwrap();
    }
    assert_no_table_is_left(&vm);
}
