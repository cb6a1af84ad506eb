//! The CPUs that a guest can run on: one program for hardware with a second stage and for hardware
//! without.

use slat::shadow::{Gva, PagingRegisters};

use crate::hardware::cpu::{Cpu, CpuCounters, CpuError, FaultHandler, Paging};
use crate::hardware::shadow_cpu::{self, ShadowCpu, ShadowHandler};
use crate::hardware::walk::HardwareFormat;

/// CR0.PE, CR0.WP and CR0.PG.
const CR0_PAGED: u64 = 1 << 0 | 1 << 16 | 1 << 31;
/// CR4.PAE.
const CR4_PAE: u64 = 1 << 5;
/// IA32_EFER.LME and IA32_EFER.NXE.
const EFER_LONG_MODE: u64 = 1 << 8 | 1 << 11;

/// The CPU interface of a guest, and of the thread that runs it.
pub trait GuestCpu {
    /// The handler of its exits.
    type Handler;

    /// Reads the 8 bytes at `gva`.
    ///
    /// # Errors
    /// [`CpuError`]: nothing was read.
    fn read(&mut self, gva: Gva) -> Result<u64, CpuError>;

    /// Writes the 8 bytes at `gva`.
    ///
    /// # Errors
    /// [`CpuError`]: nothing was written.
    fn write(&mut self, gva: Gva, value: u64) -> Result<(), CpuError>;

    /// Turns the guest's paging on, at supervisor privilege, with the page-table page of level 4 at
    /// `root`.
    ///
    /// # Errors
    /// [`CpuError`]: nothing has changed.
    fn turn_paging_on(&mut self, root: u64) -> Result<(), CpuError>;

    /// The handler.
    fn handler(&mut self) -> &mut Self::Handler;

    /// The CPU makes no access for a while.
    fn exit_guest_mode(&mut self);

    /// The counts so far.
    fn counters(&self) -> CpuCounters;
}

impl<V: FaultHandler, F: HardwareFormat> GuestCpu for Cpu<V, F> {
    type Handler = V;

    #[inline]
    fn read(&mut self, gva: Gva) -> Result<u64, CpuError> {
        Cpu::read(self, gva)
    }

    #[inline]
    fn write(&mut self, gva: Gva, value: u64) -> Result<(), CpuError> {
        Cpu::write(self, gva, value)
    }

    fn turn_paging_on(&mut self, root: u64) -> Result<(), CpuError> {
        self.load_cr3(root)?;
        self.set_paging(Paging::TwoDimensional);
        Ok(())
    }

    fn handler(&mut self) -> &mut V {
        Cpu::handler(self)
    }

    fn exit_guest_mode(&mut self) {
        Cpu::exit_guest_mode(self);
    }

    fn counters(&self) -> CpuCounters {
        Cpu::counters(self)
    }
}

impl<V: ShadowHandler> GuestCpu for ShadowCpu<V> {
    type Handler = V;

    #[inline]
    fn read(&mut self, gva: Gva) -> Result<u64, CpuError> {
        ShadowCpu::read(self, gva)
    }

    #[inline]
    fn write(&mut self, gva: Gva, value: u64) -> Result<(), CpuError> {
        ShadowCpu::write(self, gva, value)
    }

    fn turn_paging_on(&mut self, root: u64) -> Result<(), CpuError> {
        let registers = PagingRegisters { cr0: CR0_PAGED, cr3: root, cr4: CR4_PAE, efer: EFER_LONG_MODE };
        self.set_registers(registers)
    }

    fn handler(&mut self) -> &mut V {
        ShadowCpu::handler(self)
    }

    fn exit_guest_mode(&mut self) {
        ShadowCpu::exit_guest_mode(self);
    }

    /// Page faults count as faults; other exits are not counted.
    fn counters(&self) -> CpuCounters {
        let shadow_cpu::ShadowCpuCounters {
            nr_accesses,
            nr_reads,
            nr_tlb_misses,
            nr_walks,
            nr_page_fault_exits,
            nr_restarts,
            nr_flushes_seen,
            nr_full_drops,
            nr_translations_dropped,
            ..
        } = ShadowCpu::counters(self);
        CpuCounters {
            nr_accesses,
            nr_reads,
            nr_tlb_misses,
            nr_walks,
            nr_faults: nr_page_fault_exits,
            nr_restarts,
            nr_flushes_seen,
            nr_full_drops,
            nr_translations_dropped,
            ..CpuCounters::default()
        }
    }
}
