//! A CPU without a hypervisor: it walks the guest's page tables in plain memory and caches what it
//! finds, for as long as the manual allows.
//!
//! The kernel is tested on it first, and its behaviour under shadow paging is compared with that on
//! this CPU. It never evicts anything, so that every missing flush of the kernel shows. It caches
//! translations, of 4 KiB, and directory entries of level 2 (*paging-structure caches*), both by
//! PCID; a page fault drops what it has for the address. Tests of the kernel's checks have it leave
//! out a rule ([`Fault`]).
//!
//! Sources: Intel SDM vol. 3A, "4-level paging", "Access rights", "Page-fault exceptions",
//! "Process-Context Identifiers", "Invalidation of TLBs and paging-structure caches".

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use slat::shadow::{Gva, PagingRegister, Privilege};
use slat::{Access, Gfn, Gpa, Hpa};

use super::address_space::error_code;
use super::cpu::{
    CR0_PG, CR3_NO_FLUSH, CR3_PCID, CR4_PCIDE, CR4_PGE, CR4_SMAP, CR4_SMEP, EFER_NXE, ERROR_PRESENT, INVPCID_ADDRESS,
    INVPCID_ALL, INVPCID_ALL_NON_GLOBAL, INVPCID_CONTEXT, KernelGuestCpu,
};
use super::layout::{ACCESSED, ADDRESS, DIRTY, GLOBAL, NO_EXECUTE, PAGE, PRESENT, USER, WRITABLE, index};
use crate::hardware::cpu::CpuError;
use crate::hardware::walk::guest::GuestFault;

/// Memory from guest-physical 0 on, zero at first. Clones are the same memory.
#[derive(Clone, Debug)]
pub struct PlainMemory(Arc<[AtomicU64]>);

impl PlainMemory {
    /// Makes `memory_bytes` of it.
    pub fn new(memory_bytes: u64) -> PlainMemory {
        PlainMemory((0..memory_bytes / 8).map(|_| AtomicU64::new(0)).collect())
    }

    /// A guest-physical address is the host's.
    fn word(&self, gpa: u64) -> Result<&AtomicU64, CpuError> {
        let word = gpa.is_multiple_of(8).then(|| self.0.get((gpa / 8) as usize)).flatten();
        word.ok_or(CpuError::NoMemory { gpa: Gpa(gpa), hpa: Hpa(gpa) })
    }
}

/// The result of a walk to a page or a page-table page: the rights of all PTEs on the way.
#[derive(Clone, Copy, Debug)]
struct Translation {
    /// Of 4 KiB; or the page-table page, for a directory entry of level 2.
    frame_gpa: u64,
    /// WRITABLE and USER if all PTEs have them, NO_EXECUTE if one has it.
    rights: u64,
    is_dirty: bool,
}

/// The cached translations of a PCID.
#[derive(Clone, Debug, Default)]
struct Context {
    /// By page.
    pages: HashMap<u64, Translation>,
    /// By page, less 9 bits.
    tables: HashMap<u64, Translation>,
}

impl Context {
    fn drop_page(&mut self, page: u64) {
        self.pages.remove(&page);
        self.tables.remove(&(page >> 9));
    }
}

/// What a CPU leaves out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    Nothing,
    Invlpg,
    FlushOfCr3,
    /// Of this type.
    Invpcid(u64),
    /// Once user mode has written: at the start the register is set, later it flushes.
    FlushOfCr4,
    NoExecute,
    Smap,
    /// Flushes more than it must: this one is correct.
    KeepsNothing,
    /// One of so many writes of user mode.
    LosesWrites(u64),
}

/// The CPU. Clones have the same memory.
#[derive(Clone, Debug)]
pub struct PlainCpu {
    pub(super) fault: Fault,
    /// Writes of user mode.
    nr_writes: u64,
    memory: PlainMemory,
    privilege: Privilege,
    cr0: u64,
    cr3: u64,
    cr4: u64,
    efer: u64,
    contexts: HashMap<u64, Context>,
    /// Global pages.
    globals: HashMap<u64, Translation>,
}

impl PlainCpu {
    /// After reset: paging is off.
    pub fn new(memory: PlainMemory) -> PlainCpu {
        PlainCpu {
            fault: Fault::Nothing,
            nr_writes: 0,
            memory,
            privilege: Privilege::Supervisor,
            cr0: 0,
            cr3: 0,
            cr4: 0,
            efer: 0,
            contexts: HashMap::new(),
            globals: HashMap::new(),
        }
    }

    fn pcid(&self) -> u64 {
        if self.cr4 & CR4_PCIDE != 0 { self.cr3 & CR3_PCID } else { 0 }
    }

    fn context(&mut self) -> &mut Context {
        let pcid = self.pcid();
        self.contexts.entry(pcid).or_default()
    }

    fn flush_everything(&mut self) {
        self.contexts.clear();
        self.globals.clear();
    }

    /// Whether `rights` allow the access. CR0.WP is set.
    fn is_allowed(&self, rights: u64, access: Access) -> bool {
        let is_user_page = rights & USER != 0;
        let privilege = match (self.privilege, access) {
            (Privilege::User, _) => is_user_page,
            (_, Access::Execute | Access::ExecuteUser) => !is_user_page || self.cr4 & CR4_SMEP == 0,
            (Privilege::Supervisor, _) => !is_user_page || self.cr4 & CR4_SMAP == 0 || self.fault == Fault::Smap,
            (Privilege::SupervisorWithAc, _) => true,
        };
        privilege
            && match access {
                Access::Read => true,
                Access::Write => rights & WRITABLE != 0,
                Access::Execute | Access::ExecuteUser => {
                    rights & NO_EXECUTE == 0 || self.efer & EFER_NXE == 0 || self.fault == Fault::NoExecute
                }
            }
    }

    /// The word at `gva`, for `access`.
    fn translate(&mut self, gva: Gva, access: Access) -> Result<&AtomicU64, CpuError> {
        if self.cr0 & CR0_PG == 0 {
            return self.memory.word(gva.0);
        }
        if !matches!(gva.0 as i64 >> 47, 0 | -1) {
            return Err(GuestFault::GeneralProtection.into());
        }
        let page = gva.0 >> Gfn::SHIFT;
        let cached = self.globals.get(&page).copied().or_else(|| self.context().pages.get(&page).copied());
        let frame_gpa =
            match cached {
                // The first write walks for the dirty bit.
                Some(cached) if access != Access::Write || cached.is_dirty => {
                    if self.is_allowed(cached.rights, access) { Ok(cached.frame_gpa) } else { Err(ERROR_PRESENT) }
                }
                _ => self.walk(gva, access)?,
            };
        match frame_gpa {
            Ok(frame_gpa) => self.memory.word(frame_gpa | (gva.0 & 0xfff)),
            Err(presence) => {
                self.globals.remove(&page);
                self.context().drop_page(page);
                Err(GuestFault::Page { gva, error_code: error_code(access, self.privilege, presence) }.into())
            }
        }
    }

    /// Walks the page tables from the lowest cached level, and caches what it finds. The inner
    /// error is a fault's bit of presence.
    fn walk(&mut self, gva: Gva, access: Access) -> Result<Result<u64, u32>, CpuError> {
        let page = gva.0 >> Gfn::SHIFT;
        let top = Translation { frame_gpa: self.cr3 & ADDRESS, rights: WRITABLE | USER, is_dirty: false };
        let known = self.context().tables.get(&(page >> 9)).copied();
        let mut level = if known.is_some() { 1 } else { 4 };
        let Translation { frame_gpa: mut table, mut rights, .. } = known.unwrap_or(top);
        loop {
            let gpa = table + 8 * index(gva.0, level);
            // Acquire: as CPUs observe each other's writes to page tables; the kernel's locks order
            // the rest.
            let entry = self.memory.word(gpa)?.load(Ordering::Acquire);
            if entry & PRESENT == 0 {
                return Ok(Err(0));
            }
            rights = (rights & entry & (WRITABLE | USER)) | ((rights | entry) & NO_EXECUTE);
            let is_leaf = level == 1 || entry & PAGE != 0;
            if is_leaf && !self.is_allowed(rights, access) {
                return Ok(Err(ERROR_PRESENT));
            }
            let marks = if is_leaf && access == Access::Write { ACCESSED | DIRTY } else { ACCESSED };
            let entry = self.memory.word(gpa)?.fetch_or(marks, Ordering::AcqRel) | marks;
            if is_leaf {
                let inner =
                    (gva.0 >> Gfn::SHIFT << Gfn::SHIFT) & ((1 << (Gfn::SHIFT + 9 * (u32::from(level) - 1))) - 1);
                let frame_gpa = entry & ADDRESS | inner;
                let found = Translation { frame_gpa, rights, is_dirty: entry & DIRTY != 0 };
                if entry & GLOBAL != 0 && self.cr4 & CR4_PGE != 0 {
                    self.globals.insert(page, found);
                } else {
                    self.context().pages.insert(page, found);
                }
                return Ok(Ok(frame_gpa));
            }
            table = entry & ADDRESS;
            level -= 1;
            if level == 1 {
                let found = Translation { frame_gpa: table, rights, is_dirty: false };
                self.context().tables.insert(page >> 9, found);
            }
        }
    }

    fn privileged(&self) -> Result<(), CpuError> {
        if self.privilege == Privilege::User { Err(GuestFault::GeneralProtection.into()) } else { Ok(()) }
    }

    fn load_cr3(&mut self, value: u64) -> Result<(), CpuError> {
        let keeps = value & CR3_NO_FLUSH != 0;
        if keeps && self.cr4 & CR4_PCIDE == 0 {
            return Err(GuestFault::GeneralProtection.into());
        }
        self.cr3 = value & !CR3_NO_FLUSH;
        if (!keeps || self.fault == Fault::KeepsNothing) && self.fault != Fault::FlushOfCr3 {
            let pcid = self.pcid();
            self.contexts.remove(&pcid);
        }
        Ok(())
    }
}

impl KernelGuestCpu for PlainCpu {
    fn read(&mut self, gva: Gva) -> Result<u64, CpuError> {
        Ok(self.translate(gva, Access::Read)?.load(Ordering::Acquire))
    }

    fn write(&mut self, gva: Gva, value: u64) -> Result<(), CpuError> {
        let is_users = self.privilege == Privilege::User;
        self.nr_writes += u64::from(is_users);
        let is_lost =
            is_users && matches!(self.fault, Fault::LosesWrites(every) if self.nr_writes.is_multiple_of(every));
        let word = self.translate(gva, Access::Write)?;
        if !is_lost {
            word.store(value, Ordering::Release);
        }
        Ok(())
    }

    fn fetch(&mut self, gva: Gva) -> Result<u64, CpuError> {
        Ok(self.translate(gva, Access::Execute)?.load(Ordering::Acquire))
    }

    fn set_privilege(&mut self, privilege: Privilege) {
        self.privilege = privilege;
    }

    fn write_register(&mut self, register: PagingRegister, value: u64) -> Result<(), CpuError> {
        self.privileged()?;
        match register {
            PagingRegister::Cr0 => self.cr0 = value,
            PagingRegister::Cr3 => return self.load_cr3(value),
            PagingRegister::Cr4 => {
                if value & !self.cr4 & CR4_PCIDE != 0 && (self.cr3 & CR3_PCID != 0 || self.cr0 & CR0_PG == 0) {
                    return Err(GuestFault::GeneralProtection.into());
                }
                self.cr4 = value;
                if self.fault == Fault::FlushOfCr4 && self.nr_writes != 0 {
                    return Ok(());
                }
            }
            PagingRegister::Efer => {
                self.efer = value;
                return Ok(());
            }
        }
        self.flush_everything();
        Ok(())
    }

    fn invlpg(&mut self, gva: Gva) -> Result<(), CpuError> {
        self.privileged()?;
        if self.fault == Fault::Invlpg {
            return Ok(());
        }
        let page = gva.0 >> Gfn::SHIFT;
        self.globals.remove(&page);
        let context = self.context();
        context.pages.remove(&page);
        context.tables.clear();
        Ok(())
    }

    fn invpcid(&mut self, kind: u64, [pcid, address]: [u64; 2]) -> Result<(), CpuError> {
        self.privileged()?;
        if pcid > CR3_PCID || (kind <= INVPCID_CONTEXT && self.cr4 & CR4_PCIDE == 0 && pcid != 0) {
            return Err(GuestFault::GeneralProtection.into());
        }
        match kind {
            _ if self.fault == Fault::Invpcid(kind) => {}
            INVPCID_ADDRESS if !matches!(address as i64 >> 47, 0 | -1) => {
                return Err(GuestFault::GeneralProtection.into());
            }
            INVPCID_ADDRESS => self.contexts.entry(pcid).or_default().drop_page(address >> Gfn::SHIFT),
            INVPCID_CONTEXT => {
                self.contexts.remove(&pcid);
            }
            INVPCID_ALL => self.flush_everything(),
            INVPCID_ALL_NON_GLOBAL => self.contexts.clear(),
            _ => return Err(GuestFault::GeneralProtection.into()),
        }
        Ok(())
    }
}
