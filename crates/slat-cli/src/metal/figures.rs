//! What `slat metal` prints and writes in the end, and how it judges.

use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use serde_json::json;

use super::emulator::{Ended, Machine, Status};
use super::migration::BothEnded;
use super::plan::Plan;
use super::protocol::Verdict;
use super::{ControlArg, MachineArg};
use crate::failure::Failure;
use crate::quantity::{Unit, quantity};
use crate::results::{EMULATED_CPUS, Figure, Host, Labels, Outcome, Results, Shortfall, cell, labels};
use crate::table;

/// The exit codes of the emulator if the hypervisor ends it: its device makes `value << 1 | 1` of
/// the values 0x10 and 0x11.
const PASSED: i32 = 0x10 << 1 | 1;
const FAILED: i32 = 0x11 << 1 | 1;
/// Bochs exits with this whenever the machine ends by itself.
const ENDED: i32 = 1;

/// The judgement.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Judged {
    Right(String),
    Wrong(String),
}

/// What was measured: names, units and samples.
type Measured = [(String, Unit, Vec<f64>)];

/// The outcome of a run.
pub(super) fn outcome(plan: &Plan, machine: &Machine, ended: &Ended) -> Result<Outcome, Failure> {
    conclude(plan, machine, verdict(plan, ended), &ended.figures, ended.time)
}

/// The outcome of a migration.
pub(super) fn outcome_of_both(plan: &Plan, machine: &Machine, ended: BothEnded) -> Result<Outcome, Failure> {
    let BothEnded { source, target } = ended;
    let verdict = both(verdict(plan, &source), target.as_ref().map(|target| verdict(plan, target)));
    let (mut figures, mut time) = (source.figures, source.time);
    if let Some(target) = target {
        figures.extend(target.figures);
        time = time.max(target.time);
    }
    conclude(plan, machine, verdict, &figures, time)
}

/// The verdict on both machines: what either has found wrong, or else why either has none, or else
/// the target's, where the guest ended.
fn both(source: Result<Verdict, String>, target: Option<Result<Verdict, String>>) -> Result<Verdict, String> {
    let Some(target) = target else {
        return match source {
            Ok(Verdict::Pass(text)) => Err(format!("the target was never started: {text}")),
            other => other,
        };
    };
    match (source, target) {
        // First what the target has found: a source that has lost its target says so, too.
        (_, Ok(Verdict::Fail(text))) => Ok(Verdict::Fail(format!("the target: {text}"))),
        (Ok(Verdict::Fail(text)), _) => Ok(Verdict::Fail(format!("the source: {text}"))),
        (_, Ok(Verdict::Error(text))) => Ok(Verdict::Error(format!("the target: {text}"))),
        (Ok(Verdict::Error(text)), _) => Ok(Verdict::Error(format!("the source: {text}"))),
        (_, Err(why)) => Err(format!("the target: {why}")),
        (Err(why), _) => Err(format!("the source: {why}")),
        (Ok(Verdict::Pass(source)), Ok(Verdict::Pass(target))) => Ok(Verdict::Pass(format!("{source}; {target}"))),
    }
}

fn conclude(
    plan: &Plan,
    machine: &Machine,
    verdict: Result<Verdict, String>,
    measured: &Measured,
    time: Duration,
) -> Result<Outcome, Failure> {
    let judged = judge(plan, verdict);
    let results = results(plan, machine, measured, time, &judged);
    let outcome = Outcome::new(results, |out| print(out, measured, time, &judged))?;
    let shortfall = match judged {
        Judged::Right(_) => None,
        Judged::Wrong(why) => Some(Shortfall::Check(why)),
    };
    Ok(Outcome { shortfall, ..outcome })
}

/// With a control, a failure that the hypervisor reports is what must come.
fn judge(plan: &Plan, verdict: Result<Verdict, String>) -> Judged {
    let control = plan.control.name();
    let is_control = plan.control != ControlArg::None;
    match verdict {
        Ok(Verdict::Pass(text)) if is_control => {
            Judged::Wrong(format!("control {control}: what was left out was not noticed: {text}"))
        }
        Ok(Verdict::Pass(text)) => Judged::Right(format!("Verified: {text}.")),
        Ok(Verdict::Fail(text)) if is_control => {
            Judged::Right(format!("Verified: control {control} was noticed, as it must be: {text}."))
        }
        // Also with a control: what was left out is not why.
        Ok(Verdict::Fail(text) | Verdict::Error(text)) => Judged::Wrong(text),
        Err(why) => Judged::Wrong(why),
    }
}

/// The verdict, if the machine ended as it says; or why there is none.
pub(super) fn verdict(plan: &Plan, ended: &Ended) -> Result<Verdict, String> {
    let behind = if ended.last.is_empty() { "nothing was said".to_owned() } else { format!("last: {}", ended.last) };
    let status = match (ended.status, &ended.verdict) {
        (Status::Exited(status), _) => status,
        (Status::TimedOut, None) => {
            return Err(format!("no verdict in {}; {behind}", humantime::format_duration(plan.timeout)));
        }
        (Status::TimedOut, Some(verdict)) => {
            return Err(format!("the verdict was \"{}\", but the machine did not end", verdict.text()));
        }
    };
    match (status.code(), &ended.verdict) {
        (Some(ENDED), Some(verdict)) if plan.machine == MachineArg::Vmx => Ok(verdict.clone()),
        (Some(PASSED), Some(verdict @ Verdict::Pass(_)))
        | (Some(FAILED), Some(verdict @ (Verdict::Fail(_) | Verdict::Error(_)))) => Ok(verdict.clone()),
        (Some(code), Some(verdict)) => {
            Err(format!("the verdict was \"{}\", but the emulator ended with {code}; {behind}", verdict.text()))
        }
        (Some(PASSED | FAILED), None) => Err(format!("the hypervisor ended the machine without a verdict; {behind}")),
        (Some(0), None) => Err(format!("the machine was reset or turned off before a verdict; {behind}")),
        (Some(code), None) => Err(format!("the emulator ended with {code}; {behind}")),
        (None, _) => Err(format!(
            "the emulator was killed by signal {}; {behind}",
            status.signal().map_or_else(|| "unknown".to_owned(), |signal| signal.to_string())
        )),
    }
}

fn print(out: &mut impl Write, measured: &Measured, time: Duration, judged: &Judged) -> io::Result<()> {
    let mut table = table::figures(["figure".to_owned(), "value".to_owned()]);
    for (name, unit, samples) in measured {
        table.add_row([name.replace('_', " "), cell(&samples.iter().copied().collect(), *unit)]);
    }
    table.add_row(["wall".to_owned(), quantity(time.as_secs_f64(), Unit::Seconds)]);
    writeln!(out, "\n{table}\n")?;
    match judged {
        Judged::Right(text) => writeln!(out, "{text}"),
        // The command says why.
        Judged::Wrong(_) => Ok(()),
    }
}

/// The object of `--json`.
fn results(plan: &Plan, machine: &Machine, measured: &Measured, time: Duration, judged: &Judged) -> Results {
    let figure = |name: &str, unit, labels: &Labels, samples: &[f64]| {
        Figure::new(name, unit, labels, samples.iter().copied()).with_better(None)
    };
    let mut figures: Vec<Figure> =
        measured.iter().map(|(name, unit, samples)| figure(name, *unit, &Labels::new(), samples)).collect();
    figures.push(figure("wall", Unit::Seconds, &Labels::new(), &[time.as_secs_f64()]));
    let (passed, text) = match judged {
        Judged::Right(text) => (1.0, text),
        Judged::Wrong(text) => (0.0, text),
    };
    figures.push(figure("passed", Unit::Count, &labels([("verdict", json!(text))]), &[passed]));
    results_of(plan, machine, figures)
}

/// The object with these figures.
pub(super) fn results_of(plan: &Plan, machine: &Machine, figures: Vec<Figure>) -> Results {
    let config = json!({
        "machine": plan.machine.name(),
        "guest": plan.guest.name(),
        "cpus": plan.nr_cpus,
        "seed": plan.seed,
        "operations": plan.nr_operations,
        "memory_bytes": plan.memory,
        "control": plan.control.name(),
        "append": plan.append,
    });
    let host = Host { measured_on: measured_on(machine), ..Host::read(None) };
    Results::new("metal", config, host, figures)
}

/// What the figures are of.
pub(super) fn measured_on(machine: &Machine) -> String {
    format!("{EMULATED_CPUS} {}", machine.emulator.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_either_machine_has_found_is_the_verdict_on_both() {
        let pass = || Ok(Verdict::Pass("right".to_owned()));
        let fail = || Ok(Verdict::Fail("wrong".to_owned()));
        let error = || Ok(Verdict::Error("not run".to_owned()));
        let none = || Err("silent".to_owned());
        for (source, target, expected) in [
            (pass(), Some(pass()), Ok(Verdict::Pass("right; right".to_owned()))),
            // The source has lost its target, which has failed.
            (fail(), Some(fail()), Ok(Verdict::Fail("the target: wrong".to_owned()))),
            (fail(), Some(none()), Ok(Verdict::Fail("the source: wrong".to_owned()))),
            (none(), Some(fail()), Ok(Verdict::Fail("the target: wrong".to_owned()))),
            (error(), Some(none()), Ok(Verdict::Error("the source: not run".to_owned()))),
            (pass(), Some(error()), Ok(Verdict::Error("the target: not run".to_owned()))),
            (pass(), Some(none()), Err("the target: silent".to_owned())),
            (none(), Some(pass()), Err("the source: silent".to_owned())),
            // The target was not started.
            (error(), None, error()),
            (none(), None, none()),
            (pass(), None, Err("the target was never started: right".to_owned())),
        ] {
            assert_eq!(both(source.clone(), target.clone()), expected, "{source:?}, {target:?}");
        }
    }
}
