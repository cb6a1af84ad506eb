//! One fault on memory that exists already, with each locking, and beside the same engine behind
//! std's locks. (Beside a published Rust crate: `slat-peers --only fault`.)
//!
//! Each measurement has a fresh VM and its own threads, which are started beforehand, pinned where
//! there are CPUs enough, and released at the same time. It takes the time from the first fault to
//! the last. All faults are writes. Memory for page tables is touched beforehand, and resolving a
//! page is an addition.
//!
//! First criterion's report, then a table of medians over interleaved repetitions, because figures
//! of two separate minutes cannot be compared on a shared machine; ratios are taken within each
//! repetition. `cargo bench -p slat --bench fault_path -- table` prints only the table, `-- table
//! 101` with so many repetitions, `-- table 101 lock` the lines with this in their names.

#[cfg(not(any(loom, shuttle)))]
#[path = "fault/arena.rs"]
mod arena;
#[cfg(not(any(loom, shuttle)))]
#[path = "fault/bench_host.rs"]
mod bench_host;
#[cfg(not(any(loom, shuttle)))]
#[path = "fault/cpus.rs"]
mod cpus;
#[cfg(not(any(loom, shuttle)))]
#[path = "../tests/support/futex_park.rs"]
mod futex_park;
#[cfg(not(any(loom, shuttle)))]
#[path = "fault/host.rs"]
mod host;
#[cfg(not(any(loom, shuttle)))]
#[path = "../tests/support/membarrier.rs"]
mod membarrier;
#[cfg(not(any(loom, shuttle)))]
#[path = "fault/report.rs"]
mod report;
#[cfg(not(any(loom, shuttle)))]
#[path = "fault/run.rs"]
mod run;
#[cfg(not(any(loom, shuttle)))]
#[path = "fault/subjects.rs"]
mod subjects;

#[cfg(not(any(loom, shuttle)))]
use slat::baselines::Park;

fn main() {
    #[cfg(not(any(loom, shuttle)))]
    report::main();
}
