//! Huge pages that are split and recovered, under shuttle, with break before make. Guests with
//! software TLBs and all other changes of the page tables run beside. Of the engine's formats Arm's
//! stage 2 needs this.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test -p slat --release --test 'shuttle_*'`
#![cfg(shuttle)]
#![allow(missing_docs)]

include!("support/huge_tests.rs");

type Shape = world::Breaking<3>;
