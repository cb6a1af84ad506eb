//! The dirty log when a call is overtaken: a write's fault, a harvest, the beginning of logging.
//! Each is stopped at every look at a PTE, while another call runs. Afterwards no page may be
//! writable unless its writes are reported.
//!
//! The hook before an exchange is in the check of transitions, which release builds do not have.
//! They try fewer points.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use crate::common::hooked::{Hooked, at_look, was_called};
use crate::common::log::{LAZY, LEAF_BY_LEAF, LOG, NO_FLAGS, Slot, pages_of, write_as_hardware};
use crate::common::{TestHost, assert_no_table_is_left, change, region, translate};
use slat::dirty::DirtyTracking;
use slat::error::{LogError, SlotError};
use slat::format::Format;
use slat::{Access, Config, GfnRange, Level, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Vcpu, Vm};

/// One whole page-table page, and some pages of the next.
const SLOT: Slot = Slot::new(1, 512, 512 + 10);
/// So many marks protect a directory entry.
const MANY: u64 = 40;
/// The page of the victim.
const OWN: u64 = 100;
/// Another in its page-table page.
const OTHER: u64 = 200;
/// One in it that is not mapped.
const UNMAPPED: u64 = 300;

/// The mapped pages: some around those above, at the ends of the page-table page, and those of the
/// marks.
fn mapped() -> impl Iterator<Item = u64> {
    [0..3, OWN - 2..OWN + 4, OTHER - 1..OTHER + 2, 398..442, 510..514].into_iter().flatten()
}

/// A thread that acts on the VM: the victim, or the one that overtakes it.
struct Actor {
    vm: Arc<Vm<TestHost, Hooked>>,
    vcpu: Vcpu<TestHost, Hooked>,
    /// Pages that were written and not reported since, while the memslot logs.
    pending: Arc<Mutex<BTreeSet<u64>>>,
}

impl Actor {
    fn new(tracking: DirtyTracking) -> Actor {
        let vm = Arc::new(Vm::new(TestHost::default(), Config::default().with_dirty_tracking(tracking)).unwrap());
        vm.set_user_memory_region(region(
            SLOT.id,
            SLOT.first * PAGE_SIZE,
            SLOT.nr_pages * PAGE_SIZE,
            0x1000,
            PageSize::Size4K,
        ))
        .unwrap();
        Actor { vcpu: vm.create_vcpu().unwrap(), vm, pending: Arc::default() }
    }

    fn another(&self) -> Actor {
        Actor { vm: Arc::clone(&self.vm), vcpu: self.vm.create_vcpu().unwrap(), pending: Arc::clone(&self.pending) }
    }

    fn fault(&mut self, page: u64, access: Access) {
        assert_eq!(self.vcpu.handle_fault(SLOT.gfn(page).gpa(), access), Ok(Outcome::Resume));
    }

    /// Writes as a guest does.
    fn write(&mut self, page: u64) {
        for _ in 0..3 {
            if self.write_if_allowed(page) {
                return;
            }
            self.fault(page, Access::Write);
        }
        panic!("page {page} still faults");
    }

    fn write_if_allowed(&mut self, page: u64) -> bool {
        let found = translate(&self.vm, SLOT.gfn(page).gpa()).filter(|found| found.writable);
        let done = found.is_some_and(|found| write_as_hardware(&self.vm, SLOT.gfn(page), found));
        if done {
            self.pending.lock().unwrap().insert(page);
        }
        done
    }

    /// The guest writes every page that it can write without a fault.
    fn write_all_allowed(&mut self) {
        mapped().chain([UNMAPPED]).for_each(|page| {
            self.write_if_allowed(page);
        });
    }

    /// Harvests, if the memslot logs.
    fn get(&mut self) -> Vec<u64> {
        let mut bitmap = vec![0; SLOT.nr_words()];
        let result = self.vm.get_dirty_log(SLOT.id, &mut bitmap);
        assert!(matches!(result, Ok(_) | Err(LogError::NotLogging { .. })), "{result:?}");
        let pages = pages_of(&bitmap, 0);
        self.pending.lock().unwrap().retain(|page| !pages.contains(page));
        pages
    }

    fn mark_many(&mut self) {
        self.vm.mark_dirty(SLOT.id, 400, MANY).unwrap();
    }

    fn set_flags(&mut self, flags: MemoryRegionFlags) {
        let changed = change(SLOT.id, flags, SLOT.first * PAGE_SIZE, SLOT.nr_pages * PAGE_SIZE);
        let result = self.vm.set_user_memory_region(changed);
        if result == Err(SlotError::SlotBusy { slot: SLOT.id }) {
            // The victim is changing it.
            return;
        }
        result.unwrap();
        if flags == LOG {
            // What was written before logging is not in the log.
            self.pending.lock().unwrap().clear();
        }
    }

    fn invalidate(&mut self, first: u64, nr_pages: u64) {
        drop(self.vm.invalidate_range(GfnRange::new(SLOT.gfn(first), nr_pages)).unwrap());
    }
}

type Act = (&'static str, fn(&mut Actor));

/// The state of the VM before. Pages are mapped except `UNMAPPED`.
const STATES: [Act; 6] = [
    ("logging, and all is protected leaf by leaf", |actor| {
        mapped().for_each(|page| actor.fault(page, Access::Read));
        actor.set_flags(LOG);
        (0..32).for_each(|page| actor.write(page));
        actor.get();
    }),
    ("logging, protected above leaves without the right to write", |actor| {
        actor.set_flags(LOG);
        mapped().for_each(|page| actor.fault(page, Access::Read));
        actor.mark_many();
        actor.get();
    }),
    ("logging, protected above leaves with the right to write", |actor| {
        actor.set_flags(LOG);
        mapped().for_each(|page| actor.write(page));
        actor.get();
    }),
    ("logging, own page invalidated", |actor| {
        actor.set_flags(LOG);
        mapped().for_each(|page| actor.write(page));
        actor.get();
        actor.invalidate(OWN, 1);
    }),
    ("not logging, directory entry unprotected", |actor| {
        mapped().for_each(|page| actor.write(page));
    }),
    ("not logging, directory entry protected", |actor| {
        actor.set_flags(LOG);
        mapped().for_each(|page| actor.write(page));
        actor.get();
        actor.set_flags(NO_FLAGS);
    }),
];

/// What happens meanwhile. All leave the memslot logging or not as before, except those whose names
/// say otherwise.
const ACTS: [Act; 13] = [
    ("a harvest", |actor| {
        actor.get();
    }),
    ("many marks and a harvest", |actor| {
        actor.mark_many();
        actor.get();
    }),
    ("a write of another page", |actor| actor.write(OTHER)),
    ("a write of an unmapped page", |actor| actor.write(UNMAPPED)),
    ("a write of the same page", |actor| actor.write(OWN)),
    ("a write, many marks and a harvest", |actor| {
        actor.write(OTHER);
        ACTS[1].1(actor);
    }),
    ("two writes and writes of all that may be", |actor| {
        actor.write(OTHER);
        actor.write(UNMAPPED);
        actor.write_all_allowed();
    }),
    ("logging off, a read, logging on", |actor| {
        actor.set_flags(NO_FLAGS);
        actor.fault(UNMAPPED, Access::Read);
        actor.set_flags(LOG);
    }),
    ("logging off, a write, logging on", |actor| {
        actor.set_flags(NO_FLAGS);
        actor.write(OTHER);
        actor.write_all_allowed();
        actor.set_flags(LOG);
    }),
    ("logging on", |actor| actor.set_flags(LOG)),
    ("logging off and on", |actor| {
        actor.set_flags(NO_FLAGS);
        actor.set_flags(LOG);
    }),
    ("own page invalidated", |actor| actor.invalidate(OWN, 1)),
    ("the page-table page unlinked, and a write", |actor| {
        actor.invalidate(0, 512);
        actor.write(OTHER);
    }),
];

/// What is overtaken: calls of the engine only, since each look at a PTE counts.
const VICTIMS: [Act; 5] = [
    ("a write's fault", |actor| actor.fault(OWN, Access::Write)),
    ("a write's fault of an unmapped page", |actor| actor.fault(UNMAPPED, Access::Write)),
    ("a prefault for writing", |actor| {
        let gpas: Vec<_> = (OWN..OWN + 3).map(|page| SLOT.gfn(page).gpa()).collect();
        let done = actor.vcpu.pre_fault_pages(&gpas, Access::Write);
        assert!(matches!(done, Ok(1..=3)), "{done:?}");
    }),
    ("a harvest", |actor| {
        if actor.vm.get_dirty_log(SLOT.id, &mut [0; 9]).is_ok() {
            // Its report is dropped: so nothing is pending.
            actor.pending.lock().unwrap().clear();
        }
    }),
    ("logging begins", |actor| actor.set_flags(LOG)),
];

/// Runs `victim` in `state`, overtaken by `act` at its `nth` look. Returns whether there was such a
/// look.
fn run(tracking: DirtyTracking, state: Act, victim: Act, act: Act, nth: u32) -> bool {
    let what = format!("{tracking:?}: {}; {}, at look {nth}: {}", state.0, victim.0, act.0);
    let mut actor = Actor::new(tracking);
    state.1(&mut actor);
    let mut other = actor.another();
    at_look(Level(4), nth, move || act.1(&mut other));
    victim.1(&mut actor);
    let was_called = was_called();
    let by_write_protection = tracking != DirtyTracking::DirtyBit;
    let logs = actor.vm.is_marked_dirty(SLOT.id, 0).is_ok();
    if logs {
        for page in mapped().chain([UNMAPPED]).filter(|_| by_write_protection) {
            let writable = translate(&actor.vm, SLOT.gfn(page).gpa()).is_some_and(|found| found.writable);
            let is_marked = actor.vm.is_marked_dirty(SLOT.id, page).unwrap();
            assert!(!writable || is_marked, "{what}: page {page} is writable and not marked");
        }
        // All writable pages are written, and one harvest reports them.
        actor.write_all_allowed();
        actor.get();
        assert_eq!(*actor.pending.lock().unwrap(), BTreeSet::new(), "{what}: written, and not reported");
        // The next write reports its page, and makes no other writable.
        actor.write(OTHER);
        assert_eq!(actor.get(), [OTHER], "{what}");
        for page in mapped().chain([UNMAPPED]) {
            let found = translate(&actor.vm, SLOT.gfn(page).gpa()).filter(|found| found.writable);
            let is_seen = |entry: u64| !by_write_protection && entry & Hooked::DIRTY == 0;
            assert!(found.is_none_or(|found| is_seen(found.pte.0)), "{what}: page {page} is writable and not marked");
        }
    } else {
        actor.write(OWN);
    }
    let vm = Arc::clone(&actor.vm);
    drop(actor);
    vm.set_user_memory_region(change(SLOT.id, NO_FLAGS, 0, 0)).unwrap();
    if nth.is_multiple_of(8) {
        assert_no_table_is_left(&vm);
    }
    was_called
}

fn overtake_at_each_look(tracking: DirtyTracking) {
    for state in STATES {
        for victim in VICTIMS {
            for act in ACTS {
                let mut nth = 1;
                while run(tracking, state, victim, act, nth) {
                    nth += 1;
                }
                assert!(nth > 3 || victim.0 == "a harvest" || victim.0 == "logging begins", "{}", victim.0);
            }
        }
    }
}

#[test]
fn with_lazy_write_protection_nothing_is_lost_wherever_a_call_is_overtaken() {
    overtake_at_each_look(LAZY);
}

#[test]
fn with_write_protection_leaf_by_leaf_nothing_is_lost_wherever_a_call_is_overtaken() {
    overtake_at_each_look(LEAF_BY_LEAF);
}

#[test]
fn with_dirty_bits_nothing_is_lost_wherever_a_call_is_overtaken() {
    overtake_at_each_look(DirtyTracking::DirtyBit);
}
