// The tests of `shuttle_huge` and of `shuttle_break`, which say by `Shape` which format they try.
// Included, not a module: the names of the tests are the same in both.

#[path = "copied.rs"]
mod copied;
#[path = "huge_scenarios.rs"]
mod scenarios;
#[path = "schedules.rs"]
mod schedules;
#[path = "tlb_world.rs"]
#[allow(dead_code, reason = "others need more of it")]
mod tlb_world;
#[path = "stepped_world.rs"]
#[allow(dead_code, reason = "the guests here are others")]
mod world;

use std::sync::atomic::Ordering;

use schedules::check_less;

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
