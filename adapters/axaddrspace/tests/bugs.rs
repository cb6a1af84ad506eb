//! Bugs of the crates that this replaces, each as a test of the adapter. (The release order with
//! which a filled page-table page is published needs a machine with weak memory.)

use std::sync::atomic::Ordering;

use crate::common::*;
use slat::format::{Ept, Format, Sv39x4};
use slat::{Gfn, Gpa, MemoryRegion, MemoryRegionFlags, PageSize};
use slat_axaddrspace::{AddrSpace, AddrSpaceError, MappingFlags};

each_format! {
    a_duplicate_fault_keeps_the_frame,
    unmapping_a_page_of_a_huge_page_leaves_the_rest,
    all_cpus_forget_what_was_unmapped_before_it_is_freed,
    a_copy_over_a_hole_fails_and_does_not_panic,
    an_allocation_that_fails_leaves_everything_as_it_was,
    page_table_pages_are_freed_after_the_flush,
    the_live_tables_return_to_one,
    write_protection_keeps_accessed_and_dirty,
    a_flush_is_of_the_vm,
}

/// The original gives the page another frame: what the guest has written is lost, and the first
/// frame with it.
fn a_duplicate_fault_keeps_the_frame<F: Format>() {
    let (machine, space) = small_space::<F>();
    space.map_alloc(gpa(0x1_0000), PAGE, RWX, false).unwrap();
    assert_eq!(load(&machine, &space, 0, 0x1_0000), Some(0));
    let frame = space.translate(gpa(0x1_0000)).unwrap();
    machine.memory.byte(frame).store(42, Ordering::Relaxed);
    for access in [MappingFlags::READ, MappingFlags::WRITE, MappingFlags::EXECUTE, RWX] {
        assert!(space.handle_page_fault(gpa(0x1_0000), access));
        assert_eq!((space.translate(gpa(0x1_0000)), machine.frames_in_use()), (Some(frame), 1));
    }
    assert_eq!(load(&machine, &space, 1, 0x1_0000), Some(42));
}

/// The page table below the original removes the whole of a huge page.
fn unmapping_a_page_of_a_huge_page_leaves_the_rest<F: Format>() {
    let (_, space) = space::<F>(0, 64 * MIB);
    space.map_linear(gpa(0), hpa(0x4000_0000), 6 * MIB, RWX).unwrap();
    let unmapped = [0, 3 * MIB, 6 * MIB - PAGE];
    for at in unmapped {
        space.unmap(gpa(at), PAGE).unwrap();
    }
    for at in (0..6 * MIB).step_by(PAGE) {
        let expected = (!unmapped.contains(&at)).then_some(hpa(0x4000_0000 + at));
        assert_eq!(space.translate(gpa(at)), expected, "{at:#x}");
    }
    assert_eq!(space.query(gpa(PAGE)), Ok((hpa(0x4000_0000 + PAGE), RWX, PageSize::Size4K)));
    // The hole may be a device now, and its neighbours stay memory.
    space.map_linear(gpa(3 * MIB), hpa(0xfe00_0000), PAGE, RW | MappingFlags::DEVICE).unwrap();
    assert_eq!(space.translate(gpa(3 * MIB)), Some(hpa(0xfe00_0000)));
    assert_eq!(space.query(gpa(3 * MIB - PAGE)).map(|(_, flags, _)| flags), Ok(RWX));
}

/// AxVM flushes by INVLPG, on the CPU that unmaps alone: another CPU reads a frame that is someone
/// else's by then.
fn all_cpus_forget_what_was_unmapped_before_it_is_freed<F: Format>() {
    let (machine, space) = small_space::<F>();
    for (populate, nr_pages) in [(true, 1), (false, 1), (true, 4), (false, 4)] {
        space.map_alloc(gpa(0x1_0000), 4 * PAGE, RW, populate).unwrap();
        for cpu in 0..2 {
            assert_eq!(load(&machine, &space, cpu, 0x1_0000), Some(0));
        }
        let frame = space.translate(gpa(0x1_0000)).unwrap().as_usize();
        machine.take_events();
        space.unmap(gpa(0x1_0000), nr_pages * PAGE).unwrap();
        let events = machine.take_events();
        let freed = events.iter().position(|event| *event == Event::FreeFrame(frame)).unwrap();
        let is_flush = |event: &Event| matches!(event, Event::Flush(range) if range.contains(Gfn(0x10)));
        assert!(events[..freed].iter().any(is_flush), "{events:?}");
        for cpu in 0..2 {
            assert_eq!(load(&machine, &space, cpu, 0x1_0000), None);
        }
        space.clear();
    }
    // Linear memory is the caller's again when the call returns.
    space.map_linear(gpa(0x1_0000), hpa(0xff_0000), PAGE, RW).unwrap();
    assert_eq!(load(&machine, &space, 0, 0x1_0000), Some(0));
    space.unmap(gpa(0x1_0000), PAGE).unwrap();
    assert_eq!(load(&machine, &space, 0, 0x1_0000), None);
}

/// The original's `translated_byte_buffer` panics, and its accessor reads on in the next frame.
fn a_copy_over_a_hole_fails_and_does_not_panic<F: Format>() {
    let (machine, space) = small_space::<F>();
    space.map_alloc(gpa(0x1_0000), 4 * PAGE, RW, true).unwrap();
    space.unmap(gpa(0x1_2000), PAGE).unwrap();
    assert!(space.translated_byte_buffer(gpa(0x1_0000), 3 * PAGE).is_none());
    let mut buffer = vec![7; 3 * PAGE];
    let insufficient = |operation| {
        let (address, requested, available) = (gpa(0x1_0000), 3 * PAGE, 2 * PAGE);
        Err(AddrSpaceError::InsufficientAccess { operation, address, requested, available })
    };
    assert_eq!(space.write_buffer(gpa(0x1_0000), &buffer), insufficient("write guest memory"));
    assert_eq!(load(&machine, &space, 0, 0x1_0000), Some(0), "nothing was written");
    assert_eq!(space.read_buffer(gpa(0x1_0000), &mut buffer), insufficient("read guest memory"));
    assert!(buffer.iter().all(|byte| *byte == 7), "nothing was read");
    assert_eq!(space.read_buffer(gpa(0x1_2000), &mut buffer), Err(AddrSpaceError::Unmapped { address: gpa(0x1_2000) }));
    // Frames that do not follow each other: the next frame is another page's.
    space.map_alloc(gpa(0x1_2000), PAGE, RW, false).unwrap();
    let text: Vec<u8> = (0..3 * PAGE).map(|index| (index / PAGE) as u8 + 1).collect();
    space.write_buffer(gpa(0x1_0000), &text).unwrap();
    for page in 0..4 {
        let expected = if page == 3 { 0 } else { page as u8 + 1 };
        assert_eq!(load(&machine, &space, 1, 0x1_0000 + page * PAGE), Some(expected));
    }
}

/// Each call, with each of its allocations failing.
fn an_allocation_that_fails_leaves_everything_as_it_was<F: Format>() {
    type Call<F> = fn(&AddrSpace<Machine, F>) -> Result<(), AddrSpaceError>;
    let calls: [Call<F>; 5] = [
        |space| space.map_linear(gpa(8 * MIB), hpa(0x4000_0000), 4 * MIB + 5 * PAGE, RWX),
        |space| space.map_alloc(gpa(8 * MIB), 5 * PAGE, RW, true),
        // Splits a huge page.
        |space| space.unmap(gpa(MIB), PAGE),
        // In the hole of a linear area, and beyond it.
        |space| space.map_alloc(gpa(6 * MIB), 2 * MIB + 3 * PAGE, RW, true),
        |space| space.map_linear(gpa(6 * MIB), hpa(0x7000_1000), 4 * MIB, RW),
    ];
    for (number, call) in calls.into_iter().enumerate() {
        let mut nr_allocations = 0;
        loop {
            let (machine, space) = space::<F>(0, 1 << 30);
            space.map_linear(gpa(0), hpa(0x4000_0000), 8 * MIB, RWX).unwrap();
            space.unmap(gpa(6 * MIB), 2 * MIB).unwrap();
            let seen = || {
                let pages = (0..16 * MIB).step_by(PAGE);
                pages.map(|at| space.translate(gpa(at)).map(|paddr| paddr.as_usize())).collect::<Vec<_>>()
            };
            let (before, frames) = (seen(), machine.frames_in_use());
            machine.memory.fail_after(nr_allocations);
            let result = call(&space);
            machine.memory.fail_after(usize::MAX);
            if result.is_ok() {
                break;
            }
            assert_eq!(result, Err(AddrSpaceError::OutOfMemory), "call {number}, allocation {nr_allocations}");
            assert_eq!(machine.frames_in_use(), frames, "call {number}, allocation {nr_allocations}");
            assert!(seen() == before, "call {number}, allocation {nr_allocations}");
            assert_eq!(call(&space), Ok(()), "call {number}, after allocation {nr_allocations}");
            nr_allocations += if nr_allocations < 8 { 1 } else { 97 };
        }
        assert!(nr_allocations > 0, "call {number} allocates nothing");
    }
}

fn page_table_pages_are_freed_after_the_flush<F: Format>() {
    let (machine, space) = space::<F>(0, 1 << 30);
    for at in [0, 100 * MIB] {
        space.map_linear(gpa(at), hpa(0x4000_1000), 4 * MIB, RW).unwrap();
    }
    machine.take_events();
    space.unmap(gpa(0), 4 * MIB).unwrap();
    let events = machine.take_events();
    let freed = events.iter().position(|event| matches!(event, Event::FreeTable(_))).expect("2 MiB have a table");
    let flushed = events.iter().position(|event| matches!(event, Event::Flush(range) if range.contains(Gfn(0))));
    assert!(flushed.is_some_and(|flushed| flushed < freed), "{events:?}");
}

fn the_live_tables_return_to_one<F: Format>() {
    let (machine, space) = space::<F>(0, 1 << 30);
    for round in 0..3 {
        for at in (0..16).map(|number| number * 50 * MIB + PAGE) {
            space.map_linear(gpa(at), hpa(0x4000_1000), 3 * PAGE, RW).unwrap();
            space.map_alloc(gpa(at + 4 * PAGE), 3 * PAGE, RW, round == 0).unwrap();
        }
        assert!(machine.tables_in_use() > 16);
        for at in (0..16).map(|number| number * 50 * MIB) {
            space.unmap(gpa(at), 8 * PAGE).unwrap();
        }
        assert_eq!((machine.tables_in_use(), machine.frames_in_use()), (1, 0));
        assert_eq!(space.vm().stats().live_tables(), 1);
    }
}

/// One of the crates wipes A and D when it changes flags.
fn write_protection_keeps_accessed_and_dirty<F: Format>() {
    let (_, space) = small_space::<F>();
    space.map_alloc(gpa(0x1_0000), PAGE, RW, false).unwrap();
    assert!(space.handle_page_fault(gpa(0x1_0000), MappingFlags::WRITE));
    let found = || space.vm().translate(Gpa(0x1_0000)).unwrap().unwrap();
    assert!(found().writable && found().accessed);
    let dirty = found().dirty;
    let region = MemoryRegion {
        slot: 0,
        flags: MemoryRegionFlags::LOG_DIRTY_PAGES,
        guest_phys_addr: Gpa(0x1_0000),
        memory_size: PAGE as u64,
        backing: None,
        userfault_bitmap: None,
    };
    space.vm().set_user_memory_region(region).unwrap();
    assert_eq!((found().writable, found().accessed, found().dirty), (false, true, dirty));
}

/// Not "this CPU": each VM has a flush of its own.
fn a_flush_is_of_the_vm<F: Format>() {
    let memory = Memory::new(4096);
    let machines = [Machine::new(&memory), Machine::new(&memory)];
    let spaces = machines.clone().map(|machine| AddrSpace::<_, F>::new_empty(machine, gpa(0), MIB).unwrap());
    for space in &spaces {
        space.map_alloc(gpa(0x1000), PAGE, RW, true).unwrap();
    }
    let before = machines.each_ref().map(|machine| machine.flushes.load(Ordering::SeqCst));
    spaces[1].unmap(gpa(0x1000), PAGE).unwrap();
    assert_eq!(machines[0].flushes.load(Ordering::SeqCst), before[0]);
    assert!(machines[1].flushes.load(Ordering::SeqCst) > before[1]);
    assert!(spaces[0].translate(gpa(0x1000)).is_some());
}

/// The root of Sv39x4 has 11 bits of the address, and its table four pages: with 9 bits, these
/// addresses would be one.
#[test]
fn the_high_part_of_the_root_does_not_alias() {
    let (_, space) = space::<Sv39x4>(0, 1 << 41);
    for quarter in 0..4 {
        space.map_linear(gpa(quarter << 39), hpa(quarter << 30), PAGE, RW).unwrap();
    }
    for quarter in 0..4 {
        assert_eq!(space.translate(gpa(quarter << 39)), Some(hpa(quarter << 30)));
    }
    space.unmap(gpa(1 << 39), PAGE).unwrap();
    assert_eq!(space.translate(gpa(2 << 39)), Some(hpa(2 << 30)));
}

/// A copy of a device gets frames for pages that the guest has not used: it needs no fault.
#[test]
fn a_copy_reaches_lazy_memory() {
    let (machine, space) = small_space::<Ept>();
    space.map_alloc(gpa(0x1_0000), 3 * PAGE, RW, false).unwrap();
    space.write_buffer(gpa(0x1_0ffe), &[1, 2, 3, 4]).unwrap();
    assert_eq!((machine.frames_in_use(), space.translate(gpa(0x1_0000))), (2, None));
    let seen = [0xffe, 0xfff, 0x1000, 0x1001].map(|at| load(&machine, &space, 0, 0x1_0000 + at));
    assert_eq!(seen, [Some(1), Some(2), Some(3), Some(4)]);
}
