//! A comparison: one figure of slat and of its baselines and peers, all from one run of one
//! experiment.
//!
//! A [`Comparison`] describes the figure; an [`Evaluation`] has what was measured, without the
//! sides that were not. The unit, and what is better, are those of the figure.

use serde_json::Value;

use crate::results::compared::{Evaluation, Predicted, Published, Role, Side as Measured};
use crate::results::{Figure, MODELLED_CPUS, Results, SOFTWARE_CPUS};

/// What figures of calls into the engine, its baselines and crates are measured on.
pub(super) const HOST_CPUS: &str = "the host's CPUs";
/// What figures are measured on that a model adds up from times and counts of software CPUs.
pub(super) const MODELLED: &str = "a model, software CPUs";
/// What figures are that an emulator has counted.
pub(super) const EMULATED: &str = "emulated machine, instructions";
/// What figures of the real KVM are measured on.
pub(super) const HARDWARE: &str = "hardware";

/// A side of a comparison: its name, and the labels of its figure.
#[derive(Clone, Debug)]
pub(super) struct Side {
    pub(super) name: String,
    pub(super) role: Role,
    pub(super) labels: Vec<(&'static str, Value)>,
    pub(super) measured_on: &'static str,
    /// slat claims a ratio above this.
    pub(super) claim: Option<f64>,
    /// Why slat claims nothing on this machine.
    pub(super) unclaimed: Option<&'static str>,
    /// What was published of a predicted figure.
    pub(super) published: Option<f64>,
}

impl Side {
    pub(super) fn new(name: impl Into<String>, role: Role, labels: &[(&'static str, &str)]) -> Side {
        let labels = labels.iter().map(|&(name, value)| (name, value.into())).collect();
        Side {
            name: name.into(),
            role,
            labels,
            measured_on: SOFTWARE_CPUS,
            claim: None,
            unclaimed: None,
            published: None,
        }
    }

    pub(super) fn measured_on(self, measured_on: &'static str) -> Side {
        Side { measured_on, ..self }
    }

    /// A figure that the model predicts.
    pub(super) fn predicted(name: impl Into<String>, labels: &[(&'static str, &str)], published: Option<f64>) -> Side {
        Side { published, ..Side::new(name, Role::Model, labels).measured_on(MODELLED_CPUS) }
    }

    pub(super) fn claimed(self, above: f64) -> Side {
        Side { claim: Some(above), ..self }
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
    pub(super) published: Option<Published>,
    pub(super) sides: Vec<Side>,
}

impl Comparison {
    /// The side that the others are compared with: slat's, or the first of predictions.
    pub(super) fn first(&self) -> Option<&Side> {
        let of_slat = self.sides.iter().find(|side| side.role == Role::Slat);
        of_slat.or_else(|| self.sides.first().filter(|side| side.role == Role::Model))
    }

    /// Evaluates the comparison on the results of the experiments; `None` for those that failed.
    /// `None` if the first side was not measured, or nothing is better.
    pub(super) fn evaluate(&self, experiments: &[Option<Results>]) -> Option<Evaluation> {
        let results = &experiments.get(self.experiment)?.as_ref()?.results;
        let first = self.first()?;
        let figure = self.find(results, first)?;
        let mut evaluation = Evaluation {
            name: self.name.clone(),
            title: self.title.clone(),
            unit: figure.unit,
            better: figure.better?,
            published: self.published.clone(),
            sides: vec![measured(first, figure)],
        };
        for side in self.sides.iter().filter(|side| !std::ptr::eq(*side, first)) {
            let Some(other) = self.find(results, side) else { continue };
            let ratio = evaluation.times_as_good(&figure.samples, &other.samples);
            let claim = side.claim.filter(|_| ratio.is_some());
            let claim = claim.map(|above| evaluation.claim(above, &figure.samples, &other.samples));
            evaluation.sides.push(Measured { ratio, claim, ..measured(side, other) });
        }
        Some(evaluation)
    }

    fn find<'a>(&self, results: &'a [Figure], side: &Side) -> Option<&'a Figure> {
        let labels = || self.labels.iter().chain(&side.labels);
        let has = |figure: &Figure| labels().all(|(label, value)| figure.labels.get(*label) == Some(value));
        results.iter().find(|figure| figure.name == self.figure && has(figure))
    }
}

/// A side without its comparison with the first.
fn measured(side: &Side, figure: &Figure) -> Measured {
    Measured {
        name: side.name.clone(),
        role: side.role,
        measured_on: side.measured_on.to_owned(),
        samples: figure.samples.clone(),
        ratio: None,
        claim: None,
        unclaimed: side.unclaimed.map(str::to_owned),
        predicted: side.published.and_then(|published| Predicted::new(&figure.samples, published)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantity::Unit;
    use crate::results::compared::{Claim, Verdict};
    use crate::results::{Better, Host, labels};

    fn figure(samples: &[f64], better: Better, lock: &str) -> Figure {
        let labels = labels([("lock", lock.into()), ("paging", "flat".into())]);
        Figure::new("time", Unit::Seconds, &labels, samples.iter().copied()).with_better(Some(better))
    }

    fn comparison() -> Comparison {
        Comparison {
            name: "a".to_owned(),
            title: "A".to_owned(),
            experiment: 0,
            figure: "time",
            labels: vec![("paging", "flat".into())],
            published: None,
            sides: vec![
                Side::new("exclusive", Role::Baseline, &[("lock", "exclusive")]).claimed(2.0),
                Side::new("none", Role::Slat, &[("lock", "none")]),
                Side::new("kvm", Role::Peer, &[("lock", "kvm")]).claimed(9.0),
            ],
        }
    }

    fn evaluate(figures: Vec<Figure>) -> Option<Evaluation> {
        comparison().evaluate(&[Some(Results::new("x", Value::Null, Host::default(), figures))])
    }

    #[test]
    fn sides_that_are_missing_are_left_out_and_slat_comes_first() {
        let made = evaluate(vec![
            figure(&[8.0, 8.1, 7.9], Better::Less, "exclusive"),
            figure(&[2.0, 2.1, 1.9], Better::Less, "none"),
        ]);
        let made = made.unwrap();
        let [slat, exclusive] = &made.sides[..] else { panic!("{made:?}") };
        assert_eq!((slat.name.as_str(), slat.samples.len(), slat.ratio), ("none", 3, None));
        assert_eq!(exclusive.ratio.unwrap().value, 4.0);
        assert_eq!(exclusive.claim, Some(Claim { above: 2.0, verdict: Verdict::Held }));
    }

    #[test]
    fn a_claim_is_lost_if_the_ratio_is_below_and_a_tie_if_nothing_shows_it() {
        let verdict = |slat: &[f64], exclusive: &[f64]| {
            let figures = vec![figure(exclusive, Better::More, "exclusive"), figure(slat, Better::More, "none")];
            evaluate(figures).unwrap().sides[1].claim.unwrap().verdict
        };
        assert_eq!(verdict(&[2.0, 2.1, 1.9], &[8.0, 8.1, 7.9]), Verdict::Lost);
        assert_eq!(verdict(&[2.0, 2.1, 1.9], &[1.0, 1.1, 0.9]), Verdict::Tie);
        assert_eq!(verdict(&[9.0], &[1.0]), Verdict::Tie);
    }

    #[test]
    fn predictions_are_compared_with_the_first_and_have_errors_and_an_order() {
        let predicted = |published: [f64; 3]| {
            let locks = ["shared", "exclusive", "none"];
            let sides = locks.iter().zip(published);
            let sides = sides.map(|(&lock, of)| Side::predicted(lock, &[("lock", lock)], Some(of))).collect();
            let figures = locks.iter().zip([2.0, 8.0, 1.0]).map(|(lock, s)| figure(&[s], Better::Less, lock));
            let results = Results::new("x", Value::Null, Host::default(), figures.collect());
            Comparison { sides, ..comparison() }.evaluate(&[Some(results)]).unwrap()
        };
        let made = predicted([1.6, 10.0, 1.0]);
        assert_eq!(made.sides[1].ratio.unwrap().value, 4.0);
        let errors = made.sides.iter().map(|side| (side.predicted.unwrap().error * 100.0).round());
        assert_eq!(errors.collect::<Vec<_>>(), [25.0, -20.0, 0.0]);
        assert!(made.sides.iter().all(|side| side.claim.is_none() && side.measured_on == "modelled CPUs"));
        assert_eq!(made.has_published_order(), Some(true));
        assert_eq!(predicted([1.6, 10.0, 3.0]).has_published_order(), Some(false));
    }

    #[test]
    fn without_slats_side_there_is_no_comparison() {
        assert_eq!(comparison().evaluate(&[]), None);
        assert_eq!(comparison().evaluate(&[None]), None);
        assert_eq!(evaluate(vec![figure(&[8.0], Better::Less, "exclusive")]), None);
        assert_eq!(evaluate(vec![figure(&[8.0], Better::Less, "none").with_better(None)]), None);
    }
}
