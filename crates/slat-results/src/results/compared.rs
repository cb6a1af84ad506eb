//! What `slat compare` adds to the results: the systems, with the figures that are compared.

use serde::{Deserialize, Serialize};

use super::{Better, NotRun, Results};
use crate::quantity::Unit;
pub use crate::statistics::Verdict;
use crate::statistics::{CONFIDENCE, Ratio, Samples, judge, ratio};

/// All systems, and what slat claims.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Compared {
    pub systems: Vec<System>,
    pub claims: Claims,
}

/// One of the systems.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct System {
    pub system: String,
    pub title: String,
    /// Published facts that are no figures of a comparison.
    pub published_note: String,
    pub comparisons: Vec<Evaluation>,
    pub not_run: Vec<NotRun>,
    /// The results of the experiments.
    pub experiments: Vec<Results>,
}

/// What a side is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// slat itself.
    Slat,
    /// The starting point of the published work, run by the same engine.
    Baseline,
    /// Other software.
    Peer,
    /// A prediction of the model of a large machine: it stands beside what was published, and
    /// decides nothing.
    Model,
}

impl Role {
    pub fn name(self) -> &'static str {
        match self {
            Role::Slat => "slat",
            Role::Baseline => "baseline",
            Role::Peer => "peer",
            Role::Model => "model",
        }
    }
}

/// The figures that the published work gives, in the comparison's unit.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Published {
    /// The machine.
    pub on: String,
    /// The baseline's figure.
    pub baseline: Option<f64>,
    /// The proposal's figure.
    pub proposed: Option<f64>,
    /// The name of the side that does what the proposal does.
    #[serde(default)]
    pub proposed_side: String,
    /// How many times as good as the baseline the proposal is, at least and at most, where only
    /// that was published.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gain: Option<[f64; 2]>,
}

impl Published {
    /// With the figures of the baseline and of the proposal, which is `side`.
    pub fn new(on: &str, [baseline, proposed]: [Option<f64>; 2], side: &str) -> Published {
        Published { on: on.to_owned(), baseline, proposed, proposed_side: side.to_owned(), gain: None }
    }
}

/// A figure of several sides.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Evaluation {
    pub name: String,
    pub title: String,
    pub unit: Unit,
    pub better: Better,
    pub published: Option<Published>,
    /// slat's comes first; of predictions that of the proposal.
    pub sides: Vec<Side>,
}

/// A side that was measured.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Side {
    pub name: String,
    pub role: Role,
    pub measured_on: String,
    pub samples: Samples,
    /// How many times as good the first side is; `None` for that itself.
    pub ratio: Option<Ratio>,
    pub claim: Option<Claim>,
    /// Why slat claims nothing here.
    #[serde(default)]
    pub unclaimed: Option<String>,
    /// What was published of the predicted figure, and the error of the prediction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted: Option<Predicted>,
}

/// A prediction beside what was published.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Predicted {
    pub published: f64,
    /// By which part of the published figure the predicted one is above it.
    pub error: f64,
}

impl Predicted {
    /// The prediction of samples; `None` if there are none, or nothing that errors are a part of
    /// was published.
    pub fn new(samples: &Samples, published: f64) -> Option<Predicted> {
        let error = samples.median() / published - 1.0;
        error.is_finite().then_some(Predicted { published, error })
    }
}

/// What slat claims of a ratio, and whether it holds.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Claim {
    /// The ratio is above this.
    pub above: f64,
    pub verdict: Verdict,
}

impl Verdict {
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Held => "held",
            Verdict::Tie => "tie",
            Verdict::Lost => "LOST",
        }
    }
}

impl Evaluation {
    /// How many times as good samples are as others. More is better.
    pub fn times_as_good(&self, samples: &Samples, others: &Samples) -> Option<Ratio> {
        let [of, to] = self.dividend_and_divisor(samples, others);
        ratio(of, to, CONFIDENCE)
    }

    /// Judges the claim that samples are more than `above` times as good as others.
    pub fn claim(&self, above: f64, samples: &Samples, others: &Samples) -> Claim {
        let [of, to] = self.dividend_and_divisor(samples, others);
        Claim { above, verdict: judge(above, of, to) }
    }

    /// What is divided by what, so that more is better.
    fn dividend_and_divisor<'s>(&self, samples: &'s Samples, others: &'s Samples) -> [&'s Samples; 2] {
        match self.better {
            Better::Less => [others, samples],
            Better::More => [samples, others],
        }
    }

    /// How many times as good as its baseline the published work is, at least and at most.
    pub fn published_gain(&self) -> Option<[f64; 2]> {
        let published = self.published.as_ref()?;
        let of_figures = || {
            let (baseline, proposed) = (published.baseline?, published.proposed?);
            Some(match self.better {
                Better::Less => baseline / proposed,
                Better::More => proposed / baseline,
            })
        };
        published.gain.or_else(|| of_figures().map(|gain| [gain; 2]))
    }

    /// Whether the predictions have the order of what was published; `None`: there are less than
    /// three, of which an order would say little.
    pub fn has_published_order(&self) -> Option<bool> {
        let predicted = |side: &Side| Some((side.predicted?.published, side.samples.median()));
        let mut all: Vec<(f64, f64)> = self.sides.iter().filter_map(predicted).collect();
        all.sort_by(|one, other| one.0.total_cmp(&other.0));
        (all.len() > 2).then(|| all.is_sorted_by(|one, other| one.1 < other.1 || one.0 == other.0))
    }
}

/// All claims of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claims {
    pub made: usize,
    pub held: usize,
    /// The claims that this machine cannot tell, in words.
    pub ties: Vec<String>,
    /// The lost claims, in words.
    pub lost: Vec<String>,
}
