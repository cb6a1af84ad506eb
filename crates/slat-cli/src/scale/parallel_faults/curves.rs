//! The rate of faults by the number of CPUs, for each lock, and what costs most without a lock.

use slat_model::experiment::Hypervisor;
use slat_model::experiment::phases::{Around, Lock, Sharing};

use super::super::machines::MAX_BYTES_OF_MANY;
use super::super::trace::{HOT_LINES, hot_table, wait_s};
use super::super::{Context, Part};
use super::{Case, Done, find};
use crate::options::Named;
use crate::quantity::{Unit, or_nothing, quantity, times};
use crate::results::Figure;
use crate::table;

/// In the order of the tables' columns; the first is slat.
const LOCKS: [Lock; 3] = [Lock::None, Lock::Shared, Lock::Exclusive];

struct Curve {
    title: &'static str,
    sharing: Sharing,
    around: Around,
}

const CURVES: [Curve; 3] = [
    Curve {
        title: "populate, partitioned, with the host, by lock",
        sharing: Sharing::Partitioned,
        around: Around::Host,
    },
    Curve {
        title: "populate, partitioned, the engine alone, by lock",
        sharing: Sharing::Partitioned,
        around: Around::Nothing,
    },
    Curve {
        title: "populate, overlapping, with the host, by lock",
        sharing: Sharing::Overlapping,
        around: Around::Host,
    },
];

impl Curve {
    fn case(&self, lock: Lock, nr_cpus: usize) -> Case {
        Case { hypervisor: Hypervisor::Slat, lock, sharing: self.sharing, around: self.around, nr_cpus }
    }
}

pub(super) fn cases(cpus: &[usize]) -> impl Iterator<Item = Case> {
    CURVES.iter().flat_map(move |curve| {
        cpus.iter().flat_map(move |&nr_cpus| LOCKS.into_iter().map(move |lock| curve.case(lock, nr_cpus)))
    })
}

/// Pages that all CPUs together populate in a second. A page counts once, if all vCPUs access it,
/// too.
fn rate(done: &Done, bytes: u64) -> f64 {
    done.case.nr_pages_in_all(bytes) as f64 * 1e9 / done.run.times.populate_ns as f64
}

pub(super) fn add(part: &mut Part, context: &Context<'_>, all: &[Done]) {
    let cpus = &context.machines.cpus[..];
    let bytes = context.args.bytes;
    if !all.iter().any(|done| done.case.hypervisor == Hypervisor::Slat) {
        return;
    }
    for curve in CURVES.iter().filter(|curve| cpus.iter().any(|&n| find(all, curve.case(LOCKS[0], n)).is_some())) {
        add_table(&mut part.text, curve, cpus, bytes, all);
    }
    add_line!(
        part.text,
        "A rate is pages in a second, of all CPUs together; a row names the CPUs of its topology, too. The\n\
         host is the exit of the vCPU, the lookup and zeroing of the page, and the guest's own work."
    );
    add_less_memory(&mut part.text, bytes, all);
    for done in all.iter().filter(|done| done.case.hypervisor == Hypervisor::Slat) {
        let labels = done.case.labels();
        part.figures.push(Figure::new("populate_rate", Unit::PerSecond, &labels, [rate(done, bytes)]));
        let seconds = done.run.times.populate_ns as f64 / 1e9;
        part.figures.push(Figure::new("populate_memory", Unit::Seconds, &labels, [seconds]));
    }
    add_hot_lines(part, context.machines.most(), all);
}

/// Says which rows have less memory than was asked for.
fn add_less_memory(text: &mut String, bytes: u64, all: &[Done]) {
    let has_less = |done: &&Done| done.bytes < bytes;
    let mut cpus: Vec<usize> = all.iter().filter(has_less).map(|done| done.case.nr_cpus).collect();
    cpus.sort_unstable();
    cpus.dedup();
    if cpus.is_empty() {
        return;
    }
    let cpus = cpus.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    add_line!(
        text,
        "With the host, {cpus} CPUs have {} for each vCPU; a page takes the same time with more.",
        quantity(MAX_BYTES_OF_MANY as f64, Unit::Bytes)
    );
}

fn add_table(text: &mut String, curve: &Curve, cpus: &[usize], bytes: u64, all: &[Done]) {
    let base = cpus.first().copied().unwrap_or(1);
    let speed_up = format!("vs {base} CPU{}", if base == 1 { "" } else { "s" });
    let header = LOCKS.map(|lock| [lock.name().to_owned(), speed_up.clone()]);
    let mut figures = table::figures(std::iter::once(curve.title.to_owned()).chain(header.into_iter().flatten()));
    let of = |lock, nr_cpus| find(all, curve.case(lock, nr_cpus)).map(|done| rate(done, bytes));
    for &nr_cpus in cpus {
        let Some(any) = LOCKS.iter().find_map(|&lock| find(all, curve.case(lock, nr_cpus))) else { continue };
        let cells = LOCKS.into_iter().flat_map(|lock| {
            let here = of(lock, nr_cpus);
            [
                or_nothing(here.map(|rate| quantity(rate, Unit::PerSecond))),
                or_nothing(here.zip(of(lock, base)).map(|(here, base)| times(here / base))),
            ]
        });
        figures.add_row(std::iter::once(format!("{nr_cpus} of {} CPUs", any.topology.nr_cpus())).chain(cells));
    }
    add_line!(text, "{figures}\n");
}

/// Adds the lines for which CPUs wait longest, with the most CPUs and without a lock.
fn add_hot_lines(part: &mut Part, nr_cpus: usize, all: &[Done]) {
    let case = Curve { title: "", sharing: Sharing::Partitioned, around: Around::Nothing }.case(Lock::None, nr_cpus);
    let Some(done) = find(all, case) else { return };
    let lines = &done.run.report.hot_lines;
    add_line!(
        part.text,
        "\nThe cache lines for which CPUs wait longest (lock none, partitioned, the engine alone, CPUs: {nr_cpus}):\n\n{}",
        hot_table(HOT_LINES, lines)
    );
    for (rank, line) in (1..).zip(lines) {
        let mut labels = case.labels();
        labels.insert("rank".to_owned(), rank.into());
        labels.insert("place".to_owned(), line.place.clone().into());
        let fetches = line.nr_fetches as f64;
        part.figures.push(Figure::new("hot_line_fetches", Unit::Count, &labels, [fetches]));
        part.figures.push(Figure::new("hot_line_wait", Unit::Seconds, &labels, [wait_s(line)]));
    }
}
