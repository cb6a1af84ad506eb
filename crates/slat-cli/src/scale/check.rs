//! `slat scale --check`: all oracles on modelled machines, with one seed after another, for a time.
//!
//! The parity of a seed decides the shape of its run. So a seed replays exactly, wherever it was in
//! the sequence.

use std::time::{Duration, Instant};

use serde_json::json;
use slat_model::error::ModelError;
use slat_model::experiment::check::{Check, Checked};
use slat_model::parameters::Parameters;
use slat_model::topology::Topology;
use slat_model::version::{Seed, VERSION};

use super::{ScaleArgs, host};
use crate::failure::Failure;
use crate::quantity::{Unit, digits};
use crate::results::{Figure, Outcome, Results, labels};
use crate::session::Session;

const TOPOLOGY: &str = "2x48";

/// Pages of the guest, and accesses of each vCPU.
const NR_PAGES: u64 = 1200;
const NR_ACCESSES: u64 = 200;

/// What all runs have done.
#[derive(Clone, Debug, Default)]
struct Totals {
    nr_seeds: u64,
    checked: Checked,
}

/// The run of a seed: many vCPUs, each with a CPU, or more vCPUs than CPUs.
fn check(seed: u64) -> Check {
    let (nr_vcpus, nr_cpus) = if seed.is_multiple_of(2) { (92, 96) } else { (12, 3) };
    Check { nr_vcpus, nr_cpus, nr_pages: NR_PAGES, nr_accesses: NR_ACCESSES, seed }
}

/// Runs seeds until the time is over. The time is checked between two runs.
pub(super) fn run(args: &ScaleArgs, parameters: &Parameters, session: &Session) -> Result<Outcome, Failure> {
    let topology = Topology::named(TOPOLOGY)?;
    let end = Instant::now() + Duration::from_secs(args.seconds);
    let progress = session.progress(args.seconds);
    let mut totals = Totals::default();
    loop {
        let check = check(args.seed.0.wrapping_add(totals.nr_seeds));
        progress.begin(title(&check));
        let run = check.run(&topology, parameters).map_err(|error| failure(args, &check, error))?;
        totals.add(&run.checked);
        let outcome = Outcome::new(totals.results(args), |out| totals.print(out, args));
        if Instant::now() >= end {
            return Ok(outcome);
        }
        session.so_far(outcome);
    }
}

fn title(check: &Check) -> String {
    format!("seed {}, {} vCPUs on {} CPUs", Seed(check.seed), check.nr_vcpus, check.nr_cpus)
}

fn replay(args: &ScaleArgs, seed: &str) -> String {
    let parameters = args.parameters.as_ref().map(|file| format!(" --parameters {file}")).unwrap_or_default();
    format!("slat scale --check{parameters} --seed {seed} --seconds 1")
}

/// The failure of a run, with what replays it.
fn failure(args: &ScaleArgs, check: &Check, error: ModelError) -> Failure {
    let what = match Failure::from(error) {
        Failure::Check(what) => what,
        other => return other,
    };
    let replay = replay(args, &Seed(check.seed).to_string());
    Failure::Check(format!("{}: {what}; replay it with `{replay}`", title(check)))
}

impl Totals {
    fn add(&mut self, run: &Checked) {
        self.nr_seeds += 1;
        let all = &mut self.checked;
        all.nr_accesses += run.nr_accesses;
        all.nr_harvests += run.nr_harvests;
        all.nr_moves += run.nr_moves;
        all.nr_others += run.nr_others;
        all.nr_toggles += run.nr_toggles;
        all.nr_retries += run.nr_retries;
    }

    /// Names in results and in words, in the order of the output.
    fn counts(&self) -> [(&'static str, &'static str, u64); 7] {
        let Checked { nr_accesses, nr_harvests, nr_moves, nr_others, nr_toggles, nr_retries } = self.checked;
        [
            ("seeds", "seeds", self.nr_seeds),
            ("checked_accesses", "accesses", nr_accesses),
            ("harvests", "harvests", nr_harvests),
            ("moves", "moves", nr_moves),
            ("others", "others", nr_others),
            ("toggles", "toggles of logging", nr_toggles),
            ("retries", "retries", nr_retries),
        ]
    }

    fn print(&self, out: &mut String, args: &ScaleArgs) {
        let counts = self.counts().map(|(_, words, nr)| format!("{words} {}", digits(nr as f64, true)));
        add_line!(
            out,
            "{}: all oracles held\n\n\
             Seeds from {}, on the topology {TOPOLOGY}: even ones with 92 vCPUs on 96 CPUs, odd ones with 12 vCPUs on\n\
             3 CPUs. Others are splits, recoveries, and calls that age. To replay seed N:\n\
             {}",
            counts.join(", "),
            args.seed,
            replay(args, &format!("v{VERSION}:N"))
        );
    }

    fn results(&self, args: &ScaleArgs) -> Results {
        let config = json!({
            "check": true,
            "topology": TOPOLOGY,
            "parameters": args.parameters.as_deref().unwrap_or("built-in"),
            "seconds": args.seconds,
            "model_version": VERSION,
            "first_seed": args.seed.0,
            "last_seed": args.seed.0.wrapping_add(self.nr_seeds.saturating_sub(1)),
        });
        let figures = self.counts().map(|(name, _, nr)| Figure::new(name, Unit::Count, &labels([]), [nr as f64]));
        Results::new("scale", config, host(), figures.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::parse;

    #[test]
    fn a_failed_check_names_the_seed_and_what_replays_it() {
        let args: ScaleArgs = parse("slat scale --check --seed 5 --parameters p.toml").unwrap();
        let failed = failure(&args, &check(7), ModelError::Check("page 3 is lost".to_owned()));
        assert!(matches!(failed, Failure::Check(_)), "{failed}");
        assert_eq!(
            failed.to_string(),
            "check failed: seed v1:7, 12 vCPUs on 3 CPUs: page 3 is lost; replay it with `slat scale --check --parameters \
             p.toml --seed v1:7 --seconds 1`"
        );
        let usage = ModelError::Topology { name: "x".to_owned(), why: "no CPU".to_owned() };
        assert!(matches!(failure(&args, &check(7), usage), Failure::Usage(_)));
    }

    #[test]
    fn seeds_alternate_and_add_up() {
        assert_eq!([4, 5, 6].map(|seed| check(seed).nr_vcpus), [92, 12, 92]);
        let mut totals = Totals::default();
        let once = Checked { nr_accesses: 6, nr_harvests: 5, nr_moves: 4, nr_others: 3, nr_toggles: 2, nr_retries: 1 };
        totals.add(&once);
        totals.add(&once);
        assert_eq!(totals.counts().map(|(_, _, nr)| nr), [2, 12, 10, 8, 6, 4, 2]);
        let args = parse("slat scale --check --seed 5").unwrap();
        let results = totals.results(&args);
        assert_eq!((&results.config["first_seed"], &results.config["last_seed"]), (&json!(5), &json!(6)));
    }
}
