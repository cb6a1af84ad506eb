//! What leaves say of execution and of memory, on page tables built by hand, for processors with
//! and without the features that matter. The constants here are the manuals', written once more.

use slat::format::{CpuFeatures, Ept, Hardware, Npt, Stage2, Sv48x4};
use slat::{Access, Level};

use super::tests::{FRAME, Way};
use super::{ALL_FETCHES, Fault, HardwareFormat, Memory, Stop};
use crate::hardware::tlb::Rights;

const FETCHES: [Access; 2] = [Access::Execute, Access::ExecuteUser];

/// What a read finds of the leaf `leaf` of `level`, and which fetches it allows. `None`: it is
/// misconfigured.
fn found<F: HardwareFormat>(link: u64, level: u8, leaf: u64, features: CpuFeatures) -> Option<(Rights, Memory)> {
    found_by::<F>(Way::new(link, level, leaf), leaf, features)
}

fn found_by<F: HardwareFormat>(mut way: Way, leaf: u64, features: CpuFeatures) -> Option<(Rights, Memory)> {
    way.processor.features = features;
    let mapping = match way.walk::<F>(Access::Read) {
        Ok(mapping) => mapping,
        Err(Stop::Misconfigured(_)) => return None,
        Err(stop) => panic!("{stop}"),
    };
    for (access, right) in FETCHES.into_iter().zip([Rights::EXECUTE, Rights::EXECUTE_USER]) {
        // The TLB and a walk of its own agree.
        assert_eq!(way.walk::<F>(access).is_ok(), mapping.fetches.grant(right), "{leaf:#x}: {access:?}");
    }
    Some((mapping.fetches, mapping.memory))
}

#[test]
fn memory_types_of_ept_are_those_of_the_leaf() {
    let none = CpuFeatures::empty();
    for (level, page) in [(1, FRAME), (2, FRAME & !0x1f_ffff | 1 << 7)] {
        for ignore_pat in [0, 1 << 6] {
            for (number, memory) in [
                (0, Some(Memory::Device)),
                (1, Some(Memory::NonCached)),
                (2, None),
                (3, None),
                (4, Some(Memory::WriteThrough)),
                (5, Some(Memory::WriteThrough)),
                (6, Some(Memory::WriteBack)),
                (7, None),
            ] {
                let leaf = page | 0b111 | number << 3 | ignore_pat;
                assert_eq!(found::<Ept>(7, level, leaf, none), memory.map(|memory| (ALL_FETCHES, memory)), "{number}");
            }
        }
    }
}

/// Every X and X of user mode, in each level.
#[test]
fn ept_tells_modes_apart_with_mode_based_execute_control() {
    let user = 1 << 10;
    for level in 1..=4 {
        for execute in [0, 4, user, 4 | user] {
            for features in [CpuFeatures::empty(), CpuFeatures::MBEC] {
                let has_modes = !features.is_empty();
                let mut way = Way::new(0b111 | user, 1, FRAME | 0b111 | user | 6 << 3);
                way.processor.features = features;
                way.set(level, way.get(level) & !(4 | user) | execute);
                let permits = |access| match access {
                    Access::ExecuteUser if has_modes => execute & user != 0,
                    _ => execute & 4 != 0,
                };
                for access in FETCHES {
                    let got = way.walk::<Ept>(access);
                    // Fetch, linear address valid and final, and what all entries permit.
                    let of_modes = if has_modes && execute & user != 0 { 1 << 6 } else { 0 };
                    let code = 0x180 | 4 | (0b011 | execute & 4) << 3 | of_modes;
                    let fault = Stop::Fault(Fault { gpa: way.gpa, access, code });
                    assert_eq!(got.err(), (!permits(access)).then_some(fault), "{execute:#x} at {level}, {features:?}");
                }
            }
        }
    }
    // With it, an entry with bit 10 alone is present: only user code may be fetched there.
    let mut way = Way::new(0b111 | user, 1, FRAME | user | 6 << 3);
    let no_rights = Fault { gpa: way.gpa, access: Access::ExecuteUser, code: 0x180 | 4 };
    assert_eq!(way.walk::<Ept>(Access::ExecuteUser), Err(Stop::Fault(no_rights)), "not present");
    way.processor.features = CpuFeatures::MBEC;
    assert!(way.walk::<Ept>(Access::ExecuteUser).is_ok());
}

#[test]
fn memory_types_of_npt_are_those_of_the_hosts_pat() {
    // That of Linux: WB, WC, UC-, UC, WB, WP, UC-, WT.
    let types = [
        Memory::WriteBack,
        Memory::NonCached,
        Memory::Device,
        Memory::Device,
        Memory::WriteBack,
        Memory::WriteThrough,
        Memory::Device,
        Memory::WriteThrough,
    ];
    for (level, page, pat) in [(1, FRAME, 1 << 7), (2, FRAME & !0x1f_ffff | 1 << 7, 1 << 12)] {
        for (number, memory) in (0..).zip(types) {
            let leaf = page | 0b111 | (number & 0b11) << 3 | if number & 4 != 0 { pat } else { 0 };
            for (no_execute, fetches) in [(0, ALL_FETCHES), (1 << 63, Rights::NONE)] {
                let mut way = Way::new(7, level, leaf | no_execute);
                way.processor.pat = 0x0407_0506_0007_0106;
                let found = way.walk::<Npt>(Access::Read).unwrap();
                assert_eq!((found.memory, found.fetches), (memory, fetches), "{number} of level {level}");
                way.processor.pat = Hardware::PAT_AT_RESET;
                let found = way.walk::<Npt>(Access::Read).unwrap();
                let after_reset = [Memory::WriteBack, Memory::WriteThrough, Memory::Device, Memory::Device];
                assert_eq!(found.memory, after_reset[(number & 0b11) as usize], "{number}");
            }
        }
    }
}

#[test]
fn memory_of_stage2_depends_on_who_combines_it() {
    let page = FRAME | 0b11 | 0b11 << 6 | 0b11 << 8;
    for mem_attr in 0..16_u64 {
        let combined = match mem_attr {
            0..=3 => Some(Memory::Device),
            4 | 8 | 12 => None,
            5 => Some(Memory::NonCached),
            15 => Some(Memory::WriteBack),
            _ => Some(Memory::WriteThrough),
        };
        let forced = match mem_attr {
            0..=3 => Some(Memory::Device),
            5 => Some(Memory::NonCached),
            6 | 7 => Some(Memory::WriteBack),
            _ => None,
        };
        for (features, memory) in [(CpuFeatures::empty(), combined), (CpuFeatures::FWB, forced)] {
            let found = found::<Stage2>(3, 1, page | mem_attr << 2, features);
            assert_eq!(found, memory.map(|memory| (ALL_FETCHES, memory)), "{mem_attr:#b}, {features:?}");
        }
    }
}

#[test]
fn stage2_tells_modes_apart_with_xnx() {
    let page = FRAME | 0b11 | 0b1111 << 2 | 0b11 << 6 | 0b11 << 8;
    let by_mode = [ALL_FETCHES, Rights::EXECUTE_USER, Rights::NONE, Rights::EXECUTE];
    for (execute_never, fetches) in (0..).zip(by_mode) {
        let leaf = page | execute_never << 53;
        let with = found::<Stage2>(3, 1, leaf, CpuFeatures::XNX);
        assert_eq!(with, Some((fetches, Memory::WriteBack)), "{execute_never:#b}");
        let without = found::<Stage2>(3, 1, leaf, CpuFeatures::empty());
        assert_eq!(without, if execute_never & 1 == 0 { with } else { None }, "bit 53 is reserved");
    }
    let mut way = Way::new(3, 1, page | 0b01 << 53);
    way.processor.features = CpuFeatures::XNX;
    // An instruction abort of the lowest level: permission.
    let fault = Fault { gpa: way.gpa, access: Access::Execute, code: 0x20 << 26 | 0b001111 };
    assert_eq!(way.walk::<Stage2>(Access::Execute), Err(Stop::Fault(fault)));
}

/// A way to a leaf of 4 KiB in RISC-V's format, below the first quarter of a root of four times the
/// size.
fn gstage_way(leaf: u64) -> Way {
    let way = Way::new(0, 1, leaf);
    for level in 2..=4 {
        way.set(level, way.get(level) >> 2 | 1);
    }
    way
}

#[test]
fn memory_types_of_gstage_need_svpbmt() {
    let leaf = FRAME >> 2 | 0b1_1111;
    for (pbmt, memory) in
        [(0, Some(Memory::ByAddress)), (1, Some(Memory::NonCached)), (2, Some(Memory::Device)), (3, None)]
    {
        for (execute, fetches) in [(0, ALL_FETCHES), (1 << 3, Rights::NONE)] {
            let leaf = leaf & !execute | pbmt << 61;
            let with = found_by::<Sv48x4>(gstage_way(leaf), leaf, CpuFeatures::SVPBMT);
            assert_eq!(with.is_some(), memory.is_some(), "{pbmt}");
            assert!(with.is_none_or(|found| found == (fetches, memory.unwrap_or(Memory::ByAddress))), "{pbmt}");
            let without = found_by::<Sv48x4>(gstage_way(leaf), leaf, CpuFeatures::empty());
            assert_eq!(without, if pbmt == 0 { with } else { None }, "{pbmt}: reserved");
        }
    }
    let mut way = gstage_way(leaf);
    way.processor.features = CpuFeatures::SVPBMT;
    assert!(way.walk::<Sv48x4>(Access::Read).is_ok());
    way.or(2, 2 << 61);
    let bad = way.walk::<Sv48x4>(Access::Read);
    assert!(matches!(bad, Err(Stop::Misconfigured(bad)) if bad.level == Level(2)), "a directory entry has no type");
}
