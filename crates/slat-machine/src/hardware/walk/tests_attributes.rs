//! What leaves say of execution and of memory, on page tables built by hand, for processors with
//! and without the features that matter. The constants here are the manuals', written once more.

use slat::format::{CpuFeatures, Hardware};
use slat::{Access, Level};

use super::tests::{Way, leaf};
use super::tests_manuals::{EPT, Manual, NPT, STAGE2, SV48X4, VTD};
use super::{ALL_FETCHES, Memory, Stop};
use crate::hardware::tlb::Rights;

const FETCHES: [Access; 2] = [Access::Execute, Access::ExecuteUser];

/// What a read finds of the leaf with these bits of `level`, and which fetches it allows. `None`:
/// it is misconfigured.
fn found(manual: &Manual, level: u8, bits: u64, features: CpuFeatures) -> Option<(Rights, Memory)> {
    let mut way = Way::new(manual, level, leaf_with(manual, level, bits));
    way.processor.features = features;
    let mapping = match way.walk(Access::Read) {
        Ok(mapping) => mapping,
        Err(Stop::Misconfigured(_)) => return None,
        Err(stop) => panic!("{stop}"),
    };
    for (access, right) in FETCHES.into_iter().zip([Rights::EXECUTE, Rights::EXECUTE_USER]) {
        // The TLB and a walk of its own agree.
        assert_eq!(way.walk(access).is_ok(), mapping.fetches.grant(right), "{bits:#x}: {access:?}");
    }
    Some((mapping.fetches, mapping.memory))
}

/// A leaf with these bits.
fn leaf_with(manual: &Manual, level: u8, bits: u64) -> u64 {
    leaf(manual, level) & !manual.leaf_bits(level) | bits
}

#[test]
fn memory_types_of_ept_are_those_of_the_leaf() {
    let none = CpuFeatures::empty();
    for (level, page) in [(1, 0), (2, 1 << 7)] {
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
                assert_eq!(found(&EPT, level, leaf, none), memory.map(|memory| (ALL_FETCHES, memory)), "{number}");
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
                let manual = Manual { link: EPT.link | user, ..EPT };
                let mut way = Way::new(&manual, 1, leaf(&EPT, 1) | user);
                way.processor.features = features;
                way.set(level, way.get(level) & !(4 | user) | execute);
                let permits = |access| match access {
                    Access::ExecuteUser if has_modes => execute & user != 0,
                    _ => execute & 4 != 0,
                };
                for access in FETCHES {
                    let got = way.walk(access);
                    // Fetch, linear address valid and final, and what all entries permit.
                    let of_modes = if has_modes && execute & user != 0 { 1 << 6 } else { 0 };
                    let code = 0x180 | 4 | (0b011 | execute & 4) << 3 | of_modes;
                    let expected = if permits(access) { got } else { way.fault(access, code) };
                    assert_eq!(got, expected, "{execute:#x} at {level}, {features:?}");
                    assert_eq!(got.is_ok(), permits(access));
                }
            }
        }
    }
    // With it, an entry with bit 10 alone is present: only user code may be fetched there.
    let manual = Manual { link: EPT.link | user, ..EPT };
    let mut way = Way::new(&manual, 1, leaf_with(&EPT, 1, user | 6 << 3));
    assert_eq!(way.walk(Access::ExecuteUser), way.fault(Access::ExecuteUser, 0x180 | 4), "not present");
    way.processor.features = CpuFeatures::MBEC;
    assert!(way.walk(Access::ExecuteUser).is_ok());
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
    for (level, pat) in [(1, 1 << 7), (2, 1 << 12)] {
        for (number, memory) in (0..).zip(types) {
            let leaf = leaf(&NPT, level) | (number & 0b11) << 3 | if number & 4 != 0 { pat } else { 0 };
            for (no_execute, fetches) in [(0, ALL_FETCHES), (1 << 63, Rights::NONE)] {
                let mut way = Way::new(&NPT, level, leaf | no_execute);
                way.processor.pat = 0x0407_0506_0007_0106;
                let found = way.walk(Access::Read).unwrap();
                assert_eq!((found.memory, found.fetches), (memory, fetches), "{number} of level {level}");
                way.processor.pat = Hardware::PAT_AT_RESET;
                let found = way.walk(Access::Read).unwrap();
                let after_reset = [Memory::WriteBack, Memory::WriteThrough, Memory::Device, Memory::Device];
                assert_eq!(found.memory, after_reset[(number & 0b11) as usize], "{number}");
            }
        }
    }
}

#[test]
fn memory_of_stage2_depends_on_who_combines_it() {
    let page = 0b11 | 0b11 << 6 | 0b11 << 8;
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
            let found = found(&STAGE2, 1, page | mem_attr << 2, features);
            assert_eq!(found, memory.map(|memory| (ALL_FETCHES, memory)), "{mem_attr:#b}, {features:?}");
        }
    }
}

#[test]
fn stage2_tells_modes_apart_with_xnx() {
    let by_mode = [ALL_FETCHES, Rights::EXECUTE_USER, Rights::NONE, Rights::EXECUTE];
    for (execute_never, fetches) in (0..).zip(by_mode) {
        let leaf = STAGE2.page | execute_never << 53;
        let with = found(&STAGE2, 1, leaf, CpuFeatures::XNX);
        assert_eq!(with, Some((fetches, Memory::WriteBack)), "{execute_never:#b}");
        let without = found(&STAGE2, 1, leaf, CpuFeatures::empty());
        assert_eq!(without, if execute_never & 1 == 0 { with } else { None }, "bit 53 is reserved");
    }
    let mut way = Way::new(&STAGE2, 1, leaf(&STAGE2, 1) | 0b01 << 53);
    way.processor.features = CpuFeatures::XNX;
    // An instruction abort of the lowest level: permission.
    assert_eq!(way.walk(Access::Execute), way.fault(Access::Execute, 0x20 << 26 | 0b001111));
}

#[test]
fn memory_types_of_gstage_need_svpbmt() {
    for (pbmt, memory) in
        [(0, Some(Memory::ByAddress)), (1, Some(Memory::NonCached)), (2, Some(Memory::Device)), (3, None)]
    {
        for (execute, fetches) in [(0, ALL_FETCHES), (1 << 3, Rights::NONE)] {
            let leaf = SV48X4.page & !execute | pbmt << 61;
            let with = found(&SV48X4, 1, leaf, CpuFeatures::SVPBMT);
            assert_eq!(with.is_some(), memory.is_some(), "{pbmt}");
            assert!(with.is_none_or(|found| found == (fetches, memory.unwrap_or(Memory::ByAddress))), "{pbmt}");
            let without = found(&SV48X4, 1, leaf, CpuFeatures::empty());
            assert_eq!(without, if pbmt == 0 { with } else { None }, "{pbmt}: reserved");
        }
    }
    let mut way = Way::new(&SV48X4, 1, leaf(&SV48X4, 1));
    way.processor.features = CpuFeatures::SVPBMT;
    assert!(way.walk(Access::Read).is_ok());
    way.or(2, 2 << 61);
    let bad = way.walk(Access::Read);
    assert!(matches!(bad, Err(Stop::Misconfigured(bad)) if bad.level == Level(2)), "a directory entry has no type");
}

#[test]
fn snoop_control_of_vtd_allows_snp_in_leaves_alone() {
    let snp = 1 << 11;
    for level in 1..=3 {
        let mut way = Way::new(&VTD, level, leaf(&VTD, level) | snp);
        way.processor.features = CpuFeatures::SNOOP_CONTROL;
        assert!(way.walk(Access::Write).is_ok());
        for above in level + 1..=4 {
            way.or(above, snp);
            assert_eq!(way.walk(Access::Read), way.misconfigured(above, Access::Read));
            way.clear(above, snp);
        }
    }
}
