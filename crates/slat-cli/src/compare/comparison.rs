//! A comparison: one figure of slat and of its baselines and peers, all from one run of one
//! experiment.
//!
//! A [`Comparison`] describes the figure; an [`Evaluation`] has what was measured, without the
//! sides that were not. Ratios are of medians, which one disturbed run does not change; of means
//! where an experiment has no medians.

use serde::Serialize;
use serde_json::Value;

/// Which values of a figure are better.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Better {
    Less,
    More,
}

/// What a side is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Role {
    /// slat itself.
    Slat,
    /// The starting point of the published work, run by the same engine.
    Baseline,
    /// Other software.
    Peer,
}

/// The figures that the published work gives, in the comparison's unit.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(super) struct Published {
    /// The machine.
    pub(super) on: &'static str,
    /// The baseline's figure.
    pub(super) baseline: Option<f64>,
    /// The proposal's figure.
    pub(super) proposed: Option<f64>,
}

/// What figures of the software machine are measured on.
pub(super) const SOFTWARE_CPUS: &str = "software CPUs";
/// What figures of calls are measured on while no guest runs.
pub(super) const HOST_CPUS: &str = "the host's CPUs";
/// What figures of the real KVM are measured on.
pub(super) const HARDWARE: &str = "hardware";

/// A side of a comparison: its name, and the labels of its figure.
#[derive(Clone, Debug)]
pub(super) struct Side {
    pub(super) name: String,
    pub(super) role: Role,
    pub(super) labels: Vec<(&'static str, Value)>,
    pub(super) measured_on: &'static str,
    /// The ratio that slat claims at least.
    pub(super) claim: Option<f64>,
}

impl Side {
    pub(super) fn new(name: impl Into<String>, role: Role, labels: &[(&'static str, &str)]) -> Side {
        let labels = labels.iter().map(|&(name, value)| (name, value.into())).collect();
        Side { name: name.into(), role, labels, measured_on: SOFTWARE_CPUS, claim: None }
    }

    pub(super) fn measured_on(self, measured_on: &'static str) -> Side {
        Side { measured_on, ..self }
    }

    pub(super) fn claimed(self, at_least: f64) -> Side {
        Side { claim: Some(at_least), ..self }
    }
}

/// A figure and its sides.
#[derive(Clone, Debug)]
pub(super) struct Comparison {
    /// Unique among the results.
    pub(super) name: String,
    pub(super) title: String,
    /// The number of the experiment, among those of the system.
    pub(super) experiment: usize,
    /// The figure's name there.
    pub(super) figure: &'static str,
    /// The labels of the figure on all sides.
    pub(super) labels: Vec<(&'static str, Value)>,
    pub(super) unit: &'static str,
    pub(super) better: Better,
    pub(super) published: Option<Published>,
    pub(super) sides: Vec<Side>,
}

/// Whether the claim of slat holds.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(super) struct Claim {
    pub(super) at_least: f64,
    pub(super) holds: bool,
}

/// A side that was measured.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(super) struct Measured {
    pub(super) name: String,
    pub(super) role: Role,
    pub(super) mean: f64,
    pub(super) deviation: Option<f64>,
    pub(super) runs: u64,
    pub(super) measured_on: &'static str,
    /// How many times as good slat is; `None` for slat itself.
    pub(super) ratio: Option<f64>,
    pub(super) claim: Option<Claim>,
    #[serde(skip)]
    median: f64,
}

/// A comparison that was made.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(super) struct Evaluation {
    pub(super) name: String,
    pub(super) title: String,
    pub(super) unit: &'static str,
    pub(super) better: Better,
    pub(super) published: Option<Published>,
    /// slat's comes first.
    pub(super) sides: Vec<Measured>,
}

impl Comparison {
    /// Evaluates the comparison on the objects of the experiments. `None` if slat's side was not
    /// measured.
    pub(super) fn evaluate(&self, experiments: &[Value]) -> Option<Evaluation> {
        let results = experiments.get(self.experiment)?.get("results")?.as_array()?;
        let find = |side: &Side| self.find(results, side);
        let mut sides: Vec<Measured> = self.sides.iter().filter_map(find).collect();
        sides.sort_by_key(|side| side.role != Role::Slat);
        let slat = sides.first().filter(|side| side.role == Role::Slat)?.median;
        for (side, of) in sides.iter_mut().filter(|side| side.role != Role::Slat).map(|side| {
            let of = self.sides.iter().find(|of| of.name == side.name);
            (side, of)
        }) {
            let (less, more) = match self.better {
                Better::Less => (slat, side.median),
                Better::More => (side.median, slat),
            };
            side.ratio = (less > 0.0).then(|| more / less);
            let claim = of.and_then(|of| of.claim).zip(side.ratio);
            side.claim = claim.map(|(at_least, ratio)| Claim { at_least, holds: ratio >= at_least });
        }
        Some(Evaluation {
            name: self.name.clone(),
            title: self.title.clone(),
            unit: self.unit,
            better: self.better,
            published: self.published,
            sides,
        })
    }

    fn find(&self, results: &[Value], side: &Side) -> Option<Measured> {
        let value = |name: &str| {
            let has = |figure: &Value, (label, value): &(&str, Value)| figure["labels"].get(label) == Some(value);
            let is_it = |figure: &&Value| {
                figure["name"] == name && self.labels.iter().chain(&side.labels).all(|label| has(figure, label))
            };
            results.iter().find(is_it)?["value"].as_f64()
        };
        let figure = value(self.figure)?;
        let of = |suffix: &str| value(&format!("{}_{suffix}", self.figure));
        // A figure that has a mean next to it is a median.
        let (mean, median) = match of("mean") {
            Some(mean) => (mean, figure),
            None => (figure, of("p50").unwrap_or(figure)),
        };
        Some(Measured {
            name: side.name.clone(),
            role: side.role,
            mean,
            deviation: of("deviation"),
            runs: value("runs").map_or(1, |runs| runs as u64),
            measured_on: side.measured_on,
            ratio: None,
            claim: None,
            median,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn figure(name: &str, value: f64, lock: &str) -> Value {
        json!({ "name": name, "value": value, "unit": "s", "labels": { "lock": lock, "paging": "flat" } })
    }

    fn comparison(better: Better, claim: f64) -> Comparison {
        Comparison {
            name: "a".to_owned(),
            title: "A".to_owned(),
            experiment: 0,
            figure: "time",
            labels: vec![("paging", "flat".into())],
            unit: "s",
            better,
            published: None,
            sides: vec![
                Side::new("exclusive", Role::Baseline, &[("lock", "exclusive")]).claimed(claim),
                Side::new("none", Role::Slat, &[("lock", "none")]),
                Side::new("kvm", Role::Peer, &[("lock", "kvm")]).claimed(9.0),
            ],
        }
    }

    fn experiments() -> Vec<Value> {
        vec![json!({ "results": [
            figure("time", 8.0, "exclusive"), figure("time_p50", 6.0, "exclusive"), figure("runs", 3.0, "exclusive"),
            figure("time", 2.0, "none"), figure("time_deviation", 0.5, "none"), figure("time_p50", 1.5, "none"),
        ] })]
    }

    #[test]
    fn ratios_are_of_medians_and_sides_that_are_missing_are_left_out() {
        let made = comparison(Better::Less, 4.0).evaluate(&experiments()).unwrap();
        let [slat, exclusive] = &made.sides[..] else { panic!("{made:?}") };
        assert_eq!((slat.name.as_str(), slat.mean, slat.deviation, slat.ratio), ("none", 2.0, Some(0.5), None));
        assert_eq!((exclusive.mean, exclusive.runs, exclusive.ratio), (8.0, 3, Some(4.0)));
        assert_eq!(exclusive.claim, Some(Claim { at_least: 4.0, holds: true }));
    }

    #[test]
    fn a_claim_is_lost_when_the_ratio_is_below() {
        let made = comparison(Better::More, 1.0).evaluate(&experiments()).unwrap();
        assert_eq!(made.sides[1].ratio, Some(0.25));
        assert!(!made.sides[1].claim.unwrap().holds);
    }

    #[test]
    fn without_slats_side_there_is_no_comparison() {
        assert_eq!(comparison(Better::Less, 1.0).evaluate(&[]), None);
        assert_eq!(comparison(Better::Less, 1.0).evaluate(&[json!({ "results": [] })]), None);
        let only_base = json!({ "results": [figure("time", 8.0, "exclusive")] });
        assert_eq!(comparison(Better::Less, 1.0).evaluate(&[only_base]), None);
    }

    #[test]
    fn a_figure_beside_its_mean_is_a_median() {
        let results = json!({ "results": [
            figure("time", 3.0, "none"), figure("time_mean", 4.0, "none"), figure("time", 6.0, "exclusive"),
        ] });
        let made = comparison(Better::Less, 1.0).evaluate(&[results]).unwrap();
        assert_eq!((made.sides[0].mean, made.sides[1].ratio), (4.0, Some(2.0)));
    }
}
