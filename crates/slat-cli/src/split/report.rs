//! The output of `slat split`, besides that of every experiment of the phases.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde_json::json;
use slat::NodeId;
use slat_machine::numa::{Nodes, WalkReads};

use super::{Layout, SplitArgs, policy_name};
use crate::args::{HugePagesArg, PagingArg, SplitWhen, locking_name};
use crate::phases::report::{Base, OTHERS, Other, Report, count};
use crate::phases::{Column, EngineRun, Run};
use crate::results::{Figure, Results};
use crate::table;

/// The figures of this experiment.
const FIGURES: [Other; 13] = [
    Other {
        name: "split_pages",
        title: "Huge pages split",
        unit: "count",
        value: |run| count(run, |stats| stats.splits),
    },
    Other {
        name: "split_tables",
        title: "Tables of splits",
        unit: "count",
        value: |run| count(run, |stats| stats.split_tables),
    },
    Other {
        name: "remote_split_tables",
        title: "  on another node than their memory",
        unit: "count",
        value: |run| count(run, |stats| stats.remote_split_tables),
    },
    Other {
        name: "fault_tables",
        title: "Tables of faults",
        unit: "count",
        value: |run| count(run, |stats| stats.fault_tables),
    },
    Other {
        name: "remote_fault_tables",
        title: "  on another node than their memory",
        unit: "count",
        value: |run| count(run, |stats| stats.remote_fault_tables),
    },
    Other {
        name: "local_walk_reads",
        title: "Walk reads of lowest-level tables, local",
        unit: "count",
        value: |run| reads(run, |reads| reads.leaf_table_local),
    },
    Other {
        name: "remote_walk_reads",
        title: "Walk reads of lowest-level tables, remote",
        unit: "count",
        value: |run| reads(run, |reads| reads.leaf_table_remote),
    },
    Other {
        name: "remote_share",
        title: "  share of remote ones",
        unit: "ratio",
        value: |run| share(run, |reads| (reads.leaf_table_remote, reads.leaf_table_local)),
    },
    Other {
        name: "local_walk_reads_all_levels",
        title: "Walk reads of all tables, local",
        unit: "count",
        value: |run| reads(run, |reads| reads.local),
    },
    Other {
        name: "remote_walk_reads_all_levels",
        title: "Walk reads of all tables, remote",
        unit: "count",
        value: |run| reads(run, |reads| reads.remote),
    },
    Other {
        name: "remote_share_all_levels",
        title: "  share of remote ones",
        unit: "ratio",
        value: |run| share(run, |reads| (reads.remote, reads.local)),
    },
    Other {
        name: "recover_time",
        title: "Recovery, all of disabling",
        unit: "s",
        value: |run| Some(run.disable.as_secs_f64()),
    },
    Other {
        name: "recover_flushes",
        title: "  flushes of it",
        unit: "count",
        value: |run| run.engine.as_ref().map(recover_flushes),
    },
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

pub(super) fn new<'a>(args: &'a SplitArgs, columns: &'a [Column]) -> Report<'a> {
    let base = columns.iter().position(|column| column.labels["placement"] == "caller-node");
    // The count of splits has another name here.
    let others = OTHERS.iter().filter(|other| other.name != "splits");
    Report {
        args: &args.log,
        columns,
        base: base.map(|column| Base { column, name: "caller-node" }),
        others: FIGURES.iter().chain(others).collect(),
    }
}

/// Page-table pages on `node`, the mean over runs.
fn tables_on(column: &Column, node: NodeId) -> f64 {
    let tables_on = |run: &EngineRun| run.tables_by_node.iter().filter(|of| of.0 == node).map(|of| of.1).sum::<u64>();
    column.runs.iter().filter_map(|run| run.engine.as_ref()).map(tables_on).sum::<u64>() as f64
        / column.runs.len().max(1) as f64
}

/// Prints the tables and the notes.
pub(super) fn print(out: &mut impl Write, report: &Report<'_>, args: &SplitArgs, layout: &Layout) -> io::Result<()> {
    report.print_head(out)?;
    print_nodes(out, args, layout)?;
    report.print_tables(out)?;
    let mut tables = table::figures(report.header("tables after the rounds, mean of a run"));
    for &node in layout.map.ids() {
        let counts = report.columns.iter().map(|column| format!("{:.1}", tables_on(column, node)));
        tables.add_row(table::row(std::iter::once(format!("on node {}", node.0)).chain(counts)));
    }
    writeln!(out, "{tables}\n")?;
    print_notes(out, report, args, layout)?;
    report.print_notes(out)
}

/// Prints the nodes of threads, memory and page tables.
fn print_nodes(out: &mut impl Write, args: &SplitArgs, layout: &Layout) -> io::Result<()> {
    let numbers: Vec<String> = layout.map.ids().iter().map(|&node| node_name(layout, node)).collect();
    writeln!(
        out,
        "nodes: {} ({}), vCPUs pinned: {}, first touch: {}, main thread: {}",
        numbers.join(" "),
        kind(layout),
        args.pinning.name(),
        args.first_touch.name(),
        layout.main_node.map_or("pinned to a CPU".to_owned(), |node| format!("node {}", node.0)),
    )?;
    writeln!(
        out,
        "tables: as the columns say, policy of the main thread: {} (caller-policy), lock: {}",
        policy_name(args.policy),
        locking_name(args.log.lock.lockings()[0]),
    )
}

fn node_name(layout: &Layout, node: NodeId) -> String {
    if layout.map.has_memory(node) { node.0.to_string() } else { format!("{} (no memory)", node.0) }
}

fn kind(layout: &Layout) -> &'static str {
    if layout.nodes == Nodes::Host { "the host's" } else { "virtual" }
}

fn print_notes(out: &mut impl Write, report: &Report<'_>, args: &SplitArgs, layout: &Layout) -> io::Result<()> {
    if layout.nodes != Nodes::Host {
        writeln!(
            out,
            "The nodes are virtual, and all memory is equally fast: remote accesses are counted, and take no longer. The \
             times are the cost of the software only."
        )?;
    }
    writeln!(
        out,
        "Walk reads are those of the rounds of dirtying; remote: of a table on another node than the vCPU's; lowest-level \
         tables: those of leaf PTEs of 4 KiB."
    )?;
    if args.log.paging == PagingArg::TwoDimensional {
        writeln!(
            out,
            "The guest's own tables are on the first node, in pages of 4 KiB: walks read the tables that map them, too."
        )?;
    }
    match args.log.split {
        _ if args.log.huge_pages == HugePagesArg::MarkWhole => {}
        SplitWhen::Eager => writeln!(
            out,
            "Huge pages are split right before logging is turned on, by {} {} on the node of the main thread.",
            args.threads,
            if args.threads == 1 { "thread" } else { "threads" },
        )?,
        SplitWhen::Lazy => writeln!(
            out,
            "Nothing is split ahead of time, so there is no splitting time: vCPUs split as they write, in the rounds of \
             dirtying."
        )?,
    }
    let runs = || report.columns.iter().flat_map(|column| &column.runs).filter_map(|run| run.engine.as_ref());
    if args.log.huge_pages == HugePagesArg::Split && runs().all(|run| run.stats.splits == 0) {
        let reason = if runs().all(|run| run.stats.installed_2m + run.stats.installed_1g == 0) {
            "the memory was not mapped by huge pages"
        } else {
            "no vCPU wrote to a huge page"
        };
        writeln!(out, "No huge page was split: {reason}.")?;
    }
    Ok(())
}

/// The object of `--json`.
pub(super) fn results(report: &Report<'_>, args: &SplitArgs, layout: &Layout) -> Results {
    let nodes: Vec<u32> = layout.map.ids().iter().map(|node| node.0).collect();
    let config = json!({
        "lock": locking_name(args.log.lock.lockings()[0]),
        "nodes": nodes,
        "nodes_are": kind(layout),
        "memoryless": args.memoryless,
        "policy": policy_name(args.policy),
        "pin": args.pinning.name(),
        "cpus": args.log.cpus,
        "first_touch": args.first_touch.name(),
        "threads": args.threads,
        "main_node": layout.main_node.map(|node| node.0),
    });
    let mut results = report.results("split", config);
    for column in report.columns.iter().filter(|column| !column.runs.is_empty()) {
        for &node in layout.map.ids() {
            let mut labels: BTreeMap<_, _> = column.labels.clone();
            labels.insert("node", node.0.into());
            let value = tables_on(column, node);
            results.results.push(Figure { name: "tables_on_node".to_owned(), value, unit: "count", labels });
        }
    }
    results
}
