//! The engine against a plain model: random operations on slots, random accesses and harvests, one after another. After
//! every operation the result, the translation of every page that matters, the dirty log and the number of tables must
//! be what the model says.
#![cfg(not(any(loom, shuttle)))]
#![allow(missing_docs)]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::{GIB, MIB, TestBacking, TestHost, assert_no_table_is_left, change, translate};
use proptest::prelude::*;
use slat::{
    Access, Config, Ept, Error, Exit, Format, Gfn, GfnRange, Gpa, Level, Locking, MemoryRegion, MemoryRegionFlags, Npt,
    Outcome, PAGE_SIZE, PageSize, Vcpu, Vm,
};

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const READONLY: MemoryRegionFlags = MemoryRegionFlags::READONLY;

const NR_SLOTS: u32 = 5;
/// Where slots begin: together, apart, across the ends of blocks of each size, and next to the end of the space.
const PLACES: [u64; 14] = [
    0,
    0x1000,
    2 * MIB - 0x1000,
    2 * MIB,
    3 * MIB,
    4 * MIB,
    6 * MIB,
    GIB - 0x1000,
    GIB,
    GIB + 2 * MIB,
    2 * GIB,
    512 * GIB - 2 * MIB,
    (1 << 48) - 2 * MIB,
    (1 << 48) - 0x1000,
];
const NR_PAGES: [u64; 8] = [1, 3, 63, 512, 515, 1024, 1536, 1 << 18];
const SIZES: [PageSize; 3] = [PageSize::Size4K, PageSize::Size2M, PageSize::Size1G];

/// How the frames of a backing lie, compared with the guest's.
#[derive(Clone, Copy, Debug)]
enum Alignment {
    Like1G,
    Like2M,
    Odd,
}

#[derive(Clone, Debug)]
enum Op {
    Create {
        slot: u32,
        place: usize,
        pages: usize,
        flags: u32,
        size: usize,
        alignment: Alignment,
        read_only_frames: bool,
    },
    Delete {
        slot: u32,
    },
    Move {
        slot: u32,
        place: usize,
    },
    SetFlags {
        slot: u32,
        flags: u32,
    },
    Resize {
        slot: u32,
    },
    /// Access to page `page` (modulo the size) of a slot, or to a place if there is no such slot.
    Touch {
        slot: u32,
        page: u64,
        access: Access,
    },
    TouchPlace {
        place: usize,
        access: Access,
    },
    Harvest {
        slot: u32,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let slot = || 0..NR_SLOTS;
    let access = || prop_oneof![3 => Just(Access::Write), 2 => Just(Access::Read), 1 => Just(Access::Execute)];
    let page =
        prop_oneof![Just(0u64), Just(u64::MAX), 0u64..8, 508u64..516, any::<u64>().prop_map(|page| page % (1 << 18)),];
    let alignment = prop_oneof![Just(Alignment::Like1G), Just(Alignment::Like2M), Just(Alignment::Odd)];
    let create = (slot(), 0..PLACES.len(), 0..NR_PAGES.len(), 0u32..4, 0usize..3, alignment, any::<bool>()).prop_map(
        |(slot, place, pages, flags, size, alignment, read_only_frames)| {
            // Read-only slots are one in four of those that would be.
            let flags = if pages % 4 == 0 { flags } else { flags & LOG.bits() };
            Op::Create { slot, place, pages, flags, size, alignment, read_only_frames }
        },
    );
    prop_oneof![
        4 => create,
        1 => slot().prop_map(|slot| Op::Delete { slot }),
        2 => (slot(), 0..PLACES.len()).prop_map(|(slot, place)| Op::Move { slot, place }),
        3 => (slot(), 0u32..4).prop_map(|(slot, flags)| Op::SetFlags { slot, flags }),
        1 => slot().prop_map(|slot| Op::Resize { slot }),
        16 => (slot(), page, access()).prop_map(|(slot, page, access)| Op::Touch { slot, page, access }),
        2 => (0..PLACES.len(), access()).prop_map(|(place, access)| Op::TouchPlace { place, access }),
        4 => slot().prop_map(|slot| Op::Harvest { slot }),
    ]
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Leaf {
    /// Frame of its first page.
    pfn: u64,
    level: Level,
    writable: bool,
    host_writable: bool,
}

#[derive(Debug)]
struct Slot {
    range: GfnRange,
    flags: MemoryRegionFlags,
    first_pfn: u64,
    max_size: PageSize,
    read_only_frames: bool,
    dirty: BTreeSet<u64>,
}

/// What should be.
#[derive(Debug, Default)]
struct Model {
    slots: BTreeMap<u32, Slot>,
    /// Leaves by their first frame.
    leaves: BTreeMap<u64, Leaf>,
    /// Table entries, by level and first frame of what they cover.
    tables: BTreeSet<(Level, u64)>,
    root_level: u8,
    nr_created: u64,
}

impl Model {
    fn slot_at(&self, gfn: Gfn) -> Option<u32> {
        self.slots.iter().find(|(_, slot)| slot.range.contains(gfn)).map(|(id, _)| *id)
    }

    fn leaf_at(&self, gfn: Gfn) -> Option<(u64, Leaf)> {
        let (&first, &leaf) = self.leaves.range(..=gfn.0).next_back()?;
        (gfn.0 < first + leaf.level.nr_pages()).then_some((first, leaf))
    }

    /// Level of the empty entry for `gfn`.
    fn empty_level(&self, gfn: Gfn) -> Level {
        let mut level = Level(self.root_level);
        while self.tables.contains(&(level, gfn.align_down(level).0)) {
            level = level.down();
        }
        level
    }

    fn overlapping(&self, id: u32, range: GfnRange) -> Option<u32> {
        let others = self.slots.iter().filter(|(other, slot)| **other != id && slot.range.overlaps(range));
        others.min_by_key(|(_, slot)| slot.range.start).map(|(other, _)| *other)
    }

    /// Replaces the huge leaf that begins at frame `first` by its parts.
    fn split(&mut self, first: u64) {
        let Some(leaf) = self.leaves.remove(&first) else { return };
        let level = leaf.level.down();
        for part in 0..512 {
            let offset = part * level.nr_pages();
            self.leaves.insert(first + offset, Leaf { pfn: leaf.pfn + offset, level, ..leaf });
        }
    }

    /// Makes tables of the entries that `range` covers in part: what lies beside it stays.
    fn refine(&mut self, range: GfnRange) {
        for edge in [range.start, Gfn(range.end.0 - 1)] {
            let mut level = Level(self.root_level);
            while !range.covers(edge.block(level)) {
                let first = edge.align_down(level).0;
                if self.tables.insert((level, first)) {
                    self.split(first);
                }
                level = level.down();
            }
        }
    }

    fn take_away(&mut self, range: GfnRange) {
        self.refine(range);
        self.leaves.retain(|&first, _| !range.contains(Gfn(first)));
        self.tables.retain(|&(level, first)| !range.covers(Gfn(first).block(level)));
    }

    fn touch(&mut self, gfn: Gfn, access: Access) -> Outcome {
        let exit = Outcome::Exit(Exit::Mmio { gpa: gfn.gpa(), access });
        let writes = access == Access::Write;
        loop {
            let found = self.leaf_at(gfn);
            if let Some((_, leaf)) = found
                && (!writes || leaf.writable)
            {
                return Outcome::Resume;
            }
            let Some(id) = self.slot_at(gfn) else { return exit };
            let empty_level = if found.is_none() { self.empty_level(gfn) } else { Level::L4K };
            let Some(slot) = self.slots.get_mut(&id) else { return exit };
            if writes && slot.flags.contains(READONLY) {
                return exit;
            }
            let logs = slot.flags.contains(LOG);
            let Some((first, leaf)) = found else {
                let pfn = slot.first_pfn + (gfn.0 - slot.range.start.0);
                let mut level = if logs { Level::L4K } else { slot.max_size.level().min(empty_level) };
                let fits = |level: Level| {
                    (pfn ^ gfn.0).is_multiple_of(level.nr_pages()) && slot.range.covers(gfn.block(level))
                };
                while !fits(level) {
                    level = level.down();
                }
                let host_writable = (writes || !slot.read_only_frames) && !slot.flags.contains(READONLY);
                let writable = host_writable && (writes || !logs);
                if logs && writable {
                    slot.dirty.insert(gfn.0 - slot.range.start.0);
                }
                let pfn = pfn & !(level.nr_pages() - 1);
                self.leaves.insert(gfn.align_down(level).0, Leaf { pfn, level, writable, host_writable });
                while level.0 < self.root_level {
                    level = level.up();
                    self.tables.insert((level, gfn.align_down(level).0));
                }
                return Outcome::Resume;
            };
            if !leaf.host_writable {
                self.leaves.remove(&first);
            } else if logs && leaf.level > Level::L4K {
                self.tables.insert((leaf.level, first));
                self.split(first);
            } else {
                if logs {
                    slot.dirty.insert(gfn.0 - slot.range.start.0);
                }
                self.leaves.insert(first, Leaf { writable: true, ..leaf });
                return Outcome::Resume;
            }
        }
    }

    fn protect(&mut self, range: GfnRange) {
        for (_, leaf) in self.leaves.range_mut(range.start.0..range.end.0) {
            leaf.writable = false;
        }
    }

    /// What a change of an existing slot must answer; done, if that is `Ok`.
    fn change(&mut self, id: u32, start: Gfn, flags: MemoryRegionFlags) -> Result<(), Error> {
        let before = self.slots.get(&id).ok_or(Error::NoBacking { slot: id })?;
        let range = GfnRange::new(start, before.range.nr_pages());
        if (before.flags ^ flags).contains(READONLY) {
            return Err(Error::ReadOnlyFixed { slot: id });
        }
        if let Some(other) = self.overlapping(id, range) {
            return Err(Error::Overlap { slot: id, gpa: start.gpa(), other });
        }
        let (old_range, begins) = (before.range, flags.contains(LOG) && !before.flags.contains(LOG));
        if range != old_range {
            self.take_away(old_range);
        } else if begins {
            self.protect(range);
        }
        let slot = self.slots.get_mut(&id).ok_or(Error::NoSuchSlot { slot: id })?;
        (slot.range, slot.flags) = (range, flags);
        if !flags.contains(LOG) {
            slot.dirty.clear();
        } else if range != old_range && !begins {
            // All pages of a slot that logs have another address now.
            slot.dirty = (0..range.nr_pages()).collect();
        }
        Ok(())
    }
}

/// The engine and its model.
struct Pair<F: Format> {
    vm: Arc<Vm<TestHost, F>>,
    vcpu: Vcpu<TestHost, F>,
    model: Model,
    /// Pages to be compared after each operation.
    watched: BTreeSet<u64>,
}

impl<F: Format> Pair<F> {
    fn new(locking: Locking) -> Pair<F> {
        let vm = Arc::new(Vm::new(TestHost::default(), Config::with_locking(locking)).unwrap());
        let model = Model { root_level: F::ROOT_LEVEL.0, ..Model::default() };
        let watched = PLACES.iter().map(|place| place / PAGE_SIZE).collect();
        Pair { vcpu: vm.create_vcpu().unwrap(), vm, model, watched }
    }

    fn watch(&mut self, gfn: u64) {
        let space = 1 << (F::GPA_BITS - 12);
        self.watched.extend((gfn.saturating_sub(1)..gfn + 2).filter(|gfn| *gfn < space));
    }

    fn watch_range(&mut self, range: GfnRange) {
        self.watch(range.start.0);
        self.watch(range.end.0);
    }

    fn create(&mut self, op: &Op) {
        let &Op::Create { slot: id, place, pages, flags, size, alignment, read_only_frames } = op else { return };
        let (gpa, nr_pages) = (PLACES[place], NR_PAGES[pages]);
        let flags = MemoryRegionFlags::from_bits_truncate(flags);
        let start = gpa / PAGE_SIZE;
        self.model.nr_created += 1;
        let base = self.model.nr_created << 20;
        let first_pfn = match alignment {
            Alignment::Like1G => base + start % (1 << 18),
            Alignment::Like2M => base + 512 + start % 512,
            Alignment::Odd => base + start % 512 + 1,
        };
        let backing = TestBacking::new(first_pfn, nr_pages, SIZES[size]);
        backing.read_gives_writable.store(!read_only_frames, Ordering::SeqCst);
        let region = MemoryRegion {
            slot: id,
            flags,
            guest_phys_addr: Gpa(gpa),
            memory_size: nr_pages * PAGE_SIZE,
            backing: Some(Arc::new(backing)),
        };
        let expected = if gpa + nr_pages * PAGE_SIZE > 1 << F::GPA_BITS {
            Err(Error::AddressTooHigh { gpa: Gpa(gpa), gpa_bits: F::GPA_BITS })
        } else if self.model.slots.contains_key(&id) {
            Err(Error::BackingFixed { slot: id })
        } else if let Some(other) = self.model.overlapping(id, GfnRange::new(Gfn(start), nr_pages)) {
            Err(Error::Overlap { slot: id, gpa: Gpa(gpa), other })
        } else {
            let range = GfnRange::new(Gfn(start), nr_pages);
            self.watch_range(range);
            let (max_size, dirty) = (SIZES[size], BTreeSet::new());
            self.model.slots.insert(id, Slot { range, flags, first_pfn, max_size, read_only_frames, dirty });
            Ok(())
        };
        assert_eq!(self.vm.set_user_memory_region(region), expected);
    }

    fn change(&mut self, id: u32, start: Gfn, flags: MemoryRegionFlags) {
        let nr_pages = self.model.slots.get(&id).map_or(1, |slot| slot.range.nr_pages());
        let result = self.vm.set_user_memory_region(change(id, flags, start.gpa().0, nr_pages * PAGE_SIZE));
        let expected = if start.gpa().0 + nr_pages * PAGE_SIZE > 1 << F::GPA_BITS {
            Err(Error::AddressTooHigh { gpa: start.gpa(), gpa_bits: F::GPA_BITS })
        } else {
            self.model.change(id, start, flags)
        };
        assert_eq!(result, expected);
        if let Some(slot) = self.model.slots.get(&id) {
            self.watch_range(slot.range);
        }
    }

    fn touch(&mut self, gfn: Gfn, access: Access) {
        let gpa = Gpa(gfn.gpa().0);
        assert_eq!(self.vcpu.handle_fault(gpa, access), Ok(self.model.touch(gfn, access)), "{access:?} at {gpa}");
        self.watch(gfn.0);
    }

    fn harvest(&mut self, id: u32) {
        let Some(slot) = self.model.slots.get_mut(&id) else {
            assert_eq!(self.vm.get_dirty_log(id, &mut [0; 64]), Err(Error::NoSuchSlot { slot: id }));
            return;
        };
        let nr_words = slot.range.nr_pages().div_ceil(64) as usize;
        let mut bitmap = vec![u64::MAX; nr_words + 1];
        if !slot.flags.contains(LOG) {
            assert_eq!(self.vm.get_dirty_log(id, &mut bitmap), Err(Error::NotLogging { slot: id }));
            return;
        }
        let mut expected = vec![0; nr_words];
        let (start, dirty) = (slot.range.start.0, std::mem::take(&mut slot.dirty));
        for &page in &dirty {
            expected[page as usize / 64] |= 1 << (page % 64);
            let (first, leaf) = self.model.leaf_at(Gfn(start + page)).unwrap_or((0, NONE));
            if leaf != NONE {
                self.model.leaves.insert(first, Leaf { writable: false, ..leaf });
            }
        }
        assert_eq!(self.vm.get_dirty_log(id, &mut bitmap), Ok(dirty.len() as u64));
        assert!(bitmap[..nr_words] == expected[..], "the log of slot {id} is not that of {dirty:?}");
        assert_eq!(bitmap[nr_words], u64::MAX, "a word behind the slot's was written");
    }

    fn apply(&mut self, op: &Op) {
        let range_of = |model: &Model, id: u32| model.slots.get(&id).map(|slot| (slot.range, slot.flags));
        match *op {
            Op::Create { .. } => self.create(op),
            Op::Delete { slot: id } => {
                let expected = match self.model.slots.remove(&id) {
                    Some(slot) => {
                        self.model.take_away(slot.range);
                        Ok(())
                    }
                    None => Err(Error::NoSuchSlot { slot: id }),
                };
                assert_eq!(self.vm.set_user_memory_region(change(id, LOG, 0, 0)), expected);
            }
            Op::Move { slot, place } => {
                let flags = range_of(&self.model, slot).map_or(LOG, |(_, flags)| flags);
                self.change(slot, Gpa(PLACES[place]).gfn(), flags);
            }
            Op::SetFlags { slot, flags } => {
                let (range, old) = range_of(&self.model, slot).unwrap_or((GfnRange::new(Gfn(0), 1), LOG));
                // Mostly without asking for what is refused.
                let flags = if flags == 2 {
                    READONLY
                } else {
                    old & READONLY | MemoryRegionFlags::from_bits_truncate(flags & 1)
                };
                self.change(slot, range.start, flags);
            }
            Op::Resize { slot } => {
                let Some((range, flags)) = range_of(&self.model, slot) else { return };
                let memory_size = (range.nr_pages() + 1) * PAGE_SIZE;
                let gpa = range.start.gpa().0;
                let expected = if gpa + memory_size > 1 << F::GPA_BITS {
                    Error::AddressTooHigh { gpa: Gpa(gpa), gpa_bits: F::GPA_BITS }
                } else {
                    Error::SizeFixed { slot, memory_size }
                };
                assert_eq!(self.vm.set_user_memory_region(change(slot, flags, gpa, memory_size)), Err(expected));
            }
            Op::Touch { slot, page, access } => {
                let range = range_of(&self.model, slot).map_or(GfnRange::new(Gfn(0), 1), |(range, _)| range);
                let page = if page == u64::MAX { range.nr_pages() - 1 } else { page % range.nr_pages() };
                self.touch(Gfn(range.start.0 + page), access);
            }
            Op::TouchPlace { place, access } => self.touch(Gpa(PLACES[place]).gfn(), access),
            Op::Harvest { slot } => self.harvest(slot),
        }
    }

    fn compare(&self) {
        for &gfn in &self.watched {
            let found = translate(&self.vm, Gfn(gfn).gpa()).map(|t| (t.pfn.0, t.level, t.writable));
            let expected =
                self.model.leaf_at(Gfn(gfn)).map(|(first, leaf)| (leaf.pfn + (gfn - first), leaf.level, leaf.writable));
            assert_eq!(found, expected, "translation of frame {gfn:#x}");
        }
        assert_eq!(self.vm.stats().live_tables(), self.vm.host().live_tables() as u64);
    }

    /// All dirty logs, then the tables: those that the model knows, then none.
    fn finish(mut self) {
        for id in 0..NR_SLOTS {
            self.harvest(id);
            self.compare();
        }
        for id in 0..NR_SLOTS {
            self.apply(&Op::Delete { slot: id });
        }
        self.compare();
        drop(self.vcpu);
        self.vm.reclaim();
        assert_eq!(self.vm.host().live_tables(), self.model.tables.len() + 1);
        assert_no_table_is_left(&self.vm);
    }
}

/// Stands for "no leaf" where one is optional.
const NONE: Leaf = Leaf { pfn: u64::MAX, level: Level::L4K, writable: false, host_writable: false };

fn check<F: Format>(locking: Locking, ops: &[Op]) {
    let mut pair = Pair::<F>::new(locking);
    for op in ops {
        pair.apply(op);
        pair.compare();
    }
    pair.finish();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn npt_without_a_lock_does_what_the_model_does(ops in prop::collection::vec(op(), 1..80)) {
        check::<Npt>(Locking::None, &ops);
    }

    #[test]
    fn npt_with_a_shared_lock_does_what_the_model_does(ops in prop::collection::vec(op(), 1..80)) {
        check::<Npt>(Locking::Shared, &ops);
    }

    #[test]
    fn npt_with_an_exclusive_lock_does_what_the_model_does(ops in prop::collection::vec(op(), 1..80)) {
        check::<Npt>(Locking::Exclusive, &ops);
    }

    #[test]
    fn ept_without_a_lock_does_what_the_model_does(ops in prop::collection::vec(op(), 1..80)) {
        check::<Ept>(Locking::None, &ops);
    }

    #[test]
    fn ept_with_a_shared_lock_does_what_the_model_does(ops in prop::collection::vec(op(), 1..80)) {
        check::<Ept>(Locking::Shared, &ops);
    }

    #[test]
    fn ept_with_an_exclusive_lock_does_what_the_model_does(ops in prop::collection::vec(op(), 1..80)) {
        check::<Ept>(Locking::Exclusive, &ops);
    }
}
