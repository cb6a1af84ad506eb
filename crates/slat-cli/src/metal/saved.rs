//! KVM's counts of an earlier run. The same emulator, kernel, first process and words count the
//! same again, so a comparison need not wait for that.
//!
//! The file is found before anything is built or started: where there is none, that is all that it
//! takes to say so.

use std::fs;
use std::hash::{DefaultHasher, Hasher};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::emulator::Linux;
use super::measure::Counts;
use super::packages::Emulator;
use super::plan::Plan;
use crate::failure::Failure;

const ADVICE: &str = "slat metal --guest measure counts and saves them, in minutes";

/// What counts depend on.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct CountedOn {
    /// Name and version.
    emulator: String,
    /// The command line of the kernel.
    words: String,
    seed: u64,
    /// A hash of the kernel, its first process and its modules.
    files: u64,
}

impl CountedOn {
    /// A machine of these. Reads the files.
    pub(super) fn new(emulator: &Emulator, plan: &Plan, linux: &Linux) -> Result<CountedOn, Failure> {
        // The same in each run of a program. Another build may hash in another way: then KVM is
        // counted again.
        let mut hasher = DefaultHasher::new();
        for path in [&linux.kernel, &linux.init].into_iter().chain(&linux.modules) {
            let bytes = fs::read(path).map_err(|error| Failure::CannotServe(format!("{}: {error}", path.display())))?;
            hasher.write_usize(bytes.len());
            hasher.write(&bytes);
        }
        Ok(CountedOn { emulator: emulator.name(), words: plan.kvm_words(), seed: plan.seed, files: hasher.finish() })
    }
}

/// The counts in a file.
#[derive(Debug)]
pub(super) struct Saved {
    path: PathBuf,
    counted_on: CountedOn,
    counts: Counts,
}

impl Saved {
    /// Those in the file at `path`, or why there are none.
    pub(super) fn read(path: PathBuf) -> Result<Saved, Failure> {
        let at = path.display();
        let damaged = |why: String| Failure::CannotServe(format!("KVM's counts in {at} are damaged: {why}; {ADVICE}"));
        let bytes = fs::read(&path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => Failure::CannotServe(format!("no counts of KVM are saved in {at}; {ADVICE}")),
            _ => damaged(error.to_string()),
        })?;
        let (counted_on, counts): (_, Counts) =
            serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
        match counts.wrong() {
            None => Ok(Saved { path, counted_on, counts }),
            Some(what) => Err(damaged(what)),
        }
    }

    /// The counts, if they are of `machine`.
    pub(super) fn of(self, machine: &CountedOn) -> Result<Counts, Failure> {
        if self.counted_on == *machine {
            return Ok(self.counts);
        }
        Err(Failure::CannotServe(format!(
            "KVM's counts in {} are of another emulator, kernel, first process or command line; {ADVICE}",
            self.path.display()
        )))
    }
}

/// Saves `counts`. Another run that reads meanwhile finds the old ones, or these.
pub(super) fn write(path: &Path, counted_on: &CountedOn, counts: &Counts) -> io::Result<()> {
    let new = path.with_extension(format!("{}.new", std::process::id()));
    fs::write(&new, serde_json::to_vec(&(counted_on, counts))?)?;
    fs::rename(new, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantity::Unit;

    fn counted_on() -> CountedOn {
        CountedOn { emulator: "QEMU 10.0.2".to_owned(), words: "quiet".to_owned(), seed: 1, files: 7 }
    }

    fn counts() -> Counts {
        Counts(vec![("get_tdp".to_owned(), Unit::Instructions, vec![0.34, 0.34])])
    }

    #[test]
    fn counts_are_those_of_the_same_machine() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("counts");
        let read = |machine: &CountedOn| Saved::read(path.clone())?.of(machine);
        assert!(read(&counted_on()).unwrap_err().to_string().contains("no counts of KVM are saved"));
        write(&path, &counted_on(), &counts()).unwrap();
        assert_eq!(read(&counted_on()).unwrap(), counts());
        for other in [
            CountedOn { emulator: "QEMU 11.0.0".to_owned(), ..counted_on() },
            CountedOn { words: "quiet mitigations=auto".to_owned(), ..counted_on() },
            CountedOn { seed: 2, ..counted_on() },
            CountedOn { files: 8, ..counted_on() },
        ] {
            let line = read(&other).unwrap_err().to_string();
            assert!(line.contains("are of another emulator, kernel"), "{line}");
        }
        // The next ones take their place.
        let others = CountedOn { seed: 2, ..counted_on() };
        write(&path, &others, &counts()).unwrap();
        assert!(read(&others).is_ok() && read(&counted_on()).is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn damaged_counts_are_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("counts");
        write(&path, &counted_on(), &counts()).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        let changed = |from: &str, to: &str| {
            let changed = text.replacen(from, to, 1);
            assert_ne!(changed, text);
            changed
        };
        for damaged in [
            String::new(),
            text[..text.len() / 2].to_owned(),
            text[..text.len() - 1].to_owned(),
            format!("{text}]"),
            changed("0.34,0.34", ""),
            changed("0.34", "-0.34"),
            changed("0.34", "1e999"),
            changed("0.34", "null"),
            changed("0.34", "\"0.34\""),
            changed("instructions", "hours"),
            changed("[\"get_tdp\",\"instructions\",[0.34,0.34]]", ""),
        ] {
            fs::write(&path, &damaged).unwrap();
            let line = Saved::read(path.clone()).unwrap_err().to_string();
            assert!(line.contains("are damaged: ") && line.ends_with(ADVICE), "{damaged}: {line}");
        }
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(Saved::read(path).unwrap_err().to_string().contains("are damaged: "));
    }
}
