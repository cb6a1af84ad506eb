//! Geometries at their ends, attributes in every state of a leaf, and address bits that only
//! hardware sees.

extern crate std;

use std::vec::Vec;

use super::*;
use crate::addr::Access;
use crate::format::{Ept, Execute, MemoryType, Npt, Stage2, Sv39x4, Sv48x4, Sv57x4, Vtd};
use crate::table::invalidation_seq::InvalidationSeq;
use crate::table::pte::{Breaking, Frozen};

/// Every CPU that the format distinguishes.
fn cpus<F: Format>() -> Vec<Hardware> {
    let pats = [Hardware::PAT_AT_RESET, 0x0407_0506_0007_0106];
    let bits = (0..=CpuFeatures::all().bits())
        .map(CpuFeatures::from_bits_retain)
        .filter(|features| (F::FEATURES).contains(*features));
    bits.flat_map(|features| pats.map(|pat| Hardware { features, pat, ..Hardware::default() })).collect()
}

fn keeps_attributes<F: Format>() {
    for hardware in cpus::<F>() {
        let encoding = Encoding::<F>::new(&hardware).unwrap();
        for attributes in (0..LeafAttributes::COUNT).map(LeafAttributes::from_number) {
            let Some(bits) = encoding.attribute_bits(attributes) else {
                assert_ne!(attributes, LeafAttributes::default());
                continue;
            };
            assert!(!attributes.memory.is_device() || attributes.execute == Execute::None, "{attributes:?}");
            assert_eq!(encoding.attribute_bits(encoding.attributes_of(bits)), Some(bits), "{}", F::NAME);
            assert_eq!(encoding.attributes_of(bits).execute, attributes.execute, "{}", F::NAME);
            for level in [Level::L4K, Level::L2M, Level::L1G] {
                keeps_bits(&encoding, bits, attributes, level);
            }
        }
    }
}

/// A leaf of `level` with the attribute bits `bits` keeps them, whatever becomes of it.
fn keeps_bits<F: Format>(encoding: &Encoding<F>, bits: u64, attributes: LeafAttributes, level: Level) {
    let pfn = Pfn(3 << 18);
    let leaf = encoding.leaf(pfn, level, bits).with(F::HOST_WRITABLE | F::WRITABLE | F::ACCESSED);
    let tracked = leaf.tracked(level);
    for value in [leaf, tracked, tracked.untracked(level)] {
        assert!(value.is_leaf(level), "{}: {attributes:?}", F::NAME);
        assert_eq!((value.attribute_bits(level), encoding.frame(value, level)), (bits, pfn), "{}", F::NAME);
        let Frozen::Leaf(before) = value.frozen_as_was(level).before_freezing(level) else {
            panic!("a frozen leaf was a leaf")
        };
        assert_eq!((before.attribute_bits(level), encoding.frame(before, level)), (bits, pfn), "{}", F::NAME);
        if level > Level::L4K {
            let part = value.parts(level)(511);
            let lower = level.down();
            assert_eq!(part.attribute_bits(lower), bits, "{}", F::NAME);
            assert_eq!(encoding.frame(part, lower), Pfn(pfn.0 + 511 * lower.nr_pages()), "{}", F::NAME);
        }
    }
    assert_eq!(encoding.frame(leaf.behind(3, level), level), Pfn(pfn.0 + 3 * level.nr_pages()));
    // By mode only where there are modes; elsewhere both are one.
    let permits = |access| attributes.execute.permits(access);
    assert_eq!(leaf.may_execute(Access::Execute), permits(Access::Execute), "{}: {attributes:?}", F::NAME);
    assert_eq!(leaf.may_execute(Access::ExecuteUser), permits(Access::ExecuteUser), "{}: {attributes:?}", F::NAME);
}

#[test]
fn a_leaf_keeps_its_attributes_in_every_state() {
    crate::for_each_format!(F => {
        keeps_attributes::<F>();
    });
}

/// The attribute bits of a leaf of 4 KiB.
fn bits_of<F: Format>(features: CpuFeatures, memory: MemoryType, execute: Execute) -> Option<u64> {
    let encoding = Encoding::<F>::new(&Hardware { features, ..Hardware::default() }).unwrap();
    encoding.attribute_bits(LeafAttributes { memory, execute })
}

/// With mode-based execute control an entry with bit 10 alone is present (Intel SDM vol. 3C, "EPT
/// Translation Mechanism").
#[test]
fn no_pte_that_is_not_present_has_a_right_of_ept() {
    let encoding = Encoding::<Ept>::new(&Hardware { features: CpuFeatures::MBEC, ..Hardware::default() }).unwrap();
    let bits = encoding.attribute_bits(LeafAttributes::default()).unwrap();
    let table = Pte::<Ept>::table(Hpa(0x5_4321_0000));
    let mut absent = std::vec![Pte::<Ept>::FROZEN, Pte::empty(InvalidationSeq::FIRST)];
    absent.extend([Breaking::Recovery, Breaking::Split].map(|breaking| Pte::broken(table, breaking)));
    absent.push(table.frozen_as_was(Level::L2M));
    for level in [Level::L4K, Level::L2M] {
        let leaf = encoding.leaf(Pfn(3 << 18), level, bits).with(Ept::HOST_WRITABLE | Ept::WRITABLE | Ept::DIRTY);
        absent.extend([leaf.tracked(level), leaf.frozen_as_was(level), leaf.tracked(level).frozen_as_was(level)]);
    }
    for pte in absent {
        assert_eq!(pte.bits() & (0b111 | 1 << 10), 0, "{pte:?}");
    }
}

#[test]
fn attribute_bits_are_those_of_the_manuals() {
    use Execute::{All, None as Never, Supervisor, User};
    use MemoryType::{AsGuest, Device, DeviceStrict, NonCached, WriteBack, WriteThrough};
    let no = CpuFeatures::empty();
    // Memory type, ignore PAT, X, X of user code.
    let ept = |memory, execute| bits_of::<Ept>(no, memory, execute);
    assert_eq!(ept(WriteBack, All), Some(6 << 3 | 1 << 6 | 1 << 2 | 1 << 10));
    assert_eq!(ept(AsGuest, Never), Some(6 << 3));
    assert_eq!((ept(WriteThrough, Never), ept(NonCached, Never)), (Some(4 << 3 | 1 << 6), Some(1 << 3 | 1 << 6)));
    assert_eq!((ept(Device, Never), ept(DeviceStrict, Never)), (Some(0), Some(1 << 6)));
    assert_eq!((ept(WriteBack, User), ept(WriteBack, Supervisor)), (None, None));
    assert_eq!(bits_of::<Ept>(CpuFeatures::MBEC, AsGuest, User), Some(6 << 3 | 1 << 10));
    assert_eq!(bits_of::<Ept>(CpuFeatures::MBEC, AsGuest, Supervisor), Some(6 << 3 | 1 << 2));
    // PWT 3, PCD 4, PAT 7, NX 63. After a reset the PAT is WB, WT, UC-, UC, and the same again.
    let npt = |memory, execute| bits_of::<Npt>(no, memory, execute);
    assert_eq!((npt(WriteBack, All), npt(AsGuest, All)), (Some(0), Some(0)));
    assert_eq!((npt(WriteThrough, All), npt(NonCached, All)), (Some(1 << 3), None));
    assert_eq!((npt(Device, Never), npt(DeviceStrict, Never)), (Some(2 << 3 | 1 << 63), Some(3 << 3 | 1 << 63)));
    assert_eq!((npt(WriteBack, User), npt(WriteBack, Supervisor)), (None, None));
    // That of Linux: WB, WC, UC-, UC, WB, WP, UC-, WT.
    let linux = Hardware { pat: 0x0407_0506_0007_0106, ..Hardware::default() };
    let encoding = Encoding::<Npt>::new(&linux).unwrap();
    let non_cached = LeafAttributes { memory: NonCached, execute: All };
    assert_eq!(encoding.attribute_bits(non_cached), Some(1 << 3));
    let write_through = LeafAttributes { memory: WriteThrough, execute: All };
    let bits = encoding.attribute_bits(write_through).unwrap();
    assert_eq!(bits, 3 << 3 | 1 << 7);
    // In a huge page PAT is bit 12.
    assert_eq!(Npt::attribute_bits_at(bits, Level::L2M), 3 << 3 | 1 << 12);
    // MemAttr 2 to 5, XN 53 and 54.
    let arm = |memory, execute| bits_of::<Stage2>(no, memory, execute);
    assert_eq!((arm(WriteBack, All), arm(AsGuest, Never)), (Some(0b1111 << 2), Some(0b1111 << 2 | 0b10 << 53)));
    assert_eq!((arm(WriteThrough, All), arm(NonCached, All)), (Some(0b1010 << 2), Some(0b0101 << 2)));
    assert_eq!((arm(Device, Never), arm(DeviceStrict, Never)), (Some(1 << 2 | 0b10 << 53), Some(0b10 << 53)));
    assert_eq!((arm(WriteBack, User), arm(WriteBack, Supervisor)), (None, None));
    let forced = |memory| bits_of::<Stage2>(CpuFeatures::FWB, memory, All);
    assert_eq!((forced(WriteBack), forced(AsGuest)), (Some(0b0110 << 2), Some(0b0111 << 2)));
    assert_eq!((forced(WriteThrough), forced(NonCached)), (None, Some(0b0101 << 2)));
    let by_mode = |execute| bits_of::<Stage2>(CpuFeatures::XNX, NonCached, execute);
    assert_eq!(by_mode(User), Some(0b0101 << 2 | 0b01 << 53));
    assert_eq!(by_mode(Supervisor), Some(0b0101 << 2 | 0b11 << 53));
    // X 3, PBMT 61 and 62.
    let riscv = |features, memory, execute| bits_of::<Sv48x4>(features, memory, execute);
    assert_eq!((riscv(no, WriteBack, All), riscv(no, AsGuest, Never)), (Some(1 << 3), Some(0)));
    assert_eq!((riscv(no, NonCached, All), riscv(no, Device, Never)), (None, Some(0)));
    let types = CpuFeatures::SVPBMT;
    assert_eq!((riscv(types, NonCached, All), riscv(types, Device, Never)), (Some(1 << 61 | 1 << 3), Some(2 << 61)));
    assert_eq!((riscv(types, WriteThrough, All), riscv(types, WriteBack, User)), (None, None));
    // SNP 11, with snoop control; 54 and 55 to 57 are software's.
    let vtd = |features, memory, execute| bits_of::<Vtd>(features, memory, execute);
    let snoop = CpuFeatures::SNOOP_CONTROL;
    assert_eq!((vtd(no, WriteBack, All), vtd(no, WriteBack, Never)), (Some(1 << 54), Some(0)));
    assert_eq!((vtd(snoop, WriteBack, All), vtd(snoop, AsGuest, Never)), (Some(1 << 11 | 1 << 54), Some(1 << 55)));
    assert_eq!((vtd(snoop, Device, Never), vtd(snoop, NonCached, Never)), (Some(4 << 55), Some(3 << 55)));
    assert_eq!((vtd(snoop, WriteThrough, All), vtd(snoop, WriteBack, User)), (None, None));
}

#[test]
fn a_device_is_never_executed() {
    for execute in [Execute::All, Execute::User, Execute::Supervisor] {
        for memory in [MemoryType::Device, MemoryType::DeviceStrict] {
            assert_eq!(bits_of::<Ept>(CpuFeatures::MBEC, memory, execute), None);
            assert_eq!(bits_of::<Stage2>(CpuFeatures::XNX, memory, execute), None);
        }
    }
}

/// The level, the PTEs and the address bits of the root.
fn root_of<F: Format>(gpa_bits: Option<u8>, levels: Option<u8>) -> Result<(u8, usize, u32), ConfigError> {
    let encoding = Encoding::<F>::new(&Hardware { gpa_bits, levels, ..Hardware::default() })?;
    Ok((encoding.root_level().0, encoding.nr_root_ptes(), encoding.gpa_bits()))
}

#[test]
fn geometries_are_those_of_the_manuals() {
    assert_eq!(root_of::<Ept>(None, None), Ok((4, 512, 48)));
    assert_eq!(root_of::<Ept>(Some(57), None), Ok((5, 512, 57)));
    assert_eq!(root_of::<Ept>(None, Some(5)), Ok((5, 512, 57)));
    assert_eq!(root_of::<Npt>(Some(48), Some(5)), Ok((5, 512, 48)));
    assert_eq!(root_of::<Npt>(Some(40), None), Ok((4, 512, 40)));
    // 40 bits: 3 levels with 2 tables side by side. 43 bits: 16 of them.
    assert_eq!(root_of::<Stage2>(None, None), Ok((4, 512, 48)));
    assert_eq!(root_of::<Stage2>(Some(32), None), Ok((3, 512, 32)));
    assert_eq!(root_of::<Stage2>(Some(39), None), Ok((3, 512, 39)));
    assert_eq!(root_of::<Stage2>(Some(40), None), Ok((3, 1024, 40)));
    assert_eq!(root_of::<Stage2>(Some(43), None), Ok((3, 16 * 512, 43)));
    assert_eq!(root_of::<Stage2>(Some(43), Some(4)), Ok((4, 512, 43)));
    assert_eq!(root_of::<Stage2>(Some(44), None), Ok((4, 512, 44)));
    assert_eq!(root_of::<Stage2>(None, Some(3)), Ok((3, 16 * 512, 43)));
    assert_eq!(root_of::<Sv39x4>(None, None), Ok((3, 2048, 41)));
    assert_eq!(root_of::<Sv57x4>(Some(50), None), Ok((5, 2048, 50)));
    assert_eq!(root_of::<Vtd>(None, None), Ok((4, 512, 48)));
    assert_eq!(root_of::<Vtd>(Some(39), None), Ok((3, 512, 39)));
    assert_eq!(root_of::<Vtd>(Some(40), None), Ok((4, 512, 40)));
    assert_eq!(root_of::<Vtd>(Some(39), Some(5)), Ok((5, 512, 39)));
    assert_eq!(root_of::<Vtd>(None, Some(3)), Ok((3, 512, 39)));
}

#[test]
fn a_geometry_that_the_format_lacks_is_refused() {
    let bad = |gpa_bits, levels, format| Err(ConfigError::BadGeometry { gpa_bits, levels, format });
    for bits in [0, 1, 31, 58, 64, 255] {
        assert_eq!(root_of::<Ept>(Some(bits), None), bad(bits, None, "ept"));
    }
    assert_eq!(root_of::<Ept>(Some(49), Some(4)), bad(49, Some(4), "ept"));
    assert_eq!(root_of::<Ept>(None, Some(3)), bad(48, Some(3), "ept"));
    assert_eq!(root_of::<Stage2>(Some(44), Some(3)), bad(44, Some(3), "stage2"));
    assert_eq!(root_of::<Stage2>(Some(39), Some(4)), bad(39, Some(4), "stage2"));
    assert_eq!(root_of::<Stage2>(Some(49), None), bad(49, None, "stage2"));
    assert_eq!(root_of::<Sv39x4>(Some(42), None), bad(42, None, "gstage-sv39x4"));
    assert_eq!(root_of::<Sv48x4>(None, Some(5)), bad(50, Some(5), "gstage"));
}

#[test]
fn features_and_bits_of_other_cpus_are_refused() {
    let of = |features| Hardware { features, ..Hardware::default() };
    let refused = |format| ConfigError::ForeignFeatures { features: CpuFeatures::FWB, format };
    assert_eq!(Encoding::<Ept>::new(&of(CpuFeatures::FWB | CpuFeatures::MBEC)).err(), Some(refused("ept")));
    let unknown = CpuFeatures::from_bits_retain(1 << 31);
    let refused = ConfigError::ForeignFeatures { features: unknown, format: "stage2" };
    assert_eq!(Encoding::<Stage2>::new(&of(unknown)).err(), Some(refused));
    // No entry of this PAT is write-back.
    let pat = 0x0007_0404_0007_0404;
    let refused = ConfigError::NoWriteBack { pat };
    assert_eq!(Encoding::<Npt>::new(&Hardware { pat, ..Hardware::default() }).err(), Some(refused));
    for (bits, is_good) in [(1 << 47, true), (1 << 51, true), (0x3f << 46, true), (1 << 52, false), (1 << 11, false)] {
        let hardware = Hardware { address_bits: Hpa(bits), ..Hardware::default() };
        assert_eq!(Encoding::<Npt>::new(&hardware).is_ok(), is_good, "{bits:#x}");
        assert!(Encoding::<Stage2>::new(&hardware).is_err());
    }
}

/// Frames have the bits that every address has for hardware alone.
fn hides_address_bits<F: Format>() {
    let c_bit = Hpa(1 << 47);
    let encoding = Encoding::<F>::new(&Hardware { address_bits: c_bit, ..Hardware::default() }).unwrap();
    let table = encoding.with_address_bits(Hpa(0x1234_5000));
    assert_eq!((table, encoding.without_address_bits(table)), (Hpa(c_bit.0 | 0x1234_5000), Hpa(0x1234_5000)));
    let bits = encoding.attribute_bits(LeafAttributes::default()).unwrap();
    for level in [Level::L4K, Level::L2M] {
        let leaf = encoding.leaf(Pfn(0x4_0000), level, bits);
        for value in [leaf, leaf.tracked(level), leaf.tracked(level).untracked(level)] {
            assert_eq!(encoding.frame(value, level), Pfn(0x4_0000));
            assert!(value.untracked(level).bits() & c_bit.0 != 0);
        }
    }
    let part = encoding.leaf(Pfn(0x4_0000), Level::L2M, bits).parts(Level::L2M)(7);
    assert!(part.bits() & c_bit.0 != 0 && encoding.frame(part, Level::L4K) == Pfn(0x4_0007));
}

#[test]
fn the_bits_of_every_address_are_hardware_s_alone() {
    hides_address_bits::<Npt>();
    hides_address_bits::<Ept>();
}

#[test]
fn the_default_is_the_geometry_of_the_format() {
    crate::for_each_format!(F => {
        let encoding = Encoding::<F>::new(&Hardware::default()).unwrap();
        assert_eq!((encoding.root_level(), encoding.gpa_bits()), (F::ROOT_LEVEL, F::GPA_BITS));
    });
}
