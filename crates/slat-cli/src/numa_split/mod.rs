//! `slat numa-split`: the phases of `slat parallel-faults` over huge pages on several nodes, for
//! each placement of the page-table pages that replace the huge pages: on the node of the memory
//! that they map, on the node of the thread that splits, or where that thread's memory policy puts
//! them.
//!
//! It shows the later cost for walks: how many of the walkers' reads in the rounds of dirtying went
//! to another node. The figures are of lowest-level page-table pages: one of a higher level serves
//! memory of several nodes, and is always remote for some vCPU.
//!
//! The main thread, and others that it starts, split eagerly right before logging is turned on, in
//! every mode of the log. So splitting has its own time, and the columns are comparable. (With
//! manual protect, initially set, the engine alone would split when the log is first cleared.) Each
//! run has a new main thread, since that moves to a node.

mod figures;

use std::num::{NonZeroUsize, ParseIntError};
use std::thread;

use clap::{Arg, Args, ValueEnum};
use slat::NodeId;
use slat::baselines::Locking;
use slat::tables::TablePlacement;
use slat_machine::memory::numa::{FirstTouch, MAX_NODES, MemoryPolicy, NodeMap, Nodes, Pinning};
use slat_machine::vm::machine::{MachineConfig, MachineError};

use crate::failure::{Failure, check_failed, ensure, no_thread};
use crate::options::{Named, OneOrAll, OutputArgs, PagingArg, SplitWhen, except, named, names, one_or_all, positive};
use crate::phases::PhasesArgs;
use crate::phases::{self, Roles, Run};
use crate::results::Outcome;
use crate::session::Session;

/// Virtual nodes where the host has but one.
const DEFAULT_NR_NODES: u32 = 8;

/// Threads that split, at most.
const MAX_THREADS: usize = 1024;

#[derive(Clone, Debug, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Example: slat numa-split -v 8 -b 16M --nodes 4",
    mut_args(for_split)
)]
pub(crate) struct NumaSplitArgs {
    #[command(flatten)]
    phases: PhasesArgs,
    /// Nodes: a number or a list of virtual ones, or `host`
    ///
    /// `host`: the nodes of this machine. By default those of this machine if it has several, else
    /// 8 virtual ones.
    #[arg(long, value_parser = nodes, value_name = "NODES")]
    nodes: Option<NodesArg>,
    /// Virtual nodes that have CPUs but no memory
    ///
    /// Their memory is that of the next node.
    #[arg(long, value_delimiter = ',', value_name = "N,...", hide_short_help = true)]
    memoryless: Vec<u32>,
    /// Placement of the tables that replace huge pages
    #[arg(long, value_name = "WHERE", default_value = "all", value_parser = one_or_all::<TablePlacement>(Some("all")))]
    placement: OneOrAll<TablePlacement>,
    /// Memory policy of the threads that split, for caller-policy
    ///
    /// Where their memory comes from: `local`, `preferred:N`, `interleave`.
    #[arg(long, value_parser = policy, default_value = "interleave", hide_short_help = true)]
    policy: MemoryPolicy,
    /// Whether vCPUs stay on the nodes of their memory
    #[arg(long = "pin", value_name = "PIN", value_enum, default_value_t = PinArg::On)]
    pinning: PinArg,
    /// First touch of a vCPU's memory
    ///
    /// By the vCPU itself, by a vCPU of another node, or by the main thread.
    #[arg(long, value_name = "THREAD", default_value = "own", value_parser = named::<FirstTouch>(), hide_short_help = true)]
    first_touch: FirstTouch,
    /// Threads that split ahead of time, each a part of the memory
    ///
    /// All run on the node of the main thread.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = positive::<usize>, hide_short_help = true)]
    split_threads: usize,
    /// Node of the main thread; by default the first
    #[arg(long, value_name = "N", hide_short_help = true)]
    main_node: Option<u32>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Other defaults than those of `slat parallel-faults`; values that have no meaning here are no
/// values.
fn for_split(arg: Arg) -> Arg {
    match arg.get_id().as_str() {
        "vcpus" => arg.default_value("8"),
        "bytes" => arg.default_value("64M"),
        "backing" => arg.default_value("anonymous_thp"),
        // The columns are the placements.
        "lock" => arg.value_parser(one_or_all::<Locking>(None)),
        // The reads of shadow walks are not counted.
        "paging" => arg.value_parser(except(&PagingArg::Shadow)),
        "overlap" | "check" => arg.hide_short_help(true),
        _ => arg,
    }
}

/// The nodes that `--nodes` names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum NodesArg {
    Count(u32),
    Numbers(Vec<NodeId>),
    Host,
}

fn nodes(text: &str) -> Result<NodesArg, String> {
    let number = |text: &str| text.parse::<u32>().map_err(|error: ParseIntError| format!("{text}: {error}"));
    match text {
        "host" => Ok(NodesArg::Host),
        _ if text.contains(',') => {
            Ok(NodesArg::Numbers(text.split(',').map(|text| number(text).map(NodeId)).collect::<Result<_, _>>()?))
        }
        _ => match number(text)? {
            count if count as usize > MAX_NODES => Err(format!("{count} nodes are more than {MAX_NODES}")),
            count => Ok(NodesArg::Count(count)),
        },
    }
}

fn policy(text: &str) -> Result<MemoryPolicy, String> {
    match (text, text.strip_prefix("preferred:")) {
        ("local", _) => Ok(MemoryPolicy::Local),
        ("interleave", _) => Ok(MemoryPolicy::Interleave),
        (_, Some(node)) => {
            let node = node.parse().map_err(|error: ParseIntError| error.to_string())?;
            Ok(MemoryPolicy::Preferred(NodeId(node)))
        }
        _ => Err("there are local, preferred:N, interleave".to_owned()),
    }
}

names!(TablePlacement: HugePageNode = "huge-page-node", CallerNode = "caller-node", CallerPolicy = "caller-policy",
       _ = "node";
       "On the node of the memory that they map", "On the node of the thread that allocates them",
       "Where the memory policy of that thread says");
names!(FirstTouch: Own = "own", Other = "other", Main = "main");

fn policy_name(policy: MemoryPolicy) -> String {
    match policy {
        MemoryPolicy::Local => "local".to_owned(),
        MemoryPolicy::Preferred(node) => format!("preferred:{}", node.0),
        MemoryPolicy::Interleave => "interleave".to_owned(),
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum PinArg {
    /// Each vCPU stays on the node of its memory.
    On,
    /// On virtual nodes each vCPU draws its node anew for each round; on the host's, the scheduler
    /// decides.
    Off,
}

impl PinArg {
    /// The pinning of run number `run`: each run has its own random numbers, and all columns have
    /// the same.
    fn pinning(self, seed: u64, run: u32) -> Pinning {
        match self {
            PinArg::On => Pinning::On,
            PinArg::Off => Pinning::Off { seed: seed.wrapping_add(u64::from(run) << 32) },
        }
    }
}

/// The nodes that the columns run on.
struct Layout {
    nodes: Nodes,
    map: NodeMap,
    /// `None`: the node of the CPU that the main thread is pinned to.
    main_node: Option<NodeId>,
}

impl Layout {
    fn new(args: &NumaSplitArgs) -> Result<Layout, Failure> {
        let without_memory: Vec<NodeId> = args.memoryless.iter().copied().map(NodeId).collect();
        let nodes = match &args.nodes {
            Some(NodesArg::Host) => Nodes::Host,
            None if without_memory.is_empty() && Nodes::Host.map().is_ok_and(|map| !map.is_one()) => Nodes::Host,
            None => Nodes::virtual_nodes(DEFAULT_NR_NODES),
            Some(NodesArg::Count(count)) => Nodes::virtual_nodes(*count),
            Some(NodesArg::Numbers(nodes)) => Nodes::Virtual { nodes: nodes.clone(), without_memory: Vec::new() },
        };
        let nodes = match nodes {
            Nodes::Virtual { nodes, .. } => Nodes::Virtual { nodes, without_memory },
            _ if !without_memory.is_empty() => {
                return Err(Failure::Usage("--memoryless needs virtual nodes; choose --nodes N".to_owned()));
            }
            of_host => of_host,
        };
        let map = nodes.map().map_err(MachineError::from)?;
        ensure!(
            nodes != Nodes::Host || !map.is_one(),
            CannotServe,
            "it has one node only; --nodes N makes virtual ones"
        );
        let main_node = NodeId(args.main_node.unwrap_or(map.ids()[0].0));
        ensure!(
            map.ids().contains(&main_node),
            Usage,
            "--main-node: there is no node {}; choose one of --nodes",
            main_node.0
        );
        let is_main_pinned = args.phases.cpus.as_ref().is_some_and(|cpus| cpus.len() > args.phases.guest.vcpus);
        let main_node = if nodes == Nodes::Host && is_main_pinned { None } else { Some(main_node) };
        ensure!(
            main_node.is_some() || args.main_node.is_none(),
            Usage,
            "--main-node, and --cpus with a CPU for the main thread: choose one"
        );
        if let MemoryPolicy::Preferred(node) = args.policy
            && !map.ids().contains(&node)
        {
            return Err(Failure::Usage(format!("--policy: there is no node {}; choose one of --nodes", node.0)));
        }
        Ok(Layout { nodes, map, main_node })
    }
}

pub(crate) fn run(args: &NumaSplitArgs, session: &Session) -> Result<Outcome, Failure> {
    let locking = args.phases.tables.lock.values[0];
    ensure!(
        args.phases.cpus.is_none() || args.pinning == PinArg::On,
        Usage,
        "--cpus pins vCPUs, --pin off does not; choose one"
    );
    if args.split_threads > MAX_THREADS {
        return Err(Failure::Usage(format!(
            "{} threads are more than {MAX_THREADS}; choose fewer",
            args.split_threads
        )));
    }
    let layout = Layout::new(args)?;
    let mut config = phases::machine_config(&args.phases)?;
    config.engine.locking = locking;
    config.nodes = layout.nodes.clone();
    let kind = |&placement: &TablePlacement| {
        let mut config = config.clone();
        config.engine.table_placement = placement;
        phases::Kind::new("placement", placement.name(), placement.name().to_owned(), Some(config))
    };
    let kinds = args.placement.values.iter().map(kind).collect();
    let run = |kind: &phases::Kind, number: u32| {
        let pinning = args.pinning.pinning(args.phases.seed, number);
        let config = MachineConfig { pinning, ..kind.machine.clone().unwrap_or_default() };
        run_apart(args, &config, &layout, session)
    };
    phases::measure(session, kinds, args.phases.runs, run, |columns| {
        let report = figures::new(args, columns);
        Outcome::new(figures::results(&report, args, &layout), |out| figures::print(out, &report, args, &layout))
    })
}

/// One run, on a new thread: its node and its policy do not affect the next run.
fn run_apart(args: &NumaSplitArgs, config: &MachineConfig, layout: &Layout, session: &Session) -> Result<Run, Failure> {
    let uses_policy = config.engine.table_placement == TablePlacement::CallerPolicy;
    let roles = Roles {
        first_touch: args.first_touch,
        main_node: layout.main_node,
        policy: uses_policy.then_some(args.policy),
        nr_splitters: match args.phases.split {
            SplitWhen::Eager => NonZeroUsize::new(args.split_threads),
            SplitWhen::Lazy => None,
        },
    };
    thread::scope(|scope| {
        let main =
            thread::Builder::new().spawn_scoped(scope, || phases::run_once(&args.phases, config, roles, session));
        let main = main.map_err(|error| no_thread(&error))?;
        main.join().unwrap_or_else(|_| Err(check_failed("the main thread of a run panicked")))
    })
}
