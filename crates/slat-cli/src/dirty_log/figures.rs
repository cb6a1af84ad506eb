//! What `slat dirty-log` prints and writes.

use serde_json::json;

use super::bench::{Cell, Series};
use super::migration::{Migration, TurnCounts};
use super::pattern::DirtyPattern;
use super::subject::flush_method;
use super::{DirtyLogArgs, Method, Notes, Workload, published};
use crate::options::ValueName;
use crate::quantity::{NOTHING, Unit, quantity};
use crate::results::{self, Better, Figure, Host, Labels, PerRun, Results, cell, measured_on};
use crate::statistics::Samples;
use crate::table::{self, MEDIAN};

/// One table of all cells of a pattern: what it shows, and how.
struct View {
    title: &'static str,
    /// Whether the published figures stand beside it.
    has_published: bool,
    show: fn(&Cell, &Series) -> String,
}

const VIEWS: [View; 5] = [
    View {
        title: "a call, median [quartiles]",
        has_published: true,
        show: |_, series| cell(&series.times, Unit::Seconds),
    },
    View {
        title: "a call, p99",
        has_published: false,
        show: |_, series| quantity(series.times.quantile(0.99), Unit::Seconds),
    },
    View {
        has_published: false,
        title: "a call + the guest's next writes, medians",
        show: |_, series| both(series, 1.0),
    },
    View {
        title: "a dirty page, medians: its part of the call + the next write",
        has_published: false,
        show: |cell, series| both(series, cell.nr_dirty),
    },
    View { title: "time against kvm's, median [quartiles] of paired runs", has_published: false, show: against_kvm },
];

/// The call and the writes after it, of `nr_dirty` pages.
fn both(series: &Series, nr_dirty: f64) -> String {
    let [call, writes] =
        [&series.times, &series.next_writes].map(|samples| quantity(samples.median() / nr_dirty, Unit::Seconds));
    format!("{call} + {writes}")
}

fn against_kvm(of: &Cell, series: &Series) -> String {
    let kvm = of.series_of(Method::Kvm);
    kvm.map_or(NOTHING.to_owned(), |kvm| cell(&series.times.paired_ratios(&kvm.times), Unit::Ratio))
}

pub(super) fn print(out: &mut String, args: &DirtyLogArgs, notes: &Notes, cells: &[Cell]) {
    add_line!(
        out,
        "Getting the dirty log of one slot of {} pages, memory: {}, paging: {}, tables: {}; vCPUs that run beside each call: {}.",
        args.nr_pages(),
        args.backing,
        args.paging.name(),
        args.format.name(),
        args.running_vcpus()
    );
    if args.workload == Workload::Table {
        add_line!(out, "Methods in turn, each called {} times in a row.", args.in_a_row);
    }
    match args.workload {
        Workload::Framebuffer => print_framebuffer(out, args, cells),
        _ => print_patterns(out, args, notes, cells),
    }
    add_line!(out, "{}", DEFERRED);
    print_grace_periods(out, cells);
    print_published(out, args, cells);
    print_notes(out, args, notes);
    let nr_calls: usize = cells.iter().flat_map(|cell| &cell.series).map(|series| series.times.len()).sum();
    add_line!(out, "Verified: {nr_calls} logs had exactly the pages that were written.");
}

/// Which methods leave work to the guest.
const DEFERRED: &str = "The next writes are the guest's, to the same pages after the call. slat protects pages that lie close by \
                        their directory entry, and the next writer pushes that down to the leaf PTEs; all others protect each \
                        page in the call.";

/// Prints what was waited for.
fn print_grace_periods(out: &mut String, cells: &[Cell]) {
    let series = cells.iter().flat_map(|cell| &cell.series);
    let waits: Samples = series.flat_map(|series| series.grace_periods.iter()).collect();
    if waits.is_empty() {
        return;
    }
    let [median, p99] = [waits.median(), waits.quantile(0.99)].map(|wait| quantity(wait, Unit::Seconds));
    add_line!(out, "srcu-copy: the grace period took {median} of a call in the median, {p99} at p99 of all calls.");
    add_line!(
        out,
        "It also waits for a vCPU thread that another process preempted; a real vCPU that is preempted has exited. So on a busy \
         machine the old way is measured too slow."
    );
}

/// Says what the published figures are, if there are any.
fn print_published(out: &mut String, args: &DirtyLogArgs, cells: &[Cell]) {
    let mut series = cells.iter().flat_map(|cell| cell.series.iter().map(|series| (series.method, cell.nr_dirty)));
    if series.any(|(method, nr_dirty)| published::seconds(args, method, nr_dirty).is_some()) {
        add_line!(out, "Published: {}. It decides nothing.", published::ON);
    }
}

/// Prints what was measured on, and what was not measured.
pub(super) fn print_notes(out: &mut String, args: &DirtyLogArgs, notes: &Notes) {
    notes.not_run.iter().for_each(|line| add_line!(out, "{line}"));
    let host = &notes.host;
    add_line!(out, "{}", measured_on(host, flush_method()));
    let nr_threads = 1 + usize::from(args.running_vcpus()) + usize::from(args.workload == Workload::Migration);
    if host.nr_cpus < nr_threads {
        add_line!(out, "{nr_threads} threads share {} CPU: the times measure the scheduler too.", host.nr_cpus);
    }
    if let Some(facts) = &notes.kvm {
        add_line!(
            out,
            "kvm: KVM_GET_DIRTY_LOG of this machine, the system call included, by a direct ioctl into an existing buffer."
        );
        facts.lines().iter().for_each(|line| add_line!(out, "{line}"));
    }
}

fn print_patterns(out: &mut String, args: &DirtyLogArgs, notes: &Notes, cells: &[Cell]) {
    for &pattern in args.patterns() {
        let rows: Vec<&Cell> = cells.iter().filter(|cell| cell.pattern == Some(pattern)).collect();
        // Without KVM there is nothing to compare with.
        let views = if notes.kvm.is_some() { &VIEWS[..] } else { &VIEWS[..VIEWS.len() - 1] };
        for view in views {
            let published = if view.has_published { published_columns(args, &rows) } else { Vec::new() };
            let names = published.iter().map(|method| format!("{}, published", method.name()));
            let title = format!("{}: {}", pattern.name(), view.title);
            let mut figures = table::figures(header(&rows, &title).into_iter().chain(names));
            for cell in &rows {
                let cells = [cell.nr_dirty.to_string(), runs(cell)];
                let values = cell.series.iter().map(|series| (view.show)(cell, series));
                let published = published.iter().map(|&method| published::shown(args, method, cell.nr_dirty));
                figures.add_row(cells.into_iter().chain(values).chain(published));
            }
            add_line!(out, "\n{figures}");
        }
    }
    add_line!(out, "");
    let has_all = cells.iter().any(|cell| cell.nr_dirty == f64::from(args.nr_pages()));
    if has_all && args.patterns().len() > 1 {
        add_line!(out, "All {} pages are the same pages in each pattern: they were measured once.", args.nr_pages());
    }
}

/// The measured methods with a published figure in one of `rows`.
fn published_columns(args: &DirtyLogArgs, rows: &[&Cell]) -> Vec<Method> {
    let has = |method: Method| {
        rows.iter()
            .any(|cell| cell.series_of(method).is_some() && published::seconds(args, method, cell.nr_dirty).is_some())
    };
    published::METHODS.into_iter().filter(|&method| has(method)).collect()
}

/// How many runs a row has.
fn runs(cell: &Cell) -> String {
    match cell.nr_runs() {
        (least, most) if least == most => most.to_string(),
        (least, most) => format!("{least}-{most}"),
    }
}

fn header(cells: &[&Cell], title: &str) -> Vec<String> {
    let methods = cells.iter().take(1).flat_map(|cell| &cell.series).map(|series| series.method.name());
    [title, "runs"].map(str::to_owned).into_iter().chain(methods).collect()
}

fn print_framebuffer(out: &mut String, args: &DirtyLogArgs, cells: &[Cell]) {
    for cell in cells {
        let title = format!("{} bursts of {:.0} pages in the mean", runs(cell), cell.nr_dirty);
        let titles = VIEWS.map(|view| view.title.to_owned());
        let mut figures = table::figures(std::iter::once(title).chain(titles).chain(["published".to_owned()]));
        for series in &cell.series {
            let name = series.method.name();
            let values = VIEWS.map(|view| (view.show)(cell, series));
            let published = published::shown(args, series.method, cell.nr_dirty);
            figures.add_row(std::iter::once(name).chain(values).chain([published]));
        }
        add_line!(out, "\n{figures}\n");
    }
}

/// The labels that all figures have.
pub(super) fn labels(args: &DirtyLogArgs, method: Method) -> Labels {
    let mut labels = results::labels([("method", method.name().into())]);
    if method.is_engine() {
        labels.insert("paging".to_owned(), args.paging.name().into());
    }
    labels
}

/// `labels`, and what was dirty, or the workload.
pub(super) fn cell_labels(
    args: &DirtyLogArgs,
    mut labels: Labels,
    pattern: Option<DirtyPattern>,
    nr_dirty: f64,
) -> Labels {
    if args.workload != Workload::Table {
        labels.insert("workload".to_owned(), args.workload.name().into());
    }
    if let Some(pattern) = pattern {
        labels.insert("pages".to_owned(), (nr_dirty as u64).into());
        labels.insert("pattern".to_owned(), pattern.name().into());
    }
    labels
}

pub(super) fn results(args: &DirtyLogArgs, notes: &Notes, cells: &[Cell]) -> Results {
    let (mut results, mut published) = (Vec::new(), Vec::new());
    for cell in cells {
        for series in &cell.series {
            published.extend(published::figure(args, series.method, cell.pattern, cell.nr_dirty));
            let labels = cell_labels(args, labels(args, series.method), cell.pattern, cell.nr_dirty);
            let Series { times, next_writes, grace_periods, .. } = series;
            let of_pages: Samples = times.iter().map(|time| time / cell.nr_dirty).collect();
            for (name, samples) in [
                ("get_dirty_log", times),
                ("get_dirty_log_page", &of_pages),
                ("next_writes", next_writes),
                ("get_dirty_log_and_next_writes", &series.with_next_writes()),
                ("grace_period", grace_periods),
            ] {
                results.push(Figure::new(name, Unit::Seconds, &labels, samples.iter()));
            }
            results.push(Figure::new("dirty_pages", Unit::Count, &labels, [cell.nr_dirty]));
            if let Some(kvm) = cell.series_of(Method::Kvm) {
                let ratios = series.times.paired_ratios(&kvm.times);
                let ratios = Figure::new("ratio_to_kvm", Unit::Ratio, &labels, ratios.iter());
                results.push(ratios.with_better(Some(Better::Less)));
            }
        }
    }
    Results { published, ..object(args, notes, results) }
}

pub(super) fn object(args: &DirtyLogArgs, notes: &Notes, mut results: Vec<Figure>) -> Results {
    results.retain(|figure| !figure.samples.is_empty());
    let kvm = notes.kvm.as_ref().map(|facts| facts.json());
    let host = Host { kvm, cpus: notes.host.nr_cpus, ..Host::read(Some(flush_method())) };
    let config = json!({
        "workload": args.workload.name(),
        "bytes": args.slot_bytes(),
        "runs": args.max_runs(),
        "in_a_row": args.in_a_row,
        "running_vcpus": args.running_vcpus(),
        "rate": (args.workload == Workload::Migration).then(|| args.guest_rate()),
        "backing": args.backing.to_string(),
        "format": args.format.name(),
        "paging": args.paging.name(),
        "seed": args.seed,
    });
    Results { not_run: notes.not_run.clone(), ..Results::new("dirty-log", config, host, results) }
}

type Row = PerRun<TurnCounts>;

/// The figures of a turn of a migration.
const TURNS: [Row; 9] = [
    Row::time("write_fault_p50", "Guest's write that faults, p50", |turn| turn.fault(0.5)),
    Row::time("write_fault_p99", "Guest's write that faults, p99", |turn| turn.fault(0.99)),
    Row::time("write_fault_max", "Guest's write that faults, longest", |turn| turn.fault(1.0)),
    Row::time("write_fault", "Guest's write that faults, mean", |turn| {
        (!turn.faults.is_empty()).then(|| turn.faults.mean())
    }),
    Row::time("guest_stall", "Guest stall in a fault (sample), mean", |turn| {
        Some(turn.stall_s? / (turn.nr_faults? as f64).max(1.0))
    }),
    Row::new("guest_stall_share", "Guest stall, share of the time", Unit::Ratio, |turn| {
        Some(turn.of_time(turn.stall_s?))
    })
    .less(),
    Row::time("guest_write", "Guest's time of a write, mean", |turn| {
        Some(turn.writing_s / (turn.nr_writes as f64).max(1.0))
    }),
    Row::new("guest_writes_per_second", "Guest's writes in a second", Unit::PerSecond, |turn| {
        Some(turn.of_time(turn.nr_writes as f64))
    }),
    Row::count("faults", "Faults", |turn| turn.nr_faults.map(|faults| faults as f64)),
];

pub(super) fn print_migration(out: &mut String, args: &DirtyLogArgs, notes: &Notes, all: &[Migration]) {
    let rate = match args.guest_rate() {
        0 => "as many pages as it can".to_owned(),
        rate => format!("{rate} pages a second"),
    };
    add_line!(
        out,
        "Migration of one slot of {} pages, memory: {}, paging: {}, tables: {}; the guest writes {rate}, at random, on another thread.",
        args.nr_pages(),
        args.backing,
        args.paging.name(),
        args.format.name()
    );
    let (nr_harvests, nr_turns) = all.first().map_or((0, 0), |run| (run.harvests.len(), run.turns.len()));
    let first = format!("{nr_harvests} harvests, {nr_turns} turns: {MEDIAN}");
    let mut figures = table::figures(std::iter::once(first).chain(all.iter().map(|run| run.method.name())));
    let mut add = |title: &str, show: &dyn Fn(&Migration) -> String| {
        figures.add_row(std::iter::once(title.to_owned()).chain(all.iter().map(show)));
    };
    add("Harvest", &|run| cell(&run.harvests, Unit::Seconds));
    add("Harvest, published", &|run| published::shown(args, run.method, 0.0));
    add("Harvest, p99", &|run| quantity(run.harvests.quantile(0.99), Unit::Seconds));
    add("Pages that a harvest reports", &|run| cell(&run.reported, Unit::Count));
    let turns: Vec<&[TurnCounts]> = all.iter().map(|run| &run.turns[..]).collect();
    figures.add_per_run(&TURNS, &turns);
    add_line!(out, "\n{figures}\n");
    print_notes(out, args, notes);
    add_line!(out, "Verified: after each turn the pages copied as they were reported equalled the guest's memory.");
}

pub(super) fn migration_results(args: &DirtyLogArgs, notes: &Notes, all: &[Migration]) -> Results {
    let (mut results, mut published) = (Vec::new(), Vec::new());
    for run in all {
        published.extend(published::figure(args, run.method, None, 0.0));
        let labels = cell_labels(args, labels(args, run.method), None, 0.0);
        results.push(Figure::new("get_dirty_log", Unit::Seconds, &labels, run.harvests.iter()));
        results.push(Figure::new("dirty_pages", Unit::Count, &labels, run.reported.iter()));
        results.extend(TURNS.iter().filter_map(|figure| figure.figure(&run.turns, &labels)));
    }
    Results { published, ..object(args, notes, results) }
}
