//! The dirty logs of the test region, compared with memory by a small migration.
//!
//! While a memslot logs, a copy of its pages is kept as in a migration: all pages when logging has
//! begun, then those that harvests report. Where getting the log does not clear it, the harvest
//! clears it before pages are copied. When the guests have stopped, one more harvest makes the copy
//! exact. A page that differs then was written and never reported. The only other reason is a
//! discard after the copy, which leaves zeros.

use std::sync::Mutex;

use slat::dirty::ManualProtect;
use slat::{Gfn, MemoryRegion, MemoryRegionFlags};
use slat_machine::hardware::walk::HardwareFormat;
use slat_machine::memory::Pages;
use slat_machine::vm::machine::{Machine, Slot};

use super::tally::{Figure, Tally};
use crate::failure::{Failure, ensure};
use crate::live::lock;

/// A page as it was copied.
#[derive(Clone, Copy, Default)]
struct Copied {
    value: u64,
    /// Discards of the page that were over before it was copied.
    nr_discards_done: u32,
}

/// The copy of a memslot that logs.
#[derive(Default)]
struct Migration {
    copies: Vec<Copied>,
    bitmap: Vec<u64>,
    manual_protect: ManualProtect,
}

impl Migration {
    fn copy(&mut self, pages: &Pages, slot: Slot, page: u64) {
        let nr_discards_done = pages.discards(slot.first_page + page).done;
        let value = pages.peek(slot.first_page + page).unwrap_or_default();
        self.copies[page as usize] = Copied { value, nr_discards_done };
    }

    fn harvest<F: HardwareFormat>(&mut self, machine: &Machine<F>, slot: Slot, tally: &Tally) -> Result<(), Failure> {
        let nr_got = machine.vm().get_dirty_log(slot.id, &mut self.bitmap)?;
        if self.manual_protect != ManualProtect::Disabled {
            let nr_cleared = machine.vm().clear_dirty_log(slot.id, 0, slot.nr_pages, &self.bitmap)?;
            ensure!(
                nr_cleared == nr_got,
                Check,
                "dirty log of slot {}: {nr_got} pages got, {nr_cleared} of them cleared",
                slot.id
            );
        }
        tally.add(Figure::Harvests, 1);
        for page in 0..slot.nr_pages {
            if self.bitmap[(page / 64) as usize] >> (page % 64) & 1 == 1 {
                self.copy(machine.pages()?, slot, page);
            }
        }
        Ok(())
    }
}

/// The log of one slot of the test region.
pub(super) struct Log {
    slot: Slot,
    manual_protect: ManualProtect,
    /// `None`: it does not log.
    migration: Mutex<Option<Migration>>,
}

impl Log {
    pub(super) fn new(slot: Slot, manual_protect: ManualProtect) -> Log {
        Log { slot, manual_protect, migration: Mutex::new(None) }
    }

    /// Turns logging on if it is off, and off if it is on.
    pub(super) fn toggle<F: HardwareFormat>(&self, machine: &Machine<F>, tally: &Tally) -> Result<(), Failure> {
        let mut migration = lock(&self.migration);
        let enable = migration.is_none();
        machine.vm().set_user_memory_region(MemoryRegion {
            slot: self.slot.id,
            flags: if enable { MemoryRegionFlags::LOG_DIRTY_PAGES } else { MemoryRegionFlags::empty() },
            guest_phys_addr: self.slot.gpa,
            memory_size: self.slot.nr_pages << Gfn::SHIFT,
            backing: None,
            userfault_bitmap: None,
        })?;
        *migration = enable.then(|| Migration {
            copies: vec![Copied::default(); self.slot.nr_pages as usize],
            bitmap: vec![0; self.slot.nr_pages.div_ceil(64) as usize],
            manual_protect: self.manual_protect,
        });
        if let Some(migration) = &mut *migration {
            // Writes from now on are logged.
            for page in 0..self.slot.nr_pages {
                migration.copy(machine.pages()?, self.slot, page);
            }
        }
        tally.add(if enable { Figure::LogsEnabled } else { Figure::LogsDisabled }, 1);
        Ok(())
    }

    /// Harvests the log, if there is one, while guests run.
    pub(super) fn harvest<F: HardwareFormat>(&self, machine: &Machine<F>, tally: &Tally) -> Result<(), Failure> {
        lock(&self.migration).as_mut().map_or(Ok(()), |migration| migration.harvest(machine, self.slot, tally))
    }

    /// Harvests the log, if there is one, and compares the copy with memory. No guest runs; hosts
    /// may change memory.
    pub(super) fn check_stopped<F: HardwareFormat>(&self, machine: &Machine<F>, tally: &Tally) -> Result<(), Failure> {
        let mut migration = lock(&self.migration);
        let Some(migration) = &mut *migration else { return Ok(()) };
        migration.harvest(machine, self.slot, tally)?;
        let pages = machine.pages()?;
        for (page, copied) in (self.slot.first_page..).zip(&migration.copies) {
            let found = pages.peek(page).unwrap_or_default();
            // The discard counts before it begins, so this later look observes it.
            let discarded = pages.discards(page).begun != copied.nr_discards_done;
            ensure!(
                found == copied.value || found == 0 && discarded,
                Check,
                "dirty log of slot {}: page {page:#x} holds {found:#x}, its copy {:#x}: written and never reported",
                self.slot.id,
                copied.value
            );
        }
        tally.add(Figure::Migrated, self.slot.nr_pages);
        Ok(())
    }
}
