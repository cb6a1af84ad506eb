//! Runs programs, and shortens those that fail.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use super::ops::{Op, ops};
use super::program::{Figures, Program, Setup};
use super::quiet::Quiet;
use super::subject::Subject;

/// The step at which a program fails, if it does.
pub fn first_failure<S: Subject>(setup: Setup, nr_ops: usize, make: &dyn Fn() -> S) -> Option<usize> {
    let mut done = 0;
    let failed =
        catch_unwind(AssertUnwindSafe(|| Program::new(make(), setup).run(&ops(setup.seed, nr_ops), &mut done)));
    failed.is_err().then_some(done)
}

/// Runs a program. If it fails, finds a shorter one that fails, runs that again and prints its
/// steps.
pub fn check<S: Subject>(setup: Setup, nr_ops: usize, make: &dyn Fn() -> S, end: &dyn Fn(Program<S>)) -> Figures {
    let all = ops(setup.seed, nr_ops);
    let mut done = 0;
    let attempt = |ops: &[Op], done: &mut usize, traces: bool| {
        catch_unwind(AssertUnwindSafe(|| {
            let mut program = Program::new(make(), setup);
            program.traces = traces;
            program.run(ops, done);
            let figures = Figures { stale: program.oracle.nr_stale, ..program.figures };
            end(program);
            figures
        }))
    };
    let failure = match attempt(&all, &mut done, false) {
        Ok(figures) => return figures,
        Err(failure) => failure,
    };
    println!("seed {:#x} failed at step {done}: {setup:?}", setup.seed);
    // Silent from here on, until the last run.
    let quiet = Quiet::new();
    let mut shortest = all[..(done + 1).min(all.len())].to_vec();
    let started = Instant::now();
    let is_in_time = || started.elapsed().as_secs() < 20;
    let mut part = shortest.len() / 2;
    while part > 0 && is_in_time() {
        let mut start = 0;
        while start < shortest.len() && is_in_time() {
            let without: Vec<Op> =
                shortest[..start].iter().chain(&shortest[(start + part).min(shortest.len())..]).copied().collect();
            let mut done = 0;
            if attempt(&without, &mut done, false).is_err() {
                shortest = without[..(done + 1).min(without.len())].to_vec();
            } else {
                start += part;
            }
        }
        part /= 2;
    }
    drop(quiet);
    println!("seed {:#x} fails with {} of {nr_ops} operations:", setup.seed, shortest.len());
    let _ = attempt(&shortest, &mut 0, true);
    std::panic::resume_unwind(failure)
}
