//! What repeated measurements say: medians with their spread, and ratios of two systems that ran by
//! turns, with an interval.

use serde::Serialize;
use statrs::distribution::{ContinuousCDF, StudentsT};

/// Of the intervals.
pub const CONFIDENCE: f64 = 0.95;

/// A median with its spread.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// The middle.
    pub median: f64,
    /// The first and the third quartile.
    pub quartiles: [f64; 2],
    /// The least and the most.
    pub range: [f64; 2],
}

/// How one system compares with another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ratio {
    /// The geometric mean of the ratios of each round.
    pub ratio: f64,
    /// Where it is with [`CONFIDENCE`]. `None`: one round has no spread.
    pub interval: Option<[f64; 2]>,
}

/// Of `samples`; `None` if there are none.
pub fn summary(samples: &[f64]) -> Option<Summary> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (least, most) = (*sorted.first()?, *sorted.last()?);
    let quantile = |share: f64| {
        let at = share * (sorted.len() - 1) as f64;
        let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
        low + (high - low) * at.fract()
    };
    Some(Summary { median: quantile(0.5), quartiles: [quantile(0.25), quantile(0.75)], range: [least, most] })
}

/// Of `of` to `to`, whose samples are of the same rounds; `None` if they are not, or not positive.
///
/// The logarithms of ratios are about normal: the interval is Student's of their mean.
pub fn ratio(of: &[f64], to: &[f64]) -> Option<Ratio> {
    let is_usable = of.len() == to.len() && !of.is_empty() && of.iter().chain(to).all(|sample| *sample > 0.0);
    let logarithms: Vec<f64> = is_usable.then(|| of.iter().zip(to).map(|(of, to)| (of / to).ln()).collect())?;
    let nr = logarithms.len() as f64;
    let mean = logarithms.iter().sum::<f64>() / nr;
    let interval = StudentsT::new(0.0, 1.0, nr - 1.0).ok().map(|students| {
        let variance = logarithms.iter().map(|one| (one - mean).powi(2)).sum::<f64>() / (nr - 1.0);
        let half = students.inverse_cdf(0.5 + CONFIDENCE / 2.0) * (variance / nr).sqrt();
        [(mean - half).exp(), (mean + half).exp()]
    });
    Some(Ratio { ratio: mean.exp(), interval })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_has_the_middle_and_the_ends() {
        let found = summary(&[4.0, 1.0, 2.0, 3.0, 5.0]).unwrap();
        assert_eq!(found, Summary { median: 3.0, quartiles: [2.0, 4.0], range: [1.0, 5.0] });
        assert_eq!(summary(&[1.0, 2.0]).unwrap().median, 1.5);
        assert_eq!(summary(&[]), None);
    }

    #[test]
    fn a_ratio_has_an_interval_around_it() {
        let same = ratio(&[2.0, 4.0, 8.0], &[1.0, 2.0, 4.0]).unwrap();
        assert!((same.ratio - 2.0).abs() < 1e-12);
        assert!(same.interval.unwrap().iter().all(|end| (end - 2.0).abs() < 1e-9));
        let spread = ratio(&[1.0, 2.0, 3.0], &[1.0, 1.0, 1.0]).unwrap();
        let [low, high] = spread.interval.unwrap();
        // Student's t for two degrees of freedom is 4.303; the logarithms have mean 0.5973,
        // deviation 0.5556.
        assert!((low - (0.597_25_f64 - 4.302_65 * 0.555_55 / 3_f64.sqrt()).exp()).abs() < 1e-3, "{low}");
        assert!(low < spread.ratio && spread.ratio < high);
        assert_eq!(ratio(&[1.0], &[2.0]).unwrap().interval, None);
        assert_eq!(ratio(&[1.0], &[0.0]), None);
        assert_eq!(ratio(&[1.0, 2.0], &[1.0]), None);
    }
}
