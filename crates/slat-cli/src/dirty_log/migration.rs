//! A small migration: the guest writes random pages at a fixed rate on another thread, while the
//! log is got again and again. Lazy protection makes a harvest cheap and moves work to the guest's
//! next writes; this measures both, for the old ways and KVM too.
//!
//! Each write has a new value. The host has a copy of all pages, and after each harvest copies what
//! was reported. When the guest has stopped, one more harvest follows: then the copy must equal the
//! memory, and the next log be empty.
//!
//! KVM's guest writes what is due in one program, with one value, and its faults are not counted.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use slat_machine::linux::clock::timestamp_ns;
use slat_machine::memory::Backing;

use super::pattern::{check_log, nr_words};
use super::subject::{DirtyLog, Guest, Subject};
use super::{DirtyLogArgs, Method, Notes, Subjects, figures};
use crate::failure::{Failure, check_failed};
use crate::options::ValueName;
use crate::results::Outcome;
use crate::session::Session;
use crate::statistics::Samples;
use crate::turns;

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

impl DirtyLogArgs {
    /// Pages a second; 0: as many as the guest can.
    pub(super) fn guest_rate(&self) -> u32 {
        self.rate.unwrap_or(DEFAULT_RATE)
    }
}

/// The figures of one method.
#[derive(Debug)]
pub(super) struct Migration {
    pub(super) method: Method,
    /// Of each harvest, in seconds.
    pub(super) harvests: Samples,
    /// Pages that each reported.
    pub(super) reported: Samples,
    pub(super) turns: Vec<TurnCounts>,
}

impl Migration {
    fn new(method: Method) -> Migration {
        Migration { method, harvests: Samples::default(), reported: Samples::default(), turns: Vec::new() }
    }
}

/// The figures of one turn.
#[derive(Debug)]
pub(super) struct TurnCounts {
    /// Of guest writes that faulted, in seconds: from the access to its end.
    pub(super) faults: Samples,
    pub(super) nr_writes: u64,
    /// `None`: not counted.
    pub(super) nr_faults: Option<u64>,
    /// Time of the guest in its writes.
    pub(super) writing_s: f64,
    /// Time in the engine's fault handling; extrapolated from its sample. `None`: not counted.
    pub(super) stall_s: Option<f64>,
    /// Time for which the guest ran, idle time included.
    elapsed: Duration,
}

impl TurnCounts {
    /// A quantile of the writes that faulted.
    pub(super) fn fault(&self, share: f64) -> Option<f64> {
        (!self.faults.is_empty()).then(|| self.faults.quantile(share))
    }

    /// So much in each second.
    pub(super) fn of_time(&self, count: f64) -> f64 {
        count / self.elapsed.as_secs_f64().max(f64::MIN_POSITIVE)
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

/// Measures `subjects` in turns.
pub(super) fn measure(
    args: &DirtyLogArgs,
    session: &Session,
    mut subjects: Subjects,
    notes: &Notes,
    memory: &Backing,
) -> Result<Outcome, Failure> {
    let nr_pages = args.nr_pages();
    let pages: Vec<u32> = (0..nr_pages).collect();
    let mut log = vec![0; nr_words(nr_pages)];
    let mut all = Vec::new();
    let progress = session.progress(subjects.len() as u64);
    for subject in &mut subjects {
        progress.begin(format!("populate {}", subject.method.name()));
        subject.guest.write(&pages, 0)?;
        subject.guest.exit();
        subject.log.get(&mut log)?;
        all.push(Migration::new(subject.method));
        progress.step();
    }
    drop(progress);
    let outcome = |all: &[Migration]| {
        Outcome::new(figures::migration_results(args, notes, all), |out| {
            figures::print_migration(out, args, notes, all)
        })
    };
    let nr_turns = args.max_runs().div_ceil(HARVESTS_PER_TURN);
    let progress = session.progress(u64::from(nr_turns) * subjects.len() as u64);
    let mut copy: Vec<Option<u64>> = vec![Some(0); nr_pages as usize];
    let mut next_value = 1;
    for number in 0..nr_turns {
        let nr_harvests = HARVESTS_PER_TURN.min(args.max_runs() - number * HARVESTS_PER_TURN);
        for which in turns::order(number as usize, subjects.len()) {
            let (subject, migration) = (&mut subjects[which], &mut all[which]);
            progress.begin(migration.method.name());
            let rng = SmallRng::seed_from_u64(args.seed.wrapping_add(number.into()));
            let mut turn = Turn { args, memory, log: &mut log, copy: &mut copy, rng, nr_harvests, next_value };
            next_value += turn.run(subject, migration)?;
            progress.step();
            session.so_far(outcome(&all));
        }
    }
    drop(progress);
    Ok(outcome(&all))
}

struct Turn<'a> {
    args: &'a DirtyLogArgs,
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
    fn run(&mut self, subject: &mut Subject, migration: &mut Migration) -> Result<u64, Failure> {
        let Subject { method, log, guest, others } = subject;
        let log = &**log;
        let (engine_before, faults_before) = (log.engine_time_ns(), guest.nr_faults());
        let (nr_pages, rate) = (self.args.nr_pages(), self.args.guest_rate());
        let (rng, first_value, is_over) = (self.rng.clone(), self.next_value, AtomicBool::new(false));
        others.run()?;
        let begin = Instant::now();
        let writes = thread::scope(|scope| {
            let guest = scope.spawn(|| {
                others.pin_another();
                let writes = write_until_over(&mut **guest, nr_pages, rate, rng, first_value, &is_over);
                // Also if a write failed: a grace period waits for a vCPU in its guest.
                guest.exit();
                writes
            });
            let harvested = self.harvest_all(log, migration);
            // Also if a harvest failed: the scope waits for the guest.
            is_over.store(true, Ordering::Relaxed);
            let guest = guest.join().unwrap_or_else(|_| Err(check_failed("the guest's thread panicked")));
            harvested.and(guest)
        })?;
        let elapsed = begin.elapsed();
        others.pause()?;
        let since = |before: Option<u64>, now: Option<u64>| Some(now?.saturating_sub(before?));
        migration.turns.push(TurnCounts {
            faults: writes.fault_ns.iter().map(|time| time / 1e9).collect(),
            nr_writes: writes.nr_writes,
            nr_faults: since(faults_before, guest.nr_faults()),
            writing_s: writes.writing_ns as f64 / 1e9,
            stall_s: since(engine_before, log.engine_time_ns()).map(|time| time as f64 / 1e9),
            elapsed,
        });

        // The guest has stopped: this log is exact.
        log.get(self.log)?;
        self.copy_reported();
        let lost = (0..nr_pages).filter(|&page| self.copy[page as usize] != self.memory.peek(page.into())).count();
        if lost != 0 {
            let name = method.name();
            return Err(check_failed(format_args!("migration by {name}: {lost} pages written and never reported")));
        }
        log.get(self.log)?;
        check_log(*method, self.log, &vec![0; self.log.len()])?;
        Ok(writes.nr_writes)
    }

    fn harvest_all(&mut self, log: &dyn DirtyLog, migration: &mut Migration) -> Result<(), Failure> {
        for _ in 0..self.nr_harvests {
            let next = Instant::now() + INTERVAL;
            thread::sleep(next.saturating_duration_since(Instant::now()));
            let begin = Instant::now();
            let nr_reported = log.get(self.log)?;
            migration.harvests.push(begin.elapsed().as_secs_f64());
            let nr_bits: u64 = self.log.iter().map(|word| u64::from(word.count_ones())).sum();
            migration.reported.push(nr_bits as f64);
            if let Some(nr_reported) = nr_reported.filter(|&nr_reported| nr_reported != nr_bits) {
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

/// Writes pages at random until it is over. The vCPU exits where the guest waits.
fn write_until_over(
    guest: &mut dyn Guest,
    nr_pages: u32,
    rate: u32,
    mut rng: SmallRng,
    first_value: u64,
    is_over: &AtomicBool,
) -> Result<GuestWrites, Failure> {
    /// Writes between two checks of the clock and the flag: a guest that is behind checks them too.
    const MOST: u64 = 256;
    let mut writes = GuestWrites::default();
    let begin = Instant::now();
    let mut pages = Vec::with_capacity(MOST as usize);
    while !is_over.load(Ordering::Relaxed) {
        let due = match rate {
            0 => u64::MAX,
            rate => (begin.elapsed().as_secs_f64() * f64::from(rate)) as u64,
        };
        pages.clear();
        pages.extend((writes.nr_writes..due.min(writes.nr_writes + MOST)).map(|_| rng.random_range(0..nr_pages)));
        // A guest whose faults are counted writes page by page, each timed.
        let at_once = if guest.nr_faults().is_some() { 1 } else { pages.len().max(1) };
        for pages in pages.chunks(at_once) {
            let nr_faults = guest.nr_faults();
            let started = timestamp_ns();
            guest.write(pages, first_value + writes.nr_writes)?;
            let time = timestamp_ns() - started;
            writes.nr_writes += pages.len() as u64;
            writes.writing_ns += time;
            if guest.nr_faults() != nr_faults && writes.fault_ns.len() < MAX_TIMED {
                writes.fault_ns.push(time as f64);
            }
        }
        if rate != 0 && writes.nr_writes >= due {
            guest.exit();
            thread::sleep(TICK);
        }
    }
    Ok(writes)
}
