//! PTEs that are not present: what they keep is read back, and none of them has an address at which
//! a CPU could find memory.

use super::*;

/// Bits of a physical address that CPUs' L1 data caches distinguish: those that L1 terminal faults
/// concern have 44 or 46.
const CACHE_BITS: core::ops::RangeInclusive<u32> = 44..=52;

/// Neither a leaf bit nor a present bit, and an address in the upper half of what any cache
/// distinguishes.
fn assert_out_of_reach<F: Format>(pte: Pte) {
    assert!(!F::is_present(pte), "{}: {pte:?} is present", F::NAME);
    for bits in CACHE_BITS {
        let address = pte.0 & ADDRESS & ((1 << bits) - 1);
        assert!(address >= 1 << (bits - 1), "{}: {pte:?} has address {address:#x} for {bits} bits", F::NAME);
    }
}

/// Below half of 44 bits.
const ADDRESSES: [u64; 6] = [0, 0x1000, 0x20_0000, 0x1234_5678_9000, 0x3ff_ffff_f000, 0x7ff_ffe0_0000];

fn keeps_out_of_reach<F: Format>() {
    for level in [Level::L4K, Level::L2M, Level::L1G] {
        for address in ADDRESSES.map(|address| Hpa(address & ((1 << 43) - 1) & !((level.nr_pages() << 12) - 1))) {
            keeps_address_out_of_reach::<F>(address, level);
        }
    }
    for table in ADDRESSES.map(|address| Hpa(address & ((1 << 43) - 1))) {
        for breaking in [Breaking::Recovery, Breaking::Split] {
            let pte = broken(table, breaking);
            assert_eq!((state::<F>(pte, Level::L2M), table_of_broken(pte)), (State::Broken, (table, breaking)));
            assert_out_of_reach::<F>(pte);
        }
        let frozen = frozen_as_was::<F>(F::table(table), Level::L2M);
        assert_eq!(before_freezing::<F>(frozen, Level::L2M), Frozen::Table(table));
        assert_out_of_reach::<F>(frozen);
        let link = frozen_link(table);
        assert_eq!((state::<F>(link, Level::L4K), link_of(link)), (State::Frozen, table));
        assert_eq!(before_freezing::<F>(link, Level::L4K), Frozen::Nothing, "links freeze as nothing");
        assert_out_of_reach::<F>(link);
    }
    let cell = AtomicU64::new(empty(InvalidationSeq::FIRST).0);
    let pte = PteRef::new(&cell, Level::L2M);
    pte.freeze();
    assert_eq!(before_freezing::<F>(pte.load(), Level::L2M), Frozen::Nothing);
    assert_out_of_reach::<F>(pte.load());
    assert_out_of_reach::<F>(frozen_as_was::<F>(empty(InvalidationSeq::FIRST), Level::L2M));
    let mut before = None;
    for number in [0, 1, 2, 4, 4094, 4095, 4096, 4097, 4098, 1 << 20, (1 << 32) + 6, (1 << 43) - 2, (1 << 43) - 1] {
        let seq = InvalidationSeq::from_number(number);
        assert_eq!((seq.number(), state::<F>(empty(seq), Level::L4K)), (number, State::Empty(seq)));
        assert_out_of_reach::<F>(empty(seq));
        assert!(before < Some(seq), "numbers are in order");
        before = Some(seq);
        assert_eq!(seq.unflushed().number(), number | 1);
        assert_eq!((seq.flushed().number(), seq.is_unflushed()), (number & !1, number % 2 == 1));
        let tag = frozen_number(number);
        assert_eq!((state::<F>(tag, Level::L4K), number_of(tag)), (State::Frozen, number));
        assert_eq!(before_freezing::<F>(tag, Level::L4K), Frozen::Nothing);
        assert_out_of_reach::<F>(tag);
    }
    assert_eq!(InvalidationSeq::FIRST, InvalidationSeq::from_number(0));
    // All numbers are read back, also those that are too large to be kept out of reach.
    let last = (1 << 52) - 1;
    assert_eq!((InvalidationSeq::from_number(last).number(), number_of(frozen_number(last))), (last, last));
}

/// A tracked leaf of `level` at `address`, and a frozen leaf.
fn keeps_address_out_of_reach<F: Format>(address: Hpa, level: Level) {
    for attributes in [0, F::HOST_WRITABLE, F::DIRTY, F::HOST_WRITABLE | F::DIRTY] {
        let leaf = Pte(F::leaf(address.pfn(), level).0 | attributes);
        let kept = tracked::<F>(leaf, level);
        assert_eq!((state::<F>(kept, level), untracked::<F>(kept, level)), (State::Tracked, leaf));
        assert_eq!(frame::<F>(kept, level), address.pfn());
        assert_out_of_reach::<F>(kept);
        for leaf in [leaf, Pte(leaf.0 | F::ACCESSED), kept] {
            let frozen = frozen_as_was::<F>(leaf, level);
            assert_eq!(before_freezing::<F>(frozen, level), Frozen::Leaf(leaf));
            assert_eq!(frame_before_freezing(frozen), Some(address.pfn()));
            assert_out_of_reach::<F>(frozen);
        }
    }
}

#[test]
fn ptes_that_are_not_present_have_no_address_of_memory() {
    crate::for_each_format!(F => {
        keeps_out_of_reach::<F>();
    });
}
