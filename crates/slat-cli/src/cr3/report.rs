//! The output of `slat cr3`.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde_json::{Value, json};
use slat::shadow::ShadowStrategy;
use slat_machine::kernel::KernelCounters;
use slat_machine::topology::HostDescription;

use super::run::Run;
use super::switch::{self, Switch};
use super::{Column, Cr3Args, Switched, build, model, strategy_name, vcpus};
use crate::results::{Figure, Results, Samples, host_json, measured_on};
use crate::table::{self, humanly};

/// A figure of a run.
struct Row {
    name: &'static str,
    title: &'static str,
    unit: &'static str,
    value: fn(&Run) -> f64,
}

/// The figures that do not depend on the cost of an exit.
const ROWS: [Row; 22] = [
    Row { name: "engine_time", title: "Time in the engine, all vCPUs", unit: "s", value: Run::engine_s },
    Row { name: "exits", title: "Exits", unit: "count", value: |run| run.cpus(|cpu| cpu.nr_exits()) },
    Row { name: "cr3_loads", title: "CR3 loads", unit: "count", value: |run| run.count(|stats| stats.cr3_loads) },
    Row { name: "root_hits", title: "  root hits", unit: "count", value: |run| run.count(|stats| stats.root_hits) },
    Row {
        name: "root_misses",
        title: "  root misses",
        unit: "count",
        value: |run| run.count(|stats| stats.root_misses),
    },
    Row {
        name: "page_faults",
        title: "Page faults, all exits",
        unit: "count",
        value: |run| run.cpus(|cpu| cpu.nr_page_fault_exits),
    },
    Row {
        name: "guest_page_faults",
        title: "  the guest's own",
        unit: "count",
        value: |run| run.count(|stats| stats.guest_page_faults),
    },
    Row {
        name: "emulated_writes",
        title: "  writes to its tables, emulated",
        unit: "count",
        value: |run| run.count(|stats| stats.emulated_writes),
    },
    Row {
        name: "interruptions",
        title: "More exits: flushes by other CPUs",
        unit: "count",
        value: |run| run.cpus(|cpu| cpu.nr_interruptions),
    },
    Row {
        name: "invalidations",
        title: "INVLPG, INVPCID",
        unit: "count",
        value: |run| run.cpus(|cpu| cpu.nr_invlpg_exits + cpu.nr_invpcid_exits),
    },
    Row {
        name: "tables_built",
        title: "Shadow pages built",
        unit: "count",
        value: |run| run.count(|stats| stats.shadow_pages_built),
    },
    Row {
        name: "tables_zapped",
        title: "Shadow pages zapped",
        unit: "count",
        value: |run| run.count(|stats| stats.shadow_pages_zapped),
    },
    Row {
        name: "tables_evicted",
        title: "  to make room",
        unit: "count",
        value: |run| run.count(|stats| stats.shadow_evictions),
    },
    Row {
        name: "entries_synced",
        title: "Shadow PTEs synchronized",
        unit: "count",
        value: |run| run.count(|stats| stats.entries_synced),
    },
    Row {
        name: "tables_synced",
        title: "Shadow pages synchronized as a whole",
        unit: "count",
        value: |run| run.count(|stats| stats.shadow_syncs),
    },
    Row {
        name: "tables_unsynced",
        title: "Shadow pages made unsync",
        unit: "count",
        value: |run| run.count(|stats| stats.unsyncs),
    },
    Row {
        name: "tlb_flushes",
        title: "TLB flushes, except of single pages",
        unit: "count",
        value: |run| run.count(|stats| stats.flushes) + run.cpus(|cpu| cpu.nr_context_flushes + cpu.nr_all_flushes),
    },
    Row {
        name: "remote_flushes",
        title: "  of all CPUs",
        unit: "count",
        value: |run| run.count(|stats| stats.flushes),
    },
    Row {
        name: "page_flushes",
        title: "TLB flushes of single pages",
        unit: "count",
        value: |run| run.cpus(|cpu| cpu.nr_page_flushes),
    },
    Row { name: "tlb_misses", title: "TLB misses", unit: "count", value: |run| run.cpus(|cpu| cpu.nr_tlb_misses) },
    Row {
        name: "table_pages",
        title: "Shadow pages in use at the end",
        unit: "count",
        value: |run| run.nr_tables as f64,
    },
    Row {
        name: "table_pages_peak",
        title: "Shadow pages in use at most",
        unit: "count",
        value: |run| run.tables_peak as f64,
    },
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
        let mut samples = Samples::default();
        self.runs.iter().for_each(|run| samples.push(value(run)));
        samples
    }

    /// The median of the runs.
    fn median(&self, value: impl Fn(&Run) -> f64) -> f64 {
        self.samples(value).quantile(500)
    }

    /// The statistics of a figure, each with the suffix of its name: the median, the mean, the
    /// deviation.
    fn statistics(&self, value: impl Fn(&Run) -> f64) -> [(&'static str, f64); 3] {
        let samples = self.samples(value);
        [("", samples.quantile(500)), ("_mean", samples.mean()), ("_deviation", samples.deviation())]
    }

    /// How many times as fast as `baseline` this is: the median over the pairs of runs.
    fn gain(&self, baseline: &Column, exit_cost_ns: f64) -> f64 {
        let mut gains = Samples::default();
        for (run, base) in self.runs.iter().zip(&baseline.runs) {
            gains.push(base.guest_time_s(exit_cost_ns) / run.guest_time_s(exit_cost_ns).max(f64::MIN_POSITIVE));
        }
        gains.quantile(500)
    }
}

/// The columns by number of vCPUs.
fn by_vcpus<'a, 'b>(columns: &'a [&'b Column]) -> impl Iterator<Item = &'a [&'b Column]> {
    columns.chunk_by(|one, next| one.nr_vcpus == next.nr_vcpus && one.strategy != next.strategy)
}

fn baseline<'a>(columns: &[&'a Column]) -> Option<&'a Column> {
    columns.iter().copied().find(|column| column.strategy == ShadowStrategy::Baseline)
}

/// Prints the tables and the notes.
pub(super) fn print(out: &mut impl Write, args: &Cr3Args, columns: &[&Column], switches: &[Switch]) -> io::Result<()> {
    writeln!(
        out,
        "A kernel build in a mini guest kernel, page-table isolation {}, PCIDs {}: {} steps, 1/{:.0} of a build of {}.\n",
        args.isolation.name(),
        args.pcid.name(),
        args.steps,
        build::NR_STEPS as f64 / args.steps as f64,
        build::NAME
    )?;
    print_rates(out, columns)?;
    for columns in by_vcpus(columns) {
        print_columns(out, args, columns)?;
    }
    print_switches(out, args, switches)?;
    print_notes(out, args, columns)
}

/// The rates of the build and of this run.
fn print_rates(out: &mut impl Write, columns: &[&Column]) -> io::Result<()> {
    let firsts: Vec<&Column> = by_vcpus(columns).filter_map(|columns| columns.first().copied()).collect();
    let header = ["In 1000 steps".to_owned(), "the build".to_owned()].into_iter();
    let mut figures = table::figures(header.chain(firsts.iter().map(|column| vcpus(column.nr_vcpus))));
    for ((name, counted), done) in build::COUNTED.into_iter().zip(DONE) {
        let of_build = counted as f64 / build::NR_STEPS as f64;
        let of_run =
            |column: &&Column| column.median(|run| run.guest(done) as f64 / run.guest(|guest| guest.steps) as f64);
        let rates = std::iter::once(of_build).chain(firsts.iter().map(of_run));
        figures.add_row(table::row(
            std::iter::once(name.to_owned()).chain(rates.map(|rate| format!("{:.2}", rate * 1e3))),
        ));
    }
    writeln!(out, "{figures}\n")
}

fn print_columns(out: &mut impl Write, args: &Cr3Args, columns: &[&Column]) -> io::Result<()> {
    let title = |nr_vcpus| match args.runs {
        1 => format!("{}, one run", vcpus(nr_vcpus)),
        runs => format!("{}, median of {runs} runs", vcpus(nr_vcpus)),
    };
    let names = columns.iter().map(|column| strategy_name(column.strategy).to_owned());
    let first = columns.iter().take(1).map(|column| title(column.nr_vcpus));
    let mut figures = table::figures(first.chain(names));
    let mut add = |title: &str, show: &dyn Fn(&Column) -> String| {
        figures.add_row(table::row(std::iter::once(title.to_owned()).chain(columns.iter().copied().map(show))));
    };
    for (factor, _, title) in EXIT_COSTS {
        let cost = f64::from(args.exit_cost_ns) * factor;
        add(&format!("Guest time{title}"), &|column| humanly(column.median(|run| run.guest_time_s(cost)), "s"));
        if let Some(base) = baseline(columns) {
            add("  times as fast as baseline", &|column| format!("{:.2}", column.gain(base, cost)));
        }
    }
    for row in ROWS {
        add(row.title, &|column| humanly(column.median(row.value), row.unit));
    }
    writeln!(out, "{figures}")?;
    let published = columns.first().and_then(|column| model::published(column.nr_vcpus));
    if let (Some(gain), Some(_), Switched::On) = (published, baseline(columns), args.isolation) {
        writeln!(out, "Published for the series of 2018, a kernel compiled with isolation on: {gain} times as fast.")?;
        writeln!(
            out,
            "(The baseline of that series dropped the root only; `baseline` here drops the tables below it too, so its gains are larger.)"
        )?;
    }
    writeln!(out)
}

fn print_switches(out: &mut impl Write, args: &Cr3Args, switches: &[Switch]) -> io::Result<()> {
    let title = match args.pcid.name() {
        "on" => "CR3 load with bit 63, and entry, ns, by batch",
        _ => "CR3 load, which flushes, and entry, ns, by batch",
    };
    let mut figures = table::figures([title, "roots", "p50", "p99"].map(str::to_owned));
    for switch in switches {
        let quantile = |per_mille| format!("{:.1}", switch.times_ns.quantile(per_mille));
        let name = strategy_name(switch.strategy).to_owned();
        figures.add_row(table::row([name, switch.nr_roots.to_string(), quantile(500), quantile(990)]));
    }
    writeln!(out, "{figures}\n")
}

fn print_notes(out: &mut impl Write, args: &Cr3Args, columns: &[&Column]) -> io::Result<()> {
    writeln!(
        out,
        "Guest time: work of program and kernel ({:.1} µs a step, of the build), time in the engine (measured), and exits \
         ({} ns each, those for flushes by other CPUs included); of the slowest vCPU, without TLB misses.",
        build::MIX.user_work_ns as f64 * 1e-3,
        args.exit_cost_ns
    )?;
    let host = HostDescription::read();
    let runs = || columns.iter().flat_map(|column| &column.runs);
    if let Some(run) = runs().next() {
        writeln!(out, "{}", measured_on(&host, run.flush_method))?;
    }
    let most = columns.iter().map(|column| usize::from(column.nr_vcpus)).max().unwrap_or(0);
    if most > host.nr_cpus {
        writeln!(
            out,
            "{most} vCPUs on {} CPUs: a vCPU without a CPU delays the vCPUs that wait for it; time without a CPU is subtracted.",
            host.nr_cpus
        )?;
    }
    let nr_checked: u64 = runs().map(|run| run.guest(|guest| guest.user_accesses + guest.kernel_accesses)).sum();
    writeln!(out, "Verified: {nr_checked} accesses of the guest had the result that its page tables define.")
}

/// The object of `--json`.
pub(super) fn results(args: &Cr3Args, columns: &[&Column], switches: &[Switch]) -> Results {
    let mut results = Vec::new();
    for columns in by_vcpus(columns) {
        for column in columns {
            let labels = BTreeMap::from([
                ("strategy", Value::from(strategy_name(column.strategy))),
                ("vcpus", column.nr_vcpus.into()),
                ("isolation", args.isolation.name().into()),
                ("pcid", args.pcid.name().into()),
            ]);
            let mut push = |name: String, value, unit| {
                results.push(Figure { name, value, unit, labels: labels.clone() });
            };
            for (factor, suffix, _) in EXIT_COSTS {
                let cost = f64::from(args.exit_cost_ns) * factor;
                let name = format!("guest_time{suffix}");
                for (suffix, value) in column.statistics(|run| run.guest_time_s(cost)) {
                    push(format!("{name}{suffix}"), value, "s");
                }
                if let Some(base) = baseline(columns) {
                    push(format!("gain{suffix}"), column.gain(base, cost), "ratio");
                }
            }
            for row in ROWS {
                for (suffix, value) in column.statistics(row.value) {
                    push(format!("{}{suffix}", row.name), value, row.unit);
                }
            }
            push("runs".to_owned(), column.runs.len() as f64, "count");
        }
    }
    for switch in switches {
        let labels = BTreeMap::from([
            ("strategy", Value::from(strategy_name(switch.strategy))),
            // One vCPU measures the switch. The isolation does not change a switch, only the number
            // of them.
            ("vcpus", 1.into()),
            ("isolation", args.isolation.name().into()),
            ("pcid", args.pcid.name().into()),
        ]);
        let name = if switch.nr_roots == switch::TWO { "cr3_switch" } else { "cr3_switch_all_roots" };
        for (suffix, per_mille) in [("", 500), ("_p99", 990)] {
            let (name, value) = (format!("{name}{suffix}"), switch.times_ns.quantile(per_mille));
            results.push(Figure { name, value, unit: "ns", labels: labels.clone() });
        }
    }
    let flush_method = columns.iter().flat_map(|column| &column.runs).next().map(|run| run.flush_method);
    Results {
        experiment: "cr3",
        config: json!({
            "vcpus": args.vcpus,
            "isolation": args.isolation.name(),
            "pcid": args.pcid.name(),
            "previous_roots": args.previous_roots,
            "max_pages": args.max_pages,
            "processes": args.processes,
            "steps": args.steps,
            "build": build::NAME,
            "build_steps": build::NR_STEPS,
            "touches": args.touches,
            "work_ns": build::MIX.user_work_ns,
            "exit_cost_ns": args.exit_cost_ns,
            "runs": args.runs,
            "seed": args.seed,
        }),
        host: host_json(&HostDescription::read(), flush_method),
        results,
        histograms: Vec::new(),
        not_run: Vec::new(),
    }
}
