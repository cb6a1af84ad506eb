//! `slat compare`: the five published systems, each with its baseline, slat, and the real peers
//! that this machine has, in one run; and slat's instructions beside those of KVM.
//!
//! Experiments of this command show each system, by command lines that a user can type (`systems`).
//! The comparison reads their results (`comparison`), so a figure here is one that the experiment
//! printed itself. Beside them stands what the model of a large machine predicts of the published
//! figures (`predictions`). A claim is a comparison that slat must win. `statistics` judges it: it
//! is held, or lost, in which case the command fails, or this machine cannot tell (a tie).

mod comparison;
mod dirty_log;
mod figures;
mod instructions;
mod predictions;
mod systems;

use std::time::{Instant, SystemTime};

use clap::{Args, ValueEnum};
use serde::Serialize;
use slat_machine::linux::topology::HostDescription;

use crate::claims;
use crate::failure::Failure;
use crate::options::{OutputArgs, ValueName};
use crate::quantity::Unit;
use crate::results::compared::{Compared, System};
use crate::results::{Figure, Host, Labels, NotRun, Outcome, Results, rfc3339};
use crate::session::Session;
use crate::{metal, numa_split, options, parallel_faults, scale, shadow, userfault};
use comparison::Comparison;
use systems::{Plan, Planned};

#[derive(Clone, Debug, Args)]
#[command(after_help = "Example: slat compare --quick --only shadow,dirty-log --json FILE")]
pub(crate) struct CompareArgs {
    /// Small sizes and few runs: about a minute, not two
    #[arg(long)]
    pub(crate) quick: bool,
    /// These systems only
    #[arg(long, value_enum, ignore_case = true, value_delimiter = ',', value_name = "SYSTEM,...")]
    pub(crate) only: Vec<SystemArg>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// A published system, or what else is compared.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, ValueEnum)]
pub(crate) enum SystemArg {
    /// Parallel page faults on the second stage.
    ParallelFaults,
    /// Userfault: demand paging by exits.
    Userfault,
    /// Shadow paging that survives page-table isolation.
    Shadow,
    /// NUMA-aware page-table pages in eager huge-page splitting.
    NumaSplit,
    /// Getting the dirty log without stopping a vCPU.
    DirtyLog,
    /// Instructions of faults and log beside KVM, on an emulated machine.
    Instructions,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum Size {
    Quick,
    Default,
}

impl CompareArgs {
    fn size(&self) -> Size {
        if self.quick { Size::Quick } else { Size::Default }
    }

    /// The chosen systems in their order, each once.
    fn systems(&self) -> Vec<SystemArg> {
        let is_chosen = |system: &SystemArg| self.only.is_empty() || self.only.contains(system);
        SystemArg::value_variants().iter().copied().filter(is_chosen).collect()
    }
}

/// The results of the experiments of a system, so far; `None` for those that this machine cannot
/// serve, or that failed.
type Measured = Vec<Option<Results>>;

fn evaluate(plan: &Plan, experiments: &Measured, mut not_run: Vec<NotRun>) -> System {
    for missing in experiments.iter().flatten().flat_map(|results| &results.not_run) {
        if !not_run.contains(missing) {
            not_run.push(missing.clone());
        }
    }
    System {
        system: plan.system.to_owned(),
        title: plan.title.to_owned(),
        published_note: plan.published_note.to_owned(),
        comparisons: plan.comparisons.iter().filter_map(|of| of.evaluate(experiments)).collect(),
        not_run,
        experiments: experiments.iter().flatten().cloned().collect(),
    }
}

/// The comparisons without a figure although their experiment was run.
fn missing(plan: &Plan, experiments: &Measured) -> Vec<NotRun> {
    let was_run = |of: &&Comparison| experiments.get(of.experiment).is_some_and(Option::is_some);
    let missing = plan.comparisons.iter().filter(was_run).filter(|of| of.evaluate(experiments).is_none());
    missing.map(|of| NotRun { what: of.title.clone(), why: format!("no figure {}", of.figure) }).collect()
}

/// The results so far, from which the outcome is made.
#[derive(Clone)]
struct Progressing {
    args: CompareArgs,
    begin: Instant,
    /// Finished systems, whose text is printed.
    done: Vec<System>,
    /// Checks of experiments that failed.
    failures: Vec<String>,
}

impl Progressing {
    /// The outcome so far; `current` is the unfinished system.
    fn outcome(&self, current: Option<&System>) -> Outcome {
        let systems: Vec<&System> = self.done.iter().chain(current).collect();
        let of_all = claims::claims(systems.iter().copied());
        let text = current.map(claims::system).unwrap_or_default() + &claims::closing(&of_all, &self.failures);
        let shortfall = match (&self.failures[..], &of_all.lost[..]) {
            ([], []) => None,
            ([], lost) => Some(Failure::Claim(lost.join("; "))),
            (failures, _) => Some(Failure::Check(failures.join("; "))),
        };
        let config = serde_json::json!({
            "size": self.args.size(),
            "only": self.args.systems().iter().map(|system| system.name()).collect::<Vec<_>>(),
        });
        let wall = Figure::new("wall", Unit::Seconds, &Labels::new(), [self.begin.elapsed().as_secs_f64()]);
        let results = Results::new("compare", config, Host::read(None), vec![wall.with_better(None)]);
        let compared = Compared { systems: systems.into_iter().cloned().collect(), claims: of_all };
        let results = Results { compared: Some(compared), ..results };
        Outcome { text, results: Some(results), shortfall }
    }
}

/// Runs the experiments of the systems and compares.
pub(crate) fn run(args: &CompareArgs, session: &Session) -> Result<Outcome, Failure> {
    let mut all = Progressing { args: args.clone(), begin: Instant::now(), done: Vec::new(), failures: Vec::new() };
    session.say(&figures::head(args, &HostDescription::read()))?;
    for system in args.systems() {
        let plan = systems::plan(system, args.size());
        let (mut experiments, mut not_run) = (Measured::new(), Vec::new());
        for planned in &plan.experiments {
            let part = {
                let (all, plan, experiments, not_run) =
                    (all.clone(), plan.clone(), experiments.clone(), not_run.clone());
                session.within(move |part: Outcome| {
                    let experiments = [experiments.clone(), vec![part.results]].concat();
                    let current = evaluate(&plan, &experiments, not_run.clone());
                    all.outcome(Some(&current))
                })
            };
            match run_planned(planned, &part, &mut not_run) {
                Ok(results) => experiments.push(results),
                Err(Failure::Check(what)) => {
                    all.failures.push(format!("{}: {what}", planned.command));
                    experiments.push(None);
                }
                Err(failure) => return Err(failure),
            }
        }
        let mut done = evaluate(&plan, &experiments, not_run);
        done.not_run.extend(missing(&plan, &experiments));
        session.say(&claims::system(&done))?;
        all.done.push(done);
        session.so_far(all.outcome(None));
    }
    Ok(all.outcome(None))
}

/// Runs an experiment, or its replacement; returns its results. `None` if this machine can serve
/// neither.
fn run_planned(planned: &Planned, session: &Session, not_run: &mut Vec<NotRun>) -> Result<Option<Results>, Failure> {
    for command in std::iter::once(&planned.command).chain(&planned.instead) {
        let time = rfc3339(SystemTime::now());
        match run_command(command, session) {
            Ok(outcome) => {
                let command = command.split(' ').map(str::to_owned).collect();
                return Ok(outcome.results.map(|results| Results { command, time, ..results }));
            }
            Err(Failure::CannotServe(why)) => not_run.push(NotRun { what: command.clone(), why }),
            Err(failure) => return Err(failure),
        }
    }
    Ok(None)
}

fn run_command(command: &str, session: &Session) -> Result<Outcome, Failure> {
    use options::parse;
    match command.split(' ').nth(1) {
        Some("parallel-faults") => parallel_faults::run(&parse(command)?, session),
        Some("userfault") => userfault::run(&parse(command)?, session),
        Some("shadow") => shadow::run(&parse(command)?, session),
        Some("numa-split") => numa_split::run(&parse(command)?, session),
        Some("dirty-log") => crate::dirty_log::run(&parse(command)?, session),
        Some("scale") => scale::run(&parse(command)?, session),
        // KVM is not booted: that takes longer than all else.
        Some("metal") => metal::run_beside_saved(&parse(command)?, session),
        _ => Err(Failure::Usage(format!("{command} is not compared"))),
    }
}

/// All command lines that are run.
#[cfg(test)]
pub(crate) fn planned_commands() -> Vec<String> {
    let sizes = [Size::Quick, Size::Default];
    let plans =
        sizes.iter().flat_map(|&size| SystemArg::value_variants().iter().map(move |&of| systems::plan(of, size)));
    let planned = plans.flat_map(|plan| plan.experiments);
    planned.flat_map(|planned| std::iter::once(planned.command).chain(planned.instead)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::compared::Role;

    #[test]
    fn every_system_has_its_experiments_and_claims() {
        for size in [Size::Quick, Size::Default] {
            for &system in SystemArg::value_variants() {
                let plan = systems::plan(system, size);
                assert_eq!(plan.system, system.name());
                assert_eq!(SystemArg::from_str(plan.system, false), Ok(system));
                for comparison in &plan.comparisons {
                    assert!(comparison.experiment < plan.experiments.len(), "{}", comparison.name);
                    let nr = |role| comparison.sides.iter().filter(|side| side.role == role).count();
                    let nr_sides = comparison.sides.len();
                    assert!(
                        [(1, 0), (0, nr_sides)].contains(&(nr(Role::Slat), nr(Role::Model))),
                        "{}",
                        comparison.name
                    );
                    assert!(comparison.first().is_some());
                    let is_there = |name: &str| comparison.sides.iter().any(|side| side.name == name);
                    assert!(
                        comparison.published.as_ref().is_none_or(|of| is_there(&of.proposed_side)),
                        "{}",
                        comparison.name
                    );
                }
                // On few CPUs some claims make no sense; then the sides say so.
                let sides = || plan.comparisons.iter().flat_map(|of| &of.sides);
                assert!(
                    sides().any(|side| side.claim.is_some() || side.unclaimed.is_some()),
                    "{system:?} claims nothing"
                );
            }
        }
    }
}
