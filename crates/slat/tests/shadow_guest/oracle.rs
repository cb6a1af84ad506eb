//! Decides for each observation whether the architecture allows it. It has its own copy of the
//! guest's memory, which it changes as the guest does. The engine itself may write only accessed
//! and dirty flags, in PTEs that the current access has used.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use slat::Access;
use slat::shadow::{PagingRegister, PagingRegisters, Privilege};

use super::architecture::{
    ACCESSED, CR0_PG, CR4_LA57, CR4_PAE, CR4_PCIDE, CR4_PGE, CR4_PSE, CR4_SMEP, DIRTY, EFER_LME, EFER_NXE, End,
    PHYSICAL_BITS, PagingMode, Step, Walk, has_accessed_flag, has_bad_pdpte, loads_pdptes, walk,
};
use super::stale::{Caching, History, VirtualCpu};
use super::subject::{By, Executed, Observed};
use super::world::{NR_GFNS, WORDS, World};

pub struct Oracle {
    pub history: History,
    pub cpus: Vec<VirtualCpu>,
    /// Guest frames that were written since their memslot was last harvested.
    pub dirty: BTreeSet<u64>,
    /// How many observations only something stale explains.
    pub nr_stale: u64,
}

impl Oracle {
    pub fn new(nr_cpus: usize, caching: Caching) -> Oracle {
        let cpus = (0..nr_cpus).map(|_| VirtualCpu::new(caching)).collect();
        Oracle { history: History::new(), cpus, dirty: BTreeSet::new(), nr_stale: 0 }
    }

    /// A walk of the current page tables.
    pub fn walk(&self, cpu: usize, la: u64, access: Access, privilege: Privilege) -> Walk {
        walk(&self.cpus[cpu].registers, la, access, privilege, |gpa| self.history.read(gpa))
    }

    /// The guest, or an emulation, writes these bytes, all on one page.
    pub fn write(&mut self, gpa: u64, bytes: &[u8]) {
        self.dirty.insert(gpa >> 12);
        let (mut at, end) = (gpa, gpa + bytes.len() as u64);
        while at < end {
            let next = end.min((at | 7) + 1);
            let mut word = self.history.read(at).unwrap().to_le_bytes();
            let inside = (at & 7) as usize;
            let part = &bytes[(at - gpa) as usize..(next - gpa) as usize];
            word[inside..inside + part.len()].copy_from_slice(part);
            self.history.write(at, u64::from_le_bytes(word));
            at = next;
        }
    }

    /// Checks what the engine has written for an access, and copies it.
    pub fn take_flags(&mut self, world: &World, cpu: usize, la: u64, access: Access, privilege: Privilege) {
        let mode = self.cpus[cpu].mode();
        let Walk { steps, end, .. } = self.walk(cpu, la, access, privilege);
        let is_written = access == Access::Write && matches!(end, End::Reached { .. });
        let flags_of = |step: &Step| {
            let accessed = if has_accessed_flag(mode, step.level) { ACCESSED } else { 0 };
            if step.is_page && is_written { accessed | DIRTY } else { accessed }
        };
        for step in &steps {
            let old = self.history.read(step.gpa).unwrap();
            let new = world.word(step.gpa).unwrap().load(Ordering::SeqCst);
            if old == new {
                continue;
            }
            // A page table that maps itself is on the way more than once.
            let uses = steps.iter().filter(|other| other.gpa >> 3 == step.gpa >> 3);
            let flags = uses.fold(0, |flags, other| {
                flags
                    | if mode == PagingMode::Bits32 {
                        flags_of(other) << (8 * (other.gpa & 4))
                    } else {
                        flags_of(other)
                    }
            });
            assert!(
                new & !flags == old & !flags && old & !new == 0,
                "the entry of level {} at {:#x} was {old:#x}, and after an access ({access:?}) it is {new:#x}",
                step.level,
                step.gpa
            );
            self.dirty.insert(step.gpa >> 12);
            self.history.write(step.gpa, new);
        }
    }

    /// Checks the result of an access. [`take_flags`](Oracle::take_flags) comes first.
    pub fn check_access(&mut self, cpu: usize, la: u64, access: Access, privilege: Privilege, observed: Observed) {
        let walk = self.walk(cpu, la, access, privilege);
        let is_fresh = match (observed, walk.end) {
            (Observed::Fault { error_code }, End::Fault { error_code: expected }) => error_code == expected,
            (Observed::Mmio { gpa, access: of }, End::Reached { gpa: expected }) => {
                gpa == expected && of == access && !self.history.has_memory(gpa)
            }
            // The CPU reads, a PTE of the page table there.
            (Observed::TableMmio { gpa }, End::NoTable { gpa: expected }) => {
                gpa == expected && !self.history.has_memory(gpa)
            }
            // A CPU may read nothing, or ones, where there is no memory.
            (Observed::Fault { error_code }, End::NoTable { .. }) => {
                let rest = super::architecture::error_code(&self.cpus[cpu].registers, access, privilege, 0);
                error_code & !0b1001 == rest
            }
            // An access to a device must not be emulated as memory.
            (Observed::Reached { gpa, by: By::Emulation }, _) if !self.history.has_memory(gpa) => false,
            (Observed::Reached { gpa, .. }, _) => {
                let is_allowed = self.cpus[cpu].may_reach(&self.history, la, access, privilege, gpa);
                self.nr_stale += u64::from(is_allowed && walk.end != End::Reached { gpa });
                is_allowed
            }
            _ => false,
        };
        assert!(
            is_fresh,
            "CPU {cpu} in {:?} did {access:?} as {privilege:?} at {la:#x}: {observed:x?}; the page tables lead to {:x?} by {:x?}; {:x?}",
            self.cpus[cpu].mode(),
            walk.end,
            walk.steps.iter().chain(&walk.bad).map(|step| (step.gpa, self.history.read(step.gpa))).collect::<Vec<_>>(),
            self.cpus[cpu].registers,
        );
        if let Observed::Fault { .. } = observed {
            let now = self.history.tick();
            self.cpus[cpu].page_fault(la, now);
        }
    }

    /// Checks all memory, or `page` alone.
    pub fn check_memory(&self, world: &World, page: Option<u64>) {
        let pages = page.map_or(0..NR_GFNS as u64, |page| page..page + 1);
        for gfn in pages.filter(|&gfn| self.history.has_memory(gfn << 12)) {
            for (inside, &expected) in self.history.page(gfn).iter().enumerate() {
                let gpa = (gfn << 12) + 8 * inside as u64;
                let found = world.word(gpa).unwrap().load(Ordering::SeqCst);
                assert_eq!(found, expected, "the guest's memory at {gpa:#x} ({found:#x}, not {expected:#x})");
            }
        }
    }

    /// Checks the pages that a harvest of a memslot at `first_gfn` has reported: all written pages
    /// must be among them.
    pub fn check_harvest(&mut self, first_gfn: u64, nr_pages: u64, reported: &BTreeSet<u64>) {
        for gfn in first_gfn..first_gfn + nr_pages {
            assert!(!self.dirty.remove(&gfn) || reported.contains(&gfn), "page {gfn:#x} was written, and not reported");
        }
    }

    /// MOV to CR3.
    pub fn load_cr3(&mut self, cpu: usize, value: u64) -> Executed {
        let now = self.history.tick();
        let registers = self.cpus[cpu].registers;
        let new = PagingRegisters { cr3: value, ..registers };
        if PagingMode::of(&new) == PagingMode::Pae && self.has_bad_pdpte(&new) {
            return Executed::GeneralProtection;
        }
        let cpu = &mut self.cpus[cpu];
        let mode = cpu.mode();
        let mut cr3 = value;
        if mode.is_long() {
            let keeps = cpu.has_pcids() && value >> 63 == 1;
            cr3 = if keeps { value & !(1 << 63) } else { value };
            if cr3 >> PHYSICAL_BITS != 0 {
                return Executed::GeneralProtection;
            }
            if !keeps {
                let pcid = if cpu.has_pcids() { (cr3 & 0xfff) as u16 } else { 0 };
                cpu.flush_context(pcid, now);
            }
        } else {
            cpu.flush_context(0, now);
        }
        cpu.registers.cr3 = cr3;
        cpu.root_loaded(now);
        Executed::Done
    }

    fn has_bad_pdpte(&self, registers: &PagingRegisters) -> bool {
        has_bad_pdpte(registers, |gpa| self.history.read(gpa))
    }

    /// The CPU is reset, or restored.
    pub fn set_registers(&mut self, cpu: usize, new: PagingRegisters) {
        let now = self.history.tick();
        let cpu = &mut self.cpus[cpu];
        cpu.registers = new;
        cpu.flush_all(now);
        cpu.root_loaded(now);
    }

    /// MOV to CR0 and CR4, WRMSR of EFER; only PDPTEs can make the values invalid.
    pub fn write_register(&mut self, cpu: usize, register: PagingRegister, value: u64) -> Executed {
        let old = self.cpus[cpu].registers;
        let new = old.with(register, value);
        if loads_pdptes(&old, &new) && self.has_bad_pdpte(&new) {
            return Executed::GeneralProtection;
        }
        self.registers_written(cpu, new);
        Executed::Done
    }

    /// "Operations that Invalidate TLBs and Paging-Structure Caches" has what such an instruction
    /// flushes.
    pub fn registers_written(&mut self, cpu: usize, new: PagingRegisters) {
        let now = self.history.tick();
        let cpu = &mut self.cpus[cpu];
        let old = cpu.registers;
        let changed = |bits: u64, old: u64, new: u64| (old ^ new) & bits != 0;
        // A change of the mode goes through paging off.
        let is_everything = changed(CR0_PG, old.cr0, new.cr0)
            || changed(CR4_PGE | CR4_PAE | CR4_PSE | CR4_LA57, old.cr4, new.cr4)
            || changed(EFER_LME | EFER_NXE, old.efer, new.efer)
            || old.cr4 & !new.cr4 & CR4_PCIDE != 0;
        let old_pcid = cpu.pcid();
        cpu.registers = new;
        if is_everything {
            cpu.flush_all(now);
        } else if new.cr4 & !old.cr4 & CR4_SMEP != 0 {
            cpu.flush_context(old_pcid, now);
        }
        cpu.root_loaded(now);
    }

    pub fn invlpg(&mut self, cpu: usize, la: u64) {
        let now = self.history.tick();
        let cpu = &mut self.cpus[cpu];
        cpu.flush_page(cpu.pcid(), la, now);
        cpu.flush_global_page(la, now);
    }

    pub fn invpcid(&mut self, cpu: usize, kind: u64, [pcid, la]: [u64; 2]) -> Executed {
        let now = self.history.tick();
        let cpu = &mut self.cpus[cpu];
        let is_canonical = match cpu.mode() {
            PagingMode::FourLevel => (la as i64) << 16 >> 16 == la as i64,
            PagingMode::FiveLevel => (la as i64) << 7 >> 7 == la as i64,
            _ => true,
        };
        let bad_pcid = pcid >> 12 != 0 || kind < 2 && pcid != 0 && !cpu.has_pcids();
        if kind > 3 || bad_pcid || kind == 0 && !is_canonical {
            return Executed::GeneralProtection;
        }
        match kind {
            0 => cpu.flush_page(pcid as u16, la, now),
            1 => cpu.flush_context(pcid as u16, now),
            2 => cpu.flush_all(now),
            _ => cpu.flush_all_but_global(now),
        }
        Executed::Done
    }

    /// The page at `gfn` has memory from now on that holds `contents`, or none.
    pub fn set_memory(&mut self, gfn: u64, contents: Option<&[u64]>) {
        assert!(contents.is_none_or(|contents| contents.len() == WORDS));
        self.dirty.remove(&gfn);
        self.history.set_memory(gfn, contents);
    }
}
