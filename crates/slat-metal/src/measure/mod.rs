//! Instructions for each event of the engine, on a machine whose time-stamp counter counts them:
//! QEMU with `-icount shift=0`. With several CPUs it has the instructions of all (`together`); what
//! follows is of one.
//!
//! # What is in a count
//! - A fault (`measured.s`): what the guest sees between the instructions before and behind
//!   the write, less the same of a write that does not leave the guest. That is the entry, the exit
//!   path of this hypervisor, the engine, and the answers of the host. The median over the pages.
//!   Frames are allocated and zeroed before.
//! - `_engine`: around `handle_fault`, with the host's answers in it. The rest of the fault is the
//!   exit path.
//! - A call: around the call. The guest does not run, so no CPU is kicked. Invalidations are whole:
//!   begun, ended, and for a range with the release of page-table pages.
//!
//! What reading the counter costs is in no count; it is the figure `clock`.

mod guest;
mod samples;
mod subject;
#[cfg(target_arch = "x86_64")]
mod together;

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;
use core::hint::black_box;

use slat::dirty::{DirtyTracking, ManualProtect};
use slat::{Access, Config, Gfn, Host, MemoryRegionFlags, PageSize};

use crate::arch::measured::TURN;
use crate::console::{self, Verdict};
use crate::host::Backing;
use crate::ram::Blocks;
use crate::start::Work;
use crate::virtual_cpu::VirtualCpu;
use crate::{fail, say};
use guest::{BLOCK_PAGES, NR_BLOCKS, NR_PAGES};
use samples::{Clock, Samples};
use subject::{SLOT, Subject};

/// How the log finds writes.
const TRACKINGS: [(&str, DirtyTracking); 2] =
    [("lazy", DirtyTracking::WriteProtect), ("leaves", DirtyTracking::WriteProtectLeaves)];

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const NO_LOG: MemoryRegionFlags = MemoryRegionFlags::empty();

/// A count of one event.
fn figure(name: &str, count: u64) {
    console::figure(name, count, "instructions");
}

/// A count of `nr_events` events, for one of them.
fn figure_each(name: &str, count: u64, nr_events: u64) {
    let hundredths = (count * 100 + nr_events / 2) / nr_events;
    let (whole, rest) = (hundredths / 100, hundredths % 100);
    console::line("figure", format_args!("{name} {whole}.{rest:02} instructions"));
}

/// A count of one event with a way of tracking.
fn figure_of(name: &str, way: &str, count: u64) {
    figure(&alloc::format!("{name}_{way}"), count);
}

/// The same, of `nr_events` events.
fn figure_each_of(name: &str, way: &str, count: u64, nr_events: u64) {
    figure_each(&alloc::format!("{name}_{way}"), count, nr_events);
}

fn config(tracking: DirtyTracking, manual_protect: ManualProtect) -> Config {
    Config::default().with_dirty_tracking(tracking).with_manual_protect(manual_protect)
}

/// What each of `nr_cpus` CPUs does to measure everything. The boot CPU ends the machine.
pub fn work<V: VirtualCpu>(nr_cpus: usize) -> Box<Work> {
    #[cfg(target_arch = "x86_64")]
    let together = together::Together::<V::Format>::new(nr_cpus);
    Box::new(move |cpu| {
        if cpu >= nr_cpus {
            return;
        }
        let clock = Clock::new();
        if nr_cpus == 1 {
            one_cpu::<V>(clock);
        }
        #[cfg(target_arch = "x86_64")]
        together.measure::<V>(clock);
        if cpu == 0 {
            console::end(Verdict::Pass, format_args!("{NR_PAGES} pages measured for each figure"))
        }
    })
}

/// Measures what one CPU does alone.
fn one_cpu<V: VirtualCpu>(clock: Clock) {
    figure("clock", clock.cost());
    let access = faults::<V>(clock);
    figure("access", access);
    for (done, (way, tracking)) in (1..).zip(TRACKINGS) {
        console::progress(done, 4, way);
        say!("dirty log by {tracking:?}");
        log_at_once::<V>(clock, access, way, tracking);
        log_in_two_steps::<V>(clock, way, tracking);
    }
    console::progress(3, 4, "huge pages");
    huge_pages::<V>(clock, access);
}

/// Checks that a turn of the guest's loop, which has a known length, counts as that.
fn check_clock<V: VirtualCpu>(clock: Clock, subject: &mut Subject<V>) {
    let mut time = |nr_pages| clock.time(|| subject.write(nr_pages, 1, |_, gpa, _| fail!("{gpa} is mapped")));
    // Not as constants, which take more or fewer instructions.
    let (half, all) = (time(black_box(NR_PAGES / 2)), time(black_box(NR_PAGES)));
    let of_turns = all.saturating_sub(half);
    if of_turns != NR_PAGES / 2 * TURN {
        fail!(
            "the time-stamp counter does not count instructions: {} turns of {TURN} counted as {of_turns}; is the \
             emulator without -icount shift=0?",
            NR_PAGES / 2
        );
    }
    say!("{} instructions of the guest counted as {of_turns}", NR_PAGES / 2 * TURN);
}

/// The guest writes all pages, and each fault is timed in the engine.
fn engine_share<V: VirtualCpu>(clock: Clock, subject: &mut Subject<V>) -> Samples {
    let mut counts = Vec::with_capacity(NR_PAGES as usize);
    subject.write(NR_PAGES, 1, |vcpu, gpa, access| {
        let mut outcome = None;
        counts.push(clock.time(|| outcome = Some(vcpu.handle_fault(gpa, access))));
        outcome.unwrap_or_else(|| fail!("nothing was done"))
    });
    Samples::new(counts)
}

/// Faults of a memslot without a log, and invalidations. Returns what a write without a fault
/// counts.
fn faults<V: VirtualCpu>(clock: Clock) -> u64 {
    console::progress(0, 4, "faults");
    say!("faults and invalidations");
    let mut subject = Subject::<V>::new(Config::default(), Blocks::Small);
    let first = subject.write_all();
    let access = subject.write_all().median();
    subject.check_mapped_by(PageSize::Size4K);
    check_clock(clock, &mut subject);
    figure("demand_fault", first.median() - access);

    let spurious = (0..NR_PAGES).map(|page| clock.time(|| subject.fault(page))).collect();
    figure("spurious_fault_engine", Samples::new(spurious).median());

    let one =
        |subject: &Subject<V>, page| clock.time(|| subject.check(subject.vm.invalidate_range(subject.range(page, 1))));
    let invalidations = (0..NR_PAGES).map(|page| one(&subject, page)).collect();
    figure("invalidate_page", Samples::new(invalidations).median());
    figure("demand_fault_again", subject.write_all().median() - access);
    let range = subject.range(0, NR_PAGES);
    let all = clock.time(|| {
        drop(subject.check(subject.vm.invalidate_range(range)));
        // Page-table pages that it leaves.
        subject.vm.reclaim();
    });
    figure_each("invalidate_range", all, NR_PAGES);
    figure("demand_fault_engine", engine_share(clock, &mut subject).median());

    let (backing, host) = (Backing::Ram(subject.shared.ram.clone()), subject.vm.host());
    let resolve = |page| clock.time(|| core::hint::black_box(host.resolve(&backing, Gfn(page), page, Access::Write)));
    figure("host_resolve", Samples::new((0..NR_PAGES).map(resolve).collect()).median());
    figure("host_flush", Samples::new((0..15).map(|_| clock.time(|| host.flush(&[]))).collect()).median());
    access
}

/// The log where getting it clears it too.
fn log_at_once<V: VirtualCpu>(clock: Clock, access: u64, way: &str, tracking: DirtyTracking) {
    let mut subject = Subject::<V>::new(config(tracking, ManualProtect::Disabled), Blocks::Small);
    subject.write_all();
    figure_each_of("enable", way, clock.time(|| subject.set_flags(LOG)), NR_PAGES);
    subject.write_all();
    let mut bitmap = vec![0; NR_PAGES as usize / 64];
    figure_each_of("get_and_clear", way, get(clock, &subject, &mut bitmap), NR_PAGES);

    let faults = subject.write_all();
    figure_of("write_protect_fault", way, faults.median() - access);
    figure_of("write_protect_fault_first", way, faults.each(BLOCK_PAGES).median() - access);
    get(clock, &subject, &mut bitmap);
    figure_of("write_protect_fault_engine", way, engine_share(clock, &mut subject).median());
    get(clock, &subject, &mut bitmap);
    figure_each_of("disable", way, clock.time(|| subject.set_flags(NO_LOG)), NR_PAGES);
}

/// The log where pages are cleared by another call.
fn log_in_two_steps<V: VirtualCpu>(clock: Clock, way: &str, tracking: DirtyTracking) {
    let mut subject = Subject::<V>::new(config(tracking, ManualProtect::Enabled), Blocks::Small);
    subject.write_all();
    subject.set_flags(LOG);
    subject.write_all();
    let mut bitmap = vec![0; NR_PAGES as usize / 64];
    figure_each_of("get", way, get(clock, &subject, &mut bitmap), NR_PAGES);
    let clear = || subject.check(subject.vm.clear_dirty_log(SLOT, 0, NR_PAGES, &bitmap));
    figure_each_of("clear", way, clock.time(clear), NR_PAGES);
}

/// Gets the log, which must have all pages.
fn get<V: VirtualCpu>(clock: Clock, subject: &Subject<V>, bitmap: &mut [u64]) -> u64 {
    bitmap.fill(0);
    let count = clock.time(|| subject.check(subject.vm.get_dirty_log(SLOT, bitmap)));
    if bitmap.iter().any(|&word| word != u64::MAX) {
        fail!("the guest has written all pages, and the dirty log has others");
    }
    count
}

/// Pages of 2 MiB: mapped by a fault, split by a call, and split because a log begins.
fn huge_pages<V: VirtualCpu>(clock: Clock, access: u64) {
    say!("pages of 2 MiB");
    let mapped = |config| {
        let mut subject = Subject::<V>::new(config, Blocks::Huge);
        subject.write(NR_BLOCKS, BLOCK_PAGES, |vcpu, gpa, access| vcpu.handle_fault(gpa, access));
        subject.check_mapped_by(PageSize::Size2M);
        subject
    };
    let subject = mapped(Config::default());
    figure("demand_fault_2m", subject.differences(NR_BLOCKS).median() - access);
    let range = subject.range(0, NR_PAGES);
    let split = clock.time(|| subject.check(subject.vm.split_range(range, PageSize::Size4K)));
    subject.check_mapped_by(PageSize::Size4K);
    figure_each("split_2m", split, NR_BLOCKS);
    for (way, tracking) in TRACKINGS {
        let mut subject = mapped(config(tracking, ManualProtect::Disabled));
        figure_each(&alloc::format!("enable_2m_{way}"), clock.time(|| subject.set_flags(LOG)), NR_BLOCKS);
        subject.check_mapped_by(PageSize::Size4K);
        subject.write(NR_BLOCKS, BLOCK_PAGES, |vcpu, gpa, access| vcpu.handle_fault(gpa, access));
        figure_of("write_fault_2m", way, subject.differences(NR_BLOCKS).median() - access);
    }
}
