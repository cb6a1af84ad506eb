//! The cost of a prefault: `pre_fault_memory` of ranges by one thread and by two, on a minimal
//! host. And the time that fault-around saves a guest that reads through resident memory.
//!
//! Each measurement has a fresh VM with one memslot. Page-table pages come from an arena that was
//! touched beforehand; the figures contain their allocation. Two threads map a half each, and the
//! time ends when both have finished. Rounds of all cells take turns, and `speed` is the time of
//! one thread over the time of two of the same round. The CPU time of a virtual machine varies:
//! compare the quartiles too.
//!
//! `cargo bench -p slat --bench prefault -- table` prints it, `-- table 31` with 31 rounds, `--
//! table 31 4K` the lines with this in their names.
//!
//! `-- count '4K-contiguous Read'` runs the line of that name once and prints the number of leaves,
//! for tools that count instructions: `valgrind --tool=callgrind
//! --toggle-collect='*pre_fault_part*'`.

#[cfg(not(any(loom, shuttle)))]
#[path = "fault/arena.rs"]
mod arena;
#[cfg(not(any(loom, shuttle)))]
#[path = "prefault/around.rs"]
mod around;
#[cfg(not(any(loom, shuttle)))]
#[path = "fault/bench_host.rs"]
mod bench_host;
#[cfg(not(any(loom, shuttle)))]
#[path = "prefault/cells.rs"]
mod cells;
#[cfg(not(any(loom, shuttle)))]
#[path = "fault/cpus.rs"]
mod cpus;
#[cfg(not(any(loom, shuttle)))]
#[path = "../tests/support/futex_park.rs"]
mod futex_park;
#[cfg(not(any(loom, shuttle)))]
#[path = "../tests/support/membarrier.rs"]
mod membarrier;

#[cfg(not(any(loom, shuttle)))]
use slat::baselines::Park;

#[cfg(not(any(loom, shuttle)))]
mod prefault {
    use super::arena::Memory;
    use super::around;
    use super::cells::{self, CELLS, Cell};

    const DEFAULT_ROUNDS: usize = 15;

    pub(super) fn quartile(values: &[f64], quarter: usize) -> f64 {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted[(sorted.len() - 1) * quarter / 4]
    }

    fn print(cell: &Cell, one_ns: &[f64], two_ns: &[f64]) {
        let speeds: Vec<f64> = one_ns.iter().zip(two_ns).map(|(&one, &two)| one / two).collect();
        println!(
            "{:<44} {:>7.2} {:>7.2} {:>7.2} {:>7.2} {:>6.2} {:>6.2} {:>6.2}",
            cell.name(),
            quartile(one_ns, 1),
            quartile(one_ns, 2),
            quartile(one_ns, 3),
            quartile(two_ns, 2),
            quartile(&speeds, 1),
            quartile(&speeds, 2),
            quartile(&speeds, 3),
        );
    }

    pub(super) fn main() {
        let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
        let memory = || Memory::new(cells::MAX_TABLES);
        match arguments.first().map(String::as_str) {
            Some("count") => {
                let name = arguments.get(1).expect("the name of a line");
                let cell = CELLS.iter().find(|cell| cell.name() == *name).expect("a line of this name");
                cell.measure(memory(), 1);
                println!("{}", cell.nr_leaves());
            }
            Some("table") => {
                let nr_rounds =
                    arguments.get(1).map_or(DEFAULT_ROUNDS, |count| count.parse().expect("a number of rounds"));
                let part = arguments.get(2).map_or("", String::as_str);
                table(memory(), nr_rounds, part);
                around::table(memory(), nr_rounds, part);
            }
            // It only has to run (`ci/benches.sh`).
            _ => {
                table(memory(), 1, "");
                around::table(memory(), 1, "");
            }
        }
    }

    fn table(memory: Memory, nr_rounds: usize, part: &str) {
        let chosen: Vec<&Cell> = CELLS.iter().filter(|cell| cell.name().contains(part)).collect();
        let mut times = vec![(Vec::new(), Vec::new()); chosen.len()];
        for round in 0..nr_rounds {
            for (cell, (one_ns, two_ns)) in chosen.iter().zip(&mut times) {
                for turn in 0..2 {
                    match (round + turn) % 2 {
                        0 => one_ns.push(cell.measure(memory, 1)),
                        _ => two_ns.push(cell.measure(memory, 2)),
                    }
                }
            }
        }
        if chosen.is_empty() {
            return;
        }
        println!("pre_fault_memory: ns a leaf, {nr_rounds} rounds; one thread and speed: quartiles, two: median.");
        println!("{:<44} {:>23} {:>7} {:>20}", "leaves", "one", "two", "speed");
        for (cell, (one_ns, two_ns)) in chosen.iter().zip(&times) {
            print(cell, one_ns, two_ns);
        }
    }
}

fn main() {
    #[cfg(not(any(loom, shuttle)))]
    prefault::main();
}
