//! Huge pages that are split and put back, under shuttle, beside guests with software TLBs and
//! everything else that changes the tables: where a table and a huge leaf must not be cached at
//! once. Of the engine's formats Arm's stage 2 is like that.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test -p slat --release --test 'shuttle_*'`
#![cfg(shuttle)]
#![allow(missing_docs)]

include!("support/huge_tests.rs");

type Shape = world::Breaking<3>;
