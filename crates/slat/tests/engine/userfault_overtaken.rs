//! Calls that are overtaken by userfault, and userfault that is overtaken: at each flush, resolve and allocation, at each look
//! at an entry and at each look at the bitmap, another call is run from beginning to end. Whatever comes in between: no page is
//! mapped that was taken back, pages are private or shared as they were made, leaves are no larger than the bits, and what the
//! guest wrote is logged.

mod scene;

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Once};

use crate::common::broken::{self, Broken};
use crate::common::hooked::{Hooked, at_look, was_called};
use crate::common::log::NO_FLAGS;
use crate::common::{Call, MIB, change, region, translate, vm};
use scene::{Accessed, BIG, GRANULARITIES, PAGES, PRIVATE, SHARED, Scene, USERFAULT, Words};
use slat::baselines::Locking;
use slat::dirty::{DirtyTracking, HugePageLogging};
use slat::format::{Ept, Format, Npt};
use slat::host::AllocationWait;
use slat::tables::{AccessTracking, FaultAround};
use slat::{Access, Config, Error, Level, MemoryRegion, PAGE_SIZE, PageSize};

/// What is done, or comes in between.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Act {
    Read,
    Write,
    Prefault,
    PrefaultForWriting,
    Recover,
    Split,
    Harvest,
    Enable,
    Disable,
    TurnOn,
    TurnOnOther,
    TurnOnHuge,
    TurnOff,
    TakePage,
    TakeMany,
    Give,
    GiveAndRead,
    MakePrivate,
    MakeShared,
    MakeAllPrivate,
    Invalidate,
    Recreate,
}

const ACTS: [Act; 22] = [
    Act::Read,
    Act::Write,
    Act::Prefault,
    Act::PrefaultForWriting,
    Act::Recover,
    Act::Split,
    Act::Harvest,
    Act::Enable,
    Act::Disable,
    Act::TurnOn,
    Act::TurnOnOther,
    Act::TurnOnHuge,
    Act::TurnOff,
    Act::TakePage,
    Act::TakeMany,
    Act::Give,
    Act::GiveAndRead,
    Act::MakePrivate,
    Act::MakeShared,
    Act::MakeAllPrivate,
    Act::Invalidate,
    Act::Recreate,
];

impl Act {
    /// Whether the tables, or what they may hold, are changed by user space: mostly such acts overtake others.
    fn is_userfault(self) -> bool {
        ACTS.iter().position(|act| *act == self) >= ACTS.iter().position(|act| *act == Act::TurnOn)
    }

    /// Whether it maps pages, or takes them back: where these meet, nothing is left out.
    fn maps(self) -> bool {
        matches!(self, Act::Read | Act::PrefaultForWriting | Act::Recover | Act::TakeMany)
    }

    fn takes(self) -> bool {
        matches!(self, Act::TakePage | Act::TurnOn | Act::MakePrivate | Act::GiveAndRead)
    }

    fn run<F: Format>(self, scene: &Scene<F>) {
        let prefault = |access| {
            let mut vcpu = scene.vm.create_vcpu().unwrap();
            let _ = vcpu.pre_fault_memory(Scene::<F>::gfn(0).gpa(), PAGES * PAGE_SIZE, access);
            let pages: Vec<_> = [8, 9, 10, 600, 601].map(|page| Scene::<F>::gfn(page).gpa()).into();
            let _ = vcpu.pre_fault_pages(&pages, access);
        };
        match self {
            Act::Read => drop(scene.access(8, Access::Read)),
            Act::Write => drop(scene.access(8, Access::Write)),
            Act::Prefault => prefault(Access::Read),
            Act::PrefaultForWriting => prefault(Access::Write),
            Act::Recover => drop(scene.vm.recover_range(Scene::<F>::all())),
            Act::Split => drop(scene.vm.split_range(Scene::<F>::all(), PageSize::Size4K)),
            Act::Harvest => scene.harvest(),
            Act::Enable => {
                scene.set_log(true);
                // So that an exact log is asked for what comes after.
                scene.access(17, Access::Write);
            }
            Act::Disable => scene.set_log(false),
            Act::TurnOn => scene.turn(Some(0)),
            Act::TurnOnOther => scene.turn(Some(1)),
            Act::TurnOnHuge => scene.turn(Some(2)),
            Act::TurnOff => scene.turn(None),
            Act::TakePage => scene.take_back(8, 1),
            Act::TakeMany => scene.take_back(0, BIG + 5),
            Act::Give => scene.give(0, PAGES),
            Act::GiveAndRead => {
                scene.give(0, PAGES);
                scene.access(8, Access::Read);
            }
            Act::MakePrivate => scene.set_attributes(8, 1, PRIVATE),
            Act::MakeShared => scene.set_attributes(0, PAGES, SHARED),
            Act::MakeAllPrivate => scene.set_attributes(0, PAGES, PRIVATE),
            Act::Invalidate => drop(scene.vm.invalidate_range(Scene::<F>::all()).unwrap()),
            Act::Recreate => scene.recreate(),
        }
        scene.check();
    }
}

/// What was done before.
const BEFORE: [&[Act]; 9] = [
    &[],
    &[Act::PrefaultForWriting],
    &[Act::PrefaultForWriting, Act::Split],
    &[Act::TurnOn, Act::PrefaultForWriting],
    &[Act::TurnOn, Act::TakePage, Act::TurnOff],
    &[Act::TurnOnHuge, Act::Read],
    &[Act::TurnOnHuge, Act::PrefaultForWriting, Act::Split],
    &[Act::MakeAllPrivate, Act::TurnOn, Act::PrefaultForWriting, Act::Enable],
    &[Act::MakePrivate, Act::Enable, Act::Write, Act::Prefault, Act::Split],
];

fn configs() -> [Config; 6] {
    let config = Config::default();
    [
        config,
        config.with_dirty_tracking(DirtyTracking::DirtyBit).with_fault_around(FaultAround::Pages(16)),
        config.with_fault_around(FaultAround::Pages(64)).with_huge_page_logging(HugePageLogging::MarkWhole),
        config.with_access_tracking(AccessTracking::Faults),
        Config::default().with_locking(Locking::Shared).with_fault_around(FaultAround::Pages(8)),
        Config::default().with_locking(Locking::Exclusive),
    ]
}

thread_local! {
    static CONTEXT: RefCell<String> = const { RefCell::new(String::new()) };
}

static SHOW_CONTEXT: Once = Once::new();

/// Runs `test` and says what it was if it panics.
fn with_context<R>(context: impl std::fmt::Debug, test: impl FnOnce() -> R) -> R {
    CONTEXT.set(format!("{context:?}"));
    SHOW_CONTEXT.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            eprintln!("in {}", CONTEXT.with_borrow(String::clone));
            before(panic);
        }));
    });
    test()
}

/// Whether it is the turn of this combination: every 127th, or every one with `OVERTAKEN_STRIDE=1`.
fn is_due() -> bool {
    static COMBINATION: AtomicU64 = AtomicU64::new(0);
    static STRIDE: LazyLock<u64> =
        LazyLock::new(|| std::env::var("OVERTAKEN_STRIDE").ok().and_then(|stride| stride.parse().ok()).unwrap_or(127));
    COMBINATION.fetch_add(1, Ordering::Relaxed).is_multiple_of(*STRIDE)
}

/// All pairs of which one is about userfault, in all states that they may find.
fn each_pair(mut test: impl FnMut(Config, &'static [Act], Act, Act)) {
    for config in configs() {
        for (index, before) in BEFORE.into_iter().enumerate() {
            let is_first = config == Config::default() && matches!(index, 0 | 3 | 5);
            for act in ACTS {
                for by in ACTS.into_iter().filter(|by| by.is_userfault() || act.is_userfault()) {
                    if is_due() || (is_first && act.maps() && by.takes()) {
                        test(config, before, act, by);
                    }
                }
            }
        }
    }
}

fn scene<F: Format>(config: Config, before: &[Act]) -> Arc<Scene<F>> {
    let scene = Scene::<F>::new(config);
    before.iter().for_each(|act| act.run(&*scene));
    scene
}

/// Outside of sections and locks, on the same thread.
const OUTSIDE: [Call; 3] = [Call::Flush, Call::Resolve, Call::Allocate(AllocationWait::Allowed)];

fn at_each_call<F: Format>() {
    each_pair(|config, before, act, by| {
        for call in OUTSIDE {
            let mut nth = 1;
            while with_context((F::NAME, config, before, act, by, call, nth), || {
                let scene = scene::<F>(config, before);
                let other = Arc::downgrade(&scene);
                scene.vm.host().overtake(call, nth, move || by.run(&*other.upgrade().unwrap()));
                act.run(&*scene);
                let was_reached = scene.vm.host().was_overtaken();
                scene.finish();
                was_reached
            }) {
                nth = 2 * nth + 1;
            }
        }
    });
}

#[test]
fn nobody_who_comes_in_a_flush_a_resolve_or_an_allocation_sees_what_was_taken_back() {
    at_each_call::<Npt>();
    at_each_call::<Ept>();
}

#[test]
fn nor_where_entries_are_broken_before_they_are_made() {
    at_each_call::<Broken>();
}

/// At the looks at bits, inside of sections but of no lock.
#[test]
fn nor_who_comes_when_a_bit_is_read() {
    let mut nr_reached = 0;
    each_pair(|config, before, act, by| {
        for index in 0..GRANULARITIES.len() {
            let mut nth = 1;
            while with_context((config, before, act, by, index, nth), || {
                let scene = scene::<Npt>(config, before);
                let other = Arc::downgrade(&scene);
                scene.bitmaps[index].overtake(nth, move || by.run(&*other.upgrade().unwrap()));
                act.run(&*scene);
                let was_reached = scene.bitmaps[index].was_overtaken();
                scene.finish();
                was_reached
            }) {
                nr_reached += 1;
                nth = 2 * nth + 1;
            }
        }
    });
    assert!(nr_reached > 100, "{nr_reached}");
}

/// On another thread, inside the section of the one who is overtaken.
#[cfg(debug_assertions)]
fn at_each_look<F: Format>() {
    each_pair(|config, before, act, by| {
        if config.locking != Locking::None {
            return;
        }
        let mut nth = 1;
        while with_context((F::NAME, config, before, act, by, nth), || {
            let scene = scene::<F>(config, before);
            let other = Arc::downgrade(&scene);
            at_look(Level::L1G, nth, move || {
                let other = other.upgrade().unwrap();
                std::thread::spawn(move || by.run(&*other)).join().unwrap();
            });
            act.run(&*scene);
            let was_reached = was_called();
            scene.finish();
            was_reached
        }) {
            nth += 1 + nth / 2;
        }
    });
}

#[cfg(debug_assertions)]
#[test]
fn nor_who_comes_at_a_look_at_an_entry() {
    at_each_look::<Hooked>();
}

#[cfg(debug_assertions)]
#[test]
fn nor_at_one_where_entries_are_broken_before_they_are_made() {
    at_each_look::<Broken>();
}

#[test]
fn a_rescan_is_not_held_up_by_a_smaller_slot_that_takes_the_place_of_its_own() {
    let vm = vm::<Npt>(Locking::None);
    // So many runs that it looks at the slot more than once.
    let words = Words::new(16, 0x5555_5555_5555_5555);
    let create = |size| MemoryRegion {
        flags: USERFAULT,
        userfault_bitmap: words.bitmap(PageSize::Size4K),
        ..region(0, 2 * MIB, size, BIG, PageSize::Size2M)
    };
    vm.set_user_memory_region(create(4 * MIB)).unwrap();
    let (other, smaller) = (Arc::downgrade(&vm), create(MIB));
    words.overtake(2, move || {
        let vm = other.upgrade().unwrap();
        vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
        vm.set_user_memory_region(smaller).unwrap();
    });
    let past_end = Error::LogRangePastEnd { slot: 0, first_page: 0, nr_pages: 1024, slot_pages: 256 };
    assert_eq!(vm.rescan_userfault(0, 0, 1024), Err(past_end));
    assert!(words.was_overtaken());
}

/// A huge leaf that a rescan has taken, and not flushed yet: what takes its place, small leaves for a write that is logged, is
/// flushed for first.
#[test]
fn a_rescan_breaks_before_others_make() {
    for config in [Config::default(), Config::default().with_locking(Locking::Exclusive)] {
        let scene = scene::<Broken>(config, &[Act::TurnOnHuge, Act::Enable, Act::Read]);
        // The page that enabling wrote has small ones beside it.
        drop(scene.vm.invalidate_range(Scene::<Broken>::all()).unwrap());
        Act::Read.run(&*scene);
        assert_eq!(translate(&scene.vm, Scene::<Broken>::gfn(8).gpa()).unwrap().level, Level::L2M);
        broken::observe(&scene.vm);
        let other = Arc::downgrade(&scene);
        scene.vm.host().overtake(Call::Flush, 1, move || {
            let scene = other.upgrade().unwrap();
            scene.give(0, PAGES);
            assert_eq!(scene.access(8, Access::Write), Accessed::Done);
        });
        Act::TakePage.run(&*scene);
        assert!(scene.vm.host().was_overtaken());
        assert_eq!(broken::observed(), (1, 0), "small leaves took its place");
        scene.finish();
    }
}
