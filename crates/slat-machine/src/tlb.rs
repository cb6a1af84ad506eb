//! The TLB of a software CPU: set-associative, one array for each page size.
//!
//! It is the machine's oracle for missing flushes: it keeps a translation as long as it may, so an engine that changes a
//! table and does not flush sees the guest go on through the old translation.
//!
//! # The protocol
//! - An entry belongs to a *context* (VM and PCID) and to the *generation* (see [`commit`](crate::commit)) that was read
//!   before its walk began. A lookup with a newer generation does not find it: a full flush costs the CPU nothing.
//! - An entry serves writes only if the walk that filled it found both that writing is permitted and that the dirty bit
//!   was set; otherwise a write would go by without setting it (Intel SDM vol. 3C, 29.3.5; AMD APM vol. 2, 5.4.2). The
//!   write walks anew and replaces the entry.
//! - An entry is one CPU's own and not shared, so filling needs no checked operation: a fill that a flush has overtaken
//!   is born dead.

use slat::{Hpa, PageSize};

use crate::commit::Generation;

/// Whose translations: the VM and, within it, the process-context identifier.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Context {
    /// The VM (VPID or ASID).
    pub vm: u16,
    /// The process-context identifier, 12 bits; [`Context::UNPAGED`] while the guest has paging off.
    pub pcid: u16,
}

impl Context {
    /// Stands for the PCID of a guest with paging off: no PCID has more than 12 bits.
    pub const UNPAGED: u16 = 1 << 12;

    const fn tag(self) -> u32 {
        (self.vm as u32) << 16 | self.pcid as u32
    }
}

/// What a write may do through an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Writes {
    /// Permitted, and the dirty bits are set: writes need no walk.
    Allowed,
    /// Not permitted, or the dirty bit still has to be set: a write must walk.
    MustWalk,
}

/// How many entries a TLB has: sets (a power of two) and ways for each page size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Sets and ways for 4 KiB translations.
    pub size_4k: (usize, usize),
    /// Sets and ways for 2 MiB translations.
    pub size_2m: (usize, usize),
    /// Sets and ways for 1 GiB translations.
    pub size_1g: (usize, usize),
}

impl Default for Geometry {
    /// About a second-level TLB of today: 1024 entries for 4 KiB, 512 for 2 MiB, 16 for 1 GiB.
    fn default() -> Geometry {
        Geometry { size_4k: (128, 8), size_2m: (64, 8), size_1g: (4, 4) }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// Page number, in units of the array's page size.
    page: u64,
    /// 0: never filled (no generation is 0).
    generation: u64,
    /// Host-physical address of the page, with [`Entry::WRITES_ALLOWED`].
    frame: u64,
    context: u32,
}

impl Entry {
    const WRITES_ALLOWED: u64 = 1;
}

/// The translations of one page size.
#[derive(Clone, Debug)]
struct Array {
    page_shift: u32,
    entries: Box<[Entry]>,
    /// The way of each set that is replaced next.
    next_way: Box<[u8]>,
    ways: usize,
    set_mask: u64,
    /// Whether anything was filled since the last [`Tlb::clear`]: most guests use one or two page sizes, and the other
    /// arrays need no look.
    used: bool,
}

impl Array {
    fn new(size: PageSize, (sets, ways): (usize, usize)) -> Array {
        // Any geometry works: sets are rounded up to a power of two, and ways fit the replacement counter.
        let sets = sets.max(1).next_power_of_two();
        let ways = ways.clamp(1, 128);
        Array {
            page_shift: size.size_bytes().trailing_zeros(),
            entries: vec![Entry::default(); sets * ways].into_boxed_slice(),
            next_way: vec![0; sets].into_boxed_slice(),
            ways,
            set_mask: sets as u64 - 1,
            used: false,
        }
    }

    #[inline]
    fn set(&self, page: u64) -> usize {
        (page & self.set_mask) as usize
    }

    #[inline]
    fn find(&self, context: u32, address: u64, generation: u64) -> Option<&Entry> {
        let page = address >> self.page_shift;
        let first = self.set(page) * self.ways;
        self.entries[first..first + self.ways]
            .iter()
            .find(|entry| entry.page == page && entry.generation == generation && entry.context == context)
    }

    fn fill(&mut self, new: Entry) {
        self.used = true;
        let set = self.set(new.page);
        let first = set * self.ways;
        let ways = &mut self.entries[first..first + self.ways];
        // The same page again (a read filled it, now a write did), else a dead entry, else the next in turn.
        let same = ways.iter().position(|entry| entry.page == new.page && entry.context == new.context);
        let way =
            same.or_else(|| ways.iter().position(|entry| entry.generation != new.generation)).unwrap_or_else(|| {
                let way = usize::from(self.next_way[set]) % self.ways;
                self.next_way[set] = (way + 1) as u8;
                way
            });
        ways[way] = new;
    }

    fn remove(&mut self, wanted: impl Fn(&Entry, u32) -> bool) {
        let page_shift = self.page_shift;
        for entry in &mut self.entries {
            if wanted(entry, page_shift) {
                *entry = Entry::default();
            }
        }
    }
}

/// A translation lookaside buffer.
#[derive(Clone, Debug)]
pub struct Tlb {
    arrays: [Array; 3],
    nr_hits: u64,
    nr_misses: u64,
}

impl Tlb {
    /// An empty TLB. Numbers of sets are rounded up to powers of two, and no number is less than one.
    pub fn new(geometry: Geometry) -> Tlb {
        Tlb {
            arrays: [
                Array::new(PageSize::Size4K, geometry.size_4k),
                Array::new(PageSize::Size2M, geometry.size_2m),
                Array::new(PageSize::Size1G, geometry.size_1g),
            ],
            nr_hits: 0,
            nr_misses: 0,
        }
    }

    /// The host-physical address behind `address` for a read.
    #[inline]
    pub fn lookup_read(&mut self, context: Context, address: u64, generation: Generation) -> Option<Hpa> {
        self.lookup(context, address, generation, 0)
    }

    /// The host-physical address behind `address` for a write: found only if the entry allows writes.
    #[inline]
    pub fn lookup_write(&mut self, context: Context, address: u64, generation: Generation) -> Option<Hpa> {
        self.lookup(context, address, generation, Entry::WRITES_ALLOWED)
    }

    #[inline]
    fn lookup(&mut self, context: Context, address: u64, generation: Generation, needed: u64) -> Option<Hpa> {
        for array in &self.arrays {
            if !array.used {
                continue;
            }
            if let Some(entry) = array.find(context.tag(), address, generation.get())
                && entry.frame & needed == needed
            {
                self.nr_hits += 1;
                let offset = address & ((1 << array.page_shift) - 1);
                return Some(Hpa((entry.frame & !Entry::WRITES_ALLOWED) | offset));
            }
        }
        self.nr_misses += 1;
        None
    }

    /// Keeps the translation of the page around `address`: `hpa` is what `address` itself translates to, and
    /// `generation` was read before the walk began.
    pub fn fill(
        &mut self,
        context: Context,
        address: u64,
        generation: Generation,
        size: PageSize,
        hpa: Hpa,
        writes: Writes,
    ) {
        let array = &mut self.arrays[match size {
            PageSize::Size4K => 0,
            PageSize::Size2M => 1,
            PageSize::Size1G => 2,
        }];
        let mut frame = hpa.0 & !(size.size_bytes() - 1);
        if writes == Writes::Allowed {
            frame |= Entry::WRITES_ALLOWED;
        }
        array.fill(Entry {
            page: address >> array.page_shift,
            generation: generation.get(),
            frame,
            context: context.tag(),
        });
    }

    /// Forgets the translations of `address` in `context` (INVLPG).
    pub fn invalidate_page(&mut self, context: Context, address: u64) {
        let tag = context.tag();
        for array in &mut self.arrays {
            array.remove(|entry, page_shift| entry.context == tag && entry.page == address >> page_shift);
        }
    }

    /// Forgets all translations of `context`.
    pub fn invalidate_context(&mut self, context: Context) {
        let tag = context.tag();
        for array in &mut self.arrays {
            array.remove(|entry, _| entry.context == tag);
        }
    }

    /// Forgets everything; the counters stay.
    pub fn clear(&mut self) {
        for array in &mut self.arrays {
            array.remove(|_, _| true);
            array.used = false;
        }
    }

    /// Lookups that found a usable entry.
    pub fn nr_hits(&self) -> u64 {
        self.nr_hits
    }

    /// Lookups that found none, or one that does not serve the access.
    pub fn nr_misses(&self) -> u64 {
        self.nr_misses
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTEXT: Context = Context { vm: 1, pcid: 2 };

    fn generation(number: u64) -> Generation {
        Generation::from_raw(number)
    }

    fn tlb() -> Tlb {
        Tlb::new(Geometry { size_4k: (2, 2), size_2m: (2, 1), size_1g: (1, 1) })
    }

    #[test]
    fn finds_what_was_filled_in_each_size() {
        for (size, offset) in
            [(PageSize::Size4K, 0xff8), (PageSize::Size2M, 0x12_3458), (PageSize::Size1G, 0x1234_5678)]
        {
            let mut tlb = tlb();
            let base = 5 << 30;
            let hpa = 1 << 50 | 3 << 30;
            tlb.fill(CONTEXT, base + 8, generation(1), size, Hpa(hpa + 8), Writes::MustWalk);
            assert_eq!(tlb.lookup_read(CONTEXT, base + offset, generation(1)), Some(Hpa(hpa + offset)));
            assert_eq!(tlb.lookup_read(CONTEXT, base + size.size_bytes(), generation(1)), None);
            assert_eq!((tlb.nr_hits(), tlb.nr_misses()), (1, 1));
        }
    }

    #[test]
    fn an_older_generation_is_dead() {
        let mut tlb = tlb();
        tlb.fill(CONTEXT, 0x1000, generation(1), PageSize::Size4K, Hpa(0x9000), Writes::Allowed);
        assert_eq!(tlb.lookup_read(CONTEXT, 0x1000, generation(2)), None);
        // Filled late by a walk that a flush has overtaken.
        tlb.fill(CONTEXT, 0x1000, generation(1), PageSize::Size4K, Hpa(0x9000), Writes::Allowed);
        assert_eq!(tlb.lookup_read(CONTEXT, 0x1000, generation(2)), None);
    }

    #[test]
    fn contexts_are_apart() {
        let mut tlb = tlb();
        tlb.fill(CONTEXT, 0, generation(1), PageSize::Size4K, Hpa(0x9000), Writes::Allowed);
        for other in [Context { vm: 2, ..CONTEXT }, Context { pcid: 3, ..CONTEXT }] {
            assert_eq!(tlb.lookup_read(other, 0, generation(1)), None);
            tlb.invalidate_context(other);
        }
        assert_eq!(tlb.lookup_read(CONTEXT, 0, generation(1)), Some(Hpa(0x9000)));
        tlb.invalidate_context(CONTEXT);
        assert_eq!(tlb.lookup_read(CONTEXT, 0, generation(1)), None);
    }

    #[test]
    fn a_read_filled_entry_does_not_serve_writes_until_a_write_fills_it() {
        let mut tlb = tlb();
        tlb.fill(CONTEXT, 0x1000, generation(1), PageSize::Size4K, Hpa(0x9000), Writes::MustWalk);
        assert_eq!(tlb.lookup_write(CONTEXT, 0x1000, generation(1)), None);
        tlb.fill(CONTEXT, 0x1000, generation(1), PageSize::Size4K, Hpa(0x9000), Writes::Allowed);
        assert_eq!(tlb.lookup_write(CONTEXT, 0x1008, generation(1)), Some(Hpa(0x9008)));
        assert_eq!(tlb.lookup_read(CONTEXT, 0x1008, generation(1)), Some(Hpa(0x9008)));
    }

    #[test]
    fn a_small_page_serves_writes_beside_a_read_filled_large_one() {
        let mut tlb = tlb();
        tlb.fill(CONTEXT, 0, generation(1), PageSize::Size2M, Hpa(0x20_0000), Writes::MustWalk);
        tlb.fill(CONTEXT, 0x1000, generation(1), PageSize::Size4K, Hpa(0x20_1000), Writes::Allowed);
        assert_eq!(tlb.lookup_write(CONTEXT, 0x1000, generation(1)), Some(Hpa(0x20_1000)));
    }

    #[test]
    fn replaces_dead_entries_before_live_ones() {
        let mut tlb = tlb();
        // Pages 0 and 2 share a set of two ways; page 0 dies.
        tlb.fill(CONTEXT, 0, generation(1), PageSize::Size4K, Hpa(0xa000), Writes::Allowed);
        tlb.fill(CONTEXT, 0x2000, generation(2), PageSize::Size4K, Hpa(0xb000), Writes::Allowed);
        tlb.fill(CONTEXT, 0x4000, generation(2), PageSize::Size4K, Hpa(0xc000), Writes::Allowed);
        assert!(tlb.lookup_read(CONTEXT, 0x2000, generation(2)).is_some());
        assert!(tlb.lookup_read(CONTEXT, 0x4000, generation(2)).is_some());
        // No dead one left: one of the two goes.
        tlb.fill(CONTEXT, 0x6000, generation(2), PageSize::Size4K, Hpa(0xd000), Writes::Allowed);
        let live = [0x2000, 0x4000, 0x6000].map(|address| tlb.lookup_read(CONTEXT, address, generation(2)).is_some());
        assert_eq!(live.iter().filter(|live| **live).count(), 2);
        assert!(live[2]);
    }

    #[test]
    fn forgets_a_page_and_everything() {
        let mut tlb = tlb();
        tlb.fill(CONTEXT, 0, generation(1), PageSize::Size2M, Hpa(0x20_0000), Writes::Allowed);
        tlb.fill(CONTEXT, 0x20_0000, generation(1), PageSize::Size2M, Hpa(0x40_0000), Writes::Allowed);
        tlb.invalidate_page(CONTEXT, 0x1000);
        assert_eq!(tlb.lookup_read(CONTEXT, 0, generation(1)), None);
        assert!(tlb.lookup_read(CONTEXT, 0x20_0000, generation(1)).is_some());
        tlb.clear();
        assert_eq!(tlb.lookup_read(CONTEXT, 0x20_0000, generation(1)), None);
    }

    #[test]
    fn odd_geometries_are_made_to_fit() {
        let mut tlb = Tlb::new(Geometry { size_4k: (0, 0), size_2m: (3, 1000), size_1g: (1, 1) });
        tlb.fill(CONTEXT, 0, generation(1), PageSize::Size4K, Hpa(0x1000), Writes::Allowed);
        assert!(tlb.lookup_write(CONTEXT, 0, generation(1)).is_some());
    }
}
