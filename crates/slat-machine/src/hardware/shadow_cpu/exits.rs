//! The guest's instructions that exit to the hypervisor, and the counts of all exits.

use slat::shadow::{Gva, PagingRegister, PagingRegisters, Privilege};
use slat::{Gpa, Outcome};

use super::{CpuError, NeededRights, ShadowCpu, ShadowExit, ShadowHandler};
use crate::hardware::cpu::CR3_KEEP;
use crate::hardware::walk::guest::GuestFault;

counters! {
    /// The counts of a CPU.
    pub struct ShadowCpuCounters {
        /// Accesses that completed in the guest: all but emulated writes.
        nr_accesses: u64,
        /// Those of them that were reads and fetches.
        nr_reads: u64,
        /// Look-ups for which the TLB had no usable entry.
        nr_tlb_misses: u64,
        /// Walks of the shadow page tables.
        nr_walks: u64,
        /// Exits for page faults.
        nr_page_fault_exits: u64,
        /// Exits for writes to CR3.
        nr_cr3_exits: u64,
        /// Exits for INVLPG.
        nr_invlpg_exits: u64,
        /// Exits for INVPCID.
        nr_invpcid_exits: u64,
        /// Exits for writes to CR0, CR4 and EFER.
        nr_register_exits: u64,
        /// Entries to the guest.
        nr_entries: u64,
        /// Writes that the hypervisor did for the guest.
        nr_emulated_writes: u64,
        /// Accesses started over because the translation changed meanwhile.
        nr_restarts: u64,
        /// Flushes of the flush domain that the CPU has caught up with.
        nr_flushes_seen: u64,
        /// Times that it dropped its whole TLB for those.
        nr_full_drops: u64,
        /// Those of these times at which it was in the guest: on hardware an interrupt, and so an
        /// exit, which does not count as an exit here.
        nr_interruptions: u64,
        /// Translations that it dropped from its TLB for those.
        nr_translations_dropped: u64,
        /// Entries with a flush of one address.
        nr_page_flushes: u64,
        /// Entries with a flush of the entry's PCID.
        nr_context_flushes: u64,
        /// Entries with a flush of all PCIDs.
        nr_all_flushes: u64,
    }
}

impl ShadowCpuCounters {
    /// Exits of all kinds.
    pub fn nr_exits(&self) -> u64 {
        self.nr_page_fault_exits
            + self.nr_cr3_exits
            + self.nr_invlpg_exits
            + self.nr_invpcid_exits
            + self.nr_register_exits
    }
}

impl<V: ShadowHandler> ShadowCpu<V> {
    /// MOV to CR0, CR3 or CR4, or WRMSR of IA32_EFER. Of CR3, with CR4.PCIDE, bit 63 allows the CPU
    /// to keep translations of the PCID.
    ///
    /// # Errors
    /// [`CpuError`]: nothing has changed.
    pub fn write_register(&mut self, register: PagingRegister, value: u64) -> Result<(), CpuError> {
        self.begin_exit()?;
        let (count, kept) = match register {
            PagingRegister::Cr3 => (&mut self.counters.nr_cr3_exits, value & !CR3_KEEP),
            _ => (&mut self.counters.nr_register_exits, value),
        };
        *count += 1;
        self.exit(ShadowExit::WriteRegister(register, value))?;
        self.now_has(self.registers.with(register, kept));
        Ok(())
    }

    /// INVLPG.
    ///
    /// # Errors
    /// [`CpuError`].
    pub fn invlpg(&mut self, gva: Gva) -> Result<(), CpuError> {
        self.begin_exit()?;
        self.counters.nr_invlpg_exits += 1;
        self.exit(ShadowExit::Invlpg(gva))
    }

    /// INVPCID of type `kind`. The descriptor's two words are the PCID and the linear address.
    ///
    /// # Errors
    /// [`CpuError`]: nothing was invalidated.
    pub fn invpcid(&mut self, kind: u64, descriptor: [u64; 2]) -> Result<(), CpuError> {
        self.begin_exit()?;
        self.counters.nr_invpcid_exits += 1;
        self.exit(ShadowExit::Invpcid(kind, descriptor))
    }

    /// Sets all registers at once, for the hypervisor: the start or restoration of a guest.
    ///
    /// # Errors
    /// [`CpuError`]: nothing has changed.
    pub fn set_registers(&mut self, registers: PagingRegisters) -> Result<(), CpuError> {
        self.loaded = None;
        self.exit(ShadowExit::SetRegisters(registers))?;
        self.now_has(registers);
        Ok(())
    }

    fn now_has(&mut self, registers: PagingRegisters) {
        self.registers = registers;
        self.needed = NeededRights::new(registers, self.privilege);
    }

    /// Leaves the guest at a supervisor instruction. The guest must be entered first.
    fn begin_exit(&mut self) -> Result<(), CpuError> {
        if self.privilege == Privilege::User {
            return Err(GuestFault::GeneralProtection.into());
        }
        if self.loaded.is_none() {
            self.enter()?;
        }
        self.loaded = None;
        Ok(())
    }

    /// Has the hypervisor do the write, after a page fault.
    #[cold]
    #[inline(never)]
    pub(super) fn emulate_write(&mut self, gpa: Gpa, value: u64) -> Result<(), CpuError> {
        self.exit(ShadowExit::WriteTable(gpa, value))?;
        self.counters.nr_emulated_writes += 1;
        Ok(())
    }

    fn exit(&mut self, exit: ShadowExit) -> Result<(), CpuError> {
        match self.handler.handle_exit(exit)? {
            Outcome::Resume => Ok(()),
            Outcome::Exit(exit) => Err(exit.into()),
        }
    }
}
