//! PTEs that are not present: what they keep is read back, and none of them has an address at which
//! a CPU could find memory.

use super::*;

/// Bits of a physical address that CPUs' L1 data caches distinguish: those that L1 terminal faults
/// concern have 44 or 46.
const CACHE_BITS: core::ops::RangeInclusive<u32> = 44..=52;

/// Neither a leaf bit nor a present bit, and an address in the upper half of what any cache
/// distinguishes.
fn assert_out_of_reach<F: Format>(pte: Pte<F>) {
    assert!(!pte.is_present(), "{}: {pte:?} is present", F::NAME);
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
            let pte = Pte::<F>::broken(Pte::table(table), breaking);
            assert_eq!((pte.state(Level::L2M), pte.breaking()), (State::Broken, breaking));
            assert_eq!(pte.table_of_broken(), table);
            assert_out_of_reach(pte);
        }
        let frozen = Pte::<F>::table(table).frozen_as_was(Level::L2M);
        assert!(matches!(frozen.before_freezing(Level::L2M), Frozen::Table(was) if was == table));
        assert_out_of_reach(frozen);
        let link = Pte::<F>::from_bits(frozen_link(table));
        assert_eq!((link.state(Level::L4K), link_of(link.bits())), (State::Frozen, table));
        assert!(matches!(link.before_freezing(Level::L4K), Frozen::Nothing), "links freeze as nothing");
        assert_out_of_reach(link);
    }
    assert!(matches!(Pte::<F>::FROZEN.before_freezing(Level::L2M), Frozen::Nothing));
    assert_out_of_reach(Pte::<F>::FROZEN);
    assert_out_of_reach(Pte::<F>::empty(InvalidationSeq::FIRST).frozen_as_was(Level::L2M));
    let mut before = None;
    for number in [0, 1, 2, 4, 4094, 4095, 4096, 4097, 4098, 1 << 20, (1 << 32) + 6, (1 << 43) - 2, (1 << 43) - 1] {
        let seq = InvalidationSeq::from_number(number);
        assert_eq!((seq.number(), Pte::<F>::empty(seq).state(Level::L4K)), (number, State::Empty(seq)));
        assert_out_of_reach(Pte::<F>::empty(seq));
        assert!(before < Some(seq), "numbers are in order");
        before = Some(seq);
        assert_eq!(seq.unflushed().number(), number | 1);
        assert_eq!((seq.flushed().number(), seq.is_unflushed()), (number & !1, number % 2 == 1));
        let tag = Pte::<F>::from_bits(frozen_number(number));
        assert_eq!((tag.state(Level::L4K), number_of(tag.bits())), (State::Frozen, number));
        assert!(matches!(tag.before_freezing(Level::L4K), Frozen::Nothing));
        assert_out_of_reach(tag);
    }
    assert_eq!(InvalidationSeq::FIRST, InvalidationSeq::from_number(0));
    // All numbers are read back, also those that are too large to be kept out of reach.
    let last = (1 << 52) - 1;
    assert_eq!((InvalidationSeq::from_number(last).number(), number_of(frozen_number(last))), (last, last));
}

/// A tracked leaf of `level` at `address`, and a frozen leaf.
fn keeps_address_out_of_reach<F: Format>(address: Hpa, level: Level) {
    for attributes in [0, F::HOST_WRITABLE, F::DIRTY, F::HOST_WRITABLE | F::DIRTY] {
        let leaf = Pte::<F>::leaf(address.pfn(), level).with(attributes);
        let kept = leaf.tracked(level);
        assert_eq!((kept.state(level), kept.untracked(level)), (State::Tracked, leaf));
        assert_eq!(kept.plain_frame(level), address.pfn());
        assert_out_of_reach(kept);
        for leaf in [leaf, leaf.with(F::ACCESSED), kept] {
            let frozen = leaf.frozen_as_was(level);
            assert!(matches!(frozen.before_freezing(level), Frozen::Leaf(was) if was == leaf));
            assert_eq!(frozen.frame_before_freezing(), Some(address.pfn()));
            assert_out_of_reach(frozen);
        }
    }
}

#[test]
fn ptes_that_are_not_present_have_no_address_of_memory() {
    crate::for_each_format!(F => {
        keeps_out_of_reach::<F>();
    });
}
