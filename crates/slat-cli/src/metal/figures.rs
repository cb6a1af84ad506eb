//! What `slat metal` prints and writes in the end, and how it judges.

use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;

use serde_json::json;

use super::emulator::{Ended, Machine, Status};
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

/// The outcome of a run.
pub(super) fn outcome(plan: &Plan, machine: &Machine, ended: &Ended) -> Result<Outcome, Failure> {
    let judged = judge(plan, ended);
    let outcome = Outcome::new(results(plan, machine, ended, &judged), |out| print(out, ended, &judged))?;
    let shortfall = match judged {
        Judged::Right(_) => None,
        Judged::Wrong(why) => Some(Shortfall::Check(why)),
    };
    Ok(Outcome { shortfall, ..outcome })
}

/// With a control, a failure that the hypervisor reports is what must come.
fn judge(plan: &Plan, ended: &Ended) -> Judged {
    let control = plan.control.name();
    let is_control = plan.control != ControlArg::None;
    match verdict(plan, ended) {
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

fn print(out: &mut impl Write, ended: &Ended, judged: &Judged) -> io::Result<()> {
    let mut table = table::figures(["figure".to_owned(), "value".to_owned()]);
    for (name, unit, samples) in &ended.figures {
        table.add_row([name.replace('_', " "), cell(&samples.iter().copied().collect(), *unit)]);
    }
    table.add_row(["wall".to_owned(), quantity(ended.time.as_secs_f64(), Unit::Seconds)]);
    writeln!(out, "\n{table}\n")?;
    match judged {
        Judged::Right(text) => writeln!(out, "{text}"),
        // The command says why.
        Judged::Wrong(_) => Ok(()),
    }
}

/// The object of `--json`.
fn results(plan: &Plan, machine: &Machine, ended: &Ended, judged: &Judged) -> Results {
    let figure = |name: &str, unit, labels: &Labels, samples: &[f64]| {
        Figure::new(name, unit, labels, samples.iter().copied()).with_better(None)
    };
    let mut figures: Vec<Figure> =
        ended.figures.iter().map(|(name, unit, samples)| figure(name, *unit, &Labels::new(), samples)).collect();
    figures.push(figure("wall", Unit::Seconds, &Labels::new(), &[ended.time.as_secs_f64()]));
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
