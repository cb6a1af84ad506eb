//! The kernel's reads and writes of processes' page tables: in guest memory, through the direct
//! map, from the root down. Each PTE that is read is compared with the model.
//!
//! Under page-table isolation both roots of a process point to the same page-table pages. As in
//! Linux, the kernel's root forbids fetches there, so that an exit from the kernel without a change
//! of roots is detected.

use slat::PAGE_SIZE;

use super::address_space::{AddressSpace, Table, UserPage, gva_of};
use super::core::{Core, Gathered};
use super::cpu::KernelGuestCpu;
use super::error::KernelError;
use super::frames::GuestFrame;
use super::layout::{
    ACCESSED, DIRTY, ENTRY_ROOT_INDEX, IDLE_ROOT, KERNEL_ROOT_INDEXES, NO_EXECUTE, PRESENT, USER, WRITABLE, direct,
    index,
};
use super::{Isolation, Kernel};

/// What to do about a missing page-table page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Missing {
    Stop,
    Make,
}

/// The model's key for the page-table page of `level` on the way to `page`.
fn key(level: u8, page: u64) -> (u8, u64) {
    (level, page >> (9 * u32::from(level)))
}

impl Kernel {
    /// The PTE of `level` for the page-table page `below`. In the kernel's root, if it is one.
    fn table_entry(&self, level: u8, below: GuestFrame) -> u64 {
        let forbids = if level == 4 && self.config().isolation == Isolation::On { NO_EXECUTE } else { 0 };
        below.gpa() | PRESENT | WRITABLE | USER | forbids
    }
}

impl<C: KernelGuestCpu> Core<C> {
    /// An address space that has only the kernel's half.
    pub(crate) fn new_space(&mut self) -> Result<AddressSpace, KernelError> {
        let root = self.kernel.frames.lock().take_pair().ok_or(KernelError::OutOfFrames)?;
        self.counters.tables_allocated += 2;
        self.zero(root)?;
        self.zero(GuestFrame(root.0 + 1))?;
        for index in KERNEL_ROOT_INDEXES {
            let entry = self.read(direct(IDLE_ROOT + 8 * index))?;
            self.write(direct(root.gpa() + 8 * index), entry)?;
            if index == ENTRY_ROOT_INDEX {
                self.write(direct(root.gpa() + PAGE_SIZE + 8 * index), entry)?;
            }
        }
        Ok(AddressSpace::new(self.kernel.next_id(), root))
    }

    /// Frees the roots of `space`, which has nothing else any more and is not loaded.
    pub(crate) fn free_roots(&mut self, space: AddressSpace) -> Result<(), KernelError> {
        debug_assert!(space.pages.is_empty() && space.tables.is_empty() && self.asids.loaded() != space.id);
        for index in KERNEL_ROOT_INDEXES {
            self.write(direct(space.root.gpa() + 8 * index), 0)?;
        }
        self.write(direct(space.root.gpa() + PAGE_SIZE + 8 * ENTRY_ROOT_INDEX), 0)?;
        self.counters.tables_freed += 2;
        let mut frames = self.kernel.frames.lock();
        frames.release(space.root);
        frames.release(GuestFrame(space.root.0 + 1));
        Ok(())
    }

    /// The address of the PTE of `page`; `None` if a page-table page is missing and must not be
    /// made.
    fn find(&mut self, space: &mut AddressSpace, page: u64, missing: Missing) -> Result<Option<u64>, KernelError> {
        let gva = gva_of(page);
        let mut table = space.root;
        for level in [4, 3, 2] {
            let gpa = table.gpa() + 8 * index(gva.0, level);
            let found = self.read(direct(gpa))?;
            let known = space.tables.get(&key(level - 1, page)).map(|table| table.frame);
            let expected = known.map_or(0, |below| self.kernel.table_entry(level, below));
            if found & !ACCESSED != expected {
                return Err(KernelError::WrongEntry { gva, level, gpa, found, expected });
            }
            table = match (known, missing) {
                (Some(below), _) => below,
                (None, Missing::Stop) => return Ok(None),
                (None, Missing::Make) => self.make_table(space, page, level, gpa)?,
            };
        }
        Ok(Some(table.gpa() + 8 * index(gva.0, 1)))
    }

    /// Makes the page-table page for the PTE of `level` at `gpa`.
    fn make_table(
        &mut self,
        space: &mut AddressSpace,
        page: u64,
        level: u8,
        gpa: u64,
    ) -> Result<GuestFrame, KernelError> {
        let below = self.zeroed_frame()?;
        self.counters.tables_allocated += 1;
        let entry = self.kernel.table_entry(level, below);
        self.write(direct(gpa), entry)?;
        if level == 4 && self.kernel.config().isolation == Isolation::On {
            self.write(direct(gpa + PAGE_SIZE), entry & !NO_EXECUTE)?;
        }
        if let Some(table) = space.tables.get_mut(&key(level, page)) {
            table.nr_entries += 1;
        }
        space.tables.insert(key(level - 1, page), Table { frame: below, nr_entries: 0 });
        Ok(below)
    }

    /// Reads the PTE of `page` at `gpa`, which must be that of `known`. The accessed bit may be set
    /// without an access, the dirty bit may not.
    fn read_entry(&mut self, page: u64, gpa: u64, known: Option<&UserPage>) -> Result<u64, KernelError> {
        let found = self.read(direct(gpa))?;
        let mut expected = known.map_or(0, UserPage::entry);
        if let Some(known) = known {
            expected |= if known.is_accessed { ACCESSED } else { found & ACCESSED };
            expected |= if known.is_dirty { DIRTY } else { 0 };
        }
        if found == expected {
            return Ok(found);
        }
        Err(KernelError::WrongEntry { gva: gva_of(page), level: 1, gpa, found, expected })
    }

    /// The address and value of the PTE of `page`, which is present.
    fn present_entry(&mut self, space: &mut AddressSpace, page: u64) -> Result<(u64, u64), KernelError> {
        let gpa = self.find(space, page, Missing::Make)?.unwrap_or_default();
        let known = space.pages.get(&page).copied();
        Ok((gpa, self.read_entry(page, gpa, known.as_ref())?))
    }

    /// Compares the PTE of `page` with the model.
    pub(crate) fn check_entry(&mut self, space: &mut AddressSpace, page: u64) -> Result<(), KernelError> {
        let Some(gpa) = self.find(space, page, Missing::Stop)? else { return Ok(()) };
        let known = space.pages.get(&page).copied();
        self.read_entry(page, gpa, known.as_ref()).map(|_| ())
    }

    /// Maps `page`, which is not present, as in `new`.
    pub(crate) fn map_page(&mut self, space: &mut AddressSpace, page: u64, new: UserPage) -> Result<(), KernelError> {
        let (gpa, _) = self.present_entry(space, page)?;
        let dirty = if new.is_dirty { DIRTY } else { 0 };
        self.write(direct(gpa), new.entry() | dirty)?;
        space.pages.insert(page, new);
        if let Some(table) = space.tables.get_mut(&key(1, page)) {
            table.nr_entries += 1;
        }
        Ok(())
    }

    /// Changes the rights of `page`, which is present, to those of `new`. Flushes nothing.
    pub(crate) fn change_rights(
        &mut self,
        space: &mut AddressSpace,
        page: u64,
        new: UserPage,
    ) -> Result<(), KernelError> {
        let (gpa, old) = self.present_entry(space, page)?;
        self.write(direct(gpa), new.entry() | old & (ACCESSED | DIRTY))?;
        space.pages.insert(page, new);
        Ok(())
    }

    /// Moves `page`, which is present, to the frame of `new`; it is flushed in between.
    pub(crate) fn change_frame(
        &mut self,
        space: &mut AddressSpace,
        page: u64,
        new: UserPage,
    ) -> Result<(), KernelError> {
        let (gpa, _) = self.present_entry(space, page)?;
        self.write(direct(gpa), 0)?;
        self.flush_pages(space, &[page])?;
        self.write(direct(gpa), new.entry())?;
        space.pages.insert(page, new);
        Ok(())
    }

    /// Unmaps `page`, which is present, and frees the page-table pages that are empty then. Flushes
    /// nothing.
    pub(crate) fn unmap_page(
        &mut self,
        space: &mut AddressSpace,
        page: u64,
        gathered: &mut Gathered,
    ) -> Result<(), KernelError> {
        let (gpa, _) = self.present_entry(space, page)?;
        let Some(old) = space.pages.remove(&page) else { return Ok(()) };
        // The same frame by the direct map: a misdirected write shows here at the latest.
        self.read_checked(direct(old.frame.gpa()), old.mark)?;
        self.write(direct(gpa), 0)?;
        gathered.pages.push(page);
        gathered.frames.push(old.frame);
        for level in 1..=3 {
            let Some(table) = space.tables.get_mut(&key(level, page)) else { break };
            table.nr_entries -= 1;
            if table.nr_entries != 0 {
                break;
            }
            gathered.tables.push(table.frame);
            space.tables.remove(&key(level, page));
            let above = space.tables.get(&key(level + 1, page)).map_or(space.root, |table| table.frame);
            let gpa = above.gpa() + 8 * index(gva_of(page).0, level + 1);
            self.write(direct(gpa), 0)?;
            if level == 3 && self.kernel.config().isolation == Isolation::On {
                self.write(direct(gpa + PAGE_SIZE), 0)?;
            }
        }
        Ok(())
    }
}
