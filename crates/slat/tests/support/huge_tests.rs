// The tests of `shuttle_huge` and of `shuttle_break`, each of which sets the format by `Shape`.
// This file is included, and is no module, so that the tests have the same names in both.

#[path = "copied.rs"]
mod copied;
#[path = "huge_scenarios.rs"]
mod scenarios;
#[path = "schedules.rs"]
mod schedules;
#[path = "tlb_world.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod tlb_world;
#[path = "stepped_world.rs"]
#[allow(dead_code, reason = "this test has its own guests")]
mod world;

use std::sync::atomic::Ordering;

use schedules::check_less;

const SCHEDULES: usize = 500;
/// For scenarios with few steps.
const SCHEDULES_OF_SHORT: usize = 4_000;

#[test]
fn guests_access_only_what_the_host_allows_beside_invalidations() {
    check_less(SCHEDULES, scenarios::beside_invalidations);
    assert_ne!(scenarios::RECOVERIES.load(Ordering::Relaxed), 0, "nothing was recovered");
}

#[test]
fn no_write_is_lost_beside_harvests() {
    check_less(SCHEDULES, scenarios::beside_harvests);
}

#[test]
fn no_write_is_lost_beside_everything() {
    check_less(SCHEDULES, scenarios::beside_everything);
}

#[test]
fn no_write_is_lost_when_two_slots_replace_one() {
    check_less(SCHEDULES, scenarios::beside_halves);
}

#[test]
fn no_huge_leaf_is_made_after_the_host_forbids_them() {
    check_less(SCHEDULES_OF_SHORT, scenarios::beside_a_host_that_wants_small_leaves);
}

#[test]
fn an_invalidation_that_cancels_a_recovery_reports_all_writes() {
    check_less(SCHEDULES_OF_SHORT, scenarios::beside_an_invalidation_that_cancels);
}

#[test]
fn beside_an_invalidation_without_memory() {
    check_less(SCHEDULES, scenarios::beside_an_invalidation_without_memory);
}
