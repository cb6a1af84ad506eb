//! Memslots that a thread creates, moves and deletes while the guests run, and a CPU that accesses
//! them. No other thread writes them, so the thread knows exactly what each access finds, what a
//! harvest reports, and what an aging counts.
//!
//! Some of these memslots have *visitors*: CPUs that read them meanwhile. A visitor's fault that is
//! overtaken by a deletion or a move must not map anything, or the next access to the old place
//! would not exit. The reads of visitors make agings inexact, and harvests may report more than was
//! written. So may harvests with page-modification logs: an entry may be older than the log of the
//! memslot. Or two harvests may read it at once, of which one is of another memslot.

use rand::RngExt;
use rand::rngs::SmallRng;
use slat::dirty::{DirtyTracking, ManualProtect};
use slat::shadow::Gva;
use slat::{Gfn, GfnRange, Gpa, MemoryRegion, MemoryRegionFlags, Vcpu};
use slat_machine::hardware::commit::Port;
use slat_machine::hardware::cpu::{Cpu, CpuError};
use slat_machine::hardware::tlb::Geometry;
use slat_machine::hardware::walk::HardwareFormat;
use slat_machine::memory::{Backing, BackingKind};
use slat_machine::vm::host::{BackingSlice, MachineHost};
use slat_machine::vm::machine::MachineError;

use super::super::tally::Figure;
use super::super::turn::World;
use crate::failure::{Failure, check_failed, ensure};
use crate::live::lock;

/// Places in guest-physical memory for a thread's memslots, 1 MiB apart, below the guests' region.
const NR_PLACES: u64 = 64;
const PLACE_PAGES: u64 = 256;

/// The places of thread n begin at this many pages times n + 1.
const WINDOW_PAGES: u64 = 1 << 20;

/// The thread's first memslot number is this times n + 1: the guests' memslots have lower numbers.
const FIRST_ID: u32 = 1000;

const MAX_SLOTS: usize = 4;
const MAX_SLOT_PAGES: u64 = 100;

/// The expected state of one page.
#[derive(Clone, Copy, Default)]
struct Page {
    value: u64,
    /// A harvest must report it.
    is_dirty: bool,
    /// It is mapped, and counts as used.
    is_used: bool,
}

struct Slot {
    id: u32,
    /// Number of its memory.
    memory: usize,
    place: u64,
    /// Pages between the place's start and the slot's.
    offset: u64,
    flags: MemoryRegionFlags,
    pages: Vec<Page>,
    /// Ages are known only until the first aging: an aging need not observe accesses through the
    /// TLB.
    was_aged: bool,
}

/// Memory for one memslot at a time. It lives as long as the thread: a CPU that wrongly accesses it
/// must not crash.
struct Memory {
    backing: Backing,
    /// The contents of its pages when a memslot last had it.
    values: Vec<u64>,
    is_taken: bool,
}

/// Whether other CPUs read the memslots.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::stress) enum Visitors {
    Come,
    None,
}

/// The memslots of one thread.
pub(super) struct Slots<'w, F: HardwareFormat> {
    world: &'w World<F>,
    cpu: Cpu<Vcpu<MachineHost, F>, F>,
    window: Gfn,
    first_id: u32,
    slots: Vec<Slot>,
    memories: Vec<Memory>,
    is_taken: Vec<bool>,
    next_value: u64,
    visitors: Visitors,
}

impl<'w, F: HardwareFormat> Slots<'w, F> {
    pub(super) fn new(world: &'w World<F>, number: u32, visitors: Visitors) -> Result<Slots<'w, F>, Failure> {
        let memory = || {
            let size_bytes = MAX_SLOT_PAGES << Gfn::SHIFT;
            let backing = match visitors {
                // Movable pages, since some of their faults take long enough to be overtaken.
                Visitors::Come => Backing::with_movable_pages(size_bytes, 0),
                Visitors::None => Backing::new(BackingKind::Anonymous, size_bytes),
            };
            let backing = backing.map_err(MachineError::from)?;
            Ok::<_, Failure>(Memory { backing, values: vec![0; MAX_SLOT_PAGES as usize], is_taken: false })
        };
        Ok(Slots {
            world,
            cpu: new_cpu(world)?,
            visitors,
            memories: (0..MAX_SLOTS).map(|_| memory()).collect::<Result<_, _>>()?,
            window: Gfn(WINDOW_PAGES * (u64::from(number) + 1)),
            first_id: FIRST_ID * (number + 1),
            slots: Vec::new(),
            is_taken: vec![false; NR_PLACES as usize],
            next_value: 1,
        })
    }

    pub(super) fn step(&mut self, rng: &mut SmallRng) -> Result<(), Failure> {
        let result = self.operate(rng);
        if self.visitors == Visitors::Come {
            let ranges = (0..self.slots.len()).map(|which| self.range(which)).collect();
            *lock(&self.world.visited) = ranges;
        }
        result
    }

    fn operate(&mut self, rng: &mut SmallRng) -> Result<(), Failure> {
        if self.slots.is_empty() || (self.slots.len() < MAX_SLOTS && rng.random_range(0..4) == 0) {
            return self.create(rng);
        }
        let which = rng.random_range(0..self.slots.len());
        match rng.random_range(0..16) {
            0 => self.delete(which),
            1..=2 => self.move_slot(which, rng),
            3..=4 => self.reflag(which),
            5..=7 => self.harvest(which, rng),
            8 => self.age(which, rng),
            9 => self.invalidate(which),
            _ => (0..16).try_for_each(|_| self.touch(which, rng)),
        }
    }

    pub(super) fn delete_all(&mut self) -> Result<(), Failure> {
        while !self.slots.is_empty() {
            self.delete(0)?;
        }
        Ok(())
    }

    fn range(&self, which: usize) -> GfnRange {
        let slot = &self.slots[which];
        GfnRange::new(Gfn(self.window.0 + slot.place * PLACE_PAGES + slot.offset), slot.pages.len() as u64)
    }

    /// A free place, and an offset from its start: most memslots begin in the middle of a
    /// page-table page.
    fn take_place(&mut self, rng: &mut SmallRng) -> (u64, u64) {
        loop {
            let place = rng.random_range(0..NR_PLACES);
            if !self.is_taken[place as usize] {
                self.is_taken[place as usize] = true;
                return (place, rng.random_range(0..PLACE_PAGES - MAX_SLOT_PAGES));
            }
        }
    }

    /// Sets the memslot as `self` describes it, or deletes it.
    fn set(&self, which: usize, backing: Option<Backing>, is_there: bool) -> Result<(), Failure> {
        let (slot, range) = (&self.slots[which], self.range(which));
        self.world.machine.vm().set_user_memory_region(MemoryRegion {
            slot: slot.id,
            flags: slot.flags,
            guest_phys_addr: range.start.gpa(),
            memory_size: if is_there { range.nr_pages() << Gfn::SHIFT } else { 0 },
            backing: backing.map(|backing| BackingSlice { backing, offset_bytes: 0 }),
            userfault_bitmap: None,
        })?;
        Ok(())
    }

    /// Whether all pages are dirty when a memslot begins to log.
    fn is_dirty_at_first(&self, flags: MemoryRegionFlags) -> bool {
        flags.contains(MemoryRegionFlags::LOG_DIRTY_PAGES)
            && self.world.plan.manual_protect == ManualProtect::InitiallySet
    }

    fn create(&mut self, rng: &mut SmallRng) -> Result<(), Failure> {
        let id = (self.first_id..).find(|id| self.slots.iter().all(|slot| slot.id != *id)).unwrap_or(self.first_id);
        let nr_pages = rng.random_range(1..=MAX_SLOT_PAGES);
        let (place, offset) = self.take_place(rng);
        let flags = match rng.random_range(0..6) {
            0 => MemoryRegionFlags::READONLY,
            1..=2 => MemoryRegionFlags::LOG_DIRTY_PAGES,
            _ => MemoryRegionFlags::empty(),
        };
        let Some(memory) = self.memories.iter().position(|memory| !memory.is_taken) else {
            unreachable!("there are as many as slots")
        };
        self.memories[memory].is_taken = true;
        let values = self.memories[memory].values.iter().take(nr_pages as usize);
        let is_dirty = self.is_dirty_at_first(flags);
        let pages = values.map(|&value| Page { value, is_dirty, ..Page::default() }).collect();
        self.slots.push(Slot { id, memory, place, offset, flags, pages, was_aged: false });
        self.set(self.slots.len() - 1, Some(self.memories[memory].backing.clone()), true)?;
        self.world.tally.add(Figure::SlotsCreated, 1);
        Ok(())
    }

    fn delete(&mut self, which: usize) -> Result<(), Failure> {
        self.set(which, None, false)?;
        let range = self.range(which);
        let slot = self.slots.swap_remove(which);
        self.is_taken[slot.place as usize] = false;
        let memory = &mut self.memories[slot.memory];
        memory.is_taken = false;
        for (value, page) in memory.values.iter_mut().zip(&slot.pages) {
            *value = page.value;
        }
        self.world.tally.add(Figure::SlotsDeleted, 1);
        self.must_exit(range.start)?;
        self.must_exit(Gfn(range.end.0 - 1))
    }

    fn move_slot(&mut self, which: usize, rng: &mut SmallRng) -> Result<(), Failure> {
        let before = self.range(which);
        let (place, offset) = self.take_place(rng);
        let old_place = std::mem::replace(&mut self.slots[which].place, place);
        self.slots[which].offset = offset;
        self.set(which, None, true)?;
        self.is_taken[old_place as usize] = false;
        let slot = &mut self.slots[which];
        // All pages have another address.
        let is_dirty = slot.flags.contains(MemoryRegionFlags::LOG_DIRTY_PAGES);
        for page in &mut slot.pages {
            *page = Page { is_dirty, is_used: false, ..*page };
        }
        slot.was_aged = false;
        self.world.tally.add(Figure::SlotsMoved, 1);
        self.must_exit(before.start)?;
        self.touch(which, rng)
    }

    fn reflag(&mut self, which: usize) -> Result<(), Failure> {
        self.slots[which].flags.toggle(MemoryRegionFlags::LOG_DIRTY_PAGES);
        self.set(which, None, true)?;
        let is_dirty = self.is_dirty_at_first(self.slots[which].flags);
        for page in &mut self.slots[which].pages {
            page.is_dirty = is_dirty;
        }
        self.world.tally.add(Figure::SlotsReflagged, 1);
        Ok(())
    }

    fn harvest(&mut self, which: usize, rng: &mut SmallRng) -> Result<(), Failure> {
        let slot = &mut self.slots[which];
        if !slot.flags.contains(MemoryRegionFlags::LOG_DIRTY_PAGES) {
            return Ok(());
        }
        // A visitor's read that overlaps the start of logging has made its page writable, and so
        // marked it.
        let reports_more =
            self.visitors == Visitors::Come || self.world.plan.dirty_tracking == DirtyTracking::PageModificationLog;
        let gets_clear = self.world.plan.manual_protect == ManualProtect::Disabled;
        let mut bitmap = vec![0_u64; slot.pages.len().div_ceil(64)];
        let nr_dirty = self.world.machine.vm().get_dirty_log(slot.id, &mut bitmap)?;
        for (number, page) in slot.pages.iter_mut().enumerate() {
            let is_reported = bitmap[number / 64] >> (number % 64) & 1 == 1;
            if is_reported != page.is_dirty && !(is_reported && reports_more) {
                let (is, should) = if is_reported { ("reported", "not written") } else { ("not reported", "written") };
                return Err(check_failed(format_args!(
                    "harvest of slot {}: page {number} {is}, but {should}",
                    slot.id
                )));
            }
            // With manual protect a harvest reports a page until it is cleared.
            page.is_dirty = is_reported && !gets_clear;
        }
        let nr_reported: u64 = bitmap.iter().map(|word| u64::from(word.count_ones())).sum();
        ensure!(
            nr_dirty == nr_reported,
            Check,
            "harvest of slot {}: {nr_dirty} pages counted, {nr_reported} reported",
            slot.id
        );
        if !gets_clear {
            // Some of them, and some that are clean.
            let mask: Vec<u64> = bitmap.iter().map(|_| rng.random()).collect();
            let nr_meant: u64 =
                bitmap.iter().zip(&mask).map(|(word, mask)| u64::from((word & mask).count_ones())).sum();
            let nr_cleared = self.world.machine.vm().clear_dirty_log(slot.id, 0, slot.pages.len() as u64, &mask)?;
            for (number, page) in slot.pages.iter_mut().enumerate() {
                page.is_dirty &= mask[number / 64] >> (number % 64) & 1 == 0;
            }
            ensure!(
                nr_cleared == nr_meant || nr_cleared > nr_meant && reports_more,
                Check,
                "clearing of slot {}: {nr_cleared} pages, {nr_meant} dirty",
                slot.id
            );
        }
        let figure = if reports_more { Figure::Harvests } else { Figure::HarvestsExact };
        self.world.tally.add(figure, 1);
        Ok(())
    }

    fn age(&mut self, which: usize, rng: &mut SmallRng) -> Result<(), Failure> {
        let (range, slot) = (self.range(which), &mut self.slots[which]);
        let vm = self.world.machine.vm();
        let nr_used = slot.pages.iter().filter(|page| page.is_used).count() as u64;
        let tested = vm.test_age_range(range)?;
        let found = if rng.random_range(0..3) == 0 {
            let aged = vm.age_range(range)?;
            let was_aged = std::mem::replace(&mut slot.was_aged, true);
            (tested, aged, vm.test_age_range(range)?, was_aged)
        } else {
            (tested, tested, 0, slot.was_aged)
        };
        self.world.tally.add(Figure::Agings, 1);
        if self.visitors == Visitors::Come {
            return match found {
                (tested, aged, again, _) if tested.max(aged).max(again) <= range.nr_pages() => Ok(()),
                found => Err(check_failed(format_args!("ages of slot {}: {found:?} of {range:?}", slot.id))),
            };
        }
        match found {
            (tested, aged, 0, true) if tested == aged && tested <= nr_used => Ok(()),
            (tested, aged, 0, false) if tested == aged && tested == nr_used => {
                self.world.tally.add(Figure::AgingsExact, 1);
                Ok(())
            }
            found => Err(check_failed(format_args!(
                "ages of slot {}: {nr_used} pages used, but (tested, aged, tested again, aged before) {found:?}",
                slot.id
            ))),
        }
    }

    fn invalidate(&mut self, which: usize) -> Result<(), Failure> {
        let range = self.range(which);
        drop(self.world.machine.vm().invalidate_range(range)?);
        let slot = &mut self.slots[which];
        for page in &mut slot.pages {
            page.is_used = false;
        }
        slot.was_aged = false;
        self.world.tally.add(Figure::Invalidated, 1);
        Ok(())
    }

    fn touch(&mut self, which: usize, rng: &mut SmallRng) -> Result<(), Failure> {
        let range = self.range(which);
        let number = rng.random_range(0..range.nr_pages());
        let gva = gva_of(Gfn(range.start.0 + number));
        let slot = &mut self.slots[which];
        let page = &mut slot.pages[number as usize];
        if rng.random() {
            let value = self.next_value;
            self.next_value += 1;
            match self.cpu.write(gva, value) {
                Err(CpuError::Exit(_)) if slot.flags.contains(MemoryRegionFlags::READONLY) => {
                    self.world.tally.add(Figure::Exits, 1);
                    Ok(())
                }
                Ok(()) if !slot.flags.contains(MemoryRegionFlags::READONLY) => {
                    let is_dirty = slot.flags.contains(MemoryRegionFlags::LOG_DIRTY_PAGES);
                    *page = Page { value, is_dirty: page.is_dirty || is_dirty, is_used: true };
                    Ok(())
                }
                other => Err(check_failed(format_args!("write to page {number} of slot {}: {other:?}", slot.id))),
            }
        } else {
            let found = self.cpu.read(gva);
            page.is_used = true;
            ensure!(
                found == Ok(page.value),
                Check,
                "read of page {number} of slot {}: {found:x?}, but {:#x} was written",
                slot.id,
                page.value
            );
            self.world.tally.add(Figure::SlotReads, 1);
            Ok(())
        }
    }

    /// Without a memslot an access exits to user space.
    fn must_exit(&mut self, gfn: Gfn) -> Result<(), Failure> {
        match self.cpu.read(gva_of(gfn)) {
            Err(CpuError::Exit(_)) => {
                self.world.tally.add(Figure::Exits, 1);
                Ok(())
            }
            other => Err(check_failed(format_args!("read of {gfn}, where a slot was: {other:?}"))),
        }
    }
}

/// Reads pages of memslots that may be deleted or moved by now.
pub(super) fn visit<F: HardwareFormat>(
    world: &World<F>,
    cpu: &mut Cpu<Vcpu<MachineHost, F>, F>,
    rng: &mut SmallRng,
) -> Result<(), Failure> {
    let ranges = lock(&world.visited).clone();
    if ranges.is_empty() {
        return Ok(());
    }
    for _ in 0..16 {
        let range = ranges[rng.random_range(0..ranges.len())];
        match cpu.read(gva_of(Gfn(rng.random_range(range.start.0..range.end.0)))) {
            Ok(_) | Err(CpuError::Exit(_)) => world.tally.add(Figure::Visits, 1),
            Err(error) => return Err(check_failed(format_args!("visit of {range:?}: {error}"))),
        }
    }
    Ok(())
}

/// A CPU with paging off, and with a modification log if that tracks dirty pages.
pub(super) fn new_cpu<F: HardwareFormat>(world: &World<F>) -> Result<Cpu<Vcpu<MachineHost, F>, F>, Failure> {
    let vm = world.machine.vm();
    let cpu = Cpu::new(vm.create_vcpu()?, Port::new(vm.host().flush_domain()), 1, vm.root(), Geometry::default());
    Ok(match world.plan.dirty_tracking {
        DirtyTracking::PageModificationLog => cpu.with_modification_log(vm.host().modification_logs().add()),
        DirtyTracking::WriteProtect | DirtyTracking::WriteProtectLeaves | DirtyTracking::DirtyBit => cpu,
    })
}

pub(super) fn gva_of(gfn: Gfn) -> Gva {
    let Gpa(address) = gfn.gpa();
    Gva(address)
}
