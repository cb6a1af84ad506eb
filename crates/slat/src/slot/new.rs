//! What a change adds to the published memslots, before it is published.

#![expect(unsafe_code, reason = "frees what was not published, and so is its own")]

use alloc::boxed::Box;
use core::ptr::NonNull;

use super::attributes::PrivatePages;
use super::bitmap::Bitmap;
use super::region::MemoryRegionFlags;
use super::set::Slot;
use super::userfault::UserfaultBitmap;
use crate::addr::GfnRange;
use crate::boxed::try_box;
use crate::error::OutOfMemory;
use crate::sync::AtomicBool;

/// What a change adds to a memslot, in boxes: no other thread has it yet.
#[derive(Default)]
pub(crate) struct Attachments {
    pub(crate) log: Option<Box<Bitmap>>,
    pub(crate) userfault: Option<Box<UserfaultBitmap>>,
}

/// A thing for a set that is not published yet. Dropping this frees the thing; a change that was
/// published forgets this. No box, because faults use the thing before that.
pub(super) struct Unpublished<T: ?Sized>(NonNull<T>);

impl<T: ?Sized> Unpublished<T> {
    pub(super) fn new(thing: Box<T>) -> Unpublished<T> {
        Unpublished(NonNull::from(Box::leak(thing)))
    }

    pub(super) fn pointer(&self) -> NonNull<T> {
        self.0
    }

    pub(super) fn of(thing: &Option<Unpublished<T>>) -> Option<NonNull<T>> {
        thing.as_ref().map(|thing| thing.0)
    }
}

impl<T: ?Sized> Drop for Unpublished<T> {
    fn drop(&mut self) {
        // SAFETY: it came from a box. It was not published, because then this is forgotten.
        unsafe { free(Some(self.0)) }
    }
}

/// A memslot that no set has yet. Dropping this frees it.
pub(crate) struct NewSlot<B> {
    pub(super) range: GfnRange,
    pub(super) id: u32,
    pub(super) flags: MemoryRegionFlags,
    pub(super) slot: Unpublished<Slot<B>>,
    pub(super) log: Option<Unpublished<Bitmap>>,
    pub(super) userfault: Option<Unpublished<UserfaultBitmap>>,
}

impl<B> NewSlot<B> {
    pub(crate) fn new(
        id: u32,
        range: GfnRange,
        flags: MemoryRegionFlags,
        backing: B,
        attachments: Attachments,
    ) -> Result<NewSlot<B>, OutOfMemory> {
        let has_private = flags.contains(MemoryRegionFlags::GUEST_MEMFD);
        let private = has_private.then(|| PrivatePages::new(range.nr_pages())).transpose()?;
        // Claimed until `insert` has published it.
        let slot = Unpublished::new(try_box(Slot { backing, private, claimed: AtomicBool::new(true) })?);
        let (log, userfault) = (attachments.log.map(Unpublished::new), attachments.userfault.map(Unpublished::new));
        Ok(NewSlot { range, id, flags, slot, log, userfault })
    }
}

/// Frees what comes from a box.
///
/// # Safety
/// It came from a box, and is not used any more.
pub(super) unsafe fn free<T: ?Sized>(thing: Option<NonNull<T>>) {
    if let Some(thing) = thing {
        // SAFETY: as the caller promises.
        drop(unsafe { Box::from_raw(thing.as_ptr()) });
    }
}
