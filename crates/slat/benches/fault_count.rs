//! A number of faults on one thread, for tools that count instructions:
//!
//! ```text
//! cargo bench -p slat --bench fault_count --no-run
//! valgrind --tool=callgrind --toggle-collect='*::touch*' target/release/deps/fault_count-* 65536
//! ```
//!
//! The count divided by the number printed is instructions per page. What is counted is the second
//! argument: `install`, the default, faults on fresh pages; `blocks`, each on a fresh page of 2 MiB;
//! `log`, faults that restore write access while the memslot logs; `prefault`, a range that is
//! mapped ahead, with an answer of the host for each page; `query`, look-ups; `invalidate`, pages
//! that are invalidated one by one; `slots` (of 65528 pages), each fault in another of 32764
//! memslots; `held`, faults while 20 000 pages elsewhere are in flight. `ci/instructions.sh` does
//! them all, and fails if the counts are too high.

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
    use std::hint::black_box;

    use slat::baselines::Locking;
    use slat::format::Npt;
    use slat::{Access, Gfn, GfnRange, Gpa, MemoryRegion, MemoryRegionFlags, PAGE_SIZE, PageSize};

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
        let kind = arguments.get(1).map_or("install", String::as_str);
        let nr_slots = if kind == "slots" { u64::from(MemoryRegion::<()>::MAX_SLOTS) } else { 1 };
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
                backing: Some(host::FirstFrame(first, PageSize::Size4K)),
                userfault_bitmap: None,
            })
            .unwrap();
        }
        const BLOCK_PAGES: u64 = 512;
        // Beside the pages of 4 KiB.
        let first_block = nr_pages.next_multiple_of(BLOCK_PAGES);
        if kind == "blocks" {
            vm.set_user_memory_region(MemoryRegion {
                slot: 1,
                flags: MemoryRegionFlags::empty(),
                guest_phys_addr: Gpa(first_block * PAGE_SIZE),
                memory_size: nr_pages * BLOCK_PAGES * PAGE_SIZE,
                backing: Some(host::FirstFrame(1 << 24, PageSize::Size2M)),
                userfault_bitmap: None,
            })
            .unwrap();
        }
        let mut vcpu = vm.create_vcpu().unwrap();
        let nr_held = if kind == "held" { 20_000 } else { 0 };
        let page_held = |index: u64| GfnRange::new(Gfn((1 << 24) + index), 1);
        let held: Vec<_> = (0..nr_held).map(|index| vm.invalidate_range(page_held(index)).unwrap()).collect();
        if matches!(kind, "log" | "query" | "invalidate") {
            for page in 0..nr_pages {
                host::write_fault(&mut vcpu, page);
            }
        }
        match kind {
            "install" | "held" => touch(|page| host::write_fault(&mut vcpu, page), nr_pages),
            "blocks" => touch(|page| host::write_fault(&mut vcpu, first_block + page * BLOCK_PAGES), nr_pages),
            "log" => {
                host::log_dirty_pages(&vm, nr_pages);
                touch(|page| host::write_fault(&mut vcpu, page), nr_pages);
            }
            // Of the memslots one page each, and then the next.
            "slots" => {
                let page_of = |index| index % nr_slots * slot_pages + index / nr_slots;
                touch(|index| host::write_fault(&mut vcpu, page_of(index)), nr_slots * slot_pages);
            }
            "invalidate" => touch(|page| drop(vm.invalidate_range(GfnRange::new(Gfn(page), 1)).unwrap()), nr_pages),
            "prefault" => {
                let size_bytes = Gfn(nr_pages).gpa().0;
                let mut map = |_| vcpu.pre_fault_memory(Gfn(0).gpa(), size_bytes, Access::Write);
                touch(|call| assert_eq!(map(call), Ok(size_bytes)), 1);
            }
            "query" => {
                let tables = vm.read_tables().unwrap();
                let mut cursor = tables.cursor();
                touch(
                    |page| assert!(black_box(cursor.query(Gfn(page).gpa()).map(|found| found.pfn)).is_some()),
                    nr_pages,
                );
            }
            kind => panic!("{kind} is not counted"),
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
