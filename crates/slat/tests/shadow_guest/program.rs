//! A random program: the guest accesses, edits its tables, and flushes, or does not; the host moves frames, asks for the dirty
//! log, takes slots away.

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use slat::Access;
use slat::shadow::{PagingRegister, PagingRegisters, Privilege};

use super::architecture::{
    ACCESSED, CR0_PG, CR0_WP, CR4_PCIDE, CR4_PGE, CR4_SMAP, CR4_SMEP, DIRTY, EFER_NXE, End, GLOBAL, LARGE, Mode,
    NO_EXECUTE, PRESENT, USER, WRITABLE,
};
use super::entries::{self, Layout, Order};
use super::ops::{Kind, Op};
use super::oracle::Oracle;
use super::random::Random;
use super::stale::Caching;
use super::subject::{By, Executed, HostEvent, Observed, Subject, Written};
use super::world::{OTHER_PLACE, SLOTS, World};

/// How a program's guest is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Setup {
    pub seed: u64,
    pub nr_cpus: usize,
    pub caching: Caching,
}

/// What a program has done.
#[derive(Clone, Copy, Default, Debug)]
pub struct Figures {
    /// Accesses, writes, flushes, loads of registers, and what the host did.
    pub steps: u64,
    /// Accesses that reached memory, and those of them that only something stale explains.
    pub reached: u64,
    pub stale: u64,
    /// Writes that were emulated, of a CPU's own accesses.
    pub emulated: u64,
    /// Page faults that the guest was given.
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
    /// Addresses that were used lately, and in which mode.
    recent: Vec<(Mode, u64)>,
    /// A way to write a guest frame: the CPU, its mode, and the address that led there.
    ways: HashMap<u64, (usize, Mode, u64)>,
    /// Where the last slot lies, or that it is away and what it held.
    last_slot: Result<u64, Vec<u64>>,
    /// Whether what is done is printed.
    pub traces: bool,
    pub figures: Figures,
}

macro_rules! trace {
    ($program:expr, $($format:tt)*) => {
        if $program.traces {
            println!("  {}", format_args!($($format)*));
        }
    };
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
    /// A program with slots, tables with anything in them, and CPUs that use them.
    pub fn new(subject: S, setup: Setup) -> Program<S> {
        let mut random = Random::new(setup.seed);
        let layout = Layout::new(&mut random);
        let mut program = Program::with_slots(subject, setup.nr_cpus, setup.caching, layout);
        program.begin(&mut random);
        program
    }

    /// One whose memory is empty, and whose CPUs do not translate.
    pub fn with_slots(mut subject: S, nr_cpus: usize, caching: Caching, layout: Layout) -> Program<S> {
        (0..SLOTS.len()).for_each(|slot| subject.create_slot(slot, None));
        Program::beside(subject, nr_cpus, caching, layout)
    }

    /// As that, but the slots are there.
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

    /// Fills tables, and lets the CPUs use them.
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

    /// Does all operations, then looks at all memory. `done` counts them.
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

    /// An address for `cpu`: mostly one that was used lately.
    fn address(&mut self, cpu: usize, random: &mut Random) -> u64 {
        let mode = self.oracle.cpus[cpu].mode();
        if !self.recent.is_empty() && random.chance(75) {
            let (of, la) = random.pick(&self.recent);
            if of == mode {
                return (la & !0xfff) + entries::interesting_offset(random);
            }
        }
        // Rather one that leads somewhere.
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

    /// Any access, but rather one that may be done.
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

    /// One access, and the write if it is one that may be done: of as many bytes as are aligned.
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

    /// A write that is made for the guest.
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

    /// Writes memory of the guest's, by a CPU that has it mapped if one has.
    fn write(&mut self, gpa: u64, bytes: &[u8], random: &mut Random) {
        if !self.oracle.history.has_memory(gpa) {
            return;
        }
        if let Some(&(cpu, mode, page)) = self.ways.get(&(gpa >> 12))
            && self.oracle.cpus[cpu].mode() == mode
            && random.chance(if self.layout.order == Order::ByLevel { 95 } else { 70 })
        {
            let la = page | (gpa & 0xfff);
            let walk = self.oracle.walk(cpu, la, Access::Write, Privilege::Supervisor);
            if walk.end == (End::Reached { gpa }) {
                // By what is stale it may reach another page, which then has been written.
                self.access(cpu, la, Access::Write, Privilege::Supervisor, bytes);
                return;
            }
        }
        let cpu = random.below(self.oracle.cpus.len());
        let bytes = self.layout.writable_part(gpa, bytes).to_vec();
        self.emulated_write(cpu, gpa, &bytes);
    }

    /// Edits the path of an address that was perhaps used before, is perhaps flushed, and perhaps used again.
    fn edit(&mut self, cpu: usize, random: &mut Random) {
        let la = self.address(cpu, random);
        let other = random.below(self.oracle.cpus.len());
        let mode = self.oracle.cpus[cpu].mode();
        if random.chance(60) {
            self.repair_path(cpu, la, random);
        }
        if random.chance(70) {
            self.any_access(cpu, la, random);
        }
        self.edit_path(cpu, la, random);
        match random.below(16) {
            0 => self.invlpg(cpu, la),
            // Another page of the same large one, if it is one.
            1 => self.invlpg(cpu, la ^ (random.below(512) as u64) << 12),
            2 => self.any_invpcid(cpu, la, random),
            3 => self.load_cr3(cpu, random),
            4 => {
                let value = self.oracle.cpus[cpu].registers.cr3;
                self.load_cr3_value(cpu, value);
            }
            5 if self.oracle.cpus[other].mode() == mode => self.invlpg(other, la),
            _ => {}
        }
        for user in [cpu, other] {
            if random.chance(50) {
                let is_same = self.oracle.cpus[user].mode() == mode;
                let la = if is_same { la } else { self.address(user, random) };
                self.any_access(user, la, random);
            }
        }
    }

    /// The page is cached; its entry loses a right or all of them, or leads to another page, without a flush; a write faults, which
    /// flushes this address; the entry may get its rights back; and what the address leads to now may not be the old page.
    fn fault_and_retry(&mut self, cpu: usize, random: &mut Random) {
        let la = self.address(cpu, random);
        self.repair_path(cpu, la, random);
        self.access(cpu, la, Access::Read, Privilege::Supervisor, &[0; 8]);
        let mode = self.oracle.cpus[cpu].mode();
        let walk = self.oracle.walk(cpu, la, Access::Read, Privilege::SupervisorWithAc);
        let Some(&step) = walk.steps.last().filter(|step| step.is_page) else { return };
        let old = super::architecture::entry_in(self.oracle.history.read(step.gpa).unwrap(), step.gpa, mode);
        let other = (old & 0xfff) | (self.layout.entry(mode, step.level, random) & 0x7fff_f000);
        let lesser = match random.below(4) {
            0 => 0,
            1 => old & !(WRITABLE | USER),
            _ => other & !WRITABLE,
        };
        let size = mode.entry_bytes() as usize;
        self.write(step.gpa, &lesser.to_le_bytes()[..size], random);
        self.access(cpu, la, Access::Write, Privilege::User, &[0; 8]);
        if random.chance(60) {
            self.write(step.gpa, &(other | PRESENT | ACCESSED).to_le_bytes()[..size], random);
        }
        // With another root of the PCID in between.
        if random.chance(20) {
            self.load_cr3(cpu, random);
        }
        for privilege in [Privilege::SupervisorWithAc, Privilege::User] {
            self.access(cpu, la, Access::Read, privilege, &[0; 8]);
        }
    }

    /// Makes entries good until the address leads somewhere.
    fn repair_path(&mut self, cpu: usize, la: u64, random: &mut Random) {
        let mode = self.oracle.cpus[cpu].mode();
        for _ in 0..mode.levels() {
            let walk = self.oracle.walk(cpu, la, Access::Read, Privilege::SupervisorWithAc);
            let Some(step) = walk.bad else { return };
            let new = self.layout.good_entry(mode, step.level, random);
            trace!(self, "the entry of level {} at {:#x} for {la:#x} becomes {new:#x}", step.level, step.gpa);
            self.write(step.gpa, &new.to_le_bytes()[..mode.entry_bytes() as usize], random);
        }
    }

    fn edit_path(&mut self, cpu: usize, la: u64, random: &mut Random) {
        let mode = self.oracle.cpus[cpu].mode();
        let walk = self.oracle.walk(cpu, la, Access::Read, Privilege::Supervisor);
        // The lower ones more often.
        let nr_steps = walk.steps.len() + usize::from(walk.bad.is_some());
        if nr_steps == 0 {
            return;
        }
        let is_orderly = self.layout.order == Order::ByLevel && random.chance(90);
        let above = if is_orderly { 0 } else { random.below(nr_steps).min(random.below(nr_steps)) };
        let index = nr_steps - 1 - above;
        let step = walk.steps.iter().copied().chain(walk.bad).nth(index).unwrap();
        let old = super::architecture::entry_in(self.oracle.history.read(step.gpa).unwrap(), step.gpa, mode);
        let new = match random.below(16) {
            0 => 0,
            1 => old ^ PRESENT,
            12..=14 => old | PRESENT | WRITABLE | USER | ACCESSED | DIRTY,
            2 => old ^ WRITABLE,
            3 => old ^ USER,
            4 => old ^ ACCESSED,
            5 => old ^ DIRTY,
            6 => old ^ random.pick(&[LARGE, GLOBAL]),
            7 => old ^ NO_EXECUTE,
            8 => old & !(ACCESSED | DIRTY),
            // The same rights to another page.
            9 | 10 => (old & 0x8000_0000_0000_0fff) | (self.layout.entry(mode, step.level, random) & 0x7fff_ffff_f000),
            _ => self.layout.entry(mode, step.level, random),
        } & !self.layout.forbidden_flags();
        trace!(self, "the entry of level {} at {:#x} for {la:#x}: {old:#x} to {new:#x}", step.level, step.gpa);
        self.write(step.gpa, &new.to_le_bytes()[..mode.entry_bytes() as usize], random);
    }

    fn load_cr3(&mut self, cpu: usize, random: &mut Random) {
        let (mode, has_pcids) = (self.oracle.cpus[cpu].mode(), self.oracle.cpus[cpu].has_pcids());
        let mut value = self.layout.root(mode, random);
        if mode == Mode::Pae && random.chance(50) {
            self.repair_pdptes(cpu, value, random);
        }
        if has_pcids {
            value |= self.layout.pcid(random);
            value |= u64::from(random.chance(60)) << 63;
        }
        if mode.is_long() {
            match random.below(100) {
                0 => value |= 1 << 63,
                1 => value |= 1 << 55,
                _ => {}
            }
        }
        self.load_cr3_value(cpu, value);
    }

    pub fn load_cr3_value(&mut self, cpu: usize, value: u64) {
        trace!(self, "CPU {cpu}: CR3 = {value:#x}");
        let mode = self.oracle.cpus[cpu].mode();
        self.figures.steps += 1;
        let expected = self.oracle.load_cr3(cpu, value);
        assert_eq!(self.subject.load_cr3(cpu, value).unwrap(), expected, "CPU {cpu}: CR3 = {value:#x} in {mode:?}");
    }

    /// PDPTEs without reserved bits.
    fn repair_pdptes(&mut self, cpu: usize, root: u64, random: &mut Random) {
        let entries: Vec<u8> = (0..4).flat_map(|_| self.layout.pdpte(random).to_le_bytes()).collect();
        if self.oracle.history.has_memory(root) {
            self.emulated_write(cpu, root, &entries);
        }
    }

    pub fn invlpg(&mut self, cpu: usize, la: u64) {
        trace!(self, "CPU {cpu}: invlpg {la:#x}");
        self.figures.steps += 1;
        self.oracle.invlpg(cpu, la);
        self.subject.invlpg(cpu, la).unwrap();
    }

    fn any_invpcid(&mut self, cpu: usize, la: u64, random: &mut Random) {
        let has_pcids = self.oracle.cpus[cpu].has_pcids();
        let mut pcid = if has_pcids || random.chance(3) { self.layout.pcid(random) } else { 0 };
        let mut kind = random.below(4) as u64;
        match random.below(60) {
            0 => kind = 4,
            1 => pcid |= 1 << 12,
            _ => {}
        }
        self.invpcid(cpu, kind, [pcid, la]);
    }

    pub fn invpcid(&mut self, cpu: usize, kind: u64, descriptor: [u64; 2]) {
        trace!(self, "CPU {cpu}: invpcid {kind}, {descriptor:x?}");
        self.figures.steps += 1;
        let expected = self.oracle.invpcid(cpu, kind, descriptor);
        let executed = self.subject.invpcid(cpu, kind, descriptor).unwrap();
        assert_eq!(executed, expected, "CPU {cpu}: INVPCID {kind} of {descriptor:x?}");
    }

    pub fn set_registers(&mut self, cpu: usize, registers: PagingRegisters) {
        trace!(self, "CPU {cpu}: {registers:x?}");
        self.figures.steps += 1;
        self.oracle.set_registers(cpu, registers);
        self.subject.set_registers(cpu, registers).unwrap();
    }

    pub fn write_register(&mut self, cpu: usize, register: PagingRegister, value: u64) -> Executed {
        trace!(self, "CPU {cpu}: {register:?} = {value:x?}");
        self.figures.steps += 1;
        let expected = self.oracle.write_register(cpu, register, value);
        let executed = self.subject.write_register(cpu, register, value).unwrap();
        assert_eq!(executed, expected, "CPU {cpu}: {register:?} = {value:x?}");
        executed
    }

    fn flip(&mut self, cpu: usize, random: &mut Random) {
        let registers = self.oracle.cpus[cpu].registers;
        let mode = self.oracle.cpus[cpu].mode();
        let (register, bit) = match random.below(7) {
            0 | 1 => (PagingRegister::Cr0, CR0_WP),
            2 => (PagingRegister::Cr4, CR4_SMEP),
            3 => (PagingRegister::Cr4, CR4_SMAP),
            4 => (PagingRegister::Cr4, CR4_PGE),
            // Which can be set only while the PCID is 0.
            5 if mode.is_long() && (registers.cr3 & 0xfff == 0 || self.oracle.cpus[cpu].has_pcids()) => {
                (PagingRegister::Cr4, CR4_PCIDE)
            }
            _ => (PagingRegister::Efer, EFER_NXE),
        };
        self.write_register(cpu, register, registers.get(register) ^ bit);
    }

    fn set_mode(&mut self, cpu: usize, mode: Mode, random: &mut Random) {
        let root = self.layout.root(mode, random);
        if mode == Mode::Pae && random.chance(90) {
            self.repair_pdptes(cpu, root, random);
        }
        let registers = entries::registers(mode, root, random);
        if random.chance(50) {
            return self.set_registers(cpu, registers);
        }
        // By the guest's instructions: from one mode to another there is no way but by none, and PCIDs come last.
        let PagingRegisters { cr0, cr3, cr4, efer } = registers;
        let old = self.oracle.cpus[cpu].registers;
        self.write_register(cpu, PagingRegister::Cr4, old.cr4 & !CR4_PCIDE);
        self.write_register(cpu, PagingRegister::Cr0, old.cr0 & !CR0_PG);
        self.load_cr3_value(cpu, cr3);
        self.write_register(cpu, PagingRegister::Cr4, cr4 & !CR4_PCIDE);
        self.write_register(cpu, PagingRegister::Efer, efer);
        let executed = self.write_register(cpu, PagingRegister::Cr0, cr0);
        if executed == Executed::Done && cr3 & 0xfff == 0 {
            self.write_register(cpu, PagingRegister::Cr4, cr4);
        }
    }

    fn change_slot(&mut self, random: &mut Random) {
        let nr_pages = SLOTS[2].1;
        match self.last_slot.clone() {
            Err(contents) => {
                trace!(self, "the last slot is back");
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
                    trace!(self, "the last slot moves to {to:#x}");
                    self.subject.move_slot(2, place, to);
                } else {
                    trace!(self, "the last slot goes");
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

    /// Where the last slot lies, if it does.
    pub fn last_slot(&self) -> Option<u64> {
        self.last_slot.as_ref().ok().copied()
    }
}
