//! Shadow paging against the architecture. A random guest edits its page tables in any way, and
//! flushes or does not, on one CPU and on several. A plain interpreter of the rules judges each
//! access. Only what the manual allows to be stale may be stale.
//!
//! The hypervisor's CPUs (`hardware`) walk the shadow page tables and cache what they may. The
//! allowed results of each access follow from the guest's own page tables, with all past values of
//! their PTEs (`architecture`, `stale`, `oracle`). `SHADOW_STEPS` is the total number of steps,
//! `SHADOW_SEED` the first seed. A failure prints its seed and a shorter program that fails.
#![cfg(not(any(loom, shuttle)))]
#![allow(missing_docs)]
#![allow(unsafe_code, reason = "the host's contract over memory of its own")]

mod architecture;
mod architecture_tests;
mod check;
mod directed;
mod engine;
mod entries;
mod hardware;
mod ops;
mod oracle;
mod program;
mod quiet;
mod random;
mod stale;
mod subject;
mod threads;
mod toy;
mod world;

use std::cell::Cell;

use slat::baselines::Park;
use slat::shadow::ShadowStrategy;
#[path = "../support/futex_park.rs"]
mod futex_park;

use check::{check, first_failure};
use engine::{Engine, Hypervisor};
use hardware::{Disobeys, Keeps};
use program::{Figures, Program, Setup};
use quiet::Quiet;
use stale::Caching;
use toy::{LEFT_OUT, LeftOut, Toy};
use world::SLOTS;

/// A number from the environment, or `default`.
fn setting(name: &str, default: u64) -> u64 {
    let Ok(value) = std::env::var(name) else { return default };
    let (digits, radix) = value.strip_prefix("0x").map_or((value.as_str(), 10), |digits| (digits, 16));
    u64::from_str_radix(digits, radix).unwrap_or_else(|_| panic!("{name}={value} is no number"))
}

/// CPUs that keep the rules pass, with any size of the cache.
#[test]
fn the_oracle_accepts_cpus_that_keep_the_rules() {
    let first = setting("SHADOW_SEED", 0);
    let mut figures = Figures::default();
    for seed in first..first + 24 {
        for left_out in [LeftOut::Nothing, LeftOut::Cache] {
            let setup = Setup { seed, nr_cpus: 1 + seed as usize % 3, caching: Caching::WhileCurrent };
            figures += check(setup, 1500, &|| Toy::new(setup.nr_cpus, left_out), &|_| ());
        }
    }
    println!("{figures:?}");
    assert!(figures.stale > 100);
}

/// CPUs that leave one rule out are detected.
#[test]
fn the_oracle_detects_each_missing_rule() {
    let _quiet = Quiet::new();
    for left_out in LEFT_OUT {
        let noticed = (0..400u64).find_map(|seed| {
            let setup = Setup { seed, nr_cpus: 1 + seed as usize % 3, caching: Caching::WhileCurrent };
            first_failure(setup, 1500, &|| Toy::new(setup.nr_cpus, left_out)).map(|step| (seed, step))
        });
        println!("{left_out:?} is noticed at {noticed:?}");
        assert!(noticed.is_some(), "{left_out:?} is not noticed");
    }
}

/// The flushes that the engine requests are needed: a CPU that omits them is detected. (Except
/// those of one page: what an INVLPG finds changed is zapped, and the host flushes it.)
#[test]
fn the_oracle_detects_each_missing_flush() {
    let _quiet = Quiet::new();
    for disobeys in [Disobeys::Context, Disobeys::All, Disobeys::Host] {
        let noticed = (0..300u64).find_map(|seed| {
            let setup = Setup { seed, nr_cpus: 2, caching: Caching::AnyTime };
            let strategy = [ShadowStrategy::RootCache, ShadowStrategy::PcidTagged][seed as usize % 2];
            let hypervisor = Hypervisor { disobeys, keeps: Keeps::Everything, ..Hypervisor::of(seed, strategy) };
            first_failure(setup, NR_OPS, &|| Engine::new(2, hypervisor)).map(|step| (seed, step))
        });
        println!("{disobeys:?} is noticed at {noticed:?}");
        assert!(noticed.is_some(), "{disobeys:?} is not noticed");
    }
}

/// What a strategy may cache.
fn caching(strategy: ShadowStrategy) -> Caching {
    match strategy {
        ShadowStrategy::Baseline | ShadowStrategy::PcidTagged => Caching::WhileCurrent,
        ShadowStrategy::RootCache | ShadowStrategy::RootsByPcid => Caching::AnyTime,
    }
}

/// Operations of one program.
const NR_OPS: usize = 2500;

/// Runs programs with one strategy, until they have made their share of the steps.
fn run_engine(strategy: ShadowStrategy) {
    let share = setting("SHADOW_STEPS", 1_400_000) / 4;
    let first = setting("SHADOW_SEED", 0);
    let start = std::time::Instant::now();
    let mut figures = Figures::default();
    let met = Cell::new([0; 5]);
    let mut seed = first;
    while figures.steps < share || seed == first {
        let setup = Setup { seed, nr_cpus: [1, 2, 3, 2][seed as usize % 4], caching: caching(strategy) };
        let hypervisor = Hypervisor::of(seed, strategy);
        figures += check(setup, NR_OPS, &|| Engine::new(setup.nr_cpus, hypervisor), &|program: Program<Engine>| {
            let stats = program.subject.vm.stats();
            let here =
                [stats.unsyncs, stats.shadow_syncs, stats.shadow_floods, stats.shadow_evictions, stats.root_hits];
            met.set(std::array::from_fn(|index| met.get()[index] + here[index]));
            let last_slot = program.last_slot();
            program.subject.check_end([Some(SLOTS[0].0), Some(SLOTS[1].0), last_slot]);
        });
        seed += 1;
    }
    println!("{strategy:?}: {} programs in {:?}: {figures:?}", seed - first, start.elapsed());
    let met = met.get();
    println!(
        "  unsynced {}, synchronized {}, flooded {}, evicted {}, roots hit {}",
        met[0], met[1], met[2], met[3], met[4]
    );
    // The events that programs are to cause; a single program may not.
    assert!(seed - first < 20 || met[..4].iter().all(|&nr| nr > 0), "{met:?}");
}

#[test]
fn the_baseline_follows_the_architecture() {
    run_engine(ShadowStrategy::Baseline);
}

#[test]
fn the_root_cache_follows_the_architecture() {
    run_engine(ShadowStrategy::RootCache);
}

#[test]
fn roots_searched_by_pcid_follow_the_architecture() {
    run_engine(ShadowStrategy::RootsByPcid);
}

#[test]
fn tables_tagged_with_pcids_follow_the_architecture() {
    run_engine(ShadowStrategy::PcidTagged);
}
