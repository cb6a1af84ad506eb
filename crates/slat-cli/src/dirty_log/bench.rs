//! What is timed, one method at a time: the guest writes pages, a call gets the log, and the guest
//! writes the same pages again. Each log is compared with these pages. The method's other vCPUs run
//! all the time.
//!
//! The second writes show what a call deferred: lazy protection leaves work to the next writer of
//! each page-table page.

use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use slat::Gfn;
use slat_machine::memory::Backing;

use super::pattern::{DirtyPattern, check_log, nr_words, set_bits};
use super::subject::Subject;
use super::{Method, Subjects};
use crate::failure::{Failure, check_failed};
use crate::options::ValueName;
use crate::session::Session;
use crate::statistics::Samples;

/// A method that has spent this time on a cell, its guest's writes included, has no further runs.
const METHOD_TIME: Duration = Duration::from_millis(250);
/// Every method has so many runs at least, if as many were asked for.
const MIN_RUNS: usize = 5;
/// The same for KVM, whose guest's faults are slow.
const KVM_TIME: Duration = Duration::from_millis(500);
const KVM_MIN_RUNS: usize = 3;

/// Whether a method has used its time, with so many runs.
pub(super) fn is_done(method: Method, nr_runs: usize, spent: Duration) -> bool {
    let (min_runs, time) = if method == Method::Kvm { (KVM_MIN_RUNS, KVM_TIME) } else { (MIN_RUNS, METHOD_TIME) };
    nr_runs >= min_runs && spent > time
}

/// The times of one method in one cell, in seconds, from the first run on.
#[derive(Clone, Debug)]
pub(super) struct Series {
    pub(super) method: Method,
    /// Of the calls.
    pub(super) times: Samples,
    /// Of the guest's writes to the same pages after each call: all pages together.
    pub(super) next_writes: Samples,
    /// The part of each call in a grace period; empty if the method has none.
    pub(super) grace_periods: Samples,
    /// All that was spent on them.
    spent: Duration,
}

impl Series {
    pub(super) fn new(method: Method) -> Series {
        let [times, next_writes, grace_periods] = Default::default();
        Series { method, times, next_writes, grace_periods, spent: Duration::ZERO }
    }

    /// Whether it has used its time.
    pub(super) fn is_done(&self) -> bool {
        is_done(self.method, self.times.len(), self.spent)
    }

    /// Of each call and the writes after it.
    pub(super) fn with_next_writes(&self) -> Samples {
        self.times.iter().zip(self.next_writes.iter()).map(|(call, writes)| call + writes).collect()
    }
}

/// One row of a table: all methods on the same pages.
#[derive(Clone, Debug)]
pub(super) struct Cell {
    /// How they are placed; the framebuffer has no pattern.
    pub(super) pattern: Option<DirtyPattern>,
    /// Pages that were dirty at each call, or in the mean.
    pub(super) nr_dirty: f64,
    pub(super) series: Vec<Series>,
}

impl Cell {
    pub(super) fn series_of(&self, method: Method) -> Option<&Series> {
        self.series.iter().find(|series| series.method == method)
    }

    /// The least and the most runs that a method had.
    pub(super) fn nr_runs(&self) -> (usize, usize) {
        let counts = || self.series.iter().map(|series| series.times.len());
        (counts().min().unwrap_or(0), counts().max().unwrap_or(0))
    }
}

/// The subjects, and the memory that all of them write.
pub(super) struct Bench {
    pub(super) subjects: Subjects,
    memory: Backing,
    pub(super) nr_pages: u32,
    log: Vec<u64>,
    written: Vec<u64>,
    /// The last value that a guest wrote: each writes its own.
    value: u64,
}

impl Bench {
    pub(super) fn new(subjects: Subjects, memory: Backing) -> Bench {
        let nr_pages = (memory.size_bytes() >> Gfn::SHIFT) as u32;
        let bitmap = || vec![0; nr_words(nr_pages)];
        Bench { subjects, memory, nr_pages, log: bitmap(), written: bitmap(), value: 1 << 32 }
    }

    /// Has every guest write all pages once, so that all later writes find them mapped. Checks that
    /// the log then has all pages, and the next log none.
    pub(super) fn populate(&mut self, session: &Session) -> Result<(), Failure> {
        let all: Vec<u32> = (0..self.nr_pages).collect();
        let progress = session.progress(self.subjects.len() as u64);
        for which in 0..self.subjects.len() {
            progress.begin(format!("populate {}", self.subjects[which].method.name()));
            self.beside_vcpus(which, |bench| {
                bench.write(which, &all)?;
                bench.get(which, &all)?;
                bench.get(which, &[])
            })?;
            progress.step();
        }
        Ok(())
    }

    /// Does `action` while the other vCPUs of subject `which` run.
    pub(super) fn beside_vcpus<T>(
        &mut self,
        which: usize,
        action: impl FnOnce(&mut Bench) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        self.subjects[which].others.run()?;
        let done = action(self);
        let paused = self.subjects[which].others.pause();
        let done = done?;
        paused.map(|()| done)
    }

    /// The guest of subject `which` writes `pages`, and exits. Returns the seconds of the writes.
    pub(super) fn write(&mut self, which: usize, pages: &[u32]) -> Result<f64, Failure> {
        self.value += 1;
        let subject = &mut self.subjects[which];
        let begin = Instant::now();
        let written = subject.guest.write(pages, self.value);
        let time = begin.elapsed();
        subject.guest.exit();
        written?;
        for &page in pages {
            if self.memory.peek(page.into()) != Some(self.value) {
                let name = subject.method.name();
                return Err(check_failed(format_args!("the guest of {name} did not write page {page}")));
            }
        }
        Ok(time.as_secs_f64())
    }

    /// Gets the log of subject `which`, which must be `pages`. Returns the seconds of the call.
    pub(super) fn get(&mut self, which: usize, pages: &[u32]) -> Result<f64, Failure> {
        self.timed_call(which, pages, |subject, log| subject.log.get(log).map(drop))
    }

    /// As [`get`](Bench::get), by a call for each window of `window_pages` pages. Returns the
    /// seconds of each call.
    pub(super) fn get_windows(&mut self, which: usize, pages: &[u32], window_pages: u32) -> Result<Vec<f64>, Failure> {
        let nr_pages = u64::from(self.nr_pages);
        let mut times = Vec::with_capacity(self.nr_pages.div_ceil(window_pages) as usize);
        self.timed_call(which, pages, |subject, log| {
            let windows = log.chunks_mut((window_pages / u64::BITS) as usize);
            for (log, first) in windows.zip((0..).step_by(window_pages as usize)) {
                let begin = Instant::now();
                subject.log.get_range(first, u64::from(window_pages).min(nr_pages - first), log)?;
                times.push(begin.elapsed().as_secs_f64());
            }
            Ok(())
        })?;
        Ok(times)
    }

    /// Times `call`, which must make `pages` the log.
    fn timed_call(
        &mut self,
        which: usize,
        pages: &[u32],
        call: impl FnOnce(&mut Subject, &mut [u64]) -> Result<(), Failure>,
    ) -> Result<f64, Failure> {
        let subject = &mut self.subjects[which];
        set_bits(&mut self.written, pages);
        // A word that the call does not write shows in the check; and each subject finds the buffer
        // equally warm.
        self.log.fill(u64::MAX);
        let begin = Instant::now();
        let called = call(subject, &mut self.log);
        let time = begin.elapsed();
        called?;
        check_log(subject.method, &self.log, &self.written)?;
        Ok(time.as_secs_f64())
    }

    /// Runs the subjects `order` on the same pages, each some times in a row. Their order is drawn
    /// anew for each run: a subject that follows another with the same code finds it in the caches,
    /// and one that follows a real guest finds nothing there.
    pub(super) fn run(
        &mut self,
        mut order: Vec<usize>,
        pages: &[u32],
        in_a_row: u32,
        series: &mut [Series],
        rng: &mut SmallRng,
    ) -> Result<(), Failure> {
        order.shuffle(rng);
        for which in order {
            let begin = Instant::now();
            let series = &mut series[which];
            self.beside_vcpus(which, |bench| bench.run_in_a_row(which, pages, in_a_row, series, begin))?;
            series.spent += begin.elapsed();
        }
        Ok(())
    }

    /// The runs of subject `which`, which began at `begin`.
    fn run_in_a_row(
        &mut self,
        which: usize,
        pages: &[u32],
        in_a_row: u32,
        series: &mut Series,
        begin: Instant,
    ) -> Result<(), Failure> {
        self.write(which, pages)?;
        for _ in 0..in_a_row {
            let (time, grace_period) = (self.get(which, pages)?, self.subjects[which].log.grace_period());
            let next_writes = self.write(which, pages)?;
            series.times.push(time);
            series.next_writes.push(next_writes);
            grace_period.into_iter().for_each(|time| series.grace_periods.push(time));
            if is_done(series.method, series.times.len(), series.spent + begin.elapsed()) {
                break;
            }
        }
        // Begins a new log, and checks that the writes after the call were reported.
        self.get(which, pages).map(drop)
    }

    pub(super) fn new_series(&self) -> Vec<Series> {
        self.subjects.iter().map(|subject| Series::new(subject.method)).collect()
    }
}
