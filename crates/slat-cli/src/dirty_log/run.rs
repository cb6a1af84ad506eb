//! The runs of the table and of the framebuffer. The guest of each method writes the same pages.

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use slat::PAGE_SIZE;

use super::DirtyLogArgs;
use super::bench::{Bench, Cell};
use super::pattern::DirtyPattern;
use crate::failure::Failure;
use crate::options::ValueName;
use crate::results::Outcome;
use crate::session::Session;
use crate::turns;

/// The table: for each pattern, each number of dirty pages. `outcome` makes the experiment's
/// outcome of the cells.
pub(super) fn table(
    args: &DirtyLogArgs,
    session: &Session,
    bench: &mut Bench,
    outcome: impl Fn(&[Cell]) -> Outcome,
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
            session.so_far(outcome(&cells));
        }
    }
    drop(progress);
    Ok(outcome(&cells))
}

fn measure_cell(
    args: &DirtyLogArgs,
    bench: &mut Bench,
    pattern: DirtyPattern,
    nr_dirty: u32,
    rng: &mut SmallRng,
) -> Result<Cell, Failure> {
    let in_a_row = args.in_a_row.min(args.max_runs());
    if turns::warms_up(args.max_runs()) {
        let pages = pattern.choose(nr_dirty, bench.nr_pages, rng);
        let mut not_counted = bench.new_series();
        bench.run((0..not_counted.len()).collect(), &pages, 1, &mut not_counted, rng)?;
    }
    let mut series = bench.new_series();
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
    args: &DirtyLogArgs,
    session: &Session,
    bench: &mut Bench,
    outcome: impl Fn(&[Cell]) -> Outcome,
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
            session.so_far(outcome(std::slice::from_ref(&cell)));
        }
    }
    drop(progress);
    Ok(outcome(&[cell]))
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
}
