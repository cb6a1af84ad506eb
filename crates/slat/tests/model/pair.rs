//! The engine and its model, side by side: each operation runs on both, and then they are compared.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use slat::dirty::ManualProtect;
use slat::error::{LogError, SlotError};
use slat::format::Format;
use slat::slots::MemoryAttributes;
use slat::tables::Invalidation;
use slat::{Access, Config, Gfn, GfnRange, Gpa, Level, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, Vcpu, Vm};
use std::sync::atomic::Ordering;

use super::ops::{
    Aging, Alignment, At, Bits, By, GUEST_MEMFD, LOG, LogRange, MASKS, NR_PAGES, NR_SLOTS, NewBitmap, Op, RANGE_PAGES,
    READONLY, SIZES, USERFAULT, WRITES, places,
};
use super::plain::{Model, Slot, Userfault, is_resident, log_words};
use crate::common::log::write_as_hardware;
use crate::common::{
    Frame, TestBacking, TestHost, Writes, assert_no_table_is_left, change, set_accessed_and_dirty, translate,
};

/// The most invalidations at once: more than fit into one chunk of ranges in flight.
const MAX_IN_FLIGHT: usize = 9;

/// Which leaves the host is notified of when they go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reports {
    Each,
    /// It needs none: it gets some.
    Some,
}

struct Pair<'v, F: Format> {
    reports: Reports,
    vm: &'v Arc<Vm<TestHost, F>>,
    vcpu: Vcpu<TestHost, F>,
    in_flight: Vec<Invalidation<'v>>,
    backings: BTreeMap<u32, Arc<TestBacking>>,
    model: Model,
    /// Pages that are compared after each operation.
    watched: BTreeSet<u64>,
}

/// Runs `ops` on a new engine and its model.
pub fn check<F: Format>(config: Config, reports: Reports, ops: &[Op]) {
    let host = match reports {
        Reports::Each => TestHost::default(),
        Reports::Some => TestHost::without_reports(),
    };
    let vm = Arc::new(Vm::<TestHost, F>::new(host, config).unwrap());
    vm.host().record_zapped();
    let mut pair = Pair {
        reports,
        vm: &vm,
        vcpu: vm.create_vcpu().unwrap(),
        in_flight: Vec::new(),
        backings: BTreeMap::new(),
        model: Model::new::<F>(config),
        watched: places::<F>().iter().map(|place| place / PAGE_SIZE).collect(),
    };
    for op in ops {
        pair.apply(op);
        pair.compare();
    }
    pair.finish();
}

impl<F: Format> Pair<'_, F> {
    const SPACE: u64 = 1 << (F::GPA_BITS - 12);

    fn watch(&mut self, gfn: u64) {
        self.watched.extend((gfn.saturating_sub(1)..gfn + 2).filter(|gfn| *gfn < Self::SPACE));
    }

    fn watch_range(&mut self, range: GfnRange) {
        self.watch(range.start.0);
        self.watch(range.end.0);
    }

    fn gfn(&self, at: At) -> Gfn {
        match at {
            At::Place(place) => Gpa(places::<F>()[place]).gfn(),
            At::Slot { slot, page } => {
                let range = self.model.slots.get(&slot).map_or(GfnRange::new(Gfn(0), 1), |slot| slot.range);
                let page = if page == u64::MAX { range.nr_pages() - 1 } else { page % range.nr_pages() };
                Gfn(range.start.0 + page)
            }
        }
    }

    /// `RANGE_PAGES[pages]` pages from `at` on, or as many as there are. Whole blocks are aligned.
    fn range(&self, at: At, pages: usize) -> GfnRange {
        let nr_pages = RANGE_PAGES[pages];
        let start = self.gfn(at).0;
        let start = if nr_pages >= 512 && nr_pages.is_power_of_two() { start & !(nr_pages - 1) } else { start };
        GfnRange { start: Gfn(start), end: Gfn(Self::SPACE.min(start + nr_pages)) }
    }

    fn new_frames(&mut self) -> u64 {
        self.model.nr_created += 1;
        self.model.nr_created << 20
    }

    fn create(&mut self, op: &Op) {
        let &Op::Create { slot: id, place, pages, flags, size, alignment, writes, bitmap } = op else { return };
        let (gpa, nr_pages) = (places::<F>()[place], NR_PAGES[pages]);
        let flags = MemoryRegionFlags::from_bits_truncate(flags);
        let userfault = bitmap.filter(|_| flags.contains(USERFAULT)).map(|bitmap| Userfault::new(bitmap, nr_pages));
        let start = gpa / PAGE_SIZE;
        let base = self.new_frames();
        let first_pfn = match alignment {
            Alignment::Like1G => base + start % (1 << 18),
            Alignment::Like2M => base + 512 + start % 512,
            Alignment::Odd => base + start % 512 + 1,
        };
        let writes = if WRITES[writes] == Writes::Allowed { Writes::Allowed } else { Writes::IfWritten };
        let mut backing = TestBacking::new(first_pfn, nr_pages + 1, SIZES[size]);
        backing.is_resident = is_resident;
        let backing = Arc::new(backing);
        backing.reads_are_writable.store(writes == Writes::Allowed, Ordering::SeqCst);
        let region = MemoryRegion {
            slot: id,
            flags,
            guest_phys_addr: Gpa(gpa),
            memory_size: nr_pages * PAGE_SIZE,
            backing: Some(Arc::clone(&backing)),
            userfault_bitmap: userfault.as_ref().map(Userfault::bitmap),
        };
        let expected = if flags.contains(READONLY | GUEST_MEMFD) {
            Err(SlotError::ReadOnlyGuestMemfd { slot: id })
        } else if gpa + nr_pages * PAGE_SIZE > 1 << F::GPA_BITS {
            Err(SlotError::AddressTooHigh { gpa: Gpa(gpa), gpa_bits: F::GPA_BITS })
        } else if self.model.slots.contains_key(&id) {
            Err(SlotError::BackingFixed { slot: id })
        } else if let Some(Err(error)) =
            userfault.as_ref().map(|userfault| userfault.check(id, GfnRange::new(Gfn(start), nr_pages)))
        {
            Err(error)
        } else if let Some(other) = self.model.overlapping(id, GfnRange::new(Gfn(start), nr_pages)) {
            Err(SlotError::Overlap { slot: id, gpa: Gpa(gpa), other })
        } else {
            let range = GfnRange::new(Gfn(start), nr_pages);
            self.watch_range(range);
            let are_set = flags.contains(LOG) && self.model.config.manual_protect == ManualProtect::InitiallySet;
            let (max_size, frames, dirty) = (SIZES[size], BTreeMap::new(), log_words(nr_pages, are_set));
            let private = BTreeSet::new();
            let slot = Slot { range, flags, first_pfn, max_size, writes, frames, dirty, userfault, private };
            self.model.slots.insert(id, slot);
            self.backings.insert(id, backing);
            Ok(())
        };
        assert_eq!(self.vm.set_user_memory_region(region), expected);
    }

    fn change(&mut self, id: u32, start: Gfn, flags: MemoryRegionFlags, bitmap: Option<NewBitmap>) {
        let nr_pages = self.model.slots.get(&id).map_or(1, |slot| slot.range.nr_pages());
        self.change_to(id, start, nr_pages, flags, bitmap);
    }

    fn change_to(&mut self, id: u32, start: Gfn, nr_pages: u64, flags: MemoryRegionFlags, bitmap: Option<NewBitmap>) {
        let bitmap = bitmap.map(|bitmap| Userfault::new(bitmap, nr_pages));
        let result = self.vm.set_user_memory_region(MemoryRegion {
            userfault_bitmap: bitmap.as_ref().map(Userfault::bitmap),
            ..change(id, flags, start.gpa().0, nr_pages * PAGE_SIZE)
        });
        let expected = if flags.contains(READONLY | GUEST_MEMFD) {
            Err(SlotError::ReadOnlyGuestMemfd { slot: id })
        } else if start.gpa().0 + nr_pages * PAGE_SIZE > 1 << F::GPA_BITS {
            Err(SlotError::AddressTooHigh { gpa: start.gpa(), gpa_bits: F::GPA_BITS })
        } else {
            self.model.change(id, GfnRange::new(start, nr_pages), flags, bitmap.as_ref())
        };
        assert_eq!(result, expected);
        if let Some(slot) = self.model.slots.get(&id) {
            self.watch_range(slot.range);
        }
    }

    fn touch(&mut self, gfn: Gfn, access: Access, by: By) {
        let gpa = gfn.gpa();
        let window = self.model.window(gfn);
        [gfn.0, window.start.0, window.end.0].into_iter().for_each(|gfn| self.watch(gfn));
        if by == By::Hardware {
            let done = translate(self.vm, gpa).is_some_and(|found| match access {
                Access::Write => write_as_hardware(self.vm, gfn, found),
                Access::Read | Access::Execute | Access::ExecuteUser => {
                    set_accessed_and_dirty(self.vm, gpa, found, access)
                }
            });
            assert_eq!(done, self.model.access(gfn, access), "{access:?} at {gpa} by hardware");
            if done {
                return;
            }
        }
        assert_eq!(self.vcpu.handle_fault(gpa, access), self.model.fault(gfn, access), "{access:?} at {gpa}");
    }

    fn harvest(&mut self, id: u32) {
        let nr_pages = self.model.slots.get(&id).map_or(64, |slot| slot.range.nr_pages());
        let mut bitmap = vec![u64::MAX; nr_pages.div_ceil(64) as usize + 1];
        let result = self.vm.get_dirty_log(id, &mut bitmap);
        self.compare_log(id, (0, nr_pages), result, &bitmap);
    }

    fn get_range(&mut self, id: u32, range: LogRange) {
        let pages = range.of(self.model.slots.get(&id).map_or(64, |slot| slot.range.nr_pages()));
        let mut bitmap = vec![u64::MAX; Self::bitmap_len(pages)];
        let result = self.vm.get_dirty_log_range(id, pages.0, pages.1, &mut bitmap);
        self.compare_log(id, pages, result, &bitmap);
    }

    /// Words for the log of `pages`, and one more; few, if there are far too many.
    fn bitmap_len(pages: (u64, u64)) -> usize {
        pages.1.min(1 << 20).div_ceil(64) as usize + 1
    }

    /// Compares a result for `pages` of the log of memslot `id` with the model: all words that
    /// belong to them, and no other.
    fn compare_log(&mut self, id: u32, pages: (u64, u64), result: Result<u64, LogError>, bitmap: &[u64]) {
        let expected = self.model.get(id, pages);
        let count = |words: &Vec<u64>| words.iter().map(|word| u64::from(word.count_ones())).sum();
        assert_eq!(result, expected.as_ref().map(count).map_err(|error| *error), "{pages:?} of the log of slot {id}");
        let expected = expected.unwrap_or_default();
        let (words, behind) = bitmap.split_at(expected.len());
        assert!(words == expected, "the log of slot {id}, {pages:?}, is {words:x?} and not {expected:x?}");
        assert!(behind.iter().all(|word| *word == u64::MAX), "a word behind the log's was written");
    }

    fn clear(&mut self, id: u32, range: LogRange, mask: usize) {
        let pages = range.of(self.model.slots.get(&id).map_or(64, |slot| slot.range.nr_pages()));
        let mask: Vec<u64> = MASKS[mask].iter().copied().cycle().take(Self::bitmap_len(pages)).collect();
        let result = self.vm.clear_dirty_log(id, pages.0, pages.1, &mask);
        assert_eq!(result, self.model.clear(id, pages, &mask), "{pages:?} of the log of slot {id}");
    }

    /// Begins an invalidation of `range`, and checks that nothing inside is mapped, or can be.
    fn begin(&mut self, range: GfnRange) {
        self.watch_range(range);
        let invalidation = self.vm.invalidate_range(range).unwrap();
        assert_eq!(invalidation.range(), range);
        let is_flushed = |flush: &GfnRange| flush.covers(range);
        assert!(self.vm.host().flushes.lock().unwrap().iter().flatten().any(is_flushed), "{range:?} is not flushed");
        self.vm.host().flushes.lock().unwrap().clear();
        self.in_flight.push(invalidation);
        self.model.zap_range(range);
        self.model.in_flight.push(range);
        for gfn in [range.start.0, range.end.0 - 1, range.start.0 + range.nr_pages() / 2] {
            for access in [Access::Read, Access::Write] {
                assert_eq!(self.vcpu.handle_fault(Gfn(gfn).gpa(), access), Ok(Outcome::Resume));
                assert_eq!(translate(self.vm, Gfn(gfn).gpa()), None);
            }
        }
    }

    fn end(&mut self, index: usize) {
        if !self.in_flight.is_empty() {
            let index = index % self.in_flight.len();
            drop(self.in_flight.swap_remove(index));
            self.model.in_flight.swap_remove(index);
        }
    }

    fn replace(&mut self, id: u32, page: u64, writes: Writes) {
        let Some(backing) = self.backings.get(&id).cloned() else { return };
        let gfn = self.gfn(At::Slot { slot: id, page });
        self.begin(GfnRange::new(gfn, 1));
        let frame = Frame { pfn: self.new_frames(), writes };
        let Some(slot) = self.model.slots.get_mut(&id) else { return };
        let page = gfn.0 - slot.range.start.0;
        slot.frames.insert(page, frame);
        backing.frames.write().unwrap().insert(page, frame);
        self.end(self.in_flight.len() - 1);
    }

    fn apply(&mut self, op: &Op) {
        let range_of = |model: &Model, id: u32| model.slots.get(&id).map(|slot| (slot.range, slot.flags));
        match *op {
            Op::Create { .. } => self.create(op),
            Op::Delete { slot: id } => {
                self.backings.remove(&id);
                let expected = match self.model.slots.remove(&id) {
                    Some(slot) => {
                        self.model.zap_range(slot.range);
                        Ok(())
                    }
                    None => Err(SlotError::NoSuchSlot { slot: id }),
                };
                assert_eq!(self.vm.set_user_memory_region(change(id, LOG, 0, 0)), expected);
            }
            Op::Move { slot, place } => {
                let flags = range_of(&self.model, slot).map_or(LOG, |(_, flags)| flags);
                self.change(slot, Gpa(places::<F>()[place]).gfn(), flags, None);
            }
            Op::SetFlags { slot, flags } => {
                let (range, old) = range_of(&self.model, slot).unwrap_or((GfnRange::new(Gfn(0), 1), LOG));
                // Mostly with supported flags.
                let flags =
                    if flags == 2 { READONLY } else { (old - LOG) | MemoryRegionFlags::from_bits_truncate(flags & 1) };
                self.change(slot, range.start, flags, None);
            }
            Op::Resize { slot } => {
                let Some((range, flags)) = range_of(&self.model, slot) else { return };
                // Larger by a page, or smaller by most of a block, if it was larger before.
                let nr_pages = range.nr_pages();
                let nr_pages = if nr_pages % 2 == 0 { nr_pages + 1 } else { nr_pages.saturating_sub(300) | 1 };
                self.watch_range(range);
                self.change_to(slot, range.start, nr_pages, flags, None);
            }
            Op::Touch { at, access, by } => self.touch(self.gfn(at), access, by),
            Op::Harvest { slot } => self.harvest(slot),
            Op::GetRange { slot, range } => self.get_range(slot, range),
            Op::Clear { slot, range, mask } => self.clear(slot, range, mask),
            Op::MarkDirty { slot, page, pages } => {
                let nr_pages = RANGE_PAGES[pages];
                assert_eq!(self.vm.mark_dirty(slot, page, nr_pages), self.model.mark_dirty(slot, page, nr_pages));
            }
            Op::Begin { at, pages } => {
                if self.in_flight.len() == MAX_IN_FLIGHT {
                    self.end(0);
                }
                self.begin(self.range(at, pages));
            }
            Op::End { index } => self.end(index),
            Op::Replace { slot, page, writes } => self.replace(slot, page, WRITES[writes]),
            Op::Age { at, pages, aging } => {
                let range = self.range(at, pages);
                let expected = Ok(self.model.age(range, aging));
                let nr_used = match aging {
                    Aging::Age => self.vm.age_range(range),
                    Aging::Test => self.vm.test_age_range(range),
                };
                assert_eq!(nr_used, expected, "pages of {range:?} that were used");
            }
            Op::Split { at, pages, largest } => {
                let range = self.range(at, pages);
                self.watch_range(range);
                let expected = self.model.split_range(range, SIZES[largest].level(), |_| true);
                assert_eq!(self.vm.split_range(range, SIZES[largest]), Ok(expected), "leaves of {range:?} split");
            }
            Op::Recover { at, pages } => {
                let range = self.range(at, pages);
                self.watch_range(range);
                let expected = self.model.recover_range(range);
                assert_eq!(self.vm.recover_range(range), Ok(expected), "huge leaves recovered in {range:?}");
            }
            Op::Userfault { slot, on, bitmap } => {
                let Some((range, old)) = range_of(&self.model, slot) else { return };
                let flags = if on { old | USERFAULT } else { old - USERFAULT };
                self.change(slot, range.start, flags, bitmap);
            }
            Op::SetBits { slot, page, pages, bits } => {
                let Some(userfault) = self.model.slots.get(&slot).and_then(|slot| slot.userfault.as_ref()) else {
                    return;
                };
                for bit in page..page + RANGE_PAGES[pages].min(1 << 18) {
                    let Some(word) = userfault.words.get(bit as usize / 64) else { break };
                    match bits {
                        Bits::Set => word.fetch_or(1 << (bit % 64), Ordering::Release),
                        Bits::Clear => word.fetch_and(!(1 << (bit % 64)), Ordering::Release),
                    };
                }
            }
            Op::Rescan { slot, page, pages } => {
                let nr_pages = RANGE_PAGES[pages];
                let nr_pages = range_of(&self.model, slot)
                    .map_or(nr_pages, |(range, _)| nr_pages.min(range.nr_pages().saturating_sub(page)).max(1));
                let expected = self.model.rescan(slot, page, nr_pages);
                assert_eq!(self.vm.rescan_userfault(slot, page, nr_pages), expected, "{nr_pages} from page {page} on");
            }
            Op::Attributes { at, pages, attributes } => {
                // Mostly within one memslot.
                let range = self.range(at, pages);
                let slot = self.model.slots.values().find(|slot| slot.range.contains(range.start));
                let range = slot.map_or(range, |slot| range.intersection(slot.range));
                self.watch_range(range);
                let (gpa, size_bytes) = (range.start.gpa(), range.nr_pages() * PAGE_SIZE);
                let expected = self.model.set_attributes(range, attributes);
                assert_eq!(self.vm.set_memory_attributes(gpa, size_bytes, attributes), expected, "{range:?}");
                let private = self.vm.memory_attributes(gpa).map(|found| found == MemoryAttributes::PRIVATE);
                let slot = self.model.slots.values().find(|slot| slot.range.contains(range.start));
                assert_eq!(private, slot.map(|slot| slot.is_private(range.start)).ok_or(SlotError::NoMemslot { gpa }));
            }
            Op::CheckAccess { at, pages } => {
                let range = self.range(at, pages % 4);
                let (gpa, size_bytes) = (Gpa(range.start.gpa().0 + 7), range.nr_pages() * PAGE_SIZE - 8);
                assert_eq!(self.vm.check_access(gpa, size_bytes), self.model.check_access(range), "{range:?}");
            }
            Op::Yield { always } => self.vm.host().always_yields.store(always != 0, Ordering::Relaxed),
        }
    }

    fn compare(&mut self) {
        for &gfn in &self.watched {
            let found = translate(self.vm, Gfn(gfn).gpa()).map(|found| {
                let has = |bit| found.pte.0 & bit != 0;
                (found.pfn.0, found.level, found.writable, [F::ACCESSED, F::DIRTY, F::WAS_DIRTY].map(has))
            });
            let leaf = self.model.leaf_at(Gfn(gfn)).filter(|(_, leaf)| !leaf.tracked);
            let expected = leaf.map(|(first, leaf)| {
                let writable = self.model.is_writable(Gfn(gfn), leaf);
                (leaf.pfn + (gfn - first), leaf.level, writable, [leaf.accessed, leaf.dirty, leaf.was_dirty])
            });
            assert_eq!(found, expected, "translation of frame {gfn:#x}");
        }
        self.model.zapped.sort_by_key(|leaf| leaf.range.start);
        let (zapped, expected) = (self.vm.host().take_zapped(), std::mem::take(&mut self.model.zapped));
        match self.reports {
            Reports::Each => assert_eq!(zapped, expected, "zapped leaves"),
            Reports::Some => {
                assert!(zapped.iter().all(|leaf| expected.contains(leaf)), "{zapped:?} of {expected:?}");
                // The others are counted when their page-table pages are freed.
                self.vm.reclaim();
            }
        }
        let stats = self.vm.stats();
        assert_eq!(stats.live_tables(), self.vm.host().live_tables() as u64);
        let expected = [Level::L4K, Level::L2M, Level::L1G].map(|level| self.model.nr_leaves(level));
        assert_eq!([stats.pages_4k(), stats.pages_2m(), stats.pages_1g()], expected, "leaves of each size");
        assert_eq!(stats.around, self.model.nr_around, "pages mapped by fault-around");
        assert_eq!(stats.userfaults, self.model.nr_userfaults, "faults that went to user space");
    }

    /// All dirty logs, then the page-table pages: first those of the model, then none.
    fn finish(mut self) {
        for id in 0..NR_SLOTS {
            self.harvest(id);
            self.compare();
        }
        for id in 0..NR_SLOTS {
            self.apply(&Op::Delete { slot: id });
        }
        self.compare();
        drop((self.vcpu, self.in_flight));
        self.vm.reclaim();
        assert_eq!(self.vm.host().live_tables(), self.model.tables.len() + 1);
        let space = GfnRange::new(Gfn(0), Self::SPACE);
        drop(self.vm.invalidate_range(space).unwrap());
        assert_eq!(self.vm.host().live_tables(), 1, "an invalidation of the space leaves the root");
        assert_no_table_is_left(self.vm);
    }
}
