//! The one schedule that random schedules do not find. An invalidation sequence number was stored
//! twice in the same PTE, so that a fault installed an invalidated frame (`src/table/invalidation_seq.rs`, "No
//! number comes back to a page"). It takes six threads, each stopped at one point. So the threads
//! take turns by a script, and the script is tried with every point at which the first three can be
//! stopped.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test -p slat --release --test shuttle_numbers`
#![cfg(shuttle)]
#![allow(missing_docs)]

#[path = "support/script.rs"]
mod script;
#[path = "support/stepped_world.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod world;

use std::sync::Arc;

use script::{Stops, Turn, explore, turn_of};
use shuttle::sync::Mutex;
use shuttle::sync::mpsc::{RecvError, channel};
use shuttle::thread;
use slat::baselines::Locking;
use slat::{Access, Gfn, GfnRange, Gpa, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize};
use world::{Guest, TestVm, Tiny, backing, new_vm, region, walk};

type Vm = TestVm<Tiny<3>>;

const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();
/// Frames 0 to 3 of a block have PTEs of their own (see `Tiny`).
const BLOCK: u64 = 512;
const PAGE: u64 = 1;
const NEIGHBOUR: u64 = 2;

fn pages(start: u64, nr_pages: u64) -> GfnRange {
    GfnRange::new(Gfn(start), nr_pages)
}

fn fault(guest: &mut Guest<Tiny<3>>, gfn: u64) {
    assert_eq!(guest.vcpu.handle_fault(Gpa(gfn * PAGE_SIZE), Access::Write), Ok(Outcome::Resume));
}

/// A VM whose first block has a page-table page, since a neighbour of [`PAGE`] is mapped.
fn vm_with_a_table() -> Vm {
    let vm = new_vm::<Tiny<3>>(Locking::None, 1);
    let memory = region(0, NO_FLAGS, 0, 4 * BLOCK, Some(backing(0x1000, PageSize::Size4K)));
    vm.set_user_memory_region(memory).unwrap();
    fault(&mut Guest::new(&vm, 0), NEIGHBOUR);
    vm
}

/// `older` takes a number to unlink the page-table page of the page. `younger` then stores a number
/// of its own in the PTE, and a fault reads it. The page is invalidated and held.
///
/// Then `older` unlinks, and `younger` passes over the block once more. Other invalidations take
/// their places among the ranges in flight, and a fault on a neighbour links a page-table page
/// again. The first fault goes on, and must not install.
fn a_number_that_was_read(older: fn(&Vm), younger: fn(&Vm)) {
    let vm = vm_with_a_table();
    let mut guest = Guest::new(&vm, 0);
    let mut neighbour = Guest::new(&vm, 0);
    let spawn = |body: fn(&Vm)| {
        let vm = Arc::clone(&vm);
        thread::spawn(move || body(&vm))
    };
    let older = spawn(older);
    let younger = spawn(younger);
    let faulting = thread::spawn(move || fault(&mut guest, PAGE));
    // The invalidation is held until this thread has looked.
    let (release, released) = channel::<()>();
    let released = Arc::new(Mutex::new(released));
    let hold = |pages: &'static [u64]| {
        let (vm, released) = (Arc::clone(&vm), Arc::clone(&released));
        thread::spawn(move || {
            let invalidations: Vec<_> =
                pages.iter().map(|&page| vm.invalidate_range(self::pages(page, 1)).unwrap()).collect();
            let _: Result<(), RecvError> = released.lock().unwrap().recv();
            drop(invalidations);
        })
    };
    let holder = hold(&[PAGE]);
    let others = hold(&[2 * BLOCK, 3 * BLOCK, 3 * BLOCK]);
    let neighbouring = thread::spawn(move || fault(&mut neighbour, NEIGHBOUR));
    let over = [older, younger, faulting, neighbouring];
    over.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(walk(&vm, PAGE), None, "an invalidated page is mapped");
    drop(release);
    [holder, others].into_iter().for_each(|thread| thread.join().unwrap());
}

/// The threads of [`a_number_that_was_read`], in the order of their creation.
const OLDER: usize = 1;
const YOUNGER: usize = 2;
const FAULT: usize = 3;
const HOLDER: usize = 4;
const OTHERS: usize = 5;
const NEIGHBOURING: usize = 6;

/// The first three are stopped at each of their points. The two long ones skip their first steps.
const SCRIPT: [Turn; 9] = [
    turn_of(OLDER).stopped(Stops::NearTheEnd(40)),
    turn_of(YOUNGER).stopped(Stops::NearTheEnd(60)),
    turn_of(FAULT).stopped(Stops::Everywhere),
    turn_of(HOLDER),
    turn_of(OLDER),
    turn_of(YOUNGER),
    turn_of(OTHERS),
    turn_of(NEIGHBOURING),
    turn_of(FAULT),
];

fn invalidate_the_block(vm: &Vm) {
    drop(vm.invalidate_range(pages(0, BLOCK)).unwrap());
}

#[test]
fn no_number_is_stored_twice_by_a_further_pass() {
    let nr_tried = explore(&SCRIPT, || a_number_that_was_read(invalidate_the_block, invalidate_the_block));
    println!("{nr_tried} schedules");
}
