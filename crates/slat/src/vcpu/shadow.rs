//! Shadow paging on a vCPU: the operations for which its CPU exits, and what the CPU loads before
//! it runs the guest again ([`Vcpu::entry`]).

#![expect(unsafe_code, reason = "the vCPU's participant is kept alive by its VM")]

use super::Vcpu;
use arrayvec::ArrayVec;

use crate::addr::{Access, Gpa, Gva, PAGE_SIZE};
use crate::error::FaultError;
use crate::exit::{Exit, Outcome};
use crate::format::Npt;
use crate::host::Host;
use crate::registers::{GuestAccess, GuestEntry, PagingRegister, PagingRegisters};
use crate::shadow::guest::{GeneralProtection, GuestMode};
use crate::shadow::roots::Roots;
use crate::shadow::walk::{MAX_TABLES, Step};
use crate::shadow::{self, Mmu};
use crate::stats::Counter;
use crate::table::retire::Participant;

/// Largest emulated write in bytes.
const MAX_WRITE_BYTES: usize = 64;

/// How often a fault starts over before the guest resumes and faults again.
const MAX_TURNS: u32 = 256;

impl<H: Host> Vcpu<H, Npt> {
    /// The shadow page tables, and this vCPU's roots.
    #[inline]
    fn shadow(&mut self) -> Result<(Mmu<'_, H>, &mut Roots), FaultError> {
        // SAFETY: `self.vm` keeps the VM alive, and with it the epochs that the participant came
        // from.
        let participant: &Participant = unsafe { self.participant.get() };
        // SAFETY: it came from the derived tables of this tree.
        unsafe { shadow::of_vcpu(&self.vm.tree, participant, self.derived.as_mut()) }.ok_or(FaultError::NotShadow)
    }

    /// The guest's paging registers, with their latest values.
    ///
    /// # Errors
    /// [`FaultError::NotShadow`].
    pub fn paging_registers(&self) -> Result<PagingRegisters, FaultError> {
        let roots = self.derived.as_ref().and_then(|state| state.downcast_ref::<Roots>());
        roots.map(Roots::registers).ok_or(FaultError::NotShadow)
    }

    /// Emulates the guest's write of `value` to CR0, CR4 or EFER (MOV to CR0, MOV to CR4, WRMSR).
    /// All that the CPU has cached is flushed. CR3 is passed on to [`load_cr3`](Vcpu::load_cr3).
    ///
    /// The rules of these instructions hold as far as they concern paging (Intel SDM vol. 3A,
    /// 4.1.2, 4.4.1, 4.10.1). A value that the register cannot have is [`Exit::GeneralProtection`],
    /// and nothing has changed. The caller refuses other reserved bits, and NW without CD in CR0.
    ///
    /// If the write loads PAE's PDPTEs, a reserved bit in one of them is refused, too. To read
    /// them, the call may block as [`handle_fault`](Vcpu::handle_fault) does, and while their page
    /// is being invalidated. It may also exit as that does. Then nothing has changed, and the guest
    /// executes the instruction again.
    ///
    /// # Errors
    /// [`FaultError::NotShadow`]. If PDPTEs are loaded: [`FaultError::NoGuestMemory`] and those of
    /// [`handle_fault`](Vcpu::handle_fault).
    pub fn write_paging_register(&mut self, register: PagingRegister, value: u64) -> Result<Outcome, FaultError> {
        if register == PagingRegister::Cr3 {
            return self.load_cr3(value);
        }
        let (_, roots) = self.shadow()?;
        let Ok(new) = roots.check_write(register, value) else {
            return Ok(Outcome::Exit(Exit::GeneralProtection));
        };
        if new.loads_pdptes {
            match self.check_pdptes(new.mode, new.registers.cr3)? {
                Outcome::Resume => {}
                exit => return Ok(exit),
            }
        }
        let (mmu, roots) = self.shadow()?;
        roots.set_registers(mmu, new.registers, new.mode);
        Ok(Outcome::Resume)
    }

    /// Restores the registers of a vCPU from a snapshot or for a reset. All that the CPU has cached
    /// is flushed. PAE's PDPTEs are not checked, because memory may not be there yet.
    ///
    /// # Errors
    /// [`FaultError::NotShadow`]; [`FaultError::BadPagingRegister`] if no vCPU can have these
    /// registers together. Nothing has changed then.
    pub fn set_paging_registers(&mut self, registers: PagingRegisters) -> Result<(), FaultError> {
        let (mmu, roots) = self.shadow()?;
        roots.restore(mmu, registers)
    }

    /// Checks the PDPTEs that CR3's value `cr3` refers to: a reserved bit in one is #GP. Without
    /// memory there, nothing is checked, and the next walk exits.
    fn check_pdptes(&mut self, mode: GuestMode, cr3: u64) -> Result<Outcome, FaultError> {
        let gpa = mode.root_table(cr3);
        loop {
            let (mmu, _) = self.shadow()?;
            match mmu.has_bad_pdpte(mode, gpa)? {
                Some(true) => return Ok(Outcome::Exit(Exit::GeneralProtection)),
                Some(false) => return Ok(Outcome::Resume),
                None => {}
            }
            match self.handle_fault(gpa, Access::Read)? {
                Outcome::Resume => {}
                Outcome::Exit(Exit::Mmio { .. }) => return Ok(Outcome::Resume),
                exit => return Ok(exit),
            }
        }
    }

    /// Emulates the guest's load of CR3 with `value`: the address of a page table, the PCID if
    /// PCIDs are on (bits 11 to 0), and bit 63 if nothing is to be flushed (Intel SDM vol. 2B,
    /// "MOV - Move to/from Control Registers").
    ///
    /// A switch without a flush to a root that the vCPU remembers takes no lock. It flushes if the
    /// root that it leaves was invalidated in the meantime. With PAE paging the PDPTEs are checked
    /// as by [`write_paging_register`](Vcpu::write_paging_register).
    ///
    /// # Errors
    /// [`FaultError::NotShadow`]; with PAE paging [`FaultError::NoGuestMemory`] and those of
    /// [`handle_fault`](Vcpu::handle_fault).
    ///
    /// # Example
    /// ```
    /// # mod host { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/doc_host.rs")); }
    /// # use host::*;
    /// use slat::*;
    /// use std::sync::Arc;
    /// use slat::shadow::*;
    /// # fn main() -> Result<(), Error> {
    /// let paging = ShadowPaging { strategy: ShadowStrategy::PcidTagged, ..ShadowPaging::default() };
    /// let vm = Arc::new(Vm::with_shadow_paging(Heap, Config::default(), paging)?);
    /// vm.set_user_memory_region(region(MemoryRegionFlags::empty(), 1 << 20))?;
    /// let mut vcpu = vm.create_vcpu()?;
    /// # for root in [0x1000_u64, 0x5000] {
    /// #     for level in 0..4 {
    /// #         let (at, next) = (root + level * 0x1000, if level < 3 { root + (level + 1) * 0x1000 } else { 0x9000 });
    /// #         assert_eq!(vcpu.write_guest_table(Gpa(at), &(next | 0b111).to_le_bytes())?, Outcome::Resume);
    /// #     }
    /// # }
    /// // The guest has turned long mode on, with PCIDs (CR4.PAE and CR4.PCIDE), and page tables at 0x1000.
    /// let registers = PagingRegisters { cr0: 1 << 31 | 1, cr3: 0x1000, cr4: 1 << 5 | 1 << 17, efer: 1 << 8 };
    /// vcpu.set_paging_registers(registers)?;
    /// let entry = vcpu.entry()?;
    /// // It switches to the page tables at 0x5000, and back: the root is remembered, and nothing is built.
    /// assert_eq!(vcpu.load_cr3(0x5000)?, Outcome::Resume);
    /// assert_ne!(vcpu.entry()?.root, entry.root);
    /// let built = vm.stats().shadow_pages_built;
    /// assert_eq!(vcpu.load_cr3(1 << 63 | 0x1000)?, Outcome::Resume);
    /// assert_eq!((vcpu.entry()?.root, vm.stats().shadow_pages_built), (entry.root, built));
    /// # Ok(())
    /// # }
    /// ```
    #[inline]
    pub fn load_cr3(&mut self, value: u64) -> Result<Outcome, FaultError> {
        let (mmu, roots) = self.shadow()?;
        if let Some(mode) = roots.pae() {
            return self.load_pae_cr3(mode, value);
        }
        Ok(or_general_protection(roots.load_cr3(mmu, value)))
    }

    #[cold]
    fn load_pae_cr3(&mut self, mode: GuestMode, value: u64) -> Result<Outcome, FaultError> {
        match self.check_pdptes(mode, value)? {
            Outcome::Resume => {}
            exit => return Ok(exit),
        }
        let (mmu, roots) = self.shadow()?;
        Ok(or_general_protection(roots.load_cr3(mmu, value)))
    }

    /// Emulates the guest's INVLPG for `gva`.
    ///
    /// # Errors
    /// [`FaultError::NotShadow`].
    pub fn invlpg(&mut self, gva: Gva) -> Result<Outcome, FaultError> {
        let (mmu, roots) = self.shadow()?;
        roots.invalidate_page(mmu, gva);
        Ok(Outcome::Resume)
    }

    /// Emulates the guest's INVPCID of type `kind` with `descriptor`: the PCID, and the address
    /// (Intel SDM vol. 2A, "INVPCID").
    ///
    /// # Errors
    /// [`FaultError::NotShadow`].
    pub fn invpcid(&mut self, kind: u64, descriptor: [u64; 2]) -> Result<Outcome, FaultError> {
        let (mmu, roots) = self.shadow()?;
        Ok(or_general_protection(roots.invalidate_pcid(mmu, kind, descriptor)))
    }

    /// What the CPU loads and flushes before it runs the guest. Call it each time before the CPU
    /// enters the guest, and carry the flush out: it is named once.
    ///
    /// The root is not freed while the CPU is in the guest, also if another thread flushes
    /// meanwhile. Only this vCPU's own calls, and its drop, end its use.
    ///
    /// # Errors
    /// [`FaultError::NotShadow`], [`FaultError::OutOfMemory`].
    #[inline]
    pub fn entry(&mut self) -> Result<GuestEntry, FaultError> {
        let (mmu, roots) = self.shadow()?;
        Ok(roots.entry(mmu)?)
    }

    /// Handles a page fault that the CPU took on the shadow page tables: the guest did `access` at
    /// `gva`.
    ///
    /// It blocks as [`handle_fault`](Vcpu::handle_fault) does. It waits neither for another
    /// thread's flush nor for a thread that works on the same guest frame or shadow page: it
    /// resumes the guest, which faults again. So it is while an emulated write to a page table that
    /// it needs is under way. It does wait for such threads where it builds the root, or evicts
    /// shadow pages because all are in use.
    ///
    /// # Errors
    /// [`FaultError::NotShadow`], [`FaultError::NoGuestMemory`], and those of
    /// [`handle_fault`](Vcpu::handle_fault). [`FaultError::OutOfMemory`] also if vCPUs in different
    /// address spaces use all shadow pages
    /// ([`ShadowPaging::max_pages`](crate::shadow::ShadowPaging::max_pages)). Nothing has changed
    /// for the guest.
    ///
    /// # Example
    /// ```
    /// # mod host { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/doc_host.rs")); }
    /// # use host::*;
    /// use slat::*;
    /// use std::sync::Arc;
    /// use slat::shadow::*;
    /// # fn main() -> Result<(), Error> {
    /// let vm = Arc::new(Vm::with_shadow_paging(Heap, Config::default(), ShadowPaging::default())?);
    /// vm.set_user_memory_region(region(MemoryRegionFlags::empty(), 1 << 20))?;
    /// let mut vcpu = vm.create_vcpu()?;
    /// // The guest's page tables, from 0x1000 on, map page 0 of its address space to frame 9, read-only.
    /// for (at, next) in [(0x1000_u64, 0x2000_u64), (0x2000, 0x3000), (0x3000, 0x4000), (0x4000, 0x9000)] {
    ///     let entry = if next == 0x9000 { next | 0b001 } else { next | 0b011 };
    ///     assert_eq!(vcpu.write_guest_table(Gpa(at), &entry.to_le_bytes())?, Outcome::Resume);
    /// }
    /// let registers = PagingRegisters { cr0: 1 << 31 | 1 << 16 | 1, cr3: 0x1000, cr4: 1 << 5, efer: 1 << 8 };
    /// vcpu.set_paging_registers(registers)?;
    /// let read = GuestAccess { access: Access::Read, privilege: Privilege::Supervisor };
    /// assert_eq!(vcpu.handle_page_fault(Gva(0x10), read)?, Outcome::Resume);
    /// // A write is the guest's own fault: present, a write.
    /// let write = GuestAccess { access: Access::Write, ..read };
    /// let exit = Exit::PageFault { gva: Gva(0x10), error_code: 0b11 };
    /// assert_eq!(vcpu.handle_page_fault(Gva(0x10), write)?, Outcome::Exit(exit));
    /// # Ok(())
    /// # }
    /// ```
    pub fn handle_page_fault(&mut self, gva: Gva, access: GuestAccess) -> Result<Outcome, FaultError> {
        let (mmu, roots) = self.shadow()?;
        mmu.count(Counter::PageFaults);
        if !roots.is_canonical(gva) {
            return Ok(Outcome::Exit(Exit::GeneralProtection));
        }
        let mut unmarkable = ArrayVec::<_, MAX_TABLES>::new();
        for _ in 0..MAX_TURNS {
            let (mmu, roots) = self.shadow()?;
            let step = match roots.view(mmu, gva, &unmarkable)? {
                Ok(view) => mmu.serve(&view, gva, access)?,
                Err(table) => Step::MapTable(table),
            };
            match step {
                Step::Done => return Ok(Outcome::Resume),
                Step::Again => {
                    mmu.count(Counter::Retries);
                    // Another thread may be in the middle of a change.
                    mmu.host().yield_now();
                }
                Step::Later => {
                    mmu.count(Counter::Retries);
                    mmu.host().yield_now();
                    return Ok(Outcome::Resume);
                }
                Step::Exit(exit) => {
                    if let Exit::PageFault { gva, .. } = exit {
                        let (mmu, roots) = self.shadow()?;
                        if roots.page_faulted(mmu, gva).is_err() {
                            mmu.count(Counter::Retries);
                            mmu.host().yield_now();
                            return Ok(Outcome::Resume);
                        }
                    }
                    return Ok(Outcome::Exit(exit));
                }
                Step::Map(gpa, access) => match self.handle_fault(gpa, access)? {
                    Outcome::Resume => {}
                    exit => return Ok(exit),
                },
                Step::MapTable(gpa) => match self.handle_fault(gpa, Access::Read)? {
                    Outcome::Resume => {}
                    Outcome::Exit(Exit::Mmio { gpa, .. }) => return Ok(Outcome::Exit(Exit::TableMmio { gva, gpa })),
                    exit => return Ok(exit),
                },
                Step::MapMarked(gpa) => match self.handle_fault(gpa, Access::Write)? {
                    Outcome::Resume => {}
                    // More of them than a walk has: page tables are being exchanged during the
                    // walk.
                    Outcome::Exit(Exit::Mmio { .. }) if !unmarkable.is_full() => unmarkable.push(gpa.gfn()),
                    Outcome::Exit(Exit::Mmio { .. }) => return Ok(Outcome::Exit(Exit::TableMmio { gva, gpa })),
                    exit => return Ok(exit),
                },
            }
        }
        Ok(Outcome::Resume)
    }

    /// Makes the write that the guest is about to make at `gpa` ([`Exit::EmulateWrite`]). It has 1
    /// to 64 bytes, none beyond the page. The page counts as written. Shadow PTEs that were made of
    /// the old values are removed first.
    ///
    /// It blocks as [`handle_fault`](Vcpu::handle_fault) does, in [`Host::flush`], and while the
    /// page is being invalidated ([`Vm::invalidate_range`](crate::Vm::invalidate_range)). A thread
    /// that holds that invalidation must not call it.
    ///
    /// # Errors
    /// [`FaultError::NotShadow`], [`FaultError::BadWrite`], [`FaultError::NoGuestMemory`], and
    /// those of [`handle_fault`](Vcpu::handle_fault). Nothing was written then.
    pub fn write_guest_table(&mut self, gpa: Gpa, bytes: &[u8]) -> Result<Outcome, FaultError> {
        self.shadow()?;
        let len = bytes.len();
        if len == 0 || len > MAX_WRITE_BYTES || gpa.0 % PAGE_SIZE + len as u64 > PAGE_SIZE {
            return Err(FaultError::BadWrite { gpa, len });
        }
        loop {
            match self.handle_fault(gpa, Access::Write)? {
                Outcome::Resume => {}
                exit => return Ok(exit),
            }
            let (mmu, _) = self.shadow()?;
            if mmu.emulate_write(gpa, bytes)? {
                return Ok(Outcome::Resume);
            }
        }
    }
}

fn or_general_protection(done: Result<(), GeneralProtection>) -> Outcome {
    match done {
        Ok(()) => Outcome::Resume,
        Err(GeneralProtection) => Outcome::Exit(Exit::GeneralProtection),
    }
}
