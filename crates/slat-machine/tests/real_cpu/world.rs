//! A real CPU on the engine's page tables, with the software walker, and a plain model of what the
//! guest must see.
//!
//! Every access is made thrice: the walker predicts what the CPU must do, the CPU does it, and if
//! it completes, the model has the frame that it must have reached. The engine handles a fault of
//! the CPU, until the access completes or exits to user space, which the model predicts as well.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use slat::format::Npt;
use slat::{Access, Config, Exit, Gpa, Hpa, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Vcpu, Vm};

use crate::arena::{Arena, ArenaHost, Frames};
use crate::cpu::{Done, NR_SYSTEM_PAGES, RETURN, RealCpu, SYSTEM_GPA, SYSTEM_HPA, Trouble, linear};
use crate::walker::{ACCESSED, PRESENT, Step, USER, WRITABLE, Walker, path};

/// Number of the system pages' memslot; the tests use those below.
const SYSTEM_SLOT: u32 = 1000;
/// More faults than an access needs: none, a leaf, a writable leaf.
const MOST_FAULTS: u32 = 3;

/// Offsets of the words in a page that are accessed: its ends, and [`EXECUTED`].
pub const WORDS: [u64; 3] = [0, 0x7f8, 0xff8];
/// Offset of the word in a page that is executed.
pub const EXECUTED: u64 = 0x800;

/// A memslot in the model.
#[derive(Debug)]
pub struct ModelSlot {
    pub gpa: Gpa,
    pub flags: MemoryRegionFlags,
    pub frames: Arc<Frames>,
    /// Pages written since the last harvest.
    pub dirty: BTreeSet<u64>,
}

impl ModelSlot {
    fn size_bytes(&self) -> u64 {
        self.frames.nr_pages * PAGE_SIZE
    }

    fn logs(&self) -> bool {
        self.flags.contains(MemoryRegionFlags::LOG_DIRTY_PAGES)
    }
}

/// The counts for the test's report.
#[derive(Clone, Copy, Default, Debug)]
pub struct Counts {
    pub completed: u64,
    pub faults: u64,
    pub exits: u64,
    pub flushes: u64,
    /// Pages that harvests reported.
    pub dirty: u64,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counts { completed, faults, exits, flushes, dirty } = self;
        write!(f, "{completed} accesses, {faults} page faults, {exits} exits, {flushes} flushes, {dirty} dirty pages")
    }
}

/// Engine, CPU, walker and model.
pub struct World {
    pub vm: Arc<Vm<ArenaHost, Npt>>,
    vcpu: Vcpu<ArenaHost, Npt>,
    cpu: RealCpu,
    walker: Walker,
    arena: Arc<Arena>,
    pub slots: BTreeMap<u32, ModelSlot>,
    next_value: u64,
    pub counts: Counts,
}

impl World {
    /// Makes a VM whose only memslot is the system's.
    ///
    /// # Errors
    /// This machine has no suitable KVM. An error of the engine is a panic: page tables built by
    /// hand show first whether the CPU can be used.
    pub fn new() -> Result<World, Trouble> {
        let arena = Arc::new(Arena::new().map_err(|error| Trouble(format!("map the memory: {error}")))?);
        let mut cpu = RealCpu::new(&arena, tables_by_hand(&arena))?;
        match cpu.access(Gpa(SYSTEM_GPA), Access::Read, 0)? {
            Done::Completed(value) if value == arena.get(SYSTEM_HPA) => {}
            other => panic!("the first program of the guest did {other:x?}"),
        }

        let vm = Arc::new(Vm::new(ArenaHost::new(&arena), Config::default()).unwrap());
        let vcpu = vm.create_vcpu().unwrap();
        let (walker, slots) = (Walker::new(), BTreeMap::new());
        let mut world = World { vm, vcpu, cpu, walker, arena, slots, next_value: 1, counts: Counts::default() };
        let frames = Frames::new(SYSTEM_HPA, NR_SYSTEM_PAGES, PageSize::Size4K);
        world.create(SYSTEM_SLOT, MemoryRegionFlags::empty(), Gpa(SYSTEM_GPA), &frames);
        for page in 0..NR_SYSTEM_PAGES {
            let gpa = Gpa(SYSTEM_GPA + page * PAGE_SIZE);
            // Without them the CPU cannot take a fault.
            assert_eq!(world.vcpu.handle_fault(gpa, Access::Write), Ok(Outcome::Resume));
        }
        world.cpu.set_root(world.vm.root()).expect("the engine's root");
        Ok(world)
    }

    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    pub fn has_1g_pages(&self) -> bool {
        self.cpu.has_1g_pages
    }

    pub fn create(&mut self, slot: u32, flags: MemoryRegionFlags, gpa: Gpa, frames: &Arc<Frames>) {
        let model = ModelSlot { gpa, flags, frames: Arc::clone(frames), dirty: BTreeSet::new() };
        self.set_region(slot, &model, model.size_bytes(), Some(Arc::clone(frames)));
        assert!(self.slots.insert(slot, model).is_none());
    }

    pub fn delete(&mut self, slot: u32) {
        let model = self.slots.remove(&slot).expect("a slot");
        self.set_region(slot, &model, 0, None);
    }

    /// Moves the memslot and changes its flags.
    pub fn change(&mut self, slot: u32, gpa: Gpa, flags: MemoryRegionFlags) {
        let mut model = self.slots.remove(&slot).expect("a slot");
        let logged = model.logs();
        let moved = model.gpa != gpa;
        (model.gpa, model.flags) = (gpa, flags);
        if !logged || !model.logs() {
            // A new log, or none.
            model.dirty.clear();
        } else if moved {
            model.dirty.extend(0..model.frames.nr_pages);
        }
        self.set_region(slot, &model, model.size_bytes(), None);
        self.slots.insert(slot, model);
    }

    fn set_region(&self, slot: u32, model: &ModelSlot, memory_size: u64, backing: Option<Arc<Frames>>) {
        let &ModelSlot { flags, gpa: guest_phys_addr, .. } = model;
        self.vm
            .set_user_memory_region(MemoryRegion {
                slot,
                flags,
                guest_phys_addr,
                memory_size,
                backing,
                userfault_bitmap: None,
            })
            .unwrap_or_else(|error| panic!("slot {slot}: {error}"));
    }

    /// Harvests the dirty log of `slot`: it must have the pages that the CPU has written since the
    /// last harvest.
    pub fn harvest(&mut self, slot: u32) {
        let model = self.slots.get_mut(&slot).expect("a slot");
        let mut bitmap = vec![0_u64; model.frames.nr_pages.div_ceil(64) as usize];
        let nr_dirty = self.vm.get_dirty_log(slot, &mut bitmap).unwrap();
        let pages: BTreeSet<u64> =
            (0..bitmap.len() as u64 * 64).filter(|page| bitmap[(page / 64) as usize] & 1 << (page % 64) != 0).collect();
        assert_eq!(pages, model.dirty, "dirty log of slot {slot}: of the engine, of the CPU");
        assert_eq!(nr_dirty, pages.len() as u64);
        self.counts.dirty += nr_dirty;
        model.dirty.clear();
    }

    /// The number of the memslot at `gpa`, and the frame's address there.
    fn find(&self, gpa: Gpa) -> Option<(u32, Hpa)> {
        self.slots.iter().find_map(|(&number, slot)| {
            let offset = gpa.0.checked_sub(slot.gpa.0).filter(|&offset| offset < slot.size_bytes())?;
            Some((number, Hpa(slot.frames.page(0).0 + offset)))
        })
    }

    /// Does an access as a guest would, with its faults. `Err`: it exited to user space.
    pub fn access(&mut self, gpa: Gpa, access: Access) -> Result<(), Exit> {
        let found = self.find(gpa);
        for _ in 0..=MOST_FAULTS {
            if let Ok(hpa) = self.attempt(gpa, access) {
                let (number, expected) = found.unwrap_or_else(|| panic!("{access:?} of {gpa}, where no slot is"));
                assert_eq!(hpa, expected, "{access:?} of {gpa} in slot {number} went to another frame");
                let slot = self.slots.get_mut(&number).expect("just found");
                if access == Access::Write {
                    assert!(!slot.flags.contains(MemoryRegionFlags::READONLY), "write to {gpa}, which is read-only");
                    if slot.logs() {
                        slot.dirty.insert((gpa.0 - slot.gpa.0) / PAGE_SIZE);
                    }
                }
                return Ok(());
            }
            match self.vcpu.handle_fault(gpa, access).unwrap_or_else(|error| panic!("{access:?} of {gpa}: {error}")) {
                Outcome::Resume => {}
                Outcome::Exit(exit) => {
                    let is_right = match found {
                        None => true,
                        Some((number, _)) => {
                            access == Access::Write && self.slots[&number].flags.contains(MemoryRegionFlags::READONLY)
                        }
                    };
                    assert!(is_right, "{exit:?}, but there is memory");
                    self.counts.exits += 1;
                    return Err(exit);
                }
            }
        }
        panic!("{access:?} of {gpa} faults for ever");
    }

    /// Tries an access once, on the walker and on the CPU. Both must do the same, also to the page
    /// tables, and data must come from and go to the frame that the walker found. Returns that
    /// frame, or the error code of the page fault.
    pub fn attempt(&mut self, gpa: Gpa, access: Access) -> Result<Hpa, u64> {
        if self.vm.host().take_pending_flush() {
            self.flush();
        }
        let value = self.next_value;
        self.next_value += 1;

        let walked = self.walker.walk(&self.arena, self.vm.root(), gpa, access);
        let before = walked.result.ok().map(|hpa| self.arena.get(hpa));
        let done = self.cpu.access(gpa, access, value).unwrap_or_else(|trouble| panic!("{trouble}"));
        let path = self.path(gpa);
        let context = || format!("{access:?} of {gpa}, entries {path:x?}");
        match (done, walked.result) {
            (Done::Completed(seen), Ok(hpa)) => {
                let after = self.arena.get(hpa);
                match access {
                    Access::Read => assert_eq!((Some(seen), Some(after)), (before, before), "{}", context()),
                    Access::Write => assert_eq!(after, value, "no write to {hpa}: {}", context()),
                    Access::Execute | Access::ExecuteUser => assert_eq!(Some(after), before, "{}", context()),
                }
                self.counts.completed += 1;
            }
            (Done::PageFault { cr2, code }, Err(expected)) => {
                assert_eq!(code, expected, "error code of the CPU, of the walker: {}", context());
                assert_eq!(cr2, linear(gpa), "CR2: {}", context());
                self.counts.faults += 1;
            }
            (done, walked) => panic!("the CPU: {done:x?}, the walker: {walked:x?}: {}", context()),
        }
        let mut expected = walked.path;
        if walked.result.is_err() {
            // A CPU may set accessed bits before a fault, and need not; the walker does not.
            for (step, seen) in expected.iter_mut().zip(&path) {
                if step.entry & PRESENT != 0 {
                    step.entry |= seen.entry & ACCESSED;
                }
            }
        }
        assert_eq!(path, expected, "accessed and dirty bits of the CPU, of the walker: {access:?} of {gpa}");
        walked.result
    }

    /// The PTEs on the way to `gpa`.
    pub fn path(&self, gpa: Gpa) -> Vec<Step> {
        path(&self.arena, self.vm.root(), gpa)
    }

    /// The lowest PTE for `gpa`.
    pub fn lowest(&self, gpa: Gpa) -> Step {
        *self.path(gpa).last().expect("the root's entry at least")
    }

    /// Drops all translations of the CPU.
    pub fn flush(&mut self) {
        self.cpu.flush().unwrap_or_else(|trouble| panic!("{trouble}"));
        self.counts.flushes += 1;
    }
}

/// Fills page `page` of `frames` with values that no other frame has, and an instruction to
/// execute.
pub fn fill(arena: &Arena, frames: &Frames, page: u64) {
    let start = frames.page(page).0;
    for offset in WORDS {
        // No written value has the high bit.
        arena.set(Hpa(start + offset), 1 << 63 | (start + offset));
    }
    arena.set(Hpa(start + EXECUTED), u64::from(RETURN));
}

/// Page tables that map only the system pages, made without the engine. Returns their root.
fn tables_by_hand(arena: &Arena) -> Hpa {
    const LINK: u64 = PRESENT | WRITABLE | USER | ACCESSED;
    // Behind the system pages.
    let tables: [u64; 4] = std::array::from_fn(|index| SYSTEM_HPA.0 + (NR_SYSTEM_PAGES + index as u64) * PAGE_SIZE);
    let at = |level: usize, gpa: u64| Hpa(tables[4 - level] + 8 * (gpa >> (12 + 9 * (level - 1)) & 0x1ff));
    for level in [4, 3, 2] {
        arena.set(at(level, SYSTEM_GPA), tables[5 - level] | LINK);
    }
    for page in 0..NR_SYSTEM_PAGES {
        arena.set(at(1, SYSTEM_GPA + page * PAGE_SIZE), (SYSTEM_HPA.0 + page * PAGE_SIZE) | LINK);
    }
    Hpa(tables[0])
}
