//! The cost of splitting huge leaves ahead of time and of recovering them, and the effect on a
//! vCPU.
//!
//! 1. *Splits*: all of a VM's memory, one thread and two; page-table pages come from memory that
//!    was touched before. Two threads with a VM each share only that memory and the caches: their
//!    gain is the most that the machine allows. (Beside published Rust crates: `slat-peers --only
//!    split-2m`.)
//! 2. *Recovery*: leaves of 4 KiB, all of them mapped, become leaves of 2 MiB.
//! 3. *Beside*: a vCPU's writes per second while another thread splits or recovers the memory that
//!    it works in, against the same thread working on another VM's memory. The ratio is taken
//!    within pairs of runs, whose order alternates; a run's figure is the median of its passes.
//!    `CPU ratio` is that of writes per second of the vCPU's CPU time, which does not fall when
//!    other processes use the CPU. Stalls are those of single writes, in runs in which each is
//!    timed.
//! 4. *Logging*: the beginning of a log whose pages are all dirty at first, and the first clear of
//!    a part of it.
//! 5. *Zaps*: a memslot of 64 GiB of small leaves is deleted, such a VM dropped, and pages, blocks
//!    and 1 GiB of them are invalidated, with a host that needs reports and with one that does not.
//!
//! `cargo bench -p slat --bench huge_pages -- table` prints the tables, `-- table 31` with 31
//! rounds, `-- table 31 splits` the parts with this in their names. Two CPUs are few for this; on a
//! shared machine compare `best` and CPU time.

#[cfg(not(any(loom, shuttle)))]
#[path = "fault/arena.rs"]
mod arena;
#[cfg(not(any(loom, shuttle)))]
#[path = "fault/bench_host.rs"]
mod bench_host;
#[cfg(not(any(loom, shuttle)))]
#[path = "huge_pages/beside.rs"]
mod beside;
#[cfg(not(any(loom, shuttle)))]
#[path = "fault/cpus.rs"]
mod cpus;
#[cfg(not(any(loom, shuttle)))]
#[path = "../tests/support/futex_park.rs"]
mod futex_park;
#[cfg(not(any(loom, shuttle)))]
#[path = "huge_pages/logging.rs"]
mod logging;
#[cfg(not(any(loom, shuttle)))]
#[path = "../tests/support/membarrier.rs"]
mod membarrier;
#[cfg(not(any(loom, shuttle)))]
#[path = "huge_pages/recovery.rs"]
mod recovery;
#[cfg(not(any(loom, shuttle)))]
#[path = "huge_pages/splits.rs"]
mod splits;
#[cfg(not(any(loom, shuttle)))]
#[path = "beside/timing.rs"]
#[expect(dead_code, reason = "only its quantiles are needed here")]
mod timing;
#[cfg(not(any(loom, shuttle)))]
#[path = "huge_pages/world.rs"]
mod world;
#[cfg(not(any(loom, shuttle)))]
#[path = "huge_pages/zaps.rs"]
mod zaps;

#[cfg(not(any(loom, shuttle)))]
use slat::baselines::Park;

#[cfg(not(any(loom, shuttle)))]
mod table {
    use std::env;

    use super::arena::Memory;
    use super::{beside, cpus, logging, recovery, splits, zaps};

    /// For the page tables of 64 GiB that are split.
    const NR_TABLES: usize = 34 << 10;
    const DEFAULT_ROUNDS: usize = 9;

    pub(super) fn main() {
        let arguments: Vec<String> = env::args().skip(1).collect();
        let memory = Memory::new(NR_TABLES);
        // Without `table` it only has to run (`ci/benches.sh`).
        let is_test = !arguments.iter().any(|argument| argument == "table");
        let options = arguments.iter().filter(|argument| !argument.starts_with("--") && *argument != "table");
        let (numbers, names): (Vec<&String>, Vec<&String>) =
            options.partition(|option| option.parse::<usize>().is_ok());
        let (nr_rounds, divisor) = match numbers.first() {
            _ if is_test => (1, 16),
            Some(number) => (number.parse().expect("a number of rounds"), 1),
            None => (DEFAULT_ROUNDS, 1),
        };
        let is_asked =
            |part: &str| is_test || names.is_empty() || names.iter().any(|name| part.contains(name.as_str()));
        println!("{} CPUs.", cpus::cpus().len());
        if is_asked("splits") {
            splits::table(memory, nr_rounds, divisor);
        }
        if is_asked("recovery") {
            recovery::table(memory, nr_rounds, divisor);
        }
        if is_asked("beside") {
            beside::table(memory, nr_rounds, divisor);
        }
        if is_asked("logging") {
            logging::table(memory, nr_rounds, divisor);
        }
        if is_asked("zaps") {
            zaps::table(memory, nr_rounds, divisor);
        }
    }
}

fn main() {
    #[cfg(not(any(loom, shuttle)))]
    table::main();
}
