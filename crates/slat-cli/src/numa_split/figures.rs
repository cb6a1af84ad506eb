//! The output of `slat numa-split`, besides that of every experiment of the phases.

use serde_json::json;
use slat::NodeId;
use slat_machine::memory::numa::{Nodes, WalkReads};

use super::{Layout, NumaSplitArgs, policy_name};
use crate::options::{HugePagesArg, Named, PagingArg, SplitWhen, ValueName};
use crate::phases::figures::{Base, OTHERS, Report, count};
use crate::phases::{Column, EngineRun, Run};
use crate::quantity::Unit;
use crate::results::{Figure, PerRun, Results, cell};
use crate::statistics::Samples;
use crate::table::{self, MEDIAN};

type Row = PerRun<Run>;

const FIGURES: [Row; 13] = [
    Row::count("split_pages", "Huge pages split", |run| count(run, |stats| stats.splits)),
    Row::count("split_tables", "Tables of splits", |run| count(run, |stats| stats.split_tables)),
    Row::count("remote_split_tables", "  on another node than their memory", |run| {
        count(run, |stats| stats.remote_split_tables)
    })
    .less(),
    Row::count("fault_tables", "Tables of faults", |run| count(run, |stats| stats.fault_tables)),
    Row::count("remote_fault_tables", "  on another node than their memory", |run| {
        count(run, |stats| stats.remote_fault_tables)
    })
    .less(),
    Row::count("local_walk_reads", "Walk reads of lowest-level tables, local", |run| {
        reads(run, |reads| reads.leaf_table_local)
    })
    .more(),
    Row::count("remote_walk_reads", "Walk reads of lowest-level tables, remote", |run| {
        reads(run, |reads| reads.leaf_table_remote)
    })
    .less(),
    Row::new("remote_share", "  share of remote ones", Unit::Ratio, |run| {
        share(run, |reads| (reads.leaf_table_remote, reads.leaf_table_local))
    })
    .less(),
    Row::count("local_walk_reads_all_levels", "Walk reads of all tables, local", |run| reads(run, |reads| reads.local))
        .more(),
    Row::count("remote_walk_reads_all_levels", "Walk reads of all tables, remote", |run| {
        reads(run, |reads| reads.remote)
    })
    .less(),
    Row::new("remote_share_all_levels", "  share of remote ones", Unit::Ratio, |run| {
        share(run, |reads| (reads.remote, reads.local))
    })
    .less(),
    Row::time("recover_time", "Recovery, all of disabling", |run| Some(run.disable.as_secs_f64())),
    Row::count("recover_flushes", "  flushes of it", |run| run.engine.as_ref().map(recover_flushes)),
];

fn reads(run: &Run, of: fn(&WalkReads) -> u64) -> Option<f64> {
    run.engine.as_ref().map(|engine| of(&engine.dirty_reads) as f64)
}

/// The share of remote reads; `None` if there are no reads.
fn share(run: &Run, of: fn(&WalkReads) -> (u64, u64)) -> Option<f64> {
    let (remote, local) = of(&run.engine.as_ref()?.dirty_reads);
    (remote + local != 0).then(|| remote as f64 / (remote + local) as f64)
}

fn recover_flushes(engine: &EngineRun) -> f64 {
    (engine.stats.flushes - engine.stats_before_disabling.flushes) as f64
}

pub(super) fn new<'a>(args: &'a NumaSplitArgs, columns: &'a [Column]) -> Report<'a> {
    let base = columns.iter().position(|column| column.of.labels["placement"] == "caller-node");
    // The count of splits has another name here.
    let others = OTHERS.iter().filter(|other| other.name != "splits");
    Report {
        args: &args.phases,
        columns,
        base: base.map(|column| Base { column, name: "caller-node" }),
        others: FIGURES.iter().chain(others).collect(),
    }
}

/// Page-table pages on `node` after the rounds of each run.
fn tables_on(column: &Column, node: NodeId) -> Samples {
    let tables_on = |run: &EngineRun| run.tables_by_node.iter().filter(|of| of.0 == node).map(|of| of.1).sum::<u64>();
    column.runs.iter().filter_map(|run| run.engine.as_ref()).map(|run| tables_on(run) as f64).collect()
}

pub(super) fn print(out: &mut String, report: &Report<'_>, args: &NumaSplitArgs, layout: &Layout) {
    report.print_head(out);
    print_nodes(out, args, layout);
    report.print_tables(out);
    let mut tables = table::figures(report.header(&format!("tables after the rounds, {MEDIAN}")));
    for &node in layout.map.ids() {
        let counts = report.columns.iter().map(|column| cell(&tables_on(column, node), Unit::Count));
        tables.add_row(std::iter::once(format!("on node {}", node.0)).chain(counts));
    }
    add_line!(out, "{tables}\n");
    print_notes(out, report, args, layout);
    report.print_notes(out);
    add_line!(
        out,
        "Published (2022, with its review), 416 vCPUs on 8 nodes, tables on the node of the huge page: dirty memory 2% to \
         35% faster than with those of the caller. It shows proportions only."
    );
}

/// Prints the nodes of threads, memory and page tables.
fn print_nodes(out: &mut String, args: &NumaSplitArgs, layout: &Layout) {
    let numbers: Vec<String> = layout.map.ids().iter().map(|&node| node_name(layout, node)).collect();
    add_line!(
        out,
        "nodes: {} ({}), vCPUs pinned: {}, first touch: {}, main thread: {}",
        numbers.join(" "),
        kind(layout),
        args.pinning.name(),
        args.first_touch.name(),
        layout.main_node.map_or("pinned to a CPU".to_owned(), |node| format!("node {}", node.0))
    );
    add_line!(
        out,
        "tables: as the columns say, policy of the main thread: {} (caller-policy), lock: {}",
        policy_name(args.policy),
        args.phases.tables.lock.name
    );
}

fn node_name(layout: &Layout, node: NodeId) -> String {
    if layout.map.has_memory(node) { node.0.to_string() } else { format!("{} (no memory)", node.0) }
}

fn kind(layout: &Layout) -> &'static str {
    if layout.nodes == Nodes::Host { "the host's" } else { "virtual" }
}

fn print_notes(out: &mut String, report: &Report<'_>, args: &NumaSplitArgs, layout: &Layout) {
    if layout.nodes != Nodes::Host {
        add_line!(
            out,
            "The nodes are virtual, and all memory is equally fast: remote accesses are counted, and take no longer. The \
             times are the cost of the software only."
        );
    }
    add_line!(
        out,
        "Walk reads are those of the rounds of dirtying; remote: of a table on another node than the vCPU's; lowest-level \
         tables: those of leaf PTEs of 4 KiB."
    );
    if args.phases.paging == PagingArg::TwoDimensional {
        add_line!(
            out,
            "The guest's own tables are on the first node, in pages of 4 KiB: walks read the tables that map them, too."
        );
    }
    match args.phases.split {
        _ if args.phases.huge_pages == HugePagesArg::MarkWhole => {}
        SplitWhen::Eager => add_line!(
            out,
            "Huge pages are split right before logging is turned on, by {} {} on the node of the main thread.",
            args.split_threads,
            if args.split_threads == 1 { "thread" } else { "threads" }
        ),
        SplitWhen::Lazy => add_line!(
            out,
            "Nothing is split ahead of time, so there is no splitting time: vCPUs split as they write, in the rounds of \
             dirtying."
        ),
    }
    let runs = || report.columns.iter().flat_map(|column| &column.runs).filter_map(|run| run.engine.as_ref());
    if args.phases.huge_pages == HugePagesArg::Split && runs().all(|run| run.stats.splits == 0) {
        let reason = if runs().all(|run| run.stats.installed_2m + run.stats.installed_1g == 0) {
            "the memory was not mapped by huge pages"
        } else {
            "no vCPU wrote to a huge page"
        };
        add_line!(out, "No huge page was split: {reason}.");
    }
}

pub(super) fn results(report: &Report<'_>, args: &NumaSplitArgs, layout: &Layout) -> Results {
    let nodes: Vec<u32> = layout.map.ids().iter().map(|node| node.0).collect();
    let config = json!({
        "lock": args.phases.tables.lock.name,
        "nodes": nodes,
        "nodes_are": kind(layout),
        "memoryless": args.memoryless,
        "policy": policy_name(args.policy),
        "pin": args.pinning.name(),
        "cpus": args.phases.cpus,
        "first_touch": args.first_touch.name(),
        "threads": args.split_threads,
        "main_node": layout.main_node.map(|node| node.0),
    });
    let mut results = report.results("numa-split", config);
    for column in report.columns.iter().filter(|column| !column.runs.is_empty()) {
        for &node in layout.map.ids() {
            let mut labels = column.of.labels.clone();
            labels.insert("node".to_owned(), node.0.into());
            let tables = tables_on(column, node);
            results.results.push(Figure::new("tables_on_node", Unit::Count, &labels, tables.iter()));
        }
    }
    results
}
