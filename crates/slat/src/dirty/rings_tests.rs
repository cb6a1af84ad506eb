use alloc::vec::Vec;

use core::ptr;

use super::*;
use crate::dirty::ring::DirtyPage;

#[test]
fn rings_are_enabled_once_with_sizes_that_kvm_accepts() {
    let rings = Rings::new();
    for nr_entries in [0, 1, 64, 65, 128, 255, 257, 4095, 65535, 65537, 131_072, 1 << 31, u32::MAX] {
        assert_eq!(rings.enable(nr_entries), Err(ConfigError::BadRingSize { nr_entries }));
        assert!(!rings.are_enabled());
    }
    assert_eq!(rings.enable(DirtyRing::MIN_ENTRIES), Ok(()));
    assert!(rings.are_enabled());
    assert_eq!(rings.enable(DirtyRing::MAX_ENTRIES), Err(ConfigError::DirtyRingEnabled));
    assert_eq!(rings.enable(3), Err(ConfigError::BadRingSize { nr_entries: 3 }));
    assert_eq!(Rings::new().enable(DirtyRing::MAX_ENTRIES), Ok(()));
}

#[test]
fn rings_are_refused_while_there_are_vcpus() {
    let rings = Rings::new();
    assert!(rings.take().unwrap().is_none());
    assert_eq!(rings.enable(256), Err(ConfigError::VcpusExist));
    assert!(rings.take().unwrap().is_none() && !rings.are_enabled());
    rings.leave();
    assert_eq!(rings.enable(256), Err(ConfigError::VcpusExist));
    assert_eq!(rings.iter().count(), 0);
    // Nor during a recovery.
    let recovery = rings.keep_out().unwrap();
    rings.leave();
    assert_eq!(rings.enable(256), Err(ConfigError::VcpusExist));
    drop(recovery);
    assert_eq!(rings.enable(256), Ok(()));
    assert!(rings.keep_out().is_none() && rings.take().unwrap().is_some());
}

#[test]
fn a_released_ring_keeps_its_entries_and_is_inherited() {
    let rings = Rings::new();
    rings.enable(512).unwrap();
    let take = || rings.take().unwrap().unwrap();
    let (mut one, other) = (take(), take());
    // SAFETY: `rings` is alive.
    let (first, second) = unsafe { (one.get(), other.get()) };
    assert!(!ptr::eq(first, second));
    assert_eq!((first.nr_entries(), first.room()), (512, 512));
    first.push(DirtyPage { slot: 0, page: 7 });
    // SAFETY: as above.
    unsafe { one.release() };
    assert_eq!(rings.iter().count(), 2);
    let again = take();
    // SAFETY: as above.
    let again_first = unsafe { again.get() };
    assert!(ptr::eq(first, again_first));
    again_first.push(DirtyPage { slot: 0, page: 8 });
    let mut pages = Vec::new();
    for ring in rings.iter() {
        ring.harvest(|page| pages.push(page.page));
    }
    assert_eq!(pages, [7, 8]);
    let third = take();
    // SAFETY: as above.
    assert!(!ptr::eq(unsafe { third.get() }, first));
    assert_eq!(rings.iter().count(), 3);
}
