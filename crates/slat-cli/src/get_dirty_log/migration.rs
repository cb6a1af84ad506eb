//! A small migration, for the engine alone: the guest writes random pages at a fixed rate on
//! another thread, while the log is got again and again. Lazy protection makes a harvest cheap and
//! moves work to the guest's next writes; this measures both.
//!
//! Each write has a new value. The host has a copy of all pages, and after each harvest copies what
//! was reported. When the guest has stopped, one more harvest follows: then the copy must equal the
//! memory, and the next log be empty.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use slat_machine::clock::timestamp_ns;
use slat_machine::guest::GuestCpu;
use slat_machine::memory::Backing;
use slat_machine::walk::HardwareFormat;

use super::pattern::{check_log, nr_words};
use super::subject::{Slat, Subject, get_dirty_log, write_page};
use super::{GetDirtyLogArgs, Method, report};
use crate::failure::{Failure, check_failed};
use crate::results::{Outcome, Samples};
use crate::session::Session;

/// Pages that the guest writes in a second, by default.
const DEFAULT_RATE: u32 = 100_000;
/// From the beginning of one harvest to that of the next, at least.
const INTERVAL: Duration = Duration::from_millis(20);
/// Harvests of one method in a row.
const HARVESTS_PER_TURN: u32 = 10;
/// The guest writes what is due, then sleeps for the rest of such a tick.
const TICK: Duration = Duration::from_millis(1);
/// Writes of a turn whose times are recorded, at most.
const MAX_TIMED: usize = 1 << 20;

impl GetDirtyLogArgs {
    /// Pages a second; 0: as many as the guest can.
    pub(super) fn guest_rate(&self) -> u32 {
        self.rate.unwrap_or(DEFAULT_RATE)
    }
}

/// The figures of one method.
#[derive(Debug)]
pub(super) struct Migration {
    pub(super) method: Method,
    /// Of each harvest, in nanoseconds.
    pub(super) harvest_ns: Samples,
    /// Pages that each reported.
    pub(super) reported: Samples,
    /// Of guest writes that faulted, in nanoseconds: from the access to its end.
    pub(super) fault_ns: Samples,
    pub(super) nr_writes: u64,
    pub(super) nr_faults: u64,
    /// Time of the guest in its writes, in nanoseconds.
    pub(super) writing_ns: u64,
    /// Time in the engine's fault handling, in nanoseconds; extrapolated from its sample.
    pub(super) stall_ns: u64,
    /// Time for which the guest ran, idle time included.
    pub(super) elapsed: Duration,
}

impl Migration {
    fn new(method: Method) -> Migration {
        Migration {
            method,
            harvest_ns: Samples::default(),
            reported: Samples::default(),
            fault_ns: Samples::default(),
            nr_writes: 0,
            nr_faults: 0,
            writing_ns: 0,
            stall_ns: 0,
            elapsed: Duration::ZERO,
        }
    }
}

/// What the guest did in a turn.
#[derive(Default)]
struct GuestWrites {
    nr_writes: u64,
    writing_ns: u64,
    /// Of writes that faulted.
    fault_ns: Vec<f64>,
}

/// Measures `methods` in turns, each on the engine that `new` makes for it.
pub(super) fn measure<F: HardwareFormat, C: GuestCpu + Send>(
    args: &GetDirtyLogArgs,
    session: &Session,
    methods: &[Method],
    memory: &Backing,
    new: impl Fn(Method, &Backing) -> Result<Slat<F, C>, Failure>,
) -> Result<Outcome, Failure> {
    let nr_pages = args.nr_pages();
    let pages: Vec<u32> = (0..nr_pages).collect();
    let mut log = vec![0; nr_words(nr_pages)];
    let mut subjects = Vec::new();
    let mut all = Vec::new();
    for &method in methods {
        let mut slat = new(method, memory)?;
        slat.write(&pages, 0)?;
        slat.get_dirty_log(&mut log)?;
        subjects.push(slat);
        all.push(Migration::new(method));
    }
    let outcome = |all: &[Migration]| {
        Outcome::new(&report::migration_results(args, all), |out| report::print_migration(out, args, all))
    };
    let nr_turns = args.max_runs().div_ceil(HARVESTS_PER_TURN);
    let progress = session.progress(u64::from(nr_turns) * subjects.len() as u64);
    let mut copy: Vec<Option<u64>> = vec![Some(0); nr_pages as usize];
    let mut next_value = 1;
    for number in 0..nr_turns {
        let nr_harvests = HARVESTS_PER_TURN.min(args.max_runs() - number * HARVESTS_PER_TURN);
        for place in 0..subjects.len() {
            let which = (number as usize + place) % subjects.len();
            let (slat, migration) = (&mut subjects[which], &mut all[which]);
            progress.begin(migration.method.name().to_owned());
            let rng = SmallRng::seed_from_u64(args.seed.wrapping_add(number.into()));
            let mut turn = Turn { args, memory, log: &mut log, copy: &mut copy, rng, nr_harvests, next_value };
            next_value += turn.run(slat, migration)?;
            progress.step();
            session.so_far(outcome(&all)?);
        }
    }
    drop(progress);
    outcome(&all)
}

struct Turn<'a> {
    args: &'a GetDirtyLogArgs,
    memory: &'a Backing,
    log: &'a mut [u64],
    /// The first word of each page at its last copy.
    copy: &'a mut [Option<u64>],
    rng: SmallRng,
    nr_harvests: u32,
    /// The first value that the guest writes; each later one is greater.
    next_value: u64,
}

impl Turn<'_> {
    /// Runs the guest, and harvests. Returns how many values it wrote.
    fn run<F: HardwareFormat, C: GuestCpu + Send>(
        &mut self,
        slat: &mut Slat<F, C>,
        migration: &mut Migration,
    ) -> Result<u64, Failure> {
        let method = migration.method;
        let (vm, cpu) = slat.parts();
        let (stats_before, counters_before) = (vm.stats(), cpu.counters());
        let (nr_pages, rate) = (self.args.nr_pages(), self.args.guest_rate());
        let (rng, first_value, is_over) = (self.rng.clone(), self.next_value, AtomicBool::new(false));
        let begin = Instant::now();
        let guest = thread::scope(|scope| {
            let guest = scope.spawn(|| run_guest(cpu, nr_pages, rate, rng, first_value, &is_over));
            let harvested = self.harvest_all(vm, migration);
            // Also if a harvest failed: the scope waits for the guest.
            is_over.store(true, Ordering::Relaxed);
            let guest = guest.join().unwrap_or_else(|_| Err(check_failed("the guest's thread panicked")));
            harvested.and(guest)
        })?;
        migration.elapsed += begin.elapsed();
        let (stats, counters) = (vm.stats(), slat.parts().1.counters().since(counters_before));
        migration.stall_ns += stats.engine_time_ns().saturating_sub(stats_before.engine_time_ns());
        migration.nr_writes += guest.nr_writes;
        migration.nr_faults += counters.nr_faults;
        migration.writing_ns += guest.writing_ns;
        guest.fault_ns.into_iter().for_each(|time| migration.fault_ns.push(time));

        // The guest has stopped: this log is exact.
        let (vm, _) = slat.parts();
        get_dirty_log(vm, self.log)?;
        self.copy_reported();
        let lost = (0..nr_pages).filter(|&page| self.copy[page as usize] != self.memory.peek(page.into())).count();
        if lost != 0 {
            let name = method.name();
            return Err(check_failed(format_args!("migration by {name}: {lost} pages written and never reported")));
        }
        get_dirty_log(vm, self.log)?;
        check_log(method, self.log, &vec![0; self.log.len()])?;
        Ok(guest.nr_writes)
    }

    fn harvest_all<F: HardwareFormat>(
        &mut self,
        vm: &slat::Vm<slat_machine::host::MachineHost, F>,
        migration: &mut Migration,
    ) -> Result<(), Failure> {
        for _ in 0..self.nr_harvests {
            let next = Instant::now() + INTERVAL;
            thread::sleep(next.saturating_duration_since(Instant::now()));
            let begin = Instant::now();
            let nr_reported = get_dirty_log(vm, self.log)?;
            migration.harvest_ns.push(begin.elapsed().as_nanos() as f64);
            migration.reported.push(nr_reported as f64);
            let nr_bits: u64 = self.log.iter().map(|word| u64::from(word.count_ones())).sum();
            if nr_bits != nr_reported {
                let name = migration.method.name();
                return Err(check_failed(format_args!("{name} says {nr_reported} pages, and its log has {nr_bits}")));
            }
            self.copy_reported();
        }
        Ok(())
    }

    /// Copies the pages that the log has.
    fn copy_reported(&mut self) {
        for (word, first) in self.log.iter().zip((0_u64..).step_by(64)) {
            let mut rest = *word;
            while rest != 0 {
                let page = first + u64::from(rest.trailing_zeros());
                self.copy[page as usize] = self.memory.peek(page);
                rest &= rest - 1;
            }
        }
    }
}

/// Writes pages at random until it is over.
fn run_guest<C: GuestCpu>(
    cpu: &mut C,
    nr_pages: u32,
    rate: u32,
    mut rng: SmallRng,
    first_value: u64,
    is_over: &AtomicBool,
) -> Result<GuestWrites, Failure> {
    let mut guest = GuestWrites::default();
    let begin = Instant::now();
    // Writes between two checks of the clock and the flag, without a rate.
    const UNLIMITED: u64 = 256;
    while !is_over.load(Ordering::Relaxed) {
        let due = match rate {
            0 => guest.nr_writes + UNLIMITED,
            rate => (begin.elapsed().as_secs_f64() * f64::from(rate)) as u64,
        };
        // A guest that is behind checks the flag too.
        for _ in guest.nr_writes..due.min(guest.nr_writes + UNLIMITED) {
            let page = rng.random_range(0..nr_pages);
            let nr_faults = cpu.counters().nr_faults;
            let started = timestamp_ns();
            write_page(cpu, page, first_value + guest.nr_writes)?;
            let time = timestamp_ns() - started;
            guest.nr_writes += 1;
            guest.writing_ns += time;
            if cpu.counters().nr_faults != nr_faults && guest.fault_ns.len() < MAX_TIMED {
                guest.fault_ns.push(time as f64);
            }
        }
        if rate != 0 && guest.nr_writes >= due {
            thread::sleep(TICK);
        }
    }
    Ok(guest)
}
