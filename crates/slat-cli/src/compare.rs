//! `slat compare`: the five published systems, each with its baseline, slat, and the real peers
//! that this machine has, in one run.
//!
//! Experiments of this command show each system, by command lines that a user can type (`systems`).
//! The comparison reads the objects that they return for `--json` (`comparison`), so a figure here
//! is one that the experiment printed itself. A claim is a comparison that slat must win: the
//! command fails if it does not.

mod comparison;
mod report;
mod systems;

use std::path::PathBuf;
use std::time::Instant;

use clap::{Args, Parser, ValueEnum};
use serde::Serialize;
use serde_json::Value;
use slat_machine::topology::HostDescription;

use crate::args::{Cli, Command};
use crate::failure::Failure;
use crate::results::{NotRun, Outcome, host_json};
use crate::session::Session;
use comparison::{Comparison, Evaluation, Measured};
use systems::{Planned, System};

/// The options of `slat compare`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Example: slat compare --quick --only S1,S5 --json results.json")]
pub(crate) struct CompareArgs {
    /// Small sizes and few runs: about a minute instead of six.
    #[arg(long)]
    pub(crate) quick: bool,
    /// These systems only.
    #[arg(long, value_enum, ignore_case = true, value_delimiter = ',', value_name = "SYSTEM,...")]
    pub(crate) only: Vec<SystemArg>,
    /// Write the output to this file as Markdown.
    #[arg(long, value_name = "FILE")]
    pub(crate) markdown: Option<PathBuf>,
    /// Write the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// A published system.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, ValueEnum)]
pub(crate) enum SystemArg {
    /// Parallel page faults on the second stage.
    #[value(name = "S1")]
    S1,
    /// Userfault: demand paging by exits.
    #[value(name = "S2")]
    S2,
    /// Shadow paging that survives page-table isolation.
    #[value(name = "S3")]
    S3,
    /// NUMA-aware page-table pages in eager huge-page splitting.
    #[value(name = "S4")]
    S4,
    /// Getting the dirty log without stopping a vCPU.
    #[value(name = "S5")]
    S5,
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

/// The result of a system.
#[derive(Clone, Debug, Serialize)]
struct SystemResult {
    system: &'static str,
    title: &'static str,
    published_note: &'static str,
    comparisons: Vec<Evaluation>,
    not_run: Vec<NotRun>,
    /// The objects of the experiments.
    experiments: Vec<Value>,
}

impl SystemResult {
    fn new(plan: &System, experiments: Vec<Value>, mut not_run: Vec<NotRun>) -> SystemResult {
        for object in &experiments {
            for missing in object["not_run"].as_array().into_iter().flatten() {
                let text = |name: &str| missing[name].as_str().unwrap_or_default().to_owned();
                let missing = NotRun { what: text("what"), why: text("why") };
                if !not_run.contains(&missing) {
                    not_run.push(missing);
                }
            }
        }
        SystemResult {
            system: plan.system,
            title: plan.title,
            published_note: plan.published_note,
            comparisons: plan.comparisons.iter().filter_map(|of| of.evaluate(&experiments)).collect(),
            not_run,
            experiments,
        }
    }
}

impl SystemResult {
    /// Notes the comparisons without a figure although their experiment was run.
    fn note_missing(&mut self, plan: &System) {
        let was_run = |of: &Comparison| self.experiments.get(of.experiment).is_some_and(|object| !object.is_null());
        let was_made = |of: &Comparison| self.comparisons.iter().any(|made| made.name == of.name);
        let missing = plan.comparisons.iter().filter(|of| was_run(of) && !was_made(of));
        let note = |of: &Comparison| NotRun { what: of.title.clone(), why: format!("no figure {}", of.figure) };
        let missing: Vec<NotRun> = missing.map(note).collect();
        self.not_run.extend(missing);
    }
}

/// What slat claims.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
struct Claims {
    made: usize,
    held: usize,
    /// The lost claims, in words.
    lost: Vec<String>,
}

impl Claims {
    fn of<'a>(systems: impl IntoIterator<Item = &'a SystemResult>) -> Claims {
        let mut claims = Claims::default();
        for system in systems {
            for comparison in &system.comparisons {
                for (side, claim) in comparison.sides.iter().filter_map(|side| Some((side, side.claim?))) {
                    claims.made += 1;
                    claims.held += usize::from(claim.holds);
                    if !claim.holds {
                        claims.lost.push(lost(system, comparison, side, claim.at_least));
                    }
                }
            }
        }
        claims
    }
}

fn lost(system: &SystemResult, comparison: &Evaluation, side: &Measured, at_least: f64) -> String {
    let ratio = side.ratio.unwrap_or_default();
    format!(
        "{}: {}: speed-up over {} is {ratio:.2}, and should be at least {at_least:.2}",
        system.system, comparison.title, side.name
    )
}

/// The object of `--json`.
#[derive(Clone, Serialize)]
struct Compared<'a> {
    experiment: &'static str,
    config: Value,
    host: Value,
    seconds: f64,
    systems: Vec<&'a SystemResult>,
    claims: Claims,
}

/// The results so far, from which the outcome is made.
#[derive(Clone)]
struct Progressing {
    args: CompareArgs,
    begin: Instant,
    /// Finished systems, whose text is printed.
    done: Vec<SystemResult>,
    /// Checks of experiments that failed.
    failures: Vec<String>,
}

impl Progressing {
    /// The outcome so far; `current` is the unfinished system.
    fn outcome(&self, current: Option<&SystemResult>) -> Result<Outcome, Failure> {
        let host = HostDescription::read();
        let systems: Vec<&SystemResult> = self.done.iter().chain(current).collect();
        let claims = Claims::of(systems.iter().copied());
        let closing = report::closing(&claims, &self.failures);
        let mut markdown = report::head(&self.args, &host);
        systems.iter().for_each(|system| markdown += &report::system(system));
        markdown += &closing;
        let text = current.map(report::system).unwrap_or_default() + &closing;
        let failures: Vec<&str> = self.failures.iter().chain(&claims.lost).map(String::as_str).collect();
        let failure = (!failures.is_empty()).then(|| failures.join("; "));
        let compared = Compared {
            experiment: "compare",
            config: serde_json::json!({
                "size": self.args.size(),
                "only": self.args.systems().iter().map(|system| format!("{system:?}")).collect::<Vec<_>>(),
            }),
            host: host_json(&host, None),
            seconds: self.begin.elapsed().as_secs_f64(),
            systems,
            claims,
        };
        let json = serde_json::to_value(&compared).map_err(|error| Failure::Print(error.into()))?;
        Ok(Outcome { text, json, markdown: Some(markdown), failure })
    }
}

/// Runs the experiments of the systems and compares.
pub(crate) fn run(args: &CompareArgs, session: &Session) -> Result<Outcome, Failure> {
    let mut all = Progressing { args: args.clone(), begin: Instant::now(), done: Vec::new(), failures: Vec::new() };
    session.say(&report::head(args, &HostDescription::read()))?;
    for system in args.systems() {
        let plan = systems::plan(system, args.size());
        let (mut experiments, mut not_run) = (Vec::new(), Vec::new());
        for planned in &plan.experiments {
            let part = {
                let (all, plan, experiments, not_run) =
                    (all.clone(), plan.clone(), experiments.clone(), not_run.clone());
                session.within(move |part: Outcome| {
                    let experiments = [experiments.clone(), vec![part.json.clone()]].concat();
                    let current = SystemResult::new(&plan, experiments, not_run.clone());
                    all.outcome(Some(&current)).unwrap_or(part)
                })
            };
            match run_planned(planned, &part, &mut not_run) {
                Ok(object) => experiments.push(object),
                Err(Failure::Check(what)) => {
                    all.failures.push(format!("{}: {what}", planned.command));
                    experiments.push(Value::Null);
                }
                Err(failure) => return Err(failure),
            }
        }
        let mut done = SystemResult::new(&plan, experiments, not_run);
        done.note_missing(&plan);
        session.say(&report::system(&done))?;
        all.done.push(done);
        session.so_far(all.outcome(None)?);
    }
    all.outcome(None)
}

/// Runs an experiment, or its replacement; returns its object, with its command. Null if this
/// machine can serve neither.
fn run_planned(planned: &Planned, session: &Session, not_run: &mut Vec<NotRun>) -> Result<Value, Failure> {
    for command in std::iter::once(&planned.command).chain(&planned.instead) {
        let cli = Cli::try_parse_from(command.split(' ')).map_err(|error| Failure::Usage(error.to_string()))?;
        let Some(Command::Experiment(experiment)) = cli.command else {
            return Err(Failure::Usage(format!("{command} is no experiment; choose one of `slat --help`")));
        };
        match experiment.run(session) {
            Ok(mut outcome) => {
                outcome.json["command"] = command.as_str().into();
                return Ok(outcome.json);
            }
            Err(Failure::CannotServe(why)) => not_run.push(NotRun { what: command.clone(), why }),
            Err(failure) => return Err(failure),
        }
    }
    Ok(Value::Null)
}

#[cfg(test)]
mod tests {
    use super::comparison::Role;
    use super::*;

    #[test]
    fn every_planned_command_is_an_experiment_that_can_be_typed() {
        for size in [Size::Quick, Size::Default] {
            for &system in SystemArg::value_variants() {
                let plan = systems::plan(system, size);
                assert_eq!(plan.system, format!("{system:?}"));
                for planned in &plan.experiments {
                    for command in std::iter::once(&planned.command).chain(&planned.instead) {
                        let cli = Cli::try_parse_from(command.split(' '));
                        assert!(cli.is_ok_and(|cli| matches!(cli.command, Some(Command::Experiment(_)))), "{command}");
                    }
                }
                for comparison in &plan.comparisons {
                    assert!(comparison.experiment < plan.experiments.len(), "{}", comparison.name);
                    let nr_slat = comparison.sides.iter().filter(|side| side.role == Role::Slat).count();
                    assert_eq!(nr_slat, 1, "{}", comparison.name);
                }
                let claims = plan.comparisons.iter().flat_map(|of| &of.sides).filter(|side| side.claim.is_some());
                // On one CPU some claims make no sense.
                let is_alone = slat_machine::topology::usable_cpus().len() == 1;
                assert!(claims.count() > 0 || is_alone, "{system:?} claims nothing");
            }
        }
    }
}
