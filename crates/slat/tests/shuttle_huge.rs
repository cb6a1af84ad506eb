//! Huge pages that are split and recovered, under shuttle, without break before make. Guests with
//! software TLBs and all other changes of the page tables run beside.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test -p slat --release --test 'shuttle_*'`
#![cfg(shuttle)]
#![allow(missing_docs)]

include!("support/huge_tests.rs");

type Shape = world::Tiny<3>;
