//! What the format of page tables leaves open, as it is for one VM: how many levels there are, where
//! addresses are, and which bits say how memory is accessed.
//!
//! # Use
//! The frame of a leaf becomes address bits, or is read from them, here alone: [`Encoding::leaf`],
//! [`Encoding::frame`]. So the engine and its host see frames without [`Hardware::address_bits`].
//!
//! Page-table pages have these bits from their allocation on (`node`), so that a walk does not add
//! or remove them. The host sees them in [`Host::table_ptr`](crate::Host::table_ptr) alone.
//!
//! A format with one geometry has constants for it, so that its walks are as if there were no other
//! formats.

use core::marker::PhantomData;

use super::pte::Pte;
use crate::addr::{Gfn, GfnRange, Hpa, Level, PAGE_SHIFT, Pfn};
use crate::error::ConfigError;
use crate::format::{CpuFeatures, Execute, Format, Geometry, Hardware, LeafAttributes};

/// Stands for attributes that the format cannot express.
const NONE: u64 = u64::MAX;

/// Attributes that the format can express.
#[derive(Clone, Copy)]
pub(crate) struct Supported(LeafAttributes);

/// The encoding of the PTEs of one VM.
pub(crate) struct Encoding<F> {
    root_level: Level,
    nr_root_ptes: usize,
    /// The first frame that has no guest-physical address.
    end: Gfn,
    /// [`Hardware::address_bits`].
    address_bits: Hpa,
    /// The bits of a frame number that a PTE cannot have, or has for hardware alone.
    not_of_frames: u64,
    /// [`Format::attribute_bits`], or [`NONE`], by [`LeafAttributes::number`].
    attributes: [u64; LeafAttributes::COUNT],
    format: PhantomData<F>,
}

impl<F: Format> Encoding<F> {
    /// # Errors
    /// What of `hardware` the format does not have.
    pub(crate) fn new(hardware: &Hardware) -> Result<Encoding<F>, ConfigError> {
        let foreign = hardware.features.difference(F::FEATURES);
        if !foreign.is_empty() || CpuFeatures::from_bits(hardware.features.bits()).is_none() {
            return Err(ConfigError::ForeignFeatures { features: foreign, format: F::NAME });
        }
        let (root_level, gpa_bits) = geometry_of::<F>(hardware)?;
        let Hpa(address_bits) = hardware.address_bits;
        let possible = if F::HAS_ADDRESS_BITS { (1 << F::HPA_BITS) - (1 << PAGE_SHIFT) } else { 0 };
        if address_bits & !possible != 0 {
            return Err(ConfigError::BadAddressBits { bits: hardware.address_bits, format: F::NAME });
        }
        let mut attributes = [NONE; LeafAttributes::COUNT];
        for (number, bits) in attributes.iter_mut().enumerate() {
            let wanted = LeafAttributes::from_number(number);
            if wanted.memory.is_device() && wanted.execute != Execute::None {
                continue;
            }
            let expressed = F::attribute_bits(wanted, hardware);
            debug_assert!(expressed.is_none_or(|bits| bits & !F::ATTRIBUTES == 0));
            *bits = expressed.map_or(NONE, |bits| bits & F::ATTRIBUTES);
        }
        if attributes[LeafAttributes::default().number()] == NONE {
            return Err(ConfigError::NoWriteBack { pat: hardware.pat });
        }
        Ok(Encoding {
            root_level,
            nr_root_ptes: F::root_entries(root_level, gpa_bits),
            end: Gfn(1 << (gpa_bits - PAGE_SHIFT)),
            address_bits: hardware.address_bits,
            not_of_frames: Self::beyond() | hardware.address_bits.pfn().0,
            attributes,
            format: PhantomData,
        })
    }

    /// Level of the root's PTEs.
    #[inline]
    pub(crate) fn root_level(&self) -> Level {
        if F::GEOMETRIES.len() == 1 { F::ROOT_LEVEL } else { self.root_level }
    }

    /// Number of the root's PTEs.
    #[inline]
    pub(crate) fn nr_root_ptes(&self) -> usize {
        let is_fixed = F::GEOMETRIES.len() == 1 || F::MAX_ROOT_ENTRIES == F::TABLE_ENTRIES;
        if is_fixed { F::MAX_ROOT_ENTRIES } else { self.nr_root_ptes }
    }

    /// Bits of a guest-physical address.
    pub(crate) fn gpa_bits(&self) -> u32 {
        self.end.0.trailing_zeros() + PAGE_SHIFT
    }

    /// All frames that a guest-physical address can name.
    #[inline]
    pub(crate) fn frames(&self) -> GfnRange {
        GfnRange { start: Gfn(0), end: self.end }
    }

    /// The address `hpa` as hardware sees it.
    #[inline]
    pub(crate) fn with_address_bits(&self, hpa: Hpa) -> Hpa {
        if F::HAS_ADDRESS_BITS { Hpa(hpa.0 | self.address_bits.0) } else { hpa }
    }

    /// The address that hardware sees as `hpa`.
    #[inline]
    pub(crate) fn without_address_bits(&self, hpa: Hpa) -> Hpa {
        if F::HAS_ADDRESS_BITS { Hpa(hpa.0 & !self.address_bits.0) } else { hpa }
    }

    /// The bits of a frame number that no PTE has.
    const fn beyond() -> u64 {
        !((1 << (F::HPA_BITS - PAGE_SHIFT)) - 1)
    }

    /// Whether a PTE can have `pfn` as the host names it.
    #[inline]
    pub(crate) fn has_room_for(&self, pfn: Pfn) -> bool {
        pfn.0 & if F::HAS_ADDRESS_BITS { self.not_of_frames } else { Self::beyond() } == 0
    }

    /// A leaf of `level` for `pfn`, which is aligned; not writable, not accessed, not dirty.
    /// `attributes` are those of [`attribute_bits`](Self::attribute_bits).
    #[inline]
    pub(crate) fn leaf(&self, pfn: Pfn, level: Level, attributes: u64) -> Pte<F> {
        Pte::leaf(self.with_address_bits(pfn.hpa()).pfn(), level).with_attribute_bits(attributes, level)
    }

    /// The frame of a leaf of `level`, tracked or not.
    #[inline]
    pub(crate) fn frame(&self, leaf: Pte<F>, level: Level) -> Pfn {
        self.without_address_bits(leaf.plain_frame(level).hpa()).pfn()
    }

    /// The bits of a leaf of 4 KiB that express `attributes`. `None` if the format has none.
    #[inline]
    pub(crate) fn attribute_bits(&self, attributes: LeafAttributes) -> Option<u64> {
        self.supported(attributes).map(|supported| self.bits_of(supported))
    }

    /// `attributes`, if the format can express them.
    #[inline]
    pub(crate) fn supported(&self, attributes: LeafAttributes) -> Option<Supported> {
        (self.attributes[attributes.number()] != NONE).then_some(Supported(attributes))
    }

    /// The bits of a leaf of 4 KiB that express `attributes`.
    #[inline]
    pub(crate) fn bits_of(&self, attributes: Supported) -> u64 {
        let bits = self.attributes[attributes.0.number()];
        debug_assert!(bits != NONE, "attributes of another VM");
        bits
    }

    /// What `bits`, attribute bits of a leaf of 4 KiB, express.
    #[inline]
    pub(crate) fn attributes_of(&self, bits: u64) -> LeafAttributes {
        // Nearly all leaves are of ordinary memory.
        let ordinary = LeafAttributes::default();
        if bits == self.attributes[ordinary.number()] { ordinary } else { self.search(bits) }
    }

    #[cold]
    #[inline(never)]
    fn search(&self, bits: u64) -> LeafAttributes {
        let number = self.attributes.iter().position(|&expressed| expressed == bits);
        debug_assert!(number.is_some(), "{}: {bits:#x} express no attributes", F::NAME);
        number.map_or(LeafAttributes::default(), LeafAttributes::from_number)
    }
}

/// The level of the root, and the bits of a guest-physical address.
fn geometry_of<F: Format>(hardware: &Hardware) -> Result<(Level, u32), ConfigError> {
    let gpa_bits = hardware.gpa_bits.unwrap_or(match hardware.levels {
        // As many as the levels translate, if the format's own number is none of theirs.
        Some(levels) => F::GEOMETRIES
            .iter()
            .find(|geometry| geometry.root_level == Level(levels))
            .map_or(F::GPA_BITS as u8, |geometry| *geometry.gpa_bits.end()),
        None => F::GPA_BITS as u8,
    });
    let fits = |geometry: &&Geometry| {
        geometry.gpa_bits.contains(&gpa_bits) && hardware.levels.is_none_or(|levels| geometry.root_level.0 == levels)
    };
    let geometry = F::GEOMETRIES.iter().find(fits);
    let bad = ConfigError::BadGeometry { gpa_bits, levels: hardware.levels, format: F::NAME };
    Ok((geometry.ok_or(bad)?.root_level, u32::from(gpa_bits)))
}

#[cfg(all(test, not(any(loom, shuttle))))]
#[path = "encoding_tests.rs"]
mod tests;
