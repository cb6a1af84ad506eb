//! The version of the model, which a printed seed names.
//!
//! # Guarantees
//! A seed that another version has printed is refused, since its run would be another one. (The
//! engine is no part of the version: a run is the same only with the same engine, too.)
//!
//! # Use
//! Parameters and topologies are frozen. To change them, append their new hash to `FROZEN`: a test
//! prints it, and the version rises with the length. To change what the model does with them,
//! append the last hash again.

use std::fmt;
use std::num::ParseIntError;
use std::str::FromStr;

use thiserror::Error;

/// The hash of the parameters and topologies of each version, from the first on.
const FROZEN: [u64; 1] = [0x3056_53b7_03a6_4e95];

/// The version of the model and its parameters.
pub const VERSION: usize = FROZEN.len();

/// What decides all that is random in a run of this version.
///
/// It is printed with the version, as `v1:7`, and read with or without.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seed(pub u64);

/// Why a text is no seed of this version.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum SeedError {
    /// It is none of any version.
    #[error("{0}")]
    NoNumber(#[from] ParseIntError),
    /// Another version has printed it.
    #[error("a seed of version {version} of the model, and this is version {VERSION}; choose a plain number")]
    OtherVersion {
        /// The version that it names.
        version: usize,
    },
}

impl fmt::Display for Seed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v{VERSION}:{}", self.0)
    }
}

impl FromStr for Seed {
    type Err = SeedError;

    fn from_str(text: &str) -> Result<Seed, SeedError> {
        let number = match text.strip_prefix('v').and_then(|rest| rest.split_once(':')) {
            Some((version, number)) => match version.parse()? {
                VERSION => number,
                version => return Err(SeedError::OtherVersion { version }),
            },
            None => text,
        };
        Ok(Seed(number.parse()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{parameters, topology};

    /// FNV-1a of all lines but comments, which change nothing.
    fn hash<'a>(files: impl IntoIterator<Item = &'a str>) -> u64 {
        let lines = files.into_iter().flat_map(str::lines).map(str::trim);
        let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
        lines
            .flat_map(|line| line.bytes().chain(*b"\n"))
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
    }

    #[test]
    fn parameters_and_topologies_change_with_the_version_only() {
        let topologies = topology::BUILT_IN.map(|(_, text)| text);
        let now = hash(std::iter::once(parameters::BUILT_IN).chain(topologies));
        assert_eq!(FROZEN.last(), Some(&now), "they have changed: append {now:#x} to FROZEN");
    }

    #[test]
    fn comments_change_nothing_and_numbers_do() {
        let of = |text| hash([text]);
        assert_eq!(of("a = 1\n# one\n\nb = 2\n"), of("a = 1\nb = 2\n"));
        assert_ne!(of("a = 1\nb = 2\n"), of("a = 1\nb = 3\n"));
    }

    #[test]
    fn a_seed_of_another_version_is_refused() {
        assert_eq!(["7", &Seed(7).to_string()].map(str::parse), [Ok(Seed(7)), Ok(Seed(7))]);
        let other = format!("v{}:7", VERSION + 1).parse::<Seed>();
        assert_eq!(other, Err(SeedError::OtherVersion { version: VERSION + 1 }));
        for bad in ["", "-1", "v:7", "vx:7", "v1", "v1:", "v1:x", "1:7", "18446744073709551616"] {
            assert!(matches!(bad.parse::<Seed>(), Err(SeedError::NoNumber(_))), "{bad}");
        }
    }
}
