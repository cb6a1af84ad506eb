//! State of pages that user space sets, in the plain model: at which pages faults exit, and which
//! are private.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use slat::PAGE_SIZE;
use slat::error::{FaultError, SlotError};
use slat::slots::{MemoryAttributes, MemoryFaultFlags, UserfaultBitmap};

use super::super::ops::{BITMAP_WORDS, GUEST_MEMFD, NewBitmap, SIZES};
use super::*;

/// A userfault bitmap. The model and the engine read the same words.
#[derive(Clone, Debug)]
pub struct Userfault {
    pub words: Arc<Vec<AtomicU64>>,
    pub granularity: PageSize,
}

impl Userfault {
    /// A new bitmap for `nr_pages`, with one word more than they need.
    pub fn new(new: NewBitmap, nr_pages: u64) -> Userfault {
        let words = BITMAP_WORDS[new.words].iter().copied().cycle();
        let words = words.take(nr_pages.div_ceil(64) as usize + 1).map(AtomicU64::new).collect();
        Userfault { words: Arc::new(words), granularity: SIZES[new.granularity] }
    }

    pub fn bitmap(&self) -> UserfaultBitmap {
        UserfaultBitmap::new(Arc::<Vec<AtomicU64>>::clone(&self.words), self.granularity)
    }

    fn block_pages(&self) -> u64 {
        self.granularity.level().nr_pages()
    }

    fn is_set(&self, page: u64) -> bool {
        let bit = page / self.block_pages();
        self.words[bit as usize / 64].load(Ordering::Relaxed) >> (bit % 64) & 1 != 0
    }

    /// Whether a memslot `id` of `range` can have it.
    pub fn check(&self, id: u32, range: GfnRange) -> Result<(), SlotError> {
        if range.start.0.is_multiple_of(self.block_pages()) {
            Ok(())
        } else {
            let size_bytes = self.granularity.size_bytes();
            Err(SlotError::UnalignedUserfaultSlot { slot: id, gpa: range.start.gpa(), size_bytes })
        }
    }
}

impl Slot {
    pub fn is_private(&self, gfn: Gfn) -> bool {
        self.private.contains(&(gfn.0 - self.range.start.0))
    }

    fn is_set(&self, gfn: Gfn) -> bool {
        self.userfault.as_ref().is_some_and(|userfault| userfault.is_set(gfn.0 - self.range.start.0))
    }

    /// Whether it is mapped along with another page of the memslot, which is shared.
    pub fn is_mapped_along(&self, gfn: Gfn) -> bool {
        !self.is_set(gfn) && !self.is_private(gfn)
    }

    /// The exit of a fault on page `gfn`, if its bit is set.
    pub fn userfault_exit(&self, gfn: Gfn) -> Option<Exit> {
        let userfault = self.userfault.as_ref().filter(|_| self.is_set(gfn))?;
        let mut flags = MemoryFaultFlags::USERFAULT;
        flags.set(MemoryFaultFlags::PRIVATE, self.is_private(gfn));
        let block = gfn.block(userfault.granularity.level()).intersection(self.range);
        Some(Exit::MemoryFault { flags, gpa: block.start.gpa(), size: block.nr_pages() * PAGE_SIZE })
    }

    /// Whether one leaf may map `block`, as far as user space decides.
    pub fn allows_leaf(&self, block: GfnRange, level: Level) -> bool {
        if !self.range.covers(block) {
            return false;
        }
        let first = block.start.0 - self.range.start.0;
        let nr_private = self.private.range(first..first + block.nr_pages()).count() as u64;
        self.userfault.as_ref().is_none_or(|userfault| level <= userfault.granularity.level())
            && (nr_private == 0 || nr_private == block.nr_pages())
    }

    /// The bitmap of the memslot after a change.
    pub fn userfault_after(
        &self,
        id: u32,
        range: GfnRange,
        flags: MemoryRegionFlags,
        new: Option<&Userfault>,
    ) -> Result<Option<Userfault>, SlotError> {
        if (self.flags ^ flags).contains(GUEST_MEMFD) || (flags.contains(GUEST_MEMFD) && range != self.range) {
            return Err(SlotError::GuestMemfdFixed { slot: id });
        }
        if !flags.contains(USERFAULT) {
            return Ok(None);
        }
        let userfault = new.or(self.userfault.as_ref()).ok_or(SlotError::NoUserfaultBitmap { slot: id })?;
        userfault.check(id, range)?;
        Ok(Some(userfault.clone()))
    }
}

impl Model {
    /// Zaps those of `nr_pages` from `first_page` on of memslot `id` whose bit is set.
    pub fn rescan(&mut self, id: u32, first_page: u64, nr_pages: u64) -> Result<u64, SlotError> {
        let slot = self.slots.get(&id).ok_or(SlotError::NoSuchSlot { slot: id })?;
        let slot_pages = slot.range.nr_pages();
        if u128::from(first_page) + u128::from(nr_pages) > u128::from(slot_pages) {
            return Err(SlotError::RangePastEnd { slot: id, first_page, nr_pages, slot_pages });
        }
        let userfault = slot.userfault.as_ref().ok_or(SlotError::NotUserfault { slot: id })?;
        let level = userfault.granularity.level();
        let (start, mut next) = (slot.range.start.0, slot.range.start.0 + first_page);
        let mut blocks = Vec::new();
        while next < start + first_page + nr_pages {
            let block = Gfn(next).block(level).intersection(slot.range);
            if slot.is_set(Gfn(next)) {
                blocks.push(block);
            }
            next = block.end.0;
        }
        for block in &blocks {
            let gone: Vec<u64> = self.leaves.range(block.start.0..block.end.0).map(|(first, _)| *first).collect();
            gone.into_iter().for_each(|first| self.zap_leaf(first));
        }
        Ok(blocks.iter().map(|block| block.nr_pages()).sum())
    }

    /// The memslots that have the pages of `range`, with their parts of it; or the first page that
    /// has no memslot.
    fn parts(&self, range: GfnRange) -> Result<Vec<(u32, GfnRange)>, Gfn> {
        let (mut next, mut parts) = (range.start, Vec::new());
        while next < range.end {
            let id = self.slot_at(next).ok_or(next)?;
            let part = GfnRange { start: next, end: range.end.min(self.slots[&id].range.end) };
            parts.push((id, part));
            next = part.end;
        }
        Ok(parts)
    }

    pub fn set_attributes(&mut self, range: GfnRange, attributes: MemoryAttributes) -> Result<(), SlotError> {
        let none = |gfn: Gfn| SlotError::NoGuestMemfd { gpa: gfn.gpa() };
        // The error names the first page without a memslot with a guest_memfd.
        let mut next = range.start;
        while next < range.end {
            let slot = self.slot_at(next).map(|id| &self.slots[&id]).ok_or(none(next))?;
            if !slot.flags.contains(GUEST_MEMFD) {
                return Err(none(next));
            }
            next = slot.range.end;
        }
        self.zap_range(range);
        for (id, part) in self.parts(range).map_err(none)? {
            let Some(slot) = self.slots.get_mut(&id) else { continue };
            let start = slot.range.start.0;
            for page in part.start.0 - start..part.end.0 - start {
                match attributes.contains(MemoryAttributes::PRIVATE) {
                    true => slot.private.insert(page),
                    false => slot.private.remove(&page),
                };
            }
        }
        Ok(())
    }

    /// Whether the VMM may access the pages of `range`.
    pub fn check_access(&self, range: GfnRange) -> Result<Outcome, FaultError> {
        for gfn in (range.start.0..range.end.0).map(Gfn) {
            let slot = self.slot_at(gfn).map(|id| &self.slots[&id]).ok_or(FaultError::NoMemslot { gpa: gfn.gpa() })?;
            if let Some(exit) = slot.userfault_exit(gfn) {
                return Ok(Outcome::Exit(exit));
            }
            if slot.is_private(gfn) {
                let flags = MemoryFaultFlags::PRIVATE;
                return Ok(Outcome::Exit(Exit::MemoryFault { flags, gpa: gfn.gpa(), size: PAGE_SIZE }));
            }
        }
        Ok(Outcome::Resume)
    }
}
