//! Random operations on two or three threads at once. The exact state at a moment is unknown. But
//! no access may reach a freed frame, write where the host forbids it, or find anything in a range
//! in flight. At the end every write of the guest was reported to the host, and no page-table page
//! is left.
//!
//! Each frame is used once, with a byte of state.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex};

use proptest::prelude::*;
use slat::baselines::Locking;
use slat::error::{FaultError, LogError};
use slat::format::Format;
use slat::tables::AccessTracking;
use slat::{Access, Config, Gfn, GfnRange, Gpa, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Vm};

use super::ops::{Aging, LOG, SIZES};
use super::pair::Reports;
use super::plain::is_resident;
use super::{Logging, access, logging, possible, reports};
use crate::common::guest::Guest;
use crate::common::log::ACCESS_TRACKINGS;
use crate::common::{
    Frame, GIB, MIB, TestBacking, TestHost, Translation, Writes, assert_no_table_is_left, change,
    set_accessed_and_dirty,
};

/// First byte and pages: two memslots that share a block, and one over the end of a page-table
/// page. Each contains a block of 2 MiB.
const SLOTS: [(u64, u64); 3] = [(MIB, 868), (MIB + 868 * PAGE_SIZE, 1024), (GIB - MIB, 900)];
/// Pages from the frames of one new backing to the next: aligned to each other and to the guest's
/// pages as their sizes require.
const FRAMES_APART: u64 = 1 << 18;
const MAX_BACKINGS: u64 = 32;

/// The host has freed the frame.
const DEAD: u8 = 1;
/// Writes are forbidden.
const FORBIDDEN: u8 = 2;
/// The guest has written it.
const WRITTEN: u8 = 4;
/// The write was reported to the host.
const REPORTED: u8 = 8;

#[derive(Clone, Copy, Debug)]
pub enum During {
    Nothing,
    Replace,
    Forbid,
}

#[derive(Clone, Copy, Debug)]
pub enum Step {
    Access {
        slot: usize,
        page: u64,
        nr_pages: u64,
        access: Access,
    },
    Invalidate {
        slot: usize,
        page: u64,
        nr_pages: u64,
        during: During,
    },
    InvalidateAll,
    /// Allows writes to pages again.
    Allow {
        slot: usize,
    },
    Create {
        slot: usize,
        size: usize,
        flags: u32,
    },
    Delete {
        slot: usize,
    },
    SetLog {
        slot: usize,
        flags: u32,
    },
    Harvest {
        slot: usize,
    },
    Split {
        slot: usize,
        page: u64,
        nr_pages: u64,
    },
    /// Of the whole memslot.
    Recover {
        slot: usize,
    },
    Age {
        slot: usize,
        page: u64,
        nr_pages: u64,
        aging: Aging,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let slot = || 0..SLOTS.len();
    let page = || prop_oneof![0u64..8, 250u64..262, 500u64..520];
    let nr_pages = || prop_oneof![4 => Just(1u64), 2 => 2u64..20, 1 => Just(512u64)];
    let during = prop_oneof![Just(During::Nothing), Just(During::Replace), Just(During::Forbid)];
    let aging = prop_oneof![Just(Aging::Age), Just(Aging::Test)];
    prop_oneof![
        12 => (slot(), page(), nr_pages(), access())
            .prop_map(|(slot, page, nr_pages, access)| Step::Access { slot, page, nr_pages, access }),
        5 => (slot(), page(), nr_pages(), during)
            .prop_map(|(slot, page, nr_pages, during)| Step::Invalidate { slot, page, nr_pages, during }),
        1 => Just(Step::InvalidateAll),
        1 => slot().prop_map(|slot| Step::Allow { slot }),
        2 => (slot(), 0..SIZES.len(), 0u32..2).prop_map(|(slot, size, flags)| Step::Create { slot, size, flags }),
        1 => slot().prop_map(|slot| Step::Delete { slot }),
        2 => (slot(), 0u32..2).prop_map(|(slot, flags)| Step::SetLog { slot, flags }),
        2 => slot().prop_map(|slot| Step::Harvest { slot }),
        1 => (slot(), page(), nr_pages()).prop_map(|(slot, page, nr_pages)| Step::Split { slot, page, nr_pages }),
        3 => slot().prop_map(|slot| Step::Recover { slot }),
        2 => (slot(), page(), nr_pages(), aging)
            .prop_map(|(slot, page, nr_pages, aging)| Step::Age { slot, page, nr_pages, aging }),
    ]
}

/// What the threads share.
struct World<F: Format> {
    vm: Arc<Vm<TestHost, F>>,
    reports: Reports,
    /// The backings of the memslots that exist. Locked while a memslot is created, deleted or
    /// changed.
    slots: [Mutex<Option<Arc<TestBacking>>>; SLOTS.len()],
    /// By [`index_of`].
    frames: Box<[AtomicU8]>,
    nr_backings: AtomicU64,
    nr_overrides: AtomicU64,
}

/// The index of a frame's byte: each backing uses a few thousand frames, at the beginning of its
/// own.
fn index_of(pfn: u64) -> usize {
    const USED: u64 = 4096;
    let (backing, offset) = (pfn / FRAMES_APART, pfn % FRAMES_APART % USED);
    (backing * USED + offset) as usize
}

fn range_of(slot: usize, page: u64, nr_pages: u64) -> GfnRange {
    GfnRange::new(Gfn(SLOTS[slot].0 / PAGE_SIZE + page), nr_pages)
}

impl<F: Format> World<F> {
    fn new(config: Config, reports: Reports) -> World<F> {
        let host = match reports {
            Reports::Each => TestHost::default(),
            Reports::Some => TestHost::without_reports(),
        };
        let vm = Arc::new(Vm::new(host, config).unwrap());
        vm.host().record_zapped();
        vm.host().is_slow.store(true, Ordering::Relaxed);
        let nr_frames = index_of((MAX_BACKINGS + 2) * FRAMES_APART);
        World {
            vm,
            reports,
            slots: Default::default(),
            frames: (0..nr_frames).map(|_| AtomicU8::new(0)).collect(),
            nr_backings: AtomicU64::new(1),
            nr_overrides: AtomicU64::new(0),
        }
    }

    fn frame(&self, pfn: u64) -> &AtomicU8 {
        &self.frames[index_of(pfn)]
    }

    /// Checks the translation of a guest's access, and does what hardware does.
    fn look(&self, gpa: Gpa, access: Access, found: Translation) -> bool {
        let frame = self.frame(found.pfn.0);
        let state = frame.load(Ordering::SeqCst);
        assert_eq!(state & DEAD, 0, "{access:?} at {gpa} reached a frame that was freed: {found:x?}");
        if !set_accessed_and_dirty(&self.vm, gpa, found, access) {
            return false;
        }
        if access == Access::Write {
            // Checked once more: the access is still under way, so an invalidation that forbids it
            // has not returned from its flush.
            let state = frame.fetch_or(WRITTEN, Ordering::SeqCst);
            assert_eq!(state & FORBIDDEN, 0, "write at {gpa} to a frame that may not be written: {found:x?}");
        }
        true
    }

    fn access(&self, guest: &mut Guest<F>, gpa: Gpa, access: Access) {
        // A few times: the page may be in flight, or gone.
        for _ in 0..4 {
            let done = guest.during_access(gpa, |found| {
                let found = found.filter(|found| access != Access::Write || found.writable);
                found.is_some_and(|found| self.look(gpa, access, found))
            });
            if done {
                return;
            }
            match guest.vcpu.handle_fault(gpa, access) {
                Ok(Outcome::Resume) => {}
                Ok(Outcome::Exit(_)) => return,
                Err(error) => return assert_eq!(error, FaultError::BackingGone { gpa }),
            }
        }
    }

    fn invalidate(&self, guest: &mut Guest<F>, slot: usize, pages: (u64, u64), during: During) {
        let range = range_of(slot, pages.0, pages.1);
        let backing = self.slots[slot].lock().unwrap().clone();
        let invalidation = self.vm.invalidate_range(range).unwrap();
        for gfn in [range.start, Gfn(range.end.0 - 1)] {
            for access in [Access::Read, Access::Write] {
                assert_eq!(guest.vcpu.handle_fault(gfn.gpa(), access), Ok(Outcome::Resume));
                guest.during_access(gfn.gpa(), |found| assert_eq!(found, None, "in a range in flight"));
            }
        }
        let Some(backing) = backing else { return };
        let mut frames = backing.frames.write().unwrap();
        // Not behind the memslot, and of a large range one page alone.
        if pages.0 >= backing.nr_pages {
            return;
        }
        let page = pages.0;
        let before = frames.get(&page).map_or(backing.first_pfn + page, |frame| frame.pfn);
        match during {
            During::Nothing => {}
            During::Replace => {
                let pfn = (MAX_BACKINGS + 1) * FRAMES_APART + self.nr_overrides.fetch_add(1, Ordering::SeqCst);
                frames.insert(page, Frame { pfn, writes: Writes::IfWritten });
                self.frame(before).fetch_or(DEAD, Ordering::SeqCst);
            }
            During::Forbid => {
                frames.insert(page, Frame { pfn: before, writes: Writes::Refused });
                self.frame(before).fetch_or(FORBIDDEN, Ordering::SeqCst);
            }
        }
        drop((frames, invalidation));
    }

    fn allow(&self, slot: usize) {
        let Some(backing) = self.slots[slot].lock().unwrap().clone() else { return };
        for frame in backing.frames.write().unwrap().values_mut() {
            self.frame(frame.pfn).fetch_and(!FORBIDDEN, Ordering::SeqCst);
            frame.writes = Writes::IfWritten;
        }
    }

    fn create(&self, slot: usize, size: PageSize, flags: MemoryRegionFlags) {
        let mut backing = self.slots[slot].lock().unwrap();
        let number = self.nr_backings.load(Ordering::SeqCst);
        if backing.is_some() || number > MAX_BACKINGS {
            return;
        }
        let number = self.nr_backings.fetch_add(1, Ordering::SeqCst);
        if number > MAX_BACKINGS {
            return;
        }
        let (gpa, nr_pages) = SLOTS[slot];
        // Aligned like the guest's frames, by 2 MiB.
        let first_pfn = number * FRAMES_APART + gpa / PAGE_SIZE % 512;
        let mut new = TestBacking::new(first_pfn, nr_pages, size);
        new.is_resident = is_resident;
        let new = Arc::new(new);
        new.reads_are_writable.store(number.is_multiple_of(2), Ordering::SeqCst);
        self.vm
            .set_user_memory_region(MemoryRegion {
                slot: slot as u32,
                flags,
                guest_phys_addr: Gpa(gpa),
                memory_size: nr_pages * PAGE_SIZE,
                backing: Some(Arc::clone(&new)),
                userfault_bitmap: None,
            })
            .unwrap();
        *backing = Some(new);
    }

    fn delete(&self, slot: usize) {
        let mut backing = self.slots[slot].lock().unwrap();
        let Some(gone) = backing.take() else { return };
        self.vm.set_user_memory_region(change(slot as u32, LOG, 0, 0)).unwrap();
        let frames = gone.frames.read().unwrap();
        for pfn in (gone.first_pfn..gone.first_pfn + gone.nr_pages).chain(frames.values().map(|frame| frame.pfn)) {
            self.frame(pfn).fetch_or(DEAD, Ordering::SeqCst);
        }
    }

    fn set_log(&self, slot: usize, flags: MemoryRegionFlags) {
        let backing = self.slots[slot].lock().unwrap();
        if backing.is_some() {
            let (gpa, nr_pages) = SLOTS[slot];
            self.vm.set_user_memory_region(change(slot as u32, flags, gpa, nr_pages * PAGE_SIZE)).unwrap();
        }
    }

    fn run(&self, guest: &mut Guest<F>, step: Step) {
        match step {
            Step::Access { slot, page, nr_pages, access } => {
                let range = range_of(slot, page, nr_pages);
                for gfn in (range.start.0..range.end.0).step_by(1 + nr_pages as usize / 32) {
                    self.access(guest, Gfn(gfn).gpa(), access);
                }
            }
            Step::Invalidate { slot, page, nr_pages, during } => self.invalidate(guest, slot, (page, nr_pages), during),
            Step::InvalidateAll => {
                drop(self.vm.invalidate_range(GfnRange::new(Gfn(0), 1 << (F::GPA_BITS - 12))).unwrap());
            }
            Step::Allow { slot } => self.allow(slot),
            Step::Create { slot, size, flags } => {
                self.create(slot, SIZES[size], MemoryRegionFlags::from_bits_truncate(flags))
            }
            Step::Delete { slot } => self.delete(slot),
            Step::SetLog { slot, flags } => self.set_log(slot, MemoryRegionFlags::from_bits_truncate(flags)),
            Step::Harvest { slot } => {
                let (nr_pages, slot) = (SLOTS[slot].1, slot as u32);
                let mut bitmap = [0; 16];
                let got = self.vm.get_dirty_log(slot, &mut bitmap);
                // As with manual modes; in the others little is left to clear.
                let cleared = self.vm.clear_dirty_log(slot, 0, nr_pages, &bitmap);
                let refused = [Err(LogError::NoSuchSlot { slot }), Err(LogError::NotLogging { slot })];
                for result in [got, cleared] {
                    assert!(result.is_ok() || refused.contains(&result), "{result:?}");
                }
            }
            Step::Split { slot, page, nr_pages } => {
                self.vm.split_range(range_of(slot, page, nr_pages), PageSize::Size4K).unwrap();
            }
            Step::Recover { slot } => {
                self.vm.recover_range(range_of(slot, 0, SLOTS[slot].1)).unwrap();
            }
            Step::Age { slot, page, nr_pages, aging } => {
                let range = range_of(slot, page, nr_pages);
                let nr_used = match aging {
                    Aging::Age => self.vm.age_range(range),
                    Aging::Test => self.vm.test_age_range(range),
                };
                assert!(nr_used.is_ok_and(|nr_used| nr_used <= nr_pages), "{nr_used:?} of {nr_pages}");
            }
        }
    }

    fn finish(self) {
        // What is still mapped is reported now.
        drop(self.vm.invalidate_range(GfnRange::new(Gfn(0), 1 << (F::GPA_BITS - 12))).unwrap());
        for leaf in self.vm.host().take_zapped().into_iter().filter(|leaf| leaf.dirty) {
            for pfn in leaf.pfn.0..leaf.pfn.0 + leaf.range.nr_pages() {
                self.frame(pfn).fetch_or(REPORTED, Ordering::SeqCst);
            }
        }
        for (index, frame) in self.frames.iter().enumerate() {
            let state = frame.load(Ordering::SeqCst);
            let is_lost = state & (WRITTEN | REPORTED) == WRITTEN && self.reports == Reports::Each;
            assert!(!is_lost, "frame {index:#x} was written, and not reported");
        }
        for slot in 0..SLOTS.len() {
            self.delete(slot);
        }
        assert_no_table_is_left(&self.vm);
        // The counts balance, in whatever order calls overlapped.
        let stats = self.vm.stats();
        let (splits, recoveries) = (stats.splits - stats.splits_1g, stats.recoveries - stats.recoveries_1g);
        assert_eq!(stats.installed_4k + splits * 512, stats.zapped_4k + recoveries * 512, "leaves of 4 KiB");
        assert_eq!(stats.installed_2m + recoveries, stats.zapped_2m + splits, "leaves of 2 MiB");
    }
}

type Run = fn(Locking, AccessTracking, Logging, Reports, &[Vec<Step>]);

fn run<F: Format>(
    locking: Locking,
    access_tracking: AccessTracking,
    logging: Logging,
    reports: Reports,
    plan: &[Vec<Step>],
) {
    let world = World::<F>::new(possible::<F>(locking, access_tracking, logging), reports);
    for slot in 0..SLOTS.len() {
        world.create(slot, PageSize::Size2M, MemoryRegionFlags::empty());
    }
    let start = Barrier::new(plan.len());
    std::thread::scope(|scope| {
        for steps in plan {
            let (mut guest, world, start) = (Guest::new(&world.vm), &world, &start);
            scope.spawn(move || {
                start.wait();
                for &step in steps {
                    world.run(&mut guest, step);
                }
            });
        }
    });
    world.finish();
}

proptest! {
    // Not shrunk: a failure need not occur twice.
    #![proptest_config(ProptestConfig {
        cases: 300, max_shrink_iters: 0, failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn concurrent_threads_access_no_invalidated_frame(
        tracking in 0..ACCESS_TRACKINGS.len(),
        logging in logging(),
        reports in reports(),
        locking in prop_oneof![2 => Just(Locking::None), 1 => Just(Locking::Shared), 1 => Just(Locking::Exclusive)],
        format in any::<prop::sample::Index>(),
        plan in prop::collection::vec(prop::collection::vec(step(), 20..60), 2..4),
    ) {
        let mut runs: Vec<Run> = Vec::new();
        slat::for_each_format!(F => {
            runs.push(run::<F>);
        });
        format.get(&runs)(locking, ACCESS_TRACKINGS[tracking], logging, reports, &plan);
    }
}
