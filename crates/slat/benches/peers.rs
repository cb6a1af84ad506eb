//! The single operations on the tables beside those of the published Rust crates that keep tables of this kind: map,
//! query, protect, unmap, split, on one thread and on two.
//!
//! slat serves each call beside all others. The peers take `&mut self`: on one thread they are called without a lock, on
//! two inside a `std::sync::Mutex`, taken once for each call of the engine that theirs stands beside. All get the same
//! arena for tables and the same frames for guest pages, none flushes a TLB, and after each measurement the tables are
//! read back and counted.
//!
//! Medians of interleaved repetitions of one run: figures of two separate minutes cannot be compared on a machine with
//! other users. `cargo bench -p slat --bench peers -- table` prints the tables, `-- table 101` with so many repetitions,
//! `-- table 101 query` of the operations that have this in their names.

#[cfg(not(any(loom, shuttle)))]
#[path = "peers/aarch64.rs"]
mod aarch64;
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
#[path = "peers/engine.rs"]
mod engine;
#[cfg(not(any(loom, shuttle)))]
#[path = "../tests/support/futex_park.rs"]
mod futex_park;
#[cfg(not(any(loom, shuttle)))]
#[path = "peers/generic.rs"]
mod generic;
#[cfg(not(any(loom, shuttle)))]
#[path = "../tests/support/membarrier.rs"]
mod membarrier;
#[cfg(not(any(loom, shuttle)))]
#[path = "peers/multiarch.rs"]
mod multiarch;
#[cfg(not(any(loom, shuttle)))]
#[path = "peers/operation.rs"]
mod operation;
#[cfg(not(any(loom, shuttle)))]
#[path = "peers/report.rs"]
mod report;
#[cfg(not(any(loom, shuttle)))]
#[path = "fault/run.rs"]
#[expect(dead_code, reason = "the shapes of the fault benches are theirs")]
mod run;
#[cfg(not(any(loom, shuttle)))]
#[path = "peers/x86.rs"]
mod x86;

#[cfg(not(any(loom, shuttle)))]
use slat::Park;

fn main() {
    #[cfg(not(any(loom, shuttle)))]
    report::main();
}
