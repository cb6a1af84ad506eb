//! The engine's optional locks against std's, around the same short critical section.
//!
//! First a table: medians over interleaved pairs (ours, std, std, ours, ..) and the median of the
//! pairs' ratios. Figures of two separate minutes cannot be compared on a shared machine. Then
//! criterion's usual report. `cargo bench -p slat --bench locks -- table` prints only the table.

#[cfg(not(any(loom, shuttle)))]
#[path = "../tests/support/futex_park.rs"]
mod futex_park;

#[cfg(not(any(loom, shuttle)))]
use slat::baselines::Park;

#[cfg(not(any(loom, shuttle)))]
mod locks {
    use std::hint::black_box;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Barrier, Mutex, RwLock};
    use std::time::{Duration, Instant};
    use std::{env, thread};

    use criterion::{BenchmarkId, Criterion};
    use crossbeam_utils::CachePadded;
    use slat::baselines::Locking;
    use slat::baselines::{Lock, Side};

    use super::futex_park::FutexPark;

    static PARK: FutexPark = FutexPark;

    /// A lock to be measured.
    trait Candidate: Sync {
        fn with(&self, side: Side, critical_section: impl FnOnce());
    }

    impl Candidate for Lock {
        #[inline]
        fn with(&self, side: Side, critical_section: impl FnOnce()) {
            let _guard = self.acquire(&PARK, side);
            critical_section();
        }
    }

    // Padded like the engine's, so that only the locks differ.
    impl Candidate for CachePadded<Mutex<()>> {
        #[inline]
        fn with(&self, _side: Side, critical_section: impl FnOnce()) {
            let _guard = self.lock();
            critical_section();
        }
    }

    impl Candidate for CachePadded<RwLock<()>> {
        #[inline]
        fn with(&self, side: Side, critical_section: impl FnOnce()) {
            match side {
                Side::Read => {
                    let _guard = self.read();
                    critical_section();
                }
                Side::Write => {
                    let _guard = self.write();
                    critical_section();
                }
            }
        }
    }

    /// About 30 ns of dependent work.
    #[inline]
    fn work(seed: u64) {
        let mut value = seed;
        for _ in 0..45 {
            value = black_box(value.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 1);
        }
    }

    /// The locks of a bench: which of the engine's locks matches which of std's, and how often the
    /// write side is acquired.
    #[derive(Clone, Copy)]
    struct Mix {
        name: &'static str,
        locking: Locking,
        /// Every so many-th critical section is a writer's; `u64::MAX`: none.
        write_every: u64,
    }

    const MIXES: [Mix; 5] = [
        Mix { name: "exclusive", locking: Locking::Exclusive, write_every: 1 },
        Mix { name: "shared, reads", locking: Locking::Shared, write_every: u64::MAX },
        Mix { name: "shared, 1 write in 100", locking: Locking::Shared, write_every: 100 },
        Mix { name: "shared, 1 write in 10", locking: Locking::Shared, write_every: 10 },
        Mix { name: "shared, writes", locking: Locking::Shared, write_every: 1 },
    ];
    const NR_THREADS: [u64; 3] = [1, 2, 64];

    /// Time of `nr_sections` critical sections, spread over `nr_threads` threads.
    fn time(candidate: &impl Candidate, mix: Mix, nr_threads: u64, nr_sections: u64) -> Duration {
        let each = nr_sections.div_ceil(nr_threads);
        let counter = CachePadded::new(AtomicU64::new(0));
        let start = Barrier::new(nr_threads as usize + 1);
        let run = |thread: u64| {
            for turn in 0..each {
                let write = mix.write_every != u64::MAX && (turn + thread).is_multiple_of(mix.write_every);
                let side = if write { Side::Write } else { Side::Read };
                candidate.with(side, || {
                    work(turn);
                    if write {
                        counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                    }
                });
            }
        };
        if nr_threads == 1 {
            let begin = Instant::now();
            run(0);
            return begin.elapsed();
        }
        let mut begin = Instant::now();
        thread::scope(|scope| {
            for thread in 0..nr_threads {
                let (run, start) = (&run, &start);
                scope.spawn(move || {
                    start.wait();
                    run(thread);
                });
            }
            begin = Instant::now();
            start.wait();
        });
        begin.elapsed()
    }

    fn time_ours(mix: Mix, nr_threads: u64, nr_sections: u64) -> Duration {
        time(&Lock::new(mix.locking), mix, nr_threads, nr_sections)
    }

    fn time_std(mix: Mix, nr_threads: u64, nr_sections: u64) -> Duration {
        match mix.locking {
            Locking::Exclusive => time(&CachePadded::new(Mutex::new(())), mix, nr_threads, nr_sections),
            _ => time(&CachePadded::new(RwLock::new(())), mix, nr_threads, nr_sections),
        }
    }

    fn median(values: &mut [f64]) -> f64 {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    }

    /// The table of interleaved pairs.
    fn table(nr_pairs: usize, nr_sections: u64) {
        // "best": of the fastest run of each, which other processes disturbed least.
        println!(
            "{:<24} {:>7} {:>10} {:>10} {:>9} {:>17} {:>9}",
            "lock", "threads", "ours, ns", "std, ns", "ours/std", "quartiles", "best"
        );
        for mix in MIXES {
            for nr_threads in NR_THREADS {
                let (mut ours, mut std, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
                for pair in 0..nr_pairs {
                    let measure_ours = || time_ours(mix, nr_threads, nr_sections).as_secs_f64();
                    let measure_std = || time_std(mix, nr_threads, nr_sections).as_secs_f64();
                    // The order alternates; otherwise the second would always profit from warm
                    // caches.
                    let (a, b) = if pair % 2 == 0 {
                        let a = measure_ours();
                        (a, measure_std())
                    } else {
                        let b = measure_std();
                        (measure_ours(), b)
                    };
                    ours.push(a * 1e9 / nr_sections as f64);
                    std.push(b * 1e9 / nr_sections as f64);
                    ratios.push(a / b);
                }
                let (median_ours, median_std) = (median(&mut ours), median(&mut std));
                let ratio = median(&mut ratios);
                println!(
                    "{:<24} {:>7} {:>10.1} {:>10.1} {:>9.3} {:>8.3} {:>8.3} {:>9.3}",
                    mix.name,
                    nr_threads,
                    median_ours,
                    median_std,
                    ratio,
                    ratios[nr_pairs / 4],
                    ratios[nr_pairs * 3 / 4],
                    ours[0] / std[0],
                );
            }
        }
    }

    fn report(criterion: &mut Criterion) {
        for mix in MIXES {
            let mut group = criterion.benchmark_group(mix.name);
            for nr_threads in NR_THREADS {
                group.bench_with_input(BenchmarkId::new("ours", nr_threads), &nr_threads, |bencher, &nr_threads| {
                    bencher.iter_custom(|nr_sections| time_ours(mix, nr_threads, nr_sections));
                });
                group.bench_with_input(BenchmarkId::new("std", nr_threads), &nr_threads, |bencher, &nr_threads| {
                    bencher.iter_custom(|nr_sections| time_std(mix, nr_threads, nr_sections));
                });
            }
            group.finish();
        }
    }

    pub(super) fn main() {
        let arguments = env::args().skip(1).collect::<Vec<_>>();
        // `cargo test --bench` passes no `--bench`: then it only has to run (`ci/benches.sh`).
        if !arguments.iter().any(|argument| argument == "--bench") {
            table(1, 1_000);
            report(&mut Criterion::default().configure_from_args());
            return;
        }
        table(151, 100_000);
        if arguments.iter().any(|argument| argument == "table") {
            return;
        }
        let mut criterion = Criterion::default()
            .warm_up_time(Duration::from_millis(300))
            .measurement_time(Duration::from_secs(2))
            .sample_size(20)
            .configure_from_args();
        report(&mut criterion);
        criterion.final_summary();
    }
}

fn main() {
    #[cfg(not(any(loom, shuttle)))]
    locks::main();
}
