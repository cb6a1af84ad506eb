//! Movable pages without an engine: what each event does to contents and frames, and that misuse of
//! a frame is detected.

use slat::{Gfn, GfnRange};

use super::super::POISON;
use super::*;
use crate::memory::phys;

const NR_SPARE: u64 = 4;

fn pages(nr_pages: u64) -> Arc<Pages> {
    Arc::new(Pages::new(nr_pages << Gfn::SHIFT, NR_SPARE).expect("memory"))
}

/// A guest that has nothing mapped.
fn invalidate(change: &mut dyn FnMut()) -> Result<(), slat::error::RangeError> {
    change();
    Ok(())
}

fn resolve(pages: &Pages, page: u64, access: Access) -> Resolved {
    pages.resolve(page, access, &invalidate).expect("inside")
}

fn word(resolved: Resolved) -> *mut u64 {
    phys::ptr_of(resolved.pfn.hpa()).cast()
}

/// Writes as a guest that has the page mapped, and reports it as an engine.
fn write(pages: &Pages, page: u64, value: u64) {
    let resolved = resolve(pages, page, Access::Write);
    assert!(resolved.writable);
    // SAFETY: the first word of a frame that is the page's, and no other thread uses it.
    unsafe { word(resolved).write(value) };
    pages.note_zapped(leaf(resolved, true));
}

fn leaf(resolved: Resolved, dirty: bool) -> ZappedLeaf {
    ZappedLeaf { range: GfnRange::new(Gfn(0), 1), pfn: resolved.pfn, accessed: true, dirty }
}

#[test]
fn a_discarded_page_is_zeros_and_releases_its_frame() {
    let pages = pages(3);
    assert_eq!(pages.frame_use(), FrameUse::default());
    write(&pages, 1, 7);
    assert_eq!((pages.peek(0), pages.peek(1), pages.peek(3)), (Some(0), Some(7), None));
    assert_eq!(pages.frame_use(), FrameUse { nr_frames: 1, nr_pages: 1, nr_snapshots: 0 });
    pages.discard(0..3, &invalidate).expect("done");
    assert_eq!((pages.discards(1), pages.discards(3)), (Discards { begun: 1, done: 1 }, Discards::default()));
    assert_eq!(pages.frame_use(), FrameUse::default());
    // SAFETY: the first word of a frame that is the page's, and no other thread uses it.
    assert_eq!(unsafe { word(resolve(&pages, 1, Access::Read)).read() }, 0);
    assert_eq!(pages.resolve(3, Access::Read, &invalidate), Err(Unresolved::Gone));
    pages.check_free_frames().expect("they were not written");
    assert_eq!(pages.counts().nr_discarded, 3);
}

#[test]
fn an_invalidation_that_fails_changes_nothing() {
    let pages = pages(1);
    write(&pages, 0, 7);
    let fails = |_: &mut dyn FnMut()| Err(slat::error::RangeError::OutOfMemory);
    assert_eq!(pages.discard(0..1, &fails), Err(slat::error::RangeError::OutOfMemory));
    assert_eq!(pages.relocate(0, &fails), Err(slat::error::RangeError::OutOfMemory));
    assert_eq!(pages.swap_out(0, &fails), Err(slat::error::RangeError::OutOfMemory));
    assert!(pages.protect(0, &fails).is_err());
    assert_eq!((pages.peek(0), pages.discards(0)), (Some(7), Discards::default()));
    assert_eq!(pages.frame_use(), FrameUse { nr_frames: 1, nr_pages: 1, nr_snapshots: 0 });
}

#[test]
fn a_page_moves_with_its_contents_and_leaves_poison() {
    let pages = pages(1);
    assert_eq!(pages.relocate(0, &invalidate), Ok(Effect::NoFrame));
    assert_eq!(pages.relocate(1, &invalidate), Ok(Effect::NoFrame));
    write(&pages, 0, 7);
    let old = resolve(&pages, 0, Access::Read);
    assert_eq!(pages.relocate(0, &invalidate), Ok(Effect::Done));
    let new = resolve(&pages, 0, Access::Read);
    assert!(new.pfn != old.pfn && pages.peek(0) == Some(7));
    // SAFETY: a word of the mapping, which no other thread uses.
    unsafe {
        assert_eq!(word(old).read(), POISON);
        // A CPU with a stale translation.
        word(old).add(5).write(8);
    }
    let corruption = pages.check_free_frames().expect_err("written after it was freed");
    assert_eq!((corruption.pfn, corruption.offset_bytes, corruption.found), (old.pfn, 40, 8));
}

#[test]
fn a_write_to_a_freed_frame_is_detected_when_it_is_allocated() {
    let pages = pages(1);
    write(&pages, 0, 7);
    let old = resolve(&pages, 0, Access::Read);
    pages.discard(0..1, &invalidate).expect("done");
    // SAFETY: a word of the mapping, which no other thread uses.
    unsafe { word(old).write(7) };
    // Frames are allocated in turn: one page, and the spare ones.
    for _ in 0..=NR_SPARE {
        resolve(&pages, 0, Access::Read);
        pages.discard(0..1, &invalidate).expect("done");
    }
    assert!(pages.frames.corruption().is_some());
}

#[test]
fn a_protected_page_is_copied_by_the_first_write() {
    let pages = pages(1);
    assert_eq!(pages.protect(0, &invalidate).map(Result::err), Ok(Some(Effect::NoFrame)));
    write(&pages, 0, 7);
    let old = resolve(&pages, 0, Access::Read);
    let snapshot = pages.protect(0, &invalidate).expect("done").expect("a frame");
    assert_eq!(resolve(&pages, 0, Access::Read), Resolved { writable: false, ..old });
    write(&pages, 0, 8);
    assert_ne!(resolve(&pages, 0, Access::Read).pfn, old.pfn);
    snapshot.verify().expect("as it was");
    assert_eq!(pages.frame_use(), FrameUse { nr_frames: 2, nr_pages: 1, nr_snapshots: 1 });
    // SAFETY: a word of the mapping, which no other thread uses.
    unsafe { word(old).write(9) };
    let corruption = snapshot.verify().expect_err("written where it was protected");
    assert_eq!((corruption.found, corruption.expected), (9, 7));
    drop(snapshot);
    assert_eq!(pages.frame_use(), FrameUse { nr_frames: 1, nr_pages: 1, nr_snapshots: 0 });
    let counts = pages.counts();
    assert_eq!((counts.nr_protected, counts.nr_copied_on_write, counts.nr_unprotected), (1, 1, 0));
}

#[test]
fn the_last_user_of_a_protected_page_may_write_it() {
    let pages = pages(1);
    write(&pages, 0, 7);
    let old = resolve(&pages, 0, Access::Read);
    drop(pages.protect(0, &invalidate).expect("done").expect("a frame"));
    assert!(!resolve(&pages, 0, Access::Read).writable);
    assert_eq!(resolve(&pages, 0, Access::Write), old);
    assert!(resolve(&pages, 0, Access::Read).writable);
    assert_eq!(pages.counts().nr_unprotected, 1);
}

#[test]
fn snapshots_leave_spare_frames() {
    let pages = pages(8);
    for page in 0..8 {
        write(&pages, page, page);
    }
    let most = NR_SPARE / 2;
    let snapshots: Vec<_> =
        (0..most).map(|page| pages.protect(page, &invalidate).expect("done").expect("a frame")).collect();
    assert_eq!(pages.protect(7, &invalidate).map(Result::err), Ok(Some(Effect::NoSpareFrame)));
    for page in 0..8 {
        write(&pages, page, 10 + page);
        assert_eq!(pages.relocate(page, &invalidate), Ok(Effect::Done));
    }
    assert_eq!(pages.frame_use(), FrameUse { nr_frames: 8 + most, nr_pages: 8, nr_snapshots: most });
    for snapshot in snapshots {
        snapshot.verify().expect("as it was");
    }
    assert_eq!(pages.counts().nr_snapshots_verified, most);
}

#[test]
fn a_swapped_page_comes_back_and_is_saved_again_only_if_written() {
    let pages = pages(1);
    assert_eq!(pages.swap_out(0, &invalidate), Ok(Effect::NoFrame));
    write(&pages, 0, 7);
    assert_eq!(pages.swap_out(0, &invalidate), Ok(Effect::Done));
    assert_eq!((pages.frame_use(), pages.peek(0)), (FrameUse::default(), Some(7)));
    // Read only: the copy in the store is good.
    let resolved = resolve(&pages, 0, Access::Read);
    assert_eq!(pages.peek(0), Some(7));
    pages.note_zapped(leaf(resolved, false));
    assert_eq!(pages.swap_out(0, &invalidate), Ok(Effect::Done));
    assert_eq!((pages.counts().nr_swapped_out, pages.counts().nr_dropped_clean), (1, 1));
    // Written: saved again.
    write(&pages, 0, 8);
    assert_eq!(pages.swap_out(0, &invalidate), Ok(Effect::Done));
    assert_eq!((pages.counts().nr_swapped_out, pages.peek(0)), (2, Some(8)));
    // Clean, but another invalidation may still have to report a write.
    let resolved = resolve(&pages, 0, Access::Read);
    let meets_another = |change: &mut dyn FnMut()| {
        pages.invalidate(0..1, &invalidate)?;
        invalidate(change)
    };
    assert_eq!(pages.swap_out(0, &meets_another), Ok(Effect::Done));
    assert_eq!((pages.counts().nr_swapped_out, pages.counts().nr_dropped_clean), (3, 1));
    assert_eq!(pages.counts().nr_swapped_in, 3);
    // A moved page stays clean.
    resolve(&pages, 0, Access::Read);
    assert_eq!(pages.relocate(0, &invalidate), Ok(Effect::Done));
    assert_eq!(pages.swap_out(0, &invalidate), Ok(Effect::Done));
    assert_eq!(pages.counts().nr_dropped_clean, 2);
    pages.note_zapped(leaf(resolved, true));
    pages.discard(0..1, &invalidate).expect("done");
    assert_eq!(pages.peek(0), Some(0));
    pages.check_free_frames().expect("they were not written");
}
