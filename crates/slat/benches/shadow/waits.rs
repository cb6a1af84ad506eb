//! The waits for locks of shadow paging, of more vCPUs than CPUs: where a holder may be preempted,
//! and where it is not.

use std::cell::Cell;
use std::hint::black_box;
use std::thread;
use std::time::Instant;

use slat::shadow::{GuestAccess, Gva, Privilege, ShadowStrategy};
use slat::{Access, MemoryRegionFlags, Outcome};

use crate::bench::{NR_DATA, NR_TABLES, World, nr_rounds};
use crate::preemption::{Holders, take_held_for_ns};

thread_local! {
    /// How often the thread has yielded in the engine, and for how many nanoseconds.
    static YIELDS: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

/// `Host::yield_now`. What a thread waits for runs, or it may be a thread that needs this CPU.
pub fn yield_now(holders: Holders) {
    let start = Instant::now();
    match holders {
        Holders::AreNotPreempted => std::hint::spin_loop(),
        Holders::MayBePreempted => thread::yield_now(),
    }
    YIELDS.set((YIELDS.get().0 + 1, YIELDS.get().1 + start.elapsed().as_nanos() as u64));
}

/// The calls of one kind that have waited: for how many nanoseconds each.
#[derive(Default)]
struct Waits {
    nr_calls: u64,
    waits_ns: Vec<u64>,
}

impl Waits {
    /// Counts a call. `nr_free` yields are no waits: they come before the end of the call.
    fn count<T>(&mut self, nr_free: u64, call: impl FnOnce() -> T) -> T {
        YIELDS.set((0, 0));
        let result = call();
        let (nr_yields, ns) = YIELDS.get();
        self.nr_calls += 1;
        if nr_yields > nr_free {
            self.waits_ns.push(ns);
        }
        result
    }

    fn print(self, what: &str) {
        let Waits { nr_calls, waits_ns } = self;
        println!("{what}: {nr_calls} calls, {} waited and yielded: {}", waits_ns.len(), quantiles(waits_ns));
    }
}

fn quantiles(mut all_ns: Vec<u64>) -> String {
    all_ns.sort_unstable();
    let us_at = |part: f64| all_ns.get((all_ns.len() as f64 * part) as usize).map_or(0.0, |&ns| ns as f64 / 1e3);
    let longest_us = all_ns.last().map_or(0.0, |&ns| ns as f64 / 1e3);
    let [half, most, nearly_all] = [0.5, 0.9, 0.999].map(us_at);
    format!("median {half:.1} us, 90% {most:.1} us, 99.9% {nearly_all:.1} us, longest {longest_us:.1} us")
}

/// More vCPUs than CPUs, all in the pages of one guest table, beside a thread that harvests.
fn waits_of(holders: Holders) {
    const NR_VCPUS: usize = 6;
    const NR_PAGES: u64 = 64;
    let seconds = if nr_rounds() > 1 { 5.0 } else { 0.1 };
    let world = World::with_holders(holders, ShadowStrategy::RootCache, NR_DATA, MemoryRegionFlags::LOG_DIRTY_PAGES);
    let mut vcpus: Vec<_> = (0..NR_VCPUS).map(|_| world.vcpu(world.cr3)).collect();
    let write = GuestAccess { access: Access::Write, privilege: Privilege::User };
    let start = Instant::now();
    let is_over = || start.elapsed().as_secs_f64() > seconds;
    let (mut faults, mut flushes, mut harvests) = (Waits::default(), Waits::default(), Waits::default());
    let mut held_for_ns = Vec::new();
    thread::scope(|scope| {
        let threads: Vec<_> = vcpus
            .iter_mut()
            .enumerate()
            .map(|(nth, vcpu)| {
                scope.spawn(move || {
                    let (mut faults, mut flushes) = (Waits::default(), Waits::default());
                    let mut page = nth as u64;
                    while !is_over() {
                        page = (page * 5 + 3) % NR_PAGES;
                        // A fault that finds a lock held yields once, and resumes the guest.
                        let outcome = faults.count(1, || vcpu.handle_page_fault(Gva(page << 12), write));
                        assert_eq!(outcome, Ok(Outcome::Resume));
                        black_box(vcpu.entry().unwrap());
                        if page % 8 == 0 {
                            assert_eq!(flushes.count(0, || vcpu.invlpg(Gva(page << 12))), Ok(Outcome::Resume));
                        }
                    }
                    (faults, flushes, take_held_for_ns())
                })
            })
            .collect();
        let mut bitmap = vec![0; ((NR_DATA + NR_TABLES) / 64) as usize];
        while !is_over() {
            harvests.count(0, || world.vm.get_dirty_log(0, &mut bitmap)).unwrap();
        }
        for thread in threads {
            let (more_faults, more_flushes, more_held_for_ns) = thread.join().unwrap();
            held_for_ns.extend(more_held_for_ns);
            for (sum, more) in [(&mut faults, more_faults), (&mut flushes, more_flushes)] {
                sum.nr_calls += more.nr_calls;
                sum.waits_ns.extend(more.waits_ns);
            }
        }
    });
    let how = match holders {
        Holders::MayBePreempted => "holders of locks may be preempted",
        Holders::AreNotPreempted => "holders of locks are not preempted",
    };
    println!("{NR_VCPUS} vCPUs and a thread that harvests; {how}:");
    faults.print("  page faults");
    flushes.print("  INVLPG");
    harvests.print("  harvests");
    if holders == Holders::AreNotPreempted {
        println!("  locks held by vCPUs, {} times: {}", held_for_ns.len(), quantiles(held_for_ns));
    }
}

pub fn waits() {
    for holders in [Holders::MayBePreempted, Holders::AreNotPreempted] {
        if holders.are_possible() {
            waits_of(holders);
        } else {
            println!("holders of locks that are not preempted: skipped, this process may not use SCHED_FIFO");
        }
    }
}
