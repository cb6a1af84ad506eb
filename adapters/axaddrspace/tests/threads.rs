//! Several threads at one address space, which takes `&self`.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use crate::common::*;
use slat::format::Format;
use slat_axaddrspace::MappingFlags;

each_format! {
    two_vcpus_fault_one_page_and_neither_fails,
    no_cpu_sees_a_frame_of_another,
    threads_map_and_unmap_their_own_parts,
    copies_and_unmappings_exclude_each_other,
}

fn two_vcpus_fault_one_page_and_neither_fails<F: Format>() {
    const NR_PAGES: usize = 512;
    let (machine, space) = space::<F>(0, 16 * MIB);
    machine.records.store(false, Ordering::Relaxed);
    space.map_alloc(gpa(0), NR_PAGES * PAGE, RW, false).unwrap();
    let barrier = Barrier::new(3);
    thread::scope(|scope| {
        for number in 0..3 {
            let (space, barrier) = (&space, &barrier);
            scope.spawn(move || {
                let mut vcpu = space.create_vcpu().unwrap();
                for page in 0..NR_PAGES {
                    if page % 64 == 0 {
                        barrier.wait();
                    }
                    let at = gpa(page * PAGE);
                    let is_handled = match number {
                        0 => vcpu.handle_page_fault(at, MappingFlags::WRITE),
                        _ => space.handle_page_fault(at, MappingFlags::WRITE),
                    };
                    assert!(is_handled && space.translate(at).is_some());
                }
            });
        }
    });
    assert_eq!(machine.frames_in_use(), NR_PAGES);
}

/// Two vCPUs read and write, while a thread unmaps and maps their memory. Freed frames are poisoned,
/// and other memory has them next.
fn no_cpu_sees_a_frame_of_another<F: Format>() {
    let (machine, space) = space::<F>(0, 16 * MIB);
    machine.records.store(false, Ordering::Relaxed);
    let is_done = AtomicBool::new(false);
    let nr_loads = AtomicUsize::new(0);
    space.map_alloc(gpa(0), 8 * PAGE, RW, false).unwrap();
    thread::scope(|scope| {
        for cpu in 0..2 {
            let (machine, space, is_done, nr_loads) = (&machine, &space, &is_done, &nr_loads);
            scope.spawn(move || {
                let mut page = cpu;
                while !is_done.load(Ordering::Relaxed) {
                    page = (page + 3) % 8;
                    if let Some(found) = load(machine, space, cpu, page * PAGE) {
                        assert_eq!(found, 0, "another's frame");
                        nr_loads.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        let mut round = 0;
        while round < 200 || nr_loads.load(Ordering::Relaxed) < 1000 {
            let (first, nr_pages) = (round % 5, 1 + round % 4);
            space.unmap(gpa(first * PAGE), nr_pages * PAGE).unwrap();
            space.map_alloc(gpa(first * PAGE), nr_pages * PAGE, RW, round % 3 == 0).unwrap();
            round += 1;
            if round % 16 == 0 {
                thread::yield_now();
            }
        }
        is_done.store(true, Ordering::Relaxed);
    });
    space.clear();
    assert_eq!(machine.frames_in_use(), 0);
    // The vCPUs of faults may keep page-table pages for the next one.
    drop(space);
    assert_eq!(machine.tables_in_use(), 0);
}

fn threads_map_and_unmap_their_own_parts<F: Format>() {
    let (machine, space) = space::<F>(0, 64 * MIB);
    machine.records.store(false, Ordering::Relaxed);
    thread::scope(|scope| {
        for part in 0..3 {
            let space = &space;
            scope.spawn(move || {
                let start = part * 16 * MIB;
                for round in 0..40 {
                    space.map_linear(gpa(start), hpa(0x4000_0000 + start), 4 * MIB, RW).unwrap();
                    space.map_alloc(gpa(start + 4 * MIB), 4 * PAGE, RW, round % 2 == 0).unwrap();
                    assert!(space.handle_page_fault(gpa(start + 4 * MIB), MappingFlags::WRITE));
                    space.unmap(gpa(start + round * PAGE), PAGE).unwrap();
                    assert_eq!(space.translate(gpa(start + round * PAGE)), None);
                    let last = start + 4 * MIB - PAGE;
                    assert_eq!(space.translate(gpa(last)), Some(hpa(0x4000_0000 + last)));
                    space.unmap(gpa(start), 16 * MIB).unwrap();
                }
            });
        }
    });
    assert_eq!(machine.frames_in_use(), 0);
    drop(space);
    assert_eq!(machine.tables_in_use(), 0);
}

/// A device copies pages that a thread unmaps: the copy is complete, or an error.
fn copies_and_unmappings_exclude_each_other<F: Format>() {
    let (machine, space) = space::<F>(0, 16 * MIB);
    machine.records.store(false, Ordering::Relaxed);
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut buffer, mut nr_read) = (vec![0; 3 * PAGE], 0);
            while !is_done.load(Ordering::Relaxed) || nr_read == 0 {
                let _ = space.write_buffer(gpa(PAGE / 2), &vec![1; 3 * PAGE]);
                if space.read_buffer(gpa(PAGE / 2), &mut buffer).is_ok() {
                    assert!(buffer.iter().all(|byte| *byte <= 1), "a frame that was freed");
                    nr_read += 1;
                }
            }
        });
        for round in 0..300 {
            space.map_alloc(gpa(0), 4 * PAGE, RW, round % 2 == 0).unwrap();
            thread::yield_now();
            space.unmap(gpa(round % 4 * PAGE), PAGE).unwrap();
            space.unmap(gpa(0), 4 * PAGE).unwrap();
        }
        space.map_alloc(gpa(0), 4 * PAGE, RW, false).unwrap();
        is_done.store(true, Ordering::Relaxed);
    });
}
