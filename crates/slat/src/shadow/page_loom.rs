//! The record of a shadow page under loom: a thread that reads it without a lock, beside the end of
//! the page and the next page of that record. Memory orders are as they are written.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p slat --release --lib loom`

extern crate std;

use loom::sync::Arc;
use loom::thread;

use super::*;
use crate::shadow::role::Role;

const PREEMPTIONS: usize = 2;

/// What a page was made from.
fn made_from(nth: u64) -> (Gfn, Role, Hpa) {
    (Gfn(nth), Role::from_bits(nth), Hpa(nth << 12))
}

/// Runs `read` on the record of a page, beside a thread that ends the page and makes another one of
/// the record. `read` gets the generation of the first page.
fn check(read: fn(&ShadowPage, u32)) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(PREEMPTIONS);
    builder.check(move || {
        let page: Arc<ShadowPage> = Arc::new(Zeroed::zeroed());
        let (gfn, role, table) = made_from(1);
        let generation = page.prepare(gfn, role, table);
        page.come_alive();
        let other = thread::spawn({
            let page = Arc::clone(&page);
            move || {
                page.die();
                // SAFETY: the pin of `die`.
                assert!(unsafe { page.unpin() });
                let (gfn, role, table) = made_from(2);
                page.prepare(gfn, role, table);
                page.come_alive();
            }
        });
        read(&page, generation);
        other.join().expect("no check fails");
    });
}

#[test]
fn what_was_read_of_a_page_that_is_still_alive_is_of_that_page() {
    check(|page, generation| {
        let role = page.role();
        if page.is_alive(generation) {
            assert!(role == made_from(1).1, "the role of the next page");
        }
    });
    check(|page, generation| {
        let gfn = page.gfn();
        if page.is_alive(generation) {
            assert_eq!(gfn, made_from(1).0, "the frame of the next page");
        }
    });
    check(|page, generation| {
        let table = page.table();
        if page.generation() == Some(generation) {
            assert_eq!(table, made_from(1).2, "the page-table page of the next page");
        }
    });
}

#[test]
fn a_page_that_is_found_alive_is_read_as_it_was_made() {
    check(|page, generation| {
        if let Some(found) = page.generation() {
            let made = (page.gfn(), page.role(), page.table());
            if page.is_alive(found) {
                let nth = if found == generation { 1 } else { 2 };
                assert!(made == made_from(nth), "a mixture of two pages");
            }
        }
    });
}
