//! The engine under walkers that were not written here: a guest accesses memory at random on each
//! CPU, and after each of its stretches the CPU does an operation of the engine to that memory,
//! while the other CPUs are in the guest.
//!
//! # What is checked
//! - Each access, by the guest ([`guest`]): no stale translation, no lost write.
//! - Frames that were taken from the guest keep their poison ([`ram`](crate::ram)).
//! - At checkpoints, when all CPUs are outside of the guest: a copy that the dirty log alone keeps
//!   up equals the memory; then the guest makes planned accesses from empty tables. What is mapped,
//!   A and D (where CPUs set them) and the dirty log have exactly these (`round`).
//! - Twice in a checkpoint, if a walker outside of the machine reads the page tables: it finds what
//!   the engine's queries do (`tables`).
//! - Frames and page-table pages are on the NUMA nodes that they were asked from (`round`), also by
//!   what that walker knows of the nodes.
//! - No CPU has entered with translations that a flush should have dropped
//!   ([`Cpus::check`](crate::cpus::Cpus::check)).

pub mod guest;
mod probed;
mod round;
mod stretch;
mod tables;

use alloc::sync::Arc;

use slat::dirty::{DirtyTracking, HugePageLogging, ManualProtect};
use slat::format::Format;
use slat::tables::{AccessTracking, FaultAround, TablePlacement};
use slat::{Config, NodeId};
use spin::Mutex;

use crate::barrier::Barrier;
use crate::console::{self, Verdict};
use crate::memory::MEMORY;
use crate::options::Options;
use crate::say;
use crate::virtual_cpu::VirtualCpu;
use round::Round;

/// A way to run the engine. Each gets an equal share of the operations.
struct Way {
    name: &'static str,
    dirty_tracking: DirtyTracking,
    access_tracking: AccessTracking,
    huge_page_logging: HugePageLogging,
    manual_protect: ManualProtect,
    fault_around: FaultAround,
    table_placement: TablePlacement,
}

const WAYS: [Way; 5] = [
    Way {
        name: "lazily write-protected directory entries",
        dirty_tracking: DirtyTracking::WriteProtect,
        access_tracking: AccessTracking::AccessedBit,
        huge_page_logging: HugePageLogging::Split,
        manual_protect: ManualProtect::Disabled,
        fault_around: FaultAround::Off,
        table_placement: TablePlacement::HugePageNode,
    },
    Way {
        name: "write-protected leaves",
        dirty_tracking: DirtyTracking::WriteProtectLeaves,
        access_tracking: AccessTracking::Faults,
        huge_page_logging: HugePageLogging::SplitLazily,
        manual_protect: ManualProtect::Enabled,
        fault_around: FaultAround::Off,
        table_placement: TablePlacement::CallerNode,
    },
    Way {
        name: "dirty bits",
        dirty_tracking: DirtyTracking::DirtyBit,
        access_tracking: AccessTracking::AccessedBit,
        huge_page_logging: HugePageLogging::Split,
        manual_protect: ManualProtect::Disabled,
        fault_around: FaultAround::Off,
        table_placement: TablePlacement::Node(NodeId(1)),
    },
    Way {
        name: "lazily, with fault-around",
        dirty_tracking: DirtyTracking::WriteProtect,
        access_tracking: AccessTracking::AccessedBit,
        huge_page_logging: HugePageLogging::Split,
        manual_protect: ManualProtect::InitiallySet,
        fault_around: FaultAround::Pages(16),
        table_placement: TablePlacement::CallerPolicy,
    },
    Way {
        name: "the CPU's log of modifications",
        dirty_tracking: DirtyTracking::PageModificationLog,
        access_tracking: AccessTracking::AccessedBit,
        huge_page_logging: HugePageLogging::Split,
        manual_protect: ManualProtect::Enabled,
        fault_around: FaultAround::Off,
        table_placement: TablePlacement::HugePageNode,
    },
];

impl Way {
    /// Whether CPUs of this kind can do it.
    fn is_possible<V: VirtualCpu>(&self) -> bool {
        match self.dirty_tracking {
            DirtyTracking::PageModificationLog => V::has_modification_log(),
            DirtyTracking::DirtyBit => V::Format::HAS_DIRTY_BIT,
            _ => true,
        }
    }

    fn config<V: VirtualCpu>(&self) -> Config {
        let mut config = Config::default().with_hardware(V::hardware());
        config.dirty_tracking = self.dirty_tracking;
        config.access_tracking = self.access_tracking;
        config.huge_page_logging = self.huge_page_logging;
        config.manual_protect = self.manual_protect;
        config.fault_around = self.fault_around;
        config.table_placement = self.table_placement;
        config
    }
}

/// What was done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Done {
    /// Operations of the engine.
    pub nr_operations: u64,
    /// Accesses of the guest.
    pub nr_accesses: u64,
}

/// A suite on CPUs of any kind.
pub trait Rounds: Send + Sync {
    /// The part of CPU `cpu`. All CPUs of the run call it. What was done is with CPU 0.
    fn run(&self, cpu: usize) -> Done;
}

/// Which part of the run a suite is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// How its CPUs run the guest. Empty where there is one part.
    pub name: &'static str,
    /// Its number, from 0 on.
    pub number: u64,
    /// How many there are.
    pub of: u64,
}

/// The rounds on one kind of CPUs.
pub struct Suite<V: VirtualCpu> {
    options: Options,
    part: Part,
    barrier: Barrier,
    /// The round that all CPUs are in.
    round: Mutex<Option<Arc<Round<V>>>>,
}

impl<V: VirtualCpu> Suite<V> {
    /// A part of a run as `options` say. Each part has an equal share of the operations.
    pub fn new(options: Options, part: Part) -> Suite<V> {
        let options = Options { nr_operations: options.nr_operations.div_ceil(part.of), ..options };
        Suite { options, part, barrier: Barrier::new(options.nr_cpus), round: Mutex::new(None) }
    }
}

impl<V: VirtualCpu> Rounds for Suite<V> {
    fn run(&self, cpu: usize) -> Done {
        let mut done = Done::default();
        let ways = || WAYS.iter().filter(|way| way.is_possible::<V>());
        let nr_ways = ways().count() as u64;
        let share = self.options.nr_operations.div_ceil(nr_ways * self.options.nr_cpus as u64).max(1);
        for (number, way) in (0..).zip(ways()) {
            if cpu == 0 {
                let Part { name, number: part, of } = self.part;
                say!("{name}{}", way.name);
                console::progress(part * nr_ways + number, of * nr_ways, way.name);
                let number = part << 8 | number;
                *self.round.lock() = Some(Arc::new(Round::new(&self.options, way.config::<V>(), number)));
            }
            self.barrier.wait();
            let round = self.round.lock().clone();
            if let Some(round) = round {
                round.run(cpu, share, &self.barrier);
                self.barrier.wait();
                if cpu == 0 {
                    done.nr_operations += round.nr_operations();
                    done.nr_accesses += round.nr_accesses();
                    *self.round.lock() = None;
                    // Other CPUs may still have theirs: the VM is dropped before the barrier below.
                    round.report();
                }
            }
            self.barrier.wait();
        }
        done
    }
}

/// Ends the machine, after all parts of the run.
pub fn finish(done: Done) -> ! {
    let Done { nr_operations, nr_accesses } = done;
    console::figure("operations", nr_operations, "1");
    console::figure("accesses", nr_accesses, "1");
    console::figure("nodes", MEMORY.nodes().nr() as u64, "1");
    console::figures();
    console::end(
        Verdict::Pass,
        format_args!("{nr_operations} operations beside {nr_accesses} accesses of the guest, none wrong"),
    )
}
