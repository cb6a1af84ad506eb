//! Edits of the guest's page tables.

use slat::Access;
use slat::shadow::Privilege;

use super::Program;
use crate::architecture::{ACCESSED, DIRTY, End, GLOBAL, LARGE, NO_EXECUTE, PRESENT, USER, WRITABLE, entry_in};
use crate::entries::Order;
use crate::random::Random;
use crate::subject::Subject;

impl<S: Subject> Program<S> {
    /// Writes memory of the guest, by a CPU that has it mapped if there is one.
    pub(super) fn write(&mut self, gpa: u64, bytes: &[u8], random: &mut Random) {
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
                // By a stale translation it may reach another page, which then has been written.
                self.access(cpu, la, Access::Write, Privilege::Supervisor, bytes);
                return;
            }
        }
        let cpu = random.below(self.oracle.cpus.len());
        let bytes = self.layout.writable_part(gpa, bytes).to_vec();
        self.emulated_write(cpu, gpa, &bytes);
    }

    /// Edits the path of an address that was perhaps used before, is perhaps flushed, and perhaps
    /// used again.
    pub(super) fn edit(&mut self, cpu: usize, random: &mut Random) {
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

    /// The page is cached. Without a flush its PTE loses rights, or leads to another page. A write
    /// faults, which flushes this address. The PTE may regain its rights. After that the address
    /// may not lead to the old page.
    pub(super) fn fault_and_retry(&mut self, cpu: usize, random: &mut Random) {
        let la = self.address(cpu, random);
        self.repair_path(cpu, la, random);
        self.access(cpu, la, Access::Read, Privilege::Supervisor, &[0; 8]);
        let mode = self.oracle.cpus[cpu].mode();
        let walk = self.oracle.walk(cpu, la, Access::Read, Privilege::SupervisorWithAc);
        let Some(&step) = walk.steps.last().filter(|step| step.is_page) else { return };
        let old = entry_in(self.oracle.history.read(step.gpa).unwrap(), step.gpa, mode);
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

    /// Makes PTEs valid until the address leads to memory.
    fn repair_path(&mut self, cpu: usize, la: u64, random: &mut Random) {
        let mode = self.oracle.cpus[cpu].mode();
        for _ in 0..mode.levels() {
            let walk = self.oracle.walk(cpu, la, Access::Read, Privilege::SupervisorWithAc);
            let Some(step) = walk.bad else { return };
            let new = self.layout.good_entry(mode, step.level, random);
            trace!(self, "the PTE of level {} at {:#x} for {la:#x} becomes {new:#x}", step.level, step.gpa);
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
        let old = entry_in(self.oracle.history.read(step.gpa).unwrap(), step.gpa, mode);
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
        trace!(self, "the PTE of level {} at {:#x} for {la:#x}: {old:#x} to {new:#x}", step.level, step.gpa);
        self.write(step.gpa, &new.to_le_bytes()[..mode.entry_bytes() as usize], random);
    }
}
