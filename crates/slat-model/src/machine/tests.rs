use std::cell::{Cell, RefCell};
use std::rc::Rc;

use slat_costed::baselines::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use super::*;

#[global_allocator]
static ALLOCATOR: crate::arena::Allocator = crate::arena::Allocator;

fn on(nr_cpus: usize, main: impl FnOnce() -> Vec<u64> + 'static) -> Outcome<Vec<u64>> {
    let text = format!("name = 't'\n[[node]]\ncpus = '0-{}'", nr_cpus - 1);
    run(&Topology::parse("t", &text).unwrap(), &Parameters::built_in().unwrap(), main).unwrap()
}

/// Each of `nr_cpus` CPUs adds to one counter `nr_times`.
fn count(nr_cpus: usize, nr_times: u64) -> Outcome<Vec<u64>> {
    on(nr_cpus, move || {
        let counter = Rc::new(AtomicU64::new(0));
        let tasks: Vec<_> = (0..nr_cpus)
            .map(|cpu| {
                let counter = Rc::clone(&counter);
                spawn(cpu, move || (0..nr_times).for_each(|_| _ = counter.fetch_add(1, Relaxed)))
            })
            .collect();
        tasks.into_iter().for_each(join);
        vec![counter.load(Relaxed)]
    })
}

#[test]
fn cpus_count_together_and_the_line_goes_from_one_to_the_next() {
    let one = count(1, 1000);
    assert_eq!(one.result, [1000]);
    // A locked instruction on a line of its own.
    assert_eq!(count(1, 2000).report.end_ns - one.report.end_ns, 7500);
    let two = count(2, 1000);
    assert_eq!(two.result, [2000]);
    // A core that has the line adds two or three times before it goes to the other.
    assert!((15..40).contains(&(two.report.end_ns / 2000)), "{:?}", two.report);
    assert_eq!(two.report.hot_lines[0].nr_fetches, two.report.hot_places[0].nr_fetches);
}

#[test]
fn a_run_is_the_same_each_time() {
    let [first, again] = [(); 2].map(|()| count(16, 300).report);
    assert_eq!(first, again);
    assert_ne!(first.trace_hash, count(16, 301).report.trace_hash);
    // Whatever else the process has allocated.
    let waste: Vec<Vec<u8>> = (0..1000).map(|size| vec![1; size]).collect();
    assert_eq!(first, count(16, 300).report);
    drop(waste);
}

#[test]
fn a_lock_excludes_and_is_handed_over_in_order() {
    let outcome = on(8, || {
        let (lock, order) = (Rc::new(LockWord::default()), Rc::new(RefCell::new(Vec::new())));
        let tasks: Vec<_> = (0..8)
            .map(|cpu| {
                let (lock, order) = (Rc::clone(&lock), Rc::clone(&order));
                spawn(cpu, move || {
                    work(cpu as u64 * 1000);
                    lock.hold(Side::Write, 5_000_000);
                    order.borrow_mut().push(now() / 1_000_000);
                })
            })
            .collect();
        tasks.into_iter().for_each(join);
        order.take()
    });
    let gaps: Vec<_> = outcome.result.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps.iter().all(|&gap| gap == 5), "{:?}", outcome.result);
}

#[test]
fn readers_hold_a_lock_together_and_a_writer_alone() {
    let hold = |sides: [Side; 4]| {
        on(5, move || {
            let lock = Rc::new(LockWord::default());
            let tasks: Vec<_> = (0..4)
                .map(|cpu| {
                    let lock = Rc::clone(&lock);
                    spawn(1 + cpu, move || lock.hold(sides[cpu], 10_000_000))
                })
                .collect();
            let begin = now();
            tasks.into_iter().for_each(join);
            vec![(now() - begin) / 1_000_000]
        })
        .result[0]
    };
    use Side::{Read, Write};
    // And the time in which the last one's end wakes the main task.
    assert_eq!([hold([Read; 4]), hold([Write; 4]), hold([Read, Read, Write, Read])], [13, 43, 33]);
}

#[test]
fn tasks_of_one_cpu_take_turns() {
    let outcome = on(1, || {
        let ends = Rc::new(RefCell::new(Vec::new()));
        let counter = Rc::new(AtomicU64::new(0));
        let tasks: Vec<_> = (0..3)
            .map(|_| {
                let (ends, counter) = (Rc::clone(&ends), Rc::clone(&counter));
                spawn(0, move || {
                    for _ in 0..10 {
                        work(1_000_000_000);
                        counter.fetch_add(1, Relaxed);
                    }
                    ends.borrow_mut().push(now() / 1_000_000_000);
                })
            })
            .collect();
        tasks.into_iter().for_each(join);
        ends.take()
    });
    // Turns of 4 ms: none waits for the end of another.
    assert!(outcome.result[0] >= 20 && outcome.result[2] >= 30 && outcome.result[2] <= 31, "{:?}", outcome.result);
}

#[test]
fn tasks_that_all_wait_are_an_error() {
    let topology = Topology::parse("t", "name = 't'\n[[node]]\ncpus = '0'").unwrap();
    let outcome = run(&topology, &Parameters::built_in().unwrap(), || {
        block();
        0
    });
    assert!(matches!(outcome, Err(ModelError::Deadlock { nr_tasks: 1, .. })), "{outcome:?}");
}

#[test]
fn a_wake_before_the_sleep_is_not_lost() {
    let outcome = on(2, || {
        let main = current_task();
        let other = spawn(1, move || wake(main));
        join(other);
        block();
        vec![1]
    });
    assert_eq!(outcome.result, [1]);
}

#[test]
fn an_interrupt_takes_time_from_its_cpu() {
    let ends = |interrupts: bool| {
        on(2, move || {
            let end = Rc::new(Cell::new(0));
            let to = Rc::clone(&end);
            let word = Rc::new(AtomicU64::new(0));
            let other = spawn(1, move || {
                for _ in 0..10 {
                    work(10_000_000);
                    word.fetch_add(1, Relaxed);
                }
                to.set(ns(now()));
            });
            work(5_000_000);
            if interrupts {
                interrupt(&[current_task(), other]);
            }
            join(other);
            vec![end.get()]
        })
        .result[0]
    };
    assert_eq!(ends(true) - ends(false), 1500);
}
