//! `--guest measure`: instructions for each event, of slat-metal and of KVM, on the same emulated
//! machine.
//!
//! Each machine runs twice, and both runs must count the same: otherwise something else than
//! instructions was counted. So KVM's counts are those of any later run, and `slat compare` has
//! them from a file ([`saved`]). With several CPUs there are other events ([`TOGETHER`]), and Linux's
//! own work comes between those of KVM in each run in another way: how much is said. What is in a
//! count is said in docs/instructions.md.

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::MetalArgs;
use super::architecture::Architecture;
use super::emulator::{Boot, Ended, Machine, Shown};
use super::figures::{measured_on, results_of, verdict};
use super::packages::Downloads;
use super::parts::Parts;
use super::plan::Plan;
use super::protocol::Verdict;
use super::saved::{self, CountedOn, Saved};
use crate::failure::Failure;
use crate::options::PeerArg;
use crate::quantity::{Unit, digits, or_nothing, times};
use crate::results::{Better, Figure, Labels, NotRun, Outcome, labels};
use crate::session::Session;
use crate::table;

/// What is measured: the first part of the names of its figures, and its title.
pub(crate) const EVENTS: [(&str, &str); 13] = [
    ("demand_fault", "Demand fault"),
    ("demand_fault_2m", "Demand fault, 2 MiB"),
    ("write_protect_fault", "Write-protect fault"),
    ("write_protect_fault_first", "  the first in its 2 MiB"),
    ("get_and_clear", "Get and clear log, each page"),
    ("get", "Get log alone, each page"),
    ("clear", "Clear log, each page"),
    ("enable", "Log on, each page"),
    ("disable", "Log off, each page"),
    ("enable_2m", "Log on, each page of 2 MiB"),
    ("write_fault_2m", "  the first write to it"),
    ("invalidate_page", "Invalidate a page"),
    ("invalidate_range", "Invalidate 16 MiB, each page"),
];

/// The same with several CPUs at the same time.
const TOGETHER: [(&str, &str); 3] = [
    ("demand_fault_mean", "Demand fault, mean"),
    ("write_protect_fault_mean", "Write-protect fault, mean"),
    ("invalidate_page_running", "Invalidate a page, others run"),
];

/// A column: whose figures, its title, and the end of the figures' names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct System {
    of: &'static str,
    title: &'static str,
    ending: &'static str,
}

impl System {
    const SLAT_LAZY: System = System { of: "slat", title: "slat, lazy", ending: "lazy" };
    const SLAT_LEAVES: System = System { of: "slat", title: "slat, leaves", ending: "leaves" };
    const KVM_TDP: System = System { of: "kvm", title: "KVM, TDP", ending: "tdp" };
    const KVM_SHADOW: System = System { of: "kvm", title: "KVM, shadow", ending: "shadow" };
    const KVM_STAGE2: System = System { of: "kvm", title: "KVM, stage 2", ending: "stage2" };
    const KVM_G_STAGE: System = System { of: "kvm", title: "KVM, G-stage", ending: "gstage" };

    /// Those of an instruction set.
    fn all(architecture: Architecture) -> &'static [System] {
        match architecture {
            Architecture::X86 => &[System::SLAT_LAZY, System::SLAT_LEAVES, System::KVM_TDP, System::KVM_SHADOW],
            Architecture::Arm => &[System::SLAT_LAZY, System::SLAT_LEAVES, System::KVM_STAGE2],
            Architecture::RiscV => &[System::SLAT_LAZY, System::SLAT_LEAVES, System::KVM_G_STAGE],
        }
    }

    /// KVM with second-stage page tables, which slat has too.
    fn peer(architecture: Architecture) -> System {
        System::all(architecture)[2]
    }

    fn is_slat(self) -> bool {
        self.of == "slat"
    }

    fn labels(self, nr_cpus: u32) -> Labels {
        labels([("system", json!(self.of)), ("variant", json!(self.ending)), ("cpus", json!(nr_cpus))])
    }
}

/// The counts of a machine, by the names of its figures: a sample for each run.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub(super) struct Counts(pub(super) Vec<(String, Unit, Vec<f64>)>);

impl Counts {
    fn samples(&self, name: &str) -> Option<&[f64]> {
        let (_, _, samples) = self.0.iter().find(|(other, _, _)| other == name)?;
        Some(samples)
    }

    fn get(&self, name: &str) -> Option<f64> {
        self.samples(name)?.first().copied()
    }

    /// The first figure that differs from that of another run, with both values.
    fn difference(&self, other: &Counts) -> Option<String> {
        let mut names = self.0.iter().chain(&other.0).map(|(name, ..)| name);
        let name = names.find(|name| self.get(name) != other.get(name))?;
        Some(format!("{name}: {} and {}", number(self.get(name)), number(other.get(name))))
    }

    /// How far the samples of a figure are apart, at most, as a share of the least one.
    fn spread(&self) -> f64 {
        let of_figure = |samples: &[f64]| {
            let (least, most) = (least(samples)?, samples.iter().copied().reduce(f64::max)?);
            (least > 0.0).then_some((most - least) / least)
        };
        self.0.iter().filter_map(|(_, _, samples)| of_figure(samples)).fold(0.0, f64::max)
    }

    /// These, and the samples that `other` has of them.
    fn with(mut self, other: &Counts) -> Counts {
        for (name, _, samples) in &mut self.0 {
            samples.extend(other.samples(name).unwrap_or_default());
        }
        self
    }

    /// What no run counts: no figure at all, or one without samples, or less than nothing.
    pub(super) fn wrong(&self) -> Option<String> {
        let is_wrong = |samples: &[f64]| samples.is_empty() || samples.iter().any(|count| *count < 0.0);
        match self.0.iter().find(|(_, _, samples)| is_wrong(samples)) {
            Some((name, ..)) => Some(format!("{name} is no count")),
            None => self.0.is_empty().then(|| "it has no figures".to_owned()),
        }
    }
}

fn least(samples: &[f64]) -> Option<f64> {
    samples.iter().copied().reduce(f64::min)
}

/// All that was measured.
struct Measured {
    architecture: Architecture,
    nr_cpus: u32,
    slat: Counts,
    kvm: Option<Counts>,
    /// The command line of its kernel.
    kvm_words: String,
    not_run: Option<NotRun>,
}

impl Measured {
    /// Of slat alone, so far.
    fn new(plan: &Plan, slat: Counts, not_run: Option<NotRun>) -> Measured {
        let (architecture, nr_cpus) = (plan.machine.architecture(), plan.nr_cpus);
        Measured { architecture, nr_cpus, slat, kvm: None, kvm_words: plan.kvm_words(), not_run }
    }

    /// An event of a system, in each run. slat's are of one way of tracking, or of both.
    fn samples(&self, event: &str, system: System) -> Option<&[f64]> {
        let of_system = format!("{event}_{}", system.ending);
        if system.is_slat() {
            self.slat.samples(&of_system).or_else(|| self.slat.samples(event))
        } else {
            self.kvm.as_ref()?.samples(&of_system)
        }
    }

    /// The least one.
    fn count(&self, event: &str, system: System) -> Option<f64> {
        least(self.samples(event, system)?)
    }

    fn events(&self) -> &'static [(&'static str, &'static str)] {
        if self.nr_cpus == 1 { &EVENTS } else { &TOGETHER }
    }

    /// How many times as many instructions KVM takes with page tables of the same kind.
    fn ratio(&self, event: &str) -> Option<f64> {
        let slat = self.count(event, System::SLAT_LAZY)?;
        (slat > 0.0).then_some(self.count(event, System::peer(self.architecture))? / slat)
    }
}

/// Runs the machines, compares, and saves KVM's counts.
pub(super) fn run(args: &MetalArgs, plan: &Plan, session: &Session) -> Result<Outcome, Failure> {
    let parts = Parts::new(args, plan, Downloads::Allowed, 4, session);
    let emulator = parts.emulator()?;
    let (linux, not_run) = match args.peer {
        PeerArg::None => (None, None),
        peer => match parts.kvm_linux() {
            Ok(linux) => (Some(linux), None),
            Err(Failure::CannotServe(why)) if peer == PeerArg::Auto => {
                (None, Some(NotRun { what: "KVM".to_owned(), why }))
            }
            Err(failure) => return Err(failure),
        },
    };
    let counted_on = linux.as_ref().map(|linux| CountedOn::new(&emulator, plan, linux)).transpose()?;
    let file = parts.kvm_counts();
    let machine = parts.machine(emulator, linux)?;
    let (slat, mut difference) = twice(plan, &machine, Boot::Hypervisor, Shown::Lines, session)?;
    let mut measured = Measured::new(plan, slat, not_run);
    if let Some(counted_on) = counted_on {
        let (kvm, differs) = twice(plan, &machine, Boot::Kvm, Shown::Lines, session)?;
        if plan.nr_cpus == 1 {
            difference = difference.or(differs);
        }
        // The comparison is with one CPU.
        if plan.nr_cpus == 1
            && difference.is_none()
            && let Err(error) = saved::write(&file, &counted_on, &kvm)
        {
            let file = file.display();
            plan.tell(session, &format!("KVM's counts are not saved for slat compare: {file}: {error}\n"))?;
        }
        measured.kvm = Some(kvm);
    }
    Ok(conclude(plan, &machine, &measured, difference))
}

/// The same beside KVM's counts of an earlier run. What is missing is not downloaded, and the
/// hypervisor is built and started only where nothing is missing.
pub(crate) fn run_beside_saved(args: &MetalArgs, session: &Session) -> Result<Outcome, Failure> {
    let plan = Plan::new(args)?;
    let parts = Parts::new(args, &plan, Downloads::Refused, 4, session);
    let saved = Saved::read(parts.kvm_counts())?;
    let emulator = parts.emulator()?;
    let kvm = saved.of(&CountedOn::new(&emulator, &plan, &parts.kvm_linux()?)?)?;
    let machine = parts.machine(emulator, None)?;
    let (slat, difference) = twice(&plan, &machine, Boot::Hypervisor, Shown::Nothing, session)?;
    let measured = Measured { kvm: Some(kvm), ..Measured::new(&plan, slat, None) };
    Ok(conclude(&plan, &machine, &measured, difference))
}

/// Runs a machine twice: the counts of both runs, and what differs between them.
fn twice(
    plan: &Plan,
    machine: &Machine,
    boot: Boot,
    shown: Shown,
    session: &Session,
) -> Result<(Counts, Option<String>), Failure> {
    let count = |shown| checked(plan, machine.run(plan, boot, shown, session, &|| {})?);
    let (first, second) = (count(shown)?, count(Shown::Nothing)?);
    let difference = first.difference(&second);
    Ok((first.with(&second), difference))
}

/// The outcome of both machines, or of slat's alone.
fn conclude(plan: &Plan, machine: &Machine, measured: &Measured, difference: Option<String>) -> Outcome {
    let mut results = results_of(plan, machine, figures(measured));
    results.not_run.extend(measured.not_run.clone());
    let outcome = Outcome::new(results, |out| {
        print(out, measured, &measured_on(machine));
        if difference.is_none() {
            add_line!(out, "\nVerified: a loop of known length counts as that, and {}.", equality(measured));
        }
    });
    let shortfall = difference.map(|what| Failure::Check(format!("two runs did not count the same: {what}")));
    Outcome { shortfall, ..outcome }
}

/// How equal the runs of each machine are, in words.
fn equality(measured: &Measured) -> String {
    match &measured.kvm {
        Some(kvm) if measured.nr_cpus > 1 => {
            format!("two runs of slat count the same; those of KVM differ by up to {:.1}%", 100.0 * kvm.spread())
        }
        _ => "two runs count the same".to_owned(),
    }
}

/// The counts of a machine that passed.
fn checked(plan: &Plan, ended: Ended) -> Result<Counts, Failure> {
    match verdict(plan, &ended) {
        Ok(Verdict::Pass(_)) => Ok(Counts(ended.figures)),
        Ok(Verdict::Fail(_, why) | Verdict::Error(why)) | Err(why) => Err(Failure::Check(why)),
    }
}

fn figures(measured: &Measured) -> Vec<Figure> {
    let systems = System::all(measured.architecture);
    let mut figures = Vec::new();
    let all_events = || EVENTS.iter().chain(&TOGETHER);
    for &(event, _) in all_events() {
        for &system in systems {
            let labels = system.labels(measured.nr_cpus);
            let figure = |samples: &[f64]| Figure::new(event, Unit::Instructions, &labels, samples.iter().copied());
            figures.extend(measured.samples(event, system).map(figure));
        }
        let ratio = measured.ratio(event);
        figures.extend(ratio.map(|ratio| {
            let labels = labels([("cpus", json!(measured.nr_cpus))]);
            Figure::new(format!("{event}_ratio"), Unit::Ratio, &labels, [ratio]).with_better(Some(Better::More))
        }));
    }
    // All else as it came: shares of the above, and what was needed to count.
    let is_event = |name: &str| {
        all_events().any(|(event, _)| {
            let ending = name.strip_prefix(event).map(|rest| rest.trim_start_matches('_'));
            ending.is_some_and(|ending| ending.is_empty() || systems.iter().any(|of| of.ending == ending))
        })
    };
    let others = [("slat", Some(&measured.slat)), ("kvm", measured.kvm.as_ref())];
    for (system, counts) in others {
        for (name, unit, samples) in counts.iter().flat_map(|counts| &counts.0).filter(|(name, ..)| !is_event(name)) {
            let labels = labels([("system", json!(system)), ("cpus", json!(measured.nr_cpus))]);
            figures.push(Figure::new(name, *unit, &labels, samples.iter().copied()).with_better(None));
        }
    }
    figures
}

fn number(value: Option<f64>) -> String {
    or_nothing(value.map(|value| digits(value, true)))
}

fn print(out: &mut String, measured: &Measured, measured_on: &str) {
    match measured.nr_cpus {
        1 => add_line!(out, "\nInstructions for each event; {measured_on}, one CPU, 4096 pages.\n"),
        nr_cpus => {
            add_line!(out, "\nInstructions of {nr_cpus} CPUs together for each event; {measured_on}, 4096 pages.\n");
        }
    }
    let systems = System::all(measured.architecture);
    let titles = systems.iter().map(|system| system.title.to_owned());
    let mut table = table::figures(["Event".to_owned()].into_iter().chain(titles).chain(["KVM / slat".to_owned()]));
    for &(event, title) in measured.events() {
        let cells = systems.iter().map(|&system| number(measured.count(event, system)));
        let ratio = or_nothing(measured.ratio(event).map(times));
        table.add_row([title.to_owned()].into_iter().chain(cells).chain([ratio]));
    }
    add_line!(out, "{table}\n");
    let (peer, slat) = (System::peer(measured.architecture).title, System::SLAT_LAZY.title);
    if measured.nr_cpus == 1 {
        print_parts(out, measured);
        add_line!(
            out,
            "\nKVM / slat: \"{peer}\" by \"{slat}\". A fault: from the guest's write until it goes on, by the same code\n\
             in both guests; the frame is there, and zeroed. KVM's calls have the system call with them; its\n\
             invalidations are what its notifier adds to madvise(). See docs/instructions.md."
        );
    } else {
        add_line!(
            out,
            "KVM / slat: \"{peer}\" by \"{slat}\". All CPUs write at the same time, on the same page-table pages. What\n\
             they execute together is divided by their faults. The emulator runs them in turns. See\n\
             docs/instructions.md."
        );
    }
    let per_fault = measured.kvm.as_ref().and_then(|kvm| kvm.get("pages_per_demand_fault_shadow"));
    if let Some(nr_pages) = per_fault.filter(|&nr_pages| nr_pages > 1.0) {
        add_line!(out, "A demand fault of KVM's shadow page tables maps {} pages.", digits(nr_pages, true));
    }
    if measured.kvm.is_some() {
        add_line!(out, "The words of KVM's kernel: {}.", measured.kvm_words);
    }
    if let Some(not_run) = &measured.not_run {
        add_line!(out, "{not_run}");
    }
}

/// Where the instructions of slat's faults go.
fn print_parts(out: &mut String, measured: &Measured) {
    let faults = [("Demand fault", "demand_fault", "demand_fault_engine")];
    let mut table =
        table::figures(["Of it", "exit and entry", "engine", "  in it the host's answer"].map(str::to_owned));
    let protect = ("Write-protect fault", "write_protect_fault_lazy", "write_protect_fault_engine_lazy");
    for (title, whole, engine) in faults.into_iter().chain([protect]) {
        let (whole, engine) = (measured.slat.get(whole), measured.slat.get(engine));
        let rest = whole.zip(engine).map(|(whole, engine)| whole - engine);
        // Giving write access back asks the host nothing.
        let host = if title == protect.0 { "none".to_owned() } else { number(measured.slat.get("host_resolve")) };
        table.add_row([title.to_owned(), number(rest), number(engine), host]);
    }
    add_line!(out, "{table}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantity::NOTHING;

    fn counts<const N: usize>(counts: [(&str, f64); N]) -> Counts {
        Counts(counts.map(|(name, count)| (name.to_owned(), Unit::Instructions, vec![count])).into())
    }

    fn measured() -> Measured {
        let slat = counts([
            ("clock", 4.0),
            ("demand_fault", 400.0),
            ("demand_fault_engine", 300.0),
            ("get_lazy", 0.5),
            ("get_leaves", 0.25),
        ]);
        let kvm = counts([("demand_fault_tdp", 2000.0), ("demand_fault_shadow", 8000.0), ("get_tdp", 1.0)]);
        let (architecture, nr_cpus) = (Architecture::X86, 1);
        Measured { architecture, nr_cpus, slat, kvm: Some(kvm), kvm_words: String::new(), not_run: None }
    }

    fn text(measured: &Measured) -> String {
        let mut text = String::new();
        print(&mut text, measured, "CPUs");
        text
    }

    #[test]
    fn each_event_has_its_system() {
        let measured = measured();
        let count = |event, system| measured.count(event, system);
        assert_eq!(count("demand_fault", System::SLAT_LEAVES), Some(400.0));
        assert_eq!(count("get", System::SLAT_LEAVES), Some(0.25));
        assert_eq!(count("get", System::KVM_SHADOW), None);
        assert_eq!((measured.ratio("demand_fault"), measured.ratio("get")), (Some(5.0), Some(2.0)));
        let alone = Measured { kvm: None, ..measured };
        assert_eq!((alone.count("get", System::KVM_TDP), alone.ratio("get")), (None, None));
    }

    #[test]
    fn each_architecture_has_the_columns_of_its_kvm() {
        let kvm = || counts([("demand_fault_stage2", 1200.0), ("demand_fault_gstage", 1600.0)]);
        for (architecture, ratio, title) in
            [(Architecture::Arm, 3.0, "KVM, stage 2"), (Architecture::RiscV, 4.0, "KVM, G-stage")]
        {
            assert!(System::all(architecture).contains(&System::peer(architecture)));
            let measured = Measured { architecture, kvm: Some(kvm()), ..measured() };
            assert_eq!(measured.ratio("demand_fault"), Some(ratio));
            let text = text(&measured);
            assert!(text.contains(title) && !text.contains("TDP"), "{text}");
        }
    }

    #[test]
    fn results_have_each_figure_once() {
        let figures = figures(&measured());
        let find = |name: &str| figures.iter().filter(|figure| figure.name == name).count();
        assert_eq!((find("demand_fault"), find("demand_fault_ratio"), find("get")), (4, 1, 3));
        assert_eq!((find("clock"), find("demand_fault_engine"), find("demand_fault_tdp")), (1, 1, 0));
    }

    #[test]
    fn several_cpus_have_a_table_of_their_own() {
        let slat = counts([("demand_fault_mean_lazy", 450.0), ("invalidate_page_running_lazy", 900.0)]);
        let mut kvm = counts([("demand_fault_mean_tdp", 2727.0), ("demand_fault_mean_shadow", 8000.0)]);
        kvm = kvm.with(&counts([("demand_fault_mean_tdp", 2700.0)]));
        let measured = Measured { nr_cpus: 4, slat, kvm: Some(kvm), ..measured() };
        let text = text(&measured);
        assert!(text.contains("Instructions of 4 CPUs together") && !text.contains("Log on"), "{text}");
        // The least of both runs.
        let row = text.lines().find(|line| line.starts_with("| Demand fault, mean ")).unwrap();
        assert!(row.contains(" 2700 ") && row.ends_with(" 6.00× |"), "{row}");
        assert!(equality(&measured).ends_with("those of KVM differ by up to 1.0%"));
        let figures = figures(&measured);
        assert!(figures.iter().all(|figure| figure.labels["cpus"] == json!(4)));
        assert_eq!(figures.iter().filter(|figure| figure.name == "demand_fault_mean").count(), 3);
    }

    #[test]
    fn runs_that_count_differently_are_found() {
        let one = counts([("clock", 4.0), ("get_lazy", 0.5)]);
        assert_eq!(one.difference(&one.clone()), None);
        let other = counts([("clock", 4.0), ("get_lazy", 0.75)]);
        assert!(one.difference(&other).is_some_and(|what| what.starts_with("get_lazy: ")));
        assert!(one.difference(&counts([("clock", 4.0)])).is_some());
        assert!(counts([("clock", 4.0)]).difference(&one).is_some());
    }

    #[test]
    fn what_is_missing_is_a_dash() {
        let not_run = Some(NotRun { what: "KVM".to_owned(), why: "no package".to_owned() });
        let text = text(&Measured { kvm: None, not_run, ..measured() });
        let row = text.lines().find(|line| line.starts_with("| Demand fault ")).unwrap();
        assert_eq!(row.matches(NOTHING).count(), 3, "{row}");
        assert!(text.contains("Not measured: KVM: no package."), "{text}");
    }
}
