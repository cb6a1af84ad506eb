//! The cost of a recovery by itself: leaves of 4 KiB, all mapped, become leaves of 2 MiB.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use slat::{Config, PageSize};

use super::arena::Memory;
use super::bench_host::BenchHost;
use super::splits::{Took, on_threads};
use super::timing::{median, quantile};
use super::world::{self, BLOCK, Backing, GIB};

/// Memory that is recovered.
const NR_GIB: u64 = 4;

/// The result of one recovery.
struct Sample {
    took: Took,
    nr_flushes: u64,
    /// The most that a thread needed. A call leaves the rest while too many page-table pages wait
    /// to be freed, as after another thread lost its CPU while it was freeing them.
    nr_calls: u64,
}

/// One recovery by `nr_threads`, each its part.
fn measure(memory: Memory, nr_pages: u64, nr_threads: u64) -> Sample {
    memory.reset();
    let backing = Backing::Whole(PageSize::Size2M);
    let vm = world::new_vm(BenchHost::new(memory), Config::default(), nr_pages, backing);
    world::map_huge(&vm, nr_pages, backing);
    vm.split_range(world::range(0, nr_pages), PageSize::Size4K).unwrap();
    let part_pages = nr_pages / nr_threads;
    let nr_calls = AtomicU64::new(0);
    let took = on_threads(nr_threads as usize, |thread| {
        let part = world::range(thread as u64 * part_pages, part_pages);
        let (mut nr_recovered, mut calls) = (0, 0);
        while nr_recovered < part_pages / BLOCK {
            if calls > 0 {
                thread::yield_now();
            }
            nr_recovered += vm.recover_range(part).unwrap();
            calls += 1;
        }
        nr_calls.fetch_max(calls, Ordering::Relaxed);
    });
    let stats = vm.stats();
    assert_eq!((stats.pages_4k(), stats.pages_2m(), stats.zapped), (0, nr_pages / BLOCK, 0));
    Sample { took, nr_flushes: stats.flushes, nr_calls: nr_calls.into_inner() }
}

pub(crate) fn table(memory: Memory, nr_repetitions: usize, divisor: u64) {
    let nr_pages = (NR_GIB / divisor).max(2) * GIB;
    let mut samples: [Vec<Sample>; 2] = [const { Vec::new() }; 2];
    for repetition in 0..=nr_repetitions {
        for turn in 0..2 {
            let index = (repetition + turn) % 2;
            let sample = measure(memory, nr_pages, index as u64 + 1);
            if repetition > 0 {
                samples[index].push(sample);
            }
        }
    }
    println!(
        "\n{:<44} {:>9} {:>9} {:>9} {:>9} {:>16} {:>11}",
        format!("Recovery, µs for each 2M ({nr_repetitions} rounds)"),
        "p50",
        "best",
        "worst",
        "CPU p50",
        "flushes/512 MiB",
        "calls, most"
    );
    let us = |index: usize, of: fn(&Took) -> f64| -> Vec<f64> {
        samples[index].iter().map(|sample| of(&sample.took) / (nr_pages / BLOCK) as f64 / 1e3).collect()
    };
    for (index, threads) in ["one thread", "two threads"].into_iter().enumerate() {
        let (wall, cpu) = (us(index, |took| took.wall_ns), us(index, |took| took.cpu_ns));
        let most = |of: fn(&Sample) -> u64| samples[index].iter().map(of).max().unwrap();
        println!(
            "{:<44} {:>9.3} {:>9.3} {:>9.3} {:>9.3} {:>16.2} {:>11}",
            format!("{} GiB of 4K, {threads}", nr_pages / GIB),
            median(&wall),
            quantile(&wall, 0),
            quantile(&wall, 1000),
            median(&cpu),
            most(|sample| sample.nr_flushes) as f64 / (nr_pages / (GIB / 2)) as f64,
            most(|sample| sample.nr_calls)
        );
    }
    let speeds = |of| -> Vec<f64> { us(0, of).iter().zip(us(1, of)).map(|(one, two)| one / two).collect() };
    println!(
        "two threads: {:.2} times as fast as one, by CPU time {:.2}",
        median(&speeds(|took| took.wall_ns)),
        median(&speeds(|took| took.cpu_ns))
    );
}
