//! CPUs that follow the architecture by themselves: a walk of the guest's page tables, and a TLB
//! that keeps all that it may. And the same CPUs with one rule left out, which the oracle must
//! detect.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::Ordering;

use slat::error::FaultError;
use slat::shadow::{PagingRegister, PagingRegisters, Privilege};
use slat::{Access, MemoryRegionFlags};

use super::architecture::{
    ACCESSED, DIRTY, End, GLOBAL, PagingMode, Rights, entry_in, has_accessed_flag, has_bad_pdpte, loads_pdptes, walk,
};
use super::oracle::Oracle;
use super::stale::Caching;
use super::subject::{By, Executed, HostEvent, Observed, Subject, Written};
use super::world::{SLOTS, World};

/// The rule that is left out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LeftOut {
    Nothing,
    /// Also nothing is cached.
    Cache,
    Invlpg,
    /// Of the other pages inside the large one.
    InvlpgOfLargePage,
    /// In other PCIDs.
    InvlpgOfGlobal,
    /// A page fault keeps the cached translation of its address.
    PageFault,
    LoadCr3,
    LoadCr3OfOtherRoot,
    InvpcidAddress,
    InvpcidContext,
    InvpcidAll,
    InvpcidAllButGlobal,
    PcidTags,
    GlobalChange,
    AccessedFlag,
    DirtyFlag,
    DirtyOfCached,
    WriteProtect,
    Smap,
    Emulated,
    ReportOfWrite,
    /// A load of PDPTEs accepts any.
    PdpteCheck,
}

/// Each rule.
pub const LEFT_OUT: [LeftOut; 20] = [
    LeftOut::Invlpg,
    LeftOut::InvlpgOfLargePage,
    LeftOut::InvlpgOfGlobal,
    LeftOut::PageFault,
    LeftOut::LoadCr3,
    LeftOut::LoadCr3OfOtherRoot,
    LeftOut::InvpcidAddress,
    LeftOut::InvpcidContext,
    LeftOut::InvpcidAll,
    LeftOut::InvpcidAllButGlobal,
    LeftOut::PcidTags,
    LeftOut::GlobalChange,
    LeftOut::AccessedFlag,
    LeftOut::DirtyFlag,
    LeftOut::DirtyOfCached,
    LeftOut::WriteProtect,
    LeftOut::Smap,
    LeftOut::Emulated,
    LeftOut::ReportOfWrite,
    LeftOut::PdpteCheck,
];

#[derive(Clone, Copy, Debug)]
struct Cached {
    gpa: u64,
    rights: Rights,
    dirty: bool,
    shift: u32,
}

#[derive(Default)]
struct ToyCpu {
    /// By PCID, or `None` for global ones, and number of the 4 KiB page.
    cached: HashMap<(Option<u16>, u64), Cached>,
}

pub struct Toy {
    world: World,
    left_out: LeftOut,
    cpus: Vec<ToyCpu>,
    /// Keeps the registers, by the oracle's rules.
    registers: Oracle,
    written: BTreeSet<u64>,
}

impl Toy {
    pub fn new(nr_cpus: usize, left_out: LeftOut) -> Toy {
        let cpus = (0..nr_cpus).map(|_| ToyCpu::default()).collect();
        Toy {
            world: World::new(),
            left_out,
            cpus,
            registers: Oracle::new(nr_cpus, Caching::WhileCurrent),
            written: BTreeSet::new(),
        }
    }

    /// Whether loaded PDPTEs are found invalid.
    fn has_bad_pdpte(&self, new: PagingRegisters) -> bool {
        self.left_out != LeftOut::PdpteCheck
            && has_bad_pdpte(&new, |gpa| self.world.word(gpa).map(|word| word.load(Ordering::SeqCst)))
    }

    fn translate(&mut self, cpu: usize, la: u64, access: Access, privilege: Privilege) -> Observed {
        let mut registers = self.registers.cpus[cpu].registers;
        if self.left_out == LeftOut::WriteProtect {
            registers.cr0 &= !super::architecture::CR0_WP;
        }
        if self.left_out == LeftOut::Smap {
            registers.cr4 &= !super::architecture::CR4_SMAP;
        }
        let pcid = if self.left_out == LeftOut::PcidTags { 0 } else { self.registers.cpus[cpu].pcid() };
        let keys = [(None, la >> 12), (Some(pcid), la >> 12)];
        let before = keys.map(|key| self.cpus[cpu].cached.get(&key).copied());
        for key in keys {
            if let Some(&found) = self.cpus[cpu].cached.get(&key) {
                let may = found.rights.permits(&registers, access, privilege);
                if may && (access != Access::Write || found.dirty || self.left_out == LeftOut::DirtyOfCached) {
                    return Observed::Reached { gpa: found.gpa | (la & 0xfff), by: By::Cpu };
                }
                self.cpus[cpu].cached.remove(&key);
            }
        }
        let mode = PagingMode::of(&registers);
        let read = |gpa| self.world.word(gpa).map(|word| word.load(Ordering::SeqCst));
        let walked = walk(&registers, la, access, privilege, read);
        match walked.end {
            End::NoTable { gpa } => Observed::TableMmio { gpa },
            End::Fault { error_code } => {
                if self.left_out == LeftOut::PageFault {
                    for (key, cached) in keys.into_iter().zip(before) {
                        cached.map(|cached| self.cpus[cpu].cached.insert(key, cached));
                    }
                } else {
                    self.forget_page(cpu, la, |of| of.is_none() || of == Some(pcid));
                }
                Observed::Fault { error_code }
            }
            End::Reached { gpa } if self.world.word(gpa).is_none() => Observed::Mmio { gpa, access },
            End::Reached { gpa } => {
                for step in &walked.steps {
                    let dirty = step.is_page && access == Access::Write && self.left_out != LeftOut::DirtyFlag;
                    let has_flag = has_accessed_flag(mode, step.level) && self.left_out != LeftOut::AccessedFlag;
                    let accessed = if has_flag { ACCESSED } else { 0 };
                    let flags = accessed | if dirty { DIRTY } else { 0 };
                    let shift = if mode == PagingMode::Bits32 { 8 * (step.gpa & 4) } else { 0 };
                    self.world.word(step.gpa).unwrap().fetch_or(flags << shift, Ordering::SeqCst);
                }
                if let Some(leaf) = walked.steps.last()
                    && self.left_out != LeftOut::Cache
                {
                    let entry = entry_in(self.world.word(leaf.gpa).unwrap().load(Ordering::SeqCst), leaf.gpa, mode);
                    let is_global = entry & GLOBAL != 0 && registers.cr4 & super::architecture::CR4_PGE != 0;
                    let key = (if is_global { None } else { Some(pcid) }, la >> 12);
                    let (dirty, shift) = (entry & DIRTY != 0, mode.shift(leaf.level));
                    let found = Cached { gpa: gpa & !0xfff, rights: walked.rights, dirty, shift };
                    self.cpus[cpu].cached.insert(key, found);
                }
                Observed::Reached { gpa, by: By::Cpu }
            }
        }
    }

    /// Drops what translates `la` in the PCIDs that `of` selects.
    fn forget_page(&mut self, cpu: usize, la: u64, of: impl Fn(Option<u16>) -> bool) {
        let left_out = self.left_out;
        self.cpus[cpu].cached.retain(|&(pcid, page), found| {
            let shift = if left_out == LeftOut::InvlpgOfLargePage { 12 } else { found.shift };
            !of(pcid) || (page << 12) >> shift != la >> shift
        });
    }

    fn forget(&mut self, cpu: usize, of: impl Fn(Option<u16>) -> bool) {
        self.cpus[cpu].cached.retain(|&(pcid, _), _| !of(pcid));
    }
}

impl Subject for Toy {
    fn world(&self) -> &World {
        &self.world
    }

    fn set_registers(&mut self, cpu: usize, registers: PagingRegisters) -> Result<(), FaultError> {
        self.registers.set_registers(cpu, registers);
        self.forget(cpu, |_| true);
        Ok(())
    }

    fn write_register(&mut self, cpu: usize, register: PagingRegister, value: u64) -> Result<Executed, FaultError> {
        let old = self.registers.cpus[cpu].registers;
        let new = old.with(register, value);
        if loads_pdptes(&old, &new) && self.has_bad_pdpte(new) {
            return Ok(Executed::GeneralProtection);
        }
        self.registers.registers_written(cpu, new);
        let only_global = PagingRegisters { cr4: old.cr4 ^ super::architecture::CR4_PGE, ..old } == new;
        if !(self.left_out == LeftOut::GlobalChange && only_global) {
            self.forget(cpu, |_| true);
        }
        Ok(Executed::Done)
    }

    fn load_cr3(&mut self, cpu: usize, value: u64) -> Result<Executed, FaultError> {
        let registers = self.registers.cpus[cpu].registers;
        let old = registers.cr3;
        let new = PagingRegisters { cr3: value, ..registers };
        if PagingMode::of(&new) == PagingMode::Pae && self.has_bad_pdpte(new) {
            return Ok(Executed::GeneralProtection);
        }
        let executed = self.registers.load_cr3(cpu, value);
        let keeps = value >> 63 == 1;
        let is_left_out = match self.left_out {
            LeftOut::LoadCr3 => true,
            LeftOut::LoadCr3OfOtherRoot => old >> 12 != (value & !(1 << 63)) >> 12,
            _ => false,
        };
        if executed == Executed::Done && !keeps && !is_left_out {
            let pcid = self.registers.cpus[cpu].pcid();
            self.forget(cpu, |of| of == Some(pcid));
        }
        Ok(executed)
    }

    fn invlpg(&mut self, cpu: usize, la: u64) -> Result<(), FaultError> {
        let pcid = self.registers.cpus[cpu].pcid();
        match self.left_out {
            LeftOut::Invlpg => {}
            LeftOut::InvlpgOfGlobal => self.forget_page(cpu, la, |of| of == Some(pcid)),
            _ => self.forget_page(cpu, la, |of| of.is_none() || of == Some(pcid)),
        }
        Ok(())
    }

    fn invpcid(&mut self, cpu: usize, kind: u64, descriptor: [u64; 2]) -> Result<Executed, FaultError> {
        let executed = self.registers.invpcid(cpu, kind, descriptor);
        let pcid = descriptor[0] as u16;
        if executed == Executed::Done {
            match (kind, self.left_out) {
                (0, LeftOut::InvpcidAddress)
                | (1, LeftOut::InvpcidContext)
                | (2, LeftOut::InvpcidAll)
                | (3, LeftOut::InvpcidAllButGlobal) => {}
                (0, _) => self.forget_page(cpu, descriptor[1], |of| of == Some(pcid)),
                (1, _) => self.forget(cpu, |of| of == Some(pcid)),
                (2, _) => self.forget(cpu, |_| true),
                _ => self.forget(cpu, |of| of.is_some()),
            }
        }
        Ok(executed)
    }

    fn access(
        &mut self,
        cpu: usize,
        la: u64,
        access: Access,
        privilege: Privilege,
        effect: &mut dyn FnMut(&World, u64),
    ) -> Result<Observed, FaultError> {
        let observed = self.translate(cpu, la, access, privilege);
        Ok(match observed {
            // Some writes as if they were emulated.
            Observed::Reached { gpa, .. } if access == Access::Write && gpa >> 12 & 3 == 0 => {
                Observed::Reached { gpa, by: By::Emulation }
            }
            Observed::Reached { gpa, .. } => {
                effect(&self.world, gpa);
                observed
            }
            observed => observed,
        })
    }

    fn write_table(&mut self, _cpu: usize, gpa: u64, bytes: &[u8]) -> Result<Written, FaultError> {
        if self.left_out == LeftOut::Emulated && gpa >> 12 & 7 == 4 {
            return Ok(Written::Memory);
        }
        self.written.insert(gpa >> 12);
        for (at, &byte) in (gpa..).zip(bytes) {
            super::program::store(&self.world, at, &[byte]);
        }
        Ok(Written::Memory)
    }

    fn host_event(&mut self, event: HostEvent) {
        let HostEvent::MoveFrame { .. } = event else { return };
    }

    fn harvest(&mut self, slot: usize, first_gfn: u64) -> BTreeSet<u64> {
        let all = first_gfn..first_gfn + SLOTS[slot].1;
        all.filter(|gfn| self.left_out != LeftOut::ReportOfWrite || self.written.contains(gfn)).collect()
    }

    fn delete_slot(&mut self, slot: usize, first_gfn: u64) {
        (0..self.cpus.len()).for_each(|cpu| self.forget(cpu, |_| true));
        self.world.free_frames_of(first_gfn, SLOTS[slot].1);
    }

    fn create_slot(&mut self, slot: usize, contents: Option<&[u64]>) {
        self.world.region(slot, MemoryRegionFlags::empty(), false, contents);
    }

    fn move_slot(&mut self, slot: usize, from: u64, to: u64) {
        (0..self.cpus.len()).for_each(|cpu| self.forget(cpu, |_| true));
        self.world.move_slot(from, to, SLOTS[slot].1);
    }
}
