//! Splits and recoveries that are overtaken, and that overtake others. At each flush, resolve and
//! allocation that they make, and at each look at a PTE, another call runs from beginning to end.
//! In every case the guest reaches its frames, its writes are reported and logged, the counts are
//! exact, and no page-table page is leaked.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, Once};

use crate::common::broken::{self, Broken};
use crate::common::hooked::{Hooked, at_look, was_called};
use crate::common::log::{HUGE_PAGE_LOGGINGS, LAZY_HUGE_PAGE_LOGGINGS, LOG, NO_FLAGS, pages_of, write_as_hardware};
use crate::common::{Call, TestHost, assert_no_table_is_left, change, region, set_accessed_and_dirty, translate};
use slat::baselines::Locking;
use slat::dirty::{DirtyTracking, HugePageLogging};
use slat::error::SlotError;
use slat::format::{Format, Npt};
use slat::host::AllocationWait;
use slat::{Access, Config, Gfn, GfnRange, Level, Outcome, PAGE_SIZE, PageSize, Vm};

const BIG: u64 = 512;
const HUGE: u64 = 512 * 512;
const SLOT: u32 = 1;
/// The other half, once the memslot is replaced by two.
const OTHER_HALF: u32 = 2;

/// A memslot, and what must not be lost of it.
struct Scene<F: Format> {
    vm: Arc<Vm<TestHost, F>>,
    first: u64,
    nr_pages: u64,
    size: PageSize,
    /// The frame of its first page now.
    first_pfn: AtomicU64,
    /// Whether turning logging on has returned, and turning it off has not begun.
    logs: AtomicBool,
    /// Pages written while it logged; and those that the log has reported.
    to_log: Mutex<BTreeSet<u64>>,
    logged: Mutex<BTreeSet<u64>>,
    /// Pages written; and those that the host was notified of as dirty.
    written: Mutex<BTreeSet<u64>>,
    reported: Mutex<BTreeSet<u64>>,
    /// Ranges in flight: the guest waits there.
    held: Mutex<Vec<GfnRange>>,
    is_recreated: AtomicBool,
}

impl<F: Format> Scene<F> {
    /// The whole memslot is mapped for writing, by leaves of `parts`; two pages were accessed.
    fn new(config: Config, size: PageSize, parts: PageSize) -> Arc<Scene<F>> {
        let (first, nr_pages) = if size == PageSize::Size1G { (HUGE, HUGE) } else { (BIG, 2 * BIG) };
        let vm = Arc::new(Vm::<TestHost, F>::new(TestHost::default(), config).unwrap());
        vm.host().record_zapped();
        let scene = Arc::new(Scene {
            vm,
            first,
            nr_pages,
            size,
            first_pfn: AtomicU64::new(HUGE * 8 + first),
            logs: AtomicBool::new(false),
            to_log: Mutex::default(),
            logged: Mutex::default(),
            written: Mutex::default(),
            reported: Mutex::default(),
            held: Mutex::default(),
            is_recreated: AtomicBool::new(false),
        });
        scene.create(SLOT, 0, nr_pages);
        let mut vcpu = scene.vm.create_vcpu().unwrap();
        let size_bytes = nr_pages * PAGE_SIZE;
        assert_eq!(vcpu.pre_fault_memory(Gfn(first).gpa(), size_bytes, Access::Write), Ok(size_bytes));
        drop(vcpu);
        scene.vm.split_range(scene.range(0, nr_pages), parts).unwrap();
        scene.write(3);
        scene.read(BIG + 9);
        scene
    }

    fn range(&self, page: u64, nr_pages: u64) -> GfnRange {
        GfnRange::new(Gfn(self.first + page), nr_pages)
    }

    fn create(&self, id: u32, page: u64, nr_pages: u64) {
        let start = self.range(page, nr_pages).start;
        let pfn = self.first_pfn.load(Ordering::SeqCst) + page;
        self.vm.set_user_memory_region(region(id, start.gpa().0, nr_pages * PAGE_SIZE, pfn, self.size)).unwrap();
    }

    /// An access of the guest, by hardware where the page tables allow it. Returns whether it
    /// succeeded; it does not where a range is in flight.
    fn access(&self, page: u64, access: Access) -> bool {
        let gfn = Gfn(self.first + page);
        let mut vcpu = self.vm.create_vcpu().unwrap();
        for _ in 0..8 {
            let found = translate(&self.vm, gfn.gpa());
            if let Some(found) = found.filter(|found| access == Access::Read || found.writable) {
                assert_eq!(found.pfn.0, self.first_pfn.load(Ordering::SeqCst) + page, "page {page:#x}");
                let is_done = match access {
                    Access::Write => write_as_hardware(&self.vm, gfn, found),
                    _ => set_accessed_and_dirty(&self.vm, gfn.gpa(), found, access),
                };
                if is_done {
                    return true;
                }
            }
            assert_eq!(vcpu.handle_fault(gfn.gpa(), access), Ok(Outcome::Resume));
        }
        let is_held = self.held.lock().unwrap().iter().any(|range| range.contains(gfn));
        assert!(is_held, "{access:?} of page {page:#x} still faults");
        false
    }

    fn read(&self, page: u64) {
        self.access(page, Access::Read);
    }

    fn write(&self, page: u64) {
        if self.access(page, Access::Write) {
            self.written.lock().unwrap().insert(page);
            if self.logs.load(Ordering::SeqCst) {
                self.to_log.lock().unwrap().insert(page);
            }
        }
    }

    /// Runs `invalidate`, which invalidates `range`.
    fn holding<R>(&self, range: GfnRange, invalidate: impl FnOnce() -> R) -> R {
        self.held.lock().unwrap().push(range);
        let result = invalidate();
        let mut held = self.held.lock().unwrap();
        let index = held.iter().position(|held| *held == range).unwrap();
        held.swap_remove(index);
        result
    }

    /// The reports up to now must cover all writes in `range`.
    fn check_reports(&self, range: GfnRange) {
        let mut reported = self.reported.lock().unwrap();
        for leaf in self.vm.host().take_zapped().into_iter().filter(|leaf| leaf.dirty) {
            reported.extend(leaf.range.start.0 - self.first..leaf.range.end.0 - self.first);
        }
        for page in self.written.lock().unwrap().iter().filter(|page| range.contains(Gfn(self.first + **page))) {
            assert!(reported.contains(page), "page {page:#x} was written, and not reported");
        }
    }

    fn invalidate(&self, page: u64, nr_pages: u64) {
        let range = self.range(page, nr_pages);
        self.holding(range, || {
            let invalidation = self.vm.invalidate_range(range).unwrap();
            for gfn in [range.start, Gfn(range.end.0 - 1)] {
                assert_eq!(translate(&self.vm, gfn.gpa()), None);
            }
            self.check_reports(range);
            drop(invalidation);
        });
    }

    /// Deletes the memslot and makes it again as two, over other frames.
    fn recreate(&self) {
        let all = self.range(0, self.nr_pages);
        if self.is_recreated.swap(true, Ordering::SeqCst) {
            return;
        }
        match self.holding(all, || self.vm.set_user_memory_region(change(SLOT, NO_FLAGS, 0, 0))) {
            // The overtaken call holds it.
            Err(SlotError::SlotBusy { .. }) => return,
            result => result.unwrap(),
        }
        self.check_reports(all);
        for page in (0..self.nr_pages).step_by(509) {
            assert_eq!(translate(&self.vm, Gfn(self.first + page).gpa()), None);
        }
        self.logs.store(false, Ordering::SeqCst);
        self.to_log.lock().unwrap().clear();
        self.first_pfn.fetch_add(HUGE * 16, Ordering::SeqCst);
        self.create(SLOT, 0, self.nr_pages / 2);
        self.create(OTHER_HALF, self.nr_pages / 2, self.nr_pages / 2);
        self.write(5);
        self.write(self.nr_pages - 1);
    }

    fn set_log(&self, on: bool) {
        let flags = if on { LOG } else { NO_FLAGS };
        if !on {
            self.logs.store(false, Ordering::SeqCst);
            self.to_log.lock().unwrap().clear();
        }
        let start = Gfn(self.first).gpa().0;
        match self.vm.set_user_memory_region(change(SLOT, flags, start, self.nr_pages * PAGE_SIZE)) {
            Ok(()) => self.logs.store(on, Ordering::SeqCst),
            // The overtaken call holds it, or two memslots have replaced it.
            Err(SlotError::SlotBusy { .. } | SlotError::Overlap { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn harvest(&self) {
        let mut bitmap = vec![0; self.nr_pages.div_ceil(64) as usize];
        if self.vm.get_dirty_log(SLOT, &mut bitmap).is_ok() {
            self.logged.lock().unwrap().extend(pages_of(&bitmap, 0));
        }
    }

    fn finish(self: Arc<Self>) {
        // Each kind of write that may follow.
        let all = self.range(0, self.nr_pages);
        for page in [3, 4, 100, 511, 512, BIG + 9, self.nr_pages - 1] {
            self.write(page);
        }
        if self.logs.load(Ordering::SeqCst) {
            self.harvest();
            let logged = self.logged.lock().unwrap();
            for page in self.to_log.lock().unwrap().iter() {
                assert!(logged.contains(page), "page {page:#x} was written, and is not in the log");
            }
        }
        for page in 0..self.nr_pages {
            if let Some(found) = translate(&self.vm, Gfn(self.first + page).gpa()) {
                assert_eq!(found.pfn.0, self.first_pfn.load(Ordering::SeqCst) + page, "page {page:#x}");
            }
        }
        // Compares the counts of leaves with the leaves.
        let (mut page, mut found) = (0, [0; 3]);
        while page < self.nr_pages {
            let leaf = translate(&self.vm, Gfn(self.first + page).gpa());
            if let Some(leaf) = leaf {
                found[usize::from(leaf.level.0) - 1] += 1;
            }
            page += leaf.map_or(1, |leaf| leaf.level.nr_pages());
        }
        let stats = self.vm.stats();
        assert_eq!([stats.pages_4k(), stats.pages_2m(), stats.pages_1g()], found, "leaves of each size: {stats:?}");
        drop(self.vm.invalidate_range(all).unwrap());
        self.check_reports(all);
        let (splits, recoveries) = (stats.splits - stats.splits_1g, stats.recoveries - stats.recoveries_1g);
        let stats = self.vm.stats();
        assert_eq!(stats.installed_4k + splits * 512, stats.zapped_4k + recoveries * 512, "{stats:?}");
        for id in [SLOT, OTHER_HALF] {
            let _ = self.vm.set_user_memory_region(change(id, NO_FLAGS, 0, 0));
        }
        assert_no_table_is_left(&self.vm);
    }
}

/// A call that overtakes or is overtaken.
#[derive(Clone, Copy, Debug)]
enum Act {
    Split,
    Recover,
    Enable,
    Disable,
    /// Of one page, of a block, of all.
    InvalidatePage,
    InvalidateBlock,
    InvalidateAll,
    Read,
    Write,
    /// Of pages that were not accessed.
    Prefault,
    Harvest,
    Age,
    Recreate,
}

const ACTS: [Act; 13] = [
    Act::Split,
    Act::Recover,
    Act::Enable,
    Act::Disable,
    Act::InvalidatePage,
    Act::InvalidateBlock,
    Act::InvalidateAll,
    Act::Read,
    Act::Write,
    Act::Prefault,
    Act::Harvest,
    Act::Age,
    Act::Recreate,
];

impl Act {
    fn run<F: Format>(self, scene: &Scene<F>) {
        let all = scene.range(0, scene.nr_pages);
        match self {
            Act::Split => {
                scene.vm.split_range(scene.range(0, 2 * BIG), PageSize::Size4K).unwrap();
            }
            Act::Recover => {
                scene.vm.recover_range(all).unwrap();
            }
            Act::Enable => {
                scene.set_log(true);
                // An exact log is then required of what follows.
                scene.write(17);
            }
            Act::Disable => scene.set_log(false),
            Act::InvalidatePage => scene.invalidate(8, 1),
            Act::InvalidateBlock => scene.invalidate(0, BIG),
            Act::InvalidateAll => scene.invalidate(0, scene.nr_pages),
            Act::Read => scene.read(10),
            Act::Write => scene.write(11),
            Act::Prefault => {
                let mut vcpu = scene.vm.create_vcpu().unwrap();
                let _ = vcpu.pre_fault_memory(Gfn(scene.first).gpa(), 2 * BIG * PAGE_SIZE, Access::Read);
            }
            Act::Harvest => scene.harvest(),
            Act::Age => {
                scene.vm.age_range(all).unwrap();
            }
            Act::Recreate => scene.recreate(),
        }
    }
}

/// The state of the memslot before an act: its largest leaves, its present leaves, and whether it
/// logs.
#[derive(Clone, Copy, Debug)]
struct Before {
    size: PageSize,
    parts: PageSize,
    logs: bool,
    /// A page that is not mapped.
    hole: bool,
}

const BEFORE: [Before; 7] = [
    Before { size: PageSize::Size2M, parts: PageSize::Size4K, logs: false, hole: false },
    Before { size: PageSize::Size2M, parts: PageSize::Size4K, logs: false, hole: true },
    Before { size: PageSize::Size2M, parts: PageSize::Size4K, logs: true, hole: false },
    Before { size: PageSize::Size2M, parts: PageSize::Size2M, logs: false, hole: false },
    Before { size: PageSize::Size2M, parts: PageSize::Size2M, logs: true, hole: false },
    Before { size: PageSize::Size2M, parts: PageSize::Size2M, logs: false, hole: true },
    Before { size: PageSize::Size1G, parts: PageSize::Size2M, logs: false, hole: false },
];

fn scene<F: Format>(config: Config, before: Before) -> Arc<Scene<F>> {
    let scene = Scene::<F>::new(config, before.size, before.parts);
    if before.logs {
        scene.set_log(true);
        scene.write(3);
        if before.parts == PageSize::Size4K {
            scene.vm.split_range(scene.range(0, scene.nr_pages), PageSize::Size4K).unwrap();
        }
        scene.write(6);
    }
    if before.hole {
        scene.invalidate(2, 1);
        scene.vm.split_range(scene.range(0, scene.nr_pages), before.parts).unwrap();
    }
    scene
}

fn configs() -> Vec<Config> {
    let mut configs = Vec::new();
    for huge in HUGE_PAGE_LOGGINGS.into_iter().chain(LAZY_HUGE_PAGE_LOGGINGS) {
        let config = Config::default().with_huge_page_logging(huge);
        configs.extend([config, config.with_dirty_tracking(DirtyTracking::DirtyBit)]);
    }
    configs
}

thread_local! {
    static CONTEXT: RefCell<String> = const { RefCell::new(String::new()) };
}

static SHOW_CONTEXT: Once = Once::new();

/// Whether this combination is due: every eleventh, or all with `OVERTAKEN_STRIDE=1`, which takes
/// some ten minutes.
fn is_due() -> bool {
    static COMBINATION: AtomicU64 = AtomicU64::new(0);
    static STRIDE: LazyLock<u64> =
        LazyLock::new(|| std::env::var("OVERTAKEN_STRIDE").ok().and_then(|stride| stride.parse().ok()).unwrap_or(11));
    COMBINATION.fetch_add(1, Ordering::Relaxed).is_multiple_of(*STRIDE)
}

/// Runs `test`, and prints `context` if it panics.
fn with_context(context: impl std::fmt::Debug, test: impl FnOnce()) {
    CONTEXT.set(format!("{context:?}"));
    SHOW_CONTEXT.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            eprintln!("in {}", CONTEXT.with_borrow(String::clone));
            before(panic);
        }));
    });
    test();
}

/// Each of `by` overtakes `act` at its `nth` `call`. Returns whether that was reached.
fn overtaken<F: Format>(config: Config, before: Before, act: Act, by: Act, (call, nth): (Call, u32)) -> bool {
    let scene = scene::<F>(config, before);
    let other = Arc::downgrade(&scene);
    scene.vm.host().overtake(call, nth, move || by.run(&*other.upgrade().unwrap()));
    act.run(&*scene);
    let was_reached = scene.vm.host().was_overtaken();
    scene.finish();
    was_reached
}

fn at_each_call<F: Format>(config: Config, calls: &[Call]) {
    // 1 GiB in one configuration alone: it takes long.
    let is_default = config == Config::default();
    for before in BEFORE.into_iter().filter(|before| is_default || before.size == PageSize::Size2M) {
        for act in ACTS {
            for by in ACTS.into_iter().filter(|_| is_due()) {
                for &call in calls {
                    for nth in 1..5 {
                        let mut was_reached = false;
                        with_context((F::NAME, config, before, act, by, call, nth), || {
                            was_reached = overtaken::<F>(config, before, act, by, (call, nth));
                        });
                        if !was_reached {
                            break;
                        }
                    }
                }
            }
        }
    }
}

/// Outside of guards and locks, on the same thread.
const OUTSIDE: [Call; 3] = [Call::Flush, Call::Resolve, Call::Allocate(AllocationWait::Allowed)];

#[test]
fn calls_during_a_flush_a_resolve_or_an_allocation_lose_nothing() {
    for config in configs() {
        at_each_call::<Npt>(config, &OUTSIDE);
    }
    slat::for_each_format!(F => {
        at_each_call::<F>(Config::default().with_locking(Locking::Exclusive), &OUTSIDE);
    });
}

#[test]
fn nothing_is_lost_with_break_before_make() {
    for config in configs() {
        at_each_call::<Broken>(config, &OUTSIDE);
    }
    at_each_call::<Broken>(Config::default().with_locking(Locking::Exclusive), &OUTSIDE);
}

/// The same, while the observer of [`broken`] checks all changes.
#[test]
fn every_break_is_flushed_despite_calls_in_between() {
    let mut nr_made = (0, 0);
    for config in configs() {
        for before in BEFORE.into_iter().filter(|before| before.size == PageSize::Size2M) {
            for act in ACTS {
                for by in ACTS.into_iter().filter(|_| is_due()) {
                    for nth in 1..4 {
                        let mut was_reached = false;
                        with_context((config, before, act, by, nth), || {
                            let scene = scene::<Broken>(config, before);
                            broken::observe(&scene.vm);
                            let other = Arc::downgrade(&scene);
                            scene.vm.host().overtake(Call::Flush, nth, move || by.run(&*other.upgrade().unwrap()));
                            act.run(&*scene);
                            was_reached = scene.vm.host().was_overtaken();
                            Act::Write.run(&*scene);
                            let (nr_split, nr_recovered) = broken::observed();
                            nr_made = (nr_made.0 + nr_split, nr_made.1 + nr_recovered);
                            scene.finish();
                        });
                        if !was_reached {
                            break;
                        }
                    }
                }
            }
        }
    }
    assert!(nr_made.0 > 100 && nr_made.1 > 100, "{nr_made:?}");
}

/// On another thread, while the overtaken call is in its guard.
#[cfg(debug_assertions)]
fn at_each_look<F: Format>(config: Config, before: Before, acts: &[Act]) {
    for &act in acts {
        for by in ACTS.into_iter().filter(|_| is_due()) {
            let mut nth = 1;
            loop {
                let mut was_reached = false;
                with_context((F::NAME, config, before, act, by, nth), || {
                    let scene = scene::<F>(config, before);
                    let other = Arc::downgrade(&scene);
                    at_look(Level::L1G, nth, move || {
                        let other = other.upgrade().unwrap();
                        std::thread::spawn(move || by.run(&*other)).join().unwrap();
                    });
                    act.run(&*scene);
                    was_reached = was_called();
                    scene.finish();
                });
                if !was_reached {
                    break;
                }
                nth += 1 + nth / 3;
            }
        }
    }
}

#[cfg(debug_assertions)]
#[test]
fn calls_at_each_look_of_a_split_or_a_recovery_lose_nothing() {
    let config = Config::default();
    let acts = [Act::Split, Act::Recover, Act::Enable, Act::Disable];
    for before in BEFORE {
        at_each_look::<Hooked>(config, before, &acts);
        at_each_look::<Hooked>(config.with_huge_page_logging(HugePageLogging::MarkWhole), before, &acts[1..]);
        at_each_look::<Hooked>(config.with_dirty_tracking(DirtyTracking::DirtyBit), before, &acts[1..]);
        at_each_look::<Broken>(config, before, &acts);
    }
}

#[cfg(debug_assertions)]
#[test]
fn calls_overtaken_by_a_split_or_a_recovery_lose_nothing() {
    let config = Config::default();
    let acts = [Act::InvalidatePage, Act::InvalidateAll, Act::Write, Act::Read, Act::Prefault, Act::Harvest, Act::Age];
    for before in BEFORE {
        at_each_look::<Hooked>(config, before, &acts);
        at_each_look::<Broken>(config, before, &acts);
    }
}
