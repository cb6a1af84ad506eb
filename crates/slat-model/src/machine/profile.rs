//! Where the time went: the trace of all accesses as a hash, and what lines cost that came from
//! elsewhere.

use std::collections::HashMap;
use std::panic::Location;

use slat_costed::costed::Step;

use crate::lines::Grant;
use crate::parameters::Ps;

/// A multiplier with bits all over (the golden ratio of 2 to the 64).
const MIX: u64 = 0x9e37_79b9_7f4a_7c15;

#[derive(Default)]
pub(super) struct Profile {
    hash: u64,
    nr_accesses: u64,
    by_place: HashMap<Place, Cost>,
    by_line: HashMap<u32, (Cost, Place)>,
}

/// File and line of an access. The address of a location is not the same in two processes.
type Place = (&'static str, u32);

#[derive(Clone, Copy, Default)]
struct Cost {
    nr_fetches: u64,
    time: Ps,
}

/// What accesses of one place in the source, or to one line, have cost.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hot {
    /// The file of the engine, from its `src` on, and the line there. Of the model's own accesses
    /// (walks, locks, the host), "model: " and its file.
    pub place: String,
    /// How often the cache line came from elsewhere.
    pub nr_fetches: u64,
    /// For how long CPUs waited for it, all together, in nanoseconds.
    pub wait_ns: u64,
}

/// What a run of the machine has shown.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// A hash of all accesses, with their CPUs and times. Two runs of one program have the same.
    pub trace_hash: u64,
    /// How many there were.
    pub nr_accesses: u64,
    /// The virtual time at the end in nanoseconds.
    pub end_ns: u64,
    /// The places in the source whose lines took most time, the most first.
    pub hot_places: Vec<Hot>,
    /// The cache lines that took most time, each with the place that had to wait for it last.
    pub hot_lines: Vec<Hot>,
}

/// How many places and lines a report has.
const NR_HOT: usize = 10;

/// The name of a file of the engine from its `src` on; of the model's own files with that in front.
fn name_of(file: &str) -> String {
    match file.rsplit_once("/src/") {
        Some((folder, name)) if folder.ends_with("slat-model") => format!("model: {name}"),
        Some((_, name)) => name.to_owned(),
        None => file.to_owned(),
    }
}

impl Profile {
    #[inline]
    pub(super) fn count(
        &mut self,
        cpu: usize,
        line: u32,
        step: Step,
        now: Ps,
        grant: Grant,
        place: &'static Location<'static>,
    ) {
        let what = (cpu as u64) << 40 ^ u64::from(line) << 2 ^ step as u64;
        self.hash = (self.hash.rotate_left(5) ^ what ^ grant.at.rotate_left(32)).wrapping_mul(MIX);
        self.nr_accesses += 1;
        if grant.is_fetched {
            let place = (place.file(), place.line());
            let time = grant.at - now;
            let add = |cost: &mut Cost| {
                cost.nr_fetches += 1;
                cost.time += time;
            };
            add(self.by_place.entry(place).or_default());
            let (cost, last) = self.by_line.entry(line).or_insert((Cost::default(), place));
            add(cost);
            *last = place;
        }
    }

    pub(super) fn report(self, end: Ps) -> Report {
        let hot = |costs: &mut dyn Iterator<Item = (u32, Place, Cost)>| {
            let mut costs: Vec<_> = costs.collect();
            // By the time, and where that is the same in an order that all runs have.
            costs.sort_unstable_by_key(|&(line, place, cost)| (u64::MAX - cost.time, line, place));
            costs.truncate(NR_HOT);
            let hot = |(_, (file, line), cost): (u32, Place, Cost)| Hot {
                place: format!("{}:{line}", name_of(file)),
                nr_fetches: cost.nr_fetches,
                wait_ns: cost.time / 1000,
            };
            costs.into_iter().map(hot).collect()
        };
        Report {
            trace_hash: self.hash,
            nr_accesses: self.nr_accesses,
            end_ns: end / 1000,
            hot_places: hot(&mut self.by_place.iter().map(|(&place, &cost)| (0, place, cost))),
            hot_lines: hot(&mut self.by_line.iter().map(|(&line, &(cost, place))| (line, place, cost))),
        }
    }
}
