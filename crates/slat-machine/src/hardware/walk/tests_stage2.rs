//! What Arm's stage 2 alone has: encodings of two descriptor bits and of shareability, and which
//! descriptors are cached.

use slat::{Access, Gfn, GfnRange};

use super::cached::PteCache;
use super::tests::{FRAME, Way, leaf};
use super::tests_manuals::{STAGE2, STAGE2_PERMISSION, STAGE2_TRANSLATION, stage2_code};
use super::{Purpose, Walker};
use crate::hardware::commit::Scope;

const WRITE: u64 = 1 << 7;
const AF: u64 = 1 << 10;

#[test]
fn invalid_and_reserved_encodings() {
    // A block at the manual's levels 0 and 3.
    for level in [1, 4] {
        let way = Way::new(&STAGE2, level, FRAME & !((1 << 39) - 1) | STAGE2.block);
        let code = stage2_code(Access::Write, STAGE2_TRANSLATION, level);
        assert_eq!(way.walk(Access::Write), way.fault(Access::Write, code));
    }
    for shareability in 0..4 {
        let way = Way::new(&STAGE2, 1, leaf(&STAGE2, 1) & !(0b11 << 8) | shareability << 8);
        let is_bad = way.walk(Access::Read) == way.misconfigured(1, Access::Read);
        assert_eq!(is_bad, shareability == 1, "{shareability:#b}");
    }
}

/// What may be cached: valid descriptors, and of leaves those with the access flag.
#[test]
fn a_cached_descriptor_serves_until_it_is_flushed() {
    for level in 1..=3 {
        let cached = PteCache::default();
        let leaf = leaf(&STAGE2, level);
        // One that is not valid is not cached.
        let way = Way::new(&STAGE2, level, 0);
        let page = GfnRange::new(Gfn(way.gpa.0 >> 12), 1);
        let walk = |access| way.walk_with(|walker| Walker { cached: Some(&cached), ..walker }, access, Purpose::Data);
        assert!(walk(Access::Read).is_err());
        way.set(level, leaf & !WRITE);
        let denied = way.fault(Access::Write, stage2_code(Access::Write, STAGE2_PERMISSION, level));
        assert_eq!(walk(Access::Write), denied);
        // Without the flag it is not cached either, though the access was denied.
        way.set(level, leaf);
        let before = walk(Access::Write);
        assert!(before.is_ok());
        // With it, the right is.
        way.set(level, 0);
        assert_eq!(walk(Access::Write), before, "still cached");
        cached.drop_range(Scope::Combined, page);
        assert_eq!(walk(Access::Write), before, "it is of the second stage");
        cached.drop_range(Scope::SecondStage, page);
        assert!(walk(Access::Write).is_err());
        way.set(level, leaf & !WRITE | AF);
        assert_eq!(walk(Access::Write), denied);
        way.set(level, leaf | AF);
        assert_eq!(walk(Access::Write), denied, "the right that it lacked is cached");
        cached.drop_range(Scope::Leaves, page);
        assert_eq!(walk(Access::Write), before);
    }
}
