//! A large memslot, harvested in windows: `get_dirty_log_range` beside calls for the whole log.
//!
//! A window bounds what one call does, for the price of more calls. So this measures a window, the
//! longest window of a harvest, and all windows together. Only the engine has such a call; all
//! methods get the whole log.
//!
//! Only the pages that are written have memory, and they stay the same in all runs of a cell: by
//! default the memslot is larger than what is dirty.

use std::time::{Duration, Instant};

use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;

use super::bench::{Bench, is_done};
use super::figures::{cell_labels, labels, object, print_notes};
use super::pattern::DirtyPattern;
use super::{DirtyLogArgs, Method, Notes};
use crate::failure::Failure;
use crate::options::ValueName;
use crate::quantity::{Unit, quantity};
use crate::results::{Figure, Outcome, Results, cell};
use crate::session::Session;
use crate::statistics::Samples;
use crate::table::{self, MEDIAN};

/// One way to get the log of the whole memslot.
#[derive(Clone, Debug)]
struct Way {
    /// The number of the subject.
    which: usize,
    method: Method,
    /// Pages of a window; `None`: one call gets the whole log.
    window_pages: Option<u32>,
    /// Of all calls of a harvest, in seconds.
    harvests: Samples,
    /// Of a window, in the mean of a harvest.
    windows: Samples,
    /// Of the longest window of a harvest.
    longest: Samples,
    next_writes: Samples,
    spent: Duration,
}

impl Way {
    fn new(which: usize, method: Method, window_pages: Option<u32>) -> Way {
        let [harvests, windows, longest, next_writes] = Default::default();
        Way { which, method, window_pages, harvests, windows, longest, next_writes, spent: Duration::ZERO }
    }

    /// Writes `pages`, harvests, and writes them again, while the other vCPUs run.
    fn run(&mut self, bench: &mut Bench, pages: &[u32]) -> Result<(), Failure> {
        let begin = Instant::now();
        bench.write(self.which, pages)?;
        match self.window_pages {
            Some(window_pages) => {
                let times: Samples = bench.get_windows(self.which, pages, window_pages)?.into_iter().collect();
                self.harvests.push(times.iter().sum());
                self.windows.push(times.mean());
                self.longest.push(times.most());
            }
            None => self.harvests.push(bench.get(self.which, pages)?),
        }
        self.next_writes.push(bench.write(self.which, pages)?);
        bench.get(self.which, pages)?;
        self.spent += begin.elapsed();
        Ok(())
    }

    fn name(&self, nr_pages: u32) -> String {
        match self.window_pages {
            Some(window_pages) => {
                let nr_windows = nr_pages.div_ceil(window_pages);
                let windows = if nr_windows == 1 { "window" } else { "windows" };
                let size = quantity(bytes(window_pages) as f64, Unit::Bytes);
                format!("{}, {nr_windows} {windows} of {size}", self.method.name())
            }
            None => format!("{}, whole slot", self.method.name()),
        }
    }
}

fn bytes(nr_pages: u32) -> u64 {
    u64::from(nr_pages) * slat::PAGE_SIZE
}

/// All ways on the same pages.
#[derive(Clone, Debug)]
struct RangeCell {
    pattern: DirtyPattern,
    nr_dirty: u32,
    ways: Vec<Way>,
}

/// Measures the ways in turns.
pub(super) fn measure(
    args: &DirtyLogArgs,
    session: &Session,
    bench: &mut Bench,
    notes: &Notes,
) -> Result<Outcome, Failure> {
    let (windows, numbers) = (args.windows(), args.range_pages());
    let mut rng = SmallRng::seed_from_u64(args.seed);
    let outcome = |cells: &[RangeCell]| Outcome::new(results(args, notes, cells), |out| print(out, args, notes, cells));
    let progress = session.progress((args.patterns().len() * numbers.len()) as u64);
    let mut cells: Vec<RangeCell> = Vec::new();
    for &pattern in args.patterns() {
        for &nr_dirty in &numbers {
            progress.begin(format!("{}, {nr_dirty} dirty pages", pattern.name()));
            let pages = pattern.choose(nr_dirty, bench.nr_pages, &mut rng);
            let mut ways = Vec::new();
            for which in 0..bench.subjects.len() {
                // Maps the pages.
                bench.write(which, &pages)?;
                bench.get(which, &pages)?;
                let method = bench.subjects[which].method;
                ways.push(Way::new(which, method, None));
                let windows = windows.iter().filter(|_| method.is_engine());
                ways.extend(windows.map(|&window_pages| Way::new(which, method, Some(window_pages))));
            }
            for _ in 0..args.max_runs() {
                let mut order: Vec<usize> = (0..ways.len()).collect();
                order.shuffle(&mut rng);
                for way in order {
                    let way = &mut ways[way];
                    if !is_done(way.method, way.harvests.len(), way.spent) {
                        bench.beside_vcpus(way.which, |bench| way.run(bench, &pages))?;
                    }
                }
            }
            cells.push(RangeCell { pattern, nr_dirty, ways });
            progress.step();
            session.so_far(outcome(&cells));
        }
    }
    drop(progress);
    Ok(outcome(&cells))
}

fn print(out: &mut String, args: &DirtyLogArgs, notes: &Notes, cells: &[RangeCell]) {
    add_line!(
        out,
        "Getting the dirty log of one slot of {} pages whole and in windows, paging: {}, tables: {}; vCPUs that run beside each \
         call: {}.",
        args.nr_pages(),
        args.paging.name(),
        args.format.name(),
        args.running_vcpus()
    );
    for of in cells {
        let title = format!("{}, {} dirty pages: {MEDIAN}", of.pattern.name(), of.nr_dirty);
        let header = [&title, "runs", "a window", "longest window", "whole slot", "the guest's next writes"];
        let mut figures = table::figures(header.map(str::to_owned));
        for way in &of.ways {
            let name = [way.name(args.nr_pages()), way.harvests.len().to_string()];
            let times = [&way.windows, &way.longest, &way.harvests, &way.next_writes];
            figures.add_row(name.into_iter().chain(times.map(|times| cell(times, Unit::Seconds))));
        }
        add_line!(out, "\n{figures}");
    }
    add_line!(out, "");
    print_notes(out, args, notes);
    let nr_harvests: usize = cells.iter().flat_map(|of| &of.ways).map(|way| way.harvests.len()).sum();
    add_line!(out, "Verified: {nr_harvests} harvests had exactly the pages that were written.");
}

fn results(args: &DirtyLogArgs, notes: &Notes, cells: &[RangeCell]) -> Results {
    let mut results = Vec::new();
    for of in cells {
        for way in &of.ways {
            let labels = labels(args, way.method);
            let mut labels = cell_labels(args, labels, Some(of.pattern), of.nr_dirty.into());
            if let Some(window_pages) = way.window_pages {
                labels.insert("window_bytes".to_owned(), bytes(window_pages).into());
            }
            for (name, times) in [
                ("harvest", &way.harvests),
                ("get_dirty_log_range", &way.windows),
                ("get_dirty_log_range_longest", &way.longest),
                ("next_writes", &way.next_writes),
            ] {
                results.push(Figure::new(name, Unit::Seconds, &labels, times.iter()));
            }
        }
    }
    object(args, notes, results)
}
