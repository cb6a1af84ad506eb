//! Work beside other work: faults beside invalidations and beside changes of flags, invalidations
//! beside a storm of faults; and the cost of an invalidation.
//!
//! 1. *Faults beside*: one vCPU writes to 4 GiB page by page, as in `fault_path`, while another
//!    thread repeats its work elsewhere. It invalidates 1 GiB (empty, or with leaves that it faults
//!    in again each time), or changes the flags of another memslot. In the control the same thread
//!    does the same work on another VM. So CPUs, caches and scheduler are loaded alike, and the
//!    difference is the effect within one VM. The two runs of a pair follow each other, in changing
//!    order; the ratio is taken within the pair. For both, the table shows how often the work was
//!    done, and flushed. `ratio` compares faults per second, `CPU ratio` faults per second of the
//!    vCPU's CPU time, which does not fall when other processes use the CPU. `retries` are those of
//!    the VM of the vCPU in all runs: the ranges are apart, so each is a defect.
//! 2. *Flips*: the time of one call that turns dirty logging on or off, or of the deletion and
//!    creation that make a memslot read-only in KVM's way; and back. Before each flip all pages of
//!    the memslot are mapped writable ("written"), or none is ("empty"). A vCPU works in another
//!    memslot meanwhile. In a published measurement such a flip took 720 µs in KVM 6.8 with 4
//!    vCPUs, whose other work ran 2.2 to 9.1 times slower during flips (to read-only and back is 4
//!    ioctls there).
//! 3. *Storm*: 64 vCPUs on all CPUs write to memory, and each invalidates its own when it has
//!    written all. One more thread of the same priority invalidates single pages of theirs. The
//!    time of its calls contains the scheduler's waits for a CPU, so CPU time and run delay
//!    (`/proc/thread-self/schedstat`) are shown with it. The rest was spent asleep. An engine
//!    without invalidation sequence numbers has to wait there for open guards, which takes 360 to
//!    520 ms in the mean.
//! 4. *Cost*: an invalidation with nothing beside it.
//! 5. *Slots*: a change of one memslot, and a fault on a random page, with few and with many
//!    memslots.
//! 6. *Held*: a fault while few or many single pages elsewhere are in flight.
//!
//! The host's flush does nothing: the times of a call exclude its flush. In lines with "IPI", the
//! thread makes a barrier on all CPUs after each invalidation, before it ends it: about the effect
//! of a flush on the other CPUs.
//!
//! `cargo bench -p slat --bench beside -- table` prints all of it, `-- table 31` with 31 pairs, `--
//! table 31 storm` the parts with this in their names (faults, flips, storm, cost, slots, held).
//! Two CPUs are few for this, and the CPU time of a virtual machine varies: compare the quartiles
//! too, and several runs.

#[cfg(not(any(loom, shuttle)))]
#[path = "fault/arena.rs"]
mod arena;
#[cfg(not(any(loom, shuttle)))]
#[path = "fault/bench_host.rs"]
mod bench_host;
#[cfg(not(any(loom, shuttle)))]
#[path = "beside/cost.rs"]
mod cost;
#[cfg(not(any(loom, shuttle)))]
#[path = "fault/cpus.rs"]
mod cpus;
#[cfg(not(any(loom, shuttle)))]
#[path = "beside/faults.rs"]
mod faults;
#[cfg(not(any(loom, shuttle)))]
#[path = "beside/flips.rs"]
mod flips;
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
#[path = "beside/slots.rs"]
mod slots;
#[cfg(not(any(loom, shuttle)))]
#[path = "beside/storm.rs"]
mod storm;
#[cfg(not(any(loom, shuttle)))]
#[path = "beside/timing.rs"]
mod timing;
#[cfg(not(any(loom, shuttle)))]
#[path = "beside/world.rs"]
mod world;

#[cfg(not(any(loom, shuttle)))]
use slat::baselines::Park;

#[cfg(not(any(loom, shuttle)))]
mod table {
    use std::env;

    use super::arena::Memory;
    use super::{cost, cpus, faults, flips, slots, storm};

    /// For the page tables of two VMs with 5 GiB each, and for as many again that wait to be freed.
    const NR_TABLES: usize = 8192;
    const DEFAULT_PAIRS: usize = 31;

    pub(super) fn main() {
        let arguments: Vec<String> = env::args().skip(1).collect();
        let memory = Memory::new(NR_TABLES);
        // `cargo test --bench` passes no `--bench`: then it only has to run (`ci/benches.sh`).
        let is_test = !arguments.iter().any(|argument| argument == "--bench");
        let options = arguments.iter().filter(|argument| !argument.starts_with("--") && *argument != "table");
        let (numbers, names): (Vec<&String>, Vec<&String>) =
            options.partition(|option| option.parse::<usize>().is_ok());
        let (nr_pairs, divisor) = match numbers.first() {
            _ if is_test => (1, 64),
            Some(number) => (number.parse().expect("a number of pairs"), 1),
            None => (DEFAULT_PAIRS, 1),
        };
        let is_asked =
            |part: &str| is_test || names.is_empty() || names.iter().any(|name| part.contains(name.as_str()));
        println!("{} CPUs.", cpus::cpus().len());
        if is_asked("faults") {
            faults::table(memory, nr_pairs, divisor);
        }
        if is_asked("flips") {
            flips::table(memory, nr_pairs, divisor);
        }
        if is_asked("storm") {
            storm::table(memory, divisor);
        }
        if is_asked("cost") {
            cost::table(memory, nr_pairs);
        }
        if is_asked("slots") {
            slots::table(memory, nr_pairs, divisor);
        }
        if is_asked("held") {
            slots::held(memory, nr_pairs, divisor);
        }
    }
}

fn main() {
    #[cfg(not(any(loom, shuttle)))]
    table::main();
}
