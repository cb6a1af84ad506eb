//! One machine that is served by the library's call: real userfaultfds, many threads that touch,
//! and every byte verified.

#![expect(unsafe_code, reason = "memory of a guest that is unmapped")]

#[path = "support/counted.rs"]
mod counted;
#[path = "support/registered.rs"]
mod registered;
mod support;

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use counted::Counted;
use futures_util::future::BoxFuture;
use registered::{Guest, HUGE_PAGE, Kind, PAGE, copy_of, userfaultfd};
use slat_pager::source::cache::{BlockCache, CacheOptions, Cached};
use slat_pager::source::{Identity, Mapped, Source, SourceError};
use slat_pager::userfaultfd::{RegisterMode, Userfaultfd, Wake, features};
use slat_pager::vm::state::State;
use slat_pager::vm::{OnFailure, Options, Regions, Vm};
use support::{Pattern, bytes};

const SEED: u64 = 25;
const MIB: usize = 1 << 20;

/// A source that is mapped.
#[derive(Debug)]
struct Whole {
    bytes: Vec<u8>,
    granule_bytes: u64,
}

impl Whole {
    fn new(nr_bytes: usize) -> Whole {
        Whole { bytes: bytes(SEED, 0..nr_bytes as u64), granule_bytes: 4096 }
    }
}

impl Source for Whole {
    fn size_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn identity(&self) -> Identity {
        Identity::new("whole", [])
    }

    fn granule_bytes(&self) -> u64 {
        self.granule_bytes
    }

    fn mapped(&self, range: std::ops::Range<u64>) -> Option<Mapped<'_>> {
        let part = &self.bytes[range.start as usize..range.end as usize];
        Some(Mapped::of(part))
    }

    fn is_zero(&self, range: std::ops::Range<u64>) -> bool {
        range.end - range.start == 4096 && range.start / 4096 % 7 == 3
    }

    fn read<'a>(&'a self, _: u64, _: &'a mut [u8]) -> BoxFuture<'a, Result<(), SourceError>> {
        unreachable!("it is mapped")
    }
}

fn served(guest: &Guest, userfaultfd: &Userfaultfd, source: Arc<dyn Source>, options: Options) -> Vm {
    let regions = Regions::new(&[guest.region()], source.size_bytes()).unwrap();
    let state = State::anonymous(options.nr_threads.get(), regions.nr_words()).unwrap();
    let ours = Userfaultfd::from_fd(copy_of(userfaultfd)).unwrap();
    Vm::attach(ours, regions, source, state, options).unwrap()
}

fn options(nr_threads: usize, granule_bytes: u64) -> Options {
    Options { nr_threads: NonZeroUsize::new(nr_threads).unwrap(), granule_bytes, ..Options::default() }
}

/// `nr_threads` threads verify all pages, each in an order of its own.
fn verify_all(guest: &Guest, nr_threads: usize) {
    let nr_pages = guest.nr_pages();
    thread::scope(|scope| {
        for nr in 0..nr_threads {
            scope.spawn(move || {
                // An odd stride meets all pages, since their number is a power of two.
                let stride = 2 * (nr * 37 % 1000) + 1;
                // Threads share the work of the bytes, and all touch all pages.
                for step in 0..nr_pages {
                    let page = (nr * 13 + step * stride) % nr_pages;
                    if step % nr_threads == nr % nr_threads {
                        guest.verify(page, SEED);
                    } else {
                        guest.load(page, 0);
                    }
                }
            });
        }
    });
    (0..nr_pages).for_each(|page| guest.verify(page, SEED));
}

#[test]
fn hundreds_of_threads_find_what_the_snapshot_has() {
    for kind in [Kind::Anonymous, Kind::Thp, Kind::Huge] {
        for (nr_threads, granule) in [(1, 4096), (1, 65536), (3, 16384), (2, 2 << 20)] {
            for is_mapped in [true, false] {
                let Some(userfaultfd) = userfaultfd(0) else { return };
                let size = 8 * MIB;
                let Some(guest) = Guest::new(kind, size, 0) else { continue };
                guest.register(&userfaultfd, RegisterMode::MISSING);
                let source: Arc<dyn Source> = match is_mapped {
                    true => Arc::new(Whole::new(size)),
                    false => Arc::new(Pattern { granule_bytes: 4096, ..Pattern::new(SEED, size as u64) }),
                };
                let vm = served(&guest, &userfaultfd, source, options(nr_threads, granule));
                verify_all(&guest, 200);
                support::until_present(size as u64, &vm);
                assert!(vm.ended().borrow().is_none());
            }
        }
    }
}

/// Faults that are read together are filled without a wake-up each, and woken by one call: no thread
/// may be forgotten.
#[test]
fn threads_whose_faults_are_read_together_are_all_woken() {
    const NR_THREADS: usize = 16;
    for granule in [4096, 65536] {
        let Some(userfaultfd) = userfaultfd(0) else { return };
        let guest = Arc::new(Guest::new(Kind::Anonymous, 4 * MIB, 0).unwrap());
        guest.register(&userfaultfd, RegisterMode::MISSING);
        let (started, threads) = mpsc::channel();
        let (woken, all_woken) = mpsc::channel();
        for nr in 0..NR_THREADS {
            let (guest, started, woken) = (Arc::clone(&guest), started.clone(), woken.clone());
            thread::spawn(move || {
                started.send(rustix::thread::gettid()).unwrap();
                guest.verify(nr * 33, SEED);
                woken.send(nr).unwrap();
            });
        }
        // All wait in the kernel before the pager reads a message.
        for thread in threads.iter().take(NR_THREADS) {
            let stat = format!("/proc/self/task/{}/stat", thread.as_raw_nonzero());
            while std::fs::read_to_string(&stat).unwrap().contains(") R") {
                thread::yield_now();
            }
        }
        let _vm = served(&guest, &userfaultfd, Arc::new(Whole::new(4 * MIB)), options(1, granule));
        for _ in 0..NR_THREADS {
            all_woken.recv_timeout(Duration::from_secs(60)).expect("a thread still waits for its page");
        }
    }
}

/// Each thread has pages of its own among those of the others, and knows what they must be.
fn discard_and_verify(guest: &Guest, nr_threads: usize, nr_steps: usize) {
    thread::scope(|scope| {
        for nr in 0..nr_threads {
            scope.spawn(move || {
                let own: Vec<usize> = (nr..guest.nr_pages()).step_by(nr_threads).collect();
                // What each page has: as in the snapshot, or a byte that fills its begin and its
                // end.
                let mut model: Vec<Option<u8>> = vec![None; own.len()];
                let mut random = nr as u64 + 1;
                for _ in 0..nr_steps {
                    random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let index = (random >> 33) as usize % own.len();
                    let (page, known) = (own[index], &mut model[index]);
                    match random >> 61 {
                        0..3 => {
                            guest.discard(page..page + 1);
                            *known = Some(0);
                        }
                        3..5 => {
                            let value = random as u8;
                            // The rest of the page may be anything that it was.
                            guest.store(page, 0, value);
                            guest.store(page, PAGE - 1, value);
                            if known.is_some() {
                                (1..PAGE - 1).for_each(|at| guest.store(page, at, value));
                                *known = Some(value);
                            } else {
                                guest.discard(page..page + 1);
                                *known = Some(0);
                            }
                        }
                        _ => match known {
                            None => guest.verify(page, SEED),
                            Some(value) => {
                                assert!(guest.page(page).iter().all(|byte| byte == value), "page {page}: not {value}");
                            }
                        },
                    }
                }
            });
        }
    });
}

#[test]
fn removed_pages_come_back_as_zeros_whatever_is_on_its_way() {
    for kind in [Kind::Anonymous, Kind::Thp] {
        for (nr_threads, granule) in [(1, 65536), (4, 65536), (3, 4096), (2, 2 << 20)] {
            for is_mapped in [true, false] {
                let Some(userfaultfd) = userfaultfd(0) else { return };
                let size = 4 * MIB;
                let guest = Guest::new(kind, size, 0).unwrap();
                guest.register(&userfaultfd, RegisterMode::MISSING);
                let source: Arc<dyn Source> = match is_mapped {
                    true => Arc::new(Whole::new(size)),
                    false => Arc::new(Pattern { granule_bytes: 4096, ..Pattern::new(SEED, size as u64) }),
                };
                let vm = served(&guest, &userfaultfd, source, options(nr_threads, granule));
                // Pages come from a third side, too.
                let populator = vm.populator();
                thread::scope(|scope| {
                    scope.spawn(|| populator.populate(0..size as u64).unwrap());
                    discard_and_verify(&guest, 16, 400);
                });
                assert!(vm.ended().borrow().is_none());
            }
        }
    }
}

#[test]
fn huge_pages_that_are_removed_come_back_as_zeros() {
    let Some(userfaultfd) = userfaultfd(0) else { return };
    let Some(guest) = Guest::new(Kind::Huge, 8 * MIB, 0) else { return };
    guest.register(&userfaultfd, RegisterMode::MISSING);
    let vm = served(&guest, &userfaultfd, Arc::new(Whole::new(8 * MIB)), options(1, 65536));
    let nr_pages = HUGE_PAGE / PAGE;
    guest.verify(0, SEED);
    guest.discard(0..2 * nr_pages);
    assert!((0..2 * nr_pages).all(|page| guest.is_zero(page)), "present or absent");
    guest.store(0, 0, 9);
    (2 * nr_pages..4 * nr_pages).for_each(|page| guest.verify(page, SEED));
    assert_eq!(guest.load(0, 0), 9);
    assert!(vm.ended().borrow().is_none());
}

#[test]
fn pages_that_others_fill_meanwhile_stay() {
    for granule in [4096, 65536, 2 << 20] {
        for kind in [Kind::Anonymous, Kind::Thp] {
            let Some(userfaultfd) = userfaultfd(0) else { return };
            let size = 4 * MIB;
            let guest = Guest::new(kind, size, 0).unwrap();
            // Touched before it is registered: the pager cannot know.
            for page in (0..guest.nr_pages()).filter(|page| page % 64 == 63) {
                guest.store(page, 7, 77);
            }
            guest.register(&userfaultfd, RegisterMode::MISSING);
            let source = Arc::new(Pattern { granule_bytes: 4096, ..Pattern::new(SEED, size as u64) });
            let _vm = served(&guest, &userfaultfd, source, options(2, granule));
            let is_other = |page: usize| page % 64 == 63 || page % 5 == 2;
            thread::scope(|scope| {
                // The monitor fills pages beside the pager.
                scope.spawn(|| {
                    for page in (0..guest.nr_pages()).filter(|page| page % 64 != 63 && page % 5 == 2) {
                        match userfaultfd.copy(guest.address(page), &[88; PAGE], Wake::Waiters) {
                            Ok(()) => {}
                            Err(stopped) => assert_eq!(stopped.error, rustix::io::Errno::EXIST),
                        }
                    }
                });
                for nr in 0..32 {
                    let guest = &guest;
                    scope.spawn(move || {
                        for page in (nr..guest.nr_pages()).step_by(32) {
                            guest.load(page, 1);
                        }
                    });
                }
            });
            for page in 0..guest.nr_pages() {
                // THP: a touched page may have brought its neighbours, with zeros, before it was
                // registered.
                let is_thp_zero = kind == Kind::Thp && guest.is_zero(page);
                match () {
                    () if page % 64 == 63 => assert_eq!(guest.load(page, 7), 77),
                    () if is_other(page) && guest.load(page, 0) == 88 => assert_eq!(guest.page(page), [88; PAGE]),
                    () if is_thp_zero => {}
                    () => guest.verify(page, SEED),
                }
            }
        }
    }
}

#[test]
fn write_protection_is_lifted() {
    let Some(userfaultfd) = userfaultfd(features::WRITE_PROTECTION) else { return };
    let guest = Guest::new(Kind::Anonymous, MIB, 0).unwrap();
    guest.register(&userfaultfd, RegisterMode::MISSING.and(RegisterMode::WRITE_PROTECTED));
    let _vm = served(&guest, &userfaultfd, Arc::new(Whole::new(MIB)), options(2, 65536));
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        let protector = scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                match userfaultfd.write_protect(guest.region().addresses()) {
                    Ok(()) => thread::yield_now(),
                    Err(error) => assert_eq!(error.error, rustix::io::Errno::AGAIN),
                }
            }
        });
        discard_and_verify(&guest, 16, 300);
        is_done.store(true, Ordering::Relaxed);
        protector.join().unwrap();
    });
}

#[test]
fn a_source_that_fails_for_a_while_is_waited_for() {
    let Some(userfaultfd) = userfaultfd(0) else { return };
    let guest = Guest::new(Kind::Anonymous, MIB, 0).unwrap();
    guest.register(&userfaultfd, RegisterMode::MISSING);
    let source = Pattern::new(SEED, MIB as u64);
    source.nr_failures.store(20, Ordering::Relaxed);
    let options = options(1, 4096);
    let metrics = Arc::clone(&options.metrics);
    let _vm = served(&guest, &userfaultfd, Arc::new(source), options);
    verify_all(&guest, 16);
    assert_eq!(metrics.source_errors.get(), 20);
}

#[test]
fn what_cannot_be_had_is_poisoned_and_the_rest_is_served() {
    let Some(userfaultfd) = userfaultfd(0) else { return };
    let guest = Guest::new(Kind::Anonymous, MIB, 0).unwrap();
    guest.register(&userfaultfd, RegisterMode::MISSING);
    let source = Pattern { broken: Some(100 * PAGE as u64), ..Pattern::new(SEED, MIB as u64) };
    let vm = served(&guest, &userfaultfd, Arc::new(source), options(1, 65536));
    thread::scope(|scope| {
        for page in 90..120 {
            let guest = &guest;
            scope.spawn(move || if page == 100 { assert!(!guest.is_readable(page)) } else { guest.verify(page, SEED) });
        }
    });
    (0..100).chain(101..256).for_each(|page| guest.verify(page, SEED));
    assert!(vm.ended().borrow().is_none());
}

/// A source that reads nothing until it is told to, and then has nothing.
#[derive(Debug)]
struct Lost(tokio::sync::Notify);

impl Source for Lost {
    fn size_bytes(&self) -> u64 {
        MIB as u64
    }

    fn identity(&self) -> Identity {
        Identity::new("lost", [])
    }

    fn granule_bytes(&self) -> u64 {
        4096
    }

    fn read<'a>(&'a self, offset: u64, into: &'a mut [u8]) -> BoxFuture<'a, Result<(), SourceError>> {
        Box::pin(async move {
            self.0.notified().await;
            Err(SourceError::Corrupt { range: offset..offset + into.len() as u64 })
        })
    }
}

#[test]
fn a_page_that_is_removed_while_it_cannot_be_had_is_zeros() {
    let Some(userfaultfd) = userfaultfd(0) else { return };
    let guest = Guest::new(Kind::Anonymous, MIB, 0).unwrap();
    guest.register(&userfaultfd, RegisterMode::MISSING);
    let source = Arc::new(Lost(tokio::sync::Notify::new()));
    let options = options(1, 4096);
    let metrics = Arc::clone(&options.metrics);
    let _vm = served(&guest, &userfaultfd, Arc::clone(&source) as _, options);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| guest.is_readable(5));
        while metrics.reads_in_flight.get() == 0 {
            thread::yield_now();
        }
        guest.discard(5..6);
        source.0.notify_one();
        assert!(waiting.join().unwrap(), "it was poisoned");
    });
    assert!(guest.is_zero(5));
    assert_eq!(metrics.poisoned_pages.get(), 0);
}

#[test]
fn what_cannot_be_had_pauses_if_that_is_asked_for() {
    let Some(userfaultfd) = userfaultfd(0) else { return };
    let guest = Arc::new(Guest::new(Kind::Anonymous, MIB, 0).unwrap());
    guest.register(&userfaultfd, RegisterMode::MISSING);
    let source = Pattern { broken: Some(0), ..Pattern::new(SEED, MIB as u64) };
    let options = Options { on_failure: OnFailure::Pause, ..options(1, 65536) };
    let metrics = Arc::clone(&options.metrics);
    let vm = served(&guest, &userfaultfd, Arc::new(source), options);
    let waiting = thread::spawn({
        let guest = Arc::clone(&guest);
        move || guest.verify(0, SEED)
    });
    // First with its neighbours, then alone.
    while metrics.source_errors.get() < 2 {
        thread::yield_now();
    }
    (1..256).for_each(|page| guest.verify(page, SEED));
    assert!(!waiting.is_finished());
    // A successor whose source is whole serves the thread that waits.
    vm.leave();
    let source = Pattern::new(SEED, MIB as u64);
    let _successor = served(&guest, &userfaultfd, Arc::new(source), self::options(1, 65536));
    waiting.join().unwrap();
}

#[test]
fn pages_that_were_not_brought_fail_when_the_machine_is_dropped() {
    let Some(userfaultfd) = userfaultfd(0) else { return };
    let guest = Guest::new(Kind::Anonymous, MIB, 0).unwrap();
    guest.register(&userfaultfd, RegisterMode::MISSING);
    let vm = served(&guest, &userfaultfd, Arc::new(Whole::new(MIB)), options(2, 65536));
    guest.verify(5, SEED);
    guest.discard(20..21);
    drop(userfaultfd);
    drop(vm);
    (0..16).for_each(|page| guest.verify(page, SEED));
    assert!(guest.is_readable(20) && guest.is_zero(20));
    assert!((16..256).filter(|page| *page != 20).all(|page| !guest.is_readable(page)));
}

#[test]
fn pages_fail_where_the_monitor_has_split_its_mapping() {
    let Some(userfaultfd) = userfaultfd(0) else { return };
    let guest = Guest::new(Kind::Anonymous, MIB, 0).unwrap();
    guest.register(&userfaultfd, RegisterMode::MISSING);
    guest.split(100);
    let vm = served(&guest, &userfaultfd, Arc::new(Whole::new(MIB)), options(1, 4096));
    guest.verify(70, SEED);
    drop((userfaultfd, vm));
    guest.verify(70, SEED);
    assert!((0..256).filter(|page| *page != 70).all(|page| !guest.is_readable(page)));
}

#[test]
fn a_child_of_the_monitor_reads_no_zeros() {
    let asked_for = features::EVENT_FORK;
    let Ok(userfaultfd) = Userfaultfd::open(asked_for).inspect_err(|error| println!("skipped: {error}")) else {
        return;
    };
    let guest = Guest::new(Kind::Anonymous, MIB, 0).unwrap();
    guest.register(&userfaultfd, RegisterMode::MISSING);
    guest.split(100);
    let vm = served(&guest, &userfaultfd, Arc::new(Whole::new(MIB)), options(1, 4096));
    guest.verify(5, SEED);
    guest.verify(6, SEED);
    // No message says so: the pager takes the page as present.
    guest.discard(5..6);
    assert_eq!(guest.readable_in_child(&[6, 5, 70, 200]), [true, false, false, false]);
    guest.verify(70, SEED);
    assert!(vm.ended().borrow().is_none());
}

#[test]
fn a_machine_that_is_left_is_served_by_the_next() {
    let Some(userfaultfd) = userfaultfd(0) else { return };
    let guest = Arc::new(Guest::new(Kind::Anonymous, 4 * MIB, 0).unwrap());
    guest.register(&userfaultfd, RegisterMode::MISSING);
    let nr_done = Arc::new(AtomicUsize::new(0));
    let threads: Vec<_> = (0..8)
        .map(|nr| {
            let (guest, nr_done) = (Arc::clone(&guest), Arc::clone(&nr_done));
            thread::spawn(move || {
                (nr..guest.nr_pages()).step_by(8).for_each(|page| guest.verify(page, SEED));
                nr_done.fetch_add(1, Ordering::Relaxed);
            })
        })
        .collect();
    let mut nr_pagers = 0;
    while nr_done.load(Ordering::Relaxed) < 8 {
        let source = Arc::new(Pattern { granule_bytes: 4096, ..Pattern::new(SEED, 4 * MIB as u64) });
        let vm = served(&guest, &userfaultfd, source, options(2, 4096));
        thread::yield_now();
        vm.leave();
        nr_pagers += 1;
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(nr_pagers > 1);
}

#[test]
fn a_monitor_that_lies_gets_no_wrong_byte() {
    // It says that pages are huge which are not, and removes one of them.
    let Some(userfaultfd) = userfaultfd(0) else { return };
    let guest = Guest::new(Kind::Thp, 8 * MIB, 0).unwrap();
    guest.register(&userfaultfd, RegisterMode::MISSING);
    let mut region = guest.region();
    region.page_bytes = HUGE_PAGE as u64;
    let source: Arc<dyn Source> = Arc::new(Whole::new(8 * MIB));
    let regions = Regions::new(&[region], source.size_bytes()).unwrap();
    let state = State::anonymous(1, regions.nr_words()).unwrap();
    let ours = Userfaultfd::from_fd(copy_of(&userfaultfd)).unwrap();
    let options = options(1, 4096);
    let metrics = Arc::clone(&options.metrics);
    let vm = Vm::attach(ours, regions, source, state, options).unwrap();
    (0..512).for_each(|page| guest.verify(page, SEED));
    guest.discard(600..601);
    assert!(!guest.is_readable(1024), "it gets nothing any more");
    assert_eq!(metrics.violations.get(), 1);
    assert!(vm.ended().borrow().is_none());
}

#[test]
fn a_fault_outside_of_all_regions_fails() {
    let Some(userfaultfd) = userfaultfd(0) else { return };
    let guest = Guest::new(Kind::Anonymous, 2 * MIB, 0).unwrap();
    guest.register(&userfaultfd, RegisterMode::MISSING);
    let mut region = guest.region();
    region.size_bytes = MIB as u64;
    let source: Arc<dyn Source> = Arc::new(Whole::new(MIB));
    let _vm = slat_pager::attach(copy_of(&userfaultfd), &[region], source).unwrap();
    guest.verify(0, SEED);
    assert!(!guest.is_readable(256));
}

#[test]
fn unmapped_memory_does_not_disturb_the_rest() {
    for more in [0, features::EVENT_UNMAP] {
        let Some(userfaultfd) = userfaultfd(more) else { return };
        let guest = Guest::new(Kind::Anonymous, 2 * MIB, 0).unwrap();
        guest.register(&userfaultfd, RegisterMode::MISSING);
        let source = Pattern { granule_bytes: 4096, ..Pattern::new(SEED, 2 * MIB as u64) };
        let vm = served(&guest, &userfaultfd, Arc::new(source), options(1, 2 << 20));
        // SAFETY: the others are accessed.
        unsafe { guest.unmap(100..200) };
        (0..100).chain(200..512).for_each(|page| guest.verify(page, SEED));
        assert!(vm.ended().borrow().is_none());
    }
}

#[test]
fn many_machines_leave_no_descriptor_and_no_thread() {
    let nr = |folder: &str| std::fs::read_dir(folder).unwrap().count();
    let source: Arc<dyn Source> = Arc::new(Pattern::new(SEED, MIB as u64));
    let mut before = None;
    for round in 0..3 {
        for _ in 0..100 {
            let Some(userfaultfd) = userfaultfd(0) else { return };
            let guest = Guest::new(Kind::Anonymous, MIB, 0).unwrap();
            guest.register(&userfaultfd, RegisterMode::MISSING);
            let vm = served(&guest, &userfaultfd, Arc::clone(&source), options(1, 65536));
            guest.verify(0, SEED);
            drop(vm);
            // SAFETY: the guest is dropped.
            unsafe { guest.unmap(0..256) };
        }
        // Other tests of this program have descriptors, too: what counts is that nothing grows.
        let now = nr("/proc/self/fd");
        let most = *before.get_or_insert(now) + 100;
        assert!(now < most, "round {round}: {now} descriptors");
    }
}

#[test]
fn reads_stay_within_their_memory() {
    let Some(userfaultfd) = userfaultfd(0) else { return };
    let size = 16 * MIB;
    let guest = Guest::new(Kind::Anonymous, size, 0).unwrap();
    guest.register(&userfaultfd, RegisterMode::MISSING);
    let pattern = Pattern::new(SEED, size as u64);
    let source = Arc::new(Counted::new(pattern));
    let mut options = options(2, 65536);
    options.limits.budget = slat_pager::vm::fetch::Budget::new(MIB as u64);
    options.limits.vm_bytes = 4 * MIB as u64;
    let budget = options.limits.budget.clone();
    let vm = served(&guest, &userfaultfd, Arc::clone(&source) as Arc<dyn Source>, options);
    thread::scope(|scope| {
        for nr in 0..200 {
            let guest = &guest;
            scope.spawn(move || (nr..guest.nr_pages()).step_by(200).for_each(|page| guest.verify(page, SEED)));
        }
    });
    let most = source.most.load(Ordering::Relaxed);
    assert!(most > 65536, "several at once: {most}");
    assert!(most <= MIB as u64, "{most}");
    drop(vm);
    assert_eq!(budget.free_bytes(), MIB as u64, "all is given back");
}

#[test]
fn what_is_cached_is_served_without_a_read() {
    const SIZE: usize = 4 * MIB;
    let source = Arc::new(Pattern::new(SEED, SIZE as u64));
    let cache = BlockCache::new(&CacheOptions::default()).unwrap();
    let cached: Arc<dyn Source> = Arc::new(Cached::new(Arc::clone(&source) as _, Arc::clone(&cache)));
    for _ in 0..2 {
        let Some(userfaultfd) = userfaultfd(0) else { return };
        let guest = Guest::new(Kind::Anonymous, SIZE, 0).unwrap();
        guest.register(&userfaultfd, RegisterMode::MISSING);
        let vm = slat_pager::attach(copy_of(&userfaultfd), &[guest.region()], Arc::clone(&cached)).unwrap();
        thread::scope(|scope| {
            for nr in 0..4 {
                let guest = &guest;
                scope.spawn(move || (nr..guest.nr_pages()).step_by(4).for_each(|page| guest.verify(page, SEED)));
            }
        });
        drop(vm);
    }
    // Each block once, whether a fault asked for it or it was read ahead.
    let nr_blocks = SIZE as u64 / source.granule_bytes;
    let figures = cache.figures();
    assert_eq!((source.nr_reads.load(Ordering::Relaxed), figures.nr_fetched), (nr_blocks, nr_blocks));
    assert!(figures.nr_read_ahead > 0 && figures.nr_memory_hits > 0, "{figures:?}");
}
