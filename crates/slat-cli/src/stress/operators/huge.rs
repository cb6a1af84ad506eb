//! A memslot of huge pages. One thread accesses it through its own CPU, toggles its log and
//! harvests. Another thread splits, recovers and zaps its huge pages at any time.
//!
//! No other thread writes the memslot, so each read is compared with the last write. Each harvest
//! must report what was written since the log was turned on or the page was cleared. It may report
//! more: a recovery while logging begins marks all pages of its range.
//!
//! The second thread may mark the pages of a call in flight late, as the engine promises
//! (`dirty/log.rs`). A recovery that began before logging cancels when it observes the log, and
//! harvests pass over the PTE that it has broken until it has marked it. So a page that is not
//! reported is excused if a call of that thread was in flight during the harvest. The first harvest
//! that begins after that call has returned must report it.

use std::sync::atomic::{AtomicU64, Ordering};

use rand::RngExt;
use rand::rngs::SmallRng;
use slat::dirty::ManualProtect;
use slat::{Gfn, GfnRange, Level, MemoryRegion, MemoryRegionFlags, PageSize, Vcpu};
use slat_machine::hardware::cpu::Cpu;
use slat_machine::hardware::walk::HardwareFormat;
use slat_machine::memory::{Backing, BackingKind};
use slat_machine::vm::host::{BackingSlice, MachineHost};
use slat_machine::vm::machine::MachineError;

use super::super::tally::Figure;
use super::super::turn::World;
use super::memslots::{gva_of, new_cpu};
use crate::failure::{Failure, check_failed, ensure};

/// Where the memslot is: below the guests' region, and beyond the places of the other threads'
/// memslots.
const FIRST_PAGE: Gfn = Gfn(3 << 20);

const NR_PAGES: u64 = 8 * Level::L2M.nr_pages();

/// The memslot's number: those of the other threads' memslots are lower.
const ID: u32 = 10_000;

/// The calls of the thread that splits: how many have begun or ended. Odd while one is in flight.
#[derive(Default)]
pub(in super::super) struct Calls(AtomicU64);

impl Calls {
    fn during<R>(&self, call: impl FnOnce() -> R) -> R {
        // SeqCst, here and in `now`: a thread that reads the count before the call has read it
        // before all that the call does; one that reads the count after it observes the call's
        // marks.
        self.0.fetch_add(1, Ordering::SeqCst);
        let result = call();
        self.0.fetch_add(1, Ordering::SeqCst);
        result
    }

    fn now(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    /// The count when all calls that have begun by now have returned.
    fn when_all_have_returned(&self) -> u64 {
        self.now().next_multiple_of(2)
    }
}

/// The expected state of one page.
#[derive(Clone, Copy, Default)]
struct Page {
    value: u64,
    /// A harvest must report it.
    is_dirty: bool,
    /// If a harvest did not report it: the excuse ends when [`Calls`] has this count.
    excused_until: Option<u64>,
}

/// The memslot, with what its thread knows about it.
pub(super) struct HugeSlot<'w, F: HardwareFormat> {
    world: &'w World<F>,
    cpu: Cpu<Vcpu<MachineHost, F>, F>,
    flags: MemoryRegionFlags,
    pages: Vec<Page>,
    next_value: u64,
}

impl<'w, F: HardwareFormat> HugeSlot<'w, F> {
    pub(super) fn new(world: &'w World<F>) -> Result<HugeSlot<'w, F>, Failure> {
        let backing = Backing::new(BackingKind::AnonymousThp, NR_PAGES << Gfn::SHIFT).map_err(MachineError::from)?;
        let slot = HugeSlot {
            world,
            cpu: new_cpu(world)?,
            flags: MemoryRegionFlags::empty(),
            pages: vec![Page::default(); NR_PAGES as usize],
            next_value: 1,
        };
        slot.set(Some(backing), NR_PAGES)?;
        Ok(slot)
    }

    pub(super) fn delete(self) -> Result<(), Failure> {
        self.set(None, 0)
    }

    fn set(&self, backing: Option<Backing>, nr_pages: u64) -> Result<(), Failure> {
        self.world.machine.vm().set_user_memory_region(MemoryRegion {
            slot: ID,
            flags: self.flags,
            guest_phys_addr: FIRST_PAGE.gpa(),
            memory_size: nr_pages << Gfn::SHIFT,
            backing: backing.map(|backing| BackingSlice { backing, offset_bytes: 0 }),
            userfault_bitmap: None,
        })?;
        Ok(())
    }

    pub(super) fn step(&mut self, rng: &mut SmallRng) -> Result<(), Failure> {
        match rng.random_range(0..16) {
            0 => self.toggle(),
            1..=2 => self.harvest(),
            _ => (0..16).try_for_each(|_| self.touch(rng)),
        }
    }

    fn toggle(&mut self) -> Result<(), Failure> {
        self.flags.toggle(MemoryRegionFlags::LOG_DIRTY_PAGES);
        self.set(None, NR_PAGES)?;
        let is_dirty = self.is_logging() && self.world.plan.manual_protect == ManualProtect::InitiallySet;
        for page in &mut self.pages {
            *page = Page { is_dirty, excused_until: None, ..*page };
        }
        let figure = if self.is_logging() { Figure::LogsEnabled } else { Figure::LogsDisabled };
        self.world.tally.add(figure, 1);
        Ok(())
    }

    fn is_logging(&self) -> bool {
        self.flags.contains(MemoryRegionFlags::LOG_DIRTY_PAGES)
    }

    fn harvest(&mut self) -> Result<(), Failure> {
        if !self.is_logging() {
            return Ok(());
        }
        let vm = self.world.machine.vm();
        let calls = &self.world.splitter;
        let begin = calls.now();
        let mut bitmap = vec![0_u64; self.pages.len().div_ceil(64)];
        vm.get_dirty_log(ID, &mut bitmap)?;
        let excused_until = calls.when_all_have_returned();
        if self.world.plan.manual_protect != ManualProtect::Disabled {
            vm.clear_dirty_log(ID, 0, NR_PAGES, &bitmap)?;
        }
        for (number, page) in self.pages.iter_mut().enumerate() {
            if bitmap[number / 64] >> (number % 64) & 1 == 1 {
                *page = Page { is_dirty: false, excused_until: None, ..*page };
            } else if page.is_dirty && begin >= *page.excused_until.get_or_insert(excused_until) {
                return Err(check_failed(format_args!(
                    "harvest of the huge slot: page {number} not reported, but written"
                )));
            }
        }
        self.world.tally.add(Figure::Harvests, 1);
        Ok(())
    }

    fn touch(&mut self, rng: &mut SmallRng) -> Result<(), Failure> {
        let number = rng.random_range(0..NR_PAGES);
        let (gva, is_logging) = (gva_of(Gfn(FIRST_PAGE.0 + number)), self.is_logging());
        let page = &mut self.pages[number as usize];
        if rng.random() {
            self.cpu
                .write(gva, self.next_value)
                .map_err(|error| check_failed(format_args!("write to page {number} of the huge slot: {error}")))?;
            *page = Page { value: self.next_value, is_dirty: page.is_dirty || is_logging, ..*page };
            self.next_value += 1;
            return Ok(());
        }
        let found = self.cpu.read(gva);
        ensure!(
            found == Ok(page.value),
            Check,
            "read of page {number} of the huge slot: {found:x?}, but {:#x} was written",
            page.value
        );
        self.world.tally.add(Figure::SlotReads, 1);
        Ok(())
    }
}

/// Splits, recovers or zaps huge pages: of the huge memslot, and now and then of the guests'
/// region.
pub(super) fn disturb<F: HardwareFormat>(world: &World<F>, rng: &mut SmallRng) -> Result<(), Failure> {
    let World { machine, tally, splitter, .. } = world;
    let range = if rng.random_range(0..8) == 0 {
        machine.gfns(super::some_pages(machine, rng, machine.nr_pages()))
    } else {
        let start = rng.random_range(0..NR_PAGES);
        GfnRange::new(Gfn(FIRST_PAGE.0 + start), rng.random_range(1..=NR_PAGES - start))
    };
    let vm = machine.vm();
    match rng.random_range(0..8) {
        0..=2 => {
            let largest = if rng.random_range(0..4) == 0 { PageSize::Size2M } else { PageSize::Size4K };
            splitter.during(|| vm.split_range(range, largest))?;
            tally.add(Figure::RangesSplit, 1);
        }
        3..=6 => {
            splitter.during(|| vm.recover_range(range))?;
            tally.add(Figure::RangesRecovered, 1);
        }
        _ => {
            drop(splitter.during(|| vm.invalidate_range(range))?);
            tally.add(Figure::Invalidated, 1);
        }
    }
    Ok(())
}
