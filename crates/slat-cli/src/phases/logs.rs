//! The dirty log of a machine's region: the bitmaps of its memslots, or the rings of its vCPUs.
//!
//! Bitmaps are got, and cleared where getting does not clear them. Rings are got by harvesting
//! their entries, and cleared by a reset. A vCPU whose ring is full waits for a reset, so rings are
//! collected while vCPUs run: a thread harvests all of them again and again, and resets them when
//! one is full. The time of that counts as getting and clearing.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use slat::dirty::{DirtyRing, ManualProtect};
use slat_machine::hardware::walk::HardwareFormat;
use slat_machine::vm::machine::{Machine, MachineError};

use super::timed;

/// How long the collector sleeps when no ring is full.
const COLLECTOR_SLEEP: Duration = Duration::from_micros(50);

/// The form of the dirty log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Form {
    Bitmaps,
    Rings,
}

/// The log, and the pages that it reported.
pub(super) struct Logs<'m, F: HardwareFormat> {
    machine: &'m Machine<F>,
    form: Form,
    manual_protect: ManualProtect,
    /// The log that was got, for each memslot.
    pub(super) bitmaps: Vec<Vec<u64>>,
}

/// Time that it took to get and to clear.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Spent {
    pub(super) get: Duration,
    pub(super) clear: Duration,
}

impl<'m, F: HardwareFormat> Logs<'m, F> {
    pub(super) fn new(machine: &'m Machine<F>, form: Form, manual_protect: ManualProtect) -> Logs<'m, F> {
        Logs { machine, form, manual_protect, bitmaps: empty_bitmaps(machine) }
    }

    /// Whether getting leaves the clearing to [`clear`](Logs::clear).
    pub(super) fn are_cleared_apart(&self) -> bool {
        self.manual_protect != ManualProtect::Disabled
    }

    /// Whether all pages are dirty when logging begins.
    pub(super) fn are_set_initially(&self) -> bool {
        self.manual_protect == ManualProtect::InitiallySet
    }

    /// Whether the log reports the same pages again until it is cleared.
    pub(super) fn are_copied(&self) -> bool {
        self.form == Form::Bitmaps && self.are_cleared_apart()
    }

    /// Gets the log: adds the pages written since it was cleared, unless rings reported them
    /// before.
    pub(super) fn get(&mut self) -> Result<(), MachineError> {
        get_into(self.machine, self.form, &mut self.bitmaps)?;
        if self.form == Form::Rings && !self.are_cleared_apart() {
            self.clear()?;
        }
        Ok(())
    }

    /// Clears the pages that were got.
    pub(super) fn clear(&self) -> Result<(), MachineError> {
        match self.form {
            Form::Bitmaps => {
                for (slot, bitmap) in self.machine.slots().iter().zip(&self.bitmaps) {
                    self.machine.vm().clear_dirty_log(slot.id, 0, slot.nr_pages, bitmap)?;
                }
            }
            Form::Rings => {
                self.machine.vm().reset_dirty_rings()?;
            }
        }
        Ok(())
    }

    /// Empties the bitmaps.
    pub(super) fn forget(&mut self) {
        self.bitmaps.iter_mut().for_each(|bitmap| bitmap.fill(0));
    }

    /// Gets the log once more, into new bitmaps.
    pub(super) fn get_again(&self) -> Result<Vec<Vec<u64>>, MachineError> {
        let mut bitmaps = empty_bitmaps(self.machine);
        get_into(self.machine, self.form, &mut bitmaps)?;
        Ok(bitmaps)
    }

    /// Runs `action`, in which vCPUs run, and collects rings meanwhile.
    pub(super) fn collecting<R>(
        &mut self,
        action: impl FnOnce() -> Result<R, MachineError>,
    ) -> Result<(R, Spent), MachineError> {
        if self.form == Form::Bitmaps {
            return Ok((action()?, Spent::default()));
        }
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let collector = scope.spawn(|| collect(self.machine, &mut self.bitmaps, &is_over));
            let result = action();
            // Relaxed: it does not matter when exactly the flag is observed.
            is_over.store(true, Ordering::Relaxed);
            match collector.join() {
                Ok(spent) => Ok((result?, spent?)),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }
}

fn empty_bitmaps<F: HardwareFormat>(machine: &Machine<F>) -> Vec<Vec<u64>> {
    machine.slots().iter().map(|slot| vec![0; slot.nr_pages.div_ceil(64) as usize]).collect()
}

fn get_into<F: HardwareFormat>(machine: &Machine<F>, form: Form, bitmaps: &mut [Vec<u64>]) -> Result<(), MachineError> {
    match form {
        Form::Bitmaps => {
            for (slot, bitmap) in machine.slots().iter().zip(bitmaps) {
                machine.vm().get_dirty_log(slot.id, bitmap)?;
            }
        }
        Form::Rings => {
            for ring in machine.vm().dirty_rings() {
                ring.harvest(|dirty| {
                    // Slots of the region have the numbers from 1 on.
                    if let Some(bitmap) = bitmaps.get_mut(dirty.slot as usize - 1) {
                        bitmap[(dirty.page / 64) as usize] |= 1 << (dirty.page % 64);
                    }
                });
            }
        }
    }
    Ok(())
}

/// Collects rings until `is_over`.
fn collect<F: HardwareFormat>(
    machine: &Machine<F>,
    bitmaps: &mut [Vec<u64>],
    is_over: &AtomicBool,
) -> Result<Spent, MachineError> {
    let mut spent = Spent::default();
    let mut result = Ok(());
    // Relaxed: it does not matter when exactly the flag is observed.
    while !is_over.load(Ordering::Relaxed) {
        // Read before the harvest, so that a reset makes room in the rings that are full.
        let is_one_full = machine.vm().dirty_rings().any(DirtyRing::is_soft_full);
        spent.get += timed(|| get_into(machine, Form::Rings, bitmaps))?;
        if is_one_full {
            let begin = Instant::now();
            // vCPUs wait for the reset: without memory, it is tried again.
            if let Err(error) = machine.vm().reset_dirty_rings() {
                result = Err(error.into());
            }
            spent.clear += begin.elapsed();
        } else {
            thread::sleep(COLLECTOR_SLEEP);
        }
    }
    result.map(|()| spent)
}
