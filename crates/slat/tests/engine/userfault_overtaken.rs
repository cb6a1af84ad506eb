//! Calls that userfault overtakes, and userfault calls that are overtaken. At each flush, resolve
//! and allocation, at each look at a PTE and at each read of the bitmap, another call runs from
//! beginning to end. In every case no pending page is mapped, pages are private or shared as they
//! were made, leaves are no larger than the bits, and the guest's writes are logged.

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
use slat::error::SlotError;
use slat::format::{Ept, Format, Npt};
use slat::host::AllocationWait;
use slat::tables::{AccessTracking, FaultAround};
use slat::{Access, Config, Level, MemoryRegion, PAGE_SIZE, PageSize};

/// A call that overtakes or is overtaken.
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
    RescanPage,
    RescanMany,
    ClearBits,
    ClearAndRead,
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
    Act::RescanPage,
    Act::RescanMany,
    Act::ClearBits,
    Act::ClearAndRead,
    Act::MakePrivate,
    Act::MakeShared,
    Act::MakeAllPrivate,
    Act::Invalidate,
    Act::Recreate,
];

impl Act {
    /// Whether user space changes the page tables by it, or what they may map. Mostly such acts
    /// overtake others.
    fn is_userfault(self) -> bool {
        ACTS.iter().position(|act| *act == self) >= ACTS.iter().position(|act| *act == Act::TurnOn)
    }

    /// Whether it maps pages, or rescans them. All pairs of the two kinds are tried.
    fn maps(self) -> bool {
        matches!(self, Act::Read | Act::PrefaultForWriting | Act::Recover | Act::RescanMany)
    }

    fn changes_pages(self) -> bool {
        matches!(self, Act::RescanPage | Act::TurnOn | Act::MakePrivate | Act::ClearAndRead)
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
                // An exact log is then required of what follows.
                scene.access(17, Access::Write);
            }
            Act::Disable => scene.set_log(false),
            Act::TurnOn => scene.turn(Some(0)),
            Act::TurnOnOther => scene.turn(Some(1)),
            Act::TurnOnHuge => scene.turn(Some(2)),
            Act::TurnOff => scene.turn(None),
            Act::RescanPage => scene.rescan(8, 1),
            Act::RescanMany => scene.rescan(0, BIG + 5),
            Act::ClearBits => scene.clear_bits(0, PAGES),
            Act::ClearAndRead => {
                scene.clear_bits(0, PAGES);
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
    &[Act::TurnOn, Act::RescanPage, Act::TurnOff],
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

/// Runs `test`, and prints `context` if it panics.
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

/// Whether this combination is due: every 127th, or all with `OVERTAKEN_STRIDE=1`.
fn is_due() -> bool {
    static COMBINATION: AtomicU64 = AtomicU64::new(0);
    static STRIDE: LazyLock<u64> =
        LazyLock::new(|| std::env::var("OVERTAKEN_STRIDE").ok().and_then(|stride| stride.parse().ok()).unwrap_or(127));
    COMBINATION.fetch_add(1, Ordering::Relaxed).is_multiple_of(*STRIDE)
}

/// All pairs with an act of userfault, in all states that they may find.
fn each_pair(mut test: impl FnMut(Config, &'static [Act], Act, Act)) {
    for config in configs() {
        for (index, before) in BEFORE.into_iter().enumerate() {
            let is_first = config == Config::default() && matches!(index, 0 | 3 | 5);
            for act in ACTS {
                for by in ACTS.into_iter().filter(|by| by.is_userfault() || act.is_userfault()) {
                    if is_due() || (is_first && act.maps() && by.changes_pages()) {
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

/// Outside of guards and locks, on the same thread.
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
fn calls_during_a_flush_a_resolve_or_an_allocation_map_no_pending_page() {
    at_each_call::<Npt>();
    at_each_call::<Ept>();
}

#[test]
fn nothing_is_lost_with_break_before_make() {
    at_each_call::<Broken>();
}

/// At each read of a bit, inside guards but no lock.
#[test]
fn calls_at_a_read_of_a_bit_map_no_pending_page() {
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

/// On another thread, while the overtaken call is in its guard.
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
fn calls_at_each_look_map_no_pending_page() {
    at_each_look::<Hooked>();
}

#[cfg(debug_assertions)]
#[test]
fn calls_at_each_look_map_no_pending_page_with_break_before_make() {
    at_each_look::<Broken>();
}

#[test]
fn a_rescan_ends_when_a_smaller_slot_replaces_its_own() {
    let vm = vm::<Npt>(Locking::None);
    // So many runs that it reads the memslot more than once.
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
    let past_end = SlotError::RangePastEnd { slot: 0, first_page: 0, nr_pages: 1024, slot_pages: 256 };
    assert_eq!(vm.rescan_userfault(0, 0, 1024), Err(past_end));
    assert!(words.was_overtaken());
}

/// A rescan has zapped a huge leaf, and not flushed yet. The small leaves that replace it, for a
/// logged write, are flushed for first.
#[test]
fn a_rescan_of_a_part_breaks_before_it_makes() {
    for config in [Config::default(), Config::default().with_locking(Locking::Exclusive)] {
        let scene = scene::<Broken>(config, &[Act::TurnOnHuge, Act::Enable, Act::Read]);
        // The page that enabling wrote has small neighbours.
        drop(scene.vm.invalidate_range(Scene::<Broken>::all()).unwrap());
        Act::Read.run(&*scene);
        assert_eq!(translate(&scene.vm, Scene::<Broken>::gfn(8).gpa()).unwrap().level, Level::L2M);
        broken::observe(&scene.vm);
        let other = Arc::downgrade(&scene);
        scene.vm.host().overtake(Call::Flush, 1, move || {
            let scene = other.upgrade().unwrap();
            scene.clear_bits(0, PAGES);
            assert_eq!(scene.access(8, Access::Write), Accessed::Done);
        });
        Act::RescanPage.run(&*scene);
        assert!(scene.vm.host().was_overtaken());
        assert_eq!(broken::observed(), (1, 0), "small leaves replaced it");
        scene.finish();
    }
}
