//! One virtual CPU of the kernel: its accesses, its entry into the kernel and its exit, the loaded
//! address space, and its flushes.

use std::sync::Arc;

use slat::Access;
use slat::shadow::{Gva, PagingRegister, Privilege};

use super::address_space::{AddressSpace, gva_of};
use super::asid::{Asids, Switch};
use super::boot::{cr4, turn_on, write_register};
use super::counters::KernelCounters;
use super::cpu::{
    CR3_NO_FLUSH, CR3_PCID, CR4_PGE, INVPCID_ADDRESS, INVPCID_ALL, INVPCID_ALL_NON_GLOBAL, INVPCID_CONTEXT,
    KernelGuestCpu,
};
use super::error::KernelError;
use super::frames::GuestFrame;
use super::layout::{ENTRY_TEXT_GVA, ENTRY_TEXT_WORD, IDLE_ROOT, TEXT_GVA, TEXT_WORD, direct, entry_data};
use super::{Isolation, Kernel, Pcids};
use crate::hardware::cpu::CpuError;

/// More pages than this are not flushed one by one.
const MAX_PAGE_FLUSHES: usize = 33;

/// How a whole address space is flushed. Both occur: Linux defers, other kernels do not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FlushAll {
    /// The kernel's PCID by a load of CR3, the user PCID at the next exit from the kernel.
    Deferred,
    /// Both by INVPCID.
    AtOnce,
}

/// Unmapped pages, which are freed when no CPU translates to them any more.
#[derive(Debug, Default)]
pub(crate) struct Gathered {
    pub(crate) pages: Vec<u64>,
    pub(crate) frames: Vec<GuestFrame>,
    pub(crate) tables: Vec<GuestFrame>,
}

/// A virtual CPU without its processes.
#[derive(Debug)]
pub(crate) struct Core<C> {
    pub(crate) kernel: Arc<Kernel>,
    pub(crate) vcpu: u16,
    pub(crate) cpu: C,
    pub(crate) asids: Asids,
    pub(crate) counters: KernelCounters,
    privilege: Privilege,
    /// Its page-table page of level 1 for temporary mappings.
    pub(crate) kernel_map_table: GuestFrame,
    /// Temporary mappings so far.
    pub(crate) nr_kernel_maps: u64,
}

impl<C: KernelGuestCpu> Core<C> {
    /// Turns paging on; the CPU is in the kernel, with no address space.
    pub(crate) fn start(kernel: Arc<Kernel>, vcpu: u16, mut cpu: C) -> Result<Core<C>, KernelError> {
        let kernel_map_table = kernel.boot(vcpu, &mut cpu)?;
        let config = kernel.config();
        turn_on(&mut cpu, config)?;
        let asids = Asids::new(config.isolation, config.pcids, GuestFrame::of(IDLE_ROOT));
        Ok(Core {
            kernel,
            vcpu,
            cpu,
            asids,
            counters: KernelCounters::default(),
            privilege: Privilege::Supervisor,
            kernel_map_table,
            nr_kernel_maps: 0,
        })
    }

    pub(crate) fn set_privilege(&mut self, privilege: Privilege) {
        self.privilege = privilege;
        self.cpu.set_privilege(privilege);
    }

    /// An access of the current privilege.
    pub(crate) fn access(&mut self, gva: Gva, access: Access, value: u64) -> Result<u64, CpuError> {
        match self.privilege {
            Privilege::User => self.counters.user_accesses += 1,
            _ => self.counters.kernel_accesses += 1,
        }
        match access {
            Access::Read => self.cpu.read(gva),
            Access::Write => self.cpu.write(gva, value).map(|()| value),
            Access::Execute | Access::ExecuteUser => self.cpu.fetch(gva),
        }
    }

    /// An access that must complete.
    fn must(&mut self, gva: Gva, access: Access, value: u64) -> Result<u64, KernelError> {
        let privilege = self.privilege;
        self.access(gva, access, value).map_err(|error| KernelError::Access { gva, access, privilege, error })
    }

    /// Reads the kernel's own memory.
    pub(crate) fn read(&mut self, gva: Gva) -> Result<u64, KernelError> {
        self.must(gva, Access::Read, 0)
    }

    /// Writes the kernel's own memory.
    pub(crate) fn write(&mut self, gva: Gva, value: u64) -> Result<(), KernelError> {
        self.must(gva, Access::Write, value).map(|_| ())
    }

    /// Compares the value that was read with the right one.
    pub(crate) fn check(&self, gva: Gva, found: u64, expected: u64) -> Result<(), KernelError> {
        if found == expected {
            return Ok(());
        }
        Err(KernelError::WrongValue { gva, privilege: self.privilege, found, expected })
    }

    /// Reads the kernel's own memory, which holds `expected`.
    pub(crate) fn read_checked(&mut self, gva: Gva, expected: u64) -> Result<(), KernelError> {
        let found = self.read(gva)?;
        self.check(gva, found, expected)
    }

    fn fetch_checked(&mut self, gva: Gva, expected: u64) -> Result<(), KernelError> {
        let found = self.must(gva, Access::Execute, 0)?;
        self.check(gva, found, expected)
    }

    pub(crate) fn load_cr3(&mut self, value: u64) -> Result<(), KernelError> {
        self.counters.cr3_loads += 1;
        self.counters.cr3_loads_no_flush += value >> 63;
        write_register(&mut self.cpu, PagingRegister::Cr3, value)
    }

    fn write_cr4(&mut self, value: u64) -> Result<(), KernelError> {
        self.counters.cr4_writes += 1;
        write_register(&mut self.cpu, PagingRegister::Cr4, value)
    }

    fn invlpg(&mut self, gva: Gva) -> Result<(), KernelError> {
        self.counters.invlpgs += 1;
        let done = self.cpu.invlpg(gva);
        done.map_err(|error| KernelError::Flush { instruction: "INVLPG", operand: gva.0, error })
    }

    fn invpcid(&mut self, kind: u64, pcid: u64, gva: Gva) -> Result<(), KernelError> {
        self.counters.invpcids += 1;
        let done = self.cpu.invpcid(kind, [pcid, gva.0]);
        done.map_err(|error| KernelError::Flush { instruction: "INVPCID", operand: pcid, error })
    }

    /// Enters the kernel from user mode, by a system call or an exception. The entry code saves
    /// `saved`, like the stack pointer, while only the entry area is mapped.
    pub(crate) fn enter_kernel(&mut self, saved: u64) -> Result<(), KernelError> {
        self.counters.kernel_entries += 1;
        self.set_privilege(Privilege::Supervisor);
        self.fetch_checked(ENTRY_TEXT_GVA, ENTRY_TEXT_WORD)?;
        self.write(entry_data(self.vcpu), saved)?;
        if self.kernel.config().isolation == Isolation::On {
            let keep = match self.kernel.config().pcids {
                Pcids::On => CR3_NO_FLUSH,
                Pcids::Off => 0,
            };
            self.load_cr3(self.asids.kernel_cr3() | keep)?;
        }
        self.fetch_checked(TEXT_GVA, TEXT_WORD)?;
        self.read_checked(entry_data(self.vcpu), saved)
    }

    /// Leaves the kernel for user mode of the loaded address space.
    pub(crate) fn leave_kernel(&mut self) -> Result<(), KernelError> {
        if self.kernel.config().isolation == Isolation::On {
            let cr3 = self.asids.take_user_cr3();
            self.load_cr3(cr3)?;
        }
        self.fetch_checked(ENTRY_TEXT_GVA, ENTRY_TEXT_WORD)?;
        self.set_privilege(Privilege::User);
        Ok(())
    }

    /// Loads the address space, in the kernel.
    pub(crate) fn switch_to(&mut self, space: &AddressSpace) -> Result<(), KernelError> {
        match self.asids.switch(space.id, space.generation, space.root) {
            Switch::Nothing => Ok(()),
            Switch::Load(cr3) => self.load_cr3(cr3),
        }
    }

    /// Flushes all of `space`: no translation may allow more than the page tables any more.
    pub(crate) fn flush_all(&mut self, space: &mut AddressSpace, how: FlushAll) -> Result<(), KernelError> {
        space.generation += 1;
        space.pages.values_mut().for_each(|page| page.may_fault = false);
        // Other CPUs, and this one if the space is not loaded, read the generation when they load
        // it.
        if self.asids.loaded() != space.id {
            return Ok(());
        }
        self.asids.flushed_to(space.generation);
        if how == FlushAll::AtOnce && self.kernel.config().pcids == Pcids::On {
            self.invpcid(INVPCID_CONTEXT, self.asids.kernel_pcid(), Gva(0))?;
            if let Some(pcid) = self.asids.user_pcid() {
                self.invpcid(INVPCID_CONTEXT, pcid, Gva(0))?;
            }
            return Ok(());
        }
        self.asids.flush_user_later();
        self.load_cr3(self.asids.kernel_cr3())
    }

    /// Flushes `pages` of `space`.
    pub(crate) fn flush_pages(&mut self, space: &mut AddressSpace, pages: &[u64]) -> Result<(), KernelError> {
        if pages.len() > MAX_PAGE_FLUSHES {
            return self.flush_all(space, FlushAll::Deferred);
        }
        space.generation += 1;
        for page in pages {
            if let Some(page) = space.pages.get_mut(page) {
                page.may_fault = false;
            }
        }
        if self.asids.loaded() != space.id {
            return Ok(());
        }
        self.asids.flushed_to(space.generation);
        for page in pages {
            self.invlpg(gva_of(*page))?;
            // Without PCIDs the last load of CR3 has dropped the user root's translations.
            if let Some(pcid) = self.asids.user_pcid() {
                debug_assert!(pcid <= CR3_PCID);
                self.invpcid(INVPCID_ADDRESS, pcid, gva_of(*page))?;
            }
        }
        Ok(())
    }

    /// Flushes the gathered pages and frees them.
    pub(crate) fn release(&mut self, space: &mut AddressSpace, gathered: Gathered) -> Result<(), KernelError> {
        let Gathered { pages, frames, tables } = gathered;
        if !tables.is_empty() {
            // CPUs cache directory entries, too, even if no page was present below.
            self.flush_all(space, FlushAll::Deferred)?;
        } else if !pages.is_empty() {
            self.flush_pages(space, &pages)?;
        }
        self.counters.tables_freed += tables.len() as u64;
        let mut free = self.kernel.frames.lock();
        tables.into_iter().chain(frames).for_each(|frame| free.release(frame));
        Ok(())
    }

    /// Flushes all of the kernel's own translations, on this CPU.
    pub(crate) fn flush_kernel(&mut self) -> Result<(), KernelError> {
        let Kernel { config, .. } = *self.kernel;
        match (config.pcids, config.isolation) {
            (Pcids::On, Isolation::On) => self.invpcid(INVPCID_ALL_NON_GLOBAL, 0, Gva(0)),
            (Pcids::On, Isolation::Off) => self.invpcid(INVPCID_ALL, 0, Gva(0)),
            (Pcids::Off, Isolation::On) => self.load_cr3(self.asids.kernel_cr3()),
            (Pcids::Off, Isolation::Off) => {
                self.write_cr4(cr4(&config) & !CR4_PGE)?;
                self.write_cr4(cr4(&config))
            }
        }
    }

    /// Allocates a frame of which all words are zero that the kernel has not written itself; those
    /// it zeroes, as it zeroes pages.
    pub(crate) fn zeroed_frame(&mut self) -> Result<GuestFrame, KernelError> {
        let frame = self.kernel.frames.lock().take().ok_or(KernelError::OutOfFrames)?;
        self.zero(frame)?;
        Ok(frame)
    }

    /// Zeroes the words of `frame` that pages use, and checks another.
    pub(crate) fn zero(&mut self, frame: GuestFrame) -> Result<(), KernelError> {
        /// Distance of the words: eight in a page.
        const DISTANCE_BYTES: u64 = 512;
        for offset in (0..slat::PAGE_SIZE).step_by(DISTANCE_BYTES as usize) {
            self.write(direct(frame.gpa() + offset), 0)?;
        }
        // Page-table pages were emptied PTE by PTE: a word that is not zero was written through a
        // stale translation.
        let word = self.counters.kernel_accesses % (slat::PAGE_SIZE / 8);
        self.read_checked(direct(frame.gpa() + 8 * word), 0)
    }
}
