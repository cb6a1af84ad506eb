//! A guest's memory: a frame for each page, from its first use on, which can be exchanged for
//! another one while the guest runs.
//!
//! A block of 2 MiB gets its frames as a whole, so that a leaf of 2 MiB can map it, or page by
//! page: in turns, or as [`Blocks`] says. A page that leaves its home frame makes its block small,
//! until it is back.
//!
//! A frame is on the NUMA node of the CPU that asks for it: the one that first uses the page or its
//! block, or that moves the page. Only without memory there it is on another one.
//!
//! Frames that were taken from the guest are filled with [`POISON`], and kept. A frame that is used
//! again must still have it: otherwise the guest has written through a translation that it should
//! not have had any more.

#![expect(unsafe_code, reason = "reads and writes frames by their addresses")]

use alloc::alloc::dealloc;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::alloc::Layout;
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use slat::host::{Resolved, Unresolved};
use slat::{NodeId, PAGE_SIZE, PageSize, Pfn};
use spin::Mutex;
use thiserror::Error;

use crate::arch::guest::sync_memory;
use crate::error;
use crate::memory::{self, node_of, own_node};
use crate::nodes::MAX_NODES;

/// What frames have that the guest must not use.
pub const POISON: u64 = 0xdead_f4a3_e000_dead;

const BLOCK_PAGES: u64 = 512;
const PAGE_WORDS: usize = PAGE_SIZE as usize / 8;

/// Bit 63 of a page's word: an exchange or a copy is under way.
const LOCKED: u64 = 1 << 63;

/// `bytes` from byte `offset` on, page by page: the page, the byte in it, and the part.
fn parts(offset: u64, bytes: &[u8]) -> impl Iterator<Item = (u64, usize, &[u8])> {
    let (page, at) = (offset / PAGE_SIZE, (offset % PAGE_SIZE) as usize);
    let (first, rest) = bytes.split_at(bytes.len().min(PAGE_SIZE as usize - at));
    let rest = (page + 1..).zip(rest.chunks(PAGE_SIZE as usize)).map(|(page, part)| (page, 0, part));
    core::iter::once((page, at, first)).chain(rest).filter(|(.., part)| !part.is_empty())
}

/// Writes `bytes` into `words`, from byte `at` on.
fn write_words(words: &[AtomicU64], at: usize, bytes: &[u8]) {
    for (at, &byte) in (at..).zip(bytes) {
        let (word, shift) = (&words[at / 8], at % 8 * 8);
        // Relaxed: the guest does not run yet.
        let others = word.load(Ordering::Relaxed) & !(0xff << shift);
        word.store(others | u64::from(byte) << shift, Ordering::Relaxed);
    }
}

/// Fills the frame of a page before the guest first uses it.
pub type Fill = fn(page: u64, words: &[AtomicU64]);

/// How blocks of 2 MiB get their frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Blocks {
    /// One as a whole, the next page by page.
    InTurns,
    /// All as a whole.
    Huge,
    /// All page by page.
    Small,
}

/// A block of 2 MiB.
#[derive(Debug, Default)]
struct Block {
    /// The first frame of its home, 0 if its pages have none in common.
    home: AtomicU64,
    /// The node that these were asked from.
    home_node: AtomicU8,
    /// Pages that are elsewhere.
    nr_away: AtomicU32,
    /// Whether a page has had a frame: the first one decides whether the block gets its frames as a
    /// whole. Locked while frames are allocated.
    is_used: Mutex<bool>,
}

/// The memory of a memslot.
#[derive(Debug)]
pub struct Ram {
    /// For each page its frame, 0 before the first use; and [`LOCKED`].
    pages: Box<[AtomicU64]>,
    /// For each page that has a frame the node that it was asked from.
    asked: Box<[AtomicU8]>,
    blocks: Box<[Block]>,
    kind: Blocks,
    fill: Fill,
    /// Single frames that were taken from the guest, by their nodes. A home frame that waits for its
    /// page is not here.
    spare: [Mutex<Vec<Pfn>>; MAX_NODES],
}

/// A page whose frame stays as long as this exists.
#[derive(Debug)]
pub struct LockedPage<'r> {
    ram: &'r Ram,
    page: u64,
    frame: Pfn,
}

impl Drop for LockedPage<'_> {
    fn drop(&mut self) {
        // Release: what was done to the frame comes before the next owner's.
        self.ram.pages[self.page as usize].store(self.frame.0, Ordering::Release);
    }
}

/// The words of a frame that a [`Ram`] allocated, or that the caller owns.
///
/// # Safety
/// The frame is allocated memory for as long as the words are used.
pub(crate) unsafe fn words<'a>(frame: Pfn) -> &'a [AtomicU64] {
    // SAFETY: memory is mapped to itself; a page is aligned, and its words are integers.
    unsafe { core::slice::from_raw_parts((frame.0 * PAGE_SIZE) as *const AtomicU64, PAGE_WORDS) }
}

/// Copies a frame word by word: the guest may write it meanwhile.
pub fn copy_words(from: &[AtomicU64], to: &[AtomicU64]) {
    for (from, to) in from.iter().zip(to) {
        // Relaxed: the flush orders the last write of the guest before the copy that counts.
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

fn fill_words(words: &[AtomicU64], value: u64) {
    words.iter().for_each(|word| word.store(value, Ordering::Relaxed));
}

fn allocate(nr_pages: u64, node: NodeId) -> Option<Pfn> {
    let size = (nr_pages * PAGE_SIZE) as usize;
    let layout = Layout::from_size_align(size, size).ok()?;
    // SAFETY: the layout has a size.
    let block = unsafe { memory::allocate(layout, node) };
    (!block.is_null()).then(|| Pfn(block.expose_provenance() as u64 / PAGE_SIZE))
}

/// Frees frames.
///
/// # Safety
/// [`allocate`] returned `frame` for as many pages, a power of two, and nothing uses them any more.
unsafe fn free(frame: Pfn, nr_pages: u64) {
    let size = (nr_pages * PAGE_SIZE) as usize;
    // SAFETY: as the caller promises.
    unsafe { dealloc((frame.0 * PAGE_SIZE) as *mut u8, Layout::from_size_align_unchecked(size, size)) };
}

/// A frame was written after it was taken from the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("frame {frame} was written after it was taken from the guest: {found:#x} at byte {offset}")]
pub struct Written {
    /// The frame.
    pub frame: Pfn,
    /// The first byte that differs from the poison.
    pub offset: usize,
    /// What is there.
    pub found: u64,
}

/// Why a page did not move.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum MoveError {
    /// There is no memory.
    #[error("there is no memory for a page that moves")]
    OutOfMemory,
    /// The frame that it was to get is not as it was left.
    #[error(transparent)]
    Written(#[from] Written),
}

impl Ram {
    /// Memory of `nr_pages` pages, none of which has a frame. `fill` prepares each one.
    pub fn new(nr_pages: u64, fill: Fill) -> Ram {
        Ram::of(Blocks::InTurns, nr_pages, fill)
    }

    /// The same, with blocks of `kind`.
    pub fn of(kind: Blocks, nr_pages: u64, fill: Fill) -> Ram {
        Ram {
            kind,
            pages: (0..nr_pages).map(|_| AtomicU64::new(0)).collect(),
            asked: (0..nr_pages).map(|_| AtomicU8::new(0)).collect(),
            blocks: (0..nr_pages.div_ceil(BLOCK_PAGES)).map(|_| Block::default()).collect(),
            fill,
            spare: Default::default(),
        }
    }

    /// The number of pages.
    pub fn nr_pages(&self) -> u64 {
        self.pages.len() as u64
    }

    /// Fills `words` as the frame of `page` is filled before its first use.
    pub fn fill(&self, page: u64, words: &[AtomicU64]) {
        (self.fill)(page, words);
        sync_memory(words);
    }

    /// Whether the page has a frame already.
    pub fn is_allocated(&self, page: u64) -> bool {
        self.pages[page as usize].load(Ordering::Acquire) & !LOCKED != 0
    }

    /// The node that the frame of the page was asked from, if it has one. No page moves meanwhile.
    pub fn asked_node(&self, page: u64) -> Option<NodeId> {
        self.is_allocated(page).then(|| NodeId(self.asked[page as usize].load(Ordering::Relaxed).into()))
    }

    /// Publishes the frame of a page, which was asked from `node`.
    fn publish(&self, page: u64, frame: Pfn, node: NodeId) {
        self.asked[page as usize].store(node.0 as u8, Ordering::Relaxed);
        // Release: the frame was filled before.
        self.pages[page as usize].store(frame.0, Ordering::Release);
    }

    fn block(&self, page: u64) -> &Block {
        &self.blocks[(page / BLOCK_PAGES) as usize]
    }

    /// Whether the frames of the page's block come as a whole.
    fn is_huge(&self, page: u64) -> bool {
        let block = page / BLOCK_PAGES;
        let is_huge = match self.kind {
            Blocks::InTurns => block.is_multiple_of(2),
            Blocks::Huge => true,
            Blocks::Small => false,
        };
        is_huge && (block + 1) * BLOCK_PAGES <= self.nr_pages()
    }

    /// The frame of the page, which gets one if it has none.
    pub fn frame(&self, page: u64) -> Option<Pfn> {
        let place = self.pages.get(page as usize)?;
        // Acquire: the frame was filled before.
        match place.load(Ordering::Acquire) & !LOCKED {
            0 => self.allocate_frame(page),
            frame => Some(Pfn(frame)),
        }
    }

    /// Writes `bytes` from byte `offset` on, before the guest runs. Without memory for a page, or
    /// past the end, the run ends.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        for (page, at, part) in parts(offset, bytes) {
            // The page gets its frame first.
            let Some(locked) = self.frame(page).and_then(|_| self.lock(page)) else {
                error!("no memory for page {page} of the guest");
            };
            write_words(locked.words(), at, part);
            sync_memory(locked.words());
        }
    }

    #[cold]
    fn allocate_frame(&self, page: u64) -> Option<Pfn> {
        let block = self.block(page);
        let mut is_used = block.is_used.lock();
        let place = &self.pages[page as usize];
        match place.load(Ordering::Acquire) & !LOCKED {
            0 => {}
            frame => return Some(Pfn(frame)),
        }
        let is_first = !core::mem::replace(&mut *is_used, true);
        let node = own_node();
        if is_first
            && self.is_huge(page)
            && let Some(home) = allocate(BLOCK_PAGES, node)
        {
            let first = page - page % BLOCK_PAGES;
            let frame = |index| Pfn(home.0 + index);
            // SAFETY: allocated just now.
            (0..BLOCK_PAGES).for_each(|index| self.fill(first + index, unsafe { words(frame(index)) }));
            // A page may move as soon as it has its frame, and must find its home then. Until all
            // pages have theirs, one more counts as away: no leaf maps the block as a whole.
            block.nr_away.store(1, Ordering::Relaxed);
            block.home_node.store(node.0 as u8, Ordering::Relaxed);
            block.home.store(home.0, Ordering::Release);
            (0..BLOCK_PAGES).for_each(|index| self.publish(first + index, frame(index), node));
            block.nr_away.fetch_sub(1, Ordering::Release);
            return Some(Pfn(home.0 + page % BLOCK_PAGES));
        }
        let frame = allocate(1, node)?;
        // SAFETY: allocated just now.
        self.fill(page, unsafe { words(frame) });
        self.publish(page, frame, node);
        Some(frame)
    }

    /// The answer to the engine: the page's frame, and whether its block may be mapped as a whole.
    pub(crate) fn resolve(&self, page: u64) -> Result<Resolved, Unresolved> {
        // Past the end the memory is gone; without memory the run cannot go on.
        if page >= self.nr_pages() {
            return Err(Unresolved::Gone);
        }
        let Some(frame) = self.frame(page) else { error!("no memory for page {page} of the guest") };
        Ok(Resolved::memory(frame, if self.is_whole(page) { PageSize::Size2M } else { PageSize::Size4K }))
    }

    /// Whether one leaf may map the page's block.
    pub fn is_whole(&self, page: u64) -> bool {
        let block = self.block(page);
        // An exchange counts its page before it changes the frame, inside an invalidation: an
        // answer that read the old count is not installed.
        block.home.load(Ordering::Acquire) != 0 && block.nr_away.load(Ordering::Acquire) == 0
    }

    /// Locks the page, which has a frame. `None`: it has none, or is locked.
    pub fn try_lock(&self, page: u64) -> Option<LockedPage<'_>> {
        let place = &self.pages[page as usize];
        let frame = place.load(Ordering::Relaxed);
        let is_free = frame != 0 && frame & LOCKED == 0;
        // Acquire: after the last owner.
        (is_free && place.compare_exchange(frame, frame | LOCKED, Ordering::Acquire, Ordering::Relaxed).is_ok())
            .then(|| LockedPage { ram: self, page, frame: Pfn(frame) })
    }

    /// Locks the page. `None`: it has no frame.
    pub fn lock(&self, page: u64) -> Option<LockedPage<'_>> {
        loop {
            if let Some(locked) = self.try_lock(page) {
                return Some(locked);
            }
            if !self.is_allocated(page) {
                return None;
            }
            core::hint::spin_loop();
        }
    }

    /// A frame on `node` for a page that moves.
    fn spare_frame(&self, node: NodeId) -> Result<Pfn, MoveError> {
        let kept = {
            let mut spare = self.spare[node.0 as usize].lock();
            // The oldest, so that a late write has time to be seen.
            if spare.len() > KEPT_FRAMES { Some(spare.remove(0)) } else { None }
        };
        let Some(frame) = kept else { return allocate(1, node).ok_or(MoveError::OutOfMemory) };
        // SAFETY: a frame of this memory.
        unsafe { check_poison(frame) }?;
        Ok(frame)
    }

    /// Checks the spare frames. A home frame that its page has left is checked when the page moves back.
    ///
    /// # Errors
    /// [`Written`].
    pub fn check_spare(&self) -> Result<(), Written> {
        self.spare.iter().try_for_each(|spare| {
            // SAFETY: frames of this memory.
            spare.lock().iter().try_for_each(|&frame| unsafe { check_poison(frame) })
        })
    }
}

/// Frames that are kept before the oldest is used again.
const KEPT_FRAMES: usize = 32;

/// Checks that the frame, which a [`Ram`] took from its guest, is as it was left.
///
/// # Safety
/// As for [`words`].
unsafe fn check_poison(frame: Pfn) -> Result<(), Written> {
    // SAFETY: as the caller promises.
    let words = unsafe { words(frame) };
    let found = |word: &AtomicU64| word.load(Ordering::Relaxed);
    match words.iter().position(|word| found(word) != POISON) {
        None => Ok(()),
        Some(index) => Err(Written { frame, offset: index * 8, found: found(&words[index]) }),
    }
}

/// Frames one after the other, for memory that does not move.
#[derive(Debug)]
pub struct Frames {
    first: Pfn,
    nr_pages: u64,
}

impl Frames {
    /// Allocates `nr_pages` frames, on the node of the calling CPU.
    pub fn allocate(nr_pages: u64) -> Option<Frames> {
        let first = allocate(nr_pages.next_power_of_two(), own_node())?;
        Some(Frames { first, nr_pages })
    }

    /// The first frame.
    pub fn first(&self) -> Pfn {
        self.first
    }

    /// The words of frame `page`.
    pub fn words(&self, page: u64) -> &[AtomicU64] {
        assert!(page < self.nr_pages, "page {page} of {}", self.nr_pages);
        // SAFETY: one of the frames, which are this value's.
        unsafe { words(Pfn(self.first.0 + page)) }
    }

    /// Writes `bytes` from byte `offset` on, before the guest runs.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        parts(offset, bytes).for_each(|(page, at, part)| write_words(self.words(page), at, part));
    }
}

impl Drop for Frames {
    fn drop(&mut self) {
        // SAFETY: allocated by `allocate`, with this size; only this value had them.
        unsafe { free(self.first, self.nr_pages.next_power_of_two()) };
    }
}

impl LockedPage<'_> {
    /// The page's frame.
    pub fn frame(&self) -> Pfn {
        self.frame
    }

    /// Its words.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the page's frame, which stays while this exists.
        unsafe { words(self.frame) }
    }

    /// Whether the page is not where it belongs.
    pub fn is_away(&self) -> bool {
        self.home().is_some()
    }

    /// The frame where the page belongs, if it is not there.
    fn home(&self) -> Option<Pfn> {
        let home = self.ram.block(self.page).home.load(Ordering::Relaxed);
        (home != 0).then(|| Pfn(home + self.page % BLOCK_PAGES)).filter(|&home| home != self.frame)
    }

    /// Moves the page to its home if it is elsewhere, or else to another frame, on the node of the
    /// calling CPU.
    ///
    /// # Errors
    /// [`MoveError`]. The page is where it was.
    ///
    /// # Safety
    /// An invalidation of the page is in flight, or no memslot has the memory. The caller drops this
    /// value and does not forget it: the drop stores the new frame.
    pub unsafe fn move_page(&mut self) -> Result<(), MoveError> {
        let block = self.ram.block(self.page);
        let home = self.home();
        let (new, node) = match home {
            Some(home) => {
                // SAFETY: a frame of this memory.
                unsafe { check_poison(home) }?;
                (home, NodeId(block.home_node.load(Ordering::Relaxed).into()))
            }
            None => {
                let node = own_node();
                (self.ram.spare_frame(node)?, node)
            }
        };
        self.ram.asked[self.page as usize].store(node.0 as u8, Ordering::Relaxed);
        let old = core::mem::replace(&mut self.frame, new);
        // SAFETY: both are frames of this memory; the invalidation keeps the guest from the old
        // one.
        let (old_words, new_words) = unsafe { (words(old), words(new)) };
        sync_memory(old_words);
        copy_words(old_words, new_words);
        sync_memory(new_words);
        fill_words(old_words, POISON);
        if home.is_some() {
            block.nr_away.fetch_sub(1, Ordering::Release);
        } else if block.home.load(Ordering::Relaxed) != 0 {
            // The home frame waits for the page.
            block.nr_away.fetch_add(1, Ordering::Release);
            return Ok(());
        }
        self.ram.spare[node_of(old).0 as usize].lock().push(old);
        Ok(())
    }
}

impl Drop for Ram {
    fn drop(&mut self) {
        for (page, place) in self.pages.iter().enumerate() {
            let frame = Pfn(place.load(Ordering::Relaxed) & !LOCKED);
            let home = self.block(page as u64).home.load(Ordering::Relaxed);
            let is_home = home != 0 && home + page as u64 % BLOCK_PAGES == frame.0;
            if frame.0 != 0 && !is_home {
                // SAFETY: a single frame of a page; no memslot has this memory any more.
                unsafe { free(frame, 1) };
            }
        }
        for home in self.blocks.iter().map(|block| block.home.load(Ordering::Relaxed)).filter(|&home| home != 0) {
            // SAFETY: the frames of a block, as above.
            unsafe { free(Pfn(home), BLOCK_PAGES) };
        }
        // SAFETY: single frames, as above.
        self.spare.iter().flat_map(|spare| spare.lock().split_off(0)).for_each(|frame| unsafe { free(frame, 1) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(page: u64, words: &[AtomicU64]) {
        fill_words(words, page);
    }

    fn first_word(ram: &Ram, page: u64) -> u64 {
        ram.lock(page).unwrap().words()[0].load(Ordering::Relaxed)
    }

    #[test]
    fn blocks_are_whole_until_a_page_is_away() {
        // Two whole blocks, and one that is not.
        let ram = Ram::new(2 * BLOCK_PAGES + 8, number);
        assert!(!ram.is_allocated(3) && ram.try_lock(3).is_none() && ram.lock(3).is_none());
        let home = ram.resolve(3).unwrap();
        assert_eq!((home.max_size, home.pfn.0 % BLOCK_PAGES), (PageSize::Size2M, 3));
        // The next block comes page by page, and so does one that is not whole.
        for page in [BLOCK_PAGES, 2 * BLOCK_PAGES] {
            assert_eq!(ram.resolve(page).unwrap().max_size, PageSize::Size4K);
        }
        assert!(!ram.is_allocated(BLOCK_PAGES + 1));
        // SAFETY: in no memslot.
        unsafe { ram.lock(3).unwrap().move_page() }.unwrap();
        let away = ram.resolve(3).unwrap();
        assert_eq!((away.max_size, away.pfn == home.pfn), (PageSize::Size4K, false));
        assert_eq!(ram.resolve(4).unwrap().max_size, PageSize::Size4K);
        // SAFETY: in no memslot.
        unsafe { ram.lock(3).unwrap().move_page() }.unwrap();
        assert_eq!(ram.resolve(3), Ok(home));
        assert_eq!([3, 4, BLOCK_PAGES].map(|page| first_word(&ram, page)), [3, 4, BLOCK_PAGES]);
        assert_eq!(ram.resolve(2 * BLOCK_PAGES + 8), Err(Unresolved::Gone));
    }

    #[test]
    fn a_late_write_is_found() {
        let ram = Ram::new(8, number);
        ram.frame(0).unwrap();
        let old = ram.lock(0).unwrap().frame();
        // SAFETY: in no memslot.
        unsafe { ram.lock(0).unwrap().move_page() }.unwrap();
        ram.check_spare().unwrap();
        // SAFETY: a frame of the memory.
        unsafe { words(old)[7].store(1, Ordering::Relaxed) };
        assert_eq!(ram.check_spare(), Err(Written { frame: old, offset: 56, found: 1 }));
    }

    #[test]
    fn bytes_are_written_where_they_belong() {
        let ram = Ram::new(8, number);
        // From the middle of a word of page 1 over page 2 to page 3, and nothing else.
        let bytes: Vec<u8> = (0..PAGE_SIZE + 8).map(|index| index as u8 | 0x80).collect();
        ram.write(2 * PAGE_SIZE - 5, &bytes);
        ram.write(8 * PAGE_SIZE, &[]);
        assert_eq!([0, 1, 2, 3, 4].map(|page| ram.is_allocated(page)), [false, true, true, true, false]);
        let found: Vec<u8> = (1..4)
            .flat_map(|page| {
                let locked = ram.lock(page).unwrap();
                locked.words().iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect::<Vec<_>>()
            })
            .collect();
        let page_bytes = PAGE_SIZE as usize;
        assert_eq!(found[page_bytes - 5..][..bytes.len()], bytes);
        assert_eq!(found[page_bytes - 8..page_bytes - 5], [1, 0, 0]);
        assert_eq!(found[2 * page_bytes + 3..][..5], [0; 5]);
    }

    #[test]
    fn a_page_is_locked_once() {
        let ram = Ram::new(8, number);
        ram.frame(5).unwrap();
        let locked = ram.try_lock(5).unwrap();
        assert!(ram.try_lock(5).is_none());
        assert_eq!(ram.frame(5), Some(locked.frame()));
        drop(locked);
        assert!(ram.try_lock(5).is_some());
    }
}
