//! A slot's backing: frames that are numbers, without memory behind them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock};

use slat::PageSize;

/// What a backing says about writes to a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Writes {
    /// Also a read is answered with a frame that may be written.
    Allowed,
    /// A write is; a read is answered with a frame that may not be written.
    IfAskedFor,
    /// A write finds that the page is gone.
    Refused,
}

/// What a page has instead of the frame of its number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Frame {
    pub pfn: u64,
    pub writes: Writes,
}

/// The frame of a page that is private, less the one that it has as a shared one. 16 TiB.
pub const PRIVATE_PFN: u64 = 1 << 32;

/// Frames are given out by number: page n of a backing is frame `first_pfn + n`, unless it was
/// given another.
#[derive(Debug)]
pub struct TestBacking {
    pub first_pfn: u64,
    pub nr_pages: u64,
    pub max_size: PageSize,
    /// Whether a read is answered with a frame that may be written.
    pub read_gives_writable: AtomicBool,
    /// Whether a write finds that any page is gone. To be set only while the pages are invalidated.
    pub writes_are_refused: AtomicBool,
    pub gone: AtomicBool,
    /// Pages with another frame, each a block of its own. To be changed only while the page is
    /// invalidated.
    pub frames: RwLock<BTreeMap<u64, Frame>>,
    /// Pages of which the host says, when asked, that they are resident.
    pub resident: RwLock<BTreeSet<u64>>,
    /// Whether it says so of a page in any case.
    pub is_resident: fn(u64) -> bool,
    /// Set by drop.
    pub dropped: Arc<AtomicBool>,
}

impl TestBacking {
    pub fn new(first_pfn: u64, nr_pages: u64, max_size: PageSize) -> TestBacking {
        TestBacking {
            first_pfn,
            nr_pages,
            max_size,
            read_gives_writable: AtomicBool::new(true),
            writes_are_refused: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            frames: RwLock::default(),
            resident: RwLock::default(),
            is_resident: |_| false,
            dropped: Arc::default(),
        }
    }
}

impl TestBacking {
    /// The frame of page `page`, and the largest block around it that is contiguous.
    pub(super) fn frame(&self, page: u64) -> (Frame, PageSize) {
        let writes = if self.writes_are_refused.load(Ordering::SeqCst) {
            Writes::Refused
        } else if self.read_gives_writable.load(Ordering::SeqCst) {
            Writes::Allowed
        } else {
            Writes::IfAskedFor
        };
        let frames = self.frames.read().unwrap();
        if let Some(&frame) = frames.get(&page) {
            return (frame, PageSize::Size4K);
        }
        let pfn = self.first_pfn + page;
        // Blocks are of frames, which need not lie as the guest's pages do.
        let is_contiguous = |size: &PageSize| {
            let nr_pages = size.level().nr_pages();
            let inside = pfn % nr_pages;
            let block = page.saturating_sub(inside)..page + nr_pages - inside;
            *size <= self.max_size && frames.range(block).next().is_none()
        };
        let sizes = [PageSize::Size1G, PageSize::Size2M];
        let size = sizes.into_iter().find(is_contiguous).unwrap_or(PageSize::Size4K);
        (Frame { pfn, writes }, size)
    }
}

impl Drop for TestBacking {
    fn drop(&mut self) {
        self.dropped.store(true, Ordering::SeqCst);
    }
}
