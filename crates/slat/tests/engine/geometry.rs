//! Page tables with more or fewer levels than usual, to both ends of the address space.

use crate::common::MIB;
use crate::common::answers::{answer_vm, frame_of, lowest_pte, slot};
use slat::error::{ConfigError, FaultError, RangeError, SlotError};
use slat::format::{Ept, Format, Hardware, Npt, Stage2, Sv39x4, Sv48x4, Sv57x4, Vtd};
use slat::host::Resolved;
use slat::{Access, Config, Gfn, GfnRange, Gpa, Level, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Vm};

use crate::common::TestHost;

const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();

/// A VM of `gpa_bits` and `levels` maps the first and the last pages of its address space, and
/// nothing beyond.
fn both_ends<F: Format>(gpa_bits: u8, levels: u8, root_bytes: u64) {
    let hardware = Hardware { gpa_bits: Some(gpa_bits), levels: Some(levels), ..Hardware::default() };
    let vm = answer_vm::<F>(Config::default(), hardware, 4 * MIB, NO_FLAGS);
    assert_eq!((vm.root_level(), vm.gpa_bits()), (Level(levels), u32::from(gpa_bits)));
    assert_eq!(vm.root().0 % root_bytes, 0, "the root is aligned to its size");
    let end = 1u64 << gpa_bits;
    let high = end - 4 * MIB;
    vm.set_user_memory_region(slot(1, Gpa(high), 4 * MIB, NO_FLAGS)).unwrap();
    // A host has less memory than a guest has addresses.
    let frame = |gfn: Gfn| frame_of(Gfn(gfn.0 % (1 << 20)));
    vm.host().answer(move |gfn, _| Ok(Resolved::memory(frame(gfn), PageSize::Size2M)));
    let mut vcpu = vm.create_vcpu().unwrap();
    for gpa in [0, 3 * MIB, high, end - PAGE_SIZE, end - 1].map(Gpa) {
        assert_eq!(vcpu.handle_fault(gpa, Access::Write), Ok(Outcome::Resume), "{gpa}");
        let (pte, level) = lowest_pte::<F>(&vm, gpa);
        assert_eq!(level, Level::L2M);
        let inside = gpa.gfn().0 % 512;
        assert_eq!(F::address(pte, level).pfn().0 + inside, frame(gpa.gfn()).0, "{gpa}");
        let found = vm.read_tables().unwrap().cursor().query(gpa).unwrap();
        assert_eq!((found.pfn, found.writable), (frame(gpa.gfn()), true));
    }
    let bits = u32::from(gpa_bits);
    let beyond = FaultError::AddressTooHigh { gpa: Gpa(end), gpa_bits: bits };
    assert_eq!(vcpu.handle_fault(Gpa(end), Access::Read), Err(beyond));
    assert_eq!(vm.read_tables().unwrap().cursor().query(Gpa(end)), None);
    let overflowing = slot(2, Gpa(end - PAGE_SIZE), 2 * PAGE_SIZE, NO_FLAGS);
    let refused = SlotError::AddressTooHigh { gpa: Gpa(end - PAGE_SIZE), gpa_bits: bits };
    assert_eq!(vm.set_user_memory_region(overflowing), Err(refused));
    // Split, harvest, age and zap the last pages.
    let last = GfnRange::new(Gpa(high).gfn(), 1024);
    assert_eq!(vm.split_range(last, PageSize::Size4K), Ok(2));
    assert_eq!(vm.age_range(last), Ok(1024));
    assert_eq!(vm.recover_range(last), Ok(2));
    drop(vm.invalidate_range(last).unwrap());
    let too_long = GfnRange { start: last.start, end: Gfn(last.end.0 + 1) };
    let refused = RangeError::AddressTooHigh { gpa: Gpa(end), gpa_bits: bits };
    assert_eq!(vm.invalidate_range(too_long).err(), Some(refused));
    let all = GfnRange::new(Gfn(0), end / PAGE_SIZE);
    drop(vm.invalidate_range(all).unwrap());
    vm.reclaim();
    assert!(!F::is_present(lowest_pte::<F>(&vm, Gpa(0)).0));
}

#[test]
fn every_geometry_reaches_both_ends_of_its_address_space() {
    for bits in [32, 39, 40, 46, 48] {
        both_ends::<Ept>(bits, 4, 4096);
        both_ends::<Npt>(bits, 4, 4096);
    }
    for bits in [48, 49, 57] {
        both_ends::<Ept>(bits, 5, 4096);
        both_ends::<Npt>(bits, 5, 4096);
    }
    // With three levels up to 16 page-table pages are one root.
    for (bits, nr_tables) in [(32, 1), (33, 1), (38, 1), (39, 1), (40, 2), (41, 4), (42, 8), (43, 16)] {
        both_ends::<Stage2>(bits, 3, nr_tables * 4096);
    }
    for bits in [40, 43, 44, 47, 48] {
        both_ends::<Stage2>(bits, 4, 4096);
    }
    both_ends::<Sv39x4>(41, 3, 16 << 10);
    both_ends::<Sv39x4>(34, 3, 16 << 10);
    both_ends::<Sv48x4>(50, 4, 16 << 10);
    both_ends::<Sv57x4>(59, 5, 16 << 10);
    for (bits, levels) in [(32, 3), (39, 3), (39, 4), (40, 4), (48, 4), (48, 5), (57, 5)] {
        both_ends::<Vtd>(bits, levels, 4096);
    }
}

#[test]
fn a_geometry_that_the_format_lacks_is_refused() {
    let new = |gpa_bits, levels| {
        let hardware = Hardware { gpa_bits, levels, ..Hardware::default() };
        Vm::<TestHost, Stage2>::new(TestHost::default(), Config::default().with_hardware(hardware)).err()
    };
    let bad = |gpa_bits, levels| Some(ConfigError::BadGeometry { gpa_bits, levels, format: "stage2" });
    assert_eq!(new(Some(52), None), bad(52, None));
    assert_eq!(new(Some(0), None), bad(0, None));
    assert_eq!(new(Some(44), Some(3)), bad(44, Some(3)));
    assert_eq!(new(None, Some(5)), bad(48, Some(5)));
    let message = bad(44, Some(3)).unwrap().to_string();
    assert_eq!(message, "stage2 tables have no geometry for 44 guest-physical bits with 3 levels");
    assert_eq!(new(Some(40), None), None);
}
