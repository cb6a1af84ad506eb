//! A number of faults on one thread, for tools that count instructions:
//!
//! ```text
//! cargo bench -p slat --bench fault_count --no-run
//! valgrind --tool=callgrind --toggle-collect='*::touch*' target/release/deps/fault_count-* 65536
//! ```
//!
//! The count divided by the number printed is instructions per fault. `65536 log`: faults that
//! restore write access while the memslot logs. `65528 slots`: each fault in another of 32764
//! memslots. `65536 held`: while 20 000 pages elsewhere are in flight. `ci/instructions.sh` does
//! all, and fails if the counts are too high.

#[cfg(not(any(loom, shuttle)))]
#[path = "fault/arena.rs"]
mod arena;
#[cfg(not(any(loom, shuttle)))]
#[path = "fault/bench_host.rs"]
mod bench_host;
#[cfg(not(any(loom, shuttle)))]
#[path = "../tests/support/futex_park.rs"]
mod futex_park;
#[cfg(not(any(loom, shuttle)))]
#[path = "fault/host.rs"]
mod host;

#[cfg(not(any(loom, shuttle)))]
#[path = "../tests/support/membarrier.rs"]
mod membarrier;

#[cfg(not(any(loom, shuttle)))]
use slat::baselines::Park;

#[cfg(not(any(loom, shuttle)))]
mod count {
    use slat::baselines::Locking;
    use slat::format::Npt;
    use slat::{Gfn, GfnRange, Gpa, MemoryRegion, MemoryRegionFlags, PAGE_SIZE};

    use super::arena::Memory;
    use super::host;

    /// The measured loop.
    #[inline(never)]
    fn touch(mut fault: impl FnMut(u64), nr_pages: u64) {
        for page in 0..nr_pages {
            fault(page);
        }
    }

    pub(super) fn main() {
        let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
        let nr_pages: u64 = arguments.first().map_or(1024, |count| count.parse().expect("a number of faults"));
        let is_kind = |name: &str| arguments.get(1).is_some_and(|kind| kind == name);
        let nr_slots = if is_kind("slots") { u64::from(MemoryRegion::<()>::MAX_SLOTS) } else { 1 };
        let slot_pages = nr_pages / nr_slots;
        let memory = Memory::new(nr_pages as usize / 256 + 16);
        let vm = host::new_vm::<Npt>(memory, Locking::None, slot_pages);
        for slot in 1..nr_slots {
            let first = slot * slot_pages;
            vm.set_user_memory_region(MemoryRegion {
                slot: slot as u32,
                flags: MemoryRegionFlags::empty(),
                guest_phys_addr: Gpa(first * PAGE_SIZE),
                memory_size: slot_pages * PAGE_SIZE,
                backing: Some(host::FirstFrame(first)),
                userfault_bitmap: None,
            })
            .unwrap();
        }
        let mut vcpu = vm.create_vcpu().unwrap();
        let nr_held = if is_kind("held") { 20_000 } else { 0 };
        let page_held = |index: u64| GfnRange::new(Gfn((1 << 24) + index), 1);
        let held: Vec<_> = (0..nr_held).map(|index| vm.invalidate_range(page_held(index)).unwrap()).collect();
        if is_kind("log") {
            for page in 0..nr_pages {
                host::write_fault(&mut vcpu, page);
            }
            host::log_dirty_pages(&vm, nr_pages);
        }
        if nr_slots == 1 {
            touch(|page| host::write_fault(&mut vcpu, page), nr_pages);
        } else {
            // Of the memslots one page each, and then the next.
            let page_of = |index| index % nr_slots * slot_pages + index / nr_slots;
            touch(|index| host::write_fault(&mut vcpu, page_of(index)), nr_slots * slot_pages);
        }
        drop(held);
        drop((vcpu, vm));
        // Checks that all page-table pages were freed.
        memory.reset();
        println!("{}", slot_pages * nr_slots);
    }
}

fn main() {
    #[cfg(not(any(loom, shuttle)))]
    count::main();
}
