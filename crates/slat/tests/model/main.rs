//! The engine against a plain model: random operations on slots, random accesses, harvests, invalidations and agings, one
//! after another. After every operation the result, the translation of every page that matters, what the host was told,
//! the dirty log and the number of tables must be what the model says. And random operations on several threads at once,
//! for which there is no such model, but what must never be seen (`threads`).
#![cfg(not(any(loom, shuttle)))]
#![allow(missing_docs)]

#[path = "../common/mod.rs"]
mod common;
mod ops;
mod pair;
mod plain;
mod threads;

use ops::{Aging, Alignment, At, By, LOG, NR_PAGES, NR_SLOTS, Op, PLACES, RANGE_PAGES, WRITES};
use pair::check;
use proptest::prelude::*;
use slat::{Access, AccessTracking, Ept, Locking, Npt};

fn at() -> impl Strategy<Value = At> {
    let page =
        prop_oneof![Just(0u64), Just(u64::MAX), 0u64..8, 508u64..516, any::<u64>().prop_map(|page| page % (1 << 18))];
    prop_oneof![
        8 => (0..NR_SLOTS, page).prop_map(|(slot, page)| At::Slot { slot, page }),
        1 => (0..PLACES.len()).prop_map(At::Place),
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
    let create = (slot(), 0..PLACES.len(), 0..NR_PAGES.len(), 0u32..4, 0usize..3, alignment, writes()).prop_map(
        |(slot, place, pages, flags, size, alignment, writes)| {
            // Read-only slots are one in four of those that would be.
            let flags = if pages % 4 == 0 { flags } else { flags & LOG.bits() };
            Op::Create { slot, place, pages, flags, size, alignment, writes }
        },
    );
    let by = prop_oneof![2 => Just(By::Fault), 1 => Just(By::Hardware)];
    let aging = prop_oneof![2 => Just(Aging::Age), 1 => Just(Aging::Test)];
    prop_oneof![
        8 => create,
        2 => slot().prop_map(|slot| Op::Delete { slot }),
        4 => (slot(), 0..PLACES.len()).prop_map(|(slot, place)| Op::Move { slot, place }),
        6 => (slot(), 0u32..4).prop_map(|(slot, flags)| Op::SetFlags { slot, flags }),
        1 => slot().prop_map(|slot| Op::Resize { slot }),
        36 => (at(), access(), by).prop_map(|(at, access, by)| Op::Touch { at, access, by }),
        6 => slot().prop_map(|slot| Op::Harvest { slot }),
        6 => (at(), pages()).prop_map(|(at, pages)| Op::Begin { at, pages }),
        8 => any::<usize>().prop_map(|index| Op::End { index }),
        6 => (slot(), 0u64..516, writes()).prop_map(|(slot, page, writes)| Op::Replace { slot, page, writes }),
        6 => (at(), pages(), aging).prop_map(|(at, pages, aging)| Op::Age { at, pages, aging }),
        1 => (0u32..2).prop_map(|always| Op::Yield { always }),
    ]
}

fn tracking() -> impl Strategy<Value = AccessTracking> {
    prop_oneof![Just(AccessTracking::AccessedBit), Just(AccessTracking::Faults)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn npt_without_a_lock_does_what_the_model_does(tracking in tracking(), ops in prop::collection::vec(op(), 1..80)) {
        check::<Npt>(Locking::None, tracking, &ops);
    }

    #[test]
    fn npt_with_a_shared_lock_does_what_the_model_does(tracking in tracking(), ops in prop::collection::vec(op(), 1..80)) {
        check::<Npt>(Locking::Shared, tracking, &ops);
    }

    #[test]
    fn npt_with_an_exclusive_lock_does_what_the_model_does(tracking in tracking(), ops in prop::collection::vec(op(), 1..80)) {
        check::<Npt>(Locking::Exclusive, tracking, &ops);
    }

    #[test]
    fn ept_without_a_lock_does_what_the_model_does(tracking in tracking(), ops in prop::collection::vec(op(), 1..80)) {
        check::<Ept>(Locking::None, tracking, &ops);
    }

    #[test]
    fn ept_with_a_shared_lock_does_what_the_model_does(tracking in tracking(), ops in prop::collection::vec(op(), 1..80)) {
        check::<Ept>(Locking::Shared, tracking, &ops);
    }

    #[test]
    fn ept_with_an_exclusive_lock_does_what_the_model_does(tracking in tracking(), ops in prop::collection::vec(op(), 1..80)) {
        check::<Ept>(Locking::Exclusive, tracking, &ops);
    }
}
