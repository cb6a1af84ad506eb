//! The command line of the image: words `name=value`.

use thiserror::Error;

use crate::boot::MAX_CPUS;
use crate::bootargs::FILES;
use crate::host::Control;

/// The guest to run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Guest {
    /// The program that accesses memory at random.
    Suite,
    /// A Linux kernel.
    Linux,
    /// A Linux kernel that goes to another machine.
    Source,
    /// A Linux kernel that comes from another machine.
    Target,
    /// The program by which instructions are counted.
    Measure,
    /// A program that uses what it does not have.
    Wild,
}

/// Whether the page tables of the suite's guest are walked outside of the machine, too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Walker {
    /// They are not.
    None,
    /// By a reader of the machine's memory, who answers.
    Outside,
}

/// What to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// The guest.
    pub guest: Guest,
    /// CPUs that run it.
    pub nr_cpus: usize,
    /// What everything at random follows from.
    pub seed: u64,
    /// Operations of the hypervisor, in all.
    pub nr_operations: u64,
    /// Memory of a Linux guest in MiB.
    pub memory_mib: u64,
    /// What is left out on purpose.
    pub control: Control,
    /// NUMA nodes that the machine must have, if that is said.
    pub nr_nodes: Option<usize>,
    /// Who walks the page tables beside the machine's CPUs.
    pub walker: Walker,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            guest: Guest::Suite,
            nr_cpus: 1,
            seed: 1,
            nr_operations: 100_000,
            memory_mib: 256,
            control: Control::None,
            nr_nodes: None,
            walker: Walker::None,
        }
    }
}

/// A word that makes no sense.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum OptionError<'t> {
    /// It has no `=`, or an unknown name.
    #[error("unknown word on the command line: {0}")]
    Unknown(&'t str),
    /// The value is none of its name.
    #[error("bad value on the command line: {0}")]
    BadValue(&'t str),
}

/// The option for each kind of [`Control`].
const CONTROLS: [(&str, Control); 11] = [
    ("none", Control::None),
    ("no-flush", Control::NoFlush),
    ("no-kick", Control::NoKick),
    ("no-entry-flush", Control::NoEntryFlush),
    ("copy-before-log", Control::CopyBeforeLog),
    ("no-local-flush", Control::NoLocalFlush),
    ("no-break-flush", Control::NoBreakFlush),
    ("flush-before-break", Control::FlushBeforeBreak),
    ("lose-page", Control::LosePage),
    ("no-withhold", Control::NoWithhold),
    ("silent-source", Control::SilentSource),
];

impl Options {
    /// Reads them.
    ///
    /// # Errors
    /// [`OptionError`] names the word.
    pub fn parse(text: &str) -> Result<Options, OptionError<'_>> {
        let mut options = Options::default();
        for word in text.split_whitespace() {
            let (name, value) = word.split_once('=').ok_or(OptionError::Unknown(word))?;
            let bad = OptionError::BadValue(word);
            let number = || value.parse::<u64>().map_err(|_| bad);
            match name {
                "guest" => {
                    options.guest = match value {
                        "suite" => Guest::Suite,
                        "linux" => Guest::Linux,
                        "source" => Guest::Source,
                        "target" => Guest::Target,
                        "measure" => Guest::Measure,
                        "wild" => Guest::Wild,
                        _ => return Err(bad),
                    }
                }
                "cpus" => options.nr_cpus = number()? as usize,
                "seed" => options.seed = number()?,
                "operations" => options.nr_operations = number()?,
                "nodes" => options.nr_nodes = Some(number()? as usize),
                "memory" => options.memory_mib = number()?,
                "control" => {
                    let found = CONTROLS.iter().find(|(name, _)| *name == value);
                    options.control = found.ok_or(bad)?.1;
                }
                "walker" if value == "outside" => options.walker = Walker::Outside,
                "walker" => return Err(bad),
                // Read by the loader.
                _ if FILES.contains(&name) => {}
                _ => return Err(OptionError::Unknown(word)),
            }
            if !(1..=MAX_CPUS).contains(&options.nr_cpus) || !(64..=2048).contains(&options.memory_mib) {
                return Err(bad);
            }
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_and_others_refused() {
        let options = Options::parse("guest=linux cpus=4 seed=7 operations=10 memory=128 control=no-flush").unwrap();
        assert_eq!((options.guest, options.nr_cpus, options.seed), (Guest::Linux, 4, 7));
        assert_eq!((options.nr_operations, options.memory_mib, options.control), (10, 128, Control::NoFlush));
        for (name, guest) in [("source", Guest::Source), ("target", Guest::Target)] {
            let text = alloc::format!("guest={name} control=lose-page");
            let options = Options::parse(&text).unwrap();
            assert_eq!((options.guest, options.control), (guest, Control::LosePage));
        }
        assert_eq!(Options::parse("guest=measure kernel=0x1000,1").unwrap().guest, Guest::Measure);
        assert_eq!(Options::parse("nodes=2").map(|options| options.nr_nodes), Ok(Some(2)));
        assert_eq!(Options::parse("walker=outside").map(|options| options.walker), Ok(Walker::Outside));
        assert_eq!(Options::parse(""), Ok(Options::default()));
        for bad in ["cpus=0", "cpus=9", "cpus=-1", "seed=x", "guest=", "memory=1", "control=all", "walker=inside"] {
            assert_eq!(Options::parse(bad), Err(OptionError::BadValue(bad)), "{bad}");
        }
        for unknown in ["quiet", "cpu=1", "=1"] {
            assert_eq!(Options::parse(unknown), Err(OptionError::Unknown(unknown)), "{unknown}");
        }
    }
}
