//! What a test's format inherits.

/// What a test's format inherits from another, inside its `impl Format`: the bits, and all
/// functions except `is_leaf`.
#[allow(unused_macros, reason = "each test binary uses a part")]
macro_rules! bits_of {
    ($format:ty) => {
        type Walkers = <$format as slat::format::Format>::Walkers;

        const HPA_BITS: u32 = <$format>::HPA_BITS;
        const TABLE_ENTRIES: usize = <$format>::TABLE_ENTRIES;
        const ADDRESS: u64 = <$format>::ADDRESS;
        const HAS_ADDRESS_BITS: bool = <$format>::HAS_ADDRESS_BITS;
        const FEATURES: slat::format::CpuFeatures = <$format>::FEATURES;
        const ATTRIBUTES: u64 = <$format>::ATTRIBUTES;
        const WRITABLE: u64 = <$format>::WRITABLE;
        const ACCESSED: u64 = <$format>::ACCESSED;
        const DIRTY: u64 = <$format>::DIRTY;
        const HAS_DIRTY_BIT: bool = <$format>::HAS_DIRTY_BIT;
        const HOST_WRITABLE: u64 = <$format>::HOST_WRITABLE;
        const WAS_DIRTY: u64 = <$format>::WAS_DIRTY;
        const GENERATION: u64 = <$format>::GENERATION;
        const HAS_MODIFICATION_LOG: bool = <$format>::HAS_MODIFICATION_LOG;
        const NEEDS_LOCAL_FLUSH: bool = <$format>::NEEDS_LOCAL_FLUSH;

        fn is_present(entry: slat::format::Pte) -> bool {
            <$format>::is_present(entry)
        }

        fn leaf(pfn: slat::Pfn, level: slat::Level) -> slat::format::Pte {
            <$format>::leaf(pfn, level)
        }

        fn table(table: slat::Hpa) -> slat::format::Pte {
            <$format>::table(table)
        }

        fn address_bits(hpa: slat::Hpa) -> u64 {
            <$format>::address_bits(hpa)
        }

        fn hpa(bits: u64) -> slat::Hpa {
            <$format>::hpa(bits)
        }

        fn attribute_bits(attributes: slat::format::LeafAttributes, hardware: &slat::format::Hardware) -> Option<u64> {
            <$format>::attribute_bits(attributes, hardware)
        }

        fn attribute_bits_at(bits: u64, level: slat::Level) -> u64 {
            <$format>::attribute_bits_at(bits, level)
        }

        fn pack_attributes(pte: slat::format::Pte, level: slat::Level) -> u64 {
            <$format>::pack_attributes(pte, level)
        }

        fn unpack_attributes(packed: u64, level: slat::Level) -> u64 {
            <$format>::unpack_attributes(packed, level)
        }

        fn may_execute(pte: slat::format::Pte, access: slat::Access) -> bool {
            <$format>::may_execute(pte, access)
        }
    };
}
#[allow(unused_imports, reason = "each test binary uses a part")]
pub(crate) use bits_of;
