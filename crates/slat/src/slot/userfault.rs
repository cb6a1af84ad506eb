//! Userfault: a bitmap, which user space owns, of the pages at which faults exit to it.
//!
//! # Guarantees
//! - A fault that finds the bit of its page set maps nothing, and exits
//!   ([`Exit::MemoryFault`](crate::Exit::MemoryFault)).
//! - A vCPU that reaches a page finds all that user space wrote before it cleared the bit.
//! - A bit that is set *later* counts at once for faults that read it from then on. For faults
//!   under way, and for pages that are mapped, it counts when [`Vm::rescan_userfault`] has
//!   returned, or the call that turned on [`MemoryRegionFlags::USERFAULT`].
//!
//! # Use
//! [`UserfaultBitmap`] says how user space brings a page, and how it takes one back.
//!
//! # Implementation
//! A fault reads the bit after its PTE, with acquire. A rescan stores a sequence number in the PTEs
//! of the pages whose bits are set, and zaps their leaves. Turning the flag on does so for the
//! whole memslot.
//!
//! # Why it is correct
//! The bit is a part of what a fault depends on, as a memslot is (`table/invalidation_seq.rs`). If
//! a fault read its PTE before the rescan stored the number, its exchange fails, or the rescan zaps
//! its leaf. If it reads the PTE later, it observes the bit, which was visible before the number
//! was taken.
//!
//! [`Vm::rescan_userfault`]: crate::Vm::rescan_userfault
//! [`MemoryRegionFlags::USERFAULT`]: super::MemoryRegionFlags::USERFAULT

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use crate::addr::{Gfn, GfnRange, Level, PageSize};
use crate::error::SlotError;
use crate::sync::{AtomicU64, Ordering, record};

/// The memory of a userfault bitmap, which user space owns: an array on the heap, or memory that it
/// shares with the process that fetches the pages.
pub trait UserfaultWords: Send + Sync {
    /// Returns the words: always the same ones, as long as they exist. Words whose memory was
    /// removed are left out. A fault on a page behind the last word fails with
    /// [`FaultError::UserfaultBitmapGone`](crate::error::FaultError::UserfaultBitmapGone).
    ///
    /// Called by each fault in the memslot, inside a guard: must not block. If it panics, the call
    /// that requested the words unwinds. What the call had zapped is flushed, and the memslot can
    /// be changed.
    fn words(&self) -> &[AtomicU64];
}

impl UserfaultWords for Vec<AtomicU64> {
    fn words(&self) -> &[AtomicU64] {
        self
    }
}

impl UserfaultWords for Box<[AtomicU64]> {
    fn words(&self) -> &[AtomicU64] {
        self
    }
}

/// The pages of a memslot at which faults exit to user space. Bit n % 64 of word n / 64 is page n
/// of the memslot, or number n of its blocks of 2 MiB or 1 GiB; 1 means exit. Clones are the same
/// bitmap.
///
/// # Guarantees
/// - A fault that finds the bit of its page set maps nothing, and exits
///   ([`Exit::MemoryFault`](crate::Exit::MemoryFault)).
/// - A vCPU that reaches a page finds all that user space wrote there before it cleared the bit.
/// - A bit that is set *later* holds at once for faults that read it from then on. For faults under
///   way, and for pages that are mapped, it holds when
///   [`Vm::rescan_userfault`](crate::Vm::rescan_userfault) has returned.
///
/// # Use
/// User space owns the bits. Bits share words, so set them by an atomic OR, and clear them by an
/// atomic AND. Nothing needs to be locked or notified.
///
/// To bring a page after a fault has exited:
/// 1. Claim the page, by a lock of yours for example, and read its bit again: if it is clear, run
///    the vCPU. Several vCPUs may exit for one page, and it must be filled once: a second fill would
///    overwrite what the guest has written since the first.
/// 2. Fill its memory in the backing.
/// 3. Clear the bit, with release.
/// 4. Run the vCPU again.
///
/// To take a page back:
/// 1. Set the bit.
/// 2. Call [`Vm::rescan_userfault`](crate::Vm::rescan_userfault).
/// 3. Read the bit once more: a late answer to an old request may have cleared it. Then begin
///    again.
/// 4. Take the contents.
#[derive(Clone)]
pub struct UserfaultBitmap {
    words: Arc<dyn UserfaultWords>,
    granularity: PageSize,
}

impl UserfaultBitmap {
    /// The bitmap in `words`, with a bit for each block of `granularity`. A memslot needs a word
    /// for each 64 of its blocks, and refuses fewer words.
    ///
    /// A block arrives as a whole, and is mapped by leaves of its size or smaller ones.
    ///
    /// - With [`PageSize::Size4K`], KVM's, a memslot is mapped by pages of 4 KiB as long as it has
    ///   [`MemoryRegionFlags::USERFAULT`](super::MemoryRegionFlags::USERFAULT). Without the flag
    ///   its huge pages come back, whatever the size of the blocks was.
    /// - With [`PageSize::Size2M`] or [`PageSize::Size1G`] huge pages of this size survive. The
    ///   memslot must begin at a multiple of the size.
    pub fn new(words: Arc<dyn UserfaultWords>, granularity: PageSize) -> UserfaultBitmap {
        UserfaultBitmap { words, granularity }
    }

    /// The words.
    pub fn words(&self) -> &[AtomicU64] {
        self.words.words()
    }

    /// The size of the block that a bit stands for.
    pub fn granularity(&self) -> PageSize {
        self.granularity
    }

    /// Whether `other` is the same bitmap, with the same meaning.
    pub(crate) fn is_same(&self, other: &UserfaultBitmap) -> bool {
        Arc::ptr_eq(&self.words, &other.words) && self.granularity == other.granularity
    }

    /// Checks that the bitmap fits memslot `slot` of `range`.
    pub(crate) fn check(&self, slot: u32, range: GfnRange) -> Result<(), SlotError> {
        let block_pages = self.level().nr_pages();
        if range.start.0 % block_pages != 0 {
            let size_bytes = self.granularity.size_bytes();
            return Err(SlotError::UnalignedUserfaultSlot { slot, gpa: range.start.gpa(), size_bytes });
        }
        let needed = range.nr_pages().div_ceil(block_pages).div_ceil(u64::from(u64::BITS)) as usize;
        let words = self.words().len();
        if words < needed { Err(SlotError::BitmapTooShort { slot, words, needed }) } else { Ok(()) }
    }

    /// Bytes of the words that a memslot of `nr_pages` pages needs.
    pub(crate) fn needed_bytes(&self, nr_pages: u64) -> u64 {
        let nr_bits = nr_pages.div_ceil(self.level().nr_pages());
        nr_bits.div_ceil(u64::from(u64::BITS)) * size_of::<AtomicU64>() as u64
    }

    /// The level of the largest leaf that one bit covers.
    #[inline]
    pub(crate) fn level(&self) -> Level {
        self.granularity.level()
    }

    /// The word that has the bit of page `page` of the memslot, the number of the bit in it, and
    /// the number of the word.
    fn word_of(&self, page: u64) -> Option<(u64, u32, usize)> {
        let bit = page / self.level().nr_pages();
        let index = (bit / u64::from(u64::BITS)) as usize;
        // Acquire: a fault that finds the bit clear observes what user space did to fill the page
        // before. And it observes the bits that were set before the number in its PTE was taken,
        // because it read the PTE first (`table/invalidation_seq.rs`).
        let cell = self.words().get(index)?;
        let word = cell.load(Ordering::Acquire);
        record!(BitsRead { word: core::ptr::from_ref(cell).addr() as u64, value: word });
        Some((word, (bit % u64::from(u64::BITS)) as u32, index))
    }

    /// Whether the bit of page `page` of the memslot is set; `None` if the words end before it.
    #[inline]
    pub(crate) fn is_set(&self, page: u64) -> Option<bool> {
        self.word_of(page).map(|(word, bit, _)| word >> bit & 1 != 0)
    }

    /// The first run of pages in `range`, a part of a memslot of `slot_range`, whose bits are set,
    /// in whole blocks and within one word; and the page to go on from. `None` if the words end
    /// before it.
    pub(crate) fn next_run(&self, slot_range: GfnRange, range: GfnRange) -> Option<(Option<GfnRange>, Gfn)> {
        let block_pages = self.level().nr_pages();
        let start = slot_range.start.0;
        let (word, first, index) = self.word_of(range.start.0 - start)?;
        let page_of = |bit: u64| Gfn((start + bit * block_pages).min(slot_range.end.0));
        let base = index as u64 * u64::from(u64::BITS);
        let from = word & (u64::MAX << first);
        if from == 0 {
            return Some((None, page_of(base + u64::from(u64::BITS)).min(range.end)));
        }
        let run_first = from.trailing_zeros();
        let nr_set = (from >> run_first).trailing_ones();
        let run_start = page_of(base + u64::from(run_first));
        if run_start >= range.end {
            return Some((None, range.end));
        }
        let behind = (range.end.0 - start).div_ceil(block_pages);
        let run_end = page_of((base + u64::from(run_first + nr_set)).min(behind));
        Some((Some(GfnRange { start: run_start, end: run_end }), run_end.min(range.end)))
    }
}

impl fmt::Debug for UserfaultBitmap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UserfaultBitmap")
            .field("nr_words", &self.words().len())
            .field("granularity", &self.granularity)
            .finish_non_exhaustive()
    }
}
