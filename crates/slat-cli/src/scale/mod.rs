//! `slat scale`: what the model of a large machine (`slat-model`) predicts, beside what was
//! published.
//!
//! The model runs the engine's source in virtual time, so this machine needs no more CPUs than one.
//! A run depends on its topology, parameters and seed. Two runs of one command line have the same
//! trace hashes.
//!
//! # Implementation
//! Each published system is a module with one function, which [`SYSTEMS`] names. The function runs
//! the model and returns a [`Part`]: its text, its figures, and its runs. Figures have one sample
//! each, since virtual time has no spread. With `--check` none of them runs: [`check`] does.
//!
//! The types of the engine here are those of `slat_costed`, which `slat_model` uses. They are not
//! those of `slat`.

mod check;
mod dirty_log;
mod exits;
mod machines;
mod names;
mod numa_split;
mod parallel_faults;
mod trace;
mod userfault;

use clap::{Args, ValueEnum};
use serde_json::json;
use slat_model::parameters::Parameters;
use slat_model::version::{Seed, VERSION};

use crate::failure::Failure;
use crate::options::{BYTES, ITERATIONS, OutputArgs, SEED, ValueName, positive, size_bytes};
use crate::quantity::{Unit, quantity};
use crate::results::{Figure, Host, MODELLED_CPUS, Outcome, PublishedFigure, Results};
use crate::session::Session;
use machines::Machines;
use trace::Traced;

#[derive(Clone, Debug, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Example: slat scale --cpus 1,4,16 -b 1M\nExample: slat scale --cpus 96 --topology 4x64 --trace"
)]
pub(crate) struct ScaleArgs {
    /// Published system
    #[arg(long, value_name = "SYSTEM", value_enum, default_value_t = SystemArg::All)]
    system: SystemArg,
    /// Numbers of modelled CPUs, each with a vCPU
    #[arg(
        long,
        value_name = "N,...",
        value_delimiter = ',',
        default_value = "1,2,4,8,16,32,64,96,416",
        value_parser = positive::<usize>
    )]
    cpus: Vec<usize>,
    /// Topology of the modelled machine: a name or a file
    ///
    /// 1x2, 1x16, 2x48, 4x64, 8x52 (nodes, and CPUs of each), or a file in TOML. By default the
    /// smallest of these that has enough CPUs. Predictions of published figures are on 2x48.
    #[arg(long, value_name = "TOPOLOGY")]
    topology: Option<String>,
    /// File with the costs of the modelled machine
    ///
    /// In TOML. By default the costs that the program has.
    #[arg(long, value_name = "FILE")]
    parameters: Option<String>,
    #[arg(short, long, value_name = "SIZE", default_value = "16M", value_parser = size_bytes, help = BYTES)]
    bytes: u64,
    #[arg(
        long,
        visible_alias = "rounds",
        value_name = "N",
        default_value_t = 2,
        value_parser = clap::value_parser!(u32).range(1..=1000),
        help = ITERATIONS
    )]
    iterations: u32,
    #[arg(long, value_name = "N", default_value = "1", help = SEED)]
    seed: Seed,
    /// Compare every harvest of the log with memory
    ///
    /// Instead of the systems: guests on modelled machines write and read, while other CPUs get the
    /// dirty log, move pages, and split huge pages. Oracles compare every read and every harvest,
    /// and find stale translations. One seed runs after another, for the time of --seconds.
    #[arg(long, conflicts_with_all = ["system", "cpus", "topology", "bytes", "iterations", "trace"])]
    check: bool,
    /// Time of --check in seconds
    ///
    /// At least one seed runs.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 60,
        requires = "check",
        value_parser = clap::value_parser!(u64).range(1..=86400)
    )]
    seconds: u64,
    /// Print the trace hash of each run, and what cost most
    ///
    /// The ten cache lines and the ten places in the source for which CPUs waited longest.
    #[arg(long)]
    trace: bool,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// A published system that the model has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum SystemArg {
    /// Parallel page faults on the second stage.
    ParallelFaults,
    /// Demand paging by userfaultfd and by exits.
    Userfault,
    /// Splits of huge pages on several nodes.
    NumaSplit,
    /// Operations of the hypervisor beside faults.
    DirtyLog,
    All,
}

/// A system, and the function that runs its model.
struct System {
    arg: SystemArg,
    run: fn(&Context<'_>) -> Result<Part, Failure>,
}

const SYSTEMS: [System; 4] = [
    System { arg: SystemArg::ParallelFaults, run: parallel_faults::run },
    System { arg: SystemArg::Userfault, run: userfault::run },
    System { arg: SystemArg::NumaSplit, run: numa_split::run },
    System { arg: SystemArg::DirtyLog, run: dirty_log::run },
];

/// What a system adds to the output.
#[derive(Clone, Debug, Default)]
struct Part {
    /// Tables and notes for people.
    text: String,
    figures: Vec<Figure>,
    /// They have the names and labels of the figures that they stand beside.
    published: Vec<PublishedFigure>,
    /// All runs of the model, in their order.
    runs: Vec<Traced>,
}

impl Part {
    /// This part with another one below it.
    fn and(mut self, other: Part) -> Part {
        self.text += "\n";
        self.text += &other.text;
        self.figures.extend(other.figures);
        self.published.extend(other.published);
        self.runs.extend(other.runs);
        self
    }
}

/// What the function of a system gets.
struct Context<'a> {
    args: &'a ScaleArgs,
    parameters: &'a Parameters,
    machines: &'a Machines,
    session: &'a Session,
    system: SystemArg,
    /// The parts of the systems before.
    done: &'a [(SystemArg, Part)],
}

impl Context<'_> {
    /// Does each of `planned`, after its title, and hands over what is done after each: `part`
    /// makes that of the runs.
    fn measure<P, D>(
        &self,
        planned: impl IntoIterator<Item = (String, P)>,
        run: impl Fn(P) -> Result<D, Failure>,
        part: impl Fn(&[D]) -> Part,
    ) -> Result<Part, Failure> {
        let planned: Vec<(String, P)> = planned.into_iter().collect();
        let progress = self.session.progress(planned.len() as u64);
        let mut all = Vec::new();
        for (title, planned) in planned {
            progress.begin(title);
            all.push(run(planned)?);
            progress.step();
            self.so_far(part(&all));
        }
        Ok(part(&all))
    }

    /// Hands over what the system has so far.
    fn so_far(&self, part: Part) {
        let mut parts = self.done.to_vec();
        parts.push((self.system, part));
        self.session.so_far(outcome(self.args, self.machines, &parts));
    }
}

pub(crate) fn run(args: &ScaleArgs, session: &Session) -> Result<Outcome, Failure> {
    let parameters = match &args.parameters {
        Some(file) => Parameters::from_file(file),
        None => Parameters::built_in(),
    }?;
    if args.check {
        return check::run(args, &parameters, session);
    }
    let machines = Machines::new(args)?;
    let mut done = Vec::new();
    for system in SYSTEMS.iter().filter(|system| [system.arg, SystemArg::All].contains(&args.system)) {
        let context =
            Context { args, parameters: &parameters, machines: &machines, session, system: system.arg, done: &done };
        let part = (system.run)(&context)?;
        done.push((system.arg, part));
    }
    Ok(outcome(args, &machines, &done))
}

fn outcome(args: &ScaleArgs, machines: &Machines, parts: &[(SystemArg, Part)]) -> Outcome {
    Outcome::new(results(args, machines, parts), |out| print(out, args, parts))
}

fn print(out: &mut String, args: &ScaleArgs, parts: &[(SystemArg, Part)]) {
    add_line!(
        out,
        "Modelled machines, at most {} for each vCPU, parameters: {}, seed {}",
        quantity(args.bytes as f64, Unit::Bytes),
        args.parameters.as_deref().unwrap_or("built-in"),
        args.seed
    );
    for (system, part) in parts {
        add_line!(out, "\n## {}\n\n{}", system.name(), part.text.trim_end());
    }
    if args.trace {
        add_line!(out, "\n## Traces");
        parts.iter().flat_map(|(_, part)| &part.runs).for_each(|run| run.print(out));
    }
    add_line!(
        out,
        "\nTimes are virtual: the engine's source runs on a model of the CPUs' caches, of the host and of the\n\
         guest. Two runs of one command line are the same."
    );
}

fn results(args: &ScaleArgs, machines: &Machines, parts: &[(SystemArg, Part)]) -> Results {
    let parts_of = |(system, part): &(SystemArg, Part)| {
        part.runs.iter().map(|run| run.json(&system.name(), args.trace)).collect::<Vec<_>>()
    };
    let config = json!({
        "system": args.system.name(),
        "cpus": machines.cpus,
        "topology": machines.topology_name(),
        "parameters": args.parameters.as_deref().unwrap_or("built-in"),
        "bytes": args.bytes,
        "iterations": args.iterations,
        "seed": args.seed.0,
        "model_version": VERSION,
        "runs": parts.iter().flat_map(parts_of).collect::<Vec<_>>(),
    });
    let figures = parts.iter().flat_map(|(_, part)| part.figures.clone()).collect();
    let published = parts.iter().flat_map(|(_, part)| part.published.clone()).collect();
    Results { published, ..Results::new("scale", config, host(), figures) }
}

fn host() -> Host {
    Host { measured_on: MODELLED_CPUS.to_owned(), ..Host::read(None) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_system_has_a_value_and_a_function() {
        for value in SystemArg::value_variants() {
            assert!(*value == SystemArg::All || SYSTEMS.iter().any(|system| system.arg == *value), "{value:?}");
        }
    }

    #[test]
    fn the_help_names_the_topologies_that_the_model_has() {
        let command = ScaleArgs::augment_args(clap::Command::new("slat"));
        let topology = command.get_arguments().find(|arg| arg.get_id() == "topology").unwrap();
        let help = topology.get_long_help().unwrap().to_string();
        for name in slat_model::topology::Topology::names() {
            assert!(help.contains(name), "{name}: {help}");
        }
    }
}
