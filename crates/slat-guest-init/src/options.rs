//! The options: words `slat.NAME=VALUE`.

use std::num::IntErrorKind;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use crate::hypercall::Hypercalls;

/// What is done, and how much of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Options {
    /// `slat.rounds`: after how many rounds it ends.
    pub(crate) rounds: u64,
    /// `slat.seconds`: no round begins after this time.
    pub(crate) longest: Option<Duration>,
    /// `slat.seed`: what pages contain, and what is random.
    pub(crate) seed: u64,
    /// `slat.fill`: the share of the free memory that it keeps, in percent.
    pub(crate) fill: u64,
    /// `slat.pages`: pages of each CPU, at most.
    pub(crate) most_pages: u64,
    /// `slat.files`: the folder of files.
    pub(crate) files: PathBuf,
    /// `slat.hypercalls`.
    pub(crate) hypercalls: Hypercalls,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            rounds: 4,
            longest: None,
            seed: 1,
            fill: 60,
            most_pages: u64::MAX,
            files: PathBuf::from("/tmp"),
            hypercalls: Hypercalls::On,
        }
    }
}

/// An option that cannot be followed.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub(crate) enum OptionError {
    #[error("slat.{name} is no option")]
    Unknown { name: String },
    #[error("{word} is no option; options are slat.NAME=VALUE")]
    NoOption { word: String },
    #[error("slat.{name}={value} is no whole number from {least} to {most}")]
    Number { name: String, value: String, least: u64, most: u64 },
    #[error("slat.hypercalls={value} is neither on nor off")]
    Hypercalls { value: String },
}

impl Options {
    /// The options on the kernel's command line, wherever they are on it. The kernel has the
    /// others.
    pub(crate) fn of_kernel(line: &str) -> Result<Options, OptionError> {
        let mut options = Options::default();
        for word in line.split_whitespace().filter_map(|word| word.strip_prefix("slat.")) {
            options.set(word)?;
        }
        Ok(options)
    }

    /// The options of an ordinary process.
    pub(crate) fn of_arguments(arguments: impl Iterator<Item = String>) -> Result<Options, OptionError> {
        let mut options = Options::default();
        for argument in arguments {
            match argument.strip_prefix("slat.") {
                Some(word) => options.set(word)?,
                None if argument == "--no-hypercalls" => options.hypercalls = Hypercalls::Off,
                None => return Err(OptionError::NoOption { word: argument }),
            }
        }
        Ok(options)
    }

    /// Sets one option, `NAME=VALUE`.
    fn set(&mut self, word: &str) -> Result<(), OptionError> {
        let (name, value) = word.split_once('=').unwrap_or((word, ""));
        let number = |least, most| number(name, value, least, most);
        match name {
            "rounds" => self.rounds = number(1, u64::MAX)?,
            "seconds" => self.longest = Some(Duration::from_secs(number(1, u64::from(u32::MAX))?)),
            "seed" => self.seed = number(0, u64::MAX)?,
            "fill" => self.fill = number(1, 90)?,
            "pages" => self.most_pages = number(1, u64::MAX)?,
            "files" => self.files = PathBuf::from(value),
            "hypercalls" => {
                self.hypercalls = match value {
                    "on" => Hypercalls::On,
                    "off" => Hypercalls::Off,
                    _ => return Err(OptionError::Hypercalls { value: value.to_owned() }),
                }
            }
            _ => return Err(OptionError::Unknown { name: name.to_owned() }),
        }
        Ok(())
    }
}

fn number(name: &str, value: &str, least: u64, most: u64) -> Result<u64, OptionError> {
    let wrong = || OptionError::Number { name: name.to_owned(), value: value.to_owned(), least, most };
    match value.parse::<u64>() {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        Ok(_) => Err(wrong()),
        // More than any number is as good as the most.
        Err(error) if *error.kind() == IntErrorKind::PosOverflow && most == u64::MAX => Ok(most),
        Err(_) => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_found_among_those_of_the_kernel() {
        let line = "console=ttyS0 slat.seconds=7 quiet slat.seed=18446744073709551615 -- slat.rounds=9 slat.fill=5 slat.hypercalls=off\n";
        let options = Options::of_kernel(line).unwrap();
        assert_eq!((options.longest, options.seed), (Some(Duration::from_secs(7)), u64::MAX));
        assert_eq!((options.rounds, options.fill, options.hypercalls), (9, 5, Hypercalls::Off));
        assert_eq!(Options::of_kernel("root=/dev/vda ro").unwrap(), Options::default());
    }

    #[test]
    fn wrong_options_are_named() {
        for (line, expected) in [
            ("slat.rounds=0", "slat.rounds=0 is no whole number from 1 to 18446744073709551615"),
            ("slat.fill=91", "slat.fill=91 is no whole number from 1 to 90"),
            ("slat.seed=-1", "slat.seed=-1 is no whole number from 0 to 18446744073709551615"),
            ("slat.seconds", "slat.seconds= is no whole number from 1 to 4294967295"),
            ("slat.speed=1", "slat.speed is no option"),
            ("slat.hypercalls=maybe", "slat.hypercalls=maybe is neither on nor off"),
        ] {
            assert_eq!(Options::of_kernel(line).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn a_process_has_them_as_arguments() {
        let arguments = |line: &str| Options::of_arguments(line.split_whitespace().map(str::to_owned));
        let options = arguments("--no-hypercalls slat.pages=10 slat.files=/somewhere").unwrap();
        assert_eq!((options.most_pages, options.hypercalls), (10, Hypercalls::Off));
        assert_eq!(options.files, PathBuf::from("/somewhere"));
        assert!(arguments("--rounds 1").is_err());
    }
}
