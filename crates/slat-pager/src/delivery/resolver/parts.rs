//! The contents of a welcome, and their checks.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use crate::source::PAGE_BYTES as PAGE_SIZE;

use super::GuestMemory;
use crate::delivery::bitmap::SharedBitmap;
use crate::delivery::error::AttachError;
use crate::delivery::handshake::Welcome;
use crate::delivery::ring::SharedRings;
use crate::delivery::shared;
use crate::linux::descriptors::EventFd;
use crate::linux::mapping::MappedMemory;

/// For how long a resolver maps memory that is there before it reports that it is ready.
const MAPPING_LIMIT: Duration = Duration::from_secs(1);

/// What came with a welcome, checked.
pub(super) struct WelcomeParts {
    pub(super) rings: SharedRings,
    pub(super) bitmap: SharedBitmap,
    pub(super) memory: Option<GuestMemory>,
    pub(super) page_bytes: u64,
    pub(super) doorbells: Vec<EventFd>,
    pub(super) wakers: Vec<EventFd>,
}

impl WelcomeParts {
    pub(super) fn new(files: Vec<OwnedFd>, welcome: &Welcome, nr_threads: u32) -> Result<WelcomeParts, AttachError> {
        let failed = |call| move |source| AttachError::System { call, source };
        let Welcome { layout, nr_pages, memory_offset_bytes, memory_bytes, .. } = *welcome;
        let page_bytes = welcome.page_bytes;
        if !crate::delivery::is_page(page_bytes) {
            return Err(AttachError::BadNumbers { what: "the size of a page" });
        }
        if !layout.is_possible() || layout.nr_shards != nr_threads {
            return Err(AttachError::BadNumbers { what: "vCPUs, waiters, threads or entries" });
        }
        let has_memory = memory_bytes != 0;
        let expected = 2 + u32::from(has_memory) + layout.nr_shards + layout.nr_waiters;
        let found = files.len() as u32;
        if found != expected {
            return Err(AttachError::MissingDescriptors { expected, found });
        }
        let mut files = files.into_iter();
        let mut next = || files.next().ok_or(AttachError::MissingDescriptors { expected, found });
        let rings = next()?;
        if !shared::is_size_fixed(rings.as_fd()) {
            return Err(AttachError::NotSealed { what: "file of rings" });
        }
        let found_bytes = shared::file_size(rings.as_fd()).map_err(failed("fstat"))?;
        let expected_bytes = layout.size_bytes();
        if found_bytes != expected_bytes {
            return Err(AttachError::WrongSize { what: "file of rings", expected_bytes, found_bytes });
        }
        let rings = SharedRings::new(rings.as_fd(), layout).map_err(failed("mmap"))?;
        let bitmap = SharedBitmap::from_fd(next()?, nr_pages)?;
        let memory = if has_memory {
            let memory = next()?;
            if !shared::is_sealed(memory.as_fd()) {
                return Err(AttachError::NotSealed { what: "file of guest memory" });
            }
            let found_bytes = shared::file_size(memory.as_fd()).map_err(failed("fstat"))?;
            let expected_bytes = memory_offset_bytes.saturating_add(memory_bytes);
            if found_bytes < expected_bytes {
                return Err(AttachError::WrongSize { what: "file of guest memory", expected_bytes, found_bytes });
            }
            if !memory_offset_bytes.is_multiple_of(PAGE_SIZE) || !memory_bytes.is_multiple_of(PAGE_SIZE) {
                return Err(AttachError::BadNumbers { what: "where guest memory starts and ends" });
            }
            let mapping =
                MappedMemory::of_file(memory.as_fd(), memory_offset_bytes, memory_bytes).map_err(failed("mmap"))?;
            shared::map_present_pages(&mapping, memory.as_fd(), memory_offset_bytes, MAPPING_LIMIT);
            Some(GuestMemory { mapping, page_bytes: welcome.page_bytes })
        } else {
            None
        };
        let mut eventfds =
            |count: u32| (0..count).map(|_| next().map(EventFd::from)).collect::<Result<Vec<_>, AttachError>>();
        let doorbells = eventfds(layout.nr_shards)?;
        let wakers = eventfds(layout.nr_waiters)?;
        Ok(WelcomeParts { rings, bitmap, memory, page_bytes, doorbells, wakers })
    }
}
