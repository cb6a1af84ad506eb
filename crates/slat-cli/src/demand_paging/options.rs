//! The options of `slat demand-paging`, and the cases that they name. Short options are those of
//! KVM's test; `-k` is that of the series that adds userfault exits.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use slat::PageSize;
use slat_machine::demand_paging::PagedBacking;
use slat_machine::memory::BackingKind;
use slat_machine::source::{ParseSourceError, PeerAddress, SourceSpec};

use super::case::{Case, Mode, Uffds};
use super::published::{self, Group};
use crate::args::{FormatArg, positive, size_bytes};
use crate::failure::Failure;

/// Memory for each vCPU, as in the published tables.
pub(super) const DEFAULT_BYTES_PER_VCPU: u64 = 64 << 20;

/// The options of `slat demand-paging`.
#[derive(Clone, Debug, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Example: slat demand-paging -v 8 -b 16M -u MISSING -k",
    after_long_help = "Example: slat demand-paging -v 8 -b 16M -u MISSING -k\n\
                  Example: slat demand-paging --matrix --vcpus 2,8 -b 1M --modes none,missing,uf"
)]
pub(crate) struct DemandPagingArgs {
    /// Numbers of vCPUs [default: 4; with --matrix 2,8,64].
    ///
    /// Run one after the other.
    #[arg(short = 'v', long, value_delimiter = ',', value_parser = positive::<usize>, value_name = "N,...")]
    pub(crate) vcpus: Option<Vec<usize>>,
    /// Memory for each vCPU [default: 64M].
    ///
    /// In bytes, or with K, M, G or T behind the number; a multiple of the page size. By default
    /// less than 64M where not so much fits.
    #[arg(short = 'b', long, value_name = "SIZE", value_parser = size_bytes)]
    pub(crate) bytes: Option<u64>,
    /// Kind of memory, e.g. shmem.
    ///
    /// One of anonymous, anonymous_thp, anonymous_hugetlb_2mb, anonymous_hugetlb_1gb, shmem,
    /// guest_memfd.
    #[arg(short = 's', long, value_name = "KIND", default_value = "anonymous")]
    pub(crate) backing: PagedBacking,
    /// Whether a memory file may replace `-s guest_memfd`.
    ///
    /// Where /dev/kvm has none.
    #[arg(long, value_name = "WHICH", value_enum, default_value_t = GuestMemfdArg::Any, hide_short_help = true)]
    pub(crate) guest_memfd: GuestMemfdArg,
    /// All vCPUs access all memory, instead of a part each.
    #[arg(short = 'o', long, hide_short_help = true)]
    pub(crate) overlap: bool,
    /// Bring pages by userfaultfd.
    ///
    /// MISSING pages are copied; MINOR pages are present in the file and get mapped, which needs
    /// shared memory.
    #[arg(short = 'u', long, value_name = "MODE", value_enum, ignore_case = true)]
    pub(crate) uffd: Option<UffdArg>,
    /// One userfaultfd descriptor for all memory, instead of one for each vCPU.
    ///
    /// `-o` implies it.
    #[arg(short = 'a', long, hide_short_help = true)]
    pub(crate) single_uffd: bool,
    /// Threads that read each descriptor [default: 1].
    #[arg(short = 'r', long, value_name = "N", value_parser = positive::<usize>, hide_short_help = true)]
    pub(crate) readers: Option<usize>,
    /// Bring pages by userfault exits.
    ///
    /// With -u, exits serve the accesses of vCPUs, and userfaultfd those of the process.
    #[arg(short = 'k', long)]
    pub(crate) userfault: bool,
    /// Delivery of requests.
    ///
    /// By an exit, which the vCPU's own thread serves; or through rings in shared memory, which a
    /// resolver serves (needs -k and memory that is shared).
    #[arg(long, value_name = "HOW", value_enum, default_value_t = DeliveryArg::Exit)]
    pub(crate) delivery: DeliveryArg,
    /// Where the resolver of `--delivery ring` runs.
    #[arg(long, value_name = "WHERE", value_enum, default_value_t = ResolverArg::Process, hide_short_help = true)]
    pub(crate) resolver: ResolverArg,
    /// Kill the resolver process so many times, and start another.
    ///
    /// Each at a random moment.
    #[arg(long, default_value_t = 0, value_name = "N", hide_short_help = true)]
    pub(crate) kill_resolver: u32,
    /// Delay of the source, in microseconds.
    ///
    /// Of each page; the delays of several pages overlap.
    #[arg(short = 'd', long = "delay", default_value_t = 0, value_name = "USEC", value_parser = clap::value_parser!(u64).range(0..=5_000_000))]
    pub(crate) delay_us: u64,
    /// Memory of one bit of the userfault bitmap, and of one fill.
    #[arg(long, value_name = "SIZE", value_enum, default_value_t = GranularityArg::Size4K, ignore_case = true, hide_short_help = true)]
    pub(crate) granularity: GranularityArg,
    /// Source of pages, e.g. file:PATH.
    ///
    /// `pattern` or `constant:BYTE` is generated; `file:PATH`; a peer behind a socket, `unix:PATH`
    /// or `tcp:127.0.0.1:PORT`. With `unix` or `tcp` alone, the command itself is the peer.
    #[arg(long, default_value = "pattern", value_parser = source, value_name = "SOURCE")]
    pub(crate) source: SourceArg,
    /// Contents of a file's or a peer's pages: `pattern:SEED` or `constant:BYTE`.
    ///
    /// All that arrives is verified against it.
    #[arg(long, default_value = "pattern", value_parser = contents, value_name = "SOURCE", hide_short_help = true)]
    pub(crate) contents: SourceSpec,
    /// Write this file first, with enough pages of `--contents` for `--source file:PATH`.
    ///
    /// It must not exist yet.
    #[arg(long, value_name = "PATH", hide_short_help = true)]
    pub(crate) create_source: Option<PathBuf>,
    /// Run nothing: serve the pages of `--contents` at this address.
    ///
    /// `unix:PATH` or `tcp:127.0.0.1:PORT`, until interrupted.
    #[arg(long, value_name = "ADDRESS", value_parser = address, hide_short_help = true)]
    pub(crate) serve: Option<PeerAddress>,
    /// Bring other pages in the background.
    ///
    /// Pages without a request. Requests of vCPUs have priority.
    #[arg(long)]
    pub(crate) copier: bool,
    /// Log dirty pages while paging, and hold the log against memory.
    #[arg(long, hide_short_help = true)]
    pub(crate) log_dirty: bool,
    /// Run the rows of the published tables.
    ///
    /// And print the published figures: of x86, or with `--format stage2` of arm64.
    #[arg(long, conflicts_with_all = ["uffd", "single_uffd", "userfault", "delivery", "backing", "overlap", "granularity", "guest_memfd"])]
    pub(crate) matrix: bool,
    /// Of the matrix, only such rows as missing or uf.
    ///
    /// Of none, missing, missing-1r, missing+uf, minor, minor-1r, minor+uf, uf, uf-ring.
    #[arg(long, value_delimiter = ',', value_parser = mode, value_name = "MODE,...")]
    pub(super) modes: Option<Vec<Mode>>,
    /// Host threads that run the vCPUs [default: the runner's choice].
    ///
    /// In turns when they are fewer.
    #[arg(long, value_parser = positive::<usize>, value_name = "N", hide_short_help = true)]
    pub(crate) threads: Option<usize>,
    /// Pin vCPUs to CPUs: one for each, and perhaps one for the main thread.
    #[arg(short = 'c', long = "pin", value_delimiter = ',', value_name = "CPU,...", hide_short_help = true)]
    pub(crate) cpus: Option<Vec<u32>>,
    /// Format of the second-stage tables.
    #[arg(long, value_enum, default_value_t = FormatArg::Npt)]
    pub(crate) format: FormatArg,
    /// Runs of which the median is taken [default: 1 or 3].
    ///
    /// Of each row: 1, or 3 with --matrix. Those of different rows take turns.
    #[arg(short = 'i', long = "runs", alias = "iterations", value_parser = positive::<u32>, value_name = "N")]
    pub(crate) iterations: Option<u32>,
    /// Seed of the random choices.
    ///
    /// Of the moments at which the resolver is killed.
    #[arg(long, value_name = "N", default_value_t = 1, hide_short_help = true)]
    pub(crate) seed: u64,
    /// Write the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum UffdArg {
    #[value(name = "MISSING")]
    Missing,
    #[value(name = "MINOR")]
    Minor,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum DeliveryArg {
    Exit,
    Ring,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum ResolverArg {
    /// In a thread of this process.
    Thread,
    /// In another process.
    Process,
}

impl ResolverArg {
    /// The name in options and results.
    pub(super) fn name(self) -> &'static str {
        match self {
            ResolverArg::Thread => "thread",
            ResolverArg::Process => "process",
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum GuestMemfdArg {
    Any,
    /// Only a real one.
    Kvm,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum GranularityArg {
    #[value(name = "4K")]
    Size4K,
    #[value(name = "2M")]
    Size2M,
}

impl GranularityArg {
    pub(super) fn page_size(self) -> PageSize {
        match self {
            GranularityArg::Size4K => PageSize::Size4K,
            GranularityArg::Size2M => PageSize::Size2M,
        }
    }
}

/// Where contents come from.
#[derive(Clone, Debug)]
pub(crate) enum SourceArg {
    /// An existing or a generated source.
    Given(SourceSpec),
    /// The command itself is the peer, at a new path.
    OwnUnix,
    /// The command itself is the peer, on loopback.
    OwnTcp,
}

impl SourceArg {
    /// As it is written in options.
    pub(super) fn name(&self) -> String {
        match self {
            SourceArg::Given(spec) => spec.to_string(),
            SourceArg::OwnUnix => "unix".to_owned(),
            SourceArg::OwnTcp => "tcp".to_owned(),
        }
    }
}

fn source(text: &str) -> Result<SourceArg, String> {
    match text {
        "unix" => Ok(SourceArg::OwnUnix),
        "tcp" => Ok(SourceArg::OwnTcp),
        _ => text.parse().map(SourceArg::Given).map_err(|error: ParseSourceError| error.to_string()),
    }
}

fn contents(text: &str) -> Result<SourceSpec, String> {
    match text.parse::<SourceSpec>() {
        Ok(spec) if spec.contents().is_some() => Ok(spec),
        _ => Err("there are pattern[:SEED], constant:BYTE".to_owned()),
    }
}

fn address(text: &str) -> Result<PeerAddress, String> {
    text.parse().map_err(|error: ParseSourceError| error.to_string())
}

fn mode(text: &str) -> Result<Mode, String> {
    let known = || Mode::ALL.map(Mode::name).join(", ");
    Mode::ALL.into_iter().find(|mode| mode.name() == text).ok_or_else(|| format!("there are {}", known()))
}

impl DemandPagingArgs {
    /// The numbers of vCPUs to run.
    pub(super) fn nr_vcpus(&self) -> &[usize] {
        match &self.vcpus {
            Some(vcpus) => vcpus,
            None if self.matrix => &published::VCPUS,
            None => &[4],
        }
    }

    /// Runs of each case.
    pub(super) fn nr_runs(&self) -> u32 {
        self.iterations.unwrap_or(if self.matrix { 3 } else { 1 })
    }

    /// The published tables whose rows are run.
    pub(super) fn groups(&self) -> &'static [Group] {
        if self.format.name() == "stage2" { &published::ARM64 } else { &published::X86 }
    }

    /// Whether the published figures are of this format's architecture.
    pub(super) fn published_on(&self) -> Option<&'static str> {
        match self.format.name() {
            "npt" | "ept" => Some("x86"),
            "stage2" => Some("arm64"),
            _ => None,
        }
    }

    /// Refuses combinations of options that exclude each other.
    pub(super) fn check(&self) -> Result<(), Failure> {
        let refuse = |what: &str| Err(Failure::Usage(what.to_owned()));
        if self.cpus.is_some() && self.nr_vcpus().len() != 1 {
            return refuse("--pin has a CPU for each vCPU: choose one number of vCPUs");
        }
        if self.cpus.is_some() && self.threads.is_some() {
            return refuse("--pin and --threads: a vCPU that is pinned has its own thread; choose one");
        }
        if self.kill_resolver > 0 && (self.delivery != DeliveryArg::Ring || self.resolver != ResolverArg::Process) {
            return refuse("--kill-resolver needs --delivery ring with --resolver process; add them");
        }
        if self.kill_resolver > 0 && self.log_dirty {
            return refuse("--kill-resolver and --log-dirty: rounds that are logged are not interrupted; choose one");
        }
        if self.matrix {
            return if self.readers.is_some() {
                refuse("--matrix has rows of one reader and of many, not -r; leave it out")
            } else {
                Ok(())
            };
        }
        if self.modes.is_some() {
            return refuse("--modes chooses rows of --matrix; add it");
        }
        if self.readers.is_some() && self.uffd.is_none() {
            return refuse("-r: there is no descriptor to read without -u; add it");
        }
        if self.delivery == DeliveryArg::Ring {
            if !self.userfault {
                return refuse("--delivery ring delivers userfault requests: it needs -k; add it");
            }
            if self.uffd.is_some() {
                return refuse(
                    "--delivery ring and -u: the resolver of the rings does not read userfaultfd; choose one",
                );
            }
            if !self.is_shared() {
                return refuse("--delivery ring needs memory that the resolver can map; choose -s shmem");
            }
        }
        if self.uffd == Some(UffdArg::Minor) && !self.is_shared() {
            return Err(Failure::Usage(format!(
                "-u MINOR needs memory that is present and not mapped, so shared memory (-s shmem); {} is private",
                self.backing
            )));
        }
        Ok(())
    }

    /// Whether the memory can have a second mapping.
    fn is_shared(&self) -> bool {
        self.backing == PagedBacking::Memory(BackingKind::Shmem)
    }

    /// The mode that the options name; not with `--matrix`.
    fn mode(&self) -> Mode {
        let is_one_reader = self.uffds() == Uffds::One && self.readers.unwrap_or(1) == 1;
        match (self.uffd, self.userfault) {
            (None, false) => Mode::None,
            (None, true) if self.delivery == DeliveryArg::Ring => Mode::Ring,
            (None, true) => Mode::Exits,
            (Some(UffdArg::Missing), true) => Mode::MissingAndExits,
            (Some(UffdArg::Minor), true) => Mode::MinorAndExits,
            (Some(UffdArg::Missing), false) if is_one_reader => Mode::MissingOneReader,
            (Some(UffdArg::Missing), false) => Mode::Missing,
            (Some(UffdArg::Minor), false) if is_one_reader => Mode::MinorOneReader,
            (Some(UffdArg::Minor), false) => Mode::Minor,
        }
    }

    fn uffds(&self) -> Uffds {
        // With overlapping accesses a vCPU has no part of the memory.
        if self.single_uffd || self.overlap { Uffds::One } else { Uffds::PerVcpu }
    }

    /// The cases for `nr_vcpus`, in the order of the tables.
    pub(super) fn cases(&self, nr_vcpus: usize, bytes_per_vcpu: u64) -> Vec<Case> {
        if !self.matrix {
            let nr_readers = self.readers.unwrap_or(1);
            let (mode, backing, uffds) = (self.mode(), self.backing, self.uffds());
            return vec![Case { mode, nr_vcpus, bytes_per_vcpu, backing, uffds, nr_readers }];
        }
        let is_wanted = |mode: Mode| self.modes.as_ref().is_none_or(|modes| modes.contains(&mode));
        let case = |group: &Group, mode: Mode| {
            // One reader or as many as vCPUs; with a descriptor for each vCPU, one for each of
            // these.
            let many = if group.uffds == Uffds::One { nr_vcpus } else { 1 };
            let nr_readers = if matches!(mode, Mode::Missing | Mode::Minor) { many } else { 1 };
            Case { mode, nr_vcpus, bytes_per_vcpu, backing: group.backing, uffds: group.uffds, nr_readers }
        };
        let rows = self.groups().iter().flat_map(|group| group.rows.iter().map(move |row| (group, row.mode)));
        rows.filter(|&(_, mode)| is_wanted(mode)).map(|(group, mode)| case(group, mode)).collect()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Command {
        #[command(flatten)]
        args: DemandPagingArgs,
    }

    fn parse(line: &str) -> DemandPagingArgs {
        Command::try_parse_from(std::iter::once("slat").chain(line.split_whitespace())).unwrap().args
    }

    /// The mode, the descriptors and the readers of the one case.
    fn the_case(line: &str) -> (&'static str, &'static str, usize) {
        let args = parse(line);
        args.check().unwrap();
        let [case] = args.cases(8, 4096)[..] else { panic!("{line}: not one case") };
        (case.mode.name(), case.uffds.name(), case.nr_readers)
    }

    #[test]
    fn options_of_the_selftest_name_a_mode() {
        for (line, expected) in [
            ("", ("none", "per-vcpu", 1)),
            ("-a", ("none", "one", 1)),
            ("-u MISSING", ("missing", "per-vcpu", 1)),
            ("-u missing -a", ("missing-1r", "one", 1)),
            ("-u MISSING -o", ("missing-1r", "one", 1)),
            ("-u MISSING -a -r 8", ("missing", "one", 8)),
            ("-u MISSING -a -k", ("missing+uf", "one", 1)),
            ("-u MINOR -s shmem", ("minor", "per-vcpu", 1)),
            ("-u MINOR -s shmem -a", ("minor-1r", "one", 1)),
            ("-u MINOR -s shmem -k -r 3", ("minor+uf", "per-vcpu", 3)),
            ("-k", ("uf", "per-vcpu", 1)),
            ("-k -a -s shmem --delivery ring", ("uf-ring", "one", 1)),
        ] {
            assert_eq!(the_case(line), expected, "{line}");
        }
    }

    #[test]
    fn the_matrix_has_the_rows_of_the_published_tables() {
        let args = parse("--matrix");
        assert_eq!((args.nr_vcpus(), args.nr_runs()), (&[2, 8, 64][..], 3));
        let cases = args.cases(64, 4096);
        assert_eq!(cases.len(), 5 + 6 + 5);
        let readers = |mode: Mode, uffds: Uffds| {
            cases.iter().find(|case| case.mode == mode && case.uffds == uffds).unwrap().nr_readers
        };
        assert_eq!(readers(Mode::MissingOneReader, Uffds::One), 1);
        assert_eq!(readers(Mode::Missing, Uffds::One), 64);
        assert_eq!(readers(Mode::Minor, Uffds::One), 64);
        assert_eq!(readers(Mode::Minor, Uffds::PerVcpu), 1);
        let args = parse("--matrix --vcpus 256,400 --modes none,uf -i 5");
        assert_eq!((args.nr_vcpus(), args.nr_runs()), (&[256, 400][..], 5));
        assert_eq!(args.cases(256, 4096).len(), 6);
        assert_eq!((args.published_on(), parse("--format ept").published_on()), (Some("x86"), Some("x86")));
    }

    #[test]
    fn sources_are_named_and_found_again() {
        for text in ["pattern:0", "file:/a:b", "unix", "unix:/run/peer", "tcp", "tcp:127.0.0.1:7000"] {
            assert_eq!(source(text).unwrap().name(), text);
        }
        for bad in ["", "patterns", "file", "unix:", "tcp:", "tcp:here", "http://x"] {
            assert!(source(bad).is_err(), "{bad}");
        }
    }
}
