//! The output of `slat shadow`.

use serde_json::json;
use slat::shadow::ShadowStrategy;
use slat_machine::guest_os::{Isolation, KernelCounters, Pcids};

use super::run::Run;
use super::switch::{self, Switch};
use super::{Column, ShadowArgs, build, model, vcpus};
use crate::options::Named;
use crate::quantity::{Unit, quantity};
use crate::results::{Figure, Host, PerRun, Results, cell, labels, print_host};
use crate::statistics::Samples;
use crate::table::{self, MEDIAN};

type Row = PerRun<Run>;

/// The figures that do not depend on the cost of an exit.
const ROWS: [Row; 22] = [
    Row::time("engine_time", "Time in the engine, all vCPUs", |run| Some(run.engine_s())),
    Row::count("exits", "Exits", |run| run.cpus(|cpu| cpu.nr_exits())).less(),
    Row::count("cr3_loads", "CR3 loads", |run| run.count(|stats| stats.cr3_loads)),
    Row::count("root_hits", "  root hits", |run| run.count(|stats| stats.root_hits)).more(),
    Row::count("root_misses", "  root misses", |run| run.count(|stats| stats.root_misses)).less(),
    Row::count("page_faults", "Page faults, all exits", |run| run.cpus(|cpu| cpu.nr_page_fault_exits)).less(),
    Row::count("guest_page_faults", "  the guest's own", |run| run.count(|stats| stats.guest_page_faults)),
    Row::count("emulated_writes", "  writes to its tables, emulated", |run| run.count(|stats| stats.emulated_writes))
        .less(),
    Row::count("interruptions", "More exits: flushes by other CPUs", |run| run.cpus(|cpu| cpu.nr_interruptions)).less(),
    Row::count("invalidations", "INVLPG, INVPCID", |run| run.cpus(|cpu| cpu.nr_invlpg_exits + cpu.nr_invpcid_exits)),
    Row::count("tables_built", "Shadow pages built", |run| run.count(|stats| stats.shadow_pages_built)).less(),
    Row::count("tables_zapped", "Shadow pages zapped", |run| run.count(|stats| stats.shadow_pages_zapped)).less(),
    Row::count("tables_evicted", "  to make room", |run| run.count(|stats| stats.shadow_evictions)).less(),
    Row::count("entries_synced", "Shadow PTEs synchronized", |run| run.count(|stats| stats.entries_synced)).less(),
    Row::count("tables_synced", "Shadow pages synchronized as a whole", |run| run.count(|stats| stats.shadow_syncs))
        .less(),
    Row::count("tables_unsynced", "Shadow pages made unsync", |run| run.count(|stats| stats.unsyncs)),
    Row::count("tlb_flushes", "TLB flushes, except of single pages", |run| {
        Some(run.count(|stats| stats.flushes)? + run.cpus(|cpu| cpu.nr_context_flushes + cpu.nr_all_flushes)?)
    })
    .less(),
    Row::count("remote_flushes", "  of all CPUs", |run| run.count(|stats| stats.flushes)).less(),
    Row::count("page_flushes", "TLB flushes of single pages", |run| run.cpus(|cpu| cpu.nr_page_flushes)).less(),
    Row::count("tlb_misses", "TLB misses", |run| run.cpus(|cpu| cpu.nr_tlb_misses)).less(),
    Row::count("table_pages", "Shadow pages in use at the end", |run| Some(run.nr_tables as f64)).less(),
    Row::count("table_pages_peak", "Shadow pages in use at most", |run| Some(run.tables_peak as f64)).less(),
];

/// The exit costs for which guest times are reported: a factor, and the suffixes of their figures
/// and titles.
const EXIT_COSTS: [(f64, &str, &str); 3] =
    [(1.0, "", ""), (0.5, "_half_exit_cost", ", exits at half"), (2.0, "_twice_exit_cost", ", exits at twice")];

/// The run's counts for [`build::COUNTED`].
const DONE: [fn(&KernelCounters) -> u64; 8] = [
    // All operations on processes and mappings are system calls.
    |guest| {
        let processes = guest.forks + guest.execs + guest.exits;
        guest.system_calls + guest.mmaps + guest.munmaps + guest.mprotects + processes
    },
    |guest| guest.page_faults,
    // An exec stands for a process made by vfork.
    |guest| guest.forks + guest.execs,
    |guest| guest.execs,
    |guest| guest.mmaps,
    |guest| guest.munmaps,
    |guest| guest.mprotects,
    |guest| guest.context_switches,
];

impl Column {
    fn samples(&self, value: impl Fn(&Run) -> f64) -> Samples {
        self.runs.iter().map(value).collect()
    }

    fn guest_times(&self, exit_cost_ns: f64) -> Samples {
        self.samples(|run| run.guest_time_s(exit_cost_ns))
    }

    /// How many times as fast as `baseline` this is, run by run.
    fn gains(&self, baseline: &Column, exit_cost_ns: f64) -> Samples {
        baseline.guest_times(exit_cost_ns).paired_ratios(&self.guest_times(exit_cost_ns))
    }
}

fn by_vcpus<'a, 'b>(columns: &'a [&'b Column]) -> impl Iterator<Item = &'a [&'b Column]> {
    columns.chunk_by(|one, next| one.of.nr_vcpus == next.of.nr_vcpus && one.of.strategy != next.of.strategy)
}

fn baseline<'a>(columns: &[&'a Column]) -> Option<&'a Column> {
    columns.iter().copied().find(|column| column.of.strategy == ShadowStrategy::Baseline)
}

pub(super) fn print(out: &mut String, args: &ShadowArgs, columns: &[&Column], switches: &[Switch]) {
    add_line!(
        out,
        "A kernel build in a mini guest kernel, page-table isolation {}, PCIDs {}, the host's {}: {} steps, 1/{:.0} of a build of \
         {}.\n",
        args.isolation.name(),
        args.pcid.name(),
        args.host_pcid.name(),
        args.steps,
        build::NR_STEPS as f64 / args.steps as f64,
        build::NAME
    );
    print_rates(out, columns);
    for columns in by_vcpus(columns) {
        print_columns(out, args, columns);
    }
    print_switches(out, args, switches);
    print_notes(out, args, columns)
}

/// The rates of the build and of this run.
fn print_rates(out: &mut String, columns: &[&Column]) {
    let firsts: Vec<&Column> = by_vcpus(columns).filter_map(|columns| columns.first().copied()).collect();
    let header = ["In 1000 steps".to_owned(), "the build".to_owned()].into_iter();
    let mut figures = table::figures(header.chain(firsts.iter().map(|column| vcpus(column.of.nr_vcpus))));
    for ((name, counted), done) in build::COUNTED.into_iter().zip(DONE) {
        let of_build = counted as f64 / build::NR_STEPS as f64;
        let of_run = |column: &&Column| {
            column.samples(|run| run.guest(done) as f64 / run.guest(|guest| guest.steps) as f64).median()
        };
        let rates = std::iter::once(of_build).chain(firsts.iter().map(of_run));
        figures.add_row(std::iter::once(name.to_owned()).chain(rates.map(|rate| format!("{:.2}", rate * 1e3))));
    }
    add_line!(out, "{figures}\n");
}

fn print_columns(out: &mut String, args: &ShadowArgs, columns: &[&Column]) {
    let title = |nr_vcpus| format!("{}, {MEDIAN} of {} runs", vcpus(nr_vcpus), args.runs);
    let names = columns.iter().map(|column| column.of.strategy.name().to_owned());
    let first = columns.iter().take(1).map(|column| title(column.of.nr_vcpus));
    let mut figures = table::figures(first.chain(names));
    let mut add = |title: &str, show: &dyn Fn(&Column) -> String| {
        figures.add_row(std::iter::once(title.to_owned()).chain(columns.iter().copied().map(show)));
    };
    for (factor, _, title) in EXIT_COSTS {
        let cost = args.exit_cost_ns() * factor;
        add(&format!("Guest time, modelled{title}"), &|column| cell(&column.guest_times(cost), Unit::Seconds));
        if let Some(base) = baseline(columns) {
            add("  times as fast as baseline", &|column| cell(&column.gains(base, cost), Unit::Ratio));
        }
    }
    let runs: Vec<&[Run]> = columns.iter().map(|column| &column.runs[..]).collect();
    figures.add_per_run(&ROWS, &runs);
    add_line!(out, "{figures}");
    let published = columns.first().and_then(|column| model::published(column.of.nr_vcpus));
    if let (Some(gain), Some(_), Isolation::On) = (published, baseline(columns), args.isolation) {
        add_line!(out, "Published for the series of 2018, a kernel compiled with isolation on: {gain} times as fast.");
    }
    add_line!(out, "")
}

fn print_switches(out: &mut String, args: &ShadowArgs, switches: &[Switch]) {
    let title = match args.pcid {
        Pcids::On => "CR3 load with bit 63, and entry, by batch",
        Pcids::Off => "CR3 load, which flushes, and entry, by batch",
    };
    let mut figures = table::figures([title, "roots", MEDIAN, "p99"].map(str::to_owned));
    for switch in switches {
        let cells = [
            switch.strategy.name().to_owned(),
            switch.nr_roots.to_string(),
            cell(&switch.times, Unit::Seconds),
            quantity(switch.times.quantile(0.99), Unit::Seconds),
        ];
        figures.add_row(cells);
    }
    add_line!(out, "{figures}\n");
}

fn print_notes(out: &mut String, args: &ShadowArgs, columns: &[&Column]) {
    add_line!(
        out,
        "Guest time is modelled: work of program and kernel ({:.1} µs a step, of the build), time in the engine (measured), and exits \
         ({} ns each, those for flushes by other CPUs included); of the slowest vCPU, without TLB misses.",
        build::MIX.user_work_ns as f64 * 1e-3,
        args.exit_cost_ns()
    );
    let runs = || columns.iter().flat_map(|column| &column.runs);
    let most = columns.iter().map(|column| usize::from(column.of.nr_vcpus)).max().unwrap_or(0);
    print_host(
        out,
        runs().next().map(|run| run.flush_method),
        most,
        "a vCPU without a CPU delays the vCPUs that wait for it; time without a CPU is subtracted.",
    );
    let nr_checked: u64 = runs().map(|run| run.guest(|guest| guest.user_accesses + guest.kernel_accesses)).sum();
    add_line!(out, "Verified: {nr_checked} accesses of the guest had the result that its page tables define.");
}

pub(super) fn results(args: &ShadowArgs, columns: &[&Column], switches: &[Switch]) -> Results {
    let labels = |strategy: ShadowStrategy, nr_vcpus: u16| {
        labels([
            ("strategy", strategy.name().into()),
            ("vcpus", nr_vcpus.into()),
            ("isolation", args.isolation.name().into()),
            ("pcid", args.pcid.name().into()),
            ("host_pcid", args.host_pcid.name().into()),
        ])
    };
    let mut results = Vec::new();
    for columns in by_vcpus(columns) {
        for column in columns {
            let labels = labels(column.of.strategy, column.of.nr_vcpus);
            let mut of_model = labels.clone();
            of_model.insert("time".to_owned(), "modelled".into());
            for (factor, suffix, _) in EXIT_COSTS {
                let cost = args.exit_cost_ns() * factor;
                let times = column.guest_times(cost);
                results.push(Figure::new(format!("guest_time{suffix}"), Unit::Seconds, &of_model, times.iter()));
                if let Some(base) = baseline(columns) {
                    results.push(Figure::ratios(format!("gain{suffix}"), &of_model, column.gains(base, cost)));
                }
            }
            results.extend(ROWS.iter().filter_map(|row| row.figure(&column.runs, &labels)));
        }
    }
    for switch in switches {
        // One vCPU measures the switch. The isolation does not change a switch, only the number of
        // them.
        let labels = labels(switch.strategy, 1);
        let name = if switch.nr_roots == switch::TWO { "cr3_switch" } else { "cr3_switch_all_roots" };
        results.push(Figure::new(name, Unit::Seconds, &labels, switch.times.iter()));
    }
    let flush_method = columns.iter().flat_map(|column| &column.runs).next().map(|run| run.flush_method);
    let config = json!({
        "vcpus": args.vcpus,
        "isolation": args.isolation.name(),
        "pcid": args.pcid.name(),
        "host_pcid": args.host_pcid.name(),
        "previous_roots": args.previous_roots,
        "max_pages": args.max_pages,
        "processes": args.processes,
        "steps": args.steps,
        "build": build::NAME,
        "build_steps": build::NR_STEPS,
        "touches": args.touches,
        "work_ns": build::MIX.user_work_ns,
        "exit_cost_ns": args.exit_cost.as_nanos() as u64,
        "runs": args.runs,
        "seed": args.seed,
    });
    Results::new("shadow", config, Host::read(flush_method), results)
}
