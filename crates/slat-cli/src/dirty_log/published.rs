//! The published figures: a series that made KVM exchange the words of the log with zero, of 2012.
//! (KVM: srcu-less dirty logging; see `docs/references.md`.)
//!
//! They stand beside the methods that do what was published, `srcu-copy` and `xchg`, and never
//! beside the engine. The program compares nothing with them: they are of another machine, a Core
//! i3. How the dirty pages were placed is not known.

use super::figures::cell_labels;
use super::pattern::DirtyPattern;
use super::{DirtyLogArgs, Method, Workload};
use crate::options::ValueName;
use crate::quantity::{Unit, range};
use crate::results::{PublishedFigure, labels};

/// What was published, and the machine.
pub(super) const ON: &str = "KVM in 2012 before the series and with it, on a Core i3, placement not known";

const NR_PAGES: u32 = 1 << 18;

/// A row: one call with so many dirty pages, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub(crate) pages: u32,
    /// Before the series.
    pub(crate) old_ns: u32,
    /// With it.
    pub(crate) new_ns: u32,
}

const fn row(pages: u32, old_ns: u32, new_ns: u32) -> Row {
    Row { pages, old_ns, new_ns }
}

/// One memslot of 1 GiB.
pub(crate) const TABLE: [Row; 19] = [
    row(1, 147_018, 14_086),
    row(1 << 1, 158_080, 13_303),
    row(1 << 2, 127_555, 13_455),
    row(1 << 3, 108_865, 14_125),
    row(1 << 4, 114_707, 15_322),
    row(1 << 5, 76_679, 17_026),
    row(1 << 6, 59_159, 21_258),
    row(1 << 7, 60_418, 33_845),
    row(1 << 8, 76_267, 37_893),
    row(1 << 9, 113_182, 61_707),
    row(1 << 10, 930_344, 88_861),
    row(1 << 11, 939_098, 151_315),
    row(1 << 12, 996_813, 290_579),
    row(1 << 13, 1_113_232, 518_231),
    row(1 << 14, 1_241_206, 2_271_171),
    row(1 << 15, 1_529_526, 3_375_866),
    row(1 << 16, 2_147_538, 4_408_395),
    row(1 << 17, 3_309_619, 5_915_336),
    row(1 << 18, 6_016_951, 8_497_356),
];

/// Calls for a graphics framebuffer, in microseconds: before and with the series.
const FRAMEBUFFER_US: [[u32; 2]; 2] = [[100, 300], [3, 10]];
/// Calls in a live migration.
const MIGRATION_US: [[u32; 2]; 2] = [[1_000, 3_000], [50, 300]];

/// The methods that do what was published.
pub(super) const METHODS: [Method; 2] = [Method::SrcuCopy, Method::Xchg];

/// The published time of a call by `method`, from the least to the largest, in seconds. `nr_dirty`
/// is for the table.
pub(super) fn seconds(args: &DirtyLogArgs, method: Method, nr_dirty: f64) -> Option<[f64; 2]> {
    let which = METHODS.into_iter().position(|of| of == method)?;
    let us = |figures: [[u32; 2]; 2]| Some(figures[which].map(|us| f64::from(us) / 1e6));
    match args.workload {
        Workload::Table if args.nr_pages() == NR_PAGES => {
            let row = TABLE.iter().find(|row| f64::from(row.pages) == nr_dirty)?;
            Some([f64::from([row.old_ns, row.new_ns][which]) / 1e9; 2])
        }
        Workload::Framebuffer => us(FRAMEBUFFER_US),
        Workload::Migration => us(MIGRATION_US),
        Workload::Table | Workload::Range => None,
    }
}

/// The published figure for people; empty if there is none.
pub(super) fn shown(args: &DirtyLogArgs, method: Method, nr_dirty: f64) -> String {
    seconds(args, method, nr_dirty).map(|seconds| range(seconds, Unit::Seconds)).unwrap_or_default()
}

/// The published figure beside the call of a method in a cell.
pub(super) fn figure(
    args: &DirtyLogArgs,
    method: Method,
    pattern: Option<DirtyPattern>,
    nr_dirty: f64,
) -> Option<PublishedFigure> {
    let range = seconds(args, method, nr_dirty)?;
    let labels = cell_labels(args, labels([("method", method.name().into())]), pattern, nr_dirty);
    Some(PublishedFigure::new("get_dirty_log", Unit::Seconds, &labels, range, ON))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rows_are_all_powers_of_two_of_the_slot_and_the_proposal_loses_from_16_ki_pages_on() {
        assert!(TABLE.iter().enumerate().all(|(shift, row)| row.pages == 1 << shift));
        assert_eq!(TABLE.last().map(|row| row.pages), Some(NR_PAGES));
        assert!(TABLE.iter().all(|row| (row.new_ns > row.old_ns) == (row.pages >= 16 << 10)));
    }
}
