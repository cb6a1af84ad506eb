//! Invalidations of single pages beside many more vCPUs than CPUs, all of which fault.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use slat::baselines::Locking;

use super::arena::Memory;
use super::timing::{Clocks, Took, print_calls, print_head_of_calls};
use super::world;

const NR_VCPUS: u64 = 64;
/// Pages of each vCPU.
const VCPU_PAGES: u64 = 1 << 12;
/// A prime: the invalidated pages are spread over those of the vCPU.
const STEP: u64 = 1543;

/// The thread's pause between two invalidations.
#[derive(Clone, Copy)]
enum Pace {
    /// Sleeps: the thread wakes with a whole time slice.
    Sleep(Duration),
    /// None: sometimes the time slice ends within an invalidation.
    BackToBack,
}

/// Times `nr_calls` invalidations. Returns the faults per second of the vCPUs, too.
fn measure(memory: Memory, locking: Locking, pace: Pace, nr_calls: u64) -> (Vec<Took>, f64) {
    memory.reset();
    let vm = world::new_vm(memory, locking, NR_VCPUS * VCPU_PAGES);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let begin = Instant::now();
        let (vm, stop) = (&vm, &stop);
        let vcpus: Vec<_> = (0..NR_VCPUS)
            .map(|vcpu| scope.spawn(move || world::fault_until(stop, vm, vcpu * VCPU_PAGES, VCPU_PAGES)))
            .collect();
        // A thread like the others: this one has been waiting and would be preferred.
        let invalidating = scope.spawn(move || {
            let clocks = Clocks::of_this_thread();
            let call = |number: u64| {
                let page = number % NR_VCPUS * VCPU_PAGES + number * STEP % VCPU_PAGES;
                let took = clocks.time(|| drop(world::invalidate(vm, page, 1)));
                if let Pace::Sleep(pause) = pace {
                    thread::sleep(pause);
                }
                took
            };
            (0..nr_calls).map(call).collect()
        });
        let took = invalidating.join().unwrap();
        stop.store(true, Ordering::Relaxed);
        let nr_faults: u64 = vcpus.into_iter().map(|vcpu| vcpu.join().unwrap()).sum();
        (took, nr_faults as f64 / begin.elapsed().as_secs_f64())
    })
}

pub(crate) fn table(memory: Memory, divisor: u64) {
    print_head_of_calls("1 page beside 64 vCPUs (aim: p99 below 1 ms)");
    let pause = Pace::Sleep(Duration::from_micros(500));
    let lines = [
        ("pauses of 500 µs", Locking::None, pause, 4_000),
        ("back to back", Locking::None, Pace::BackToBack, 40_000),
        ("pauses of 500 µs, shared lock", Locking::Shared, pause, 400),
        ("pauses of 500 µs, exclusive lock", Locking::Exclusive, pause, 400),
    ];
    for (name, locking, pace, nr_calls) in lines {
        let (took, per_second) = measure(memory, locking, pace, nr_calls / divisor);
        print_calls(&format!("{name} ({:.1} M faults/s)", per_second / 1e6), &took);
    }
}
