use alloc::collections::BTreeMap;

use super::*;
use crate::slot::set::Slots;
use crate::table::retire::{Epochs, Fences};

/// A set, and what it has as a plain map by number.
struct World {
    set: NonNull<SlotSet<()>>,
    plain: BTreeMap<u32, (GfnRange, MemoryRegionFlags)>,
}

impl Drop for World {
    fn drop(&mut self) {
        // SAFETY: the set is this world's alone.
        unsafe {
            self.set().free_parts();
            free(Some(self.set));
        }
    }
}

fn entry(id: u32, range: GfnRange, flags: MemoryRegionFlags) -> SlotEntry<()> {
    SlotEntry { range, id, flags, slot: NonNull::dangling(), log: None, userfault: None }
}

fn range(start: u64, nr_pages: u64) -> GfnRange {
    GfnRange::new(Gfn(start), nr_pages)
}

impl World {
    fn new() -> World {
        World { set: NonNull::from(Box::leak(SlotSet::empty().unwrap())), plain: BTreeMap::new() }
    }

    fn set(&self) -> &SlotSet<()> {
        // SAFETY: it is freed by `apply` and `drop` alone.
        unsafe { self.set.as_ref() }
    }

    /// Memslot `id` becomes `after`, or is removed.
    fn apply(&mut self, id: u32, after: Option<(GfnRange, MemoryRegionFlags)>) -> Result<(), SlotError> {
        let before = self.set().place_of(id).map(|(_, entry)| entry.duplicate());
        let after_entry = after.map(|(range, flags)| entry(id, range, flags));
        let change = Change { id, before: before.as_ref(), after: after_entry.as_ref() };
        let mut room = Room::new(self.set().sizes(), &change).unwrap();
        assert!(room.fits(self.set()));
        let mut replaced = Replaced::nothing();
        let mut draft = Draft::empty();
        room.build(self.set(), &change, &mut draft, &mut replaced)?;
        let set = draft.set().unwrap();
        draft.publish();
        // SAFETY: no other has the old set.
        unsafe {
            free(Some(self.set));
            replaced.free();
        }
        self.set = set;
        match after {
            Some(after) => self.plain.insert(id, after),
            None => self.plain.remove(&id),
        };
        Ok(())
    }

    /// Compares all that a look-up can find near `gfn`, and for memslot `id`.
    fn check(&self, guess: &AtomicU32, gfn: Gfn, id: u32) {
        let set = self.set();
        assert!(set.is_sound());
        let has = self.plain.iter().find(|(_, (range, _))| range.contains(gfn)).map(|(&id, _)| id);
        assert_eq!(set.find(guess, gfn).map(|entry| entry.id), has, "at {gfn}");
        let from =
            self.plain.iter().filter(|(_, (range, _))| range.end > gfn).min_by_key(|(_, (range, _))| range.start);
        assert_eq!(set.from(gfn).next().map(|entry| entry.id), from.map(|(&id, _)| id), "from {gfn}");
        let found = set.by_id(guess, id).map(|entry| (entry.range, entry.flags));
        assert_eq!(found, self.plain.get(&id).copied(), "slot {id}");
        let logs = self.plain.values().any(|(_, flags)| flags.contains(MemoryRegionFlags::LOG_DIRTY_PAGES));
        assert_eq!(set.any_logs(), logs);
    }

    fn check_all(&self) {
        let mut sorted: Vec<u32> = self.plain.keys().copied().collect();
        sorted.sort_by_key(|id| self.plain[id].0.start);
        assert_eq!(self.set().entries().map(|entry| entry.id).collect::<Vec<u32>>(), sorted);
        assert!(self.set().chunks.len() <= 1 + sorted.len() / MIN_SLOTS);
    }
}

/// Numbers below `bound`, in an order without a pattern.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (self.0 >> 33) % bound
    }
}

const PLAIN: MemoryRegionFlags = MemoryRegionFlags::empty();

#[test]
fn sets_have_what_a_map_has_after_any_changes() {
    for (nr_ids, nr_places, seed) in [(3, 4, 1), (40, 50, 2), (1000, 1200, 3)] {
        let (mut world, mut random, guess) = (World::new(), Random(seed), AtomicU32::new(0));
        for step in 0..nr_ids * 12 {
            let id = random.below(nr_ids) as u32;
            let (place, nr_pages) = (random.below(nr_places) * 4, random.below(6) + 1);
            let flags = if random.below(3) == 0 { MemoryRegionFlags::LOG_DIRTY_PAGES } else { PLAIN };
            let now = world.plain.get(&id).copied();
            // Mostly creations at first, and deletions in the end.
            let is_early = step < nr_ids * 6;
            let after = match (random.below(8), now) {
                (0..6, Some(_)) if !is_early => None,
                (0..2, Some(_)) => None,
                (0..4, Some((range, _))) => Some((range, flags)),
                _ => Some((range(place, nr_pages), flags)),
            };
            if after.is_none() && now.is_none() {
                continue;
            }
            let other = after.and_then(|(range, _)| {
                let others = world.plain.iter().filter(|&(&other, (at, _))| other != id && at.overlaps(range));
                others.min_by_key(|(_, (at, _))| at.start).map(|(&other, _)| other)
            });
            let result = world.apply(id, after);
            let refused = other.map(|other| {
                let gpa = after.expect("only what is there overlaps").0.start.gpa();
                SlotError::Overlap { slot: id, gpa, other }
            });
            assert_eq!(result.err(), refused);
            world.check(&guess, Gfn(random.below(nr_places * 4 + 8)), random.below(nr_ids) as u32);
            world.check(&guess, Gfn(place), id);
        }
        world.check_all();
        while let Some((&id, _)) = world.plain.first_key_value() {
            world.apply(id, None).unwrap();
        }
        world.check_all();
        world.check(&guess, Gfn(0), 0);
    }
}

#[test]
fn a_memslot_that_is_there_is_not_created() {
    let mut world = World::new();
    world.apply(7, Some((range(0, 4), PLAIN))).unwrap();
    let again = entry(7, range(8, 4), PLAIN);
    let change = Change { id: 7, before: None, after: Some(&again) };
    let mut room = Room::new(world.set().sizes(), &change).unwrap();
    let result = room.build(world.set(), &change, &mut Draft::empty(), &mut Replaced::nothing());
    assert_eq!(result.err(), Some(SlotError::SlotBusy { slot: 7 }));
    world.check_all();
}

#[test]
fn memslots_created_in_order_fill_their_chunks() {
    for is_ascending in [true, false] {
        let mut world = World::new();
        for id in 0..4096 {
            let place = if is_ascending { u64::from(id) } else { 4095 - u64::from(id) };
            world.apply(id, Some((range(place, 1), PLAIN))).unwrap();
        }
        world.check_all();
        assert!(world.set().chunks.len() <= 4096 / (CHUNK_SLOTS - MIN_SLOTS) + 1);
    }
}

#[test]
fn a_set_is_refused_room_that_was_made_for_a_smaller_one() {
    let mut world = World::new();
    let new = entry(5000, range(1 << 20, 1), PLAIN);
    let change = Change { id: 5000, before: None, after: Some(&new) };
    let room = |world: &World| Room::new(world.set().sizes(), &change).unwrap();
    // Chunks that are too small, and then a list of them.
    for nr_slots in [0, CHUNK_SLOTS - 2, CHUNK_SLOTS] {
        for id in world.plain.len()..nr_slots {
            world.apply(id as u32, Some((range(id as u64, 1), PLAIN))).unwrap();
        }
        let before = room(&world);
        assert!(before.fits(world.set()));
        let next = world.plain.len() as u32;
        world.apply(next, Some((range(u64::from(next), 1), PLAIN))).unwrap();
        assert!(!before.fits(world.set()), "{nr_slots} memslots");
        assert!(room(&world).fits(world.set()));
    }
    // A list of leaves: a later number.
    let before = Room::new(world.set().sizes(), &Change { id: 0, before: None, after: Some(&new) }).unwrap();
    world.apply(20_000, Some((range(1 << 30, 1), PLAIN))).unwrap();
    assert!(!before.fits(world.set()));
}

#[test]
#[should_panic(expected = "two VMs are mixed up")]
fn no_memslot_is_found_in_a_guard_of_other_epochs() {
    let (epochs, others) = (Epochs::new(Fences::Both), Epochs::new(Fences::Both));
    let slots = Slots::<()>::new(&epochs).unwrap();
    let participant = others.borrow_participant().unwrap();
    let _ = slots.by_id(&others.pin(&participant), 0);
}
