//! Userfault and private pages under shuttle, with break before make and without.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test -p slat --release --test 'shuttle_*'`
#![cfg(shuttle)]
#![allow(missing_docs)]

#[path = "support/userfault_scenarios.rs"]
mod scenarios;
#[path = "support/schedules.rs"]
mod schedules;
#[path = "support/stepped_world.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod world;

use schedules::check_less;
use world::{Breaking, Tiny};

const SCHEDULES: usize = 500;

#[test]
fn a_rescanned_page_is_not_mapped() {
    check_less(SCHEDULES, scenarios::beside_rescans::<Tiny<3>>);
    check_less(SCHEDULES, scenarios::beside_rescans::<Breaking<3>>);
}

#[test]
fn a_rescanned_page_is_not_mapped_when_its_table_is_unlinked() {
    check_less(SCHEDULES, scenarios::beside_rescans_and_invalidations::<Tiny<3>>);
    check_less(SCHEDULES, scenarios::beside_rescans_and_invalidations::<Breaking<3>>);
}

#[test]
fn a_page_whose_bit_was_set_before_the_flag_is_not_mapped() {
    check_less(SCHEDULES, scenarios::beside_the_flag::<Tiny<3>>);
    check_less(SCHEDULES, scenarios::beside_the_flag::<Breaking<3>>);
}

#[test]
fn a_page_is_private_or_shared_as_it_was_made() {
    check_less(SCHEDULES, scenarios::beside_attributes::<Tiny<3>>);
    check_less(SCHEDULES, scenarios::beside_attributes::<Breaking<3>>);
}
