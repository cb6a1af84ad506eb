//! The TLB of a software CPU: set-associative, one array for each page size.
//!
//! It is the machine's oracle for missing flushes: it keeps a translation as long as it may. If an
//! engine changes a page table and does not flush, or flushes another range, the guest goes on
//! through the old translation.
//!
//! # Implementation
//! - An entry belongs to a *context* (VM and PCID). The guest's address finds it, and the
//!   guest-physical page behind it drops it; while the guest has paging off the two are the same.
//! - The CPU drops what was flushed ([`Tlb::drop_range`], [`Tlb::clear`]) before its next look-up,
//!   and fills only with the result of a walk that began after that (see
//!   [`cpu`](crate::hardware::cpu)). An entry has no generation.
//! - An entry serves writes only if the walk that filled it found both that writing is permitted
//!   and that the dirty bit was set; otherwise a write would not set it (Intel SDM vol. 3C, 29.3.5;
//!   AMD APM vol. 2, 5.4.2). The write walks anew and replaces the entry.
//! - The translations of a CPU without a second stage ([`shadow_cpu`](crate::hardware::shadow_cpu))
//!   also depend on the access. Their entries have all [`Rights`] that the walk found, and serve an
//!   access that needs no others.
//!
//! # What a flush drops
//! An entry is dropped if its guest-physical page shares a 4 KiB page with a range, however large
//! the entry's page is. While the guest has paging on, an entry also came from the guest's own page
//! tables, which are in guest-physical pages, too; a flush of those does not drop it. It need not.
//! The entry maps only the frame of its own page. Its other contents are those of the guest's page
//! tables, which a CPU may keep until the guest invalidates them (Intel SDM vol. 3A, "Invalidation
//! of TLBs and paging-structure caches"), wherever the host keeps those pages meanwhile. There is
//! no cache of the guest's walk that could lead into their old frames; PTEs of the second stage
//! that are cached ([`PteCache`](crate::hardware::walk::cached::PteCache)) are dropped with their
//! pages. (The flushes that hypervisors use, INVEPT and those by VPID or ASID, drop more because
//! they have no ranges.)

use slat::{Gfn, GfnRange, Gpa, Hpa, PageSize};

/// The tag of translations: the VM and, within it, the process-context identifier.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Context {
    /// The VM (VPID or ASID).
    pub vm: u16,
    /// The process-context identifier, 12 bits; [`Context::UNPAGED`] while the guest has paging
    /// off.
    pub pcid: u16,
}

impl Context {
    /// In place of the PCID of a guest with paging off: no PCID has more than 12 bits.
    pub const UNPAGED: u16 = 1 << 12;

    const fn tag(self) -> u32 {
        (self.vm as u32) << 16 | self.pcid as u32
    }
}

/// Whether a write may use an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Writes {
    /// Permitted, and the dirty bits are set: writes need no walk.
    Allowed,
    /// Not permitted, or the dirty bit still has to be set: a write must walk.
    MustWalk,
}

/// The rights that the page tables grant at an address, or that an access needs: a set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rights(u64);

impl Rights {
    /// None, or none needed.
    pub const NONE: Rights = Rights(0);
    /// To write; the dirty bits are set.
    pub const WRITE: Rights = Rights(1 << 0);
    /// To fetch instructions; where a second stage tells modes apart, in supervisor mode.
    pub const EXECUTE: Rights = Rights(1 << 1);
    /// To be accessed as a user page.
    pub const USER: Rights = Rights(1 << 2);
    /// To be accessed as a supervisor page only, for SMEP and SMAP.
    pub const SUPERVISOR: Rights = Rights(1 << 3);

    /// To fetch instructions in user mode, by a second stage.
    pub const EXECUTE_USER: Rights = Rights(1 << 4);

    /// All of them, in the bits of a frame's address that are zero.
    const MASK: u64 = 0x1f;

    /// The union with `other`.
    #[inline]
    #[must_use]
    pub const fn and(self, other: Rights) -> Rights {
        Rights(self.0 | other.0)
    }

    /// The difference to `other`.
    #[inline]
    #[must_use]
    pub const fn without(self, other: Rights) -> Rights {
        Rights(self.0 & !other.0)
    }

    /// Whether all of `needed` are among these.
    #[inline]
    pub const fn grant(self, needed: Rights) -> bool {
        self.0 & needed.0 == needed.0
    }
}

impl From<Writes> for Rights {
    #[inline]
    fn from(writes: Writes) -> Rights {
        match writes {
            Writes::Allowed => Rights::WRITE,
            Writes::MustWalk => Rights::NONE,
        }
    }
}

/// The size of a TLB: sets (a power of two) and ways for each page size.
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
struct TlbEntry {
    /// Page number, in units of the array's page size.
    page: u64,
    /// The array's version and the context's tag. Dead in any other version; 0 is none.
    tag: u64,
    /// Host-physical address of the page, with its [`Rights`].
    frame: u64,
    /// First guest-physical frame of the page.
    gfn: Gfn,
}

/// The first version; in an entry's tag it is above the context.
const FIRST_VERSION: u64 = 1 << 32;

/// The translations of one page size.
#[derive(Clone, Debug)]
struct Array {
    page_shift: u32,
    entries: Box<[TlbEntry]>,
    /// The way of each set that is replaced next.
    next_way: Box<[u8]>,
    ways: usize,
    set_mask: u64,
    /// Entries of older versions are dead: dropping everything takes one addition.
    version: u64,
    /// Most guests use one or two page sizes: an array without live entries needs no search.
    nr_live: u64,
    /// Contains all guest-physical frames behind live entries; empty before the first fill.
    span: GfnRange,
    /// Whether all live entries have equal guest and guest-physical addresses: then a frame
    /// determines the set.
    is_identity: bool,
}

impl Array {
    fn new(size: PageSize, (sets, ways): (usize, usize)) -> Array {
        // Any geometry works: sets are rounded up to a power of two, and ways fit the replacement
        // counter.
        let sets = sets.max(1).next_power_of_two();
        let ways = ways.clamp(1, 128);
        Array {
            page_shift: size.size_bytes().trailing_zeros(),
            entries: vec![TlbEntry::default(); sets * ways].into_boxed_slice(),
            next_way: vec![0; sets].into_boxed_slice(),
            ways,
            set_mask: sets as u64 - 1,
            version: FIRST_VERSION,
            nr_live: 0,
            span: GfnRange::new(Gfn(0), 0),
            is_identity: true,
        }
    }

    #[inline]
    fn set(&self, page: u64) -> usize {
        (page & self.set_mask) as usize
    }

    #[inline]
    fn tag(&self, context: Context) -> u64 {
        self.version | u64::from(context.tag())
    }

    #[inline]
    fn find(&self, context: Context, address: u64) -> Option<&TlbEntry> {
        let page = address >> self.page_shift;
        let tag = self.tag(context);
        let first = self.set(page) * self.ways;
        self.entries[first..first + self.ways].iter().find(|entry| entry.page == page && entry.tag == tag)
    }

    /// Whether there is an entry for a part of the page of `size` around `address`.
    fn has_part(&self, context: Context, address: u64, size: PageSize) -> bool {
        let (tag, shift) = (self.tag(context), size.size_bytes().trailing_zeros());
        let within = |entry: &TlbEntry| entry.page >> (shift - self.page_shift) == address >> shift;
        self.entries.iter().any(|entry| entry.tag == tag && within(entry))
    }

    /// log2 of the 4 KiB frames of a page.
    fn frames_shift(&self) -> u32 {
        self.page_shift - Gfn::SHIFT
    }

    fn fill(&mut self, new: TlbEntry) {
        let block = GfnRange::new(new.gfn, 1 << self.frames_shift());
        let is_identity = new.page << self.frames_shift() == new.gfn.0;
        if self.nr_live == 0 {
            self.span = block;
            self.is_identity = is_identity;
        } else {
            self.span = GfnRange { start: self.span.start.min(block.start), end: self.span.end.max(block.end) };
            self.is_identity &= is_identity;
        }
        let set = self.set(new.page);
        let first = set * self.ways;
        let version = self.version;
        let ways = &mut self.entries[first..first + self.ways];
        // The same page again (a write after a read), else a dead entry, else the next in turn.
        let same = ways.iter().position(|entry| entry.page == new.page && entry.tag == new.tag);
        let way = same.or_else(|| ways.iter().position(|entry| !is_live(entry, version))).unwrap_or_else(|| {
            let way = usize::from(self.next_way[set]) % self.ways;
            self.next_way[set] = (way + 1) as u8;
            way
        });
        self.nr_live += u64::from(!is_live(&ways[way], version));
        ways[way] = new;
    }

    /// Removes the wanted ones of the live entries in `places`. Returns how many.
    fn remove_in(&mut self, places: std::ops::Range<usize>, wanted: impl Fn(&TlbEntry) -> bool) -> u64 {
        let mut nr_removed = 0;
        for entry in &mut self.entries[places] {
            if is_live(entry, self.version) && wanted(entry) {
                entry.tag = 0;
                nr_removed += 1;
            }
        }
        self.nr_live -= nr_removed;
        nr_removed
    }

    fn remove(&mut self, wanted: impl Fn(&TlbEntry) -> bool) -> u64 {
        if self.nr_live == 0 { 0 } else { self.remove_in(0..self.entries.len(), wanted) }
    }

    /// Removes the wanted ones of the translations of the page at `address`.
    fn remove_page(&mut self, address: u64, wanted: impl Fn(&TlbEntry) -> bool) {
        if self.nr_live > 0 {
            let page = address >> self.page_shift;
            let first = self.set(page) * self.ways;
            self.remove_in(first..first + self.ways, |entry| entry.page == page && wanted(entry));
        }
    }

    fn drop_range(&mut self, range: GfnRange) -> u64 {
        // Memslots, and the parts of them that CPUs work in, are far apart: most ranges contain no
        // entries or all.
        if self.nr_live == 0 || range.is_empty() || !range.overlaps(self.span) {
            return 0;
        }
        if range.covers(self.span) {
            return self.clear();
        }
        let shift = self.frames_shift();
        let (first, last) = (range.start.0 >> shift, (range.end.0 - 1) >> shift);
        if self.is_identity && last - first < self.set_mask {
            // Fewer pages than sets.
            let ways = self.ways;
            (first..=last)
                .map(|page| {
                    let first = self.set(page) * ways;
                    self.remove_in(first..first + ways, |entry| entry.page == page)
                })
                .sum()
        } else {
            self.remove(|entry| range.overlaps(GfnRange::new(entry.gfn, 1 << shift)))
        }
    }

    fn clear(&mut self) -> u64 {
        // After 2^32 times the old entries would be live again.
        self.version = self.version.checked_add(FIRST_VERSION).unwrap_or_else(|| {
            self.entries.fill(TlbEntry::default());
            FIRST_VERSION
        });
        std::mem::take(&mut self.nr_live)
    }
}

/// The VM of an entry's context: see [`Context::tag`].
fn vm_of(entry: &TlbEntry) -> u16 {
    (entry.tag >> 16) as u16
}

fn is_live(entry: &TlbEntry, version: u64) -> bool {
    entry.tag & !(FIRST_VERSION - 1) == version
}

/// A translation lookaside buffer.
#[derive(Clone, Debug)]
pub struct Tlb {
    arrays: [Array; 3],
    nr_misses: u64,
}

impl Tlb {
    /// An empty TLB. Numbers of sets are rounded up to powers of two, and no number is less than
    /// one.
    pub fn new(geometry: Geometry) -> Tlb {
        Tlb {
            arrays: [
                Array::new(PageSize::Size4K, geometry.size_4k),
                Array::new(PageSize::Size2M, geometry.size_2m),
                Array::new(PageSize::Size1G, geometry.size_1g),
            ],
            nr_misses: 0,
        }
    }

    /// The host-physical address behind `address` for a read.
    #[inline]
    pub fn lookup_read(&mut self, context: Context, address: u64) -> Option<Hpa> {
        self.lookup(context, address, Rights::NONE)
    }

    /// The host-physical address behind `address` for a write: only if the entry allows writes.
    #[inline]
    pub fn lookup_write(&mut self, context: Context, address: u64) -> Option<Hpa> {
        self.lookup(context, address, Rights::WRITE)
    }

    /// The host-physical address behind `address` for an access that needs rights: only if the
    /// entry has them all.
    #[inline]
    pub fn lookup(&mut self, context: Context, address: u64, needed: Rights) -> Option<Hpa> {
        for array in &self.arrays {
            if array.nr_live == 0 {
                continue;
            }
            if let Some(entry) = array.find(context, address)
                && Rights(entry.frame).grant(needed)
            {
                let offset = address & ((1 << array.page_shift) - 1);
                return Some(Hpa((entry.frame & !Rights::MASK) | offset));
            }
        }
        self.nr_misses += 1;
        None
    }

    /// Fills in the translation of the page of `size` around `address`: the two stages translate
    /// `address` itself to `gpa` and `hpa`. (A CPU without a second stage has no `gpa`, and drops
    /// nothing by ranges.)
    pub fn fill(
        &mut self,
        context: Context,
        address: u64,
        gpa: Gpa,
        size: PageSize,
        hpa: Hpa,
        rights: impl Into<Rights>,
    ) {
        let array = &mut self.arrays[match size {
            PageSize::Size4K => 0,
            PageSize::Size2M => 1,
            PageSize::Size1G => 2,
        }];
        array.fill(TlbEntry {
            page: address >> array.page_shift,
            tag: array.tag(context),
            frame: hpa.0 & !(size.size_bytes() - 1) | rights.into().0,
            gfn: gpa.gfn().align_down(size.level()),
        });
    }

    /// The size of another translation in `context` that the TLB has for a part of the page of
    /// `size` around `address`.
    pub fn other_size(&self, context: Context, address: u64, size: PageSize) -> Option<PageSize> {
        let sizes = [PageSize::Size4K, PageSize::Size2M, PageSize::Size1G];
        let has_other = |array: &Array, other: PageSize| match other {
            _ if array.nr_live == 0 || other == size => false,
            _ if other > size => array.find(context, address).is_some(),
            _ => array.has_part(context, address, size),
        };
        self.arrays.iter().zip(sizes).find(|&(array, other)| has_other(array, other)).map(|(_, other)| other)
    }

    /// Drops the translations, in all contexts, of pages that have a part in `range`. Returns their
    /// number.
    pub fn drop_range(&mut self, range: GfnRange) -> u64 {
        self.arrays.iter_mut().map(|array| array.drop_range(range)).sum()
    }

    /// Drops the translations of `address` in `context` (INVLPG).
    pub fn invalidate_page(&mut self, context: Context, address: u64) {
        for array in &mut self.arrays {
            let tag = array.tag(context);
            array.remove_page(address, |entry| entry.tag == tag);
        }
    }

    /// Drops the translations of `address` in all contexts of `vm`.
    pub fn invalidate_page_in_vm(&mut self, vm: u16, address: u64) {
        for array in &mut self.arrays {
            array.remove_page(address, |entry| vm_of(entry) == vm);
        }
    }

    /// Drops all translations of `context`.
    pub fn invalidate_context(&mut self, context: Context) {
        for array in &mut self.arrays {
            let tag = array.tag(context);
            array.remove(|entry| entry.tag == tag);
        }
    }

    /// Drops everything; the counters stay. Returns the number of translations that there were.
    pub fn clear(&mut self) -> u64 {
        self.arrays.iter_mut().map(Array::clear).sum()
    }

    /// Lookups that found none, or one that does not serve the access.
    pub fn nr_misses(&self) -> u64 {
        self.nr_misses
    }
}

#[cfg(test)]
mod tests;
