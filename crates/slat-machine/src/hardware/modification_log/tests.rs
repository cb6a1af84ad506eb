//! The logs alone: the index goes down and wraps around, drains keep their order, and nothing is
//! lost beside drains.

use std::collections::HashSet;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::*;
use crate::hardware::commit::Port;

/// The longest time for one test on threads.
const BUDGET: Duration = Duration::from_millis(300);

fn page(number: u64) -> Gpa {
    Gpa(number << 12)
}

fn drained(logs: &ModificationLogs, domain: &FlushDomain) -> Vec<Gpa> {
    let mut pages = Vec::new();
    logs.drain(domain, &mut |part| pages.extend_from_slice(part));
    pages
}

fn emptied(log: &ModificationLog) -> Vec<Gpa> {
    let mut pages = Vec::new();
    log.empty(&mut |part| pages.extend_from_slice(part));
    pages
}

#[test]
fn the_index_goes_down_from_511_and_entries_are_page_addresses() {
    let logs = ModificationLogs::default();
    let log = logs.add();
    for (number, gpa) in [0x1234_5678, 0xffff_ffff_ffff, 0x1000].into_iter().enumerate() {
        assert_eq!(log.append(Gpa(gpa)), Ok(()));
        assert_eq!(log.buffer.entries[511 - number].load(Ordering::Relaxed), gpa & !0xfff);
    }
    assert_eq!(log.nr_logged(), 3);
    assert_eq!(emptied(&log), [Gpa(0x1234_5000), Gpa(0xffff_ffff_f000), Gpa(0x1000)]);
    assert_eq!(emptied(&log), []);
}

#[test]
fn a_full_log_takes_nothing_until_it_is_empty() {
    let log = ModificationLogs::default().add();
    for number in 0..512 {
        assert_eq!(log.check_room(), Ok(()));
        assert_eq!(log.append(page(number)), Ok(()));
    }
    for _ in 0..2 {
        assert_eq!((log.check_room(), log.append(page(1000))), (Err(LogFull), Err(LogFull)));
        assert_eq!(log.nr_logged(), 512);
    }
    assert!(emptied(&log).into_iter().eq((0..512).map(page)));
    assert_eq!((log.check_room(), log.append(page(1000))), (Ok(()), Ok(())));
    assert_eq!(emptied(&log), [page(1000)]);
}

#[test]
fn the_index_wraps_around_with_any_entries_left() {
    let domain = FlushDomain::new();
    let logs = ModificationLogs::default();
    let log = logs.add();
    let mut next = 0;
    let mut nr_seen = 0;
    for part in [1, 511, 300, 300, 512, 7, 511, 512, 2] {
        for _ in 0..part {
            assert_eq!(log.append(page(next)), Ok(()));
            next += 1;
        }
        let pages = if part % 2 == 0 { drained(&logs, &domain) } else { emptied(&log) };
        assert!(pages.into_iter().eq((nr_seen..next).map(page)), "{part} behind {nr_seen}");
        nr_seen = next;
    }
}

#[test]
fn a_drain_flushes_first_and_keeps_the_entries_until_they_are_marked() {
    let domain = Arc::new(FlushDomain::new());
    let port = Port::new(&domain);
    let logs = ModificationLogs::default();
    let (one, other) = (logs.add(), logs.add());
    let generation = port.generation();
    assert_eq!(drained(&logs, &domain), []);
    assert!(port.is_current(generation), "no entries, no flush");

    for number in [1, 2] {
        assert_eq!(one.append(page(number)), Ok(()));
    }
    assert_eq!(other.append(page(3)), Ok(()));
    let mut parts = Vec::new();
    logs.drain(&domain, &mut |part| {
        assert!(!port.is_current(generation), "the flush comes before the first entry is passed on");
        // Another drain, while this one has not returned from its marking.
        let again = drained(&logs, &domain);
        assert!(part.iter().all(|gpa| again.contains(gpa)), "{part:?} is not in {again:?}");
        parts.push(part.to_vec());
        if part.len() == 2 {
            // Another drain is faster, and the CPU logs more: this one releases what it has passed
            // on, no less and no more.
            assert_eq!(one.append(page(4)), Ok(()));
            assert_eq!(drained(&logs, &domain), [page(4)]);
            assert_eq!(one.append(page(5)), Ok(()));
        }
    });
    // The drain within passed on the second log's entry.
    assert_eq!(parts, [vec![page(1), page(2)]]);
    assert_eq!(drained(&logs, &domain), [page(5)]);
    assert_eq!(drained(&logs, &domain), []);
}

#[test]
fn the_entries_of_a_dropped_cpu_are_drained_and_its_log_is_reused() {
    let domain = FlushDomain::new();
    let logs = ModificationLogs::default();
    let first = logs.add();
    for number in 0..600 {
        if number == 512 {
            emptied(&first);
        }
        assert_eq!(first.append(page(number)), Ok(()));
    }
    drop(first);
    let second = logs.add();
    assert_eq!((logs.buffers().count(), second.nr_logged()), (1, 0));
    for number in 600..1024 {
        assert_eq!(second.append(page(number)), Ok(()));
    }
    assert_eq!(second.append(page(1024)), Err(LogFull));
    assert_eq!(second.nr_logged(), 424);
    let third = logs.add();
    assert_eq!(third.append(page(2000)), Ok(()));
    drop(second);
    drop(third);
    assert!(drained(&logs, &domain).into_iter().eq((512..1024).chain([2000]).map(page)));
    assert_eq!(logs.buffers().count(), 2);
}

#[test]
fn each_log_has_one_cpu() {
    let logs = ModificationLogs::default();
    let taken = Mutex::new(HashSet::new());
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..500 {
                    let log = logs.add();
                    let buffer = Arc::as_ptr(&log.buffer).addr();
                    assert!(taken.lock().insert(buffer), "a log with two CPUs");
                    thread::yield_now();
                    assert!(taken.lock().remove(&buffer));
                }
            });
        }
    });
    assert!((1..=8).contains(&logs.buffers().count()));
}

#[test]
fn thousands_of_logs_are_dropped_without_a_deep_stack() {
    let work = || {
        let logs = ModificationLogs::default();
        // CPUs hold each of them, so that none is taken twice.
        let cpus: Vec<_> = (0..4096).map(|_| logs.add()).collect();
        drop(cpus);
        assert_eq!(logs.buffers().count(), 4096);
    };
    thread::Builder::new().stack_size(128 << 10).spawn(work).expect("a thread").join().expect("no panic");
}

/// Two CPUs log one number after the other. Three threads drain: what was logged when a drain began
/// was passed to one of them, and noted, when it returns.
#[test]
fn drains_beside_the_cpus_and_each_other_lose_nothing() {
    const MOST: u64 = 2_000_000;
    let domain = FlushDomain::new();
    let logs = ModificationLogs::default();
    let noted: Vec<AtomicBool> = (0..2 * MOST).map(|_| AtomicBool::new(false)).collect();
    let nr_done = [const { AtomicU64::new(0) }; 2];
    let stop = AtomicBool::new(false);
    let note = |pages: &[Gpa]| {
        for gpa in pages {
            noted[(gpa.0 >> 12) as usize].store(true, Ordering::Relaxed);
        }
    };
    let started = Barrier::new(5);
    thread::scope(|scope| {
        for (cpu, nr_done) in nr_done.iter().enumerate() {
            let (logs, stop, note, started) = (&logs, &stop, &note, &started);
            scope.spawn(move || {
                let log = logs.add();
                started.wait();
                let begin = Instant::now();
                for number in 0..MOST {
                    if number % 64 == 0 && begin.elapsed() > BUDGET {
                        break;
                    }
                    let gpa = page(2 * number + cpu as u64);
                    while log.append(gpa).is_err() {
                        log.empty(&mut |pages| note(pages));
                    }
                    // Release: a drain that observes it begins later.
                    nr_done.store(number + 1, Ordering::Release);
                }
                stop.store(true, Ordering::Relaxed);
            });
        }
        for drainer in 0..3 {
            let (domain, logs, stop, nr_done, noted, note, started) =
                (&domain, &logs, &stop, &nr_done, &noted, &note, &started);
            scope.spawn(move || {
                let mut nr_checked = [0; 2];
                started.wait();
                loop {
                    let before = [0, 1].map(|cpu: usize| nr_done[cpu].load(Ordering::Acquire));
                    logs.drain(domain, &mut |pages| {
                        if drainer == 0 {
                            // Is preempted while it has entries.
                            thread::yield_now();
                        }
                        note(pages);
                    });
                    for cpu in 0..2 {
                        for number in nr_checked[cpu]..before[cpu] {
                            let is_noted = &noted[2 * number as usize + cpu];
                            assert!(is_noted.load(Ordering::Relaxed), "entry {number} of CPU {cpu} is missing");
                        }
                        nr_checked[cpu] = before[cpu];
                    }
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
        }
    });
    for gpa in drained(&logs, &domain) {
        note(&[gpa]);
    }
    for (cpu, nr_done) in nr_done.into_iter().enumerate() {
        let nr_done = nr_done.into_inner();
        assert!(nr_done > 0);
        assert!((0..MOST).all(|number| noted[2 * number as usize + cpu].load(Ordering::Relaxed) == (number < nr_done)));
    }
    assert!(logs.nr_drains() >= 4, "one of each thread, and the last");
}
