//! The cost of an invalidation with nothing beside it.

use std::time::Instant;

use slat::baselines::Locking;

use super::arena::Memory;
use super::host;
use super::timing::{median, quantile};
use super::world::{self, GIB};

struct Line {
    name: &'static str,
    /// Pages that one call invalidates, and all calls.
    nr_pages: u64,
    nr_pages_in_all: u64,
}

const LINES: [Line; 3] = [
    // So few that the last call leaves the page-table pages linked: it does not cover them.
    Line { name: "1 page", nr_pages: 1, nr_pages_in_all: 1 << 13 },
    Line { name: "2 MiB", nr_pages: 512, nr_pages_in_all: 1 << 15 },
    Line { name: "1 GiB", nr_pages: GIB, nr_pages_in_all: GIB },
];

/// Nanoseconds of a call, first with all pages mapped by leaves of 4 KiB, then with none.
fn measure(memory: Memory, line: &Line) -> [f64; 2] {
    memory.reset();
    let vm = world::new_vm(memory, Locking::None, GIB);
    let mut vcpu = vm.create_vcpu().unwrap();
    (0..line.nr_pages_in_all).for_each(|page| host::write_fault(&mut vcpu, page));
    [(); 2].map(|()| {
        let begin = Instant::now();
        for first in (0..line.nr_pages_in_all).step_by(line.nr_pages as usize) {
            drop(world::invalidate(&vm, first, line.nr_pages));
        }
        begin.elapsed().as_nanos() as f64 / (line.nr_pages_in_all / line.nr_pages) as f64
    })
}

pub(crate) fn table(memory: Memory, nr_repetitions: usize) {
    println!(
        "\n{:<44} {:>12} {:>12} {:>12} {:>12}",
        format!("Invalidation ({nr_repetitions} repetitions)"),
        "call p50, ns",
        "best",
        "worst",
        "page p50, ns"
    );
    let mut samples = LINES.each_ref().map(|_| [const { Vec::new() }; 2]);
    for _ in 0..nr_repetitions {
        for (line, samples) in LINES.iter().zip(&mut samples) {
            let took = measure(memory, line);
            samples.iter_mut().zip(took).for_each(|(samples, took)| samples.push(took));
        }
    }
    for (line, samples) in LINES.iter().zip(&samples) {
        for (contents, calls) in ["leaves of 4 KiB", "empty"].iter().zip(samples) {
            println!(
                "{:<44} {:>12.0} {:>12.0} {:>12.0} {:>12.2}",
                format!("{}, {contents}", line.name),
                median(calls),
                quantile(calls, 0),
                quantile(calls, 1000),
                median(calls) / line.nr_pages as f64,
            );
        }
    }
}
