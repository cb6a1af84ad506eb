//! A vCPU of the modelled machine: its hardware's TLB and page walk, its exits, and the engine's
//! vCPU behind them.
//!
//! # Implementation
//! The walk is that of EPT with accessed and dirty bits (Intel SDM vol. 3C, "EPT Translation
//! Mechanism" and "Accessed and Dirty Flags for EPT"). It reads the PTE of the lowest level as a
//! cache line of the machine. The levels above are taken as cached: a flush drops what the CPU
//! has of them, and the TLB, as a whole. To set a bit is an exchange that compares, as in hardware.

use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use slat_costed::costed::Step;
use slat_costed::error::FaultError;
use slat_costed::format::Ept;
use slat_costed::{Access, Exit, Gfn, Gpa, Hpa, Outcome, Vcpu, Vm};

use crate::arena;
use crate::host::ModelHost;
use crate::machine;
use crate::parameters::{Parameters, Ps};

/// A VM of the modelled machine.
pub(crate) type ModelVm = Vm<ModelHost, Ept>;

// Intel SDM vol. 3C, "Format of an EPT Page-Table Entry that Maps a 4-KByte Page".
const PRESENT: u64 = 0b111;
const WRITE: u64 = 1 << 1;
const MAPS_PAGE: u64 = 1 << 7;
const ACCESSED: u64 = 1 << 8;
const DIRTY: u64 = 1 << 9;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Frames of the guest, by which a page is found in a memory of `1 << 48` bytes.
const INDEX_BITS: u32 = 9;

/// The node of the page-table page with the PTE of 4 KiB for `gfn`, if there is one.
pub(crate) fn leaf_table_node(vm: &ModelVm, gfn: Gfn) -> Option<u8> {
    let (mut table, mut level) = (vm.root(), vm.root_level().0);
    while level > 1 {
        let pte = pte_of(table, level, gfn).load(Relaxed);
        if pte & PRESENT == 0 || pte & MAPS_PAGE != 0 {
            return None;
        }
        (table, level) = (Hpa(pte & ADDRESS), level - 1);
    }
    Some(arena::node_of_table(table.0 as usize) as u8)
}

/// The PTE for `gfn` in a page-table page.
fn pte_of(table: Hpa, level: u8, gfn: Gfn) -> &'static AtomicU64 {
    let index = gfn.0 >> (INDEX_BITS * u32::from(level - 1)) & ((1 << INDEX_BITS) - 1);
    arena::table_word((table.0 + index * 8) as usize)
}

/// Whether dirty bits are logged by the CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ModificationLog {
    Off,
    On,
}

/// A translation that the TLB has.
#[derive(Clone, Copy, Default)]
struct Entry {
    /// The frame of the guest and 1, or 0.
    tag: u64,
    /// How many flushes there were when it was made.
    nr_flushes: u64,
    /// The PTE.
    pte: u64,
    /// Its level.
    level: u8,
}

impl Entry {
    /// The frame behind `gfn`.
    fn frame(self, gfn: Gfn) -> u64 {
        let nr_pages = 1 << (INDEX_BITS * u32::from(self.level - 1));
        ((self.pte & ADDRESS) >> Gfn::SHIFT & !(nr_pages - 1)) | (gfn.0 & (nr_pages - 1))
    }
}

/// A vCPU with its hardware.
pub(crate) struct VirtualCpu {
    vcpu: Vcpu<ModelHost, Ept>,
    index: usize,
    tlb: Vec<Entry>,
    modification_log: ModificationLog,
    work: GuestWork,
}

/// What a vCPU and the hypervisor's own threads do beside the accesses of the engine, in
/// picoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GuestWork {
    hypervisor: Hypervisor,
    exit: Ps,
    /// Of the hypervisor, before the engine's fault.
    fault: Ps,
    /// In the lock of the VM.
    in_lock: Ps,
    /// Of the engine, for each access.
    per_access: Ps,
    tlb_hit: Ps,
    walk: Ps,
    tlb_entries: usize,
    /// Of the guest, for each page.
    page: Ps,
    /// Misses that the CPU waits for together; 0: the guest has no memory.
    memory_parallelism: u64,
}

/// What is around the engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Around {
    /// The exits, the operating system and the guest's own work.
    Host,
    /// Nothing.
    Nothing,
}

/// Whose faults these are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hypervisor {
    /// slat's: what the engine does is all.
    Slat,
    /// KVM's, as published: more work for each fault, inside its lock and outside.
    Kvm,
}

impl GuestWork {
    pub(crate) fn new(parameters: &Parameters, hypervisor: Hypervisor, around: Around) -> GuestWork {
        let Parameters { work, host, guest, kvm, .. } = parameters;
        let of_kvm = |of: Ps| if hypervisor == Hypervisor::Kvm { of } else { 0 };
        let is_engine_alone = around == Around::Nothing;
        let around = |of: Ps| if is_engine_alone { 0 } else { of };
        GuestWork {
            hypervisor,
            exit: around(host.exit.ps()),
            fault: of_kvm(kvm.fault_outside.ps()),
            in_lock: of_kvm(kvm.fault_in_lock.ps()),
            per_access: parameters.instructions(work.per_access.get()),
            // Never nothing: a guest that has all of its pages would run for ever at one time.
            tlb_hit: guest.tlb_hit.ps().max(1),
            walk: around(guest.walk.ps()),
            tlb_entries: guest.tlb_entries.whole().min(1 << 16) as usize,
            page: around(parameters.instructions(guest.page_instructions.get())),
            memory_parallelism: if is_engine_alone { 0 } else { guest.memory_parallelism.whole() },
        }
    }

    /// What the engine's accesses cost in a task of the hypervisor's own. KVM's plain work is known
    /// for each page, and comes on top.
    pub(crate) fn begin_call(&self) {
        let is_kvm = self.hypervisor == Hypervisor::Kvm;
        machine::set_engine_work(if is_kvm { 0 } else { self.per_access }, 0);
    }

    /// The plain work of KVM for so many leaf PTEs.
    pub(crate) fn of_kvm(&self, nr_leaves: u64, per_leaf: Ps) {
        if self.hypervisor == Hypervisor::Kvm {
            machine::work(nr_leaves * per_leaf);
        }
    }
}

/// What became of a walk.
enum Walked {
    /// To this PTE, of this level.
    To(u64, u8),
    /// The page tables do not allow the access.
    Forbidden,
    /// There was a flush.
    Flushed,
}

/// What became of an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Accessed {
    /// The guest made it.
    Done,
    /// User space acts first, and then the guest makes the access again.
    Exit(Exit),
}

impl VirtualCpu {
    pub(crate) fn new(
        vcpu: Vcpu<ModelHost, Ept>,
        index: usize,
        work: GuestWork,
        modification_log: ModificationLog,
    ) -> VirtualCpu {
        VirtualCpu { vcpu, index, tlb: vec![Entry::default(); work.tlb_entries], modification_log, work }
    }

    fn vm(&self) -> &Arc<ModelVm> {
        self.vcpu.vm()
    }

    /// The frame of a page, as the host has it.
    pub(crate) fn frame_of(&self, page: u64) -> u64 {
        self.vm().host().frame_of(page)
    }

    /// The guest runs on this task's CPU from now on.
    pub(crate) fn enter(&self) {
        self.vm().host().vcpus[self.index].enter_guest();
    }

    /// The guest runs no longer.
    pub(crate) fn leave(&self) {
        self.vm().host().vcpus[self.index].leave_guest();
    }

    /// The guest's instructions for a page, and the time in which its memory answers.
    pub(crate) fn touch_memory(&self, gfn: Gfn) {
        machine::work(self.work.page);
        let here = self.vm().host().node_of_cpu(machine::current_cpu());
        let home = self.vm().host().node_of_page(gfn.0).unwrap_or(here);
        if self.work.memory_parallelism != 0 {
            machine::fetch_data(usize::from(home), self.work.memory_parallelism);
        }
    }

    /// The guest accesses a page.
    ///
    /// # Errors
    /// Those of [`Vcpu::handle_fault`].
    pub(crate) fn access(&mut self, gfn: Gfn, access: Access) -> Result<Accessed, FaultError> {
        loop {
            if self.translate(gfn, access).is_some() {
                return Ok(Accessed::Done);
            }
            if let Outcome::Exit(exit) = self.fault(gfn, access)? {
                return Ok(Accessed::Exit(exit));
            }
        }
    }

    /// The exit for a fault, until the next entry.
    fn fault(&mut self, gfn: Gfn, access: Access) -> Result<Outcome, FaultError> {
        self.leave();
        machine::work(self.work.exit / 2 + self.work.fault);
        let before = machine::set_engine_work(self.work.per_access, self.work.in_lock);
        let outcome = self.vcpu.handle_fault(gfn.gpa(), access);
        machine::set_engine_work(before.0, before.1);
        self.vm().host().put_page(gfn.0);
        machine::work(self.work.exit - self.work.exit / 2);
        self.enter();
        outcome
    }

    /// The frame behind `gfn`, if the CPU has a translation that allows the access, or finds one.
    pub(crate) fn translate(&mut self, gfn: Gfn, access: Access) -> Option<u64> {
        let needed = if access == Access::Write { WRITE | DIRTY } else { 0 };
        let slot = (gfn.0 % self.tlb.len() as u64) as usize;
        loop {
            // Not ahead of the other CPUs: a flush that is earlier is seen.
            machine::settle();
            let nr_flushes = self.vm().host().nr_flushes();
            let entry = self.tlb[slot];
            if entry.tag == gfn.0 + 1 && entry.nr_flushes == nr_flushes && entry.pte & needed == needed {
                machine::work(self.work.tlb_hit);
                return Some(entry.frame(gfn));
            }
            machine::work(self.work.walk);
            match self.walk(gfn, access, nr_flushes) {
                Walked::To(pte, level) => self.tlb[slot] = Entry { tag: gfn.0 + 1, nr_flushes, pte, level },
                Walked::Flushed => {}
                Walked::Forbidden => return None,
            }
        }
    }

    /// Walks the page tables, unless there were more than `nr_flushes` flushes: the walk may have
    /// come to a page-table page that is freed, and does nothing in it.
    fn walk(&mut self, gfn: Gfn, access: Access, nr_flushes: u64) -> Walked {
        let writes = access == Access::Write;
        let (mut table, mut level) = (self.vm().root(), self.vm().root_level().0);
        loop {
            let word = pte_of(table, level, gfn);
            if level == 1 {
                machine::access(std::ptr::from_ref(word).addr(), Step::Load, Location::caller());
                if nr_flushes != self.vm().host().nr_flushes() {
                    return Walked::Flushed;
                }
            }
            let pte = word.load(Relaxed);
            if pte & PRESENT == 0 || (writes && pte & WRITE == 0) {
                return Walked::Forbidden;
            }
            if level > 1 && pte & MAPS_PAGE == 0 {
                table = Hpa(pte & ADDRESS);
                level -= 1;
                continue;
            }
            let marks = if writes { ACCESSED | DIRTY } else { ACCESSED };
            if pte & marks == marks {
                return Walked::To(pte, level);
            }
            machine::access(std::ptr::from_ref(word).addr(), Step::Rmw, Location::caller());
            if nr_flushes != self.vm().host().nr_flushes() {
                return Walked::Flushed;
            }
            // If it has changed meanwhile, the walk begins again.
            if word.compare_exchange(pte, pte | marks, Relaxed, Relaxed).is_ok() {
                if writes && pte & DIRTY == 0 {
                    self.log(gfn.gpa());
                }
                return Walked::To(pte | marks, level);
            }
            (table, level) = (self.vm().root(), self.vm().root_level().0);
        }
    }

    /// The CPU has set a dirty bit.
    fn log(&mut self, gpa: Gpa) {
        if self.modification_log == ModificationLog::Off {
            return;
        }
        let full = self.vm().host().vcpus[self.index].log(gpa);
        if let Some(written) = full {
            self.leave();
            machine::work(self.work.exit / 2);
            let before = machine::set_engine_work(self.work.per_access, 0);
            self.vcpu.log_modifications(&written);
            machine::set_engine_work(before.0, before.1);
            machine::work(self.work.exit - self.work.exit / 2);
            self.enter();
        }
    }
}
