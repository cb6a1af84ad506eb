//! The regions of a virtual machine's memory, checked: a monitor may say anything.
//!
//! # Guarantees
//! [`Regions`] are not empty, do not overlap (neither in the monitor's memory nor in the snapshot),
//! consist of whole pages of a size that exists, and lie in the snapshot. So their sum is at most
//! the snapshot, and no address computed from them wraps.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::source::PAGE_BYTES;

/// How many regions a machine may have.
pub const MAX_REGIONS: usize = 1024;

/// The page sizes of Linux on the machines that have userfaultfd.
const PAGE_SIZES: [u64; 5] = [4 << 10, 64 << 10, 2 << 20, 32 << 20, 1 << 30];

/// A region of a machine's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    /// Where it starts in the monitor's address space.
    pub address: u64,
    /// Its bytes.
    pub size_bytes: u64,
    /// Where it starts in the snapshot.
    pub offset: u64,
    /// Bytes of its pages: 4096, or those of hugetlb.
    pub page_bytes: u64,
}

impl Region {
    /// Its addresses.
    pub fn addresses(&self) -> Range<u64> {
        self.address..self.address + self.size_bytes
    }

    /// Its bytes of the snapshot.
    pub fn offsets(&self) -> Range<u64> {
        self.offset..self.offset + self.size_bytes
    }

    /// How many pages it has.
    pub fn nr_pages(&self) -> u64 {
        self.size_bytes / self.page_bytes
    }

    /// Whether the kernel has no `UFFDIO_ZEROPAGE` for it.
    pub fn is_hugetlb(&self) -> bool {
        self.page_bytes != PAGE_BYTES
    }
}

/// Why regions are refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum RegionError {
    #[error("there are no regions")]
    None,
    #[error("there are {nr} regions; {MAX_REGIONS} are possible")]
    TooMany { nr: usize },
    #[error("region {nr} is empty")]
    Empty { nr: usize },
    #[error("region {nr} has pages of {page_bytes} bytes, a size that is none")]
    PageSize { nr: usize, page_bytes: u64 },
    #[error("region {nr} is not of whole pages: its {what} is {value:#x}, its pages have {page_bytes:#x} bytes")]
    Unaligned { nr: usize, what: &'static str, value: u64, page_bytes: u64 },
    #[error("region {nr} wraps: {size_bytes:#x} bytes at {start:#x}")]
    Wraps { nr: usize, start: u64, size_bytes: u64 },
    #[error("region {nr} ends at byte {end} of a snapshot that has {size_bytes}")]
    BehindEnd { nr: usize, end: u64, size_bytes: u64 },
    #[error("two regions have the same {what} {at:#x}")]
    Overlap { what: &'static str, at: u64 },
}

/// A region with the number of its first page among those of all regions.
#[derive(Clone, Debug)]
pub struct Placed {
    /// The region.
    pub region: Region,
    /// A multiple of 64: no word of a bitmap has pages of two regions.
    pub first_page: u64,
}

impl Placed {
    /// The address of a page.
    pub fn address_of(&self, page: u64) -> u64 {
        self.region.address + (page - self.first_page) * self.region.page_bytes
    }

    /// Where a page is in the snapshot.
    pub fn offset_of(&self, page: u64) -> u64 {
        self.region.offset + (page - self.first_page) * self.region.page_bytes
    }

    /// Its pages.
    pub fn pages(&self) -> Range<u64> {
        self.first_page..self.first_page + self.region.nr_pages()
    }
}

/// The regions, by address.
#[derive(Clone, Debug)]
pub struct Regions {
    placed: Vec<Placed>,
    /// Places of `placed` by offset in the snapshot.
    by_offset: Vec<usize>,
    nr_words: usize,
}

impl Regions {
    /// Checks `regions` of a machine whose snapshot has `snapshot_bytes`.
    ///
    /// # Errors
    /// [`RegionError`].
    pub fn new(regions: &[Region], snapshot_bytes: u64) -> Result<Regions, RegionError> {
        if regions.is_empty() {
            return Err(RegionError::None);
        }
        if regions.len() > MAX_REGIONS {
            return Err(RegionError::TooMany { nr: regions.len() });
        }
        for (nr, region) in regions.iter().enumerate() {
            check(nr, region, snapshot_bytes)?;
        }
        let mut sorted = regions.to_vec();
        sorted.sort_by_key(|region| region.offset);
        disjoint("byte of the snapshot", sorted.iter().map(Region::offsets))?;
        sorted.sort_by_key(|region| region.address);
        disjoint("address", sorted.iter().map(Region::addresses))?;
        let mut nr_words = 0;
        let placed: Vec<Placed> = sorted
            .into_iter()
            .map(|region| {
                let first_page = nr_words * 64;
                nr_words += region.nr_pages().div_ceil(64);
                Placed { region, first_page }
            })
            .collect();
        let mut by_offset: Vec<usize> = (0..placed.len()).collect();
        by_offset.sort_by_key(|&place| placed[place].region.offset);
        // Fits: a word stands for 256 KiB of the snapshot at least.
        Ok(Regions { placed, by_offset, nr_words: nr_words as usize })
    }

    /// All, by address.
    pub fn all(&self) -> &[Placed] {
        &self.placed
    }

    /// Words of a bitmap with a bit for each page.
    pub fn nr_words(&self) -> usize {
        self.nr_words
    }

    /// The bytes of all.
    pub fn size_bytes(&self) -> u64 {
        self.placed.iter().map(|placed| placed.region.size_bytes).sum()
    }

    /// The region of `address`, by its place in [`all`](Self::all), and the page.
    pub fn find(&self, address: u64) -> Option<(usize, u64)> {
        let place = self.placed.partition_point(|placed| placed.region.address <= address).checked_sub(1)?;
        let Placed { region, first_page } = &self.placed[place];
        let inside = address - region.address;
        (inside < region.size_bytes).then(|| (place, first_page + inside / region.page_bytes))
    }

    /// The regions that have addresses of `range`, with those pages of theirs that lie in `range`
    /// at least in part.
    pub fn touched(&self, range: Range<u64>) -> impl Iterator<Item = (usize, Range<u64>)> + '_ {
        self.placed.iter().enumerate().filter_map(move |(place, placed)| {
            let addresses = placed.region.addresses();
            pages_between(placed, addresses.start, range.start.max(addresses.start)..range.end.min(addresses.end))
                .map(|pages| (place, pages))
        })
    }

    /// As [`touched`](Self::touched), by bytes of the snapshot, in the order of the snapshot.
    pub fn touched_offsets(&self, range: Range<u64>) -> impl Iterator<Item = (usize, Range<u64>)> + '_ {
        self.by_offset.iter().filter_map(move |&place| {
            let placed = &self.placed[place];
            let offsets = placed.region.offsets();
            pages_between(placed, offsets.start, range.start.max(offsets.start)..range.end.min(offsets.end))
                .map(|pages| (place, pages))
        })
    }
}

fn pages_between(placed: &Placed, start: u64, part: Range<u64>) -> Option<Range<u64>> {
    let bytes = placed.region.page_bytes;
    (part.start < part.end).then(|| {
        placed.first_page + (part.start - start) / bytes..placed.first_page + (part.end - start).div_ceil(bytes)
    })
}

fn check(nr: usize, region: &Region, snapshot_bytes: u64) -> Result<(), RegionError> {
    let &Region { address, size_bytes, offset, page_bytes } = region;
    if size_bytes == 0 {
        return Err(RegionError::Empty { nr });
    }
    if !PAGE_SIZES.contains(&page_bytes) {
        return Err(RegionError::PageSize { nr, page_bytes });
    }
    // Where a huge page is in the snapshot does not matter to the kernel.
    let whole = [("address", address, page_bytes), ("size", size_bytes, page_bytes), ("offset", offset, PAGE_BYTES)];
    for (what, value, unit) in whole {
        if value % unit != 0 {
            return Err(RegionError::Unaligned { nr, what, value, page_bytes });
        }
    }
    if address.checked_add(size_bytes).is_none() {
        return Err(RegionError::Wraps { nr, start: address, size_bytes });
    }
    match offset.checked_add(size_bytes) {
        None => Err(RegionError::Wraps { nr, start: offset, size_bytes }),
        Some(end) if end > snapshot_bytes => Err(RegionError::BehindEnd { nr, end, size_bytes: snapshot_bytes }),
        Some(_) => Ok(()),
    }
}

/// Checks sorted ranges.
fn disjoint(what: &'static str, sorted: impl Iterator<Item = Range<u64>>) -> Result<(), RegionError> {
    let mut end = 0;
    for range in sorted {
        if range.start < end {
            return Err(RegionError::Overlap { what, at: range.start });
        }
        end = range.end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn region(address: u64, size_bytes: u64, offset: u64) -> Region {
        Region { address, size_bytes, offset, page_bytes: 4096 }
    }

    #[test]
    fn what_is_wrong_is_refused() {
        let refused = |regions: &[Region]| Regions::new(regions, 8 * MIB).unwrap_err();
        let good = region(MIB, MIB, 0);
        assert_eq!(refused(&[]), RegionError::None);
        assert_eq!(refused(&vec![good.clone(); 1025]), RegionError::TooMany { nr: 1025 });
        assert_eq!(refused(&[region(MIB, 0, 0)]), RegionError::Empty { nr: 0 });
        for page_bytes in [0, 1, 4095, 8192, u64::MAX] {
            let bad = Region { page_bytes, ..good.clone() };
            assert_eq!(refused(&[bad]), RegionError::PageSize { nr: 0, page_bytes });
        }
        assert!(matches!(refused(&[region(MIB + 1, MIB, 0)]), RegionError::Unaligned { what: "address", .. }));
        assert!(matches!(refused(&[region(MIB, MIB + 1, 0)]), RegionError::Unaligned { what: "size", .. }));
        assert!(matches!(refused(&[region(MIB, MIB, 1)]), RegionError::Unaligned { what: "offset", .. }));
        let huge = Region { page_bytes: 2 * MIB, ..region(MIB, 2 * MIB, 0) };
        assert!(matches!(refused(&[huge]), RegionError::Unaligned { what: "address", .. }));
        assert!(matches!(refused(&[region(u64::MAX - 4095, 8192, 0)]), RegionError::Wraps { .. }));
        assert!(matches!(refused(&[region(MIB, 8192, u64::MAX - 4095)]), RegionError::Wraps { .. }));
        assert!(matches!(refused(&[region(MIB, MIB, 8 * MIB)]), RegionError::BehindEnd { .. }));
        assert!(matches!(refused(&[region(MIB, 9 * MIB, 0)]), RegionError::BehindEnd { .. }));
        let overlap = [good.clone(), region(2 * MIB - 4096, MIB, MIB)];
        assert!(matches!(refused(&overlap), RegionError::Overlap { what: "address", .. }));
        let overlap = [good.clone(), region(4 * MIB, MIB, MIB - 4096)];
        assert!(matches!(refused(&overlap), RegionError::Overlap { what: "byte of the snapshot", .. }));
    }

    #[test]
    fn addresses_are_found() {
        let regions = Regions::new(&[region(4 * MIB, MIB, 0), region(MIB, 2 * MIB, MIB)], 4 * MIB).unwrap();
        assert_eq!(regions.find(MIB - 1), None);
        assert_eq!(regions.find(MIB), Some((0, 0)));
        assert_eq!(regions.find(3 * MIB - 1), Some((0, 511)));
        assert_eq!(regions.find(3 * MIB), None);
        assert_eq!(regions.find(4 * MIB + 4096), Some((1, 513)));
        assert_eq!(regions.find(5 * MIB), None);
        let touched: Vec<_> = regions.touched(3 * MIB - 4097..4 * MIB + 1).collect();
        assert_eq!(touched, [(0, 510..512), (1, 512..513)]);
        let touched: Vec<_> = regions.touched_offsets(MIB - 1..MIB + 1).collect();
        assert_eq!(touched, [(1, 512 + 255..512 + 256), (0, 0..1)]);
    }

    proptest! {
        #[test]
        fn accepted_regions_are_in_the_snapshot_and_each_page_has_one_number(
            regions in prop::collection::vec((0..64u64, 0..20u64, 0..64u64), 1..6)
        ) {
            let regions: Vec<_> = regions.iter().map(|&(a, s, o)| region(a * 4096, s * 4096, o * 4096)).collect();
            let Ok(checked) = Regions::new(&regions, 64 * 4096) else { return Ok(()) };
            prop_assert!(checked.size_bytes() <= 64 * 4096);
            let mut seen = std::collections::HashSet::new();
            for region in &regions {
                for address in region.addresses().step_by(4096) {
                    let (place, page) = checked.find(address).unwrap();
                    let placed = &checked.all()[place];
                    prop_assert!(seen.insert(page) && page < checked.nr_words() as u64 * 64);
                    prop_assert_eq!(placed.address_of(page), address);
                    prop_assert_eq!(placed.offset_of(page), region.offset + address - region.address);
                }
            }
        }
    }
}
