//! What `slat metal` prints and writes in the end, and how it judges.

use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use serde_json::json;

use super::emulator::{Ended, LEAVES_ON_THEIR_NODE, LEAVES_WALKED, Machine, TABLES_WALKED};
use super::migration::BothEnded;
use super::plan::Plan;
use super::protocol::{Check, Verdict};
use super::{ControlArg, MachineArg};
use crate::failure::Failure;
use crate::options::ValueName;
use crate::quantity::{Unit, quantity};
use crate::results::{EMULATED_CPUS, Figure, Host, Labels, Outcome, Results, cell, labels};
use crate::table;

/// The exit codes of the emulator if the hypervisor ends it: its device makes `value << 1 | 1` of
/// the values 0x10 and 0x11.
const PASSED: i32 = 0x10 << 1 | 1;
const FAILED: i32 = 0x11 << 1 | 1;
/// Bochs exits with this whenever the machine ends by itself.
const ENDED: i32 = 1;

/// What is verified, or what is wrong.
type Judged = Result<String, String>;

/// What was measured: names, units and samples.
type Measured = [(String, Unit, Vec<f64>)];

pub(super) fn outcome(plan: &Plan, machine: &Machine, ended: &Ended) -> Outcome {
    conclude(plan, machine, verdict(plan, ended), &ended.figures, ended.time)
}

pub(super) fn outcome_of_both(plan: &Plan, machine: &Machine, ended: BothEnded) -> Outcome {
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
        (_, Ok(Verdict::Fail(check, text))) => Ok(Verdict::Fail(check, format!("the target: {text}"))),
        (Ok(Verdict::Fail(check, text)), _) => Ok(Verdict::Fail(check, format!("the source: {text}"))),
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
) -> Outcome {
    let is_control = plan.control != ControlArg::None;
    // A control may be noticed before the first checkpoint.
    let walked = Walked { outside: plan.walks_outside() && !is_control, on_nodes: plan.nr_nodes > 1 };
    let judged = judge(plan.control, verdict).and_then(|text| walked.check(measured).map(|()| text));
    let results = results(plan, machine, measured, time, &judged);
    let outcome = Outcome::new(results, |out| print(out, measured, time, &judged));
    Outcome { shortfall: judged.err().map(Failure::Check), ..outcome }
}

/// What must have been walked outside of the machine.
struct Walked {
    /// Page tables.
    outside: bool,
    /// Leaves whose memory is on a node that it was asked from, of several.
    on_nodes: bool,
}

impl Walked {
    /// A run in which nothing was compared is no pass.
    fn check(&self, measured: &Measured) -> Result<(), String> {
        let is_there = |name: &str| {
            let found = measured.iter().find(|(other, ..)| other == name);
            found.is_some_and(|(_, _, samples)| samples.iter().any(|&count| count > 0.0))
        };
        if self.outside && !(is_there(TABLES_WALKED) && is_there(LEAVES_WALKED)) {
            return Err("the page tables were never walked outside of the machine".to_owned());
        }
        if self.outside && self.on_nodes && !is_there(LEAVES_ON_THEIR_NODE) {
            return Err("no page was found on the node that it was asked from".to_owned());
        }
        Ok(())
    }
}

/// What notices that this is left out. A translation that is stale shows as an access, or as a
/// write that is not in the log.
fn noticed_by(control: ControlArg) -> &'static [Check] {
    match control {
        ControlArg::None => &[],
        ControlArg::NoFlush | ControlArg::NoKick => &[Check::Access, Check::Log],
        ControlArg::NoEntryFlush => &[Check::EntryFlush],
        ControlArg::NoLocalFlush => &[Check::LocalFlush],
        ControlArg::NoBreakFlush | ControlArg::FlushBeforeBreak => &[Check::BreakFlush],
        ControlArg::CopyBeforeLog => &[Check::Log],
        ControlArg::LosePage => &[Check::Hash],
        ControlArg::NoWithhold => &[Check::Withheld],
        ControlArg::SilentSource => &[Check::Silence],
        ControlArg::WrongPte => &[Check::Tables],
    }
}

/// With a control, the failure that it causes is what must come.
fn judge(control: ControlArg, verdict: Result<Verdict, String>) -> Judged {
    let (name, is_control) = (control.name(), control != ControlArg::None);
    match verdict {
        Ok(Verdict::Pass(text)) if is_control => {
            Err(format!("control {name}: what was left out was not noticed: {text}"))
        }
        Ok(Verdict::Pass(text)) => Ok(format!("Verified: {text}.")),
        Ok(Verdict::Fail(check, text)) if noticed_by(control).contains(&check) => {
            Ok(format!("Verified: control {name} was noticed, as it must be: {text}."))
        }
        Ok(Verdict::Fail(_, text)) if is_control => {
            Err(format!("control {name}: another check failed than what was left out causes: {text}"))
        }
        // Also with a control: what was left out is not why.
        Ok(Verdict::Fail(_, text) | Verdict::Error(text)) => Err(text),
        Err(why) => Err(why),
    }
}

/// The verdict, if the machine ended as it says; or why there is none.
pub(super) fn verdict(plan: &Plan, ended: &Ended) -> Result<Verdict, String> {
    let behind = if ended.last.is_empty() { "nothing was said".to_owned() } else { format!("last: {}", ended.last) };
    let status = match (ended.status, &ended.verdict) {
        (Some(status), _) => status,
        (None, None) => {
            return Err(format!("no verdict in {}; {behind}", humantime::format_duration(plan.timeout)));
        }
        (None, Some(verdict)) => {
            return Err(format!("the verdict was \"{}\", but the machine did not end", verdict.text()));
        }
    };
    match (status.code(), &ended.verdict) {
        (Some(ENDED), Some(verdict)) if plan.machine == MachineArg::Vmx => Ok(verdict.clone()),
        (Some(PASSED), Some(verdict @ Verdict::Pass(_)))
        | (Some(FAILED), Some(verdict @ (Verdict::Fail(..) | Verdict::Error(_)))) => Ok(verdict.clone()),
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

fn print(out: &mut String, measured: &Measured, time: Duration, judged: &Judged) {
    let mut table = table::figures(["figure".to_owned(), "value".to_owned()]);
    for (name, unit, samples) in measured {
        table.add_row([name.replace('_', " "), cell(&samples.iter().copied().collect(), *unit)]);
    }
    table.add_row(["wall".to_owned(), quantity(time.as_secs_f64(), Unit::Seconds)]);
    add_line!(out, "\n{table}\n");
    // The command says why there is none.
    if let Ok(text) = judged {
        add_line!(out, "{text}");
    }
}

fn results(plan: &Plan, machine: &Machine, measured: &Measured, time: Duration, judged: &Judged) -> Results {
    let figure = |name: &str, unit, labels: &Labels, samples: &[f64]| {
        Figure::new(name, unit, labels, samples.iter().copied()).with_better(None)
    };
    let mut figures: Vec<Figure> =
        measured.iter().map(|(name, unit, samples)| figure(name, *unit, &Labels::new(), samples)).collect();
    figures.push(figure("wall", Unit::Seconds, &Labels::new(), &[time.as_secs_f64()]));
    let (passed, text) = match judged {
        Ok(text) => (1.0, text),
        Err(text) => (0.0, text),
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
        "nodes": plan.nr_nodes,
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
    fn a_control_needs_the_failure_that_it_causes() {
        let fail = |check| Ok(Verdict::Fail(check, "why".to_owned()));
        for (control, checks) in [
            (ControlArg::NoFlush, &[Check::Access, Check::Log][..]),
            (ControlArg::NoEntryFlush, &[Check::EntryFlush]),
            (ControlArg::WrongPte, &[Check::Tables]),
            (ControlArg::SilentSource, &[Check::Silence]),
            (ControlArg::None, &[]),
        ] {
            for check in [Check::Access, Check::Log, Check::EntryFlush, Check::Tables, Check::Silence, Check::Other] {
                assert_eq!(judge(control, fail(check)).is_ok(), checks.contains(&check), "{control:?}, {check:?}");
            }
            let is_none = control == ControlArg::None;
            assert_eq!(judge(control, Ok(Verdict::Pass("all".to_owned()))).is_ok(), is_none);
            assert!(judge(control, Ok(Verdict::Error("no memory".to_owned()))).is_err());
            assert!(judge(control, Err("silent".to_owned())).is_err());
        }
    }

    #[test]
    fn a_suite_whose_tables_were_never_walked_does_not_pass() {
        let counts = |counts: &[(&str, f64)]| -> Vec<_> {
            counts.iter().map(|&(name, count)| (name.to_owned(), Unit::Count, vec![count])).collect()
        };
        let check =
            |outside, on_nodes, measured: &[(&str, f64)]| Walked { outside, on_nodes }.check(&counts(measured)).is_ok();
        let walked = [(TABLES_WALKED, 4.0), (LEAVES_WALKED, 9.0)];
        assert!(check(true, false, &walked) && check(false, false, &[]));
        assert!(!check(true, false, &[]) && !check(true, false, &[(TABLES_WALKED, 4.0)]));
        assert!(!check(true, false, &[(TABLES_WALKED, 4.0), (LEAVES_WALKED, 0.0)]));
        assert!(!check(true, true, &walked));
        assert!(check(true, true, &[walked[0], walked[1], (LEAVES_ON_THEIR_NODE, 1.0)]));
    }

    #[test]
    fn what_either_machine_has_found_is_the_verdict_on_both() {
        let pass = || Ok(Verdict::Pass("right".to_owned()));
        let fail = || Ok(Verdict::Fail(Check::Log, "wrong".to_owned()));
        let error = || Ok(Verdict::Error("not run".to_owned()));
        let none = || Err("silent".to_owned());
        for (source, target, expected) in [
            (pass(), Some(pass()), Ok(Verdict::Pass("right; right".to_owned()))),
            // The source has lost its target, which has failed.
            (fail(), Some(fail()), Ok(Verdict::Fail(Check::Log, "the target: wrong".to_owned()))),
            (fail(), Some(none()), Ok(Verdict::Fail(Check::Log, "the source: wrong".to_owned()))),
            (none(), Some(fail()), Ok(Verdict::Fail(Check::Log, "the target: wrong".to_owned()))),
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
