//! The engine against a plain model: random operations on memslots, accesses, harvests,
//! invalidations and agings, one after another. After every operation the engine must match the
//! model: in the result, the translation of every watched page, the reports to the host, the dirty
//! log and the number of page-table pages. `threads` runs random operations on several threads,
//! without a model, and checks what must never be observed.

mod ops;
mod pair;
mod plain;
mod threads;

use ops::{
    Aging, Alignment, At, BITMAP_WORDS, Bits, By, LogRange, MASKS, NR_PAGES, NR_PLACES, NR_SLOTS, NewBitmap, Op,
    RANGE_PAGES, READONLY, SIZES, USERFAULT, WRITES,
};
use pair::{Reports, check};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use slat::baselines::Locking;
use slat::dirty::{DirtyTracking, HugePageLogging, ManualProtect};
use slat::format::Format;
use slat::slots::MemoryAttributes;
use slat::tables::{AccessTracking, FaultAround};
use slat::{Access, Config};

use crate::common::log::{
    ACCESS_TRACKINGS, DIRTY_TRACKINGS, FAULT_AROUNDS, HUGE_PAGE_LOGGINGS, LAZY, LAZY_HUGE_PAGE_LOGGINGS, LEAF_BY_LEAF,
    MANUAL_PROTECTS,
};

fn at() -> impl Strategy<Value = At> {
    let page =
        prop_oneof![Just(0u64), Just(u64::MAX), 0u64..8, 508u64..516, any::<u64>().prop_map(|page| page % (1 << 18))];
    prop_oneof![
        8 => (0..NR_SLOTS, page).prop_map(|(slot, page)| At::Slot { slot, page }),
        1 => (0..NR_PLACES).prop_map(At::Place),
    ]
}

fn access() -> impl Strategy<Value = Access> {
    prop_oneof![3 => Just(Access::Write), 2 => Just(Access::Read), 1 => Just(Access::Execute)]
}

fn op() -> impl Strategy<Value = Op> {
    let slot = || 0..NR_SLOTS;
    let writes = || 0..WRITES.len();
    let pages = || 0..RANGE_PAGES.len();
    let alignment = prop_oneof![Just(Alignment::Like1G), Just(Alignment::Like2M), Just(Alignment::Odd)];
    let create = (slot(), 0..NR_PLACES, 0..NR_PAGES.len(), 0u32..16, 0usize..3, alignment, writes(), bitmap())
        .prop_map(|(slot, place, pages, flags, size, alignment, writes, bitmap)| {
            // One in four of the memslots that would be read-only is read-only; the same for
            // userfault.
            let flags = if pages % 4 == 0 { flags } else { flags & !READONLY.bits() };
            let flags = if place % 4 == 0 { flags } else { flags & !USERFAULT.bits() };
            Op::Create { slot, place, pages, flags, size, alignment, writes, bitmap: Some(bitmap) }
        });
    let by = prop_oneof![2 => Just(By::Fault), 1 => Just(By::Hardware)];
    let aging = prop_oneof![2 => Just(Aging::Age), 1 => Just(Aging::Test)];
    prop_oneof![
        8 => create,
        2 => slot().prop_map(|slot| Op::Delete { slot }),
        4 => (slot(), 0..NR_PLACES).prop_map(|(slot, place)| Op::Move { slot, place }),
        6 => (slot(), 0u32..4).prop_map(|(slot, flags)| Op::SetFlags { slot, flags }),
        1 => slot().prop_map(|slot| Op::Resize { slot }),
        36 => (at(), access(), by).prop_map(|(at, access, by)| Op::Touch { at, access, by }),
        6 => slot().prop_map(|slot| Op::Harvest { slot }),
        4 => (slot(), log_range()).prop_map(|(slot, range)| Op::GetRange { slot, range }),
        6 => (slot(), log_range(), 0..MASKS.len()).prop_map(|(slot, range, mask)| Op::Clear { slot, range, mask }),
        4 => (slot(), 0u64..516, pages()).prop_map(|(slot, page, pages)| Op::MarkDirty { slot, page, pages }),
        6 => (at(), pages()).prop_map(|(at, pages)| Op::Begin { at, pages }),
        8 => any::<usize>().prop_map(|index| Op::End { index }),
        6 => (slot(), 0u64..516, writes()).prop_map(|(slot, page, writes)| Op::Replace { slot, page, writes }),
        6 => (at(), pages(), aging).prop_map(|(at, pages, aging)| Op::Age { at, pages, aging }),
        5 => (at(), pages(), 0..SIZES.len()).prop_map(|(at, pages, largest)| Op::Split { at, pages, largest }),
        6 => (at(), pages()).prop_map(|(at, pages)| Op::Recover { at, pages }),
        5 => (slot(), prop::bool::weighted(0.6), prop::option::of(bitmap()))
            .prop_map(|(slot, on, bitmap)| Op::Userfault { slot, on, bitmap }),
        6 => (slot(), 0u64..1100, pages(), prop_oneof![2 => Just(Bits::Clear), 1 => Just(Bits::Set)])
            .prop_map(|(slot, page, pages, bits)| Op::SetBits { slot, page, pages, bits }),
        5 => (slot(), 0u64..600, pages()).prop_map(|(slot, page, pages)| Op::Rescan { slot, page, pages }),
        6 => (at(), pages(), prop_oneof![Just(MemoryAttributes::PRIVATE), Just(MemoryAttributes::empty())])
            .prop_map(|(at, pages, attributes)| Op::Attributes { at, pages, attributes }),
        3 => (at(), pages()).prop_map(|(at, pages)| Op::CheckAccess { at, pages }),
        1 => (0u32..2).prop_map(|always| Op::Yield { always }),
    ]
}

fn bitmap() -> impl Strategy<Value = NewBitmap> {
    (0usize..2, 0..BITMAP_WORDS.len()).prop_map(|(granularity, words)| NewBitmap { granularity, words })
}

fn log_range() -> impl Strategy<Value = LogRange> {
    let any_number = || prop_oneof![0u64..200, Just(u64::MAX), Just(u64::MAX - 63)];
    prop_oneof![
        8 => (0u64..5000, prop_oneof![0u64..4, 100u64..200, Just(5000u64)])
            .prop_map(|(first, nr_words)| LogRange::Words { first, nr_words }),
        1 => (any_number(), any_number()).prop_map(|(first, nr_pages)| LogRange::Pages { first, nr_pages }),
    ]
}

/// How writes are found and logged, what becomes of huge pages then, and the window of
/// fault-around.
type Logging = (DirtyTracking, ManualProtect, HugePageLogging, FaultAround);

/// The default tracking, without fault-around, half of the time.
fn logging() -> impl Strategy<Value = Logging> {
    let tracking =
        prop_oneof![3 => Just(LAZY), 5 => (0..DIRTY_TRACKINGS.len()).prop_map(|index| DIRTY_TRACKINGS[index])];
    let manual_protect = (0..MANUAL_PROTECTS.len()).prop_map(|index| MANUAL_PROTECTS[index]);
    let huge = [HUGE_PAGE_LOGGINGS, LAZY_HUGE_PAGE_LOGGINGS].concat();
    let huge = (0..huge.len()).prop_map(move |index| huge[index]);
    let around = prop_oneof![
        2 => Just(FaultAround::Off),
        3 => (0..FAULT_AROUNDS.len()).prop_map(|index| FAULT_AROUNDS[index]),
    ];
    (tracking, manual_protect, huge, around)
}

fn reports() -> impl Strategy<Value = Reports> {
    prop_oneof![Just(Reports::Each), Just(Reports::Some)]
}

/// Configurations that format `F` supports.
fn config<F: Format>(locking: Locking) -> impl Strategy<Value = Config> {
    (0..ACCESS_TRACKINGS.len(), logging())
        .prop_map(move |(access, logging)| possible::<F>(locking, ACCESS_TRACKINGS[access], logging))
}

/// The requested configuration, or the nearest that format `F` supports.
fn possible<F: Format>(
    locking: Locking,
    access_tracking: AccessTracking,
    (dirty_tracking, manual_protect, huge, around): Logging,
) -> Config {
    let (dirty_tracking, access_tracking) = match dirty_tracking {
        DirtyTracking::WriteProtect | DirtyTracking::WriteProtectLeaves => (dirty_tracking, access_tracking),
        DirtyTracking::PageModificationLog if F::HAS_MODIFICATION_LOG => (dirty_tracking, AccessTracking::AccessedBit),
        _ if !F::HAS_DIRTY_BIT => (LEAF_BY_LEAF, access_tracking),
        _ => (DirtyTracking::DirtyBit, AccessTracking::AccessedBit),
    };
    Config::default()
        .with_locking(locking)
        .with_access_tracking(access_tracking)
        .with_dirty_tracking(dirty_tracking)
        .with_manual_protect(manual_protect)
        .with_huge_page_logging(huge)
        .with_fault_around(around)
}

/// Each format, with `locking`. Locks do the same for each format. So formats whose directory
/// entries can be protected have more cases than others.
fn each_format_matches_the_model(locking: Locking) {
    slat::for_each_format!(F => {
        let cases = if F::GENERATION != 0 { 1000 } else { 170 };
        let cases = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
        let ops = prop::collection::vec(op(), 1..80);
        let result = TestRunner::new(cases).run(&(config::<F>(locking), reports(), ops), |(config, reports, ops)| {
            check::<F>(config, reports, &ops);
            Ok(())
        });
        result.unwrap_or_else(|error| panic!("{}: {error}", F::NAME));
    });
}

#[test]
fn without_a_lock_each_format_matches_the_model() {
    each_format_matches_the_model(Locking::None);
}

#[test]
fn with_a_shared_lock_each_format_matches_the_model() {
    each_format_matches_the_model(Locking::Shared);
}

#[test]
fn with_an_exclusive_lock_each_format_matches_the_model() {
    each_format_matches_the_model(Locking::Exclusive);
}
