//! The backing of a memslot: frames that are numbers, without memory behind them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock};

use slat::PageSize;

/// The answers of a backing for a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Writes {
    /// Also a read gets a writable frame.
    Allowed,
    /// A write gets a writable frame, a read a read-only one.
    IfWritten,
    /// A write finds that the page is gone.
    Refused,
}

/// The frame of a page that differs from that of its number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Frame {
    pub pfn: u64,
    pub writes: Writes,
}

/// The frame of a private page, less the frame of the shared page at the same place. 16 TiB.
pub const PRIVATE_PFN: u64 = 1 << 32;

/// Frames are numbers: page n of a backing is frame `first_pfn + n`, unless it was moved to
/// another.
#[derive(Debug)]
pub struct TestBacking {
    pub first_pfn: u64,
    pub nr_pages: u64,
    pub max_size: PageSize,
    /// Whether a read gets a writable frame.
    pub reads_are_writable: AtomicBool,
    /// Whether a write finds any page gone. To be set only while the pages are invalidated.
    pub writes_are_refused: AtomicBool,
    pub gone: AtomicBool,
    /// Pages with another frame, each a block of its own. To be changed only while the page is
    /// invalidated.
    pub frames: RwLock<BTreeMap<u64, Frame>>,
    /// Pages that the host reports as resident.
    pub resident: RwLock<BTreeSet<u64>>,
    /// Selects further resident pages.
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
            reads_are_writable: AtomicBool::new(true),
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
    /// The frame of page `page`, and the size of the largest contiguous block around it.
    pub fn frame(&self, page: u64) -> (Frame, PageSize) {
        let writes = if self.writes_are_refused.load(Ordering::SeqCst) {
            Writes::Refused
        } else if self.reads_are_writable.load(Ordering::SeqCst) {
            Writes::Allowed
        } else {
            Writes::IfWritten
        };
        let frames = self.frames.read().unwrap();
        if let Some(&frame) = frames.get(&page) {
            return (frame, PageSize::Size4K);
        }
        let pfn = self.first_pfn + page;
        // Blocks are of frames, which need not be aligned like the guest's pages.
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
