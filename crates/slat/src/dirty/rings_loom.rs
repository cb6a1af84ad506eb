//! The list of rings under loom: every interleaving of two vCPUs that come and go, and of the first
//! vCPU with the call that enables rings.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p slat --release --lib loom`

extern crate std;

use std::vec::Vec;

use loom::sync::Arc;
use loom::thread;

use super::*;
use crate::dirty::ring::DirtyPage;

#[test]
fn a_vcpu_inherits_a_released_ring() {
    loom::model(|| {
        let rings = Arc::new(Rings::new());
        rings.enable(DirtyRing::MIN_ENTRIES).expect("no vCPU yet");
        let threads = [0, 1].map(|page| {
            let rings = Arc::clone(&rings);
            thread::spawn(move || {
                let mut owned = rings.take().expect("memory for a ring").expect("rings are enabled");
                // SAFETY: the rings are alive.
                unsafe { owned.get() }.push(DirtyPage { slot: 0, page });
                // SAFETY: as above.
                unsafe { owned.release() };
            })
        });
        threads.into_iter().for_each(|thread| thread.join().expect("no check fails"));
        let mut pages = Vec::new();
        for ring in rings.iter() {
            ring.harvest(|page| pages.push(page.page));
        }
        pages.sort_unstable();
        assert_eq!(pages, [0, 1]);
    });
}

#[test]
fn either_enabling_or_the_first_vcpu_comes_first() {
    loom::model(|| {
        let rings = Arc::new(Rings::new());
        let enabling = {
            let rings = Arc::clone(&rings);
            thread::spawn(move || rings.enable(DirtyRing::MIN_ENTRIES))
        };
        let has_ring = rings.take().expect("memory for a ring").is_some();
        let expected = if has_ring { Ok(()) } else { Err(ConfigError::VcpusExist) };
        assert_eq!(enabling.join().expect("no check fails"), expected);
        assert_eq!(rings.are_enabled(), has_ring);
    });
}
