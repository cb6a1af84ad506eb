//! Huge pages that are split and put back, under shuttle, beside guests with software TLBs and everything else that changes
//! the tables: where a table and a huge leaf must not be cached at once. No format of the engine is like that yet.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test -p slat --release --test 'shuttle_*'`
#![cfg(shuttle)]
#![allow(missing_docs)]

#[path = "support/copied.rs"]
mod copied;
#[path = "support/huge_scenarios.rs"]
mod scenarios;
#[path = "support/schedules.rs"]
mod schedules;
#[path = "support/tlb_world.rs"]
#[allow(dead_code, reason = "others need more of it")]
mod tlb_world;
#[path = "support/stepped_world.rs"]
#[allow(dead_code, reason = "the guests here are others")]
mod world;

use std::sync::atomic::Ordering;

use schedules::check_less;

type Shape = world::Breaking<3>;

const SCHEDULES: usize = 500;
/// Of scenarios with few steps.
const SCHEDULES_OF_SHORT: usize = 4_000;

#[test]
fn beside_invalidations_guests_see_only_what_the_host_allows() {
    check_less(SCHEDULES, scenarios::beside_invalidations);
    assert_ne!(scenarios::RECOVERIES.load(Ordering::Relaxed), 0, "nothing was put back");
}

#[test]
fn beside_harvests_no_write_is_lost() {
    check_less(SCHEDULES, scenarios::beside_harvests);
}

#[test]
fn beside_everything_no_write_is_lost() {
    check_less(SCHEDULES, scenarios::beside_everything);
}

#[test]
fn beside_two_slots_that_take_the_place_of_one() {
    check_less(SCHEDULES, scenarios::beside_halves);
}

#[test]
fn beside_a_host_that_wants_small_leaves_there_is_no_huge_one() {
    check_less(SCHEDULES_OF_SHORT, scenarios::beside_a_host_that_wants_small_leaves);
}

#[test]
fn beside_one_that_meets_a_recovery_all_is_told() {
    check_less(SCHEDULES_OF_SHORT, scenarios::beside_one_that_meets_it);
}

#[test]
fn beside_an_invalidation_without_memory() {
    check_less(SCHEDULES, scenarios::beside_an_invalidation_without_memory);
}
