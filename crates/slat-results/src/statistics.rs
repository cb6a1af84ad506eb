//! The statistics of results: every median, quartile, mean, deviation and ratio is computed here.
//!
//! A figure has one sample for each run. The median and the quartiles describe it, since one
//! disturbed run does not change them. Two figures are compared by the ratio of their medians, with
//! a confidence interval.
//!
//! # The interval of a ratio
//! 1. The standard error of the logarithm of each median is that of Maritz and Jarrett: the exact
//!    deviation of the median over all bootstrap samples, which needs no random numbers. It is
//!    multiplied by `sqrt(n / (n - 1))`, as a bootstrap of few samples underestimates it.
//! 2. The interval is `ratio * exp(±t * e)`. `e` combines both errors, and `t` is the quantile of
//!    Student's distribution with the degrees of freedom of Welch's test.
//!
//! So few runs, or runs that differ much, give a wide interval. One run gives none.
//!
//! # Outliers
//! A thread that is preempted in one run of fifty makes that run a thousand times as long. The mean
//! and the deviation of all runs then describe this one run: the deviation exceeds the mean, and
//! the mean may be on the other side of a claim than the median. So no verdict uses them, and no
//! table shows them for runs.
//!
//! The mean is that of the *middle half* (`Samples::middle_mean`), which ignores a quarter of the
//! runs on each side. The deviation is that of the median distance from the median
//! (`Samples::robust_deviation`), which ignores any distance in less than half of the runs.
//!
//! [`judge`] decides a claim by three conditions: the interval of the ratio of the medians lies on
//! one side of the claim, the ratio of the middle means lies on the same side, and the robust
//! deviation of neither side exceeds its middle mean. So a verdict never contradicts the means or
//! the deviations that are shown. Outliers have no veto: where the deviation of all runs exceeds
//! their mean and the robust one does not, `Samples::has_outliers` makes a note of it.
//!
//! (J. S. Maritz, R. G. Jarrett: A note on estimating the variance of the sample median. Journal of
//! the American Statistical Association 73, 1978.)

use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, StudentsT};
use statrs::function::beta::beta_reg;
use statrs::statistics::{Data, Distribution, OrderStatistics};

/// The confidence of the interval of a single ratio.
pub const CONFIDENCE: f64 = 0.95;

/// The confidence where hundreds of figures are compared at once: with [`CONFIDENCE`], chance alone
/// would mark one of twenty.
pub const CONFIDENCE_OF_MANY: f64 = 0.99;

/// The standard deviation of a normal distribution, in median distances from the median.
const DEVIATIONS_OF_DISTANCE: f64 = 1.4826;

/// The samples of a figure, in the order of the runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Samples(Vec<f64>);

impl Samples {
    pub fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = f64> {
        self.0.iter().copied()
    }

    /// NaN without samples, as all statistics.
    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// The first and the third quartile.
    pub fn quartiles(&self) -> [f64; 2] {
        [0.25, 0.75].map(|share| self.quantile(share))
    }

    /// The value that this share of the samples does not exceed, interpolated between samples.
    pub fn quantile(&self, share: f64) -> f64 {
        Data::new(self.0.clone()).quantile(share)
    }

    /// The mean of all samples, which one disturbed run changes; for durations that are added up.
    pub fn mean(&self) -> f64 {
        Data::new(self.0.clone()).mean().unwrap_or(f64::NAN)
    }

    /// The mean of the middle half: without the lowest and the highest quarter. A sample at the
    /// edge of the half counts by the part of it that is inside.
    pub(crate) fn middle_mean(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let n = sorted.len() as f64;
        let inside = |i: usize| ((i as f64 + 1.0).min(0.75 * n) - (i as f64).max(0.25 * n)).max(0.0);
        sorted.iter().enumerate().map(|(i, sample)| sample * inside(i)).sum::<f64>() / (0.5 * n)
    }

    /// The standard deviation of a normal distribution with this median distance from the median;
    /// NaN of fewer than two samples.
    pub(crate) fn robust_deviation(&self) -> f64 {
        let median = self.median();
        let distances: Samples = self.iter().map(|sample| (sample - median).abs()).collect();
        if self.len() < 2 { f64::NAN } else { distances.median() * DEVIATIONS_OF_DISTANCE }
    }

    /// The standard deviation of all samples; NaN of fewer than two.
    fn deviation(&self) -> f64 {
        Data::new(self.0.clone()).std_dev().unwrap_or(f64::NAN)
    }

    pub fn least(&self) -> f64 {
        self.iter().fold(f64::NAN, f64::min)
    }

    pub fn most(&self) -> f64 {
        self.iter().fold(f64::NAN, f64::max)
    }

    /// Whether the samples differ so much that they show nothing: their robust deviation is above
    /// the mean of their middle half.
    pub(crate) fn is_noisy(&self) -> bool {
        self.robust_deviation() > self.middle_mean().abs()
    }

    /// Whether some samples are so far off that all deviate by more than their mean, although most
    /// do not.
    pub(crate) fn has_outliers(&self) -> bool {
        !self.is_noisy() && self.deviation() > self.mean().abs()
    }

    /// The ratio of each sample to that of `base` in the same run, for the runs that both have. It
    /// holds when the speed of the machine drifts.
    pub fn paired_ratios(&self, base: &Samples) -> Samples {
        self.iter().zip(base.iter()).filter(|&(_, base)| base > 0.0).map(|(sample, base)| sample / base).collect()
    }

    /// The variance of the median on a scale, by Maritz and Jarrett, corrected for few samples.
    fn median_variance(&self, scale: impl Fn(f64) -> f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        if sorted.first() == sorted.last() {
            return 0.0;
        }
        let n = sorted.len() as f64;
        // The median of a bootstrap sample is the i-th smallest sample with this probability.
        let rank = (n + 1.0) / 2.0;
        let below = |i: usize| if i == 0 { 0.0 } else { beta_reg(rank, rank, (i as f64 / n).min(1.0)) };
        let weighted: Vec<(f64, f64)> =
            sorted.iter().enumerate().map(|(i, &sample)| (below(i + 1) - below(i), scale(sample))).collect();
        let mean: f64 = weighted.iter().map(|(weight, sample)| weight * sample).sum();
        let variance: f64 = weighted.iter().map(|(weight, sample)| weight * (sample - mean).powi(2)).sum();
        variance * n / (n - 1.0)
    }
}

impl FromIterator<f64> for Samples {
    fn from_iter<I: IntoIterator<Item = f64>>(samples: I) -> Samples {
        Samples(samples.into_iter().collect())
    }
}

/// A ratio of medians.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Ratio {
    pub value: f64,
    /// Its confidence interval; `None`: a side has one run only.
    pub interval: Option<[f64; 2]>,
}

/// The ratio of the median of `of` to that of `to`; `None` unless all samples are above zero.
pub fn ratio(of: &Samples, to: &Samples, confidence: f64) -> Option<Ratio> {
    if of.is_empty() || to.is_empty() || of.iter().chain(to.iter()).any(|sample| sample <= 0.0) {
        return None;
    }
    let value = of.median() / to.median();
    let interval = margin(of, to, confidence, f64::ln).map(|margin| [value * (-margin).exp(), value * margin.exp()]);
    Some(Ratio { value, interval })
}

/// Half of the width of the interval of the difference of two medians; `None` with one run only.
fn margin(one: &Samples, other: &Samples, confidence: f64, scale: fn(f64) -> f64) -> Option<f64> {
    if one.len() < 2 || other.len() < 2 {
        return None;
    }
    let [a, b] = [one, other].map(|samples| samples.median_variance(scale));
    if a + b == 0.0 {
        // Each is the same in all of its runs.
        return Some(0.0);
    }
    let [a_freedom, b_freedom] = [one, other].map(|samples| samples.len() as f64 - 1.0);
    let freedom = (a + b).powi(2) / (a.powi(2) / a_freedom + b.powi(2) / b_freedom);
    let student = StudentsT::new(0.0, 1.0, freedom).ok()?;
    Some(student.inverse_cdf((1.0 + confidence) / 2.0) * (a + b).sqrt())
}

/// Whether a claim holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// The ratio lies above the claim.
    Held,
    /// This machine cannot tell.
    Tie,
    /// The ratio lies below.
    Lost,
}

/// Judges the claim that the ratio of `of` to `to` is above `above`: see the head of the module.
pub fn judge(above: f64, of: &Samples, to: &Samples) -> Verdict {
    let Some(Ratio { interval: Some([low, high]), .. }) = ratio(of, to, CONFIDENCE) else { return Verdict::Tie };
    let ratio_of_means = of.middle_mean() / to.middle_mean();
    if of.is_noisy() || to.is_noisy() {
        Verdict::Tie
    } else if low > above && ratio_of_means > above {
        Verdict::Held
    } else if high < above && ratio_of_means < above {
        Verdict::Lost
    } else {
        Verdict::Tie
    }
}

/// The significance of a difference between two medians.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Difference {
    BeyondNoise,
    /// The noise is unknown: one run only.
    Unknown,
    WithinNoise,
    /// The medians are equal.
    Same,
}

/// Whether the medians differ by more than the noise, with [`CONFIDENCE_OF_MANY`].
pub fn difference(one: &Samples, other: &Samples) -> Difference {
    let (a, b) = (one.median(), other.median());
    if a == b {
        return Difference::Same;
    }
    let is_positive = one.iter().chain(other.iter()).all(|sample| sample > 0.0);
    let scale: fn(f64) -> f64 = if is_positive { f64::ln } else { |sample| sample };
    match margin(one, other, CONFIDENCE_OF_MANY, scale) {
        None => Difference::Unknown,
        Some(margin) if (scale(a) - scale(b)).abs() > margin => Difference::BeyondNoise,
        Some(_) => Difference::WithinNoise,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(samples: &[f64]) -> Samples {
        samples.iter().copied().collect()
    }

    #[test]
    fn statistics_of_known_samples() {
        let eight = samples(&[9.0, 4.0, 4.0, 2.0, 5.0, 5.0, 7.0, 4.0]);
        assert_eq!((eight.len(), eight.mean(), eight.median()), (8, 5.0, 4.5));
        assert_eq!((eight.least(), eight.most()), (2.0, 9.0));
        assert!((eight.deviation() - 2.138).abs() < 1e-3 && !eight.is_noisy());
        let [low, high] = eight.quartiles();
        assert!(low == 4.0 && (6.0..=7.0).contains(&high), "{low} {high}");
        // Five are 0.5 from the median.
        assert_eq!(eight.robust_deviation(), 0.5 * DEVIATIONS_OF_DISTANCE);
        // 4, 4, 5, 5 of 2, 4, 4, 4, 5, 5, 7, 9.
        assert_eq!(eight.middle_mean(), 4.5);
        // The middle one, and a quarter of each other.
        assert_eq!(samples(&[9.0, 3.0, 2.0]).middle_mean(), (0.25 * 2.0 + 3.0 + 0.25 * 9.0) / 1.5);
        let none = Samples::default();
        assert!([none.median(), none.mean(), none.deviation(), none.least()].iter().all(|value| value.is_nan()));
        assert!(none.middle_mean().is_nan() && none.robust_deviation().is_nan() && !none.is_noisy());
        let one = samples(&[3.0]);
        assert_eq!((one.median(), one.quartiles(), one.mean(), one.is_noisy()), (3.0, [3.0; 2], 3.0, false));
        assert_eq!(one.middle_mean(), 3.0);
    }

    /// Fifty runs of about `value`, of which the last `slow` took a thousand times as long.
    fn fifty(value: f64, slow: usize) -> Samples {
        (0..50).map(|run| value * (1.0 + 0.002 * run as f64) * if run >= 50 - slow { 1000.0 } else { 1.0 }).collect()
    }

    #[test]
    fn a_preempted_run_is_an_outlier_and_no_noise() {
        assert!(!fifty(1.0, 0).has_outliers() && !fifty(1.0, 0).is_noisy());
        for slow in [1, 5, 12] {
            assert!(fifty(1.0, slow).has_outliers() && !fifty(1.0, slow).is_noisy(), "{slow}");
            assert!(fifty(1.0, slow).middle_mean() < 1.2, "{slow}");
        }
        // One of few runs is no noise either; half of the runs are no exception.
        assert!(samples(&[1.0, 1.1, 0.9, 1.0, 50.0]).has_outliers());
        assert!(samples(&[1.0, 1.1, 50.0]).has_outliers());
        assert!(fifty(1.0, 25).is_noisy() && !fifty(1.0, 25).has_outliers());
    }

    #[test]
    fn an_outlier_neither_vetoes_a_verdict_nor_makes_one() {
        for slow in [0, 1, 5, 12] {
            assert_eq!(judge(1.0, &fifty(5.0, 0), &fifty(1.0, slow)), Verdict::Held, "{slow}");
            assert_eq!(judge(1.0, &fifty(1.0, slow), &fifty(5.0, 0)), Verdict::Lost, "{slow}");
            assert_eq!(judge(1.0, &fifty(1.0, slow), &fifty(1.0, 0)), Verdict::Tie, "{slow}");
        }
        // The means contradict the medians; half of the runs are noise.
        assert_eq!(judge(1.0, &fifty(1.0, 17), &fifty(5.0, 0)), Verdict::Tie);
        assert_eq!(judge(1.0, &fifty(5.0, 25), &fifty(1.0, 0)), Verdict::Tie);
        assert_eq!(judge(4.0, &fifty(5.0, 0), &fifty(1.0, 0)), Verdict::Held);
        assert_eq!(judge(1.0, &samples(&[5.0]), &fifty(1.0, 0)), Verdict::Tie);
        assert_eq!(judge(1.0, &samples(&[]), &fifty(1.0, 0)), Verdict::Tie);
    }

    /// Whatever the runs are, no verdict contradicts the means and deviations that are shown.
    #[test]
    fn verdicts_agree_with_means_and_deviations() {
        use rand::rngs::SmallRng;
        use rand::{RngExt, SeedableRng};
        let mut rng = SmallRng::seed_from_u64(7);
        let mut nr_decided = 0;
        for _ in 0..3000 {
            let mut draw = |scale: f64| {
                let nr_runs = rng.random_range(2..20);
                let run = |_| {
                    scale * if rng.random_bool(0.2) { 40.0 * rng.random::<f64>() } else { 0.5 + rng.random::<f64>() }
                };
                (0..nr_runs).map(run).collect::<Samples>()
            };
            let (of, to) = (draw(3.0), draw(1.0));
            let ratio_of_means = of.middle_mean() / to.middle_mean();
            let verdict = judge(1.0, &of, &to);
            nr_decided += usize::from(verdict != Verdict::Tie);
            match verdict {
                Verdict::Held => assert!(ratio_of_means > 1.0),
                Verdict::Lost => assert!(ratio_of_means < 1.0),
                Verdict::Tie => continue,
            }
            assert!([of, to].iter().all(|side| side.robust_deviation() <= side.middle_mean()));
        }
        assert!(nr_decided > 100, "{nr_decided}");
    }

    #[test]
    fn the_variance_of_a_median_is_that_of_its_bootstrap() {
        // Of 27 samples of three, 7 have the least as their median, 13 the middle, 7 the most.
        let three = samples(&[3.0, 1.0, 2.0]);
        assert!((three.median_variance(|sample| sample) - 14.0 / 27.0 * 1.5).abs() < 1e-12);
        assert_eq!(samples(&[5.0, 5.0]).median_variance(|sample| sample), 0.0);
    }

    #[test]
    fn a_ratio_of_few_or_noisy_runs_has_a_wide_interval() {
        let interval =
            |of: &[f64], to: &[f64]| ratio(&samples(of), &samples(to), CONFIDENCE).unwrap().interval.unwrap();
        let few = interval(&[2.0, 2.2, 1.8], &[1.0, 1.1, 0.9]);
        let many = interval(&[2.0, 2.2, 1.8].repeat(10), &[1.0, 1.1, 0.9].repeat(10));
        let noisy = interval(&[2.0, 4.0, 1.0].repeat(10), &[1.0, 1.1, 0.9].repeat(10));
        for [low, high] in [few, many, noisy] {
            assert!(0.0 < low && low < 2.0 && 2.0 < high, "{low} {high}");
        }
        assert!(few[0] < many[0] && many[1] < few[1] && noisy[0] < many[0] && many[1] < noisy[1]);
        assert_eq!(interval(&[8.0, 8.0], &[1.0, 1.0]), [8.0, 8.0]);
        assert_eq!(
            ratio(&samples(&[6.0]), &samples(&[3.0, 3.0]), CONFIDENCE),
            Some(Ratio { value: 2.0, interval: None })
        );
        for (of, to) in [(&[0.0, 1.0][..], &[1.0, 1.0][..]), (&[1.0], &[]), (&[-1.0, 1.0], &[1.0])] {
            assert_eq!(ratio(&samples(of), &samples(to), CONFIDENCE), None);
        }
    }

    /// The interval has the true ratio about as often as it claims.
    #[test]
    fn the_interval_covers_the_true_ratio() {
        use rand::rngs::SmallRng;
        use rand::{RngExt, SeedableRng};
        let mut rng = SmallRng::seed_from_u64(3);
        for nr_runs in [3, 5, 11, 50] {
            let mut nr_covered = 0;
            const NR_TRIALS: usize = 2000;
            for _ in 0..NR_TRIALS {
                // About normal: a sum of twelve.
                let mut draw = || (0..12).map(|_| rng.random::<f64>()).sum::<f64>() - 6.0;
                let mut of = |scale: f64| (0..nr_runs).map(|_| scale * (0.2 * draw()).exp()).collect::<Samples>();
                let [low, high] = ratio(&of(3.0), &of(1.0), CONFIDENCE).unwrap().interval.unwrap();
                nr_covered += usize::from(low <= 3.0 && 3.0 <= high);
            }
            let share = nr_covered as f64 / NR_TRIALS as f64;
            assert!((0.92..=0.995).contains(&share), "{nr_runs} runs: {share}");
        }
    }

    #[test]
    fn differences_are_compared_with_the_noise() {
        let five = |value: f64, noise: f64| samples(&[-2.0, -1.0, 0.0, 1.0, 2.0].map(|step| value + step * noise));
        assert_eq!(difference(&five(1.0, 0.01), &five(1.1, 0.01)), Difference::BeyondNoise);
        assert_eq!(difference(&five(1.0, 0.3), &five(1.4, 0.3)), Difference::WithinNoise);
        assert_eq!(difference(&five(1.0, 0.1), &five(1.0, 0.2)), Difference::Same);
        assert_eq!(difference(&five(0.0, 0.1), &five(5.0, 0.1)), Difference::BeyondNoise);
        assert_eq!(difference(&samples(&[1.0]), &five(5.0, 0.1)), Difference::Unknown);
        assert_eq!(difference(&samples(&[0.0; 3]), &samples(&[7.0; 3])), Difference::BeyondNoise);
    }

    #[test]
    fn paired_ratios_are_of_the_same_runs() {
        assert_eq!(samples(&[2.0, 300.0, 4.0, 9.0]).paired_ratios(&samples(&[1.0, 100.0, 1.0])).median(), 3.0);
        assert!(samples(&[]).paired_ratios(&samples(&[1.0])).is_empty());
    }
}
