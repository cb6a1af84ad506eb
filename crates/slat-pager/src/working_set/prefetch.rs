//! Brings mapped bytes into memory, so that a later copy waits for no disk.

#![expect(unsafe_code, reason = "advice about a mapping that only the kernel may read")]

use rustix::mm::{Advice, madvise};

use crate::source::Mapped;

/// Waits until `bytes` are in memory. Where that fails, the copy finds out why.
pub(super) fn prefetch(bytes: Mapped<'_>) {
    let start = std::ptr::with_exposed_provenance_mut(bytes.address() as usize);
    // SAFETY: the advice reads pages in, as an access would, and changes no contents; where nothing is mapped, or the
    // file has become shorter, the call fails.
    let _ = unsafe { madvise(start, bytes.nr_bytes(), Advice::LinuxPopulateRead) };
}
