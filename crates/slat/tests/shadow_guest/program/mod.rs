//! A random program: the guest accesses, edits its page tables, and flushes or does not. The host
//! moves frames, harvests the dirty log, and deletes memslots.

macro_rules! trace {
    ($program:expr, $($format:tt)*) => {
        if $program.traces {
            println!("  {}", format_args!($($format)*));
        }
    };
}

mod edits;
mod registers;

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use slat::Access;
use slat::shadow::Privilege;

use super::architecture::{End, PagingMode};
use super::entries::{self, Layout, Order};
use super::ops::{Kind, Op};
use super::oracle::Oracle;
use super::random::Random;
use super::stale::Caching;
use super::subject::{By, HostEvent, Observed, Subject, Written};
use super::world::{OTHER_PLACE, SLOTS, World};

/// The parameters of a program's guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Setup {
    pub seed: u64,
    pub nr_cpus: usize,
    pub caching: Caching,
}

/// Counts of what a program has done.
#[derive(Clone, Copy, Default, Debug)]
pub struct Figures {
    /// Accesses, writes, flushes, loads of registers, and actions of the host.
    pub steps: u64,
    /// Accesses that reached memory, and those of them that only something stale explains.
    pub reached: u64,
    pub stale: u64,
    /// Emulated writes of a CPU's own accesses.
    pub emulated: u64,
    /// Page faults of the guest.
    pub faults: u64,
}

impl std::ops::AddAssign for Figures {
    fn add_assign(&mut self, other: Figures) {
        self.steps += other.steps;
        self.reached += other.reached;
        self.stale += other.stale;
        self.emulated += other.emulated;
        self.faults += other.faults;
    }
}

pub struct Program<S> {
    pub subject: S,
    pub oracle: Oracle,
    layout: Layout,
    /// Recently used addresses, and in which mode.
    recent: Vec<(PagingMode, u64)>,
    /// A way to write a guest frame: the CPU, its mode, and the address that led there.
    ways: HashMap<u64, (usize, PagingMode, u64)>,
    /// The place of the last memslot, or its contents while it is deleted.
    last_slot: Result<u64, Vec<u64>>,
    /// Whether steps are printed.
    pub traces: bool,
    pub figures: Figures,
}

/// Stores bytes of one word, as a CPU does.
pub fn store(world: &World, gpa: u64, bytes: &[u8]) {
    let word = world.word(gpa).expect("memory");
    let shift = 8 * (gpa & 7);
    let (mut mask, mut value) = (0, 0);
    for (index, &byte) in bytes.iter().enumerate() {
        mask |= 0xff << (shift + 8 * index as u64);
        value |= u64::from(byte) << (shift + 8 * index as u64);
    }
    let _ = word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |old| Some((old & !mask) | value));
}

impl<S: Subject> Program<S> {
    /// A program with memslots, arbitrary page tables, and CPUs that use them.
    pub fn new(subject: S, setup: Setup) -> Program<S> {
        let mut random = Random::new(setup.seed);
        let layout = Layout::new(&mut random);
        let mut program = Program::with_slots(subject, setup.nr_cpus, setup.caching, layout);
        program.begin(&mut random);
        program
    }

    /// A program with empty memory, whose CPUs do not translate.
    pub fn with_slots(mut subject: S, nr_cpus: usize, caching: Caching, layout: Layout) -> Program<S> {
        (0..SLOTS.len()).for_each(|slot| subject.create_slot(slot, None));
        Program::beside(subject, nr_cpus, caching, layout)
    }

    /// The same for a subject that has its memslots.
    pub fn beside(subject: S, nr_cpus: usize, caching: Caching, layout: Layout) -> Program<S> {
        let mut oracle = Oracle::new(nr_cpus, caching);
        for gfn in SLOTS.iter().flat_map(|&(first_gfn, nr_pages)| first_gfn..first_gfn + nr_pages) {
            oracle.set_memory(gfn, Some(&[0; 512]));
        }
        Program {
            subject,
            oracle,
            layout,
            recent: Vec::new(),
            ways: HashMap::new(),
            last_slot: Ok(SLOTS[2].0),
            traces: false,
            figures: Figures::default(),
        }
    }

    /// Fills page tables, and lets the CPUs use them.
    pub fn begin(&mut self, random: &mut Random) {
        for (gpa, value) in self.layout.contents(random) {
            self.subject.world().word(gpa).unwrap().store(value, Ordering::SeqCst);
            self.oracle.history.write(gpa, value);
        }
        for cpu in 0..self.oracle.cpus.len() {
            let mode = if random.chance(80) { self.layout.mode } else { entries::any_mode(random) };
            self.set_mode(cpu, mode, random);
        }
    }

    /// Runs all operations, then checks all memory. `done` counts them.
    pub fn run(&mut self, ops: &[Op], done: &mut usize) {
        for &op in ops {
            self.step(op);
            *done += 1;
        }
        self.oracle.check_memory(self.subject.world(), None);
    }

    pub fn step(&mut self, op: Op) {
        trace!(self, "{:?} {:#x}", op.kind, op.seed);
        let mut random = Random::new(op.seed);
        let random = &mut random;
        let cpu = random.below(self.oracle.cpus.len());
        if matches!(op.kind, Kind::MoveFrame | Kind::Harvest | Kind::ChangeSlot | Kind::Age) {
            self.figures.steps += 1;
        }
        match op.kind {
            Kind::Access => {
                for _ in 0..random.pick(&[1, 1, 1, 2, 4]) {
                    let la = self.address(cpu, random);
                    self.any_access(cpu, la, random);
                }
            }
            Kind::Edit => self.edit(cpu, random),
            Kind::FaultAndRetry => self.fault_and_retry(cpu, random),
            Kind::WildEdit if self.layout.order == Order::ByLevel && random.chance(80) => {}
            Kind::WildEdit => {
                let gpa = (self.layout.any_page(random) << 12) + entries::interesting_offset(random);
                let mode = self.oracle.cpus[cpu].mode();
                let level = 1 + random.below(4) as u8;
                let value = self.layout.entry(mode, level, random);
                self.write(
                    gpa & !(mode.entry_bytes() - 1),
                    &value.to_le_bytes()[..mode.entry_bytes() as usize],
                    random,
                );
            }
            Kind::LongWrite => {
                let len = 1 + random.below(64);
                let gpa = (self.layout.any_page(random) << 12) + random.below(4097 - len) as u64;
                let value = self.layout.entry(self.oracle.cpus[cpu].mode(), 1, random).to_le_bytes();
                let bytes: Vec<u8> = (0..len).map(|index| value[(index + gpa as usize) & 7]).collect();
                if self.oracle.history.has_memory(gpa) {
                    self.emulated_write(cpu, gpa, &bytes);
                }
            }
            Kind::LoadCr3 => self.load_cr3(cpu, random),
            Kind::Invlpg => {
                let la = self.address(cpu, random);
                self.invlpg(cpu, la);
            }
            Kind::Invpcid => {
                let la = self.address(cpu, random);
                self.any_invpcid(cpu, la, random);
            }
            Kind::FlushEverywhere => {
                for cpu in 0..self.oracle.cpus.len() {
                    self.invpcid(cpu, 2, [0, 0]);
                }
            }
            Kind::Flip => self.flip(cpu, random),
            Kind::SetMode => {
                let mode = if random.chance(60) { self.layout.mode } else { entries::any_mode(random) };
                self.set_mode(cpu, mode, random);
            }
            Kind::MoveFrame => {
                let gfn = self.layout.any_page(random);
                if self.oracle.history.has_memory(gfn << 12) {
                    trace!(self, "frame {gfn:#x} moves");
                    self.subject.host_event(HostEvent::MoveFrame { gfn });
                }
            }
            Kind::Harvest => {
                let slot = random.below(2);
                let (first_gfn, nr_pages) = SLOTS[slot];
                let reported = self.subject.harvest(slot, first_gfn);
                trace!(self, "slot {slot} reports {reported:x?}");
                self.oracle.check_harvest(first_gfn, nr_pages, &reported);
            }
            Kind::ChangeSlot => self.change_slot(random),
            Kind::Age if random.chance(50) => self.subject.host_event(HostEvent::Reclaim),
            Kind::Age => {
                let (first_gfn, nr_pages) = random.pick(&SLOTS[..2]);
                self.subject.host_event(HostEvent::Age { first_gfn, nr_pages });
            }
            Kind::CheckMemory => {
                let page = self.layout.any_page(random);
                if self.oracle.history.has_memory(page << 12) {
                    let _no_move = self.subject.world().gate.read().unwrap();
                    self.oracle.check_memory(self.subject.world(), Some(page));
                }
            }
        }
    }

    /// An address for `cpu`: mostly a recently used one.
    fn address(&mut self, cpu: usize, random: &mut Random) -> u64 {
        let mode = self.oracle.cpus[cpu].mode();
        if !self.recent.is_empty() && random.chance(75) {
            let (of, la) = random.pick(&self.recent);
            if of == mode {
                return (la & !0xfff) + entries::interesting_offset(random);
            }
        }
        // Preferably one that leads to memory.
        let mut la = 0;
        for _ in 0..random.pick(&[1, 4, 16]) {
            la = self.layout.address(mode, random) + entries::interesting_offset(random);
            if matches!(self.oracle.walk(cpu, la, Access::Read, Privilege::SupervisorWithAc).end, End::Reached { .. }) {
                break;
            }
        }
        if self.recent.len() < 10 {
            self.recent.push((mode, la));
        } else {
            let index = random.below(10);
            self.recent[index] = (mode, la);
        }
        la
    }

    /// An arbitrary access, preferably a permitted one.
    fn any_access(&mut self, cpu: usize, la: u64, random: &mut Random) {
        let (mut access, mut privilege) = (Access::Read, Privilege::User);
        for _ in 0..random.pick(&[1, 3, 6]) {
            access = random.pick(&[Access::Read, Access::Read, Access::Write, Access::Write, Access::Execute]);
            privilege = random.pick(&[
                Privilege::User,
                Privilege::User,
                Privilege::Supervisor,
                Privilege::Supervisor,
                Privilege::SupervisorWithAc,
            ]);
            if matches!(self.oracle.walk(cpu, la, access, privilege).end, End::Reached { .. }) {
                break;
            }
        }
        let value = self.layout.entry(self.oracle.cpus[cpu].mode(), 1, random);
        self.access(cpu, la, access, privilege, &value.to_le_bytes());
    }

    /// One access, and its write if it is permitted: of as many bytes as are aligned.
    pub fn access(&mut self, cpu: usize, la: u64, access: Access, privilege: Privilege, bytes: &[u8]) -> Observed {
        self.figures.steps += 1;
        let Program { subject, oracle, layout, .. } = self;
        let mut effect = |world: &World, gpa: u64| {
            oracle.take_flags(world, cpu, la, access, privilege);
            oracle.check_access(cpu, la, access, privilege, Observed::Reached { gpa, by: By::Cpu });
            if access == Access::Write {
                let bytes = layout.writable_part(gpa, bytes);
                store(world, gpa, bytes);
                oracle.write(gpa, bytes);
            }
        };
        let observed = subject.access(cpu, la, access, privilege, &mut effect).unwrap();
        trace!(self, "CPU {cpu}: {access:?} as {privilege:?} at {la:#x}: {observed:x?}");
        if !matches!(observed, Observed::Reached { by: By::Cpu, .. }) {
            {
                let world = self.subject.world();
                let _no_move = world.gate.read().unwrap();
                self.oracle.take_flags(world, cpu, la, access, privilege);
            }
            self.oracle.check_access(cpu, la, access, privilege, observed);
        }
        match observed {
            Observed::Reached { gpa, by } => {
                self.figures.reached += 1;
                let mode = self.oracle.cpus[cpu].mode();
                self.ways.insert(gpa >> 12, (cpu, mode, la & !0xfff));
                if by == By::Emulation {
                    self.figures.emulated += 1;
                    let bytes = self.layout.writable_part(gpa, bytes).to_vec();
                    self.emulated_write(cpu, gpa, &bytes);
                }
            }
            Observed::Fault { .. } => self.figures.faults += 1,
            Observed::Mmio { .. } | Observed::TableMmio { .. } => {}
        }
        observed
    }

    /// An emulated write of the guest.
    pub fn emulated_write(&mut self, cpu: usize, gpa: u64, bytes: &[u8]) {
        trace!(self, "CPU {cpu}: emulated write of {} bytes at {gpa:#x}", bytes.len());
        self.figures.steps += 1;
        let written = self.subject.write_table(cpu, gpa, bytes).unwrap();
        if !self.oracle.history.has_memory(gpa) {
            assert_eq!(written, Written::Mmio { gpa });
            return;
        }
        assert_eq!(written, Written::Memory);
        self.oracle.write(gpa, bytes);
        let world = self.subject.world();
        let _no_move = world.gate.read().unwrap();
        let found = world.word(gpa).unwrap().load(Ordering::SeqCst);
        assert_eq!(Some(found), self.oracle.history.read(gpa), "after an emulated write at {gpa:#x}");
    }

    fn change_slot(&mut self, random: &mut Random) {
        let nr_pages = SLOTS[2].1;
        match self.last_slot.clone() {
            Err(contents) => {
                trace!(self, "the last memslot is made again");
                self.subject.create_slot(2, Some(&contents));
                for (gfn, contents) in (SLOTS[2].0..).zip(contents.chunks(512)) {
                    self.oracle.set_memory(gfn, Some(contents));
                }
                self.last_slot = Ok(SLOTS[2].0);
            }
            Ok(place) => {
                let contents: Vec<u64> =
                    (place..place + nr_pages).flat_map(|gfn| self.oracle.history.page(gfn).to_vec()).collect();
                let is_moved = random.chance(50);
                let to = if place == OTHER_PLACE { SLOTS[2].0 } else { OTHER_PLACE };
                if is_moved {
                    trace!(self, "the last memslot moves to {to:#x}");
                    self.subject.move_slot(2, place, to);
                } else {
                    trace!(self, "the last memslot is deleted");
                    self.subject.delete_slot(2, place);
                }
                (place..place + nr_pages).for_each(|gfn| self.oracle.set_memory(gfn, None));
                if is_moved {
                    for (gfn, contents) in (to..).zip(contents.chunks(512)) {
                        self.oracle.set_memory(gfn, Some(contents));
                    }
                }
                self.last_slot = if is_moved { Ok(to) } else { Err(contents) };
            }
        }
    }

    /// The place of the last memslot, if it exists.
    pub fn last_slot(&self) -> Option<u64> {
        self.last_slot.as_ref().ok().copied()
    }
}
