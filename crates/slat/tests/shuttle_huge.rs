//! Huge pages that are split and put back, under shuttle, beside guests with software TLBs and
//! everything else that changes the tables: where tables and huge leaves may be cached at once.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test -p slat --release --test 'shuttle_*'`
#![cfg(shuttle)]
#![allow(missing_docs)]

include!("support/huge_tests.rs");

type Shape = world::Tiny<3>;
