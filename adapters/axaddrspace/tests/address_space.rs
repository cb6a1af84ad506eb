//! The address space as a hypervisor uses it: each call, its results, and its errors.

use std::sync::atomic::Ordering;

use crate::common::*;
use axvm_types::GuestPhysAddr;
use slat::PageSize;
use slat::format::{CpuFeatures, Ept, Format, Hardware, Stage2};
use slat_axaddrspace::{AddrSpace, AddrSpaceError, MappingFlags};

each_format! {
    an_empty_space_has_a_root_and_nothing_else,
    ranges_are_in_the_space_or_not,
    linear_memory_is_there_at_once,
    linear_memory_may_be_above_and_below_the_guests_addresses,
    linear_memory_has_large_pages_where_both_addresses_are_aligned,
    populated_memory_is_there_at_once,
    lazy_memory_comes_by_faults,
    a_fault_needs_an_area_that_allows_it,
    unmapping_all_frees_all,
    unmapping_a_part_leaves_the_rest,
    unmapping_crosses_areas_and_holes,
    holes_can_be_mapped_again,
    a_mapping_may_cross_holes_and_gaps,
    clear_unmaps_everything,
    areas_do_not_overlap,
    bad_ranges_are_refused,
    impossible_flags_are_refused,
    devices_and_shared_memory_are_not_executed,
    translations_end_with_the_space,
    a_limit_is_what_follows,
    buffers_are_pieces_of_memory,
    devices_copy,
    dropping_frees_all,
}

fn translate<F: Format>(space: &AddrSpace<Machine, F>, address: usize) -> Option<usize> {
    space.translate(gpa(address)).map(|paddr| paddr.as_usize())
}

fn an_empty_space_has_a_root_and_nothing_else<F: Format>() {
    let (machine, space) = small_space::<F>();
    assert_eq!((space.base(), space.end(), space.size()), (gpa(0x1_0000), gpa(0x2_0000), 0x1_0000));
    assert_eq!((machine.tables_in_use(), machine.frames_in_use()), (1, 0));
    assert_eq!(space.page_table_levels(), usize::from(F::ROOT_LEVEL.0));
    assert_eq!(space.page_table_root().as_usize() % PAGE, 0);
    assert_eq!(translate(&space, 0x1_0000), None);
    assert!(format!("{space:?}").contains("areas: []"));
    space.clear();
    drop(space);
    assert_eq!(machine.tables_in_use(), 0);
}

fn ranges_are_in_the_space_or_not<F: Format>() {
    let (_, space) = small_space::<F>();
    for (start, size, is_in) in [
        (0x1_0000, 0x1_0000, true),
        (0x1_0000, PAGE, true),
        (0x1_f000, PAGE, true),
        (0x1_0000, 0, true),
        (0xf000, PAGE, false),
        (0x2_0000, PAGE, false),
        (0x1_0000, 0x1_1000, false),
        (0x1_3000, 0xf000, false),
        (usize::MAX, 2, false),
    ] {
        assert_eq!(space.contains_range(gpa(start), size), is_in, "{start:#x} {size:#x}");
    }
}

fn linear_memory_is_there_at_once<F: Format>() {
    let (machine, space) = small_space::<F>();
    space.map_linear(gpa(0x1_8000), hpa(0x10_0000), 0x8000, RW).unwrap();
    for page in 0..8 {
        assert_eq!(translate(&space, 0x1_8000 + page * PAGE + 5), Some(0x10_0000 + page * PAGE + 5));
    }
    assert_eq!((translate(&space, 0x1_7fff), translate(&space, 0x2_0000)), (None, None));
    assert_eq!(space.query(gpa(0x1_8008)), Ok((hpa(0x10_0008), RW, PageSize::Size4K)));
    assert_eq!(machine.frames_in_use(), 0);
    space.unmap(gpa(0x1_8000), 0x8000).unwrap();
    assert_eq!(space.query(gpa(0x1_8008)), Err(AddrSpaceError::Unmapped { address: gpa(0x1_8008) }));
    assert_eq!((machine.frames_in_use(), machine.tables_in_use()), (0, 1));
}

fn linear_memory_may_be_above_and_below_the_guests_addresses<F: Format>() {
    let (_, space) = small_space::<F>();
    for (at, to) in [(0x1_0000, 0), (0x1_2000, 0x1_2000), (0x1_4000, 0xff_f000), (0x1_6000, 0x7f_ffff_e000)] {
        space.map_linear(gpa(at), hpa(to), 2 * PAGE, RW).unwrap();
        assert_eq!(translate(&space, at + PAGE + 1), Some(to + PAGE + 1));
    }
}

fn linear_memory_has_large_pages_where_both_addresses_are_aligned<F: Format>() {
    let (_, space) = space::<F>(0, 64 * MIB);
    space.map_linear(gpa(MIB), hpa(0x4000_0000 + MIB), 8 * MIB, RWX).unwrap();
    for (at, size) in [(MIB, PageSize::Size4K), (2 * MIB, PageSize::Size2M), (8 * MIB, PageSize::Size4K)] {
        assert_eq!(space.query(gpa(at + 7)), Ok((hpa(0x4000_0000 + at + 7), RWX, size)));
    }
    // Not equal modulo 2 MiB.
    space.map_linear(gpa(16 * MIB), hpa(0x4000_1000), 4 * MIB, RWX).unwrap();
    assert_eq!(space.query(gpa(18 * MIB)), Ok((hpa(0x4000_1000 + 2 * MIB), RWX, PageSize::Size4K)));
}

fn populated_memory_is_there_at_once<F: Format>() {
    let (machine, space) = small_space::<F>();
    space.map_alloc(gpa(0x1_0000), 3 * PAGE, RW, true).unwrap();
    assert_eq!(machine.frames_in_use(), 3);
    let frames = [0, 1, 2].map(|page| translate(&space, 0x1_0000 + page * PAGE).unwrap());
    assert!(frames[0] != frames[1] && frames[1] != frames[2] && frames[0] != frames[2]);
    // A fault there is spurious.
    assert!(space.handle_page_fault(gpa(0x1_1004), MappingFlags::WRITE));
    assert_eq!(translate(&space, 0x1_1000), Some(frames[1]));
    // Read-only memory, too.
    space.map_alloc(gpa(0x1_8000), PAGE, MappingFlags::READ, true).unwrap();
    assert_eq!(space.query(gpa(0x1_8000)).map(|(_, flags, _)| flags), Ok(MappingFlags::READ));
}

fn lazy_memory_comes_by_faults<F: Format>() {
    let (machine, space) = small_space::<F>();
    space.map_alloc(gpa(0x1_3000), 2 * PAGE, RW, false).unwrap();
    assert_eq!((machine.frames_in_use(), translate(&space, 0x1_3000)), (0, None));
    assert!(space.handle_page_fault(gpa(0x1_3abc), MappingFlags::READ));
    assert_eq!(machine.frames_in_use(), 1);
    assert!(translate(&space, 0x1_3000).is_some());
    assert_eq!(translate(&space, 0x1_4000), None);
    let mut vcpu = space.create_vcpu().unwrap();
    assert!(vcpu.handle_page_fault(gpa(0x1_4000), MappingFlags::WRITE));
    assert!(!vcpu.handle_page_fault(gpa(0x1_5000), MappingFlags::WRITE));
    assert!(!vcpu.handle_page_fault(gpa(0x2_0000), MappingFlags::WRITE));
    assert_eq!(space.query(gpa(0x1_4000)).map(|(_, flags, size)| (flags, size)), Ok((RW, PageSize::Size4K)));
    // No frame: the fault is not handled, and may be handled later.
    space.map_alloc(gpa(0x1_5000), PAGE, RW, false).unwrap();
    machine.memory.fail_after(0);
    assert!(!space.handle_page_fault(gpa(0x1_5000), MappingFlags::READ));
    machine.memory.fail_after(usize::MAX);
    assert!(space.handle_page_fault(gpa(0x1_5000), MappingFlags::READ));
}

fn a_fault_needs_an_area_that_allows_it<F: Format>() {
    let (machine, space) = small_space::<F>();
    space.map_alloc(gpa(0x1_0000), PAGE, MappingFlags::READ, false).unwrap();
    space.map_alloc(gpa(0x1_1000), PAGE, RW, false).unwrap();
    space.map_alloc(gpa(0x1_2000), PAGE, RWX, false).unwrap();
    space.map_linear(gpa(0x1_3000), hpa(0x10_0000), PAGE, MappingFlags::READ).unwrap();
    let (read, write, execute) = (MappingFlags::READ, MappingFlags::WRITE, MappingFlags::EXECUTE);
    for (page, access, is_handled) in [
        (0, write, false),
        (0, execute, false),
        (0, read, true),
        (0, write, false),
        (1, execute, false),
        (1, RW, true),
        (1, RWX, false),
        (2, RWX, true),
        (2, MappingFlags::empty(), true),
        (3, write, false),
        (3, execute, false),
        // It is mapped: another CPU may have an older translation.
        (3, read, true),
        (4, read, false),
    ] {
        assert_eq!(space.handle_page_fault(gpa(0x1_0000 + page * PAGE), access), is_handled, "{page} {access:?}");
    }
    assert_eq!(machine.frames_in_use(), 3);
    assert!(!space.handle_page_fault(gpa(0xf000), read), "before the space");
    assert!(!space.handle_page_fault(gpa(0x2_0000), read), "after the space");
    assert!(!space.handle_page_fault(gpa(usize::MAX), read), "no address");
}

fn unmapping_all_frees_all<F: Format>() {
    let (machine, space) = small_space::<F>();
    for populate in [true, false] {
        space.map_alloc(gpa(0x1_5000), 2 * PAGE, RW, populate).unwrap();
        assert!(space.handle_page_fault(gpa(0x1_5000), MappingFlags::WRITE));
        space.unmap(gpa(0x1_5000), 2 * PAGE).unwrap();
        assert_eq!((machine.frames_in_use(), machine.tables_in_use()), (0, 1));
        assert_eq!((translate(&space, 0x1_5000), translate(&space, 0x1_6000)), (None, None));
        assert!(!space.handle_page_fault(gpa(0x1_5000), MappingFlags::READ));
    }
    // Nothing is there, and there is nothing.
    space.unmap(gpa(0x1_0000), 0x1_0000).unwrap();
    space.unmap(gpa(0x1_0000), 0).unwrap();
}

fn unmapping_a_part_leaves_the_rest<F: Format>() {
    for lazily in [false, true] {
        let (machine, space) = small_space::<F>();
        space.map_alloc(gpa(0x1_0000), 6 * PAGE, RW, !lazily).unwrap();
        for page in 0..6 {
            assert!(space.handle_page_fault(gpa(0x1_0000 + page * PAGE), MappingFlags::WRITE));
        }
        let frames: Vec<_> = (0..6).map(|page| translate(&space, 0x1_0000 + page * PAGE)).collect();
        // The middle, the beginning, the end.
        for (first, nr_pages) in [(2, 1), (0, 1), (5, 1)] {
            space.unmap(gpa(0x1_0000 + first * PAGE), nr_pages * PAGE).unwrap();
        }
        for page in [1, 3, 4] {
            assert_eq!(translate(&space, 0x1_0000 + page * PAGE), frames[page]);
            assert!(space.handle_page_fault(gpa(0x1_0000 + page * PAGE), MappingFlags::WRITE));
        }
        for page in [0, 2, 5] {
            assert_eq!(translate(&space, 0x1_0000 + page * PAGE), None);
            assert!(!space.handle_page_fault(gpa(0x1_0000 + page * PAGE), MappingFlags::WRITE));
        }
        assert_eq!(machine.frames_in_use(), 3);
    }
}

fn unmapping_crosses_areas_and_holes<F: Format>() {
    let (machine, space) = small_space::<F>();
    space.map_alloc(gpa(0x1_1000), 3 * PAGE, RW, true).unwrap();
    space.map_linear(gpa(0x1_6000), hpa(0x10_0000), 3 * PAGE, RW).unwrap();
    space.map_alloc(gpa(0x1_9000), 3 * PAGE, RW, false).unwrap();
    assert!(space.handle_page_fault(gpa(0x1_9000), MappingFlags::WRITE));
    space.unmap(gpa(0x1_2000), 0x8000).unwrap();
    let mapped: Vec<_> = (0..16).filter(|page| translate(&space, 0x1_0000 + page * PAGE).is_some()).collect();
    assert_eq!((mapped, machine.frames_in_use()), (vec![1], 1));
    // What is left of the lazy area still comes by faults.
    assert!(!space.handle_page_fault(gpa(0x1_9000), MappingFlags::WRITE));
    assert!(space.handle_page_fault(gpa(0x1_a000), MappingFlags::WRITE));
}

/// In holes of each kind of area, areas of each kind.
fn holes_can_be_mapped_again<F: Format>() {
    for around in 0..3 {
        for inside in 0..3 {
            let (machine, space) = small_space::<F>();
            let map = |kind, at, nr_pages| match kind {
                0 => space.map_linear(gpa(at), hpa(0x10_0000 + at), nr_pages * PAGE, RW),
                1 => space.map_alloc(gpa(at), nr_pages * PAGE, RW, true),
                _ => space.map_alloc(gpa(at), nr_pages * PAGE, MappingFlags::READ, false),
            };
            map(around, 0x1_0000, 8).unwrap();
            let outside = translate(&space, 0x1_0000);
            for _ in 0..3 {
                space.unmap(gpa(0x1_2000), 3 * PAGE).unwrap();
                assert_eq!(translate(&space, 0x1_2000), None);
                map(inside, 0x1_2000, 3).unwrap();
                assert!(space.handle_page_fault(gpa(0x1_4000), MappingFlags::READ));
                let linear = translate(&space, 0x1_4000) == Some(0x11_4000);
                assert_eq!(linear, inside == 0, "{around} {inside}");
                assert_eq!(space.handle_page_fault(gpa(0x1_4000), MappingFlags::WRITE), inside != 2);
                assert_eq!(map(inside, 0x1_2000, 3), Err(AddrSpaceError::MappingConflict));
                assert_eq!(translate(&space, 0x1_0000), outside);
            }
            space.unmap(gpa(0x1_0000), 8 * PAGE).unwrap();
            assert_eq!((machine.frames_in_use(), machine.tables_in_use()), (0, 1), "{around} {inside}");
        }
    }
}

fn a_mapping_may_cross_holes_and_gaps<F: Format>() {
    let (machine, space) = small_space::<F>();
    space.map_linear(gpa(0x1_1000), hpa(0x10_0000), 4 * PAGE, RW).unwrap();
    space.map_alloc(gpa(0x1_6000), 4 * PAGE, RW, true).unwrap();
    space.unmap(gpa(0x1_3000), 5 * PAGE).unwrap();
    // The end of the one, the gap between, and the beginning of the other.
    space.map_linear(gpa(0x1_3000), hpa(0x20_0000), 5 * PAGE, RW).unwrap();
    for page in 0..5 {
        assert_eq!(translate(&space, 0x1_3000 + page * PAGE), Some(0x20_0000 + page * PAGE));
    }
    assert_eq!(translate(&space, 0x1_2000), Some(0x10_1000));
    space.unmap(gpa(0x1_4000), PAGE).unwrap();
    assert_eq!((translate(&space, 0x1_4000), translate(&space, 0x1_5000)), (None, Some(0x20_2000)));
    space.unmap(gpa(0x1_0000), 0x1_0000).unwrap();
    assert_eq!((machine.frames_in_use(), machine.tables_in_use()), (0, 1));
}

fn clear_unmaps_everything<F: Format>() {
    let (machine, space) = small_space::<F>();
    space.map_alloc(gpa(0x1_6000), PAGE, RW, true).unwrap();
    space.map_alloc(gpa(0x1_7000), PAGE, RW, false).unwrap();
    space.map_linear(gpa(0x1_8000), hpa(0x10_0000), PAGE, RW).unwrap();
    space.clear();
    assert!((0..16).all(|page| translate(&space, 0x1_0000 + page * PAGE).is_none()));
    assert_eq!((machine.frames_in_use(), machine.tables_in_use()), (0, 1));
    space.map_linear(gpa(0x1_0000), hpa(0x10_0000), 0x1_0000, RW).unwrap();
    assert_eq!(translate(&space, 0x1_6000), Some(0x10_6000));
}

fn areas_do_not_overlap<F: Format>() {
    let (machine, space) = small_space::<F>();
    space.map_alloc(gpa(0x1_4000), 4 * PAGE, RW, true).unwrap();
    let tables = machine.tables_in_use();
    for (first, nr_pages) in [(4, 4), (3, 2), (7, 2), (5, 1), (0, 16)] {
        let (start, size) = (gpa(0x1_0000 + first * PAGE), nr_pages * PAGE);
        assert_eq!(space.map_alloc(start, size, RW, false), Err(AddrSpaceError::MappingConflict));
        assert_eq!(space.map_alloc(start, size, RW, true), Err(AddrSpaceError::MappingConflict));
        assert_eq!(space.map_linear(start, hpa(0x10_0000), size, RW), Err(AddrSpaceError::MappingConflict));
    }
    assert_eq!((machine.frames_in_use(), machine.tables_in_use()), (4, tables));
    // Neighbours do not.
    space.map_alloc(gpa(0x1_3000), PAGE, RW, true).unwrap();
    space.map_linear(gpa(0x1_8000), hpa(0x10_0000), PAGE, RW).unwrap();
}

fn bad_ranges_are_refused<F: Format>() {
    let (_, space) = small_space::<F>();
    let base = 0x1_0000;
    let all = |start: usize, size: usize| {
        let linear = space.map_linear(gpa(start), hpa(0), size, RW);
        assert_eq!(space.map_alloc(gpa(start), size, RW, false), linear);
        let unmapped = space.unmap(gpa(start), size);
        (linear, unmapped)
    };
    for (start, size) in [(base - PAGE, PAGE), (base + 0x1_0000, PAGE), (base, 0x1_1000), (base + 0xf000, 2 * PAGE)] {
        let (space_start, space_end) = (gpa(base), gpa(0x2_0000));
        let error = Err(AddrSpaceError::OutOfRange { start: gpa(start), size, space_start, space_end });
        assert_eq!(all(start, size), (error.clone(), error));
    }
    for (start, size) in [(usize::MAX - 0xfff, 2 * PAGE), (usize::MAX, 1)] {
        let error = Err(AddrSpaceError::AddressOverflow { start, size });
        assert_eq!(all(start, size), (error.clone(), error));
    }
    for (start, size) in [(base + 1, PAGE), (base, PAGE + 1), (base + 0x800, 0x800)] {
        let (linear, unmapped) = all(start, size);
        assert!(matches!(linear, Err(AddrSpaceError::Unaligned { alignment: PAGE, .. })), "{linear:?}");
        assert_eq!(linear, unmapped);
    }
    assert_eq!(all(base, 0), (Err(AddrSpaceError::InvalidMapping), Ok(())));
    let linear = |start: usize, size| space.map_linear(gpa(base), hpa(start), size, RW);
    let (value, alignment) = (0x10_0800, PAGE);
    assert_eq!(
        linear(value, PAGE),
        Err(AddrSpaceError::Unaligned { subject: "host-physical address", value, alignment })
    );
    let (start, size) = (usize::MAX - 0xfff, 2 * PAGE);
    assert_eq!(linear(start, size), Err(AddrSpaceError::AddressOverflow { start, size }));
    // More bits than a PTE has.
    assert_eq!(linear(1 << 60, PAGE), Err(AddrSpaceError::InvalidMapping));
    assert!(space.map_linear(gpa(base), hpa(0), PAGE, RW).is_ok(), "nothing is left of what was refused");
}

fn impossible_flags_are_refused<F: Format>() {
    let (machine, space) = small_space::<F>();
    let device = MappingFlags::READ | MappingFlags::DEVICE;
    for flags in [
        MappingFlags::empty(),
        MappingFlags::WRITE,
        MappingFlags::EXECUTE,
        MappingFlags::USER,
        device | MappingFlags::EXECUTE,
    ] {
        assert_eq!(space.map_linear(gpa(0x1_0000), hpa(0), PAGE, flags), Err(AddrSpaceError::InvalidMapping));
        for populate in [false, true] {
            assert_eq!(space.map_alloc(gpa(0x1_0000), PAGE, flags, populate), Err(AddrSpaceError::InvalidMapping));
        }
    }
    assert_eq!((machine.frames_in_use(), machine.tables_in_use()), (0, 1));
    space.map_linear(gpa(0x1_0000), hpa(0), PAGE, device | MappingFlags::USER).unwrap();
}

/// As AxVM maps them. (RISC-V needs Svpbmt to say what is a device; without, its regions do.)
fn devices_and_shared_memory_are_not_executed<F: Format>() {
    let machine = Machine::new(&Memory::new(256));
    let features = F::FEATURES.intersection(CpuFeatures::SVPBMT);
    // For AMD: a host whose PAT has write combining.
    let hardware = Hardware { features, pat: 0x0007_0401_0007_0406, ..Hardware::default() };
    let config = slat::Config::default().with_hardware(hardware);
    let space = AddrSpace::<Machine, F>::with_config(machine, config, gpa(0), 0x10_0000).unwrap();
    let device = RW | MappingFlags::DEVICE;
    let shared = RW;
    let uncached = RW | MappingFlags::UNCACHED;
    space.map_linear(gpa(0x1000), hpa(0xfe00_0000), PAGE, device | MappingFlags::USER).unwrap();
    space.map_alloc(gpa(0x2000), PAGE, shared, true).unwrap();
    space.map_alloc(gpa(0x3000), PAGE, uncached, false).unwrap();
    assert!(space.handle_page_fault(gpa(0x3000), MappingFlags::WRITE));
    for (at, flags) in [(0x1000, device), (0x2000, shared), (0x3000, uncached)] {
        assert_eq!(space.query(gpa(at)).map(|(_, flags, _)| flags), Ok(flags));
        assert!(space.handle_page_fault(gpa(at), MappingFlags::READ));
        assert!(space.handle_page_fault(gpa(at), MappingFlags::WRITE));
        assert!(!space.handle_page_fault(gpa(at), MappingFlags::EXECUTE));
    }
}

fn translations_end_with_the_space<F: Format>() {
    let (_, space) = small_space::<F>();
    space.map_linear(gpa(0x1_0000), hpa(0x10_0000), 0x1_0000, RW).unwrap();
    for address in [0, 0xffff, 0x2_0000, 1 << 50, usize::MAX] {
        assert_eq!(translate(&space, address), None);
        assert_eq!(space.query(gpa(address)), Err(AddrSpaceError::Unmapped { address: gpa(address) }));
        assert_eq!(space.translate_and_get_limit(gpa(address)), None);
    }
}

fn a_limit_is_what_follows<F: Format>() {
    let (machine, space) = small_space::<F>();
    space.map_linear(gpa(0x1_0000), hpa(0x10_0000), 3 * PAGE, RW).unwrap();
    assert_eq!(space.translate_and_get_limit(gpa(0x1_0000)), Some((hpa(0x10_0000), 3 * PAGE)));
    assert_eq!(space.translate_and_get_limit(gpa(0x1_1004)), Some((hpa(0x10_1004), 2 * PAGE - 4)));
    space.unmap(gpa(0x1_2000), PAGE).unwrap();
    assert_eq!(space.translate_and_get_limit(gpa(0x1_0000)), Some((hpa(0x10_0000), 2 * PAGE)));
    assert_eq!(space.translate_and_get_limit(gpa(0x1_2000)), None);
    // Allocated memory: as far as frames follow each other. The page in the middle gets its frame
    // later than the others.
    space.map_alloc(gpa(0x1_4000), 3 * PAGE, RW, false).unwrap();
    for page in [0, 2, 1] {
        assert!(space.translate_and_get_limit(gpa(0x1_4000 + page * PAGE)).is_some());
    }
    assert_eq!(machine.frames_in_use(), 3);
    let limit = space.translate_and_get_limit(gpa(0x1_4010)).map(|(_, limit)| limit);
    assert_eq!(limit, Some(PAGE - 0x10));
    space.map_alloc(gpa(0x1_8000), 3 * PAGE, RW, true).unwrap();
    let limit = space.translate_and_get_limit(gpa(0x1_8010)).map(|(_, limit)| limit);
    assert_eq!(limit, Some(3 * PAGE - 0x10));
}

fn buffers_are_pieces_of_memory<F: Format>() {
    let (machine, space) = small_space::<F>();
    space.map_linear(gpa(0x1_0000), hpa(0x10_0000), 2 * PAGE, RW).unwrap();
    space.map_alloc(gpa(0x1_2000), 2 * PAGE, RW, false).unwrap();
    let lengths = |at: usize, len| {
        let pieces = space.translated_byte_buffer(gpa(at), len)?;
        Some(pieces.iter().map(|piece| piece.len()).collect::<Vec<_>>())
    };
    assert_eq!(lengths(0x1_0800, 0x1100), Some(vec![0x1100]));
    assert_eq!(lengths(0x1_1ff0, 0x20), Some(vec![0x10, 0x10]), "two areas");
    assert_eq!(machine.frames_in_use(), 1, "only what is needed");
    assert_eq!(lengths(0x1_0000, 0), Some(vec![]));
    assert_eq!(lengths(0x1_0000, 4 * PAGE).map(|lengths| lengths.iter().sum()), Some(4 * PAGE));
    for (at, len) in [(0x1_0000, 4 * PAGE + 1), (0x1_4000, 1), (0xffff, 2), (0x1_3fff, 2), (0x1_0000, usize::MAX)] {
        assert_eq!(lengths(at, len), None, "{at:#x} {len:#x}");
    }
    let pieces = space.translated_byte_buffer(gpa(0x1_2004), 1).unwrap();
    // SAFETY: mapped, and nothing else uses it.
    unsafe { pieces[0].cast::<u8>().write(42) };
    assert_eq!(load(&machine, &space, 0, 0x1_2004), Some(42));
}

fn devices_copy<F: Format>() {
    let (machine, space) = small_space::<F>();
    space.map_linear(gpa(0x1_0000), hpa(0x10_0000), 2 * PAGE, RW).unwrap();
    space.map_alloc(gpa(0x1_2000), 2 * PAGE, RW, false).unwrap();
    space.map_alloc(gpa(0x1_4000), PAGE, MappingFlags::READ, false).unwrap();
    space.map_linear(gpa(0x1_8000), hpa(0xfe00_0000), PAGE, RW | MappingFlags::DEVICE).unwrap();
    let text: Vec<u8> = (0..4 * PAGE).map(|index| (index % 251) as u8).collect();
    for (at, len) in [(0, 4 * PAGE), (1, 1), (7, 2), (0x1ffd, 6), (0xff9, 0x2007), (3, 0)] {
        space.write_buffer(gpa(0x1_0000 + at), &text[..len]).unwrap();
        let mut found = vec![0; len];
        space.read_buffer(gpa(0x1_0000 + at), &mut found).unwrap();
        assert_eq!(found, text[..len]);
        if len > 0 {
            assert_eq!(load(&machine, &space, 0, 0x1_0000 + at), Some(text[0]));
            assert_eq!(load(&machine, &space, 0, 0x1_0000 + at + len - 1), Some(text[len - 1]));
        }
    }
    // The guest may not write there, and a device is no memory.
    let mut found = [1; 4];
    space.read_buffer(gpa(0x1_4000), &mut found).unwrap();
    assert_eq!(found, [0; 4]);
    for at in [0x1_4000, 0x1_8000] {
        assert_eq!(space.write_buffer(gpa(at), &[1]), Err(AddrSpaceError::Unmapped { address: gpa(at) }));
    }
    assert_eq!(space.read_buffer(gpa(0x1_8000), &mut found), Err(AddrSpaceError::Unmapped { address: gpa(0x1_8000) }));
    // Nothing is written of a copy that does not fit.
    let (address, requested, available) = (gpa(0x1_3ffe), 4, 2);
    let error = AddrSpaceError::InsufficientAccess { operation: "write guest memory", address, requested, available };
    assert_eq!(space.write_buffer(address, &[9; 4]), Err(error));
    assert_ne!(load(&machine, &space, 0, 0x1_3ffe), Some(9));
    assert!(matches!(space.read_buffer(gpa(usize::MAX), &mut found), Err(AddrSpaceError::AddressOverflow { .. })));
}

fn dropping_frees_all<F: Format>() {
    let (machine, space) = small_space::<F>();
    space.map_alloc(gpa(0x1_0000), 4 * PAGE, RW, true).unwrap();
    space.map_linear(gpa(0x1_8000), hpa(0x10_0000), 4 * PAGE, RW).unwrap();
    let mut vcpu = space.create_vcpu().unwrap();
    drop(space);
    assert_eq!((machine.frames_in_use(), machine.tables_in_use()), (0, 1), "the vCPU keeps the root");
    assert!(!vcpu.handle_page_fault(gpa(0x1_0000), MappingFlags::READ));
    drop(vcpu);
    assert_eq!(machine.tables_in_use(), 0);
}

#[test]
fn a_space_beyond_the_page_tables_is_refused() {
    let machine = Machine::new(&Memory::new(256));
    let new = |base: usize, size| AddrSpace::<Machine, Ept>::new_empty(machine.clone(), gpa(base), size).map(drop);
    assert_eq!(new(0, 1 << 48), Ok(()));
    assert!(matches!(new(0, (1 << 48) + PAGE), Err(AddrSpaceError::OutOfRange { .. })));
    assert_eq!(new(usize::MAX, PAGE), Err(AddrSpaceError::AddressOverflow { start: usize::MAX, size: PAGE }));
    assert_eq!(machine.tables_in_use(), 0);
    machine.memory.fail_after(0);
    assert_eq!(new(0, PAGE), Err(AddrSpaceError::OutOfMemory));
}

/// An Arm board with 40 bits: 3 levels, and two root tables behind each other.
#[test]
fn the_geometry_is_the_hardwares() {
    let machine = Machine::new(&Memory::new(256));
    let hardware = Hardware { gpa_bits: Some(40), levels: Some(3), ..Hardware::default() };
    let config = slat::Config::default().with_hardware(hardware);
    let space = AddrSpace::<Machine, Stage2>::with_config(machine.clone(), config, gpa(0), 1 << 40).unwrap();
    assert_eq!((space.page_table_levels(), space.page_table_root().as_usize() % (2 * PAGE)), (3, 0));
    let last = GuestPhysAddr::from_usize((1 << 40) - PAGE);
    space.map_linear(last, hpa(0x10_0000), PAGE, RW).unwrap();
    assert_eq!(space.translate(last), Some(hpa(0x10_0000)));
    assert!(AddrSpace::<Machine, Stage2>::with_config(machine.clone(), config, gpa(0), (1 << 40) + PAGE).is_err());
    // A configuration that the format does not have.
    let hardware = Hardware { levels: Some(7), ..Hardware::default() };
    let config = slat::Config::default().with_hardware(hardware);
    let refused = AddrSpace::<Machine, Stage2>::with_config(machine, config, gpa(0), PAGE).map(drop);
    assert_eq!(refused, Err(AddrSpaceError::InvalidMapping));
}

/// The dirty log, which the original does not have: of lazy memory, with what devices write.
#[test]
fn lazy_memory_has_a_dirty_log() {
    use slat::{Gpa, MemoryRegion, MemoryRegionFlags};
    let (machine, space) = small_space::<Ept>();
    space.map_alloc(gpa(0x1_0000), 4 * PAGE, RW, true).unwrap();
    let region = MemoryRegion {
        slot: 0,
        flags: MemoryRegionFlags::LOG_DIRTY_PAGES,
        guest_phys_addr: Gpa(0x1_0000),
        memory_size: 4 * PAGE as u64,
        backing: None,
        userfault_bitmap: None,
    };
    space.vm().set_user_memory_region(region).unwrap();
    assert!(space.handle_page_fault(gpa(0x1_0000), MappingFlags::WRITE));
    space.write_buffer(gpa(0x1_2ffc), &[1; 8]).unwrap();
    let mut log = [0];
    assert_eq!((space.vm().get_dirty_log(0, &mut log), log), (Ok(3), [0b1101]));
    assert!(machine.flushes.load(Ordering::SeqCst) > 0);
}
