//! The nodes of a machine's virtual CPUs and memory, and which CPU touches the memory first.
//!
//! Virtual CPUs are spread over the nodes in blocks, and each has its part of the region on its own
//! node. The memory of the guest's page tables is on the first one's node. The engine's page-table
//! pages are placed by its configuration ([`TablePlacement`]), which depends on the CPU that takes
//! the fault: hence [`Machine::populate`].

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use rand::SeedableRng;
use rand::rngs::SmallRng;
use slat::shadow::Gva;
use slat::tables::TablePlacement;
use slat::{Gfn, Host, Hpa, NodeId};

use super::worker::{Parts, Repeat, Seat, VcpuJob, Worker};
use super::{Hardware, Machine, MachineConfig, MachineError, REGION_GPA, RunReport, TABLES_GPA, answers, report};
use crate::hardware::walk::HardwareFormat;
use crate::memory::Backing;
use crate::memory::numa::policy::Strictness;
use crate::memory::numa::spans::{MemorySpan, divide};
use crate::memory::numa::{FirstTouch, NodeMap, NumaError, Pinning, ReadCounts, WalkReads};
use crate::memory::phys;
use crate::vm::guest::{GuestCpu, Ledger, Program};

/// The nodes of a machine and of its virtual CPUs.
#[derive(Debug)]
pub(super) struct Seats {
    nodes: Arc<NodeMap>,
    /// For each virtual CPU the place of its home.
    homes: Box<[usize]>,
    /// And its last place.
    taken: Arc<[AtomicUsize]>,
    /// The reads of each CPU's walks; the last is for the thread that populates.
    counts: Box<[Arc<ReadCounts>]>,
    /// For each part of the region the virtual CPU of another node that may touch it first; empty
    /// if all have the same home.
    others: Box<[usize]>,
}

impl Seats {
    pub(super) fn new(config: &MachineConfig, nodes: NodeMap) -> Result<Seats, MachineError> {
        if let TablePlacement::Node(node) = config.engine.table_placement
            && nodes.place_of(node).is_none()
        {
            return Err(NumaError::NoSuchNode { node }.into());
        }
        let homes = nodes.homes(config.nr_vcpus, config.pins.as_ref().map(|pins| pins.vcpus.as_slice()));
        Ok(Seats {
            nodes: Arc::new(nodes),
            taken: homes.iter().map(|&home| AtomicUsize::new(home)).collect(),
            counts: (0..=config.nr_vcpus).map(|_| Arc::default()).collect(),
            others: others(&homes),
            homes,
        })
    }

    pub(super) fn nodes(&self) -> &Arc<NodeMap> {
        &self.nodes
    }

    /// The reads of the walks of virtual CPU `vcpu`; behind the last, of the thread that populates.
    pub(super) fn counts(&self, vcpu: usize) -> &Arc<ReadCounts> {
        &self.counts[vcpu]
    }

    /// The seat of virtual CPU `vcpu`.
    pub(super) fn of(&self, vcpu: usize, config: &MachineConfig) -> Seat {
        let rng = match config.pinning {
            Pinning::On => None,
            Pinning::Off { seed } => Some(SmallRng::seed_from_u64(seed.wrapping_add(vcpu as u64))),
        };
        let is_mine = |part: &u64| self.others.get(*part as usize) == Some(&vcpu);
        Seat {
            pin: config.pins.as_ref().map(|pins| pins.vcpus[vcpu]),
            nodes: Arc::clone(&self.nodes),
            home: self.homes[vcpu],
            rng,
            taken: Arc::clone(&self.taken),
            parts_of_others: (0..self.homes.len() as u64).filter(is_mine).collect(),
        }
    }

    /// Places the region's memory, and that of the guest's page tables, on their nodes. Returns
    /// where they are.
    pub(super) fn place(&self, region: &Backing, tables: Option<&Backing>) -> Result<Vec<MemorySpan>, NumaError> {
        if self.nodes.is_one() {
            return Ok(Vec::new());
        }
        let mut spans = self.spans(region, &self.homes);
        let mut needed_bytes = vec![0; self.nodes.nr_nodes()];
        for span in &spans {
            needed_bytes[span.2] += span.1;
        }
        self.nodes.check_free(&needed_bytes, region.kind().page_size().size_bytes())?;
        // Little, and never in huge pages.
        spans.extend(tables.into_iter().flat_map(|tables| self.spans(tables, &self.homes[..1])));
        let placed = |(start, size_bytes, place): (*mut u8, u64, usize)| {
            self.nodes.place_memory(start, size_bytes, place, Strictness::Bind)?;
            let start = phys::hpa_of(start.cast_const());
            Ok(MemorySpan { start, end: Hpa(start.0 + size_bytes), node: self.nodes.ids()[place] })
        };
        spans.into_iter().map(placed).collect()
    }

    /// Divides `memory` equally among virtual CPUs with the homes `homes`: start, size in bytes,
    /// place.
    fn spans(&self, memory: &Backing, homes: &[usize]) -> Vec<(*mut u8, u64, usize)> {
        let places: Vec<usize> = homes.iter().map(|&home| self.nodes.memory_place(home)).collect();
        let frames = memory.frames();
        divide(&places, frames.size_bytes(), memory.kind().largest_page_bytes())
            .into_iter()
            .map(|(first, end, place)| (frames.at(first), end - first, place))
            .collect()
    }
}

/// For each virtual CPU one whose home is the next node that has any; the virtual CPUs of a node
/// share the work. Empty if there is no other.
fn others(homes: &[usize]) -> Box<[usize]> {
    let mut blocks: Vec<(usize, Vec<usize>)> = Vec::new();
    for (vcpu, &home) in homes.iter().enumerate() {
        match blocks.iter_mut().find(|block| block.0 == home) {
            Some(block) => block.1.push(vcpu),
            None => blocks.push((home, vec![vcpu])),
        }
    }
    if blocks.len() < 2 {
        return Box::default();
    }
    let mut others = vec![0; homes.len()].into_boxed_slice();
    for (index, (_, vcpus)) in blocks.iter().enumerate() {
        let next = &blocks[(index + 1) % blocks.len()].1;
        for (&vcpu, &other) in vcpus.iter().zip(next.iter().cycle()) {
            others[vcpu] = other;
        }
    }
    others
}

impl<F: HardwareFormat> Machine<F> {
    /// The nodes.
    pub fn nodes(&self) -> &NodeMap {
        &self.seats.nodes
    }

    /// The home of virtual CPU `vcpu`, if there is one: the node of its part of the region, unless
    /// that node has no memory ([`NodeMap::memory_node`]).
    pub fn home_node(&self, vcpu: usize) -> Option<NodeId> {
        Some(self.nodes().ids()[*self.seats.homes.get(vcpu)?])
    }

    /// The node on which virtual CPU `vcpu` was when its last job began; its home, if it stays
    /// there.
    pub fn node_of_vcpu(&self, vcpu: usize) -> Option<NodeId> {
        // Relaxed: a caller may get the node before or after a move.
        Some(self.nodes().ids()[self.seats.taken.get(vcpu)?.load(Ordering::Relaxed)])
    }

    /// The node of page `page` of the test region; `None` if there is no such page, or it has no
    /// frame now.
    pub fn node_of_page(&self, page: u64) -> Option<NodeId> {
        self.region.frame_of(page).map(|frame| self.vm.host().node_of(frame))
    }

    /// Page-table pages that the engine has on each node: linked ones, those that it keeps in
    /// stock, and those that wait to be freed. Exact while no thread allocates or frees.
    pub fn tables_by_node(&self) -> Vec<(NodeId, u64)> {
        self.vm.host().live_tables_by_node()
    }

    /// The reads of the walks of all CPUs since the machine was made; nothing is counted with one
    /// node.
    pub fn walk_reads(&self) -> WalkReads {
        self.seats.counts.iter().fold(WalkReads::default(), |sum, counts| sum + counts.get())
    }

    /// Runs `program` once, as [`run`](Self::run) does, with each part of the region touched first
    /// as `first_touch` says. [`FirstTouch::Main`] is the calling thread: it has a CPU of its own,
    /// without paging except with shadow paging, and touches all parts in their order. The report
    /// then has one entry, for that CPU, and an error names virtual CPU 0.
    ///
    /// # Errors
    /// As for [`run`](Self::run), and [`MachineError::NoOtherNode`].
    pub fn populate(&self, program: Program, first_touch: FirstTouch) -> Result<RunReport, MachineError> {
        match first_touch {
            FirstTouch::Own => self.run(program),
            FirstTouch::Other if self.seats.others.is_empty() => Err(MachineError::NoOtherNode),
            FirstTouch::Other => {
                self.post(program, Repeat::Once, Parts::OfOthers)?;
                report(self.crew.finish())
            }
            FirstTouch::Main => (self.populate_here)(self, program),
        }
    }

    /// Runs `program` on the calling thread, with a CPU of its own.
    pub(super) fn populate_here<K: Hardware<F>>(&self, program: Program) -> Result<RunReport, MachineError> {
        let mut worker = Worker {
            cpu: K::new_cpu(&self.vm, &self.config, self.seats.counts(self.seats.homes.len()))?,
            region: Gva(REGION_GPA.0),
            index: 0,
            nr_vcpus: self.seats.homes.len() as u64,
            pages_per_vcpu: self.config.bytes_per_vcpu >> Gfn::SHIFT,
            seat: None,
            signals: Arc::clone(&self.signals),
            ledger: self.region.pages().map(|pages| (Ledger::new(0, 0), Arc::clone(pages))),
        };
        if self.config.shadow.is_some() {
            worker.turn_paging_on(TABLES_GPA.0).map_err(|error| MachineError::Guest { vcpu: 0, error })?;
        }
        self.post_job(&program, VcpuJob::ForgetPages)?;
        let begin = Instant::now();
        let parts: Vec<u64> = (0..worker.nr_vcpus).collect();
        // The job is collected, whatever the result of this.
        let ran = worker.run(&program, Repeat::Once, &parts);
        let wall = begin.elapsed();
        worker.cpu.exit_guest_mode();
        answers(self.crew.finish())?;
        let vcpu = ran.map_err(|error| MachineError::Guest { vcpu: 0, error })?;
        Ok(RunReport { wall, vcpus: vec![vcpu] })
    }
}
