//! The runs of the table and of the framebuffer. The guest of each method writes the same pages.
//! Then the method's call gets the log, timed, and the log is compared with those pages.

use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use slat::{Gfn, PAGE_SIZE};
use slat_machine::memory::Backing;

use super::pattern::{DirtyPattern, check_log, nr_words, set_bits};
use super::{GetDirtyLogArgs, Method, Subjects};
use crate::failure::{Failure, check_failed};
use crate::results::{Outcome, Samples};
use crate::session::Session;

/// A method that has spent this time on a cell, its guest's writes included, has no further runs.
const METHOD_TIME: Duration = Duration::from_millis(150);
/// The same for KVM, whose guest's faults are slow.
const KVM_TIME: Duration = Duration::from_millis(500);
/// Every method has so many runs at least, if as many were asked for.
const MIN_RUNS: u32 = 3;

/// The calls of one method in one cell, from the first run on.
#[derive(Clone, Debug)]
pub(super) struct Series {
    pub(super) method: Method,
    pub(super) times_ns: Vec<f64>,
    /// All that was spent on them.
    spent: Duration,
}

impl Series {
    fn new(method: Method) -> Series {
        Series { method, times_ns: Vec::new(), spent: Duration::ZERO }
    }

    pub(super) fn samples(&self) -> Samples {
        let mut samples = Samples::default();
        self.times_ns.iter().for_each(|&time| samples.push(time));
        samples
    }

    /// How many times as long as `other` this takes: the median over the runs that both have, run
    /// by run.
    pub(super) fn ratio_to(&self, other: &Series) -> f64 {
        let mut ratios = Samples::default();
        for (time, other) in self.times_ns.iter().zip(&other.times_ns) {
            ratios.push(time / other.max(f64::MIN_POSITIVE));
        }
        ratios.quantile(500)
    }

    /// Whether it has used its time.
    fn is_done(&self) -> bool {
        let time = if self.method == Method::Kvm { KVM_TIME } else { METHOD_TIME };
        self.times_ns.len() >= MIN_RUNS as usize && self.spent > time
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
        let counts = || self.series.iter().map(|series| series.times_ns.len());
        (counts().min().unwrap_or(0), counts().max().unwrap_or(0))
    }
}

/// The subjects, and the memory that all of them write.
pub(super) struct Bench {
    subjects: Subjects,
    memory: Backing,
    nr_pages: u32,
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
            progress.begin(format!("populate {}", self.subjects[which].0.name()));
            self.write_and_get(which, &all)?;
            self.get(which, &[])?;
            progress.step();
        }
        Ok(())
    }

    /// The guest of subject `which` writes `pages`, and its log is got. Returns how long the call
    /// took, in nanoseconds.
    fn write_and_get(&mut self, which: usize, pages: &[u32]) -> Result<f64, Failure> {
        self.value += 1;
        let (method, subject) = &mut self.subjects[which];
        subject.write(pages, self.value)?;
        for &page in pages {
            if self.memory.peek(page.into()) != Some(self.value) {
                return Err(check_failed(format_args!("the guest of {} did not write page {page}", method.name())));
            }
        }
        self.get(which, pages)
    }

    /// Gets the log of subject `which`, which must be `pages`. Returns the nanoseconds of the call.
    fn get(&mut self, which: usize, pages: &[u32]) -> Result<f64, Failure> {
        let (method, subject) = &mut self.subjects[which];
        set_bits(&mut self.written, pages);
        // A word that the call does not write shows in the check; and each subject finds the buffer
        // equally warm.
        self.log.fill(u64::MAX);
        let begin = Instant::now();
        let result = subject.get_dirty_log(&mut self.log);
        let time = begin.elapsed();
        result?;
        check_log(*method, &self.log, &self.written)?;
        Ok(time.as_nanos() as f64)
    }

    /// Runs the subjects `order` on the same pages, each some times in a row. Their order is drawn
    /// anew for each run: a subject that follows another with the same code finds it in the caches,
    /// and one that follows a real guest finds nothing there.
    fn run(
        &mut self,
        mut order: Vec<usize>,
        pages: &[u32],
        in_a_row: u32,
        series: &mut [Series],
        rng: &mut SmallRng,
    ) -> Result<(), Failure> {
        order.shuffle(rng);
        for which in order {
            for _ in 0..in_a_row {
                let begin = Instant::now();
                let time_ns = self.write_and_get(which, pages)?;
                series[which].times_ns.push(time_ns);
                series[which].spent += begin.elapsed();
                if series[which].is_done() {
                    break;
                }
            }
        }
        Ok(())
    }

    fn new_series(&self) -> Vec<Series> {
        self.subjects.iter().map(|&(method, _)| Series::new(method)).collect()
    }
}

/// The table: for each pattern, each number of dirty pages. `outcome` makes the experiment's
/// outcome of the cells.
pub(super) fn table(
    args: &GetDirtyLogArgs,
    session: &Session,
    bench: &mut Bench,
    outcome: impl Fn(&[Cell]) -> Result<Outcome, Failure>,
) -> Result<Outcome, Failure> {
    let powers = || (0..u32::BITS).map(|shift| 1 << shift).take_while(|&pages| pages <= bench.nr_pages).collect();
    let numbers: Vec<u32> = args.pages.clone().unwrap_or_else(powers);
    let mut rng = SmallRng::seed_from_u64(args.seed);
    let progress = session.progress((args.patterns().len() * numbers.len()) as u64);
    let mut cells: Vec<Cell> = Vec::new();
    for &pattern in args.patterns() {
        for &nr_dirty in &numbers {
            progress.begin(format!("{}, {nr_dirty} dirty pages", pattern.name()));
            // All pages of the memslot are the same pages in each pattern, and take longest.
            let whole = cells.iter().find(|cell| nr_dirty == bench.nr_pages && cell.nr_dirty == f64::from(nr_dirty));
            let cell = match whole {
                Some(whole) => Cell { pattern: Some(pattern), ..whole.clone() },
                None => measure_cell(args, bench, pattern, nr_dirty, &mut rng)?,
            };
            cells.push(cell);
            progress.step();
            session.so_far(outcome(&cells)?);
        }
    }
    drop(progress);
    outcome(&cells)
}

fn measure_cell(
    args: &GetDirtyLogArgs,
    bench: &mut Bench,
    pattern: DirtyPattern,
    nr_dirty: u32,
    rng: &mut SmallRng,
) -> Result<Cell, Failure> {
    let mut series = bench.new_series();
    let in_a_row = args.in_a_row.min(args.max_runs());
    for _ in 0..args.max_runs().div_ceil(in_a_row) {
        let left: Vec<usize> = (0..series.len()).filter(|&which| !series[which].is_done()).collect();
        if left.is_empty() {
            break;
        }
        let pages = pattern.choose(nr_dirty, bench.nr_pages, rng);
        bench.run(left, &pages, in_a_row, &mut series, rng)?;
    }
    Ok(Cell { pattern: Some(pattern), nr_dirty: nr_dirty.into(), series })
}

/// Bytes of a line of the screen: 1920 pixels of 4 bytes.
const LINE_BYTES: u64 = 1920 * 4;
const PIXEL_BYTES: u64 = 4;
/// Rectangles that a burst draws, at most.
const MAX_RECTANGLES: u64 = 4;

/// Bursts between two hand-overs of what was measured so far: bursts are short, and a hand-over
/// evicts cache lines.
const BURSTS_BETWEEN: u32 = 50;

/// The framebuffer: each burst draws some rectangles. `outcome` makes the experiment's outcome of
/// its one cell.
pub(super) fn framebuffer(
    args: &GetDirtyLogArgs,
    session: &Session,
    bench: &mut Bench,
    outcome: impl Fn(&[Cell]) -> Result<Outcome, Failure>,
) -> Result<Outcome, Failure> {
    let mut rng = SmallRng::seed_from_u64(args.seed);
    let mut cell = Cell { pattern: None, nr_dirty: 0.0, series: bench.new_series() };
    let mut nr_dirty = 0;
    let progress = session.progress(args.max_runs().into());
    for number in 1..=args.max_runs() {
        let pages = draw(bench.nr_pages, &mut rng);
        nr_dirty += pages.len();
        cell.nr_dirty = nr_dirty as f64 / f64::from(number);
        // Bursts are short, and differ: all methods run each of them.
        bench.run((0..cell.series.len()).collect(), &pages, 1, &mut cell.series, &mut rng)?;
        progress.step();
        if number.is_multiple_of(BURSTS_BETWEEN) {
            session.so_far(outcome(std::slice::from_ref(&cell))?);
        }
    }
    drop(progress);
    outcome(&[cell])
}

/// The pages that a burst writes on a screen of `nr_pages` pages, in rising order: at least one.
fn draw(nr_pages: u32, rng: &mut SmallRng) -> Vec<u32> {
    let screen_bytes = u64::from(nr_pages) * PAGE_SIZE;
    let nr_lines = (screen_bytes / LINE_BYTES).max(1);
    let mut is_drawn = vec![false; nr_pages as usize];
    for _ in 0..rng.random_range(1..=MAX_RECTANGLES) {
        let left = rng.random_range(0..LINE_BYTES / PIXEL_BYTES) * PIXEL_BYTES;
        let right = rng.random_range(left + 1..=LINE_BYTES);
        let top = rng.random_range(0..nr_lines);
        let bottom = rng.random_range(top..nr_lines.min(top + nr_lines / 4 + 1));
        for line in top..=bottom {
            let (first, last) = ((line * LINE_BYTES + left) / PAGE_SIZE, (line * LINE_BYTES + right - 1) / PAGE_SIZE);
            for page in first..=last.min(u64::from(nr_pages) - 1) {
                is_drawn[page as usize] = true;
            }
        }
    }
    // On a screen of less than a line the rectangle may be outside.
    is_drawn[0] |= screen_bytes < LINE_BYTES;
    (0..nr_pages).filter(|&page| is_drawn[page as usize]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bursts_stay_on_the_screen_and_are_not_empty() {
        let mut rng = SmallRng::seed_from_u64(5);
        for nr_pages in [1, 2, 3, 2048, 4096] {
            for _ in 0..200 {
                let pages = draw(nr_pages, &mut rng);
                assert!(
                    !pages.is_empty() && pages.is_sorted() && pages.iter().all(|&page| page < nr_pages),
                    "{nr_pages}"
                );
            }
        }
    }

    #[test]
    fn ratios_are_of_the_same_runs() {
        let series = |times: &[f64]| Series { times_ns: times.to_vec(), ..Series::new(Method::Slat) };
        assert_eq!(series(&[2.0, 300.0, 4.0, 9.0]).ratio_to(&series(&[1.0, 100.0, 1.0])), 3.0);
        assert_eq!(series(&[]).ratio_to(&series(&[])), 0.0);
    }
}
