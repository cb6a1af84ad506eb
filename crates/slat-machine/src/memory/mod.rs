//! Guest memory: mappings of this process that the machine uses as the host's RAM, of the kinds of
//! the KVM selftests (`-s` there), and the pages that [`Host::resolve`](slat::Host::resolve) finds
//! in them.
//!
//! # Implementation
//! - A mapping never moves and is never unmapped while a [`Backing`] of it lives. A frame is the
//!   pointer to it, with the bias of [`phys`]. A page keeps its frame for ever, unless the memory
//!   has movable pages ([`Pages`]).
//! - A kind or size that this machine cannot serve is refused when the backing is made, and not by
//!   the kernel's OOM killer during a run: the size is compared with the available memory, and the
//!   mapping reserves huge pages.
//! - [`resolve`](slat::Host::resolve) touches the page as the guest will. So the kernel's own fault
//!   happens there, where it is counted, and not in the CPU's access. A write touch for a read
//!   would allocate pages that are never written; a read touch before a write would cost a second
//!   fault.
//! - Memory that a userfaultfd has abandoned is *lost*: a page of it may have zeros that were not
//!   sent. No page of it is resolved any more. The mark is set before the kernel releases any
//!   thread, and read after each touch. So a page that was mapped without being filled is never
//!   used.
//! - Mappings start where the largest leaf that they may hold could start, so that the alignment
//!   does not vary between runs.

#![expect(unsafe_code, reason = "system calls: which pages are huge, and a new guest_memfd")]

mod error;
mod frames;
pub mod guest_memfd;
mod host_access;
pub mod numa;
mod pages;
pub mod phys;
mod shmem;

use std::fmt;
use std::fs::{self, File};
use std::hint::black_box;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
use rustix::mm::{Advice, MapFlags};
use slat::host::{Resolved, Unresolved};
use slat::{Access, Gfn, PAGE_SIZE, PageSize, Pfn};

pub use error::MemoryError;
pub use frames::{Corruption, POISON};
pub use guest_memfd::GuestMemfd;
pub use host_access::DiscardError;
pub(crate) use pages::Invalidate;
pub use pages::{Discards, Effect, EventCounts, FrameUse, Pages, Snapshot};
pub use shmem::Alias;

use crate::linux::mapping::MappedMemory;
use crate::linux::topology;

const SIZE_2M: u64 = PageSize::Size2M.size_bytes();
const SIZE_1G: u64 = PageSize::Size1G.size_bytes();

/// What guest memory is made of.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BackingKind {
    /// Private memory in 4 KiB pages only.
    Anonymous,
    /// Private memory, in transparent huge pages where the kernel has them.
    AnonymousThp,
    /// Private memory from the pool of 2 MiB pages.
    AnonymousHugetlb2M,
    /// Private memory from the pool of 1 GiB pages.
    AnonymousHugetlb1G,
    /// A memory file, mapped shared.
    Shmem,
}

impl BackingKind {
    /// All kinds.
    pub const ALL: [BackingKind; 5] = [
        BackingKind::Anonymous,
        BackingKind::AnonymousThp,
        BackingKind::AnonymousHugetlb2M,
        BackingKind::AnonymousHugetlb1G,
        BackingKind::Shmem,
    ];

    /// The page size that the kernel guarantees, of which a mapping must be a multiple.
    pub const fn page_size(self) -> PageSize {
        match self {
            BackingKind::Anonymous | BackingKind::AnonymousThp | BackingKind::Shmem => PageSize::Size4K,
            BackingKind::AnonymousHugetlb2M => PageSize::Size2M,
            BackingKind::AnonymousHugetlb1G => PageSize::Size1G,
        }
    }

    /// The largest page of the host that it may be made of, in bytes: such a page is on one node.
    pub(crate) const fn largest_page_bytes(self) -> u64 {
        match self {
            BackingKind::AnonymousThp => SIZE_2M,
            _ => self.page_size().size_bytes(),
        }
    }

    const fn is_hugetlb(self) -> bool {
        matches!(self, BackingKind::AnonymousHugetlb2M | BackingKind::AnonymousHugetlb1G)
    }
}

impl fmt::Display for BackingKind {
    /// The name that the KVM selftests have for it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            BackingKind::Anonymous => "anonymous",
            BackingKind::AnonymousThp => "anonymous_thp",
            BackingKind::AnonymousHugetlb2M => "anonymous_hugetlb_2mb",
            BackingKind::AnonymousHugetlb1G => "anonymous_hugetlb_1gb",
            BackingKind::Shmem => "shmem",
        })
    }
}

impl FromStr for BackingKind {
    type Err = MemoryError;

    fn from_str(name: &str) -> Result<BackingKind, MemoryError> {
        // The selftests' name for huge pages of the default size, which is 2 MiB on these machines.
        let wanted = if name == "anonymous_hugetlb" { "anonymous_hugetlb_2mb" } else { name };
        BackingKind::ALL
            .into_iter()
            .find(|kind| kind.to_string() == wanted)
            .ok_or_else(|| MemoryError::UnknownKind { name: name.to_owned() })
    }
}

/// Bytes of all mappings of this process that come out of its available memory (not the pools of
/// huge pages).
static MAPPED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Guest memory. Clones are the same memory, which is unmapped with the last of them.
#[derive(Clone, Debug)]
pub struct Backing(Memory);

#[derive(Clone, Debug)]
enum Memory {
    /// Each page has its frame, at its offset in the mapping.
    Fixed(Arc<FixedMemory>),
    Movable(Arc<Pages>),
    /// The user has no mapping of it.
    GuestMemfd(Arc<GuestMemfd>),
}

impl Backing {
    /// Maps `size_bytes` of fresh zeroed memory, at a multiple of 1 GiB if it is as large as that,
    /// else of 2 MiB.
    ///
    /// # Errors
    /// Every [`MemoryError`] but `UnknownKind`.
    pub fn new(kind: BackingKind, size_bytes: u64) -> Result<Backing, MemoryError> {
        Ok(Backing(Memory::Fixed(Arc::new(FixedMemory::new(kind, size_bytes)?))))
    }

    /// Makes zeroed memory of kind [`BackingKind::Anonymous`] whose pages may change frames while
    /// guests run: see [`Pages`]. It takes as many frames as there are pages, and `nr_spare_frames`
    /// more, all at once.
    ///
    /// # Errors
    /// As for [`new`](Backing::new).
    pub fn with_movable_pages(size_bytes: u64, nr_spare_frames: u64) -> Result<Backing, MemoryError> {
        let kind = BackingKind::Anonymous;
        if size_bytes == 0 {
            return Err(MemoryError::ZeroSize);
        }
        if !size_bytes.is_multiple_of(PAGE_SIZE) {
            return Err(MemoryError::UnalignedSize { kind, size_bytes });
        }
        Ok(Backing(Memory::Movable(Arc::new(Pages::new(size_bytes, nr_spare_frames)?))))
    }

    /// The memory of a memslot with [`GUEST_MEMFD`](slat::MemoryRegionFlags::GUEST_MEMFD): private
    /// pages are in `memory`, and shared ones in its shared part.
    pub fn of_guest_memfd(memory: Arc<GuestMemfd>) -> Backing {
        Backing(Memory::GuestMemfd(memory))
    }

    /// The guest_memfd, if that is the memory.
    #[inline]
    pub fn guest_memfd(&self) -> Option<&Arc<GuestMemfd>> {
        match &self.0 {
            Memory::Fixed(_) | Memory::Movable(_) => None,
            Memory::GuestMemfd(memory) => Some(memory),
        }
    }

    /// The pages, if they may change frames.
    #[inline]
    pub fn pages(&self) -> Option<&Arc<Pages>> {
        match &self.0 {
            Memory::Fixed(_) | Memory::GuestMemfd(_) => None,
            Memory::Movable(pages) => Some(pages),
        }
    }

    /// The first byte; null if pages are movable or private. Guests and other users of the memory
    /// change it at any time: access it atomically, or while nothing runs.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        match &self.0 {
            Memory::Fixed(memory) => memory.mapping.start(),
            Memory::Movable(_) | Memory::GuestMemfd(_) => ptr::null_mut(),
        }
    }

    /// The size in bytes.
    #[inline]
    pub fn size_bytes(&self) -> u64 {
        match &self.0 {
            Memory::Fixed(memory) => memory.mapping.size_bytes(),
            Memory::Movable(pages) => pages.nr_pages() << Gfn::SHIFT,
            Memory::GuestMemfd(memory) => memory.size_bytes(),
        }
    }

    /// The mapping of all of its frames: larger than the memory if pages are movable.
    pub(crate) fn frames(&self) -> &MappedMemory {
        match &self.0 {
            Memory::Fixed(memory) => &memory.mapping,
            Memory::Movable(pages) => pages.mapping(),
            Memory::GuestMemfd(memory) => memory.mapping(),
        }
    }

    /// The frame that page number `page` has now, if any.
    pub(crate) fn frame_of(&self, page: u64) -> Option<Pfn> {
        match &self.0 {
            Memory::Fixed(memory) if page < memory.mapping.size_bytes() >> Gfn::SHIFT => {
                Some(phys::hpa_of(memory.mapping.at(page << Gfn::SHIFT)).pfn())
            }
            Memory::Fixed(_) | Memory::GuestMemfd(_) => None,
            Memory::Movable(pages) => pages.frame_of(page),
        }
    }

    /// The kind of the memory; of a guest_memfd, that of its shared part, or, if it has none, the
    /// most similar kind.
    #[inline]
    pub fn kind(&self) -> BackingKind {
        match &self.0 {
            Memory::Fixed(memory) => memory.kind,
            Memory::Movable(_) => BackingKind::Anonymous,
            Memory::GuestMemfd(memory) => memory.shared().map_or(BackingKind::Shmem, Backing::kind),
        }
    }

    /// The first 8 bytes of page number `page`, as they are now; `None` beyond the end, of private
    /// memory, or if the memory is [lost](Backing::is_lost).
    pub fn peek(&self, page: u64) -> Option<u64> {
        match &self.0 {
            Memory::Movable(pages) => pages.peek(page),
            Memory::Fixed(_) | Memory::GuestMemfd(_) => self.load(page.checked_mul(PAGE_SIZE)?),
        }
    }

    /// Makes the kernel provide the page at `offset_bytes` for `access`, and returns its frame.
    ///
    /// Memory with fixed frames may be written also after a read: the mapping allows it. If the
    /// kernel has mapped its page of zeros, it replaces that under the same pointer, which is the
    /// frame for the machine. A movable page may have to be invalidated in the guest first, with
    /// `invalidate`.
    ///
    /// # Errors
    /// [`Unresolved::Gone`]: the memory ends before `offset_bytes` or is [lost](Backing::is_lost),
    /// or an invalidation failed.
    pub(crate) fn resolve(
        &self,
        offset_bytes: u64,
        access: Access,
        invalidate: &Invalidate<'_>,
    ) -> Result<Resolved, Unresolved> {
        match &self.0 {
            Memory::Fixed(memory) => memory.resolve(offset_bytes, access),
            Memory::Movable(pages) => pages.resolve(offset_bytes >> Gfn::SHIFT, access, invalidate),
            Memory::GuestMemfd(memory) => {
                memory.shared().ok_or(Unresolved::Gone)?.resolve(offset_bytes, access, invalidate)
            }
        }
    }

    /// As [`resolve`](Self::resolve), for a page that is private.
    ///
    /// # Errors
    /// [`Unresolved::Gone`]: there is no such private page.
    pub(crate) fn resolve_private(&self, offset_bytes: u64, access: Access) -> Result<Resolved, Unresolved> {
        self.guest_memfd().ok_or(Unresolved::Gone)?.resolve(offset_bytes, access)
    }
}

/// Memory whose pages keep their frames.
#[derive(Debug)]
struct FixedMemory {
    kind: BackingKind,
    mapping: MappedMemory,
    /// For `AnonymousThp`: the file that shows which pages are huge.
    pagemap: Option<File>,
    /// For `Shmem`: the mapped file.
    file: Option<OwnedFd>,
    lost: AtomicBool,
    // Behind the mapping, which is dropped first.
    _reserved: Reserved,
}

/// `struct pm_scan_arg` of the kernel (include/uapi/linux/fs.h,
/// Documentation/admin-guide/mm/pagemap.rst).
#[repr(C)]
#[derive(Default)]
struct PagemapScan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region` of the kernel.
#[repr(C)]
#[derive(Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// `PAGEMAP_SCAN`.
const PAGEMAP_SCAN: Opcode = opcode::read_write::<PagemapScan>(b'f', 16);
/// Category of pages that one huge entry of the kernel's tables maps.
const PAGE_IS_HUGE: u64 = 1 << 6;

impl FixedMemory {
    /// Maps `size_bytes` of fresh zeroed memory: see [`Backing::new`].
    fn new(kind: BackingKind, size_bytes: u64) -> Result<FixedMemory, MemoryError> {
        if size_bytes == 0 {
            return Err(MemoryError::ZeroSize);
        }
        if !size_bytes.is_multiple_of(kind.page_size().size_bytes()) {
            return Err(MemoryError::UnalignedSize { kind, size_bytes });
        }
        let reserved = if kind.is_hugetlb() { Reserved(0) } else { Reserved::new(size_bytes)? };
        let (mapping, file) = match kind {
            BackingKind::Anonymous | BackingKind::AnonymousThp => (map_anonymous(kind, size_bytes)?, None),
            BackingKind::AnonymousHugetlb2M | BackingKind::AnonymousHugetlb1G => (map_hugetlb(kind, size_bytes)?, None),
            BackingKind::Shmem => {
                let file = shmem::create_file(size_bytes)?;
                (shmem::map_file(file.as_fd(), size_bytes)?, Some(file))
            }
        };
        // Without the file, or on a kernel that cannot scan it (before 6.7), huge pages are mapped
        // as small ones.
        let pagemap = if kind == BackingKind::AnonymousThp { File::open("/proc/self/pagemap").ok() } else { None };
        Ok(FixedMemory { kind, mapping, pagemap, file, lost: AtomicBool::new(false), _reserved: reserved })
    }

    /// Whether a value that was read before may be zeros that were not sent.
    #[inline]
    fn is_lost(&self) -> bool {
        // The mark is set before the kernel releases accesses. So a released access finds it, if
        // this load comes after that access: the fence keeps them in order.
        fence(Ordering::Acquire);
        self.lost.load(Ordering::Relaxed)
    }

    fn resolve(&self, offset_bytes: u64, access: Access) -> Result<Resolved, Unresolved> {
        let page_bytes = offset_bytes & !(PAGE_SIZE - 1);
        touch(self.mapping.word(page_bytes).ok_or(Unresolved::Gone)?, access);
        if self.is_lost() {
            return Err(Unresolved::Gone);
        }
        let max_size = match self.kind.page_size() {
            PageSize::Size4K if self.is_huge(page_bytes) => PageSize::Size2M,
            size => size,
        };
        Ok(Resolved::memory(phys::hpa_of(self.mapping.at(page_bytes)).pfn(), max_size))
    }

    /// Whether the 2 MiB block around `offset_bytes` is in the mapping and in one huge page.
    fn is_huge(&self, offset_bytes: u64) -> bool {
        let Some(pagemap) = &self.pagemap else { return false };
        let block = offset_bytes & !(SIZE_2M - 1);
        if block + SIZE_2M > self.mapping.size_bytes() {
            return false;
        }
        let start = self.mapping.at(block).addr() as u64;
        let mut region = PageRegion::default();
        let mut scan = PagemapScan {
            size: size_of::<PagemapScan>() as u64,
            start,
            end: start + SIZE_2M,
            vec: (&raw mut region).expose_provenance() as u64,
            vec_len: 1,
            category_mask: PAGE_IS_HUGE,
            return_mask: PAGE_IS_HUGE,
            ..PagemapScan::default()
        };
        // SAFETY: the argument has the kernel's layout and contains its size; the kernel writes to
        // it and to at most one region, and both outlive the call.
        let scanned = unsafe { ioctl(pagemap, Updater::<PAGEMAP_SCAN, _>::new(&mut scan)) };
        // Without a region the call leaves it as it was, at address 0.
        scanned.is_ok() && region.start == start && region.end == start + SIZE_2M
    }
}

/// Makes the kernel provide the page of `word` for `access`.
fn touch(word: &AtomicU64, access: Access) {
    match access {
        // Changes nothing, but is a write to the kernel. The compiler must not know the value,
        // since it replaces an atomic "or" with a known zero by a load.
        Access::Write => word.fetch_or(black_box(0), Ordering::Relaxed),
        Access::Read | Access::Execute | Access::ExecuteUser => black_box(word.load(Ordering::Relaxed)),
    };
}

/// A share of the available memory, released by its drop.
#[derive(Debug)]
pub(crate) struct Reserved(u64);

impl Reserved {
    /// Refuses what the machine does not have. Memory that is mapped but not touched yet counts as
    /// used: nothing else would show that two guests reserve the same memory.
    pub(crate) fn new(size_bytes: u64) -> Result<Reserved, MemoryError> {
        let available_bytes = topology::available_memory_bytes().unwrap_or(u64::MAX);
        let mut mapped_bytes = MAPPED_BYTES.load(Ordering::Relaxed);
        loop {
            let untouched_bytes = mapped_bytes.saturating_sub(topology::resident_memory_bytes().unwrap_or(0));
            let needed_bytes = size_bytes.saturating_add(untouched_bytes);
            if needed_bytes > available_bytes {
                return Err(MemoryError::NotEnoughMemory { needed_bytes, available_bytes });
            }
            // A refused size is never counted: another guest would be refused for it.
            let sum_bytes = mapped_bytes.saturating_add(size_bytes);
            match MAPPED_BYTES.compare_exchange(mapped_bytes, sum_bytes, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Ok(Reserved(size_bytes)),
                Err(found) => mapped_bytes = found,
            }
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        MAPPED_BYTES.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// The alignment of memory of `size_bytes`: that of the largest leaf that it may hold.
fn alignment(size_bytes: u64) -> u64 {
    if size_bytes >= SIZE_1G { SIZE_1G } else { SIZE_2M }
}

fn map_anonymous(kind: BackingKind, size_bytes: u64) -> Result<MappedMemory, MemoryError> {
    let failed = |call| move |source| MemoryError::System { call, kind, size_bytes, source };
    let mapping = MappedMemory::anonymous_aligned(size_bytes, alignment(size_bytes)).map_err(failed("mmap"))?;
    if kind == BackingKind::AnonymousThp {
        mapping.advise(0..size_bytes, Advice::LinuxHugepage).map_err(failed("madvise(MADV_HUGEPAGE)"))?;
    } else {
        mapping.without_huge_pages();
    }
    Ok(mapping)
}

/// The kernel aligns it to its huge pages. It reserves them too: a shortage is an error here, not a
/// signal later.
fn map_hugetlb(kind: BackingKind, size_bytes: u64) -> Result<MappedMemory, MemoryError> {
    let page_bytes = kind.page_size().size_bytes();
    let size = if page_bytes == SIZE_2M { MapFlags::HUGE_2MB } else { MapFlags::HUGE_1GB };
    MappedMemory::anonymous(size_bytes, MapFlags::HUGETLB | size).map_err(|source| {
        // `INVAL` and `OPNOTSUPP`: there is no pool of this size, so it has no page either.
        if !matches!(Errno::from_io_error(&source), Some(Errno::NOMEM | Errno::INVAL | Errno::OPNOTSUPP)) {
            return MemoryError::System { call: "mmap", kind, size_bytes, source };
        }
        let pool = format!("/sys/kernel/mm/hugepages/hugepages-{}kB", page_bytes >> 10);
        let count = |name: &str| -> u64 {
            fs::read_to_string(format!("{pool}/{name}")).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
        };
        let free = count("free_hugepages").saturating_sub(count("resv_hugepages"));
        MemoryError::NotEnoughHugePages { kind, needed: size_bytes / page_bytes, free, pool }
    })
}

#[cfg(test)]
mod tests;
