//! Registers and flushes of the guest's CPUs.

use slat::shadow::{PagingRegister, PagingRegisters};

use super::Program;
use crate::architecture::{CR0_PG, CR0_WP, CR4_PCIDE, CR4_PGE, CR4_SMAP, CR4_SMEP, EFER_NXE, PagingMode};
use crate::entries;
use crate::random::Random;
use crate::subject::{Executed, Subject};

impl<S: Subject> Program<S> {
    pub(super) fn load_cr3(&mut self, cpu: usize, random: &mut Random) {
        let (mode, has_pcids) = (self.oracle.cpus[cpu].mode(), self.oracle.cpus[cpu].has_pcids());
        let mut value = self.layout.root(mode, random);
        if mode == PagingMode::Pae && random.chance(50) {
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

    /// Stores PDPTEs without reserved bits.
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

    pub(super) fn any_invpcid(&mut self, cpu: usize, la: u64, random: &mut Random) {
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

    pub(super) fn flip(&mut self, cpu: usize, random: &mut Random) {
        let registers = self.oracle.cpus[cpu].registers;
        let mode = self.oracle.cpus[cpu].mode();
        let (register, bit) = match random.below(7) {
            0 | 1 => (PagingRegister::Cr0, CR0_WP),
            2 => (PagingRegister::Cr4, CR4_SMEP),
            3 => (PagingRegister::Cr4, CR4_SMAP),
            4 => (PagingRegister::Cr4, CR4_PGE),
            // It can be set only while the PCID is 0.
            5 if mode.is_long() && (registers.cr3 & 0xfff == 0 || self.oracle.cpus[cpu].has_pcids()) => {
                (PagingRegister::Cr4, CR4_PCIDE)
            }
            _ => (PagingRegister::Efer, EFER_NXE),
        };
        self.write_register(cpu, register, registers.get(register) ^ bit);
    }

    pub(super) fn set_mode(&mut self, cpu: usize, mode: PagingMode, random: &mut Random) {
        let root = self.layout.root(mode, random);
        if mode == PagingMode::Pae && random.chance(90) {
            self.repair_pdptes(cpu, root, random);
        }
        let registers = entries::registers(mode, root, random);
        if random.chance(50) {
            return self.set_registers(cpu, registers);
        }
        // By the guest's instructions: a change of the mode goes through paging off, and PCIDs come
        // last.
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
}
