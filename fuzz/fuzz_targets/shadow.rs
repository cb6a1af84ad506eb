//! Shadow paging against the architecture (`crates/slat/tests/shadow_guest`), with programs that a fuzzer makes: it
//! finds by coverage what random programs meet by chance only.
//!
//! Three bytes choose the strategy, the number of CPUs and the seed of hypervisor and guest. Each operation is three
//! bytes: its kind, and the seed of what it draws.
#![no_main]
#![allow(dead_code, reason = "the tests use more of these modules")]

#[path = "../../crates/slat/tests/shadow_guest/architecture.rs"]
mod architecture;
#[path = "../../crates/slat/tests/shadow_guest/engine.rs"]
mod engine;
#[path = "../../crates/slat/tests/shadow_guest/entries.rs"]
mod entries;
#[path = "../../crates/slat/tests/support/futex_park.rs"]
mod futex_park;
#[path = "../../crates/slat/tests/shadow_guest/hardware.rs"]
mod hardware;
#[path = "../../crates/slat/tests/shadow_guest/ops.rs"]
mod ops;
#[path = "../../crates/slat/tests/shadow_guest/oracle.rs"]
mod oracle;
#[path = "../../crates/slat/tests/shadow_guest/program/mod.rs"]
mod program;
#[path = "../../crates/slat/tests/shadow_guest/random.rs"]
mod random;
#[path = "../../crates/slat/tests/shadow_guest/stale.rs"]
mod stale;
#[path = "../../crates/slat/tests/shadow_guest/subject.rs"]
mod subject;
#[path = "../../crates/slat/tests/shadow_guest/world.rs"]
mod world;

use engine::{Engine, Hypervisor};
use libfuzzer_sys::fuzz_target;
use ops::{KINDS, Op};
use program::{Program, Setup};
use slat::baselines::Park;
use slat::shadow::ShadowStrategy;
use stale::Caching;
use world::SLOTS;

/// Longer programs only take longer.
const MAX_OPS: usize = 400;

/// The strategies, and what each may cache.
const STRATEGIES: [(ShadowStrategy, Caching); 3] = [
    (ShadowStrategy::Baseline, Caching::WhileCurrent),
    (ShadowStrategy::PcidTagged, Caching::WhileCurrent),
    (ShadowStrategy::RootCache, Caching::AnyTime),
];

fuzz_target!(|bytes: &[u8]| {
    let Some((&[strategy, nr_cpus, seed], ops)) = bytes.split_first_chunk() else { return };
    let (strategy, caching) = STRATEGIES[usize::from(strategy) % STRATEGIES.len()];
    let setup = Setup { seed: seed.into(), nr_cpus: 1 + usize::from(nr_cpus) % 3, caching };
    let op = |bytes: &[u8; 3]| Op {
        kind: KINDS[usize::from(bytes[0]) % KINDS.len()].0,
        seed: u16::from_le_bytes([bytes[1], bytes[2]]).into(),
    };
    let ops: Vec<Op> = ops.as_chunks().0.iter().take(MAX_OPS).map(op).collect();
    let mut program = Program::new(Engine::new(setup.nr_cpus, Hypervisor::of(setup.seed, strategy)), setup);
    program.run(&ops, &mut 0);
    let last_slot = program.last_slot();
    program.subject.check_end([Some(SLOTS[0].0), Some(SLOTS[1].0), last_slot]);
});
